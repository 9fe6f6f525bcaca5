"""A server of ours: its gates, its record, how it ended, and the audit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.structs.plan import Source


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
