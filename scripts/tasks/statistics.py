"""What a handful of items can say: bootstrap intervals and paired tests between methods, seeded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 22  # drawn indices held at once: 32 MiB


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval, in the unit of the scores, over `n` items."""

    mean: float
    low: float
    high: float
    n: int
    level: float


@dataclass(frozen=True)
class McNemar:
    """Items that only one of two methods got right, and the exact two-sided p-value that both are as often right."""

    only_method: int
    only_baseline: int
    p_value: float


def bootstrap_mean(scores: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0) -> Estimate:
    """Mean and percentile-bootstrap interval. Equal arguments give equal results.

    The interval comes from resampled means of the same items: it says what other items of this kind might give, is a
    little narrow below some 20 items, and has no width for one.

    Raises ValueError for no scores, a score that is not finite, or a level outside (0, 1).
    """
    return _estimate(_finite(scores, "scores"), level, resamples, seed)


def paired_bootstrap(
    method: Sequence[float],
    baseline: Sequence[float],
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Estimate:
    """Mean of method - baseline over the same items in the same order, with its percentile-bootstrap interval.

    Items are drawn, not scores, so the spread between easy and hard items cancels. Raises ValueError as
    `bootstrap_mean` does, and for unequal numbers of items.
    """
    first, second = _paired(method, baseline)
    return _estimate(first - second, level, resamples, seed)


def mcnemar_exact(method: Sequence[float], baseline: Sequence[float]) -> McNemar:
    """Exact McNemar test on right (score > 0) and wrong answers to the same items in the same order.

    Only items on which the two disagree count; each is a fair coin if both are as often right, so p is twice the
    smaller binomial tail, at most 1. Raises ValueError for unequal numbers of items.
    """
    right, reference = (scores > 0 for scores in _paired(method, baseline))
    gained, lost = int((right & ~reference).sum()), int((reference & ~right).sum())
    tail = sum(math.comb(gained + lost, k) for k in range(min(gained, lost) + 1))
    return McNemar(gained, lost, min(1.0, 2 * tail / 2 ** (gained + lost)))


def _estimate(values: NDArray[np.float64], level: float, resamples: int, seed: int) -> Estimate:
    if not 0 < level < 1:
        raise ValueError(f"level={level} is outside (0, 1)")
    if resamples < 1:
        raise ValueError(f"resamples={resamples}: at least 1 is needed")
    rng = np.random.default_rng(seed)
    rows = max(1, _CHUNK // len(values))
    means = np.concatenate(
        [
            values[rng.integers(len(values), size=(min(rows, resamples - done), len(values)))].mean(axis=1)
            for done in range(0, resamples, rows)
        ]
    )
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(values.mean()), float(low), float(high), len(values), level)


def _finite(scores: Sequence[float], what: str) -> NDArray[np.float64]:
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"{what}: a flat, non-empty list is needed, not shape {values.shape}")
    if len(bad := np.flatnonzero(~np.isfinite(values))):
        raise ValueError(f"{what}: item {bad[0]} is {values[bad[0]]}")
    return values


def _paired(method: Sequence[float], baseline: Sequence[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    first, second = _finite(method, "method"), _finite(baseline, "baseline")
    if len(first) != len(second):
        raise ValueError(f"method has {len(first)} items and baseline {len(second)}: both need the same items")
    return first, second
