"""The command line as people and scripts meet it: exit codes, one document, every spelling, one place that catches."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import pytest
import typer
from typer.testing import CliRunner

import launcher
from launcher import cli, options
from launcher.errors import DoesNotFit
from launcher.measure import proven
from launcher.serve import native, state
from tests.builders import T, array, write_gguf, write_shards
from tests.serve_builders import B11434, FAKE_FLAGS

ROOT = Path(launcher.__file__).parent.parent
RIG = """schema: 1
devices:
  - {name: CUDA0, description: RTX 3090, total: 24576MiB, free: 24125MiB, uuid: GPU-aaaa1111, context: 615MiB}
  - {name: CUDA1, description: RTX 3090, total: 24576MiB, free: 24125MiB, uuid: GPU-bbbb2222, context: 250MiB}
host: {total: %s, available: %s, triad_gbps: 116, cores: 6, numa_nodes: 1}
"""
N_LAYER = 4
# One bundle of this model is 3 x 96 MiB: big enough to be counted, and a hole on disk.
TENSORS = [
    T("token_embd.weight", (1024, 4096), 0),
    T("output.weight", (1024, 4096), 0),
    T("output_norm.weight", (1024,), 0),
]
for _i in range(N_LAYER):
    TENSORS += [
        T(f"blk.{_i}.attn_norm.weight", (1024,), 0),
        T(f"blk.{_i}.attn_q.weight", (1024, 1024), 1),
        T(f"blk.{_i}.attn_k.weight", (1024, 256), 1),
        T(f"blk.{_i}.attn_v.weight", (1024, 256), 1),
        T(f"blk.{_i}.attn_output.weight", (1024, 1024), 1),
        T(f"blk.{_i}.ffn_norm.weight", (1024,), 0),
        T(f"blk.{_i}.ffn_gate_inp.weight", (1024, 8), 0),
        T(f"blk.{_i}.ffn_gate_exps.weight", (1024, 6144, 8), 1),
        T(f"blk.{_i}.ffn_up_exps.weight", (1024, 6144, 8), 1),
        T(f"blk.{_i}.ffn_down_exps.weight", (6144, 1024, 8), 1),
    ]
KEYS = {
    "general.architecture": "qwen3moe",
    "qwen3moe.block_count": N_LAYER,
    "qwen3moe.context_length": 32768,
    "qwen3moe.embedding_length": 1024,
    "qwen3moe.feed_forward_length": 6144,
    "qwen3moe.expert_feed_forward_length": 6144,
    "qwen3moe.attention.head_count": 8,
    "qwen3moe.attention.head_count_kv": 2,
    "qwen3moe.attention.key_length": 128,
    "qwen3moe.attention.value_length": 128,
    "qwen3moe.expert_count": 8,
    "qwen3moe.expert_used_count": 2,
    "tokenizer.ggml.tokens": array(8, ["a", "b", "c"]),
}

run = CliRunner()


@pytest.fixture(autouse=True)
def _model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_DIR", str(tmp_path.parent))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "small-moe.gguf", KEYS, TENSORS)


@pytest.fixture
def rig(tmp_path: Path) -> Callable[..., str]:
    def write(available: str = "60GiB") -> str:
        path = tmp_path / "rig.yaml"
        path.write_text(RIG % ("64GiB", available))
        return str(path)

    return write


def slug(home: Path, name: str, model: Path, *, port: int = 8099, extra: str = "", more: str = "") -> None:
    """A slug of the user; `extra` are words for the fake engine."""
    path = home / "config" / "slugs" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"schema: 1\nstatus: production\ntitle: {name}\nmodel: {{dir: {model.parent.name}, file: {model.name}}}\n"
        f"serve: {{port: {port}, alias: fake, n_ctx: 1k, cache_ram: 0, checkpoints: 0, threads: 1}}\n"
        f"extra_args: [{extra}]\n{more}"
    )


def child(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    """The launcher as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "launcher", *argv], capture_output=True, text=True, check=False, cwd=ROOT, **options
    )  # type: ignore[call-overload,no-any-return]


def document(*argv: str) -> dict[str, object]:
    done = run.invoke(cli.app, [*argv, "--json"])
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


# ---------------------------------------------------------------------------------- help and usage


def test_help_without_arguments_lists_every_command() -> None:
    done = run.invoke(cli.app, [])
    for name in (
        "list", "show", "plan", "preflight", "setup", "switch", "run", "status", "logs", "stop", "history", "report",
        "engine",
    ):  # fmt: skip
        assert f"  {name}" in done.output


def test_version() -> None:
    assert run.invoke(cli.app, ["--version"]).stdout == f"llama-launcher {launcher.__version__}\n"


@pytest.mark.parametrize("argv", [["nonsense"], ["plan"], ["plan", "x", "--nope"], ["plan", "x", "--threads", "many"]])
def test_usage_is_exit_2(argv: list[str]) -> None:
    assert run.invoke(cli.app, argv).exit_code == 2


# -------------------------------------------------------------------------------------------- plan


def test_plan_document_of_a_bare_file(model: Path, rig: Callable[..., str]) -> None:
    doc = document("plan", str(model), "--rig", rig(), "--no-engine")
    schema = json.loads((ROOT / "docs" / "plan.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(doc)
    assert doc["fits"] is True
    assert doc["settings"]["n_ctx_total"] == 32768  # type: ignore[index]
    assert doc["argv"][0] == "llama-server"  # type: ignore[index]


SPELLINGS = [
    (["--ctx", "8k", "--parallel", "2"], ["-c", "16384", "-np", "2"]),
    (["--batch", "1024", "--ubatch", "256"], ["-b", "1024", "-ub", "256"]),
    (["--kv", "q8_0"], ["-ctk", "q8_0", "-ctv", "q8_0"]),
    (["--kv", "q8_0/f16"], ["-ctk", "q8_0", "-ctv", "f16"]),
    (["--unified"], ["-kvu"]),
    (["--no-unified"], ["-no-kvu"]),
    (["--flash-attn", "off"], ["-fa", "off"]),
    (["--devices", "CUDA1"], ["-dev", "CUDA1"]),
    (["--devices", "1"], ["--device", "GPU-bbbb"]),
    (["--devices=-CUDA0"], ["--devices", "CUDA1"]),
    (["--tensor-split", "3,2"], ["-ts", "3/2"]),
    (["--tensor-split", "3,2"], ["-ts", "0.6,0.4"]),
    (["--unified"], ["--kv-unified"]),
    (["--load-mode", "mmap"], ["-lm", "mmap"]),
    (["--threads", "3"], ["-t", "3"]),
    (["--drafter", "off"], ["-md", "off"]),
    (["--mmproj", "off"], ["-mm", "off"]),
]


def test_every_command_that_plans_takes_every_override() -> None:
    group = typer.main.get_command(cli.app)
    wanted = {w for _, spellings, _, _ in options.OVERRIDES.values() for s in spellings for w in s.split("/")}
    for name in ("plan", "preflight", "switch", "run"):
        params = group.commands[name].params  # type: ignore[attr-defined]
        assert wanted <= {w for p in params for w in (*p.opts, *p.secondary_opts)}, name


@pytest.mark.parametrize(("ours", "theirs"), SPELLINGS, ids=lambda words: " ".join(words))
def test_both_spellings_give_the_same_plan(
    model: Path, rig: Callable[..., str], ours: list[str], theirs: list[str]
) -> None:
    base = ["plan", str(model), "--rig", rig(), "--no-engine", "--residency", "none"]
    plain = document(*base)
    one = document(*base, *ours)
    assert one == document(*base, *theirs)
    if ours[-1] not in ("off", "--no-unified") or ours[0] == "--flash-attn":
        assert one != plain


def test_context_is_per_stream_and_c_the_total(model: Path, rig: Callable[..., str]) -> None:
    doc = document("plan", str(model), "--rig", rig(), "--no-engine", "--ctx", "2k", "-np", "4")
    assert doc["settings"]["n_ctx_per_stream"] == 2048  # type: ignore[index]
    assert doc["settings"]["n_ctx_total"] == 8192  # type: ignore[index]
    argv = doc["argv"]
    assert isinstance(argv, list)
    assert argv[argv.index("-c") + 1] == "8192"


def test_reserve_and_margin_are_sizes_of_a_device(model: Path, rig: Callable[..., str]) -> None:
    base = ["plan", str(model), "--rig", rig(), "--no-engine", "--ctx", "2k"]
    plain = document(*base)["devices"]
    tight = document(*base, "--reserve", "CUDA0=6GiB", "--margin", "2GiB")["devices"]
    assert isinstance(plain, list)
    assert isinstance(tight, list)
    assert {d["bytes"]["margin"] for d in tight} == {2 * 1024**3}
    free = {d["name"]: d["free_bytes"] for d in tight}
    assert free.get("CUDA0", (24125 - 6144) * 1024**2) == (24125 - 6144) * 1024**2
    assert free.get("CUDA1", 24125 * 1024**2) == 24125 * 1024**2


@pytest.mark.parametrize(
    "words",
    [
        ["--ctx", "many"], ["--ctx", "0"], ["--ctx", "1k", "-c", "1k"], ["-c", "3", "-np", "4"], ["--kv", "q9"],
        ["--batch", "0"], ["--flash-attn", "maybe"], ["--residency", "some"], ["--margin", "big"],
        ["--reserve", "CUDA0"], ["--reserve", "CUDA9=1GiB"], ["-ts", "a,b"], ["-ts", "0,0"], ["-ts", "1,1,1"],
        ["--load-mode", "fast"], ["--numa", "all"], ["--port", "0"], ["--devices", "CUDA7"], ["--draft-max", "-1"],
        ["-np", "0"], ["-np", "257"], ["--ctx", "2048M"], ["--ctx", "1024M", "-np", "2"], ["--margin", "-1"],
        ["--devices", ","], ["--devices", "0,CUDA0"], ["--devices", "CUDA0,-CUDA0"], ["--host", ""], ["-ts", "1"],
        ["-ts", "-1,2"], ["-ts", "1e-300,1"], ["-ts", "inf,1"], ["--kv", "q8_0", "-ctk", "f16"], ["--kv", "/"],
        ["--kv", "q8_0", "-fa", "off"], ["-ctv", "q4_0", "-fa", "off"], ["--reserve", "=1GiB"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_an_impossible_option_is_exit_2_with_a_fix(model: Path, rig: Callable[..., str], words: list[str]) -> None:
    done = run.invoke(cli.app, ["plan", str(model), "--rig", rig(), "--no-engine", *words])
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("error[")
    assert done.stderr.splitlines()[-1].startswith("fix: ")


def test_a_plan_that_does_not_fit_prints_its_document_and_exits_6(model: Path, rig: Callable[..., str]) -> None:
    done = child("plan", str(model), "--rig", rig("600MiB"), "--no-engine", "--devices", "none", "--json")
    assert done.returncode == 6
    doc = json.loads(done.stdout)
    assert doc["fits"] is False
    assert doc["refusal"]["where"] == "host"
    assert doc["refusal"]["short_bytes"] == doc["host"]["required_bytes"] - doc["host"]["available_bytes"]
    assert doc["refusal"]["ways_out"]
    lines = done.stderr.splitlines()
    assert lines[0].startswith("error[host-ram-short]: ")
    assert lines[1].startswith("  MiB: ")
    assert lines[-1].startswith("fix: ")


def test_a_device_that_is_too_small_exits_6(model: Path, rig: Callable[..., str]) -> None:
    done = run.invoke(
        cli.app, ["plan", str(model), "--rig", rig(), "--no-engine", "--devices", "CUDA0", "--reserve", "CUDA0=23GiB"]
    )
    assert done.exit_code == 6
    assert done.stdout.startswith("NO  CUDA0 is short by")
    assert done.stderr.startswith("error[device-short]: CUDA0 is short by")


def test_preflight_of_what_does_not_fit_exits_7_with_the_same_sum(model: Path, rig: Callable[..., str]) -> None:
    argv = [str(model), "--rig", rig("600MiB"), "--devices", "none", "--json"]
    planned = run.invoke(cli.app, ["plan", *argv, "--no-engine"])
    checked = run.invoke(cli.app, ["preflight", *argv])
    assert (planned.exit_code, checked.exit_code) == (6, 7)
    gates = {g["name"]: g for g in json.loads(checked.stdout)["gates"]}
    assert gates["host-ram-short"]["ok"] is False
    total = json.loads(planned.stdout)["host"]["required_bytes"] / 1024**2
    assert f"= {round(total):,}" in gates["host-ram-short"]["context"]
    assert json.loads(checked.stdout)["refusal"] == json.loads(planned.stdout)["refusal"]
    assert "WAYS OUT" in run.invoke(cli.app, ["preflight", *argv[:-1]]).stdout


def test_the_refusal_is_about_the_device_that_the_screen_names(model: Path, rig: Callable[..., str]) -> None:
    argv = ["plan", str(model), "--rig", rig(), "--no-engine", "-ts", "1,4"]
    done = run.invoke(cli.app, [*argv, "--reserve", "CUDA0=23000MiB", "--reserve", "CUDA1=24100MiB"])
    assert done.exit_code == 6
    where = done.stdout.split()[1]
    assert where == "CUDA1"
    assert done.stderr.startswith(f"error[device-short]: {where} is short by ")


def test_a_context_beyond_the_training_is_noted(model: Path, rig: Callable[..., str]) -> None:
    base = ("plan", str(model), "--rig", rig(), "--no-engine")
    (note,) = [w for w in document(*base, "--ctx", "64k")["warnings"] if "trained" in w]  # type: ignore[attr-defined]
    assert "65,536" in note
    assert "32,768" in note
    assert not [w for w in document(*base, "--ctx", "32k")["warnings"] if "trained" in w]  # type: ignore[attr-defined]


def test_a_projector_is_planned_and_passed_on(model: Path, rig: Callable[..., str]) -> None:
    projector = write_gguf(model.with_name("mmproj-f16.gguf"), {"general.architecture": "clip"}, TENSORS[:1])
    base = ("plan", str(model), "--rig", rig(), "--no-engine", "--ctx", "2k")
    doc = document(*base, "--mmproj", str(projector))
    assert doc["devices"][0]["bytes"]["projector"] == 2 * projector.stat().st_size  # type: ignore[index]
    argv = doc["argv"]
    assert isinstance(argv, list)
    assert argv[argv.index("--mmproj") + 1] == str(projector)
    gone = run.invoke(cli.app, [*base, "--mmproj", str(model.with_name("nothing.gguf"))])
    assert (gone.exit_code, gone.stderr.split("]")[0]) == (4, "error[model-missing")
    assert gone.stderr.splitlines()[-1].startswith("fix: --mmproj ")


def test_explain_and_screen_of_a_plan(model: Path, rig: Callable[..., str]) -> None:
    done = run.invoke(cli.app, ["plan", str(model), "--rig", rig(), "--no-engine", "--explain"])
    assert done.exit_code == 0
    assert done.stdout.startswith("FITS  ")
    assert "where the numbers come from" in done.stdout


def test_explain_says_what_one_more_bundle_would_need(model: Path, rig: Callable[..., str]) -> None:
    argv = ["plan", str(model), "--rig", rig(), "--no-engine", "--explain"]
    done = run.invoke(cli.app, [*argv, "--residency", "none", "-ub", "2048"])
    assert re.search(r"^CUDA\d has room for one more bundle \(288 MiB\); the residency is set", done.stdout, re.M)
    assert "a smaller micro-batch alone is a pure loss here: the residency is set" in done.stdout
    done = run.invoke(cli.app, [*argv, "--devices", "CUDA0", "--ctx", "2k", "--reserve", "CUDA0=21GiB"])
    assert re.search(r"^CUDA0 is short by [\d,]+ MiB for one more bundle \(288 MiB\)$", done.stdout, re.M)


def test_tradeoffs_are_rows_on_the_screen_and_in_the_document(model: Path, rig: Callable[..., str]) -> None:
    argv = ["plan", str(model), "--rig", rig(), "--no-engine", "-ub", "2048"]
    doc = document(*argv, "--tradeoffs")
    jsonschema.Draft202012Validator(json.loads((ROOT / "docs" / "plan.schema.json").read_text())).validate(doc)
    rows = doc.pop("tradeoffs")
    assert doc == document(*argv)
    assert isinstance(rows, list)
    changes = [row["change"] for row in rows]
    assert changes[:6] == ["", "-ub 1024", "-ub 512", "--ctx 16k", "--ctx 8k", "--kv q8_0"]
    other = document(*argv, "--ctx", "8k")
    assert rows[4]["host_required_bytes"] == other["host"]["required_bytes"]  # type: ignore[index]
    done = run.invoke(cli.app, [*argv, "--tradeoffs"])
    lines = done.stdout.splitlines()
    assert done.exit_code == 0
    assert "trade-offs (* as chosen)" in lines
    assert [line for line in lines if line.startswith("* as chosen ")]
    for change in changes[1:]:
        assert [line for line in lines if line.startswith(f"  {change} ")], change


def test_tradeoffs_of_what_does_not_fit_are_shown_before_the_refusal(model: Path, rig: Callable[..., str]) -> None:
    argv = ["plan", str(model), "--rig", rig(), "--no-engine", "--devices", "CUDA0", "--reserve", "CUDA0=23GiB"]
    done = run.invoke(cli.app, [*argv, "--tradeoffs"])
    assert done.exit_code == 6
    assert "trade-offs (* as chosen)" in done.stdout
    assert done.stderr.startswith("error[device-short]: ")


# ------------------------------------------------------------------------- every other exit code


def test_targets_that_are_not_here(tmp_path: Path) -> None:
    for target, code, reference in (
        ("nobody", 2, "slug-unknown"),
        ("unsloth/gpt-oss-20b-GGUF:Q4_K_M", 4, "target-remote"),
        ("https://huggingface.co/x/y/resolve/main/z.gguf", 4, "target-remote"),
        (str(tmp_path / "gone.gguf"), 4, "model-missing"),
        ("llamacpp/deepseek-flash-dual-q8", 4, "model-missing"),
        ("llamacpp/deepseek-flash-dual-q9", 2, "slug-unknown"),
    ):
        done = run.invoke(
            cli.app, ["plan", target, "--no-engine"], env={"MODEL_DIR": str(tmp_path), "HOME": str(tmp_path)}
        )
        assert (done.exit_code, done.stderr.split("]")[0]) == (code, f"error[{reference}"), done.output
        assert done.stdout == ""


def test_a_broken_slug_is_exit_3_with_line_and_column(launcher_home: Path, model: Path) -> None:
    slug(launcher_home, "my/broken", model, more="deviecs: {min: 2}\n")
    done = run.invoke(cli.app, ["plan", "my/broken"])
    assert done.exit_code == 3
    assert "broken.yaml:7:1" in done.stderr
    assert run.invoke(cli.app, ["plan", str(model), "--rig", "/nowhere.yaml"]).exit_code == 3
    listed = run.invoke(cli.app, ["list"])
    assert listed.exit_code == 0
    assert "my/broken" in listed.stdout


def test_an_engine_that_is_not_there_is_exit_5(model: Path) -> None:
    done = run.invoke(cli.app, ["plan", str(model), "--engine", "/nowhere/llama-server"])
    assert done.exit_code == 5
    assert done.stderr.startswith("error[engine-missing]")
    assert run.invoke(cli.app, ["engine", "probe", "/nowhere/llama-server"]).exit_code == 5


def test_a_missing_shard_closes_a_gate_and_names_setup(
    launcher_home: Path, tmp_path: Path, rig: Callable[..., str]
) -> None:
    third = len(TENSORS) // 3
    parts = [TENSORS[:third], TENSORS[third : 2 * third], TENSORS[2 * third :]]
    shards = write_shards(tmp_path, parts, stem="m", kv=KEYS)
    slug(launcher_home, "my/set", shards[0], more="")
    text = (launcher_home / "config" / "slugs" / "my" / "set.yaml").read_text()
    (launcher_home / "config" / "slugs" / "my" / "set.yaml").write_text(text.replace("model: {", "model: {repo: o/r, "))
    assert run.invoke(cli.app, ["preflight", "my/set", "--rig", rig()]).exit_code == 0
    shards[1].unlink()
    done = run.invoke(cli.app, ["preflight", "my/set", "--rig", rig()])
    assert done.exit_code == 7
    assert done.stderr.startswith("error[shards-missing]")
    assert "m-00002-of-00003.gguf" in done.output
    assert "launcher setup my/set" in done.stderr.splitlines()[-1]
    assert run.invoke(cli.app, ["plan", "my/set", "--rig", rig()]).exit_code == 4


def test_the_lock_is_exit_10_and_names_its_holder() -> None:
    with state.lock("engine", "switch something"):
        done = child("stop")
    assert done.returncode == 10
    assert f"pid {os.getpid()}" in done.stderr
    assert child("stop").returncode == 0


def test_nothing_runs() -> None:
    assert document("status")["servers"] == []
    assert run.invoke(cli.app, ["status"]).exit_code == 0
    assert run.invoke(cli.app, ["status", "--check"]).exit_code == 8
    assert document("history")["runs"] == []
    assert run.invoke(cli.app, ["logs"]).exit_code == 2
    assert run.invoke(cli.app, ["stop", "nobody"]).exit_code == 2
    assert document("stop")["stopped"] == []


def test_show_and_list_documents(launcher_home: Path, model: Path) -> None:
    slug(launcher_home, "my/small", model)
    shown = document("show", "small")
    assert shown["name"] == "my/small"
    assert shown["serve"]["n_ctx"] == 1024  # type: ignore[index]
    rows = {row["name"]: row for row in document("list")["slugs"]}  # type: ignore[attr-defined]
    assert rows["my/small"]["file_bytes"] == model.stat().st_size
    assert rows["my/small"]["host_required_bytes"] > 0
    assert rows["llamacpp/deepseek-flash-dual-q8"]["fits"] is None


def test_setup_wants_a_slug(model: Path) -> None:
    done = run.invoke(cli.app, ["pull", str(model)])
    assert done.exit_code == 2
    assert done.stderr.startswith("error[setup-needs-slug]")


# ------------------------------------------------------------------------ the one place that catches


def catching(error: BaseException) -> typer.Typer:
    """An app with our group and one command that ends like that."""
    app = typer.Typer(cls=cli.Commands, pretty_exceptions_enable=False)

    @app.callback()
    def root(debug: bool = False) -> None: ...

    @app.command()
    def fail() -> None:
        raise error

    return app


def test_a_bug_is_exit_1_three_lines_and_a_kept_traceback(launcher_home: Path) -> None:
    done = run.invoke(catching(ZeroDivisionError("by\nzero")), ["fail"])
    assert done.exit_code == 1
    file = next((launcher_home / "state" / "crashes").iterdir())
    first, second, third = done.stderr.splitlines()
    assert first == "error[bug]: ZeroDivisionError: by zero"
    assert second == f"  traceback: {file}"
    assert third.startswith("fix: ")
    kept = file.read_text()
    assert "Traceback" in kept
    assert f"llama-launcher {launcher.__version__}" in kept


def test_debug_shows_the_traceback() -> None:
    assert "Traceback" in run.invoke(catching(ZeroDivisionError("x")), ["--debug", "fail"]).stderr


def test_a_refusal_has_the_code_of_its_class() -> None:
    done = run.invoke(catching(DoesNotFit("device-short", "a", context="b", fix="c")), ["fail"])
    assert done.exit_code == 6
    assert done.stderr == "error[device-short]: a\n  b\nfix: c\n"


def test_an_interrupt_is_130() -> None:
    assert run.invoke(catching(KeyboardInterrupt()), ["fail"]).exit_code == 130


def test_a_reader_that_left_is_no_error() -> None:
    argv = [sys.executable, "-m", "launcher", "show", "demo/smol-moe", "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout
        process.stdout.close()
        assert process.stderr
        assert process.stderr.read() == b""
        assert process.wait(30) == 0


# --------------------------------------------------------------- switch, status, logs, stop, history


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that says what a real llama-server says of itself, and then plays it."""
    path = tmp_path / "engine" / "llama-server"
    path.parent.mkdir()
    words = [f"{word} VALUE  text" for word in sorted((B11434 | FAKE_FLAGS) - {"--spec-type"})]
    path.with_name("help.txt").write_text("\n".join([*words, "--spec-type [none|draft-simple|draft-dspark]  text"]))
    path.write_text(
        "#!/bin/sh\n"
        f'case "$1" in --help) exec cat "{path.with_name("help.txt")}";; --version) echo version: fake; exit 0;;\n'
        "--list-devices) echo 'Available devices:'; exit 0;; esac\n"
        'for word; do [ "$word" = --log-jsonl ] && exit 1; done\n'
        f'exec "{sys.executable}" "{ROOT}/tests/fake_server.py" "$@"\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("LLAMA_SERVER", str(path))
    return path


@pytest.fixture
def ports() -> Iterator[Callable[[], int]]:
    """Free ports; whatever of ours still runs after the test is stopped."""

    def free() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    yield free
    for record in state.records():
        native.stop(record, grace_s=2)


@pytest.mark.usefixtures("engine")
def test_switch_serves_says_so_and_stop_ends_it(launcher_home: Path, model: Path, ports: Callable[[], int]) -> None:
    port = ports()
    slug(launcher_home, "my/one", model, port=port)
    done = child("switch", "one", "--json")
    assert done.returncode == 0, done.stderr
    doc = json.loads(done.stdout)
    assert doc["server"]["url"] == f"http://127.0.0.1:{port}/v1"
    assert doc["plan"]["fits"] is True
    assert "READY" not in done.stdout
    rows = {row["name"]: row for row in document("list")["slugs"]}  # type: ignore[attr-defined]
    assert (rows["my/one"]["running"], rows["my/one"]["port"]) == (True, port)
    found = document("status")["servers"]
    assert isinstance(found, list)
    assert found[0]["state"] == "ready"
    assert run.invoke(cli.app, ["status", "--check"]).exit_code == 0
    assert "listening" in run.invoke(cli.app, ["logs", "-n", "20"]).stdout
    stopped = document("stop", "one")["stopped"]
    assert isinstance(stopped, list)
    assert stopped[0]["slug"] == "my/one"
    assert document("status")["servers"] == []
    ended = document("history")["runs"]
    assert isinstance(ended, list)
    assert ended[0]["reason"] == "stopped"
    assert run.invoke(cli.app, ["stop", "one"]).exit_code == 0
    assert "listening" in run.invoke(cli.app, ["logs", "one"]).stdout


@pytest.mark.usefixtures("engine")
def test_ready_is_proven_once_and_quick_goes_without(
    launcher_home: Path, model: Path, ports: Callable[[], int]
) -> None:
    slug(launcher_home, "my/one", model, port=ports())
    n_tokens = 1024 * 9 // 10
    quick = child("switch", "one", "--quick")
    assert quick.returncode == 0, quick.stderr
    assert "proving" not in quick.stdout
    assert "unverified depth" in quick.stdout
    assert "unverified depth" in run.invoke(cli.app, ["status"]).stdout
    first = child("switch", "one", "--yes")
    assert first.returncode == 0, first.stderr
    assert f"proving {n_tokens} tokens" in first.stdout
    assert f"depth proven to {n_tokens} tokens" in first.stdout
    assert state.running()[0].proven_tokens == n_tokens
    again = child("switch", "one", "--yes")
    assert "proving" not in again.stdout
    assert re.search(rf"depth proven \d{{4}}-\d\d-\d\d to {n_tokens} tokens", again.stdout)
    assert "depth proven " in run.invoke(cli.app, ["status"]).stdout
    other = child("switch", "one", "--yes", "--ctx", "512")
    assert f"proving {512 * 9 // 10} tokens" in other.stdout


@pytest.mark.usefixtures("engine")
def test_an_end_in_the_first_deep_prompt_is_no_ready(
    launcher_home: Path, model: Path, ports: Callable[[], int]
) -> None:
    slug(launcher_home, "my/deep", model, port=ports(), extra="--die-at, '512', --exit-code, '1'")
    done = child("switch", "deep")
    assert done.returncode == 8, done.stdout
    assert done.stderr.startswith("error[engine-exited]: llama-server ended while proving 921 tokens")
    assert "READY" not in done.stdout
    assert state.running() == ()
    assert [end.reason for end in state.history()] == ["start failed"]
    assert proven.read() == {}


@pytest.mark.usefixtures("engine")
def test_switch_touches_nothing_before_every_gate_is_open(
    launcher_home: Path, model: Path, ports: Callable[[], int]
) -> None:
    slug(launcher_home, "my/one", model, port=ports())
    slug(launcher_home, "my/two", model, port=ports(), more="devices: {min: 3}\n")
    assert child("switch", "one").returncode == 0
    before = state.running()
    done = child("switch", "two", "--yes")
    assert done.returncode == 7
    assert done.stdout.startswith("NOT SWITCHED  my/one keeps running on :")
    assert done.stderr.startswith("error[devices-too-few]")
    slug(launcher_home, "my/two", model, port=ports())
    untouched = f"NOT SWITCHED  my/one keeps running on :{before[0].port} (pid "
    for words, code, reference in (
        (["two"], 7, "needs-yes"),
        (["tow"], 2, "slug-unknown"),
        (["two", "--yes", "--ctx", "many"], 2, "override-invalid"),
        (["two", "--yes", "--engine", "/nowhere"], 7, "engine-missing"),
        ([str(model.with_name("gone.gguf")), "--yes"], 7, "model-missing"),
    ):
        for more in ([], ["--json"]):
            refused = child("switch", *words, *more, stdin=subprocess.DEVNULL)
            assert (refused.returncode, refused.stderr.split("error[")[1].split("]")[0]) == (code, reference)
            assert untouched in (refused.stderr if more else refused.stdout), words
            assert not more or refused.stdout == ""
    assert state.running() == before
    done = child("switch", "two", "--yes")
    assert done.returncode == 0, done.stderr
    assert "my/one stopped in" in done.stdout
    assert [r.slug for r in state.running()] == ["my/two"]


@pytest.mark.usefixtures("engine")
def test_a_start_that_fails_says_what_was_stopped_for_it(
    launcher_home: Path, model: Path, ports: Callable[[], int]
) -> None:
    slug(launcher_home, "my/one", model, port=ports())
    slug(launcher_home, "my/oom", model, port=ports(), extra="--fail, oom")
    assert child("switch", "one", "--ctx", "512").returncode == 0
    done = child("switch", "oom", "--yes")
    assert done.returncode == 8
    said = " ".join(done.stdout.split())
    assert "NOT SWITCHED my/one was stopped and does not run; `switch my/one --ctx 512` brings it back" in said
    assert state.running() == ()


@pytest.mark.usefixtures("engine")
def test_an_engine_that_dies_is_exit_8_and_leaves_nothing(
    launcher_home: Path, model: Path, ports: Callable[[], int]
) -> None:
    slug(launcher_home, "my/oom", model, port=ports(), extra="--fail, oom")
    done = child("switch", "oom")
    assert done.returncode == 8, done.stdout
    assert done.stderr.startswith("error[engine-exited]")
    assert "cudaMalloc failed" in done.stderr
    assert state.running() == ()


def hanging(launcher_home: Path, model: Path, port: int) -> subprocess.Popen[str]:
    """`switch` of a server that never gets ready, as far as that the server runs."""
    slug(launcher_home, "my/hang", model, port=port, extra="--hang")
    argv = [sys.executable, "-m", "launcher", "switch", "hang"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True)
    deadline = time.monotonic() + 20
    while not any(r.server for r in state.running()) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    return process


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_what_the_command_started(
    launcher_home: Path, model: Path, ports: Callable[[], int], number: signal.Signals
) -> None:
    with hanging(launcher_home, model, ports()) as process:
        server = state.running()[0].server
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr.strip() == "interrupted"
    assert not native.alive(server)
    assert state.running() == ()


@pytest.mark.usefixtures("engine")
def test_a_lost_terminal_does_not_end_the_load(launcher_home: Path, model: Path, ports: Callable[[], int]) -> None:
    with hanging(launcher_home, model, ports()) as process:
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=30)
    found = document("status")["servers"]
    assert isinstance(found, list)
    assert (found[0]["alive"], found[0]["state"], found[0]["keeper_alive"]) == (True, "loading", True)
    assert run.invoke(cli.app, ["status", "--check"]).exit_code == 8
    assert run.invoke(cli.app, ["stop"]).exit_code == 0


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("answer", "code", "runs"), [("n", 7, "my/one"), ("", 0, "my/two")])
def test_a_terminal_is_asked(
    launcher_home: Path, model: Path, ports: Callable[[], int], answer: str, code: int, runs: str
) -> None:
    for name in ("my/one", "my/two"):
        slug(launcher_home, name, model, port=ports())
    assert child("switch", "my/one").returncode == 0
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "launcher", "switch", "my/two"]
    with subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT) as process:
        os.close(theirs)
        shown = b""
        while b"[Y/n, --yes]" not in shown:
            shown += os.read(ours, 4096)
        os.write(ours, answer.encode() + b"\n")
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while piece := os.read(ours, 4096):
                shown += piece
        assert process.wait(30) == code
    os.close(ours)
    assert [r.slug for r in state.running()] == [runs]
    assert b"stop it?" in shown


@pytest.mark.usefixtures("engine")
def test_a_killed_launcher_and_keeper_leave_a_server_that_is_found_and_ended(
    launcher_home: Path, model: Path, ports: Callable[[], int]
) -> None:
    slug(launcher_home, "my/one", model, port=ports())
    assert child("switch", "one").returncode == 0
    record = state.running()[0]
    assert record.keeper is not None
    assert record.server is not None
    os.kill(record.keeper.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while native.alive(record.keeper) and time.monotonic() < deadline:
        time.sleep(0.02)
    found = document("status")["servers"]
    assert isinstance(found, list)
    assert (found[0]["alive"], found[0]["keeper_alive"]) == (True, False)
    assert run.invoke(cli.app, ["stop"]).exit_code == 0
    assert not native.alive(record.server)


@pytest.mark.usefixtures("engine")
def test_run_becomes_the_engine(model: Path, ports: Callable[[], int]) -> None:
    port = ports()
    argv = [sys.executable, "-m", "launcher", "run", str(model), "--ctx", "1k", "--port", str(port)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True) as process:
        deadline = time.monotonic() + 20
        while native.port_free("127.0.0.1", port) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        assert process.poll() is None, process.communicate()[1]
        command = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
        process.terminate()
        process.communicate(timeout=20)
    assert str(ROOT / "tests" / "fake_server.py") in command
    assert command[command.index("--port") + 1] == str(port)


def test_engine_list_use_and_back(engine: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "llama-server"
    other.parent.mkdir()
    shutil.copy(engine, other)
    rows = document("engine", "list")["engines"]
    assert isinstance(rows, list)
    assert (rows[0]["path"], rows[0]["found_by"], rows[0]["chosen"]) == (str(engine), "LLAMA_SERVER", True)
    assert run.invoke(cli.app, ["engine", "use", str(engine)]).exit_code == 0
    assert run.invoke(cli.app, ["engine", "use", str(other)]).exit_code == 0
    back = run.invoke(cli.app, ["engine", "use", "-"])
    assert back.exit_code == 0
    assert str(engine) in back.stdout
    assert "draft-dspark" in document("engine", "probe")["spec_types"]  # type: ignore[operator]
    assert document("engine", "use", str(other))["path"] == str(other)
    assert document("list")["engine"]["path"] == str(engine)  # type: ignore[index]
    shown = run.invoke(cli.app, ["list"])
    assert shown.exit_code == 0
    assert "engine llama.cpp fake, " in " ".join(shown.stdout.split())
    for screen in (["engine", "list"], ["engine", "probe"]):
        assert "llama.cpp fake" in run.invoke(cli.app, screen).stdout


# -------------------------------------------------------------------------------------------- docs


def test_every_command_and_override_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    names = [c.name or c.callback.__name__ for c in cli.app.registered_commands if c.callback and not c.hidden]
    names += [f"engine {c.name}" for c in cli.engines.registered_commands]
    names += [f"service {c.name}" for c in cli.services.registered_commands]
    assert [n for n in names if f"| `{n}" not in text] == []
    group = typer.main.get_command(cli.app)
    long = {w for c in group.commands.values() for p in c.params for w in p.opts if w.startswith("--")}  # type: ignore[attr-defined]
    assert [w for w in sorted(long) if w not in text] == []
    words = [w for _, spellings, _, _ in options.OVERRIDES.values() for s in spellings for w in s.split("/")]
    assert [w for w in words if f"`{w}`" not in text] == []
