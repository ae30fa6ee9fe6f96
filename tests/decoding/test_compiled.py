"""Forwards at fixed shapes: the same tokens and logits as eager ones, and few shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.errors import ConfigError
from configs.schema import DecodeConfig, Drafting, Tree
from decoding.build import build_decoder, compiled_forward
from decoding.compiled import Compiled, places
from decoding.decoder import Decoder
from decoding.drafters.plain import PlainDrafter
from decoding.sequence import Params, Request
from models.eagle3 import Eagle3
from models.target import Target
from tests.conftest import tiny_draft, tiny_target

PROMPTS = [[5, 6, 7, 5, 6], [9], [3, 4, 3, 4, 3, 4, 3]]


def as_it_is(run: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return run


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed shapes, run eagerly."""
    monkeypatch.setattr("decoding.compiled.torch.compile", as_it_is)


def decoded(target: Target, draft: Eagle3, decode: DecodeConfig) -> tuple[list[list[int]], Decoder]:
    decoder = build_decoder(target, draft, decode)
    requests = [Request(prompt, Params.of(decode, seed)) for seed, prompt in enumerate(PROMPTS)]
    return [generation.tokens for generation in decoder.generate_all(requests)], decoder


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", [Tree.chain, Tree.dynamic])
def test_same_tokens(target: Target, draft: Eagle3, tree: Tree, temperature: float, batch_size: int) -> None:
    # 520 tokens pass the 512 rows at which the extent doubles.
    decode = DecodeConfig(
        tree=tree, tree_nodes=5, temperature=temperature, batch_size=batch_size, max_new_tokens=520
    )
    decode.drafters = [Drafting.draft, Drafting.lookup]
    eager, _ = decoded(target, draft, decode)
    decode.compile = True
    fixed, decoder = decoded(target, draft, decode)
    assert fixed == eager
    assert decoder.compiled is not None
    widths = {shape[1][2] for shape in decoder.compiled.forwards}
    assert widths <= {1, 1 + (4 if tree is Tree.chain else 5) + 4}  # the draft's and the lookup's


@pytest.mark.usefixtures("uncompiled")
def test_plain_decoding_past_the_extent(target: Target) -> None:
    params = Params.of(DecodeConfig(max_new_tokens=520), 0)
    eager = Decoder(target, PlainDrafter()).generate([5, 6, 7], params)
    assert Decoder(target, PlainDrafter(), compiled=Compiled(target, [1])).generate(
        [5, 6, 7], params
    ).tokens == (eager.tokens)


@pytest.mark.usefixtures("uncompiled")
def test_taps_are_those_of_the_forward(target: Target) -> None:
    compiled, taps = Compiled(target, [2]), (1, 4, 3)
    seen: list[Tensor] = []
    for forward, extent in ((target.forward, 0), (compiled, 512)):
        decoder = Decoder(target, PlainDrafter())
        slot = decoder.cache.allocate()
        decoder.cache.aim([slot], 3)
        target.forward(torch.tensor([[5, 6, 7]]), cache=decoder.cache)
        columns = decoder.cache.aim([slot], 2, extent=extent)
        mask = torch.zeros(1, 1, 2, columns, dtype=torch.bool)
        mask[..., :4] = mask[..., 1, 4] = True
        output = forward(
            input_ids=torch.tensor([[8, 9]]),
            positions=torch.tensor([[3, 4]]),
            mask=mask,
            cache=decoder.cache,
            taps=taps,
        )
        assert decoder.cache.lengths == [5]
        assert output.taps is not None
        seen.append(output.taps)
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-5, atol=1e-5)


def test_inductor_says_the_same() -> None:
    target = tiny_target(layers=2)
    draft = tiny_draft(target)
    decode = DecodeConfig(draft_tokens=2, max_new_tokens=12)
    eager, _ = decoded(target, draft, decode)
    decode.compile = True
    compiled, decoder = decoded(target, draft, decode)
    assert compiled == eager
    assert decoder.compiled is not None
    assert len(decoder.compiled.forwards) <= 2  # one node, and three


def test_sizes(target: Target) -> None:
    compiled = Compiled(target, [9, 1])
    assert [compiled.padded(nodes) for nodes in (1, 2, 9, 10)] == [1, 9, 9, 18]
    assert [compiled.extent(rows) for rows in (1, 512, 513, 1024, 1025)] == [512, 512, 1024, 1024, 2048]
    with pytest.raises(ConfigError, match="at least 1 node"):
        Compiled(target, [])


def test_a_cache_that_lies_elsewhere_in_part_is_another() -> None:
    a, b, c, d = torch.zeros(4, 8)
    one = places([a, b], [c, d])
    assert places([a, b], [c, d]) == one
    assert one not in (places([a, c], [c, d]), places([a, b], [b, d]), places([a, b], [c, b]))


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"draft_tokens": 4}, [1, 5]),
        ({"tree": Tree.dynamic, "tree_nodes": 8}, [1, 9]),
        ({"tree": Tree.dynamic, "tree_nodes": 8, "drafters": [Drafting.draft, Drafting.lookup]}, [1, 13]),
        ({"drafters": [Drafting.lookup], "draft_tokens": 8}, [1, 9]),
        ({"drafters": [Drafting.lookahead], "draft_tokens": 4}, [1, 18]),  # its window, not the budget
    ],
)
def test_sizes_that_a_configuration_needs(target: Target, settings: dict[str, Any], sizes: list[int]) -> None:
    compiled = compiled_forward(target, DecodeConfig(compile=True, **settings))
    assert compiled is not None
    assert compiled.sizes == sizes
    assert compiled_forward(target, DecodeConfig(**settings)) is None
