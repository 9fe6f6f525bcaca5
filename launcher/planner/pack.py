"""The best set of whole bundles under a capacity: a 0/1 knapsack over the few distinct sizes that a file has.

The search of `place` asks for tens of thousands of ranges of one device. What they share is computed once: how many
bundles of each size lie before each block, and every sum of bundles that a device could hold at all, in order.
(The design keeps this inside `place`; apart from it both can be read, and tested, on their own.)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

# Sums kept for a device; beyond it (many small bundles of several sizes) each range is searched on its own.
_MOST_SUMS = 40_000
# A range with fewer subsets than this is enumerated faster than looked up.
_FEW = 64

Take = tuple[int, ...]  # bundles taken of each size, in the order of BundleTable.sizes


@dataclass(frozen=True, slots=True)
class BundleTable:
    """Bundles of a model in one backend's buffers.

    sizes   distinct bundle sizes, largest first; blocks[i] the blocks that have sizes[i], ascending
    before  for block index i: how many bundles of each size lie in blocks < i; bytes_before their sum
    """

    sizes: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    before: tuple[Take, ...]
    bytes_before: tuple[int, ...]

    def available(self, start: int, end: int) -> Take:
        """Bundles of each size in blocks [start, end); an end beyond the last block means all."""
        last = min(end, len(self.before) - 1)
        return tuple(b - a for a, b in zip(self.before[start], self.before[last], strict=True))

    def bytes(self, start: int, end: int) -> int:
        """All bundles of a range together."""
        return self.bytes_before[min(end, len(self.before) - 1)] - self.bytes_before[start]

    def taken(self, take: Take, start: int, end: int, *, highest: bool) -> tuple[int, ...]:
        """The blocks of a take: of each size the lowest indices of the range, or the highest."""
        found: list[int] = []
        for n, blocks in zip(take, self.blocks, strict=True):
            own = blocks[bisect_left(blocks, start) : bisect_left(blocks, end)]
            found += own[len(own) - n :] if highest else own[:n]
        return tuple(sorted(found))


def bundle_table(bundle_bytes: Sequence[int]) -> BundleTable:
    """The table of a model whose block i has a bundle of bundle_bytes[i], 0 for none."""
    sizes = tuple(sorted({n for n in bundle_bytes if n}, reverse=True))
    before, total = [(0,) * len(sizes)], [0]
    for n in bundle_bytes:
        before.append(tuple(c + (n == size) for c, size in zip(before[-1], sizes, strict=True)))
        total.append(total[-1] + n)
    blocks = tuple(tuple(i for i, n in enumerate(bundle_bytes) if n == size) for size in sizes)
    return BundleTable(sizes, blocks, tuple(before), tuple(total))


@dataclass(frozen=True, slots=True)
class Sums:
    """Every (bytes, bundles) that fits a device, ascending, with its take."""

    totals: tuple[tuple[int, int], ...]
    takes: tuple[Take, ...]


def sums(table: BundleTable, capacity: int) -> Sums | None:
    """All sums up to `capacity` bytes; None when they are too many to keep."""
    most = [min(len(b), max(0, capacity) // size) for b, size in zip(table.blocks, table.sizes, strict=True)]
    count = 1
    for n in most:
        count *= n + 1
    if count > _MOST_SUMS:
        return None
    found = []
    for take in product(*(range(n + 1) for n in most)):
        n_bytes = sum(n * size for n, size in zip(take, table.sizes, strict=True))
        if n_bytes <= capacity:
            found.append((n_bytes, sum(take), take))
    found.sort()
    return Sums(tuple((b, n) for b, n, _ in found), tuple(take for _, _, take in found))


def best(table: BundleTable, known: Sums | None, available: Take, capacity: int) -> Take:
    """The take with most bytes, then most bundles, under a capacity."""
    most = [min(n, max(0, capacity) // size) for n, size in zip(available, table.sizes, strict=True)]
    subsets = 1
    for n in most:
        subsets *= n + 1
    if known is None or subsets <= _FEW:
        return _search(table.sizes, most, capacity)
    at = bisect_right(known.totals, (capacity, 1 << 30)) - 1
    while at >= 0:
        take = known.takes[at]
        if all(n <= limit for n, limit in zip(take, most, strict=True)):
            return take
        at -= 1
    return (0,) * len(most)


def _search(sizes: tuple[int, ...], most: Sequence[int], capacity: int) -> Take:
    """Branch over counts, largest size first; a branch that cannot catch up ends."""
    if not sizes:
        return ()
    rest = [0] * (len(sizes) + 1)
    for i in range(len(sizes) - 1, -1, -1):
        rest[i] = rest[i + 1] + sizes[i] * most[i]
    top: tuple[int, int] = (0, 0)
    choice: Take = (0,) * len(sizes)

    def fill(at: int, left: int, take: Take, n_bytes: int, count: int) -> None:
        nonlocal top, choice
        size, limit = sizes[at], min(most[at], left // sizes[at])
        if at == len(sizes) - 1:
            total = (n_bytes + limit * size, count + limit)
            if total > top:
                top, choice = total, (*take, limit)
            return
        for n in range(limit, -1, -1):
            room = left - n * size
            if n_bytes + n * size + min(room, rest[at + 1]) < top[0]:
                return
            fill(at + 1, room, (*take, n), n_bytes + n * size, count + n)

    fill(0, max(0, capacity), (), 0, 0)
    return choice
