"""TARGET of a command -> the slug (or none) and the files that it means."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher.errors import ModelUnreadable, UsageError
from launcher.facts import gguf_header, slug
from launcher.structs import ModelHeader, ModelRef, Slug
from launcher.workflows import overrides

_REPO = re.compile(r"^[\w.-]+/[\w.-]+(:[\w.-]+)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a person named. `name` keys the run record: the slug's name, or the file's absolute path.

    pins  card -> layers, from OT_G<i> of the environment
    """

    name: str
    slug: Slug | None
    path: Path | None  # of a bare file, any shard or its folder; None for a slug
    pins: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def alias(self) -> str:
        """Name that the server answers to."""
        if self.slug is not None:
            return self.slug.serve.alias or self.slug.name.rpartition("/")[2]
        path = self.path or Path(self.name)
        stem = path.name if path.is_dir() else path.stem
        return re.sub(r"-\d{5}-of-\d{5}$", "", stem)


def resolve(text: str) -> Target:
    """A slug (or unique ending), a .gguf file, a shard of one, or its folder.

    Raises UsageError (slug-unknown, slug-ambiguous, spec-n-invalid, ot-g-invalid), SlugInvalid,
    ModelUnreadable (target-remote) for a repository or URL.
    """
    if re.match(r"^(https?|hf)://", text) or text.startswith("hf.co/"):
        raise _remote(text)
    if _is_path(text):
        path = Path(os.path.abspath(Path(text).expanduser()))  # noqa: PTH100 - a link keeps its shard name
        return Target(name=str(path), slug=None, path=path, pins=overrides.pins(os.environ))
    try:
        found = slug.load(text)
    except UsageError as error:
        families = {e.name.partition("/")[0] for e in slug.names()}
        if error.reference == "slug-unknown" and _REPO.match(text) and text.partition("/")[0] not in families:
            raise _remote(text) from None
        raise
    pins = overrides.pins(os.environ)
    return Target(name=found.name, slug=slug.with_environment(found, os.environ), path=None, pins=pins)


def _is_path(text: str) -> bool:
    if text.endswith(".gguf") or text.startswith(("/", "./", "../", "~")) or text in (".", ".."):
        return True
    path = Path(text)
    return path.is_dir() and any(path.glob("*.gguf"))


def _remote(text: str) -> ModelUnreadable:
    return ModelUnreadable(
        "target-remote",
        f"{text} is not on this machine",
        context="repositories and URLs are not read by this version; a slug (launcher list) or a .gguf file is",
        fix="launcher list     # or download the file: launcher plan /path/to/model.gguf",
    )


def model_path(target: Target) -> Path:
    """First shard of the target's model. Raises ModelUnreadable when it is not on this machine."""
    if target.slug is None:
        assert target.path is not None
        return gguf_header.find_shards(target.path)[0]
    from launcher.weights import find

    return find.find_model(target.slug.model, target=target.name)


def header_of(target: Target) -> ModelHeader:
    """Header of the target's model. Raises ModelUnreadable with the command that fetches what is missing."""
    if target.slug is None:
        assert target.path is not None
        return named_header(target.path, "launcher plan /path/to/model.gguf")
    try:
        return gguf_header.read_header(model_path(target))
    except ModelUnreadable as error:
        if not target.slug.model.repo or not error.fix.startswith("launcher setup"):
            raise
        fix = f"launcher setup {target.name}"
        raise ModelUnreadable(error.reference, error.message, context=error.context, fix=fix) from error


def named_header(path: str | Path, again: str) -> ModelHeader:
    """Header of a file that a person named: no slug knows where it came from, so `setup` is no fix for it.

    again  how to name another file
    Raises ModelUnreadable.
    """
    found = Path(path).expanduser()
    try:
        return gguf_header.read_header(found)
    except ModelUnreadable as error:
        if not error.fix.startswith("launcher setup"):
            raise
        if error.reference in ("model-missing", "folder-no-model"):
            near = _near(found)
            seen = "\n".join(p.name for p in near)
            context = f"{near[0].parent} holds:\n{seen}" if near else error.context
            raise ModelUnreadable(error.reference, error.message, context=context, fix=again) from error
        raise ModelUnreadable(
            error.reference, error.message, context=error.context, fix=_fetched(found, error)
        ) from error


def _fetched(path: Path, error: ModelUnreadable) -> str:
    """The download of a file of unknown origin; what ended early goes on where it stopped."""
    if error.reference == "shards-missing" and (names := error.context.split()):
        path = path.parent / names[0]
    goes_on = "-C - " if error.reference in ("model-empty", "data-truncated", "header-truncated") else ""
    url = f"https://huggingface.co/OWNER/REPO/resolve/main/{path.name}"
    return f"curl -fL {goes_on}-o {shlex.quote(str(path))} {shlex.quote(url)}     # from where it came"


def _near(path: Path) -> list[Path]:
    """Models beside a file that is not there, those with a similar name first; at most five."""
    try:
        beside = sorted(p for p in path.parent.iterdir() if p.suffix == ".gguf")
    except OSError:
        return []
    alike = difflib.get_close_matches(path.name, [p.name for p in beside], n=5, cutoff=0.3)
    return sorted(beside, key=lambda p: alike.index(p.name) if p.name in alike else len(alike))[:5]


def drafter_ref(found: Slug) -> ModelRef | None:
    """Where the slug's drafter lies: in the model's own folder and repository."""
    if found.drafter is None:
        return None
    return ModelRef(file=found.drafter.file, dir=found.model.dir, repo=found.model.repo)


def projector_path(target: Target, named: str | None = None) -> Path | None:
    """File of the projector: the option's (`off`: none), else the slug's, else None.

    Raises ModelUnreadable when it is not here or no GGUF.
    """
    if named is not None and named != "off":
        header = named_header(named, "--mmproj off     # or --mmproj /path/to/mmproj.gguf")
        return Path(header.path)
    if named == "off" or target.slug is None or target.slug.mmproj is None:
        return None
    from launcher.weights import find

    model = target.slug.model
    return find.find_model(ModelRef(file=target.slug.mmproj, dir=model.dir, repo=model.repo), target=target.name)


def drafter_type(header: ModelHeader) -> str:
    """Value of --spec-type for a draft model that nobody described, from what its file holds.

    DSpark is DFlash with a Markov head beside it; a NextN file drafts for its own target.
    """
    if header.arch == "dflash":
        names = {t.name for t in header.tensors}
        return "draft-dspark" if "markov_w1.weight" in names else "draft-dflash"
    nextn = header.metadata.get(f"{header.arch}.nextn_predict_layers", 0)
    if isinstance(nextn, int) and nextn > 0:
        return "draft-mtp"
    return "draft-simple"
