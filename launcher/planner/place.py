"""The choice: how many slots each device owns, and which whole bundles are resident there.

Solved exactly. A range of slots on a device has a value: the best subset of its bundles under the memory left after
everything else (`pack`). A dynamic programme over devices and split points adds the values up; a device may get no
slot. Best is, in this order: most resident bytes, most resident layers (fewest on the host), least time per token on
the cards, the earlier devices, lowest `-ts`. Nothing here knows files, flags or prose.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from launcher.planner import budget, drafter, pack
from launcher.planner.budget import Problem
from launcher.planner.compute import NO_OFFLOAD
from launcher.structs import Device

# One more device in the chain costs a copy of the activations per token; a tie-breaker, not a model of links.
_HOP_NS = 20_000
_DEFAULT_BPS = 500e9

Score = tuple[int, int, int]  # resident bytes, resident layers, minus nanoseconds per token
Tie = tuple[tuple[int, int], ...]  # per device (1, minus slots) when used, else (0, 0); more is better


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Slots per device (0: left out), resident layers per device, and how far each device is over (all 0: it fits)."""

    counts: tuple[int, ...]
    resident: tuple[tuple[int, ...], ...]
    short_bytes: tuple[int, ...]

    @property
    def fits(self) -> bool:
        """Whether no device is over."""
        return not any(self.short_bytes)


@dataclass(frozen=True, slots=True)
class _Value:
    """What a range is worth on a device. `take` counts bundles per size; a fixed map names its blocks instead."""

    score: Score
    take: pack.Take
    blocks: tuple[int, ...] | None
    short: int


def choose(p: Problem, counts: Sequence[int] | None = None) -> Choice | None:
    """The best placement, or the least overfull one when none fits; None when a fixed map suits no split at all.

    counts  slots per device when a person fixed the split; they must sum to n_layer + 1
    """
    if counts is not None:
        return _best_for_split(p, tuple(counts))
    alike = len({d.backend in NO_OFFLOAD for d in p.devices}) == 1
    subsets = [tuple(range(len(p.devices)))] if alike else list(_subsets(len(p.devices)))
    best: tuple[tuple[Score, Tie], Choice] | None = None
    for subset in subsets:
        found = _search(p, subset, may_skip=alike)
        if found and (best is None or found[0] > best[0]):
            best = found
    return best[1] if best else _least_overfull(p)


def orders(p: Problem) -> list[tuple[Device, ...]]:
    """Device orders worth a search: as given, then each card with a faster link moved to the front, fastest first.

    Only the first device matters: the engine sends every offloaded expert of a prompt batch over its link
    (ggml-backend.cpp: the first backend that supports the operation), whoever owns the layer.
    """
    given = p.devices
    front = given[p.first] if given else None
    if p.settings.keep_order or front is None or front.link_bps is None:
        return [given]
    faster: dict[float, Device] = {}
    for d in given:
        if d.backend not in NO_OFFLOAD and d.link_bps and d.link_bps > front.link_bps:
            faster.setdefault(d.link_bps, d)
    moved = [(d, *(x for x in given if x is not d)) for _, d in sorted(faster.items(), reverse=True)]
    return [given, *moved]


def _subsets(n: int) -> Iterator[tuple[int, ...]]:
    """Device subsets of a rig that mixes cards with RPC devices: there nobody knows yet who will be first."""
    for size in range(n, 0, -1) if n <= 4 else (n, n - 1):
        yield from combinations(range(n), size)


def _hopeless(p: Problem, k: int, start: int, end: int) -> bool:
    """Whether a range is too much for a device, and every longer one too.

    Only terms that never shrink with the range count: a drafter that lies on one device runs without the pipeline
    copies that it needs on two.
    """
    fixed = budget.fixed_terms(p, k, start, end)
    return sum(fixed.values()) - fixed["drafter"] > (p.devices[k].free_bytes or 0)


def _reduced(p: Problem, subset: tuple[int, ...]) -> Problem:
    if len(subset) == len(p.devices):
        return p
    return replace(p, devices=tuple(p.devices[k] for k in subset))


def _expand(p: Problem, subset: tuple[int, ...], picks: Sequence[tuple[int, _Value]]) -> Choice:
    """Slots and values of a subset's devices, in order, as a choice over all devices."""
    n = len(p.devices)
    counts, resident, short, start = [0] * n, [()] * n, [0] * n, 0
    blocks: list[tuple[int, ...]] = list(resident)
    for k, (slots, value) in zip(subset, picks, strict=True):
        end = start + slots
        counts[k], short[k] = slots, value.short
        if value.blocks is not None:
            blocks[k] = value.blocks
        else:
            table = budget.table(p, p.devices[k].backend)
            blocks[k] = table.taken(value.take, start, end, highest=end == p.shape.n_layer + 1)
        start = end
    return Choice(counts=tuple(counts), resident=tuple(blocks), short_bytes=tuple(short))


def _search(p: Problem, subset: tuple[int, ...], *, may_skip: bool) -> tuple[tuple[Score, Tie], Choice] | None:
    needed = {*(p.fixed_layers or ()), *drafter.devices(p)}
    if any(d.name in needed for k, d in enumerate(p.devices) if k not in subset):
        return None
    reduced = _reduced(p, subset)
    found = None
    if p.fixed_layers is None and p.settings.residency == "auto":
        found = _programme(reduced, host_anywhere=False, may_skip=may_skip)  # all resident, if that is possible at all
    found = found or _programme(reduced, host_anywhere=True, may_skip=may_skip)
    if found is None:
        return None
    score, tie, picks = found
    at = dict(zip(subset, tie, strict=True))
    used = tuple(subset[k] for k, _, _ in picks)
    choice = _expand(p, used, [(slots, value) for _, slots, value in picks])
    return (score, tuple(at.get(k, (0, 0)) for k in range(len(p.devices)))), choice


def _programme(
    p: Problem, *, host_anywhere: bool, may_skip: bool
) -> tuple[Score, Tie, list[tuple[int, int, _Value]]] | None:
    """row[j] after device k: the best way to give slots [0, j) to devices 0..k; (device, slots, value) of those used.

    may_skip  a device may stay without a slot: it is left out then. Who is first, and who is alone, follows from the
              slots alone, so one pass covers every subset of the devices.
    """
    n_slots, n = p.shape.n_layer + 1, len(p.devices)
    needed = {name for name, layers in (p.fixed_layers or {}).items() if layers} | drafter.devices(p)
    pinned = {k for k in range(n) if p.devices[k].name in needed}
    Row = dict[int, tuple[Score, Tie, tuple[tuple[int, int, _Value], ...]]]
    row: Row = {0: ((0, 0, 0), (), ())}
    for k in range(n):
        skips = may_skip and k not in pinned
        nxt: Row = (
            {start: (score, (*tie, (0, 0)), picks) for start, (score, tie, picks) in row.items()} if skips else {}
        )
        last_chance = not may_skip and k == n - 1
        for start, (score, tie, picks) in row.items():
            # Behind the last slot nothing is left to take; the subset without this device is a search of its own.
            for end in (n_slots,) if last_chance and start < n_slots else range(start + 1, n_slots + 1):
                view, index = _role(p, k, start, end) if may_skip else (p, k)
                value = _value(view, index, start, end, host_anywhere)
                if value is None:
                    if _hopeless(view, index, start, end):
                        break
                    continue
                total = (score[0] + value.score[0], score[1] + value.score[1], score[2] + value.score[2])
                # among equals the earlier devices, as people list the card that they mean first; then the lowest -ts
                key = (total, (*tie, (1, start - end)))
                if end not in nxt or key > nxt[end][:2]:
                    nxt[end] = (*key, (*picks, (k, end - start, value)))
        row = nxt
    if n_slots not in row:
        return None
    score, tie, picks = row[n_slots]
    return score, tie, list(picks)


def _role(p: Problem, k: int, start: int, end: int) -> tuple[Problem, int]:
    """The problem as device `k` sees it with these slots, and its index there: alone, first of several, or later."""
    alone = start == 0 and end == p.shape.n_layer + 1
    kind = "alone" if alone or len(p.devices) == 1 else "first" if start == 0 else "later"
    key = ("role", p.devices[k].name, kind)
    if key not in p.memo:
        own, other = p.devices[k], p.devices[k - 1 if k else len(p.devices) - 1]
        devices = {"alone": (own,), "first": (own, other), "later": (other, own)}[kind]
        p.memo[key] = replace(p, devices=devices)
    view = p.memo[key]
    assert isinstance(view, Problem)
    return view, int(kind == "later")


def _value(p: Problem, k: int, start: int, end: int, host_anywhere: bool) -> _Value | None:
    """The best residency of a range on a device, None when even none of it fits (or a fixed map forbids it).

    Remembered over all device subsets: a device's value depends on being the first and on being alone, not on who else
    is there. (In a model without experts pipeline copies depend on the number of devices.)
    """
    key = (
        p.devices[k].name,
        k == p.first,
        start,
        end,
        host_anywhere,
        min(2, len(p.devices)) if p.moe_layers else len(p.devices),
    )
    if key not in p.memo:
        p.memo[key] = _best_value(p, k, start, end, host_anywhere)
    found = p.memo[key]
    assert found is None or isinstance(found, _Value)
    return found


def _best_value(p: Problem, k: int, start: int, end: int, host_anywhere: bool) -> _Value | None:
    """All bundles, else the best subset, else none: compute differs between the three, so each is priced on its own."""
    device = p.devices[k]
    if not drafter.allowed(p, k, end):
        return None
    fixed = budget.fixed_terms(p, k, start, end)
    left = (device.free_bytes or 0) - sum(fixed.values())
    if left < 0:
        return None
    table = budget.table(p, device.backend)
    available = table.available(start, end)
    wanted = _fixed(p, k)
    if wanted is not None:
        if not wanted <= set(_candidates(p, start, end)):
            return None
        size = sum(p.shape.layers[i].bundle.on(device.backend) for i in wanted)
        room = left - budget.compute_bytes(p, k, start, end, len(wanted), host_anywhere)
        return _worth(p, k, fixed, size, len(wanted), (), tuple(sorted(wanted))) if size <= room else None
    n_all = sum(available)
    size = table.bytes(start, end)
    if size <= left - budget.compute_bytes(p, k, start, end, n_all, host_anywhere):
        return _worth(p, k, fixed, size, n_all, available, None)
    if not host_anywhere:
        return None
    room = left - budget.compute_bytes(p, k, start, end, 1, host_anywhere)
    if room > 0:
        take = pack.best(table, budget.sums(p, k), available, room)
        if any(take):
            size = sum(n * s for n, s in zip(take, table.sizes, strict=True))
            return _worth(p, k, fixed, size, sum(take), take, None)
    room = left - budget.compute_bytes(p, k, start, end, 0, host_anywhere)
    return _worth(p, k, fixed, 0, 0, (0,) * len(available), None) if room >= 0 else None


def _candidates(p: Problem, start: int, end: int) -> tuple[int, ...]:
    """Blocks of a range that have a bundle."""
    return p.moe_layers[bisect_left(p.moe_layers, start) : bisect_left(p.moe_layers, end)]


def _fixed(p: Problem, k: int) -> frozenset[int] | None:
    if p.settings.residency == "none":
        return frozenset()
    if p.fixed_layers is None:
        return None
    return p.fixed_layers.get(p.devices[k].name, frozenset())


def _worth(
    p: Problem,
    k: int,
    fixed: dict[str, int],
    expert_bytes: int,
    n_resident: int,
    take: pack.Take,
    blocks: tuple[int, ...] | None,
    short: int = 0,
) -> _Value:
    shape = p.shape
    share = shape.n_expert_used / shape.n_expert if shape.n_expert else 1.0
    read = fixed["dense"] + fixed["output"] + int(expert_bytes * share)
    time_ns = int(read / (p.devices[k].memory_bps or _DEFAULT_BPS) * 1e9) + _HOP_NS
    return _Value((expert_bytes, n_resident, -time_ns), take, blocks, short)


def _ranges(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for n in counts:
        yield start, start + n
        start += n


def _best_for_split(p: Problem, counts: tuple[int, ...]) -> Choice | None:
    subset = tuple(k for k, n in enumerate(counts) if n)
    reduced = _reduced(p, subset)
    ranges = list(_ranges([counts[k] for k in subset]))
    values = [_value(reduced, k, start, end, False) for k, (start, end) in enumerate(ranges)]
    if sum(v.score[1] for v in values if v) < len(p.moe_layers) or not all(values):
        # a bundle stays on the host after all: price every device with that
        values = [_value(reduced, k, *r, True) or _overfull(reduced, k, *r) for k, r in enumerate(ranges)]
    picks = [(end - start, v) for (start, end), v in zip(ranges, values, strict=True) if v]
    return _expand(p, subset, picks) if len(picks) == len(subset) else None


def _overfull(p: Problem, k: int, start: int, end: int) -> _Value | None:
    """A range that does not fit, with what must be resident there; None when a fixed map names layers outside it."""
    wanted = _fixed(p, k) or frozenset()
    if not wanted <= set(_candidates(p, start, end)) or not drafter.allowed(p, k, end):
        return None
    resident = tuple(sorted(wanted))
    t = budget.terms(p, k, start, end, resident, host_anywhere=True)
    short = max(0, sum(t.values()) - (p.devices[k].free_bytes or 0))
    return _worth(p, k, t, t["experts"], len(resident), (), resident, short)


def _least_overfull(p: Problem) -> Choice | None:
    """Nothing fits: the split with the smallest total overflow, so that the refusal shows the nearest miss."""
    n_slots = p.shape.n_layer + 1
    subset = tuple(range(min(len(p.devices), n_slots)))
    reduced, n = _reduced(p, subset), len(subset)
    row: dict[int, tuple[int, tuple[int, ...], tuple[_Value, ...]]] = {0: (0, (), ())}
    for k in range(n):
        after = n - k - 1
        nxt: dict[int, tuple[int, tuple[int, ...], tuple[_Value, ...]]] = {}
        for start, (short, counts, values) in row.items():
            ends = (n_slots,) if after == 0 else range(start + 1, n_slots - after + 1)
            for end in ends:
                value = _overfull(reduced, k, start, end)
                if value is None:
                    continue
                key = (short + value.short, (*counts, end - start))
                if end not in nxt or key < nxt[end][:2]:
                    nxt[end] = (*key, (*values, value))
        row = nxt
    if n_slots not in row:
        return None
    _, counts, values = row[n_slots]
    return _expand(p, subset, [(counts[k], values[k]) for k in range(n)])
