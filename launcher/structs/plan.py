"""The knobs, the placement and its proof, and the process that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from launcher.structs.container import Container
from launcher.structs.inventory import Device, NumaNode


class Source(StrEnum):
    """Where a byte term came from, best first."""

    MEASURED = "measured"
    DRY_RUN = "dry-run"
    FORMULA = "formula"
    DECLARED = "declared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a person chose, from the slug and the command line: the planner's and argv's only knobs.

    n_ctx_per_stream None means the training context. cache_ram_bytes / checkpoints None mean `auto`.
    threads None means every core, or those of the NUMA nodes that are chosen. numa: auto, off, bind[:N],
    interleave[:LIST], or a mode of the engine. tensor_split, when given, is kept, and so is the order of the devices
    with keep_order. n_gpu_layers is always "all": the planner decides by bytes instead. drafter_device: None follows
    the target's split, "host", or a device's name; drafter_layers: how many of its last slots lie on devices, None all;
    drafter_experts: "auto" or "host".
    """

    n_ctx_per_stream: int | None = None
    n_parallel: int = 1
    kv_unified: bool = False
    n_batch: int = 2048
    n_ubatch: int = 512
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "on"
    load_mode: str = "none"
    threads: int | None = None
    numa: str = "auto"
    cache_ram_bytes: int | None = None
    checkpoints: int | None = None
    drafter_type: str | None = None
    draft_n_max: int = 0
    drafter_device: str | None = None
    drafter_layers: int | None = None
    drafter_experts: str = "auto"
    residency: str | Mapping[str, tuple[int, ...]] = "auto"
    margin_bytes: int | None = None
    reserve_bytes: Mapping[str, int] = field(default_factory=dict)
    tensor_split: tuple[int, ...] | None = None
    keep_order: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCompute:
    """Buffers as the engine's own dry run gave them for one exact argv, or as an earlier launch showed them (`source`).

    device name -> bytes of the main context and of the drafter's (None where the engine could not measure it).
    """

    compute_bytes: Mapping[str, int]
    host_compute_bytes: int
    model_bytes: Mapping[str, int]
    context_bytes: Mapping[str, int]
    draft_bytes: Mapping[str, int] | None = None  # weights + cache + compute of the drafter, per device
    draft_host_bytes: int | None = None
    source: Source = Source.DRY_RUN


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """The model part of a plan document."""

    path: str
    arch: str
    shards: int
    file_bytes: int
    n_layer: int
    n_expert: int
    n_expert_used: int
    n_ctx_train: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """Where one block lies. bundle_bytes 0: a dense block. loaded False: in the file, not loaded by these flags."""

    index: int
    device: str
    resident: bool
    loaded: bool
    dense_bytes: int
    bundle_bytes: int
    kv_bytes: int


DEVICE_TERMS = ("dense", "experts", "output", "kv", "compute", "drafter", "projector", "context", "margin")
HOST_TERMS = (
    "experts", "embedding", "dense", "output", "kv", "drafter", "projector",
    "compute", "output_buffer", "cache_ram", "checkpoints", "overhead",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """One device's share: `terms` has every name of DEVICE_TERMS, `source` where each came from."""

    device: Device
    rig_name: str
    layers: tuple[int, ...]
    owns_output: bool
    resident_layers: tuple[int, ...]
    terms: Mapping[str, int]
    source: Mapping[str, Source]

    @property
    def used_bytes(self) -> int:
        """Every term but the margin."""
        return sum(v for k, v in self.terms.items() if k != "margin")

    @property
    def headroom_bytes(self) -> int:
        """Free memory less what is used; the margin is part of it."""
        return (self.device.free_bytes or 0) - self.used_bytes

    @property
    def short_bytes(self) -> int:
        """By how much the device overflows, the margin counted; 0 when it fits."""
        return max(0, self.terms["margin"] - self.headroom_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaOption:
    """One way to place host memory on NUMA nodes.

    mode   bind, interleave: a memory policy over `nodes` (empty: all, where only their count is known); distribute,
           isolate, numactl, off: none, any node may hold a page
    cores  physical cores of these nodes; available_bytes: what a server can have of their memory; fits: the host sum
    bps    measured triad, bytes a second, None when that was not measured
    """

    mode: str
    nodes: tuple[int, ...]
    available_bytes: int
    fits: bool
    cores: int
    bps: float | None = None

    @property
    def label(self) -> str:
        """As `--numa` takes it: `bind:0`, `interleave:0,1`, `distribute`."""
        return f"{self.mode}:{','.join(map(str, self.nodes))}" if self.nodes else self.mode


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaPlan:
    """The NUMA nodes of a machine with more than one.

    nodes        what is known of each, empty where only their count is
    summary      the choice, why, and the alternatives with their GB/s, on one line
    policy       the words of numactl that place memory and threads, empty: no policy of ours
    engine_mode  the value of the engine's --numa, None: not written
    numactl      its path, None when it is not installed
    """

    chosen: NumaOption
    why: str
    alternatives: tuple[NumaOption, ...]
    policy: tuple[str, ...]
    engine_mode: str | None
    numactl: str | None
    threads: int
    nodes: tuple[NumaNode, ...]
    summary: str

    @property
    def where(self) -> str:
        """`bind:0` where a memory policy decides what can be reached, else empty."""
        return self.chosen.label if self.policy else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """Host memory: `terms` has every name of HOST_TERMS; layers are those whose experts (or all) lie in host memory.

    numa  None on a machine with one node; else available_bytes is what its choice can reach
    """

    terms: Mapping[str, int]
    source: Mapping[str, Source]
    available_bytes: int
    layers: tuple[int, ...]
    numa: NumaPlan | None = None

    @property
    def required_bytes(self) -> int:
        """The sum of all terms."""
        return sum(self.terms.values())

    @property
    def short_bytes(self) -> int:
        """What is missing; 0 when it fits."""
        return max(0, self.required_bytes - self.available_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One `-ot` rule: an unanchored ECMAScript pattern and a buffer type."""

    pattern: str
    buffer_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Low and high of an estimate; None where a rig fact is missing."""

    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Expected tokens a second on this rig, and the rig fact that decides."""

    decode_tps: Range
    prefill_tps: Range
    limited_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    """One change that might make a plan fit, already planned."""

    change: str
    fits: bool
    resident_layers: int
    host_required_bytes: int
    host_available_bytes: int
    decode_tps: Range | None = None
    prefill_tps: Range | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a plan does not fit: where ('host' or a device name), the sum, the largest term, ways out."""

    where: str
    needed_bytes: int
    available_bytes: int
    largest_term: str
    ways_out: tuple[WayOut, ...] = ()

    @property
    def short_bytes(self) -> int:
        """What is missing."""
        return self.needed_bytes - self.available_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The placement and its proof. `settings` is resolved: no None is left in it that argv needs."""

    target: str
    model: ModelSummary
    settings: Settings
    drafter_path: str | None
    devices: tuple[DevicePlan, ...]
    layers: tuple[LayerPlan, ...]
    host: HostPlan
    tensor_split: tuple[int, ...]
    rules: tuple[Rule, ...]
    speed: Speed
    refusal: Refusal | None = None
    warnings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """True when no device and no host memory is over."""
        return self.refusal is None

    @property
    def n_ctx_total(self) -> int:
        """What `-c` gets: context per stream times streams."""
        return (self.settings.n_ctx_per_stream or 0) * self.settings.n_parallel

    @property
    def resident_layers(self) -> tuple[int, ...]:
        """Every layer whose expert bundle lies on a device, in order."""
        return tuple(layer.index for layer in self.layers if layer.resident and layer.bundle_bytes)

    @property
    def override_tensor(self) -> str | None:
        """The one `-ot` argument, None when there is no rule."""
        return ",".join(f"{r.pattern}={r.buffer_type}" for r in self.rules) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A plan and the exact process it becomes. `env` is the whole environment of the child; `env_set` what we set.

    container  around that process; None: a process of this machine
    """

    plan: Plan
    argv: tuple[str, ...]
    env: Mapping[str, str]
    env_set: Mapping[str, str]
    host: str
    port: int
    alias: str
    container: Container | None = None
