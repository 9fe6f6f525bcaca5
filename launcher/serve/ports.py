"""TCP ports of this machine: free or not, and who listens."""

from __future__ import annotations

import contextlib
import errno
import socket

import psutil

_ANY = frozenset({"0.0.0.0", "::", ""})


def port_free(host: str, port: int) -> bool:
    """Whether a server could bind there now. The engine shares ports (SO_REUSEPORT), so it would not notice."""
    return bind_error(host, port) is None


def bind_error(host: str, port: int) -> OSError | None:
    """Why a server could not bind there, None when it could. EADDRINUSE: a taken port; else no address for us."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OverflowError:
        return OSError(errno.EINVAL, f"ports end at 65535, not at {port}")
    except OSError as error:
        return error
    return None


def free_port(host: str, start: int = 0) -> int:
    """A free port at or after `start`; 0 lets the system choose."""
    for port in range(start, min(start + 200, 65536)) if start else ():
        if port_free(host, port):
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listeners(host: str, port: int) -> frozenset[int | None]:
    """Pids that take connections for this address; None stands for a process of another user."""
    found: set[int | None] = set()
    with contextlib.suppress(psutil.AccessDenied):
        for connection in psutil.net_connections("tcp"):
            at = connection.laddr
            if connection.status == psutil.CONN_LISTEN and at and at.port == port and _meets(at.ip, host):
                found.add(connection.pid)
    return frozenset(found)


def holder(host: str, port: int) -> int | None:
    """Pid of who keeps others from this address: who listens, else whose connection has it as its own end."""
    ours = [pid for pid in listeners(host, port) if pid is not None]
    with contextlib.suppress(psutil.AccessDenied):
        ends = psutil.net_connections("tcp")
        ours += [c.pid for c in ends if c.laddr and c.laddr.port == port and c.pid and _meets(c.laddr.ip, host)]
    return ours[0] if ours else None


def _meets(address: str, host: str) -> bool:
    return address in _ANY or host in _ANY or address == host or host == "localhost"
