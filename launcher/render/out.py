"""Where answers go: lines for people through rich, one document for programs without it.

Rules and commands are printed as Text with soft_wrap: rich would eat `[...]` as markup and break long lines.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from launcher.errors import LauncherError
from launcher.units import duration as duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

WIDTH = 100

# One meaning each; a terminal without colour loses nothing, every verdict is a word too.
STYLES = {"ok": "bold green", "no": "bold red", "note": "yellow", "dim": "dim", "head": "bold"}


def console(*, stderr: bool = False) -> Console:
    """A console on the present stdout or stderr; plain where that is no terminal or NO_COLOR is set."""
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1 in the middle of a command

    return Quiet(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)


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
    """Print lines as they are: no wrapping, no markup, no cropping. Raises LauncherError (output-failed)."""
    from rich.text import Text

    to = console(stderr=stderr)
    try:
        for item in lines:
            to.print(item if isinstance(item, Text) else Text(item), soft_wrap=True)
    except OSError as error:
        _lost(sys.stderr if stderr else sys.stdout, error)


def json_text(doc: Mapping[str, Any]) -> str:
    """A JSON document as the text of a file."""
    return json.dumps(doc, indent=2, allow_nan=False) + "\n"


def document(doc: Mapping[str, Any]) -> None:
    """Print exactly one JSON document on stdout. Raises LauncherError (output-failed)."""
    try:
        sys.stdout.write(json_text(doc))
        sys.stdout.flush()
    except OSError as error:
        _lost(sys.stdout, error)


def _lost(stream: TextIO, error: OSError) -> None:
    """A reader that left (`| head`) changes nothing, not even the exit code; a full disk is a refusal."""
    drop(stream)
    if not isinstance(error, BrokenPipeError):
        raise unwritten(error) from error


def unwritten(error: OSError) -> LauncherError:
    """The refusal of an answer that nobody will read."""
    problem = f"the answer could not be written: {error.strerror or error}"
    return LauncherError("output-failed", problem, fix="df -h     # is the disk full?")


def drop(stream: TextIO) -> None:
    """Let the rest of a stream go nowhere: its reader is gone, which is no reason for another exit code."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def fold(text: str, indent: str = "  ", width: int = WIDTH) -> list[str]:
    """A text as lines of at most `width` columns, those after the first indented; a long path stays whole."""
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    ) or [""]  # fmt: skip


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
