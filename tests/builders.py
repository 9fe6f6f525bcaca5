"""Model headers in memory, and GGUF files to the byte, for tests. Everything has a sane default."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from launcher.structs import ModelHeader, ShardInfo, TensorInfo, Value
from launcher.units import GGML_TYPES, pad

TYPE_IDS = {name: type_id for type_id, (name, _, _) in GGML_TYPES.items()}
ALIGNMENT = 32


# ------------------------------------------------------------------------------------------- in memory


def tensor(
    name: str = "blk.0.attn_q.weight",
    shape: tuple[int, ...] = (256, 256),
    type_name: str = "F16",
    *,
    shard: int = 0,
    offset_bytes: int = 0,
) -> TensorInfo:
    """A tensor of a known type; `header()` sets its offset."""
    type_id = TYPE_IDS[type_name]
    return TensorInfo(
        name=name,
        shape=shape,
        type_id=type_id,
        type_name=type_name,
        size_bytes=tensor_bytes(shape, type_id),
        shard=shard,
        offset_bytes=offset_bytes,
    )


def header(
    tensors: Sequence[TensorInfo] = (),
    *,
    arch: str = "qwen3moe",
    metadata: Mapping[str, Value] | None = None,
    n_vocab: int = 32000,
    path: str = "/models/model.gguf",
    digest: str = "0" * 64,
    warnings: tuple[str, ...] = (),
) -> ModelHeader:
    """A header around `tensors` (default: one), offsets filled in.

    Keys of `metadata` may leave out the arch: `block_count` and `qwen3moe.block_count` are the same key.
    """
    given = tuple(tensors) or (tensor(),)
    n_layer = 1 + max((int(t.name.split(".")[1]) for t in given if t.name.startswith("blk.")), default=0)
    keys: dict[str, Value] = {
        "general.architecture": arch,
        f"{arch}.block_count": n_layer,
        f"{arch}.context_length": 32768,
        f"{arch}.embedding_length": 256,
        f"{arch}.attention.head_count": 8,
        f"{arch}.attention.head_count_kv": 2,
    }
    roots = ("general.", "tokenizer.", "split.", "quantize.", f"{arch}.")
    for key, value in (metadata or {}).items():
        keys[key if key.startswith(roots) else f"{arch}.{key}"] = value
    placed, ends = [], dict.fromkeys(range(1 + max(t.shard for t in given)), 0)
    for t in given:
        placed.append(replace(t, offset_bytes=ends[t.shard]))
        ends[t.shard] += pad(t.size_bytes, ALIGNMENT)
    stem = path.removesuffix(".gguf")
    names = [f"{stem}-{i + 1:05d}-of-{len(ends):05d}.gguf" for i in ends] if len(ends) > 1 else [path]
    head = 4096
    return ModelHeader(
        path=names[0],
        shards=tuple(
            ShardInfo(
                path=names[i],
                file_bytes=head + end,
                header_bytes=head,
                n_tensors=sum(t.shard == i for t in given),
            )
            for i, end in ends.items()
        ),
        metadata=keys,
        array_lengths={"tokenizer.ggml.tokens": n_vocab},
        tensors=tuple(placed),
        digest=digest,
        warnings=warnings,
    )


def tensor_bytes(shape: tuple[int, ...], type_id: int) -> int:
    """Bytes of a tensor of a known type."""
    _, block, block_bytes = GGML_TYPES[type_id]
    assert prod(shape[:1]) % block == 0, (shape, GGML_TYPES[type_id])
    return prod(shape) // block * block_bytes


# --------------------------------------------------------------------------------------------- on disk


class Raw(NamedTuple):
    """A value of a key as it stands in the file: its type id, and the bytes after it."""

    kind: int
    payload: bytes


class T(NamedTuple):
    """A tensor of a file to write. size_bytes is needed for types that we do not know; offset None: the next one."""

    name: str
    shape: tuple[int, ...] = (256, 4)
    type_id: int = 0
    size_bytes: int | None = None
    offset: int | None = None


def text(value: str | bytes) -> bytes:
    """A GGUF string: u64 length and bytes."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def array(kind: int, values: Sequence[Any]) -> Raw:
    """An array with elements of one scalar kind (4: u32, 5: i32, 6: f32, 7: bool, 8: string)."""
    code = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    body = b"".join(map(text, values)) if kind == 8 else struct.pack(f"<{len(values)}{code[kind]}", *values)
    return Raw(9, struct.pack("<IQ", kind, len(values)) + body)


def _value(value: Any) -> Raw:
    match value:
        case Raw():
            return value
        case bool():
            return Raw(7, struct.pack("<?", value))
        case int():
            return Raw(4, struct.pack("<I", value))
        case float():
            return Raw(6, struct.pack("<f", value))
        case str():
            return Raw(8, text(value))
    kind = {bool: 7, int: 5, float: 6, str: 8}[type(value[0])] if len(value) else 5
    return array(kind, value)


def gguf_header(
    kv: Mapping[str, Any] | Sequence[tuple[str, Any]],
    tensors: Sequence[T],
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    alignment: int = ALIGNMENT,
    n_kv: int | None = None,
    n_tensors: int | None = None,
) -> tuple[bytes, int]:
    """Bytes of a header, padded to the data section, and how many bytes of data follow. n_kv, n_tensors: as claimed."""
    pairs = list(kv.items() if isinstance(kv, Mapping) else kv)
    out = bytearray(magic)
    out += struct.pack("<I", version)
    out += struct.pack("<QQ", len(tensors) if n_tensors is None else n_tensors, len(pairs) if n_kv is None else n_kv)
    for key, value in pairs:
        raw = _value(value)
        out += text(key) + struct.pack("<I", raw.kind) + raw.payload
    end = 0
    for t in tensors:
        offset = end if t.offset is None else t.offset
        size = t.size_bytes if t.size_bytes is not None else tensor_bytes(t.shape, t.type_id)
        out += text(t.name) + struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *t.shape)
        out += struct.pack("<IQ", t.type_id, offset)
        end = offset + pad(size, alignment)
    return bytes(out).ljust(pad(len(out), alignment), b"\0"), end


BASE_KV: dict[str, Any] = {"general.architecture": "llama", "llama.block_count": 1}


def write_gguf(
    path: Path,
    kv: Mapping[str, Any] | Sequence[tuple[str, Any]] | None = None,
    tensors: Sequence[T] = (T("token_embd.weight"), T("blk.0.attn_q.weight")),
    *,
    short_bytes: int = 0,
    **how: Any,
) -> Path:
    """Writes a file whose data is a hole, `short_bytes` of it cut off; `how` goes to gguf_header."""
    head, data_bytes = gguf_header(BASE_KV if kv is None else kv, tensors, **how)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as f:
        f.write(head)
        f.truncate(len(head) + data_bytes - short_bytes)
    return path


def u16(n: int) -> Raw:
    """What split.no and split.count are written as."""
    return Raw(2, struct.pack("<H", n))


def write_shards(
    folder: Path,
    tensors: Sequence[Sequence[T]],
    *,
    stem: str = "model",
    kv: Mapping[str, Any] | None = None,
    splits: Mapping[int, Mapping[str, Any]] | None = None,
) -> tuple[Path, ...]:
    """Writes a set, one list of tensors a file; `splits` overrides split.* keys by index (None leaves one out)."""
    n = len(tensors)
    paths = []
    for i, mine in enumerate(tensors):
        keys: dict[str, Any] = dict(BASE_KV if kv is None else kv) if i == 0 else {}
        keys |= {"split.no": u16(i), "split.count": u16(n), "split.tensors.count": sum(map(len, tensors))}
        keys |= (splits or {}).get(i, {})
        path = folder / f"{stem}-{i + 1:05d}-of-{n:05d}.gguf"
        paths.append(write_gguf(path, {k: v for k, v in keys.items() if v is not None}, mine))
    return tuple(paths)
