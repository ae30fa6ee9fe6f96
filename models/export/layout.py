"""What an exported folder holds, and writing it so that its final name only ever shows a verified one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.errors import StorageError
from models.files import write_atomic, write_folder, write_json, write_tensors, write_text


@dataclass(frozen=True)
class Layout:
    """One engine's reading of a draft."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    needs: str | None = None  # what to know before serving it: an engine's version, a head written larger
    weights: str = "model.safetensors"  # another name, for engines that ask for another
    files: dict[str, Any] = field(default_factory=dict)  # further JSON files by name


def write_export(
    folder: Path,
    layout: Layout,
    tokenizer: Any,
    check: Callable[[Path], None],
    texts: Callable[[Path], Mapping[str, str]] | None = None,
) -> None:
    """Writes weights, config.json and tokenizer beside `folder`, runs `check` on that, adds `texts` (by file
    name), and only then renames it.

    Whatever a killed export left behind is removed first. Only an earlier export is replaced: `StorageError`
    where `folder` holds anything that this one does not write.
    """
    sweep(folder)

    def write(temporary: Path) -> None:
        write_weights(temporary / layout.weights, layout.tensors)
        for name, values in {"config.json": layout.config, **layout.files}.items():
            write_json(temporary / name, values)
        tokenizer.save_pretrained(temporary)
        check(temporary)
        for name, text in (texts(temporary) if texts else {}).items():
            write_text(temporary / name, text)
        refuse_others(folder, temporary)

    write_folder(folder, write)


def refuse_others(folder: Path, written: Path) -> None:
    """Raises `StorageError` unless `folder` is absent, or holds no other names than `written` does."""
    instead = "Move it away, or set export.output to another folder."
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file, and an export is a folder. {instead}")
    there = {path.name for path in folder.iterdir()} if folder.exists() else set[str]()
    if others := there - {path.name for path in written.iterdir()}:
        raise StorageError(
            f"{folder} would be replaced, and {', '.join(sorted(others))} is no part of an export. {instead}"
        )


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file; a .pt file, which `torch.load(weights_only=True)` reads, where that is its name."""
    if path.suffix != ".pt":
        write_tensors(path, tensors)
        return
    contents = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    write_atomic(path, lambda temporary: torch.save(contents, temporary))


def whole_head(rows: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """[V, d]: the head `rows` [Vd, d] of a draft over `ids` [Vd], for engines that know no reduced one.

    Every other token gets the mean of the rows: its logit is the mean of the draft's logits, whatever the
    state, and a mean is never the largest. So the likeliest token stays what it was, and nearly all of the
    probability where it was. What is lost is what the reduced vocabulary saved: the head costs V rows.
    """
    whole = rows.float().mean(0).to(rows.dtype).repeat(vocab_size, 1)
    return whole.index_copy(0, ids, rows)


def sweep(folder: Path) -> None:
    """Removes the unfinished siblings (`.<name>.<pid>.tmp`) of exports that no longer run."""
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        pid = left.name.split(".")[-2]
        if pid.isdigit() and int(pid) != os.getpid() and not running(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
