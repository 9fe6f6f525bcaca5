"""dry_run.py: the pure parser on captured logs, and its child processes with scripts that act as an engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launcher.facts.dry_run import dry_run, parse_events
from launcher.structs import MeasuredCompute
from launcher.units import MIB

CAPTURED = Path(__file__).parents[1] / "captured"


def lines(name: str) -> list[str]:
    return (CAPTURED / name).read_text(encoding="utf-8").splitlines()


def measured(found: MeasuredCompute | None) -> MeasuredCompute:
    assert found is not None
    return found


def test_rows_of_devices_and_host() -> None:
    run = parse_events(lines("fit_two_devices.jsonl"))
    assert (run.status, run.note) == ("ok", "")
    assert run.measured == MeasuredCompute(
        compute_bytes={"RPC0": 8 * MIB, "RPC1": 12 * MIB},
        host_compute_bytes=11 * MIB,
        model_bytes={"RPC0": 1 * MIB, "RPC1": 14 * MIB, "Host": 12 * MIB},
        context_bytes={"RPC0": 8 * MIB, "RPC1": 8 * MIB, "Host": 0},
    )


def test_the_second_event_is_the_drafters() -> None:
    found = measured(parse_events(lines("fit_draft.jsonl"), expect_drafter=True).measured)
    assert found.compute_bytes == {"RPC0": 30 * MIB, "RPC1": 28 * MIB}
    assert found.draft_bytes == {"RPC0": (7 + 4 + 33) * MIB, "RPC1": (8 + 4 + 31) * MIB}
    assert found.draft_host_bytes == 24 * MIB


def test_an_mtp_drafter_does_not_count_the_models_weights_again() -> None:
    found = measured(parse_events(lines("fit_mtp_lv5.jsonl"), expect_drafter=True, drafter_weights=False).measured)
    assert found.draft_host_bytes == (2 + 7) * MIB
    assert found.model_bytes == {"Host": 21 * MIB}


def test_repacked_weights_count_as_host_memory() -> None:
    row = '{"kind":"%s","name":"%s","self":0,"model":%d,"context":1,"compute":2}'
    rows = ",".join([row % ("host", "Host", 100), row % ("buffer_type", "CPU_REPACK", 900)])
    found = measured(parse_events(['{"type":"fit_memory_breakdown","data":{"rows":[' + rows + "]}}"]).measured)
    assert (found.model_bytes["Host"], found.context_bytes["Host"], found.host_compute_bytes) == (
        1000 * MIB, 2 * MIB, 4 * MIB,
    )  # fmt: skip


def test_a_drafter_that_cannot_be_measured_leaves_the_model() -> None:
    run = parse_events(lines("fit_unmeasured_drafter.jsonl"), expect_drafter=True)
    assert run.status == "ok"
    assert "failed to measure the memory of the extra model" in run.note
    found = measured(run.measured)
    assert found.draft_bytes is None and found.draft_host_bytes is None
    assert found.model_bytes["Host"] > 80_000 * MIB


def test_a_missing_model_is_skipped_with_the_engines_words() -> None:
    run = parse_events(lines("fit_missing_model.jsonl"))
    assert (run.status, run.measured) == ("skipped", None)
    assert run.note.startswith("gguf_init_from_file: failed to open GGUF file '/models/nope.gguf'")


def test_the_load_line_of_a_trial_does_not_stop_the_reading() -> None:
    log = lines("fit_mtp_lv5.jsonl")
    first = next(i for i, line in enumerate(log) if "load_tensors: loading" in line)
    assert any("fit_memory_breakdown" in line for line in log[first:])
    assert parse_events(log).status == "ok"
    assert parse_events(log[first:]).status == "skipped"  # outside of a fit it is the real load


def engine(tmp_path: Path, body: str) -> tuple[str, ...]:
    """A script that plays llama-server; it writes its pid, and a second file if it was left alive to load."""
    script = tmp_path / "engine.py"
    script.write_text(
        "import os, sys, time\n"
        f"home = {str(tmp_path)!r}\n"
        "open(home + '/pid', 'w').write(str(os.getpid()))\n"
        "def say(text): print(text, flush=True)\n"
        "def load():\n    time.sleep(1.5)\n    open(home + '/loaded', 'w').close()\n    time.sleep(60)\n" + body
    )
    return (sys.executable, str(script))


def gone(tmp_path: Path) -> bool:
    try:
        return psutil.Process(int((tmp_path / "pid").read_text())).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


EVENT = next(line for line in lines("fit_two_devices.jsonl") if "fit_memory_breakdown" in line)


def test_the_child_is_killed_before_it_loads(tmp_path: Path) -> None:
    argv = engine(tmp_path, f"say({EVENT!r})\nload()\n")
    run = dry_run(argv, os.environ, expect_drafter=False)
    assert run.status == "ok"
    assert gone(tmp_path) and not (tmp_path / "loaded").exists()


def test_a_load_line_ends_it_though_the_drafter_is_missing(tmp_path: Path) -> None:
    load_line = '{"type":"log","level":"info","msg":"load_tensors: loading model tensors, this can take a while...\\n"}'
    argv = engine(tmp_path, f"say({EVENT!r})\nsay({load_line!r})\nload()\n")
    run = dry_run(argv, os.environ, expect_drafter=True)
    assert (run.status, measured(run.measured).draft_bytes) == ("ok", None)
    assert "drafter" in run.note
    assert gone(tmp_path) and not (tmp_path / "loaded").exists()


def test_a_silent_engine_runs_into_the_time_out(tmp_path: Path) -> None:
    run = dry_run(engine(tmp_path, "time.sleep(60)\n"), os.environ, expect_drafter=False, timeout_s=0.5)
    assert (run.status, run.note) == ("skipped", "the engine measured nothing in 0.5 s")
    assert gone(tmp_path)


def test_a_steady_talker_runs_into_the_time_out_too(tmp_path: Path) -> None:
    argv = engine(tmp_path, "while True:\n    say('noise')\n    time.sleep(0.01)\n")
    started = time.monotonic()
    run = dry_run(argv, os.environ, expect_drafter=False, timeout_s=0.5)
    assert run.status == "skipped" and time.monotonic() - started < 5
    assert gone(tmp_path)


def test_what_it_wrote_to_stderr_is_the_reason(tmp_path: Path) -> None:
    argv = engine(tmp_path, "print('error: invalid argument: --log-jsonl', file=sys.stderr)\nsys.exit(1)\n")
    assert dry_run(argv, os.environ, expect_drafter=False).note == "error: invalid argument: --log-jsonl"


def test_a_silent_end_is_told_with_its_code(tmp_path: Path) -> None:
    argv = engine(tmp_path, "os.kill(os.getpid(), 4)\n")
    assert dry_run(argv, os.environ, expect_drafter=False).note == "the engine ended with code -4"


def test_no_such_engine(tmp_path: Path) -> None:
    run = dry_run((str(tmp_path / "none"),), os.environ, expect_drafter=False)
    assert run.status == "skipped" and "No such file" in run.note


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_no_orphan_when_we_are_ended(tmp_path: Path, end: signal.Signals) -> None:
    argv = engine(tmp_path, "load()\n")
    caller = (
        f"import os\nfrom launcher.facts.dry_run import dry_run\ndry_run({argv!r}, os.environ, expect_drafter=False)\n"
    )
    us = subprocess.Popen([sys.executable, "-c", caller], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 10
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    us.send_signal(end)
    us.wait(10)
    while not gone(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not (tmp_path / "loaded").exists()
