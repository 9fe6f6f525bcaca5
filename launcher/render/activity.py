"""What a server is doing, as people read it: how far a prompt is read, for how long nothing has moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from launcher.render import out
from launcher.structs import Activity, Request, RunRecord

if TYPE_CHECKING:
    from rich.text import Text

# A batch takes seconds on most rigs: this long since the last one is worth a word.
_STILL_S = 30.0


def activity_lines(doing: Activity, record: RunRecord) -> Iterator[Text | str]:
    """A line for every request that is worked on, and for how long nothing has moved."""
    for request in doing.requests:
        stream = f"stream {request.slot}: " if len(doing.requests) > 1 else ""
        yield f"  {stream}{request_line(request)}"
    if doing.wedged and doing.still_s is not None:
        said = f"no progress for {out.duration(doing.still_s)}: it will not come back by itself"
        yield out.line("  ", (said, "no"))
        yield f"  launcher logs {record.slug} | launcher stop {record.slug}"
    elif doing.still_s is not None and doing.still_s >= _STILL_S:
        yield f"  the last progress was {out.duration(doing.still_s)} ago"


def request_line(request: Request) -> str:
    """`reading 41,000 of 60,300, 2 m 05 s left at 154 tok/s`; what is not known is left out."""
    if request.written_tokens:
        of = "" if request.prompt_tokens is None else f" after a prompt of {request.prompt_tokens:,}"
        return f"writing, {request.written_tokens:,} tokens so far{of}"
    if request.read_tokens is None:
        return "reading"
    of = "" if request.prompt_tokens is None else f" of {request.prompt_tokens:,}"
    left = "" if request.left_s is None else f", {out.duration(request.left_s)} left"
    rate = f" at {request.read_tps:,.0f} tok/s" if left and request.read_tps else ""
    return f"reading {request.read_tokens:,}{of}{left}{rate}"
