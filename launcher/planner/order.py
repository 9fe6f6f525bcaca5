"""The order of the devices, and where the drafter goes among them: `place` solves each order, the best one stays.

The design counts this among the duties of `place`, which is long enough with the search of one order.
"""

from __future__ import annotations

from dataclasses import replace

from launcher.errors import UsageError
from launcher.planner import budget, drafter, owner, place, speed
from launcher.planner.budget import Problem
from launcher.planner.place import Choice
from launcher.structs import Host


def _choice(p: Problem) -> Choice:
    n_slots = p.shape.n_layer + 1
    if not p.devices:
        return Choice(counts=(), resident=(), short_bytes=())
    split = p.settings.tensor_split
    if split is not None and (len(split) != len(p.devices) or not any(split)):
        raise UsageError(
            "split-mismatch",
            f"-ts has {len(split)} value{'s' * (len(split) != 1)} for {len(p.devices)} devices",
            fix=f"-ts {','.join(['1'] * len(p.devices))}",
        )
    choice = place.choose(p, owner.counts(p.shape.n_layer, split) if split is not None else None)
    if choice is None:
        raise UsageError(
            "residency-impossible",
            f"no split of {n_slots} slots gives every device the layers that residency names for it",
            context="each device owns one run of neighbouring layers, in device order, so its bundles must lie in it",
            fix="--residency auto     # or a map in layer order: lowest layers on the first device",
        )
    return choice


def _with_drafter_elsewhere(p: Problem) -> tuple[Problem, Choice]:
    """The choice, or the better one in which the device named for the drafter holds nothing else."""
    apart = drafter.elsewhere(p)
    if apart is not None and apart.settings.tensor_split is not None:
        return apart, _choice(apart)
    try:
        choice = _choice(p)
    except UsageError:
        # a residency map may leave the drafter's device no layer of the target
        if apart is None or not _holds_drafter(p, apart):
            raise
        return apart, _choice(apart)
    if apart is None or not _holds_drafter(p, apart):
        return p, choice
    other = _choice(apart)
    better = (other.fits, -_host_bundles(apart, other)) > (choice.fits, -_host_bundles(p, choice))
    return (apart, other) if better else (p, choice)


def _holds_drafter(p: Problem, apart: Problem) -> bool:
    """Whether the device named for the drafter holds it, with a context and the margin."""
    named = next(d for d in p.devices if d not in apart.devices)
    measured = (p.measured.draft_bytes or {}).get(named.name) if p.measured else None
    size = drafter.apart(p, named.backend) if measured is None else measured
    return size + budget.context_bytes(named)[0] + budget.margin_bytes(named, p.settings) <= (named.free_bytes or 0)


def chosen(p: Problem, machine: Host) -> tuple[Problem, Choice, list[str]]:
    """The order of devices whose best placement makes the shortest turn, the given one among equals."""
    found: list[tuple[bool, float, Problem, Choice]] = []
    for devices in place.orders(p):
        if found and drafter.borrows_output(p.draft, p.settings.drafter_type) and p.settings.drafter_device:
            break  # it was named for the device that owns the output: the last one stays the last
        try:
            candidate, choice = _with_drafter_elsewhere(replace(p, devices=devices, memo={}))
        except UsageError:
            if not found:
                raise
            continue  # a residency map that suits the given order need not suit this one
        seconds = 0.0
        if len(devices) > 1:
            front = candidate.devices[candidate.first]
            seconds = speed.turn_s(p.shape, front, _host_bundles(p, choice), machine, p.settings) or 0.0
        found.append((not choice.fits, seconds, candidate, choice))
    best = min(found, key=lambda f: f[:2])
    if best is found[0]:
        return best[2], best[3], []
    given, chosen = p.devices[p.first], best[2].devices[best[2].first]
    moved = _host_bundles(p, best[3])
    was, now = (moved / d.link_bps if d.link_bps else 0.0 for d in (given, chosen))
    note = (
        f"{chosen.name} {chosen.description} comes first: a {p.settings.n_ubatch}-token prefill step moves "
        f"{moved / 1e9:.0f} GB over its link in {now:.1f} s; with {given.name} {given.description} in front {was:.1f} s"
    )
    return best[2], best[3], [note]


def _host_bundles(p: Problem, choice: Choice) -> int:
    resident = {i for blocks in choice.resident for i in blocks}
    return sum(p.shape.layers[i].bundle.file for i in p.moe_layers if i not in resident)


def without_empty(p: Problem, choice: Choice) -> tuple[Problem, Choice, list[str]]:
    """Devices without a slot are left out, and said so: an idle card still pays a context."""
    used = tuple(k for k, n in enumerate(choice.counts) if n)
    left_out = [
        f"without {d.name} {d.description}: it would not hold one more bundle"
        for k, d in enumerate(p.devices)
        if k not in used
    ]
    kept = Choice(
        counts=tuple(choice.counts[k] for k in used),
        resident=tuple(choice.resident[k] for k in used),
        short_bytes=tuple(choice.short_bytes[k] for k in used),
    )
    return replace(p, devices=tuple(p.devices[k] for k in used), memo={}), kept, left_out
