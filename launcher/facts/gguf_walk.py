"""Walks the bytes of one GGUF header: keys, values, tensor infos.

Pure but for the bytes it is given; nothing behind the tensor infos is touched. Layout, limits and what makes a file
unloadable follow llama.cpp b11434, `ggml/src/gguf.cpp: gguf_init_from_reader`.
"""

from __future__ import annotations

import hashlib
import shlex
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from launcher.errors import ModelUnreadable
from launcher.facts.gguf_files import fetch_again, not_gguf
from launcher.structs import Scalar, TensorInfo, Value
from launcher.units import GGML_TYPES, pad

# No real header comes near the first four: they bound what a hostile one can cost. The others are the engine's.
HEADER_MAX_BYTES = 128 * 1024**2
KEPT_ARRAY_MAX = 2**20
KEYS_MAX = 2**16
TENSORS_MAX = 2**18
KEY_MAX_BYTES = 2**16 - 1
NAME_MAX_BYTES = 63
DIMS_MAX = 4
ELEMENTS_MAX = 2**63 - 1
DEFAULT_ALIGNMENT = 32

_U32_KIND, _STRING, _ARRAY = 4, 8, 9
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {kind: struct.Struct("<" + code) for kind, code in _CODES.items()}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_COUNTS = struct.Struct("<QQ")
_ARRAY_HEAD = struct.Struct("<IQ")
_TYPE_AND_OFFSET = struct.Struct("<IQ")
_SHAPES = tuple(struct.Struct(f"<{n}Q") for n in range(DIMS_MAX + 1))


@dataclass(slots=True)
class Shard:
    """What one file said. `label` is what messages call it: its name, or `shard 3` in a set."""

    path: Path
    index: int
    label: str
    file_bytes: int
    metadata: dict[str, Value] = field(default_factory=dict)
    array_lengths: dict[str, int] = field(default_factory=dict)
    tensors: list[TensorInfo] = field(default_factory=list)
    data_start: int = 0
    digest: str = ""
    warnings: list[str] = field(default_factory=list)

    def damaged(self, why: str) -> ModelUnreadable:
        return ModelUnreadable(
            "header-damaged", f"{self.label}: {why}", context=str(self.path), fix=fetch_again(self.path)
        )


def walk(view: memoryview, shard: Shard) -> None:
    """Fills `shard` from the first bytes of its file: `view` starts at byte 0 and holds the header.

    Raises ModelUnreadable.
    """
    _Walk(view, shard).run()


class _Walk:
    """One pass over a mapped header. Every read is checked against what is mapped before it is made."""

    __slots__ = ("facts", "hashed_to", "pos", "shard", "view")

    def __init__(self, view: memoryview, shard: Shard) -> None:
        self.view = view
        self.shard = shard
        self.pos = 0
        self.facts = hashlib.sha256()  # over the header's own bytes, less the arrays that are stepped over
        self.hashed_to = 0

    def run(self) -> None:
        n_tensors, n_keys = self._start()
        for _ in range(n_keys):
            self._key()
        alignment = self._alignment()
        self._tensors(n_tensors, alignment)
        self._hash(self.pos)
        self.shard.digest = self.facts.hexdigest()
        self.shard.data_start = pad(self.pos, alignment)

    def _hash(self, start: int) -> None:
        """Takes in the bytes up to `start`; what lies between there and `pos` is left out."""
        self.facts.update(self.view[self.hashed_to : start])
        self.hashed_to = self.pos

    def _need(self, n_bytes: int, what: str) -> int:
        """Position after the next `n_bytes`, which is in the file; raises if it is not."""
        end = self.pos + n_bytes
        if end > len(self.view):
            if n_bytes > HEADER_MAX_BYTES or len(self.view) < self.shard.file_bytes:
                raise self.shard.damaged(f"{what} claims {n_bytes:,} bytes at byte {self.pos:,}")
            raise ModelUnreadable(
                "header-truncated",
                f"{self.shard.label} ends inside its header: {what} needs {end - len(self.view):,} bytes more "
                f"than the file's {self.shard.file_bytes:,}",
                context=str(self.shard.path),
                fix=fetch_again(self.shard.path),
            )
        return end

    def _take(self, layout: struct.Struct, what: str) -> tuple[Any, ...]:
        end = self._need(layout.size, what)
        values = layout.unpack_from(self.view, self.pos)
        self.pos = end
        return values

    def _raw(self, what: str, most: int = HEADER_MAX_BYTES) -> bytes:
        """A length and that many bytes."""
        (n,) = self._take(_U64, what)
        if n > most:
            raise self.shard.damaged(f"{what} claims {n:,} bytes at byte {self.pos:,}, more than {most:,}")
        end = self._need(n, what)
        raw = bytes(self.view[self.pos : end])
        self.pos = end
        return raw

    def _name(self, what: str, most: int) -> str:
        raw = self._raw(what, most)
        try:
            return raw.decode()
        except UnicodeDecodeError as e:
            raise self.shard.damaged(f"{what} is not UTF-8: {raw[:40]!r}") from e

    def _start(self) -> tuple[int, int]:
        """Magic, version and the two counts: (tensors, keys)."""
        shard = self.shard
        if bytes(self.view[:4]) != b"GGUF":
            raise not_gguf(shard.path, bytes(self.view[:65536]))
        self.pos = 4
        (version,) = self._take(_U32, "the version")
        if version and version & 0xFFFF == 0:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            raise ModelUnreadable(
                "big-endian",
                f"{shard.label} is a big-endian file, this host cannot run it (version {swapped}, bytes swapped)",
                context=str(shard.path),
                fix=f"python -m gguf.scripts.gguf_convert_endian {shlex.quote(str(shard.path))} little"
                "     # changes the file itself; or fetch the one of the repository without '-be' in its name",
            )
        if version not in (2, 3):
            raise ModelUnreadable(
                "gguf-version",
                f"{shard.label} is GGUF version {version}; 2 and 3 can be read",
                context=str(shard.path),
                fix=fetch_again(shard.path) if version < 2 else "pip install -U llama-launcher",
            )
        n_tensors, n_keys = self._take(_COUNTS, "the counts")
        if n_tensors > TENSORS_MAX or n_keys > KEYS_MAX:
            raise shard.damaged(f"it claims {n_tensors:,} tensors and {n_keys:,} keys")
        return n_tensors, n_keys

    def _key(self) -> None:
        shard = self.shard
        key = self._name("a key", KEY_MAX_BYTES)
        if not key or key in shard.metadata or key in shard.array_lengths:
            raise shard.damaged(f"key {show(key)} is there twice" if key else "a key has no name")
        what = f"key {show(key)}"
        (kind,) = self._take(_U32, what)
        if kind != _ARRAY:
            shard.metadata[key] = self._scalar(kind, key, what)
            return
        kind, n = self._take(_ARRAY_HEAD, what)
        if kind != _STRING and kind not in _SCALARS:
            raise shard.damaged(f"{what} is an array of type {kind}, which arrays cannot hold")
        if key.startswith("tokenizer."):
            start = self.pos
            self._step_over(kind, n, what)
            self._hash(start)
            shard.array_lengths[key] = n
            return
        if n > KEPT_ARRAY_MAX:
            raise shard.damaged(f"{what} claims {n:,} elements")
        if kind == _STRING:
            shard.metadata[key] = tuple(self._text(what) for _ in range(n))
        else:
            shard.metadata[key] = self._take(struct.Struct(f"<{n}{_CODES[kind]}"), what)

    def _scalar(self, kind: int, key: str, what: str) -> Scalar:
        if kind == _STRING:
            return self._text(what)
        layout = _SCALARS.get(kind)
        if layout is None:
            raise self.shard.damaged(f"{what} has type {kind}, which does not exist")
        value: Scalar = self._take(layout, what)[0]
        if key == "general.alignment" and kind != _U32_KIND:
            raise self.shard.damaged(f"{what} must be a u32, it has type {kind}")
        return value

    def _text(self, what: str) -> str:
        """A value's text; a stray byte in a description is no reason to refuse a model."""
        raw = self._raw(what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.shard.warnings.append(f"{what} is not UTF-8; what cannot be read shows as \ufffd")
            return raw.decode(errors="replace")

    def _step_over(self, kind: int, n: int, what: str) -> None:
        if kind != _STRING:
            self.pos = self._need(n * _SCALARS[kind].size, what)
            return
        self._need(8 * n, what)
        # The one hot loop (400,000 turns for a big vocabulary): bounds are those of unpack_from, checked at its end.
        view, length_at, pos = self.view, _U64.unpack_from, self.pos
        try:
            for _ in range(n):
                pos += length_at(view, pos)[0] + 8
        except (struct.error, OverflowError, IndexError):
            pos = max(pos, len(view) + 1)
        self._need(pos - self.pos, what)
        self.pos = pos

    def _alignment(self) -> int:
        value = self.shard.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or value < 1 or value & (value - 1):
            raise self.shard.damaged(f"general.alignment is {str(value)[:40]}, which is not a power of two")
        return value

    def _tensors(self, n: int, alignment: int) -> None:
        """Tensor infos. The engine wants every offset to be the padded sum of the sizes before it, without holes."""
        shard = self.shard
        found: list[tuple[str, tuple[int, ...], int, int, int | None]] = []
        names: set[str] = set()
        due: int | None = 0
        for _ in range(n):
            name = self._name("a tensor's name", NAME_MAX_BYTES)
            what = f"tensor {show(name)}"
            if name in names:
                raise shard.damaged(f"{what} is there twice")
            names.add(name)
            (n_dims,) = self._take(_U32, what)
            if n_dims > DIMS_MAX:
                raise shard.damaged(f"{what} has {n_dims} dimensions, more than {DIMS_MAX}")
            shape = self._take(_SHAPES[n_dims], what) or (1,)
            type_id, offset = self._take(_TYPE_AND_OFFSET, what)
            if max(shape) > ELEMENTS_MAX or prod(shape) > ELEMENTS_MAX:
                raise shard.damaged(f"{what} has the shape {shape}")
            size = _tensor_bytes(shape, type_id)
            if size is None and type_id in GGML_TYPES:
                type_name, block, _ = GGML_TYPES[type_id]
                raise shard.damaged(f"{what} has rows of {shape[0]}, no multiple of {type_name}'s block of {block}")
            before = found[-1] if found else None
            expected = due if due is not None else max(offset, before[3] if before else 0)
            if offset != expected or offset % alignment:
                raise shard.damaged(
                    f"{what} starts at {offset:,} of the data where {pad(expected, alignment):,} is due"
                )
            found.append((name, shape, type_id, offset, size))
            due = None if size is None else offset + pad(size, alignment)
        data_bytes = shard.file_bytes - pad(self.pos, alignment)
        for i, (name, shape, type_id, offset, size) in enumerate(found):
            end = found[i + 1][3] if i + 1 < n else data_bytes
            shard.tensors.append(
                TensorInfo(
                    name=name,
                    shape=shape,
                    type_id=type_id,
                    type_name=GGML_TYPES[type_id][0] if type_id in GGML_TYPES else f"unknown({type_id})",
                    size_bytes=max(0, end - offset) if size is None else size,
                    shard=shard.index,
                    offset_bytes=offset,
                )
            )


def _tensor_bytes(shape: tuple[int, ...], type_id: int) -> int | None:
    """Bytes by shape and type; None where the type is unknown or its block does not divide the row."""
    if type_id not in GGML_TYPES:
        return None
    _, block, block_bytes = GGML_TYPES[type_id]
    return None if shape[0] % block else prod(shape) // block * block_bytes


def show(text: str) -> str:
    """Text of the file inside one of our lines: quoted, escaped, not endless."""
    return repr(text if len(text) <= 80 else text[:77] + "...")
