"""Acceptance from rounds, pooled over prompts.

Over N rounds, with d drafted and a accepted in each; a does not include the bonus or resampled token (`Round`
says how cut rounds are counted). Where nothing was counted the answer is None, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
    """α_j = #(a > j) / #(a >= j and d > j): the share among rounds that drafted at j and got there."""
    return [
        ratio(
            sum(r.accepted > j for r in rounds),
            sum(r.accepted >= j and r.drafted > j for r in rounds),
        )
        for j in range(longest(rounds))
    ]


def bootstrap_ratio(
    numerators: Sequence[float], denominators: Sequence[float], confidence: float, n: int, seed: int
) -> tuple[float, float] | None:
    """Percentile interval, at `confidence`, of Σ numerators / Σ denominators over `n` resamples.

    One entry per cluster, that is per prompt: a prompt's rounds depend on each other and are drawn together.
    None if all denominators are 0.
    """
    if not sum(denominators):
        return None
    picked = np.random.default_rng(seed).integers(len(numerators), size=(n, len(numerators)))
    above = np.asarray(numerators, dtype=float)[picked].sum(axis=1)
    below = np.asarray(denominators, dtype=float)[picked].sum(axis=1)
    ratios = above[below > 0] / below[below > 0]
    low, high = np.quantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def longest(rounds: Sequence[Round]) -> int:
    return max((r.drafted for r in rounds), default=0)


def ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
