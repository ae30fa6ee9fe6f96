"""Index probes: tokens are the letters a to h, features and target rows the digits 0 to 7, so a view tells
its cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from train.alignment import TABLE, align

ROWS = torch.arange(8)[None]  # one sequence of 8 tokens; row j stands for token j, feature j and target row j
MASK = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])  # the reply is e f g h

# (method, step): first row j, features, each embedded token, target rows, labels, mask
PROBES: dict[tuple[str, int], tuple[int, str | None, list[str], str, str, str]] = {
    # Every token is read; target row j teaches the next one.
    ("plain", 0): (0, None, ["abcdefg"], "0123456", "bcdefgh", "0001111"),
    # Head k reads h_j alone and skips k tokens.
    ("medusa", 1): (0, "012345", [], "123456", "cdefgh", "001111"),
    ("medusa", 3): (0, "0123", [], "3456", "efgh", "1111"),
    # Head k reads h_j and the k tokens between.
    ("hydra", 1): (0, "012345", ["bcdefg"], "123456", "cdefgh", "001111"),
    ("hydra", 2): (0, "01234", ["bcdef", "cdefg"], "23456", "defgh", "01111"),
    ("mlp_speculator", 0): (0, "012345", ["bcdefg"], "123456", "cdefgh", "001111"),
    ("mlp_speculator", 1): (0, "01234", ["bcdef", "cdefg"], "23456", "defgh", "01111"),
    ("eagle1", 0): (0, "012345", ["bcdefg"], "123456", "cdefgh", "001111"),
    # Row 3 holds the first pending token, e, and drafts f; a step later it has read f and drafts g.
    ("eagle3", 0): (0, "012345", ["bcdefg"], "123456", "cdefgh", "001111"),
    ("eagle3", 1): (0, "01234", ["cdefg"], "23456", "defgh", "01111"),
    ("eagle3", 4): (0, "01", ["fg"], "56", "gh", "11"),
    # Every step drafts from what the first knows: b is pending, and c, d, e, f follow it unread.
    ("peagle", 0): (0, "012345", ["bcdefg"], "123456", "cdefgh", "001111"),
    ("peagle", 3): (0, "012", ["bcd"], "456", "fgh", "111"),
    # Features end before the anchor, so row 0 cannot be one.
    ("dflash", 1): (1, "012345", ["bcdefg"], "123456", "cdefgh", "001111"),
    ("dflash", 3): (1, "0123", ["bcde"], "3456", "efgh", "1111"),
    # The candidate itself is read; the target row before it holds the opinion of it.
    ("specdec", 0): (1, None, ["bcdefgh"], "0123456", "bcdefgh", "0001111"),
}


def letters(view: Tensor) -> str:
    return "".join("abcdefgh"[i] for i in view[0].tolist())


def digits(view: Tensor | None) -> str | None:
    return None if view is None else "".join(str(int(i)) for i in view[0].tolist())


@pytest.mark.parametrize(("method", "step"), list(PROBES))
def test_every_view_is_cut_where_the_table_says(method: str, step: int) -> None:
    aligned = align(TABLE[method](step), ROWS, MASK, features=ROWS, target=ROWS)

    tokens = [letters(view) for view in aligned.tokens]
    views = (
        digits(aligned.features),
        tokens,
        digits(aligned.target),
        letters(aligned.labels),
        digits(aligned.mask),
    )
    assert (aligned.start, *views) == PROBES[method, step]
    assert aligned.rows == aligned.labels.shape[1]


def test_every_method_of_the_table_is_probed() -> None:
    assert {method for method, _ in PROBES} == set(TABLE)


@pytest.mark.parametrize("method", list(TABLE))
def test_the_target_row_is_the_one_that_predicts_the_label(method: str) -> None:
    offsets = TABLE[method](1)

    assert offsets.label == offsets.target + 1
    assert offsets.mask == offsets.label


def test_a_sequence_too_short_for_a_step_has_no_rows() -> None:
    # Step 4 predicts t_{j+6}; of 5 tokens there is none.
    assert align(TABLE["eagle3"](4), ROWS[:, :5], MASK[:, :5]).labels.shape == (1, 0)


def test_views_share_the_memory_of_what_they_view() -> None:
    view = align(TABLE["eagle3"](2), ROWS, MASK).labels

    assert view.untyped_storage().data_ptr() == ROWS.untyped_storage().data_ptr()
