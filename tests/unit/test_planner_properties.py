"""Random models on random devices against an independent search, and the invariants that every plan keeps.

The search here tries every subset of the devices, every split of the slots and every set of whole bundles; all that it
shares with the planner are the byte terms (`budget.terms`). It knows nothing of how `place` finds its answer.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from launcher.planner import budget, make_plan, owner, rules
from launcher.planner.shape import model_shape
from launcher.structs import Device, Inventory, ModelHeader, Plan, Settings
from launcher.units import MIB
from tests.models import card, moe_header, rig

BUNDLES = ((512,), (64, 512), (300, 420, 512), (128, 129, 500, 512))
SLACK = 64 * 1024  # what padding to a buffer's alignment can add to a handful of tensors


def some_header(rng: random.Random, n_layer: int) -> ModelHeader:
    """A MoE with a dense prefix, bundles of one to four sizes in any order, and sometimes a dense block between."""
    sizes = rng.choice(BUNDLES)
    prefix = rng.choice((0, 0, 1, 2, 3))
    bundles = [0 if i < prefix or rng.random() < 0.08 else rng.choice(sizes) for i in range(n_layer)]
    if not any(bundles):
        bundles[-1] = sizes[-1]
    return moe_header(bundles, dense_mib=rng.choice((8, 40, 120)), n_vocab=rng.choice((4096, 32768)))


def some_drafter(rng: random.Random) -> ModelHeader | None:
    if rng.random() < 0.6:
        return None
    return moe_header([0] * rng.choice((1, 2, 3, 5)), dense_mib=rng.choice((20, 90)), n_vocab=4096)


def some_devices(rng: random.Random, most: int) -> tuple[Device, ...]:
    backend = rng.choice(("cuda", "cuda", "rpc"))
    return tuple(
        card(i, rng.randrange(600, 5200), total_mib=6144, context_mib=rng.choice((0, 200, 420)), backend=backend)
        for i in range(rng.randint(1, most))
    )


def some_settings(rng: random.Random, drafter: ModelHeader | None) -> Settings:
    ubatch = rng.choice((128, 512, 2048))
    return Settings(
        n_ctx_per_stream=rng.choice((512, 4096, 16384)),
        n_parallel=rng.choice((1, 1, 2, 4)),
        kv_unified=rng.random() < 0.3,
        n_batch=2048,
        n_ubatch=ubatch,
        type_k=rng.choice(("f16", "q8_0")),
        margin_bytes=rng.choice((None, 0, 256 * MIB)),
        drafter_type="draft-simple" if drafter else None,
        draft_n_max=4 if drafter else 0,
    )


def planned(header: ModelHeader, drafter: ModelHeader | None, inventory: Inventory, settings: Settings) -> Plan:
    return make_plan(target="t", header=header, drafter=drafter, inventory=inventory, settings=settings)


def experts_on_devices(plan: Plan) -> int:
    return sum(layer.bundle_bytes for layer in plan.layers if layer.resident)


# ------------------------------------------------------------------------------------- an independent search


def splits(n_slots: int, n_devices: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every way to cut the slots into one non-empty run a device."""
    for cuts in itertools.combinations(range(1, n_slots), n_devices - 1):
        ends = (*cuts, n_slots)
        yield tuple(zip((0, *cuts), ends, strict=True))


def options(p: budget.Problem, k: int, start: int, end: int, host: bool) -> list[tuple[int, int]]:
    """(resident bytes, resident bundles) of every set of bundles that device `k` can hold."""
    mine = [i for i in range(start, min(end, p.shape.n_layer)) if p.shape.layers[i].bundle.file]
    found = []
    for n in range(len(mine) + 1):
        for resident in itertools.combinations(mine, n):
            terms = budget.terms(p, k, start, end, resident, host_anywhere=host)
            if sum(terms.values()) <= (p.devices[k].free_bytes or 0):
                found.append((sum(p.shape.layers[i].bundle.file for i in resident), n))
    return found


def best_by_force(
    header: ModelHeader, drafter: ModelHeader | None, devices: tuple[Device, ...], settings: Settings
) -> tuple[int, int] | None:
    """(most resident expert bytes, most resident bundles at that) over everything; None when nothing fits."""
    shape, draft = model_shape(header), model_shape(drafter) if drafter else None
    every = sum(1 for layer in shape.layers if layer.bundle.file)
    best: tuple[int, int] | None = None
    for n in range(1, min(len(devices), shape.n_layer + 1) + 1):
        for some in itertools.combinations(devices, n):
            p = budget.Problem(shape=shape, draft=draft, devices=some, settings=settings)
            known: dict[tuple[int, int, int, bool], list[tuple[int, int]]] = {}
            for runs in splits(shape.n_layer + 1, n):
                for host in (True, False):
                    per_device = []
                    for k, (start, end) in enumerate(runs):
                        key = (k, start, end, host)
                        if key not in known:
                            known[key] = sorted(set(options(p, k, start, end, host)), reverse=True)
                        per_device.append(known[key])
                    # the terms with bundles on the host hold for choices that leave one there, and only for those
                    reached = (
                        (sum(b for b, _ in choice), sum(c for _, c in choice))
                        for choice in itertools.product(*([o[:2] for o in per_device] if host else per_device))
                    )
                    for value, count in reached:
                        if (count == every) is not host and (best is None or (value, count) > best):
                            best = value, count
    return best


def test_no_other_placement_holds_more_resident_bytes() -> None:
    rng = random.Random(11)
    fitting = refused = 0
    for case in range(2000):
        n_layer = rng.choice((2, 3, 4, 5, 6)) if case % 10 else rng.choice((8, 9, 10))
        header, drafter = some_header(rng, n_layer), some_drafter(rng)
        devices = some_devices(rng, 3 if n_layer < 8 else 2)
        settings = some_settings(rng, drafter)
        plan = planned(header, drafter, rig(*devices), settings)
        expected = best_by_force(header, drafter, devices, settings)
        about = f"case {case}: {plan.tensor_split} {plan.resident_layers} {expected}"
        assert plan.fits is (expected is not None), about
        if expected is None:
            refused += 1
            continue
        fitting += 1
        assert (experts_on_devices(plan), len(plan.resident_layers)) == expected, about
    assert fitting > 1000
    assert refused > 100


def tight(
    rng: random.Random, header: ModelHeader, drafter: ModelHeader | None, settings: Settings
) -> tuple[tuple[Device, ...], int]:
    """Devices with exactly the memory that one random placement needs, and that placement's resident bytes."""
    shape, draft = model_shape(header), model_shape(drafter) if drafter else None
    n = rng.randint(1, min(3, shape.n_layer + 1))
    backend = rng.choice(("cuda", "rpc"))
    devices = tuple(card(i, 0, total_mib=6144, context_mib=rng.choice((0, 200)), backend=backend) for i in range(n))
    p = budget.Problem(shape=shape, draft=draft, devices=devices, settings=settings)
    runs = rng.choice(list(splits(shape.n_layer + 1, n)))
    resident = [[i for i in p.moe_layers if a <= i < b and rng.random() < 0.4] for a, b in runs]
    host = sum(map(len, resident)) < len(p.moe_layers)
    for k, (a, b) in enumerate(runs):
        need = sum(budget.terms(p, k, a, b, resident[k], host_anywhere=host).values())
        devices = (*devices[:k], replace(devices[k], free_bytes=need), *devices[k + 1 :])
    return devices, sum(shape.layers[i].bundle.file for mine in resident for i in mine)


def test_a_placement_that_fits_to_the_byte_is_found() -> None:
    rng = random.Random(13)
    for case in range(1500):
        header, drafter = some_header(rng, rng.randint(2, 9)), some_drafter(rng)
        settings = some_settings(rng, drafter)
        devices, resident_bytes = tight(rng, header, drafter, settings)
        plan = planned(header, drafter, rig(*devices), settings)
        about = f"case {case}: {plan.tensor_split} {plan.resident_layers}, at least {resident_bytes:,} fit"
        assert plan.fits, about
        assert experts_on_devices(plan) >= resident_bytes, about


def test_a_split_that_a_person_gave_is_kept_and_filled_as_well_as_it_can_be() -> None:
    rng = random.Random(12)
    fitting = 0
    for case in range(150):
        header, drafter = some_header(rng, rng.choice((3, 4, 5, 6))), some_drafter(rng)
        devices = some_devices(rng, 3)
        n_slots = model_shape(header).n_layer + 1
        cuts = sorted(rng.sample(range(1, n_slots), len(devices) - 1))
        runs = tuple(zip((0, *cuts), (*cuts, n_slots), strict=True))
        settings = some_settings(rng, drafter)
        split = tuple(end - start for start, end in runs)
        plan = planned(header, drafter, rig(*devices), replace(settings, tensor_split=split))
        assert plan.tensor_split == split
        p = budget.Problem(
            shape=model_shape(header),
            draft=model_shape(drafter) if drafter else None,
            devices=devices,
            settings=settings,
        )
        every = len(p.moe_layers)
        best = None
        for host in (True, False):
            for choice in itertools.product(*(options(p, k, a, b, host) for k, (a, b) in enumerate(runs))):
                value = sum(b for b, _ in choice), sum(n for _, n in choice)
                if (value[1] == every) is not host and (best is None or value > best):
                    best = value
        assert plan.fits is (best is not None), case
        if best:
            fitting += 1
            assert (experts_on_devices(plan), len(plan.resident_layers)) == best, case
    assert fitting > 50


# ------------------------------------------------------------------------------- what holds for every plan


def random_case(rng: random.Random) -> tuple[ModelHeader, ModelHeader | None, Inventory, Settings]:
    header, drafter = some_header(rng, rng.randint(2, 14)), some_drafter(rng)
    devices = some_devices(rng, 3) if rng.random() < 0.95 else ()
    ram = rng.choice((2, 4, 16, 64, 190))
    return header, drafter, rig(*devices, ram_gib=ram), some_settings(rng, drafter)


@pytest.fixture(scope="module")
def cases() -> list[tuple[ModelHeader, ModelHeader | None, Inventory, Settings, Plan]]:
    rng = random.Random(5)
    made = [random_case(rng) for _ in range(2000)]
    return [(*case, planned(*case)) for case in made]


Cases = list[tuple[ModelHeader, "ModelHeader | None", Inventory, Settings, Plan]]


def test_every_tensor_has_one_place_and_no_bundle_is_cut(cases: Cases) -> None:
    for header, _, _, _, plan in cases:
        owner_of = {i: d for d in plan.devices for i in d.layers}
        assert sorted(i for d in plan.devices for i in d.layers) == (
            list(range(plan.model.n_layer)) if plan.devices else []
        )
        assert sum(d.owns_output for d in plan.devices) == (1 if plan.devices else 0)
        for d in plan.devices:
            assert set(d.resident_layers) <= set(d.layers)
        for layer in plan.layers:
            home = owner_of[layer.index].device.name if plan.devices else "CPU"
            assert layer.device == home
            assert layer.resident == any(layer.index in d.resident_layers for d in plan.devices)
        with_experts = {layer.index for layer in plan.layers if layer.bundle_bytes}
        if plan.devices:
            assert set(plan.host.layers) == with_experts - set(plan.resident_layers)
        resolved = rules.resolve(plan.rules, [t.name for t in header.tensors])
        where: dict[int, set[str | None]] = {}
        for t in header.tensors:
            if "_exps" in t.name and plan.rules:
                where.setdefault(int(t.name.split(".")[1]), set()).add(resolved[t.name])
            else:
                assert resolved[t.name] is None
        for i, buffers in where.items():
            assert buffers == {owner_of[i].device.buffer_type if i in plan.resident_layers else "CPU"}


def test_sums_are_those_of_the_file(cases: Cases) -> None:
    """Weights on devices and host together are the file's, but for padding and the copies that are stated."""
    for header, _, _, _, plan in cases:
        shape = model_shape(header)
        weights = sum(t.size_bytes for t in header.tensors)
        on_devices = sum(d.terms["dense"] + d.terms["experts"] + d.terms["output"] for d in plan.devices)
        on_host = sum(plan.host.terms[name] for name in ("experts", "dense", "output", "embedding"))
        copies = shape.per_device.file * max(0, len(plan.devices) - 1)
        assert weights <= on_devices + on_host - copies <= weights + SLACK
        assert plan.host.required_bytes == sum(plan.host.terms.values())
        kv = sum(layer.kv_bytes for layer in plan.layers)
        assert kv == sum(d.terms["kv"] for d in plan.devices) + plan.host.terms["kv"]
        for d in plan.devices:
            assert all(value >= 0 for value in d.terms.values())
            assert d.used_bytes + d.headroom_bytes == d.device.free_bytes
        if plan.fits:
            assert all(d.headroom_bytes >= d.terms["margin"] for d in plan.devices)
            assert plan.host.required_bytes <= plan.host.available_bytes
        else:
            assert plan.refusal is not None
            assert plan.refusal.short_bytes > 0
            over = {d.device.name for d in plan.devices if d.short_bytes}
            assert plan.refusal.where in (over or {"host"})


def test_the_command_line_gives_the_same_owners(cases: Cases) -> None:
    for header, _, _, _, plan in cases:
        rules.check(plan, header)
        if not plan.devices:
            assert plan.tensor_split == ()
            continue
        assert sum(plan.tensor_split) == plan.model.n_layer + 1
        assert all(plan.tensor_split), "an idle device is left out"
        owned = owner.owners(plan.model.n_layer, plan.tensor_split)
        for k, d in enumerate(plan.devices):
            assert [i for i, o in enumerate(owned[:-1]) if o == k] == list(d.layers)
            assert (owned[-1] == k) is d.owns_output


def test_the_same_question_has_the_same_answer(cases: Cases) -> None:
    for header, drafter, inventory, settings, plan in cases[::10]:
        assert planned(header, drafter, inventory, settings) == plan


def test_more_memory_or_one_more_device_never_holds_less(cases: Cases) -> None:
    rng = random.Random(6)
    asked = 0
    for header, drafter, inventory, settings, plan in cases[::2]:
        if not (plan.fits and plan.devices) or len(inventory.devices) > 2:
            continue
        asked += 1
        devices = list(inventory.devices)
        if rng.random() < 0.5:
            k = rng.randrange(len(devices))
            devices[k] = replace(devices[k], free_bytes=(devices[k].free_bytes or 0) + rng.choice((1, 40, 900)) * MIB)
        else:
            extra = card(len(devices), rng.randrange(600, 5200), total_mib=6144, backend=devices[0].backend)
            devices.insert(rng.choice((0, len(devices))), extra)
        more = planned(header, drafter, replace(inventory, devices=tuple(devices)), settings)
        assert experts_on_devices(more) >= experts_on_devices(plan)
        assert more.host.terms["experts"] <= plan.host.terms["experts"]
        assert more.fits
    assert asked > 200


def test_one_bundle_more_on_the_host_is_exactly_that_bundle(cases: Cases) -> None:
    moved = 0
    for header, drafter, inventory, settings, plan in cases[::7]:
        if len(plan.resident_layers) < 2 or not plan.host.layers:
            continue
        wanted = {d.rig_name: d.resident_layers for d in plan.devices}
        fixed = replace(settings, residency=wanted, cache_ram_bytes=0, checkpoints=0)
        name = next(d.rig_name for d in plan.devices if d.resident_layers)
        first = wanted[name][0]
        fewer = replace(fixed, residency=wanted | {name: wanted[name][1:]})
        before, after = (planned(header, drafter, inventory, s) for s in (fixed, fewer))
        if after.tensor_split == before.tensor_split:
            moved += 1
            bundle = next(layer.bundle_bytes for layer in plan.layers if layer.index == first)
            assert after.host.terms["experts"] - before.host.terms["experts"] == bundle
    assert moved > 10


@pytest.mark.parametrize("n_devices", [3, 4, 5, 6, 8])
def test_busy_cards_are_left_out_however_many_there_are(n_devices: int) -> None:
    """Two cards of the box belong to somebody else: the others must not be refused for it."""
    header = moe_header([300] * 12)
    devices = tuple(card(i, 300 if i < 2 else 23000) for i in range(n_devices))
    plan = planned(header, None, rig(*devices), Settings(n_ctx_per_stream=4096))
    assert plan.fits
    assert len(plan.resident_layers) == 12
