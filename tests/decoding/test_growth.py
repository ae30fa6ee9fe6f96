"""How trees grow: literal ones, EAGLE-2's against a plain version of it, and that every kind keeps the law.

The law is the real decoder's over all outcomes of its chance; then the known mistakes are put into the real
code, and the same comparison must see them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import decoding.growth
from configs.errors import ConfigError
from configs.schema import DecodeConfig, Tree
from configs.schema import Proposal as Mode
from decoding.build import growth_of
from decoding.cache import KVCache
from decoding.decoder import Decoder
from decoding.drafters import Draws, Proposal, Seen, Turn
from decoding.growth import (
    MANY,
    ChainGrowth,
    DynamicGrowth,
    GrowingStatic,
    Growth,
    StaticGrowth,
    Vocabulary,
    ranked,
)
from decoding.law import Law
from decoding.randomness import Key, Seeded
from decoding.reader import NetworkDrafter, News, Reader
from decoding.sequence import Params
from decoding.shapes import Conditions, TreeShape, write_shape
from decoding.warp import Warp
from tests.decoding.replay import Replay, batched_law, law_of, plain_law, total_variation
from tests.decoding.tables import Table, TableTarget

PENDING = 9
Logits = Callable[[tuple[int, ...]], Tensor]


class Scripted:
    """Draws what it is told to."""

    def __init__(self, *indices: int) -> None:
        self.indices = list(indices)
        self.laws: list[list[float]] = []

    def draw(self, probs: Tensor, key: Key) -> int:
        assert key == (0, 0, len(self.laws))
        self.laws.append([round(p, 6) for p in probs.tolist()])
        return self.indices.pop(0)

    def accept(self, probability: float, key: Key) -> bool:
        raise AssertionError("nothing is verified here")


class Alternating:
    """Allows even ids after an odd one (or at the beginning), and odd ids after an even one."""

    def __init__(self, vocab: int = 4) -> None:
        self.vocab = vocab
        self.text: list[int] = []

    def mask(self, path: Sequence[int]) -> Tensor:
        last = [1, *self.text, *path][-1]
        return torch.arange(self.vocab) % 2 != last % 2

    def commit(self, tokens: Sequence[int]) -> None:
        self.text += tokens

    def forced(self, path: Sequence[int], limit: int) -> list[int]:
        return []

    likely = forced


def grown(
    growth: Growth,
    logits: Logits,
    budget: int = 8,
    warp: Warp = Warp(),  # noqa: B008
    randomness: Any = None,
    grammar: Any = None,
    ids: Sequence[int] | None = None,
    eos: Sequence[int] = (),
) -> tuple[Proposal, list[list[tuple[int, ...]]]]:
    """The proposal after `PENDING`, and which paths were read together."""
    law = Law(warp, grammar=grammar)
    turn = Turn(None, Seen(0, [], PENDING, torch.empty(0, 0)), budget, law, randomness or Seeded(0))
    vocabulary = Vocabulary.of(None if ids is None else torch.tensor(ids), frozenset(eos))
    growing = growth.start(turn, vocabulary)
    nodes, read = [0], []
    while nodes:
        paths = [tuple(growing.path(node)) for node in nodes]
        read.append(paths)
        nodes = growing.grow(nodes, torch.stack([logits(path) for path in paths]))
    return growing.proposal(0.0, len(read)), read


def always(*probs: float) -> Logits:
    """The same law after every path."""
    logits = torch.tensor([log(p) if p else -torch.inf for p in probs])
    return lambda path: logits


# A shape, by rank


def test_ranks_are_filled_level_by_level_and_leaves_are_not_read() -> None:
    """9 - 1 - 1        the likeliest are 1, 0, 2 after everything;
    \\   \\ 2 - 0     (0,) has the children of ranks 0 and 2, (0, 2) one of rank 1
     0
    """
    shape = TreeShape(((0,), (1,), (0, 0), (0, 2), (0, 2, 1)))
    proposal, read = grown(StaticGrowth(shape, Mode.greedy), always(0.3, 0.5, 0.2))
    assert proposal.tree.tokens == [PENDING, 1, 0, 1, 2, 0]
    assert proposal.tree.parent == [-1, 0, 0, 1, 1, 4]
    assert proposal.draws == {}
    assert read == [[()], [(1,)], [(1, 2)]]
    assert (proposal.stopped, proposal.forwards) == ("shape", 3)


def test_budget_cuts_a_shape() -> None:
    proposal, read = grown(StaticGrowth(TreeShape.of([2, 2, 2]), Mode.greedy), always(0.6, 0.4), budget=2)
    assert proposal.tree.depth == [0, 1, 1, 2, 2, 2, 2]
    assert read == [[()], [(0,), (1,)]]
    assert proposal.stopped == "budget"


@pytest.mark.parametrize(
    "growth",
    [
        StaticGrowth(TreeShape.of([2, 2]), Mode.greedy),
        StaticGrowth(TreeShape.of([2, 2]), Mode.sampled),
        StaticGrowth(TreeShape.of([3, 2]), Mode.sampled, replacement=True),
        DynamicGrowth(6, 2),
    ],
)
def test_nothing_follows_an_end(growth: Growth) -> None:
    proposal, _ = grown(growth, always(0.5, 0.5), eos=[1])
    tree = proposal.tree
    assert 1 in tree.tokens
    assert not any(tree.children(node) for node, token in enumerate(tree.tokens) if token == 1)
    assert not any(1 in path[:-1] for path in tree.paths)


def test_sampled_at_temperature_0_is_by_rank() -> None:
    logits = always(0.3, 0.5, 0.2)
    shape = TreeShape.of([2, 1])
    by_rank, _ = grown(StaticGrowth(shape, Mode.greedy), logits)
    for replacement in (False, True):
        growth = StaticGrowth(shape, Mode.sampled, replacement)
        assert grown(growth, logits, warp=Warp(temperature=0))[0] == by_rank


def test_a_chain_shape_is_the_chain() -> None:
    table = Table(5, seed=3)
    chain, _ = grown(ChainGrowth(Mode.sampled), table, budget=3, warp=Warp(0.8))
    shaped, _ = grown(StaticGrowth(TreeShape.chain(3), Mode.sampled), table, warp=Warp(0.8))
    assert shaped.tree == chain.tree
    assert [group.law.tolist() for (group,) in shaped.draws.values()] == [
        group.law.tolist() for (group,) in chain.draws.values()
    ]


def test_a_shape_of_the_root_alone_drafts_nothing() -> None:
    for mode in Mode:
        proposal, _ = grown(StaticGrowth(TreeShape(()), mode), always(0.5, 0.5))
        assert (proposal.tree.tokens, proposal.draws, proposal.stopped) == ([PENDING], {}, "shape")


# A shape, drawn


def test_without_replacement_each_law_lacks_what_was_drawn() -> None:
    chance = Scripted(2, 0, 1)
    shape = TreeShape.of([2, 1])
    proposal, read = grown(
        StaticGrowth(TreeShape(shape.paths[:3]), Mode.sampled), always(0.2, 0.5, 0.3), randomness=chance
    )
    # .2 and .5 are left of the root's law after 2 is drawn: 2/7 and 5/7.
    assert chance.laws == [[0.2, 0.5, 0.3], [0.285714, 0.714286, 0.0], [0.2, 0.5, 0.3]]
    assert proposal.tree.tokens == [PENDING, 2, 0, 1]
    assert proposal.tree.parent == [-1, 0, 0, 1]
    assert {node: [group.children for group in at] for node, at in proposal.draws.items()} == {
        0: [(1, 2)],
        1: [(3,)],
    }
    # What is reported is the law that the first was drawn from; verification strikes out the rest itself.
    assert proposal.draws[0][0].law.tolist() == pytest.approx([0.2, 0.5, 0.3])
    assert not proposal.draws[0][0].replacement
    assert read == [[()], [(2,)]]


def test_drawing_stops_when_all_that_the_law_allows_is_drawn() -> None:
    growth = StaticGrowth(TreeShape.of([4]), Mode.sampled)
    proposal, _ = grown(growth, always(0.2, 0.5, 0.3, 0.0), warp=Warp(top_k=2))
    assert sorted(proposal.tree.tokens[1:]) == [1, 2]
    assert proposal.draws[0][0].children == (1, 2)


def test_equal_draws_become_one_node_with_the_children_of_both() -> None:
    """9 - 1 - 0        1 is drawn at ranks 0 and 1, 0 at rank 2. The shape has one child below rank 0, two
    \\     \\ 2       below rank 1: 1 gets three, drawn 0, 2, 0. None below rank 2.
     0
    """
    chance = Scripted(1, 1, 0, 0, 2, 0)
    shape = TreeShape(((0,), (1,), (2,), (0, 0), (1, 0), (1, 1)))
    growth = StaticGrowth(shape, Mode.sampled, replacement=True)
    proposal, read = grown(growth, always(0.2, 0.5, 0.3), randomness=chance)
    assert proposal.tree.tokens == [PENDING, 1, 0, 0, 2]
    assert proposal.tree.parent == [-1, 0, 0, 1, 1]
    assert {node: [group.children for group in at] for node, at in proposal.draws.items()} == {
        0: [(1, 1, 2)],
        1: [(3, 4, 3)],
    }
    assert all(group.replacement for at in proposal.draws.values() for group in at)
    assert chance.laws == [[0.2, 0.5, 0.3]] * 6  # the law stays
    assert read == [[()], [(1,)]]


# By score


def plain_eagle2(
    logits: Logits, nodes: int, width: int, budget: int, eos: Sequence[int]
) -> list[tuple[int, ...]]:
    """EAGLE-2 without any shortcut, by paths: expand the best of each level, then keep the best of all."""
    scores: dict[tuple[int, ...], float] = {(): 0.0}
    level: list[tuple[int, ...]] = [()]
    for _ in range(budget):
        new: list[tuple[int, ...]] = []
        for path in level:
            logprobs = logits(path).log_softmax(-1).tolist()
            for token in sorted(range(len(logprobs)), key=lambda i: -logprobs[i])[:width]:
                new.append((*path, token))
                scores[new[-1]] = scores[path] + logprobs[token]
        level = sorted((path for path in new if path[-1] not in eos), key=lambda path: -scores[path])[:width]
    return sorted(scores, key=lambda path: -scores[path])[: nodes + 1]


@pytest.mark.parametrize("nodes", [1, 2, 5, 12, 40])
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 4])
def test_dynamic_tree_is_eagle2s(nodes: int, width: int, budget: int) -> None:
    for seed in range(4):
        table, eos = Table(6, seed), [seed]
        proposal, read = grown(DynamicGrowth(nodes, width), table, budget, eos=eos)
        wanted = plain_eagle2(table, nodes, width, budget, eos)
        assert sorted(proposal.tree.paths) == sorted(wanted)
        assert all(len(level) <= width for level in read)
        assert len(read) <= budget  # the last level is not read
        for node in range(len(proposal.tree)):  # siblings are tried from the likeliest on
            logits = table(proposal.tree.paths[node])
            tried = [float(logits[proposal.tree.tokens[child]]) for child in proposal.tree.children(node)]
            assert tried == sorted(tried, reverse=True)


def test_dynamic_tree_reads_no_node_that_cannot_win() -> None:
    """With .9 and .1 after everything, the four best paths are 0, 00, 000, 0000: .9, .81, .729, .6561.

    After two levels the four best are .9, .81, .1, .09: only 00 has more than .09. After three they are .9,
    .81, .729, .1; after four .6561 is the last. Nothing lies above it, and no fifth level is read.
    """
    proposal, read = grown(DynamicGrowth(4, 2), always(0.9, 0.1))
    assert proposal.tree.paths == [(), (0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
    # 1 has .1: fewer than four paths are known at first, so it is read.
    assert read == [[()], [(0,), (1,)], [(0, 0)], [(0, 0, 0)]]
    assert proposal.stopped == "nodes"


def certain_but_for_the_first(path: tuple[int, ...]) -> Tensor:
    """In half precision: 0 or 1 with one half each, and then 0 with probability 1."""
    return torch.tensor([10, 10, -50] if not path else [100, 0, 0], dtype=torch.float16)


def test_ties_go_to_the_parent() -> None:
    """0, 1, 00 and 10 all have probability one half, and three are kept."""
    proposal, _ = grown(DynamicGrowth(3, 2), certain_but_for_the_first)
    assert proposal.tree.paths == [(), (0,), (1,), (0, 0)]


@pytest.mark.parametrize("nodes", range(1, 9))
def test_dynamic_tree_is_closed_on_ties(nodes: int) -> None:
    certain = torch.tensor([100, 0, 0, 0], dtype=torch.bfloat16)
    chain, read = grown(DynamicGrowth(nodes, 2), lambda path: certain)
    assert chain.tree.tokens == [PENDING, *[0] * nodes]
    assert chain.tree.is_chain
    assert len(read) == nodes
    forked, _ = grown(DynamicGrowth(nodes, 2), certain_but_for_the_first)
    assert len(forked.tree) == nodes + 1  # TokenTree itself refuses a child before its parent


def test_ties_given_to_the_child_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def later_first(scores: np.ndarray) -> list[int]:
        return sorted(range(len(scores)), key=lambda i: (-scores[i], -i))

    monkeypatch.setattr(decoding.growth, "best_first", later_first)
    with pytest.raises(KeyError):
        grown(DynamicGrowth(3, 2), certain_but_for_the_first)


def test_dynamic_tree_needs_room() -> None:
    for nodes, width in ((0, 2), (2, 0)):
        with pytest.raises(ConfigError, match=r"at least 1"):
            DynamicGrowth(nodes, width)


# What the draft has no id for, and what the grammar forbids


KINDS: dict[str, Growth] = {
    "by rank": StaticGrowth(TreeShape.of([2, 1]), Mode.greedy),
    "without replacement": StaticGrowth(TreeShape.of([2, 1]), Mode.sampled),
    "with replacement": StaticGrowth(TreeShape.of([2, 1]), Mode.sampled, replacement=True),
    "dynamic": DynamicGrowth(4, 2),
}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_draft_ids_become_the_targets(kind: str) -> None:
    proposal, _ = grown(KINDS[kind], always(0.5, 0.5), ids=[3, 7])
    assert {*proposal.tree.tokens[1:]} == {3, 7} or kind == "with replacement"
    assert {*proposal.tree.tokens[1:]} <= {3, 7}


@kinds
def test_nothing_forbidden_is_proposed(kind: str) -> None:
    for seed in range(5):
        table = Table(4, seed)
        proposal, _ = grown(KINDS[kind], table, grammar=Alternating(), randomness=Seeded(seed))
        assert len(proposal.tree) > 1
        for path in proposal.tree.paths:
            assert all(token % 2 == i % 2 for i, token in enumerate(path))


@kinds
def test_growth_ends_where_the_grammar_leaves_the_draft_nothing(kind: str) -> None:
    # The draft has the even ids only: nothing it could say may follow one.
    proposal, read = grown(KINDS[kind], always(0.5, 0.5), grammar=Alternating(), ids=[0, 2])
    assert {*proposal.tree.tokens[1:]} <= {0, 2}
    assert max(proposal.tree.depth) == 1
    assert len(read) == 2
    assert proposal.stopped == "grammar"


@kinds
def test_repetition_penalty_is_the_nodes_own(kind: str) -> None:
    # Penalised, 0 is never the likeliest after itself: log .6 * 3 = -1.5 against log .4 = -.9.
    warp = Warp(temperature=0, repetition_penalty=3)
    proposal, _ = grown(KINDS[kind], always(0.6, 0.4), warp=warp)
    first = proposal.tree.children(1)[0]
    assert proposal.tree.paths[first] == (0, 1)


# The largest of many


@pytest.mark.parametrize("vocab", [5, 8 * 256, 5000, 20_000, 2 * MANY])
def test_ranked_is_the_head_of_a_sort(vocab: int) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(0))
    logits[0, : vocab // 2] = -torch.inf
    values, indices = ranked(logits, 8)
    wanted = logits.sort(dim=-1, descending=True)
    assert torch.equal(values, wanted.values[:, :8])
    assert torch.equal(logits.gather(1, indices), values)
    assert all(len({*row}) == min(8, vocab) for row in indices.tolist())


# The law, exactly


PROMPT = [1, 0]


class TableReader(Reader):
    """Reads with a table over the whole prefix, which it finds in the cache by the mask: a row that is
    missing or wrongly masked fails or shows. `ids` are what the draft has of the target's vocabulary."""

    def __init__(self, draft: TableTarget, eos: frozenset[int], ids: Sequence[int] | None) -> None:
        self.ids = None if ids is None else torch.tensor(ids)
        super().__init__(KVCache(1), Vocabulary.of(self.ids, eos), torch.device("cpu"))
        self.draft = draft

    def news(self, turn: Turn) -> News:
        return News(turn.seen.start, [*turn.seen.tokens, turn.seen.pending])

    def run(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
        if mask is None:
            mask = torch.arange(int(positions[0, -1]) + 1) <= positions[:, None, :, None]
        return self.draft.forward(tokens, positions=positions, mask=mask, cache=self.cache).last_hidden

    def logits(self, states: Tensor) -> Tensor:
        return states if self.ids is None else states[..., self.ids]


def params(draft_tokens: int = 2, length: int = 4, **warp: Any) -> Params:
    config = DecodeConfig(draft_tokens=draft_tokens, max_new_tokens=length)
    for name, value in {"temperature": 1.0, **warp}.items():
        setattr(config, name, value)
    return Params.of(config, seed=0)


def drafter_of(
    growth: Growth, target: TableTarget, ids: Sequence[int] | None = None, seed: int = 1
) -> NetworkDrafter:
    return NetworkDrafter(TableReader(TableTarget(target.vocab, seed), target.eos_ids, ids), growth)


def distance(
    growth: Growth,
    settings: Params,
    vocab: int = 3,
    eos: Sequence[int] = (),
    ids: Sequence[int] | None = None,
    grammar: bool = False,
    seed: int = 1,
) -> float:
    """Total variation of the real decoder's law from plain decoding's; the draft's trees grow by `growth`."""
    target: Any = TableTarget(vocab, eos=eos)
    decoder = Decoder(target, drafter_of(growth, target, ids, seed))

    def play(replay: Replay) -> tuple[int, ...]:
        rules: Any = Alternating(vocab) if grammar else None
        return tuple(decoder.generate(PROMPT, settings, replay, rules).tokens)

    def logits(prefix: tuple[int, ...]) -> Tensor:
        scores = target.table(prefix)
        if not grammar:
            return scores
        return scores.masked_fill(~Alternating(vocab).mask(prefix[len(PROMPT) :]), -torch.inf)

    return total_variation(law_of(play), plain_law(logits, PROMPT, settings, target.eos_ids))


@kinds
@pytest.mark.parametrize(
    ("warp", "others"),
    [
        pytest.param({"temperature": 0.7, "length": 3}, {}, id="temperature"),
        pytest.param({"temperature": 0.7, "top_k": 2}, {"vocab": 4}, id="top-k"),
        pytest.param({"top_p": 0.6}, {}, id="top-p"),
        pytest.param({"min_p": 0.5}, {"vocab": 4}, id="min-p"),
        pytest.param({"top_k": 2, "repetition_penalty": 1.8}, {}, id="repetition-penalty"),
        pytest.param({"temperature": 0}, {"vocab": 4}, id="greedy"),
        pytest.param({"top_k": 2}, {"eos": (2,)}, id="eos"),
        pytest.param({"temperature": 0.7, "length": 3}, {"ids": [0, 2]}, id="draft-vocabulary"),
        pytest.param({"temperature": 0.7}, {"vocab": 4, "grammar": True}, id="grammar"),
    ],
)
def test_law_is_the_targets(kind: str, warp: dict[str, Any], others: dict[str, Any]) -> None:
    assert distance(KINDS[kind], params(**warp), **others) < 1e-12


@kinds
def test_law_of_a_batch_is_the_product(kind: str) -> None:
    settings = params(draft_tokens=1, length=3, top_k=2)
    target: Any = TableTarget(3)
    drafter = drafter_of(KINDS[kind], target)
    prompts = [[1, 0], [2]]
    joint = batched_law(target, drafter, prompts, settings)
    one, other = (plain_law(target.table, prompt, settings, target.eos_ids) for prompt in prompts)
    right = {(a, b): p * q for a, p in one.items() for b, q in other.items()}
    assert sum(abs(joint.get(pair, 0.0) - right.get(pair, 0.0)) for pair in {*joint, *right}) < 1e-12


# The mistakes


def draws_deduplicated(patch: pytest.MonkeyPatch) -> None:
    """Equal draws are tried once: wrong, since the draft's law was drawn from twice."""
    draw = GrowingStatic.with_replacement

    def mutated(self: GrowingStatic, node: int, law: np.ndarray, wanted: Sequence[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(draw(self, node, law, wanted)))

    patch.setattr(GrowingStatic, "with_replacement", mutated)


def draws_by_likelihood(patch: pytest.MonkeyPatch) -> None:
    """Drawn children are tried from the likeliest on, instead of in the order of drawing."""
    draw = GrowingStatic.without_replacement

    def mutated(self: GrowingStatic, node: int, law: np.ndarray, wanted: Sequence[int]) -> tuple[int, ...]:
        children = draw(self, node, law, wanted)
        return tuple(sorted(children, key=lambda child: -float(law[self.tokens[child]])))

    patch.setattr(GrowingStatic, "without_replacement", mutated)


def likelier_of_two_kept(patch: pytest.MonkeyPatch) -> None:
    """The likelier of two draws is tried as if it had been the only one."""
    draw = GrowingStatic.without_replacement

    def mutated(self: GrowingStatic, node: int, law: np.ndarray, wanted: Sequence[int]) -> tuple[int, ...]:
        children = draw(self, node, law, wanted)
        return (max(children, key=lambda child: float(law[self.tokens[child]])),)

    patch.setattr(GrowingStatic, "without_replacement", mutated)


def siblings_drawn_from_the_whole_law(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decoding.growth, "without", lambda law, index: law)


def ranks_reported_as_draws(patch: pytest.MonkeyPatch) -> None:
    add = GrowingStatic.add_ranked

    def mutated(self: GrowingStatic, nodes: Sequence[int], logits: Tensor) -> None:
        add(self, nodes, logits)
        self.draws[0] = [Draws(self.turn.law.warp(logits[0]), (1, 2))]

    patch.setattr(GrowingStatic, "add_ranked", mutated)


def with_draws(change: Callable[[Draws], Sequence[Draws]]) -> Callable[[pytest.MonkeyPatch], None]:
    """Changes what is reported of each group of draws."""
    propose = GrowingStatic.proposal

    def mutated(self: GrowingStatic, seconds: float, forwards: int) -> Proposal:
        proposal = propose(self, seconds, forwards)
        return replace(proposal, draws={node: change(group) for node, (group,) in proposal.draws.items()})

    return lambda patch: patch.setattr(GrowingStatic, "proposal", mutated)


PAIR = TreeShape.of([2])
MISTAKES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Growth]] = {
    "equal draws tried once": (draws_deduplicated, StaticGrowth(PAIR, Mode.sampled, replacement=True)),
    "replacement not reported": (
        with_draws(lambda group: [replace(group, replacement=False)]),
        StaticGrowth(PAIR, Mode.sampled, replacement=True),
    ),
    "drawn children re-ranked": (draws_by_likelihood, StaticGrowth(PAIR, Mode.sampled)),
    "likelier of two draws kept": (likelier_of_two_kept, StaticGrowth(PAIR, Mode.sampled)),
    "siblings drawn from the whole law": (
        siblings_drawn_from_the_whole_law,
        StaticGrowth(PAIR, Mode.sampled),
    ),
    "ranks reported as draws": (ranks_reported_as_draws, StaticGrowth(PAIR, Mode.greedy)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, growth = MISTAKES[mistake]
    settings = params(draft_tokens=1, length=3, temperature=0.7)
    assert distance(growth, settings) < 1e-12
    mutate(monkeypatch)
    assert distance(growth, settings) > 1e-3


def test_draws_that_are_not_reported_only_cost_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given the tokens, whatever they came from, accepting each with the target's own probability is exact.
    with_draws(lambda group: [])(monkeypatch)
    growth = StaticGrowth(PAIR, Mode.sampled)
    assert distance(growth, params(draft_tokens=1, length=3, temperature=0.7)) < 1e-12


def test_key_used_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoding.growth.Key", lambda position, purpose, rank: Key(position, purpose, 0))
    with pytest.raises(AssertionError, match="is used twice"):
        distance(KINDS["with replacement"], params(draft_tokens=1, length=3))


# From a configuration


def test_growth_of_a_configuration(tmp_path: Path) -> None:
    shape = TreeShape.of([2, 1])
    file = tmp_path / "tree.json"
    write_shape(file, shape, Conditions())
    assert isinstance(growth_of(DecodeConfig()), ChainGrowth)
    assert growth_of(DecodeConfig(tree=Tree.dynamic, tree_nodes=5, tree_width=3)) == DynamicGrowth(5, 3)
    config = DecodeConfig(tree=Tree.static, tree_file=str(file), proposal=Mode.greedy)
    assert growth_of(config) == StaticGrowth(shape, Mode.greedy)


def test_static_growth_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set decode\.tree_file"):
        growth_of(DecodeConfig(tree=Tree.static))
    with pytest.raises(ConfigError, match=r"absent\.json does not exist"):
        growth_of(DecodeConfig(tree=Tree.static, tree_file=str(tmp_path / "absent.json")))
