"""Probes whose answer stands at their beginning: their length, their text, and their place in the rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from configs.errors import ConfigError
from data.template import Template
from eval.recall import EACH, recalls
from eval.rows import rows
from models.target import Target
from tests.eval.samples import CONDITIONS, two_pairs

TEXTS = ["some words of a user", "and others"]


def test_the_answer_stands_first_and_the_question_last(target: Target) -> None:
    """The tiny tokenizer has a token for each character, so lengths are exact."""
    template = Template.of(target)
    made = recalls(template, TEXTS, [120, 200], None, seed=0)
    assert [len(one.prompt.ids) for one in made] == [120] * EACH + [200] * EACH
    assert {one.prompt.category for one in made} == {"recall 120", "recall 200"}
    text = made[0].messages[0]["content"]
    code = text.split("The code of Ada is ")[1][:4]
    assert code.isdigit()
    assert text.endswith("\n\nWhat is the code of Ada?")
    assert text.count(code) == 1
    assert len({one.messages[0]["content"] for one in made}) == 2 * EACH
    assert recalls(template, TEXTS, [120], None, seed=0) == made[:EACH]
    assert recalls(template, TEXTS, [120], None, seed=1) != made[:EACH]


@pytest.mark.parametrize(
    ("length", "texts", "words"),
    [
        (501, TEXTS, "set at most 500"),
        (20, TEXTS, "has no room for a fact and a question: set at least"),
        (120, [], "there are none"),
    ],
)
def test_what_cannot_be_made(target: Target, length: int, texts: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        recalls(Template.of(target), texts, [length], 500, seed=0)


def test_probes_count_in_their_own_rows_alone() -> None:
    a, b = two_pairs()
    probe = replace(b, prompt="P", category="recall 512", probe=True)
    made = {(r["category"], r["context_bucket"]): r["prompts"] for r in rows([a, b, probe], CONDITIONS)}
    assert made["all", "all"] == 2
    assert made["all", "129-512"] == 1
    assert made["recall 512", "all"] == 1
