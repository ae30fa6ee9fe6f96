"""Which hidden state heads draft from, which head speaks at which depth, and whose law comes out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.schema import Proposal as Mode
from decoding.decoder import Params, Request
from decoding.drafters import Proposal, Seen, Turn, medusa
from decoding.drafters.medusa import HeadsDrafter, SequentialReader
from decoding.growth import ChainGrowth, DynamicGrowth, Growth, StaticGrowth
from decoding.law import Law
from decoding.randomness import Seeded
from decoding.shapes import TreeShape
from decoding.warp import Warp
from models.target import Target, TargetOutput
from tests.conftest import tiny_target
from tests.decoding.replay import decoded_law, plain_law, total_variation
from tests.decoding.tables import TableTarget, decoder_of

GREEDY = ChainGrowth(Mode.greedy)
SHAPE = TreeShape(((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0)))
DEEP = TreeShape(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))
NO_EOS: frozenset[int] = frozenset()


class Said:
    """Two heads that say the same whatever they are given, and note it."""

    heads = 2
    taps = (4,)
    full_vocabulary = False
    draft_ids = torch.tensor([3, 10, 20, 30])

    def __init__(self) -> None:
        self.given: list[list[float]] = []

    def logits(self, hidden: Tensor) -> Tensor:
        self.given += hidden.tolist()
        return torch.tensor([[0.1, 0.9, 0.5, 0.0], [0.7, 0.2, 0.0, 0.6]]).expand(len(hidden), -1, -1)


def turn(state: Any, start: int, tokens: list[int], pending: int, budget: int = 3) -> Turn:
    """The state at position j is (j, -j)."""
    taps = torch.tensor([[float(j), -float(j)] for j in range(start, start + len(tokens))])
    return Turn(state, Seen(start, tokens, pending, taps), budget, Law(Warp()), Seeded(0))


def proposed(network: Any, growth: Growth, budget: int = 3) -> Proposal:
    drafter = medusa.build(network, growth, NO_EOS)
    return drafter.propose([turn(drafter.begin(), 0, [4, 5, 6], 7, budget)])[0]


def params(temperature: float, length: int, draft_tokens: int) -> Params:
    return Params(draft_tokens, length, temperature, top_k=0, top_p=1.0, stop=(), seed=0)


# Alignment


def test_heads_get_the_state_that_the_pending_token_was_drawn_from() -> None:
    network = Said()
    drafter = medusa.build(network, GREEDY, NO_EOS)
    states = [drafter.begin(), drafter.begin()]
    drafter.propose([turn(states[0], 0, [4, 5, 6], 7), turn(states[1], 0, [4], 5)])
    drafter.propose([turn(states[0], 3, [7, 10], 9), turn(states[1], 1, [5], 6)])
    assert drafter.taps == (4,)
    assert network.given == [[2, -2], [0, 0], [4, -4], [1, -1]]  # one before the pending token


def test_each_depth_has_its_head_under_every_parent() -> None:
    """Head 1 ranks 10, 20, 3, 30, head 2 ranks 3, 30, 10, 20; there is no third level.

    7 - 10 - 3
      - 20 - 3
           - 30
    """
    tree = proposed(Said(), StaticGrowth(SHAPE, Mode.greedy)).tree
    assert tree.tokens == [7, 10, 20, 3, 3, 30]
    assert tree.parent == [-1, 0, 0, 1, 2, 2]


def test_dynamic_tree_adds_up_the_heads() -> None:
    """Log-probabilities: head 1 gives 10 -0.91, 20 -1.31; head 2 gives 3 -1.10, 30 -1.20. So the best four:

    7 - 10 - 3
           - 30
      - 20
    """
    tree = proposed(Said(), DynamicGrowth(nodes=4, width=2)).tree
    assert sorted(tree.paths) == [(), (10,), (10, 3), (10, 30), (20,)]


def test_nothing_is_drafted_deeper_than_the_heads() -> None:
    proposal = proposed(Said(), GREEDY, budget=5)
    assert proposal.tree.tokens == [7, 10, 3]
    assert proposal.forwards == 1
    assert proposed(Said(), GREEDY, budget=1).tree.tokens == [7, 10]


def test_drawn_children_name_the_law_of_their_depth() -> None:
    proposal = proposed(Said(), ChainGrowth(Mode.sampled))
    laws = torch.tensor([[0.1, 0.9, 0.5, 0.0], [0.7, 0.2, 0.0, 0.6]]).softmax(-1)
    for node, law in enumerate(laws):
        [draws] = proposal.draws[node]
        np.testing.assert_allclose(draws.over(64)[Said.draft_ids], law, rtol=1e-6)


class Counting(TableTarget):
    """Sure that n is followed by n + 1."""

    def logits(self, prefix: tuple[int, ...]) -> Tensor:
        scores = torch.zeros(self.vocab, dtype=torch.float64)
        scores[(prefix[-1] + 1) % self.vocab] = 50.0
        return scores

    def forward(self, input_ids: Tensor, **words: Any) -> TargetOutput:
        output = super().forward(input_ids, **words)
        return replace(output, taps=output.last_hidden)


class CountingHeads:
    """Right about `Counting`, from its hidden state alone: what follows it, and so on. Or `late` by some."""

    heads = 3
    taps = (1,)
    full_vocabulary = True
    draft_ids = torch.arange(11)

    def __init__(self, late: int = 0) -> None:
        self.late = late

    def logits(self, hidden: Tensor) -> Tensor:
        following = hidden.argmax(-1)  # the pending token
        wanted = (following[:, None] + 1 + torch.arange(3) - self.late) % 11
        return torch.nn.functional.one_hot(wanted, 11).double() * 50


def counted(late: int, growth: Growth) -> list[list[int]]:
    """What was accepted in each round of a batch of two, out of which 5, 6, ... must come."""
    drafter = medusa.build(CountingHeads(late), growth, NO_EOS)
    done = decoder_of(Counting(11), drafter, 2).generate_all([Request([4], params(0.0, 13, 3))] * 2)
    for generation in done:
        assert generation.tokens == [(5 + i) % 11 for i in range(13)]
    return [[round.accepted for round in generation.rounds] for generation in done]


@pytest.mark.parametrize("growth", [GREEDY, DynamicGrowth(6, 2), StaticGrowth(DEEP, Mode.greedy)])
def test_right_heads_are_accepted_whole(growth: Growth) -> None:
    assert counted(0, growth) == [[3, 3, 3]] * 2


@pytest.mark.parametrize("late", [-1, 1])
def test_shifted_heads_are_never_accepted(late: int) -> None:
    assert counted(late, GREEDY) == [[0] * 12] * 2


# The law


class RandomHeads:
    heads = 2
    full_vocabulary = True

    def __init__(self, target: Target) -> None:
        generator = torch.Generator().manual_seed(0)
        self.taps = (target.num_layers,)
        self.draft_ids = torch.arange(target.vocab_size)
        self.weight = torch.randn(2, target.vocab_size, target.hidden_size, generator=generator)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.einsum("nd,kvd->nkv", hidden, self.weight.to(hidden.dtype))


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
    target = tiny_target(vocab=3, hidden=8, layers=1, heads=2, kv_heads=1, dtype=torch.float64)
    asked = params(0.8, 4, 2)
    drafter = medusa.build(RandomHeads(target), growth, target.eos_ids)
    law = decoded_law(target, drafter, [0, 1], asked)

    def logits(prefix: tuple[int, ...]) -> Tensor:
        made = target.forward(torch.tensor([prefix])).logits
        assert made is not None
        return made[0, -1]

    assert total_variation(law, plain_law(logits, [0, 1], asked, target.eos_ids)) < 1e-12


# Sequential heads


class Spelled:
    """The state is all that was read, as a decimal number after the hidden state; prefers the token one above
    the last digit, then the one above that."""

    heads = 3
    taps = (4,)
    full_vocabulary = True
    draft_ids = torch.arange(10)

    def __init__(self) -> None:
        self.read: list[tuple[int, list[int]]] = []

    def start(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return hidden[:, :1] * 10 + tokens[:, None]

    def step(self, states: Tensor, tokens: Tensor, depth: int) -> Tensor:
        made = states * 10 + tokens[:, None]
        self.read.append((depth, made.flatten().int().tolist()))
        return made

    def logits(self, states: Tensor, depth: int) -> Tensor:
        last = states % 10
        return -((torch.arange(10) - last - 1) % 10)


def test_sequential_heads_carry_a_state_down_each_path() -> None:
    """With the state 2 at the last token before the pending 7, which is the root, and 4 and 1 in the second:

    7 - 8 - 9          1 - 2 - 3
      - 9 - 0            - 3 - 4
          - 1 - 2            - 5 ...
    """
    network = Spelled()
    shape = TreeShape(((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0)))
    drafter = HeadsDrafter(SequentialReader(network, NO_EOS), StaticGrowth(shape, Mode.greedy), network.heads)
    turns = [turn(drafter.begin(), 0, [5, 5, 6], 7), turn(drafter.begin(), 0, [5, 5, 5, 5, 6], 1)]
    trees = [proposal.tree for proposal in drafter.propose(turns)]
    assert trees[0].tokens == [7, 8, 9, 9, 0, 1, 2]
    assert trees[1].tokens == [1, 2, 3, 3, 4, 5, 6]
    assert network.read == [
        (1, [278, 279, 412, 413]),
        (2, [2791, 4135]),  # the others are leaves
    ]


def test_unequal_depths_are_refused() -> None:
    reader = SequentialReader(Spelled(), NO_EOS)
    state = reader.begin()
    reader.read([turn(state, 0, [5], 6)])
    level = medusa.Level(state, [7, 8], [-1, 0])
    with pytest.raises(ValueError, match=r"depths \[1, 2\]"):
        reader.extend([level])
