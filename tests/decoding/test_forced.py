"""What must come is proposed without the drafter, or behind its leaves; slow masks shrink the tree alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import decoding.drafters.forced
from configs.schema import Proposal as Mode
from decoding.decoder import Decoder, Request
from decoding.drafters import EachAlone, Proposal, Seen, Turn, eagle3
from decoding.drafters.forced import ForcedDrafter, joined, leaves
from decoding.drafters.plain import PlainDrafter
from decoding.grammar import GrammarError, Grammars, Matcher
from decoding.growth import ChainGrowth
from decoding.law import Grammar, Law
from decoding.randomness import Seeded
from decoding.sequence import Params
from decoding.tree import TokenTree
from decoding.warp import Warp
from tests.conftest import tiny_draft, tiny_target, tiny_tokenizer
from tests.decoding.replay import law_of, total_variation
from tests.decoding.tables import TableDrafter, TableTarget, decoder_of

# tiny_tokenizer(8): the characters a, b, c are 5, 6, 7, and the end of text is 2.
END, A, B, C = 2, 5, 6, 7
VOCAB = 8
PROMPT = [1, 0]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(tiny_tokenizer(VOCAB), VOCAB, [END])


class Fixed(EachAlone):
    """Always proposes `tree`'s nodes behind the pending token, and notes what it was told."""

    def __init__(
        self, tokens: Sequence[int] = (), parent: Sequence[int] = (), wants_choices: bool = False
    ) -> None:
        self.tokens, self.parent = list(tokens), list(parent)
        self.wants_choices = wants_choices
        self.told: list[Seen] = []

    def one(self, turn: Turn) -> Proposal:
        self.told.append(turn.seen)
        return Proposal(TokenTree([turn.seen.pending, *self.tokens], [-1, *self.parent]))


def turn_of(
    drafter: ForcedDrafter, grammar: Grammar | None, budget: int = 4, seen: Seen | None = None
) -> Turn:
    law = Law(Warp(temperature=0.7), grammar=grammar)
    seen = seen or Seen(0, [1], 0, torch.zeros(1, 0))
    return Turn(drafter.begin(), seen, budget, law, Seeded(0))


def proposed(inner: Any, grammar: Grammar | None, budget: int = 4, **options: Any) -> Proposal:
    drafter = ForcedDrafter(inner, **options)
    return drafter.propose([turn_of(drafter, grammar, budget)])[0]


def test_run_that_fills_the_budget_needs_no_drafter(grammars: Grammars) -> None:
    inner = Fixed()
    proposal = proposed(inner, grammars.regex("abcabc"))
    assert proposal.tree == TokenTree.chain(0, [A, B, C, A])
    assert (proposal.draws, proposal.forwards, proposal.stopped) == ({}, 0, "forced")
    assert inner.told == []


def test_shorter_run_stands_behind_every_leaf(grammars: Grammars) -> None:
    # After a comes "bc"; after b one of three; after c the end.
    proposal = proposed(Fixed([A, B, C], [0, 0, 0]), grammars.regex("abc[ab]|b[abc]|c"), budget=3)
    #  0 - a 1 - b 4 - c 5
    #    \ b 2
    #    \ c 3 - end 6
    assert proposal.tree == TokenTree([0, A, B, C, B, C, END], [-1, 0, 0, 0, 1, 4, 3])


def test_budget_is_the_depth_at_most(grammars: Grammars) -> None:
    proposal = proposed(Fixed([A, B], [0, 1]), grammars.regex("(ab|c)abcabc"), budget=4)
    assert proposal.tree == TokenTree.chain(0, [A, B, A, B])


def test_only_the_first_leaves_are_extended(grammars: Grammars) -> None:
    # Nodes in the order of levels; a walk that takes first children comes to 3, then 4, then 2.
    tree = TokenTree([0, A, B, A, B], [-1, 0, 0, 1, 1])
    assert list(leaves(tree)) == [3, 4, 2]
    proposal = proposed(
        Fixed(tree.tokens[1:], tree.parent[1:]), grammars.regex("[ab]{2}c|bcc"), 3, max_leaves=1
    )
    assert proposal.tree == TokenTree([*tree.tokens, C], [*tree.parent, 3])


def test_leaf_that_breaks_the_grammar_is_left_alone(grammars: Grammars) -> None:
    assert len(proposed(Fixed([C], [0]), grammars.regex("[ab]c")).tree) == 2


def test_without_a_grammar_it_is_the_drafter_itself() -> None:
    inner = Fixed([A, B], [0, 1])
    assert proposed(inner, None).tree == TokenTree.chain(0, [A, B])
    assert len(inner.told) == 1


# What the inner drafter hears.


def test_drafter_hears_later_what_it_was_not_told(grammars: Grammars) -> None:
    inner = Fixed()
    drafter = ForcedDrafter(inner)
    matcher = grammars.regex("abc[ab]b?")
    taps = torch.arange(6.0)[:, None]
    first = turn_of(drafter, matcher, 2, Seen(0, [1, 3], 0, taps[:2]))
    drafter.propose([first])
    assert inner.told == []
    matcher.commit([A, B, C])  # "ab" was accepted; "c" is pending
    drafter.propose([replace(first, seen=Seen(2, [0, A, B], C, taps[2:5], [A, B, C]))])
    assert len(inner.told) == 1
    heard = inner.told[0]
    assert (heard.start, heard.tokens, heard.pending) == (0, [1, 3, 0, A, B], C)
    assert torch.equal(heard.taps, taps[:5])
    assert heard.choices is None  # made at a tree of ours
    matcher.commit([A])
    drafter.propose([replace(first, seen=Seen(5, [C], A, taps[5:], [A]))])
    assert (inner.told[1].start, inner.told[1].tokens) == (5, [C])


def test_choices_are_those_at_the_drafters_own_nodes(grammars: Grammars) -> None:
    inner = Fixed([A], [0], wants_choices=True)
    drafter = ForcedDrafter(inner)
    turn = turn_of(drafter, grammars.regex("[ab]c[ab]*"), 4)
    assert drafter.wants_choices
    assert drafter.propose([turn])[0].tree == TokenTree.chain(0, [A, C])
    drafter.propose([replace(turn, seen=Seen(1, [0], B, torch.zeros(1, 0), [A, C, B]))])
    assert inner.told[1].choices == [A, C]


def test_gap_in_what_is_told_is_an_error() -> None:
    with pytest.raises(ValueError, match="told up to 2"):
        joined(Seen(0, [1, 3], 0, torch.zeros(2, 0)), Seen(3, [A], B, torch.zeros(1, 0)))


# Time.


class Slow:
    """A grammar of which each answer takes 10 ms of the clock that it is given."""

    def __init__(self, grammar: Matcher, clock: list[float]) -> None:
        self.grammar, self.clock = grammar, clock

    def mask(self, path: Sequence[int]) -> Tensor:
        self.clock[0] += 0.010
        return self.grammar.mask(path)

    def forced(self, path: Sequence[int], limit: int) -> list[int]:
        self.clock[0] += 0.010
        return self.grammar.forced(path, limit)

    def likely(self, path: Sequence[int], limit: int) -> list[int]:
        self.clock[0] += 0.010
        return self.grammar.likely(path, limit)

    def commit(self, tokens: Sequence[int]) -> None:
        self.grammar.commit(tokens)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [0.0]
    monkeypatch.setattr(decoding.drafters.forced, "perf_counter", lambda: time[0])
    return time


@pytest.mark.parametrize(("limit_ms", "nodes"), [(15, 2), (35, 3), (45, 4), (1e9, 4)])
def test_tree_shrinks_when_masks_take_too_long(
    grammars: Grammars, clock: list[float], limit_ms: float, nodes: int
) -> None:
    # Two questions for a run take 20 ms, then each row 10; the first row is answered in any case.
    inner = TableDrafter(VOCAB, Mode.sampled, parent=[-1, 0, 1, 2])
    proposal = proposed(inner, Slow(grammars.regex("[ab]{9}"), clock), 3, max_mask_ms=limit_ms)
    assert len(proposal.tree) == nodes


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("limit_ms", [5, 25, 35])
def test_time_changes_no_law(
    grammars: Grammars, clock: list[float], limit_ms: float, temperature: float
) -> None:
    decoder = decoder_of(
        TableTarget(VOCAB, eos=(END,)), ForcedDrafter(TableDrafter(VOCAB, Mode.sampled), limit_ms)
    )
    plain = decoder_of(TableTarget(VOCAB, eos=(END,)), PlainDrafter())

    def law(decoder: Decoder) -> dict[tuple[int, ...], float]:
        def play(replay: Any) -> tuple[int, ...]:
            grammar = Slow(grammars.regex("[ab]{2}c[ab]?"), clock)
            return tuple(decoder.generate(PROMPT, params(temperature), replay, grammar).tokens)

        return law_of(play)

    assert total_variation(law(decoder), law(plain)) < 1e-12


def test_failure_on_a_drafted_path_is_not_the_sequences(grammars: Grammars) -> None:
    """Nobody spells "d": after the proposed b nothing can come, and the target may never go there."""
    matcher = grammars.regex("a[ab]c|bd")
    proposal = proposed(Fixed([B, A], [0, 0]), matcher)
    assert proposal.tree == TokenTree([0, B, A], [-1, 0, 0])
    with pytest.raises(GrammarError):
        matcher.mask([B])
    assert matcher.mask([A]).nonzero().flatten().tolist() == [A, B]


def params(temperature: float = 0.0, **others: Any) -> Params:
    values = {"draft_tokens": 3, "max_new_tokens": 6, "top_k": 0, "top_p": 1.0, "stop": (), "seed": 0}
    return Params(temperature=temperature, **{**values, **others})


# A real draft, alone and in a batch.


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("mode", list(Mode))
def test_greedy_output_of_a_batch_is_plain_masked_decoding(mode: Mode, batch_size: int) -> None:
    target = tiny_target()
    grammars = Grammars.of(target)
    draft = eagle3.build(tiny_draft(target), ChainGrowth(mode), target.eos_ids)
    settings = params(draft_tokens=4, max_new_tokens=50)
    patterns = [r"item [a-c]{2,4}(, item [a-c]{1,3}){1,2}\.", "x{3,6}y: [0-9]{2,5}", "(yes|no|unknown)!"]
    prompts = [[5, 9, 7], [1, 30, 31, 32, 33], [40]]

    def outputs(decoder: Decoder) -> list[list[int]]:
        requests = [
            Request(prompt, settings, grammars.regex(pattern))
            for prompt, pattern in zip(prompts, patterns, strict=True)
        ]
        done = decoder.generate_all(requests)
        assert all(generation.finish == "eos" for generation in done)
        return [generation.tokens for generation in done]

    plain = outputs(Decoder(target, PlainDrafter()))
    assert outputs(Decoder(target, ForcedDrafter(draft), batch_size)) == plain
    assert outputs(Decoder(target, draft, batch_size)) == plain


def test_forced_rounds_cost_the_drafter_nothing() -> None:
    target = tiny_target()
    draft = eagle3.build(tiny_draft(target), ChainGrowth(Mode.greedy), target.eos_ids)
    grammar = Grammars.of(target).regex("the answer is (yes|no).")
    done = Decoder(target, ForcedDrafter(draft)).generate(
        [5, 9], params(draft_tokens=4, max_new_tokens=40), None, grammar
    )
    assert [round.stopped for round in done.rounds[:2]] == ["forced", "forced"]
    assert [round.accepted for round in done.rounds[:2]] == [4, 4]
    assert target.tokenizer.decode(done.tokens[:14]) == "the answer is "
