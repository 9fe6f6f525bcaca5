"""NVIDIA cards as the driver knows them. Whatever NVML will not say is None with a note, never 0; never raises."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.facts import numa
from launcher.structs import GpuProcess

# Bytes a second of one lane, after line coding, by PCIe generation.
_LANE_BPS = {1: 250e6, 2: 500e6, 3: 984.6e6, 4: 1969e6, 5: 3938e6, 6: 7563e6}
# What copies from pinned memory reach of that: 25 of 31.5 GB/s on a 4.0 x16 link.
_LINK_EFFICIENCY = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlCard:
    """One card, or one MIG slice of a card (mig True: the memory is the slice's, the link its card's).

    index      NVML's own, only to show; identity is uuid or pci (lower case, `0000:01:00.0`)
    link_bps   what host-to-device copies can reach: the fastest generation at the width in use
    memory_bps peak of its own memory: clock, two transfers, bus width
    numa_node  the node that its slot hangs on, None where the firmware does not say
    note       what could not be read and why, empty when all could
    """

    index: int
    uuid: str | None
    pci: str | None
    name: str
    total_bytes: int | None
    free_bytes: int | None
    link_gen: int | None = None
    link_gen_max: int | None = None
    link_width: int | None = None
    link_width_max: int | None = None
    link_bps: float | None = None
    memory_bps: float | None = None
    processes: tuple[GpuProcess, ...] = ()
    mig: bool = False
    numa_node: int | None = None
    note: str = ""


def nvml_cards(nvml: Any = None, root: Path = Path("/")) -> tuple[NvmlCard, ...]:
    """Every card in PCI order, its MIG slices in its place where it is cut up; empty without a driver.

    nvml  a module with pynvml's functions; None imports pynvml
    root  where /sys hangs, which knows the NUMA node of a slot
    """
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError):
        return ()
    try:
        cards: list[NvmlCard] = []
        for index in range(_ask(nvml, nvml.nvmlDeviceGetCount, [], "count") or 0):
            cards += _read(nvml, index, root)
        return tuple(sorted(cards, key=lambda c: (c.pci or "~", c.index)))
    finally:
        _ask(nvml, nvml.nvmlShutdown, [], "shutdown")


def driver_trouble(nvml: Any = None) -> str:
    """Why a driver that is installed does not answer; empty when it does, or when this machine has none.

    After an update without a restart every CUDA program sees no card at all, and a plan would silently use the host.
    """
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, OSError):
        return ""
    except nvml.NVMLError as error:
        return f"the NVIDIA driver does not answer ({error}): no card is planned with; see what `nvidia-smi` says"
    _ask(nvml, nvml.nvmlShutdown, [], "shutdown")
    return ""


def driver_version(nvml: Any = None) -> str:
    """The NVIDIA driver's version, empty where none answers. Never raises.

    nvml  a module with pynvml's functions; None imports pynvml
    """
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
        try:
            said = nvml.nvmlSystemGetDriverVersion()
        finally:
            nvml.nvmlShutdown()
    except (nvml.NVMLError, OSError):
        return ""
    return said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)


def _ask(nvml: Any, what: Callable[..., Any], notes: list[str], name: str, *args: Any) -> Any:
    """One NVML call; None, and a note, for anything it refuses (not supported, no permission, lost card)."""
    try:
        return what(*args)
    except (nvml.NVMLError, UnicodeDecodeError, OSError) as error:
        notes.append(f"{name}: {error}")
        return None


def _read(nvml: Any, index: int, root: Path) -> list[NvmlCard]:
    notes: list[str] = []
    handle = _ask(nvml, nvml.nvmlDeviceGetHandleByIndex, notes, "handle", index)
    if handle is None:
        note = "; ".join(notes)
        return [NvmlCard(index=index, uuid=None, pci=None, name="?", total_bytes=None, free_bytes=None, note=note)]
    quiet: list[str] = []  # a laptop or a virtual card need not tell its link: no reason for a note
    pci = _ask(nvml, nvml.nvmlDeviceGetPciInfo, notes, "PCI id", handle)
    gen_max = _ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, quiet, "link", handle)
    width = _ask(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, quiet, "link", handle)
    clock = _ask(nvml, nvml.nvmlDeviceGetMaxClockInfo, quiet, "memory clock", handle, nvml.NVML_CLOCK_MEM)
    bus = _ask(nvml, nvml.nvmlDeviceGetMemoryBusWidth, quiet, "memory bus", handle)
    shared: dict[str, Any] = {
        "index": index,
        "pci": _pci(pci),
        "numa_node": numa.card_node(_pci(pci), root),
        "link_gen": _ask(nvml, nvml.nvmlDeviceGetCurrPcieLinkGeneration, quiet, "link", handle),
        "link_gen_max": gen_max,
        "link_width": width,
        "link_width_max": _ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, quiet, "link", handle),
        # An idle card drops to generation 1; the width stays.
        "link_bps": _LANE_BPS[gen_max] * width * _LINK_EFFICIENCY if gen_max in _LANE_BPS and width else None,
        "memory_bps": clock * 1e6 * 2 * bus / 8 if clock and bus else None,
    }
    slices = _slices(nvml, handle, quiet)
    if slices is not None:
        return [_card(nvml, one, {**shared, "mig": True}, list(notes)) for one in slices]
    return [_card(nvml, handle, shared, notes)]


def _slices(nvml: Any, handle: Any, notes: list[str]) -> list[Any] | None:
    """Handles of a card's MIG slices; None when MIG is off (the usual case: NVML then says 'not supported')."""
    mode = _ask(nvml, nvml.nvmlDeviceGetMigMode, notes, "MIG", handle)
    if not mode or not mode[0]:
        return None
    count = _ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, notes, "MIG", handle) or 0
    found = (_ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, notes, "MIG", handle, i) for i in range(count))
    return [one for one in found if one is not None]


def _card(nvml: Any, handle: Any, shared: dict[str, Any], notes: list[str]) -> NvmlCard:
    uuid = _ask(nvml, nvml.nvmlDeviceGetUUID, notes, "UUID", handle)
    name = _ask(nvml, nvml.nvmlDeviceGetName, notes, "name", handle)
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, notes, "memory", handle)
    running = _ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, notes, "processes", handle)
    return NvmlCard(
        uuid=_string(uuid),
        name=_string(name) or "?",
        total_bytes=int(memory.total) if memory else None,
        free_bytes=int(memory.free) if memory else None,
        processes=tuple(
            GpuProcess(
                pid=int(p.pid),
                name=_process_name(nvml, int(p.pid)),
                used_bytes=None if p.usedGpuMemory is None else int(p.usedGpuMemory),
            )
            for p in running or ()
        ),
        note="; ".join(notes),
        **shared,
    )


def _process_name(nvml: Any, pid: int) -> str:
    """The name of a process's program; empty where it is not ours to see (another container, another user)."""
    name = _string(_ask(nvml, nvml.nvmlSystemGetProcessName, [], "name", pid))
    return os.path.basename(name.split(" ")[0]) if name else ""  # noqa: PTH119 - a name from elsewhere, no file here


def _pci(info: Any) -> str | None:
    """`00000000:01:00.0` -> `0000:01:00.0`, as lspci and the kernel write it."""
    text = _string(info.busId) if info is not None else None
    if not text:
        return None
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _string(value: Any) -> str | None:
    """Bindings before 11.5 answer with bytes."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    return str(value) if value else None
