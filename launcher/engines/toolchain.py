"""What a build needs on this machine: backend, compiler, cmake, ninja; and the name under which a build is kept."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import DeviceUnusable, UsageError
from launcher.facts import paths

BACKENDS = ("auto", "cpu", "cuda")

# Features that the compiler may use under -march=native. The kernel's own words in the same line (tsc_reliable, ...)
# change with every kernel and must not cause a rebuild.
_ISA = re.compile(
    r"^(mmx|sse|ssse|pni|avx|fma|f16c|bmi|abm|popcnt|movbe|movdir|adx|aes|vaes|pclmul|vpclmul|gfni|sha|amx|xsave|rdrand|"
    r"rdseed|cx16|clwb|clflush|fp|asimd|sve|sme|i8mm|bf16|dotprod|crc32|atomics|neon|vfp)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """`cpu` or `cuda`, and why. nvcc is set for cuda."""

    name: str
    why: str
    nvcc: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Executables of a build; env is added to the environment of each."""

    cmake: str
    ninja: str
    env: Mapping[str, str]


def choose_backend(asked: str = "auto") -> Backend:
    """CUDA when both nvcc and an NVIDIA driver are here, else CPU; or what was asked for.

    Raises UsageError (backend-unknown), DeviceUnusable (cuda-toolkit-missing).
    """
    if asked not in BACKENDS:
        what = f"no backend is called {asked!r}: {', '.join(BACKENDS)}"
        raise UsageError("backend-unknown", what, fix="launcher engine install --backend auto")
    if asked == "cpu":
        return Backend(name="cpu", why="asked for")
    nvcc, driver = _nvcc(), _nvidia_driver()
    if asked == "cuda":
        if nvcc is None:
            raise DeviceUnusable(
                "cuda-toolkit-missing",
                "a CUDA engine needs nvcc, which is neither in PATH nor in /usr/local/cuda/bin",
                fix=f"{_install_command('cuda')}   (or: launcher engine install --backend cpu)",
            )
        return Backend(name="cuda", why=f"asked for; {nvcc}", nvcc=nvcc)
    if nvcc and driver:
        return Backend(name="cuda", why=f"{nvcc} and an NVIDIA driver ({driver}) are here", nvcc=nvcc)
    if driver:
        return Backend(name="cpu", why=f"an NVIDIA driver is here ({driver}), but no nvcc to build CUDA code with")
    return Backend(name="cpu", why=f"{nvcc} is here, but no NVIDIA driver" if nvcc else "no nvcc and no NVIDIA driver")


def require_compiler() -> None:
    """A C and a C++ compiler, from CC and CXX or PATH. Raises DeviceUnusable (compiler-missing)."""
    for language, variable, names in (
        ("C++", "CXX", ("c++", "g++", "clang++")),
        ("C", "CC", ("cc", "gcc", "clang")),
    ):
        own = os.environ.get(variable, "").split()
        if not any(shutil.which(n) for n in (own[:1] or names)):
            raise DeviceUnusable(
                "compiler-missing",
                f"building the engine needs a {language} compiler; none of {', '.join(own[:1] or names)} is in PATH",
                context="an existing llama-server is used as it is: launcher engine use /path/to/llama-server",
                fix=_install_command("compiler"),
            )


def find_tools(backend: Backend, *, folder: Path | None = None) -> Tools:
    """cmake (3.14, for CUDA 3.18) and ninja from PATH, else from PyPI wheels in a private folder.

    Raises DeviceUnusable (build-tool-missing).
    """
    need = (3, 18) if backend.name == "cuda" else (3, 14)
    folder = folder or paths.cache_dir() / "build-tools"
    cmake, ninja = shutil.which("cmake"), shutil.which("ninja") or shutil.which("ninja-build")
    if cmake and _version(cmake) < need:
        cmake = None
    if ninja and _version(ninja) < (1, 8):
        ninja = None
    missing = [name for name, path in (("cmake", cmake), ("ninja", ninja)) if path is None]
    if any(_wheel_tool(folder, name) is None for name in missing):
        _pip_install(missing, folder)
    cmake = cmake or _wheel_tool(folder, "cmake")
    ninja = ninja or _wheel_tool(folder, "ninja")
    if not cmake or not ninja:
        raise _tool_missing(missing, f"the wheels in {folder} hold no program")
    return Tools(cmake=cmake, ninja=ninja, env={"NINJA_STATUS": "[%f/%t] "})


def cpu_key(cpuinfo: str | None = None) -> str:
    """Twelve hex digits for the instruction set that -march=native would use here."""
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            cpuinfo = ""
    line = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.M)
    words = sorted({w for w in (line.group(1).split() if line else ()) if _ISA.match(w)})
    return hashlib.sha256(" ".join([platform.machine(), *words]).encode()).hexdigest()[:12]


def _nvcc() -> str | None:
    own = os.environ.get("CUDACXX", "").strip()
    return shutil.which(own or "nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def _nvidia_driver() -> str | None:
    if Path("/proc/driver/nvidia/version").exists():
        return "/proc/driver/nvidia"
    try:
        ctypes.CDLL("libcuda.so.1")  # WSL has no /proc/driver/nvidia
    except OSError:
        return None
    return "libcuda.so.1"


def _version(program: str) -> tuple[int, ...]:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"(\d+)\.(\d+)", done.stdout)
    return (int(found.group(1)), int(found.group(2))) if found and done.returncode == 0 else ()


def _wheel_tool(folder: Path, name: str) -> str | None:
    # The wheel's bin/cmake is a Python script that needs the folder in its path; the program itself needs nothing.
    for path in (folder / name / "data" / "bin" / name, folder / "bin" / name):
        if path.is_file() and os.access(path, os.X_OK) and path.open("rb").read(4) == b"\x7fELF":
            return str(path)
    return None


def _pip_install(names: list[str], folder: Path) -> None:
    wanted = {"cmake": "cmake>=3.20,<5", "ninja": "ninja>=1.10"}
    args = ["install", "--quiet", "--target", str(folder), "--upgrade", *(wanted[n] for n in names)]
    pip = [sys.executable, "-m", "pip", *args, "--only-binary=:all:", "--disable-pip-version-check", "--retries=1"]
    uv = shutil.which("uv")
    reason = ""
    for command in (pip, [uv, "pip", *args, "--python", sys.executable] if uv else None):
        if command is None:
            continue
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        except subprocess.TimeoutExpired:
            reason = "the package index did not answer within 600 s"
            continue
        if done.returncode == 0:
            return
        reason = reason or (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    raise _tool_missing(names, reason)


def _tool_missing(names: list[str], reason: str) -> DeviceUnusable:
    return DeviceUnusable(
        "build-tool-missing",
        f"building the engine needs {' and '.join(names)}; not in PATH, and fetching from the package index failed",
        context=reason,
        fix=_install_command("tools"),
    )


_COMMANDS = {
    "apt": {
        "compiler": "sudo apt install g++",
        "tools": "sudo apt install cmake ninja-build",
        "cuda": "sudo apt install nvidia-cuda-toolkit",
    },
    "dnf": {
        "compiler": "sudo dnf install gcc-c++",
        "tools": "sudo dnf install cmake ninja-build",
        "cuda": "sudo dnf install cuda-toolkit",
    },
    "pacman": {
        "compiler": "sudo pacman -S gcc",
        "tools": "sudo pacman -S cmake ninja",
        "cuda": "sudo pacman -S cuda",
    },
    "zypper": {
        "compiler": "sudo zypper install gcc-c++",
        "tools": "sudo zypper install cmake ninja",
        "cuda": "sudo zypper install cuda-toolkit",
    },
    "apk": {
        "compiler": "sudo apk add g++ linux-headers",
        "tools": "sudo apk add cmake ninja",
        "cuda": "install the CUDA toolkit of NVIDIA",
    },
}


def _install_command(kind: str) -> str:
    """The package manager's line for this distribution; Debian's where it is unknown."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    words = {release.get("ID", ""), *release.get("ID_LIKE", "").split()}
    for manager, ids in (
        ("dnf", {"fedora", "rhel", "centos"}),
        ("pacman", {"arch"}),
        ("zypper", {"suse", "opensuse"}),
        ("apk", {"alpine"}),
    ):
        if words & ids:
            return _COMMANDS[manager][kind]
    return _COMMANDS["apt"][kind]
