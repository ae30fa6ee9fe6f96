"""What every drafter is: something that proposes a token tree after the pending token, and says how it chose.

The decoder knows drafters only through `Drafter`. A method `x` proposes in `decoding/drafters/x.py`, whose
`build(draft, proposal, eos_ids)` makes the drafter for the network of `models/x.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from torch import Tensor, nn

from configs.schema import Proposal as Mode
from decoding.randomness import Randomness
from decoding.tree import TokenTree
from decoding.warp import Warp


@dataclass(frozen=True)
class Seen:
    """What the target has committed since the last proposal: the prompt at first, then each round's path."""

    start: int  # absolute position of tokens[0]
    tokens: Tensor  # long [n]; their K/V rows have just been committed in the target's cache
    pending: int  # the token at position start + n, which the target has not read yet
    taps: Tensor  # [n, n_taps * d]: the target's tapped states at `tokens`

    @property
    def position(self) -> int:
        """Absolute position of the pending token, the root of the next tree."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Proposal:
    """A tree rooted at the pending token, and how its nodes were chosen.

    q[node] is the full law [V] that the node's children were drawn from, without replacement and in their
    order. It must be the very law that was drawn from: acceptance divides by it. A node absent from q, or
    every node if q is None, has children chosen deterministically.
    """

    tree: TokenTree
    q: Mapping[int, Tensor] | None = None
    seconds: float = 0.0  # spent in the draft's forwards
    forwards: int = 0


class Drafter(Protocol):
    """One sequence at a time: `begin`, then `propose` once a round with everything committed since."""

    taps: tuple[int, ...]  # the target layers (HF hidden_states indices) whose states `Seen` brings

    def begin(self) -> None:
        """Forgets the sequence before."""
        ...

    def propose(self, seen: Seen, budget: int, warp: Warp, randomness: Randomness) -> Proposal:
        """A tree of depth at most `budget` >= 1.

        Which nodes stand where may depend on anything known before a token was drawn, or on the drawn token
        if it is kept; a drawn token must not be dropped or reordered for what it is, or the target's law is
        lost.
        """
        ...


def build_drafter(draft: nn.Module, proposal: Mode, eos_ids: Iterable[int] = ()) -> Drafter:
    """The drafter of a loaded draft network. Nothing is proposed after one of `eos_ids`."""
    return import_module(f"decoding.drafters.{draft.method}").build(draft, proposal, frozenset(eos_ids))
