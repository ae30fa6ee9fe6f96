from __future__ import annotations

import importlib.util
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from rich.console import Console

from configs.errors import StorageError, TargetError
from configs.schema import Dtype, Quantize, TargetConfig
from data.tokens import TokenRow
from models.target import Target
from tests.conftest import tiny_target
from tests.train.conftest import many_rows, poisoned
from train import store
from train.batches import Batch
from train.features import Online, row_bytes
from train.store import Cached, cached, contents, open_store, split

ROOT = Path(__file__).resolve().parents[2]
TAPS = (1, 3)
ROWS = [
    TokenRow("a", "", [5, 6, 7, 8, 9], [0, 0, 1, 1, 1]),
    TokenRow("b", "", [10, 11, 12], [0, 1, 1]),
    TokenRow("c", "", [20, 21, 22, 23, 24, 25, 26], [0, 1, 0, 0, 0, 1, 1]),
]


def key(target: Target, rows: list[TokenRow], taps: tuple[int, ...]) -> str:
    return store.key(contents(target, rows, taps))


class Said(Console):
    """A console whose text can be read."""

    def __init__(self) -> None:
        self.written = io.StringIO()
        super().__init__(file=self.written, width=1000)

    def __str__(self) -> str:
        return self.written.getvalue()


def from_disk(
    folder: Path,
    target: Target,
    rows: list[TokenRow] = ROWS,
    tokens: int = 64,
    console: Console | None = None,
    taps: tuple[int, ...] = TAPS,
) -> Cached:
    return cached(open_store(folder, target, rows, taps, tokens, console or Said()))


def assert_same(a: Batch, b: Batch) -> None:
    for name, value in vars(a).items():
        torch.testing.assert_close(value, getattr(b, name), rtol=1e-5, atol=1e-5, msg=name)


def test_stored_and_online_and_any_batching_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target()
    rows = [TokenRow(str(i), "", [i + 5] * (i + 3), [0] + [1] * (i + 2)) for i in range(8)]
    calls = counted(monkeypatch)
    online = Online(target, rows, TAPS).batch(range(8))

    # Rows are padded to 64 tokens: one of them, and all eight, to a forward.
    assert_same(online, from_disk(tmp_path / "1", target, rows, tokens=64).batch(range(8)))
    assert calls() == 8
    assert_same(online, from_disk(tmp_path / "8", target, rows, tokens=8 * 64).batch(range(8)))
    assert calls() == 9


def test_bfloat16_stays_bfloat16_on_disk(tmp_path: Path) -> None:
    target = tiny_target(dtype=torch.bfloat16)
    batch = from_disk(tmp_path, target).batch([0, 1, 2])

    assert (batch.taps.dtype, batch.hidden.dtype, batch.lse.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )
    assert torch.equal(batch.taps, Online(target, ROWS, TAPS).batch([0, 1, 2]).taps)


def test_what_is_read_ahead_is_what_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = from_disk(tmp_path, tiny_target())
    plain = [made.batch([0, 2]), made.batch([1])]
    read: list[int] = []
    features = store.Shard.features
    monkeypatch.setattr(
        store.Shard, "features", lambda shard, n, row: read.append(n) or features(shard, n, row)
    )

    made.ahead([[0, 2], [1]])
    found = [made.batch([0, 2]), made.batch([1])]
    assert read == [0, 2, 1]  # once each
    assert_same(found[0], plain[0])
    assert_same(found[1], plain[1])
    made.ahead([[0], [1]])
    made.ahead([[2]])
    made.batch([2])  # after those announced before, which are forgotten
    read.clear()
    made.batch([1])
    assert read == [1]


def test_shards_are_consecutive_and_within_the_limit() -> None:
    assert split([4, 4, 4, 9, 1], limit=8) == [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]


def test_bytes_of_a_row_are_pinned_since_they_end_shards() -> None:
    # Five tokens: an id of 4 bytes and two taps of 32 numbers of 2 bytes each. Three of them taught: a state,
    # a log-sum-exp and an argmax of 4 bytes each.
    target = tiny_target(dtype=torch.bfloat16)
    assert target.hidden_size == 32
    assert row_bytes(target, ROWS[0], taps=2) == 5 * (4 + 2 * 32 * 2) + 3 * (32 * 2 + 4 + 4)


def counted(monkeypatch: pytest.MonkeyPatch, interrupt_at: int | None = None) -> Callable[[], int]:
    """Counts forwards of the target; the `interrupt_at`-th is a kill."""
    calls: list[int] = []
    original = store.compute

    def compute(target: Target, rows: list[TokenRow], taps: tuple[int, ...]) -> Any:
        if len(calls) + 1 == interrupt_at:
            raise KeyboardInterrupt
        calls.append(len(rows))
        return original(target, rows, taps)

    monkeypatch.setattr(store, "compute", compute)
    return lambda: len(calls)


def test_an_interrupted_capture_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    monkeypatch.setattr(store, "SHARD_BYTES", 1)  # a row to a shard
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


def test_a_shard_that_is_cut_off_is_named_and_made_again(tmp_path: Path) -> None:
    target, console = tiny_target(), Said()
    from_disk(tmp_path, target)
    (shard,) = tmp_path.glob("*/shard_*")
    shard.write_bytes(shard.read_bytes()[:-10])

    batch = from_disk(tmp_path, target, console=console).batch([0, 1])
    assert f"{shard} is cut off or damaged and is made again" in str(console)
    assert_same(batch, Online(target, ROWS, TAPS).batch([0, 1]))


@pytest.mark.parametrize("ahead", [False, True])
def test_one_flipped_bit_is_refused_with_its_shard_and_row(tmp_path: Path, ahead: bool) -> None:
    target = tiny_target()
    from_disk(tmp_path, target)
    (shard,) = tmp_path.glob("*/shard_*")
    data = bytearray(shard.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    start, _ = json.loads(data[8:header])["taps"]["data_offsets"]
    # Rows have 5, 3 and 7 tokens, each of two taps of 4 bytes a number: this is within row 1.
    data[header + start + 6 * 2 * target.hidden_size * 4] ^= 1
    shard.write_bytes(data)

    made = from_disk(tmp_path, target)
    made.ahead([[1]] if ahead else [])
    with pytest.raises(StorageError, match=f"{shard} is damaged: the features of row 1 .*Remove {shard}"):
        made.batch([1])
    made.batch([0, 2])


def moved(tmp_path: Path, before: str, after: str) -> None:
    shutil.move(tmp_path / before, tmp_path / after)


def test_a_changed_target_has_a_store_of_its_own_and_is_refused_another_s(tmp_path: Path) -> None:
    one, other, console = tiny_target(), tiny_target(seed=1), Said()
    from_disk(tmp_path, one)
    from_disk(tmp_path, other, console=console)
    assert f"not of use here: {key(one, ROWS, TAPS)}, 0.00 GB (other target)" in str(console)

    shutil.rmtree(tmp_path / key(other, ROWS, TAPS))
    moved(tmp_path, key(one, ROWS, TAPS), key(other, ROWS, TAPS))
    with pytest.raises(StorageError, match=r"of another target than asked for, .*Remove"):
        from_disk(tmp_path, other)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_features_of_another_quantisation_are_refused_by_name(tmp_path: Path) -> None:
    saved = tiny_target()
    saved.model.save_pretrained(tmp_path / "target")
    saved.tokenizer.save_pretrained(tmp_path / "target")
    whole, quantised = (
        Target.load(
            TargetConfig(str(tmp_path / "target"), dtype=Dtype.float32, device="cpu", quantize=quantize)
        )
        for quantize in (None, Quantize.int8)
    )
    one, other = key(whole, ROWS, TAPS), key(quantised, ROWS, TAPS)
    from_disk(tmp_path / "features", quantised)
    with pytest.raises(StorageError, match="of another quantisation and another target than asked for"):
        moved(tmp_path / "features", other, one)
        from_disk(tmp_path / "features", whole)
    shutil.rmtree(tmp_path / "features")
    from_disk(tmp_path / "features", whole)
    moved(tmp_path / "features", one, other)
    with pytest.raises(StorageError, match="of another quantisation and another target than asked for"):
        from_disk(tmp_path / "features", quantised)


def test_a_shard_of_another_store_is_refused(tmp_path: Path) -> None:
    target = tiny_target()
    from_disk(tmp_path, target)
    from_disk(tmp_path, target, taps=(1, 2))
    source, destination = (tmp_path / key(target, ROWS, taps) for taps in (TAPS, (1, 2)))
    shutil.copy(source / "shard_00000.safetensors", destination)

    with pytest.raises(StorageError, match="belongs to another store"):
        from_disk(tmp_path, target, taps=(1, 2))


def test_a_shard_that_lacks_a_tensor_or_is_a_folder_is_refused(tmp_path: Path) -> None:
    target = tiny_target()
    from_disk(tmp_path, target)
    shard = tmp_path / key(target, ROWS, TAPS) / "shard_00000.safetensors"
    tensors = safetensors.torch.load_file(shard)
    del tensors["hidden"]
    safetensors.torch.save_file(tensors, shard)
    with pytest.raises(StorageError, match=r"lacks hidden: it is damaged\. Remove"):
        from_disk(tmp_path, target)
    shard.unlink()
    shard.mkdir()
    with pytest.raises(StorageError, match=r"cannot be read: .*Remove"):
        from_disk(tmp_path, target)


def test_features_of_other_tokens_are_refused(tmp_path: Path) -> None:
    target = tiny_target()
    from_disk(tmp_path, target)
    (shard,) = tmp_path.glob("*/shard_*")
    tensors = safetensors.torch.load_file(shard)
    tensors["tokens"][4] += 1
    safetensors.torch.save_file(tensors, shard)

    with pytest.raises(StorageError, match=f"{shard} holds features of other tokens"):
        from_disk(tmp_path, target)


def test_shards_from_before_there_were_checksums_and_manifests_are_read(tmp_path: Path) -> None:
    target = tiny_target()
    from_disk(tmp_path, target)
    (shard,) = tmp_path.glob("*/shard_*")
    tensors = safetensors.torch.load_file(shard)
    del tensors["checksum"]
    safetensors.torch.save_file(tensors, shard, metadata={"format": "pt"})
    (shard.parent / "manifest.json").unlink()

    assert_same(from_disk(tmp_path, target).batch([0, 1]), Online(target, ROWS, TAPS).batch([0, 1]))
    assert (shard.parent / "manifest.json").exists()


def test_the_manifest_says_what_the_features_are_of(tmp_path: Path) -> None:
    target = tiny_target()
    from_disk(tmp_path, target)
    found = json.loads((tmp_path / key(target, ROWS, TAPS) / "manifest.json").read_text())

    assert (found["target"], found["tokenizer"]) == (target.fingerprint(), target.tokenizer_fingerprint())
    assert (found["taps"], found["dtype"]) == ([1, 3], "torch.float32")
    assert (found["row_count"], found["token_count"]) == (3, 15)
    assert found["layers"].startswith("indices of HF hidden_states")


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
    console = Said()
    with pytest.raises(StorageError, match=r"need .* GB in .*trainer.features=online"):
        cached(open_store(tmp_path, tiny_target(), ROWS, TAPS, 64, console))

    assert "GB to write" in str(console)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_disk_that_fills_up_stops_the_capture_and_room_resumes_it(tmp_path: Path) -> None:
    mounted = f"mount -t tmpfs -o size=256k tmpfs {tmp_path}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mounted], capture_output=True).returncode != 0:
        pytest.skip("a small disk cannot be mounted here")
    capture = f"{mounted} && {sys.executable} -m tests.train.small_disk {tmp_path}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", capture], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_disk_needed_is_what_is_written(tmp_path: Path) -> None:
    target = tiny_target()
    from_disk(tmp_path, target)
    (shard,) = tmp_path.glob("*/shard_*")
    needed = sum(row_bytes(target, row, len(TAPS)) for row in ROWS)

    # Beside the tensors there is a header of some hundred bytes.
    assert needed <= shard.stat().st_size < needed + 1000


def test_rows_that_are_not_finite_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(monkeypatch, store, token=63)
    console = Said()
    made = cached(open_store(tmp_path, tiny_target(), many_rows(bad=2), TAPS, 640, console))

    assert made.usable() == list(range(2, 200))
    assert "2 of 200 rows left out" in str(console)


def test_more_than_one_in_a_hundred_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned(monkeypatch, store, token=63)
    with pytest.raises(TargetError, match="3 of 200 rows"):
        cached(open_store(tmp_path, tiny_target(), many_rows(bad=3), TAPS, 640, Said()))
    assert not list(tmp_path.glob("*/shard_*"))
