"""Lossless, exactly: the real decoder's output law, over all outcomes of its chance, is the target's.

Prompts are followed by n >= K + 2 tokens, so that a sequence crosses two rounds and can see a bonus token.
Then each known mistake is put into the real code, and the same comparison must see it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import decoding.decoder
import decoding.drafters
import decoding.verify
from configs.schema import DecodeConfig
from configs.schema import Proposal as Mode
from decoding.build import build_drafter
from decoding.drafters import Draws, Proposal, Turn
from decoding.growth import GrowingChain
from decoding.randomness import Key, Purpose
from decoding.sequence import Decoding, Params
from decoding.tree import TokenTree
from decoding.verify import residual, verify
from tests.conftest import tiny_draft, tiny_target
from tests.decoding.replay import batched_law, decoded_law, plain_law, total_variation
from tests.decoding.tables import TableDrafter, TableTarget

PROMPT = [1, 0]
# 0 - 1 - 3      two children of the root, one grandchild
#   \ 2
TREE = [-1, 0, 0, 1]


def params(draft_tokens: int = 2, length: int = 4, **warp: Any) -> Params:
    config = DecodeConfig(draft_tokens=draft_tokens, max_new_tokens=length)
    for name, value in {"temperature": 1.0, **warp}.items():
        setattr(config, name, value)
    return Params.of(config, seed=0)


def distance(
    mode: Mode,
    settings: Params,
    vocab: int = 3,
    eos: tuple[int, ...] = (),
    key_once: bool = True,
    **drafter: Any,
) -> float:
    """Total variation between the decoder's law and plain decoding's, target and drafter being tables."""
    target = TableTarget(vocab, eos=eos)
    law = decoded_law(target, TableDrafter(vocab, mode, **drafter), PROMPT, settings, key_once)
    right = plain_law(target.table, PROMPT, settings, target.eos_ids)
    return total_variation(law, right)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(
    ("warp", "others"),
    [
        pytest.param({}, {}, id="plain"),
        pytest.param({"temperature": 0.7}, {}, id="temperature"),
        pytest.param({"temperature": 0.7, "top_k": 2}, {"vocab": 4}, id="top-k"),
        pytest.param({"top_p": 0.8}, {}, id="top-p"),
        pytest.param({"min_p": 0.3}, {"vocab": 4}, id="min-p"),
        pytest.param({"repetition_penalty": 1.8}, {}, id="repetition-penalty"),
        pytest.param({"temperature": 0}, {"vocab": 4}, id="greedy"),
        pytest.param({"temperature": 0.7}, {"eos": (2,)}, id="eos"),
        pytest.param({"temperature": 0.7}, {"ids": [0, 2]}, id="draft-vocabulary"),
        pytest.param({"temperature": 0.7}, {"parent": TREE, "seed": 3}, id="tree"),
    ],
)
def test_law_is_the_targets(mode: Mode, warp: dict[str, Any], others: dict[str, Any]) -> None:
    assert distance(mode, params(**warp), **others) < 1e-12


@pytest.mark.parametrize("mode", list(Mode))
def test_law_holds_in_a_round_after_a_bonus(mode: Mode) -> None:
    # With K = 1 and 5 tokens: the prefill's, an accepted one and its bonus, and a second full round.
    assert distance(mode, params(draft_tokens=1, length=5, temperature=0.7, top_k=2)) < 1e-12


@pytest.mark.parametrize("mode", list(Mode))
def test_joint_law_of_a_batch_is_the_product_of_the_targets(mode: Mode) -> None:
    """Two prompts of different lengths, accepting at different places, over two rounds: independent, and each
    the target's."""
    settings = params(draft_tokens=1, length=3, temperature=0.7)
    target, prompts = TableTarget(2), [[1, 0], [0, 1, 1]]
    joint = batched_law(target, TableDrafter(2, mode), prompts, settings)
    alone = [plain_law(target.table, prompt, settings, target.eos_ids) for prompt in prompts]
    product = {(a, b): p * q for a, p in alone[0].items() for b, q in alone[1].items()}
    assert sum(abs(joint.get(key, 0.0) - product.get(key, 0.0)) for key in {*joint, *product}) < 1e-12


def test_same_deterministic_child_twice_is_harmless() -> None:
    class Twice(TableDrafter):
        def one(self, turn: Turn) -> Proposal:
            tree = super().one(turn).tree
            return Proposal(TokenTree([*tree.tokens, tree.tokens[1]], [*tree.parent, 0]))

    settings = params(draft_tokens=1, length=3, temperature=0.7)
    target, drafter = TableTarget(3), Twice(3, Mode.greedy)
    right = plain_law(target.table, PROMPT, settings, target.eos_ids)
    assert total_variation(decoded_law(target, drafter, PROMPT, settings), right) < 1e-12


# A real Llama in float64 under a real draft.


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(
    ("draft_tokens", "length", "warp", "vocabulary"),
    [
        pytest.param(1, 3, {"temperature": 0.7}, [0, 1, 2], id="temperature"),
        pytest.param(2, 4, {"temperature": 0.7, "top_k": 2}, [0, 1, 2, 3], id="top-k"),
        pytest.param(2, 4, {"temperature": 0.7, "top_p": 0.6}, [0, 1, 3], id="top-p"),
        pytest.param(1, 5, {"temperature": 0.7, "top_k": 2}, [0, 3], id="draft-vocabulary"),
        pytest.param(2, 5, {"temperature": 0}, [0, 1, 3], id="greedy"),
    ],
)
def test_law_of_a_real_target_under_a_real_draft(
    mode: Mode, draft_tokens: int, length: int, warp: dict[str, Any], vocabulary: list[int]
) -> None:
    assert real_distance(mode, params(draft_tokens, length, **warp), vocabulary) < 1e-12


def real_distance(mode: Mode, settings: Params, vocabulary: list[int]) -> float:
    """Total variation from plain decoding; `vocabulary` is the draft's, of the target's four tokens."""
    target = tiny_target(vocab=4, hidden=16, layers=2, heads=2, kv_heads=1, dtype=torch.float64)
    draft = tiny_draft(target, vocabulary=vocabulary).double()
    drafter = build_drafter(target, draft, DecodeConfig(proposal=mode))

    def logits(prefix: tuple[int, ...]) -> Tensor:
        return target.model(torch.tensor([prefix]), use_cache=False).logits[0, -1]

    law = decoded_law(target, drafter, [1, 3], settings)
    right = plain_law(logits, [1, 3], settings, target.eos_ids)
    assert len(law) > 1 or settings.temperature == 0
    return total_variation(law, right)


# The mistakes. Each changes the real code (or breaks what a drafter must keep) and must be seen.

Mutation = Callable[[pytest.MonkeyPatch], None]


def untempered(law: np.ndarray) -> np.ndarray:
    """The law at temperature 1 of a law at temperature 0.7: exp(l / 0.7) ** 0.7 = exp(l)."""
    powered = law**0.7
    return powered / powered.sum()


def with_law(change: Callable[[Proposal, int, np.ndarray], np.ndarray]) -> Mutation:
    """Changes the target's law as verification sees it; the prefill's draw is left alone."""

    def mutated(proposal: Proposal, law: Callable[[int], np.ndarray], randomness: Any, position: int) -> Any:
        changed = law if len(proposal.tree) == 1 else lambda node: change(proposal, node, law(node))
        return verify(proposal, changed, randomness, position)

    return lambda patch: patch.setattr(decoding.decoder, "verify", mutated)


def with_proposal(change: Callable[[TableDrafter, Turn, Proposal], Proposal]) -> Mutation:
    """Changes what the drafter reports after having drawn."""
    one = TableDrafter.one

    def mutated(self: TableDrafter, turn: Turn) -> Proposal:
        return change(self, turn, one(self, turn))

    return lambda patch: patch.setattr(TableDrafter, "one", mutated)


def with_row_early(patch: pytest.MonkeyPatch) -> None:
    def mutated(proposal: Proposal, law: Callable[[int], np.ndarray], randomness: Any, position: int) -> Any:
        return verify(proposal, lambda node: law(max(node - 1, 0)), randomness, position)

    patch.setattr(decoding.decoder, "verify", mutated)


def untempered_bonus(proposal: Proposal, node: int, law: np.ndarray) -> np.ndarray:
    return law if proposal.tree.children(node) else untempered(law)


def untempered_target_when_accepting(proposal: Proposal, node: int, law: np.ndarray) -> np.ndarray:
    return untempered(law) if proposal.tree.children(node) else law


def untempered_draft_law(drafter: TableDrafter, turn: Turn, proposal: Proposal) -> Proposal:
    draws = {
        node: [replace(group[0], law=untempered(group[0].law))] for node, group in proposal.draws.items()
    }
    return replace(proposal, draws=draws)


def greedy_reported_as_sampled(drafter: TableDrafter, turn: Turn, proposal: Proposal) -> Proposal:
    tree = proposal.tree
    prefixes = [[*turn.state, turn.seen.pending, *path] for path in tree.paths]
    draws = {
        node: [Draws(drafter.law(prefixes[node], turn.law, tree.paths[node]), (node + 1,))]
        for node in range(len(tree) - 1)
    }
    return replace(proposal, draws=draws)


def unlikely_draws_dropped(drafter: TableDrafter, turn: Turn, proposal: Proposal) -> Proposal:
    tokens = proposal.tree.tokens
    unlikely = [bool(proposal.draws[i][0].law[token] < 0.4) for i, token in enumerate(tokens[1:])]
    kept = unlikely.index(True) if True in unlikely else len(tokens) - 1
    draws = {node: proposal.draws[node] for node in range(kept)}
    return Proposal(TokenTree.chain(turn.seen.pending, tokens[1 : kept + 1]), draws)


def likeliest_sibling_first(drafter: TableDrafter, turn: Turn, proposal: Proposal) -> Proposal:
    tokens, law = proposal.tree.tokens, proposal.draws[0][0].law
    best = max(tokens[1:], key=lambda token: law[token])
    return Proposal(TokenTree.chain(turn.seen.pending, [best]), {0: [Draws(law, (1,))]})


def overrun(self: Decoding, run: list[int]) -> list[int]:
    """As EAGLE's code does it: append the run, then look for an end anywhere in it."""
    tokens = self.generation.tokens
    tokens += run
    del tokens[self.params.max_new_tokens :]
    if self.eos_ids & {*run}:
        self.generation.finish = "eos"
    elif len(tokens) == self.params.max_new_tokens:
        self.generation.finish = "length"
    return run


def positionless(position: int, purpose: Purpose, rank: int = 0) -> Key:
    return Key(0, purpose, rank)


def patched(module: Any, name: str, value: Any) -> Mutation:
    return lambda patch: patch.setattr(module, name, value)


PAIR = [-1, 0, 0]  # two children of the root
UPDATES_NOTHING = patched(decoding.verify, "residual", lambda p, q, token: p)
MISTAKES: dict[str, tuple[Mutation, Mode, dict[str, Any]]] = {
    "resampled from p": (UPDATES_NOTHING, Mode.sampled, {}),
    "resampled from p, greedy": (UPDATES_NOTHING, Mode.greedy, {}),
    "residual of the unwarped law": (
        patched(decoding.verify, "residual", lambda p, q, token: residual(untempered(p), q, token)),
        Mode.sampled,
        {},
    ),
    "untempered bonus": (with_law(untempered_bonus), Mode.sampled, {}),
    "target unwarped when accepting": (with_law(untempered_target_when_accepting), Mode.sampled, {}),
    "draft law reported unwarped": (with_proposal(untempered_draft_law), Mode.sampled, {}),
    "greedy reported as sampled": (with_proposal(greedy_reported_as_sampled), Mode.greedy, {}),
    "unlikely draws dropped": (with_proposal(unlikely_draws_dropped), Mode.sampled, {}),
    "likelier of two draws kept": (with_proposal(likeliest_sibling_first), Mode.sampled, {"parent": PAIR}),
    "siblings' law not updated": (
        patched(decoding.drafters, "without", lambda law, index: law),
        Mode.sampled,
        {"parent": PAIR},
    ),
    "target's row one early": (with_row_early, Mode.sampled, {}),
    "randomness reused": (
        patched(decoding.verify, "Key", positionless),
        Mode.sampled,
        {"length": 4, "key_once": False},
    ),
    "end not cut": (patched(Decoding, "emit", overrun), Mode.sampled, {"eos": (2,)}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, mode, others = MISTAKES[mistake]
    settings = params(draft_tokens=1, length=others.get("length", 3), temperature=0.7)
    others = {name: value for name, value in others.items() if name != "length"}
    assert distance(mode, settings, **others) < 1e-12
    mutate(monkeypatch)
    assert distance(mode, settings, **others) > 1e-3


def test_mistake_in_the_real_drafts_law_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    grow = GrowingChain.grow

    def mutated(self: GrowingChain, nodes: Any, logits: Tensor) -> list[int]:
        read = grow(self, nodes, logits)
        group = self.draws[nodes[0]][0]
        self.draws[nodes[0]] = [replace(group, law=untempered(group.law))]
        return read

    monkeypatch.setattr(GrowingChain, "grow", mutated)
    settings = params(draft_tokens=1, length=3, temperature=0.7)
    assert real_distance(Mode.sampled, settings, [0, 1, 3]) > 1e-3


def test_key_used_twice_by_the_real_draft_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoding.growth.Key", positionless)
    with pytest.raises(AssertionError, match="is used twice"):
        real_distance(Mode.sampled, params(draft_tokens=1, length=5, temperature=0.7), [0, 1, 3])


@pytest.mark.parametrize("where", ["decoding.verify.Key", "tests.decoding.tables.Key"])
def test_key_used_twice_is_refused(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, positionless)
    with pytest.raises(AssertionError, match="is used twice"):
        distance(Mode.sampled, params(temperature=0.7))
