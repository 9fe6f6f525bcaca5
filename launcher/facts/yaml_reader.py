"""YAML written by people -> checked values, every problem at once with its place.

Slugs and rig files share this: one reader keeps their messages alike. A file is read as `yaml.compose` nodes, so the
check and the line number are in the same place; scalars are text (`on` is a word, `0o17` is text) until a key
converts them. Unknown and duplicate keys, anchors, aliases, merges and tags are problems. Nothing here knows a key.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from launcher import units
from launcher.errors import SlugInvalid

T = TypeVar("T")
_LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # libyaml where PyYAML was built with it: 10 times faster
_MAX_BYTES = 1 << 20
_MOST_BYTES = 1024 * units.TIB
_MAX_DEPTH = 20  # composing recurses in C, where a deep enough file would end the process
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufffe\uffff]")  # what YAML does not allow
_EMPTY = ("", "~", "null", "Null", "NULL")


class Problems:
    """What is wrong with one file: (line, column, text), counted from 1 and printed in the order of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found: list[tuple[int, int, str]] = []

    def add(self, node: yaml.Node | None, text: str) -> None:
        """Note a problem where a node starts, or (None) at the start of the file."""
        self.add_at(node.start_mark if node else None, text)

    def add_at(self, mark: Any, text: str) -> None:
        """The same at a mark (line and column from 0; pure Python's and libyaml's marks are two classes)."""
        found = (mark.line + 1, mark.column + 1, text) if mark else (1, 1, text)
        if found not in self._found:
            self._found.append(found)

    def lines(self) -> tuple[str, ...]:
        """`file:line:col: text` for each."""
        return tuple(f"{display(self.path)}:{line}:{col}: {text}" for line, col, text in sorted(self._found))

    def refuse(self, reference: str, what: str) -> None:
        """Raise SlugInvalid with every problem in `context`; nothing happens when there is none."""
        if not self._found:
            return
        n = len(self._found)
        message = f"{what} {display(self.path)} has {n} problem{'s' if n > 1 else ''}"
        fix = f"${{EDITOR:-vi}} +{min(self._found)[0]} {shlex.quote(str(self.path))}"
        raise SlugInvalid(reference, message, context="\n".join(self.lines()), fix=fix)


class Reader:
    """One mapping of the file. Ask for each key once, then call `done`, which reports what nobody asked for."""

    def __init__(self, node: yaml.MappingNode, problems: Problems, prefix: str = "") -> None:
        self.node = node
        self.problems = problems
        self._prefix = prefix
        self._nodes: dict[str, yaml.Node] = {}
        self._keys: dict[str, yaml.Node] = {}
        self._asked: list[str] = []
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                problems.add(key, "a key must be a word")
            elif key.value in self._nodes:
                first = self._keys[key.value].start_mark.line + 1
                problems.add(key, f"duplicate key {key.value!r}, first given in line {first}")
            else:
                self._keys[key.value], self._nodes[key.value] = key, value

    def get(self, key: str, convert: Callable[[str], T], default: T, *, required: bool = False) -> T:
        """The converted scalar; the default when it is missing or (reported) wrong. `convert` raises ValueError."""
        node = self._find(key, required)
        return default if node is None else self._scalar(node, key, convert, default)

    def list_of(self, key: str, convert: Callable[[str], T], *, required: bool = False) -> tuple[T, ...]:
        """The converted items of a list of scalars, without those that are wrong; a required one is not empty."""
        node = self._find(key, required)
        if required and isinstance(node, yaml.SequenceNode) and not node.value:
            self.problems.add(node, f"{self._prefix}{key}: empty; give at least one")
        return () if node is None else self.items(node, key, convert)

    def section(self, key: str, *, required: bool = False) -> Reader | None:
        """The reader of a mapping below this key."""
        node = self._find(key, required)
        return None if node is None else self.below(node, key)

    def sections(self, key: str, *, required: bool = False) -> Iterator[Reader]:
        """One reader for each mapping of a list of mappings."""
        node = self._find(key, required)
        if node is None:
            return
        if not isinstance(node, yaml.SequenceNode):
            self._expected(node, key, "a list of mappings")
            return
        for i, item in enumerate(node.value):
            reader = self.below(item, f"{key}[{i}]")
            if reader:
                yield reader

    def raw(self, key: str) -> yaml.Node | None:
        """The node itself, for a key that takes more than one form."""
        return self._find(key, False)

    def scalars(self) -> Iterator[tuple[str, yaml.Node]]:
        """Every key of a mapping whose keys are free (device names), as asked for."""
        self._asked = list(self._nodes)
        yield from self._nodes.items()

    def items(self, node: yaml.Node, key: str, convert: Callable[[str], T]) -> tuple[T, ...]:
        """The converted items of a sequence node."""
        if not isinstance(node, yaml.SequenceNode):
            self._expected(node, key, "a list, as in [a, b]")
            return ()
        found = (self._scalar(item, f"{key}[{i}]", convert, None) for i, item in enumerate(node.value))
        return tuple(value for value in found if value is not None)

    def scalar(self, node: yaml.Node, key: str, convert: Callable[[str], T], default: T) -> T:
        """The converted value of a scalar node."""
        return self._scalar(node, key, convert, default)

    def below(self, node: yaml.Node, key: str) -> Reader | None:
        """The reader of a mapping node; anything else is a problem."""
        if isinstance(node, yaml.MappingNode):
            return Reader(node, self.problems, f"{self._prefix}{key}.")
        self._expected(node, key, "a mapping, as in {name: value}")
        return None

    def wrong(self, key: str, text: str) -> None:
        """Note a problem with the value of a key (or with this mapping when the key is not there)."""
        self.problems.add(self._nodes.get(key, self.node), f"{self._prefix}{key}: {text}")

    def done(self, hints: Mapping[str, str] | None = None) -> None:
        """Report every key that was not asked for; `hints` answers for well-known wrong ones."""
        for key, node in self._keys.items():
            if key in self._asked:
                continue
            if key == "<<":
                text = "merge keys are not read: write the values out"
            elif hints and key in hints:
                text = f"unknown key {key!r}: {hints[key]}"
            else:
                known = f" (known here: {', '.join(sorted(self._asked))})"
                text = f"unknown key {key!r}{did_you_mean(key, self._asked) or known}"
            self.problems.add(node, text)

    def _find(self, key: str, required: bool) -> yaml.Node | None:
        self._asked.append(key)
        if required and key not in self._nodes:
            self.problems.add(self.node, f"missing key '{self._prefix}{key}'")
        return self._nodes.get(key)

    def _scalar(self, node: yaml.Node, key: str, convert: Callable[[str], T], default: T) -> T:
        if not isinstance(node, yaml.ScalarNode):
            self._expected(node, key, "one value")
            return default
        if not node.style and node.value in _EMPTY:
            self.problems.add(node, f"{self._prefix}{key}: empty; give a value or remove the key")
            return default
        try:
            return convert(node.value)
        except ValueError as e:
            self.problems.add(node, f"{self._prefix}{key}: {e}")
            return default

    def _expected(self, node: yaml.Node, key: str, what: str) -> None:
        if isinstance(node, yaml.ScalarNode):
            found = f"found {node.value!r}" if node.value else "found nothing"
        else:
            found = "found a mapping" if isinstance(node, yaml.MappingNode) else "found a list"
        self.problems.add(node, f"{self._prefix}{key}: expected {what}, {found}")


def open_file(path: Path, problems: Problems) -> Reader | None:
    """The reader of the file's one top mapping; None when there is none to read (the problem says why)."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            problems.add(None, f"{path.stat().st_size:,} bytes: too large to be written by hand")
            return None
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as e:
        before = e.object[: e.start].decode("utf-8", "replace")
        problems.add_at(_mark_after(before), f"not UTF-8 text (byte 0x{e.object[e.start]:02x})")
        return None
    except OSError as e:
        problems.add(None, f"cannot be read: {e.strerror}")
        return None
    if control := _CONTROL.search(text):
        problems.add_at(_mark_after(text[: control.start()]), f"control character {control.group()!r}")
        return None
    try:
        if not _plain(text, problems):
            return None
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as e:
        why = ", ".join(part for part in (e.context, e.problem) if part)
        problems.add_at(e.problem_mark or e.context_mark, f"not YAML: {why}")
        return None
    except yaml.YAMLError as e:  # the reader's own error carries no mark
        problems.add(None, f"not YAML: {str(e).splitlines()[0]}")
        return None
    if not isinstance(node, yaml.MappingNode):
        problems.add(node, "expected a mapping of keys, found " + ("nothing" if node is None else "something else"))
        return None
    return Reader(node, problems)


def _mark_after(before: str) -> yaml.Mark:
    return yaml.Mark("", len(before), before.count("\n"), len(before) - before.rfind("\n") - 1, None, 0)


def _plain(text: str, problems: Problems) -> bool:
    """Report anchors, aliases and tags; false where composing the file would be unsafe."""
    depth = 0
    event: Any
    for event in yaml.parse(text, Loader=_LOADER):
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            problems.add_at(mark, f"alias *{event.anchor}: aliases are not read, write the value out")
        elif getattr(event, "anchor", None):
            problems.add_at(mark, f"anchor &{event.anchor}: anchors are not read, write the value out")
        elif getattr(event, "tag", None):
            problems.add_at(mark, f"tag {event.tag}: tags are not read, remove it")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_DEPTH:
                problems.add_at(mark, f"nested deeper than {_MAX_DEPTH} levels")
                return False
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return True


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """`, did you mean 'devices'?` or nothing."""
    close = difflib.get_close_matches(word, known, n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def display(path: Path) -> str:
    """The path as it is shortest to read: below the working folder without it."""
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):  # the working folder is gone
        return str(path)
    return str(path) if relative.startswith("..") else relative


# ------------------------------------------------------------------------------------- converters


def text(value: str) -> str:
    """Any text."""
    return value


def integer(low: int, high: int) -> Callable[[str], int]:
    """A whole number from low to high."""

    def convert(value: str) -> int:
        digits = value.replace("_", "")
        if not digits.isascii() or not digits.removeprefix("-").isdigit():
            msg = f"expected a whole number, found {value!r}"
            raise ValueError(msg)
        found = int(digits) if len(digits) < 20 else high + 1
        if not low <= found <= high:
            msg = f"{value} is not from {low:,} to {high:,}"
            raise ValueError(msg)
        return found

    return convert


def number(low: float, high: float) -> Callable[[str], float]:
    """A number from low to high."""

    def convert(value: str) -> float:
        try:
            found = float(value)
        except ValueError:
            msg = f"expected a number, found {value!r}"
            raise ValueError(msg) from None
        if not low <= found <= high:  # also refuses nan
            msg = f"{value} is not from {low:g} to {high:g}"
            raise ValueError(msg)
        return found

    return convert


def one_of(*words: str) -> Callable[[str], str]:
    """One word of a list."""

    def convert(value: str) -> str:
        if value not in words:
            msg = f"{value!r} is not one of {', '.join(words)}{did_you_mean(value, words)}"
            raise ValueError(msg)
        return value

    return convert


def boolean(value: str) -> bool:
    """`true`/`on`/`yes` or `false`/`off`/`no`."""
    words = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
    if value.lower() not in words:
        msg = f"expected true or false, found {value!r}"
        raise ValueError(msg)
    return words[value.lower()]


def size(value: str) -> int:
    """Bytes of `24GiB`, `615MiB`; at most 1024 TiB."""
    try:
        n_bytes = units.parse_size(value)
    except OverflowError:
        n_bytes = _MOST_BYTES + 1
    if n_bytes > _MOST_BYTES:
        msg = f"{value} is more memory than any machine has"
        raise ValueError(msg)
    return n_bytes


def or_none(word: str, convert: Callable[[str], T]) -> Callable[[str], T | None]:
    """None for one word (`auto`, `off`), else what `convert` makes of the value."""

    def either(value: str) -> T | None:
        return None if value == word else convert(value)

    return either
