"""How long a chain is drafted. A rule is asked after every drafted token, which is kept whatever it says.

That is what keeps the rules lossless: the decision may depend on the drawn token, because the token stays.
Dropping it would change the law (decoding.md, §1: total variation 0.04 in the smallest example).

What a rule goes by are estimates that each drafted token will be accepted: the draft's own probability of it,
or, where the draft network has an acceptance head, the head's prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from operator import mul
from statistics import fmean
from typing import Protocol, runtime_checkable

from torch import Tensor

from configs.errors import ConfigError
from configs.schema import DecodeConfig, StopDrafting
from decoding.costs import Costs


class StopRule(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def needs_confidence(self) -> bool: ...

    def enough(self, confidences: Sequence[float], drafted: int) -> bool:
        """Whether to stop, given an estimate for each of the `drafted` tokens (if asked for).

        An acceptance head reads a token's own state, which the newest token does not have yet: its estimates
        are one fewer (SpecDec++ stops on them all the same).
        """
        ...


@runtime_checkable
class AcceptanceHead(Protocol):
    """What a reader is beside, if its network predicts acceptances (SpecDec++, Huang et al. 2024)."""

    def acceptance(self, state: Tensor) -> float:
        """The predicted probability that the target accepts a token if it accepts those before, from the
        draft's state [d] after reading it."""
        ...


class Fixed:
    """Always the whole budget."""

    name = "budget"
    needs_confidence = False

    def enough(self, confidences: Sequence[float], drafted: int) -> bool:
        return False


class Confidence:
    """Until the draft gives its own token a probability below `threshold`."""

    name = "confidence"
    needs_confidence = True

    def __init__(self, threshold: float) -> None:
        self.threshold = share(threshold)

    def enough(self, confidences: Sequence[float], drafted: int) -> bool:
        return bool(confidences) and confidences[-1] < self.threshold


class Joint:
    """Until 1 - Π p_i, the probability that some token is refused, is above `threshold` (SpecDec++, Huang et
    al. 2024)."""

    name = "joint"
    needs_confidence = True

    def __init__(self, threshold: float) -> None:
        self.threshold = share(threshold)

    def enough(self, confidences: Sequence[float], drafted: int) -> bool:
        return 1 - prod(confidences) > self.threshold


class Marginal:
    """While one more token is expected to pay, by measured costs (decoding.md, §5).

    After n drafted tokens with acceptances a_i a round emits E = 1 + Σ_{i<=n} Π_{j<=i} a_j tokens in
    T = n t_draft + t(n + 1) seconds. One more is emitted with probability Π_{j<=n+1} a_j and costs
    t_draft + t(n + 2) - t(n + 1). Once that gains fewer tokens per second than E / T it lowers the rate. The
    acceptance of a token that there is no estimate for is taken to be the mean of those there are.

    The costs are those of one batch size: in a ragged batch a sequence decides as if all drafted as it does.
    """

    name = "marginal"
    needs_confidence = True

    def __init__(self, costs: Costs, calibrated: Callable[[float], float] = float) -> None:
        self.costs = costs
        self.calibrated = calibrated  # from a confidence to an acceptance

    def enough(self, confidences: Sequence[float], drafted: int) -> bool:
        if not confidences:
            return False
        known = [self.calibrated(confidence) for confidence in confidences]
        acceptances = known + [fmean(known)] * (drafted + 1 - len(known))
        *reached, gain = accumulate(acceptances, mul)
        expected = 1 + sum(reached)
        seconds = self.costs.round(drafted)
        return gain * seconds < expected * (self.costs.round(drafted + 1) - seconds)


class Calibration:
    """The share of drafted tokens that are accepted, by how confident the draft was of them.

    Learnt as rounds go by. A bin that has seen little answers with the confidence itself, which counts as
    `prior` observations. Sequences that share a calibration draft at lengths that depend on each other: the
    law stays, but what a seed draws does not.
    """

    def __init__(self, bins: int = 10, prior: float = 8.0) -> None:
        self.prior = prior
        self.seen = [0] * bins
        self.accepted = [0] * bins

    def __call__(self, confidence: float) -> float:
        i = self.bin(confidence)
        return (self.prior * confidence + self.accepted[i]) / (self.prior + self.seen[i])

    def observe(self, confidences: Sequence[float], accepted: int) -> None:
        """One round: the first `accepted` tokens were accepted and the next, if there is one, was refused.
        About those behind it the target did not decide."""
        for j, confidence in enumerate(confidences[: accepted + 1]):
            i = self.bin(confidence)
            self.seen[i] += 1
            self.accepted[i] += j < accepted

    def bin(self, confidence: float) -> int:
        return min(int(confidence * len(self.seen)), len(self.seen) - 1)


def share(threshold: float) -> float:
    if not 0 <= threshold <= 1:
        raise ConfigError(f"decode.stop_threshold={threshold}: set a probability, from 0 to 1.")
    return threshold


def rule_of(decode: DecodeConfig, costs: Costs | None = None) -> StopRule:
    """The rule that `decode.stop_drafting` asks for. `costs` are for the marginal one, which needs them."""
    match decode.stop_drafting:
        case StopDrafting.fixed:
            return Fixed()
        case StopDrafting.confidence:
            return Confidence(decode.stop_threshold)
        case StopDrafting.joint:
            return Joint(decode.stop_threshold)
        case StopDrafting.marginal:
            if costs is None:
                raise ConfigError(
                    "decode.stop_drafting=marginal weighs measured costs, and none were measured here. "
                    "Measure them first (decoding.costs), or set decode.stop_drafting=confidence."
                )
            return Marginal(costs)
