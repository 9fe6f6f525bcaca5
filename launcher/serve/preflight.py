"""Everything that must be true before a server is started, or one that runs is stopped: all gates, all at once.

A gate is open or closed; `force` opens the status gate and nothing else. The name of a gate that is closed is the id
of its refusal in docs/errors.md; an open one has the name of what was looked at.
"""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace

import psutil

from launcher.errors import LauncherError, Refused
from launcher.facts.paths import state_dir
from launcher.facts.surroundings import Surroundings
from launcher.serve import gates_engine, gates_machine, gates_port, numa, state
from launcher.serve.gates_engine import of_error
from launcher.structs import (
    DevicePlan,
    Engine,
    Gate,
    Host,
    HostPlan,
    Inventory,
    ModelHeader,
    Plan,
    RunRecord,
    Slug,
    Status,
)
from launcher.units import MIB, gib, mib

_HOST_NAMES = {
    "output_buffer": "outputs",
    "compute": "buffers",
    "cache_ram": "prompt cache",
    "checkpoints": "checkpoints",
    "overhead": "process",
}
# Windows lets about half of its memory be page-locked, whatever share the virtual machine has.
_WSL_PINNED_SHARE = 0.45


def gates(
    *,
    slug: Slug | None,
    target: str,
    plan: Plan | None,
    plan_error: LauncherError | None,
    inventory: Inventory,
    model_error: LauncherError | None,
    engine: Engine | None,
    engine_error: LauncherError | None,
    port_owner: gates_port.PortOwner | None,
    force: bool,
    own_running: tuple[RunRecord, ...],
    header: ModelHeader | None = None,
    host: str | None = None,
    swap_bytes: int | None = None,
    around: Surroundings | None = None,
) -> tuple[Gate, ...]:
    """Every gate of a launch, open ones too, notes last.

    plan         None when there is none: `model_error` or `plan_error` says why
    header       the model's, to prove that the rules resolve to the placement; that gate is left out without it
    own_running  servers of ours that will be stopped first: their port is no obstacle
    host         where the server will listen; default: the slug's
    swap_bytes   size of the swap; None: asked of this machine
    around       file systems, limits and settings of this machine; None: not looked at (a rig file)
    """
    found = [*_model(target, slug, plan, model_error), *gates_engine.engine_gates(slug, plan, engine, engine_error)]
    found.append(_status(slug, force))
    found += _devices(slug, plan, inventory)
    if plan_error is not None and model_error is None:
        found.append(of_error(plan_error))
    if plan is not None:
        found += fit(plan)
        found += numa.gates(plan)
        found += gates_engine.kv_kernels(plan, engine)
        if header is not None:
            found.append(_rules(plan, header))
        if plan.refusal and all(g.ok for g in found):
            short = f"{plan.refusal.where} is short by {mib(plan.refusal.short_bytes)} MiB"
            found.append(Gate(name="does-not-fit", ok=False, detail=short, fix=way_out(plan)))
    found.append(gates_port.port(port_owner, own_running))
    found += gates_port.rpc_ports(slug, plan, own_running)
    found += _state()
    found += _notes(slug, plan, inventory, host, swap_bytes)
    if around is not None:
        found += gates_machine.machine_gates(plan, inventory, around, str(state_dir()))
        found += gates_engine.environment_notes(around)
    else:
        found += gates_machine.left_out(inventory)
    return tuple(_limited(gate, inventory.host) for gate in found)


def refuse_if_closed(gates: Iterable[Gate], target: str) -> None:
    """Raise Refused for the first closed gate; the context lists every other one.

    The reference is the gate's name: shards-missing, engine-lacks, host-ram-short, port-busy, ...
    """
    closed = [g for g in gates if not g.ok]
    if not closed:
        return
    first, others = closed[0], closed[1:]
    lines = [first.context] if first.context else []
    lines += [f"also closed: {g.name}: {g.detail}" for g in others]
    fix = first.fix or f"launcher preflight {target}"
    raise Refused(first.name, first.detail, context="\n".join(lines), fix=fix)


def _model(target: str, slug: Slug | None, plan: Plan | None, error: LauncherError | None) -> Iterator[Gate]:
    if error is not None:
        fetch = f"launcher setup {target}" if slug is not None and slug.model.repo else None
        yield of_error(error, fetch if fetch and "launcher setup" not in error.fix else None)
    elif plan is not None:
        shards = f"{plan.model.shards} shards" if plan.model.shards != 1 else "1 file"
        yield Gate(name="model", ok=True, detail=f"{shards}, {gib(plan.model.file_bytes)} GiB, complete")


def _status(slug: Slug | None, force: bool) -> Gate:
    if slug is None or slug.status is Status.PRODUCTION:
        return Gate(name="status", ok=True, detail="production" if slug else "a file of yours")
    detail = f"{slug.name} is {slug.status.value}"
    if force:
        return Gate(name="status", ok=True, detail=f"{detail}, --force given")
    return Gate(name="status-needs-force", ok=False, detail=detail, fix="--force     # it opens this gate alone")


def _devices(slug: Slug | None, plan: Plan | None, inventory: Inventory) -> Iterator[Gate]:
    floor = slug.devices_min if slug else 0
    devices = tuple(d.device for d in plan.devices) if plan else inventory.devices
    names = ", ".join(d.name for d in devices) or "none"
    if len(devices) < floor and slug is not None:
        yield Gate(
            name="devices-too-few",
            ok=False,
            detail=f"{slug.name} asks for {floor} devices; there are {len(devices)}",
            context="\n".join((f"devices: {names}", *inventory.warnings)),
            fix="nvidia-smi -L     # what the driver sees; for fewer, lower devices.min in a copy of the slug",
        )
    elif floor:
        yield Gate(name="devices", ok=True, detail=f"{len(devices)} ({names}), at least {floor} asked for")


def fit(plan: Plan) -> tuple[Gate, ...]:
    """The gates of the sums: every device, then host memory."""
    return (*(_device(d, plan) for d in plan.devices), _host(plan))


def _device(d: DevicePlan, plan: Plan) -> Gate:
    name = d.device.name
    if d.device.free_bytes is None:
        return Gate(name=f"device {name}", ok=True, note=True, detail=f"{name}: free memory unknown")
    margin = d.terms["margin"]
    sums = f"{mib(d.used_bytes)} of {mib(d.device.free_bytes)} MiB"
    holders = ", ".join(
        f"{p.name or 'a process of another user'} (pid {p.pid}"
        f"{f', {mib(p.used_bytes)} MiB' if p.used_bytes is not None else ''})"
        for p in d.device.processes
    )
    if not d.short_bytes:
        left = f"{mib(d.headroom_bytes)} left (margin {mib(margin)})"
        shared = f"; also on it: {holders}" if holders else ""
        return Gate(
            name=f"device {name}",
            ok=True,
            note=bool(holders),
            detail=f"{name} {sums}, {left}{shared}",
            fix="nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv" if holders else "",
        )
    terms = {k: v for k, v in d.terms.items() if v}
    return Gate(
        name="device-short",
        ok=False,
        detail=f"{name} is short by {mib(d.short_bytes)} MiB: needs {mib(d.used_bytes + margin)}, "
        f"has {mib(d.device.free_bytes)} free",
        context=_sum(terms) + (f"\nalso on {name}: {holders}" if holders else ""),
        fix=way_out(plan),
    )


def _host(plan: Plan) -> Gate:
    host = plan.host
    if not host.short_bytes:
        spare = gib(host.available_bytes - host.required_bytes)
        detail = f"{gib(host.required_bytes)} of {gib(host.available_bytes)} GiB{numa.on_nodes(host)}, {spare} spare"
        return Gate(name="host-ram", ok=True, detail=f"RAM {detail}", context=_host_sum(host))
    return Gate(
        name="host-ram-short",
        ok=False,
        detail=f"needs {gib(host.required_bytes)} GiB of RAM, has {gib(host.available_bytes)}{numa.on_nodes(host)}, "
        f"short {gib(host.short_bytes)}",
        context=_host_sum(host),
        fix=way_out(plan),
    )


def _limited(gate: Gate, host: Host) -> Gate:
    """The host gate with the control group that binds, where it is one and not the memory of the machine."""
    if gate.name != "host-ram-short" or not host.limited_by.startswith("/"):
        return gate
    limit = f"limited by {host.limited_by}; the machine has {gib(host.total_bytes)} GiB"
    return replace(gate, context=f"{gate.context}\n{limit}")


def _host_sum(host: HostPlan) -> str:
    return _sum({_HOST_NAMES.get(k, k): v for k, v in host.terms.items() if v})


def _sum(terms: dict[str, int]) -> str:
    """`MiB: 133,824 experts + 1,010 embedding = 134,834`; the parts are rounded so that they add up."""
    total = round(sum(terms.values()) / MIB)
    parts = {k: v // MIB for k, v in terms.items()}
    by_rest = sorted(terms, key=lambda k: terms[k] % MIB, reverse=True)
    for name in by_rest[: total - sum(parts.values())]:
        parts[name] += 1
    return "MiB: " + " + ".join(f"{v:,} {k}" for k, v in parts.items() if v) + f" = {total:,}"


def way_out(plan: Plan, command: str = "launcher plan") -> str:
    """The nearest thing that fits as a command with its price; where only memory helps, the nearest that does not."""
    target = shlex.quote(plan.target)
    ways = plan.refusal.ways_out if plan.refusal else ()
    options = [w for w in ways if w.change.startswith("-")]
    first = next((w for w in ways if w.fits and " more RAM" not in w.change), None)
    if first is None and options:
        least = min(options, key=lambda w: w.host_required_bytes)
        short = max(0, least.host_required_bytes - least.host_available_bytes)
        why = f"still short {gib(short)} GiB" if short else "does not fit either"
        memory = next((f"; {w.change}" for w in ways if " more RAM" in w.change), "")
        return f"{command} {target} {least.change}     # the nearest, {why}{memory}"
    if first is None:
        n_ctx = max(1, (plan.settings.n_ctx_per_stream or 2048) // 2048)
        return f"{command} {target} --ctx {n_ctx}k -ub 512     # a smaller quantisation needs less of everything"
    line = f"{command} {target} {first.change}" if first.change.startswith("-") else f"{command} {first.change}"
    spare = gib(first.host_available_bytes - first.host_required_bytes)
    return f"{line}     # {gib(first.host_required_bytes)} GiB of RAM, {spare} spare"


def _rules(plan: Plan, header: ModelHeader) -> Gate:
    from launcher.planner import rules

    try:
        rules.check(plan, header)
    except LauncherError as error:
        return of_error(error)
    return Gate(name="rules", ok=True, detail=f"{len(plan.rules)} rules put every tensor where the plan says")


def _state() -> Iterator[Gate]:
    """Closed where a run could not be written down: nobody would find the server, or see how it ended."""
    if what := state.problem():
        fix = f"df -h {shlex.quote(str(state_dir()))}     # make room, or: export LAUNCHER_HOME=/a/folder/of/yours"
        yield Gate(name="state-unwritable", ok=False, detail=what, fix=fix)


def _notes(
    slug: Slug | None, plan: Plan | None, inventory: Inventory, host: str | None, swap_bytes: int | None
) -> Iterator[Gate]:
    address = host or (slug.serve.host if slug else "127.0.0.1")
    if not _is_loopback(address) and not (slug and slug.api_key_file):
        yield Gate(
            name="open-to-all",
            ok=True,
            note=True,
            detail=f"listens on {address} without an API key: whoever reaches this machine can use the model "
            "and read what others ask",
            fix="--host 127.0.0.1     # or api_key_file in the slug",
        )
    if plan is None:
        return
    swap = psutil.swap_memory().total if swap_bytes is None else swap_bytes
    anonymous = not plan.settings.load_mode.startswith("mmap")
    if swap and plan.host.terms["experts"] and anonymous:
        yield Gate(
            name="swap",
            ok=True,
            note=True,
            detail=f"swap is on ({gib(swap)} GiB): experts may be paged out",
            fix="sudo sysctl vm.swappiness=1",
        )
    if inventory.host.wsl and anonymous and plan.host.terms["experts"] > _WSL_PINNED_SHARE * inventory.host.total_bytes:
        yield Gate(
            name="wsl-pinned",
            ok=True,
            note=True,
            detail=f"WSL lets about half of the RAM be page-locked, and {gib(plan.host.terms['experts'])} of "
            f"{gib(inventory.host.total_bytes)} GiB would be; the load may fail with `CUDA out of memory`",
            fix="--load-mode mmap     # or raise memory= in .wslconfig",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".sock")
