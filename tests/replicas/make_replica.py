#!/usr/bin/env python3
"""Write a header-exact *sparse replica* of a GGUF model.

    python make_replica.py SPEC.yaml OUTDIR [--split N] [--scale tiny]
                           [--single] [--quiet]

The replica has the metadata and the tensor list (names, shapes, quant types,
offsets, shard layout) that SPEC.yaml describes; the data section is a hole made
by ftruncate, so a 151 GB model costs a few MB of disk.  It can be listed,
planned, dry-run (`llama-fit-params`, no_alloc) and even mmap-ed; running it
would compute on zeros.

SPEC.yaml (see specs/*.yaml)
    name, arch
    general:  {..}            general.* strings, in order
    kv:       {..}            arch keys without the arch prefix, in file order;
                              int -> u32, float -> f32, bool, str, list -> array
    layout:   {..}            tensor-list choices that no key tells
    vocab:    {model, pre, n_tokens, n_merges, bos, eos, ...}
    quant:
      mix: Q4_K_M             the llama-quantize mix, or `explicit`
      fallback: legacy|b11434 what Q2_K/Q3_K become when a row is not 256-wide
      types: [[regex, TYPE], ..]                 first match wins, before the mix
      layers: [{layers: [26], match: re, type: T}, ..]   before `types`
    split:    {max_bytes: 50e9, no_tensor_first: true}   or absent
    order:    quantize (default) | build
    expect:   {tensors, types: {F32: n, ..}, data_gib, file_gib, ...}

The module is also a library: `build(spec)` returns (kv list, tensor list) and
`write(...)` writes them; make_tiny.py uses both.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import struct
import sys
from collections import Counter
from dataclasses import dataclass

import yaml
from gguf.constants import GGML_QUANT_SIZES, LlamaFileType, TokenType
from gguf.constants import GGMLQuantizationType as Q
from gguf.constants import GGUFValueType as VT

ALIGN = 32
MAGIC = b"GGUF"


# --------------------------------------------------------------------------
# tensors
# --------------------------------------------------------------------------
@dataclass
class Tensor:
    name: str
    shape: tuple[int, ...]  # ggml order: shape[0] is the row length
    qtype: Q = Q.F32
    offset: int = 0  # within the data section of its file
    file: int = 0

    @property
    def layer(self) -> int:
        m = re.match(r"blk\.(\d+)\.", self.name)
        return int(m.group(1)) if m else -1

    @property
    def n_dims(self) -> int:  # as ggml counts: trailing ones do not count
        n = len(self.shape)
        while n > 1 and self.shape[n - 1] == 1:
            n -= 1
        return n

    @property
    def nbytes(self) -> int:
        blk, size = GGML_QUANT_SIZES[self.qtype]
        if self.shape[0] % blk:
            raise ValueError(f"{self.name}: row {self.shape[0]} is not a multiple of {blk} ({self.qtype.name})")
        n = self.shape[0] // blk * size
        for d in self.shape[1:]:
            n *= d
        return n


class K:
    """The arch keys of a spec, with defaults."""

    def __init__(self, spec: dict):
        self.kv = spec["kv"]
        self.layout = spec.get("layout") or {}
        self.n_vocab = spec["vocab"]["n_tokens"]

    def __call__(self, key: str, default=None):
        return self.kv.get(key, default)

    @property
    def L(self):
        return self("block_count")

    @property
    def E(self):
        return self("embedding_length")

    @property
    def heads(self):
        return self("attention.head_count")

    @property
    def kvh(self):
        return self("attention.head_count_kv", self.heads)

    @property
    def hd(self):
        return self("attention.key_length", self.E // self.heads)

    @property
    def hdv(self):
        return self("attention.value_length", self.E // self.heads)

    @property
    def nextn(self):
        return self("nextn_predict_layers", 0)

    @property
    def experts(self):
        return self("expert_count", 0)


class B:
    """Collects (name, shape, special type) in build order."""

    def __init__(self, k: K):
        self.k = k
        self.out: list[Tensor] = []
        self.forced: dict[str, Q] = {}

    def t(self, name: str, *shape: int, as_: Q | None = None):
        self.out.append(Tensor(name, tuple(int(x) for x in shape)))
        if as_ is not None:
            self.forced[name] = as_

    # -- common groups ----------------------------------------------------
    def head(self, output=True, embd=True):
        k = self.k
        if embd:
            self.t("token_embd.weight", k.E, k.n_vocab)
        self.t("output_norm.weight", k.E)
        if output:
            self.t("output.weight", k.E, k.n_vocab)

    def gqa(self, i, *, bias=False, out_bias=False, q_mult=1):
        k, p = self.k, f"blk.{i}."
        self.t(p + "attn_q.weight", k.E, k.hd * k.heads * q_mult)
        self.t(p + "attn_k.weight", k.E, k.hd * k.kvh)
        self.t(p + "attn_v.weight", k.E, k.hdv * k.kvh)
        if bias:
            self.t(p + "attn_q.bias", k.hd * k.heads)
            self.t(p + "attn_k.bias", k.hd * k.kvh)
            self.t(p + "attn_v.bias", k.hdv * k.kvh)
        self.t(p + "attn_output.weight", k.hdv * k.heads, k.E)
        if out_bias:
            self.t(p + "attn_output.bias", k.E)

    def dense(self, i, ff):
        k, p = self.k, f"blk.{i}."
        self.t(p + "ffn_gate.weight", k.E, ff)
        self.t(p + "ffn_up.weight", k.E, ff)
        self.t(p + "ffn_down.weight", ff, k.E)

    def exps(self, i, ff, *, bias=False):
        k, p, n = self.k, f"blk.{i}.", self.k.experts
        self.t(p + "ffn_gate_exps.weight", k.E, ff, n)
        self.t(p + "ffn_up_exps.weight", k.E, ff, n)
        self.t(p + "ffn_down_exps.weight", ff, k.E, n)
        if bias:
            self.t(p + "ffn_gate_exps.bias", ff, n)
            self.t(p + "ffn_up_exps.bias", ff, n)
            self.t(p + "ffn_down_exps.bias", k.E, n)

    def shexp(self, i, ff):
        k, p = self.k, f"blk.{i}."
        self.t(p + "ffn_gate_shexp.weight", k.E, ff)
        self.t(p + "ffn_up_shexp.weight", k.E, ff)
        self.t(p + "ffn_down_shexp.weight", ff, k.E)

    def router(self, i, *, bias=False, probs_b=False):
        k, p = self.k, f"blk.{i}."
        self.t(p + "ffn_gate_inp.weight", k.E, k.experts)
        if bias:
            self.t(p + "ffn_gate_inp.bias", k.experts)
        if probs_b:
            self.t(p + "exp_probs_b.bias", k.experts)

    def nextn_block(self, i):
        k, p = self.k, f"blk.{i}.nextn."
        self.t(p + "eh_proj.weight", 2 * k.E, k.E)
        self.t(p + "enorm.weight", k.E)
        self.t(p + "hnorm.weight", k.E)
        if k.layout.get("nextn_embed_head", True):
            self.t(p + "embed_tokens.weight", k.E, k.n_vocab)
            self.t(p + "shared_head_head.weight", k.E, k.n_vocab)
        self.t(p + "shared_head_norm.weight", k.E)


def arch_qwen3(b: B):
    k = b.k
    b.head()
    for i in range(k.L):
        p = f"blk.{i}."
        b.t(p + "attn_norm.weight", k.E)
        b.gqa(i)
        b.t(p + "attn_q_norm.weight", k.hd)
        b.t(p + "attn_k_norm.weight", k.hd)
        b.t(p + "ffn_norm.weight", k.E)
        b.dense(i, k("feed_forward_length"))


def arch_qwen3moe(b: B):
    k = b.k
    b.head()
    for i in range(k.L):
        p = f"blk.{i}."
        b.t(p + "attn_norm.weight", k.E)
        b.gqa(i)
        b.t(p + "attn_q_norm.weight", k.hd)
        b.t(p + "attn_k_norm.weight", k.hd)
        b.t(p + "ffn_norm.weight", k.E)
        b.router(i)
        b.exps(i, k("expert_feed_forward_length"))


def arch_gpt_oss(b: B):
    k = b.k
    b.head()
    for i in range(k.L):
        p = f"blk.{i}."
        b.t(p + "attn_norm.weight", k.E)
        b.gqa(i, bias=True, out_bias=True)
        b.t(p + "attn_sinks.weight", k.heads)
        b.t(p + "post_attention_norm.weight", k.E)
        b.router(i, bias=True)
        b.exps(i, k("expert_feed_forward_length"), bias=True)


def arch_glm4moe(b: B):
    k = b.k
    b.head()
    ff = k("expert_feed_forward_length")
    for i in range(k.L):
        p = f"blk.{i}."
        b.t(p + "attn_norm.weight", k.E)
        b.gqa(i, bias=True)
        if k.layout.get("qk_norm"):
            b.t(p + "attn_q_norm.weight", k.hd)
            b.t(p + "attn_k_norm.weight", k.hd)
        b.t(p + "post_attention_norm.weight", k.E)
        if i < k("leading_dense_block_count"):
            b.dense(i, k("feed_forward_length"))
        else:
            b.router(i, probs_b=True)
            b.exps(i, ff)
            b.shexp(i, ff * k("expert_shared_count"))
        if i >= k.L - k.nextn:
            b.nextn_block(i)


def arch_deepseek2(b: B):
    k = b.k
    b.head()
    ql, kl = k("attention.q_lora_rank"), k("attention.kv_lora_rank")
    rope = k("rope.dimension_count")
    kmla, vmla = k("attention.key_length_mla"), k("attention.value_length_mla")
    ff = k("expert_feed_forward_length")
    for i in range(k.L):
        p = f"blk.{i}."
        b.t(p + "attn_norm.weight", k.E)
        b.t(p + "attn_q_a.weight", k.E, ql)
        b.t(p + "attn_q_a_norm.weight", ql)
        b.t(p + "attn_q_b.weight", ql, k.heads * kmla)
        b.t(p + "attn_kv_a_mqa.weight", k.E, kl + rope)
        b.t(p + "attn_kv_a_norm.weight", kl)
        b.t(p + "attn_k_b.weight", kmla - rope, kl, k.heads)
        b.t(p + "attn_v_b.weight", kl, vmla, k.heads)
        b.t(p + "attn_output.weight", k.heads * vmla, k.E)
        b.t(p + "ffn_norm.weight", k.E)
        if i < k("leading_dense_block_count"):
            b.dense(i, k("feed_forward_length"))
        else:
            b.router(i, probs_b=True)
            b.exps(i, ff)
            b.shexp(i, ff * k("expert_shared_count"))


def arch_llama(b: B):
    k = b.k
    b.head()
    for i in range(k.L):
        p = f"blk.{i}."
        b.t(p + "attn_norm.weight", k.E)
        b.gqa(i)
        b.t(p + "ffn_norm.weight", k.E)
        if k.experts:
            b.router(i)
            b.exps(i, k("feed_forward_length"))
        else:
            b.dense(i, k("feed_forward_length"))


def arch_qwen3next(b: B):
    k = b.k
    b.head()
    st, g = k("ssm.state_size"), k("ssm.group_count")
    dt, conv = k("ssm.time_step_rank"), k("ssm.conv_kernel")
    key_dim, val_dim = st * g, st * dt
    step = k("full_attention_interval", 4)
    for i in range(k.L):
        p = f"blk.{i}."
        b.t(p + "attn_norm.weight", k.E)
        b.t(p + "post_attention_norm.weight", k.E)
        if (i + 1) % step == 0:
            b.gqa(i, q_mult=2)
            b.t(p + "attn_q_norm.weight", k.hd)
            b.t(p + "attn_k_norm.weight", k.hd)
        else:
            if k.layout.get("ssm_in", "legacy") == "legacy":
                b.t(p + "ssm_in.weight", k.E, 2 * key_dim + 2 * val_dim)
            else:
                b.t(p + "attn_qkv.weight", k.E, 2 * key_dim + val_dim)
                b.t(p + "attn_gate.weight", k.E, val_dim)
            b.t(p + "ssm_conv1d.weight", conv, 2 * key_dim + val_dim)
            b.t(p + "ssm_dt.bias", dt)
            b.t(p + "ssm_a", dt)
            b.t(p + "ssm_ba.weight", k.E, 2 * dt)
            b.t(p + "ssm_norm.weight", st)
            b.t(p + "ssm_out.weight", val_dim, k.E)
        b.router(i)
        b.exps(i, k("expert_feed_forward_length"))
        sh = k.layout.get("gate_inp_shexp_type", "F32")
        b.t(p + "ffn_gate_inp_shexp.weight", k.E, as_=Q[sh])
        b.shexp(i, k("expert_shared_feed_forward_length"))


def arch_minimax_m2(b: B):
    k = b.k
    b.head()
    for i in range(k.L):
        p = f"blk.{i}."
        b.t(p + "attn_norm.weight", k.E)
        b.gqa(i)
        b.t(p + "attn_q_norm.weight", k.hd * k.heads)
        b.t(p + "attn_k_norm.weight", k.hd * k.kvh)
        b.t(p + "ffn_norm.weight", k.E)
        b.router(i, probs_b=True)
        b.exps(i, k("feed_forward_length"))


def arch_llama4(b: B):
    k = b.k
    b.head()
    if k.layout.get("rope_freqs", True):
        b.t("rope_freqs.weight", k("rope.dimension_count") // 2)
    step = k("interleave_moe_layer_step")
    ff = k("expert_feed_forward_length")
    for i in range(k.L):
        p = f"blk.{i}."
        b.t(p + "attn_norm.weight", k.E)
        b.gqa(i)
        b.t(p + "ffn_norm.weight", k.E)
        if step and (i + 1) % step == 0:
            b.router(i)
            b.exps(i, ff)
            b.shexp(i, ff)
        else:
            b.dense(i, k("feed_forward_length"))


def arch_olmoe(b: B):
    k = b.k
    b.head()
    for i in range(k.L):
        p = f"blk.{i}."
        b.t(p + "attn_norm.weight", k.E)
        b.gqa(i)
        b.t(p + "attn_q_norm.weight", k.E)
        b.t(p + "attn_k_norm.weight", k.E)
        b.t(p + "ffn_norm.weight", k.E)
        b.router(i)
        b.exps(i, k("feed_forward_length"))


def _dsv4_block(b: B, i: int, ratio: int, hashed: bool):
    """One DeepSeek-V4 block (trunk layer or DSpark stage)."""
    k, p = b.k, f"blk.{i}."
    ql, hd, heads = k("attention.q_lora_rank"), k.hd, k.heads
    og, ol = k("attention.output_group_count"), k("attention.output_lora_rank")
    hc = k("hyper_connection.count")
    ff = k("expert_feed_forward_length")
    b.t(p + "attn_norm.weight", k.E)
    b.t(p + "attn_sinks.weight", heads)
    b.t(p + "attn_q_a.weight", k.E, ql)
    b.t(p + "attn_q_a_norm.weight", ql)
    b.t(p + "attn_q_b.weight", ql, heads * hd)
    b.t(p + "attn_kv.weight", k.E, hd)
    b.t(p + "attn_kv_a_norm.weight", hd)
    b.t(p + "attn_output_a.weight", heads * hd // og, ol * og)
    b.t(p + "attn_output_b.weight", og * ol, k.E)
    for part in ("attn", "ffn"):
        b.t(p + f"hc_{part}_fn.weight", hc * k.E, (2 + hc) * hc, as_=Q.F32)
        b.t(p + f"hc_{part}_base.weight", (2 + hc) * hc)
        b.t(p + f"hc_{part}_scale.weight", 3)
    if ratio:
        coff = 2 if ratio == 4 else 1
        b.t(p + "attn_compressor_kv.weight", k.E, coff * hd)
        b.t(p + "attn_compressor_gate.weight", k.E, coff * hd)
        b.t(p + "attn_compressor_ape.weight", coff * hd, ratio, as_=Q.F32)
        b.t(p + "attn_compressor_norm.weight", hd)
        if ratio == 4:
            ih, ik = k("attention.indexer.head_count"), k("attention.indexer.key_length")
            b.t(p + "indexer.proj.weight", k.E, ih)
            b.t(p + "indexer.attn_q_b.weight", ql, ih * ik)
            b.t(p + "indexer_compressor_kv.weight", k.E, 2 * ik)
            b.t(p + "indexer_compressor_gate.weight", k.E, 2 * ik)
            b.t(p + "indexer_compressor_ape.weight", 2 * ik, ratio, as_=Q.F32)
            b.t(p + "indexer_compressor_norm.weight", ik)
    b.t(p + "ffn_gate_inp.weight", k.E, k.experts)
    if hashed:
        b.t(p + "ffn_gate_tid2eid.weight", k("expert_used_count"), k.n_vocab, as_=Q.I32)
    else:
        b.t(p + "exp_probs_b.bias", k.experts)
    b.t(p + "ffn_norm.weight", k.E)
    b.exps(i, ff)
    b.shexp(i, ff * k("expert_shared_count"))


def _dsv4_hc_head(b: B):
    k = b.k
    hc = k("hyper_connection.count")
    b.t("output_hc_fn.weight", hc * k.E, hc, as_=Q.F32)
    b.t("output_hc_base.weight", hc)
    b.t("output_hc_scale.weight", 1)


def arch_deepseek4(b: B):
    k = b.k
    b.head()
    _dsv4_hc_head(b)
    ratios = k("attention.compress_ratios")
    for i in range(k.L):
        _dsv4_block(b, i, ratios[i], i < k("hash_layer_count"))


def arch_dflash(b: B):
    """DeepSeek-V4 DSpark drafter: DSV4 stages + fusion + Markov/confidence heads."""
    k = b.k
    n_tgt = len(k("target_layers"))
    rank = k.layout["markov_rank"]
    b.t("fc.weight", n_tgt * k.E, k.E)
    b.t("enc.output_norm.weight", k.E)
    b.t("output_norm.weight", k.E)
    _dsv4_hc_head(b)
    b.t("markov_w1.weight", rank, k.n_vocab)
    b.t("markov_w2.weight", rank, k.n_vocab)
    b.t("conf_proj.weight", k.E + rank, 1)
    for i in range(k.L):
        _dsv4_block(b, i, 0, False)


ARCHS = {
    "qwen3": arch_qwen3,
    "qwen3moe": arch_qwen3moe,
    "gpt-oss": arch_gpt_oss,
    "glm4moe": arch_glm4moe,
    "deepseek2": arch_deepseek2,
    "llama": arch_llama,
    "qwen3next": arch_qwen3next,
    "minimax-m2": arch_minimax_m2,
    "llama4": arch_llama4,
    "olmoe": arch_olmoe,
    "deepseek4": arch_deepseek4,
    "dflash": arch_dflash,
}


# --------------------------------------------------------------------------
# quant types: what llama-quantize's mixes do, by tensor role and layer
# --------------------------------------------------------------------------
BASE = {  # mix -> the type most 2D/3D weights get
    "Q2_K": Q.Q2_K,
    "Q3_K_M": Q.Q3_K,
    "Q4_K_S": Q.Q4_K,
    "Q4_K_M": Q.Q4_K,
    "Q5_K_M": Q.Q5_K,
    "Q6_K": Q.Q6_K,
    "Q8_0": Q.Q8_0,
    "IQ2_XXS": Q.IQ2_XXS,
    "IQ4_XS": Q.IQ4_XS,
    "F16": Q.F16,
    "BF16": Q.BF16,
}
FTYPE = {  # general.file_type
    "Q2_K": LlamaFileType.MOSTLY_Q2_K,
    "Q3_K_M": LlamaFileType.MOSTLY_Q3_K_M,
    "Q4_K_S": LlamaFileType.MOSTLY_Q4_K_S,
    "Q4_K_M": LlamaFileType.MOSTLY_Q4_K_M,
    "Q5_K_M": LlamaFileType.MOSTLY_Q5_K_M,
    "Q6_K": LlamaFileType.MOSTLY_Q6_K,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "IQ2_XXS": LlamaFileType.MOSTLY_IQ2_XXS,
    "IQ4_XS": LlamaFileType.MOSTLY_IQ4_XS,
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
}


def _narrow(q: Q, row: int, style: str) -> Q:
    """The stand-in type for rows that are not a multiple of 256."""
    if row % GGML_QUANT_SIZES[q][0] == 0:
        return q
    low = Q.Q4_0 if style == "b11434" else Q.IQ4_NL
    sub = {Q.Q2_K: low, Q.Q3_K: low, Q.Q4_K: Q.Q5_0, Q.Q5_K: Q.Q5_1, Q.Q6_K: Q.Q8_0}
    r = sub.get(q, Q.IQ4_NL)
    return r if row % GGML_QUANT_SIZES[r][0] == 0 else Q.F16


def _quantizable(t: Tensor) -> bool:
    n = t.name
    if t.n_dims < 2 or not n.endswith("weight") or n.endswith("_norm.weight"):
        return False
    return not any(s in n for s in ("ffn_gate_inp.weight", "tid2eid", "ssm_conv1d", "altup", "laurel"))


def _role(n: str) -> str:
    for key, role in (
        ("token_embd", "embd"),
        ("attn_qkv.weight", "v"),
        ("attn_kv_b.weight", "v"),
        ("attn_v.weight", "v"),
        ("attn_k.weight", "k"),
        ("attn_q.weight", "q"),
        ("attn_output.weight", "o"),
        ("ffn_up", "up"),
        ("ffn_gate", "gate"),
        ("ffn_down", "down"),
    ):
        if key in n:
            return role
    return "out" if n == "output.weight" else "other"


def apply_mix(tensors: list[Tensor], mix: str, k: K, style: str) -> None:
    """Types for one llama-quantize mix. `tensors` must be in quantize order."""
    base = BASE[mix]
    n_layer = k.L
    eight = k.experts == 8
    gqa = k.heads // max(1, k.kvh)
    todo = [t for t in tensors if _quantizable(t)]
    n_v = sum(_role(t.name) == "v" for t in todo)
    i_v = i_down = 0
    tied = not any(t.name == "output.weight" for t in todo)

    def more(i, n):  # the layers that get the better type
        return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2

    for t in todo:
        role, q = _role(t.name), base
        if mix in ("F16", "BF16"):
            t.qtype = base
            continue
        if role == "out" or (tied and role == "embd"):
            q = Q.Q5_K if mix.startswith("IQ2") else (Q.Q8_0 if mix == "Q8_0" else Q.Q6_K)
            if t.shape[0] % 256:
                q = Q.Q8_0
        elif role == "embd":
            q = Q.Q2_K if mix == "IQ2_XXS" else base
        elif mix == "IQ2_XXS":
            if role == "v":
                q = Q.Q4_K if gqa >= 4 or k.experts >= 4 else Q.Q2_K
            elif role == "k" and eight:
                q = Q.Q4_K
            elif role == "down":
                q = Q.Q2_K if i_down < n_layer // 8 else base
                i_down += 1
            elif role == "o" and eight:
                q = Q.Q5_K
        elif role == "v":
            if mix == "Q2_K":
                q = Q.Q4_K if gqa >= 4 else Q.Q3_K
            elif mix == "Q3_K_M":
                q = Q.Q5_K if i_v < 2 else Q.Q4_K
            elif mix in ("Q4_K_M", "Q5_K_M") and more(i_v, n_v):
                q = Q.Q6_K
            elif mix == "Q4_K_S" and i_v < 4:
                q = Q.Q5_K
            elif mix == "IQ4_XS" and gqa >= 4:
                q = Q.Q5_K
            if eight:
                q = Q.Q8_0
            i_v += 1
        elif role == "k" and eight:
            q = Q.Q8_0
        elif role == "down":
            i = t.layer
            if mix == "Q2_K":
                q = Q.Q3_K
            elif mix == "Q3_K_M":
                q = Q.Q5_K if i < n_layer // 16 else Q.Q4_K
            elif mix in ("Q4_K_M", "Q5_K_M") and more(i, n_layer):
                q = Q.Q6_K
            elif mix == "Q4_K_S" and i < n_layer // 8:
                q = Q.Q5_K
        elif role == "o":
            if eight and mix in ("Q2_K", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_XS"):
                q = Q.Q5_K
            elif not eight:
                q = {"Q2_K": Q.Q3_K, "Q3_K_M": Q.Q4_K}.get(mix, base)
        t.qtype = _narrow(q, t.shape[0], style)


# --------------------------------------------------------------------------
# synthetic vocabulary of the real size
# --------------------------------------------------------------------------
def byte_chars() -> list[str]:
    """The 256 printable stand-ins that byte-level BPE uses, by byte value."""
    keep = set(range(33, 127)) | set(range(161, 173)) | set(range(174, 256))
    out, extra = [], 0
    for b in range(256):
        if b in keep:
            out.append(chr(b))
        else:
            out.append(chr(256 + extra))
            extra += 1
    return out


def synth_bpe(n_tokens: int, n_merges: int, specials: dict[int, str], seed: int = 7):
    """(tokens, types, merges): 256 bytes, then one token per merge rule, then fillers."""
    rng = random.Random(seed)
    base = byte_chars()
    fixed = {i: s for i, s in specials.items() if 0 <= i < n_tokens}
    room = n_tokens - len(fixed) - len(base)
    n_prim = max(0, min(n_merges, room))
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words, seen, merges = list(letters) + ["\u0120"], set(base), []
    grown = []
    while len(grown) < n_prim:
        a = words[int(len(words) * rng.random() ** 0.7)]
        if len(a) > 14:
            continue
        c = letters[int(26 * rng.random() ** 1.5)]
        w = a + c
        if w in seen:
            continue
        seen.add(w)
        words.append(w)
        grown.append(w)
        merges.append(a + " " + c)
    j = 0
    while len(merges) < n_merges and grown:  # second ways to reach the same token
        w = grown[j % len(grown)]
        j += 1
        if len(w) > 2:
            cut = 1 + (j // len(grown)) % (len(w) - 2)
            merges.append(w[:cut] + " " + w[cut:])
    pool = iter(base + grown)
    tokens, types = [], []
    for i in range(n_tokens):
        if i in fixed:
            tokens.append(fixed[i])
            types.append(int(TokenType.CONTROL))
            continue
        w = next(pool, None)
        if w is None:
            tokens.append(f"[PAD{i}]")
            types.append(int(TokenType.UNUSED))
        else:
            tokens.append(w)
            types.append(int(TokenType.NORMAL))
    return tokens, types, merges


def synth_spm(n_tokens: int, seed: int = 7):
    """(tokens, types, scores) in the sentencepiece layout: unk/bos/eos, bytes, pieces."""
    rng = random.Random(seed)
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    types = [int(TokenType.UNKNOWN), int(TokenType.CONTROL), int(TokenType.CONTROL)] + [int(TokenType.BYTE)] * 256
    tokens, types = tokens[:n_tokens], types[:n_tokens]
    scores = [0.0] * len(tokens)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words, seen = ["\u2581"] + list(letters), set()
    for w in words:
        if len(tokens) < n_tokens:
            tokens.append(w), types.append(int(TokenType.NORMAL)), scores.append(-float(len(tokens)))
            seen.add(w)
    while len(tokens) < n_tokens:
        a = words[int(len(words) * rng.random() ** 0.7)]
        w = a + letters[int(26 * rng.random() ** 1.5)]
        if w in seen or len(w) > 14:
            continue
        seen.add(w)
        words.append(w)
        tokens.append(w), types.append(int(TokenType.NORMAL)), scores.append(-float(len(tokens)))
    return tokens, types, scores


TEMPLATE = (
    "{%- for m in messages -%}<|{{ m['role'] }}|>{{ m['content'] }}\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def vocab_kv(v: dict) -> list[tuple]:
    T = "tokenizer.ggml."
    kv: list[tuple] = [(T + "model", VT.STRING, v["model"])]
    if v.get("pre"):
        kv.append((T + "pre", VT.STRING, v["pre"]))
    n = v["n_tokens"]
    if v["model"] == "llama":
        tokens, types, scores = synth_spm(n)
        kv += [
            (T + "tokens", (VT.ARRAY, VT.STRING), tokens),
            (T + "scores", (VT.ARRAY, VT.FLOAT32), scores),
            (T + "token_type", (VT.ARRAY, VT.INT32), types),
        ]
    else:
        sp = {}
        for key, text in (
            ("bos", "<|begin_of_text|>"),
            ("eos", "<|end_of_text|>"),
            ("eot", "<|eot|>"),
            ("eom", "<|eom|>"),
            ("unk", "<|unk|>"),
            ("pad", "<|pad|>"),
            ("mask", "<|mask|>"),
        ):
            if v.get(key) is not None and v[key] not in sp:
                sp[v[key]] = text
        for i, s in (v.get("specials") or {}).items():
            sp[int(i)] = s
        tokens, types, merges = synth_bpe(n, v.get("n_merges", 0), sp)
        kv += [
            (T + "tokens", (VT.ARRAY, VT.STRING), tokens),
            (T + "token_type", (VT.ARRAY, VT.INT32), types),
            (T + "merges", (VT.ARRAY, VT.STRING), merges),
        ]
    for key, name in (
        ("bos", "bos"),
        ("eos", "eos"),
        ("eot", "eot"),
        ("eom", "eom"),
        ("unk", "unknown"),
        ("pad", "padding"),
        ("mask", "mask"),
    ):
        if v.get(key) is not None:
            kv.append((T + name + "_token_id", VT.UINT32, v[key]))
    for key in ("add_bos", "add_eos"):
        if v.get(key) is not None:
            kv.append((T + key + "_token", VT.BOOL, bool(v[key])))
    if v.get("add_space_prefix") is not None:
        kv.append((T + "add_space_prefix", VT.BOOL, bool(v["add_space_prefix"])))
    if v.get("template", True):
        kv.append(("tokenizer.chat_template", VT.STRING, TEMPLATE))
    return kv


# --------------------------------------------------------------------------
# spec -> (kv, tensors)
# --------------------------------------------------------------------------
def infer(value):
    if isinstance(value, bool):
        return VT.BOOL
    if isinstance(value, int):
        return VT.UINT32
    if isinstance(value, float):
        return VT.FLOAT32
    if isinstance(value, str):
        return VT.STRING
    if isinstance(value, list):
        if value and isinstance(value[0], bool):
            return (VT.ARRAY, VT.BOOL)
        if value and isinstance(value[0], float):
            return (VT.ARRAY, VT.FLOAT32)
        if value and isinstance(value[0], str):
            return (VT.ARRAY, VT.STRING)
        return (VT.ARRAY, VT.INT32)
    raise TypeError(f"no GGUF type for {value!r}")


def quantize_order(t: Tensor):
    return (t.layer, t.name)


def tensors_of(spec: dict) -> list[Tensor]:
    k = K(spec)
    b = B(k)
    ARCHS[spec["arch"]](b)
    out = b.out
    if spec.get("order", "quantize") == "quantize":
        out = sorted(out, key=quantize_order)
    q = spec["quant"]
    if q["mix"] != "explicit":
        apply_mix(sorted(out, key=quantize_order), q["mix"], k, q.get("fallback", "legacy"))
    for t in out:
        if t.name in b.forced:
            t.qtype = b.forced[t.name]
    rules = [(re.compile(p), Q[ty]) for p, ty in q.get("types") or []]
    layer_rules = [(set(r["layers"]), re.compile(r["match"]), Q[r["type"]]) for r in q.get("layers") or []]
    for t in out:
        hit = next((ty for ls, p, ty in layer_rules if t.layer in ls and p.search(t.name)), None)
        if hit is None and q["mix"] == "explicit" and (len(t.shape) < 2 or t.name in b.forced):
            hit = t.qtype  # 1D and forced tensors keep their type
        if hit is None:
            hit = next((ty for p, ty in rules if p.search(t.name)), None)
        if hit is not None:
            t.qtype = hit
    return out


def kv_of(spec: dict) -> list[tuple]:
    a = spec["arch"]
    kv: list[tuple] = [("general.architecture", VT.STRING, a), ("general.type", VT.STRING, "model")]
    for key, val in (spec.get("general") or {}).items():
        kv.append(("general." + key, infer(val), val))
    for key, val in spec["kv"].items():
        kv.append((f"{a}.{key}", infer(val), val))
    kv += vocab_kv(spec["vocab"])
    kv.append(("general.quantization_version", VT.UINT32, 2))
    q = spec["quant"]
    ft = q.get("file_type", int(FTYPE[q["mix"]]) if q["mix"] in FTYPE else None)
    if ft is not None:
        kv.append(("general.file_type", VT.UINT32, ft))
    for key, val in (spec.get("tail") or {}).items():
        kv.append((key, infer(val), val))
    return kv


def scale_tiny(spec: dict) -> dict:
    """A small cut of the same shape: same arch, same layer kinds, few of each."""
    s = json.loads(json.dumps(spec))
    kv = s["kv"]
    lead, nx = kv.get("leading_dense_block_count", 0), kv.get("nextn_predict_layers", 0)
    period = kv.get("full_attention_interval", 2 if kv.get("attention.sliding_window") else 1)
    body = max(4, period)
    old = kv["block_count"]
    kv["block_count"] = min(old, lead + body + nx)
    head = {
        "embedding_length": 512,
        "feed_forward_length": 1024,
        "expert_feed_forward_length": 256,
        "expert_shared_feed_forward_length": 256,
        "attention.q_lora_rank": 256,
        "attention.output_lora_rank": 64,
        "attention.indexer.head_count": 8,
    }
    for key, v in head.items():
        if key in kv:
            kv[key] = min(kv[key], v)
    gqa = max(1, kv["attention.head_count"] // max(1, kv.get("attention.head_count_kv", kv["attention.head_count"])))
    if s["arch"] == "olmoe":  # q/k norms span the model width
        kv["attention.head_count"] = kv["attention.head_count_kv"] = 4
    elif kv.get("attention.head_count_kv") == 1:
        kv["attention.head_count"] = 8
    elif kv.get("attention.head_count_kv"):
        kv["attention.head_count_kv"] = 2
        kv["attention.head_count"] = 2 * min(gqa, 8)
        kv.setdefault("attention.key_length", 64)
        kv.setdefault("attention.value_length", 64)
        if s["arch"] == "llama" and "rope.dimension_count" in kv:
            kv["rope.dimension_count"] = kv["attention.key_length"]
    if kv.get("expert_count"):
        kv["expert_count"] = min(kv["expert_count"], 16)
        kv["expert_used_count"] = min(kv["expert_used_count"], 4)
        if kv.get("expert_group_count", 1) > 1:
            kv["expert_group_count"], kv["expert_group_used_count"] = 4, 2
    if kv.get("embedding_length_out"):
        kv["embedding_length_out"] = kv["embedding_length"] * kv["hyper_connection.count"]
    for key, val in list(kv.items()):
        if isinstance(val, list) and len(val) >= old:
            kv[key] = val[: kv["block_count"] + (len(val) - old)]
    if "target_layers" in kv:
        kv["target_layers"] = [1, 2, 3]
    v = s["vocab"]
    n = 1024
    v["n_merges"] = min(v.get("n_merges", 0), n - 256 - 16)
    ids = [x for x in ("bos", "eos", "eot", "eom", "unk", "pad", "mask") if v.get(x) is not None]
    if v["model"] != "llama":
        remap, nxt = {}, n - 1
        for x in ids:
            if v[x] not in remap:
                remap[v[x]] = nxt
                nxt -= 1
            v[x] = remap[v[x]]
        v["specials"] = {}
    v["n_tokens"] = n
    if "vocab_size" in kv:
        kv["vocab_size"] = n
    s["name"] += "-tiny"
    s.pop("split", None)
    s.pop("expect", None)
    return s


# --------------------------------------------------------------------------
# writing
# --------------------------------------------------------------------------
_FMT = {
    VT.UINT8: "<B",
    VT.INT8: "<b",
    VT.UINT16: "<H",
    VT.INT16: "<h",
    VT.UINT32: "<I",
    VT.INT32: "<i",
    VT.FLOAT32: "<f",
    VT.BOOL: "<?",
    VT.UINT64: "<Q",
    VT.INT64: "<q",
    VT.FLOAT64: "<d",
}


def _str(s: str) -> bytes:
    raw = s.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _kv(key: str, vt, val) -> bytes:
    out = bytearray(_str(key))
    if isinstance(vt, tuple):
        sub = vt[1]
        out += struct.pack("<IIQ", int(VT.ARRAY), int(sub), len(val))
        if sub == VT.STRING:
            for s in val:
                out += _str(s)
        else:
            out += struct.pack("<" + str(len(val)) + _FMT[sub][1], *val)
    elif vt == VT.STRING:
        out += struct.pack("<I", int(vt)) + _str(val)
    else:
        out += struct.pack("<I", int(vt)) + struct.pack(_FMT[vt], val)
    return bytes(out)


def pad(n: int) -> int:
    return (n + ALIGN - 1) // ALIGN * ALIGN


def header(kv: list[tuple], tensors: list[Tensor]) -> bytes:
    """The whole header of one file, tensor offsets included, padded to the data section."""
    out = bytearray(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(kv)))
    for key, vt, val in kv:
        out += _kv(key, vt, val)
    off = 0
    for t in tensors:
        t.offset = off
        out += _str(t.name) + struct.pack("<I", len(t.shape))
        out += struct.pack("<" + "Q" * len(t.shape), *t.shape)
        out += struct.pack("<IQ", int(t.qtype), off)
        off += pad(t.nbytes)
    out += b"\0" * (pad(len(out)) - len(out))
    return bytes(out)


def plan_split(tensors: list[Tensor], split: dict | None, n: int | None) -> list[list[Tensor]]:
    if n:
        goal = sum(pad(t.nbytes) for t in tensors) / n
        out, acc = [[]], 0
        for t in tensors:
            if out[-1] and len(out) < n and acc + pad(t.nbytes) / 2 > goal * len(out):
                out.append([])
            out[-1].append(t)
            acc += pad(t.nbytes)
        while len(out) < n:  # fewer tensors than shards
            out.append([])
        return out
    if not split:
        return [tensors]
    cap = float(split["max_bytes"])
    out = [[], []] if split.get("no_tensor_first") else [[]]
    acc = 0
    for t in tensors:
        if out[-1] and acc + pad(t.nbytes) > cap:
            out.append([])
            acc = 0
        out[-1].append(t)
        acc += pad(t.nbytes)
    return out


def write(outdir: str, name: str, kv: list[tuple], shards: list[list[Tensor]], fill=None) -> dict:
    """Write the shards. `fill(tensor) -> bytes` gives real data; None leaves holes."""
    os.makedirs(outdir, exist_ok=True)
    total = sum(len(s) for s in shards)
    many = len(shards) > 1
    files, hdr_bytes = [], 0
    for i, ts in enumerate(shards):
        meta = list(kv) if i == 0 else []
        if many:
            meta += [
                ("split.no", VT.UINT16, i),
                ("split.count", VT.UINT16, len(shards)),
                ("split.tensors.count", VT.INT32, total),
            ]
        path = os.path.join(outdir, f"{name}-{i + 1:05d}-of-{len(shards):05d}.gguf" if many else f"{name}.gguf")
        h = header(meta, ts)
        hdr_bytes += len(h)
        for t in ts:
            t.file = i
        with open(path, "wb") as f:
            f.write(h)
            end = len(h)
            if fill is not None:
                for t in ts:
                    data = fill(t)
                    assert len(data) == t.nbytes, (t.name, len(data), t.nbytes)
                    f.seek(len(h) + t.offset)
                    f.write(data)
            if ts:
                end = len(h) + ts[-1].offset + pad(ts[-1].nbytes)
            f.truncate(end)
        files.append(
            {"path": path, "header": len(h), "size": end, "disk": os.stat(path).st_blocks * 512, "tensors": len(ts)}
        )
    return {"files": files, "header_bytes": hdr_bytes}


def load_spec(path: str) -> dict:
    with open(path) as f:
        return yaml.safe_load(f)


def summary(spec: dict, tensors: list[Tensor]) -> dict:
    by, cnt = Counter(), Counter()
    for t in tensors:
        by[t.qtype.name] += t.nbytes
        cnt[t.qtype.name] += 1
    data = sum(t.nbytes for t in tensors)
    params = sum(math.prod(t.shape) for t in tensors)
    ex = Counter()
    for t in tensors:
        if re.search(r"_exps\.", t.name):
            ex[t.layer] += t.nbytes
    return {
        "name": spec["name"],
        "arch": spec["arch"],
        "tensors": len(tensors),
        "params": params,
        "data_bytes": data,
        "data_gib": round(data / 2**30, 4),
        "types": dict(cnt),
        "type_bytes": dict(by),
        "expert_bundle_mib": {str(il): round(v / 2**20, 3) for il, v in sorted(ex.items())},
        "non_expert_mib": round((data - sum(ex.values())) / 2**20, 3),
    }


def check_expect(spec: dict, s: dict, files: list[dict]) -> list[str]:
    e, bad = spec.get("expect") or {}, []
    if "tensors" in e and e["tensors"] != s["tensors"]:
        bad.append(f"tensors {s['tensors']} != {e['tensors']}")
    for ty, n in (e.get("types") or {}).items():
        if s["types"].get(ty, 0) != n:
            bad.append(f"{ty} x{s['types'].get(ty, 0)} != {n}")
    tol = float(e.get("tol_gib", 0.006))
    if "data_gib" in e and abs(s["data_gib"] - e["data_gib"]) > tol:
        bad.append(f"data {s['data_gib']:.3f} GiB != {e['data_gib']} (tol {tol})")
    if "params" in e and s["params"] != e["params"]:
        bad.append(f"params {s['params']} != {e['params']}")
    if "shards" in e and len(files) != e["shards"]:
        bad.append(f"shards {len(files)} != {e['shards']}")
    for il, mib in (e.get("bundle_mib") or {}).items():
        got = s["expert_bundle_mib"].get(str(il))
        if got is None or abs(got - mib) > 0.01:
            bad.append(f"bundle {il}: {got} != {mib}")
    return bad


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("spec")
    ap.add_argument("outdir")
    ap.add_argument("--split", type=int, default=None, metavar="N", help="N shards of about equal size")
    ap.add_argument("--single", action="store_true", help="one file even if the spec splits")
    ap.add_argument("--scale", choices=["tiny"], default=None)
    ap.add_argument("--quiet", action="store_true")
    a = ap.parse_args()
    spec = load_spec(a.spec)
    if a.scale == "tiny":
        spec = scale_tiny(spec)
    tensors = tensors_of(spec)
    kv = kv_of(spec)
    shards = plan_split(tensors, None if a.single else spec.get("split"), a.split)
    res = write(a.outdir, spec["name"], kv, shards)
    s = summary(spec, tensors)
    if a.single or a.split:
        (spec.get("expect") or {}).pop("shards", None)
    bad = check_expect(spec, s, res["files"])
    s.update(files=res["files"], header_bytes=res["header_bytes"], expect_failures=bad, spec=os.path.abspath(a.spec))
    with open(os.path.join(a.outdir, spec["name"] + ".replica.json"), "w") as f:
        json.dump(s, f, indent=1)
    if not a.quiet:
        disk = sum(x["disk"] for x in res["files"])
        size = sum(x["size"] for x in res["files"])
        print(
            f"{spec['name']}: {len(res['files'])} file(s), {s['tensors']} tensors, "
            f"{s['params'] / 1e9:.2f} B params, {size / 2**30:.3f} GiB apparent, {disk / 2**20:.1f} MiB on disk, "
            f"types {s['types']}"
        )
    for b in bad:
        print("  MISMATCH " + b, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
