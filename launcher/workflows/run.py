"""Plan, gates, then become llama-server: for systemd, llama-swap, tmux. Servers of ours are left alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from launcher.serve import native
from launcher.workflows import overrides, preflight, switch
from launcher.workflows import target as targets


def run(text: str, given: Mapping[str, Any], *, engine: str | None, force: bool) -> int:
    """Never comes back, except from a target with RPC servers to look after: then with the engine's exit code.

    Raises UsageError, SlugInvalid, Refused, DeviceUnusable, EngineFailed.
    """
    target = targets.resolve(text)
    command = overrides.command("launcher run", {"--force": force, "--engine": engine})
    checked = preflight.check(target, given, engine=engine, force=force, command=command)
    preflight.refuse(checked)
    planned = checked.planned
    assert planned is not None  # without a plan a gate is closed
    launch = planned.launch
    for warning in planned.plan.warnings:
        print(f"note: {warning}", file=sys.stderr)
    print(f"{target.name}: http://{launch.host}:{launch.port}/v1 as {launch.alias}", file=sys.stderr)
    return native.exec_foreground(launch, rpc=switch.rpc_spawn(planned))
