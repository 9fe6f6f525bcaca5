"""Rules and their inverse; a list in the wrong order is caught before anything is launched."""

from __future__ import annotations

import dataclasses
import random

import pytest

from launcher.errors import Refused
from launcher.planner import make_plan, rules
from launcher.structs import Plan, Rule, Settings
from tests.models import card, moe_header, rig

HEADER = moe_header([300] * 12)


def a_plan(free_mib: int = 2700) -> Plan:
    return make_plan(
        target="t",
        header=HEADER,
        drafter=None,
        inventory=rig(card(0, free_mib), card(1, free_mib)),
        settings=Settings(n_ctx_per_stream=4096),
    )


def test_rules_come_in_device_order_with_the_catch_all_last() -> None:
    plan = a_plan()
    assert [r.buffer_type for r in plan.rules] == ["CUDA0", "CUDA1", "CPU"]
    assert plan.override_tensor is not None
    assert plan.override_tensor.count("=") == 3
    assert rules.parse(plan.override_tensor) == plan.rules


def test_resolving_gives_the_placement_back() -> None:
    plan = a_plan()
    rules.check(plan, HEADER)
    found = rules.resolve(plan.rules, [t.name for t in HEADER.tensors])
    for layer in plan.layers:
        want = layer.device if layer.resident else "CPU"
        assert found[f"blk.{layer.index}.ffn_gate_up_exps.weight"] == want
        assert found[f"blk.{layer.index}.attn_q.weight"] is None


def test_a_reversed_list_is_refused_with_both_places() -> None:
    plan = a_plan()
    backwards = dataclasses.replace(plan, rules=plan.rules[::-1])
    with pytest.raises(Refused) as caught:
        rules.check(backwards, HEADER)
    assert caught.value.reference == "rules-mismatch"
    assert "goes to CPU, planned CUDA0" in caught.value.context
    assert caught.value.fix.endswith(f"'{plan.override_tensor}'")


@pytest.mark.parametrize(
    "bad",
    [
        Rule(pattern=r"^blk\.99\.ffn_up_exps", buffer_type="CUDA0"),  # decides nothing
        Rule(pattern=r"blk.1", buffer_type="CUDA0"),  # unescaped: blocks 10 and 11 as well, and attention
        Rule(pattern=r"token_embd", buffer_type="CUDA0"),
    ],
)
def test_a_rule_too_many_is_refused(bad: Rule) -> None:
    plan = a_plan()
    with pytest.raises(Refused):
        rules.check(dataclasses.replace(plan, rules=(bad, *plan.rules)), HEADER)


def test_a_missing_rule_is_refused() -> None:
    plan = a_plan()
    with pytest.raises(Refused):
        rules.check(dataclasses.replace(plan, rules=plan.rules[1:]), HEADER)


def test_biases_scales_and_chunks_belong_to_the_bundle() -> None:
    names = [
        "blk.3.ffn_up_exps.bias",
        "blk.3.ffn_gate_up_exps.weight",
        "blk.3.ffn_down_exps.scale",
        "blk.3.ffn_up_chexps.weight",
        "blk.3.ffn_gate_exps.input_scale",
    ]
    built = rules.build([("CUDA0", [3])], any_host=True)
    assert set(rules.resolve(built, names).values()) == {"CUDA0"}
    others = [
        "blk.3.ffn_up_shexp.weight",
        "blk.3.ffn_gate_inp.weight",
        "blk.3.ffn_gate.weight",
        "blk.3.exp_probs_b.bias",
    ]
    assert set(rules.resolve(built, others).values()) == {None}


def test_numbers_are_anchored_on_both_sides() -> None:
    built = rules.build([("CUDA0", [1, 2])], any_host=True)
    found = rules.resolve(built, [f"blk.{i}.ffn_up_exps.weight" for i in (1, 2, 11, 12, 21, 22, 112)])
    assert list(found.values()) == ["CUDA0", "CUDA0", "CPU", "CPU", "CPU", "CPU", "CPU"]


def test_2000_random_placements_resolve_to_themselves() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        n_layer, n_devices = rng.randint(1, 100), rng.randint(1, 4)
        device_of = {i: rng.choice([None, *range(n_devices)]) for i in range(n_layer)}
        resident = [(f"CUDA{k}", [i for i in device_of if device_of[i] == k]) for k in range(n_devices)]
        built = rules.build(resident, any_host=None in device_of.values())
        found = rules.resolve(built, [f"blk.{i}.ffn_down_exps.weight" for i in range(n_layer)])
        want = ["CPU" if device_of[i] is None else f"CUDA{device_of[i]}" for i in range(n_layer)]
        assert list(found.values()) == want


@pytest.mark.parametrize("text", ["", "nonsense", "a=CPU,", "=CPU", "x{1,2}=CPU"])
def test_an_argument_the_engine_could_not_split_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a rule"):
        rules.parse(text)
