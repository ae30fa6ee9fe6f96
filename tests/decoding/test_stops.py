"""Stop strings over token borders, in tokens, and around unfinished characters."""

from __future__ import annotations

from typing import Any

import pytest

from decoding.stops import StopScan


class Pieces:
    """A tokenizer of byte strings; like SentencePiece's, it strips a space at the beginning of what it
    decodes."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def decode(self, tokens: list[int], **options: Any) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode(errors="replace").removeprefix(" ")


def first_stop(pieces: list[bytes], *stops: str) -> int | None:
    """Index of the piece that completes a stop string."""
    scan = StopScan(Pieces(*pieces), stops)
    return next((i for i in range(len(pieces)) if scan.completes(i)), None)


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        ([b"a", b"b", b"c"], ["b"], 1),
        ([b"a", b"b", b"c", b"d"], ["bcd"], 3),  # over three tokens
        ([b"xxSTOPyy", b"z"], ["STOP"], 0),  # inside one
        ([b"xST", b"OPy"], ["STOP"], 1),
        ([b"a", b"b", b"c"], ["q", "c", "bc"], 2),
        ([b"a", b"b"], ["ba"], None),
        ([b"aab", b"aab", b"c"], ["aabc"], 2),
        ([b"Hi", b" there", b" you"], ["there you"], 2),  # the space before a word is kept
        ([b"Hi", b" there"], ["Hithere"], None),
        ([b"a", b"\xe2\x82", b"\xac", b"b"], ["\u20acb"], 3),  # the euro sign in two tokens
        ([b"\xe2\x82", b"\xac"], ["\u20ac"], 1),
        ([b"stop\xe2", b"\x82\xac"], ["stop"], 0),  # complete, though a character has begun
        ([b"a", b"", b"b"], ["ab"], 2),  # a token without text
    ],
)
def test_first_token_that_completes_one(pieces: list[bytes], stops: list[str], expected: int | None) -> None:
    assert first_stop(pieces, *stops) == expected


def test_decodes_a_few_tokens_at_a_time() -> None:
    scan = StopScan(Pieces(*[b"ab"] * 1000), ["abc"])
    assert not any(scan.completes(i) for i in range(1000))
    assert len(scan.window) == 1
    assert scan.tail == "ab"
