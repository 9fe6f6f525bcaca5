"""What the machine knows about an end that the engine cannot say itself: the kernel's words, memory before it.

Everything here may be unreadable, in a container or for a plain user; that is None or empty, never "nothing happened".
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from pathlib import Path

from launcher.facts.serve_log import parse_requests
from launcher.serve import native
from launcher.serve.alive import log_end
from launcher.structs import ProcessId, Request, RunRecord, Sample

_SAMPLES = 5
_SAMPLE_EVERY_S = 10.0
_REQUESTS = 4
_KERNEL_LINES = 4
_LINE_CHARS = 240
_KMSG = Path("/dev/kmsg")
# Of the kernel's ring buffer: more than it usually holds, and a bound for a reader that meets a busy writer.
_MOST_RECORDS = 20_000
# `Memory cgroup out of memory: Killed process 4242 (llama-server) ...`, `llama-server[4242]: segfault at ...`
_ABOUT_PID = r"(?:process |pid[ =:]+|\[){pid}\b"
_CARD = re.compile(r"NVRM: Xid|amdgpu.*(?:reset|hang)")


def oom_kills() -> int | None:
    """How often the kernel killed in our control group for want of memory; None where that cannot be read.

    cgroup v2 says it in memory.events, v1 in memory.oom_control; both are counters of `oom_kill`.
    """
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    root = Path("/sys/fs/cgroup")
    for hierarchy, controllers, path in groups:
        if hierarchy == "0":
            file = root / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            file = root / "memory" / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        with contextlib.suppress(OSError, ValueError):
            pairs = dict(pair.split() for pair in file.read_text(encoding="utf-8").splitlines())
            if "oom_kill" in pairs:
                return int(pairs["oom_kill"])
    return None


def kernel_records(path: Path = _KMSG) -> tuple[str, ...]:
    """The kernel's log as /dev/kmsg gives it, one record a line; empty where a plain user may not read it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ()
    records = []
    try:
        for _ in range(_MOST_RECORDS):
            try:
                record = os.read(handle, 8192)
            except BrokenPipeError:  # overwritten while we read: the next read is of the oldest that is left
                continue
            except OSError:
                break
            if not record:
                break
            records += record.decode("utf-8", "replace").splitlines()
    finally:
        os.close(handle)
    return tuple(records)


def kernel_lines(records: tuple[str, ...], pid: int, since_s: float | None) -> tuple[str, ...]:
    """Of the kernel's records those about a process, or about a card; the newest last.

    records  `6,1234,98765432,-;text`, the third field microseconds after the boot
    since_s  seconds after the boot: a pid and a card had a life before this server
    """
    about = re.compile(_ABOUT_PID.format(pid=pid))
    found = []
    for record in records:
        head, _, text = record.partition(";")
        fields = head.split(",")
        if len(fields) < 3 or not fields[2].isdigit() or not (about.search(text) or _CARD.search(text)):
            continue
        if since_s is None or int(fields[2]) / 1e6 >= since_s:
            found.append(text.strip()[:_LINE_CHARS])
    return tuple(found[-_KERNEL_LINES:])


def about(process: ProcessId | None) -> tuple[str, ...]:
    """The kernel's own lines about a server that ended."""
    if process is None:
        return ()
    since = None if process.start_ticks is None else process.start_ticks / os.sysconf("SC_CLK_TCK")
    return kernel_lines(kernel_records(), process.pid, since)


def last_requests(record: RunRecord) -> tuple[Request, ...]:
    """The last requests of a server's log."""
    return parse_requests(log_end(record.log_path))[-_REQUESTS:]


class Samples:
    """The last looks at memory: the newest whenever one is due, the others ten seconds apart."""

    def __init__(self) -> None:
        self.rss_bytes: int | None = None
        # The last look but one is what an end is compared with: the kernel counts a kill a moment before its memory
        # is gone, so the last look may have seen the new number already.
        self._kills: deque[int | None] = deque([oom_kills()], maxlen=2)
        self._kept: deque[tuple[float, int | None, int | None]] = deque(maxlen=_SAMPLES)

    def take(self, process: ProcessId | None) -> None:
        """Look now. A process that is gone leaves what was seen before."""
        rss = native.resident_bytes(process)
        if not rss:
            return
        self.rss_bytes = rss
        self._kills.append(oom_kills())
        seen = (time.monotonic(), rss, _host_available_bytes())
        # the newest replaces the one before it, until that is far enough from the one before that
        if len(self._kept) >= 2 and self._kept[-1][0] - self._kept[-2][0] < _SAMPLE_EVERY_S:
            self._kept.pop()
        self._kept.append(seen)

    def kills(self) -> int | None:
        """Kills for want of memory in our control group just now, not in the days before; None: it does not say."""
        before, now = self._kills[0], oom_kills()
        return None if before is None or now is None else now - before

    def before(self, now: float) -> tuple[Sample, ...]:
        """What was kept, the oldest first; now is time.monotonic() of the end."""
        return tuple(
            Sample(before_s=round(now - at, 1), rss_bytes=r, host_available_bytes=a) for at, r, a in self._kept
        )


def _host_available_bytes() -> int | None:
    """MemAvailable of /proc/meminfo."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
