"""What the caches hold after rounds is what a fresh forward over the committed tokens would put there."""

from __future__ import annotations

import pytest
import torch

from configs.schema import DecodeConfig
from configs.schema import Proposal as Mode
from decoding.cache import DraftCache, KVCache
from decoding.decoder import Batch, Decoder, Request
from decoding.drafters.eagle3 import build
from decoding.drafters.plain import PlainDrafter
from decoding.growth import ChainGrowth
from decoding.sequence import Decoding, Params
from decoding.tree import TokenTree
from models.target import Target
from tests.conftest import tiny_draft
from tests.decoding.oracles import Bush, Oracle

PROMPT = [5, 9, 30, 7]
CLOSE = 1e-4


def settings(temperature: float = 0.0) -> Params:
    return Params.of(DecodeConfig(draft_tokens=3, max_new_tokens=24, temperature=temperature), seed=0)


def committed(decoding: Decoding) -> list[int]:
    """All tokens but the pending one."""
    return [*decoding.prompt, *decoding.generation.tokens[:-1]]


def same_rows(a: KVCache, slot: int, b: KVCache) -> None:
    """Slot `slot` of a holds what slot 0 of b holds."""
    length = a.lengths[slot]
    assert length == b.lengths[0] > 0
    for mine, fresh in ((a.keys, b.keys), (a.values, b.values)):
        assert mine is not None
        assert fresh is not None
        assert (mine[:, slot, :, :length] - fresh[:, 0, :, :length]).abs().max() < CLOSE


@pytest.mark.parametrize("kind", [Oracle, Bush])
@pytest.mark.parametrize("others", [0, 2])
def test_targets_rows_after_rounds(target: Target, kind: type[Oracle], others: int) -> None:
    """Alone, and beside others that are refused and accepted at other places."""
    right = Decoder(target, PlainDrafter()).generate(PROMPT, settings()).tokens
    drafter = kind([*PROMPT, *right], wrong=lambda position: position % 5 == 1, taps=(1, 3))
    prompts = [*([[7] * 9, [3, 4]][:others]), PROMPT]
    batch = Batch(Decoder(target, drafter, batch_size=3), [Request(p, settings()) for p in prompts])
    batch.admit()
    for _ in range(4):
        batch.step()
        for decoding in batch.live:
            tokens = torch.tensor([committed(decoding)])
            fresh = KVCache(target.num_layers)
            output = target.forward(tokens, cache=fresh, taps=(1, 3))
            same_rows(batch.cache, decoding.slot, fresh)
            # The features given to the drafter are those of the accepted path, at its end.
            assert output.taps is not None
            assert decoding.seen is not None
            new = len(decoding.seen.tokens)
            assert decoding.seen.tokens == tokens[0, -new:].tolist()
            assert (decoding.seen.taps - output.taps[0, -new:]).abs().max() < CLOSE
    assert max(done.accepted for done in batch.live[-1].generation.rounds) == 3


@torch.inference_mode()
def test_tree_nodes_see_their_own_path_only(target: Target) -> None:
    # 0 - 1 - 3 - 5
    #   \ 2 - 4
    tree = TokenTree([8, 11, 12, 13, 14, 15], [-1, 0, 0, 1, 2, 3])
    batch = Batch(Decoder(target, PlainDrafter()), [Request(PROMPT, settings())])
    batch.admit()
    logits = target.forward(cache=batch.cache, **batch.rows([tree])).logits
    assert logits is not None
    for node, path in enumerate([[8], [8, 11], [8, 12], [8, 11, 13], [8, 12, 14], [8, 11, 13, 15]]):
        alone = target.forward(torch.tensor([[*PROMPT, *path]]), last_logits_only=True).logits
        assert alone is not None
        assert (logits[0, node] - alone[0, 0]).abs().max() < CLOSE


@pytest.mark.parametrize("layers", [1, 2])
def test_drafts_rows_after_rounds(target: Target, layers: int) -> None:
    """No row keeps the draft's own state once the target's is known."""
    draft = tiny_draft(target, layers=layers)
    drafter = build(draft, ChainGrowth(Mode.sampled), target.eos_ids)
    # Hot, both laws are nearly flat: most drafts are accepted, some are not.
    requests = [Request(prompt, settings(temperature=20.0)) for prompt in (PROMPT, [8, 3])]
    batch = Batch(Decoder(target, drafter, batch_size=2), requests)
    batch.admit()
    for _ in range(4):
        batch.step()
    with torch.inference_mode():
        read = drafter.reader.read([decoding.turn() for decoding in batch.live])
        for decoding, logits in zip(batch.live, read, strict=True):
            tokens = torch.tensor([committed(decoding)])
            taps = target.forward(tokens, taps=draft.taps).taps
            assert taps is not None
            fresh = DraftCache(layers)
            shifted = torch.tensor([[*committed(decoding)[1:], decoding.pending]])
            state = draft(draft.fuse(taps), shifted, torch.arange(tokens.shape[1])[None], fresh.attend)
            same_rows(drafter.reader.cache, decoding.state.slot, fresh)
            assert (logits - draft.logits(state)[0, -1]).abs().max() < CLOSE
    accepted = {done.accepted for decoding in batch.live for done in decoding.generation.rounds}
    assert len(accepted) > 1
