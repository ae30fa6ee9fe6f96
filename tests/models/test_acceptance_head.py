"""The acceptance head's network: what it computes, and that draft and head are one checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from configs.errors import CheckpointError, ConfigError
from models import load_draft, save_draft
from models.acceptance_head import HeadedDraft, HeadedShape, NetworkConfig
from models.eagle1 import Eagle1
from models.eagle1 import NetworkConfig as Eagle1Config
from models.target import Target
from tests.conftest import tiny_draft, tiny_target


def headed(target: Target, blocks: int = 2, draft: Any = None) -> HeadedDraft:
    draft = tiny_draft(target) if draft is None else draft
    made = HeadedDraft(HeadedShape.around(draft, NetworkConfig(blocks)), draft)
    made.initialise(0)
    return made


def vary(draft: HeadedDraft) -> None:
    generator = torch.Generator().manual_seed(1)
    for weight in (p for p in draft.parameters() if p.requires_grad):
        weight.data += 0.3 * torch.randn(weight.shape, generator=generator)


def test_the_head_is_what_it_says() -> None:
    draft = headed(tiny_target())
    vary(draft)
    draft.requires_grad_(False)
    state = torch.randn(32, generator=torch.Generator().manual_seed(2))
    x = state / state.pow(2).mean().sqrt()
    for layer in draft.blocks.layers:
        x = x + F.silu(layer.weight @ x + layer.bias)  # pyright: ignore[reportOperatorIssue]
    expected = torch.sigmoid(draft.out.weight[0] @ x + draft.out.bias[0])

    assert draft.acceptance(state) == pytest.approx(float(expected), abs=1e-6)
    assert draft.acceptance(100 * state) == pytest.approx(float(expected), abs=1e-6)  # at any scale
    assert draft.log_odds(state.expand(3, 5, 32)).shape == (3, 5)


def test_blocks_are_modules_of_their_own_and_start_as_nothing() -> None:
    draft = headed(tiny_target(), blocks=3)
    assert len({id(layer) for layer in draft.blocks.layers}) == 3
    assert len({p.data_ptr() for p in draft.blocks.parameters()}) == 6
    x = torch.randn(4, 32)
    assert torch.equal(draft.blocks(x), x)


def test_only_the_head_is_trained() -> None:
    draft = headed(tiny_target())
    assert {name.split(".")[0] for name, p in draft.named_parameters() if p.requires_grad} == {
        "blocks",
        "out",
    }


def eagle1(target: Target) -> Eagle1:
    draft = Eagle1.build(Eagle1Config(draft_vocab_size=48), target)
    draft.set_vocabulary(torch.arange(48))
    draft.initialise(0)
    return draft


@pytest.mark.parametrize("draft_of", [tiny_draft, eagle1])
def test_draft_and_head_are_one_checkpoint(tmp_path: Path, draft_of: Any) -> None:
    target = tiny_target()
    draft = headed(target, draft=draft_of(target))
    vary(draft)
    draft.requires_grad_(False)
    save_draft(tmp_path / "draft", draft, target, {})
    loaded = load_draft(tmp_path / "draft", target)

    assert isinstance(loaded, HeadedDraft)
    for name, weight in draft.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name])
    state = torch.randn(32)
    assert loaded.acceptance(state) == draft.acceptance(state)
    assert torch.equal(loaded.draft.logits(state), draft.draft.logits(state))
    assert (loaded.taps, loaded.full_vocabulary) == (draft.taps, False)
    assert torch.equal(loaded.draft_ids, torch.arange(48))


def test_an_untrained_head_is_refused(tmp_path: Path) -> None:
    target = tiny_target()
    draft = tiny_draft(target)
    with pytest.raises(CheckpointError, match="has NaN"):
        save_draft(
            tmp_path / "draft", HeadedDraft(HeadedShape.around(draft, NetworkConfig()), draft), target, {}
        )


def test_a_head_needs_a_block() -> None:
    with pytest.raises(ConfigError, match=r"blocks=0"):
        HeadedShape.around(tiny_draft(tiny_target()), NetworkConfig(blocks=0))
