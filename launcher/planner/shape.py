"""header -> ModelShape: what each block weighs, which bundles there are, what its layers keep.

Duty: read tensors and `<arch>.*` keys once, so that the rest of the planner never looks at a header again. It must
not know devices. Names and rules are llama.cpp b11434's (`src/llama-arch.cpp`, `src/models`, `src/llama-hparams.cpp`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from launcher.errors import ModelUnreadable
from launcher.planner.attention import (
    Attention,
    Keys,
    attention_of,
    conv_state,
    n_swa,
    recurrent_state,
    widths_of,
)
from launcher.structs import ModelHeader, TensorInfo
from launcher.units import GGML_TYPES, pad

# Every routed-expert tensor: fused, chunked, biases and scales included. Also the pattern class of every rule.
EXPERT_CLASS = r"ffn_(up|down|gate|gate_up)_(ch|)exps"
_BLOCK = re.compile(r"^blk\.(\d+)\.(.+)$")
_EXPERT = re.compile(rf"^{EXPERT_CLASS}")
_LEGACY = re.compile(r"^ffn_(gate|up|down)\.\d+\.")

# LLM_TENSOR_LAYER_INPUT in src/llama-arch.cpp: always the CPU list, whatever -ngl says.
_INPUT = ("token_embd.", "position_embd.", "token_types.", "per_layer_token_embd.", "masked_embd_")
# Created once per device that owns a layer (TENSOR_DUPLICATED): rope factors.
_PER_DEVICE = ("rope_freqs.", "rope_factors_")
# Archs whose NextN blocks are never loaded by this build, MTP asked for or not (engine document 1.6).
_NEXTN_NEVER = frozenset({"bailingmoe2", "dots3note", "exaone-moe", "exaone4", "glm4"})
# Archs that can roll their recurrent or compressor state back, so that a drafter multiplies it (src/llama-arch.cpp).
ROLLBACK_ARCHS = frozenset({
    "qwen35", "qwen35moe", "qwen4exp", "deepseek4", "kimi-k3", "glm5-next", "nemotron_h", "nemotron_h_moe",
    "lfm2", "lfm2moe", "bailingmoe3",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of some tensors: in the file, and as they lie in a buffer of 32-byte or of CUDA's alignment."""

    file: int = 0
    cpu: int = 0
    cuda: int = 0

    def on(self, backend: str) -> int:
        """Bytes in a buffer of that backend. CPU and RPC pad each tensor to 32; others are taken as CUDA's 128."""
        return self.cpu if backend in ("cpu", "rpc") else self.cuda

    def __add__(self, other: Sizes) -> Sizes:
        return Sizes(self.file + other.file, self.cpu + other.cpu, self.cuda + other.cuda)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One block. width_k / width_v: elements of one cached K / V row (0: that cache does not exist).

    bundle holds all routed experts, 0 for a dense block; ratio is deepseek4's compression (0, 4 or 128).
    """

    index: int
    loaded: bool
    attention: Attention
    width_k: int
    width_v: int
    ratio: int
    dense: Sizes
    bundle: Sizes
    largest_expert_bytes: int
    second_expert_bytes: int  # of the next tensor in size, often the same
    largest_dense_bytes: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """All that the planner needs of a model. `n_layer` is `block_count`, NextN blocks included."""

    arch: str
    n_layer: int
    n_nextn: int
    n_embd: int
    n_head: int
    n_vocab: int
    n_ctx_train: int
    n_expert: int
    n_expert_used: int
    n_ff: int  # widest dense feed-forward
    n_ff_exp: int
    n_swa: int
    n_embd_r: int  # f32 elements of one recurrent layer's convolution state
    n_embd_s: int  # and of its recurrent state
    indexer_width: int
    layers: tuple[LayerShape, ...]
    input: Sizes  # token embedding and other input tensors: always host memory
    output: Sizes  # output side, on the device of slot n_layer; the copy of a tied embedding included
    per_device: Sizes  # one copy on every device that owns a layer
    tied: bool
    has_output: bool  # an own output.weight or token_embd (a DSpark drafter borrows the target's)
    expert_bias: bool
    rollback: bool
    key_length_source: str
    warnings: tuple[str, ...]

    @cached_property
    def is_moe(self) -> bool:
        """Whether any loaded block has routed experts."""
        return any(layer.bundle.file for layer in self.layers)

    @cached_property
    def kinds(self) -> frozenset[Attention]:
        """Every kind of attention among the layers."""
        return frozenset(layer.attention for layer in self.layers)

    @cached_property
    def widest_k(self) -> int:
        """Elements of the widest cached K row."""
        return max(layer.width_k for layer in self.layers)

    @cached_property
    def widest_v(self) -> int:
        """Elements of the widest cached V row."""
        return max(layer.width_v for layer in self.layers)

    @cached_property
    def smallest_expert_bytes(self) -> int:
        """The least of the layers' largest expert tensors: files mix types. 0 without experts."""
        return min((layer.largest_expert_bytes for layer in self.layers if layer.bundle.file), default=0)


def tensor_sizes(t: TensorInfo) -> Sizes:
    """Bytes of one tensor as a buffer holds it.

    CPU and RPC pad to 32 bytes. CUDA pads to 128 and, for quantised rows that are no multiple of 512 elements, adds
    the rest of such a row (ggml-cuda.cu: `ggml_backend_cuda_buffer_type_get_alloc_size`, MATRIX_ROW_PADDING).
    """
    cuda = t.size_bytes
    entry = GGML_TYPES.get(t.type_id)
    if entry and entry[1] > 1 and t.shape and t.shape[0] % 512:
        cuda += (512 - t.shape[0] % 512) // entry[1] * entry[2]
    return Sizes(t.size_bytes, pad(t.size_bytes, 32), pad(cuda, 128))


def model_shape(header: ModelHeader, *, mtp: bool = False) -> ModelShape:
    """The shape of a model as the engine will load it.

    header  of the whole shard set
    mtp     whether `draft-mtp` is among the spec types: NextN blocks are loaded only then

    Raises ModelUnreadable for a file without `block_count`, with legacy one-tensor-per-expert names, or with a routed
    tensor outside the class that our rules can name.
    """
    keys = Keys(header)
    n_layer = keys.get("block_count")
    if n_layer <= 0:
        raise ModelUnreadable(
            "model-no-layers",
            f"{header.path} has no {header.arch or '<arch>'}.block_count: not a language model that can be placed",
            fix="launcher plan PATH/TO/MODEL.gguf     # a projector or an adapter belongs to a model, it is none",
        )
    if keys.get("embedding_length") <= 0:
        raise ModelUnreadable(
            "model-no-width",
            f"{header.path} has no {header.arch}.embedding_length, which the engine needs too",
            fix="python convert_hf_to_gguf.py MODEL_FOLDER     # llama.cpp's; or fetch another GGUF of it",
        )
    warnings: list[str] = []
    blocks: list[list[TensorInfo]] = [[] for _ in range(n_layer)]
    rest: list[TensorInfo] = []
    for t in header.tensors:
        m = _BLOCK.match(t.name)
        if not m:
            rest.append(t)
        elif int(m.group(1)) < n_layer:
            blocks[int(m.group(1))].append(t)
        else:
            warnings.append(f"{t.name} lies beyond block_count {n_layer} and is not loaded")
    n_nextn = _nextn(keys, header, n_layer)
    attention = attention_of(keys, blocks, n_layer, n_nextn, warnings)
    loaded_nextn = mtp and header.arch not in _NEXTN_NEVER
    widths, source = widths_of(keys, blocks)
    layers = tuple(
        _layer(i, blocks[i], i < n_layer - n_nextn or loaded_nextn, attention(i), widths(i, attention(i)), keys)
        for i in range(n_layer)
    )
    _cross_check(keys, layers, warnings)
    embedding = [t for t in rest if t.name == "token_embd.weight"]
    has_output = any(t.name == "output.weight" for t in rest)
    tied = bool(embedding) and not has_output
    out_side = [t for t in rest if not t.name.startswith(_INPUT + _PER_DEVICE)]
    return ModelShape(
        arch=header.arch,
        n_layer=n_layer,
        n_nextn=n_nextn,
        n_embd=keys.get("embedding_length"),
        n_head=keys.get("attention.head_count"),
        n_vocab=keys.get("vocab_size") or header.array_lengths.get("tokenizer.ggml.tokens", 0),
        n_ctx_train=keys.get("context_length"),
        n_expert=keys.get("expert_count"),
        n_expert_used=keys.get("expert_used_count"),
        n_ff=keys.get("feed_forward_length"),
        n_ff_exp=_n_ff_exp(keys, blocks),
        n_swa=n_swa(keys),
        n_embd_r=conv_state(keys),
        n_embd_s=recurrent_state(keys),
        indexer_width=keys.get("attention.indexer.key_length"),
        layers=layers,
        input=_sum(t for t in rest if t.name.startswith(_INPUT)),
        output=_sum(out_side + (embedding if tied else [])),
        per_device=_sum(t for t in rest if t.name.startswith(_PER_DEVICE)),
        tied=tied,
        has_output=has_output or tied,
        expert_bias=any(t.name.endswith("_exps.bias") for b in blocks for t in b),
        rollback=header.arch in ROLLBACK_ARCHS,
        key_length_source=source,
        warnings=tuple(warnings),
    )


def _sum(tensors: Iterable[TensorInfo]) -> Sizes:
    total = Sizes()
    for t in tensors:
        total += tensor_sizes(t)
    return total


def _layer(
    i: int, tensors: list[TensorInfo], loaded: bool, attention: Attention, widths: tuple[int, int], keys: Keys
) -> LayerShape:
    experts, dense = [], []
    for t in tensors:
        tail = t.name.split(".", 2)[2]
        if _LEGACY.match(tail):
            raise ModelUnreadable(
                "model-legacy-experts",
                f"{t.name}: one tensor per expert is the format of 2023, which this engine no longer loads",
                fix="python convert_hf_to_gguf.py MODEL_FOLDER     # llama.cpp's; or fetch a newer GGUF of it",
            )
        if _EXPERT.match(tail):
            experts.append(t)
            continue
        dense.append(t)
        # norms over experts are dense; a stacked weight with another name would silently stay on the card
        if "_exps." in tail and "norm" not in tail:
            raise ModelUnreadable(
                "model-unknown-experts",
                f"{t.name} is a routed-expert tensor that no rule of ours can name",
                fix="llama-server --cpu-moe -m MODEL     # until its name was reported and is known here",
            )
    sizes = sorted((t.size_bytes for t in experts), reverse=True) if loaded else []
    return LayerShape(
        index=i,
        loaded=loaded,
        attention=attention if loaded else Attention.NONE,
        width_k=widths[0] if loaded else 0,
        width_v=widths[1] if loaded else 0,
        ratio=keys.per_layer("attention.compress_ratios", i, 0),
        dense=_sum(dense) if loaded else Sizes(),
        bundle=_sum(experts) if loaded else Sizes(),
        largest_expert_bytes=sizes[0] if sizes else 0,
        second_expert_bytes=sizes[1] if len(sizes) > 1 else 0,
        largest_dense_bytes=max((t.size_bytes for t in dense), default=0) if loaded else 0,
    )


def _nextn(keys: Keys, header: ModelHeader, n_layer: int) -> int:
    n = keys.get("nextn_predict_layers")
    # src/models/deepseek4.cpp: a file without the MTP block has none, whatever the key says
    if n and keys.arch == "deepseek4":
        name = f"blk.{n_layer - n}.nextn.eh_proj.weight"
        return n if any(t.name == name for t in header.tensors) else 0
    return min(n, n_layer)


def _n_ff_exp(keys: Keys, blocks: list[list[TensorInfo]]) -> int:
    """Rows of one expert's up projection: from the tensor, since keys differ by arch."""
    for block in blocks:
        for t in block:
            if "ffn_down_exps.weight" in t.name:
                return t.shape[0]
    return keys.get("expert_feed_forward_length")


def _cross_check(keys: Keys, layers: tuple[LayerShape, ...], warnings: list[str]) -> None:
    """Tensors decide what is MoE; a key that disagrees is worth a word."""
    loaded = [layer for layer in layers if layer.loaded]
    first = next((layer.index for layer in loaded if layer.bundle.file), None)
    if keys.get("expert_count") and first is None:
        warnings.append(f"expert_count is {keys.get('expert_count')} but no block has routed experts: planned as dense")
    if first is not None and not keys.get("expert_count"):
        warnings.append("blocks have routed experts but the file has no expert_count")
    lead = keys.get("leading_dense_block_count")
    if first is not None and keys.has("leading_dense_block_count") and lead != first:
        warnings.append(f"leading_dense_block_count is {lead}, the first block with experts is {first}: tensors decide")
