"""How a small model drafts: which rows it reads, what its cache holds, and what it may propose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.errors import CheckpointError
from configs.schema import Proposal as Mode
from decoding.decoder import Decoder, Params, Request
from decoding.drafters import Seen, Turn, small
from decoding.drafters.plain import PlainDrafter
from decoding.drafters.small import SmallReader
from decoding.growth import ChainGrowth, DynamicGrowth, Growth, StaticGrowth
from decoding.law import Law
from decoding.randomness import Seeded
from decoding.reader import Level, NetworkDrafter
from decoding.shapes import TreeShape
from decoding.warp import Warp
from models.target import Target
from tests.conftest import tiny_model, tiny_target, tiny_tokenizer
from tests.decoding.replay import batched_law, decoded_law, plain_law, total_variation

GREEDY = ChainGrowth(Mode.greedy)
SAMPLED = ChainGrowth(Mode.sampled)
BUSH = TreeShape(((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 0, 0)))
NONE = torch.zeros(0, 0)
NO_EOS: frozenset[int] = frozenset()


@pytest.fixture
def draft() -> Target:
    return tiny_target(layers=2, hidden=16, seed=1)


def minute(seed: int) -> Target:
    """Three ids, of which 2 is the end, in float64."""
    return tiny_target(vocab=3, hidden=8, layers=1, heads=2, kv_heads=1, seed=seed, dtype=torch.float64)


def turn(state: Any, start: int, tokens: list[int], pending: int, budget: int = 3) -> Turn:
    return Turn(state, Seen(start, tokens, pending, NONE), budget, Law(Warp()), Seeded(0))


def params(temperature: float, length: int, draft_tokens: int = 2, top_k: int = 0) -> Params:
    return Params(draft_tokens, length, temperature, top_k=top_k, top_p=1.0, stop=(), seed=0)


def after(model: Target, tokens: Sequence[int]) -> Tensor:
    """Logits [V] of a forward over nothing but `tokens`."""
    logits = model.forward(torch.tensor([list(tokens)])).logits
    assert logits is not None
    return logits[0, -1]


# Which rows are read


def test_padding_has_its_own_sequences_last_position(draft: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A further one may be past a table of positions, or change the rotation of all rows."""
    reader = SmallReader(draft, NO_EOS, draft.vocab_size)
    asked: list[Tensor] = []
    run = reader.run

    def recorded(tokens: Tensor, positions: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
        asked.append(positions)
        return run(tokens, positions, mask, features)

    monkeypatch.setattr(reader, "run", recorded)
    reader.read([turn(reader.begin(), 0, [5, 6, 7], 8), turn(reader.begin(), 0, [5], 6)])
    assert asked[0].tolist() == [[0, 1, 2, 3], [0, 1, 1, 1]]


@pytest.mark.parametrize(
    ("accepted", "fed", "at"),
    [
        (0, [9], [4]),
        (1, [9], [5]),
        (2, [9], [6]),
        (3, [None, 9], [6, 7]),  # None: the last drafted token, which was never read
    ],
)
@torch.inference_mode()
def test_only_unread_tokens_are_read(
    draft: Target,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    accepted: int,
    fed: list[int | None],
    at: list[int],
) -> None:
    noted: list[tuple[list[int], list[int]]] = []
    forward = Target.forward

    def noting(self: Target, ids: Tensor, *, positions: Tensor, **words: Any) -> Any:
        noted.append((ids[0].tolist(), positions[0].tolist()))
        return forward(self, ids, positions=positions, **words)

    monkeypatch.setattr(Target, "forward", noting)
    drafter = small.build(draft, GREEDY, NO_EOS, target)
    state = drafter.begin()
    [first] = drafter.propose([turn(state, 0, [4, 5, 6], 7)])
    x, y, z = first.tree.tokens[1:]
    assert noted == [([4, 5, 6, 7], [0, 1, 2, 3]), ([x], [4]), ([y], [5])]
    assert (first.forwards, first.tree.parent) == (3, [-1, 0, 1, 2])
    drafter.propose([turn(state, 3, [7, *[x, y, z][:accepted]], 9, budget=1)])
    assert noted[3:] == [([z if token is None else token for token in fed], at)]


def test_gap_in_what_was_seen_is_refused(draft: Target, target: Target) -> None:
    drafter = small.build(draft, GREEDY, NO_EOS, target)
    state = drafter.begin()
    drafter.propose([turn(state, 0, [4, 5], 6)])
    with pytest.raises(ValueError, match="has read 3 rows, the target is at 3"):
        drafter.propose([turn(state, 3, [7], 8)])


# What its cache holds


@pytest.mark.parametrize("growth", [GREEDY, StaticGrowth(BUSH, Mode.greedy), DynamicGrowth(6, 2)])
@torch.inference_mode()
def test_cache_equals_a_fresh_prefill(draft: Target, target: Target, growth: Growth) -> None:
    drafter = small.build(draft, growth, NO_EOS, target)
    other, state = drafter.begin(), drafter.begin()  # the second slot
    drafter.propose([turn(other, 0, [3], 4)])
    text, start, told = [4, 5, 6, 7], 0, [4, 5, 6]
    for accepted in (2, 0, 3, 1):
        [proposal] = drafter.propose([turn(state, start, told, text[-1])])
        deepest: tuple[int, ...] = max(
            reversed(proposal.tree.paths), key=lambda path: len(path)
        )  # not along the first children
        start, told = len(text) - 1, [text[-1], *deepest[:accepted]]
        text += [*deepest[:accepted], 60 + accepted]
    drafter.propose([turn(other, 1, [4], 5, budget=1), turn(state, start, told, text[-1], budget=1)])
    assert state.committed == len(text)
    assert_rows_equal(drafter, state, fresh(draft, target, text))


def fresh(draft: Target, target: Target, text: list[int]) -> tuple[NetworkDrafter, Any]:
    drafter = small.build(draft, GREEDY, NO_EOS, target)
    state = drafter.begin()
    drafter.propose([turn(state, 0, text[:-1], text[-1], budget=1)])
    return drafter, state


def assert_rows_equal(drafter: NetworkDrafter, state: Any, other: tuple[NetworkDrafter, Any]) -> None:
    for name in ("keys", "values"):
        mine = getattr(drafter.reader.cache, name)[:, state.slot, :, : state.committed]
        theirs = getattr(other[0].reader.cache, name)[:, other[1].slot, :, : state.committed]
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_logits_of_tree_nodes_equal_plain_forwards(draft: Target) -> None:
    """Two sequences of unequal lengths and trees:

    10 - 20 - 21        12 - 22
       - 30 - 31           - 32 - 33
            - 41
    """
    reader = SmallReader(draft, NO_EOS, 64)
    a, b = reader.begin(), reader.begin()
    root = reader.read([turn(a, 0, [4, 5, 6, 7, 8], 10), turn(b, 0, [9], 12)])
    first = reader.extend([Level(a, [20, 30], [-1, -1]), Level(b, [22, 32], [-1, -1])])
    second = reader.extend([Level(a, [21, 31, 41], [0, 1, 1]), Level(b, [33], [1])])
    ahead, behind = [4, 5, 6, 7, 8, 10], [9, 12]
    pairs = [
        (root[0], ahead),
        (root[1], behind),
        (first[0][0], [*ahead, 20]),
        (first[0][1], [*ahead, 30]),
        (first[1][0], [*behind, 22]),
        (first[1][1], [*behind, 32]),
        (second[0][0], [*ahead, 20, 21]),
        (second[0][1], [*ahead, 30, 31]),
        (second[0][2], [*ahead, 30, 41]),
        (second[1][0], [*behind, 32, 33]),
    ]
    for logits, tokens in pairs:
        torch.testing.assert_close(logits, after(draft, tokens), atol=1e-4, rtol=0)


# The law


@pytest.mark.parametrize(
    "growth",
    [SAMPLED, GREEDY, StaticGrowth(TreeShape(((0,), (1,), (0, 0))), Mode.sampled), DynamicGrowth(3, 2)],
)
def test_output_law_is_the_targets(growth: Growth) -> None:
    target, asked = minute(0), params(0.8, 4)
    drafter = small.build(minute(1), growth, target.eos_ids, target)
    law = decoded_law(target, drafter, [0, 1], asked)
    expected = plain_law(lambda prefix: after(target, prefix), [0, 1], asked, target.eos_ids)
    assert total_variation(law, expected) < 1e-12


def test_output_law_in_a_batch_is_the_targets() -> None:
    target, asked = minute(0), params(1.0, 3, draft_tokens=1, top_k=2)
    drafter = small.build(minute(1), SAMPLED, target.eos_ids, target)
    laws = [
        plain_law(lambda prefix: after(target, prefix), prompt, asked, target.eos_ids)
        for prompt in ([0, 1], [1, 0, 0])
    ]
    expected: dict[Any, float] = {(a, b): p * q for a, p in laws[0].items() for b, q in laws[1].items()}
    law: dict[Any, float] = batched_law(target, drafter, [[0, 1], [1, 0, 0]], asked)
    assert total_variation(law, expected) < 1e-12


@pytest.mark.parametrize("growth", [SAMPLED, StaticGrowth(BUSH, Mode.sampled), DynamicGrowth(6, 3)])
@pytest.mark.parametrize("seed", [0, 1])  # 0: the target drafts for itself
def test_greedy_output_equals_plain(target: Target, growth: Growth, seed: int) -> None:
    prompts = [[5, 9, 30], [8], [40, 41, 42, 43, 44, 45]]
    requests = [Request(prompt, params(0.0, 20, draft_tokens=3)) for prompt in prompts]
    plain = Decoder(target, PlainDrafter()).generate_all(requests)
    drafter = small.build(tiny_target(seed=seed), growth, target.eos_ids, target)
    made = Decoder(target, drafter, batch_size=2).generate_all(requests)
    assert [one.tokens for one in made] == [one.tokens for one in plain]
    if seed == 0 and growth is SAMPLED:
        assert all(round.accepted == 3 for one in made for round in one.rounds[:-1])


# Vocabularies


def padded(rows: int, seed: int = 0) -> Target:
    """A head of `rows` rows, of which the tokenizer has 64."""
    return Target.wrap(tiny_model(vocab=rows, seed=seed), tiny_tokenizer(64))


@pytest.mark.parametrize(("draft_rows", "target_rows"), [(72, 64), (64, 72), (72, 72), (80, 72)])
@torch.inference_mode()
def test_padding_is_never_proposed(draft_rows: int, target_rows: int) -> None:
    draft, target = padded(draft_rows), padded(target_rows)
    drafter = small.build(draft, SAMPLED, NO_EOS, target)
    state = drafter.begin()
    logits = drafter.reader.read([turn(state, 0, [4, 5], 6)])
    assert logits.shape == (1, target_rows)
    torch.testing.assert_close(logits[0, :64], after(draft, [4, 5, 6])[:64])
    assert (logits[0, 64:] == -torch.inf).all()


def test_padding_that_the_target_emits_can_be_read() -> None:
    drafter = small.build(padded(64), GREEDY, NO_EOS, padded(72))
    [proposal] = drafter.propose([turn(drafter.begin(), 0, [4, 70], 71)])
    assert len(proposal.tree) == 4


def test_another_vocabulary_is_refused(target: Target) -> None:
    other = tiny_tokenizer(64)
    other.add_tokens(["<|end|>"])
    draft = Target.wrap(tiny_model(vocab=65), other, name="stranger")
    with pytest.raises(CheckpointError, match=r"stranger .* 1 tokens .*'<\|end\|>' \(None and 64\).*foreign"):
        small.build(draft, GREEDY, NO_EOS, target)
