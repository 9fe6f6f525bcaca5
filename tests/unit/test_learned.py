"""What was seen after launches is kept, believed only where it can be true, and never breaks a plan."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from launcher.errors import Refused
from launcher.facts import nvml as nvml_facts
from launcher.measure import learned
from launcher.measure.learned import Card, Learned
from launcher.measure.verify import audit
from launcher.planner import budget
from launcher.structs import Audit, AuditCard, Plan, Source
from launcher.units import GIB, MIB
from launcher.workflows import world
from tests.serve_builders import card, device_plan, engine, plan, rpc_device
from tests.unit.test_devices import Nvml, h200
from tests.unit.test_verify import H200_LOG, after_boot, h200_device, h200_plan, seen

ENGINE = engine().digest
DRIVER = "570.133.20"
H200 = Card(ENGINE, "NVIDIA H200", 143771, DRIVER)


def launch(used_mib: int = 6550, **changes: Any) -> tuple[Plan, Audit]:
    """A plan and the audit of its launch on the H200."""
    p = h200_plan()
    return p, audit(p, replace(H200_LOG, **changes), seen(after_boot(used_mib * MIB), p))


def test_the_next_plan_has_the_context_of_the_last_launch() -> None:
    fresh = h200_device()
    assert budget.context_bytes(fresh) == (620 * MIB, Source.FORMULA)
    assert fresh.total_bytes is not None and fresh.total_bytes // MIB == H200.total_mib
    learned.learn(*launch(), ENGINE, DRIVER)
    (device,) = learned.applied((fresh,), learned.read(), ENGINE, DRIVER)
    assert budget.context_bytes(device) == (709 * MIB, Source.MEASURED)
    assert device == replace(fresh, context_bytes=709 * MIB)


@pytest.mark.parametrize(
    ("device", "digest", "driver"),
    [
        (h200_device(), "1" * 64, DRIVER),
        (h200_device(), ENGINE, "575.1"),
        (h200_device(), ENGINE, ""),
        (replace(h200_device(), description="NVIDIA H200 NVL"), ENGINE, DRIVER),
        (replace(h200_device(), total_bytes=71 * GIB), ENGINE, DRIVER),
        (replace(h200_device(), total_bytes=None), ENGINE, DRIVER),
        (replace(h200_device(), backend="vulkan"), ENGINE, DRIVER),
        (replace(h200_device(), context_bytes=250 * MIB), ENGINE, DRIVER),
        (rpc_device(0, 50052), ENGINE, DRIVER),
    ],
    ids=["engine", "driver", "no driver", "card", "slice", "size unknown", "backend", "has one", "rpc"],
)  # fmt: skip
def test_another_engine_card_or_driver_has_learned_nothing(device: Any, digest: str, driver: str) -> None:
    known = Learned(contexts={H200: (709 * MIB,)})
    assert learned.applied((device,), known, digest, driver) == (device,)


def test_the_largest_of_the_last_five_counts() -> None:
    for used in (6641, 6550, 6552, 6551, 6553, 6550):
        learned.learn(*launch(used), ENGINE, DRIVER)
    known = learned.read()
    assert known.contexts == {H200: tuple(n * MIB for n in (709, 711, 710, 712, 709))}
    assert learned.applied((h200_device(),), known, ENGINE, DRIVER)[0].context_bytes == 712 * MIB


def test_no_more_than_five_are_kept() -> None:
    known = Learned(contexts={H200: (700 * MIB,) * 5})
    assert learned.with_contexts(known, *launch(), ENGINE, DRIVER).contexts[H200] == (*(700 * MIB,) * 4, 709 * MIB)


def audit_card(name: str, context: int | None, by: str = "process") -> AuditCard:
    return AuditCard(
        device=name, planned_bytes=0, used_bytes=None, buffers_bytes=0, context_bytes=context, free_bytes=None,
        margin_bytes=0, by=by,
    )  # fmt: skip


def test_two_cards_of_a_kind_give_one_figure() -> None:
    """615 and 250 MiB were held on two RTX 3090 of one server: a plan cannot know which will be which."""
    p = plan(card("CUDA0"), card("CUDA1"))
    found = Audit(rows=(), ok=True, worst="", cards=(audit_card("CUDA0", 615 * MIB), audit_card("CUDA1", 250 * MIB)))
    known = learned.with_contexts(Learned(), p, found, ENGINE, DRIVER)
    assert known.contexts == {Card(ENGINE, "NVIDIA GeForce RTX 3090", 24576, DRIVER): (615 * MIB,)}


@pytest.mark.parametrize("size", [None, 0, 3 * MIB, 5 * GIB])
def test_what_no_context_is_is_not_learned(size: int | None) -> None:
    found = Audit(rows=(), ok=True, worst="", cards=(audit_card("CUDA0", size),))
    assert learned.with_contexts(Learned(), plan(card()), found, ENGINE, DRIVER) == Learned()


def test_a_card_delta_is_learned_only_when_nothing_was_coming_back() -> None:
    found = Audit(rows=(), ok=True, worst="", cards=(audit_card("CUDA0", 700 * MIB, by="card"),))
    p = plan(card())
    assert learned.with_contexts(Learned(), p, found, ENGINE, DRIVER, card_deltas=False) == Learned()
    assert learned.with_contexts(Learned(), p, found, ENGINE, DRIVER).contexts


def test_beside_a_projector_nothing_is_learned() -> None:
    p = plan(device_plan(card(), {"projector": 800 * MIB}))
    found = Audit(rows=(), ok=True, worst="", cards=(audit_card("CUDA0", 700 * MIB),))
    assert learned.with_contexts(Learned(), p, found, ENGINE, DRIVER) == Learned()


def test_compute_is_kept_where_the_formula_gave_another_number() -> None:
    p, found = launch(compute_bytes={"CUDA0": 431 * MIB})
    learned.learn(p, found, ENGINE, "")
    known = learned.read()
    assert known.contexts == {}
    assert learned.compute_bytes(known, p, ENGINE) == {"CUDA0": 431 * MIB}
    elsewhere = replace(p, tensor_split=(4,))
    assert learned.compute_bytes(known, elsewhere, ENGINE) is None
    assert learned.compute_bytes(known, replace(p, settings=replace(p.settings, n_ubatch=1024)), ENGINE) is None
    assert learned.compute_bytes(known, p, "1" * 64) is None


def test_compute_as_planned_or_as_measured_is_not_kept() -> None:
    learned.learn(*launch(), ENGINE, "")
    assert not learned.path().exists()
    p = h200_plan()
    dry = replace(p, devices=(replace(p.devices[0], source={**p.devices[0].source, "compute": Source.DRY_RUN}),))
    found = audit(dry, replace(H200_LOG, compute_bytes={"CUDA0": 431 * MIB}))
    assert learned.with_compute(Learned(), dry, found, ENGINE) == Learned()


# ------------------------------------------------------------------------------------------ the file


def test_what_was_written_is_read_again() -> None:
    learned.learn(*launch(compute_bytes={"CUDA0": 431 * MIB}), ENGINE, DRIVER)
    known = learned.read()
    assert len(known.contexts) == len(known.compute) == 1
    assert learned.from_document(json.loads(json.dumps(learned.to_document(known)))) == known


ENTRY = {"engine": ENGINE, "card": "NVIDIA H200", "total_mib": 143771, "driver": DRIVER, "bytes": [709 * MIB]}


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"\xff\xfe", b"null", b"[1]", b"{}", b'"x"', b"[" * 100_000, b" " * (5 * MIB),
        json.dumps({"schema_version": 2, "contexts": [ENTRY]}).encode(),
        json.dumps({"schema_version": 1, "contexts": {"a": 1}, "compute": 7}).encode(),
        json.dumps({"schema_version": 1, "contexts": [1, None, [], {}], "compute": [{}, 3]}).encode(),
    ],
)  # fmt: skip
def test_a_damaged_file_is_nothing(data: bytes) -> None:
    learned.path().parent.mkdir(parents=True)
    learned.path().write_bytes(data)
    assert learned.read() == Learned()
    learned.learn(*launch(), ENGINE, DRIVER)
    assert learned.read().contexts == {H200: (709 * MIB,)}


def test_a_file_of_any_size_is_not_read() -> None:
    learned.path().parent.mkdir(parents=True)
    document = {"schema_version": 1, "contexts": [ENTRY], "padding": "x" * 5 * MIB}
    learned.path().write_text(json.dumps(document))
    assert learned.read() == Learned()


@pytest.mark.parametrize(
    "change",
    [
        {"bytes": [10**18]}, {"bytes": [-1]}, {"bytes": ["709"]}, {"bytes": [True]}, {"bytes": [7e8]}, {"bytes": []},
        {"bytes": 709}, {"engine": 3}, {"card": None}, {"total_mib": "143771"}, {"total_mib": -1}, {"driver": ""},
    ],
)  # fmt: skip
def test_a_foreign_entry_is_passed_over_and_the_others_stay(change: dict[str, Any]) -> None:
    document = {"schema_version": 1, "contexts": [{**ENTRY, **change}, {**ENTRY, "driver": "1"}]}
    assert learned.from_document(document).contexts == {replace(H200, driver="1"): (709 * MIB,)}


def test_a_folder_in_its_place_breaks_no_plan_and_a_launch_says_so() -> None:
    learned.path().mkdir(parents=True)
    assert learned.read() == Learned()
    with pytest.raises(Refused, match="cannot write") as caught:
        learned.learn(*launch(), ENGINE, DRIVER)
    assert caught.value.reference == "state-unwritable"


def test_it_does_not_grow_for_ever() -> None:
    known = Learned()
    for i in range(300):
        known = learned.with_contexts(known, *launch(), f"{i:064}", DRIVER)
    assert len(known.contexts) == 256
    assert tuple(known.contexts)[-1].engine == f"{299:064}"


# -------------------------------------------------------------------------------------- this machine


class Driver:
    """The two calls of pynvml that give a version."""

    NVMLError = pynvml.NVMLError

    def __init__(self, says: Callable[[], Any], init: Exception | None = None) -> None:
        self.nvmlSystemGetDriverVersion, self.init, self.shut = says, init, 0  # noqa: N815

    def nvmlInit(self) -> None:  # noqa: N802
        if self.init:
            raise self.init

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shut += 1


class Machine(Nvml):
    """The cards of one machine, and the version of its driver."""

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return DRIVER


def test_this_machines_devices_get_what_was_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is asked only when this engine has learned something."""
    nvml = Driver(lambda: DRIVER)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    devices = (h200_device(),)
    assert world._with_learned(devices, engine()) == devices
    assert world._with_learned(devices, None) == devices
    learned.learn(*launch(), ENGINE, DRIVER)
    assert world._with_learned(devices, replace(engine(), digest="1" * 64)) == devices
    assert nvml.shut == 0
    assert [d.context_bytes for d in world._with_learned(devices, engine())] == [709 * MIB]
    assert nvml.shut == 1


def test_a_plan_for_this_machine_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's list and the driver's cards are joined as for any plan, then what was learned is added."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", Machine(h200(processes=[])))
    server = tmp_path / "llama-server"
    server.write_text(
        "#!/bin/sh\necho 'Available devices:'\necho '  CUDA0: NVIDIA H200 (143155 MiB, 141605 MiB free)'\n"
    )
    server.chmod(0o755)
    mine = replace(engine(), path=str(server))
    (before,) = world.here(mine, None, {}).inventory.devices
    assert before.context_bytes is None
    share = device_plan(before, {})
    found = Audit(rows=(), ok=True, worst="", cards=(audit_card("CUDA0", 709 * MIB),))
    learned.learn(plan(share), found, mine.digest, DRIVER)
    assert world.here(mine, None, {}).inventory.devices == (replace(before, context_bytes=709 * MIB),)
    assert [d.context_bytes for d in world.here(None, None, {}).inventory.devices] == [None]


def test_a_rig_file_keeps_its_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver(lambda: DRIVER))
    rig = tmp_path / "rig.yaml"
    rig.write_text(
        "schema: 1\nhost: {total: 64GiB, available: 60GiB, cores: 8}\n"
        "devices:\n  - {name: CUDA0, description: NVIDIA H200, total: 143771MiB, free: 141605MiB}\n"
    )
    learned.learn(*launch(), ENGINE, DRIVER)
    found = world.from_rig(str(rig), engine(), None, {})
    assert [d.context_bytes for d in found.inventory.devices] == [None]


def test_the_version_of_the_driver() -> None:
    def denied() -> str:
        raise pynvml.NVMLError_NotSupported()

    for says in (lambda: DRIVER, lambda: DRIVER.encode()):
        nvml = Driver(says)
        assert (nvml_facts.driver_version(nvml), nvml.shut) == (DRIVER, 1)
    nvml = Driver(denied)
    assert (nvml_facts.driver_version(nvml), nvml.shut) == ("", 1)
    assert nvml_facts.driver_version(Driver(denied, init=pynvml.NVMLError_LibraryNotFound())) == ""
    assert nvml_facts.driver_version(SimpleNamespace(NVMLError=pynvml.NVMLError, nvmlInit=_no_library)) == ""


def _no_library() -> None:
    msg = "libnvidia-ml.so.1"
    raise OSError(msg)
