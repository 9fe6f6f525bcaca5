"""What is there to plan with: devices, host, engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that holds memory of a card, as NVML names it; used_bytes None when NVML may not say."""

    pid: int
    name: str
    used_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device that can hold weights.

    name          what the engine calls it now (`CUDA0`, `RPC1`)
    buffer_type   what `-ot` must call it (`CUDA0`, `RPC0[127.0.0.1:50052]`)
    backend       `cuda`, `rpc`, `vulkan`, ...: lower case, from the name
    shares_host   its memory is this host's memory (a CPU RPC server on loopback)
    context_bytes what one process holds there beyond all buffers, when measured on this rig
    link_bps      host to device, bytes a second; memory_bps its own memory
    """

    name: str
    buffer_type: str
    backend: str
    description: str
    total_bytes: int | None
    free_bytes: int | None
    uuid: str | None = None
    pci: str | None = None
    endpoint: str | None = None
    shares_host: bool = False
    context_bytes: int | None = None
    link_bps: float | None = None
    memory_bps: float | None = None
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """This machine's memory and cores. available_bytes is the least of MemAvailable and every cgroup above us."""

    total_bytes: int
    available_bytes: int
    limited_by: str  # 'MemAvailable' or the path of the cgroup file that binds
    cores: int  # physical cores of the effective cpuset (and quota), at least 1
    numa_nodes: int = 1
    triad_bps: float | None = None
    wsl: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One llama-server and what its own --help says it can do."""

    path: str
    version: str
    digest: str  # sha256 of the binary
    found_by: str  # '--engine', 'slug', 'LLAMA_SERVER', 'engine use', 'PATH', 'build folder', 'engine install'
    flags: frozenset[str] = frozenset()
    spec_types: frozenset[str] = frozenset()
    rpc_server: str | None = None  # ggml-rpc-server beside it

    def can(self, need: str) -> bool:
        """Whether an ability of a slug's `engine.needs` is there: `flag:--log-jsonl`, `spec-type:draft-dspark`."""
        kind, _, value = need.partition(":")
        if kind == "spec-type":
            return value in self.spec_types
        return kind == "flag" and value in self.flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What is there to plan with."""

    devices: tuple[Device, ...]
    host: Host
    engine: Engine | None = None
    warnings: tuple[str, ...] = ()
