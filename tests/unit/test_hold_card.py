"""A card is held to the asked size and let go in every way it can end: the real calls, over a driver that counts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.errors import DeviceUnusable, LauncherError, Refused, UsageError
from launcher.units import GIB, MIB
from scripts import hold_card
from scripts.hold_card import Holding, held

ROOT = Path(__file__).parents[2]
FIRST, SECOND = "GPU-00102030-4050-6070-0010-203040506070", "GPU-01112131-4151-6171-0111-213141516171"


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("cuda") / "libfakecuda.so"
    subprocess.run(
        ["cc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, ROOT / "tests/fake_cuda.c"], check=True
    )
    return library


@pytest.fixture
def cuda(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The library; a card with 79 GiB and a bit free."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("FAKE_CUDA_FREE", str(79 * GIB + 12345678))
    monkeypatch.setenv("FAKE_CUDA_LOG", str(tmp_path / "freed"))
    return str(built)


def start(cuda: str, *argv: str) -> subprocess.Popen[str]:
    program = [sys.executable, str(ROOT / "scripts/hold_card.py"), "--library", cuda, *argv]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        program, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


@pytest.mark.parametrize("overhead_bytes", [0, 2 * MIB])
def test_what_is_asked_stays_free(cuda: str, monkeypatch: pytest.MonkeyPatch, overhead_bytes: int) -> None:
    monkeypatch.setenv("FAKE_CUDA_OVERHEAD", str(overhead_bytes))
    with held("0", 24 * GIB, library=cuda) as holding:
        assert holding.device == "0"
        assert holding.uuid == FIRST
        assert 24 * GIB <= holding.free_bytes <= 24 * GIB + hold_card.SLACK_BYTES
        if not overhead_bytes:
            assert holding.held_bytes + holding.free_bytes == 79 * GIB + 12345678


def test_a_card_is_found_by_its_uuid(cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    with held(SECOND.lower(), 78 * GIB, library=cuda) as holding:
        assert holding.uuid == SECOND


def test_a_card_in_pieces_is_held_by_smaller_allocations(cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_LARGEST", str(100 * MIB))
    with held("0", 70 * GIB, library=cuda) as holding:
        assert 70 * GIB <= holding.free_bytes <= 70 * GIB + hold_card.SLACK_BYTES


def test_all_is_freed_after_the_block(cuda: str, tmp_path: Path) -> None:
    with held("0", GIB, library=cuda):
        assert not (tmp_path / "freed").exists()
    assert (tmp_path / "freed").read_text() == str(79 * GIB + 12345678)


def stdin_closed(child: subprocess.Popen[str]) -> None:
    assert child.stdin
    child.stdin.close()


def terminated(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGTERM)


@pytest.mark.parametrize("end", [stdin_closed, terminated])
def test_the_command_holds_until_it_is_ended(
    cuda: str, tmp_path: Path, end: Callable[[subprocess.Popen[str]], None]
) -> None:
    child = start(cuda, "--device", "0", "--leave", "2.5GiB")
    assert child.stdin and child.stdout and child.stderr
    try:
        told = json.loads(child.stdout.readline())
        assert set(told) == {"device", "uuid", "held_bytes", "free_bytes"}
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)
        end(child)
        assert child.wait(10) == 0
        assert (tmp_path / "freed").read_text() == str(79 * GIB + 12345678)
        assert child.stderr.read() == ""
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout, child.stderr):
            pipe.close()


def test_a_parent_that_is_killed_takes_its_holder_along(cuda: str, tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from scripts.hold_card import held\n"
        f"with held('0', {GIB}, library={cuda!r}):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    with parent.stdout:
        assert parent.stdout.readline() == "held\n"
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 10
    while not (tmp_path / "freed").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("env", "device", "leave", "kind", "reference", "says"),
    [
        ({"FREE": str(3 * GIB)}, "0", "24GiB", Refused, "card-too-full", "has 3.0 GiB free, 24.0 GiB should be left"),
        ({"INIT": "100"}, "0", "1GiB", DeviceUnusable, "cuda-failed", "cuInit failed with 100 (CUDA_ERROR_NO_DEVICE)"),
        ({"INIT": "999"}, "0", "1GiB", DeviceUnusable, "cuda-failed", "cuInit failed with 999 (no name)"),
        ({"BROKEN": "700"}, "0", "1GiB", DeviceUnusable, "cuda-failed", "cuMemAlloc_v2 of 1.0 GiB failed with 700"),
        ({"LARGEST": "0"}, "0", "1GiB", DeviceUnusable, "card-not-held", "has 79.0 GiB free after 0 B were held"),
        ({"DEVICES": "2"}, "2", "1GiB", DeviceUnusable, "device-unknown", "no device 2 among 2"),
        ({}, "0", "some", UsageError, "size-invalid", "not a size: 'some'"),
    ],
)  # fmt: skip
def test_every_refusal_names_its_number_and_a_fix(
    cuda: str, monkeypatch: pytest.MonkeyPatch,
    env: dict[str, str], device: str, leave: str, kind: type[LauncherError], reference: str, says: str,
) -> None:  # fmt: skip
    for name, value in env.items():
        monkeypatch.setenv(f"FAKE_CUDA_{name}", value)
    child = start(cuda, "--device", device, "--leave", leave)
    out, err = child.communicate(timeout=20)
    assert out == ""
    assert child.returncode == kind.exit_code
    first, *_, last = err.splitlines()
    assert first.startswith(f"error[{reference}]: ")
    assert says in first
    assert last.startswith("fix: ")
    assert "Traceback" not in err


def test_cards_that_are_hidden_are_told(cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(DeviceUnusable) as failed, held(SECOND, GIB, library=cuda):
        pass
    assert failed.value.context == f"0 is {FIRST}\nCUDA_VISIBLE_DEVICES=0 hides all others"


def test_a_machine_without_a_driver_is_a_refusal(tmp_path: Path) -> None:
    child = start(str(tmp_path / "libcuda.so.1"), "--device", "0", "--leave", "1GiB")
    _, err = child.communicate(timeout=20)
    assert child.returncode == DeviceUnusable.exit_code
    assert err.startswith("error[cuda-missing]: no CUDA driver: ")
    assert "Traceback" not in err


def test_a_driver_without_the_calls_is_a_refusal() -> None:
    with pytest.raises(DeviceUnusable, match="no cuInit") as failed:
        hold_card.Driver("libc.so.6")
    assert failed.value.reference == "cuda-too-old"


def test_the_parent_raises_what_the_child_refused(cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_FREE", str(3 * GIB))
    with pytest.raises(Refused, match=r"3\.0 GiB free") as refused, held("0", 24 * GIB, library=cuda):
        pass
    assert refused.value.reference == "card-too-full"
    assert refused.value.fix.startswith("--leave 3072MiB")


def test_a_holder_that_is_too_slow_is_ended(cuda: str) -> None:
    with pytest.raises(DeviceUnusable, match="did not answer in time"), held("0", GIB, library=cuda, start_s=0.001):
        pass


def test_a_holder_that_ended_early_spoils_the_block(cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def spy(*args: object, **kwargs: object) -> subprocess.Popen[str]:
        started.append(popen(*args, **kwargs))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(hold_card.subprocess, "Popen", spy)

    def measured() -> Holding:
        with held("0", GIB, library=cuda) as holding:
            started[0].kill()
            started[0].wait(10)
        return holding

    with pytest.raises(DeviceUnusable, match="ended with -9") as failed:
        measured()
    assert failed.value.reference == "card-released"
