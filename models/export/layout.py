"""What an exported folder holds, and writing it so that its final name only ever shows a verified one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from models.files import write_folder, write_json, write_tensors


@dataclass(frozen=True)
class Layout:
    """One engine's reading of a draft."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    needs: str | None = None  # what an older engine would get wrong without an error


def write_export(folder: Path, layout: Layout, tokenizer: Any, check: Callable[[Path], None]) -> None:
    """Writes weights, config.json and tokenizer beside `folder`, runs `check` on that, and only then renames
    it.

    Whatever a killed export left behind is removed first.
    """
    sweep(folder)

    def write(temporary: Path) -> None:
        write_tensors(temporary / "model.safetensors", layout.tensors)
        write_json(temporary / "config.json", layout.config)
        tokenizer.save_pretrained(temporary)
        check(temporary)

    write_folder(folder, write)


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
