"""One line of history for each run that ended: to JSON and back, and how much of it is kept. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from launcher.structs import Request, RunEnd, Sample

SCHEMA = 1
# A line has up to 3 KiB with its samples and requests: some hundred runs, and nobody asks for older ones.
MOST_BYTES = 1 << 20


def line_of(end: RunEnd) -> str:
    """The line of a run, with its newline."""
    return json.dumps({"schema_version": SCHEMA, **asdict(end)}) + "\n"


def parse(line: str) -> RunEnd | None:
    """The run of a line, also of an older version's; None when it is none."""
    try:
        document = dict(json.loads(line))
        fields = {k: v for k, v in document.items() if k in RunEnd.__dataclass_fields__}
        fields["samples"] = tuple(Sample(**_known(s, Sample)) for s in fields.get("samples", ()))
        fields["requests"] = tuple(Request(**_known(r, Request)) for r in fields.get("requests", ()))
        fields["kernel"] = tuple(str(text) for text in fields.get("kernel", ()))
        fields["asked"] = dict(fields.get("asked", {}))
        return RunEnd(**fields)
    except (ValueError, TypeError, AttributeError):
        return None


def newest(text: str, most_bytes: int) -> str:
    """The newest lines of a history that has grown too long: half of what may be kept."""
    kept: list[str] = []
    room = most_bytes // 2
    for line in reversed(text.splitlines(keepends=True)):
        room -= len(line.encode())
        if room < 0:
            break
        kept.append(line)
    return "".join(reversed(kept))


def _known(found: dict[str, Any], kind: type[Sample] | type[Request]) -> dict[str, Any]:
    return {k: v for k, v in found.items() if k in kind.__dataclass_fields__}
