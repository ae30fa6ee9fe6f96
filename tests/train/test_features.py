from __future__ import annotations

import pytest
import torch

from configs.errors import TargetError
from data.tokens import TokenRow
from tests.conftest import tiny_target
from tests.train.conftest import many_rows, poisoned
from train import features
from train.features import Online, compute

TAPS = (1, 3)
ROWS = [
    TokenRow("a", "", [5, 6, 7, 8, 9], [0, 0, 1, 1, 1]),
    TokenRow("b", "", [10, 11, 12], [0, 1, 1]),
    TokenRow("c", "", [20, 21, 22, 23, 24, 25, 26], [0, 1, 0, 0, 0, 1, 1]),
]


def test_features_are_the_target_s_own() -> None:
    target = tiny_target()
    (found,) = compute(target, ROWS[:1], TAPS)
    reference = target.model(torch.tensor([ROWS[0].input_ids]), output_hidden_states=True)
    logits = reference.logits[0]

    # m_2, m_3, m_4 are 1, so target rows 1, 2, 3 teach.
    assert found.rows.tolist() == [1, 2, 3]
    # The forward was padded, so its roundings differ.
    taps = torch.cat([reference.hidden_states[1][0], reference.hidden_states[3][0]], -1)
    torch.testing.assert_close(found.taps, taps, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target.lm_head(found.hidden), logits[1:4], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.lse, logits[1:4].logsumexp(-1), rtol=1e-4, atol=1e-4)
    assert found.argmax.tolist() == logits[1:4].argmax(-1).tolist()


def test_a_batch_points_to_the_rows_that_teach() -> None:
    batch = Online(tiny_target(), ROWS, TAPS).batch([2, 0])
    assert batch.teacher[0, :7].tolist() == [0, -1, -1, -1, 1, 2, -1]


def test_rows_that_are_not_finite_teach_nothing_and_too_many_stop_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_target()
    poisoned(monkeypatch, features, token=63)

    batch = Online(target, many_rows(bad=2), TAPS).batch([1, 2])
    assert batch.mask.sum(1).tolist() == [0, 3]
    assert batch.taps.isfinite().all() and batch.teacher.max() == 2  # three rows are taught
    with pytest.raises(TargetError, match="3 of 200 rows"):
        Online(target, many_rows(bad=3), TAPS).batch([0, 1, 2, 3])
