"""Files are whole or absent, whatever happens while they are written."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from configs.errors import StorageError
from models.files import (
    append_line,
    ensure_writable,
    open_append,
    read_lines,
    sha256_file,
    write_atomic,
    write_folder,
    write_json,
    write_tensors,
    write_text,
)


def full_disk(path: Path) -> None:
    """Writes a part and then meets a full disk."""
    (path / "part" if path.is_dir() else path).write_text("half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_write_text_makes_parents_and_leaves_only_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    write_text(path, "drafts ≠ targets\n")
    assert path.read_text(encoding="utf-8") == "drafts ≠ targets\n"
    assert os.listdir(path.parent) == ["b.txt"]


def test_a_full_disk_keeps_the_earlier_file_and_names_the_mend(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"kept": 1})
    with pytest.raises(StorageError, match=r"x\.json.*No space left.*free some space"):
        write_atomic(path, full_disk)
    assert json.loads(path.read_text()) == {"kept": 1}
    assert os.listdir(tmp_path) == ["x.json"]


def test_an_interrupt_removes_the_temporary_file(tmp_path: Path) -> None:
    def interrupted(path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "x", interrupted)
    assert os.listdir(tmp_path) == []


def test_write_folder_replaces_an_earlier_folder_whole(tmp_path: Path) -> None:
    def first(path: Path) -> None:
        (path / "old").write_text("1")

    def second(path: Path) -> None:
        (path / "new").write_text("2")

    write_folder(tmp_path / "draft", first)
    write_folder(tmp_path / "draft", second)
    assert os.listdir(tmp_path) == ["draft"]
    assert os.listdir(tmp_path / "draft") == ["new"]


def test_write_folder_keeps_the_earlier_folder_when_the_disk_is_full(tmp_path: Path) -> None:
    def first(path: Path) -> None:
        (path / "old").write_text("1")

    write_folder(tmp_path / "draft", first)
    with pytest.raises(StorageError, match="draft"):
        write_folder(tmp_path / "draft", full_disk)
    assert os.listdir(tmp_path) == ["draft"]
    assert os.listdir(tmp_path / "draft") == ["old"]


def test_kill_9_while_writing_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"step": 1})
    script = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from models.files import write_atomic\n"
        "def write(p):\n"
        "    p.write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"write_atomic(Path({str(path)!r}), write)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    assert killed.returncode == -signal.SIGKILL
    assert json.loads(path.read_text()) == {"step": 1}


def test_json_refuses_nan_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "x.json", {"speedup": float("nan")})
    assert os.listdir(tmp_path) == []


def test_write_tensors_keeps_bits_of_views(tmp_path: Path) -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3).T  # not contiguous
    write_tensors(tmp_path / "x.safetensors", {"a": tensor})
    assert torch.equal(load_file(tmp_path / "x.safetensors")["a"], tensor)


def test_sha256_of_abc(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    # FIPS 180-2, appendix B.1
    assert sha256_file(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_lines_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_line(path, {"id": "ä"})
    with open_append(path) as handle:
        append_line(handle, {"id": 2})
    assert read_lines(path) == [{"id": "ä"}, {"id": 2}]


def test_a_torn_last_line_is_dropped_and_cut_off_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1}\n{"id": 2, "te')
    assert read_lines(path) == [{"id": 1}]
    append_line(path, {"id": 3})
    assert path.read_text() == '{"id": 1}\n{"id": 3}\n'


def test_a_whole_last_line_without_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1}')
    assert read_lines(path) == [{"id": 1}]
    append_line(path, {"id": 2})
    assert read_lines(path) == [{"id": 1}, {"id": 2}]


def test_a_torn_inner_line_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1}\n{"id": 2, "te\n{"id": 3}\n')
    with pytest.raises(StorageError, match=r"Line 2 of .*rows\.jsonl"):
        read_lines(path)


def test_reading_a_missing_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"Cannot read .*absent\.jsonl"):
        read_lines(tmp_path / "absent.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's always-full device")
def test_appending_to_a_full_disk_is_a_storage_error() -> None:
    handle = open("/dev/full", "a")  # noqa: SIM115
    with pytest.raises(StorageError, match="disk is full"):
        append_line(handle, {"id": 1})
    with pytest.raises(OSError, match="No space"):
        handle.close()


def test_ensure_writable_makes_the_folder_and_leaves_it_empty(tmp_path: Path) -> None:
    ensure_writable(tmp_path / "runs" / "a")
    assert os.listdir(tmp_path / "runs" / "a") == []


def test_ensure_writable_below_a_file_names_the_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="a part of that path is a file"):
        ensure_writable(tmp_path / "file" / "runs")


def test_a_read_only_folder_names_the_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Permission bits do not bind the superuser, as whom containers run: the system's answer is set instead.
    def refuse(self: Path, data: bytes) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(StorageError, match="read-only: choose a folder that can be written"):
        ensure_writable(tmp_path)
