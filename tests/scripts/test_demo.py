"""The demo: stops where a stage stops, and trains nothing twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from configs.compose import compose
from configs.schema import Config
from scripts import demo
from scripts.demo import EXPERIMENT, Stage, conclude, trained


@pytest.fixture
def finished(tmp_path: Path) -> tuple[Config, Path]:
    """A configuration whose folders are in tmp_path, and a run that was trained by it and is finished."""
    config = compose([EXPERIMENT, f"runs={tmp_path}/runs", f"data.folder={tmp_path}/data"])
    run = tmp_path / "runs" / "smollm2_cpu" / "20260101-120000"
    for folder in (run, tmp_path / "data"):
        folder.mkdir(parents=True)
    replies = tmp_path / "data" / "replies.jsonl"
    replies.touch()
    os.utime(replies, (1000, 1000))
    (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    (run / "summary.json").touch()
    os.utime(run / "summary.json", (2000, 2000))
    return config, run


def test_a_finished_run_is_found(finished: tuple[Config, Path]) -> None:
    config, run = finished
    assert trained(config) == run
    config.eval.max_prompts = 3  # changes how the draft is measured, not the draft
    assert trained(config) == run
    config.regenerate.batch_size = 3
    assert trained(config) == run


def test_keys_that_came_later_do_not_make_a_run_another(finished: tuple[Config, Path]) -> None:
    config, run = finished
    known = OmegaConf.load(run / "config.yaml")
    assert isinstance(known, DictConfig)
    del known.trainer["target_parallel"]
    known.plan = {"gone": 1}  # decides nothing
    (run / "config.yaml").write_text(OmegaConf.to_yaml(known))
    assert trained(config) == run
    config.trainer.target_parallel = 2
    assert trained(config) is None
    config.trainer.target_parallel = 1
    known.trainer.gone = 1
    (run / "config.yaml").write_text(OmegaConf.to_yaml(known))
    assert trained(config) is None


def test_it_ends_with_where_everything_is(
    finished: tuple[Config, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config, run = finished
    for engine in ("vllm", "sglang"):
        (run / "export" / engine).mkdir(parents=True)
    conclude(config, [("data.prepare", 30.0), ("eval.measure", 90.0)])
    said = capsys.readouterr().out
    assert f"{'together':24}   2.0 min" in said
    assert f"engines    {run}/export/sglang, {run}/export/vllm" in said


def test_an_unfinished_run_is_not(finished: tuple[Config, Path]) -> None:
    config, run = finished
    (run / "summary.json").unlink()
    assert trained(config) is None


def test_a_run_with_other_settings_is_not(finished: tuple[Config, Path]) -> None:
    config, _ = finished
    config.trainer.lr = 0.5
    assert trained(config) is None


def test_a_run_on_earlier_replies_is_not(finished: tuple[Config, Path]) -> None:
    config, _ = finished
    os.utime(Path(config.data.folder) / "replies.jsonl", (3000, 3000))
    assert trained(config) is None


def test_the_demo_ends_with_the_status_of_the_stage_that_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The first stage's module prints and succeeds, the second does not exist: python exits with 1.
    monkeypatch.setattr(
        demo, "STAGES", (Stage("this", "", False), Stage("no.such.module", ""), Stage("this", ""))
    )
    with pytest.raises(SystemExit) as stop:
        demo.main([])
    assert stop.value.code == 1
    said = capsys.readouterr()
    assert "2/3" in said.out
    assert "3/3" not in said.out
    assert "no.such.module stopped the demo" in said.err


def test_a_mistake_in_an_override_stops_the_demo_before_its_first_stage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        demo.main(["trainer.lrr=1"])
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "'trainer.lr'" in said.err
