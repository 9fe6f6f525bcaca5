"""The engine that a person chose: `engine use PATH`, `engine use -` goes back.

`config/engine` holds one path and nothing else (facts/engine.py reads it too); `config/engine.previous` the one before.
"""

from __future__ import annotations

import os
from pathlib import Path

from launcher.errors import DeviceUnusable, UsageError
from launcher.facts import engine as engine_facts
from launcher.facts import paths


def chosen() -> Path | None:
    """The chosen llama-server, None when none was chosen. Its file may be gone by now."""
    found = engine_facts.chosen()
    return Path(found) if found else None


def use(path: str) -> Path:
    """Remember a llama-server (or the folder that holds one); `-` swaps back to the one before. Returns it.

    Raises DeviceUnusable (engine-not-executable), UsageError (engine-no-previous).
    """
    before = chosen()
    if path == "-":
        previous = _read(_previous())
        if previous is None:
            what = "no engine was chosen before this one"
            raise UsageError("engine-no-previous", what, fix="launcher engine use /path/to/llama-server")
        engine = previous
    else:
        engine = Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100 - a link to a build stays a link
        if engine.is_dir():
            engine = next((p for p in (engine / "llama-server", engine / "bin" / "llama-server") if p.exists()), engine)
    if not engine.is_file() or not os.access(engine, os.X_OK):
        what = f"{engine} is " + ("not executable" if engine.is_file() else "no llama-server")
        raise DeviceUnusable("engine-not-executable", what, fix="launcher engine install")
    if before is not None and before != engine:
        _write(_previous(), before)
    _write(_file(), engine)
    return engine


def forget() -> None:
    """Back to the search order without a chosen engine; `use("-")` still finds the one that was chosen."""
    if (before := chosen()) is not None:
        _write(_previous(), before)
        _file().unlink()


def _file() -> Path:
    return paths.config_dir() / "engine"


def _previous() -> Path:
    return paths.config_dir() / "engine.previous"


def _read(path: Path) -> Path | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return Path(text) if text else None


def _write(path: Path, engine: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(f"{engine}\n", encoding="utf-8")
    partial.replace(path)
