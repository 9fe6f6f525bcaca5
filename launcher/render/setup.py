"""`setup`: bars while it fetches, then what was verified and what was not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from launcher.render import document, out
from launcher.render.progress import Stages
from launcher.units import human

_KEYS = ("path", "size_bytes", "sha256", "check", "fetched")


class _File(Protocol):
    @property
    def path(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def check(self) -> Any: ...
    @property
    def fetched(self) -> bool: ...


def progress(*, as_json: bool = False) -> Stages:
    """Where the download reports."""
    return Stages(silent=as_json)


def show(target: str, files: Sequence[_File], *, as_json: bool = False) -> int:
    """Print every file with what its hash says: verified and unpublished are counted apart."""
    if as_json:
        out.document(document.setup_document(target, [{k: getattr(f, k) for k in _KEYS} for f in files]))
        return 0
    rows = [["file", "size", "hash", ""]]
    rows += [[f.path, human(f.size_bytes), str(f.check), "fetched" if f.fetched else "was here"] for f in files]
    verified = sum(str(f.check) == "verified" for f in files)
    out.show(out.table(rows, left=frozenset({0, 2, 3})))
    out.show([f"{verified} of {len(files)} files match a published hash; next: launcher plan {target}"])
    return 0
