"""Which K/V type pairs an engine's CUDA code has attention kernels for, read from the names inside the binary.

Nothing tells: not `--help`, not the version. But a kernel is registered under its mangled name, and that stays in a
stripped binary. A stock release build (0.4.0, CUDA, 159 MB) was read in 0.2 s and showed f16, q4_0, q8_0 and bf16,
each paired with itself, as ggml/src/ggml-cuda/CMakeLists.txt has it with GGML_CUDA_FA_ALL_QUANTS off.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from launcher.structs import Engine
from launcher.units import GGML_TYPES, MIB

# What every build compiles; f32 goes through the f16 kernel.
STOCK = frozenset({("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("q8_0", "q8_0"), ("q4_0", "q4_0")})
_KERNEL = re.compile(rb"flash_attn_ext_vecILi\d+ELi\d+EL9ggml_type(\d+)ELS\d*_(\d+)E")
# The name of the build option in a warning: such a build converts K and V to f16 where a pair was not compiled.
_CONVERTS = b"GGML_CUDA_FA_QUANTS"
_LIBRARY = "libggml-cuda.so"
_PIECE_BYTES = 16 * MIB
_OVERLAP_BYTES = 256  # longer than any name that is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaKernels:
    """What was found in `file`.

    pairs     (K, V) names of KV cache types with a kernel of their own
    converts  True: other pairs are converted to f16 on the card; False: their attention runs on the CPU
    """

    file: str
    pairs: frozenset[tuple[str, str]]
    converts: bool


def cuda_kernels(engine: Engine) -> CudaKernels | None:
    """The kernels of an engine: of the CUDA library beside it, else of the program itself.

    None where neither names any: no CUDA build, or a file that cannot be read. Reads the whole file: ask only about
    pairs that are not STOCK.
    """
    binary = Path(engine.path)
    folders = dict.fromkeys((binary.parent, binary.resolve().parent))
    for path in (*(f / _LIBRARY for f in folders), *(f.parent / "lib" / _LIBRARY for f in folders), binary.resolve()):
        try:
            pairs, converts = _scan(path)
        except OSError:
            continue
        if pairs:
            return CudaKernels(file=str(path), pairs=pairs, converts=converts)
    return None


def _scan(path: Path) -> tuple[frozenset[tuple[str, str]], bool]:
    pairs: set[tuple[str, str]] = set()
    converts, rest = False, b""
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            text = rest + piece
            for k, v in set(_KERNEL.findall(text)):
                names = [GGML_TYPES[int(t)][0].lower() if int(t) in GGML_TYPES else f"type {int(t)}" for t in (k, v)]
                pairs.add((names[0], names[1]))
            converts = converts or _CONVERTS in text
            rest = text[-_OVERLAP_BYTES:]
    return frozenset(pairs), converts
