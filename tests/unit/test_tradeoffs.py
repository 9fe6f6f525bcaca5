"""What else could be chosen, and what one more bundle would need: planned on real models and rigs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from launcher.facts.rig import load_rig
from launcher.render import document, explain
from launcher.render import tradeoffs as screen
from launcher.structs import MeasuredCompute, Settings, Source
from launcher.units import MIB
from launcher.workflows import plan as pipeline
from launcher.workflows import target, tradeoffs
from launcher.workflows.plan import Inputs, Planned
from launcher.workflows.tradeoffs import Row
from tests import models
from tests.unit.test_render import SCHEMA

RIGS = Path(__file__).parent.parent / "golden" / "rigs"
QUALITY, SMALL = "deepseek-v4-flash-UD-Q8_K_XL", "deepseek-v4-flash-UD-IQ2_XXS"
BUNDLE = 3264 * MIB


def planned(rig: str = "2x3090", model: str = QUALITY, *, drafted: bool = True, **changes: object) -> Planned:
    """A replica on a golden rig, planned by formulas."""
    settings = models.deepseek(**changes)
    if not drafted:
        settings = replace(settings, drafter_type=None, draft_n_max=0)
    inputs = Inputs(
        target=target.Target(name="/m.gguf", slug=None, path=Path("/m.gguf")),
        header=models.replica_header(model),
        drafter=models.replica_header("deepseek-v4-flash-dspark-Q8_0") if drafted else None,
        inventory=load_rig(RIGS / f"{rig}.yaml"),
        settings=settings,
        given={},
    )
    return pipeline.launched(inputs, inputs.plan())


def by_change(rows: tuple[Row, ...]) -> dict[str, Row]:
    return {row.change: row for row in rows}


def shown(rows: tuple[Row, ...]) -> list[str]:
    return [str(line) for line in screen.table(rows)]


def said(of: Planned) -> list[str]:
    return list(explain.one_more(of.plan, tradeoffs.room(of)))


# ------------------------------------------------------------------------------------------ rows


def test_rows_are_the_plans_of_their_options_and_the_chosen_one_comes_first() -> None:
    made = planned()
    rows = tradeoffs.rows(made)
    assert rows[0] == Row(change="", plan=made.plan, chosen=True, worth=True)
    assert [row.change for row in rows[1:]] == [
        "-ub 2048", "-ub 1024", "-ub 512", "--ctx 100k", "--ctx 50k", "--kv q8_0", "--drafter off",
        "--drafter-experts host", "--drafter off -ub 2048", "--drafter off -ub 1024", "--drafter off -ub 512",
        "--drafter off --ctx 100k", "--drafter off --ctx 50k",
    ]  # fmt: skip
    assert len(rows) <= 14
    found = by_change(rows)
    assert found["-ub 2048"].plan == planned(n_ubatch=2048).plan
    assert found["--ctx 50k"].plan == planned(n_ctx_per_stream=51200).plan
    assert found["--kv q8_0"].plan == planned(type_k="q8_0", type_v="q8_0").plan
    hosted = found["--drafter-experts host"]
    assert hosted.plan == planned(drafter_experts="host").plan
    assert len(hosted.plan.resident_layers) > len(made.plan.resident_layers)
    assert found["--drafter off --ctx 100k"].plan == planned(drafted=False, n_ctx_per_stream=102400).plan


def test_a_smaller_micro_batch_pays_only_for_a_bundle_more_than_every_larger_one() -> None:
    for made in (planned(), planned(drafted=False), planned("24+12", SMALL)):
        before = made.plan
        found = by_change(tradeoffs.rows(made))
        for n in (2048, 1024, 512):
            row = found[f"-ub {n}"]
            more = len(row.plan.resident_layers) - len(before.resident_layers)
            assert row.worth is (more > 0), (n, more)
            before = row.plan if row.worth else before
    marks = {row.change: row.worth for row in tradeoffs.rows(planned())}
    assert (marks["-ub 2048"], marks["-ub 1024"], marks["-ub 512"]) == (True, False, True)


def test_a_pair_is_measured_by_its_own_larger_micro_batch() -> None:
    """Without the drafter 1024 holds four bundles more than what is chosen, and none more than 2048 does."""
    found = by_change(tradeoffs.rows(planned()))
    pair, larger = found["--drafter off -ub 1024"], found["--drafter off -ub 2048"]
    assert len(pair.plan.resident_layers) == len(larger.plan.resident_layers) > len(found[""].plan.resident_layers)
    assert (larger.worth, pair.worth) == (True, False)


def test_a_smaller_micro_batch_pays_when_it_removes_an_overflow() -> None:
    made = planned("1x3090", SMALL)
    found = by_change(tradeoffs.rows(made))
    assert any(d.short_bytes for d in made.plan.devices)
    assert not found["-ub 2048"].plan.resident_layers
    assert not any(d.short_bytes for d in found["-ub 2048"].plan.devices)
    assert found["-ub 2048"].worth
    assert "micro-batch 2048 would free 2,274 MiB on CUDA0 and remove an overflow" in said(made)[-1]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: planned(residency="none"), "the residency is set, so nothing fills what it frees"),
        (
            lambda: planned("2x3090", "qwen3-30b-a3b-Q4_K_M", drafted=False, n_ctx_per_stream=32768),
            "every bundle lies on a device already",
        ),
        (
            lambda: planned("2x3090", "qwen3-8b-Q4_K_M", drafted=False, n_ctx_per_stream=32768),
            "this model has no expert bundles to put in its place",
        ),
        (
            lambda: planned("1x3090", "gpt-oss-120b-MXFP4", drafted=False, n_ctx_per_stream=32768),
            "what it frees holds no bundle more",
        ),
    ],
    ids=["residency none", "all resident", "dense", "too little freed"],
)  # fmt: skip
def test_a_micro_batch_that_buys_nothing_is_a_pure_loss_and_said_so(made: object, why: str) -> None:
    rows = tradeoffs.rows(made())  # type: ignore[operator]
    alone = [row for row in rows if row.change in ("-ub 2048", "-ub 1024", "-ub 512")]
    assert [row.worth for row in alone] == [False] * 3
    assert all(row.worth for row in rows if row.plan.settings.n_ubatch == 4096)
    text = " ".join(" ".join(shown(rows)).split())
    assert text.endswith(f"a smaller micro-batch alone is a pure loss here: {why}, and prefill gets slower")
    assert text.count("FITS, not worth it") == sum(not row.worth for row in rows) >= 3


def test_only_what_the_engine_takes_and_what_changes_something_is_a_row() -> None:
    plain: dict[str, Any] = {"drafted": False, "n_ctx_per_stream": 4096, "n_ubatch": 1024}
    model = "qwen3-30b-a3b-Q4_K_M"
    slow = [row.change for row in tradeoffs.rows(planned(model=model, flash_attn="off", **plain))]
    assert not [c for c in slow if "q8_0" in c]  # a quantised V cache needs flash attention
    assert not [c for c in slow if "--ctx 1k" in c]
    assert [c for c in slow if c.startswith("-ub")] == ["-ub 512"]
    packed = [row.change for row in tradeoffs.rows(planned(model=model, type_k="q8_0", type_v="q8_0", **plain))]
    assert "--kv f16" in packed
    assert "--kv q8_0" not in packed
    assert not [c for c in packed if "drafter" in c]
    assert len(set(packed)) == len(packed) <= 14


def test_settings_that_the_planner_refuses_are_no_row() -> None:
    """A bundle of the MTP block that is to lie on a card is not even loaded without the drafter."""
    lean = planned(model="glm-4.5-air-Q4_K_M", drafted=False, n_ctx_per_stream=32768).inputs
    settings = replace(lean.settings, drafter_type="draft-mtp", draft_n_max=3, residency={"CUDA1": (46,)})
    inputs = replace(lean, settings=settings)
    made = pipeline.launched(inputs, inputs.plan())
    assert made.plan.resident_layers == (46,)
    changes = [row.change for row in tradeoffs.rows(made)]
    assert "--kv q8_0" in changes
    assert not [c for c in changes if "drafter" in c]


def test_the_rows_of_the_two_card_rig_take_less_than_two_seconds() -> None:
    made = planned()
    start = time.perf_counter()
    tradeoffs.rows(made)
    assert time.perf_counter() - start < 2


def test_the_table_keeps_to_100_columns_and_marks_the_chosen_row() -> None:
    for rig in ("2x3090", "2x3090-128g", "1x16-32g"):
        rows = tradeoffs.rows(planned(rig))
        lines = shown(rows)
        assert max(map(len, lines)) <= 100
        body = [line for line in lines if line.endswith(("FITS", "no", "not worth it")) and line[:2] in ("* ", "  ")]
        assert len(body) == len(rows)
        assert [line.startswith("* as chosen ") for line in body] == [True] + [False] * (len(rows) - 1)
        for line, row in zip(body, rows, strict=True):
            assert f"{row.plan.host.required_bytes / 1024**3:.1f}" in line
            assert f"{len(row.plan.resident_layers)} layer" in line
            assert ("FITS" in line) is row.plan.fits
            assert ("not worth it" in line) is not row.worth


def test_the_document_has_the_rows_when_they_were_asked_for() -> None:
    made = planned("2x3090-128g")
    rows = tradeoffs.rows(made)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    doc = document.plan_document(made.plan, None, rows)
    validator.validate(doc)
    assert [row["change"] for row in doc["tradeoffs"]] == [row.change for row in rows]
    first, second = doc["tradeoffs"][:2]
    assert (first["chosen"], second["chosen"]) == (True, False)
    assert first["host_required_bytes"] == doc["host"]["required_bytes"]
    assert first["least_headroom_bytes"] == min(d["headroom_bytes"] for d in doc["devices"])
    assert first["decode_tps"] == doc["speed"]["decode_tps"]
    assert second["n_ubatch"] == 2048
    assert "tradeoffs" not in document.plan_document(made.plan)
    assert not validator.is_valid({**doc, "tradeoffs": [{**first, "more": 1}]})
    nothing = planned("2x3090", "qwen3-8b-Q4_K_M", drafted=False, n_ctx_per_stream=4096)
    bare = replace(nothing, inputs=replace(nothing.inputs, inventory=models.rig(ram_gib=64)))
    rows = tradeoffs.rows(bare)
    assert {row["least_headroom_bytes"] for row in document.plan_document(bare.plan, None, rows)["tradeoffs"]} == {None}
    assert all("  -  " in line for line in shown(rows) if line.startswith(("* as", "  -ub", "  --")))


# ------------------------------------------------------------------------------- one more bundle


@pytest.mark.parametrize(
    ("rig", "model"), [("2x3090", QUALITY), ("24+12", SMALL), ("2x3090", SMALL), ("2x3090", "deepseek-r1-671b-Q2_K")]
)
def test_what_is_short_is_exact_to_the_byte(rig: str, model: str) -> None:
    """With that much memory more the bundle lies there; with a byte less it does not."""
    made = planned(rig, model, drafted="flash" in model)
    plan = made.plan
    found = tradeoffs.room(made).devices
    assert [m.short_bytes for m in found] == sorted(m.short_bytes for m in found)
    for more in found:
        (d,) = (d for d in plan.devices if d.device.name == more.device)
        assert more.short_bytes > 0
        for less, resident in ((0, 1), (1, 0)):
            free = (d.device.free_bytes or 0) + more.short_bytes - less
            same = pipeline.pinned(made.inputs, plan)
            devices = tuple(replace(x, free_bytes=free) if x.name == d.rig_name else x for x in same.inventory.devices)
            held = {x.rig_name: x.resident_layers for x in plan.devices if x.resident_layers and x is not d}
            blocks = [x.index for x in plan.layers if x.index in d.layers and not x.resident and x.bundle_bytes]
            least = min(blocks, key=lambda i: plan.layers[i].bundle_bytes)
            held[d.rig_name] = tuple(sorted((*d.resident_layers, least)))
            after = replace(same, inventory=replace(same.inventory, devices=devices)).plan(
                replace(same.settings, residency=held)
            )
            (there,) = (x for x in after.devices if x.rig_name == d.rig_name)
            assert (there.short_bytes == 0) is bool(resident), more


def test_the_binding_device_comes_first_and_a_smaller_micro_batch_is_planned() -> None:
    made = planned()
    room = tradeoffs.room(made)
    lines = said(made)
    first = room.devices[0]
    assert lines[0] == f"CUDA0 is short by {-(-first.short_bytes // MIB):,} MiB for one more bundle (3,264 MiB)"
    assert lines[1].startswith("CUDA1 is short by ")
    smaller = room.smaller
    assert smaller is not None
    assert smaller.bundles == len(planned(n_ubatch=2048).plan.resident_layers) - len(made.plan.resident_layers)
    # what it frees is what lies on that device at the same placement, before and after
    pinned = pipeline.pinned(made.inputs, made.plan)
    after = pinned.plan(replace(pinned.settings, n_ubatch=2048))
    assert smaller.freed_bytes == made.plan.devices[0].used_bytes - after.devices[0].used_bytes > first.short_bytes
    assert lines[2].startswith(
        f"micro-batch 2048 would free {round(smaller.freed_bytes / MIB):,} MiB on CUDA0 and buy {smaller.bundles} "
        "bundles (prefill "
    )


def test_one_bundle_is_called_one() -> None:
    assert "and buy one bundle" in said(planned(drafted=False))[-1]


def test_bundles_of_unequal_size_are_counted_in_bytes() -> None:
    """The same number of layers, larger ones: as much as a bundle leaves host memory, which is worth the change."""
    made = planned("2x3090", "qwen3-235b-a22b-Q4_K_M", drafted=False, n_ctx_per_stream=32768)
    row = by_change(tradeoffs.rows(made))["-ub 2048"]
    assert len(row.plan.resident_layers) == len(made.plan.resident_layers)
    moved = made.plan.host.terms["experts"] - row.plan.host.terms["experts"]
    assert moved >= min(layer.bundle_bytes for layer in made.plan.layers)
    assert row.worth
    assert f"and put {round(moved / MIB):,} MiB more of experts on the devices" in said(made)[-1]


def test_nothing_is_said_where_no_bundle_is_left_or_no_device_is_there() -> None:
    assert said(planned("2x3090", "qwen3-30b-a3b-Q4_K_M", drafted=False, n_ctx_per_stream=32768)) == []
    assert said(planned("2x3090", "qwen3-8b-Q4_K_M", drafted=False, n_ctx_per_stream=32768)) == []
    made = planned(drafted=False)
    bare = replace(made.inputs, inventory=models.rig(ram_gib=190))
    assert said(pipeline.launched(bare, bare.plan())) == []


def test_a_residency_that_was_set_leaves_room_and_is_named() -> None:
    lines = said(planned(residency="none"))
    assert lines[0] == "CUDA0 has room for one more bundle (3,264 MiB); the residency is set and leaves it in RAM"
    assert "pure loss" in lines[-1]


def test_the_smallest_bundle_of_a_device_is_the_one_that_is_nearest() -> None:
    header = models.moe_header([900, 500, 700, 900])
    inputs = Inputs(
        target=target.Target(name="t", slug=None, path=Path("/m.gguf")),
        header=header,
        drafter=None,
        inventory=models.rig(models.card(0, 2300)),
        settings=Settings(n_ctx_per_stream=2048, n_ubatch=512, residency="none"),
        given={},
    )
    (more,) = tradeoffs.room(pipeline.launched(inputs, inputs.plan())).devices
    sizes = {layer.bundle_bytes for layer in inputs.plan().layers}
    assert more.bundle_bytes == min(sizes) < max(sizes)


def test_what_the_engine_measured_is_what_the_shortage_is_counted_from() -> None:
    made = planned(drafted=False)
    seen = MeasuredCompute(
        compute_bytes={d.rig_name: d.terms["compute"] + 100 * MIB for d in made.plan.devices},
        host_compute_bytes=made.plan.host.terms["compute"], model_bytes={}, context_bytes={},
    )  # fmt: skip
    again = replace(made, plan=pipeline.pinned(made.inputs, made.plan).plan(measured=seen))
    assert again.plan.devices[0].source["compute"] == Source.DRY_RUN
    before, after = (tradeoffs.room(x).devices for x in (made, again))
    assert [b.short_bytes - a.short_bytes for a, b in zip(before, after, strict=True)] == [100 * MIB] * 2
