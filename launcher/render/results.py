"""`report --row`: rows for the headings of BENCHMARKS.md, from the runs of a results file."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.render import document as documents
from launcher.render import redact
from launcher.render.report import UNKNOWN, Texts, table
from launcher.structs import ArmRow, Fingerprint, LadderRow, PairedRatio, Private, RunRows, TermRow
from launcher.units import engine_label, gib, mib, tokens

PLANNED_HEAD = ("rig, date", "model and settings", "term", "planned MiB", "real MiB")
_KINDS = {"model": "weights", "kv": "KV", "everything": "everything, against NVML after boot"}
_NONE = "-"
_PAIRED = "paired by round: median (95 % interval)"
_IDENTITY_HEAD = (
    "rig, date", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "meant for", "bundle MiB", "cards grew by, MiB",
    "as meant",
)  # fmt: skip


def texts(runs: Sequence[RunRows], private: Private) -> Texts:
    """(Markdown, document) of the runs, redacted."""
    doc = redact.document({"schema_version": documents.SCHEMA, "runs": [_document(r) for r in runs]}, private)
    lines = (redact.text(line, private) for line in markdown(runs))
    return "\n".join(lines) + "\n", doc


def _document(run: RunRows) -> dict[str, Any]:
    plain: dict[str, Any] = documents.plain(run)
    # One text: a secret behind its flag is seen there, and not in a list of words.
    plain["flags"] = " ".join(run.flags)
    for key in ("arms", "hops"):
        for found, arm in zip(plain[key], getattr(run, key), strict=True):
            found["flags"] = " ".join(arm.flags)
    plain["rig"]["cards"] = [{"uuid": uuid, "name": name} for uuid, name in run.rig.cards]
    return plain


def markdown(runs: Sequence[RunRows]) -> Iterator[str]:
    """Tables below the headings under which they are pasted; the first columns of a run are written once."""
    terms = [cells for run in runs for cells in _term_rows(run)]
    if terms:
        yield from ("## Planned against real", "")
        yield from table(PLANNED_HEAD, terms)
        yield ""
    found = [cells for run in runs for cells in _identity_rows(run)]
    if found:
        yield from ("## Planned against real: the card that a bundle is on", "")
        yield from table(_IDENTITY_HEAD, found)
        yield ""
    lengths = sorted({n for run in runs for arm in run.arms for n in arm.prefill_tps})
    arms = [cells for run in runs for cells in _arm_rows(run, lengths)]
    if arms:
        yield from ("## Speed", "")
        prefill = "prefill tok/s" + (f", {' / '.join(map(tokens, lengths))}" if lengths else "")
        head = ["rig, date", "model, settings and placement", "arm", "n", "decode tok/s", prefill, "load s"]
        yield from table(
            (*head, "used after boot, MiB", "least free MiB", "depth ladder", f"`ours` / this, {_PAIRED}"), arms
        )
        yield ""
    hops = [cells for run in runs for cells in _hop_rows(run)]
    if hops:
        yield from ("## Speed: a bundle on the card that owns its layer, on another card, in host memory", "")
        head = ["rig, date", "arm", "n", "decode tok/s", "prefill tok/s", "load s", "used after boot, MiB"]
        yield from table((*head, f"`owner` / this, {_PAIRED}"), hops)
        yield ""
    for run in runs:
        yield from (f"{run.run}: {note}" for note in run.notes)


# ------------------------------------------------------------------------------------- what it ran on


def rig(found: Fingerprint, at: int, free: Mapping[str, int] | None = None) -> str:
    """`2x NVIDIA H200 (24,580 + 16,388 MiB free), driver ..., processor, cores, memory, engine, date`."""
    names = [name or UNKNOWN for _, name in found.cards]
    cards = ", ".join(f"{names.count(n)}x {n}" if names.count(n) > 1 else n for n in dict.fromkeys(names))
    room = f" ({' + '.join(mib(n) for n in free.values())} MiB free)" if free else ""
    parts = (
        f"{cards or 'card ' + UNKNOWN}{room}",
        f"driver {found.driver or UNKNOWN}",
        found.processor or f"processor {UNKNOWN}",
        f"cores {UNKNOWN}" if found.cores is None else f"{found.cores} cores",
        f"memory {UNKNOWN}" if found.memory_bytes is None else f"{gib(found.memory_bytes, 0)} GiB",
        f"engine {UNKNOWN}" if found.engine is None else engine_label(found.engine),
        time.strftime("%Y-%m-%d", time.gmtime(at)),
    )
    return ", ".join(parts)


def placement(run: RunRows) -> str:
    """`-ts 14,23, experts of 12 + 6 layers resident`."""
    split = f"-ts {','.join(map(str, run.tensor_split))}" if run.tensor_split else ""
    counts = " + ".join(str(len(layers)) for layers in run.resident.values())
    return ", ".join(filter(None, (split, f"experts of {counts} layers resident" if counts else "")))


def _model(run: RunRows) -> str:
    flags = f"`{' '.join(run.flags)}`" if run.flags else ""
    return ", ".join(filter(None, (run.run, run.model, flags, placement(run))))


# ------------------------------------------------------------------------------------------- the rows


def _once(first: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    for i, cells in enumerate(rows):
        yield [*(first if not i else [""] * len(first)), *cells]


def _term_rows(run: RunRows) -> Iterator[list[str]]:
    several = len(run.resident) > 1
    rows = [
        [_term(t, several), _planned(t), _NONE if t.real_bytes is None else mib(t.real_bytes)] for t in run.terms
    ]  # fmt: skip
    for arm in run.arms:
        for use in arm.uses:
            if use.planned_bytes is not None:
                starts = f"the most of {arm.n} later starts" if arm.n > 1 else "a later start"
                name = f"{use.device}: " if several else ""
                used = _NONE if use.used_bytes is None else mib(use.used_bytes)
                rows.append([f"{name}everything, {starts}", mib(use.planned_bytes), used])
    if run.audit_failed:
        rows.append([f"audit of the first start: {short(run.audit_failed)}", "", ""])
    yield from _once((rig(run.rig, run.at, run.free_bytes), _model(run)), rows)


def _term(term: TermRow, several: bool) -> str:
    kind = _KINDS.get(term.kind, term.kind)
    return f"{kind} in host memory" if term.device == "host" else f"{term.device}: {kind}" if several else kind


def _planned(term: TermRow) -> str:
    said = f" ({term.source})" if term.source in ("dry-run", "measured", "formula") and term.kind != "kv" else ""
    return f"{mib(term.planned_bytes)}{said}"


def _arm_rows(run: RunRows, lengths: Sequence[int]) -> Iterator[list[str]]:
    rows = []
    for arm in run.arms:
        prefill = _prefill([arm.prefill_tps.get(n) for n in lengths])
        flags = f" `{' '.join(arm.flags)}`" if arm.flags else ""
        uses = " + ".join(_use(u.used_bytes, u.planned_bytes) for u in arm.uses)
        least = " + ".join(mib(n) for n in arm.least_free_bytes.values())
        mine = ladder(run.ladder) if arm.arm == "ours" else _NONE
        rows.append([
            arm.arm + flags, str(arm.n), _speed(arm.decode_tps), prefill, _seconds(arm.load_s), uses or _NONE,
            least or _NONE, mine, _verdict(arm),
        ])  # fmt: skip
    if not run.arms and run.ladder:
        rows.append(["ours", "0", _NONE, _NONE, _NONE, _NONE, _NONE, ladder(run.ladder), "not measured"])
    yield from _once((rig(run.rig, run.at, run.free_bytes), _model(run)), rows)


def _hop_rows(run: RunRows) -> Iterator[list[str]]:
    rows = []
    for arm in run.hops:
        prefill = _prefill(list(arm.prefill_tps.values()))
        uses = " + ".join(_use(u.used_bytes, u.planned_bytes) for u in arm.uses)
        rows.append([
            arm.arm, str(arm.n), _speed(arm.decode_tps), prefill, _seconds(arm.load_s), uses or _NONE,
            _verdict(arm),
        ])  # fmt: skip
    yield from _once((rig(run.rig, run.at),), rows)


def _identity_rows(run: RunRows) -> Iterator[list[str]]:
    names = {uuid: f"card {i}" for i, (uuid, _) in enumerate(run.rig.cards)}
    rows = [
        [
            ", ".join(names.get(u, u) for u in one.order), one.device_order, names.get(one.meant, one.meant),
            mib(one.bundle_bytes), ", ".join(f"{names.get(u, u)}: {mib(n)}" for u, n in one.grown_bytes.items()),
            "yes" if one.ok else "NO",
        ]
        for one in run.identity
    ]  # fmt: skip
    yield from _once((rig(run.rig, run.at),), rows)


def ladder(found: LadderRow | None) -> str:
    """`survived to 120,586 tokens, least free 830 + 954 MiB`, or where it died."""
    if found is None:
        return "not climbed"
    least = " + ".join(mib(n) for n in found.least_free_bytes.values())
    room = f", least free {least} MiB" if least else ""
    if found.survived and found.deepest_tokens is not None:
        return f"survived to {tokens(found.deepest_tokens)} tokens{room}"
    died = UNKNOWN if found.died_tokens is None else tokens(found.died_tokens)
    reached = "none before" if found.deepest_tokens is None else f"{tokens(found.deepest_tokens)} before"
    return f"DIED at {died} tokens, {reached}{room}" + (f": {short(found.error)}" if found.error else "")


def short(reason: str) -> str:
    """A reason for a cell: the advice that a person gets at the time is left out."""
    return re.sub(r": a deep prompt may end the server \([^)]*\)| For more information check: \S+", "", reason)


def _verdict(arm: ArmRow) -> str:
    said = []
    if arm.withheld:
        said.append(f"no figures, its audit failed: {short(arm.withheld)}")
    said += [f"{r.metric} {r.median:.3f} ({_interval(r)})" for r in arm.ratios]
    if arm.replanned:
        said.append(f"planned again after the first start: {arm.replanned}")
    if arm.failed:
        said.append(f"{arm.failed} of {arm.failed + arm.n} failed: {short(arm.error)}")
    return "; ".join(said) or _NONE


def _interval(r: PairedRatio) -> str:
    if r.low is None or r.high is None:
        return "one pair, no interval"
    return f"{r.low:.3f} to {r.high:.3f}, n = {r.n}"


def _prefill(speeds: Sequence[float | None]) -> str:
    """One speed a prompt length, in the order of the heading."""
    return " / ".join(map(_speed, speeds)) if any(v is not None for v in speeds) else _NONE


def _use(used: int | None, planned: int | None) -> str:
    shown = UNKNOWN if used is None else mib(used)
    return shown if planned is None else f"{shown} ({mib(planned)} planned)"


def _speed(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _seconds(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1f}"
