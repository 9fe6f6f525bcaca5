"""Every test gets its own LAUNCHER_HOME; replicas are made once and kept in a cache folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPLICA_CACHE = Path(os.environ.get("LAUNCHER_TEST_CACHE", Path.home() / ".cache" / "llama-launcher-tests"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden` rewrites the golden plans instead of comparing with them."""
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/plans")


@pytest.fixture(autouse=True)
def launcher_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home for config, state and cache; nothing of the user's environment reaches a test."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("LAUNCHER_HOME", str(home))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    pins = [name for name in os.environ if name.startswith("OT_G")]
    for name in ("MODEL_DIR", "LLAMA_SERVER", "WEIGHT_KEY", "SPEC_N", "HF_HOME", *pins):
        monkeypatch.delenv(name, raising=False)
    return home


def _make(script: str, args: list[str], out: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "replicas" / script), *args], capture_output=True, text=True, check=False
    )
    if done.returncode:
        msg = f"{script} {args}: {done.stderr}"
        raise RuntimeError(msg)
    (out / ".done").touch()


@pytest.fixture(scope="session")
def replica() -> Callable[[str], Path]:
    """`replica("gpt-oss-20b-MXFP4")`: the first shard of a header-exact sparse replica, made once."""

    def get(name: str) -> Path:
        out = REPLICA_CACHE / "replicas" / name
        if not (out / ".done").exists():
            out.mkdir(parents=True, exist_ok=True)
            _make("make_replica.py", [str(HERE / "replicas" / "specs" / f"{name}.yaml"), str(out), "--quiet"], out)
        return sorted(out.glob("*.gguf"))[0]

    return get


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], Path]:
    """`tiny("tiny-qwen3moe")`: a small random-weight MoE model that really runs."""

    def get(name: str) -> Path:
        out = REPLICA_CACHE / "tiny"
        if not (out / f"{name}.gguf").exists():
            out.mkdir(parents=True, exist_ok=True)
            _make("make_tiny.py", [str(out), "--only", name], out)
        return out / f"{name}.gguf"

    return get


@pytest.fixture(autouse=True, scope="session")
def plain_signals() -> None:
    """What `nohup` and some CI runners ignore is ignored by every child too; tests send it and expect its default."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
