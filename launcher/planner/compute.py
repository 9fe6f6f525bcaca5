"""Upper bounds of the engine's compute buffers, from a model's shape, the settings and a placement's flags.

Duty: one number per device and one for the host, never more than 1 % below what the engine reserves. They are bounds
and no predictions: the real size is the peak of an allocator over a graph, and not even monotonic in context. The
engine's own dry run replaces them. Everything is counted in units of one activation row, 4 * n_embd bytes, per token of
a micro-batch: in that unit all models of an architecture fall together. Masks come on top.

Coefficients were fitted on buffer sizes that llama.cpp b11434 reported (tests/golden/engine_rows.jsonl): `s-`, `q8-`,
`h-` and full-logits rows on CUDA, `rpc-` rows on two RPC devices, `dspark-` rows on 1 to 4, `cpu-` rows without one.
deepseek4 also ran at 25 contexts from 8K to 1M with 5 splits on RPC servers made to accept offloaded operations as CUDA
does: those give every CUDA row of a device after the first to 1 MiB, and of the first at micro-batches up to 2048.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.planner import kv
from launcher.planner.attention import Attention
from launcher.planner.shape import ModelShape
from launcher.structs import Settings
from launcher.units import MIB, pad

# Spec types whose drafter reads hidden states of the target: the target keeps them to the end of its graph.
EXTRACTING = ("draft-eagle3", "draft-dflash", "draft-dspark")
SLACK_BYTES = MIB  # small inputs (positions, output ids), tensor alignment; and rows in MiB are truncated
NO_OFFLOAD = ("rpc", "cpu")  # backends that never compute with host-resident weights: no offload_op
_F16 = ("f16", "bf16")


@dataclass(frozen=True, slots=True)
class _Terms:
    """What an architecture needs beyond the common MoE graph, in units.

    resident  more than `moe_units()` on a device whose layers are resident
    split     still more on device 0 as soon as there are several (Qwen3-235B: 26 units, 21 on one device)
    host      attention graph of a later CUDA device whose experts all lie in host memory
    offload   more than the common graph on device 0, beside the copy of an expert tensor
    hole      share of that copy up to which the experts' activations fit into its place once it is freed
    refit     units that come on top when they do not; None: the largest expert activation
    copies    expert tensors on device 0 at the same time
    rpc       a later RPC device with host experts, beyond `used + 4` units; also its head beyond logits + 1
    holes     sizes of masks, in units, whose freed place leaves that head 3 units; up to 1 wider it needs 1 more
    head      the head beside its logits when masks are already gone
    cpu       what takes the place of `resident` without any device; None: the same
    behind    the first of several devices may hold a second expert tensor behind the first
    """

    resident: float = 10.0
    split: float = 0.0
    host: float = 15.0
    offload: float = 6.0
    hole: float = 0.65
    refit: float | None = None
    copies: int = 1
    rpc: float = 14.0
    holes: tuple[float, float] = (0.0, 0.0)
    head: float = 0.0
    cpu: float | None = None
    behind: bool = True


# Rows of Qwen3-30B and -235B; GLM-4.5-Air (`holes`: 36 contexts of 4K to 160K on two RPC devices); gpt-oss-20b and
# -120b; Mixtral; DeepSeek-R1; Qwen3-Next. Any other architecture takes the terms of the one with its kind of attention,
# or the default, above all others here.
_TERMS = {
    "qwen3moe": _Terms(resident=0.0, split=5.0, host=6.0, offload=2.0, hole=1.0, rpc=5.0, behind=False),
    "glm4moe": _Terms(resident=7.6, cpu=-0.5, host=9.0, offload=1.1, hole=1.0, rpc=10.2, holes=(3.0, 7.06)),
    "gpt-oss": _Terms(resident=0.0, host=4.9, offload=0.1, hole=1.0, rpc=5.0, behind=False),
    "llama": _Terms(resident=0.0, host=4.1, offload=3.3, hole=1.0, rpc=0.3, behind=False),
    "deepseek2": _Terms(resident=7.8, host=27.1, offload=0.5, hole=0.55, refit=4.1, rpc=18.5, behind=False),
    "qwen3next": _Terms(resident=9.9, host=14.6, offload=-9.9, hole=0.68, copies=2, rpc=5.0, head=15.2, behind=False),
}
_LATER = 1.8  # a device after the first has no embedded tokens (1.8 to 2.0 units less in every s-* row)
HEAD_UNITS = 5.0  # beside logits and masks (full-logits rows; where only one kind of mask is left, 4.0 in gpt-oss)
# Pipeline parallelism keeps four copies of every split input: three more masks, and units on device 0, the others and
# the host (allgpu-norule, rpc-*-alldev). deepseek4's residual streams are four times as wide.
_PIPELINE = (13.2, 10.0, 6.0)
_PIPELINE_DSV4 = (8.0, 45.0, 6.0)


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch in bytes. unit: an activation row of each token; mask: all masks; logits: of its outputs.

    window: the sliding window's mask among them; scores: attention scores of all heads, 0 with flash attention
    """

    ctx: kv.Context
    unit: int
    mask: int
    window: int
    logits: int
    scores: int

    def units(self, n: float) -> int:
        """Bytes of `n` units."""
        return int(n * self.unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """One device's flags, as in device_compute_bytes; copy: the offloaded expert tensor, 0 when nothing is."""

    offloads: bool
    first: bool
    output: bool
    alone: bool
    resident: bool
    host: bool
    start_ratio: int = 0
    copy: int = 0
    cpu: bool = False


def batch(shape: ModelShape, s: Settings, n_outputs: int | None) -> Batch:
    ctx = kv.context(s)
    ub = ctx.n_ubatch
    n_out = min(ub, _server_outputs(s) if n_outputs is None else n_outputs)
    window = 0
    dsv4 = Attention.DSV4 in shape.kinds
    if dsv4:  # raw window, both uses of the ratio-4 cache (attention, indexer), ratio-128 cache
        widest = pad(min(ctx.n_seq, shape.n_swa + ub), 256) + pad(-(-ctx.n_seq // 4), 256)
        cells = widest + pad(-(-ctx.n_seq // 4), 256) + pad(-(-ctx.n_seq // 128), 256)
    else:
        window = kv.swa_cells(shape, ctx) if Attention.SWA in shape.kinds else 0
        full = ctx.n_seq if shape.kinds & {Attention.FULL, Attention.MLA} or not window else 0
        widest, cells = max(window, full), window + full
    # an eighth of deepseek4's queries, as many elements as its rows have in the real model
    row = max(shape.n_embd, shape.n_head * shape.widest_k // 8) if dsv4 else shape.n_embd
    plain = s.flash_attn == "off"  # f32 masks, and an 8-byte index for each element of a transposed V cache
    indices = 8 * shape.widest_v * (2 if shape.n_swa else 1)
    return Batch(
        ctx=ctx,
        unit=4 * row * ub,
        mask=(4 * cells + indices if plain else 2 * cells) * ub,
        window=(4 * window + indices if plain else 2 * window) * ub,
        logits=4 * shape.n_vocab * n_out,
        scores=4 * shape.n_head * widest * ub if plain else 0,
    )


def _server_outputs(s: Settings) -> int:
    """Rows of logits that llama-server asks for (tools/server/server-context.cpp: n_outputs_max)."""
    return min(s.n_batch, max(1, s.n_parallel) * (1 + s.draft_n_max))


def slot_class(shape: ModelShape, slots: range) -> int:
    """All that a device's bound depends on in its slots: -1 for none, else the ratio of the first (the output: 4)."""
    return -1 if not slots else shape.layers[slots[0]].ratio if slots[0] < shape.n_layer else 4


def device_compute_bytes(
    shape: ModelShape, s: Settings, *, backend: str, slots: range, first: bool, output: bool, n_devices: int,
    resident_here: bool, host_here: bool, host_anywhere: bool, override: bool,
    n_outputs: int | None = None, largest_host_expert_bytes: int = 0,
) -> int:  # fmt: skip
    """Bound of one device's compute buffer.

    slots                      the contiguous slots it owns, slot n_layer being the output
    first, output              device 0 (it computes every offloaded expert); owner of the output slot
    resident_here, host_here   some bundle of its layers is resident on it / lies in host memory
    host_anywhere              some bundle of the model lies in host memory
    override                   an `-ot` list is on the line; without one several devices run as a pipeline
    n_outputs                  rows of logits of a micro-batch; None: as many as llama-server asks for
    largest_host_expert_bytes  the largest routed-expert tensor in host memory
    """
    if not slots:
        return SLACK_BYTES
    b = batch(shape, s, n_outputs)
    t, dsv4, offloads = terms(shape), Attention.DSV4 in shape.kinds, backend not in NO_OFFLOAD
    pipeline = not override and n_devices > 1
    p = _Place(
        offloads=offloads, first=first, output=output, alone=n_devices == 1, resident=resident_here, host=host_here,
        start_ratio=slot_class(shape, slots),
        copy=largest_host_expert_bytes if first and host_anywhere and offloads else 0,
    )  # fmt: skip
    peak = _dsv4(shape, s, b, p) if dsv4 else _common(shape, s, b, p)
    if b.scores:
        # freed scores take the copy in if they are large (c32768-ub512-faoff: 5 copies and more), but not two of them
        most = b.scores + p.copy if dsv4 or t.copies > 1 else max(b.scores, min(b.scores, p.copy) + p.copy)
        peak = max(peak, most + 2 * b.mask + b.units(t.host + 5))
    if output:
        peak = max(peak, _head(shape, t, b, p, pipeline))
    if pipeline:
        more = _PIPELINE_DSV4 if dsv4 else _PIPELINE
        peak += 3 * b.mask + b.units(more[0] if first else more[1])
    return peak + SLACK_BYTES


def _head(shape: ModelShape, t: _Terms, b: Batch, p: _Place, pipeline: bool) -> int:
    """The head: logits, and what still lies below them. On RPC it takes the place of the layers, masks included.

    One device without resident experts begins with a window's mask, and in the end those behind it are free again
    (gpt-oss, full-logits rows up to 204800: logits, that mask and 4 units to the byte).
    """
    bare, masks = p.host and not p.resident, b.mask / b.unit
    if not p.offloads and not pipeline:
        low, high = t.holes
        more = 1 if 0 < high < masks <= high + 1 else 0
        return b.logits + b.units(3.0 if bare and low < masks <= high else 1 + t.rpc + more)
    windowed = bare and p.alone and shape.layers[0].attention is Attention.SWA
    return b.logits + max((b.window if windowed else b.mask) + b.units(HEAD_UNITS), b.units(t.head))


def terms(shape: ModelShape) -> _Terms:
    alike = "deepseek2" if Attention.MLA in shape.kinds else "qwen3next" if Attention.RECURRENT in shape.kinds else ""
    return _TERMS.get(shape.arch) or _TERMS.get(alike, _Terms())


def expert_units(shape: ModelShape) -> tuple[float, float]:
    """Units of the experts' outputs and of one of their inner activations, over all experts that a token uses."""
    return float(shape.n_expert_used), shape.n_expert_used * shape.n_ff_exp / max(1, shape.n_embd)


def moe_units(shape: ModelShape) -> float:
    """Units of one layer's experts: outputs, weighted outputs and one activation, or gate, up and their product.

    19 for Qwen3-30B, 23 for Mixtral (rpc-* host rows). gpt-oss fuses the activation and has two rows of bias sums.
    """
    outer, inner = expert_units(shape)
    return 2 * outer + inner + 2 if shape.expert_bias else max(2 * outer + inner, outer + 3 * inner)


def _kv_copies(shape: ModelShape, s: Settings, ctx: kv.Context) -> int:
    """f16 copies of one layer's whole K and V for CUDA's attention kernels, when they are cached quantised.

    Exact on the q8 rows. MLA reads its values out of K: twice K.
    """
    largest = 0
    for layer in shape.layers:
        cells = kv.swa_cells(shape, ctx) if layer.attention is Attention.SWA else ctx.n_seq
        k, v = 0 if s.type_k in _F16 else layer.width_k, 0 if s.type_v in _F16 else layer.width_v
        largest = max(largest, 2 * (k + (k if layer.attention is Attention.MLA else v)) * cells * ctx.streams)
    return largest


def _common(shape: ModelShape, s: Settings, b: Batch, p: _Place) -> int:
    """Every architecture but deepseek4: masks, and the largest of attention, resident and offloaded experts."""
    t = terms(shape)
    outer, inner = expert_units(shape)
    later = 0.0 if p.first else _LATER
    copies = _kv_copies(shape, s, b.ctx) if p.offloads else 0
    if not shape.is_moe:  # attention, then gate, up and their product (Qwen3-8B: 4 + 3 * 3), beside a copied weight
        dense = b.units(4 + 3 * shape.n_ff / max(1, shape.n_embd) - later)
        return b.mask + max(dense, copies + b.units(7 - later)) + p.copy
    attention = t.host + (2 if p.first else 0)
    if not p.offloads and p.host:  # the CPU's results come in as copies
        attention = max(t.host + 3, outer + 4.1 + (0 if p.first else t.rpc))
        later = min(later, _LATER - 1)
    peak = b.units(attention) + copies
    if p.resident:
        split = 0.0 if p.alone or not p.first else t.split
        more = t.cpu if p.cpu and t.cpu is not None else t.resident
        peak = max(peak, b.units(2.1 + moe_units(shape) + more + split - later))
    if p.copy:
        refit = max(outer, inner) if t.refit is None else t.refit
        refit = refit if b.units(max(outer, inner)) > t.hole * p.copy else 0.0
        peak = max(peak, t.copies * p.copy + b.units(4 + outer + inner + t.offload + refit))
        if t.behind and not p.alone and b.units(2) < b.mask <= b.units(outer) and p.copy < b.units(2 * outer):
            # a mask too large for the activations' holes and too small for the next copy: that one lies behind the
            # last (GLM-4.5-Air, 32768 tokens, ub 4096, first of two: 2 * 748 + 780 MiB, alone 748 + 1200)
            peak = max(peak, 2 * p.copy + b.units(outer + 4.3) - b.mask)
    return b.mask + peak


def _dsv4(shape: ModelShape, s: Settings, b: Batch, p: _Place) -> int:
    """deepseek4: masks and indexer scores of the ratio-4 cache decide, in steps where one outgrows the hole before it.

    c is an f16 mask over the ratio-4 cache in units (1 at 32K tokens, 8 at 256K); `keys` the f16 copy of its keys,
    which does not shrink with the micro-batch. A device whose first layer has ratio 128 needs 3.8 units more than one
    that starts with ratio 4; so do device 0, RPC devices and, with the rolled-back states that a drafter brings,
    sometimes one that starts with ratio 4 or owns the output (RPC: 1.7 more; dspark-* rows, middle devices included).
    """
    cells = pad(-(-b.ctx.n_seq // 4), 256)
    c = cells / (2 * shape.n_embd)
    keys = 2 * cells * shape.widest_k
    large, small = b.ctx.n_ubatch > 2048, b.ctx.n_ubatch <= 1024
    rolled = s.drafter_type in EXTRACTING and (p.output or p.start_ratio == 4)
    high = p.first or not p.offloads or p.start_ratio != 4 or (rolled and 3.2 < c <= 4)
    if c > 8:
        n = (29.5 if high else 25.8) + (5.65 if p.copy else 5.3) * c
    elif c > 4 and large and p.copy:  # 3382 MiB on one device, 3318 to 3354 on the first of two at 204800
        n = (28.3 if p.output else 27.6) + 4 * c
    elif c > 4:
        n = (29.5 if high else 25.8) + 4 * c + (0 if c <= 7.5 else 0.6 if large else c)
    elif c > 3.75:
        n = (45.2 if small else 42.0) if high else 38.4 if large else 41.6
    elif high:
        n = 25.7 if c <= 0.55 else 33.5 if c <= 1.6 else 41.5 if c <= 3.2 else 45.2
    else:
        n = 26.7 if c <= 0.55 else 33.9 + 2 * c
    if not p.offloads:
        n = max(n, 29.9 if c <= 0.55 else 35.9 if c <= 1.3 else 41.5 if c <= 3.2 else 47.3) + (1.7 if rolled else 0)
    peak = b.units(n)
    if not p.offloads and s.drafter_type in EXTRACTING:
        # rolled-back states of a device's last block of ratio 4, which no width hides in a small model
        peak += (1 + s.draft_n_max) * MIB // 4
    if small and c > 1.4:
        peak += keys * (2 if 3.75 < c <= 4.25 else 1)
    if s.type_k not in _F16:
        peak += 3 * keys // 4 + 8 * MIB
    return _dsv4_offload(shape, b, p, c, peak) if p.copy else peak


def _dsv4_offload(shape: ModelShape, b: Batch, p: _Place, c: float, attention: int) -> int:
    """Device 0 of CUDA with host experts: one or two expert tensors beside the activations.

    Two when several devices run (rows of 2 to 4 devices at ub 512 and 2048: 2 * 1088 + 8 and + 33 MiB), or when the
    file mixes tensor sizes, so that a small freed one cannot take the next large one (IQ2: 784 and 1088 MiB).
    """
    other = min(p.copy, shape.smallest_expert_bytes)
    large = b.ctx.n_ubatch > 2048
    peak = p.copy + b.units(max(23.7 if p.alone and p.resident else 20.9, 16.9 + 2 * c))
    if other < p.copy and (c > 0.25 or not p.alone):
        peak = max(peak, p.copy + other + b.units((10.9 if p.alone or large else 0.8) + 2 * c))
    elif not p.alone:
        peak = max(peak, 2 * p.copy + b.units(1.05))
    return max(peak, attention + (7 * (p.copy - other) // 10 if large and c > 4 else 0))


def host_compute_bytes(
    shape: ModelShape, s: Settings, *, backends: tuple[str, ...], host_anywhere: bool,
    resident_anywhere: bool,  # noqa: ARG001  (resident experts leave nothing on the host)
    override: bool, n_outputs: int | None = None,
) -> int:  # fmt: skip
    """Bound of the CPU backend's compute buffer: inputs and masks, and the experts that it computes itself.

    backends  of all devices in order; empty: everything runs on the CPU
    """
    b = batch(shape, s, n_outputs)
    dsv4 = Attention.DSV4 in shape.kinds
    if not backends:
        p = _Place(offloads=False, first=True, output=True, alone=True, resident=True, host=False, cpu=True)
        peak = (_dsv4(shape, s, b, p) if dsv4 else _common(shape, s, b, p)) + b.units(1) + b.scores
        return max(peak, b.mask + b.logits + b.units(HEAD_UNITS + 1.1)) + SLACK_BYTES
    n = 2.0 if dsv4 else 4.0
    if host_anywhere and all(name in NO_OFFLOAD for name in backends):
        n = 11.2 if dsv4 else max(n, moe_units(shape) + 0.1)
    total = b.mask + b.units(n)
    if not override and len(backends) > 1:
        total += 3 * b.mask + b.units(_PIPELINE[2])
    if dsv4 and s.type_k not in _F16:
        total += 4 * MIB
    return total + SLACK_BYTES


def output_buffer_bytes(shape: ModelShape, s: Settings, draft: ModelShape | None) -> int:
    """The pinned buffer of logits and extracted hidden states, which no breakdown of the engine lists.

    src/llama-context.cpp: output_reserve. EAGLE-3 and DSpark read three layers of the target; of others we assume as
    many as the drafter has layers.
    """
    n_batch = kv.context(s).n_batch
    logits = 4 * shape.n_vocab * min(n_batch, _server_outputs(s))
    if draft is None or s.drafter_type not in EXTRACTING:
        return logits
    return logits + max(3, draft.n_layer) * 4 * shape.n_embd * n_batch
