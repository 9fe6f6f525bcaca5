"""Swap, huge pages and memory channels, as far as they are told without root. Never writes, never raises."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from launcher.facts import sysfs
from launcher.structs import Channels

_CHANNEL = re.compile(r"channel[ _-]*([a-z]|\d+)(?![a-z0-9])", re.I)
_UDEV = re.compile(r"^E:MEMORY_DEVICE_(\d+)_(SIZE|LOCATOR|BANK_LOCATOR|PRESENT)=(.*)$", re.M)


def swap(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """(SwapTotal, SwapFree) of /proc/meminfo in bytes; 0 where there is no swap, None where it does not tell."""
    sizes = sysfs.parse_meminfo(sysfs.text(root / "proc/meminfo") or "")
    return sizes.get("SwapTotal"), sizes.get("SwapFree")


def transparent_huge(root: Path = Path("/")) -> str | None:
    """The mode in brackets of `always [madvise] never`; None where the kernel has none."""
    chosen = re.search(r"\[(\w+)\]", sysfs.text(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    return chosen[1] if chosen else None


def channels(root: Path = Path("/"), dmidecode: str | None = None) -> Channels | None:
    """Channels with a module, of the first source that tells: EDAC, udev's copy of the SMBIOS table, dmidecode.

    dmidecode  what `dmidecode -t memory` printed; None asks it when `root` is this machine's (it mostly needs root)

    None where nobody tells: a virtual machine, or a kernel without the memory controller's driver.
    """
    if found := edac(root):
        return found
    if found := parse_udev(sysfs.text(root / "run/udev/data/+dmi:id") or ""):
        return found
    said = _dmidecode() if dmidecode is None and root == Path("/") else dmidecode
    return parse_dmidecode(said or "")


def edac(root: Path) -> Channels | None:
    """From /sys/devices/system/edac/mc/mc*/dimm*: size in MiB, and a location as `channel 1 slot 0`."""
    seen, modules = set(), 0
    for folder in (root / "sys/devices/system/edac/mc").glob("mc[0-9]*/dimm[0-9]*"):
        if not sysfs.number(folder / "size"):
            continue
        modules += 1
        if at := _CHANNEL.search(sysfs.text(folder / "dimm_location") or ""):
            seen.add((folder.parent.name, at[1]))
    return Channels(populated=len(seen) or None, modules=modules, by="EDAC") if modules else None


def parse_udev(text: str) -> Channels | None:
    """From the properties MEMORY_DEVICE_<n>_* that systemd (248 and later) keeps of the SMBIOS table."""
    devices: dict[str, dict[str, str]] = {}
    for number, key, value in _UDEV.findall(text):
        devices.setdefault(number, {})[key] = value
    filled = [d for d in devices.values() if d.get("SIZE", "0").isdigit() and int(d.get("SIZE", "0"))]
    return _named([(d.get("BANK_LOCATOR", ""), d.get("LOCATOR", "")) for d in filled], "udev")


def parse_dmidecode(text: str) -> Channels | None:
    """From the `Memory Device` blocks of `dmidecode -t memory` that have a size."""
    found = []
    for block in text.split("Memory Device\n")[1:]:
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in block.splitlines())}
        if re.match(r"[1-9]\d* [KMGT]?i?B", fields.get("Size", "")):
            found.append((fields.get("Bank Locator", ""), fields.get("Locator", "")))
    return _named(found, "dmidecode")


def _named(places: list[tuple[str, str]], by: str) -> Channels | None:
    """Boards name places as they like; a channel counts only where every module names one."""
    if not places:
        return None
    seen = set()
    for bank, slot in places:
        named = _CHANNEL.search(bank) or _CHANNEL.search(slot)
        if named is None:
            return Channels(populated=None, modules=len(places), by=by)
        # `P0 CHANNEL A` and `P1 CHANNEL A` are two channels: all before the word belongs to its name.
        text = bank if _CHANNEL.search(bank) else slot
        seen.add((text[: named.start()].strip().lower(), named[1].lower()))
    return Channels(populated=len(seen), modules=len(places), by=by)


def _dmidecode() -> str | None:
    path = shutil.which("dmidecode")
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, "-t", "memory"], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
