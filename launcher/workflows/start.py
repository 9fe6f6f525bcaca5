"""Start what was planned and passed its gates: wait, compare, prove its depth; what does not come up is stopped again.

Apart from `switch`, which decides whether something is started at all and what has to go for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from launcher.errors import DeviceUnusable, Refused
from launcher.facts import devices as device_facts
from launcher.facts import load_log, nvml
from launcher.measure import learned, proven, verify
from launcher.serve import native, state, wait
from launcher.serve.rpc import RpcSpawn
from launcher.structs import Audit, Engine, Plan, RunRecord
from launcher.workflows.plan import Planned
from launcher.workflows.target import Target


class Progress(Protocol):
    """Where a start says how far it is."""

    def loading(self, stage: str, done: int, total: int | None, seconds: float) -> None:
        """How far the load is; called a few times a second."""

    def audited(self, audit: Audit | None) -> None:
        """Planned against real bytes; None when the load log could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switched:
    """The server that runs now, the plan that it runs, and what its load log says of it."""

    record: RunRecord
    planned: Planned
    audit: Audit | None


def start(
    target: Target, planned: Planned, progress: Progress, asked: Mapping[str, Any], *, alone: bool, quick: bool
) -> Switched:
    """Start, wait, compare, prove.

    alone  nothing of ours was stopped for it, whose memory might still be coming back
    quick  READY with the first answer, without a deep prompt

    Raises Refused, EngineFailed (see serve/native and serve/wait); whatever ends it, the server is stopped then.
    """
    before = _free_bytes(planned.plan)
    restarts = target.slug.restarts if target.slug else 0
    record = native.start(planned.launch, target.name, rpc=rpc_spawn(planned), restarts=restarts, asked=asked)
    ready = False
    try:
        wait.wait_answer(record, plan=planned.plan, on_progress=progress.loading)
        # Before the deep prompt: what a card's pool takes there is what the margin is for, and no context.
        audit = audited(planned.plan, record, before)
        if audit is not None:
            # The server is up: that a disk is full is no reason to call this a failure.
            with contextlib.suppress(Refused):
                record = state.update(record, audit=audit)
                _learn(planned.plan, planned.inventory.engine, audit, alone=alone)
        progress.audited(audit)
        record = _proven(record, planned, progress, quick=quick)
        record = wait.mark_ready(record)
        ready = True
    finally:
        if not ready:
            native.stop(record)
    return Switched(record=replace(record, audit=audit), planned=planned, audit=audit)


def _proven(record: RunRecord, planned: Planned, progress: Progress, *, quick: bool) -> RunRecord:
    """The record with the depth that it survives: shown by an earlier start of the same, else by a prompt now."""
    plan, name = planned.plan, proof_key(planned)
    n_tokens = proven.depth_tokens(plan)
    proof = proven.read().get(name) if name else None
    if proof is None or proof.n_tokens < n_tokens:
        prompt = None if quick else proven.prompt(planned.inputs.header, n_tokens)
        if prompt is None:
            return record
        wait.prove(record, prompt, plan=plan, on_progress=progress.loading)
        proof = proven.Proof(n_tokens=n_tokens, at=time.time())
        if name:
            with contextlib.suppress(Refused):
                proven.keep(name, proof)
    with contextlib.suppress(Refused):
        return state.update(record, proven_tokens=proof.n_tokens, proven_at=proof.at)
    return replace(record, proven_tokens=proof.n_tokens, proven_at=proof.at)


def proof_key(planned: Planned) -> str | None:
    """The name under which this launch is remembered with this driver; None without an engine that can be told."""
    cards = any(d.device.uuid for d in planned.plan.devices)
    return planned.key(driver=nvml.driver_version() if cards else "")


def _free_bytes(planned: Plan) -> dict[str, int]:
    """UUID -> what is free on every card now; empty, and no driver asked, when the plan uses none."""
    if not any(d.device.uuid for d in planned.devices):
        return {}
    cards = device_facts.nvml_cards()
    return {card.uuid: card.free_bytes for card in cards if card.uuid and card.free_bytes is not None}


def _learn(planned: Plan, engine: Engine | None, audit: Audit, *, alone: bool) -> None:
    if engine is not None:
        driver = nvml.driver_version() if audit.cards else ""
        learned.learn(planned, audit, engine.digest, driver, card_deltas=alone)


def rpc_spawn(planned: Planned) -> RpcSpawn | None:
    """The RPC servers to start with the engine, None when the target wants none.

    Raises DeviceUnusable (rpc-server-missing).
    """
    slug, engine = planned.inputs.target.slug, planned.inventory.engine
    if slug is None or slug.rpc is None or not slug.rpc.spawn:
        return None
    used = {d.device.endpoint for d in planned.plan.devices}
    hosts = tuple(h for h in slug.rpc.hosts if h in used)
    if not hosts:
        return None
    if engine is None or engine.rpc_server is None:
        raise DeviceUnusable(
            "rpc-server-missing",
            f"{slug.name} starts RPC servers, and no ggml-rpc-server lies beside {engine.path if engine else 'it'}",
            fix="launcher engine install",
        )
    return RpcSpawn(hosts=hosts, server_path=engine.rpc_server, threads=planned.plan.settings.threads or 1)


def audited(planned: Plan, record: RunRecord, before: Mapping[str, int] | None = None) -> Audit | None:
    """Load log and driver beside the plan; None when the log does not show a whole load.

    before  free bytes by UUID before the start
    """
    log = load_log.parse_load_log(Path(record.log_path).read_text(encoding="utf-8", errors="replace"))
    if not log.model_bytes:
        return None
    devices = tuple(d.device for d in planned.devices if d.device.uuid)
    pids = frozenset({record.server.pid} if record.server else ())
    seen = verify.held(devices, device_facts.nvml_cards(), before or {}, pids) if devices else {}
    return verify.audit(planned, log, seen)
