"""The token tree that a round proposes, flat: parents stand before their children, node 0 is pending.

A chain is the tree in which every parent is the node before; plain decoding is the tree of one node. Node i
has the absolute position `start + depth[i]`, where `start` is the position of the pending token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class TokenTree:
    """Siblings stand in the order in which they were chosen, which is the order in which they are tried."""

    tokens: list[int]  # N ids, the pending one first
    parent: list[int]  # N nodes, -1 for the root

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parent) or not self.parent or self.parent[0] != -1:
            raise ValueError(f"a tree needs a root and one parent per token: {self.tokens}, {self.parent}")
        if any(not 0 <= parent < node for node, parent in enumerate(self.parent[1:], 1)):
            raise ValueError(f"parents must stand before their children: {self.parent}")

    @classmethod
    def chain(cls, pending: int, ids: Sequence[int] = ()) -> TokenTree:
        """The tree in which each of `ids` follows the one before, the first following `pending`."""
        return cls([pending, *ids], list(range(-1, len(ids))))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depth(self) -> list[int]:
        """Distance of each node from the root."""
        depth = [0]
        for parent in self.parent[1:]:
            depth.append(depth[parent] + 1)
        return depth

    def path(self, node: int) -> tuple[int, ...]:
        """The tokens from the root on, without the root's own, down to `node`."""
        return path_to(self.tokens, self.parent, node)

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """`path` of every node."""
        return [self.path(node) for node in range(len(self))]

    def children(self, node: int) -> list[int]:
        """The nodes whose parent is `node`, in the order in which they are to be tried."""
        return self._children[node]

    @cached_property
    def _children(self) -> list[list[int]]:
        children: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parent[1:], 1):
            children[parent].append(node)
        return children

    @cached_property
    def is_chain(self) -> bool:
        return self.parent == list(range(-1, len(self) - 1))

    def ancestor_mask(self, before: int = 0) -> np.ndarray:
        """bool [N, before + N]: row i is True at what i may attend to.

        That is all `before` columns of the cache, i's ancestors, and i.
        """
        mask = np.zeros((len(self), before + len(self)), dtype=bool)
        mask[:, :before] = True
        for node, parent in enumerate(self.parent):
            if node:
                mask[node, before : before + node] = mask[parent, before : before + node]
            mask[node, before + node] = True
        return mask


def path_to(tokens: Sequence[int], parent: Sequence[int], node: int) -> tuple[int, ...]:
    """The tokens from the root (node 0) on, without the root's own, down to `node`."""
    path: list[int] = []
    while node:
        path.append(tokens[node])
        node = parent[node]
    return tuple(reversed(path))
