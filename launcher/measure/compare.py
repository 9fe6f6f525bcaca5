"""Two arms measured in turn: the median of their paired ratios, with an interval that says how sure that is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Median of ours / theirs over n pairs, and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}], n = {self.n}"


def paired(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> Ratio:
    """Ratios of the samples that were taken in the same round: what drifts between rounds cancels.

    Percentile bootstrap of the median (Efron 1979), always the same for the same samples. Raises ValueError without
    pairs, for samples that do not pair up, or for one that is not positive.
    """
    if not ours or len(ours) != len(theirs):
        msg = f"{len(ours)} and {len(theirs)} samples do not pair up"
        raise ValueError(msg)
    if min(*ours, *theirs) <= 0:
        msg = "a speed of 0 has no ratio"
        raise ValueError(msg)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    numbers = random.Random(seed)
    drawn = sorted(median(numbers.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    low, high = drawn[int(0.025 * _RESAMPLES)], drawn[int(0.975 * _RESAMPLES) - 1]
    return Ratio(median=median(ratios), low=low, high=high, n=len(ratios))
