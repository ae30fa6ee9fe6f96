"""What README and docs show is what the kept results give; and what a figure is made of."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from configs.errors import ConfigError
from scripts.figures import FIGURES, ROOT, Figure, bench, demo, files_of, placed, rebuild, take, whole

QUIET = Console(quiet=True)


@pytest.mark.parametrize("figure", [f for f in FIGURES if (ROOT / f.data).exists()], ids=lambda f: f.name)
def test_pages_show_what_the_results_give(figure: Figure) -> None:
    page = ROOT / figure.page
    assert page.read_text(encoding="utf-8") == files_of(figure, ROOT)[page]


def test_every_marked_place_and_every_picture_belongs_to_a_figure() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = {page: page.read_text(encoding="utf-8") for page in pages}
    marked = {(str(page.relative_to(ROOT)), name) for page in pages for name in marks(text[page])}
    assert marked == {(figure.page, figure.name) for figure in FIGURES}
    drawn = {path for figure in FIGURES if (ROOT / figure.data).exists() for path in files_of(figure, ROOT)}
    shown = [
        page.parent / name for page in pages for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text[page])
    ]
    assert [str(path) for path in shown if path not in drawn] == []


def marks(text: str) -> list[str]:
    return re.findall(r"<!-- (\w+): begin -->", text)


def row(method: str, category: str, tokens_per_s: float, **changes: Any) -> dict[str, Any]:
    made = {
        "method": method,
        "category": category,
        "context_bucket": "all",
        "mean_acceptance_length": 2.0,
        "mean_acceptance_length_ci": [1.5, 2.5],
        "tokens_per_s": tokens_per_s,
        "speedup": None if method == "plain" else tokens_per_s / 10,
        "speedup_ci": None if method == "plain" else [1.0, 3.0],
        "samples": "not kept",
    }
    return made | changes


MEASURED = {
    "schema": "leadout.measure/1",
    "details": [1],
    "rows": [
        *(row("plain", name, 10.0) for name in ("all", "code", "maths")),
        row("eagle3", "all", 15.0),
        row("eagle3", "code", 12.0),
        row("eagle3", "maths", 18.0, speedup_ci=None),
        row("eagle3", "all", 99.0, context_bucket="1-32"),
    ],
}


def test_a_measurement_is_cut_down_and_shown_by_category() -> None:
    kept = whole(MEASURED)
    assert len(kept["rows"]) == 6
    assert "details" not in kept
    assert "samples" not in kept["rows"][0]
    assert demo(kept).splitlines() == [
        "| category | τ | tokens/s, plain → speculative | speedup |",
        "|---|---|---|---|",
        "| maths | 2.00 | 10.0 → 18.0 | 1.80× |",
        "| code | 2.00 | 10.0 → 12.0 | 1.20× [1.00, 3.00] |",
        "| **all** | **2.00** [1.50, 2.50] | 10.0 → 15.0 | **1.50×** [1.00, 3.00] |",
    ]


def test_ours_against_the_peers() -> None:
    ways = ("plain", "lookup", "small-4", "chain", "tree", "chain+lookup")
    rows = {name: {"tokens_per_s": 20.0, "against_peer": [1.5, 1.4, 1.6]} for name in ways}
    best = {"small": "small-4", "assisted": "assisted-2", "ratio": [2.0, 1.0, 3.0]}
    table = bench({"rows": rows, "best_assisted": best, "settings": {"draft_layers": 6}})
    assert "| plain | 20.0 | `generate` | 1.50× [1.40, 1.60] |" in table
    assert "best K = 4 | 20.0 | `assistant_model`, best k = 2 | 2.00× [1.00, 3.00] |" in table


# ---- pages ----


def figure() -> Figure:
    return Figure(
        "mine", "page.md", "make mine", "mine.json", "value", lambda result: f"| {result['value']} |"
    )


def test_a_page_is_rewritten_between_its_marks_alone(tmp_path: Path) -> None:
    page, result = tmp_path / "page.md", tmp_path / "result.json"
    page.write_text("before\n<!-- mine: begin -->\nold\n<!-- mine: end -->\nafter\n")
    (tmp_path / "docs").mkdir()
    assert rebuild([figure()], tmp_path, False, QUIET) == 0  # no result yet
    assert "old" in page.read_text()
    result.write_text(json.dumps({"value": 7}))
    take(figure(), result, tmp_path)
    assert rebuild([figure()], tmp_path, True, QUIET) == 3
    assert "old" in page.read_text()
    assert rebuild([figure()], tmp_path, False, QUIET) == 0
    assert page.read_text() == "before\n<!-- mine: begin -->\n| 7 |\n<!-- mine: end -->\nafter\n"
    assert rebuild([figure()], tmp_path, True, QUIET) == 0


@pytest.mark.parametrize("page", ["", "<!-- mine: begin -->\n<!-- mine: begin -->\n<!-- mine: end -->"])
def test_a_page_without_its_place_is_refused(page: str) -> None:
    with pytest.raises(ConfigError, match="no place for mine"):
        placed(page, "mine", "")


@pytest.mark.parametrize("wrong", ["", "[]", "{}", '{"other": 1}', '{"value": '])
def test_what_is_no_result_replaces_none(tmp_path: Path, wrong: str) -> None:
    kept, new = tmp_path / "docs" / "mine.json", tmp_path / "new.json"
    kept.parent.mkdir()
    kept.write_text(json.dumps({"value": 7}))
    new.write_text(wrong)
    with pytest.raises(ConfigError):
        take(figure(), new, tmp_path)
    assert json.loads(kept.read_text()) == {"value": 7}
