"""Which process is meant: a pid is used again, and the wall clock may be set while a server runs.

A process is known by its pid, its start in clock ticks after the boot, and the boot; where the kernel does not say
these, by pid and create time.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from launcher.structs import ProcessId

# create_time is derived from the boot time, which moves by a second when the clock is adjusted.
_CLOCK_SLACK_S = 2.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def identify(pid: int) -> ProcessId | None:
    """Identity of a running process, None when it is gone."""
    try:
        created = psutil.Process(pid).create_time()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    return ProcessId(pid=pid, create_time=created, start_ticks=_start_ticks(pid), boot_id=_boot_id())


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat: clock ticks from boot to the start of the process, whatever the wall clock says."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[19])  # the name in parentheses may hold anything
    except (OSError, ValueError, IndexError):
        return None


def _boot_id() -> str | None:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _same(process: ProcessId, found: psutil.Process) -> bool:
    boot, ticks = _boot_id(), _start_ticks(process.pid)
    if None not in (boot, ticks, process.boot_id, process.start_ticks):
        return (boot, ticks) == (process.boot_id, process.start_ticks)
    return bool(abs(found.create_time() - process.create_time) < _CLOCK_SLACK_S)


def alive(process: ProcessId | None) -> bool:
    """Whether exactly this process still runs; one that ended and was not yet waited for does not."""
    return proc(process) is not None


def proc(process: ProcessId | None) -> psutil.Process | None:
    """The process behind an identity, None when it is gone or its pid belongs to another one now."""
    if process is None:
        return None
    try:
        found = psutil.Process(process.pid)
        return found if _same(process, found) and found.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
