"""The key/value cache of a batch: rows of its own length per sequence, and a commit that keeps one path.

A forward appends the rows of a tree's nodes behind what its slot holds; `commit` keeps the accepted ones.
Dropping rows lowers a count and touches no memory, a chain's accepted rows already lie where they belong, and
rows that move need no new rotation, since a node's position is its depth. Nothing is ever shifted, whatever
the other slots of the batch do (2510.22876: batches that realign rows corrupt their text).

All layers lie in one tensor, so that a commit is one copy however many layers there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

FIRST_ROWS = 256  # allocated per slot when no capacity was asked for


class KVCache(Cache):
    """A Hugging Face `Cache` whose buffers are `keys` and `values` [layers, slots, H, capacity, D].

    A forward over some slots is announced by `aim`; one over a single slot that was not is aimed at slot 0.
    """

    def __init__(self, layers: int, capacity: int = FIRST_ROWS) -> None:
        super().__init__(layers=[])
        self.depth = layers
        self.capacity = capacity
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.lengths: list[int] = []  # rows that count, per slot
        self.free: list[int] = []
        self.aimed: Aim | None = None

    # Slots

    def allocate(self) -> int:
        """An empty slot, the lowest there is."""
        if self.free:
            slot = min(self.free)
            self.free.remove(slot)
        else:
            slot = len(self.lengths)
            self.lengths.append(0)
        self.lengths[slot] = 0
        return slot

    def release(self, slot: int) -> None:
        self.lengths[slot] = 0
        self.free.append(slot)

    # A forward

    def aim(self, slots: Sequence[int], new: int, reserve: int = 0, extent: int = 0) -> int:
        """The next forward appends `new` rows to each of `slots`: the number of columns its mask must have.

        reserve: capacity to have per slot, if more than needed now. extent: columns to have at least.
        """
        starts = [self.lengths[slot] for slot in slots]
        extent = max(extent, max(starts) + new)
        self.capacity = max(self.capacity, reserve)
        self.aimed = Aim(list(slots), starts, new, extent)
        if self.keys is not None:
            self.fit(self.keys, self.values, len(self.lengths), extent)
        return extent

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends rows [n, H, T, D] to the aimed slots; returns all that they attend to, [n, H, extent,
        D]."""
        if self.aimed is None:
            if not self.lengths:
                self.allocate()
            self.aim([0], key_states.shape[-2])
        aimed = self.aimed
        assert aimed is not None
        if self.keys is None:
            self.fit(key_states, value_states, len(self.lengths), aimed.extent)
        assert self.keys is not None
        assert self.values is not None
        held = self.keys[layer_idx], self.values[layer_idx]
        for buffer, rows in zip(held, (key_states, value_states), strict=True):
            aimed.write(buffer, rows)
        if layer_idx == self.depth - 1:
            self.grown()
        if aimed.extent == aimed.new:  # nothing came before: only the new rows are attended to
            return key_states, value_states
        return aimed.read(held[0]), aimed.read(held[1])

    def grown(self) -> None:
        """The rows that were aimed at are there."""
        assert self.aimed is not None
        for slot, start in zip(self.aimed.slots, self.aimed.starts, strict=True):
            self.lengths[slot] = start + self.aimed.new
        self.aimed = None

    def held(self) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """For a forward that writes its rows itself: of each layer the keys and the values [n, H, extent, D]
        of the aimed slots, which lie together, and where each row goes, long [n, new]."""
        aimed, keys, values = self.aimed, self.keys, self.values
        assert aimed is not None
        assert aimed.span is not None
        assert keys is not None
        assert values is not None
        parts = [list(buffer[:, aimed.span, :, : aimed.extent].unbind()) for buffer in (keys, values)]
        return parts[0], parts[1], aimed.rows(keys.device)

    def fit(self, keys: Tensor | None, values: Tensor | None, slots: int, rows: int) -> None:
        """Makes room; at least doubles in what is short, so that an appended row costs constant time.

        New room is zero: masked rows still enter attention with weight 0, and 0 times NaN would be NaN.
        """
        assert keys is not None
        assert values is not None
        has = (0, 0) if self.keys is None else (self.keys.shape[1], self.keys.shape[3])
        if slots <= has[0] and rows <= has[1]:
            return
        slots = has[0] if slots <= has[0] else max(slots, 2 * has[0])
        rows = has[1] if rows <= has[1] else max(rows, 2 * has[1], self.capacity)
        old = self.keys, self.values
        self.keys, self.values = (
            like.new_zeros(self.depth, slots, like.shape[-3], rows, like.shape[-1]) for like in (keys, values)
        )
        for new, before in zip((self.keys, self.values), old, strict=True):
            if before is not None:
                new[:, : has[0], :, : has[1]] = before

    # What is kept

    def commit(self, slot: int, start: int, path: Sequence[int] = ()) -> None:
        """Keeps the slot's first `start` rows, then rows start + path[0], start + path[1], ... (ascending).

        An empty path only drops rows.
        """
        self.commit_all([(slot, start, path)])

    def commit_all(self, paths: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """`commit` for several slots at once: (slot, start, path) each. One copy of the rows that move."""
        slots: list[int] = []
        source: list[int] = []
        target: list[int] = []
        for slot, start, path in paths:
            if max([start, *(start + node + 1 for node in path)]) > self.lengths[slot]:
                raise ValueError(
                    f"a slot of {self.lengths[slot]} rows has no path {tuple(path)} from row {start}"
                )
            for i, node in enumerate(path):
                if node != i:
                    slots.append(slot)
                    source.append(start + node)
                    target.append(start + i)
            self.lengths[slot] = start + len(path)
        if len(paths) == 1 and slots:
            self.close_up(slots[0], source, target[0])
        elif slots:
            self.move(slots, source, slots, target)

    def relocate(self, source: int, target: int) -> None:
        """Moves what slot `source` holds to slot `target`, and frees `source`."""
        rows = list(range(self.lengths[source]))
        if rows:
            self.move([source] * len(rows), rows, [target] * len(rows), rows)
        self.lengths[target] = len(rows)
        if target in self.free:
            self.free.remove(target)
        self.release(source)

    def close_up(self, slot: int, source: list[int], first: int) -> None:
        """Copies the slot's rows `source` to those from `first` on, in all layers."""
        for buffer in (self.keys, self.values):
            assert buffer is not None
            held = buffer[:, slot]
            held[:, :, first : first + len(source)] = held[:, :, source]

    def move(self, from_slots: list[int], source: list[int], to_slots: list[int], target: list[int]) -> None:
        """Copies single rows, in all layers; the right side is a copy, since rows may overlap."""
        for buffer in (self.keys, self.values):
            assert buffer is not None
            taken = buffer[:, from_slots, :, source]
            buffer[:, to_slots, :, target] = taken

    # What Hugging Face's models ask

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if self.aimed is not None:
            return self.aimed.extent - self.aimed.new
        return max(self.lengths, default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self.depth


class Aim:
    """Where a forward's rows go: `new` rows behind `starts` of `slots`."""

    def __init__(self, slots: list[int], starts: list[int], new: int, extent: int) -> None:
        self.slots, self.starts, self.new, self.extent = slots, starts, new, extent
        first, count = slots[0], len(slots)
        self.span = slice(first, first + count) if slots == list(range(first, first + count)) else None
        self.even = len(set(starts)) == 1
        self.where: Tensor | None = None  # of each row and head in a layer's buffer, seen as one list of rows

    def write(self, buffer: Tensor, rows: Tensor) -> None:
        """Puts rows [n, H, new, D] into a layer's buffer [slots, H, capacity, D]."""
        if self.span is not None and self.even:
            buffer[self.span, :, self.starts[0] : self.starts[0] + self.new] = rows
            return
        # index_copy_ over whole rows: assigning by two index tensors takes many times as long on a CPU.
        if self.where is None:
            _, heads, capacity, _ = buffer.shape
            slots = torch.tensor(self.slots, device=rows.device)
            first = (slots[:, None] * heads + torch.arange(heads, device=rows.device)) * capacity
            self.where = (first[:, :, None] + self.rows(rows.device)[:, None]).view(-1)
        buffer.view(-1, buffer.shape[-1]).index_copy_(0, self.where, rows.reshape(-1, rows.shape[-1]))

    def rows(self, device: torch.device) -> Tensor:
        """long [n, new]: where in its slot each row goes."""
        return torch.tensor(self.starts, device=device)[:, None] + torch.arange(self.new, device=device)

    def read(self, buffer: Tensor) -> Tensor:
        """[n, H, extent, D], a view where the slots lie together."""
        if self.span is not None:
            return buffer[self.span, :, : self.extent]
        return buffer[self.slots, :, : self.extent]


class DraftCache(KVCache):
    """The cache of a draft network that leaves attention to its caller: `attend` is what it is given."""

    def __init__(self, layers: int, capacity: int = FIRST_ROWS) -> None:
        super().__init__(layers, capacity)
        self.mask: Tensor | None = None  # bool [n, 1, T, extent] for the next forward; None: causal

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Appends k, v [n, Hkv, T, D] to `layer`, then lets q [n, H, T, D] attend: [n, H, T, D]."""
        keys, values = self.update(k, v, layer)
        new, total = q.shape[2], keys.shape[2]
        mask = self.mask
        if mask is None and 1 < new < total:
            mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril_(total - new)
        causal = mask is None and new > 1
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, keys, values, mask, is_causal=causal, enable_gqa=grouped)
