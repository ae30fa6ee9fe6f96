"""When an exported folder counts as the trained draft: what its readers share.

A check reads the folder as its engine would, by names and config alone, and compares in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoint import read_weights

TOLERANCE = 1e-5  # of the largest magnitude, in float32


class Stored:
    """A folder's config and tensors. Every tensor asked for is noted, with its shape checked, so that
    `finish` can name what an engine would pass over without a word."""

    def __init__(self, folder: Path, weights: str = "model.safetensors") -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        path = folder / weights
        self.tensors: dict[str, Tensor] = (
            torch.load(path, map_location="cpu", weights_only=True)
            if path.suffix == ".pt"
            else read_weights(path)
        )
        self.read: set[str] = set()

    def weight(self, name: str, *shape: int) -> Tensor:
        """The tensor, in float32 unless it holds integers."""
        expect(name in self.tensors, f"{name} is missing")
        tensor = self.tensors[name]
        expect(
            tuple(tensor.shape) == shape,
            f"{name} is {list(tensor.shape)} and config.json makes it {list(shape)}",
        )
        self.read.add(name)
        return tensor.float() if tensor.is_floating_point() else tensor

    def finish(self) -> None:
        unread = sorted(set(self.tensors) - self.read)
        expect(not unread, f"no reader asks for {', '.join(unread)}")


def same(theirs: Tensor, ours: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    gap, size = float((theirs - ours).abs().max()), float(ours.abs().max())
    expect(gap <= tolerance * max(size, 1.0), f"{what} differ by {gap:.3g} (largest value {size:.3g})")


def same_choices(logits: Tensor, ids: Tensor, ours: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    """Logits [..., V] equal `ours` [..., Vd] at the draft's `ids` [Vd], and no other token is likelier than
    the likeliest of those."""
    same(logits[..., ids], ours, what, tolerance)
    others = torch.ones(logits.shape[-1], dtype=torch.bool).index_fill(0, ids, False)
    if others.any():
        least = (ours.amax(-1) - logits[..., others].amax(-1)).min()
        expect(float(least) > 0, f"{what}: a token outside the draft's vocabulary is likelier than all in it")


def expect(holds: bool, fault: str) -> None:
    if not holds:
        raise RuntimeError(
            f"The exported folder does not compute what the draft computes: {fault}. Nothing was kept."
        )
