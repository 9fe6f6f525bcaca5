"""A server of ours: its gates, its record, how it ended, and the audit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
class Request:
    """One request of a server, from its log and /slots; None is what neither says.

    prompt_tokens  all of the prompt, cached ones too
    read_tokens    how many of them are read
    read_tps       prompt tokens a second
    """

    slot: int
    task: int
    prompt_tokens: int | None = None
    read_tokens: int | None = None
    written_tokens: int | None = None
    read_tps: float | None = None
    ended: bool = False

    @property
    def left_s(self) -> float | None:
        """Seconds until the prompt is read, None when that cannot be told or it is."""
        if self.prompt_tokens is None or self.read_tokens is None or not self.read_tps or self.written_tokens:
            return None
        return max(0, self.prompt_tokens - self.read_tokens) / self.read_tps


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What a server is doing, judged by what moves: token counters and lines about requests.

    busy     requests that are being worked on; None when neither /slots nor the log tells
    still_s  how long nothing has moved while a request is being worked on, nor was read from a disk; None when idle, or
             when nobody looked before
    wedged   nothing moved for longer than any batch takes: it will not come back by itself
    """

    busy: int | None
    requests: tuple[Request, ...] = ()
    still_s: float | None = None
    wedged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Memory a while before the end: of the server, and what the host had to give."""

    before_s: float
    rss_bytes: int | None
    host_available_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One server of ours: written before it is started, kept until it ended.

    started_at    identifies the run, also after its keeper started the server again (restarted_at is then)
    asked         options, force and engine as a person gave them: what `switch -` asks for again
    restarts      how often its keeper started the server again
    container     of a server in a container: client, name and folder of what was started, see serve/container
    proven_tokens a prompt of so many tokens was survived by this launch, at proven_at (seconds since 1970; before
                  started_at when an earlier start of the same showed it); None: its depth is unverified
    """

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
    asked: Mapping[str, Any] = field(default_factory=dict)
    restarts: int = 0
    restarted_at: float | None = None
    container: Mapping[str, Any] = field(default_factory=dict)
    proven_tokens: int | None = None
    proven_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a server ended, as its keeper saw it: one line of `history`.

    began_at    start of this server; later than started_at when it had been started again
    ready_at    None when it never was ready
    still_s     how long nothing had moved in it, of one that was wedged
    oom_kills   how often the kernel killed in our control group for want of memory just before this end; None where it
                does not say, and of an end that was no kill
    kernel      its own lines about this process or a card
    samples     memory, the oldest first
    requests    the last ones; those not `ended` were being worked on
    """

    slug: str
    pid: int
    started_at: float
    ended_at: float
    exit_code: int | None
    signal: str | None
    reason: str  # 'stopped', 'crashed', 'start failed', 'wedged'
    last_rss_bytes: int | None
    log_path: str
    began_at: float | None = None
    ready_at: float | None = None
    restarts: int = 0
    still_s: float | None = None
    oom_kills: int | None = None
    kernel: tuple[str, ...] = ()
    samples: tuple[Sample, ...] = ()
    requests: tuple[Request, ...] = ()
    cause: str = ""
    asked: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One unit. path is where it lies, None when it was only printed; notes are worth saying, commands to be pasted.

    state  as `systemctl is-active` says it; None where no systemd answers
    """

    target: str
    name: str
    path: str | None
    text: str
    cards: tuple[str, ...] = ()
    state: str | None = None
    notes: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


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
