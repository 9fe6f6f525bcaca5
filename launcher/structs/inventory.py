"""What is there to plan with: devices, host, engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    numa_node     the node whose memory is nearest to it, None when nobody says
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
    numa_node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One NUMA node with memory that this process may use.

    index   the kernel's number; numbers may have gaps
    cpus    CPUs there that we may run on (empty in a rig file); cores: physical ones, 0 for memory without CPUs
    socket  the processor package, None when unknown: several nodes of one are sub-NUMA clusters
    bps     measured triad, bytes a second, with the memory and the threads bound to this node
    """

    index: int
    total_bytes: int
    available_bytes: int
    cores: int
    cpus: tuple[int, ...] = ()
    socket: int | None = None
    bps: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """This machine's memory and cores. available_bytes is the least of MemAvailable and every cgroup above us.

    numa_nodes      nodes with memory that we may use, at least 1; nodes: what is known of each, empty when only the
                    count is
    interleave_bps  measured triad, bytes a second, with the pages interleaved over all nodes; distribute_bps with
                    the threads distributed (`--numa distribute`) and no memory policy
    numactl         path of numactl, None when it is not installed
    """

    total_bytes: int
    available_bytes: int
    limited_by: str  # 'MemAvailable', or the path of the cgroup file (or the node list in /proc) that binds
    cores: int  # physical cores of the effective cpuset (and quota), at least 1
    numa_nodes: int = 1
    triad_bps: float | None = None
    wsl: bool = False
    nodes: tuple[NumaNode, ...] = ()
    interleave_bps: float | None = None
    distribute_bps: float | None = None
    numactl: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One llama-server and what its own --help says it can do. removed: flag that is gone -> what took its place."""

    path: str
    version: str
    digest: str  # sha256 of the binary
    found_by: str  # '--engine', 'slug', 'LLAMA_SERVER', 'engine use', 'PATH', 'build folder', 'engine install'
    flags: frozenset[str] = frozenset()
    spec_types: frozenset[str] = frozenset()
    rpc_server: str | None = None  # ggml-rpc-server beside it
    removed: Mapping[str, str] = field(default_factory=dict)

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
