"""How a P-EAGLE draft reads (arXiv 2602.01469), and what it shares with others that draft in parallel.

A round feeds what an EAGLE draft is fed, the rows of everything the target has just committed, with true
features and the pending token last (eagle1.py). Behind them stand as many masked rows as there are further
tokens to draft. The pending token's row predicts the first drafted token, the masked rows the others, all in
this one forward; and it has said everything before a token is drafted, so reading a node costs nothing and
any tree can be grown from it, as with Medusa's heads (medusa.py). Masked rows are dropped at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from decoding.drafters import Proposal, Turn
from decoding.drafters.eagle1 import FeatureReader
from decoding.drafters.medusa import deepen
from decoding.growth import Growth
from decoding.reader import Level, NetworkDrafter, News, Reader
from models.peagle import MASK, PEagle


class ParallelDrafter(NetworkDrafter):
    """One forward a round, whatever is grown from it."""

    def __init__(self, reader: Reader, growth: Growth, depth: int | None = None) -> None:
        """depth: how many tokens after the pending one the network can predict; None: any number."""
        super().__init__(reader, growth)
        self.depth = depth

    def propose(self, turns: Sequence[Turn]) -> list[Proposal]:
        if self.depth is not None:
            turns = [replace(turn, budget=min(turn.budget, self.depth)) for turn in turns]
        return [replace(proposal, forwards=1) for proposal in super().propose(turns)]


class PEagleReader(FeatureReader):
    """A sequence's `states` are here the round's logits [Vd], one entry per depth."""

    draft: PEagle

    def __init__(self, draft: PEagle, eos_ids: frozenset[int]) -> None:
        super().__init__(draft, draft.shape.layers, eos_ids)

    def read(self, turns: Sequence[Turn]) -> Tensor:
        known = [self.news(turn) for turn in turns]
        masks = max(turn.budget for turn in turns) - 1
        states = self.feed(turns, [self.followed(news, masks) for news in known])
        for turn in turns:  # of all these rows, those of committed tokens stay
            turn.state.committed = turn.seen.position
            self.cache.commit(turn.state.slot, turn.seen.position)
        ends = [len(news.tokens) for news in known]
        saying = torch.stack([row[end - 1 : end + masks] for row, end in zip(states, ends, strict=True)])
        logits = self.logits(saying)
        for turn, said in zip(turns, logits, strict=True):
            turn.state.restart(list(said))
        return logits[:, 0]

    def followed(self, news: News, masks: int) -> News:
        """`news` with `masks` masked rows behind it."""
        assert news.features is not None
        features = torch.cat([news.features, self.draft.masked()[0].expand(masks, -1)])
        return News(news.start, [*news.tokens, *[MASK] * masks], features)

    def extend(self, levels: Sequence[Level]) -> list[Tensor]:
        return [foretold(level) for level in levels]


def foretold(level: Level) -> Tensor:
    """Logits [n, Vd] after the nodes of `level`: those that the round's forward gave for their depths."""
    return torch.stack([level.reading.states[depth] for depth in deepen(level)])


def build(draft: PEagle, growth: Growth, eos_ids: frozenset[int]) -> NetworkDrafter:
    return ParallelDrafter(PEagleReader(draft, eos_ids), growth)
