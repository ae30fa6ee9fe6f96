"""The objectives of Medusa's and Hydra's heads: which rows, tokens and target rows meet, the loss against its
definition, and the whole way from `python -m train.distill` to a decoder."""

from __future__ import annotations

import dataclasses
import functools
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.compose import compose
from configs.errors import ConfigError
from configs.schema import DecodeConfig, MethodConfig, Tree
from data.tokens import TokenRow
from decoding.build import build_decoder
from decoding.decoder import Params
from decoding.sequoia import best_tree
from decoding.shapes import Conditions, write_shape
from models import load_draft
from models.hydra import Hydra
from models.medusa import HeadsNetwork, Medusa
from models.target import Target
from tests.conftest import tiny_target
from tests.train.conftest import counting_target, written_rows
from tests.train.pupils import config, fit, gradients, heldout, moves_every_weight, row
from tests.train.test_loop import interrupt_at, log, losses, train
from train import acceptance, alignment
from train.alignment import TABLE, Offsets
from train.batches import Batch, collate
from train.distill import find_method
from train.features import Online, compute
from train.objectives import hydra, medusa
from train.objectives.medusa import HeadsObjective, MedusaObjective, Met, meet

METHODS = ("medusa", "hydra")
CLASSES: dict[str, Any] = {"medusa": Medusa, "hydra": Hydra}
PARAMS = Params(3, 24, temperature=0.0, top_k=0, top_p=1.0, stop=(), seed=0)
OBJECTIVES: dict[str, Any] = {"medusa": MedusaObjective, "hydra": hydra.HydraObjective}
SETTINGS: dict[str, Any] = {"medusa": medusa.ObjectiveConfig, "hydra": hydra.ObjectiveConfig}


def objective_of(
    method: str,
    target: Target,
    vocabulary: Sequence[int] | None = None,
    network: dict[str, Any] | None = None,
    **settings: Any,
) -> HeadsObjective:
    """Three heads with weights away from their start, so that all of them matter."""
    size = None if vocabulary is None else len(vocabulary)
    config = find_method(MethodConfig(method)).network
    config = dataclasses.replace(config, **{"heads": 3, "draft_vocab_size": size, **(network or {})})
    draft = CLASSES[method].build(config, target)
    if vocabulary is not None:
        draft.set_vocabulary(torch.tensor(vocabulary))
    draft.initialise(target)
    vary(draft)
    return OBJECTIVES[method](draft, target, SETTINGS[method](**settings), 1.0)


@torch.no_grad()
def vary(draft: HeadsNetwork) -> None:
    generator = torch.Generator().manual_seed(1)
    for weight in draft.parameters():
        weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)


def batch_of(target: Target, rows: list[TokenRow], taps: tuple[int, ...]) -> Batch:
    return collate(rows, compute(target, rows, taps), grain=1)


# Alignment


def probe(method: str) -> tuple[Tensor, Tensor, list[Met]]:
    """Tokens 10 to 17, of which 14 to 17 are the reply; feature, target row and token j say j."""
    j = torch.arange(8)
    batch = Batch(
        tokens=10 + j[None],
        mask=(j >= 4)[None],
        taps=j[None, :, None].float(),
        teacher=torch.where((j >= 3) & (j < 7), j, -1)[None],
        hidden=torch.zeros(8, 1),
        lse=torch.zeros(8),
        argmax=torch.zeros(8, dtype=torch.int64),
    )
    return meet(batch, [TABLE[method](k) for k in (1, 2, 3)])


# Row j predicts t_{j+1+k} with head k: the reply 14 .. 17 from rows 2 .. 5, 1 .. 4 and 0 .. 3. Rows 6 and 7
# predict nothing, and come last as padding.
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("k", "rows", "teacher", "labels"),
    [
        (1, [2, 3, 4, 5], [3, 4, 5, 6], [14, 15, 16, 17]),
        (2, [1, 2, 3, 4], [3, 4, 5, 6], [14, 15, 16, 17]),
        (3, [0, 1, 2, 3], [3, 4, 5, 6], [14, 15, 16, 17]),
    ],
)
def test_which_target_row_teaches_which_head(
    method: str, k: int, rows: list[int], teacher: list[int], labels: list[int]
) -> None:
    selected, features, met = probe(method)
    head = met[k - 1]
    assert selected.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert features[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert selected[head.mask].tolist() == rows
    assert head.teacher[head.mask].tolist() == teacher
    assert head.labels[head.mask].tolist() == labels


def test_medusa_embeds_no_tokens_and_hydra_those_in_between() -> None:
    assert all(head.tokens == () for head in probe("medusa")[2])
    _, _, met = probe("hydra")
    # Row 2 holds h_2; t_3 = 13 is pending, and head 3 predicts t_6 having read t_3, t_4 and t_5.
    assert [tokens[0, 2].item() for tokens in met[0].tokens] == [13]
    assert [tokens[0, 2].item() for tokens in met[2].tokens] == [13, 14, 15]
    assert met[2].labels[0, 2].item() == 16


@pytest.mark.parametrize("method", METHODS)
def test_gradient_reaches_the_reply_s_first_draft_and_not_the_prompt_s_interior(method: str) -> None:
    """10 tokens, t_5 .. t_9 the reply: head 1 learns at rows 3 .. 7, head 2 at 2 .. 6, head 3 at 1 .. 5."""
    target = tiny_target()
    objective = objective_of(method, target)
    batch = batch_of(target, [row(list(range(7, 17)), prompt=5)], objective.taps)
    batch.taps.requires_grad_()
    objective(batch, objective.positions(batch)).value.backward()
    assert batch.taps.grad is not None
    touched = batch.taps.grad[0].abs().sum(-1) > 0
    assert touched.nonzero().squeeze(1).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert objective.positions(batch).tolist() == [5, 5, 5]
    assert objective.taps == (4,)  # the last hidden state of four layers
    assert objective.first_label == 2


@pytest.mark.parametrize("method", METHODS)
def test_positions_that_the_sequence_s_start_takes_away_are_not_counted(method: str) -> None:
    """All of t_1 .. t_6 are the reply; head k can predict t_{1+k} and later."""
    target = tiny_target()
    objective = objective_of(method, target)
    batch = batch_of(target, [row([3, 4, 5, 6, 7, 8, 9], prompt=1)], objective.taps)
    assert objective.positions(batch).tolist() == [5, 4, 3]


# The loss


def by_definition(objective: HeadsObjective, target: Target, tokens: list[int], mask: list[int]) -> Tensor:
    """sum_k decay^k mean_j KL(p_{j+k} || head k at j) of one row, float64, with none of the shortcuts."""
    draft, decay = objective.draft, objective.supervision.settings.head_decay  # pyright: ignore[reportAttributeAccessIssue]
    out = target.forward(torch.tensor([tokens]))
    assert out.logits is not None
    law, hidden = out.logits[0].double().softmax(-1)[:, draft.draft_ids], out.last_hidden[0]
    total = torch.zeros((), dtype=torch.float64)
    for k in range(1, draft.heads + 1):
        projection = draft.lm_heads[k - 1 if len(draft.lm_heads) > 1 else 0]
        terms = []
        for j in range(len(tokens) - 1 - k):
            if not mask[j + 1 + k]:
                continue
            read = hidden[j]
            if isinstance(draft, Hydra):
                between = target.embedding[torch.tensor(tokens[j + 1 : j + 1 + k])]
                read = torch.cat([read, between.flatten()])
            log_q = projection(draft.blocks[k - 1](read)).double().log_softmax(-1)
            p = law[j + k]
            terms.append((p * (p.log() - log_q)).sum())
        total = total + decay**k * torch.stack(terms).mean()
    return total


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("vocabulary", "network"),
    [
        (None, {}),
        (range(0, 64, 2), {"layers": 2}),
        (range(0, 64, 2), {"projection": "shared"}),
        (None, {"projection": "frozen"}),
    ],
    ids=["all", "half", "shared", "frozen"],
)
def test_loss_and_gradients_are_the_definition_s(
    method: str, vocabulary: Sequence[int] | None, network: dict[str, Any]
) -> None:
    target = tiny_target()
    objective = objective_of(method, target, vocabulary, network, head_decay=0.5, chunk=4)
    trained = [weight for weight in objective.draft.parameters() if weight.requires_grad]
    tokens = [5, 60, 7, 8, 33, 10, 11, 12, 13, 14, 2]
    # Two replies, the first so early that later heads cannot reach it.
    mask = [0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1]
    expected = by_definition(objective, target, tokens, mask)
    wanted = torch.autograd.grad(expected, trained)

    batch = batch_of(target, [TokenRow("", "", tokens, mask)], objective.taps)
    loss, grads = gradients(objective, [batch])

    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert len(grads) == len(trained)
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


def test_heads_weigh_what_the_papers_give_them() -> None:
    target = tiny_target()
    assert objective_of("medusa", target).supervision.weights == pytest.approx([0.8, 0.64, 0.512])
    assert objective_of("hydra", target).supervision.weights == [1, 1, 1]
    with pytest.raises(ConfigError, match="head_decay=0"):
        medusa.ObjectiveConfig(head_decay=0)


@pytest.mark.parametrize("method", METHODS)
def test_loss_and_gradients_do_not_depend_on_padding_or_on_how_rows_are_batched(method: str) -> None:
    target = tiny_target()
    objective = objective_of(method, target, chunk=5)
    rows = [
        row(list(range(5, 21)), prompt=6),
        row([9, 8, 7, 6, 5, 4, 3], prompt=3),
        row([30, 31, 32, 33, 34], prompt=1),
    ]
    together = batch_of(target, rows, objective.taps)
    loss, grads = gradients(objective, [together])
    assert loss > 0 and all(grad.abs().max() > 0 for grad in grads)

    one_by_one = [batch_of(target, [r], objective.taps) for r in rows]
    to_the_grain = [collate(rows, compute(target, rows, objective.taps))]
    for other in (one_by_one, to_the_grain):
        other_loss, other_grads = gradients(objective, other)
        assert other_loss == pytest.approx(loss, rel=1e-6)
        for a, b in zip(grads, other_grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_frozen_projection_stays_and_blocks_learn(method: str) -> None:
    target = tiny_target()
    objective = objective_of(method, target, network={"projection": "frozen"})
    batch = batch_of(target, written_rows(target, count=4), objective.taps)
    objective(batch, objective.positions(batch)).value.backward()
    still = [name for name, weight in objective.draft.named_parameters() if weight.grad is None]
    assert still == ["lm_heads.0.weight"]


@pytest.mark.parametrize("method", METHODS)
def test_training_under_autocast_moves_every_weight(method: str) -> None:
    target = tiny_target(dtype=torch.bfloat16)
    settings = SETTINGS[method]()
    rows = written_rows(target, count=4)
    network = dataclasses.replace(find_method(MethodConfig(method)).network, heads=3)
    objective = (medusa if method == "medusa" else hydra).build(network, settings, target, rows, 0)
    batch = batch_of(target, rows, objective.taps)
    moves_every_weight(objective, batch)


# Estimate and decoder


def learnt(method: str) -> tuple[Target, HeadsObjective]:
    """A target and heads trained on it until they are right often, and not always."""
    target = counting_target()
    objective = objective_of(method, target, range(4, 64))
    rows = written_rows(target, count=32)
    batch = Online(target, rows, objective.taps).batch(range(len(rows)))
    fit(objective, batch, steps=60, lr=1e-2)
    return target, objective


once_learnt = functools.cache(learnt)  # training takes longer than what is tested with it


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("draft_tokens", [2, 3, 5])  # there are three heads
def test_decoder_and_estimate_agree(method: str, draft_tokens: int) -> None:
    target, objective = once_learnt(method)
    found = acceptance.measure(objective, target, heldout(target), config(method, draft_tokens=draft_tokens))
    # In float32 the walk makes the very rounds that the decoder made.
    assert found["walk"] == pytest.approx(found["mean_acceptance_length"], abs=1e-9)
    assert 1.5 < found["mean_acceptance_length"] < 1 + min(draft_tokens, 3)
    assert not found["alarm"]


def shifted(k: int) -> Offsets:
    """Medusa's row with target and label one too early: consistent, so training sees nothing of it."""
    return Offsets(0, (), target=k - 1, label=k, mask=k)


def test_a_shift_by_one_in_the_alignment_raises_the_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(alignment.TABLE, "medusa", shifted)
    target, objective = learnt("medusa")
    found = acceptance.measure(objective, target, heldout(target), config("medusa"))
    assert found["walk"] > 1.8  # by its own lights the draft is good
    assert found["mean_acceptance_length"] < found["walk"] - 0.3
    assert found["alarm"]


@pytest.mark.parametrize("method", METHODS)
def test_matches_are_the_metric_s_accuracy_on_the_target_s_own_text(method: str) -> None:
    target, objective = once_learnt(method)
    batch = batch_of(target, written_rows(target, count=3, seed=5), objective.taps)
    with torch.no_grad():
        correct, counted = objective(batch, objective.positions(batch)).metrics["accuracy"]
        matches = objective.matches(objective.draft, batch, steps=3)
    # A row counts if all heads up to this one are supervised there: j >= 4 where the prompt has 6 tokens.
    assert matches[:, 4:].sum((0, 1)).tolist() == correct.tolist()
    assert counted.tolist() == [3 * 24, 3 * 23, 3 * 22]
    assert 0 < correct[2] < counted[2]
    assert (matches[..., 1:] <= matches[..., :-1]).all()
    assert torch.equal(objective.matches(objective.draft, batch, steps=2), matches[..., :2])


def test_a_tree_made_for_the_heads_decodes_what_plain_decoding_does(tmp_path: Path) -> None:
    """Heads' accuracies by rank, the best tree of 7 nodes for them, and a decoder that reads its file."""
    target, objective = once_learnt("medusa")
    draft: Any = acceptance.deployed(objective.draft, target)
    vectors = ranks_hit(draft, target)
    best = best_tree(vectors, nodes=7, depth=draft.heads)
    write_shape(tmp_path / "tree.json", best.shape, Conditions(vectors=vectors, temperature=0.0))
    chain = build_decoder(target, draft, DecodeConfig(draft_tokens=3))
    static = build_decoder(
        target, draft, DecodeConfig(tree=Tree.static, tree_file=str(tmp_path / "tree.json"))
    )
    rounds = {"chain": 0, "static": 0}
    for prompt in heldout(target)[:6]:
        plain = written(target, prompt.ids, 24)
        for name, decoder in (("chain", chain), ("static", static)):
            generation = decoder.generate(prompt.ids, PARAMS)
            assert generation.tokens == plain
            rounds[name] += len(generation.rounds)
    assert len(best.shape) == 7 and best.expected_tokens > 1.5
    assert rounds["static"] < rounds["chain"]


@torch.no_grad()
def ranks_hit(draft: Any, target: Target, ranks: int = 4) -> list[list[float]]:
    """[head][rank]: how often head k's choice of that rank is the target's own token, on its own text."""
    rows = written_rows(target, count=16, seed=3)
    tokens = torch.tensor([r.input_ids for r in rows])
    hidden = target.forward(tokens).last_hidden
    best = draft.draft_ids[draft.project(draft(hidden)).topk(ranks).indices]  # [heads, B, T, ranks]
    return [
        (best[k - 1, :, 6 : -1 - k] == tokens[:, 7 + k :, None]).double().mean((0, 1)).tolist()
        for k in range(1, draft.heads + 1)
    ]


def written(target: Target, ids: list[int], length: int) -> list[int]:
    """The target's greedy continuation, up to its end of text."""
    made = list(ids)
    while len(made) < len(ids) + length:
        logits = target.forward(torch.tensor([made])).logits
        assert logits is not None
        made.append(int(logits[0, -1].argmax()))
        if made[-1] in target.eos_ids:
            break
    return made[len(ids) :]


# The whole way


def recipe(method: str, overrides: list[str]) -> list[str]:
    """The tiny workspace's overrides for the method's own recipe."""
    kept = [o for o in overrides if not o.startswith(("+experiment", "method.objective"))]
    return [f"+experiment=smollm2_{method}", *kept]


@pytest.mark.parametrize("method", [*METHODS, "medusa2"])
def test_recipes_share_the_prepared_data_and_the_budget(method: str) -> None:
    ours = compose([f"+experiment=smollm2_{method}"])
    reference = compose(["+experiment=smollm2_cpu"])
    assert ours.experiment == f"smollm2_{method}"
    assert ours.method.name == method
    for part in ("target", "data", "regenerate", "trainer", "decode", "eval"):
        assert getattr(ours, part) == getattr(reference, part)
    find_method(ours.method)


@pytest.mark.parametrize("method", METHODS)
def test_distilled_interrupted_resumed_measured_and_decoded(
    method: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = [*recipe(method, overrides), "trainer.epochs=3", "trainer.lr=3e-2", "trainer.eval_every=12"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(3, signal.SIGINT, patch)
        train(ours)
    run, printed = train(ours)
    assert "going on from step 3 of 24" in printed and "draft vocabulary coverage" in printed
    undisturbed, _ = train(ours)
    assert undisturbed != run and losses(run) == losses(undisturbed)
    assert losses(run)[-1] < losses(run)[0]
    measured = [line["heldout"] for line in log(run) if "heldout" in line]
    assert len(measured) == 2 and measured[-1]["mean_acceptance_length"] > 1.1  # after steps 12 and 24
    assert all(found["walk"] == pytest.approx(found["mean_acceptance_length"]) for found in measured)
    assert not any(found["alarm"] for found in measured)

    target = Target.load(compose(ours).target)
    draft = load_draft(run / "draft", target)
    assert draft.heads == 3 and len(draft.draft_ids) == 60
    decoder = build_decoder(target, draft, compose(ours).decode)
    for prompt in heldout(target)[:3]:
        assert decoder.generate(prompt.ids, PARAMS).tokens == written(target, prompt.ids, 24)
