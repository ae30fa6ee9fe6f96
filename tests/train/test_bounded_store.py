"""Features of which only a part stands on the disk at a time."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from configs.compose import compose
from configs.errors import ConfigError, StorageError, TargetError
from data.tokens import TokenRow
from models.target import Target
from tests.conftest import tiny_target
from tests.train.bounded_run import SHARD, SHARDS
from tests.train.conftest import many_rows, poisoned, write_workspace
from tests.train.test_loop import losses, train
from tests.train.test_ranks import Job, in_two_processes
from tests.train.test_ranks import losses as losses_below
from tests.train.test_resume import finished, lines, runs, start, stop_after
from train import store
from train.features import row_bytes
from train.ranks import Ranks
from train.store import Bounded, cached, open_store

TAPS = (1, 3)
ROWS = [TokenRow(str(i), "", [5 + i, 6, 7, 8], [0, 1, 1, 1]) for i in range(6)]
TWO = f"trainer.features_gb={2 * SHARD / 1e9}"  # of a run's eight shards


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SHARD_BYTES", 1)  # a row to a shard


def held(folder: Path) -> int:
    """Bytes of all shards below, those being written too."""
    return sum(file.stat().st_size for file in folder.rglob("*shard_*"))


def standing(folder: Path) -> list[int]:
    return sorted(int(file.stem[-5:]) for file in folder.glob("*/shard_*"))


def size(target: Target, rows: list[TokenRow] = ROWS) -> int:
    """Of a shard with the first row alone."""
    return row_bytes(target, rows[0], len(TAPS)) + 1 + 8 + store.HEADER_BYTES


def made(folder: Path, target: Target, shards: float, rows: list[TokenRow] = ROWS) -> Bounded:
    limit = int(shards * size(target, rows))
    return Bounded(open_store(folder, target, rows, TAPS, 64, Console(quiet=True)), limit, Ranks())


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What lay in the folder whenever a shard was about to get its name."""
    seen: list[int] = []
    original = os.replace

    def replace(source: Path, destination: Path) -> None:
        if "shard_" in Path(destination).name:
            seen.append(held(Path(destination).parent))
        original(source, destination)

    monkeypatch.setattr(os, "replace", replace)
    yield seen


@pytest.mark.usefixtures("row_by_row")
def test_what_is_wanted_is_there_and_what_was_wanted_longest_ago_goes(
    tmp_path: Path, watched: list[int]
) -> None:
    target = tiny_target()
    features = made(tmp_path, target, shards=2.5)
    assert standing(tmp_path) == []

    for wanted, there in [
        ([0, 1], [0, 1]),
        ([0], [0, 1]),
        ([2], [0, 2]),  # 1 was wanted before 0
        ([3, 4], [3, 4]),
        ([3, 2], [2, 3]),
    ]:
        features.want(wanted)
        assert standing(tmp_path) == there
        features.batch(wanted)
    assert len(watched) == 6 and max(watched) <= 2.5 * size(target)


@pytest.mark.usefixtures("row_by_row")
def test_batches_are_those_of_a_store_without_a_bound_also_read_ahead_and_captured_again(
    tmp_path: Path,
) -> None:
    target = tiny_target()
    whole = cached(open_store(tmp_path / "whole", target, ROWS, TAPS, 64, Console(quiet=True)))
    features = made(tmp_path / "bounded", target, shards=2)

    for numbers in ([0, 1], [2, 3], [1, 0]):
        features.want(numbers)
        features.ahead([numbers, [4]])  # 4 is not there: it is read when it was wanted
        for name, value in vars(features.batch(numbers)).items():
            assert torch.equal(value, getattr(whole.batch(numbers), name)), name


@pytest.mark.usefixtures("row_by_row")
def test_chapters_are_what_the_bound_holds_and_drawn_anew_for_each_epoch(tmp_path: Path) -> None:
    target = tiny_target()
    features = made(tmp_path, target, shards=2.5)
    first, second = (features.chapters([0, 1, 2, 4, 5], seed=0, epoch=epoch) for epoch in (0, 1))

    # Six shards of a row each, two to a chapter; row 3 is not asked for, and 4 and 5 have places 3 and 4.
    assert sorted(map(len, first)) == [1, 2, 2]
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == [0, 1, 2, 3, 4]
    assert first != second
    assert first == features.chapters([0, 1, 2, 4, 5], seed=0, epoch=0)
    assert made(tmp_path, target, shards=6).chapters([0, 1, 2, 4, 5], 0, 0) == [[0, 1, 2, 3, 4]]


@pytest.mark.usefixtures("row_by_row")
def test_a_store_that_stands_whole_is_cut_down_and_remains_of_a_kill_go(tmp_path: Path) -> None:
    target = tiny_target()
    cached(open_store(tmp_path, target, ROWS, TAPS, 64, Console(quiet=True)))
    (folder,) = tmp_path.iterdir()
    (folder / ".shard_00001.safetensors.123.tmp").write_bytes(b"half")

    made(tmp_path, target, shards=2.5).want([4])
    assert held(tmp_path) <= 2.5 * size(target) and not list(folder.glob(".shard_*"))
    assert standing(tmp_path) == [4, 5]  # the others were wanted no later, and come first


@pytest.mark.usefixtures("row_by_row")
def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    target = tiny_target()
    with pytest.raises(StorageError, match=r"features_gb=.* does not hold the largest shard"):
        made(tmp_path, target, shards=0.9)

    one, other = made(tmp_path, target, shards=2), made(tmp_path, target, shards=3)
    one.want([0])
    with pytest.raises(StorageError, match="Another run removes features from"):
        other.want([1])
    one.close()
    other.want([1])

    with pytest.raises(ConfigError, match=r"features_gb=1.0 bounds features on the disk"):
        compose(["+experiment=smollm2_cpu", "trainer.features_gb=1", "trainer.features=online"])
    with pytest.raises(ConfigError, match=r"trainer.features_gb=0.0: must be in \(0, inf\)"):
        compose(["+experiment=smollm2_cpu", "trainer.features_gb=0"])


def test_rows_that_are_not_finite_teach_nothing_and_too_many_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SHARD_BYTES", 100 * row_bytes(tiny_target(), many_rows(0)[0], len(TAPS)))
    poisoned(monkeypatch, store, token=63)
    target, shards = tiny_target(), 150
    features = made(tmp_path / "2", target, shards, many_rows(bad=2))
    features.want([1, 2])
    batch = features.batch([1, 2])
    assert features.usable() == list(range(200))
    assert batch.mask.sum(1).tolist() == [0, 3] and batch.taps.isfinite().all()

    with pytest.raises(TargetError, match="3 of 200 rows"):
        made(tmp_path / "3", target, shards, many_rows(bad=3)).want([150, 1])


def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each shard that is captured."""
    counts: list[int] = []
    original = store.captured
    monkeypatch.setattr(store, "captured", lambda *args: counts.append(len(args[1])) or original(*args))
    return counts


def test_a_run_keeps_to_its_bound_and_learns_what_it_would_without_evictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: list[int]
) -> None:
    monkeypatch.setattr(store, "SHARD_BYTES", SHARD - store.HEADER_BYTES)
    overrides = [*write_workspace(tmp_path / "one"), "trainer.eval_every=0"]
    counts = captures(monkeypatch)
    run, said = train(overrides, TWO)
    assert max(watched) <= 2 * SHARD and held(tmp_path / "one" / "data") <= 2 * SHARD
    # Two epochs of eight shards with four rows each; at most two stand when the second begins.
    assert set(counts) == {4} and len(counts) >= 2 * SHARDS - 2
    assert "at most 0.00 GB of 0.00 GB on the disk at a time; an epoch has about 4 chapters" in said

    counts.clear()
    kept = [*write_workspace(tmp_path / "two"), "trainer.eval_every=0"]
    with monkeypatch.context() as patch:
        patch.setattr(Bounded, "_surplus", lambda *args: [])
        unevicted, _ = train(kept, TWO)
    assert len(counts) == SHARDS
    assert losses(run) == losses(unevicted)

    # A bound that holds everything changes nothing.
    plain, _ = train(kept, "trainer.resume=never")
    wide, _ = train(kept, f"trainer.features_gb={SHARDS * SHARD / 1e9}")
    assert losses(wide) == losses(plain) != losses(run)


def test_killed_and_resumed_is_bit_equal(tmp_path: Path) -> None:
    module = "tests.train.bounded_run"
    calm = start([*write_workspace(tmp_path / "calm"), TWO], module=module)
    overrides, below = [*write_workspace(tmp_path / "killed"), TWO], tmp_path / "killed" / "runs"
    killed = start(overrides, module=module)
    stop_after(killed, below, 7, signal.SIGKILL)  # the last chapter of the first epoch
    killed.communicate()

    assert "going on from step" in finished(start(overrides, module=module))
    finished(calm)
    (run,), (reference,) = runs(below), runs(tmp_path / "calm" / "runs")
    assert lines(run) == lines(reference)
    assert held(tmp_path / "killed" / "data") <= 2 * SHARD


class SmallShards(Job):
    def run(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "SHARD_BYTES", SHARD - store.HEADER_BYTES)
            super().run()


@pytest.mark.parametrize("parts", [1, 2])
def test_two_processes_share_a_bounded_store(tmp_path: Path, parts: int) -> None:
    more = [TWO, "trainer.batch_tokens=128", "trainer.accumulation=2", "trainer.autocast=float32"]
    overrides = [*write_workspace(tmp_path), *more, "trainer.epochs=1"]
    SmallShards([*overrides, f"runs={tmp_path / 'alone'}"]).run()
    shutil.rmtree(tmp_path / "data" / "features")
    shared = ["trainer.strategy=ddp", f"trainer.target_parallel={parts}", f"runs={tmp_path / 'two'}"]
    in_two_processes([SmallShards([*overrides, *shared])])

    assert losses_below(tmp_path / "two") == pytest.approx(losses_below(tmp_path / "alone"), rel=1e-5)
    assert 0 < held(tmp_path / "data") <= 2 * SHARD
