"""Typical acceptance on literal trees: where its bar lies, which path stands, and that it is lossy."""

from __future__ import annotations

from itertools import product
from math import exp, log

import numpy as np
import pytest
import torch

from configs.schema import DecodeConfig, Verification
from configs.schema import Proposal as Mode
from decoding.drafters import Proposal
from decoding.randomness import Seeded
from decoding.sequence import Params
from decoding.tree import TokenTree
from decoding.verify import Verdict, accept_typical, follow, typical_bar
from tests.decoding.replay import decoded_law, plain_law, total_variation
from tests.decoding.tables import TableDrafter, TableTarget


def judged(tree: TokenTree, laws: list[list[float]]) -> Verdict:
    return accept_typical(Proposal(tree), lambda node: np.array(laws[node]), Seeded(0), position=0)


def test_bar() -> None:
    # Certain: H = 0, so the bar is min(.09, .3). Even over 4: H = log 4, so it is .3 / 4 = .075.
    assert typical_bar(np.array([1.0, 0.0])) == pytest.approx(0.09)
    assert typical_bar(np.array([0.25] * 4)) == pytest.approx(0.075)
    # Half, quarter, quarter: H = 1.5 log 2, .3 / 2 ** 1.5 = .106, so .09 holds.
    assert typical_bar(np.array([0.5, 0.25, 0.25])) == pytest.approx(0.09)
    assert 0.3 * exp(-1.5 * log(2)) > 0.09


# .9 .08 .02 has H = .375, so its bar is .09; .25 each has .075.
SURE, EVEN = [0.9, 0.08, 0.02, 0.0], [0.25, 0.25, 0.25, 0.25]


def test_chain_is_cut_at_the_first_untypical_token() -> None:
    # Token 1 has .25 > .075 under EVEN, token 1 has .08 < .09 under SURE. The next token is SURE's likeliest.
    assert judged(TokenTree.chain(9, [1, 1, 0]), [EVEN, SURE, EVEN, EVEN]) == Verdict((0, 1), 0)


def test_token_at_the_bar_is_refused() -> None:
    # With ε = .09 a token of exactly .09 is not above it.
    law = np.array([0.91, 0.09])
    tree = Proposal(TokenTree.chain(9, [1]))
    assert accept_typical(tree, lambda node: law, Seeded(0), 0).path == (0,)


def test_longest_accepted_path_stands_then_the_likeliest() -> None:
    # 0 - 1 (0) - 3 (3)      node 3 is refused: token 3 has 0 under SURE
    #   \ 2 (1) - 4 (0)      node 4 is accepted
    tree = TokenTree([9, 0, 1, 3, 0], [-1, 0, 0, 1, 2])
    first = [0.6, 0.2, 0.1, 0.1]
    assert judged(tree, [first, SURE, SURE, EVEN, [0.0, 0.0, 1.0, 0.0]]) == Verdict((0, 2, 4), 2)
    # Without node 4 both children of the root are equally long, and token 0 is likelier whatever the order.
    assert judged(TokenTree([9, 1, 0], [-1, 0, 0]), [first, SURE, SURE]).path == (0, 2)


def test_laws_are_asked_for_after_accepted_nodes_only() -> None:
    def law(node: int) -> np.ndarray:
        assert node in (0, 1)
        return np.array(SURE)

    tree = TokenTree([9, 0, 2, 2, 1], [-1, 0, 0, 1, 2])
    assert accept_typical(Proposal(tree), law, Seeded(0), 0) == Verdict((0, 1), 0)


def test_certain_laws_make_it_the_greedy_walk() -> None:
    # All trees of four nodes over two tokens, under all choices after each node; twins may differ in node.
    for parent in ([-1, 0, 1, 2], [-1, 0, 0, 0], [-1, 0, 0, 1], [-1, 0, 1, 1], [-1, 0, 0, 2]):
        for *tokens, a, b, c, d in product((0, 1), repeat=7):
            tree, choices = TokenTree([0, *tokens], parent), [a, b, c, d]
            ours, walked = judged(tree, torch.eye(2)[choices].tolist()), follow(tree, choices.__getitem__)
            siblings = [[tree.tokens[child] for child in tree.children(node)] for node in range(4)]
            if all(len({*tokens}) == len(tokens) for tokens in siblings):
                assert ours == walked


@pytest.mark.parametrize(("temperature", "exact"), [(0.0, True), (1.0, False)])
def test_decoders_law_is_the_targets_at_temperature_0_only(temperature: float, exact: bool) -> None:
    config = DecodeConfig(
        draft_tokens=2, max_new_tokens=4, temperature=temperature, verification=Verification.typical
    )
    params, target = Params.of(config, seed=0), TableTarget(3)
    law = decoded_law(target, TableDrafter(3, Mode.sampled), [1, 0], params)
    far = total_variation(law, plain_law(target.table, [1, 0], params, target.eos_ids))
    assert far < 1e-12 if exact else far > 0.1
