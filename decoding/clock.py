"""Wall time around a device's work."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Seconds on a monotonic clock, once everything queued on `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
