"""`engine list|use|install|probe` as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.render import document, out
from launcher.render.progress import Stages
from launcher.structs import Engine
from launcher.units import engine_label


def progress(*, as_json: bool = False) -> Stages:
    """Where a build reports."""
    return Stages(silent=as_json, steps=frozenset({"unpack", "configure", "build"}))


def show_list(engines: Sequence[Mapping[str, Any]], *, as_json: bool = False) -> int:
    """Print every llama-server found; `>` is the one that commands use."""
    if as_json:
        out.document(document.engines_document(engines))
        return 0
    if not engines:
        out.show(["no llama-server on this machine (launcher engine install builds one)"])
        return 0
    rows = [["", "found by", "version", "path"]]
    for e in engines:
        version = engine_label(e["version"]) if e["version"] else "does not work"
        rows.append([">" if e["chosen"] else "", e["found_by"], version, e["path"]])
    out.show(out.table(rows, left=frozenset({0, 1, 2, 3})))
    out.show(part for e in engines if e["problem"] for part in out.fold(e["problem"]))
    return 0


def show_chosen(engine: Engine, *, as_json: bool = False) -> int:
    """Print which engine it is now."""
    if as_json:
        out.document(document.engine_document(engine))
        return 0
    out.show([f"{engine.path}  {engine_label(engine.version)}"])
    return 0


def show_engine(engine: Engine, *, as_json: bool = False) -> int:
    """Print what an engine says it can do."""
    if as_json:
        out.document(document.engine_document(engine))
        return 0
    out.show(
        [
            f"path        {engine.path}",
            f"version     {engine_label(engine.version)}, {engine.version}",
            f"found by    {engine.found_by}",
            f"digest      {engine.digest}",
            f"flags       {len(engine.flags)}",
            *out.fold(f"spec types  {' '.join(sorted(engine.spec_types)) or '-'}", " " * 12),
            f"rpc server  {engine.rpc_server or '-'}",
        ]
    )
    return 0
