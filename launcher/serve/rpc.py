"""RPC servers of ours on loopback: each lends this machine's CPU and memory to the engine as one more device."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO

from launcher.errors import DeviceUnusable, EngineFailed
from launcher.facts import rpc as endpoints
from launcher.serve import ports


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcSpawn:
    """RPC servers to start before the engine: loopback endpoints, the program, its threads."""

    hosts: tuple[str, ...]
    server_path: str
    threads: int


def spawn_rpc(
    rpc: RpcSpawn,
    host: str,
    env: Mapping[str, str],
    log: IO[bytes] | int,
    *,
    cancelled: Callable[[], bool] = lambda: False,
    spawned: Callable[[subprocess.Popen[bytes]], None] = lambda _child: None,
) -> subprocess.Popen[bytes]:
    """Start one RPC server that lends this machine's CPU and memory, and wait until it takes connections.

    spawned  is told of the process as soon as there is one, before it listens
    Raises EngineFailed (rpc-start) when it does not start or its port is taken, and what `spawned` raises.
    """
    address, port = endpoints.split(host)
    fix = "choose other ports in the slug's rpc.hosts, or end the process that holds this one"
    if not ports.port_free(address, port):
        raise EngineFailed("rpc-start", f"port {port} for an RPC server is taken", fix=fix)
    argv = [rpc.server_path, "-H", address, "-p", str(port), "-d", "CPU", "-t", str(rpc.threads)]
    try:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(env), start_new_session=True
        )
    except OSError as error:
        message = f"cannot start {rpc.server_path}: {error.strerror}"
        raise EngineFailed("rpc-start", message, fix="launcher engine install") from error
    try:
        spawned(child)
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline and child.poll() is None and not cancelled():
            with contextlib.suppress(DeviceUnusable):
                endpoints.check(host, timeout_s=5)
                if child.pid in ports.listeners(address, port):  # somebody else may have been faster
                    return child
            time.sleep(0.02)
    except BaseException:
        end((child,), grace_s=0)
        raise
    code = child.poll()
    end((child,), grace_s=0)
    what = "does not take connections" if code is None else f"ended with exit code {code}"
    raise EngineFailed("rpc-start", f"the RPC server on {host} {what}", fix=fix)


def end(children: Iterable[subprocess.Popen[bytes]], grace_s: float = 3.0) -> None:
    """End RPC servers of ours with all that they started (the program may be a script): told first, then killed."""
    running = [child for child in children if child.poll() is None]
    if grace_s:
        for child in running:
            os.killpg(child.pid, signal.SIGTERM)  # not waited for yet, so the pid is still its own
    for child in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=grace_s)
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


@contextlib.contextmanager
def rpc_servers(rpc: RpcSpawn, env: Mapping[str, str]) -> Iterator[None]:
    """RPC servers for the length of a block: to ask them for their memory before the real launch."""
    children: list[subprocess.Popen[bytes]] = []
    try:
        for host in rpc.hosts:
            children.append(spawn_rpc(rpc, host, env, subprocess.DEVNULL))
        yield
    finally:
        end(children)
