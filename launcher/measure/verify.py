"""Is what runs what was planned: the engine's own load log and the driver beside the plan, buffer by buffer.

A deeper look (answers at depth, an active drafter) belongs here too; this file must not start or stop anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.facts.load_log import LoadLog
from launcher.facts.nvml import NvmlCard
from launcher.structs import Audit, AuditCard, AuditRow, Device, DevicePlan, MeasuredCompute, Plan, Source
from launcher.units import MIB, mib

# The log prints hundredths of a MiB per buffer; beyond 2 % a placement is not the planned one.
TOLERANCE_BYTES = MIB
TOLERANCE_SHARE = 0.02
# From here on a person sees the difference, whatever it means.
SHOWN_BYTES = 256 * MIB
# A card lost 27 and 66 MiB more than NVML gave as its only new process's (two H200, driver 580): page tables and what
# the driver keeps for a context. More than that is
# somebody else's too.
UNATTRIBUTED_BYTES = 128 * MIB
SHOWN_SHARE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the driver says of one device once the server is ready; `by` as in AuditCard."""

    used_bytes: int | None
    free_bytes: int | None
    by: str


def held(
    devices: Sequence[Device], cards: Sequence[NvmlCard], before: Mapping[str, int], pids: frozenset[int]
) -> dict[str, Held]:
    """Device name -> what our processes hold there, for every device that is one of the cards.

    cards   as the driver gives them now
    before  free bytes by UUID before the server was started: where the driver names no process of ours (another pid
            namespace, WSL) or not its memory, the card's own difference stands for it; else that difference counts as
            far as it may be what the driver keeps for us
    """
    used: int | None
    by_uuid = {card.uuid: card for card in cards if card.uuid}
    found: dict[str, Held] = {}
    for device in devices:
        card = by_uuid.get(device.uuid or "")
        if card is None:
            continue
        ours = [p.used_bytes for p in card.processes if p.pid in pids and p.used_bytes]
        then, now = before.get(device.uuid or ""), card.free_bytes
        if sum(other.uuid == device.uuid for other in devices) > 1:
            used, by = None, ""  # devices that share a card (virtual ones): nobody tells whose memory it is
        elif ours:
            lost = then - now if then is not None and now is not None else 0
            kept = 0 <= lost - sum(ours) <= UNATTRIBUTED_BYTES
            used, by = lost if kept else sum(ours), "process"
        elif then is not None and now is not None:
            used, by = max(0, then - now), "card"
        else:
            used, by = None, ""
        found[device.name] = Held(used_bytes=used, free_bytes=now, by=by)
    return found


def audit(plan: Plan, log: LoadLog, seen: Mapping[str, Held] | None = None) -> Audit:
    """Planned against real bytes of weights, cache and compute on every device, and of weights in host memory.

    seen  what the driver says, by device name; a device that is missing there (RPC) is compared by its buffers alone

    Weights and cache must agree within max(1 MiB, 2 %). Compute that came from a formula is a bound: only more than
    planned is wrong. With mmap the host row is left out: the engine prints the span of the mapping there, not a sum.
    Weights or cache on a device that the plan does not name are wrong in every mode. The context is an estimate until
    it was measured: another one is shown, never wrong. Less free than the margin after boot is a failed invariant.
    """
    rows: list[AuditRow] = []
    wrong: list[str] = []
    cards: list[AuditCard] = []
    devices = {d.device.buffer_type for d in plan.devices}
    for d in plan.devices:
        t, name, buffer = d.terms, d.device.name, d.device.buffer_type
        drafted = sum(m.get(buffer, 0) for m in (log.draft_model_bytes, log.draft_kv_bytes, log.draft_compute_bytes))
        for kind, planned, real, term in (
            ("model", t["dense"] + t["experts"] + t["output"], log.model_bytes.get(buffer, 0), ""),
            ("kv", t["kv"], log.kv_bytes.get(buffer, 0), ""),
            ("compute", t["compute"], log.compute_bytes.get(buffer, 0), "compute"),
            ("drafter", t["drafter"], drafted, "drafter"),
        ):
            exact = not term or d.source[term] in (Source.DRY_RUN, Source.MEASURED)
            _add(rows, wrong, _row(name, kind, planned, real, d.source.get(term or kind)), exact)
        if seen and name in seen:
            card = _card(d, log, seen[name])
            cards.append(card)
            if card.context_bytes is not None:
                rows.append(_row(name, "context", t["context"], card.context_bytes, d.source["context"]))
    strangers = {b for log_bytes in (log.model_bytes, log.kv_bytes) for b in log_bytes} - devices
    for buffer in sorted(b for b in strangers if not _is_host(b)):
        for kind, real in (("model", log.model_bytes.get(buffer, 0)), ("kv", log.kv_bytes.get(buffer, 0))):
            _add(rows, wrong, _row(buffer, kind, 0, real, None), True)
    if plan.settings.load_mode not in ("auto", "mmap", "mmap+mlock"):
        h = plan.host.terms
        planned = h["experts"] + h["embedding"] + h["dense"] + h["output"]
        real = sum(n for buffer, n in log.model_bytes.items() if buffer not in devices and _is_host(buffer))
        _add(rows, wrong, _row("host", "model", planned, real, plan.host.source.get("experts")), True)
    failed = tuple(filter(None, map(_tight, cards)))
    return Audit(
        rows=tuple(rows), ok=not wrong and not failed, worst="; ".join(wrong), cards=tuple(cards), failed=failed
    )


def buffers_bytes(log: LoadLog, buffer: str) -> int:
    """Every buffer of target and drafter of that buffer type."""
    tables = (
        log.model_bytes, log.kv_bytes, log.compute_bytes, log.output_bytes,
        log.draft_model_bytes, log.draft_kv_bytes, log.draft_compute_bytes, log.draft_output_bytes,
    )  # fmt: skip
    return sum(table.get(buffer, 0) for table in tables)


def _card(d: DevicePlan, log: LoadLog, seen: Held) -> AuditCard:
    """The context is what we hold less our buffers. A projector's are not in the load log: as planned, then."""
    buffers = buffers_bytes(log, d.device.buffer_type) + d.terms["projector"]
    beyond = None if seen.used_bytes is None else seen.used_bytes - buffers
    return AuditCard(
        device=d.device.name,
        planned_bytes=d.used_bytes,
        used_bytes=seen.used_bytes,
        buffers_bytes=buffers,
        # Less than its buffers: what was counted is not all that we hold (managed memory, a card that others left).
        context_bytes=beyond if beyond is not None and beyond >= 0 else None,
        free_bytes=seen.free_bytes,
        margin_bytes=d.terms["margin"],
        by=seen.by,
    )


def disagreement(plan: Plan, measured: MeasuredCompute) -> str:
    """What the engine's dry run says of weights and caches that the plan says otherwise; empty when they agree.

    Both are arithmetic over the same header, so a difference means that one of the two misreads the model.
    """
    found = []
    for d in plan.devices:
        name, t = d.device.name, d.terms
        for kind, planned, said in (
            ("weights", t["dense"] + t["experts"] + t["output"], measured.model_bytes.get(name)),
            ("cache", t["kv"], measured.context_bytes.get(name)),
        ):
            if said is not None and _row(name, kind, planned, said, None).shown:
                found.append(f"{name} {kind}: planned {mib(planned)} MiB, the engine says {mib(said)}")
    return "; ".join(found)


def _tight(card: AuditCard) -> str:
    if card.free_bytes is None or card.free_bytes >= card.margin_bytes:
        return ""
    return (
        f"{card.device} has {mib(card.free_bytes)} MiB free after boot, less than the margin of "
        f"{mib(card.margin_bytes)} MiB: a deep prompt may end the server "
        "(free memory there, or switch with a smaller --ctx)"
    )


def _is_host(buffer: str) -> bool:
    """Buffer types of host memory: CPU, CPU_Mapped, CPU_REPACK, AMX and what a card pins, as CUDA_Host."""
    return buffer.startswith(("CPU", "AMX")) or buffer.endswith("_Host")


def _row(device: str, kind: str, planned: int, real: int, source: Source | None) -> AuditRow:
    """One row; shown from 3 % or 256 MiB on, but never for less than the log's own precision."""
    apart = abs(real - planned)
    shown = apart > TOLERANCE_BYTES and (apart > SHOWN_BYTES or apart > planned * SHOWN_SHARE)
    return AuditRow(device=device, kind=kind, planned_bytes=planned, real_bytes=real, shown=shown, source=source)


def _add(rows: list[AuditRow], wrong: list[str], row: AuditRow, exact: bool) -> None:
    rows.append(row)
    allowed = max(TOLERANCE_BYTES, int(row.planned_bytes * TOLERANCE_SHARE))
    over = row.real_bytes - row.planned_bytes
    if over > allowed or (exact and -over > allowed):
        wrong.append(f"{row.device} {row.kind}: planned {mib(row.planned_bytes)} MiB, real {mib(row.real_bytes)} MiB")
