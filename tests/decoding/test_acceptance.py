"""Acceptance figures of four rounds, worked out by hand."""

from __future__ import annotations

import pytest

from decoding.acceptance import (
    acceptance_by_position,
    acceptance_rate,
    bootstrap_ratio,
    conditional_acceptance,
    mean_acceptance_length,
)
from decoding.sequence import Round


def done(drafted: int, accepted: int, depth: int, tried: int) -> Round:
    return Round(drafted, accepted, accepted + 1, depth, tried, 0.0, 0.0, 0.0)


def rounds(*pairs: tuple[int, int]) -> list[Round]:
    """Of chains: (drafted, accepted)."""
    return [done(drafted, accepted, drafted, min(accepted + 1, drafted)) for drafted, accepted in pairs]


# The last round drafted one token only, because the sequence was about to end.
ROUNDS = rounds((3, 3), (3, 0), (3, 1), (1, 1))


def test_pooled_figures() -> None:
    assert mean_acceptance_length(ROUNDS) == 1 + 5 / 4
    assert acceptance_rate(ROUNDS) == 5 / 10


def test_by_position() -> None:
    # Accepted more than 0, 1, 2: three rounds, one, one; of four.
    assert acceptance_by_position(ROUNDS) == [3 / 4, 1 / 4, 1 / 4]
    # Position 1 was reached by the rounds 1, 3 and 4, but round 4 drafted nothing there.
    assert conditional_acceptance(ROUNDS) == [3 / 4, 1 / 2, 1 / 1]


def test_positions_add_up_to_the_mean_length() -> None:
    assert 1 + sum(acceptance_by_position(ROUNDS)) == mean_acceptance_length(ROUNDS)


def test_positions_of_a_tree_are_its_levels() -> None:
    """0 - 1 - 4 - 5   Round by round the target accepted 1 and 4, then refused 5; accepted 2, a leaf; refused
      \\ 2             1, 2 and 3.
      \\ 3

    Level 1 was tried three times and accepted twice; level 2 only under node 1, once; level 3 once, in vain.
    """
    trees = [done(5, 2, 3, 3), done(5, 1, 3, 1), done(5, 0, 3, 1)]
    assert acceptance_by_position(trees) == [2 / 3, 1 / 3, 0]
    assert conditional_acceptance(trees) == [2 / 3, 1, 0]
    assert mean_acceptance_length(trees) == 2
    assert acceptance_rate(trees) == 3 / 15  # of all that was drafted


def test_what_was_not_counted_is_absent() -> None:
    assert mean_acceptance_length([]) is None
    assert acceptance_rate(rounds((0, 0))) is None
    assert acceptance_by_position(rounds((0, 0))) == []
    # Nobody got to position 1.
    assert conditional_acceptance(rounds((2, 0))) == [0, None]
    assert bootstrap_ratio([0], [0], 0.95, 100, seed=0) is None


def test_interval_of_equal_prompts_is_a_point() -> None:
    assert bootstrap_ratio([4, 8, 2], [2, 4, 1], 0.95, 200, seed=0) == (2, 2)


def test_one_prompt_has_no_interval() -> None:
    assert bootstrap_ratio([3], [1], 0.95, 100, seed=0) is None
    assert bootstrap_ratio([], [], 0.95, 100, seed=0) is None


def test_interval_resamples_prompts() -> None:
    # Two prompts, 1 of 1 and 3 of 1: both the first in a quarter of the resamples, both the second in a
    # quarter.
    assert bootstrap_ratio([1, 3], [1, 1], 0.95, 2000, seed=0) == (1, 3)
    assert bootstrap_ratio([1, 3], [1, 1], 0.4, 2000, seed=0) == (2, 2)


def test_interval_is_reproducible_and_narrows_with_prompts() -> None:
    few = bootstrap_ratio([1, 3] * 5, [1] * 10, 0.95, 1000, seed=3)
    many = bootstrap_ratio([1, 3] * 50, [1] * 100, 0.95, 1000, seed=3)
    assert few == bootstrap_ratio([1, 3] * 5, [1] * 10, 0.95, 1000, seed=3)
    assert few is not None
    assert many is not None
    # The mean is 2; its standard error is 1 / sqrt(n): .32 and .1, twice of which spans the interval.
    assert few == pytest.approx((2 - 0.62, 2 + 0.62), abs=0.1)
    assert many == pytest.approx((2 - 0.196, 2 + 0.196), abs=0.03)
