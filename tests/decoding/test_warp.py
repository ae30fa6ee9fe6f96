"""The sampling law against hand-made numbers and against Hugging Face's processors."""

from __future__ import annotations

from math import log

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from configs.errors import ConfigError
from decoding.warp import NUCLEUS, Warp, choices

LOGITS = torch.tensor([log(4), log(2), log(1), log(3)])  # probabilities .4 .2 .1 .3


def test_temperature() -> None:
    # Temperature 1/2 squares: 16, 4, 1, 9 of 30.
    assert Warp(0.5)(LOGITS).tolist() == pytest.approx([16 / 30, 4 / 30, 1 / 30, 9 / 30])


def test_temperature_zero_is_the_largest_and_the_lowest_id_on_ties() -> None:
    assert Warp(0)(torch.tensor([1.0, 3.0, 3.0])).tolist() == [0, 1, 0]
    assert Warp(0).laws(torch.tensor([[1.0, 3.0], [2.0, 0.0]]).bfloat16()).tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_largest_of_any_sign(dtype: torch.dtype) -> None:
    rows = [[-2.0, -1.0, -3.0, -1.0], [0.0, -1.0, 0.0, 0.0], [-5.0, 2.0, 7.0, 7.0], [-0.0, 0.0, -1.0, -2.0]]
    assert [*map(choices(torch.tensor(rows, dtype=dtype)), range(4))] == [1, 0, 2, 0]


def test_top_k_keeps_ties() -> None:
    assert Warp(top_k=2)(LOGITS).tolist() == pytest.approx([4 / 7, 0, 0, 3 / 7])
    assert Warp(top_k=1)(torch.tensor([0.0, 2.0, 2.0])).tolist() == [0, 0.5, 0.5]
    assert Warp(top_k=9)(LOGITS).tolist() == pytest.approx([0.4, 0.2, 0.1, 0.3])


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.1, [1, 0, 0, 0]),
        (0.5, [4 / 7, 0, 0, 3 / 7]),  # .4 does not reach .5, .4 + .3 does
        (0.8, [4 / 9, 2 / 9, 0, 3 / 9]),
        (0.95, [0.4, 0.2, 0.1, 0.3]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, expected: list[float]) -> None:
    assert Warp(top_p=top_p)(LOGITS).tolist() == pytest.approx(expected)


def test_top_p_takes_its_share_of_what_top_k_left() -> None:
    # Of .4 .3 .2, renormalised 4/9 3/9 2/9, the first two reach .75; of all four they would hold .7 only.
    assert Warp(top_k=3, top_p=0.75)(LOGITS).tolist() == pytest.approx([4 / 7, 0, 0, 3 / 7])


def hugging_face(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    scores = TemperatureLogitsWarper(temperature)(None, logits.clone())  # pyright: ignore[reportArgumentType]
    scores = TopKLogitsWarper(top_k)(None, scores)  # pyright: ignore[reportArgumentType]
    return TopPLogitsWarper(top_p)(None, scores).softmax(-1)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "spread", [0.1, 3.0]
)  # nearly flat: the nucleus is larger than what is looked at first
@pytest.mark.parametrize("top_k", [50, 0])
def test_law_is_hugging_faces(spread: float, top_k: int) -> None:
    vocab = round(2 / NUCLEUS)
    logits = spread * torch.randn(3, vocab, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours = Warp(0.7, top_k, 0.9).laws(logits)
    theirs = hugging_face(logits, 0.7, top_k or vocab, 0.9)
    assert (ours - theirs).abs().max() < 1e-15
    assert ((ours > 0) == (theirs > 0)).all()


@pytest.mark.parametrize("warp", [Warp(0.7, 1500, 0.9), Warp(0.7), Warp(), Warp(0)])
def test_laws_of_a_batch_are_those_of_its_rows(warp: Warp) -> None:
    logits = torch.randn(2, 3, 20_000, generator=torch.Generator().manual_seed(0))
    logits[0] *= 9  # peaked rows beside flat ones
    alone = np.array([[warp(row) for row in rows] for rows in logits])
    torch.testing.assert_close(warp.laws(logits), torch.from_numpy(alone), rtol=1e-5, atol=1e-30)


def test_dtypes() -> None:
    assert Warp(0.7)(LOGITS.bfloat16()).dtype == np.float32
    assert Warp(0.7)(LOGITS.double()).dtype == np.float64
    assert Warp(0)(LOGITS.bfloat16()).dtype == np.float32
    assert Warp(0.7).laws(LOGITS.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"temperature": 1e-9}, {"top_k": -1}, {"top_p": 0}, {"top_p": 2}]
)
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Warp(**wrong)  # pyright: ignore[reportArgumentType]
