"""The pipeline of `plan` without a command line: pinning, the engine's names, ways out, what is credited."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.errors import DoesNotFit, UsageError
from launcher.serve import argv
from launcher.structs import Engine, MeasuredCompute, Plan, Settings, Source
from launcher.units import GIB, MIB
from launcher.workflows import overrides, target, ways_out
from launcher.workflows import plan as workflow
from launcher.workflows.plan import Inputs
from tests import builders, models


def inputs(*, ram_gib: float = 190, drafted: bool = True, **changes: object) -> Inputs:
    """The quality tier on two cards with 24,125 MiB free."""
    draft = models.replica_header("deepseek-v4-flash-dspark-Q8_0") if drafted else None
    settings = replace(models.deepseek(), **changes) if changes else models.deepseek()  # type: ignore[arg-type]
    if not drafted:
        settings = replace(settings, drafter_type=None, draft_n_max=0)
    return Inputs(
        target=target.Target(name="/m.gguf", slug=None, path=Path("/m.gguf")),
        header=models.replica_header("deepseek-v4-flash-UD-Q8_K_XL"),
        drafter=draft,
        inventory=models.rig(models.card(0, 24125), models.card(1, 24125), ram_gib=ram_gib),
        settings=settings,
        given={},
    )


def measured_of(plan: Plan, extra: int = 0) -> MeasuredCompute:
    """What a dry run of this plan would say if the formulas were exact, in the engine's names."""
    return MeasuredCompute(
        compute_bytes={d.device.name: d.terms["compute"] + extra for d in plan.devices},
        host_compute_bytes=plan.host.terms["compute"],
        model_bytes={},
        context_bytes={},
    )


def test_a_pinned_plan_is_the_same_placement() -> None:
    made = inputs()
    plan = made.plan()
    again = workflow.pinned(made, plan).plan()
    assert workflow.same_placement(plan, again)


def test_a_pinned_plan_keeps_its_placement_when_the_measure_says_it_does_not_fit() -> None:
    made = inputs()
    plan = made.plan()
    again = workflow.pinned(made, plan).plan(measured=measured_of(plan, 8 * GIB))
    assert workflow.same_placement(plan, again)
    assert not again.fits


def test_pinning_survives_a_device_that_was_left_out() -> None:
    made = inputs(drafted=False)
    lean = replace(
        made.inventory, devices=(replace(made.inventory.devices[0], free_bytes=600 * MIB), made.inventory.devices[1])
    )
    made = replace(made, inventory=lean)
    plan = made.plan()
    assert [d.rig_name for d in plan.devices] == ["CUDA1"]
    again = workflow.pinned(made, plan).plan()
    assert [d.rig_name for d in again.devices] == ["CUDA1"]
    assert workflow.same_placement(plan, again)


def test_measures_are_taken_home_under_the_names_of_the_rig() -> None:
    plan = inputs().plan()
    one = replace(plan.devices[1], rig_name="CUDA1", device=replace(plan.devices[1].device, name="CUDA0"))
    seen = MeasuredCompute(
        compute_bytes={"CUDA0": 5}, host_compute_bytes=1, model_bytes={"CUDA0": 6}, context_bytes={"CUDA0": 7},
        draft_bytes={"CUDA0": 8},
    )  # fmt: skip
    home = workflow._in_rig_names(seen, replace(plan, devices=(one,)))
    assert home.compute_bytes == {"CUDA1": 5}
    assert home.draft_bytes == {"CUDA1": 8}


class Asked:
    """Inputs with a script for an engine, which counts its calls and answers the same to each."""

    def __init__(self, folder: Path, *, without: tuple[str, ...] = (), answers: bool = True) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        self.answer(answers)
        tables = (argv.SPELLINGS, argv.SWITCHES)
        flags = frozenset(word for table in tables for words in table.values() for word in words)
        self.engine = Engine(
            path=str(folder / "llama-server"), version="test", digest="d1", found_by="--engine",
            flags=flags - set(without),
        )  # fmt: skip

    def answer(self, answers: bool) -> None:
        row = {"self": 0, "model": 1, "context": 1}
        rows = [{"kind": "device", "name": f"CUDA{i}", "compute": 700 + i, **row} for i in (0, 1)]
        rows.append({"kind": "host", "name": "Host", "compute": 300, **row})
        event = json.dumps({"type": "fit_memory_breakdown", "data": {"rows": rows}})
        end = f"print({event!r}, flush=True)\ntime.sleep(60)" if answers else "sys.exit(1)"
        self.script("llama-server", f"open({str(self.calls)!r}, 'a').write('.')\n{end}")

    def script(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f"#!{sys.executable}\nimport sys, time\n{body}\n")
        path.chmod(0o755)

    def inputs(self, *, no_dry_run: str = "", free_mib: int = 24125) -> Inputs:
        made = inputs(drafted=False)
        cards = tuple(replace(d, free_bytes=free_mib * MIB) for d in made.inventory.devices)
        inventory = replace(made.inventory, engine=self.engine, devices=cards)
        return replace(made, inventory=inventory, no_dry_run=no_dry_run)

    @property
    def count(self) -> int:
        return len(self.calls.read_text()) if self.calls.exists() else 0


def test_an_engine_is_asked_once_for_one_command_line(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    first = workflow.make(asked.inputs()).plan
    calls = asked.count
    assert 1 <= calls <= 2
    assert [d.terms["compute"] // MIB for d in first.devices] == [700, 701]
    again = workflow.make(asked.inputs()).plan
    assert (asked.count, again) == (calls, first)
    assert {d.source["compute"] for d in again.devices} == {Source.DRY_RUN}


def test_beside_a_server_without_room_what_was_kept_comes_before_the_formula(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    tight = "too little is free on CUDA0 beside what runs there"
    formula = workflow.make(asked.inputs(no_dry_run=tight)).plan
    assert asked.count == 0
    assert {d.source["compute"] for d in formula.devices} == {Source.FORMULA}
    assert f"no dry run ({tight}): compute buffers are upper bounds" in formula.warnings
    free = workflow.make(asked.inputs()).plan
    calls = asked.count
    kept = workflow.make(asked.inputs(no_dry_run=tight)).plan
    assert (asked.count, kept) == (calls, free)
    assert not any("dry run" in w for w in kept.warnings)


def test_another_engine_is_asked_itself(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    workflow.make(asked.inputs())
    calls = asked.count
    asked.engine = replace(asked.engine, digest="d2")
    workflow.make(asked.inputs())
    assert asked.count == 2 * calls


def test_a_dry_run_that_failed_is_tried_again(tmp_path: Path) -> None:
    asked = Asked(tmp_path, answers=False)
    failed = workflow.make(asked.inputs()).plan
    assert any(w.startswith("no dry run (") for w in failed.warnings)
    asked.answer(True)
    assert {d.source["compute"] for d in workflow.make(asked.inputs()).plan.devices} == {Source.DRY_RUN}


def test_an_engine_that_cannot_measure_has_the_lower_of_two_bounds(tmp_path: Path) -> None:
    asked = Asked(tmp_path, without=("--fit", "-fit", "--log-jsonl"))
    alone = workflow.make(asked.inputs()).plan
    assert any("this llama-server has no --fit, and no llama-fit-params beside it" in w for w in alone.warnings)
    asked.script("llama-fit-params", "print('CUDA0 1 1 900 \\nCUDA1 1 1 999999 \\nHost 1 1 10 ')")
    bounded = workflow.make(asked.inputs()).plan
    assert asked.count == 0
    assert [d.terms["compute"] for d in bounded.devices] == [900 * MIB, alone.devices[1].terms["compute"]]
    assert {d.source["compute"] for d in (*bounded.devices, bounded.host)} == {Source.FORMULA}
    note = "no dry run (this llama-server has no --fit but llama-fit-params): compute buffers are upper bounds"
    assert note in bounded.warnings
    assert not (tmp_path / "home" / "cache" / "dry-runs").exists()
    two = replace(asked.inputs(), settings=replace(asked.inputs().settings, n_parallel=2))
    assert any("knows one stream" in w for w in workflow.make(two).plan.warnings)


def test_ways_out_are_planned_and_the_first_one_that_fits_is_the_fix() -> None:
    made = inputs(ram_gib=121.4)
    planned = workflow.launched(made, made.plan())
    plan = ways_out.added(planned).plan
    assert plan.refusal is not None
    ways = plan.refusal.ways_out
    assert ways[0].change == "--drafter off"
    assert ways[0].fits
    assert ways[0].resident_layers > len(plan.resident_layers)
    assert 1 < len(ways) <= 4
    assert ways[-1].change.endswith("GiB more RAM: fits as is")
    with pytest.raises(DoesNotFit) as caught:
        workflow.refuse(plan)
    assert caught.value.fix.startswith("launcher plan /m.gguf --drafter off     # ")
    assert caught.value.reference == "host-ram-short"
    assert workflow.way_out(plan, "switch --force").startswith("switch --force /m.gguf --drafter off     # ")


def test_a_way_out_is_worth_what_it_costs() -> None:
    """Each spares a hundredth of the memory, holds one more layer's experts, or fits where those before do not."""
    for ram in (30, 60, 100, 115, 118, 121, 130):
        made = inputs(ram_gib=ram)
        refusal = ways_out.added(workflow.launched(made, made.plan())).plan.refusal
        assert refusal is not None
        ways = refusal.ways_out[:-1]  # the last one is memory to buy
        for i, way in enumerate(ways):
            for before in ways[:i]:
                spared = before.host_required_bytes - way.host_required_bytes
                worth = not before.fits and spared * 100 >= before.host_required_bytes
                assert way.fits > before.fits or way.resident_layers > before.resident_layers or worth, (ram, way)


def test_a_way_out_repeats_what_was_given_and_replaces_what_it_changes() -> None:
    given = {"ctx": "2M", "ubatch": 4096, "unified": False, "devices": "-CUDA7", "reserve": ["CUDA0=1GiB"], "port": 1}
    made = replace(inputs(ram_gib=121.4, drafted=False, n_ctx_per_stream=2 << 20), given=given)
    refusal = ways_out.added(workflow.launched(made, made.plan())).plan.refusal
    assert refusal is not None
    changes = [w.change for w in refusal.ways_out if w.change.startswith("-")]
    assert "--ctx 128k --ubatch 4096 --no-unified --devices=-CUDA7 --reserve CUDA0=1GiB --port 1" in changes
    assert all(c.count("--ctx") == 1 and (" -ub" in f" {c}") != ("--ubatch" in c) for c in changes)


def test_cache_types_that_the_engine_refuses_after_loading_are_refused_before() -> None:
    flash, plain = models.replica_header("deepseek-v4-flash-UD-Q8_K_XL"), models.moe_header([8])
    base = Settings()
    for settings, header in (
        (replace(base, type_k="q8_0", type_v="f16"), flash),
        (replace(base, type_v="q8_0", flash_attn="off"), plain),
    ):
        with pytest.raises(UsageError) as caught:
            overrides.check_cache(settings, header)
        assert caught.value.reference == "override-invalid"
    for settings, header in (
        (replace(base, type_k="q8_0", type_v="q8_0"), flash),
        (replace(base, type_k="q8_0", type_v="f16"), plain),
        (replace(base, type_k="q8_0", flash_attn="off"), plain),
        (replace(base, type_v="q8_0", flash_attn="auto"), plain),
    ):
        overrides.check_cache(settings, header)


def test_a_way_out_does_what_it_says() -> None:
    made = inputs(ram_gib=121.4)
    plan = ways_out.added(workflow.launched(made, made.plan())).plan
    assert plan.refusal is not None
    without = replace(made, drafter=None, settings=overrides.with_drafter(made.settings, None, 0, {})).plan()
    first = plan.refusal.ways_out[0]
    assert (first.host_required_bytes, first.resident_layers) == (
        without.host.required_bytes,
        len(without.resident_layers),
    )


def test_memory_that_is_bought_is_no_command() -> None:
    made = inputs(ram_gib=30)
    plan = ways_out.added(workflow.launched(made, made.plan())).plan
    with pytest.raises(DoesNotFit) as caught:
        workflow.refuse(plan)
    assert not caught.value.fix.startswith("launcher plan /m.gguf 1")
    assert "GiB more RAM" in caught.value.fix


def test_a_plan_that_fits_has_no_ways_out_and_no_refusal() -> None:
    made = inputs()
    planned = workflow.launched(made, made.plan())
    assert ways_out.added(planned) is planned
    workflow.refuse(planned.plan)


def test_kind_of_a_draft_model_nobody_described() -> None:
    spark = models.replica_header("deepseek-v4-flash-dspark-Q8_0")
    assert target.drafter_type(spark) == "draft-dspark"
    assert target.drafter_type(replace(spark, tensors=())) == "draft-dflash"
    nextn = builders.header(arch="glm4moe", metadata={"glm4moe.nextn_predict_layers": 1})
    assert target.drafter_type(nextn) == "draft-mtp"
    assert target.drafter_type(builders.header(arch="llama")) == "draft-simple"


def test_settings_of_a_bare_file_are_the_defaults() -> None:
    assert overrides.settings(None, {}) == Settings()


def test_devices_in_the_order_asked_for() -> None:
    devices = tuple(replace(models.card(i, 20000), uuid=f"GPU-{i}{i}{i}{i}aa") for i in range(3))
    names = lambda wanted: [d.name for d in overrides.choose_devices(devices, wanted)]  # noqa: E731
    assert names(None) == ["CUDA0", "CUDA1", "CUDA2"]
    assert names("2,0") == ["CUDA2", "CUDA0"]
    assert names("cuda1") == ["CUDA1"]
    assert names("GPU-2222") == ["CUDA2"]
    assert names("-CUDA1") == ["CUDA0", "CUDA2"]
    assert names(("CUDA1",)) == ["CUDA1"]
    assert names("none") == []
