"""Folders: where our own files live, and where models are looked for. Reads the environment, touches no disk.

LAUNCHER_HOME   when set: {LAUNCHER_HOME}/{config,state,cache} instead of the XDG folders
MODEL_DIR       one or more model folders, separated as PATH is
"""

from __future__ import annotations

import os
from pathlib import Path

_APP = "llama-launcher"


def config_dir() -> Path:
    """User slugs, the chosen engine; `~/.config/llama-launcher`."""
    return _folder("config")


def state_dir() -> Path:
    """Run records, locks, logs, history; `~/.local/state/llama-launcher`."""
    return _folder("state")


def cache_dir() -> Path:
    """What can be made again: engine abilities, headers, built engines; `~/.cache/llama-launcher`."""
    return _folder("cache")


def model_dirs() -> tuple[Path, ...]:
    """Folders of MODEL_DIR in order, each once, `~` expanded, absolute; `~/models` when it names none."""
    named = [p for p in os.environ.get("MODEL_DIR", "").split(os.pathsep) if p.strip()]
    return tuple(dict.fromkeys(_absolute(p) for p in named)) or (_absolute("~/models"),)


def _folder(kind: str) -> Path:
    home = os.environ.get("LAUNCHER_HOME", "")
    if home.strip():
        return _absolute(home) / kind
    from platformdirs import PlatformDirs

    dirs = PlatformDirs(_APP, appauthor=False)
    return Path({"config": dirs.user_config_dir, "state": dirs.user_state_dir, "cache": dirs.user_cache_dir}[kind])


def _absolute(text: str) -> Path:
    # expanduser gives up (RuntimeError) where HOME is unset and the uid has no entry: keep the text then.
    try:
        path = Path(text.strip()).expanduser()
    except RuntimeError:
        path = Path(text.strip())
    return Path(os.path.abspath(path))  # noqa: PTH100 - not resolve(): a link to a model folder keeps its name
