"""Block verification: the paper's example, hand-worked weights, and exactness by replay of the real decoder.

A round tosses coins for positions that the next round may decide on again, so replay refuses a key used
twice. The mutations at the end put known ways of getting the block wrong into the real code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import decoding.verify
from configs.schema import DecodeConfig, Verification
from configs.schema import Proposal as Mode
from decoding.drafters import Draws, Proposal, Turn
from decoding.randomness import Key, Purpose
from decoding.sequence import Params
from decoding.tree import TokenTree
from decoding.verify import Verdict, lossless, rest_of_block, stay_chance, verify, verify_block
from tests.decoding.replay import Replay, batched_law, decoded_law, law_of, plain_law, total_variation
from tests.decoding.tables import TableDrafter, TableTarget

Rule = Callable[..., Verdict]


def settings(draft_tokens: int = 2, length: int = 4, **warp: Any) -> Params:
    config = DecodeConfig(draft_tokens=draft_tokens, max_new_tokens=length, verification=Verification.block)
    for name, value in {"temperature": 1.0, **warp}.items():
        setattr(config, name, value)
    return Params.of(config, seed=0)


def distance(params: Params, drafter: TableDrafter, target: TableTarget, key_once: bool = True) -> float:
    law = decoded_law(target, drafter, [1, 0], params, key_once)
    return total_variation(law, plain_law(target.table, [1, 0], params, target.eos_ids))


def drawn_chain(tokens: list[int], q: list[np.ndarray]) -> Proposal:
    draws = {node: [Draws(law, (node + 1,))] for node, law in enumerate(q)}
    return Proposal(TokenTree.chain(9, tokens), draws, chain=True)


# The paper's example (§2): two tokens, laws that do not depend on what came before.

P = np.array([1 / 3, 2 / 3])
Q = np.array([2 / 3, 1 / 3])


class Noted:
    """Refuses every coin, and notes what was asked for and drawn from."""

    def __init__(self) -> None:
        self.coins: list[tuple[float, Key]] = []
        self.drawn_from: list[float] = []
        self.emit: Key | None = None

    def accept(self, probability: float, key: Key) -> bool:
        self.coins.append((probability, key))
        return False

    def draw(self, law: np.ndarray, key: Key) -> int:
        self.drawn_from, self.emit = law.tolist(), key
        return 0


def test_coins_of_a_block() -> None:
    # Tokens 0 0: w = 1, 1/2, 1/4. After node 1, max(p/2 - q, 0) = (0, 0), so h_1 = 0; h_2 = w_2.
    # Tokens 0 1: w = 1, 1/2, min(1, 1/2 * 2) = 1.
    # Tokens 1 0: w = 1, 1, 1/2. h_1 = 1, as w_1 is.
    for tokens, coins in {(0, 0): [0.25, 0.0], (0, 1): [1.0, 0.0], (1, 0): [0.5, 1.0]}.items():
        chance = Noted()
        verdict = verify_block(drawn_chain([*tokens], [Q, Q]), lambda node: P, chance, position=5)
        assert [coin for coin, _ in chance.coins] == pytest.approx(coins)  # the leaf's first
        assert [key for _, key in chance.coins] == [Key(6, Purpose.accept, 1), Key(6, Purpose.accept, 0)]
        assert verdict.path == (0,)
        assert chance.drawn_from == pytest.approx([0, 1])  # max(p - q, 0) = (0, 1/3)
        assert chance.emit == Key(6, Purpose.emit)


def test_stay_chance_and_rest() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.2, 0.7])
    # w = .8: .8 p - q = .3 .04 -.54, so m = .34 and h = .34 / (.34 + .2).
    assert stay_chance(p, q, 0.8) == pytest.approx(0.34 / 0.54)
    assert rest_of_block(p, q, 0.8).tolist() == pytest.approx([0.3 / 0.34, 0.04 / 0.34, 0])
    # A block that has lost nothing stays for certain, even where p = q and h is 0 / 0.
    assert stay_chance(p, p, 1.0) == 1
    assert rest_of_block(p, p, 1.0).tolist() == pytest.approx(p.tolist())


def accepted_on_average(
    rule: Rule, laws: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]], depth: int
) -> float:
    """E[accepted] over the draft's draws and the rule's coins, exactly. laws: (p, q) after each path."""

    def play(replay: Replay) -> int:
        path: list[int] = []
        for i in range(depth):
            path.append(replay.draw(laws[(*path,)][1], Key(0, Purpose.propose, i)))
        q = [laws[(*path[:i],)][1] for i in range(depth)]
        verdict = rule(drawn_chain(path, q), lambda node: laws[(*path[:node],)][0], replay, 0)
        return len(verdict.path) - 1

    return sum(accepted * mass for accepted, mass in law_of(play).items())


def paths(vocab: int, depth: int) -> list[tuple[int, ...]]:
    every: list[tuple[int, ...]] = [()]
    for path in every:
        if len(path) < depth:
            every += [(*path, token) for token in range(vocab)]
    return every


def test_papers_example_accepts_eleven_ninths_instead_of_ten() -> None:
    laws = {path: (P, Q) for path in paths(2, 2)}
    assert accepted_on_average(verify, laws, 2) == pytest.approx(10 / 9, abs=1e-12)
    assert accepted_on_average(verify_block, laws, 2) == pytest.approx(11 / 9, abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_never_accepts_less(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def law() -> np.ndarray:
        return torch.softmax(2 * torch.randn(3, generator=generator, dtype=torch.float64), -1).numpy()

    laws = {path: (law(), law()) for path in paths(3, 3)}
    token, block = (accepted_on_average(rule, laws, 3) for rule in (verify, verify_block))
    assert block > token - 1e-12
    # One token leaves nothing to judge jointly.
    one = [accepted_on_average(rule, laws, 1) for rule in (verify, verify_block)]
    assert one[0] == pytest.approx(one[1], abs=1e-12)


# What it falls back to, and where it ends.


def test_trees_and_chosen_chains_go_to_the_walk() -> None:
    tree = Proposal(TokenTree([9, 0, 1], [-1, 0, 0]), {0: [Draws(Q, (1, 2))]})
    twice = Proposal(TokenTree.chain(9, [0]), {0: [Draws(Q, (1, 1), replacement=True)]}, chain=True)
    for proposal in (tree, twice, Proposal(TokenTree.chain(9, [0, 1])), Proposal(TokenTree.chain(9))):
        ours, walked = Noted(), Noted()
        assert verify_block(proposal, lambda node: P, ours, 3) == verify(proposal, lambda node: P, walked, 3)
        assert (ours.coins, ours.drawn_from) == (walked.coins, walked.drawn_from)


def test_no_law_is_asked_for_behind_a_forbidden_token() -> None:
    def law(node: int) -> np.ndarray:
        assert node < 2, "a grammar has no law there"
        return np.array([1.0, 0.0]) if node == 1 else P

    chance = Noted()
    verify_block(drawn_chain([1, 1, 0], [Q, Q, Q]), law, chance, 0)  # the second token is forbidden
    assert [coin for coin, _ in chance.coins] == [1.0]


# The real decoder, exactly. With K = 2 and 5 tokens a sequence crosses up to three rounds.


class Mixed(TableDrafter):
    """Draws, but its second token is chosen, as a grammar's forced ones are."""

    def one(self, turn: Turn) -> Proposal:
        proposal = super().one(turn)
        tokens = proposal.tree.tokens
        if len(tokens) < 3:
            return proposal
        return Proposal(TokenTree.chain(tokens[0], [tokens[1], 0]), {0: proposal.draws[0]}, chain=True)


class Hesitant(TableDrafter):
    """Stops after an unlikely token, which it keeps."""

    def one(self, turn: Turn) -> Proposal:
        proposal = super().one(turn)
        tokens = proposal.tree.tokens
        laws = {node: group[0].law for node, group in proposal.draws.items()}
        kept = next((i + 1 for i in laws if laws[i][tokens[i + 1]] < 0.4), len(laws))
        draws = {node: proposal.draws[node] for node in range(kept)}
        return Proposal(TokenTree.chain(tokens[0], tokens[1 : kept + 1]), draws, chain=True)


@pytest.mark.parametrize(
    ("params", "drafter", "target"),
    [
        pytest.param(
            settings(), TableDrafter(3, Mode.sampled), TableTarget(3, seed=7), id="as the mistakes below"
        ),
        pytest.param(settings(length=6), TableDrafter(2, Mode.sampled), TableTarget(2), id="rounds"),
        pytest.param(
            settings(temperature=0.7, top_k=2), TableDrafter(4, Mode.sampled), TableTarget(4), id="top-k"
        ),
        pytest.param(settings(top_p=0.8), TableDrafter(3, Mode.sampled), TableTarget(3), id="top-p"),
        pytest.param(
            settings(3, 5, repetition_penalty=1.8),
            TableDrafter(2, Mode.sampled, parent=[-1, 0, 1, 2]),
            TableTarget(2),
            id="penalty, three deep",
        ),
        pytest.param(settings(), TableDrafter(3, Mode.sampled), TableTarget(3, eos=(2,)), id="eos"),
        pytest.param(
            settings(), TableDrafter(3, Mode.sampled, ids=[0, 2]), TableTarget(3), id="draft vocabulary"
        ),
        pytest.param(settings(), Mixed(3, Mode.sampled), TableTarget(3), id="mixed"),
        pytest.param(settings(), Hesitant(3, Mode.sampled), TableTarget(3), id="stops"),
        pytest.param(settings(), TableDrafter(3, Mode.greedy), TableTarget(3), id="chosen"),
        pytest.param(
            settings(), TableDrafter(3, Mode.sampled, parent=[-1, 0, 0, 1]), TableTarget(3), id="tree"
        ),
        pytest.param(
            settings(temperature=0), TableDrafter(4, Mode.sampled), TableTarget(4), id="temperature 0"
        ),
    ],
)
def test_law_is_the_targets(params: Params, drafter: TableDrafter, target: TableTarget) -> None:
    assert distance(params, drafter, target) < 1e-12


class Alternating(TableDrafter):
    """Draws in one round and chooses in the next, so that walk and block meet at neighbouring positions."""

    def one(self, turn: Turn) -> Proposal:
        self.mode = Mode.greedy if turn.seen.position % 2 else Mode.sampled
        return super().one(turn)


def test_law_holds_where_walks_and_blocks_alternate() -> None:
    assert distance(settings(length=6), Alternating(2, Mode.sampled), TableTarget(2)) < 1e-12


def test_joint_law_of_a_batch() -> None:
    target, params = TableTarget(2), settings(length=3)
    law = batched_law(target, TableDrafter(2, Mode.sampled), [[1, 0], [0]], params)
    left, right = (plain_law(target.table, prompt, params, target.eos_ids) for prompt in ([1, 0], [0]))
    independent = {(a, b): p * q for a, p in left.items() for b, q in right.items()}
    assert total_variation(law, independent) < 1e-12  # pyright: ignore[reportArgumentType]


# The mistakes.


def rounds_share_coins(position: int, purpose: Purpose, rank: int = 0) -> Key:
    """Each coin named by the position it is about, which a later round is about again."""
    return Key(position + rank, purpose) if purpose is Purpose.accept else Key(position, purpose, rank)


MISTAKES: dict[str, tuple[str, Any]] = {
    "rest of the last token alone": ("rest_of_block", lambda p, q, weight: rest_of_block(p, q, 1.0)),
    "rest from p": ("rest_of_block", lambda p, q, weight: p),
    "h is w everywhere": ("stay_chance", lambda p, q, weight: weight),
    "h without 1 - w": ("stay_chance", lambda p, q, weight: 1.0),
    "w not capped": ("min", lambda one, weight: weight),
    "coins shared by rounds": ("Key", rounds_share_coins),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong = MISTAKES[mistake]
    params, target = settings(), TableTarget(3, seed=7)  # of two tokens the rest is one, whatever its weight
    monkeypatch.setattr(decoding.verify, name, wrong, raising=False)
    assert distance(params, TableDrafter(3, Mode.sampled), target, key_once=False) > 1e-3


def test_key_used_by_two_rounds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding.verify, "Key", rounds_share_coins)
    with pytest.raises(AssertionError, match="is used twice"):
        distance(settings(length=5), TableDrafter(2, Mode.sampled), TableTarget(2))


def test_lossless_rules_are_named() -> None:
    assert {rule.value for rule in Verification if lossless(rule)} == {"rejection", "block"}
