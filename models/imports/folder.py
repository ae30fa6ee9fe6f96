"""A draft's folder that others wrote: its config.json and its tensors, read and never written to.

Weights are taken from safetensors where there are any. `.bin` and `.pt` files are pickles, of which torch's
`weights_only` reading takes tensors and nothing that could run.
"""

from __future__ import annotations

import json
import pickle
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from configs.errors import CheckpointError
from models.checkpoint import CONFIG, read_weights, weight_files


class Published:
    """What a folder holds. Raises `CheckpointError` for one that is incomplete or holds more than tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_json(folder / CONFIG)
        self.files = weight_files(folder)
        if not self.files:
            raise CheckpointError(
                f"{folder} holds no weights: no safetensors, pytorch_model.bin or medusa_lm_head.pt. Fetch "
                "the draft again."
            )
        if self.config.get("quantization_config"):
            raise CheckpointError(
                f"{folder / CONFIG} has a quantization_config: the weights are packed, which Leadout does "
                "not read. Use the draft's unquantised form."
            )

    @property
    def speculators(self) -> str | None:
        """The method, if the `speculators` library wrote the folder."""
        return self.config.get("speculators_model_type")

    @cached_property
    def names(self) -> frozenset[str]:
        """Of all tensors."""
        if any(file.suffix != ".safetensors" for file in self.files):
            return frozenset(self.tensors)
        return frozenset(name for file in self.files for name in names_in(file))

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """On the CPU, in the dtypes of the file."""
        return {name: tensor for file in self.files for name, tensor in read_tensors(file).items()}


def read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Fetch the draft again.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is no JSON object. Fetch the draft again.")
    return config


def names_in(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as stored:
            return list(stored.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or damaged: {error}. Fetch the draft again.") from error


def read_tensors(file: Path) -> dict[str, Tensor]:
    loaded = read_weights(file) if file.suffix == ".safetensors" else read_pickle(file)
    for name, tensor in loaded.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"{file} holds {name!r}, which is no tensor: it is no state dict. Name a folder with the "
                "draft's weights, not with a trainer's state."
            )
    return loaded


def read_pickle(file: Path) -> dict[str, Any]:
    """The dict in a `.bin` or `.pt` file; nothing in it is run."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} is no plain file of tensors: reading it would run code, or it is damaged. Ask for the "
            "draft as safetensors, or fetch it again."
        ) from error
    except (OSError, EOFError, RuntimeError, LookupError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} is truncated or damaged: {error}. Fetch the draft again.") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{file} holds a {type(loaded).__name__} and no tensors by name.")
    return loaded
