"""An exponential moving average of the weights in training (Polyak averaging).

    average_t = d * average_{t-1} + (1 - d) * weights_t        d = min(decay, (1 + t) / (10 + t))

The first steps average over fewer, so that the weights which training began with are soon forgotten; a run of
a thousand steps would otherwise still show a third of them at a decay of 0.999. Training itself never reads
the average: it is what is measured, and what becomes the draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """The averaged weights of everything in a module that is trained, float32."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.weights = {name: p.detach().clone().float() for name, p in self._trained.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After optimiser step `step` (1, 2, ...)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, parameter in self._trained.items():
            self.weights[name].lerp_(parameter, 1 - decay)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Goes on from `weights`, which another `Average` had. Raises `KeyError` if one is missing, and
        `ValueError` if one has another shape."""
        for name, average in self.weights.items():
            if weights[name].shape != average.shape:
                raise ValueError(f"{name} is {list(weights[name].shape)} and should be {list(average.shape)}")
            average.copy_(weights[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The module has the averaged weights inside the block, and its own ones again after it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self._trained.items():
            parameter.data, self.weights[name] = self.weights[name], parameter.data
