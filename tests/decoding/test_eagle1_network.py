"""EAGLE-1's own network in the decoder: its cache, however many layers it has, and whose law comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import Proposal as Mode
from decoding.decoder import Params
from decoding.drafters import Seen, Turn, eagle1
from decoding.growth import ChainGrowth, DynamicGrowth, Growth, StaticGrowth
from decoding.law import Law
from decoding.randomness import Seeded
from decoding.shapes import TreeShape
from decoding.warp import Warp
from models.eagle1 import Eagle1, NetworkConfig
from models.target import Target
from tests.conftest import tiny_target
from tests.decoding.replay import decoded_law, plain_law, total_variation

NO_EOS: frozenset[int] = frozenset()


def eagle(target: Target, vocabulary: list[int], **network: Any) -> Any:
    draft = Eagle1.build(NetworkConfig(draft_vocab_size=len(vocabulary), **network), target)
    draft.set_vocabulary(torch.tensor(vocabulary))
    draft.initialise(0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.mul_(5 if weight.dim() > 1 else 1)
    return draft.to(target.dtype).requires_grad_(False)


def after(draft: Eagle1, features: Tensor, tokens: list[int], path: list[int]) -> Tensor:
    """Logits [Vd] after `path`, drafted behind `tokens` (the last one pending), in one causal pass per step.

    features [n, d]: of all of `tokens` but the pending one. A drafted row takes its parent's state.
    """
    hidden, text = features[None], torch.tensor([[*tokens[1:], *path]])
    for _ in range(len(path)):
        state = draft(hidden, text[:, : hidden.shape[1]], torch.arange(hidden.shape[1])[None])
        hidden = torch.cat([hidden, state[:, -1:]], dim=1)
    return draft.logits(draft(hidden, text, torch.arange(text.shape[1])[None]))[0, -1]


@pytest.mark.parametrize("layers", [1, 2])
def test_each_path_is_read_behind_the_true_features(target: Target, layers: int) -> None:
    """A tree of two children at every node, three levels deep; every node against its path read alone."""
    draft = eagle(target, list(range(3, 60)), layers=layers, bias=True)
    drafter = eagle1.build(draft, StaticGrowth(TreeShape.of((2, 2, 2)), Mode.greedy), NO_EOS)
    tokens = [4, 5, 6, 7, 10]
    taps = target.forward(torch.tensor([tokens[:-1]]), taps=(target.num_layers,)).taps
    assert taps is not None
    seen = Seen(0, tokens[:-1], tokens[-1], taps[0])
    [proposal] = drafter.propose([Turn(drafter.begin(), seen, 3, Law(Warp()), Seeded(0))])
    tree = proposal.tree
    assert len(tree.tokens) == 1 + 2 + 4 + 8
    for node in range(1 + 2 + 4):  # those with children
        best = after(draft, taps[0], tokens, list(tree.paths[node])).topk(2).indices
        assert [tree.tokens[child] for child in tree.children(node)] == draft.draft_ids[best].tolist()


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
    drafter = eagle1.build(eagle(target, [0, 2], layers=2), growth, target.eos_ids)
    law = decoded_law(target, drafter, [0, 1], asked)

    def logits(prefix: tuple[int, ...]) -> Tensor:
        made = target.forward(torch.tensor([prefix])).logits
        assert made is not None
        return made[0, -1]

    assert total_variation(law, plain_law(logits, [0, 1], asked, target.eos_ids)) < 1e-12
