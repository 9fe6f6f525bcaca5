"""Records, history and locks on disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from launcher.errors import Locked, Refused
from launcher.serve import ends, state
from launcher.serve.ports import free_port
from launcher.structs import ProcessId, RunEnd, RunRecord


def record(slug: str = "demo/a", **changes: object) -> RunRecord:
    found = RunRecord(
        slug=slug,
        server=None,
        keeper=None,
        rpc_servers=(),
        rpc_endpoints=("127.0.0.1:50052",),
        argv=("llama-server", "-m", "/m/ü.gguf"),
        env_set={"LC_ALL": "C"},
        host="127.0.0.1",
        port=8030,
        alias="a",
        log_path="/tmp/x.log",
        state="ready",
        started_at=1000.5,
    )
    return replace(found, **changes)


def end(of: RunRecord, **changes: object) -> RunEnd:
    found = RunEnd(
        slug=of.slug,
        pid=1,
        started_at=of.started_at,
        ended_at=2000.0,
        exit_code=1,
        signal=None,
        reason="crashed",
        last_rss_bytes=None,
        log_path=of.log_path,
    )
    return replace(found, **changes)


def me() -> ProcessId:
    found = state.identify(os.getpid())
    assert found is not None
    return found


def test_a_record_comes_back_as_it_went() -> None:
    full = record(server=ProcessId(pid=1, create_time=1.25), rpc_servers=(ProcessId(pid=2, create_time=2.5),))
    state.write(full)
    assert state.read("demo/a") == full
    assert state.records() == (full,)


def test_slugs_and_paths_have_files_of_their_own() -> None:
    names = ["demo/a", "demo__a", "/tmp/models/a.gguf", "/" + "x/" * 200 + "a.gguf", "..", "a b"]
    stems = [state.stem(n) for n in names]
    assert stems[0] == "demo__a"
    assert all(len(s) < 140 and "/" not in s and not s.startswith(".") for s in stems)
    assert len(set(stems) - {"demo__a"}) == 4


def test_records_are_for_their_owner_only() -> None:
    state.write(record())
    assert state.record_path("demo/a").stat().st_mode & 0o777 == 0o600


def test_damaged_records_are_passed_over() -> None:
    state.write(record())
    (state.runs_dir() / "half.json").write_text('{"slug": "x"')
    (state.runs_dir() / "other.json").write_text('{"slug": "x"}')
    (state.runs_dir() / "list.json").write_text("[]")
    assert [r.slug for r in state.records()] == ["demo/a"]


def test_alive_wants_pid_and_create_time() -> None:
    assert state.alive(me())
    assert not state.alive(replace(me(), create_time=me().create_time - 60, start_ticks=None))
    assert not state.alive(None)


def test_the_wall_clock_may_be_set_while_a_server_runs() -> None:
    """create_time follows the clock; start ticks do not, and a reboot or a reused pid is told from both."""
    assert state.alive(replace(me(), create_time=me().create_time + 7200))
    assert not state.alive(replace(me(), start_ticks=(me().start_ticks or 0) + 1))
    assert not state.alive(replace(me(), boot_id="another boot"))
    kept = record(server=me())
    state.write(kept)
    assert state.read("demo/a") == kept


def test_a_dead_child_that_nobody_waited_for_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    identity = state.identify(child.pid)
    deadline = time.monotonic() + 5
    while state.alive(identity) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not state.alive(identity)
    child.wait()


def test_survey_tells_running_from_ended_and_how() -> None:
    state.write(record("demo/a", server=me()))
    gone = ProcessId(pid=me().pid, create_time=1.0)
    crashed = record("demo/b", server=gone, state="failed", started_at=1001.0)
    state.write(crashed)
    state.write(record("demo/c", server=gone, started_at=1002.0))
    state.append_history(end(crashed))
    state.append_history(end(replace(crashed, started_at=5.0), reason="stopped"))
    assert [(s.record.slug, s.alive, s.how) for s in state.survey()] == [
        ("demo/a", True, "running"),
        ("demo/b", False, "crashed (exit code 1)"),
        ("demo/c", False, "ended, nobody saw how"),
    ]
    assert [r.slug for r in state.running()] == ["demo/a"]


def test_a_start_without_a_server_yet_lives_by_its_keeper() -> None:
    assert state.live(record(state="starting", keeper=me()))
    assert not state.live(record(state="starting", keeper=None))


def test_history_is_one_line_each_and_survives_a_bad_one() -> None:
    first, second = end(record()), end(record(), signal="SIGKILL", exit_code=None)
    state.append_history(first)
    with state.history_path().open("a") as out:
        out.write('{"slug": \n[]\n')
    state.append_history(second)
    assert state.history() == (first, second)
    assert json.loads(state.history_path().read_text().splitlines()[0])["schema_version"] == 1
    assert state.describe(second) == "crashed (SIGKILL)"


def test_update_and_forget_touch_their_own_run_only() -> None:
    old, new = record(started_at=1.0), record(started_at=2.0)
    state.write(new)
    assert state.update(old, state="failed").state == "failed"
    state.forget(old)
    assert state.read("demo/a") == new
    assert state.update(new, ready_at=3.0) == state.read("demo/a")
    state.forget(new)
    assert state.read("demo/a") is None
    state.forget(new)


def test_the_stop_marker_is_for_one_run() -> None:
    state.ask_stop(record())
    assert (state.stop_asked(record()) or "").startswith(f"pid {os.getpid()}, ")
    assert not state.stop_asked(record(started_at=7.0))


HOLD = """
import sys, time
from launcher.serve import state
with state.lock("cards", "launcher switch demo/a"):
    print("held", flush=True)
    time.sleep(60)
"""


def hold() -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_a_held_lock_names_its_holder_and_a_killed_holder_lets_go() -> None:
    child = hold()
    try:
        with pytest.raises(Locked) as error, state.lock("cards"):
            pass
        assert error.value.exit_code == 10
        assert error.value.reference == "locked"
        assert f"pid {child.pid}" in error.value.message
        assert "launcher switch demo/a" in error.value.message
        assert error.value.fix == f"launcher status     # wait for it; to end it: kill {child.pid}"
    finally:
        child.kill()
        child.communicate()
    with state.lock("cards"):
        pass


HOLD_AND_SPAWN = """
import subprocess, sys, time
from launcher.serve import state
code = "print('up', flush=True); import time; time.sleep(60)"
with state.lock("cards"):
    child = subprocess.Popen([sys.executable, "-c", code], close_fds=False)
    time.sleep(60)
"""


def test_a_child_that_outlives_a_killed_holder_does_not_hold_its_lock() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD_AND_SPAWN], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "up\n"
    (child,) = psutil.Process(holder.pid).children()
    try:
        holder.kill()
        holder.wait()
        with state.lock("cards"):
            assert child.is_running()
    finally:
        child.kill()
        holder.communicate()


def test_a_lock_is_free_again_after_an_error_inside() -> None:
    with pytest.raises(RuntimeError), state.lock("cards"):
        raise RuntimeError
    with state.lock("cards"):
        pass


# ------------------------------------------------------------------------- disks that do not take it

CROWDED = """
import sys
from pathlib import Path
from launcher.errors import LauncherError
from launcher.serve import native, preflight, state
from tests.serve_builders import fake_launch
from tests.unit.test_state import record

def told(what, call):
    try:
        call()
    except LauncherError as error:
        print(what, error.reference, error.exit_code)

home = Path(sys.argv[1])
state.write(record())
with state.lock("engine"):
    pass
print("gate", *(g.name for g in preflight._state()))
served = native.start(fake_launch(int(sys.argv[2])), "demo/live")
filler = home / "filler"
try:
    with filler.open("wb", buffering=0) as out:
        while out.write(b"x" * 512):
            pass
except OSError:
    pass
filled = filler.stat().st_size
told("write", lambda: state.write(record("demo/b", argv=("x" * 9000,))))
print("kept", state.read("demo/a") == record(), *sorted(p.name for p in state.runs_dir().iterdir()))
told("start", lambda: native.start(fake_launch(int(sys.argv[2]) + 1), "demo/c"))
with state.lock("engine"):
    print("locked")
native.stop(record())
print("stopped", native.stop(served).reason, native.alive(served.server), native.alive(served.keeper))
print("left", [r.slug for r in state.records()], filler.stat().st_size == filled)
"""


def in_own_mounts(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run shell lines where they may mount; skips where the kernel does not let us."""
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "--propagation", "private"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here")
    return subprocess.run(
        [*unshare, "sh", "-ec", script, "sh", *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def test_on_a_full_disk_nothing_starts_what_is_there_stays_whole_and_stop_works(launcher_home: Path) -> None:
    port = free_port("127.0.0.1")
    done = in_own_mounts(
        'mount -t tmpfs -o size=64k tmpfs "$1"; exec "$2" -c "$3" "$1" "$4"',
        str(launcher_home), sys.executable, CROWDED, str(port),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "gate state-unwritable",
        "write state-unwritable 7",
        "kept True demo__a.json demo__live.json",
        "start state-unwritable 7",
        "locked",
        "stopped stopped False False",
        "left [] True",
    ]


READ_ONLY = """
import os
from launcher.errors import LauncherError
from launcher.serve import native, preflight, state
from tests.unit.test_state import record
with state.lock("engine"):
    print([r.slug for r in state.records()], len(state.history()), *(g.name for g in preflight._state()))
try:
    state.write(record())
except LauncherError as error:
    print(error.reference, error.message.endswith("Read-only file system"), bool(error.fix))
"""


def test_on_a_read_only_disk_everything_is_seen_and_nothing_is_written(launcher_home: Path) -> None:
    state.write(record())
    state.append_history(end(record()))
    with state.lock("engine"):
        pass
    done = in_own_mounts(
        'mount --bind "$1" "$1"; mount -o remount,bind,ro "$1"; exec "$2" -c "$3"',
        str(launcher_home), sys.executable, READ_ONLY,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['demo/a'] 1 state-unwritable", "state-unwritable True True"]


def test_a_folder_that_cannot_be_made_is_a_refusal(launcher_home: Path) -> None:
    (launcher_home / "state").write_text("a file in the way")
    with pytest.raises(Refused) as error:
        state.write(record())
    assert (error.value.reference, error.value.exit_code) == ("state-unwritable", 7)
    assert state.problem()


SECOND_USER = """
import os
from launcher.errors import LauncherError
from launcher.serve import state
os.setgid(65534), os.setuid(65534)
for call in (state.records, state.history, lambda: state.lock("engine").__enter__()):
    try:
        print(call())
    except LauncherError as error:
        print(error.reference)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_second_user_of_the_same_home_is_told_and_does_not_take_it_for_empty(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    home = Path(tempfile.mkdtemp())  # tmp_path is closed to others
    request.addfinalizer(lambda: shutil.rmtree(home))
    home.chmod(0o755)
    monkeypatch.setenv("LAUNCHER_HOME", str(home))
    state.write(record())
    state.append_history(end(record()))
    with state.lock("engine"):
        pass
    done = subprocess.run([sys.executable, "-c", SECOND_USER], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["state-not-ours", "state-not-ours", "state-unwritable"], done.stderr


def test_history_is_bounded_and_keeps_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "MOST_BYTES", 20_000)
    for n in range(100):
        state.append_history(replace(end(record()), ended_at=float(n)))
        assert state.history_path().stat().st_size <= 20_000
    kept = [e.ended_at for e in state.history()]
    assert kept == [float(n) for n in range(100 - len(kept), 100)]
    assert len(kept) > 10
    assert state.history_path().stat().st_mode & 0o777 == 0o600


def test_a_line_of_an_older_version_and_one_of_a_newer_are_read() -> None:
    old = {
        "schema_version": 1, "slug": "a/b", "pid": 7, "started_at": 1.0, "ended_at": 2.0, "exit_code": 1,
        "signal": None, "reason": "crashed", "last_rss_bytes": None, "log_path": "/x.log",
    }  # fmt: skip
    found = ends.parse(json.dumps(old))
    assert found is not None
    assert (found.reason, found.samples, found.requests, found.oom_kills) == ("crashed", (), (), None)
    newer = {**old, "more": 1, "requests": [{"slot": 0, "task": 1, "more": 1}], "samples": [], "kernel": ["x"]}
    again = ends.parse(json.dumps(newer))
    assert again is not None
    assert (again.requests[0].task, again.kernel) == (1, ("x",))
    assert ends.parse(ends.line_of(again)) == again
    for broken in ("", "[]", "{}", "3", json.dumps({**old, "requests": 3}), json.dumps({**old, "samples": [3]})):
        assert ends.parse(broken) is None
