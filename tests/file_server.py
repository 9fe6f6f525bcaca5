"""A real HTTP server for download tests: ranges, ETags, redirects, cut connections; it keeps what it was asked."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Route:
    """One path. cuts: body bytes after which each next answer breaks off; statuses: answered before the real one."""

    body: bytes = b""
    etag: str = ""
    content_type: str = "application/octet-stream"
    location: str = ""
    ranges: bool = True
    cuts: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Seen:
    """One request as it arrived."""

    path: str
    headers: dict[str, str]


class FileServer:
    """`server.routes["/x"] = Route(...)`; `server.url("/x")`; `server.seen`."""

    def __init__(self) -> None:
        self.routes: dict[str, Route] = {}
        self.seen: list[Seen] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                outer.seen.append(Seen(self.path, {k.lower(): v for k, v in self.headers.items()}))
                route = outer.routes.get(self.path)
                if route is None:
                    self._answer(404, b"no such file", {})
                elif route.statuses:
                    self._answer(route.statuses.pop(0), b"not now", {})
                elif route.location:
                    self._answer(302, b"", {"Location": route.location, **route.headers})
                else:
                    self._file(route)

            def _file(self, route: Route) -> None:
                body, status, extra = route.body, 200, {"Content-Type": route.content_type, **route.headers}
                if route.etag:
                    extra["ETag"] = route.etag
                wanted = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
                same = self.headers.get("If-Range", route.etag) == route.etag
                if wanted and route.ranges and same:
                    start = int(wanted.group(1))
                    if start >= len(body):
                        self._answer(416, b"", {"Content-Range": f"bytes */{len(body)}"})
                        return
                    extra["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                    body, status = body[start:], 206
                self._answer(status, body, extra, route.cuts.pop(0) if route.cuts else None)

            def _answer(self, status: int, body: bytes, headers: Mapping[str, str], cut: int | None = None) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body if cut is None else body[:cut])
                if cut is not None:
                    self.close_connection = True

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                if not isinstance(sys.exc_info()[1], ConnectionError):  # a killed client is part of the tests
                    super().handle_error(request, client_address)  # type: ignore[arg-type]

        self._http = Server(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})

    def url(self, path: str = "") -> str:
        """The address of a path."""
        return f"http://127.0.0.1:{self._http.server_address[1]}{path}"

    def requests(self, path: str) -> list[Seen]:
        """What was asked of one path, in order."""
        return [s for s in self.seen if s.path == path]

    @contextmanager
    def running(self) -> Iterator[FileServer]:
        """Serve until the block ends."""
        self._thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()


Bar = list[tuple[str, int, int]]


def recorder() -> tuple[Bar, Callable[[str, int, int], None]]:
    """A progress callback and the list that it fills."""
    bar: Bar = []
    return bar, lambda stage, done, total: bar.append((stage, done, total))
