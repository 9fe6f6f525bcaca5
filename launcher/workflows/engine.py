"""`engine list|use|install|probe`: which llama-server is used, and what it can do."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from launcher.engines import install as builder
from launcher.engines import registry
from launcher.errors import LauncherError
from launcher.facts import engine as engine_facts
from launcher.facts.fetch import Progress
from launcher.structs import Engine


def candidates() -> tuple[Mapping[str, Any], ...]:
    """Every llama-server of this machine in the order of choice: path, found_by, version, digest, problem, chosen.

    The first one without a problem is the one that commands use.
    """
    named = ((os.environ.get("LLAMA_SERVER"), "LLAMA_SERVER"), (registry.chosen(), "engine use"))
    places = [(str(path), by) for path, by in named if path]
    places += [(str(path), by) for path, by in engine_facts.candidates() if path.is_file()]
    rows: list[Mapping[str, Any]] = []
    taken = False
    for path, found_by in places:
        row: dict[str, Any] = {"path": path, "found_by": found_by, "version": None, "digest": None, "problem": None}
        try:
            found = engine_facts.probe(path, found_by)
        except LauncherError as error:
            rows.append(row | {"problem": error.message, "chosen": False})
            continue
        rows.append(row | {"path": found.path, "version": found.version, "digest": found.digest, "chosen": not taken})
        taken = True
    return tuple(rows)


def use(path: str) -> Engine:
    """Choose an engine, `-` goes back; it must start here.

    Raises DeviceUnusable (engine-missing, engine-broken, engine-not-llama-server), UsageError (engine-no-previous).
    """
    if path != "-":
        engine_facts.probe(path, "engine use")
    return engine_facts.probe(str(registry.use(path)), "engine use")


def install(report: Progress, say: Callable[[str], None], backend: str = "auto") -> Engine:
    """Build the pinned engine, or find it built. Raises DownloadFailed, DeviceUnusable, EngineFailed, Locked."""
    return engine_facts.probe(str(builder.install(report, backend=backend, say=say)), "engine install")


def probe(path: str | None) -> Engine:
    """What one engine can do, by default the one that commands use. Raises DeviceUnusable."""
    return engine_facts.probe(path, "asked") if path else engine_facts.find_engine()
