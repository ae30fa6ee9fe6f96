"""The GPU check at toy size, in this process and without compiling: what it finds, and when it says no."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from rich.console import Console

from eval.generate import generate
from scripts import gpu_check
from scripts.gpu_check import PARTS, TINY, Part, Row, Scale
from tests.conftest import tiny_target

HERE = [name for name in PARTS if not name.startswith("zero")]


def as_it_is(run: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return run


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts run here, smaller still, and forwards of fixed shapes are eager."""

    def apart(name: str, options: argparse.Namespace, out: Path, limit: float) -> str | None:
        try:
            gpu_check.here(name, options, out)
        except Exception as error:
            return str(error)
        return None

    monkeypatch.setattr(gpu_check, "apart", apart)
    monkeypatch.setattr(gpu_check, "TINY", replace(TINY, new_tokens=16))
    monkeypatch.setattr("decoding.compiled.torch.compile", as_it_is)
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def checked(folder: Path, *parts: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and what was written."""
    out, status = folder / "gpu_check.json", 0
    try:
        gpu_check.main(["--tiny", "--device", "cpu", "--out", str(out), "--parts", *parts])
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        status = stop.code
    return status, json.loads(out.read_text())


def test_all_of_it(tmp_path: Path) -> None:
    status, written = checked(tmp_path, *HERE)
    parts = {name: {row["check"]: row for row in part["rows"]} for name, part in written["parts"].items()}
    assert status == 0
    assert [part["error"] for part in written["parts"].values()] == [None] * len(HERE)
    assert {"git", "hardware", "versions"} <= written["conditions"].keys()
    assert len(parts["float32"]) == len(parts["bfloat16"]) == 8
    assert {row["equal"] for row in parts["float32"].values()} == {True}
    assert {row["equal"] for row in parts["bfloat16"].values()} == {None}
    # An equality of outputs says little where nothing was accepted.
    assert parts["float32"]["half the target, tree = plain"]["mean_acceptance_length"] > 1.1
    assert parts["compiled"].keys() == {
        f"{way}, batch 1: compiled = eager" for way in ("plain", "EAGLE-3 chain", "half the target, tree")
    }
    assert {row["equal"] for row in parts["compiled"].values()} == {True}
    for way in ("eager", "compiled"):
        plain, coached = parts["speed"][f"plain, {way}"], parts["speed"][f"EAGLE-3, by coin, {way}"]
        assert plain["tokens_per_s"] > 0 and plain["own_ms"] > 0 and plain["draft_ms"] == 0
        assert coached["draft_ms"] > 0 and coached["mean_acceptance_length"] > 1.5
        assert parts["speed"][f"t(n), {way}"]["ms"].keys() == {"1", "5"}
    for method in ("eagle3", "medusa"):
        step = parts[method][f"{method}, none"]
        assert len(step["losses"]) == 8 and step["tokens_per_s"] > 0 and step["planned_mb"] > 0
        assert step["mfu"] is None  # no data sheet of a processor


def test_an_output_that_is_not_the_targets_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*asked: Any) -> tuple[list[int], float]:
        tokens, seconds = generate(*asked)
        return [*tokens[:-1], tokens[-1] ^ 1], seconds

    monkeypatch.setattr(gpu_check, "generate", wrong)
    status, written = checked(tmp_path, "float32")
    rows = written["parts"]["float32"]["rows"]
    assert status == 1
    assert [row["check"] for row in rows if row["equal"] is False] == ["plain = generate"]
    assert rows[0]["identical"] == "0/3" and [one["index"] for one in rows[0]["partings"]] == [15, 15, 15]
    assert "NO" in capsys.readouterr().out


def test_a_part_that_fails_keeps_what_it_found_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(scale: Scale, device: str) -> Iterator[Row]:
        yield {"check": "first", "equal": True}
        raise RuntimeError("an illegal memory access")

    def holds(scale: Scale, device: str) -> Iterator[Row]:
        yield {"check": "second", "equal": None}

    monkeypatch.setitem(PARTS, "float32", Part(breaks, 9))
    monkeypatch.setitem(PARTS, "speed", Part(holds, 9))
    monkeypatch.setitem(PARTS, "zero2", Part(holds, 9, "no_such_package"))
    status, written = checked(tmp_path, "float32", "speed", "zero2")
    found = written["parts"]
    assert status == 1
    assert found["float32"]["error"] == "an illegal memory access"
    assert found["float32"]["rows"] == [{"check": "first", "equal": True}]
    assert found["speed"]["error"] is None and found["speed"]["rows"] == [{"check": "second", "equal": None}]
    assert found["zero2"]["rows"][0]["skipped"] == "the package no_such_package is not installed"


def test_no_part_begins_without_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "SECONDS", 0.0)
    status, written = checked(tmp_path, "float32")
    assert status == 1
    assert written["parts"]["float32"]["error"] == "no time is left of 0 s"


def test_a_part_ends_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    options = argparse.Namespace(device="cpu", tiny=True)
    assert gpu_check.apart("float32", options, tmp_path / "rows.json", 0.2) == "not done within 0 s"


def test_outputs_may_part_where_rounding_explains_it() -> None:
    # With all of the head's rows alike every logit ties, so any token is as good as another.
    target = tiny_target(layers=1)
    assert gpu_check.parting(target, [5, 6], [7, 8], [7, 8]) is None
    found = gpu_check.parting(target, [5, 6], [7, 8], [7, 9])
    assert found is not None and found["index"] == 1 and found["gap"] > found["explained"]
    with torch.no_grad():
        target.head.weight[:] = target.head.weight[0]
    tied = gpu_check.parting(target, [5, 6], [7, 8], [7, 9])
    assert tied is not None and tied["gap"] <= tied["explained"]


@pytest.mark.parametrize(("losses", "equal"), [([2.0, 1.0005], True), ([2.0, 1.01], False)])
def test_deepspeed_must_lose_what_one_process_loses(losses: list[float], equal: bool) -> None:
    parts = {
        "eagle3": {"rows": [{"losses": [2.0, 1.0]}], "error": None},
        "zero2": {"rows": [{"check": "", "equal": None, "losses": losses}], "error": None},
    }
    gpu_check.same_losses(parts, "zero2")
    assert parts["zero2"]["rows"][0]["equal"] is equal
    Console(quiet=True).print(gpu_check.table({"zero2": parts["zero2"]}))
