"""One request's speeds, from the counts and times that the server returns with it.

Builds define their own `*_per_second` differently, so nothing is taken from those fields.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.serve.server import Client


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What one request took. Speeds are tokens a second, None where nothing of the kind was computed.

    prompt_n   prompt tokens really computed; cached_n those that came out of the cache
    decode_n   tokens of the answer; the first belongs to the prompt's last step, so decode_tps counts the others
    draft_n    tokens drafted and draft_accepted accepted, None without a drafter
    wall_s     the whole request, as its client saw it
    """

    prompt_n: int
    cached_n: int
    prefill_tps: float | None
    decode_n: int
    decode_tps: float | None
    draft_n: int | None
    draft_accepted: int | None
    wall_s: float


def timing(reply: Mapping[str, Any], wall_s: float) -> Timing:
    """From a /completion or chat reply's `timings` (tools/server/server-task.cpp: result_timings, b11434).

    predicted_ms is measured from the end of the prompt, and predicted_n counts the token sampled there.
    """
    t = reply.get("timings") or {}
    prompt_n, decode_n = int(t.get("prompt_n", 0)), int(t.get("predicted_n", 0))
    prompt_ms, decode_ms = float(t.get("prompt_ms", 0.0)), float(t.get("predicted_ms", 0.0))
    drafted = t.get("draft_n")
    return Timing(
        prompt_n=prompt_n,
        cached_n=int(t.get("cache_n", 0)),
        prefill_tps=1000 * prompt_n / prompt_ms if prompt_n and prompt_ms > 0 else None,
        decode_n=decode_n,
        decode_tps=1000 * (decode_n - 1) / decode_ms if decode_n > 1 and decode_ms > 0 else None,
        draft_n=None if drafted is None else int(drafted),
        draft_accepted=None if drafted is None else int(t.get("draft_n_accepted", 0)),
        wall_s=wall_s,
    )


def salted(n_tokens: int, n_vocab: int, seed: int) -> list[int]:
    """A prompt of token ids that no cache has seen; ids below 1000 are left out, where control tokens lie."""
    low = min(1000, n_vocab // 2)
    numbers = random.Random(seed)
    return [numbers.randrange(low, n_vocab) for _ in range(n_tokens)]


def ask(client: Client, prompt: str | Sequence[int], n_predict: int, *, timeout_s: float | None = None) -> Timing:
    """One uncached greedy completion of exactly n_predict tokens. Raises httpx.HTTPError."""
    started = time.monotonic()
    reply = client.complete(
        prompt,
        timeout_s=timeout_s,
        n_predict=n_predict,
        cache_prompt=False,
        ignore_eos=True,
        temperature=0.0,
    )
    return timing(reply, time.monotonic() - started)
