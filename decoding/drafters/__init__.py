"""What every drafter is: something that proposes token trees after pending tokens, and says how it chose.

The decoder knows drafters only through `Drafter`. A method `x` proposes in `decoding/drafters/x.py`. One that
drafts with a network over its own cache, whether an EAGLE head or a small language model, is a `Reader`
(decoding/reader.py) and leaves how its tree grows to decoding/growth.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from decoding.law import Law
from decoding.randomness import Randomness
from decoding.tree import TokenTree
from decoding.warp import normalise_


@dataclass(frozen=True)
class Seen:
    """What the target has committed since the last proposal: the prompt at first, then each round's path."""

    start: int  # absolute position of tokens[0]
    tokens: list[int]  # n ids; their K/V rows have just been committed in the target's cache
    pending: int  # the token at position start + n, which the target has not read yet
    taps: Tensor  # [n, n_taps * d]: the target's tapped states at `tokens`
    choices: list[int] | None = None  # the target's argmax at each node of the last tree, where asked for

    @property
    def position(self) -> int:
        """Absolute position of the pending token, the root of the next tree."""
        return self.start + len(self.tokens)

    def then(self, later: Seen) -> Seen:
        """Both as one, for a drafter that was not asked in between; the choices are the last tree's."""
        if self.position != later.start:
            raise ValueError(f"told up to {self.position}, and now from {later.start} on")
        tokens, taps = [*self.tokens, *later.tokens], torch.cat([self.taps, later.taps])
        return Seen(self.start, tokens, later.pending, taps, later.choices)


@dataclass(frozen=True)
class Turn:
    """One sequence's turn to be drafted for."""

    state: Any  # what `begin` gave for this sequence
    seen: Seen
    budget: int  # the tree's depth at most, >= 1
    law: Law
    randomness: Randomness


class DraftIds:
    """The ids of a draft's own vocabulary, on the host: which of the target's each one is, and back."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids  # long [Vd]
        self.index = {token: index for index, token in enumerate(ids.tolist())}


@dataclass(frozen=True)
class Draws:
    """Children of one node that were drawn from one law, in the order of drawing."""

    law: np.ndarray  # [V], or [Vd] over `draft`: the very law drawn from, since acceptance divides by it
    children: tuple[int, ...]  # nodes; with replacement a node stands here as often as it was drawn
    draft: DraftIds | None = None  # what the entries are; None: the target's ids
    replacement: bool = False

    def index(self, token: int) -> int | None:
        """Where the law has the target's id `token`; None if nowhere."""
        return token if self.draft is None else self.draft.index.get(token)

    def probability(self, token: int) -> float:
        index = self.index(token)
        return 0.0 if index is None else float(self.law[index])

    def over(self, vocab: int) -> np.ndarray:
        """The law [V] over the target's vocabulary; zero where the draft has no id."""
        if self.draft is None:
            return self.law
        whole = np.zeros(vocab, dtype=self.law.dtype)
        whole[self.draft.ids] = self.law
        return whole

    def excess(self, p: np.ndarray) -> np.ndarray:
        """max(p - q, 0) for a law p [V] and this q. Where the draft has no id, that is p."""
        if self.draft is None:
            return excess(p, self.law)
        left = p.copy()
        left[self.draft.ids] = excess(p[self.draft.ids], self.law)
        return left

    def without(self, token: int) -> Draws:
        """The law of the next sibling, drawn without replacement: `token` struck out, renormalised; all zero
        if nothing is left."""
        index = self.index(token)
        return self if index is None else replace(self, law=without(self.law, index))


def without(law: np.ndarray, index: int) -> np.ndarray:
    """`law` [n] with an entry struck out, renormalised; all zero if nothing is left."""
    left = law.copy()
    left[index] = 0
    normalise_(left)
    return left


def excess(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """max(p - q, 0)."""
    left = p - q
    return np.maximum(left, 0, out=left)


@dataclass(frozen=True)
class Proposal:
    """A tree rooted at the pending token, and how its nodes were chosen.

    draws[node]: groups of the node's children, tried group after group. Children in no group were chosen
    deterministically, and are tried last, as siblings stand.
    """

    tree: TokenTree
    draws: Mapping[int, Sequence[Draws]] = field(default_factory=dict[int, Sequence[Draws]])
    seconds: float = 0.0  # spent in the draft's forwards
    forwards: int = 0
    stopped: str = "budget"  # why no more was drafted
    chain: bool = False  # a chain whatever was drawn, not by chance: block verification may judge it whole


class Drafter(Protocol):
    """`begin` once for each sequence, `propose` once a round for those being decoded, `end` when one ends."""

    taps: tuple[int, ...]  # the target layers (HF hidden_states indices) whose states `Seen` brings
    wants_choices: bool  # whether `Seen` should bring the target's argmax at every node

    def begin(self) -> Any:
        """The state of a new sequence."""
        ...

    def end(self, state: Any) -> None:
        """The sequence is over, or was left."""
        ...

    def propose(self, turns: Sequence[Turn]) -> list[Proposal]:
        """One tree for each turn.

        Which nodes stand where may depend on anything known before a token was drawn, or on the drawn token
        if it is kept; a drawn token must not be dropped or reordered for what it is, or the target's law is
        lost.
        """
        ...


class EachAlone:
    """The base of drafters that compute nothing together: `one` proposes for one turn."""

    taps: tuple[int, ...] = ()
    wants_choices = False

    def begin(self) -> Any:
        return None

    def end(self, state: Any) -> None:
        pass

    def propose(self, turns: Sequence[Turn]) -> list[Proposal]:
        return [self.one(turn) for turn in turns]

    def one(self, turn: Turn) -> Proposal:
        raise NotImplementedError
