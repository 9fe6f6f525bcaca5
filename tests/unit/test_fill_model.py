"""Random weights: valid and of the asked spread in every type, the same for any number of workers, none left out."""

from __future__ import annotations

import json
import os
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf.constants import GGUFValueType
from gguf.quants import dequantize

from launcher.errors import ModelUnreadable, Refused
from launcher.facts.gguf_header import read_header
from launcher.structs import TensorInfo
from scripts import fill_model
from tests.replicas import make_replica, make_tiny

SPEC_FILES = Path(make_replica.__file__).parent / "specs"
SPECS = {s["name"]: s for s in make_tiny.TINY}
Usage = namedtuple("Usage", "total used free")


def sparse(folder: Path, name: str, shards: int | None = None) -> Path:
    """A runnable shape with a hole for its weights; its first file."""
    tensors = make_replica.tensors_of(SPECS[name])
    kv = make_replica.kv_of(SPECS[name])
    written = make_replica.write(str(folder), name, kv, make_replica.plan_split(tensors, None, shards))
    return Path(written["files"][0]["path"])


def scaled(folder: Path, stem: str) -> Path:
    """A small cut of a real model's shape, also with a hole."""
    spec = make_replica.scale_tiny(make_replica.load_spec(str(SPEC_FILES / f"{stem}.yaml")))
    written = make_replica.write(str(folder), spec["name"], make_replica.kv_of(spec), [make_replica.tensors_of(spec)])
    return Path(written["files"][0]["path"])


def tensors(path: Path) -> dict[str, tuple[TensorInfo, np.ndarray]]:
    """Name -> tensor and its bytes."""
    header = read_header(path)
    found = {}
    for t in header.tensors:
        shard = header.shards[t.shard]
        start = shard.header_bytes + t.offset_bytes
        found[t.name] = (t, np.fromfile(shard.path, np.uint8, t.size_bytes, offset=start))
    return found


@pytest.mark.parametrize("spread", [1.0, 0.0187, 0.0118])
@pytest.mark.parametrize("name", fill_model.TYPES)
def test_blocks_of_every_type_are_finite_and_spread_as_asked(name: str, spread: float) -> None:
    n = 20011 if name in ("F32", "F16", "BF16") else 2003
    values = dequantize(fill_model.make_pool(name, spread, n, 7), Q[name])
    assert np.isfinite(values).all()
    assert np.std(values) == pytest.approx(spread, rel=0.03)
    assert abs(np.mean(values)) < 0.03 * spread
    assert np.abs(values).max() < 20 * spread


@pytest.mark.parametrize("name", ["tiny-gpt-oss", "tiny-deepseek4"])
def test_bytes_do_not_depend_on_workers_or_files_but_on_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(fill_model, "POOL_BYTES", 300_000)  # so that slices and pools end inside tensors
    monkeypatch.setattr(fill_model, "SLICE_BYTES", 70_000)
    one, three, other, split = (
        sparse(tmp_path / str(i), name, shards) for i, shards in enumerate((None, None, None, 3))
    )
    fill_model.fill(one, workers=1)
    fill_model.fill(three, workers=3)
    fill_model.fill(other, workers=2, seed=1)
    fill_model.fill(split)
    assert one.read_bytes() == three.read_bytes()
    first, second, in_files = tensors(one), tensors(other), tensors(split)
    assert all(np.array_equal(data, in_files[n][1]) for n, (_, data) in first.items())
    assert [n for n, (_, data) in first.items() if np.array_equal(data, second[n][1])] == []


def test_every_byte_of_the_weights_is_written_and_no_other(tmp_path: Path) -> None:
    """Over zeros and over ones: what differs afterwards was not written."""
    hole, ones = sparse(tmp_path / "a", "tiny-glm4moe"), sparse(tmp_path / "b", "tiny-glm4moe")
    start = read_header(ones).shards[0].header_bytes
    with ones.open("r+b") as f:
        f.seek(start)
        f.write(b"\xff" * (ones.stat().st_size - start))
    before = np.fromfile(hole, np.uint8)
    filled = fill_model.fill(hole)
    fill_model.fill(ones, overwrite=True)
    a, b = np.fromfile(hole, np.uint8), np.fromfile(ones, np.uint8)
    weights = np.zeros(a.size, bool)
    for t in read_header(hole).tensors:
        weights[start + t.offset_bytes :][: t.size_bytes] = True
    assert np.array_equal(a == b, weights | (np.arange(a.size) < start))
    assert np.array_equal(a[~weights], before[~weights])
    assert filled.written_bytes == weights.sum() == sum(t.size_bytes for t in read_header(hole).tensors)


def test_experts_differ_and_the_router_chooses_all_of_them(tmp_path: Path) -> None:
    path = sparse(tmp_path, "tiny-qwen3moe")
    fill_model.fill(path)
    found = tensors(path)
    for name, (t, data) in found.items():
        if "_exps.weight" in name:
            assert len({expert.tobytes() for expert in data.reshape(t.shape[2], -1)}) == t.shape[2]
    t, data = found["blk.7.ffn_gate_inp.weight"]
    tokens = np.random.default_rng(0).standard_normal((4000, t.shape[0])).astype(np.float32)
    chosen = np.argsort(tokens @ data.view(np.float32).reshape(t.shape[1], -1).T)[:, -4:]
    counts = np.bincount(chosen.ravel(), minlength=t.shape[1])
    assert counts.min() > 0.7 * counts.mean()
    assert counts.max() < 1.3 * counts.mean()


def test_vectors_and_tables_are_in_their_ranges(tmp_path: Path) -> None:
    hybrid = scaled(tmp_path, "qwen3-next-80b-a3b-split-Q4_K_M")
    hashed = sparse(tmp_path, "tiny-deepseek4")
    fill_model.fill(hybrid)
    fill_model.fill(hashed)
    found = tensors(hybrid) | {f"hashed.{n}": x for n, x in tensors(hashed).items()}
    values = {n: data.view(np.float32) for n, (t, data) in found.items() if t.type_name == "F32"}
    norms = [x for n, x in values.items() if n.endswith("norm.weight")]
    assert norms
    assert all(np.abs(x - 1).max() < 0.2 for x in norms)
    assert np.abs(values["hashed.blk.3.exp_probs_b.bias"]).max() < 0.1
    assert np.abs(values["hashed.blk.3.attn_sinks.weight"]).max() < 0.1
    assert -16 <= values["blk.0.ssm_a"].min() <= values["blk.0.ssm_a"].max() <= -1
    steps = np.log1p(np.exp(values["blk.0.ssm_dt.bias"]))
    assert 0.0005 < steps.min() < steps.max() < 0.11
    table, data = found["hashed.blk.0.ffn_gate_tid2eid.weight"]
    rows = np.sort(data.view(np.int32).reshape(-1, table.shape[0]))
    assert (np.diff(rows) > 0).all()
    assert set(rows.ravel()) == set(range(16))


def test_embeddings_that_are_the_output_matrix_too_are_small() -> None:
    t = TensorInfo(
        name="token_embd.weight", shape=(1024, 8), type_id=0, type_name="F32", size_bytes=32768, shard=0, offset_bytes=0
    )
    assert fill_model.spread(t) == 1.0
    assert fill_model.spread(t, tied=True) == fill_model.LOGIT_SPREAD / 32


# --------------------------------------------------------------------------------------------------- refusals


def odd_model(folder: Path, name: str, qtype: Q, shape: tuple[int, ...]) -> Path:
    kv = [("general.architecture", GGUFValueType.STRING, "llama"), ("llama.block_count", GGUFValueType.UINT32, 1)]
    listed = [make_replica.Tensor("token_embd.weight", (256, 64)), make_replica.Tensor(name, shape, qtype)]
    return Path(make_replica.write(str(folder), "odd", kv, [listed])["files"][0]["path"])


@pytest.mark.parametrize(
    ("name", "qtype"), [("blk.0.ffn_up.weight", Q.IQ1_M), ("blk.0.some_table.weight", Q.I32)], ids=["type", "table"]
)
def test_what_cannot_be_made_is_refused_by_name_before_anything_is_written(tmp_path: Path, name: str, qtype: Q) -> None:
    path = odd_model(tmp_path, name, qtype, (256, 4))
    before = path.read_bytes()
    with pytest.raises(Refused, match=qtype.name) as refused:
        fill_model.fill(path)
    assert refused.value.reference == "type-not-made"
    assert name in refused.value.context
    assert path.read_bytes() == before


def test_weights_that_are_there_are_kept_unless_asked(tmp_path: Path) -> None:
    path = sparse(tmp_path, "tiny-qwen3moe")
    fill_model.fill(path)
    before = path.read_bytes()
    with pytest.raises(Refused, match="no sparse replica") as refused:
        fill_model.fill(path, seed=1)
    assert "--overwrite" in refused.value.fix
    assert path.read_bytes() == before
    fill_model.fill(path, seed=1, overwrite=True)
    assert path.read_bytes() != before


def test_a_disk_too_small_is_refused_with_what_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sparse(tmp_path, "tiny-qwen3moe")
    monkeypatch.setattr(fill_model.shutil, "disk_usage", lambda _: Usage(0, 0, 1024))
    with pytest.raises(Refused, match="1.0 KiB are free") as refused:
        fill_model.fill(path)
    assert refused.value.reference == "disk-space"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_that_may_not_be_written_is_a_refusal(tmp_path: Path) -> None:
    path = sparse(tmp_path, "tiny-qwen3moe")
    path.chmod(0o444)
    with pytest.raises(ModelUnreadable) as refused:
        fill_model.fill(path)
    assert refused.value.reference == "model-unwritable"


def test_the_command_prints_one_document_and_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sparse(tmp_path, "tiny-gpt-oss")
    assert fill_model.main([str(path), "--workers", "2"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["path"] == str(path)
    assert told["written_bytes"] == sum(t.size_bytes for t in read_header(path).tensors)
    assert err.startswith("filled 0.0 of 0.0 GiB")
    assert fill_model.main([str(path)]) == Refused.exit_code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0].startswith("error[model-has-data]: ")
    assert err.splitlines()[-1].startswith("fix: ")
