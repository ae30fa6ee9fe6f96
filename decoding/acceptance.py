"""Acceptance from rounds, pooled over prompts, and intervals for what is pooled over prompts.

Over N rounds, with d drafted and a accepted in each; a does not include the bonus or resampled token (`Round`
says how cut rounds are counted). A position is a level of the tree: a round accepts at most one token there,
however many it proposed. Where nothing was counted the answer is None, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from decoding.sequence import Round


def mean_acceptance_length(rounds: Sequence[Round]) -> float | None:
    """τ = 1 + Σ a / N: tokens per round, the bonus or resampled token included."""
    return 1 + sum(r.accepted for r in rounds) / len(rounds) if rounds else None


def acceptance_rate(rounds: Sequence[Round]) -> float | None:
    """Σ a / Σ d."""
    return ratio(sum(r.accepted for r in rounds), sum(r.drafted for r in rounds))


def acceptance_by_position(rounds: Sequence[Round]) -> list[float]:
    """At j = 0, 1, ...: #(a > j) / N, the share of all rounds that accepted at j. Sums to τ - 1."""
    return [sum(r.accepted > j for r in rounds) / len(rounds) for j in range(longest(rounds))]


def conditional_acceptance(rounds: Sequence[Round]) -> list[float | None]:
    """α_j = #(a > j) / #(tried at j): the share among rounds that got to j and had something proposed
    there."""
    return [
        ratio(sum(r.accepted > j for r in rounds), sum(r.tried > j for r in rounds))
        for j in range(longest(rounds))
    ]


def bootstrap_ratio(
    numerators: Sequence[float], denominators: Sequence[float], confidence: float, n: int, seed: int
) -> tuple[float, float] | None:
    """The interval of Σ numerators / Σ denominators, one entry of each per prompt (`bootstrap`)."""
    sums = np.stack([numerators, denominators], axis=1).astype(float)
    return bootstrap(lambda s: s[..., 0] / s[..., 1], sums, confidence, n, seed)


def bootstrap(
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    sums: NDArray[np.float64],
    confidence: float,
    n: int,
    seed: int,
) -> tuple[float, float] | None:
    """Percentile interval, at `confidence`, of a `statistic` (sums [..., k] -> [...]) over `n` resamples.

    sums: [clusters, k], that is one row per prompt: a prompt's rounds depend on each other and are drawn
    together. None for fewer than two prompts, which say nothing of the spread between prompts, and where no
    resample gives a finite number.
    """
    clusters = len(sums)
    if clusters < 2:
        return None
    times = np.random.default_rng(seed).multinomial(clusters, np.full(clusters, 1 / clusters), size=n)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(times @ sums)
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def longest(rounds: Sequence[Round]) -> int:
    return max((r.depth for r in rounds), default=0)


def ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
