"""Cache bytes against what the engine itself reported, and worked values that people published."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from launcher.planner import kv, model_shape
from launcher.planner.attention import Attention
from launcher.planner.shape import ModelShape
from launcher.structs import ModelHeader, Settings
from launcher.units import MIB
from tests.engine_rows import rows, shapes
from tests.models import moe_header, replica_header, tensor


def cache_bytes(shape: ModelShape, s: Settings) -> int:
    n_rs = kv.rollback_copies(shape, s)
    return sum(kv.layer_bytes(shape, layer, s, n_rs) for layer in shape.layers)


def test_every_row_of_the_engine_is_met_exactly() -> None:
    """Every breakdown: byte rows to the byte, MiB rows to the truncated number."""
    checked = 0
    for row in rows():
        if {"nkvo", "swafull"} & set(row.tag.split("-")):
            continue  # cache on the host or whole windows: flags that no plan of ours sets
        n_rs = kv.rollback_copies(row.shape, row.settings)
        per_layer = [kv.layer_bytes(row.shape, layer, row.settings, n_rs) for layer in row.shape.layers]
        places = [*range(len(row.devices)), None]
        for k in places:
            engine = row.host[1] if k is None else row.devices[k][1]
            if k is None and row.mib:
                continue  # several host buffers are truncated one by one
            ours = sum(n for i, n in enumerate(per_layer) if row.owned[i] == k)
            assert ours // row.unit == pytest.approx(engine, abs=1 if row.mib else 0), (row.model, row.tag, k)
            checked += 1
    assert checked > 1750


def test_deepseek_at_204800() -> None:
    """Five parts: raw window, ratio-4 cache, indexer, ratio-128 cache, states; and states times the draft depth."""
    shape = shapes()["DeepSeek-V4-Flash-0731-UD-Q8_K_XL"]
    for ub, depth, mib in ((512, 0, 1391.4), (2048, 0, 1455.9), (4096, 0, 1541.9), (4096, 5, 1600.1)):
        drafter = "draft-dspark" if depth else None
        s = Settings(n_ctx_per_stream=204800, n_batch=4096, n_ubatch=ub, drafter_type=drafter, draft_n_max=depth)
        assert cache_bytes(shape, s) / MIB == pytest.approx(mib, abs=0.1)
    four = Settings(n_ctx_per_stream=51200, n_parallel=4, n_batch=4096, n_ubatch=4096)
    assert cache_bytes(shape, four) / MIB == pytest.approx(2130, abs=1)
    unified = Settings(n_ctx_per_stream=51200, n_parallel=4, kv_unified=True, n_batch=4096, n_ubatch=4096)
    assert cache_bytes(shape, unified) / MIB == pytest.approx(6167.6, abs=0.1)


@pytest.mark.parametrize(
    ("type_k", "type_v", "mib"),
    [("f16", "f16", 3072), ("q8_0", "q8_0", 1632), ("f16", "q8_0", 2352), ("q4_0", "q4_0", 864)],
)
def test_qwen3_30b_at_32768(type_k: str, type_v: str, mib: int) -> None:
    s = Settings(n_ctx_per_stream=32768, type_k=type_k, type_v=type_v)
    assert cache_bytes(shapes()["Qwen3-30B-A3B-Q4_K_M"], s) == mib * MIB


def test_gpt_oss_windows_are_small() -> None:
    """gpt-oss-20b at 131072: 3 GiB of whole caches and at most 0.06 GiB of windows, not 6 GiB."""
    shape = shapes()["gpt-oss-20b-mxfp4"]
    s = Settings(n_ctx_per_stream=131072)
    full = sum(kv.layer_bytes(shape, x, s) for x in shape.layers if x.attention is Attention.FULL)
    window = sum(kv.layer_bytes(shape, x, s) for x in shape.layers if x.attention is Attention.SWA)
    assert full == 3072 * MIB
    assert 0 < window <= 0.06 * 1024 * MIB


def gemma3_270m(**keys: Any) -> ModelHeader:
    """18 layers, period 6, one KV head of 256, window 512."""
    base = moe_header([0] * 18)
    meta: dict[str, Any] = {
        "general.architecture": "gemma3",
        "gemma3.block_count": 18,
        "gemma3.embedding_length": 640,
        "gemma3.context_length": 32768,
        "gemma3.attention.head_count": 4,
        "gemma3.attention.head_count_kv": 1,
        "gemma3.attention.key_length": 256,
        "gemma3.attention.value_length": 256,
        "gemma3.attention.sliding_window": 512,
    }
    meta.update(keys)
    return ModelHeader(
        path="gemma", shards=(), metadata=meta, array_lengths=base.array_lengths, tensors=base.tensors, digest="g"
    )


@pytest.mark.parametrize(
    ("total", "n_parallel", "unified", "mib"),
    [(4096, 1, False, 27), (4096, 2, False, 42), (4096, 4, False, 72), (4096, 8, False, 72),
     (8192, 1, False, 39), (8192, 2, False, 54), (4096, 4, True, 49.5)],
)  # fmt: skip
def test_sliding_windows_with_slots(total: int, n_parallel: int, unified: bool, mib: float) -> None:
    """Published bit-exact values for Gemma-3-270m; a window never outgrows its stream."""
    shape = model_shape(gemma3_270m())
    s = Settings(n_ctx_per_stream=total // n_parallel, n_parallel=n_parallel, kv_unified=unified)
    assert cache_bytes(shape, s) == mib * MIB


def test_a_scalar_and_an_array_that_say_the_same_give_the_same() -> None:
    key = "gemma3.attention.head_count_kv"
    s = Settings(n_ctx_per_stream=8192)
    scalar, array = model_shape(gemma3_270m()), model_shape(gemma3_270m(**{key: (1,) * 18}))
    assert cache_bytes(scalar, s) == cache_bytes(array, s)
    pattern = tuple(i % 6 < 5 for i in range(18))
    explicit = model_shape(gemma3_270m(**{"gemma3.attention.sliding_window_pattern": pattern}))
    assert cache_bytes(explicit, s) == cache_bytes(scalar, s)


def test_windows_that_the_engine_overrules() -> None:
    """src/models of b11434: fixed sizes, or none at all, whatever the key says."""

    def window(arch: str, n_layer: int, **keys: int) -> int:
        meta = {f"{arch}.{k}": v for k, v in keys.items()} | {
            f"{arch}.block_count": n_layer,
            "general.architecture": arch,
        }
        base = moe_header([0] * n_layer)
        meta |= {f"{arch}.embedding_length": 1024, f"{arch}.attention.head_count": 8}
        return model_shape(dataclasses.replace(base, metadata=meta)).n_swa

    key = "attention.sliding_window"
    assert window("llama4", 4) == window("llama4", 4, **{key: 1024}) == 8192
    assert window("llama4", 4, **{key: 0}) == 0
    assert window("smallthinker", 4, **{key: 1024}) == 4096
    assert window("exaone4", 30, **{key: 4096}) == 0
    assert window("exaone4", 64) == 4096
    assert window("gemma2", 4) == 4096
    assert window("phi3", 4, **{key: 2048}) == 0


def test_without_flash_attention_every_v_row_is_as_wide_as_the_widest() -> None:
    header = gemma3_270m(**{"gemma3.attention.key_length_swa": 256, "gemma3.attention.value_length_swa": 64})
    shape = model_shape(header)
    on, off = Settings(n_ctx_per_stream=8192), Settings(n_ctx_per_stream=8192, flash_attn="off")
    window = next(x for x in shape.layers if x.attention is Attention.SWA)
    assert (window.width_k, window.width_v, shape.widest_v) == (256, 64, 256)
    assert kv.layer_bytes(shape, window, off) * 320 == kv.layer_bytes(shape, window, on) * 512


def test_layers_without_kv_heads_have_no_cache() -> None:
    """LFM2: head_count_kv is an array with zeros for convolution layers; 384 MiB at 32768, not 0 and not 1024."""
    heads = (0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0)
    base = moe_header([0] * 16)
    meta = {
        "general.architecture": "lfm2",
        "lfm2.block_count": 16,
        "lfm2.embedding_length": 2048,
        "lfm2.attention.head_count": 32,
        "lfm2.attention.head_count_kv": heads,
        "lfm2.shortconv.l_cache": 3,
    }
    header = ModelHeader(path="l", shards=(), metadata=meta, array_lengths={}, tensors=base.tensors, digest="l")
    shape = model_shape(header)
    attention = sum(
        kv.layer_bytes(shape, x, Settings(n_ctx_per_stream=32768))
        for x in shape.layers
        if x.attention is Attention.FULL
    )
    assert attention == 384 * MIB
    assert cache_bytes(shape, Settings(n_ctx_per_stream=65536)) > cache_bytes(shape, Settings(n_ctx_per_stream=32768))


def test_a_missing_key_length_falls_back_and_says_so() -> None:
    header = moe_header([0] * 4)
    meta = {k: v for k, v in header.metadata.items() if not k.endswith(("key_length", "value_length"))}
    shape = model_shape(
        ModelHeader(path="x", shards=(), metadata=meta, array_lengths={}, tensors=header.tensors, digest="x")
    )
    assert shape.key_length_source == "embedding_length / head_count"
    assert shape.layers[0].width_k == 1024 // 8 * 2
    for key in ("attention.head_count", "attention.head_count_kv"):
        meta.pop(f"qwen3moe.{key}")
    shape = model_shape(
        ModelHeader(path="x", shards=(), metadata=meta, array_lengths={}, tensors=header.tensors, digest="x")
    )
    assert shape.key_length_source == "attn_k shape"
    assert shape.layers[0].width_k == 256


def test_nextn_blocks_cost_nothing_until_they_are_asked_for() -> None:
    header = replica_header("glm-4.5-air-Q4_K_M")
    without, with_mtp = model_shape(header), model_shape(header, mtp=True)
    last = without.n_layer - 1
    assert without.n_nextn == 1
    assert not without.layers[last].loaded
    assert without.layers[last].dense.file == without.layers[last].bundle.file == 0
    assert with_mtp.layers[last].bundle.file > 0
    s = Settings(n_ctx_per_stream=32768, drafter_type="draft-mtp", draft_n_max=1)
    assert cache_bytes(without, s) == cache_bytes(with_mtp, s)
    assert kv.mtp_layer_bytes(with_mtp, with_mtp.layers[last], s) == 128 * MIB


def test_a_checkpoint_is_what_a_prompt_cannot_rebuild() -> None:
    flash = shapes()["DeepSeek-V4-Flash-0731-UD-Q8_K_XL"]
    s = Settings(n_ctx_per_stream=204800, n_batch=4096, n_ubatch=4096)
    assert 183 * MIB < kv.checkpoint_bytes(flash, s, 5) < 256 * MIB
    assert kv.checkpoint_bytes(shapes()["Qwen3-30B-A3B-Q4_K_M"], s, 0) == 0


def test_a_linear_attention_layer_is_known_by_its_convolution() -> None:
    """Kimi-Linear calls projections of its recurrent layers attn_*; Falcon-H1 has cache and state in every layer."""
    base = moe_header([0] * 2)
    conv = tensor("blk.1.ssm_conv1d_q.weight", (4, 512))

    def shape(arch: str, **keys: int) -> ModelShape:
        meta = {f"{arch}.{k}": v for k, v in keys.items()} | {"general.architecture": arch, f"{arch}.block_count": 2}
        meta |= {
            f"{arch}.embedding_length": 1024,
            f"{arch}.attention.head_count": 8,
            f"{arch}.attention.head_count_kv": 2,
        }
        return model_shape(dataclasses.replace(base, metadata=meta, tensors=(*base.tensors, conv)))

    kda = shape("kimi-linear", **{"kda.head_dim": 128, "ssm.conv_kernel": 4})
    assert [x.attention for x in kda.layers] == [Attention.FULL, Attention.RECURRENT]
    s = Settings(n_ctx_per_stream=8192)
    assert kv.layer_bytes(kda, kda.layers[1], s) == (3 * 3 * 8 * 128 + 128 * 128 * 8) * 4
    both = shape(
        "falcon-h1", **{"ssm.conv_kernel": 4, "ssm.inner_size": 1024, "ssm.state_size": 64, "ssm.group_count": 1}
    )
    assert both.layers[1].attention is Attention.PARALLEL
    state = (3 * (1024 + 128) + 64 * 1024) * 4
    assert kv.layer_bytes(both, both.layers[1], s) == 2 * 256 * 2 * 8192 + state


def test_an_unknown_window_is_priced_in_full_and_labelled() -> None:
    header = moe_header([0] * 4, **{"attention.sliding_window": 128})
    shape = model_shape(header)
    assert any("sliding window" in w for w in shape.warnings)
    plain = model_shape(moe_header([0] * 4))
    s = Settings(n_ctx_per_stream=8192)
    assert cache_bytes(shape, s) == cache_bytes(plain, s)


def indexed(arch: str, **keys: Any) -> ModelShape:
    """Four layers of an architecture with a lightning indexer of 128, MLA rows of 576."""
    base = moe_header([0] * 4)
    meta: dict[str, Any] = {
        "general.architecture": arch,
        f"{arch}.block_count": 4,
        f"{arch}.embedding_length": 1024,
        f"{arch}.attention.head_count": 8,
        f"{arch}.attention.head_count_kv": 1,
        f"{arch}.attention.key_length": 576,
        f"{arch}.attention.value_length": 512,
        f"{arch}.attention.key_length_mla": 192,
        f"{arch}.attention.value_length_mla": 128,
        f"{arch}.attention.indexer.key_length": 128,
    }
    meta.update({f"{arch}.{k}": v for k, v in keys.items()})
    return model_shape(dataclasses.replace(base, metadata=meta))


def test_an_indexer_keeps_one_more_key_row_on_the_layers_that_have_one() -> None:
    s = Settings(n_ctx_per_stream=8192)
    every = indexed("deepseek32")
    assert cache_bytes(every, s) == 4 * (576 + 128) * 2 * 8192
    some = indexed("glm-dsa", **{"attention.indexer.types": (1, 0, 0, 1)})
    assert cache_bytes(some, s) == (4 * 576 + 2 * 128) * 2 * 8192
    assert any("use a dry run" in w for w in every.warnings)
