"""Medusa-2: the target in training beside the target as it was, and the pair that comes out."""

from __future__ import annotations

import re
import signal
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.compose import compose
from configs.errors import CheckpointError, ConfigError
from data.tokens import TokenRow
from decoding.build import build_decoder
from models import load_draft
from models.medusa import NetworkConfig
from models.packing import pack
from models.target import Target
from tests.conftest import tiny_target
from tests.train.conftest import counting_target, written_rows
from tests.train.test_loop import interrupt_at, log, losses, train
from tests.train.test_medusa import PARAMS, batch_of, heldout, recipe, vary, written
from train.objectives.medusa2 import Medusa2Objective, ObjectiveConfig, build
from train.optimizers import optimizers

IDS = torch.arange(3, 15)[None]
UP_PROJ = "model.layers.0.mlp.up_proj.weight"


def objective_of(target: Target, moved: bool = False, **settings: Any) -> Medusa2Objective:
    """Two heads; with `moved`, neither heads nor adapter are as they start."""
    config = ObjectiveConfig(**{"rank": 2, "dropout": 0.0, **settings})
    objective = build(NetworkConfig(heads=2), config, target, written_rows(target, count=2), seed=0)
    if moved:
        vary(objective.draft)
        vary(objective.adapter)  # pyright: ignore[reportArgumentType]
    return objective


def logits_of(target: Target) -> Tensor:
    logits = target.forward(IDS).logits
    assert logits is not None
    return logits


def test_the_adapter_starts_as_nothing_and_the_target_stays_what_it_was() -> None:
    target = tiny_target()
    before, fingerprint = logits_of(target), target.fingerprint()
    objective = objective_of(target)
    assert torch.equal(objective.adapted.hidden(IDS), target.forward(IDS).last_hidden)
    assert torch.equal(logits_of(objective.beside(target)), before)

    vary(objective.adapter)  # pyright: ignore[reportArgumentType]
    assert torch.equal(logits_of(target), before)
    assert target.fingerprint() == fingerprint


def test_the_merged_target_is_the_adapted_one_and_shares_the_rest() -> None:
    target = tiny_target()
    objective = objective_of(target, moved=True)
    merged = objective.beside(target)
    hidden = objective.adapted.hidden(IDS)
    torch.testing.assert_close(merged.forward(IDS).last_hidden, hidden, rtol=1e-4, atol=1e-4)
    assert (hidden - target.forward(IDS).last_hidden).abs().max() > 0.1
    assert merged.fingerprint() != target.fingerprint()
    assert merged.embedding.data_ptr() == target.embedding.data_ptr()
    ours, theirs = (made.model.get_parameter(UP_PROJ) for made in (merged, target))
    assert ours.data_ptr() != theirs.data_ptr()


def test_packed_targets_are_adapted_too() -> None:
    """A packed layer computes with a copy of its weight, which an adapter would not move."""
    target = tiny_target()
    assert pack(target.model) > 0
    objective = objective_of(target, moved=True)
    merged = objective.beside(target).forward(IDS).last_hidden
    torch.testing.assert_close(merged, objective.adapted.hidden(IDS), rtol=1e-4, atol=1e-4)
    assert (merged - target.forward(IDS).last_hidden).abs().max() > 0.1


def test_the_adapter_is_all_of_the_target_that_is_trained() -> None:
    """Seven linear layers in each of four decoder layers, with two matrices each."""
    objective = objective_of(tiny_target())
    names = [name for name, weight in objective.named_parameters() if weight.requires_grad]
    adapter = [name for name in names if name.startswith("adapter.")]
    assert len(adapter) == 4 * 7 * 2
    assert all(name.startswith("draft.") for name in names if name not in adapter)
    assert not any(weight.requires_grad for weight in objective.adapted.target.model.parameters())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_heads_learn_faster_than_the_target(optimizer: str) -> None:
    asked = ["+experiment=smollm2_medusa2", "trainer.lr=0.004", f"trainer.optimizer={optimizer}"]
    objective = objective_of(tiny_target())
    made = optimizers(objective, compose(asked).trainer).values()
    groups = [group for part in made for group in part.param_groups]
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert {rates[id(p)] for p in objective.draft.parameters()} == {0.004}
    assert {rates[id(p)] for p in objective.adapter.parameters()} == {0.001}


# The loss


def test_loss_and_gradients_are_the_definition_s() -> None:
    target = tiny_target()
    objective = objective_of(target, moved=True, heads_weight=0.3, head_decay=0.5, chunk=4)
    tokens = [5, 60, 7, 8, 33, 10, 11, 12, 13, 14, 2]
    mask = [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    batch = batch_of(target, [TokenRow("", "", tokens, mask)], objective.taps)
    parameters = [p for p in objective.parameters() if p.requires_grad]

    hidden = objective.adapted.hidden(torch.tensor([tokens]))[0]
    p = target.lm_head(target.forward(torch.tensor([tokens])).last_hidden)[0].double().softmax(-1)
    logits = [target.lm_head(hidden), *objective.draft.project(objective.draft(hidden))]
    expected = torch.zeros((), dtype=torch.float64)
    for k, weight in enumerate((1.0, 0.3 * 0.5, 0.3 * 0.25)):  # head 0 is the target itself
        rows = torch.tensor([j for j in range(len(tokens) - 1 - k) if mask[j + 1 + k]])
        log_q = logits[k][rows].double().log_softmax(-1)
        expected = expected + weight * (p[rows + k] * (p[rows + k].log() - log_q)).sum(-1).mean()
    wanted = torch.autograd.grad(expected, parameters)

    positions = objective.positions(batch)
    loss = objective(batch, positions)
    got = torch.autograd.grad(loss.value, parameters)
    assert positions.tolist() == [6, 6, 6]
    assert loss.value.item() == pytest.approx(expected.item(), rel=1e-5)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_preserving_costs_nothing_at_first() -> None:
    target = counting_target()
    objective = objective_of(target)
    batch = batch_of(target, written_rows(target, count=3), objective.taps)
    metrics = objective(batch, objective.positions(batch)).metrics
    (loss, counts), (right, counted) = metrics["loss"], metrics["accuracy"]
    assert loss[0].abs() < 1e-4 < loss[1] and counts.tolist() == [72, 72, 72]
    assert right[0] == counted[0] == 72


def test_prompts_and_padding_teach_nothing() -> None:
    """Two rows batched, with padding, are those rows one by one; the last row's reply is t_4 alone."""
    target = tiny_target()
    objective = objective_of(target, moved=True)
    rows = [
        TokenRow("", "", list(range(5, 16)), [0] * 5 + [1] * 6),
        TokenRow("", "", [9, 8, 7, 6, 5], [0, 0, 0, 0, 1]),
    ]
    both = batch_of(target, rows, objective.taps)
    positions = objective.positions(both)
    alone = [objective(batch_of(target, [r], objective.taps), positions).value.item() for r in rows]
    assert positions.tolist() == [7, 7, 7]
    assert objective(both, positions).value.item() == pytest.approx(sum(alone), rel=1e-5)
    assert objective.first_label == 1


@pytest.mark.parametrize(
    "settings",
    [{"rank": 0}, {"heads_weight": 0.0}, {"alpha": 0}, {"adapter_rate": 0.0}, {"dropout": 1.0}],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"method.objective.{next(iter(settings))}="):
        ObjectiveConfig(**settings)


def test_without_peft_the_mend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'leadout\[joint\]'"):
        objective_of(tiny_target())


# The whole way


def test_heads_then_both_then_a_pair_that_decodes(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ["trainer.epochs=1", "trainer.eval_every=0"]
    first, printed_first = train(recipe("medusa", overrides), *few)
    settings = [f"method.objective.heads_from={first}", "method.objective.rank=2"]
    ours = [*recipe("medusa2", overrides), *few, *settings]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(3, signal.SIGINT, patch)
        train(ours)
    run, printed = train(ours)
    undisturbed, _ = train(ours)
    assert undisturbed != run and losses(run) == losses(undisturbed)  # with the same dropout
    assert f"the draft belongs to target.name={run / 'target'}" in printed
    coverage = re.search(r"draft vocabulary coverage: (.*)", printed)
    assert coverage and coverage[0] in printed_first
    assert losses(run)[0] < losses(first)[0] / 2  # heads went on from the first stage, weighted by 0.2
    assert len(log(run)[0]["accuracy"]) == 4
    [measured] = [line["heldout"] for line in log(run) if "heldout" in line]
    assert measured["walk"] == pytest.approx(measured["mean_acceptance_length"]) and not measured["alarm"]

    config = compose([*ours, f"target.name={run / 'target'}"])
    moved, original = Target.load(config.target), Target.load(compose(ours).target)
    assert moved.fingerprint() != original.fingerprint()
    with pytest.raises(CheckpointError, match="another target"):
        load_draft(run / "draft", original)
    draft = load_draft(run / "draft", moved)
    assert draft.method == "medusa"
    decoder = build_decoder(moved, draft, config.decode)
    for prompt in heldout(moved)[:3]:
        assert decoder.generate(prompt.ids, PARAMS).tokens == written(moved, prompt.ids, 24)


def test_heads_of_another_network_are_refused(overrides: list[str]) -> None:
    few = ["trainer.max_steps=1", "trainer.eval_prompts=2"]
    first, _ = train(recipe("medusa", overrides), *few)
    wrong = [f"method.objective.heads_from={first}", "method.network.heads=2"]
    with pytest.raises(ConfigError, match=r"method\.network asks for"):
        train(recipe("medusa2", overrides), *few, *wrong)
