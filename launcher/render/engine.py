"""`engine list|use|install|probe` as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.render import document, out
from launcher.render.progress import Stages
from launcher.structs import Engine


def progress() -> Stages:
    """Where a build reports."""
    return Stages(steps=frozenset({"unpack", "configure", "build"}))


def show_list(engines: Sequence[Mapping[str, Any]], *, as_json: bool = False) -> int:
    """Print every llama-server found; `>` is the one that commands use."""
    if as_json:
        out.document(document.engines_document(engines))
        return 0
    if not engines:
        out.show(["no llama-server on this machine (launcher engine install builds one)"])
        return 0
    rows = [["", "found by", "version", "path"]]
    rows += [
        [">" if e["chosen"] else "", e["found_by"], e["version"] or "does not work", e["path"]] for e in engines
    ]  # fmt: skip
    out.show(out.table(rows, left=frozenset({0, 1, 2, 3})))
    out.show([f"{e['path']}: {e['problem']}" for e in engines if e["problem"]])
    return 0


def show_chosen(engine: Engine) -> int:
    """Print which engine it is now."""
    out.show([f"{engine.path}  {engine.version}"])
    return 0


def show_engine(engine: Engine, *, as_json: bool = False) -> int:
    """Print what an engine says it can do."""
    if as_json:
        out.document(document.engine_document(engine))
        return 0
    out.show(
        [
            f"path        {engine.path}",
            f"version     {engine.version}",
            f"found by    {engine.found_by}",
            f"digest      {engine.digest}",
            f"flags       {len(engine.flags)}",
            f"spec types  {' '.join(sorted(engine.spec_types)) or '-'}",
            f"rpc server  {engine.rpc_server or '-'}",
        ]
    )
    return 0
