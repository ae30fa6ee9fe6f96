"""The scaling table: what is run in which order, and what is made of its times."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import scaling
from scripts.scaling import FIXED, Way, rows, table

RECIPE = ["+experiment=smollm2_cpu", "trainer.accumulation=4"]


def line(seconds: float, rate: float, waited: float) -> dict[str, Any]:
    return {"seconds_per_step": seconds, "tokens_per_s": rate, "data_wait": waited}


def test_a_way_is_the_users_command() -> None:
    options = argparse.Namespace(overrides=["+experiment=mine"], warm_up=1, steps=4, threads=2)
    told = ["+experiment=mine", *FIXED, "trainer.max_steps=5", "trainer.save_every=5", "threads=2"]
    told += ["trainer.strategy={}", "runs=there"]
    assert Way("none", 1).command(options, "there") == [
        *(sys.executable, "-m", "train.distill"),
        *(one.format("none") for one in told),
    ]
    assert Way("fsdp2", 4).command(options, "there") == [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4", "-m"),
        *("train.distill", *(one.format("fsdp2") for one in told)),
    ]


def test_rows_are_over_all_steps_of_a_way() -> None:
    one, two = Way("none", 1), Way("ddp", 2)
    runs = [
        {"way": one, "others": 0.1, "steps": [line(1.0, 100.0, 0.0), line(3.0, 100.0, 0.2)]},
        {"way": two, "others": 0.0, "steps": [line(1.0, 150.0, 0.1)]},
        {"way": one, "others": 0.3, "steps": [line(1.0, 100.0, 0.4)]},
    ]
    alone, both = rows(runs, [one, two])
    # 500 tokens in 5 seconds; 0.6 and 0.4 of them waited.
    assert (alone["tokens_per_s"], alone["steps"], alone["data_wait"]) == pytest.approx((100.0, 3, 0.2))
    assert alone["seconds_per_step"] == pytest.approx(5 / 3)
    assert (alone["speedup"], alone["efficiency"], alone["others"]) == pytest.approx((1.0, 1.0, 0.2))
    assert (both["speedup"], both["efficiency"]) == pytest.approx((1.5, 0.75))


def test_ways_alternate_and_the_result_says_under_what_conditions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(way: Way, options: argparse.Namespace, root: Path) -> dict[str, Any]:
        ran.append(way)
        return {"way": way, "others": 0.25, "steps": [line(1.0, 100.0 * way.processes, 0.01)]}

    monkeypatch.setattr(scaling, "run", run)
    out = tmp_path / "scaling.json"
    fixed = ["--processes", "2", "4", "--rounds", "2", "--out", str(out)]
    scaling.main([*RECIPE, f"runs={tmp_path / 'runs'}", *fixed])
    one, two, four = Way("none", 1), Way("ddp", 2), Way("ddp", 4)
    assert ran == [one, two, four, four, two, one]
    written = json.loads(out.read_text())
    assert [row["efficiency"] for row in written["rows"]] == [1.0, 1.0, 1.0]
    assert written["load"] == {"others_during": 0.25}
    assert {"git", "hardware", "versions", "created"} <= set(written)
    assert (written["recipe"]["accumulation"], written["scaling"]["rounds"]) == (4, 2)
    assert "100%" in capsys.readouterr().out


def test_micro_batches_that_do_not_go_round_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        scaling.main([*RECIPE, "--processes", "3"])
    assert stop.value.code == 2
    assert "trainer.accumulation=4 micro-batches make a step, and 3 processes" in capsys.readouterr().err


def test_a_recipe_that_one_way_cannot_run_is_refused_before_any_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        scaling.main([*RECIPE, "--strategies", "zero2"])  # the recipe's optimiser is Muon
    assert stop.value.code == 2
    assert "trainer.optimizer=muon needs whole ones" in capsys.readouterr().err


def test_a_run_that_fails_says_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        Way, "command", lambda self, options, runs: [sys.executable, "-c", "raise OSError(7)"]
    )
    with pytest.raises(SystemExit) as stop:
        scaling.main([*RECIPE, f"runs={tmp_path}", "--out", str(tmp_path / "scaling.json")])
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert "OSError: 7" in said and "stopped (processes: 1, strategy: none)" in said
    assert not list(tmp_path.iterdir())


def test_the_table_has_a_line_for_each_way() -> None:
    made = table(
        rows([{"way": Way("none", 1), "others": 0.0, "steps": [line(0.5, 64.0, 0.03)]}], [Way("none", 1)])
    )
    assert [next(iter(column.cells)) for column in made.columns] == [
        *("1", "none", "64", "0.500", "3.0%", "1.00×", "100%", "0.0%"),
    ]
