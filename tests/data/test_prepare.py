"""The prepared folder: duplicates, the split and its stability, limits, refusals, and the second run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from configs.errors import TrafficError
from configs.schema import Config, Replies, Source
from data.prepare import Kept, evenly, named_apart, prepare
from data.tokens import prompts, split_rows
from data.traffic import conversation, share
from tests.conftest import tiny_tokenizer
from tests.data.samples import chat, config, read_rows, write_rows


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A folder with the tiny tokenizer and no weights: preparing needs none."""
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def run(cfg: Config) -> str:
    printed = io.StringIO()
    prepare(cfg, Console(file=printed, width=200))
    return printed.getvalue()


def row(text: str, **extra: Any) -> dict[str, Any]:
    return {"messages": chat(text), **extra}


def texts(cfg: Config, split: Any) -> set[str]:
    return {made["messages"][0]["content"] for made in split_rows(cfg, split)}


def test_rows_hold_prompt_ids_and_what_the_traffic_said(tmp_path: Path, tokenizer: str) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    source = write_rows(tmp_path / "t.jsonl", row("hi", id="one", category="c", tools=tools))
    cfg = config(tmp_path / "data", tokenizer, [source], heldout_fraction=0.0)
    run(cfg)
    (made,) = read_rows(tmp_path / "data" / "train.jsonl")
    assert made["id"] == "one"
    assert made["category"] == "c"
    assert made["messages"] == chat("hi")
    assert made["tools"] == tools
    (prompt,) = prompts(cfg, "train")
    text = tiny_tokenizer().decode(prompt.ids)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_half_a_surrogate_pair_costs_its_line_only(tmp_path: Path, tokenizer: str) -> None:
    bad = [row("b", id="\ud800"), row("c", category="\udfff")]  # json.dumps escapes them
    source = write_rows(tmp_path / "t.jsonl", row("a"), *bad, row("d"))
    cfg = config(tmp_path / "data", tokenizer, [source], heldout_fraction=0.0)
    assert "unreadable: half of a surrogate pair beside the content (t.jsonl)" in run(cfg)
    assert texts(cfg, "train") == {"a", "d"}


def test_duplicates_go_whatever_their_white_space_and_reply(tmp_path: Path, tokenizer: str) -> None:
    source = write_rows(
        tmp_path / "t.jsonl", row("a b"), row(" a  b\n"), {"messages": chat("a b", "yes")}, row("ab")
    )
    cfg = config(tmp_path / "data", tokenizer, [source], heldout_fraction=0.0)
    assert "dropped: duplicate prompt" in run(cfg)
    assert texts(cfg, "train") == {"a b", "ab"}
    assert json.loads((tmp_path / "data" / "prepare.json").read_text())["dropped"] == {
        "all": {"duplicate prompt": 2}
    }


def test_split_follows_the_hash_and_survives_growth(tmp_path: Path, tokenizer: str) -> None:
    rows = [row(f"question {i}") for i in range(60)]
    cfg = config(
        tmp_path / "few", tokenizer, [write_rows(tmp_path / "few.jsonl", *rows[:40])], heldout_fraction=0.3
    )
    more = config(
        tmp_path / "more", tokenizer, [write_rows(tmp_path / "more.jsonl", *rows)], heldout_fraction=0.3
    )
    run(cfg)
    run(more)
    expected = {f"question {i}" for i in range(40) if share(conversation(rows[i]).opening) < 0.3}
    assert texts(cfg, "heldout") == expected
    assert texts(cfg, "train") == {f"question {i}" for i in range(40)} - expected
    assert texts(cfg, "heldout") <= texts(more, "heldout")
    assert texts(cfg, "train") <= texts(more, "train")


def test_turns_of_one_conversation_stay_on_one_side(tmp_path: Path, tokenizer: str) -> None:
    """Each conversation is logged after its first and after its second turn."""
    rows = [{"messages": chat(f"question {i}", *more)} for i in range(20) for more in ([], ["a", "b"])]
    cfg = config(
        tmp_path / "data", tokenizer, [write_rows(tmp_path / "t.jsonl", *rows)], heldout_fraction=0.5
    )
    run(cfg)
    assert len(split_rows(cfg, "train")) + len(split_rows(cfg, "heldout")) == 40
    assert not texts(cfg, "train") & texts(cfg, "heldout")


def test_heldout_sources_are_never_trained_on(tmp_path: Path, tokenizer: str) -> None:
    source = write_rows(
        tmp_path / "t.jsonl", row("both"), row("mine"), {"messages": chat("both", "x", "and then?")}
    )
    heldout = write_rows(tmp_path / "h.jsonl", row(" both "))
    cfg = config(tmp_path / "data", tokenizer, [source], heldout_fraction=0.0)
    cfg.data.heldout_sources = [Source(path=str(heldout))]
    printed = run(cfg)
    assert texts(cfg, "train") == {"mine"}
    assert texts(cfg, "heldout") == {" both "}
    assert "dropped: also in data.heldout_sources" in printed


def test_limits_take_the_same_rows_as_data_grows(tmp_path: Path, tokenizer: str) -> None:
    """The two of smallest hash; of those that came later, only one of smaller hash can push another out."""
    rows = [row(f"question {i}") for i in range(30)]
    cfg = config(
        tmp_path / "data", tokenizer, [write_rows(tmp_path / "t.jsonl", *rows)], heldout_fraction=0.0
    )
    cfg.data.max_train_rows = 2
    assert "beyond data.max_train_rows" in run(cfg)
    smallest = sorted(rows, key=lambda made: conversation(made).identity)[:2]
    assert [made["messages"] for made in split_rows(cfg, "train")] == [made["messages"] for made in smallest]


def test_heldout_takes_turns_over_the_categories() -> None:
    """Five of "a", two of "b", one of "c": any beginning of the order is as even as can be."""
    made = [Kept(f"{i}{c}", "", "", c, 0) for c, n in (("a", 5), ("b", 2), ("c", 1)) for i in range(n)]
    assert [one.category for one in evenly(made)] == ["a", "b", "c", "a", "b", "a", "a", "a"]


def test_ids_that_repeat_are_told_apart_by_content() -> None:
    made = named_apart(
        [Kept(hash, "", id, "c", 0) for hash, id in (("1" * 64, "x"), ("2" * 64, "x"), ("3" * 64, "y"))]
    )
    assert [one.id for one in made] == ["x-111111111111", "x-222222222222", "y"]


def test_long_prompts_are_dropped_and_counted(tmp_path: Path, tokenizer: str) -> None:
    """One token per character, and 19 for the template: "hi" makes 21."""
    source = write_rows(tmp_path / "t.jsonl", row("hi"), row("hip"))
    cfg = config(tmp_path / "data", tokenizer, [source], heldout_fraction=0.0, max_prompt_tokens=21)
    run(cfg)
    assert texts(cfg, "train") == {"hi"}
    dropped = json.loads((tmp_path / "data" / "prepare.json").read_text())["dropped"]
    assert dropped == {"train": {"prompt longer than data.max_prompt_tokens": 1}}


def test_nothing_left_is_an_error_with_the_reasons(tmp_path: Path, tokenizer: str) -> None:
    source = write_rows(tmp_path / "t.jsonl", row("hi"))
    with pytest.raises(
        TrafficError, match=r"No train prompt is left \(prompt longer .*: 1\).*data\.max_prompt_tokens"
    ):
        run(config(tmp_path / "data", tokenizer, [source], heldout_fraction=0.0, max_prompt_tokens=5))
    with pytest.raises(TrafficError, match=r"No heldout prompt is left .*data\.heldout_fraction"):
        run(config(tmp_path / "data", tokenizer, [source], heldout_fraction=1e-9))
    with pytest.raises(TrafficError, match=r"data\.sources is empty"):
        run(config(tmp_path / "data", tokenizer))
    assert not (tmp_path / "data" / "train.jsonl").exists()


def test_logged_replies_are_demanded_where_they_are_trained_on(tmp_path: Path, tokenizer: str) -> None:
    source = write_rows(tmp_path / "t.jsonl", row("alone"), {"messages": chat("asked", "answered")})
    cfg = config(tmp_path / "data", tokenizer, [source], heldout_fraction=0.0, replies=Replies.logged)
    assert "dropped: no assistant turn to train on" in run(cfg)
    assert [made["messages"] for made in split_rows(cfg, "train")] == [chat("asked", "answered")]


def test_second_run_changes_nothing(tmp_path: Path, tokenizer: str) -> None:
    source = write_rows(tmp_path / "t.jsonl", row("hi"), row("ho"))
    cfg = config(tmp_path / "data", tokenizer, [source], heldout_fraction=0.0)
    run(cfg)
    before = {
        path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in (tmp_path / "data").iterdir()
    }
    assert "nothing to do" in run(cfg)
    assert before == {
        path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in (tmp_path / "data").iterdir()
    }
    assert sorted(before) == ["heldout.jsonl", "prepare.json", "train.jsonl"]


def test_changed_inputs_or_files_are_prepared_again(tmp_path: Path, tokenizer: str) -> None:
    source = write_rows(tmp_path / "t.jsonl", row("hi"), row("ho"))
    cfg = config(tmp_path / "data", tokenizer, [source], heldout_fraction=0.0)
    run(cfg)
    write_rows(source, row("hi"))
    assert "nothing to do" not in run(cfg)
    assert texts(cfg, "train") == {"hi"}
    with open(tmp_path / "data" / "train.jsonl", "a") as file:
        file.write("{}\n")
    with pytest.raises(TrafficError, match=r"is not the file that prepare\.json describes"):
        prompts(cfg, "train")
    assert "nothing to do" not in run(cfg)
    assert texts(cfg, "train") == {"hi"}
    cfg.data.max_prompt_tokens = 500
    assert "nothing to do" not in run(cfg)


def test_prompts_before_preparation(tmp_path: Path) -> None:
    with pytest.raises(TrafficError, match=r"Run python -m data\.prepare first"):
        prompts(config(tmp_path), "heldout")
