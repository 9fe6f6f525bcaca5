"""The results file: one JSON line a piece, written at once, so that a visit that ends early loses nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class Results:
    """Lines of a file; `has` tells what is there already."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    self.rows.append(json.loads(line))
                except ValueError:  # the line that was being written when a visit ended
                    continue

    def has(self, run: str, kind: str, **match: object) -> bool:
        """Whether such a row is there; a sample that failed counts as one."""
        wanted = {"run": run, "kind": kind, **match}
        return any(all(row.get(k) == v for k, v in wanted.items()) for row in self.rows)

    def of(self, run: str, kind: str, **match: object) -> list[dict[str, Any]]:
        """Those rows, in order."""
        wanted = {"run": run, "kind": kind, **match}
        return [row for row in self.rows if all(row.get(k) == v for k, v in wanted.items())]

    def add(self, run: str, kind: str, **what: Any) -> None:
        """Append one row."""
        row = {"run": run, "kind": kind, "at": round(time.time()), **what}
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, default=str) + "\n")
