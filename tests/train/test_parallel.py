"""What P-EAGLE's objective and the block objective share: what meets at a place, the loss against its
definition, and the whole way from `python -m train.distill` to a decoder."""

from __future__ import annotations

import dataclasses
import functools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.compose import compose
from configs.schema import MethodConfig
from data.tokens import TokenRow
from decoding.build import build_decoder
from decoding.decoder import Params, Request
from models import load_draft
from models.target import Target
from tests.conftest import tiny_target
from tests.train.conftest import counting_target, written_rows
from tests.train.pupils import config, fit, gradients, heldout, moves_every_weight, row
from tests.train.test_loop import interrupt_at, log, losses, train
from train import acceptance, alignment
from train.alignment import TABLE, Offsets
from train.batches import Batch, collate
from train.distill import find_method
from train.features import compute
from train.objectives import dflash, peagle
from train.parallel import draws, lesson, visible

METHODS = ("peagle", "dflash")
OBJECTIVES: dict[str, Any] = {"peagle": peagle, "dflash": dflash}
PARAMS = Params(3, 24, temperature=0.0, top_k=0, top_p=1.0, stop=(), seed=0)


def objective_of(method: str, target: Target, size: int | None = None, **objective: Any) -> Any:
    """Three tokens at once, drafted over all of the vocabulary, or the lowest ids, and trained everywhere."""
    given: dict[str, Any] = {"layers": 2, "draft_vocab_size": size}
    given |= {"block_size": 4} if method == "dflash" else {}
    objective = {"anchors": None} | objective if method == "dflash" else {"steps": 3, "keep": 1.0} | objective
    made = find_method(MethodConfig(method, given, objective))
    return made.build(target, [], seed=0)


def batch_of(target: Target, rows: list[TokenRow], taps: tuple[int, ...]) -> Batch:
    return collate(rows, compute(target, rows, taps), grain=1)


def states_of(objective: Any, batch: Batch, steps: int = 3) -> tuple[Tensor, list[Tensor]]:
    """The places [B, R] that have a part in the loss, and each step's states [B, R, d] there."""
    if isinstance(objective, peagle.PEagleObjective):
        taught = peagle.taught(batch, steps)
        return peagle.parallel_states(objective.draft, taught, taught.mask)
    taught = dflash.taught(batch, objective.draft)
    return dflash.block_states(objective.draft, taught, taught.mask)


# Alignment


def probe() -> Batch:
    """Tokens 10 to 17, of which 14 to 17 are the reply; feature and target row j say j."""
    j = torch.arange(8)
    return Batch(
        tokens=10 + j[None],
        mask=(j >= 4)[None],
        taps=j[None, :, None].float(),
        teacher=torch.where((j >= 3) & (j < 7), j, -1)[None],
        hidden=torch.zeros(8, 1),
        lse=torch.zeros(8),
        argmax=torch.zeros(8, dtype=torch.int64),
    )


@pytest.mark.parametrize(("method", "first"), [("peagle", 0), ("dflash", 1)])
def test_what_meets_at_a_place(method: str, first: int) -> None:
    """Place n knows features up to n and the pending token n + 1, and predicts n + 2, n + 3, n + 4."""
    met = lesson(probe(), [TABLE[method](first + i) for i in range(3)])
    assert met.features[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert met.pending.tolist() == [[11, 12, 13, 14, 15, 16]]
    assert met.places.tolist() == [[0, 1, 2, 3, 4, 5]]
    for i, places in enumerate([[2, 3, 4, 5], [1, 2, 3, 4], [0, 1, 2, 3]]):
        mask = met.mask[0, :, i]
        assert mask.nonzero().flatten().tolist() == places
        assert met.labels[0, :, i][mask].tolist() == [14, 15, 16, 17]
        assert met.teacher[0, :, i][mask].tolist() == [3, 4, 5, 6]


def test_rows_see_the_context_up_to_their_place_and_their_own() -> None:
    place, step = torch.tensor([[0, 2, 2]]), torch.tensor([[1, 1, 2]])
    causal, both = (visible(place, step, 3, causal)[0, 0].int().tolist() for causal in (True, False))
    #                  context   rows
    assert causal == [[1, 0, 0,  1, 0, 0],
                      [1, 1, 1,  0, 1, 0],
                      [1, 1, 1,  0, 1, 1]]  # fmt: skip
    assert both == [[1, 0, 0, 1, 0, 0], [1, 1, 1, 0, 1, 1], [1, 1, 1, 0, 1, 1]]


# Draws


def test_draws_are_a_sequence_s_own() -> None:
    target = tiny_target()
    rows = [row(list(range(5, 21)), prompt=6), row([9, 8, 7, 6, 5, 4, 3], prompt=3)]
    together, alone = batch_of(target, rows, ()), batch_of(target, rows[1:], ())
    drawn = draws(together, seed=3, step=5)
    assert drawn.shape == (2, 16) and (drawn >= 0).all() and (drawn < 1).all()
    assert torch.equal(drawn[1:, :7], draws(alone, 3, 5))
    assert not torch.equal(drawn[0, :7], drawn[1, :7])
    for other in (draws(together, 4, 5), draws(together, 3, 6)):
        assert not torch.isclose(drawn, other).any()


# Loss


def by_definition(objective: Any, target: Target, tokens: list[int], mask: list[int]) -> Tensor:
    """The loss of one row, from the target's full logits, with none of the shortcuts."""
    draft = objective.draft
    out = target.forward(torch.tensor([tokens]))
    assert out.logits is not None
    p = out.logits[0].softmax(-1)[:, draft.draft_ids]
    rows, states = states_of(objective, batch_of(target, [TokenRow("", "", tokens, mask)], objective.taps))
    total = torch.zeros(())
    for i, weight in enumerate(objective.supervision.weights):
        terms = []
        for n, place in enumerate(rows[0].tolist()):
            if place + 2 + i < len(tokens) and mask[place + 2 + i]:
                q = draft.logits(states[i][0, n]).log_softmax(-1)
                law = p[place + 1 + i]
                terms.append((law * (law.log() - q)).sum())
        total = total + weight * torch.stack(terms).mean()
    return total


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [20, None])
def test_loss_and_gradients_are_the_definition_s(method: str, size: int | None) -> None:
    target = tiny_target()
    objective = objective_of(method, target, size, chunk=4)
    tokens = [5, 60, 7, 8, 33, 10, 11, 12, 13, 14, 2]
    # Two replies, the first so early that later steps cannot reach it.
    mask = [0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1]
    expected = by_definition(objective, target, tokens, mask)
    wanted = torch.autograd.grad(expected, list(objective.draft.parameters()))
    loss, grads = gradients(objective, [batch_of(target, [TokenRow("", "", tokens, mask)], objective.taps)])
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "settings"),
    [("peagle", {}), ("peagle", {"keep": 0.5}), ("dflash", {}), ("dflash", {"anchors": 3})],
)
def test_neither_padding_nor_batching_matters(method: str, settings: dict[str, Any]) -> None:
    target = tiny_target()
    objective = objective_of(method, target, chunk=5, **settings)
    rows = [
        row(list(range(5, 21)), prompt=6),
        row([9, 8, 7, 6, 5, 4, 3], prompt=3),
        row([30, 31, 32, 33, 34], prompt=1),
    ]
    together = batch_of(target, rows, objective.taps)
    loss, grads = gradients(objective, [together])
    assert loss > 0 and all(grad.abs().max() > 0 for grad in grads)
    one_by_one = [batch_of(target, [r], objective.taps) for r in rows]
    to_the_grain = collate(rows, compute(target, rows, objective.taps))
    far = to_the_grain.taps.clone()
    far[:, 16:] = 7.0  # padding whose features are far from zero
    for other in (one_by_one, [dataclasses.replace(to_the_grain, taps=far)]):
        other_loss, other_grads = gradients(objective, other)
        assert other_loss == pytest.approx(loss, rel=1e-6)
        for a, b in zip(grads, other_grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# Ten tokens, of which t_5 .. t_9 are the reply. Step i predicts it from places 3 - i .. 7 - i, so place 1 is
# the first with a part in it; features before it are seen as context, those from place 8 on by nobody.
@pytest.mark.parametrize("method", METHODS)
def test_what_comes_after_the_last_place_is_not_read(method: str) -> None:
    target = tiny_target()
    objective = objective_of(method, target)
    batch = batch_of(target, [row([7, 8, 9, 10, 11, 12, 13, 14, 15, 16], prompt=5)], objective.taps)
    batch.taps.requires_grad_()
    rows, _ = states_of(objective, batch)
    objective(batch, objective.positions(batch)).value.backward()
    assert batch.taps.grad is not None
    touched = batch.taps.grad[0].abs().sum(-1) > 0
    assert touched.nonzero().flatten().tolist() == list(range(8))
    assert set(range(1, 8)) <= set(rows[0].tolist())
    assert objective.positions(batch).tolist() == [5, 5, 5]


@pytest.mark.parametrize("method", METHODS)
def test_training_under_autocast_moves_every_weight(method: str) -> None:
    target = tiny_target(dtype=torch.bfloat16)
    objective = objective_of(method, target, 48)
    batch = batch_of(target, written_rows(target, count=4), objective.taps)
    moves_every_weight(objective, batch)


# Estimate and decoder


def learnt(method: str) -> tuple[Target, Any]:
    """A target and a draft trained on it until it is right often, and not always."""
    target = counting_target()
    objective = objective_of(method, target)
    rows = written_rows(target, count=20)
    batch = batch_of(target, rows, objective.taps)
    fit(objective, batch, steps=50, lr=1e-2, clip=0.5)
    return target, objective


once_learnt = functools.cache(learnt)  # training takes longer than what is tested with it


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("draft_tokens", [2, 3, 5])  # beyond the third, P-EAGLE is untrained; a block ends
def test_decoder_and_estimate_agree(method: str, draft_tokens: int) -> None:
    target, objective = once_learnt(method)
    found = acceptance.measure(objective, target, heldout(target), config(method, draft_tokens=draft_tokens))
    # In float32 the walk makes the very rounds that the decoder made.
    assert found["walk"] == pytest.approx(found["mean_acceptance_length"], abs=1e-9)
    assert 1.3 < found["mean_acceptance_length"] < 1 + draft_tokens
    assert not found["alarm"]


def shifted(i: int) -> Offsets:
    """P-EAGLE's row, all but the feature one too early: consistent, so training sees nothing of it."""
    return Offsets(0, (0,), target=i, label=i + 1, mask=i + 1)


def test_a_shift_by_one_in_the_alignment_raises_the_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(alignment.TABLE, "peagle", shifted)
    target, objective = learnt("peagle")
    found = acceptance.measure(objective, target, heldout(target), config("peagle"))
    assert found["walk"] > 1.5  # by its own lights the draft is good
    assert found["mean_acceptance_length"] < found["walk"] - 0.3
    assert found["alarm"]


@pytest.mark.parametrize("method", METHODS)
def test_matches_are_the_metric_s_accuracy_on_the_target_s_own_text(method: str) -> None:
    target, objective = once_learnt(method)
    batch = batch_of(target, written_rows(target, count=3, seed=5), objective.taps)
    with torch.no_grad():
        correct, counted = objective(batch, objective.positions(batch)).metrics["accuracy"]
        matches = objective.matches(objective.draft, batch, steps=3)
    # A place counts if all steps up to this one are supervised there: n >= 4 where the prompt has 6 tokens.
    assert matches[:, 4:].sum((0, 1)).tolist() == correct.tolist()
    assert counted.tolist() == [3 * 24, 3 * 23, 3 * 22]
    assert correct[0] > 0
    assert torch.equal(objective.matches(objective.draft, batch, steps=2), matches[..., :2])


# The whole way


def recipe(method: str, overrides: list[str]) -> list[str]:
    """The tiny workspace's overrides for the method's own recipe; its target has one layer to tap."""
    kept = [o for o in overrides if not o.startswith(("+experiment", "method.objective"))]
    sampled = {"peagle": "method.objective.keep=0.8", "dflash": "method.objective.anchors=8"}
    return [f"+experiment=smollm2_{method}", *kept, "method.network.taps=[1]", sampled[method]]


@pytest.mark.parametrize("method", METHODS)
def test_recipes_share_the_prepared_data_and_the_budget(method: str) -> None:
    ours = compose([f"+experiment=smollm2_{method}"])
    reference = compose(["+experiment=smollm2_cpu"])
    assert (ours.experiment, ours.method.name) == (f"smollm2_{method}", method)
    for part in ("target", "data", "regenerate", "trainer", "eval"):
        assert getattr(ours, part) == getattr(reference, part)
    find_method(ours.method)


@pytest.mark.parametrize("method", METHODS)
def test_distilled_interrupted_resumed_and_decoded(
    method: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = [*recipe(method, overrides), "trainer.epochs=1"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(3, signal.SIGINT, patch)
        train(ours)
    run, printed = train(ours)
    assert "going on from step 3 of 8" in printed and "draft vocabulary coverage" in printed
    undisturbed, _ = train(ours)
    assert undisturbed != run and losses(run) == losses(undisturbed)
    assert losses(run)[-1] < losses(run)[0]
    measured = [line["heldout"] for line in log(run) if "heldout" in line]
    assert len(measured) == 2  # after steps 6 and 8
    assert all(found["walk"] == pytest.approx(found["mean_acceptance_length"]) for found in measured)
    assert weights(run) == weights(undisturbed)

    target = Target.load(compose(ours).target)
    draft = load_draft(run / "draft", target)
    assert draft.method == method and len(draft.draft_ids) == 60


def weights(run: Path) -> bytes:
    return (run / "draft" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_a_batch_decodes_what_plain_decoding_does(method: str, tree: str) -> None:
    target, objective = once_learnt(method)
    draft: Any = acceptance.deployed(objective.draft, target)
    prompts = [prompt.ids for prompt in heldout(target)[:5]]
    prompts[1] = prompts[1][:2]  # sequences of other lengths beside each other
    decode = compose(["+experiment=smollm2_cpu", f"decode.tree={tree}", "decode.batch_size=3"]).decode
    made = build_decoder(target, draft, decode).generate_all([Request(ids, PARAMS) for ids in prompts])
    for ids, generation in zip(prompts, made, strict=True):
        assert generation.tokens == written(target, ids, 24)
    assert sum(len(generation.rounds) for generation in made) < 5 * 23 - 10  # some drafts were right


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
