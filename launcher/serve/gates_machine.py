"""Gates of the machine beside memory and cards: where files lie, what may be locked, room for the log, card order."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import PurePath

from launcher.facts.surroundings import Surroundings
from launcher.structs import Gate, Inventory, Plan
from launcher.units import GIB, KIB, gib, human, mib

_ROOMY_BYTES = 1 * GIB
# What `--load-mode mlock` locks: weights in host memory; caches and buffers are not.
_LOCKED = ("experts", "embedding", "dense", "output", "drafter")
# Where control groups are mounted, version 2 and 1; names that container engines give to theirs.
_TOPS = frozenset({"/sys/fs/cgroup", "/sys/fs/cgroup/memory"})
_CONTAINERS = frozenset({"docker", "libpod_parent"})


def machine_gates(plan: Plan | None, inventory: Inventory, around: Surroundings, state: str) -> Iterator[Gate]:
    """Every gate of this room, notes among them.

    state  the folder of records and logs, to show
    """
    yield from left_out(inventory)
    yield from _card_order(inventory, around)
    yield from _memory_limit(inventory)
    if plan is not None:
        yield from _memlock(plan, around)
        yield from _slow_files(plan, around)
    if around.state_free_bytes is not None and around.state_free_bytes < _ROOMY_BYTES:
        yield Gate(
            name="log-room",
            ok=True,
            note=True,
            detail=f"{human(around.state_free_bytes)} free in {state}, where the log goes; a full disk ends it",
            fix=f"df -h {shlex.quote(state)}     # or LAUNCHER_HOME=/a/bigger/disk",
        )


def left_out(inventory: Inventory) -> Iterator[Gate]:
    """What was said of the devices when they were read: software renderers, integrated GPUs, lost cards, MIG."""
    fix = "nvidia-smi -L     # what the driver sees"
    if not inventory.devices:
        fix = "launcher engine install     # builds one for the cards of this machine"
    for text in inventory.warnings:
        yield Gate(name="devices-seen", ok=True, note=True, detail=text, fix=fix)


def _memory_limit(inventory: Inventory) -> Iterator[Gate]:
    """A note where a control group leaves less than the machine has: by a limit, or by the nodes that it allows."""
    host = inventory.host
    path = PurePath(host.limited_by)
    if not path.is_absolute():
        return
    yield Gate(
        name="memory-limit",
        ok=True,
        note=True,
        detail=f"{host.limited_by} leaves {gib(host.available_bytes)} GiB; the machine has {gib(host.total_bytes)}",
        fix=_widened(path),
    )


def _widened(path: PurePath) -> str:
    """What widens the limit of that file, by who sets such files."""
    unit = path.parent.name
    if path.is_relative_to("/proc"):  # Mems_allowed_list: a cpuset, no number of bytes
        return (
            "cat /sys/devices/system/node/has_memory     # allow these NODES: docker update --cpuset-mems NODES "
            "CONTAINER, or sudo systemctl set-property --runtime UNIT AllowedMemoryNodes=NODES"
        )
    if unit.endswith((".slice", ".scope", ".service")):
        limit = "MemoryHigh" if path.name == "memory.high" else "MemoryMax"
        return f"sudo systemctl set-property --runtime {shlex.quote(unit)} {limit}=infinity"
    # A container sees its own group as the top, or by the name that its engine gave it.
    if str(path.parent) in _TOPS or not _CONTAINERS.isdisjoint(path.parts):
        return "docker update --memory 0 CONTAINER     # on the machine that runs this container"
    return (
        f"cat {shlex.quote(str(path))}     # whoever made this control group set it: a batch system (ask it for more), "
        "Kubernetes (resources.limits.memory of the pod)"
    )


def _card_order(inventory: Inventory, around: Surroundings) -> Iterator[Gate]:
    """CUDA counts by speed unless told otherwise; the plan always counts by PCI address, and names cards by UUID."""
    cuda = [d for d in inventory.devices if d.backend == "cuda"]
    if len(cuda) < 2:
        return
    by_number = any(part.strip().isdigit() for part in around.cuda_visible.split(","))
    if around.cuda_order not in ("", "PCI_BUS_ID") and by_number:
        uuids = ",".join(d.uuid for d in cuda if d.uuid)
        yield Gate(
            name="cuda-order",
            ok=True,
            note=True,
            detail=f"CUDA_DEVICE_ORDER={around.cuda_order} does not count here: CUDA_VISIBLE_DEVICES="
            f"{around.cuda_visible} is read in PCI order, as {', '.join(f'{d.name} {d.pci}' for d in cuda if d.pci)}",
            fix=f"export CUDA_VISIBLE_DEVICES={uuids}" if uuids else "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )


def locked_bytes(plan: Plan) -> int | None:
    """What the plan's load mode locks, None when it locks nothing.

    With mmap+mlock the engine locks whole files up to their last tensor, at least what is counted here.
    """
    if "mlock" not in plan.settings.load_mode.split("+"):
        return None
    return sum(plan.host.terms.get(term, 0) for term in _LOCKED)


def _memlock(plan: Plan, around: Surroundings) -> Iterator[Gate]:
    """Closed where `mlock` could not lock: the engine only warns in its log, and experts are swapped out anyway."""
    mode, limit, needed = plan.settings.load_mode, around.memlock_bytes, locked_bytes(plan)
    if needed is None or limit is None:
        return
    if needed <= limit:
        yield Gate(name="memlock", ok=True, detail=f"{mib(needed)} of {mib(limit)} MiB may be locked")
        return
    most = around.memlock_most_bytes
    kib = -(-needed // KIB)
    may_raise = most is None or most >= needed
    # A shell's ulimit goes up to its hard limit; past that only root can.
    fix = f"ulimit -l {kib}" if may_raise else f"sudo prlimit --pid $$ --memlock={kib * KIB}:{kib * KIB}"
    yield Gate(
        name="memlock-short",
        ok=False,
        detail=f"load mode {mode} locks {mib(needed)} MiB, RLIMIT_MEMLOCK lets this process lock {human(limit)}",
        context="the engine would only warn, and run with memory that can be swapped out; what a service needs for it "
        "is said by: launcher service install",
        fix=f"{fix}     # in this shell, then again; or --load-mode none",
    )


def _slow_files(plan: Plan, around: Surroundings) -> Iterator[Gate]:
    """A note where weights come over a wire: 140 GiB at the 110 MB/s of gigabit Ethernet are 23 minutes."""
    drafter = {plan.drafter_path: 0} if plan.drafter_path else {}
    for path, size_bytes in ({plan.model.path: plan.model.file_bytes} | drafter).items():
        system = around.file_systems.get(path)
        if system is None or not system.network:
            continue
        folder = os.path.dirname(path) or "."  # noqa: PTH120 - text, nothing is looked at
        what = "a drive of Windows" if system.windows_drive else "read over a network or from a virtual machine's host"
        size = f", {gib(size_bytes)} GiB" if size_bytes else ""
        mapped = "; a page that was dropped comes that way again" if "mmap" in plan.settings.load_mode else ""
        yield Gate(
            name="slow-files",
            ok=True,
            note=True,
            detail=f"{PurePath(path).name}{size} lies on {system.kind} at {system.mount_point} ({what}): "
            f"a slow load{mapped}",
            fix=f"cp -r {shlex.quote(folder)} ~/models/     # a local disk, then: export MODEL_DIR=~/models",
        )
