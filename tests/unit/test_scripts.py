from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import yaml
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from launcher.errors import DownloadFailed

ROOT = Path(__file__).parents[2]
SHELL = sorted([*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"])


@pytest.mark.parametrize("path", SHELL, ids=lambda p: p.name)
def test_shell_scripts_parse_and_stop_at_the_first_error(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    sourced = path.name == "venv.sh"
    assert os.access(path, os.X_OK) != sourced
    if not sourced:
        assert "\nset -euo pipefail\n" in path.read_text()


def fake_project(folder: Path) -> Path:
    """The scripts beside an environment that is up to date; its `launcher` prints what it was given."""
    (folder / "scripts").mkdir()
    for path in (ROOT / "scripts").glob("*.sh"):
        (folder / "scripts" / path.name).write_bytes(path.read_bytes())
        (folder / "scripts" / path.name).chmod(0o755)
    bin_dir = folder / ".venv" / "bin"
    bin_dir.mkdir(parents=True)
    (bin_dir / "python").symlink_to(sys.executable)
    (bin_dir / "launcher").write_text('#!/bin/sh\npwd\nfor a in "$@"; do echo "<$a>"; done\nexit 7\n')
    (bin_dir / "launcher").chmod(0o755)
    (folder / "pyproject.toml").write_text("[project]\n")
    (folder / ".venv" / ".installed").write_text("[project]\n")
    return folder


@pytest.mark.parametrize("name", ["setup", "switch"])
def test_doors_hand_over_arguments_folder_and_exit_code(tmp_path: Path, name: str) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "else where").mkdir()
    project = fake_project(tmp_path / "project")
    done = subprocess.run(
        [project / "scripts" / f"{name}.sh", "a b", "--yes"],
        cwd=tmp_path / "else where",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [str(tmp_path / "else where"), f"<{name}>", "<a b>", "<--yes>"]
    assert done.stderr == ""
    assert done.returncode == 7


def test_an_old_python_is_a_refusal_with_a_fix(tmp_path: Path) -> None:
    project = fake_project(tmp_path)
    (project / ".venv" / "bin" / "python").unlink()
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "cmp", "env"):
        (tmp_path / "bin" / tool).symlink_to(Path("/usr/bin") / tool)
    done = subprocess.run(
        ["/usr/bin/bash", project / "scripts" / "switch.sh"],
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5
    assert done.stderr.startswith("error[python-too-old]: ")
    assert "\nfix: " in done.stderr


def test_an_environment_that_was_copied_along_is_made_anew(tmp_path: Path) -> None:
    """Its programs begin with the old folder's Python, and the project in it is the old folder's."""
    (tmp_path / "old place").mkdir()
    project = fake_project(tmp_path / "old place")
    (project / ".venv" / ".place").write_text(f"{project}\n")
    moved = project.rename(tmp_path / "new place")
    uses = 'make_venv() { echo made anew; return 9; }; ensure_venv; echo "code $?"'
    done = subprocess.run(
        ["bash", "-c", f". scripts/venv.sh; {uses}"], cwd=moved, capture_output=True, text=True, check=True
    )
    assert done.stdout == "made anew\ncode 9\n"
    (moved / ".venv" / ".place").write_text(f"{moved}\n")
    done = subprocess.run(
        ["bash", "-c", f". scripts/venv.sh; {uses}"], cwd=moved, capture_output=True, text=True, check=True
    )
    assert done.stdout + done.stderr == "code 0\n"


def test_ci_says_which_packages_a_user_without_rights_has_to_install(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_bytes((ROOT / ".ci" / "run").read_bytes())
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "dirname").symlink_to("/usr/bin/dirname")
    for name, line in (("id", "echo 1000"), ("apt-get", "echo must not run"), ("python3", "exit 1")):
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)
    done = subprocess.run(
        ["/usr/bin/bash", tmp_path / ".ci" / "run"],
        env={"PATH": str(tools)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 5
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1] == "fix: sudo apt-get install g++ python3-venv"


def test_compose_is_safe_as_it_stands() -> None:
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["llama-server"]
    # the server listens where its command line says: nothing is published beside that
    assert service["network_mode"] == "host"
    assert "ports" not in service
    assert service["pull_policy"] == "never"
    assert service["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
    assert service["restart"] == "no"
    assert "command" not in service  # comes from the generated override, as a list


# ----------------------------------------------------------------------------------------- demo model

WIDTH, HIDDEN, LAYERS = 64, 96, 2


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_demo_model", ROOT / "scripts" / "make_demo_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dense_model(path: Path) -> dict[str, np.ndarray]:
    """A two-layer model with the small model's kinds of keys and tensors, random Q4_1 bytes."""
    random = np.random.default_rng(1)
    writer = GGUFWriter(path, "llama")
    writer.add_name("small")
    writer.add_block_count(LAYERS)
    writer.add_float32("llama.rope.freq_base", 10000.5)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_array("tokenizer.ggml.tokens", ["<a>", "ü", "c"])
    writer.add_array("tokenizer.ggml.token_type", [1, 2, 3])
    written: dict[str, np.ndarray] = {}

    def add(name: str, rows: int, columns: int) -> None:
        written[name] = random.integers(0, 256, (rows, columns // 32 * 20), dtype=np.uint8)
        writer.add_tensor(name, written[name], raw_dtype=GGMLQuantizationType.Q4_1)

    add("token_embd.weight", 3, WIDTH)
    for i in range(LAYERS):
        add(f"blk.{i}.attn_q.weight", WIDTH, WIDTH)
        add(f"blk.{i}.ffn_gate.weight", HIDDEN, WIDTH)
        add(f"blk.{i}.ffn_up.weight", HIDDEN, WIDTH)
        add(f"blk.{i}.ffn_down.weight", WIDTH, HIDDEN)
        written[f"blk.{i}.ffn_norm.weight"] = np.ones(WIDTH, dtype=np.float32)
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", written[f"blk.{i}.ffn_norm.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def test_experts_are_the_small_models_bytes_eight_times(maker: ModuleType, tmp_path: Path) -> None:
    small = dense_model(tmp_path / "dense.gguf")
    maker.stack_experts(tmp_path / "dense.gguf", tmp_path / "moe.gguf")
    reader = GGUFReader(tmp_path / "moe.gguf")
    made = {t.name: t for t in reader.tensors}
    for i in range(LAYERS):
        for kind in ("gate", "up", "down"):
            bundle = made.pop(f"blk.{i}.ffn_{kind}_exps.weight")
            dense = small.pop(f"blk.{i}.ffn_{kind}.weight")
            assert bundle.tensor_type == GGMLQuantizationType.Q4_1
            assert bundle.data.shape == (8, *dense.shape)
            assert all((bundle.data[e] == dense).all() for e in range(8))
        router = made.pop(f"blk.{i}.ffn_gate_inp.weight")
        assert router.data.shape == (8, WIDTH)
        assert len({tuple(row) for row in router.data.tolist()}) == 8
    assert set(made) == set(small)
    assert all((made[name].data == small[name]).all() for name in small)

    def value(key: str) -> object:
        return reader.fields[key].contents()

    assert (value("llama.expert_count"), value("llama.expert_used_count")) == (8, 2)
    assert value("llama.block_count") == LAYERS
    assert value("llama.rope.freq_base") == 10000.5
    assert value("tokenizer.ggml.add_bos_token") is False
    assert value("tokenizer.ggml.tokens") == ["<a>", "ü", "c"]
    assert value("tokenizer.ggml.token_type") == [1, 2, 3]


def test_a_made_model_is_kept_and_a_broken_one_is_not_taken_for_it(maker: ModuleType, tmp_path: Path) -> None:
    dense_model(tmp_path / "dense.gguf")
    target = tmp_path / maker.NAME
    maker.stack_experts(tmp_path / "dense.gguf", target)
    stamp = target.stat().st_mtime_ns
    assert maker.make(tmp_path, wheel=tmp_path / "no.whl") == target
    assert target.stat().st_mtime_ns == stamp
    assert not maker.is_whole(tmp_path / "dense.gguf")
    with target.open("r+b") as f:
        f.truncate(target.stat().st_size - 1000)
    assert not maker.is_whole(target)


def test_another_wheel_is_refused(maker: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / maker.WHEEL
    wheel.write_bytes(b"PK")
    with pytest.raises(DownloadFailed) as failed:
        maker.make(tmp_path / "out", wheel=wheel)
    assert failed.value.reference == "hash-mismatch"
    assert list((tmp_path / "out").iterdir()) == []
