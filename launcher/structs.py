"""Frozen dataclasses that cross rooms, in pipeline order.

    Slug + ModelHeader(s) + Inventory(devices, host, engine) + Settings -> Plan -> RunRecord -> Audit

Bytes are `int` with the suffix `_bytes`; unknown is `None`, never 0; identity of a card is its UUID or PCI id,
of a process `(pid, create_time)`. Nothing here reads or computes more than a sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...]


class Source(StrEnum):
    """Where a byte term came from, best first."""

    MEASURED = "measured"
    DRY_RUN = "dry-run"
    FORMULA = "formula"
    DECLARED = "declared"


class Status(StrEnum):
    """Life of a slug; the last two need `--force`."""

    PRODUCTION = "production"
    INCUBATING = "incubating"
    DEPRECATED = "deprecated"


# --------------------------------------------------------------------------------------------- slug


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """Which file to load: `dir` under MODEL_DIR, `file` in it; `repo` is where `setup` fetches it."""

    file: str
    dir: str | None = None
    repo: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterRef:
    """The draft model; `type` is a value of the engine's --spec-type, `remote` its path in the repo."""

    file: str
    remote: str | None = None
    type: str
    n_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRef:
    """What the slug asks of the engine: abilities (`flag:--x`, `spec-type:x`), container image, own binary."""

    needs: tuple[str, ...] = ()
    image: str | None = None
    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcRef:
    """RPC devices by endpoint; `spawn` (loopback only): `switch` starts the servers and `stop` ends them.

    memory_bytes caps what the plan may put on each endpoint; None is all that the endpoint reports.
    """

    hosts: tuple[str, ...]
    spawn: bool = False
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """`serve:` of a slug. Context is per stream. None means `auto`."""

    host: str = "127.0.0.1"
    port: int = 8080
    alias: str | None = None
    n_ctx: int | None = None  # None: the model's training context
    n_parallel: int = 1
    kv_unified: bool = False
    n_batch: int = 2048
    n_ubatch: int = 512
    flash_attn: str = "on"
    type_k: str = "f16"
    type_v: str = "f16"
    threads: int | None = None
    load_mode: str = "none"
    numa: str = "auto"
    cache_ram_bytes: int | None = None
    checkpoints: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPolicy:
    """`placement:` of a slug. residency: 'auto', 'none' or device name -> layer indices."""

    residency: str | Mapping[str, tuple[int, ...]] = "auto"
    margin_bytes: int | None = None
    reserve_bytes: Mapping[str, int] = field(default_factory=dict)
    order: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slug:
    """One hand-edited YAML file, every default filled in. `name` is `family/name`."""

    name: str
    path: str
    title: str
    status: Status
    model: ModelRef
    drafter: DrafterRef | None = None
    mmproj: str | None = None
    engine: EngineRef = field(default_factory=EngineRef)
    devices_min: int = 0
    serve: ServeSettings = field(default_factory=ServeSettings)
    placement: PlacementPolicy = field(default_factory=PlacementPolicy)
    rpc: RpcRef | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    thinking: bool | None = None
    chat_template: str | None = None
    api_key_file: str | None = None
    extra_args: tuple[str, ...] = ()


# -------------------------------------------------------------------------------------------- model


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


# ---------------------------------------------------------------------------------------- inventory


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


# --------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a person chose, from the slug and the command line: the planner's and argv's only knobs.

    n_ctx_per_stream None means the training context. cache_ram_bytes / checkpoints None mean `auto`.
    tensor_split, when given, is kept, and so is the order of the devices with keep_order. n_gpu_layers is always
    "all": the planner decides by bytes instead.
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
class HostPlan:
    """Host memory: `terms` has every name of HOST_TERMS; layers are those whose experts (or all) lie in host memory."""

    terms: Mapping[str, int]
    source: Mapping[str, Source]
    available_bytes: int
    layers: tuple[int, ...]

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
    """A plan and the exact process it becomes. `env` is the whole environment of the child; `env_set` what we set."""

    plan: Plan
    argv: tuple[str, ...]
    env: Mapping[str, str]
    env_set: Mapping[str, str]
    host: str
    port: int
    alias: str


# ---------------------------------------------------------------------------------------------- run


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One preflight check: what it found, the number, and the fix when it says no."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    note: bool = False  # true: worth saying, never refuses
    context: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """Identity of a process: pids are reused, (pid, create_time) is not.

    start_ticks and boot_id say the same without the wall clock, which may be set while a server runs: when it was
    started in clock ticks after the boot that boot_id names. None where the kernel does not say.
    """

    pid: int
    create_time: float
    start_ticks: int | None = None
    boot_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One server of ours: written before it is started, kept until it ended."""

    slug: str
    server: ProcessId | None
    keeper: ProcessId | None
    rpc_servers: tuple[ProcessId, ...]
    rpc_endpoints: tuple[str, ...]
    argv: tuple[str, ...]
    env_set: Mapping[str, str]
    host: str
    port: int
    alias: str
    log_path: str
    state: str  # starting | ready | failed
    started_at: float
    ready_at: float | None = None
    audit: Audit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a server ended, as its keeper saw it: one line of `history`."""

    slug: str
    pid: int
    started_at: float
    ended_at: float
    exit_code: int | None
    signal: str | None
    reason: str  # 'stopped', 'crashed', 'start failed'
    last_rss_bytes: int | None
    log_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """Planned against real bytes of one kind on one device; shown: far enough apart that a person should see it."""

    device: str
    kind: str  # 'model', 'kv', 'compute', 'drafter', 'context'
    planned_bytes: int
    real_bytes: int
    shown: bool = False
    source: Source | None = None  # where the planned number came from


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditCard:
    """What the driver says of one card once the server is ready.

    planned_bytes  every term of the plan but the margin
    used_bytes     what our server holds there, None when the driver does not tell
    buffers_bytes  the sum of its buffers on it, as its log says
    context_bytes  what it holds beyond them; None when that cannot be told
    by             'process': of our own pid; 'card': what the card had free before less what it has free now
    """

    device: str
    planned_bytes: int
    used_bytes: int | None
    buffers_bytes: int
    context_bytes: int | None
    free_bytes: int | None
    margin_bytes: int
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What the load log and the driver say, beside the plan.

    worst   buffers that do not lie as planned, empty when they do
    failed  what must hold after boot and does not (the margin is not free)
    """

    rows: tuple[AuditRow, ...]
    ok: bool
    worst: str
    cards: tuple[AuditCard, ...] = ()
    failed: tuple[str, ...] = ()
