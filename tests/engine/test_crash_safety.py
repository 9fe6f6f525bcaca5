"""A launcher that is killed at any moment of a switch, and switches without end: `status` knows of all that is left."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import launcher
from launcher.serve import native, state
from tests.engine.ports import free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow]
ROOT = Path(launcher.__file__).parent.parent
KILLS = int(os.environ.get("LAUNCHER_KILLS", "20"))
CYCLES = int(os.environ.get("LAUNCHER_CYCLES", "20"))


@pytest.fixture
def two(
    tiny: Callable[[str], Path], engine_path: Path, launcher_home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, str]]:
    """Two slugs on one port; at the end nothing of theirs may be alive."""
    model, port = tiny("tiny-qwen3moe"), free_port()
    monkeypatch.setenv("MODEL_DIR", str(model.parent))
    monkeypatch.setenv("LLAMA_SERVER", str(engine_path))
    (launcher_home / "port").write_text(str(port))
    for name, n_ctx in (("t/one", "1k"), ("t/two", "2k")):
        path = launcher_home / "config" / "slugs" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"schema: 1\nstatus: production\ntitle: {name}\nmodel: {{file: {model.name}}}\n"
            f"serve: {{port: {port}, alias: {name[2:]}, n_ctx: {n_ctx}, cache_ram: 0, checkpoints: 1}}\n"
        )
    yield "t/one", "t/two"
    for record in state.records():
        native.stop(record, grace_s=5)


def words(*argv: str) -> list[str]:
    return [sys.executable, "-m", "launcher", *argv]


def said(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words(*argv), cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=120
    )


def servers(engine: Path, home: Path) -> set[int]:
    """Every process of ours that could hold a port or memory: engines and keepers started below this home."""
    found, port = set(), (home / "port").read_text()  # others may run this very engine meanwhile
    for p in psutil.process_iter(["pid", "cmdline"]):
        line = p.info["cmdline"] or []
        mine = any(str(home) in w for w in line)
        if line and ((line[0] == str(engine) and port in line) or ("launcher.serve.keeper" in line and mine)):
            found.add(p.info["pid"])
    return found


def all_gone(engine: Path, home: Path, before: set[int]) -> bool:
    """Whether nothing of ours is left; a keeper has written how its server ended and may still be on its way out."""
    deadline = time.monotonic() + 5
    while (left := servers(engine, home) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not left


def known() -> set[int]:
    """What `status` knows of: servers and keepers of the records."""
    pids = set()
    for record in state.records():
        pids |= {p.pid for p in (record.server, record.keeper) if p is not None}
    return pids


def test_a_launcher_killed_at_any_moment_leaves_nothing_unknown(
    two: tuple[str, str], engine_path: Path, launcher_home: Path
) -> None:
    """kill -9 between the first instruction and READY: the next `status` and `switch` do as if nothing had been."""
    before = servers(engine_path, launcher_home)
    numbers = random.Random(7)
    for n in range(KILLS):
        child = subprocess.Popen(
            words("switch", two[n % 2], "--yes"), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        time.sleep(numbers.uniform(0.05, 2.0))
        child.send_signal(signal.SIGKILL)
        child.wait()
        for path in (launcher_home / "state").rglob("*.json"):
            json.loads(path.read_text())  # no half-written record
        status = said("status", "--json")
        assert status.returncode in (0, 2), status.stderr
        deadline = time.monotonic() + 10  # a keeper that was just forked writes its record within that
        while servers(engine_path, launcher_home) - before - known() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert servers(engine_path, launcher_home) - before - known() == set(), f"after kill {n}"
    done = said("switch", two[0], "--yes")
    assert done.returncode == 0, done.stderr
    running = [r for r in state.records() if state.live(r)]
    assert [r.slug for r in running] == [two[0]]
    assert said("stop").returncode == 0
    assert all_gone(engine_path, launcher_home, before)


def test_switch_and_stop_again_and_again_leave_nothing(
    two: tuple[str, str], engine_path: Path, launcher_home: Path
) -> None:
    before = servers(engine_path, launcher_home)
    files = 0
    for n in range(CYCLES):
        done = said("switch", two[n % 2], "--yes")
        assert done.returncode == 0, done.stderr
        if n % 3 == 2:
            assert said("stop").returncode == 0
            assert all_gone(engine_path, launcher_home, before)
        if n == 5:
            files = sum(1 for p in (launcher_home / "state").rglob("*") if p.is_file() and p.suffix != ".log")
    assert said("stop").returncode in (0, 2)
    assert all_gone(engine_path, launcher_home, before)
    after = sum(1 for p in (launcher_home / "state").rglob("*") if p.is_file() and p.suffix != ".log")
    assert after <= files + 1, "records pile up"


def test_of_two_switches_at_the_same_time_one_wins(
    two: tuple[str, str], engine_path: Path, launcher_home: Path
) -> None:
    pipe = subprocess.PIPE
    lines = [words("switch", name, "--yes") for name in two]
    both = [subprocess.Popen(x, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, stdin=subprocess.DEVNULL) for x in lines]
    codes = sorted((p.communicate(timeout=120), p.returncode)[1] for p in both)
    assert codes == [0, 10]
    assert len([r for r in state.records() if state.live(r)]) == 1
    assert len(servers(engine_path, launcher_home) & known()) == 2  # one engine, its keeper
