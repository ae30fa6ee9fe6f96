"""A small language model as the draft (Leviathan et al. 2023, Chen et al. 2023): any causal LM that shares
the target's vocabulary, whether found (a `Target`) or trained here (models/small.py).

Rows of drafted tokens that were accepted are exact, so they stay; a round feeds only what the draft has not
read: the last accepted token, if it was a leaf, and the pending one.

Heads are often padded to a round number of rows, and not to the same one for every size of a model family.
What is no token of both models is never proposed. For drafts with another tokenizer there is foreign.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.errors import CheckpointError
from decoding.cache import KVCache
from decoding.drafters import Turn
from decoding.growth import Growth, Vocabulary
from decoding.reader import NetworkDrafter, News, Reader, Reading, vocabulary_of
from models.packing import pack
from models.small import Small
from models.target import Target


class TextReader(Reader):
    """Reads the text and nothing else. Rows of drafted tokens need no second reading."""

    def news(self, turn: Turn) -> News:
        reading: Reading = turn.state
        seen = turn.seen
        text = [*seen.tokens, seen.pending]
        if not reading.committed:
            return News(0, text)
        if reading.committed != seen.start + 1:
            raise ValueError(f"the draft has read {reading.committed} rows, the target is at {seen.start}")
        kept = self.keep(reading, seen.tokens[1:])
        return News(reading.committed + kept, text[1 + kept :])

    def keep(self, reading: Reading, tokens: Sequence[int | None]) -> int:
        """Commits the rows of drafted nodes that spell the longest beginning of `tokens`: how many."""
        path = walked(reading, tokens)
        self.cache.commit(reading.slot, reading.committed, path)
        return len(path)


class ModelReader(TextReader):
    """Reads with a causal language model that was found."""

    def __init__(self, draft: Target, vocabulary: Vocabulary) -> None:
        super().__init__(KVCache(draft.num_layers), vocabulary, draft.device)
        self.draft = draft

    def run(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
        output = self.draft.forward(tokens, positions=positions, mask=mask, cache=self.cache, logits=False)
        return output.last_hidden


class TrainedReader(TextReader):
    """Reads with a draft that was trained here, over its own draft vocabulary."""

    def __init__(self, draft: Small, eos_ids: frozenset[int]) -> None:
        super().__init__(KVCache(draft.num_layers), vocabulary_of(draft, eos_ids), draft.device)
        self.draft = draft
        self.readout = readout(draft)

    def run(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
        return self.draft(tokens, positions, mask, self.cache)

    def logits(self, states: Tensor) -> Tensor:
        return self.readout(states)


class SmallReader(ModelReader):
    """Gives logits over all ids of the target: -inf at those that the draft has no token for."""

    def __init__(self, draft: Target, eos_ids: frozenset[int], vocab_size: int) -> None:
        """vocab_size: rows of the target's head."""
        super().__init__(draft, Vocabulary.of(None, eos_ids))
        self.vocab_size = vocab_size
        self.known = min(1 + max(draft.tokenizer.get_vocab().values()), vocab_size)

    def run(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
        # A target may emit a padding id that the draft has no row for. What the draft reads in its place only
        # costs acceptance.
        return super().run(tokens.clamp(max=len(self.draft.embedding) - 1), positions, mask, features)

    def logits(self, states: Tensor) -> Tensor:
        logits = self.draft.lm_head(states)
        if self.known == self.vocab_size == logits.shape[-1]:
            return logits
        return F.pad(logits[..., : self.known], (0, self.vocab_size - self.known), value=-torch.inf)


def readout(draft: Small) -> Callable[[Tensor], Tensor]:
    """Logits [..., Vd] of states [..., d]. Tied rows are gathered and packed once, not at every token."""
    if draft.head is not None:
        return draft.logits
    rows = draft.head_rows().detach()
    head = nn.Linear(rows.shape[1], len(rows), bias=False, device="meta")
    head.weight = nn.Parameter(rows, requires_grad=False)
    pack(head)
    return head


def walked(reading: Reading, tokens: Sequence[int | None]) -> list[int]:
    """The nodes read that spell the longest beginning of `tokens`, from the root on. None is no node's."""
    edges = zip(reading.parents, reading.tokens, strict=True)
    children: dict[tuple[int, int | None], int] = {edge: node for node, edge in enumerate(edges)}
    path: list[int] = []
    for token in tokens:
        node = children.get((path[-1] if path else -1, token))
        if node is None:
            break
        path.append(node)
    return path


def require_same_vocabulary(draft: Target, target: Target) -> None:
    """Raises `CheckpointError` unless every token has the same id in both.

    How text is cut into tokens may differ (merges, normalisation): the draft only reads ids.
    """
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours == theirs:
        return
    apart = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    shown = ", ".join(f"{token!r} ({ours.get(token)} and {theirs.get(token)})" for token in apart[:3])
    raise CheckpointError(
        f"The draft {draft.name} has another vocabulary than the target {target.name}: {len(apart)} tokens "
        f"differ in their id, among them {shown}. Use a draft of the target's own family, or the foreign "
        "drafter, which translates between two vocabularies."
    )


def build(
    draft: Target | Small, growth: Growth, eos_ids: frozenset[int], target: Target | None = None
) -> NetworkDrafter:
    """target: whose vocabulary a draft that was found must share, else a `CheckpointError`; one that was
    trained does."""
    if isinstance(draft, Small):
        return NetworkDrafter(TrainedReader(draft, eos_ids), growth)
    assert target is not None
    require_same_vocabulary(draft, target)
    return NetworkDrafter(SmallReader(draft, eos_ids, target.vocab_size), growth)
