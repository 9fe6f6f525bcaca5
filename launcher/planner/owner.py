"""Which device owns which layer: the engine's own rule, in float32, and its inverse.

llama.cpp b11434 `src/llama-model.cpp: load_tensors`: with L blocks there are L + 1 slots, the last one is the output.
Slot i goes to the first device whose cumulative share of `-ts` exceeds i / (L + 1). Everything is float32 there, so it
is float32 here: a double would put a seam one layer off for some counts.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_F32 = struct.Struct("<f")


def f32(x: float) -> float:
    """`x` rounded to the nearest float32."""
    value: float = _F32.unpack(_F32.pack(x))[0]
    return value


def owners(n_layer: int, tensor_split: Sequence[float], n_gpu_layers: int = 999) -> tuple[int | None, ...]:
    """Device index of each slot 0..n_layer (the last is the output); None is the CPU.

    n_layer       block_count, NextN blocks included
    tensor_split  `-ts`, one weight a device, not all zero; empty: no device
    """
    slots = n_layer + 1
    start = max(slots - n_gpu_layers, 0)
    active = min(n_gpu_layers, slots) if tensor_split else 0
    cumulative = _cumulative(tensor_split)
    result: list[int | None] = []
    for slot in range(slots):
        if slot < start or slot - start >= active:
            result.append(None)
            continue
        share = f32((slot - start) / active)
        result.append(next(k for k, c in enumerate(cumulative) if c > share))
    return tuple(result)


def _cumulative(weights: Sequence[float]) -> list[float]:
    total = 0.0
    sums = []
    for w in weights:
        total = f32(total + f32(w))
        sums.append(total)
    return [f32(s / total) for s in sums]


def counts(n_layer: int, tensor_split: Sequence[float]) -> tuple[int, ...]:
    """How many slots each device owns under a `-ts`. Counts that sum to n_layer + 1 give themselves."""
    owned = owners(n_layer, tensor_split)
    return tuple(owned.count(k) for k in range(len(tensor_split)))


def drafter_slots(n_layer: int, n_draft_layer: int, start: int, end: int, n_gpu_layers: int | None = None) -> range:
    """Slots of a drafter on the device that owns slots [start, end) of the target.

    The drafter is split by the same `-ts` shares over its own n_draft_layer + 1 slots, of which the last
    `n_gpu_layers` (`-ngld`; None: all) lie on devices: the s-th of those n lies where
    start / (L+1) <= s / n < end / (L+1), compared as the engine does, in float32.
    """
    slots, draft = n_layer + 1, n_draft_layer + 1
    active = draft if n_gpu_layers is None else min(n_gpu_layers, draft)
    low = f32(start / slots)
    high = f32(end / slots)
    own = [
        s for s in range(active) if (low <= f32(s / active) or start == 0) and (f32(s / active) < high or end == slots)
    ]
    first = draft - active
    return range(first + own[0], first + own[-1] + 1) if own else range(0)
