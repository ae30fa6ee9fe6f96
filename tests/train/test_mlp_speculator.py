"""The MLP speculator's objective: what meets in it, its loss, and the whole way to a decoder."""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from configs.compose import compose
from configs.errors import ConfigError
from configs.schema import DecodeConfig, Tree
from data.tokens import TokenRow
from decoding.build import build_decoder
from decoding.decoder import Params
from models import load_draft
from models.mlp_speculator import MlpSpeculator, NetworkConfig
from models.target import Target
from tests.conftest import tiny_target
from tests.train.conftest import counting_target, written_rows
from tests.train.pupils import config, fit, gradients, greedy, heldout, moves_every_weight, row
from tests.train.test_loop import interrupt_at, log, losses, train
from train import acceptance
from train.batches import Batch, collate
from train.features import Online, compute
from train.objectives.mlp_speculator import MlpSpeculatorObjective, ObjectiveConfig, build

SOME = list(range(0, 64, 2))


def objective_of(
    target: Target,
    vocabulary: list[int] | None = None,
    network: dict[str, Any] | None = None,
    **settings: Any,
) -> MlpSpeculatorObjective:
    size = None if vocabulary is None else len(vocabulary)
    draft = MlpSpeculator.build(NetworkConfig(draft_vocab_size=size, **(network or {})), target)
    if vocabulary is not None:
        draft.set_vocabulary(torch.tensor(vocabulary))
    draft.initialise(0)
    return MlpSpeculatorObjective(draft, target, ObjectiveConfig(**settings), 1.0)


def batch_of(target: Target, rows: list[TokenRow], objective: MlpSpeculatorObjective) -> Batch:
    return collate(rows, compute(target, rows, objective.taps), grain=1)


# Alignment


class Spelled(nn.Module):
    """Three heads whose state is all that was read, as a decimal number of two digits each."""

    taps = (4,)
    draft_ids = torch.arange(64)
    heads = 3

    def start(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return self.step(hidden, tokens, 0)

    def step(self, state: Tensor, tokens: Tensor, depth: int) -> Tensor:
        return state * 100 + tokens[..., None]


def test_a_step_reads_the_feature_and_the_tokens_up_to_the_one_before_its_label() -> None:
    """Tokens 10 .. 17, of which 14 .. 17 are the reply; the feature and the target row at j are j.

    Row 2 has read h_2; t_3 = 13 is pending. Its step 0 predicts t_4 = 14, its step 2 t_6 = 16.
    """
    target = tiny_target()
    spelled: Any = Spelled()
    objective = MlpSpeculatorObjective(spelled, target, ObjectiveConfig(), 1.0)
    j = torch.arange(8)
    batch = Batch(
        tokens=10 + j[None],
        mask=(j >= 4)[None],
        taps=j[None, :, None].double(),
        teacher=torch.where((j >= 3) & (j < 7), j, -1)[None],
        hidden=torch.zeros(8, 1),
        lse=torch.zeros(8),
        argmax=torch.zeros(8, dtype=torch.int64),
    )
    rows, terms = objective.terms(spelled, batch)
    assert [rows[term.mask].tolist() for term in terms] == [[2, 3, 4, 5], [1, 2, 3, 4], [0, 1, 2, 3]]
    for term in terms:
        assert term.teacher[term.mask].tolist() == [3, 4, 5, 6]
        assert term.labels[term.mask].tolist() == [14, 15, 16, 17]
    assert [int(term.states[0, 2, 0]) for term in terms] == [2_13, 2_13_14, 2_13_14_15]
    assert [int(term.labels[0, 2]) for term in terms] == [14, 15, 16]
    assert objective.positions(batch).tolist() == [4, 4, 4]
    assert objective.first_label == 2


def test_gradient_reaches_the_reply_s_first_draft_and_not_the_prompt_s_interior() -> None:
    """10 tokens, t_5 .. t_9 the reply: step 0 learns at rows 3 .. 7, step 1 at 2 .. 6, step 2 at 1 .. 5."""
    target = tiny_target()
    objective = objective_of(target)
    batch = batch_of(target, [row(list(range(7, 17)), prompt=5)], objective)
    batch.taps.requires_grad_()
    objective(batch, objective.positions(batch)).value.backward()
    assert batch.taps.grad is not None
    touched = batch.taps.grad[0].abs().sum(-1) > 0
    assert touched.nonzero().squeeze(1).tolist() == [1, 2, 3, 4, 5, 6, 7]


# The loss


def by_definition(
    objective: MlpSpeculatorObjective, target: Target, tokens: list[int], mask: list[int]
) -> Tensor:
    """sum_i decay^i mean_j KL(p_{j+1+i} || step i at j) of one row, float64, with none of the shortcuts."""
    draft, decay = objective.draft, objective.supervision.weights
    out = target.forward(torch.tensor([tokens]))
    assert out.logits is not None
    law, hidden = out.logits[0].double().softmax(-1)[:, draft.draft_ids], out.last_hidden[0]
    texts, total = torch.tensor(tokens), torch.zeros((), dtype=torch.float64)
    for i in range(draft.heads):
        terms = []
        for j in range(len(tokens) - 2 - i):
            if not mask[j + 2 + i]:
                continue
            state = draft.start(hidden[j], texts[j + 1])
            for depth in range(1, i + 1):
                state = draft.step(state, texts[j + 1 + depth], depth)
            log_q = draft.logits(state, i).double().log_softmax(-1)
            p = law[j + 1 + i]
            terms.append((p * (p.log() - log_q)).sum())
        total = total + decay[i] * torch.stack(terms).mean()
    return total


@pytest.mark.parametrize(
    ("vocabulary", "network"),
    [(None, {}), (SOME, {"inner_dim": 24}), (SOME, {"tie_weights": False, "scale_input": False})],
    ids=str,
)
def test_loss_and_gradients_are_the_definition_s(
    vocabulary: list[int] | None, network: dict[str, Any]
) -> None:
    target = tiny_target()
    objective = objective_of(target, vocabulary, network, head_decay=0.5, chunk=4)
    assert objective.supervision.weights == [1, 0.5, 0.25]
    tokens = [5, 60, 7, 8, 33, 10, 11, 12, 13, 14, 2]
    # Two replies, the first so early that later steps cannot reach it.
    mask = [0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1]
    expected = by_definition(objective, target, tokens, mask)
    wanted = torch.autograd.grad(expected, list(objective.draft.parameters()))

    loss, grads = gradients(objective, [batch_of(target, [TokenRow("", "", tokens, mask)], objective)])

    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert len(grads) == len(wanted)
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


def test_loss_and_gradients_do_not_depend_on_padding_or_on_how_rows_are_batched() -> None:
    target = tiny_target()
    objective = objective_of(target, chunk=5)
    rows = [
        row(list(range(5, 21)), prompt=6),
        row([9, 8, 7, 6, 5, 4, 3], prompt=3),
        row([30, 31, 32, 33, 34], prompt=1),
    ]
    loss, grads = gradients(objective, [batch_of(target, rows, objective)])
    assert loss > 0 and all(grad.abs().max() > 0 for grad in grads)

    one_by_one = [batch_of(target, [r], objective) for r in rows]
    to_the_grain = [collate(rows, compute(target, rows, objective.taps))]
    for other in (one_by_one, to_the_grain):
        other_loss, other_grads = gradients(objective, other)
        assert other_loss == pytest.approx(loss, rel=1e-6)
        for a, b in zip(grads, other_grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="head_decay=0"):
        ObjectiveConfig(head_decay=0)


# Training


@pytest.mark.parametrize("tie_weights", [True, False])
def test_training_under_autocast_moves_every_weight(tie_weights: bool) -> None:
    target = tiny_target(dtype=torch.bfloat16)
    rows = written_rows(target, count=4)
    network = NetworkConfig(draft_vocab_size=48, tie_weights=tie_weights)
    objective = build(network, ObjectiveConfig(), target, rows, 0)
    batch = batch_of(target, rows, objective)
    moves_every_weight(objective, batch)


@functools.cache  # training takes longer than what is tested with it
def learnt(tie_weights: bool) -> tuple[Target, MlpSpeculatorObjective]:
    """A target and a draft trained on it until it is right often, and not always."""
    target = counting_target()
    rows = written_rows(target, count=32)
    network = NetworkConfig(draft_vocab_size=60, tie_weights=tie_weights)
    objective = build(network, ObjectiveConfig(), target, rows, 0)
    batch = Online(target, rows, objective.taps).batch(range(len(rows)))
    fit(objective, batch, steps=60, lr=1e-2)
    return target, objective


@pytest.mark.parametrize(("tie_weights", "draft_tokens"), [(True, 2), (True, 5), (False, 3)])
def test_decoder_and_estimate_agree(tie_weights: bool, draft_tokens: int) -> None:
    target, objective = learnt(tie_weights)
    found = acceptance.measure(
        objective, target, heldout(target), config("mlp_speculator", draft_tokens=draft_tokens)
    )
    # In float32 the walk makes the very rounds that the decoder made; there are three heads.
    assert found["walk"] == pytest.approx(found["mean_acceptance_length"], abs=1e-9)
    assert 1.5 < found["mean_acceptance_length"] < 1 + min(draft_tokens, 3)
    assert not found["alarm"]


def test_matches_are_the_metric_s_accuracy_on_the_target_s_own_text() -> None:
    target, objective = learnt(True)
    batch = batch_of(target, written_rows(target, count=3, seed=5), objective)
    correct, counted = objective(batch, objective.positions(batch)).metrics["accuracy"]
    matches = objective.matches(objective.draft, batch, steps=3)
    # A row counts if all steps up to this one are supervised there: j >= 4 where the prompt has 6 tokens.
    assert matches[:, 4:].sum((0, 1)).tolist() == correct.tolist()
    assert counted.tolist() == [3 * 24, 3 * 23, 3 * 22]
    assert 0 < correct[2] < counted[2]
    assert torch.equal(objective.matches(objective.draft, batch, steps=2), matches[..., :2])


# From the command line to a decoder


def whole(overrides: list[str]) -> list[str]:
    """The recipe of this method on the tiny workspace."""
    kept = [value for value in overrides[1:] if "objective.steps" not in value]
    return ["+experiment=smollm2_mlp_speculator", *kept]


def test_distilled_it_decodes_what_plain_decoding_does(overrides: list[str]) -> None:
    run, printed = train(whole(overrides), "trainer.epochs=4", "trainer.eval_every=16")
    lines = log(run)
    assert run.parent.name == "smollm2_mlp_speculator" and "draft vocabulary coverage: " in printed
    assert [line["step"] for line in lines if "heldout" in line] == [16, 32]
    assert losses(run)[-1] < losses(run)[0] / 2
    assert len(lines[0]["loss_by_term"]) == len(lines[0]["accuracy"]) == 3
    assert not any(line["heldout"]["alarm"] for line in lines if "heldout" in line)

    target = Target.load(compose(whole(overrides)).target)
    draft = load_draft(run / "draft", target)
    params = Params(3, 24, temperature=0.0, top_k=0, top_p=1.0, stop=(), seed=0)
    for decode in (DecodeConfig(), DecodeConfig(tree=Tree.dynamic, tree_nodes=8, tree_width=2)):
        decoder = build_decoder(target, draft, decode)
        found = [decoder.generate(prompt.ids, params) for prompt in heldout(target)[:6]]
        for prompt, generation in zip(heldout(target)[:6], found, strict=True):
            assert generation.tokens == greedy(target, prompt.ids, 24)
        rounds = [done for generation in found for done in generation.rounds]
        assert sum(done.accepted for done in rounds) > len(rounds) / 2


def test_an_interrupted_run_goes_on_bit_equal(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["trainer.max_steps=5", "trainer.save_every=2", "trainer.eval_every=0", "trainer.eval_prompts=2"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(3, signal.SIGINT, patch)
        train(whole(overrides), *few)
    resumed, printed = train(whole(overrides), *few)
    undisturbed, _ = train(whole(overrides), *few)
    assert "going on from step 3 of 5" in printed and resumed != undisturbed
    assert losses(resumed) == losses(undisturbed)
    weights = Path("draft") / "model.safetensors"
    assert (resumed / weights).read_bytes() == (undisturbed / weights).read_bytes()
