"""Exported folders in tests: written as the exporter writes them, read back, damaged on purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from models.export.layout import write_export
from models.target import Target
from tests.conftest import tiny_model, tiny_tokenizer


def spare_target(**config: Any) -> Target:
    """60 tokens, and 4 rows of the embedding beyond them."""
    return Target.wrap(tiny_model(64, layers=8, **config), tiny_tokenizer(60), name="tiny")


def written(
    method: Any, folder: Path, draft: Any, target: Target, engine: str = "vllm"
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config, tensors) of an export that the exporter's own check has passed. method: models/export/x.py."""
    layout = method.LAYOUTS[engine](draft, target)
    write_export(folder, layout, target.tokenizer, lambda where: method.check(where, draft, target))
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def edit(folder: Path, **changes: Any) -> None:
    """Sets fields of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, **changes: Tensor | None) -> None:
    """Sets tensors, or removes those set to None."""
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, folder / "model.safetensors")
