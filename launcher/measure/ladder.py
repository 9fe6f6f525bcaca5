"""The depth ladder: longer and longer fresh prompts, with the memory that is left at the worst moment of each.

A server that comes up can still die in its first deep prompt: the pool of a CUDA process grows with depth (556 MiB free
after the load died at 90K tokens, 896 MiB survived 188K on a 24 GB card).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx

from launcher.measure import timing, watch
from launcher.measure.timing import Timing
from launcher.serve.server import Client

SHARES = (0.5, 0.92)
FIRST = 16384
ANSWER = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One depth: the request, and the least free bytes by name (card UUID, `host`) while it ran; error: it died."""

    n_tokens: int
    timing: Timing | None
    least_free_bytes: Mapping[str, int]
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Every rung that was reached, the lowest first."""

    rungs: tuple[Rung, ...]

    @property
    def survived(self) -> bool:
        """Whether every rung was answered."""
        return bool(self.rungs) and not any(r.error for r in self.rungs)

    def slope_bytes(self, name: str) -> float | None:
        """Bytes of that memory that 1,024 more tokens of depth cost, from the first rung to the last."""
        seen = [(r.n_tokens, r.least_free_bytes[name]) for r in self.rungs if name in r.least_free_bytes]
        if len(seen) < 2 or seen[-1][0] == seen[0][0]:
            return None
        return (seen[0][1] - seen[-1][1]) / (seen[-1][0] - seen[0][0]) * 1024


def depths(n_ctx: int) -> tuple[int, ...]:
    """Prompt lengths for a context: 16K (10K where that is more than half), half of it, 92 % of it."""
    first = FIRST if n_ctx // 2 > FIRST else 10240
    steps = [int(n_ctx * share) for share in SHARES]
    return tuple(sorted({n for n in (first, *steps) if n + ANSWER <= n_ctx}))


def climb(
    client: Client,
    n_ctx: int,
    n_vocab: int,
    *,
    seed: int = 0,
    look: Callable[[], Mapping[str, int]] = watch.free_now,
    tell: Callable[[int, int], None] = lambda _n, _of: None,
) -> Ladder:
    """Ask at every depth; the first that fails is the last.

    tell  is called with (depth, of the deepest) before each
    """
    rungs: list[Rung] = []
    steps = depths(n_ctx)
    for n in steps:
        tell(n, steps[-1])
        found, error = None, ""
        with watch.Watch(look=look) as seen:
            try:
                found = timing.ask(client, timing.salted(n, n_vocab, seed + n), ANSWER)
            except httpx.HTTPError as failed:
                error = f"{type(failed).__name__}: {failed}"
        rungs.append(Rung(n_tokens=n, timing=found, least_free_bytes=dict(seen.least), error=error))
        if error:
            break
    return Ladder(rungs=tuple(rungs))
