"""PURE arithmetic: no files, processes, clock, network, logging. `make_plan` is the maths on one screen.

shape    header -> ModelShape: per-layer dense bytes, expert bundles, attention kind
owner    which device owns which layer: the engine's own rule in float32, and its inverse
kv       cache and state bytes of every kind
compute  the compute bound per backend class
drafter  where a draft model lies and what it takes there; draft_compute: the bound of its buffers
budget   every byte term of one device for a range of slots
host     the host sum
numa     which NUMA nodes hold the host sum
place    the choice: split points and resident bundles
order    the order of the devices, one search each
rules    placement -> ordered -ot rules; resolve(rules, tensors) as the inverse
speed    bytes moved per token -> tokens a second
"""

from __future__ import annotations

from dataclasses import replace

from launcher.errors import DeviceUnusable, UsageError
from launcher.planner import budget, host, numa, order, rules, speed
from launcher.planner import drafter as drafting
from launcher.planner.budget import Problem
from launcher.planner.place import Choice
from launcher.planner.shape import ModelShape, model_shape
from launcher.structs import (
    DEVICE_TERMS,
    Device,
    DevicePlan,
    Host,
    HostPlan,
    Inventory,
    LayerPlan,
    MeasuredCompute,
    ModelHeader,
    ModelSummary,
    Plan,
    Refusal,
    Settings,
    Source,
    Speed,
)
from launcher.units import human

__all__ = ["make_plan", "model_shape"]

# A projector's weights and its encode buffer, which is allocated with the first image, after every other check: 0.85 to
# 1 times the weights where people measured it (ggml-org/llama.cpp issues 18111, 19980).
PROJECTOR_FACTOR = 2


def make_plan(
    *,
    target: str,
    header: ModelHeader,
    drafter: ModelHeader | None,
    inventory: Inventory,
    settings: Settings,
    measured: MeasuredCompute | None = None,
    projector_bytes: int = 0,
) -> Plan:
    """The best whole-bundle placement of a model on what is there; a plan that does not fit carries its refusal.

    settings   as the person gave them; None is resolved here
    measured   the engine's own dry run of an earlier plan: replaces the compute bounds
    projector_bytes  size of the mmproj file: it lies, with its encode buffer, on the first card

    Raises ModelUnreadable (a file that cannot be placed), DeviceUnusable (a device without a free figure),
    UsageError (a split or a residency map that the model cannot have).
    """
    shape = model_shape(header, mtp=settings.drafter_type == "draft-mtp")
    draft = model_shape(drafter) if drafter else None
    wanted = _resolved(settings, shape)
    devices, warnings = _usable(inventory.devices, wanted)
    problem = Problem(
        shape=shape,
        draft=draft,
        devices=devices,
        settings=wanted,
        projector_bytes=PROJECTOR_FACTOR * projector_bytes,
        measured=measured,
        fixed_layers=_fixed(wanted, shape, devices),
    )
    drafting.check(problem)
    everything = problem.devices
    problem, choice, notes = order.chosen(problem, inventory.host)
    problem, choice, left_out = order.without_empty(problem, choice)
    plans = (*_device_plans(problem, choice), *_drafter_alone(problem, everything))
    device_plans = _in_our_order(plans, inventory.devices)
    resident = frozenset(i for d in device_plans for i in d.resident_layers)
    host_layers = tuple(i for i in problem.moe_layers if i not in resident)
    host_plan, final = _host_plan(problem, host_layers, device_plans, inventory.host, wanted)
    return Plan(
        target=target,
        model=_summary(header, shape),
        settings=final,
        drafter_path=drafter.path if drafter else None,
        devices=device_plans,
        layers=_layers(problem, device_plans),
        host=host_plan,
        tensor_split=(*choice.counts, *(0 for _ in plans[len(choice.counts) :])),
        rules=rules.build([(d.device.buffer_type, d.resident_layers) for d in device_plans], any_host=bool(host_layers))
        if device_plans and problem.moe_layers
        else (),
        speed=_speed(
            problem,
            device_plans,
            host_layers,
            replace(inventory.host, triad_bps=numa.bandwidth_bps(inventory.host, host_plan.numa)),
        ),
        refusal=_refusal(device_plans, host_plan),
        warnings=(*inventory.warnings, *header.warnings, *shape.warnings, *warnings, *notes, *left_out),
    )


def _resolved(s: Settings, shape: ModelShape) -> Settings:
    n_ctx = s.n_ctx_per_stream if s.n_ctx_per_stream is not None else shape.n_ctx_train
    if n_ctx <= 0:
        raise UsageError("ctx-unknown", "the file names no training context and none was asked for", fix="--ctx 32k")
    depth = s.draft_n_max if s.drafter_type else 0
    return replace(s, n_ctx_per_stream=n_ctx, draft_n_max=depth)


def _usable(devices: tuple[Device, ...], s: Settings) -> tuple[tuple[Device, ...], list[str]]:
    """Devices with what is reserved taken off their free memory."""
    warnings, result = [], []
    for d in devices:
        if d.free_bytes is None:
            raise DeviceUnusable(
                "device-free-unknown",
                f"cannot read the free memory of {d.name} ({d.description})",
                fix=f"--devices=-{d.name}     # without it; or plan with --rig FILE, which says what is free",
            )
        taken = s.reserve_bytes.get(d.name, 0)
        if taken:
            warnings.append(
                f"{d.name}: {human(taken)} reserved, {human(max(0, d.free_bytes - taken))} of it planned with"
            )
        result.append(replace(d, free_bytes=max(0, d.free_bytes - taken)))
    unknown = sorted(set(s.reserve_bytes) - {d.name for d in devices})
    if unknown:
        names = ", ".join(d.name for d in devices) or "none"
        raise UsageError(
            "device-unknown",
            f"reserve names {unknown[0]}, devices are: {names}",
            fix=f"--reserve {devices[0].name}=2GiB"
            if devices
            else "launcher plan --help     # no device, nothing to reserve",
        )
    return tuple(result), warnings


def _fixed(s: Settings, shape: ModelShape, devices: tuple[Device, ...]) -> dict[str, frozenset[int]] | None:
    if isinstance(s.residency, str):
        return None
    known = {d.name for d in devices}
    moe = {layer.index for layer in shape.layers if layer.loaded and layer.bundle.file}
    for name, layers in s.residency.items():
        if name not in known:
            raise UsageError(
                "device-unknown",
                f"residency names {name}, devices are: {', '.join(sorted(known)) or 'none'}",
                fix="--residency auto     # or names as `launcher plan` shows them",
            )
        strange = sorted(set(layers) - moe)
        if strange:
            raise UsageError(
                "residency-no-bundle",
                f"residency of {name}: block {strange[0]} has no loaded expert bundle (blocks with one: {_spans(moe)})",
                fix="--residency auto     # or blocks that have experts",
            )
    return {name: frozenset(layers) for name, layers in s.residency.items()}


def _spans(numbers: set[int]) -> str:
    ordered = sorted(numbers)
    return f"{ordered[0]}-{ordered[-1]}" if ordered else "none"


def _device_plans(p: Problem, choice: Choice) -> tuple[DevicePlan, ...]:
    any_host = sum(len(r) for r in choice.resident) < len(p.moe_layers)
    plans, start = [], 0
    for k, n in enumerate(choice.counts):
        end = start + n
        plans.append(
            DevicePlan(
                device=p.devices[k],
                rig_name=p.devices[k].name,
                layers=tuple(range(start, min(end, p.shape.n_layer))),
                owns_output=end == p.shape.n_layer + 1,
                resident_layers=choice.resident[k],
                terms=budget.terms(p, k, start, end, choice.resident[k], host_anywhere=any_host),
                source=budget.sources(p, k),
            )
        )
        start = end
    return tuple(plans)


def _drafter_alone(p: Problem, everything: tuple[Device, ...]) -> tuple[DevicePlan, ...]:
    """The device that holds the drafter and nothing of the target, when there is one."""
    if not p.draft_apart:
        return ()
    device = next(d for d in everything if d.name == p.settings.drafter_device)
    measured = (p.measured.draft_bytes or {}).get(device.name) if p.measured else None
    context, known = budget.context_bytes(device)
    source = dict.fromkeys(DEVICE_TERMS, Source.FORMULA) | {"context": known}
    if p.settings.margin_bytes is not None:
        source["margin"] = Source.DECLARED
    if measured is not None and p.measured:
        source["drafter"] = p.measured.source
    terms = dict.fromkeys(DEVICE_TERMS, 0) | {
        "drafter": drafting.apart(p, device.backend) if measured is None else measured,
        "context": context,
        "margin": budget.margin_bytes(device, p.settings),
    }
    return (
        DevicePlan(
            device=device,
            rig_name=device.name,
            layers=(),
            owns_output=False,
            resident_layers=(),
            terms=terms,
            source=source,
        ),
    )


def _in_our_order(plans: tuple[DevicePlan, ...], everything: tuple[Device, ...]) -> tuple[DevicePlan, ...]:
    """Devices renamed as the engine will call them once it sees only the planned ones, in this order.

    Cards are shown to it by UUID, so they count from CUDA0; those without an own UUID (virtual ones, rig files) keep
    their names and are picked by name. RPC devices count over all devices of the endpoints on `--rpc`.
    """
    cards = [d.device.uuid for d in plans if d.device.backend == "cuda"]
    count_cards = all(cards) and len(set(cards)) == len(cards)
    endpoints = list(dict.fromkeys(d.device.endpoint for d in plans if d.device.endpoint))
    listed = [d.buffer_type for e in endpoints for d in everything if d.endpoint == e]
    renamed, n_cards = [], 0
    for d in plans:
        device = d.device
        if device.backend == "cuda" and count_cards:
            device = replace(device, name=f"CUDA{n_cards}", buffer_type=f"CUDA{n_cards}")
            n_cards += 1
        elif device.endpoint:
            device = replace(device, name=f"RPC{listed.index(device.buffer_type)}")
        renamed.append(replace(d, device=device))
    return tuple(renamed)


def _layers(p: Problem, devices: tuple[DevicePlan, ...]) -> tuple[LayerPlan, ...]:
    at = {i: d for d in devices for i in d.layers}
    return tuple(
        LayerPlan(
            index=layer.index,
            device=at[layer.index].device.name if layer.index in at else rules.CPU,
            resident=layer.index in at and layer.index in at[layer.index].resident_layers,
            loaded=layer.loaded,
            dense_bytes=layer.dense.file,
            bundle_bytes=layer.bundle.file,
            kv_bytes=p.kv_bytes[layer.index],
        )
        for layer in p.shape.layers
    )


def _host_plan(
    p: Problem, host_layers: tuple[int, ...], devices: tuple[DevicePlan, ...], machine: Host, s: Settings
) -> tuple[HostPlan, Settings]:
    """The gate is the least that can run, on the NUMA nodes that hold it; what is spare then goes to prompt cache and
    checkpoints."""
    # a CPU RPC server on this machine takes its buffers out of the very same memory
    shared = sum(d.used_bytes for d in devices if d.device.shares_host)
    available = max(0, machine.available_bytes - shared)
    resident = any(d.resident_layers for d in devices)
    lean = host.least(s, p.shape, p.n_rs)
    least = host.host_terms(p, host_layers, resident, lean)
    required = sum(least.values())
    nodes = numa.choose(
        machine,
        numa.Demand(
            required_bytes=required,
            taken_bytes=shared,
            reads_weights=any(least[term] for term in ("experts", "dense", "output")),
            first=(devices[0].device.name, devices[0].device.numa_node) if devices else ("", None),
            threads=s.threads,
        ),
        s.numa,
    )
    if nodes is not None:
        available = nodes.chosen.available_bytes
    final = host.generous(s, p.shape, p.n_rs, available - required) if required <= available else lean
    plan = HostPlan(
        terms=host.host_terms(p, host_layers, resident, final),
        source=host.sources(p, s),
        available_bytes=available,
        layers=host_layers if devices else tuple(range(p.shape.n_layer)),
        numa=nodes,
    )
    threads = nodes.threads if nodes is not None else s.threads if s.threads is not None else machine.cores
    return plan, replace(final, threads=threads)


def _speed(p: Problem, devices: tuple[DevicePlan, ...], host_layers: tuple[int, ...], machine: Host) -> Speed:
    share = p.shape.n_expert_used / p.shape.n_expert if p.shape.n_expert else 1.0
    card = [d.terms["dense"] + d.terms["output"] + int(d.terms["experts"] * share) for d in devices]
    bundles = sum(p.shape.layers[i].bundle.file for i in host_layers)
    other = 0 if devices else sum(layer.dense.file for layer in p.shape.layers) + p.shape.output.file
    return speed.estimate(p.shape, [d.device for d in devices], card, bundles, other, machine, p.settings)


def _refusal(devices: tuple[DevicePlan, ...], host_plan: HostPlan) -> Refusal | None:
    over = max(devices, key=lambda d: d.short_bytes, default=None)
    if over and over.short_bytes:
        return Refusal(
            where=over.device.name,
            needed_bytes=over.used_bytes + over.terms["margin"],
            available_bytes=over.device.free_bytes or 0,
            largest_term=max(over.terms, key=lambda t: over.terms[t]),
        )
    if host_plan.short_bytes:
        return Refusal(
            where="host",
            needed_bytes=host_plan.required_bytes,
            available_bytes=host_plan.available_bytes,
            largest_term=max(host_plan.terms, key=lambda t: host_plan.terms[t]),
        )
    return None


def _summary(header: ModelHeader, shape: ModelShape) -> ModelSummary:
    return ModelSummary(
        path=header.path,
        arch=header.arch,
        shards=max(1, len(header.shards)),
        file_bytes=header.file_bytes,
        n_layer=shape.n_layer,
        n_expert=shape.n_expert,
        n_expert_used=shape.n_expert_used,
        n_ctx_train=shape.n_ctx_train,
    )
