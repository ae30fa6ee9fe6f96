"""n-grams of a sequence's own text, which the drafters without a network propose from.

`SuffixIndex` finds where the text's last tokens stood before (decoding/drafters/lookup.py), `Pool` keeps the
n-grams that a lookahead window met (decoding/drafters/lookahead.py), and `Trie` makes one token tree of runs
that may begin alike. All of them grow by a constant cost per token, whatever came before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from decoding.drafters import Seen
from decoding.law import Law
from decoding.tree import TokenTree


class SuffixIndex:
    """The n-grams of a growing text, n from `shortest` to `longest`, each with where it ended.

    A place is an end: the n-gram that ends at `end` is text[end - n : end].
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self.text: list[int] = []
        self.last: dict[tuple[int, ...], int] = {}  # n-gram -> its most recent end
        # before[n][end] is the end before `end` of the n-gram that ends there, 0 if there is none.
        self.before: dict[int, list[int]] = {n: [0] for n in range(shortest, longest + 1)}

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.text.append(token)
            end = len(self.text)
            for n, before in self.before.items():
                if n > end:
                    before.append(0)
                    continue
                gram = tuple(self.text[-n:])
                before.append(self.last.get(gram, 0))
                self.last[gram] = end

    def matches(self) -> Iterator[int]:
        """Where the text's suffix ended before: the longest one first, of equals the most recent, each once.

        The suffix is no match of itself, but a match may overlap it.
        """
        met: set[int] = set()
        for n in reversed(self.before):
            end = self.before[n][-1]
            while end:
                if end not in met:
                    met.add(end)
                    yield end
                end = self.before[n][end]

    def following(self, end: int, count: int) -> list[int]:
        """`count` tokens copied from `end` on. Past the end of the text the copy goes on with itself, so that
        a text in a loop is continued in that loop."""
        period = len(self.text) - end
        return [self.text[end + i % period] for i in range(count)]


class Pool:
    """n-grams by their first token, of each key the `size` that were added most recently."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.grams: dict[int, dict[tuple[int, ...], None]] = {}  # each inner dict from oldest to newest

    def add(self, gram: Sequence[int]) -> None:
        """Adds `gram`, or makes it the newest; the oldest of its key goes if there are too many."""
        if self.size == 0:
            return
        key, *rest = gram
        held = self.grams.setdefault(key, {})
        held.pop(tuple(rest), None)
        held[tuple(rest)] = None
        if len(held) > self.size:
            del held[next(iter(held))]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What has followed `token`, newest first."""
        return list(reversed(self.grams.get(token, {})))


class Trie:
    """A token tree while it is made of runs: what begins alike is one path, so that siblings differ."""

    def __init__(self, pending: int) -> None:
        self.tokens = [pending]
        self.parent = [-1]
        self.nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, parent: int, token: int) -> int:
        """The child of `parent` that is `token`: the one there is, or a new one."""
        node = self.nodes.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parent.append(parent)
        return node

    def run(self, node: int, tokens: Sequence[int]) -> list[int]:
        """The nodes of `tokens`, one below the other, under `node`."""
        nodes: list[int] = []
        for token in tokens:
            node = self.child(node, token)
            nodes.append(node)
        return nodes

    def tree(self) -> TokenTree:
        return TokenTree(self.tokens, self.parent)


def lawful(run: Sequence[int], law: Law, eos_ids: Collection[int]) -> list[int]:
    """The beginning of `run`, which is to follow the pending token, without the first token that the grammar
    forbids and all behind it, nor anything behind an end token."""
    kept: list[int] = []
    for token in run:
        allowed = law.allowed(kept)
        if allowed is not None and not allowed[token]:
            break
        kept.append(token)
        if token in eos_ids:
            break
    return kept


def unread(seen: Seen, known: int) -> list[int]:
    """The tokens, the pending one included, behind the first `known` of the text."""
    if known < seen.start:
        raise ValueError(f"the drafter knows {known} tokens, and is told of those from {seen.start} on")
    return [*seen.tokens, seen.pending][known - seen.start :]
