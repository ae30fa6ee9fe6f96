"""Rows appended, kept, moved and dropped, per slot; and a real model on this cache as on Hugging Face's
own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from decoding.cache import DraftCache, KVCache
from models.eagle3 import Eagle3
from models.target import Target


def rows(*values: float) -> Tensor:
    """K/V rows [1, 2, n, 1]: `values` in head 0 and their negatives in head 1."""
    row = torch.tensor(values)[None, None, :, None]
    return torch.cat([row, -row], dim=1)


def held(cache: KVCache, slot: int = 0, layer: int = 0) -> list[float]:
    assert cache.keys is not None
    return cache.keys[layer, slot, 0, : cache.lengths[slot], 0].tolist()


def append(cache: KVCache, slots: list[int], *values: list[float]) -> tuple[Tensor, int]:
    """Appends `values[i]` to `slots[i]` in both layers: (what layer 1 attends to, the extent)."""
    extent = cache.aim(slots, len(values[0]))
    new = torch.cat([rows(*row) for row in values])
    cache.update(new, new, 0)
    return cache.update(new, new, 1)[0], extent


def filled(*values: float, capacity: int = 8) -> KVCache:
    cache = KVCache(2, capacity)
    cache.allocate()
    append(cache, [0], list(values))
    return cache


def test_update_appends_and_returns_all_rows() -> None:
    cache = filled(1, 2)
    keys, extent = append(cache, [0], [3])
    assert extent == 3
    assert keys[0, :, :, 0].tolist() == [[1, 2, 3], [-1, -2, -3]]


def test_growing_keeps_the_rows() -> None:
    cache = filled(1, 2, capacity=2)
    append(cache, [0], [3, 4, 5, 6, 7])
    assert held(cache) == [1, 2, 3, 4, 5, 6, 7]
    assert cache.keys is not None
    assert cache.keys.shape[3] == 7
    append(cache, [0], [8])
    assert cache.keys.shape[3] == 14


def test_chain_commits_by_counting() -> None:
    cache = filled(1, 2, 3, 4, 5)
    before = cache.keys
    cache.commit(0, 2, (0, 1))
    assert held(cache, layer=1) == [1, 2, 3, 4]
    assert cache.keys is before


def test_path_moves_its_rows_together() -> None:
    # Rows 3 to 8 are nodes 0 to 5 of a tree; the path 0, 2, 3, 5 comes to lie behind rows 1 and 2.
    cache = filled(1, 2, 3, 4, 5, 6, 7, 8)
    cache.commit(0, 2, (0, 2, 3, 5))
    assert held(cache) == held(cache, layer=1) == [1, 2, 3, 5, 6, 8]


def test_empty_path_drops_rows() -> None:
    cache = filled(1, 2, 3)
    cache.commit(0, 1)
    assert held(cache) == [1]


def test_path_beyond_the_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="3 rows"):
        filled(1, 2, 3).commit(0, 2, (0, 1))


def test_slots_keep_lengths_of_their_own() -> None:
    cache = filled(1, 2, 3)
    assert cache.allocate() == 1
    append(cache, [1], [10])
    keys, extent = append(cache, [0, 1], [4, 5], [11, 12])
    assert extent == 5
    assert keys[0, 0, :, 0].tolist() == [1, 2, 3, 4, 5]
    assert keys[1, 0, :, 0].tolist()[:3] == [10, 11, 12]
    cache.commit_all([(0, 3, (0,)), (1, 1, (1,))])
    assert held(cache, 0) == [1, 2, 3, 4]
    assert held(cache, 1) == held(cache, 1, layer=1) == [10, 12]


def test_slots_that_do_not_lie_together() -> None:
    cache = filled(1, 2)
    for slot in (1, 2):
        cache.allocate()
        append(cache, [slot], [10.0 * slot])
    keys, _ = append(cache, [0, 2], [3], [21])
    assert keys[0, 0, :, 0].tolist() == [1, 2, 3]
    assert keys[1, 0, :2, 0].tolist() == [20, 21]
    assert held(cache, 1) == [10]


def test_freed_slots_are_taken_again_and_left_ones_move() -> None:
    cache = filled(1, 2)
    cache.allocate()
    append(cache, [1], [10, 11, 12])
    cache.release(0)
    cache.relocate(1, 0)
    assert held(cache, 0) == held(cache, 0, layer=1) == [10, 11, 12]
    assert cache.free == [1]
    assert cache.allocate() == 1
    assert cache.lengths == [3, 0]


def test_model_runs_as_on_hugging_faces_cache(target: Target) -> None:
    ids = torch.tensor([[5, 9, 3, 7, 1]])
    ours, theirs = KVCache(target.num_layers, capacity=3), DynamicCache(config=target.model.config)
    for part in (ids[:, :2], ids[:, 2:4], ids[:, 4:]):  # the second part meets a cache that must grow
        ours_out = target.forward(part, cache=ours).logits
        assert torch.equal(ours_out, target.forward(part, cache=theirs).logits)  # pyright: ignore[reportArgumentType]
    assert ours.get_seq_length() == ours.lengths[0] == 5


def test_draft_attends_as_without_a_cache(target: Target, draft: Eagle3) -> None:
    hidden = torch.randn(1, 6, target.hidden_size, generator=torch.Generator().manual_seed(0))
    tokens, positions = torch.tensor([[5, 9, 3, 7, 1, 2]]), torch.arange(6)[None]
    whole = draft(hidden, tokens, positions)
    cache = DraftCache(1, capacity=2)
    parts = [
        draft(hidden[:, part], tokens[:, part], positions[:, part], cache.attend)
        for part in (slice(0, 2), slice(2, 5), slice(5, 6))  # a first, a further and a single row
    ]
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-5
