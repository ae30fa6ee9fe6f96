"""The key/value cache: buffers allocated ahead, a count of the rows that hold, a commit that keeps one path.

A forward appends the rows of all nodes of a tree; `commit` keeps the accepted ones. Dropping rows moves a
counter and touches no memory, and a chain's accepted rows already lie where they belong. Rows that move need
no new rotation, since a node's position is its depth. Buffers are [B, H, S, D]: a batch fits once its rows
have lengths of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

FIRST_ROWS = 256  # allocated when no capacity was asked for


class Rows(DynamicLayer):
    """One layer's K/V rows: `keys` and `values` [B, H, S, D], of which the first `length` rows count."""

    def __init__(self, capacity: int = FIRST_ROWS) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends rows [B, H, T, D] and returns views of all rows that count, these included."""
        start, end = self.length, self.length + key_states.shape[-2]
        if self.keys is None or end > self.keys.shape[-2]:
            self.grow(end, key_states, value_states)
        keys, values = self.buffers()
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self.length = end
        return keys[:, :, :end], values[:, :, :end]

    def grow(self, needed: int, key_states: Tensor, value_states: Tensor) -> None:
        """Makes room for `needed` rows; at least doubles, so that an appended row costs constant time."""
        old = self.buffers() if self.is_initialized else ()
        self.capacity = max(needed, 2 * self.capacity if old else self.capacity)
        self.keys, self.values = (
            rows.new_empty(*rows.shape[:2], self.capacity, rows.shape[-1])
            for rows in (key_states, value_states)
        )
        self.is_initialized = True
        for new, kept in zip(self.buffers(), old, strict=False):
            new[:, :, : self.length] = kept[:, :, : self.length]

    def buffers(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def move(self, source: Tensor, start: int) -> None:
        """Copies the rows `source` [n] to start, start + 1, ...; through a copy, as they may overlap."""
        for buffer in self.buffers():
            buffer[:, :, start : start + len(source)] = buffer.index_select(2, source.to(buffer.device))

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Hugging Face's meaning: a negative number removes that many rows from the end."""
        self.length = max(0, self.length - abs(tokens_to_remove))

    def reset(self) -> None:
        self.length = 0


class KVCache(Cache):
    """A Hugging Face `Cache` for one sequence; `capacity` is the number of rows to allocate at first."""

    def __init__(self, capacity: int = FIRST_ROWS) -> None:
        super().__init__(layers=[])
        self.capacity = capacity

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        while len(self.rows) <= layer_idx:
            self.rows.append(Rows(self.capacity))
        return self.rows[layer_idx].update(key_states, value_states)

    @property
    def rows(self) -> list[Rows]:
        return cast("list[Rows]", self.layers)

    @property
    def length(self) -> int:
        """Rows that count, in every layer."""
        return self.rows[0].length if self.rows else 0

    def commit(self, start: int, path: Sequence[int]) -> None:
        """Keeps the first `start` rows, then rows start + path[0], start + path[1], ... (ascending).

        Copies the rows that move, none for a chain. An empty path only drops rows.
        """
        if max([start, *(start + node + 1 for node in path)]) > self.length:
            raise ValueError(f"a cache of {self.length} rows has no path {tuple(path)} from row {start}")
        stays = next((i for i, node in enumerate(path) if node != i), len(path))
        if stays < len(path):
            source = torch.tensor(path[stays:], dtype=torch.long) + start
            for rows in self.rows:
                rows.move(source, start + stays)
        for rows in self.rows:
            rows.length = start + len(path)


class DraftCache(KVCache):
    """The cache of a draft network that is told from outside how to attend."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Appends k, v [B, Hkv, T, D] to `layer`, then lets q [B, H, T, D] attend, causally: [B, H, T, D]."""
        keys, values = self.update(k, v, layer)
        new, total = q.shape[2], keys.shape[2]
        grouped = q.shape[1] != k.shape[1]
        if new == 1 or new == total:
            return F.scaled_dot_product_attention(q, keys, values, is_causal=new > 1, enable_gqa=grouped)
        mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril_(total - new)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=grouped)
