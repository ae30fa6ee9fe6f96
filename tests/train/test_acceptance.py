"""The decoder's acceptance and training's estimate of it: equal where training is right, and not where it is
not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from configs.schema import Config, DataConfig, DecodeConfig, MethodConfig, TargetConfig, TrainerConfig
from data.tokens import Prompt
from models.target import Target
from tests.conftest import tiny_draft
from tests.train.conftest import counting_target, written_rows
from train import acceptance, alignment
from train.acceptance import walk
from train.alignment import Offsets
from train.features import Online
from train.objectives.eagle3 import Eagle3Objective, ObjectiveConfig

# Nine tokens, of which t_3 is pending after the prompt t_0 t_1 t_2. M[j, i]: the i-th draft of row j and all
# before it are right. Row 2 drafts t_4 t_5, row 3 t_5 t_6, and so on to row 6, which drafts t_8.
MATCHES = torch.tensor(
    [[0, 0], [0, 0], [1, 1], [0, 0], [1, 0], [1, 1], [0, 0], [0, 0], [0, 0]], dtype=torch.bool
)


def test_walk_jumps_over_what_it_accepts() -> None:
    # Round 1 at row 2: t_4 and t_5 right, t_6 emitted besides and pending; the next row is 2 + 2 + 1 = 5.
    # Round 2 at row 5 (t_6 pending): t_7 and t_8 right, and the text ends there. 2 rounds, 4 accepted.
    assert walk(MATCHES, first=3, max_new_tokens=100) == (2, 4)


def test_walk_stops_at_the_length_where_the_decoder_would_not_have_drafted() -> None:
    # Six new tokens, t_3 .. t_8. Round 1 as above leaves two to go, so round 2 drafts one: t_7; t_8 comes
    # with it.
    assert walk(MATCHES, first=3, max_new_tokens=6) == (2, 3)


def test_walk_goes_on_one_token_at_a_time_where_nothing_matches() -> None:
    # t_3 is there; t_4 .. t_8 take a round each.
    assert walk(torch.zeros(9, 2, dtype=torch.bool), first=3, max_new_tokens=100) == (5, 0)


def config(**trainer: Any) -> Config:
    return Config(
        experiment="test",
        target=TargetConfig(name="tiny"),
        method=MethodConfig(name="eagle3"),
        data=DataConfig(folder="unused"),
        decode=DecodeConfig(draft_tokens=3),
        trainer=TrainerConfig(**{"eval_new_tokens": 24, **trainer}),
    )


def trained(target: Target) -> Eagle3Objective:
    """A draft trained until it is right often, and not always."""
    objective = Eagle3Objective(
        tiny_draft(target, draft_vocab_size=None), target, ObjectiveConfig(steps=3), 1.0
    )
    rows = written_rows(target, count=32)
    batch = Online(target, rows, objective.taps).batch(range(len(rows)))
    optimizer = torch.optim.AdamW(objective.draft.parameters(), lr=1e-2)
    for _ in range(30):
        loss = objective(batch, objective.positions(batch)).value
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return objective


def heldout(target: Target) -> list[Prompt]:
    rows = written_rows(target, count=24, reply=1, seed=1)
    return [Prompt(row.id, "tiny", row.input_ids[:6]) for row in rows]


def test_decoder_and_estimate_agree() -> None:
    target = counting_target()
    found = acceptance.measure(trained(target), target, heldout(target), config())

    # In float32 the walk makes the very rounds that the decoder made.
    assert found["walk"] == pytest.approx(found["mean_acceptance_length"], abs=1e-9)
    assert 1.5 < found["mean_acceptance_length"] < 3.5  # of at most 4
    assert not found["alarm"]


def shifted(i: int) -> Offsets:
    """EAGLE-3's row with tokens, target and label all one too early: consistent, so training sees nothing of
    it."""
    return Offsets(0, (i,), target=i, label=i + 1, mask=i + 1)


def test_a_shift_by_one_in_the_alignment_raises_the_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    target = counting_target()
    monkeypatch.setitem(alignment.TABLE, "eagle3", shifted)
    found = acceptance.measure(trained(target), target, heldout(target), config())

    assert found["walk"] > 2  # by its own lights the draft is good
    assert found["mean_acceptance_length"] < found["walk"] - 0.3
    assert found["alarm"]


def test_replies_of_one_token_have_no_rounds() -> None:
    target = counting_target()
    objective = Eagle3Objective(tiny_draft(target), target, ObjectiveConfig(), 1.0)
    found = acceptance.measure(objective, target, heldout(target)[:3], config(eval_new_tokens=1))

    assert found["mean_acceptance_length"] is None
    assert found["walk"] is None
    assert not found["alarm"]
