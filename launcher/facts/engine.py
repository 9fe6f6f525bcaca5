"""Which llama-server there is, and what its own `--help` says it can do. Build numbers lie, `--help` does not.

Runs the binary at most twice (`--help`, `--version`) per version of it: what was learned is kept by digest.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from launcher.errors import DeviceUnusable
from launcher.facts import paths
from launcher.facts.engine_help import parse_help, parse_removed, parse_version
from launcher.structs import Engine

NAME = "llama-server"
_INSTALL = "launcher engine install"
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_CACHE_SCHEMA = 2
_CALL_TIMEOUT_S = 20.0
_SAID_MAX_BYTES = 4 * 1024**2  # of one stream; a --help is 70 kB
_SHELL_SIGILL = 128 + signal.SIGILL  # what a wrapper script ends with when the program in it was killed
_BUILD_FOLDERS = (
    "~/llama.cpp/build/bin",
    "~/src/llama.cpp/build/bin",
    "~/git/llama.cpp/build/bin",
    "/opt/llama.cpp/build/bin",
    "/opt/llama.cpp/bin",
    "/usr/local/bin",
    "/app",  # llama.cpp's own container images
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """One finished call of a binary. code is negative for a signal, None when it could not be started or timed out."""

    code: int | None
    out: str
    err: str
    note: str = ""

    def cause(self) -> str:
        """Its own words for what went wrong, stderr before stdout; empty when it was silent."""
        return cause(self.err) or cause(self.out)


def cause(said: str, n: int = 3) -> str:
    """The lines of an output that tell why it failed: from the first that says `error`, else the last ones."""
    lines = [line for line in said.splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if "error" in line.lower()), len(lines) - n)
    return "\n".join(lines[max(0, first) :][:n])


def clean_env(env: Mapping[str, str]) -> dict[str, str]:
    """An environment in which the engine listens to nobody but us, with cards numbered in PCI order.

    Out go the engine's own variables (LLAMA_*, GGML_*; but GGML_CUDA_DEVICES, which makes devices) and tokens;
    XDG_CONFIG_HOME points at an empty folder, since the engine reads a config.ini from there.
    """
    kept = {
        name: value
        for name, value in env.items()
        if not (name.startswith(("LLAMA_", "GGML_")) and name != "GGML_CUDA_DEVICES") and name not in _TOKENS
    }
    empty = paths.cache_dir() / "empty-config"
    with contextlib.suppress(OSError):
        empty.mkdir(parents=True, exist_ok=True)
    return {**kept, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "XDG_CONFIG_HOME": str(empty)}


def call(
    argv: tuple[str, ...], env: Mapping[str, str], timeout_s: float = _CALL_TIMEOUT_S, *, kill: bool = True
) -> Called:
    """Run a binary to its end and collect what it said. Never raises but for an interrupt.

    On a time-out it is killed and reaped with all that it started (a wrapper script's engine would live on and hold
    its cards); kill False leaves it to end by itself (a client that waits for an RPC server must not be killed) and
    names its pid in the note.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=dict(env), start_new_session=True
            )
        except OSError as error:
            return Called(code=None, out="", err="", note=error.strerror or str(error))
        note = ""
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            note = f"no answer in {timeout_s:g} s" + ("" if kill else f" (pid {child.pid})")
        finally:
            if kill and child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # its own session, so its own group
                child.wait()
        return Called(code=None if note else child.returncode, out=_said(out), err=_said(err), note=note)


def find_engine(explicit: str | None = None, slug_path: str | None = None, *, notes: list[str] | None = None) -> Engine:
    """The llama-server to use: `--engine`, the slug's, LLAMA_SERVER, `engine use`, PATH, build folders, our own build.

    notes  gets a line for every one that is there, does not run and was passed over

    One that a person named (the first four) must work: DeviceUnusable engine-missing, engine-broken or
    engine-not-llama-server says what is wrong with it. Of the others the first that works is taken;
    none at all is engine-missing, with the places that were looked at.
    """
    for named, found_by in (
        (explicit, "--engine"),
        (slug_path, "slug"),
        (os.environ.get("LLAMA_SERVER"), "LLAMA_SERVER"),
        (chosen(), "engine use"),
    ):
        if named and named.strip():
            return probe(named.strip(), found_by)
    looked: list[str] = []
    empty: list[str] = []
    for candidate, found_by in candidates():
        if not os.path.isfile(candidate):  # noqa: PTH113 - Path.is_file() raises in a folder that is not ours to enter
            empty.append(str(candidate.parent))
            continue
        try:
            return probe(str(candidate), found_by)
        except DeviceUnusable as error:
            looked.append(error.message)
            if notes is not None:
                notes.append(f"passed over an engine ({found_by}): {error.message}")
    raise DeviceUnusable(
        "engine-missing",
        f"no {NAME} found on this machine",
        context="\n".join([f"PATH has no working {NAME}; none in {', '.join(empty)}", *looked]),
        fix=f"{_INSTALL}   # or name yours: launcher engine use /path/to/{NAME}",
    )


def probe(path: str, found_by: str) -> Engine:
    """What one llama-server can do; read from the cache when this very binary was asked before.

    path may be the binary, its build folder, or a name to look up in PATH.
    Raises DeviceUnusable: engine-missing, engine-broken (does not start here), engine-not-llama-server.
    """
    binary = _binary(path, found_by)
    digest = _digest(binary)
    known = load_known(cache_file(f"{digest}.json"))
    if known.get("schema") != _CACHE_SCHEMA or not {"version", "flags", "spec_types", "removed"} <= known.keys():
        known = _ask(binary, found_by, digest)
    return Engine(
        path=str(binary),
        version=str(known["version"]),
        digest=digest,
        found_by=found_by,
        flags=frozenset(known["flags"]),
        spec_types=frozenset(known["spec_types"]),
        removed=dict(known["removed"]),
        rpc_server=_beside(binary, "ggml-rpc-server", "rpc-server"),
    )


def fit_params(engine: Engine) -> str | None:
    """The llama-fit-params of the same build, None without one."""
    return _beside(Path(engine.path), "llama-fit-params")


def _beside(binary: Path, *names: str) -> str | None:
    folders = (binary.parent, binary.resolve().parent)
    return next((str(f / n) for f in folders for n in names if os.access(f / n, os.X_OK)), None)


def _said(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_SAID_MAX_BYTES).decode("utf-8", "replace")


def _ask(binary: Path, found_by: str, digest: str) -> dict[str, Any]:
    env = clean_env(os.environ)
    helped = call((str(binary), "--help"), env)
    if helped.code != 0:
        raise _broken(binary, found_by, helped)
    said = helped.out or helped.err
    flags, spec_types = parse_help(said)
    if not {"--model", "--port", "--ctx-size"} <= flags:
        raise DeviceUnusable(
            "engine-not-llama-server",
            f"{binary} is not a {NAME}: its --help knows no --model, --port and --ctx-size",
            context=f"found by: {found_by}\n{helped.cause()}",
            fix=f"launcher engine use /path/to/{NAME}",
        )
    versioned = call((str(binary), "--version"), env)
    known: dict[str, Any] = {
        "schema": _CACHE_SCHEMA,
        "version": parse_version(versioned.err + "\n" + versioned.out) or "unknown",
        "flags": sorted(flags),
        "spec_types": sorted(spec_types),
        "removed": parse_removed(said),
    }
    store_known(cache_file(f"{digest}.json"), known)
    return known


def _broken(binary: Path, found_by: str, called: Called) -> DeviceUnusable:
    if called.code in (-signal.SIGILL, _SHELL_SIGILL):
        what = "this binary needs CPU features that this machine lacks"
    elif called.code is None:
        what = called.note
    elif called.code < 0:
        what = f"killed by {signal.Signals(-called.code).name}"
    else:
        what = f"exit code {called.code}"
    return DeviceUnusable(
        "engine-broken",
        f"{binary} does not run here: {what}",
        context="\n".join(filter(None, [f"found by: {found_by}; tried: {binary} --help", called.cause()])),
        fix=f"{_INSTALL}   # builds one for this CPU",
    )


def _binary(text: str, found_by: str) -> Path:
    path = Path(os.path.expanduser(text))  # noqa: PTH111 - leaves `~nobody` as it is where pathlib raises
    # os.path answers False where pathlib raises: folders that are not ours to enter, names that cannot be
    if "/" not in text and not os.path.exists(path):  # noqa: PTH110
        path = Path(shutil.which(text) or path)
    if os.path.isdir(path):  # noqa: PTH112
        inside = [path / NAME, path / "bin" / NAME, path / "build" / "bin" / NAME]
        path = next((p for p in inside if os.path.isfile(p)), path)  # noqa: PTH113
    if not os.path.exists(path):  # noqa: PTH110
        what = "does not exist" + (" (a link to nothing)" if os.path.islink(path) else "")  # noqa: PTH114
    elif os.path.isdir(path):  # noqa: PTH112
        what = f"is a folder without {NAME} in it"
    elif not os.access(path, os.X_OK):
        what = "is not executable"
    else:
        return path.absolute()
    raise DeviceUnusable(
        "engine-missing",
        f"{path} {what}",
        context=f"found by: {found_by}",
        fix=f"chmod +x {path}" if what == "is not executable" else f"launcher engine use /path/to/{NAME}",
    )


def chosen() -> str | None:
    """The path in the choice file of `engine use`: its first line that is neither empty nor a comment."""
    try:
        lines = (paths.config_dir() / "engine").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.strip() for line in lines if line.strip() and not line.startswith("#")), None)


def candidates() -> Iterator[tuple[Path, str]]:
    """(path, found by) of every place that is searched without being named, in order."""
    folders = dict.fromkeys(f for f in os.environ.get("PATH", "").split(os.pathsep) if f)
    for folder in folders:  # all of them: one that does not run here must not hide the next
        if on_path := shutil.which(NAME, path=folder):
            yield Path(on_path), "PATH"
    for folder in _BUILD_FOLDERS:
        with contextlib.suppress(RuntimeError):  # no HOME to expand
            yield Path(folder).expanduser() / NAME, "build folder"
    # Path.glob() raises in a folder that is not ours to enter
    every = glob.glob(f"*/bin/{NAME}", root_dir=paths.cache_dir() / "engine-builds")  # noqa: PTH207
    built = [p for p in (paths.cache_dir() / "engine-builds" / found for found in every) if p.is_file()]
    for path in sorted(built, key=lambda p: (-p.stat().st_mtime, str(p))):
        yield path, "engine install"


def _digest(binary: Path) -> str:
    """sha256 of the binary; with shared libraries beside it, of that and their names, sizes and times.

    A llama-server of a shared build is 18 kB and its code lies in those libraries: a rebuild must not look the same.
    """
    real = binary.resolve()
    stat = real.stat()
    if not os.access(real, os.R_OK):  # may be run, may not be read: then what it is called must do
        return hashlib.sha256(f"{real} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}".encode()).hexdigest()
    stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
    index = load_known(cache_file("digests.json"))
    entry = index.get(str(real))
    if isinstance(entry, dict) and entry.get("stamp") == stamp:
        digest = str(entry["sha256"])
    else:
        with real.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        index[str(real)] = {"stamp": stamp, "sha256": digest}
        store_known(cache_file("digests.json"), index)
    libraries = [p for p in sorted(real.parent.glob("*.so*")) if p.is_file() and not p.is_symlink()]
    if not libraries:
        return digest
    lines = [digest, *(f"{p.name} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in libraries)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def cache_file(name: str) -> Path:
    """Where what an engine said is kept, by digest."""
    return paths.cache_dir() / "engines" / name


def load_known(path: Path) -> dict[str, Any]:
    """A kept JSON object; empty when there is none or it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def store_known(path: Path, value: Mapping[str, object]) -> None:
    """Write through a temporary file; a cache that cannot be written is no reason to fail."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
        temporary.replace(path)
