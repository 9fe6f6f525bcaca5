"""What a page about a machine holds: its cards and memory, what runs on it, and rows of measured results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from launcher.structs.inventory import Engine, GpuProcess, Host
from launcher.structs.run import RunEnd, RunRecord

# ----------------------------------------------------------------------------------------- the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """One card (or MIG slice) as the driver shows it; links are PCIe generation and lanes. None: not told.

    others  processes there that are not of a server of ours; ours: those that are
    """

    name: str
    uuid: str | None
    pci: str | None
    total_bytes: int | None
    free_bytes: int | None
    link_gen: int | None
    link_gen_max: int | None
    link_width: int | None
    link_width_max: int | None
    numa_node: int | None
    mig: bool
    others: tuple[GpuProcess, ...] = ()
    ours: tuple[GpuProcess, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """Memory channels with a module in them; None where only the modules are told. by: the source that said so."""

    populated: int | None
    modules: int
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDetail:
    """What speed depends on beside size and cores; None where the kernel does not say (a virtual machine, mostly).

    governors         of all CPUs, each once
    transparent_huge  `always`, `madvise` or `never`
    swap_*            0 where there is none
    """

    processor: str | None
    governors: tuple[str, ...] | None
    transparent_huge: str | None
    swap_total_bytes: int | None
    swap_free_bytes: int | None
    channels: Channels | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Cards, host and engine now. driver None: no NVIDIA driver answers; engine None: `engine_missing` says why."""

    cards: tuple[CardFacts, ...]
    driver: str | None
    host: Host
    detail: HostDetail
    engine: Engine | None
    engine_missing: str = ""
    warnings: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------ what runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One device of a run. slots: repeating layers and the output that its split gives it, None when not told.

    resident  layers whose experts are pinned there by a rule
    """

    device: str
    slots: int | None
    resident: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A server of ours that runs, or the last that did.

    record      None where the run ended and its record was forgotten: settings and placement are unknown then
    placed      its devices; None where no command line is left that tells
    real_bytes  buffer name -> kind -> bytes, from its own load log; empty when that has none
    cause       what the messages of a run that failed mean, empty when none is known
    log_tail    None unless it was asked for
    """

    slug: str
    alive: bool
    state: str
    started_at: float
    record: RunRecord | None
    settings: Mapping[str, object]
    placed: tuple[Placed, ...] | None
    real_bytes: Mapping[str, Mapping[str, int]]
    end: RunEnd | None
    cause: str = ""
    log_tail: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Private:
    """What must not leave this machine.

    literals  secrets, cut out wherever they stand; words: secrets too short for that, hidden where they stand alone
    """

    home: str = ""
    user: str = ""
    hosts: tuple[str, ...] = ()
    literals: tuple[str, ...] = ()
    words: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The page. made_at is in seconds of the epoch."""

    made_at: float
    version: str
    machine: Machine
    runs: tuple[RunFacts, ...]
    full: bool = False


# ------------------------------------------------------------------------------- rows of measured results


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The rig of a row; None and empty: the results do not say."""

    cards: tuple[tuple[str, str], ...] = ()  # (UUID, name), in PCI order
    driver: str | None = None
    processor: str | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    engine: str | None = None
    engine_digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRatio:
    """ours / theirs over the rounds that both have: median, and a 95 % interval (None for a single pair)."""

    metric: str  # 'decode', 'prefill 4096'
    median: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Memory of one card after boot, the most of all rounds; planned None for an arm without a plan."""

    device: str
    planned_bytes: int | None
    used_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRow:
    """One arm of a run: medians over its n good rounds, tokens a second and seconds. None: withheld or not measured.

    withheld  why there is no headline number, empty when there is one; n then counts the rounds that would make it
    failed    rounds that gave an error, and what the first of them said
    least_free_bytes  by device, the least of all rounds
    replanned         weights of its starts where they are other ones than the plan of the run says: what was learned
                      from the first start changed the placement; empty when it did not
    """

    arm: str
    flags: tuple[str, ...]
    n: int
    decode_tps: float | None
    prefill_tps: Mapping[int, float | None]
    load_s: float | None
    uses: tuple[Use, ...]
    least_free_bytes: Mapping[str, int]
    ratios: tuple[PairedRatio, ...] = ()
    withheld: str = ""
    failed: int = 0
    error: str = ""
    replanned: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderRow:
    """The depth ladder: deepest prompt (tokens) that was answered, and the one at which it died."""

    survived: bool
    deepest_tokens: int | None
    died_tokens: int | None
    error: str
    least_free_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TermRow:
    """Planned against real bytes of one kind on one device, as the first start of a run showed them."""

    device: str
    kind: str
    planned_bytes: int
    real_bytes: int | None
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityRow:
    """A bundle more on a device: the card that was meant, and by how much each grew."""

    order: tuple[str, ...]
    device_order: str
    meant: str
    bundle_bytes: int
    grown_bytes: Mapping[str, int]
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRows:
    """All of one run on one rig. at: seconds of the epoch of its first row.

    model, settings   file name and flags of the plan, without paths, ports and rules
    resident          device -> layers whose experts are there
    """

    run: str
    at: int
    rig: Fingerprint
    model: str = ""
    flags: tuple[str, ...] = ()
    tensor_split: tuple[int, ...] = ()
    resident: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    free_bytes: Mapping[str, int] = field(default_factory=dict)
    terms: tuple[TermRow, ...] = ()
    audit_failed: str = ""
    ladder: LadderRow | None = None
    arms: tuple[ArmRow, ...] = ()
    hops: tuple[ArmRow, ...] = ()
    identity: tuple[IdentityRow, ...] = ()
    notes: tuple[str, ...] = ()
