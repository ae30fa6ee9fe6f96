"""Token rows from literal replies and literal conversations; the cache and what its key covers."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel

from configs.errors import ConfigError, TrafficError
from configs.schema import Config, MaskTurns, Replies
from data.tokens import TokenRow, load_token_rows
from models.files import write_json
from models.target import Target
from tests.conftest import tiny_target, tiny_tokenizer
from tests.data.samples import chat, config, write_rows

EOS = 2


def train(id: str, ids: list[int]) -> dict[str, Any]:
    return {"id": id, "category": "c", "messages": chat("hi"), "prompt_ids": ids}


def reply(id: str, prompt_ids: list[int], reply_ids: list[int], looped: bool = False) -> dict[str, Any]:
    finish = "eos" if reply_ids[-1:] == [EOS] else "length"
    return {
        "id": id,
        "category": "c",
        "prompt_ids": prompt_ids,
        "reply_ids": reply_ids,
        "finish": finish,
        "looped": looped,
    }


def loaded(cfg: Config, target: Target) -> tuple[list[TokenRow], str]:
    printed = io.StringIO()
    rows = load_token_rows(cfg, target, Console(file=printed, width=500))
    return list(rows), printed.getvalue()


def folders(cfg: Config) -> list[str]:
    return sorted(os.listdir(Path(cfg.data.folder) / "tokens"))


def test_replies_are_joined_with_the_train_prompts(tmp_path: Path, target: Target) -> None:
    """Only "a" trains: "b" has no reply, the reply of "c" is to an older prompt, "d" left the split."""
    write_rows(tmp_path / "train.jsonl", train("a", [5, 6]), train("b", [7]), train("c", [8, 9]))
    write_rows(
        tmp_path / "replies.jsonl", reply("a", [5, 6], [10, EOS]), reply("c", [8], [9]), reply("d", [9], [9])
    )
    rows, printed = loaded(config(tmp_path), target)
    assert rows == [TokenRow("a", "c", [5, 6, 10, EOS], [0, 0, 1, 1])]
    assert "1 token rows to train on" in printed
    assert "left out, not answered: 2" in printed
    assert "replies to prompts no longer in train: 2" in printed
    assert "trained tokens: 2" in printed


def test_long_rows_are_cut_and_rows_without_a_trained_token_left_out(tmp_path: Path, target: Target) -> None:
    write_rows(tmp_path / "train.jsonl", train("a", [5, 6]), train("b", [5, 6, 7]))
    write_rows(
        tmp_path / "replies.jsonl", reply("a", [5, 6], [8, 9]), reply("b", [5, 6, 7], [8, EOS], looped=True)
    )
    rows, printed = loaded(config(tmp_path, max_length=3), target)
    assert rows == [TokenRow("a", "c", [5, 6, 8], [0, 0, 1])]
    assert "cut at max_length: 2" in printed
    assert "left out, no token to train on: 1" in printed
    assert "looped (kept): 1" in printed


def test_logged_conversations_are_masked_by_the_template(tmp_path: Path, target: Target) -> None:
    row = {"id": "a", "category": "c", "messages": chat("x", "y", "z", "w"), "prompt_ids": [1]}
    write_rows(tmp_path / "train.jsonl", row)

    def trained(turns: MaskTurns) -> str:
        (made,), _ = loaded(config(tmp_path, replies=Replies.logged, mask_turns=turns), target)
        return target.tokenizer.decode(
            [id for id, on in zip(made.input_ids, made.loss_mask, strict=True) if on]
        )

    assert trained(MaskTurns.all) == "y<|im_end|>w<|im_end|>"
    assert trained(MaskTurns.last) == "w<|im_end|>"
    assert len(folders(config(tmp_path))) == 2  # the mask rule is in the key


def test_cache_is_read_back(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "train.jsonl", train("a", [5, 6]))
    write_rows(tmp_path / "replies.jsonl", reply("a", [5, 6], [10, EOS]))
    first, said = loaded(config(tmp_path), target)
    monkeypatch.setattr("data.tokens.build", None)  # a second build would call None
    again, said_again = loaded(config(tmp_path), target)
    assert again == first
    assert said_again == said


def test_rows_are_a_sequence(tmp_path: Path, target: Target) -> None:
    write_rows(tmp_path / "train.jsonl", *[train(str(n), [5, n]) for n in range(5)])
    write_rows(tmp_path / "replies.jsonl", *[reply(str(n), [5, n], [n, EOS]) for n in reversed(range(5))])
    rows = load_token_rows(config(tmp_path), target, Console(file=io.StringIO()))
    expected = [TokenRow(str(n), "c", [5, n, n, EOS], [0, 0, 1, 1]) for n in range(5)]
    assert list(rows) == expected
    assert (rows[1], rows[-1], rows[1::2]) == (expected[1], expected[4], expected[1::2])
    assert len(rows) == 5
    with pytest.raises(IndexError):
        rows[5]


def test_reply_given_again_counts_once(tmp_path: Path, target: Target) -> None:
    """The last to one prompt."""
    write_rows(tmp_path / "train.jsonl", train("a", [5, 6]))
    write_rows(tmp_path / "replies.jsonl", reply("a", [5, 6], [9]), reply("a", [5, 6], [10, EOS]))
    rows, printed = loaded(config(tmp_path), target)
    assert rows == [TokenRow("a", "c", [5, 6, 10, EOS], [0, 0, 1, 1])]
    assert "no longer in train" not in printed


def test_rows_of_one_prompt_share_its_reply(tmp_path: Path, target: Target) -> None:
    """Two conversations that a template renders alike."""
    write_rows(tmp_path / "train.jsonl", train("a", [5, 6]), train("b", [5, 6]))
    write_rows(tmp_path / "replies.jsonl", reply("b", [5, 6], [10, EOS]))
    rows, printed = loaded(config(tmp_path), target)
    assert [(row.id, row.input_ids) for row in rows] == [("a", [5, 6, 10, EOS]), ("b", [5, 6, 10, EOS])]
    assert "no longer in train" not in printed


def test_rows_end_where_rotary_embeddings_change(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    target = tiny_target(max_position_embeddings=16, rope_parameters=rope)
    with pytest.raises(ConfigError, match=r"Set data\.max_length=16\."):
        loaded(config(tmp_path, max_length=17), target)


def test_rows_end_where_the_table_of_positions_does(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16))
    target = Target.wrap(model, tiny_tokenizer())
    with pytest.raises(ConfigError, match=r"has 16 positions. Set data\.max_length=16\."):
        loaded(config(tmp_path, max_length=17), target)


def test_a_reply_stays_its_prompts_when_ids_change(tmp_path: Path, target: Target) -> None:
    """Preparation extends an id that another row comes to share."""
    write_rows(tmp_path / "train.jsonl", train("a-0123", [5, 6]), train("a-4567", [7]))
    write_rows(tmp_path / "replies.jsonl", reply("a", [5, 6], [10, EOS]))
    rows, _ = loaded(config(tmp_path), target)
    assert rows == [TokenRow("a-0123", "c", [5, 6, 10, EOS], [0, 0, 1, 1])]


def test_key_covers_data_template_and_length(tmp_path: Path, target: Target) -> None:
    write_rows(tmp_path / "train.jsonl", train("a", [5, 6]), train("b", [5, 7]))
    write_rows(tmp_path / "replies.jsonl", reply("a", [5, 6], [10, EOS]))
    cfg = config(tmp_path)
    loaded(cfg, target)
    write_rows(tmp_path / "replies.jsonl", reply("a", [5, 6], [10, EOS]), reply("b", [5, 7], [EOS]))
    assert len(loaded(cfg, target)[0]) == 2
    cfg.data.max_length = 3
    assert [len(row.input_ids) for row in loaded(cfg, target)[0]] == [3, 3]
    target.tokenizer.chat_template += " "
    loaded(cfg, target)
    assert len(folders(cfg)) == 4


def test_missing_and_foreign_inputs(tmp_path: Path, target: Target) -> None:
    cfg = config(tmp_path)
    with pytest.raises(TrafficError, match=r"Run python -m data\.prepare first"):
        load_token_rows(cfg, target)
    write_rows(tmp_path / "train.jsonl", train("a", [5, 6]))
    with pytest.raises(TrafficError, match=r"Run python -m data\.regenerate first"):
        load_token_rows(cfg, target)
    write_rows(tmp_path / "replies.jsonl", reply("b", [5], [6]))
    with pytest.raises(TrafficError, match=r"nothing to train on.*not answered: 1"):
        load_token_rows(cfg, target)
    write_json(tmp_path / "replies.meta.json", {"fingerprint": "0" * 64})
    with pytest.raises(TrafficError, match="written by another target than tiny"):
        load_token_rows(cfg, target)


def test_torn_last_reply_is_not_used(tmp_path: Path, target: Target) -> None:
    write_rows(tmp_path / "train.jsonl", train("a", [5]), train("b", [6]))
    path = write_rows(tmp_path / "replies.jsonl", reply("a", [5], [7]), reply("b", [6], [8]))
    path.write_text(path.read_text()[:-4])
    assert [row.id for row in loaded(config(tmp_path), target)[0]] == ["a"]
