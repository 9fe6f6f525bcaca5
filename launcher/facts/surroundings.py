"""What surrounds a launch beside memory and cards: file systems, limits of the process, disks, engine settings.

Everything hangs under `root`, as in `host.py`. Reads only; never raises.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

# As /proc/self/mountinfo names them. 9p and drvfs are Windows drives under WSL, or folders of a virtual machine's host.
_NETWORK = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "drvfs", "afs", "ceph", "glusterfs", "lustre", "beegfs", "ncpfs",
})  # fmt: skip
_FUSE_NETWORK = re.compile(r"^fuse\.(sshfs|rclone|s3fs|glusterfs|ceph-fuse|davfs2?|juicefs|gcsfuse|smbnetfs|goofys)")
_CAP_IPC_LOCK = 14  # linux/capability.h


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """The file system that holds a path. network: reads cross a wire, or leave a virtual machine."""

    kind: str
    mount_point: str
    source: str

    @property
    def network(self) -> bool:
        """Whether it is known to be slow by its kind."""
        return self.kind in _NETWORK or _FUSE_NETWORK.match(self.kind) is not None

    @property
    def windows_drive(self) -> bool:
        """A drive of Windows under WSL: `C:\\` as 9p at /mnt/c, or drvfs."""
        return self.kind == "drvfs" or (self.kind == "9p" and re.match(r"^([A-Za-z]:|drvfs)", self.source) is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the gates look at beside the plan.

    memlock_bytes       what this process may lock (RLIMIT_MEMLOCK, soft); None: without limit, or by capability
    memlock_most_bytes  up to where it may raise that itself (hard); None: without limit
    state_free_bytes    room where records and logs go; None where nobody says
    file_systems        of the files asked about, by path; files whose file system is not known are left out
    engine_variables    names of the environment that the engine would read and that it is not given
    user_config         the engine's config.ini of this user, None when there is none
    cuda_order          CUDA_DEVICE_ORDER of the environment; empty when it is not set
    cuda_visible        CUDA_VISIBLE_DEVICES of the environment; empty when it is not set
    """

    memlock_bytes: int | None = None
    memlock_most_bytes: int | None = None
    state_free_bytes: int | None = None
    file_systems: Mapping[str, FileSystem]
    engine_variables: tuple[str, ...] = ()
    user_config: Path | None = None
    cuda_order: str = ""
    cuda_visible: str = ""


def read_surroundings(
    env: Mapping[str, str], *, files: Iterable[str], state: Path, root: Path = Path("/")
) -> Surroundings:
    """Look around.

    env    the environment that the launcher was started with
    files  paths of the models that will be read
    state  where records and logs go; the nearest folder that exists is asked
    """
    soft, hard = memlock_limits(root)
    found = {path: system for path in files if (system := file_system(Path(path), root)) is not None}
    return Surroundings(
        memlock_bytes=soft,
        memlock_most_bytes=hard,
        state_free_bytes=_free_bytes(state),
        file_systems=found,
        engine_variables=tuple(sorted(n for n in env if n.startswith("LLAMA_ARG_") and env[n].strip())),
        user_config=_user_config(env),
        cuda_order=env.get("CUDA_DEVICE_ORDER", "").strip(),
        cuda_visible=env.get("CUDA_VISIBLE_DEVICES", "").strip(),
    )


def file_system(path: Path, root: Path = Path("/")) -> FileSystem | None:
    """The file system of a path (of what it points to, for a link); None when /proc does not say."""
    real = os.path.realpath(path)
    best: FileSystem | None = None
    for line in (_text(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 5 or len(tail) < 2:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        # A later mount at the same place lies over the earlier one.
        if inside and (best is None or len(point) >= len(best.mount_point)):
            best = FileSystem(kind=tail[0], mount_point=point, source=tail[1])
    return best


def memlock_limits(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """(soft, hard) RLIMIT_MEMLOCK in bytes; None is no limit, also for who has CAP_IPC_LOCK."""
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", _text(root / "proc/self/status") or "", re.M)
    if capabilities and int(capabilities[1], 16) >> _CAP_IPC_LOCK & 1:
        return None, None
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return tuple(None if n == resource.RLIM_INFINITY else n for n in (soft, hard))  # type: ignore[return-value]


def config_keys(path: Path) -> dict[str, str]:
    """`key = value` lines of an engine's config.ini, keys as flags without dashes; empty when it cannot be read."""
    found: dict[str, str] = {}
    for match in re.finditer(r"^[ \t]*([A-Za-z][\w-]*)[ \t]*=[ \t]*(.*?)[ \t]*$", _text(path) or "", re.M):
        key = match[1].replace("_", "-")
        found[key.lower().removeprefix("llama-arg-")] = match[2]
    return found


def _user_config(env: Mapping[str, str]) -> Path | None:
    """`${XDG_CONFIG_HOME:-~/.config}/llama.cpp/config.ini`, as the engine looks for it."""
    base = env.get("XDG_CONFIG_HOME") or (env["HOME"] + "/.config" if env.get("HOME") else "")
    path = Path(base) / "llama.cpp" / "config.ini"
    return path if base and os.path.isfile(path) else None  # noqa: PTH113 - never raises


def _free_bytes(folder: Path) -> int | None:
    try:
        there = next(p for p in (folder, *folder.parents) if p.exists())
        room = os.statvfs(there)
    except (OSError, StopIteration):
        return None
    return room.f_bavail * room.f_frsize


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
