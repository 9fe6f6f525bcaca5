#!/usr/bin/env python3
"""Fills the data of a sparse GGUF, in place, with random weights that are valid and numerically tame.

    python scripts/fill_model.py MODEL.gguf [--seed N] [--workers N] [--overwrite]

MODEL is a file or any shard of a set whose data section is a hole (tests/replicas/make_replica.py makes such files).
Afterwards an engine runs it at its real shapes, types and speed; what it says is noise. Matrices have a mean of zero
and a spread of 1/sqrt(row length), so that a unit vector stays one, norms are about 1, biases and sinks small.

Every type has pools of random blocks, one for each spread, that are laid end to end over its tensors. Which byte a
tensor gets depends on the seed, its name and the model alone, never on the number of workers. One JSON line on stdout.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from launcher.errors import LauncherError, ModelUnreadable, Refused
from launcher.facts.gguf_header import read_header
from launcher.structs import ModelHeader, TensorInfo
from launcher.units import GGML_TYPES, GIB, MIB, human

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Progress = Callable[[int, int, float], None]  # bytes done, bytes in all, seconds so far

POOL_BYTES = 64 * MIB
SLICE_BYTES = 8 * MIB  # of one copy: small enough to share the last tensors among the workers
UNIT_BLOCKS = 8192  # that the spread of a type at scale 1 is measured on; 0.3 % for blocks of 32
# The spread of logits. At 1 all of a large vocabulary is about equally likely, and two devices that round
# differently part at the first token; at 4 the best token leads the next by about one nat.
LOGIT_SPREAD = 4.0

# type -> (offset, factor) of its f16 scales; all other bits may be anything. A factor other than 1 is that of a
# minimum, and cancels the mean of the unsigned values that it belongs to.
# llama.cpp b11434, `ggml/src/ggml-common.h: block_*`
_F16_SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q4_0": ((0, 1.0),), "Q4_1": ((0, 1.0), (2, -7.5)), "Q5_0": ((0, 1.0),), "Q5_1": ((0, 1.0), (2, -15.5)),
    "Q8_0": ((0, 1.0),), "Q2_K": ((80, 1.0), (82, 1.5)), "Q3_K": ((108, 1.0),), "Q4_K": ((0, 1.0), (2, 7.5)),
    "Q5_K": ((0, 1.0), (2, 15.5)), "Q6_K": ((208, 1.0),), "IQ1_S": ((0, 1.0),), "IQ2_XXS": ((0, 1.0),),
    "IQ2_XS": ((0, 1.0),), "IQ2_S": ((0, 1.0),), "IQ3_XXS": ((0, 1.0),), "IQ3_S": ((0, 1.0),),
    "IQ4_NL": ((0, 1.0),), "IQ4_XS": ((0, 1.0),),
}  # fmt: skip
_FLOATS = ("F32", "F16", "BF16")
_VECTORS = {"ssm_a", "ssm_d"}
TYPES = (*_FLOATS, "MXFP4", *_F16_SCALES)  # of matrices; an I32 table of experts can be filled too


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """What was written: of which model (its first file), how much, in how many seconds."""

    path: str
    tensors: int
    written_bytes: int
    seconds: float


def fill(
    path: str | Path,
    *,
    seed: int = 0,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Filled:
    """Fill every tensor of the model with `workers` threads (default: one a core).

    `progress` is called about once a second. Raises ModelUnreadable, and Refused for a type or a table that cannot
    be made up (before anything is written), for data that is there already, and for a disk that is too small.
    """
    started = time.monotonic()
    header = read_header(path)
    _check(header, overwrite=overwrite)
    files = [_opened(s.path) if s.n_tensors else None for s in header.shards]
    starts = [s.header_bytes for s in header.shards]
    made, drawn = _sorted_out(header)
    total = sum(t.size_bytes for t in header.tensors)
    done = 0

    def target(t: TensorInfo) -> Bytes:
        file, at = files[t.shard], starts[t.shard] + t.offset_bytes
        assert file is not None
        return file[at : at + t.size_bytes]

    def write_made(t: TensorInfo) -> int:
        target(t)[:] = _made(t, header, seed)
        return t.size_bytes

    def write_slice(t: TensorInfo, pool: Future[Bytes], first: int, at: int) -> int:
        into = target(t)[at : at + SLICE_BYTES]
        _lay(pool.result(), first + at, into)
        return into.size

    # Threads, and a mapping: numpy copies and draws without the interpreter's lock, and pages of one mapped file are
    # made in parallel, while writes into one file wait for each other at its lock.
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), "fill") as crew:
        # first come, first served: a worker that waits for a pool waits for one that is being made
        pools = {key: crew.submit(make_pool, *key, n, seed) for key, n in _pool_sizes(drawn).items()}
        jobs: set[Future[int]] = {crew.submit(write_made, t) for t in made}
        for key, tensors in drawn.items():
            for t in tensors:
                first = _number(seed, t.name) * GGML_TYPES[t.type_id][2]
                for at in range(0, t.size_bytes, SLICE_BYTES):
                    jobs.add(crew.submit(write_slice, t, pools[key], first, at))
        try:
            while jobs:
                ended, jobs = wait(jobs, timeout=1, return_when=FIRST_EXCEPTION)
                done += sum(job.result() for job in ended)
                if progress:
                    progress(done, total, time.monotonic() - started)
        finally:
            crew.shutdown(wait=True, cancel_futures=True)
    return Filled(path=header.path, tensors=len(header.tensors), written_bytes=done, seconds=time.monotonic() - started)


# ------------------------------------------------------------------------------------------- what a tensor gets


def spread(t: TensorInfo, *, tied: bool = False) -> float:
    """Standard deviation of a matrix; `tied`: the token embeddings are the output matrix, too."""
    if t.name == "output.weight" or (tied and t.name == "token_embd.weight"):
        return LOGIT_SPREAD / math.sqrt(t.shape[0])
    if t.name.endswith(("token_embd.weight", "embed_tokens.weight")):
        return 1.0
    return 1 / math.sqrt(t.shape[0])


def _is_matrix(name: str) -> bool:
    """Whether it takes part in a product; the rest are vectors and tables with ranges of their own."""
    if name.endswith((".bias", ".scale", "_scale.weight", "_base.weight")):
        return False
    return not any(part in name for part in ("norm", "sinks", "rope_f")) and not _VECTORS & {*name.split(".")}


def _made(t: TensorInfo, header: ModelHeader, seed: int) -> Bytes:
    """The bytes of a vector or a table, by its name."""
    random = np.random.default_rng([seed, _number(seed, t.name)])
    if t.type_name == "I32":
        return _expert_table(t, _expert_count(header), random)
    n, parts = math.prod(t.shape), t.name.split(".")
    if "rope_f" in t.name:  # rope_freqs, rope_factors_*: divisors of the angles
        x = np.ones(n, np.float32)
    elif "norm" in t.name or "ssm_d" in parts or t.name.endswith((".scale", "_scale.weight")):
        x = _normal(random, n, 0.02) + np.float32(1)
    elif "ssm_a" in parts:  # -exp(A_log): a state decays by exp(ssm_a * step)
        x = -random.uniform(1, 16, n).astype(np.float32)
    elif "ssm_dt" in parts:  # through softplus: steps of 0.001 to 0.1
        x = random.uniform(-7, -2.3, n).astype(np.float32)
    else:
        x = _normal(random, n, 0.02)
    return _encoded(x, t.type_name)


def _expert_table(t: TensorInfo, n_expert: int, random: np.random.Generator) -> Bytes:
    """For every token `shape[0]` different experts: steps that share no divisor with their number, so none twice."""
    used, n_tokens = t.shape[0], math.prod(t.shape[1:])
    steps = np.array([s for s in range(1, max(2, n_expert)) if math.gcd(s, n_expert) == 1])
    first, step = random.integers(0, n_expert, (n_tokens, 1)), random.choice(steps, (n_tokens, 1))
    return ((first + step * np.arange(used)) % n_expert).astype(np.int32).reshape(-1).view(np.uint8)


# --------------------------------------------------------------------------------------------------------- pools


def make_pool(type_name: str, spread: float, n_blocks: int, seed: int) -> Bytes:
    """`n_blocks` valid random blocks whose values have mean 0 and this standard deviation; raises Refused."""
    _, elements, block_bytes = _type(type_name)
    random = np.random.default_rng([seed, zlib.crc32(type_name.encode()), round(spread * 2**40)])
    if type_name in _FLOATS:
        return _encoded(_normal(random, n_blocks * elements, spread), type_name)
    blocks = np.frombuffer(random.bytes(n_blocks * block_bytes), np.uint8).reshape(n_blocks, block_bytes).copy()
    unit = _scaled(blocks[:UNIT_BLOCKS].copy(), type_name, 1.0, random)
    at_one = float(np.std(dequantize(unit, GGMLQuantizationType[type_name]), dtype=np.float64))
    return _scaled(blocks, type_name, spread / at_one, random).reshape(-1)


def _scaled(blocks: Bytes, type_name: str, scale: float, random: np.random.Generator) -> Bytes:
    """The blocks with their scales set, in place."""
    n = len(blocks)
    if type_name == "MXFP4":  # powers of two, 128 is 1: the two beside the scale, mixed for the right variance
        low = math.floor(math.log2(scale))
        share = (scale**2 / 4.0**low - 1) / 3
        blocks[:, 0] = 128 + low + (random.random(n, np.float32) < share)
        return blocks
    # Half of the scales negative: the values of most types have a mean a little off zero, and a matrix with a mean
    # drags all tokens towards one vector, the more the deeper, until all of them choose the same experts.
    signs = random.integers(0, 2, n) * 2 - 1
    for offset, factor in _F16_SCALES[type_name]:
        blocks[:, offset : offset + 2] = (signs * (scale * factor)).astype("<f2")[:, None].view(np.uint8)
    return blocks


def _normal(random: np.random.Generator, n: int, spread: float) -> Floats:
    x = random.standard_normal(n, np.float32)
    x *= np.float32(spread)
    return x


def _encoded(x: Floats, type_name: str) -> Bytes:
    if type_name == "F32":
        return x.view(np.uint8)
    if type_name == "F16":
        return x.astype("<f2").view(np.uint8)
    return ((x.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype("<u2").view(np.uint8)  # BF16


def _lay(pool: Bytes, position: int, into: Bytes) -> None:
    """Copy the pool over and over into `into`, from a position that counts through its repetitions."""
    done = 0
    while done < into.size:
        start = (position + done) % pool.size
        n = min(pool.size - start, into.size - done)
        np.copyto(into[done : done + n], pool[start : start + n])
        done += n


def _pool_sizes(drawn: dict[tuple[str, float], list[TensorInfo]]) -> dict[tuple[str, float], int]:
    """Blocks of each pool: a prime, so that the same matrix of two experts never starts at the same block."""
    sizes = {}
    for key, tensors in drawn.items():
        block_bytes = _type(key[0])[2]
        sizes[key] = _prime(min(POOL_BYTES, sum(t.size_bytes for t in tensors)) // block_bytes)
    return sizes


def _prime(most: int) -> int:
    """The largest prime up to `most`; at least 2."""
    n = max(2, most)
    while any(n % d == 0 for d in range(2, math.isqrt(n) + 1)):
        n -= 1
    return n


def _number(seed: int, name: str) -> int:
    return zlib.crc32(f"{seed} {name}".encode())


def _type(name: str) -> tuple[int, int, int]:
    """Id, elements and bytes of a block."""
    for type_id, (known, elements, block_bytes) in GGML_TYPES.items():
        if known == name and name in TYPES:
            return type_id, elements, block_bytes
    raise Refused("type-not-made", f"no random blocks of type {name} can be made", fix=f"use one of {', '.join(TYPES)}")


# -------------------------------------------------------------------------------------------------------- checks


def _sorted_out(header: ModelHeader) -> tuple[list[TensorInfo], dict[tuple[str, float], list[TensorInfo]]]:
    """Tensors that are made one by one, and those that are drawn from the pool of a type and a spread."""
    made: list[TensorInfo] = []
    drawn: dict[tuple[str, float], list[TensorInfo]] = defaultdict(list)
    tied = all(t.name != "output.weight" for t in header.tensors)
    for t in header.tensors:
        if t.type_name == "I32" or (t.type_name in _FLOATS and not _is_matrix(t.name)):
            made.append(t)
        elif t.size_bytes:
            drawn[t.type_name, spread(t, tied=tied)].append(t)
    return made, drawn


def _expert_count(header: ModelHeader) -> int:
    count = header.metadata.get(f"{header.metadata.get('general.architecture')}.expert_count", 0)
    return count if isinstance(count, int) else 0


def _check(header: ModelHeader, *, overwrite: bool) -> None:
    """Refuses what cannot be filled, before the first byte is written."""
    odd = [t for t in header.tensors if t.type_name not in TYPES and t.type_name != "I32"]
    tables = [t for t in header.tensors if t.type_name == "I32"]
    odd += [t for t in tables if "tid2eid" not in t.name or t.shape[0] > _expert_count(header)]
    if odd:
        names = ", ".join(sorted({t.type_name for t in odd}))
        raise Refused(
            "type-not-made",
            f"{len(odd)} of {len(header.tensors)} tensors cannot be made up: type {names}",
            context="\n".join(f"{t.name} is {t.type_name} {list(t.shape)}" for t in odd[:8]),
            fix=f"choose a model of the types {', '.join(TYPES)}",
        )
    data_bytes = sum(s.file_bytes - s.header_bytes for s in header.shards)
    there_bytes = sum(
        max(0, Path(s.path).stat().st_blocks * 512 - s.header_bytes) for s in header.shards if s.n_tensors
    )
    if not overwrite and there_bytes > data_bytes // 2:
        what = f"{header.path} holds {human(there_bytes)} of data: it is no sparse replica, its weights would be lost"
        again = f"python scripts/fill_model.py --overwrite {shlex.quote(header.path)}"
        raise Refused("model-has-data", what, fix=f"{again}   (only if nobody needs them)")
    folder = Path(header.path).parent
    free = shutil.disk_usage(folder).free
    lacking = max(0, data_bytes - there_bytes) - free
    if lacking > 0:  # asked now: a full disk under a mapping ends the process without a word
        what = f"{human(data_bytes)} of weights, {human(free)} are free in {folder}"
        raise Refused(
            "disk-space",
            what,
            context=f"{human(lacking)} are lacking",
            fix=f"mv {shlex.quote(str(folder))} /path/on/a/bigger/disk/",
        )


def _opened(path: str) -> Bytes:
    try:
        return np.memmap(path, np.uint8, "r+").view(np.ndarray)
    except OSError as e:
        fix = f"chmod u+w {shlex.quote(path)}"
        raise ModelUnreadable("model-unwritable", f"cannot write {path}: {e.strerror}", fix=fix) from e


# ------------------------------------------------------------------------------------------------------- command


def show(done: int, total: int, seconds: float) -> None:
    """One line of progress on stderr."""
    rate = done / max(seconds, 1e-3) / GIB
    print(f"filled {done / GIB:.1f} of {total / GIB:.1f} GiB, {rate:.1f} GiB/s", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 with a JSON line on stdout, or that of the refusal with its lines on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a file, any shard of a set, or a folder with one model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, help="threads; default: one a core")
    parser.add_argument("--overwrite", action="store_true", help="also a file that already holds data")
    args = parser.parse_args(argv)
    try:
        filled = fill(args.model, seed=args.seed, workers=args.workers, overwrite=args.overwrite, progress=show)
    except LauncherError as error:
        lines = (f"error[{error.reference}]: {error.message}", error.context, f"fix: {error.fix}")
        print(*filter(None, lines), sep="\n", file=sys.stderr)
        return error.exit_code
    print(json.dumps(asdict(filled)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
