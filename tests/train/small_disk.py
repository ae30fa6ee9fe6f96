"""`python -m tests.train.small_disk FOLDER`: captures features while FOLDER's disk fills up, and again when
there is room; raises unless both go as they should. FOLDER lies on a small disk of its own."""

from __future__ import annotations

import errno
import io
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from configs.errors import StorageError
from data.tokens import TokenRow
from tests.conftest import tiny_target
from train import store
from train.features import Online

TAPS = (1, 3)
ROWS = [TokenRow(str(i), "", [5 + i, 6, 7, 8], [0, 1, 1, 1]) for i in range(6)]


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as ballast:
        try:
            while ballast.write(b"\0" * 4096):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC


def main(folder: Path) -> None:
    target, original, calls = tiny_target(), store.compute, []
    ballast = folder / "ballast"

    def compute(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            fill(ballast)
        return original(*args)

    store.SHARD_BYTES = 1  # a row to a shard
    store.compute = compute

    def capture() -> store.Cached:
        return store.cached(store.open_store(folder, target, ROWS, TAPS, 64, Console(file=io.StringIO())))

    try:
        capture()
    except StorageError as error:
        assert "the disk is full" in str(error) and "shard_00002" in str(error), error
    else:
        raise AssertionError("a full disk went unnoticed")
    assert len(list(folder.glob("*/shard_*"))) == 2 and not list(folder.glob("*/.*"))

    ballast.unlink()
    found = capture().batch(range(6))
    assert len(calls) == 3 + 4  # the third of six was lost
    torch.testing.assert_close(found.taps, Online(target, ROWS, TAPS).batch(range(6)).taps)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
