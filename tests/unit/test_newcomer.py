"""The first minutes: an empty HOME, no engine, no model, a typo, a pipe, a strange terminal. Never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import launcher
from tests.builders import T, write_gguf

ROOT = Path(launcher.__file__).parent.parent
RIG = str(ROOT / "tests" / "golden" / "rigs" / "2x3090-64g.yaml")
FITS = ("plan", "small", "--rig", RIG, "--no-engine")
REFUSED = ("plan", "flash", "--rig", RIG, "--no-engine", "--residency", "none")

Launcher = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def newcomer(tmp_path: Path) -> Launcher:
    """The launcher with nothing but PATH, an empty HOME and what a test adds (`env=`, `tail=` of a shell)."""
    home = tmp_path / "newcomer"
    home.mkdir()

    def call(*argv: str, tail: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), "PYTHONPATH": str(ROOT), **(env or {})}
        line = ["bash", "-c", f'set -o pipefail; "$@" {tail}', "x", sys.executable, "-m", "launcher", *argv]
        return subprocess.run(
            line, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL
        )

    return call


@pytest.fixture
def models(tmp_path: Path, replica: Callable[[str], Path]) -> Path:
    """A folder of models that no slug names, one of them far too big for the rig."""
    folder = tmp_path / "models"
    folder.mkdir()
    keys = {
        "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 2048,
        "llama.embedding_length": 256, "llama.attention.head_count": 4,
    }  # fmt: skip
    names = ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_down.weight", "output.weight")
    write_gguf(folder / "small.gguf", keys, [T(name, (256, 256), 0) for name in names])
    (folder / "flash").mkdir()
    for shard in replica("deepseek-v4-flash-UD-IQ2_XXS").parent.glob("*.gguf"):
        (folder / "flash" / shard.name.replace("DeepSeek-V4-Flash-0731-UD-IQ2_XXS", "mine")).symlink_to(shard)
    return folder


def named(argv: tuple[str, ...], models: Path) -> list[str]:
    paths = {"small": str(models / "small.gguf"), "flash": str(models / "flash")}
    return [paths.get(word, word) for word in argv]


def wide(text: str) -> list[str]:
    """Lines over 100 columns that nobody has to copy in one piece."""
    whole = ("fix: ", "XDG_CONFIG_HOME=", "rule ")
    return [
        line
        for line in text.splitlines()
        if len(line) > 100 and not line.strip().startswith(whole) and max(map(len, line.split())) < 60
    ]


EMPTY = [
    (["list"], 0), (["list", "--all"], 0), (["status"], 0), (["status", "--check"], 8), (["history"], 0), (["stop"], 0),
    (["stop", "foo"], 2), (["logs"], 2), (["logs", "foo"], 2), (["engine", "list"], 0), (["engine", "probe"], 5),
    (["engine", "use", "/nowhere"], 5), (["engine", "use", "-"], 2), (["show", "dual-q8"], 0), (["show", "dual-q9"], 2),
    (["plan", "smolmoe"], 2), (["plan", ""], 2), (["plan", "demo/smol-moe"], 4), (["plan", "/nowhere/x.gguf"], 4),
    (["plan", "."], 4), (["plan", "a/b:Q4_K_M"], 4), (["plan", "https://huggingface.co/a/b"], 4),
    (["plan", "dual-q8", "--rig", "/nowhere"], 3), (["preflight", "demo/smol-moe"], 7), (["preflight", "nix"], 2),
    (["switch", "demo/smol-moe"], 7), (["switch", "nix"], 2), (["run", "demo/smol-moe"], 7), (["setup", "nix"], 2),
    (["setup", "demo/smol-moe"], 11), (["--version"], 0), (["--help"], 0), (["switch", "--help"], 0),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "code"), EMPTY, ids=lambda v: " ".join(v) if isinstance(v, list) else str(v))
def test_a_machine_with_nothing_on_it(newcomer: Launcher, argv: list[str], code: int) -> None:
    done = newcomer(*argv)
    assert done.returncode == code, done.stderr
    assert done.stdout or done.stderr
    assert "Traceback" not in done.stderr
    assert "error[bug]" not in done.stderr
    assert wide(done.stdout + done.stderr) == []
    if code and code != 2 or "error[" in done.stderr:
        lines = done.stderr.splitlines()
        assert any(line.startswith("error[") for line in lines)
        assert lines[-1].startswith("fix: ")


def test_short_helps_are_whole_sentences(newcomer: Launcher) -> None:
    assert "..." not in newcomer("--help").stdout.partition("Commands:")[2]
    assert "..." not in newcomer("engine", "--help").stdout.partition("Commands:")[2]


def test_list_says_where_it_looked_and_what_to_do(newcomer: Launcher) -> None:
    shown = newcomer("list").stdout
    assert "newcomer/models (MODEL_DIR)" in " ".join(shown.split())
    assert "launcher engine install" in " ".join(shown.split())
    assert "launcher setup SLUG" in shown.splitlines()[-1]


def test_list_shows_models_that_no_slug_names(newcomer: Launcher, models: Path) -> None:
    (models / "mmproj-small.gguf").write_bytes(b"GGUF")
    env = {"MODEL_DIR": str(models)}
    doc = json.loads(newcomer("list", "--json", env=env).stdout)
    files = {Path(f["path"]).name: f["file_bytes"] for f in doc["files"]}
    shards = sum(p.stat().st_size for p in (models / "flash").iterdir())
    assert files == {"small.gguf": (models / "small.gguf").stat().st_size, "mine-00001-of-00003.gguf": shards}
    assert str(models / "small.gguf") in newcomer("list", env=env).stdout


def test_a_file_that_is_not_there_names_those_beside_it(newcomer: Launcher, models: Path) -> None:
    done = newcomer("plan", str(models / "smal.gguf"), "--no-engine")
    assert done.returncode == 4
    assert f"{models} holds:\n  small.gguf\nfix: " in done.stderr
    assert "setup" not in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "reference"),
    [
        ("page.gguf", b"<!DOCTYPE html><html>", "html-page"),
        ("noise.gguf", bytes(range(256)) * 20, "not-gguf"),
        ("empty.gguf", b"", "model-empty"),
        ("cut.gguf", b"GGUF\x03\x00\x00\x00", "header-truncated"),
        ("pointer.gguf", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "lfs-pointer"),
    ],
)
def test_a_file_that_is_no_model(
    newcomer: Launcher, models: Path, tmp_path: Path, name: str, content: bytes, reference: str
) -> None:
    (tmp_path / name).write_bytes(content)
    for argv in (("plan", f"./{name}"), ("plan", str(models / "small.gguf"), "--drafter", f"./{name}")):
        done = newcomer(*argv, "--no-engine")
        assert (done.returncode, done.stderr.split("]")[0]) == (4, f"error[{reference}"), argv
        assert "TARGET" not in done.stderr.splitlines()[-1]


# -------------------------------------------------------------------------- pipes, streams, terminals


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("list",), 0), (("--help",), 0), (FITS, 0), ((*FITS, "--json"), 0), (REFUSED, 6), ((*REFUSED, "--json"), 6),
        (("preflight", "flash", "--rig", RIG, "--residency", "none"), 7),
    ],
    ids=lambda v: " ".join(v[:1] + v[-1:]) if isinstance(v, tuple) else str(v),
)  # fmt: skip
def test_a_reader_that_leaves_changes_no_exit_code(
    newcomer: Launcher, models: Path, argv: tuple[str, ...], code: int
) -> None:
    words = named(argv, models)
    plain, left = newcomer(*words), newcomer(*words, tail="| true")
    assert (plain.returncode, left.returncode) == (code, code), left.stderr
    assert left.stderr == plain.stderr


def test_closed_streams_are_no_bug(newcomer: Launcher, models: Path) -> None:
    for tail in (">&-", "2>&-", "<&-", "<&- >&- 2>&-"):
        assert newcomer(*named(FITS, models), tail=tail).returncode == 0, tail
        assert newcomer(*named(REFUSED, models), tail=tail).returncode == 6, tail


@pytest.mark.parametrize(
    "argv", [("list",), ("list", "--json"), FITS, (*FITS, "--json"), ("--version",), ("--help",)], ids=str
)
def test_a_full_disk_is_said(newcomer: Launcher, models: Path, argv: tuple[str, ...]) -> None:
    done = newcomer(*named(argv, models), tail="> /dev/full")
    assert done.returncode == 1
    assert done.stderr.startswith("error[output-failed]: the answer could not be written: No space left on device\n")
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    "env",
    [
        {"TERM": "dumb"}, {"COLUMNS": "40"}, {"COLUMNS": "300"}, {"LC_ALL": "C"}, {"LANG": "de_DE.UTF-8"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}, {"NO_COLOR": "1"}, {"FORCE_COLOR": ""},
    ],
    ids=str,
)  # fmt: skip
def test_the_same_answer_everywhere(newcomer: Launcher, models: Path, env: dict[str, str]) -> None:
    plain, here = newcomer(*named(REFUSED, models)), newcomer(*named(REFUSED, models), env=env)
    assert (here.stdout, here.stderr, here.returncode) == (plain.stdout, plain.stderr, plain.returncode)
    assert wide(here.stdout + here.stderr) == []
    assert "\x1b" not in here.stdout


def test_names_beyond_the_locale_are_shown_and_kept(newcomer: Launcher, models: Path) -> None:
    odd = models / "ü b" / "mödel [x].gguf"
    odd.parent.mkdir()
    os.link(models / "small.gguf", odd)
    for env in ({"LC_ALL": "C.UTF-8"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}):
        done = newcomer("plan", str(odd), "--no-engine", env=env)
        assert done.returncode == 0, done.stderr
    assert "mödel [x]: " in newcomer("plan", str(odd), "--no-engine", env={"LC_ALL": "C.UTF-8"}).stdout


def test_a_refusal_with_json_is_one_document_or_none(newcomer: Launcher, models: Path) -> None:
    checked = ("preflight", "flash", "--rig", RIG, "--residency", "none")
    for argv in (REFUSED, checked, ("plan", "nix"), ("switch", "nix"), ("show", "nix")):
        done = newcomer(*named(argv, models), "--json")
        assert done.returncode
        assert done.stderr.startswith("error[")
        if done.stdout:
            assert json.loads(done.stdout)["refusal"]["ways_out"]
