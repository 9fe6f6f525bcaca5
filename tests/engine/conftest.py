"""A real llama-server, the demo model and RPC servers on loopback. scripts/test.sh provides the first two.

LLAMA_SERVER_UNDER_TEST   the llama-server; ggml-rpc-server lies beside it
LAUNCHER_DEMO_MODEL       the demo model, else demo/ below the first MODEL_DIR (~/models)
LAUNCHER_REQUIRE_ENGINE   1: a missing engine fails the run; else tests marked `engine` are skipped, with the reason
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.ports import free_port

ENGINE = os.environ.get("LLAMA_SERVER_UNDER_TEST", "")
REQUIRED = os.environ.get("LAUNCHER_REQUIRE_ENGINE", "") == "1"
# Read now: every test gets an environment without MODEL_DIR.
_MODELS = Path(os.environ.get("MODEL_DIR", "").split(os.pathsep)[0] or Path.home() / "models")
DEMO_MODEL = Path(os.environ.get("LAUNCHER_DEMO_MODEL") or _MODELS / "demo" / "smol-moe-8x135m-q4_1.gguf")

RpcServers = Callable[..., tuple[str, ...]]


def _problem() -> str:
    if not ENGINE:
        return "LLAMA_SERVER_UNDER_TEST names no llama-server: run scripts/test.sh, which provides one"
    return "" if os.access(ENGINE, os.X_OK) else f"LLAMA_SERVER_UNDER_TEST={ENGINE} cannot be run"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    problem = _problem()
    marked = [item for item in items if item.get_closest_marker("engine")]
    if problem and marked and REQUIRED:
        raise pytest.UsageError(problem)
    if problem:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=problem))


@pytest.fixture(scope="session")
def engine_path() -> Path:
    """The llama-server under test."""
    return Path(ENGINE).absolute()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The eight-expert demo model."""
    if not DEMO_MODEL.is_file():
        problem = f"{DEMO_MODEL} is missing: python scripts/make_demo_model.py makes it"
        (pytest.fail if REQUIRED else pytest.skip)(problem)
    return DEMO_MODEL


@pytest.fixture
def rpc_servers(engine_path: Path, tmp_path: Path) -> Iterator[RpcServers]:
    """`rpc_servers(2)`: endpoints of that many fresh RPC servers, each one CPU device, ended after the test.

    They keep nothing between clients and serve one client at a time.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(n: int = 1) -> tuple[str, ...]:
        return tuple(_start_one(engine_path.with_name("ggml-rpc-server"), tmp_path, started) for _ in range(n))

    yield start
    for child in started:
        child.terminate()
    for child in started:
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _start_one(program: Path, folder: Path, started: list[subprocess.Popen[bytes]]) -> str:
    for _ in range(5):  # another process may take the free port before the server does
        port = free_port()
        log = folder / f"rpc-{port}.log"
        with log.open("wb") as out:
            child = subprocess.Popen(
                [program, "-H", "127.0.0.1", "-p", str(port), "-d", "CPU"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                # idle workers that spin take the cores from the engine, which waits for this very device
                env={**os.environ, "OMP_WAIT_POLICY": "passive"},
            )
        started.append(child)
        deadline = time.monotonic() + 30
        while child.poll() is None and time.monotonic() < deadline:
            if _listens(port):
                return f"127.0.0.1:{port}"
            time.sleep(0.01)
    msg = f"{program} does not listen: {log.read_text(errors='replace')}"
    raise RuntimeError(msg)


def _listens(port: int) -> bool:
    """Read from the kernel's table: a connection would be this server's one client."""
    rows = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    return any(r.split()[1] == f"0100007F:{port:04X}" and r.split()[3] == "0A" for r in rows)
