"""Which files make up a model, and what a file is that is no GGUF.

Shard sets are found by the names of the files as given, never by what links lead to: in a Hugging Face cache the
names are links, and the blobs behind them carry no shard number. Nothing here reads past a file's first bytes.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from pathlib import Path

from launcher.errors import ModelUnreadable
from launcher.units import human

SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

_BYTE_SPLIT = re.compile(r"(?P<whole>.+\.gguf)(?:\.part\d+of(?P<count>\d+)|-split-[a-z])", re.DOTALL)
_HUB_LINK = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/([^/]+)/(.+)", re.DOTALL)
_BLOB_URL = re.compile(rb"https://huggingface\.co/([\w.-]+/[\w.-]+)/blob/([\w./-]+\.gguf)")
_POINTER_SIZE = re.compile(rb"^size (\d{1,18})$", re.MULTILINE)
_NAMES_MAX = 200  # of missing files in one message


def find_shards(path: str | Path) -> tuple[Path, ...]:
    """Files of the model that `path` names (any shard, a single file, or a folder with one model), first shard first.

    All of them exist. Raises ModelUnreadable: nothing there, a folder without or with several models, missing
    shards (all by name), a file cut with `split`.
    """
    path = Path(path).absolute()  # keeps links and `..` as they are
    status = _status(path)
    if status is not None and stat.S_ISDIR(status.st_mode):
        path = _only_model_of(path)
    _refuse_byte_split(path)
    m = SHARD_NAME.fullmatch(path.name)
    if m is None:
        if _status(path) is None:
            raise _missing(path)
        return (path,)
    number, count = int(m["no"]), int(m["count"])
    if not 1 <= number <= count:
        right = f"{m['stem']}-00001-of-{count:05d}.gguf" if count else f"{m['stem']}.gguf"
        raise misnamed(path, f"{path.name} calls itself number {number} of {count}", right)
    paths = tuple(path.with_name(f"{m['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1))
    lost = tuple(p for p in paths if _status(p) is None)
    if len(lost) == count:
        raise _missing(path)
    if lost:
        raise _shards_missing(lost, count)
    return paths


def _status(path: Path) -> os.stat_result | None:
    """Of what the path leads to; None when nothing is there."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        raise unreadable(path, e.strerror or str(e)) from e
    except ValueError as e:  # a NUL character in the path
        raise unreadable(path, str(e)) from e


def _only_model_of(folder: Path) -> Path:
    """A file of the one model in a folder; projectors (`mmproj`) lie beside models and are none."""
    try:
        entries = sorted(folder.iterdir())
        files = [p for p in entries if not p.is_dir()]
        rooms = [p for p in entries if p.is_dir() and any(p.glob("*.gguf"))]
    except OSError as e:
        raise unreadable(folder, e.strerror or str(e)) from e
    models: dict[str, Path] = {}
    for p in files:
        if p.suffix == ".gguf" and "mmproj" not in p.name.lower():
            m = SHARD_NAME.fullmatch(p.name)
            models.setdefault(f"{m['stem']} of {m['count']}" if m else p.name, p)
    if len(models) == 1:
        return next(iter(models.values()))
    if models:
        raise ModelUnreadable(
            "folder-several-models",
            f"{folder} holds {len(models)} models, say which",
            context="\n".join(p.name for p in models.values()),
            fix=f"launcher plan {shlex.quote(str(next(iter(models.values()))))}     # or another of them",
        )
    for p in files:
        _refuse_byte_split(p)
    raise ModelUnreadable(
        "folder-no-model",
        f"{folder} holds no GGUF model (0 of {len(files)} files)",
        context="\n".join(f"there is one in {p}" for p in rooms),
        fix=f"launcher plan {shlex.quote(str(rooms[0]))}" if rooms else fetch_again(folder),
    )


# -------------------------------------------------------------------------------------------- refusals


def fetch_again(path: Path) -> str:
    """The command that brings a file again; exact where the path lies in a Hugging Face cache."""
    m = _HUB_LINK.search(str(path))
    if m:
        url = f"https://huggingface.co/{m[1]}/{m[2]}/resolve/{m[3]}/{m[4]}"
        return f"launcher setup {shlex.quote(url)}"
    return "launcher setup TARGET     # the slug it came from; what is whole is not fetched again"


def unreadable(path: Path, why: str) -> ModelUnreadable:
    """The operating system does not let us read it, or it is no regular file."""
    return ModelUnreadable(
        "model-unreadable",
        f"cannot read {_printable(path)}: {why}",
        fix=f"ls -lL {shlex.quote(_printable(path))}     # make it a file that {_user()} can read",
    )


def misnamed(path: Path, why: str, name: str) -> ModelUnreadable:
    """A shard whose name does not say which one it is; `name` would."""
    if path.parent.name == "blobs":
        fix = f"give the link that leads to it: find {shlex.quote(str(path.parent.parent / 'snapshots'))} -lname "
        fix += shlex.quote(f"*{path.name}")
    else:
        fix = f"mv {shlex.quote(str(path))} {shlex.quote(str(path.with_name(name)))}"
    return ModelUnreadable("shard-name", why, fix=fix)


def not_gguf(path: Path, head: bytes) -> ModelUnreadable:
    """Says what the file is instead, by its first bytes (up to 64 KiB of them)."""
    url = f"https://huggingface.co/OWNER/REPO/resolve/main/{path.name}"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"<"):
        page = _BLOB_URL.search(head)
        if page:
            url = f"https://huggingface.co/{page[1].decode()}/resolve/{page[2].decode()}"
        return ModelUnreadable(
            "html-page",
            f"{path.name} is an HTML page, not a model: a page's address (/blob/) was downloaded",
            fix=f"curl -fL -o {shlex.quote(str(path))} {shlex.quote(url)}",
        )
    if text.startswith(b"version https://git-lfs"):
        size = _POINTER_SIZE.search(head)
        of = f" of {human(int(size[1]))}" if size else ""
        return ModelUnreadable(
            "lfs-pointer",
            f"{path.name} is a Git-LFS pointer, not the model{of}",
            fix=f"git -C {shlex.quote(str(path.parent))} lfs pull --include {shlex.quote(path.name)}"
            f"     # or curl -fL -o {shlex.quote(str(path))} {shlex.quote(url)}",
        )
    if not head.strip(b"\0"):
        seen = "only zeros: a download that reserved its space and never arrived"
    elif text.startswith((b"{", b"Entry not found", b"Invalid ", b"Access to")):
        seen = f"a server's answer: {text[:80]!r}"
    elif head[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):
        seen = f"{head[:4]!r}: a model format older than GGUF"
    else:
        seen = repr(head[:4])
    return ModelUnreadable(
        "not-gguf",
        f"{path.name} does not start with the letters GGUF",
        context=f"it starts with {seen}",
        fix=fetch_again(path),
    )


def _refuse_byte_split(path: Path) -> None:
    m = _BYTE_SPLIT.fullmatch(path.name)
    if m is None:
        return
    whole = path.with_name(m["whole"])
    if m["count"] and int(m["count"]) <= 99:
        parts = [f"{whole.name}.part{i}of{m['count']}" for i in range(1, int(m["count"]) + 1)]
        pieces = " ".join(shlex.quote(str(path.with_name(p))) for p in parts)
    else:
        pieces = shlex.quote(str(whole)) + ("-split-?" if not m["count"] else ".part*")
    raise ModelUnreadable(
        "byte-split",
        f"{path.name} is a piece of a file that was cut by bytes: the pieces must be joined first",
        fix=f"cat {pieces} > {shlex.quote(str(whole))}",
    )


def _missing(path: Path) -> ModelUnreadable:
    context = ""
    if path.is_symlink():
        context = f"it is a link to {path.readlink()}, which is not there"
    else:
        half = [p for p in (path.with_name(path.name + end) for end in (".part", ".incomplete")) if p.exists()]
        if half:
            context = f"{half[0].name} is there ({human(half[0].stat().st_size)}): a download that did not end"
    return ModelUnreadable("model-missing", f"{path} does not exist", context=context, fix=fetch_again(path))


def _shards_missing(lost: tuple[Path, ...], count: int) -> ModelUnreadable:
    names = [p.name + (" (a link to nothing)" if p.is_symlink() else "") for p in lost[:_NAMES_MAX]]
    if len(lost) > _NAMES_MAX:
        names.append(f"and {len(lost) - _NAMES_MAX} more")
    return ModelUnreadable(
        "shards-missing",
        f"{len(lost)} of {count} shards are missing in {lost[0].parent}",
        context="\n".join(names),
        fix=fetch_again(lost[0]),
    )


def _printable(path: Path) -> str:
    return str(path).replace("\0", "\\0")


def _user() -> str:
    return os.environ.get("USER") or f"user {os.getuid()}"
