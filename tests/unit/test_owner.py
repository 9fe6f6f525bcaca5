"""The owner rule against a second implementation, written from the engine's loop and not from ours."""

from __future__ import annotations

import random

import pytest

from launcher.planner import owner

numpy = pytest.importorskip("numpy")


def engine_loop(n_layer: int, split: list[float], n_gpu_layers: int) -> list[int | None]:
    """llama.cpp's `get_layer_buft_list` in numpy float32: std::upper_bound over the normalised cumulative split."""
    f = numpy.float32
    cumulative = []
    total = f(0)
    for w in split:
        total = f(total + f(w))
        cumulative.append(total)
    cumulative = numpy.array([f(c / total) for c in cumulative], dtype=f)
    start = max(n_layer + 1 - n_gpu_layers, 0)
    active = min(n_gpu_layers, n_layer + 1)
    out: list[int | None] = []
    for slot in range(n_layer + 1):
        if slot < start or slot - start >= active:
            out.append(None)
        else:
            out.append(int(numpy.searchsorted(cumulative, f(f(slot - start) / f(active)), side="right")))
    return out


def test_10000_random_draws_agree() -> None:
    rng = random.Random(20260731)
    for _ in range(10_000):
        n_layer, n_devices = rng.randint(1, 130), rng.randint(1, 8)
        split = [rng.choice([0, rng.randint(0, 60), rng.random() * 20]) for _ in range(n_devices)]
        split[rng.randrange(n_devices)] = rng.randint(1, 60)
        n_gpu_layers = rng.choice([999, n_layer + 1, rng.randint(0, n_layer + 2)])
        assert list(owner.owners(n_layer, split, n_gpu_layers)) == engine_loop(n_layer, split, n_gpu_layers)


@pytest.mark.parametrize(
    ("n_layer", "split", "expected"),
    [  # worked cases of the engine: slots per device, the output counted
        (43, (1, 1), (22, 22)),
        (43, (28, 5, 5, 5), (29, 5, 5, 5)),
        (43, (28, 5, 5, 6), (28, 5, 5, 6)),
        (43, (1, 1, 1, 1), (11, 11, 11, 11)),
        (43, (1, 1, 1), (15, 15, 14)),
        (43, (3, 1), (33, 11)),
        (48, (1, 1), (25, 24)),
        (36, (1, 1), (19, 18)),
        (61, (1, 1, 1, 1), (16, 15, 16, 15)),
        (60, (1, 1, 1, 1), (16, 15, 15, 15)),
    ],
)
def test_worked_cases(n_layer: int, split: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert owner.counts(n_layer, split) == expected


def test_counts_that_sum_to_the_slots_give_themselves() -> None:
    rng = random.Random(7)
    for _ in range(3000):
        n_layer, n_devices = rng.randint(8, 126), rng.randint(1, 8)
        cuts = sorted(rng.sample(range(1, n_layer + 1), n_devices - 1))
        split = [b - a for a, b in zip([0, *cuts], [*cuts, n_layer + 1], strict=True)]
        assert list(owner.counts(n_layer, split)) == split


def test_few_layers_on_cards_leave_the_first_on_the_cpu() -> None:
    owned = owner.owners(43, (1, 1), 40)
    assert owned[:4] == (None, None, None, None)
    assert owned[4:24] == (0,) * 20
    assert owned[24:] == (1,) * 20


@pytest.mark.parametrize(
    ("split", "expected"),
    [((1, 1), (2, 2)), ((10, 34), (1, 3)), ((30, 14), (3, 1)), ((21, 23), (2, 2))],
)
def test_the_drafter_follows_the_same_shares(split: tuple[int, int], expected: tuple[int, int]) -> None:
    """A three-layer drafter beside 43 layers: what the engine's dry runs gave per device."""
    n_layer, n_draft = 43, 3
    first = owner.counts(n_layer, split)[0]
    got = (
        len(owner.drafter_slots(n_layer, n_draft, 0, first)),
        len(owner.drafter_slots(n_layer, n_draft, first, n_layer + 1)),
    )
    assert got == expected == owner.counts(n_draft, split)


def test_drafter_slots_equal_the_owner_rule_on_random_splits() -> None:
    rng = random.Random(11)
    for _ in range(3000):
        n_layer, n_draft, n_devices = rng.randint(8, 100), rng.randint(1, 9), rng.randint(1, 5)
        cuts = sorted(rng.sample(range(1, n_layer + 1), n_devices - 1))
        bounds = [0, *cuts, n_layer + 1]
        split = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
        got = tuple(len(owner.drafter_slots(n_layer, n_draft, a, b)) for a, b in zip(bounds, bounds[1:], strict=False))
        assert got == owner.counts(n_draft, split)
