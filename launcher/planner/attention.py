"""How each layer remembers: its kind of attention and the widths of what it caches, read from keys and tensors.

Rules are llama.cpp b11434's: `load_swa_pattern` in `src/models`, `src/llama-hparams.cpp`. The design's tree has this in
`shape`, which it would swell past two duties: what a file weighs, and what its layers keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

from launcher.structs import ModelHeader, Scalar, TensorInfo

# Sliding-window period where the file has no `attention.sliding_window_pattern`: (period, dense layer first),
# from `load_swa_pattern(ml, N, dense_first)` in src/models/*.cpp of b11434. Layer i slides when i % N < N - 1,
# or with dense_first when i % N != 0; period 0: every layer slides.
SWA_PERIODS: dict[str, tuple[int, bool]] = {
    "afmoe": (4, False), "cohere2": (4, False), "cohere2moe": (4, True), "exaone-moe": (4, False),
    "exaone4": (4, False), "gemma2": (2, False), "gemma3": (6, False), "gemma3n": (5, False),
    "gpt-oss": (2, False), "laguna": (4, True), "llama4": (4, False), "mellum": (4, False),
    "muse-glimmer": (4, False), "olmo2": (4, False), "plamo3": (8, False), "smallthinker": (4, True),
    "deepseek4": (0, False), "dflash": (0, False),
}  # fmt: skip
# Archs with a lightning indexer beside their attention (src/llama-kv-cache-dsa.cpp, -msa.cpp): one more
# K row of `indexer.key_length` a cell. Read from the source, not checked against it: no row of the engine covers them.
_INDEXED = frozenset({
    "deepseek32", "glm-dsa", "hy-v4", "dots3note", "minimax-m3", "glm5-next", "qwen4exp", "kimi-k3",
})  # fmt: skip


# Archs whose memory this planner cannot give exactly, and how it errs.
_LABELLED = {
    "rwkv6": "its recurrent state is not counted",
    "rwkv7": "its recurrent state is not counted",
    "arwkv7": "its recurrent state is not counted",
    "rwkv6qwen2": "its recurrent state is not counted",
    "minimax-01": "its linear layers are priced as full attention",
    "granite-switch": "the layer that its router adds is not counted",
}


class Attention(StrEnum):
    """How one layer remembers."""

    FULL = "full"
    SWA = "swa"
    MLA = "mla"
    DSV4 = "dsv4"
    RECURRENT = "recurrent"
    PARALLEL = "parallel"  # a cache and a recurrent state in one layer
    NONE = "none"


class Keys:
    """`<arch>.*` of a header: one accessor for keys that are a scalar in one file and a per-layer array in the next."""

    def __init__(self, header: ModelHeader) -> None:
        self.meta = header.metadata
        self.arch = header.arch

    def get(self, key: str, default: int = 0) -> int:
        """The key as an int; of an array its largest element."""
        value = self.meta.get(f"{self.arch}.{key}")
        if isinstance(value, tuple):
            return max((int(v) for v in value), default=default)
        return default if value is None or isinstance(value, str) else int(value)

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.meta

    def per_layer(self, key: str, layer: int, default: int) -> int:
        """The key for one layer, whether the file has a scalar or an array."""
        value = self.meta.get(f"{self.arch}.{key}")
        if isinstance(value, tuple):
            return int(value[layer]) if layer < len(value) else default
        return default if value is None or isinstance(value, str) else int(value)

    def array(self, key: str) -> tuple[Scalar, ...] | None:
        value = self.meta.get(f"{self.arch}.{key}")
        return value if isinstance(value, tuple) else None


def n_swa(keys: Keys) -> int:
    """Cells of the sliding window, 0 when the model has none: some archs of b11434 (src/models) overrule the key."""
    said = keys.get("attention.sliding_window")
    match keys.arch:
        case "llama4":  # chunks of 8192 unless the key switches them off
            return 0 if keys.has("attention.sliding_window") and not said else 8192
        case "smallthinker":
            return 4096 if said else 0
        case "exaone4":  # the 32B alone
            return (said or 4096) if keys.get("block_count") == 64 else 0
        case "gemma2":
            return said or 4096
        case "phi3" | "phimoe":  # switched off in the engine
            return 0
    return said


def attention_of(
    keys: Keys, blocks: Sequence[Sequence[TensorInfo]], n_layer: int, n_nextn: int, warnings: list[str]
) -> Callable[[int], Attention]:
    """Layer index -> its kind; what cannot be known is added to `warnings`."""
    arch = keys.arch
    mla = keys.get("attention.key_length_mla") > 0 and keys.get("attention.value_length_mla") > 0
    n_shared = keys.get("attention.shared_kv_layers")
    window = n_swa(keys)
    slides = _swa_layers(keys, n_layer - n_nextn, window, warnings)
    if arch in _LABELLED:
        warnings.append(f"{arch}: {_LABELLED[arch]}: use a dry run")
    if arch in _INDEXED:
        warnings.append(
            f"{arch}: cache priced from the engine's source, windows and pools at full length: use a dry run"
        )

    def kind(i: int) -> Attention:
        names = {t.name.split(".", 2)[2].split(".")[0] for t in blocks[i]}
        if arch == "deepseek4":
            return Attention.DSV4
        recurrent = any(n.startswith(("ssm_", "shortconv", "time_mix")) for n in names)
        has_kv = any(n in names for n in ("attn_k", "attn_qkv", "attn_kv_a_mqa", "attn_kv", "attn_k_b"))
        if recurrent and arch == "falcon-h1":  # attention and state side by side in every layer
            return Attention.PARALLEL
        # a linear-attention layer may have projections that are called attn_*; its convolution tells it apart
        if recurrent and (not has_kv or any(n.startswith("ssm_conv1d") for n in names)):
            return Attention.RECURRENT
        if n_shared and i >= n_layer - n_shared:
            return Attention.NONE
        if keys.has("attention.head_count_kv") and keys.per_layer("attention.head_count_kv", i, 1) == 0:
            return Attention.RECURRENT if keys.get("shortconv.l_cache") else Attention.NONE
        if mla:
            return Attention.MLA
        return Attention.SWA if window and slides(i) else Attention.FULL

    return kind


def _swa_layers(keys: Keys, n_trunk: int, window: int, warnings: list[str]) -> Callable[[int], bool]:
    key = "attention.sliding_window_pattern"
    array = keys.array(key)
    if array is not None:
        return lambda i: i < len(array) and bool(array[i])
    known = SWA_PERIODS.get(keys.arch)
    if keys.has(key):
        period, dense_first = keys.get(key), bool(known and known[1])
    elif known:
        period, dense_first = known
    else:
        if window:
            warnings.append(f"{keys.arch}: a sliding window of {window} whose layers are not known; all priced as full")
        return lambda _: False
    if period == 0:
        return lambda i: i < n_trunk
    if dense_first:
        return lambda i: i < n_trunk and i % period != 0
    return lambda i: i < n_trunk and i % period < period - 1


def widths_of(
    keys: Keys, blocks: Sequence[Sequence[TensorInfo]]
) -> tuple[Callable[[int, Attention], tuple[int, int]], str]:
    """Cached row widths per layer, and where the head length came from (case: files without key_length)."""
    n_head, n_embd = keys.get("attention.head_count"), keys.get("embedding_length")
    source = "attention.key_length"
    head_k, head_v = keys.get("attention.key_length"), keys.get("attention.value_length")
    if not head_k and n_head:
        head_k, source = n_embd // n_head, "embedding_length / head_count"
    head_v = head_v or (n_embd // n_head if n_head else head_k)
    rows = {  # width over heads, or where that fails the shape of attn_k itself
        i: t.shape[1] for i, b in enumerate(blocks) for t in b if t.name.endswith(".attn_k.weight") and len(t.shape) > 1
    }
    if not head_k:
        source = "attn_k shape"

    def widths(i: int, kind: Attention) -> tuple[int, int]:
        if kind in (Attention.NONE, Attention.RECURRENT):
            return 0, 0
        n_kv = keys.per_layer("attention.head_count_kv", i, keys.per_layer("attention.head_count", i, n_head))
        k, v = head_k, head_v
        if kind is Attention.SWA:
            k = keys.get("attention.key_length_swa", k) or k
            v = keys.get("attention.value_length_swa", v) or v
        if not k:
            row = rows.get(i, 0)
            return row, row
        more_k, more_v = _indexer(keys, i, v)
        return k * n_kv + more_k, 0 if kind in (Attention.MLA, Attention.DSV4) else v * n_kv + more_v

    return widths, source


def _indexer(keys: Keys, i: int, head_v: int) -> tuple[int, int]:
    """Elements that an indexer adds to the cached K and V rows of a layer.

    `indexer.types` says which layers have one; without it all have (src/models/glm-dsa.cpp, hy-v4.cpp). minimax-m3
    caches an indexer V as well, on the layers behind its dense prefix (src/llama-kv-cache-msa.cpp).
    """
    if keys.arch not in _INDEXED or not keys.per_layer("attention.indexer.types", i, 1):
        return 0, 0
    if keys.arch == "minimax-m3":
        behind = i >= keys.get("leading_dense_block_count")
        return (keys.get("attention.indexer.key_length"), head_v) if behind else (0, 0)
    return keys.get("attention.indexer.key_length"), 0


def conv_state(keys: Keys) -> int:
    """f32 elements of the convolution state of one recurrent layer (llama-hparams.cpp: n_embd_r)."""
    if keys.get("shortconv.l_cache"):
        return keys.get("embedding_length") * (keys.get("shortconv.l_cache") - 1)
    conv = keys.get("ssm.conv_kernel")
    if keys.get("kda.head_dim"):
        return 3 * (conv - 1 if conv else 3) * keys.get("attention.head_count") * keys.get("kda.head_dim")
    inner = keys.get("ssm.inner_size") + 2 * keys.get("ssm.group_count") * keys.get("ssm.state_size")
    return max(conv - 1, 0) * inner


def recurrent_state(keys: Keys) -> int:
    """f32 elements of the recurrent state of one layer (llama-hparams.cpp: n_embd_s)."""
    if keys.get("kda.head_dim"):
        return keys.get("kda.head_dim") ** 2 * keys.get("attention.head_count")
    return keys.get("ssm.state_size") * keys.get("ssm.inner_size")
