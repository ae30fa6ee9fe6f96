"""Where the decoder's chance comes from: an interface narrow enough that a test can replay every outcome.

Each decision names a key, and no key is used twice in a sequence. The uniform number belongs to the key
alone, so it depends neither on how many draws came before nor on what else is in the batch (decoding.md,
Randomness).
"""

from __future__ import annotations

import struct
from enum import IntEnum
from functools import cache
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np

from configs.errors import TargetError

BLOCK = 256  # a draw sums the law in blocks first, and looks into one of them


class Purpose(IntEnum):
    propose = 0  # draw a token from the draft's law
    accept = 1  # let a proposed token stand, or not
    emit = 2  # draw a token from the target's law, or from what is left of it


class Key(NamedTuple):
    """Names one decision of a sequence.

    accept, emit: `position` is that of the token decided on, which one round settles; `rank` counts siblings
    tried. propose: several rounds may propose for one position, so `position` is the pending token's, which
    every round moves on, and `rank` counts the round's draws.
    """

    position: int
    purpose: Purpose
    rank: int = 0


class Randomness(Protocol):
    def accept(self, probability: float, key: Key) -> bool:
        """True with `probability` (above 1 counts as 1; 0 is never accepted)."""
        ...

    def draw(self, law: np.ndarray, key: Key) -> int:
        """An index of `law` [V], each with its probability; one of probability 0 is never drawn."""
        ...


class Seeded:
    """A hash (BLAKE2b, RFC 7693) of seed and key: the same number everywhere, with no state to carry.

    Cheaper than setting up a counter-based generator for a single number, which matters between two forwards.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed % 2**64

    def uniform(self, key: Key) -> float:
        """A float64 in [0, 1), a multiple of 2**-53."""
        digest = blake2b(struct.pack("<4Q", self.seed, *key), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53

    def accept(self, probability: float, key: Key) -> bool:
        # Strict: with `<=` a zero probability, such as a forbidden token's, would pass when the uniform is 0.
        return probability >= 1 or self.uniform(key) < probability

    def draw(self, law: np.ndarray, key: Key) -> int:
        """By the inverse of the cumulative law: blocks summed in its dtype, the rest in float64."""
        blocks = np.add.reduceat(law, starts(len(law))).cumsum(dtype=np.float64)
        total = float(blocks[-1])
        if not 0 < total < float("inf"):
            raise TargetError(
                f"No token can be drawn for {key}: its law has mass {total}, because the target or the draft "
                "gave logits that are not finite. Load it in float32, and check its weights."
            )
        number = self.uniform(key) * total
        block = first_above(blocks, number)
        start = BLOCK * block
        below = float(blocks[block - 1]) if block else 0.0
        return start + first_above(law[start : start + BLOCK].cumsum(dtype=np.float64), number - below)


@cache
def starts(vocab: int) -> np.ndarray:
    """Where the blocks of a law [vocab] begin."""
    return np.arange(0, vocab, BLOCK)


def first_above(cumulative: np.ndarray, number: float) -> int:
    """The index of the step of `cumulative` [n] that passes `number`."""
    index = int(cumulative.searchsorted(number, side="right"))
    if index < len(cumulative):
        return index
    return int(cumulative.searchsorted(cumulative[-1]))  # rounded past the end: the last index that has mass
