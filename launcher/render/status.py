"""`status`, `stop` and `history` as people read them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launcher.render import document, out
from launcher.render.activity import activity_lines, request_line
from launcher.render.switch import card_line, depth
from launcher.structs import Activity, Audit, RunEnd, RunRecord, Sample, Source
from launcher.units import MIB, human, mib

if TYPE_CHECKING:
    from rich.text import Text


def show(servers: Sequence[Mapping[str, Any]], *, as_json: bool = False) -> None:
    """Print the status document, or the screen."""
    if as_json:
        out.document(document.status_document(servers))
        return
    out.show(screen(servers))


def screen(servers: Sequence[Mapping[str, Any]]) -> Iterator[Text | str]:
    """Two lines a server, and what came out other than planned."""
    if not servers:
        yield "nothing runs (launcher list, then: switch SLUG)"
    for s in servers:
        record: RunRecord = s["record"]
        if not s["alive"]:
            yield out.line((f"{s['state']:<14}  ", "no"), f"{record.slug}  was on :{record.port}")
            if s["end"] is not None:
                yield from why(s["end"])
            yield f"  launcher logs {record.slug} | launcher stop {record.slug} (forgets it)"
            continue
        style = "ok" if s["healthy"] else "note" if s["healthy"] is None else "no"
        doing: Activity | None = s["activity"]
        busy = "" if s["requests"] is None else f", {s['requests']} of its streams busy"
        pid = record.server.pid if record.server else "-"
        memory = f", {human(s['rss_bytes'])} resident" if s["rss_bytes"] else ""
        yield out.line((f"{s['state']:<14}  ", style), f"{record.slug}  {document.url(record.host, record.port)}")
        if s["uptime_s"] is None:
            yield "  its server has ended; its keeper writes down how, and starts it again where the slug says so"
            continue
        kept = "" if s["keeper_alive"] else "; its keeper is gone, so nobody will note how it ends"
        yield f"  model {record.alias}, pid {pid}, up {out.duration(s['uptime_s'] or 0)}{memory}{busy}{kept}"
        if record.restarts:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.restarted_at or record.started_at))
            yield f"  started again by its keeper, {record.restarts} in all, last at {at} (launcher history)"
        if record.state != "starting" or record.proven_tokens is not None:
            yield f"  {depth(record)}"
        if doing is not None:
            yield from activity_lines(doing, record)
        if record.audit is not None:
            yield from audit_lines(record.audit)


def audit_lines(audit: Audit) -> Iterator[Text | str]:
    """What each card held after boot, every difference that matters, every invariant that failed."""
    for card in audit.cards:
        yield f"  after boot {card_line(card)}"
    for row in (row for row in audit.rows if row.shown):
        apart = f"{round((row.real_bytes - row.planned_bytes) / MIB):+,}"
        bound = " (an upper bound)" if row.kind in ("compute", "drafter") and row.source is Source.FORMULA else ""
        planned = f"planned {mib(row.planned_bytes)} MiB{bound}"
        yield f"  {row.device} {row.kind}: {planned}, real {mib(row.real_bytes)} ({apart})"
    if audit.worst:
        yield from _folded("not as planned: ", audit.worst)
    for text in audit.failed:
        yield from _folded("warning: ", text)
    if audit.ok and not any(row.shown for row in audit.rows):
        yield "  memory as planned"


def _folded(head: str, text: str) -> Iterator[Text | str]:
    first, *more = out.fold(head + text, "    ", out.WIDTH - 2)
    yield out.line("  ", (first[: len(head)], "no"), first[len(head) :])
    yield from (f"  {part}" for part in more)


def show_stopped(stopped: Sequence[tuple[RunRecord, RunEnd | None]], *, as_json: bool = False) -> int:
    """Print what `stop` ended; nothing to stop is no failure."""
    if as_json:
        out.document(document.stopped_document(stopped))
        return 0
    lines = [f"stopped {r.slug} on :{r.port}{_how(e)}" for r, e in stopped]
    out.show(lines or ["nothing to stop"])
    return 0


def _how(end: RunEnd | None) -> str:
    return "" if end is None else f" after {out.duration(max(0.0, end.ended_at - end.started_at))}"


def show_history(ends: Sequence[RunEnd], *, as_json: bool = False) -> int:
    """Print every run that ended, the newest last; below one that failed what is known of why."""
    if as_json:
        out.document(document.history_document(ends))
        return 0
    rows = [["ended", "slug", "ran", "how", "memory", "log"]]
    for e in ends:
        code = e.signal or (f"exit {e.exit_code}" if e.exit_code is not None else "")
        rows.append([
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(e.ended_at)),
            e.slug,
            out.duration(max(0.0, e.ended_at - (e.began_at or e.started_at))),
            f"{e.reason} {f'({code})' if code else ''}".strip(),
            human(e.last_rss_bytes) if e.last_rss_bytes else "-",
            e.log_path,
        ])  # fmt: skip
    head, *lines = out.table(rows, left=frozenset({0, 1, 3, 5}))
    shown: list[Text | str] = [head]
    for e, text in zip(ends, lines, strict=True):
        shown += [text, *why(e)]
    out.show(shown if ends else ["nothing has ended yet"])
    return 0


def why(end: RunEnd) -> Iterator[Text | str]:
    """What the keeper saw around an end that nobody asked for: cause, kernel, requests, memory."""
    if end.reason == "stopped":
        return
    said = []
    if end.restarts:
        said.append(f"had been started again {end.restarts} x")
    if end.still_s is not None:
        said.append(f"no progress for {out.duration(end.still_s)}")
    if end.cause:
        said.append(end.cause)
    if end.oom_kills:
        said.append(f"the kernel ended {end.oom_kills} of this group for want of memory")
    said += [f"kernel: {line}" for line in end.kernel]
    said += [f"was {request_line(r)}" for r in end.requests if not r.ended]
    if end.samples:
        said.append(f"memory before: {'; '.join(map(_sample, end.samples[-3:]))}")
    for text in said:
        yield from out.fold(f"  {text}", "    ")


def _sample(sample: Sample) -> str:
    """`141.2 GiB resident, host had 0.4 GiB left, 2.0 s before`."""
    rss = "" if sample.rss_bytes is None else f"{human(sample.rss_bytes)} resident, "
    host = "" if sample.host_available_bytes is None else f"host had {human(sample.host_available_bytes)} left, "
    return f"{rss}{host}{out.duration(sample.before_s)} before"
