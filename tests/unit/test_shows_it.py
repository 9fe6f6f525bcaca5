"""What the launcher promises of the two-card DeepSeek slug, through the command line and on the real replica."""

from __future__ import annotations

import json
import re
import shlex
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

import launcher
from launcher import cli
from launcher.facts.gguf_header import read_header
from launcher.units import GIB, MIB

ROOT = Path(launcher.__file__).parent.parent
RIGS = ROOT / "tests" / "golden" / "rigs"
SLUG = "llamacpp/deepseek-flash-dual-q8"
DIR = "deepseek-v4-flash-0731-gguf"
BUNDLE = 3264 * MIB

run = CliRunner()


@pytest.fixture
def models(tmp_path: Path, replica: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """MODEL_DIR as `setup` leaves it: the model and its drafter; the folder of the model's shards."""
    quality = tmp_path / "models" / DIR / "UD-Q8_K_XL"
    for name, folder in (
        ("deepseek-v4-flash-UD-Q8_K_XL", quality),
        ("deepseek-v4-flash-dspark-Q8_0", quality.with_name("dspark")),
    ):
        folder.mkdir(parents=True)
        for shard in replica(name).parent.glob("*.gguf"):
            (folder / shard.name).symlink_to(shard)
    monkeypatch.setenv("MODEL_DIR", str(tmp_path / "models"))
    return quality


def invoke(*argv: str) -> Any:
    return run.invoke(cli.app, list(argv))


def documented(*argv: str) -> tuple[dict[str, Any], Any]:
    """(the one document on stdout, all that was answered)."""
    done = invoke(*argv, "--json")
    return json.loads(done.stdout), done


def owner_of(layer: int, n_layer: int, split: list[int]) -> int:
    """The engine's rule a second time: the first device whose share of the split ends beyond the layer."""
    sums = list(accumulate(split))
    return bisect_right([s / sums[-1] for s in sums], layer / (n_layer + 1))


def resolved(rules: str, tensor: str) -> str | None:
    """First rule that is found anywhere in the name, as the engine searches; split at `,` and the first `=`."""
    pairs = (rule.split("=", 1) for rule in rules.split(","))
    return next((buffer for pattern, buffer in pairs if re.search(pattern, tensor)), None)


@pytest.mark.parametrize("rig", ["2x3090", "2x3090-128g", "1x3090", "4x3090-128g"])
def test_the_plan_document_proves_itself(models: Path, rig: str) -> None:
    doc, done = documented("plan", SLUG, "--rig", str(RIGS / f"{rig}.yaml"), "--no-engine")
    assert done.exit_code == (0 if doc["fits"] else 6)
    jsonschema.Draft202012Validator(json.loads((ROOT / "docs" / "plan.schema.json").read_text())).validate(doc)
    names = [d["name"] for d in doc["devices"]]
    split, n_layer = doc["tensor_split"], doc["model"]["n_layer"]
    assert [layer["device"] for layer in doc["layers"]] == [names[owner_of(i, n_layer, split)] for i in range(n_layer)]
    assert [d["layers"] for d in doc["devices"]] == [
        [i for i in range(n_layer) if owner_of(i, n_layer, split) == k] for k in range(len(split))
    ]
    assert [d["owns_output"] for d in doc["devices"]].index(True) == owner_of(n_layer, n_layer, split)
    assert {layer["bundle_bytes"] for layer in doc["layers"]} == {BUNDLE}
    resident = {i: d["buffer_type"] for d in doc["devices"] for i in d["resident_layers"]}
    tensors = [t.name for t in read_header(models).tensors]
    assert any(re.search(r"_exps\.", name) for name in tensors)
    for name in tensors:
        expert = re.match(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.", name)
        wanted = resident.get(int(expert.group(1)), "CPU") if expert else None
        assert resolved(doc["override_tensor"], name) == wanted, name
    argv = doc["argv"]
    assert argv[argv.index("-ot") + 1] == doc["override_tensor"]
    assert argv[argv.index("-ts") + 1] == ",".join(map(str, split))


def test_that_slug_fits_the_golden_rig(models: Path) -> None:
    doc, _ = documented("plan", SLUG, "--rig", str(RIGS / "2x3090.yaml"), "--no-engine")
    assert doc["fits"]
    assert models.name in doc["model"]["path"]


def test_a_missing_second_shard_is_exit_7_with_its_name_and_setup(models: Path) -> None:
    second = next(models.glob("*-00002-of-00005.gguf"))
    second.unlink()
    for argv in (("preflight", SLUG, "--rig", str(RIGS / "2x3090.yaml")), ("preflight", SLUG)):
        done = invoke(*argv)
        assert done.exit_code == 7
        assert done.stderr.startswith("error[shards-missing]: ")
        assert second.name in done.stderr
        assert done.stderr.splitlines()[-1] == f"fix: launcher setup {SLUG}"
        assert second.name in done.stdout
        assert f"fix: launcher setup {SLUG}" in done.stdout


@pytest.mark.usefixtures("models")
def test_64_gib_are_refused_with_the_sum_the_shortfall_and_ways_out() -> None:
    rig = str(RIGS / "2x3090-64g.yaml")
    planned, plan = documented("plan", SLUG, "--rig", rig, "--no-engine")
    checked, preflight = documented("preflight", SLUG, "--rig", rig, "--force")
    assert (plan.exit_code, preflight.exit_code) == (6, 7)
    refusal = planned["refusal"]
    assert refusal == checked["refusal"]
    assert refusal["where"] == "host"
    assert refusal["needed_bytes"] == sum(planned["host"]["bytes"].values())
    for done in (plan, preflight):
        first, *_ = done.stderr.splitlines()
        assert first == (
            f"error[host-ram-short]: needs {refusal['needed_bytes'] / GIB:.1f} GiB of RAM, has "
            f"{refusal['available_bytes'] / GIB:.1f}, short {refusal['short_bytes'] / GIB:.1f}"
        )
        terms, total = re.search(r"MiB: (.*) = ([\d,]+)", " ".join(done.stderr.split())).groups()  # type: ignore[union-attr]
        assert sum(int(n.replace(",", "")) for n in re.findall(r"[\d,]+", terms)) == int(total.replace(",", ""))
        assert int(total.replace(",", "")) == round(refusal["needed_bytes"] / MIB)
    for command in (["plan", SLUG, "--rig", rig, "--no-engine"], ["preflight", SLUG, "--rig", rig]):
        screen = invoke(*command).stdout
        assert screen.startswith("NO  ")
        assert "WAYS OUT" in screen
        assert " a --drafter off " in screen
        assert re.search(r"\d+ GiB more RAM: fits as is .* FITS", screen)


@pytest.mark.usefixtures("models")
def test_a_refusal_says_why_in_numbers_that_the_plan_has() -> None:
    argv = ["plan", SLUG, "--rig", str(RIGS / "2x3090-128g.yaml"), "--no-engine"]
    doc, _ = documented(*argv)
    drafter = sum(d["bytes"]["drafter"] for d in doc["devices"])
    lean = doc["refusal"]["ways_out"][0]
    more = lean["resident_layers"] - sum(len(d["resident_layers"]) for d in doc["devices"])
    assert lean["change"] == "--drafter off"
    assert (
        f"why so much: the drafter takes {drafter / GIB:.1f} GiB of the devices; "
        f"without it those of {more} more layers lie there"
    ) in " ".join(invoke(*argv).stdout.split())


@pytest.mark.parametrize(
    ("command", "rig", "more"),
    [
        ("plan", "2x3090-128g", []),
        ("preflight", "2x3090-128g", []),
        ("plan", "2x3090-128g", ["--ctx", "160k", "--port", "9000"]),
        ("preflight", "2x3090-128g", ["--drafter", "off", "--ctx", "2M"]),
        ("plan", "2x3090-128g", ["-c", "800k", "-np", "4", "--drafter", "off", "--reserve", "CUDA0=4GiB"]),
        ("plan", "2x3090", ["--devices=-CUDA1", "--drafter", "off", "--ctx", "1M", "--no-unified"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
@pytest.mark.usefixtures("models")
def test_a_fix_that_is_pasted_does_what_it_says(command: str, rig: str, more: list[str]) -> None:
    """The printed line, typed as it stands: it repeats the rig and every option that was given."""
    extra = ["--no-engine"] if command == "plan" else ["--force"]
    refused, done = documented(command, SLUG, "--rig", str(RIGS / f"{rig}.yaml"), *extra, *more)
    assert done.exit_code == (6 if command == "plan" else 7)
    promised = next(w for w in refused["refusal"]["ways_out"] if w["fits"])
    words = shlex.split(done.stderr.splitlines()[-1].removeprefix("fix: launcher "), comments=True)
    assert words[0] == command
    assert promised["change"] in " ".join(words)
    assert invoke(*words).exit_code == 0
    doc, _ = documented("plan", *(w for w in words[1:] if w not in ("--force", "--no-engine")), "--no-engine")
    assert doc["fits"]
    assert doc["host"]["required_bytes"] == promised["host_required_bytes"]
    assert sum(len(d["resident_layers"]) for d in doc["devices"]) == promised["resident_layers"]
