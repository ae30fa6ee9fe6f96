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

`trainer.features_gb` bounds what stands on the disk (`Bounded`). An epoch then goes through the shards in
chapters, as many of them at a time as the bound holds, drawn anew for each epoch. What a step asks for and is
not there is captured, and what was asked for longest ago is removed for it. The order follows from seed,
epoch and bound, and a shard is captured in the same forwards every time: losses show neither evictions nor
kills.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

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
from train.features import (
    compute,
    finite,
    refuse_many,
    row_bytes,
    rows_digest,
    silent,
    spans,
    taught_rows,
)
from train.ranks import Ranks
from train.runs import locked

VERSION = 1  # raise it when the same inputs give other numbers, or end shards elsewhere
SHARD_BYTES = 256 << 20  # written at a time, so lost at most when a run is killed
HEADER_BYTES = 1024  # more than the names, shapes and places of a shard's tensors take
MANIFEST = "manifest.json"
TENSORS = {"tokens", "taps", "hidden", "lse", "argmax", "finite"}  # that every shard has
LAYERS = "indices of HF hidden_states: 0 is the embedding output, the last one is after the final norm"


class Cached:
    """Features read from a store's shards."""

    def __init__(self, store: Store, shards: Mapping[int, Shard]) -> None:
        """`shards`: those that stand on the disk, by number."""
        self._store = store
        self._shards: dict[int, Shard] = dict(shards)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="features")
        self._coming: dict[tuple[int, ...], Future[Batch]] = {}
        self._bad: set[int] = set()  # rows that may be asked for, and whose features are not finite

    def usable(self) -> list[int]:
        return [n for i in range(len(self._store.parts)) for n in self._shards[i].usable()]

    def chapters(self, numbers: Sequence[int], seed: int, epoch: int) -> list[Sequence[int]]:
        return [range(len(numbers))]

    def want(self, numbers: Sequence[int]) -> None:
        """Nothing: all of them are there."""

    def batch(self, numbers: Sequence[int]) -> Batch:
        coming = self._coming.pop(tuple(numbers), None)
        return self._read(numbers, self._holding(numbers)) if coming is None else coming.result()

    def ahead(self, batches: Sequence[Sequence[int]]) -> None:
        """Begins to read these; of those announced before, what was not asked for is forgotten."""
        self._coming = {tuple(n): self._thread.submit(self._read, n, self._holding(n)) for n in batches}

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._shards = {}

    def _holding(self, numbers: Iterable[int]) -> list[Shard]:
        """The shard of each row."""
        return [self._shards[self._store.part_of(n)] for n in numbers]

    def _read(self, numbers: Sequence[int], shards: Sequence[Shard]) -> Batch:
        rows = [self._store.rows[n] for n in numbers]
        found = [shard.features(n, row) for n, row, shard in zip(numbers, rows, shards, strict=True)]
        for at, n in enumerate(numbers):
            if n in self._bad:
                rows[at], found[at] = silent(rows[at], found[at])
        return collate(rows, found)


class Bounded(Cached):
    """Features of which at most `limit` bytes stand on the disk at a time.

    All ranks call `want` alike, and it changes the same on each, so they agree on what stands there without a
    word; rank 0 writes and removes. Rows with features that are not finite are only found out when they are
    captured: as `Online` does, they are counted, and teach nothing.
    """

    def __init__(self, store: Store, limit: int, ranks: Ranks) -> None:
        """Raises `StorageError` for a limit that does not hold each shard by itself."""
        super().__init__(store, store.standing())  # those asked for longest ago first
        self._limit, self._ranks = limit, ranks
        self._sizes = [store.bytes_of(i) for i in range(len(store.parts))]
        self._lock: TextIO | None = None  # taken when something is first written
        self._note(self._shards.values())
        if (largest := max(self._sizes)) > limit:
            raise StorageError(
                f"trainer.features_gb={limit / 1e9:g} does not hold the largest shard of features, "
                f"{largest / 1e9:.3g} GB: set at least that (rows of one shard are mixed with each other "
                "alone; several shards mix better), or trainer.features=online, which needs no disk."
            )

    def usable(self) -> list[int]:
        return list(range(len(self._store.rows)))

    def chapters(self, numbers: Sequence[int], seed: int, epoch: int) -> list[Sequence[int]]:
        """Shards in an order drawn from (seed, epoch), as many to a chapter as the limit holds."""
        generator = torch.Generator().manual_seed((seed << 20) + epoch)
        order = torch.randperm(len(self._sizes), generator=generator).tolist()
        place = {n: at for at, n in enumerate(numbers)}
        chapters = [
            sorted(place[n] for i in order[cut.start : cut.stop] for n in self._store.parts[i] if n in place)
            for cut in split([self._sizes[i] for i in order], self._limit)
        ]
        return [chapter for chapter in chapters if chapter]

    def want(self, numbers: Sequence[int]) -> None:
        """Captures the shards of these rows that are not there, and removes others to make room for them."""
        wanted = sorted({self._store.part_of(n) for n in numbers})
        missing = [i for i in wanted if i not in self._shards]
        self._shards |= {i: self._shards.pop(i) for i in wanted if i in self._shards}  # to the end
        leaving = self._surplus(wanted, self._limit - sum(self._sizes[i] for i in missing))
        for i in leaving:
            del self._shards[i]
        if not missing and not leaving:
            return
        self._ranks.meet()  # nobody reads what leaves
        if self._ranks.leads:
            self._store.target.together(lambda: self._write(leaving, missing) if self._ranks.first else None)
        self._ranks.meet()
        made = {i: self._store.shard(i) for i in missing}
        self._shards |= made
        self._note(made.values())

    def ahead(self, batches: Sequence[Sequence[int]]) -> None:
        super().ahead([n for n in batches if all(self._store.part_of(one) in self._shards for one in n)])

    def close(self) -> None:
        super().close()
        if self._lock is not None:
            self._lock.close()

    def _surplus(self, wanted: Sequence[int], room: int) -> list[int]:
        """The shards that have to go so that what stays takes no more than `room` bytes."""
        held, leaving = sum(self._sizes[i] for i in self._shards), []
        for i in self._shards:
            if held <= room or i in wanted:
                break
            leaving.append(i)
            held -= self._sizes[i]
        return leaving

    def _write(self, leaving: Sequence[int], missing: Sequence[int]) -> None:
        if self._lock is None:
            self._lock = self._begin()
        for i in leaving:
            shard_file(self._store.folder, i).unlink(missing_ok=True)
        self._store.capture(missing, len(self._bad.difference(*(self._store.parts[i] for i in missing))))

    def _begin(self) -> TextIO:
        """Makes the store this run's own, and says what it will take. Raises `StorageError` if it cannot."""
        store, total = self._store, sum(self._sizes)
        ensure_writable(store.folder)
        if (lock := locked(store.folder)) is None:
            raise StorageError(
                f"Another run removes features from {store.folder} (trainer.features_gb). Wait for it, stop "
                "it, or give this one another data.folder."
            )
        kept = {shard_file(store.folder, i) for i in self._shards}
        for file in [*store.folder.glob("shard_*"), *store.folder.glob(".shard_*")]:
            if file not in kept:  # to go, cut off, or half-written when a run was killed
                file.unlink()
        parts = len(split(self._sizes, self._limit))
        store.console.print(
            f"features: at most {self._limit / 1e9:.2f} GB of {total / 1e9:.2f} GB on the disk at a time; an "
            f"epoch has about {parts} chapters, each captured when its turn comes"
        )
        held = sum(self._sizes[i] for i in self._shards)
        store.announce(max(0, min(self._limit, total) - held))
        store.describe()
        return lock

    def _note(self, shards: Iterable[Shard]) -> None:
        """Counts the rows that are not usable. Raises `TargetError` for too many."""
        self._bad |= {n for shard in shards for n in {*shard.numbers} - {*shard.usable()}}
        refuse_many(len(self._bad), len(self._store.rows), self._store.target)


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


@dataclass(frozen=True)
class Store:
    """A folder of shards: which rows each of them has, and how one is made."""

    folder: Path
    target: Target
    rows: Sequence[TokenRow]
    taps: tuple[int, ...]
    tokens: int  # padded, of a forward
    console: Console
    what: dict[str, Any]  # `contents`
    sizes: list[int]  # of rows, in bytes
    parts: list[range]  # rows of each shard

    def part_of(self, number: int) -> int:
        """The shard that has row `number`."""
        return bisect.bisect_right(self.parts, number, key=lambda part: part.start) - 1

    def bytes_of(self, i: int) -> int:
        """What shard i takes on disk, at most."""
        part = self.parts[i]
        return HEADER_BYTES + sum(self.sizes[n] + 1 + 8 for n in part)  # finite and checksum

    def shard(self, i: int) -> Shard:
        return Shard(shard_file(self.folder, i), self.folder.name, self.parts[i], self.rows)

    def standing(self) -> dict[int, Shard]:
        """The shards that are there. Raises `StorageError` for one that is not these rows'."""
        tried = {i: opened(self, i) for i in range(len(self.parts))}
        return {i: shard for i, shard in tried.items() if shard is not None}

    def capture(self, missing: Sequence[int], bad: int) -> None:
        """Computes these shards and writes them. `bad`: rows of others whose features are not finite."""
        with Progress(console=self.console, disable=not self.console.is_terminal) as progress:
            task = progress.add_task("features", total=sum(len(self.parts[i]) for i in missing))
            for i in missing:
                chosen = [self.rows[n] for n in self.parts[i]]
                features = captured(
                    self.target, chosen, self.taps, self.tokens, partial(progress.advance, task)
                )
                bad += sum(not finite(one) for one in features)
                refuse_many(bad, len(self.rows), self.target)
                write_tensors(
                    shard_file(self.folder, i), packed(chosen, features), {"store": self.folder.name}
                )

    def describe(self) -> None:
        """Writes the manifest, unless there is one."""
        if differing(self.folder, self.what) is None:
            write_json(self.folder / MANIFEST, self.what | circumstances(self.target, self.rows))

    def announce(self, needed: int) -> None:
        """Says what disk the features take, and which others lie beside them; refuses to begin if it is not
        there."""
        folder, total = self.folder, sum(self.sizes)
        ensure_writable(folder)
        free = shutil.disk_usage(folder).free
        self.console.print(
            f"features: {needed / 1e9:.2f} GB to write to {folder} "
            f"({total / 1e9:.2f} GB in all, {free / 1e9:.0f} GB free)"
        )
        for other in sorted(folder.parent.iterdir()):
            if other == folder or not (held := shard_bytes(other)):
                continue
            names = differing(other, self.what)
            why = "no manifest" if names is None else f"other {', '.join(names)}"
            self.console.print(f"not of use here: {other.name}, {held / 1e9:.2f} GB ({why})")
        if needed > free:
            raise StorageError(
                f"The features need {needed / 1e9:.2f} GB in {folder}, and {free / 1e9:.2f} GB are free "
                f"there. Make room (what is not in use in {folder.parent} may go), put data.folder on "
                "another disk, train on fewer rows (data.max_train_rows), bound what stands there "
                "(trainer.features_gb), or set trainer.features=online."
            )


def open_store(
    folder: Path,
    target: Target,
    rows: Sequence[TokenRow],
    taps: tuple[int, ...],
    tokens: int,
    console: Console,
) -> Store:
    """The rows' store below `folder`, captured `tokens` padded tokens at a time. Raises `StorageError` if
    something else lies where it should be."""
    what = contents(target, rows, taps)
    store = folder / key(what)
    if differs := differing(store, what):
        raise StorageError(
            f"The features in {store} are of another {' and another '.join(differs)} than asked for, says "
            f"their {MANIFEST}: the folder was moved there. {remove(store)}"
        )
    sizes = [row_bytes(target, row, len(taps)) for row in rows]
    return Store(store, target, rows, taps, tokens, console, what, sizes, split(sizes, SHARD_BYTES))


def cached(store: Store) -> Cached:
    """All of the store's rows: what is missing is computed first, after saying how much disk that takes.

    Raises `StorageError` if there is less and for shards that are not what they should be, `TargetError` for
    too many rows with features that are not finite.
    """
    shards = store.standing()
    missing = [i for i in range(len(store.parts)) if i not in shards]
    if missing:
        store.announce(sum(store.sizes[n] for i in missing for n in store.parts[i]))
    store.describe()
    store.capture(missing, unusable(shards.values()))
    shards |= {i: store.shard(i) for i in missing}
    if bad := unusable(shards.values()):
        refuse_many(bad, len(store.rows), store.target)
        store.console.print(
            f"{bad} of {len(store.rows)} rows left out: their features are not finite", style="yellow"
        )
    return Cached(store, shards)


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


def opened(store: Store, i: int) -> Shard | None:
    """Shard i; None where it is to be computed. Raises `StorageError` for one that is not these rows'."""
    path = shard_file(store.folder, i)
    try:
        return store.shard(i)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}. {remove(path)}") from error
    except SafetensorError as error:
        store.console.print(f"{path} is cut off or damaged and is made again: {error}", style="yellow")
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
    what = {
        "version": VERSION,
        "rows": rows_digest(rows),
        "target": target.fingerprint(),
        "taps": list(taps),
        "dtype": str(target.dtype),
    }
    return what if target.quantize is None else what | {"quantisation": target.quantize.value}


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
        asked, said = ({"quantisation": None, **one} for one in (what, found))
        return [name for name in asked if said[name] != asked[name]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def shard_bytes(store: Path) -> int:
    return sum(file.stat().st_size for file in store.glob("shard_*") if file.is_file())


def shard_file(store: Path, i: int) -> Path:
    return store / f"shard_{i:05d}.safetensors"


def remove(path: Path) -> str:
    return f"Remove {path} and run again: what is missing is computed anew."
