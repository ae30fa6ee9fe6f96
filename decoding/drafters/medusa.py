"""How heads on the target's last hidden state draft: Medusa (Cai et al. 2024; research: algorithms.md §1.3,
decoding.md §1.2) and its sequential kin, Hydra and IBM's MLP speculator (§1.4, §1.9).

With P the position of the pending token, the newest hidden state is h_{P-1}, which the pending token was
drawn from. Medusa's head k (from 1) on h_j predicts t_{j+1+k}: so head 1 gives the root's children, and head
m + 1 those of every node at depth m, whatever its path. One call a round says all, and reading a node costs
nothing. Sequential heads also take the tokens on the path, the pending one first, and carry a state down it.

Neither keeps rows of past tokens. Nothing is drafted deeper than there are heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from decoding.cache import KVCache
from decoding.drafters import Proposal, Turn
from decoding.growth import Growth
from decoding.reader import Level, Network, NetworkDrafter, Reader, vocabulary_of


class Heads(Network, Protocol):
    """What heads of either kind say of themselves."""

    @property
    def heads(self) -> int:
        """How many tokens after the pending one they can predict."""
        ...


class MedusaHeads(Heads, Protocol):
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, heads, Vd] of h_j [n, d] in any floating dtype; entry i predicts the token at j + 2 + i."""
        ...


class SequentialHeads(Heads, Protocol):
    def start(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """States [n, s] of h_j [n, d] and the tokens at j + 1, long [n]."""
        ...

    def step(self, states: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """States [n, s] of the parents' states and the tokens at j + 1 + depth, long [n]."""
        ...

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """[n, Vd] for the token at j + 2 + depth, of states after the token at j + 1 + depth."""
        ...


class HeadsReader(Reader):
    def __init__(self, draft: Heads, eos_ids: frozenset[int]) -> None:
        without_rows = KVCache(layers=0)
        super().__init__(without_rows, vocabulary_of(draft, eos_ids), draft.draft_ids.device)
        self.taps = draft.taps


class MedusaReader(HeadsReader):
    """A sequence's `states` are here the round's logits [Vd], one entry per head."""

    def __init__(self, draft: MedusaHeads, eos_ids: frozenset[int]) -> None:
        super().__init__(draft, eos_ids)
        self.draft = draft

    def read(self, turns: Sequence[Turn]) -> Tensor:
        logits = self.draft.logits(newest_hidden(turns))
        for turn, said in zip(turns, logits, strict=True):
            turn.state.restart(list(said))
        return logits[:, 0]

    def extend(self, levels: Sequence[Level]) -> list[Tensor]:
        return [torch.stack([level.reading.states[depth] for depth in deepen(level)]) for level in levels]


class SequentialReader(HeadsReader):
    def __init__(self, draft: SequentialHeads, eos_ids: frozenset[int]) -> None:
        super().__init__(draft, eos_ids)
        self.draft = draft

    def read(self, turns: Sequence[Turn]) -> Tensor:
        states = self.draft.start(newest_hidden(turns), self.tensor([turn.seen.pending for turn in turns]))
        for turn, state in zip(turns, states, strict=True):
            turn.state.restart([state])
        return self.draft.logits(states, 0)

    def extend(self, levels: Sequence[Level]) -> list[Tensor]:
        depths = {depth for level in levels for depth in deepen(level)}
        if len(depths) > 1:
            raise ValueError(f"nodes at depths {sorted(depths)} are to be read together: grow level by level")
        depth = depths.pop()
        before = [level.reading.states[parent + 1] for level in levels for parent in level.parents]
        tokens = self.tensor([token for level in levels for token in level.tokens])
        states = self.draft.step(torch.stack(before), tokens, depth)
        counts = [len(level.tokens) for level in levels]
        for level, read in zip(levels, states.split(counts), strict=True):
            level.reading.states += list(read)
        return list(self.draft.logits(states, depth).split(counts))


class HeadsDrafter(NetworkDrafter):
    def __init__(self, reader: HeadsReader, growth: Growth, heads: int) -> None:
        super().__init__(reader, growth)
        self.heads = heads

    def propose(self, turns: Sequence[Turn]) -> list[Proposal]:
        return super().propose([replace(turn, budget=min(turn.budget, self.heads)) for turn in turns])


class MedusaDrafter(HeadsDrafter):
    def propose(self, turns: Sequence[Turn]) -> list[Proposal]:
        return [replace(proposal, forwards=1) for proposal in super().propose(turns)]


def newest_hidden(turns: Sequence[Turn]) -> Tensor:
    """[n, d]: the target's state at each sequence's last token before the pending one."""
    return torch.stack([turn.seen.taps[-1] for turn in turns])


def deepen(level: Level) -> list[int]:
    """Notes the nodes of `level` as read: the depth of each, the root's being 0."""
    nodes = zip(level.tokens, level.parents, strict=True)
    return [len(level.reading.note(token, parent)) for token, parent in nodes]


def build(draft: MedusaHeads, growth: Growth, eos_ids: frozenset[int]) -> NetworkDrafter:
    return MedusaDrafter(MedusaReader(draft, eos_ids), growth, draft.heads)
