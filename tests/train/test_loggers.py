from __future__ import annotations

import io
import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from configs.compose import compose
from configs.errors import ConfigError
from train.loggers import Jsonl, Line, Profile, duration, flat, open_loggers
from train.runs import open_run

TRAINED: Line = {
    "step": 10, "epoch": 0, "loss": 2.5, "accuracy": [0.5, 0.25], "alpha": [0.75, None], "tokens": 960,
    "tokens_per_s": 1234.5, "seconds_per_step": 2.0,
}  # fmt: skip
MEASURED: Line = {
    "step": 10,
    "heldout": {
        "mean_acceptance_length": 1.5, "mean_acceptance_length_ci": [1.25, 1.75], "walk": 1.5, "alarm": False,
        "prompts": 4, "rounds": 30, "draft_tokens": 3,
    },
}  # fmt: skip


def logged(folder: Path, *overrides: str, step: int = 10) -> tuple[Path, str]:
    """Both lines through all loggers, at `step`: the run's folder, and what the console showed."""
    config = compose(["+experiment=smollm2_cpu", f"runs={folder}", *overrides])
    console = Console(file=io.StringIO(), width=1000)
    with open_run(config, {}) as run:
        loggers = open_loggers(config, run, steps=100, step=0, console=console)
        for logger in loggers:
            logger.step(step)
            logger.line({**TRAINED, "step": step})
            logger.line({**MEASURED, "step": step})
            logger.close()
    return run.folder, console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_console_and_jsonl(tmp_path: Path) -> None:
    run, printed = logged(tmp_path)

    assert [json.loads(line) for line in (run / "train.jsonl").read_text().splitlines()] == [
        TRAINED,
        MEASURED,
    ]
    # 90 steps of 2 s are left.
    assert "step 10/100  loss 2.500  acc0 0.500  1,234 tok/s  3:00 left" in printed
    assert "held-out acceptance length 1.50 (95 % 1.25 to 1.75, 4 prompts, 30 rounds, K=3)" in printed


def test_jsonl_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"step": 1}\n{"st')
    logger = Jsonl(path)
    logger.line({"step": 2})
    logger.close()

    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: a header of 7 bytes, then LevelDB's log format.

    Blocks of 32 KiB hold chunks of checksum (4 bytes), length (2), type (1: whole, 2: first, 3: middle, 4:
    last) and data; fewer than 7 bytes at the end of a block are left empty.
    """
    assert data[:4] == b":W&B"
    at, record = 7, b""
    while at + 7 <= len(data):
        length, kind = struct.unpack_from("<4xHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""
        left = 32768 - at % 32768
        at += left if left < 7 else 0


def wandb_files(run: Path) -> list[list[Any]]:
    """The records of each of the run's .wandb files, oldest file first."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    wandb.teardown()  # waits for the process that writes the file; `finish` of an offline run does not
    paths = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    return [[Record.FromString(data) for data in wandb_records(path.read_bytes())] for path in paths]


def wandb_history(records: list[Any]) -> list[dict[str, Any]]:
    """What was logged, a dictionary for each step."""
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
    ]
    return [row for row in rows if row]


def test_wandb_offline_is_read_back_from_its_file(tmp_path: Path) -> None:
    run, _ = logged(tmp_path, "logger.wandb=offline")
    (records,) = wandb_files(run)
    rows = wandb_history(records)

    figures = {key: value for row in rows for key, value in row.items()}
    assert figures["loss"] == 2.5
    assert (figures["accuracy/0"], figures["accuracy/1"], figures["alpha/0"]) == (0.5, 0.25, 0.75)
    assert "alpha/1" not in figures
    assert figures["heldout/mean_acceptance_length"] == 1.5
    assert figures["heldout/mean_acceptance_length_ci/1"] == 1.75
    assert {row["_step"] for row in rows} == {10}
    settings = {
        item.key: json.loads(item.value_json) for record in records for item in record.run.config.update
    }
    assert settings["trainer"]["optimizer"] == "muon" and settings["method"]["name"] == "eagle3"
    assert len(settings["provenance"]["git"]["commit"]) == 40


def test_a_resumed_run_is_the_same_wandb_run(tmp_path: Path) -> None:
    run, _ = logged(tmp_path, "logger.wandb=offline")
    time.sleep(1.1)  # wandb names its folders by the second
    again, _ = logged(tmp_path, "logger.wandb=offline", step=20)
    first, second = wandb_files(run)

    assert again == run
    ids = {record.run.run_id for record in [*first, *second]} - {""}
    assert ids == {f"smollm2_cpu-{run.name}"}
    assert [{row["_step"] for row in wandb_history(records)} for records in (first, second)] == [{10}, {20}]


def test_wandb_missing_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install .*logger\.wandb=disabled"):
        logged(tmp_path, "logger.wandb=offline")


def test_flat_names_numbers_at_any_depth() -> None:
    assert flat({"a": 1, "b": [2.0, None], "c": {"d": [3]}, "e": "text"}) == {"a": 1, "b/0": 2.0, "c/d/0": 3}


def test_durations() -> None:
    assert [duration(s) for s in (5, 65, 3725)] == ["0:05", "1:05", "1:02:05"]


def profiled(folder: Path, window: tuple[int, int], begins: int, ends: int) -> list[str]:
    """The files of a run that goes on from step `begins` to step `ends`, with a product in each step."""
    profile = Profile(*window, folder, begins, Console(file=io.StringIO()))
    for step in range(begins + 1, ends + 1):
        _ = torch.ones(step, 1) @ torch.ones(1, 1)
        profile.step(step)
    profile.close()
    return sorted(path.name for path in folder.glob("*"))


def products(trace: Path) -> int:
    events = json.loads(trace.read_text())["traceEvents"]
    return sum(event["name"] == "aten::matmul" for event in events)


def test_a_profile_covers_its_window(tmp_path: Path) -> None:
    assert profiled(tmp_path, (2, 3), begins=0, ends=5) == ["steps_2_3.json", "steps_2_3.txt"]
    assert products(tmp_path / "steps_2_3.json") == 2
    assert "aten::matmul" in (tmp_path / "steps_2_3.txt").read_text()


def test_a_profile_of_a_run_that_begins_or_ends_within_its_window(tmp_path: Path) -> None:
    assert profiled(tmp_path, (1, 9), begins=4, ends=6) == ["steps_5_6.json", "steps_5_6.txt"]
    assert products(tmp_path / "steps_5_6.json") == 2
    assert profiled(tmp_path / "none", (2, 3), begins=3, ends=5) == []


@pytest.mark.parametrize("window", ["[3]", "[3,2]", "[0,2]"])
def test_a_profile_s_window_is_checked(window: str) -> None:
    with pytest.raises(ConfigError, match=r"logger\.profile=.*is no window"):
        compose(["+experiment=smollm2_cpu", f"logger.profile={window}"])


@pytest.mark.parametrize(
    ("window", "step", "silent"),
    [
        ([20, 22], 0, True),
        ([100, 120], 0, True),
        ([101, 120], 0, False),
        ([20, 22], 21, True),
        ([20, 22], 22, False),
    ],
)
def test_a_window_without_a_step_is_said_at_the_start(
    tmp_path: Path, window: list[int], step: int, silent: bool
) -> None:
    config = compose(["+experiment=smollm2_cpu", f"runs={tmp_path}", f"logger.profile={window}"])
    printed = io.StringIO()
    with open_run(config, {}) as run:
        for logger in open_loggers(
            config, run, steps=100, step=step, console=Console(file=printed, width=200)
        ):
            logger.close()
    said = (
        f"logger.profile=[{window[0]},{window[1]}] holds none of the steps that are left, {step + 1} to 100"
    )
    assert (said not in printed.getvalue()) == silent
