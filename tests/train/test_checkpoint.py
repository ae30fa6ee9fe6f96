"""The weights that a checkpoint gives back to the module that was trained."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from train.checkpoint import AVERAGE, State, load_weights, save
from train.ema import Average


def tied() -> nn.ModuleList:
    """One linear map under two names, as heads that share a projection."""
    shared = nn.Linear(3, 3, bias=False)
    return nn.ModuleList([shared, shared])


def loaded(folder: Path) -> Tensor:
    module = tied()
    load_weights(folder, module)
    return module.get_parameter("0.weight")


def test_tied_weights_come_back_and_averaged_ones_go_before(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    module = accelerator.prepare(tied())
    average = Average(module, decay=0.5)
    with torch.no_grad():
        module[0].weight.fill_(2.0)
    average.weights["0.weight"].fill_(1.0)
    save(tmp_path / "averaged", accelerator, State(), average)
    save(tmp_path / "plain", accelerator, State())

    assert not (tmp_path / "plain" / AVERAGE).exists()
    assert torch.equal(loaded(tmp_path / "plain"), torch.full((3, 3), 2.0))
    assert torch.equal(loaded(tmp_path / "averaged"), torch.full((3, 3), 1.0))
