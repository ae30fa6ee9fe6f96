"""How the EAGLE-3 drafter pairs features with tokens and positions, and what it says about its draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import Proposal as Mode
from decoding.drafters import Seen, build_drafter
from decoding.drafters.eagle3 import Eagle3Drafter
from decoding.randomness import Key, Purpose, Seeded
from decoding.warp import Warp
from models.eagle3 import Eagle3
from models.target import Target
from tests.conftest import tiny_draft

IDS = [3, 10, 20, 30]  # the draft vocabulary


class Drawn(Seeded):
    """Notes the keys and the laws that were drawn from."""

    def __init__(self) -> None:
        super().__init__(0)
        self.drawn: list[tuple[Key, Tensor, int]] = []

    def draw(self, probs: Tensor, key: Key) -> int:
        index = super().draw(probs, key)
        self.drawn.append((key, probs, index))
        return index


@pytest.fixture
def small(target: Target) -> Eagle3:
    return tiny_draft(target, vocabulary=IDS)


def seen(draft: Eagle3, start: int, tokens: list[int], pending: int) -> Seen:
    """Features that are the same at every position, with a little of the position in them."""
    width = draft.fc.weight.shape[1]
    taps = torch.arange(start, start + len(tokens))[:, None] / 10 + torch.ones(len(tokens), width)
    return Seen(start, torch.tensor(tokens), pending, taps)


def made(draft: Eagle3, mode: Mode = Mode.sampled, eos: tuple[int, ...] = ()) -> Eagle3Drafter:
    drafter = build_drafter(draft, mode, eos)
    assert isinstance(drafter, Eagle3Drafter)
    return drafter


def test_rows_pair_a_feature_with_the_next_token(small: Eagle3, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[tuple[list[int], list[int]]] = []
    forward = Eagle3.forward

    def noted(self: Eagle3, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Any = None) -> Tensor:
        fed.append((tokens[0].tolist(), positions[0].tolist()))
        return forward(self, hidden, tokens, positions, attend)

    monkeypatch.setattr(Eagle3, "forward", noted)
    drafter = made(small, Mode.greedy)
    with torch.inference_mode():
        first = drafter.propose(seen(small, 0, [4, 5, 6], 7), 3, Warp(), Seeded(0))
        drafter.propose(seen(small, 3, [7, 8], 9), 1, Warp(), Seeded(0))
    x, y, _ = first.tree.tokens[1:]
    assert fed == [
        ([5, 6, 7], [0, 1, 2]),  # token j + 1 stands at position j; the pending token is the last
        ([x], [3]),
        ([y], [4]),
        ([8, 9], [3, 4]),  # the rows at 3 and 4 are fed again, with the target's features
    ]
    assert first.forwards == 3
    assert first.q is None
    assert first.tree.parent == [-1, 0, 1, 2]
    assert drafter.cache.length == 5


def test_laws_are_those_drawn_from_over_the_targets_ids(target: Target, small: Eagle3) -> None:
    chance = Drawn()
    with torch.inference_mode():
        proposal = made(small).propose(seen(small, 0, [4, 5], 6), 2, Warp(0.7, top_k=2), chance)
    assert proposal.q is not None
    assert sorted(proposal.q) == [0, 1]
    for node, (key, law, index) in enumerate(chance.drawn):
        assert key == Key(2, Purpose.propose, node)  # 2 is the pending token's position
        assert proposal.q[node].shape == (target.vocab_size,)
        assert proposal.q[node][IDS].tolist() == law.tolist()
        assert proposal.q[node].sum() == pytest.approx(1)
        assert (law > 0).sum() == 2  # warped as the target is
        assert proposal.tree.tokens[node + 1] == IDS[index]


def test_first_law_is_the_networks(small: Eagle3) -> None:
    told = seen(small, 0, [4, 5], 6)
    with torch.inference_mode():
        proposal = made(small).propose(told, 1, Warp(0.7), Seeded(0))
        state = small(small.fuse(told.taps[None]), torch.tensor([[5, 6]]), torch.tensor([[0, 1]]))
        law = (small.logits(state)[0, -1] / 0.7).softmax(-1)
    assert proposal.q is not None
    assert proposal.q[0][IDS].tolist() == pytest.approx(law.tolist(), abs=1e-5)


@pytest.mark.parametrize(("mode", "temperature"), [(Mode.greedy, 1.0), (Mode.sampled, 0.0)])
def test_greedy_draws_nothing(small: Eagle3, mode: Mode, temperature: float) -> None:
    chance = Drawn()
    with torch.inference_mode():
        proposal = made(small, mode).propose(seen(small, 0, [4], 6), 3, Warp(temperature), chance)
    assert (proposal.q, chance.drawn) == (None, [])
    assert set(proposal.tree.tokens[1:]) <= set(IDS)


def test_nothing_is_drafted_after_an_end(small: Eagle3) -> None:
    told = seen(small, 0, [4, 5], 6)
    with torch.inference_mode():
        first = made(small, Mode.greedy).propose(told, 3, Warp(), Seeded(0)).tree.tokens[1]
        cut = made(small, Mode.greedy, eos=(first,)).propose(told, 3, Warp(), Seeded(0))
    assert cut.tree.tokens == [6, first]


def test_gap_in_what_was_seen_is_refused(small: Eagle3) -> None:
    drafter = made(small)
    with torch.inference_mode():
        drafter.propose(seen(small, 0, [4, 5], 6), 1, Warp(), Seeded(0))
        with pytest.raises(ValueError, match="2 rows"):
            drafter.propose(seen(small, 3, [7], 8), 1, Warp(), Seeded(0))


def test_full_vocabulary_needs_no_mapping(target: Target) -> None:
    draft = tiny_draft(target, draft_vocab_size=None)
    with torch.inference_mode():
        proposal = made(draft).propose(seen(draft, 0, [4], 6), 1, Warp(), Seeded(0))
    assert proposal.q is not None
    assert (proposal.q[0] > 0).all()
