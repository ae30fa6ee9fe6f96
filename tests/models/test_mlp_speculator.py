"""The MLP speculator against the authors' formulas, and what is tied in it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.errors import ConfigError
from models import load_draft, save_draft
from models.mlp_speculator import MlpSpeculator, MlpSpeculatorShape, NetworkConfig
from models.target import Target

SOME = [0, 2, 3, 9, 60]


def speculator(target: Target, vocabulary: list[int] | None = None, **network: Any) -> MlpSpeculator:
    """Its gains are away from one and its biases away from zero, so that leaving any of them out shows."""
    size = None if vocabulary is None else len(vocabulary)
    draft = MlpSpeculator.build(NetworkConfig(draft_vocab_size=size, **network), target)
    if vocabulary is not None:
        draft.set_vocabulary(torch.tensor(vocabulary))
    draft.initialise(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
    return draft


def by_formula(draft: MlpSpeculator, hidden: Tensor, tokens: list[int]) -> list[Tensor]:
    """Each step's logits [Vd] for one h_j [d], float64, weighted as the authors' training code does."""
    w = {name: weight.double() for name, weight in draft.state_dict().items()}
    shape, inner = draft.shape, draft.shape.hidden_size
    state_weight = 0.5 ** (0.5 / shape.heads)
    emb_weight = math.sqrt((1 - state_weight**2) * inner / 2)
    state = hidden.double()
    if shape.scale_input:
        state = state / (state.square().mean() + 1e-6).sqrt() / math.sqrt(2)
    found = []
    for i, token in enumerate(tokens):
        k, p = (0, min(i, 1)) if shape.tie_weights else (i, i)
        x = w[f"proj.{p}.weight"] @ state * state_weight + w[f"emb.{k}.weight"][token] * emb_weight
        x = x / (x.square().mean() + 1e-6).sqrt() * w[f"ln.{k}.weight"] + w[f"ln.{k}.bias"]
        state = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        found.append(w[f"head.{k}.weight"] @ state)
    return found


@pytest.mark.parametrize("tie_weights", [True, False])
@pytest.mark.parametrize("scale_input", [True, False])
@pytest.mark.parametrize("inner_dim", [None, 24])
def test_the_network_is_the_authors_formulas(
    target: Target, tie_weights: bool, scale_input: bool, inner_dim: int | None
) -> None:
    draft = speculator(
        target, SOME, heads=4, tie_weights=tie_weights, scale_input=scale_input, inner_dim=inner_dim
    )
    hidden = torch.randn(2, 32, generator=torch.Generator().manual_seed(2)) * 3
    tokens = [[5, 9, 30, 7], [41, 5, 2, 63]]
    columns = torch.tensor(tokens).T
    state = draft.start(hidden, columns[0])
    logits = [draft.logits(state, 0)]
    for depth in (1, 2, 3):
        state = draft.step(state, columns[depth], depth)
        logits.append(draft.logits(state, depth))
    for row in (0, 1):
        for mine, theirs in zip(logits, by_formula(draft, hidden[row], tokens[row]), strict=True):
            torch.testing.assert_close(mine[row].double(), theirs, rtol=1e-4, atol=1e-4)


def test_the_hidden_state_is_half_of_the_last_state() -> None:
    """Of n heads, each keeps w^2 = 0.5^(1/n) of the variance before it: 0.5 after all. One head: r^2 is the
    ratio of 0.5 to 0.5, in units of a token's variance 2 / inner_dim."""
    shape = MlpSpeculatorShape(32, 32, 64, 64, heads=1, tie_weights=True, scale_input=True, tap=4)
    assert shape.token_weight**2 * 2 / 32 == pytest.approx(1.0)
    shape.heads = 2  # w^2 = 0.7071: 0.2929 / 0.7071
    assert shape.token_weight**2 * 2 / 32 == pytest.approx(0.4142, abs=1e-4)


def test_what_is_tied_is_one_module_and_what_is_not_is_no_alias(target: Target) -> None:
    tied, apart = speculator(target, heads=3), speculator(target, heads=3, tie_weights=False)
    ones = {"emb.0.weight", "head.0.weight", "ln.0.weight", "ln.0.bias", "proj.0.weight"}
    assert set(tied.state_dict()) == {*ones, "proj.1.weight"}
    assert set(apart.state_dict()) == {name.replace("0", str(i)) for name in ones for i in range(3)}
    assert len({weight.data_ptr() for weight in apart.parameters()}) == 15
    assert set(speculator(target, heads=1).state_dict()) == ones


def test_weights_start_at_the_scale_that_the_token_s_weight_counts_on(target: Target) -> None:
    draft = MlpSpeculator.build(NetworkConfig(inner_dim=25), target)
    assert all(weight.isnan().all() for weight in draft.parameters())
    with pytest.raises(RuntimeError, match="no weights yet"):
        draft.start(torch.zeros(1, 32), torch.zeros(1, dtype=torch.int64))
    before = torch.get_rng_state()
    draft.initialise(0)
    assert torch.equal(torch.get_rng_state(), before)
    for name, weight in draft.named_parameters():
        if weight.dim() > 1:
            assert weight.std().item() == pytest.approx(0.2, rel=0.1), name  # 1 / sqrt(25)
        else:
            assert weight.tolist() == [float(name == "ln.0.weight")] * 25


def test_every_weight_learns(target: Target) -> None:
    draft = speculator(target, SOME, heads=3, tie_weights=False)
    tokens = torch.tensor([4, 5])
    state = draft.start(torch.ones(2, 32), tokens)
    logits = draft.logits(state, 0).square().sum()
    for depth in (1, 2):
        state = draft.step(state, tokens, depth)
        logits = logits + draft.logits(state, depth).square().sum()
    logits.backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in draft.parameters())


@pytest.mark.parametrize(
    ("network", "message"),
    [({"heads": 0}, "heads=0"), ({"inner_dim": 0}, "inner_dim=0"), ({"draft_vocab_size": 65}, "larger than")],
    ids=str,
)
def test_impossible_networks_are_refused(target: Target, network: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MlpSpeculator.build(NetworkConfig(**network), target)


@pytest.mark.parametrize("tie_weights", [True, False])
def test_a_saved_draft_comes_back_bit_for_bit(tmp_path: Path, target: Target, tie_weights: bool) -> None:
    draft = speculator(target, SOME, tie_weights=tie_weights, inner_dim=24)
    save_draft(tmp_path / "draft", draft, target, {})
    loaded = load_draft(tmp_path / "draft", target)
    ours, theirs = draft.state_dict(), loaded.state_dict()
    assert loaded.shape == draft.shape and (loaded.taps, loaded.heads) == ((4,), 3)
    assert set(ours) == set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
