"""Four loopback RPC servers as four cards: bytes planned without the engine beside the bytes of its load log."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from launcher.facts.engine import probe
from launcher.facts.gguf_header import read_header
from launcher.facts.load_log import LoadLog
from launcher.planner import budget, drafter, make_plan, model_shape, owner
from launcher.structs import Device, Engine, Host, Inventory, Plan, Settings
from launcher.units import MIB
from tests.engine.test_placements import PROMPT, TINY, assert_buffers, plan_for, rpc_devices, served
from tests.replicas import make_tiny

pytestmark = pytest.mark.engine

LOG_STEP = 0.1 * MIB


@pytest.fixture(scope="module")
def engine(engine_path: Path) -> Engine:
    return probe(str(engine_path), "--engine")


@pytest.fixture
def four(rpc_servers: Callable[[int], tuple[str, ...]]) -> tuple[str, ...]:
    """Endpoints of four fresh servers."""
    return rpc_servers(4)


def assert_owners(plan: Plan, log: LoadLog, label: str) -> None:
    """The engine's own lines, one a block and one for the output, name the device that the plan names."""
    names = [d.device.name for d in plan.devices]
    expected = [names[k] for k in owner.owners(plan.model.n_layer, plan.tensor_split) if k is not None]
    assert [device for _, device in log.layer_devices] == expected, label


def tight(model: Path, devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """The devices with unequal memory: what an even split takes without experts, and room for a few bundles."""
    least = plan_for(model, devices, residency="none", tensor_split=(2, 3, 2, 2))
    bundle = max(layer.bundle_bytes for layer in least.layers if layer.loaded)
    rooms = zip(devices, least.devices, (2.5, 0.5, 0, 1.5), strict=True)
    return tuple(dataclasses.replace(d, free_bytes=p.used_bytes + int(n * bundle)) for d, p, n in rooms)


def layouts(model: Path, devices: tuple[Device, ...]) -> dict[str, tuple[tuple[Device, ...], dict[str, Any]]]:
    """Devices and settings by name. The map has the last bundle of each device's run under 2,3,2,2."""
    moe = {i for i, layer in enumerate(plan_for(model, devices).layers) if layer.loaded and layer.bundle_bytes}
    runs = [range(2), range(2, 5), range(5, 7), range(7, 8)]
    odd = {f"RPC{k}": tuple(i for i in run if i in moe)[-1:] for k, run in enumerate(runs) if moe & set(run)}
    return {
        "auto, little memory": (tight(model, devices), {}),
        "auto, -ts 4,1,3,1": (devices, {"tensor_split": (4, 1, 3, 1), "n_parallel": 2}),
        "map, -ts 2,3,2,2": (devices, {"tensor_split": (2, 3, 2, 2), "residency": odd, "n_ctx_per_stream": 2048}),
        "host, -ts 10,40,15,35": (devices, {"tensor_split": (10, 40, 15, 35), "residency": "none", **Q8_CACHE}),
    }


Q8_CACHE = {"type_k": "q8_0", "type_v": "q8_0"}


@pytest.mark.parametrize("name", TINY)
def test_four_devices_hold_what_was_planned_without_the_engine(
    name: str, tiny: Callable[[str], Path], engine: Engine, four: tuple[str, ...], tmp_path: Path
) -> None:
    model, devices = tiny(name), rpc_devices(four)
    for label, (given, changes) in layouts(model, devices).items():
        plan = plan_for(model, given, **changes)
        assert len(plan.devices) == 4 or "tensor_split" not in changes, label
        if given != devices:
            resident = {layer.resident for layer in plan.layers if layer.loaded and layer.bundle_bytes}
            assert resident == {True, False}, "the planner mixes"
        with served(plan, engine, tmp_path, verbosity=5) as (_, log):
            assert_buffers(plan, log(), f"{name} {label}")
            assert_owners(plan, log(), f"{name} {label}")


# ------------------------------------------------------------------------------------------ drafters

PAIRS = {"tiny-qwen3moe": ("tiny-qwen3-draft", "draft-simple"), "tiny-deepseek4": ("tiny-dspark", "draft-dspark")}
SPLITS = ((5, 4), (2, 7), (7, 2), (8, 1), (3, 2, 2, 2), (1, 1, 1, 6), (5, 2, 1, 1))
CASES = [pytest.param(name, split, id=f"{name}-{'-'.join(map(str, split))}") for name in PAIRS for split in SPLITS]


def drafted(model: Path, draft: Path | None, devices: tuple[Device, ...], **changes: Any) -> Plan:
    """A plan with a drafter; `plan_for` has none."""
    memory = psutil.virtual_memory()
    host = Host(total_bytes=memory.total, available_bytes=memory.available, limited_by="MemAvailable", cores=2)
    base: dict[str, Any] = {
        "n_ctx_per_stream": 1024, "n_batch": 128, "n_ubatch": 64, "cache_ram_bytes": 0, "checkpoints": 1,
    }  # fmt: skip
    plan = make_plan(
        target=model.name,
        header=read_header(model),
        drafter=read_header(draft) if draft else None,
        inventory=Inventory(devices=devices, host=host),
        settings=Settings(**(base | changes)),
    )
    assert plan.fits
    return plan


@pytest.fixture(scope="session")
def draft_file(tiny: Callable[[str], Path]) -> Callable[[str], Path]:
    """A draft model, made where an older cache of the tiny models lacks it."""

    def get(name: str) -> Path:
        path = tiny(name)
        if not path.exists():
            subprocess.run([sys.executable, make_tiny.__file__, path.parent, "--only", name], check=True)
        return path

    return get


def problem(plan: Plan, model: Path, draft: Path | None) -> budget.Problem:
    """What the planner had solved."""
    return budget.Problem(
        shape=model_shape(read_header(model), mtp=plan.settings.drafter_type == "draft-mtp"),
        draft=model_shape(read_header(draft)) if draft else None,
        devices=tuple(d.device for d in plan.devices),
        settings=plan.settings,
    )


def parts(plan: Plan, model: Path, draft: Path | None) -> list[tuple[int, int, int]]:
    """(weights, cache, compute bound) of the drafter on each device, from the planner's own sum."""
    p = problem(plan, model, draft)
    seams = pairwise((0, *accumulate(plan.tensor_split)))
    return [drafter.parts(p, k, start, end) for k, (start, end) in enumerate(seams)]


@pytest.mark.parametrize(("name", "split"), CASES)
def test_a_drafter_lies_where_the_planner_says(
    name: str,
    split: tuple[int, ...],
    tiny: Callable[[str], Path],
    draft_file: Callable[[str], Path],
    engine: Engine,
    four: tuple[str, ...],
    tmp_path: Path,
) -> None:
    model, (draft_name, kind) = tiny(name), PAIRS[name]
    draft = draft_file(draft_name)
    devices = rpc_devices(four[: len(split)])
    plan = drafted(model, draft, devices, tensor_split=split, drafter_type=kind, draft_n_max=3)
    with served(plan, engine, tmp_path) as (_, read):
        log = read()
    assert log.speculative
    assert_buffers(plan, log, str(split))
    expected = parts(plan, model, draft)
    for d, (weights, cache, bound) in zip(plan.devices, expected, strict=True):
        buffer, label = d.device.buffer_type, (split, d.device.name)
        assert d.terms["drafter"] == weights + cache + bound, label
        assert log.draft_model_bytes.get(buffer, 0) == pytest.approx(weights, abs=LOG_STEP), label
        assert log.draft_kv_bytes.get(buffer, 0) == pytest.approx(cache, abs=LOG_STEP), label
        assert log.draft_compute_bytes.get(buffer, 0) <= bound * 1.01 + LOG_STEP, label
    assert sum(weights for weights, _, _ in expected) > 0.5 * MIB


PLACES = [
    pytest.param("tiny-qwen3moe", {"drafter_device": "RPC1"}, id="one-device"),
    pytest.param("tiny-qwen3moe", {"drafter_device": "host"}, id="host"),
    pytest.param("tiny-qwen3moe", {"drafter_layers": 2}, id="two-slots"),
    pytest.param("tiny-qwen3moe", {"drafter_layers": 0}, id="no-slot"),
    pytest.param("tiny-deepseek4", {"drafter_device": "RPC2"}, id="dspark-output"),
    pytest.param("tiny-deepseek4", {"drafter_experts": "host"}, id="dspark-experts"),
    pytest.param("tiny-deepseek4", {"drafter_layers": 2}, id="dspark-two-slots"),
    pytest.param("tiny-deepseek4", {"drafter_layers": 0}, id="dspark-no-slot"),
    pytest.param("tiny-deepseek4", {"drafter_device": "RPC2", "drafter_experts": "host"}, id="dspark-both"),
]


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_a_drafter_lies_where_a_person_puts_it(
    name: str,
    place: dict[str, Any],
    tiny: Callable[[str], Path],
    draft_file: Callable[[str], Path],
    engine: Engine,
    four: tuple[str, ...],
    tmp_path: Path,
) -> None:
    model, (draft_name, kind) = tiny(name), PAIRS[name]
    draft, devices = draft_file(draft_name), rpc_devices(four[:3])
    plan = drafted(model, draft, devices, tensor_split=(4, 2, 3), drafter_type=kind, draft_n_max=3, **place)
    with served(plan, engine, tmp_path) as (base, read):
        assert next_text(base, drafts=True)
        log = read()
    assert_buffers(plan, log, str(place))
    for d, (weights, cache, bound) in zip(plan.devices, parts(plan, model, draft), strict=True):
        buffer = d.device.buffer_type
        assert d.terms["drafter"] == weights + cache + bound, buffer
        assert log.draft_model_bytes.get(buffer, 0) == pytest.approx(weights, abs=LOG_STEP), buffer
        assert log.draft_kv_bytes.get(buffer, 0) == pytest.approx(cache, abs=LOG_STEP), buffer
        assert log.draft_compute_bytes.get(buffer, 0) <= bound * 1.01 + LOG_STEP, buffer
    devices_of_ours = {d.device.buffer_type for d in plan.devices}
    host = sum(
        n
        for seen in (log.draft_model_bytes, log.draft_kv_bytes, log.draft_compute_bytes)
        for buffer, n in seen.items()
        if buffer not in devices_of_ours
    )
    assert host <= plan.host.terms["drafter"] * 1.01 + LOG_STEP
    stored, bound = drafter.host_bytes(problem(plan, model, draft))
    assert plan.host.terms["drafter"] == stored + bound
    kept = sum(
        n
        for seen in (log.draft_model_bytes, log.draft_kv_bytes)
        for buffer, n in seen.items()
        if buffer not in devices_of_ours
    )
    assert kept == pytest.approx(stored, abs=2 * LOG_STEP)


def test_a_device_of_its_own_drafts_for_the_others(
    tiny: Callable[[str], Path],
    draft_file: Callable[[str], Path],
    engine: Engine,
    four: tuple[str, ...],
    tmp_path: Path,
) -> None:
    """The third device owns no layer of the target; it drafts, and the answer is there."""
    model, draft = tiny("tiny-qwen3moe"), draft_file("tiny-qwen3-draft")
    devices = rpc_devices(four[:3])
    plan = drafted(
        model, draft, devices, tensor_split=(5, 4, 0), drafter_type="draft-simple", draft_n_max=3, drafter_device="RPC2"
    )
    lone = plan.devices[-1]
    with served(plan, engine, tmp_path) as (base, read):
        assert next_text(base, drafts=True)
        log = read()
    mine = lone.device.buffer_type
    assert mine not in {*log.model_bytes, *log.kv_bytes}
    seen = (log.draft_model_bytes, log.draft_kv_bytes, log.draft_compute_bytes)
    assert all(set(part) & {d.device.buffer_type for d in plan.devices} == {mine} for part in seen)
    used = sum(part[mine] for part in seen)
    assert used <= lone.terms["drafter"] * 1.01 + LOG_STEP
    assert used > 0.5 * MIB


@pytest.mark.parametrize("split", [(4, 5), (7, 2), (8, 1), (3, 2, 2, 2)], ids=lambda s: "-".join(map(str, s)))
def test_heads_in_the_models_own_file_are_charged_to_their_device(
    split: tuple[int, ...], tiny: Callable[[str], Path], engine: Engine, four: tuple[str, ...], tmp_path: Path
) -> None:
    """`draft-mtp` has no weights of its own, but a cache and a compute buffer."""
    model, devices = tiny("tiny-glm4moe"), rpc_devices(four[: len(split)])
    plan = drafted(model, None, devices, tensor_split=split, drafter_type="draft-mtp", draft_n_max=2)
    with served(plan, engine, tmp_path) as (_, read):
        log = read()
    assert log.speculative
    assert_buffers(plan, log, str(split))
    for d, (weights, cache, bound) in zip(plan.devices, parts(plan, model, None), strict=True):
        buffer, label = d.device.buffer_type, (split, d.device.name)
        assert (weights, log.draft_model_bytes.get(buffer, 0)) == (0, 0), label
        assert d.terms["drafter"] == cache + bound, label
        assert log.draft_kv_bytes.get(buffer, 0) == pytest.approx(cache, abs=LOG_STEP), label
        assert log.draft_compute_bytes.get(buffer, 0) <= bound * 1.01 + LOG_STEP, label
    assert sum(log.draft_kv_bytes.values()) > 0
    assert sum(log.draft_compute_bytes.values()) > 0.5 * MIB


@pytest.mark.parametrize("name", PAIRS)
def test_a_drafter_that_is_off_leaves_no_flag_and_no_byte(
    name: str,
    tiny: Callable[[str], Path],
    draft_file: Callable[[str], Path],
    engine: Engine,
    four: tuple[str, ...],
    tmp_path: Path,
) -> None:
    model, (draft_name, kind) = tiny(name), PAIRS[name]
    devices, split = rpc_devices(four), {"tensor_split": (3, 2, 2, 2)}
    on = drafted(model, draft_file(draft_name), devices, drafter_type=kind, draft_n_max=3, **split)
    off = drafted(model, None, devices, drafter_type=None, draft_n_max=3, **split)
    assert all(d.terms["drafter"] == 0 for d in off.devices)
    assert off.drafter_path is None
    with served(on, engine, tmp_path) as (base, _):
        assert next_text(base, drafts=True)
    with served(off, engine, tmp_path) as (base, read):
        assert next_text(base, drafts=False)
        log = read()
    assert not log.speculative
    drafts = (log.draft_model_bytes, log.draft_kv_bytes, log.draft_compute_bytes, log.draft_output_bytes)
    assert drafts == ({}, {}, {}, {})
    assert_buffers(off, log, "off")


def next_text(base: str, *, drafts: bool) -> str:
    """An answer, from a server that does or does not draft."""
    body = {"prompt": PROMPT, "n_predict": 8, "temperature": 0, "seed": 1}
    reply = httpx.post(f"{base}/completion", json=body, timeout=60, trust_env=False).json()
    assert ("draft_n" in reply["timings"]) is drafts
    return str(reply["content"])
