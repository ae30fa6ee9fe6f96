"""The small model's objective on the tiny target: which row is taught what, by which law, on whose text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.errors import ConfigError
from configs.schema import Config, DataConfig, DecodeConfig, MethodConfig, TargetConfig, TrainerConfig
from data.tokens import Prompt, TokenRow
from decoding.randomness import Key, Purpose
from decoding.warp import Warp
from models.small import NetworkConfig, Small
from models.target import Target
from tests.conftest import tiny_target
from tests.train.conftest import counting_target, written_rows
from tests.train.pupils import moves_every_weight, padded, row
from train import acceptance
from train.alignment import Offsets
from train.batches import Batch, collate
from train.features import Online, compute
from train.objectives import Loss
from train.objectives import small as module
from train.objectives.small import ObjectiveConfig, SmallObjective, build, rewrite, seeded


def small(target: Target, vocabulary: list[int] | None = None, **network: Any) -> Small:
    size = None if vocabulary is None else len(vocabulary)
    draft = Small.build(NetworkConfig(**{"layers": 2, "draft_vocab_size": size, **network}), target)
    if vocabulary is not None:
        draft.set_vocabulary(torch.tensor(vocabulary))
    draft.initialise(0, target)
    return draft


def objective_of(target: Target, draft: Small | None = None, **settings: Any) -> SmallObjective:
    return SmallObjective(draft or small(target), target, ObjectiveConfig(**settings), coverage=1.0)


def batch_of(target: Target, rows: Sequence[TokenRow]) -> Batch:
    return collate(rows, compute(target, rows, ()), grain=1)


# Alignment


def test_row_j_is_taught_by_target_row_j_to_predict_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """t_j = 10 + j, of which t_3, t_4, t_5 are the reply: rows 2, 3, 4 predict them, as the target's do."""
    target = tiny_target()
    objective = objective_of(target)
    monkeypatch.setattr(Small, "forward", lambda self, tokens: tokens[..., None].float())
    taught: list[Any] = []

    def loss(batch: Batch, terms: Any, positions: Tensor, logits: Any, parameters: Any) -> Loss:
        taught.extend(terms)
        return Loss(torch.zeros(()))

    monkeypatch.setattr(objective.supervision, "loss", loss)
    batch = batch_of(target, [row([10, 11, 12, 13, 14, 15], prompt=3)])
    objective(batch, objective.positions(batch))

    [term] = taught
    at = term.mask[0]
    assert objective.positions(batch).tolist() == [3]
    assert term.states[0, at, 0].tolist() == [12, 13, 14]  # what the row has just read
    assert term.labels[0, at].tolist() == [13, 14, 15]
    # The target's rows are packed in order, so what teaches must be its states at t_2, t_3, t_4.
    hidden = target.forward(batch.tokens).last_hidden[0, [2, 3, 4]]
    torch.testing.assert_close(batch.hidden[term.teacher[0, at]], hidden)


def test_the_first_token_of_a_row_is_never_predicted() -> None:
    target = tiny_target()
    assert objective_of(target).positions(batch_of(target, [row([3, 4, 5], prompt=0)])).tolist() == [2]


def test_matches_say_whether_each_draft_after_a_row_and_all_before_it_are_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The network predicts its token + 1, and t = 5 6 7 9 10 11: right at all rows but the one of t_2 = 7.

    Draft i of row j is t_{j+2+i}; t_1 and t_2 are right, t_3 = 9 wrong, t_4 and t_5 right.
    """
    target = tiny_target()
    draft = small(target)
    one_hot = torch.eye(64)
    monkeypatch.setattr(Small, "forward", lambda self, tokens: one_hot[tokens + 1])
    monkeypatch.setattr(Small, "logits", lambda self, states: states)
    batch = batch_of(target, [row([5, 6, 7, 9, 10, 11], prompt=1)])

    found = objective_of(target, draft).matches(draft, batch, steps=3)

    assert found[0].int().tolist() == [
        [1, 0, 0],  # t_2, then t_3
        [0, 0, 0],  # t_3
        [1, 1, 0],  # t_4, t_5, and there the text ends
        [1, 0, 0],  # t_5
        [0, 0, 0],
        [0, 0, 0],
    ]


# The loss


def definition(objective: SmallObjective, target: Target, tokens: list[int], mask: list[int]) -> Tensor:
    """The mean loss of one row from full logits, with none of the shortcuts."""
    draft = objective.draft
    out = target.forward(torch.tensor([tokens])).logits
    assert out is not None
    p = out[0].double().softmax(-1)[:, draft.draft_ids]
    log_q = draft.logits(draft(torch.tensor([tokens])))[0].double().log_softmax(-1)
    alpha = torch.minimum(p, log_q.exp()).sum(-1)
    value = {
        "forward_kl": (p * (p.log() - log_q)).sum(-1),
        "reverse_kl": (log_q.exp() * (log_q - p.log())).sum(-1),
        "tv": 1 - alpha,
        "nla": -alpha.log(),
    }[objective.settings.divergence]
    return value[[j for j in range(len(tokens) - 1) if mask[j + 1]]].mean()


def gradients(objective: SmallObjective, batches: Sequence[Batch]) -> tuple[float, list[Tensor]]:
    """Loss and gradients of one optimiser step over `batches`."""
    objective.zero_grad()
    positions = torch.stack([objective.positions(batch) for batch in batches]).sum(0)
    losses = [objective(batch, positions).value for batch in batches]
    for loss in losses:
        loss.backward()
    found = [weight.grad for weight in objective.draft.parameters()]
    assert all(grad is not None and grad.abs().max() > 0 for grad in found)
    return sum(loss.item() for loss in losses), [grad for grad in found if grad is not None]


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "tv", "nla"])
@pytest.mark.parametrize(
    ("vocabulary", "network"),
    [
        (None, {}),
        (list(range(0, 64, 2)), {}),
        (None, {"embedding": "own", "head": "tied"}),
        (list(range(0, 64, 2)), {"head": "factored", "head_rank": 8}),
    ],
    ids=str,
)
def test_loss_and_gradients_are_the_definition_s(
    divergence: str, vocabulary: list[int] | None, network: dict[str, Any]
) -> None:
    target = tiny_target()
    objective = objective_of(target, small(target, vocabulary, **network), divergence=divergence, chunk=3)
    tokens = [5, 60, 7, 8, 33, 10, 11, 12, 13, 14, 2]
    mask = [0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1]  # two replies
    expected = definition(objective, target, tokens, mask)
    wanted = torch.autograd.grad(expected, list(objective.draft.parameters()))

    loss, found = gradients(objective, [batch_of(target, [TokenRow("", "", tokens, mask)])])

    assert loss == pytest.approx(expected.item(), rel=1e-4)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


def test_loss_and_gradients_do_not_depend_on_padding_batching_or_chunks() -> None:
    target = tiny_target()
    objective = objective_of(target, chunk=5)
    rows = [
        row(list(range(5, 21)), prompt=6),
        row([9, 8, 7, 6, 5, 4, 3], prompt=3),
        row([30, 31, 32, 33, 34], prompt=1),
    ]
    together = batch_of(target, rows)
    loss, expected = gradients(objective, [together])

    one_by_one = [batch_of(target, [r]) for r in rows]
    to_the_grain = [collate(rows, compute(target, rows, ()))]
    in_one_chunk = objective_of(target, objective.draft)
    cases = [(objective, [padded(together, 9)]), (objective, one_by_one), (objective, to_the_grain)]
    for other, batches in [*cases, (in_one_chunk, [together])]:
        other_loss, found = gradients(other, batches)
        assert other_loss == pytest.approx(loss, rel=1e-5)
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_draft_that_is_the_target_has_nothing_to_learn() -> None:
    target = tiny_target()
    objective = objective_of(target, small(target, layers=4))
    batch = batch_of(target, written_rows(target, count=3))
    loss = objective(batch, objective.positions(batch))
    right, counted = loss.metrics["accuracy"]
    alpha, _ = loss.metrics["alpha"]
    assert loss.value.item() == pytest.approx(0, abs=1e-5)
    assert right.tolist() == counted.tolist() == [3 * 24]
    assert alpha.item() == pytest.approx(3 * 24, rel=1e-4)


@pytest.mark.parametrize("network", [{}, {"embedding": "own", "head": "tied"}], ids=str)
def test_masters_are_float32_and_all_of_them_move_under_autocast(network: dict[str, Any]) -> None:
    target = tiny_target(dtype=torch.bfloat16)
    objective = objective_of(target, small(target, **network))
    batch = batch_of(target, written_rows(target, count=4))
    moves_every_weight(objective, batch)


# Train = decode


def config() -> Config:
    return Config(
        experiment="test",
        target=TargetConfig(name="tiny"),
        method=MethodConfig(name="small"),
        data=DataConfig(folder="unused"),
        decode=DecodeConfig(draft_tokens=3),
        trainer=TrainerConfig(eval_new_tokens=24),
    )


def trained(target: Target, draft: Small, steps: int = 25) -> SmallObjective:
    objective = objective_of(target, draft)
    batch = Online(target, written_rows(target, count=32), ()).batch(range(32))
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = objective(batch, objective.positions(batch)).value
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return objective


def heldout(target: Target) -> list[Prompt]:
    rows = written_rows(target, count=24, reply=1, seed=1)
    return [Prompt(row.id, "tiny", row.input_ids[:6]) for row in rows]


@pytest.mark.parametrize(
    ("vocabulary", "network"),
    [
        (None, {"layers": 1}),
        (list(range(56)), {"start": "scratch", "layers": 1, "hidden_size": 16, "head": "tied"}),
        (None, {"layers": 1, "head": "factored", "head_rank": 12}),
    ],
    ids=str,
)
def test_decoder_and_estimate_agree(vocabulary: list[int] | None, network: dict[str, Any]) -> None:
    target = counting_target()
    found = acceptance.measure(
        trained(target, small(target, vocabulary, **network)), target, heldout(target), config()
    )
    assert found["walk"] == pytest.approx(found["mean_acceptance_length"], abs=1e-9)
    assert 1.5 < found["mean_acceptance_length"] < 4  # of at most 4
    assert not found["alarm"]


def test_a_shift_by_one_in_the_alignment_raises_the_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    target = counting_target()
    monkeypatch.setattr(module, "PLAIN", Offsets(None, (0,), target=1, label=2, mask=2))
    objective = trained(target, small(target, start="scratch", layers=1))
    found = acceptance.measure(objective, target, heldout(target)[:12], config())
    assert found["mean_acceptance_length"] < found["walk"] - 0.3
    assert found["alarm"]


# Text of the draft's own

ROWS = [  # the target is at liberty to write other replies of the same lengths
    row([20, 21, 22, 9, 9, 9, 9], prompt=3),
    row([30, 9, 9], prompt=1),
    TokenRow("turns", "", [40, 41, 9, 42, 43, 9, 9, 44], [0, 0, 1, 0, 0, 1, 1, 0]),
]


def test_a_draft_that_is_the_target_writes_what_the_target_writes() -> None:
    target = counting_target()
    draft = small(target, layers=2).requires_grad_(False)  # all there are
    expected = written_rows(target, count=5)
    blank = [row(r.input_ids[:6] + [9] * 24, prompt=6) for r in expected]

    written = rewrite(draft, blank, [seeded(n) for n in range(5)], Warp(temperature=0.0), frozenset())

    assert [r.input_ids for r in written] == [r.input_ids for r in expected]
    assert [r.loss_mask for r in written] == [r.loss_mask for r in expected]


def test_the_last_reply_is_rewritten_at_its_length_and_only_it_is_trained_on() -> None:
    draft = small(tiny_target()).requires_grad_(False)
    first, second, turns = rewrite(draft, ROWS, [seeded(n) for n in range(3)], Warp(), frozenset())
    assert (first.input_ids[:3], first.loss_mask) == ([20, 21, 22], [0, 0, 0, 1, 1, 1, 1])
    assert (second.input_ids[:1], second.loss_mask) == ([30], [0, 1, 1])
    assert (turns.input_ids[:5], turns.loss_mask) == ([40, 41, 9, 42, 43], [0, 0, 0, 0, 0, 1, 1])
    assert turns.id == "turns"


@pytest.mark.parametrize("vocabulary", [None, list(range(0, 64, 2))])
@torch.no_grad()
def test_replies_are_drawn_from_the_draft_s_law_and_end_at_its_end(vocabulary: list[int] | None) -> None:
    draft = small(tiny_target(), vocabulary).requires_grad_(False)
    warp, ends = Warp(temperature=0.7), frozenset({2, 12, 14, 40})
    ids = draft.draft_ids.tolist()

    def alone(old: TokenRow, start: int, seed: int) -> list[int]:
        text = old.input_ids[:start]
        length = start + sum(old.loss_mask[start:])
        while len(text) < length and (len(text) == start or text[-1] not in ends):
            law = warp(draft.logits(draft(torch.tensor([text]))[0, -1]))
            text = [*text, ids[seeded(seed).draw(law, Key(len(text), Purpose.emit))]]
        return text

    for seed in range(8):
        written = rewrite(draft, ROWS, [seeded(seed)] * 3, warp, ends)
        expected = [alone(old, start, seed) for old, start in zip(ROWS, (3, 1, 5), strict=True)]
        assert [new.input_ids for new in written] == expected


def on_policy(target: Target, share: float, rows: Sequence[TokenRow] = ROWS) -> SmallObjective:
    settings = ObjectiveConfig(on_policy=share)
    network = NetworkConfig(layers=2, draft_vocab_size=60)
    return build(network, settings, target, rows, seed=3)


def test_a_share_of_the_micro_batches_is_the_draft_s_own_by_seed_and_step_alone() -> None:
    target = tiny_target()
    objective = on_policy(target, 0.5)
    given = Online(target, ROWS, ())
    logged = given.batch([0, 1]).tokens

    def texts(step: int) -> Tensor:
        objective.begin(step)
        return objective.batch(given, [0, 1]).tokens

    written = [not torch.equal(texts(step), logged) for step in range(60)]
    assert 20 < sum(written) < 40
    assert not torch.equal(texts(written.index(True)), texts(59 - written[::-1].index(True)))
    assert all(torch.equal(texts(step), texts(step)) for step in range(5))


def test_without_a_share_the_features_are_asked_and_the_draft_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    objective = on_policy(target, 0.0)
    monkeypatch.setattr(Small, "forward", lambda *arguments: pytest.fail("the draft wrote"))
    for step in range(20):
        objective.begin(step)
        objective.batch(Online(target, ROWS, ()), [0, 2])


def test_the_target_teaches_what_it_thinks_of_the_new_text() -> None:
    target = tiny_target()
    objective = on_policy(target, 1.0)
    before = [weight.detach().clone() for weight in objective.draft.parameters()]
    batch = objective.batch(Online(target, ROWS, ()), [0])
    assert batch.tokens[0, 3:7].tolist() != [9, 9, 9, 9]
    hidden = target.forward(batch.tokens[:, :7]).last_hidden[0, 2:6]
    torch.testing.assert_close(batch.hidden[:4], hidden)
    assert objective.positions(batch).tolist() == [4]

    objective(batch, objective.positions(batch)).value.backward()

    assert all(weight.requires_grad and weight.grad is not None for weight in objective.draft.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, objective.draft.parameters(), strict=True))


@pytest.mark.parametrize(
    "settings", [{"on_policy": 1.5}, {"on_policy": -0.1}, {"on_policy_temperature": -1.0}, {"chunk": 0}]
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"method.objective.*{next(iter(settings))}"):
        ObjectiveConfig(**settings)
