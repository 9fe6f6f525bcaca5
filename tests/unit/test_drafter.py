"""What a person fixes by hand: a drafter that is off or lies elsewhere, and experts pinned by OT_G<i>."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from launcher.errors import SlugInvalid, UsageError
from launcher.facts import slug as slugs
from launcher.planner import budget, make_plan, model_shape
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
        weights, cache, bound = (n / MIB for n in budget.drafter_parts(p, k, start, end))
        assert (weights, cache) == pytest.approx(measured[k][:2], abs=1)
        assert measured[k][2] * 0.99 <= bound <= measured[k][2] * 1.15


def test_no_drafter_has_no_parts() -> None:
    p = budget.Problem(
        shape=model_shape(models.replica_header(TARGET)),
        draft=None,
        devices=(models.card(0, 24125),),
        settings=models.deepseek(drafter_type=None),
    )
    assert budget.drafter_parts(p, 0, 0, 44) == (0, 0, 0)


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
    assert budget.drafter_parts(p, 0, 0, 24) == (0, 0, 0)
    weights, cache, bound = budget.drafter_parts(p, 1, 24, shape.n_layer + 1)
    row = 4 * shape.n_embd * settings.n_ubatch
    assert weights == 0
    assert cache == sum(p.mtp_bytes) > 0
    assert bound >= 2 * 32768 * settings.n_ubatch + 6 * row  # its mask, and six rows of activations, as the engine has
    assert budget.fixed_terms(p, 1, 24, shape.n_layer + 1)["drafter"] == cache + bound
    assert budget.fixed_terms(seen, 1, 24, shape.n_layer + 1)["drafter"] == 7 * MIB
    # the output alone: a few rows of logits for a block without a head
    assert 0 < sum(budget.drafter_parts(p, 1, shape.n_layer, shape.n_layer + 1)) < 4 * MIB


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

MOVES = (
    "-devd", "--device-draft", "--spec-draft-device", "-ngld", "--spec-draft-ngl", "-otd",
    "--spec-draft-override-tensor", "-cmoed", "--spec-draft-cpu-moe", "-ncmoed", "--spec_draft_n_cpu_moe",
)  # fmt: skip


@pytest.mark.parametrize("flag", MOVES)
@pytest.mark.parametrize("value", ["none", "CUDA0"])
def test_a_slug_may_not_move_the_draft_model(tmp_path: Path, flag: str, value: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        f'{LEAST}drafter: {{file: d.gguf, type: draft-dspark, n_max: 5}}\nextra_args: ["{flag}", {value}]\n'
    )
    with pytest.raises(SlugInvalid) as e:
        slugs.load_file(path, "family/x")
    assert e.value.exit_code == 3
    shown = flag.replace("_", "-")
    assert f"6:14: extra_args[0]: {shown} is the launcher's to write: use drafter" in e.value.context
    assert "one without an output head needs its output device" in e.value.context
    assert e.value.fix == f"${{EDITOR:-vi}} +6 {path}"


def test_every_placement_flag_of_a_drafter_is_the_launchers() -> None:
    assert {slugs.slug_values.OWNED_FLAGS[flag] for flag in slugs.DRAFTER_PLACEMENT} == {"drafter"}


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
    assert "needs its output device" in e.value.context


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
