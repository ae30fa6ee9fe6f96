"""When drafting stops: each rule by hand, and that the token that stops it must be kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.errors import ConfigError
from configs.schema import DecodeConfig, StopDrafting, Verification
from configs.schema import Proposal as Mode
from decoding.costs import Costs, Curve
from decoding.drafters import Proposal, Turn
from decoding.growth import ChainGrowth, GrowingChain, Vocabulary
from decoding.reader import Level, NetworkDrafter
from decoding.sequence import Params
from decoding.stopping import (
    AcceptanceHead,
    Calibration,
    Confidence,
    Fixed,
    Joint,
    Marginal,
    StopRule,
    rule_of,
)
from tests.decoding.replay import decoded_law, plain_law, total_variation
from tests.decoding.tables import Table, TableTarget


def test_fixed_never_has_enough() -> None:
    assert not Fixed().enough([], 100)


def test_confidence_looks_at_the_last_token_alone() -> None:
    rule = Confidence(0.4)
    assert not rule.enough([0.1, 0.4], 2)  # at the threshold it goes on
    assert rule.enough([0.9, 0.39], 2)
    assert not rule.enough([], 1)


def test_joint_multiplies() -> None:
    rule = Joint(0.5)
    assert not rule.enough([0.8], 1)  # 1 - .8 = .2
    assert not rule.enough([0.8, 0.7], 2)  # 1 - .56 = .44
    assert rule.enough([0.8, 0.7, 0.8], 3)  # 1 - .448 = .552
    assert not rule.enough([], 1)


class Head:
    """A constructed acceptance head: σ(first entry of the state)."""

    def acceptance(self, state: Tensor) -> float:
        return float(torch.sigmoid(state[0]))


def test_joint_over_a_heads_predictions() -> None:
    head = Head()
    assert isinstance(head, AcceptanceHead)
    assert not isinstance(TableReader(2), AcceptanceHead)
    # After reading each of three tokens: σ(2) = .881, σ(1) = .731, σ(-1) = .269; products .881, .644, .173.
    states = [torch.tensor([2.0, 9.0]), torch.tensor([1.0, 9.0]), torch.tensor([-1.0, 9.0])]
    predicted = [head.acceptance(state) for state in states]
    assert predicted[0] == pytest.approx(1 / (1 + exp(-2)))
    # The fourth token is drafted before the third one's state, which stops it, has been read.
    assert [Joint(0.5).enough(predicted[:n], n + 1) for n in range(4)] == [False, False, False, True]


# t(1) = 10, t(2) = 11, t(3) = 12, t(4) = 16; a draft forward takes 1.
COSTS = Costs(Curve((1, 2, 3, 4), (10.0, 11.0, 12.0, 16.0)), draft=1.0)


def test_marginal_by_hand() -> None:
    rule = Marginal(COSTS)
    # One drafted, a = .5: E = 1.5 in 12 s, .125 a second. A second token comes with .25 for 2 s: also .125.
    assert not rule.enough([0.5], 1)
    assert rule.enough([0.49], 1)  # .2401 / 2 = .12005 is below 1.49 / 12 = .12417
    # Two drafted, a = .9 each: E = 2.71 in 14 s, .194 a second. A third comes with .729 for 5 s: .146.
    assert rule.enough([0.9, 0.9], 2)
    # If the target's forward grew by only 1 again, it would come for 2 s, .365 a second.
    assert not Marginal(Costs(Curve((1, 2), (10.0, 11.0)), 1.0)).enough([0.9, 0.9], 2)


def test_marginal_where_padding_makes_the_next_token_cheap() -> None:
    # Two nodes take 20 s and four 14, so two are padded to four: after one drafted token a round takes 15 s,
    # and a second costs a draft forward alone. It pays unless a^2 * 15 < 1 + a.
    rule = Marginal(Costs(Curve((1, 2, 4), (10.0, 20.0, 14.0)), draft=1.0))
    assert rule.enough([0.29], 1)  # .0841 * 15 = 1.2615 < 1.29
    assert not rule.enough([0.30], 1)  # .09 * 15 = 1.35 > 1.30


def test_marginal_takes_what_it_has_no_estimate_for_as_the_mean() -> None:
    # A head has no estimate of the newest token: two drafted, one known, .9. The same as [.9, .9].
    rule = Marginal(COSTS)
    assert rule.enough([0.9], 2)
    assert not rule.enough([], 1)
    # Known .9 and .5: the third counts as .7. E = 1 + .9 + .45 in 14 s, .168; .315 for 5 s: .063.
    assert rule.enough([0.9, 0.5], 2)


def test_marginal_calibrates() -> None:
    assert Marginal(COSTS, calibrated=lambda confidence: confidence / 2).enough([0.6], 1)
    assert not Marginal(COSTS).enough([0.6], 1)


def test_calibration_counts_what_the_target_decided_on() -> None:
    calibrated = Calibration(bins=10, prior=2.0)
    assert calibrated(0.85) == pytest.approx(0.85)
    # .85 accepted, .88 refused; about the third the target said nothing.
    calibrated.observe([0.85, 0.88, 0.31], accepted=1)
    assert calibrated(0.85) == pytest.approx((2 * 0.85 + 1) / 4)
    assert calibrated(0.31) == pytest.approx(0.31)
    calibrated.observe([1.0], accepted=1)  # belongs to the last bin
    assert calibrated(1.0) == pytest.approx(1.0)


def test_rule_of() -> None:
    def rule(kind: StopDrafting, costs: Costs | None = None) -> StopRule:
        return rule_of(DecodeConfig(stop_drafting=kind, stop_threshold=0.3), costs)

    assert isinstance(rule(StopDrafting.fixed), Fixed)
    confidence, joint = rule(StopDrafting.confidence), rule(StopDrafting.joint)
    assert isinstance(confidence, Confidence) and confidence.threshold == 0.3
    assert isinstance(joint, Joint) and joint.threshold == 0.3
    assert isinstance(rule(StopDrafting.marginal, COSTS), Marginal)
    with pytest.raises(ConfigError, match="none were measured"):
        rule(StopDrafting.marginal)
    with pytest.raises(ConfigError, match=r"stop_threshold=1\.5"):
        Joint(1.5)


# The law, exactly, with the real decoder, growth and drafter over a network that is a table.


@dataclass
class Text:
    committed: list[int] = field(default_factory=list)
    read: list[list[int]] = field(default_factory=list)  # after the pending token, then each node


class TableReader:
    """Stands for `Reader`: its logits are a table's, over the whole text."""

    taps: tuple[int, ...] = ()
    device = torch.device("cpu")

    def __init__(self, vocab: int) -> None:
        self.vocabulary = Vocabulary.of(None, frozenset())
        self.table = Table(vocab, seed=1)

    def begin(self) -> Text:
        return Text()

    def end(self, state: Text) -> None:
        pass

    def read(self, turns: Sequence[Turn]) -> Tensor:
        for turn in turns:
            turn.state.committed += turn.seen.tokens
            turn.state.read = [[*turn.state.committed, turn.seen.pending]]
        return torch.stack([self.table(turn.state.read[0]) for turn in turns])

    def extend(self, levels: Sequence[Level]) -> list[Tensor]:
        made = []
        for level in levels:
            texts: Any = level.reading
            grown = [[*texts.read[p + 1], t] for t, p in zip(level.tokens, level.parents, strict=True)]
            texts.read += grown
            made.append(torch.stack([self.table(text) for text in grown]))
        return made


class Dropping(ChainGrowth):
    """The mistake: the token that made the rule stop is taken back."""

    def start(self, turn: Turn, vocabulary: Vocabulary) -> GrowingChain:
        return DroppingChain(self, turn, vocabulary)


class DroppingChain(GrowingChain):
    def proposal(self, seconds: float, forwards: int) -> Proposal:
        if self.stopped == self.rule.name:
            self.tokens.pop()
            self.parent.pop()
            del self.draws[len(self.tokens) - 1]
        return super().proposal(seconds, forwards)


def distance(growth: ChainGrowth, vocab: int = 3, **fields: Any) -> float:
    config = DecodeConfig(draft_tokens=3, max_new_tokens=5 if vocab == 2 else 4, temperature=1.0)
    for name, value in fields.items():
        setattr(config, name, value)
    params, target, reader = Params.of(config, seed=0), TableTarget(vocab), TableReader(vocab)
    law = decoded_law(target, NetworkDrafter(reader, growth), [1, 0], params)  # pyright: ignore[reportArgumentType]
    return total_variation(law, plain_law(target.table, [1, 0], params, target.eos_ids))


RULES = [Confidence(0.4), Joint(0.6), Marginal(COSTS)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_law_holds_if_the_stopping_token_is_kept(rule: StopRule) -> None:
    assert distance(ChainGrowth(Mode.sampled, rule)) < 1e-12
    assert distance(ChainGrowth(Mode.sampled, rule), vocab=2, verification=Verification.block) < 1e-12


@pytest.mark.parametrize("verification", [Verification.rejection, Verification.block])
def test_dropping_the_stopping_token_is_seen(verification: Verification) -> None:
    assert distance(Dropping(Mode.sampled, Fixed()), verification=verification) < 1e-12
    assert distance(Dropping(Mode.sampled, Confidence(0.4)), verification=verification) > 1e-3
