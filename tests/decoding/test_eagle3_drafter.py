"""How the EAGLE-3 drafter pairs features with tokens and positions, and what it says about its draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.schema import Proposal as Mode
from decoding.drafters import Proposal, Seen, Turn
from decoding.drafters.eagle3 import build
from decoding.growth import ChainGrowth
from decoding.law import Law
from decoding.randomness import Key, Purpose, Randomness, Seeded
from decoding.reader import NetworkDrafter
from decoding.warp import Warp
from models.eagle3 import Eagle3
from models.target import Target
from tests.conftest import tiny_draft

IDS = [3, 10, 20, 30]  # the draft vocabulary


class Drawn(Seeded):
    """Notes the keys and the laws that were drawn from."""

    def __init__(self) -> None:
        super().__init__(0)
        self.drawn: list[tuple[Key, np.ndarray, int]] = []

    def draw(self, law: np.ndarray, key: Key) -> int:
        index = super().draw(law, key)
        self.drawn.append((key, law, index))
        return index


@pytest.fixture
def small(target: Target) -> Eagle3:
    return tiny_draft(target, vocabulary=IDS)


def seen(draft: Eagle3, start: int, tokens: list[int], pending: int) -> Seen:
    """Features that are the same at every position, with a little of the position in them."""
    width = draft.fc.weight.shape[1]
    taps = torch.arange(start, start + len(tokens))[:, None] / 10 + torch.ones(len(tokens), width)
    return Seen(start, tokens, pending, taps)


def made(draft: Eagle3, mode: Mode = Mode.sampled, eos: tuple[int, ...] = ()) -> NetworkDrafter:
    return build(draft, ChainGrowth(mode), frozenset(eos))


def proposed(
    drafter: NetworkDrafter,
    told: Seen,
    budget: int,
    warp: Warp | None = None,
    chance: Randomness | None = None,
    state: Any = None,
) -> Proposal:
    turn = Turn(state or drafter.begin(), told, budget, Law(warp or Warp()), chance or Seeded(0))
    with torch.inference_mode():
        return drafter.propose([turn])[0]


def test_rows_pair_a_feature_with_the_next_token(small: Eagle3, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[tuple[list[int], list[int]]] = []
    forward = Eagle3.forward

    def noted(self: Eagle3, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Any = None) -> Tensor:
        fed.append((tokens[0].tolist(), positions[0].tolist()))
        return forward(self, hidden, tokens, positions, attend)

    monkeypatch.setattr(Eagle3, "forward", noted)
    drafter = made(small, Mode.greedy)
    state = drafter.begin()
    first = proposed(drafter, seen(small, 0, [4, 5, 6], 7), 3, state=state)
    proposed(drafter, seen(small, 3, [7, 8], 9), 1, state=state)
    x, y, _ = first.tree.tokens[1:]
    assert fed == [
        ([5, 6, 7], [0, 1, 2]),  # token j + 1 stands at position j; the pending token is the last
        ([x], [3]),
        ([y], [4]),
        ([8, 9], [3, 4]),  # the rows at 3 and 4 are fed again, with the target's features
    ]
    assert first.forwards == 3
    assert not first.draws
    assert first.tree.parent == [-1, 0, 1, 2]
    assert state.committed == drafter.reader.cache.lengths[state.slot] == 5


def test_laws_are_those_drawn_from_over_the_targets_ids(target: Target, small: Eagle3) -> None:
    chance = Drawn()
    proposal = proposed(made(small), seen(small, 0, [4, 5], 6), 2, Warp(0.7, top_k=2), chance)
    assert sorted(proposal.draws) == [0, 1]
    for node, (key, law, index) in enumerate(chance.drawn):
        assert key == Key(2, Purpose.propose, node)  # 2 is the pending token's position
        q = proposal.draws[node][0].over(target.vocab_size)
        assert q.shape == (target.vocab_size,)
        assert q[IDS].tolist() == law.tolist()
        assert q.sum() == pytest.approx(1)
        assert (law > 0).sum() == 2  # warped as the target is
        assert proposal.tree.tokens[node + 1] == IDS[index]


def test_first_law_is_the_networks(small: Eagle3) -> None:
    told = seen(small, 0, [4, 5], 6)
    proposal = proposed(made(small), told, 1, Warp(0.7))
    with torch.inference_mode():
        state = small(small.fuse(told.taps[None]), torch.tensor([[5, 6]]), torch.tensor([[0, 1]]))
        law = (small.logits(state)[0, -1] / 0.7).softmax(-1)
    assert proposal.draws[0][0].over(64)[IDS].tolist() == pytest.approx(law.tolist(), abs=1e-5)


@pytest.mark.parametrize(("mode", "temperature"), [(Mode.greedy, 1.0), (Mode.sampled, 0.0)])
def test_greedy_draws_nothing(small: Eagle3, mode: Mode, temperature: float) -> None:
    chance = Drawn()
    proposal = proposed(made(small, mode), seen(small, 0, [4], 6), 3, Warp(temperature), chance)
    assert (proposal.draws, chance.drawn) == ({}, [])
    assert set(proposal.tree.tokens[1:]) <= set(IDS)


def test_nothing_is_drafted_after_an_end(small: Eagle3) -> None:
    told = seen(small, 0, [4, 5], 6)
    first = proposed(made(small, Mode.greedy), told, 3).tree.tokens[1]
    cut = proposed(made(small, Mode.greedy, eos=(first,)), told, 3)
    assert cut.tree.tokens == [6, first]


def test_gap_in_what_was_seen_is_refused(small: Eagle3) -> None:
    drafter = made(small)
    state = drafter.begin()
    proposed(drafter, seen(small, 0, [4, 5], 6), 1, state=state)
    with pytest.raises(ValueError, match="2 rows"):
        proposed(drafter, seen(small, 3, [7], 8), 1, state=state)


def test_full_vocabulary_needs_no_mapping(target: Target) -> None:
    draft = tiny_draft(target, draft_vocab_size=None)
    proposal = proposed(made(draft), seen(draft, 0, [4], 6), 1)
    assert (proposal.draws[0][0].over(64) > 0).all()
