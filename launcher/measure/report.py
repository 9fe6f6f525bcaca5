"""Rows of scripts/gpu_acceptance.py's results file -> what is worth showing of each run. Pure: bytes in, structs out.

A headline number needs a placement that is the planned one: samples of a start whose audit failed make none, and the
reason takes its place. Rounds are paired only when both arms have them, on the same rig.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from launcher.measure.compare import paired
from launcher.measure.result_lines import Line, lines_of
from launcher.serve import argv as command_line
from launcher.structs import (
    ArmRow,
    Fingerprint,
    IdentityRow,
    LadderRow,
    PairedRatio,
    RunRows,
    TermRow,
    Use,
)
from launcher.units import MIB, mib

OURS, OWNER = "ours", "owner"
_PREFILL = re.compile(r"prefill_(\d+)_tps")
# Where it lies and what it is called say nothing about speed; rules are the placement, which has its own column.
_NOT_SHOWN = frozenset({"-m", "-ot", "--host", "--port", "--alias", "-lv", "-dev", "-ts", "-ngl", "-sm"})


@dataclass(slots=True, kw_only=True)
class _Group:
    """The lines of one run on one rig."""

    run: str
    rig: Fingerprint
    lines: list[Line] = field(default_factory=list)

    def of(self, kind: str) -> list[Line]:
        return [line for line in self.lines if line.row["kind"] == kind]


def read_results(data: bytes, file: str) -> tuple[RunRows, ...]:
    """The runs of a results file, in the order of their first row; a run of two rigs is two.

    data  the whole file; `file` is its name in refusals

    Raises UsageError (results-invalid): a line that is cut or no row, or a sample that is there twice.
    """
    groups: dict[tuple[str, Fingerprint], _Group] = {}
    rigs: dict[str, Fingerprint] = {}
    for line in lines_of(data, file):
        run = line.text("run")
        if line.row["kind"] == "rig":
            rigs[run] = _fingerprint(line)
        rig = rigs.get(run, Fingerprint())
        groups.setdefault((run, rig), _Group(run=run, rig=rig)).lines.append(line)
    return tuple(_run(group) for group in groups.values())


def _fingerprint(line: Line) -> Fingerprint:
    cards = line.rows("cards")
    ordered = sorted(cards, key=lambda c: str(c.get("pci") or "~"))
    memory, cores = line.number_or_none("total_bytes"), line.number_or_none("cores")
    return Fingerprint(
        cards=tuple((str(c.get("uuid") or ""), str(c.get("name") or "")) for c in ordered),
        driver=line.text("driver", "") or None,
        processor=line.text("cpu", "") or None,
        cores=None if cores is None else round(cores),
        memory_bytes=None if memory is None else round(memory),
        engine=line.text("engine", "") or None,
        engine_digest=line.text("engine_digest", "") or None,
    )


def _run(group: _Group) -> RunRows:
    plans = group.of("planned")
    planned = plans[-1] if plans else None
    names = _device_names(planned, group.rig)
    audits = group.of("audit")
    samples, hops = group.of("sample"), group.of("hop")
    words = planned.words("argv") if planned else ()
    notes = [f"refused: {x.text('message', '')}" for x in group.of("refused")]
    notes += [f"failed: {x.text('message', '')}" for x in group.of("failed")]
    ladders = group.of("ladder")
    resident = planned.mapping("resident") if planned else {}
    return RunRows(
        run=group.run,
        at=group.lines[0].whole("at"),
        rig=group.rig,
        model=model_of(words),
        flags=flags_of(words),
        tensor_split=planned.numbers("tensor_split") if planned else (),
        resident={name: planned.numbers(name, resident) for name in resident} if planned else {},
        free_bytes={names.get(u, u): n for u, n in (planned.sizes("free_bytes") if planned else {}).items()},
        terms=tuple(_terms(audits[0])) if audits else (),
        audit_failed=_reason(audits[0], audits[0].row) if audits else "",
        ladder=_ladder(ladders[-1], names) if ladders else None,
        arms=_arms(samples, names, planned, audits[0] if audits else None),
        hops=_arms(hops, names, None, None, first=OWNER),
        identity=tuple(_identity(line) for line in group.of("identity")),
        notes=tuple(notes),
    )


def _device_names(planned: Line | None, rig: Fingerprint) -> dict[str, str]:
    """UUID -> the plan's name of the device; cards that share one (virtual devices) or have none keep a number."""
    names = {uuid: f"card {i}" for i, (uuid, _) in enumerate(rig.cards)}
    for device in planned.rows("devices") if planned else []:
        if str(device.get("uuid")) in names:
            names[str(device["uuid"])] = str(device.get("name"))
    return names


def model_of(words: Sequence[str]) -> str:
    """File name of the model on a command line, without folder and ending; empty without one."""
    named = [value for flag, value in zip(words, words[1:], strict=False) if flag in ("-m", "--model")]
    return named[-1].rpartition("/")[2].removesuffix(".gguf") if named else ""


def flags_of(words: Sequence[str]) -> tuple[str, ...]:
    """The flags of an engine's command line that speed depends on, in their order; no paths, no rules, no port."""
    known = {spelling for spellings in command_line.SPELLINGS.values() for spelling in spellings}
    known |= {"--n-cpu-moe"}
    names = {s: names[0] for names in command_line.SPELLINGS.values() for s in names}
    shown: list[str] = []
    rest = iter(words[1:])
    for word in rest:
        values = [next(rest, "")] if word in known else []
        if names.get(word, word) not in _NOT_SHOWN and not any("/" in value for value in (word, *values)):
            shown += (word, *values)
    return tuple(shown)


# ---------------------------------------------------------------------------------------------- audits


def _reason(line: Line, audit: Mapping[str, Any]) -> str:
    """Why an audit failed, empty when it did not. An audit that does not say counts as failed."""
    if audit.get("ok") is True:
        return ""
    failed = audit.get("failed") or []
    said = [str(audit.get("worst") or ""), *(str(one) for one in (failed if isinstance(failed, list) else [failed]))]
    if not isinstance(audit.get("ok"), bool):
        line.bad("'ok' of its audit is missing")
    return "; ".join(one for one in said if one) or "its audit failed and does not say why"


def _terms(line: Line) -> list[TermRow]:
    found = []
    for row in line.rows("rows"):
        planned, real = line.whole("planned_bytes", row), line.whole("real_bytes", row)
        if planned or real:
            source = row.get("source")
            found.append(
                TermRow(
                    device=str(row.get("device")), kind=str(row.get("kind")), planned_bytes=planned, real_bytes=real,
                    source=str(source) if source else None,
                )
            )  # fmt: skip
    for card in line.rows("cards"):
        used = line.number_or_none("used_bytes", card)
        found.append(
            TermRow(
                device=str(card.get("device")), kind="everything", planned_bytes=line.whole("planned_bytes", card),
                real_bytes=None if used is None else round(used),
            )
        )  # fmt: skip
    return found


def _ladder(line: Line, names: Mapping[str, str]) -> LadderRow:
    answered: list[int] = []
    died, error = None, ""
    least: dict[str, int] = {}
    for rung in line.rows("rungs"):
        depth = line.whole("n_tokens", rung)
        if rung.get("error"):
            died, error = depth, str(rung["error"])
        else:
            answered.append(depth)
        for name, free in line.sizes("least_free_bytes", rung).items():
            if name in names:
                least[names[name]] = min(free, least.get(names[name], free))
    return LadderRow(
        survived=line.flag("survived"),
        deepest_tokens=max(answered, default=None),
        died_tokens=died,
        error=error,
        least_free_bytes=least,
    )


def _identity(line: Line) -> IdentityRow:
    return IdentityRow(
        order=line.words("order"),
        device_order=line.text("device_order"),
        meant=line.text("meant"),
        bundle_bytes=line.whole("bundle_bytes"),
        grown_bytes=line.signed("grown_bytes"),
        ok=line.flag("ok"),
    )


# ------------------------------------------------------------------------------------------------ arms


@dataclass(slots=True, kw_only=True)
class _Arm:
    name: str
    good: dict[int, Line] = field(default_factory=dict)  # round -> sample
    withheld: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def _arms(
    lines: Sequence[Line], names: Mapping[str, str], planned: Line | None, audit: Line | None, first: str = OURS
) -> tuple[ArmRow, ...]:
    arms: dict[str, _Arm] = {}
    seen: dict[tuple[str, int], int] = {}
    for line in lines:
        key = (line.text("arm"), line.whole("round"))
        if key in seen:
            line.bad(f"arm {key[0]!r}, round {key[1]} of {line.text('run')} is in line {seen[key]} already")
        seen[key] = line.number
        arm = arms.setdefault(key[0], _Arm(name=key[0]))
        if line.row.get("error"):
            arm.errors.append(" ".join(line.text("error").split()))
            continue
        arm.good[key[1]] = line
        own = line.mapping("audit") or (audit.row if audit and key[0] == OURS else {})
        if own and (reason := _reason(line, own)):
            arm.withheld.append(reason)
    ordered = sorted(arms.values(), key=lambda a: a.name != first)
    against = arms.get(first)
    return tuple(_arm(arm, against if arm.name != first else None, names, planned) for arm in ordered)


def _arm(arm: _Arm, ours: _Arm | None, names: Mapping[str, str], planned: Line | None) -> ArmRow:
    lines = list(arm.good.values())
    lengths = sorted({int(found[1]) for line in lines for key in line.row if (found := _PREFILL.fullmatch(key))})
    if not lengths and any(line.row.get("prefill_tps") for line in lines):
        lengths = [0]  # a hop row times one prompt, and does not name its length
    speeds = {"decode": _median(lines, "decode_tps")} | {f"prefill {n}": _median(lines, _key(n)) for n in lengths}
    withheld = "; ".join(dict.fromkeys(arm.withheld))
    words = lines[0].words("argv") if lines else ()
    ratios = [] if ours is None or withheld or ours.withheld else [
        ratio
        for metric, key in (("decode", "decode_tps"), *((f"prefill {n}" if n else "prefill", _key(n)) for n in lengths))
        if (ratio := _ratio(metric, key, ours, arm))
    ]  # fmt: skip
    return ArmRow(
        arm=arm.name,
        flags=flags_of(words),
        n=len(lines),
        decode_tps=None if withheld else speeds["decode"],
        prefill_tps={n: None if withheld else speeds[f"prefill {n}"] for n in lengths},
        load_s=_median(lines, "load_s"),
        uses=_uses(lines, names, planned),
        least_free_bytes=_least(lines, names),
        ratios=tuple(ratios),
        withheld=withheld,
        failed=len(arm.errors),
        error=arm.errors[0] if arm.errors else "",
        replanned=_replanned(lines, planned),
    )


def _key(n_tokens: int) -> str:
    return f"prefill_{n_tokens}_tps" if n_tokens else "prefill_tps"


def _median(lines: Sequence[Line], key: str) -> float | None:
    """Median of the samples that have it; 0 is what the script writes where nothing was computed."""
    values = [value for line in lines if (value := line.number_or_none(key))]
    return median(values) if values else None


def _ratio(metric: str, key: str, ours: _Arm, arm: _Arm) -> PairedRatio | None:
    pairs = [
        (a, b)
        for n in sorted(ours.good.keys() & arm.good.keys())
        if (a := ours.good[n].number_or_none(key)) and (b := arm.good[n].number_or_none(key))
    ]
    if not pairs:
        return None
    found = paired([a for a, _ in pairs], [b for _, b in pairs])
    alone = found.n < 2  # one pair has no spread: its interval would claim what nobody measured
    return PairedRatio(
        metric=metric, median=found.median, low=None if alone else found.low, high=None if alone else found.high,
        n=found.n,
    )  # fmt: skip


def _uses(lines: Sequence[Line], names: Mapping[str, str], planned: Line | None) -> tuple[Use, ...]:
    """The most that each card held after boot: of our process by the audit, else what it had free before less after."""
    before = planned.sizes("free_bytes") if planned else {}
    found: dict[str, Use] = {}
    for line in lines:
        cards = line.rows("cards", line.mapping("audit"))
        mine = [
            Use(device=str(c.get("device")), planned_bytes=line.whole("planned_bytes", c), used_bytes=_round(line, c))
            for c in cards
        ]
        if not cards and "used" in line.row:
            used = line.signed("used")
            mine = [Use(device=names.get(u, u), planned_bytes=None, used_bytes=n) for u, n in used.items()]
        elif not cards:
            free = line.sizes("boot_free_mib")
            mine = [
                Use(device=names.get(u, u), planned_bytes=None, used_bytes=before[u] - free[u] * MIB)
                for u in before if u in free
            ]  # fmt: skip
        for use in mine:
            known = found.get(use.device)
            if known is None or (use.used_bytes or -1) > (known.used_bytes or -1):
                found[use.device] = use
    return tuple(found.values())


def _replanned(lines: Sequence[Line], planned: Line | None) -> str:
    """Devices whose planned weights are others in a start than in the run's plan, which names the resident layers."""
    said = []
    if planned is None:
        return ""
    for device in planned.rows("devices"):
        terms = planned.mapping("terms", device)
        meant = sum(round(planned.number_or_none(term, terms) or 0) for term in ("dense", "experts", "output"))
        for line in lines:
            rows = line.rows("rows", line.mapping("audit"))
            then = [
                line.whole("planned_bytes", r)
                for r in rows if r.get("device") == device.get("name") and r.get("kind") == "model"
            ]  # fmt: skip
            if then and abs(then[0] - meant) > MIB:
                said.append(f"{device.get('name')} weights {mib(then[0])} MiB, not {mib(meant)}")
    return "; ".join(dict.fromkeys(said))


def _round(line: Line, card: Mapping[str, Any]) -> int | None:
    used = line.number_or_none("used_bytes", card)
    return None if used is None else round(used)


def _least(lines: Sequence[Line], names: Mapping[str, str]) -> dict[str, int]:
    least: dict[str, int] = {}
    for line in lines:
        for uuid, free in line.sizes("least_free_mib").items():
            if uuid in names:
                least[names[uuid]] = min(free * MIB, least.get(names[uuid], free * MIB))
    return least
