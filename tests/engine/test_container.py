"""A server in a real container: podman with runc, an image of the engine under test, the same four commands."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import yaml

import launcher
from launcher.serve import native, state
from tests.engine.ports import free_port

pytestmark = pytest.mark.engine
ROOT = Path(launcher.__file__).parent.parent
IMAGE = "localhost/llama-launcher-test:engine"
# runc and not crun, control groups without systemd, limits that a machine without CAP_SYS_RESOURCE can give.
CONF = """[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


def _why_not() -> str:
    missing = [name for name in ("podman", "runc") if shutil.which(name) is None]
    if missing:
        return f"no {' and no '.join(missing)}: apt-get install podman runc"
    return "" if os.geteuid() == 0 else "the image is built as root"


@pytest.fixture(scope="module")
def image(engine_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An image of the engine and its libraries; the file for CONTAINERS_CONF."""
    if why := _why_not():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("image")
    conf = folder / "containers.conf"
    conf.write_text(CONF)
    root = folder / "root"
    (root / "app").mkdir(parents=True)
    (root / "tmp").mkdir()
    shutil.copy(engine_path, root / "app" / "llama-server")
    told = subprocess.run(["ldd", str(engine_path)], capture_output=True, text=True, check=True).stdout
    for word in told.split():
        if word.startswith("/"):
            to = root / word.lstrip("/")
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(word, to)
    archive = folder / "root.tar"
    subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True)
    env = {**os.environ, "CONTAINERS_CONF": str(conf)}
    words = ["podman", "import", "--change", 'ENTRYPOINT ["/app/llama-server"]', str(archive), IMAGE]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"podman makes no image here: {done.stderr[-300:]}")
    tried = subprocess.run(
        ["podman", "run", "--rm", "--network", "host", IMAGE, "--version"],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if tried.returncode:
        pytest.skip(f"podman runs nothing here: {tried.stderr[-300:]}")
    yield conf
    subprocess.run(["podman", "rmi", "--force", IMAGE], env=env, capture_output=True, check=False)


@pytest.fixture
def model(image: Path, tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model as the Hugging Face cache keeps it, a link to a blob; everything is ended and removed afterwards."""
    blob = tmp_path / "hub" / "blobs" / "abc"
    blob.parent.mkdir(parents=True)
    shutil.copy(tiny("tiny-qwen3moe"), blob)
    path = tmp_path / "hub" / "snapshots" / "rev" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.symlink_to("../../blobs/abc")
    monkeypatch.setenv("CONTAINERS_CONF", str(image))
    monkeypatch.setenv("LLAMA_API_KEY", "")
    yield path
    for record in state.records():
        native.stop(record, grace_s=5)
    assert containers() == []


def child(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launcher", *argv],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip


def containers() -> list[str]:
    done = subprocess.run(
        ["podman", "ps", "--all", "--format", "{{.Names}}", "--filter", "label=llama-launcher"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


def switched(model: Path, port: int, kind: str = "podman") -> dict[str, object]:
    words = ["--devices", "none", "--ctx", "2k", "-b", "512", "-ub", "512", "--port", str(port)]
    done = child("switch", str(model), "--container", kind, "--image", IMAGE, *words, "--yes", "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, object] = json.loads(done.stdout)
    return document


def answer(port: int) -> str:
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    reply = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=asked, timeout=60)
    return str(reply.raise_for_status().json()["object"])


def compose_here() -> bool:
    return shutil.which("podman-compose") is not None


@pytest.mark.parametrize("kind", ["podman", "compose"])
def test_switch_status_logs_and_stop_of_a_server_in_a_container(model: Path, kind: str) -> None:
    if kind == "compose" and not compose_here():
        pytest.skip("no podman-compose: pip install podman-compose")
    port = free_port()
    switched(model, port, kind)
    assert answer(port) == "chat.completion"
    (name,) = containers()
    (record,) = state.records()
    assert record.container["name"] == name
    assert record.server is not None
    # the process of the record is the one inside, so memory and cards are its own
    inside = Path(f"/proc/{record.server.pid}/cmdline").read_bytes().split(b"\0")
    assert inside[0] == b"/app/llama-server"
    assert tuple(w.decode() for w in inside[1:-1]) == record.argv[1:]
    (seen,) = json.loads(child("status", "--json").stdout)["servers"]
    assert seen["state"] == "ready"
    assert seen["rss_bytes"] > 0
    assert "all slots are idle" in child("logs", "-n", "200").stdout
    stopped = child("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert containers() == []
    assert state.records() == ()
    (end,) = state.history()
    assert end.reason == "stopped"


def test_a_killed_launcher_leaves_a_container_that_status_knows_and_stop_ends(model: Path) -> None:
    port = free_port()
    switched(model, port)
    (record,) = state.records()
    assert record.keeper is not None
    for pid in (record.keeper.pid, record.container["watcher"]["pid"]):
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)
    assert answer(port) == "chat.completion"
    (seen,) = json.loads(child("status", "--json").stdout)["servers"]
    assert (seen["state"], seen["keeper_alive"]) == ("ready", False)
    assert child("stop").returncode == 0
    assert containers() == []
    assert state.records() == ()


def test_a_container_that_is_killed_from_outside_is_a_crash_in_the_history(model: Path) -> None:
    switched(model, free_port())
    (name,) = containers()
    subprocess.run(["podman", "kill", name], capture_output=True, check=True)
    deadline = time.monotonic() + 20
    while not state.history() and time.monotonic() < deadline:
        time.sleep(0.1)
    (end,) = state.history()
    assert (end.reason, end.signal) == ("crashed", "SIGKILL")
    assert containers() == []


def test_the_real_limits_are_those_of_the_plan(model: Path) -> None:
    switched(model, free_port())
    (record,) = state.records()
    done = subprocess.run(
        ["podman", "inspect", record.container["name"]],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (found,) = json.loads(done.stdout)
    assert found["HostConfig"]["Memory"] == record.container["memory_bytes"]
    binds = {m["Destination"]: m["RW"] for m in found["Mounts"]}
    assert binds == {str(model.parent): False, str(model.resolve().parent): False}


def test_a_real_compose_reads_the_override_as_it_was_meant(model: Path) -> None:
    """podman-compose merges both files: rules keep their dollars, lists stay lists."""
    if not compose_here():
        pytest.skip("no podman-compose: pip install podman-compose")
    switched(model, free_port(), "compose")
    (record,) = state.records()
    done = subprocess.run([*record.container["compose"], "config"], capture_output=True, text=True, check=True)
    service = yaml.safe_load(done.stdout)["services"]["llama-server"]
    assert tuple(str(w) for w in service["command"]) == record.argv[1:]
    assert service["network_mode"] == "host"
    assert service["mem_limit"] == f"{record.container['memory_bytes']}b"
