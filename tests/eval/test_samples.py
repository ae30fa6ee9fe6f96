"""Who wrote which token, and where the text of a token begins."""

from __future__ import annotations

from eval.rows import Round, Run
from eval.samples import authors, pieces, samples
from tests.conftest import tiny_tokenizer
from tests.eval.samples import draft_run, pair, plain_run, two_pairs


def test_authors() -> None:
    # The prefill's token; a round of two drafted ones and the target's; one that accepted none.
    assert authors(draft_run([1, 2, 3, 4, 5], accepted=[2, 0])) == [False, True, True, False, False]


def test_a_round_cut_on_a_drafted_token_ends_with_the_draft() -> None:
    cut = Round(2, 1, 1, 2, 1, 1.0, 0.4, 1.5)  # accepted 1 and emitted 1: it was the last that fitted
    assert authors(Run([1, 2], "length", 2.5, 1.0, [1.0, 2.5], [cut])) == [False, True]


def test_pieces_join_to_the_text() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("ride on")
    found = pieces(draft_run(ids, accepted=[2, 2]), lambda some: str(tokenizer.decode(some)))
    assert "".join(text for text, _ in found) == tokenizer.decode(ids) == "ride on"
    assert found[:4] == [("r", False), ("i", True), ("d", True), ("e", False)]


def test_a_character_of_several_tokens_belongs_to_the_last() -> None:
    spelt = "é!".encode()  # tokens are bytes: two for é

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    assert pieces(draft_run(list(spelt), accepted=[1]), decode) == [("", False), ("é", True), ("!", False)]


def test_one_reply_for_each_category_and_not_the_luckiest() -> None:
    runs = [draft_run([1, 2, 3, 4], [2]), draft_run([1, 2, 3], [1]), draft_run([1, 2], [0])]
    pairs = [pair(name, plain_run(run.tokens), run) for name, run in zip("ABC", runs, strict=True)]
    warm = pair("D", plain_run([1, 2, 3]), draft_run([1, 2, 3], [1]), temperature=1.0)
    found = samples([*pairs, warm], str, 6)
    assert [(one["prompt"], one["category"], one["temperature"]) for one in found] == [("B", "maths", 0.0)]
    assert len(samples(two_pairs(), str, 6)) == 2
    assert len(samples(two_pairs(), str, 1)) == 1
    assert samples(two_pairs(), str, 0) == []


def test_no_reply_without_a_round() -> None:
    assert samples([pair("A", plain_run([1]), draft_run([1], []))], str, 6) == []
