"""TARGET + options -> headers -> inventory -> placement -> command line -> the engine's dry run -> placement.

Two rounds at most: the dry run of the first placement replaces the compute bounds; a placement that changes by
that is measured once more and kept only if it fits by its own measure.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher import planner
from launcher.errors import DeviceUnusable, DoesNotFit
from launcher.facts import dry_run as dry
from launcher.facts import dry_run_cache, gguf_header
from launcher.facts import engine as engine_facts
from launcher.measure import learned, proven, verify
from launcher.planner import rules
from launcher.serve import argv, numa, ports, preflight, state
from launcher.structs import (
    Engine,
    Inventory,
    Launch,
    MeasuredCompute,
    ModelHeader,
    Plan,
    RunRecord,
    Settings,
    Source,
)
from launcher.workflows import container, overrides, ways_out, world
from launcher.workflows import target as targets
from launcher.workflows.container import Box
from launcher.workflows.target import Target
from launcher.workflows.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """All that one plan is made of: the same inputs give the same plan."""

    target: Target
    header: ModelHeader
    drafter: ModelHeader | None
    inventory: Inventory
    settings: Settings
    given: Mapping[str, Any]
    no_dry_run: str = ""
    projector: Path | None = None
    box: Box | None = None

    def plan(self, settings: Settings | None = None, measured: MeasuredCompute | None = None) -> Plan:
        """The planner's answer, for other settings or with measured buffers."""
        wanted = settings or self.settings
        return planner.make_plan(
            target=self.target.name,
            header=self.header,
            drafter=self.drafter if wanted.drafter_type else None,
            inventory=self.inventory,
            settings=wanted,
            measured=measured,
            projector_bytes=self.projector.stat().st_size if self.projector else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, the process that it becomes, and what it was made of. `lacks`: the engine cannot be told this plan."""

    inputs: Inputs
    plan: Plan
    launch: Launch
    lacks: DeviceUnusable | None = None
    command: str = "launcher plan"  # what was typed, without TARGET and overrides

    @property
    def inventory(self) -> Inventory:
        """What was planned with."""
        return self.inputs.inventory

    def key(self, driver: str = "") -> str | None:
        """The name of this launch where something about it is remembered; None without an engine."""
        engine, slug = self.inventory.engine, self.inputs.target.slug
        if engine is None:
            return None
        headers = (self.inputs.header, self.inputs.drafter if self.plan.drafter_path else None)
        return proven.key(
            self.plan,
            engine=engine.digest,
            driver=driver,
            digests=[h.digest for h in headers if h is not None],
            extra=slug.extra_args if slug else (),
        )

    @property
    def drafter_bytes(self) -> int | None:
        """Size of the drafter's file, None without one."""
        return self.inputs.drafter.file_bytes if self.inputs.drafter and self.plan.drafter_path else None


def run(
    text: str, given: Mapping[str, Any], *, rig: str | None = None, engine: str | None = None, no_engine: bool = False
) -> Planned:
    """`plan`: for this machine as it is once servers of ours are gone, or for a rig file.

    Raises UsageError, SlugInvalid, ModelUnreadable, DeviceUnusable; a plan that does not fit is returned.
    """
    target = targets.resolve(text)
    gone = () if rig else state.running()
    found, warnings = survey(target, given, rig=rig, engine=engine, no_engine=no_engine, gone=gone)
    inputs = gather(target, given, found)
    planned = make(inputs)
    planned = replace(planned, plan=replace(planned.plan, warnings=(*planned.plan.warnings, *warnings)))
    command = overrides.command("launcher plan", {"--rig": rig, "--engine": engine, "--no-engine": no_engine})
    return ways_out.added(replace(planned, command=command))


def survey(
    target: Target,
    given: Mapping[str, Any],
    *,
    rig: str | None = None,
    engine: str | None = None,
    no_engine: bool = False,
    gone: Iterable[RunRecord] = (),
) -> tuple[World, tuple[str, ...]]:
    """What there is to plan with, and what to say about it."""
    leaving = tuple(gone)
    notes = [f"planned as if {r.slug} on port {r.port} were stopped" for r in leaving]
    box = None if no_engine else container.find(target.slug, given, engine)
    found, missing = (None, None) if no_engine or box else world.engine_for(target.slug, engine, notes)
    if missing is not None:
        notes.append(f"{missing.message}: planned by formulas alone ({missing.fix})")
    if rig:
        return world.boxed(world.from_rig(rig, found, target.slug, given), box), tuple(notes)
    return world.boxed(world.here(found, target.slug, given, leaving), box), tuple(notes)


def gather(target: Target, given: Mapping[str, Any], found: World) -> Inputs:
    """Read the headers and settle the settings. Raises ModelUnreadable, UsageError."""
    header = targets.header_of(target)
    settings = overrides.settings(target.slug, given)
    settings = overrides.with_pins(settings, target.pins, given, found.inventory.devices)
    overrides.check_cache(settings, header)
    drafter, kind, depth = _drafter(target, given)
    return Inputs(
        target=target,
        header=header,
        drafter=drafter,
        inventory=found.inventory,
        settings=overrides.with_drafter(settings, kind, depth, given),
        given=given,
        no_dry_run=found.no_dry_run,
        box=found.box,
        projector=targets.projector_path(target, given.get("mmproj")),
    )


def _drafter(target: Target, given: Mapping[str, Any]) -> tuple[ModelHeader | None, str | None, int]:
    """(header of the draft model, kind, depth): the option's, else the slug's, else none."""
    slug = target.slug
    named = given.get("drafter")
    depth = slug.drafter.n_max if slug and slug.drafter else 3
    if named == "off" or given.get("draft_max") == 0:
        return None, None, 0
    if named:
        draft = targets.named_header(named, "--drafter off     # or --drafter /path/to/drafter.gguf")
        kind = targets.drafter_type(draft)
        if kind == "draft-simple" and slug and slug.drafter and slug.drafter.type == "draft-simple":
            return draft, slug.drafter.type, depth
        return draft, kind, depth
    if slug is None or slug.drafter is None:
        return None, None, 0
    if slug.drafter.type == "draft-mtp" and slug.drafter.file == slug.model.file:
        return None, slug.drafter.type, depth
    from launcher.weights import find

    ref = targets.drafter_ref(slug)
    assert ref is not None
    return gguf_header.read_header(find.find_model(ref, target=target.name)), slug.drafter.type, depth


def make(inputs: Inputs) -> Planned:
    """Plan, ask the engine, plan again; never more than two dry runs."""
    return _noted(_measured(inputs), _too_deep(inputs))


def _measured(inputs: Inputs) -> Planned:
    first = launched(inputs, inputs.plan())
    if first.lacks is not None:
        return _noted(first, _UNASKED.format(inputs.no_dry_run or first.lacks))
    measured, note = _dry_run(first)
    if measured is None:
        return _as_seen_before(first, note) or _noted(first, _UNASKED.format(note))
    second = launched(inputs, inputs.plan(measured=measured))
    if same_placement(first.plan, second.plan):
        return _noted(second, note)
    again, note_again = _dry_run(second)
    if again is not None:
        third = launched(inputs, pinned(inputs, second.plan).plan(measured=again))
        if third.plan.fits and same_placement(second.plan, third.plan):
            return _noted(third, note_again)
    return _noted(launched(inputs, pinned(inputs, first.plan).plan(measured=measured)), note)


_UNASKED = "no dry run ({}): compute buffers are upper bounds"
# The one thing that a dry run which measured the model can lack; the engine's own words are about its insides.
_UNMEASURED = "the engine's dry run cannot measure this drafter: its numbers are formulas"
_NO_FIT = "this llama-server has no --fit"


def _as_seen_before(first: Planned, note: str) -> Planned | None:
    """The same placement with the compute buffers that an earlier launch of it showed; None when there was none."""
    engine = first.inventory.engine
    seen = learned.compute_bytes(learned.read(), first.plan, engine.digest) if engine else None
    if seen is None:
        return None
    measured = MeasuredCompute(
        compute_bytes=seen,
        host_compute_bytes=first.plan.host.terms["compute"],
        model_bytes={},
        context_bytes={},
        source=Source.MEASURED,
    )
    again = launched(first.inputs, pinned(first.inputs, first.plan).plan(measured=measured))
    return _noted(again, f"no dry run ({note}): compute buffers as an earlier start showed them")


def _too_deep(inputs: Inputs) -> str:
    """The engine gives no stream more than the model was trained for, and allocates what was asked all the same."""
    trained = inputs.header.metadata.get(f"{inputs.header.arch}.context_length")
    asked = inputs.settings.n_ctx_per_stream
    if not isinstance(trained, int) or asked is None or asked <= trained:
        return ""
    return (
        f"context {asked:,} is more than the {trained:,} that the model was trained for: "
        f"the engine cuts every stream at that (--ctx {trained} plans for it)"
    )


def launched(inputs: Inputs, plan: Plan) -> Planned:
    """A plan with its command line; rules that do not resolve to the placement are refused here.

    Raises Refused (rules-mismatch).
    """
    rules.check(plan, inputs.header)
    host, port = overrides.address(inputs.target.slug, inputs.given)
    engine = inputs.inventory.engine
    lacks = None
    try:
        launch = _build(inputs, plan, host, port, asked=True)
    except DeviceUnusable as error:
        lacks = error
        launch = _build(inputs, plan, host, port, asked=False)
    if engine is not None and lacks is None:
        missing = tuple(n for n in (inputs.target.slug.engine.needs if inputs.target.slug else ()) if not engine.can(n))
        lacks = argv.lacks(engine, missing) if missing and _drafts(plan, missing) else None
    return Planned(inputs=inputs, plan=plan, launch=launch, lacks=lacks)


def _drafts(plan: Plan, missing: tuple[str, ...]) -> bool:
    """Whether what is missing matters: a drafter's ability does not once the drafter is off."""
    return plan.settings.drafter_type is not None or any(not n.startswith("spec-type:") for n in missing)


def _build(inputs: Inputs, plan: Plan, host: str, port: int, *, asked: bool) -> Launch:
    projector = str(inputs.projector) if inputs.projector else None
    launch = argv.build(
        plan,
        engine=inputs.inventory.engine if asked else None,
        host=host,
        port=port,
        alias=inputs.target.alias,
        slug=inputs.target.slug,
        base_env=os.environ,
        empty_config=str(state.empty_config_dir()),
        mmproj=projector,
    )
    if inputs.box is None:
        return launch
    return replace(launch, container=container.contained(launch, inputs.box, projector))


def _dry_run(planned: Planned) -> tuple[MeasuredCompute | None, str]:
    """(what the engine says about this plan or None, what to say about that): kept from before, else asked now.

    A kept answer disturbs nobody, so it serves where the engine must not be asked as well.
    """
    inputs, launch = planned.inputs, planned.launch
    engine = inputs.inventory.engine
    if engine is None:
        return None, inputs.no_dry_run
    headers = (inputs.header, inputs.drafter)
    digests = {h.path: h.digest for h in headers if h is not None}
    name = dry_run_cache.key(
        engine.digest, numa.split_policy(launch.argv)[1], digests, (d.device for d in planned.plan.devices)
    )
    done = dry_run_cache.load(name)
    if done is None:
        if inputs.no_dry_run:
            return None, inputs.no_dry_run
        if not engine.can("flag:--fit"):
            return _bounded(planned, engine)
        words = argv.dry_run_argv(launch, ports.free_port("127.0.0.1"))
        if not engine.can("flag:--log-jsonl"):
            words = tuple(w for w in words if w != "--log-jsonl")
        drafts = planned.plan.settings.drafter_type is not None and planned.plan.settings.draft_n_max > 0
        done = dry.dry_run(words, launch.env, expect_drafter=drafts)
        dry_run_cache.store(name, done)
    if done.status != "ok" or done.measured is None:
        return None, " ".join(done.note.split())
    notes = (_UNMEASURED if done.note else "", verify.disagreement(planned.plan, done.measured))
    return _in_rig_names(done.measured, planned.plan), "; ".join(n for n in notes if n)


def _bounded(planned: Planned, engine: Engine) -> tuple[MeasuredCompute | None, str]:
    """The lower of two upper bounds, llama-fit-params' and the formula's, for an engine that cannot measure itself."""
    program = engine_facts.fit_params(engine)
    said = argv.parse_back(planned.launch.argv)
    if program is None or planned.plan.settings.n_parallel > 1 or "extra" in said:
        why = "llama-fit-params knows one stream and no other flags" if program else "no llama-fit-params beside it"
        return None, f"{_NO_FIT}, and {why}"
    done = dry.fit_print(program, planned.launch.argv, planned.launch.env)
    if done.measured is None:
        return None, " ".join(done.note.split())
    formula = {d.device.name: d.terms["compute"] for d in planned.plan.devices}
    bounds = {name: min(n, formula.get(name, n)) for name, n in done.measured.compute_bytes.items()}
    host = min(done.measured.host_compute_bytes, planned.plan.host.terms["compute"])
    measured = replace(done.measured, compute_bytes=bounds, host_compute_bytes=host, source=Source.FORMULA)
    return _in_rig_names(measured, planned.plan), _UNASKED.format(_NO_FIT + " but llama-fit-params")


def _in_rig_names(measured: MeasuredCompute, plan: Plan) -> MeasuredCompute:
    """The engine counts only the devices it is shown; the planner knows them by what they are called on the rig."""
    names = {d.device.name: d.rig_name for d in plan.devices}

    def renamed(found: Mapping[str, int]) -> dict[str, int]:
        return {names.get(name, name): n for name, n in found.items()}

    return replace(
        measured,
        compute_bytes=renamed(measured.compute_bytes),
        model_bytes=renamed(measured.model_bytes),
        context_bytes=renamed(measured.context_bytes),
        draft_bytes=None if measured.draft_bytes is None else renamed(measured.draft_bytes),
    )


def same_placement(a: Plan, b: Plan) -> bool:
    """Whether two plans put every layer and bundle on the same devices."""
    return a.tensor_split == b.tensor_split and a.layers == b.layers and a.rules == b.rules


def pinned(inputs: Inputs, plan: Plan) -> Inputs:
    """Inputs that leave the planner no choice but the placement of a plan of theirs."""
    by_name = {d.name: d for d in inputs.inventory.devices}
    settings = replace(
        inputs.settings,
        residency={d.rig_name: d.resident_layers for d in plan.devices if d.resident_layers} or "none",
        tensor_split=plan.tensor_split or None,
        keep_order=True,
        reserve_bytes={
            k: v for k, v in inputs.settings.reserve_bytes.items() if k in {d.rig_name for d in plan.devices}
        },
    )
    devices = tuple(by_name[d.rig_name] for d in plan.devices)
    return replace(inputs, settings=settings, inventory=replace(inputs.inventory, devices=devices))


def _noted(planned: Planned, note: str) -> Planned:
    if not note:
        return planned
    return replace(planned, plan=replace(planned.plan, warnings=(*planned.plan.warnings, note)))


def refuse(plan: Plan, command: str = "launcher plan") -> None:
    """Raise DoesNotFit (host-ram-short, device-short) for a plan with a refusal, with the sum and a way out."""
    # A gate for every device, host memory last: the one that the refusal is about, as on the screen.
    gates = dict(zip((*(d.device.name for d in plan.devices), "host"), preflight.fit(plan), strict=True))
    where = plan.refusal.where if plan.refusal else ""
    closed = next((gates[k] for k in (where, *gates) if k in gates and not gates[k].ok), None)
    if closed is None:
        return
    fix = preflight.way_out(plan, command)
    if closed.name == "host-ram-short":
        raise DoesNotFit("host-ram-short", closed.detail, context=closed.context, fix=fix)
    raise DoesNotFit("device-short", closed.detail, context=closed.context, fix=fix)


def way_out(plan: Plan, command: str) -> str:
    """The command with what must change; where nothing fits, `plan`, since there is nothing to start or to check."""
    ways = plan.refusal.ways_out if plan.refusal else ()
    helps = any(way.fits and " more RAM" not in way.change for way in ways)
    return preflight.way_out(plan, command if helps else "launcher plan")
