"""A small draft that was trained here, as the decoder reads it: its rows, and its law over its own ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from configs.schema import DecodeConfig, Tree
from configs.schema import Proposal as Mode
from decoding.build import build_decoder, network_drafter
from decoding.decoder import Decoder, Params, Request
from decoding.drafters import Seen, Turn, small
from decoding.drafters.plain import PlainDrafter
from decoding.drafters.small import TrainedReader
from decoding.growth import ChainGrowth, DynamicGrowth, Growth, StaticGrowth
from decoding.law import Law
from decoding.randomness import Seeded
from decoding.reader import Level
from decoding.shapes import TreeShape
from decoding.warp import Warp
from models.small import NetworkConfig, Small
from models.target import Target
from tests.conftest import tiny_target
from tests.decoding.replay import decoded_law, plain_law, total_variation

NO_EOS: frozenset[int] = frozenset()
EVEN = list(range(0, 64, 2))  # end of text, 2, among them
HEADS: list[dict[str, Any]] = [
    {},
    {"embedding": "own", "head": "tied"},
    {"head": "factored", "head_rank": 8},
]


def made(target: Target, vocabulary: list[int] | None = None, **network: Any) -> Small:
    size = None if vocabulary is None else len(vocabulary)
    draft = Small.build(NetworkConfig(**{"layers": 2, "draft_vocab_size": size, **network}), target)
    if vocabulary is not None:
        draft.set_vocabulary(torch.tensor(vocabulary))
    draft.initialise(0, target)
    return draft.to(target.dtype).eval().requires_grad_(False)


def params(temperature: float, length: int, draft_tokens: int = 3) -> Params:
    return Params(draft_tokens, length, temperature, top_k=0, top_p=1.0, stop=(), seed=0)


@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("vocabulary", [None, EVEN])
@torch.inference_mode()
def test_logits_of_tree_nodes_equal_forwards_without_a_cache(
    target: Target, head: dict[str, Any], vocabulary: list[int] | None
) -> None:
    """Two sequences of unequal lengths, the first with the tree 10 - 20 - 21, 10 - 30 - 31."""
    draft = made(target, vocabulary, **head)
    reader = TrainedReader(draft, NO_EOS)
    turns = [
        Turn(reader.begin(), Seen(0, tokens, pending, torch.zeros(0, 0)), 3, Law(Warp()), Seeded(0))
        for tokens, pending in (([4, 5, 6], 10), ([9], 12))
    ]
    a, b = (turn.state for turn in turns)
    root = reader.read(turns)
    first = reader.extend([Level(a, [20, 30], [-1, -1]), Level(b, [22], [-1])])
    second = reader.extend([Level(a, [21, 31], [0, 1])])
    for logits, tokens in [
        (root[0], [4, 5, 6, 10]),
        (root[1], [9, 12]),
        (first[0][1], [4, 5, 6, 10, 30]),
        (first[1][0], [9, 12, 22]),
        (second[0][0], [4, 5, 6, 10, 20, 21]),
        (second[0][1], [4, 5, 6, 10, 30, 31]),
    ]:
        expected = draft.logits(draft(torch.tensor([tokens]))[0, -1])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("growth", [ChainGrowth(Mode.sampled), DynamicGrowth(3, 2)])
def test_output_law_is_the_targets(growth: Growth) -> None:
    target = tiny_target(vocab=4, hidden=8, layers=2, heads=2, kv_heads=1, dtype=torch.float64)
    draft = made(target, [1, 2, 3], layers=1).double()
    drafter = small.build(draft, growth, target.eos_ids)
    asked = params(0.8, 3, draft_tokens=2)

    law = decoded_law(target, drafter, [0, 1], asked)

    def after(prefix: Any) -> torch.Tensor:
        logits = target.forward(torch.tensor([list(prefix)])).logits
        assert logits is not None
        return logits[0, -1]

    assert total_variation(law, plain_law(after, [0, 1], asked, target.eos_ids)) < 1e-12


@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize(
    "growth",
    [
        ChainGrowth(Mode.sampled),
        StaticGrowth(TreeShape(((0,), (1,), (0, 0))), Mode.sampled),
        DynamicGrowth(6, 3),
    ],
)
def test_greedy_output_equals_plain(target: Target, growth: Growth, head: dict[str, Any]) -> None:
    requests = [Request(prompt, params(0.0, 20)) for prompt in ([5, 9, 30], [8], [40, 41, 42, 43])]
    plain = Decoder(target, PlainDrafter()).generate_all(requests)
    drafter = network_drafter(target, made(target, EVEN, **head), growth)
    drafted = Decoder(target, drafter, batch_size=2).generate_all(requests)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]


def test_a_draft_that_is_the_target_is_always_right(target: Target) -> None:
    decoder = build_decoder(target, made(target, layers=4), DecodeConfig(tree=Tree.chain))
    generation = decoder.generate([5, 9, 30], params(0.0, 21))
    assert [round.accepted for round in generation.rounds] == [3, 3, 3, 3, 3]  # 1 + 5 (3 + 1) tokens


def test_in_bfloat16_it_decodes_packed_as_it_is(target: Target) -> None:
    wide = tiny_target(dtype=torch.bfloat16)
    decoder = build_decoder(wide, made(wide, EVEN, embedding="own", head="tied"), DecodeConfig())
    plain = Decoder(wide, PlainDrafter())
    assert decoder.generate([5, 9], params(0.0, 4)).tokens == plain.generate([5, 9], params(0.0, 4)).tokens
