"""The entry decorator: what a user sees on stderr, and the exit status."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from configs.entry import entry, storage_trouble
from configs.errors import StorageError, TrafficError
from configs.schema import Config

ROOT = Path(__file__).resolve().parents[2]


def run(monkeypatch: pytest.MonkeyPatch, body: Callable[[Config], None], *arguments: str) -> int:
    """Exit status of an entry point with this body, called with +experiment=smollm2_cpu and `arguments`."""

    @entry()
    def main(config: Config) -> None:
        body(config)

    monkeypatch.setattr(sys, "argv", ["stage", "+experiment=smollm2_cpu", *arguments])
    try:
        main()
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code
    return 0


def failing(error: BaseException) -> Callable[[Config], None]:
    def body(config: Config) -> None:
        raise error

    return body


def test_main_gets_the_checked_config_and_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []
    before = torch.get_num_threads()
    try:
        status = run(monkeypatch, lambda c: seen.append((c.experiment, torch.get_num_threads())), "threads=3")
    finally:
        torch.set_num_threads(before)
    assert status == 0
    assert seen == [("smollm2_cpu", 3)]


@pytest.mark.parametrize(
    ("error", "status", "paragraph"),
    [
        (
            TrafficError("Line 3 of a.jsonl\n  is no JSON object."),
            2,
            "Line 3 of a.jsonl is no JSON object.\n",
        ),
        (StorageError("Cannot write runs."), 2, "Cannot write runs.\n"),
        (KeyboardInterrupt(), 130, "interrupted; run the same command to go on\n"),
    ],
)
def test_a_mendable_error_is_one_paragraph(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    paragraph: str,
) -> None:
    assert run(monkeypatch, failing(error)) == status
    assert capsys.readouterr().err == paragraph


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_trouble_with_the_disk_is_a_paragraph_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    assert run(monkeypatch, failing(OSError(number, os.strerror(number), "/full/x.bin"))) == 2
    said = capsys.readouterr().err
    assert f"{os.strerror(number)} at /full/x.bin." in said
    assert "run the same command again" in said
    assert said.count("\n") == 1


def test_a_full_disk_is_known_by_its_words_and_behind_other_errors() -> None:
    assert storage_trouble(RuntimeError("I/O error: No space left on device (os error 28)")) is not None
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as full:
            raise RuntimeError("cannot save") from full
    except RuntimeError as error:
        assert storage_trouble(error) is not None
    assert storage_trouble(FileNotFoundError(errno.ENOENT, "No such file", "x")) is None


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        run(monkeypatch, failing(ZeroDivisionError()))


def test_hydra_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    assert run(monkeypatch, lambda config: None) == 0
    assert list(tmp_path.iterdir()) == []
    assert "HYDRA_FULL_ERROR" not in os.environ


def test_a_sweep_runs_every_value(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[int] = []
    assert run(monkeypatch, lambda config: seen.append(config.seed), "seed=1,2", "-m") == 0
    assert seen == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def stage(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A real stage, as a user runs it; each of these fails before a model would load."""
    command = [sys.executable, "-m", "data.prepare", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_stage_refuses_an_unknown_key() -> None:
    done = stage("+experiment=smollm2_cpu", "data.heldout_share=0.1")
    assert done.returncode == 2
    assert done.stderr.startswith("Unknown configuration key 'data.heldout_share'.")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_stage_refuses_an_impossible_combination() -> None:
    done = stage("+experiment=smollm2_cpu", "data.max_prompt_tokens=768", "data.max_length=768")
    assert done.returncode == 2
    assert "leaves no room for a reply" in done.stderr
    assert done.stderr.count("\n") == 1
