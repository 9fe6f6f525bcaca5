#!/usr/bin/env python3
"""How far the compute bounds are from what the engine reserved, per architecture, backend and place.

    python scripts/oracle_table.py [--write]

Judges every row of tests/golden/engine_rows.jsonl under its own conditions: never more than 1 % below, at most
15 % + 64 MiB above (60 % + 128 MiB for MLA, deepseek4 and hybrid models; 15 % for a drafter and for NextN blocks).
Not judged are rows with options that no plan of ours sets.
--write puts the table into docs/planner.md. Exit code 1 when a row fails.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from launcher.units import MIB  # noqa: E402
from tests.engine_rows import bounds, rows  # noqa: E402

WIDE = ("deepseek2", "deepseek4", "qwen3next")
BEGIN, END = "<!-- oracle table -->", "<!-- end of oracle table -->"


def allowed(arch: str, engine_bytes: int) -> tuple[float, float]:
    """(least, most) bytes that a bound may be for a buffer of this size."""
    share, more = (
        (0.60, 128 * MIB)
        if arch in WIDE
        else (0.15, 0 if arch.startswith("drafter") or arch.endswith("NextN") else 64 * MIB)
    )
    return engine_bytes * 0.99, engine_bytes * (1 + share) + more


def table() -> tuple[list[str], int]:
    """The table as Markdown lines, and how many buffers fail."""
    found: dict[tuple[str, str, str], list[tuple[float, bool]]] = defaultdict(list)
    for x in bounds():
        low, high = allowed(x.arch, x.engine)
        backend = x.backend + (", all logits" if x.all_logits else "")
        found[x.arch, backend, x.place].append((x.bound / x.engine - 1, low <= x.bound <= high))
    lines = [
        "| architecture | backend | device | buffers | lowest | median | highest | failing |",
        "|---|---|---|---|---|---|---|---|",
    ]
    failing = 0
    for (arch, backend, place), errors in sorted(found.items()):
        shares = [e for e, _ in errors]
        bad = sum(not ok for _, ok in errors)
        failing += bad
        lines.append(
            f"| {arch} | {backend} | {place} | {len(errors)} "
            f"| {min(shares):+.1%} | {median(shares):+.1%} | {max(shares):+.1%} | {bad} |"
        )
    return lines, failing


def main() -> int:
    lines, failing = table()
    print("\n".join(lines))
    print(f"\n{sum(row.odd_flags for row in rows())} rows not judged for options that no plan sets")
    print(f"{failing} failing")
    if "--write" in sys.argv[1:]:
        doc = ROOT / "docs" / "planner.md"
        text = doc.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        doc.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + after, encoding="utf-8")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
