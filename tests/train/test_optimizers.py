"""Which optimiser gets which parameter, and whole runs under Muon."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from configs.errors import ConfigError
from configs.schema import Optimizer, TrainerConfig
from tests.train.test_loop import FEW, log, train
from train.loop import DivergenceError
from train.optimizers import Roles, optimizers, shares


class Fake(nn.Module):
    def rate(self, name: str) -> float:
        return 0.5 if "slow" in name else 1.0


def objective(vocabulary: int, **parts: nn.Module | nn.Parameter) -> Any:
    """A draft over `vocabulary` of 10 tokens that has these parts."""
    made, draft = Fake(), nn.Module()
    vars(draft)["shape"] = SimpleNamespace(vocab_size=10, draft_vocab_size=vocabulary)
    for name, part in parts.items():
        setattr(draft, name, part)
    made.draft = draft
    return made


def names(module: nn.Module, parameters: list[nn.Parameter]) -> list[str]:
    """Of `parameters`, without `draft.`"""
    known = {id(p): name.removeprefix("draft.") for name, p in module.named_parameters()}
    return [known[id(p)] for p in parameters]


def muon(**settings: Any) -> TrainerConfig:
    return TrainerConfig(optimizer=Optimizer.muon, **settings)


def test_roles() -> None:
    frozen = nn.Linear(4, 4)
    module = objective(
        6,
        embed=nn.Embedding(12, 4),  # of a vocabulary of its own: an embedding all the same
        mix=nn.Linear(4, 4),
        norm=nn.LayerNorm(4),
        score=nn.Linear(4, 1),  # to one number
        stack=nn.Parameter(torch.zeros(2, 4, 4)),
        frozen=frozen.requires_grad_(False),
        out=nn.Linear(4, 6, bias=False),  # over the draft vocabulary
    )
    roles = Roles.of(module)

    assert names(module, roles.hidden) == ["mix.weight"]
    assert sorted(names(module, roles.outer)) == ["embed.weight", "out.weight", "score.weight", "stack"]
    assert sorted(names(module, roles.vectors)) == ["mix.bias", "norm.bias", "norm.weight", "score.bias"]


def test_a_hidden_size_that_equals_the_vocabulary_is_no_head() -> None:
    heads = nn.ModuleList([nn.Linear(4, 6, bias=False)])
    module = objective(6, up_proj=nn.Linear(4, 6, bias=False), lm_heads=heads)
    roles = Roles.of(module)

    assert names(module, roles.hidden) == ["up_proj.weight"]
    assert names(module, roles.outer) == ["lm_heads.0.weight"]


def test_each_group_has_its_rate_and_only_matrices_decay() -> None:
    module = objective(6, lm_head=nn.Linear(4, 6), mix=nn.Linear(4, 4))
    made = optimizers(module, muon(lr=0.1, muon_lr=0.3, weight_decay=0.5))
    groups = [
        (type(one).__name__, group["lr"], group["weight_decay"], names(module, group["params"]))
        for one in made.values()
        for group in one.param_groups
    ]

    assert list(made) == ["lr", "muon_lr"]
    assert groups == [
        ("AdamW", 0.1, 0.5, ["lm_head.weight"]),
        ("AdamW", 0.1, 0.0, ["lm_head.bias", "mix.bias"]),
        ("Muon", 0.3, 0.5, ["mix.weight"]),
    ]
    assert shares(made) == "AdamW 3 tensors of 0.0 M, Muon 1 tensors of 0.0 M"
    assert optimizers(module, muon(lr=0.1))["muon_lr"].defaults["lr"] == 0.1


def test_an_objective_can_slow_parameters_down() -> None:
    module = objective(6, slow=nn.Linear(4, 4), mix=nn.Linear(4, 4))
    made = optimizers(module, muon(lr=0.1, muon_lr=0.3))
    rates = {n: g["lr"] for o in made.values() for g in o.param_groups for n in names(module, g["params"])}

    assert rates == {"slow.weight": 0.15, "slow.bias": 0.05, "mix.weight": 0.3, "mix.bias": 0.1}


def test_muon_moves_a_matrix_orthogonally_and_as_far_as_adamw_would() -> None:
    module = objective(6, mix=nn.Linear(32, 32, bias=False))
    weight = module.draft.mix.weight
    before = weight.detach().clone()
    weight.grad = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) * 1e-3
    optimizers(module, muon(lr=0.1))["muon_lr"].step()
    moved = (before - weight).detach()

    # An orthogonal 32 x 32 matrix has entries of root mean square 32**-0.5, which 0.2 * 32**0.5 makes 0.2.
    # The five iterations leave singular values between about 0.7 and 1.2.
    assert moved.square().mean().sqrt().item() == pytest.approx(0.1 * 0.2, rel=0.2)
    values = torch.linalg.svdvals(moved) / (0.1 * 0.2 * 32**0.5)
    assert values.min() > 0.5 and values.max() < 1.5


@pytest.mark.parametrize("native", [True, False])
def test_muon_orthogonalises_in_float32_where_bfloat16_is_not_native(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("configs.hardware.cpu_has_bfloat16", lambda: native)
    module = objective(9, mix=nn.Linear(8, 6, bias=False))
    weight = module.draft.mix.weight
    before = weight.detach().clone()
    weight.grad = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    gradient = weight.grad.clone()
    optimizers(module, muon(lr=0.1))["muon_lr"].step()
    step = (before - weight).detach() / (0.1 * 0.2 * 8**0.5)

    momentum = 0.05 * gradient  # after the first step, of which Nesterov's takes 5 and 95 parts of a hundred
    x = 0.05 * gradient + 0.95 * momentum
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    error = (step - x).abs().max().item()
    assert 1e-3 < error < 0.05 if native else error < 1e-4
    assert torch.equal(weight.grad, gradient)


def test_muon_needs_a_matrix_between_hidden_states() -> None:
    with pytest.raises(ConfigError, match="this draft has none"):
        optimizers(objective(6, lm_head=nn.Linear(4, 6)), muon())


def test_a_run_logs_both_rates_and_learns(overrides: list[str]) -> None:
    run, printed = train(overrides, "trainer.optimizer=muon", "trainer.muon_lr=2e-2")
    trained = [line for line in log(run) if "loss" in line]

    assert "optimizers: AdamW" in printed and ", Muon" in printed
    assert [line["lr"] for line in trained[:2]] == [0.01, 0.01]
    assert [line["muon_lr"] for line in trained] == pytest.approx([2 * line["lr"] for line in trained])
    assert trained[8]["lr"] < 0.01
    assert trained[-1]["loss"] < trained[0]["loss"] / 2


def test_the_rate_to_lower_is_named(overrides: list[str]) -> None:
    huge = ["trainer.optimizer=muon", "trainer.lr=1e15", "trainer.muon_lr=1e3"]
    words = r"Lower trainer.lr \(it is 1e\+15\) and trainer.muon_lr \(it is 1000\)"
    with pytest.raises(DivergenceError, match=words):
        train(overrides, *FEW, *huge, "trainer.warmup_ratio=0")
