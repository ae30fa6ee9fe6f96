"""One sequence's sampling law: the warp, and what depends on the text before it (penalty, grammar).

The target's law at a node of a proposed tree and the draft's law there are made by the same object, from the
node's own path. So a forbidden token has no mass on either side, and a repetition counts from the node on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from decoding.warp import Warp, choices


class Grammar(Protocol):
    """What may follow, told from the committed text on; asking about a path changes nothing."""

    def mask(self, path: Sequence[int]) -> Tensor | None:
        """bool [V], the ids allowed after the committed text and then `path`; None: all.

        After the end of the text only the end tokens. At least one id is always allowed; a path that itself
        breaks the grammar is a `ValueError`.
        """
        ...

    def forced(self, path: Sequence[int], limit: int) -> list[int]:
        """The longest run after `path`, of at most `limit` ids, in which each is the only one allowed."""
        ...

    def likely(self, path: Sequence[int], limit: int) -> list[int]:
        """At most `limit` ids that probably follow `path`: the usual tokens of text that the grammar
        forces."""
        ...

    def commit(self, tokens: Sequence[int]) -> None:
        """Moves on: `tokens` are now part of the text."""
        ...


class Law:
    """A sequence's law after its committed text, the pending token included, and then a path of tokens."""

    def __init__(self, warp: Warp, text: Sequence[int] = (), grammar: Grammar | None = None) -> None:
        self.warp = warp
        self.grammar = grammar
        self.text = set(text) if warp.repetition_penalty != 1 else set()

    @property
    def plain(self) -> bool:
        """Whether the law depends on the logits alone, not on the text."""
        return self.grammar is None and self.warp.repetition_penalty == 1

    @property
    def greedy(self) -> bool:
        return self.warp.temperature == 0

    def __call__(self, logits: Tensor, path: Sequence[int]) -> np.ndarray:
        """Probabilities [V], on the host, of the target's logits [V] after `path`."""
        return self.warp(self.shaped(logits, path))

    def choices(self, logits: Tensor, path: Callable[[int], Sequence[int]]) -> Callable[[int], int]:
        """Tells of a node, when asked, the id that the law at temperature 0 is certain of.

        logits: [N, V] after each node; path(node): the tokens down to it.
        """
        if self.plain:
            return choices(logits)
        return lambda node: choices(self.shaped(logits[node], path(node))[None])(0)

    def allowed(self, path: Sequence[int], ids: Tensor | None = None) -> Tensor | None:
        """bool [V], or of `ids` only, where the grammar lets the next token be; None: everywhere."""
        mask = self.grammar.mask(path) if self.grammar is not None else None
        return mask if mask is None or ids is None else mask[ids.to(mask.device)]

    def shaped(self, logits: Tensor, path: Sequence[int], ids: Tensor | None = None) -> Tensor:
        """Logits [V] (or those of `ids` [n], a draft's vocabulary) after penalty and grammar, before the
        warp.

        Where the grammar allows none of `ids`, all are -inf.
        """
        if self.warp.repetition_penalty != 1:
            logits = penalised(logits, self.text.union(path), ids, self.warp.repetition_penalty)
        mask = self.allowed(path, ids)
        return logits if mask is None else logits.masked_fill(~mask.to(logits.device), -torch.inf)

    def commit(self, tokens: Sequence[int]) -> None:
        """Moves on by `tokens`, which were emitted."""
        if self.warp.repetition_penalty != 1:
            self.text.update(tokens)
        if self.grammar is not None:
            self.grammar.commit(tokens)


def penalised(logits: Tensor, text: set[int], ids: Tensor | None, penalty: float) -> Tensor:
    """Hugging Face's repetition penalty (Keskar et al. 2019, §4.1): what stands in the text already has its
    logit divided by `penalty` if positive, multiplied if negative."""
    known = torch.tensor(sorted(text), dtype=torch.long, device=logits.device)
    if ids is not None:
        known = torch.isin(ids, known).nonzero().flatten()
    picked = logits[known]
    return logits.index_copy(0, known, torch.where(picked < 0, picked * penalty, picked / penalty))
