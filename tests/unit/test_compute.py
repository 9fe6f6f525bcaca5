"""Compute-buffer bounds and weights against what the engine itself reported for twelve models (tests/golden)."""

from __future__ import annotations

import runpy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from launcher.planner import compute, draft_compute, drafter, kv
from launcher.planner.attention import Attention
from launcher.planner.owner import owners
from launcher.planner.shape import ModelShape
from launcher.structs import Settings
from launcher.units import MIB
from tests.engine_rows import (
    DRAFTER,
    draft_parts,
    drafted,
    errors,
    rows,
    shapes,
)

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
FLASH_Q8 = "DeepSeek-V4-Flash-0731-UD-Q8_K_XL"
DSPARK = DRAFTER
ROOT = Path(__file__).resolve().parents[2]


def test_the_rows_are_all_there_and_nearly_all_covered() -> None:
    assert len(rows()) == 1050
    assert sum(row.odd_flags for row in rows()) < 80
    assert len(drafted()) == 37 + 59 + 9
    where = Counter(row.settings.drafter_device for row in drafted())
    # on one device (-devd NAME), in host memory (-devd none), its experts there (-cmoed), its first layers (-ngld)
    assert (where["RPC1"], where["CUDA0"] + where["CUDA1"], where["host"]) == (2, 6, 4)
    assert sum(row.settings.drafter_experts == "host" for row in drafted()) == 2
    assert sum(row.settings.drafter_layers is not None for row in drafted()) == 8
    assert sum(row.draft_model is None for row in drafted()) == 46


def test_the_table_that_is_published_has_nothing_failing() -> None:
    lines, failing = runpy.run_path(str(ROOT / "scripts" / "oracle_table.py"))["table"]()
    assert failing == 0, "\n".join(lines)
    shown = {line.split("|")[1].strip() for line in lines[2:]}
    assert shown == {*WORST, *(arch for arch, _, _ in DRAFTERS)}


def test_no_bound_is_more_than_one_percent_below_the_engine() -> None:
    low = [(key, value[0]) for key, value in errors().items() if value[0][0] < -0.01]
    assert not low


# Worst over-estimate in percent as measured, by architecture, backend and place: a looser formula fails here.
# "cuda+" are rows with logits for the whole batch or without flash attention, which no server of ours has.
PLACES = (
    ("cuda", "first"), ("cuda", "later"), ("cuda", "host"), ("cuda+", "first"), ("cuda+", "host"),
    ("rpc", "first"), ("rpc", "later"), ("rpc", "host"), ("cpu", "host"),
)  # fmt: skip
WORST = {
    "deepseek2": (4, 5, 2, 4, 2, 8, 22, 9, 4),
    "deepseek4": (25, 29, 22, 21, 22, 26, 35, 46, 15),
    "glm4moe": (5, 5, 3, 3, 3, 35, 21, 4, 3),
    "gpt-oss": (2, 8, 5, 3, 5, 5, 7, 2, 2),
    "llama": (8, 23, 3, 8, 3, 18, 24, 1, 1),
    "qwen3": (23, 28, 3, 9, 3, 21, 24, 1, 1),
    "qwen3moe": (18, 4, 5, 4, 5, 21, 14, 2, 3),
    "qwen3next": (27, 7, 5, 40, 5, 35, 14, 15, 2),
}
CEILINGS = {(arch, *place): worst for arch, line in WORST.items() for place, worst in zip(PLACES, line, strict=True)}
DRAFTERS = {
    ("drafter dflash", "rpc", "first"): 1, ("drafter dflash", "rpc", "later"): 1, ("drafter dflash", "rpc", "host"): 12,
    ("drafter qwen3", "cuda", "first"): 12, ("drafter qwen3", "cuda", "later"): 6, ("drafter qwen3", "cuda", "host"): 3,
    ("glm4moe NextN", "cuda", "first"): 7, ("glm4moe NextN", "cuda", "later"): 7, ("glm4moe NextN", "cuda", "host"): 7,
    ("glm4moe NextN", "cpu", "host"): 4,
}  # fmt: skip
CEILINGS |= DRAFTERS
# Half of all buffers of a class are within this: what a plan really pays.
MEDIANS = {"cuda": 5.0, "cuda+": 5.0, "rpc": 8.0, "cpu": 14.5}


def test_no_bound_is_looser_than_it_was() -> None:
    worst = {key: max(value) for key, value in errors().items()}
    print(*(f"{key}: {value[0]:+.1%} {value[1]}" for key, value in sorted(worst.items())), sep="\n")
    loose = {key: value for key, value in worst.items() if value[0] * 100 > CEILINGS[key]}
    assert not loose
    assert worst.keys() == CEILINGS.keys()


def test_half_of_all_buffers_are_bounded_closely() -> None:
    for key, value in errors().items():
        if key[0] != "qwen3":  # dense: the bound has to cover wider feed-forward layers
            assert median(e for e, _ in value) * 100 <= MEDIANS[key[1]], key


def test_weights_are_the_engines_to_the_byte() -> None:
    checked = 0
    for row in rows():
        shape = row.shape
        device = [0] * len(row.devices)
        host = shape.input.cpu
        for layer in shape.layers:
            k = row.owned[layer.index]
            if k is None:
                host += layer.dense.cpu + layer.bundle.cpu
                continue
            device[k] += layer.dense.on(row.backend)
            if row.resident[layer.index]:
                device[k] += layer.bundle.on(row.backend)
            else:
                host += layer.bundle.cpu
        for k in range(len(device)):
            device[k] += shape.per_device.on(row.backend) if k in row.owned[:-1] else 0
        if row.owned[-1] is None:
            host += shape.output.cpu
        else:
            device[row.owned[-1]] += shape.output.on(row.backend)
        for ours, theirs in zip([*device, host], [*(d[0] for d in row.devices), row.host[0]], strict=True):
            # whole MiB of two buffer types of the host, each rounded down
            assert 0 <= ours // row.unit - theirs <= (row.mib and not device), (row.model, row.tag)
            checked += 1
    assert checked == 2870


def flash(split: tuple[int, ...], k: int, **settings: Any) -> int:
    """A DeepSeek-V4-Flash bound in MiB: CUDA, 200K, ub 4096, all experts in host memory unless said otherwise."""
    shape = shapes()[FLASH_Q8]
    owned = owners(shape.n_layer, split)
    own = [i for i, o in enumerate(owned) if o == k]
    s = Settings(**({"n_ctx_per_stream": 204800, "n_batch": 4096, "n_ubatch": 4096} | settings))
    size = compute.device_compute_bytes(
        shape,
        s,
        backend="cuda",
        slots=range(own[0], own[-1] + 1),
        first=k == 0,
        output=owned[-1] == k,
        n_devices=len(split),
        resident_here=False,
        host_here=True,
        host_anywhere=True,
        override=True,
        largest_host_expert_bytes=1088 * MIB,
    )
    return size // MIB


# (split, device, context, ub, engine's MiB) on RPC servers that accept offloaded operations as CUDA does; that setup
# gives all rows of later CUDA devices to 1 MiB. The first layer of the device decides: 20 and 22 have ratio 4.
OFFLOADING_RPC = (
    ((21, 23), 1, 204800, 4096, 3484),
    ((22, 22), 1, 204800, 4096, 3214),
    ((20, 24), 1, 204800, 4096, 3218),
    ((23, 21), 1, 204800, 4096, 3480),
    ((21, 23), 1, 147456, 4096, 3032),
    ((21, 23), 1, 204800, 2048, 1734),
    ((21, 23), 1, 204800, 512, 482),
    ((10, 34), 1, 229376, 4096, 3430),
    ((20, 24), 1, 262144, 2048, 2090),
    ((21, 23), 1, 131072, 4096, 2680),
    ((21, 23), 1, 57344, 4096, 2642),
    ((10, 34), 1, 81920, 2048, 1227),
    ((20, 24), 0, 204800, 2048, 2209),
    ((21, 23), 1, 1048576, 4096, 12208),
)


@pytest.mark.parametrize(("split", "k", "n_ctx", "ub", "engine"), OFFLOADING_RPC)
def test_deepseek4_splits_that_the_rows_do_not_have(split: Any, k: int, n_ctx: int, ub: int, engine: int) -> None:
    bound = flash(split, k, n_ctx_per_stream=n_ctx, n_ubatch=ub)
    assert engine * 0.99 <= bound <= engine * 1.045


def test_deepseek4_at_200k_is_within_two_percent_on_every_card() -> None:
    assert [flash((1,), 0)] == [pytest.approx(3382, rel=0.02)]
    assert [flash((1, 1), k) for k in (0, 1)] == [pytest.approx(x, rel=0.02) for x in (3338, 3214)]
    assert [flash((1, 1, 1, 1), k) for k in range(4)] == [pytest.approx(x, rel=0.02) for x in (3318, 3460, 3194, 3460)]


def test_a_drafter_that_taps_the_last_layers_costs_their_owner_memory() -> None:
    with_drafter = {"drafter_type": "draft-dspark", "draft_n_max": 5, "n_ctx_per_stream": 131072}
    assert flash((22, 22), 1, **with_drafter) >= 2638 > flash((22, 22), 1, n_ctx_per_stream=131072)
    assert flash((22, 22), 0, **with_drafter) == flash((22, 22), 0, n_ctx_per_stream=131072)


def test_weights_and_cache_of_a_drafter_are_the_engines_to_the_byte() -> None:
    checked = 0
    for row in drafted():
        assert row.draft is not None
        for k, (weights, cache, _) in zip(row.draft_on, row.draft["devices"], strict=True):
            planned = draft_parts(row, k)[:2]
            if row.draft_model is None:  # the event lists the target's own weights again
                planned, weights = (0, planned[1]), 0
            assert [n // row.unit for n in planned] == [weights, cache], (row.tag, k)
            checked += 1
        apart = [k for k in range(len(row.devices)) if k not in row.draft_on]
        assert {draft_parts(row, k) for k in apart} <= {(0, 0, 0)}
        # on a CPU with AMX the layers of a drafter without a device are kept in tiles: 89 MiB more of 4,789
        if row.draft_model and not (row.mib and row.settings.drafter_device == "host"):
            stored, seen = drafter.host_bytes(row.drafted)[0] / row.unit, sum(row.draft["host"][:2])
            assert seen <= stored <= seen + (2 if row.mib else 0), row.tag
    assert checked == 78 + 86


def test_a_device_with_nothing_but_the_targets_output_computes_the_drafters_logits() -> None:
    """`-ts 34,10`: all three layers and the drafter's output on one device, 2276 MiB of compute on the other."""
    row = next(row for row in drafted() if row.tag == "dspark-200k-ub4096-ts34-10")
    n_slots = row.shape.n_layer + 1
    assert drafter.slots(row.drafted, 0, 0, 34) == range(4)
    assert not drafter.slots(row.drafted, 1, 34, n_slots)
    assert draft_parts(row, 1)[:2] == (0, 0)
    assert 2276 <= draft_parts(row, 1)[2] / MIB <= 2276 * 1.01
    own = {"backend": "rpc", "slots": range(0), "first": False, "output": False, "head": True}
    draft = replace(row.draft_shape, has_output=True)
    assert draft_compute.drafter_device_compute_bytes(row.shape, draft, row.settings, **own) == 0


@pytest.mark.parametrize(
    ("slots", "head", "mib"),
    [
        (range(2), False, 2391015424 / MIB),
        (range(2, 4), True, 2936340480 / MIB),
        (range(1, 2), False, 2936340480 / MIB),
    ],
)
def test_dspark_without_flash_attention_is_not_below_the_engine(slots: range, head: bool, mib: float) -> None:
    """204800, ub 2048 on RPC: rows that the bound covers and does not follow as closely."""
    s = Settings(n_ctx_per_stream=204800, n_ubatch=2048, flash_attn="off", drafter_type="draft-dspark", draft_n_max=5)
    bound = draft_compute.drafter_device_compute_bytes(
        shapes()[FLASH_Q8], shapes()[DSPARK], s, backend="rpc", slots=slots, first=slots[0] == 0, output=head, head=head
    )
    assert mib <= bound / MIB <= mib * 1.25


# (context, ub, engine's MiB): GLM-4.5-Air on the second of two RPC devices, all experts in host memory, full logits.
# What the mask leaves free decides where the head's input lies.
GLM_HEADS = (
    (24576, 2048, 1537), (25088, 2048, 1248), (57344, 4096, 2496), (57600, 2048, 1248), (58368, 2048, 1540),
    (61440, 512, 388), (65536, 4096, 3136), (65792, 2048, 1569), (66048, 2048, 1505), (163840, 512, 376),
)  # fmt: skip


@pytest.mark.parametrize(("n_ctx", "ub", "engine"), GLM_HEADS)
def test_the_head_of_glm_on_rpc_at_contexts_that_the_rows_do_not_have(n_ctx: int, ub: int, engine: int) -> None:
    shape = shapes()["GLM-4.5-Air-Q4_K_M"]
    s = Settings(n_ctx_per_stream=n_ctx, n_batch=ub, n_ubatch=ub)
    bound = bound_of(shape, s, "rpc", 1, resident_here=False, n_outputs=ub)
    assert engine * 0.99 <= bound / MIB <= engine * 1.15


def test_scores_take_the_offloaded_experts_in_only_when_they_are_large() -> None:
    """More context never needs less, and from two copies on the copy costs nothing beside the scores."""
    shape = shapes()["Mixtral-8x7B-Instruct-v0.1-Q4_K_M"]
    sizes = []
    for n_ctx in range(2048, 34816, 2048):
        s = Settings(n_ctx_per_stream=n_ctx, n_ubatch=512, flash_attn="off")
        flags = {"n_devices": 1, "output": True, "resident_here": False}
        sizes.append(bound_of(shape, s, "cuda", 0, **flags))
    assert sizes == sorted(sizes)
    assert 2156 <= sizes[15] / MIB <= 2156 * 1.06


def test_no_slots_no_buffer() -> None:
    s = Settings(n_ctx_per_stream=8192)
    target, draft = shapes()[FLASH_Q8], shapes()[DSPARK]
    args = {"backend": "cuda", "slots": range(0), "first": False, "output": False}
    assert draft_compute.drafter_device_compute_bytes(target, draft, s, **args) == 0


def test_output_buffer_is_logits_and_tapped_states() -> None:
    shape, draft = shapes()[FLASH_Q8], shapes()[DSPARK]
    s = Settings(n_ctx_per_stream=204800, n_batch=4096, n_ubatch=4096, draft_n_max=5, drafter_type="draft-dspark")
    assert compute.output_buffer_bytes(shape, s, draft) == 6 * 129280 * 4 + 3 * 64 * MIB
    assert compute.output_buffer_bytes(shape, replace(s, draft_n_max=0, drafter_type=None), None) == 129280 * 4
    four = replace(s, n_parallel=4, n_ctx_per_stream=51200)
    assert compute.output_buffer_bytes(shape, four, draft) == 24 * 129280 * 4 + 3 * 64 * MIB


MOE = sorted(name for name, shape in shapes().items() if shape.is_moe and shape.arch != "dflash")


def bound_of(shape: ModelShape, s: Settings, backend: str, k: int, **flags: Any) -> int:
    half = shape.n_layer // 2
    known = {
        "first": k == 0,
        "output": k == 1,
        "n_devices": 2,
        "resident_here": True,
        "host_here": True,
        "host_anywhere": True,
        "override": True,
        "largest_host_expert_bytes": max(layer.largest_expert_bytes for layer in shape.layers),
    }
    slots = range(half) if k == 0 else range(half, shape.n_layer + 1)
    return compute.device_compute_bytes(shape, s, backend=backend, slots=slots, **(known | flags))


@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize("backend", ["cuda", "rpc"])
def test_a_wider_micro_batch_never_needs_less(name: str, backend: str) -> None:
    shape = shapes()[name]
    for n_ctx in (4096, 16384, 65536, 131072, 204800, 262144):
        for k in (0, 1):
            sizes = [
                bound_of(shape, Settings(n_ctx_per_stream=n_ctx, n_batch=8192, n_ubatch=ub), backend, k)
                for ub in (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
            ]
            assert sizes == sorted(sizes), (n_ctx, k)


@pytest.mark.parametrize("name", [n for n in MOE if not n.startswith(("DeepSeek", "Qwen3-Next"))])
def test_an_unknown_architecture_gets_no_smaller_bound_than_a_known_one(name: str) -> None:
    known = shapes()[name]
    unknown = replace(known, arch="not-in-the-table")
    for backend in ("cuda", "rpc"):
        for ub in (512, 4096):
            for k in (0, 1):
                s = Settings(n_ctx_per_stream=32768, n_batch=4096, n_ubatch=ub)
                for flags in ({}, {"resident_here": False}, {"host_here": False, "host_anywhere": False}):
                    assert bound_of(unknown, s, backend, k, **flags) >= bound_of(known, s, backend, k, **flags)


@pytest.mark.parametrize("name", MOE)
def test_flags_that_cost_memory(name: str) -> None:
    shape = shapes()[name]
    s = Settings(n_ctx_per_stream=131072, n_batch=2048, n_ubatch=512)
    plain = bound_of(shape, s, "cuda", 1)
    assert bound_of(shape, s, "cuda", 1, override=False) > plain  # pipeline copies
    assert bound_of(shape, replace(s, type_k="q8_0", type_v="q8_0"), "cuda", 1) > plain
    assert bound_of(shape, replace(s, flash_attn="off"), "cuda", 1) > plain
    assert bound_of(shape, s, "cuda", 0) > bound_of(shape, s, "cuda", 0, host_anywhere=False, host_here=False)
    assert bound_of(shape, s, "rpc", 0) == bound_of(shape, s, "rpc", 0, largest_host_expert_bytes=0)  # no offload


def test_quantised_cache_is_copied_whole_on_cuda_only() -> None:
    shape = shapes()["Qwen3-30B-A3B-Q4_K_M"]
    assert {layer.attention for layer in shape.layers} == {Attention.FULL}
    s = Settings(n_ctx_per_stream=131072, n_ubatch=512)
    q8 = replace(s, type_k="q8_0", type_v="q8_0")
    only_host = {"resident_here": False}
    copies = 131072 * (512 + 512) * 2
    assert bound_of(shape, q8, "cuda", 1, **only_host) - bound_of(shape, s, "cuda", 1, **only_host) == copies
    assert bound_of(shape, q8, "rpc", 1, **only_host) == bound_of(shape, s, "rpc", 1, **only_host)


def test_four_unified_slots_see_the_whole_context_in_every_mask() -> None:
    shape = shapes()["Qwen3-30B-A3B-Q4_K_M"]
    s = Settings(n_ctx_per_stream=8192, n_parallel=4, n_ubatch=2048)
    assert kv.context(replace(s, kv_unified=True)).n_seq == 32768
    apart, unified = bound_of(shape, s, "cuda", 1), bound_of(shape, replace(s, kv_unified=True), "cuda", 1)
    assert unified - apart == (32768 - 8192) * 2 * 2048
