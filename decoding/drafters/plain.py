"""Plain decoding: a tree of one node, so that the baseline runs through the same decoder as every draft."""

from __future__ import annotations

from decoding.drafters import Proposal, Seen
from decoding.randomness import Randomness
from decoding.tree import TokenTree
from decoding.warp import Warp


class PlainDrafter:
    taps: tuple[int, ...] = ()

    def begin(self) -> None:
        pass

    def propose(self, seen: Seen, budget: int, warp: Warp, randomness: Randomness) -> Proposal:
        return Proposal(TokenTree.chain(seen.pending))
