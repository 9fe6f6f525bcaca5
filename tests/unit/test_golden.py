"""Every replica on every golden rig: the plan to the byte, and the invariants that each of them must keep.

`pytest --update-golden` rewrites tests/golden/plans; the commit that does so says why the numbers moved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.facts.rig import load_rig
from launcher.planner import make_plan, owner, rules
from launcher.structs import ModelHeader, Plan, Settings
from launcher.units import MIB
from tests.models import SPECS, deepseek, replica_header

GOLDEN = Path(__file__).parent.parent / "golden"
RIGS = sorted(p.stem for p in (GOLDEN / "rigs").glob("*.yaml"))
MODELS = sorted(p.stem for p in SPECS.glob("*.yaml") if "dspark" not in p.stem)
PLAIN = Settings(n_ctx_per_stream=32768, n_batch=2048, n_ubatch=2048)


def plan_of(model: str, rig: str) -> tuple[Plan, ModelHeader]:
    header = replica_header(model)
    flash = "flash" in model
    plan = make_plan(
        target=model,
        header=header,
        drafter=replica_header("deepseek-v4-flash-dspark-Q8_0") if flash else None,
        inventory=load_rig(GOLDEN / "rigs" / f"{rig}.yaml"),
        settings=deepseek(cache_ram_bytes=None, checkpoints=None) if flash else PLAIN,
    )
    return plan, header


def compact(plan: Plan) -> dict[str, Any]:
    """What a person would compare: the choice, every byte term, the host sum."""
    return {
        "fits": plan.fits,
        "refusal": plan.refusal and {"where": plan.refusal.where, "short_mib": round(plan.refusal.short_bytes / MIB)},
        "tensor_split": list(plan.tensor_split),
        "devices": {
            d.device.name: {
                "resident": list(d.resident_layers),
                "headroom_mib": round(d.headroom_bytes / MIB),
                "bytes": dict(d.terms),
            }
            for d in plan.devices
        },
        "host": {"layers": len(plan.host.layers), "required": plan.host.required_bytes, "bytes": dict(plan.host.terms)},
        "override_tensor": plan.override_tensor,
    }


@pytest.mark.parametrize("rig", RIGS)
def test_plans_are_the_golden_ones(rig: str, request: pytest.FixtureRequest) -> None:
    file = GOLDEN / "plans" / f"{rig}.json"
    got = {model: compact(plan_of(model, rig)[0]) for model in MODELS}
    if request.config.getoption("--update-golden"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(got, indent=1) + "\n")
    assert got == json.loads(file.read_text())


@pytest.mark.parametrize("rig", RIGS)
@pytest.mark.parametrize("model", MODELS)
def test_every_plan_keeps_the_invariants(model: str, rig: str) -> None:
    plan, header = plan_of(model, rig)
    assert plan == plan_of(model, rig)[0]
    rules.check(plan, header)
    owned = owner.owners(plan.model.n_layer, plan.tensor_split)
    assert owner.counts(plan.model.n_layer, plan.tensor_split) == plan.tensor_split
    for layer in plan.layers:
        slot = owned[layer.index]
        assert slot is not None
        assert plan.devices[slot].device.name == layer.device
        assert layer.resident == (layer.index in plan.devices[slot].resident_layers)
    if plan.fits:
        assert all(d.headroom_bytes >= d.terms["margin"] for d in plan.devices)
        assert plan.host.required_bytes <= plan.host.available_bytes
    else:
        assert plan.refusal
        assert plan.refusal.short_bytes > 0
    # every bundle once: what lies on devices and host is what the file holds, but for the padding in buffers
    loaded = {layer.index for layer in plan.layers if layer.loaded}
    experts = sum(layer.bundle_bytes for layer in plan.layers if layer.index in loaded)
    assert sum(d.terms["experts"] for d in plan.devices) + plan.host.terms["experts"] == pytest.approx(
        experts, abs=65536
    )


def test_moving_one_bundle_moves_the_host_by_exactly_that_bundle() -> None:
    """The two-card DeepSeek slug: 138,505 MiB with two bundles on the cards, no prompt cache, one checkpoint."""
    header, drafter = replica_header("deepseek-v4-flash-UD-Q8_K_XL"), replica_header("deepseek-v4-flash-dspark-Q8_0")
    inventory = load_rig(GOLDEN / "rigs" / "2x3090.yaml")

    def need(residency: dict[str, tuple[int, ...]]) -> int:
        settings = deepseek(residency=residency)
        plan = make_plan(target="t", header=header, drafter=drafter, inventory=inventory, settings=settings)
        return plan.host.required_bytes

    two = need({"CUDA0": (0,), "CUDA1": (42,)})
    assert abs(two - 138_505 * MIB) <= 512 * MIB
    assert need({"CUDA0": (0,)}) - two == 3264 * MIB
    assert need({"CUDA0": (0, 1), "CUDA1": (42,)}) - two == -3264 * MIB


def test_two_measured_cards_are_met_within_two_percent() -> None:
    """Two RTX 3090 with the drafter at 204,800 tokens and no resident bundle took 20,030 and 19,586 MiB."""
    plan = make_plan(
        target="t",
        header=replica_header("deepseek-v4-flash-UD-Q8_K_XL"),
        drafter=replica_header("deepseek-v4-flash-dspark-Q8_0"),
        inventory=load_rig(GOLDEN / "rigs" / "2x3090.yaml"),
        settings=deepseek(residency="none", tensor_split=(22, 22)),
    )
    for d, measured_mib in zip(plan.devices, (20_030, 19_586), strict=True):
        assert d.used_bytes / MIB == pytest.approx(measured_mib, rel=0.02)
