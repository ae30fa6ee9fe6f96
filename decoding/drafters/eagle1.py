"""How an EAGLE draft reads, and EAGLE-1 with it (Li et al. 2024; research: algorithms.md §1.5).

Row j of the draft pairs the target's feature at position j with the token at j + 1, and its state is the
feature that it expects at j + 1, which the logits of the token at j + 2 follow from. A round first feeds the
rows of everything the target has just committed, with true features, the pending token being the last row's
token; the last row predicts the first drafted token. A drafted token costs one row that takes its parent's
state in place of a feature. Those rows are dropped at the next round, even where their tokens were accepted,
because true features exist by then.

EAGLE-1's feature is the target's last hidden state after the final norm, and its logits are the target's own
head of the expected feature. EAGLE-3 fuses several layers and has a head of its own (eagle3.py).
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Protocol

from torch import Tensor

from decoding.cache import DraftCache
from decoding.drafters import Turn
from decoding.growth import Growth
from decoding.reader import Network, NetworkDrafter, News, Reader, vocabulary_of
from models.layers import Attend


class FeatureNetwork(Network, Protocol):
    """What the reader asks of an EAGLE network; EAGLE-1 taps the last layer."""

    @property
    def layers(self) -> Sized:
        """Those that attend."""
        ...

    def fuse(self, taps: Tensor) -> Tensor:
        """Features [B, T, d] of tapped states [B, T, n_taps * d] in any floating dtype."""
        ...

    def __call__(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """States [B, T, d] of features or parents' states [B, T, d]; tokens and positions are long [B, T]."""
        ...

    def logits(self, state: Tensor) -> Tensor:
        """[..., Vd] of states [..., d]."""
        ...


class FeatureReader(Reader):
    """Reads (feature, next token) pairs; committed rows always with true features."""

    cache: DraftCache

    def __init__(self, draft: FeatureNetwork, layers: int, eos_ids: frozenset[int]) -> None:
        """layers: how many of the network's layers attend."""
        super().__init__(DraftCache(layers), vocabulary_of(draft, eos_ids), draft.draft_ids.device)
        self.draft = draft
        self.taps = draft.taps

    def news(self, turn: Turn) -> News:
        seen = turn.seen
        if turn.state.committed < seen.start:
            raise ValueError(f"the draft has read {turn.state.committed} rows, the target is at {seen.start}")
        return News(seen.start, [*seen.tokens[1:], seen.pending], self.draft.fuse(seen.taps[None])[0])

    def run(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
        assert features is not None
        self.cache.mask = mask
        return self.draft(features, tokens, positions, self.cache.attend)

    def logits(self, states: Tensor) -> Tensor:
        return self.draft.logits(states)


def build(draft: FeatureNetwork, growth: Growth, eos_ids: frozenset[int]) -> NetworkDrafter:
    return NetworkDrafter(FeatureReader(draft, len(draft.layers), eos_ids), growth)
