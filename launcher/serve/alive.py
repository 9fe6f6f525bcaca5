"""Whether a running server gets on: judged by its token counters, its log's lines about requests, and what it reads.

Never by a question that has to wait its turn: on many builds /slots is answered between two batches, and a batch of
4096 tokens takes minutes on a slow rig. So every question here has two seconds, and without an answer the log decides.
An idle server is not asked at all: each question would put a line into its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launcher.facts.serve_log import last_mark, parse_requests
from launcher.serve import state
from launcher.serve.native import WEDGED_S
from launcher.serve.reads import Reads, reads_of
from launcher.structs import Activity, Request, RunRecord

# Deep in a long prompt a batch takes longer than the first ones, not this much longer.
_TIMES_LONGEST = 3
_POLL_S = 5.0
_ASK_S = 2.0
_READING_S = 1.0
_LOG_END_BYTES = 256 * 1024
_COUNTERS = ("prompt_tokens_total", "tokens_predicted_total", "n_decode_total")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at a server; `moves` is all that changes while it gets on."""

    activity: Activity
    moves: tuple[object, ...]


def look(record: RunRecord) -> Look:
    """Ask /slots and /metrics, read the log's end. Takes four seconds at most, and raises nothing."""
    log = log_end(record.log_path)
    told = parse_requests(log)
    slots, totals = _ask(record)
    if slots is None:
        requests = tuple(r for r in told if not r.ended)
        busy = len(requests) if told else None
    else:
        by_task = {(r.slot, r.task): r for r in told}
        requests = tuple(_merged(slot, by_task) for slot in slots if slot.get("is_processing"))
        busy = len(requests)
    counted = tuple((r.slot, r.task, r.read_tokens, r.written_tokens) for r in requests)
    return Look(activity=Activity(busy=busy, requests=requests), moves=(last_mark(log), counted, totals))


def _ask(record: RunRecord) -> tuple[list[dict[str, Any]] | None, tuple[float, ...] | None]:
    import httpx

    from launcher.serve import server

    slots, totals = None, None
    with server.client_of(record, timeout_s=_ASK_S) as client:
        with contextlib.suppress(httpx.HTTPError, ValueError, TypeError):
            found = client.slots()
            slots = found if all(isinstance(slot, dict) for slot in found) else None
        if slots is not None:  # one that does not answer the first question lets the second wait as well
            with contextlib.suppress(httpx.HTTPError, ValueError):
                counters = client.metrics()
                totals = tuple(counters.get(f"llamacpp:{name}", 0.0) for name in _COUNTERS)
    return slots, totals


def _merged(slot: Mapping[str, Any], by_task: Mapping[tuple[int, int], Request]) -> Request:
    """A busy slot with what the log says of the same task. /slots counts, the log alone knows the prompt's length."""
    index, task = _whole(slot.get("id")), _whole(slot.get("id_task"))
    key = (-1 if index is None else index, -1 if task is None else task)
    told = by_task.get(key, Request(slot=key[0], task=key[1]))
    read = _whole(slot.get("n_prompt_tokens_processed"))
    if read is not None:
        read += _whole(slot.get("n_prompt_tokens_cache")) or 0
    step = slot.get("next_token")
    step = step[0] if isinstance(step, list) and step else step
    written = _whole(step.get("n_decoded")) if isinstance(step, Mapping) else None
    known = [n for n in (read, told.read_tokens) if n is not None]
    return replace(told, read_tokens=max(known, default=None), written_tokens=written, ended=False)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def log_end(path: str, size: int = _LOG_END_BYTES) -> str:
    """The last bytes of a log, from the start of a line; empty when there is none."""
    try:
        with Path(path).open("rb") as log:
            start = max(0, log.seek(0, os.SEEK_END) - size)
            log.seek(start)
            text = log.read(size).decode("utf-8", "replace")
    except OSError:
        return ""
    return text.partition("\n")[2] if start else text


# ------------------------------------------------------------------------------------------- watching


class Watch:
    """The keeper's eye on one server. `look` is asked only while a request is being worked on."""

    def __init__(self, record: RunRecord, wedged_s: float = WEDGED_S) -> None:
        self.record, self.wedged_s = record, wedged_s
        self.poll_s = min(_POLL_S, wedged_s / 4)
        self.activity = Activity(busy=None)
        self._last: Look | None = None
        self._reads: Reads | None = None
        self._busy = False
        self._log_bytes, self._mark = -1, ""
        self._moved_at = self._next = time.monotonic()
        self._longest_s = 0.0

    def tick(self) -> Activity:
        """What it is doing as of now; cheap unless it is busy and a look is due."""
        now = time.monotonic()
        if not (self._busy or self._named()):
            self._moved_at = now
            return self.activity
        if now < self._next:
            return self.activity
        seen, reads = look(self.record), reads_of(self.record.server)
        if self._last is None or seen.moves != self._last.moves:
            self._longest_s = max(self._longest_s, now - self._moved_at)
            self._moved_at = now
        elif reads is not None and reads.moved_since(self._reads):
            self._moved_at = now  # a cold model is still on its way; that is no length of a batch
        self._reads = reads
        self._last, self._next = seen, time.monotonic() + self.poll_s
        if seen.activity.busy is not None:
            self._busy = seen.activity.busy > 0
        if not self._busy:
            self._moved_at = now
            self._last = self._reads = None  # the next request starts from nothing
            self.activity = seen.activity
            forget(self.record)
            return self.activity
        still = now - self._moved_at
        wedged = still > max(self.wedged_s, _TIMES_LONGEST * self._longest_s)
        known = seen.activity if seen.activity.busy else replace(self.activity, busy=seen.activity.busy)
        self.activity = replace(known, still_s=still, wedged=wedged)
        _write_note(self.record, self.activity)
        return self.activity

    def _named(self) -> bool:
        """Whether the log names a request that was not there at the last look."""
        try:
            size = Path(self.record.log_path).stat().st_size
        except OSError:
            return False
        if size == self._log_bytes:
            return False
        self._log_bytes, before = size, self._mark
        self._mark = last_mark(log_end(self.record.log_path))
        return self._mark != before


def forget(record: RunRecord) -> None:
    """Drop the keeper's note."""
    with contextlib.suppress(OSError):
        state.note_path(record.slug).unlink(missing_ok=True)


def _write_note(record: RunRecord, activity: Activity) -> None:
    # Not synced: it is worth nothing after a crash of the machine, and is written every few seconds.
    now = time.time()
    path = state.note_path(record.slug)
    note = {"started_at": record.started_at, "looked_at": now, "moved_at": now - (activity.still_s or 0.0)}
    half = path.with_name(f".{path.name}.half")
    with contextlib.suppress(OSError):
        half.write_text(json.dumps({**note, "activity": asdict(activity)}), encoding="utf-8")
        half.replace(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    looked_at: float
    moved_at: float
    activity: Activity


def _read_note(record: RunRecord) -> _Note | None:
    """The keeper's last look at exactly this run, None when there is none that is fresh."""
    try:
        found = json.loads(state.note_path(record.slug).read_text(encoding="utf-8"))
        seen = found["activity"]
        requests = tuple(Request(**r) for r in seen["requests"])
        activity = Activity(**{**seen, "requests": requests})
        note = _Note(looked_at=float(found["looked_at"]), moved_at=float(found["moved_at"]), activity=activity)
        fresh = found["started_at"] == record.started_at and time.time() - note.looked_at < 6 * _POLL_S
        return note if fresh else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def activity(record: RunRecord) -> Activity:
    """What a server is doing, for how long nothing has moved: a look of our own beside the keeper's last one."""
    seen = look(record).activity
    note = _read_note(record)
    if seen.busy == 0:
        return seen
    if note is None:
        return _by_log_alone(record, seen)
    before = {(r.slot, r.task): r for r in note.activity.requests}
    apart_s = time.time() - note.looked_at
    requests = tuple(_timed(r, before.get((r.slot, r.task)), apart_s) for r in seen.requests) or note.activity.requests
    seen = replace(seen, requests=requests)
    if any(_counts(r) != _counts(before.get((r.slot, r.task))) for r in requests):
        return replace(seen, still_s=0.0)
    return replace(seen, still_s=max(0.0, time.time() - note.moved_at), wedged=note.activity.wedged)


def _by_log_alone(record: RunRecord, seen: Activity) -> Activity:
    """Without a keeper: a prompt that is being read puts a line into the log with every batch."""
    reading = [r for r in seen.requests if not r.written_tokens]
    try:
        still = max(0.0, time.time() - Path(record.log_path).stat().st_mtime)
    except OSError:
        return seen
    if not reading:
        return seen
    if still > WEDGED_S and _is_reading(record):
        return replace(seen, still_s=0.0)
    return replace(seen, still_s=still, wedged=still > WEDGED_S)


def _is_reading(record: RunRecord) -> bool:
    """Whether it reads from a disk just now: takes a second."""
    before = reads_of(record.server)
    time.sleep(_READING_S)
    now = reads_of(record.server)
    return now is not None and now.moved_since(before)


def _counts(request: Request | None) -> tuple[int | None, int | None] | None:
    return None if request is None else (request.read_tokens, request.written_tokens)


def _timed(now: Request, before: Request | None, apart_s: float) -> Request:
    """The rate from two looks, where the log states none."""
    if now.read_tps or before is None or now.read_tokens is None or before.read_tokens is None or apart_s < 1:
        return now
    gained = now.read_tokens - before.read_tokens
    return replace(now, read_tps=gained / apart_s) if gained > 0 else now
