"""What the machine was doing while something was timed: how much of its processors others used, and the peak
memory."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import torch

BUSY = (
    "user",
    "nice",
    "system",
    "irq",
    "softirq",
    "steal",
)  # steal: taken by other tenants of a virtual machine
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class Contention:
    """The share of our processors that other processes used since this object was made: 0 alone, 1 all of
    them.

    A load average would count our own threads too, and our own earlier work for minutes after it ended.
    """

    def __init__(self) -> None:
        self.cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        self.began = self.now()

    def now(self) -> tuple[float, float, float]:
        """(wall seconds, processor seconds of everybody, of ours)."""
        times = psutil.cpu_times(percpu=True)
        mine = [times[i] for i in self.cores if i < len(times)] if self.cores is not None else times
        busy = sum(getattr(core, kind, 0.0) for core in mine for kind in BUSY)
        own = os.times()
        return time.monotonic(), busy, own.user + own.system

    def share(self) -> float:
        wall, busy, own = (after - before for after, before in zip(self.now(), self.began, strict=True))
        cores = len(self.cores) if self.cores is not None else os.cpu_count() or 1
        return min(max((busy - own) / (wall * cores), 0.0), 1.0) if wall > 0 else 0.0


def share_of_others(seconds: float = 1.0) -> float:
    """The share of our processors in use while this process waits."""
    watch = Contention()
    time.sleep(seconds)
    return watch.share()


class PeakMemory:
    """The most memory in use since this object was made: allocated on a GPU, else resident in this process.

    Both models are loaded whichever of them decodes, so the weights of both are in the figure.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known = True
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            CLEAR.write_text("5")  # Linux: the resident high-water mark starts again from now
        except OSError:
            self.known = False

    def mb(self) -> float | None:
        """Megabytes (10^6 bytes); None where the system keeps no mark that can be reset."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e6
        if not self.known:
            return None
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
        return None
