"""What people and programs read: the screens add up and fit 100 columns, the document fits its schema."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

import launcher
from launcher.errors import Refused
from launcher.render import catalogue, document, error, explain, out, preflight, progress, status
from launcher.render import plan as plan_screen
from launcher.render import switch as switch_screen
from launcher.structs import (
    DEVICE_TERMS,
    HOST_TERMS,
    Audit,
    AuditRow,
    Device,
    DevicePlan,
    Gate,
    Host,
    HostPlan,
    Inventory,
    Launch,
    LayerPlan,
    ModelRef,
    ModelSummary,
    Plan,
    ProcessId,
    Range,
    Refusal,
    Rule,
    RunEnd,
    RunRecord,
    Settings,
    Slug,
    Source,
    Speed,
    Status,
    WayOut,
)
from launcher.units import GIB, MIB, engine_label

SCHEMA = json.loads((Path(launcher.__file__).parent.parent / "docs" / "plan.schema.json").read_text())


def card(name: str, description: str = "NVIDIA GeForce RTX 3090") -> Device:
    return Device(
        name=name, buffer_type=name, backend="cuda", description=description,
        total_bytes=24576 * MIB, free_bytes=24125 * MIB, uuid=f"GPU-{name}",
    )  # fmt: skip


def device_plan(name: str, layers: range, resident: tuple[int, ...], **terms: float) -> DevicePlan:
    full = dict.fromkeys(DEVICE_TERMS, 0) | {k: int(v * MIB) for k, v in terms.items()}
    return DevicePlan(
        device=card(name), rig_name=name, layers=tuple(layers), owns_output="output" in terms,
        resident_layers=resident, terms=full, source=dict.fromkeys(DEVICE_TERMS, Source.FORMULA),
    )  # fmt: skip


def make(*, fits: bool = True) -> Plan:
    """Two cards, 43 layers, sizes with fractions of a MiB so that rounding has something to spoil."""
    layers = tuple(
        LayerPlan(
            index=i, device="CUDA0" if i < 21 else "CUDA1", resident=i in (0, 42), loaded=True,
            dense_bytes=277 * MIB, bundle_bytes=3264 * MIB, kv_bytes=36 * MIB,
        )
        for i in range(43)
    )  # fmt: skip
    terms = dict.fromkeys(HOST_TERMS, 0) | {
        "experts": 133_824 * MIB, "embedding": 1010 * MIB, "compute": int(1368.4 * MIB), "checkpoints": 254 * MIB,
        "overhead": 2048 * MIB,
    }  # fmt: skip
    available = (160_000 if fits else 124_314) * MIB
    host = HostPlan(
        terms=terms, source=dict.fromkeys(HOST_TERMS, Source.FORMULA), available_bytes=available,
        layers=tuple(range(1, 42)),
    )  # fmt: skip
    way = WayOut(
        change="--drafter off",
        fits=True,
        resident_layers=7,
        host_required_bytes=119 * GIB,
        host_available_bytes=121 * GIB,
    )
    no_way = replace(way, change="--kv q8_0", fits=False)
    refusal = Refusal(
        where="host", needed_bytes=host.required_bytes, available_bytes=available, largest_term="experts",
        ways_out=(way, no_way),
    )  # fmt: skip
    return Plan(
        target="llamacpp/deepseek-flash-dual-q8",
        model=ModelSummary(
            path="/m/DeepSeek-V4-Flash-UD-Q8_K_XL-00001-of-00005.gguf", arch="deepseek4", shards=5,
            file_bytes=161_870_000_128, n_layer=43, n_expert=256, n_expert_used=6, n_ctx_train=1_048_576,
        ),
        settings=Settings(
            n_ctx_per_stream=204_800, n_batch=4096, n_ubatch=4096, threads=12, checkpoints=1, cache_ram_bytes=0,
            drafter_type="draft-dspark", draft_n_max=5,
        ),
        drafter_path="/m/dspark.gguf",
        devices=(
            device_plan("CUDA0", range(21), (0,), dense=5829.4, kv=764.4, compute=3345.4, drafter=9071.4, context=615,
                        experts=3264, margin=1024),
            device_plan("CUDA1", range(21, 43), (42,), dense=6164.4, output=1010.4, kv=836.4, compute=3214.4,
                        drafter=8113.4, context=250, experts=3264, margin=1024),
        ),
        layers=layers,
        host=host,
        tensor_split=(21, 23),
        rules=(
            Rule(pattern=r"^blk\.(0)\.ffn_(up|down|gate|gate_up)_(ch|)exps", buffer_type="CUDA0"),
            Rule(pattern=r"[cpu]\.ffn_(up|down|gate|gate_up)_(ch|)exps", buffer_type="CPU"),
        ),
        speed=Speed(
            decode_tps=Range(low=6.5, high=9.6), prefill_tps=Range(low=170, high=290), limited_by="host bandwidth"
        ),
        refusal=None if fits else refusal,
        warnings=("experts [cpu] stay where they are",),
    )  # fmt: skip


INVENTORY = Inventory(
    devices=(card("CUDA0"), card("CUDA1")),
    host=Host(
        total_bytes=128 * GIB, available_bytes=124_314 * MIB, limited_by="MemAvailable", cores=12, triad_bps=47e9
    ),
)


def launch(plan: Plan) -> Launch:
    argv = ("llama-server", "-ot", plan.override_tensor or "")
    env_set = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return Launch(plan=plan, argv=argv, env=env_set | {"SECRET": "x"}, env_set=env_set, host="127.0.0.1", port=8030,
                  alias="deepseek-v4-flash")  # fmt: skip


def screen(plan: Plan, **options: bool) -> list[str]:
    return [str(line) for line in plan_screen.screen(plan, launch(plan), INVENTORY, **options)]  # type: ignore[arg-type]


def numbers(line: str) -> list[int]:
    return [int(word.replace(",", "")) for word in line.split() if re.fullmatch(r"-?[\d,]+", word)]


# ------------------------------------------------------------------------------------ the document


@pytest.mark.parametrize("fits", [True, False])
def test_plan_document_fits_its_schema(fits: bool) -> None:
    plan = make(fits=fits)
    doc = json.loads(json.dumps(document.plan_document(plan, launch(plan)), allow_nan=False))
    jsonschema.Draft202012Validator(SCHEMA).validate(doc)
    assert doc["fits"] is fits
    assert ("refusal" in doc) is not fits
    assert doc["settings"]["n_ctx_total"] == 204_800
    assert doc["env"] == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_the_schema_is_strict() -> None:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    validator.check_schema(SCHEMA)
    good = document.plan_document(make())
    for broken in (
        {**good, "more": 1},
        {**good, "fits": False},
        {k: v for k, v in good.items() if k != "host"},
        {**good, "schema_version": 2},
        {**good, "devices": [{**good["devices"][0], "used_bytes": 1.5}]},
    ):
        assert not validator.is_valid(broken)


def test_used_is_the_sum_without_margin_and_headroom_the_rest() -> None:
    for device in document.plan_document(make())["devices"]:
        total = sum(v for k, v in device["bytes"].items() if k != "margin")
        assert device["used_bytes"] == total
        assert device["headroom_bytes"] == device["free_bytes"] - total


def test_refusal_of_the_document_adds_up() -> None:
    doc = document.plan_document(make(fits=False))
    refusal = doc["refusal"]
    assert refusal["needed_bytes"] == doc["host"]["required_bytes"] == sum(doc["host"]["bytes"].values())
    assert refusal["short_bytes"] == refusal["needed_bytes"] - refusal["available_bytes"] > 0
    assert [way["change"] for way in refusal["ways_out"]] == ["--drafter off", "--kv q8_0"]


def test_a_plan_without_devices_is_all_host() -> None:
    plan = replace(make(), devices=(), tensor_split=(), rules=(), layers=())
    doc = document.plan_document(plan)
    jsonschema.Draft202012Validator(SCHEMA).validate(doc)
    assert doc["devices"] == []
    assert doc["override_tensor"] is None
    text = screen(plan)
    assert text[0].startswith("FITS  no devices")


def test_unknown_speed_is_null_not_nan() -> None:
    nothing = Speed(
        decode_tps=Range(low=None, high=float("inf")), prefill_tps=Range(low=None, high=None), limited_by=""
    )
    doc = document.plan_document(replace(make(), speed=nothing))
    assert doc["speed"]["decode_tps"] == {"low": None, "high": None}
    assert plan_screen.speed_line(replace(make(), speed=nothing)) is None


# -------------------------------------------------------------------------------------- the screen


@pytest.mark.parametrize("fits", [True, False])
def test_screen_fits_100_columns(fits: bool) -> None:
    lines = screen(make(fits=fits), explain=True)
    copied = [line for line in lines if line.startswith(("CUDA_DEVICE_ORDER", "rule "))]
    assert [line for line in lines if len(line) > 100 and line not in copied] == []


def test_verdict_comes_first_with_the_number() -> None:
    assert screen(make())[0].startswith("FITS")
    first = screen(make(fits=False))[0]
    assert first.startswith("NO  host RAM is short by")
    assert "needs 135.3 GiB, has 121.4" in first


def test_device_rows_add_up_in_whole_mib() -> None:
    lines = plan_screen.device_table(make())
    for line in lines[1:]:
        *terms, used, free, left = numbers(line.replace("RTX 3090", "RTX"))
        assert sum(terms) == used
        assert free - used == left
    assert "RTX 3090" in lines[1]


def test_host_rows_add_up_in_whole_mib() -> None:
    lines = plan_screen.host_table(make(fits=False))
    terms = [int(line.split()[-1].replace(",", "")) for line in lines[:-1]]
    needed, available, short = (int(n.replace(",", "")) for n in re.findall(r"[\d,]+", lines[-1]))
    assert sum(terms) == needed
    assert needed - available == short


def test_rules_and_brackets_survive_rich(capsys: pytest.CaptureFixture[str]) -> None:
    plan_screen.show(make(), launch(make()), INVENTORY, explain=True)
    shown = capsys.readouterr().out
    assert r"rule  [cpu]\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU" in shown
    assert "note: experts [cpu] stay where they are" in shown
    command = next(line for line in shown.splitlines() if line.startswith("CUDA_DEVICE_ORDER="))
    assert command.count("exps=") == 2
    assert "\x1b" not in shown


def test_ways_out_name_the_change_and_whether_it_fits() -> None:
    lines = [str(line) for line in plan_screen.ways_out(make(fits=False))]
    assert re.match(r" a --drafter off +7 layers +119\.0 +2\.0  FITS$", lines[1])
    assert re.match(r" b --kv q8_0 .*  no$", lines[2])


def test_ways_out_show_speeds_where_one_is_known() -> None:
    plan = make(fits=False)
    assert plan.refusal
    unknown = Range(low=None, high=None)
    fast, slow = plan.refusal.ways_out
    fast = replace(fast, decode_tps=Range(low=6.5, high=9.6), prefill_tps=Range(low=170, high=290))
    long = replace(slow, change="--drafter off --ctx 100k -ub 2048 --devices 0", decode_tps=unknown, prefill_tps=None)
    known = replace(plan, refusal=replace(plan.refusal, ways_out=(fast, long)))
    lines = [str(line) for line in plan_screen.ways_out(known)]
    assert re.search(r"RAM GiB +spare +decode tok/s +prefill tok/s$", lines[0])
    assert re.match(r" a --drafter off +7 layers +119\.0 +2\.0 +6\.5-9\.6 +170-290  FITS$", lines[1])
    assert lines[2].strip() == f"b {long.change}"
    assert re.match(r" +7 layers +119\.0 +2\.0 +- +-  no$", lines[3])
    assert max(map(len, lines)) <= 100
    assert "tok/s" not in str(next(iter(plan_screen.ways_out(plan))))
    doc = document.plan_document(known)
    jsonschema.Draft202012Validator(SCHEMA).validate(doc)
    assert [way["decode_tps"] for way in doc["refusal"]["ways_out"]] == [
        {"low": 6.5, "high": 9.6},
        {"low": None, "high": None},
    ]


def test_placement_line_and_spans() -> None:
    assert plan_screen.placement(make()).startswith("experts of 2 of 43 layers on the devices (0 | 42), of 41 in RAM")
    assert plan_screen.spans([0, 1, 2, 3, 40, 42]) == "0-3 40 42"
    assert plan_screen.spans([]) == "-"


def test_a_long_device_name_is_cut_before_the_table_is_too_wide() -> None:
    long = tuple(
        replace(d, device=replace(d.device, description="NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"))
        for d in make().devices
    )
    assert max(map(len, plan_screen.device_table(replace(make(), devices=long)))) <= 100


def test_explain_names_a_source_for_every_term() -> None:
    lines = [str(line) for line in explain.explanation(make())]
    for term in ("dense", "drafter", "margin"):
        assert any(re.match(rf"CUDA0 +{term} +[\d,.]+ +formula$", line) for line in lines)
    assert any(re.match(r"host +experts +133,824\.0 +formula$", line) for line in lines)


def test_shares_round_to_the_rounded_sum() -> None:
    assert out.shares([3, 3, 4], 10) == [0, 0, 1]
    assert sum(out.shares([14, 14, 14], 10)) == 4
    assert out.shares([], 10) == []


def test_json_is_one_document_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    plan_screen.show(make(), launch(make()), INVENTORY, as_json=True)
    captured = capsys.readouterr()
    assert json.loads(captured.out)["target"] == "llamacpp/deepseek-flash-dual-q8"
    assert captured.err == ""


# ------------------------------------------------------------------------------ gates, errors, runs


def test_error_is_three_lines() -> None:
    lines = error.lines(Refused("host-ram-short", "needs 1", context="a + b\nc", fix="do it"))
    assert lines == ("error[host-ram-short]: needs 1", "  a + b", "  c", "fix: do it")
    assert error.lines(Refused("x", "y", fix="z")) == ("error[x]: y", "fix: z")


def test_a_refusal_keeps_to_100_columns_and_its_last_line_can_be_pasted() -> None:
    evidence = "MiB: " + " + ".join(f"{i * 1000:,} term{i}" for i in range(1, 20)) + "\nsearched: /a\n          /b"
    fix = "launcher plan --rig some/rig/file.yaml llamacpp/a-slug --drafter off --ctx 128k     # 118.9 GiB of RAM"
    lines = error.lines(Refused("host-ram-short", "needs 1", context=evidence, fix=fix))
    assert max(map(len, lines)) <= 100
    assert " ".join(" ".join(lines[1:-4]).split()) == evidence.splitlines()[0]
    assert lines[-4:-2] == ("  searched: /a", "            /b")
    assert lines[-2:] == ("  118.9 GiB of RAM", f"fix: {fix.partition('     #')[0]}")


def test_engines_are_called_what_people_call_them() -> None:
    for version, name in (
        ("0.6.0-dev (build 11434, commit unknown)", "llama.cpp b11434"),
        ("10236 (5c1d1a2b)", "llama.cpp b10236"),
        ("b10236", "llama.cpp b10236"),
        ("0.6.0-dev (build 0, commit unknown)", "llama.cpp 0.6.0-dev"),
        ("unknown", "llama.cpp unknown"),
    ):
        assert engine_label(version) == name


def test_closed_gates_come_first_with_their_fix() -> None:
    gates = (
        Gate(name="model", ok=True, detail="5 shards"),
        Gate(name="swap", ok=True, note=True, detail="swap is on", fix="sysctl"),
        Gate(name="port-busy", ok=False, detail="port 8030 is held", fix="--port 8031", context="why"),
    )
    lines = [str(line) for line in preflight.screen("t", gates)]
    assert lines[0] == "NO  t: 1 ok, 1 closed, 1 note"
    assert lines[1].split()[:2] == ["no", "port-busy"]
    assert lines[2].strip() == "why"
    assert lines[3].strip() == "fix: --port 8031"
    assert document.preflight_document("t", gates)["ok"] is False
    assert document.preflight_document("t", gates[:2])["ok"] is True


RECORD = RunRecord(
    slug="demo/x", server=ProcessId(pid=7, create_time=1.0), keeper=None, rpc_servers=(), rpc_endpoints=(),
    argv=("llama-server",), env_set={}, host="0.0.0.0", port=8031, alias="x", log_path="/l", state="ready",
    started_at=100.0, ready_at=251.0,
)  # fmt: skip


def test_ready_says_how_to_call_it() -> None:
    lines = [str(line) for line in switch_screen.ready(RECORD, 204800, 1)]
    assert lines[0].startswith("READY    http://127.0.0.1:8031/v1  model x  204,800 tokens, 1 stream")
    assert lines[0].endswith("2 m 31 s")
    assert lines[1].strip() == "unverified depth: no deep prompt was tried before READY"
    body = re.search(r"-d '(.*)'", lines[2])
    assert body and json.loads(body.group(1))["model"] == "x"


def test_audit_line_shows_planned_and_real() -> None:
    row = AuditRow(device="CUDA0", kind="model", planned_bytes=100 * MIB, real_bytes=103 * MIB)
    assert switch_screen.audit_lines(Audit(rows=(row,), ok=False, worst="x")) == [
        "CUDA0 planned/real MiB: model 100/103 (+3)"
    ]


def test_status_document_and_screen_of_a_dead_server() -> None:
    end = RunEnd(
        slug="demo/x", pid=7, started_at=100.0, ended_at=130.0, exit_code=None, signal="SIGKILL", reason="crashed",
        last_rss_bytes=None, log_path="/l",
    )  # fmt: skip
    seen = {
        "record": RECORD, "alive": False, "state": "crashed (SIGKILL)", "healthy": False, "requests": None,
        "rss_bytes": None, "uptime_s": None, "keeper_alive": False, "end": end,
    }  # fmt: skip
    doc = json.loads(json.dumps(document.status_document([seen])))
    assert doc["servers"][0]["end"]["signal"] == "SIGKILL"
    assert str(next(iter(status.screen([seen])))).startswith("crashed (SIGKILL)")


def test_slug_document_has_every_default() -> None:
    slug = Slug(name="demo/x", path="/s", title="t", status=Status.PRODUCTION, model=ModelRef(file="x.gguf"))
    doc = json.loads(json.dumps(document.slug_document(slug)))
    assert doc["schema_version"] == 1
    assert doc["serve"]["n_batch"] == 2048
    assert doc["status"] == "production"
    assert catalogue.show_slug(slug) == 0


# ------------------------------------------------------------------------------------- moving lines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_where_nobody_watches() -> None:
    stream = io.StringIO()
    line = progress.Line(stream)
    for i in range(50):
        line.text(f"step {i}")
    line.text("last", force=True)
    line.done()
    assert stream.getvalue() == "step 0\nlast\n"


def test_a_terminal_gets_one_line_drawn_over_itself() -> None:
    stream = Terminal()
    line = progress.Line(stream)
    line.text("a" * 300, force=True)
    line.text("b", force=True)
    line.done()
    assert stream.getvalue() == "\r" + "a" * 100 + "\x1b[K\rb\x1b[K\n"


def test_what_switch_says_keeps_to_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make()
    many = replace(plan, devices=plan.devices * 3, warnings=("word " * 40,))
    with switch_screen.Progress(as_json=False) as shown:
        shown.planned(many, 0.4)
        shown.checked((Gate(name="swap", ok=True, note=True, detail="swap is on " * 12, fix="sysctl"),))
        shown.stopped(RECORD, 3.0)
        shown.replanned(many, same=False)
        shown.kept((replace(RECORD, slug="/models/" + "a-long-folder/" * 6 + "x.gguf"),))
        shown.lost(((RECORD, "switch demo/x"),))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "NOT SWITCHED  demo/x was stopped and does not run; `switch demo/x` brings it back" in lines


def test_rate_and_rest_come_from_the_last_seconds() -> None:
    rate = progress.Rate()
    assert rate.add(0.0, 0) is None
    assert rate.add(10.0, 10 * 10**9) == pytest.approx(1e9)
    assert progress.amounts(int(61.2 * GIB), int(84.7 * GIB), 1.31e9) == "61.2 / 84.7 GiB  1.31 GB/s  19 s left"
    assert progress.bar(1, 2) == "[" + "#" * 20 + "." * 20 + "]"
    assert progress.bar(5, 0) == "[" + "." * 40 + "]"
