"""A grammar that cannot be followed any further ends its own sequence, with its reason, and no other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import DecodeConfig, Drafting
from decoding.build import build_drafter
from decoding.decoder import Decoder, Request
from decoding.drafters.forced import ForcedDrafter
from decoding.drafters.plain import PlainDrafter
from decoding.grammar import GrammarError, Grammars
from decoding.sequence import Generation, Params
from tests.conftest import tiny_draft, tiny_target, tiny_tokenizer
from tests.decoding.oracles import Oracle
from tests.decoding.tables import ForcedTarget, decoder_of

PROMPT = [1, 2]
SCRIPT = [*PROMPT, *range(10, 30)]  # what the target is certain of, and the oracle drafts


class Dies:
    """Allows everything, until the text that it is asked about, or moves on to, has `length` tokens."""

    def __init__(self, length: int, asked: bool = True) -> None:
        self.length = length
        self.asked = asked  # fails when asked for a row; else only when tokens are committed
        self.text: list[int] = []

    def alive(self, path: Sequence[int]) -> None:
        if len(self.text) + len(path) >= self.length:
            raise GrammarError(f"dead after {self.length}")

    def mask(self, path: Sequence[int]) -> Tensor | None:
        if self.asked:
            self.alive(path)
        return None

    def forced(self, path: Sequence[int], limit: int) -> list[int]:
        return []

    def likely(self, path: Sequence[int], limit: int) -> list[int]:
        return []

    def commit(self, tokens: Sequence[int]) -> None:
        if not self.asked:
            self.alive(tokens)
        self.text += tokens


def params(**settings: Any) -> Params:
    return Params.of(DecodeConfig(**{"draft_tokens": 3, "max_new_tokens": 8, **settings}), seed=0)


def oracle_decoder(batch_size: int = 1) -> Decoder:
    return decoder_of(ForcedTarget(SCRIPT, 40), ForcedDrafter(Oracle(SCRIPT)), batch_size)


def all_of(requests: Sequence[Request], batch_size: int) -> tuple[list[Generation], list[int], Decoder]:
    ended: list[int] = []
    decoder = oracle_decoder(batch_size)
    done = decoder.generate_all(requests, on_end=lambda index, _: ended.append(index))
    return done, ended, decoder


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_only_its_own_sequence_ends(batch_size: int, temperature: float) -> None:
    """The prefill emits 10. The first round drafts 11 12 13 and the bonus would be 14; after six tokens, that
    is in the second round, the grammar of the middle request has no row."""
    settings = params(temperature=temperature)
    requests = [Request(PROMPT, settings, grammar) for grammar in (None, Dies(6), Dies(99), None)]
    done, ended, decoder = all_of(requests, batch_size)
    for whole in (done[0], done[2], done[3]):
        assert (whole.tokens, whole.finish, whole.error) == ([*range(10, 18)], "length", None)
    assert (done[1].tokens, done[1].finish) == ([10, 11, 12, 13, 14], "error")
    assert isinstance(done[1].error, GrammarError)
    assert str(done[1].error) == "dead after 6"
    assert [(r.drafted, r.accepted) for r in done[1].rounds] == [(3, 3)]  # the round that failed is none
    assert len(done[1].emitted_at) == 1
    assert done[1].seconds >= done[1].emitted_at[0]
    assert sorted(ended) == [0, 1, 2, 3]
    assert not any(decoder.cache.lengths)


@pytest.mark.parametrize("length", [0, 1])
def test_it_may_fail_at_the_prompt(length: int) -> None:
    """Asked for the first row, or (1) for the row after the first token."""
    done, _, _ = all_of([Request(PROMPT, params(), grammar) for grammar in (Dies(length), None)], 2)
    assert done[0].tokens == [10][:length]
    assert (done[0].finish, done[0].rounds) == ("error", [])
    assert (done[0].ttft > 0) is bool(length)
    assert done[1].tokens == [*range(10, 18)]


def test_tokens_that_the_grammar_fails_at_are_not_emitted() -> None:
    """It fails when 11 12 13 14 are committed."""
    done, _, _ = all_of([Request(PROMPT, params(), Dies(5, asked=False)), Request(PROMPT, params())], 2)
    assert (done[0].tokens, done[0].finish, done[0].rounds) == ([10], "error", [])
    assert done[1].tokens == [*range(10, 18)]


def test_generate_raises_it_after_what_came_before() -> None:
    runs: list[list[int]] = []
    with pytest.raises(GrammarError, match="dead after 6"):
        oracle_decoder().generate(PROMPT, params(), grammar=Dies(6), on_tokens=runs.append)
    assert runs == [[10], [11, 12, 13, 14]]


def test_stream_raises_it_after_what_came_before() -> None:
    stream = oracle_decoder().stream(Request(PROMPT, params(), Dies(6)))
    assert [next(stream).token for _ in range(5)] == [10, 11, 12, 13, 14]
    with pytest.raises(GrammarError, match="dead after 6"):
        next(stream)


def test_its_place_goes_to_the_next_request() -> None:
    requests = [Request(PROMPT, params(), Dies(2)) for _ in range(3)] + [Request(PROMPT, params())]
    done, ended, decoder = all_of(requests, 2)
    assert [generation.finish for generation in done] == ["error"] * 3 + ["length"]
    assert len(decoder.cache.lengths) == 2
    assert ended[-1] == 3


@pytest.mark.parametrize("kind", list(Drafting))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_dead_end_behind_the_last_token_ends_its_own_sequence(kind: Drafting, temperature: float) -> None:
    """The prefill emits a, behind which nothing is possible: whatever drafts is not asked."""
    target = tiny_target()
    decode = DecodeConfig(drafters=[kind], draft_tokens=3, max_new_tokens=8, temperature=temperature)
    decoder = Decoder(target, build_drafter(target, tiny_draft(target), decode), 2)
    asked = params(draft_tokens=3, max_new_tokens=8, temperature=temperature)
    prompt = [*range(3, 30), *range(3, 30)]
    done = decoder.generate_all(
        [Request(prompt, asked, Grammars.of(target).regex("aé")), Request(prompt, asked)]
    )
    assert (len(done[0].tokens), done[0].finish) == (1, "error")
    assert len(done[1].tokens) == 8 or done[1].finish == "eos"


def test_dead_end_of_a_real_grammar() -> None:
    """The characters a, b, c are 5, 6, 7; after "ab" comes a letter for which there is no token.

    The prefill emits a. The round drafts b, which must come, and has no row behind it: b is not emitted.
    """
    target = ForcedTarget([1, 0, 5, 6, 7, 7, 7], 8, eos=[2])
    grammars = Grammars(tiny_tokenizer(8), 8, [2])
    done = decoder_of(target, ForcedDrafter(PlainDrafter()), 2).generate_all(
        [
            Request([1, 0], params(max_new_tokens=4), grammars.regex("abé")),
            Request([1, 0], params(max_new_tokens=4), grammars.regex("abc*")),
        ]
    )
    assert (done[0].tokens, done[0].finish) == ([5], "error")
    assert "dead end" in str(done[0].error)
    assert (done[1].tokens, done[1].finish) == ([5, 6, 7, 7], "length")
    assert torch.is_inference_mode_enabled() is False
