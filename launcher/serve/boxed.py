"""The child of a keeper that stands for a server in a container.

It starts the container, writes which process of this machine it is into the record, follows its log, ends it when it is
told to end, and ends as the container ended. The container is no child of anybody here: killed, this program leaves it
behind, and the record still names its process, so `status` sees it and `stop` ends it by name.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

import launcher
from launcher.errors import EngineFailed, Refused
from launcher.facts.engine import call
from launcher.serve import compose, state
from launcher.structs import Launch, ProcessId, RunRecord

_CALL_S = 60.0
# The environment is the engine's: it need not say where this package lies.
_START = (
    "import sys; sys.path.insert(0, sys.argv[2]); from launcher.serve.boxed import main; sys.exit(main(sys.argv[1]))"
)
_STARTED_S = 120.0
_POLL_S = 0.1
# Shorter than the keeper's own patience, which ends with a SIGKILL to this program.
_GRACE_S = 10
_OOM_CODE = 128 + signal.SIGKILL


def prepared(launch: Launch) -> dict[str, Any]:
    """Write the files of a launch in a container; what its record says of it. Empty for a process of this machine.

    Raises Refused (state-unwritable).
    """
    box = launch.container
    if box is None:
        return {}
    folder = _folder(box.name)
    words = list(compose.run_words(box, detach=True))
    if box.runtime.compose:
        base, over = folder / "compose.yaml", folder / "override.yaml"
        _write(base, _base().read_text(encoding="utf-8"))
        _write(over, yaml.safe_dump(compose.override(box), sort_keys=False))
        up = [*box.runtime.compose, "-p", box.name, "-f", str(base), "-f", str(over)]
        words = ["up", "-d"]
    else:
        up = [box.runtime.path]
    about = {
        "client": box.runtime.path,
        "name": box.name,
        "image": box.image.name,
        "folder": str(folder),
        "up": [*up, *words],
        "compose": up if box.runtime.compose else [],
        # where clients look for their own settings; the engine's environment names an empty folder
        "config_home": os.environ.get("XDG_CONFIG_HOME"),
        "memory_bytes": box.memory_bytes,
    }
    state.write_json(folder / "about.json", about)
    return about


def foreground(launch: Launch) -> Launch:
    """The launch of `run`: docker or podman in our place, which hands signals on and removes the container."""
    box = launch.container
    if box is None:
        return launch
    home = os.environ.get("XDG_CONFIG_HOME")
    words = (box.runtime.path, *compose.run_words(box, detach=False))
    return replace(launch, argv=words, env=client_env({"config_home": home}, launch.env))


def command(record: RunRecord) -> tuple[str, ...]:
    """What a keeper starts for a record: the engine, or this program."""
    if not record.container:
        return record.argv
    package = str(Path(launcher.__file__).parent.parent)
    return (sys.executable, "-c", _START, record.slug, package)


def settled(record: RunRecord) -> RunRecord:
    """The record once it names the container's own process, or once it has failed to start; at most two minutes."""
    deadline = time.monotonic() + _STARTED_S
    while record.container and "pid" not in record.container and time.monotonic() < deadline:
        if not state.live(record):
            break
        time.sleep(_POLL_S)
        record = state.read(record.slug) or record
    return record


def end(record: RunRecord, grace_s: float) -> None:
    """End and remove the container of a record, whoever still watches it. Asking again does no harm.

    Raises EngineFailed (container-stop) when it runs on: its record is kept then.
    """
    about = record.container
    env = client_env(about, os.environ)
    client, name = str(about["client"]), str(about["name"])
    call((client, "stop", "--time", str(int(grace_s)), name), env, grace_s + _CALL_S)
    gone = call((client, "rm", "--force", name), env, _CALL_S)
    running = _state(about, env)
    if running is not None and running.get("Running"):
        raise EngineFailed(
            "container-stop",
            f"{client} does not end {name}",
            context=gone.cause() or gone.note,
            fix=f"{Path(client).name} rm --force {name}",
        )
    watcher = _identity(about.get("watcher"))
    deadline = time.monotonic() + 10.0
    while state.alive(watcher) and time.monotonic() < deadline:  # it has an exit code to hand on
        time.sleep(_POLL_S)


def client_env(about: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, str]:
    """The environment for docker or podman themselves: their settings lie where the person's do."""
    found = {k: v for k, v in env.items() if k != "XDG_CONFIG_HOME"}
    home = about.get("config_home")
    return found | ({"XDG_CONFIG_HOME": str(home)} if home else {})


def main(slug: str) -> int:
    """Stand for the container of a slug's record until it ends; returns its exit code."""
    record = state.read(slug)
    if record is None or not record.container:
        return 1
    return _Watcher(record).run()


class _Watcher:
    """State of one container that is watched."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.about = dict(record.container)
        self.env = client_env(self.about, os.environ)
        self.told = False
        self.stopping: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, _number: int, _frame: FrameType | None) -> None:
        self.told = True

    def run(self) -> int:
        begun = time.time()
        self._remove()
        code = self._wait(self._client(*self.about["up"]))
        if code:
            print(f"launcher: the container could not be started (exit code {code})", flush=True)
            self._remove()
            return code
        logs = self._client(str(self.about["client"]), "logs", "--follow", str(self.about["name"]))
        try:
            self._tell(begun)
            self._wait(self._client(str(self.about["client"]), "wait", str(self.about["name"]), quiet=True))
            ended = _state(self.about, self.env) or {}
            with contextlib.suppress(subprocess.TimeoutExpired):
                logs.wait(5.0)
        finally:
            if logs.poll() is None:
                logs.terminate()
                logs.wait()
        self._remove()
        return self._as_it_ended(ended)

    def _client(self, *words: str, quiet: bool = False) -> subprocess.Popen[bytes]:
        """A session of its own: a signal for our group must not cut short what removes the container."""
        out = subprocess.DEVNULL if quiet else None
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, env=self.env, start_new_session=True)

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        """Wait for a client; once told to end, end the container meanwhile."""
        while child.poll() is None:
            if self.told and self.stopping is None and "pid" in self.about:
                name, client = str(self.about["name"]), str(self.about["client"])
                self.stopping = self._client(client, "stop", "--time", str(_GRACE_S), name, quiet=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_S)
        return child.returncode

    def _tell(self, begun: float) -> None:
        """Write the container's own process into the record, for memory, cards and whether it lives."""
        own = state.identify(os.getpid())
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:  # our keeper writes who we are; ours must come after that
            stored = state.read(self.record.slug)
            if stored is not None and stored.server is not None and own is not None and stored.server.pid == own.pid:
                break
            time.sleep(0.02)
        found = _state(self.about, self.env) or {}
        pid = int(found.get("Pid") or 0)
        self.about |= {"pid": pid, "watcher": own and _words(own)}
        inside = state.identify(pid) if pid else None
        # A pid of another machine's (Docker Desktop's) names whatever process has it here.
        if inside is not None and inside.create_time < begun - 2.0:
            inside = None
        with contextlib.suppress(Refused):
            state.update(self.record, container=self.about, **({"server": inside} if inside else {}))

    def _remove(self) -> None:
        call((str(self.about["client"]), "rm", "--force", str(self.about["name"])), self.env, _CALL_S)
        if self.about["compose"]:
            call((*self.about["compose"], "down"), self.env, _CALL_S)

    def _as_it_ended(self, ended: Mapping[str, Any]) -> int:
        code = int(ended.get("ExitCode") or 0)
        if ended.get("OOMKilled"):
            limit = self.about.get("memory_bytes")
            print(f"launcher: the kernel ended the container at its limit of {limit} bytes (oom_kill)", flush=True)
            return _OOM_CODE
        if code > 128 and code - 128 in (signal.SIGILL, signal.SIGABRT, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(code - 128, signal.SIG_DFL) if code - 128 != signal.SIGKILL else None
            sys.stdout.flush()
            os.kill(os.getpid(), code - 128)
        return code


def _state(about: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any] | None:
    """What the client says of the container's state; None when there is none of that name."""
    called = call((str(about["client"]), "inspect", "--format", "{{json .State}}", str(about["name"])), env, _CALL_S)
    try:
        return dict(json.loads(called.out)) if called.code == 0 else None
    except ValueError:
        return None


def _identity(words: object) -> ProcessId | None:
    return ProcessId(**words) if isinstance(words, dict) else None


def _words(process: ProcessId) -> dict[str, Any]:
    return {name: getattr(process, name) for name in ProcessId.__dataclass_fields__}


def _folder(name: str) -> Path:
    folder = state.runs_dir().parent / "containers" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise state.unwritable(folder, error) from error
    return folder


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)
    except OSError as error:
        raise state.unwritable(path, error) from error


def _base() -> Path:
    """compose.yaml of an installed wheel, else of a checkout."""
    package = Path(launcher.__file__).parent
    inside = package / "compose.yaml"
    return inside if inside.is_file() else package.parent / "compose.yaml"
