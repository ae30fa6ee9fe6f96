"""The best shape for a token tree of a size, and the best size for a machine (Sequoia, Chen et al. 2024).

What is known of a draft is p[d][k], the chance that the child of rank k is the one accepted after an accepted
node of depth d. A node is then accepted with the product of the p on its path, and a tree emits the sum of
these over its nodes in expectation, the root counting 1 for the token that every round emits besides. A
dynamic program finds the shape for which this is largest.

Sequoia takes one vector for all depths (its positional independence); here each depth has its own, which
costs nothing more and fits drafts that weaken with depth.

`python -m eval.tree` puts the shape into a file, and `decode.tree=static` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import ArrayLike

from configs.errors import ConfigError
from decoding.shapes import Ranks, TreeShape
from decoding.tree import TokenTree

Array = np.ndarray
Cost = Mapping[int, float] | Callable[[int], float]  # seconds by size


# From rounds to vectors


class Trials:
    """Counts what a decoder's rounds show of a draft: its `add` is a decoder's `on_verdict`."""

    def __init__(self, shape: TreeShape) -> None:
        """shape: of the trees that will be seen."""
        ranks = 1 + max(shape.ranks)
        self.accepted = np.zeros((shape.depth, ranks), dtype=np.int64)
        self.tried = np.zeros((shape.depth, ranks), dtype=np.int64)

    def add(self, tree: TokenTree, path: Sequence[int]) -> None:
        """A round: its tree, and the accepted nodes from the root on."""
        for depth, rank, accepted in trials(tree, path):
            self.tried[depth, rank] += 1
            self.accepted[depth, rank] += accepted

    @property
    def depth(self) -> int:
        """How deep anything was tried."""
        return int(self.tried.any(1).sum())

    def vectors(self, least: int) -> Array:
        """p, float64 [depths, ranks], for the depths at which at least `least` nodes had children; none, if
        there is no such depth."""
        reached = int((self.tried[:, 0] >= least).sum())
        return acceptance_vectors(self.accepted[:reached], self.tried[:reached])


def trials(tree: TokenTree, path: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """(depth, rank, accepted) of each child that was tried on the verified `path` (nodes, the root first).

    depth is the parent's. A child is tried if all its siblings before it were refused.
    """
    for depth, node in enumerate(path):
        accepted = path[depth + 1] if depth + 1 < len(path) else None
        for rank, child in enumerate(tree.children(node)):
            yield depth, rank, child == accepted
            if child == accepted:
                break


def acceptance_vectors(accepted: ArrayLike, tried: ArrayLike) -> Array:
    """p, float64 [D, B], of counts [D, B]: how often rank k after depth d was accepted, and how often tried.

    Not every node measured has all B children, so p comes from the chances at each trial, as Kaplan and Meier
    (1958) estimate survival: with h = accepted / tried, p[k] is h[k] times the product of 1 - h[j] over all
    j < k. Where all have, that is accepted[k] over the nodes reached. What was never tried has p 0.
    """
    accepted, tried = np.asarray(accepted, dtype=np.float64), np.asarray(tried, dtype=np.float64)
    if (
        accepted.ndim != 2
        or accepted.shape != tried.shape
        or (accepted > tried).any()
        or (accepted < 0).any()
    ):
        raise ValueError(
            f"counts must be two arrays [depths, ranks] with 0 <= accepted <= tried: {accepted}, {tried}"
        )
    hazard = np.divide(accepted, tried, out=np.zeros_like(accepted), where=tried > 0)
    refused = np.cumprod(1 - hazard, axis=1)
    return hazard * np.concatenate([np.ones((len(hazard), 1)), refused[:, :-1]], axis=1)


def wide_shape(nodes: int, depth: int) -> TreeShape:
    """A tree to measure with, of at most `nodes` nodes, the root included, and `depth` levels below it.

    Many ranks are tried near the root, and first choices all the way down: it has the paths on which the
    ranks, counted from 1, add up to some number at most. They are the likeliest if each rank is accepted half
    as often as the one before.
    """
    if nodes < 2 or depth < 1:
        raise ConfigError(f"A tree of {nodes} nodes and depth {depth}: set at least 2 nodes and depth 1.")
    found = TreeShape(())
    for most in range(1, nodes):
        paths: list[Ranks] = []
        level: dict[Ranks, int] = {(): most}  # what is left of the number behind each path
        for _ in range(depth):
            level = {(*path, rank): left - rank - 1 for path, left in level.items() for rank in range(left)}
            paths += level
        if len(paths) >= nodes:
            break
        found = TreeShape(tuple(paths))
    return found


# From vectors to a shape


@dataclass(frozen=True)
class BestTree:
    shape: TreeShape
    expected_tokens: float  # per round, the one that every round emits included


def expected_tokens(shape: TreeShape, vectors: ArrayLike) -> float:
    """Tokens that a round emits in expectation. vectors: [depths, ranks], as for `best_tree`."""
    p = by_depth(vectors, shape.depth)
    reached: dict[Ranks, float] = {(): 1.0}
    for path in shape.paths:
        chance = p[len(path) - 1, path[-1]] if path[-1] < p.shape[1] else 0.0
        reached[path] = reached[path[:-1]] * chance
    return float(sum(reached.values()))


def best_tree(vectors: ArrayLike, nodes: int, depth: int) -> BestTree:
    """The best shape of at most `nodes` nodes, the root included, and `depth` levels below the root.

    vectors: p [depths, ranks]; below the last depth given, the last holds on. Nodes that could not be
    accepted are left out. O(depth * ranks * nodes^2).
    """
    if nodes < 1 or depth < 0:
        raise ConfigError(f"A tree of {nodes} nodes and depth {depth}: set at least 1 node and depth 0.")
    return Program(by_depth(vectors, depth), nodes).best(nodes)


def by_depth(vectors: ArrayLike, depth: int) -> Array:
    """p, float64 [depth, ranks]. Raises `ConfigError` for what are no probabilities."""
    p = np.asarray(vectors, dtype=np.float64)
    if p.ndim != 2 or not p.size or not (p >= 0).all() or (p.sum(1) > 1 + 1e-9).any():
        raise ConfigError(
            f"Acceptance vectors {p.tolist()}: give one row per depth, of the probabilities that the child "
            "of each rank is accepted. They are at least 0 and add up to at most 1."
        )
    return p[np.minimum(np.arange(depth), len(p) - 1)]


class Program:
    """Sequoia's dynamic program, from the deepest level up.

    value[d][m] is what the best subtree with at most m nodes and its root at depth d is worth, once that root
    is accepted; take[d][k][m] how many of m nodes go to its child of rank k when those of rank k and above
    may have m in all (0: there are no further children).
    """

    def __init__(self, p: Array, nodes: int) -> None:
        depth, ranks = p.shape
        self.take = np.zeros((depth, ranks, nodes), dtype=np.int64)
        self.value = np.zeros((depth + 1, nodes + 1))
        self.value[depth, 1:] = 1
        left = np.subtract.outer(np.arange(nodes), np.arange(nodes))  # of m nodes, after a child took y
        for d in reversed(range(depth)):
            rest = np.zeros(nodes)  # worth of the children of rank k and above, by nodes for all of them
            for k in reversed(range(ranks)):
                worth = p[d, k] * self.value[d + 1, :nodes] + np.where(left >= 0, rest[left], -inf)
                worth[:, 0] = 0  # a child of rank k + 1 needs one of rank k
                self.take[d, k] = worth.argmax(1)
                rest = worth.max(1)
            self.value[d, 1:] = 1 + rest

    def best(self, nodes: int) -> BestTree:
        shape = TreeShape(tuple(self.below((), nodes - 1)))
        return BestTree(shape, float(self.value[0, nodes]))

    def below(self, path: Ranks, nodes: int) -> Iterator[Ranks]:
        """The paths of at most `nodes` nodes below the node at `path`."""
        if len(path) == len(self.take):
            return
        for rank, take in enumerate(self.take[len(path)]):
            count = int(take[nodes])
            if not count:
                return
            yield (*path, rank)
            yield from self.below((*path, rank), count - 1)
            nodes -= count


# From measured times to a size


@dataclass(frozen=True)
class Plan(BestTree):
    nodes: int  # that the target reads: the size that was timed, which the shape may leave unfilled
    seconds: float  # of a round

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.expected_tokens


def best_size(
    vectors: ArrayLike,
    target_seconds: Cost,
    draft_seconds: Cost,
    host_seconds: float = 0.0,
    nodes: int = 128,
    depth: int = 10,
) -> Plan:
    """The tree that emits most per second on a machine (Sequoia, §3.3), or the root alone if no tree pays.

    The arguments are those of `plans`.
    """
    return min(
        plans(vectors, target_seconds, draft_seconds, host_seconds, nodes, depth),
        key=lambda plan: (plan.seconds_per_token, plan.shape.depth, plan.nodes),
    )


def plans(
    vectors: ArrayLike,
    target_seconds: Cost,
    draft_seconds: Cost,
    host_seconds: float = 0.0,
    nodes: int = 128,
    depth: int = 10,
) -> list[Plan]:
    """For each number of nodes, ascending, the tree that emits most per second with it.

    target_seconds: of a forward over n nodes; draft_seconds: of drafting a tree of that depth, whose leaves
    the draft need not read; host_seconds: a round's rest. A mapping stands for what was measured: no other
    sizes are considered. At most `nodes` nodes, the root included, and `depth` levels below it.
    """
    sizes = sorted(
        n for n in (target_seconds if isinstance(target_seconds, Mapping) else range(1, nodes + 1))
    )
    depths = sorted(d for d in (draft_seconds if isinstance(draft_seconds, Mapping) else range(1, depth + 1)))
    sizes = [n for n in sizes if 1 <= n <= nodes]
    depths = [d for d in depths if 1 <= d <= depth]
    if not sizes:
        raise ConfigError(
            f"No target times for 1 to {nodes} nodes: measure some, the one for 1 node above all."
        )
    programs = {d: Program(by_depth(vectors, d), sizes[-1]) for d in [0, *depths]}
    drafting = {d: seconds(draft_seconds, d) if d else 0.0 for d in programs}
    made = []
    for n in sizes:
        rest = seconds(target_seconds, n) + host_seconds
        d = min(programs, key=lambda d: (drafting[d] + rest) / float(programs[d].value[0, n]))
        best = programs[d].best(n)
        made.append(Plan(best.shape, best.expected_tokens, n, drafting[d] + rest))
    return made


def seconds(cost: Cost, size: int) -> float:
    return cost[size] if isinstance(cost, Mapping) else cost(size)
