"""The target's features of the training rows: taps at every row, and the taught rows' last hidden states.

`cached`: computed once, written under `data.folder`/features/<key>/ and memory-mapped over the epochs. The
key covers the rows, the target's weights, the taps and the dtype, so a cache can be stale only by being
another folder. `online`: the target runs beside the draft, and nothing is stored.

The target's logits are never stored: the last hidden state and the log-sum-exp of its full-vocabulary logits
give any part of its law back (train/objectives). What is taught is decided by the loss mask alone: target row
r is kept iff m_{r+1} = 1. Rows with features that are not finite are left out and counted; too many of them
stop the run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError, safe_open
from torch import Tensor

from configs.errors import StorageError, TargetError
from data.tokens import TokenRow
from models.files import ensure_writable, write_json, write_tensors
from models.target import Target
from train.batches import Batch, RowFeatures, collate, pack, rounded

VERSION = 1  # of the files; raise it when the same inputs give other contents
SHARD_BYTES = 256 << 20  # written at a time, so lost at most when a run is killed
LOGIT_ELEMENTS = 1 << 24  # logits that exist at a time while log-sum-exps are taken
MAX_BAD = 0.01  # share of rows that may have features that are not finite


class Features(Protocol):
    """Where batches come from."""

    def usable(self) -> list[int]:
        """Numbers of the rows that may be asked for."""
        ...

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The rows `numbers` with their features."""
        ...


class Online:
    """Features computed by the target whenever they are asked for."""

    def __init__(self, target: Target, rows: Sequence[TokenRow], taps: tuple[int, ...]) -> None:
        self._target, self._rows, self._taps = target, rows, taps
        self._bad: set[int] = set()

    def usable(self) -> list[int]:
        return list(range(len(self._rows)))

    def batch(self, numbers: Sequence[int]) -> Batch:
        rows = [self._rows[n] for n in numbers]
        features = compute(self._target, rows, self._taps)
        for i, n in enumerate(numbers):
            if not finite(features[i]):
                self._bad.add(n)
                rows[i], features[i] = silent(rows[i], features[i])
        refuse_many(len(self._bad), len(self._rows), self._target)
        return collate(rows, features)


class Cached:
    """Features read from the shards that `write` made."""

    def __init__(self, folder: Path, rows: Sequence[TokenRow], shards: Sequence[range]) -> None:
        self._rows = rows
        self._shards = [Shard(shard_file(folder, i), numbers, rows) for i, numbers in enumerate(shards)]
        self._place = {n: shard for shard in self._shards for n in shard.numbers}

    def usable(self) -> list[int]:
        return [n for shard in self._shards for n in shard.usable()]

    def batch(self, numbers: Sequence[int]) -> Batch:
        return collate([self._rows[n] for n in numbers], [self._place[n].row(n) for n in numbers])


class Shard:
    """One memory-mapped file of consecutive rows' features. Opening it proves that they are those rows'."""

    def __init__(self, path: Path, numbers: range, rows: Sequence[TokenRow]) -> None:
        self.numbers = numbers
        self._file = safe_open(path, framework="pt")
        expected = [token for n in numbers for token in rows[n].input_ids]
        if self._file.get_tensor("tokens").tolist() != expected:
            raise StorageError(
                f"{path} holds features of other tokens than the rows it is meant for: it was damaged or "
                f"moved. Remove {path.parent} and run again."
            )
        self.finite: list[bool] = self._file.get_tensor("finite").tolist()
        taught = [taught_rows(rows[n]) for n in numbers]
        self._taught = dict(zip(numbers, taught, strict=True))
        self._tokens = spans([len(rows[n].input_ids) for n in numbers])
        self._packed = spans([len(t) for t in taught])

    def usable(self) -> list[int]:
        return [n for n, good in zip(self.numbers, self.finite, strict=True) if good]

    def row(self, number: int) -> RowFeatures:
        at, packed = (s[number - self.numbers.start] for s in (self._tokens, self._packed))
        return RowFeatures(
            taps=self._file.get_slice("taps")[at],
            rows=self._taught[number],
            hidden=self._file.get_slice("hidden")[packed],
            lse=self._file.get_slice("lse")[packed],
            argmax=self._file.get_slice("argmax")[packed].long(),
        )


def cached(
    folder: Path,
    target: Target,
    rows: Sequence[TokenRow],
    taps: tuple[int, ...],
    tokens: int,
    console: Console,
) -> Cached:
    """The rows' features below `folder`, computing what is missing, `tokens` padded tokens at a time.

    Says first how much disk that takes; raises `StorageError` if there is less, `TargetError` for too many
    rows with features that are not finite. A run killed on the way loses the shard it was at.
    """
    folder = folder / key(target, rows, taps)
    size = [row_bytes(target, row, len(taps)) for row in rows]
    shards = split(size, SHARD_BYTES)
    missing = [i for i, numbers in enumerate(shards) if not whole(shard_file(folder, i), numbers, rows)]
    if missing:
        announce(folder, sum(size[n] for i in missing for n in shards[i]), sum(size), console)
        write(folder, target, rows, taps, tokens, shards, missing, console)
    made = Cached(folder, rows, shards)
    bad = len(rows) - len(made.usable())
    refuse_many(bad, len(rows), target)
    if bad:
        console.print(f"{bad} of {len(rows)} rows left out: their features are not finite", style="yellow")
    return made


def write(
    folder: Path,
    target: Target,
    rows: Sequence[TokenRow],
    taps: tuple[int, ...],
    tokens: int,
    shards: Sequence[range],
    missing: Sequence[int],
    console: Console,
) -> None:
    """Computes and writes the `missing` of `shards`, each atomically."""
    bad, total = 0, sum(len(rows[n].input_ids) for i in missing for n in shards[i])
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("features", total=total)
        for i in missing:
            chosen = [rows[n] for n in shards[i]]
            features: dict[int, RowFeatures] = {}
            sizes = [rounded(len(row.input_ids)) for row in chosen]
            for batch in pack(sizes, sorted(range(len(chosen)), key=sizes.__getitem__), tokens):
                computed = compute(target, [chosen[b] for b in batch], taps)
                features.update(zip(batch, computed, strict=True))
                progress.advance(task, sum(len(chosen[b].input_ids) for b in batch))
            ordered = [features[b] for b in range(len(chosen))]
            bad += sum(not finite(f) for f in ordered)
            refuse_many(bad, len(rows), target)
            write_tensors(shard_file(folder, i), packed(chosen, ordered))
    write_json(folder / "meta.json", {"rows": len(rows), "target": target.name, "taps": list(taps)})


@torch.no_grad()
def compute(target: Target, rows: Sequence[TokenRow], taps: tuple[int, ...]) -> list[RowFeatures]:
    """One forward of the target over `rows`, padded on the right, where causal attention never looks."""
    ids = torch.zeros(len(rows), rounded(max(len(row.input_ids) for row in rows)), dtype=torch.int64)
    for b, row in enumerate(rows):
        ids[b, : len(row.input_ids)] = torch.tensor(row.input_ids)
    out = target.forward(ids.to(target.device), taps=taps, logits=False)
    taught = [taught_rows(row) for row in rows]
    hidden = torch.cat([out.last_hidden[b, at] for b, at in enumerate(taught)])
    lse, argmax = summarise(target, hidden)
    features = []
    for b, (row, at, packed) in enumerate(zip(rows, taught, spans([len(at) for at in taught]), strict=True)):
        states = torch.zeros(0) if out.taps is None else out.taps[b, : len(row.input_ids)]
        features.append(RowFeatures(states, at, hidden[packed], lse[packed], argmax[packed]))
    return features


def summarise(target: Target, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp (float32 [n]) and argmax (int64 [n]) of the full-vocabulary logits of `hidden` [n, d]."""
    n = len(hidden)
    padded = F.pad(hidden, (0, 0, 0, rounded(n) - n))
    chunks = padded.split(rounded(max(1, LOGIT_ELEMENTS // target.vocab_size)))
    logits = (target.lm_head(chunk) for chunk in chunks)
    found = [(chunk.float().logsumexp(-1), chunk.argmax(-1)) for chunk in logits]
    return torch.cat([lse for lse, _ in found])[:n], torch.cat([argmax for _, argmax in found])[:n]


def taught_rows(row: TokenRow) -> Tensor:
    """The target rows r that predict a token to train on: m_{r+1} = 1. int64 [R], ascending."""
    return torch.tensor(row.loss_mask[1:]).nonzero().squeeze(1)


def finite(features: RowFeatures) -> bool:
    values = features.taps, features.hidden, features.lse
    return all(bool(torch.isfinite(value).all()) for value in values)


def silent(row: TokenRow, features: RowFeatures) -> tuple[TokenRow, RowFeatures]:
    """The row with zeros for features and nothing to train on."""
    nothing = [values[:0] for values in (features.rows, features.hidden, features.lse, features.argmax)]
    return (
        replace(row, loss_mask=[0] * len(row.loss_mask)),
        RowFeatures(torch.zeros_like(features.taps), *nothing),
    )


def refuse_many(bad: int, total: int, target: Target) -> None:
    if bad > MAX_BAD * total:
        raise TargetError(
            f"{bad} of {total} rows have features of target {target.name} that are NaN or infinite, "
            f"more than {MAX_BAD:.0%}: it overflows in {target.dtype}, or its weights are damaged. "
            "Set target.dtype=float32, or fetch the target again."
        )


def packed(rows: Sequence[TokenRow], features: Sequence[RowFeatures]) -> dict[str, Tensor]:
    """A shard's tensors: each row's after the one before it."""
    return {
        "tokens": torch.tensor([token for row in rows for token in row.input_ids], dtype=torch.int32),
        "taps": torch.cat([f.taps for f in features]),
        "hidden": torch.cat([f.hidden for f in features]),
        "lse": torch.cat([f.lse for f in features]),
        "argmax": torch.cat([f.argmax for f in features]).int(),
        "finite": torch.tensor([finite(f) for f in features]),
    }


def spans(lengths: Sequence[int]) -> list[slice]:
    """Where things of these lengths lie when packed one after the other."""
    ends = np.cumsum([0, *lengths]).tolist()
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def split(sizes: Sequence[int], limit: int) -> list[range]:
    """Consecutive rows in ranges of at most `limit` bytes (one row at least)."""
    starts, total = [0], 0
    for n, size in enumerate(sizes):
        if total + size > limit and n > starts[-1]:
            starts.append(n)
            total = 0
        total += size
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(sizes)], strict=True)]


def row_bytes(target: Target, row: TokenRow, taps: int) -> int:
    """What a row takes on disk."""
    width = target.dtype.itemsize * target.hidden_size
    return len(row.input_ids) * (taps * width + 4) + sum(row.loss_mask[1:]) * (width + 8)


def key(target: Target, rows: Sequence[TokenRow], taps: tuple[int, ...]) -> str:
    """16 hexadecimal digits over everything that the stored features depend on."""
    parts = [VERSION, rows_digest(rows), target.fingerprint(), list(taps), str(target.dtype)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def rows_digest(rows: Sequence[TokenRow]) -> str:
    """SHA-256 over token ids and loss masks of all rows, in order."""
    digest = hashlib.sha256()
    for row in rows:
        values = [len(row.input_ids), *row.input_ids, *row.loss_mask]
        digest.update(np.asarray(values, dtype=np.int64).tobytes())
    return digest.hexdigest()


def shard_file(folder: Path, number: int) -> Path:
    return folder / f"shard_{number:05d}.safetensors"


def whole(path: Path, numbers: range, rows: Sequence[TokenRow]) -> bool:
    """Whether the shard is there and not truncated. Raises `StorageError` if its tokens are others."""
    try:
        Shard(path, numbers, rows)
    except (FileNotFoundError, SafetensorError):
        return False
    return True


def announce(folder: Path, needed: int, total: int, console: Console) -> None:
    """Says what disk the features take, and refuses to begin if it is not there."""
    ensure_writable(folder)
    free = shutil.disk_usage(folder).free
    console.print(
        f"features: {needed / 1e9:.2f} GB to write to {folder} "
        f"({total / 1e9:.2f} GB in all, {free / 1e9:.0f} GB free)"
    )
    if needed > free:
        raise StorageError(
            f"The features need {needed / 1e9:.2f} GB in {folder}, and {free / 1e9:.2f} GB are free there. "
            "Make room, put data.folder on another disk, train on fewer rows (data.max_train_rows), or set "
            "trainer.features=online."
        )
