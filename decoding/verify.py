"""How proposed trees are accepted: walks that leave the target's law untouched, and one that does not.

`verify` is the rule for any tree. At a node with law p, its children are tried in order (Leviathan et al.
2023 and Chen et al. 2023 for one child; SpecInfer, Miao et al. 2024, and Sequoia, Chen et al. 2024, for
several):

    chosen deterministically           accept x with p(x)              else p <- norm(p without x)
    drawn from q, without replacement  accept x with min(1, p(x)/q(x)) else p <- norm(max(p - q, 0)),
                                                                            q <- norm(q without x)
    drawn from q, with replacement     the same, but q stays, and x is tried as often as it was drawn

If no child is accepted, the next token is drawn from what is left of p: at a leaf, p itself (the bonus).
Children of several drafters meet at one node as groups, tried one after the other, each with its own q.

`verify_block` judges a drawn chain as a whole, and `accept_typical` is Medusa's rule, which is lossy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import exp, log

import numpy as np

from configs.schema import Verification
from decoding.drafters import Draws, Proposal, excess
from decoding.randomness import Key, Purpose, Randomness
from decoding.tree import TokenTree
from decoding.warp import certain, normalise_

EPSILON, DELTA = 0.09, 0.3  # of typical acceptance, as Medusa sets them


@dataclass(frozen=True)
class Verdict:
    path: tuple[int, ...]  # accepted nodes from the root on, the root included
    next_token: int  # drawn after the path's last node: the new pending token


def verify(
    proposal: Proposal, law: Callable[[int], np.ndarray], randomness: Randomness, position: int
) -> Verdict:
    """Walks `proposal.tree`, whose root is at absolute `position`.

    `law(node)` is the target's law [V] after that node; it is asked for at the walked nodes only.
    """
    path = [0]
    while True:
        position += 1
        p = law(path[-1])
        for rank, (child, q) in enumerate(trials(proposal, path[-1])):
            token = proposal.tree.tokens[child]
            if randomness.accept(acceptance(p, q, token), Key(position, Purpose.accept, rank)):
                path.append(child)
                break
            p = residual(p, q, token)
        else:
            return Verdict(tuple(path), randomness.draw(p, Key(position, Purpose.emit)))


def verify_block(
    proposal: Proposal, law: Callable[[int], np.ndarray], randomness: Randomness, position: int
) -> Verdict:
    """Judges a drawn chain as a whole (block verification, Sun et al. 2024, 2403.10444): as exact as
    `verify`, and no exact rule for chains accepts more on average. Trees, and chains of which nothing was
    drawn, go to `verify`.

    With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)), the chain survives to node i or beyond with
    probability w_i. It is cut after the last node i whose own coin, of chance h_i, comes up:

        h_i = m_i / (m_i + 1 - w_i) with m_i = Σ max(w_i p - q, 0), p and q being the laws after node i;
        h_K = w_K at the leaf.

    After a cut the next token follows norm(max(w_i p - q, 0)). Where the draft stopped may depend on the
    tokens it drew and kept: h_i depends on nothing behind node i except on whether there is something.
    """
    if not drawn_chain(proposal):
        return verify(proposal, law, randomness, position)
    tokens = proposal.tree.tokens
    leaf = len(tokens) - 1
    laws: list[tuple[np.ndarray, np.ndarray]] = []  # p and q after each node but the leaf
    weights = [1.0]
    while len(weights) <= leaf:
        p = law(len(laws))
        ((child, drawn),) = trials(proposal, len(laws))
        q = drawn.over(len(p)) if drawn is not None else certain(tokens[child], len(p), p.dtype)
        laws.append((p, q))
        weight = min(1.0, weights[-1] * acceptance(p, drawn, tokens[child]))
        if weight == 0:  # nothing behind can be accepted, and a grammar has no law after what it forbids
            break
        weights.append(weight)
    for node in range(len(weights) - 1, 0, -1):
        stay = weights[node] if node == leaf else stay_chance(*laws[node], weights[node])
        # A round decides on coins for positions that the next one may decide on again, but no other round
        # settles the position behind its root: all the round's coins are named by that one.
        if randomness.accept(stay, Key(position + 1, Purpose.accept, node - 1)):
            break
    else:
        node = 0
    rest = law(leaf) if node == leaf else rest_of_block(*laws[node], weights[node])
    return Verdict(tuple(range(node + 1)), randomness.draw(rest, Key(position + node + 1, Purpose.emit)))


def drawn_chain(proposal: Proposal) -> bool:
    """Whether the tree is a chain of which something was drawn, and nothing twice.

    What was chosen deterministically counts as drawn from a law that was certain of it; a chain of such nodes
    alone is accepted as often by `verify`, which asks for fewer laws. A tree that is a chain only by chance
    does not say `chain`: the two rules agree over all draws, not for each, so what was drawn must not choose
    between them.
    """
    draws = [proposal.draws.get(node, ()) for node in range(len(proposal.tree) - 1)]
    counts = [sum(len(group.children) for group in groups) for groups in draws]
    return proposal.chain and max(counts, default=0) == 1


def stay_chance(p: np.ndarray, q: np.ndarray, weight: float) -> float:
    """h_i of `verify_block`: p, q [V] are the laws after node i, `weight` is w_i."""
    missing = float(excess(weight * p, q).sum())
    return missing / (missing + 1 - weight) if weight < 1 else 1.0


def rest_of_block(p: np.ndarray, q: np.ndarray, weight: float) -> np.ndarray:
    """The law [V] of the token after a cut: norm(max(weight * p - q, 0)), or p if rounding leaves nothing."""
    left = excess(weight * p, q)
    return left if normalise_(left) else p


def accept_typical(
    proposal: Proposal, law: Callable[[int], np.ndarray], randomness: Randomness, position: int
) -> Verdict:
    """Lossy: Medusa's typical acceptance (Cai et al. 2024, 2401.10774), which leaves nothing to chance.

    A child x is accepted if p(x) > min(ε, δ exp(-H(p))): the less certain the target is, the less likely its
    token may be. Of the accepted paths the longest stands, of equally long ones the likeliest. The next
    token, the next tree's root and so what the paper calls the first token, is the likeliest one. The output
    does not follow the target's law. At temperature 0 this is the greedy walk.
    """
    tree = proposal.tree
    after = cache(law)
    bar = cache(lambda node: typical_bar(after(node)))
    accepted = {0: (0, 0.0)}  # node -> its depth, and the log-probability of its path
    for node, (token, parent) in enumerate(zip(tree.tokens[1:], tree.parent[1:], strict=True), 1):
        if parent in accepted and (p := float(after(parent)[token])) > bar(parent):
            depth, score = accepted[parent]
            accepted[node] = depth + 1, score + log(p)
    node = max(accepted, key=accepted.__getitem__)
    next_token = int(after(node).argmax())
    path = [node]
    while path[-1]:
        path.append(tree.parent[path[-1]])
    return Verdict(tuple(reversed(path)), next_token)


def typical_bar(p: np.ndarray) -> float:
    """min(ε, δ exp(-H(p))) of a law p [V], the entropy H being in nats."""
    some = p[p > 0]
    return min(EPSILON, DELTA * exp(float((some * np.log(some)).sum())))


Rule = Callable[[Proposal, Callable[[int], np.ndarray], Randomness, int], Verdict]
# What a sequence may ask for in place of `verify`.
ALTERNATIVES: dict[Verification, Rule] = {
    Verification.block: verify_block,
    Verification.typical: accept_typical,
}


def lossless(verification: Verification) -> bool:
    """Whether outputs follow the target's law under this rule. Results carry the answer."""
    return verification is not Verification.typical


def trials(proposal: Proposal, node: int) -> Iterator[tuple[int, Draws | None]]:
    """The children of `node` in the order in which they are tried, each with what it was drawn from, or None
    if it was chosen deterministically."""
    groups = proposal.draws.get(node, ())
    for group in groups:
        q = group
        for child in group.children:
            yield child, q
            if not group.replacement:
                q = q.without(proposal.tree.tokens[child])
    drawn = {child for group in groups for child in group.children}
    for child in proposal.tree.children(node):
        if child not in drawn:
            yield child, None


def follow(tree: TokenTree, choice: Callable[[int], int]) -> Verdict:
    """What `verify` comes to where every law is certain: the walk along the target's own choices.

    `choice(node)` is the token that the target is certain of after that node. A child is accepted if it is
    that one, and refusing another takes nothing from the law.
    """
    path = [0]
    while True:
        token = choice(path[-1])
        child = next((child for child in tree.children(path[-1]) if tree.tokens[child] == token), None)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)


def acceptance(p: np.ndarray, q: Draws | None, token: int) -> float:
    """Probability of letting `token` stand, not capped at 1. p: [V]; q None: chosen deterministically."""
    if q is None:
        return float(p[token])
    drawn = q.probability(token)
    return float(p[token]) / drawn if drawn > 0 else 0.0


def residual(p: np.ndarray, q: Draws | None, token: int) -> np.ndarray:
    """What is left of the law p [V] once `token` is refused.

    In exact arithmetic something is left whenever refusing was possible; if rounding leaves nothing, p stays.
    """
    if q is None:
        if p[token] == 0:
            return p
        left = p.copy()
        left[token] = 0
    else:
        left = q.excess(p)
    return left if normalise_(left) else p
