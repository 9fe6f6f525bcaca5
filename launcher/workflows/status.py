"""What runs and how far it has read, its log, its end; and what ended before.

Servers are found by their own process, whoever started them. A busy one is judged by what moves, see serve/alive.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from launcher.errors import EngineFailed, UsageError
from launcher.serve import alive, native, server, state
from launcher.structs import Activity, RunEnd, RunRecord
from launcher.units import duration
from launcher.workflows import switch

_POLL_S = 0.2
# One that does not answer /health is well when something moved in it as lately as this.
_MOVED_S = 60.0


def servers() -> tuple[Mapping[str, Any], ...]:
    """One mapping a record: record, alive, state, healthy, requests, activity, rss_bytes, uptime_s, keeper_alive, end.

    state: 'ready', 'loading', 'busy' (too busy to answer, and getting on), 'wedged', 'not answering', 'down' or its
    end; healthy None while it loads. activity: what it reads and writes, None unless it is up. 'down': its server ended
    and its keeper is about to write down how or to start it again; uptime_s is None then.
    """
    return tuple(_look(seen) for seen in state.survey())


def _look(seen: state.Seen) -> Mapping[str, Any]:
    record = seen.record
    found: dict[str, Any] = {
        "record": record,
        "alive": seen.alive,
        "state": seen.how,
        "healthy": None if seen.alive else False,
        "requests": None,
        "activity": None,
        "rss_bytes": None,
        "uptime_s": None,
        "keeper_alive": native.alive(record.keeper),
        "end": seen.end,
    }
    if not seen.alive:
        return found
    if not native.up(record):
        found["healthy"] = False
        return found
    with server.client_of(record) as client:
        code = client.health()
    # 0 is no failure before the first answer: the engine binds its port late, as a starting one.
    words = {200: ("ready", True), 503: ("loading", None)}
    if not all(native.alive(p) for p in record.rpc_servers):
        # the engine answers /health for ever, and aborts with the next token
        words[200] = ("RPC server gone", False)
    late = ("starting", None) if record.state == "starting" else ("not answering", False)
    found["state"], found["healthy"] = words.get(code, late)
    if code == 200 or record.state == "ready":
        doing = alive.activity(record)
        found["activity"], found["requests"] = doing, doing.busy
        if doing.wedged:
            found["state"], found["healthy"] = "wedged", False
        elif code == 0 and doing.still_s is not None and doing.still_s < _MOVED_S:
            found["state"], found["healthy"] = "busy", True
    found["uptime_s"] = max(0.0, time.time() - (record.restarted_at or record.started_at))
    process = state.proc(record.server)
    try:
        found["rss_bytes"] = int(process.memory_info().rss) if process else None
    except psutil.Error:
        found["rss_bytes"] = None
    return found


def verdict(found: tuple[Mapping[str, Any], ...], *, check: bool) -> int:
    """0, or with `check` a refusal unless a server runs and all that run are healthy.

    Raises EngineFailed (nothing-running, not-healthy).
    """
    if not check:
        return 0
    alive = [s for s in found if s["alive"]]
    if not alive:
        raise EngineFailed("nothing-running", "no server of ours runs", fix="launcher list, then: switch SLUG")
    bad = [s for s in alive if not s["healthy"]]
    if bad:
        words = ", ".join(f"{s['record'].slug} is {s['state']}{_for_how_long(s['activity'])}" for s in bad)
        raise EngineFailed("not-healthy", words, fix=f"launcher logs {bad[0]['record'].slug}")
    return 0


def _for_how_long(doing: Activity | None) -> str:
    return f" for {duration(doing.still_s)}" if doing and doing.wedged and doing.still_s is not None else ""


def logs(name: str | None, *, n_lines: int, follow: bool) -> Iterator[str]:
    """The end of a log as text, then what is added while its server runs.

    Raises UsageError (no-log, several-run, not-running).
    """
    path, record = _log_of(name)
    if n_lines:
        text = native.tail(str(path), n_lines)
        if text:
            yield text + "\n"
    if not follow:
        return
    with path.open("rb") as log:
        log.seek(0, 2)
        while True:
            piece = log.read()
            if piece:
                yield piece.decode("utf-8", "replace")
            elif record is None or not native.live(record):
                return
            else:
                time.sleep(_POLL_S)


def _log_of(name: str | None) -> tuple[Path, RunRecord | None]:
    records = state.records()
    if name is None and not state.running() and records:
        record = records[-1]
        return Path(record.log_path), record
    if name is None and not records:
        ended = state.history()
        if ended and Path(ended[-1].log_path).exists():
            return Path(ended[-1].log_path), None
        raise UsageError(
            "no-log", "nothing was started yet, so there is no log", fix="launcher list, then: switch SLUG"
        )
    if name is not None and not _matching(name, records):
        ended = tuple(e for e in state.history() if _is_named(e.slug, name) and Path(e.log_path).exists())
        if ended:
            return Path(ended[-1].log_path), None
    record = _one(name, records if name else state.running())
    return Path(record.log_path), record


def running_one(name: str | None) -> RunRecord:
    """The server of that name that runs or is being started, or the only one.

    Raises UsageError (several-run, not-running).
    """
    return _one(name, state.running())


def stop(name: str | None) -> tuple[tuple[RunRecord, RunEnd | None], ...]:
    """Stop the server of that name, or the only one; nothing to stop is no error.

    Raises UsageError (several-run, not-running), Locked.
    """
    with state.lock(switch.LOCK):
        for record in state.records():
            if not native.live(record) and (name is None or _is_named(record.slug, name)):
                native.stop(record)  # RPC servers that a killed keeper left; forgets the record
        records = state.records()
        if name is None and not records:
            return ()
        if name is not None and not _matching(name, records) and any(_is_named(e.slug, name) for e in state.history()):
            return ()
        record = _one(name, records)
        return ((record, native.stop(record)),)


def history() -> tuple[RunEnd, ...]:
    """Every run that ended, oldest first."""
    return state.history()


def _one(name: str | None, records: tuple[RunRecord, ...]) -> RunRecord:
    found = records if name is None else _matching(name, records)
    if len(found) == 1:
        return found[0]
    known = " | ".join(r.slug for r in (found or records))
    if found:
        raise UsageError(
            "several-run",
            f"{len(found)} servers run: which one?",
            context=known,
            fix=f"launcher status     # then name one: {known}",
        )
    what = f"no server is called {name!r}" if name else "no server of ours runs"
    raise UsageError("not-running", what, context=f"running: {known or 'none'}", fix="launcher status")


def _matching(name: str, records: tuple[RunRecord, ...]) -> tuple[RunRecord, ...]:
    exact = tuple(r for r in records if r.slug == name)
    return exact or tuple(r for r in records if _is_named(r.slug, name))


def _is_named(slug: str, name: str) -> bool:
    return slug == name or (slug.endswith(name) and slug[-len(name) - 1] in "/-_.")
