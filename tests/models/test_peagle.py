"""P-EAGLE's network: EAGLE-3's, with learnt stand-ins where a row knows nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import load_draft, save_draft
from models.eagle3 import Eagle3
from models.peagle import MASK, NetworkConfig, PEagle
from models.target import Target

TOKENS = torch.tensor([[5, 9, 30, MASK, MASK]])
POSITIONS = torch.arange(5)[None]


def peagle(target: Target, seed: int = 0, **network: Any) -> PEagle:
    draft = PEagle.build(NetworkConfig(**{"draft_vocab_size": None, "layers": 2, **network}), target)
    draft.initialise(seed, target)
    return draft


def rows(draft: PEagle, target: Target) -> Tensor:
    """[1, 5, d]: the features of three tokens, and two masked rows."""
    taps = target.forward(torch.tensor([[7, 5, 9]]), taps=draft.taps).taps
    assert taps is not None
    return torch.cat([draft.fuse(taps), draft.masked().expand(1, 2, -1)], dim=1)


@pytest.mark.parametrize("network", [{}, {"norm_before_fc": True, "fc_norm": True}])
def test_masked_rows_are_eagle3_s_with_the_learnt_vectors(target: Target, network: dict[str, Any]) -> None:
    draft = peagle(target, **network)
    # An EAGLE-3 whose embedding has one row more, the mask's, and which is told the mask's features.
    embedding = torch.cat([target.embedding, draft.mask_embedding])
    twin = Eagle3(draft.shape, embedding)
    weights = {name: w for name, w in draft.state_dict().items() if not name.startswith("mask_")}
    twin.load_state_dict(weights)
    hidden = rows(draft, target)
    assert torch.equal(hidden[0, 3], twin.fuse(draft.mask_hidden[None])[0, 0])
    tokens = torch.where(TOKENS == MASK, target.vocab_size, TOKENS)
    expected = twin(hidden, tokens, POSITIONS)
    assert torch.equal(draft(hidden, TOKENS, POSITIONS), expected)


def test_rows_do_not_depend_on_how_many_masked_ones_follow(target: Target) -> None:
    draft = peagle(target)
    hidden = rows(draft, target)
    whole = draft(hidden, TOKENS, POSITIONS)
    for count in (3, 4):
        part = draft(hidden[:, :count], TOKENS[:, :count], POSITIONS[:, :count])
        torch.testing.assert_close(part, whole[:, :count])
    # Masked rows get the same input; their positions alone tell them apart.
    assert not torch.allclose(whole[0, 3], whole[0, 4])


def test_stand_ins_start_small_and_random(target: Target) -> None:
    draft = PEagle.build(NetworkConfig(draft_vocab_size=None), target)
    assert draft.mask_hidden.isnan().all() and draft.mask_embedding.isnan().all()
    first, again, other = (peagle(target, seed=seed).mask_hidden for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.shape == (1, 3 * 32) and 0 < first.abs().max() < 0.1


def test_every_weight_learns_and_the_embedding_is_the_targets(target: Target) -> None:
    draft = peagle(target)
    draft.logits(draft(rows(draft, target), TOKENS, POSITIONS)).square().sum().backward()
    assert [name for name, w in draft.named_parameters() if w.grad is None or not w.grad.any()] == []
    assert draft.embedding.data_ptr() == target.embedding.data_ptr()
    names, plain = set(draft.state_dict()), set(Eagle3(draft.shape, target.embedding).state_dict())
    assert names - plain == {"mask_hidden", "mask_embedding"} and plain < names


def test_a_checkpoint_gives_the_same_draft(target: Target, tmp_path: Path) -> None:
    draft = peagle(target)
    save_draft(tmp_path / "draft", draft, target, {})
    loaded = load_draft(tmp_path / "draft", target)
    assert isinstance(loaded, PEagle)
    hidden = rows(draft, target)
    assert torch.equal(loaded(hidden, TOKENS, POSITIONS), draft(hidden, TOKENS, POSITIONS))
