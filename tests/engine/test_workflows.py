"""The whole way with a real engine: dry run in the plan, `switch` on two loopback devices, audit, answer, `stop`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

import launcher
from launcher.measure import learned
from launcher.serve import native, service, state
from launcher.structs import Source
from launcher.units import MIB
from launcher.workflows import plan, target
from tests.engine.conftest import RpcServers
from tests.engine.ports import free_port

pytestmark = pytest.mark.engine
ROOT = Path(launcher.__file__).parent.parent


def slug(home: Path, name: str, file: str, *, port: int, rpc: str) -> None:
    """A slug of the user with RPC devices, small enough for every machine."""
    path = home / "config" / "slugs" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"schema: 1\nstatus: production\ntitle: {name}\nmodel: {{file: {file}}}\nrpc: {rpc}\n"
        f"serve: {{port: {port}, alias: tiny, n_ctx: 2k, n_batch: 512, n_ubatch: 512, cache_ram: 0, checkpoints: 1}}\n"
        "placement: {margin: 0}\n"
    )


@pytest.fixture
def models_here(tiny: Callable[[str], Path], engine_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model in MODEL_DIR, and the engine under test as the one that commands find."""
    path = tiny("tiny-qwen3moe")
    monkeypatch.setenv("MODEL_DIR", str(path.parent))
    monkeypatch.setenv("LLAMA_SERVER", str(engine_path))
    return path


@pytest.fixture
def cleaned() -> Iterator[None]:
    yield
    for record in state.records():
        native.stop(record, grace_s=5)


def child(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launcher", *argv], capture_output=True, text=True, check=False, cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_the_dry_run_replaces_the_bounds_and_fills_what_they_left(
    models_here: Path, launcher_home: Path, rpc_servers: RpcServers
) -> None:
    """Two rounds at most: the exact compute buffer is smaller than its bound, and a bundle may take its place."""
    (endpoint,) = rpc_servers(1)
    slug(launcher_home, "t/one", models_here.name, port=free_port(), rpc=f'{{hosts: ["{endpoint}"]}}')
    found = target.resolve("t/one")
    surveyed, _ = plan.survey(found, {})
    base = plan.gather(found, {}, surveyed)
    gained = 0
    for free_mib in (32, 44, 48, 56):
        devices = tuple(replace(d, free_bytes=free_mib * MIB) for d in base.inventory.devices)
        inputs = replace(base, inventory=replace(base.inventory, devices=devices))
        by_formula = inputs.plan()
        made = plan.make(inputs)
        assert made.plan.fits
        assert [d.source["compute"] for d in made.plan.devices] == [Source.DRY_RUN]
        assert made.plan.devices[0].terms["compute"] <= by_formula.devices[0].terms["compute"]
        assert len(made.plan.resident_layers) >= len(by_formula.resident_layers)
        gained += len(made.plan.resident_layers) - len(by_formula.resident_layers)
    assert gained > 0


def wait_until(true: Callable[[], bool], seconds: float = 10) -> None:
    """Poll; an assertion that waits."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.usefixtures("cleaned")
def test_switch_on_two_loopback_devices_answers_as_planned(models_here: Path, launcher_home: Path) -> None:
    port, first, second = free_port(), free_port(), free_port()
    rpc = f'{{hosts: ["127.0.0.1:{first}", "127.0.0.1:{second}"], spawn: true, memory: 36MiB}}'
    slug(launcher_home, "t/two", models_here.name, port=port, rpc=rpc)
    done = child("switch", "t/two", "--json")
    assert done.returncode == 0, done.stderr
    doc = json.loads(done.stdout)
    assert doc["audit"]["ok"], doc["audit"]["worst"]
    assert len(doc["plan"]["devices"]) == 2
    for row in doc["audit"]["rows"]:
        if row["kind"] in ("model", "kv"):
            assert abs(row["planned_bytes"] - row["real_bytes"]) <= 0.1 * MIB, row
    question = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    answer = httpx.post(f"{doc['server']['url']}/chat/completions", json=question, timeout=60, trust_env=False)
    assert answer.json()["usage"]["completion_tokens"] > 0
    record = state.running()[0]
    assert record.proven_tokens == 2048 * 9 // 10
    assert f"n_tokens = {record.proven_tokens}" in Path(record.log_path).read_text()
    assert len(record.rpc_servers) == 2
    assert child("status", "--check").returncode == 0
    (running,) = json.loads(child("status", "--json").stdout)["servers"]
    assert running["record"]["audit"] == doc["audit"] == doc["server"]["audit"]
    assert doc["audit"]["cards"] == []  # no driver counts what an RPC device on this host's CPU holds
    seen = learned.read()
    assert seen.contexts == {}
    (buffers,) = seen.compute.values()
    real = [row["real_bytes"] for row in doc["audit"]["rows"] if row["kind"] == "compute"]
    assert list(buffers.real_bytes) == real
    assert all(n <= bound for n, bound in zip(real, buffers.planned_bytes, strict=True))
    os.kill(record.rpc_servers[1].pid, signal.SIGKILL)
    wait_until(lambda: not native.alive(record.rpc_servers[1]))
    lost = child("status", "--check")
    assert lost.returncode != 0
    assert "RPC server gone" in lost.stdout
    assert child("stop").returncode == 0
    assert not any(native.alive(p) for p in (record.server, record.keeper, *record.rpc_servers))
    again = json.loads(
        child("plan", "t/two", "--json").stdout
    )  # its RPC servers are gone, so the engine cannot be asked
    real = {row["device"]: row["real_bytes"] for row in doc["audit"]["rows"] if row["kind"] == "compute"}
    assert {d["source"]["compute"] for d in again["devices"]} == {"measured"}
    assert {d["name"]: d["bytes"]["compute"] for d in again["devices"]} == real


@pytest.mark.usefixtures("cleaned")
def test_switching_to_another_slug_plans_with_what_the_first_gives_back(models_here: Path, launcher_home: Path) -> None:
    for name in ("t/a", "t/b"):
        rpc = f'{{hosts: ["127.0.0.1:{free_port()}"], spawn: true, memory: 36MiB}}'
        slug(launcher_home, name, models_here.name, port=free_port(), rpc=rpc)
    assert child("switch", "t/a").returncode == 0
    before = state.running()[0]
    done = child("switch", "t/b", "--yes")
    assert done.returncode == 0, done.stderr
    assert "t/a stopped in" in done.stdout
    assert "the plan still holds" in done.stdout
    assert [r.slug for r in state.running()] == ["t/b"]
    assert not native.alive(before.server)


@pytest.mark.usefixtures("cleaned")
def test_a_second_start_of_the_same_is_not_proven_again(models_here: Path, launcher_home: Path) -> None:
    path = launcher_home / "config" / "slugs" / "t" / "deep.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(
        f"schema: 1\nstatus: production\ntitle: t\nmodel: {{file: {models_here.name}}}\n"
        f"serve: {{port: {free_port()}, alias: tiny, n_ctx: 512, cache_ram: 0, checkpoints: 1}}\n"
    )
    first = child("switch", "t/deep")
    assert first.returncode == 0, first.stderr
    assert "proving 460 tokens" in first.stdout
    assert "depth proven to 460 tokens" in first.stdout
    assert child("stop").returncode == 0
    again = child("switch", "t/deep")
    assert again.returncode == 0, again.stderr
    assert "proving" not in again.stdout
    assert re.search(r"depth proven \d{4}-\d\d-\d\d to 460 tokens", again.stdout)
    assert "n_tokens = 460" not in Path(state.running()[0].log_path).read_text()


def test_a_drafter_that_the_engine_cannot_measure_is_said_in_plain_words(
    replica: Callable[[str], Path], engine_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_SERVER", str(engine_path))
    model, drafter = replica("deepseek-v4-flash-UD-Q8_K_XL"), replica("deepseek-v4-flash-dspark-Q8_0")
    done = child("plan", str(model), "--drafter", str(drafter), "--ctx", "8k", "--json")
    doc = json.loads(done.stdout)
    assert done.returncode == (0 if doc["fits"] else 6)
    assert "the engine's dry run cannot measure this drafter: its numbers are formulas" in doc["warnings"]
    assert "operator()" not in done.stdout + done.stderr


def test_the_run_line_of_a_service_serves(
    models_here: Path, launcher_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As systemd would start it: the unit's environment and no other, the root folder, then SIGTERM."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    port = free_port()
    path = launcher_home / "config" / "slugs" / "t" / "day.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(
        f"schema: 1\nstatus: production\ntitle: t\nmodel: {{file: {models_here.name}}}\n"
        f"serve: {{port: {port}, alias: tiny, n_ctx: 512, cache_ram: 0, checkpoints: 1}}\n"
    )
    assert child("service", "install", "t/day").returncode == 0
    said = service.read((service.user_folder() / service.unit_name("t/day")).read_text())["Service"]
    env = dict(w.split("=", 1) for v in said["Environment"] for w in service.words_of(v, command=False))
    words = service.words_of(said["ExecStart"][0])
    bare = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", **env}
    with subprocess.Popen(words, env=bare, cwd="/", stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as server:
        try:
            deadline = time.monotonic() + 60
            status = 0
            while status != 200:
                assert server.poll() is None, server.communicate()[1]
                assert time.monotonic() < deadline
                with contextlib.suppress(httpx.HTTPError):
                    status = httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code
                time.sleep(0.05)
            question = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            answer = httpx.post(url, json=question, timeout=60, trust_env=False)
            assert answer.json()["usage"]["completion_tokens"] > 0
        finally:
            server.terminate()
            server.communicate(timeout=30)
    assert server.returncode == 0, "systemd sees a clean end and does not restart it"
