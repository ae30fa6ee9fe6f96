"""Under what conditions a number was measured: commit, hardware, versions, load.

Every result row and checkpoint of Leadout carries `provenance()`; a figure without its conditions is not
written.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "datasets",
    "accelerate",
    "numpy",
    "llguidance",
)


def provenance() -> dict[str, Any]:
    """`{"git", "hardware", "versions", "load_average"}`, ready for JSON; what cannot be known is None.

    `git` is None outside a checkout of this repository. `load_average` is the mean number of runnable
    processes over 1, 5 and 15 minutes: beside `hardware["cores"]` it tells whether a timing had the machine
    to itself.
    """
    return {
        "git": git(Path(__file__).resolve().parents[1]),
        "hardware": hardware(),
        "versions": versions(),
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }


def git(root: Path) -> dict[str, Any] | None:
    """`{"commit": 40 hex digits, "dirty": bool}` of the checkout whose top folder is `root`, or None."""

    def ask(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed copy may lie inside somebody else's checkout, whose commit would say nothing about this
    # code.
    top = ask("rev-parse", "--show-toplevel")
    commit = ask("rev-parse", "HEAD")
    if top is None or Path(top).resolve() != root or commit is None:
        return None
    return {"commit": commit, "dirty": ask("status", "--porcelain") != ""}


def hardware() -> dict[str, Any]:
    """CPU model, usable cores, torch threads, memory in GiB, and name and memory of each GPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu_model(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "memory_gb": memory_gb(),
        "gpu": gpus(),
    }


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None


def gpus() -> list[dict[str, Any]] | None:
    if not torch.cuda.is_available():
        return None
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": p.name, "memory_gb": round(p.total_memory / 2**30, 1)} for p in properties]


def versions() -> dict[str, str | None]:
    """Python's version and those of the packages that can change a result (None: not installed)."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found
