"""Optimiser, averaging and patience: which settings are refused."""

from __future__ import annotations

import pytest

from configs.compose import compose
from configs.errors import ConfigError

BASE = ["+experiment=smollm2_cpu"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.optimizer=lion"], "trainer.optimizer"),
        (["trainer.optimizer=muon", "trainer.muon_lr=0"], "trainer.muon_lr=0.0: must be in (0, inf)"),
        (
            ["trainer.optimizer=adamw", "trainer.muon_lr=0.01"],
            "set trainer.optimizer=muon, or remove the rate",
        ),
        (["trainer.ema=1"], "trainer.ema=1.0"),
        (["trainer.ema=0"], "null switches it off"),
        (["trainer.patience=0"], "trainer.patience=0: must be at least 1"),
        (["trainer.patience=2", "trainer.eval_every=0"], "makes one only at the end"),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([*BASE, *overrides])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.optimizer=muon"],  # at trainer.lr
        ["trainer.optimizer=muon", "trainer.muon_lr=0.02", "trainer.ema=0.99", "trainer.patience=3"],
    ],
)
def test_what_can_work_is_not(overrides: list[str]) -> None:
    compose([*BASE, *overrides])
