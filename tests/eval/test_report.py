"""The report as text: what it says, that it is one file, and that nothing from the data becomes markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from eval.report import report
from tests.eval.samples import draft_run, measurement, pair, plain_run


class Tags(HTMLParser):
    """Every tag with its attributes, and whether tags close in order."""

    VOID = ("meta", "path", "use", "rect", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tags(page: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(page)
    assert parser.open == []
    return parser.seen


def test_figures_with_their_conditions() -> None:
    page = report(measurement())
    assert "1.25×" in page
    assert "1.00× to 1.50×" in page
    for condition in (
        "float32",
        "Some &lt;CPU&gt;",
        "a" * 12 + " with local changes",
        "torch 2.13.0",
        "20 training prompts",
    ):
        assert condition in page
    assert page.count("<svg") == 4


def test_how_tokens_were_drafted_is_said() -> None:
    page = report(measurement())
    assert "4 rounds of a chain of 2" in page
    assert "chain of 2, sampled proposals, by draft<" in page
    assert "rejection verification" in page

    tree = measurement()
    for row in tree["rows"]:
        if row["method"] != "plain":
            row.update(tree="dynamic", tree_nodes=8, tree_width=3, stop_drafting=None)
    assert "rounds of a dynamic tree of 8, 3 wide and up to 2 deep" in report(tree)

    for row in tree["rows"]:
        if row["method"] != "plain":
            row.update(
                tree="static", tree_width=None, tree_file="<x>/tree.json", drafters=["draft", "lookup"]
            )
    assert (
        "static tree of 8, shape from &lt;x&gt;/tree.json, sampled proposals, by draft and lookup"
        in report(tree)
    )


def test_one_file_without_anything_from_outside() -> None:
    seen = tags(report(measurement()))
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in seen}
    references = [
        value for _, attrs in seen for name, value in attrs.items() if name.split(":")[-1] in ("href", "src")
    ]
    assert all(value is not None and value.startswith("#") for value in references)
    assert not re.search(r"url\((?!#)|@import", report(measurement()))


def test_ids_are_unique_across_pictures() -> None:
    ids = [attrs["id"] for _, attrs in tags(report(measurement())) if "id" in attrs]
    assert len(ids) == len(set(ids)) > 0


def test_text_from_data_is_escaped() -> None:
    page = report(measurement())
    assert "<b>code</b>" not in page
    assert "&lt;b&gt;code&lt;/b&gt;" in page


def test_two_temperatures_two_sections() -> None:
    pairs = [
        pair(name, plain_run([1, 2, 3]), draft_run([1, 2, 3], [1]), temperature=t)
        for name in "AB"
        for t in (0.0, 1.0)
    ]
    page = report(measurement(pairs))
    assert "Temperature 0<" in page
    assert "Temperature 1<" in page


def test_no_round_still_makes_a_page() -> None:
    pairs = [pair(name, plain_run([5]), draft_run([5], [])) for name in "AB"]
    assert "–" in report(measurement(pairs))


def test_a_busy_machine_is_said_aloud() -> None:
    made = measurement()
    assert "machine was busy" not in report(made)
    made["load"].update(others_before=0.9, busy=True)
    assert "machine was busy" in report(made)


def test_the_page_does_not_depend_on_the_clock() -> None:
    assert report(measurement()) == report(measurement())
