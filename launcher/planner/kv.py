"""Cache and state bytes of every kind of layer this planner models, exact to the byte.

llama.cpp b11434: `src/llama-context.cpp` (context and streams), `src/llama-kv-cache*.cpp` (cells),
`src/llama-hparams.cpp` (row widths), `src/llama-memory-recurrent.cpp` (states). A kind that is not modelled was
labelled by `shape` and is priced as plain attention. State lies with the owner of its layer; `-ot` never moves it.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.planner.attention import Attention
from launcher.planner.shape import LayerShape, ModelShape
from launcher.structs import Settings
from launcher.units import KV_TYPES, pad

# Spec types whose target keeps n_max rolled-back copies of its states (src/llama-context.cpp: n_rs_seq).
_ROLLBACK_TYPES = frozenset({"draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What `-c -np -kvu -b -ub` become inside the engine: n_seq cells a sequence, `streams` separate caches."""

    n_ctx: int
    n_seq: int
    streams: int
    n_parallel: int
    unified: bool
    n_batch: int
    n_ubatch: int


def context(s: Settings) -> Context:
    """The engine's own roundings (src/llama-context.cpp). `s.n_ctx_per_stream` must be set."""
    n_parallel = max(1, s.n_parallel)
    n_ctx = pad((s.n_ctx_per_stream or 0) * n_parallel, 256)
    n_seq = n_ctx if s.kv_unified else pad(n_ctx // n_parallel, 256)
    if not s.kv_unified:
        n_ctx = n_seq * n_parallel
    n_batch = min(n_ctx, s.n_batch)
    return Context(
        n_ctx=n_ctx,
        n_seq=n_seq,
        streams=1 if s.kv_unified else n_parallel,
        n_parallel=n_parallel,
        unified=s.kv_unified,
        n_batch=n_batch,
        n_ubatch=min(n_batch, s.n_ubatch),
    )


def row_bytes(kv_type: str, width: int) -> int:
    """Bytes of one cached row of `width` elements; `kv_type` is a key of units.KV_TYPES."""
    block, size = KV_TYPES[kv_type]
    return width // block * size


def rollback_copies(shape: ModelShape, s: Settings) -> int:
    """n_rs_seq: extra copies of every state that a drafter makes the target keep."""
    return s.draft_n_max if s.drafter_type in _ROLLBACK_TYPES and shape.rollback else 0


def swa_cells(shape: ModelShape, ctx: Context) -> int:
    """Cells of a sliding-window cache of one stream (src/llama-kv-cache-iswa.cpp: size_swa)."""
    window = shape.n_swa * (ctx.n_parallel if ctx.unified else 1)
    return pad(min(ctx.n_seq, window + ctx.n_ubatch), 256)


def layer_bytes(shape: ModelShape, layer: LayerShape, s: Settings, n_rs: int = 0) -> int:
    """Cache and state of one layer in the main context.

    n_rs  rolled-back copies, `rollback_copies()`. NextN blocks have no cache in the main context.
    """
    if layer.index >= shape.n_layer - shape.n_nextn:
        return 0
    return _bytes(shape, layer, s, n_rs)


def mtp_layer_bytes(shape: ModelShape, layer: LayerShape, s: Settings) -> int:
    """Cache of one NextN block in the context that `draft-mtp` adds; 0 for every other block."""
    if layer.index < shape.n_layer - shape.n_nextn or s.drafter_type != "draft-mtp":
        return 0
    return _bytes(shape, layer, s, 0)


def _bytes(shape: ModelShape, layer: LayerShape, s: Settings, n_rs: int) -> int:
    ctx = context(s)
    # without flash attention V is stored transposed, every layer as wide as the widest (src/llama-kv-cache.cpp)
    width_v = shape.widest_v if s.flash_attn == "off" and layer.width_v else layer.width_v
    k, v = row_bytes(s.type_k, layer.width_k), row_bytes(s.type_v, width_v)
    match layer.attention:
        case Attention.NONE:
            return 0
        case Attention.RECURRENT:
            return _state(shape, ctx, n_rs)
        case Attention.PARALLEL:
            return (k + v) * ctx.n_seq * ctx.streams + _state(shape, ctx, n_rs)
        case Attention.SWA:
            return (k + v) * swa_cells(shape, ctx) * ctx.streams
        case Attention.DSV4:
            return sum(_dsv4(shape, layer, s, n_rs))
    return (k + v) * ctx.n_seq * ctx.streams


def _state(shape: ModelShape, ctx: Context, n_rs: int) -> int:
    return (shape.n_embd_r + shape.n_embd_s) * 4 * ctx.n_parallel * (1 + n_rs)


def _dsv4(shape: ModelShape, layer: LayerShape, s: Settings, n_rs: int) -> tuple[int, int, int]:
    """(raw window, compressed caches, f32 states) of one deepseek4 layer (src/llama-kv-cache-dsv4.cpp).

    One stream a sequence even when unified, each as long as n_ctx_seq, which is all of n_ctx then.
    """
    ctx = context(s)
    row = row_bytes(s.type_k, layer.width_k)
    raw = row * pad(min(ctx.n_seq, shape.n_swa + ctx.n_ubatch), 256) * ctx.n_parallel
    if not layer.ratio:
        return raw, 0, 0
    cells = pad(-(-ctx.n_seq // layer.ratio), 256) * ctx.n_parallel
    packed = row * cells
    # key and gate states of one compression window, f32: doubled in ratio-4 layers, which overlap two windows
    overlap = 2 if layer.ratio == 4 else 1
    state = 2 * (overlap * layer.width_k) * (overlap * layer.ratio) * 4
    if layer.ratio == 4:
        packed += row_bytes(s.type_k, shape.indexer_width) * cells
        state += 2 * (2 * shape.indexer_width) * 8 * 4
    return raw, packed, state * (1 + n_rs) * ctx.n_parallel


def checkpoint_bytes(shape: ModelShape, s: Settings, n_rs: int) -> int:
    """Upper bound of one context checkpoint of one slot, in host memory (server: `--ctx-checkpoints`).

    It copies what a truncated prompt could not rebuild: window caches and states of one sequence. 0 for models that
    have neither, for which the server makes none.
    """
    one = Settings(
        n_ctx_per_stream=s.n_ctx_per_stream, n_batch=s.n_batch, n_ubatch=s.n_ubatch, type_k=s.type_k, type_v=s.type_v
    )
    total = 0
    for layer in shape.layers:
        if layer.attention is Attention.DSV4:
            raw, _, state = _dsv4(shape, layer, one, n_rs)
            total += raw + state
        elif layer.attention in (Attention.SWA, Attention.RECURRENT):
            total += layer_bytes(shape, layer, one, n_rs)
        elif layer.attention is Attention.PARALLEL:
            total += _state(shape, context(one), n_rs)
    return total
