"""The token tree: depths, siblings and who attends to whom.

0 - 1 - 3
  \\ 2
"""

from __future__ import annotations

import pytest

from decoding.tree import TokenTree

TREE = TokenTree([7, 8, 9, 5], [-1, 0, 0, 1])


def test_depth_and_children() -> None:
    assert TREE.depth == [0, 1, 1, 2]
    assert [TREE.children(node) for node in range(4)] == [[1, 2], [3], [], []]


def test_ancestor_mask() -> None:
    assert TREE.ancestor_mask().astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 0, 1, 0],
        [1, 1, 0, 1],
    ]


def test_chain_is_a_tree_and_its_mask_is_causal() -> None:
    chain = TokenTree.chain(7, [8, 9])
    assert chain == TokenTree([7, 8, 9], [-1, 0, 1])
    assert chain.ancestor_mask().astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert TokenTree.chain(7) == TokenTree([7], [-1])


@pytest.mark.parametrize("parent", [[0, 0], [-1, 1], [-1, -1], [-1]])
def test_parents_must_stand_before_their_children(parent: list[int]) -> None:
    with pytest.raises(ValueError, match="parent"):
        TokenTree([7, 8], parent)
