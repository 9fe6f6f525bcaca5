"""Why an engine ended, read from its log and exit: pure, a table of what its own messages mean.

The message that users see is often a disguise: out of memory comes as a wrong layer device, pinned host memory
as CUDA out of memory. First match wins, so the specific stand before the general.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.structs import Plan
from launcher.units import MIB, gib, mib


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What it means, and the edit or command that helps. `key` is stable, for tests and documents."""

    key: str
    text: str
    fix: str


# (key, pattern over the log's end, meaning, fix); {1} and {2} are groups, {target} the plan's target.
_TABLE: tuple[tuple[str, str, str, str], ...] = (
    (
        "unknown-flag",
        r"error: invalid argument: (\S+)",
        "this engine does not know {1}",
        "launcher engine list     # one that knows it, or take {1} out of extra_args",
    ),
    (
        "unknown-buffer",
        r"unknown buffer type",
        "a rule names a device that this engine does not have",
        "launcher plan {target}     # the devices have changed since the plan",
    ),
    (
        "bad-value",
        r'error while handling argument "([^"]+)": ([^\n]*)',
        "the engine refuses the value of {1}: {2}",
        "launcher plan {target} --json shows the command line",
    ),
    (
        "port-busy",
        r"couldn't bind HTTP server socket, hostname: (\S+), port: (\d+)|[Aa]ddress already in use",
        "the port is taken",
        "--port N     # a free one",
    ),
    (
        "pinned-memory",
        r"cudaMallocHost|cudaHostAlloc|cudaHostRegister|[Ff]ailed to allocate [^\n]*pinned"
        r"|(?:failed|unable) to allocate \S*_Host buffer",
        "page-locked host memory could not be had (this is RAM, not card memory)",
        "launcher plan {target} --load-mode mmap     # under WSL: raise memory= in .wslconfig",
    ),
    (
        "device-memory",
        r"on device (\d+): cudaMalloc failed: out of memory",
        "out of memory on CUDA{1}",
        "launcher plan {target} --reserve CUDA{1}=1GiB",
    ),
    (
        "device-memory",
        r"failed to allocate (?!CPU)(\S+) buffer of size|unable to allocate (?!CPU)(\S+) buffer",
        "out of memory on {1}{2}",
        "launcher plan {target} --margin 2GiB",
    ),
    (
        # The pool that grows with depth (cuMemCreate) and a cuBLAS handle that is made with the first large batch are
        # in no buffer line; both name the device one line below (ggml-cuda.cu: ggml_cuda_error, b11434).
        "device-memory",
        r"(?:CUDA|HIP|MUSA) error: (?:out of memory|the resource allocation failed)[^\n]*\n[^\n]*current device: (\d+)",
        "out of memory on CUDA{1}",
        "launcher plan {target} --reserve CUDA{1}=1GiB",
    ),
    (
        "device-memory",
        r"(?:CUDA|HIP|MUSA) error: (?:out of memory|the resource allocation failed)|CUBLAS_STATUS_ALLOC_FAILED"
        r"|CUDA_ERROR_OUT_OF_MEMORY|ErrorOutOfDeviceMemory",
        "out of memory on a card",
        "launcher plan {target} --margin 2GiB",
    ),
    (
        "host-memory",
        r"unable to allocate CPU\S* buffer|failed to allocate CPU\S* buffer|std::bad_alloc|Cannot allocate memory"
        r"|oom_kill",
        "out of host memory",
        "launcher preflight {target}     # shows the sum",
    ),
    (
        "device-memory-disguised",
        r"assigned to device CPU but[^\n]*fused Gated Delta Net|fused Gated Delta Net[^\n]*assigned to device",
        "probably out of card memory: the engine moved a layer to the CPU",
        "launcher plan {target} --margin 2GiB",
    ),
    (
        "incomplete-model",
        r"data is not within the file bounds|corrupted model|wrong number of tensors",
        "the model file is damaged or incomplete",
        "launcher setup {target} --verify-only",
    ),
    (
        "unknown-architecture",
        r"unknown model architecture: '([^']+)'",
        "this engine does not know the architecture {1}",
        "launcher engine install, or --engine PATH for a newer llama-server",
    ),
    (
        "rpc-lost",
        r"Remote RPC server crashed[^\n]*|Failed to connect to ([^\n]+)|the RPC server on (\S+) had ended",
        "a remote device is gone {1}{2}",
        "launcher status, then start it again",
    ),
    (
        "missing-library",
        r"error while loading shared libraries: (\S+):",
        "the engine misses the library {1}",
        "launcher engine install, or --engine PATH for one that runs here",
    ),
    (
        "assertion",
        r"(GGML_ASSERT\([^\n]*|GGML_ABORT[^\n]*|\S+:\d+: fatal error[^\n]*)",
        "the engine failed a check of its own: {1}",
        "launcher logs -n 200",
    ),
    (
        "device-error",
        r"((?:CUDA|HIP|MUSA) error: [^\n]*)",
        "{1}",
        "sudo dmesg | tail     # the driver's own words; then launcher plan {target}",
    ),
    (
        "load-failed",
        r"error loading model: ([^\n]*)|failed to load model, '([^']+)'",
        "the model does not load: {1}{2}",
        "launcher logs -n 200",
    ),
)
_SIGNALS: dict[str, tuple[str, str, str]] = {
    "SIGILL": (
        "illegal-instruction",
        "the engine was built for another processor (illegal instruction)",
        "launcher engine install     # builds one for this machine",
    ),
    "SIGKILL": (
        "host-memory",
        "the kernel killed it: host RAM (nothing else sends SIGKILL unasked)",
        "launcher preflight {target}     # shows the sum",
    ),
    "SIGBUS": (
        "file-changed",
        "a mapped file got shorter or its disk failed (bus error)",
        "launcher setup {target} --verify-only",
    ),
}
# A shell, or a container, in between says a signal as 128 + its number.
_BEHIND_A_SHELL = {128 + number: name for number, name in ((4, "SIGILL"), (7, "SIGBUS"), (9, "SIGKILL"))}
# A disguise is more likely the nearer the plan came to the card's end.
_NEAR_BYTES = 512 * MIB
_ABOUT_CARDS = frozenset({"device-memory", "device-memory-disguised"})


def known_cause(log: str, exit_code: int | None, signal: str | None, plan: Plan | None = None) -> Cause | None:
    """The cause of a failure, None when its messages are not known.

    log        the end of the log file
    exit_code  None when it was killed or nobody saw; `signal` is the name then
    plan       names the card with the least headroom, and what host memory was needed
    """
    target = plan.target if plan else "TARGET"
    if exit_code is not None and signal is None:
        signal = _BEHIND_A_SHELL.get(exit_code)
    if signal in _SIGNALS:
        key, text, fix = _SIGNALS[signal]
        if key == "host-memory" and plan:
            text += f"; planned {gib(plan.host.required_bytes)} of {gib(plan.host.available_bytes)} GiB"
        return Cause(key=key, text=text, fix=fix.format(target=target))
    for key, pattern, text, fix in _TABLE:
        match = re.search(pattern, log)
        if match is None:
            continue
        groups = [group or "" for group in match.groups()] + ["", ""]
        words = {"target": target}
        meaning = text.format("", *groups, **words).strip()
        if key in _ABOUT_CARDS:
            meaning += _tightest(plan)
        return Cause(key=key, text=meaning, fix=fix.format("", *groups, **words))
    if exit_code == 127:
        return Cause(key="missing-library", text="a library or the engine is missing", fix="launcher engine install")
    return None


def _tightest(plan: Plan | None) -> str:
    if plan is None or not plan.devices:
        return ""
    least = min(plan.devices, key=lambda d: d.headroom_bytes)
    if least.headroom_bytes >= _NEAR_BYTES:
        return ""
    return f" (planned headroom of {least.device.name}: {mib(least.headroom_bytes)} MiB)"
