"""Bytes moved per token and per prompt batch -> tokens a second on this rig, as a range.

The spread comes from measured rigs (docs/planner.md): rows need 0.94 to 2.7 times bytes over bandwidth without a
drafter and up to 1.9 times with one, whose batches keep the cores busy; prefill of offloaded experts needs 1.4 to 2.8
times bytes over the first card's link. A missing rig fact gives an unknown, never a guess.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.planner.shape import ModelShape
from launcher.structs import Device, Host, Range, Settings, Speed

_HOST_EFFORT = (0.94, 2.7)
_HOST_EFFORT_DRAFTED = (0.94, 1.9)
_LINK_EFFORT = (1.4, 2.8)
# Accepted share of drafted tokens: 0.33 in prose and 0.70 in code on two RTX 3090 at depth 5.
_ACCEPTED = (0.33, 0.70)
# Cards read weights at roughly half to nine tenths of their nominal bandwidth.
_CARD_EFFORT = (1.1, 2.0)

_UNKNOWN = Range(low=None, high=None)


def estimate(
    shape: ModelShape,
    devices: Sequence[Device],
    card_bytes: Sequence[int],
    host_bundle_bytes: int,
    host_other_bytes: int,
    host: Host,
    s: Settings,
) -> Speed:
    """The range of decode and prefill tokens a second.

    card_bytes         per device, bytes read for one token (dense, output, the used share of resident bundles)
    host_bundle_bytes  all bundles in host memory; host_other_bytes what else the host reads per token
    """
    depth = s.draft_n_max if s.drafter_type else 0
    share = _union(shape, depth)
    host_read = host_bundle_bytes * share + host_other_bytes
    if host_read and host.triad_bps is None:
        return Speed(
            decode_tps=_UNKNOWN,
            prefill_tps=_prefill(devices, host_bundle_bytes, s),
            limited_by="host bandwidth is not measured",
        )
    if any(d.memory_bps is None for d in devices) and not host_read:
        return Speed(decode_tps=_UNKNOWN, prefill_tps=_UNKNOWN, limited_by="card bandwidth is not known")
    effort = _HOST_EFFORT_DRAFTED if depth else _HOST_EFFORT
    host_s = host_read / host.triad_bps if host.triad_bps else 0.0
    card_s = sum(b / d.memory_bps for b, d in zip(card_bytes, devices, strict=True) if d.memory_bps)
    fast = host_s * effort[0] + card_s * _CARD_EFFORT[0]
    slow = host_s * effort[1] + card_s * _CARD_EFFORT[1]
    low_tokens, high_tokens = (1 + depth * a for a in _ACCEPTED)
    decode = Range(low=low_tokens / slow, high=high_tokens / fast) if fast else _UNKNOWN
    limited = "host bandwidth" if host_s > card_s else "card bandwidth"
    return Speed(decode_tps=decode, prefill_tps=_prefill(devices, host_bundle_bytes, s), limited_by=limited)


def turn_s(shape: ModelShape, first: Device, host_bundle_bytes: int, host: Host, s: Settings) -> float | None:
    """Seconds of one agent turn (4,096 new prompt tokens, 512 answered) spent on experts in host memory.

    Only for comparing orders of the same devices, which differ in the first link and in what is resident; None where
    a rig fact is missing.
    """
    if first.link_bps is None:
        return None
    prompt = -(-4096 // s.n_ubatch) * host_bundle_bytes / first.link_bps
    answer = 512 * host_bundle_bytes * _union(shape, 0) / host.triad_bps if host.triad_bps else 0.0
    return prompt + answer


def _union(shape: ModelShape, depth: int) -> float:
    """Share of a bundle that one decode step reads: with a drafter the expected union over depth + 1 tokens."""
    if not shape.n_expert:
        return 1.0
    return float(1 - (1 - shape.n_expert_used / shape.n_expert) ** (depth + 1))


def _prefill(devices: Sequence[Device], host_bundle_bytes: int, s: Settings) -> Range:
    """Every host bundle crosses the first device's link once a micro-batch."""
    link = devices[0].link_bps if devices else None
    if not host_bundle_bytes or not link:
        return _UNKNOWN
    seconds = host_bundle_bytes / link
    return Range(low=s.n_ubatch / (seconds * _LINK_EFFORT[1]), high=s.n_ubatch / (seconds * _LINK_EFFORT[0]))
