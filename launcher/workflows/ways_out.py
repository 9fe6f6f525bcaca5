"""Changes that might make a plan fit, each planned on the same rig: the first four that change something."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from launcher.errors import LauncherError
from launcher.facts import gguf_header, slug
from launcher.structs import Plan, Settings, WayOut
from launcher.units import GIB, KIB
from launcher.workflows import overrides
from launcher.workflows import target as targets

if TYPE_CHECKING:
    from launcher.workflows.plan import Inputs, Planned

_MOST = 4
# A change that gives up more and spares less than one part in so many is no way out.
_WORTH = 100
_CTX = frozenset({"ctx", "ctx_total"})
_DRAFTER = frozenset({"drafter", "draft_max", "drafter_device", "drafter_layers", "drafter_experts"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """Options that replace those of `replaced` (keys of the given ones), and the settings that they make."""

    text: str
    settings: Settings
    replaced: frozenset[str]


def added(planned: Planned) -> Planned:
    """A plan that does not fit with its ways out; others come back as they are."""
    refusal = planned.plan.refusal
    if refusal is None:
        return planned
    ways = tuple(_ways(planned))
    return replace(planned, plan=replace(planned.plan, refusal=replace(refusal, ways_out=ways)))


def _ways(planned: Planned) -> list[WayOut]:
    """Settings first, then other slugs, memory last; a change that does no more than one before it is left out."""
    more = [_more_memory(planned.plan)] if _memory_helps(planned.plan) else []
    slugs = list(_other_slugs(planned.inputs))[: _MOST - 1 - len(more)]
    ways: list[WayOut] = []
    for change in _changes(planned.inputs.settings, planned.plan):
        if len(ways) + len(slugs) + len(more) >= _MOST:
            break
        try:
            overrides.check_cache(change.settings, planned.inputs.header)
            other = planned.inputs.plan(change.settings)
        except LauncherError:
            continue
        # The whole line: what was given before is part of the plan, and must be typed again.
        kept = overrides.words(planned.inputs.given, without=change.replaced)
        way = _way(" ".join([change.text, shlex.join(kept)]).strip(), other)
        if _changes_something(planned.plan, other) and not any(_as_good(before, way) for before in ways):
            ways.append(way)
    return [*ways, *slugs, *more]


def _as_good(before: WayOut, way: WayOut) -> bool:
    worth = before.host_required_bytes // _WORTH
    return (
        before.fits >= way.fits
        and before.resident_layers >= way.resident_layers
        # Once something fits, only more experts on the devices are worth giving up more.
        and (before.fits or before.host_required_bytes - way.host_required_bytes < worth)
    )


def _changes(s: Settings, plan: Plan) -> Iterator[_Change]:
    """In the order in which people would rather give things up."""
    n_ctx = plan.settings.n_ctx_per_stream or 0
    drafts = bool(s.drafter_type and s.draft_n_max)
    lean = replace(s, drafter_type=None, draft_n_max=0) if drafts else s
    off, also = ("--drafter off ", _DRAFTER) if drafts else ("", frozenset[str]())
    if plan.host.numa is not None and plan.host.numa.policy and s.numa not in ("auto", "interleave"):
        # a part of the nodes was named: all of them hold more
        yield _Change(text="--numa interleave", settings=replace(s, numa="interleave"), replaced=frozenset({"numa"}))
    if s.residency == "none" and plan.devices:
        yield _Change(text="--residency auto", settings=replace(s, residency="auto"), replaced=frozenset({"residency"}))
    if drafts:
        yield _Change(text="--drafter off", settings=lean, replaced=_DRAFTER)
        if s.drafter_experts != "host" and plan.devices:
            kept = replace(s, drafter_experts="host")
            yield _Change(text="--drafter-experts host", settings=kept, replaced=frozenset({"drafter_experts"}))
    half = n_ctx // 2 // KIB * KIB
    for shorter in (128 * KIB, half):
        if 2 * KIB <= shorter < n_ctx:
            less = replace(lean, n_ctx_per_stream=shorter)
            yield _Change(text=f"{off}--ctx {shorter // KIB}k", settings=less, replaced=_CTX | also)
    if s.type_k == "f16" and s.flash_attn != "off":  # without it the engine refuses a quantised V cache
        packed = replace(lean, type_k="q8_0", type_v="q8_0")
        yield _Change(text=f"{off}--kv q8_0", settings=packed, replaced=also | {"kv", "type_k", "type_v"})
    for ubatch in (2048, 512):
        if s.n_ubatch > ubatch:
            text, smaller = f"{off}-ub {ubatch}", replace(lean, n_ubatch=ubatch)
            yield _Change(text=text, settings=smaller, replaced=also | {"ubatch"})


def _changes_something(before: Plan, after: Plan) -> bool:
    return after.fits or (
        after.host.required_bytes != before.host.required_bytes
        or after.resident_layers != before.resident_layers
        or _worst(after) < _worst(before)
    )


def _worst(plan: Plan) -> int:
    return max((d.short_bytes for d in plan.devices), default=0)


def _other_slugs(inputs: Inputs) -> Iterator[WayOut]:
    """Slugs of the same model family that are on this machine, those that fit first."""
    mine = inputs.target.slug
    if mine is None:
        return
    from launcher.weights import find

    ways = []
    for entry in slug.names():
        if entry.name == mine.name:
            continue
        try:
            other = slug.load_file(entry.path, entry.name)
            if other.model.repo != mine.model.repo or other.model.file == mine.model.file:
                continue
            header = gguf_header.read_header(find.find_model(other.model))
            ref = targets.drafter_ref(other)
            draft = gguf_header.read_header(find.find_model(ref)) if ref else None
            settings = overrides.settings(other, {})
            kind, depth = (other.drafter.type, other.drafter.n_max) if other.drafter else (None, 0)
            settings = overrides.with_drafter(settings, kind, depth, {})
            plan = replace(inputs, header=header, drafter=draft, settings=settings).plan()
        except LauncherError:
            continue
        kept = overrides.words({k: v for k, v in inputs.given.items() if k == "devices"})
        ways.append(_way(" ".join([other.name, shlex.join(kept)]).strip(), plan))
    yield from sorted(ways, key=lambda w: not w.fits)


def _way(text: str, plan: Plan) -> WayOut:
    return WayOut(
        change=text,
        fits=plan.fits,
        resident_layers=len(plan.resident_layers),
        host_required_bytes=plan.host.required_bytes,
        host_available_bytes=plan.host.available_bytes,
        decode_tps=plan.speed.decode_tps,
        prefill_tps=plan.speed.prefill_tps,
    )


def _memory_helps(plan: Plan) -> bool:
    return plan.host.short_bytes > 0 and not _worst(plan)


def _more_memory(plan: Plan) -> WayOut:
    """Memory comes in modules: the shortfall rounded up to 8 GiB."""
    more = -(-plan.host.short_bytes // (8 * GIB)) * 8 * GIB
    way = _way(f"{more // GIB} GiB more RAM: fits as is", plan)
    return replace(way, fits=True, host_available_bytes=plan.host.available_bytes + more)
