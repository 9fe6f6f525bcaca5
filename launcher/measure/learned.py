"""What this rig really did: contexts and compute buffers seen after launches, kept for the next plan.

`learned.json` in the state folder. It may be deleted at any time, and whatever is wrong with it costs what it holds,
never a plan: a damaged entry is passed over, a number outside of what a context can be is not believed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.facts.paths import state_dir
from launcher.serve import state
from launcher.structs import Audit, Device, Plan, Source
from launcher.units import GIB, MIB

SCHEMA = 1
KEPT = 5
# Contexts of 107 to 709 MiB were seen; what lies far outside is something else that was counted.
_CONTEXT_LEAST, _CONTEXT_MOST = 64 * MIB, 4 * GIB
_FILE_MOST = 4 * MIB
_ENTRIES = 256


@dataclass(frozen=True, slots=True, order=True)
class Card:
    """What a context depends on: the engine's binary, the card, the driver."""

    engine: str  # sha256 of the binary
    name: str
    total_mib: int
    driver: str


@dataclass(frozen=True, slots=True, order=True)
class Flags:
    """What a compute buffer depends on, beside the placement."""

    engine: str
    arch: str
    backend: str
    n_ctx: int
    n_ubatch: int
    type_k: str
    type_v: str
    drafter: str
    n_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Compute buffers by device in `-ts` order, with the placement that they were seen with."""

    tensor_split: tuple[int, ...]
    resident_layers: tuple[int, ...]
    planned_bytes: tuple[int, ...]
    real_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Everything kept, the newest last: the last contexts of a card, the last compute buffers of a flags class."""

    contexts: Mapping[Card, tuple[int, ...]] = field(default_factory=dict)
    compute: Mapping[Flags, Compute] = field(default_factory=dict)


def path() -> Path:
    """Where it is kept."""
    return state_dir() / "learned.json"


def read() -> Learned:
    """What was learned; nothing when there is no file or it cannot be read. Never raises."""
    try:
        with path().open("rb") as file:
            data = file.read(_FILE_MOST + 1)
        document = json.loads(data) if len(data) <= _FILE_MOST else None
    except (OSError, ValueError, RecursionError):
        return Learned()
    return from_document(document)


def from_document(document: object) -> Learned:
    """What a JSON document holds of it; every entry that is not one is passed over."""
    if not isinstance(document, dict) or document.get("schema_version") != SCHEMA:
        return Learned()
    contexts: dict[Card, tuple[int, ...]] = {}
    for entry in _entries(document, "contexts"):
        card = Card(_text(entry, "engine"), _text(entry, "card"), _whole(entry, "total_mib"), _text(entry, "driver"))
        sizes = tuple(n for n in _list(entry, "bytes") if _is_context(n))[-KEPT:]
        if sizes and card.engine and card.name and card.driver and card.total_mib > 0:
            contexts[card] = sizes
    compute: dict[Flags, Compute] = {}
    for entry in _entries(document, "compute"):
        flags = Flags(
            engine=_text(entry, "engine"),
            arch=_text(entry, "arch"),
            backend=_text(entry, "backend"),
            n_ctx=_whole(entry, "n_ctx"),
            n_ubatch=_whole(entry, "n_ubatch"),
            type_k=_text(entry, "type_k"),
            type_v=_text(entry, "type_v"),
            drafter=_text(entry, "drafter"),
            n_devices=_whole(entry, "n_devices"),
        )
        names = ("tensor_split", "resident_layers", "planned_bytes", "real_bytes")
        seen = Compute(**{name: tuple(_list(entry, name)) for name in names})
        per_device = {len(seen.tensor_split), len(seen.planned_bytes), len(seen.real_bytes)}
        if flags.engine and flags.arch and flags.n_devices > 0 and per_device == {flags.n_devices}:
            compute[flags] = seen
    return Learned(contexts=contexts, compute=compute)


def to_document(known: Learned) -> dict[str, Any]:
    """JSON form of it."""
    return {
        "schema_version": SCHEMA,
        "contexts": [
            {"engine": c.engine, "card": c.name, "total_mib": c.total_mib, "driver": c.driver, "bytes": list(sizes)}
            for c, sizes in known.contexts.items()
        ],
        "compute": [
            {name: getattr(f, name) for name in Flags.__dataclass_fields__}
            | {name: list(getattr(seen, name)) for name in Compute.__dataclass_fields__}
            for f, seen in known.compute.items()
        ],
    }


def card_of(device: Device, engine: str, driver: str) -> Card | None:
    """The key of a card's context, None for a device that has none (RPC) or that cannot be told from others."""
    if device.backend != "cuda" or not device.total_bytes or not (engine and driver and device.description):
        return None
    return Card(engine, device.description, device.total_bytes // MIB, driver)


def applied(devices: Sequence[Device], known: Learned, engine: str, driver: str) -> tuple[Device, ...]:
    """The devices with the largest of the last contexts seen on such a card, where none is given."""
    found = []
    for device in devices:
        card = card_of(device, engine, driver) if device.context_bytes is None else None
        sizes = known.contexts.get(card) if card else None
        found.append(replace(device, context_bytes=max(sizes)) if sizes else device)
    return tuple(found)


def with_contexts(
    known: Learned, plan: Plan, audit: Audit, engine: str, driver: str, *, card_deltas: bool = True
) -> Learned:
    """With the contexts of one launch added: one figure for each kind of card, the largest of its cards.

    card_deltas  whether a card's free memory before and after may stand for what we hold: not when memory of a server
                 that was just stopped may still have been coming back. A projector's buffers are planned, not seen.
    """
    seen: dict[Card, int] = {}
    shares = {d.device.name: d for d in plan.devices}
    for one in audit.cards:
        share = shares.get(one.device)
        card = card_of(share.device, engine, driver) if share else None
        size = one.context_bytes
        if card is None or share is None or size is None or share.terms["projector"] or not _is_context(size):
            continue
        if one.by == "process" or card_deltas:
            seen[card] = max(size, seen.get(card, 0))
    contexts = {card: sizes for card, sizes in known.contexts.items() if card not in seen}
    contexts |= {card: (*known.contexts.get(card, ()), size)[-KEPT:] for card, size in seen.items()}
    return replace(known, contexts=dict(list(contexts.items())[-_ENTRIES:]))


def flags_of(plan: Plan, engine: str) -> Flags:
    """The key of a plan's compute buffers."""
    s = plan.settings
    where = (s.drafter_type or "", s.drafter_device, s.drafter_layers, s.drafter_experts)
    return Flags(
        engine=engine,
        arch=plan.model.arch,
        backend="+".join(sorted({d.device.backend for d in plan.devices})),
        n_ctx=plan.n_ctx_total,
        n_ubatch=s.n_ubatch,
        type_k=s.type_k,
        type_v=s.type_v,
        drafter="/".join(str(x) for x in where if x is not None and x != "auto"),
        n_devices=len(plan.devices),
    )


def with_compute(known: Learned, plan: Plan, audit: Audit, engine: str) -> Learned:
    """With the compute buffers of one launch, where a formula gave another number for any device."""
    rows = {row.device: row for row in audit.rows if row.kind == "compute"}
    mine = [rows[d.device.name] for d in plan.devices if d.device.name in rows]
    formula = [row for row in mine if row.source is Source.FORMULA]
    if not mine or len(mine) != len(plan.devices) or not engine:
        return known
    if not any(abs(row.real_bytes - row.planned_bytes) > MIB for row in formula):
        return known
    flags = flags_of(plan, engine)
    seen = Compute(
        tensor_split=plan.tensor_split,
        resident_layers=plan.resident_layers,
        planned_bytes=tuple(row.planned_bytes for row in mine),
        real_bytes=tuple(row.real_bytes for row in mine),
    )
    compute = {key: value for key, value in known.compute.items() if key != flags} | {flags: seen}
    return replace(known, compute=dict(list(compute.items())[-_ENTRIES:]))


def compute_bytes(known: Learned, plan: Plan, engine: str) -> dict[str, int] | None:
    """Device name on the rig -> compute buffer seen with this very placement under the same flags, None when never."""
    seen = known.compute.get(flags_of(plan, engine))
    if seen is None or (seen.tensor_split, seen.resident_layers) != (plan.tensor_split, plan.resident_layers):
        return None
    return {d.rig_name: n for d, n in zip(plan.devices, seen.real_bytes, strict=True)}


def learn(plan: Plan, audit: Audit, engine: str, driver: str, *, card_deltas: bool = True) -> None:
    """Keep what one launch showed. Raises Refused (state-unwritable). Callers hold the lock of `switch`."""
    before = read()
    now = with_contexts(before, plan, audit, engine, driver, card_deltas=card_deltas)
    now = with_compute(now, plan, audit, engine)
    if now != before:
        state.runs_dir()  # and with it the state folder
        state.write_json(path(), to_document(now))


def _is_context(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and _CONTEXT_LEAST <= value <= _CONTEXT_MOST


def _entries(document: Mapping[str, Any], name: str) -> Iterable[Mapping[str, Any]]:
    found = document.get(name)
    return [e for e in found if isinstance(e, dict)] if isinstance(found, list) else []


def _text(entry: Mapping[str, Any], name: str) -> str:
    value = entry.get(name)
    return value if isinstance(value, str) else ""


def _whole(entry: Mapping[str, Any], name: str) -> int:
    value = entry.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _list(entry: Mapping[str, Any], name: str) -> list[int]:
    """The whole numbers of a list, none below 0; empty when anything else is among them."""
    found = entry.get(name)
    if not isinstance(found, list):
        return []
    good = [n for n in found if isinstance(n, int) and not isinstance(n, bool) and n >= 0]
    return good if len(good) == len(found) else []
