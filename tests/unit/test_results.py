"""Results of scripts/gpu_acceptance.py -> rows: real ones of two H200 as golden text, fabricated ones for the rules."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import UsageError
from launcher.measure.compare import paired
from launcher.measure.report import flags_of, read_results
from launcher.render import results as screen
from launcher.structs import ArmRow, Private, RunRows
from launcher.units import GIB, MIB

ROOT = Path(__file__).parents[2]
CAPTURED = ROOT / "tests" / "captured"
GOLDEN = ROOT / "tests" / "golden" / "results_rows.md"
FILES = ("gpu_acceptance_one_card.jsonl", "gpu_acceptance_two_cards.jsonl", "gpu_acceptance_identity_hop.jsonl")
UUID = "GPU-0cc4c37c-878f-1d21-1db4-50ff50c8ed89"
RIG = {
    "run": "r", "kind": "rig", "at": 1795994503, "driver": "580.1", "cpu": "Xeon", "cores": 32,
    "total_bytes": 252 * GIB, "engine": "0.6.0-dev (build 11434, commit unknown)", "engine_digest": "b6",
    "cards": [{"uuid": UUID, "name": "NVIDIA H200", "pci": "0000:00:06.0"}],
}  # fmt: skip
PLANNED = {
    "run": "r", "kind": "planned", "at": 1795994509, "tensor_split": [49], "resident": {"CUDA0": [1, 2]},
    "argv": ["/b/llama-server", "-m", "/m/q.gguf", "-c", "32768", "--port", "1", "-ot", "x=CPU", "--api-key", "s3cr3t"],
    "devices": [{"name": "CUDA0", "uuid": UUID, "terms": {"dense": MIB, "experts": 2 * MIB, "output": 0}}],
    "free_bytes": {UUID: 12000 * MIB},
}  # fmt: skip


def captured() -> bytes:
    return b"".join((CAPTURED / name).read_bytes() for name in FILES)


def audit(*, ok: bool = True, **changes: Any) -> dict[str, Any]:
    rows = [{"device": "CUDA0", "kind": "model", "planned_bytes": 3 * MIB, "real_bytes": 3 * MIB}]
    cards = [{"device": "CUDA0", "planned_bytes": 9000 * MIB, "used_bytes": 9001 * MIB}]
    return {"rows": rows, "ok": ok, "worst": "" if ok else "CUDA0 model: off", "cards": cards, "failed": [], **changes}


def sample(arm: str, n: int, decode: float, **changes: Any) -> dict[str, Any]:
    found = {
        "run": "r", "kind": "sample", "at": 1795994600 + n, "arm": arm, "round": n, "load_s": 10.0 + n,
        "decode_tps": decode, "prefill_4096_tps": 100 * decode, "boot_free_mib": {UUID: 3000, "host": 5},
        "least_free_mib": {UUID: 2000 - n, "GPU-of-nobody": 1, "host": 2},
    }  # fmt: skip
    return {**found, **({"audit": audit()} if arm == "ours" else {}), **changes}


def data(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def read(*rows: dict[str, Any]) -> RunRows:
    (found,) = read_results(data(*rows), "f.jsonl")
    return found


def arms(run: RunRows) -> dict[str, ArmRow]:
    return {arm.arm: arm for arm in run.arms}


def text(*runs: RunRows) -> str:
    return screen.texts(runs, Private())[0]


# ------------------------------------------------------------------------------------------ real results


def test_rows_of_a_real_visit(pytestconfig: pytest.Config) -> None:
    found = text(*read_results(captured(), "f.jsonl"))
    if pytestconfig.getoption("--update-golden"):
        GOLDEN.write_text(found)
    assert found == GOLDEN.read_text()


def test_the_example_of_the_format_can_be_read_and_holds_nothing_private() -> None:
    path = ROOT / "docs" / "examples" / "gpu_acceptance.jsonl"
    runs = read_results(path.read_bytes(), path.name)
    assert [r.run for r in runs] == ["qwen3-12", "gptoss-two", "two-cards"]
    assert {len(arm.prefill_tps) for r in runs for arm in r.arms if arm.n} == {2}
    assert set(re.findall(r'"(/\w+/?\w*)', path.read_text())) == {"/dev/shm"}


def test_the_same_results_with_passing_audits_give_figures_and_ratios() -> None:
    passed = re.sub(rb'"ok": false, "worst": "[^"]*"', b'"ok": true, "worst": ""', captured())
    assert passed != captured()
    one, two, _ = read_results(passed, "f.jsonl")
    ours, fit = arms(one)["ours"], arms(one)["fit"]
    rows = [json.loads(line) for line in (CAPTURED / FILES[0]).read_text().splitlines()]
    speed = {(r["arm"], r["round"]): r.get("decode_tps") for r in rows if r["kind"] == "sample"}
    assert ours.decode_tps == (speed["ours", 0] + speed["ours", 1]) / 2
    expected = paired([speed["ours", 0], speed["ours", 1]], [speed["fit", 0], speed["fit", 1]])
    assert (fit.ratios[0].metric, fit.ratios[0].median, fit.ratios[0].low, fit.ratios[0].n) == (
        "decode", expected.median, expected.low, 2,
    )  # fmt: skip
    assert arms(two)["fit"].ratios[0].low is None  # one pair


def test_the_table_of_planned_bytes_goes_below_its_heading_in_the_benchmarks() -> None:
    benchmarks = (ROOT / "BENCHMARKS.md").read_text()
    head = re.search(r"## Planned against real\n[^#]*?\n\| rig, [\d-]+ (\|[^\n]*\|)\n", benchmarks)
    assert head
    assert f"## Planned against real\n\n| rig, date {head[1]}\n" in GOLDEN.read_text()
    assert "\n## Speed\n" in benchmarks and "\n## Speed\n" in GOLDEN.read_text()


# -------------------------------------------------------------------------------------------- the rules


def test_medians_memory_and_ratios_over_the_rounds_both_have() -> None:
    run = read(
        RIG, PLANNED, {"run": "r", "kind": "audit", "at": 1, **audit()},
        *(sample("ours", n, d) for n, d in enumerate((30, 50, 40))),
        *(sample("fit", n, d) for n, d in ((0, 20), (2, 20), (3, 1))),
    )  # fmt: skip
    ours, fit = run.arms
    assert (ours.n, ours.decode_tps, ours.prefill_tps, ours.load_s) == (3, 40, {4096: 4000}, 11)
    assert (ours.uses[0].planned_bytes, ours.uses[0].used_bytes) == (9000 * MIB, 9001 * MIB)
    assert (fit.uses[0].planned_bytes, fit.uses[0].used_bytes) == (None, 9000 * MIB)  # 12,000 free before, 3,000 after
    assert ours.least_free_bytes == {"CUDA0": 1998 * MIB}  # the worst round, cards of the run alone
    assert [(r.metric, r.median, r.n) for r in fit.ratios] == [("decode", 1.75, 2), ("prefill 4096", 1.75, 2)]
    assert ours.ratios == () and ours.replanned == ""


def test_a_failed_audit_gives_its_reason_and_no_figure() -> None:
    run = read(
        RIG, PLANNED, sample("ours", 0, 77.7), sample("ours", 1, 66.6, audit=audit(ok=False)), sample("fit", 0, 20)
    )
    ours = arms(run)["ours"]
    assert (ours.decode_tps, ours.prefill_tps, ours.withheld) == (None, {4096: None}, "CUDA0 model: off")
    assert arms(run)["fit"].decode_tps == 20 and arms(run)["fit"].ratios == ()
    page = text(run)
    assert "no figures, its audit failed: CUDA0 model: off" in page
    assert [figure for figure in ("77.7", "66.6", "72.2", "7,770", "6,660", "7,215") if figure in page] == []


def test_the_runs_own_audit_stands_in_for_samples_without_one() -> None:
    failed = {"run": "r", "kind": "audit", "at": 1, **audit(ok=False, worst="", failed=["CUDA0 is tight"])}
    bare = sample("ours", 0, 99)
    del bare["audit"]
    assert arms(read(RIG, PLANNED, failed, bare))["ours"].withheld == "CUDA0 is tight"
    assert arms(read(RIG, PLANNED, failed, sample("ours", 0, 99)))["ours"].decode_tps == 99


def test_an_audit_that_failed_in_silence_still_failed() -> None:
    run = read(RIG, PLANNED, sample("ours", 0, 99, audit=audit(ok=False, worst="")))
    assert arms(run)["ours"].decode_tps is None
    assert "does not say why" in arms(run)["ours"].withheld


def test_a_plan_that_changed_after_the_first_start_is_said() -> None:
    other = audit(rows=[{"device": "CUDA0", "kind": "model", "planned_bytes": 9 * MIB, "real_bytes": 9 * MIB}])
    run = read(RIG, PLANNED, sample("ours", 0, 9, audit=other))
    assert arms(run)["ours"].replanned == "CUDA0 weights 9 MiB, not 3"


def test_one_pair_has_no_interval_and_errors_are_counted() -> None:
    run = read(RIG, PLANNED, sample("ours", 0, 30), sample("fit", 0, 20), sample("fit", 1, 1, error="died\nat boot"))
    fit = arms(run)["fit"]
    assert (fit.n, fit.failed, fit.error, fit.ratios[0].low) == (1, 1, "died at boot", None)
    assert "decode 1.500 (one pair, no interval)" in text(run)
    assert "1 of 2 failed: died at boot" in text(run)


def test_a_speed_of_zero_is_unknown() -> None:
    run = read(RIG, PLANNED, sample("ours", 0, 30), sample("fit", 0, 0))
    assert arms(run)["fit"].decode_tps is None and arms(run)["fit"].ratios == ()


def test_two_rigs_are_never_one_row() -> None:
    other = {**RIG, "driver": "590.2"}
    first, second = read_results(
        data(RIG, PLANNED, sample("ours", 0, 30), other, PLANNED, sample("fit", 0, 20), sample("ours", 0, 10)), "f"
    )
    assert (first.rig.driver, arms(first)["ours"].decode_tps) == ("580.1", 30)
    assert (second.rig.driver, arms(second)["fit"].ratios[0].median) == ("590.2", 0.5)


def test_a_rig_that_nobody_told_is_unknown() -> None:
    page = text(read(sample("fit", 0, 20)))
    assert "card unknown, driver unknown, processor unknown, cores unknown, memory unknown, engine unknown" in page


@pytest.mark.parametrize(
    ("rungs", "survived", "said"),
    [
        ([(10240, ""), (30146, "")], True, "survived to 30,146 tokens, least free 902 MiB"),
        ([(10240, ""), (30146, "gone")], False, "DIED at 30,146 tokens, 10,240 before, least free 902 MiB: gone"),
        ([(10240, "gone")], False, "DIED at 10,240 tokens, none before, least free 902 MiB: gone"),
    ],
)
def test_the_depth_ladder(rungs: list[tuple[int, str]], survived: bool, said: str) -> None:
    steps = [{"n_tokens": n, "least_free_bytes": {UUID: 902 * MIB, "host": 1}, "error": e} for n, e in rungs]
    row = {"run": "r", "kind": "ladder", "at": 3, "survived": survived, "rungs": steps}
    assert said in text(read(RIG, PLANNED, row, sample("ours", 0, 30)))
    assert said in text(read(RIG, PLANNED, row))


def test_what_was_refused_is_told() -> None:
    run = read(RIG, {"run": "r", "kind": "refused", "at": 3, "message": "short by 3 GiB"})
    assert "r: refused: short by 3 GiB" in text(run)


def test_flags_without_paths_ports_and_rules() -> None:
    assert flags_of(PLANNED["argv"]) == ("-c", "32768", "--api-key", "s3cr3t")  # type: ignore[arg-type]
    words = ["e", "--model", "/m/q.gguf", "-md", "/m/d.gguf", "--spec-draft-n-max", "5", "--n-cpu-moe", "28", "-a", "x"]
    assert flags_of(words) == ("--spec-draft-n-max", "5", "--n-cpu-moe", "28")


def test_a_key_among_the_flags_is_hidden() -> None:
    page, doc = screen.texts((read(RIG, PLANNED, sample("ours", 0, 30)),), Private())
    assert "s3cr3t" not in page + json.dumps(doc)
    assert "--api-key <secret>" in page and UUID not in page + json.dumps(doc)


# -------------------------------------------------------------------------------------------- bad files


def broken(change: Callable[[dict[str, Any]], None]) -> bytes:
    row = json.loads(json.dumps(sample("ours", 1, 30)))
    change(row)
    return data(RIG, PLANNED, sample("ours", 0, 30), row)


@pytest.mark.parametrize(
    ("bad", "line", "said"),
    [
        (data(RIG, PLANNED)[:-40], 2, "cut short"),
        (data(RIG) + b"[1]\n" + data(PLANNED), 2, "not an object"),
        (data(RIG) + b"\n\xff\xfe\n", 3, "not a line of JSON"),
        (data(RIG, {**RIG, "kind": "speed"}), 2, 'kind "speed" is none of'),
        (data(RIG, {"kind": "rig", "at": 1}), 2, "'run' is missing"),
        (data(RIG, {**RIG, "at": "today"}), 2, "'at' is \"today\""),
        (data(RIG, PLANNED, sample("fit", 0, 1), sample("fit", 0, 2)), 4, "is in line 3 already"),
        (broken(lambda row: row.update(decode_tps="fast")), 4, "'decode_tps' is \"fast\""),
        (broken(lambda row: row.update(decode_tps=float("nan"))), 4, "'decode_tps' is NaN"),
        (broken(lambda row: row.update(decode_tps=-1)), 4, "'decode_tps' is -1"),
        (broken(lambda row: row.pop("round")), 4, "'round' is missing"),
        (broken(lambda row: row.update(least_free_mib=[1])), 4, "not an object"),
        (broken(lambda row: row["audit"].pop("ok")), 4, "'ok' of its audit is missing"),
        (broken(lambda row: row["audit"]["cards"][0].pop("planned_bytes")), 4, "'planned_bytes' is missing"),
        (data(RIG, {"run": "r", "kind": "ladder", "at": 3, "rungs": []}), 2, "'survived' is missing"),
    ],
)
def test_a_damaged_file_is_refused_with_its_line(bad: bytes, line: int, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_results(bad, "my results.jsonl")
    assert refused.value.reference == "results-invalid"
    assert refused.value.message.startswith(f"my results.jsonl:{line}: ")
    assert said in refused.value.message
    assert refused.value.fix.startswith(f"sed -i '{line}d' 'my results.jsonl'")


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield from leaves(one, (*path, key))


@pytest.mark.parametrize(
    "odd", [None, "x", -1, 1.5, [], {}, [[1]], {"a": [1]}, True, 10**400], ids=lambda v: str(v)[:9]
)
def test_any_value_anywhere_is_read_or_refused_with_its_line(odd: Any) -> None:
    """Never a bug: a results file comes from somebody else's script, or out of an editor."""
    rows, refused = [], 0
    for row in map(json.loads, captured().splitlines()):
        if (row["run"], row["kind"], row.get("arm")) not in {(r["run"], r["kind"], r.get("arm")) for r in rows}:
            rows.append(row)
    for at, row in enumerate(rows):
        for path in leaves(row):
            changed = json.loads(json.dumps(row))
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = odd
            near = [r for r in rows if r["run"] == row["run"]]
            try:
                found = read_results(data(*(changed if r is row else r for r in near)), "f")
                json.dumps(screen.texts(found, Private())[1], allow_nan=False)
            except UsageError as error:
                refused += 1
                assert re.match(r"f:\d+: ", error.message), (at, path)
    assert refused or odd is None


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(UsageError, match="no rows"):
        read_results(b"\n", "f.jsonl")
