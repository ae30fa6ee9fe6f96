"""Several drafters in one tree: SpecInfer's merge (Miao et al. 2024), as of EAGLE and prompt lookup.

All propose after the same pending token. Equal tokens under one parent become one node, and what each drafter
drew under a node stays a group of its own there, tried in the order of the drafters, with its own law:

    first    p - a - b        second    p - a - c        merged    p - a - b     a: groups (a), (a) at p
                                            - d                      |   - c     b, c: groups (b), (c) at a
                                                                     - d         d: in the second's group

A token that two drafters chose at one node is one child. An x that was drawn from q is refused only where
p(x) < q(x), so the residual max(p - q, 0) holds none of it (decoding/verify.py). Hence:
- Drawn by both, x stands in both groups. Its second trial never succeeds, but it must be held: which token
  was drawn is chance, and the law is lost if a draw counts or not by what it was.
- Drawn by one and chosen deterministically by the other, x stands in the group alone. The other's trial could
  neither succeed nor change the residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from configs.errors import ConfigError
from decoding.drafters import Drafter, Draws, Proposal, Turn
from decoding.ngrams import Trie
from decoding.randomness import Key, Randomness


@dataclass
class Parts:
    """One sequence's state of each drafter, and where each one's nodes stand in the last merged tree."""

    states: list[Any]
    names: list[dict[int, int]] = field(default_factory=list)  # by drafter: its node -> the merged node
    nodes: int = 0


class MergedDrafter:
    """Merges what `drafters` propose. With `max_nodes` the tree, its root included, is cut to so many nodes,
    the shallowest first, and of a level the first drafter's."""

    def __init__(self, drafters: Sequence[Drafter], max_nodes: int | None = None) -> None:
        if not drafters:
            raise ConfigError("There is nothing to merge: name at least one drafter.")
        if max_nodes is not None and max_nodes < 1:
            raise ConfigError(f"max_nodes={max_nodes}: set at least 1, the root, or None for no limit.")
        if max_nodes is not None and any(drafter.wants_choices for drafter in drafters):
            raise ConfigError(
                f"max_nodes={max_nodes} with a drafter that learns from the target's choice at each of its "
                "nodes (lookahead): it would miss those that are cut. Make its window smaller instead."
            )
        self.drafters = list(drafters)
        self.max_nodes = max_nodes
        self.taps = tuple(dict.fromkeys(tap for drafter in drafters for tap in drafter.taps))
        self.wants_choices = any(drafter.wants_choices for drafter in drafters)

    def begin(self) -> Parts:
        return Parts([drafter.begin() for drafter in self.drafters])

    def end(self, state: Parts) -> None:
        for drafter, own in zip(self.drafters, state.states, strict=True):
            drafter.end(own)

    def propose(self, turns: Sequence[Turn]) -> list[Proposal]:
        by_drafter = [
            drafter.propose([self.part(turn, index) for turn in turns])
            for index, drafter in enumerate(self.drafters)
        ]
        merged: list[Proposal] = []
        for turn, proposals in zip(turns, zip(*by_drafter, strict=True), strict=True):
            merging = Merging(proposals, self.max_nodes)
            merged.append(merging.proposal())
            turn.state.names, turn.state.nodes = merging.names, len(merging.trie)
        return merged

    def part(self, turn: Turn, index: int) -> Turn:
        """The turn as drafter `index` is to see it."""
        drafter, parts = self.drafters[index], turn.state
        choices = None
        # Choices at another tree than the last merged one say nothing about any drafter's nodes.
        if drafter.wants_choices and turn.seen.choices is not None and len(turn.seen.choices) == parts.nodes:
            names = parts.names[index]
            choices = [turn.seen.choices[names[node]] for node in range(len(names))]
        taps = picked(turn.seen.taps, self.taps, drafter.taps)
        return replace(
            turn,
            state=parts.states[index],
            seen=replace(turn.seen, taps=taps, choices=choices),
            randomness=Share(turn.randomness, index, len(self.drafters)),
        )


class Share:
    """One of `count` drafters' share of a round's randomness. All count their draws from 0, so each is given
    ranks of its own: with one number for two decisions the drafts would depend on each other."""

    def __init__(self, randomness: Randomness, index: int, count: int) -> None:
        self.randomness = randomness
        self.index = index
        self.count = count

    def own(self, key: Key) -> Key:
        return key._replace(rank=key.rank * self.count + self.index)

    def accept(self, probability: float, key: Key) -> bool:
        return self.randomness.accept(probability, self.own(key))

    def draw(self, law: np.ndarray, key: Key) -> int:
        return self.randomness.draw(law, self.own(key))


class Merging:
    """Puts proposals into one tree, level by level, and in a level drafter after drafter.

    Once the tree is full nothing more is taken, not even a token that is in it already: a draw must not count
    or be dropped for what it was. Going level by level, what is taken at a node depends on no token that was
    drawn below it.
    """

    def __init__(self, proposals: Sequence[Proposal], max_nodes: int | None) -> None:
        self.proposals = proposals
        self.max_nodes = max_nodes
        self.trie = Trie(proposals[0].tree.tokens[0])
        self.names: list[dict[int, int]] = [{0: 0} for _ in proposals]
        self.draws: dict[int, list[Draws]] = {}
        levels = [nodes_by_depth(proposal) for proposal in proposals]
        for depth in range(max(map(len, levels))):
            for index, nodes in enumerate(levels):
                for node in nodes[depth] if depth < len(nodes) else ():
                    if node in self.names[index]:
                        self.take_children(index, node)

    @property
    def full(self) -> bool:
        return self.max_nodes is not None and len(self.trie) >= self.max_nodes

    def take_children(self, index: int, node: int) -> None:
        """Takes the children of drafter `index`'s `node`, in the order in which they will be tried."""
        proposal, names = self.proposals[index], self.names[index]
        groups = proposal.draws.get(node, ())
        for group in groups:
            children = self.take(index, node, group.children)
            if children:
                renumbered = replace(group, children=tuple(children))
                self.draws.setdefault(names[node], []).append(renumbered)
        drawn = {child for group in groups for child in group.children}
        self.take(index, node, [child for child in proposal.tree.children(node) if child not in drawn])

    def take(self, index: int, node: int, children: Sequence[int]) -> list[int]:
        """The merged nodes of the first of `children`, as many as there is room for."""
        names, tokens = self.names[index], self.proposals[index].tree.tokens
        taken: list[int] = []
        for child in children:
            if self.full:
                break
            names[child] = self.trie.child(names[node], tokens[child])
            taken.append(names[child])
        return taken

    def proposal(self) -> Proposal:
        cut = any(len(names) < len(p.tree) for names, p in zip(self.names, self.proposals, strict=True))
        return Proposal(
            self.trie.tree(),
            self.draws,
            sum(proposal.seconds for proposal in self.proposals),
            sum(proposal.forwards for proposal in self.proposals),
            "nodes" if cut else self.proposals[0].stopped,
            chain=all(proposal.chain or len(proposal.tree) == 1 for proposal in self.proposals)
            and sum(len(proposal.tree) > 1 for proposal in self.proposals) == 1,
        )


def nodes_by_depth(proposal: Proposal) -> list[list[int]]:
    levels: list[list[int]] = [[] for _ in range(max(proposal.tree.depth) + 1)]
    for node, depth in enumerate(proposal.tree.depth):
        levels[depth].append(node)
    return levels


def picked(taps: Tensor, layers: tuple[int, ...], wanted: tuple[int, ...]) -> Tensor:
    """Of taps [n, len(layers) * d] the columns of `wanted`: [n, len(wanted) * d], as they are if all are."""
    if wanted == layers or not wanted:
        return taps
    by_layer = taps.unflatten(1, (len(layers), -1))
    return by_layer[:, [layers.index(layer) for layer in wanted]].flatten(1)
