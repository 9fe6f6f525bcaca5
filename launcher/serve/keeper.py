"""`python -m launcher.serve.keeper REQUEST`: the small parent that stays with a server and writes how it ended.

It starts the RPC servers and the engine, keeps the run record true, samples memory, waits. It outlives the command
line (own session, SIGHUP and SIGINT ignored); SIGTERM makes it end the server. When it is itself killed, the record
still names every process, so `status` finds them and `stop` ends them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from launcher.errors import EngineFailed, LauncherError
from launcher.serve import native, state
from launcher.serve import rpc as rpc_room
from launcher.structs import ProcessId, RunEnd, RunRecord

GRACE_S = 20.0


def main(request_path: str) -> int:
    """Keep one server; returns when it, and what was started for it, is gone."""
    path = Path(request_path)
    request = json.loads(path.read_text(encoding="utf-8"))
    path.unlink(missing_ok=True)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return Keeper(request).run()


class Keeper:
    """State of one kept server."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.record: RunRecord = state.from_dict(request["record"])
        self.env: dict[str, str] = request["env"]
        self.rpc = None
        if request["rpc"]:
            rpc = request["rpc"]
            self.rpc = rpc_room.RpcSpawn(hosts=tuple(rpc["hosts"]), server_path=rpc["path"], threads=rpc["threads"])
        self.sample_s = float(request["sample_s"])
        self.word_fd = int(request["word_fd"])
        self.children: list[subprocess.Popen[bytes]] = []
        self.server: subprocess.Popen[bytes] | None = None
        self.told_to_end = threading.Event()
        signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, _number: int, _frame: FrameType | None) -> None:
        self.told_to_end.set()
        if self.server is not None and self.server.returncode is None:
            _signal_group(self.server.pid, signal.SIGTERM)

    def run(self) -> int:
        """Start, say so, wait, write the end. Returns 0 unless nothing could be started."""
        try:
            self.record = state.update(self.record, keeper=state.identify(os.getpid()))
            self._start_rpc()
            self._start_engine()
            assert self.server is not None
            self._say({"ok": True})
            kills = _oom_kills()
            rss = self._wait(self.server)
            self._note_causes(kills)
            self._end(self.server, rss)
        except (LauncherError, OSError) as failed:
            # Also when it cannot be written down which process it is: nobody could find it later.
            self._end_engine()
            error = failed if isinstance(failed, LauncherError) else self._unwritable(failed)
            self._say({"error": error.reference, "message": error.message, "fix": error.fix, "context": error.context})
            return 1
        finally:
            self._end_rpc()
        return 0

    def _note_causes(self, kills_before: int) -> None:
        """Put into the log what the engine cannot know about its own end."""
        if _oom_kills() > kills_before:
            self._log("the kernel ended a process of this group for want of memory (oom_kill)")
        for child, host in zip(self.children, self.rpc.hosts if self.rpc else (), strict=False):
            if child.poll() is not None:
                self._log(f"the RPC server on {host} had ended by itself ({_how(child.returncode)})")

    def _start_rpc(self) -> None:
        if self.rpc is None:
            return
        with Path(self.record.log_path).with_suffix(".rpc.log").open("ab") as log:
            for host in self.rpc.hosts:
                if self.told_to_end.is_set():
                    raise EngineFailed("engine-start", "stopped while it was being started", fix="launcher status")
                rpc_room.spawn_rpc(
                    self.rpc, host, self.env, log, cancelled=self.told_to_end.is_set, spawned=self._note_rpc
                )

    def _note_rpc(self, child: subprocess.Popen[bytes]) -> None:
        """Before it listens, which may take seconds: were we killed meanwhile, nobody would know of it."""
        self.children.append(child)
        pids = tuple(_identity(child) for child in self.children)
        self.record = state.update(self.record, rpc_servers=pids)

    def _start_engine(self) -> None:
        if self.told_to_end.is_set():
            raise EngineFailed("engine-start", "stopped while it was being started", fix="launcher status")
        with Path(self.record.log_path).open("ab") as log:
            try:
                self.server = subprocess.Popen(
                    self.record.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self.env,
                    start_new_session=True,
                )
            except OSError as error:
                message = f"cannot start {self.record.argv[0]}: {error.strerror}"
                raise EngineFailed("engine-start", message, fix="launcher engine install") from error
        self.record = state.update(self.record, server=_identity(self.server))
        if self.told_to_end.is_set():  # told between the two: the handler did not know whom to tell
            _signal_group(self.server.pid, signal.SIGTERM)

    def _end_engine(self) -> None:
        """A server that could be started and not be recorded: end it at once, it has served nobody."""
        if self.server is not None and self.server.poll() is None:
            _signal_group(self.server.pid, signal.SIGKILL)
            self.server.wait()

    def _unwritable(self, error: OSError) -> LauncherError:
        return state.unwritable(Path(error.filename or self.record.log_path), error)

    def _wait(self, server: subprocess.Popen[bytes]) -> int | None:
        """Wait for the end, sampling resident memory; returns the last sample.

        A thread blocks in waitpid so that nothing polls for the hours that a server lives.
        """
        ended = threading.Event()

        def wait() -> None:
            server.wait()
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        rss: int | None = None
        kill_at: float | None = None
        pause = 0.05  # longer and longer: a server that dies young leaves a sample too
        while not ended.wait(0.1 if kill_at else pause):
            pause = min(2 * pause, self.sample_s)
            if not self.told_to_end.is_set() and state.stop_asked(self.record) is None:
                # what it held while it served: one that was told to end gives its memory back first
                rss = native.resident_bytes(self.record.server) or rss
            if self.told_to_end.is_set():
                if kill_at is None:
                    kill_at = time.monotonic() + GRACE_S
                elif time.monotonic() > kill_at:
                    _signal_group(server.pid, signal.SIGKILL)
        return rss

    def _end(self, server: subprocess.Popen[bytes], rss: int | None) -> None:
        stored = state.read(self.record.slug)
        was_ready = stored is not None and stored.started_at == self.record.started_at and stored.state == "ready"
        by = state.stop_asked(self.record)
        wanted = self.told_to_end.is_set() or by is not None
        self._log(f"ended ({_how(server.returncode)})" + (f", asked for by {by}" if by else ""))
        code = server.returncode
        end = RunEnd(
            slug=self.record.slug,
            pid=server.pid,
            started_at=self.record.started_at,
            ended_at=time.time(),
            exit_code=code if code >= 0 else None,
            signal=None if code >= 0 else _name(-code),
            reason="stopped" if wanted else "crashed" if was_ready else "start failed",
            last_rss_bytes=rss,
            log_path=self.record.log_path,
        )
        # A full disk loses the line of history; it must not keep the RPC servers, or the record, alive.
        with contextlib.suppress(LauncherError):
            state.append_history(end)
        self._end_rpc()
        with contextlib.suppress(LauncherError):
            if wanted:
                state.forget(self.record)
            else:
                self.record = state.update(self.record, state="failed", rpc_servers=())

    def _end_rpc(self) -> None:
        rpc_room.end(self.children)

    def _say(self, word: dict[str, object]) -> None:
        # The command line may be gone already; that is no reason to end the server.
        word_fd, self.word_fd = self.word_fd, -1
        if word_fd < 0:
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(word_fd, json.dumps(word).encode())
        os.close(word_fd)

    def _log(self, text: str) -> None:
        with contextlib.suppress(OSError), Path(self.record.log_path).open("ab") as log:
            log.write(f"launcher: {text}\n".encode())


def _identity(child: subprocess.Popen[bytes]) -> ProcessId:
    """Identity of a child that was just started: it is ours to wait for, so its pid cannot be another's yet."""
    return state.identify(child.pid) or ProcessId(pid=child.pid, create_time=0.0)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else _name(-code)


def _oom_kills() -> int:
    """How often the kernel killed in our cgroup for want of memory; 0 where that cannot be read."""
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            hierarchy, _, path = line.partition("::")
            if hierarchy == "0":
                events = Path("/sys/fs/cgroup") / path.lstrip("/") / "memory.events"
                pairs = dict(pair.split() for pair in events.read_text().splitlines())
                return int(pairs.get("oom_kill", "0"))
    except (OSError, ValueError):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
