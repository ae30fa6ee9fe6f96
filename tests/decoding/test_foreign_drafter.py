"""Drafts with another tokenizer: how ids are spelled and translated, and whose law comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from configs.errors import CheckpointError
from configs.schema import Proposal as Mode
from decoding.decoder import Decoder, Params
from decoding.drafters import Seen, Turn, foreign
from decoding.drafters.foreign import (
    IntersectionReader,
    Spelling,
    TextDrafter,
    byte_alphabet,
    whole_characters,
)
from decoding.drafters.plain import PlainDrafter
from decoding.growth import ChainGrowth, Growth, StaticGrowth
from decoding.law import Law
from decoding.randomness import Seeded
from decoding.reader import Level, News
from decoding.shapes import TreeShape
from decoding.warp import Warp
from models.target import Target
from tests.conftest import tiny_model, tiny_target
from tests.decoding.replay import decoded_law, plain_law, total_variation
from tests.decoding.tables import ForcedTarget

NONE = torch.zeros(0, 0)
NO_EOS: frozenset[int] = frozenset()


def characters(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token per character; `<unk>` must be among `words`."""
    tokenizer: Any = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def byte_level(merges: Sequence[str]) -> PreTrainedTokenizerFast:
    """GPT-2's kind: byte b is id b; each merge, as `t h`, adds an id from 256 on."""
    vocab = {char: byte for char, byte in byte_alphabet().items()}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocab |= {a + b: 256 + i for i, (a, b) in enumerate(pairs)}
    tokenizer: Any = Tokenizer(BPE(vocab, pairs))  # pyright: ignore[reportArgumentType]
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentence_piece() -> PreTrainedTokenizerFast:
    """Llama's kind: a space before any text, single bytes for what it does not know, `<s>` in front.

    <unk> 0, <s> 1, byte b is id 2 + b, then these from 258 on.
    """
    words = ["\u2581", "h", "i", "\u2581h", "\u2581hi"]
    vocab = {"<unk>": 0, "<s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    vocab |= {word: 258 + i for i, word in enumerate(words)}
    model: Any = BPE(vocab, [("\u2581", "h"), ("\u2581h", "i")], byte_fallback=True, unk_token="<unk>")
    tokenizer: Any = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")
    made.add_bos_token = True
    return made


def model_of(tokenizer: PreTrainedTokenizerFast, seed: int, dtype: torch.dtype = torch.float32) -> Target:
    made = tiny_model(len(tokenizer), 8, 1, 2, 1, seed, dtype, eos_token_id=None)
    return Target.wrap(made, tokenizer, name=f"model {seed}")


def turn(state: Any, start: int, tokens: list[int], pending: int, budget: int = 3) -> Turn:
    return Turn(state, Seen(start, tokens, pending, NONE), budget, Law(Warp()), Seeded(0))


def after(model: Target, tokens: Sequence[int]) -> Tensor:
    logits = model.forward(torch.tensor([list(tokens)])).logits
    assert logits is not None
    return logits[0, -1]


def params(temperature: float, length: int, draft_tokens: int = 2) -> Params:
    return Params(draft_tokens, length, temperature, top_k=0, top_p=1.0, stop=(), seed=0)


# Spelling


def test_tokens_of_each_kind_stand_for_bytes() -> None:
    gpt, llama = Spelling(byte_level(["t h", "th e", "\u0120 the"])), Spelling(sentence_piece())
    assert [gpt.table[id] for id in (10, 256, 257, 258)] == [b"\n", b"th", b"the", b" the"]
    assert [llama.table[id] for id in (12, 258, 262)] == [b"\n", b" ", b" hi"]
    assert llama.by_bytes()[b" "] == 258  # not the single byte 0x20, id 34
    assert llama.by_bytes()[b"\n"] == 12


def test_text_is_spelled_exactly_or_not_at_all() -> None:
    gpt, llama = Spelling(byte_level(["t h"])), Spelling(sentence_piece())
    assert gpt.exactly(b"that") == [256, ord("a"), ord("t")]
    assert gpt.exactly("é".encode()) == [0xC3, 0xA9]
    assert gpt.exactly("é".encode()[:1]) == []
    assert llama.exactly(b" hi") == [262]
    assert llama.exactly(b"hi") == []  # it would become " hi"
    assert llama.nearly(b"hi") == [262]


def test_openings_come_once() -> None:
    llama = Spelling(sentence_piece())
    llama.opening = [1]
    assert llama.opened([262]) == llama.opened([1, 262]) == [1, 262]
    assert llama.unopened([1, 262]) == llama.unopened([262]) == [262]


@pytest.mark.parametrize(
    ("data", "whole"),
    [
        ("aé".encode(), 3),
        ("aé".encode()[:2], 1),
        ("a\u20ac".encode()[:3], 1),
        ("😀".encode()[:3], 0),
        (b"", 0),
    ],
)
def test_text_is_cut_at_whole_characters(data: bytes, whole: int) -> None:
    assert whole_characters(data) == (data[:whole], data[whole:])


# Intersection

THEIRS = ["<unk>", "a", "b", "c", "e"]
OURS = ["c", "<unk>", "d", "b", "a"]
TWINS = {0: 1, 1: 4, 2: 3, 3: 0}


@torch.inference_mode()
def test_ids_are_translated_both_ways() -> None:
    target, draft = model_of(characters(THEIRS), 0), model_of(characters(OURS), 1)
    reader = IntersectionReader(draft, target, NO_EOS)
    assert reader.twins == TWINS
    assert reader.vocabulary.ids is not None
    assert reader.vocabulary.ids.tolist() == [0, 1, 2, 3]
    state = reader.begin()
    logits = reader.read([turn(state, 0, [1, 2], 3)])  # a b c
    assert logits[0].tolist() == pytest.approx(after(draft, [4, 3, 0])[[1, 4, 3, 0]].tolist(), abs=1e-5)
    [tree] = reader.extend([Level(state, [2, 3], [-1, -1])])
    for row, path in zip(tree, [[3], [0]], strict=True):
        assert row.tolist() == pytest.approx(after(draft, [4, 3, 0, *path])[[1, 4, 3, 0]].tolist(), abs=1e-5)
    logits = reader.read([turn(state, 2, [3, 3], 1)])  # the second node stays, which the draft has as 0
    expected = after(draft, [4, 3, 0, 0, 4])[[1, 4, 3, 0]]
    assert logits[0].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert reader.cache.lengths[state.slot] == state.committed == 5
    assert reader.news(turn(state, 4, [1], 2)) == News(5, [3])


@torch.inference_mode()
def test_rows_of_the_draft_need_not_be_the_targets() -> None:
    """The target's `the` is three tokens of the draft, and two halves of a character are two of its bytes."""
    target, draft = model_of(byte_level(["t h", "th e"]), 0), model_of(byte_level([]), 1)
    drafter = foreign.build(draft, ChainGrowth(Mode.greedy), NO_EOS, target)
    state = drafter.begin()
    [first] = drafter.propose([turn(state, 0, [97, 257], 98)])  # a the b
    assert (state.told, state.committed) == (3, 5)
    x, y, _ = first.tree.tokens[1:]
    drafter.propose([turn(state, 2, [98, x], 257, budget=1)])  # x stays
    assert (state.told, state.committed) == (5, 9)
    drafter.propose([turn(state, 4, [257], y, budget=1)])
    assert state.committed == 10
    other = foreign.build(draft, ChainGrowth(Mode.greedy), NO_EOS, draft)
    anew = other.begin()
    other.propose([turn(anew, 0, [97, *b"the", 98, x, *b"the"], y, budget=1)])
    mine, theirs = (one.reader.cache.keys for one in (drafter, other))
    assert mine is not None
    assert theirs is not None
    torch.testing.assert_close(mine[:, 0, :, :10], theirs[:, 0, :, :10], atol=1e-5, rtol=0)


def test_nothing_in_common_is_refused() -> None:
    a, b = (model_of(characters([word]), 0) for word in ("<unk>", "<unk>"))
    b.tokenizer = byte_level([])
    reader = IntersectionReader(a, a, NO_EOS)
    assert reader.twins == {0: 0}
    with pytest.raises(CheckpointError, match="share no token"):
        IntersectionReader(a, b, NO_EOS)


@pytest.mark.parametrize(
    "growth",
    [ChainGrowth(Mode.sampled), StaticGrowth(TreeShape(((0,), (1,))), Mode.sampled)],
)
def test_law_over_the_intersection_is_the_targets(growth: Growth) -> None:
    """Of the target's <unk>, a, b (the end) the draft has a and b, at other ids."""
    target = model_of(characters(["<unk>", "a", "b"]), 0, torch.float64)
    draft = model_of(characters(["b", "d", "a"]), 1, torch.float64)
    target.eos_ids = frozenset({2})
    drafter = foreign.build(draft, growth, target.eos_ids, target)
    asked = params(0.8, 4)
    law = decoded_law(target, drafter, [0, 1], asked)
    expected = plain_law(lambda prefix: after(target, prefix), [0, 1], asked, target.eos_ids)
    assert total_variation(law, expected) < 1e-12


# Text


def writer(text: str, target: PreTrainedTokenizerFast, merges: Sequence[str] = ()) -> TextDrafter:
    """A draft sure of `text`, in byte-level tokens, after any of its beginnings."""
    tokenizer = byte_level(merges)
    draft: Any = ForcedTarget(tokenizer.encode(text), len(tokenizer))
    draft.tokenizer = tokenizer
    made = model_of(target, 0)
    return TextDrafter(draft, made, NO_EOS)


def test_text_is_cut_by_the_targets_tokenizer() -> None:
    """The draft writes bytes, budget + 1 of them; the target's tokens are `the` (257) and ` the` (258)."""
    drafter = writer("see the thesis", byte_level(["t h", "th e", "\u0120 the"]))
    state = drafter.begin()
    first = drafter.one(turn(state, 0, list(b"se"), ord("e"), budget=6))
    assert first.tree.tokens == [ord("e"), 258, ord(" ")]  # " the th", without the th (256) at its end
    assert (first.draws, first.forwards) == ({}, 7)
    second = drafter.one(turn(state, 2, [ord("e"), 258], ord(" "), budget=4))
    assert second.tree.tokens == [ord(" "), 257, ord("s")]  # "thesi", the space before it standing alone
    assert state.rows == list(b"see the thes")
    with pytest.raises(ValueError, match="told 5 tokens, the target is at 5"):
        drafter.one(turn(state, 5, [0], 0))


def test_the_drafts_own_tokens_are_those_of_the_whole_text() -> None:
    """The target speaks in bytes; the draft's cache holds `the` as one token once its last letter is told."""
    drafter = writer("a the b", byte_level([]), ["t h", "th e"])
    state = drafter.begin()
    drafter.one(turn(state, 0, list(b"a t"), ord("h"), budget=1))
    assert state.ids == [ord("a"), ord(" "), 256]
    drafter.one(turn(state, 3, [ord("h")], ord("e"), budget=1))
    assert state.ids == [ord("a"), ord(" "), 257]
    assert cached(drafter, state) == state.rows == [ord("a"), ord(" "), 257, ord(" ")]


def test_what_the_cache_holds_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = writer("abcdefg", byte_level([]))
    fed: list[list[int]] = []
    read = drafter.read
    monkeypatch.setattr(drafter, "read", lambda state, ids: (fed.append(ids), read(state, ids))[1])
    state = drafter.begin()
    drafter.one(turn(state, 0, list(b"a"), ord("b"), budget=2))
    drafter.one(turn(state, 1, list(b"bc"), ord("x"), budget=1))  # c was right
    assert fed == [[*b"ab"], [*b"c"], [*b"d"], [*b"x"], [*b"e"]]
    drafter.one(turn(state, 3, list(b"xy"), ord("z"), budget=1))  # e was wrong
    assert fed[5:] == [[*b"yz"], [*b"g"]]
    assert cached(drafter, state) == [*b"abcxyzg"]


def cached(drafter: TextDrafter, state: Any) -> list[int]:
    """The ids that stand in the rows of the draft's cache."""
    keys = drafter.network.cache.keys
    assert keys is not None
    return keys[0, state.slot, 0, : drafter.network.cache.lengths[state.slot], 0].int().tolist()


def test_text_that_ends_within_a_character() -> None:
    """The target has written the first byte of é. The draft, which reads up to it, writes both, and the
    second is proposed."""
    drafter = writer("aé b", byte_level([]))
    state = drafter.begin()
    proposal = drafter.one(turn(state, 0, [ord("a")], 0xC3, budget=3))
    assert (state.ids, state.held) == ([ord("a")], b"\xc3")
    assert proposal.tree.tokens == [0xC3, 0xA9, ord(" ")]


def test_an_end_of_the_draft_makes_all_certain() -> None:
    drafter = writer("ab.", byte_level([]))
    drafter.draft.eos_ids = frozenset({ord(".")})
    assert drafter.one(turn(drafter.begin(), 0, [], ord("a"))).tree.tokens == [ord("a"), ord("b")]


@pytest.mark.parametrize("merges", [[], ["t h", "e e", "\u0120 a"]])
def test_greedy_output_equals_plain(merges: list[str]) -> None:
    target = tiny_target(seed=2)
    draft = model_of(byte_level(merges), 3)
    prompt = target.tokenizer.encode("see the tree at a")
    plain = Decoder(target, PlainDrafter()).generate(prompt, params(0.0, 24, 3))
    for drafter in (
        foreign.build_text(draft, target.eos_ids, target),
        foreign.build_text(target, target.eos_ids, target),
        foreign.build(draft, ChainGrowth(Mode.sampled), target.eos_ids, target),
    ):
        made = Decoder(target, drafter).generate(prompt, params(0.0, 24, 3))
        assert made.tokens == plain.tokens


def test_law_with_text_is_the_targets() -> None:
    target = model_of(characters(["<unk>", "a", "b"]), 0, torch.float64)
    draft = model_of(characters(["b", "<unk>", "a", "c"]), 1, torch.float64)
    drafter = foreign.build_text(draft, target.eos_ids, target)
    asked = params(0.8, 4)
    law = decoded_law(target, drafter, [2, 1], asked)
    expected = plain_law(lambda prefix: after(target, prefix), [2, 1], asked, target.eos_ids)
    assert total_variation(law, expected) < 1e-12
