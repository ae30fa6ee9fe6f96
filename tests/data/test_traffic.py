"""Rows of every form in, conversations out; what cannot be read is refused with a reason and counted."""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from configs.errors import TrafficError
from configs.schema import Source
from data import traffic
from data.traffic import Conversation, Reading, Refused, conversation, elements, read, share
from tests.data.samples import chat, write_rows

USER = {"role": "user", "content": "hi"}
HALF = "half of a surrogate pair beside the content"


@dataclass
class Read(Reading):
    conversations: list[Conversation] = field(default_factory=list)


def reading(path: Path | str, max_bad_fraction: float = 0.5, **source: Any) -> tuple[Read, str]:
    """What was read, and what was printed."""
    printed = io.StringIO()
    made, rows = read(Source(path=str(path), **source), max_bad_fraction, Console(file=printed, width=300))
    conversations = list(rows)
    return Read(**vars(made), conversations=conversations), printed.getvalue()


# --- forms ---------------------------------------------------------------------


def test_messages() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {
        "messages": [USER],
        "category": "c",
        "id": 7,
        "tools": tools,
        "response_format": {"type": "json_object"},
    }
    made = conversation(row)
    assert made.messages == [USER]
    assert (made.id, made.category) == ("7", "c")
    assert made.tools == tools
    assert made.response_format == {"type": "json_object"}


def test_sharegpt() -> None:
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "ho"},
    ]
    assert conversation({"conversations": turns}).messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
    ]


def test_spec_bench_turns_keep_all_and_ask_the_first() -> None:
    made = conversation({"question_id": 81, "category": "writing", "turns": ["one", "two"]})
    assert made.messages == [{"role": "user", "content": "one"}]
    assert made.turns == ["one", "two"]
    assert made.id == "81"


def test_logged_pair_with_tool_calls() -> None:
    """The reply has no content; its arguments become the object that templates expect."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {
        "request": {"model": "m", "messages": [USER], "tools": tools},
        "response": {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [call]}}]},
    }
    made = conversation(row)
    assert made.messages[1]["content"] == ""
    assert made.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert made.prompt == [USER]
    assert made.tools == tools


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert conversation({"messages": [{"role": "user", "content": parts}]}).messages[0]["content"] == "a\nb"


def test_nulls_that_tables_write_are_absent_keys() -> None:
    made = conversation({"messages": [{**USER, "tool_calls": None, "name": None}], "category": None}, "given")
    assert made.messages == [USER]
    assert made.category == "given"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([], "not a JSON object"),
        ({"text": "hi"}, "none of messages, conversations, turns or request is there"),
        ({"messages": "hi"}, "messages is of type str, not a list"),
        ({"messages": []}, "messages is empty"),
        ({"messages": ["hi"]}, "a message is not an object"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "unknown role 'wizard'"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "unknown role \"['user']\""),
        ({"messages": [{"role": "user", "content": " \n"}]}, "empty content"),
        ({"messages": [{"role": "user"}]}, "empty content"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "content holds half of a surrogate pair"),
        ({"messages": [USER], "id": "\ud83d"}, HALF),
        ({"messages": [USER], "category": "a\udc00"}, HALF),
        ({"messages": [{**USER, "name": "\ud83d"}]}, HALF),
        ({"messages": [USER], "tools": [{"\ud83d": 1}]}, HALF),
        ({"messages": [{"role": "user", "content": 3}]}, "content is of type int, not text"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "empty content"),
        ({"messages": [{"role": "system", "content": "s"}]}, "no user turn"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "content part 'image_url' is not text (only text is supported)",
        ),
        ({"messages": [USER], "tools": "f"}, "tools is not a list of objects"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "unknown role 'narrator'"),
        ({"turns": [""]}, "empty content"),
        ({"request": "r"}, "request is not an object"),
        ({"request": {"messages": [USER]}, "response": {"error": 1}}, "response has no choices[0].message"),
    ],
)
def test_refusals(row: Any, reason: str) -> None:
    with pytest.raises(Refused) as refused:
        conversation(row)
    assert str(refused.value) == reason


# --- files ---------------------------------------------------------------------


def test_bad_lines_are_printed_counted_and_passed_over(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "t.jsonl", {"messages": [USER]}, "{broken", "", {"messages": []}, {"messages": chat("ho")}
    )
    made, printed = reading(path)
    assert [one.messages[0]["content"] for one in made.conversations] == ["hi", "ho"]
    assert made.rows == 4  # the empty line is none
    assert made.bad == {"malformed JSON": 1, "messages is empty": 1}
    assert f"{path}:2: malformed JSON; skipped" in printed
    assert f"{path}:4: messages is empty; skipped" in printed


def test_what_nests_too_deeply_is_counted_too(tmp_path: Path) -> None:
    row = {"messages": [{**USER, "tool_calls": [{"function": {"arguments": "[" * 100_000}}]}]}
    made, printed = reading(write_rows(tmp_path / "t.jsonl", row, {"messages": [USER]}))
    assert len(made.conversations) == 1
    assert made.bad == {"nested too deeply": 1}
    assert "t.jsonl:1: nested too deeply; skipped" in printed


def test_only_the_first_bad_lines_are_printed(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t.jsonl", *["{"] * 9, *[{"messages": [USER]}] * 9)
    made, printed = reading(path)
    assert made.bad["malformed JSON"] == 9
    assert printed.count("malformed JSON") == 5


def test_too_many_bad_lines_stop(tmp_path: Path) -> None:
    """2 of 3 is more than half; 1 of 2 is not."""
    with pytest.raises(TrafficError, match=r"2 of the 3 rows of .*malformed JSON \(2\).*max_bad_fraction"):
        reading(write_rows(tmp_path / "t.jsonl", "{", "{", {"messages": [USER]}))
    assert len(reading(write_rows(tmp_path / "t.jsonl", "{", {"messages": [USER]}))[0].conversations) == 1


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    line = json.dumps({"messages": [{"role": "user", "content": "é"}]}, ensure_ascii=False)
    (tmp_path / "t.jsonl").write_bytes(b"\xef\xbb\xbf" + f"{line}\r\n{line}\r\n".encode())
    made, _ = reading(tmp_path / "t.jsonl")
    assert [one.messages[0]["content"] for one in made.conversations] == ["é", "é"]


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    good = json.dumps({"messages": [USER]}).encode()
    (tmp_path / "t.jsonl").write_bytes(good + b"\n\xff\xfe\n")
    assert reading(tmp_path / "t.jsonl")[0].bad == {"not UTF-8": 1}


def test_gzip_and_its_truncation(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"messages": [USER]}).encode() * 1))
    assert len(reading(path)[0].conversations) == 1
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(TrafficError, match="not a whole gzip file"):
        reading(path)


def test_json_array(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps([{"messages": [USER]}, {"messages": []}], indent=1))
    made, printed = reading(tmp_path / "t.json")
    assert len(made.conversations) == 1
    assert "t.json[1]: messages is empty" in printed


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_json_array_in_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is cut where: strings, escapes, numbers, nested arrays."""
    monkeypatch.setattr(traffic, "CHUNK", size)
    rows = [{"a": [1, "]"]}, {}, 125, -2.5e3, "x,\\u00e9", [], None]
    for indent in (None, 2):
        assert list(elements(io.StringIO(json.dumps(rows, indent=indent) + "\n"))) == rows
    assert list(elements(io.StringIO("[ ] "))) == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('[{"a": 1}', "ends without a closing bracket"),
        ('[{"a": 1}, ', "ends without a closing bracket"),
        ('[{"a": 1},]', "Expecting value"),
        ('[{"a": 1} {"a": 2}]', "no comma between two rows"),
        ('[{"a": 1}] x', "something follows"),
        ('[{"a": 1', "Expecting"),
        ('[{"a": 1}, {"b"]', "Expecting"),
    ],
)
def test_json_array_that_is_none(content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(TrafficError, match=rf"does not parse after [01] rows \(.*{reason}"):
        reading(tmp_path / "t.json", max_bad_fraction=1.0)


def test_only_the_first_rows(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t.jsonl", *[{"messages": chat(text)} for text in "abc"])
    assert [one.messages for one in reading(path, max_rows=2)[0].conversations] == [chat("a"), chat("b")]


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_empty_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.jsonl").write_text(content)
    with pytest.raises(TrafficError, match="holds no rows"):
        reading(tmp_path / "t.jsonl")


def test_missing_file_is_named() -> None:
    with pytest.raises(
        TrafficError, match=r"There is no file nowhere/t\.jsonl.*Correct the path in data\.sources"
    ):
        reading("nowhere/t.jsonl")


def test_datasets_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of data files is a `datasets` name without a network; its table has nulls for absent keys."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_rows(
        tmp_path / "set" / "train.jsonl", {"messages": [USER], "category": "c"}, {"messages": chat("ho")}
    )
    made, _ = reading(tmp_path / "set", category="given")
    assert [(one.messages[0]["content"], one.category) for one in made.conversations] == [
        ("hi", "c"),
        ("ho", "given"),
    ]
    with pytest.raises(TrafficError, match="neither a file here nor a dataset"):
        reading(tmp_path / "set", split="nowhere")


def test_streamed_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied to the cache of `datasets`; other contents have another hash."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    file = write_rows(tmp_path / "set" / "train.jsonl", *[{"messages": chat(text)} for text in "abc"])
    made, _ = reading(tmp_path / "set", streaming=True, max_rows=2)
    assert [one.messages for one in made.conversations] == [chat("a"), chat("b")]
    assert not list((tmp_path / "cache").rglob("*.arrow"))
    again, _ = reading(tmp_path / "set", streaming=True)
    assert again.sha256 == made.sha256
    write_rows(file, {"messages": chat("longer")})
    assert reading(tmp_path / "set", streaming=True)[0].sha256 != made.sha256
    write_rows(file, {"messages": chat("longer")}, "{")
    with pytest.raises(TrafficError, match="neither a file here nor a dataset"):
        reading(tmp_path / "set", streaming=True)


# --- identity ------------------------------------------------------------------


def test_identity_ignores_white_space_composition_and_the_reply() -> None:
    composed = conversation({"messages": chat("caf\u00e9  au\n lait ", "yes")})
    decomposed = conversation({"messages": chat("cafe\u0301 au lait", "no")})
    assert composed.identity == decomposed.identity
    assert composed.identity != conversation({"messages": chat("caf\u00e9 aulait")}).identity
    assert composed.id == composed.identity[:16]


def test_opening_is_shared_by_the_turns_of_one_conversation() -> None:
    """Logged once per turn: other prompts, one opening. Another system prompt opens another conversation."""
    first = conversation({"messages": chat("q", "a1")})
    second = conversation({"messages": chat("q", "a1", "r", "a2")})
    assert first.identity != second.identity
    assert first.opening == second.opening
    assert first.opening != conversation({"messages": chat("q", system="s")}).opening


def test_share_of_a_hash() -> None:
    assert share("8" + "0" * 63) == 0.5
    assert share("0" * 64) == 0.0
    assert share("f" * 64) < 1.0
