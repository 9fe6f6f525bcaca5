#!/usr/bin/env python3
"""Write small *runnable* random-weight MoE GGUFs, and draft models for two of them, into tiny/.

    python make_tiny.py [OUTDIR] [--only NAME]

Same tensor lists and keys as the replicas (the builders of make_replica.py), real
data: matrices ~ N(0, 1/fan_in), norms 1, biases 0, so logits stay finite. The
vocabulary is byte-level BPE (256 bytes + 240 merges + specials), so any UTF-8
prompt tokenizes and every generated token has a text. Output is noise.
"""

from __future__ import annotations

import argparse
import os
import sys

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType as Q

if __package__:
    from tests.replicas import make_replica as mr
else:  # run as a script
    import make_replica as mr

V = {"model": "gpt2", "n_tokens": 512, "n_merges": 240, "bos": 510, "eos": 511, "pad": 509, "add_bos": False}


def spec(name, arch, kv, types, *, pre, layout=None, layers=None, vocab=None):
    return {
        "name": name,
        "arch": arch,
        "general": {"name": name},
        "kv": kv,
        "layout": layout or {},
        "vocab": dict(V, pre=pre, **(vocab or {})),
        "quant": {"mix": "explicit", "file_type": 7, "types": types, "layers": layers or []},
    }


Q8 = [[r"ffn_gate_inp\.weight$|\.bias$", "F32"], [r"\.weight$", "Q8_0"]]

# fmt: off
TINY = [
    spec("tiny-qwen3moe", "qwen3moe", {
        "block_count": 8, "context_length": 32768, "embedding_length": 256, "feed_forward_length": 512,
        "attention.head_count": 8, "attention.head_count_kv": 2, "rope.freq_base": 1000000.0,
        "attention.layer_norm_rms_epsilon": 1e-6, "expert_used_count": 4, "attention.key_length": 64,
        "attention.value_length": 64, "expert_count": 16, "expert_feed_forward_length": 256,
    }, Q8, pre="qwen2"),
    spec("tiny-gpt-oss", "gpt-oss", {
        "block_count": 8, "context_length": 32768, "embedding_length": 256, "feed_forward_length": 256,
        "attention.head_count": 8, "attention.head_count_kv": 2, "rope.freq_base": 150000.0,
        "attention.layer_norm_rms_epsilon": 1e-5, "expert_count": 16, "expert_used_count": 4,
        "attention.key_length": 64, "attention.value_length": 64, "attention.sliding_window": 128,
        "expert_feed_forward_length": 256, "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0,
        "rope.scaling.original_context_length": 4096,
    }, [[r"ffn_(gate|up|down)_exps\.weight$", "MXFP4"]] + Q8, pre="gpt-4o"),
    spec("tiny-glm4moe", "glm4moe", {       # 1 dense + 6 MoE + 1 NextN, unequal bundles
        "block_count": 8, "context_length": 32768, "embedding_length": 256, "feed_forward_length": 768,
        "attention.head_count": 8, "attention.head_count_kv": 2, "rope.freq_base": 1000000.0,
        "attention.layer_norm_rms_epsilon": 1e-5, "expert_used_count": 4, "attention.key_length": 64,
        "attention.value_length": 64, "rope.dimension_count": 32, "expert_count": 16,
        "expert_feed_forward_length": 192, "expert_shared_count": 1, "leading_dense_block_count": 1,
        "expert_gating_func": 2, "expert_weights_scale": 1.0, "expert_weights_norm": True,
        "nextn_predict_layers": 1,
    }, Q8, pre="glm4", layers=[{"layers": [2, 4], "match": "ffn_down_exps", "type": "F16"},
                              {"layers": [5], "match": "ffn_(gate|up)_exps", "type": "Q4_0"}]),
    spec("tiny-deepseek4", "deepseek4", {
        "block_count": 8, "context_length": 32768, "embedding_length": 256, "attention.head_count": 8,
        "attention.head_count_kv": 1, "rope.scaling.type": "yarn", "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 4096, "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0, "rope.freq_base": 10000.0, "attention.layer_norm_rms_epsilon": 1e-6,
        "expert_count": 16, "expert_used_count": 4, "expert_gating_func": 4, "attention.key_length": 512,
        "attention.value_length": 512, "rope.dimension_count": 64, "attention.q_lora_rank": 128,
        "attention.sliding_window": 128, "expert_feed_forward_length": 128, "expert_shared_count": 1,
        "expert_weights_scale": 1.5, "expert_weights_norm": True, "swiglu_clamp_exp": [10.0] * 8,
        "swiglu_clamp_shexp": [10.0] * 8, "attention.indexer.head_count": 8, "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 64, "attention.output_group_count": 4, "attention.output_lora_rank": 64,
        "attention.compress_ratios": [0, 0, 4, 128, 4, 128, 4, 128],
        "attention.compress_rope_freq_base": 160000.0, "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 20, "hyper_connection.epsilon": 1e-6, "hash_layer_count": 2,
        "embedding_length_out": 1024,
    }, [[r"ffn_(gate|up|down)_exps\.weight$", "MXFP4"], [r"ffn_gate_inp\.weight$", "BF16"]] + Q8,
        pre="joyai-llm"),
    # Draft models: a plain one of tiny-qwen3moe's vocabulary, and a DSpark of tiny-deepseek4 without an output head.
    spec("tiny-qwen3-draft", "qwen3", {
        "block_count": 3, "context_length": 32768, "embedding_length": 128, "feed_forward_length": 384,
        "attention.head_count": 4, "attention.head_count_kv": 2, "rope.freq_base": 1000000.0,
        "attention.layer_norm_rms_epsilon": 1e-6, "attention.key_length": 64, "attention.value_length": 64,
    }, Q8, pre="qwen2"),
    spec("tiny-dspark", "dflash", {
        "block_count": 3, "context_length": 32768, "embedding_length": 256, "attention.head_count": 8,
        "attention.head_count_kv": 1, "rope.scaling.type": "yarn", "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 4096, "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0, "rope.freq_base": 10000.0, "attention.layer_norm_rms_epsilon": 1e-6,
        "expert_count": 16, "expert_used_count": 4, "expert_gating_func": 4, "attention.key_length": 512,
        "attention.value_length": 512, "rope.dimension_count": 64, "attention.q_lora_rank": 128,
        "attention.sliding_window": 128, "expert_feed_forward_length": 128, "expert_shared_count": 1,
        "expert_weights_scale": 1.5, "expert_weights_norm": True, "swiglu_clamp_exp": [10.0] * 3,
        "swiglu_clamp_shexp": [10.0] * 3, "attention.output_group_count": 4, "attention.output_lora_rank": 64,
        "attention.compress_ratios": [0, 0, 0], "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 20, "hyper_connection.epsilon": 1e-6, "hash_layer_count": 0,
        "block_size": 5, "target_layers": [6, 7, 8],
    }, [[r"ffn_(gate|up|down)_exps\.weight$", "MXFP4"], [r"^markov_w|^conf_proj|ffn_gate_inp\.weight$", "BF16"]] + Q8,
        pre="joyai-llm", layout={"markov_rank": 32}, vocab={"mask": 508}),
]
# fmt: on


def filler(s: dict, seed: int):
    rng = np.random.default_rng(seed)
    experts = s["kv"].get("expert_count", 0)

    def fill(t: mr.Tensor) -> bytes:
        shape = t.shape[::-1]  # numpy order
        if t.qtype == Q.I32:  # hash routing: distinct experts per token
            rows = [rng.permutation(experts)[: t.shape[0]] for _ in range(t.shape[1])]
            return np.asarray(rows, dtype=np.int32).tobytes()
        n = t.name
        if "norm" in n or n.endswith("_scale.weight"):
            x = np.ones(shape, np.float32)
        elif n.endswith((".bias", "_base.weight")) or "sinks" in n:
            x = np.zeros(shape, np.float32)
        else:
            std = 1.0 if n == "token_embd.weight" else t.shape[0] ** -0.5
            x = rng.standard_normal(shape, dtype=np.float32) * np.float32(std)
            if n == "output.weight":  # peaky logits over printable text only:
                x *= 4  # b10434's server rejects invalid UTF-8 output
                x[:32], x[127:256], x[256 + V["n_merges"] :] = 0, 0, 0
        return quants.quantize(x, t.qtype).tobytes()

    return fill


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("outdir", nargs="?", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "tiny"))
    ap.add_argument("--only", default=None)
    a = ap.parse_args()
    for i, s in enumerate(TINY):
        if a.only and a.only not in s["name"]:
            continue
        ts = mr.tensors_of(s)
        res = mr.write(a.outdir, s["name"], mr.kv_of(s), [ts], fill=filler(s, 1000 + i))
        print(f"{s['name']}: {len(ts)} tensors, {res['files'][0]['size'] / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
