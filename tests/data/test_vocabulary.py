"""The draft vocabulary from literal counts."""

from __future__ import annotations

import pytest

from configs.errors import ConfigError
from data.tokens import TokenRow
from data.vocabulary import choose_draft_vocabulary

# Trained: 5 three times, 7 twice, 2 and 3 once each. 9 stands only in the prompt.
ROWS = [
    TokenRow("a", "c", [9, 9, 9, 9, 5, 5, 7], [0, 0, 0, 0, 1, 1, 1]),
    TokenRow("b", "c", [9, 5, 7, 3, 2], [0, 1, 1, 1, 1]),
]


def test_most_frequent_trained_ids_in_ascending_order() -> None:
    ids, coverage = choose_draft_vocabulary(ROWS, 2, 10)
    assert ids.tolist() == [5, 7]
    assert coverage == 5 / 7


def test_ties_go_to_the_lower_id() -> None:
    assert choose_draft_vocabulary(ROWS, 3, 10)[0].tolist() == [2, 5, 7]


def test_always_ids_are_in_whatever_their_count() -> None:
    ids, coverage = choose_draft_vocabulary(ROWS, 2, 10, always=[8])
    assert ids.tolist() == [5, 8]
    assert coverage == 3 / 7


def test_room_left_is_filled_with_the_lowest_unused_ids() -> None:
    ids, coverage = choose_draft_vocabulary(ROWS, 6, 10)
    assert ids.tolist() == [0, 1, 2, 3, 5, 7]
    assert coverage == 1.0


def test_whole_vocabulary() -> None:
    assert choose_draft_vocabulary(ROWS, 10, 10)[0].tolist() == list(range(10))


@pytest.mark.parametrize(("size", "always"), [(11, []), (1, [2, 3]), (-1, [])])
def test_impossible_sizes(size: int, always: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"Set method\.network\.draft_vocab_size between"):
        choose_draft_vocabulary(ROWS, size, 10, always)


def test_foreign_end_token() -> None:
    with pytest.raises(ConfigError, match="belongs to another model"):
        choose_draft_vocabulary(ROWS, 4, 10, always=[10])
