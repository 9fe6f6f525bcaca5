"""The best set of bundles under a capacity, against plain enumeration; and both ways of finding it agree."""

from __future__ import annotations

import itertools
import random

from launcher.planner import pack


def plain(bundles: list[int], capacity: int) -> tuple[int, int]:
    """(bytes, bundles) of the best subset, every subset tried."""
    found = (0, 0)
    for size in range(len(bundles) + 1):
        for subset in itertools.combinations(bundles, size):
            if sum(subset) <= capacity:
                found = max(found, (sum(subset), size))
    return found


def test_the_best_take_in_1000_random_cases() -> None:
    rng = random.Random(17)
    for _ in range(1000):
        sizes = rng.sample(range(1, 60), rng.randint(1, 4))
        bundles = [rng.choice([*sizes, 0]) for _ in range(rng.randint(0, 9))]
        table = pack.bundle_table(bundles)
        capacity = rng.randint(-5, sum(bundles) + 10)
        known = pack.sums(table, max(0, capacity) + rng.randint(0, 30))
        available = table.available(0, len(bundles))
        expected = plain([b for b in bundles if b], capacity)
        for chosen in (pack.best(table, known, available, capacity), pack.best(table, None, available, capacity)):
            got = sum(n * s for n, s in zip(chosen, table.sizes, strict=True))
            assert (got, sum(chosen)) == expected


def test_long_ranges_are_looked_up_and_agree_with_the_search() -> None:
    rng = random.Random(23)
    bundles = [rng.choice([64, 96, 160]) for _ in range(60)]
    table = pack.bundle_table(bundles)
    known = pack.sums(table, 1500)
    assert known is not None
    for _ in range(300):
        start = rng.randint(0, 40)
        available = table.available(start, rng.randint(start, 61))
        capacity = rng.randint(0, 1500)
        assert pack.best(table, known, available, capacity) == pack.best(table, None, available, capacity)


def test_the_two_smaller_beat_the_larger() -> None:
    table = pack.bundle_table([1840, 2400, 1840])
    take = pack.best(table, None, table.available(0, 3), 3789)
    assert table.taken(take, 0, 3, highest=False) == (0, 2)


def test_lowest_or_highest_of_each_size() -> None:
    table = pack.bundle_table([10, 20, 10, 20, 10, 0])
    assert table.sizes == (20, 10)
    assert table.taken((1, 2), 0, 7, highest=False) == (0, 1, 2)
    assert table.taken((1, 2), 0, 7, highest=True) == (2, 3, 4)
    assert table.taken((1, 1), 1, 4, highest=False) == (1, 2)
    assert table.bytes(1, 4) == 50


def test_too_many_sums_are_not_kept() -> None:
    assert pack.sums(pack.bundle_table([i % 5 + 100 for i in range(200)]), 1 << 30) is None
