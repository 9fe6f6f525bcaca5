"""Upper bounds of the compute buffers of what drafts: a draft model's context, and the context of NextN blocks.

Same units and the same kind of coefficients as `compute`, fitted on the `dspark-`, `draft-` and `mtp-` rows of
tests/golden/engine_rows.jsonl.
"""

from __future__ import annotations

from dataclasses import replace

from launcher.planner.compute import (
    EXTRACTING,
    HEAD_UNITS,
    NO_OFFLOAD,
    SLACK_BYTES,
    Batch,
    batch,
    device_compute_bytes,
    expert_units,
    host_compute_bytes,
    moe_units,
    terms,
)
from launcher.planner.shape import ModelShape
from launcher.structs import Settings
from launcher.units import pad


def drafter_device_compute_bytes(
    target: ModelShape, draft: ModelShape, s: Settings, *, backend: str, slots: range, first: bool, output: bool,
    head: bool | None = None, host_experts: bool = False, cut: bool = False, largest_host_bytes: int = 0,
) -> int:  # fmt: skip
    """Bound of one device's compute buffer of the drafter's own context.

    slots               the drafter's own slots on this device, slot n_layer being its output
    head                whether the target's output lies here, which computes the logits of a drafter that has no
                        output.weight, even beside none of its slots; None: as `output`
    host_experts        its routed experts lie in host memory (`-otd`)
    cut                 some of its layers do (`-ngld`): then no pipeline runs over its devices
    largest_host_bytes  the largest of its weights there, which a first device that offloads copies

    DFlash and DSpark graphs have logits for every token of a micro-batch, whatever the server asks for. deepseek4's
    DSpark (dspark-* rows, 3 layers, a pipeline on 2 to 4 devices) is met to 0.1 units.
    """
    extracting, n_draft = s.drafter_type in EXTRACTING, draft.n_layer
    borrowed = bool(head) and extracting and not draft.has_output
    copy = largest_host_bytes if first and backend not in NO_OFFLOAD else 0
    if not slots and not borrowed and not copy:
        return 0
    if not extracting or target.arch != "deepseek4":
        return device_compute_bytes(
            draft, s, backend=backend, slots=slots or range(n_draft, n_draft + 1), first=first,
            output=output or borrowed, n_devices=1 if first and output else 2, resident_here=not host_experts,
            host_here=host_experts, host_anywhere=copy > 0, override=host_experts or cut,
            n_outputs=s.n_ubatch if extracting else None, largest_host_expert_bytes=copy,
        )  # fmt: skip
    b, mask = _dspark_batch(target, s)
    head = output if head is None or draft.has_output else head
    n_layers, start = sum(slot < n_draft for slot in slots), 0 in slots
    logits = b.logits + b.units(HEAD_UNITS + 0.1) if head else 0
    if host_experts:  # attention alone, and no pipeline (-cmoed rows: 22.0 units and a mask, 5.0 beside the logits)
        peak = max(b.units(22.1 if start else 26.1) + b.scores + mask if n_layers else 0, logits)
    elif start and output and head:
        peak = max(b.units(33.1) + b.scores + mask, logits)
    elif not n_layers:  # the drafter's output and the target's: `-ts 30,14` has both, `30,4,10` one on each
        peak = b.logits * (bool(slots) + head) + b.units(50.5 if slots else 4.1)
    else:
        n = (28.1 if n_layers == 1 else 33.1) if start else 37.1 if head else 41.6 + 7.75 * n_layers
        peak = b.units(n) + b.scores + (b.logits if head else 0) + 4 * mask
    return max(peak, copy + b.units(24) if copy else 0) + SLACK_BYTES


def mtp_device_compute_bytes(
    shape: ModelShape, s: Settings, *, owner: bool, first: bool, alone: bool, resident: bool | None
) -> int:
    """Bound of a NextN context's compute buffer on a device that offloads: a pass over those blocks alone.

    owner     the blocks lie here; resident: with their experts (None: not known, the larger of both)
    first     the device that computes host-resident experts of any other

    GLM-4.5-Air on one and two H200 (mtp-* rows): the owner holds its mask and 8 units, or up to 4 of the mask's and
    22.5 where its experts are; the first copies an expert tensor beside 12.9 units, alone, and the two that follow each
    other beside 1, or one beside 15.2, for another device's blocks.
    """
    b, t = batch(shape, s, None), terms(shape)
    outer, inner = expert_units(shape)
    blocks = shape.layers[shape.n_layer - shape.n_nextn :]
    copy = max((x.largest_expert_bytes for x in blocks), default=0)
    peak = 0
    if owner:
        peak = b.mask + b.units(max(8.05, t.host - 0.95))
        if resident is not False:
            peak = max(peak, b.mask + b.units(9.05), min(b.mask, b.units(4)) + b.units(moe_units(shape) + 3.8))
    if first and resident is not True and (owner or not alone):
        peak = max(peak, copy + b.units(outer + inner + (2.2 if owner else 4.55)))
        if not owner:
            second = max((x.second_expert_bytes for x in blocks), default=0)
            peak = max(peak, copy + second + b.units(1.05))
    return peak + SLACK_BYTES if peak else 0


def mtp_host_compute_bytes(shape: ModelShape, s: Settings, *, backends: tuple[str, ...]) -> int:
    """Bound of the CPU backend's compute buffer of a NextN context: its inputs (mtp-* rows: the mask and a unit).

    Beside devices that never offload the CPU computes the experts that lie in host memory itself. Without any device
    (backends empty) it computes all: 9 units beside the mask, or 18.5 of the experts (mtp-* rows of the CPU).
    """
    b = batch(shape, s, None)
    if not backends:
        return max(b.mask + b.units(9.05), b.units(moe_units(shape) + 0.1)) + SLACK_BYTES
    alone = all(name in NO_OFFLOAD for name in backends)
    return b.mask + b.units(moe_units(shape) + 0.1 if alone else 1.0) + SLACK_BYTES


def drafter_host_compute_bytes(
    target: ModelShape, draft: ModelShape, s: Settings, *, backends: tuple[str, ...], host_experts: bool = False,
    cut: bool = False,
) -> int:  # fmt: skip
    """Bound of the CPU backend's compute buffer of the drafter's own context.

    backends      of the drafter's devices; empty: all of it runs on the CPU
    host_experts  its routed experts lie in host memory; cut: some of its layers do
    """
    extracting = s.drafter_type in EXTRACTING
    if not extracting or target.arch != "deepseek4":
        return host_compute_bytes(
            draft, s, backends=backends, host_anywhere=host_experts, resident_anywhere=not host_experts,
            override=host_experts or cut, n_outputs=s.n_ubatch if extracting else None,
        )  # fmt: skip
    b, mask = _dspark_batch(target, s)
    if not backends:
        return b.units(37.1) + b.logits + 4 * mask + SLACK_BYTES
    if host_experts and all(name in NO_OFFLOAD for name in backends):  # the CPU computes them (-cmoed rows: 10.1)
        return b.units(10.3) + mask + SLACK_BYTES
    return b.units(1 if not b.scores else 2.2) + (4 if len(backends) > 1 else 1) * mask + SLACK_BYTES


def _dspark_batch(target: ModelShape, s: Settings) -> tuple[Batch, int]:
    """The drafter's micro-batch (as wide as the target's, logits for all of it) and its only mask, the raw window's."""
    b, plain = batch(target, s, s.n_ubatch), s.flash_attn == "off"
    cells = pad(min(b.ctx.n_seq, target.n_swa + b.ctx.n_ubatch), 256) * b.ctx.n_ubatch
    return replace(b, scores=4 * target.n_head * cells if plain else 0), (4 if plain else 2) * cells
