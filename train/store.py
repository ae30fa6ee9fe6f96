"""The feature store: what the target says about the training rows, computed once and read in every epoch.

    data.folder/features/<key>/
        manifest.json                what these are the features of, for people and for `Cached`
        shard_00000.safetensors      consecutive rows, each packed behind the one before:
            tokens    int32 [tokens]           their ids, compared when the shard is opened
            taps      [tokens, n_taps * d]     hidden states, the taps side by side
            hidden    [taught, d]              last hidden states of the rows that teach
            lse       float32 [taught]         of their logits, over the full vocabulary
            argmax    int32 [taught]
            finite    bool [rows]              whether all of a row's numbers are
            checksum  int64 [rows]             xxh3 of a row's features, compared when they are first read

`<key>` covers all that features depend on (the rows, the target's weights, the taps, the dtype), so features
of another target lie in another folder. A shard is there whole or not at all: a run that is killed, or whose
disk fills up, goes on with those that are missing.

Shards are memory-mapped. Rows are read in the order of training, which mixes those of all shards: a row lies
in one piece of some hundred kilobytes, so a disk has nothing to gain from another order. The next step's are
read by a thread while this one's are trained on.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError, safe_open
from torch import Tensor

from configs.errors import StorageError
from data.tokens import TokenRow
from models.files import ensure_writable, write_json, write_tensors
from models.target import Target
from train.batches import Batch, RowFeatures, collate, pack, rounded
from train.features import compute, finite, refuse_many, row_bytes, rows_digest, spans, taught_rows

VERSION = 1  # raise it when the same inputs give other numbers, or end shards elsewhere
SHARD_BYTES = 256 << 20  # written at a time, so lost at most when a run is killed
MANIFEST = "manifest.json"
TENSORS = {"tokens", "taps", "hidden", "lse", "argmax", "finite"}  # that every shard has
LAYERS = "indices of HF hidden_states: 0 is the embedding output, the last one is after the final norm"


class Cached:
    """Features read from a store's shards."""

    def __init__(self, rows: Sequence[TokenRow], shards: Sequence[Shard]) -> None:
        self._rows, self._shards = rows, shards
        self._place = {n: shard for shard in shards for n in shard.numbers}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="features")
        self._coming: dict[tuple[int, ...], Future[Batch]] = {}

    def usable(self) -> list[int]:
        return [n for shard in self._shards for n in shard.usable()]

    def batch(self, numbers: Sequence[int]) -> Batch:
        coming = self._coming.pop(tuple(numbers), None)
        return self._read(numbers) if coming is None else coming.result()

    def ahead(self, batches: Sequence[Sequence[int]]) -> None:
        """Begins to read these; of those announced before, what was not asked for is forgotten."""
        self._coming = {tuple(n): self._thread.submit(self._read, n) for n in batches}

    def _read(self, numbers: Sequence[int]) -> Batch:
        rows = [self._rows[n] for n in numbers]
        return collate(rows, [self._place[n].features(n, row) for n, row in zip(numbers, rows, strict=True)])


class Shard:
    """One memory-mapped file of consecutive rows' features.

    Opening it proves that it is whole and those rows' (`StorageError`: it is not theirs; `SafetensorError`:
    it is cut off or no such file). What it says of a row is proved when that is first read.
    """

    def __init__(self, path: Path, store: str, numbers: range, rows: Sequence[TokenRow]) -> None:
        self.path, self.numbers = path, numbers
        self._file = safe_open(path, framework="pt")
        held = [rows[n] for n in numbers]
        if missing := TENSORS - {*self._file.keys()}:
            raise StorageError(f"{path} lacks {', '.join(sorted(missing))}: it is damaged. {remove(path)}")
        if (self._file.metadata() or {}).get("store", store) != store:
            raise StorageError(f"{path} belongs to another store and was moved here. {remove(path)}")
        if not torch.equal(self._file.get_tensor("tokens"), ids(held)):
            raise StorageError(
                f"{path} holds features of other tokens than the rows it is meant for: it was damaged or "
                f"moved. {remove(path)}"
            )
        self.finite: list[bool] = self._file.get_tensor("finite").tolist()
        # Shards written by the first versions have no checksums.
        there = "checksum" in self._file.keys()  # noqa: SIM118 (a file, not a dict)
        sums: list[int | None] = self._file.get_tensor("checksum").tolist() if there else [None] * len(held)
        if not len(self.finite) == len(sums) == len(held):
            raise StorageError(f"{path} is damaged: it is not of {len(held)} rows throughout. {remove(path)}")
        self._unproved = dict(zip(numbers, sums, strict=True))
        self._tokens = spans([len(row.input_ids) for row in held])
        self._taught = spans([sum(row.loss_mask[1:]) for row in held])

    def usable(self) -> list[int]:
        return [n for n, good in zip(self.numbers, self.finite, strict=True) if good]

    def features(self, number: int, row: TokenRow) -> RowFeatures:
        """Those of `row`, which has this number. Raises `StorageError` if they are not what was written."""
        i = number - self.numbers.start
        tokens, taught = self._tokens[i], self._taught[i]
        found = RowFeatures(
            taps=self._file.get_slice("taps")[tokens],
            rows=taught_rows(row),
            hidden=self._file.get_slice("hidden")[taught],
            lse=self._file.get_slice("lse")[taught],
            argmax=self._file.get_slice("argmax")[taught].long(),
        )
        expected = self._unproved.pop(number, None)
        if expected is not None and checksum(found) != expected:
            raise StorageError(
                f"{self.path} is damaged: the features of row {number} are not those that were written. "
                f"{remove(self.path)}"
            )
        return found


def cached(
    folder: Path,
    target: Target,
    rows: Sequence[TokenRow],
    taps: tuple[int, ...],
    tokens: int,
    console: Console,
) -> Cached:
    """The rows' features below `folder`, computing what is missing, `tokens` padded tokens at a time.

    Says first how much disk that takes. Raises `StorageError` if there is less and for a store that is not
    what it should be, `TargetError` for too many rows with features that are not finite.
    """
    what = contents(target, rows, taps)
    store = folder / key(what)
    differs = differing(store, what)
    if differs:
        raise StorageError(
            f"The features in {store} are of another {' and another '.join(differs)} than asked for, says "
            f"their {MANIFEST}: the folder was moved there. {remove(store)}"
        )
    sizes = [row_bytes(target, row, len(taps)) for row in rows]
    parts = split(sizes, SHARD_BYTES)
    tried = {i: opened(store, i, part, rows, console) for i, part in enumerate(parts)}
    shards = {i: shard for i, shard in tried.items() if shard is not None}
    missing = {i: part for i, part in enumerate(parts) if i not in shards}
    if missing:
        announce(store, sum(sizes[n] for part in missing.values() for n in part), sum(sizes), what, console)
    if differs is None:
        write_json(store / MANIFEST, what | circumstances(target, rows))
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("features", total=sum(map(len, missing.values())))
        for i, part in missing.items():
            chosen = [rows[n] for n in part]
            features = captured(target, chosen, taps, tokens, partial(progress.advance, task))
            bad = unusable(shards.values()) + sum(not finite(one) for one in features)
            refuse_many(bad, len(rows), target)
            write_tensors(shard_file(store, i), packed(chosen, features), {"store": store.name})
            shards[i] = Shard(shard_file(store, i), store.name, part, rows)
    if bad := unusable(shards.values()):
        refuse_many(bad, len(rows), target)
        console.print(f"{bad} of {len(rows)} rows left out: their features are not finite", style="yellow")
    return Cached(rows, [shards[i] for i in range(len(parts))])


def captured(
    target: Target,
    rows: Sequence[TokenRow],
    taps: tuple[int, ...],
    tokens: int,
    advance: Callable[[int], None],
) -> list[RowFeatures]:
    """The rows' features, rows of similar lengths in one forward. `advance` is told how many are done."""
    features: dict[int, RowFeatures] = {}
    sizes = [rounded(len(row.input_ids)) for row in rows]
    for batch in pack(sizes, sorted(range(len(rows)), key=sizes.__getitem__), tokens):
        features.update(zip(batch, compute(target, [rows[b] for b in batch], taps), strict=True))
        advance(len(batch))
    return [features[b] for b in range(len(rows))]


def opened(store: Path, i: int, part: range, rows: Sequence[TokenRow], console: Console) -> Shard | None:
    """Shard i; None where it is to be computed. Raises `StorageError` for one that is not these rows'."""
    path = shard_file(store, i)
    try:
        return Shard(path, store.name, part, rows)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}. {remove(path)}") from error
    except SafetensorError as error:
        console.print(f"{path} is cut off or damaged and is made again: {error}", style="yellow")
        return None


def packed(rows: Sequence[TokenRow], features: Sequence[RowFeatures]) -> dict[str, Tensor]:
    """A shard's tensors: each row's behind those of the row before."""
    return {
        "tokens": ids(rows),
        "taps": torch.cat([f.taps for f in features]),
        "hidden": torch.cat([f.hidden for f in features]),
        "lse": torch.cat([f.lse for f in features]),
        "argmax": torch.cat([f.argmax for f in features]).int(),
        "finite": torch.tensor([finite(f) for f in features]),
        "checksum": torch.tensor([checksum(f) for f in features]),
    }


def ids(rows: Iterable[TokenRow]) -> Tensor:
    """The token ids of all rows, int32."""
    return torch.tensor([token for row in rows for token in row.input_ids], dtype=torch.int32)


def checksum(features: RowFeatures) -> int:
    """xxh3 of the bytes of a row's features, as a signed 64-bit number."""
    digest = xxhash.xxh3_64()
    for values in (features.taps, features.hidden, features.lse, features.argmax):
        digest.update(values.cpu().contiguous().view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), signed=True)


def split(sizes: Sequence[int], limit: int) -> list[range]:
    """Consecutive rows in ranges of at most `limit` bytes (one row at least)."""
    starts, total = [0], 0
    for n, size in enumerate(sizes):
        if total + size > limit and n > starts[-1]:
            starts.append(n)
            total = 0
        total += size
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(sizes)], strict=True)]


def unusable(shards: Iterable[Shard]) -> int:
    """Rows with features that are not finite."""
    return sum(shard.finite.count(False) for shard in shards)


def contents(target: Target, rows: Sequence[TokenRow], taps: tuple[int, ...]) -> dict[str, Any]:
    """All that stored features depend on: the part of the manifest that is compared when it is opened."""
    return {
        "version": VERSION,
        "rows": rows_digest(rows),
        "target": target.fingerprint(),
        "taps": list(taps),
        "dtype": str(target.dtype),
    }


def key(what: Mapping[str, Any]) -> str:
    """A store's name: 16 hexadecimal digits over its `contents`."""
    return hashlib.sha256(json.dumps(list(what.values())).encode()).hexdigest()[:16]


def circumstances(target: Target, rows: Sequence[TokenRow]) -> dict[str, Any]:
    """The part for people."""
    return {
        "layers": LAYERS,
        "target_name": target.name,
        "target_revision": target.revision,
        "tokenizer": target.tokenizer_fingerprint(),
        "row_count": len(rows),
        "token_count": sum(len(row.input_ids) for row in rows),
    }


def differing(store: Path, what: Mapping[str, Any]) -> list[str] | None:
    """The names of what differs between a store's contents and `what`; None where no manifest says."""
    try:
        found = json.loads((store / MANIFEST).read_text())
        return [name for name in what if found[name] != what[name]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def announce(store: Path, needed: int, total: int, what: Mapping[str, Any], console: Console) -> None:
    """Says what disk the features take, and which others lie beside them; refuses to begin if it is not
    there."""
    ensure_writable(store)
    free = shutil.disk_usage(store).free
    console.print(
        f"features: {needed / 1e9:.2f} GB to write to {store} "
        f"({total / 1e9:.2f} GB in all, {free / 1e9:.0f} GB free)"
    )
    for other in sorted(store.parent.iterdir()):
        if other == store or not (held := shard_bytes(other)):
            continue
        names = differing(other, what)
        why = "no manifest" if names is None else f"other {', '.join(names)}"
        console.print(f"not of use here: {other.name}, {held / 1e9:.2f} GB ({why})")
    if needed > free:
        raise StorageError(
            f"The features need {needed / 1e9:.2f} GB in {store}, and {free / 1e9:.2f} GB are free there. "
            f"Make room (what is not in use in {store.parent} may go), put data.folder on another disk, "
            "train on fewer rows (data.max_train_rows), or set trainer.features=online."
        )


def shard_bytes(store: Path) -> int:
    return sum(file.stat().st_size for file in store.glob("shard_*") if file.is_file())


def shard_file(store: Path, i: int) -> Path:
    return store / f"shard_{i:05d}.safetensors"


def remove(path: Path) -> str:
    return f"Remove {path} and run again: what is missing is computed anew."
