"""A refusal as its lines on stderr: `error[id]: what`, the sum or the evidence, `fix: a command or an edit`."""

from __future__ import annotations

import sys

from launcher.errors import LauncherError


def lines(error: LauncherError) -> tuple[str, ...]:
    """The lines of a refusal; a context of several lines is indented, an empty one left out."""
    context = tuple(f"  {part}" for part in error.context.splitlines() if part.strip())
    return (f"error[{error.reference}]: {error.message}", *context, f"fix: {error.fix}")


def show(error: LauncherError) -> None:
    """Print a refusal on stderr; not through rich, whose import costs more than the text."""
    text = "\n".join(lines(error)) + "\n"
    encoding = sys.stderr.encoding or "utf-8"
    sys.stderr.write(text.encode(encoding, "backslashreplace").decode(encoding))
