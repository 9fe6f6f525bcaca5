"""`list` and `show`: what slugs there are, what of them is on this machine, and whether they fit this rig."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import LauncherError
from launcher.facts import paths
from launcher.facts import slug as slug_facts
from launcher.serve import state
from launcher.structs import RunRecord, Slug, Status
from launcher.workflows import plan, world
from launcher.workflows import target as targets
from launcher.workflows.target import Target


def names() -> tuple[str, ...]:
    """Every slug's name."""
    return tuple(entry.name for entry in slug_facts.names())


def slug(name: str) -> Slug:
    """One slug with every default filled in. Raises UsageError, SlugInvalid."""
    return slug_facts.load(name)


def entries(*, everything: bool = False) -> tuple[Mapping[str, Any], ...]:
    """One mapping a slug; what needs the model's file is None where it is not on this machine.

    Keys: name, status, title, shadows, problem, path, file_bytes, n_ctx, n_parallel, n_layer, resident_layers,
    host_required_bytes, fits, speculation, port (where it runs, else the slug's), running.
    """
    gone = state.running()
    ports = {r.slug: r.port for r in gone}
    found = []
    for entry in slug_facts.names():
        try:
            loaded = slug_facts.load_file(entry.path, entry.name)
        except LauncherError as error:
            row = dict.fromkeys(_KEYS) | {"name": entry.name, "problem": error.message}
        else:
            if loaded.status is Status.DEPRECATED and not everything:
                continue
            row = _row(loaded, gone)
        runs = entry.name in ports
        found.append(row | {"shadows": entry.shadows, "running": runs} | ({"port": ports[entry.name]} if runs else {}))
    return tuple(found)


def around() -> Mapping[str, Any]:
    """What surrounds the slugs: model_dirs, files, engine, engine_problem.

    files   path and file_bytes of every model in the model folders that no slug names
    engine  the struct, or None with the reason and its fix in engine_problem
    """
    try:
        engine, missing = world.engine_for(None, None)
        problem = f"{missing.message}: {missing.fix}" if missing else None
    except LauncherError as error:
        engine, problem = None, f"{error.message}: {error.fix}"
    folders = paths.model_dirs()
    return {
        "model_dirs": [str(folder) for folder in folders],
        "files": [_sized(path) for path in _unnamed(folders)],
        "engine": engine,
        "engine_problem": problem,
    }


def _unnamed(folders: Iterable[Path]) -> list[Path]:
    """First shards of models in the model folders whose file no slug names, four folders deep at most."""
    known = {name for entry in slug_facts.names() for name in _files_of(entry)}
    found = {path for folder in folders for path in _ggufs(folder, _DEPTH)}
    return sorted(p for p in found if p.name not in known and "mmproj" not in p.name.lower())


def _files_of(entry: slug_facts.SlugEntry) -> tuple[str, ...]:
    try:
        found = slug_facts.load_file(entry.path, entry.name)
    except LauncherError:
        return ()
    refs = (found.model.file, found.drafter.file if found.drafter else None, found.mmproj)
    return tuple(Path(ref).name for ref in refs if ref)


def _ggufs(folder: Path, depth: int) -> Iterator[Path]:
    try:
        beside = sorted(folder.iterdir())
    except OSError:
        return
    for path in beside:
        if path.is_dir() and depth and not path.name.startswith("."):
            yield from _ggufs(path, depth - 1)
        elif path.suffix == ".gguf" and path.is_file() and not _LATER_SHARD.search(path.name):
            yield path


def _sized(path: Path) -> dict[str, Any]:
    names = _LATER.sub("", path.name)
    shards = path.parent.glob(f"{glob.escape(names)}-*-of-*.gguf") if names != path.name else (path,)
    return {"path": str(path), "file_bytes": sum(p.stat().st_size for p in shards)}


_DEPTH = 4
_LATER = re.compile(r"-00001-of-\d{5}\.gguf$")
_LATER_SHARD = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_KEYS = (
    "name", "status", "title", "shadows", "problem", "path", "file_bytes", "n_ctx", "n_parallel", "n_layer",
    "resident_layers", "host_required_bytes", "fits", "speculation", "port", "running",
)  # fmt: skip


def _row(found: Slug, gone: tuple[RunRecord, ...]) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(_KEYS) | {
        "name": found.name,
        "status": found.status,
        "title": found.title,
        "n_ctx": found.serve.n_ctx,
        "n_parallel": found.serve.n_parallel,
        "speculation": f"{found.drafter.type} {found.drafter.n_max}" if found.drafter else None,
        "port": found.serve.port,
    }
    target = Target(name=found.name, slug=slug_facts.with_environment(found, os.environ), path=None)
    try:
        row["path"] = str(targets.model_path(target))
    except LauncherError:
        return row
    try:
        # Without the engine: a catalogue must be quick, and formulas are bounds.
        surveyed = world.here(None, target.slug, {}, gone)
        inputs = plan.gather(target, {}, surveyed)
        planned = inputs.plan()
    except LauncherError as error:
        return row | {"problem": error.message}
    return row | {
        "file_bytes": planned.model.file_bytes,
        "n_ctx": planned.settings.n_ctx_per_stream,
        "n_layer": sum(1 for layer in planned.layers if layer.bundle_bytes),
        "resident_layers": len(planned.resident_layers),
        "host_required_bytes": planned.host.required_bytes,
        "fits": planned.fits and len(surveyed.inventory.devices) >= found.devices_min,
    }
