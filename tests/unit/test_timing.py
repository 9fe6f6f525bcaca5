"""How long a person waits: measured in processes of their own, against an empty Python on the same machine.

Medians of five, taken in turns with what they are compared with. A machine that others use too may spoil a round,
so the best of three rounds counts: what a command costs does not shrink by itself.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import launcher

ROOT = Path(launcher.__file__).parent.parent
EMPTY = ("-c", "pass")
HEADER = (
    "import sys, time; from launcher.facts.gguf_header import read_header; t = time.perf_counter(); "
    "read_header(sys.argv[1]); print(time.perf_counter() - t)"
)


def wall(*argv: str) -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, *argv], capture_output=True, check=True, cwd=ROOT)
    return time.perf_counter() - begun


def rounds(*argv: str, most: Callable[[float], float]) -> list[tuple[float, float]]:
    """(median of the command, `most` of the median of an empty Python) until the command keeps it; three at most."""
    wall(*argv)  # compiles what was never compiled
    found = []
    for _ in range(3):
        both = [(wall(*argv), wall(*EMPTY)) for _ in range(5)]
        found.append((statistics.median(a for a, _ in both), most(statistics.median(b for _, b in both))))
        if found[-1][0] <= found[-1][1]:
            break
    return found


def test_help_takes_at_most_ten_empty_pythons() -> None:
    found = rounds("-m", "launcher", "--help", most=lambda empty: 10 * empty)
    assert found[-1][0] <= found[-1][1], found


def test_a_plan_of_150_gib_takes_at_most_six_tenths_of_a_second(
    replica: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or 25 empty Pythons, where those take longer."""
    folders = [replica(n).parent for n in ("deepseek-v4-flash-UD-Q8_K_XL", "deepseek-v4-flash-dspark-Q8_0")]
    monkeypatch.setenv("MODEL_DIR", os.pathsep.join(map(str, folders)))
    rig = str(ROOT / "tests" / "golden" / "rigs" / "2x3090.yaml")
    argv = ("-m", "launcher", "plan", "llamacpp/deepseek-flash-dual-q8", "--rig", rig, "--no-engine", "--json")
    found = rounds(*argv, most=lambda empty: max(0.6, 25 * empty))
    assert found[-1][0] <= found[-1][1], found


def test_a_header_of_five_shards_takes_at_most_15_hundredths(replica: Callable[[str], Path]) -> None:
    argv = [sys.executable, "-c", HEADER, str(replica("deepseek-v4-flash-UD-Q8_K_XL"))]
    taken = [float(subprocess.run(argv, capture_output=True, check=True, cwd=ROOT, text=True).stdout) for _ in range(5)]
    assert statistics.median(taken) <= 0.15, taken
