"""What there is to plan with: this machine or a rig file, and this machine as if servers of ours were gone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.errors import DeviceUnusable, SlugInvalid
from launcher.facts import devices as device_facts
from launcher.facts import engine as engine_facts
from launcher.facts import host as host_facts
from launcher.facts import nvml
from launcher.facts import rig as rig_facts
from launcher.measure import learned
from launcher.serve import numa
from launcher.structs import Device, Engine, Host, Inventory, RunRecord, Slug
from launcher.workflows import overrides
from launcher.workflows.container import Box

# A dry run opens a CUDA context on every card: what it needs, and what it must leave to whoever runs there.
_DRY_RUN_BYTES = (530 + 512) * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The inventory that is planned with, and whether the engine may be asked for a dry run (empty: yes)."""

    inventory: Inventory
    no_dry_run: str = ""
    box: Box | None = None


def engine_for(
    slug: Slug | None, explicit: str | None, notes: list[str] | None = None
) -> tuple[Engine | None, DeviceUnusable | None]:
    """The engine, or why there is none. One that a person named and that does not work is raised, not returned.

    notes  gets a line for every engine that was found, does not run and was passed over
    """
    own = slug.engine.path if slug else None
    try:
        return engine_facts.find_engine(explicit, own, notes=notes), None
    except DeviceUnusable as error:
        named = explicit or own or os.environ.get("LLAMA_SERVER") or engine_facts.chosen()
        if named or error.reference != "engine-missing":
            raise
        return None, error


def from_rig(path: str, engine: Engine | None, slug: Slug | None, given: Mapping[str, Any]) -> World:
    """The rig of a file. Raises SlugInvalid (rig-invalid), UsageError (device-unknown)."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise SlugInvalid("rig-missing", f"no rig file at {path}", fix="--rig /path/to/rig.yaml")
    found = rig_facts.load_rig(file)
    inventory = replace(found, devices=_chosen(found.devices, slug, given), engine=engine)
    return World(inventory=inventory, no_dry_run="planned for a rig file")


def here(engine: Engine | None, slug: Slug | None, given: Mapping[str, Any], gone: Iterable[RunRecord] = ()) -> World:
    """This machine, with the memory of `gone` servers counted as free.

    Raises DeviceUnusable (see facts/devices), UsageError (device-unknown).
    """
    leaving = tuple(gone)
    host = host_facts.read_host()
    busy = _busy(leaving, host)
    spawned = slug is not None and slug.rpc is not None and slug.rpc.spawn
    asked = slug.rpc.hosts if slug and slug.rpc and not spawned else ()
    found, warnings = device_facts.read_devices(engine, env=os.environ, rpc_hosts=asked, busy_endpoints=busy)
    tight = [d.name for d in found if d.backend == "cuda" and d.processes and (d.free_bytes or 0) < _DRY_RUN_BYTES]
    host = without(host, [(_host_bytes(record), record.argv) for record in leaving])
    found = tuple(_credited(d, {p.pid for r in leaving for p in _processes(r)}) for d in found)
    if slug is not None and slug.rpc is not None:
        found = tuple(_capped(d, slug.rpc.memory_bytes) if d.endpoint in asked else d for d in found)
    found = _with_learned(found, engine)
    no_dry_run = "no llama-server to ask" if engine is None else ""
    if tight:
        no_dry_run = f"too little is free on {', '.join(tight)} beside what runs there"
    if spawned and slug is not None and slug.rpc is not None:
        found = _spawned(slug.rpc.hosts, host, slug.rpc.memory_bytes) + found
        no_dry_run = "the RPC servers are started with the engine"
    if asked and any(endpoint in busy for endpoint in asked):
        no_dry_run = "the RPC servers are in use"
    chosen = _chosen(found, slug, given)
    return World(
        inventory=Inventory(devices=chosen, host=host, engine=engine, warnings=warnings), no_dry_run=no_dry_run
    )


def boxed(found: World, box: Box | None) -> World:
    """The same world with the engine of a container: it is not asked for a dry run, and numactl is no part of it."""
    if box is None:
        return found
    host = replace(found.inventory.host, numactl=None)
    inventory = replace(found.inventory, engine=box.engine, host=host)
    return replace(found, inventory=inventory, no_dry_run="the engine is in an image", box=box)


def without(host: Host, held: Iterable[tuple[int, tuple[str, ...]]]) -> Host:
    """The host once servers are gone that hold so many bytes, each started by that command line.

    Their memory policy says which nodes get them back, in equal parts; without one, nodes by what is taken there.
    """
    available, nodes = host.available_bytes, list(host.nodes)
    for n_bytes, words in held:
        available += n_bytes
        named = numa.policy_nodes(words)
        weights = [(n.index in named) if named else n.total_bytes - n.available_bytes for n in nodes]
        nodes = [
            replace(n, available_bytes=min(n.total_bytes, n.available_bytes + n_bytes * w // max(1, sum(weights))))
            for n, w in zip(nodes, weights, strict=True)
        ]
    return replace(host, available_bytes=min(host.total_bytes, available), nodes=tuple(nodes))


def host_only(engine: Engine | None) -> World:
    """This machine's memory and cores without any device."""
    return World(inventory=Inventory(devices=(), host=host_facts.read_host(), engine=engine))


def _capped(device: Device, memory_bytes: int | None) -> Device:
    """A device with no more free memory than `rpc.memory` lets the plan use."""
    if memory_bytes is None or device.free_bytes is None:
        return device
    return replace(device, free_bytes=min(device.free_bytes, memory_bytes))


def _spawned(hosts: tuple[str, ...], host: Host, memory_bytes: int | None) -> tuple[Device, ...]:
    devices = device_facts.loopback_devices(hosts, host, memory_bytes)
    return tuple(replace(d, description="CPU of this machine (spawned at start)") for d in devices)


def _busy(records: Iterable[RunRecord], host: Host) -> dict[str, tuple[Device, ...]]:
    """Endpoints that serve us, never asked while they do: what they can hold is known once the server is gone."""
    endpoints = [e for r in records for e in r.rpc_endpoints]
    return {e: (d,) for e, d in zip(endpoints, device_facts.loopback_devices(endpoints, host), strict=True)}


def _chosen(devices: tuple[Device, ...], slug: Slug | None, given: Mapping[str, Any]) -> tuple[Device, ...]:
    """The devices asked for. RPC devices are numbered again: the engine counts those that --rpc names."""
    wanted = given.get("devices") or (slug.placement.order if slug else None)
    chosen = overrides.choose_devices(devices, wanted)
    numbers = iter(range(len(chosen)))
    return tuple(replace(d, name=f"RPC{next(numbers)}") if d.backend == "rpc" else d for d in chosen)


def _with_learned(devices: tuple[Device, ...], engine: Engine | None) -> tuple[Device, ...]:
    """Contexts as this engine's earlier launches here showed them; the driver is asked only when there are any."""
    known = learned.read()
    if engine is None or not any(card.engine == engine.digest for card in known.contexts):
        return devices
    return learned.applied(devices, known, engine.digest, nvml.driver_version())


def _credited(device: Device, pids: set[int]) -> Device:
    held = sum(p.used_bytes or 0 for p in device.processes if p.pid in pids)
    if not held or device.free_bytes is None:
        return device
    free = device.free_bytes + held
    return replace(
        device,
        free_bytes=min(free, device.total_bytes) if device.total_bytes else free,
        processes=tuple(p for p in device.processes if p.pid not in pids),
    )


def _processes(record: RunRecord) -> tuple[Any, ...]:
    return tuple(p for p in (record.server, *record.rpc_servers) if p is not None)


def _host_bytes(record: RunRecord) -> int:
    """Memory that a server gives back when it ends."""
    from launcher.serve import state

    alive = [found.pid for found in map(state.proc, _processes(record)) if found]
    return sum(host_facts.own_bytes(pid) or 0 for pid in alive)
