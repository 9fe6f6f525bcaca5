"""What dry runs gave, kept by all that decides it: engine, headers, command line, devices. Never free memory.

cache_dir()/dry-runs/KEY.json. Only a complete answer is kept: what was skipped may work the next time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.facts import paths
from launcher.facts.dry_run import UNMEASURED, DryRun
from launcher.structs import Device, MeasuredCompute

_SCHEMA = 1
# Prompt cache and checkpoints are taken after boot, and on `auto` they follow the memory that is free just now.
_NOT_MEMORY = frozenset({
    "--host", "--port", "--alias", "-a", "--cache-ram", "-cram", "--ctx-checkpoints", "-ctxcp", "--swa-checkpoints",
})  # fmt: skip


def key(engine_digest: str, argv: tuple[str, ...], digests: Mapping[str, str], devices: Iterable[Device]) -> str:
    """The name of one dry run.

    argv     its first word is the engine; address, alias and what is taken after boot decide nothing: left out
    digests  path of a model file in argv -> digest of its header: the path itself does not count
    devices  those of the plan, in order; another file named in argv counts by its size and time
    """
    words = [engine_digest]
    before = ""
    for word in argv[1:]:
        if before not in _NOT_MEMORY and word not in _NOT_MEMORY:
            words.append(digests.get(word) or word + _stamp(word))
        before = word
    rows = [[d.name, d.description, d.total_bytes] for d in devices]
    return hashlib.sha256(json.dumps([_SCHEMA, words, rows]).encode()).hexdigest()


def load(name: str) -> DryRun | None:
    """The answer kept under that key; None when there is none or it cannot be read."""
    try:
        found = json.loads(_path(name).read_text(encoding="utf-8"))
        return DryRun(status="ok", note=str(found["note"]), measured=_measured(found["measured"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def store(name: str, run: DryRun) -> None:
    """Keep a complete answer. One without the drafter is complete where the engine said that it cannot measure it."""
    if run.status != "ok" or run.measured is None or (run.note and UNMEASURED not in run.note):
        return
    path = _path(name)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # a cache that cannot be written is no reason to fail
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"note": run.note, "measured": asdict(run.measured)}), encoding="utf-8")
        temporary.replace(path)


def _path(name: str) -> Path:
    return paths.cache_dir() / "dry-runs" / f"{name}.json"


def _stamp(word: str) -> str:
    """` size time` of a file that a word names: a projector or an adapter may be replaced under its name."""
    if "/" not in word:
        return ""
    try:
        stat = os.stat(word)  # noqa: PTH116 - any text may stand here
    except (OSError, ValueError):
        return ""
    return f" {stat.st_size} {stat.st_mtime_ns}"


def _measured(found: Mapping[str, Any]) -> MeasuredCompute:
    return MeasuredCompute(
        compute_bytes=_sizes(found["compute_bytes"]),
        host_compute_bytes=int(found["host_compute_bytes"]),
        model_bytes=_sizes(found["model_bytes"]),
        context_bytes=_sizes(found["context_bytes"]),
        draft_bytes=None if found["draft_bytes"] is None else _sizes(found["draft_bytes"]),
        draft_host_bytes=None if found["draft_host_bytes"] is None else int(found["draft_host_bytes"]),
    )


def _sizes(found: Any) -> dict[str, int]:
    return {str(k): int(v) for k, v in dict(found).items()}
