"""Places by hand; samples of the right law pass at their level, and the field's mistakes do not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from eval.uniform import BINS, Sample, chi_square, examined, least_bias, place, survival

LAW = np.array([0.1, 0.4, 0.2, 0.2, 0.1, 0.0])


def test_places() -> None:
    assert place(LAW, 1, 0.5) == pytest.approx(0.2)
    # Two tokens of .2 share the places from .4 to .8, two of .1 those from .8 on.
    assert place(LAW, 2, 0.25) == place(LAW, 3, 0.25) == pytest.approx(0.5)
    assert place(LAW, 0, 0.5) == pytest.approx(0.9)
    assert 0.999 < place(LAW, 5, 0.5) < 1  # what cannot be drawn is past all that can
    assert place(2 * LAW, 1, 0.5) == pytest.approx(0.2)  # of any mass


def test_survival() -> None:
    # Tables of the χ² distribution: 3.841 and 18.307 are passed with probability .05 at 1 and 10 degrees.
    assert survival(3.841, 1) == pytest.approx(0.05, abs=1e-4)
    assert survival(18.307, 10) == pytest.approx(0.05, abs=1e-4)
    assert survival(0.0, 3) == 1


def test_chi_square_of_counts() -> None:
    # (10-8)^2/8 + (6-8)^2/8 = 1, and a table that expects 3 a bin does not count.
    found = chi_square("tokens", [np.array([10.0, 6.0]), np.array([6.0, 0.0])])
    assert found is not None
    assert (found.statistic, found.freedom) == (1.0, 1)
    assert chi_square("tokens", [np.array([6.0, 0.0])]) is None


Draw = Callable[[np.random.Generator, np.ndarray, int, int], int]


def laws(chance: np.random.Generator, count: int) -> np.ndarray:
    """Of tempered logits over 12 tokens."""
    powers = np.exp(chance.normal(size=(count, 12)) / 0.7)
    return powers / powers.sum(1, keepdims=True)


def samples(
    draw: Draw, replies: int = 200, length: int = 24, seed: int = 0
) -> tuple[list[Sample], np.ndarray]:
    """Replies of tokens drawn by `draw(chance, law, number in the round, last token)`, three to a round."""
    chance = np.random.default_rng(seed)
    made, largest = [], []
    for _ in range(replies):
        u, rounds, last = [], [], 0
        for i, law in enumerate(laws(chance, length)):
            number = i % 3 + 1
            last = draw(chance, law, number, last)
            u.append(place(law, last, chance.random()))
            rounds.append(number)
            largest.append(law.max())
        made.append(Sample(u, rounds))
    return made, np.array(largest)


def right(chance: np.random.Generator, law: np.ndarray, number: int, last: int) -> int:
    return int(chance.choice(len(law), p=law))


def untempered(law: np.ndarray) -> np.ndarray:
    return law**0.7 / (law**0.7).sum()


def warp_left_out(chance: np.random.Generator, law: np.ndarray, number: int, last: int) -> int:
    return right(chance, untempered(law), number, last)


def bonus_without_temperature(chance: np.random.Generator, law: np.ndarray, number: int, last: int) -> int:
    return right(chance, untempered(law) if number == 3 else law, number, last)


def one_number_for_two(chance: np.random.Generator, law: np.ndarray, number: int, last: int) -> int:
    """Every second token is drawn by the number that drew the one before."""
    rank = np.argsort(-law)
    one_number_for_two.number = chance.random() if number % 2 else one_number_for_two.number  # pyright: ignore
    return int(rank[law[rank].cumsum().searchsorted(one_number_for_two.number)])  # pyright: ignore


def test_right_laws_pass_as_often_as_they_should() -> None:
    p = [test.p for seed in range(60) for test in examined(samples(right, replies=30, seed=seed)[0])]
    assert len(p) == 180
    assert 0.01 < np.mean(np.array(p) < 0.05) < 0.11
    assert min(p) > 1e-4


@pytest.mark.parametrize(
    ("draw", "name"),
    [(warp_left_out, "tokens"), (bonus_without_temperature, "rounds"), (one_number_for_two, "pairs")],
)
def test_mistakes_are_found(draw: Draw, name: str) -> None:
    found = {test.name: test.p for test in examined(samples(draw)[0])}
    assert found[name] < 1e-6


def test_few_tokens_are_no_test() -> None:
    assert examined([Sample([0.5] * 10, [1] * 10)]) == []
    assert examined([]) == []


def test_rounds_are_left_out_where_they_prove_nothing() -> None:
    assert [test.name for test in examined(samples(right)[0], by_round=False)] == ["tokens", "pairs"]


def test_least_bias_is_what_is_found() -> None:
    _, largest = samples(right)
    share = least_bias(largest, alpha=1e-3, power=0.99)
    assert share is not None

    def biased(chance: np.random.Generator, law: np.ndarray, number: int, last: int) -> int:
        return int(law.argmax()) if chance.random() < share else right(chance, law, number, last)

    found = [
        next(test.p for test in examined(samples(biased, seed=seed)[0]) if test.name == "tokens") < 1e-3
        for seed in range(20)
    ]
    assert sum(found) >= 18  # of 20 at .99 each: fewer in 1 of 1,000 runs
    assert least_bias(largest[: 5 * BINS - 1], alpha=1e-3, power=0.99) is None
