"""What a llama-server's `--help` and `--version` say, parsed. Pure."""

from __future__ import annotations

import re

_FLAG_LINE = re.compile(r"^(-{1,2}[A-Za-z][\w-]*(?:,\s+-{1,2}[A-Za-z][\w-]*)*)(?:\s+(\S+))?")
_REMOVED = "argument has been removed"


def parse_help(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """(flags, values of --spec-type) of a `--help`: every long and short spelling, without the removed ones."""
    flags: set[str] = set()
    spec_types: set[str] = set()
    for entry in re.split(r"\n(?=\S)", text):
        match = _FLAG_LINE.match(entry)
        if not match or _REMOVED in " ".join(entry.split()):
            continue
        names = re.split(r",\s+", match[1])
        flags.update(names)
        if "--spec-type" in names and match[2]:
            spec_types.update(v for v in re.split(r"[,|]", match[2].strip("[]<>{}")) if v)
    return frozenset(flags), frozenset(spec_types)


def parse_removed(text: str) -> dict[str, str]:
    """Flag -> what the engine says to use instead, of every spelling that its `--help` calls removed."""
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", text):
        words = " ".join(re.sub(r"\(env: \w+\)", "", entry).split())
        match = _FLAG_LINE.match(entry)
        if match and _REMOVED in words:
            instead = words.partition(_REMOVED)[2].strip(" .")
            found |= dict.fromkeys(re.split(r",\s+", match[1]), instead or "nothing takes its place")
    return found


def parse_version(text: str) -> str:
    """`version: 0.6.0-dev (build 0, commit unknown)` -> what follows `version:`; empty when no line says it."""
    match = re.search(r"^version:\s*(.+?)\s*$", text, re.M)
    return match[1] if match else ""
