"""Hydra's heads in the decoder: what they have read on each path, and whose law comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from configs.schema import Proposal as Mode
from decoding.decoder import Params
from decoding.drafters import Seen, Turn, hydra
from decoding.growth import ChainGrowth, DynamicGrowth, Growth, StaticGrowth
from decoding.law import Law
from decoding.randomness import Seeded
from decoding.shapes import TreeShape
from decoding.warp import Warp
from models.hydra import Hydra, NetworkConfig
from models.target import Target
from tests.conftest import tiny_target
from tests.decoding.replay import decoded_law, plain_law, total_variation


def heads_of(target: Target, heads: int, vocabulary: list[int] | None = None) -> Any:
    """Random heads."""
    size = None if vocabulary is None else len(vocabulary)
    draft = Hydra.build(NetworkConfig(heads=heads, draft_vocab_size=size), target)
    if vocabulary is not None:
        draft.set_vocabulary(torch.tensor(vocabulary))
    draft.draw_weights(0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.mul_(20)
    return draft.to(target.dtype).requires_grad_(False)


def test_each_path_is_read_from_the_pending_token_on(target: Target) -> None:
    """Two sequences of a batch, each with a tree of two children at every node, three levels deep."""
    draft = heads_of(target, 3, vocabulary=list(range(3, 60)))
    growth = StaticGrowth(TreeShape.of((2, 2, 2)), Mode.greedy)
    drafter = hydra.build(draft, growth, frozenset())
    taps = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0))
    turns = [
        Turn(drafter.begin(), Seen(0, [4, 5, 6, 7], pending, taps[row]), 3, Law(Warp()), Seeded(0))
        for row, pending in enumerate((10, 20))
    ]
    for row, proposal in enumerate(drafter.propose(turns)):
        tree = proposal.tree
        assert len(tree.tokens) == 1 + 2 + 4 + 8
        for node in range(1 + 2 + 4):  # those with children
            path, above = [tree.tokens[node]], tree.parent[node]
            while above >= 0:
                path, above = [tree.tokens[above], *path], tree.parent[above]
            # cat(h, emb(pending), emb(path) ...), h being the state just before the pending token.
            read = torch.cat([taps[row, -1], target.embedding[path].flatten()])
            best = draft.logits(read, len(path) - 1).topk(2).indices
            children = [tree.tokens[child] for child in tree.children(node)]
            assert children == draft.draft_ids[best].tolist()


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
    drafter = hydra.build(heads_of(target, 2), growth, target.eos_ids)
    law = decoded_law(target, drafter, [0, 1], asked)

    def logits(prefix: tuple[int, ...]) -> torch.Tensor:
        made = target.forward(torch.tensor([prefix])).logits
        assert made is not None
        return made[0, -1]

    assert total_variation(law, plain_law(logits, [0, 1], asked, target.eos_ids)) < 1e-12
