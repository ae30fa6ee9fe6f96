"""Whether tokens follow laws that are known: a test of the joint law, however large the vocabulary is.

A token x with law p has the place

    u = Σ {p(y) : p(y) > p(x)} + v Σ {p(y) : p(y) = p(x)},   v uniform in [0, 1)

near 0 if it is the likeliest, near 1 if hardly anything is less likely. If and only if every token follows
its law given all before it, that is if the joint law is right, the places are independent and uniform in
[0, 1) (the randomised probability integral transform: Rosenblatt 1952; for discrete laws Brockwell 2007). So
contexts and vocabularies of any kind make one sample, and what is wrong shows in one of three χ² tests:

    tokens    are drawn from another law (a warp left out, a residual taken wrongly)
    rounds    go wrong at some place of a round (a bonus without temperature)
    pairs     of neighbours depend on each other (randomness used twice)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

BINS = 20
PAIR_BINS = 6  # a side
ROUND_BINS = 10
LEAST = 5.0  # tokens that a bin must expect (the rule of Cochran 1954)
DRAWS = 20_000  # of the noncentral χ², for the power


def place(law: np.ndarray, token: int, v: float) -> float:
    """u of `token` under `law` [V], of any mass; next to 1 for a token that has none."""
    own = law[token]
    above = float(law[law > own].sum(dtype=np.float64))
    ties = float(law[law == own].sum(dtype=np.float64)) if own > 0 else 0.0
    return min((above + v * ties) / float(law.sum(dtype=np.float64)), math.nextafter(1.0, 0.0))


@dataclass(frozen=True)
class Sample:
    """The places of one reply's tokens, in their order."""

    u: list[float]
    rounds: list[int]  # of each token the number it has in its round, from 1; 0: the prefill's


@dataclass(frozen=True)
class Result:
    """χ² of counts against equal expectations."""

    name: str
    statistic: float
    freedom: int
    p: float


def chi_square(name: str, tables: Sequence[np.ndarray]) -> Result | None:
    """Of each table, its counts against their mean, all together; tables that expect fewer than `LEAST` in a
    bin are left out. None if all are."""
    used = [table for table in tables if table.mean() >= LEAST]
    if not used:
        return None
    statistic = sum(float(((table - table.mean()) ** 2 / table.mean()).sum()) for table in used)
    freedom = sum(table.size - 1 for table in used)
    return Result(name, statistic, freedom, survival(statistic, freedom))


def survival(statistic: float, freedom: int) -> float:
    """P(χ² >= statistic) with so many degrees of freedom: the regularised upper incomplete gamma function."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def examined(samples: Sequence[Sample], by_round: bool = True) -> list[Result]:
    """Those of the three for which there are tokens enough.

    by_round: whether tokens may be told apart by their number in the round. They may where a token is
    accepted or not before anything behind it is looked at, which block verification does otherwise.
    """
    u = np.array([one for sample in samples for one in sample.u])
    number = np.array([one for sample in samples for one in sample.rounds], dtype=int)
    found = [chi_square("tokens", [counts(u, BINS)])]
    if by_round:
        groups = [u[number == one] for one in np.unique(number)] if len(u) else []
        found.append(chi_square("rounds", [counts(group, ROUND_BINS) for group in groups]))
    pairs = np.zeros(PAIR_BINS**2)
    for sample in samples:
        # Of each reply every second pair: neighbouring pairs share a token, which χ² does not allow for.
        steps = (np.array(sample.u) * PAIR_BINS).astype(int)
        even = len(steps) // 2 * 2
        np.add.at(pairs, steps[0:even:2] * PAIR_BINS + steps[1:even:2], 1)
    found.append(chi_square("pairs", [pairs]))
    return [test for test in found if test is not None]


def counts(u: np.ndarray, bins: int) -> np.ndarray:
    return np.bincount((u * bins).astype(int), minlength=bins).astype(float)


def least_bias(largest: np.ndarray, alpha: float, power: float, seed: int = 0) -> float | None:
    """The least share of tokens, to a thousandth, that the test `tokens` would find with probability `power`
    if they were each the likeliest one instead of drawn; None if it would find none at all.

    largest: [n], the largest probability of each token's law. alpha: the test's level.
    """
    if len(largest) < LEAST * BINS:
        return None
    edges = np.arange(BINS + 1) / BINS
    # Of a token that is the likeliest one, u is uniform in [0, largest).
    below = np.minimum(edges[None] / largest[:, None], 1.0).mean(0)
    distance = len(largest) * BINS * float(((np.diff(below) - 1 / BINS) ** 2).sum())  # at a share of 1
    chance = np.random.default_rng(seed)
    critical = float(np.quantile(chance.chisquare(BINS - 1, 50 * DRAWS), 1 - alpha))

    def found(share: float) -> bool:
        drawn = chance.noncentral_chisquare(BINS - 1, share**2 * distance, DRAWS)
        return float((drawn > critical).mean()) >= power

    if not found(1.0):
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return high
