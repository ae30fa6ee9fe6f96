"""Coins of known acceptance: figures give it back, and 95 % intervals hold it in 95 % of the cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from decoding.sequence import Round
from eval.rows import expanded, interval, quotient, row, student
from tests.eval.samples import CONDITIONS, draft_run, pair, plain_run

ALPHA = (0.8, 0.7, 0.6, 0.5)  # conditional acceptance by position


def test_figures_give_the_coins_back() -> None:
    """τ = 1 + .8 + .56 + .336 + .168 = 2.864 over 20,000 rounds, each rate within four standard errors."""
    chance = np.random.default_rng(0)
    pairs = []
    for prompt in range(500):
        heads = chance.random((40, 4)) < ALPHA
        accepted = np.where(heads.all(1), 4, heads.argmin(1))
        rounds = [Round(4, int(a), int(a) + 1, 4, min(int(a) + 1, 4), 1.0, 0.1, 1.2) for a in accepted]
        pairs.append(pair(str(prompt), plain_run([1, 2]), replace(draft_run([1, 2], []), rounds=rounds)))
    made = row(pairs, True, "all", "all", replace(CONDITIONS, draft_tokens=4))
    assert made["mean_acceptance_length"] == pytest.approx(2.864, abs=0.045)
    assert made["acceptance_rate"] == pytest.approx(1.864 / 4, abs=0.012)
    assert made["acceptance_by_position"] == pytest.approx([0.8, 0.56, 0.336, 0.168], abs=0.014)
    assert made["conditional_acceptance"] == pytest.approx(ALPHA, abs=0.025)
    assert made["draft_lengths"]["4"] == pytest.approx([4000, 4800, 4480, 3360, 3360], rel=0.08)
    low, high = made["mean_acceptance_length_ci"]
    assert low < 2.864 < high


def length(s: np.ndarray) -> np.ndarray:
    return 1 + s[..., 0] / s[..., 1]


def speed(s: np.ndarray) -> np.ndarray:
    return quotient(s, per_token=False)


def covered(prompts: int, sets: int = 1000) -> tuple[float, float]:
    """Shares of simulated data sets whose 95 % interval holds (the true τ, the true speedup).

    Prompts differ: each has a coin from Beta(8, 4) for chains of 4, and replies of 20 to 60 rounds. Plain
    decoding takes a second a token, a speculative round 1.5, both with 5 % noise by prompt.
    """
    chance = np.random.default_rng(1)
    conditions = replace(CONDITIONS, resamples=800)
    coins = chance.beta(8, 4, 400_000)
    drafts = (coins + coins**2 + coins**3 + coins**4).mean()  # E[accepted in a round]
    truth = (1 + drafts, (1 + drafts) / 1.5)
    statistics: tuple[Callable[[np.ndarray], np.ndarray], ...] = (length, speed)
    held = np.zeros(2)
    for seed in range(sets):
        coin, rounds = chance.beta(8, 4, prompts), chance.integers(20, 61, prompts)
        law = np.stack([coin**k * (1 - coin) for k in range(4)] + [coin**4], axis=1)
        accepted = chance.multinomial(rounds, law) @ np.arange(5)
        tokens = rounds + accepted
        plain, drafted = (
            time * (1 + 0.05 * chance.standard_normal(prompts)) for time in (1.0 * tokens, 1.5 * rounds)
        )
        sums = np.stack([accepted, rounds], axis=1), np.stack([plain, tokens, drafted, tokens], axis=1)
        for i, statistic in enumerate(statistics):
            ends = interval(statistic, sums[i].astype(float), replace(conditions, seed=seed))
            assert ends is not None
            held[i] += ends[0] <= truth[i] <= ends[1]
    return tuple(held / sets)


@pytest.mark.parametrize("prompts", [12, 48])
def test_intervals_cover_as_often_as_they_say(prompts: int) -> None:
    """A thousand sets: a true 95 % is counted as 93.6 to 96.4 % at two standard errors."""
    for share in covered(prompts):
        assert 0.93 <= share <= 0.97


def test_six_batches_make_intervals_that_are_nearly_as_good() -> None:
    for share in covered(6, sets=500):
        assert 0.90 <= share <= 0.97


def test_students_quantile() -> None:
    """Against tables: t(.975) at 5, 10 and 47 degrees of freedom."""
    for freedom, value in ((5, 2.5706), (10, 2.2281), (47, 2.0117)):
        assert student(0.975, freedom) == pytest.approx(value, rel=3e-3)


def test_intervals_are_widened_for_few_clusters_only() -> None:
    assert expanded(0.95, 1) == 0.95
    assert expanded(0.95, 10_000) == pytest.approx(0.95, abs=1e-4)
    assert expanded(0.95, 6) > expanded(0.95, 48) > 0.95
