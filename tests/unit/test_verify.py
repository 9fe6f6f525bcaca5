"""The audit: what the load log says beside the plan, and what counts as another placement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.facts.load_log import LoadLog
from launcher.facts.nvml import nvml_cards
from launcher.measure.verify import Held, audit, buffers_bytes, disagreement, held
from launcher.planner import make_plan
from launcher.structs import Audit, Device, MeasuredCompute, Plan, Settings, Source
from launcher.units import GIB, MIB
from tests import models
from tests.serve_builders import card, device_plan, plan, rpc_device, settings
from tests.unit.test_devices import Nvml, h200

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


# ------------------------------------------------------------------------------- the driver's side of it
# One H200, gpt-oss-20b, 32K, micro-batch 2048: 6,461 MiB planned with an estimate of 620 for the context, buffers
# exact, 6,550 MiB by the driver once the server was ready.

H200_TERMS = {"dense": 4900 * MIB, "kv": 441 * MIB, "compute": 500 * MIB, "context": 620 * MIB, "margin": 1438 * MIB}
H200_LOG = LoadLog(
    model_bytes={"CUDA0": 4900 * MIB, "CPU": 10 * GIB},
    kv_bytes={"CUDA0": 441 * MIB},
    compute_bytes={"CUDA0": 500 * MIB, "CUDA_Host": 30 * MIB},
    output_bytes={"CUDA_Host": MIB},
    loaded=True,
)
FREE_BEFORE = 141605 * MIB
PID = 9000


def h200_device(**changes: Any) -> Device:
    return card(description="NVIDIA H200", uuid=h200()["uuid"], total_bytes=h200()["total"], **changes)


def h200_plan(**terms: int) -> Plan:
    return plan(device_plan(h200_device(free_bytes=FREE_BEFORE), {**H200_TERMS, **terms}))


def after_boot(used: int | None, *, pid: int = PID, free: int = FREE_BEFORE - 6550 * MIB) -> Nvml:
    """What NVML gives once the server is ready, another program on the card beside it."""
    ours = {"pid": pid, "used": used, "name": "/opt/llama-server"}
    return Nvml(h200(free=free, processes=[*h200()["processes"], ours]))


def seen(nvml: Nvml, p: Plan) -> dict[str, Held]:
    devices = [d.device for d in p.devices]
    return held(devices, nvml_cards(nvml), {h200()["uuid"]: FREE_BEFORE}, frozenset({PID}))


def context(found: Audit) -> tuple[int, int, bool]:
    (row,) = [r for r in found.rows if r.kind == "context"]
    return row.planned_bytes, row.real_bytes, row.shown


def test_the_context_is_what_the_process_holds_beyond_its_buffers() -> None:
    p = h200_plan()
    found = audit(p, H200_LOG, seen(after_boot(6550 * MIB), p))
    assert context(found) == (620 * MIB, 709 * MIB, True)
    (one,) = found.cards
    assert (one.planned_bytes, one.used_bytes, one.buffers_bytes) == (6461 * MIB, 6550 * MIB, 5841 * MIB)
    assert one.by == "process"
    # An estimate that was not met says nothing against the placement.
    assert (found.ok, found.worst, found.failed) == (True, "", ())
    assert [r.kind for r in found.rows if r.shown] == ["context"]


@pytest.mark.parametrize(
    ("lost", "counted"),
    [(6500, 6550), (6550, 6550), (6616, 6616), (6678, 6678), (9000, 6550)],
    ids=["less than the process", "the same", "kept by the driver", "twice that", "somebody else's too"],
)
def test_what_the_card_lost_beyond_the_process_counts_as_far_as_the_driver_may_keep_it(lost: int, counted: int) -> None:
    """Two H200 lost 23,618 MiB to a process of 23,552: planned with the latter, the margin was never there."""
    p = h200_plan()
    found = audit(p, H200_LOG, seen(after_boot(6550 * MIB, free=FREE_BEFORE - lost * MIB), p))
    assert (found.cards[0].used_bytes, found.cards[0].by) == (counted * MIB, "process")
    assert context(found)[1] == (counted - 5841) * MIB


@pytest.mark.parametrize(("used", "pid"), [(None, PID), (6550 * MIB, 77)], ids=["memory untold", "pid of a namespace"])
def test_where_the_driver_does_not_tell_the_card_before_and_after_does(used: int | None, pid: int) -> None:
    p = h200_plan()
    found = audit(p, H200_LOG, seen(after_boot(used, pid=pid, free=FREE_BEFORE - 6600 * MIB), p))
    assert found.cards[0].by == "card"
    assert context(found) == (620 * MIB, 759 * MIB, True)


def test_nothing_known_before_and_no_process_is_unknown_not_zero() -> None:
    p = h200_plan()
    looked = held([p.devices[0].device], nvml_cards(after_boot(None)), {}, frozenset({PID}))
    found = audit(p, H200_LOG, looked)
    assert (found.cards[0].used_bytes, found.cards[0].context_bytes, found.cards[0].by) == (None, None, "")
    assert not [r for r in found.rows if r.kind == "context"]
    assert found.ok


def test_two_devices_of_one_card_are_nobodys() -> None:
    shared = [h200_device(), replace(h200_device(), name="CUDA1", buffer_type="CUDA1")]
    looked = held(shared, nvml_cards(after_boot(6550 * MIB)), {}, frozenset({PID}))
    assert {name: one.used_bytes for name, one in looked.items()} == {"CUDA0": None, "CUDA1": None}


def test_less_than_the_buffers_gives_no_context() -> None:
    p = h200_plan()
    found = audit(p, H200_LOG, seen(after_boot(5000 * MIB), p))
    assert (found.cards[0].used_bytes, found.cards[0].context_bytes) == (5000 * MIB, None)


def test_a_projector_is_no_context() -> None:
    p = h200_plan(projector=800 * MIB)
    found = audit(p, H200_LOG, seen(after_boot(7350 * MIB), p))
    assert context(found)[1] == 709 * MIB


@pytest.mark.parametrize(("free_mib", "ok"), [(1438, True), (1437, False)])
def test_less_free_than_the_margin_is_a_failed_invariant(free_mib: int, ok: bool) -> None:
    p = h200_plan()
    found = audit(p, H200_LOG, seen(after_boot(6550 * MIB, free=free_mib * MIB), p))
    assert (found.ok, found.worst) == (ok, "")
    want = "CUDA0 has 1,437 MiB free after boot, less than the margin of 1,438 MiB: a deep prompt may end the server ("
    assert [text[: len(want)] for text in found.failed] == ([] if ok else [want])


@pytest.mark.parametrize(
    ("planned_mib", "real_mib", "shown"),
    [
        (1000, 1030, False), (1000, 1031, True), (1000, 969, True), (20000, 20256, False), (20000, 20257, True),
        (10, 11, False), (0, 2, True),
    ],
)  # fmt: skip
def test_three_percent_or_256_mib_are_shown(planned_mib: int, real_mib: int, shown: bool) -> None:
    p = h200_plan(kv=planned_mib * MIB)
    found = audit(p, replace(H200_LOG, kv_bytes={"CUDA0": real_mib * MIB}))
    assert [r.shown for r in found.rows if r.kind == "kv"] == [shown]


def test_an_rpc_device_is_compared_by_its_buffers_alone() -> None:
    p = plan(device_plan(rpc_device(0, 50052), TERMS))
    looked = held([d.device for d in p.devices], nvml_cards(after_boot(6550 * MIB)), {}, frozenset({PID}))
    assert looked == {}
    name = p.devices[0].device.buffer_type
    found = audit(p, loaded(model_bytes={name: 4364 * MIB, "CPU": 10 * GIB}, kv_bytes={name: 200 * MIB}), looked)
    assert found.cards == ()
    assert found.ok


def test_every_table_of_the_log_is_summed() -> None:
    log = LoadLog(
        model_bytes={"A": 1}, kv_bytes={"A": 2}, compute_bytes={"A": 4}, output_bytes={"A": 8},
        draft_model_bytes={"A": 16}, draft_kv_bytes={"A": 32}, draft_compute_bytes={"A": 64},
        draft_output_bytes={"A": 128, "B": 256},
    )  # fmt: skip
    assert buffers_bytes(log, "A") == 255


def test_a_dry_run_that_reads_the_model_otherwise_is_told() -> None:
    plan = make_plan(
        target="t",
        header=models.moe_header([300] * 12),
        drafter=None,
        inventory=models.rig(models.card(0, 2700), models.card(1, 2700)),
        settings=Settings(n_ctx_per_stream=32768),
    )
    weights = {d.device.name: d.terms["dense"] + d.terms["experts"] + d.terms["output"] for d in plan.devices}
    caches = {d.device.name: d.terms["kv"] for d in plan.devices}
    same = MeasuredCompute(compute_bytes={}, host_compute_bytes=0, model_bytes=weights, context_bytes=caches)
    assert disagreement(plan, same) == ""
    rounded = {name: n // MIB * MIB for name, n in weights.items()}  # the engine truncates to whole MiB
    assert disagreement(plan, replace(same, model_bytes=rounded)) == ""
    twice = replace(same, context_bytes={**caches, "CUDA1": 2 * caches["CUDA1"]})
    assert disagreement(plan, twice).startswith("CUDA1 cache: planned ")
