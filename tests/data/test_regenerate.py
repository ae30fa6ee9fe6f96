"""Replies on disk: complete, once each, the same after a kill as without one; other settings are refused."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from configs.errors import TrafficError
from configs.schema import Config
from data.prepare import prepare
from data.regenerate import in_windows, regenerate
from data.tokens import load_token_rows
from models.target import Target
from tests.conftest import tiny_target
from tests.data.samples import chat, config, read_rows, write_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny target as a folder."""
    folder = tmp_path_factory.mktemp("targets") / "tiny"
    target = tiny_target()
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return str(folder)


def prepared(folder: Path, saved: str, prompts: int) -> Config:
    source = write_rows(
        folder / "t.jsonl", *[{"messages": chat("why " + "so " * (i % 5) + str(i))} for i in range(prompts)]
    )
    cfg = config(folder / "data", saved, [source], heldout_fraction=0.0)
    prepare(cfg, Console(file=io.StringIO()))
    return cfg


def run(cfg: Config) -> str:
    printed = io.StringIO()
    regenerate(cfg, Console(file=printed, width=300))
    return printed.getvalue()


def replies(cfg: Config) -> dict[str, Any]:
    rows = read_rows(Path(cfg.data.folder) / "replies.jsonl")
    by_id = {row["id"]: row for row in rows}
    assert len(by_id) == len(rows)  # none twice
    return by_id


def test_every_prompt_has_the_targets_own_reply(tmp_path: Path, saved: str) -> None:
    cfg = prepared(tmp_path, saved, 9)
    printed = run(cfg)
    made = replies(cfg)
    prompts = {row["id"]: row["prompt_ids"] for row in read_rows(tmp_path / "data" / "train.jsonl")}
    assert {id: row["prompt_ids"] for id, row in made.items()} == prompts
    for row in made.values():
        assert set(row) == {"id", "category", "prompt_ids", "reply_ids", "finish", "looped"}
        assert row["finish"] == ("eos" if row["reply_ids"][-1] == 2 else "length")
    assert "9 of 9 train prompts to answer" in printed
    tokens = sum(len(row["reply_ids"]) for row in made.values())
    assert f"9 replies, {tokens} tokens" in printed
    assert "all 9 train prompts" in run(cfg)
    assert replies(cfg) == made


def test_kill_in_the_middle(tmp_path: Path, saved: str) -> None:
    """Killed after a few replies, then run again: the same rows, once each, as a run that nobody killed."""
    cfg = prepared(tmp_path / "killed", saved, 120)
    path = Path(cfg.data.folder) / "replies.jsonl"
    command = [sys.executable, "-m", "data.regenerate", "+experiment=smollm2_cpu"]
    command += [f"target.name={saved}", "target.dtype=float32", "target.device=cpu"]
    command += [f"data.folder={cfg.data.folder}", "regenerate.max_new_tokens=24", "regenerate.batch_size=2"]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while child.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < 5):
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    said = child.communicate()[0].decode()
    kept = path.read_bytes() if path.exists() else b""
    assert 5 <= kept.count(b"\n") < 120, said
    run(cfg)
    finished = kept[: kept.rfind(b"\n")].split(b"\n")
    assert set(finished) <= set(path.read_bytes().split(b"\n"))  # what was finished is not made again
    other = prepared(tmp_path / "whole", saved, 120)
    run(other)
    assert path.read_bytes() == (Path(other.data.folder) / "replies.jsonl").read_bytes()


def test_torn_line_is_answered_again(tmp_path: Path, saved: str) -> None:
    cfg = prepared(tmp_path, saved, 6)
    run(cfg)
    whole = replies(cfg)
    path = tmp_path / "data" / "replies.jsonl"
    os.truncate(path, path.stat().st_size - 10)
    assert "1 of 6 train prompts to answer" in run(cfg)
    assert replies(cfg) == whole


def test_more_prompts_are_fine_and_fewer_cost_nothing(tmp_path: Path, saved: str) -> None:
    cfg = prepared(tmp_path, saved, 6)
    cfg.regenerate.max_prompts = 2
    run(cfg)
    first = replies(cfg)
    assert (
        list(first) == [row["id"] for row in read_rows(tmp_path / "data" / "train.jsonl")[:2]]
        or len(first) == 2
    )
    cfg.regenerate.max_prompts = None
    assert "4 of 6 train prompts to answer" in run(cfg)
    assert first.items() <= replies(cfg).items()
    cfg.regenerate.max_prompts = 3
    assert "nothing to do" in run(cfg)


def test_prompts_that_were_answered_under_another_id_are_not_asked_again(tmp_path: Path, saved: str) -> None:
    first, second = (
        write_rows(
            tmp_path / f"{name}.jsonl",
            *[{"id": f"{i}", "messages": chat(f"why {name} {i}")} for i in range(3)],
        )
        for name in ("one", "two")
    )
    cfg = config(tmp_path / "data", saved, [first], heldout_fraction=0.0)
    for sources, told in (([first], "3 of 3"), ([first, second], "3 of 6")):
        cfg.data.sources = config(tmp_path / "data", saved, sources).data.sources
        prepare(cfg, Console(file=io.StringIO()))
        assert f"{told} train prompts to answer" in run(cfg)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("max_new_tokens", 25, "max_new_tokens was 24, now 25"),
        ("temperature", 0.5, r"temperature was 0\.0, now 0\.5"),
        ("server", "http://localhost:1", "server_model was None, now m"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, saved: str, field: str, value: Any, told: str) -> None:
    cfg = prepared(tmp_path, saved, 3)
    run(cfg)
    before = (tmp_path / "data" / "replies.jsonl").read_bytes()
    setattr(cfg.regenerate, field, value)
    cfg.regenerate.server_model = "m"
    with pytest.raises(TrafficError, match=rf"made otherwise: .*{told}.*remove replies\.jsonl"):
        run(cfg)
    assert (tmp_path / "data" / "replies.jsonl").read_bytes() == before


def test_other_target_is_refused(tmp_path: Path, saved: str) -> None:
    """Another seed, the same tokenizer: only the weights' fingerprint tells them apart."""
    cfg = prepared(tmp_path, saved, 3)
    run(cfg)
    other = tiny_target(seed=1)
    other.model.save_pretrained(tmp_path / "other")
    other.tokenizer.save_pretrained(tmp_path / "other")
    cfg.target.name = str(tmp_path / "other")
    with pytest.raises(TrafficError, match=r"made otherwise: fingerprint was [0-9a-f]{12}, now [0-9a-f]{12}"):
        run(cfg)
    with pytest.raises(TrafficError, match="written by another target"):
        load_token_rows(cfg, Target.load(cfg.target))


def test_folder_prepared_for_another_template_is_refused(tmp_path: Path, saved: str) -> None:
    cfg = prepared(tmp_path, saved, 3)
    other = tiny_target()
    other.tokenizer.chat_template += "{# changed #}"
    other.model.save_pretrained(tmp_path / "other")
    other.tokenizer.save_pretrained(tmp_path / "other")
    cfg.target.name = str(tmp_path / "other")
    with pytest.raises(
        TrafficError, match=r"prepared with another template.*Run python -m data\.prepare again"
    ):
        run(cfg)


def test_sampled_replies_resume_to_the_same(tmp_path: Path, saved: str) -> None:
    """A row's random stream is its own, so half of them answered in another run changes nothing."""
    halves, whole = prepared(tmp_path / "halves", saved, 8), prepared(tmp_path / "whole", saved, 8)
    for cfg in (halves, whole):
        cfg.regenerate.temperature = 0.9
    halves.regenerate.max_prompts = 4
    run(halves)
    halves.regenerate.max_prompts = None
    run(halves)
    run(whole)
    assert replies(halves) == replies(whole)


def test_windows_sort_by_length_within_themselves() -> None:
    rows = [{"prompt_ids": [0] * n} for n in (3, 1, 2, 9, 1)]
    assert [len(row["prompt_ids"]) for row in in_windows(iter(rows), 3)] == [1, 2, 3, 1, 9]


def test_replies_become_token_rows(tmp_path: Path, saved: str) -> None:
    """Prompt and reply exactly as generated, trained on the reply alone."""
    cfg = prepared(tmp_path, saved, 4)
    run(cfg)
    made = replies(cfg)
    for row in load_token_rows(cfg, Target.load(cfg.target), Console(file=io.StringIO())):
        prompt, reply = made[row.id]["prompt_ids"], made[row.id]["reply_ids"]
        assert row.input_ids == prompt + reply
        assert row.loss_mask == [0] * len(prompt) + [1] * len(reply)
