"""A training run's complete state: `checkpoints/step_000123/`, whole or absent.

Accelerate writes and reads model, optimisers, schedulers and random states. Beside them, state.json has the
position in the data, what was gathered for the next log line, and a digest of the random states: accelerate
passes over random states that it cannot restore, and a run that goes on with others is not the same run.
average.safetensors has the averaged weights (train/ema.py), where a run keeps them.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from configs.errors import CheckpointError, StorageError
from models.files import write_folder, write_json, write_tensors
from train.ema import Average

STATE = "state.json"
WEIGHTS = "model.safetensors"  # accelerate's name
AVERAGE = "average.safetensors"
# What readers of truncated or foreign files raise.
UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError)


@dataclass
class Window:
    """What was gathered since the last log line."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    sums: dict[str, list[float]] = field(default_factory=dict)  # of each metric, by term of the loss
    counts: dict[str, list[int]] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0  # of these, for batches
    flops: float = 0.0  # of this rank


@dataclass
class State:
    """Where a run stands, as JSON."""

    step: int = 0  # optimiser steps done; the data's order and epoch follow from it (train/batches.py)
    tokens: int = 0  # tokens trained on so far
    seconds: float = 0.0  # spent in training steps, by all processes that worked on the run
    window: Window = field(default_factory=Window)


class Keeper(Protocol):
    """What writes and reads weights, optimisers, schedulers and random states: an `Accelerator`, or one of
    several ranks' strategies (train/strategies.py)."""

    def save_state(self, folder: str, /) -> Any: ...

    def load_state(self, folder: str, /) -> Any: ...


def save(folder: Path, keeper: Keeper, state: State, average: Average | None = None) -> None:
    """Writes everything that a run needs to go on, whole or not at all. Raises `StorageError`."""

    def write(temporary: Path) -> None:
        try:
            keeper.save_state(str(temporary))
        except (RuntimeError, SafetensorError) as error:  # how torch and safetensors report a full disk
            reason = " ".join(str(error).split())[:300]
            raise StorageError(
                f"The checkpoint {folder} cannot be written: {reason}. Free some space, or choose another "
                "folder with runs=..., and run again: it goes on from the checkpoint before."
            ) from error
        if average is not None:
            write_tensors(temporary / AVERAGE, average.weights)
        write_json(temporary / STATE, asdict(state) | {"random": random_digest()})

    write_folder(folder, write)


def restore(folder: Path, keeper: Keeper, average: Average | None = None, alone: bool = True) -> State:
    """Puts what `keeper` keeps, and `average`, back as it was. Raises `CheckpointError`.

    alone: by the one process that wrote it, whose random states must be back.
    """
    try:
        saved = json.loads((folder / STATE).read_text())
        keeper.load_state(str(folder))
        if average is not None:
            average.load(safetensors.torch.load_file(folder / AVERAGE))
    except UNREADABLE as error:
        raise damaged(folder, str(error)) from error
    if saved.pop("random") != random_digest() and alone:
        raise damaged(folder, "its random states could not be restored")
    return State(**saved | {"window": Window(**saved["window"])})


def load_weights(folder: Path, module: nn.Module) -> None:
    """The weights that were measured, into the module that was trained: the averaged ones where there are.

    Raises `CheckpointError`.
    """
    try:
        safetensors.torch.load_model(module, folder / WEIGHTS)  # which has tied weights once
        if (folder / AVERAGE).exists():
            module.load_state_dict(safetensors.torch.load_file(folder / AVERAGE), strict=False)
    except UNREADABLE as error:
        raise damaged(folder, str(error)) from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """What `load_weights` loads, on the CPU; a tied weight once. Raises `CheckpointError`."""
    try:
        weights = safetensors.torch.load_file(folder / WEIGHTS)
        averaged = safetensors.torch.load_file(folder / AVERAGE) if (folder / AVERAGE).exists() else {}
    except UNREADABLE as error:
        raise damaged(folder, str(error)) from error
    return weights | averaged


def damaged(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {folder} cannot be restored: {' '.join(reason.split())[:300]}. Remove that folder "
        "to go on from the one before it, or start anew with trainer.resume=never."
    )


def random_digest() -> str:
    """SHA-256 over the states of Python's, numpy's and torch's generators."""
    kind, keys, *rest = np.random.get_state()
    parts: list[Any] = [random.getstate(), kind, np.asarray(keys).tolist(), rest]
    parts.append(torch.get_rng_state().tolist())
    if torch.cuda.is_available():
        parts.append([state.tolist() for state in torch.cuda.get_rng_state_all()])
    return hashlib.sha256(repr(parts).encode()).hexdigest()
