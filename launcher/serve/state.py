"""What we know about servers of ours, on disk: one record each, one line of history for each that ended, locks.

    state/runs/<slug>.json   a server that was started and not yet forgotten
    state/runs/<slug>.stop   somebody asked for its end (who, and when): not a crash
    state/runs/<slug>.alive  what its keeper last saw of it while it was busy
    state/history.jsonl      how each ended, one line, appended; the newest of the last MiB
    state/logs/  state/locks/

Files are replaced whole, so a reader never sees half a record. Nothing here starts or ends a process. What cannot be
written or is another user's is Refused (state-unwritable, state-not-ours), never taken for "nothing runs".
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launcher.errors import Locked, Refused
from launcher.facts.paths import state_dir
from launcher.serve import ends
from launcher.serve.process import alive as alive
from launcher.serve.process import identify as identify
from launcher.serve.process import proc as proc
from launcher.structs import Audit, AuditCard, AuditRow, ProcessId, RunEnd, RunRecord, Source
from launcher.units import MIB, human

SCHEMA = 1
# A load prints up to a MiB; a log that cannot grow would hide why an engine failed.
_ROOM_BYTES = 16 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A record beside what is true now. `end` is the line of history, None while it runs or when nobody saw.

    how  'down': its server ended, and its keeper is about to write down how or to start it again
    """

    record: RunRecord
    alive: bool
    end: RunEnd | None
    how: str  # 'running', 'starting', 'down', 'stopped', 'crashed (exit code 1)', 'ended, nobody saw how'


# ------------------------------------------------------------------------------------------ folders


def runs_dir() -> Path:
    """Folder of the records, made when missing."""
    return _made(state_dir() / "runs")


def logs_dir() -> Path:
    """Folder of the log files, made when missing."""
    return _made(state_dir() / "logs")


def locks_dir() -> Path:
    """Folder of the lock files, made when missing; a lock file is never deleted."""
    return _made(state_dir() / "locks")


def empty_config_dir() -> Path:
    """An empty folder for the engine's XDG_CONFIG_HOME, so that no config file of the user reaches it."""
    return _made(state_dir() / "empty-config")


def history_path() -> Path:
    """File of the ended runs."""
    return _made(state_dir()) / "history.jsonl"


def _made(path: Path) -> Path:
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """A failed write as a refusal: a full disk, a read-only one and another user's folder are no bugs of ours."""
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> Refused:
    """The refusal for a file of ours that cannot be written."""
    fix = "LAUNCHER_HOME=/a/folder/of/yours/with/room, or: df -h " + str(state_dir())
    return Refused("state-unwritable", f"cannot write {path}: {error.strerror or error}", fix=fix)


def problem() -> str:
    """Why a run could not be recorded here, empty when it can. Looks, and writes nothing."""
    folder = next(p for p in (state_dir(), *state_dir().parents) if p.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} cannot be written"
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    return f"only {human(free)} are free for records and logs in {folder}" if free < _ROOM_BYTES else ""


def stem(slug: str) -> str:
    """File name of a slug or path: `llamacpp/x` -> `llamacpp__x`; long ones are cut and get a hash."""
    safe = re.sub(r"[^A-Za-z0-9._@+-]", "-", slug.strip("/").replace("/", "__")).lstrip(".") or "-"
    if len(safe) > 120 or safe != slug.replace("/", "__"):
        return f"{safe[-100:]}-{hashlib.sha256(slug.encode()).hexdigest()[:8]}"
    return safe


# ------------------------------------------------------------------------------------------ records


def live(record: RunRecord) -> bool:
    """Whether the record's server runs, or may run again: its keeper lives and has not given up.

    A keeper whose server just ended writes down how, and may start it again: until then nobody may take its place.
    """
    return alive(record.server) or (record.state != "failed" and alive(record.keeper))


def up(record: RunRecord) -> bool:
    """Whether the record's server runs, or is being started; one that ended is not, whatever its keeper does next."""
    if record.server is not None:
        return alive(record.server)
    return record.state == "starting" and alive(record.keeper)


def write_json(path: Path, document: object, mode: int = 0o600) -> None:
    """Replace a file by a JSON document in one step. Records hold paths and arguments: for the owner only.

    Raises Refused (state-unwritable); the file is as it was then.
    """
    with _writing(path):
        _replace(path, json.dumps(document, indent=1).encode(), mode)


def _replace(path: Path, data: bytes, mode: int = 0o600) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb", buffering=0) as out:
            _write_all(out.fileno(), data)
            os.fsync(out.fileno())
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _write_all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def record_path(slug: str) -> Path:
    """Where the record of a slug is kept."""
    return runs_dir() / f"{stem(slug)}.json"


def to_dict(record: RunRecord) -> dict[str, Any]:
    """JSON form of a record."""
    return {"schema_version": SCHEMA, **asdict(record)}


def from_dict(document: object) -> RunRecord:
    """A record from its JSON form. Raises KeyError, TypeError or ValueError when it is not one."""
    if not isinstance(document, dict):
        msg = "not an object"
        raise TypeError(msg)
    fields = {k: v for k, v in document.items() if k in RunRecord.__dataclass_fields__}

    def identity(value: Mapping[str, Any] | None) -> ProcessId | None:
        if value is None:
            return None
        ticks, boot = value.get("start_ticks"), value.get("boot_id")
        return ProcessId(
            pid=int(value["pid"]),
            create_time=float(value["create_time"]),
            start_ticks=None if ticks is None else int(ticks),
            boot_id=None if boot is None else str(boot),
        )

    fields["server"] = identity(fields["server"])
    fields["keeper"] = identity(fields["keeper"])
    fields["rpc_servers"] = tuple(p for p in map(identity, fields["rpc_servers"]) if p)
    fields["rpc_endpoints"] = tuple(fields["rpc_endpoints"])
    fields["argv"] = tuple(fields["argv"])
    fields["audit"] = _audit(fields.get("audit"))
    fields["asked"] = dict(fields.get("asked") or {})
    return RunRecord(**fields)


def _audit(value: object) -> Audit | None:
    """An audit from its JSON form, None when it is not one: what was compared is no reason to lose a server."""
    if not isinstance(value, dict):
        return None
    try:
        rows = [{k: v for k, v in row.items() if k in AuditRow.__dataclass_fields__} for row in value["rows"]]
        cards = [{k: v for k, v in c.items() if k in AuditCard.__dataclass_fields__} for c in value.get("cards", ())]
        return Audit(
            rows=tuple(AuditRow(**{**r, "source": Source(r["source"]) if r.get("source") else None}) for r in rows),
            ok=bool(value["ok"]),
            worst=str(value["worst"]),
            cards=tuple(AuditCard(**c) for c in cards),
            failed=tuple(str(line) for line in value.get("failed", ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def write(record: RunRecord) -> None:
    """Keep a record; replaces an older one of the same slug."""
    write_json(record_path(record.slug), to_dict(record))


def read(slug: str) -> RunRecord | None:
    """The record of a slug, None when there is none or it is damaged. Raises Refused (state-not-ours)."""
    return _read(record_path(slug))


def _read(path: Path) -> RunRecord | None:
    try:
        return from_dict(json.loads(path.read_text(encoding="utf-8")))
    except PermissionError as error:
        raise _not_ours(path) from error
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _not_ours(path: Path) -> Refused:
    return Refused(
        "state-not-ours",
        f"{path} belongs to another user: what runs from here is not ours to see or to stop",
        fix="export LAUNCHER_HOME=/a/folder/of/yours     # or ask as that user",
    )


def update(record: RunRecord, **changes: Any) -> RunRecord:
    """Change fields of the stored record, if it still is this run; keeper and command line both do.

    Returns the record as it is now stored, or the given one with the changes when the run was forgotten.
    """
    with _held(locks_dir() / f"record-{stem(record.slug)}.lock"):
        stored = read(record.slug)
        if stored is None or stored.started_at != record.started_at:
            return replace(record, **changes)
        now = replace(stored, **changes)
        write(now)
        return now


def forget(record: RunRecord) -> None:
    """Drop the record of a run and its stop marker; an other run of the same slug is left alone.

    Raises Refused (state-unwritable).
    """
    with _held(locks_dir() / f"record-{stem(record.slug)}.lock"):
        stored = read(record.slug)
        if stored is None or stored.started_at == record.started_at:
            with _writing(record_path(record.slug)):
                record_path(record.slug).unlink(missing_ok=True)
                marker_path(record.slug).unlink(missing_ok=True)
                note_path(record.slug).unlink(missing_ok=True)


def records() -> tuple[RunRecord, ...]:
    """Every readable record, oldest start first."""
    found = (_read(path) for path in sorted(runs_dir().glob("*.json")))
    return tuple(sorted((r for r in found if r is not None), key=lambda r: (r.started_at, r.slug)))


def running() -> tuple[RunRecord, ...]:
    """Records of servers that run, are being started, or may be started again by their keepers."""
    return tuple(r for r in records() if live(r))


def survey() -> tuple[Seen, ...]:
    """Every record beside the truth: those whose server is gone say how it ended, if anybody saw it."""
    ended = history()
    return tuple(_seen(record, ended) for record in records())


def _seen(record: RunRecord, ended: tuple[RunEnd, ...]) -> Seen:
    if live(record):
        how = "down" if not up(record) else "running" if record.state == "ready" else "starting"
        return Seen(record=record, alive=True, end=None, how=how)
    end = end_of(record, ended)
    return Seen(record=record, alive=False, end=end, how=describe(end))


def describe(end: RunEnd | None) -> str:
    """One phrase for how a run ended."""
    if end is None:
        return "ended, nobody saw how"
    if end.signal:
        return f"{end.reason} ({end.signal})"
    return end.reason if end.exit_code is None else f"{end.reason} (exit code {end.exit_code})"


# ----------------------------------------------------------------------------------- stop and history


def marker_path(slug: str) -> Path:
    """The file that says that an end was asked for."""
    return runs_dir() / f"{stem(slug)}.stop"


def note_path(slug: str) -> Path:
    """The file in which a keeper leaves what it saw of a busy server, for `status`."""
    return runs_dir() / f"{stem(slug)}.alive"


def ask_stop(record: RunRecord) -> None:
    """Say, before any signal is sent, that this end is wanted, by whom and when.

    The record should be as it is stored: a server that is gone by now had an end of its own, and the marker says so.
    """
    ended = None if record.server is None or alive(record.server) else asdict(record.server)
    by = {"started_at": record.started_at, "pid": os.getpid(), "command": _own_command(), "at": time.time()}
    write_json(marker_path(record.slug), {**by, "ended": ended})


def stop_asked(record: RunRecord) -> str | None:
    """Who asked for the end of exactly this run (`pid 12, switch demo/b`), None when nobody did."""
    marker = _marker(record)
    return None if marker is None else f"pid {marker['pid']}, {marker['command']}"


def asked_too_late(record: RunRecord) -> bool:
    """Whether the record's server had ended by itself before its end was asked for."""
    marker = _marker(record)
    return bool(marker and record.server and marker.get("ended") == asdict(record.server))


def _marker(record: RunRecord) -> dict[str, Any] | None:
    """The stop marker of exactly this run, None when there is none that can be read."""
    try:
        marker = json.loads(marker_path(record.slug).read_text(encoding="utf-8"))
        return marker if marker["started_at"] == record.started_at and {"pid", "command"} <= marker.keys() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def append_history(end: RunEnd) -> None:
    """Add one line, and drop the oldest of a history over 1 MiB. Raises Refused (state-unwritable)."""
    path = history_path()
    with _held(locks_dir() / "history.lock"), _writing(path):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, ends.line_of(end).encode())
            long = os.fstat(handle).st_size > ends.MOST_BYTES
        finally:
            os.close(handle)
        if long:
            _replace(path, ends.newest(path.read_text(encoding="utf-8", errors="replace"), ends.MOST_BYTES).encode())


def history() -> tuple[RunEnd, ...]:
    """Every ended run, oldest first; lines that cannot be read are passed over."""
    try:
        lines = history_path().read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ()
    except PermissionError as error:
        raise _not_ours(history_path()) from error
    return tuple(end for end in map(ends.parse, lines) if end is not None)


def end_of(record: RunRecord, among: tuple[RunEnd, ...] | None = None) -> RunEnd | None:
    """How exactly this run ended, None when nobody wrote it down; of one that was started again, its last end."""
    found = history() if among is None else among
    return next((e for e in reversed(found) if e.slug == record.slug and e.started_at == record.started_at), None)


# -------------------------------------------------------------------------------------------- locks


@contextlib.contextmanager
def lock(name: str, holder_text: str = "") -> Iterator[None]:
    """Hold an exclusive lock of that name; the kernel lets go of it when we die, however that happens.

    The descriptor is not inherited by children: an engine that outlives us does not hold it.
    Raises Locked (id locked) at once, naming pid and command of the holder; Refused (state-unwritable).
    """
    path = locks_dir() / f"{stem(name)}.lock"
    handle = _open_lock(path)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _locked(name, path) from None
        _sign(handle, json.dumps({"pid": os.getpid(), "command": holder_text or _own_command()}))
        try:
            yield
        finally:
            _sign(handle, "")
            # Said, not left to close(): a child between fork and exec still has the descriptor.
            fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def _open_lock(path: Path) -> int:
    """The lock file; one that is there serves on a full or read-only disk too, so that `stop` works there."""
    with _writing(path):
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.ENOSPC, errno.EDQUOT) or not path.exists():
                raise
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _sign(handle: int, text: str) -> None:
    # Who holds it is told to others only: without room for the name the lock holds all the same.
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, text.encode(), 0)


def _locked(name: str, path: Path) -> Locked:
    pid, command = 0, "unknown command"
    for _ in range(20):  # the holder writes its name just after it got the lock
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            holder = json.loads(path.read_text(encoding="utf-8"))
            pid, command = int(holder["pid"]), str(holder["command"])
            break
        time.sleep(0.01)
    return Locked(
        "locked",
        f"another operation holds the lock `{name}`: pid {pid}, `{command}`",
        context=str(path),
        fix=f"launcher status     # wait for it; to end it: kill {pid}"
        if pid
        else "launcher status     # then try again",
    )


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """A short wait-for-it lock around a read-change-write. Raises Refused (state-unwritable)."""
    handle = _open_lock(path)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _own_command() -> str:
    name = Path(sys.argv[0]).name or "python"
    return " ".join(["launcher" if name == "__main__.py" else name, *sys.argv[1:]])
