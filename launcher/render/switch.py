"""`switch` while it works, and READY: one label a line, a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from launcher.render import document, out, preflight
from launcher.render import plan as plan_screen
from launcher.render.activity import activity_lines
from launcher.render.progress import Line, Rate, amounts, bar
from launcher.render.tradeoffs import between
from launcher.structs import Activity, Audit, AuditCard, Gate, Launch, Plan, RunRecord
from launcher.units import MIB, gib, mib

if TYPE_CHECKING:
    from rich.text import Text

_LABEL = 9


class Progress:
    """Draws what the workflow reports; with `as_json` on stderr, so that stdout stays one document."""

    def __init__(self, *, as_json: bool) -> None:
        self._stderr = as_json
        self._line = Line(sys.stderr if as_json else sys.stdout)
        self._rate = Rate()
        self._stage = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._line.done()

    def _say(self, label: str, text: str, style: str | None = None) -> None:
        self._line.done()
        head = (f"{label:<{_LABEL}}", style) if style else f"{label:<{_LABEL}}"
        first, *more = out.fold(text, "", out.WIDTH - _LABEL)
        out.show([out.line(head, first), *(" " * _LABEL + part for part in more)], stderr=self._stderr)

    def back(self, slug: str, options: Sequence[str]) -> None:
        """`switch -`: what it goes back to."""
        self._say("back", f"to {shlex.join([slug, *options])}")

    def planned(self, plan: Plan, seconds: float) -> None:
        """The placement that will be started."""
        self._say("plan", plan_screen.placement(plan))
        cards = ", ".join(
            f"{d.device.name} {mib(d.used_bytes)} of {mib(d.device.free_bytes or 0)} MiB" for d in plan.devices
        )
        ram = f"RAM {gib(plan.host.required_bytes)} of {gib(plan.host.available_bytes)} GiB"
        decode = plan.speed.decode_tps
        speed = f", {between(decode)} tok/s expected" if decode.low is not None else ""
        took = f"planned in {out.duration(seconds)}"
        self._say("", f"{cards}, {ram}{speed}, {took}" if cards else f"{ram}{speed}, {took}")
        for warning in plan.warnings:
            self._say("note", warning, "note")

    def checked(self, gates: tuple[Gate, ...]) -> None:
        """Every gate is open."""
        self._say("checks", preflight.summary(gates))
        for gate in (g for g in gates if g.note):
            self._say("note", f"{gate.detail}{f' (fix: {gate.fix})' if gate.fix else ''}", "note")

    def kept(self, running: tuple[RunRecord, ...]) -> None:
        """Refused before anything was stopped: what runs goes on."""
        for record in running:
            pid = f"pid {record.server.pid}" if record.server else "starting"
            self._not_switched(f"{record.slug} keeps running on :{record.port} ({pid}, untouched)")

    def lost(self, stopped: tuple[tuple[RunRecord, str], ...]) -> None:
        """Something failed after servers were stopped: they are gone, and how to bring them back."""
        for record, back in stopped:
            self._not_switched(f"{record.slug} was stopped and does not run; `{back}` brings it back")

    def _not_switched(self, text: str) -> None:
        self._line.done()
        first, *more = out.fold(f"NOT SWITCHED  {text}")
        head = out.line((first[: len("NOT SWITCHED")], "no"), first[len("NOT SWITCHED") :])
        out.show([head, *more], stderr=self._stderr)

    def confirm(self, record: RunRecord, requests: int | None) -> bool | None:
        """Ask on a terminal whether a server may be stopped; an empty answer is yes."""
        pid = f"pid {record.server.pid}" if record.server else "starting"
        busy = "" if not requests else f", {requests} request{'s' if requests > 1 else ''} in flight"
        question = f"{record.slug} :{record.port} {pid}{busy}"
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            self._say("running", question)
            return None
        self._line.done()
        sys.stdout.flush()
        sys.stderr.write(f"{'running':<{_LABEL}}{question} - stop it? [Y/n, --yes] ")
        sys.stderr.flush()
        answer = sys.stdin.readline()
        return answer != "" and answer.strip().lower() in ("", "y", "yes")

    def stopped(self, record: RunRecord, seconds: float) -> None:
        """A server of ours is gone."""
        self._say("", f"{record.slug} stopped in {out.duration(seconds)}")

    def replanned(self, plan: Plan, same: bool) -> None:
        """Planned once more with what is really free now."""
        holds = "the plan still holds" if same else f"planned again: {plan_screen.placement(plan)}"
        self._say("", f"with what is free now {holds}" if same else holds)

    def loading(self, stage: str, done: int, total: int | None, seconds: float) -> None:
        """The moving line."""
        new, self._stage = stage != self._stage, stage
        if new and stage == "loading" and self._line.is_terminal:
            self._say("", "safe to disconnect: `launcher attach` brings this view back")
        if stage == "loading" and total:
            rate = self._rate.add(time.monotonic(), done)
            self._line.text(f"{'load':<{_LABEL}}{bar(done, total)} {amounts(done, total, rate)}", force=new)
        else:
            self._line.text(
                f"{stage:<{_LABEL}} {out.duration(seconds)}" if self._line.is_terminal else stage, force=new
            )

    def left(self, record: RunRecord) -> None:
        """`attach` was ended, the server goes on."""
        pid = f"pid {record.server.pid}" if record.server else "starting"
        self._say("left", f"only this view: {record.slug} goes on ({pid}); launcher attach | launcher status", "note")

    def audited(self, audit: Audit | None) -> None:
        """Planned against real bytes, one line a device."""
        if audit is None:
            self._say("audit", "the load log could not be read: nothing was compared", "note")
            return
        for i, text in enumerate(audit_lines(audit)):
            self._say("audit" if i == 0 else "", text, None)
        if audit.worst:
            self._say("", f"not as planned: {audit.worst}", "no")
        for text in audit.failed:
            self._say("warning", text, "no")


def audit_lines(audit: Audit) -> list[str]:
    """`CUDA0 planned/real MiB: model 9,093/9,093 (+0), kv ...`, then what the driver says of the card."""
    lines = []
    for name in dict.fromkeys(row.device for row in audit.rows):
        rows = [row for row in audit.rows if row.device == name and (row.planned_bytes or row.real_bytes)]
        parts = [
            f"{r.kind} {mib(r.planned_bytes)}/{mib(r.real_bytes)} ({round((r.real_bytes - r.planned_bytes) / MIB):+,})"
            for r in rows
        ]
        lines.append(f"{name} planned/real MiB: {', '.join(parts) or 'nothing'}")
        lines += [card_line(card) for card in audit.cards if card.device == name]
    return lines


def card_line(card: AuditCard) -> str:
    """`CUDA0 holds 6,550 MiB, 6,461 planned; 136,605 free (margin 1,436)`; what nobody tells is left out."""
    how = " by the card's free memory" if card.by == "card" else ""
    holds = (
        "" if card.used_bytes is None else f"holds {mib(card.used_bytes)} MiB{how}, {mib(card.planned_bytes)} planned"
    )
    free = "" if card.free_bytes is None else f"{mib(card.free_bytes)} free (margin {mib(card.margin_bytes)})"
    return f"{card.device} {'; '.join(filter(None, (holds, free))) or 'the driver does not tell what it holds'}"


def show(record: RunRecord, plan: Plan, launch: Launch | None, audit: Audit | None, *, as_json: bool = False) -> int:
    """Print the switch document, or READY and how to call it."""
    if as_json:
        out.document(document.switch_document(record, plan, launch, audit))
    else:
        out.show(ready(record, plan.settings.n_ctx_per_stream, plan.settings.n_parallel))
    return 0


def show_attached(
    record: RunRecord, n_ctx: int | None, n_parallel: int | None, doing: Activity, *, as_json: bool = False
) -> int:
    """Print the server that is ready, and what it is doing."""
    if as_json:
        out.document(document.attach_document(record, doing))
        return 0
    out.show(ready(record, n_ctx, n_parallel))
    out.show(activity_lines(doing, record))
    return 0


def depth(record: RunRecord) -> str:
    """How deep a prompt this launch is known to survive; with the day where an earlier start of the same showed it."""
    if record.proven_tokens is None:
        return "unverified depth: no deep prompt was tried before READY"
    earlier = record.proven_at is not None and record.proven_at < record.started_at
    day = time.strftime(" %Y-%m-%d", time.localtime(record.proven_at)) if earlier else ""
    return f"depth proven{day} to {record.proven_tokens:,} tokens"


def ready(record: RunRecord, n_ctx: int | None, n_parallel: int | None) -> Iterator[Text | str]:
    """READY, the URL, its proven depth, and a line that can be pasted. n_ctx is of one stream."""
    url = document.url(record.host, record.port)
    took = out.duration((record.ready_at or record.started_at) - (record.restarted_at or record.started_at))
    tokens = "" if n_ctx is None else f"{n_ctx:,} tokens"
    streams = "" if n_parallel is None else f"{n_parallel} stream{'s' if n_parallel > 1 else ''}"
    size = ", ".join(filter(None, (tokens, streams)))
    yield out.line((f"{'READY':<{_LABEL}}", "ok"), f"{url}  model {record.alias}  {size}     {took}")
    yield f"{'':<{_LABEL}}{depth(record)}"
    body = f'{{"model": "{record.alias}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    yield f"{'':<{_LABEL}}curl {url}/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    yield f"{'':<{_LABEL}}launcher status | logs -f | stop {shlex.quote(record.slug)}"
