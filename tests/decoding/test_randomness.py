"""Seeded randomness: one number per key, strict comparison, and draws that never leave the law's support."""

from __future__ import annotations

import numpy as np
import pytest

from configs.errors import TargetError
from decoding.randomness import Key, Purpose, Seeded

KEY = Key(5, Purpose.emit)


class Fixed(Seeded):
    """Always the same uniform number."""

    def __init__(self, number: float) -> None:
        super().__init__(0)
        self.number = number

    def uniform(self, key: Key) -> float:
        return self.number


def test_number_belongs_to_seed_and_key() -> None:
    keys = [Key(position, purpose, rank) for position in range(9) for purpose in Purpose for rank in range(3)]
    numbers = [Seeded(seed).uniform(key) for seed in (0, 1) for key in keys]
    assert len(set(numbers)) == 2 * 9 * 3 * 3
    assert numbers[: len(keys)] == [Seeded(0).uniform(key) for key in keys]
    assert all(0 <= number < 1 for number in numbers)


def test_numbers_stay_the_same_over_versions() -> None:
    assert Seeded(0).uniform(Key(0, Purpose.propose)) == 0.6299085342998937
    assert Seeded(-1).uniform(KEY) == Seeded(2**64 - 1).uniform(KEY)


def test_acceptance_is_strict() -> None:
    assert not Fixed(0.0).accept(0.0, KEY)
    assert Fixed(0.0).accept(1e-300, KEY)
    assert not Fixed(0.5).accept(0.5, KEY)
    assert Fixed(1 - 2**-53).accept(1.0, KEY)
    assert not Fixed(0.5).accept(float("nan"), KEY)


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0.0, 1), (0.24, 1), (0.25, 3), (0.99, 3), (1 - 2**-53, 3)],
)
def test_draw_inverts_the_cumulative_law(number: float, expected: int) -> None:
    # Cumulative law 0, .25, .25, 1, 1: the numbers below .25 are token 1's, the others token 3's.
    assert Fixed(number).draw(np.array([0, 0.25, 0, 0.75, 0]), KEY) == expected


@pytest.mark.parametrize("total", [1.0, 0.3, 1.0000001, 3.0])
def test_last_number_draws_the_last_token_with_mass(total: float) -> None:
    law = np.full(1000, total / 1000, dtype=np.float32)
    law[-5:] = 0
    assert Fixed(1 - 2**-53).draw(law, KEY) == 994


def test_laws_without_mass_are_refused() -> None:
    for law in ([0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]):
        with pytest.raises(TargetError, match="not finite"):
            Seeded(0).draw(np.array(law), KEY)
