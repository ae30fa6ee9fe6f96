from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from configs.errors import StorageError, TargetError
from data.tokens import TokenRow
from models.target import Target
from tests.conftest import tiny_target
from train import features
from train.batches import Batch
from train.features import Cached, Online, cached, compute, key, split

TAPS = (1, 3)
ROWS = [
    TokenRow("a", "", [5, 6, 7, 8, 9], [0, 0, 1, 1, 1]),
    TokenRow("b", "", [10, 11, 12], [0, 1, 1]),
    TokenRow("c", "", [20, 21, 22, 23, 24, 25, 26], [0, 1, 0, 0, 0, 1, 1]),
]


def quiet() -> Console:
    return Console(file=io.StringIO())


def from_disk(folder: Path, target: Target, rows: list[TokenRow] = ROWS, tokens: int = 64) -> Cached:
    return cached(folder, target, rows, TAPS, tokens, quiet())


def test_features_are_the_target_s_own() -> None:
    target = tiny_target()
    (found,) = compute(target, ROWS[:1], TAPS)
    reference = target.model(torch.tensor([ROWS[0].input_ids]), output_hidden_states=True)
    logits = reference.logits[0]

    # m_2, m_3, m_4 are 1, so target rows 1, 2, 3 teach.
    assert found.rows.tolist() == [1, 2, 3]
    # The forward was padded, so its roundings differ.
    taps = torch.cat([reference.hidden_states[1][0], reference.hidden_states[3][0]], -1)
    torch.testing.assert_close(found.taps, taps, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target.lm_head(found.hidden), logits[1:4], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.lse, logits[1:4].logsumexp(-1), rtol=1e-4, atol=1e-4)
    assert found.argmax.tolist() == logits[1:4].argmax(-1).tolist()


def assert_same(a: Batch, b: Batch) -> None:
    for name, value in vars(a).items():
        torch.testing.assert_close(value, getattr(b, name), rtol=1e-5, atol=1e-5, msg=name)


def test_cached_and_online_and_any_batching_give_the_same(tmp_path: Path) -> None:
    target = tiny_target()
    online = Online(target, ROWS, TAPS).batch([2, 0])

    assert_same(online, from_disk(tmp_path / "wide", target, tokens=64).batch([2, 0]))
    assert_same(online, from_disk(tmp_path / "one by one", target, tokens=1).batch([2, 0]))
    assert online.teacher[0, :7].tolist() == [0, -1, -1, -1, 1, 2, -1]


def test_bfloat16_stays_bfloat16_on_disk(tmp_path: Path) -> None:
    target = tiny_target(dtype=torch.bfloat16)
    batch = from_disk(tmp_path, target).batch([0, 1, 2])

    assert (batch.taps.dtype, batch.hidden.dtype, batch.lse.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )
    assert torch.equal(batch.taps, Online(target, ROWS, TAPS).batch([0, 1, 2]).taps)


def test_shards_are_consecutive_and_within_the_limit() -> None:
    assert split([4, 4, 4, 9, 1], limit=8) == [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]


def counted(monkeypatch: pytest.MonkeyPatch, interrupt_at: int | None = None) -> Callable[[], int]:
    """Counts forwards of the target; the `interrupt_at`-th is a kill."""
    calls: list[int] = []
    original = features.compute

    def compute(target: Target, rows: list[TokenRow], taps: tuple[int, ...]) -> Any:
        if len(calls) + 1 == interrupt_at:
            raise KeyboardInterrupt
        calls.append(len(rows))
        return original(target, rows, taps)

    monkeypatch.setattr(features, "compute", compute)
    return lambda: len(calls)


def test_an_interrupted_cache_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    monkeypatch.setattr(features, "SHARD_BYTES", 1)  # a row to a shard
    with monkeypatch.context() as patch:
        counted(patch, interrupt_at=3)
        with pytest.raises(KeyboardInterrupt):
            from_disk(tmp_path, target)
    assert len(list(tmp_path.glob("*/shard_*"))) == 2

    with monkeypatch.context() as patch:
        calls = counted(patch)
        batch = from_disk(tmp_path, target).batch([0, 1, 2])
        assert calls() == 1
        from_disk(tmp_path, target)
        assert calls() == 1
    assert_same(batch, Online(target, ROWS, TAPS).batch([0, 1, 2]))
    assert not list(tmp_path.glob("*/.*"))


def test_a_truncated_shard_is_made_again(tmp_path: Path) -> None:
    target = tiny_target()
    from_disk(tmp_path, target)
    (shard,) = tmp_path.glob("*/shard_*")
    shard.write_bytes(shard.read_bytes()[:-10])

    assert_same(from_disk(tmp_path, target).batch([0, 1]), Online(target, ROWS, TAPS).batch([0, 1]))


def test_features_of_other_tokens_are_refused(tmp_path: Path) -> None:
    target = tiny_target()
    from_disk(tmp_path, target)
    others = [TokenRow("a", "", [5, 6, 7, 8, 10], [0, 0, 1, 1, 1]), *ROWS[1:]]
    shutil.move(tmp_path / key(target, ROWS, TAPS), tmp_path / key(target, others, TAPS))

    with pytest.raises(StorageError, match="other tokens"):
        from_disk(tmp_path, target, others)


def test_the_key_covers_whatever_the_features_depend_on() -> None:
    target = tiny_target()
    mask = [TokenRow("a", "", ROWS[0].input_ids, [0, 0, 0, 1, 1]), *ROWS[1:]]
    keys = [
        key(target, ROWS, TAPS),
        key(target, ROWS, (1, 2)),
        key(target, ROWS[:2], TAPS),
        key(target, mask, TAPS),
        key(tiny_target(seed=1), ROWS, TAPS),
        key(tiny_target(dtype=torch.bfloat16), ROWS, TAPS),
    ]

    assert len(set(keys)) == len(keys)


def test_too_little_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 100))  # pyright: ignore
    console = quiet()
    with pytest.raises(StorageError, match=r"need .* GB in .*trainer.features=online"):
        cached(tmp_path, tiny_target(), ROWS, TAPS, 64, console)

    assert "GB to write" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert not list(tmp_path.glob("*/shard_*"))


def test_disk_needed_is_what_is_written(tmp_path: Path) -> None:
    target = tiny_target()
    from_disk(tmp_path, target)
    (shard,) = tmp_path.glob("*/shard_*")
    needed = sum(features.row_bytes(target, row, len(TAPS)) for row in ROWS)

    # Beside the tensors there is a header of some hundred bytes.
    assert needed <= shard.stat().st_size < needed + 1000


def poisoned(target: Target, monkeypatch: pytest.MonkeyPatch, token: int) -> None:
    """Rows with `token` in them get a NaN."""
    original = features.compute

    def compute(target: Target, rows: list[TokenRow], taps: tuple[int, ...]) -> Any:
        found = original(target, rows, taps)
        for row, feature in zip(rows, found, strict=True):
            if token in row.input_ids:
                feature.taps[0, 0] = torch.nan
        return found

    monkeypatch.setattr(features, "compute", compute)


def many_rows(bad: int) -> list[TokenRow]:
    return [TokenRow(str(i), "", [63 if i < bad else 5, 6, 7, 8], [0, 1, 1, 1]) for i in range(200)]


def test_rows_that_are_not_finite_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target()
    poisoned(target, monkeypatch, token=63)
    console = quiet()
    made = cached(tmp_path, target, many_rows(bad=2), TAPS, 64, console)

    assert made.usable() == list(range(2, 200))
    assert "2 of 200 rows left out" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    batch = Online(target, many_rows(bad=2), TAPS).batch([1, 2])
    assert batch.mask.sum(1).tolist() == [0, 3]
    assert batch.taps.isfinite().all() and batch.teacher.max() == 2  # three rows are taught


def test_more_than_one_in_a_hundred_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    poisoned(target, monkeypatch, token=63)

    with pytest.raises(TargetError, match="3 of 200 rows"):
        cached(tmp_path, target, many_rows(bad=3), TAPS, 64, quiet())
    with pytest.raises(TargetError, match="3 of 200 rows"):
        Online(target, many_rows(bad=3), TAPS).batch([0, 1, 2, 3])
