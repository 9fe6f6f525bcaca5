"""A systemd unit around `launcher run`: its text, and the text read back. Pure but for where unit files lie.

Keys after systemd.unit(5), systemd.service(5), systemd.exec(5) and systemd.syntax(7) of systemd 252.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PREFIX = "llama-launcher-"
_MARK = "# written by `launcher service install` for "
# Three starts in two hours: a load takes ten minutes, and a fourth of the same would not end otherwise.
BURST, INTERVAL = 3, "2h"
# Exit codes of refusals, docs/errors.md: usage, slug, model, devices and engine, plan, gates. Another start is refused
# as well; waiting for cards that are late is ExecStartPre's, whose failure is none of these. And a server that was
# killed for want of memory loads for ten minutes to be killed again.
_NO_RESTART = "2 3 4 5 6 7 SIGKILL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What a unit says. wait and run are command lines; wait is empty for a plan without cards."""

    target: str
    description: str
    run: tuple[str, ...]
    wait: tuple[str, ...] = ()
    env: Mapping[str, str]
    system: bool = False
    user: str = ""  # of a system-wide unit


def unit_name(target: str) -> str:
    """File name of the unit: systemd takes letters, digits and `:-_.\\`, and `@` means a template."""
    words = re.sub(r"[^A-Za-z0-9_.]+", "-", target.strip("/").removesuffix(".gguf")).strip("-.")
    return f"{PREFIX}{words[-180:] or 'server'}.service"


def user_folder() -> Path:
    """Where a user's own units lie, systemd.unit(5): `$XDG_CONFIG_HOME/systemd/user`, else below ~/.config."""
    config = os.environ.get("XDG_CONFIG_HOME", "").strip()
    return (Path(config) if config else Path.home() / ".config") / "systemd" / "user"


def text(unit: Unit) -> str:
    """The unit file. Raises ValueError when a word holds a line break, which a unit cannot hold."""
    head = [
        f"{_MARK}{unit.target}",
        f"# changes: systemctl {'' if unit.system else '--user '}edit {unit_name(unit.target)}",
        "",
        "[Unit]",
        f"Description={_plain(unit.description)}",
        "# starts by hand count too; once it is refused: "
        f"{'sudo systemctl' if unit.system else 'systemctl --user'} reset-failed {unit_name(unit.target)}",
        f"StartLimitIntervalSec={INTERVAL}",
        f"StartLimitBurst={BURST}",
    ]
    if unit.system:
        head += ["Wants=network-online.target", "After=network-online.target nvidia-persistenced.service"]
    service = ["", "[Service]", "Type=exec"]
    if unit.user:
        service.append(f"User={_plain(unit.user)}")
    service += [f"Environment={quote(f'{key}={value}', command=False)}" for key, value in unit.env.items()]
    if unit.wait:
        service += [
            "# the planned cards, by UUID: after a boot the driver may come late",
            f"ExecStartPre={line(unit.wait)}",
        ]
    service += [
        f"ExecStart={line(unit.run)}",
        "# waiting for cards and loading take as long as they take",
        "TimeoutStartSec=infinity",
        "TimeoutStopSec=60",
        "KillMode=mixed",
        "Restart=on-failure",
        "RestartSec=30",
        f"RestartPreventExitStatus={_NO_RESTART}",
        "LimitMEMLOCK=infinity",
    ]
    install = ["", "[Install]", f"WantedBy={'multi-user.target' if unit.system else 'default.target'}"]
    return "\n".join([*head, *service, *install]) + "\n"


def target_of(unit_text: str) -> str | None:
    """The target of a unit of ours, None of any other file."""
    first = unit_text.partition("\n")[0]
    return first.removeprefix(_MARK).strip() if first.startswith(_MARK) else None


def line(words: Sequence[str]) -> str:
    """A command line as ExecStart= takes it."""
    return " ".join(quote(word) for word in words)


def quote(word: str, *, command: bool = True) -> str:
    """One word: `%` is a specifier, `$` a variable in command lines alone, quotes and backslashes are C's.

    Raises ValueError for a line break or another control character.
    """
    _plain(word)
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    word = word.replace("$", "$$") if command else word
    return word if re.fullmatch(r"[\w@%+=:,./$-]+", word) else f'"{word}"'


def _plain(word: str) -> str:
    if any(ord(c) < 32 or ord(c) == 127 for c in word):
        msg = f"a unit cannot hold the control character in {word!r}"
        raise ValueError(msg)
    return word


def read(unit_text: str) -> dict[str, dict[str, list[str]]]:
    """A unit's sections: key -> values in order, since a key may stand several times (systemd.syntax(7))."""
    found: dict[str, dict[str, list[str]]] = {}
    section = ""
    for row in unit_text.splitlines():
        row = row.strip()
        if not row or row[0] in "#;":
            continue
        if row[0] == "[" and row[-1] == "]":
            section = row[1:-1]
            continue
        key, _, value = row.partition("=")
        found.setdefault(section, {}).setdefault(key.strip(), []).append(value.strip())
    return found


def words_of(value: str, *, command: bool = True) -> tuple[str, ...]:
    """The words of a line that `line` wrote: what systemd hands to exec."""
    words: list[str] = []
    for match in re.finditer(r'"((?:[^"\\]|\\.)*)"|(\S+)', value):
        word = match[1] if match[1] is not None else match[2]
        word = re.sub(r"\\(.)", r"\1", word).replace("%%", "%")
        words.append(word.replace("$$", "$") if command else word)
    return tuple(words)
