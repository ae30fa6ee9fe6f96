"""Prompt lookup: which match is taken, how it is continued, and that the index grows as if made at once."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.errors import ConfigError
from configs.schema import DecodeConfig
from decoding.drafters import Proposal, Seen, Turn
from decoding.drafters.lookup import LookupDrafter
from decoding.drafters.plain import PlainDrafter
from decoding.law import Law
from decoding.ngrams import SuffixIndex, lawful
from decoding.randomness import Seeded
from decoding.sequence import Params
from decoding.warp import Warp
from tests.decoding.replay import decoded_law, plain_law, total_variation
from tests.decoding.tables import TableTarget, decoder_of


def index_of(text: Sequence[int], shortest: int = 1, longest: int = 3) -> SuffixIndex:
    index = SuffixIndex(shortest, longest)
    index.extend(text)
    return index


class Without:
    """A grammar that forbids some ids everywhere."""

    def __init__(self, forbidden: Sequence[int], vocab: int = 10) -> None:
        self.allowed = torch.ones(vocab, dtype=torch.bool)
        self.allowed[list(forbidden)] = False

    def mask(self, path: Sequence[int]) -> Tensor:
        return self.allowed

    def forced(self, path: Sequence[int], limit: int) -> list[int]:
        return []

    def likely(self, path: Sequence[int], limit: int) -> list[int]:
        return []

    def commit(self, tokens: Sequence[int]) -> None:
        pass


def proposed(
    text: Sequence[int], budget: int = 3, forbidden: Sequence[int] = (), **settings: Any
) -> Proposal:
    """What is proposed after `text`, whose last token is pending."""
    drafter = LookupDrafter(**{"shortest": 1, "longest": 3, **settings})
    law = Law(Warp(), text, Without(forbidden) if forbidden else None)
    seen = Seen(0, list(text[:-1]), text[-1], torch.zeros(len(text) - 1, 0))
    (proposal,) = drafter.propose([Turn(drafter.begin(), seen, budget, law, Seeded(0))])
    assert not proposal.draws  # all deterministic
    return proposal


# The index


def test_match_is_what_followed_the_same_suffix() -> None:
    index = index_of([5, 6, 7, 8, 5, 6])
    # (5, 6) ended at 2, and so did (6,).
    assert list(index.matches()) == [2]
    assert index.following(2, 3) == [7, 8, 5]


def test_most_recent_match_wins() -> None:
    #                 ends at 2     5           (1, 2) now
    index = index_of([1, 2, 3, 1, 2, 4, 1, 2])
    assert list(index.matches()) == [5, 2]


def test_longest_match_wins_over_a_more_recent_one() -> None:
    #                 (9, 1, 2) ends at 3     (1, 2) at 6
    index = index_of([9, 1, 2, 3, 1, 2, 4, 9, 1, 2])
    assert list(index.matches()) == [3, 6]
    assert list(index_of(index.text, longest=2).matches()) == [6, 3]


def test_suffixes_shorter_than_asked_for_do_not_match() -> None:
    assert list(index_of([1, 2, 3, 2]).matches()) == [2]
    assert list(index_of([1, 2, 3, 2], shortest=2).matches()) == []


def test_suffix_is_no_match_of_itself() -> None:
    assert list(index_of([1, 2, 3]).matches()) == []
    assert list(index_of([]).matches()) == []


def test_copy_of_a_loop_goes_on_with_itself() -> None:
    # (7, 7) ended at 2, one before the end: a period of 1. (1, 2) ended at 2: a period of 2.
    assert list(index_of([7, 7, 7], shortest=2).matches()) == [2]
    assert index_of([7, 7, 7]).following(2, 4) == [7, 7, 7, 7]
    assert index_of([1, 2, 1, 2]).following(2, 5) == [1, 2, 1, 2, 1]
    assert index_of([4, 1, 2, 3, 1, 2]).following(3, 5) == [3, 1, 2, 3, 1]


def test_index_grown_in_pieces_is_the_one_made_at_once() -> None:
    random = Random(0)
    text = random.choices(range(3), k=200)
    grown = SuffixIndex(1, 4)
    while len(grown.text) < len(text):
        known = len(grown.text)
        grown.extend(text[known : known + random.randint(0, 5)])
        assert list(grown.matches()) == searched(grown.text, 1, 4)
    whole = index_of(text, 1, 4)
    assert (grown.text, grown.last, grown.before) == (whole.text, whole.last, whole.before)


def searched(text: list[int], shortest: int, longest: int) -> list[int]:
    """The matches by their definition, from the text alone."""
    found: list[int] = []
    for n in range(min(longest, len(text)), shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:] and end not in found:
                found.append(end)
    return found


# The drafter


def test_proposes_a_chain_of_the_budget() -> None:
    proposal = proposed([5, 6, 7, 8, 9, 5, 6], budget=2)
    assert proposal.tree.is_chain
    assert proposal.tree.tokens == [6, 7, 8]
    assert proposal.stopped == "budget"


def test_proposes_nothing_without_a_match() -> None:
    proposal = proposed([1, 2, 3])
    assert proposal.tree.tokens == [3]
    assert proposal.stopped == "unmatched"


def test_nothing_is_proposed_after_an_end_token() -> None:
    assert proposed([5, 6, 7, 8, 9, 5, 6], eos_ids=[8]).tree.tokens == [6, 7, 8]


def test_proposal_ends_before_a_forbidden_token() -> None:
    assert proposed([5, 6, 7, 8, 9, 5, 6], forbidden=[8]).tree.tokens == [6, 7]
    nothing = proposed([5, 6, 7, 8, 9, 5, 6], forbidden=[7])
    assert nothing.tree.tokens == [6]
    assert nothing.stopped == "grammar"


def test_older_match_stands_in_for_a_forbidden_one() -> None:
    assert proposed([1, 3, 1, 4, 1], budget=1, forbidden=[4]).tree.tokens == [1, 3]


def test_grammar_is_asked_with_the_path_so_far() -> None:
    class Alternating(Without):
        def mask(self, path: Sequence[int]) -> Tensor:
            return torch.arange(10) % 2 == len(path) % 2

    law = Law(Warp(), (), Alternating([]))
    assert lawful([2, 3, 4, 4, 5], law, ()) == [2, 3, 4]  # a fourth must be odd


def test_branches_are_the_most_recent_continuations_that_differ() -> None:
    # After 1 came, most recent first: 2 5, 2 4, again 2 4, and 3 9.
    #   1 - 2 - 5
    #   |   \ - 4
    #   \ - 3 - 9
    text = [1, 3, 9, 1, 2, 4, 1, 2, 4, 1, 2, 5, 1]
    proposal = proposed(text, budget=2, longest=1, branches=3)
    assert proposal.tree.tokens == [1, 2, 5, 4, 3, 9]
    assert proposal.tree.parent == [-1, 0, 1, 1, 0, 4]
    assert proposed(text, budget=2, longest=1, branches=2).tree.tokens == [1, 2, 5, 4]


def test_text_is_read_once_however_it_is_told() -> None:
    drafter = LookupDrafter(shortest=1)
    state = drafter.begin()

    def turn(start: int, tokens: list[int], pending: int) -> Turn:
        return Turn(
            state, Seen(start, tokens, pending, torch.zeros(len(tokens), 0)), 2, Law(Warp()), Seeded(0)
        )

    assert drafter.one(turn(0, [1, 2, 3], 1)).tree.tokens == [1, 2, 3]
    assert drafter.one(turn(3, [1, 2], 3)).tree.tokens == [3, 1, 2]  # told from the last pending token on
    assert drafter.one(turn(3, [1, 2, 3], 4)).tree.tokens == [4]  # told again, and more
    assert state.text == [1, 2, 3, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="knows 7 tokens, and is told of those from 9 on"):
        drafter.one(turn(9, [1], 2))


@pytest.mark.parametrize("settings", [{"shortest": 0}, {"shortest": 3, "longest": 2}, {"branches": 0}])
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LookupDrafter(**settings)


# In the decoder


def params(**settings: Any) -> Params:
    config = DecodeConfig(draft_tokens=4, max_new_tokens=16, temperature=0.0)
    for name, value in settings.items():
        setattr(config, name, value)
    return Params.of(config, seed=0)


class Cycle(TableTarget):
    """Certain that each token is followed by the next of 0 .. vocab - 1, the last by 0."""

    def logits(self, prefix: tuple[int, ...]) -> Tensor:
        return 50.0 * torch.eye(self.vocab, dtype=torch.float64)[(prefix[-1] + 1) % self.vocab]


def test_repeating_text_is_accepted_whole() -> None:
    # Prompt 0 1 2 0, prefill 1. (0, 1) has ended at 2, so 2 0 1 2 comes, all right, and 0 as the bonus.
    done = decoder_of(Cycle(3), LookupDrafter()).generate([0, 1, 2, 0], params())
    assert done.tokens == [1, 2, 0] * 5 + [1]
    assert [(round.drafted, round.accepted) for round in done.rounds] == [(4, 4)] * 3


@pytest.mark.parametrize("branches", [1, 2])
def test_greedy_output_is_plain_decodings(branches: int) -> None:
    target = TableTarget(3, seed=5)
    drafter = LookupDrafter(shortest=1, branches=branches)
    for prompt in ([0, 1, 2, 0], [1, 1, 1], [2]):
        plain = decoder_of(target, PlainDrafter()).generate(prompt, params())
        assert decoder_of(target, drafter).generate(prompt, params()).tokens == plain.tokens


@pytest.mark.parametrize("branches", [1, 2])
def test_law_is_the_targets(branches: int) -> None:
    settings = params(draft_tokens=2, max_new_tokens=4, temperature=0.7)
    target, prompt = TableTarget(3), [0, 1, 0, 2, 0]
    law = decoded_law(target, LookupDrafter(shortest=1, branches=branches), prompt, settings)
    assert total_variation(law, plain_law(target.table, prompt, settings, target.eos_ids)) < 1e-12
