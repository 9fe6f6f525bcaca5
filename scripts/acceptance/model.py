"""Random-weight models of real shapes, made once and kept in the work folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fill_model import fill

from acceptance.matrix import Run
from launcher.units import GIB
from tests.replicas import make_replica

SPECS = Path(make_replica.__file__).parent / "specs"


def make(run: Run, work: Path, say: Callable[[str], None]) -> dict[str, Path]:
    """`model` and, where the run has one, `draft`: the first file of each, filled."""
    found = {"model": _one(run.spec, run.n_layer, work, say)}
    if run.draft:
        found["draft"] = _one(run.draft, run.n_layer, work, say, drafts=True)
    return found


def _one(spec_name: str, n_layer: int | None, work: Path, say: Callable[[str], None], *, drafts: bool = False) -> Path:
    folder = work / (spec_name if n_layer is None else f"{spec_name}-{n_layer}")
    done = folder / "filled.json"
    if done.exists():
        return Path(json.loads(done.read_text())["path"])
    folder.mkdir(parents=True, exist_ok=True)
    spec = make_replica.load_spec(str(SPECS / f"{spec_name}.yaml"))
    if n_layer is not None and drafts:
        retarget(spec, n_layer)
    elif n_layer is not None:
        cut(spec, n_layer)
    tensors = make_replica.tensors_of(spec)
    written = make_replica.write(
        str(folder), spec["name"], make_replica.kv_of(spec), make_replica.plan_split(tensors, None, None)
    )
    path = folder / Path(written["files"][0]["path"]).name
    filled = fill(path, seed=1, overwrite=True)
    say(f"{spec_name}: {filled.written_bytes / GIB:.1f} GiB of random weights in {filled.seconds:.1f} s")
    done.write_text(json.dumps({"path": str(path), "bytes": filled.written_bytes}))
    return path


def cut(spec: dict[str, Any], n_layer: int) -> None:
    """The spec with its first layers alone; per-layer lists are cut with it."""
    whole = spec["kv"]["block_count"]
    spec["kv"]["block_count"] = n_layer
    for key, value in spec["kv"].items():
        if isinstance(value, list) and len(value) >= whole:  # some count NextN blocks that were dropped
            spec["kv"][key] = [*value[:n_layer], *value[whole:]]
    spec.pop("expect", None)
    spec.pop("split", None)


def retarget(spec: dict[str, Any], n_layer: int) -> None:
    """A drafter's spec whose tapped layers are the last ones of a target of so many."""
    tapped = spec["kv"]["target_layers"]
    spec["kv"]["target_layers"] = list(range(n_layer - len(tapped) + 1, n_layer + 1))
    spec.pop("expect", None)
