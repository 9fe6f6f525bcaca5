"""A page to share: the machine, what runs on it against its plan, and rows of measured results. Changes nothing."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path, PurePath

from launcher import __version__
from launcher.errors import DeviceUnusable, LauncherError, UsageError
from launcher.facts import cpu, load_log, memory, nvml
from launcher.facts import host as host_facts
from launcher.facts import private as private_facts
from launcher.measure import report as results
from launcher.serve import argv as command_line
from launcher.serve import causes, native, state
from launcher.structs import (
    CardFacts,
    Engine,
    HostDetail,
    Machine,
    Placed,
    Private,
    Report,
    RunEnd,
    RunFacts,
    RunRecord,
    RunRows,
)
from launcher.units import MIB
from launcher.workflows import status, world

_LOG_HEAD = 8 * MIB  # a load is told at the start of a log, and takes a MiB at most
_TAIL_LINES, _CAUSE_LINES = 40, 200
_SETTINGS = (
    "alias", "model", "n_ctx_total", "n_parallel", "kv_unified", "n_batch", "n_ubatch", "type_k", "type_v",
    "flash_attn", "load_mode", "threads", "numa", "numa_policy", "cache_ram", "checkpoints", "drafter", "spec_type",
    "draft_n_max", "mmproj",
)  # fmt: skip
_FILES = frozenset({"model", "drafter", "mmproj"})
_PINNED = re.compile(r"^\^blk\\\.\(?([\d|]+)\)?\\\.")


def run(*, full: bool = False) -> tuple[Report, Private]:
    """(the page, what must be cut out of it). full adds the end of each log.

    Raises DeviceUnusable (host-unreadable), Refused (state-not-ours).
    """
    records = state.records()
    secrets = private_facts.private([r.argv for r in records], [r.env_set for r in records])
    found = machine({p.pid for r in records if state.live(r) for p in (r.server, *r.rpc_servers) if p})
    page = Report(made_at=time.time(), version=__version__, machine=found, runs=runs(full=full), full=full)
    return page, secrets


def rows(path: str) -> tuple[tuple[RunRows, ...], Private]:
    """(the runs of a results file, what must be cut out). Raises UsageError (results-missing, results-invalid)."""
    file = Path(path).expanduser()
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(
            "results-missing",
            f"cannot read {path}: {error.strerror or error}",
            context="results are lines of JSON, as scripts/gpu_acceptance.py writes them",
            fix="python scripts/gpu_acceptance.py --out results.jsonl && launcher report --row results.jsonl",
        ) from error
    return results.read_results(data, path), private_facts.private()


def write(texts: Mapping[str, str], folder: str) -> tuple[str, ...]:
    """Write every text under its file name into a folder, made when missing; where they are.

    Raises LauncherError (output-failed).
    """
    out = Path(folder).expanduser()
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise LauncherError(
            "output-failed", f"cannot write into {folder}: {error.strerror or error}",
            fix="launcher report --out /a/folder/of/yours/with/room",
        ) from error  # fmt: skip
    return tuple(str(out / name) for name in texts)


# ----------------------------------------------------------------------------------------- the machine


def machine(own_pids: set[int], root: Path = Path("/")) -> Machine:
    """Cards, host and engine as they are now; an engine that is missing or broken is said, not raised.

    own_pids  processes of servers of ours; root hangs /proc and /sys
    """
    notes: list[str] = []
    if trouble := nvml.driver_trouble():
        notes.append(trouble)
    engine, missing = _engine(notes)
    total, free = memory.swap(root)
    return Machine(
        cards=tuple(_card(card, own_pids) for card in nvml.nvml_cards(root=root)),
        driver=nvml.driver_version() or None,
        host=host_facts.read_host(root),
        detail=HostDetail(
            processor=cpu.processor(root),
            governors=cpu.governors(root),
            transparent_huge=memory.transparent_huge(root),
            swap_total_bytes=total,
            swap_free_bytes=free,
            channels=memory.channels(root),
        ),
        engine=engine,
        engine_missing=missing,
        warnings=tuple(notes),
    )


def _engine(notes: list[str]) -> tuple[Engine | None, str]:
    try:
        engine, missing = world.engine_for(None, None, notes)
    except DeviceUnusable as error:
        return None, error.message
    return engine, missing.message if missing else ""


def _card(card: nvml.NvmlCard, own_pids: set[int]) -> CardFacts:
    return CardFacts(
        name=card.name, uuid=card.uuid, pci=card.pci, total_bytes=card.total_bytes, free_bytes=card.free_bytes,
        link_gen=card.link_gen, link_gen_max=card.link_gen_max, link_width=card.link_width,
        link_width_max=card.link_width_max, numa_node=card.numa_node, mig=card.mig,
        others=tuple(p for p in card.processes if p.pid not in own_pids),
        ours=tuple(p for p in card.processes if p.pid in own_pids), note=card.note,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ what runs


def runs(*, full: bool = False) -> tuple[RunFacts, ...]:
    """Servers of ours that run; the last one that did when none runs; empty when nothing was started yet."""
    seen = status.servers()
    alive = [s for s in seen if s["alive"]]
    if alive:
        return tuple(_of_record(s["record"], s["state"], None, alive=True, full=full) for s in alive)
    ended = [(s["record"].started_at, _of_record(s["record"], s["state"], s["end"], full=full)) for s in seen[-1:]]
    ends = [e for e in state.history() if not ended or e.started_at > ended[0][0]]
    return (_of_end(ends[-1], full=full),) if ends else tuple(found for _, found in ended)


def _of_record(record: RunRecord, how: str, end: RunEnd | None, *, full: bool, alive: bool = False) -> RunFacts:
    said = told(record.argv)
    return RunFacts(
        slug=record.slug,
        alive=alive,
        state=how,
        started_at=record.started_at,
        record=record,
        settings=settings(said),
        placed=placed(said, record.rpc_endpoints) if said else None,
        real_bytes=_real(record.log_path),
        end=end,
        cause="" if alive else _cause(end, record.log_path),
        log_tail=_tail(record.log_path) if full else None,
    )


def _of_end(end: RunEnd, *, full: bool) -> RunFacts:
    return RunFacts(
        slug=end.slug, alive=False, state=state.describe(end), started_at=end.started_at, record=None, settings={},
        placed=None, real_bytes=_real(end.log_path), end=end, cause=_cause(end, end.log_path),
        log_tail=_tail(end.log_path) if full else None,
    )  # fmt: skip


def told(argv: tuple[str, ...]) -> dict[str, object]:
    """What a command line says; empty for one that we did not write (an older version, an edited record)."""
    try:
        return command_line.parse_back(argv)
    except (ValueError, IndexError):
        return {}


def settings(said: Mapping[str, object]) -> dict[str, object]:
    """The settings that memory and speed depend on; of files their names alone."""
    return {
        key: PurePath(str(said[key])).name if key in _FILES else said[key] for key in _SETTINGS if key in said
    }  # fmt: skip


def placed(said: Mapping[str, object], endpoints: tuple[str, ...] = ()) -> tuple[Placed, ...]:
    """Devices of a command line with their share of the split and the layers whose experts a rule pins there."""
    devices, split, rules = said.get("devices", ()), said.get("tensor_split", ()), said.get("rules", ())
    if not isinstance(devices, tuple) or devices == ("none",):
        return ()
    pinned: dict[str, list[int]] = {}
    for pattern, buffer in rules if isinstance(rules, tuple) else ():
        if found := _PINNED.match(pattern):
            pinned.setdefault(buffer, []).extend(int(n) for n in found[1].split("|") if n)
    buffers = {f"RPC{i}": f"RPC0[{endpoint}]" for i, endpoint in enumerate(endpoints)}
    slots = split if isinstance(split, tuple) and len(split) == len(devices) else (None,) * len(devices)
    return tuple(
        Placed(device=name, slots=n, resident=tuple(sorted(pinned.get(buffers.get(name, name), ()))))
        for name, n in zip(devices, slots, strict=True)
    )


def _real(path: str) -> dict[str, dict[str, int]]:
    try:
        with Path(path).open("rb") as file:
            log = load_log.parse_load_log(file.read(_LOG_HEAD).decode("utf-8", "replace"))
    except OSError:
        return {}
    found: dict[str, dict[str, int]] = {}
    for name, table in asdict(log).items():
        if name.endswith("_bytes"):
            for buffer, n_bytes in table.items():
                found.setdefault(buffer, {})[name.removesuffix("_bytes")] = n_bytes
    return found


def _cause(end: RunEnd | None, path: str) -> str:
    if end is not None and end.reason == "stopped":
        return ""
    cause = causes.known_cause(
        native.tail(path, _CAUSE_LINES), end.exit_code if end else None, end.signal if end else None
    )
    return cause.text if cause else ""


def _tail(path: str) -> tuple[str, ...]:
    return tuple(native.tail(path, _TAIL_LINES).splitlines())
