"""`attach`: the loading view again, from another terminal. It only looks: whatever ends it, the server goes on."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

from launcher.errors import ModelUnreadable
from launcher.facts import gguf_header
from launcher.serve import alive, argv, native, server, wait
from launcher.structs import Activity, RunRecord
from launcher.workflows import status

_POLL_S = 0.1


class View(Protocol):
    """Where `attach` draws."""

    def loading(self, stage: str, done: int, total: int | None, seconds: float) -> None:
        """How far the load is; called a few times a second."""

    def left(self, record: RunRecord) -> None:
        """The view was ended, the server was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """A server that is ready. n_ctx is of one stream; None is what it does not say."""

    record: RunRecord
    n_ctx: int | None
    n_parallel: int | None
    activity: Activity


def run(name: str | None, view: View) -> Attached:
    """Watch until it is ready; at once when it is. A load whose `switch` was lost is marked ready here.

    Raises UsageError (several-run, not-running), EngineFailed (see serve/wait), KeyboardInterrupt.
    """
    record = status.running_one(name)
    try:
        while not native.alive(record.server):  # its keeper starts it, or it is no longer among those that run
            time.sleep(_POLL_S)
            record = status.running_one(name)
        if record.state == "starting":
            record = wait.wait_ready(record, total_bytes=_model_bytes(record), on_progress=view.loading)
    except KeyboardInterrupt:
        view.left(record)
        raise
    n_ctx, n_parallel = _size(record)
    return Attached(record=record, n_ctx=n_ctx, n_parallel=n_parallel, activity=alive.activity(record))


def _model_bytes(record: RunRecord) -> int | None:
    """What there is to load: the files of the command line's model."""
    path = argv.parse_back(record.argv).get("model")
    if not isinstance(path, str):
        return None
    try:
        return sum(shard.stat().st_size for shard in gguf_header.find_shards(Path(path)))
    except (ModelUnreadable, OSError):
        return None


def _size(record: RunRecord) -> tuple[int | None, int | None]:
    with contextlib.suppress(httpx.HTTPError, KeyError, TypeError, ValueError), server.client_of(record) as client:
        props = client.props()
        return int(props["default_generation_settings"]["n_ctx"]), int(props["total_slots"])
    return None, None
