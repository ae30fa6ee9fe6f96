"""A measurement read back from the file that wandb writes offline."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from configs.compose import compose
from configs.errors import ConfigError
from eval.tracking import figures, flat, log_measurement, training_run
from tests.eval.samples import measurement
from tests.train.test_loggers import wandb_files, wandb_history

OFFLINE = ["+experiment=smollm2_cpu", "logger.wandb=offline"]


def test_offline_run_holds_figures_rows_pictures_and_page(tmp_path: Path) -> None:
    log_measurement(compose(OFFLINE), measurement(), tmp_path)
    (records,) = wandb_files(tmp_path)
    (logged,) = wandb_history(records)
    assert logged["t0-b1/speedup"] == 1.25
    assert logged["t0-b1/speedup_ci/low"] == 1.0
    assert logged["rows/nrows"] == len(measurement()["rows"])
    media = {
        path.name.split("_")[0] for path in tmp_path.glob("wandb/offline-run-*/files/media/images/*.png")
    }
    assert media == {"positions-t0-b1", "acceptance-t0-b1", "speedup-t0-b1"}
    (page,) = tmp_path.glob("wandb/offline-run-*/files/media/html/*.html")
    assert page.read_text().count("<svg") == 3


def test_the_training_run_is_named_as_its_logger_named_it() -> None:
    assert training_run("runs/smollm2_cpu/20261130-084939/draft") == "smollm2_cpu-20261130-084939"


def test_nothing_happens_unless_asked_for(tmp_path: Path) -> None:
    log_measurement(compose(OFFLINE[:1]), measurement(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_wandb_missing_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install .*logger\.wandb=disabled"):
        log_measurement(compose(OFFLINE), measurement(), tmp_path)


def test_cells() -> None:
    row = {"a": 1, "b_ci": [1, 2], "c_ci": None, "d": {"p50": 3}, "e": [1, 2, 3]}
    assert dict(flat(row)) == {"a": 1, "b_ci/low": 1, "b_ci/high": 2, "c_ci": None, "d/p50": 3}


def test_figures_are_numbers() -> None:
    assert {type(value) for value in figures(measurement()).values()} <= {int, float}
