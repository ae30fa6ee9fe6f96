"""The one acceptance rule: a walk down the proposed tree that leaves the target's law untouched.

At a node with law p, its children are tried in order (Leviathan et al. 2023, Chen et al. 2023 for one child;
Sequoia, Chen et al. 2024, for several drawn without replacement):

    children chosen deterministically    accept x with p(x)              else p <- norm(p without x)
    children drawn from q                accept x with min(1, p(x)/q(x)) else p <- norm(max(p - q, 0)),
                                                                              q <- norm(q without x)

If no child is accepted, the next token is drawn from what is left of p: at a leaf, p itself (the bonus).
Children drawn with replacement (SpecInfer) need another update of q and are not supported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from decoding.drafters import Proposal
from decoding.randomness import Key, Purpose, Randomness
from decoding.tree import TokenTree


@dataclass(frozen=True)
class Verdict:
    path: tuple[int, ...]  # accepted nodes from the root on, the root included
    next_token: int  # drawn after the path's last node: the new pending token


def verify(
    proposal: Proposal, law: Callable[[int], Tensor], randomness: Randomness, position: int
) -> Verdict:
    """Walks `proposal.tree`, whose root is at absolute `position`.

    `law(node)` is the target's law [V] after that node; it is asked for at the walked nodes only.
    """
    tree = proposal.tree
    path = [0]
    while True:
        node = path[-1]
        position += 1
        p = law(node)
        q = proposal.q.get(node) if proposal.q is not None else None
        refused = None
        for rank, child in enumerate(tree.children(node)):
            token = tree.tokens[child]
            if refused is not None:
                q = without(q, refused)
            if randomness.accept(acceptance(p, q, token), Key(position, Purpose.accept, rank)):
                path.append(child)
                break
            p, refused = residual(p, q, token), token
        else:
            return Verdict(tuple(path), randomness.draw(p, Key(position, Purpose.emit)))


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


def acceptance(p: Tensor, q: Tensor | None, token: int) -> float:
    """Probability of letting `token` stand, not capped at 1. p, q: [V]; q None: chosen deterministically."""
    if q is None:
        return float(p[token])
    drawn = float(q[token])
    return float(p[token]) / drawn if drawn > 0 else 0.0


def residual(p: Tensor, q: Tensor | None, token: int) -> Tensor:
    """What is left of the law p [V] once `token` is refused.

    In exact arithmetic something is left whenever refusing was possible; if rounding leaves nothing, p stays.
    """
    if q is None:
        if p[token] == 0:
            return p
        left = p.clone()
        left[token] = 0
    else:
        left = (p - q).clamp_(min=0)
    mass = float(left.sum())
    return left.div_(mass) if mass > 0 else p


def without(q: Tensor | None, token: int) -> Tensor | None:
    """The law [V] of the next sibling, drawn without replacement: q with `token` struck out, renormalised."""
    if q is None:
        return None
    left = q.clone()
    left[token] = 0
    mass = left.sum()
    return left / mass if mass > 0 else left
