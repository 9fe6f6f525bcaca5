"""Every `--json` document, from structs alone. docs/plan.schema.json describes the plan document.

Keys carry their unit, bytes are whole numbers, unknown is null. A change of meaning is a new schema_version.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from launcher.structs import (
    DEVICE_TERMS,
    HOST_TERMS,
    Activity,
    Audit,
    DevicePlan,
    Engine,
    Gate,
    Launch,
    NumaOption,
    NumaPlan,
    Plan,
    Range,
    Refusal,
    RunEnd,
    RunRecord,
    Service,
    Slug,
)

if TYPE_CHECKING:
    from launcher.render.tradeoffs import Row

SCHEMA = 1
_UNKNOWN = Range(low=None, high=None)


def plan_document(plan: Plan, launch: Launch | None = None, tradeoffs: Sequence[Row] | None = None) -> dict[str, Any]:
    """The plan document of schema 1; `launch` gives argv and what we set of the environment.

    tradeoffs  rows of what else could be chosen; None: they were not asked for, and the key is left out
    """
    s = plan.settings
    doc: dict[str, Any] = {
        "schema_version": SCHEMA,
        "target": plan.target,
        "model": asdict(plan.model),
        "settings": {
            "n_ctx_per_stream": s.n_ctx_per_stream,
            "n_ctx_total": plan.n_ctx_total,
            "n_parallel": s.n_parallel,
            "n_batch": s.n_batch,
            "n_ubatch": s.n_ubatch,
            "type_k": s.type_k,
            "type_v": s.type_v,
            "flash_attn": s.flash_attn,
            "load_mode": s.load_mode,
            "threads": s.threads,
            "drafter": plan.drafter_path,
            "draft_n_max": s.draft_n_max,
            "drafter_device": s.drafter_device or "auto",
            "drafter_layers": s.drafter_layers,
            "drafter_experts": s.drafter_experts,
        },
        "devices": [_device(d) for d in plan.devices],
        "layers": [asdict(layer) for layer in plan.layers],
        "host": {
            "bytes": {term: plan.host.terms.get(term, 0) for term in HOST_TERMS},
            "required_bytes": plan.host.required_bytes,
            "available_bytes": plan.host.available_bytes,
            "layers": list(plan.host.layers),
        },
        "tensor_split": list(plan.tensor_split),
        "override_tensor": plan.override_tensor,
        "argv": list(launch.argv) if launch else [],
        "env": dict(launch.env_set) if launch else {},
        "speed": {
            "decode_tps": _range(plan.speed.decode_tps),
            "prefill_tps": _range(plan.speed.prefill_tps),
            "limited_by": plan.speed.limited_by,
        },
        "fits": plan.fits,
        "warnings": list(plan.warnings),
    }
    if plan.host.numa is not None:
        doc["host"]["numa"] = _numa(plan.host.numa, plan)
    if plan.refusal is not None:
        doc["refusal"] = _refusal(plan.refusal)
    if tradeoffs is not None:
        doc["tradeoffs"] = [_tradeoff(row) for row in tradeoffs]
    return doc


def _numa(nodes: NumaPlan, plan: Plan) -> dict[str, Any]:
    return {
        "chosen": _numa_option(nodes.chosen),
        "why": nodes.why,
        "alternatives": [_numa_option(o) for o in nodes.alternatives],
        "policy": list(nodes.policy),
        "engine_mode": nodes.engine_mode,
        "nodes": [_plain(node) for node in nodes.nodes],
        "device_nodes": {d.device.name: d.device.numa_node for d in plan.devices},
    }


def _numa_option(o: NumaOption) -> dict[str, Any]:
    return {"numa": o.label, **_plain(o)}


def _tradeoff(row: Row) -> dict[str, Any]:
    plan, s = row.plan, row.plan.settings
    return {
        "change": row.change,
        "chosen": row.chosen,
        "worth": row.worth,
        "n_ubatch": s.n_ubatch,
        "n_ctx_per_stream": s.n_ctx_per_stream,
        "type_k": s.type_k,
        "type_v": s.type_v,
        "draft_n_max": s.draft_n_max,
        "fits": plan.fits,
        "resident_layers": len(plan.resident_layers),
        "host_required_bytes": plan.host.required_bytes,
        "least_headroom_bytes": min((d.headroom_bytes for d in plan.devices), default=None),
        "decode_tps": _range(plan.speed.decode_tps),
        "prefill_tps": _range(plan.speed.prefill_tps),
    }


def _device(d: DevicePlan) -> dict[str, Any]:
    return {
        "name": d.device.name,
        "buffer_type": d.device.buffer_type,
        "rig_name": d.rig_name,
        "uuid": d.device.uuid,
        "pci": d.device.pci,
        "description": d.device.description,
        "total_bytes": d.device.total_bytes,
        "free_bytes": d.device.free_bytes,
        "layers": list(d.layers),
        "owns_output": d.owns_output,
        "resident_layers": list(d.resident_layers),
        "bytes": {term: d.terms.get(term, 0) for term in DEVICE_TERMS},
        "source": {term: str(source) for term, source in d.source.items()},
        "used_bytes": d.used_bytes,
        "headroom_bytes": d.headroom_bytes,
    }


def _refusal(refusal: Refusal) -> dict[str, Any]:
    return {
        "where": refusal.where,
        "needed_bytes": refusal.needed_bytes,
        "available_bytes": refusal.available_bytes,
        "short_bytes": refusal.short_bytes,
        "largest_term": refusal.largest_term,
        "ways_out": [
            {
                "change": way.change,
                "fits": way.fits,
                "resident_layers": way.resident_layers,
                "host_required_bytes": way.host_required_bytes,
                "decode_tps": _range(way.decode_tps or _UNKNOWN),
                "prefill_tps": _range(way.prefill_tps or _UNKNOWN),
            }
            for way in refusal.ways_out
        ],
    }


def _range(found: Range) -> dict[str, float | None]:
    return {"low": _finite(found.low), "high": _finite(found.high)}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def preflight_document(target: str, gates: Iterable[Gate], plan: Plan | None = None) -> dict[str, Any]:
    """Every gate with its verdict; `ok` is true when none is closed. `refusal` as in the plan document, or null."""
    found = list(gates)
    refusal = plan.refusal if plan else None
    return {
        "schema_version": SCHEMA,
        "target": target,
        "ok": all(g.ok for g in found),
        "gates": [asdict(g) for g in found],
        "refusal": None if refusal is None else _refusal(refusal),
    }


def slug_document(slug: Slug) -> dict[str, Any]:
    """A slug with every default filled in; contexts and sizes in tokens and bytes, null means auto."""
    return {"schema_version": SCHEMA, **_plain(slug)}


def list_document(slugs: Sequence[Mapping[str, Any]], around: Mapping[str, Any]) -> dict[str, Any]:
    """The catalogue, one entry a slug; beside it the model folders, the models that no slug names, and the engine."""
    return {"schema_version": SCHEMA, "slugs": [_plain(s) for s in slugs], **_plain(around)}


def server_document(record: RunRecord) -> dict[str, Any]:
    """One run record; argv and what we set of the environment are in it."""
    doc: dict[str, Any] = _plain(record)
    return {**doc, "url": url(record.host, record.port)}


def status_document(servers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Servers of ours that run, each with its state and its record; `record.audit` compares planned with real bytes.

    null where nothing was compared: a load log that could not be read, a record of an older version.
    """
    return {
        "schema_version": SCHEMA,
        "servers": [{**_plain(s), "activity": _activity(s.get("activity"))} for s in servers],
    }


def _activity(found: Activity | None) -> dict[str, Any] | None:
    """What a server is doing; null unless it is up. left_s of a request is until its prompt is read."""
    if found is None:
        return None
    return {**_plain(found), "requests": [{**_plain(r), "left_s": _finite(r.left_s)} for r in found.requests]}


def attach_document(record: RunRecord, doing: Activity) -> dict[str, Any]:
    """A server that is ready, and what it is doing."""
    return {"schema_version": SCHEMA, "server": server_document(record), "activity": _activity(doing)}


def switch_document(record: RunRecord, plan: Plan, launch: Launch | None, audit: Audit | None) -> dict[str, Any]:
    """What `switch` did: the server, the plan that it runs, planned against real bytes."""
    return {
        "schema_version": SCHEMA,
        "server": server_document(record),
        "plan": plan_document(plan, launch),
        "audit": None if audit is None else _plain(audit),
    }


def stopped_document(ends: Sequence[tuple[RunRecord, RunEnd | None]]) -> dict[str, Any]:
    """What `stop` ended."""
    return {
        "schema_version": SCHEMA,
        "stopped": [{"slug": r.slug, "port": r.port, "end": None if e is None else _plain(e)} for r, e in ends],
    }


def history_document(ends: Sequence[RunEnd]) -> dict[str, Any]:
    """Every run that ended, oldest first."""
    return {"schema_version": SCHEMA, "runs": [_plain(e) for e in ends]}


def service_document(services: Sequence[Service]) -> dict[str, Any]:
    """systemd units of ours; `path` is null for one that was only printed, `state` where no systemd answers."""
    return {"schema_version": SCHEMA, "services": [_plain(s) for s in services]}


def engine_document(engine: Engine) -> dict[str, Any]:
    """What an engine says it can do."""
    return {"schema_version": SCHEMA, **_plain(engine)}


def engines_document(engines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every llama-server found, in the order of choice."""
    return {"schema_version": SCHEMA, "engines": [_plain(e) for e in engines]}


def setup_document(target: str, files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The files of a slug after `setup`."""
    return {"schema_version": SCHEMA, "target": target, "files": [_plain(f) for f in files]}


def url(host: str, port: int) -> str:
    """The base URL of a server's OpenAI-style interface; a wildcard address is answered on loopback."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/v1"


def plain(value: Any) -> Any:
    """A struct as a document holds it: for renderers whose documents are their own."""
    return _plain(value)


def _plain(value: Any) -> Any:
    """Structs, enums, sets and tuples as JSON's own kinds; sets sorted, so that the same input gives the same text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {k: _plain(getattr(value, k)) for k in value.__dataclass_fields__}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(_plain(v) for v in value)
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return _finite(value)
    return value if isinstance(value, str | int | bool | None) else str(value)
