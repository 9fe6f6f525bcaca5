"""A refusal as its lines on stderr: `error[id]: what`, the sum or the evidence, `fix: a command or an edit`."""

from __future__ import annotations

import sys

from launcher.errors import LauncherError
from launcher.render import out


def lines(error: LauncherError) -> tuple[str, ...]:
    """The lines of a refusal; evidence is indented, an empty one left out."""
    what = out.fold(f"error[{error.reference}]: {error.message}")
    return (*what, *context(error.context), *fix(error.fix))


def context(text: str, indent: str = "  ") -> tuple[str, ...]:
    """The evidence, indented and folded; a line that is indented already goes on below its own text."""
    found: list[str] = []
    for part in text.splitlines():
        if part.strip():
            own = indent + part[: len(part) - len(part.lstrip())]
            found += [own + folded for folded in out.fold(part.strip(), width=out.WIDTH - len(own))]
    return tuple(found)


def fix(text: str, indent: str = "") -> tuple[str, ...]:
    """`fix: command     # why`; the reason goes before it where both are too wide: the last line is what is pasted."""
    whole = f"{indent}fix: {text}"
    command, mark, why = text.partition("     # ")
    if len(whole) <= out.WIDTH or not mark:
        return (whole,)
    return (*(f"{indent or '  '}{part}" for part in out.fold(why, width=out.WIDTH - 9)), f"{indent}fix: {command}")


def show(error: LauncherError) -> None:
    """Print a refusal on stderr; not through rich, whose import costs more than the text."""
    text = "\n".join(lines(error)) + "\n"
    encoding = sys.stderr.encoding or "utf-8"
    sys.stderr.write(text.encode(encoding, "backslashreplace").decode(encoding))
