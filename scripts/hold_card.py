#!/usr/bin/env python3
"""Holds memory of one CUDA card, so that what is left is a smaller card.

    python scripts/hold_card.py --device UUID|INDEX --leave 24GiB [--library libcuda.so.1]

Leaves that much free, as the driver counts it (within 32 MiB), prints one JSON line
{"device", "uuid", "held_bytes", "free_bytes"} and holds on until its stdin closes or SIGTERM comes; then it frees all
and ends with 0. An index counts as nvidia-smi does. As a module: `with held("GPU-...", 24 * GIB) as holding:`.

Only plain allocations through the driver, by ctypes: managed memory would be moved to the host when somebody else
asks for it. CUDA driver API: https://docs.nvidia.com/cuda/cuda-driver-api/
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any
from uuid import UUID

from launcher.errors import DeviceUnusable, LauncherError, Refused, UsageError
from launcher.units import GIB, MIB, human, parse_size

LIBRARY = "libcuda.so.1"
LARGEST_BYTES, SMALLEST_BYTES = GIB, 2 * MIB  # of one allocation; 2 MiB is the page that a card hands out
SLACK_BYTES = 32 * MIB
START_S, END_S = 120, 30  # a driver that first initialises eight cards takes tens of seconds
_OUT_OF_MEMORY = 2
_KINDS = {kind.exit_code: kind for kind in (UsageError, DeviceUnusable, Refused)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A card as it is held: its name, its UUID as nvidia-smi prints it, what is held and what was left free."""

    device: str
    uuid: str
    held_bytes: int
    free_bytes: int


@contextmanager
def held(device: str, leave_bytes: int, *, library: str = LIBRARY, start_s: float = START_S) -> Iterator[Holding]:
    """Hold a card in a child process while the block runs.

    Raises what the child refuses: UsageError, DeviceUnusable or Refused; DeviceUnusable `card-released` at the end of
    the block when the child ended before it. The memory is free again when the block is left, also by a signal: the
    child sees its stdin close.
    """
    argv = [sys.executable, __file__, "--device", device, "--leave", str(leave_bytes), "--library", library]
    child = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # it finds what we found
        start_new_session=True,  # Ctrl-C on the terminal ends the block first, then the holding
    )
    assert child.stdin and child.stdout
    try:
        ready, _, _ = select.select([child.stdout], [], [], start_s)
        line = child.stdout.readline() if ready else ""
        if not line:
            raise _refusal(child, device, late=not ready)
        yield Holding(**json.loads(line))
        if child.poll() is not None:
            what = f"device {device} was let go before the end: its holder ended with {child.returncode}"
            raise DeviceUnusable("card-released", what, fix="dmesg | tail, then measure again")
    finally:
        child.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            child.wait(END_S)
        if child.poll() is None:
            child.kill()
            child.wait()
        for pipe in (child.stdout, child.stderr):
            if pipe:
                pipe.close()


def _refusal(child: subprocess.Popen[str], device: str, *, late: bool) -> LauncherError:
    """The refusal that the child told on stderr, or that it told nothing in time."""
    if late:
        child.kill()
    _, told = child.communicate()
    first, *rest = told.strip().splitlines() or [""]
    fix = next((x.removeprefix("fix: ") for x in rest if x.startswith("fix: ")), f"nvidia-smi -i {device}")
    context = "\n".join(x for x in rest if not x.startswith("fix: "))
    if first.startswith("error["):
        reference, _, message = first.removeprefix("error[").partition("]: ")
        return _KINDS.get(child.returncode, DeviceUnusable)(reference, message, context=context, fix=fix)
    what = "did not answer in time" if late else f"ended with {child.returncode}"
    return DeviceUnusable("card-not-held", f"device {device}: its holder {what}", context=told.strip(), fix=fix)


# -------------------------------------------------------------------------------------------------- the driver


class Driver:
    """The few calls of libcuda that are needed; every other result than success is a refusal with its number."""

    def __init__(self, library: str = LIBRARY) -> None:
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # else index 0 is the fastest card, not nvidia-smi's first
        try:
            self._lib = ctypes.CDLL(library)
        except OSError as e:
            fix = "nvidia-smi   (it comes with the driver; in a container: docker run --gpus all ...)"
            raise DeviceUnusable("cuda-missing", f"no CUDA driver: {e}", fix=fix) from e
        self("cuInit", 0)

    def __call__(self, name: str, *args: Any) -> None:
        """Call; raises DeviceUnusable."""
        code = self.code(name, *args)
        if code:
            text = ctypes.c_char_p()
            with suppress(AttributeError):
                self._lib.cuGetErrorName(code, ctypes.byref(text))
            reason = text.value.decode() if text.value else "no name"
            raise DeviceUnusable("cuda-failed", f"{name} failed with {code} ({reason})", fix="nvidia-smi")

    def code(self, name: str, *args: Any) -> int:
        """Call; the CUresult."""
        try:
            return int(getattr(self._lib, name)(*args))
        except AttributeError as e:
            what = f"the CUDA driver has no {name}: it is older than CUDA 9.2"
            raise DeviceUnusable("cuda-too-old", what, fix="update the NVIDIA driver, then nvidia-smi") from e

    def find(self, device: str) -> tuple[int, str]:
        """Handle and UUID of a device by UUID or index; raises DeviceUnusable with those that there are."""
        count = ctypes.c_int()
        self("cuDeviceGetCount", ctypes.byref(count))
        seen = []
        for index in range(count.value):
            handle, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
            self("cuDeviceGet", ctypes.byref(handle), index)
            self("cuDeviceGetUuid", ctypes.byref(raw), handle)
            uuid = f"GPU-{UUID(bytes=bytes(raw))}"
            if device.lower() in (str(index), uuid.lower()):
                return handle.value, uuid
            seen.append(f"{index} is {uuid}")
        masked = os.environ.get("CUDA_VISIBLE_DEVICES")
        if masked is not None:
            seen.append(f"CUDA_VISIBLE_DEVICES={masked} hides all others")
        what = f"no device {device} among {count.value}"
        raise DeviceUnusable(
            "device-unknown", what, context="\n".join(seen), fix="nvidia-smi -L, then name one of them"
        )


class Card:
    """One device with a context on it, and what is allocated there."""

    def __init__(self, driver: Driver, device: str) -> None:
        self._driver = driver
        self._handle, self.uuid = driver.find(device)
        self.device = device
        self._blocks: list[tuple[ctypes.c_uint64, int]] = []
        context = ctypes.c_void_p()
        driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._handle)
        driver("cuCtxSetCurrent", context)

    @property
    def held_bytes(self) -> int:
        return sum(size for _, size in self._blocks)

    def free_bytes(self) -> int:
        """Free memory of the whole card, whoever uses the rest; our context is used memory already."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._driver("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def hold(self, leave_bytes: int) -> Holding:
        """Allocate until that much is free, within SLACK_BYTES; raises Refused, DeviceUnusable."""
        free = self.free_bytes()
        if free < leave_bytes:
            what = f"device {self.device} has {human(free)} free, {human(leave_bytes)} should be left"
            fix = f"--leave {max(0, free // MIB)}MiB, or see who holds the rest: nvidia-smi -i {self.uuid}"
            raise Refused("card-too-full", what, fix=fix)
        size = LARGEST_BYTES
        while size >= SMALLEST_BYTES:
            # one page more than asked stays free: an allocation may take one for its page table
            if free - size < leave_bytes + SMALLEST_BYTES or not self._allocate(size):
                size //= 2
            free = self.free_bytes()
        if abs(free - leave_bytes) > SLACK_BYTES:
            what = f"device {self.device} has {human(free)} free after {human(self.held_bytes)} were held"
            context = f"{human(leave_bytes)} should be left; somebody else takes or frees memory, or none can be had"
            raise DeviceUnusable("card-not-held", what, context=context, fix=f"nvidia-smi -i {self.uuid}")
        return Holding(device=self.device, uuid=self.uuid, held_bytes=self.held_bytes, free_bytes=free)

    def _allocate(self, size_bytes: int) -> bool:
        block = ctypes.c_uint64()
        code = self._driver.code("cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(size_bytes))
        if code == _OUT_OF_MEMORY:  # also when no hole is that large
            return False
        if code:
            what = f"cuMemAlloc_v2 of {human(size_bytes)} failed with {code}"
            raise DeviceUnusable("cuda-failed", what, fix=f"nvidia-smi -i {self.uuid}")
        self._blocks.append((block, size_bytes))
        return True

    def release(self) -> None:
        """Free everything and give the context back."""
        while self._blocks:
            block, _ = self._blocks.pop()
            self._driver("cuMemFree_v2", block)
        self._driver("cuDevicePrimaryCtxRelease_v2", self._handle)


# ------------------------------------------------------------------------------------------------------ command


def hold_until_closed(device: str, leave_bytes: int, library: str) -> None:
    """Hold, tell it on stdout, wait for the end of stdin, free."""
    card = Card(Driver(library), device)
    try:
        print(json.dumps(asdict(card.hold(leave_bytes))), flush=True)
        while sys.stdin.buffer.read(4096):
            pass
    finally:
        card.release()


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise SystemExit(0)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 after holding, or that of the refusal with its lines on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", required=True, help="UUID, or index as nvidia-smi counts")
    parser.add_argument("--leave", required=True, help="what stays free: 24GiB, 8192MiB or bytes")
    parser.add_argument("--library", default=LIBRARY, help="the CUDA driver")
    args = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    try:
        hold_until_closed(args.device, _size(args.leave), args.library)
    except LauncherError as error:
        lines = (f"error[{error.reference}]: {error.message}", error.context, f"fix: {error.fix}")
        print(*filter(None, lines), sep="\n", file=sys.stderr)
        return error.exit_code
    return 0


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as e:
        raise UsageError("size-invalid", f"--leave: {e}", fix="--leave 24GiB") from e


if __name__ == "__main__":
    sys.exit(main())
