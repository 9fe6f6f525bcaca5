"""Gates of addresses: who holds the port of the server, and the ports of RPC servers that it starts."""

from __future__ import annotations

import contextlib
import errno
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from launcher.facts import rpc
from launcher.serve import ports
from launcher.structs import Gate, Plan, RunRecord, Slug


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


def port(owner: PortOwner | None, own_running: tuple[RunRecord, ...]) -> Gate:
    """The port of the server: free, of a server of ours that leaves, or held by whom."""
    if owner is None:
        return Gate(name="port", ok=True, detail="the port is free")
    if owner.problem:
        what = f"nothing can listen on {owner.host}:{owner.port}: {owner.problem}"
        return Gate(name="address-unusable", ok=False, detail=what, fix=f"--host 127.0.0.1 --port {owner.free_port}")
    ours = next((r for r in own_running if r.server is not None and r.server.pid == owner.pid), None)
    if ours is not None:
        detail = f"port {owner.port} belongs to {ours.slug} (pid {owner.pid}), which is stopped first"
        return Gate(name="port", ok=True, note=True, detail=detail)
    return Gate(
        name="port-busy",
        ok=False,
        detail=f"port {owner.port} is held by {_who(owner)}",
        fix=f"--port {owner.free_port}",
    )


def _who(owner: PortOwner) -> str:
    if owner.pid:
        return f"{owner.name} (pid {owner.pid})"
    return "a process of another user, or by a connection that is closing"


def rpc_ports(slug: Slug | None, plan: Plan | None, own_running: tuple[RunRecord, ...]) -> Iterator[Gate]:
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
                fix=f"${{EDITOR:-vi}} {shlex.quote(slug.path)}     # other ports in rpc.hosts, or end that process",
            )
