"""`switch -` and `attach`: back to what ran before, and the view of a load whose terminal is gone."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.serve import native, state
from launcher.workflows import back, overrides
from tests.unit.test_cli import ROOT, child, engine, model, ports, slug
from tests.unit.test_state import end, record

__all__ = ["engine", "model", "ports"]  # fixtures
Ports = Callable[[], int]


@pytest.fixture(autouse=True)
def _model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_DIR", str(tmp_path.parent))


# ------------------------------------------------------------------------------------------ switch -


def ready(name: str, at: float, **changes: object) -> None:
    ended = end(record(slug=name, started_at=at), ended_at=at + 50, ready_at=at + 10, reason="stopped")
    state.append_history(replace(ended, **changes))


def test_the_last_that_was_ready_is_gone_back_to() -> None:
    ready("demo/a", 100.0)
    ready("demo/b", 200.0, asked={"given": {"ctx": "64k"}, "force": True, "engine": "/opt/x"})
    ready("demo/c", 300.0, ready_at=None, reason="start failed")
    ready("demo/d", 400.0, ready_at=None)
    found = back.before()
    assert (found.slug, found.given, found.force, found.engine) == ("demo/b", {"ctx": "64k"}, True, "/opt/x")


def test_what_runs_is_not_what_ran_before() -> None:
    ready("demo/a", 100.0)
    ready("demo/b", 200.0)
    state.write(record(slug="demo/b", server=state.identify(os.getpid())))
    assert back.before().slug == "demo/a"
    state.write(record(slug="demo/b", server=state.identify(os.getpid()), asked={"given": {"ctx": "8k"}}))
    assert (back.before().slug, back.before().given) == ("demo/b", {}), "the same with other options is another run"


def test_one_that_nobody_saw_ending_counts() -> None:
    ready("demo/a", 100.0)
    state.write(record(slug="demo/b", ready_at=500.0))
    assert back.before().slug == "demo/b"


def test_with_nothing_before_there_is_nothing_to_go_back_to() -> None:
    ready("demo/a", 100.0, ready_at=None, reason="start failed")
    with pytest.raises(UsageError) as refused:
        back.before()
    assert (refused.value.reference, refused.value.fix) == (
        "nothing-before",
        "launcher history     # then: switch SLUG",
    )
    assert "(1 runs in the history)" in refused.value.message


@pytest.mark.usefixtures("engine")
def test_there_and_back_with_the_options_of_then(launcher_home: Path, model: Path, ports: Ports) -> None:  # noqa: F811
    for name in ("my/one", "my/two"):
        slug(launcher_home, name, model, port=ports())
    assert child("switch", "-").returncode == 2
    other = ports()
    assert child("switch", "one", "--ctx", "2k", "--port", str(other)).returncode == 0
    assert child("switch", "two", "--yes").returncode == 0
    done = child("switch", "-", "--yes")
    assert done.returncode == 0, done.stderr
    assert f"back     to my/one --ctx 2k --port {other}" in done.stdout
    (now,) = state.running()
    assert (now.slug, now.port) == ("my/one", other)
    assert now.argv[now.argv.index("-c") + 1] == "2048"
    assert child("switch", "-", "--yes", "--json").returncode == 0
    assert [r.slug for r in state.running()] == ["my/two"]
    assert child("stop").returncode == 0
    assert child("switch", "-").returncode == 0
    assert [r.slug for r in state.running()] == ["my/two"], "with nothing running it is the last one"


@pytest.mark.usefixtures("engine")
def test_back_from_another_folder_means_the_same_files(
    launcher_home: Path,
    model: Path,
    ports: Ports,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,  # noqa: F811
) -> None:
    for name in ("my/one", "my/two"):
        slug(launcher_home, name, model, port=ports())
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    shutil.copy(model, here / "mm.gguf")
    shutil.copy(model, here / "draft.gguf")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def at(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "launcher", "switch", *words]
        return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False, timeout=120)

    files = ("--mmproj", "mm.gguf", "--drafter", "draft.gguf", "--engine", "../engine/llama-server")
    done = at(here, "one", "--ctx", "2k", "--kv", "q8_0", *files)
    assert done.returncode == 0, done.stderr
    assert at(here, "two", "--yes").returncode == 0
    done = at(there, "-", "--yes", "-c", "1024", "-ctk", "f16")
    assert done.returncode == 0, done.stderr
    (now,) = state.running()
    words = now.argv
    assert now.slug == "my/one"
    assert words[words.index("-c") + 1] == "1024"
    assert {str(here / "mm.gguf"), str(here / "draft.gguf")} <= set(words)
    assert now.asked["engine"] == str(here / "../engine/llama-server")
    assert now.asked["given"] == {
        "mmproj": str(here / "mm.gguf"), "drafter": str(here / "draft.gguf"), "ctx_total": "1024", "type_k": "f16",
        "type_v": "q8_0",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("then", "now", "found"),
    [
        ({"ctx": "32k"}, {"ctx_total": "65536"}, {"ctx_total": "65536"}),
        ({"ctx_total": "65536", "port": 1}, {"ctx": "32k"}, {"port": 1, "ctx": "32k"}),
        ({"type_k": "f16", "type_v": "q8_0"}, {"kv": "q4_0"}, {"kv": "q4_0"}),
        ({"kv": "q8_0/q4_0"}, {"type_k": "f16"}, {"type_k": "f16", "type_v": "q4_0"}),
        ({"kv": "q8_0"}, {"kv": "f16"}, {"kv": "f16"}),
        ({"batch": 512}, {"ubatch": 256}, {"batch": 512, "ubatch": 256}),
        ({"devices": "0,1", "tensor_split": "3,2"}, {"devices": "1"}, {"devices": "1"}),
        ({"devices": "0,1"}, {"tensor_split": "3,2"}, {"devices": "0,1", "tensor_split": "3,2"}),
    ],
)
def test_an_option_given_now_replaces_what_says_the_same(
    then: dict[str, object], now: dict[str, object], found: dict[str, object]
) -> None:
    assert overrides.over(then, now) == found
    overrides.settings(None, overrides.over(then, now))  # nothing is said twice


# ------------------------------------------------------------------------------------------ restart


@pytest.mark.usefixtures("engine")
def test_what_the_slug_allows_is_what_its_keeper_does(launcher_home: Path, model: Path, ports: Ports) -> None:  # noqa: F811
    slug(launcher_home, "my/one", model, port=ports(), more="restart: on-failure\n")
    assert child("switch", "one").returncode == 0
    for turn in range(2):
        (now,) = state.running()
        assert (now.restarts, now.server is not None) == (turn, True)
        assert now.server is not None
        os.kill(now.server.pid, signal.SIGABRT)
        deadline = time.monotonic() + 20
        while len(state.history()) <= turn or (turn == 0 and not any(r.state == "ready" for r in state.running())):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    while native.alive(now.keeper):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert state.running() == ()
    said = child("history").stdout
    assert said.count("crashed (SIGABRT)") == 2
    assert "had been started again 1 x" in said


# ------------------------------------------------------------------------------------------- attach


def lost(model: Path, home: Path, port: int, *extra: str) -> None:  # noqa: F811
    """A `switch` whose terminal goes away while the server loads."""
    slug(home, "my/slow", model, port=port, extra=", ".join(f'"{word}"' for word in extra))
    argv = [sys.executable, "-m", "launcher", "switch", "slow"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        deadline = time.monotonic() + 20
        while not any(r.server for r in state.running()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=20)


@pytest.mark.usefixtures("engine")
def test_attach_shows_the_load_and_marks_it_ready(launcher_home: Path, model: Path, ports: Ports) -> None:  # noqa: F811
    port = ports()
    lost(model, launcher_home, port, "--load-s", "2.5")
    assert state.running()[0].state == "starting"
    done = child("attach")
    assert done.returncode == 0, done.stderr
    assert "load " in done.stdout
    assert f"READY    http://127.0.0.1:{port}/v1  model fake  2,048 tokens, 1 stream " in done.stdout
    (now,) = state.running()
    assert (now.state, now.ready_at is not None) == ("ready", True)
    again = child("attach", "slow", "--json")
    doc = json.loads(again.stdout)
    assert (doc["server"]["slug"], doc["activity"]["busy"]) == ("my/slow", 0)
    assert child("attach", "nobody").returncode == 2


@pytest.mark.usefixtures("engine")
def test_ctrl_c_ends_the_view_alone(launcher_home: Path, model: Path, ports: Ports) -> None:  # noqa: F811
    lost(model, launcher_home, ports(), "--hang")
    (before,) = state.running()
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "launcher", "attach"]
    with subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT) as process:
        os.close(theirs)
        shown = b""
        while b"load " not in shown:
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        try:
            while piece := os.read(ours, 4096):
                shown += piece
        except OSError:  # how Linux says that the other end is closed
            pass
        assert process.wait(30) == 130
    os.close(ours)
    assert b"safe to disconnect: `launcher attach` brings this view back" in shown
    assert b"only this view: my/slow goes on (pid " in shown
    assert native.alive(before.server)
    assert native.alive(before.keeper)


@pytest.mark.usefixtures("engine")
def test_a_load_that_fails_is_told_by_attach_too(launcher_home: Path, model: Path, ports: Ports) -> None:  # noqa: F811
    lost(model, launcher_home, ports(), "--load-s", "1.5", "--fail", "oom")
    done = child("attach")
    assert done.returncode == 8
    assert done.stderr.startswith("error[engine-exited]")
    assert "out of memory on CUDA1" in done.stderr


def test_with_nothing_running_there_is_nothing_to_attach_to(launcher_home: Path) -> None:
    assert launcher_home.exists()
    done = child("attach")
    assert (done.returncode, done.stderr.split("]")[0]) == (2, "error[not-running")
