"""Wait for a started server by its progress, not by a clock, and read why it failed.

It answers when all of this holds: /health 200, our process owns the port, /v1/models says our alias, one real answer.
Ready is the caller's word: `switch` says it after a deep prompt (`prove`), `wait_ready` at once.
There is no time-out while it makes progress (memory, bytes read, processor time, log): big models take ten minutes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from launcher.errors import EngineFailed
from launcher.serve import native, ports, server, state
from launcher.serve.causes import Cause, known_cause
from launcher.structs import Plan, RunEnd, RunRecord
from launcher.units import MIB

# (stage, bytes loaded, bytes in all or None, seconds since the start)
Progress = Callable[[str, int, int | None, float], None]
_ANSWER_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Signs:
    """Counters of a process that only move while it does something."""

    rss_bytes: int
    read_bytes: int
    cpu_s: float
    log_bytes: int
    device_bytes: int

    def moved_since(self, before: Signs) -> bool:
        """Progress beyond what our own questions cause: each of them costs a few KiB and well under 1 ms."""
        return (
            abs(self.rss_bytes - before.rss_bytes) >= MIB
            or self.read_bytes - before.read_bytes >= MIB
            or self.cpu_s - before.cpu_s >= 1.0
            or self.log_bytes != before.log_bytes
            or abs(self.device_bytes - before.device_bytes) >= MIB
        )


def wait_ready(
    record: RunRecord,
    *,
    plan: Plan | None = None,
    total_bytes: int | None = None,
    on_progress: Progress | None = None,
    stall_s: float = 120.0,
    tick_s: float = 0.25,
) -> RunRecord:
    """`wait_answer`, and the record marked ready."""
    wait_answer(
        record, plan=plan, total_bytes=total_bytes, on_progress=on_progress, stall_s=stall_s, tick_s=tick_s
    )  # fmt: skip
    return mark_ready(record)


def mark_ready(record: RunRecord) -> RunRecord:
    """The record as it is stored, with the word that it may be used."""
    return state.update(record, state="ready", ready_at=time.time())


def wait_answer(
    record: RunRecord,
    *,
    plan: Plan | None = None,
    total_bytes: int | None = None,
    on_progress: Progress | None = None,
    stall_s: float = 120.0,
    tick_s: float = 0.25,
) -> None:
    """Wait until the server of this record answers; its record still says that it is starting.

    total_bytes  what there is to load, for the progress; default: the plan's model file
    stall_s      give up after this long without any sign of progress

    Raises EngineFailed: engine-exited, engine-stalled, port-shared, wrong-alias, engine-no-answer. The server, if
    it still runs, is left to the caller, who stops it; so does a KeyboardInterrupt pass through unchanged.
    """
    watch = _Watch(record, plan, total_bytes, on_progress, stall_s, tick_s)
    with server.client_of(record) as client:
        for _ in watch.ticks("starting"):
            status = client.health()
            if status == 200:
                break
            if status:
                watch.stage = "loading"
        watch.stage = "checking"
        watch.unless_gone(_check_port, record)
        watch.unless_gone(_check_alias, record, client)
        watch.answer()
        watch.unless_gone(_check_port, record)  # whoever came meanwhile may be the one that answered


def prove(
    record: RunRecord,
    prompt: Sequence[int],
    *,
    plan: Plan | None = None,
    on_progress: Progress | None = None,
    stall_s: float = 120.0,
    tick_s: float = 0.25,
) -> None:
    """One deep prompt of token ids, read from the first to the last: a server that boots can still die in it.

    Watched like the load, so it may take as long as it moves. Memory that grows with depth (the pool of a CUDA process)
    is asked for here and not at boot.

    Raises EngineFailed: engine-exited, engine-stalled, engine-no-answer. The server is left to the caller.
    """
    n = len(prompt)
    watch = _Watch(record, plan, None, on_progress, stall_s, tick_s)
    reply = watch.reply(
        f"proving {n:,} tokens",
        f"its first prompt of {n:,} tokens failed",
        lambda client: client.complete(
            prompt, n_predict=_ANSWER_TOKENS, cache_prompt=False, ignore_eos=True, temperature=0.0
        ),
    )
    read = reply.get("tokens_evaluated")
    if not isinstance(read, int) or read < n:
        raise watch.no_answer(f"of its first prompt of {n:,} tokens it says to have read {read}")


class _Watch:
    """Looks at the process on every tick: has it ended, does it move."""

    def __init__(
        self,
        record: RunRecord,
        plan: Plan | None,
        total_bytes: int | None,
        on_progress: Progress | None,
        stall_s: float,
        tick_s: float,
    ) -> None:
        self.record, self.plan, self.on_progress = record, plan, on_progress
        self.total_bytes = total_bytes if total_bytes is not None or plan is None else plan.model.file_bytes
        self.stall_s, self.tick_s = stall_s, tick_s
        self.stage = ""
        self.started = time.monotonic()
        self.on_cards = any(word.startswith("CUDA") for word in record.argv)

    def ticks(self, stage: str) -> Iterator[None]:
        """One turn a tick for as long as the server lives and moves; raises EngineFailed when it does not."""
        self.stage = stage
        last, moved_at = self._signs(), time.monotonic()
        while True:
            if not native.up(self.record):
                raise exited(self.record, self.stage, self.plan)
            now = self._signs()
            if now.moved_since(last):
                last, moved_at = now, time.monotonic()
            elif time.monotonic() - moved_at > self.stall_s:
                raise self._stalled()
            if self.on_progress:
                self.on_progress(self.stage, self._loaded(now), self.total_bytes, time.monotonic() - self.started)
            yield
            time.sleep(self.tick_s)

    def unless_gone(self, check: Callable[..., None], *what: object) -> None:
        """A check whose failure means nothing when the server has ended meanwhile: that is what is told then."""
        try:
            check(*what)
        except EngineFailed:
            for _ in range(20):
                if not native.up(self.record):
                    raise exited(self.record, self.stage, self.plan) from None
                time.sleep(0.05)
            raise

    def answer(self) -> None:
        """One short completion."""
        messages = [{"role": "user", "content": "Say hi."}]
        reply = self.reply(
            "answering",
            "the first question failed",
            lambda client: client.chat(messages, max_tokens=_ANSWER_TOKENS, temperature=0.0, cache_prompt=False),
        )
        if not server.said_something(reply):
            raise self.no_answer("the first question got an empty answer")

    def reply(
        self, stage: str, failed: str, question: Callable[[server.Client], dict[str, object]]
    ) -> dict[str, object]:
        """What one question gets, watched like the load: the first one may have to fault in a whole model."""
        box: list[dict[str, object] | httpx.HTTPError | ValueError | TypeError] = []

        def ask() -> None:
            with server.client_of(self.record, timeout_s=None) as client:
                try:
                    box.append(question(client))
                except (httpx.HTTPError, ValueError, TypeError) as error:
                    box.append(error)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        for _ in self.ticks(stage):
            asking.join(self.tick_s)
            if not asking.is_alive():
                break
        reply = box[0] if box else httpx.HTTPError("no reply")
        if isinstance(reply, Exception):
            for _ in range(20):  # a process that dies in a request lets go of it before it is gone
                if not native.up(self.record):
                    raise exited(self.record, self.stage, self.plan)
                time.sleep(0.05)
            body = reply.response.text[:300] if isinstance(reply, httpx.HTTPStatusError) else str(reply)
            raise self.no_answer(f"{failed}: {body}")
        return reply

    def _signs(self) -> Signs:
        found = state.proc(self.record.server)
        rss = read = 0
        cpu = 0.0
        if found is not None:
            with contextlib.suppress(psutil.Error):
                with found.oneshot():
                    rss, times = found.memory_info().rss, found.cpu_times()
                    cpu = times.user + times.system
                counters = found.io_counters()
                read = max(counters.read_chars, counters.read_bytes)
        log = Path(self.record.log_path)
        size = log.stat().st_size if log.exists() else 0
        return Signs(rss, read, cpu, size, _device_bytes(found.pid) if found and self.on_cards else 0)

    def _loaded(self, signs: Signs) -> int:
        """Bytes of the model that went past: read() counts them, a mapped file shows up as resident memory."""
        loaded = max(signs.read_bytes, signs.rss_bytes)
        return loaded if self.total_bytes is None else min(loaded, self.total_bytes)

    def _stalled(self) -> EngineFailed:
        return EngineFailed(
            "engine-stalled",
            f"{self.record.slug} made no progress for {self.stall_s:.0f} s while {self.stage}",
            context=f"last lines of {self.record.log_path}:\n{native.tail(self.record.log_path)}",
            fix=f"launcher logs, then launcher stop {self.record.slug}",
        )

    def no_answer(self, what: str) -> EngineFailed:
        """The error for a server that is up and does not do its work."""
        cause = known_cause(native.tail(self.record.log_path, 200), None, None, self.plan)
        return EngineFailed(
            "engine-no-answer",
            f"{self.record.slug} is up, but {what}" + (f"; {cause.text}" if cause else ""),
            context=f"last lines of {self.record.log_path}:\n{native.tail(self.record.log_path)}",
            fix=cause.fix if cause else f"launcher logs, then launcher stop {self.record.slug}",
        )


def exited(record: RunRecord, stage: str, plan: Plan | None = None) -> EngineFailed:
    """The error for a server that ended: how, in which stage, its last 30 log lines and the cause when known."""
    end, cause = _end(record), cause_of(record, plan)
    how = "nobody saw how" if end is None else end.signal or f"exit code {end.exit_code}"
    if end is not None and end.reason == "stopped":
        how = f"stopped by somebody, {how}; the log says by whom"
    return EngineFailed(
        "engine-exited",
        f"llama-server ended while {stage} ({how})" + (f": {cause.text}" if cause else ""),
        context=f"last lines of {record.log_path}:\n{native.tail(record.log_path)}",
        fix=cause.fix if cause else f"launcher logs -n 200, then launcher plan {record.slug}",
    )


def cause_of(record: RunRecord, plan: Plan | None = None) -> Cause | None:
    """What its log and its end say of why it failed, also while it still runs; None when they say nothing known."""
    end = None if native.up(record) else _end(record)
    if end is not None and end.reason == "stopped":
        return None
    code, name = (end.exit_code, end.signal) if end else (None, None)
    return known_cause(native.tail(record.log_path, 200), code, name, plan)


def _end(record: RunRecord) -> RunEnd | None:
    for _ in range(40):  # its keeper writes the end a moment after it
        end = state.end_of(record)
        if end is not None or not native.alive(record.keeper):
            break
        time.sleep(0.05)
    return end or state.end_of(record)


def _check_port(record: RunRecord) -> None:
    """Only our process may listen there: engines share a port without a word, and half the requests go astray."""
    found = state.proc(record.server)
    ours: set[int | None] = set()
    if found is not None:
        with contextlib.suppress(psutil.Error):
            ours = {found.pid, *(child.pid for child in found.children(recursive=True))}
    here = ports.listeners(record.host, record.port)
    others = here - ours
    if here & ours and not others:
        return
    who = ", ".join(f"pid {pid}" if pid else "a process of another user" for pid in others) or "nobody we can see"
    raise EngineFailed(
        "port-shared",
        f"port {record.port} is not ours alone: {who} listens there"
        + ("" if here & ours else f" instead of pid {record.server.pid if record.server else '?'}"),
        context=f"last lines of {record.log_path}:\n{native.tail(record.log_path)}",
        fix=f"--port {ports.free_port(record.host, record.port + 1)}",
    )


def _check_alias(record: RunRecord, client: server.Client) -> None:
    try:
        names = client.models()
    except (httpx.HTTPError, KeyError, ValueError, TypeError) as error:
        names = (f"no list of models ({error})",)
    if record.alias not in names:
        raise EngineFailed(
            "wrong-alias",
            f"the server on port {record.port} calls itself {', '.join(names)}, not {record.alias}",
            context=f"last lines of {record.log_path}:\n{native.tail(record.log_path)}",
            fix=f"launcher stop {record.slug}, then look who else answers on port {record.port}",
        )


def _device_bytes(pid: int) -> int:
    """What a process holds on all cards, as NVML says; 0 where it cannot say."""
    import pynvml

    total = 0
    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            card = pynvml.nvmlDeviceGetHandleByIndex(index)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(card):
                if process.pid == pid:
                    total += process.usedGpuMemory or 0
    except pynvml.NVMLError:
        return total
    return total
