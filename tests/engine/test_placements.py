"""A real llama-server with two loopback RPC servers as its cards: what is planned is what is allocated and computed."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from launcher.errors import Refused
from launcher.facts.engine import probe
from launcher.facts.gguf_header import read_header
from launcher.facts.load_log import LoadLog, parse_load_log
from launcher.measure.verify import audit
from launcher.planner import make_plan, owner, rules
from launcher.serve import argv
from launcher.structs import Device, Engine, Host, Inventory, Plan, Settings
from launcher.units import GIB, MIB
from tests.engine.ports import free_port

pytestmark = pytest.mark.engine

TINY = ("tiny-qwen3moe", "tiny-gpt-oss", "tiny-glm4moe", "tiny-deepseek4")
PROMPT = "The quick brown fox jumps over the lazy dog and"


def rpc_devices(endpoints: tuple[str, ...]) -> tuple[Device, ...]:
    return tuple(
        Device(
            name=f"RPC{k}",
            buffer_type=f"RPC0[{endpoint}]",
            backend="rpc",
            description="a loopback RPC server",
            total_bytes=8 * GIB,
            free_bytes=8 * GIB,
            endpoint=endpoint,
            shares_host=True,
        )
        for k, endpoint in enumerate(endpoints)
    )


def plan_for(model: Path, devices: tuple[Device, ...], **changes: Any) -> Plan:
    memory = psutil.virtual_memory()
    inventory = Inventory(
        devices=devices,
        host=Host(
            total_bytes=memory.total,
            available_bytes=memory.available,
            limited_by="MemAvailable",
            cores=os.cpu_count() or 1,
        ),
    )
    base: dict[str, Any] = {
        "n_ctx_per_stream": 512,
        "n_batch": 128,
        "n_ubatch": 64,
        "cache_ram_bytes": 0,
        "checkpoints": 1,
    }
    header = read_header(model)
    plan = make_plan(
        target=model.name, header=header, drafter=None, inventory=inventory, settings=Settings(**(base | changes))
    )
    assert plan.fits
    rules.check(plan, header)
    return plan


@contextmanager
def served(plan: Plan, engine: Engine, folder: Path, verbosity: int = 4) -> Iterator[tuple[str, Callable[[], LoadLog]]]:
    """The plan's own argv as a real process; yields its base URL and a reader of its load log."""
    port = free_port()
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    launch = argv.build(
        plan,
        engine=engine,
        host="127.0.0.1",
        port=port,
        alias="t",
        slug=None,
        base_env=dict(os.environ),
        empty_config=str(empty),
    )
    words = list(launch.argv)
    words[words.index("-lv") + 1] = str(verbosity)
    log = folder / f"server-{port}.log"
    with log.open("wb") as out:
        child = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=dict(launch.env)
        )
    try:
        base = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 120
        with httpx.Client(trust_env=False, timeout=5) as client:
            while True:
                assert child.poll() is None, log.read_text(errors="replace")[-3000:]
                assert time.monotonic() < deadline, "not ready in 120 s"
                try:
                    if client.get(f"{base}/health").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.05)
        yield base, lambda: parse_load_log(log.read_text(errors="replace"))
    finally:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def next_token(base: str) -> dict[str, float]:
    """Log-probabilities of the likeliest next tokens."""
    body = {"prompt": PROMPT, "n_predict": 1, "temperature": 0, "n_probs": 10, "cache_prompt": False}
    reply = httpx.post(f"{base}/completion", json=body, timeout=60, trust_env=False).json()
    (first,) = reply["completion_probabilities"]
    return {str(t["id"]): t["logprob"] for t in first["top_logprobs"]}


def placements(n_layer: int, moe: list[int]) -> dict[str, dict[str, Any]]:
    """Five ways to place the same model: settings by name; the odd map is one nobody would choose."""
    half = (n_layer + 1) // 2
    both = (half, n_layer + 1 - half)
    left, right = [i for i in moe if i < half], [i for i in moe if i >= half]
    return {
        "all host": {"residency": "none", "tensor_split": both},
        "all on devices": {"residency": "auto", "tensor_split": both},
        "first and last": {"residency": {"RPC0": tuple(left[:2]), "RPC1": tuple(right[-2:])}},
        "mixed": {"residency": {"RPC0": tuple(left[::2]), "RPC1": tuple(right[::2])}},
        "explicit map": {
            "residency": {"RPC0": tuple(left[1:2]), "RPC1": tuple(right[1:3])},
            "tensor_split": both,
        },
    }


@pytest.fixture(scope="module")
def engine(engine_path: Path) -> Engine:
    return probe(str(engine_path), "--engine")


@pytest.mark.parametrize("name", TINY)
def test_buffers_equal_the_plan_and_answers_do_not_depend_on_the_placement(
    name: str,
    tiny: Callable[[str], Path],
    engine: Engine,
    rpc_servers: Callable[[int], tuple[str, ...]],
    tmp_path: Path,
) -> None:
    model = tiny(name)
    devices = rpc_devices(rpc_servers(2))
    free = plan_for(model, devices)
    moe = [layer.index for layer in free.layers if layer.loaded and layer.bundle_bytes]
    reference: dict[str, float] = {}
    for label, changes in placements(free.model.n_layer, moe).items():
        plan = plan_for(model, devices, **changes)
        with served(plan, engine, tmp_path) as (base, log):
            got = next_token(base)
            assert_buffers(plan, log(), label)
        reference = reference or got
        shared = reference.keys() & got.keys()
        assert len(shared) >= 8, label
        assert max(abs(reference[t] - got[t]) for t in shared) < 1e-3, label


def assert_buffers(plan: Plan, log: LoadLog, label: str) -> None:
    """Weights and cache per device within 0.1 MiB, compute never above the plan by more than 1 %."""
    assert log.loaded
    for d in plan.devices:
        buffer, t = d.device.buffer_type, d.terms
        weights = t["dense"] + t["experts"] + t["output"]
        assert log.model_bytes.get(buffer, 0) == pytest.approx(weights, abs=0.1 * MIB), (label, d.device.name)
        assert log.kv_bytes.get(buffer, 0) == pytest.approx(t["kv"], abs=0.1 * MIB), (label, d.device.name)
        assert log.compute_bytes.get(buffer, 0) <= t["compute"] * 1.01 + 0.1 * MIB, (label, d.device.name)
    host = plan.host.terms
    others = sum(n for b, n in log.model_bytes.items() if b not in {d.device.buffer_type for d in plan.devices})
    assert others == pytest.approx(host["experts"] + host["embedding"], abs=0.1 * MIB), label
    assert audit(plan, log).ok, label


def test_20_random_splits_agree_with_the_engines_own_assignment(
    tiny: Callable[[str], Path], engine: Engine, rpc_servers: Callable[[int], tuple[str, ...]], tmp_path: Path
) -> None:
    rng = random.Random(41)
    devices = rpc_devices(rpc_servers(2))
    for draw in range(20):
        name = TINY[draw % len(TINY)]
        split = (rng.randint(1, 8), rng.randint(1, 8)) if draw % 2 else (k := rng.randint(1, 8), 9 - k)
        plan = plan_for(tiny(name), devices, residency="none", tensor_split=split)
        with served(plan, engine, tmp_path, verbosity=5) as (_, log):
            said = log().layer_devices
        names = [d.device.name for d in plan.devices]
        expected = [names[k] for k in owner.owners(plan.model.n_layer, plan.tensor_split) if k is not None]
        assert [device for _, device in said] == expected, (name, split)
        assert len(expected) == plan.model.n_layer + 1


def test_a_reversed_rule_list_is_caught_before_launch(tiny: Callable[[str], Path]) -> None:
    """And it is worth catching: the engine itself would take it without a word."""
    model = tiny("tiny-qwen3moe")
    devices = rpc_devices(("127.0.0.1:1", "127.0.0.1:2"))
    plan = plan_for(model, devices, residency={"RPC0": (0, 1), "RPC1": (7,)})
    with pytest.raises(Refused) as caught:
        rules.check(dataclasses.replace(plan, rules=plan.rules[::-1]), read_header(model))
    assert caught.value.reference == "rules-mismatch"


def test_the_demo_model_answers_the_same_wherever_its_experts_lie(
    demo_model: Path, engine: Engine, rpc_servers: Callable[[int], tuple[str, ...]], tmp_path: Path
) -> None:
    devices = rpc_devices(rpc_servers(2))
    free = plan_for(demo_model, devices)
    moe = [layer.index for layer in free.layers if layer.bundle_bytes]
    answers = {}
    for label, changes in placements(free.model.n_layer, moe).items():
        plan = plan_for(demo_model, devices, **changes)
        with served(plan, engine, tmp_path) as (base, log):
            body = {
                "messages": [{"role": "user", "content": "In one sentence, what is a computer?"}],
                "max_tokens": 16,
                "temperature": 0,
                "seed": 1,
            }
            reply = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=120, trust_env=False).json()
            answers[label] = reply["choices"][0]["message"]["content"]
            assert_buffers(plan, log(), label)
    assert len(set(answers.values())) == 1, json.dumps(answers)
    assert "computer" in answers["all host"]


def test_log_probabilities_are_finite(tiny: Callable[[str], Path], engine: Engine, tmp_path: Path) -> None:
    """Host only, no device at all: the plan that runs anywhere."""
    plan = plan_for(tiny("tiny-deepseek4"), ())
    with served(plan, engine, tmp_path) as (base, log):
        assert all(math.isfinite(p) for p in next_token(base).values())
        terms = plan.host.terms
        weights = terms["experts"] + terms["embedding"] + terms["dense"] + terms["output"]
        assert sum(log().model_bytes.values()) == pytest.approx(weights, abs=0.1 * MIB)
        assert sum(log().kv_bytes.values()) == pytest.approx(terms["kv"], abs=0.1 * MIB)
