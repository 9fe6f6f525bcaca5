"""Whether a busy server gets on, and what becomes of one that does not: real processes of the fake engine."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

from launcher.errors import EngineFailed, Refused
from launcher.render.status import screen
from launcher.serve import alive, native, state, wait
from launcher.serve.ports import free_port
from launcher.serve.reads import Reads, reads_of
from launcher.structs import RunEnd, RunRecord
from launcher.units import MIB
from launcher.workflows import attach, status
from tests.fake_server import fault_in
from tests.serve_builders import fake_launch

SLUG = "demo/fake"


def until(true: Callable[[], object], patience_s: float = 10.0) -> None:
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


Begin = Callable[..., RunRecord]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """A ready fake under a keeper that looks often; stopped at the end, whatever became of it."""
    started: list[RunRecord] = []

    def start(*words: str, wedged_s: float = 0.6, restarts: int = 0) -> RunRecord:
        launch = fake_launch(free_port("127.0.0.1"), *words)
        record = native.start(launch, SLUG, sample_s=0.1, wedged_s=wedged_s, restarts=restarts)
        started.append(record)
        return wait.wait_ready(record, tick_s=0.02)

    yield start
    for record in started:
        now = state.read(SLUG) or record
        native.stop(now, grace_s=1)
        assert not any(native.alive(p) for p in (record.server, now.server, now.keeper))


def ask(record: RunRecord) -> threading.Thread:
    """Send one prompt, and wait for nobody."""

    def post() -> None:
        with httpx.Client(trust_env=False, timeout=60) as http:
            try:
                http.post(f"http://127.0.0.1:{record.port}/completion", json={"prompt": "x"})
            except httpx.HTTPError:
                return

    thread = threading.Thread(target=post, daemon=True)
    thread.start()
    return thread


def current() -> RunRecord:
    found = state.read(SLUG)
    assert found is not None
    return found


def log_of(record: RunRecord) -> str:
    return Path(record.log_path).read_text(encoding="utf-8")


def ends(n: int) -> tuple[RunEnd, ...]:
    until(lambda: len(state.history()) >= n)
    return state.history()


def test_a_prompt_that_is_read_says_how_far_and_how_long(begin: Begin) -> None:
    record = begin("--read", "40960", "--batch-s", "0.1")
    assert alive.activity(record).busy == 0
    ask(record)
    until(lambda: alive.activity(record).busy)
    until(lambda: (alive.activity(record).requests[0].read_tokens or 0) >= 1024)
    (request,) = alive.activity(record).requests
    assert request.prompt_tokens == 40960
    assert request.read_tps is not None
    assert 0 < request.read_tps < 512 / 0.1 * 1.05
    assert request.left_s == pytest.approx((40960 - (request.read_tokens or 0)) / request.read_tps)


def test_a_long_prompt_is_never_wedged_while_batches_come(begin: Begin) -> None:
    record = begin("--read", "8192", "--batch-s", "0.2", wedged_s=0.6, restarts=1)
    asking = ask(record)
    asking.join(20)
    assert not asking.is_alive()
    assert alive.activity(record).busy == 0
    assert current().restarts == 0
    assert "no progress" not in log_of(record)


def test_one_that_answers_no_question_while_it_reads_is_judged_by_its_log(begin: Begin) -> None:
    """Builds that answer /slots between two batches: the probe waits, the server is well."""
    record = begin("--read", "2560", "--batch-s", "1.0", "--mute", wedged_s=3.0, restarts=1)
    asking = ask(record)
    until(lambda: "n_tokens =    512" in log_of(record))
    begun = time.monotonic()
    found = alive.activity(record)
    assert time.monotonic() - begun < 3, "the probe waited for its turn"
    assert (found.busy, found.wedged) == (1, False)
    assert found.requests[0].prompt_tokens == 2560
    asking.join(20)
    assert current().restarts == 0


def test_one_that_stands_still_is_named_with_for_how_long(begin: Begin) -> None:
    record = begin("--read", "8192", "--wedge-at", "1024", wedged_s=0.6)
    ask(record)
    until(lambda: alive.activity(record).wedged)
    found = alive.activity(record)
    assert found.busy == 1
    assert found.still_s is not None and found.still_s > 0.6
    assert (found.requests[0].read_tokens, found.requests[0].prompt_tokens) == (1024, 8192)
    assert re.search(r"launcher: no progress for \d", log_of(record))
    assert native.alive(record.server), "nobody allowed to restart it"


def test_silence_alone_is_no_wedge(begin: Begin) -> None:
    record = begin(wedged_s=0.3, restarts=1)
    time.sleep(1.0)
    assert alive.activity(record).still_s is None
    assert current().restarts == 0


@pytest.fixture
def cold(tmp_path: Path) -> str:
    """A file that really comes from a disk when it is not in the page cache."""
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.write(os.urandom(8 << 20))
        os.fsync(file.fileno())
    before = reads_of(state.identify(os.getpid()))
    fault_in(str(path), 0.1)
    after = reads_of(state.identify(os.getpid()))
    if after is None or not after.moved_since(before):
        pytest.skip("the disk below the temporary folder counts no reads")
    return str(path)


def test_a_cold_model_that_is_faulted_in_is_no_wedge(begin: Begin, cold: str) -> None:
    """Its first batch takes many times as long as any may stand still, and no counter of the engine moves."""
    record = begin("--read", "1024", "--cold", cold, "--cold-s", "5", wedged_s=1.0, restarts=1)
    asking = ask(record)
    until(lambda: alive.activity(record).busy)
    time.sleep(3)
    found = alive.activity(record)
    assert (found.busy, found.wedged) == (1, False)
    assert found.still_s is not None and found.still_s < 1.0
    asking.join(20)
    assert not asking.is_alive()
    assert "no progress" not in log_of(record)
    assert current().restarts == 0


def test_one_that_stands_still_after_its_model_came_is_a_wedge(begin: Begin, cold: str) -> None:
    record = begin("--read", "1024", "--cold", cold, "--cold-s", "2", "--wedge-at", "512", wedged_s=0.8)
    ask(record)
    until(lambda: alive.activity(record).wedged, 15)
    assert (alive.activity(record).still_s or 0) > 0.8


def test_without_its_keeper_a_cold_model_is_no_wedge(begin: Begin, cold: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record = begin("--read", "1024", "--cold", cold, "--cold-s", "6", "--wedge-at", "512", wedged_s=60)
    ask(record)
    until(lambda: alive.activity(record).busy)
    assert record.keeper is not None
    os.kill(record.keeper.pid, signal.SIGKILL)
    until(lambda: not native.alive(record.keeper))
    alive.forget(record)
    monkeypatch.setattr(alive, "WEDGED_S", 0.5)
    time.sleep(1)
    found = alive.activity(record)
    assert (found.wedged, found.still_s) == (False, 0.0)
    until(lambda: alive.activity(record).wedged, 20)


def test_a_few_faults_and_unknown_counters_are_no_reading() -> None:
    few = Reads(disk_bytes=MIB // 2, major_faults=3)
    assert not few.moved_since(Reads(disk_bytes=0, major_faults=0))
    assert not few.moved_since(None)
    assert not Reads(disk_bytes=None, major_faults=None).moved_since(Reads(disk_bytes=0, major_faults=0))
    assert Reads(disk_bytes=None, major_faults=99).moved_since(Reads(disk_bytes=None, major_faults=0))
    assert reads_of(None) is None


def test_without_its_keeper_a_wedge_is_still_seen(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    record = begin("--read", "8192", "--wedge-at", "512", wedged_s=60)
    ask(record)
    until(lambda: alive.activity(record).busy)
    assert record.keeper is not None
    os.kill(record.keeper.pid, signal.SIGKILL)
    until(lambda: not native.alive(record.keeper))
    alive.forget(record)
    monkeypatch.setattr(alive, "WEDGED_S", 0.3)
    until(lambda: alive.activity(record).wedged)


def test_a_wedged_one_is_started_again_once(begin: Begin) -> None:
    record = begin("--read", "8192", "--wedge-at", "1024", "--ignore-sigterm", wedged_s=0.5, restarts=1)
    ask(record)
    until(lambda: "no progress" in log_of(record))
    native._signal(record.server, 9)  # as the keeper does after its patience, which is 20 s
    (end,) = ends(1)
    assert (end.reason, end.signal, end.restarts) == ("wedged", "SIGKILL", 0)
    assert end.still_s is not None and end.still_s > 0.5
    (request,) = [r for r in end.requests if not r.ended]
    assert (request.read_tokens, request.prompt_tokens) == (1024, 8192)
    until(lambda: current().state == "ready" and current().restarts == 1)
    again = current()
    assert again.started_at == record.started_at
    assert again.server != record.server
    assert native.alive(again.server)
    ask(again)  # it wedges again, and stays as it is: once is the cap
    until(lambda: log_of(again).count("no progress") == 2)
    time.sleep(0.5)
    assert native.alive(current().server)
    assert alive.activity(again).wedged


def test_before_it_is_ready_nobody_starts_it_again() -> None:
    """The command line that waits for it gives up by its own signs: a first answer may fault in a whole model."""
    words = ("--read", "8192", "--wedge-at", "512")
    record = native.start(
        fake_launch(free_port("127.0.0.1"), *words), SLUG, sample_s=0.1, wedged_s=0.4, restarts=1
    )  # fmt: skip
    try:
        until(lambda: "listening" in log_of(record))
        ask(record)
        until(lambda: "no progress" in log_of(record))
        time.sleep(0.5)
        assert native.alive(record.server)
        assert state.note_path(SLUG).exists()
    finally:
        native.stop(record, grace_s=1)
    assert not state.note_path(SLUG).exists()


def test_one_that_crashes_on_a_prompt_is_started_again_as_often_as_allowed(begin: Begin) -> None:
    record = begin("--read", "2048", "--die-at", "1024", "--exit-code", "1", restarts=2)
    for turn in range(3):
        ask(current())
        assert len(ends(turn + 1)) == turn + 1
        if turn < 2:
            until(lambda: current().state == "ready" and native.alive(current().server))
    until(lambda: not native.alive(record.keeper))
    assert [(e.reason, e.exit_code, e.restarts) for e in state.history()] == [("crashed", 1, n) for n in range(3)]
    assert all(e.began_at == e.started_at for e in state.history()[:1])
    assert [e.began_at for e in state.history()] == sorted(e.began_at or 0 for e in state.history())
    assert current().state == "failed"


def test_one_that_cannot_be_started_again_is_left_as_failed(tmp_path: Path) -> None:
    program = tmp_path / "engine"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    launch = fake_launch(free_port("127.0.0.1"))
    record = native.start(replace(launch, argv=(str(program), *launch.argv[1:])), SLUG, sample_s=0.1, restarts=2)
    try:
        wait.wait_ready(record, tick_s=0.02)
        program.unlink()
        assert record.server is not None
        os.kill(record.server.pid, signal.SIGABRT)
        until(lambda: not native.alive(record.keeper))
        assert (current().state, current().server) == ("failed", None)
        assert f"launcher: could not be started again: cannot start {program}: No such file" in log_of(record)
        assert [e.reason for e in state.history()] == ["crashed"]
    finally:
        native.stop(record, grace_s=1)


def test_without_leave_a_crash_is_the_end(begin: Begin) -> None:
    record = begin("--read", "2048", "--die-at", "512", "--exit-code", "137")
    ask(record)
    (end,) = ends(1)
    assert (end.reason, end.exit_code) == ("crashed", 137)
    assert "host RAM" in end.cause
    assert end.requests[-1].read_tokens == 512
    assert end.samples and end.samples[-1].rss_bytes
    assert (end.samples[-1].host_available_bytes or 0) > 1 << 20
    until(lambda: not native.alive(record.keeper))


def test_one_that_somebody_ended_is_not_started_again(begin: Begin) -> None:
    record = begin(restarts=3)
    assert record.server is not None
    native._signal(record.server, 15)
    (end,) = ends(1)
    assert end.reason == "crashed"
    until(lambda: not native.alive(record.keeper))
    assert current().restarts == 0


def test_stop_ends_one_that_is_being_started_again(begin: Begin) -> None:
    """Nothing is left, whichever of the two was faster."""
    record = begin("--read", "2048", "--die-at", "512", "--exit-code", "1", restarts=5)
    ask(record)
    ends(1)
    native.stop(record, grace_s=2)
    assert state.records() == ()
    assert not native.alive(record.keeper)
    with httpx.Client(trust_env=False, timeout=1) as http, pytest.raises(httpx.ConnectError):
        http.get(f"http://127.0.0.1:{record.port}/health")


# ------------------------------------------------------------------------------------- through `status`


def test_status_tells_reading_from_wedged_and_check_fails_for_the_second_alone(begin: Begin) -> None:
    record = begin("--read", "4096", "--batch-s", "0.2", "--wedge-at", "3072", wedged_s=1.0)
    ask(record)
    until(lambda: (alive.activity(record).requests or (None,))[0])
    (reading,) = status.servers()
    assert (reading["state"], reading["healthy"], reading["requests"]) == ("ready", True, 1)
    assert status.verdict((reading,), check=True) == 0
    until(lambda: status.servers()[0]["state"] == "wedged")
    (wedged,) = status.servers()
    assert (wedged["healthy"], wedged["activity"].requests[0].read_tokens) == (False, 3072)
    with pytest.raises(EngineFailed) as refused:
        status.verdict((wedged,), check=True)
    assert refused.value.message.startswith("demo/fake is wedged for ")


def test_a_process_that_hangs_altogether_is_named_too(begin: Begin) -> None:
    """Health included: it was healthy, took a prompt, and answers nothing any more."""
    record = begin("--read", "65536", "--batch-s", "0.1", wedged_s=1.0)
    assert record.server is not None
    ask(record)
    until(lambda: "n_tokens =   1024" in log_of(record))
    os.kill(record.server.pid, signal.SIGSTOP)
    try:
        until(lambda: "no progress" in log_of(record), patience_s=20)
        (found,) = status.servers()
        assert (found["state"], found["healthy"]) == ("wedged", False)
        assert found["activity"].requests[0].prompt_tokens == 65536
    finally:
        os.kill(record.server.pid, signal.SIGCONT)
    until(lambda: not alive.activity(record).wedged)
    assert status.servers()[0]["healthy"], "it got on"


# --------------------------------------------------------------------- between a crash and what follows


def answering(port: int) -> list[int]:
    """Processes of the fake engine on that port, by their command lines."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(port) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def down(begin: Begin) -> Iterator[Callable[..., RunRecord]]:
    """A server that crashed, its keeper alive and late: it has not seen the end yet."""
    late: list[RunRecord] = []

    def crash(*words: str, restarts: int = 3) -> RunRecord:
        record = begin(*words, restarts=restarts)
        assert record.keeper is not None and record.server is not None
        os.kill(record.keeper.pid, signal.SIGSTOP)
        late.append(record)
        os.kill(record.server.pid, signal.SIGABRT)
        until(lambda: not native.alive(record.server))
        return record

    yield crash
    for record in late:
        go_on(record)


def go_on(record: RunRecord) -> None:
    if record.keeper is not None and native.alive(record.keeper):
        os.kill(record.keeper.pid, signal.SIGCONT)


def stopping(record: RunRecord) -> threading.Thread:
    thread = threading.Thread(target=native.stop, args=[record])
    thread.start()
    return thread


def test_a_crash_that_its_keeper_has_not_seen_is_still_a_server_of_ours(down: Callable[..., RunRecord]) -> None:
    record = down()
    assert [(s.record.slug, s.alive, s.how) for s in state.survey()] == [(SLUG, True, "down")]
    assert state.running() == (record,), "a switch to another target would load beside what comes again"
    (found,) = status.servers()
    assert (found["state"], found["healthy"], found["uptime_s"]) == ("down", False, None)
    with pytest.raises(EngineFailed) as refused:
        status.verdict((found,), check=True)
    assert refused.value.message == "demo/fake is down"
    shown = [str(line) for line in screen([found])]
    assert shown[0].startswith("down ") and "its keeper writes down how" in shown[1]
    with pytest.raises(Refused) as twice:
        native.start(fake_launch(free_port("127.0.0.1")), SLUG)
    assert twice.value.reference == "already-running"
    go_on(record)
    until(lambda: current().state == "ready" and current().restarts == 1)
    assert [s.how for s in state.survey()] == ["running"]


def test_stop_between_crash_and_restart_leaves_nothing(down: Callable[..., RunRecord]) -> None:
    record = down("--ignore-sigterm")
    thread = stopping(record)
    until(lambda: state.stop_asked(record))
    go_on(record)
    thread.join(30)
    assert not thread.is_alive()
    time.sleep(0.3)
    assert (state.records(), answering(record.port), native.alive(record.keeper)) == ((), [], False)
    (end,) = state.history()
    assert (end.reason, end.signal) == ("crashed", "SIGABRT"), "it had gone before anybody asked"


LATE = """
import os, time
from launcher.serve import evidence, state
update = state.update
def slow(record, **changes):
    if changes.get("state") == "starting":
        open(os.environ["TEST_LATE"], "w").close()
        time.sleep(1.0)
    return update(record, **changes)
state.update = slow
"""


def test_stop_of_one_that_is_about_to_be_started_again_and_will_not_obey(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper has decided already, and nobody can write that an end is wanted."""
    (tmp_path / "sitecustomize.py").write_text(LATE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TEST_LATE", str(tmp_path / "late"))
    record = begin("--ignore-sigterm", restarts=3)
    assert record.server is not None

    def no_room(_record: RunRecord) -> None:
        raise Refused("state-unwritable", "no space left on device", fix="df -h")

    monkeypatch.setattr(state, "ask_stop", no_room)
    os.kill(record.server.pid, signal.SIGABRT)
    until(lambda: (tmp_path / "late").exists())
    native.stop(record, grace_s=2)
    assert (state.records(), answering(record.port), native.alive(record.keeper)) == ((), [], False)


def test_a_keeper_that_obeys_nobody_takes_its_server_with_it(begin: Begin) -> None:
    """Stopped by a debugger, say: it is killed in the end, and what it had started is looked for first."""
    record = begin()
    assert record.keeper is not None
    os.kill(record.keeper.pid, signal.SIGSTOP)
    state.update(record, server=None, state="starting")  # as it is between a start and its being written down
    native.stop(record, grace_s=0.2)
    assert (state.records(), answering(record.port), native.alive(record.keeper)) == ((), [], False)


def test_attach_waits_for_one_that_is_started_again(down: Callable[..., RunRecord]) -> None:
    class View:
        def loading(self, *_: object) -> None:
            pass

        def left(self, record: RunRecord) -> None:
            raise AssertionError(record)

    record = down()
    threading.Timer(0.3, go_on, [record]).start()
    found = attach.run(SLUG, View())
    assert found.record.server != record.server
    assert native.alive(found.record.server)
