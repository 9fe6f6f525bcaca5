"""What is read from a real llama-server: abilities, devices, dry runs and load logs agree with what it does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import launcher
from launcher.errors import DeviceUnusable
from launcher.facts import rpc
from launcher.facts.devices import read_devices
from launcher.facts.dry_run import dry_run, fit_print
from launcher.facts.engine import clean_env, find_engine, fit_params, probe
from launcher.facts.load_log import LoadLog, parse_load_log
from launcher.structs import Engine
from launcher.units import MIB
from tests.engine.conftest import RpcServers
from tests.engine.ports import free_port

pytestmark = pytest.mark.engine

SETTINGS = (
    "-c", "4096", "-np", "1", "-no-kvu", "-ngl", "999", "-sm", "layer", "-b", "512", "-ub", "512", "-fa", "on",
    "--load-mode", "none", "--host", "127.0.0.1",
)  # fmt: skip
EXPERTS_OF_0_TO_3 = r"blk\.[0-3]\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"


@pytest.fixture
def engine(engine_path: Path) -> Engine:
    return probe(str(engine_path), "--engine")


@pytest.fixture
def rpc_server(engine: Engine) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    assert engine.rpc_server
    port = free_port()
    server = subprocess.Popen([engine.rpc_server, "-d", "CPU", "-p", str(port)], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: answers(f"127.0.0.1:{port}"))
        yield f"127.0.0.1:{port}", server
    finally:
        server.kill()
        server.wait()


def answers(endpoint: str) -> bool:
    try:
        rpc.check(endpoint, timeout_s=0.5)
    except DeviceUnusable:
        return False
    return True


def wait_until(true: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def served(engine: Engine, log: Path, *argv: str) -> subprocess.Popen[bytes]:
    """A llama-server that has loaded."""
    with log.open("wb") as out:
        server = subprocess.Popen(
            [engine.path, *argv, *SETTINGS, "--port", str(free_port()), "--fit", "off"], stdout=out, stderr=out,
            env=clean_env(os.environ),
        )  # fmt: skip
    try:
        wait_until(lambda: b"model loaded" in log.read_bytes() or server.poll() is not None, 60)
        assert server.poll() is None, log.read_text()[-2000:]
    except BaseException:
        server.kill()
        server.wait()
        raise
    return server


def load(engine: Engine, log: Path, *argv: str) -> LoadLog:
    server = served(engine, log, *argv)
    server.kill()
    server.wait()
    return parse_load_log(log.read_text())


def test_abilities(engine: Engine, engine_path: Path) -> None:
    needs = ("flag:-ot", "flag:-ts", "flag:--fit", "flag:--log-jsonl", "flag:--rpc", "flag:-kvu", "flag:--cache-ram")
    assert [n for n in needs if not engine.can(n)] == []
    assert engine.can("spec-type:draft-dspark") and not engine.can("flag:--draft-max")
    assert engine.version != "unknown"
    assert find_engine(str(engine_path.parent)).digest == engine.digest


def test_another_program_of_the_same_build_is_no_server(engine: Engine) -> None:
    assert engine.rpc_server
    with pytest.raises(DeviceUnusable) as caught:
        probe(engine.rpc_server, "--engine")
    assert caught.value.reference == "engine-not-llama-server"


def test_devices_of_an_rpc_server(engine: Engine, rpc_server: tuple[str, subprocess.Popen[bytes]]) -> None:
    endpoint, _ = rpc_server
    devices, _ = read_devices(engine, env=os.environ, rpc_hosts=(endpoint,), cards=())
    first = devices[0]
    assert (first.name, first.buffer_type, first.shares_host) == ("RPC0", f"RPC0[{endpoint}]", True)
    assert first.free_bytes and first.total_bytes and first.free_bytes < first.total_bytes


def test_a_serving_endpoint_is_refused_and_survives_it(
    engine: Engine, rpc_server: tuple[str, subprocess.Popen[bytes]], tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    endpoint, rpc_process = rpc_server
    before, _ = read_devices(engine, env=os.environ, rpc_hosts=(endpoint,), cards=())
    model = str(tiny("tiny-qwen3moe"))
    server = served(engine, tmp_path / "log", "--rpc", endpoint, "-m", model, "-lv", "4")
    try:
        for _ in range(3):  # each leaves a closed connection in the queue
            with pytest.raises(DeviceUnusable) as caught:
                rpc.check(endpoint, timeout_s=0.3)
            assert caught.value.reference == "rpc-busy"
        told, _ = read_devices(
            engine, env=os.environ, rpc_hosts=(endpoint,), busy_endpoints={endpoint: before[:1]}, cards=()
        )
        assert told[0] == before[0]
    finally:
        server.kill()
        server.wait()
    wait_until(lambda: answers(endpoint))
    assert rpc_process.poll() is None
    assert read_devices(engine, env=os.environ, rpc_hosts=(endpoint,), cards=())[0][0].name == "RPC0"


def test_a_dry_run_gives_what_the_load_then_takes(
    engine: Engine, rpc_server: tuple[str, subprocess.Popen[bytes]], tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    endpoint, rpc_process = rpc_server
    argv = ("--rpc", endpoint, "-m", str(tiny("tiny-qwen3moe")), "-ot", EXPERTS_OF_0_TO_3, "-ts", "1")
    dry = (engine.path, *argv, *SETTINGS, "--port", str(free_port()), "-lv", "4", "--log-jsonl", "--fit", "on")
    run = dry_run(dry, clean_env(os.environ), expect_drafter=False)
    assert (run.status, run.note) == ("ok", "") and run.measured
    wait_until(lambda: answers(endpoint))
    real = load(engine, tmp_path / "log", *argv, "-lv", "5")
    assert rpc_process.poll() is None
    buffer = f"RPC0[{endpoint}]"
    for dry_bytes, real_bytes in (
        (run.measured.model_bytes["RPC0"], real.model_bytes[buffer]),
        (run.measured.context_bytes["RPC0"], real.kv_bytes[buffer]),
        (run.measured.compute_bytes["RPC0"], real.compute_bytes[buffer]),
        (run.measured.host_compute_bytes, real.compute_bytes["CPU"]),
        (run.measured.model_bytes["Host"], sum(v for k, v in real.model_bytes.items() if k != buffer)),
    ):
        assert 0 <= real_bytes - dry_bytes < 1.01 * MIB  # the engine cuts off below a MiB
    assert real.overrides == 12
    assert real.layer_devices == tuple((i, "RPC0") for i in range(9))


def test_the_table_of_text_says_what_the_event_says(
    engine: Engine, rpc_servers: RpcServers, tiny: Callable[[str], Path]
) -> None:
    draft = ("-md", str(tiny("tiny-gpt-oss")), "--spec-type", "draft-simple", "--spec-draft-n-max", "4")
    argv = ("--rpc", ",".join(rpc_servers(2)), "-m", str(tiny("tiny-qwen3moe")), "-ot", EXPERTS_OF_0_TO_3, *draft)
    dry = (engine.path, *argv, *SETTINGS, "--port", str(free_port()), "-lv", "4", "--fit", "on")
    text = dry_run(dry, clean_env(os.environ), expect_drafter=True)
    event = dry_run((*dry, "--log-jsonl"), clean_env(os.environ), expect_drafter=True)
    assert text == event
    assert text.measured and text.measured.draft_bytes and min(text.measured.draft_bytes.values()) > 0


def test_fit_params_bounds_what_the_server_measures(
    engine: Engine, rpc_servers: RpcServers, tiny: Callable[[str], Path]
) -> None:
    program = fit_params(engine)
    if program is None:
        pytest.skip("no llama-fit-params beside this engine")
    argv = ("--rpc", ",".join(rpc_servers(2)), "-m", str(tiny("tiny-qwen3moe")), "-ot", EXPERTS_OF_0_TO_3)
    served = (engine.path, *argv, *SETTINGS, "--port", str(free_port()), "-lv", "4", "--fit", "on", "--log-jsonl")
    bound = fit_print(program, served, clean_env(os.environ)).measured
    real = dry_run(served, clean_env(os.environ), expect_drafter=False).measured
    assert bound and real
    assert bound.compute_bytes.keys() == real.compute_bytes.keys() == {"RPC0", "RPC1"}
    assert all(bound.compute_bytes[name] >= n for name, n in real.compute_bytes.items())
    assert bound.host_compute_bytes >= real.host_compute_bytes


def timed_plan(*argv: str) -> tuple[float, dict[str, Any]]:
    """Seconds of a whole `plan` in a process of its own, and its document."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "plan", *argv, "--json"], capture_output=True, text=True, check=False,
        cwd=Path(launcher.__file__).parent.parent, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    took = time.monotonic() - started
    assert done.stdout, done.stderr
    doc: dict[str, Any] = json.loads(done.stdout)
    return took, doc


def test_a_plan_of_five_shards_with_two_dry_runs_takes_seconds_and_a_kept_one_less(
    engine: Engine, rpc_servers: RpcServers, replica: Callable[[str], Path], launcher_home: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    model, endpoints = replica("deepseek-v4-flash-UD-Q8_K_XL"), rpc_servers(2)
    monkeypatch.setenv("MODEL_DIR", str(model.parent))
    monkeypatch.setenv("LLAMA_SERVER", engine.path)
    path = launcher_home / "config" / "slugs" / "t" / "five.yaml"
    path.parent.mkdir(parents=True)
    devices, _ = read_devices(engine, env=os.environ, rpc_hosts=endpoints, cards=())
    free_mib = min((d.free_bytes or 0) // MIB for d in devices)
    if free_mib < 16 << 10:
        pytest.skip(f"{free_mib} MiB are free: too little to place this model")
    kept = launcher_home / "cache" / "dry-runs"
    for use_mib in range(14000, 16000, 100):  # one dry run is enough where it changes nothing
        shutil.rmtree(kept, ignore_errors=True)
        path.write_text(
            f"schema: 1\nstatus: production\ntitle: five\nmodel: {{file: {model.name}}}\n"
            f"rpc: {{hosts: {json.dumps(endpoints)}, memory: {use_mib}MiB}}\n"
            f"serve: {{n_ctx: 200k, n_batch: 4096, n_ubatch: 4096}}\n"
        )
        took, doc = timed_plan("t/five")
        if len(list(kept.iterdir())) == 2:
            break
    assert len(list(kept.iterdir())) == 2
    written = {file: file.stat().st_mtime_ns for file in kept.iterdir()}
    again, cached = timed_plan("t/five")
    assert {file: file.stat().st_mtime_ns for file in kept.iterdir()} == written
    with capsys.disabled():
        print(f"\nplan of five shards on two RPC devices: two dry runs {took:.2f} s, kept {again:.2f} s")
    for found in (doc, cached):
        assert [d["source"]["compute"] for d in found["devices"]] == ["dry-run", "dry-run"]
    assert max(again, took) < 6


def test_a_drafter_is_measured_and_loaded_as_one(engine: Engine, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    draft = ("-md", str(tiny("tiny-gpt-oss")), "--spec-type", "draft-simple", "--spec-draft-n-max", "4")
    argv = ("-m", str(tiny("tiny-qwen3moe")), *draft)
    dry = (engine.path, *argv, *SETTINGS, "--port", str(free_port()), "-lv", "4", "--log-jsonl", "--fit", "on")
    run = dry_run(dry, clean_env(os.environ), expect_drafter=True)
    assert run.measured and run.measured.draft_host_bytes
    real = load(engine, tmp_path / "log", *argv, "-lv", "4")
    parts = (real.draft_model_bytes, real.draft_kv_bytes, real.draft_compute_bytes)
    assert sum(sum(part.values()) for part in parts) == pytest.approx(run.measured.draft_host_bytes, abs=3.01 * MIB)
    assert real.speculative and real.model_bytes != real.draft_model_bytes


def test_a_drafter_that_cannot_be_measured_starts_no_load(engine: Engine, replica: Callable[[str], Path]) -> None:
    model, draft = replica("deepseek-v4-flash-UD-IQ2_XXS"), replica("deepseek-v4-flash-dspark-Q8_0")
    argv = (
        engine.path, "-m", str(model), "-md", str(draft), "--spec-type", "draft-dspark", *SETTINGS,
        "--port", str(free_port()), "-lv", "4", "--log-jsonl", "--fit", "on",
    )  # fmt: skip
    run = dry_run(argv, clean_env(os.environ), expect_drafter=True)
    assert run.status == "ok" and "failed to measure the memory of the extra model" in run.note
    assert run.measured and run.measured.draft_bytes is None
    assert run.measured.model_bytes["Host"] > 80_000 * MIB


def test_a_removed_flag_is_the_reason(engine: Engine, tiny: Callable[[str], Path]) -> None:
    argv = (engine.path, "-m", str(tiny("tiny-qwen3moe")), "--draft-max", "3", "--log-jsonl", "--fit", "on")
    run = dry_run(argv, clean_env(os.environ), expect_drafter=False)
    assert run.status == "skipped" and "--draft-max" in run.note
