"""Rows appended, kept, moved and dropped; and a real model on this cache as on Hugging Face's own."""

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


def held(cache: KVCache, layer: int = 0) -> list[float]:
    keys, _ = cache.rows[layer].buffers()
    return keys[0, 0, : cache.length, 0].tolist()


def filled(*values: float, capacity: int = 8) -> KVCache:
    cache = KVCache(capacity)
    for layer in range(2):
        cache.update(rows(*values), rows(*values), layer)
    return cache


def test_update_appends_and_returns_all_rows() -> None:
    cache = filled(1, 2)
    keys, values = cache.update(rows(3), rows(4), 0)
    assert keys[0, :, :, 0].tolist() == [[1, 2, 3], [-1, -2, -3]]
    assert values[0, 0, :, 0].tolist() == [1, 2, 4]


def test_growing_keeps_the_rows() -> None:
    cache = filled(1, 2, capacity=2)
    cache.update(rows(3, 4, 5, 6, 7), rows(3, 4, 5, 6, 7), 0)
    assert held(cache) == [1, 2, 3, 4, 5, 6, 7]
    assert cache.rows[0].capacity == 7
    cache.update(rows(8), rows(8), 0)
    assert cache.rows[0].capacity == 14


def test_chain_commits_by_counting() -> None:
    cache = filled(1, 2, 3, 4, 5)
    before = cache.rows[1].keys
    cache.commit(2, (0, 1))
    assert cache.length == 4
    assert held(cache, layer=1) == [1, 2, 3, 4]
    assert cache.rows[1].keys is before


def test_path_moves_its_rows_together() -> None:
    # Rows 3 to 8 are nodes 0 to 5 of a tree; the path 0, 2, 3, 5 comes to lie behind rows 1 and 2.
    cache = filled(1, 2, 3, 4, 5, 6, 7, 8)
    cache.commit(2, (0, 2, 3, 5))
    assert held(cache) == held(cache, layer=1) == [1, 2, 3, 5, 6, 8]


def test_empty_path_drops_rows() -> None:
    cache = filled(1, 2, 3)
    cache.commit(1, ())
    assert held(cache) == [1]
    cache.crop(-1)
    assert cache.length == 0


def test_path_beyond_the_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="3 rows"):
        filled(1, 2, 3).commit(2, (0, 1))


def test_model_runs_as_on_hugging_faces_cache(target: Target) -> None:
    ids = torch.tensor([[5, 9, 3, 7, 1]])
    ours, theirs = KVCache(capacity=3), DynamicCache(config=target.model.config)
    for part in (ids[:, :2], ids[:, 2:4], ids[:, 4:]):  # the second part meets a cache that must grow
        ours_out = target.forward(part, cache=ours).logits
        assert torch.equal(ours_out, target.forward(part, cache=theirs).logits)  # pyright: ignore[reportArgumentType]
    assert ours.get_seq_length() == ours.length == 5


def test_draft_attends_as_without_a_cache(target: Target, draft: Eagle3) -> None:
    hidden = torch.randn(1, 6, target.hidden_size, generator=torch.Generator().manual_seed(0))
    tokens, positions = torch.tensor([[5, 9, 3, 7, 1, 2]]), torch.arange(6)[None]
    whole = draft(hidden, tokens, positions)
    cache = DraftCache(capacity=2)
    parts = [
        draft(hidden[:, part], tokens[:, part], positions[:, part], cache.attend)
        for part in (slice(0, 2), slice(2, 5), slice(5, 6))  # a first, a further and a single row
    ]
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-5
