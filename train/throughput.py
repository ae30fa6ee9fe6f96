"""What a training step makes of its hardware: arithmetic per second, its share of the peak (MFU), memory.

MFU is floating-point operations per second over the data sheet's dense bfloat16 peak (Chowdhery et al. 2022,
PaLM, appendix B). All matrix products that run are counted, the target's too where it runs beside the draft
(of one in parts, the whole), and attention as if nothing were masked. The first step that a process takes is
counted, operator by operator; later ones are taken to do as much per padded token.
"""

from __future__ import annotations

import resource
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.roofline import DEVICES
from train.memory import FLOPS


class Arithmetic(TorchDispatchMode):
    """Counts the floating-point operations of matrix products inside the block, backward passes included."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if count := FLOPS.get(func.overloadpacket):
            self.flops += float(count(*args, **(kwargs or {}), out_val=out))
        return out


@dataclass(frozen=True)
class Spent:
    """What an optimiser step took."""

    seconds: float
    waited: float  # of these, until its batches were there: reading features, or the target's forward
    flops: float  # of this rank's forward and backward passes


class Meter:
    """Knows the arithmetic of every step from that of the first."""

    def __init__(self, device: torch.device) -> None:
        self._peak = peak_flops(device)
        self._arithmetic = Arithmetic()
        self._per_token: float | None = None

    def counting(self) -> AbstractContextManager[Any]:
        """Around a step's forward and backward passes."""
        return self._arithmetic if self._per_token is None else nullcontext()

    def flops(self, tokens: int) -> float:
        """Of the step that was just in `counting`, with so many tokens, padding included."""
        if self._per_token is None:
            self._per_token = self._arithmetic.flops / tokens
        return self._per_token * tokens

    def mfu(self, tflops: float) -> float | None:
        """Share of the peak that `tflops` per second are; None where no data sheet says what that is."""
        return None if self._peak is None else tflops * 1e12 / self._peak


def peak_flops(device: torch.device) -> float | None:
    """Floating-point operations per second of `device` by its data sheet (models/roofline.py); None for
    processors, and for GPUs that have none there."""
    return None if device.type != "cuda" else sheet_flops(torch.cuda.get_device_name(device))


def sheet_flops(name: str) -> float | None:
    """By a GPU's name as its driver gives it. Cards with other clocks than SXM ones have no sheet here."""
    words = name.lower().replace("-", " ").split()
    joined = "".join(words)
    if {"pcie", "nvl"} & set(words) and "a100" not in words:  # an A100's peak is the same on any board
        return None
    return next((sheet.flops for known, sheet in DEVICES.items() if known in joined), None)


def peak_memory_mb(device: torch.device) -> float:
    """The most memory that this process had at a time, in megabytes (10^6 bytes): allocated on a GPU, else
    resident, which counts pages of memory-mapped files."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most * (1 if sys.platform == "darwin" else 1024) / 1e6
