"""Gates as people read them: closed ones first, with the fix beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from launcher.render import document, error, out
from launcher.render import plan as plan_screen
from launcher.structs import Gate, Plan

if TYPE_CHECKING:
    from rich.text import Text

_LABEL = 7
_INDENT = " " * 9


def show(target: str, gates: Iterable[Gate], plan: Plan | None = None, *, as_json: bool = False) -> None:
    """Print the preflight document, or the screen."""
    found = tuple(gates)
    if as_json:
        out.document(document.preflight_document(target, found, plan))
        return
    out.show(screen(target, found, plan))


def screen(target: str, gates: tuple[Gate, ...], plan: Plan | None = None) -> Iterator[Text | str]:
    """The lines of the screen; with a plan that does not fit, its ways out."""
    closed = [g for g in gates if not g.ok]
    notes = [g for g in gates if g.ok and g.note]
    open_ = [g for g in gates if g.ok and not g.note]
    verdict = ("READY", "ok") if not closed else ("NO", "no")
    yield out.line(verdict, f"  {target}: {summary(gates)}")
    width = max((len(g.name) for g in gates), default=0)
    for label, style, group in (("no", "no", closed), ("ok", "ok", open_), ("note", "note", notes)):
        for gate in group:
            first, *more = out.fold(f"{gate.name:<{width}}  {gate.detail}", width=out.WIDTH - _LABEL)
            yield out.line((f"  {label}".ljust(_LABEL), style), first)
            yield from (" " * _LABEL + part for part in more)
            if gate.context and label == "no":
                yield from error.context(gate.context, _INDENT)
            if gate.fix and label != "ok":
                yield from error.fix(gate.fix, _INDENT)
    if plan is not None and plan.refusal is not None and plan.refusal.ways_out:
        yield ""
        yield from plan_screen.ways_out(plan)


def summary(gates: Iterable[Gate]) -> str:
    """`15 ok, 1 note`, `13 ok, 2 closed, 1 note`."""
    found = tuple(gates)
    closed = sum(not g.ok for g in found)
    notes = sum(g.ok and g.note for g in found)
    parts = [f"{len(found) - closed - notes} ok"]
    if closed:
        parts.append(f"{closed} closed")
    if notes:
        parts.append(f"{notes} note{'s' if notes > 1 else ''}")
    return ", ".join(parts)
