"""`list` and `show`: what slugs there are, what of them is on this machine, and whether they fit this rig."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from launcher.errors import LauncherError
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
    host_required_bytes, fits, speculation, port, running.
    """
    gone = state.running()
    running = {r.slug for r in gone}
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
        found.append(row | {"shadows": entry.shadows, "running": entry.name in running})
    return tuple(found)


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
