"""The real engine under our keeper: every flag is taken, the wait ends at an answer, stop leaves nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.errors import EngineFailed
from launcher.facts.engine import probe
from launcher.serve import alive, argv, native, rpc, server, state, wait
from launcher.structs import Activity, Launch, Plan, Rule, Slug
from tests.engine.ports import free_port
from tests.serve_builders import plan, rpc_device, settings, slug

pytestmark = pytest.mark.engine
EXPERTS = r"ffn_(up|down|gate|gate_up)_(ch|)exps"


def launch(engine_path: Path, p: Plan, s: Slug | None = None) -> Launch:
    return argv.build(
        p,
        engine=probe(str(engine_path), "--engine"),
        host="127.0.0.1",
        port=free_port(),
        alias="tiny",
        slug=s,
        base_env=os.environ,
        empty_config=str(state.empty_config_dir()),
    )


@pytest.fixture
def two_devices(engine_path: Path, tiny: Callable[[str], Path]) -> tuple[Launch, rpc.RpcSpawn]:
    first, second = rpc_device(0, free_port()), rpc_device(1, free_port())
    rules = (
        Rule(pattern=rf"^blk\.(0)\.{EXPERTS}", buffer_type=first.buffer_type),
        Rule(pattern=rf"\.{EXPERTS}", buffer_type="CPU"),
    )
    p = plan(
        first,
        second,
        model=str(tiny("tiny-qwen3moe")),
        rules=rules,
        settings=settings(n_ctx_per_stream=512, n_parallel=2),
    )
    spawn = rpc.RpcSpawn(
        hosts=(str(first.endpoint), str(second.endpoint)),
        server_path=str(engine_path.with_name("ggml-rpc-server")),
        threads=1,
    )
    return launch(engine_path, p, slug(sampling={"temperature": 0.5, "top_k": 20}, thinking=False)), spawn


def test_every_flag_is_known_to_the_engine(engine_path: Path, tmp_path: Path) -> None:
    p = plan(model=str(tmp_path / "none.gguf"), settings=settings(kv_unified=True, n_parallel=2, numa="distribute"))
    sampling = dict.fromkeys(argv.SAMPLING, 1.0)
    built = launch(engine_path, p, slug(sampling=sampling, thinking=False, chat_template="chatml"))
    assert argv.missing_flags(p, probe(str(engine_path), "--engine"), None) == ()
    done = subprocess.run(built.argv, env=dict(built.env), capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "invalid argument" not in done.stderr
    assert "error while handling" not in done.stderr
    assert "none.gguf" in done.stderr


def test_a_server_on_two_rpc_devices_lives_and_dies_whole(two_devices: tuple[Launch, rpc.RpcSpawn]) -> None:
    built, spawn = two_devices
    record = native.start(built, "demo/tiny", rpc=spawn)
    try:
        ready = wait.wait_ready(record, plan=built.plan)
        log = Path(ready.log_path).read_text()
        for device in built.plan.devices:
            assert f"{device.device.buffer_type} model buffer size" in log
        with server.client_of(ready) as client:
            assert client.models() == ("tiny",)
            assert client.props()["total_slots"] == 2
            assert client.slots()[0]["n_ctx"] == 512
            assert client.metrics()["llamacpp:prompt_tokens_total"] > 0
            assert server.answer_text(client.chat([{"role": "user", "content": "hi"}], max_tokens=4))
    finally:
        end = native.stop(record)
    assert end is not None
    assert (end.exit_code, end.reason) == (0, "stopped")
    assert not any(native.alive(p) for p in (ready.server, ready.keeper, *ready.rpc_servers))
    assert state.records() == ()


def test_with_the_keeper_killed_all_of_it_is_found_and_stopped(two_devices: tuple[Launch, rpc.RpcSpawn]) -> None:
    built, spawn = two_devices
    record = wait.wait_ready(native.start(built, "demo/tiny", rpc=spawn), plan=built.plan)
    assert record.keeper is not None
    os.kill(record.keeper.pid, signal.SIGKILL)
    (seen,) = state.survey()
    assert seen.alive
    native.stop(seen.record)
    assert not any(native.alive(p) for p in (record.server, record.keeper, *record.rpc_servers))


def test_a_lost_rpc_device_is_read_from_the_log(two_devices: tuple[Launch, rpc.RpcSpawn]) -> None:
    built, spawn = two_devices
    record = wait.wait_ready(native.start(built, "demo/tiny", rpc=spawn), plan=built.plan)
    try:
        os.kill(record.rpc_servers[1].pid, signal.SIGKILL)
        with server.client_of(record) as client, pytest.raises(server.httpx.HTTPError):
            client.chat([{"role": "user", "content": "hi"}], max_tokens=4)
        error = wait.exited(record, "answering")
        assert "a remote device is gone" in error.message
    finally:
        native.stop(record)


def test_a_damaged_model_is_named(engine_path: Path, tmp_path: Path, tiny: Callable[[str], Path]) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny("tiny-qwen3moe").read_bytes()[:-1_000_000])
    record = native.start(launch(engine_path, plan(model=str(cut))), "demo/cut")
    try:
        with pytest.raises(EngineFailed) as error:
            wait.wait_ready(record)
        assert "the model file is damaged or incomplete" in error.value.message
    finally:
        native.stop(record)


def test_an_engine_rule_for_a_device_that_is_not_there_is_named(engine_path: Path, tiny: Callable[[str], Path]) -> None:
    p = replace(plan(model=str(tiny("tiny-qwen3moe"))), rules=(Rule(pattern="x", buffer_type="CUDA7"),))
    record = native.start(launch(engine_path, p), "demo/rule")
    try:
        with pytest.raises(EngineFailed) as error:
            wait.wait_ready(record)
        assert "a rule names a device that this engine does not have" in error.value.message
    finally:
        native.stop(record)


def test_a_real_prefill_says_how_far_it_is(engine_path: Path, demo_model: Path) -> None:
    """Half read, then stopped: `status` and the line of history both say where it was."""
    p = plan(model=str(demo_model), settings=settings(n_ctx_per_stream=4096, n_batch=128, n_ubatch=128))
    built = launch(engine_path, p)
    record = wait.wait_ready(native.start(built, "demo/prefill"), plan=p)
    try:
        assert alive.activity(record).busy == 0
        prompt = "the cat sat on a mat and " * 500

        def ask() -> None:
            with contextlib.suppress(server.httpx.HTTPError), server.client_of(record) as client:
                client.complete(prompt, n_predict=4, cache_prompt=False)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        seen: list[Activity] = []
        deadline = time.monotonic() + 60
        while not (seen and seen[-1].requests and (seen[-1].requests[0].read_tokens or 0) >= 512):
            assert time.monotonic() < deadline
            begun = time.monotonic()
            seen.append(alive.activity(record))
            assert time.monotonic() - begun < 5, "the question waited for its turn"
            time.sleep(0.1)
        found = seen[-1]
        (request,) = found.requests
        with server.client_of(record) as client:
            real = len(client._http.post("/tokenize", json={"content": prompt}).json()["tokens"])
        assert request.prompt_tokens == real
        assert (found.busy, found.wedged) == (1, False)
        assert request.left_s is not None
        assert 0 < request.left_s < 300
        reads = [a.requests[0].read_tokens or 0 for a in seen if a.requests]
        assert reads == sorted(reads)
        assert len(set(reads)) > 2, "it was seen to move"
    finally:
        end = native.stop(record, grace_s=2)
    assert end is not None
    last = end.requests[-1]
    assert (last.prompt_tokens, last.ended) == (real, False)
    assert 512 <= (last.read_tokens or 0) < real
