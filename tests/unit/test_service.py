"""The systemd unit: its text by systemd's own reader, its run line as a real process, and what it refuses."""

from __future__ import annotations

import configparser
import getpass
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import DeviceUnusable, Refused, UsageError
from launcher.facts import surroundings
from launcher.serve import service as units
from launcher.workflows import preflight, run, service
from tests.serve_builders import card, plan
from tests.unit.test_cli import child, engine, model, ports, slug
from tests.unit.test_devices import h200
from tests.unit.test_learned import Machine

__all__ = ["engine", "model", "ports"]  # fixtures
CARD = str(h200()["uuid"])
UNIT = units.Unit(
    target="demo/smol-moe",
    description="llama.cpp server demo/smol-moe on port 8030",
    run=("/usr/bin/env", "launcher", "run", "demo/smol-moe", "--cards", CARD),
    wait=("/usr/bin/env", "launcher", "service", "wait", CARD),
    env={"MODEL_DIR": "/mnt/my models:/srv/100%", "SPEC_N": "0"},
)


@pytest.fixture(autouse=True)
def _homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units and models of a test lie in its own folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("MODEL_DIR", str(tmp_path.parent))


# --------------------------------------------------------------------------------------------- text


def test_the_unit_says_what_a_day_long_service_needs() -> None:
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(units.text(replace(UNIT, env={"SPEC_N": "0"})))
    assert set(parser.sections()) == {"Unit", "Service", "Install"}
    assert dict(parser["Unit"]) == {
        "Description": "llama.cpp server demo/smol-moe on port 8030",
        "StartLimitIntervalSec": "2h",
        "StartLimitBurst": "3",
    }
    assert dict(parser["Install"]) == {"WantedBy": "default.target"}
    said = dict(parser["Service"])
    assert (said["Type"], said["TimeoutStartSec"], said["LimitMEMLOCK"]) == ("exec", "infinity", "infinity")
    assert (said["Restart"], said["RestartSec"], said["KillMode"]) == ("on-failure", "30", "mixed")
    assert said["RestartPreventExitStatus"].split() == ["2", "3", "4", "5", "6", "7", "SIGKILL"]
    assert units.words_of(said["ExecStartPre"]) == UNIT.wait
    assert units.words_of(said["ExecStart"]) == UNIT.run


def test_a_system_wide_unit_runs_as_the_user_after_the_driver() -> None:
    said = units.read(units.text(replace(UNIT, system=True, user="me")))
    assert said["Service"]["User"] == ["me"]
    assert said["Install"]["WantedBy"] == ["multi-user.target"]
    assert "nvidia-persistenced.service" in said["Unit"]["After"][0]


def verify(path: Path) -> str:
    """What systemd itself says of a unit file; empty when it takes every line."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze here")
    done = subprocess.run([program, "verify", str(path)], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("system", [False, True])
def test_systemd_takes_every_line(tmp_path: Path, system: bool) -> None:
    path = tmp_path / "llama-launcher-x.service"
    user = getpass.getuser() if system else ""
    path.write_text(units.text(replace(UNIT, system=system, user=user, run=("/usr/bin/env", 'a "b" \\ c', "%h", "$X"))))
    assert verify(path) == ""
    path.write_text(path.read_text().replace("KillMode=mixed", "KillMode=mixt\nTimeoutStartSecs=1"))
    assert "mixt" in verify(path)
    assert "TimeoutStartSecs" in verify(path)


WORDS = st.text(st.characters(min_codepoint=32, exclude_characters="\x7f"), min_size=1, max_size=20)


@given(st.lists(WORDS, min_size=1, max_size=6))
def test_every_word_comes_back(words: list[str]) -> None:
    assert units.words_of(units.line(words)) == tuple(words)
    assert units.words_of(units.quote(words[0], command=False), command=False) == (words[0],)


def test_specifiers_and_variables_are_no_surprise() -> None:
    assert units.line(("100%", "$HOME", "a b", "")) == '100%% $$HOME "a b" ""'
    assert units.quote("X=$HOME/100%", command=False) == "X=$HOME/100%%"


def test_a_line_break_cannot_be_said() -> None:
    with pytest.raises(ValueError, match="control character"):
        units.text(replace(UNIT, run=("/bin/x", "a\nExecStartPost=/bin/evil")))


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("demo/smol-moe", "llama-launcher-demo-smol-moe.service"),
        ("/m/Qwen3 30B@q4.gguf", "llama-launcher-m-Qwen3-30B-q4.service"),
        ("///", "llama-launcher-server.service"),
    ],
)
def test_unit_names(target: str, name: str) -> None:
    assert units.unit_name(target) == name


# -------------------------------------------------------------------------------- install, show, remove


@pytest.mark.usefixtures("engine")
def test_its_run_line_serves_with_nothing_but_the_units_environment(
    launcher_home: Path, model: Path, ports: Callable[[], int], tmp_path: Path
) -> None:
    port = ports()
    slug(launcher_home, "my/one", model, port=port)
    done = child("service", "install", "one", "--ctx", "2k")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "xdg" / "systemd" / "user" / "llama-launcher-my-one.service"
    assert f"written  {path}" in done.stdout
    assert (
        "systemctl --user daemon-reload && systemctl --user enable --now llama-launcher-my-one.service" in done.stdout
    )
    assert "the plan uses no card" in done.stdout
    assert verify(path) == ""
    said = units.read(path.read_text())["Service"]
    env = dict(w.split("=", 1) for v in said["Environment"] for w in units.words_of(v, command=False))
    assert "PATH" not in env
    (line,) = said["ExecStart"]
    words = units.words_of(line)
    # as systemd starts it: a bare environment, the root folder, no terminal
    bare = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", **env}
    with subprocess.Popen(words, env=bare, cwd="/", stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as server:
        try:
            deadline = time.monotonic() + 30
            while True:
                assert server.poll() is None, server.communicate()[1]
                assert time.monotonic() < deadline
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                        break
                except httpx.HTTPError:
                    time.sleep(0.05)
            command = Path(f"/proc/{server.pid}/cmdline").read_text().split("\0")
            assert command[command.index("-c") + 1] == "2048"
        finally:
            server.terminate()
            server.communicate(timeout=20)


@pytest.mark.usefixtures("engine")
def test_a_planned_card_is_waited_for_and_held_to(
    launcher_home: Path, model: Path, ports: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    slug(launcher_home, "my/one", model, port=ports())
    monkeypatch.setattr(service, "_cards", lambda _planned: (CARD,))
    found = service.install("one", {"drafter": "off"}, engine=None, force=True, system=False)
    said = units.read(found.text)["Service"]
    launcher_words = (sys.executable, "-m", "launcher")
    assert units.words_of(said["ExecStartPre"][0]) == (*launcher_words, "service", "wait", CARD)
    run_words = units.words_of(said["ExecStart"][0])
    assert run_words == (*launcher_words, "run", "my/one", "--cards", CARD, "--force", "--drafter", "off")
    (shown,) = service.show(None)
    assert (shown.target, shown.cards) == ("my/one", (CARD,))
    refused = child(*run_words[3:], stdin=subprocess.DEVNULL)
    assert refused.returncode == 7, "no silent start on the CPU"
    why = " ".join(refused.stderr.split())
    assert f"error[cards-missing]: the plan is not on 1 of the 1 cards that were named: {CARD} it is on: the CPU" in why
    waited = child("service", "wait", CARD, "--timeout", "0.1")
    assert waited.returncode == 5
    assert waited.stderr.splitlines()[0] == f"waiting for {CARD}"


@pytest.mark.usefixtures("engine")
def test_a_system_wide_unit_is_printed_and_written_nowhere(
    launcher_home: Path, model: Path, ports: Callable[[], int], tmp_path: Path
) -> None:
    slug(launcher_home, "my/one", model, port=ports())
    done = child("service", "install", "one", "--system", "--ctx", "2k")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "xdg").exists()
    path = tmp_path / "llama-launcher-my-one.service"
    path.write_text(done.stdout)
    assert verify(path) == ""
    assert (
        "next     launcher service install --system one --ctx 2k "
        "| sudo tee /etc/systemd/system/llama-launcher-my-one.service >/dev/null" in done.stderr
    )


@pytest.mark.usefixtures("engine")
def test_what_does_not_fit_is_not_installed(
    launcher_home: Path, model: Path, ports: Callable[[], int], tmp_path: Path
) -> None:
    slug(launcher_home, "my/one", model, port=ports(), more="devices: {min: 3}\n")
    done = child("service", "install", "one")
    assert done.returncode == 7
    assert done.stderr.startswith("error[devices-too-few]")
    assert not (tmp_path / "xdg").exists()


def test_show_and_uninstall_need_no_slug_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "xdg" / "systemd" / "user"
    wants = folder / "default.target.wants"
    wants.mkdir(parents=True)
    path = folder / units.unit_name("demo/gone")
    path.write_text(units.text(replace(UNIT, target="demo/gone")))
    (wants / path.name).symlink_to(path)
    foreign = folder / f"{units.PREFIX}theirs.service"
    foreign.write_text("[Service]\nExecStart=/bin/true\n")
    doc = json.loads(child("service", "show", "--json").stdout)
    assert [s["target"] for s in doc["services"]] == ["demo/gone"]
    assert doc["services"][0]["cards"] == [CARD]
    assert "StartLimitBurst=3" in child("service", "show", "gone").stdout
    monkeypatch.setattr(service, "_active", lambda _name: "active")
    with pytest.raises(Refused) as refused:
        service.uninstall("gone")
    assert refused.value.reference == "service-running"
    assert refused.value.fix == f"systemctl --user disable --now {path.name} && launcher service uninstall gone"
    assert path.exists()
    monkeypatch.setattr(service, "_active", lambda _name: "inactive")
    assert service.uninstall("gone").commands == ("systemctl --user daemon-reload",)
    assert not path.exists()
    assert not (wants / path.name).is_symlink()
    assert foreign.exists()
    with pytest.raises(UsageError) as unknown:
        service.uninstall("gone")
    assert unknown.value.reference == "no-service"


@pytest.mark.usefixtures("engine")
def test_a_file_of_somebody_else_is_left_alone(
    launcher_home: Path, model: Path, ports: Callable[[], int], tmp_path: Path
) -> None:
    slug(launcher_home, "my/one", model, port=ports())
    path = tmp_path / "xdg" / "systemd" / "user" / "llama-launcher-my-one.service"
    path.parent.mkdir(parents=True)
    path.write_text("[Service]\nExecStart=/bin/true\n")
    done = child("service", "install", "one")
    assert (done.returncode, done.stderr.split("]")[0]) == (7, "error[unit-not-ours")
    assert path.read_text() == "[Service]\nExecStart=/bin/true\n"
    path.unlink()
    assert child("service", "install", "one").returncode == 0
    assert child("service", "install", "one", "--ctx", "1k").returncode == 0, "our own is written anew"
    assert "--ctx 1k" in path.read_text()


def test_the_linger_line_is_shown_until_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_LINGER", tmp_path)
    assert service._linger_command() == f"sudo loginctl enable-linger {getpass.getuser()}"
    (tmp_path / getpass.getuser()).touch()
    assert service._linger_command() is None


def test_no_secret_and_no_relative_path_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("LLAMA_API_KEY", "secret")
    monkeypatch.setenv("MODEL_DIR", "here:/there")
    monkeypatch.setenv("PYTHONPATH", ".")
    monkeypatch.setenv("OT_G0", "1,2")

    class Planned:
        class inventory:  # noqa: N801
            engine: Any = None

    env = service._environment(Planned())  # type: ignore[arg-type]
    assert not {"HF_TOKEN", "LLAMA_API_KEY"} & env.keys()
    assert env["MODEL_DIR"] == f"{tmp_path}/here:/there"
    assert (env["PYTHONPATH"], env["OT_G0"]) == (str(tmp_path), "1,2")


@pytest.mark.usefixtures("engine")
def test_the_service_sees_the_cards_that_the_shell_saw(
    launcher_home: Path, model: Path, ports: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    slug(launcher_home, "my/one", model, port=ports())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # no card at all; unset would be every card
    monkeypatch.setenv("GGML_CUDA_DEVICES", "2")
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    done = child("service", "install", "--system", "one")
    assert done.returncode == 0, done.stderr
    said = units.read(done.stdout)["Service"]["Environment"]
    env = dict(w.split("=", 1) for v in said for w in units.words_of(v, command=False))
    assert (env["CUDA_VISIBLE_DEVICES"], env["GGML_CUDA_DEVICES"]) == ("", "2")
    assert "HIP_VISIBLE_DEVICES" not in env


def test_a_plan_on_a_card_that_was_not_named_is_refused() -> None:
    both = plan(card("CUDA0"), card("CUDA1"))
    run._refuse_other_cards("GPU-00000000,GPU-11111111", both, "my/one")
    run._refuse_other_cards(None, both, "my/one")
    with pytest.raises(Refused) as refused:
        run._refuse_other_cards("GPU-11111111", both, "my/one")
    assert refused.value.reference == "cards-others"
    assert refused.value.message == "the plan is on 1 of 2 cards that were not named: GPU-00000000"
    assert refused.value.fix.startswith("--devices GPU-11111111 ")


# ------------------------------------------------------------------------------------------- systemd


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """A systemctl that says what a unit's state is, and what the user manager may lock."""

    def say(state: str, memlock: str) -> None:
        path = tmp_path / "bin" / "systemctl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f'#!/bin/sh\ncase "$*" in\n"--user is-active "*) echo {state}; exit 3;;\n'
            f'"show --property=LimitMEMLOCK --value user@{os.getuid()}.service") echo {memlock};;\nesac\n'
        )
        path.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return say


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("memlock", "says"), [("65536", "may lock is 64.0 KiB"), ("", "may lock is not known"), ("infinity", None)]
)
def test_what_a_user_unit_may_lock_is_the_user_managers_not_this_shells(
    launcher_home: Path, model: Path, ports: Callable[[], int], monkeypatch: pytest.MonkeyPatch,
    systemctl: Callable[[str, str], None], memlock: str, says: str | None, tmp_path: Path,
) -> None:  # fmt: skip
    slug(launcher_home, "my/one", model, port=ports())
    monkeypatch.setattr(surroundings, "memlock_limits", lambda _root: (65536, 65536))
    systemctl("inactive", memlock)
    asked = {"load_mode": "mlock", "devices": "none"}
    found = service.install("one", asked, engine=None, force=False, system=False)
    raises = [c for c in found.commands if "LimitMEMLOCK" in c]
    assert [says in note for note in found.notes if "mlock" in note] == ([True] if says else [])
    assert len(raises) == (says is not None)
    if says:
        # pasted into a shell, the line writes what systemd reads
        said = raises[0].replace("/etc/systemd/system", str(tmp_path / "etc")).partition(" && sudo systemctl")[0]
        subprocess.run(["sh", "-c", said.replace("sudo ", "")], check=True)
        dropped = tmp_path / "etc" / "user@.service.d" / "memlock.conf"
        assert units.read(dropped.read_text()) == {"Service": {"LimitMEMLOCK": ["infinity"]}}
        assert found.commands.index(raises[0]) < len(found.commands) - 1, "before it is enabled"
    wide = service.install("one", asked, engine=None, force=False, system=True)
    assert not [note for note in wide.notes if "mlock" in note], "root's manager has no limit"
    assert not service.install("one", {"devices": "none"}, engine=None, force=False, system=False).commands[:-2]
    # what runs here has this shell's limit, and so would `run` in a unit that was held to it
    refused = preflight.run("one", asked)
    assert "memlock-short" in [g.name for g in refused.gates if not g.ok]


@pytest.mark.usefixtures("engine")
def test_one_that_systemd_starts_no_more_says_how_it_is_started_again(
    launcher_home: Path, model: Path, ports: Callable[[], int], systemctl: Callable[[str, str], None]
) -> None:
    slug(launcher_home, "my/one", model, port=ports())
    name = "llama-launcher-my-one.service"
    systemctl("inactive", "infinity")
    assert "reset-failed" not in " ".join(service.install("one", {}, engine=None, force=False, system=False).commands)
    assert f"# starts by hand count too; once it is refused: systemctl --user reset-failed {name}" in (
        service.show("one")[0].text
    )
    assert "reset-failed" not in " ".join(service.show("one")[0].commands)
    systemctl("failed", "infinity")
    shown = child("service", "show", "one").stdout
    assert f"next     systemctl --user reset-failed {name} && systemctl --user start {name}" in shown
    assert "more than 3 starts in 2h" in shown
    again = service.install("one", {}, engine=None, force=False, system=False)
    assert again.commands[-1] == (
        f"systemctl --user daemon-reload && systemctl --user reset-failed {name} && "
        f"systemctl --user enable --now {name}"
    )
    assert service.uninstall("one").commands == (
        f"systemctl --user daemon-reload && systemctl --user reset-failed {name}",
    )


# --------------------------------------------------------------------------------------------- cards


def test_a_card_that_is_there_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Machine(h200()))
    assert service.wait_for_cards([CARD], 5.0) < 1


def test_a_card_that_comes_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(h200(uuid="GPU-another"))
    monkeypatch.setitem(sys.modules, "pynvml", machine)
    said: list[str] = []
    threading.Timer(0.3, monkeypatch.setitem, [sys.modules, "pynvml", Machine(h200())]).start()
    assert 0.2 < service.wait_for_cards([CARD], 10.0, say=said.append, poll_s=0.05) < 5
    assert said == [f"waiting for {CARD}"]


def test_a_card_that_never_comes_is_named_with_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Machine(h200()))
    with pytest.raises(DeviceUnusable) as refused:
        service.wait_for_cards([CARD, "GPU-lost"], 0.2, poll_s=0.05)
    assert refused.value.reference == "cards-missing"
    assert refused.value.message.startswith("1 of 2 planned cards did not come in 0 s: GPU-lost")
    assert refused.value.context == f"the driver shows: {CARD}"


def test_own_environment_is_not_needed() -> None:
    assert units.user_folder() == Path(os.environ["XDG_CONFIG_HOME"]) / "systemd" / "user"
