"""The processor's name and its governors: /proc/cpuinfo and cpufreq. Linux only, never writes, never raises."""

from __future__ import annotations

from pathlib import Path

from launcher.facts import sysfs


def processor(root: Path = Path("/")) -> str | None:
    """`AMD EPYC 9354 32-Core Processor`; on ARM the device tree's model of the board; None where neither tells."""
    board = (sysfs.text(root / "proc/device-tree/model") or "").strip("\0 \n")
    return parse_processor(sysfs.text(root / "proc/cpuinfo") or "") or board or None


def parse_processor(cpuinfo: str) -> str | None:
    """The first `model name` (x86) or `Model` (some ARM kernels) of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model") and value.strip():
            return " ".join(value.split())
    return None


def governors(root: Path = Path("/")) -> tuple[str, ...] | None:
    """Frequency governors of all CPUs, each once; None where the kernel shows none (most virtual machines)."""
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    found = {(sysfs.text(file) or "").strip() for file in files} - {""}
    return tuple(sorted(found)) or None
