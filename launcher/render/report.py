"""`report`: one document about a machine and what runs on it, and the same as a Markdown page; both redacted.

The page is written from the redacted document, so that nothing can be in one and not in the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from launcher.render import document as documents
from launcher.render import out, redact
from launcher.structs import Audit, CardFacts, GpuProcess, Machine, Private, Report, RunFacts
from launcher.units import engine_label, gib, mib

UNKNOWN = "unknown"
Texts = tuple[str, Mapping[str, Any]]


def texts(page: Report, private: Private) -> Texts:
    """(Markdown, document) of the page, redacted."""
    doc = redact.document(page_document(page), private)
    return "\n".join(markdown(doc)) + "\n", doc


def files(found: Texts) -> dict[str, str]:
    """The two as files."""
    return {"report.md": found[0], "report.json": out.json_text(found[1])}


def show(found: Texts, written: Sequence[str] = (), *, as_json: bool = False) -> int:
    """Print the page, the document, or where both were written; with a document that goes to stderr."""
    if as_json or written:
        # A path can hold a name, and the document is made to be shared.
        out.show([f"written {path}" for path in written], stderr=as_json)
    if as_json:
        out.document(found[1])
    elif not written:
        out.show([found[0].removesuffix("\n")])
    return 0


# ------------------------------------------------------------------------------------------- document


def page_document(page: Report) -> dict[str, Any]:
    """The page as data, not yet redacted. Unknown is null; bytes, seconds of the epoch, PCIe generations and lanes."""
    return {
        "schema_version": documents.SCHEMA,
        "made_at": page.made_at,
        "version": page.version,
        "machine": _machine(page.machine),
        "runs": [_run(r, full=page.full) for r in page.runs],
    }


def _machine(m: Machine) -> dict[str, Any]:
    host, detail, engine = m.host, m.detail, m.engine
    return {
        "cards": [_card(card) for card in m.cards],
        "driver": m.driver,
        "host": {
            "processor": detail.processor,
            "cores": host.cores,
            "total_bytes": host.total_bytes,
            "available_bytes": host.available_bytes,
            "limited_by": host.limited_by,
            "numa_nodes": host.numa_nodes,
            "nodes": [
                {"index": n.index, "total_bytes": n.total_bytes, "available_bytes": n.available_bytes,
                 "cores": n.cores, "cpus": list(n.cpus)}
                for n in host.nodes
            ],
            "swap_total_bytes": detail.swap_total_bytes,
            "swap_free_bytes": detail.swap_free_bytes,
            "governors": None if detail.governors is None else list(detail.governors),
            "transparent_huge": detail.transparent_huge,
            "memory_channels": None if detail.channels is None else {
                "populated": detail.channels.populated, "modules": detail.channels.modules, "by": detail.channels.by,
            },
            "wsl": host.wsl,
        },
        "engine": None if engine is None else {
            "version": engine.version, "digest": engine.digest, "found_by": engine.found_by, "path": engine.path,
        },
        "engine_missing": m.engine_missing,
        "warnings": list(m.warnings),
    }  # fmt: skip


def _card(card: CardFacts) -> dict[str, Any]:
    return {
        "name": card.name,
        "uuid": card.uuid,
        "pci": card.pci,
        "total_bytes": card.total_bytes,
        "free_bytes": card.free_bytes,
        "link": {"gen": card.link_gen, "gen_max": card.link_gen_max, "width": card.link_width,
                 "width_max": card.link_width_max},
        "numa_node": card.numa_node,
        "mig": card.mig,
        "others": [_process(p) for p in card.others],
        "ours": [_process(p) for p in card.ours],
        "note": card.note,
    }  # fmt: skip


def _process(p: GpuProcess) -> dict[str, Any]:
    return {"pid": p.pid, "name": p.name, "used_bytes": p.used_bytes}


def _run(r: RunFacts, *, full: bool) -> dict[str, Any]:
    record, end = r.record, r.end
    found: dict[str, Any] = {
        "slug": r.slug,
        "alive": r.alive,
        "state": r.state,
        "started_at": r.started_at,
        "settings": {k: list(v) if isinstance(v, tuple) else v for k, v in r.settings.items()},
        "devices": None if r.placed is None else [
            {"name": p.device, "slots": p.slots, "resident_layers": list(p.resident)} for p in r.placed
        ],
        "real_bytes": {buffer: dict(kinds) for buffer, kinds in r.real_bytes.items()},
        "audit": None if record is None or record.audit is None else _audit(record.audit),
        "end": None if end is None else {
            "reason": end.reason, "exit_code": end.exit_code, "signal": end.signal, "ended_at": end.ended_at,
            "last_rss_bytes": end.last_rss_bytes,
        },
        "cause": r.cause,
    }  # fmt: skip
    if full:
        found["argv"] = None if record is None else list(record.argv)
        # A list, not an object: what is redacted is values, and a variable's name is one here.
        found["env"] = None if record is None else [{"name": k, "value": v} for k, v in record.env_set.items()]
        found["log_tail"] = list(r.log_tail or ())
    return found


def _audit(audit: Audit) -> dict[str, Any]:
    return {
        "ok": audit.ok,
        "worst": audit.worst,
        "failed": list(audit.failed),
        "rows": [
            {"device": row.device, "kind": row.kind, "planned_bytes": row.planned_bytes, "real_bytes": row.real_bytes,
             "source": row.source.value if row.source else None}
            for row in audit.rows
        ],
        "cards": [
            {"device": c.device, "planned_bytes": c.planned_bytes, "used_bytes": c.used_bytes,
             "free_bytes": c.free_bytes, "margin_bytes": c.margin_bytes, "by": c.by}
            for c in audit.cards
        ],
    }  # fmt: skip


# ------------------------------------------------------------------------------------------- Markdown


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A Markdown table; a `|` inside a cell is escaped, a line break becomes a blank."""
    yield row(head)
    yield "|" + "---|" * len(head)
    for cells in rows:
        yield row(cells)


def row(cells: Sequence[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def markdown(doc: Mapping[str, Any]) -> Iterator[str]:
    """The page, from its redacted document."""
    yield f"# llama-launcher {doc['version']}, {_date(doc['made_at'])}"
    yield ""
    yield from _machine_lines(doc["machine"])
    if not doc["runs"]:
        yield from ("", "## What runs", "", "Nothing runs, and nothing was started yet.")
    for found in doc["runs"]:
        yield ""
        yield from _run_lines(found)


def _machine_lines(m: Mapping[str, Any]) -> Iterator[str]:
    yield "## Machine"
    yield ""
    if m["cards"]:
        head = ("card", "driver", "PCI", "id", "total MiB", "free MiB", "link now", "link at most", "NUMA node", "MIG",
                "held by others")  # fmt: skip
        yield from table(head, (_card_cells(card, m["driver"]) for card in m["cards"]))
        for card in m["cards"]:
            if card["note"]:
                yield f"- {card['pci'] or card['name']}: not told: {card['note']}"
    else:
        said = "no driver answers" if m["driver"] is None else f"the driver {m['driver']} shows none"
        yield f"No NVIDIA card: {said}."
    yield ""
    host = m["host"]
    yield f"- processor: {host['processor'] or UNKNOWN}, {host['cores']} cores that we may use" + (
        " (WSL)" if host["wsl"] else ""
    )
    limit = "" if host["limited_by"] == "MemAvailable" else f", limited by {host['limited_by']}"
    yield f"- memory: {gib(host['total_bytes'])} GiB, {gib(host['available_bytes'])} available{limit}"
    yield f"- memory channels: {_channels(host['memory_channels'])}"
    if not host["nodes"]:
        yield f"- NUMA nodes: {host['numa_nodes']}, their memory {UNKNOWN}"
    for n in host["nodes"]:
        yield (
            f"- NUMA node {n['index']}: {gib(n['total_bytes'])} GiB, {gib(n['available_bytes'])} available, "
            f"{n['cores']} cores, cpus {_ranges(n['cpus']) or 'none'}"
        )
    swap = host["swap_total_bytes"]
    free = host["swap_free_bytes"]
    yield f"- swap: {UNKNOWN if swap is None else 'none' if not swap else f'{gib(swap)} GiB'}" + (
        f", {gib(free)} free" if swap and free is not None else ""
    )
    yield f"- cpu governor: {', '.join(host['governors']) if host['governors'] else UNKNOWN}"
    yield f"- transparent huge pages: {host['transparent_huge'] or UNKNOWN}"
    engine = m["engine"]
    if engine is None:
        yield f"- engine: none ({m['engine_missing'] or UNKNOWN})"
    else:
        yield (
            f"- engine: {engine_label(engine['version'])} ({engine['version']}), sha256 {engine['digest'][:12]}, "
            f"found by {engine['found_by']}, {engine['path']}"
        )
    yield from (f"- warning: {text}" for text in m["warnings"])


def _card_cells(card: Mapping[str, Any], driver: str | None) -> tuple[str, ...]:
    link, others = card["link"], card["others"]
    held = ", ".join(f"{p['name'] or 'pid ' + str(p['pid'])} {_mib(p['used_bytes'])}" for p in others)
    return (
        card["name"], driver or UNKNOWN, card["pci"] or UNKNOWN, card["uuid"] or UNKNOWN, _mib(card["total_bytes"]),
        _mib(card["free_bytes"]), _link(link["gen"], link["width"]), _link(link["gen_max"], link["width_max"]),
        UNKNOWN if card["numa_node"] is None else str(card["numa_node"]), "yes" if card["mig"] else "no",
        held or "nobody seen",
    )  # fmt: skip


def _link(gen: int | None, width: int | None) -> str:
    return f"{UNKNOWN if gen is None else f'{gen}.0'} x{'?' if width is None else width}"


def _mib(n_bytes: int | None) -> str:
    return UNKNOWN if n_bytes is None else mib(n_bytes)


def _channels(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return f"{UNKNOWN} (neither EDAC nor udev nor dmidecode tells without root)"
    channels = f"{UNKNOWN}, " if found["populated"] is None else f"{found['populated']}, "
    return f"{channels}{found['modules']} modules ({found['by']})"


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3,8` of sorted numbers."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1][1:] = [n]
        else:
            parts.append([n])
    return ",".join("-".join(str(n) for n in part) for part in parts)


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at))


def _run_lines(r: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {'What runs' if r['alive'] else 'The last run'}: {r['slug']}"
    yield ""
    end = r["end"]
    since = f", started {_date(r['started_at'])}"
    ran = "" if end is None else f", ran {out.duration(max(0.0, end['ended_at'] - r['started_at']))}"
    yield f"- state: {r['state']}{since}{ran}"
    if not r["alive"]:
        yield f"- cause: {r['cause'] or ('asked for' if end and end['reason'] == 'stopped' else UNKNOWN)}"
    pairs = ", ".join(f"{key} {_value(value)}" for key, value in r["settings"].items())
    yield f"- settings: {pairs or UNKNOWN + ' (its record is gone)'}"
    if r["devices"] is None:
        yield f"- placement: {UNKNOWN} (its record is gone)"
    elif not r["devices"]:
        yield "- placement: host memory alone"
    for d in r["devices"] or ():
        experts = _ranges(d["resident_layers"])
        slots = UNKNOWN if d["slots"] is None else str(d["slots"])
        yield (
            f"- {d['name']}: split share {slots}, experts of {len(d['resident_layers'])} layers"
            + (f" ({experts})" if experts else "")
        )  # fmt: skip
    yield from _audit_lines(r)
    if "argv" in r:
        words = " ".join(r["argv"]) if r["argv"] else UNKNOWN
        variables = [f"{one['name']}={one['value']}" for one in r["env"] or ()]
        yield from _fenced("Command line", [words])
        yield from _fenced("Environment that was set", variables or [UNKNOWN if r["env"] is None else "none"])
        yield from _fenced("End of its log", r["log_tail"] or [UNKNOWN])


def _audit_lines(r: Mapping[str, Any]) -> Iterator[str]:
    audit = r["audit"]
    if audit is None:
        yield "- planned against real: not compared"
        if r["real_bytes"]:
            yield ""
            yield from table(
                ("buffer", "kind", "real MiB"),
                ([buffer, kind, mib(n)] for buffer, kinds in r["real_bytes"].items() for kind, n in kinds.items() if n),
            )
        return
    why = "; ".join(filter(None, (audit["worst"], *audit["failed"])))
    yield f"- planned against real: {'as planned' if audit['ok'] else 'not as planned: ' + (why or UNKNOWN)}"
    yield ""
    yield from table(
        ("device", "kind", "planned MiB", "real MiB", "difference"),
        [
            [one["device"], one["kind"], mib(one["planned_bytes"]), mib(one["real_bytes"]),
             _apart(one["real_bytes"], one["planned_bytes"])]
            for one in audit["rows"] if one["planned_bytes"] or one["real_bytes"]
        ]
        + [
            [c["device"], "everything", mib(c["planned_bytes"]), _mib(c["used_bytes"]),
             _apart(c["used_bytes"], c["planned_bytes"])]
            for c in audit["cards"]
        ],
    )  # fmt: skip
    for c in audit["cards"]:
        if c["free_bytes"] is not None:
            yield f"- {c['device']}: {mib(c['free_bytes'])} MiB free after boot, margin {mib(c['margin_bytes'])}"


def _apart(real: int | None, planned: int) -> str:
    if real is None:
        return UNKNOWN
    apart = mib(real - planned)
    return apart if apart.startswith("-") or apart == "0" else f"+{apart}"


def _value(value: Any) -> str:
    return " ".join(str(v) for v in value) if isinstance(value, list) else str(value)


def _fenced(title: str, lines: Sequence[str]) -> Iterator[str]:
    """A code block, with a fence longer than any inside."""
    fence = "```"
    while any(fence in line for line in lines):
        fence += "`"
    yield from ("", f"{title}:", "", fence, *lines, fence)
