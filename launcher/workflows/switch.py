"""Plan and check for the state after servers of ours are gone; only then stop them, start, wait, compare, prove.

Nothing that works is touched before every gate is open. Whatever ends this command before READY ends what it started.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Protocol, TypeVar

from launcher.errors import LauncherError, Refused
from launcher.facts import devices as device_facts
from launcher.serve import alive, native, state
from launcher.structs import Gate, Plan, RunRecord
from launcher.units import MIB
from launcher.workflows import back, overrides, plan, preflight, start
from launcher.workflows import target as targets
from launcher.workflows.plan import Planned
from launcher.workflows.start import Switched
from launcher.workflows.target import Target

LOCK = "engine"
_T = TypeVar("_T")
# Drivers give memory back a moment after the process is gone.
_SETTLE_S = 60.0
_SETTLED_BYTES = 200 * MIB


class Progress(start.Progress, Protocol):
    """Where `switch` says what it does; `render` draws it."""

    def back(self, slug: str, options: tuple[str, ...]) -> None:
        """`switch -`: what it goes back to, with which options."""

    def planned(self, plan: Plan, seconds: float) -> None:
        """The placement that will be started."""

    def checked(self, gates: tuple[Gate, ...]) -> None:
        """Every gate is open."""

    def kept(self, running: tuple[RunRecord, ...]) -> None:
        """Refused or interrupted before anything was stopped: these servers go on."""

    def lost(self, stopped: tuple[tuple[RunRecord, str], ...]) -> None:
        """Failed or interrupted later: these servers are gone, nothing runs in their place; each with its way back."""

    def confirm(self, record: RunRecord, requests: int | None) -> bool | None:
        """Ask whether this server may be stopped; None when there is nobody to ask."""

    def stopped(self, record: RunRecord, seconds: float) -> None:
        """A server of ours is gone."""

    def replanned(self, plan: Plan, same: bool) -> None:
        """Planned once more with what is free now; whether the placement is the same."""


def run(
    text: str,
    given: Mapping[str, Any],
    *,
    engine: str | None,
    force: bool,
    yes: bool,
    quick: bool,
    progress: Progress,
) -> Switched:
    """`switch`; `-` is what ran before, as it was asked for then, options given now on top.

    Raises UsageError, SlugInvalid, Refused (a gate; needs-yes, not-stopped), EngineFailed, Locked.
    """
    # What is given now is kept for `switch -`, which may come from another folder.
    given, engine = overrides.from_anywhere(given), overrides.absolute(engine) if engine else None
    if text == "-":
        last = back.before()
        text, given = last.slug, overrides.over(last.given, given)
        force, engine = force or last.force, engine or last.engine
        progress.back(text, tuple(overrides.words(given)))
    with _told(progress.kept, state.running), preflight.as_gate():
        target = targets.resolve(text)
    with _terminated_as_interrupted(), state.lock(LOCK):
        running = state.running()
        with _told(progress.kept, lambda: running):
            planned = _checked(target, given, engine, force, running, progress)
            _ask(running, yes, progress)
        with _told(progress.lost, lambda: tuple((r, back.line(r)) for r in running if not native.live(r))):
            if running:
                planned = _make_room(target, given, engine, force, running, planned, progress)
            for record in state.records():
                if record.slug == target.name:
                    native.stop(record)  # what a killed keeper left behind
            asked = {"given": dict(given), "force": force, "engine": engine}
            return start.start(target, planned, progress, asked, alone=not running, quick=quick)


@contextlib.contextmanager
def _told(tell: Callable[[_T], None], whom: Callable[[], _T]) -> Iterator[None]:
    """Whatever ends this block, the person reads what became of the servers that ran before."""
    try:
        yield
    except (LauncherError, KeyboardInterrupt):
        tell(whom())
        raise


def _checked(
    target: Target,
    given: Mapping[str, Any],
    engine: str | None,
    force: bool,
    running: tuple[RunRecord, ...],
    progress: Progress,
) -> Planned:
    begun = time.monotonic()
    checked = preflight.check(
        target, given, engine=engine, force=force, gone=running, command=_command(engine, force)
    )  # fmt: skip
    preflight.refuse(checked)
    planned = checked.planned
    assert planned is not None  # without a plan a gate is closed
    progress.planned(planned.plan, time.monotonic() - begun)
    progress.checked(checked.gates)
    return planned


def _command(engine: str | None, force: bool) -> str:
    """How this command would be repeated, without TARGET and overrides."""
    return overrides.command("switch", {"--force": force, "--engine": engine})


def _ask(running: tuple[RunRecord, ...], yes: bool, progress: Progress) -> None:
    for record in running:
        answer = True if yes else progress.confirm(record, requests_in_flight(record))
        if answer is None:
            raise Refused(
                "needs-yes",
                f"{record.slug} runs on port {record.port} and nobody is here to ask whether it may be stopped",
                fix="--yes",
            )
        if not answer:
            raise Refused("not-stopped", f"{record.slug} keeps running on port {record.port}", fix="--yes")


def _make_room(
    target: Target,
    given: Mapping[str, Any],
    engine: str | None,
    force: bool,
    running: tuple[RunRecord, ...],
    planned: Planned,
    progress: Progress,
) -> Planned:
    """Stop ours, wait for the memory to come back, plan once more with what is really free."""
    begun = time.monotonic()
    for record in running:
        native.stop(record)
        progress.stopped(record, time.monotonic() - begun)
    _settle(planned.plan)
    checked = preflight.check(target, given, engine=engine, force=force, command=_command(engine, force))
    preflight.refuse(checked)
    assert checked.planned is not None
    progress.replanned(checked.planned.plan, plan.same_placement(planned.plan, checked.planned.plan))
    return checked.planned


def _settle(planned: Plan) -> None:
    wanted = {d.device.uuid: (d.device.free_bytes or 0) - _SETTLED_BYTES for d in planned.devices if d.device.uuid}
    deadline = time.monotonic() + _SETTLE_S
    while wanted and time.monotonic() < deadline:
        free = {card.uuid: card.free_bytes or 0 for card in device_facts.nvml_cards()}
        if all(free.get(uuid, least) >= least for uuid, least in wanted.items()):
            return
        time.sleep(0.5)


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """A SIGTERM ends like Ctrl-C, cleaning up. A lost terminal (SIGHUP) does not: the load goes on under its keeper."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def requests_in_flight(record: RunRecord) -> int | None:
    """Streams that are busy now, None when neither the server nor its log says."""
    return alive.look(record).activity.busy
