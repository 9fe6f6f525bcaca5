"""Where a drafter lies and what it takes there: its own slots, weights, cache and compute buffer of each device.

A draft model follows the target's `-ts` shares over its own slots, or lies on one device (`-devd`), or in host memory
(`-devd none`); its last `-ngld` slots lie on devices, and its routed experts may stay in host memory (`-otd`). NextN
blocks are part of the target: they add a cache and a compute buffer where they lie. The tree of the design names no
such file; `budget` would pass its 400 lines with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.errors import UsageError
from launcher.planner import compute, draft_compute, owner
from launcher.planner.shape import LayerShape, ModelShape

if TYPE_CHECKING:
    from launcher.planner.budget import Problem

HOST = "host"  # Settings.drafter_device: the whole drafter in host memory


def borrows_output(draft: ModelShape | None, drafter_type: str | None) -> bool:
    """Whether drafting computes its logits with the target's output head (DFlash, DSpark without `output.weight`)."""
    return draft is not None and drafter_type in compute.EXTRACTING and not draft.has_output


def check(p: Problem) -> None:
    """Refuse a place that the engine would refuse later, or that nothing here is called.

    Raises UsageError (drafter-place).
    """
    s, draft, names = p.settings, p.draft, [d.name for d in p.devices]
    asked = s.drafter_device is not None or s.drafter_layers is not None or s.drafter_experts != "auto"
    if not asked or s.drafter_type is None:
        return
    if draft is None:
        raise _refused("its blocks are part of the target's file and lie where those blocks lie", _FOLLOW)
    if s.drafter_device not in (None, HOST, *names):
        known = ", ".join((*names, HOST))
        raise _refused(
            f"no device is called {s.drafter_device!r} (here: {known})", f"--drafter-device {(*names, HOST)[0]}"
        )
    if s.drafter_experts == HOST and not draft.is_moe:
        raise _refused("it has no routed experts to keep in host memory", "--drafter-experts auto")
    split = s.tensor_split or ()
    bare = [n for n, slots in zip(names, split, strict=False) if not slots and n == s.drafter_device]
    if bare and borrows_output(draft, s.drafter_type):
        why = f"it has no output head of its own, and -ts gives {bare[0]} no slot of the target"
        raise _refused(why, f"{_FOLLOW}     # or a -ts in which {bare[0]} owns the output")
    if borrows_output(draft, s.drafter_type) and names and s.drafter_device not in (None, names[-1]):
        rest = [n for n in names if n != s.drafter_device]
        fix = f"--drafter-device {names[-1]}"
        if s.drafter_device != HOST:
            fix += f"     # or --devices {','.join((*rest, s.drafter_device or ''))}: it owns the output then"
        why = f"it has no output head of its own and needs the device of the target's output, {names[-1]}"
        raise _refused(f"{why}; the engine aborts with it on {s.drafter_device}", fix)


_FOLLOW = "--drafter-device auto"


def _refused(problem: str, fix: str) -> UsageError:
    return UsageError("drafter-place", f"the drafter cannot be put there: {problem}", fix=fix)


def elsewhere(p: Problem) -> Problem | None:
    """The problem in which the device named for the drafter owns nothing of the target; None when it must, or cannot.

    Cards too small or slow for the target can still draft for it.
    """
    named = next((d for d in p.devices if d.name in devices(p)), None)
    if named is None or len(p.devices) < 2 or borrows_output(p.draft, p.settings.drafter_type):
        return None
    rest = tuple(d for d in p.devices if d is not named)
    split, held = p.settings.tensor_split, (p.fixed_layers or {}).get(named.name)
    if split is not None:
        at = p.devices.index(named)
        if split[at] or len(split) != len(p.devices):
            return None
        split = (*split[:at], *split[at + 1 :])
    if held:
        return None
    return replace(
        p, devices=rest, settings=replace(p.settings, tensor_split=split), draft_apart=named.backend, memo={}
    )


def allowed(p: Problem, k: int, end: int) -> bool:
    """Whether device `k` may own the target's slots up to `end` with the drafter where a person put it.

    A drafter without an output head aborts the engine when its devices lack the one of the target's output.
    """
    named = p.settings.drafter_device
    if p.draft is None or p.draft_apart or named is None or not borrows_output(p.draft, p.settings.drafter_type):
        return True
    return (p.devices[k].name == named) == (end == p.shape.n_layer + 1)


def devices(p: Problem) -> set[str]:
    """Names of the devices that must own slots of the target because the drafter was put on them."""
    named = p.settings.drafter_device
    return set() if p.draft is None or p.draft_apart or named in (None, HOST) else {named or ""}


def slots(p: Problem, k: int, start: int, end: int) -> range:
    """The drafter's own slots on device `k`, which owns the target's slots [start, end)."""
    s = p.settings
    if p.draft is None or p.draft_apart or s.drafter_device == HOST:
        return range(0)
    if s.drafter_device is None:
        return owner.drafter_slots(p.shape.n_layer, p.draft.n_layer, start, end, s.drafter_layers)
    whole = _on_devices(p.draft, s.drafter_layers)
    return whole if p.devices[k].name == s.drafter_device else range(0)


def host_slots(p: Problem) -> range:
    """The drafter's slots that lie in host memory: its first ones, which `-ngld` leaves out."""
    if p.draft is None:
        return range(0)
    everything = not p.devices or p.settings.drafter_device == HOST
    return range(p.draft.n_layer + 1 if everything else _on_devices(p.draft, p.settings.drafter_layers).start)


def parts(p: Problem, k: int, start: int, end: int, resident: bool | None = None) -> tuple[int, int, int]:
    """(weights, cache, compute bound) of drafting on device `k`, which owns the target's slots [start, end).

    resident  whether the experts of NextN blocks lie with them; None: not known yet
    """
    cache = sum(p.mtp_bytes[start : min(end, p.shape.n_layer)])
    if p.draft is None:
        return 0, cache, _mtp_compute_bytes(p, k, end, owned=cache > 0, resident=resident)
    own = slots(p, k, start, end)
    weights, draft_cache = _stored(p, own, p.devices[k].backend)
    return weights, cache + draft_cache, _compute_bytes(p, k, own, end)


def apart(p: Problem, backend: str) -> int:
    """Bytes of the whole drafter on a device that owns nothing of the target."""
    assert p.draft is not None
    own = _on_devices(p.draft, p.settings.drafter_layers)
    return sum(_stored(p, own, backend)) + _alone(p, own, backend)


def host_bytes(p: Problem) -> tuple[int, int]:
    """(weights and cache, compute bound) of the drafter in host memory; its token embedding always lies there."""
    draft, s = p.draft, p.settings
    if draft is None:
        backends = tuple(d.backend for d in p.devices)
        return 0, draft_compute.mtp_host_compute_bytes(p.shape, s, backends=backends) if any(p.mtp_bytes) else 0
    own = host_slots(p)
    layers, whole = _layers(draft, own), len(own) > draft.n_layer
    stored = draft.input.cpu + sum(layer.dense.cpu + layer.bundle.cpu for layer in layers)
    stored += sum(p.draft_kv_bytes[layer.index] for layer in layers) + (draft.per_device.cpu if layers else 0)
    if whole:
        stored += draft.output.cpu - (draft.input.cpu if draft.tied else 0)
    if s.drafter_experts == HOST:
        stored += sum(layer.bundle.cpu for layer in draft.layers[len(layers) :])
    backends = () if whole and not (p.devices and s.drafter_device != HOST) else _backends(p)
    bound = draft_compute.drafter_host_compute_bytes(
        p.shape, draft, s, backends=backends, host_experts=_host_experts(p), cut=bool(own)
    )
    if layers and all(name in compute.NO_OFFLOAD for name in backends):
        # the CPU computes them itself: the graph of a whole drafter there holds any part of it
        bound = max(bound, draft_compute.drafter_host_compute_bytes(p.shape, draft, s, backends=()))
    return stored, bound


def _on_devices(draft: ModelShape, n_gpu_layers: int | None) -> range:
    n_slots = draft.n_layer + 1
    return range(0 if n_gpu_layers is None else max(0, n_slots - n_gpu_layers), n_slots)


def _layers(draft: ModelShape, own: range) -> tuple[LayerShape, ...]:
    return tuple(draft.layers[i] for i in own if i < draft.n_layer)


def _backends(p: Problem) -> tuple[str, ...]:
    """Backends of the devices that the drafter's context runs on."""
    if p.settings.drafter_device == HOST:
        return ()
    if p.settings.drafter_device is None:
        return tuple(d.backend for d in p.devices)
    if p.draft_apart:
        return (p.draft_apart,)
    return tuple(d.backend for d in p.devices if d.name == p.settings.drafter_device)


def _host_experts(p: Problem) -> bool:
    return p.settings.drafter_experts == HOST and p.draft is not None and p.draft.is_moe


def _stored(p: Problem, own: range, backend: str) -> tuple[int, int]:
    """(weights, cache) of these slots of the drafter on a device."""
    draft = p.draft
    assert draft is not None
    layers, experts = _layers(draft, own), p.settings.drafter_experts != HOST
    weights = sum(layer.dense.on(backend) + (layer.bundle.on(backend) if experts else 0) for layer in layers)
    weights += draft.per_device.on(backend) if layers else 0
    weights += draft.output.on(backend) if draft.n_layer in own else 0
    return weights, sum(p.draft_kv_bytes[layer.index] for layer in layers)


def _largest_host_tensor_bytes(p: Problem) -> int:
    """The largest weight that a prompt batch of the drafter copies to its first device; 0: none lies in host memory."""
    draft = p.draft
    assert draft is not None
    cut = _layers(draft, host_slots(p))
    experts = draft.layers if _host_experts(p) else cut
    return max((*(x.largest_expert_bytes for x in experts), *(x.largest_dense_bytes for x in cut)), default=0)


def _compute_bytes(p: Problem, k: int, own: range, end: int) -> int:
    s, draft, backend = p.settings, p.draft, p.devices[k].backend
    if p.draft_apart or s.drafter_device == HOST:
        return 0
    assert draft is not None
    if s.drafter_device is not None:
        return _alone(p, own, backend) if p.devices[k].name == s.drafter_device else 0
    first = k == p.first
    copy = _largest_host_tensor_bytes(p) if first else 0
    return draft_compute.drafter_device_compute_bytes(
        p.shape,
        draft,
        s,
        backend=backend,
        slots=own,
        first=first,
        output=draft.n_layer in own,
        head=end == p.shape.n_layer + 1,
        host_experts=_host_experts(p),
        cut=bool(host_slots(p)),
        largest_host_bytes=copy,
    )


def _alone(p: Problem, own: range, backend: str) -> int:
    """Compute bound of the only device that the drafter's context has."""
    assert p.draft is not None
    return draft_compute.drafter_device_compute_bytes(
        p.shape,
        p.draft,
        p.settings,
        backend=backend,
        slots=own or range(p.draft.n_layer, p.draft.n_layer + 1),
        first=True,
        output=True,
        head=True,
        host_experts=_host_experts(p),
        cut=bool(host_slots(p)),
        largest_host_bytes=_largest_host_tensor_bytes(p),
    )


def _mtp_compute_bytes(p: Problem, k: int, end: int, *, owned: bool, resident: bool | None) -> int:
    """Bound of a NextN context's compute buffer: a pass over its blocks alone, with a server's few logits.

    owned  some NextN block lies on this device. The first device that offloads computes host-resident experts of the
           others; the target's output device computes the logits of blocks that have no head of their own.
    """
    if not any(p.mtp_bytes):
        return 0
    shape, s, backend = p.shape, p.settings, p.devices[k].backend
    if backend not in compute.NO_OFFLOAD:
        bound = draft_compute.mtp_device_compute_bytes(
            shape, s, owner=owned, first=k == p.first, alone=len(p.devices) == 1, resident=resident
        )
        if bound:
            return bound
    elif owned:
        block = shape.n_layer - shape.n_nextn
        return compute.device_compute_bytes(
            shape,
            s,
            backend=backend,
            slots=range(block, block + 1),
            first=k == p.first,
            output=True,
            n_devices=len(p.devices),
            resident_here=True,
            host_here=True,
            host_anywhere=True,
            override=bool(p.moe_layers),
            largest_host_expert_bytes=p.largest_expert_bytes,
        )
    outputs = max(1, s.n_parallel) * (1 + s.draft_n_max)
    return 4 * shape.n_vocab * outputs if end == shape.n_layer + 1 else 0
