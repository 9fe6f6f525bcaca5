"""Where links lead, and whether they lead there inside of a container as well. Reads links, never writes.

In the Hugging Face cache a model file is a link to `../../blobs/...`: a mount that cuts between the two leaves the
container with links to nothing. Everything here works on names as they were given, since the name of a shard says
which one it is and the blob's does not.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from launcher.structs import Mount

_MOST_HOPS = 40  # the kernel's own limit (MAXSYMLINKS)


def mounts_for(models: Iterable[str], others: Iterable[str] = ()) -> tuple[Mount, ...]:
    """Read-only mounts in which every model file opens by the name it has here, links included.

    models  absolute paths; the folder of each is mounted under its own name, and the folder of each link's target
            where the link will look for it inside
    others  files that are mounted alone, under the name they have here: templates, key files
    """
    found: dict[str, str] = {}
    for path in models:
        for outside, inside in _hops(path):
            found.setdefault(os.path.dirname(inside), os.path.dirname(outside))  # noqa: PTH120 - text
    folders = tuple(Mount(source=os.path.realpath(s), target=t) for t, s in sorted(found.items()))
    kept = tuple(m for m in folders if not any(_covers(big, m) for big in folders if big != m))
    alone = tuple(Mount(source=os.path.realpath(p), target=p) for p in dict.fromkeys(others))
    return kept + tuple(m for m in alone if resolved(m.target, kept) != m.source)


def resolved(path: str, mounts: Iterable[Mount]) -> str | None:
    """The file of this machine that `path` opens inside of a container with these mounts; None when it opens none.

    Follows links as the kernel would inside: an absolute one from the top, another from the folder that it lies in.
    """
    there = tuple(mounts)
    parts, done = [p for p in path.split("/") if p], ""
    for _ in range(_MOST_HOPS):
        jumped = False
        for at, part in enumerate(parts):
            if part in (".", ".."):
                done = os.path.dirname(done) if part == ".." else done  # noqa: PTH120 - text
                done = "" if done == "/" else done
                continue
            inside = f"{done}/{part}"
            if not any(inside == m.target or m.target.startswith(inside + "/") for m in there):
                outside = _outside(inside, there)
                if outside is None or not os.path.lexists(outside):
                    return None
                if os.path.islink(outside):  # noqa: PTH114 - never raises
                    text = os.readlink(outside)  # noqa: PTH115 - text
                    done = "" if text.startswith("/") else done
                    parts = [p for p in text.split("/") if p] + parts[at + 1 :]
                    jumped = True
                    break
            done = inside
        if not jumped:
            outside = _outside(done, there)
            return os.path.realpath(outside) if outside is not None and os.path.exists(outside) else None  # noqa: PTH110
    return None


def missing_points(mounts: Iterable[Mount]) -> tuple[Mount, ...]:
    """Mounts that lie inside of another read-only one where there is nothing to mount over: no runtime can make it."""
    there = tuple(mounts)
    lost = []
    for m in there:
        outer = tuple(o for o in there if o != m and m.target.startswith(o.target.rstrip("/") + "/"))
        outside = _outside(m.target, outer)
        if outside is not None and not os.path.exists(outside):  # noqa: PTH110 - never raises
            lost.append(m)
    return tuple(lost)


def _hops(path: str) -> list[tuple[str, str]]:
    """(outside, inside) of a file and of every link on the way to what it is: where it lies, where it is looked for."""
    outside = inside = os.path.abspath(path)  # noqa: PTH100 - not resolve(): the name must stay
    hops = [(outside, inside)]
    for _ in range(_MOST_HOPS):
        try:
            if not stat.S_ISLNK(os.lstat(outside).st_mode):  # noqa: PTH116
                break
            text = os.readlink(outside)  # noqa: PTH115
        except OSError:
            break
        folder = os.path.realpath(os.path.dirname(outside))  # noqa: PTH120
        outside = os.path.normpath(os.path.join(folder, text))  # noqa: PTH118
        inside = os.path.normpath(os.path.join(os.path.dirname(inside), text))  # noqa: PTH118, PTH120
        hops.append((outside, inside))
    return hops


def _outside(inside: str, mounts: tuple[Mount, ...]) -> str | None:
    """The path of this machine behind one inside, by the innermost mount; None where nothing is mounted."""
    holding = [m for m in mounts if inside == m.target or inside.startswith(m.target.rstrip("/") + "/")]
    if not holding:
        return None
    best = max(holding, key=lambda m: len(m.target))
    return best.source + inside[len(best.target.rstrip("/")) :]


def _covers(big: Mount, small: Mount) -> bool:
    """Whether `small` is a part of `big`, at the same place outside and inside."""
    inside = small.target.removeprefix(big.target.rstrip("/") + "/")
    return inside != small.target and big.source.rstrip("/") + "/" + inside == small.source
