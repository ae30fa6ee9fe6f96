"""The EAGLE-3 objective on the tiny target: what is supervised, how rows attend, and what the loss does not
depend on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from configs.errors import ConfigError
from data.tokens import TokenRow
from decoding.cache import DraftCache
from models.eagle3 import Eagle3
from models.target import Target
from tests.conftest import tiny_draft, tiny_target
from tests.train.conftest import written_rows
from tests.train.pupils import gradients, moves_every_weight, padded, row
from train.batches import Batch, collate
from train.features import compute
from train.objectives.eagle3 import Eagle3Objective, ObjectiveConfig
from train.supervision import selection
from train.unrolled import unroll


def objective_of(target: Target, draft: Eagle3 | None = None, **settings: Any) -> Eagle3Objective:
    draft = tiny_draft(target) if draft is None else draft
    return Eagle3Objective(draft, target, ObjectiveConfig(**settings), coverage=1.0)


def batch_of(target: Target, rows: list[TokenRow], objective: Eagle3Objective) -> Batch:
    return collate(rows, compute(target, rows, objective.taps), grain=1)


class Rowwise(nn.Module):
    """A draft whose rows do not see each other: what reaches row j's feature is row j's part in the loss."""

    def __init__(self, draft: Eagle3) -> None:
        super().__init__()
        self.draft, self.taps, self.draft_ids = draft, draft.taps, draft.draft_ids

    def fuse(self, taps: Tensor) -> Tensor:
        return self.draft.fuse(taps)

    def forward(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        return hidden + 1.0

    def logits(self, state: Tensor) -> Tensor:
        return self.draft.logits(state)


# 10 tokens, of which t_5 .. t_9 are the reply. Row j predicts t_{j+2+i} at step i, so rows with a part in the
# loss are step 0: 3 .. 7, step 1: 2 .. 6, step 2: 1 .. 5. Row 4 is the first that decoding drafts from: it
# holds t_5, pending.
@pytest.mark.parametrize(("steps", "first"), [(1, 3), (2, 2), (3, 1)])
def test_gradient_reaches_the_reply_s_first_draft_and_not_the_prompt_s_interior(
    steps: int, first: int
) -> None:
    target = tiny_target()
    rowwise = Rowwise(tiny_draft(target))
    objective = objective_of(target, rowwise, steps=steps)  # pyright: ignore[reportArgumentType]
    batch = batch_of(target, [row([7, 8, 9, 10, 11, 12, 13, 14, 15, 16], prompt=5)], objective)
    batch.taps.requires_grad_()

    objective(batch, objective.positions(batch)).value.backward()

    assert batch.taps.grad is not None
    touched = batch.taps.grad[0].abs().sum(-1) > 0
    assert touched.nonzero().squeeze(1).tolist() == list(range(first, 8))
    assert objective.positions(batch).tolist() == [5, 5, 5][:steps]


def test_positions_that_the_sequence_s_start_takes_away_are_not_counted() -> None:
    target = tiny_target()
    objective = objective_of(target, steps=3)

    # All of t_1 .. t_6 are the reply: step i can predict t_{2+i} and later.
    assert objective.positions(
        batch_of(target, [row([3, 4, 5, 6, 7, 8, 9], prompt=1)], objective)
    ).tolist() == [5, 4, 3]


def sequential(draft: Eagle3, batch: Batch, steps: int) -> Tensor:
    """[T - 1 - steps, steps, d]: row j's states as decoding computes them, one sequence for each row, with a
    K/V cache."""
    tokens, g = batch.tokens, draft.fuse(batch.taps)
    found = []
    for j in range(tokens.shape[1] - 1 - steps):
        cache = DraftCache(draft.shape.layers)
        state = draft(g[:, : j + 1], tokens[:, 1 : j + 2], torch.arange(j + 1)[None], cache.attend)[:, -1:]
        states = [state]
        for i in range(1, steps):
            state = draft(state, tokens[:, j + 1 + i, None], torch.tensor([[j + i]]), cache.attend)
            states.append(state)
        found.append(torch.cat(states, dim=1)[0])
    return torch.stack(found)


@pytest.mark.parametrize("network", [{}, {"layers": 2}, {"layers": 3, "norm_output": True}])
def test_unrolled_states_are_the_ones_that_decoding_computes(network: dict[str, Any]) -> None:
    target = tiny_target()
    objective = objective_of(target, tiny_draft(target, **network), steps=4)
    batch = batch_of(target, [row(list(range(5, 20)), prompt=0)], objective)
    with torch.no_grad():
        unrolled = unroll(objective.draft, batch, steps=4)
        expected = sequential(objective.draft, batch, steps=4)

    # Every row is supervised, so rows come in order.
    states = torch.stack([step.states[0] for step in unrolled.steps], dim=1)
    assert unrolled.rows.tolist() == [list(range(13))]
    torch.testing.assert_close(states[: len(expected)], expected, rtol=1e-5, atol=1e-5)


def test_only_rows_that_some_step_supervises_are_unrolled() -> None:
    needed = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 0, 0, 0, 0, 0]]).bool()

    # The second sequence is filled up with rows that no step supervises.
    assert selection(needed, grain=1).tolist() == [[2, 3, 5], [0, 1, 2]]


def test_loss_and_gradients_do_not_depend_on_padding_or_on_how_rows_are_batched() -> None:
    target = tiny_target()
    objective = objective_of(target, steps=3, chunk=5)
    rows = [
        row(list(range(5, 21)), prompt=6),
        row([9, 8, 7, 6, 5, 4, 3], prompt=3),
        row([30, 31, 32, 33, 34], prompt=1),
    ]
    together = batch_of(target, rows, objective)
    loss, grads = gradients(objective, [together])
    assert loss > 0 and all(grad.abs().max() > 0 for grad in grads)

    one_by_one = [batch_of(target, [r], objective) for r in rows]
    to_the_grain = [collate(rows, compute(target, rows, objective.taps))]
    for other in ([padded(together, 9)], one_by_one, to_the_grain):
        other_loss, other_grads = gradients(objective, other)
        assert other_loss == pytest.approx(loss, rel=1e-6)
        for a, b in zip(grads, other_grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_batch_without_a_trained_token_teaches_nothing() -> None:
    """A row whose features are not finite is silenced, and may be alone in its batch."""
    target = tiny_target()
    objective = objective_of(target, steps=3)
    silent = TokenRow("", "", [5, 6, 7, 8, 9], [0] * 5)
    batch = batch_of(target, [silent], objective)
    assert objective.positions(batch).tolist() == [0, 0, 0]
    assert objective(batch, objective.positions(batch)).value.item() == 0
    assert not objective.matches(objective.draft, batch, 3).any()


def kept_bytes(objective: Eagle3Objective, batch: Batch) -> int:
    """What the forward pass keeps for the backward pass."""
    kept = 0

    def note(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        objective(batch, objective.positions(batch))
    return kept


def test_recomputing_changes_no_bit_and_keeps_less() -> None:
    target = tiny_target()
    draft = tiny_draft(target, layers=2)
    rows = [row(list(range(5, 60)), prompt=6), row([9, 8, 7, 6, 5, 4, 3], prompt=3)]
    plain, frugal = (objective_of(target, draft, steps=4, recompute=on) for on in (False, True))
    batch = batch_of(target, rows, plain)

    loss, grads = gradients(plain, [batch])
    grads = [grad.clone() for grad in grads]
    again, recomputed = gradients(frugal, [batch])

    assert loss == again
    assert all(torch.equal(a, b) for a, b in zip(grads, recomputed, strict=True))
    # The rest is layers and heads, small as they are here.
    assert kept_bytes(frugal, batch) < 0.8 * kept_bytes(plain, batch)


def straightforward(objective: Eagle3Objective, target: Target, tokens: list[int], mask: list[int]) -> Tensor:
    """The loss of one row, from the target's full logits, with none of the shortcuts."""
    draft, settings = objective.draft, objective.settings
    ids = torch.tensor([tokens])
    out = target.forward(ids, taps=objective.taps)
    assert out.logits is not None and out.taps is not None
    batch = collate(
        [TokenRow("", "", tokens, mask)], compute(target, [TokenRow("", "", tokens, mask)], objective.taps)
    )
    p = out.logits[0].softmax(-1)[:, draft.draft_ids]
    if settings.draft_mass == "renormalise":
        p = p / p.sum(-1, keepdim=True)
    total, weights = torch.zeros(()), 0.0
    for i, step in enumerate(unroll(draft, batch, settings.steps).steps):
        terms = []
        for n, j in enumerate(unroll(draft, batch, settings.steps).rows[0].tolist()):
            if j + 2 + i < len(tokens) and mask[j + 2 + i]:
                taught = p[j + 1 + i]
                log_q = draft.logits(step.states[0, n]).log_softmax(-1)
                terms.append((taught * (taught.log() - log_q)).sum())
        total = total + settings.step_decay**i * torch.stack(terms).mean()
        weights += settings.step_decay**i
    return total / weights


@pytest.mark.parametrize("draft_mass", ["keep", "renormalise"])
@pytest.mark.parametrize("vocabulary", [list(range(0, 64, 2)), list(range(64))])
def test_loss_and_gradients_are_the_definition_s(draft_mass: str, vocabulary: list[int]) -> None:
    target = tiny_target()
    draft = tiny_draft(target, vocabulary=vocabulary)
    objective = objective_of(target, draft, steps=3, step_decay=0.5, draft_mass=draft_mass, chunk=4)
    tokens = [5, 60, 7, 8, 33, 10, 11, 12, 13, 14, 2]
    # Two replies, the first so early that later steps cannot reach it.
    mask = [0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1]
    expected = straightforward(objective, target, tokens, mask)
    wanted = torch.autograd.grad(expected, list(draft.parameters()))

    loss, grads = gradients(objective, [batch_of(target, [TokenRow("", "", tokens, mask)], objective)])

    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


def test_metrics_count_tokens_outside_the_draft_vocabulary_as_misses() -> None:
    target = tiny_target()
    rows = written_rows(target, count=4)
    reply = sorted({token for r in rows for token in r.input_ids[6:]})
    inside, outside = reply[::2], reply[1::2]
    draft = tiny_draft(target, vocabulary=inside)
    objective = objective_of(target, draft, steps=2)
    batch = batch_of(target, rows, objective)
    labels = torch.tensor([r.input_ids for r in rows])[:, 6:]
    hopeless = torch.isin(labels, torch.tensor(outside)).sum()

    correct, counted = objective(batch, objective.positions(batch)).metrics["accuracy"]
    alpha, _ = objective(batch, objective.positions(batch)).metrics["alpha"]
    mass = objective.supervision.teacher.law(batch.hidden, batch.lse).sum(-1)

    # 24 reply tokens, all with an m_{j+2}; step 1 needs m_{j+2} and m_{j+3}: one row less of each sequence.
    assert counted.tolist() == [4 * 24, 4 * 23]
    assert hopeless > 0 and correct[0] <= 4 * 24 - hopeless
    assert 0 < alpha[0] <= mass.sum() and mass.max() < 1.0001


def test_accuracy_is_joint_over_the_steps() -> None:
    target = tiny_target()
    objective = objective_of(target, steps=3)
    batch = batch_of(target, written_rows(target, count=3), objective)
    metrics = objective(batch, objective.positions(batch)).metrics
    matches = objective.matches(objective.draft, batch, steps=3)

    # On the target's own greedy text its argmax is the next token, so `matches` must count the same, row by
    # row. A row counts only if all steps up to this one are supervised there: j >= 4 where the prompt has 6
    # tokens.
    assert matches[:, 4:].sum((0, 1)).tolist() == metrics["accuracy"][0].tolist()
    assert (matches[..., 1:] <= matches[..., :-1]).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 0},
        {"chunk": 0},
        {"draft_mass": "drop"},
        {"step_decay": 0.0},
        {"divergence": "kl"},
        {"jsd_beta": 1.0},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"method.objective.*{next(iter(settings))}"):
        ObjectiveConfig(**settings)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_one_to_three_layers_stay_finite_under_autocast(layers: int) -> None:
    target = tiny_target(dtype=torch.bfloat16)
    objective = objective_of(target, tiny_draft(target, layers=layers), steps=3)
    batch = batch_of(target, written_rows(target, count=4), objective)
    moves_every_weight(objective, batch)
    assert all(torch.isfinite(p).all() for p in objective.draft.parameters())
