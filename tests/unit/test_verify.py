"""The audit: what the load log says beside the plan, and what counts as another placement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.facts.load_log import LoadLog
from launcher.measure.verify import audit
from launcher.structs import Plan, Source
from launcher.units import GIB, MIB
from tests.serve_builders import card, device_plan, plan, settings

TERMS = {"dense": 1000 * MIB, "experts": 3264 * MIB, "output": 100 * MIB, "kv": 200 * MIB, "compute": 300 * MIB}


def planned(**changes: Any) -> Plan:
    return plan(device_plan(card("CUDA0"), TERMS), device_plan(card("CUDA1"), TERMS), **changes)


def loaded(**changes: Any) -> LoadLog:
    found = LoadLog(
        model_bytes={"CUDA0": 4364 * MIB, "CUDA1": 4364 * MIB, "CUDA_Host": 6 * GIB, "CPU_REPACK": 4 * GIB},
        kv_bytes={"CUDA0": 200 * MIB, "CUDA1": 200 * MIB},
        compute_bytes={"CUDA0": 290 * MIB, "CUDA1": 290 * MIB, "CUDA_Host": 20 * MIB},
        loaded=True,
    )
    return replace(found, **changes)


def test_as_planned() -> None:
    found = audit(planned(), loaded())
    assert (found.ok, found.worst) == (True, "")
    rows = {(r.device, r.kind): (r.planned_bytes, r.real_bytes) for r in found.rows}
    assert rows["CUDA0", "model"] == (4364 * MIB, 4364 * MIB)
    assert rows["host", "model"] == (10 * GIB, 10 * GIB)


@pytest.mark.parametrize(
    ("changes", "worst"),
    [
        # One bundle that the rules did not catch lies where the layer lies, not in host memory.
        ({"model_bytes": {"CUDA0": 7628 * MIB, "CUDA1": 4364 * MIB, "CPU": 10 * GIB - 3264 * MIB}}, "CUDA0 model"),
        ({"model_bytes": {"CUDA0": 4364 * MIB, "CPU": 10 * GIB + 4364 * MIB}}, "CUDA1 model"),
        ({"kv_bytes": {"CUDA0": 400 * MIB}}, "CUDA0 kv"),
        ({"compute_bytes": {"CUDA0": 310 * MIB, "CUDA1": 290 * MIB}}, "CUDA0 compute"),
        ({"draft_model_bytes": {"CUDA1": 500 * MIB}}, "CUDA1 drafter"),
    ],
)
def test_another_placement_is_named(changes: dict[str, Any], worst: str) -> None:
    found = audit(planned(), loaded(**changes))
    assert not found.ok
    assert found.worst.startswith(worst)


def test_a_bound_may_be_missed_from_above_and_a_measurement_may_not() -> None:
    less = loaded(compute_bytes={"CUDA0": 100 * MIB, "CUDA1": 100 * MIB})
    assert audit(planned(), less).ok
    measured = planned()
    devices = tuple(replace(d, source=dict(d.source) | {"compute": Source.DRY_RUN}) for d in measured.devices)
    assert not audit(replace(measured, devices=devices), less).ok


@pytest.mark.parametrize("mode", ["none", "mmap"])
def test_a_device_that_the_plan_does_not_name_is_wrong_in_every_load_mode(mode: str) -> None:
    """With mmap nothing else shows it: the host row is not compared there."""
    p = planned(settings=settings(load_mode=mode))
    host = {"CPU_Mapped": 40 * GIB} if mode == "mmap" else {"CPU": 10 * GIB}
    as_planned = loaded(model_bytes={"CUDA0": 4364 * MIB, "CUDA1": 4364 * MIB, **host})
    assert audit(p, as_planned).ok
    third = replace(as_planned, model_bytes={**as_planned.model_bytes, "CUDA2": 50 * MIB})
    assert audit(p, third).worst == "CUDA2 model: planned 0 MiB, real 50 MiB"
    cache = replace(as_planned, kv_bytes={**as_planned.kv_bytes, "Vulkan0": 50 * MIB})
    assert audit(p, cache).worst == "Vulkan0 kv: planned 0 MiB, real 50 MiB"
