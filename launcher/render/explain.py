"""`plan --explain`: where every number came from, and what one more bundle would need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from launcher.render import out
from launcher.render.tradeoffs import between, pure_loss
from launcher.structs import Plan, Range
from launcher.units import MIB, mib

if TYPE_CHECKING:
    from rich.text import Text


class OneMore(Protocol):
    """A device and what it lacks for one more bundle of its layers; 0: it would fit."""

    @property
    def device(self) -> str: ...
    @property
    def bundle_bytes(self) -> int: ...
    @property
    def short_bytes(self) -> int: ...


class Smaller(Protocol):
    """A smaller micro-batch that pays: what it frees on one device, and what it buys on all."""

    @property
    def n_ubatch(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def freed_bytes(self) -> int: ...
    @property
    def bundles(self) -> int: ...
    @property
    def expert_bytes(self) -> int: ...
    @property
    def removes_overflow(self) -> bool: ...
    @property
    def prefill_tps(self) -> Range: ...
    @property
    def prefill_before_tps(self) -> Range: ...


class Room(Protocol):
    """What one more bundle would need: the device with the least shortage first."""

    @property
    def devices(self) -> Sequence[OneMore]: ...
    @property
    def smaller(self) -> Smaller | None: ...


def explanation(plan: Plan, room: Room | None = None) -> Iterator[Text | str]:
    """Every term with the place its number came from; what one more bundle would need; the rules."""
    yield out.line(("where the numbers come from", "head"))
    rows = [["", "term", "MiB", "source"]]
    for d in plan.devices:
        names = [t for t, v in d.terms.items() if v]
        rows += [[d.device.name, t, f"{d.terms[t] / MIB:,.1f}", str(d.source.get(t, "policy"))] for t in names]
    held = [t for t, v in plan.host.terms.items() if v]
    rows += [["host", t, f"{plan.host.terms[t] / MIB:,.1f}", str(plan.host.source.get(t, "policy"))] for t in held]
    yield from out.table(rows, left=frozenset({0, 1, 3}))
    if room is not None:
        for text in one_more(plan, room):
            yield from out.fold(text)
    for rule in plan.rules:
        yield f"rule  {rule.pattern}={rule.buffer_type}"


def one_more(plan: Plan, room: Room) -> Iterator[str]:
    """The binding device first, and what a smaller micro-batch would buy; nothing where no bundle is left in RAM."""
    for more in room.devices:
        bundle = f"one more bundle ({mib(more.bundle_bytes)} MiB)"
        if more.short_bytes:
            # what is missing is rounded up: freeing the number that is shown must be enough
            yield f"{more.device} is short by {-(-more.short_bytes // MIB):,} MiB for {bundle}"
        else:
            kept = "; the residency is set and leaves it in RAM" if plan.settings.residency != "auto" else ""
            yield f"{more.device} has room for {bundle}{kept}"
    if room.smaller is not None:
        yield _bought(room.smaller)
    elif room.devices and plan.settings.n_ubatch > 512:
        yield pure_loss(plan)


def _bought(s: Smaller) -> str:
    gains = [f"free {mib(s.freed_bytes)} MiB on {s.device}"] if s.freed_bytes > 0 else []
    if s.bundles:
        gains.append(f"buy {'one bundle' if s.bundles == 1 else f'{s.bundles} bundles'}")
    elif s.expert_bytes:
        gains.append(f"put {mib(s.expert_bytes)} MiB more of experts on the devices")
    if s.removes_overflow:
        gains.append("remove an overflow")
    speeds = [between(r) for r in (s.prefill_tps, s.prefill_before_tps)]
    cost = f" (prefill {speeds[0]} tok/s instead of {speeds[1]})" if all(speeds) else ""
    return f"micro-batch {s.n_ubatch} would {' and '.join(gains)}{cost}"
