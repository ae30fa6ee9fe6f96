"""Drafters that know the continuation, and are told where to be wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from decoding.drafters import EachAlone, Proposal, Turn
from decoding.tree import TokenTree


class Oracle(EachAlone):
    """Drafts `script` (the whole sequence, prompt included), or another token at the positions that `wrong`
    names."""

    def __init__(
        self,
        script: Sequence[int],
        wrong: Callable[[int], bool] = lambda position: False,
        taps: tuple[int, ...] = (),
    ) -> None:
        self.script = list(script)
        self.wrong = wrong
        self.taps = taps
        self.budgets: list[int] = []

    def token(self, position: int) -> int:
        """Past the script's end, token 0."""
        right = self.script[position] if position < len(self.script) else 0
        return (right + 1) % 4 if self.wrong(position) else right

    def one(self, turn: Turn) -> Proposal:
        self.budgets.append(turn.budget)
        ids = [self.token(turn.seen.position + depth) for depth in range(1, turn.budget + 1)]
        return Proposal(TokenTree.chain(turn.seen.pending, ids))


class Bush(Oracle):
    """The same with a wrong sibling before each token, so that accepted rows must move:

    0 - 1 (wrong)
      \\ 2 - 3 (wrong)
          \\ 4 - ...
    """

    def one(self, turn: Turn) -> Proposal:
        chain = super().one(turn).tree.tokens
        tokens, parent = [chain[0]], [-1]
        for depth, token in enumerate(chain[1:]):
            tokens += [(token + 1) % 4, token]
            parent += [2 * depth, 2 * depth]
        return Proposal(TokenTree(tokens, parent))
