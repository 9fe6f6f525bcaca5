"""The choice against an independent brute force, and the properties that people rely on."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.facts.rig import load_rig
from launcher.planner import budget, make_plan, model_shape, owner
from launcher.planner.budget import Problem
from launcher.structs import Device, Plan, Settings
from launcher.units import MIB
from tests.models import card, deepseek, moe_header, replica_header, rig

GOLDEN = Path(__file__).parent.parent / "golden"
BASE = Settings(n_ctx_per_stream=4096, threads=16, cache_ram_bytes=0, checkpoints=0)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def brute_force(bundles: list[int], devices: tuple[Device, ...]) -> tuple[int, int] | None:
    """(resident bytes, resident layers) of the best placement: every device subset, split and residency tried."""
    shape = model_shape(moe_header(bundles))
    everything = sum(1 for b in bundles if b)
    best: tuple[int, int] | None = None
    for size in range(1, len(devices) + 1):
        for subset in itertools.combinations(devices, size):
            problem = Problem(shape=shape, draft=None, devices=subset, settings=BASE)
            for counts in compositions(shape.n_layer + 1, size):
                for host_anywhere in (False, True):
                    total = _best_of_split(problem, counts, bundles, host_anywhere)
                    if total and (host_anywhere or total[1] == everything):
                        best = max(best or total, total)
    return best


def _best_of_split(
    p: Problem, counts: tuple[int, ...], bundles: list[int], host_anywhere: bool
) -> tuple[int, int] | None:
    start, n_bytes, n_layers = 0, 0, 0
    for k, n in enumerate(counts):
        own = [i for i in range(start, min(start + n, len(bundles))) if bundles[i]]
        found = None
        for mask in range(1 << len(own)):
            chosen = tuple(i for bit, i in enumerate(own) if mask >> bit & 1)
            t = budget.terms(p, k, start, start + n, chosen, host_anywhere=host_anywhere)
            if sum(t.values()) <= (p.devices[k].free_bytes or 0):
                found = max(found or (0, 0), (t["experts"], len(chosen)))
        if found is None:
            return None
        n_bytes, n_layers, start = n_bytes + found[0], n_layers + found[1], start + n
    return n_bytes, n_layers


def test_no_other_placement_holds_more_in_200_random_cases() -> None:
    rng = random.Random(1)
    fitting = 0
    for _ in range(200):
        sizes = rng.sample([64, 96, 128, 160, 224, 352], rng.randint(1, 3))
        bundles = [rng.choice([*sizes, 0]) for _ in range(rng.randint(2, 7))]
        if not any(bundles):
            continue
        devices = tuple(card(k, rng.randint(1500, 3200)) for k in range(rng.randint(1, 3)))
        expected = brute_force(bundles, devices)
        plan = make_plan(target="t", header=moe_header(bundles), drafter=None, inventory=rig(*devices), settings=BASE)
        over = any(d.short_bytes for d in plan.devices)
        assert over == (expected is None), (bundles, devices)
        if expected:
            fitting += 1
            got = sum(d.terms["experts"] for d in plan.devices), len(plan.resident_layers)
            assert got == expected, (bundles, [d.free_bytes for d in devices])
    assert fitting > 60


def small(free: list[int], bundles: list[int], **changes: object) -> Plan:
    devices = [card(k, f) for k, f in enumerate(free)]
    settings = Settings(**({"n_ctx_per_stream": 4096, "threads": 16, "cache_ram_bytes": 0, "checkpoints": 0} | changes))  # type: ignore[arg-type]
    return make_plan(target="t", header=moe_header(bundles), drafter=None, inventory=rig(*devices), settings=settings)


def resident_bytes(plan: Plan) -> int:
    return sum(d.terms["experts"] for d in plan.devices)


def test_more_free_memory_never_lowers_what_is_resident() -> None:
    rng = random.Random(2)
    for _ in range(150):
        bundles = [rng.choice([96, 128, 224]) for _ in range(rng.randint(4, 16))]
        free = [rng.randint(1700, 3500) for _ in range(rng.randint(1, 3))]
        before = small(free, bundles)
        more = list(free)
        more[rng.randrange(len(free))] += rng.randint(1, 900)
        after = small(more, bundles)
        if before.fits:
            assert resident_bytes(after) >= resident_bytes(before)
            assert after.host.terms["experts"] <= before.host.terms["experts"]


def test_another_card_never_lowers_what_is_resident() -> None:
    rng = random.Random(5)
    for _ in range(80):
        bundles = [rng.choice([96, 224]) for _ in range(rng.randint(4, 12))]
        free = [rng.randint(1900, 3500) for _ in range(rng.randint(1, 2))]
        before = small(free, bundles)
        after = small([*free, rng.randint(100, 3500)], bundles)
        if before.fits:
            assert resident_bytes(after) >= resident_bytes(before)


def test_a_card_that_does_not_pay_is_left_out() -> None:
    plan = small([6000, 400], [128] * 6)
    assert [d.device.name for d in plan.devices] == ["CUDA0"]
    assert plan.tensor_split == (7,)


def test_every_bundle_is_whole_and_on_its_owner_or_on_the_host() -> None:
    rng = random.Random(9)
    for _ in range(150):
        bundles = [rng.choice([0, 96, 128, 224]) for _ in range(rng.randint(3, 14))]
        plan = small([rng.randint(1700, 3300) for _ in range(rng.randint(1, 3))], bundles)
        owned = owner.owners(len(bundles), plan.tensor_split)
        names = [d.device.name for d in plan.devices]
        for layer in plan.layers:
            slot = owned[layer.index]
            assert slot is not None
            assert layer.device == names[slot]
        expected = sum(b * MIB for b in bundles)
        assert resident_bytes(plan) + plan.host.terms["experts"] == expected
        for d in plan.devices:
            assert set(d.resident_layers) <= set(d.layers)
            assert plan.refusal or d.used_bytes + d.terms["margin"] <= (d.device.free_bytes or 0)


def test_the_same_input_gives_the_same_plan() -> None:
    first = small([2500, 2100, 1900], [96, 224, 128] * 4)
    assert first == small([2500, 2100, 1900], [96, 224, 128] * 4)


def test_of_unequal_bundles_the_two_smaller_beat_the_larger() -> None:
    """Dynamic quants: 1840, 1840, 2400 in 3.7 GiB takes both 1840s, not the 2400 alone."""
    header = [1840, 2400, 1840]
    plan = small([0], header)
    spare = 3789
    base = plan.devices[0]
    need = base.used_bytes + base.terms["margin"]
    plan = small([need // MIB + spare + 60], header)
    assert plan.resident_layers == (0, 2)


def test_48_layers_on_two_equal_cards_use_both_to_the_last_bundle() -> None:
    plan = small([4000, 4000], [128] * 48)
    assert plan.fits
    for d in plan.devices:
        assert len(d.resident_layers) > 4
        assert d.headroom_bytes - d.terms["margin"] < 128 * MIB


def test_lowest_layers_first_and_on_the_output_device_highest() -> None:
    plan = small([2700, 2700], [128] * 24)
    first, last = plan.devices
    assert first.resident_layers == first.layers[: len(first.resident_layers)]
    assert last.owns_output
    assert last.resident_layers == last.layers[-len(last.resident_layers) :]


def test_a_map_is_kept_to_the_letter() -> None:
    plan = small([6000, 6000], [128] * 12, residency={"CUDA0": (0, 3), "CUDA1": (11,)})
    assert [d.resident_layers for d in plan.devices] == [(0, 3), (11,)]


def test_a_map_that_no_split_can_own_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        small([6000, 6000], [128] * 12, residency={"CUDA0": (8,), "CUDA1": (2,)})
    assert caught.value.reference == "residency-impossible"


def test_a_map_that_does_not_fit_is_refused_with_the_sum() -> None:
    plan = small([2000, 6000], [600] * 12, residency={"CUDA0": (0, 1, 2, 3), "CUDA1": (11,)})
    assert plan.refusal
    assert plan.refusal.where == "CUDA0"
    assert plan.refusal.short_bytes > 0
    assert plan.refusal.needed_bytes == sum(plan.devices[0].terms.values())


def test_residency_none_keeps_every_bundle_on_the_host() -> None:
    plan = small([9000, 9000], [128] * 12, residency="none")
    assert plan.resident_layers == ()
    assert [r.buffer_type for r in plan.rules] == ["CPU"]


def test_a_users_split_is_kept() -> None:
    plan = small([9000, 9000], [128] * 12, tensor_split=(3, 10))
    assert plan.tensor_split == (3, 10)
    assert len(plan.devices[0].layers) == 3


def test_one_card_gets_bundles_too() -> None:
    plan = small([3000], [128] * 12)
    assert len(plan.devices[0].resident_layers) >= 4


def test_more_cards_never_need_more_host_memory() -> None:
    """DeepSeek without its drafter on 1, 2, 4 and 8 cards: resident bytes rise, host need falls."""
    header = replica_header("deepseek-v4-flash-UD-Q8_K_XL")
    seen = []
    for n in (1, 2, 4, 8):
        plan = make_plan(
            target="t",
            header=header,
            drafter=None,
            inventory=rig(*(card(k, 24125) for k in range(n))),
            settings=deepseek(drafter_type=None, draft_n_max=0),
        )
        assert plan.fits
        seen.append((resident_bytes(plan), -plan.host.required_bytes))
    assert seen == sorted(seen)
    assert seen[0][0] < seen[-1][0]


def test_no_device_at_all_is_a_plan_too() -> None:
    plan = make_plan(target="t", header=moe_header([128] * 6), drafter=None, inventory=rig(), settings=BASE)
    assert plan.fits
    assert plan.rules == ()
    assert {layer.device for layer in plan.layers} == {"CPU"}
    shape = model_shape(moe_header([128] * 6))
    weights = sum(layer.dense.cpu + layer.bundle.cpu for layer in shape.layers) + shape.input.cpu + shape.output.cpu
    terms = plan.host.terms
    assert sum(terms[t] for t in ("experts", "embedding", "dense", "output")) == weights


def test_the_card_with_the_fastest_link_comes_first_and_the_plan_says_what_that_saves() -> None:
    """Every offloaded expert crosses the first card's link: an x4 card in front makes a step eight times as long."""
    header = replica_header("deepseek-v4-flash-UD-Q8_K_XL")
    inventory = load_rig(GOLDEN / "rigs" / "5090+2x4090+3060.yaml")
    settings = deepseek(drafter_type=None, draft_n_max=0)
    plan = make_plan(target="t", header=header, drafter=None, inventory=inventory, settings=settings)
    assert plan.fits
    assert plan.devices[0].device.description == "RTX 5090"
    assert plan.devices[0].rig_name == "CUDA3"
    note = next(w for w in plan.warnings if "comes first" in w)
    assert "RTX 3060 in front" in note
    kept = make_plan(
        target="t",
        header=header,
        drafter=None,
        inventory=inventory,
        settings=dataclasses.replace(settings, keep_order=True),
    )
    assert kept.devices[0].device.description == "RTX 3060"
    slow, fast = kept.speed.prefill_tps.high, plan.speed.prefill_tps.high
    assert slow
    assert fast
    assert fast / slow > 6


def test_links_that_are_not_known_leave_the_order_alone() -> None:
    devices = tuple(dataclasses.replace(card(k, 3000 + 500 * k), link_bps=None) for k in range(3))
    plan = make_plan(target="t", header=moe_header([128] * 40), drafter=None, inventory=rig(*devices), settings=BASE)
    assert [d.device.name for d in plan.devices] == ["CUDA0", "CUDA1", "CUDA2"]


def test_a_projector_and_its_encode_buffer_lie_on_the_first_card() -> None:
    """Text works and the first image runs out of memory: the buffer comes after everything that is measured."""
    header, inventory = moe_header([128] * 24), rig(card(0, 3000), card(1, 3000))
    without = make_plan(target="t", header=header, drafter=None, inventory=inventory, settings=BASE)
    seen = make_plan(
        target="t", header=header, drafter=None, inventory=inventory, settings=BASE, projector_bytes=300 * MIB
    )
    assert [d.terms["projector"] for d in seen.devices] == [600 * MIB, 0]
    assert resident_bytes(seen) < resident_bytes(without)
    alone = make_plan(
        target="t", header=header, drafter=None, inventory=rig(), settings=BASE, projector_bytes=300 * MIB
    )
    assert alone.host.terms["projector"] == 600 * MIB


def test_two_kinds_of_devices_where_the_first_holds_everything() -> None:
    """The search of both must not hand the last device a range that begins behind the last slot."""
    devices = (card(0, 20000, backend="rpc"), card(0, 20000))
    plan = make_plan(target="x", header=moe_header([100] * 4), drafter=None, inventory=rig(*devices), settings=BASE)
    assert plan.fits
    assert plan.resident_layers == (0, 1, 2, 3)
