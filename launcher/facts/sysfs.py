"""Small files of /proc and /sys -> values. Shared by host.py and numa.py; a missing file is None, never an error."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def text(path: Path) -> str | None:
    """The whole file, None where there is none to read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def number(path: Path) -> int | None:
    """An integer file; None for a missing one and for `max`."""
    said = (text(path) or "").strip()
    return int(said) if said.lstrip("-").isdigit() else None


def parse_meminfo(text: str) -> dict[str, int]:
    """`MemTotal:  24684096 kB` and `Node 0 MemTotal: ...` lines -> name -> bytes; others are left out."""
    sizes: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.rpartition(":")
        words = rest.split()
        if name and words and words[0].isdigit():
            sizes[name.split()[-1]] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return sizes


def parse_list(text: str) -> frozenset[int]:
    """`0-3,8` -> {0, 1, 2, 3, 8} (CPUs, nodes); what is not a number or a range is left out."""
    found: set[int] = set()
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        if low.isdigit() and (high.isdigit() or not high):
            found.update(range(int(low), int(high or low) + 1))
    return frozenset(found)


def physical_cores(root: Path, cpus: Iterable[int]) -> int:
    """Physical cores among these CPUs: hyperthreads share one. A CPU without topology counts as one."""
    cores = set()
    for cpu in cpus:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        ids = tuple(number(folder / name) for name in ("physical_package_id", "die_id", "core_id"))
        cores.add(("cpu", cpu) if ids[0] is None or ids[2] is None else ids)
    return len(cores)
