"""What a GGUF says before its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of the file. shape is in ggml order (shape[0] is the row); offset counts from the data section."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_name: str
    size_bytes: int
    shard: int
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """One file of a model: its whole size, the size of its header (data starts there), its tensors."""

    path: str
    file_bytes: int
    header_bytes: int
    n_tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHeader:
    """All that a GGUF (or shard set) says before its data.

    metadata       every key of the first shard; arrays of `tokenizer.*` are left out
    array_lengths  length of every array left out (`tokenizer.ggml.tokens` gives n_vocab)
    digest         sha256 of the header's facts, the key of every cache about this model
    """

    path: str
    shards: tuple[ShardInfo, ...]
    metadata: Mapping[str, Value]
    array_lengths: Mapping[str, int]
    tensors: tuple[TensorInfo, ...]
    digest: str
    warnings: tuple[str, ...] = ()

    @property
    def arch(self) -> str:
        """Value of `general.architecture`, empty when the key is missing."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def file_bytes(self) -> int:
        """Sum over all shards."""
        return sum(s.file_bytes for s in self.shards)
