"""The engine's own no-allocation pass over a real command line: exact buffer sizes before anything is loaded.

llama-server with `--fit on` measures first and loads then, so it is stopped between the two: as soon as it said
what was asked for, or the moment it turns to loading (a model may need 140 GB of memory that another server holds).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Literal

from launcher.facts.engine import cause
from launcher.structs import MeasuredCompute
from launcher.units import MIB

_EVENT = "fit_memory_breakdown"
_UNMEASURED = "failed to measure the memory of the extra model"
_FIT_BEGINS = "fitting params to device memory"
_FIT_ENDS = "fitting params to free memory took"
_LOAD_BEGINS = "load_tensors: loading model tensors"
_MODEL_FLAGS = frozenset({"-md", "--model-draft", "--spec-draft-model"})
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """measured is there when status is 'ok'; note says what is missing and why, in the engine's words if it has any."""

    status: Literal["ok", "skipped"]
    note: str
    measured: MeasuredCompute | None


def dry_run(argv: tuple[str, ...], env: Mapping[str, str], *, expect_drafter: bool, timeout_s: float = 60) -> DryRun:
    """Run a command line that has `--fit on --log-jsonl -lv 4` until it has measured, then kill it by pid and reap it.

    The child never outlives this call, whatever ends it (an interrupt and our own death included).
    """
    reader = _Reader(expect_drafter=expect_drafter, drafter_weights=not _MODEL_FLAGS.isdisjoint(argv))
    with tempfile.TemporaryFile() as err:
        try:
            child = _spawn(argv, env, err)
        except OSError as error:
            return DryRun(status="skipped", note=f"{argv[0]}: {error.strerror or error}", measured=None)
        try:
            ended = _read(child, reader, timeout_s)
        finally:
            child.kill()
            child.wait()
            if child.stdout:
                child.stdout.close()
        if ended == "timeout":
            return reader.result(f"the engine measured nothing in {timeout_s:g} s")
        err.seek(0)
        said = cause(err.read().decode("utf-8", "replace"))
    return reader.result(said or f"the engine ended with code {child.returncode}")


def parse_events(lines: Iterable[str], *, expect_drafter: bool = False, drafter_weights: bool = True) -> DryRun:
    """The same from the lines of a `--log-jsonl` log: the first breakdown is the model's, the second the drafter's.

    Row sizes are whole MiB, rounded down by the engine. A drafter without a file of its own (MTP) runs on the
    model's weights, which its event lists again: drafter_weights False leaves them out.
    """
    reader = _Reader(expect_drafter=expect_drafter, drafter_weights=drafter_weights)
    for line in lines:
        if reader.feed(line):
            break
    return reader.result("the log holds no memory breakdown")


class _Reader:
    """Takes lines until it has what was asked for."""

    def __init__(self, *, expect_drafter: bool, drafter_weights: bool) -> None:
        self._wanted = 2 if expect_drafter else 1
        self._drafter_weights = drafter_weights
        self._events: list[list[dict[str, object]]] = []
        self._errors: list[str] = []
        self._fitting = False
        self._stopped_by = ""

    def feed(self, line: str) -> bool:
        """Whether to stop reading: all is known, or the engine is about to load."""
        try:
            event = json.loads(line)
        except ValueError:
            return False
        if not isinstance(event, dict):
            return False
        if event.get("type") == _EVENT:
            rows = (event.get("data") or {}).get("rows")
            self._events.append([row for row in rows or [] if isinstance(row, dict)])
            return len(self._events) >= self._wanted
        message = str(event.get("msg", "")).strip()
        if event.get("level") == "error" and message:
            self._errors.append(message)
        if _FIT_BEGINS in message:
            self._fitting = True
        # At -lv 5 the trial loads of the fit print the load line too: it is the real one only outside of it.
        if _UNMEASURED in message or _FIT_ENDS in message or (_LOAD_BEGINS in message and not self._fitting):
            self._stopped_by = message
            return True
        return False

    def result(self, otherwise: str) -> DryRun:
        if not self._events:
            # The engine's errors end with consequences; the cause is at the front.
            note = "\n".join(self._errors[:3]) or self._stopped_by or otherwise
            return DryRun(status="skipped", note=note, measured=None)
        main = self._events[0]
        draft = self._events[1] if len(self._events) > 1 and self._wanted > 1 else None
        note = ""
        if self._wanted > 1 and draft is None:
            note = self._stopped_by if _UNMEASURED in self._stopped_by else "the engine did not measure the drafter"
        kinds = ("model", "context", "compute") if self._drafter_weights else ("context", "compute")
        measured = MeasuredCompute(
            compute_bytes=_devices(main, "compute"),
            host_compute_bytes=_host(main, "compute"),
            model_bytes={**_devices(main, "model"), "Host": _host(main, "model")},
            context_bytes={**_devices(main, "context"), "Host": _host(main, "context")},
            draft_bytes=None if draft is None else _devices(draft, *kinds),
            draft_host_bytes=None if draft is None else _host(draft, *kinds),
        )
        return DryRun(status="ok", note=note, measured=measured)


def _devices(rows: list[dict[str, object]], *kinds: str) -> dict[str, int]:
    return {str(row["name"]): _bytes(row, kinds) for row in rows if row.get("kind") == "device"}


def _host(rows: list[dict[str, object]], *kinds: str) -> int:
    """Host memory: the `Host` row and every buffer type that no device owns (repacked weights have their own)."""
    return sum(_bytes(row, kinds) for row in rows if row.get("kind") in ("host", "buffer_type"))


def _bytes(row: dict[str, object], kinds: tuple[str, ...]) -> int:
    sizes = (row.get(kind) for kind in kinds)
    return sum(round(size * MIB) for size in sizes if isinstance(size, int | float))


def _spawn(argv: tuple[str, ...], env: Mapping[str, str], err: IO[bytes]) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def die_with_us() -> None:
        # If we are killed nobody would stop the child, and it would go on to load.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    with warnings.catch_warnings():
        # Python warns of a fork beside threads (a progress bar has one); die_with_us takes no lock.
        warnings.simplefilter("ignore", DeprecationWarning)
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err, env=dict(env),
            start_new_session=True, preexec_fn=die_with_us,
        )  # fmt: skip


def _read(child: subprocess.Popen[bytes], reader: _Reader, timeout_s: float) -> Literal["done", "end", "timeout"]:
    """Feed whole lines until the reader has enough, the output ends or the time is over."""
    deadline = time.monotonic() + timeout_s
    rest = b""
    for chunk in _chunks(child, deadline):
        if chunk is None:
            return "timeout"
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if reader.feed(line.decode("utf-8", "replace")):
                return "done"
    # Wait for the exit code of one that ended by itself, to be able to tell it; it may have closed stdout only.
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=max(0.1, min(2.0, deadline - time.monotonic())))
    return "end"


def _chunks(child: subprocess.Popen[bytes], deadline: float) -> Iterator[bytes | None]:
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
                yield None
                return
            chunk = os.read(child.stdout.fileno(), 1 << 16)
            if not chunk:
                return
            yield chunk
