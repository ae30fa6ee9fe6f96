"""Runs that end because held-out acceptance no longer grows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.train.test_loop import log, only_run, train
from train import acceptance, distill
from train.loop import stale

SETTINGS = ["trainer.eval_every=2", "trainer.patience=2", "trainer.log_every=3"]  # of 16 steps


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], False),
        ([2.0, 1.0], False),  # one without a new best
        ([2.0, 1.0, 1.5], True),
        ([2.0, 1.0, 2.0], True),  # as good is not better
        ([1.0, 2.0, 1.5], False),
        ([2.0, 1.0, 2.5, 1.0], False),  # two without a new best, but not one after the other
        ([0.0, 0.0, 0.0], True),
    ],
)
def test_stale(lengths: list[float], expected: bool) -> None:
    assert stale(lengths, patience=2) is expected


def script(lengths: Sequence[float | None], patch: pytest.MonkeyPatch) -> None:
    """Measurements find these lengths, one after the other."""
    found = iter(lengths)

    def measure(*args: Any) -> dict[str, Any]:
        length = next(found)
        interval = None if length is None else [length, length]
        return {"mean_acceptance_length": length, "mean_acceptance_length_ci": interval, "walk": length} | {
            "alarm": False, "prompts": 1, "rounds": 1, "draft_tokens": 3,
        }  # fmt: skip

    patch.setattr(acceptance, "measure", measure)


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def logged(run: Path) -> list[tuple[int, str]]:
    return [(line["step"], "heldout" if "heldout" in line else "loss") for line in log(run)]


def test_a_run_ends_when_patience_does(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script([None, 2.0, 1.5, 2.0], monkeypatch)
    run, printed = train(overrides, *SETTINGS)

    found = summary(run)
    assert found["ended"] == "no new best in 2 measurements"
    assert (found["steps"], found["best_step"], found["heldout"]["mean_acceptance_length"]) == (8, 4, 2.0)
    assert "ends after step 8 of 16: no new best in 2 measurements" in printed
    assert (run / "draft" / "model.safetensors").exists()
    assert (run / "best").resolve().name == "step_000004"
    # Every third step is logged, and every one that is measured, so that nothing of the run is left unsaid.
    assert logged(run) == [
        (2, "loss"), (2, "heldout"), (3, "loss"), (4, "loss"), (4, "heldout"), (6, "loss"), (6, "heldout"),
        (8, "loss"), (8, "heldout"),
    ]  # fmt: skip


def test_a_run_killed_at_its_end_ends_there_again(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        script([2.0, 1.5, 1.0], patch)
        patch.setattr(distill, "finish", killed)
        train(overrides, *SETTINGS)
    before = logged(only_run(overrides))
    script([], monkeypatch)  # nothing is to be measured again
    run, _ = train(overrides, *SETTINGS)

    assert (summary(run)["steps"], summary(run)["best_step"]) == (6, 2)
    assert logged(run) == before


def test_patience_that_lasts_changes_nothing(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script([1.0, 1.0, 2.0, 1.0, 3.0, 1.0, 4.0, 1.0], monkeypatch)
    run, _ = train(overrides, *SETTINGS)

    assert (summary(run)["ended"], summary(run)["steps"], summary(run)["best_step"]) == ("last step", 16, 14)
