"""The page: what is on it, what is unknown there, and that no secret is, wherever it stands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import launcher
from launcher import cli
from launcher.render import redact
from launcher.render import report as screen
from launcher.serve import state
from launcher.structs import (
    Audit,
    AuditCard,
    AuditRow,
    CardFacts,
    Channels,
    Engine,
    GpuProcess,
    Host,
    HostDetail,
    Machine,
    NumaNode,
    Placed,
    Private,
    Report,
    RunEnd,
    RunFacts,
    RunRecord,
    Source,
)
from launcher.units import GIB, MIB
from launcher.workflows import report as workflow
from tests.unit.test_devices import h200
from tests.unit.test_learned import DRIVER
from tests.unit.test_learned import Machine as Driver
from tests.unit.test_status import LOG, record

ROOT = Path(launcher.__file__).parent.parent
run = CliRunner()

HOME, USER, HOST = "/srv/people/alice", "alice", "tower-7"
PRIVATE = Private(
    home=HOME, user=USER, hosts=("tower-7.lab.example", "tower-7"), literals=("correct-horse",), words=frozenset({"x1"})
)
# What a string may hold -> what of it must be gone from every output.
SECRETS = {
    "home": (f"{HOME}/models/a.gguf", HOME),
    "another home": ("/home/bob/a.gguf", "bob"),
    "a Mac's home": ("/Users/carol/a.gguf", "carol"),
    "user": ("owner=Alice, alice:users", "alice"),
    "host": ("on tower-7 now", "tower-7"),
    "full host": ("TOWER-7.LAB.EXAMPLE:8080", "lab.example"),
    "known secret": ("prefix-correct-horse-suffix", "correct-horse"),
    "key after a flag": ("--api-key abc-1234 -c 9", "abc-1234"),
    "key in a flag": ("--api-key=abc-1234", "abc-1234"),
    "token flag": ("-hft abcd1234", "abcd1234"),
    "key variable": ("LLAMA_API_KEY=abcd1234", "abcd1234"),
    "other key variable": ("OPENROUTER_KEY=abcd1234", "abcd1234"),
    "password": ("password: 123456", "123456"),
    "json key": ('{"api_key": "abcd1234"}', "abcd1234"),
    "address key": ("GET /v1?key=abcd1234&x=1", "abcd1234"),
    "bearer": ("Authorization: Bearer abc.def-123", "abc.def-123"),
    "login": ("https://alf:geheim@example.org/x", "geheim"),
    "Hugging Face": ("hf_AbCdEfGhIjKlMnOp", "hf_Ab"),
    "OpenAI": ("sk-proj-AbCdEfGh1234", "AbCdEfGh"),
    "GitHub": ("ghp_AbCdEfGh123456", "ghp_"),
    "AWS": ("AKIAABCDEFGHIJKLMNOP", "AKIA"),
    "JWT": ("eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl", "eyJ"),
    "masked key": ("main: api_keys: ****wxyz", "wxyz"),
    "card": ("GPU-0cc4c37c-878f-1d21-1db4-50ff50c8ed89", "878f"),
    "glued card": ("id_0cc4c37c-878f-1d21-1db4-50ff50c8ed89", "878f"),
    "serial": ("Serial Number: 1320221012345", "132022101"),
    "public IPv4": ("listening on 93.184.216.34:8080", "93.184"),
    "public IPv4 in a word": ("ip=8.8.4.4,", "8.8.4.4"),
    "public IPv6": ("[2606:2800:220:1:248:1893:25c8:1946]:80", "1893"),
    "MAC": ("link 0a:1b:2c:3d:4e:5f up", "4e:5f"),
    "mail": ("alf@example.org", "alf@"),
}


def host_of(**changes: Any) -> Host:
    node = NumaNode(index=1, total_bytes=64 * GIB, available_bytes=60 * GIB, cores=2, cpus=(0, 1, 2, 8))
    found = Host(
        total_bytes=64 * GIB, available_bytes=32 * GIB, limited_by="/sys/fs/cgroup/memory.max", cores=2, nodes=(node,)
    )
    return replace(found, **changes)


def page(**changes: Any) -> Report:
    """A page with a text in every place that has one."""
    card = CardFacts(
        name="NVIDIA H200", uuid="GPU-0cc4c37c-878f-1d21-1db4-50ff50c8ed89", pci="0000:00:06.0", total_bytes=1000 * MIB,
        free_bytes=400 * MIB, link_gen=1, link_gen_max=5, link_width=8, link_width_max=16, numa_node=1, mig=False,
        others=(GpuProcess(pid=7, name="python3.12", used_bytes=300 * MIB),),
        ours=(GpuProcess(pid=8, name="llama-server", used_bytes=300 * MIB),), note="UUID: denied",
    )  # fmt: skip
    machine = Machine(
        cards=(card,), driver="580.159.04", host=host_of(),
        detail=HostDetail(
            processor="AMD EPYC 9354", governors=("performance",), transparent_huge="madvise", swap_total_bytes=8 * GIB,
            swap_free_bytes=4 * GIB, channels=Channels(populated=2, modules=4, by="EDAC"),
        ),
        engine=Engine(
            path="/opt/e", version="0.6.0-dev (build 11434, x)", digest="ab" * 32, found_by="PATH"
        ),
        warnings=("passed over an engine",),
    )  # fmt: skip
    audit = Audit(
        rows=(
            AuditRow(device="CUDA0", kind="kv", planned_bytes=10 * MIB, real_bytes=12 * MIB, source=Source.FORMULA),
        ),
        ok=False, worst="CUDA0 kv: planned 10 MiB, real 12 MiB", failed=("CUDA0 is tight",),
        cards=(
            AuditCard(
                device="CUDA0", planned_bytes=100 * MIB, used_bytes=90 * MIB, buffers_bytes=1, context_bytes=None,
                free_bytes=50 * MIB, margin_bytes=60 * MIB, by="process",
            ),
        ),
    )  # fmt: skip
    server = RunRecord(
        slug="demo/a", server=None, keeper=None, rpc_servers=(), rpc_endpoints=(), argv=("llama-server", "-c", "9"),
        env_set={"CUDA_VISIBLE_DEVICES": "GPU-0cc4c37c-878f-1d21-1db4-50ff50c8ed89"}, host="127.0.0.1", port=9,
        alias="a", log_path="/x.log", state="ready", started_at=1795994503.0, audit=audit,
    )  # fmt: skip
    facts = RunFacts(
        slug="demo/a", alive=False, state="crashed (SIGKILL)", started_at=1795994503.0, record=server,
        settings={"n_ctx_total": 9, "type_k": "f16", "numa_policy": ("--membind=1",)},
        placed=(Placed(device="CUDA0", slots=3, resident=(0, 1, 2, 7)),), real_bytes={"CUDA0": {"kv": 12 * MIB}},
        end=RunEnd(
            slug="demo/a", pid=1, started_at=1795994503.0, ended_at=1795994563.0, exit_code=None, signal="SIGKILL",
            reason="crashed", last_rss_bytes=5, log_path="/x.log",
        ),
        cause="the host ran out of memory", log_tail=("one line",),
    )  # fmt: skip
    return replace(Report(made_at=1795994503.0, version="1", machine=machine, runs=(facts,), full=True), **changes)


def markdown(found: Report) -> str:
    return screen.texts(found, Private())[0]


# ------------------------------------------------------------------------------------------- redaction


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Path of every string of a document."""
    if isinstance(value, str):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield from places(one, (*path, key))


def planted(doc: Any, path: tuple[Any, ...], text: str) -> Any:
    found = json.loads(json.dumps(doc))
    at = found
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = f"{at[path[-1]]} {text}"
    return found


@pytest.mark.parametrize("kind", SECRETS)
def test_no_secret_is_left_in_any_place(kind: str) -> None:
    text, gone = SECRETS[kind]
    doc = screen.page_document(page())
    found = list(places(doc))
    assert ("runs", 0, "argv", 1) in found and ("runs", 0, "env", 0, "value") in found
    assert ("runs", 0, "log_tail", 0) in found and ("machine", "cards", 0, "others", 0, "name") in found
    for path in found:
        with_it = planted(doc, path, text)
        assert gone.lower() in json.dumps(with_it).lower()
        clean = redact.document(with_it, PRIVATE)
        shown = json.dumps(clean) + "\n".join(screen.markdown(clean))
        assert gone.lower() not in shown.lower(), path
        assert redact.document(clean, PRIVATE) == clean  # safe to apply twice


def test_a_short_secret_is_hidden_where_it_stands_alone() -> None:
    assert redact.document(["--api-key", "x1", "x12"], PRIVATE) == ["--api-key", "<secret>", "x12"]


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1:8080", "10.0.0.7", "192.168.1.2", "0.0.0.0", "::1", "fe80::1", "driver 580.159.04", "0000:00:06.0",
        "EOS token = 151643 '<|im_end|>'", "n_token=12", "12:34:56", "llama.cpp b11434", "malice", "/dev/shm/a.gguf",
        "serial console ready", "--kv-unified on", "-ctk q8_0", "blk.1.ffn_up_exps", "-ts 14,23", "towers-70",
    ],
)  # fmt: skip
def test_what_says_nothing_of_anybody_stays(text: str) -> None:
    assert redact.text(text, PRIVATE) == text


def test_ids_keep_eight_characters() -> None:
    assert redact.text("GPU-0cc4c37c-878f-1d21-1db4-50ff50c8ed89", PRIVATE) == "GPU-0cc4c37c"
    assert redact.text("serial: 1320221012345", PRIVATE) == "serial: 13202210"


def test_an_unknown_home_cuts_nothing() -> None:
    assert redact.text("/a/b", Private()) == "/a/b"


# ------------------------------------------------------------------------------------------------ page


def test_the_machine_on_the_page() -> None:
    shown = markdown(page())
    card = "| NVIDIA H200 | 580.159.04 | 0000:00:06.0 | GPU-0cc4c37c | 1,000 | 400 | 1.0 x8 | 5.0 x16 | 1 | no |"
    assert f"{card} python3.12 300 |" in shown
    for line in (
        "- processor: AMD EPYC 9354, 2 cores that we may use",
        "- memory: 64.0 GiB, 32.0 available, limited by /sys/fs/cgroup/memory.max",
        "- memory channels: 2, 4 modules (EDAC)",
        "- NUMA node 1: 64.0 GiB, 60.0 available, 2 cores, cpus 0-2,8",
        "- swap: 8.0 GiB, 4.0 free",
        "- cpu governor: performance",
        "- transparent huge pages: madvise",
        "- engine: llama.cpp b11434 (0.6.0-dev (build 11434, x)), sha256 abababababab, found by PATH, /opt/e",
        "- 0000:00:06.0: not told: UUID: denied",
        "- warning: passed over an engine",
    ):
        assert f"{line}\n" in shown


def test_what_nobody_tells_is_unknown_and_never_zero() -> None:
    found = page()
    blank = CardFacts(
        name="?", uuid=None, pci=None, total_bytes=None, free_bytes=None, link_gen=None, link_gen_max=None,
        link_width=None, link_width_max=None, numa_node=None, mig=False,
    )  # fmt: skip
    detail = HostDetail(
        processor=None,
        governors=None,
        transparent_huge=None,
        swap_total_bytes=None,
        swap_free_bytes=None,
        channels=None,
    )
    machine = replace(
        found.machine, cards=(blank,), driver=None, detail=detail, engine=None, host=host_of(nodes=(), numa_nodes=2)
    )
    shown = markdown(replace(found, machine=machine, runs=()))
    unknown = "unknown | unknown | unknown | unknown | unknown | unknown x? | unknown x? | unknown"
    assert f"| ? | {unknown} | no | nobody seen |" in shown
    for line in (
        "processor: unknown", "memory channels: unknown (neither", "NUMA nodes: 2, their memory unknown",
        "swap: unknown", "cpu governor: unknown", "transparent huge pages: unknown", "engine: none (unknown)",
    ):  # fmt: skip
        assert f"- {line}" in shown
    assert "Nothing runs, and nothing was started yet." in shown
    assert " 0 " not in shown


def test_a_run_that_ended_on_the_page() -> None:
    shown = markdown(page())
    for line in (
        "## The last run: demo/a",
        "- state: crashed (SIGKILL), started 2026-11-29, ran 1 m 00 s",
        "- cause: the host ran out of memory",
        "- settings: n_ctx_total 9, type_k f16, numa_policy --membind=1",
        "- CUDA0: split share 3, experts of 4 layers (0-2,7)",
        "- planned against real: not as planned: CUDA0 kv: planned 10 MiB, real 12 MiB; CUDA0 is tight",
        "| CUDA0 | kv | 10 | 12 | +2 |",
        "| CUDA0 | everything | 100 | 90 | -10 |",
        "- CUDA0: 50 MiB free after boot, margin 60",
        "llama-server -c 9",
        "CUDA_VISIBLE_DEVICES=GPU-0cc4c37c",
        "one line",
    ):
        assert f"{line}\n" in shown


def test_command_line_environment_and_log_only_when_asked_for() -> None:
    brief = page(full=False)
    assert "argv" not in screen.page_document(brief)["runs"][0]
    assert "one line" not in markdown(brief) and "CUDA_VISIBLE_DEVICES" not in markdown(brief)


def test_a_run_without_a_record_is_unknown_but_for_its_log() -> None:
    (facts,) = page().runs
    shown = markdown(page(runs=(replace(facts, record=None, placed=None, settings={}),)))
    assert "- placement: unknown (its record is gone)\n" in shown and "- settings: unknown (its" in shown
    assert "- planned against real: not compared\n" in shown and "| CUDA0 | kv | 12 |" in shown


def test_a_log_with_a_fence_stays_inside_its_block() -> None:
    (facts,) = page().runs
    lines = markdown(page(runs=(replace(facts, log_tail=("```", "x")),))).splitlines()
    start = lines.index("End of its log:")
    assert lines[start + 2 : start + 6] == ["````", "```", "x", "````"]


# -------------------------------------------------------------------------------------------- workflow


ARGV = (
    "/opt/llama-server", "-m", "/m/q.gguf", "-c", "32768", "-dev", "RPC0,CUDA0", "-ts", "9,8", "--load-mode", "none",
    "-ot", r"^blk\.(1|2)\.ffn_up_exps=CUDA0,^blk\.0\.ffn=RPC0[127.0.0.1:5],\.ffn_up_exps=CPU",
    "--api-key", "k9",
)  # fmt: skip


def test_settings_and_placement_of_a_command_line() -> None:
    said = workflow.told(ARGV)
    assert workflow.settings(said) == {"model": "q.gguf", "n_ctx_total": 32768, "load_mode": "none"}
    assert workflow.placed(said, ("127.0.0.1:5",)) == (
        Placed(device="RPC0", slots=9, resident=(0,)), Placed(device="CUDA0", slots=8, resident=(1, 2)),
    )  # fmt: skip
    assert workflow.placed(workflow.told(("x", "-dev", "none"))) == ()
    assert workflow.told(("x", "-c", "many")) == {} == workflow.told(())


def test_a_server_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = h200()["processes"]
    mine = {"pid": os.getpid(), "used": 700 * MIB, "name": "/opt/llama-server"}
    monkeypatch.setitem(sys.modules, "pynvml", Driver(h200(processes=[*others, mine])))
    secret = {"LLAMA_API_KEY": "zz-top-zz"}
    state.write(record(tmp_path, LOG + "the key is zz-top-zz\n", argv=ARGV, env_set=secret))
    done = run.invoke(cli.app, ["report", "--full", "--json"])
    assert done.exit_code == 0
    doc = json.loads(done.stdout)
    (card,) = doc["machine"]["cards"]
    assert [p["pid"] for p in card["others"]] == [412] and [p["pid"] for p in card["ours"]] == [os.getpid()]
    assert (card["uuid"], card["link"]["gen_max"], doc["machine"]["driver"]) == ("GPU-f0da9443", 5, DRIVER)
    (found,) = doc["runs"]
    assert (found["slug"], found["alive"], found["devices"][1]["resident_layers"]) == ("demo/a", True, [1, 2])
    assert found["real_bytes"]["CUDA0"] == {"model": 4900 * MIB, "kv": 441 * MIB, "compute": 500 * MIB}
    assert found["env"] == [{"name": "LLAMA_API_KEY", "value": "<secret>"}]
    assert found["argv"][-2:] == ["--api-key", "<secret>"] and found["log_tail"][-1] == "the key is <secret>"
    shown = run.invoke(cli.app, ["report", "--full"]).stdout
    assert "k9" not in done.stdout.split() and "zz-top" not in done.stdout + shown


def ended(tmp_path: Path, **changes: Any) -> RunEnd:
    log = tmp_path / "old.log"
    log.write_text(LOG + "CUDA error: out of memory\n  in function alloc: cudaMalloc failed: out of memory\n")
    found = RunEnd(
        slug="demo/old", pid=5, started_at=100.0, ended_at=160.0, exit_code=1, signal=None, reason="crashed",
        last_rss_bytes=None, log_path=str(log),
    )  # fmt: skip
    return replace(found, **changes)


def test_the_last_run_stands_where_none_runs(tmp_path: Path) -> None:
    assert workflow.runs() == ()
    state.append_history(ended(tmp_path, slug="demo/older", started_at=50.0))
    state.append_history(ended(tmp_path))
    (found,) = workflow.runs()
    assert (found.slug, found.alive, found.state, found.placed) == ("demo/old", False, "crashed (exit code 1)", None)
    assert found.cause and found.real_bytes["CUDA0"]["kv"] == 441 * MIB
    state.append_history(ended(tmp_path, slug="demo/new", started_at=200.0, exit_code=0, reason="stopped"))
    assert (workflow.runs()[0].slug, workflow.runs()[0].cause) == ("demo/new", "")


def test_a_record_whose_server_died_counts_by_when_it_started(tmp_path: Path) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    dead = replace(state.identify(os.getpid()), pid=int(gone.stdout), create_time=1.0)  # type: ignore[type-var]
    state.write(record(tmp_path, slug="demo/dead", argv=ARGV, server=dead, keeper=dead, started_at=500.0))
    state.append_history(ended(tmp_path))
    (found,) = workflow.runs()
    assert (found.slug, found.state, found.placed is not None) == ("demo/dead", "ended, nobody saw how", True)
    state.append_history(ended(tmp_path, slug="demo/later", started_at=900.0))
    assert workflow.runs()[0].slug == "demo/later"


def test_a_real_page_of_this_machine() -> None:
    """Whatever this machine is: one document, its own memory, nobody's name."""
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "report", "--full", "--json"], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "HF_TOKEN": "hf_testtesttesttest"}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    doc = json.loads(done.stdout)
    meminfo = Path("/proc/meminfo").read_text().split()
    assert doc["machine"]["host"]["total_bytes"] == int(meminfo[1]) * 1024
    assert 0 < doc["machine"]["host"]["available_bytes"] <= doc["machine"]["host"]["total_bytes"]
    assert (doc["machine"]["driver"] is None) == (doc["machine"]["cards"] == [])
    assert abs(doc["made_at"] - time.time()) < 600 and doc["runs"] == []
    assert os.uname().nodename not in done.stdout and "hf_test" not in done.stdout


def test_files_are_written_and_told(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    done = run.invoke(cli.app, ["report", "--out", str(out)])
    assert done.exit_code == 0
    assert done.stdout == f"written {out}/report.md\nwritten {out}/report.json\n"
    assert (out / "report.md").read_text().startswith("# llama-launcher ")
    assert json.loads((out / "report.json").read_text())["schema_version"] == 1
    both = run.invoke(cli.app, ["report", "--out", str(out), "--json"])
    assert json.loads(both.stdout)["machine"] and str(out) not in both.stdout and str(out) in both.stderr


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run.invoke(cli.app, ["report", "--out", str(tmp_path / "file")])
    assert done.exit_code == 1 and "error[output-failed]: cannot write into" in done.stderr


def test_rows_on_the_command_line(tmp_path: Path) -> None:
    example = ROOT / "docs" / "examples" / "gpu_acceptance.jsonl"
    done = run.invoke(cli.app, ["report", "--row", str(example)])
    assert done.exit_code == 0 and "\n## Speed\n" in done.stdout
    doc = json.loads(run.invoke(cli.app, ["report", "--row", str(example), "--json"]).stdout)
    assert [r["run"] for r in doc["runs"]] == ["qwen3-12", "gptoss-two", "two-cards"]
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(example.read_bytes()[:3000])
    bad = run.invoke(cli.app, ["report", "--row", str(cut)])
    assert (
        bad.exit_code == 2 and f"error[results-invalid]: {cut}:4:" in bad.stderr and f"sed -i '4d' {cut}" in bad.stderr
    )
    missing = run.invoke(cli.app, ["report", "--row", str(tmp_path / "no.jsonl")])
    assert missing.exit_code == 2 and "error[results-missing]" in missing.stderr
