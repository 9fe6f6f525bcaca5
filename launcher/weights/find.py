"""Finds model files that are already on this machine: model folders, the Hugging Face cache, LM Studio's folders.

Paths are never resolved: in the Hugging Face cache a file is a link to a blob without a name, and the name carries
`-00001-of-00005`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import ModelUnreadable
from launcher.facts import paths
from launcher.structs import ModelRef
from launcher.units import human

_DEPTH = 3
_SHARD = re.compile(r"^(?P<stem>.*)-(?P<no>\d{5})-of-(?P<of>\d{5})\.gguf$")


def find_model(ref: ModelRef, *, target: str | None = None, size_bytes: int | None = None) -> Path:
    """The file that a slug means: first where the slug says, then by name wherever models lie here.

    target      what `launcher setup` is to be told in the fix; else the file's repo or name
    size_bytes  only a file of this size counts, where it is known
    Raises ModelUnreadable (model-missing, model-ambiguous).
    """
    places = _exact(ref)
    for path in places:
        if _is_it(path, size_bytes):
            return path
    name = Path(ref.file).name
    for found in (_in_model_dirs(name), _in_hub(name, ref.repo), _in_lm_studio(name)):
        hits = [p for p in found if _is_it(p, size_bytes)]
        if len({p.stat().st_size for p in hits}) > 1:
            raise ModelUnreadable(
                "model-ambiguous",
                f"{len(hits)} files of different sizes are called {name}",
                context="\n".join(f"{p}  {human(p.stat().st_size)}" for p in hits),
                fix=f"export MODEL_DIR={shlex.quote(str(hits[0].parent))}     # or dir: under model: in the slug",
            )
        if hits:
            return hits[0]
    setup = f"launcher setup {target or ref.repo or Path(ref.file).stem}"
    if ref.repo is None and ref.dir == "demo":
        setup = "python scripts/make_demo_model.py"
    searched = [*(str(p) for p in places), *(f"{p}/**/{name}" for p in _roots())]
    raise ModelUnreadable(
        "model-missing",
        f"{name} is not on this machine" + _others(places),
        context="searched: " + "\n          ".join(dict.fromkeys(searched)),
        fix=f"{setup}   # or, if it lies elsewhere: export MODEL_DIR=/path/to/models",
    )


def shard_names(file: str) -> tuple[str, ...]:
    """Every file of the set that `file` names a shard of, in order; the file alone when it is whole."""
    folder, _, name = file.rpartition("/")
    found = _SHARD.match(name)
    if not found:
        return (file,)
    prefix, of = f"{folder}/" if folder else "", int(found["of"])
    return tuple(f"{prefix}{found['stem']}-{i:05d}-of-{of:05d}.gguf" for i in range(1, of + 1))


def _is_it(path: Path, size_bytes: int | None) -> bool:
    try:
        return path.is_file() and size_bytes in (None, path.stat().st_size)
    except OSError:
        return False


def _exact(ref: ModelRef) -> list[Path]:
    own = _expand(ref.file)
    if own.is_absolute():
        return [own]
    folder = _expand(ref.dir) if ref.dir else Path()
    named = [d / folder / ref.file for d in paths.model_dirs()]  # an absolute dir: wins over MODEL_DIR
    return list(dict.fromkeys([*named, *(d / ref.file for d in paths.model_dirs())]))


def _others(places: list[Path]) -> str:
    """` (4 of its 5 shards are in ...)`: a lost first shard is not a model that was never fetched."""
    for path in places:
        names = [Path(n).name for n in shard_names(path.name)]
        there = sum((path.parent / n).is_file() for n in names)
        if len(names) > 1 and there:
            return f" ({there} of its {len(names)} shards are in {path.parent})"
    return ""


def _roots() -> list[Path]:
    return [*paths.model_dirs(), _hub(), *_lm_studio()]


def _in_model_dirs(name: str) -> list[Path]:
    return [p for root in paths.model_dirs() for p in _walk(root, name, _DEPTH)]


def _in_lm_studio(name: str) -> list[Path]:
    return [p for root in _lm_studio() for p in _walk(root, name, _DEPTH)]


def _in_hub(name: str, repo: str | None) -> list[Path]:
    """Snapshots of `repo` (of every repository when the slug names none), the one that `main` points to first."""
    hub, found = _hub(), list[Path]()
    for folder in [hub / f"models--{repo.replace('/', '--')}"] if repo else sorted(hub.glob("models--*")):
        try:
            main = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            main = ""
        snapshots = sorted(_folders(folder / "snapshots"), key=lambda p: (p.name != main, p.name))
        found += [p for s in snapshots for p in _walk(s, name, _DEPTH)][:1]
    return found


def _hub() -> Path:
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if own:
        return _expand(own)
    home = os.environ.get("HF_HOME")
    if home:
        return _expand(home) / "hub"
    cache = os.environ.get("XDG_CACHE_HOME")
    return _expand(cache or "~/.cache") / "huggingface" / "hub"


def _lm_studio() -> list[Path]:
    return [_expand(p) for p in ("~/.lmstudio/models", "~/.cache/lm-studio/models")]


def _expand(text: str) -> Path:
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises where no home is known


def _walk(root: Path, name: str, depth: int) -> Iterator[Path]:
    """Files called `name` at most `depth` folders below `root`, nearest first, in order of their paths."""
    level = [root]
    for _ in range(depth + 1):
        yield from (p for folder in level if (p := folder / name).is_file())
        level = [d for folder in level for d in _folders(folder)]


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError:
        return []
