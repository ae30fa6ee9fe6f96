"""The token tree that a round proposes, flat: parents stand before their children, node 0 is pending.

A chain is the tree in which every parent is the node before; plain decoding is the tree of one node. Node i
has the absolute position `start + depth[i]`, where `start` is the position of the pending token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


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

    @cached_property
    def paths(self) -> list[tuple[int, ...]]:
        """The tokens from the root on, without the root's own, down to each node."""
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.tokens[1:], self.parent[1:], strict=True):
            paths.append((*paths[parent], token))
        return paths

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

    def ancestor_mask(self, before: int = 0) -> Tensor:
        """bool [N, before + N]: row i is True at what i may attend to.

        That is all `before` columns of the cache, i's ancestors, and i.
        """
        mask = torch.ones(len(self), before + len(self), dtype=torch.bool).tril_(before)
        if not self.is_chain:
            own = mask[:, before:].copy_(torch.eye(len(self), dtype=torch.bool))
            for node, parent in enumerate(self.parent[1:], 1):
                own[node] |= own[parent]
        return mask
