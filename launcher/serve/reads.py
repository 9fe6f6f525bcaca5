"""Whether a process reads from a disk: a mapped model that is cold comes page by page, and no token before it is there.

140 GiB over gigabit Ethernet are 23 minutes in which no counter of the engine and no line of its log moves.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import psutil

from launcher.serve.process import proc
from launcher.structs import ProcessId
from launcher.units import MIB

# Between two looks seconds apart. A wedged process that answers /health may fault in a page or two of its own code; the
# slowest disk that a model is read from gives more than this, with read-ahead in pieces of 128 KiB to 15 MiB (NFS).
_LEAST_BYTES = 1 * MIB
_LEAST_FAULTS = 16


@dataclass(frozen=True, slots=True)
class Reads:
    """Counters of one process; None is what the kernel does not say.

    disk_bytes    read_bytes of /proc/PID/io: what disks and most network file systems really gave
    major_faults  pages that had to be waited for; also of file systems that do not count their bytes
    """

    disk_bytes: int | None
    major_faults: int | None

    def moved_since(self, before: Reads | None) -> bool:
        """Whether it was reading since a look some seconds before; False where that cannot be told."""
        if before is None:
            return False
        return _grew(before.disk_bytes, self.disk_bytes, _LEAST_BYTES) or _grew(
            before.major_faults, self.major_faults, _LEAST_FAULTS
        )


def reads_of(process: ProcessId | None) -> Reads | None:
    """The counters now, None when the process is gone."""
    found = proc(process)
    if found is None:
        return None
    n_bytes: int | None = None
    with contextlib.suppress(psutil.Error, OSError, NotImplementedError):
        n_bytes = int(found.io_counters().read_bytes)
    return Reads(disk_bytes=n_bytes, major_faults=_major_faults(found.pid))


def _major_faults(pid: int) -> int | None:
    """Field 12 of /proc/PID/stat, proc_pid_stat(5); its second may hold anything in its parentheses."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[9])
    except (OSError, ValueError, IndexError):
        return None


def _grew(before: int | None, now: int | None, least: int) -> bool:
    return before is not None and now is not None and now - before >= least
