"""How a draft network's tree grows: which children a node gets, and which of them are read next.

A growth is asked once per level: it is given the logits after the nodes that were read last, adds children
to the tree, and says which of the new nodes the network is to read. Nodes at the last level are never read.
It works with any network that gives next-token logits (decoding/reader.py).

    ChainGrowth    one child after another
    StaticGrowth   a shape known beforehand, its children drawn or by rank (Medusa, SpecInfer, Sequoia)
    DynamicGrowth  wherever the draft is surest, its likeliest children (EAGLE-2)

What keeps the target's law (decoding/verify.py): a child is either chosen without chance, or drawn from a law
that is reported, and then kept, in the order of drawing, whatever it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from configs.errors import ConfigError
from configs.schema import Proposal as Mode
from decoding.drafters import DraftIds, Draws, Proposal, Turn, without
from decoding.randomness import Key, Purpose
from decoding.shapes import TreeShape
from decoding.stopping import Fixed, StopRule
from decoding.tree import TokenTree, path_to
from decoding.warp import choices, law_dtype

BLOCK = 128  # many logits are looked at in blocks first, for the largest of them
MANY = 16_384


@dataclass(frozen=True)
class Vocabulary:
    """What a draft network's logits are over, and where a text ends."""

    ids: Tensor | None  # long [Vd], the target id of each logit; None: they are the target's own
    draft: DraftIds | None  # the same on the host
    eos_ids: frozenset[int]  # nothing is proposed after one of these

    @classmethod
    def of(cls, ids: Tensor | None, eos_ids: frozenset[int]) -> Vocabulary:
        return cls(ids, None if ids is None else DraftIds(ids.numpy(force=True)), eos_ids)

    def token(self, index: int) -> int:
        """The target's id of draft id `index`."""
        return index if self.draft is None else int(self.draft.ids[index])


class Growing:
    """One turn's tree while it grows. Nodes are numbered in the order in which they are added."""

    is_chain = False  # whatever is drawn

    def __init__(self, turn: Turn, vocabulary: Vocabulary) -> None:
        self.turn = turn
        self.vocabulary = vocabulary
        self.tokens = [turn.seen.pending]
        self.parent = [-1]
        self.depth = [0]
        self.draws: dict[int, list[Draws]] = {}
        self.draw_count = 0
        self.stopped = "budget"
        self.estimates: list[float] | None = None  # acceptance of each node read, from the network's own head

    def add(self, parent: int, token: int) -> int:
        """The new node, a child of `parent`."""
        self.tokens.append(token)
        self.parent.append(parent)
        self.depth.append(self.depth[parent] + 1)
        return len(self.tokens) - 1

    def path(self, node: int) -> tuple[int, ...]:
        """The tokens after the root down to `node`."""
        return path_to(self.tokens, self.parent, node)

    def shaped(self, nodes: Sequence[int], logits: Tensor) -> Tensor:
        """`logits` [n, Vd] after `nodes` as the law shapes them; all -inf where the grammar allows no id that
        the draft has."""
        law, ids = self.turn.law, self.vocabulary.ids
        if law.plain:
            return logits
        rows = zip(nodes, logits, strict=True)
        return torch.stack(
            [law.shaped(row, path_to(self.tokens, self.parent, node), ids) for node, row in rows]
        )

    def barred(self, shaped: Tensor) -> bool:
        """Whether the grammar allows nothing of `shaped` [..., Vd], which ends the growth."""
        if self.turn.law.grammar is None or bool((shaped > -torch.inf).any()):
            return False
        self.stopped = "grammar"
        return True

    def draw(self, law: np.ndarray) -> int:
        """An index of `law` [Vd], by the round's next number."""
        key = Key(self.turn.seen.position, Purpose.propose, self.draw_count)
        self.draw_count += 1
        return self.turn.randomness.draw(law, key)

    def reads(self, node: int) -> bool:
        """Whether anything may come after `node`."""
        return self.depth[node] < self.turn.budget and self.tokens[node] not in self.vocabulary.eos_ids

    def grow(self, nodes: Sequence[int], logits: Tensor) -> list[int]:
        """Adds children to `nodes`, given the logits [n, Vd] after them; returns the nodes to read next."""
        raise NotImplementedError

    def proposal(self, seconds: float, forwards: int) -> Proposal:
        tree = TokenTree(self.tokens, self.parent)
        return Proposal(tree, self.draws, seconds, forwards, self.stopped, self.is_chain)


class Growth(Protocol):
    def start(self, turn: Turn, vocabulary: Vocabulary) -> Growing: ...


@dataclass(frozen=True)
class ChainGrowth:
    """One child after another: drawn from the draft's law, or its argmax, until the rule has enough.

    The token that made the rule stop is kept: dropping a drawn token for what it is would change the law.
    """

    mode: Mode
    rule: StopRule = field(default_factory=Fixed)

    def start(self, turn: Turn, vocabulary: Vocabulary) -> Growing:
        return GrowingChain(self, turn, vocabulary)


class GrowingChain(Growing):
    is_chain = True

    def __init__(self, growth: ChainGrowth, turn: Turn, vocabulary: Vocabulary) -> None:
        super().__init__(turn, vocabulary)
        self.rule = growth.rule
        self.sampled = growth.mode is Mode.sampled and not turn.law.greedy
        self.confidences: list[float] = []

    def grow(self, nodes: Sequence[int], logits: Tensor) -> list[int]:
        node = nodes[0]
        shaped = self.shaped(nodes, logits)
        if self.barred(shaped):
            return []
        if self.sampled:
            law = self.turn.law.warp(shaped[0])
            index = self.draw(law)
            self.draws[node] = [Draws(law, (node + 1,), self.vocabulary.draft)]
        else:
            index = choices(shaped)(0)
        child = self.add(node, self.vocabulary.token(index))
        if not self.reads(child):
            return []
        if self.rule.needs_confidence and self.estimates is None:
            self.confidences.append(float(torch.softmax(shaped[0].float(), -1)[index]))
        known = self.confidences if self.estimates is None else self.estimates
        if self.rule.enough(known, len(self.tokens) - 1):
            self.stopped = self.rule.name
            return []
        return [child]


@dataclass(frozen=True)
class StaticGrowth:
    """A shape filled level by level, as deep as the budget allows.

    greedy mode, or temperature 0: a node's children are the draft's likeliest tokens, by rank (Medusa, Cai et
    al. 2024).
    sampled: as many as the shape has there are drawn from the draft's law, one after another without
    replacement (Sequoia, Chen et al. 2024).
    sampled with `replacement`: each is drawn from the whole law (SpecInfer, Miao et al. 2024). Equal ones
    become one node, which is tried as often as it was drawn, and gets the children of all its places.
    """

    shape: TreeShape
    mode: Mode
    replacement: bool = False

    def start(self, turn: Turn, vocabulary: Vocabulary) -> Growing:
        return GrowingStatic(self, turn, vocabulary)


class GrowingStatic(Growing):
    def __init__(self, growth: StaticGrowth, turn: Turn, vocabulary: Vocabulary) -> None:
        super().__init__(turn, vocabulary)
        self.shape = growth.shape
        self.sampled = growth.mode is Mode.sampled and not turn.law.greedy
        self.replacement = growth.replacement
        self.places = [[0]]  # the shape's nodes at which each node stands: several where draws were equal
        if growth.shape.depth <= turn.budget:
            self.stopped = "shape"

    def grow(self, nodes: Sequence[int], logits: Tensor) -> list[int]:
        first = len(self.tokens)
        if not self.sampled:
            self.add_ranked(nodes, logits)
        else:
            for node, row in zip(nodes, logits, strict=True):
                self.add_drawn(node, row)
        return [node for node in range(first, len(self.tokens)) if self.reads(node) and self.wanted(node)]

    def wanted(self, node: int) -> list[int]:
        """The places in the shape that children of `node` are to take."""
        return [child for place in self.places[node] for child in self.shape.children[place]]

    def settle(self, node: int, index: int, place: int) -> int:
        """The new child of `node`, draft id `index`, at `place` of the shape."""
        self.places.append([place])
        return self.add(node, self.vocabulary.token(index))

    def add_ranked(self, nodes: Sequence[int], logits: Tensor) -> None:
        ranks = self.shape.ranks
        wanted = [self.wanted(node) for node in nodes]
        count = 1 + max((ranks[place] for places in wanted for place in places), default=-1)
        scores, indices = ranked(self.shaped(nodes, logits), count)
        possible = (scores > -torch.inf).sum(-1).tolist()  # the grammar may leave fewer
        if count and not any(possible):
            self.stopped = "grammar"
        for node, places, best, limit in zip(nodes, wanted, indices.tolist(), possible, strict=True):
            for place in places:
                if ranks[place] < limit:
                    self.settle(node, best[ranks[place]], place)

    def add_drawn(self, node: int, logits: Tensor) -> None:
        """Adds children of `node`, drawn given the logits [Vd] after it."""
        wanted = self.wanted(node)
        if not wanted:
            return
        shaped = self.shaped([node], logits[None])
        if self.barred(shaped):
            return
        law = self.turn.law.warp(shaped[0])
        draw = self.with_replacement if self.replacement else self.without_replacement
        self.draws[node] = [Draws(law, draw(node, law, wanted), self.vocabulary.draft, self.replacement)]

    def without_replacement(self, node: int, law: np.ndarray, wanted: Sequence[int]) -> tuple[int, ...]:
        children: list[int] = []
        for place in wanted:
            index = self.draw(law)
            children.append(self.settle(node, index, place))
            if len(children) < len(wanted):
                law = without(law, index)
                if not float(law.sum()) > 0:  # every token that the law allows is drawn
                    break
        return tuple(children)

    def with_replacement(self, node: int, law: np.ndarray, wanted: Sequence[int]) -> tuple[int, ...]:
        known: dict[int, int] = {}
        children: list[int] = []
        for place in wanted:
            index = self.draw(law)
            if index in known:
                self.places[known[index]].append(place)
            else:
                known[index] = self.settle(node, index, place)
            children.append(known[index])
        return tuple(children)


@dataclass(frozen=True)
class DynamicGrowth:
    """EAGLE-2's tree (Li et al. 2024, §4): the `nodes` likeliest paths among those looked at.

    A node's score is the draft's log-probability of its path. At each level the `width` best new nodes get
    their `width` likeliest children; in the end the best of all that were made stay. No child is drawn, so
    the target's law holds at every temperature.

    Nodes that could not get a child among the best any more are not read, which changes no tree.
    """

    nodes: int  # drafted tokens of the tree
    width: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.width < 1:
            raise ConfigError(
                f"A dynamic tree of {self.nodes} nodes and width {self.width}: set decode.tree_nodes and "
                "decode.tree_width to at least 1."
            )

    def start(self, turn: Turn, vocabulary: Vocabulary) -> Growing:
        return GrowingDynamic(self, turn, vocabulary)


class GrowingDynamic(Growing):
    def __init__(self, growth: DynamicGrowth, turn: Turn, vocabulary: Vocabulary) -> None:
        super().__init__(turn, vocabulary)
        self.count, self.width = growth.nodes, growth.width
        self.scores = [0.0]  # of each node; never above its parent's

    def grow(self, nodes: Sequence[int], logits: Tensor) -> list[int]:
        shaped = self.shaped(nodes, logits)
        logprobs, indices = ranked(shaped.log_softmax(-1, dtype=law_dtype(shaped)), self.width)
        first = len(self.tokens)
        for node, row, best in zip(nodes, logprobs.tolist(), indices.tolist(), strict=True):
            for logprob, index in zip(row, best, strict=True):
                if logprob > -math.inf:  # neither that nor the NaN of a row that is -inf throughout
                    self.add(node, self.vocabulary.token(index))
                    # A rounding error above 0 would let a child pass its parent.
                    self.scores.append(self.scores[node] + min(logprob, 0.0))
        if first == len(self.tokens):
            self.stopped = "grammar"
        return self.frontier(first)

    def frontier(self, first: int) -> list[int]:
        """The nodes to read next, of those from `first` on.

        A child scores at most its parent's score and loses ties against what was made before it, so a node
        whose score is not above the last place's has nothing to win.
        """
        drafted = sorted(self.scores[1:], reverse=True)
        floor = drafted[self.count - 1] if len(drafted) >= self.count else -math.inf
        promising = [first + i for i in best_first(self.scores[first:]) if self.scores[first + i] > floor]
        if not promising and first < len(self.tokens):
            self.stopped = "nodes"
        return [node for node in promising if self.reads(node)][: self.width]

    def proposal(self, seconds: float, forwards: int) -> Proposal:
        # Ties go to what was made first, so that no node stays without its parent.
        kept = [0, *sorted(1 + i for i in best_first(self.scores[1:])[: self.count])]
        number = {node: i for i, node in enumerate(kept)}
        parent = [-1, *(number[self.parent[node]] for node in kept[1:])]
        tree = TokenTree([self.tokens[node] for node in kept], parent)
        return Proposal(tree, self.draws, seconds, forwards, self.stopped)


def best_first(scores: Sequence[float]) -> list[int]:
    """The indices of scores [n] from the highest to the lowest, ties as they stand."""
    return sorted(range(len(scores)), key=scores.__getitem__, reverse=True)


def ranked(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and indices [n, count] of the largest of logits [n, V], the largest first; all, if V < count."""
    n, vocab = logits.shape
    count = min(count, vocab)
    whole = vocab // BLOCK
    if logits.device.type != "cpu" or vocab < MANY or whole < 2 * count:
        return logits.topk(count)
    # The largest are in the blocks whose maxima are. Maxima are vectorised on a CPU and topk is not: 200
    # against 530 microseconds for the 8 largest of 8 rows of 49,152; of 8,192 topk is the faster one.
    rest = torch.arange(whole * BLOCK, vocab).expand(n, -1)
    blocks = logits[:, : whole * BLOCK].view(n, whole, BLOCK).amax(-1).topk(count).indices
    inside = (blocks[..., None] * BLOCK + torch.arange(BLOCK)).view(n, -1)
    indices = torch.cat([inside, rest], dim=1)
    values, best = logits.gather(1, indices).topk(count)
    return values, indices.gather(1, best)
