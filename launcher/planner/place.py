"""The choice: how many slots each device owns, and which whole bundles are resident there.

Solved exactly. A range of slots on a device has a value: the best subset of its bundles under the memory left after
everything else (a 0/1 knapsack over few distinct sizes, so counts per size are enumerated). A dynamic programme over
devices and split points adds the values up. Best is, in this order: most resident bytes, most resident layers (fewest
on the host), least time per token on the cards, lowest `-ts`. Nothing here knows files, flags or prose.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from launcher.planner import budget
from launcher.planner.budget import Problem

# One more device in the chain costs a copy of the activations per token; a tie-breaker, not a model of links.
_HOP_NS = 20_000
_DEFAULT_BPS = 500e9

Score = tuple[int, int, int]  # resident bytes, resident layers, minus nanoseconds per token


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
    score: Score
    resident: tuple[int, ...]
    short: int


def choose(p: Problem, counts: Sequence[int] | None = None) -> Choice | None:
    """The best placement, or the least overfull one when none fits; None when a fixed map suits no split at all.

    counts  slots per device when a person fixed the split; they must sum to n_layer + 1
    """
    if counts is not None:
        return _best_for_split(p, tuple(counts))
    best: tuple[tuple[Score, tuple[int, ...]], Choice] | None = None
    for subset in _subsets(len(p.devices)):
        found = _search(p, subset)
        if found and (best is None or found[0] > best[0]):
            best = found
    if best:
        return best[1]
    return _least_overfull(p)


def _subsets(n: int) -> Iterator[tuple[int, ...]]:
    """Device subsets worth a search: all of them up to four devices, else all devices and all but one."""
    sizes = range(n, 0, -1) if n <= 4 else (n, n - 1)
    for size in sizes:
        yield from combinations(range(n), size)


def _reduced(p: Problem, subset: tuple[int, ...]) -> Problem:
    if len(subset) == len(p.devices):
        return p
    return Problem(
        shape=p.shape,
        draft=p.draft,
        devices=tuple(p.devices[k] for k in subset),
        settings=p.settings,
        projector_bytes=p.projector_bytes,
        measured=p.measured,
        fixed_layers=p.fixed_layers,
        memo=p.memo,
    )


def _expand(p: Problem, subset: tuple[int, ...], values: dict[int, tuple[int, _Value]]) -> Choice:
    n = len(p.devices)
    at = {k: values[pos] for pos, k in enumerate(subset)}
    empty = _Value((0, 0, 0), (), 0)
    return Choice(
        counts=tuple(at[k][0] if k in at else 0 for k in range(n)),
        resident=tuple((at[k][1] if k in at else empty).resident for k in range(n)),
        short_bytes=tuple((at[k][1] if k in at else empty).short for k in range(n)),
    )


def _search(p: Problem, subset: tuple[int, ...]) -> tuple[tuple[Score, tuple[int, ...]], Choice] | None:
    if p.fixed_layers and any(d.name in p.fixed_layers for k, d in enumerate(p.devices) if k not in subset):
        return None
    reduced = _reduced(p, subset)
    found = None
    if p.fixed_layers is None and p.settings.residency == "auto":
        found = _programme(reduced, host_anywhere=False)  # everything resident, if that is possible at all
    found = found or _programme(reduced, host_anywhere=True)
    if found is None:
        return None
    score, picks = found
    # among equals the earlier devices, as people list the card that they mean first
    return (score, tuple(-k for k in subset)), _expand(p, subset, picks)


def _programme(p: Problem, *, host_anywhere: bool) -> tuple[Score, dict[int, tuple[int, _Value]]] | None:
    """best[j] after device k: the best way to give slots [0, j) to devices 0..k, each at least one slot."""
    n_slots, n = p.shape.n_layer + 1, len(p.devices)
    if n > n_slots:
        return None
    Row = dict[int, tuple[Score, tuple[int, ...], tuple[_Value, ...]]]
    row: Row = {0: ((0, 0, 0), (), ())}
    for k in range(n):
        after = n - k - 1
        nxt: Row = {}
        for start, (score, negative, values) in row.items():
            ends = (n_slots,) if after == 0 else range(start + 1, n_slots - after + 1)
            for end in ends:
                value = _value(p, k, start, end, host_anywhere)
                if value is None:
                    if p.fixed_layers is None:
                        break  # every term grows with the range: a longer one cannot fit either
                    continue
                total = (score[0] + value.score[0], score[1] + value.score[1], score[2] + value.score[2])
                key = (total, (*negative, start - end))
                if end not in nxt or key > nxt[end][:2]:
                    nxt[end] = (*key, (*values, value))
        row = nxt
    if n_slots not in row:
        return None
    score, negative, values = row[n_slots]
    return score, {k: (-negative[k], values[k]) for k in range(n)}


def _value(p: Problem, k: int, start: int, end: int, host_anywhere: bool) -> _Value | None:
    """The best residency of a range on a device, None when even none of it fits (or a fixed map forbids it).

    Remembered over all device subsets: a device's value depends on being the first, not on who else is there. (In a
    model without experts pipeline copies depend on the number of devices, so it is part of the key.)
    """
    key = (p.devices[k].name, k == 0, start, end, host_anywhere, 0 if p.moe_layers else len(p.devices))
    if key not in p.memo:
        p.memo[key] = _best_value(p, k, start, end, host_anywhere)
    found = p.memo[key]
    assert found is None or isinstance(found, _Value)
    return found


def _best_value(p: Problem, k: int, start: int, end: int, host_anywhere: bool) -> _Value | None:
    """All bundles, else the best subset, else none: compute differs between the three, so each is priced on its own."""
    candidates = _candidates(p, start, end)
    fixed = budget.fixed_terms(p, k, start, end)
    left = (p.devices[k].free_bytes or 0) - sum(fixed.values())
    if left < 0:
        return None
    options = [candidates, *((None, ()) if host_anywhere else ())]
    wanted = _fixed(p, k)
    if wanted is not None:
        if not wanted <= set(candidates):
            return None
        options = [tuple(sorted(wanted))]
    for option in options:
        some = 1 if option is None else len(option)
        room = left - budget.compute_bytes(p, k, start, end, some, host_anywhere)
        resident = _knapsack(p, k, end, candidates, room) if option is None else option
        size = _bundle_bytes(p, k, resident)
        if size <= room and (resident or not option):
            return _Value(_score(p, k, fixed, size, len(resident)), resident, 0)
    return None


def _bundle_bytes(p: Problem, k: int, resident: tuple[int, ...]) -> int:
    backend = p.devices[k].backend
    return sum(p.shape.layers[i].bundle.on(backend) for i in resident)


def _candidates(p: Problem, start: int, end: int) -> tuple[int, ...]:
    """Blocks of a range that have a bundle."""
    return p.moe_layers[bisect_left(p.moe_layers, start) : bisect_left(p.moe_layers, end)]


def _fixed(p: Problem, k: int) -> frozenset[int] | None:
    if p.settings.residency == "none":
        return frozenset()
    if p.fixed_layers is None:
        return None
    return p.fixed_layers.get(p.devices[k].name, frozenset())


def _knapsack(p: Problem, k: int, end: int, candidates: tuple[int, ...], capacity: int) -> tuple[int, ...]:
    """The subset with most bytes, then most layers; lowest indices, on the device that owns the output highest."""
    backend = p.devices[k].backend
    by_size: dict[int, list[int]] = {}
    order = reversed(candidates) if end == p.shape.n_layer + 1 else iter(candidates)
    for i in order:
        by_size.setdefault(p.shape.layers[i].bundle.on(backend), []).append(i)
    sizes = sorted(by_size, reverse=True)
    best_bytes, best_count, best_take = 0, 0, dict.fromkeys(sizes, 0)

    def fill(at: int, left: int, taken: dict[int, int], n_bytes: int, count: int) -> None:
        nonlocal best_bytes, best_count, best_take
        size = sizes[at]
        most = min(len(by_size[size]), left // size)
        if at == len(sizes) - 1:
            total = (n_bytes + most * size, count + most)
            if total > (best_bytes, best_count):
                best_bytes, best_count = total
                best_take = {**taken, size: most}
            return
        for take in range(most, -1, -1):
            rest = left - take * size
            if n_bytes + take * size + min(rest, rest_max[at + 1]) < best_bytes:
                return  # fewer of this size cannot catch up
            fill(at + 1, rest, {**taken, size: take}, n_bytes + take * size, count + take)

    rest_max = [sum(s * len(by_size[s]) for s in sizes[i:]) for i in range(len(sizes))]
    if capacity > 0:
        fill(0, capacity, {}, 0, 0)
    return tuple(sorted(i for size, n in best_take.items() for i in by_size[size][:n]))


def _score(p: Problem, k: int, fixed: dict[str, int], expert_bytes: int, n_resident: int) -> Score:
    shape = p.shape
    share = shape.n_expert_used / shape.n_expert if shape.n_expert else 1.0
    read = fixed["dense"] + fixed["output"] + int(expert_bytes * share)
    time_ns = int(read / (p.devices[k].memory_bps or _DEFAULT_BPS) * 1e9) + _HOP_NS
    return expert_bytes, n_resident, -time_ns


def _ranges(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for n in counts:
        yield start, start + n
        start += n


def _best_for_split(p: Problem, counts: tuple[int, ...]) -> Choice | None:
    subset = tuple(k for k, n in enumerate(counts) if n)
    reduced = _reduced(p, subset)
    ranges = list(_ranges([counts[k] for k in subset]))
    for host_anywhere in (False, True):
        values = [_value(reduced, k, start, end, host_anywhere) for k, (start, end) in enumerate(ranges)]
        if host_anywhere:
            over = [v or _overfull(reduced, k, *ranges[k]) for k, v in enumerate(values)]
        else:
            over = values
            everything = sum(len(v.resident) for v in values if v) == len(p.moe_layers)
            if not everything:
                continue  # a bundle stays on the host after all: price every device with that
        if all(v is not None for v in over):
            picks = {k: (end - start, v) for k, ((start, end), v) in enumerate(zip(ranges, over, strict=True)) if v}
            return _expand(p, subset, picks)
    return None


def _overfull(p: Problem, k: int, start: int, end: int) -> _Value | None:
    """A range that does not fit, with what must be resident there; None when a fixed map names layers outside it."""
    wanted = _fixed(p, k) or frozenset()
    if not wanted <= set(_candidates(p, start, end)):
        return None
    resident = tuple(sorted(wanted))
    t = budget.terms(p, k, start, end, resident, host_anywhere=True)
    short = max(0, sum(t.values()) - (p.devices[k].free_bytes or 0))
    return _Value(_score(p, k, t, t["experts"], len(resident)), resident, short)


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
    return _expand(p, subset, {k: (counts[k], values[k]) for k in range(n)})
