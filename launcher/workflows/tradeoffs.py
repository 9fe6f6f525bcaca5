"""What else could be chosen on the same rig, and what one more bundle would need: all of it planned, none guessed.

All of it by formulas: a dry run a row would take seconds each. Rows are compared with each other alone, so that what
the formulas are above the engine's own numbers is in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from launcher.errors import LauncherError
from launcher.structs import DevicePlan, MeasuredCompute, Plan, Range, Source
from launcher.units import KIB
from launcher.workflows import overrides
from launcher.workflows import plan as pipeline

if TYPE_CHECKING:
    from launcher.workflows.plan import Inputs, Planned

UBATCHES = (4096, 2048, 1024, 512)
MOST_ROWS = 14
_LEAST_CTX = 2 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One choice, planned. `change` are its options, empty for the chosen one; `worth` False: it only costs prefill."""

    change: str
    plan: Plan
    chosen: bool
    worth: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OneMore:
    """A device with experts of its layers in host memory, and what it lacks for the smallest of them (0: nothing)."""

    device: str
    bundle_bytes: int
    short_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Smaller:
    """The largest smaller micro-batch that pays: what it frees on a device at the same placement, and what it buys.

    bundles       more bundles on the devices than with the chosen micro-batch (0: more bytes of them, or none)
    expert_bytes  more bytes of them
    """

    n_ubatch: int
    device: str
    freed_bytes: int
    bundles: int
    expert_bytes: int
    removes_overflow: bool
    prefill_tps: Range
    prefill_before_tps: Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What one more bundle would need, the device with the least shortage first."""

    devices: tuple[OneMore, ...]
    smaller: Smaller | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """One changed setting; `axis` and `rank` order them, a smaller micro-batch has the higher rank."""

    axis: str
    text: str
    rank: int
    settings: Mapping[str, Any] = field(compare=False)


_Options = tuple[_Option, ...]
_FAMILIES: tuple[tuple[str, ...], ...] = (
    (), ("ubatch",), ("ctx",), ("kv",), ("drafter",), ("experts",), ("drafter", "ubatch"), ("drafter", "ctx"),
    ("drafter", "kv"), ("kv", "ubatch"), ("kv", "ctx"), ("ctx", "ubatch"),
)  # fmt: skip


def rows(planned: Planned) -> tuple[Row, ...]:
    """The chosen settings first, then one change at a time, then pairs, at most MOST_ROWS.

    A smaller micro-batch costs prefill: it is worth it when it puts at least one bundle more on the devices than
    every larger one, or when fewer devices (or host memory) are over.
    """
    found: dict[_Options, Plan | None] = {}

    def plan(options: _Options) -> Plan | None:
        if options not in found:
            found[options] = _planned(planned.inputs, options)
        return found[options]

    axes = _axes(planned)
    result = []
    for options in _combinations(axes):
        made = plan(options)
        if made is None:
            continue
        smaller = next((o for o in options if o.axis == "ubatch"), None)
        worth = True
        if smaller is not None:
            rest = tuple(o for o in options if o is not smaller)
            larger = [(*rest, o) for o in axes["ubatch"] if o.rank < smaller.rank]
            worth = all(_pays(before, made) for o in (rest, *larger) if (before := plan(o)))
        result.append(Row(change=" ".join(o.text for o in options), plan=made, chosen=not options, worth=worth))
    return tuple(result)


def _axes(planned: Planned) -> dict[str, _Options]:
    """What may change, in the order in which a row names it."""
    s, n_ctx = planned.inputs.settings, planned.plan.settings.n_ctx_per_stream or 0
    drafts = bool(s.drafter_type and s.draft_n_max)
    shorter = [n_ctx // part // KIB * KIB for part in (2, 4)]
    # without flash attention the engine refuses a quantised V cache
    kinds = ("f16", "q8_0") if s.flash_attn != "off" else ("f16",)
    wanted: dict[str, list[tuple[str, dict[str, Any]]]] = {
        "drafter": [("--drafter off", {"drafter_type": None, "draft_n_max": 0})] if drafts else [],
        "experts": [("--drafter-experts host", {"drafter_experts": "host"})] if _experts_on_devices(planned) else [],
        "ctx": [(f"--ctx {n // KIB}k", {"n_ctx_per_stream": n}) for n in shorter if n >= _LEAST_CTX],
        "kv": [(f"--kv {k}", {"type_k": k, "type_v": k}) for k in kinds if (s.type_k, s.type_v) != (k, k)],
        "ubatch": [(f"-ub {n}", {"n_ubatch": n}) for n in UBATCHES if n < s.n_ubatch],
    }
    return {
        axis: tuple(_Option(axis=axis, text=text, rank=i, settings=changes) for i, (text, changes) in enumerate(each))
        for axis, each in wanted.items()
    }


def _experts_on_devices(planned: Planned) -> bool:
    """Whether the drafter has routed experts that host memory could hold instead."""
    draft = planned.inputs.drafter
    moved = planned.inputs.settings.drafter_experts == "host" or not planned.plan.devices
    return draft is not None and not moved and draft.metadata.get(f"{draft.arch}.expert_count", 0) not in (0, None)


def _combinations(axes: Mapping[str, _Options]) -> Iterator[_Options]:
    """Families of rows in the order of their use; a family that would make the table too long is left out whole."""
    n = 0
    for names in _FAMILIES:
        family = list(product(*(axes[name] for name in names)))
        if n + len(family) <= MOST_ROWS:
            n += len(family)
            yield from family


def _planned(inputs: Inputs, options: _Options) -> Plan | None:
    """None where the planner or the engine refuses these settings altogether."""
    changes = {k: v for o in options for k, v in o.settings.items()}
    try:
        settings = replace(inputs.settings, **changes)
        overrides.check_cache(settings, inputs.header)
        return inputs.plan(settings)
    except LauncherError:
        return None


def _pays(before: Plan, after: Plan) -> bool:
    """Whether a smaller micro-batch is worth its prefill: a bundle more on the devices, or an overflow less."""
    bundle = min((layer.bundle_bytes for layer in before.layers if layer.loaded and layer.bundle_bytes), default=0)
    gained = _resident_bytes(after) - _resident_bytes(before)
    more = len(after.resident_layers) > len(before.resident_layers)
    # of unequal sizes the same number may hold a bundle's worth more
    return more or 0 < bundle <= gained or _over(after) < _over(before)


def _resident_bytes(plan: Plan) -> int:
    return sum(layer.bundle_bytes for layer in plan.layers if layer.resident)


def _over(plan: Plan) -> int:
    """How many devices are over, host memory counted as one."""
    return sum(d.short_bytes > 0 for d in plan.devices) + (plan.host.short_bytes > 0)


def room(planned: Planned) -> Room:
    """What each device lacks for one more bundle of its layers, and the smaller micro-batch that would pay."""
    plan = planned.plan
    found = [(d, more) for d in plan.devices if (more := _one_more(planned, d)) is not None]
    found.sort(key=lambda f: f[1].short_bytes)
    over = max(plan.devices, key=lambda d: d.short_bytes, default=None)
    binding = over if over is not None and over.short_bytes else found[0][0] if found else None
    smaller = _smaller(planned, binding) if binding is not None else None
    return Room(devices=tuple(more for _, more in found), smaller=smaller)


def _one_more(planned: Planned, d: DevicePlan) -> OneMore | None:
    """The same placement with one more bundle on that device: a first or a last one changes its buffers too."""
    plan = planned.plan
    mine = set(d.layers)
    left = [x for x in plan.layers if x.index in mine and x.loaded and x.bundle_bytes and not x.resident]
    if not left:
        return None
    layer = min(left, key=lambda x: x.bundle_bytes)
    inputs = pipeline.pinned(planned.inputs, plan)
    held = {e.rig_name: e.resident_layers for e in plan.devices if e.resident_layers}
    held[d.rig_name] = tuple(sorted((*d.resident_layers, layer.index)))
    after = inputs.plan(replace(inputs.settings, residency=held), measured=_seen(plan))
    (short,) = (e.short_bytes for e in after.devices if e.rig_name == d.rig_name)
    return OneMore(device=d.device.name, bundle_bytes=layer.bundle_bytes, short_bytes=short)


def _seen(plan: Plan) -> MeasuredCompute | None:
    """What the engine's dry run said of this plan, read back from its terms; None without one."""

    def term(name: str) -> dict[str, int]:
        return {
            d.rig_name: d.terms[name] for d in plan.devices if d.source.get(name) in (Source.DRY_RUN, Source.MEASURED)
        }

    compute, draft = term("compute"), term("drafter")
    if not compute and not draft:
        return None
    return MeasuredCompute(
        compute_bytes=compute,
        host_compute_bytes=plan.host.terms["compute"],
        model_bytes={},
        context_bytes={},
        draft_bytes=draft or None,
    )


def _smaller(planned: Planned, d: DevicePlan) -> Smaller | None:
    """The largest smaller micro-batch that pays, both sides planned by formulas."""
    inputs, chosen = planned.inputs, planned.inputs.settings.n_ubatch
    before = inputs.plan()
    for n in UBATCHES:
        if n >= chosen:
            continue
        after = inputs.plan(replace(inputs.settings, n_ubatch=n))
        if not _pays(before, after):
            continue
        same = pipeline.pinned(inputs, planned.plan)
        used, less = (
            next(e.used_bytes for e in p.devices if e.rig_name == d.rig_name)
            for p in (same.plan(), same.plan(replace(same.settings, n_ubatch=n)))
        )
        return Smaller(
            n_ubatch=n,
            device=d.device.name,
            freed_bytes=used - less,
            bundles=max(0, len(after.resident_layers) - len(before.resident_layers)),
            expert_bytes=max(0, _resident_bytes(after) - _resident_bytes(before)),
            removes_overflow=_over(after) < _over(before),
            prefill_tps=after.speed.prefill_tps,
            prefill_before_tps=before.speed.prefill_tps,
        )
    return None
