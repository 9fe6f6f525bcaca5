"""`plan --tradeoffs`: what else could be chosen on this rig, one planned row each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from launcher.render import out
from launcher.structs import Plan, Range
from launcher.units import gib, mib

if TYPE_CHECKING:
    from rich.text import Text


class Row(Protocol):
    """One choice, planned: its options (empty for the chosen one), and whether it is worth what it costs."""

    @property
    def change(self) -> str: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def chosen(self) -> bool: ...
    @property
    def worth(self) -> bool: ...


_ABOUT = (
    "each row planned again on this rig by formulas, without a dry run; headroom: the least of all devices in MiB, "
    "the margin counted in; speeds in tok/s"
)


def table(rows: Sequence[Row]) -> Iterator[Text | str]:
    """The rows, at most 100 columns; below them why a smaller micro-batch is not worth it, where one is not."""
    yield out.line(("trade-offs", "head"), " (* as chosen)")
    yield from out.fold(f"  {_ABOUT}")
    cells = [["", "on devices", "RAM GiB", "headroom", "decode", "prefill", ""], *(_cells(row) for row in rows)]
    for gap in (2, 1):
        lines = out.table(cells, left=frozenset({0, 6}), gap=gap)
        if max(map(len, lines)) <= out.WIDTH:
            break
    yield lines[0]
    for row, text in zip(rows, lines[1:], strict=True):
        head, fits, tail = text.rpartition("FITS") if row.plan.fits else (text, "", "")
        yield out.line(head, (fits, "ok"), tail)
    alone = [row for row in rows if row.change.startswith("-ub ")]
    if alone and not any(row.worth for row in alone):
        yield from out.fold(pure_loss(rows[0].plan))
    elif not all(row.worth for row in rows):
        yield from out.fold(
            "not worth it: this micro-batch costs prefill, and buys no bundle more than a larger one and removes no "
            "overflow"
        )


def _cells(row: Row) -> list[str]:
    plan = row.plan
    n = len(plan.resident_layers)
    least = min((d.headroom_bytes for d in plan.devices), default=None)
    return [
        "* as chosen" if row.chosen else f"  {row.change}",
        f"{n} layer{'' if n == 1 else 's'}",
        gib(plan.host.required_bytes),
        "-" if least is None else mib(least),
        between(plan.speed.decode_tps) or "-",
        between(plan.speed.prefill_tps) or "-",
        ("FITS" if plan.fits else "no") + ("" if row.worth else ", not worth it"),
    ]


def pure_loss(plan: Plan) -> str:
    """Why a smaller micro-batch than that of a plan is good for nothing."""
    bundles = [layer for layer in plan.layers if layer.loaded and layer.bundle_bytes]
    if not bundles:
        why = "this model has no expert bundles to put in its place"
    elif not plan.devices:
        why = "there is no device to put a bundle on"
    elif all(layer.resident for layer in bundles):
        why = "every bundle lies on a device already"
    elif plan.settings.residency != "auto":
        why = "the residency is set, so nothing fills what it frees"
    else:
        why = "what it frees holds no bundle more" + ("" if plan.fits else " and removes no overflow")
    return f"a smaller micro-batch alone is a pure loss here: {why}, and prefill gets slower"


def between(found: Range | None) -> str:
    """`6.5-9.6`, whole numbers from 20 on; empty when neither end is known."""
    ends = [x for x in (found.low, found.high) if x is not None] if found else []
    return "-".join(f"{x:,.0f}" if x >= 20 else f"{x:.1f}" for x in ends)
