"""Merged trees: which nodes become one, whose draws they are, and that the target's law is kept exactly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.errors import ConfigError
from configs.schema import DecodeConfig
from configs.schema import Proposal as Mode
from decoding.build import build_drafter
from decoding.decoder import Decoder, Request
from decoding.drafters import Drafter, Draws, EachAlone, Proposal, Seen, Turn
from decoding.drafters.lookahead import LookaheadDrafter
from decoding.drafters.lookup import LookupDrafter
from decoding.drafters.merged import MergedDrafter, Merging, Share, picked
from decoding.drafters.plain import PlainDrafter
from decoding.law import Law
from decoding.randomness import Key, Purpose, Seeded
from decoding.sequence import Params
from decoding.tree import TokenTree
from decoding.verify import Rule, verify, verify_block
from decoding.warp import Warp
from tests.conftest import tiny_draft, tiny_target
from tests.decoding.replay import Replay, decoded_law, law_of, plain_law, total_variation
from tests.decoding.tables import CHAIN, Table, TableDrafter, TableTarget

Q, R = np.full(10, 0.1), np.full(10, 0.1)  # equal, but told apart as objects


def merge(*proposals: Proposal, max_nodes: int | None = None) -> tuple[Proposal, Merging]:
    merging = Merging(proposals, max_nodes)
    return merging.proposal(), merging


def groups(proposal: Proposal) -> dict[int, list[tuple[str, tuple[int, ...]]]]:
    """Each node's groups: whose law, and which children."""
    return {
        node: [("q" if group.law is Q else "r", group.children) for group in at]
        for node, at in proposal.draws.items()
    }


# Literal trees


def test_drawn_by_both_stands_in_both_groups() -> None:
    """p - a - b   and   p - a - c   make   p - a - b
    |                  |   - c
    d                  d          with p, a, b, c, d = 0, 1, 2, 3, 4.
    """
    first = Proposal(TokenTree([0, 1, 2], [-1, 0, 1]), {0: [Draws(Q, (1,))], 1: [Draws(Q, (2,))]})
    second = Proposal(TokenTree([0, 1, 4, 3], [-1, 0, 0, 1]), {0: [Draws(R, (1, 2))], 1: [Draws(R, (3,))]})
    proposal, merging = merge(first, second)
    assert proposal.tree.tokens == [0, 1, 4, 2, 3]
    assert proposal.tree.parent == [-1, 0, 0, 1, 1]
    assert groups(proposal) == {0: [("q", (1,)), ("r", (1, 2))], 1: [("q", (3,)), ("r", (4,))]}
    assert merging.names == [{0: 0, 1: 1, 2: 3}, {0: 0, 1: 1, 2: 2, 3: 4}]


@pytest.mark.parametrize("drawn_first", [True, False])
def test_drawn_by_one_stands_in_its_group_alone(drawn_first: bool) -> None:
    drawn = Proposal(TokenTree([0, 1, 2], [-1, 0, 1]), {0: [Draws(Q, (1,))], 1: [Draws(Q, (2,))]})
    chosen = Proposal(TokenTree.chain(0, [1, 3]))
    proposal, _ = merge(*([drawn, chosen] if drawn_first else [chosen, drawn]))
    second, third = (2, 3) if drawn_first else (3, 2)
    assert proposal.tree.tokens == [0, 1, second, third]
    assert proposal.tree.parent == [-1, 0, 1, 1]
    assert groups(proposal) == {0: [("q", (1,))], 1: [("q", (proposal.tree.tokens.index(2),))]}


def test_equal_chains_are_one_chain() -> None:
    chain = Proposal(TokenTree.chain(0, [1, 2]))
    proposal, _ = merge(chain, chain, Proposal(TokenTree.chain(0)))
    assert proposal.tree.is_chain
    assert proposal.tree.tokens == [0, 1, 2]
    assert proposal.draws == {}


def test_draws_with_replacement_keep_their_multiplicity() -> None:
    drawn = Proposal(TokenTree([0, 1, 2], [-1, 0, 0]), {0: [Draws(Q, (1, 2, 1), replacement=True)]})
    proposal, _ = merge(Proposal(TokenTree.chain(0, [3])), drawn)
    assert proposal.draws[0] == [Draws(Q, (2, 3, 2), replacement=True)]


def test_costs_add_up() -> None:
    first = Proposal(TokenTree.chain(0), seconds=0.5, forwards=3, stopped="confidence")
    proposal, _ = merge(first, Proposal(TokenTree.chain(0), seconds=0.25, forwards=1))
    assert (proposal.seconds, proposal.forwards, proposal.stopped) == (0.75, 4, "confidence")


def test_limit_keeps_the_shallowest_and_of_those_the_first_drafters() -> None:
    #   0 - 1 - 2 - 3    and    0 - 4 - 5 - 6
    first, second = Proposal(TokenTree.chain(0, [1, 2, 3])), Proposal(TokenTree.chain(0, [4, 5, 6]))
    proposal, _ = merge(first, second, max_nodes=4)
    assert (proposal.tree.tokens, proposal.tree.parent) == ([0, 1, 4, 2], [-1, 0, 0, 1])
    assert proposal.stopped == "nodes"
    assert merge(first, second, max_nodes=7)[0].stopped == "budget"


def test_full_tree_takes_no_draw_that_is_in_it_already() -> None:
    # Were the second draw of 1 counted, then a draw would count by what it is.
    drawn = Proposal(TokenTree([0, 1, 2], [-1, 0, 0]), {0: [Draws(Q, (1, 1, 2), replacement=True)]})
    proposal, _ = merge(drawn, max_nodes=2)
    assert groups(proposal) == {0: [("q", (1,))]}
    same = Proposal(TokenTree.chain(0, [1]), {0: [Draws(R, (1,))]})
    assert groups(merge(drawn, same, max_nodes=2)[0]) == {0: [("q", (1,))]}


# What each drafter is told


class Witness(EachAlone):
    """Proposes a fixed tree, and notes what it was told and what it drew."""

    def __init__(self, tree: TokenTree, taps: tuple[int, ...] = (), wants_choices: bool = False) -> None:
        self.tree = tree
        self.taps = taps
        self.wants_choices = wants_choices
        self.turns: list[Turn] = []
        self.ended: list[Any] = []

    def begin(self) -> object:
        return object()

    def end(self, state: Any) -> None:
        self.ended.append(state)

    def one(self, turn: Turn) -> Proposal:
        self.turns.append(turn)
        return Proposal(self.tree)


def turn(state: Any, taps: Tensor, choices: list[int] | None = None) -> Turn:
    return Turn(state, Seen(0, [7, 8], 0, taps, choices), 2, Law(Warp()), Seeded(0))


def test_each_drafter_has_its_own_state() -> None:
    first, second = Witness(TokenTree.chain(0)), Witness(TokenTree.chain(0))
    merged = MergedDrafter([first, second])
    states = [merged.begin(), merged.begin()]
    merged.propose([turn(state, torch.zeros(2, 0)) for state in states])
    merged.end(states[1])
    for i, drafter in enumerate([first, second]):
        assert [told.state for told in drafter.turns] == [state.states[i] for state in states]
        assert drafter.ended == [states[1].states[i]]


def test_each_drafter_is_given_its_own_taps() -> None:
    first = Witness(TokenTree.chain(0), taps=(2, 5))
    second = Witness(TokenTree.chain(0), taps=(7, 2))
    merged = MergedDrafter([first, second, Witness(TokenTree.chain(0))])
    assert merged.taps == (2, 5, 7)
    # Two tokens, three layers of width 2.
    taps = torch.tensor([[20, 21, 50, 51, 70, 71], [22, 23, 52, 53, 72, 73]])
    merged.propose([turn(merged.begin(), taps)])
    assert first.turns[0].seen.taps.tolist() == [[20, 21, 50, 51], [22, 23, 52, 53]]
    assert second.turns[0].seen.taps.tolist() == [[70, 71, 20, 21], [72, 73, 22, 23]]


def test_taps_of_a_single_reader_are_not_copied() -> None:
    taps = torch.zeros(2, 6)
    assert picked(taps, (2, 5, 7), (2, 5, 7)) is taps


def test_choices_are_those_at_the_drafters_own_nodes() -> None:
    # Merged, level by level: nodes 0, 1 (token 1), 2 (token 4), 3 (2 under 1), 4 (3 under 1), 5 (9 under 4).
    first = Witness(TokenTree.chain(0, [1, 2]))
    second = Witness(TokenTree([0, 1, 3, 4, 9], [-1, 0, 1, 0, 3]), wants_choices=True)
    merged = MergedDrafter([first, second])
    assert merged.wants_choices
    state = merged.begin()
    (proposal,) = merged.propose([turn(state, torch.zeros(2, 0))])
    assert proposal.tree.tokens == [0, 1, 4, 2, 3, 9]
    assert second.turns[0].seen.choices is None
    merged.propose([turn(state, torch.zeros(2, 0), choices=[10, 11, 12, 13, 14, 15])])
    assert second.turns[1].seen.choices == [10, 11, 14, 12, 15]
    assert first.turns[1].seen.choices is None
    merged.propose([turn(state, torch.zeros(2, 0), choices=[10])])  # at another tree
    assert second.turns[2].seen.choices is None


def test_drafters_never_use_the_same_number() -> None:
    key = Key(5, Purpose.propose, 3)
    numbers = [Seeded(0).uniform(Share(Seeded(0), i, 2).own(key)) for i in range(2)]
    assert numbers == [Seeded(0).uniform(key._replace(rank=rank)) for rank in (6, 7)]


@pytest.mark.parametrize(
    ("drafters", "max_nodes"),
    [([], None), ([PlainDrafter()], 0), ([PlainDrafter(), LookaheadDrafter()], 9)],
)
def test_impossible_merges_are_refused(drafters: list[Drafter], max_nodes: int | None) -> None:
    with pytest.raises(ConfigError):
        MergedDrafter(drafters, max_nodes)


# The law, exactly

TEXT = [1, 0]
DEPTH = 2
TREE = [-1, 0, 0, 1]  # two children of the root, one grandchild


def drawn(seed: int, parent: Sequence[int] = CHAIN) -> TableDrafter:
    return TableDrafter(3, Mode.sampled, parent, seed=seed)


def chosen(seed: int) -> TableDrafter:
    return TableDrafter(3, Mode.greedy, seed=seed)


def round_distance(
    *drafters: Any, max_nodes: int | None = None, key_once: bool = True, rule: Rule = verify
) -> float:
    """Total variation, over DEPTH + 1 tokens, between plain decoding and one round of the merged drafters,
    with what it leaves open decoded plainly. If one round is exact after any text, so are all."""
    target = Table(3, seed=0)
    params = Params(DEPTH, DEPTH + 1, 0.7, 0, 1.0, (), 0)
    merged = MergedDrafter(drafters, max_nodes)

    def play(replay: Replay) -> tuple[int, ...]:
        law = Law(params.warp)
        seen = Seen(0, TEXT[:-1], TEXT[-1], torch.zeros(1, 0))
        (proposal,) = merged.propose([Turn(merged.begin(), seen, DEPTH, law, replay)])
        paths = proposal.tree.paths
        verdict = rule(proposal, lambda node: law(target([*TEXT, *paths[node]]), paths[node]), replay, 1)
        return (*paths[verdict.path[-1]], verdict.next_token)

    whole: dict[tuple[int, ...], float] = defaultdict(float)
    for tokens, mass in law_of(play, key_once).items():
        rest = replace(params, max_new_tokens=max(DEPTH + 1 - len(tokens), 1))
        if len(tokens) == DEPTH + 1:
            whole[tokens] += mass
            continue
        for more, share in plain_law(target, [*TEXT, *tokens], rest, frozenset()).items():
            whole[(*tokens, *more)] += mass * share
    return total_variation(whole, plain_law(target, TEXT, params, frozenset()))


@pytest.mark.parametrize("max_nodes", [None, 3, 4])
@pytest.mark.parametrize(
    "drafters",
    [
        pytest.param([drawn(1), drawn(2)], id="drawn-drawn"),
        pytest.param([drawn(1), chosen(2)], id="drawn-chosen"),
        pytest.param([chosen(2), drawn(1)], id="chosen-drawn"),
        pytest.param([chosen(2), chosen(3), drawn(1)], id="chosen-chosen-drawn"),
        pytest.param([drawn(1, TREE), drawn(2)], id="tree-chain"),
        pytest.param([drawn(1, TREE), LookupDrafter(shortest=1)], id="tree-lookup"),
    ],
)
def test_law_of_a_round_is_the_targets(drafters: list[Any], max_nodes: int | None) -> None:
    assert round_distance(*drafters, max_nodes=max_nodes) < 1e-12


def test_block_verification_leaves_what_is_a_chain_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """One draw may make the tree a chain, and another not. Block verification of the former only is lossy."""
    assert round_distance(drawn(1), chosen(3), rule=verify_block) < 1e-12
    make = Merging.proposal
    monkeypatch.setattr(Merging, "proposal", lambda self: replace(make(self), chain=make(self).tree.is_chain))
    assert round_distance(drawn(1), chosen(3), rule=verify_block) > 1e-5


def test_chain_stays_one_where_the_others_propose_nothing() -> None:
    chain = Proposal(TokenTree.chain(0, [1, 2]), chain=True)
    assert merge(chain, Proposal(TokenTree.chain(0)))[0].chain
    assert not merge(chain, Proposal(TokenTree.chain(0, [1])))[0].chain


def test_law_over_rounds_is_the_targets() -> None:
    """The real decoder: four tokens, so that a full round and what it leaves are crossed."""
    target = TableTarget(2)
    params = Params(2, 4, 0.7, 0, 1.0, (), 0)
    merged = MergedDrafter([TableDrafter(2, Mode.sampled, seed=1), TableDrafter(2, Mode.sampled, seed=2)])
    law = decoded_law(target, merged, TEXT, params)
    assert total_variation(law, plain_law(target.table, TEXT, params, frozenset())) < 1e-12


Mutation = Callable[[pytest.MonkeyPatch], None]


def second_groups_lost(patch: pytest.MonkeyPatch) -> None:
    """What the second drafter drew is left out where the first drew it too."""
    make = Merging.proposal

    def proposal(self: Merging) -> Proposal:
        made = make(self)
        draws = {}
        for node, at in made.draws.items():
            held = {child for group in at[:1] for child in group.children}
            draws[node] = [*at[:1], *(g for g in at[1:] if not held & {*g.children})]
        return replace(made, draws=draws)

    patch.setattr(Merging, "proposal", proposal)


def law_of_the_other(patch: pytest.MonkeyPatch) -> None:
    """A shared node's draws count as the first drafter's."""
    make = Merging.proposal

    def proposal(self: Merging) -> Proposal:
        made = make(self)
        draws = {node: [replace(g, law=at[0].law) for g in at] for node, at in made.draws.items()}
        return replace(made, draws=draws)

    patch.setattr(Merging, "proposal", proposal)


def chosen_taken_as_drawn(patch: pytest.MonkeyPatch) -> None:
    """A child that was chosen deterministically counts as drawn, by the law of the group before it."""
    make = Merging.proposal

    def proposal(self: Merging) -> Proposal:
        made = make(self)
        draws = {
            node: [replace(at[0], children=(*made.tree.children(node),))] for node, at in made.draws.items()
        }
        return replace(made, draws=draws)

    patch.setattr(Merging, "proposal", proposal)


def numbers_shared(patch: pytest.MonkeyPatch) -> None:
    """All drafters draw by the same numbers."""
    patch.setattr(Share, "own", lambda self, key: key)


@pytest.mark.parametrize(
    ("mutate", "second"),
    [
        (second_groups_lost, drawn(2)),
        (law_of_the_other, drawn(2)),
        (chosen_taken_as_drawn, chosen(2)),
        (numbers_shared, drawn(2)),
    ],
)
def test_mistake_is_seen(mutate: Mutation, second: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    assert round_distance(drawn(1), second, key_once=mutate is not numbers_shared) > 1e-3


def test_full_tree_that_still_merges_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: Merging, index: int, node: int, children: Sequence[int]) -> list[int]:
        names, tokens = self.names[index], self.proposals[index].tree.tokens
        for child in children:
            if not self.full or (names[node], tokens[child]) in self.trie.nodes:
                names[child] = self.trie.child(names[node], tokens[child])
        return [names[child] for child in children if child in names]

    monkeypatch.setattr(Merging, "take", take)
    assert round_distance(drawn(1), drawn(2), max_nodes=2) > 1e-3


# In the decoder, with a real target


def grafted(target: Any) -> list[Any]:
    eagle = build_drafter(target, tiny_draft(target), DecodeConfig())
    return [eagle, LookupDrafter(target.eos_ids, shortest=1), LookaheadDrafter(target.eos_ids)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batch_is_the_single_runs(temperature: float) -> None:
    target = tiny_target()
    prompts = [[5, 6, 7, 5, 6], [30], [9, 9, 40, 9]]
    params = [Params(4, 20, temperature, 0, 1.0, (), seed) for seed in range(3)]
    decoder = Decoder(target, MergedDrafter(grafted(target)), batch_size=2)
    done = decoder.generate_all([Request(*pair) for pair in zip(prompts, params, strict=True)])
    alone = [decoder.generate(*pair) for pair in zip(prompts, params, strict=True)]
    assert [generation.tokens for generation in done] == [generation.tokens for generation in alone]
    if temperature == 0:
        plain = Decoder(target, PlainDrafter())
        assert [generation.tokens for generation in done] == [
            plain.generate(*pair).tokens for pair in zip(prompts, params, strict=True)
        ]


def test_merged_accepts_as_much_as_the_best_would() -> None:
    """Wherever a round begins, the merged tree holds what each drafter alone would propose there."""
    target = tiny_target()
    params = Params(4, 24, 0.0, 0, 1.0, (), 0)

    def rounds(drafter: Any) -> int:
        return len(Decoder(target, drafter).generate([5, 6, 7, 5, 6], params).rounds)

    eagle, lookup, _ = grafted(target)
    assert rounds(MergedDrafter([eagle, lookup])) <= min(rounds(eagle), rounds(lookup))


def test_lookahead_keeps_its_window_when_another_drafters_path_is_walked() -> None:
    target = TableTarget(3, seed=5)
    began: list[int] = []

    class Watched(LookaheadDrafter):
        def fit(self, window: Any, budget: int) -> None:
            if not window.levels:
                began.append(budget)
            super().fit(window, budget)

    merged: Any = MergedDrafter([LookupDrafter(shortest=1), Watched()])
    decoder: Any = Decoder(target, merged)  # pyright: ignore[reportArgumentType]
    decoder.generate([0, 1, 2, 0, 1], Params(8, 24, 0.0, 0, 1.0, (), 0))
    assert began == [8]
