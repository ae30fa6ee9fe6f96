"""How a block network reads (after DFlash, arXiv 2602.06036).

A round first keeps the keys and values of what the target has just committed, which need nothing but the
target's features. Then it runs one block: the pending token and masked rows behind it, which see all of the
context and each other. Row k says what comes k tokens after the pending one. That holds for every path, so
any tree can be grown from it (peagle.py). The block's own keys and values are dropped at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.cache import DraftCache
from decoding.drafters import Turn
from decoding.drafters.peagle import ParallelDrafter, foretold
from decoding.growth import Growth
from decoding.reader import Level, NetworkDrafter, Reader, padded, vocabulary_of
from models.dflash import DFlash


class DFlashReader(Reader):
    """A sequence's `states` are here the round's logits [Vd], one entry per depth."""

    cache: DraftCache

    def __init__(self, draft: DFlash, eos_ids: frozenset[int]) -> None:
        super().__init__(
            DraftCache(draft.shape.layers), vocabulary_of(draft, eos_ids), draft.draft_ids.device
        )
        self.draft = draft
        self.taps = draft.taps

    def read(self, turns: Sequence[Turn]) -> Tensor:
        self.keep(turns)
        size = self.draft.shape.block_size
        extent = self.cache.aim([turn.state.slot for turn in turns], size)
        pending = self.tensor([[turn.seen.pending] for turn in turns])
        positions = self.tensor([[turn.seen.position] for turn in turns])
        rows = torch.arange(extent, device=self.device) < positions + size  # the context's and the block's
        self.cache.mask = rows[:, None, None].expand(-1, -1, size, -1)
        states = self.draft(pending, positions, self.cache.attend)[:, 0]
        self.commit(turns)
        logits = self.draft.logits(states[:, 1:])
        for turn, said in zip(turns, logits, strict=True):
            turn.state.restart(list(said))
        return logits[:, 0]

    def keep(self, turns: Sequence[Turn]) -> None:
        """Puts the keys and values of newly committed tokens behind those of the earlier ones."""
        for turn in turns:
            if turn.state.committed < turn.seen.start:
                raise ValueError(
                    f"the draft has read {turn.state.committed} rows, the target is at {turn.seen.start}"
                )
            self.cache.commit(turn.state.slot, turn.seen.start)
        taps = padded([turn.seen.taps for turn in turns], max(len(turn.seen.tokens) for turn in turns))
        assert taps is not None
        starts = self.tensor([[turn.seen.start] for turn in turns])
        last = self.tensor([[turn.seen.position - 1] for turn in turns])  # padding's position too
        positions = (starts + torch.arange(taps.shape[1], device=self.device)).minimum(last)
        self.cache.aim([turn.state.slot for turn in turns], taps.shape[1])
        for layer, (keys, values) in enumerate(self.draft.context(taps, positions)):
            self.cache.update(keys, values, layer)
        self.commit(turns)

    def commit(self, turns: Sequence[Turn]) -> None:
        """Drops what lies behind the rows of committed tokens: padding, or the block."""
        for turn in turns:
            turn.state.committed = turn.seen.position
            self.cache.commit(turn.state.slot, turn.seen.position)

    def extend(self, levels: Sequence[Level]) -> list[Tensor]:
        return [foretold(level) for level in levels]


def build(draft: DFlash, growth: Growth, eos_ids: frozenset[int]) -> NetworkDrafter:
    return ParallelDrafter(DFlashReader(draft, eos_ids), growth, draft.drafted)
