"""Where answers go: lines for people through rich, one document for programs without it.

Rules and commands are printed as Text with soft_wrap: rich would eat `[...]` as markup and break long lines.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

WIDTH = 100

# One meaning each; a terminal without colour loses nothing, every verdict is a word too.
STYLES = {"ok": "bold green", "no": "bold red", "note": "yellow", "dim": "dim", "head": "bold"}


def console(*, stderr: bool = False) -> Console:
    """A console on the present stdout or stderr; plain where that is no terminal or NO_COLOR is set."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)


def line(*parts: str | tuple[str, str]) -> Text:
    """One line of plain strings and (string, name of STYLES) pairs."""
    from rich.text import Text

    text = Text()
    for part in parts:
        if isinstance(part, str):
            text.append(part)
        else:
            text.append(part[0], STYLES[part[1]])
    return text


def show(lines: Iterable[Text | str], *, stderr: bool = False) -> None:
    """Print lines as they are: no wrapping, no markup, no cropping."""
    from rich.text import Text

    to = console(stderr=stderr)
    for item in lines:
        to.print(item if isinstance(item, Text) else Text(item), soft_wrap=True)


def document(doc: Mapping[str, Any]) -> None:
    """Print exactly one JSON document on stdout."""
    json.dump(doc, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def table(rows: list[list[str]], *, left: frozenset[int] = frozenset({0}), gap: int = 2) -> list[str]:
    """Rows as aligned lines, `gap` spaces between columns: numbers to the right, the columns of `left` to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        (" " * gap)
        .join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        .rstrip()
        for row in rows
    ]


def shares(values: list[int], unit: int) -> list[int]:
    """Values in whole units whose sum is the rounded sum: tables of rounded numbers must add up.

    Largest remainder first, lowest index among equals.
    """
    whole = [v // unit for v in values]
    missing = round(sum(values) / unit) - sum(whole)
    by_remainder = sorted(range(len(values)), key=lambda i: (-(values[i] % unit), i))
    for i in by_remainder[: max(0, missing)]:
        whole[i] += 1
    return whole


def duration(seconds: float) -> str:
    """`0.4 s`, `18 s`, `2 m 31 s`, `3 h 05 m`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} m"
