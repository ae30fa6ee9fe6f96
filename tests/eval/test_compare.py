"""Measurements side by side: conditions first, paired figures worked out by hand, and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from configs.errors import MeasurementError
from eval.compare import compare, main
from eval.comparison import (
    Measured,
    against,
    compared,
    comparison,
    conditions,
    names,
    prompts,
    settings_of,
    sums,
    warnings,
)
from eval.rows import Pair
from tests.eval.samples import draft_run, measurement, pair, plain_run, two_pairs

GREEDY = (0.0, 1, True)


def faster() -> list[Pair]:
    """The prompts of `two_pairs`, in rounds of half the time that accept one more each."""
    return [
        pair("A", plain_run([1, 2, 3, 4, 5, 6]), draft_run([1, 2, 3, 4, 5, 6], [2, 2], 0.75)),
        pair(
            "B", plain_run([7, 8, 9, 10]), draft_run([7, 8, 9, 10], [1, 2], 0.75),
            category="<b>code</b> & $more$", prompt_tokens=200,
        ),
    ]  # fmt: skip


def measured(name: str, **changes: Any) -> Measured:
    return Measured(name, Path(name), measurement(**changes))


def written(folder: Path, name: str, **changes: Any) -> Path:
    file = folder / name / "measure" / "measure.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(measurement(**changes)))
    return file


def hardware(**changes: Any) -> dict[str, Any]:
    return measurement()["hardware"] | changes


# ---- figures ----


def test_paired_figures_by_hand() -> None:
    """Speedups 10/8 and 10/5 over the same tokens: 1.6 times, and so for each prompt alone (A: 6/4 and
    6/2.5, B: 4/4 and 4/2.5): drawing prompts again changes nothing. τ goes from 1 + 4/4 to 1 + 7/4."""
    held = against(measured("slow"), measured("fast", pairs=faster()), GREEDY)
    assert held is not None
    assert held["prompts"] == 2
    assert held["speedup"] == pytest.approx(1.6)
    assert held["speedup_ci"] == pytest.approx([1.6, 1.6])
    assert held["mean_acceptance_length"] == pytest.approx(0.75)
    assert held["mean_acceptance_length_ci"] == pytest.approx([0.5, 1.0])  # A alone: 1/2 more; B alone: 2/2


def test_only_shared_prompts_are_paired() -> None:
    held = against(measured("both"), measured("one", pairs=faster()[:1]), GREEDY)
    assert held is not None
    assert (held["prompts"], held["speedup"]) == (1, pytest.approx(1.6))
    assert held["speedup_ci"] is None  # one prompt tells nothing of the spread


def test_none_where_no_prompt_is_shared_or_prompts_were_decoded_together() -> None:
    other = [pair("C", plain_run([1, 2]), draft_run([1, 2], [0]))]
    assert against(measured("a"), measured("b", pairs=other), GREEDY) is None
    assert against(measured("a"), measured("b"), (0.0, 4, True)) is None


def test_probes_are_no_shared_prompts() -> None:
    one = measured("a")
    before = prompts(one.found), sorted(sums(one, 0.0))
    one.found["details"].append(one.found["details"][0] | {"prompt": "recall 60", "probe": True})
    assert (prompts(one.found), sorted(sums(one, 0.0))) == before


def test_a_lossy_rule_gets_a_setting_of_its_own() -> None:
    lossy = measured("typical")
    for row in lossy.found["rows"]:
        row["lossless"] = row["method"] == "plain"
    both = [measured("a"), lossy]
    settings = [compared(both, setting) for setting in settings_of(both)]
    assert [(s["lossless"], {row["name"] for row in s["rows"]}) for s in settings] == [
        (True, {"a"}),
        (False, {"typical"}),
    ]
    assert settings[0]["missing"] == ["typical"]


# ---- conditions ----


def test_like_conditions_need_no_warning() -> None:
    held = conditions([measured("a"), measured("b", pairs=faster())])
    assert all(one["alike"] for one in held)
    assert warnings(held) == []


@pytest.mark.parametrize(
    ("changes", "condition", "spoils"),
    [
        ({"hardware": hardware(threads=8)}, "threads", "speed and latency"),
        ({"hardware": hardware(cpu="Another")}, "hardware", "speed and latency"),
        ({"target": measurement()["target"] | {"dtype": "bfloat16"}}, "dtype", "acceptance and speed"),
        ({"pairs": two_pairs()[:1]}, "prompts", "acceptance and speed"),
        ({"git": {"commit": "b" * 40, "dirty": False}}, "commit", "acceptance and speed"),
        ({"load": measurement()["load"] | {"busy": True}}, "other load", "speed and latency"),
        ({"config": {"decode": {"max_new_tokens": 9}}}, "longest answer", "acceptance and speed"),
        (
            {"config": measurement()["config"] | {"target": {"pack": True}}},
            "weights",
            "speed and latency",
        ),
    ],
)
def test_what_differs_is_named_with_what_it_spoils(
    changes: dict[str, Any], condition: str, spoils: str
) -> None:
    held = conditions([measured("a"), measured("b", **changes)])
    assert [(one["condition"], one["spoils"]) for one in held if not one["alike"]] == [(condition, spoils)]
    assert any(condition in text for text in warnings(held))


def test_two_busy_machines_are_alike_and_warned_of() -> None:
    busy = {"load": measurement()["load"] | {"busy": True}}
    held = conditions([measured("a", **busy), measured("b", **busy)])
    assert all(one["alike"] for one in held)
    assert warnings(held) == ["The machine was busy while a, b ran. Measure again on an idle one."]


def test_later_turns_do_not_make_other_prompts() -> None:
    """How long a conversation's second prompt is depends on the first reply."""
    first, second = measured("a"), measured("b")
    for one, tokens in ((first, 30), (second, 31)):
        turn = {**one.found["details"][0], "turn": 1, "prompt_tokens": tokens}
        one.found["details"].append(turn)
    assert all(one["alike"] for one in conditions([first, second]))


# ---- files ----


def test_names() -> None:
    def named(*folders: str) -> list[str]:
        return names([Path(folder) / "measure.json" for folder in folders])

    assert named("/runs/x/1/measure", "/runs/x/2/measure") == ["1", "2"]
    assert named("/runs/x/1/measure", "/runs/y/1/measure") == ["x/1", "y/1"]
    assert named("/runs/x/1/measure", "/tmp/mine") == ["1", "mine"]
    assert named("/runs/x/1/measure", "/runs/x/1/measure-2026") == ["1", "measure-2026"]
    assert named("/1/measure", "/1") == ["/1/measure/measure.json", "/1/measure.json"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [
        written(tmp_path, "slow"),
        written(tmp_path, "fast", pairs=faster(), hardware=hardware(threads=8)),
    ]
    main([*map(str, files), "--output", str(tmp_path / "out")])

    printed = capsys.readouterr().out
    assert printed.index("Unlike conditions") < printed.index("1.25×")
    assert "threads" in printed
    assert "fast is faster than slow: 1.60× [1.60×, 1.60×] its speedup on the 2 prompts of both." in printed

    made = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert made["schema"] == "leadout.compare/1"
    assert [one["name"] for one in made["measurements"]] == ["slow", "fast"]
    whole = [row for row in made["settings"][0]["rows"] if row["category"] == "all"]
    assert [row["speedup"] for row in whole] == pytest.approx([1.25, 2.0])
    assert whole[0]["against_first"] is None

    page = (tmp_path / "out" / "compare.html").read_text()
    assert page.index("Unlike conditions") < page.index("What is compared") < page.index("1.25×")
    assert "<b>code</b>" not in page
    pictures = sorted(path.name for path in (tmp_path / "out" / "pictures").iterdir())
    assert pictures == ["positions-t0-b1.png", "speedup-t0-b1.png"]
    assert page.count("<svg") == len(pictures)


def test_sweeps_have_a_line_for_each_measurement(tmp_path: Path) -> None:
    pairs = [
        pair(name, plain_run([1, 2, 3]), draft_run([1, 2, 3], [1]), temperature=t)
        for name in "AB"
        for t in (0.0, 1.0)
    ]
    files = [written(tmp_path, "one", pairs=pairs), written(tmp_path, "two", pairs=pairs)]
    compare(files, tmp_path / "out", Console(file=io.StringIO()))
    assert (tmp_path / "out" / "pictures" / "speedup-by-temperature.png").exists()
    assert "All settings" in (tmp_path / "out" / "compare.html").read_text()


def test_refusals(tmp_path: Path) -> None:
    file, other = written(tmp_path, "a"), tmp_path / "other.json"

    def refused(*paths: Path) -> str:
        with pytest.raises(MeasurementError) as error:
            compare(paths, tmp_path / "out", Console(file=io.StringIO()))
        return str(error.value)

    assert "at least two" in refused(file)
    assert "named twice" in refused(file, file.parent)  # the folder it is in
    assert "There is no" in refused(file, other)
    other.write_text("{")
    assert "cannot be read as JSON" in refused(file, other)
    other.write_text('{"schema": "leadout.predict/1"}')
    assert "its schema is 'leadout.predict/1'" in refused(file, other)
    other.write_text("[]")
    assert "is no measurement" in refused(file, other)
    lacking = measurement()
    del lacking["rows"][0]["tree"]
    other.write_text(json.dumps(lacking))
    assert "at $.rows[0], 'tree' is a required property" in refused(file, other)


def test_comparison_is_json(tmp_path: Path) -> None:
    measured_files = [Measured(name, written(tmp_path, name), measurement()) for name in "ab"]
    json.dumps(comparison(measured_files), allow_nan=False)
