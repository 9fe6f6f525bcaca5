"""`list` and `show` as people read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.render import document, out
from launcher.structs import Engine, Slug, Status
from launcher.units import engine_label, gib, human

GLYPHS = {Status.PRODUCTION: "*", Status.INCUBATING: "~", Status.DEPRECATED: "x"}
_LEFT = frozenset({0, 1, 6, 8})
_BELOW = " " * 9
_MOST_FILES = 8
_LEGEND = "* production   ~ incubating, x deprecated (need --force)   > runs now"


def show_list(slugs: Sequence[Mapping[str, Any]], around: Mapping[str, Any], *, as_json: bool = False) -> int:
    """Print the catalogue, the models that no slug names, and what to do next."""
    if as_json:
        out.document(document.list_document(slugs, around))
        return 0
    rows = [["", "slug", "on disk", "context", "RAM GiB", "experts", "speculation", "port", "fits"]]
    rows += [_row(s) for s in slugs]
    out.show(_table(rows))
    notes = [f"{s['name']}: {s['problem']}" for s in slugs if s["problem"]]
    notes += [f"{s['name']}: your own file stands before the shipped one" for s in slugs if s["shadows"]]
    out.show([*(part for note in notes for part in out.fold(note)), _LEGEND])
    out.show(_around(slugs, around))
    return 0


def _table(rows: list[list[str]]) -> list[str]:
    lines = out.table(rows, left=_LEFT)
    return lines if max(map(len, lines)) <= out.WIDTH else out.table(rows, left=_LEFT, gap=1)


def _around(slugs: Sequence[Mapping[str, Any]], around: Mapping[str, Any]) -> Iterator[str]:
    files = around["files"]
    yield ""
    folders = ", ".join(around["model_dirs"])
    yield from out.fold(f"models   searched in {folders} (MODEL_DIR) and the usual caches", _BELOW)
    if files:
        yield f"         {len(files)} that no slug names; launcher plan FILE shows where it would lie:"
        shown = [[f"         {f['path']}", human(f["file_bytes"])] for f in files[:_MOST_FILES]]
        yield from out.table(shown)
        if len(files) > _MOST_FILES:
            yield f"         and {len(files) - _MOST_FILES} more (launcher list --json)"
    engine: Engine | None = around["engine"]
    found = f"{engine_label(engine.version)}, {engine.path}" if engine else around["engine_problem"]
    yield from out.fold(f"engine   {found}", _BELOW)
    here = [s for s in slugs if s["file_bytes"] is not None]
    if here:
        fits = next((s for s in here if s["fits"]), here[0])
        yield f"next     launcher plan {fits['name']}   |   switch {fits['name']}"
    elif files:
        yield "next     launcher plan FILE"
    else:
        yield "next     launcher setup SLUG fetches one; launcher plan /path/to/model.gguf if you have one"


def _row(s: Mapping[str, Any]) -> list[str]:
    glyph = ">" if s["running"] else GLYPHS.get(s["status"], "?")
    context = "-" if s["n_ctx"] is None else f"{s['n_ctx']:,}"
    if s["n_parallel"] and s["n_parallel"] > 1:
        context += f" x {s['n_parallel']}"
    share = "-" if s["n_layer"] is None else f"{s['resident_layers']}/{s['n_layer']}"
    fits = "broken" if s["problem"] else "-" if s["fits"] is None else "yes" if s["fits"] else "no"
    return [
        glyph,
        s["name"],
        "no" if s["path"] is None else "?" if s["file_bytes"] is None else human(s["file_bytes"]),
        context,
        "-" if s["host_required_bytes"] is None else gib(s["host_required_bytes"]),
        share,
        s["speculation"] or "-",
        "-" if s["port"] is None else str(s["port"]),
        fits,
    ]


def show_slug(slug: Slug, *, as_json: bool = False) -> int:
    """Print one slug with every default."""
    doc = document.slug_document(slug)
    if as_json:
        out.document(doc)
        return 0
    out.show(_lines({k: v for k, v in doc.items() if k != "schema_version"}))
    return 0


def _lines(doc: Mapping[str, Any], indent: str = "") -> list[str]:
    lines = []
    width = max((len(k) for k in doc), default=0)
    for key, value in doc.items():
        if isinstance(value, Mapping) and value:
            lines.append(f"{indent}{key}:")
            lines += _lines(value, indent + "  ")
        else:
            lines.append(f"{indent}{key:<{width}}  {_value(key, value)}")
    return lines


def _value(key: str, value: Any) -> str:
    if value is None:
        return "auto" if key in _AUTO else "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("_bytes") and isinstance(value, int):
        return human(value)
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return "-" if value == {} else str(value)


_AUTO = frozenset({"n_ctx", "threads", "cache_ram_bytes", "checkpoints", "margin_bytes", "order"})
