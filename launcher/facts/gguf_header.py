"""Reads all that a GGUF file (or shard set) says before its tensor data.

Each file is mapped and walked once, front to back; tensor data is never touched. Arrays of `tokenizer.*` are stepped
over and only counted; every other key is kept whole. How files of a set belong together follows llama.cpp b11434,
`src/llama-model-loader.cpp: llama_model_loader`.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections import Counter
from pathlib import Path

from launcher.errors import ModelUnreadable
from launcher.facts.gguf_files import SHARD_NAME, fetch_again, find_shards, misnamed, unreadable
from launcher.facts.gguf_walk import HEADER_MAX_BYTES, Shard, show, walk
from launcher.structs import ModelHeader, ShardInfo
from launcher.units import GGML_TYPES, human

__all__ = ["find_shards", "read_header"]

BLOCKS_MAX = 512  # llama-hparams.h: LLAMA_MAX_LAYERS; the engine refuses more
# `<arch>.*` keys that count something: u32, or one u32 a layer, whatever else a damaged file says. The engine is as
# strict; without it a NaN or a block count of two billion would surface as a traceback or as memory that is gone.
_COUNTS = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "expert_feed_forward_length",
    "expert_count", "expert_used_count", "leading_dense_block_count", "nextn_predict_layers", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.key_length_mla", "attention.value_length_mla", "attention.key_length_swa",
    "attention.value_length_swa", "attention.sliding_window", "attention.sliding_window_pattern",
    "attention.shared_kv_layers", "attention.compress_ratios", "attention.indexer.key_length",
    "attention.kv_lora_rank", "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.group_count",
    "kda.head_dim", "shortconv.l_cache",
})  # fmt: skip


def read_header(path: str | Path) -> ModelHeader:
    """Header of a model: a single file, any shard of a set, or a folder that holds one set.

    Metadata are the first shard's, as in the engine; tensors are those of all shards in file order, `shard` counting
    from 0. A tensor of an unknown type gets its size from the offsets, and a warning. Raises ModelUnreadable.
    """
    paths = find_shards(path)
    shards = [_read_file(p, i, len(paths)) for i, p in enumerate(paths)]
    _check_counts(shards[0])
    _check_set(shards)
    _check_data(shards)
    digest = hashlib.sha256("\n".join(f"{s.digest} {s.file_bytes}" for s in shards).encode())
    return ModelHeader(
        path=str(paths[0]),
        shards=tuple(
            ShardInfo(
                path=str(s.path),
                file_bytes=s.file_bytes,
                header_bytes=min(s.data_start, s.file_bytes),
                n_tensors=len(s.tensors),
            )
            for s in shards
        ),
        metadata=shards[0].metadata,
        array_lengths=shards[0].array_lengths,
        tensors=tuple(t for s in shards for t in s.tensors),
        digest=digest.hexdigest(),
        warnings=_warnings(shards),
    )


def _read_file(path: Path, index: int, count: int) -> Shard:
    # MAP_PRIVATE: some network and FUSE file systems refuse shared mappings.
    fd = -1
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # asked before open, which would wait at a pipe
            raise unreadable(path, "not a regular file")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        file_bytes = os.fstat(fd).st_size
        if file_bytes == 0:
            raise ModelUnreadable("model-empty", f"{path.name} is empty (0 bytes)", fix=fetch_again(path))
        length = min(file_bytes, HEADER_MAX_BYTES)
        mapped = mmap.mmap(fd, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    except OSError as e:
        raise unreadable(path, e.strerror or str(e)) from e
    finally:
        if fd >= 0:
            os.close(fd)
    label = f"shard {index + 1}" if count > 1 else path.name
    with mapped, memoryview(mapped) as view:
        shard = Shard(path=path, index=index, label=label, file_bytes=file_bytes)
        walk(view, shard)
    return shard


# ------------------------------------------------------------------------------------- checks over the set


def _check_counts(first: Shard) -> None:
    """Refuses keys that count something and hold no count, and more blocks than any engine loads."""
    arch = first.metadata.get("general.architecture")
    for name in _COUNTS:
        key = f"{arch}.{name}"
        value = first.metadata.get(key, 0)
        every = value if isinstance(value, tuple) else (value,)
        odd = next((v for v in every if not isinstance(v, int) or not 0 <= v < 2**32), None)
        if odd is not None:
            raise first.damaged(f"key {show(key)} is {show(str(odd))[1:-1]}, which is no count")
    if first.metadata.get(f"{arch}.embedding_length", 1) == 0:
        raise first.damaged(f"key {show(f'{arch}.embedding_length')} is 0")
    blocks = first.metadata.get(f"{arch}.block_count", 0)
    if not isinstance(blocks, int) or blocks > BLOCKS_MAX:
        raise first.damaged(f"it claims {show(str(blocks))[1:-1]} blocks, more than {BLOCKS_MAX}")


def _check_set(shards: list[Shard]) -> None:
    """Refuses shards that do not belong together; the odd ones are named."""
    n, first = len(shards), shards[0]
    if n == 1:
        count, number = first.metadata.get("split.count", 0), first.metadata.get("split.no", 0)
        if count in (0, 1):
            _check_tensor_count(shards)
            return
        if SHARD_NAME.fullmatch(first.path.name) is None and isinstance(count, int) and isinstance(number, int):
            name = f"{first.path.name.removesuffix('.gguf')}-{number + 1:05d}-of-{count:05d}.gguf"
            why = f"{first.path.name} is shard {number + 1} of {count}, but its name does not say so"
            raise misnamed(first.path, why, name)
    says = [(s.metadata.get("split.count"), s.metadata.get("split.tensors.count")) for s in shards]
    likely = max(says, key=says.count)
    odd = [
        s
        for s, said in zip(shards, says, strict=True)
        if said[0] != n or said != likely or s.metadata.get("split.no") != s.index
    ]
    if odd:
        raise _mixed(shards, odd[0], f"{odd[0].path.name} does not belong to this set of {n}")
    owner: dict[str, Shard] = {}
    for s in shards:
        for t in s.tensors:
            if t.name in owner:
                raise _mixed(shards, s, f"tensor {show(t.name)} is in {owner[t.name].label} and in {s.label}")
        owner.update((t.name, s) for t in s.tensors)
    _check_tensor_count(shards)


def _check_tensor_count(shards: list[Shard]) -> None:
    total, claimed = sum(len(s.tensors) for s in shards), shards[0].metadata.get("split.tensors.count")
    if claimed is not None and claimed != total:
        raise _mixed(shards, shards[0], f"{total} tensors are here, the set has {show(str(claimed))[1:-1]}")
    if total == 0:
        raise ModelUnreadable(
            "no-tensors",
            f"{shards[0].path.name} holds no tensors (0): a vocabulary or a piece of a set, not a model",
            fix=fetch_again(shards[0].path),
        )


def _mixed(shards: list[Shard], odd: Shard, why: str) -> ModelUnreadable:
    keys = ("split.no", "split.count", "split.tensors.count")
    lines = [
        f"{s.path.name}: " + ", ".join(f"{k} {show(str(s.metadata.get(k, '-')))[1:-1]}" for k in keys)
        + f", {len(s.tensors)} tensors"
        for s in shards
    ]  # fmt: skip
    return ModelUnreadable(
        "shards-mixed", f"shards of different sets: {why}", context="\n".join(lines), fix=fetch_again(odd.path)
    )


def _check_data(shards: list[Shard]) -> None:
    """Refuses files that end before their last tensor does; all of them, with the bytes that lack."""
    lines = []
    for s in shards:
        expected = max((s.data_start + t.offset_bytes + t.size_bytes for t in s.tensors), default=0)
        short = expected - s.file_bytes
        if short > 0:
            lines.append(
                f"{s.label} is {human(short)} short (expected {human(expected)}, has {human(s.file_bytes)})"
                + (f": {s.path.name}" if len(shards) > 1 else "")
            )
            odd = s
    if lines:
        raise ModelUnreadable("data-truncated", lines[0], context="\n".join(lines[1:]), fix=fetch_again(odd.path))


def _warnings(shards: list[Shard]) -> tuple[str, ...]:
    lines = [w for s in shards for w in s.warnings]
    unknown = Counter(t.type_id for s in shards for t in s.tensors if t.type_id not in GGML_TYPES)
    for type_id, n in sorted(unknown.items()):
        lines.append(f"needs an engine that knows type {type_id} ({n} tensors, sized by their offsets)")
    empty = [t.name for s in shards for t in s.tensors if 0 in t.shape]
    if empty:
        lines.append(f"{len(empty)} tensors have no elements, the first is {show(empty[0])}")
    return tuple(lines)
