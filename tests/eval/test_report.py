"""The report as text: what it says, that it is one file, and that nothing from the data becomes markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eval.report import main, report, sweeps
from eval.rows import Pair
from eval.sections import curve_of
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
    assert page.count("<svg") == 3  # too few answers for a distribution


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
    assert "Temperature 0, batch 1<" in page
    assert "Temperature 1, batch 1<" in page


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


# ---- several settings ----


def swept() -> list[Pair]:
    """At temperatures 0 and 1, one by one and in twos."""
    return [
        pair(name, plain_run([1, 2, 3]), draft_run([1, 2, 3], [1]), temperature=t, batch_size=b)
        for name in "AB"
        for t in (0.0, 1.0)
        for b in (1, 2)
    ]


def test_each_setting_has_a_section_and_the_sweeps_come_first() -> None:
    page = report(measurement(swept()))
    sections = re.findall(r'<h2 class="setting" id="([^"]+)">([^<]+)<', page)
    assert sections == [
        ("t0-b1", "Temperature 0, batch 1"),
        ("t0-b2", "Temperature 0, batch 2"),
        ("t1-b1", "Temperature 1, batch 1"),
        ("t1-b2", "Temperature 1, batch 2"),
    ]
    assert page.index("Speedup against batch size") < page.index("Speedup against temperature")
    assert page.index("Speedup against temperature") < page.index('class="setting"')
    assert "batch 1 and 2" in page
    assert 'href="#t1-b2"' in page


def test_one_setting_needs_no_overview() -> None:
    assert "All settings" not in report(measurement())
    assert list(sweeps(measurement()["rows"])) == []


# ---- predictions and replies ----


def prediction(**changes: Any) -> dict[str, Any]:
    """Of `two_pairs`: at position 1 three of four rounds accepted, at position 2 one of three."""
    made = {
        "schema": "leadout.predict/1",
        "times": "measured here",
        "acceptance": {"middle": [0.75, 1 / 3], "source": "measure.json"},
        "rows": [{"batch": 1, "by_length": [1.1, 1.5, 1.4]}, {"batch": 4, "by_length": [0.9, 1.0, 1.0]}],
        "config": {"decode": {"temperature": 0.0}},
    }
    return {**made, **changes}


def test_predicted_against_measured() -> None:
    """Without prefill: 5 + 3 tokens in 8 s plainly, in 3 + 3 s speculatively, so 1.33 times; predicted for
    K = 2 at batch 1: 1.5, which is 12.5 % more. Nothing was measured at batch 4."""
    page = report(measurement(), prediction())
    assert "<td>batch 1, K = 2</td><td>1.50×</td><td>1.33×" in page
    assert "<td>+12.5%</td>" in page
    assert "batch 4" not in page


def test_a_prediction_of_another_measurement_is_not_shown_as_one_of_this() -> None:
    acceptance = {"middle": [0.5, 0.5], "source": "measure.json"}
    page = report(measurement(), prediction(acceptance=acceptance))
    assert "is of another one" in page
    assert "K = 2</td>" not in page


def test_a_prediction_for_other_hardware_or_a_supposed_draft_is_left_out() -> None:
    supposed = {"middle": [0.75, 1 / 3], "source": "predict.acceptance"}
    for other in (prediction(times="h100"), prediction(acceptance=supposed), None):
        assert report(measurement(), other) == report(measurement())


def test_replies_show_who_wrote_each_token() -> None:
    sample = {
        "prompt": "A",
        "category": "maths",
        "temperature": 0.0,
        "pieces": [["2 <", False], [" 3", True], ["\n", False]],
    }
    page = report(measurement(samples=[sample]))
    assert '<div class="tokens"><b>2 &lt;</b><i> 3</i><b>\n</b></div>' in page
    assert "1 of 3 tokens by the draft" in page
    assert "Who wrote what" not in report(measurement())


# ---- what a row may hold besides ----


def test_a_lossy_rule_is_said_aloud() -> None:
    made = measurement()
    assert "Lossy" not in report(made)
    for row in made["rows"]:
        if row["method"] != "plain":
            row.update(lossless=False, verification="typical")
    assert "<b>Lossy.</b> Typical verification does not keep" in report(made)


def test_only_as_much_of_a_distribution_as_values_stand_behind() -> None:
    made = measurement()
    row = next(row for row in made["rows"] if row["method"] != "plain")

    def known() -> int | None:
        curve = curve_of(made, row, "e2e_ms", "", "#000")
        return curve and curve.known

    assert known() is None  # two answers
    row["e2e_ms"] = {"p50": 1.0, "p90": 2.0, "p99": None}
    assert known() == 90
    row["e2e_ms"]["p99"] = 3.0
    assert known() == 99


# ---- files ----


def test_the_command_writes_the_page_and_every_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "measure.json").write_text(json.dumps(measurement()))
    (tmp_path / "predict.json").write_text(json.dumps(prediction()))
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "of-before.png").touch()
    main([str(tmp_path)])
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == report(measurement(), prediction())
    (tmp_path / "pictures" / "of-before.png").unlink()  # nothing that was there is touched
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "pictures").iterdir()}
    assert sorted(drawn) == [
        "acceptance-t0-b1.png",
        "positions-t0-b1.png",
        "predicted.png",
        "speedup-t0-b1.png",
    ]
    # A PNG's first chunk, IHDR, begins with the width.
    assert {(png[:8], int.from_bytes(png[16:20], "big")) for png in drawn.values()} == {
        (b"\x89PNG\r\n\x1a\n", 936)
    }
    assert report(measurement(), prediction()).count("<svg") == len(drawn)


def test_the_command_refuses_what_is_no_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "measure.json").write_text('{"schema": "leadout.measure/0"}')
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path)])
    assert stopped.value.code == 2
    assert "its schema is 'leadout.measure/0' and not 'leadout.measure/1'" in capsys.readouterr().err
