"""Turns speculation off where it does not pay on this machine, and says so.

Whether it pays depends on draft, traffic, batch size and machine, so it is measured while decoding: for each
batch size the seconds per token per sequence of speculative and of plain rounds. A batch size begins
speculatively. Now and then a few rounds go the other way; if that turns out faster by a margin, it becomes
the way, else it is tried half as often from then on.

A decision rests on past rounds' times alone, never on a token drawn in its own round, so the target's law
stays. But a plain round draws by other keys than a speculative one: at temperature > 0 a seed fixes the
output only as far as the decisions agree.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from configs.errors import ConfigError

log = logging.getLogger(__name__)

OFF = "off"  # `Proposal.stopped` of a plain round that the governor asked for
END = "end"  # that of a sequence for which nothing was worth drafting


@dataclass
class Pace:
    """What decoding one way takes; older rounds fade."""

    seconds: float = 0.0  # times sequences
    tokens: float = 0.0

    def add(self, seconds: float, tokens: float, memory: int) -> None:
        """A round. All rounds together weigh as much as `memory` new ones at most."""
        keep = 1 - 1 / memory
        self.seconds = keep * self.seconds + seconds
        self.tokens = keep * self.tokens + tokens

    def fade(self) -> None:
        """Halves the weight of what is known, which may no longer hold when new rounds come."""
        self.seconds /= 2
        self.tokens /= 2

    @property
    def per_token(self) -> float:
        """Seconds per token per sequence."""
        return self.seconds / self.tokens


@dataclass
class Regime:
    """How one batch size is decoded at present."""

    wait: int  # rounds until the other way is tried
    interval: int  # what `wait` began at
    speculating: bool = True
    trying: int = 0  # rounds for which the other way is still tried
    paces: dict[bool, Pace] = field(default_factory=lambda: {True: Pace(), False: Pace()})  # by speculating

    @property
    def speculates_now(self) -> bool:
        return self.speculating != bool(self.trying)


class Governor:
    """Asked before each round (`speculate`) and told after it (`saw`)."""

    def __init__(
        self,
        margin: float = 0.05,  # the other way must be faster by this share
        patience: int = 16,  # rounds before the other way is tried, after the beginning and after a switch
        plain_rounds: int = 3,  # for which plain decoding is tried: each emits one token, so few tell
        drafted_rounds: int = 8,  # for which speculation is tried
        longest: int = 2048,  # rounds between two tries at most
        memory: int = 64,  # rounds that a pace remembers
    ) -> None:
        if margin < 0 or min(patience, plain_rounds, drafted_rounds, longest, memory) < 1:
            raise ConfigError("A governor's margin must be at least 0, and its counts of rounds at least 1.")
        self.margin = margin
        self.patience = patience
        self.rounds = {True: drafted_rounds, False: plain_rounds}
        self.longest = longest
        self.memory = memory
        self.regimes: dict[int, Regime] = defaultdict(lambda: Regime(patience, patience))
        self.last: tuple[int, bool] | None = None

    def speculate(self, batch: int) -> bool:
        """Whether the next round of `batch` sequences is to draft."""
        return self.regimes[batch].speculates_now

    def saw(self, stopped: Sequence[str], tokens: int, seconds: float) -> None:
        """A round emitted `tokens` over all its sequences; `stopped`: why no more was drafted, for each.

        Not counted: a round in which nothing was left to draft for, and the first one after a change of way
        or of batch size, in which a draft reads what it was not told and kernels meet new shapes.
        """
        if all(reason == END for reason in stopped):
            return
        batch, speculated = len(stopped), OFF not in stopped
        changed = self.last != (batch, speculated)
        self.last = batch, speculated
        if changed:
            return
        regime = self.regimes[batch]
        regime.paces[speculated].add(seconds * batch, tokens, self.memory)
        if regime.trying:
            regime.trying -= 1
            if not regime.trying:
                self.decide(batch, regime)
        else:
            regime.wait -= 1
            if not regime.wait:
                other = not regime.speculating
                regime.trying = self.rounds[other]
                regime.paces[other].fade()

    def decide(self, batch: int, regime: Regime) -> None:
        """After a try: stay, and try half as often, or switch."""
        now, other = (regime.paces[way].per_token for way in (regime.speculating, not regime.speculating))
        if other * (1 + self.margin) < now:
            regime.speculating = not regime.speculating
            regime.interval = self.patience
            drafted, plain = (1e3 * regime.paces[way].per_token for way in (True, False))
            log.warning(  # a warning, so that it is seen where no logging was set up
                f"Speculation is {'on again' if regime.speculating else 'off'} at batch size {batch}: "
                f"{drafted:.1f} ms per token and sequence with it, {plain:.1f} without. "
                f"Next compared in {regime.interval} rounds."
            )
        else:
            regime.interval = min(2 * regime.interval, self.longest)
        regime.wait = regime.interval
