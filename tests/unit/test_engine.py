"""engine.py with scripts in the place of binaries: the search order, refusals, abilities and their cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.errors import DeviceUnusable
from launcher.facts import engine

CAPTURED = Path(__file__).parents[1] / "captured"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No engine of this machine is in reach."""
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(engine, "_BUILD_FOLDERS", ("~/llama.cpp/build/bin",))


def binary(path: Path, body: str = "") -> Path:
    """A script that answers --help and --version as llama-server does and counts how often it was run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"""#!/bin/sh
echo "$1" >> "{path}.calls"
{body}
case "$1" in
  --help) cat "{CAPTURED / "help_b11434.txt"}" ;;
  --version) cat "{CAPTURED / "version_b11434.txt"}" >&2 ;;
esac
"""
    )
    path.chmod(0o755)
    return path


def calls(path: Path) -> int:
    log = Path(f"{path}.calls")
    return len(log.read_text().split()) if log.exists() else 0


def test_abilities_from_help() -> None:
    flags, spec_types = engine.parse_help((CAPTURED / "help_b11434.txt").read_text())
    assert {"-ngl", "--gpu-layers", "--n-gpu-layers", "--log-jsonl", "--no-log-jsonl", "-lv", "--fit", "-ot"} <= flags
    assert {"-h", "--help", "--usage", "-lm", "--load-mode", "--rpc", "-t", "--spec-type"} <= flags
    assert {"draft-dspark", "draft-mtp", "ngram-cache", "none"} <= spec_types and len(spec_types) == 11
    assert flags.isdisjoint({"--draft", "--draft-max", "--draft-n", "--spec-ngram-size-n", "--no-mmap", "-----"})


def test_abilities_of_an_older_spelling() -> None:
    text = (
        "usage: llama-server\n-m,    --model FNAME   model\n--spec-type [none|draft-simple]   kind\n--no-mmap   slow\n"
    )
    assert engine.parse_help(text) == ({"-m", "--model", "--spec-type", "--no-mmap"}, {"none", "draft-simple"})


def test_version_lines() -> None:
    assert engine.parse_version((CAPTURED / "version_b11434.txt").read_text()) == "0.6.0-dev (build 0, commit unknown)"
    assert engine.parse_version("ggml_cuda_init: found 1\nversion: 6123 (abcdef0)\nbuilt with cc\n") == "6123 (abcdef0)"
    assert engine.parse_version("hello") == ""


def test_probe_asks_once_and_again_after_a_change(tmp_path: Path) -> None:
    server = binary(tmp_path / "llama-server")
    first = engine.probe(str(server), "PATH")
    assert calls(server) == 2
    assert first.version == "0.6.0-dev (build 0, commit unknown)"
    assert first.can("flag:--log-jsonl") and first.can("spec-type:draft-dspark")
    assert not first.can("flag:--draft-max") and not first.can("spec-type:draft-x") and first.rpc_server is None
    assert engine.probe(str(server), "--engine").digest == first.digest
    assert calls(server) == 2
    binary(server, "# rebuilt")
    assert engine.probe(str(server), "PATH").digest != first.digest
    assert calls(server) == 4


def test_a_rebuilt_library_is_another_engine(tmp_path: Path) -> None:
    server = binary(tmp_path / "llama-server")
    binary(tmp_path / "ggml-rpc-server")
    library = tmp_path / "libggml-base.so.0.26.0"
    library.write_bytes(b"one")
    (tmp_path / "libggml-base.so").symlink_to(library.name)
    first = engine.probe(str(server), "PATH")
    assert first.rpc_server == str(tmp_path / "ggml-rpc-server")
    library.write_bytes(b"twice")
    assert engine.probe(str(server), "PATH").digest != first.digest


def test_a_damaged_or_read_only_cache_is_no_obstacle(tmp_path: Path, launcher_home: Path) -> None:
    server = binary(tmp_path / "llama-server")
    first = engine.probe(str(server), "PATH")
    for file in (launcher_home / "cache" / "engines").iterdir():
        file.write_text('{"schema": 1}' if file.name != "digests.json" else "[]")
    assert engine.probe(str(server), "PATH") == first


def test_order_of_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher_home: Path) -> None:
    built = binary(launcher_home / "cache/engine-builds/new/bin/llama-server")
    old = binary(launcher_home / "cache/engine-builds/old/bin/llama-server")
    os.utime(old, (1, 1))
    assert (engine.find_engine().path, engine.find_engine().found_by) == (str(built), "engine install")

    folder = binary(tmp_path / "nobody/llama.cpp/build/bin/llama-server")
    assert (engine.find_engine().path, engine.find_engine().found_by) == (str(folder), "build folder")

    on_path = binary(tmp_path / "path/llama-server")
    monkeypatch.setenv("PATH", f"{on_path.parent}:/usr/bin:/bin")
    assert engine.find_engine().found_by == "PATH"

    chosen = binary(tmp_path / "chosen/llama-server")
    (launcher_home / "config").mkdir()
    (launcher_home / "config/engine").write_text(f"{chosen}\n")
    assert (engine.find_engine().path, engine.find_engine().found_by) == (str(chosen), "engine use")

    monkeypatch.setenv("LLAMA_SERVER", str(binary(tmp_path / "env/llama-server")))
    assert engine.find_engine().found_by == "LLAMA_SERVER"
    slug = binary(tmp_path / "slug/llama-server")
    assert engine.find_engine(slug_path=str(slug)).found_by == "slug"
    explicit = binary(tmp_path / "explicit/llama-server")
    assert engine.find_engine(str(explicit.parent), str(slug)).path == str(explicit)  # a folder will do


def test_a_broken_one_on_the_path_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher_home: Path
) -> None:
    broken = binary(tmp_path / "path/llama-server", "kill -ILL $$")
    monkeypatch.setenv("PATH", f"{broken.parent}:/usr/bin:/bin")
    with pytest.raises(DeviceUnusable) as caught:
        engine.find_engine()
    assert caught.value.reference == "engine-missing"
    assert "CPU features that this machine lacks" in caught.value.context
    built = binary(launcher_home / "cache/engine-builds/key/bin/llama-server")
    assert engine.find_engine().path == str(built)


def test_none_at_all_names_the_places_and_the_fix() -> None:
    with pytest.raises(DeviceUnusable) as caught:
        engine.find_engine()
    error = caught.value
    assert (error.reference, error.exit_code) == ("engine-missing", 5)
    assert "nobody/llama.cpp/build/bin" in error.context
    assert error.fix.startswith("launcher engine install")


def test_a_named_one_must_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary(tmp_path / "path/llama-server")
    monkeypatch.setenv("PATH", f"{tmp_path}/path:/usr/bin:/bin")
    plain = tmp_path / "plain"
    plain.write_text("text")
    (tmp_path / "empty").mkdir()
    for path, reference, text in (
        (tmp_path / "none", "engine-missing", "does not exist"),
        (plain, "engine-missing", "is not executable"),
        (tmp_path / "empty", "engine-missing", "is a folder without llama-server"),
        (binary(tmp_path / "ill", "kill -ILL $$"), "engine-broken", "CPU features that this machine lacks"),
        (binary(tmp_path / "segv", "kill -SEGV $$"), "engine-broken", "killed by SIGSEGV"),
        (binary(tmp_path / "lib", "echo 'libllama.so: cannot open' >&2; exit 127"), "engine-broken", "exit code 127"),
        (Path("/bin/echo"), "engine-not-llama-server", "knows no --model"),
    ):
        with pytest.raises(DeviceUnusable, match=text) as caught:
            engine.find_engine(str(path))
        assert (caught.value.reference, caught.value.exit_code) == (reference, 5)
        assert "--engine" in caught.value.context and caught.value.fix
    (tmp_path / "text").write_text("not a program")
    (tmp_path / "text").chmod(0o755)
    with pytest.raises(DeviceUnusable, match="does not run here"):
        engine.find_engine(str(tmp_path / "text"))


def test_what_the_engine_said_is_the_evidence(tmp_path: Path) -> None:
    broken = binary(tmp_path / "x", "echo 'x: error while loading shared libraries: libcudart.so.12' >&2; exit 127")
    with pytest.raises(DeviceUnusable) as caught:
        engine.find_engine(str(broken))
    assert "libcudart.so.12" in caught.value.context


def test_the_words_that_tell_why() -> None:
    said = 'usage:\nerror while handling argument "--draft-max": removed\n\nusage:\n--draft N  x\nto show more\n'
    assert engine.cause(said) == 'error while handling argument "--draft-max": removed\nusage:\n--draft N  x'
    assert engine.cause("a\n\nb\nc\nd\n") == "b\nc\nd"
    assert engine.cause("a\n") == "a" and engine.cause("\n") == ""


def test_the_child_hears_nobody_but_us(launcher_home: Path) -> None:
    env = {"LLAMA_ARG_NGL": "3", "GGML_CUDA_NO_PINNED": "1", "GGML_CUDA_DEVICES": "2", "HF_TOKEN": "x", "HOME": "/h"}
    clean = engine.clean_env(env)
    assert clean == {
        "GGML_CUDA_DEVICES": "2", "HOME": "/h", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "XDG_CONFIG_HOME": str(launcher_home / "cache/empty-config"),
    }  # fmt: skip
    assert list((launcher_home / "cache/empty-config").iterdir()) == []


def test_a_call_that_hangs_is_killed_unless_it_may_not_be(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    hang = ("/bin/sh", "-c", f"echo $$ > {pid}; exec sleep 1")
    called = engine.call(hang, os.environ, 0.3)
    assert (called.code, called.note) == (None, "no answer in 0.3 s")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    with pytest.warns(ResourceWarning):  # it is left alone on purpose
        called = engine.call(hang, os.environ, 0.3, kill=False)
    os.kill(int(pid.read_text()), 0)
    assert f"(pid {pid.read_text().strip()})" in called.note
    os.waitpid(int(pid.read_text()), 0)


def test_an_empty_variable_names_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher_home: Path) -> None:
    on_path = binary(tmp_path / "path/llama-server")
    monkeypatch.setenv("PATH", f"{on_path.parent}:/usr/bin:/bin")
    for empty in ("", "  "):
        monkeypatch.setenv("LLAMA_SERVER", empty)
        assert engine.find_engine("", empty).found_by == "PATH"
    (launcher_home / "config").mkdir()
    (launcher_home / "config/engine").write_bytes(b"# chosen\n\n   \n")
    assert engine.find_engine().found_by == "PATH"
    (launcher_home / "config/engine").write_bytes(b"\xff\xfe\n")
    with pytest.raises(DeviceUnusable, match="does not exist"):
        engine.find_engine()


def test_what_was_passed_over_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher_home: Path) -> None:
    """The next llama-server of the PATH is tried before any other place, and nobody is left to wonder which one ran."""
    broken, good = binary(tmp_path / "a/llama-server", "exit 1"), binary(tmp_path / "b/llama-server")
    binary(launcher_home / "cache/engine-builds/key/bin/llama-server")
    monkeypatch.setenv("PATH", f"{broken.parent}:{tmp_path}/none::{good.parent}:/usr/bin:/bin")
    notes: list[str] = []
    found = engine.find_engine(notes=notes)
    assert (found.path, found.found_by) == (str(good), "PATH")
    assert notes == [f"passed over an engine (PATH): {broken} does not run here: exit code 1"]


def test_a_wrapper_around_a_binary_for_another_cpu(tmp_path: Path) -> None:
    wrapper = binary(tmp_path / "llama-server", "sh -c 'kill -ILL $$'; exit $?")
    with pytest.raises(DeviceUnusable, match="CPU features that this machine lacks") as caught:
        engine.find_engine(str(wrapper))
    assert (caught.value.reference, caught.value.exit_code) == ("engine-broken", 5)
    assert caught.value.fix.startswith("launcher engine install")


@pytest.mark.parametrize("text", ["~nobody-of-that-name/llama-server", "no\0name", "x" * 5000])
def test_names_that_cannot_be(text: str) -> None:
    with pytest.raises(DeviceUnusable) as caught:
        engine.find_engine(text)
    assert caught.value.reference == "engine-missing"


def test_folders_that_are_not_ours_to_enter(tmp_path: Path) -> None:
    server = binary(tmp_path / "nobody/llama.cpp/build/bin/llama-server")
    closed = tmp_path / "nobody/llama.cpp"
    closed.chmod(0)
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(65534)
        with pytest.raises(DeviceUnusable) as searched:
            engine.find_engine()
        with pytest.raises(DeviceUnusable) as named:
            engine.find_engine(str(server))
    finally:
        if root:
            os.seteuid(0)
        closed.chmod(0o755)
    assert [e.value.reference for e in (searched, named)] == ["engine-missing", "engine-missing"]


def test_what_took_the_place_of_a_removed_flag() -> None:
    said = (CAPTURED / "help_b11434.txt").read_text()
    removed = engine.parse_removed(said)
    assert removed["--draft-max"] == removed["--draft"] == "use --spec-draft-n-max or --spec-ngram-mod-n-max"
    assert not removed.keys() & engine.parse_help(said)[0]
