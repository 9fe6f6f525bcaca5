"""Starting, keeping, finding and stopping real processes, whoever of them is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from launcher.errors import EngineFailed, Refused
from launcher.serve import native, state
from launcher.serve.ports import free_port
from launcher.serve.rpc import RpcSpawn
from launcher.structs import ProcessId, RunRecord
from tests.serve_builders import fake_launch

SLUG = "demo/fake"


def below(pid: int) -> set[int]:
    return {p.pid for p in psutil.Process(pid).children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


@pytest.fixture(autouse=True)
def nothing_stays(launcher_home: Path) -> Iterator[None]:
    """Whatever a test started is gone after it: looked for by the test's own home in every environment."""
    before = below(os.getpid())
    yield
    until(lambda: not mine(launcher_home) - {os.getpid()} and below(os.getpid()) <= before)


def mine(home: Path) -> set[int]:
    found = set()
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and str(home) in process.environ().values():
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


def words_of(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


def until(true: Callable[[], object], patience_s: float = 8.0) -> None:
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def begin(*words: str, slug: str = SLUG, rpc: RpcSpawn | None = None) -> RunRecord:
    # The fake inherits the test's home so that a stray one is found.
    launch = fake_launch(free_port("127.0.0.1"), *words, LAUNCHER_HOME=os.environ["LAUNCHER_HOME"])
    return native.start(launch, slug, rpc=rpc, sample_s=0.1)


def open_port(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def listening(record: RunRecord) -> bool:
    return open_port(record.port)


def pid_of(process: ProcessId | None) -> int:
    assert process is not None
    return process.pid


def test_the_last_memory_sample_is_from_before_the_end_was_asked_for() -> None:
    record = begin("--shrink", "80")
    until(lambda: "model loaded" in native.tail(record.log_path))
    time.sleep(0.5)
    end = native.stop(record)
    assert end is not None
    assert (end.last_rss_bytes or 0) > 80 << 20


def test_start_runs_the_server_in_its_own_group_under_a_keeper_and_stop_ends_both() -> None:
    record = begin()
    assert record == state.read(SLUG)
    assert native.live(record)
    assert native.alive(record.keeper)
    server = pid_of(record.server)
    assert os.getpgid(server) == server == os.getsid(server)
    assert os.getsid(pid_of(record.keeper)) != os.getsid(0)
    until(lambda: "model loaded" in native.tail(record.log_path))
    time.sleep(0.3)
    end = native.stop(record)
    assert end is not None
    assert (end.reason, end.signal, end.pid) == ("stopped", "SIGTERM", server)
    assert (end.last_rss_bytes or 0) > 1 << 20
    assert state.history() == (end,)
    assert f"launcher: ended (SIGTERM), asked for by pid {os.getpid()}, " in native.tail(record.log_path)
    assert state.records() == ()
    assert not native.alive(record.server)
    assert not native.alive(record.keeper)


def test_stop_again_and_stop_of_a_stranger_do_no_harm() -> None:
    record = begin()
    native.stop(record)
    native.stop(record)
    assert len(state.history()) == 1
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        wrong = replace(record, server=ProcessId(pid=stranger.pid, create_time=1.0), keeper=None)
        native.stop(wrong)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_server_that_ignores_sigterm_is_killed_with_its_children() -> None:
    record = begin("--ignore-sigterm", "--child")
    until(lambda: below(pid_of(record.server)))
    children = below(pid_of(record.server))
    until(lambda: listening(record))
    started = time.monotonic()
    end = native.stop(record, grace_s=0.5)
    assert 0.4 < time.monotonic() - started < 5
    assert end is not None
    assert (end.signal, end.reason) == ("SIGKILL", "stopped")
    until(lambda: not any(psutil.pid_exists(c) and psutil.Process(c).status() != "zombie" for c in children))


def test_a_crash_is_written_down_and_the_record_says_so() -> None:
    record = begin("--exit-after", "0.2", "--exit-code", "3")
    state.update(record, state="ready")
    until(lambda: state.end_of(record))
    until(lambda: not native.alive(record.keeper))
    (seen,) = state.survey()
    assert (seen.alive, seen.how, seen.record.state) == (False, "crashed (exit code 3)", "failed")
    assert seen.end is not None
    assert seen.end.ended_at >= record.started_at


def test_an_end_before_ready_is_a_failed_start_and_the_slug_can_be_started_again() -> None:
    record = begin("--fail", "arg")
    until(lambda: state.end_of(record))
    assert state.history()[-1].reason == "start failed"
    until(lambda: not native.alive(record.keeper))
    again = begin()
    assert again.started_at > record.started_at
    assert again.log_path != record.log_path
    native.stop(again)


def test_a_signal_is_named() -> None:
    record = begin("--exit-after", "0.1", "--die-by", "SIGABRT")
    until(lambda: state.end_of(record))
    assert (state.history()[-1].signal, state.history()[-1].exit_code) == ("SIGABRT", None)
    until(lambda: not native.alive(record.keeper))


def test_with_the_keeper_killed_the_server_is_still_found_and_stopped() -> None:
    record = begin()
    os.kill(pid_of(record.keeper), signal.SIGKILL)
    until(lambda: not native.alive(record.keeper))
    (seen,) = state.survey()
    assert seen.alive
    end = native.stop(record)
    assert end is not None
    assert (end.reason, end.exit_code, end.signal) == ("stopped", None, None)
    assert state.survey() == ()


def test_with_keeper_and_server_killed_nobody_saw_how() -> None:
    record = begin()
    os.kill(pid_of(record.keeper), signal.SIGKILL)
    until(lambda: not native.alive(record.keeper))
    os.kill(pid_of(record.server), signal.SIGKILL)
    until(lambda: not native.alive(record.server))
    assert [s.how for s in state.survey()] == ["ended, nobody saw how"]
    assert native.stop(record) is None
    assert state.survey() == ()


def test_a_keeper_told_to_end_ends_the_server_and_ignores_a_hangup() -> None:
    record = begin()
    until(lambda: listening(record))
    os.kill(pid_of(record.keeper), signal.SIGHUP)
    os.kill(pid_of(record.keeper), signal.SIGINT)
    time.sleep(0.2)
    assert native.alive(record.keeper)
    os.kill(pid_of(record.keeper), signal.SIGTERM)
    until(lambda: not native.alive(record.keeper) and not native.alive(record.server))
    assert state.history()[-1].reason == "stopped"
    assert state.records() == ()


LAUNCH = """
import os, sys, time
from tests.unit.test_native import begin
record = begin()
print(record.server.pid, flush=True)
time.sleep(60)
"""


def test_a_killed_launcher_leaves_a_server_that_is_found_and_stopped() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCH], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    server = int(launcher.stdout.readline())
    launcher.kill()
    launcher.communicate()
    (seen,) = state.survey()
    assert seen.alive
    assert pid_of(seen.record.server) == server
    until(lambda: listening(seen.record))
    end = native.stop(seen.record)
    assert end is not None
    assert end.signal == "SIGTERM"


def test_a_taken_port_is_refused_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(Refused) as error:
            native.start(fake_launch(taken.getsockname()[1]), SLUG)
    assert error.value.reference == "port-busy"
    assert error.value.fix.startswith("--port ")
    assert state.records() == ()


def test_a_slug_that_runs_is_not_started_twice() -> None:
    record = begin()
    with pytest.raises(Refused) as error:
        begin()
    assert error.value.reference == "already-running"
    assert str(pid_of(record.server)) in error.value.message
    assert native.live(record)
    native.stop(record)


def test_two_slugs_run_beside_each_other() -> None:
    first, second = begin(), begin(slug="demo/other")
    assert {r.slug for r in state.running()} == {SLUG, "demo/other"}
    native.stop(first)
    assert [r.slug for r in state.running()] == ["demo/other"]
    native.stop(second)


def test_an_engine_that_cannot_be_started_leaves_nothing(tmp_path: Path) -> None:
    launch = fake_launch(free_port("127.0.0.1"))
    not_there = replace(launch, argv=(str(tmp_path / "llama-server"), *launch.argv[2:]))
    with pytest.raises(EngineFailed) as error:
        native.start(not_there, SLUG)
    assert error.value.reference == "engine-start"
    assert "No such file" in error.value.message
    assert state.records() == ()
    assert not list(state.runs_dir().iterdir())


def test_the_child_gets_exactly_the_launchs_environment_and_no_descriptor_of_ours(tmp_path: Path) -> None:
    out = tmp_path / "env.json"
    with state.lock("cards"):
        record = begin("--print-env", str(out))
    until(lambda: listening(record))
    env = json.loads(out.read_text())
    assert set(env) - {"LC_CTYPE"} <= {"PATH", "HOME", "LANG", "LAUNCHER_HOME"}
    links = set()
    for descriptor in Path(f"/proc/{pid_of(record.server)}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the connection that asked whether it listens
            links.add(str(descriptor.readlink()))
    assert any(link.endswith(".log") for link in links)
    assert not [link for link in links if "pipe:" in link or link.endswith(".lock")]
    assert not list(state.runs_dir().glob(".*.launch"))
    native.stop(record)


def test_old_logs_are_dropped_and_those_of_a_slug_with_a_longer_name_are_not() -> None:
    for name in ("demo__fake", "demo__fake-235b"):
        for i in range(15):
            (state.logs_dir() / f"{name}-20200101T0000{i:02}_000.log").touch()
            (state.logs_dir() / f"{name}-20200101T0000{i:02}_000.rpc.log").touch()
    record = begin()
    own = [p.name for p in state.logs_dir().glob("demo__fake-20*.log")]
    assert len([name for name in own if name.endswith(".rpc.log")]) == 9
    assert len([name for name in own if not name.endswith(".rpc.log")]) == 10
    assert len(list(state.logs_dir().glob("demo__fake-235b-*.log"))) == 30
    assert Path(record.log_path).exists()
    native.stop(record)


# ---------------------------------------------------------------------------------------- RPC servers

# Plays ggml-rpc-server: takes connections and hangs up when the other side is done.
# Python through a shell: a path with a space in it cannot stand behind #!
RPC = """#!/bin/sh
''''exec "{python}" "$0" "$@" # '''
import socket, sys
args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind((args["-H"], int(args["-p"])))
server.listen()
print("Starting RPC server", sys.argv, flush=True)
while True:
    client, _ = server.accept()
    while client.recv(4096):
        pass
    client.close()
"""


@pytest.fixture
def rpc(tmp_path: Path) -> RpcSpawn:
    program = tmp_path / "ggml-rpc-server"
    program.write_text(RPC.format(python=sys.executable))
    program.chmod(0o755)
    first = free_port("127.0.0.1")
    return RpcSpawn(
        hosts=(f"127.0.0.1:{first}", f"127.0.0.1:{free_port('127.0.0.1', first + 1)}"),
        server_path=str(program),
        threads=1,
    )


def test_rpc_servers_start_first_and_end_with_the_server(rpc: RpcSpawn) -> None:
    record = begin(rpc=rpc)
    assert len(record.rpc_servers) == 2
    assert all(native.alive(p) for p in record.rpc_servers)
    assert record.rpc_endpoints == rpc.hosts
    assert "-d', 'CPU'" in Path(record.log_path).with_suffix(".rpc.log").read_text()
    native.stop(record)
    assert not any(native.alive(p) for p in record.rpc_servers)


def test_rpc_servers_end_when_the_server_crashes(rpc: RpcSpawn) -> None:
    record = begin("--exit-after", "0.3", "--exit-code", "1", rpc=rpc)
    until(lambda: not native.alive(record.keeper))
    assert not any(native.alive(p) for p in record.rpc_servers)


def test_rpc_servers_are_ended_by_stop_when_the_keeper_was_killed(rpc: RpcSpawn) -> None:
    record = begin(rpc=rpc)
    os.kill(pid_of(record.keeper), signal.SIGKILL)
    until(lambda: not native.alive(record.keeper))
    assert all(native.alive(p) for p in record.rpc_servers)
    native.stop(record)
    assert not any(native.alive(p) for p in record.rpc_servers)


def test_rpc_servers_left_by_a_killed_keeper_do_not_block_the_next_start(rpc: RpcSpawn) -> None:
    record = begin(rpc=rpc)
    os.kill(pid_of(record.keeper), signal.SIGKILL)
    os.kill(pid_of(record.server), signal.SIGKILL)
    until(lambda: not native.alive(record.keeper) and not native.alive(record.server))
    again = begin(rpc=rpc)
    assert all(native.alive(p) for p in again.rpc_servers)
    native.stop(again)


def test_a_taken_rpc_port_fails_the_start_and_leaves_nothing(rpc: RpcSpawn) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(rpc.hosts[1].rpartition(":")[2])))
        taken.listen()
        with pytest.raises(EngineFailed) as error:
            begin(rpc=rpc)
    assert error.value.reference == "rpc-start"
    assert state.records() == ()


def test_an_rpc_server_that_died_by_itself_is_named_in_the_log(rpc: RpcSpawn) -> None:
    record = begin("--exit-after", "0.5", "--exit-code", "1", rpc=rpc)
    os.kill(pid_of(record.rpc_servers[1]), signal.SIGKILL)
    until(lambda: not native.alive(record.keeper))
    assert f"the RPC server on {rpc.hosts[1]} had ended by itself (SIGKILL)" in native.tail(record.log_path)


INTERRUPTED = """
import sys
from launcher.serve.rpc import RpcSpawn
from tests.unit.test_native import begin
begin(rpc=RpcSpawn(hosts=(sys.argv[1],), server_path=sys.argv[2], threads=1))
"""


def test_ctrl_c_in_the_middle_of_a_start_leaves_nothing(tmp_path: Path, launcher_home: Path) -> None:
    program = tmp_path / "never-listens"
    program.write_text("#!/bin/sh\nsleep 60\ntrue\n")
    program.chmod(0o755)
    words = [f"127.0.0.1:{free_port('127.0.0.1')}", str(program)]
    launcher = subprocess.Popen([sys.executable, "-c", INTERRUPTED, *words], stderr=subprocess.PIPE)
    until(lambda: any(words_of(p)[1:2] == [str(program)] for p in mine(launcher_home)))
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=10)
    assert b"KeyboardInterrupt" in errors
    assert state.records() == ()
    assert mine(launcher_home) <= {os.getpid()}


def test_rpc_servers_of_a_killed_keeper_are_ended_by_the_next_start_of_any_slug(rpc: RpcSpawn) -> None:
    record = begin(rpc=rpc)
    os.kill(pid_of(record.keeper), signal.SIGKILL)
    os.kill(pid_of(record.server), signal.SIGKILL)
    until(lambda: not native.alive(record.server))
    assert all(native.alive(p) for p in record.rpc_servers)
    other = begin(slug="demo/other")
    assert not any(native.alive(p) for p in record.rpc_servers)
    native.stop(other)
    native.stop(record)


def test_an_rpc_server_is_known_before_it_listens(rpc: RpcSpawn) -> None:
    """Starting one takes seconds on a big machine: a keeper that is killed meanwhile must not leave a stranger."""
    slow = Path(rpc.server_path)
    slow.write_text(slow.read_text().replace("import socket, sys", "import socket, sys, time; time.sleep(30)"))
    launcher = subprocess.Popen(
        [sys.executable, "-c", RPC_START, json.dumps([rpc.hosts, rpc.server_path])], stderr=subprocess.DEVNULL
    )
    until(lambda: (seen := state.read(SLUG)) and seen.rpc_servers)
    launcher.kill()
    launcher.wait()
    record = state.read(SLUG)
    assert record is not None
    os.kill(pid_of(record.keeper), signal.SIGKILL)
    until(lambda: not native.alive(record.keeper))
    assert [native.alive(p) for p in record.rpc_servers] == [True]
    native.stop(record)
    assert not any(native.alive(p) for p in record.rpc_servers)


RPC_START = """
import json, sys
from launcher.serve.rpc import RpcSpawn
from tests.unit.test_native import begin
hosts, path = json.loads(sys.argv[1])
begin(rpc=RpcSpawn(hosts=tuple(hosts), server_path=path, threads=1))
"""


def test_a_stranger_that_took_the_rpc_port_meanwhile_is_not_taken_for_ours(rpc: RpcSpawn) -> None:
    """Between the look at the port and the bind: it answers our check, and must not get our weights."""
    address, port = rpc.hosts[0].split(":")
    program = Path(rpc.server_path)
    held = "import socket, sys, time; time.sleep(1)"
    program.write_text(program.read_text().replace("import socket, sys", held))
    strangers: list[subprocess.Popen[bytes]] = []

    def take() -> None:
        words = [sys.executable, "-c", RPC.partition("\n")[2], "-H", address, "-p", str(port)]
        strangers.append(subprocess.Popen(words, stdout=subprocess.DEVNULL))

    timer = threading.Timer(0.2, take)
    timer.start()
    try:
        with pytest.raises(EngineFailed) as error:
            begin(rpc=rpc)
        assert error.value.reference == "rpc-start"
        assert strangers[0].poll() is None, "a foreign process was touched"
    finally:
        timer.join()
        strangers[0].kill()
        strangers[0].wait()
    assert state.records() == ()


def test_a_server_that_waits_for_a_client_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama-server, told to end with a request in flight, answers no more and waits until that client hangs up."""
    monkeypatch.setattr(native, "_STILL_S", 0.3)
    record = begin("--ignore-sigterm")
    until(lambda: "model loaded" in native.tail(record.log_path))
    started = time.monotonic()
    end = native.stop(record, grace_s=20)
    assert time.monotonic() - started < 3
    assert end is not None
    assert (end.reason, end.signal) == ("stopped", "SIGKILL")


def test_ctrl_c_while_stopping_kills_at_once() -> None:
    record = begin("--ignore-sigterm")
    until(lambda: "model loaded" in native.tail(record.log_path))
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        native.stop(record, grace_s=20)
    until(lambda: not native.alive(record.server), 2)
    native.stop(record)
    assert state.history()[-1].reason == "stopped"


def test_a_keeper_that_cannot_be_started_is_told_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(EngineFailed) as error:
        native.start(fake_launch(free_port("127.0.0.1")), SLUG)
    assert error.value.reference == "keeper-died"
    assert "cannot be started: No such file" in error.value.message
    assert not list(state.runs_dir().iterdir())


def test_a_keeper_that_dies_at_once_is_told_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(EngineFailed) as error:
        native.start(fake_launch(free_port("127.0.0.1")), SLUG)
    assert (error.value.reference, error.value.context) == ("keeper-died", "no such module")
    assert not list(state.runs_dir().iterdir())


# ---------------------------------------------------------------------------------------- foreground

FOREGROUND = """
import json, os, sys
from launcher.serve import native
from launcher.serve.rpc import RpcSpawn
from tests.serve_builders import fake_launch
port, words, rpc = json.loads(sys.argv[1])
launch = fake_launch(port, *words, LAUNCHER_HOME=os.environ["LAUNCHER_HOME"])
rpc = RpcSpawn(hosts=tuple(rpc["hosts"]), server_path=rpc["path"], threads=1) if rpc else None
sys.exit(native.exec_foreground(launch, rpc=rpc))
"""


def foreground(port: int, *words: str, rpc: RpcSpawn | None = None) -> subprocess.Popen[bytes]:
    spawn = {"hosts": rpc.hosts, "path": rpc.server_path} if rpc else None
    arguments = json.dumps([port, words, spawn])
    return subprocess.Popen([sys.executable, "-c", FOREGROUND, arguments], stderr=subprocess.DEVNULL)


def test_run_becomes_the_server() -> None:
    port = free_port("127.0.0.1")
    process = foreground(port)
    until(lambda: "fake_server.py" in " ".join(words_of(process.pid)))
    until(lambda: open_port(port))
    process.terminate()
    assert process.wait(5) == -signal.SIGTERM


IGNORED = """
from dataclasses import replace
from launcher.serve import native
from tests.serve_builders import fake_launch
native.exec_foreground(replace(fake_launch(1), argv=("/usr/bin/env", "grep", "SigIgn", "/proc/self/status")))
"""


def test_run_hands_on_no_ignored_signal() -> None:
    """Python ignores SIGPIPE and SIGXFSZ; whoever runs the engine from a shell has neither ignored."""
    done = subprocess.run([sys.executable, "-c", IGNORED], capture_output=True, text=True, check=True)
    ignored = int(done.stdout.split()[1], 16)
    assert [s.name for s in (signal.SIGPIPE, signal.SIGXFSZ) if ignored & 1 << (s - 1)] == []


def test_run_with_rpc_servers_hands_signals_on_and_ends_them(rpc: RpcSpawn) -> None:
    port = free_port("127.0.0.1")
    process = foreground(port, rpc=rpc)
    until(lambda: len(below(process.pid)) == 3)
    until(lambda: open_port(port))
    children = below(process.pid)
    process.terminate()
    assert process.wait(5) == 128 + signal.SIGTERM
    assert not [c for c in children if psutil.pid_exists(c)]


def test_run_with_rpc_servers_returns_the_servers_exit_code(rpc: RpcSpawn) -> None:
    process = foreground(free_port("127.0.0.1"), "--exit-after", "0.1", "--exit-code", "3", rpc=rpc)
    assert process.wait(10) == 3
