"""Endpoints of ggml-rpc-server: is one there, is it free, without ever standing in its queue.

Such a server talks to one client at a time, the others wait in its listen queue. A client that is killed while it
waits takes the server down with it: the server reads the greeting that lies in the dead client's buffer, answers
into a closed socket and dies of SIGPIPE. So nothing is asked of an endpoint before `check` has said that it is free.
"""

from __future__ import annotations

import ipaddress
import socket

from launcher.errors import DeviceUnusable


def split(endpoint: str) -> tuple[str, int]:
    """`127.0.0.1:50052` -> ("127.0.0.1", 50052). Raises DeviceUnusable (rpc-endpoint-invalid).

    The engine cuts at the first colon, so an IPv6 address cannot be written.
    """
    host, _, port = endpoint.partition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise DeviceUnusable(
            "rpc-endpoint-invalid",
            f"not an RPC endpoint: {endpoint!r}",
            fix="ggml-rpc-server -H 127.0.0.1 -p 50052     # and name it as 127.0.0.1:50052",
        )
    return host, int(port)


def is_loopback(endpoint: str) -> bool:
    """Whether an endpoint names this machine's loopback."""
    host = split(endpoint)[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check(endpoint: str, timeout_s: float = 2.0) -> None:
    """Return when an endpoint answers and serves nobody else.

    It connects and closes its sending side at once, sending nothing. A free server accepts, reads the end and hangs
    up: that is the answer. A busy one accepts later, reads the end and hangs up as well, and never writes into the
    closed socket, so that a check that gave up costs it nothing.

    Raises DeviceUnusable: rpc-unreachable (nobody listens), rpc-busy (it serves another client).
    """
    host, port = split(endpoint)
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            if connection.getsockname() == connection.getpeername():
                raise _unreachable(endpoint, "nobody listens")  # the kernel joined the two ends of one socket
            connection.shutdown(socket.SHUT_WR)
            try:
                connection.recv(1)
            except TimeoutError:
                raise _busy(endpoint, timeout_s) from None
            except ConnectionResetError:
                return  # it hung up: free
    except TimeoutError:
        # A full queue drops connections silently: on loopback nothing else can.
        if is_loopback(endpoint):
            raise _busy(endpoint, timeout_s) from None
        raise _unreachable(endpoint, f"no answer in {timeout_s:g} s") from None
    except OSError as error:
        raise _unreachable(endpoint, error.strerror or str(error)) from None


def _unreachable(endpoint: str, why: str) -> DeviceUnusable:
    host, port = split(endpoint)
    return DeviceUnusable(
        "rpc-unreachable",
        f"no RPC server answers at {endpoint}: {why}",
        fix=f"ggml-rpc-server -H {host} -p {port}   # on the machine that has the device",
    )


def _busy(endpoint: str, timeout_s: float) -> DeviceUnusable:
    return DeviceUnusable(
        "rpc-busy",
        f"the RPC server at {endpoint} serves another client",
        context=f"it did not take our connection within {timeout_s:g} s; an RPC server talks to one client at a time",
        fix="launcher status   # stop the llama-server that uses it, or name another endpoint",
    )
