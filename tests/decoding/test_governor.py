"""Speculation that does not pay is turned off: literal round times, then the decoder under a fake clock."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import decoding.decoder
from configs.errors import ConfigError
from configs.schema import DecodeConfig
from configs.schema import Proposal as Mode
from decoding.decoder import Decoder
from decoding.drafters import Proposal, Turn
from decoding.governor import Governor
from decoding.sequence import Generation, Params
from models.target import TargetOutput
from tests.decoding.replay import Replay, law_of, plain_law, total_variation
from tests.decoding.tables import TableDrafter, TableTarget


def rounds(governor: Governor, count: int, drafted: float, plain: float, batch: int = 1) -> str:
    """The ways of `count` rounds in which every sequence emits one token. S: drafted, p: plain."""
    ways = ""
    for _ in range(count):
        speculates = governor.speculate(batch)
        governor.saw(["budget" if speculates else "off"] * batch, batch, drafted if speculates else plain)
        ways += "S" if speculates else "p"
    return ways


def small(**others: Any) -> Governor:
    return Governor(**{"patience": 3, "plain_rounds": 2, "drafted_rounds": 2, **others})


def test_turns_off_and_tries_again_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    governor = small()
    # 1 round that is not counted and 3 of patience, then 1 and 2 plain ones. Plain is faster, so it becomes
    # the way at once: 3 more. Then 1 + 2 drafted, 1 + 6 plain, 1 + 2 drafted, 1 + 12 plain.
    assert (
        rounds(governor, 38, drafted=2.0, plain=1.0) == "SSSSpppppp" + "SSSppppppp" + "SSS" + "p" * 13 + "SS"
    )
    assert [record.message for record in caplog.records] == [
        "Speculation is off at batch size 1: 2000.0 ms per token and sequence with it, 1000.0 without. "
        "Next compared in 3 rounds."
    ]


def test_stays_on_where_it_pays(caplog: pytest.LogCaptureFixture) -> None:
    assert rounds(small(), 24, drafted=1.0, plain=2.0) == "SSSS" + "ppp" + "SSSSSSS" + "ppp" + "SSSSSSS"
    assert not caplog.records


def test_a_margin_must_be_won() -> None:
    assert "p" * 4 not in rounds(small(margin=0.05), 60, drafted=1.04, plain=1.0)
    assert "p" * 4 in rounds(small(margin=0.03), 60, drafted=1.04, plain=1.0)


def test_turns_on_again_when_it_has_come_to_pay(caplog: pytest.LogCaptureFixture) -> None:
    governor = small()
    assert rounds(governor, 10, drafted=2.0, plain=1.0)[-4:] == "pppp"
    # The 3 old drafted rounds count half: (1.5 * 2 + 2 * .2) / 3.5 = .97 does not win the margin. When tried
    # again, (.75 * 2 + 1 * .2 + 2 * .2) / 3.75 = .56 does.
    ways = rounds(governor, 60, drafted=0.2, plain=1.0)
    assert ways.endswith("SSSS")
    assert "on again at batch size 1" in caplog.text


def test_batch_sizes_have_regimes_of_their_own() -> None:
    governor = small()
    rounds(governor, 8, drafted=2.0, plain=1.0, batch=8)
    assert not governor.speculate(8)
    assert governor.speculate(1)


def test_pace_is_per_token_and_sequence() -> None:
    governor = small()
    for _ in range(2):  # the first does not count
        governor.saw(["budget", "budget"], 5, 0.5)
    assert governor.regimes[2].paces[True].per_token == pytest.approx(0.5 * 2 / 5)


def test_rounds_at_the_end_do_not_count() -> None:
    governor = small()
    for _ in range(9):
        governor.saw(["end", "end"], 2, 1.0)
    assert not governor.regimes
    governor.saw(["budget", "end"], 2, 1.0)
    governor.saw(["budget", "end"], 2, 1.0)
    assert governor.regimes[2].wait == 2


def test_refuses_settings_that_cannot_work() -> None:
    with pytest.raises(ConfigError):
        Governor(patience=0)


# In the real decoder: a target forward takes 1 s, drafting what `Slow` says.


class Time:
    now = 0.0


class Ticking(TableTarget):
    def forward(self, input_ids: torch.Tensor, **words: Any) -> TargetOutput:
        Time.now += 1.0
        return super().forward(input_ids, **words)


class Slow(TableDrafter):
    drafting = 5.0

    def one(self, turn: Turn) -> Proposal:
        Time.now += self.drafting
        return super().one(turn)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    Time.now = 0.0
    monkeypatch.setattr(decoding.decoder, "now", lambda device: Time.now)


def governed(target: Any, drafter: Any, params: Params, randomness: Any = None, **others: int) -> Generation:
    governor = Governor(**{"patience": 1, "plain_rounds": 1, "drafted_rounds": 1, **others})
    return Decoder(target, drafter, governor=governor).generate([1, 0], params, randomness)


def test_decoder_drafts_no_more_where_it_is_slow_and_then_catches_up() -> None:
    params = Params.of(DecodeConfig(draft_tokens=2, max_new_tokens=30), seed=0)
    drafter = Slow(3, Mode.greedy, seed=5)
    done = governed(Ticking(3), drafter, params)
    plain = Decoder(Ticking(3), drafter).generate([1, 0], Params.of(DecodeConfig(0, 30), seed=0))  # pyright: ignore[reportArgumentType]
    assert done.tokens == plain.tokens
    reasons = [round.stopped for round in done.rounds]
    # One uncounted, one of patience, one uncounted and one counted plain round, and off; one more plain, then
    # two drafted ones, for which `TableDrafter` checks that it was told all that it missed.
    assert reasons[:7] == ["budget", "budget", "off", "off", "off", "budget", "budget"]
    assert reasons.count("off") > reasons.count("budget")
    assert all(round.nodes == 1 for round in done.rounds if round.stopped == "off")


def test_law_holds_while_it_switches() -> None:
    params = Params.of(DecodeConfig(draft_tokens=1, max_new_tokens=8, temperature=1.0), seed=0)
    target, drafter, ways = Ticking(2), Slow(2, Mode.sampled), set()

    def play(replay: Replay) -> tuple[int, ...]:
        Time.now = 0.0
        done = governed(target, drafter, params, replay)
        ways.add("".join(round.stopped[0] for round in done.rounds))
        return tuple(done.tokens)

    law = law_of(play)
    assert any("bbooob" in way for way in ways)  # on, off and on again within the sequence
    assert total_variation(law, plain_law(target.table, [1, 0], params, target.eos_ids)) < 1e-12
