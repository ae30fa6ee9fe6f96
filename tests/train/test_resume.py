"""A run that is killed anywhere goes on as if it had not been: real processes, real SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.train.conftest import COSTS

ROOT = Path(__file__).resolve().parents[2]


def start(overrides: list[str], *more: str, module: str = "train.distill") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", module, *overrides, *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # two run side by side
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finished(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def runs(folder: Path) -> list[Path]:
    return sorted((folder / "smollm2_cpu").glob("2*"))


def lines(run: Path) -> list[dict[str, Any]]:
    """What was logged, without what time took."""
    logged = [json.loads(line) for line in (run / "train.jsonl").read_text().splitlines()]
    for line in logged:
        for name in COSTS:
            line.pop(name, None)
            line.get("heldout", {}).pop(name, None)
    return logged


def stop_after(process: subprocess.Popen[str], folder: Path, count: int, how: signal.Signals) -> None:
    """Sends `how` when the run has logged `count` lines."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        logs = list(folder.glob("smollm2_cpu/*/train.jsonl"))
        if logs and logs[-1].read_text().count("\n") >= count:
            os.kill(process.pid, how)
            return
        time.sleep(0.002)
    raise AssertionError(f"the run did not log {count} lines: {process.communicate()[0]}")


def test_killed_twice_and_resumed_is_bit_equal(overrides: list[str], tmp_path: Path) -> None:
    calm, troubled = tmp_path / "calm", tmp_path / "troubled"
    undisturbed = start(overrides, f"runs={calm}")
    for count in (2, 7):  # before the first checkpoint; and on the way from the one after step 4 to the next
        process = start(overrides, f"runs={troubled}")
        stop_after(process, troubled, count, signal.SIGKILL)
        process.communicate()
    (run,) = runs(troubled)
    with open(run / "train.jsonl", "a") as log:
        log.write('{"step": 13, "lo')  # as if the kill had torn a line

    output = finished(start(overrides, f"runs={troubled}"))
    finished(undisturbed)

    (reference,) = runs(calm)
    assert "going on from step" in output
    assert runs(troubled) == [run]
    assert [line["step"] for line in lines(run) if "loss" in line] == list(range(1, 17))
    assert lines(run) == lines(reference)
    weights = "draft/model.safetensors"
    assert (run / weights).read_bytes() == (reference / weights).read_bytes()
    assert (run / "best").resolve().name == (reference / "best").resolve().name
