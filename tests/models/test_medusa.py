"""Medusa's and Hydra's networks: the formulas, how heads start, no two heads sharing what they should not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.errors import CheckpointError, ConfigError
from models import draft_class, hydra, load_draft, medusa, save_draft
from models.medusa import HeadsNetwork
from models.target import Target
from tests.conftest import tiny_target

HIDDEN = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
TOKENS = torch.tensor([[5, 9, 30, 7, 41], [1, 2, 3, 4, 5]])  # [depth, n]
METHODS = ("medusa", "hydra")
CONFIGS: dict[str, Any] = {"medusa": medusa.NetworkConfig, "hydra": hydra.NetworkConfig}


def heads_of(method: str, target: Target, vocabulary: list[int] | None = None, **network: Any) -> Any:
    """Heads as training begins with them; two of them unless said otherwise."""
    size = None if vocabulary is None else len(vocabulary)
    config = CONFIGS[method](**{"heads": 2, "draft_vocab_size": size, **network})
    draft = draft_class(method).build(config, target)
    if vocabulary is not None:
        draft.set_vocabulary(torch.tensor(vocabulary))
    draft.initialise(target)
    return draft


def varied(draft: HeadsNetwork) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return draft


def test_medusa_is_its_formulas(target: Target) -> None:
    draft = varied(heads_of("medusa", target, layers=2))
    w = draft.state_dict()
    expected = []
    for head in range(2):
        x = HIDDEN
        for i in range(2):
            y = x @ w[f"blocks.{head}.layers.{i}.weight"].T + w[f"blocks.{head}.layers.{i}.bias"]
            x = x + y * torch.sigmoid(y)
        expected.append(x @ w[f"lm_heads.{head}.weight"].T)
    torch.testing.assert_close(draft.logits(HIDDEN), torch.stack(expected, dim=1))


def test_hydra_is_its_formulas(target: Target) -> None:
    draft = varied(heads_of("hydra", target, layers=2))
    w = draft.state_dict()
    read = draft.start(HIDDEN, TOKENS[0])
    for head in range(2):
        if head:
            read = draft.step(read, TOKENS[1], 1)
        x = torch.cat([HIDDEN, *(target.embedding[tokens] for tokens in TOKENS[: head + 1])], dim=-1)
        torch.testing.assert_close(read, x)
        p = f"blocks.{head}"
        y = x @ w[f"{p}.layers.0.weight"].T + w[f"{p}.layers.0.bias"]
        x = x @ w[f"{p}.residual.weight"].T + y * torch.sigmoid(y)
        y = x @ w[f"{p}.layers.1.weight"].T + w[f"{p}.layers.1.bias"]
        x = x + y * torch.sigmoid(y)
        torch.testing.assert_close(draft.logits(read, head), x @ w[f"lm_heads.{head}.weight"].T)


@pytest.mark.parametrize("projection", ["own", "shared"])
def test_hydra_s_logits_are_its_projected_states(target: Target, projection: str) -> None:
    """Training projects all heads' states together, decoding one head's at a time."""
    draft = varied(heads_of("hydra", target, projection=projection))
    read = [draft.start(HIDDEN, TOKENS[0])]
    read.append(draft.step(read[0], TOKENS[1], 1))
    states = torch.stack([draft.state(r, depth) for depth, r in enumerate(read)])
    for depth, logits in enumerate(draft.project(states)):
        torch.testing.assert_close(draft.logits(read[depth], depth), logits)


@pytest.mark.parametrize("projection", ["own", "shared", "frozen"])
def test_every_head_starts_as_the_target_s_own(target: Target, projection: str) -> None:
    wanted = target.lm_head(HIDDEN)[:, [3, 10, 60]]
    network: dict[str, Any] = {"vocabulary": [3, 10, 60], "layers": 3, "projection": projection}
    for logits in heads_of("medusa", target, **network).logits(HIDDEN).unbind(1):
        torch.testing.assert_close(logits, wanted)
    draft = heads_of("hydra", target, **network)
    read = draft.start(HIDDEN, TOKENS[0])
    torch.testing.assert_close(draft.logits(read, 0), wanted)
    torch.testing.assert_close(draft.logits(draft.step(read, TOKENS[1], 1), 1), wanted)


@pytest.mark.parametrize("method", METHODS)
def test_no_two_layers_are_one(target: Target, method: str) -> None:
    """2 heads of 3 layers: W and b each, Hydra's residual maps, and the projections."""
    counts = {"own": 2, "shared": 1, "frozen": 1}
    for projection, projections in counts.items():
        draft = heads_of(method, target, layers=3, projection=projection)
        blocks = 2 * 3 * 2 + (2 if method == "hydra" else 0)
        assert len(list(draft.parameters())) == blocks + projections  # aliases are counted once
        assert len(draft.state_dict()) == blocks + projections  # and here as often as they are named
        memory = {weight.data_ptr() for weight in draft.parameters()}
        assert len(memory) == blocks + projections


@pytest.mark.parametrize("method", METHODS)
def test_only_a_frozen_projection_is_not_trained(target: Target, method: str) -> None:
    for projection in ("own", "shared", "frozen"):
        draft = heads_of(method, target, projection=projection)
        still = {name for name, weight in draft.named_parameters() if not weight.requires_grad}
        assert still == ({"lm_heads.0.weight"} if projection == "frozen" else set())


def test_projections_are_copies(target: Target) -> None:
    draft = heads_of("medusa", target)
    with torch.no_grad():
        draft.lm_heads[0].weight.zero_()
    assert target.head.weight.abs().max() > 0 and draft.lm_heads[1].weight.abs().max() > 0


def test_tensor_names_are_vllms(target: Target) -> None:
    layers = {f"blocks.{h}.layers.{i}.{part}" for h in (0, 1) for i in (0, 1) for part in ("weight", "bias")}
    heads = {"lm_heads.0.weight", "lm_heads.1.weight"}
    assert set(heads_of("medusa", target, layers=2).state_dict()) == layers | heads
    named = set(heads_of("medusa", target, [3, 4], layers=2, projection="shared").state_dict())
    assert named == layers | {"lm_heads.0.weight", "d2t", "t2d"}


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_nan_and_unusable_until_initialised(target: Target, method: str) -> None:
    draft = draft_class(method).build(CONFIGS[method](), target)
    assert all(weight.isnan().all() for weight in draft.parameters())
    with pytest.raises(RuntimeError, match="no weights yet"):
        draft.logits(HIDDEN) if method == "medusa" else draft.start(HIDDEN, TOKENS[0])


@pytest.mark.parametrize("method", METHODS)
def test_heads_read_the_last_hidden_state(method: str) -> None:
    draft = heads_of(method, tiny_target(layers=3))
    assert draft.taps == (3,)
    assert draft.heads == 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("projection", ["own", "frozen"])
def test_heads_come_back(tmp_path: Path, target: Target, method: str, projection: str) -> None:
    draft = varied(heads_of(method, target, [3, 10, 60], layers=2, projection=projection))
    save_draft(tmp_path / "draft", draft, target, {})
    loaded = load_draft(tmp_path / "draft", target)
    assert loaded.shape == draft.shape and loaded.draft_ids.tolist() == [3, 10, 60]
    ours, theirs = draft.state_dict(), loaded.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(CheckpointError, match="another target"):
        load_draft(tmp_path / "draft", tiny_target(seed=1))


@pytest.mark.parametrize("method", METHODS)
def test_a_short_dtype_of_the_target_is_met(target: Target, method: str) -> None:
    draft = heads_of(method, target).to(torch.bfloat16)
    if method == "medusa":
        assert draft.logits(HIDDEN).dtype == torch.bfloat16
    else:
        assert draft.logits(draft.start(HIDDEN, TOKENS[0]), 0).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("network", "said"),
    [
        ({"heads": 0}, "heads=0"),
        ({"layers": 0}, "layers=0"),
        ({"projection": "tied"}, "projection='tied'.*own, shared, frozen"),
        ({"draft_vocab_size": 65}, "draft_vocab_size=65 is larger"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_impossible_networks_are_refused(
    target: Target, method: str, network: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        draft_class(method).build(CONFIGS[method](**network), target)
