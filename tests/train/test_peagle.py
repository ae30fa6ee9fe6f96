"""P-EAGLE's objective: states as decoding has them, and the share of places that train deep steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from configs.errors import ConfigError
from data.tokens import TokenRow
from models.peagle import MASK, NetworkConfig, PEagle
from models.target import Target
from tests.conftest import tiny_target
from tests.train.conftest import written_rows
from train.batches import Batch, collate
from train.features import compute
from train.objectives.peagle import ObjectiveConfig, PEagleObjective, parallel_states, taught


def objective_of(target: Target, layers: int = 2, **settings: Any) -> PEagleObjective:
    draft = PEagle.build(NetworkConfig(layers=layers, draft_vocab_size=None), target)
    draft.initialise(0, target)
    return PEagleObjective(draft, target, ObjectiveConfig(**settings), 1.0, seed=0)


def batch_of(target: Target, rows: list[TokenRow], objective: PEagleObjective) -> Batch:
    return collate(rows, compute(target, rows, objective.taps), grain=1)


def alone(draft: PEagle, batch: Batch, place: int, steps: int) -> Tensor:
    """[steps, d] as decoding computes them: a sequence that ends here, with masked rows behind it."""
    hidden = draft.fuse(batch.taps[:, : place + 1])
    hidden = torch.cat([hidden, draft.masked().expand(1, steps - 1, -1)], dim=1)
    tokens = torch.tensor([[*batch.tokens[0, 1 : place + 2].tolist(), *[MASK] * (steps - 1)]])
    return draft(hidden, tokens, torch.arange(tokens.shape[1])[None])[0, -steps:]


@pytest.mark.parametrize("layers", [1, 3])
def test_states_are_the_ones_that_decoding_computes(layers: int) -> None:
    target = tiny_target()
    objective = objective_of(target, layers)
    batch = batch_of(target, [TokenRow("", "", list(range(5, 20)), [0] * 6 + [1] * 9)], objective)
    met = taught(batch, 4)
    with torch.no_grad():
        rows, states = parallel_states(objective.draft, met, met.mask)
        checked = 0
        for n, place in enumerate(rows[0].tolist()):
            expected = alone(objective.draft, batch, place, 4)
            for i in met.mask[0, place].nonzero().flatten().tolist():
                torch.testing.assert_close(states[i][0, n], expected[i], rtol=1e-4, atol=1e-5)
                checked += 1
    assert checked == 4 * 9  # each of the nine reply tokens at each step


def test_only_rows_that_lead_to_a_supervised_one_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    objective = objective_of(target)
    fed: list[list[int]] = []
    forward = PEagle.forward

    def noted(self: PEagle, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Any = None) -> Tensor:
        fed.append(sorted(positions[0].tolist()))
        return forward(self, hidden, tokens, positions, attend)

    monkeypatch.setattr(PEagle, "forward", noted)
    monkeypatch.setattr("train.objectives.peagle.selection", lambda needed: chosen(needed))
    # 40 tokens, the last two of them the reply, t_38 and t_39. Step 1 predicts them from places 35 and 36,
    # step 2 from 34 and 35; so places 34, 35 need two masked rows and 36 one.
    batch = batch_of(target, [TokenRow("", "", list(range(5, 45)), [0] * 38 + [1] * 2)], objective)
    met = taught(batch, 3)
    rows, _ = parallel_states(objective.draft, met, met.mask)
    assert rows.tolist() == [[34, 35, 36, 37]]
    # The extra row, at position 1, keeps kernels from empty inputs.
    assert fed == [list(range(38)), [1, *sorted([35, 36, 36, 37, 37])]]


def chosen(needed: Tensor) -> Tensor:
    return needed[0].nonzero().flatten()[None]


def test_deep_steps_train_at_a_share_of_the_places() -> None:
    target = tiny_target()
    objective = objective_of(target, steps=4, keep=0.5)
    batch = batch_of(target, written_rows(target, count=16, reply=64), objective)
    met = taught(batch, 4)
    whole, kept = met.mask, objective.trained(batch, met)
    counts = objective.positions(batch)
    assert torch.equal(counts, kept.sum((0, 1)))
    assert counts[0] == whole[..., 0].sum() == 16 * 64
    # 1,024 places: half, a quarter and an eighth of them, to within four standard deviations.
    for i, (share, slack) in enumerate([(0.5, 0.063), (0.25, 0.055), (0.125, 0.042)], start=1):
        assert abs(float(counts[i] / whole[..., i].sum()) - share) < slack
    # A place that trains a step trains every supervised step before it.
    assert not (kept[..., 1:] & ~kept[..., :-1] & whole[..., :-1]).any()
    objective.begin(1)
    assert not torch.equal(objective.trained(batch, met), kept)
    objective.begin(0)
    assert torch.equal(objective.trained(batch, met), kept)


def test_dropped_places_still_give_the_kept_ones_their_states() -> None:
    target = tiny_target()
    objective = objective_of(target, steps=4, keep=0.5)
    batch = batch_of(target, written_rows(target, count=2), objective)
    met = taught(batch, 4)
    mask = objective.trained(batch, met)
    with torch.no_grad():
        rows, states = parallel_states(objective.draft, met, mask)
        all_rows, all_states = parallel_states(objective.draft, met, met.mask)
    for b in range(2):
        index = {place: n for n, place in enumerate(all_rows[b].tolist())}
        for n, place in enumerate(rows[b].tolist()):
            for i in mask[b, place].nonzero().flatten().tolist():
                expected = all_states[i][b, index[place]]
                torch.testing.assert_close(states[i][b, n], expected, rtol=1e-4, atol=1e-5)


def test_one_step_is_eagle3_s_first() -> None:
    target = tiny_target()
    objective = objective_of(target, steps=1)
    batch = batch_of(target, written_rows(target, count=2), objective)
    loss = objective(batch, objective.positions(batch))
    loss.value.backward()
    assert objective.draft.mask_hidden.grad is None and loss.metrics["loss"][0].shape == (1,)


@pytest.mark.parametrize(
    "settings", [{"steps": 0}, {"step_decay": 0.0}, {"keep": 0.0}, {"keep": 1.1}], ids=str
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"method.objective.{next(iter(settings))}="):
        ObjectiveConfig(**settings)
