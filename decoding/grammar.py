"""Output that must follow a JSON schema, a regular expression or a Lark grammar, by way of llguidance.

`Grammars` compiles for one target's vocabulary; a `Matcher` is one request's place in its grammar and is what
`Law` asks (decoding/law.py). Decoding follows the locally masked law, p(x) m(x) / Z at every token, with or
without a draft: lossless means that this law is kept. It is not the target's law given that the whole output
is valid, and llguidance allows only the usual tokens where it knows the text that comes.

There is one state, at the committed text, and it only ever moves on. A question about a path of drafted
tokens moves a copy along it, which takes microseconds: llguidance (1.9.1) can go back as well, but may then
give rows of the path that it left. Whatever cannot be answered is an error: no row is ever "everything is
allowed".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llguidance
import llguidance.hf
import llguidance.numpy
import numpy as np
import torch
from torch import Tensor

from configs.errors import ConfigError, TargetError, TrafficError
from models.target import Target

# `lenient` would ignore what it does not know and `coerce_one_of` would let two branches hold: both accept
# what the schema does not.
STRICT: dict[str, Any] = {"lenient": False, "coerce_one_of": False}


class GrammarError(TrafficError):
    """A grammar that cannot be compiled, or that cannot be followed any further."""


class Grammars:
    """Compiles grammars for one vocabulary. Making it reads the whole tokenizer (about a second): keep it."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Iterable[int]) -> None:
        """vocab_size: rows of the target's head; those that the tokenizer does not know are never allowed.

        eos_ids: what may end the output, once the grammar lets it end. tokenizer: a fast Hugging Face one.
        Raises `TargetError` for one that cannot be read, `ConfigError` if nothing ends a text.
        """
        ends = frozenset(eos_ids)
        if not ends:
            raise ConfigError(
                "A grammar's output ends by an end token, and the target has none: set eos_token_id."
            )
        self.lexicon = Lexicon.read(tokenizer, vocab_size, ends)

    @classmethod
    def of(cls, target: Target) -> Grammars:
        return cls(target.tokenizer, target.vocab_size, target.eos_ids)

    def json_schema(self, schema: Mapping[str, Any] | str, compact: bool = True) -> Matcher:
        """A JSON schema, parsed or as text.

        compact: no whitespace between tokens of JSON. Without it a model may write spaces for ever, which the
        schema allows.
        """
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(parsed, Mapping):
                raise ValueError(f"it is {json.dumps(parsed)}, and must be a JSON object")
            options: Any = {**STRICT, "whitespace_flexible": not compact}
            text = llguidance.LLMatcher.grammar_from_json_schema(dict(parsed), overrides=options)
        except (ValueError, TypeError) as error:
            raise GrammarError(
                f"A JSON schema cannot be read: {error}. Send a schema as a JSON object."
            ) from None
        return self.compiled(text, "JSON schema")

    def regex(self, pattern: str) -> Matcher:
        """A regular expression that the whole output matches; Rust's syntax, without look-around."""
        return self.compiled(llguidance.LLMatcher.grammar_from_regex(pattern), "regular expression")

    def lark(self, grammar: str) -> Matcher:
        """A context-free grammar in llguidance's variant of Lark's syntax."""
        return self.compiled(llguidance.LLMatcher.grammar_from_lark(grammar), "Lark grammar")

    def compiled(self, text: str, kind: str) -> Matcher:
        """A fresh matcher, whose first row is known to exist. Raises `GrammarError`."""
        limits = llguidance.LLParserLimits(verbose_errors=False)
        start = llguidance.LLMatcher(self.lexicon.words, text, log_level=0, limits=limits)
        if start.is_error():
            raise GrammarError(
                f"A {kind} cannot be enforced: {reason(start)}. Leave that out, or decode without it."
            )
        matcher = Matcher(start, self.lexicon)
        matcher.mask(())
        return matcher


class Matcher:
    """One request's place in its grammar, a `Grammar` (decoding/law.py). Decoding one text uses it up."""

    def __init__(self, start: llguidance.LLMatcher, lexicon: Lexicon) -> None:
        self.matcher = start  # stands after the committed text without its end tokens
        self.lexicon = lexicon
        self.ended = False  # an end token has been committed
        self.rows: dict[tuple[int, ...], Tensor] = {}  # of this round, by path

    def mask(self, path: Sequence[int]) -> Tensor:
        """bool [V], on the CPU: what may follow `path`. After the end only the end tokens.

        Raises `ValueError` for a path that breaks the grammar, `GrammarError` where nothing can follow.
        """
        path = tuple(path)
        if path not in self.rows:
            self.rows[path] = self.row(path)
        return self.rows[path]

    def forced(self, path: Sequence[int], limit: int) -> list[int]:
        """The run, of at most `limit` ids, in which each is the only one allowed; up to an end token."""
        run: list[int] = []
        while len(run) < limit and not self.is_over((*path, *run)):
            allowed = np.flatnonzero(self.mask((*path, *run)).numpy())
            if len(allowed) > 1:
                break
            run.append(int(allowed[0]))
        return run

    def likely(self, path: Sequence[int], limit: int) -> list[int]:
        """The usual tokens of the text that must come, at most `limit`.

        The last one is a guess: it may have merged with what comes after.
        """
        matcher, ended = self.after(path)
        if ended:
            return []
        ids = matcher.compute_ff_tokens()
        if not ids:
            ids = self.lexicon.words.tokenize_bytes(matcher.compute_ff_bytes())
        return ids[: matcher.validate_tokens(ids[:limit])]

    def commit(self, tokens: Sequence[int]) -> None:
        """Moves on. Raises `ValueError` if `tokens` break the grammar; then nothing has moved."""
        self.matcher, self.ended = self.after(tokens)
        self.rows.clear()

    def row(self, path: tuple[int, ...]) -> Tensor:
        """Computes what `mask` keeps."""
        matcher, ended = self.after(path)
        if ended:
            return self.lexicon.only_ends
        if matcher.is_stopped():
            allowed = np.zeros(self.lexicon.size, dtype=bool)
        else:
            allowed = self.lexicon.unpacked(matcher)
        if matcher.is_error() and not reason(matcher).startswith("NoExtension"):
            raise GrammarError(f"The grammar cannot be followed: {reason(matcher)}. Simplify it.")
        # llguidance offers the end tokens at a dead end too, and in every row of a matcher that failed.
        allowed[list(self.lexicon.ends)] = matcher.is_accepting()
        if not allowed.any():
            raise GrammarError(
                "The grammar has come to a dead end: it requires text for which the target's vocabulary has "
                "no token. Leave those characters out of it."
            )
        return torch.from_numpy(allowed)

    def is_over(self, path: Sequence[int]) -> bool:
        return self.ended or any(token in self.lexicon.ends for token in path)

    def after(self, path: Sequence[int]) -> tuple[llguidance.LLMatcher, bool]:
        """A copy of the matcher, moved along `path`, and whether the text is over then.

        End tokens are kept from the matcher, so that nothing is ever consumed after the end.
        """
        ends = self.lexicon.ends
        length = next((i for i, token in enumerate(path) if token in ends), len(path))
        body, after = list(path[:length]), path[length:]
        if (self.ended and body) or not ends.issuperset(after):
            raise ValueError(f"tokens {list(path)} go on after the end of the text")
        strange = [token for token in body if not self.lexicon.has(token)]
        if strange:  # llguidance fails for good at an id that it does not know
            raise ValueError(
                f"token {strange[0]} of {list(path)} breaks the grammar: the tokenizer has no such id"
            )
        matcher = self.matcher.deep_copy()
        count = matcher.try_consume_tokens(body)
        if count == length and (self.ended or not after or matcher.is_accepting()):
            return matcher, self.is_over(path)
        if matcher.is_error():
            raise GrammarError(f"The grammar cannot be followed: {reason(matcher)}. Simplify it.")
        raise ValueError(f"token {path[count]} at {count} of {list(path)} breaks the grammar")


@dataclass(frozen=True)
class Lexicon:
    """A vocabulary as llguidance reads it."""

    words: llguidance.LLTokenizer
    size: int  # V, rows of the target's head
    known: np.ndarray  # bool [V]: ids that the tokenizer has
    ends: frozenset[int]
    only_ends: Tensor  # bool [V]

    @classmethod
    def read(cls, tokenizer: Any, size: int, ends: frozenset[int]) -> Lexicon:
        ids = sorted(tokenizer.get_vocab().values())
        stray = [id for id in {*ids, *ends} if not 0 <= id < size]
        if stray:
            raise TargetError(
                f"The tokenizer or its end tokens have ids up to {max(stray)}, and the target's head has "
                f"{size} rows. Use the tokenizer that was published with the model."
            )
        known, only_ends = np.zeros(size, dtype=bool), torch.zeros(size, dtype=torch.bool)
        known[ids] = True
        only_ends[sorted(ends)] = True
        return cls(words_of(tokenizer, size, sorted(ends)), size, known, ends, only_ends)

    def has(self, token: int) -> bool:
        return 0 <= token < self.size and bool(self.known[token])

    def unpacked(self, matcher: llguidance.LLMatcher) -> np.ndarray:
        """bool [V]: what `matcher` allows next, of what the tokenizer has."""
        bits = llguidance.numpy.allocate_token_bitmask(1, self.words.vocab_size)
        llguidance.numpy.fill_next_token_bitmask(matcher, bits)
        allowed = np.unpackbits(bits.view(np.uint8)[0], count=self.words.vocab_size, bitorder="little")
        row = np.zeros(self.size, dtype=bool)
        row[: len(allowed)] = allowed
        return row & self.known


def words_of(tokenizer: Any, size: int, ends: list[int]) -> llguidance.LLTokenizer:
    """llguidance's view of a tokenizer: the bytes of every token.

    Byte-level and SentencePiece tokenizers it reads itself. One that writes its tokens one after the other,
    such as a toy of the tests, is spelled out for it.
    """
    try:
        return llguidance.hf.from_tokenizer(tokenizer, n_vocab=size, eos_token=ends)
    except ValueError as error:
        if not concatenates(tokenizer):
            raise TargetError(
                f"llguidance cannot read the target's tokenizer: {error}. Grammars need a fast tokenizer "
                "of a kind that it knows (byte-level BPE, SentencePiece); decode without a grammar."
            ) from error
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Spelled(tokenizer, ends)), eos_token=ends)


def concatenates(tokenizer: Any) -> bool:
    """Whether decoding does nothing but to write tokens one after the other."""
    ids = sorted(tokenizer.get_vocab().values())
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text == "".join(tokenizer.convert_ids_to_tokens(ids))


class Spelled:
    """What `TokenizerWrapper` wants, of a tokenizer that concatenates. An id it lacks has no bytes."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, ends: list[int]) -> None:
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.tokens = [b""] * (max(vocabulary.values()) + 1)
        for word, id in vocabulary.items():
            self.tokens[id] = word.encode()
        self.eos_token_id = ends[0]
        self.special_token_ids = sorted({*ends, *tokenizer.all_special_ids})
        special = set(self.special_token_ids)
        self.ids = {word: id for id, word in enumerate(self.tokens) if word and id not in special}
        self.longest = max(map(len, self.ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """The longest token first, up to where no token fits."""
        ids: list[int] = []
        at = 0
        while at < len(text):
            lengths = range(min(self.longest, len(text) - at), 0, -1)
            word = next((text[at : at + n] for n in lengths if text[at : at + n] in self.ids), None)
            if word is None:
                break
            ids.append(self.ids[word])
            at += len(word)
        return ids


def reason(matcher: llguidance.LLMatcher) -> str:
    """What llguidance says of its error, on one line."""
    return " ".join(matcher.get_error().split("<")[0].split())[:300]
