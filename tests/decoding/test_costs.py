"""Curves by hand, measuring under a clock that is moved by what is measured, and the file that keeps it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import DecodeConfig, Drafting, StopDrafting
from decoding.build import build_decoder, build_drafter
from decoding.compiled import Compiled
from decoding.costs import (
    Costs,
    Curve,
    Steps,
    conditions,
    context_bucket,
    draft_seconds,
    measured,
    measured_costs,
    remembered,
    target_forward,
)
from decoding.decoder import Decoder
from decoding.drafters import EachAlone, Proposal, Turn
from decoding.drafters.plain import PlainDrafter
from decoding.sequence import Params
from decoding.tree import TokenTree
from models.eagle3 import Eagle3
from models.target import Target

# As float32 has it here: two tokens take longer than four or eight.
HUMP = Curve((1, 2, 4, 8), (56.0, 91.0, 79.0, 75.0))


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed shapes, run eagerly."""
    monkeypatch.setattr("decoding.compiled.torch.compile", lambda run, **_: run)


def test_interpolates_and_extrapolates() -> None:
    curve = Curve((1, 4, 8), (10.0, 16.0, 40.0))
    assert [curve(n) for n in (1, 2, 3, 4, 6, 8)] == [10, 12, 14, 16, 28, 40]
    assert curve(10) == 52  # 6 per node, as between the last two
    assert HUMP(10) == 75  # falls between the last two, so it is flat behind them
    assert Curve((1,), (3.0,))(7) == 3
    with pytest.raises(ValueError, match="0 nodes"):
        curve(0)


def test_padded_is_the_cheapest_size_that_is_large_enough() -> None:
    assert [HUMP.padded(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 8, 8, 8, 8, 8, 9]
    # Where sizes take equally long the smallest stands; 6 takes 13 itself, between 12 and 14.
    flat = Curve((1, 2, 4, 8), (10.0, 12.0, 12.0, 14.0))
    assert [flat.padded(n) for n in (2, 3, 4, 6)] == [2, 3, 4, 6]


def test_planned_never_falls() -> None:
    assert [HUMP.planned(n) for n in (1, 2, 4, 8)] == [56, 75, 75, 75]
    planned = [HUMP.planned(n) for n in range(1, 20)]
    assert planned == sorted(planned)


def test_round_is_a_forward_per_drafted_token_and_one_of_the_target() -> None:
    costs = Costs(Curve((1, 2, 3), (10.0, 11.0, 12.0)), draft=2.0)
    assert [costs.round(n) for n in (0, 1, 2)] == [10, 13, 16]


def test_compiled_forwards_go_by_steps() -> None:
    steps = Steps((1, 5), (10.0, 30.0))
    assert [steps(n) for n in (1, 2, 5, 6)] == [10, 30, 30, 55]  # 10 nodes, 5 each beyond 5
    assert [steps.padded(n) for n in (1, 2, 5, 6)] == [1, 5, 5, 10]
    assert [Steps((1, 5), (40.0, 30.0)).padded(n) for n in (1, 2)] == [5, 5]
    # The second drafted token costs its drafting alone.
    assert [Costs(steps, draft=2.0).round(n) for n in (0, 1, 2)] == [10, 32, 34]


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [((), ()), ((2, 1), (1.0, 1.0)), ((1, 2), (1.0,)), ((1,), (float("nan"),)), ((0,), (1.0,))],
)
def test_refuses_what_is_no_curve(sizes: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="curve"):
        Curve(sizes, seconds)


class Clock:
    """Moved on by what runs: run i of all takes `seconds[i]`."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = list(seconds)
        self.time = 0.0
        self.ran: list[int] = []

    def run(self, size: int) -> None:
        self.ran.append(size)
        self.time += self.seconds.pop(0)

    def __call__(self) -> float:
        return self.time


def test_measures_in_turn_and_takes_the_median() -> None:
    # The second of each pair counts. One warm-up (50, 60), then three turns: 1, 90, 2 for size 1 (median 2);
    # 4, 5, 6 for size 8 (median 5).
    clock = Clock([70, 50, 70, 60, 70, 1, 70, 4, 70, 90, 70, 5, 70, 2, 70, 6])
    curve = measured(clock.run, sizes=(1, 8), repeats=3, warmup=1, clock=clock)
    assert clock.ran == [1, 1, 8, 8] * 4
    assert curve == Curve((1, 8), (2.0, 5.0))


class Timed(EachAlone):
    """Takes 9 seconds for a prompt, then 4, 4, 5, 6, ... for two forwards."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []
        self.ended = 0

    def one(self, turn: Turn) -> Proposal:
        self.told.append((turn.seen.start, len(turn.seen.tokens)))
        seconds = 9.0 if len(self.told) == 1 else 2.0 + max(len(self.told), 2)
        return Proposal(TokenTree.chain(turn.seen.pending, [1, 2]), seconds=seconds, forwards=2)

    def end(self, state: Any) -> None:
        self.ended += 1


def test_draft_seconds_per_forward(target: Target) -> None:
    drafter = Timed()
    # Rounds: 9, 4, 5, 6, 7 seconds; the first two do not count, the median of the others is 6 for 2 forwards.
    assert draft_seconds(drafter, target, batch=1, context=5, rounds=3) == 3.0
    assert drafter.told == [(0, 5), (5, 1), (6, 1), (7, 1), (8, 1)]
    assert drafter.ended == 1


@pytest.mark.parametrize("batch", [1, 3])
def test_target_forward_leaves_its_context_as_it_was(
    target: Target, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[tuple[int, ...], tuple[int, ...] | None, int]] = []
    forward = target.forward

    def noted(input_ids: torch.Tensor, **words: Any) -> Any:
        mask, start = words.get("mask"), int(words["positions"][0, 0])
        shapes.append((tuple(input_ids.shape), None if mask is None else tuple(mask.shape), start))
        return forward(input_ids, **words)

    monkeypatch.setattr(target, "forward", noted)
    run = target_forward(target, batch, context=7)
    for n in (1, 4, 2):
        run(n)
    plain = None if batch == 1 else (batch, 1, 1, 8)
    assert shapes == [
        ((batch, 7), None, 0),
        ((batch, 1), plain, 7),
        ((batch, 4), (batch, 1, 4, 11), 7),
        ((batch, 2), (batch, 1, 2, 9), 7),
    ]


def test_compiled_forwards_are_run_at_their_sizes(target: Target, uncompiled: None) -> None:
    compiled = Compiled(target, [1, 5])
    run = target_forward(target, 2, context=7, compiled=compiled, taps=(1,))
    for n in (1, 3, 5):
        run(n)
    assert [shape[:2] for shape in compiled.forwards] == [((1,), (2, 1, n, 512)) for n in (1, 5)]


def test_context_bucket() -> None:
    assert [context_bucket(n) for n in (1, 128, 129, 256, 257, 1500)] == [128, 128, 256, 256, 512, 2048]


def test_remembers_by_key_and_measures_anew_what_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Curve] = []

    def measure() -> Curve:
        made.append(Curve((1, 2), (1.0, float(len(made) + 2))))
        return made[-1]

    folder = tmp_path / "costs"
    assert remembered(folder, {"batch": 1}, measure) == Curve((1, 2), (1.0, 2.0))
    assert remembered(folder, {"batch": 1}, measure) == Curve((1, 2), (1.0, 2.0))
    assert len(made) == 1
    assert remembered(folder, {"batch": 2}, measure) == Curve((1, 2), (1.0, 3.0))
    for file in folder.iterdir():
        kept = json.loads(file.read_text())
        assert set(kept) == {"key", "sizes", "seconds", "measured"}
        assert kept["measured"]["hardware"]["cpu"]  # under what conditions
        file.write_text(file.read_text()[:40])
    assert remembered(folder, {"batch": 1}, measure).seconds == (1.0, 4.0)
    assert "measured anew: it is damaged" in caplog.text
    assert remembered(folder, {"batch": 1}, measure).seconds == (1.0, 4.0)


def test_key_has_what_a_time_depends_on(target: Target) -> None:
    key = conditions(target, batch=2, context=256)
    assert set(key) == {
        "version", "target", "attention", "dtype", "packed", "device", "cpu", "gpu", "threads", "torch",
        "transformers", "batch", "context",
    }  # fmt: skip
    assert (key["dtype"], key["batch"], key["context"]) == ("float32", 2, 256)
    json.dumps(key)


def test_each_set_of_drafters_has_its_costs(target: Target, draft: Eagle3, monkeypatch: Any) -> None:
    named = []

    def measured(target: Target, drafter: Any, name: str, *args: Any, **words: Any) -> Costs:
        named.append(name)
        return Costs(Curve((1,), (1.0,)), 0.5)

    monkeypatch.setattr("decoding.build.measured_costs", measured)
    for drafters in ([Drafting.lookup], [Drafting.draft], [Drafting.draft, Drafting.lookup]):
        build_decoder(target, draft, DecodeConfig(drafters=drafters, pad_trees=True), "d")
    assert named == ["d lookup", "d draft", "d draft lookup"]


def test_a_pairs_costs_are_measured_once(target: Target, draft: Eagle3, tmp_path: Path) -> None:
    drafter = build_drafter(target, draft, DecodeConfig())
    costs = measured_costs(target, drafter, "tiny", batch=2, context=100, folder=tmp_path)
    assert costs.draft > 0
    assert costs.target.sizes[-1] == 64
    assert costs == measured_costs(
        target, drafter, "tiny", batch=2, context=90, folder=tmp_path
    )  # same bucket
    assert len(list(tmp_path.iterdir())) == 2


def test_compiled_costs_are_kept_apart(
    target: Target, draft: Eagle3, tmp_path: Path, uncompiled: None
) -> None:
    drafter = build_drafter(target, draft, DecodeConfig())
    measured_costs(target, drafter, "tiny", folder=tmp_path)
    found = [
        measured_costs(target, drafter, "tiny", folder=tmp_path, compiled=Compiled(target, sizes)).target
        for sizes in ([1, 3], [1, 3], [1, 4])
    ]
    assert all(isinstance(steps, Steps) for steps in found)
    assert found[0] == found[1]
    assert found[2].sizes == (1, 4)
    assert len(list(tmp_path.iterdir())) == 4  # eager, compiled at two sets of sizes, and the draft


def test_shapes_compiled_for_the_costs_serve_decoding(
    target: Target, draft: Eagle3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncompiled: None
) -> None:
    monkeypatch.chdir(tmp_path)
    decode = DecodeConfig(
        compile=True, pad_trees=True, stop_drafting=StopDrafting.marginal, draft_tokens=3, max_new_tokens=40
    )
    decoder, params = build_decoder(target, draft, decode), Params.of(decode, 0)
    assert decoder.compiled is not None
    met = set(decoder.compiled.forwards)
    assert {shape[1][2] for shape in met} == {1, 4}
    eager = Decoder(target, PlainDrafter()).generate([5, 6, 7], params)
    assert decoder.generate([5, 6, 7], params).tokens == eager.tokens
    assert set(decoder.compiled.forwards) == met
