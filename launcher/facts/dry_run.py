"""The engine's own no-allocation pass over a real command line: exact buffer sizes before anything is loaded.

llama-server with `--fit on` measures first and loads then, so it is stopped between the two: as soon as it said
what was asked for, or the moment it turns to loading (a model may need 140 GB of memory that another server holds).
An engine without `--log-jsonl` prints the same numbers as a table of text; one that cannot measure at all may have
llama-fit-params beside it, whose compute buffers are upper bounds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import selectors
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Literal

from launcher.facts.engine import call, cause
from launcher.structs import MeasuredCompute
from launcher.units import MIB

_EVENT = "fit_memory_breakdown"
UNMEASURED = "failed to measure the memory of the extra model"
_FIT_BEGINS = "fitting params to device memory"
_FIT_ENDS = "fitting params to free memory took"
_LOAD_BEGINS = "load_tensors: loading model tensors"
_MODEL_FLAGS = frozenset({"-md", "--model-draft", "--spec-draft-model"})
_TABLE = "| memory breakdown [MiB]"
_TABLE_ROW = re.compile(r"memory_breakdown_print: \|\s+- (\S+).*\|([^|]*)\|\s*$")
_TABLE_SIZES = re.compile(r"= *(\d+) \+ +(\d+) \+ +(\d+)")
_TEXT_PREFIX = re.compile(r"^\d+\.\d\d\.\d{3}\.\d{3} ([A-Z]) ")
_SAID_MAX_LINES = 500
# What llama-fit-params understands and what decides a compute buffer; it refuses flags that only a server has.
_FIT_PARAMS_FLAGS = frozenset({
    "--rpc", "-m", "--model", "-c", "--ctx-size", "-ngl", "--n-gpu-layers", "--gpu-layers", "-dev", "--device",
    "-sm", "--split-mode", "-ts", "--tensor-split", "-t", "--threads", "-b", "--batch-size", "-ub", "--ubatch-size",
    "-fa", "--flash-attn", "-ctk", "--cache-type-k", "-ctv", "--cache-type-v", "-ot", "--override-tensor",
})  # fmt: skip
_FIT_PRINT_ROW = re.compile(r"^(\S+) (\d+) (\d+) (\d+) *$", re.M)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """measured is there when status is 'ok'; note says what is missing and why, in the engine's words if it has any."""

    status: Literal["ok", "skipped"]
    note: str
    measured: MeasuredCompute | None


def dry_run(argv: tuple[str, ...], env: Mapping[str, str], *, expect_drafter: bool, timeout_s: float = 60) -> DryRun:
    """Run a command line that has `--fit on --log-jsonl -lv 4` until it has measured, then kill it by pid and reap it.

    Without `--log-jsonl` in it the table of text on stderr is read instead. The child never outlives this call,
    whatever ends it (an interrupt and our own death included).
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
        said = cause(err.read().decode("utf-8", "replace") or "\n".join(reader.said))
    return reader.result(said or f"the engine ended with code {child.returncode}")


def parse_events(lines: Iterable[str], *, expect_drafter: bool = False, drafter_weights: bool = True) -> DryRun:
    """The same from the lines of a log, JSON or text: the first breakdown is the model's, the second the drafter's.

    Row sizes are whole MiB, rounded down by the engine. A drafter without a file of its own (MTP) runs on the
    model's weights, which its event lists again: drafter_weights False leaves them out.
    """
    reader = _Reader(expect_drafter=expect_drafter, drafter_weights=drafter_weights)
    for line in lines:
        if reader.feed(line):
            break
    return reader.result("the log holds no memory breakdown")


def fit_print(program: str, argv: tuple[str, ...], env: Mapping[str, str], *, timeout_s: float = 60) -> DryRun:
    """Upper bounds of the compute buffers of a server's command line from `llama-fit-params --fit-print on`.

    It counts the outputs of a whole batch (too much on the device that owns the output), one stream and no drafter:
    weights and cache are left out, and a caller with more streams must not ask.
    """
    words = [word for flag in zip(argv, argv[1:], strict=False) if flag[0] in _FIT_PARAMS_FLAGS for word in flag]
    called = call((program, *words, "--fit-print", "on"), env, timeout_s)
    rows = {name: int(compute) * MIB for name, _, _, compute in _FIT_PRINT_ROW.findall(called.out)}
    if called.code != 0 or "Host" not in rows:
        note = called.note or called.cause() or f"llama-fit-params ended with code {called.code}"
        return DryRun(status="skipped", note=note, measured=None)
    host = rows.pop("Host")
    measured = MeasuredCompute(compute_bytes=rows, host_compute_bytes=host, model_bytes={}, context_bytes={})
    return DryRun(status="ok", note="an upper bound", measured=measured)


class _Reader:
    """Takes lines until it has what was asked for."""

    def __init__(self, *, expect_drafter: bool, drafter_weights: bool) -> None:
        self._wanted = 2 if expect_drafter else 1
        self._drafter_weights = drafter_weights
        self._events: list[list[dict[str, object]]] = []
        self._errors: list[str] = []
        self._fitting = False
        self._stopped_by = ""
        self._table: list[dict[str, object]] | None = None
        self.said: list[str] = []

    def feed(self, line: str) -> bool:
        """Whether to stop reading: all is known, or the engine is about to load."""
        try:
            event = json.loads(line)
        except ValueError:
            return self._feed_text(line)
        if not isinstance(event, dict):
            return False
        if event.get("type") == _EVENT:
            rows = (event.get("data") or {}).get("rows")
            self._events.append([row for row in rows or [] if isinstance(row, dict)])
            return len(self._events) >= self._wanted
        message = str(event.get("msg", "")).strip()
        if event.get("level") == "error" and message:
            self._errors.append(message)
        return self._stops(message)

    def _feed_text(self, line: str) -> bool:
        if len(self.said) < _SAID_MAX_LINES:
            self.said.append(line)
        if row := _TABLE_ROW.search(line):
            if self._table is not None:
                self._table.append(_table_row(row[1], row[2]))
            return False
        # Rows of other buffer types may follow the host's: only another line ends a table.
        if self._end_table():
            return True
        if _TABLE in line:
            self._table = []
            return False
        level = _TEXT_PREFIX.match(line)
        if level and level[1] == "E":
            self._errors.append(" ".join(line[level.end() :].split()))
        return self._stops(line.strip())

    def _end_table(self) -> bool:
        """Take a table that is complete; whether that is all that was asked for."""
        if self._table and any(row["kind"] == "host" for row in self._table):
            self._events.append(self._table)
        self._table = None
        return len(self._events) >= self._wanted

    def _stops(self, message: str) -> bool:
        if _FIT_BEGINS in message:
            self._fitting = True
        # At -lv 5 the trial loads of the fit print the load line too: it is the real one only outside of it.
        if UNMEASURED in message or _FIT_ENDS in message or (_LOAD_BEGINS in message and not self._fitting):
            self._stopped_by = message
            return True
        return False

    def result(self, otherwise: str) -> DryRun:
        self._end_table()
        if not self._events:
            # The engine's errors end with consequences; the cause is at the front.
            note = "\n".join(self._errors[:3]) or self._stopped_by or otherwise
            return DryRun(status="skipped", note=note, measured=None)
        main = self._events[0]
        draft = self._events[1] if len(self._events) > 1 and self._wanted > 1 else None
        note = ""
        if self._wanted > 1 and draft is None:
            note = self._stopped_by if UNMEASURED in self._stopped_by else "the engine did not measure the drafter"
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


def _table_row(name: str, sizes: str) -> dict[str, object]:
    """`17 = 1 + 8 + 8` of one row of a table, as the event has it: only devices say what they have in all."""
    found = _TABLE_SIZES.search(sizes)
    model, context, compute = (int(n) for n in found.groups()) if found else (0, 0, 0)
    kind = "host" if name == "Host" else "device" if sizes.count("=") == 2 else "buffer_type"
    return {"kind": kind, "name": name, "model": model, "context": context, "compute": compute}


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
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=dict(env),
            stderr=err if "--log-jsonl" in argv else subprocess.STDOUT,  # text logs are written to stderr
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
