"""The block objective: states as decoding has them, which anchors are drawn, and how much each row weighs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.errors import ConfigError
from data.tokens import TokenRow
from models.dflash import DFlash, NetworkConfig
from models.target import Target
from tests.conftest import tiny_target
from tests.train.conftest import written_rows
from train.batches import Batch, collate
from train.features import compute
from train.objectives.dflash import DFlashObjective, ObjectiveConfig, block_states, taught


def objective_of(target: Target, layers: int = 2, **settings: Any) -> DFlashObjective:
    draft = DFlash.build(NetworkConfig(layers=layers, block_size=4, draft_vocab_size=None), target)
    draft.initialise(0, target)
    return DFlashObjective(draft, target, ObjectiveConfig(**settings), 1.0, seed=0)


def batch_of(target: Target, rows: list[TokenRow], objective: DFlashObjective) -> Batch:
    return collate(rows, compute(target, rows, objective.taps), grain=1)


def alone(draft: DFlash, batch: Batch, anchor: int) -> Tensor:
    """[3, d] as decoding computes them: all features before the anchor, and its block alone."""
    context = draft.context(batch.taps[:, :anchor], torch.arange(anchor)[None])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (torch.cat(pair, 2) for pair in zip(context[layer], (k, v), strict=True))
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    return draft(batch.tokens[:, anchor, None], torch.tensor([[anchor]]), attend)[0, 0, 1:]


@pytest.mark.parametrize("layers", [1, 3])
def test_states_are_the_ones_that_decoding_computes(layers: int) -> None:
    target = tiny_target()
    objective = objective_of(target, layers)
    batch = batch_of(target, [TokenRow("", "", list(range(5, 20)), [0] * 6 + [1] * 9)], objective)
    met = taught(batch, objective.draft)
    with torch.no_grad():
        rows, states = block_states(objective.draft, met, met.mask)
        for n, place in enumerate(rows[0].tolist()):
            expected = alone(objective.draft, batch, anchor=place + 1)
            found = torch.stack([state[0, n] for state in states])
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    # Blocks predict the nine reply tokens t_6 .. t_14 from anchors t_3 .. t_13, at places 2 .. 12.
    assert set(range(2, 13)) <= set(rows[0].tolist())


def test_anchors_are_drawn_anew_for_each_step() -> None:
    target = tiny_target()
    objective = objective_of(target, anchors=4)
    long, short = written_rows(target, count=2)
    short = TokenRow("", "", short.input_ids, [0] * 28 + [1] * 2)
    batch = batch_of(target, [long, short], objective)
    met = taught(batch, objective.draft)
    drawn: list[list[int]] = []
    for step in (0, 1, 0):
        objective.begin(step)
        kept = objective.trained(batch, met)
        places = kept.any(-1)
        # Four of each sequence; the second has no more, which predict t_28 and t_29.
        assert places.sum(1).tolist() == [4, 4]
        assert places[1].nonzero().flatten().tolist() == [24, 25, 26, 27]
        assert torch.equal(kept, met.mask & places[..., None])  # whole blocks
        assert torch.equal(objective.positions(batch), kept.sum((0, 1)))
        drawn.append(places[0].nonzero().flatten().tolist())
    assert drawn[0] == drawn[2] != drawn[1]


def test_every_anchor_is_as_likely() -> None:
    target = tiny_target()
    objective = objective_of(target, anchors=4)
    batch = batch_of(target, written_rows(target, count=1), objective)
    met = taught(batch, objective.draft)
    counts = torch.zeros(28)
    for step in range(400):
        objective.begin(step)
        counts += objective.trained(batch, met)[0].any(-1)
    # The reply t_6 .. t_29 is predicted from places 2 .. 27, 26 in all: 4 of 26 in 400 steps are 62 of each.
    assert counts[:2].tolist() == [0, 0]
    assert (counts[2:] - 400 * 4 / 26).abs().max() < 4 * (400 * 4 / 26) ** 0.5


def test_a_draw_of_all_there_are_changes_nothing() -> None:
    target = tiny_target()
    some, everything = objective_of(target, anchors=100), objective_of(target, anchors=None)
    batch = batch_of(target, written_rows(target, count=2), some)
    assert torch.equal(some.positions(batch), everything.positions(batch))


def test_weights_fall_over_the_block() -> None:
    # exp(0), exp(-1/2), exp(-1) are 1, .6065, .3679, in all 1.9744.
    weights = objective_of(tiny_target(), weight_reach=2.0).supervision.weights
    assert weights == pytest.approx([0.5065, 0.3072, 0.1863], abs=1e-4)


@pytest.mark.parametrize("settings", [{"anchors": 0}, {"weight_reach": 0.0}], ids=str)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"method.objective.{next(iter(settings))}="):
        ObjectiveConfig(**settings)
