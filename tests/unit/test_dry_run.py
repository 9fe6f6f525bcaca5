"""dry_run.py: the pure parser on captured logs, and its child processes with scripts that act as an engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from launcher.facts import dry_run_cache, paths
from launcher.facts.dry_run import DryRun, dry_run, fit_print, parse_events
from launcher.structs import MeasuredCompute
from launcher.units import MIB
from tests import models

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


def test_the_table_of_an_engine_without_json() -> None:
    run = parse_events(lines("fit_draft_text.log"))
    assert (run.status, run.note) == ("ok", "")
    assert run.measured == MeasuredCompute(
        compute_bytes={"RPC0": 30 * MIB, "RPC1": 28 * MIB},
        host_compute_bytes=21 * MIB,
        model_bytes={"RPC0": 17 * MIB, "RPC1": 10 * MIB, "Host": 0},
        context_bytes={"RPC0": 20 * MIB, "RPC1": 12 * MIB, "Host": 0},
    )
    found = measured(parse_events(lines("fit_draft_text.log"), expect_drafter=True).measured)
    assert found.draft_bytes == {"RPC0": (9 + 10 + 33) * MIB, "RPC1": (6 + 8 + 31) * MIB}
    assert found.draft_host_bytes == 24 * MIB


SAYS = "0.00.060.584 I common_memory_breakdown_print: |"
TABLE = f"""\
{SAYS} memory breakdown [MiB]      | total    free     self   model   context   compute   |
{SAYS}   - CUDA0 (3090 | = (odd)) | 24576 = 23800 + ( 1000 =   700 +     100 +     200) + -224 |
{SAYS}   - Host                    |                    500 =   300 +       0 +     200         |
"""
REPACK = f"""\
{SAYS}   - CPU_REPACK              |                   9000 =  8996 +       1 +       3         |
0.00.120.983 I common_params_fit_impl: projected memory use with initial parameters [MiB]:
"""


def test_rows_of_a_table() -> None:
    found = measured(parse_events((TABLE + REPACK).splitlines()).measured)
    assert found.compute_bytes == {"CUDA0": 200 * MIB}
    assert found.model_bytes == {"CUDA0": 700 * MIB, "Host": 9296 * MIB}
    assert found.host_compute_bytes == 203 * MIB


def test_a_table_that_breaks_off_is_none() -> None:
    assert parse_events(TABLE.splitlines()).status == "ok"
    assert parse_events(TABLE.splitlines()[:2]).status == "skipped"


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


def test_the_table_is_read_from_stderr_and_the_child_killed_before_it_loads(tmp_path: Path) -> None:
    body = f"print({TABLE + REPACK!r}, end='', file=sys.stderr, flush=True)\nload()\n"
    run = dry_run(engine(tmp_path, body), os.environ, expect_drafter=False)
    assert measured(run.measured).compute_bytes == {"CUDA0": 200 * MIB}
    assert gone(tmp_path) and not (tmp_path / "loaded").exists()


def test_the_text_of_an_error_is_the_reason(tmp_path: Path) -> None:
    said = "0.00.120.987 I srv  init: ok\n0.00.121.405 E llama_model_load: error loading model: no such tensor\n"
    argv = engine(tmp_path, f"print({said!r}, file=sys.stderr)\nsys.exit(1)\n")
    assert dry_run(argv, os.environ, expect_drafter=False).note == (
        "llama_model_load: error loading model: no such tensor"
    )


def fit_params(tmp_path: Path, body: str) -> str:
    script = tmp_path / "llama-fit-params"
    script.write_text(f"#!{sys.executable}\nimport json, sys\n{body}\n")
    script.chmod(0o755)
    return str(script)


SERVED = ("llama-server", "-m", "/m.gguf", "-c", "8192", "-np", "1", "-no-kvu", "-dev", "RPC0", "--port", "1", "-md",
          "/d.gguf", "-ot", "a=CPU", "--metrics", "--fit", "off")  # fmt: skip


def test_fit_params_gets_what_it_knows_and_bounds_compute_alone(tmp_path: Path) -> None:
    program = fit_params(
        tmp_path,
        f"json.dump(sys.argv[1:], open({str(tmp_path / 'argv')!r}, 'w'))\nprint('RPC0 11 20 16 \\nHost 6 0 15 ')",
    )
    run = fit_print(program, SERVED, os.environ)
    assert run.measured == MeasuredCompute(
        compute_bytes={"RPC0": 16 * MIB}, host_compute_bytes=15 * MIB, model_bytes={}, context_bytes={}
    )
    assert json.loads((tmp_path / "argv").read_text()) == [
        "-m", "/m.gguf", "-c", "8192", "-dev", "RPC0", "-ot", "a=CPU", "--fit-print", "on",
    ]  # fmt: skip


def test_fit_params_that_fails_says_why(tmp_path: Path) -> None:
    run = fit_print(fit_params(tmp_path, "sys.exit('error: invalid argument: -ot')"), SERVED, os.environ)
    assert (run.status, run.note, run.measured) == ("skipped", "error: invalid argument: -ot", None)
    assert fit_print(str(tmp_path / "none"), SERVED, os.environ).status == "skipped"


OK = DryRun(
    status="ok", note="",
    measured=MeasuredCompute(
        compute_bytes={"CUDA0": 5}, host_compute_bytes=1, model_bytes={"CUDA0": 6, "Host": 2},
        context_bytes={"CUDA0": 7}, draft_bytes={"CUDA0": 8}, draft_host_bytes=9,
    ),
)  # fmt: skip


def test_an_answer_is_kept() -> None:
    assert dry_run_cache.load("k") is None
    dry_run_cache.store("k", OK)
    assert dry_run_cache.load("k") == OK
    (paths.cache_dir() / "dry-runs" / "k.json").write_text('{"note": "", "measured": {"compute_bytes": 3}}')
    assert dry_run_cache.load("k") is None


def test_only_a_complete_answer_is_kept() -> None:
    unmeasured = parse_events(lines("fit_unmeasured_drafter.jsonl"), expect_drafter=True)
    for run, kept in (
        (DryRun(status="skipped", note="the engine measured nothing in 60 s", measured=None), False),
        (replace(OK, note="the engine did not measure the drafter"), False),  # killed or timed out in between
        (unmeasured, True),
    ):
        dry_run_cache.store("k", run)
        assert (dry_run_cache.load("k") == run) is kept


def test_the_key_is_all_that_decides_and_nothing_else(tmp_path: Path) -> None:
    card, projector = models.card(0, 20000), tmp_path / "mmproj.gguf"
    projector.write_bytes(b"1")
    argv = (
        "/bin/llama-server",
        "-m",
        "/a/m.gguf",
        "-c",
        "8192",
        "--host",
        "::",
        "--port",
        "1",
        "--mmproj",
        str(projector),
    )
    digests = {"/a/m.gguf": "m"}
    base = dry_run_cache.key("e", argv, digests, [card])
    moved = tuple({"/a/m.gguf": "/b/m.gguf", "::": "0.0.0.0", "1": "2"}.get(word, word) for word in argv)
    assert dry_run_cache.key("e", ("/usr/bin/x", *moved[1:]), {"/b/m.gguf": "m"}, [replace(card, free_bytes=1)]) == base
    store = ("--cache-ram", "2048", "--ctx-checkpoints", "26")
    assert dry_run_cache.key("e", (*argv, *store), digests, [card]) == base
    others = [
        dry_run_cache.key("f", argv, digests, [card]),
        dry_run_cache.key("e", argv, {"/a/m.gguf": "n"}, [card]),
        dry_run_cache.key("e", (*argv[:4], "4096", *argv[5:]), digests, [card]),
        dry_run_cache.key("e", argv, digests, []),
        *(
            dry_run_cache.key("e", argv, digests, [replace(card, **{field: value})])  # type: ignore[arg-type]
            for field, value in (("name", "CUDA1"), ("description", "other"), ("total_bytes", 1))
        ),
    ]
    projector.write_bytes(b"12")
    others.append(dry_run_cache.key("e", argv, digests, [card]))
    assert len({base, *others}) == 1 + len(others)


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
