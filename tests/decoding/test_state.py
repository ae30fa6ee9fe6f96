"""What the caches hold after rounds is what a fresh forward over the committed tokens would put there."""

from __future__ import annotations

import pytest
import torch

from configs.schema import DecodeConfig
from configs.schema import Proposal as Mode
from decoding.cache import DraftCache, KVCache
from decoding.decoder import Decoder, Params, Session
from decoding.drafters import build_drafter
from decoding.drafters.eagle3 import Eagle3Drafter
from decoding.drafters.plain import PlainDrafter
from decoding.tree import TokenTree
from models.target import Target
from tests.conftest import tiny_draft
from tests.decoding.oracles import Bush, Oracle

PROMPT = [5, 9, 30, 7]
CLOSE = 1e-4


def settings(temperature: float = 0.0) -> Params:
    return Params.of(DecodeConfig(draft_tokens=3, max_new_tokens=24, temperature=temperature), seed=0)


def committed(session: Session) -> list[int]:
    """All tokens but the pending one."""
    return [*session.prompt, *session.generation.tokens[:-1]]


def same_rows(a: KVCache, b: KVCache) -> None:
    assert a.length == b.length > 0
    for mine, fresh in zip(a.rows, b.rows, strict=True):
        for left, right in zip(mine.buffers(), fresh.buffers(), strict=True):
            assert (left[:, :, : a.length] - right[:, :, : a.length]).abs().max() < CLOSE


@pytest.mark.parametrize("kind", [Oracle, Bush])
def test_targets_rows_after_rounds(target: Target, kind: type[Oracle]) -> None:
    right = Decoder(target, PlainDrafter()).generate(PROMPT, settings()).tokens
    drafter = kind([*PROMPT, *right], wrong=lambda position: position % 5 == 1, taps=(1, 3))
    session = Decoder(target, drafter).begin(PROMPT, settings(), None)
    run = session.run()
    next(run)
    for _ in range(4):
        next(run)
        tokens = torch.tensor([committed(session)])
        fresh = KVCache()
        output = target.forward(tokens, cache=fresh, taps=(1, 3))
        same_rows(session.cache, fresh)
        # The features given to the drafter are those of the accepted path, at its end.
        assert output.taps is not None
        new = len(session.seen.tokens)
        assert session.seen.tokens.tolist() == tokens[0, -new:].tolist()
        assert (session.seen.taps - output.taps[0, -new:]).abs().max() < CLOSE
    assert max(done.accepted for done in session.generation.rounds) == 3


def test_tree_nodes_see_their_own_path_only(target: Target) -> None:
    # 0 - 1 - 3 - 5
    #   \ 2 - 4
    tree = TokenTree([8, 11, 12, 13, 14, 15], [-1, 0, 0, 1, 2, 3])
    session = Decoder(target, PlainDrafter()).begin(PROMPT, settings(), None)
    target.forward(torch.tensor([PROMPT]), cache=session.cache)
    logits = target.forward(cache=session.cache, **session.rows(tree, len(PROMPT))).logits
    assert logits is not None
    for node, path in enumerate([[8], [8, 11], [8, 12], [8, 11, 13], [8, 12, 14], [8, 11, 13, 15]]):
        alone = target.forward(torch.tensor([[*PROMPT, *path]]), last_logits_only=True).logits
        assert alone is not None
        assert (logits[0, node] - alone[0, 0]).abs().max() < CLOSE


@pytest.mark.parametrize("layers", [1, 2])
def test_drafts_rows_after_rounds(target: Target, layers: int) -> None:
    """No row keeps the draft's own state once the target's is known."""
    draft = tiny_draft(target, layers=layers)
    drafter = build_drafter(draft, Mode.sampled, target.eos_ids)
    assert isinstance(drafter, Eagle3Drafter)
    # Hot, both laws are nearly flat: most drafts are accepted, some are not.
    session = Decoder(target, drafter).begin(PROMPT, settings(temperature=20.0), None)
    run = session.run()
    for _ in range(5):
        next(run)
    with torch.inference_mode():
        logits = drafter.read(session.seen)
        tokens = torch.tensor([committed(session)])
        taps = target.forward(tokens, taps=draft.taps).taps
        assert taps is not None
        fresh = DraftCache()
        shifted = torch.tensor([[*committed(session)[1:], session.seen.pending]])
        state = draft(draft.fuse(taps), shifted, torch.arange(tokens.shape[1])[None], fresh.attend)
    same_rows(drafter.cache, fresh)
    assert (logits - draft.logits(state)[0, -1]).abs().max() < CLOSE
    accepted = {done.accepted for done in session.generation.rounds}
    assert len(accepted) > 1
