"""What a grammar adds to any drafter: text that must come costs no draft, and slow masks do not hold it up.

Around the values of a JSON schema little is left to choose. A run that the grammar forces is proposed as
deterministic nodes: where it fills the budget, instead of asking the drafter; else behind the leaves of the
drafter's tree. Tokens that are each the only one allowed are always accepted. Text that is forced may be cut
into tokens in several ways; its usual tokens are proposed and verified like any others, never just emitted.

A drafter asks for masks of tokens that may never be emitted. Once a round's have taken too long, it is told
that nothing more is allowed, and its tree stays as it is; the target's own masks are never skipped. Sampled
text then depends on the clock, as on any change of the tree, but its law does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from decoding.drafters import Drafter, Proposal, Seen, Turn
from decoding.grammar import GrammarError
from decoding.law import Grammar
from decoding.tree import TokenTree

T = TypeVar("T")

MAX_MASK_MS = 50.0  # about one forward of a small target on a CPU; a mask takes 0.5 ms there
MAX_LEAVES = 8  # of a tree, those that may be extended: each costs a question, and rows to verify


@dataclass
class Following:
    """One sequence as this drafter follows it."""

    inner: Any  # the inner drafter's state
    untold: Seen | None = None  # what it has not been told, because it was not asked
    nodes: int = 0  # of the last tree, how many were its own; they stand first


class ForcedDrafter:
    """Any drafter, used as well as a grammar allows. Without a grammar it is the drafter itself."""

    def __init__(
        self, inner: Drafter, max_mask_ms: float = MAX_MASK_MS, max_leaves: int = MAX_LEAVES
    ) -> None:
        self.inner = inner
        self.max_mask_ms = max_mask_ms
        self.max_leaves = max_leaves
        self.taps = inner.taps
        self.wants_choices = inner.wants_choices

    def begin(self) -> Following:
        return Following(self.inner.begin())

    def end(self, state: Following) -> None:
        self.inner.end(state.inner)

    def propose(self, turns: Sequence[Turn]) -> list[Proposal]:
        turns = [self.timed(turn) for turn in turns]
        made: dict[int, Proposal] = {}
        asked: list[Turn] = []
        for row, turn in enumerate(turns):
            run = self.run(turn, (), turn.budget)
            if len(run) == turn.budget:
                made[row] = Proposal(TokenTree.chain(turn.seen.pending, run), stopped="forced")
            elif isinstance(turn.law.grammar, Timed) and turn.law.grammar.fails():
                # The target's own question ends the sequence, and no other one of the batch.
                made[row] = Proposal(TokenTree.chain(turn.seen.pending), stopped="grammar")
            else:
                asked.append(told(turn))
                continue
            turn.state.untold, turn.state.nodes = joined(turn.state.untold, turn.seen), 0
        proposals = iter(self.inner.propose(asked) if asked else [])
        return [
            made[row] if row in made else self.extended(turn, next(proposals))
            for row, turn in enumerate(turns)
        ]

    def timed(self, turn: Turn) -> Turn:
        """The turn, with a law that asks the grammar only as long as there is time."""
        if turn.law.grammar is None:
            return turn
        law = copy(turn.law)
        law.grammar = Timed(turn.law.grammar, self.max_mask_ms / 1e3)
        return replace(turn, law=law)

    def extended(self, turn: Turn, proposal: Proposal) -> Proposal:
        """The proposal, with what must follow its first leaves behind them."""
        tree = proposal.tree
        turn.state.untold, turn.state.nodes = None, len(tree)
        tokens, parent = list(tree.tokens), list(tree.parent)
        for _, leaf in zip(range(self.max_leaves), leaves(tree), strict=False):
            node = leaf
            for token in self.run(turn, tree.path(leaf), turn.budget - tree.depth[leaf]):
                tokens.append(token)
                parent.append(node)
                node = len(tokens) - 1
        return replace(proposal, tree=TokenTree(tokens, parent)) if len(tokens) > len(tree) else proposal

    def run(self, turn: Turn, path: tuple[int, ...], limit: int) -> list[int]:
        """What must follow `path`, at most `limit` tokens. None after a path that breaks the grammar, as one
        that a lookup proposes may."""
        grammar = turn.law.grammar
        if grammar is None:
            return []
        tokens: list[int] = []
        try:
            while len(tokens) < limit:
                left = limit - len(tokens)
                # `likely` is asked first because it is cheaper: it needs no row.
                more = grammar.likely((*path, *tokens), left) or grammar.forced((*path, *tokens), left)
                if not more:
                    break
                tokens += more
        except ValueError:
            pass
        return tokens


class Timed:
    """A grammar that says "nothing" to a drafter once its answers have taken `seconds` together.

    Nothing, too, is what follows where the grammar fails: whether a sequence fails is not for a drafted token
    to decide. The first row is always answered.
    """

    def __init__(self, grammar: Grammar, seconds: float) -> None:
        self.grammar = grammar
        self.seconds = seconds
        self.spent = 0.0
        self.first: tuple[Tensor | None] | None = None  # the first row, once `fails` has asked for it
        self.nothing: Tensor | None = None  # [V], once a row was seen

    def fails(self) -> bool:
        """Whether there is no first row. A drafter that was asked then would take that for no grammar."""
        self.first = self.within(lambda: (self.grammar.mask(()),), None)
        return self.first is None

    def mask(self, path: Sequence[int]) -> Tensor | None:
        if self.nothing is not None and self.spent >= self.seconds:
            return self.nothing
        if self.first is not None and not path:
            (row,) = self.first
        else:
            row = self.within(lambda: self.grammar.mask(path), self.nothing)
        if row is not None and self.nothing is None:
            self.nothing = torch.zeros_like(row)
        return row

    def forced(self, path: Sequence[int], limit: int) -> list[int]:
        return [] if self.spent >= self.seconds else self.within(lambda: self.grammar.forced(path, limit), [])

    def likely(self, path: Sequence[int], limit: int) -> list[int]:
        return [] if self.spent >= self.seconds else self.within(lambda: self.grammar.likely(path, limit), [])

    def commit(self, tokens: Sequence[int]) -> None:
        raise TypeError("a drafter commits nothing")

    def within(self, ask: Callable[[], T], otherwise: T) -> T:
        began = perf_counter()
        try:
            return ask()
        except GrammarError:
            return otherwise
        finally:
            self.spent += perf_counter() - began


def told(turn: Turn) -> Turn:
    """The turn as the inner drafter gets it: everything it has not heard, and its own nodes' choices."""
    state: Following = turn.state
    seen = turn.seen
    if seen.choices is not None:
        seen = replace(seen, choices=seen.choices[: state.nodes] or None)
    return replace(turn, state=state.inner, seen=joined(state.untold, seen))


def joined(before: Seen | None, now: Seen) -> Seen:
    """Both as one. The choices were made at a tree that the inner drafter did not propose, so they go."""
    return now if before is None else replace(before.then(now), choices=None)


def leaves(tree: TokenTree) -> Iterator[int]:
    """The leaves in the order in which a walk comes to them if it always takes the first child left."""
    waiting = [0]
    while waiting:
        node = waiting.pop()
        children = tree.children(node)
        if not children:
            yield node
        waiting += reversed(children)
