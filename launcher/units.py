"""Bytes, tokens and versions: parse, format; and the bytes that each GGML type takes.

Only the standard library is imported here: this module is read on every start.
"""

from __future__ import annotations

import re
from types import MappingProxyType

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(B|KiB|MiB|GiB|TiB|K|M|G|T|KB|MB|GB|TB)?\s*$", re.I)
_FACTORS = {
    "": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
    "k": KIB, "m": MIB, "g": GIB, "t": TIB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_TOKENS = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmM])?\s*$")

# id -> (name, elements in a block, bytes of a block), llama.cpp b11434 `ggml/src/ggml.c: type_traits`.
# Pinned to gguf's GGML_QUANT_SIZES by tests/unit/test_units.py: importing gguf costs 0.3 s (it brings numpy).
GGML_TYPES: MappingProxyType[int, tuple[str, int, int]] = MappingProxyType({
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2),
    26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
})  # fmt: skip

# KV cache types that llama.cpp's -ctk/-ctv accept: name -> (block, bytes of a block).
KV_TYPES: MappingProxyType[str, tuple[int, int]] = MappingProxyType({
    "f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "q8_0": (32, 34), "q5_1": (32, 24),
    "q5_0": (32, 22), "q4_1": (32, 20), "q4_0": (32, 18), "iq4_nl": (32, 18),
})  # fmt: skip


def parse_size(text: str) -> int:
    """Bytes of `24GiB`, `24125MiB`, `24 GB`, `1024`; a bare K/M/G/T is binary, as users of memory mean it.

    Raises ValueError with the forms that are understood.
    """
    m = _SIZE.match(text)
    if not m:
        msg = f"not a size: {text!r} (write 24GiB, 512MiB or plain bytes)"
        raise ValueError(msg)
    return round(float(m.group(1)) * _FACTORS[(m.group(2) or "").lower()])


def parse_tokens(text: str) -> int:
    """Tokens of `200k` (204,800), `1M` (1,048,576) or `32768`: k and M are binary, as contexts are.

    Raises ValueError with the forms that are understood.
    """
    m = _TOKENS.match(text)
    if not m:
        msg = f"not a token count: {text!r} (write 32768, 32k or 1M)"
        raise ValueError(msg)
    factor = {"": 1, "k": KIB, "m": MIB}[(m.group(2) or "").lower()]
    return round(float(m.group(1)) * factor)


def pad(n: int, multiple: int) -> int:
    """`n` rounded up to a multiple."""
    return -(-n // multiple) * multiple


def mib(n_bytes: int) -> str:
    """`3,264` for 3 264 MiB: rounded, thousands separated, no unit."""
    return f"{round(n_bytes / MIB):,}"


def gib(n_bytes: int, digits: int = 1) -> str:
    """`135.3` for that many GiB, no unit."""
    return f"{n_bytes / GIB:,.{digits}f}"


def human(n_bytes: int) -> str:
    """`4.1 GiB`, `512.0 MiB`, `12 B`: one number with the unit that suits it."""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(n_bytes) >= size:
            return f"{n_bytes / size:,.1f} {unit}"
    return f"{n_bytes} B"


def duration(seconds: float) -> str:
    """`0.4 s`, `18 s`, `2 m 31 s`, `3 h 05 m`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} m"


def tokens(n: int) -> str:
    """`204,800`."""
    return f"{n:,}"


def engine_label(version: str) -> str:
    """`llama.cpp b11434` for `0.6.0-dev (build 11434, commit unknown)`; the version itself where no build is told."""
    found = re.search(r"\bbuild (\d+)\b|^b?(\d+)\b(?!\.)", version)
    build = int(found.group(1) or found.group(2)) if found else 0
    return f"llama.cpp b{build}" if build else f"llama.cpp {version.partition(' (')[0]}"
