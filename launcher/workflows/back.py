"""`switch -`: what ran before, as it was asked for then."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.errors import UsageError
from launcher.serve import state
from launcher.structs import RunEnd, RunRecord
from launcher.workflows import overrides


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """A run to go back to. `given`, `force` and `engine` are what its `switch` was given."""

    slug: str
    given: Mapping[str, Any]
    force: bool
    engine: str | None


def before() -> Before:
    """The last run that was ready, other than what runs: another target, or the same with other options.

    One whose keeper was killed left no line of history; its record counts. Raises UsageError (nothing-before).
    """
    running = [_wish(record) for record in state.running()]
    ended: list[tuple[float, RunEnd | RunRecord]] = [(e.ended_at, e) for e in state.history() if _was_ready(e)]
    ended += [(r.ready_at, r) for r in state.records() if r.ready_at is not None and not state.live(r)]
    for _, run in sorted(ended, key=lambda pair: pair[0], reverse=True):
        if _wish(run) not in running:
            return _before(run)
    raise UsageError(
        "nothing-before",
        f"nothing else was ready before ({len(state.history())} runs in the history)",
        fix="launcher history     # then: switch SLUG",
    )


def line(run: RunEnd | RunRecord) -> str:
    """The line to paste that asks for this run again, with the options of then."""
    then = _before(run)
    options = {"--force": then.force, "--engine": then.engine}
    return shlex.join([*shlex.split(overrides.command("switch", options)), then.slug, *overrides.words(then.given)])


def _was_ready(end: RunEnd) -> bool:
    # a line of an older version does not say when; what crashed had been ready
    return end.ready_at is not None or end.reason in ("crashed", "wedged")


def _wish(run: RunEnd | RunRecord) -> tuple[str, dict[str, Any]]:
    return run.slug, dict(run.asked.get("given") or {})


def _before(run: RunEnd | RunRecord) -> Before:
    asked = run.asked
    engine = asked.get("engine")
    return Before(
        slug=run.slug,
        given=dict(asked.get("given") or {}),
        force=bool(asked.get("force")),
        engine=str(engine) if engine else None,
    )
