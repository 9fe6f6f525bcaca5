"""The host sum: every byte of ordinary memory that the server will take, from the placement itself.

    host = host bundles + input tensors + drafter on host + compute + output buffer
         + cache_ram (always emitted) + checkpoints x bytes x slots (bounded, emitted) + process and driver

One function, so moving one bundle moves the gate by exactly that bundle. Constants say where they were seen.
"""

from __future__ import annotations

from dataclasses import replace

from launcher.planner import compute, drafter, kv
from launcher.planner.budget import Problem
from launcher.planner.shape import ModelShape
from launcher.structs import HOST_TERMS, Settings, Source
from launcher.units import GIB, MIB

# Process, driver and pinned-memory bookkeeping with CUDA: "1-2 GiB" in the engine's reports; the upper end.
CUDA_OVERHEAD_BYTES = 2 * GIB
# Without CUDA the process itself: the demo model on two RPC devices (b11434, x86-64) held 201 MiB, 168 of them buffers;
# a real vocabulary, more threads and requests in flight take the rest.
PLAIN_OVERHEAD_BYTES = 512 * MIB
CACHE_RAM_MAX_BYTES = 2 * GIB
CHECKPOINTS_MAX = 32


def host_terms(p: Problem, host_layers: tuple[int, ...], resident_anywhere: bool, s: Settings) -> dict[str, int]:
    """Every term of HOST_TERMS in bytes.

    host_layers  layers whose bundle stays in host memory
    s            with cache_ram_bytes and checkpoints set
    """
    shape = p.shape
    backends = tuple(d.backend for d in p.devices)
    alone = not p.devices
    per_checkpoint = kv.checkpoint_bytes(shape, s, p.n_rs)
    terms = {
        "experts": sum(shape.layers[i].bundle.cpu for i in host_layers),
        "embedding": shape.input.cpu,
        "dense": sum(layer.dense.cpu for layer in shape.layers) + shape.per_device.cpu if alone else 0,
        "output": shape.output.cpu - (shape.input.cpu if shape.tied else 0) if alone else 0,
        "kv": sum(p.kv_bytes) if alone else 0,
        "drafter": _drafter(p) + (sum(p.mtp_bytes) if alone else 0),
        "projector": p.projector_bytes if alone else 0,
        "compute": _compute(p, backends, bool(host_layers), resident_anywhere),
        "output_buffer": compute.output_buffer_bytes(shape, s, p.draft),
        "cache_ram": s.cache_ram_bytes or 0,
        "checkpoints": (s.checkpoints or 0) * per_checkpoint * max(1, s.n_parallel),
        "overhead": CUDA_OVERHEAD_BYTES if any(b != "rpc" for b in backends) else PLAIN_OVERHEAD_BYTES,
    }
    return {name: terms[name] for name in HOST_TERMS}


def sources(p: Problem, s: Settings) -> dict[str, Source]:
    """Where each host term came from; `s` as the person gave it, None where we chose."""
    source = dict.fromkeys(HOST_TERMS, Source.FORMULA)
    if p.measured and p.measured.source is Source.DRY_RUN:  # an earlier launch shows the devices' buffers alone
        source["compute"] = Source.DRY_RUN
    for term, chosen in (("cache_ram", s.cache_ram_bytes), ("checkpoints", s.checkpoints)):
        if chosen is not None:
            source[term] = Source.DECLARED
    return source


def least(s: Settings, shape: ModelShape, n_rs: int) -> Settings:
    """`auto` at its least: no prompt cache, one checkpoint (none for models that make none). The gate uses this."""
    one = 1 if kv.checkpoint_bytes(shape, s, n_rs) else 0
    return replace(
        s,
        cache_ram_bytes=0 if s.cache_ram_bytes is None else s.cache_ram_bytes,
        checkpoints=one if s.checkpoints is None else s.checkpoints,
    )


def generous(s: Settings, shape: ModelShape, n_rs: int, spare_bytes: int) -> Settings:
    """`auto` once the spare is known: prompt cache min(2 GiB, spare/4), checkpoints out of spare/8, at most 32."""
    spare = max(0, spare_bytes)
    cache = s.cache_ram_bytes
    if cache is None:
        cache = min(CACHE_RAM_MAX_BYTES, spare // 4) // MIB * MIB
    checkpoints = s.checkpoints
    if checkpoints is None:
        each = kv.checkpoint_bytes(shape, s, n_rs) * max(1, s.n_parallel)
        checkpoints = min(CHECKPOINTS_MAX, max(1, spare // 8 // each)) if each else 0
    return replace(s, cache_ram_bytes=cache, checkpoints=checkpoints)


def _drafter(p: Problem) -> int:
    """Weights, cache and compute of the drafter in host memory: the dry run's sum where it measured one."""
    if p.measured and p.measured.draft_host_bytes:
        return p.measured.draft_host_bytes
    return sum(drafter.host_bytes(p))


def _compute(p: Problem, backends: tuple[str, ...], host_anywhere: bool, resident_anywhere: bool) -> int:
    """The target's compute buffer in host memory."""
    if p.measured:
        return p.measured.host_compute_bytes
    return compute.host_compute_bytes(
        p.shape,
        p.settings,
        backends=backends,
        host_anywhere=host_anywhere,
        resident_anywhere=resident_anywhere,
        override=bool(p.moe_layers),
    )
