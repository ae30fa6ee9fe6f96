"""EAGLE-1's objective: what meets in it, its two losses, its noise, and the whole way to a decoder."""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.compose import compose
from configs.errors import ConfigError
from configs.schema import DecodeConfig, Tree
from data.tokens import TokenRow
from decoding.build import build_decoder
from decoding.decoder import Params
from models import load_draft
from models.eagle1 import Eagle1, NetworkConfig
from models.target import Target
from tests.conftest import tiny_target
from tests.train.conftest import counting_target, written_rows
from tests.train.pupils import config, gradients, greedy, heldout, moves_every_weight, row
from tests.train.test_loop import interrupt_at, log, losses, train
from train import acceptance
from train.alignment import TABLE
from train.batches import Batch, collate
from train.features import Online, compute
from train.objectives.eagle1 import Eagle1Objective, ObjectiveConfig, build, uniform_noise
from train.unrolled import unroll

SOME = list(range(0, 64, 2))


def objective_of(
    target: Target,
    vocabulary: list[int] | None = None,
    network: dict[str, Any] | None = None,
    seed: int = 0,
    **settings: Any,
) -> Eagle1Objective:
    """Without noise, unless it is asked for."""
    size = None if vocabulary is None else len(vocabulary)
    draft = Eagle1.build(NetworkConfig(draft_vocab_size=size, **(network or {})), target)
    if vocabulary is not None:
        draft.set_vocabulary(torch.tensor(vocabulary))
    draft.initialise(0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.mul_(5 if weight.dim() > 1 else 1)
    return Eagle1Objective(draft, target, ObjectiveConfig(**{"noise": 0.0, **settings}), 1.0, seed)


def batch_of(target: Target, rows: list[TokenRow], objective: Eagle1Objective) -> Batch:
    return collate(rows, compute(target, rows, objective.taps), grain=1)


# Alignment


class Echo(nn.Module):
    """Says that the next feature is the one it read, and notes what it was given."""

    taps = (4,)
    draft_ids = torch.arange(64)

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.embedding, self.target = target.embedding, target
        self.given: list[tuple[list[float], list[int], list[int]]] = []

    def fuse(self, taps: Tensor) -> Tensor:
        return taps

    def forward(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        self.given.append((hidden[0, :, 0].tolist(), tokens[0].tolist(), positions[0].tolist()))
        return hidden

    def logits(self, state: Tensor) -> Tensor:
        return self.target.lm_head(state)


def test_rows_read_a_feature_with_the_next_token_and_predict_the_next_feature() -> None:
    """Tokens 10 .. 17, of which 14 .. 17 are the reply. The feature at j is j * j, everywhere in its vector.

    Rows 2 .. 5 predict 14 .. 17, with the features 9, 16, 25, 36 of one row on. An echo is wrong by
    5, 7, 9, 11, and SmoothL1 of a difference x > 1 is x - 0.5: 4.5 + 6.5 + 8.5 + 10.5 = 30.
    """
    target = tiny_target()
    echo = Echo(target)
    objective = Eagle1Objective(echo, target, ObjectiveConfig(ce_weight=0.0), 1.0, 0)  # pyright: ignore[reportArgumentType]
    j = torch.arange(8)
    squares = (j * j).float()[:, None].expand(-1, 32)
    batch = Batch(
        tokens=10 + j[None],
        mask=(j >= 4)[None],
        taps=squares[None],
        teacher=torch.where((j >= 3) & (j < 7), j - 3, -1)[None],
        hidden=squares[3:7],
        lse=torch.full((4,), 1e9),  # the target's law is not what this is about
        argmax=torch.zeros(4, dtype=torch.int64),
    )
    loss = objective.eval()(batch, objective.positions(batch))
    assert echo.given == [([0, 1, 4, 9, 16, 25], [11, 12, 13, 14, 15, 16], [0, 1, 2, 3, 4, 5])]
    errors, counts = loss.metrics["feature_loss"]
    assert (errors.tolist(), counts.tolist()) == ([30.0], [4])
    assert loss.value.item() == 7.5
    assert objective.first_label == 2


def test_one_step_is_the_table_s_row() -> None:
    assert TABLE["eagle1"](0) == TABLE["eagle3"](0)  # which train/unrolled.py goes by


# 10 tokens, of which t_5 .. t_9 are the reply: step 0 learns at rows 3 .. 7, and step 1 at rows 2 .. 6.
@pytest.mark.parametrize(("steps", "first"), [(1, 3), (2, 2)])
def test_gradient_reaches_the_reply_s_first_draft_and_not_the_prompt_s_interior(
    steps: int, first: int
) -> None:
    target = tiny_target()
    objective = Eagle1Objective(Echo(target), target, ObjectiveConfig(steps=steps), 1.0, 0).eval()  # pyright: ignore[reportArgumentType]
    batch = batch_of(target, [row(list(range(7, 17)), prompt=5)], objective)
    batch.taps.requires_grad_()
    objective(batch, objective.positions(batch)).value.backward()
    assert batch.taps.grad is not None
    touched = batch.taps.grad[0].abs().sum(-1) > 0
    assert touched.nonzero().squeeze(1).tolist() == list(range(first, 8))


# The loss


def by_definition(objective: Eagle1Objective, target: Target, tokens: list[int], mask: list[int]) -> Tensor:
    """The loss of one row in float64, each draft step as decoding takes it, with none of the shortcuts."""
    draft, settings = objective.draft, objective.settings
    out = target.forward(torch.tensor([tokens]))
    assert out.logits is not None
    features, law = out.last_hidden, out.logits[0].double().softmax(-1)[:, draft.draft_ids]
    if settings.draft_mass == "renormalise":
        law = law / law.sum(-1, keepdim=True)
    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    for i in range(settings.steps):
        terms = []
        for j in range(len(tokens) - 2 - i):
            if not mask[j + 2 + i]:
                continue
            state = steps_at(draft, features, tokens, j, i + 1)[-1].double()
            log_q = draft.logits(state.float()).double().log_softmax(-1)
            p = law[j + 1 + i]
            off = (state - features[0, j + 1 + i].double()).abs()
            regression = torch.where(off < 1, off**2 / 2, off - 0.5).mean()
            divergence = (p * (p.log() - log_q)).sum()
            terms.append(settings.feature_weight * regression + settings.ce_weight * divergence)
        total = total + settings.step_decay**i * torch.stack(terms).mean()
        weights += settings.step_decay**i
    return total / weights


class Cache:
    """Attends to all rows that it was ever given, as a decoder's cache does, and lets gradients through."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = layer not in self.rows
        if not first:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.rows[layer], (k, v), strict=True))
        self.rows[layer] = k, v
        return F.scaled_dot_product_attention(q, k, v, is_causal=first, enable_gqa=True)


def steps_at(draft: Eagle1, features: Tensor, tokens: list[int], j: int, steps: int) -> list[Tensor]:
    """Row j's predicted features [d] in decoding: true features up to j in its cache, then its own."""
    cache, texts = Cache(), torch.tensor([tokens])
    rows = draft.fuse(features[:, : j + 1])
    state = draft(rows, texts[:, 1 : j + 2], torch.arange(j + 1)[None], cache)[:, -1:]
    states = [state]
    for i in range(1, steps):
        state = draft(state, texts[:, j + 1 + i, None], torch.tensor([[j + i]]), cache)
        states.append(state)
    return [state[0, 0] for state in states]


@pytest.mark.parametrize(
    ("vocabulary", "settings"),
    [
        (None, {}),
        (SOME, {"feature_weight": 0.5, "ce_weight": 2.0}),
        (SOME, {"ce_weight": 1.0, "draft_mass": "renormalise"}),
        (None, {"feature_weight": 0.0, "ce_weight": 1.0}),
        (None, {"steps": 3, "step_decay": 0.5}),
    ],
    ids=str,
)
def test_loss_and_gradients_are_the_definition_s(
    vocabulary: list[int] | None, settings: dict[str, Any]
) -> None:
    target = tiny_target()
    network = {"layers": 2, "bias": True} if "steps" in settings else {}
    objective = objective_of(target, vocabulary, network, chunk=4, **settings)
    tokens = [5, 60, 7, 8, 33, 10, 11, 12, 13, 14, 2]
    # Two replies, the first so early that later steps cannot reach it.
    mask = [0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1]
    expected = by_definition(objective, target, tokens, mask)
    wanted = torch.autograd.grad(expected, list(objective.draft.parameters()))

    loss, grads = gradients(objective, [batch_of(target, [TokenRow("", "", tokens, mask)], objective)])

    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


def test_a_perfect_feature_costs_nothing() -> None:
    """Where the draft's feature is the target's, both losses are 0 and every token is the target's argmax."""
    target = tiny_target()
    objective = objective_of(target)
    batch = batch_of(target, [row(list(range(5, 15)), prompt=3)], objective)
    term = unroll(objective.draft, batch, 1).steps[0]
    term.states.data[term.mask] = batch.hidden[term.teacher[term.mask]]
    loss = objective.supervision.loss(batch, [term], objective.positions(batch), objective.draft.logits, [])
    assert loss.value.item() == pytest.approx(0, abs=1e-5)
    assert loss.metrics["accuracy"][0].tolist() == [7]


def test_loss_and_gradients_do_not_depend_on_padding_or_on_how_rows_are_batched() -> None:
    target = tiny_target()
    objective = objective_of(target, steps=2, chunk=5)
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
    for other in (one_by_one, to_the_grain):
        other_loss, other_grads = gradients(objective, other)
        assert other_loss == pytest.approx(loss, rel=1e-6)
        for a, b in zip(grads, other_grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"steps": 0}, "steps=0"),
        ({"step_decay": 0.0}, "step_decay=0"),
        ({"noise": -0.1}, "noise=-0.1"),
        ({"ce_weight": -1.0}, "ce_weight=-1"),
        ({"feature_weight": 0.0, "ce_weight": 0.0}, "both 0"),
        ({"divergence": "kl"}, "divergence='kl'"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ObjectiveConfig(**settings)


# Noise


ROWS = [row(list(range(5, 45)), prompt=3), row(list(range(9, 19)), prompt=3)]


def test_noise_is_uniform_and_a_sequence_s_own() -> None:
    target = tiny_target()
    objective = objective_of(target)
    noise = uniform_noise(batch_of(target, ROWS, objective), seed=0, step=7)
    assert 0.99 < noise.abs().max() <= 1
    assert noise[0].mean().abs() < 0.05 and noise[0].std().item() == pytest.approx(3**-0.5, rel=0.05)
    assert not torch.equal(noise[0, :10], noise[1, :10]) and not noise[1, 10:].any()
    padded = uniform_noise(collate(ROWS[1:], compute(target, ROWS[1:], objective.taps)), seed=0, step=7)
    assert torch.equal(padded[0, :10], noise[1, :10])


def test_noise_follows_the_seed_and_the_step_alone() -> None:
    target = tiny_target()
    batch = batch_of(target, ROWS, objective_of(target))

    def loss(step: int, seed: int = 0, noise: float = 0.1) -> float:
        torch.manual_seed(step + seed)  # which nothing depends on
        objective = objective_of(target, noise=noise, seed=seed).train()
        objective.begin(step)
        return objective(batch, objective.positions(batch)).value.item()

    assert loss(7) == loss(7)
    assert len({loss(7), loss(8), loss(7, seed=1), loss(7, seed=2**40), loss(7, noise=0.0)}) == 5


def test_features_are_disturbed_where_they_are_read_alone_and_in_training_alone() -> None:
    target = tiny_target()
    echo = Echo(target)
    objective = Eagle1Objective(echo, target, ObjectiveConfig(noise=0.5), 1.0, 0)  # pyright: ignore[reportArgumentType]
    batch = batch_of(target, ROWS[1:], objective)
    errors = [
        objective.train(training)(batch, objective.positions(batch)).metrics["feature_loss"][0].item()
        for training in (True, False)
    ]
    noisy, quiet = (torch.tensor(given[0]) for given in echo.given)
    assert 0 < (noisy - quiet).abs().max() <= 0.5
    assert torch.equal(quiet, batch.taps[0, :8, 0])
    assert errors[0] != errors[1]


# Training


def test_training_under_autocast_moves_every_weight() -> None:
    target = tiny_target(dtype=torch.bfloat16)
    rows = written_rows(target, count=4)
    network = NetworkConfig(layers=2, bias=True, draft_vocab_size=48)
    objective = build(network, ObjectiveConfig(steps=2), target, rows, 0).train()
    batch = batch_of(target, rows, objective)
    moves_every_weight(objective, batch)


@functools.cache  # training takes longer than what is tested with it
def learnt(steps: int, layers: int) -> tuple[Target, Eagle1Objective]:
    """A target and a draft trained on it until it is right often, and not always."""
    target = counting_target()
    rows = written_rows(target, count=24)
    network = NetworkConfig(draft_vocab_size=60, layers=layers)
    objective = build(network, ObjectiveConfig(steps=steps, ce_weight=1.0), target, rows, 0).train()
    batch = Online(target, rows, objective.taps).batch(range(len(rows)))
    optimizer = torch.optim.AdamW(objective.draft.parameters(), lr=1e-2)
    for step in range(40):
        objective.begin(step)
        loss = objective(batch, objective.positions(batch)).value
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return target, objective


@pytest.mark.parametrize(("steps", "layers"), [(1, 1), (2, 2)])
def test_decoder_and_estimate_agree(steps: int, layers: int) -> None:
    target, objective = learnt(steps, layers)
    found = acceptance.measure(objective, target, heldout(target), config("eagle1"))
    # In float32 the walk makes the very rounds that the decoder made.
    assert found["walk"] == pytest.approx(found["mean_acceptance_length"], abs=1e-9)
    assert 1.5 < found["mean_acceptance_length"] < 4
    assert not found["alarm"]


def test_matches_are_the_metric_s_accuracy_on_the_target_s_own_text() -> None:
    target, objective = learnt(2, 2)
    batch = batch_of(target, written_rows(target, count=3, seed=5), objective)
    objective.eval()
    correct, counted = objective(batch, objective.positions(batch)).metrics["accuracy"]
    matches = objective.matches(objective.draft, batch, steps=3)
    objective.train()
    # A row counts if all steps up to this one are supervised there: j >= 4 where the prompt has 6 tokens.
    assert matches[:, 4:].sum((0, 1)).tolist()[:2] == correct.tolist()
    assert counted.tolist() == [3 * 24, 3 * 23]
    assert 0 < correct[1] < counted[1]


# From the command line to a decoder


def whole(overrides: list[str]) -> list[str]:
    """The recipe of this method on the tiny workspace."""
    method = ["+experiment=smollm2_eagle1", "method.objective.ce_weight=1.0"]
    return method + [value for value in overrides[1:] if "objective.steps" not in value]


def test_distilled_it_decodes_what_plain_decoding_does(overrides: list[str]) -> None:
    run, printed = train(whole(overrides), "trainer.epochs=4", "trainer.eval_every=16")
    lines = log(run)
    assert run.parent.name == "smollm2_eagle1" and "draft vocabulary coverage: " in printed
    assert [line["step"] for line in lines if "heldout" in line] == [16, 32]
    assert losses(run)[-1] < losses(run)[0] / 2
    assert len(lines[0]["feature_loss"]) == len(lines[0]["accuracy"]) == 1
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
    few += ["trainer.accumulation=2"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(3, signal.SIGINT, patch)
        train(whole(overrides), *few)
    resumed, printed = train(whole(overrides), *few)
    undisturbed, _ = train(whole(overrides), *few)
    assert "going on from step 3 of 5" in printed and resumed != undisturbed
    assert losses(resumed) == losses(undisturbed)
    weights = Path("draft") / "model.safetensors"
    assert (resumed / weights).read_bytes() == (undisturbed / weights).read_bytes()
