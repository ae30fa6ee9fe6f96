"""Language models with a tokenizer other than the target's as drafts (Timor et al. 2025, arXiv 2502.05202).

Two ways, both lossless:

    intersection  token-level (TLI): the draft's law over the tokens that stand for the same bytes in both
                  vocabularies, renormalised. An ordinary draft with a small vocabulary, at any temperature.
    text          string-level (SLEM): the draft writes text, greedily; the target's tokenizer cuts it into a
                  chain, which is proposed deterministically.

Acceptance divides by the law that was drawn from, whatever the draft had read. So where text of the target
has no exact counterpart in the draft's tokens, something near it is read, which can only cost acceptance.

Vocabularies are compared in bytes (`Spelling`), since each kind of tokenizer writes spaces and other bytes in
its own way, and a token may end within a character.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.errors import CheckpointError
from decoding.clock import now
from decoding.drafters import EachAlone, Proposal, Seen, Turn
from decoding.drafters.small import ModelReader
from decoding.growth import Growth, Vocabulary
from decoding.reader import Level, NetworkDrafter, News, Reading
from decoding.tree import TokenTree
from decoding.warp import choices
from models.target import Target

REOPENED = 8  # tokens at the end of a text that may be cut differently once more text follows
BYTE = re.compile("<0x([0-9A-F]{2})>")  # how SentencePiece writes a single byte
SPACE = "\u2581"  # how it writes a space


class Spelling:
    """A tokenizer in bytes: what each id stands for, and which ids stand for given bytes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.table = spellings(tokenizer)
        opening: list[int] = list(tokenizer("").input_ids[:1])
        # What the model expects before any text.
        self.opening = opening if opening == [tokenizer.bos_token_id] else []

    def bytes(self, ids: Iterable[int]) -> bytes:
        """Ids that are no token (a head's padding) stand for nothing."""
        return b"".join(self.table.get(id, b"") for id in ids)

    def opened(self, ids: list[int]) -> list[int]:
        """`ids` with the opening in front, once."""
        return ids if ids[: len(self.opening)] == self.opening else [*self.opening, *ids]

    def unopened(self, ids: list[int]) -> list[int]:
        count = len(self.opening)
        return ids[count:] if ids[:count] == self.opening else ids

    def exactly(self, data: bytes) -> list[int]:
        """Ids that stand for `data`; none if it ends within a character or the tokenizer changes it."""
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return []
        # Many put a space before a text that has none, so one that has it is tried without.
        for written in [text, text[1:]] if text.startswith(" ") else [text]:
            ids = self.tokenizer.encode(written, add_special_tokens=False)
            if self.bytes(ids) == data:
                return ids
        return []

    def nearly(self, data: bytes) -> list[int]:
        """`exactly`, or what the tokenizer makes of what is readable of `data`."""
        text = data.decode(errors="replace")
        return self.exactly(data) or self.tokenizer.encode(text, add_special_tokens=False)

    def open_from(self, ids: Sequence[int]) -> int:
        """Where the last `REOPENED` of `ids` begin, or the word that they begin within if that is near."""
        last = max(len(ids) - REOPENED, 0)
        for start in range(last, max(last - REOPENED, 0), -1):
            if self.table.get(ids[start], b"").startswith(b" "):
                return start
        return last

    def by_bytes(self) -> dict[bytes, int]:
        """One id for each spelling: of several the lowest, single bytes of SentencePiece last."""
        ids = sorted(self.table, key=lambda id: (self.is_byte(id), id))
        return {self.table[id]: id for id in reversed(ids) if self.table[id]}

    def is_byte(self, id: int) -> bool:
        return BYTE.fullmatch(self.tokenizer.convert_ids_to_tokens(id)) is not None


def spellings(tokenizer: Any) -> dict[int, bytes]:
    """What each id stands for. Tokens outside the vocabulary proper (`<|im_end|>`) stand for their names."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    byte_level = "ByteLevel" in repr(decoder)
    alphabet = byte_alphabet()
    added = set(tokenizer.added_tokens_decoder)

    def spelled(token: str, id: int) -> bytes:
        if id in added:
            return token.encode()
        if byte_level:
            return (
                bytes(alphabet[char] for char in token) if alphabet.keys() >= set(token) else token.encode()
            )
        byte = BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()

    return {id: spelled(token, id) for token, id in tokenizer.get_vocab().items()}


def byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: the printable ones of Latin-1 for themselves, then those from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


# Token-level intersection


@dataclass
class Translated(Reading):
    """Rows are the draft's tokens, which need not be as many as the target's."""

    told: int = 0  # target tokens whose rows are committed, the pending one included


class IntersectionReader(ModelReader):
    """Shared tokens are read as their twins; any others as the draft's tokens for the text they stand for."""

    def __init__(self, draft: Target, target: Target, eos_ids: frozenset[int]) -> None:
        self.ours, self.theirs = Spelling(draft.tokenizer), Spelling(target.tokenizer)
        ours = self.ours.by_bytes()
        pairs = sorted((id, ours[text]) for text, id in self.theirs.by_bytes().items() if text in ours)
        if not pairs:
            raise CheckpointError(
                f"The draft {draft.name} and the target {target.name} share no token, so nothing could be "
                "proposed. Use another draft, or let this one draft text."
            )
        self.twins = dict(pairs)  # target id -> draft id
        shared = torch.tensor(pairs, device=draft.device).T
        super().__init__(draft, Vocabulary.of(shared[0], eos_ids))
        self.draft_ids = shared[1]

    def begin(self) -> Translated:
        return Translated(self.cache.allocate())

    def news(self, turn: Turn) -> News:
        reading: Translated = turn.state
        seen = turn.seen
        text = [*seen.tokens, seen.pending]
        if not reading.told:
            reading.told = len(text)
            return News(0, self.ours.opened(self.translate(self.theirs.unopened(text))))
        if reading.told != seen.start + 1:
            raise ValueError(f"the draft was told {reading.told} tokens, the target is at {seen.start}")
        reading.told = seen.position + 1
        kept = self.keep(reading, [self.twins.get(token) for token in seen.tokens[1:]])
        return News(reading.committed + kept, self.translate(text[1 + kept :]))

    def translate(self, tokens: Sequence[int]) -> list[int]:
        """Draft ids, at least one, to be read for target `tokens`.

        Neighbours without twins are translated together: they may be the bytes of one character.
        """
        ids: list[int] = []
        for shared, run in groupby(tokens, self.twins.__contains__):
            if shared:
                ids += [self.twins[token] for token in run]
            else:
                ids += self.ours.nearly(self.theirs.bytes(run))
        return ids or [0]

    def extend(self, levels: Sequence[Level]) -> list[Tensor]:
        return super().extend(
            [replace(level, tokens=[self.twins[t] for t in level.tokens]) for level in levels]
        )

    def logits(self, states: Tensor) -> Tensor:
        return self.draft.lm_head(states)[..., self.draft_ids]


def build(draft: Target, growth: Growth, eos_ids: frozenset[int], target: Target) -> NetworkDrafter:
    """Drafts over the intersection; `CheckpointError` if that is empty."""
    return NetworkDrafter(IntersectionReader(draft, target, eos_ids), growth)


# Text


@dataclass
class Writing:
    """One sequence as the draft has it. `ids` and `held` are the text of `tokens`."""

    slot: int
    tokens: list[int] = field(default_factory=list)  # the target's, the pending one included
    ids: list[int] = field(default_factory=list)  # the draft's
    held: bytes = b""  # the beginning of a character that the text ends within
    rows: list[int] = field(default_factory=list)  # the draft's ids whose rows its cache holds


class TextDrafter(EachAlone):
    """Lets the draft write on, and proposes what the target's tokenizer makes of it."""

    def __init__(self, draft: Target, target: Target, eos_ids: frozenset[int]) -> None:
        self.network = ModelReader(draft, Vocabulary.of(None, eos_ids))
        self.draft = draft
        self.eos_ids = eos_ids
        self.ours, self.theirs = Spelling(draft.tokenizer), Spelling(target.tokenizer)
        self.known = 1 + max(self.ours.table)

    def begin(self) -> Writing:
        return Writing(self.network.cache.allocate())

    def end(self, state: Writing) -> None:
        self.network.cache.release(state.slot)

    def one(self, turn: Turn) -> Proposal:
        writing: Writing = turn.state
        self.tell(writing, turn.seen)
        began = now(self.draft.device)
        # One more than asked for, since the last may be the beginning of a longer token.
        written, ended = self.write(writing, turn.budget + 1)
        seconds = now(self.draft.device) - began
        proposed = self.retell(writing, written)
        chain = self.admitted(turn, proposed if ended else proposed[:-1])
        return Proposal(TokenTree.chain(turn.seen.pending, chain), {}, seconds, len(written) + ended)

    def tell(self, writing: Writing, seen: Seen) -> None:
        """Appends to the draft's text what the target has committed, and cuts the end into tokens anew."""
        if writing.tokens and len(writing.tokens) != seen.start + 1:
            raise ValueError(
                f"the draft was told {len(writing.tokens)} tokens, the target is at {seen.start}"
            )
        new = [*seen.tokens[1 if writing.tokens else 0 :], seen.pending]
        cut = max(self.ours.open_from(writing.ids), len(self.ours.opening))
        fresh = new if writing.tokens else self.theirs.unopened(new)
        data = self.ours.bytes(writing.ids[cut:]) + writing.held + self.theirs.bytes(fresh)
        whole, writing.held = whole_characters(data)
        writing.ids = self.ours.opened([*writing.ids[:cut], *self.ours.nearly(whole)])
        writing.tokens += new

    def write(self, writing: Writing, count: int) -> tuple[list[int], bool]:
        """At most `count` draft ids that follow, each the likeliest, and whether the draft ended the text."""
        ids = writing.ids or [0]
        kept = min(common_prefix(writing.rows, ids), len(ids) - 1)
        self.network.cache.commit(writing.slot, kept)
        written: list[int] = []
        fed = ids[kept:]
        while True:
            writing.rows = [*ids, *written]
            best = choices(self.read(writing, fed)[None, : self.known])(0)
            if best in self.draft.eos_ids:
                return written, True
            written.append(best)
            if len(written) == count:
                return written, False
            fed = [best]

    def read(self, writing: Writing, ids: list[int]) -> Tensor:
        """Logits [Vd] after `ids`, which are the last of `writing.rows`."""
        extent = self.network.cache.aim([writing.slot], len(ids))
        rows = np.arange(extent - len(ids), extent)[None]
        mask = self.network.causal(rows, extent)
        states = self.network.run(self.network.tensor([ids]), self.network.tensor(rows), mask, None)
        return self.draft.lm_head(states[0, -1])

    def retell(self, writing: Writing, written: list[int]) -> list[int]:
        """The target's tokens for the text of the draft's `written`, as they follow upon the pending one."""
        data = self.ours.bytes(written)
        if not data.startswith(writing.held):
            return []
        data = whole_characters(data)[0][len(writing.held) :]
        before = writing.tokens[self.theirs.open_from(writing.tokens) :]
        ids = self.theirs.exactly(self.theirs.bytes(before) + data)
        if ids[: len(before)] == before:
            return ids[len(before) :]
        # The tokenizer would have cut the text before differently, had it known what follows. It stands as it
        # is, so what follows is cut on its own.
        return self.theirs.exactly(data)

    def admitted(self, turn: Turn, ids: Sequence[int]) -> list[int]:
        """As many of `ids` as the budget and the grammar let stand, up to an end of text."""
        path: list[int] = []
        for token in ids[: turn.budget]:
            mask = turn.law.allowed(path)
            if mask is not None and not mask[token]:
                break
            path.append(token)
            if token in self.eos_ids:
                break
        return path


def whole_characters(data: bytes) -> tuple[bytes, bytes]:
    """`data` up to the last whole UTF-8 character, and the beginning of one that it ends within."""
    for size in range(1, min(len(data), 3) + 1):
        first = data[-size]
        if first >= 0b11000000:  # begins a character of 2, 3 or 4 bytes
            wanted = 2 if first < 0b11100000 else 3 if first < 0b11110000 else 4
            return (data[:-size], data[-size:]) if size < wanted else (data, b"")
        if first < 0b10000000:
            break
    return data, b""


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many of their first elements are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def build_text(draft: Target, eos_ids: frozenset[int], target: Target) -> TextDrafter:
    return TextDrafter(draft, target, eos_ids)
