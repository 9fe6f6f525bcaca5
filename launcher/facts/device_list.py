"""What `--list-devices` said, kept while nothing changed that decides it: to list a card the engine opens a context.

cache_dir()/device-lists/KEY.json. Kept only where every device is a card that the driver knows too: then the engine's
list is names and order alone, and what is free comes from the driver each time. Measured on two H200: 0.4 to 0.9 s.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.facts import nvml, paths
from launcher.facts.nvml import NvmlCard

_SCHEMA = 1
_ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "GGML_CUDA_DEVICES", "LD_LIBRARY_PATH")


def key(engine_digest: str, cards: Sequence[NvmlCard], env: Mapping[str, str]) -> str | None:
    """The name of one list; None where the driver does not tell the cards apart, so that nothing may be kept."""
    rows = [[c.uuid, c.pci, c.name, c.total_bytes] for c in cards]
    if not cards or any(None in row for row in rows) or any(c.free_bytes is None or c.mig for c in cards):
        return None
    version = nvml.driver_version()
    words = [_SCHEMA, engine_digest, version, rows, {name: env.get(name) for name in _ENVIRONMENT}]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest() if version else None


def load(name: str) -> str | None:
    """The text kept under that key, None when there is none or it cannot be read."""
    try:
        return str(json.loads(_path(name).read_text(encoding="utf-8"))["said"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def store(name: str, said: str) -> None:
    """Keep a text. A cache that cannot be written is no reason to fail."""
    path = _path(name)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"said": said}), encoding="utf-8")
        temporary.replace(path)


def _path(name: str) -> Path:
    return paths.cache_dir() / "device-lists" / f"{name}.json"
