"""What is left of an end: the kernel's words, its counters, memory before. One kill is a real one, where we may."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import launcher
from launcher.serve import evidence, native, state, wait
from launcher.serve.ports import free_port
from launcher.structs import ProcessId, RunRecord
from launcher.units import MIB
from tests.serve_builders import fake_launch

ROOT = Path(launcher.__file__).parent.parent
RECORDS = (
    "6,1200,90000000,-;llama-server invoked oom-killer: gfp_mask=0x140cca(GFP_HIGHUSER_MOVABLE|__GFP_COMP), order=0",
    "3,1201,90000100,-;Out of memory: Killed process 4242 (llama-server) total-vm:196000000kB, anon-rss:141000000kB",
    "3,1202,90000200,-;Memory cgroup out of memory: Killed process 42 (python3) total-vm:1kB",
    "4,1203,91000000,-;NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', GPU has fallen off the bus.",
    "6,1204,92000000,-;llama-server[4242]: segfault at 10 ip 00007f2b1c sp 00007ffd error 4 in libggml.so",
    "6,1205,93000000,-;usb 1-1: new high-speed USB device number 4242",
    " SUBSYSTEM=pci",
    "broken",
)


def test_the_kernel_is_quoted_about_this_process_and_about_cards() -> None:
    found = evidence.kernel_lines(RECORDS, 4242, None)
    assert [line.split()[0] for line in found] == ["Out", "NVRM:", "llama-server[4242]:"]
    assert "Killed process 4242 (llama-server)" in found[0]


def test_another_process_with_a_number_like_it_is_not_meant() -> None:
    assert [line[:5] for line in evidence.kernel_lines(RECORDS, 2, None)] == ["NVRM:"]


def test_what_the_kernel_said_before_the_server_began_is_no_evidence() -> None:
    assert [line.split()[0] for line in evidence.kernel_lines(RECORDS, 4242, 90.5)] == ["NVRM:", "llama-server[4242]:"]
    assert evidence.kernel_lines(RECORDS, 4242, 1000.0) == ()


def test_few_and_short_lines_are_kept() -> None:
    many = tuple(f"3,{n},90000000,-;NVRM: Xid {n} {'x' * 900}" for n in range(50))
    found = evidence.kernel_lines(many, 1, None)
    assert [line[:13] for line in found] == [f"NVRM: Xid {n} "[:13] for n in range(46, 50)]
    assert max(map(len, found)) <= 240


def test_a_log_that_may_not_be_read_says_nothing(tmp_path: Path) -> None:
    assert evidence.kernel_records(tmp_path / "none") == ()
    (tmp_path / "kmsg").write_text("\n".join(RECORDS))
    assert evidence.kernel_records(tmp_path / "kmsg") == RECORDS


def test_a_process_of_nobody_leaves_no_evidence() -> None:
    assert evidence.about(None) == ()
    assert evidence.about(ProcessId(pid=2**22 + 1, create_time=1.0)) == () or all(
        "NVRM" in line or "amdgpu" in line for line in evidence.about(ProcessId(pid=2**22 + 1, create_time=1.0))
    )


def test_samples_are_few_and_span_more_than_the_last_look() -> None:
    samples = evidence.Samples()
    me = state.identify(os.getpid())
    for _ in range(20):
        samples.take(me)
    found = samples.before(time.monotonic())
    assert len(found) == 2
    assert all(s.rss_bytes and s.rss_bytes > MIB and s.host_available_bytes for s in found)
    assert found[0].before_s >= found[1].before_s >= 0
    samples.take(None)
    assert len(samples.before(time.monotonic())) == 2


# ------------------------------------------------------------------------------------- a real kill


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of ours with 150 MiB, where we may make one."""
    v1 = Path("/sys/fs/cgroup/memory")
    group = (v1 if v1.is_dir() else Path("/sys/fs/cgroup")) / f"launcher-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    try:
        try:
            (group / ("memory.limit_in_bytes" if v1.is_dir() else "memory.max")).write_text(str(150 * MIB))
            with contextlib.suppress(OSError):
                (group / ("memory.swappiness" if v1.is_dir() else "memory.swap.max")).write_text("0")
        except OSError as error:
            pytest.skip(f"memory cannot be limited here: {error.strerror}")
        yield group
    finally:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                group.rmdir()
            except OSError:
                time.sleep(0.05)
            else:
                break


START = """
import os, sys
from pathlib import Path
(Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
from launcher.serve import native
from launcher.serve.ports import free_port
from tests.serve_builders import fake_launch
native.start(fake_launch(free_port("127.0.0.1"), "--shrink", "300"), "demo/big", sample_s=0.1)
"""


def test_a_kill_by_the_kernel_is_counted_and_quoted(small_group: Path) -> None:
    """More than the group may have: the kernel ends the fake engine, and its keeper writes that down."""
    subprocess.run([sys.executable, "-c", START, str(small_group)], check=True, cwd=ROOT, timeout=60)
    deadline = time.monotonic() + 20
    while not state.history():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (end,) = state.history()
    record = state.read("demo/big")
    assert record is not None
    while native.alive(record.keeper):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (end.reason, end.signal, end.oom_kills) == ("start failed", "SIGKILL", 1)
    assert "the kernel killed it: host RAM" in end.cause
    if evidence.kernel_records():
        assert any(f"Killed process {end.pid} " in line for line in end.kernel)
    assert end.samples[-1].rss_bytes == end.last_rss_bytes


def test_a_kill_by_somebody_is_not_blamed_on_the_kernel() -> None:
    if evidence.oom_kills() is None:
        pytest.skip("this kernel does not count kills of our group")
    record = native.start(fake_launch(free_port("127.0.0.1")), "demo/fake", sample_s=0.1)
    assert record.server is not None
    os.kill(record.server.pid, 9)
    deadline = time.monotonic() + 10
    while native.alive(record.keeper):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (end,) = state.history()
    assert (end.signal, end.oom_kills) == ("SIGKILL", 0)
    assert end.cause.startswith("somebody sent SIGKILL")


HOG = """
import os, sys
from pathlib import Path
(Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
held = [os.urandom(1 << 20) for _ in range(400)]
"""
BESIDE = """
import os, sys
from pathlib import Path
(Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
from launcher.serve import native
from launcher.serve.ports import free_port
from tests.serve_builders import fake_launch
record = native.start(fake_launch(free_port("127.0.0.1")), "demo/beside", sample_s=0.1, restarts=1)
from launcher.serve import wait
wait.wait_ready(record, tick_s=0.02)
"""


def until(true: Callable[[], object], patience_s: float = 20.0) -> None:
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def current(name: str) -> RunRecord:
    found = state.read(name)
    assert found is not None
    return found


def test_a_compiler_that_was_killed_long_ago_stops_no_restart(small_group: Path) -> None:
    """A real kill beside a server of ours, in its control group: the crash that comes later has another cause."""
    subprocess.run([sys.executable, "-c", BESIDE, str(small_group)], check=True, cwd=ROOT, timeout=60)
    try:
        hog = subprocess.run([sys.executable, "-c", HOG, str(small_group)], check=False, timeout=60)
        assert hog.returncode == -9
        time.sleep(0.5)  # some samples later
        first = current("demo/beside").server
        assert first is not None and native.alive(first), "the hog alone was killed"
        os.kill(first.pid, signal.SIGABRT)
        until(lambda: state.history())
        (end,) = state.history()
        assert (end.reason, end.signal, end.oom_kills) == ("crashed", "SIGABRT", None)
        assert "memory" not in end.cause
        until(lambda: current("demo/beside").state == "ready" and current("demo/beside").restarts == 1)
        assert "oom_kill" not in Path(current("demo/beside").log_path).read_text()
    finally:
        native.stop(current("demo/beside"), grace_s=2)


COUNTED = """
import os
from pathlib import Path
from launcher.serve import evidence
evidence.oom_kills = lambda: int(Path(os.environ["TEST_KILLS"]).read_text())
"""


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's counter as a keeper reads it, in a file: not every machine lets us make a control group."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(COUNTED)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}")
    monkeypatch.setenv("TEST_KILLS", str(tmp_path / "kills"))
    (tmp_path / "kills").write_text("3")
    return tmp_path / "kills"


@pytest.mark.parametrize(
    ("kill", "before", "at_end", "oom", "again"),
    [
        (signal.SIGABRT, 4, 4, None, True),
        (signal.SIGABRT, 3, 4, None, True),
        (signal.SIGKILL, 4, 4, 0, True),
        (signal.SIGKILL, 3, 4, 1, False),
    ],
)
def test_the_counter_counts_at_the_end_of_one_that_was_killed(
    counter: Path, kill: signal.Signals, before: int, at_end: int, oom: int | None, again: bool
) -> None:
    record = native.start(fake_launch(free_port("127.0.0.1")), "demo/fake", sample_s=0.1, restarts=1)
    try:
        record = wait.wait_ready(record, tick_s=0.02)
        counter.write_text(str(before))
        time.sleep(0.6)
        assert record.server is not None
        half = counter.with_suffix(".half")
        half.write_text(str(at_end))
        half.replace(counter)
        os.kill(record.server.pid, kill)
        until(lambda: state.history())
        (end,) = state.history()
        assert end.oom_kills == oom
        if again:
            until(lambda: current("demo/fake").state == "ready" and current("demo/fake").restarts == 1)
        else:
            until(lambda: not native.alive(record.keeper))
            assert current("demo/fake").state == "failed"
    finally:
        native.stop(record, grace_s=2)


def test_a_later_crash_is_not_blamed_on_what_the_one_before_it_said() -> None:
    record = native.start(fake_launch(free_port("127.0.0.1")), "demo/fake", sample_s=0.1, restarts=1)
    try:
        record = wait.wait_ready(record, tick_s=0.02)
        assert record.server is not None
        with Path(record.log_path).open("a") as log:
            log.write("CUDA error: out of memory\n")
        os.kill(record.server.pid, signal.SIGABRT)
        until(lambda: current("demo/fake").state == "ready" and current("demo/fake").restarts == 1)
        again = current("demo/fake").server
        assert again is not None
        os.kill(again.pid, signal.SIGABRT)
        until(lambda: len(state.history()) == 2)
        assert ["memory" in end.cause for end in state.history()] == [True, False]
    finally:
        native.stop(record, grace_s=2)
