"""Which rows a P-EAGLE round feeds, which row speaks at which depth, and whose law comes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.schema import Proposal as Mode
from decoding.drafters import Seen, Turn
from decoding.drafters.peagle import build
from decoding.growth import ChainGrowth, DynamicGrowth, Growth, StaticGrowth
from decoding.law import Law
from decoding.randomness import Seeded
from decoding.reader import NetworkDrafter
from decoding.sequence import Params
from decoding.shapes import TreeShape
from decoding.warp import Warp
from models.peagle import MASK, NetworkConfig, PEagle
from models.target import Target
from tests.conftest import tiny_target
from tests.decoding.replay import decoded_law, plain_law, total_variation

IDS = [3, 10, 20, 30]  # the draft vocabulary
NO_EOS: frozenset[int] = frozenset()
SHAPE = TreeShape(((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0)))
TEXT = [4, 5, 6, 7, 8, 9, 11]


@pytest.fixture
def draft(target: Target) -> PEagle:
    draft = PEagle.build(NetworkConfig(layers=2, draft_vocab_size=4), target)
    draft.set_vocabulary(torch.tensor(IDS))
    draft.initialise(0, target)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.mul_(5)  # so that laws differ
    return draft.requires_grad_(False)


def turn(target: Target, draft: PEagle, state: Any, start: int, end: int, budget: int = 3) -> Turn:
    """The target has read TEXT up to `end`, where the pending token stands, and the drafter up to `start`."""
    taps = target.forward(torch.tensor([TEXT[:end]]), taps=draft.taps).taps
    assert taps is not None
    told = Seen(start, TEXT[start:end], TEXT[end], taps[0, start:])
    return Turn(state, told, budget, Law(Warp()), Seeded(0))


def said(drafter: NetworkDrafter, turns: list[Turn]) -> list[Tensor]:
    """The logits [K, Vd] of each turn's round."""
    drafter.propose(turns)
    return [torch.stack(turn.state.states) for turn in turns]


def straight(target: Target, draft: PEagle, end: int, count: int = 3) -> Tensor:
    """The same from one forward over everything, without a cache."""
    taps = target.forward(torch.tensor([TEXT[:end]]), taps=draft.taps).taps
    assert taps is not None
    hidden = torch.cat([draft.fuse(taps), draft.masked().expand(1, count - 1, -1)], dim=1)
    tokens = torch.tensor([[*TEXT[1 : end + 1], *[MASK] * (count - 1)]])
    states = draft(hidden, tokens, torch.arange(tokens.shape[1])[None])
    return draft.logits(states[0, -count:])


def test_masked_rows_follow_the_pending_token(
    target: Target, draft: PEagle, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[tuple[list[int], list[int]]] = []
    forward = PEagle.forward

    def noted(self: PEagle, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Any = None) -> Tensor:
        fed.append((tokens[0].tolist(), positions[0].tolist()))
        return forward(self, hidden, tokens, positions, attend)

    monkeypatch.setattr(PEagle, "forward", noted)
    drafter = build(draft, ChainGrowth(Mode.greedy), NO_EOS)
    state = drafter.begin()
    proposal = drafter.propose([turn(target, draft, state, 0, 3)])[0]
    drafter.propose([turn(target, draft, state, 3, 5, budget=1)])
    assert fed == [
        ([5, 6, 7, MASK, MASK], [0, 1, 2, 3, 4]),  # token j + 1 stands at position j; 7 is pending
        ([8, 9], [3, 4]),  # the masked rows are gone; one token needs none
    ]
    assert proposal.forwards == 1 and proposal.tree.parent == [-1, 0, 1, 2]
    assert state.committed == drafter.reader.cache.lengths[state.slot] == 5


def test_rounds_say_what_one_forward_over_everything_says(target: Target, draft: PEagle) -> None:
    """After rounds that accepted 0, 1 and 2 tokens, and for sequences of other lengths in one batch."""
    drafter = build(draft, ChainGrowth(Mode.greedy), NO_EOS)
    long, short = drafter.begin(), drafter.begin()
    for steps in [(0, 2, 0, 1), (2, 3, 1, 2), (3, 6, 2, 3)]:
        turns = [turn(target, draft, long, *steps[:2]), turn(target, draft, short, *steps[2:])]
        for found, end in zip(said(drafter, turns), (steps[1], steps[3]), strict=True):
            torch.testing.assert_close(found, straight(target, draft, end), rtol=1e-4, atol=1e-4)


def test_each_depth_has_its_law_under_every_parent(target: Target, draft: PEagle) -> None:
    drafter = build(draft, StaticGrowth(SHAPE, Mode.greedy), NO_EOS)
    tree = drafter.propose([turn(target, draft, drafter.begin(), 0, 3)])[0].tree
    first, second, third = (
        [IDS[i] for i in row.argsort(descending=True)] for row in straight(target, draft, 3)
    )
    assert tree.tokens == [7, *first[:2], second[0], *second[:2], third[0]]
    assert tree.parent == [-1, 0, 0, 1, 2, 2, 4]


def test_drawn_children_name_the_law_of_their_depth(target: Target, draft: PEagle) -> None:
    drafter = build(draft, ChainGrowth(Mode.sampled), NO_EOS)
    proposal = drafter.propose([turn(target, draft, drafter.begin(), 0, 3)])[0]
    for node, law in enumerate(straight(target, draft, 3).softmax(-1)):
        np.testing.assert_allclose(proposal.draws[node][0].over(64)[IDS], law, rtol=1e-4, atol=1e-5)


def test_turns_of_one_batch_draft_within_their_own_budgets(target: Target, draft: PEagle) -> None:
    drafter = build(draft, ChainGrowth(Mode.greedy), NO_EOS)
    turns = [turn(target, draft, drafter.begin(), 0, 3, budget) for budget in (1, 3)]
    assert [len(proposal.tree) - 1 for proposal in drafter.propose(turns)] == [1, 3]


def test_gap_in_what_was_seen_is_refused(target: Target, draft: PEagle) -> None:
    drafter = build(draft, ChainGrowth(Mode.greedy), NO_EOS)
    with pytest.raises(ValueError, match="0 rows"):
        drafter.propose([turn(target, draft, drafter.begin(), 1, 3)])


# The law

TINY = tiny_target(vocab=3, hidden=8, layers=1, heads=2, kv_heads=1, dtype=torch.float64)


def tiny_drafter(growth: Growth) -> NetworkDrafter:
    draft = PEagle.build(NetworkConfig(layers=1, draft_vocab_size=None), TINY)
    draft.initialise(0, TINY)
    return build(draft.double().requires_grad_(False), growth, TINY.eos_ids)


def plain_logits(prefix: tuple[int, ...]) -> Tensor:
    made = TINY.forward(torch.tensor([prefix])).logits
    assert made is not None
    return made[0, -1]


@pytest.mark.parametrize(
    "growth",
    [
        ChainGrowth(Mode.sampled),
        StaticGrowth(TreeShape.of((2, 1)), Mode.greedy),
        StaticGrowth(TreeShape(((0,), (1,), (0, 0))), Mode.sampled),
        DynamicGrowth(4, 2),
    ],
)
def test_output_law_is_the_targets(growth: Growth) -> None:
    asked = Params(2, 4, temperature=0.8, top_k=0, top_p=1.0, stop=(), seed=0)
    law = decoded_law(TINY, tiny_drafter(growth), [0, 1], asked)
    assert total_variation(law, plain_law(plain_logits, [0, 1], asked, TINY.eos_ids)) < 1e-12
