"""Models and rigs made in memory: headers of any shape without a file, and headers of the replicas."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.structs import Device, Host, Inventory, ModelHeader, Settings, TensorInfo
from launcher.units import GGML_TYPES, GIB, MIB
from tests.replicas import make_replica

SPECS = Path(__file__).parent / "replicas" / "specs"


def tensor(name: str, shape: Sequence[int], type_id: int = 0) -> TensorInfo:
    """One tensor; size from shape and type, as a file would have it."""
    type_name, block, size = GGML_TYPES[type_id]
    count = 1
    for n in shape:
        count *= n
    return TensorInfo(
        name=name,
        shape=tuple(shape),
        type_id=type_id,
        type_name=type_name,
        size_bytes=count // block * size,
        shard=0,
        offset_bytes=0,
    )


def moe_header(
    bundle_mib: Sequence[int], *, dense_mib: int = 40, n_embd: int = 1024, n_vocab: int = 4096, **keys: Any
) -> ModelHeader:
    """A qwen3moe-like model whose blocks have bundles of these sizes (0: a dense block) and equal dense weights."""
    tensors = [
        tensor("token_embd.weight", (n_embd, n_vocab)),
        tensor("output.weight", (n_embd, n_vocab)),
        tensor("output_norm.weight", (n_embd,)),
    ]
    for i, bundle in enumerate(bundle_mib):
        tensors.append(tensor(f"blk.{i}.attn_norm.weight", (n_embd,)))
        tensors.append(tensor(f"blk.{i}.attn_k.weight", (n_embd, 256), 24))
        tensors.append(tensor(f"blk.{i}.attn_q.weight", (n_embd, dense_mib * 1024), 24))
        if bundle:
            tensors.append(tensor(f"blk.{i}.ffn_gate_inp.weight", (n_embd, 8)))
            rows = bundle * MIB // (2 * 1024 * 8)
            tensors.append(tensor(f"blk.{i}.ffn_gate_up_exps.weight", (1024, rows, 8), 24))
            tensors.append(tensor(f"blk.{i}.ffn_down_exps.weight", (1024, rows, 8), 24))
    meta: dict[str, Any] = {
        "general.architecture": "qwen3moe",
        "qwen3moe.block_count": len(bundle_mib),
        "qwen3moe.context_length": 32768,
        "qwen3moe.embedding_length": n_embd,
        "qwen3moe.attention.head_count": 8,
        "qwen3moe.attention.head_count_kv": 2,
        "qwen3moe.attention.key_length": 128,
        "qwen3moe.attention.value_length": 128,
        "qwen3moe.expert_count": 8,
        "qwen3moe.expert_used_count": 2,
    }
    meta.update({f"qwen3moe.{k}": v for k, v in keys.items()})
    return ModelHeader(
        path="made/in-memory.gguf",
        shards=(),
        metadata=meta,
        array_lengths={"tokenizer.ggml.tokens": n_vocab},
        tensors=tuple(tensors),
        digest="made",
    )


@functools.cache
def replica_header(stem: str) -> ModelHeader:
    """The header of a replica, straight from its spec: no file is written."""
    spec = make_replica.load_spec(str(SPECS / f"{stem}.yaml"))
    arch = spec["arch"]
    meta: dict[str, Any] = {"general.architecture": arch}
    for key, value in spec["kv"].items():
        meta[f"{arch}.{key}"] = tuple(value) if isinstance(value, list) else value
    # the vocabulary itself takes seconds to make up; its length is all that a planner reads
    lengths = {"tokenizer.ggml.tokens": spec["vocab"]["n_tokens"]}
    tensors = tuple(
        TensorInfo(
            name=t.name,
            shape=tuple(t.shape),
            type_id=int(t.qtype),
            type_name=t.qtype.name,
            size_bytes=t.nbytes,
            shard=0,
            offset_bytes=0,
        )
        for t in make_replica.tensors_of(spec)
    )
    return ModelHeader(path=stem, shards=(), metadata=meta, array_lengths=lengths, tensors=tensors, digest=stem)


def card(index: int, free_mib: int, total_mib: int = 24576, context_mib: int = 300, backend: str = "cuda") -> Device:
    """One card; its context is taken as measured."""
    name = f"{backend.upper()}{index}"
    return Device(
        name=name,
        buffer_type=name,
        backend=backend,
        description="a card",
        total_bytes=total_mib * MIB,
        free_bytes=free_mib * MIB,
        context_bytes=context_mib * MIB,
        memory_bps=936e9,
        link_bps=25e9,
    )


def rig(*devices: Device, ram_gib: float = 190) -> Inventory:
    """Cards and plain host memory."""
    return Inventory(
        devices=devices,
        host=Host(
            total_bytes=int((ram_gib + 6) * GIB),
            available_bytes=int(ram_gib * GIB),
            limited_by="MemAvailable",
            cores=16,
            triad_bps=116e9,
        ),
    )


def deepseek(**changes: Any) -> Settings:
    """The settings of the shipped two-card DeepSeek slug, prompt cache off and one checkpoint."""
    base: dict[str, Any] = {
        "n_ctx_per_stream": 204800,
        "n_batch": 4096,
        "n_ubatch": 4096,
        "drafter_type": "draft-dspark",
        "draft_n_max": 5,
        "cache_ram_bytes": 0,
        "checkpoints": 1,
    }
    return Settings(**(base | changes))
