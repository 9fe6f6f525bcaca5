"""llama-server as a process of this machine: start it under a keeper, stop it, or become it.

Every process is known by (pid, create time) and only such a match is ever signalled. The server leads its own
session, so it outlives the command line that started it and takes its own children with it when it is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

import launcher
from launcher.errors import EngineFailed, Refused
from launcher.serve import boxed, state
from launcher.serve.ports import free_port, port_free
from launcher.serve.rpc import RpcSpawn, rpc_servers
from launcher.structs import Launch, ProcessId, RunEnd, RunRecord

# A busy server in which nothing moves for so long is wedged: a batch of 4096 tokens at 20 tokens a second, the slowest
# that people bear, takes 205 s.
WEDGED_S = 300.0
_KEEP_LOGS = 10
_STILL_S = 2.0
_HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Keepers that this process started: held to be waited for, else each would stay a zombie while we live.
_keepers: list[subprocess.Popen[bytes]] = []


# ---------------------------------------------------------------------------------------------- start


def start(
    launch: Launch,
    slug_name: str,
    *,
    rpc: RpcSpawn | None = None,
    sample_s: float = 2.0,
    wedged_s: float = WEDGED_S,
    restarts: int = 0,
    asked: Mapping[str, Any] | None = None,
) -> RunRecord:
    """Start the launch under a keeper; back as soon as the server has a pid (`wait.wait_ready` waits for it).

    wedged_s  a busy server is wedged when nothing moved for so long
    restarts  how often its keeper may start it again when it crashed or is wedged
    asked     what the person gave, for `switch -`

    Raises Refused (already-running, port-busy) before anything is started, EngineFailed (engine-start, rpc-start,
    keeper-died) when a process cannot be started; nothing is left behind then, nor after a Ctrl-C in here.
    """
    _reap()
    before = state.read(slug_name)
    if before is not None and live(before):
        pid = before.server.pid if before.server and alive(before.server) else "being started"
        raise Refused(
            "already-running",
            f"{slug_name} runs already (pid {pid}, port {before.port})",
            fix=f"launcher stop {slug_name}",
        )
    for other in state.records():
        if not live(other):
            end_rpc(other.rpc_servers)  # left by a keeper that was killed; they hold memory whatever slug they served
    if before is not None:
        state.marker_path(slug_name).unlink(missing_ok=True)
    if not port_free(launch.host, launch.port):
        raise Refused(
            "port-busy",
            f"port {launch.port} on {launch.host} is taken by another process",
            fix=f"--port {free_port(launch.host, launch.port + 1)}",
        )
    now = time.time()
    hosts = tuple(dict.fromkeys(d.device.endpoint for d in launch.plan.devices if d.device.endpoint))
    record = RunRecord(
        slug=slug_name,
        server=None,
        keeper=None,
        rpc_servers=(),
        rpc_endpoints=hosts or (rpc.hosts if rpc else ()),
        argv=launch.argv,
        env_set=dict(launch.env_set),
        host=launch.host,
        port=launch.port,
        alias=launch.alias,
        log_path=str(_new_log(slug_name, now)),
        state="starting",
        started_at=now,
        asked=dict(asked or {}),
        container=boxed.prepared(launch),
    )
    watching = {"sample_s": sample_s, "wedged_s": wedged_s, "restarts": restarts}
    try:
        state.write(record)
        return _keep(record, launch, rpc, watching)
    except BaseException:
        stop(record)
        raise


def _keep(record: RunRecord, launch: Launch, rpc: RpcSpawn | None, watching: Mapping[str, float]) -> RunRecord:
    """Spawn the keeper, hand it the launch, wait for its word on the pipe."""
    request = state.runs_dir() / f".{state.stem(record.slug)}.{os.getpid()}.launch"
    read_end, write_end = os.pipe()
    keeper = None
    try:
        document = {
            "record": state.to_dict(record),
            "env": dict(launch.env),
            "rpc": None if rpc is None else {"hosts": rpc.hosts, "path": rpc.server_path, "threads": rpc.threads},
            "word_fd": write_end,
            **watching,
        }
        state.write_json(request, document)  # owner only, and the keeper removes it: it holds the environment
        package = str(Path(launcher.__file__).parent.parent)
        env = os.environ | {"PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])}
        keeper = _spawn_keeper(record, request, env, write_end)
        _keepers.append(keeper)
        os.close(write_end)
        write_end = -1
        state.update(record, keeper=state.identify(keeper.pid))
        return boxed.settled(_hear(record, read_end))
    except BaseException:
        # Also before the record knows it: told to end, it takes with it whatever it has started.
        if keeper is not None:
            keeper.terminate()
            keeper.wait()
        raise
    finally:
        os.close(read_end)
        if write_end >= 0:
            os.close(write_end)
        request.unlink(missing_ok=True)


def _spawn_keeper(record: RunRecord, request: Path, env: dict[str, str], word_fd: int) -> subprocess.Popen[bytes]:
    try:
        with Path(record.log_path).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "launcher.serve.keeper", str(request)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                pass_fds=(word_fd,),
                start_new_session=True,
            )
    except OSError as error:
        if error.filename == record.log_path:
            raise state.unwritable(Path(record.log_path), error) from error
        raise EngineFailed(
            "keeper-died",
            f"the process that keeps {record.slug} cannot be started: {error.strerror or error}",
            fix="ulimit -u; free -h     # processes that a user may have, memory; then try again",
        ) from error


def _hear(record: RunRecord, read_end: int) -> RunRecord:
    said = b""
    while True:
        select.select([read_end], [], [])
        piece = os.read(read_end, 65536)
        if not piece:
            break
        said += piece
    if not said:
        raise EngineFailed(
            "keeper-died",
            f"the process that keeps {record.slug} died before the engine was started",
            context=tail(record.log_path),
            fix=f"tail -n 60 {shlex.quote(record.log_path)}     # then try again",
        )
    word = json.loads(said)
    if "error" in word:
        kind = Refused if word["error"].startswith("state-") else EngineFailed
        raise kind(word["error"], word["message"], fix=word["fix"], context=word["context"] or tail(record.log_path))
    return state.read(record.slug) or record


def _new_log(slug_name: str, now: float) -> Path:
    stem = state.stem(slug_name)
    # The whole name: `qwen-2...` also begins the logs of a slug that is called `qwen-235b`.
    own = re.compile(re.escape(stem) + r"-\d{8}T\d{6}_\d{3}\.log")
    for old in sorted(p for p in state.logs_dir().iterdir() if own.fullmatch(p.name))[: -_KEEP_LOGS + 1]:
        with contextlib.suppress(OSError):
            old.unlink(missing_ok=True)
            old.with_suffix(".rpc.log").unlink(missing_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now)) + f"{now % 1:.3f}"[1:].replace(".", "_")
    return state.logs_dir() / f"{stem}-{stamp}.log"


# ----------------------------------------------------------------------------------------------- stop


def stop(record: RunRecord, grace_s: float = 20.0) -> RunEnd | None:
    """End a server, its RPC servers and its keeper; asking again, or for one that is gone, does no harm.

    SIGTERM to the server's group, `grace_s` of patience, SIGKILL. Returns the line of history when there is one.
    """
    record = _stored(record)
    # Without room on the disk a server must still end: what cannot be written down is left out.
    if live(record):
        with contextlib.suppress(Refused):
            state.ask_stop(record)
        # Its keeper may have started it again since the record was read: one of us two sees what the other wrote.
        record = _stored(record)
    if not alive(record.server):
        record = _tell_keeper(record, grace_s)
    started = alive(record.server)
    last_rss = resident_bytes(record.server)
    if record.container:
        boxed.end(record, grace_s)
    end_group(record.server, grace_s)
    end_rpc(record.rpc_servers)
    # It has the exit code to write down; it ends by itself once the server is gone.
    _end_keeper(record.keeper)
    end = state.end_of(record)
    if end is None and started and record.server is not None:
        end = RunEnd(
            slug=record.slug,
            pid=record.server.pid,
            started_at=record.started_at,
            ended_at=time.time(),
            exit_code=None,
            signal=None,
            reason="stopped",
            last_rss_bytes=last_rss,
            log_path=record.log_path,
            began_at=record.restarted_at or record.started_at,
            ready_at=record.ready_at,
            restarts=record.restarts,
            asked=record.asked,
        )
        with contextlib.suppress(Refused):
            state.append_history(end)
    with contextlib.suppress(Refused):
        state.forget(record)
    return end


def _stored(record: RunRecord) -> RunRecord:
    """This run as its record says it now; the given one when it was forgotten."""
    stored = state.read(record.slug)
    return stored if stored is not None and stored.started_at == record.started_at else record


def _tell_keeper(record: RunRecord, patience_s: float) -> RunRecord:
    """Tell a keeper whose server is not there yet, or no more, to end; back when it is gone or has a server after all.

    It may be about to start one: told, it starts none, or ends it.
    """
    if not _signal(record.keeper, signal.SIGTERM):
        return record
    deadline = time.monotonic() + patience_s
    while alive(record.keeper) and not alive(record.server) and time.monotonic() < deadline:
        time.sleep(0.02)
        record = _stored(record)
    return _stored(record)


def _end_keeper(keeper: ProcessId | None) -> None:
    """A keeper ends by itself once its server is gone; one that does not is ended with all that it has started."""
    if _gone(keeper, 10.0):
        return
    if _signal(keeper, signal.SIGTERM) and _gone(keeper, 2.0):
        return
    _signal(keeper, signal.SIGSTOP)  # so that it starts nothing between this look and its end
    found = state.proc(keeper)
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        children = found.children() if found else []
    left = [state.identify(child.pid) for child in children]
    _signal(keeper, signal.SIGKILL)
    _gone(keeper, 10.0)
    for child in left:
        end_group(child, 2.0)


def end_group(leader: ProcessId | None, grace_s: float) -> None:
    """SIGTERM to a process and its group, wait, SIGKILL, wait. Only while (pid, create time) match.

    The patience ends early for one that stands still: told to end with a request in flight, llama-server answers no
    more and waits until that client hangs up. A Ctrl-C ends it too, not the stopping: SIGKILL at once.
    """
    if not _signal(leader, signal.SIGTERM):
        return
    try:
        gone = _gone(leader, grace_s, still_s=_STILL_S)
    except KeyboardInterrupt:
        _signal(leader, signal.SIGKILL)
        raise
    if not gone:
        _signal(leader, signal.SIGKILL)
        _gone(leader, 10.0)


def end_rpc(servers: Iterable[ProcessId]) -> None:
    """End RPC servers: all are told first, then waited for."""
    told = [server for server in servers if _signal(server, signal.SIGTERM)]
    for server in told:
        end_group(server, 3.0)


def live(record: RunRecord) -> bool:
    """Whether the record's server runs or may run again, see `state.live`; waits for keepers of ours that ended."""
    _reap()
    return state.live(record)


def up(record: RunRecord) -> bool:
    """Whether the record's server runs or is being started; waits for keepers of ours that ended."""
    _reap()
    return state.up(record)


def alive(process: ProcessId | None) -> bool:
    """Whether exactly this process runs."""
    _reap()
    return state.alive(process)


def _signal(process: ProcessId | None, number: signal.Signals) -> bool:
    if process is None or not alive(process):
        return False
    try:
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def _gone(process: ProcessId | None, patience_s: float, still_s: float | None = None) -> bool:
    """Wait for an end; False after patience_s, or after still_s without a tenth of a second of processor time."""
    now = time.monotonic()
    deadline, moved_at, moved_to = now + patience_s, now, _cpu_s(process)
    pause = 0.01
    while alive(process):
        now, cpu = time.monotonic(), _cpu_s(process)
        if cpu - moved_to >= 0.1:
            moved_at, moved_to = now, cpu
        if now > deadline or (still_s is not None and now - moved_at > still_s):
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, 0.2)
    return True


def _cpu_s(process: ProcessId | None) -> float:
    found = state.proc(process)
    with contextlib.suppress(psutil.Error):
        times = found.cpu_times() if found else None
        return float(times.user + times.system) if times else 0.0
    return 0.0


def resident_bytes(process: ProcessId | None) -> int | None:
    """Resident memory of a process, None when it is gone."""
    found = state.proc(process)
    with contextlib.suppress(psutil.Error):
        return int(found.memory_info().rss) if found else None
    return None


def _reap() -> None:
    _keepers[:] = [keeper for keeper in _keepers if keeper.poll() is None]


def tail(path: str, lines: int = 30) -> str:
    """The last lines of a log file, empty when there is none. Reads its end only."""
    try:
        with Path(path).open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - 400 * lines))
            return "\n".join(log.read().decode("utf-8", "replace").splitlines()[-lines:])
    except OSError:
        return ""


# ----------------------------------------------------------------------------------------- foreground


def exec_foreground(launch: Launch, *, rpc: RpcSpawn | None = None) -> int:
    """Become llama-server: this process is replaced and never comes back.

    With RPC servers to look after it stays as the parent, hands every signal on once, ends them when the server
    is gone and returns the exit code (128 + number for a signal). Raises EngineFailed (engine-start, rpc-start).
    """
    if rpc is None:
        sys.stdout.flush()
        sys.stderr.flush()
        for name in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and an exec would hand that on
            signal.signal(name, signal.SIG_DFL)
        try:
            os.execve(launch.argv[0], launch.argv, dict(launch.env))
        except OSError as error:
            raise _no_start(launch.argv[0], error) from error
    children: list[subprocess.Popen[bytes]] = []
    held: list[int] = []
    spawning = False

    def hand_on(number: int, _frame: FrameType | None) -> None:
        if children:
            children[0].send_signal(number)
        elif spawning:
            held.append(number)  # leaving now would leave a server that nobody knows yet
        else:
            sys.exit(128 + number)

    before = {name: signal.signal(name, hand_on) for name in _HANDED_ON}
    try:
        with rpc_servers(rpc, launch.env):
            spawning = True
            # A session of its own: Ctrl-C reaches it through us alone, a second one would cut its clean-up short.
            children.append(
                subprocess.Popen(launch.argv, env=dict(launch.env), stdin=subprocess.DEVNULL, start_new_session=True)
            )
            for number in held:
                children[0].send_signal(number)
            code = children[0].wait()
    except OSError as error:
        raise _no_start(launch.argv[0], error) from error
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
    return code if code >= 0 else 128 - code


def _no_start(path: str, error: OSError) -> EngineFailed:
    return EngineFailed("engine-start", f"cannot start {path}: {error.strerror}", fix="launcher engine install")
