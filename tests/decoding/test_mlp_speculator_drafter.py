"""The MLP speculator in the decoder: what its state has read on each path, and whose law comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import Proposal as Mode
from decoding.decoder import Params
from decoding.drafters import Seen, Turn, mlp_speculator
from decoding.growth import ChainGrowth, DynamicGrowth, Growth, StaticGrowth
from decoding.law import Law
from decoding.randomness import Seeded
from decoding.shapes import TreeShape
from decoding.warp import Warp
from models.mlp_speculator import MlpSpeculator, NetworkConfig
from models.target import Target
from tests.conftest import tiny_target
from tests.decoding.replay import decoded_law, plain_law, total_variation

NO_EOS: frozenset[int] = frozenset()


def speculator(target: Target, vocabulary: list[int] | None = None, **network: Any) -> Any:
    size = None if vocabulary is None else len(vocabulary)
    draft = MlpSpeculator.build(NetworkConfig(draft_vocab_size=size, **network), target)
    if vocabulary is not None:
        draft.set_vocabulary(torch.tensor(vocabulary))
    draft.initialise(0)
    return draft.to(target.dtype).requires_grad_(False)


def after(draft: MlpSpeculator, hidden: Tensor, path: list[int]) -> Tensor:
    """Logits [Vd] after the tokens of `path`, the pending one first, read alone."""
    tokens = torch.tensor(path)
    state = draft.start(hidden, tokens[0])
    for depth in range(1, len(path)):
        state = draft.step(state, tokens[depth], depth)
    return draft.logits(state, len(path) - 1)


@pytest.mark.parametrize("tie_weights", [True, False])
def test_each_path_is_read_from_the_pending_token_on(target: Target, tie_weights: bool) -> None:
    """Two sequences of a batch, each with a tree of two children at every node, three levels deep."""
    draft = speculator(target, vocabulary=list(range(3, 60)), tie_weights=tie_weights)
    drafter = mlp_speculator.build(draft, StaticGrowth(TreeShape.of((2, 2, 2)), Mode.greedy), NO_EOS)
    taps = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0))
    turns = [
        Turn(drafter.begin(), Seen(0, [4, 5, 6, 7], pending, taps[row]), 3, Law(Warp()), Seeded(0))
        for row, pending in enumerate((10, 20))
    ]
    for row, proposal in enumerate(drafter.propose(turns)):
        tree = proposal.tree
        assert len(tree.tokens) == 1 + 2 + 4 + 8
        for node in range(1 + 2 + 4):  # those with children
            path = [tree.tokens[0], *tree.paths[node]]
            best = after(draft, taps[row, -1], path).topk(2).indices
            children = [tree.tokens[child] for child in tree.children(node)]
            assert children == draft.draft_ids[best].tolist()


def test_nothing_is_drafted_deeper_than_the_heads(target: Target) -> None:
    drafter = mlp_speculator.build(speculator(target, heads=2), ChainGrowth(Mode.greedy), NO_EOS)
    turn = Turn(drafter.begin(), Seen(0, [4], 5, torch.ones(1, 32)), 5, Law(Warp()), Seeded(0))
    [proposal] = drafter.propose([turn])
    assert len(proposal.tree.tokens) == 1 + 2 and proposal.forwards == 2


@pytest.mark.parametrize(
    "growth",
    [
        ChainGrowth(Mode.sampled),
        StaticGrowth(TreeShape(((0,), (1,), (0, 0))), Mode.sampled),
        DynamicGrowth(4, 2),
    ],
)
def test_output_law_is_the_targets(growth: Growth) -> None:
    target = tiny_target(vocab=3, hidden=8, layers=1, heads=2, kv_heads=1, dtype=torch.float64)
    asked = Params(2, 4, temperature=0.8, top_k=0, top_p=1.0, stop=(), seed=0)
    drafter = mlp_speculator.build(speculator(target, vocabulary=[0, 2]), growth, target.eos_ids)
    law = decoded_law(target, drafter, [0, 1], asked)

    def logits(prefix: tuple[int, ...]) -> Tensor:
        made = target.forward(torch.tensor([prefix])).logits
        assert made is not None
        return made[0, -1]

    assert total_variation(law, plain_law(logits, [0, 1], asked, target.eos_ids)) < 1e-12
