"""The arms of the GPU acceptance matrix with a real llama-server, on the CPU: what runs on a card is the same code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
pytestmark = pytest.mark.engine


@pytest.fixture
def scripts() -> Iterator[None]:
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.mark.usefixtures("scripts")
def test_every_arm_starts_answers_and_ends(tiny: Callable[[str], Path], engine_path: Path, tmp_path: Path) -> None:
    from acceptance import arms, facts
    from acceptance.matrix import ALL_ARMS, Run

    run = Run(
        name="t",
        title="",
        spec="",
        limits_gib=(),
        given={"ctx": "2k", "ubatch": 256},
        arms=ALL_ARMS,
        prefill=(512, 4096),
    )
    said: list[str] = []
    bench = arms.Bench(
        run=run, target={"model": tiny("tiny-qwen3moe")}, engine=str(engine_path), work=tmp_path / "w", say=said.append
    )
    with facts.own_folders(tmp_path):
        times = bench.time_plans()
        assert (times["arithmetic_rc"], times["dry_runs_rc"], times["kept_rc"]) == (0, 0, 0), times
        assert 0 < times["in_process_s"] < times["arithmetic_s"]
        rows = {arm: bench.sample(arm) for arm in ALL_ARMS}
    assert {arm: row["error"] for arm, row in rows.items() if "error" in row} == {}
    assert all(row["decode_tps"] > 0 and row["prefill_512_tps"] > 0 and row["load_s"] > 0 for row in rows.values())
    assert {row["n_ctx"] for arm, row in rows.items() if arm != "stock"} == {2048}
    assert "prefill_4096_tps" not in rows["ours"]  # more than its context
    assert rows["ours"]["audit"]["ok"]
    assert any("compute buffer size" in line for line in rows["ours"]["audit"]["reserved"])
    assert bench.n_cpu_moe == 4  # on the CPU all boot: four tries below what the plan leaves there


@pytest.mark.usefixtures("scripts")
def test_results_resume_where_they_were_cut(tmp_path: Path) -> None:
    from acceptance.results import Results

    path = tmp_path / "r.jsonl"
    out = Results(path)
    out.add("a", "sample", arm="ours", round=0, decode_tps=1.5)
    path.write_text(path.read_text() + '{"run": "a", "kind": "sam')
    again = Results(path)
    assert again.has("a", "sample", arm="ours", round=0)
    assert not again.has("a", "sample", arm="ours", round=1)
    assert [row["decode_tps"] for row in again.of("a", "sample")] == [1.5]
