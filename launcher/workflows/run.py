"""Plan, gates, then become llama-server: for systemd, llama-swap, tmux. Servers of ours are left alone."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import Any

from launcher.errors import Refused
from launcher.serve import boxed, native
from launcher.structs import Plan
from launcher.workflows import overrides, preflight, start
from launcher.workflows import target as targets


def run(text: str, given: Mapping[str, Any], *, engine: str | None, force: bool, cards: str | None = None) -> int:
    """Never comes back, except from a target with RPC servers to look after: then with the engine's exit code.

    cards  UUIDs that the plan must be on, and on no others, separated by commas: no start on the CPU because a driver
           is late, none on a card that is kept for something else
    Raises UsageError, SlugInvalid, Refused (a gate; cards-missing, cards-others), DeviceUnusable, EngineFailed.
    """
    with preflight.as_gate():
        target = targets.resolve(text)
    command = overrides.command("launcher run", {"--force": force, "--engine": engine, "--cards": cards})
    checked = preflight.check(target, given, engine=engine, force=force, command=command)
    preflight.refuse(checked)
    planned = checked.planned
    assert planned is not None  # without a plan a gate is closed
    launch = planned.launch
    _refuse_other_cards(cards, planned.plan, text)
    for warning in planned.plan.warnings:
        print(f"note: {warning}", file=sys.stderr)
    print(f"{target.name}: http://{launch.host}:{launch.port}/v1 as {launch.alias}", file=sys.stderr)
    return native.exec_foreground(boxed.foreground(launch), rpc=start.rpc_spawn(planned))


def _refuse_other_cards(cards: str | None, plan: Plan, text: str) -> None:
    wanted = [uuid.strip() for uuid in (cards or "").split(",") if uuid.strip()]
    planned = [d.device.uuid for d in plan.devices if d.device.uuid]
    missing = [uuid for uuid in wanted if uuid not in planned]
    if missing:
        raise Refused(
            "cards-missing",
            f"the plan is not on {len(missing)} of the {len(wanted)} cards that were named: {', '.join(missing)}",
            context=f"it is on: {', '.join(sorted(planned)) or 'the CPU alone'}",
            fix=f"nvidia-smi -L     # if they are gone for good: launcher service install {shlex.quote(text)}",
        )
    others = [uuid for uuid in planned if uuid not in wanted]
    if wanted and others:
        raise Refused(
            "cards-others",
            f"the plan is on {len(others)} of {len(planned)} cards that were not named: {', '.join(others)}",
            context=f"named: {', '.join(wanted)}",
            fix=f"--devices {','.join(wanted)}     # or a service for all of them: "
            f"launcher service install {shlex.quote(text)}",
        )
