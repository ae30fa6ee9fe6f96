"""Prompt lookup: what followed the last tokens when they stood in this text before (PLD, Saxena 2023;
SuffixDecoding, Oliaro et al. 2411.04975, of which this is the part that knows one sequence).

No network: the draft is free, and worth most where the output repeats its input, as in summaries, edits and
code. Everything is a function of the text, so all tokens are chosen deterministically and the law is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from configs.errors import ConfigError
from decoding.drafters import EachAlone, Proposal, Turn
from decoding.ngrams import SuffixIndex, Trie, lawful, unread

MATCHES = 8  # looked at for each continuation wanted; a text in a loop has thousands that go on alike


class LookupDrafter(EachAlone):
    """Copies what followed the most recent match of the longest suffix.

    shortest, longest: lengths of the suffixes that are looked for. A short one matches often and by chance.
    branches: how many continuations that differ to propose; 1 gives a chain.
    """

    def __init__(
        self, eos_ids: Iterable[int] = (), shortest: int = 2, longest: int = 4, branches: int = 1
    ) -> None:
        if not 1 <= shortest <= longest:
            raise ConfigError(
                f"Lookup looks for suffixes of {shortest} to {longest} tokens: set 1 <= shortest <= longest."
            )
        if branches < 1:
            raise ConfigError(f"Lookup with branches={branches}: set at least 1.")
        self.eos_ids = frozenset(eos_ids)
        self.shortest = shortest
        self.longest = longest
        self.branches = branches

    def begin(self) -> SuffixIndex:
        return SuffixIndex(self.shortest, self.longest)

    def one(self, turn: Turn) -> Proposal:
        index: SuffixIndex = turn.state
        index.extend(unread(turn.seen, len(index.text)))
        trie = Trie(turn.seen.pending)
        stopped = "unmatched"
        branches = 0
        for end in islice(index.matches(), MATCHES * self.branches):
            stopped = "budget"
            size = len(trie)
            trie.run(0, lawful(index.following(end, turn.budget), turn.law, self.eos_ids))
            branches += len(trie) > size
            if branches == self.branches:
                break
        if stopped == "budget" and not branches:
            stopped = "grammar"
        return Proposal(trie.tree(), stopped=stopped)
