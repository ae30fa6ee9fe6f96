"""Plain decoding: a tree of one node, so that the baseline runs through the same decoder as every draft."""

from __future__ import annotations

from decoding.drafters import EachAlone, Proposal, Turn
from decoding.tree import TokenTree


class PlainDrafter(EachAlone):
    def one(self, turn: Turn) -> Proposal:
        return Proposal(TokenTree.chain(turn.seen.pending))
