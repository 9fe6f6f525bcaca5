"""What a block weighs, what is a bundle, and which files are refused."""

from __future__ import annotations

import dataclasses

import pytest

from launcher.errors import ModelUnreadable
from launcher.planner import model_shape
from launcher.planner.shape import tensor_sizes
from launcher.structs import ModelHeader, TensorInfo
from launcher.units import MIB
from tests.models import moe_header, replica_header, tensor


def with_tensors(header: ModelHeader, *more: TensorInfo) -> ModelHeader:
    return dataclasses.replace(header, tensors=(*header.tensors, *more))


def test_every_deepseek_bundle_is_3264_mib() -> None:
    shape = model_shape(replica_header("deepseek-v4-flash-UD-Q8_K_XL"))
    assert [layer.bundle.file for layer in shape.layers] == [3264 * MIB] * 43
    assert shape.n_nextn == 0


def test_dynamic_quants_are_not_uniform() -> None:
    shape = model_shape(replica_header("deepseek-v4-flash-UD-IQ2_XXS"))
    assert (shape.layers[0].bundle.file, shape.layers[26].bundle.file, shape.layers[42].bundle.file) == (
        1840 * MIB,
        2400 * MIB,
        2144 * MIB,
    )


def test_biases_belong_to_the_bundle() -> None:
    header = replica_header("gpt-oss-120b-MXFP4")
    shape = model_shape(header)
    expected = sum(t.size_bytes for t in header.tensors if t.name.startswith("blk.0.ffn_") and "_exps." in t.name)
    assert shape.layers[0].bundle.file == expected
    assert expected / MIB == pytest.approx(1617.9, abs=0.1)


@pytest.mark.parametrize("prefix", [0, 1, 2, 3])
def test_dense_prefixes_are_found_by_tensors(prefix: int) -> None:
    shape = model_shape(moe_header([0] * prefix + [64] * 6, leading_dense_block_count=prefix))
    assert [layer.bundle.file > 0 for layer in shape.layers] == [False] * prefix + [True] * 6
    assert shape.warnings == ()


def test_an_interleaved_pattern_and_a_key_that_disagrees() -> None:
    shape = model_shape(moe_header([0, 64, 0, 64], leading_dense_block_count=0))
    assert [layer.bundle.file > 0 for layer in shape.layers] == [False, True, False, True]
    assert any("tensors decide" in w for w in shape.warnings)


def test_shared_experts_and_the_router_are_dense() -> None:
    header = moe_header([64] * 2)
    shexp = tensor("blk.0.ffn_up_shexp.weight", (1024, 1024), 24)
    router = tensor("blk.0.exp_probs_b.bias", (8,))
    before, after = model_shape(header), model_shape(with_tensors(header, shexp, router))
    assert after.layers[0].bundle == before.layers[0].bundle
    assert after.layers[0].dense.file - before.layers[0].dense.file == MIB + 32


def test_a_tied_embedding_is_budgeted_twice() -> None:
    header = moe_header([64] * 2)
    tied = dataclasses.replace(header, tensors=tuple(t for t in header.tensors if t.name != "output.weight"))
    shape = model_shape(tied)
    embedding = 1024 * 4096 * 4
    assert shape.tied
    assert shape.input.file == embedding
    assert shape.output.file == embedding + 4096


def test_legacy_expert_tensors_are_refused_with_the_name() -> None:
    header = with_tensors(moe_header([64] * 2), tensor("blk.1.ffn_gate.0.weight", (1024, 64), 24))
    with pytest.raises(ModelUnreadable) as caught:
        model_shape(header)
    assert caught.value.reference == "model-legacy-experts"
    assert "blk.1.ffn_gate.0.weight" in caught.value.message


def test_a_routed_tensor_outside_the_class_is_refused_with_the_name() -> None:
    header = with_tensors(moe_header([64] * 2), tensor("blk.1.ffn_wide_exps.weight", (1024, 64), 24))
    with pytest.raises(ModelUnreadable) as caught:
        model_shape(header)
    assert caught.value.reference == "model-unknown-experts"
    assert "ffn_wide_exps" in caught.value.message


def test_a_file_without_a_width_is_refused() -> None:
    header = moe_header([64])
    meta = {k: v for k, v in header.metadata.items() if "embedding_length" not in k}
    with pytest.raises(ModelUnreadable) as caught:
        model_shape(dataclasses.replace(header, metadata=meta))
    assert caught.value.reference == "model-no-width"


def test_a_file_without_layers_is_refused() -> None:
    header = moe_header([64])
    meta = {k: v for k, v in header.metadata.items() if "block_count" not in k}
    with pytest.raises(ModelUnreadable) as caught:
        model_shape(dataclasses.replace(header, metadata=meta))
    assert caught.value.reference == "model-no-layers"


@pytest.mark.parametrize(
    ("shape", "type_id", "expected"),
    [
        ((1024, 3), 0, (12288, 12288, 12288)),
        ((5,), 0, (20, 32, 128)),
        ((1408, 2), 8, (2992, 3008, 3200)),  # 1408 = 2 * 512 + 384: 128 more elements of q8_0 are 136 bytes
    ],
)
def test_tensors_are_padded_as_buffers_pad_them(
    shape: tuple[int, ...], type_id: int, expected: tuple[int, int, int]
) -> None:
    sizes = tensor_sizes(tensor("x", shape, type_id))
    assert (sizes.file, sizes.cpu, sizes.cuda) == expected
