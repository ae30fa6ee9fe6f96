"""What a round of block drafting keeps and runs, which row speaks at which depth, and whose law comes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema import Proposal as Mode
from decoding.drafters import Seen, Turn
from decoding.drafters.dflash import build
from decoding.growth import ChainGrowth, DynamicGrowth, Growth, StaticGrowth
from decoding.law import Law
from decoding.randomness import Seeded
from decoding.reader import NetworkDrafter
from decoding.sequence import Params
from decoding.shapes import TreeShape
from decoding.warp import Warp
from models.dflash import DFlash, NetworkConfig
from models.target import Target
from tests.conftest import tiny_target
from tests.decoding.replay import decoded_law, plain_law, total_variation

IDS = [3, 10, 20, 30]  # the draft vocabulary
NO_EOS: frozenset[int] = frozenset()
SHAPE = TreeShape(((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0)))
TEXT = [4, 5, 6, 7, 8, 9, 11]


@pytest.fixture
def draft(target: Target) -> DFlash:
    draft = DFlash.build(NetworkConfig(layers=2, block_size=4, draft_vocab_size=4), target)
    draft.set_vocabulary(torch.tensor(IDS))
    draft.initialise(0, target)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.mul_(5)  # so that laws differ
    return draft.requires_grad_(False)


def turn(target: Target, draft: DFlash, state: Any, start: int, end: int, budget: int = 3) -> Turn:
    """The target has read TEXT up to `end`, where the pending token stands, and the drafter up to `start`."""
    taps = target.forward(torch.tensor([TEXT[:end]]), taps=draft.taps).taps
    assert taps is not None
    told = Seen(start, TEXT[start:end], TEXT[end], taps[0, start:])
    return Turn(state, told, budget, Law(Warp()), Seeded(0))


def said(drafter: NetworkDrafter, turns: list[Turn]) -> list[Tensor]:
    """The logits [K, Vd] of each turn's round."""
    drafter.propose(turns)
    return [torch.stack(turn.state.states) for turn in turns]


def straight(target: Target, draft: DFlash, end: int) -> Tensor:
    """The same from one context of everything that was read, without a cache."""
    taps = target.forward(torch.tensor([TEXT[:end]]), taps=draft.taps).taps
    assert taps is not None
    context = draft.context(taps, torch.arange(end)[None])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (torch.cat(pair, 2) for pair in zip(context[layer], (k, v), strict=True))
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)  # all sees all

    states = draft(torch.tensor([[TEXT[end]]]), torch.tensor([[end]]), attend)
    return draft.logits(states[0, 0, 1:])


def test_context_ends_before_the_anchor_and_blocks_are_not_kept(
    target: Target, draft: DFlash, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[list[int]] = []
    run: list[tuple[int, int]] = []
    context, forward = DFlash.context, DFlash.forward

    def noted_context(self: DFlash, taps: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        kept.append(positions[0].tolist())
        return context(self, taps, positions)

    def noted_forward(self: DFlash, anchors: Tensor, positions: Tensor, attend: Any) -> Tensor:
        run.append((anchors.item(), positions.item()))  # pyright: ignore[reportArgumentType]
        return forward(self, anchors, positions, attend)

    monkeypatch.setattr(DFlash, "context", noted_context)
    monkeypatch.setattr(DFlash, "forward", noted_forward)
    drafter = build(draft, ChainGrowth(Mode.greedy), NO_EOS)
    state = drafter.begin()
    proposal = drafter.propose([turn(target, draft, state, 0, 3)])[0]
    drafter.propose([turn(target, draft, state, 3, 5)])
    assert kept == [[0, 1, 2], [3, 4]]
    assert run == [(7, 3), (9, 5)]  # the pending token, where it stands
    assert proposal.forwards == 1 and proposal.tree.parent == [-1, 0, 1, 2]
    assert state.committed == drafter.reader.cache.lengths[state.slot] == 5


def test_nothing_is_drafted_beyond_the_block(target: Target, draft: DFlash) -> None:
    drafter = build(draft, ChainGrowth(Mode.greedy), NO_EOS)
    long = drafter.propose([turn(target, draft, drafter.begin(), 0, 3, budget=9)])[0].tree.tokens
    short = drafter.propose([turn(target, draft, drafter.begin(), 0, 3, budget=2)])[0].tree.tokens
    assert len(long) - 1 == draft.drafted == 3
    assert short == long[:3]  # the whole block runs, whatever is asked for


def test_rounds_say_what_one_forward_over_everything_says(target: Target, draft: DFlash) -> None:
    """After rounds that accepted 0, 1 and 2 tokens, and for sequences of other lengths in one batch."""
    drafter = build(draft, ChainGrowth(Mode.greedy), NO_EOS)
    long, short = drafter.begin(), drafter.begin()
    for steps in [(0, 2, 0, 1), (2, 3, 1, 2), (3, 6, 2, 3)]:
        turns = [turn(target, draft, long, *steps[:2]), turn(target, draft, short, *steps[2:])]
        for found, end in zip(said(drafter, turns), (steps[1], steps[3]), strict=True):
            torch.testing.assert_close(found, straight(target, draft, end), rtol=1e-4, atol=1e-4)


def test_each_depth_has_its_law_under_every_parent(target: Target, draft: DFlash) -> None:
    drafter = build(draft, StaticGrowth(SHAPE, Mode.greedy), NO_EOS)
    tree = drafter.propose([turn(target, draft, drafter.begin(), 0, 3)])[0].tree
    first, second, third = (
        [IDS[i] for i in row.argsort(descending=True)] for row in straight(target, draft, 3)
    )
    assert tree.tokens == [7, *first[:2], second[0], *second[:2], third[0]]
    assert tree.parent == [-1, 0, 0, 1, 2, 2, 4]


def test_drawn_children_name_the_law_of_their_depth(target: Target, draft: DFlash) -> None:
    drafter = build(draft, ChainGrowth(Mode.sampled), NO_EOS)
    proposal = drafter.propose([turn(target, draft, drafter.begin(), 0, 3)])[0]
    for node, law in enumerate(straight(target, draft, 3).softmax(-1)):
        np.testing.assert_allclose(proposal.draws[node][0].over(64)[IDS], law, rtol=1e-4, atol=1e-5)


def test_turns_of_one_batch_draft_within_their_own_budgets(target: Target, draft: DFlash) -> None:
    drafter = build(draft, ChainGrowth(Mode.greedy), NO_EOS)
    turns = [turn(target, draft, drafter.begin(), 0, 3, budget) for budget in (1, 3)]
    assert [len(proposal.tree) - 1 for proposal in drafter.propose(turns)] == [1, 3]


def test_gap_in_what_was_seen_is_refused(target: Target, draft: DFlash) -> None:
    drafter = build(draft, ChainGrowth(Mode.greedy), NO_EOS)
    with pytest.raises(ValueError, match="0 rows"):
        drafter.propose([turn(target, draft, drafter.begin(), 1, 3)])


# The law

TINY = tiny_target(vocab=3, hidden=8, layers=1, heads=2, kv_heads=1, dtype=torch.float64)


def tiny_drafter(growth: Growth) -> NetworkDrafter:
    draft = DFlash.build(NetworkConfig(layers=1, block_size=3, draft_vocab_size=None), TINY)
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
