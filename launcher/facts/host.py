"""This machine's memory and cores: /proc, /sys and the control groups we live in. Linux only, never writes.

Everything hangs under `root`, so that a folder with a fake /proc and /sys can be read in its place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import DeviceUnusable
from launcher.facts import numa, sysfs
from launcher.facts.sysfs import parse_list, parse_meminfo
from launcher.structs import Host

# Version 1 writes "no limit" as the largest multiple of a page below 2^63; anything past this is no limit either.
_UNLIMITED = 1 << 60


def read_host(root: Path = Path("/"), affinity: frozenset[int] | None = None) -> Host:
    """Memory and cores as this process may use them.

    affinity  CPUs that we may run on; None asks the kernel

    Raises DeviceUnusable (host-unreadable) where /proc/meminfo does not say how much memory there is.
    """
    total, available = _memory(root)
    limited_by = "MemAvailable"
    cpus = affinity if affinity is not None else frozenset(os.sched_getaffinity(0))
    nodes, with_memory = numa.read_nodes(root, cpus, available)
    reach = sum(node.available_bytes for node in nodes)
    if nodes and len(nodes) < with_memory and reach < available:
        available, limited_by = reach, "/proc/self/status Mems_allowed_list"
    for room in memory_rooms(root):
        if room.left_bytes < available:
            available, limited_by = room.left_bytes, room.file
    return Host(
        total_bytes=total,
        available_bytes=available,
        limited_by=limited_by,
        cores=_cores(root, cpus),
        numa_nodes=max(1, len(nodes) or with_memory),
        nodes=nodes,
        numactl=numa.numactl() if len(nodes) > 1 else None,
        wsl="microsoft" in (sysfs.text(root / "proc/sys/kernel/osrelease") or "").lower(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRoom:
    """What one control group leaves: limit less what it holds, its reclaimable page cache counted as free."""

    file: str
    limit_bytes: int
    left_bytes: int


def memory_rooms(root: Path = Path("/")) -> tuple[MemoryRoom, ...]:
    """Every memory limit above us, from our own group up to the top of what is mounted; empty when none is set."""
    found: list[MemoryRoom] = []
    for group in _groups(root, "", "cgroup2"):
        for name in ("memory.max", "memory.high"):  # high does not kill, but stalls whoever goes past it
            found += _room(root, group / name, group / "memory.current", "inactive_file")
    for group in _groups(root, "memory", "cgroup"):
        found += _room(root, group / "memory.limit_in_bytes", group / "memory.usage_in_bytes", "total_inactive_file")
    return tuple(found)


def _memory(root: Path) -> tuple[int, int]:
    path = root / "proc/meminfo"
    sizes = parse_meminfo(sysfs.text(path) or "")
    total = sizes.get("MemTotal")
    if not total:
        raise DeviceUnusable(
            "host-unreadable",
            f"{path} does not say how much memory this machine has",
            context="the launcher runs on Linux and needs /proc mounted",
            fix="launcher plan TARGET --rig FILE   # plan for a machine described in a file",
        )
    # Kernels before 3.14 have no MemAvailable: what is free or page cache comes close.
    rough = sizes.get("MemFree", 0) + sizes.get("Cached", 0) + sizes.get("Buffers", 0)
    return total, min(total, sizes.get("MemAvailable", rough))


def _groups(root: Path, controller: str, kind: str) -> Iterator[Path]:
    """Folders of our control group and its parents; the mount point is the last. Empty controller: version 2."""
    mounts = _mounts(root, controller, kind)
    for line in (sysfs.text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if (controller in names.split(",")) if controller else (names == ""):
            for mount_root, mount_point in mounts:
                # In a container without a cgroup namespace the path counts from the host's top, the mount from ours.
                below = path[len(mount_root.rstrip("/")) :] if path.startswith(mount_root) else "/"
                top = root / mount_point.lstrip("/")
                group = top / below.strip("/")
                while group != top and not os.path.isdir(group) and top in group.parents:  # noqa: PTH112 - never raises
                    group = group.parent
                while group != top and top in group.parents:
                    yield group
                    group = group.parent
                yield top


def _mounts(root: Path, controller: str, kind: str) -> list[tuple[str, str]]:
    found = []
    for line in (sysfs.text(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 5 or len(tail) < 3 or tail[0] != kind:
            continue
        if controller and controller not in tail[2].split(","):
            continue
        found.append((fields[3], fields[4].replace("\\040", " ")))
    return found


def _room(root: Path, limit_file: Path, used_file: Path, cache_name: str) -> list[MemoryRoom]:
    limit, used = sysfs.number(limit_file), sysfs.number(used_file)
    stat = dict(
        line.split(" ", 1) for line in (sysfs.text(limit_file.parent / "memory.stat") or "").splitlines() if " " in line
    )
    sizes = {name: int(value) for name, value in stat.items() if value.strip().isdigit()}
    if limit is not None and "hierarchical_memory_limit" in sizes:
        # Version 1 knows the least limit of all parents, also of those that a container cannot see.
        limit = min(limit, sizes["hierarchical_memory_limit"])
    if limit is None or limit >= _UNLIMITED:
        return []
    cache = sizes.get(cache_name, 0)
    left = max(0, limit - max(0, (used or 0) - cache))
    return [MemoryRoom(file="/" + str(limit_file.relative_to(root)), limit_bytes=limit, left_bytes=left)]


def _cores(root: Path, cpus: frozenset[int]) -> int:
    """Physical cores among cpus (performance cores only, where there are two kinds), within the CPU quota; >= 1."""
    fast = parse_list(sysfs.text(root / "sys/devices/cpu_core/cpus") or "")
    use = (cpus & fast) or cpus
    cores = sysfs.physical_cores(root, use)
    quota = min((q for q in _quotas(root)), default=float(cores))
    return max(1, min(cores, int(quota)))


def _quotas(root: Path) -> Iterator[float]:
    """CPUs' worth of time that each control group above us allows."""
    for group in _groups(root, "", "cgroup2"):
        words = (sysfs.text(group / "cpu.max") or "").split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            yield int(words[0]) / int(words[1])
    for group in _groups(root, "cpu", "cgroup"):
        quota, period = sysfs.number(group / "cpu.cfs_quota_us"), sysfs.number(group / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:
            yield quota / period


def own_bytes(pid: int, root: Path = Path("/")) -> int | None:
    """Memory that a process gives back when it ends: its private pages and its shared memory, not pages of files.

    CUDA's pinned buffers are shared mappings of /dev/zero: of a server that held 11,012 MiB of experts in them all but
    899 MiB of its resident memory counted as shared. None where /proc does not tell (gone, or another user's).
    """
    try:
        text = (root / "proc" / str(pid) / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    sizes = dict(re.findall(r"^Rss(Anon|Shmem):\s+(\d+) kB$", text, flags=re.MULTILINE))
    return sum(int(n) for n in sizes.values()) * 1024 if sizes else None
