"""RPC servers of ours on loopback: each lends this machine's CPU and memory to the engine as one more device."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO

from launcher.errors import DeviceUnusable, EngineFailed
from launcher.facts import rpc as endpoints
from launcher.serve.ports import port_free


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
) -> subprocess.Popen[bytes]:
    """Start one RPC server that lends this machine's CPU and memory, and wait until it takes connections.

    Raises EngineFailed (rpc-start) when it does not start or its port is taken.
    """
    address, port = endpoints.split(host)
    fix = "choose other ports in the slug's rpc.hosts, or end the process that holds this one"
    if not port_free(address, port):
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
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline and child.poll() is None and not cancelled():
            with contextlib.suppress(DeviceUnusable):
                endpoints.check(host, timeout_s=5)
                return child
            time.sleep(0.02)
    except BaseException:
        child.kill()
        child.wait()
        raise
    code = child.poll()
    if code is None:
        child.kill()
        child.wait()
    what = "does not take connections" if code is None else f"ended with exit code {code}"
    raise EngineFailed("rpc-start", f"the RPC server on {host} {what}", fix=fix)


@contextlib.contextmanager
def rpc_servers(rpc: RpcSpawn, env: Mapping[str, str]) -> Iterator[None]:
    """RPC servers for the length of a block: to ask them for their memory before the real launch."""
    children: list[subprocess.Popen[bytes]] = []
    try:
        for host in rpc.hosts:
            children.append(spawn_rpc(rpc, host, env, subprocess.DEVNULL))
        yield
    finally:
        for child in children:
            child.terminate()
        for child in children:
            try:
                child.wait(timeout=3)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
