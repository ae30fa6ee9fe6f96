"""Lookahead decoding (Fu et al. 2024, ICML; research: decoding.md §1.7): the target drafts for itself.

Every round also runs a window of guesses about later positions through the target, and takes its argmax
after each as the next, better guess (Jacobi iteration). The guesses of one column over the last N - 1 rounds
are an n-gram that the target tends to write; a pool keeps those, and the ones that begin with the pending
token are proposed. The window is part of the token tree. With W = 3, N = 4 and p pending:

    level 0   p - a - b       a chain: column 0 is p itself, at position t; column j is at t + j
              |   |   |
    level 1   c   d   e       what column j guessed next, under its level-0 node, at t + j + 1
              |   |   |
    level 2   f   g   h

So "level l of column j sees levels 1..l of its column and level 0 up to j" holds by ancestry, a position is a
depth, and window tokens that turn out right are accepted like any other. Every token is a function of earlier
rounds and of a seed, so all are chosen deterministically, and the law is kept.

N = 2 without guesses from the pool is Jacobi decoding (Santilli et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from configs.errors import ConfigError
from decoding.drafters import EachAlone, Proposal, Turn
from decoding.ngrams import Pool, Trie, lawful, unread

Rows = list[list[int]]  # by level, then column


@dataclass
class Window:
    """One sequence's window, its pool, and where the window stood in the last tree."""

    pool: Pool
    random: Random
    text: list[int] = field(default_factory=list)  # committed tokens and the pending one
    prompt: int = 0  # how many of them are the prompt's
    levels: Rows = field(default_factory=list)  # token ids; level 0 begins with the pending token
    tops: list[int] = field(default_factory=list)  # nodes of the highest level in the last tree, by column
    nodes: int = 0  # of the last tree


class LookaheadDrafter(EachAlone):
    """A round costs up to (N - 1)(W + G) nodes, so the defaults are small; GPUs have room for (5, 7, 7).

    ngram: N, the length of the n-grams, their first token included. window: W, columns. guesses: G, n-grams
    kept for each first token, all of which are proposed. from_text: whether the pool also takes the n-grams
    of the prompt and of the output. seed: of the random prompt tokens that a window begins with.

    A budget below W + N - 3 leaves out the columns that would reach deeper, and below N - 2 all of them.
    """

    wants_choices = True

    def __init__(
        self,
        eos_ids: Iterable[int] = (),
        ngram: int = 4,
        window: int = 3,
        guesses: int = 3,
        from_text: bool = True,
        seed: int = 0,
    ) -> None:
        if ngram < 2 or window < 1 or guesses < 0:
            raise ConfigError(
                f"Lookahead with ngram={ngram}, window={window}, guesses={guesses}: set an ngram of at least "
                "2, a window of at least 1, and guesses of 0 or more."
            )
        self.eos_ids = frozenset(eos_ids)
        self.ngram = ngram
        self.window = window
        self.guesses = guesses
        self.from_text = from_text
        self.seed = seed

    @property
    def largest(self) -> int:
        """How many tokens a tree has at most."""
        return (self.ngram - 1) * (self.window + self.guesses) - 1

    def begin(self) -> Window:
        return Window(Pool(self.guesses), Random(self.seed))

    def one(self, turn: Turn) -> Proposal:
        window: Window = turn.state
        seen = turn.seen
        self.read(window, unread(seen, len(window.text)))
        self.advance(window, seen.choices, len(seen.tokens))
        self.fit(window, turn.budget)
        trie = Trie(seen.pending)
        window.tops = place(window.levels, trie)
        for gram in window.pool.after(seen.pending):
            trie.run(0, lawful(gram[: turn.budget], turn.law, self.eos_ids))
        window.nodes = len(trie)
        return Proposal(trie.tree())

    def read(self, window: Window, tokens: Sequence[int]) -> None:
        """Adds `tokens` to the text, and their n-grams to the pool."""
        first = len(window.text)
        window.text += tokens
        window.prompt = window.prompt or len(window.text) - 1
        if self.from_text:
            for end in range(max(first + 1, self.ngram), len(window.text) + 1):
                window.pool.add(window.text[end - self.ngram : end])

    def advance(self, window: Window, choices: Sequence[int] | None, emitted: int) -> None:
        """Moves the window on by the target's argmax at each node of the last tree.

        Where they belong to another tree, or there was none, the window is given up.
        """
        if not window.levels or choices is None or len(choices) != window.nodes:
            window.levels = []
            return
        rows = [*window.levels, [choices[node] for node in window.tops]]
        if len(window.levels) == self.ngram - 1:
            for column in zip(*rows, strict=True):
                window.pool.add(column)
        window.levels = moved(rows, self.ngram, emitted)
        window.levels[0][0] = window.text[-1]

    def fit(self, window: Window, budget: int) -> None:
        """Cuts the window to what `budget` has depth for; begins one where there is none, or where a smaller
        budget once took columns that this one has room for."""
        if budget < self.ngram - 2:
            window.levels = []
            return
        levels = window.levels or [[]]
        # Each level that is yet to be made costs a column: see `moved`.
        width = min(self.window + self.ngram - 1 - len(levels), budget + 2 - len(levels))
        if len(levels[0]) < width:
            width = min(self.window + self.ngram - 2, budget + 1)
            guesses = window.random.choices(window.text[: window.prompt], k=width - 1)
            levels = [[window.text[-1], *guesses]]
        window.levels = [level[:width] for level in levels]


def place(levels: Rows, trie: Trie) -> list[int]:
    """Puts the window into `trie`: the nodes of its highest level, by column."""
    if not levels:
        return []
    nodes = [0, *trie.run(0, levels[0][1:])]
    for level in levels[1:]:
        nodes = [trie.child(node, token) for node, token in zip(nodes, level, strict=True)]
    return nodes


def moved(rows: Rows, ngram: int, emitted: int) -> Rows:
    """The next window's levels, from this one's and, as the last row, what the target said after its highest.

    The token of row l and column j is for position t + l + j, and the next round's t is `emitted` further.
    Once there are `ngram` rows, the lowest has served, and what was in row l + 1 is in row l, in its column.
    Until then all rows stay and every column moves one to the left; the first falls out.

    Each token that was emitted beyond the first takes the window one further to the left. Columns that were
    overtaken go round to the right end: as first guesses they are as good as random ones.
    """
    rows = rows[1:] if len(rows) == ngram else [row[1:] for row in rows]
    turn = (emitted - 1) % len(rows[0])
    return [row[turn:] + row[:turn] for row in rows]
