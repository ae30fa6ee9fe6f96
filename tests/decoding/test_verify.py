"""The walk down literal trees, with every probability that is asked for written down.

The chance is a list of answers to `accept`; what was asked and what was drawn from is noted.
"""

from __future__ import annotations

import numpy as np
import pytest

from decoding.drafters import DraftIds, Draws, Proposal
from decoding.randomness import Key, Purpose, Seeded
from decoding.tree import TokenTree
from decoding.verify import follow, residual, verify


class Scripted:
    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)
        self.asked: list[float] = []
        self.keys: list[Key] = []
        self.drawn_from: list[float] = []

    def accept(self, probability: float, key: Key) -> bool:
        self.asked.append(probability)
        self.keys.append(key)
        return self.answers.pop(0)

    def draw(self, law: np.ndarray, key: Key) -> int:
        self.drawn_from = law.tolist()
        self.keys.append(key)
        return int(law.argmax())


P = np.array([0.1, 0.2, 0.3, 0.4])
Q = np.array([0.4, 0.1, 0.3, 0.2])

# 0 - 1 (token 3) - 3 (token 2)
#   \ 2 (token 1)
TREE = TokenTree([0, 3, 1, 2], [-1, 0, 0, 1])


def laws(node: int) -> np.ndarray:
    return [P, P[::-1], P, np.roll(P, 1)][node]


def test_all_accepted_ends_with_a_bonus_from_the_leafs_law() -> None:
    chance = Scripted(True, True)
    verdict = verify(Proposal(TREE), laws, chance, position=10)
    assert verdict.path == (0, 1, 3)
    # p(3) at the root is .4; node 1's law is .4 .3 .2 .1, of which token 2 has .2; node 3's law is .4 .1 .2
    # .3.
    assert chance.asked == pytest.approx([0.4, 0.2])
    assert chance.drawn_from == pytest.approx([0.4, 0.1, 0.2, 0.3])
    assert verdict.next_token == 0
    assert chance.keys == [Key(11, Purpose.accept), Key(12, Purpose.accept), Key(13, Purpose.emit)]


def test_deterministic_children_leave_the_law_when_refused() -> None:
    chance = Scripted(False, False)
    verdict = verify(Proposal(TREE), laws, chance, position=10)
    assert verdict.path == (0,)
    # .4, then p(1) of what is left without token 3: .2 / .6; then tokens 0 and 2 remain with .1 and .3 of .4.
    assert chance.asked == pytest.approx([0.4, 1 / 3])
    assert chance.drawn_from == pytest.approx([0.25, 0, 0.75, 0])
    assert chance.keys == [Key(11, Purpose.accept, 0), Key(11, Purpose.accept, 1), Key(11, Purpose.emit)]


def test_second_child_may_be_the_one_accepted() -> None:
    verdict = verify(Proposal(TREE), laws, Scripted(False, True), position=10)
    assert verdict.path == (0, 2)
    assert verdict.next_token == 3  # node 2 is a leaf with law P


def test_sampled_children_without_replacement() -> None:
    # Children 0, then 2, drawn from Q. p / q = .1 / .4. After a refusal p - q is 0 .1 0 .2 (below 0: 0), that
    # is 0 1/3 0 2/3, and q without token 0 is 0 1/6 3/6 2/6, so that token 2 has 0 of it; after that, p - q
    # is 0 1/6 0 2/6, again 0 1/3 0 2/3.
    tree = TokenTree([9, 0, 2], [-1, 0, 0])
    chance = Scripted(False, False)
    verify(Proposal(tree, {0: [Draws(Q, (1, 2))]}), lambda node: P, chance, position=0)
    assert chance.asked == pytest.approx([0.25, 0])
    assert chance.drawn_from == pytest.approx([0, 1 / 3, 0, 2 / 3])


def test_sampled_child_likelier_under_the_target_is_certain() -> None:
    chance = Scripted(True)
    verify(Proposal(TokenTree.chain(9, [3]), {0: [Draws(Q, (1,))]}), lambda node: P, chance, position=0)
    assert chance.asked == pytest.approx([2.0])  # .4 / .2; 1 or more always holds


def test_nodes_without_a_law_are_deterministic() -> None:
    chance = Scripted(True, True)
    verify(Proposal(TokenTree.chain(9, [3, 2]), {0: [Draws(Q, (1,))]}), lambda node: P, chance, position=0)
    assert chance.asked == pytest.approx([2.0, 0.3])


def test_law_is_asked_for_at_walked_nodes_only() -> None:
    walked: list[int] = []

    def law(node: int) -> np.ndarray:
        walked.append(node)
        return P

    verify(Proposal(TREE), law, Scripted(False, True), position=0)
    assert walked == [0, 2]


def test_forbidden_token_is_refused_even_by_the_smallest_number() -> None:
    class Zero(Scripted):
        def accept(self, probability: float, key: Key) -> bool:
            return probability > 0.0

    law = np.array([0.5, 0.5, 0.0])
    for q in (None, np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.5, 0.0])):
        draws = {} if q is None else {0: [Draws(q, (1,))]}
        verdict = verify(Proposal(TokenTree.chain(0, [2]), draws), lambda node: law, Zero(), position=0)
        assert verdict.path == (0,)


def test_residual_without_mass_falls_back_to_p() -> None:
    assert residual(P, Draws(P, (1,)), 1) is P
    certain = np.array([0.0, 1.0])
    assert residual(certain, None, 1) is certain


def test_exhausted_draft_law_stays_finite() -> None:
    assert Draws(np.array([0.0, 1.0]), (1,)).without(1).law.tolist() == [0, 0]


def test_drawn_with_replacement_is_tried_as_often_as_drawn() -> None:
    # Token 0 drawn twice from Q, then token 3: p(0)/q(0) = .1/.4; after the refusal max(p - q, 0) is 0 .1 0
    # .2, that is 0 1/3 0 2/3, so the second trial has 0; again p - q leaves 0 .2333 0 .4667, the same law;
    # and token 3, still with q = .2, has 2/3 / .2.
    tree = TokenTree([9, 0, 3], [-1, 0, 0])
    chance = Scripted(False, False, True)
    drawn = Draws(Q, (1, 1, 2), replacement=True)
    verdict = verify(Proposal(tree, {0: [drawn]}), lambda node: P, chance, position=0)
    assert chance.asked == pytest.approx([0.25, 0, 10 / 3])
    assert verdict.path == (0, 2)


def test_groups_are_tried_one_after_the_other_each_with_its_law() -> None:
    # Token 0 from Q, refused: 0 1/3 0 2/3 is left. Then token 1, from another drafter's flat law: 1/3 / .25.
    # Node 3, in no group, comes last whatever its number.
    tree = TokenTree([9, 3, 0, 1], [-1, 0, 0, 0])
    chance = Scripted(False, False, False)
    groups = [Draws(Q, (2,)), Draws(np.full(4, 0.25), (3,))]
    verify(Proposal(tree, {0: groups}), lambda node: P, chance, position=0)
    # After the second refusal: max(p - .25, 0) is 0 .0833 0 .4167, so token 3 has 5/6.
    assert chance.asked == pytest.approx([0.25, 4 / 3, 5 / 6])
    assert chance.drawn_from == pytest.approx([0, 1, 0, 0])


def test_a_drafts_own_vocabulary_is_spread_over_the_targets() -> None:
    draws = Draws(np.array([0.25, 0.75]), (1,), DraftIds(np.array([0, 3])))
    assert draws.over(4).tolist() == [0.25, 0, 0, 0.75]
    assert [draws.probability(token) for token in range(4)] == [0.25, 0, 0, 0.75]
    assert draws.excess(np.array([0.5, 0.25, 0.0, 0.25])).tolist() == [0.25, 0.25, 0, 0]
    assert draws.without(0).over(4).tolist() == [0, 0, 0, 1]
    assert draws.without(1) is draws


def test_following_certain_laws_is_verifying_them() -> None:
    # All trees of four nodes over two tokens, under all choices after each node.
    for parent in ([-1, 0, 1, 2], [-1, 0, 0, 0], [-1, 0, 0, 1], [-1, 0, 1, 1], [-1, 0, 0, 2], [-1, 0, 1, 0]):
        for bits in range(2**7):
            tree = TokenTree([0, *(bits >> i & 1 for i in range(3))], parent)
            choices = [bits >> i & 1 for i in range(3, 7)]

            def law(node: int, choices: list[int] = choices) -> np.ndarray:
                return np.eye(2)[choices[node]]

            assert follow(tree, choices.__getitem__) == verify(Proposal(tree), law, Seeded(0), position=0)
