"""Averaged weights: by hand, and in runs, whose training they must not touch."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from tests.train.conftest import COSTS
from tests.train.test_loop import FEW, interrupt_at, log, losses, train
from train import acceptance
from train.ema import Average

EMA = "trainer.ema=0.9"


def scalar(value: float) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.tensor([value]))
    module.frozen = nn.Parameter(torch.tensor([7.0]), requires_grad=False)
    return module


def put(module: nn.Module, value: float) -> None:
    nn.init.constant_(module.get_parameter("weight"), value)


def test_by_hand() -> None:
    module = scalar(0.0)
    average = Average(module, decay=0.2)
    assert list(average.weights) == ["weight"]

    put(module, 1.0)
    average.update(step=1)  # (1 + 1) / (10 + 1) = 2/11 is kept: 9/11 of 1
    assert average.weights["weight"].item() == pytest.approx(9 / 11)
    put(module, 2.0)
    average.update(step=2)  # 3/12 would be kept, and the decay is 0.2
    assert average.weights["weight"].item() == pytest.approx(0.2 * 9 / 11 + 0.8 * 2)
    assert module.get_parameter("weight").item() == 2.0


def test_the_weights_in_training_come_back() -> None:
    module = scalar(1.0)
    average = Average(module, decay=0.9)
    put(module, 3.0)
    parameter = module.get_parameter("weight")

    with pytest.raises(ZeroDivisionError), average.applied():
        assert module.get_parameter("weight") is parameter  # which an optimiser has its state by
        assert parameter.item() == 1.0
        raise ZeroDivisionError
    assert parameter.item() == 3.0
    assert average.weights["weight"].item() == 1.0


def test_a_run_measures_and_saves_the_average_and_trains_as_without(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = train(overrides, *FEW)
    measured: dict[str, Tensor] = {}
    original = acceptance.measure

    def measure(objective: Any, *args: Any) -> dict[str, Any]:
        measured.update({name: p.detach().clone() for name, p in objective.named_parameters()})
        return original(objective, *args)

    monkeypatch.setattr(acceptance, "measure", measure)
    averaged, _ = train(overrides, *FEW, EMA)

    assert losses(averaged) == losses(plain)
    best = averaged / "best"
    draft = tensors(averaged / "draft")
    average = safetensors.torch.load_file(best / "average.safetensors")
    trained = safetensors.torch.load_file(best / "model.safetensors")
    for name, weight in average.items():
        assert torch.equal(measured[name], weight)
        assert torch.equal(draft[name.removeprefix("draft.")], weight)
        assert not torch.equal(trained[name], weight)
    assert torch.equal(draft["d2t"], trained["draft.d2t"])
    assert not (plain / "best" / "average.safetensors").exists()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_interrupted_and_resumed_is_bit_equal(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    settings = [*FEW, EMA, f"trainer.optimizer={optimizer}", "trainer.weight_decay=0.1"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(3, signal.SIGINT, patch)
        train(overrides, *settings)
    run, printed = train(overrides, *settings)
    undisturbed, _ = train(overrides, *settings)

    assert "going on from step 3 of 5" in printed and undisturbed != run
    assert timeless(run) == timeless(undisturbed)
    for file in ("draft/model.safetensors", "best/average.safetensors", "best/model.safetensors"):
        assert (run / file).read_bytes() == (undisturbed / file).read_bytes(), file


def tensors(folder: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def timeless(run: Path) -> list[dict[str, Any]]:
    """What was logged, without what time took."""
    lines = log(run)
    for line in lines:
        for name in COSTS:
            line.pop(name, None)
            line.get("heldout", {}).pop(name, None)
    return lines
