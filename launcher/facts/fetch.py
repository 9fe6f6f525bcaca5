"""Bytes from a URL into a file: resumable, hashed, published whole. Knows no model, no engine and no repository.

It lies here because `engines` and `weights` both fetch and may not import each other.

A download grows in `<file>.part` (locked; its ETag beside it in `<file>.part.etag`), survives cut connections and
killed processes, and takes its final name only when size and sha256 are right.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import re
import shlex
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import DownloadFailed, Locked
from launcher.units import MIB

if TYPE_CHECKING:
    import httpx

Progress = Callable[[str, int, int], None]
"""progress(stage, done, total): bytes, files or build steps; total 0 is unknown."""

_CONNECT_TRIES = 2  # before a first answer: no network is said at once
_RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A small answer, read whole. next_url is the `rel="next"` link of a paged listing."""

    url: str
    text: str
    content_type: str
    next_url: str | None


def quiet(_stage: str, _done: int, _total: int) -> None:
    """The progress callback that shows nothing."""


def download(
    url: str,
    target: Path,
    *,
    again: str,
    size_bytes: int | None = None,
    sha256: str | None = None,
    token: str | None = None,
    stage: str = "download",
    progress: Progress = quiet,
    retries: int = 5,
) -> str:
    """Fetch `url` into `target` and return the sha256 of what was published.

    again     the command that goes on where this stopped: the fix of every error
    token     bearer token, sent to the origin of `url` only, never to where it redirects
    retries   failures in a row, each without a MiB in between, that are taken before giving up
    Raises DownloadFailed (download-failed, download-refused, hash-mismatch, size-mismatch, disk-full, disk-unwritable),
    Locked (download-locked).
    """
    part_path = target.with_name(target.name + ".part")
    etag_path = target.with_name(target.name + ".part.etag")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(part_path, again) as part:
            job = _Job(part, etag_path, size_bytes, sha256, stage, progress)
            job.rehash()
            with client(again) as http:
                _receive_all(http, url, job, token=token, again=again, retries=retries, name=target.name)
            digest = job.check(target.name, part_path, again)
            os.fsync(part.fileno())
            part_path.replace(target)
            etag_path.unlink(missing_ok=True)
    except OSError as error:
        with contextlib.suppress(OSError):
            kept = f"{part_path.stat().st_size:,} of {size_bytes or 0:,} bytes are kept in {part_path}"
            raise disk_error(error, target, again, context=kept) from None
        raise disk_error(error, target, again) from None
    return digest


def disk_error(error: OSError, path: Path, again: str, *, context: str = "") -> DownloadFailed:
    """A failed write as a refusal: disk-full, or disk-unwritable for every other reason."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"the disk is full: {path}"
        return DownloadFailed("disk-full", what, context=context, fix=f"df -h, make room, then: {again}")
    at = Path(error.filename or path)
    fix = f"ls -ld {shlex.quote(str(at.parent))}     # it must be a folder that you may write to; then: {again}"
    return DownloadFailed("disk-unwritable", f"cannot write {at}: {error.strerror or error}", context=context, fix=fix)


def get_page(url: str, *, again: str, accept: str, token: str | None = None) -> Page:
    """A small text over HTTP, with retries. Raises DownloadFailed (download-failed, download-refused)."""
    import httpx

    failures = 0
    with client(again) as http:
        while True:
            try:
                with _hops(http, url, {"Accept": accept}, token) as answer:
                    if answer.status_code not in _RETRY_STATUS:
                        _refuse_status(answer, url, again)
                        answer.read()
                        link = answer.links.get("next", {}).get("url")
                        return Page(
                            url=str(answer.url),
                            text=answer.text,
                            content_type=answer.headers.get("content-type", ""),
                            next_url=str(answer.url.join(link)) if link else None,
                        )
                    reason = f"HTTP {answer.status_code}"
            except (httpx.TransportError, httpx.InvalidURL, httpx.StreamError) as err:
                reason = _reason(err)
                if isinstance(err, httpx.UnsupportedProtocol | httpx.InvalidURL):
                    failures = _CONNECT_TRIES
            failures += 1
            if failures > _CONNECT_TRIES:
                raise DownloadFailed("download-failed", f"cannot read {shown(url)}: {reason}", fix=again)
            time.sleep(0.5 * failures)


def client(again: str) -> httpx.Client:
    """An HTTP client with the proxies of the environment that trusts the system's certificates.

    SSL_CERT_FILE and SSL_CERT_DIR as OpenSSL reads them; REQUESTS_CA_BUNDLE, CURL_CA_BUNDLE and PIP_CERT are trusted
    too: where a proxy opens every connection, one of them is what people have set.
    Raises DownloadFailed (proxy-unusable) for a proxy variable that cannot be used.
    """
    import httpx

    try:
        return httpx.Client(verify=_certificates(), timeout=httpx.Timeout(15, read=60), follow_redirects=False)
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        named = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
        said = [n for name in named for n in (name, name.lower()) if os.environ.get(n)]
        why = "socks proxies are not supported" if isinstance(error, ImportError) else str(error)
        what = f"the proxy of {', '.join(said) or 'this system'} cannot be used: {why}"
        fix = f"HTTPS_PROXY=http://host:port {again}     # or: env -u {' -u '.join(said) or 'ALL_PROXY'} {again}"
        raise DownloadFailed("proxy-unusable", what, fix=fix) from None


@functools.cache
def _certificates() -> ssl.SSLContext:
    context = ssl.create_default_context()
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT"):
        own = Path(os.environ.get(name, "") or "/nonexistent")
        with contextlib.suppress(OSError):  # ssl.SSLError is one
            context.load_verify_locations(*((None, own) if own.is_dir() else (own,)))
    if not (os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR")):
        import certifi  # httpx needs it: some Pythons are built without a certificate store

        context.load_verify_locations(certifi.where())
    return context


def shown(url: str) -> str:
    """The URL without user, password and query: fit for a message."""
    return re.sub(r"//[^/@]*@", "//", url).partition("?")[0]


def sha256_of(path: Path, *, stage: str = "check", progress: Progress = quiet) -> str:
    """sha256 of a whole file, in hex."""
    digest = hashlib.sha256()
    total, done = path.stat().st_size, 0
    with path.open("rb") as f:
        while block := f.read(4 * MIB):
            digest.update(block)
            done += len(block)
            progress(stage, done, total)
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------ parts


class _Job:
    """The growing `.part` file, its hash and its ETag."""

    def __init__(
        self, part: FileIO, etag_path: Path, size: int | None, sha256: str | None, stage: str, progress: Progress
    ) -> None:
        self.part, self.etag_path, self.size, self.sha256 = part, etag_path, size, sha256
        self.stage, self.progress = stage, progress
        self.have = os.fstat(part.fileno()).st_size
        self.digest = hashlib.sha256()

    def rehash(self) -> None:
        """Take up what an earlier run left, or drop it when it cannot be a beginning of the file."""
        if (self.size is not None and self.have > self.size) or (self.have and not (self.sha256 or self.etag())):
            self.restart()
        self.part.seek(0)
        read = 0
        while block := self.part.read(4 * MIB):
            self.digest.update(block)
            read += len(block)
            # Minutes for what a big shard left: said, else it looks like a hang.
            self.progress(self.stage.replace("download", "reread", 1), read, self.have)
        self.progress(self.stage, self.have, self.size or 0)

    def etag(self) -> str:
        """The strong ETag of what we have; empty when there is none to hold the server to."""
        try:
            text = self.etag_path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return ""
        return text if text.startswith('"') else ""

    def restart(self, etag: str = "") -> None:
        self.part.seek(0)
        self.part.truncate()
        self.have, self.digest = 0, hashlib.sha256()
        self.etag_path.write_text(etag, encoding="utf-8")

    def add(self, block: bytes) -> None:
        rest = memoryview(block)
        while rest:
            rest = rest[self.part.write(rest) :]
        self.digest.update(block)
        self.have += len(block)
        self.progress(self.stage, self.have, self.size or 0)

    def check(self, name: str, part_path: Path, again: str) -> str:
        """Size and hash, else the part is removed: every later try would fail on the same bytes."""
        real = self.digest.hexdigest()
        if self.size is not None and self.have != self.size:
            reference, what = "size-mismatch", f"{name} has {self.have:,} bytes, {self.size:,} were promised"
        elif self.sha256 and real != self.sha256:
            reference, what = "hash-mismatch", f"{name} arrived with other content than was published"
        else:
            return real
        part_path.unlink()
        self.etag_path.unlink(missing_ok=True)
        context = f"sha256 {real}, expected {self.sha256}; removed" if self.sha256 else "removed"
        raise DownloadFailed(reference, what, context=context, fix=again)


@contextmanager
def _locked(path: Path, again: str) -> Iterator[FileIO]:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with os.fdopen(fd, "r+b", buffering=0) as part:  # a full disk shows at the write, not at the close
            try:
                fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                what = f"{path.name[: -len('.part')]} is being downloaded by another process"
                raise Locked("download-locked", what, context=str(path), fix=f"{again}     # once it is done") from None
            try:
                ours = path.stat().st_ino == os.fstat(part.fileno()).st_ino
            except FileNotFoundError:
                ours = False  # published between our open and our lock
            if ours:
                yield part
                return


def _receive_all(
    http: httpx.Client, url: str, job: _Job, *, token: str | None, again: str, retries: int, name: str
) -> None:
    import httpx

    failures, answered = 0, False
    while not (job.size and job.have == job.size):
        start = job.have
        try:
            status = _receive(http, url, job, token, again)
            answered = True
            if status not in _RETRY_STATUS:
                return
            reason = f"HTTP {status}"
        except (httpx.TransportError, httpx.InvalidURL, httpx.StreamError) as err:
            reason = _reason(err)
            answered = answered or job.have > start or not isinstance(err, httpx.ConnectError | httpx.ConnectTimeout)
            if isinstance(err, httpx.UnsupportedProtocol | httpx.InvalidURL):
                raise DownloadFailed("download-refused", f"{shown(url)}: {reason}", fix=again) from None
        failures = 1 if job.have - start >= MIB else failures + 1
        if failures > (retries if answered else min(retries, _CONNECT_TRIES)):
            context = f"{job.have:,} bytes are kept, the next run goes on from there" if job.have else ""
            what = f"{name} from {shown(url)}: {reason}"
            raise DownloadFailed("download-failed", what, context=context, fix=again)
        time.sleep(min(8.0, 0.25 * 2**failures))


def _receive(http: httpx.Client, url: str, job: _Job, token: str | None, again: str) -> int:
    """One request; returns its status after the body was taken (or a status that is worth another try)."""
    headers = {"Accept-Encoding": "identity"}
    if job.have:
        headers["Range"] = f"bytes={job.have}-"
        if job.etag():
            headers["If-Range"] = job.etag()
    with _hops(http, url, headers, token) as answer:
        status = answer.status_code
        if status == 416:  # the file is shorter than what we hold: ours is no beginning of it
            job.restart()
            return 503
        if status in _RETRY_STATUS:
            return status
        _refuse_status(answer, url, again)
        etag = answer.headers.get("etag", "")
        if status == 206:
            begins = re.match(r"bytes (\d+)-", answer.headers.get("content-range", ""))
            if not begins or int(begins.group(1)) != job.have:
                job.restart()
                return 503
        else:
            job.restart(etag)
        for block in answer.iter_raw():  # no chunk size: httpx would lose what it gathers when the line breaks
            job.add(block)
    return status


@contextmanager
def _hops(http: httpx.Client, url: str, headers: Mapping[str, str], token: str | None) -> Iterator[httpx.Response]:
    """The answer after all redirects; the token goes to the first origin only."""
    import httpx

    first, at = _origin(httpx.URL(url)), httpx.URL(url)
    for _ in range(10):
        own = {"Authorization": f"Bearer {token}"} if token and _origin(at) == first else {}
        answer = http.send(http.build_request("GET", at, headers={**headers, **own}), stream=True)
        try:
            if not answer.has_redirect_location:
                yield answer
                return
            at = answer.url.join(answer.headers["location"])
        finally:
            answer.close()
    msg = "more than 10 redirects"
    raise httpx.UnsupportedProtocol(msg)


def _origin(url: httpx.URL) -> tuple[str, str, int]:
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme, 0)


def _refuse_status(answer: httpx.Response, url: str, again: str) -> None:
    status = answer.status_code
    if status in (200, 206):
        return
    why = {
        401: "a token is needed, or the name is wrong",
        403: "access is not granted",
        404: "there is no such file",
        410: "it is gone",
    }
    fix = f"accept the licence on its page, then: HF_TOKEN=hf_... {again}" if status in (401, 403) else again
    what = f"{shown(url)}: HTTP {status}" + (f", {why[status]}" if status in why else "")
    raise DownloadFailed("download-refused", what, fix=fix)


def _reason(err: Exception) -> str:
    return str(err) or type(err).__name__
