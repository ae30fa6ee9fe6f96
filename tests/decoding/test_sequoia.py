"""The best shapes, against all shapes there are; the paper's figures; and shapes in files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from configs.errors import ConfigError, StorageError
from decoding.sequoia import (
    Trials,
    acceptance_vectors,
    best_size,
    best_tree,
    expected_tokens,
    plans,
    trials,
    wide_shape,
)
from decoding.shapes import Conditions, TreeShape, read_shape, write_shape
from decoding.tree import TokenTree

# The vector that Sequoia's repository gives as an example, as far as research/decoding.md quotes it.
EXAMPLE = [[0.634, 0.108, 0.057, 0.022, 0.019, 0.015]]


# Shapes


def test_shapes_are_numbered_breadth_first() -> None:
    shape = TreeShape(((1,), (0, 1), (0, 0), (0,)))
    assert shape.paths == ((0,), (1,), (0, 0), (0, 1))
    assert shape.children == [[1, 2], [3, 4], [], [], []]
    assert shape.ranks == [0, 0, 1, 0, 1]
    assert (len(shape), shape.depth) == (5, 2)


def test_makers() -> None:
    assert TreeShape.chain(3).paths == ((0,), (0, 0), (0, 0, 0))
    assert TreeShape.of((2, 1)).paths == ((0,), (1,), (0, 0), (1, 0))
    assert len(TreeShape.of((3, 2, 1))) == 1 + 3 + 6 + 6
    assert (TreeShape.chain(0).paths, TreeShape.chain(0).depth) == ((), 0)


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        (((0,), (1, 0)), r"\(1, 0\) but not its parent \(1,\)"),
        (((0,), (0,)), r"lists \(0,\) twice"),
        (((0,), (-1,)), r"\(-1,\): ranks count from 0"),
        (((), (0,)), r"lists the root"),
    ],
)
def test_bad_shapes_are_refused(paths: tuple[tuple[int, ...], ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TreeShape(paths)


# Vectors


def test_trials_are_the_children_up_to_the_accepted_one() -> None:
    """0 - 1 - 4    0, 2 and 5 were accepted: 3 was not tried, 6 and 7 were and were refused.
    \\ 2 - 5 - 6
    \\ 3     \\ 7
    """
    tree = TokenTree([0] * 8, [-1, 0, 0, 0, 1, 2, 5, 5])
    assert list(trials(tree, (0, 2, 5))) == [
        (0, 0, False),
        (0, 1, True),
        (1, 0, True),
        (2, 0, False),
        (2, 1, False),
    ]


def test_vectors_of_counts() -> None:
    """Ten nodes had three children: 6, 2 and 1 accepted. Of ten others with one child each, 4 were refused:
    where some lack children, rank 1 is judged by those that have it.

    rank 0: 6/10. rank 1: 2 of the 4 tried, 4/10 * 2/4 = .2. rank 2: 1 of 2, .1.
    depth 1: rank 0 6/10; only 2 of the 4 refused had a rank 1, 1 was accepted: 4/10 * 1/2 = .2. Nothing else.
    """
    accepted = [[6, 2, 1], [6, 1, 0]]
    tried = [[10, 4, 2], [10, 2, 0]]
    assert acceptance_vectors(accepted, tried) == pytest.approx(np.array([[0.6, 0.2, 0.1], [0.6, 0.2, 0.0]]))


def test_trials_of_rounds_are_counted() -> None:
    """The tree above, verified three times: 0 2 5 as there; 0 alone, all three refused; 0 1, whose only child
    was refused.

    depth 0: rank 0 tried 3 times, accepted once; rank 1 tried by the first two, accepted once; rank 2 once.
    depth 1: rank 0 tried under 2 and under 1, accepted once. depth 2: ranks 0 and 1 tried once, in vain.
    """
    tree = TokenTree([0] * 8, [-1, 0, 0, 0, 1, 2, 5, 5])
    seen = Trials(TreeShape.of((3, 3, 3, 3)))
    for path in ((0, 2, 5), (0,), (0, 1)):
        seen.add(tree, path)
    assert seen.tried.tolist() == [[3, 2, 1], [2, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert seen.accepted.tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert seen.depth == 3
    # rank 1: half of the 2/3 that refused rank 0.
    assert seen.vectors(least=2) == pytest.approx(np.array([[1 / 3, 1 / 3, 0], [1 / 2, 0, 0]]))
    assert len(seen.vectors(least=4)) == 0


def test_wide_shape_is_wide_above_and_deep_below() -> None:
    # Ranks from 1 that add up to 3 at most: 1, 2, 3; 11, 12, 21; 111. With the root 8 nodes.
    most3 = TreeShape(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
    assert wide_shape(8, depth=9) == wide_shape(15, depth=9) == most3
    assert len(wide_shape(64, depth=6)) == 64  # every further rank or level doubles it
    assert wide_shape(8, depth=1) == TreeShape.of([7])
    assert wide_shape(2, depth=3) == TreeShape.of([1])
    with pytest.raises(ConfigError, match="at least 2 nodes and depth 1"):
        wide_shape(1, depth=3)


def test_impossible_counts_are_refused() -> None:
    for accepted, tried in (([[2]], [[1]]), ([[-1]], [[1]]), ([[1]], [[1, 1]]), ([1], [1])):
        with pytest.raises(ValueError, match="counts must be"):
            acceptance_vectors(accepted, tried)


# The best shape


@cache
def forests(nodes: int, depth: int, ranks: int) -> list[tuple[tuple[int, ...], ...]]:
    """All sets of children, with what is below them, of exactly `nodes` nodes; as relative paths."""
    return list(children(nodes, depth, ranks, 0))


def children(nodes: int, depth: int, ranks: int, rank: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    if nodes == 0:
        yield ()
    if nodes == 0 or depth == 0 or rank == ranks:
        return
    for below in range(nodes):
        for forest in forests(below, depth - 1, ranks):
            own = ((rank,), *((rank, *path) for path in forest))
            for rest in children(nodes - 1 - below, depth, ranks, rank + 1):
                yield (*own, *rest)


def test_all_shapes_are_listed() -> None:
    # Ordered trees of n nodes: the Catalan numbers.
    assert [len(forests(n, 9, 9)) for n in range(6)] == [1, 1, 2, 5, 14, 42]
    assert len({TreeShape(paths) for paths in forests(5, 9, 9)}) == 42


@pytest.mark.parametrize("seed", range(6))
def test_best_tree_is_the_best_of_all(seed: int) -> None:
    chance = np.random.default_rng(seed)
    vectors = chance.dirichlet(np.ones(4), size=3)[:, :3]  # not even falling with the rank
    for nodes in range(1, 8):
        for depth in range(5):
            best = best_tree(vectors, nodes, depth)
            shapes = [TreeShape(paths) for n in range(nodes) for paths in forests(n, depth, 3)]
            assert best.expected_tokens == pytest.approx(
                max(expected_tokens(shape, vectors) for shape in shapes), abs=1e-12
            )
            assert expected_tokens(best.shape, vectors) == pytest.approx(best.expected_tokens, abs=1e-12)
            assert len(best.shape) <= nodes
            assert best.shape.depth <= depth


def test_expected_tokens_of_a_literal_shape() -> None:
    """1 + .6 + .2 + .6 * .5 = 2.1; the third level takes the last vector given: + .6 * .5 * .1 = 2.13."""
    vectors = [[0.6, 0.2], [0.5, 0.1]]
    assert expected_tokens(TreeShape(((0,), (1,), (0, 0))), vectors) == pytest.approx(2.1)
    assert expected_tokens(TreeShape(((0,), (1,), (0, 0), (0, 0, 0), (0, 0, 1))), vectors) == pytest.approx(
        2.1 + 0.6 * 0.5 * 0.6
    )
    assert expected_tokens(TreeShape(((0,), (1,), (2,))), vectors) == pytest.approx(1.8)  # rank 2 is unknown


@pytest.mark.parametrize(
    ("nodes", "tokens"), [(1, 1), (2, 1.63), (4, 2.29), (8, 2.73), (16, 3.13), (32, 3.50), (64, 3.85)]
)
def test_sequoias_example(nodes: int, tokens: float) -> None:
    # "Depth 10" counts the root's level.
    assert best_tree(EXAMPLE, nodes, depth=9).expected_tokens == pytest.approx(tokens, abs=0.005)


def test_literal_best_trees() -> None:
    # .634 ** 3 = .25 still beats .108.
    assert best_tree(EXAMPLE, 4, 9).shape == TreeShape.chain(3)
    # With depth 1 there is only width.
    assert best_tree(EXAMPLE, 4, 1).shape == TreeShape.of([3])
    # No room for more than 1 + 2 + 4 nodes, and none for what is never accepted.
    assert best_tree([[0.5, 0.4]], 50, 2).shape == TreeShape.of([2, 2])
    assert best_tree([[0.5, 0.0]], 50, 3).shape == TreeShape.chain(3)
    assert best_tree([[0.0, 0.0]], 50, 3).shape == TreeShape(())
    # Per depth: sure of the first token, of nothing after it but that it is one of two.
    assert best_tree([[1.0, 0.0], [0.5, 0.5]], 4, 2).shape == TreeShape(((0,), (0, 0), (0, 1)))


@pytest.mark.parametrize("vectors", [[], [[]], [0.5], [[-0.1]], [[0.7, 0.7]], [[float("nan")]]])
def test_vectors_that_are_no_probabilities_are_refused(vectors: list[list[float]]) -> None:
    with pytest.raises(ConfigError, match="one row per depth"):
        best_tree(vectors, 4, 2)


def test_trees_without_room_are_refused() -> None:
    for nodes, depth in ((0, 1), (1, -1)):
        with pytest.raises(ConfigError, match="at least 1 node"):
            best_tree(EXAMPLE, nodes, depth)


# The best size


def test_best_size_weighs_tokens_against_time() -> None:
    """p = .5 in a chain: E = 1, 1.5, 1.75 at 1, 2, 3 nodes. Seconds per token, draft 1 a level, host 1:

    n = 1, no draft: (4 + 1) / 1 = 5;  n = 2: (1 + 4 + 1) / 1.5 = 4;  n = 3: (2 + 4 + 1) / 1.75 = 4.
    With a draft of half a second: 5, 5.5 / 1.5 = 3.67, 6 / 1.75 = 3.43.
    With one of 3 seconds: 5, 8 / 1.5 = 5.33, 11 / 1.75 = 6.3.
    """

    def plan(draft: float) -> tuple[int, int, float]:
        best = best_size([[0.5]], lambda n: 4.0, lambda depth: draft * depth, 1.0, nodes=3, depth=2)
        return best.nodes, best.shape.depth, best.seconds_per_token

    assert plan(0.5) == (3, 2, pytest.approx(6 / 1.75))
    assert plan(3.0) == (1, 0, 5.0)
    assert plan(1.0)[2] == pytest.approx(4.0)


def test_each_size_gets_its_own_depth() -> None:
    """As above with a draft of 1 second a level: at 3 nodes a chain of 2 costs 7 s for 1.75 tokens, and two
    leaves (p = .5 and .3) cost 6 s for 1.8."""
    found = plans([[0.5, 0.3]], lambda n: 4.0, lambda depth: 1.0 * depth, 1.0, nodes=3, depth=2)
    assert [(plan.nodes, plan.shape) for plan in found] == [
        (1, TreeShape(())),
        (2, TreeShape.chain(1)),
        (3, TreeShape.of([2])),
    ]
    assert [plan.seconds_per_token for plan in found] == pytest.approx([5, 6 / 1.5, 6 / 1.8])


def test_only_measured_sizes_are_considered() -> None:
    target = {1: 1.0, 4: 1.1, 8: 1.9, 256: 0.1}
    best = best_size(EXAMPLE, target, {1: 0.1, 2: 0.1, 3: 0.1, 99: 0.0}, nodes=128)
    # 4 nodes, 3 levels: 1.2 / 2.29 = .52. 8 nodes in 3 levels cost 2.0, for at most 2.6 tokens.
    assert (best.nodes, best.shape) == (4, TreeShape.chain(3))
    assert best.seconds == pytest.approx(1.2)
    assert best.expected_tokens == pytest.approx(1 + 0.634 + 0.634**2 + 0.634**3)
    with pytest.raises(ConfigError, match="No target times for 1 to 128 nodes"):
        best_size(EXAMPLE, {256: 0.1}, {1: 0.1})


def test_best_size_is_the_best_of_all_trees() -> None:
    vectors = np.random.default_rng(0).dirichlet(np.ones(4), size=3)[:, :3]
    best = best_size(vectors, lambda n: 1 + 0.1 * n, lambda d: 0.2 * d, 0.1, nodes=9, depth=4)
    each = [
        (0.2 * depth + 1 + 0.1 * nodes + 0.1) / best_tree(vectors, nodes, depth).expected_tokens
        for nodes in range(1, 10)
        for depth in range(5)
    ]
    assert best.seconds_per_token == pytest.approx(min(each), abs=1e-12)


# Files


def test_a_shape_comes_back_from_its_file(tmp_path: Path) -> None:
    best = best_tree(EXAMPLE, 16, 9)
    conditions = Conditions(
        0.7, "sampled", "runs/x/draft", "train.jsonl", EXAMPLE, best.expected_tokens, 800, speedup=1.3
    )
    write_shape(tmp_path / "new" / "tree.json", best.shape, conditions)
    assert read_shape(tmp_path / "new" / "tree.json") == (best.shape, conditions)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["tree.json"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": 2}, r"schema is 2, and this version reads 1"),
        ({"paths": [[0, 0]]}, r"\(0, 0\) but not its parent"),
        ({"paths": [["0"]]}, r"\['0'\] is not a list of ranks"),
        ({"paths": [[True]]}, r"\[True\] is not a list of ranks"),
        ({"paths": None}, r"is not a tree's shape"),
        ({"conditions": {"temprature": 1}}, r"unknown conditions: temprature"),
        ({"conditions": None}, r"is not a tree's shape"),
        ({"conditions": {"temperature": "0"}}, r'its condition temperature cannot be "0"\.'),
        ({"conditions": {"proposal": 1}}, r"proposal cannot be 1"),
        ({"conditions": {"vectors": "abc"}}, r'vectors cannot be "abc"'),
        ({"conditions": {"vectors": [[]]}}, r"vectors cannot be \[\[\]\]"),
        ({"conditions": {"vectors": [[0.5], [0.5, 0.1]]}}, r"vectors cannot be"),
        ({"conditions": {"vectors": [[0.5, 0.6]]}}, r"vectors cannot be"),
        ({"conditions": {"vectors": [[float("nan")]]}}, r"vectors cannot be \[\[NaN\]\]"),
        ({"conditions": {"batch_size": 0}}, r"batch_size cannot be 0"),
        ({"conditions": {"seconds": {}}}, r"seconds cannot be \{\}"),
        ({"conditions": {"seconds": {"host": {"none": 0.1}}}}, r"seconds cannot be"),
        ({"conditions": {"seconds": {"host": {"1": "0.1"}}}}, r"seconds cannot be"),
        ({"conditions": {"seconds": {"host": {"1": 1}, "draft": []}}}, r"seconds cannot be"),
    ],
)
def test_a_file_that_holds_no_shape_is_refused(change: dict[str, object], says: str, tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps({"schema": 1, "paths": [[0]], "conditions": {}, **change}))
    with pytest.raises(ConfigError, match=says):
        read_shape(file)


def test_a_torn_or_absent_file_is_refused(tmp_path: Path) -> None:
    for contents in ('{"schema": 1, "pa', "[]", '{"schema": 1}'):
        (tmp_path / "torn.json").write_text(contents)
        with pytest.raises(ConfigError, match=r"torn\.json is not a tree's shape"):
            read_shape(tmp_path / "torn.json")
    with pytest.raises(StorageError, match="Cannot read"):
        read_shape(tmp_path / "absent.json")
