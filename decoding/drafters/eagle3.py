"""How an EAGLE-3 draft proposes a chain (Li et al. 2025; research: algorithms.md §1.7).

Row j of the draft pairs the target's features at position j with the token at j + 1 and predicts the token at
j + 2. A round first feeds the rows of everything the target has just committed, with true features, the
pending token being the last row's token; the last row predicts the first drafted token. Each further token
costs one row that takes the draft's own state in place of features. Those rows are dropped at the next round,
even where their tokens were accepted, because true features exist by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from configs.schema import Proposal as Mode
from decoding.cache import DraftCache
from decoding.clock import now
from decoding.drafters import Proposal, Seen
from decoding.randomness import Key, Purpose, Randomness
from decoding.tree import TokenTree
from decoding.warp import Warp, largest
from models.eagle3 import Eagle3


class Eagle3Drafter:
    def __init__(self, draft: Eagle3, mode: Mode, eos_ids: frozenset[int]) -> None:
        self.draft = draft
        self.mode = mode
        self.eos_ids = eos_ids
        self.taps: tuple[int, ...] = draft.taps
        self.draft_ids = draft.draft_ids  # [Vd], on the draft's device
        self.target_ids: list[int] = self.draft_ids.tolist()
        self.begin()

    def begin(self) -> None:
        self.cache = DraftCache()

    def propose(self, seen: Seen, budget: int, warp: Warp, randomness: Randomness) -> Proposal:
        sampled = self.mode is Mode.sampled and warp.temperature > 0
        tokens: list[int] = []
        laws = Laws(self.draft_ids, self.draft.shape.vocab_size)
        seconds = 0.0
        while True:
            started = now(self.draft_ids.device)
            logits = self.extend(tokens[-1], seen.position + len(tokens) - 1) if tokens else self.read(seen)
            seconds += now(self.draft_ids.device) - started
            if sampled:
                law = warp(logits)
                index = randomness.draw(law, Key(seen.position, Purpose.propose, len(tokens)))
                laws.append(law)
            else:
                index = int(largest(logits))
            tokens.append(self.target_ids[index])
            if len(tokens) == budget or tokens[-1] in self.eos_ids:
                break
        tree = TokenTree.chain(seen.pending, tokens)
        return Proposal(tree, laws if sampled else None, seconds, forwards=len(tokens))

    def read(self, seen: Seen) -> Tensor:
        """Drops the drafted tokens' rows, feeds the committed ones: logits [Vd] of the first new draft."""
        if self.cache.length < seen.start:
            raise ValueError(f"the draft has read {self.cache.length} rows, the target is at {seen.start}")
        self.cache.commit(seen.start, ())
        pending = torch.tensor([seen.pending], device=seen.tokens.device)
        tokens = torch.cat([seen.tokens[1:], pending])
        positions = torch.arange(seen.start, seen.position, device=seen.tokens.device)
        features = self.draft.fuse(seen.taps[None])
        self.state = self.draft(features, tokens[None], positions[None], self.cache.attend)[:, -1:]
        return self.draft.logits(self.state)[0, 0]

    def extend(self, token: int, position: int) -> Tensor:
        """Feeds a drafted token and the draft's own state as row `position`: logits [Vd] of the next."""
        device = self.draft_ids.device
        row = torch.tensor([[token]], device=device), torch.tensor([[position]], device=device)
        self.state = self.draft(self.state, *row, self.cache.attend)
        return self.draft.logits(self.state)[0, 0]


class Laws(Mapping[int, Tensor]):
    """The laws that a chain was drawn from; node i has that of its child.

    Kept over the draft's vocabulary [Vd], and given over the target's [V] when read: verification reads only
    those that it walks past.
    """

    def __init__(self, draft_ids: Tensor, vocab_size: int) -> None:
        self.draft_ids = draft_ids
        self.vocab_size = vocab_size
        self.laws: list[Tensor] = []

    def append(self, law: Tensor) -> None:
        self.laws.append(law)

    def __getitem__(self, node: int) -> Tensor:
        """Zero where the draft has no id."""
        if not 0 <= node < len(self.laws):
            raise KeyError(node)
        law = self.laws[node]
        if len(law) == self.vocab_size:
            return law
        return law.new_zeros(self.vocab_size).index_copy_(0, self.draft_ids, law)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.laws)))

    def __len__(self) -> int:
        return len(self.laws)


def build(draft: Eagle3, proposal: Mode, eos_ids: frozenset[int]) -> Eagle3Drafter:
    return Eagle3Drafter(draft, proposal, eos_ids)
