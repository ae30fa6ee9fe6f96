"""Lines read one by one with their places, and the end of a file mended by reading no more than it takes."""

from __future__ import annotations

import io
import json
from pathlib import Path

from models.files import append_line, last_line, lines_at, open_append, read_lines

LONG = "x" * (1 << 17)  # two blocks of those that a file's end is searched in


def test_lines_and_their_places(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes('{"a": "é"}\n\n{"b": 1}\n{"torn'.encode())
    assert list(lines_at(path)) == [(0, {"a": "é"}), (13, {"b": 1})]  # é takes two bytes


def test_last_line_over_several_blocks() -> None:
    for before in (b"", b"\n", b"a\n" * 40_000):
        assert last_line(io.BytesIO(before + LONG.encode())) == (len(before), LONG.encode())
    assert last_line(io.BytesIO(b"a\n")) == (2, b"")
    assert last_line(io.BytesIO(b"")) == (0, b"")


def test_long_torn_line_is_cut_off_and_a_whole_one_kept(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    for end, kept in (('{"torn": "' + LONG, []), (json.dumps({"whole": LONG}), [{"whole": LONG}])):
        path.write_text('{"a": 1}\n' + end)
        with open_append(path) as file:
            append_line(file, {"b": 2})
        assert read_lines(path) == [{"a": 1}, *kept, {"b": 2}]
