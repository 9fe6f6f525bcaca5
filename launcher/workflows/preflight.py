"""All gates of a launch at once, for the state after servers of ours would be gone. Nothing is started or stopped."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.errors import DeviceUnusable, LauncherError, ModelUnreadable, Refused, UsageError
from launcher.facts.paths import state_dir
from launcher.facts.surroundings import Surroundings, read_surroundings
from launcher.serve import container as boxes
from launcher.serve import gates_port, state
from launcher.serve import preflight as gatekeeper
from launcher.structs import Engine, Gate, Plan, RunRecord
from launcher.workflows import container, overrides, ways_out, world
from launcher.workflows import plan as pipeline
from launcher.workflows import target as targets
from launcher.workflows.plan import Inputs, Planned
from launcher.workflows.target import Target
from launcher.workflows.world import World


@contextlib.contextmanager
def as_gate() -> Iterator[None]:
    """What ends here before there are gates is a closed one all the same: the same id, as Refused."""
    try:
        yield
    except (ModelUnreadable, DeviceUnusable) as error:
        raise Refused(error.reference, error.message, context=error.context, fix=error.fix) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Every gate; the plan when there is one."""

    target: Target
    gates: tuple[Gate, ...]
    planned: Planned | None

    @property
    def plan(self) -> Plan | None:
        """The plan, None when there is none."""
        return self.planned.plan if self.planned else None


def run(
    text: str, given: Mapping[str, Any], *, rig: str | None = None, engine: str | None = None, force: bool = False
) -> Checked:
    """`preflight`: gates for this machine, or for a rig file (its ports and processes are not looked at).

    Raises UsageError, SlugInvalid, Refused (nothing to make gates of); whatever else is wrong is a closed gate.
    """
    with as_gate():
        target = targets.resolve(text)
    gone = () if rig else state.running()
    command = overrides.command("launcher preflight", {"--force": force, "--rig": rig, "--engine": engine})
    return check(target, given, rig=rig, engine=engine, force=force, gone=gone, command=command)


def refuse(checked: Checked) -> None:
    """Raise Refused for the first closed gate, with the others in its context."""
    gatekeeper.refuse_if_closed(checked.gates, checked.target.name)


def check(
    target: Target,
    given: Mapping[str, Any],
    *,
    rig: str | None = None,
    engine: str | None = None,
    force: bool = False,
    gone: tuple[RunRecord, ...] = (),
    command: str = "launcher preflight",
    own_memlock: bool = True,
) -> Checked:
    """Plan as far as that goes, then every gate; a way out is shown as `command` with what must change.

    own_memlock  False: the server will have another limit of locked memory than this process (a service's unit)
    """
    box, box_error = _box(target, given, engine)
    found, engine_error = (None, box_error) if box or box_error else _engine(target, engine)
    with as_gate():
        surveyed, devices_error = _world(target, given, rig, found, gone)
        surveyed = world.boxed(surveyed, box)
    inputs, model_error, plan_error = None, None, devices_error
    planned: Planned | None = None
    try:
        inputs = pipeline.gather(target, given, surveyed)
    except ModelUnreadable as error:
        model_error = error
    if inputs is not None and devices_error is None:
        planned, plan_error = _planned(inputs)
    host, port = overrides.address(target.slug, given)
    gates = gatekeeper.gates(
        slug=target.slug,
        target=target.name,
        plan=planned.plan if planned else None,
        plan_error=plan_error,
        inventory=surveyed.inventory,
        model_error=model_error,
        engine=box.engine if box else found,
        engine_error=None if rig and engine is None else engine_error,
        port_owner=None if rig else gates_port.port_owner(host, port),
        force=force,
        own_running=gone,
        header=inputs.header if inputs else None,
        host=host,
        swap_bytes=0 if rig else None,
        around=None if rig else _around(planned, own_memlock),
    )
    gates = _with_box(gates, planned)
    return Checked(target=target, gates=_ordered(gates, planned, command), planned=planned)


def _ordered(gates: tuple[Gate, ...], planned: Planned | None, command: str) -> tuple[Gate, ...]:
    """Status last, since `--force` is no help where something else is closed; fixes that repeat this very command."""
    found = gates
    if planned is not None and planned.plan.refusal is not None:
        fix = pipeline.way_out(planned.plan, command)
        found = tuple(replace(g, fix=fix) if not g.ok and g.name in _SHORT else g for g in found)
    return tuple(sorted(found, key=lambda g: g.name == "status-needs-force"))


def _around(planned: Planned | None, own_memlock: bool) -> Surroundings:
    plan = planned.plan if planned else None
    files = [path for path in (plan.model.path, plan.drafter_path) if path] if plan else []
    found = read_surroundings(os.environ, files=files, state=state_dir())
    return found if own_memlock else replace(found, memlock_bytes=None, memlock_most_bytes=None)


_SHORT = frozenset({"host-ram-short", "device-short", "does-not-fit"})


def _engine(target: Target, explicit: str | None) -> tuple[Engine | None, DeviceUnusable | None]:
    try:
        return world.engine_for(target.slug, explicit)
    except DeviceUnusable as error:
        return None, error


def _box(
    target: Target, given: Mapping[str, Any], explicit: str | None
) -> tuple[container.Box | None, DeviceUnusable | None]:
    try:
        return container.find(target.slug, given, explicit), None
    except DeviceUnusable as error:
        return None, error


def _with_box(gates: tuple[Gate, ...], planned: Planned | None) -> tuple[Gate, ...]:
    """The gates of the container beside the others; what this process may lock says nothing about one."""
    launch = planned.launch if planned else None
    if launch is None or launch.container is None or planned is None:
        return gates
    projector = planned.inputs.projector
    files = container.files_of(launch, str(projector) if projector else None)
    own = boxes.gates(launch.container, planned.plan, planned.inventory.host, files)
    return (*(g for g in gates if g.name not in ("memlock", "memlock-short")), *own)


def _world(
    target: Target, given: Mapping[str, Any], rig: str | None, engine: Engine | None, gone: tuple[RunRecord, ...]
) -> tuple[World, LauncherError | None]:
    """The world, or this host without devices and the reason why they cannot be had."""
    if rig:
        return world.from_rig(rig, engine, target.slug, given), None
    try:
        return world.here(engine, target.slug, given, gone), None
    except DeviceUnusable as error:
        return world.host_only(engine), error


def _planned(inputs: Inputs) -> tuple[Planned | None, LauncherError | None]:
    try:
        return ways_out.added(pipeline.make(inputs)), None
    except UsageError:
        raise
    except LauncherError as error:
        return None, error
