"""A draft with an acceptance head in the decoder: when the head is asked, and that the law holds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from configs.schema import Proposal as Mode
from configs.schema import Verification
from decoding.drafters import Turn
from decoding.drafters.acceptance_head import HeadedReader, build
from decoding.drafters.eagle3 import Eagle3Reader
from decoding.growth import ChainGrowth, DynamicGrowth, Growth
from decoding.reader import Level, NetworkDrafter
from decoding.sequence import Params
from decoding.stopping import AcceptanceHead, Confidence, Fixed, Joint, Marginal, StopRule
from tests.conftest import tiny_target
from tests.decoding.replay import decoded_law, plain_law, total_variation
from tests.decoding.tables import TableTarget
from tests.decoding.test_stopping import COSTS, TableReader
from tests.models.test_acceptance_head import headed


@pytest.mark.parametrize(
    ("growth", "asked"),
    [
        (ChainGrowth(Mode.sampled, Joint(0.5)), True),
        (ChainGrowth(Mode.greedy, Confidence(0.5)), True),
        (ChainGrowth(Mode.sampled, Fixed()), False),
        (DynamicGrowth(4, 2), False),
    ],
)
def test_the_head_is_there_where_a_rule_asks(growth: Growth, asked: bool) -> None:
    draft = headed(tiny_target())
    reader = build(draft, growth, frozenset()).reader

    assert isinstance(reader, AcceptanceHead) == asked
    assert isinstance(reader, HeadedReader if asked else Eagle3Reader)
    assert reader.taps == draft.taps  # pyright: ignore[reportAttributeAccessIssue]


class HeadedTableReader(TableReader):
    """Beside its table, a head: what it says depends on the token that was read."""

    def read(self, turns: Sequence[Turn]) -> Tensor:
        logits = super().read(turns)
        for turn, row in zip(turns, logits, strict=True):
            turn.state.states = [row]
        return logits

    def extend(self, levels: Sequence[Level]) -> list[Tensor]:
        made = super().extend(levels)
        for level, rows in zip(levels, made, strict=True):
            level.reading.states += list(rows)
        return made

    def acceptance(self, state: Tensor) -> float:
        return float(torch.sigmoid(state[0]))


@pytest.mark.parametrize("rule", [Joint(0.5), Confidence(0.6), Marginal(COSTS)], ids=lambda rule: rule.name)
@pytest.mark.parametrize("verification", [Verification.rejection, Verification.block])
def test_law_holds_with_a_head(rule: StopRule, verification: Verification) -> None:
    params = Params(
        draft_tokens=4, max_new_tokens=5, temperature=1.0, top_k=0, top_p=1.0, stop=(), seed=0,
        verification=verification,
    )  # fmt: skip
    target, reader = TableTarget(2), HeadedTableReader(2)
    stops: set[str] = set()

    class Noting(NetworkDrafter):
        def propose(self, turns: Sequence[Turn]) -> list:
            made = super().propose(turns)
            stops.update(proposal.stopped for proposal in made)
            return made

    law = decoded_law(target, Noting(reader, ChainGrowth(Mode.sampled, rule)), [1, 0], params)  # pyright: ignore[reportArgumentType]
    assert total_variation(law, plain_law(target.table, [1, 0], params, target.eos_ids)) < 1e-12
    assert stops == {rule.name, "budget"}
