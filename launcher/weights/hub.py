"""Fetches what a slug names from Hugging Face: shards, drafter, projector; resumed, hashed, counted honestly.

    list the repository -> pick files -> are they here? -> disk gate -> download -> check

HF_ENDPOINT and HF_TOKEN are read as Hugging Face reads them; the token goes to the endpoint's own host only.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import quote

from launcher.errors import DownloadFailed, ModelUnreadable
from launcher.facts import fetch, paths
from launcher.facts.fetch import Progress, quiet
from launcher.structs import ModelRef, Slug
from launcher.units import human
from launcher.weights.find import find_model, shard_names


class Check(StrEnum):
    """What the hash of a file says. UNPUBLISHED: the repository gives none, only the size was compared."""

    VERIFIED = "verified"
    UNPUBLISHED = "unpublished"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """One file of a repository; sha256 is None where the repository publishes none."""

    path: str
    size_bytes: int
    sha256: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupFile:
    """One file after `setup`: where it lies, whether this run fetched it, what its hash says."""

    path: str
    size_bytes: int
    sha256: str
    check: Check
    fetched: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupResult:
    """What `setup` did. A file that fails its hash is no result but an error."""

    slug: str
    repo: str
    files: tuple[SetupFile, ...]

    def count(self, check: Check) -> int:
        """Files with that verdict."""
        return sum(f.check == check for f in self.files)

    @property
    def fetched_bytes(self) -> int:
        """Size of the files that this run brought."""
        return sum(f.size_bytes for f in self.files if f.fetched)


def setup(slug: Slug, *, progress: Progress = quiet, verify_only: bool = False) -> SetupResult:
    """Bring every file of the slug to this machine and check it; verify_only checks what is here and fetches nothing.

    progress  stages `download NAME` and `check NAME`, in bytes
    Raises DownloadFailed (model-has-no-repo, repo-unreadable, repo-file-missing, disk-space and those of
    facts/fetch.py), ModelUnreadable (model-missing, with verify_only), Locked (download-locked).
    """
    again = f"launcher setup {slug.name}"
    if not slug.model.repo:
        raise _no_repo(slug)
    listed = list_repo(slug.model.repo, again=again)
    jobs = [(far, _place(slug, near, far)) for near, far in _wanted(slug, listed, again)]
    absent = [(far, path) for far, path in jobs if not _whole(path, far)]
    if absent and verify_only:
        names = "\n".join(f"{path}  {human(far.size_bytes)}" for far, path in absent)
        what = f"{len(absent)} of {len(jobs)} files are not here or not whole"
        raise ModelUnreadable("model-missing", what, context=names, fix=again)
    _disk_gate(absent, again)
    files = tuple(_bring(slug.model.repo, far, path, again, progress) for far, path in jobs)
    bad = [f for f in files if f.check == Check.FAILED]
    if bad:
        names = shlex.join(f.path for f in bad)
        lines = [f"{f.path}: sha256 {f.sha256} is not the published one" for f in bad]
        what = f"{len(bad)} of {len(files)} files have the right size but other content than was published"
        raise DownloadFailed("hash-mismatch", what, context="\n".join(lines), fix=f"rm {names}; {again}")
    return SetupResult(slug=slug.name, repo=slug.model.repo, files=files)


def list_repo(repo: str, *, again: str) -> dict[str, RemoteFile]:
    """Every file of a repository's main branch, by path. Raises DownloadFailed (repo-unreadable, and get_page's)."""
    url: str | None = f"{endpoint()}/api/models/{quote(repo)}/tree/main?recursive=true"
    found: dict[str, RemoteFile] = {}
    while url:
        ours = url.startswith(f"{endpoint()}/")
        page = fetch.get_page(url, again=again, accept="application/json", token=_token() if ours else None)
        try:
            for row in json.loads(page.text):
                if row["type"] == "file":
                    lfs = row.get("lfs") or {}
                    size = int(lfs.get("size", row["size"]))
                    found[row["path"]] = RemoteFile(path=row["path"], size_bytes=size, sha256=lfs.get("oid"))
        except (ValueError, KeyError, TypeError, AttributeError):
            what = f"{fetch.shown(url)} does not answer with a list of files"
            raise DownloadFailed("repo-unreadable", what, fix=f"HF_ENDPOINT=https://huggingface.co {again}") from None
        url = page.next_url
    return found


def endpoint() -> str:
    """HF_ENDPOINT without a final slash, else huggingface.co."""
    return (os.environ.get("HF_ENDPOINT", "").strip() or "https://huggingface.co").rstrip("/")


def _token() -> str | None:
    return os.environ.get("HF_TOKEN", "").strip() or None


def _no_repo(slug: Slug) -> DownloadFailed:
    folder = paths.model_dirs()[0] / (slug.model.dir or "")
    if slug.name.startswith("demo/"):
        what = f"{slug.name} is downloaded from nowhere: its model is made here, from a small one"
        return DownloadFailed("model-has-no-repo", what, fix=f"python scripts/make_demo_model.py {folder}")
    what = f"{slug.name} names no repository to fetch {slug.model.file} from"
    return DownloadFailed(
        "model-has-no-repo",
        what,
        fix=f"${{EDITOR:-vi}} {shlex.quote(slug.path)}     # repo: OWNER/NAME, or fill {folder}",
    )


def _wanted(slug: Slug, listed: Mapping[str, RemoteFile], again: str) -> list[tuple[str, RemoteFile]]:
    """(name below the model's folder, file of the repository) of all that the slug loads."""
    names = [(n, n) for n in shard_names(slug.model.file)]
    if slug.drafter:
        names.append((slug.drafter.file, slug.drafter.remote or slug.drafter.file))
    if slug.mmproj:
        names.append((slug.mmproj, slug.mmproj))
    missing = [far for _, far in names if far not in listed]
    if missing:
        near = dict.fromkeys(c for m in missing for c in difflib.get_close_matches(m, listed, n=3, cutoff=0.5))
        raise DownloadFailed(
            "repo-file-missing",
            f"{slug.model.repo} holds no {', no '.join(missing)}",
            context="nearest: " + ", ".join(near) if near else f"it holds {len(listed)} other files",
            fix=f"${{EDITOR:-vi}} {shlex.quote(slug.path)}     # correct the names, then: {again}",
        )
    return [(near, listed[far]) for near, far in names]


def _place(slug: Slug, name: str, far: RemoteFile) -> Path:
    """Where the file lies, or will lie: one folder for all shards of a set, since the engine looks nowhere else."""
    shards = shard_names(name)
    ref = ModelRef(file=shards[0], dir=slug.model.dir, repo=slug.model.repo)
    try:
        first = find_model(ref, size_bytes=None if len(shards) > 1 else far.size_bytes)
    except ModelUnreadable:
        first = None
    inside = [d / (slug.model.dir or "") / name for d in paths.model_dirs()]
    if first is not None:
        there = first.parent / Path(name).name
        if there in inside or all((first.parent / Path(s).name).is_file() for s in shards):
            return there
    return next((p for p in inside if p.parent.is_dir()), inside[0])


def _whole(path: Path, far: RemoteFile) -> bool:
    return path.is_file() and path.stat().st_size == far.size_bytes


def _disk_gate(absent: list[tuple[RemoteFile, Path]], again: str) -> None:
    """Before the first byte: what is still to come must fit, folder by folder of the same disk."""
    needed: dict[int, int] = {}
    where: dict[int, Path] = {}
    for far, path in absent:
        folder = next(p for p in path.parents if p.exists())
        part = path.with_name(path.name + ".part")
        disk = folder.stat().st_dev
        needed[disk] = needed.get(disk, 0) + far.size_bytes - (part.stat().st_size if part.exists() else 0)
        where[disk] = folder
    for disk, size in needed.items():
        free = shutil.disk_usage(where[disk]).free
        if size > free:
            what = f"{human(size)} are to be fetched, {human(free)} are free: short by {human(size - free)}"
            fix = f"MODEL_DIR=/path/on/a/bigger/disk {again}"
            raise DownloadFailed("disk-space", what, context=str(where[disk]), fix=fix)


def _bring(repo: str, far: RemoteFile, path: Path, again: str, progress: Progress) -> SetupFile:
    fetched = not _whole(path, far)
    if fetched:
        url = f"{endpoint()}/{quote(repo)}/resolve/main/{quote(far.path)}"
        real = fetch.download(
            url,
            path,
            again=again,
            size_bytes=far.size_bytes,
            sha256=far.sha256,
            token=_token(),
            stage=f"download {path.name}",
            progress=progress,
        )
        _remember_hash(path, real)
    else:
        real = _hash(path, progress)
    check = Check.UNPUBLISHED if far.sha256 is None else Check.VERIFIED if real == far.sha256 else Check.FAILED
    return SetupFile(path=str(path), size_bytes=far.size_bytes, sha256=real, check=check, fetched=fetched)


# ------------------------------------------------------------------------------- hashes read before


def _hash(path: Path, progress: Progress) -> str:
    """sha256 of a file that is here; read once for as long as size, time and inode stay the same."""
    try:
        known = json.loads(_note(path).read_text(encoding="utf-8"))
        if known["stamp"] == _stamp(path):
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    real = fetch.sha256_of(path, stage=f"check {path.name}", progress=progress)
    _remember_hash(path, real)
    return real


def _remember_hash(path: Path, sha256: str) -> None:
    note = _note(path)
    note.parent.mkdir(parents=True, exist_ok=True)
    partial = note.with_name(note.name + ".tmp")
    partial.write_text(json.dumps({"path": str(path), "stamp": _stamp(path), "sha256": sha256}), encoding="utf-8")
    partial.replace(note)


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _note(path: Path) -> Path:
    return paths.cache_dir() / "hashes" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
