"""The lines of a results file, each with its number: what is damaged is refused where it stands. Pure: bytes in."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from launcher.errors import UsageError

KINDS = ("rig", "plan", "planned", "refused", "failed", "audit", "ladder", "sample", "identity", "hop")


_BEYOND = 1 << 63  # no card, prompt or clock counts that far


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row of the file; number counts from 1. Getters raise UsageError (results-invalid) with that number."""

    file: str
    number: int
    row: Mapping[str, Any]

    def bad(self, what: str) -> NoReturn:
        """Refuse the file because of this line."""
        refuse(self.file, self.number, what)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.row.get(key, default)
        return value if isinstance(value, str) else self.bad(f"{key!r} is {shown(value)}, not a text")

    def number_or_none(self, key: str, row: Mapping[str, Any] | None = None) -> float | None:
        """A number that is not negative; None where it is missing or null."""
        value = (self.row if row is None else row).get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _BEYOND:  # nor NaN
            self.bad(f"{key!r} is {shown(value)}, not a number from 0 to {_BEYOND}")
        return value

    def whole(self, key: str, row: Mapping[str, Any] | None = None) -> int:
        """A number that must be there, as whole bytes, tokens or seconds."""
        value = self.number_or_none(key, row)
        return self.bad(f"{key!r} is missing") if value is None else round(value)

    def flag(self, key: str) -> bool:
        """true or false."""
        value = self.row.get(key)
        return value if isinstance(value, bool) else self.bad(f"{key!r} is {shown(value)}, not true or false")

    def mapping(self, key: str, row: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """An object; empty where it is missing or null."""
        value = (self.row if row is None else row).get(key)
        if value is None:
            return {}
        return value if isinstance(value, dict) else self.bad(f"{key!r} is {shown(value)}, not an object")

    def sizes(self, key: str, row: Mapping[str, Any] | None = None) -> dict[str, int]:
        """An object of whole numbers."""
        found = self.mapping(key, row)
        return {name: self.whole(name, found) for name in found}

    def signed(self, key: str) -> dict[str, int]:
        """An object of whole numbers that may be negative: what a card grew by, or gave back."""
        found = self.mapping(key)
        for n in found.values():
            if isinstance(n, bool) or not isinstance(n, int) or abs(n) >= _BEYOND:
                self.bad(f"{key!r} holds {shown(n)}, not whole bytes")
        return dict(found)

    def numbers(self, key: str, row: Mapping[str, Any] | None = None) -> tuple[int, ...]:
        """A list of whole numbers; empty where it is missing."""
        value = (self.row if row is None else row).get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            self.bad(f"{key!r} is {shown(value)}, not a list of numbers")
        return tuple(self.whole(key, {key: n}) for n in value)

    def rows(self, key: str, row: Mapping[str, Any] | None = None) -> list[Mapping[str, Any]]:
        """A list of objects; empty where it is missing."""
        value = (self.row if row is None else row).get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            self.bad(f"{key!r} is {shown(value)}, not a list of objects")
        return value

    def words(self, key: str) -> tuple[str, ...]:
        """A list of texts; empty where it is missing."""
        value = self.row.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            self.bad(f"{key!r} is {shown(value)}, not a list of texts")
        return tuple(value)


def shown(value: object) -> str:
    """A value as a refusal shows it: short, `missing` for null."""
    text = json.dumps(value, default=str)
    return "missing" if value is None else text if len(text) <= 40 else text[:37] + "..."


def refuse(file: str, number: int, what: str) -> NoReturn:
    """The refusal of one line. Raises UsageError (results-invalid)."""
    raise UsageError(
        "results-invalid",
        f"{file}:{number}: {what}",
        context="results are lines of JSON, as scripts/gpu_acceptance.py writes them",
        fix=f"sed -i '{number}d' {shlex.quote(file)}   # a piece that is missing is measured again by the next visit",
    )


def lines_of(data: bytes, file: str) -> tuple[Line, ...]:
    """Every row of a results file. Raises UsageError (results-invalid) at the first line that is damaged."""
    found: list[Line] = []
    for number, raw in enumerate(data.split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            row = json.loads(raw.decode("utf-8"))
        except ValueError as error:
            refuse(file, number, f"not a line of JSON, cut short? ({error})")
        if not isinstance(row, dict):
            refuse(file, number, f"{shown(row)} is not an object")
        line = Line(file=file, number=number, row=row)
        if line.text("kind") not in KINDS:
            line.bad(f"kind {shown(row['kind'])} is none of {', '.join(KINDS)}")
        line.text("run")
        line.whole("at")
        found.append(line)
    if not found:
        raise UsageError(
            "results-invalid",
            f"{file}: no rows in it",
            fix=f"python scripts/gpu_acceptance.py --out {shlex.quote(file)}",
        )
    return tuple(found)
