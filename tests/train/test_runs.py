from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.compose import compose
from configs.errors import CheckpointError, ConfigError
from configs.schema import Config
from models.files import append_line
from train.runs import Run, contract, differences, open_run


def config(folder: Path, **trainer: Any) -> Config:
    values = [f"trainer.{name}={value}" for name, value in trainer.items()]
    return compose(["+experiment=smollm2_cpu", f"runs={folder}", *values])


def contract_of(config: Config, **parts: Any) -> dict[str, Any]:
    method = {"name": "eagle3", "network": {"layers": 1}, "objective": {"steps": 7}}
    return contract(config, **{"method": method, "rows": "r", "target": "t", **parts})


def opened(config: Config) -> Run:
    return open_run(config, contract_of(config))


def test_auto_goes_on_with_the_newest_unfinished_run_of_the_same_contract(tmp_path: Path) -> None:
    with opened(config(tmp_path)) as run:
        first = run.folder
    with opened(config(tmp_path, log_every=7, save_every=3)) as run:
        assert run.folder == first  # how often to look does not matter
    with opened(config(tmp_path, lr=0.5)) as run:
        assert run.folder != first  # the learning rate does
    with opened(config(tmp_path)) as run:
        assert run.folder == first
        run.finish({"steps": 1})
    with opened(config(tmp_path)) as run:
        assert run.folder != first


def test_an_unfinished_run_of_another_contract_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On another machine a recipe may take another dtype."""
    for dtype in ("bfloat16", "float32"):
        with opened(compose(["+experiment=smollm2_cpu", f"runs={tmp_path}", f"target.dtype={dtype}"])):
            pass
    assert "which is unfinished and differs in target.dtype" in capsys.readouterr().out


def test_never_begins_anew(tmp_path: Path) -> None:
    with opened(config(tmp_path, resume="never")) as a, opened(config(tmp_path, resume="never")) as b:
        assert a.folder != b.folder


def test_a_run_that_another_process_trains_is_left_alone(tmp_path: Path) -> None:
    with opened(config(tmp_path)) as busy:
        with opened(config(tmp_path)) as other:
            assert other.folder != busy.folder
        with pytest.raises(CheckpointError, match="another process"):
            opened(config(tmp_path, resume=busy.folder))


def test_a_named_run_must_have_the_same_contract(tmp_path: Path) -> None:
    with opened(config(tmp_path)) as run:
        folder = run.folder
    with opened(config(tmp_path, resume=folder)) as run:
        assert run.folder == folder
    with pytest.raises(CheckpointError, match=r"trainer\.clip_norm, trainer\.lr differ"):
        opened(config(tmp_path, resume=folder, lr=0.5, clip_norm=9))
    with pytest.raises(ConfigError, match="not a run's folder"):
        opened(config(tmp_path, resume=tmp_path))
    (folder / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="finished"):
        opened(config(tmp_path, resume=folder))


def test_what_a_contract_covers(tmp_path: Path) -> None:
    base = contract_of(config(tmp_path))

    assert differences(base, contract_of(config(tmp_path), rows="other")) == ["rows"]
    assert differences(base, contract_of(config(tmp_path), target="other")) == ["target.fingerprint"]
    assert differences(base, contract_of(config(tmp_path, schedule="wsd"))) == ["trainer.schedule"]
    assert json.loads(json.dumps(base)) == base


def with_checkpoints(run: Run, taus: dict[int, float | None]) -> None:
    for step, tau in taus.items():
        run.checkpoint(step).mkdir(parents=True)
        append_line(run.log, {"step": step, "loss": 1.0})
        append_line(run.log, {"step": step, "heldout": {"mean_acceptance_length": tau}})


def test_best_is_the_longest_acceptance_and_is_never_pruned(tmp_path: Path) -> None:
    with opened(config(tmp_path)) as run:
        with_checkpoints(run, {10: None, 20: 2.5, 30: 2.5, 40: 2.0, 50: 1.0})
        run.point_best()
        run.prune(keep=2)

        assert run.best() == run.checkpoint(20).resolve()  # the earlier of equals
        assert [path.name for path in run.checkpoints()] == ["step_000020", "step_000040", "step_000050"]


def test_rewinding_forgets_what_came_after(tmp_path: Path) -> None:
    with opened(config(tmp_path)) as run:
        with_checkpoints(run, {10: 1.5, 20: 2.5})
        run.rewind(15)

        assert run.log.read_text().count("\n") == 2
        assert list(run.heldout()) == [10]
