"""Waiting for real processes: what counts as ready, as progress, and as which failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.errors import EngineFailed
from launcher.serve import native, server, state, wait
from launcher.serve.causes import known_cause
from launcher.serve.ports import free_port
from launcher.structs import RunRecord
from launcher.units import MIB
from tests.fake_server import FAILURES
from tests.serve_builders import FAKE_SERVER, card, device_plan, fake_launch, plan


@pytest.fixture
def begin() -> Iterator[Callable[..., RunRecord]]:
    """Start the fake; whatever was started is stopped at the end."""
    started: list[RunRecord] = []

    def start(*words: str) -> RunRecord:
        started.append(native.start(fake_launch(free_port("127.0.0.1"), *words), "demo/fake", sample_s=0.1))
        return started[-1]

    yield start
    for record in started:
        native.stop(record, grace_s=1)
        assert not native.alive(record.server)
        assert not native.alive(record.keeper)


def ready(record: RunRecord, **options: object) -> RunRecord:
    return wait.wait_ready(record, **({"tick_s": 0.02} | options))


def refused(record: RunRecord, **options: object) -> EngineFailed:
    with pytest.raises(EngineFailed) as error:
        ready(record, **options)
    assert error.value.exit_code == 8
    assert error.value.fix
    return error.value


def test_ready_is_marked_and_the_stages_are_told(begin: Callable[..., RunRecord]) -> None:
    told: list[tuple[str, int, int | None, float]] = []
    record = begin("--load-s", "0.5")
    found = ready(record, total_bytes=8 * MIB, on_progress=lambda *told_now: told.append(told_now))
    assert (found.state, state.read("demo/fake")) == ("ready", found)
    assert found.ready_at is not None
    assert found.ready_at > found.started_at
    stages = list(dict.fromkeys(stage for stage, *_ in told))
    assert stages == ["starting", "loading", "answering"]
    loaded = [bytes_ for _, bytes_, _, _ in told]
    assert loaded == sorted(loaded)
    assert max(loaded) <= 8 * MIB
    assert {total for _, _, total, _ in told} == {8 * MIB}


def test_a_load_longer_than_the_patience_is_fine_while_it_moves(begin: Callable[..., RunRecord]) -> None:
    assert ready(begin("--load-s", "1.2"), stall_s=0.4).state == "ready"


def test_a_load_that_stands_still_is_given_up_with_its_stage(begin: Callable[..., RunRecord]) -> None:
    record = begin("--load-s", "60", "--silent")
    error = refused(record, stall_s=0.5)
    assert error.reference == "engine-stalled"
    assert "while loading" in error.message
    assert native.alive(record.server), "stopping it is the caller's business"


def test_an_end_while_loading_shows_the_last_lines_and_the_cause(begin: Callable[..., RunRecord]) -> None:
    error = refused(begin("--fail", "oom", "--load-s", "0.1"))
    assert error.reference == "engine-exited"
    assert "exit code 1" in error.message
    assert "out of memory on CUDA1" in error.message
    assert error.context.splitlines()[-2:] == [
        "main: exiting due to model loading error",
        "launcher: ended (exit code 1)",
    ]
    assert error.fix == "launcher plan TARGET --reserve CUDA1=1GiB"


def test_a_refused_argument_is_named(begin: Callable[..., RunRecord]) -> None:
    error = refused(begin("--fail", "arg"))
    assert "does not know --no-mmap" in error.message


@pytest.mark.parametrize(
    ("name", "meaning"), [("SIGKILL", "host RAM"), ("SIGILL", "built for another processor"), ("SIGSEGV", "SIGSEGV")]
)
def test_signals_are_read(begin: Callable[..., RunRecord], name: str, meaning: str) -> None:
    error = refused(begin("--hang", "--exit-after", "0.2", "--die-by", name))
    assert name in error.message
    assert meaning in error.message


def test_with_its_keeper_killed_too_an_end_is_still_noticed(begin: Callable[..., RunRecord]) -> None:
    record = begin("--hang", "--exit-after", "0.6", "--exit-code", "1")
    assert record.keeper is not None
    os.kill(record.keeper.pid, signal.SIGKILL)
    assert "nobody saw how" in refused(record).message


def test_a_stop_from_elsewhere_is_no_kernel_kill(begin: Callable[..., RunRecord]) -> None:
    record = begin("--hang", "--ignore-sigterm")
    stopper = threading.Timer(0.3, native.stop, [record, 0.2])
    stopper.start()
    error = refused(record)
    stopper.join()
    assert "stopped by somebody, SIGKILL" in error.message
    assert "host RAM" not in error.message


def test_a_server_with_another_name_is_not_ours(begin: Callable[..., RunRecord]) -> None:
    error = refused(begin("--wrong-alias"))
    assert error.reference == "wrong-alias"
    assert "somebody-else, not fake" in error.message


def test_a_second_server_on_the_same_port_is_noticed(begin: Callable[..., RunRecord]) -> None:
    """Engines share a port silently: health 200 may come from the other one."""
    record = begin("--load-s", "1")
    words = ["--host", record.host, "--port", str(record.port), "--alias", "fake"]
    other = subprocess.Popen([sys.executable, FAKE_SERVER, *words], stderr=subprocess.DEVNULL)
    try:
        error = refused(record)
        assert error.reference == "port-shared"
        assert f"pid {other.pid}" in error.message
    finally:
        other.kill()
        other.wait()


def test_a_second_server_that_comes_while_the_first_answers_is_noticed(begin: Callable[..., RunRecord]) -> None:
    """It may be the one that gave the answer."""
    record = begin()
    others: list[subprocess.Popen[bytes]] = []

    def come(stage: str, *_: object) -> None:
        if stage == "answering" and not others:
            words = ["--host", record.host, "--port", str(record.port), "--alias", "fake"]
            others.append(subprocess.Popen([sys.executable, FAKE_SERVER, *words], stderr=subprocess.PIPE))
            assert others[0].stderr is not None
            others[0].stderr.readline()

    try:
        assert refused(record, on_progress=come).reference == "port-shared"
    finally:
        others[0].kill()
        others[0].communicate()


@pytest.mark.parametrize("reply", [{}, {"choices": []}, {"choices": [{}]}, {"choices": None, "usage": 3}])
def test_what_is_no_chat_reply_says_nothing(reply: dict[str, object]) -> None:
    assert not server.said_something(reply)
    assert server.said_something({**reply, "usage": {"completion_tokens": 1}})


@pytest.mark.parametrize(
    ("how", "what"), [("error", "decode failed"), ("empty", "empty answer"), ("garbage", "first question failed")]
)
def test_healthy_but_mute_is_not_ready(begin: Callable[..., RunRecord], how: str, what: str) -> None:
    error = refused(begin("--no-answer", how))
    assert error.reference == "engine-no-answer"
    assert what in error.message


def test_an_answer_that_never_comes_is_given_up(begin: Callable[..., RunRecord]) -> None:
    error = refused(begin("--no-answer", "never"), stall_s=0.5)
    assert (error.reference, "while answering" in error.message) == ("engine-stalled", True)


def test_a_thought_is_an_answer(begin: Callable[..., RunRecord]) -> None:
    assert ready(begin("--thinks")).state == "ready"


def test_a_deep_prompt_is_a_stage_of_its_own_and_marks_nothing(begin: Callable[..., RunRecord]) -> None:
    told: list[str] = []
    record = begin("--batch-s", "0.01")
    wait.wait_answer(record, tick_s=0.02)
    wait.prove(record, range(1, 4097), tick_s=0.02, on_progress=lambda stage, *_: told.append(stage))
    assert set(told) == {"proving 4,096 tokens"}
    assert Path(record.log_path).read_text().count("n_tokens = 4096, truncated") == 1
    stored = state.read("demo/fake")
    assert stored is not None
    assert (stored.state, stored.ready_at) == ("starting", None)
    assert wait.mark_ready(record).state == "ready"


def unproven(record: RunRecord, n_tokens: int = 2048, **options: object) -> EngineFailed:
    wait.wait_answer(record, tick_s=0.02)
    with pytest.raises(EngineFailed) as error:
        wait.prove(record, range(1, n_tokens + 1), **({"tick_s": 0.02} | options))  # type: ignore[arg-type]
    return error.value


def test_an_end_in_the_first_deep_prompt_is_told_as_such(begin: Callable[..., RunRecord]) -> None:
    record = begin("--die-at", "1024", "--fail", "pool", "--die-by", "SIGABRT", "--batch-s", "0.01")
    error = unproven(record)
    assert error.reference == "engine-exited"
    assert "ended while proving 2,048 tokens (SIGABRT): out of memory on CUDA1" in error.message
    cause = wait.cause_of(record)
    assert cause is not None
    assert (cause.key, cause.text) == ("device-memory", "out of memory on CUDA1")


def test_a_prompt_that_was_cut_proves_nothing(begin: Callable[..., RunRecord]) -> None:
    error = unproven(begin("--deaf", "--batch-s", "0.01"))
    assert error.reference == "engine-no-answer"
    assert "of its first prompt of 2,048 tokens it says to have read 2047" in error.message


def test_a_deep_prompt_that_stands_still_is_given_up(begin: Callable[..., RunRecord]) -> None:
    error = unproven(begin("--wedge-at", "1024", "--batch-s", "0.01"), stall_s=0.5)
    assert (error.reference, "while proving 2,048 tokens" in error.message) == ("engine-stalled", True)


def test_an_api_key_file_is_used(begin: Callable[..., RunRecord], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k-1\n")
    record = ready(begin("--api-key-file", str(keys)))
    with server.client_of(record) as client:
        assert client.props()["total_slots"] == 1
        assert client.slots()[0]["n_ctx"] == 2048
        assert server.answer_text(client.chat([{"role": "user", "content": "hello"}], max_tokens=3)) == "hi"


def test_ctrl_c_passes_through_and_leaves_the_rest_to_the_caller(begin: Callable[..., RunRecord]) -> None:
    record = begin("--hang")
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        ready(record)
    assert native.alive(record.server)


def test_our_own_questions_are_no_progress() -> None:
    before = wait.Signs(10 * MIB, 5 * MIB, 1.0, 100, 0)
    assert not replace(before, rss_bytes=10 * MIB + 9000, read_bytes=5 * MIB + 900_000, cpu_s=1.9).moved_since(before)
    for change in ({"rss_bytes": 12 * MIB}, {"read_bytes": 6 * MIB}, {"cpu_s": 2.1}, {"log_bytes": 101}):
        assert replace(before, **change).moved_since(before)


# ------------------------------------------------------------------------------------------- causes


@pytest.mark.parametrize(
    ("log", "key"),
    [
        (FAILURES["oom"], "device-memory"),
        (FAILURES["pinned"], "pinned-memory"),
        (FAILURES["arg"], "unknown-flag"),
        (FAILURES["disguise"], "device-memory-disguised"),
        (FAILURES["pool"], "device-memory"),
        (FAILURES["cublas"], "device-memory"),
        ("ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 3545235456", "device-memory"),
        ("error loading model: unable to allocate CPU buffer", "host-memory"),
        ("error loading model: unable to allocate CUDA_Host buffer", "pinned-memory"),
        ("E start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8030", "port-busy"),
        ("tensor 'x' data is not within the file bounds, model is corrupted or incomplete", "incomplete-model"),
        ("error loading model: unknown model architecture: 'deepseek9'", "unknown-architecture"),
        ('error while handling argument "-ot": unknown buffer type\n', "unknown-buffer"),
        ('error while handling argument "-fa": unknown value for --flash-attn: -ctk\n', "bad-value"),
        ("x: error while loading shared libraries: libcudart.so.12: cannot open", "missing-library"),
        ("Remote RPC server crashed or returned malformed response", "rpc-lost"),
        ("CUDA error: an illegal memory access was encountered", "device-error"),
        ("srv load_model: failed to load model, '/m.gguf'", "load-failed"),
        ("all is well", None),
    ],
)
def test_causes(log: str, key: str | None) -> None:
    found = known_cause(log, 1, None)
    assert (found.key if found else None) == key
    assert found is None or (found.text and found.fix and "{" not in found.text + found.fix)


def test_a_disguise_names_the_card_with_the_least_headroom() -> None:
    tight = device_plan(card("CUDA1"), {"dense": 23985 * MIB, "margin": 0})
    found = known_cause(FAILURES["disguise"], 1, None, plan(card("CUDA0"), tight))
    assert found is not None
    assert "probably out of card memory" in found.text
    assert "planned headroom of CUDA1: 140 MiB" in found.text


def test_a_kernel_kill_shows_the_host_budget() -> None:
    found = known_cause("", None, "SIGKILL", plan())
    assert found is not None
    assert "planned 11.0 of 32.0 GiB" in found.text
    assert found.fix.startswith("launcher preflight demo/smol-moe")


def test_a_client_asks_loopback_when_the_server_listens_everywhere() -> None:
    bases = [server.Client(host, 1).base_url for host in ("0.0.0.0", "::", "::1", "192.0.2.1")]
    assert bases == ["http://127.0.0.1:1", "http://[::1]:1", "http://[::1]:1", "http://192.0.2.1:1"]


def test_health_of_nobody_is_zero_at_once() -> None:
    started = time.monotonic()
    with server.Client("127.0.0.1", free_port("127.0.0.1")) as client:
        assert client.health() == 0
    assert time.monotonic() - started < 1
