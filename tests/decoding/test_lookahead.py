"""Lookahead: the window in the tree, how it moves on, what the pool keeps, and that all of it is lossless."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.errors import ConfigError
from configs.schema import DecodeConfig
from decoding.decoder import Decoder, Request
from decoding.drafters import Proposal, Seen, Turn
from decoding.drafters.lookahead import LookaheadDrafter, Window, moved, place
from decoding.drafters.plain import PlainDrafter
from decoding.law import Law
from decoding.ngrams import Pool, Trie
from decoding.randomness import Seeded
from decoding.sequence import Params
from decoding.warp import Warp
from tests.conftest import tiny_target
from tests.decoding.replay import decoded_law, plain_law, total_variation
from tests.decoding.tables import ForcedTarget, TableTarget, decoder_of

# The window


def test_window_in_the_tree() -> None:
    """N = 4, W = 3. Columns run to the right, levels down; nodes are numbered as they are placed:

    level 0   1 - 2 - 3        0 - 1 - 2
              |   |   |        |   |   |
    level 1   4   5   6        3   4   5
              |   |   |        |   |   |
    level 2   7   8   9        6   7   8
    """
    trie = Trie(1)
    tops = place([[1, 2, 3], [4, 5, 6], [7, 8, 9]], trie)
    tree = trie.tree()
    assert tops == [6, 7, 8]
    assert tree.tokens == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert tree.parent == [-1, 0, 1, 0, 1, 2, 3, 4, 5]
    assert tree.depth == [0, 1, 2, 1, 2, 3, 2, 3, 4]  # level + column
    sees = [[i for i, seen in enumerate(row) if seen] for row in tree.ancestor_mask().tolist()]
    assert sees == [
        [0],
        [0, 1],
        [0, 1, 2],  # level 0: causal
        [0, 3],
        [0, 1, 4],
        [0, 1, 2, 5],  # level 1: itself, and level 0 up to its column
        [0, 3, 6],
        [0, 1, 4, 7],
        [0, 1, 2, 5, 8],  # level 2: also level 1 of its column
    ]


def test_equal_tokens_under_one_parent_are_one_node() -> None:
    # Column 0 guesses for t + 1 what column 1 has there: 1 - 2 - 3, and 5 after 2 for both columns.
    trie = Trie(1)
    assert place([[1, 2], [2, 5]], trie) == [1, 2]
    assert trie.tree().tokens == [1, 2, 5]


def test_window_while_it_is_filled() -> None:
    # N = 4, W = 3: level 0 begins with W + N - 2 = 5 columns. The target says 11..15 after them; 11 is the
    # next pending token, and column 1 becomes column 0, with 12 as what comes after its 2.
    levels = moved([[1, 2, 3, 4, 5], [11, 12, 13, 14, 15]], 4, emitted=1)
    assert levels == [[2, 3, 4, 5], [12, 13, 14, 15]]
    # Then it says 21..24 after level 1, and three columns of three levels are left.
    levels = moved([*levels, [21, 22, 23, 24]], 4, emitted=1)
    assert levels == [[3, 4, 5], [13, 14, 15], [22, 23, 24]]


def test_full_window_moves_its_levels_down() -> None:
    rows = [[1, 2, 3], [11, 12, 13], [21, 22, 23], [31, 32, 33]]
    assert moved(rows, 4, emitted=1) == [[11, 12, 13], [21, 22, 23], [31, 32, 33]]


def test_columns_stay_at_their_positions_when_more_is_accepted() -> None:
    # Three tokens emitted: the token for t' + j is the one that stood for t + 3 + j, two columns further on.
    # Columns 0 and 1 were overtaken and go round.
    rows = [[1, 2, 3], [11, 12, 13], [21, 22, 23], [31, 32, 33]]
    assert moved(rows, 4, emitted=3) == [[13, 11, 12], [23, 21, 22], [33, 31, 32]]
    assert moved(rows, 4, emitted=4) == moved(rows, 4, emitted=1)


# The pool


def test_pool_keeps_the_newest_of_each_key() -> None:
    pool = Pool(2)
    for gram in ([1, 2, 3], [1, 4, 5], [6, 7, 8], [1, 2, 3], [1, 9, 9]):
        pool.add(gram)
    # (2, 3) was renewed, so (4, 5) was the oldest when (9, 9) came.
    assert pool.after(1) == [(9, 9), (2, 3)]
    assert pool.after(6) == [(7, 8)]
    assert pool.after(2) == []


def test_pool_of_size_0_keeps_nothing() -> None:
    pool = Pool(0)
    pool.add([1, 2])
    assert pool.grams == {}


# The drafter, round by round


class Rounds:
    """Plays the decoder for one sequence of `drafter`: each round says what the target chose everywhere."""

    def __init__(self, drafter: LookaheadDrafter, prompt: list[int], pending: int) -> None:
        self.drafter = drafter
        self.window: Window = drafter.begin()
        self.seen = Seen(0, prompt, pending, torch.zeros(len(prompt), 0))

    def propose(self, budget: int = 9) -> Proposal:
        turn = Turn(self.window, self.seen, budget, Law(Warp()), Seeded(0))
        (proposal,) = self.drafter.propose([turn])
        assert not proposal.draws
        return proposal

    def tell(self, tokens: list[int], pending: int, choices: list[int]) -> None:
        """`tokens` were committed, the last pending one first."""
        self.seen = Seen(self.seen.position, tokens, pending, torch.zeros(len(tokens), 0), choices)


def test_rounds_by_hand() -> None:
    """N = 3, W = 2: level 0 begins with 3 columns, and one round fills the other level."""
    rounds = Rounds(LookaheadDrafter(ngram=3, window=2, guesses=2, from_text=False), [7, 7], 1)
    # 1 - 7 - 7: the prompt has nothing but 7 to begin with.
    assert rounds.propose().tree.tokens == [1, 7, 7]
    assert rounds.window.pool.grams == {}

    # The target says 2 after 1, 3 after 7, 4 after 7 7. Level 0 is 2 - 7, level 1 is 3 4.
    #   2 - 7
    #   |   |
    #   3   4
    rounds.tell([1], 2, choices=[2, 3, 4])
    tree = rounds.propose().tree
    assert (tree.tokens, tree.parent) == ([2, 7, 3, 4], [-1, 0, 0, 1])
    assert rounds.window.pool.grams == {}  # no column had three tokens yet

    # It says 5 after 2, 6 after 7, 8 after 3, 9 after 4. Columns 2 3 8 and 7 4 9 enter the pool, level 0 is
    # 5 - 4 (5 pending in place of 3), level 1 is 8 9. Nothing in the pool begins with 5.
    rounds.tell([2], 5, choices=[5, 6, 8, 9])
    tree = rounds.propose().tree
    assert (tree.tokens, tree.parent) == ([5, 4, 8, 9], [-1, 0, 0, 1])
    assert rounds.window.pool.grams == {2: {(3, 8): None}, 7: {(4, 9): None}}

    # Pending 2: its n-gram is proposed beside the window 2 - 9, 1, 1, the target having said 1 everywhere.
    #   2 - 9 - 1
    #   | - 1
    #   \ - 3 - 8
    rounds.tell([5], 2, choices=[2, 1, 1, 1])
    tree = rounds.propose().tree
    assert (tree.tokens, tree.parent) == ([2, 9, 1, 1, 3, 8], [-1, 0, 0, 1, 0, 4])
    assert rounds.window.pool.after(5) == [(8, 1)]


def test_guess_that_begins_like_the_window_goes_on_from_its_node() -> None:
    rounds = Rounds(LookaheadDrafter(ngram=3, window=1, guesses=2, from_text=False), [7], 1)
    rounds.window.pool.add([1, 7, 5])
    # The window is 1 - 7, the guess 1 7 5: were 7 there twice, a walk would take the first, and lose the 5.
    assert rounds.propose().tree.tokens == [1, 7, 5]


def test_pool_takes_the_n_grams_of_the_text() -> None:
    rounds = Rounds(LookaheadDrafter(ngram=3, window=1, guesses=2), [1, 2, 3], 1)
    rounds.propose()
    assert rounds.window.pool.grams == {1: {(2, 3): None}, 2: {(3, 1): None}}
    rounds.tell([1, 4], 5, choices=[])
    rounds.propose()
    assert rounds.window.pool.after(3) == [(1, 4)]
    assert rounds.window.pool.after(1) == [(4, 5), (2, 3)]


@pytest.mark.parametrize("choices", [[], [9] * 2, [9] * 9])
def test_choices_at_another_tree_begin_a_new_window(choices: list[int]) -> None:
    rounds = Rounds(LookaheadDrafter(ngram=3, window=2, from_text=False), [7], 1)
    rounds.propose()
    rounds.tell([1, 2], 3, choices=choices)
    assert rounds.propose().tree.tokens == [3, 7, 7]


def test_window_is_cut_to_the_budget() -> None:
    drafter = LookaheadDrafter(ngram=4, window=3, from_text=False)
    # Depth W + N - 3 = 4 is what it needs; with 3 a column is missing, with 1 none would ever be filled.
    assert len(Rounds(drafter, [7], 1).propose(budget=4).tree) == 5
    assert len(Rounds(drafter, [7], 1).propose(budget=3).tree) == 4
    assert len(Rounds(drafter, [7], 1).propose(budget=1).tree) == 1


def test_smaller_budget_cuts_the_columns_that_reach_deepest() -> None:
    rounds = Rounds(LookaheadDrafter(ngram=3, window=2, from_text=False), [7, 7], 1)
    rounds.propose()
    rounds.tell([1], 2, choices=[2, 3, 4])
    tree = rounds.propose(budget=1).tree  # of 2 - 7 over 3 4, as above, only column 0 is left
    assert (tree.tokens, tree.parent) == ([2, 3], [-1, 0])
    rounds.tell([2], 5, choices=[5, 8])
    assert rounds.propose(budget=1).tree.tokens == [5, 8]
    rounds.tell([5], 6, choices=[0, 0])
    assert rounds.propose(budget=2).tree.tokens == [6, 7, 7]  # room for two columns: begun anew


def test_guesses_are_cut_to_the_budget_and_at_an_end_token() -> None:
    rounds = Rounds(LookaheadDrafter([2], ngram=4, window=1, guesses=2, from_text=False), [7], 1)
    rounds.window.pool.add([1, 3, 4, 5])
    rounds.window.pool.add([1, 6, 2, 6])
    assert rounds.propose(budget=1).tree.tokens == [1, 6, 3]
    assert rounds.propose(budget=3).tree.tokens[-5:] == [6, 2, 3, 4, 5]


def test_every_depth_is_within_the_budget() -> None:
    for budget in range(1, 7):
        rounds = Rounds(LookaheadDrafter(), [1, 2, 3, 1, 2], 3)
        for _ in range(6):
            tree = rounds.propose(budget).tree
            assert max(tree.depth) <= budget
            rounds.tell([rounds.seen.pending], 1, choices=list(range(len(tree))))


@pytest.mark.parametrize("settings", [{"ngram": 1}, {"window": 0}, {"guesses": -1}])
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LookaheadDrafter(**settings)


# In the decoder


def params(**settings: Any) -> Params:
    config = DecodeConfig(draft_tokens=4, max_new_tokens=24, temperature=0.0)
    for name, value in settings.items():
        setattr(config, name, value)
    return Params.of(config, seed=0)


SETTINGS = [
    pytest.param({}, id="default"),
    pytest.param({"ngram": 2, "guesses": 0}, id="jacobi"),
    pytest.param({"ngram": 3, "window": 1, "guesses": 1}, id="narrow"),
    pytest.param({"ngram": 5, "window": 4, "from_text": False}, id="deeper-than-the-budget"),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_greedy_output_is_plain_decodings(settings: dict[str, Any]) -> None:
    target = tiny_target(vocab=12, hidden=16, layers=2)
    prompts = [[5, 6, 7, 5, 6], [3], [9, 9, 4]]
    plain = [Decoder(target, PlainDrafter()).generate(prompt, params()).tokens for prompt in prompts]
    decoder = Decoder(target, LookaheadDrafter(target.eos_ids, **settings), batch_size=2)
    done = decoder.generate_all([Request(prompt, params()) for prompt in prompts])
    assert [generation.tokens for generation in done] == plain
    alone = [decoder.generate(prompt, params()) for prompt in prompts]
    assert [rounds(generation) for generation in alone] == [rounds(generation) for generation in done]


def rounds(generation: Any) -> list[tuple[int, int]]:
    return [(round.nodes, round.accepted) for round in generation.rounds]


@pytest.mark.parametrize("settings", SETTINGS)
def test_law_is_the_targets(settings: dict[str, Any]) -> None:
    sampling = params(draft_tokens=2, max_new_tokens=4, temperature=0.7)
    target, prompt = TableTarget(3), [0, 1, 0, 2, 0]
    law = decoded_law(target, LookaheadDrafter(**settings), prompt, sampling)
    assert total_variation(law, plain_law(target.table, prompt, sampling, target.eos_ids)) < 1e-12


class Successor(TableTarget):
    """Certain that x is followed by x + 1, the last id by 0."""

    def logits(self, prefix: tuple[int, ...]) -> Tensor:
        return 50.0 * torch.eye(self.vocab, dtype=torch.float64)[(prefix[-1] + 1) % self.vocab]


def accepted(target: Any, drafter: LookaheadDrafter, prompt: Sequence[int]) -> list[int]:
    return [round.accepted for round in decoder_of(target, drafter).generate(prompt, params()).rounds]


def test_n_grams_of_the_window_are_accepted() -> None:
    # Once two rounds have filled the window, each column is x, x + 1, x + 2, x + 3 for some x. The prompt's
    # tokens, 0..3, are all there is to begin with; after one turn through the four every key is in the pool,
    # and a guess of N - 1 = 3 is right.
    got = accepted(Successor(4), LookaheadDrafter(from_text=False), [0, 1, 2, 3])
    assert got[0] == 0
    assert got[-3:-1] == [3, 3]
    assert max(got) <= 4


def test_jacobi_accepts_what_does_not_hang_on_the_guess() -> None:
    # The target's tokens depend on the position alone, so after one iteration all three guesses are right;
    # they are accepted, the next window has been overtaken, and so on. The prompt's 0 is never right.
    target = ForcedTarget([0, 0, *[1 + i % 5 for i in range(40)]], 6)
    got = accepted(target, LookaheadDrafter(ngram=2, window=4, guesses=0), [0, 0])
    assert got[:6] == [0, 3, 0, 3, 0, 3]
