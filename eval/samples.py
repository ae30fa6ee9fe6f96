"""Replies as pieces of text with their authors, for the reports' view of who wrote what.

A round emits the drafted tokens that were accepted and then one of the target's own, unless it was cut on a
drafted one (`decoding.sequence.Round`); the prefill's token before all rounds is the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eval.rows import Pair, Run

Piece = tuple[str, bool]  # a token's text, and whether the draft wrote it


def samples(pairs: Sequence[Pair], decode: Callable[[list[int]], str], count: int) -> list[dict[str, Any]]:
    """The `samples` of a measurement: speculative replies at the lowest temperature, one for each of `count`
    categories at most, namely the one in the middle by tokens a round. decode: token ids to text."""
    coldest = min(pair.temperature for pair in pairs)
    by_category: dict[str, list[Pair]] = {}
    for pair in pairs:
        if pair.temperature == coldest and pair.draft.rounds:
            by_category.setdefault(pair.category, []).append(pair)
    made = []
    for category, members in sorted(by_category.items())[:count]:
        members.sort(key=lambda pair: len(pair.draft.tokens) / len(pair.draft.rounds))
        middle = members[(len(members) - 1) // 2]
        made.append(
            {
                "prompt": middle.prompt,
                "category": category,
                "temperature": coldest,
                "pieces": [list(piece) for piece in pieces(middle.draft, decode)],
            }
        )
    return made


def pieces(run: Run, decode: Callable[[list[int]], str]) -> list[Piece]:
    """Every token of a reply as text. A character that several tokens spell belongs to the last of them."""
    found: list[Piece] = []
    said = ""
    for i, from_draft in enumerate(authors(run), 1):
        text = decode(run.tokens[:i])
        whole = "" if text.endswith("\ufffd") and i < len(run.tokens) else text[len(said) :]
        found.append((whole, from_draft))
        said += whole
    return found


def authors(run: Run) -> list[bool]:
    """For every token of a reply, whether the draft wrote it."""
    written = [False]
    for round in run.rounds:
        written += [True] * round.accepted + [False] * (round.emitted - round.accepted)
    return written
