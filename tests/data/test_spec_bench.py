"""Spec-Bench's question.jsonl: read as it is, and reported in its six categories."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from configs.schema import Source
from data.traffic import category_of, conversation, read

# The ends of each kind's question numbers.
KINDS = {
    "writing": (81, 90),
    "roleplay": (91, 100),
    "reasoning": (101, 110),
    "math": (111, 120),
    "coding": (121, 130),
    "extraction": (131, 140),
    "stem": (141, 150),
    "humanities": (151, 160),
    "translation": (161, 240),
    "summarization": (241, 320),
    "qa": (321, 400),
    "math_reasoning": (401, 480),
    "rag": (481, 560),
}


def test_six_categories(tmp_path: Path) -> None:
    rows = [
        {
            "question_id": number,
            "category": kind,
            "turns": [f"{kind} {number}", "And now?"] if number <= 160 else [f"{kind} {number}"],
            "reference": ["r"],
        }
        for kind, ends in KINDS.items()
        for number in ends
    ]
    file = tmp_path / "question.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [*read(Source(path=str(file)), 0.0, Console(file=io.StringIO()))[1]]
    assert Counter(one.category for one in found) == {
        "mt_bench": 16,
        "translation": 2,
        "summarization": 2,
        "qa": 2,
        "math_reasoning": 2,
        "rag": 2,
    }
    assert found[0].turns == ["writing 81", "And now?"]
    assert found[0].messages == [{"role": "user", "content": "writing 81"}]
    assert found[-1].turns == ["rag 560"]


@pytest.mark.parametrize(
    "row",
    [
        {"category": "math", "turns": ["1 + 1"]},  # somebody's own
        {"category": "math", "turns": ["1 + 1"], "question_id": "81"},  # SPEED-Bench's ids are no numbers
        {"category": "math", "turns": ["1 + 1"], "question_id": 17},
        {"category": "math", "messages": [{"role": "user", "content": "1 + 1"}], "question_id": 81},
    ],
)
def test_other_traffic_keeps_its_categories(row: dict) -> None:
    assert category_of(row) == "math"
    assert conversation(row).category == "math"
