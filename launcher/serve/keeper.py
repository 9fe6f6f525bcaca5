"""`python -m launcher.serve.keeper REQUEST`: the small parent that stays with a server and writes how it ended.

It starts the RPC servers and the engine, keeps the run record true, samples memory, watches whether a busy server gets
on, waits. It outlives the command line (own session, SIGHUP and SIGINT ignored); SIGTERM makes it end the server. When
it is itself killed, the record still names every process, so `status` finds them and `stop` ends them.

Where the slug allows it, a server that was ready and crashed or is wedged is started again, a counted number of times.
Never one that the kernel killed for want of memory: it would load for ten minutes and be killed again.
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
from launcher.facts.serve_log import STARTED_AGAIN
from launcher.serve import alive, boxed, evidence, state
from launcher.serve import rpc as rpc_room
from launcher.serve.causes import known_cause
from launcher.structs import ProcessId, RunEnd, RunRecord
from launcher.units import duration

GRACE_S = 20.0
# Ends that somebody asked the server itself for, with a kill of their own: no failure.
_TOLD = frozenset({0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
# What the kernel's kill for want of memory looks like: a shell in between says it as 128 + 9.
_KILLED = frozenset({-signal.SIGKILL, 128 + signal.SIGKILL})
_READY_POLL_S = 1.0
# So ends serve/boxed for a container that the kernel ended at its memory limit; it would be again.
_OOM_CODE = 128 + signal.SIGKILL


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
        self.wedged_s = float(request["wedged_s"])
        self.most_restarts = int(request["restarts"])
        self.word_fd = int(request["word_fd"])
        self.children: list[subprocess.Popen[bytes]] = []
        self.server: subprocess.Popen[bytes] | None = None
        self.told_to_end = threading.Event()
        self._next_health = 0.0
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
            while self._keep(self.server) and self._start_again():
                pass
        except (LauncherError, OSError) as failed:
            # Also when it cannot be written down which process it is: nobody could find it later.
            self._end_engine()
            error = failed if isinstance(failed, LauncherError) else self._unwritable(failed)
            self._say({"error": error.reference, "message": error.message, "fix": error.fix, "context": error.context})
            return 1
        finally:
            self._end_rpc()
        return 0

    def _keep(self, server: subprocess.Popen[bytes]) -> bool:
        """Wait for the end of one server and write it down; whether it is to be started again."""
        samples = evidence.Samples()
        still_s = self._wait(server, samples)
        killed = samples.kills() if still_s is None and self._was_killed(server) else None
        self._note_causes(killed)
        return self._end(server, samples, still_s, killed)

    def _was_killed(self, server: subprocess.Popen[bytes]) -> bool:
        """Whether the kernel may have done it: the counter is of a whole group, where a compiler is killed as well."""
        return any(child.poll() in _KILLED for child in (server, *self.children))

    def _start_again(self) -> bool:
        """The same launch once more, its RPC servers too: they hold the state of a client that is gone.

        False when its end was asked for since it ended. Raises LauncherError, OSError; the record says failed then.
        """
        try:
            self._end_rpc()
            self.children = []
            if self._asked():
                self._log("not started again: its end was asked for")
                with contextlib.suppress(LauncherError):
                    state.forget(self.record)
                return False
            self.record = state.update(
                self.record, state="starting", server=None, rpc_servers=(), ready_at=None,
                restarts=self.record.restarts + 1, restarted_at=time.time(),
            )  # fmt: skip
            self._log(
                f"{STARTED_AGAIN.removeprefix('launcher: ')} ({self.record.restarts} of at most {self.most_restarts})"
            )
            self._start_rpc()
            self._start_engine()
            # Asked between our look at the marker and the new server being known: nobody else will end it.
            if state.stop_asked(self.record):
                self._on_term(signal.SIGTERM, None)
            return True
        except (LauncherError, OSError) as error:
            self._log(f"could not be started again: {error}")  # the command line that would say it is long gone
            with contextlib.suppress(LauncherError):
                self.record = state.update(self.record, state="failed", rpc_servers=())
            raise

    def _asked(self) -> bool:
        return self.told_to_end.is_set() or state.stop_asked(self.record) is not None

    def _note_causes(self, killed: int | None) -> None:
        """Put into the log what the engine cannot know about its own end."""
        if killed:
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
                    boxed.command(self.record),
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

    def _wait(self, server: subprocess.Popen[bytes], samples: evidence.Samples) -> float | None:
        """Wait for the end, looking at memory and progress; for how long nothing had moved in one ended as wedged.

        A thread blocks in waitpid so that nothing polls for the hours that a server lives.
        """
        ended = threading.Event()

        def wait() -> None:
            server.wait()
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        watch = alive.Watch(self.record, self.wedged_s)
        kill_at: float | None = None
        still_s: float | None = None
        pause = 0.05  # longer and longer: a server that dies young leaves a sample too
        while not ended.wait(0.1 if kill_at else pause):
            pause = min(2 * pause, self.sample_s)
            ending = self.told_to_end.is_set() or still_s is not None
            if not ending and state.stop_asked(self.record) is None:
                # what it held while it served: one that was told to end gives its memory back first
                samples.take(self.record.server)
                if self._is_wedged(watch) and self._may_restart() and self._stored().state == "ready":
                    still_s = watch.activity.still_s
                    _signal_group(server.pid, signal.SIGTERM)
                    ending = True
            if ending:
                if kill_at is None:
                    kill_at = time.monotonic() + GRACE_S
                elif time.monotonic() > kill_at:
                    _signal_group(server.pid, signal.SIGKILL)
        return still_s

    def _is_wedged(self, watch: alive.Watch) -> bool:
        was = watch.activity.wedged
        now = watch.tick()
        if now.wedged and not was:
            self._log(f"no progress for {duration(now.still_s or 0)} with {now.busy or 'a'} request(s) being worked on")
        if self.record.restarts and self.record.ready_at is None and self._answers():
            # of the first start the command line says so, once it has had an answer
            with contextlib.suppress(LauncherError):
                self.record = state.update(self.record, state="ready", ready_at=time.time())
        return now.wedged

    def _answers(self) -> bool:
        from launcher.serve import server

        if time.monotonic() < self._next_health:
            return False
        self._next_health = time.monotonic() + _READY_POLL_S
        with server.client_of(self.record) as client:
            return client.health() == 200

    def _stored(self) -> RunRecord:
        """Our record as it lies on disk. Until it says ready, it is the command line that waits and gives up."""
        stored = state.read(self.record.slug)
        return stored if stored is not None and stored.started_at == self.record.started_at else self.record

    def _may_restart(self) -> bool:
        return self.record.restarts < self.most_restarts

    def _end(
        self, server: subprocess.Popen[bytes], samples: evidence.Samples, still_s: float | None, killed: int | None
    ) -> bool:
        """Write down how it ended; whether it is to be started again."""
        stored = self._stored()
        was_ready = stored.state == "ready"
        by = state.stop_asked(self.record)
        asked = self._asked()
        # One that was gone before anybody asked had a cause of its own; what was asked for is that it stays so.
        wanted = asked and not state.asked_too_late(self.record)
        self._log(f"ended ({_how(server.returncode)})" + (f", asked for by {by}" if by and wanted else ""))
        code = server.returncode
        name = None if code >= 0 else _name(-code)
        kernel = () if wanted else evidence.about(self.record.server)
        failure = "wedged" if still_s is not None else "crashed" if was_ready else "start failed"
        reason = "stopped" if wanted else failure
        cause = None if wanted or still_s is not None else self._cause(code, name, killed)
        end = RunEnd(
            slug=self.record.slug,
            pid=server.pid,
            started_at=self.record.started_at,
            ended_at=time.time(),
            exit_code=code if code >= 0 else None,
            signal=name,
            reason=reason,
            last_rss_bytes=samples.rss_bytes,
            log_path=self.record.log_path,
            began_at=self.record.restarted_at or self.record.started_at,
            ready_at=stored.ready_at if was_ready else None,
            restarts=self.record.restarts,
            still_s=still_s,
            oom_kills=killed,
            kernel=kernel,
            samples=() if wanted else samples.before(time.monotonic()),
            requests=evidence.last_requests(self.record),
            cause=cause or "",
            asked=self.record.asked,
        )
        # A full disk loses the line of history; it must not keep the RPC servers, or the record, alive.
        with contextlib.suppress(LauncherError):
            state.append_history(end)
        alive.forget(self.record)
        failed = reason == "wedged" or (reason == "crashed" and code not in _TOLD)
        if failed and not killed and not asked and code != _OOM_CODE and self._may_restart():
            return True
        self._end_rpc()
        with contextlib.suppress(LauncherError):
            if asked:
                state.forget(self.record)
            else:
                self.record = state.update(self.record, state="failed", rpc_servers=())
        return False

    def _cause(self, code: int, name: str | None, killed: int | None) -> str | None:
        if name == "SIGKILL" and killed == 0:
            return "somebody sent SIGKILL: the kernel counts no kill of this group for want of memory"
        # of this server alone: the words of one before it in the same log are no cause
        log = alive.log_end(self.record.log_path, 65536).rpartition(STARTED_AGAIN)[2]
        found = known_cause(log, code if code >= 0 else None, name)
        return found.text if found else None

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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
