"""Bytes counted by hand: of shared weights, packed copies and K/V buffers."""

from __future__ import annotations

from torch import nn

from configs.schema import DecodeConfig, Drafting
from decoding.build import build_decoder
from decoding.sequence import Params
from eval.memory import cache_bytes, packed_bytes, weight_bytes
from models.packing import pack
from models.target import Target
from tests.conftest import tiny_draft


def test_shared_weights_count_once_and_anothers_not_at_all() -> None:
    """Float32: 3 x 4 and 3 values, twice under another name; the target has the 3 x 4."""
    own = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
    for layer in own:
        layer.weight = own[0].weight
    assert weight_bytes(own) == 4 * (12 + 3 + 3)
    assert weight_bytes(own, without=nn.ParameterList([own[0].weight])) == 4 * (3 + 3)


def test_a_draft_counts_without_the_targets_embedding(target: Target) -> None:
    draft = tiny_draft(target)
    shared = target.embedding.nbytes
    assert weight_bytes(draft) - weight_bytes(draft, without=target.model) in (0, shared)


def test_packed_copies_stand_beside_the_weights() -> None:
    layer = nn.Sequential(nn.Linear(64, 32)).requires_grad_(False)
    assert packed_bytes(layer) == 0
    if pack(layer):
        assert packed_bytes(layer) == 4 * 64 * 32


def test_caches_are_their_buffers(target: Target) -> None:
    """4 layers, 2 K/V heads of 8 float32: a row of both takes 2 x 4 x 2 x 8 x 4 = 512 bytes. The draft has
    one layer of as many heads."""
    for drafters in ([Drafting.draft], [Drafting.draft, Drafting.lookup]):
        decoder = build_decoder(target, tiny_draft(target), DecodeConfig(draft_tokens=2, drafters=drafters))
        assert cache_bytes(decoder) == (0, 0)
        params = Params(
            draft_tokens=2, max_new_tokens=4, temperature=0.0, top_k=0, top_p=1.0, stop=(), seed=0
        )
        decoder.generate([5, 6, 7], params)
        keys = decoder.cache.keys
        assert keys is not None
        rows = keys.shape[1] * keys.shape[3]
        held, drafted = cache_bytes(decoder)
        assert held == 512 * rows
        assert drafted > 0
        assert drafted % 128 == 0
