"""Is what runs what was planned: the engine's own load log beside the plan, buffer by buffer.

A deeper look (answers at depth, an active drafter) belongs here too; this file must not start or stop anything.
"""

from __future__ import annotations

from launcher.facts.load_log import LoadLog
from launcher.structs import Audit, AuditRow, Plan, Source
from launcher.units import MIB, mib

# The log prints hundredths of a MiB per buffer; beyond 2 % a placement is not the planned one.
TOLERANCE_BYTES = MIB
TOLERANCE_SHARE = 0.02


def audit(plan: Plan, log: LoadLog) -> Audit:
    """Planned against real bytes of weights, cache and compute on every device, and of weights in host memory.

    Weights and cache must agree within max(1 MiB, 2 %). Compute that came from a formula is a bound: only more than
    planned is wrong. With mmap the host row is left out: the engine prints the span of the mapping there, not a sum.
    Weights or cache on a device that the plan does not name are wrong in every mode.
    """
    rows: list[AuditRow] = []
    wrong: list[str] = []
    devices = {d.device.buffer_type for d in plan.devices}
    for d in plan.devices:
        t, name, buffer = d.terms, d.device.name, d.device.buffer_type
        drafted = sum(m.get(buffer, 0) for m in (log.draft_model_bytes, log.draft_kv_bytes, log.draft_compute_bytes))
        for kind, planned, real, exact in (
            ("model", t["dense"] + t["experts"] + t["output"], log.model_bytes.get(buffer, 0), True),
            ("kv", t["kv"], log.kv_bytes.get(buffer, 0), True),
            ("compute", t["compute"], log.compute_bytes.get(buffer, 0), d.source["compute"] is Source.DRY_RUN),
            ("drafter", t["drafter"], drafted, d.source["drafter"] is Source.DRY_RUN),
        ):
            _add(rows, wrong, AuditRow(device=name, kind=kind, planned_bytes=planned, real_bytes=real), exact)
    strangers = {b for log_bytes in (log.model_bytes, log.kv_bytes) for b in log_bytes} - devices
    for buffer in sorted(b for b in strangers if not _is_host(b)):
        for kind, real in (("model", log.model_bytes.get(buffer, 0)), ("kv", log.kv_bytes.get(buffer, 0))):
            _add(rows, wrong, AuditRow(device=buffer, kind=kind, planned_bytes=0, real_bytes=real), True)
    if plan.settings.load_mode not in ("auto", "mmap", "mmap+mlock"):
        h = plan.host.terms
        planned = h["experts"] + h["embedding"] + h["dense"] + h["output"]
        real = sum(n for buffer, n in log.model_bytes.items() if buffer not in devices and _is_host(buffer))
        _add(rows, wrong, AuditRow(device="host", kind="model", planned_bytes=planned, real_bytes=real), True)
    return Audit(rows=tuple(rows), ok=not wrong, worst="; ".join(wrong))


def _is_host(buffer: str) -> bool:
    """Buffer types of host memory: CPU, CPU_Mapped, CPU_REPACK, AMX and what a card pins, as CUDA_Host."""
    return buffer.startswith(("CPU", "AMX")) or buffer.endswith("_Host")


def _add(rows: list[AuditRow], wrong: list[str], row: AuditRow, exact: bool) -> None:
    rows.append(row)
    allowed = max(TOLERANCE_BYTES, int(row.planned_bytes * TOLERANCE_SHARE))
    over = row.real_bytes - row.planned_bytes
    if over > allowed or (exact and -over > allowed):
        wrong.append(f"{row.device} {row.kind}: planned {mib(row.planned_bytes)} MiB, real {mib(row.real_bytes)} MiB")
