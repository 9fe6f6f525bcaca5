"""`service`: a systemd unit around `launcher run`, written, shown and removed; and the wait for its cards.

Only our own files are touched, and systemd is asked, never told: the lines that start and stop are shown to be pasted.
"""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.errors import DeviceUnusable, Refused, UsageError
from launcher.facts import devices as device_facts
from launcher.facts import paths
from launcher.serve import gates_machine, state
from launcher.serve import service as units
from launcher.structs import Service
from launcher.units import human, mib
from launcher.workflows import overrides, preflight
from launcher.workflows import target as targets
from launcher.workflows.plan import Planned

_LINGER = Path("/var/lib/systemd/linger")
_POLL_S = 2.0
_SAY_EVERY_S = 60.0
# What `launcher run` reads of the environment and a service would not have. No secret is ever among them.
_ENV = ("LAUNCHER_HOME", "LLAMA_SERVER", "HF_HOME", "SPEC_N", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")
# Which cards an engine is shown; set and empty means none. GGML_VK_* and the like never reach an engine of ours.
_ENV_CARDS = ("CUDA_VISIBLE_DEVICES", "GGML_CUDA_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_ENV_LISTS = ("LD_LIBRARY_PATH", "PYTHONPATH")


def install(text: str, given: Mapping[str, Any], *, engine: str | None, force: bool, system: bool) -> Service:
    """Plan, gates, then write the user's unit; a system-wide one is only printed, since it needs root.

    Raises UsageError, SlugInvalid, Refused (a gate; unit-not-ours, unit-unwritable).
    """
    target = targets.resolve(text)
    command = overrides.command("launcher service install", {"--force": force, "--engine": engine, "--system": system})
    checked = preflight.check(
        target, given, engine=engine, force=force, gone=state.running(), command=command, own_memlock=False
    )
    preflight.refuse(checked)
    planned = checked.planned
    assert planned is not None  # without a plan a gate is closed
    unit = _unit(target.name, planned, given, engine=engine, force=force, system=system)
    name = units.unit_name(target.name)
    try:
        said = units.text(unit)
    except ValueError as error:
        raise UsageError(
            "unit-word",
            str(error),
            fix="launcher list     # a slug's name has no such letters; else rename the file or the option's value",
        ) from error
    cards = _cards(planned)
    notes = [] if cards else ["the plan uses no card: the service waits for none"]
    if system:
        to = f"/etc/systemd/system/{name}"
        again = " ".join([command, shlex.quote(text), shlex.join(overrides.words(given))]).strip()
        to_paste = (
            f"{again} | sudo tee {to} >/dev/null",
            f"sudo systemctl daemon-reload && sudo systemctl enable --now {name}",
        )
        return Service(
            target=target.name, name=name, path=None, text=said, cards=cards, notes=tuple(notes), commands=to_paste
        )  # fmt: skip
    path = units.user_folder() / name
    _write(path, said, target.name)
    active = _active(name)
    again = f"systemctl --user reset-failed {name} && " if active == "failed" else ""
    commands = [f"systemctl --user daemon-reload && {again}systemctl --user enable --now {name}"]
    if short := _memlock_note(planned):
        notes.append(short)
        commands.insert(0, _raise_memlock())
    if linger := _linger_command():
        notes.append("without lingering the service ends with your last login, and does not start at boot")
        commands.insert(0, linger)
    if any(r.slug == target.name for r in state.running()):
        notes.append("it runs already, started by `switch`: both want the same port and memory")
        commands.insert(0, f"launcher stop {shlex.quote(target.name)}")
    return Service(
        target=target.name, name=name, path=str(path), text=said, cards=cards, state=active, notes=tuple(notes),
        commands=tuple(commands),
    )  # fmt: skip


def uninstall(text: str) -> Service:
    """Remove the user's unit of a target.

    Raises UsageError (no-service), Refused (service-running, unit-unwritable).
    """
    found = _one(text)
    assert found.path is not None  # those that are installed have one
    path = Path(found.path)
    if found.state in ("active", "activating", "reloading", "deactivating"):
        raise Refused(
            "service-running",
            f"{found.name} is {found.state}",
            fix=f"systemctl --user disable --now {found.name} && launcher service uninstall {shlex.quote(text)}",
        )
    try:
        path.unlink()
        for wants in path.parent.glob("*.wants"):
            if (wants / found.name).is_symlink():
                (wants / found.name).unlink()  # what `enable` made; it points nowhere now
    except OSError as error:
        raise _unwritable(path, error) from error
    commands = ("systemctl --user daemon-reload",) if found.state is not None else ()
    if found.state == "failed":  # systemd would keep it in its list
        commands = (f"systemctl --user daemon-reload && systemctl --user reset-failed {found.name}",)
    return replace(found, state=None, notes=(), commands=commands)


def show(text: str | None) -> tuple[Service, ...]:
    """The user's units, or that of one target. Raises UsageError (no-service)."""
    return _installed() if text is None else (_one(text),)


def wait_for_cards(
    uuids: Sequence[str],
    timeout_s: float,
    *,
    say: Callable[[str], None] = lambda _text: None,
    poll_s: float = _POLL_S,
) -> float:
    """Wait until the driver shows every one of these cards; returns the seconds that it took.

    Raises DeviceUnusable (cards-missing) after timeout_s, naming those that did not come.
    """
    begun = time.monotonic()
    said_at = float("-inf")
    while True:
        here = {card.uuid for card in device_facts.nvml_cards()}
        missing = [uuid for uuid in uuids if uuid not in here]
        waited = time.monotonic() - begun
        if not missing:
            return waited
        if waited >= timeout_s:
            raise DeviceUnusable(
                "cards-missing",
                f"{len(missing)} of {len(uuids)} planned cards did not come in {waited:.0f} s: {', '.join(missing)}",
                context=f"the driver shows: {', '.join(sorted(u for u in here if u)) or 'no card'}",
                fix="nvidia-smi -L     # then plan anew for the cards that are here: launcher service install TARGET",
            )
        if time.monotonic() - said_at >= _SAY_EVERY_S:
            said_at = time.monotonic()
            say(f"waiting for {', '.join(missing)}")
        time.sleep(min(poll_s, max(0.01, timeout_s - waited)))


def _unit(
    target: str, planned: Planned, given: Mapping[str, Any], *, engine: str | None, force: bool, system: bool
) -> units.Unit:
    launcher = (sys.executable, "-m", "launcher")
    cards = _cards(planned)
    words = ["--cards", ",".join(cards)] if cards else []
    words += ["--force"] if force else []
    words += ["--engine", overrides.absolute(engine)] if engine else []
    return units.Unit(
        target=target,
        description=f"llama.cpp server {target} on port {planned.launch.port}",
        run=(*launcher, "run", target, *words, *overrides.words(overrides.from_anywhere(given))),
        wait=(*launcher, "service", "wait", *cards) if cards else (),
        env=_environment(planned),
        system=system,
        user=getpass.getuser() if system else "",
    )


def _cards(planned: Planned) -> tuple[str, ...]:
    return tuple(dict.fromkeys(d.device.uuid for d in planned.plan.devices if d.device.uuid))


def _environment(planned: Planned) -> dict[str, str]:
    env = {key: os.environ[key] for key in _ENV if os.environ.get(key)}
    env |= {key: os.environ[key] for key in _ENV_CARDS if key in os.environ}
    env |= {key: value for key, value in os.environ.items() if key.startswith("OT_G") and value}
    if os.environ.get("MODEL_DIR"):
        env["MODEL_DIR"] = os.pathsep.join(map(str, paths.model_dirs()))
    for key in _ENV_LISTS:
        if os.environ.get(key):
            env[key] = os.pathsep.join(str(Path(p).absolute()) for p in os.environ[key].split(os.pathsep) if p)
    engine = planned.inventory.engine
    if engine is not None and engine.found_by == "PATH":
        env["PATH"] = os.environ.get("PATH", "")
    return env


def _write(path: Path, said: str, target: str) -> None:
    """Replace our own unit, never another's."""
    try:
        there = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
        if there is not None and units.target_of(there) != target:
            raise Refused(
                "unit-not-ours",
                f"{path} is there already and was not written for {target}",
                fix=f"mv {shlex.quote(str(path))} {shlex.quote(str(path))}.kept",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f".{path.name}.{os.getpid()}")
        half.write_text(said, encoding="utf-8")
        half.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> Refused:
    return Refused(
        "unit-unwritable",
        f"cannot write {path}: {error.strerror or error}",
        fix="--system     # which only prints the unit",
    )


def _installed() -> tuple[Service, ...]:
    found = []
    for path in sorted(units.user_folder().glob(f"{units.PREFIX}*.service")):
        try:
            said = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        target = units.target_of(said)
        if target is not None:
            found.append(_shown(path, said, target))
    return tuple(found)


def _shown(path: Path, said: str, target: str) -> Service:
    notes, commands = [], []
    if linger := _linger_command():
        notes.append("without lingering it ends with your last login")
        commands.append(linger)
    active = _active(path.name)
    if active == "failed":
        notes.append(
            f"it failed and is not started again; systemd refuses more than {units.BURST} starts in {units.INTERVAL}, "
            f"those by hand too, until reset-failed. How it ended: journalctl --user -u {path.name}"
        )
        commands.append(f"systemctl --user reset-failed {path.name} && systemctl --user start {path.name}")
    return Service(
        target=target, name=path.name, path=str(path), text=said, cards=_cards_of(said), state=active,
        notes=tuple(notes), commands=tuple(commands),
    )  # fmt: skip


def _one(text: str) -> Service:
    """The unit of a target, by its name or a unique ending: the slug itself may be gone."""
    all_of_them = _installed()
    name = str(Path(text).absolute()) if text.endswith(".gguf") else text
    exact = [s for s in all_of_them if s.target == name]
    found = exact or [s for s in all_of_them if s.target.endswith(text) and s.target[-len(text) - 1 :][:1] in "/-_."]
    if len(found) == 1:
        return found[0]
    known = " | ".join(s.target for s in (found or all_of_them)) or "none"
    raise UsageError(
        "no-service",
        f"{len(found) or 'no'} services are called {text!r}",
        context=f"installed in {units.user_folder()}: {known}",
        fix="launcher service show",
    )


def _cards_of(said: str) -> tuple[str, ...]:
    """The cards that a unit's run line names."""
    for value in units.read(said).get("Service", {}).get("ExecStart", []):
        words = units.words_of(value)
        if "--cards" in words[:-1]:
            return tuple(words[words.index("--cards") + 1].split(","))
    return ()


def _active(name: str) -> str | None:
    """What systemd says of a user's unit, None where none answers."""
    return _systemctl("--user", "is-active", name)


def _systemctl(*words: str) -> str | None:
    """What systemctl prints, whatever its exit code; None where it is not there or says nothing."""
    program = shutil.which("systemctl")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *words], capture_output=True, text=True, timeout=10, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _memlock_note(planned: Planned) -> str:
    """What keeps a user's unit from locking what the plan locks, empty when nothing does.

    systemd.exec(5): a user's unit may raise no limit past the hard one of the user manager, whatever it says itself.
    """
    needed = gates_machine.locked_bytes(planned.plan)
    if needed is None:
        return ""
    said = _systemctl("show", "--property=LimitMEMLOCK", "--value", f"user@{os.getuid()}.service")
    limit = int(said) if said and said.isdecimal() else None
    if said == "infinity" or (limit is not None and limit >= needed):
        return ""
    may = "is not known" if limit is None else f"is {human(limit)}"
    return (
        f"load mode {planned.plan.settings.load_mode} locks {mib(needed)} MiB; what your user manager may lock {may}, "
        "and LimitMEMLOCK= of a user's unit goes no further: it would not start. The restart in the next line ends "
        "every service of yours, a reboot does as well; a --system unit needs neither"
    )


def _raise_memlock() -> str:
    folder = "/etc/systemd/system/user@.service.d"
    return (
        f"sudo mkdir -p {folder} && printf '[Service]\\nLimitMEMLOCK=infinity\\n' | sudo tee {folder}/memlock.conf "
        f">/dev/null && sudo systemctl daemon-reload && sudo systemctl restart user@{os.getuid()}.service"
    )


def _linger_command() -> str | None:
    """What makes a user's services outlive the login, None when they do (logind keeps a file for each such user)."""
    user = getpass.getuser()
    return None if (_LINGER / user).exists() else f"sudo loginctl enable-linger {shlex.quote(user)}"
