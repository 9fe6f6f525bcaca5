"""Everything that must be true before a server is started, or one that runs is stopped: all gates, all at once.

A gate is open or closed; `force` opens the status gate and nothing else. The name of a gate that is closed is the id
of its refusal in docs/errors.md; an open one has the name of what was looked at.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from launcher.errors import LauncherError, Refused
from launcher.facts import rpc
from launcher.facts.paths import state_dir
from launcher.serve import argv as command_line
from launcher.serve import numa, ports, state
from launcher.structs import (
    DevicePlan,
    Engine,
    Gate,
    HostPlan,
    Inventory,
    ModelHeader,
    Plan,
    RunRecord,
    Slug,
    Status,
)
from launcher.units import MIB, engine_label, gib, mib

SYSTEM_CONFIG = Path("/etc/llama.cpp/config.ini")
_HOST_NAMES = {
    "output_buffer": "outputs",
    "compute": "buffers",
    "cache_ram": "prompt cache",
    "checkpoints": "checkpoints",
    "overhead": "process",
}
# Windows lets about half of its memory be page-locked, whatever share the virtual machine has.
_WSL_PINNED_SHARE = 0.45


@dataclass(frozen=True, slots=True, kw_only=True)
class PortOwner:
    """Who holds a port; pid and name are None when that process belongs to another user.

    problem  why nobody can listen there, whoever else does: no address of this machine, a port for root only
    """

    host: str
    port: int
    pid: int | None
    name: str | None
    free_port: int
    problem: str | None = None


def port_owner(host: str, port: int) -> PortOwner | None:
    """Who holds the port that a server wants, None when a bind to it works now."""
    error = ports.bind_error(host, port)
    if error is None:
        return None
    if error.errno != errno.EADDRINUSE:
        why = error.strerror or str(error)
        return PortOwner(
            host=host, port=port, pid=None, name=None, free_port=port if 1024 <= port < 65536 else 8080, problem=why
        )
    pid = ports.holder(host, port)
    name = None
    if pid is not None:
        with contextlib.suppress(psutil.Error):
            name = psutil.Process(pid).name()
    return PortOwner(host=host, port=port, pid=pid, name=name, free_port=ports.free_port(host, port + 1))


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
    port_owner: PortOwner | None,
    force: bool,
    own_running: tuple[RunRecord, ...],
    header: ModelHeader | None = None,
    host: str | None = None,
    swap_bytes: int | None = None,
) -> tuple[Gate, ...]:
    """Every gate of a launch, open ones too, notes last.

    plan         None when there is none: `model_error` or `plan_error` says why
    header       the model's, to prove that the rules resolve to the placement; that gate is left out without it
    own_running  servers of ours that will be stopped first: their port is no obstacle
    host         where the server will listen; default: the slug's
    swap_bytes   size of the swap; None: asked of this machine
    """
    found = [*_model(target, slug, plan, model_error), *_engine(slug, plan, engine, engine_error), _status(slug, force)]
    found += _devices(slug, plan, inventory)
    if plan_error is not None and model_error is None:
        found.append(_of_error(plan_error))
    if plan is not None:
        found += fit(plan)
        found += numa.gates(plan)
        if header is not None:
            found.append(_rules(plan, header))
        if plan.refusal and all(g.ok for g in found):
            short = f"{plan.refusal.where} is short by {mib(plan.refusal.short_bytes)} MiB"
            found.append(Gate(name="does-not-fit", ok=False, detail=short, fix=way_out(plan)))
    found.append(_port(port_owner, own_running))
    found += _rpc_ports(slug, plan, own_running)
    found += _state()
    found += _notes(slug, plan, inventory, host, swap_bytes)
    return tuple(found)


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


def _of_error(error: LauncherError, fix: str | None = None) -> Gate:
    return Gate(name=error.reference, ok=False, detail=error.message, fix=fix or error.fix, context=error.context)


def _model(target: str, slug: Slug | None, plan: Plan | None, error: LauncherError | None) -> Iterator[Gate]:
    if error is not None:
        fetch = f"launcher setup {target}" if slug is not None and slug.model.repo else None
        yield _of_error(error, fetch if fetch and "launcher setup" not in error.fix else None)
    elif plan is not None:
        shards = f"{plan.model.shards} shards" if plan.model.shards != 1 else "1 file"
        yield Gate(name="model", ok=True, detail=f"{shards}, {gib(plan.model.file_bytes)} GiB, complete")


def _engine(slug: Slug | None, plan: Plan | None, engine: Engine | None, error: LauncherError | None) -> Iterator[Gate]:
    if error is not None:
        yield _of_error(error)
        return
    if engine is None:
        yield Gate(name="engine", ok=True, note=True, detail="no engine was looked for")
        return
    missing = [need for need in (slug.engine.needs if slug else ()) if not engine.can(need)]
    if plan is not None:
        missing += [flag for flag in command_line.missing_flags(plan, engine, slug) if f"flag:{flag}" not in missing]
        if s := plan.settings.drafter_type:
            need = f"spec-type:{s}"
            missing += [need] if s != "none" and not engine.can(need) and need not in missing else []
    if missing:
        yield _of_error(command_line.lacks(engine, tuple(missing)))
        return
    yield Gate(name="engine", ok=True, detail=f"{engine_label(engine.version)} ({engine.found_by})")
    keys = _system_config()
    if keys:
        yield Gate(
            name="engine-config",
            ok=False,
            detail=f"{SYSTEM_CONFIG} sets {', '.join(keys)}, which the plan decides; the engine reads it first",
            fix=f"comment these lines out in {SYSTEM_CONFIG}",
        )


def _system_config() -> tuple[str, ...]:
    """Keys of the engine's system-wide config that a plan owns; it cannot be switched off for one launch."""
    try:
        text = SYSTEM_CONFIG.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    tables = (command_line.SPELLINGS, command_line.SWITCHES)
    owned = {word.lstrip("-") for table in tables for words in table.values() for word in words}
    owned |= {"cpu-moe", "cmoe", "n-cpu-moe", "ncmoe", "n-cpu-ffn", "ncffn"}
    keys = [m.group(1).replace("_", "-") for m in re.finditer(r"^\s*([A-Za-z][\w-]*)\s*=", text, re.M)]
    return tuple(k for k in dict.fromkeys(keys) if k.removeprefix("LLAMA-ARG-").lower() in owned)


def _status(slug: Slug | None, force: bool) -> Gate:
    if slug is None or slug.status is Status.PRODUCTION:
        return Gate(name="status", ok=True, detail="production" if slug else "a file of yours")
    detail = f"{slug.name} is {slug.status.value}"
    if force:
        return Gate(name="status", ok=True, detail=f"{detail}, --force given")
    return Gate(name="status-needs-force", ok=False, detail=detail, fix="add --force (it opens this gate alone)")


def _devices(slug: Slug | None, plan: Plan | None, inventory: Inventory) -> Iterator[Gate]:
    floor = slug.devices_min if slug else 0
    devices = tuple(d.device for d in plan.devices) if plan else inventory.devices
    names = ", ".join(d.name for d in devices) or "none"
    if len(devices) < floor and slug is not None:
        yield Gate(
            name="devices-too-few",
            ok=False,
            detail=f"{slug.name} asks for {floor} devices; there are {len(devices)}",
            context=f"devices: {names}",
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
    if not d.short_bytes:
        left = f"{mib(d.headroom_bytes)} left (margin {mib(margin)})"
        return Gate(name=f"device {name}", ok=True, detail=f"{name} {sums}, {left}")
    terms = {k: v for k, v in d.terms.items() if v}
    holders = ", ".join(
        f"{p.name} (pid {p.pid}{f', {mib(p.used_bytes)} MiB' if p.used_bytes is not None else ''})"
        for p in d.device.processes
    )
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
        return _of_error(error)
    return Gate(name="rules", ok=True, detail=f"{len(plan.rules)} rules put every tensor where the plan says")


def _rpc_ports(slug: Slug | None, plan: Plan | None, own_running: tuple[RunRecord, ...]) -> Iterator[Gate]:
    """Closed where an RPC server of ours could not listen: found later, a server that works would be gone already."""
    if slug is None or slug.rpc is None or not slug.rpc.spawn or plan is None:
        return
    leaving = {endpoint for record in own_running for endpoint in record.rpc_endpoints}
    for endpoint in dict.fromkeys(d.device.endpoint for d in plan.devices if d.device.endpoint):
        owner = None if endpoint in leaving else port_owner(*rpc.split(endpoint))
        if owner is not None:
            who = owner.problem or _who(owner)
            yield Gate(
                name="rpc-port-busy",
                ok=False,
                detail=f"the RPC server for {endpoint} cannot start: its port is held by {who}",
                fix=f"end that process, or name other ports under rpc.hosts in {slug.path}",
            )


def _state() -> Iterator[Gate]:
    """Closed where a run could not be written down: nobody would find the server, or see how it ended."""
    if what := state.problem():
        fix = f"make room (df -h {state_dir()}), or LAUNCHER_HOME=/a/folder/of/yours"
        yield Gate(name="state-unwritable", ok=False, detail=what, fix=fix)


def _port(owner: PortOwner | None, own_running: tuple[RunRecord, ...]) -> Gate:
    if owner is None:
        return Gate(name="port", ok=True, detail="the port is free")
    if owner.problem:
        what = f"nothing can listen on {owner.host}:{owner.port}: {owner.problem}"
        return Gate(
            name="address-unusable", ok=False, detail=what, fix=f"add --host 127.0.0.1 --port {owner.free_port}"
        )
    ours = next((r for r in own_running if r.server is not None and r.server.pid == owner.pid), None)
    if ours is not None:
        detail = f"port {owner.port} belongs to {ours.slug} (pid {owner.pid}), which is stopped first"
        return Gate(name="port", ok=True, note=True, detail=detail)
    return Gate(
        name="port-busy",
        ok=False,
        detail=f"port {owner.port} is held by {_who(owner)}",
        fix=f"add --port {owner.free_port}",
    )


def _who(owner: PortOwner) -> str:
    if owner.pid:
        return f"{owner.name} (pid {owner.pid})"
    return "a process of another user, or by a connection that is closing"


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
            fix="set api_key_file in the slug, or leave --host 127.0.0.1",
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
            detail="WSL lets about half of the RAM be page-locked; the load may fail with `CUDA out of memory`",
            fix="--load-mode mmap, or raise memory= in .wslconfig",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".sock")
