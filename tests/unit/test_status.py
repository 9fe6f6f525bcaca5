"""After READY: planned against real goes into the record, to `status` and to what the next plan uses."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import EngineFailed
from launcher.measure import learned
from launcher.measure.verify import audit
from launcher.render import document
from launcher.render import status as screen
from launcher.render import switch as switch_screen
from launcher.render.activity import request_line
from launcher.serve import state
from launcher.structs import Activity, Audit, Request, RunEnd, RunRecord, Sample, Source
from launcher.units import MIB
from launcher.workflows import start, status
from tests.serve_builders import device_plan, engine, plan, rpc_device
from tests.unit.test_devices import h200
from tests.unit.test_learned import DRIVER, Machine
from tests.unit.test_verify import FREE_BEFORE, H200_LOG, after_boot, h200_plan, seen

LOG = """\
0.00.100.000 I srv    load_model: loading model '/m/gpt-oss-20b.gguf'
0.00.200.000 I load_tensors: loading model tensors, this can take a while... (load_mode = none)
0.01.100.000 I load_tensors:        CUDA0 model buffer size =  4900.00 MiB
0.01.100.000 I load_tensors:          CPU model buffer size = 10240.00 MiB
0.02.000.000 I llama_context: constructing llama_context
0.02.000.000 I llama_kv_cache:      CUDA0 KV buffer size =   441.00 MiB
0.02.100.000 I sched_reserve: reserving ...
0.02.100.000 I sched_reserve:      CUDA0 compute buffer size =   500.00 MiB
0.02.100.000 I sched_reserve:  CUDA_Host compute buffer size =    30.00 MiB
0.03.000.000 I llama_server: model loaded
"""


def record(tmp_path: Path, text: str = LOG, **changes: Any) -> RunRecord:
    """A server of ours whose process is this one, with the log of its load."""
    log = tmp_path / "engine.log"
    log.write_text(text)
    me = state.identify(os.getpid())
    found = RunRecord(
        slug="demo/a", server=me, keeper=me, rpc_servers=(), rpc_endpoints=(), argv=("llama-server",), env_set={},
        host="127.0.0.1", port=9, alias="a", log_path=str(log), state="ready", started_at=time.time(),
        ready_at=time.time(),
    )  # fmt: skip
    return replace(found, **changes)


def on_h200(used_mib: int | None, free_mib: int) -> Machine:
    ours = {"pid": os.getpid(), "used": None if used_mib is None else used_mib * MIB, "name": "/opt/llama-server"}
    return Machine(h200(free=free_mib * MIB, processes=[*h200()["processes"], ours]))


def screen_of(record: RunRecord, doing: Activity | None = None) -> str:
    found = {
        "record": record, "alive": True, "state": "ready", "healthy": True, "requests": None, "rss_bytes": None,
        "uptime_s": 1.0, "keeper_alive": True, "end": None, "activity": doing,
    }  # fmt: skip
    return "\n".join(str(line) for line in screen.screen([found]))


def test_the_driver_is_asked_for_our_pid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", on_h200(6550, 135055))
    found = start.audited(h200_plan(), record(tmp_path), {h200()["uuid"]: FREE_BEFORE})
    assert found is not None
    assert found.ok
    assert (found.cards[0].by, found.cards[0].context_bytes) == ("process", 709 * MIB)


def test_free_before_stands_in_where_the_process_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Machine(h200(free=FREE_BEFORE)))
    before = start._free_bytes(h200_plan())
    assert before == {h200()["uuid"]: FREE_BEFORE}
    monkeypatch.setitem(sys.modules, "pynvml", on_h200(None, 135000))
    found = start.audited(h200_plan(), record(tmp_path), before)
    assert found is not None
    assert (found.cards[0].by, found.cards[0].used_bytes) == ("card", 6605 * MIB)


def test_without_cards_no_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    p = plan(device_plan(rpc_device(0, 50052)))
    assert start._free_bytes(p) == {}
    found = start.audited(p, record(tmp_path))
    assert found is not None
    assert found.cards == ()


def test_what_a_launch_showed_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", on_h200(6550, 135055))
    p = h200_plan()
    found = start.audited(p, record(tmp_path))
    assert found is not None
    start._learn(p, engine(), found, alone=False)
    (card,) = learned.read().contexts
    assert (card.name, card.driver, card.engine) == ("NVIDIA H200", DRIVER, engine().digest)


def test_memory_that_may_still_be_coming_back_teaches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", on_h200(None, 135055))
    p = h200_plan()
    found = start.audited(p, record(tmp_path), {h200()["uuid"]: FREE_BEFORE})
    assert found is not None
    start._learn(p, engine(), found, alone=False)
    assert learned.read().contexts == {}
    start._learn(p, engine(), found, alone=True)
    assert list(learned.read().contexts.values()) == [(709 * MIB,)]


# ------------------------------------------------------------------------------------------ the record


def full_audit(free_mib: int = 135055) -> Audit:
    p = h200_plan()
    return audit(p, H200_LOG, seen(after_boot(6550 * MIB, free=free_mib * MIB), p))


def test_the_record_keeps_the_audit(tmp_path: Path) -> None:
    wanted = full_audit(free_mib=900)
    kept = record(tmp_path, audit=wanted)
    state.write(kept)
    found = state.read("demo/a")
    assert found == kept
    assert found is not None and found.audit is not None
    assert {row.source for row in found.audit.rows if row.kind == "context"} == {Source.FORMULA}


def test_a_record_of_an_older_version_loads(tmp_path: Path) -> None:
    state.write(record(tmp_path))
    path = state.record_path("demo/a")
    old = json.loads(path.read_text())
    del old["audit"]
    path.write_text(json.dumps(old))
    found = state.read("demo/a")
    assert found is not None
    assert found.audit is None


ROW = {"device": "CUDA0", "kind": "kv", "planned_bytes": 1, "real_bytes": 1}
OLD = {"rows": [ROW], "ok": True, "worst": ""}


@pytest.mark.parametrize(
    ("value", "loads"),
    [
        (OLD, True), ({**OLD, "more": 1, "rows": [{**ROW, "more": 1}]}, True),
        ([], False), ("x", False), ({}, False), ({**OLD, "rows": 3}, False), ({**OLD, "rows": [3]}, False),
        ({**OLD, "rows": [{}]}, False), ({**OLD, "cards": [{}]}, False), ({**OLD, "failed": 3}, False),
        ({**OLD, "rows": [{**ROW, "source": "guess"}]}, False),
    ],
)  # fmt: skip
def test_a_damaged_audit_never_loses_the_server(tmp_path: Path, value: object, loads: bool) -> None:
    state.write(record(tmp_path))
    path = state.record_path("demo/a")
    path.write_text(json.dumps({**json.loads(path.read_text()), "audit": value}))
    found = state.read("demo/a")
    assert found is not None
    assert (found.audit is not None) == loads


# ------------------------------------------------------------------------------------------ the screens


def test_status_carries_the_audit(tmp_path: Path) -> None:
    state.write(record(tmp_path, audit=full_audit()))
    doc = json.loads(json.dumps(document.status_document(status.servers())))
    (server,) = doc["servers"]
    assert server["record"]["audit"]["cards"][0]["context_bytes"] == 709 * MIB
    (row,) = [r for r in server["record"]["audit"]["rows"] if r["shown"]]
    assert (row["device"], row["kind"], row["real_bytes"] - row["planned_bytes"]) == ("CUDA0", "context", 89 * MIB)


def test_the_screen_shows_what_differs_and_no_more(tmp_path: Path) -> None:
    text = screen_of(record(tmp_path, audit=full_audit()))
    assert "  after boot CUDA0 holds 6,550 MiB, 6,461 planned; 135,055 free (margin 1,438)\n" in text
    assert text.endswith("  CUDA0 context: planned 620 MiB, real 709 (+89)")


def test_the_screen_says_as_planned(tmp_path: Path) -> None:
    p = h200_plan(context=709 * MIB)
    found = audit(p, H200_LOG, seen(after_boot(6550 * MIB), p))
    assert screen_of(record(tmp_path, audit=found)).endswith("\n  memory as planned")
    assert "planned" not in screen_of(record(tmp_path))


def test_a_margin_that_is_gone_is_a_warning_and_the_server_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = full_audit(free_mib=900)
    text = screen_of(record(tmp_path, audit=found))
    assert "warning: CUDA0 has 900 MiB free after boot, less than the margin of 1,438 MiB" in text
    assert "memory as planned" not in text
    assert max(map(len, text.splitlines())) <= 100
    with switch_screen.Progress(as_json=False) as progress:
        progress.audited(found)
    said = capsys.readouterr().out
    assert "warning  CUDA0 has 900 MiB free after boot, less than the margin of 1,438 MiB" in said
    assert "not as planned" not in said


def test_a_placement_that_is_another_one_is_said(tmp_path: Path) -> None:
    found = audit(h200_plan(), replace(H200_LOG, model_bytes={"CUDA0": 8000 * MIB, "CPU": 10240 * MIB}))
    text = screen_of(record(tmp_path, audit=found))
    assert "  CUDA0 model: planned 4,900 MiB, real 8,000 (+3,100)\n" in text
    assert "  not as planned: CUDA0 model: planned 4,900 MiB, real 8,000 MiB" in text


def test_a_bound_is_called_one(tmp_path: Path) -> None:
    found = audit(h200_plan(), replace(H200_LOG, compute_bytes={"CUDA0": 431 * MIB}))
    text = screen_of(record(tmp_path, audit=found))
    assert "  CUDA0 compute: planned 500 MiB (an upper bound), real 431 (-69)" in text


# ------------------------------------------------------------------------------------- what it is doing


READING = Request(slot=0, task=2, prompt_tokens=60_300, read_tokens=41_000, read_tps=154.4)


def test_a_prompt_shows_how_far_it_is_read(tmp_path: Path) -> None:
    text = screen_of(record(tmp_path), Activity(busy=1, requests=(READING,), still_s=4.0))
    assert text.endswith("\n  reading 41,000 of 60,300, 2 m 05 s left at 154 tok/s")


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (Request(slot=0, task=2), "reading"),
        (Request(slot=0, task=2, read_tokens=512), "reading 512"),
        (Request(slot=0, task=2, read_tokens=512, prompt_tokens=900), "reading 512 of 900"),
        (Request(slot=0, task=2, written_tokens=312), "writing, 312 tokens so far"),
        (replace(READING, written_tokens=1), "writing, 1 tokens so far after a prompt of 60,300"),
    ],
)
def test_what_is_not_known_is_left_out(request_: Request, line: str) -> None:
    assert request_line(request_) == line


def test_streams_are_told_apart(tmp_path: Path) -> None:
    two = Activity(busy=2, requests=(READING, Request(slot=1, task=3, written_tokens=7)), still_s=45.0)
    lines = screen_of(record(tmp_path), two).splitlines()
    assert lines[-3:] == [
        "  stream 0: reading 41,000 of 60,300, 2 m 05 s left at 154 tok/s",
        "  stream 1: writing, 7 tokens so far",
        "  the last progress was 45 s ago",
    ]


def test_a_wedged_one_is_named_with_for_how_long(tmp_path: Path) -> None:
    doing = Activity(busy=1, requests=(READING,), still_s=372.0, wedged=True)
    assert "  no progress for 6 m 12 s: it will not come back by itself\n" in screen_of(record(tmp_path), doing)
    found = {"record": record(tmp_path), "alive": True, "state": "wedged", "healthy": False, "activity": doing}
    with pytest.raises(EngineFailed) as refused:
        status.verdict((found,), check=True)
    assert (refused.value.reference, refused.value.message) == ("not-healthy", "demo/a is wedged for 6 m 12 s")


def test_the_document_says_when_it_will_be_read(tmp_path: Path) -> None:
    found = {"record": record(tmp_path), "activity": Activity(busy=1, requests=(READING,), still_s=4.0)}
    (server,) = json.loads(json.dumps(document.status_document([found])))["servers"]
    (request_,) = server["activity"]["requests"]
    assert request_["left_s"] == pytest.approx((60_300 - 41_000) / 154.4)
    assert (request_["read_tokens"], request_["prompt_tokens"], server["activity"]["wedged"]) == (41_000, 60_300, False)
    nobody = json.loads(json.dumps(document.status_document([{"record": record(tmp_path), "activity": None}])))
    assert nobody["servers"][0]["activity"] is None


def test_a_started_again_one_says_so(tmp_path: Path) -> None:
    text = screen_of(record(tmp_path, restarts=1, restarted_at=time.time()))
    assert "  started again by its keeper, 1 in all, last at 20" in text


def test_history_says_in_the_morning_what_happened_at_night(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "Out of memory: Killed process 4242 (llama-server) total-vm:196000000kB, anon-rss:141000000kB"
    night = RunEnd(
        slug="demo/a", pid=4242, started_at=1.0, ended_at=4000.0, exit_code=None, signal="SIGKILL", reason="crashed",
        last_rss_bytes=141 * 1024**3, log_path=str(tmp_path / "a.log"), began_at=400.0, ready_at=1000.0, restarts=1,
        oom_kills=1, kernel=(line,), requests=(replace(READING, slot=0), replace(READING, task=1, ended=True)),
        samples=(Sample(before_s=2.0, rss_bytes=141 * 1024**3, host_available_bytes=400 * MIB),),
        cause="the kernel killed it: host RAM (nothing else sends SIGKILL unasked)",
    )  # fmt: skip
    state.append_history(night)
    assert status.history() == (night,)
    screen.show_history(status.history())
    head, row, *rest = capsys.readouterr().out.splitlines()
    assert head.startswith("ended ")
    assert "demo/a  1 h 00 m  crashed (SIGKILL)  141.0 GiB" in row
    assert max(map(len, rest)) <= 100
    said = " ".join(" ".join(rest).split())
    for words in (
        "had been started again 1 x", "host RAM", "the kernel ended 1 of this group for want of memory", line,
        "was reading 41,000 of 60,300, 2 m 05 s left", "141.0 GiB resident, host had 400.0 MiB left, 2.0 s before",
    ):  # fmt: skip
        assert words in said
    assert said.count("was reading") == 1
    (doc,) = json.loads(json.dumps(document.history_document(status.history())))["runs"]
    assert (doc["kernel"], doc["samples"][0]["before_s"], doc["requests"][0]["read_tokens"]) == ([line], 2.0, 41_000)


def test_a_stop_needs_no_explanation(tmp_path: Path) -> None:
    found = RunEnd(
        slug="demo/a", pid=1, started_at=1.0, ended_at=2.0, exit_code=0, signal=None, reason="stopped",
        last_rss_bytes=None, log_path=str(tmp_path / "a.log"), requests=(READING,),
    )  # fmt: skip
    assert list(screen.why(found)) == []
