"""What a person fixes by hand: a drafter that is off or lies elsewhere, and experts pinned by OT_G<i>."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from launcher.errors import SlugInvalid, UsageError
from launcher.facts import slug as slugs
from launcher.planner import budget, drafter, make_plan, model_shape
from launcher.serve import argv
from launcher.structs import MeasuredCompute, Plan, Settings
from launcher.units import MIB
from launcher.workflows import overrides
from launcher.workflows import plan as plan_workflow
from launcher.workflows import preflight as preflight_workflow
from tests import models, serve_builders

LEAST = "schema: 1\nstatus: production\ntitle: t\nmodel: {file: m.gguf}\n"
TARGET, DRAFT = "deepseek-v4-flash-UD-Q8_K_XL", "deepseek-v4-flash-dspark-Q8_0"


def planned(settings: Settings, *, drafted: bool) -> Plan:
    return make_plan(
        target="t",
        header=models.replica_header(TARGET),
        drafter=models.replica_header(DRAFT) if drafted else None,
        inventory=models.rig(models.card(0, 24125), models.card(1, 24125)),
        settings=settings,
    )


# ------------------------------------------------------------------------------------------ its bytes


@pytest.mark.parametrize(
    ("split", "measured"),
    [  # MiB of weights, cache and compute on each of two cards, as the engine allocated them
        ((22, 22), ((6806, 17, 2248), (3580, 8, 4524))),
        ((10, 34), ((3403, 8, 1929), (6983, 17, 4524))),
        ((30, 14), ((10209, 26, 2248), (178, 0, 7267))),
    ],
)
def test_a_drafter_is_a_vector_over_the_devices(
    split: tuple[int, ...], measured: tuple[tuple[int, int, int], ...]
) -> None:
    p = budget.Problem(
        shape=model_shape(models.replica_header(TARGET)),
        draft=model_shape(models.replica_header(DRAFT)),
        devices=(models.card(0, 24125), models.card(1, 24125)),
        settings=models.deepseek(),
    )
    for k, (start, end) in enumerate(pairwise((0, *accumulate(split)))):
        weights, cache, bound = (n / MIB for n in drafter.parts(p, k, start, end))
        assert (weights, cache) == pytest.approx(measured[k][:2], abs=1)
        assert measured[k][2] * 0.99 <= bound <= measured[k][2] * 1.15


def test_no_drafter_has_no_parts() -> None:
    p = budget.Problem(
        shape=model_shape(models.replica_header(TARGET)),
        draft=None,
        devices=(models.card(0, 24125),),
        settings=models.deepseek(drafter_type=None),
    )
    assert drafter.parts(p, 0, 0, 44) == (0, 0, 0)


def test_heads_in_the_models_own_file_need_a_cache_and_a_compute_buffer() -> None:
    """On the device of their block; a dry run speaks for both."""
    shape = model_shape(models.replica_header("glm-4.5-air-Q4_K_M"), mtp=True)
    settings = Settings(n_ctx_per_stream=32768, drafter_type="draft-mtp", draft_n_max=2)
    cards = (models.card(0, 24125, backend="rpc"), models.card(1, 24125, backend="rpc"))
    measured = MeasuredCompute(
        compute_bytes={}, host_compute_bytes=0, model_bytes={}, context_bytes={}, draft_bytes={"RPC1": 7 * MIB}
    )
    p = budget.Problem(shape=shape, draft=None, devices=cards, settings=settings)
    seen = replace(p, measured=measured)
    assert drafter.parts(p, 0, 0, 24) == (0, 0, 0)
    weights, cache, bound = drafter.parts(p, 1, 24, shape.n_layer + 1)
    row = 4 * shape.n_embd * settings.n_ubatch
    assert weights == 0
    assert cache == sum(p.mtp_bytes) > 0
    assert bound >= 2 * 32768 * settings.n_ubatch + 6 * row  # its mask, and six rows of activations, as the engine has
    assert budget.fixed_terms(p, 1, 24, shape.n_layer + 1)["drafter"] == cache + bound
    assert budget.fixed_terms(seen, 1, 24, shape.n_layer + 1)["drafter"] == 7 * MIB
    # the output alone: a few rows of logits for a block without a head
    assert 0 < sum(drafter.parts(p, 1, shape.n_layer, shape.n_layer + 1)) < 4 * MIB


@pytest.mark.parametrize("given", [{"draft_max": 0}, {"drafter": "off"}])
def test_off_takes_every_byte_and_every_flag_away(given: dict[str, object]) -> None:
    wanted = models.deepseek()
    kind = None if given.get("drafter") == "off" else wanted.drafter_type
    off = planned(overrides.with_drafter(wanted, kind, 5, given), drafted=False)
    on = planned(wanted, drafted=True)
    assert sum(d.terms["drafter"] for d in on.devices) > 10 * 1024 * MIB
    assert [d.terms["drafter"] for d in off.devices] == [0] * len(off.devices)
    assert {name: n for name, n in off.host.terms.items() if "draft" in name and n} == {}
    # the states that the target keeps for a rejected draft go with it
    assert sum(d.terms["kv"] for d in off.devices) < sum(d.terms["kv"] for d in on.devices)
    launch = argv.build(
        off,
        engine=None,
        host="127.0.0.1",
        port=8080,
        alias="a",
        slug=None,
        base_env={},
        empty_config="/e",
    )
    assert [w for w in launch.argv if "draft" in w or "spec" in w or w in ("-md", DRAFT)] == []


# --------------------------------------------------------------------------------------- its devices

MOVES = {
    "drafter.device": ("-devd", "--device-draft", "--spec-draft-device"),
    "drafter.layers": ("-ngld", "--gpu-layers-draft", "--spec-draft-ngl"),
    "drafter.experts": ("-otd", "--spec-draft-override-tensor", "-cmoed", "-ncmoed", "--spec_draft_n_cpu_moe"),
}


@pytest.mark.parametrize(("key", "flag"), [(key, flag) for key, flags in MOVES.items() for flag in flags])
def test_a_slug_moves_the_draft_model_by_its_own_keys_alone(tmp_path: Path, key: str, flag: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(f'{LEAST}drafter: {{file: d.gguf, type: draft-dspark, n_max: 5}}\nextra_args: ["{flag}", none]\n')
    with pytest.raises(SlugInvalid) as e:
        slugs.load_file(path, "family/x")
    assert e.value.exit_code == 3
    shown = flag.replace("_", "-")
    assert f"6:14: extra_args[0]: {shown} is the launcher's to write: use {key}" in e.value.context
    assert e.value.fix == f"${{EDITOR:-vi}} +6 {path}"


@pytest.mark.parametrize("words", [("-devd", "none"), ("--no-warmup", "--spec-draft-device=CUDA1")])
def test_a_command_line_may_not_move_the_draft_model(words: tuple[str, ...]) -> None:
    """A slug that was not read from a file is held to the same."""
    with pytest.raises(SlugInvalid) as e:
        argv.build(
            serve_builders.plan(serve_builders.card()),
            engine=None,
            host="127.0.0.1",
            port=1,
            alias="a",
            slug=serve_builders.slug(extra_args=words),
            base_env={},
            empty_config="/e",
        )
    assert (e.value.exit_code, e.value.reference) == (3, "slug-invalid")
    assert f"extra_args[{len(words) - (1 if '=' in words[-1] else 2)}]: " in e.value.context
    assert "use drafter.device" in e.value.context


def small(draft: str | None = "qwen3-8b-Q4_K_M", *, cards: int = 2, mib: int = 24125, **changes: object) -> Plan:
    """A MoE of 48 layers that an ordinary model drafts for."""
    base: dict[str, object] = {
        "n_ctx_per_stream": 16384, "n_ubatch": 512, "drafter_type": "draft-simple", "draft_n_max": 4,
    }  # fmt: skip
    return make_plan(
        target="t",
        header=models.replica_header("qwen3-235b-a22b-Q4_K_M"),
        drafter=models.replica_header(draft) if draft else None,
        inventory=models.rig(*(models.card(k, mib) for k in range(cards))),
        settings=Settings(**(base | changes)),  # type: ignore[arg-type]
    )


def line(plan: Plan) -> dict[str, object]:
    """What the command line says, read back."""
    launch = argv.build(
        plan, engine=None, host="127.0.0.1", port=1, alias="a", slug=None, base_env={}, empty_config="/e"
    )
    return argv.parse_back(launch.argv)


def test_a_drafter_in_host_memory_takes_nothing_of_the_cards() -> None:
    there, plain, here = small(), small(None, drafter_type=None), small(drafter_device="host")
    assert [d.terms["drafter"] for d in here.devices] == [0, 0]
    assert here.resident_layers == plain.resident_layers
    assert len(here.resident_layers) > len(there.resident_layers)
    draft = model_shape(models.replica_header("qwen3-8b-Q4_K_M"))
    stored = sum(x.dense.cpu for x in draft.layers) + draft.output.cpu + draft.input.cpu + draft.per_device.cpu
    cache = 36 * 2 * 8 * 128 * 2 * 16384
    assert here.host.terms["drafter"] >= stored + cache
    assert here.host.terms["drafter"] - stored - cache < 512 * MIB  # its compute buffer
    said = line(here)
    assert (said["draft_devices"], said["devices"]) == ("none", ("CUDA0", "CUDA1"))
    assert "draft_devices" not in line(there)


@pytest.mark.parametrize("name", ["CUDA0", "CUDA1"])
def test_a_drafter_on_one_card_lies_there_whole(name: str) -> None:
    plan = small(drafter_device=name)
    shares = {d.rig_name: d.terms["drafter"] for d in plan.devices}
    draft = model_shape(models.replica_header("qwen3-8b-Q4_K_M"))
    weights = sum(x.dense.on("cuda") for x in draft.layers) + draft.output.on("cuda") + draft.per_device.on("cuda")
    assert shares.pop(name) >= weights + 36 * 2 * 8 * 128 * 2 * 16384
    assert list(shares.values()) == [0]
    assert line(plan)["draft_devices"] == name
    assert plan.fits


def test_a_card_too_small_for_the_target_can_draft_for_it() -> None:
    """It owns no layer, is in no -ts and on no -dev, and its sum is shown; the others hold what they would alone."""
    header, draft = models.replica_header("qwen3-235b-a22b-Q4_K_M"), models.replica_header("qwen3-8b-Q4_K_M")
    s = Settings(
        n_ctx_per_stream=8192, n_ubatch=512, drafter_type="draft-simple", draft_n_max=4, drafter_device="CUDA2"
    )
    cards, small_card = (models.card(0, 24125), models.card(1, 24125)), models.card(2, 8125)
    p = budget.Problem(shape=model_shape(header), draft=model_shape(draft), devices=cards, settings=s)
    taken = drafter.apart(p, "cuda") + budget.context_bytes(small_card)[0] + budget.margin_bytes(small_card, s)
    rig = models.rig(*cards, replace(small_card, free_bytes=taken + MIB))
    plan = make_plan(target="t", header=header, drafter=draft, inventory=rig, settings=s)
    lone = plan.devices[-1]
    assert plan.fits
    assert (lone.rig_name, lone.layers, lone.owns_output, plan.tensor_split[-1]) == ("CUDA2", (), False, 0)
    assert {t for t, n in lone.terms.items() if n} == {"drafter", "context", "margin"}
    said = line(plan)
    assert (said["devices"], said["draft_devices"]) == (("CUDA0", "CUDA1"), "CUDA2")
    assert said["tensor_split"] == plan.tensor_split[:-1]
    assert len(plan.resident_layers) == len(small(None, drafter_type=None, n_ctx_per_stream=8192).resident_layers)
    again = make_plan(
        target="t", header=header, drafter=draft, inventory=rig, settings=replace(s, tensor_split=plan.tensor_split)
    )
    assert (again.layers, again.devices[-1].terms) == (plan.layers, lone.terms)


def test_a_drafter_with_some_layers_on_cards_keeps_the_first_ones_in_host_memory() -> None:
    """`-ngld 10`: its output and last nine layers on the cards, 27 layers with their cache in host memory."""
    draft = model_shape(models.replica_header("qwen3-8b-Q4_K_M"))
    p = budget.Problem(
        shape=model_shape(models.replica_header("qwen3-235b-a22b-Q4_K_M")),
        draft=draft,
        devices=(models.card(0, 24125), models.card(1, 24125)),
        settings=Settings(n_ctx_per_stream=16384, drafter_type="draft-simple", draft_n_max=4, drafter_layers=10),
    )
    on = [drafter.slots(p, 0, 0, 50), drafter.slots(p, 1, 50, 95)]
    assert [i for own in on for i in own] == list(range(27, 37))
    assert drafter.host_slots(p) == range(27)
    stored = drafter.host_bytes(p)[0]
    assert stored == draft.input.cpu + draft.per_device.cpu + sum(x.dense.cpu for x in draft.layers[:27]) + sum(
        p.draft_kv_bytes[:27]
    )
    weights = sum(drafter.parts(p, k, start, end)[0] for k, (start, end) in enumerate(((0, 50), (50, 95))))
    everything = sum(x.dense.on("cuda") for x in draft.layers) + draft.output.on("cuda")
    assert weights == everything - sum(x.dense.on("cuda") for x in draft.layers[:27])
    assert line(small(drafter_layers=10))["draft_n_gpu_layers"] == 10


def test_the_experts_of_a_drafter_in_host_memory_make_room_for_the_targets() -> None:
    wanted = models.deepseek()
    there, here = planned(wanted, drafted=True), planned(replace(wanted, drafter_experts="host"), drafted=True)
    assert len(here.resident_layers) > len(there.resident_layers)
    moved = here.host.terms["drafter"] - there.host.terms["drafter"]
    bundles = sum(x.bundle.cpu for x in model_shape(models.replica_header(DRAFT)).layers)
    assert bundles <= moved
    assert line(here)["draft_override_tensor"] == r"\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"
    assert line(here)["draft_n_max"] == 5


@pytest.mark.parametrize(
    ("settings", "drafted", "said"),
    [
        ({"drafter_device": "host"}, True, "needs the device of the target's output, CUDA1"),
        ({"drafter_device": "CUDA0"}, True, "needs the device of the target's output, CUDA1"),
        ({"drafter_device": "CUDA7"}, True, "no device is called 'CUDA7' (here: CUDA0, CUDA1, host)"),
        ({"drafter_device": "host", "drafter_type": "draft-mtp"}, False, "its blocks are part of the target's file"),
    ],
)
def test_a_place_that_the_engine_would_refuse_is_refused_before(
    settings: dict[str, str], drafted: bool, said: str
) -> None:
    with pytest.raises(UsageError) as e:
        planned(models.deepseek(**settings), drafted=drafted)
    assert (e.value.exit_code, e.value.reference) == (2, "drafter-place")
    assert said in e.value.message
    assert e.value.fix.startswith("--drafter-device ")


def test_experts_that_a_drafter_has_not_got_cannot_stay_anywhere() -> None:
    with pytest.raises(UsageError, match="no routed experts"):
        small(drafter_experts="host")


def test_a_drafter_without_a_head_may_be_named_for_the_outputs_card() -> None:
    """The whole of it, on the last card: 10386 MiB and 26 of cache, in every order that a faster link would suggest."""
    plan = planned(models.deepseek(drafter_device="CUDA1"), drafted=True)
    last = plan.devices[-1]
    assert (last.rig_name, last.owns_output) == ("CUDA1", True)
    assert last.terms["drafter"] / MIB > 10386 + 25
    assert plan.devices[0].terms["drafter"] == 0 or len(plan.devices) == 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"drafter_device": "none"}, ("host", None, "auto")),
        ({"drafter_device": "HOST", "drafter_layers": 0}, ("host", 0, "auto")),
        ({"drafter_device": "auto", "drafter_experts": "HOST"}, (None, None, "host")),
        ({"drafter_device": "CUDA1"}, ("CUDA1", None, "auto")),
        ({}, ("CUDA0", 3, "auto")),
    ],
)
def test_options_win_over_the_slug(given: dict[str, object], expected: tuple[object, ...]) -> None:
    slug = Settings(drafter_device="CUDA0", drafter_layers=None if given else 3)
    found = overrides.with_drafter(slug, "draft-simple", 4, given)
    assert (found.drafter_device, found.drafter_layers, found.drafter_experts) == expected
    off = overrides.with_drafter(slug, None, 4, given)
    assert (off.drafter_device, off.drafter_layers, off.drafter_experts) == (None, None, "auto")


@pytest.mark.parametrize(
    "given", [{"drafter_device": "CUDA0,CUDA1"}, {"drafter_device": ""}, {"drafter_layers": -1}, {"drafter_experts": 1}]
)
def test_options_that_mean_no_place(given: dict[str, object]) -> None:
    with pytest.raises(UsageError) as e:
        overrides.with_drafter(Settings(), "draft-simple", 4, given)
    assert (e.value.exit_code, e.value.reference) == (2, "override-invalid")


def test_a_slug_says_where_its_drafter_lies(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    more = "device: none, layers: 2, experts: host"
    path.write_text(f"{LEAST}drafter: {{file: d.gguf, type: draft-simple, n_max: 5, {more}}}\n")
    found = slugs.load_file(path, "family/x").drafter
    assert found is not None
    assert (found.device, found.layers, found.experts) == ("host", 2, "host")
    path.write_text(f'{LEAST}drafter: {{file: d.gguf, type: draft-simple, n_max: 5, device: "CUDA0,CUDA1"}}\n')
    with pytest.raises(SlugInvalid) as e:
        slugs.load_file(path, "family/x")
    assert "drafter.device: expected auto, host or one device's name" in e.value.context


# ----------------------------------------------------------------------------------------------- OT_G


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, {}),
        ({"OT_G0": "", "OT_G1": "  "}, {}),
        ({"OT_G0": "0,1,2", "OT_G1": "40-42"}, {0: (0, 1, 2), 1: (40, 41, 42)}),
        ({"OT_G10": " 7 , 3-4,3 "}, {10: (3, 4, 7)}),
        ({"OT_GX": "all", "MY_OT_G0": "1", "ot_g0": "1"}, {}),
    ],
)
def test_pins(env: dict[str, str], expected: dict[int, tuple[int, ...]]) -> None:
    assert overrides.pins(env) == expected


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"OT_G0": "a"}, "OT_G0=a: expected a whole number, found 'a'"),
        ({"OT_G0": "0|1"}, "OT_G0=0|1: expected a whole number"),
        ({"OT_G1": "0,,2"}, "OT_G1=0,,2: expected a whole number, found ''"),
        ({"OT_G1": "5-2"}, "OT_G1=5-2: the range 5-2 runs backwards"),
        ({"OT_G1": "-1"}, "OT_G1=-1: expected a whole number"),
        ({"OT_G0": "99999"}, "99999 is not from 0 to 9,999"),
        ({"OT_G0": "0-2", "OT_G1": "2"}, "OT_G1=2: layer 2 is already on OT_G0"),
        ({"OT_G01": "2"}, "OT_G01=2: card 1 is written OT_G1"),
    ],
)
def test_pins_that_cannot_be_read_name_the_variable(env: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as e:
        overrides.pins(env)
    assert (e.value.exit_code, e.value.reference) == (2, "ot-g-invalid")
    assert said in e.value.message
    assert "OT_G" in e.value.fix


def test_pins_become_a_residency_map_in_the_given_order() -> None:
    cards = (models.card(1, 24125), models.card(0, 24125))
    found = overrides.with_pins(Settings(), {0: (3,), 1: (40, 41)}, {}, cards)
    assert found.residency == {"CUDA1": (3,), "CUDA0": (40, 41)}
    assert found.keep_order
    assert overrides.with_pins(Settings(), {}, {}, cards) == Settings()
    assert overrides.with_pins(Settings(), {0: (3,)}, {"residency": "none"}, cards) == Settings()
    assert overrides.with_pins(Settings(), {0: (3,)}, {"devices": "none"}, ()) == Settings()


def test_a_pin_on_a_card_that_is_not_there() -> None:
    with pytest.raises(UsageError) as e:
        overrides.with_pins(Settings(), {0: (1,), 2: (3,)}, {}, (models.card(0, 24125), models.card(1, 24125)))
    assert (e.value.reference, e.value.fix) == ("ot-g-invalid", "unset OT_G2")
    assert e.value.context == "devices in order: CUDA0, CUDA1"


def test_pins_are_placed_and_held_to_the_same_inequality() -> None:
    inventory = models.rig(models.card(0, 8000), models.card(1, 8000))
    header = models.moe_header([900] * 12)
    wanted = Settings(n_ctx_per_stream=4096, cache_ram_bytes=0, checkpoints=1)

    def plan(pins: dict[str, str]) -> Plan:
        pinned = overrides.with_pins(wanted, overrides.pins(pins), {}, inventory.devices)
        return make_plan(target="t", header=header, drafter=None, inventory=inventory, settings=pinned)

    fits = plan({"OT_G0": "0,2", "OT_G1": "9-10"})
    assert [d.resident_layers for d in fits.devices] == [(0, 2), (9, 10)]
    assert fits.fits
    over = plan({"OT_G0": "0", "OT_G1": "3-11"})
    assert [d.resident_layers for d in over.devices] == [(0,), tuple(range(3, 12))]
    assert over.refusal is not None
    assert over.refusal.where == "CUDA1"


RIG = """schema: 1
devices:
  - {name: CUDA0, total: 8GiB, context: 300MiB}
  - {name: CUDA1, total: 8GiB, context: 300MiB}
host: {total: 64GiB, cores: 8}
"""


def test_pins_of_the_environment_reach_plan_and_preflight(
    replica: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the catalogue, whose other models have other layers."""
    rig = tmp_path / "rig.yaml"
    rig.write_text(RIG)
    model = str(replica("gpt-oss-20b-MXFP4"))
    monkeypatch.setenv("OT_G0", "0, 2")
    monkeypatch.setenv("OT_G1", "20-21")
    given = {"ctx": "8k"}
    found = plan_workflow.run(model, given, rig=str(rig), no_engine=True).plan
    assert [d.resident_layers for d in found.devices] == [(0, 2), (20, 21)]
    checked = preflight_workflow.run(model, given, rig=str(rig)).plan
    assert checked is not None
    assert checked.rules == found.rules
    monkeypatch.setenv("OT_G1", "all")
    for command in (plan_workflow.run, preflight_workflow.run):
        with pytest.raises(UsageError, match="OT_G1=all") as e:
            command(model, given, rig=str(rig))
        assert (e.value.exit_code, e.value.reference) == (2, "ot-g-invalid")


# ------------------------------------------------------------------------------- orders, maps and mixed rigs


def test_a_residency_map_that_suits_the_given_order_alone_is_kept() -> None:
    """The second card has the faster link; with it in front the map has no split, which ends nothing."""
    cards = (replace(models.card(0, 24125), link_bps=6e9), replace(models.card(1, 24125), link_bps=25e9))
    plan = make_plan(
        target="t",
        header=models.replica_header("qwen3-235b-a22b-Q4_K_M"),
        drafter=None,
        inventory=models.rig(*cards),
        settings=Settings(n_ctx_per_stream=8192, residency={"CUDA0": (0, 1), "CUDA1": (90,)}),
    )
    assert plan.fits
    assert [(d.rig_name, d.resident_layers) for d in plan.devices] == [("CUDA0", (0, 1)), ("CUDA1", (90,))]


def test_pins_may_leave_the_drafters_card_no_layer() -> None:
    plan = small(drafter_device="CUDA0", residency={"CUDA1": (0, 1)}, keep_order=True)
    assert plan.fits
    assert [(d.rig_name, len(d.layers)) for d in plan.devices] == [("CUDA1", 94), ("CUDA0", 0)]
    assert plan.devices[1].terms["drafter"] > 0


def test_a_drafter_without_a_head_on_a_card_that_ts_leaves_out_is_said_so() -> None:
    with pytest.raises(UsageError, match="-ts gives CUDA1 no slot") as e:
        planned(models.deepseek(drafter_device="CUDA1", tensor_split=(44, 0)), drafted=True)
    assert e.value.reference == "drafter-place"


@pytest.mark.parametrize("place", [{"drafter_experts": "host"}, {"drafter_layers": 10}])
def test_a_drafter_on_an_rpc_device_of_its_own_computes_host_weights_on_the_cpu(place: dict[str, object]) -> None:
    """Its host part is priced for its own device, whatever the target's devices are."""
    remote = replace(models.card(0, 24000, backend="rpc"), endpoint="127.0.0.1:5", buffer_type="RPC0[127.0.0.1:5]")
    settings = Settings(
        n_ctx_per_stream=16384, n_ubatch=4096, n_batch=4096, drafter_type="draft-simple", draft_n_max=3,
        drafter_device=remote.name, **place,  # type: ignore[arg-type]
    )  # fmt: skip
    p = budget.Problem(
        shape=model_shape(models.replica_header("qwen3-235b-a22b-Q4_K_M")),
        draft=model_shape(models.replica_header("qwen3-30b-a3b-Q4_K_M")),
        devices=(models.card(0, 48000), remote),
        settings=settings,
    )
    apart = drafter.elsewhere(p)
    assert apart is not None
    assert [d.name for d in apart.devices] == ["CUDA0"]
    assert drafter.host_bytes(apart) == drafter.host_bytes(p)
    assert drafter.host_bytes(apart)[1] > 700 * MIB


def test_nextn_blocks_compute_in_host_memory_too_where_no_device_does() -> None:
    header = models.replica_header("glm-4.5-air-Q4_K_M")
    settings = Settings(n_ctx_per_stream=32768, n_ubatch=2048, drafter_type="draft-mtp", draft_n_max=2)
    p = budget.Problem(shape=model_shape(header, mtp=True), draft=None, devices=(), settings=settings)
    assert 592 <= drafter.host_bytes(p)[1] / MIB <= 592 * 1.03  # a dry run without a device
    rpc = replace(p, devices=(models.card(0, 24000, backend="rpc"),))
    assert drafter.host_bytes(rpc)[1] > 592 * MIB  # the CPU computes experts that stay there
    card = replace(p, devices=(models.card(0, 24000),))
    assert 160 <= drafter.host_bytes(card)[1] / MIB <= 162  # on an H200
