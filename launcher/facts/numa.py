"""NUMA nodes: which memory lies beside which cores and cards, and how much of it this process may have.

Linux only, never writes. Everything hangs under `root`, as in host.py. Parsing stands apart from reading.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from launcher.facts import sysfs
from launcher.structs import NumaNode

_NODE = re.compile(r"node(\d+)")
_NEEDED = ("MemTotal", "MemFree")


def read_nodes(root: Path, cpus: frozenset[int], machine_available_bytes: int) -> tuple[tuple[NumaNode, ...], int]:
    """(nodes with memory that this process may use, in order; how many nodes of the machine have memory).

    cpus                     CPUs that we may run on: others are no cores of a node
    machine_available_bytes  MemAvailable, which the nodes' shares add up to

    A control group (cpuset.mems) may leave us some nodes only: Mems_allowed_list of /proc/self/status. Node numbers
    may have gaps. A node without CPUs (CXL or other far memory) has 0 cores. Empty where a node does not tell its
    sizes: unknown, not full.
    """
    sizes: dict[int, dict[str, int]] = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        found = sysfs.parse_meminfo(sysfs.text(folder / "meminfo") or "")
        if (name := _NODE.fullmatch(folder.name)) and found.get("MemTotal"):
            sizes[int(name[1])] = found
    if not sizes or any(key not in found for found in sizes.values() for key in _NEEDED):
        return (), len(sizes)
    available = available_bytes(sizes, machine_available_bytes)
    allowed = allowed_nodes(sysfs.text(root / "proc/self/status") or "")
    nodes = [
        _node(root, index, cpus, sizes[index]["MemTotal"], available[index])
        for index in sorted(sizes)
        if allowed is None or index in allowed
    ]
    return tuple(nodes), len(sizes)


def available_bytes(sizes: Mapping[int, Mapping[str, int]], machine_available_bytes: int) -> dict[int, int]:
    """Node -> bytes that a new process can have there without swapping; pure.

    A node's meminfo has no MemAvailable. The kernel makes the machine's (mm/page_alloc.c, si_mem_available) of what is
    free, file pages and reclaimable slab, less watermarks and half of what the last two may keep. So a node offers
    MemFree + Active(file) + Inactive(file) + SReclaimable (not FilePages: tmpfs is in that and cannot be dropped)
    less its share, by size, of what the kernel holds back from the machine's sum: the nodes add up to MemAvailable.
    """
    parts = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
    raw = {index: sum(found.get(part, 0) for part in parts) for index, found in sizes.items()}
    held = max(0, sum(raw.values()) - machine_available_bytes)
    total = sum(found["MemTotal"] for found in sizes.values())
    return {index: max(0, raw[index] - -(-held * sizes[index]["MemTotal"] // total)) for index in sizes}


def allowed_nodes(status: str) -> frozenset[int] | None:
    """Nodes of the line Mems_allowed_list in /proc/self/status; None where it is missing (all are allowed)."""
    line = re.search(r"^Mems_allowed_list:\s*(\S+)", status, re.M)
    return sysfs.parse_list(line[1]) if line else None


def card_node(pci: str | None, root: Path = Path("/")) -> int | None:
    """The node whose memory is nearest to a card (`0000:01:00.0`); None where the firmware does not say (-1)."""
    node = sysfs.number(root / "sys/bus/pci/devices" / pci / "numa_node") if pci else None
    return node if node is not None and node >= 0 else None


def numactl() -> str | None:
    """Path of numactl, None when it is not installed or may not set a policy (a container without SYS_NICE)."""
    path = shutil.which("numactl")
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, "--interleave=all", path, "--show"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return path if done.returncode == 0 else None


def _node(root: Path, index: int, cpus: frozenset[int], total: int, available: int) -> NumaNode:
    mine = sysfs.parse_list(sysfs.text(root / f"sys/devices/system/node/node{index}/cpulist") or "") & cpus
    package = next(
        (sysfs.number(root / f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id") for cpu in sorted(mine)),
        None,
    )
    return NumaNode(
        index=index,
        total_bytes=total,
        available_bytes=min(total, available),
        cpus=tuple(sorted(mine)),
        cores=sysfs.physical_cores(root, mine),
        socket=package,
    )
