"""A tiny target whose text can be learnt, rows that a target wrote itself, and a clean accelerate for every
test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from data.tokens import TokenRow
from models.target import Target
from tests.conftest import tiny_target

# What a logged line says of time and machine: no two runs agree on it.
COSTS = ("seconds", "tokens_per_s", "seconds_per_step", "data_wait", "tflops", "mfu", "peak_memory_mb")


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its settings in singletons, which would leak from one test into the next."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def counting_target(dtype: torch.dtype = torch.float32) -> Target:
    """A target that mostly counts in sevens (token i is followed by i + 7 modulo 64), and whose layers
    disturb it.

    Large embeddings outweigh the random layers, and the head reads token i + 7 where it finds the embedding
    of i.
    """
    target = tiny_target(layers=2, initializer_range=0.2)
    embedding = target.embedding
    with torch.no_grad():
        embedding.mul_(10)
        target.head.weight[(torch.arange(64) + 7) % 64] = embedding
    return Target.wrap(target.model.to(dtype), target.tokenizer, name="counting")


def written_rows(
    target: Target, count: int, prompt: int = 6, reply: int = 24, seed: int = 0
) -> list[TokenRow]:
    """Random prompts of `prompt` tokens and the target's greedy replies of `reply` tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, target.vocab_size, (count, prompt), generator=generator)
    for _ in range(reply):
        logits = target.forward(ids).logits
        assert logits is not None
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return [TokenRow(str(i), "tiny", row, [0] * prompt + [1] * reply) for i, row in enumerate(ids.tolist())]


def write_workspace(folder: Path) -> list[str]:
    """The counting target and its prepared traffic on disk; the overrides that train a tiny draft on it, in
    seconds."""
    target = counting_target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    data = folder / "data"
    written = written_rows(target, count=40)
    train, heldout = written[:32], written[32:]
    write_rows(data / "train.jsonl", [prompt(row) for row in train])
    write_rows(data / "heldout.jsonl", [prompt(row) for row in heldout])
    write_rows(data / "replies.jsonl", [prompt(row) | reply(row) for row in train])
    return [
        "+experiment=smollm2_cpu",
        f"runs={folder / 'runs'}",
        f"target.name={folder / 'target'}",
        "target.dtype=float32",
        "target.device=cpu",
        f"data.folder={data}",
        "data.max_prompt_tokens=16",
        "regenerate.max_new_tokens=24",
        "data.max_length=64",
        "method.network.draft_vocab_size=60",
        "method.objective.steps=3",
        "trainer.batch_tokens=256",  # four rows of 30 tokens, padded to 64: 8 micro-batches an epoch
        "trainer.epochs=2",
        "trainer.optimizer=adamw",
        "trainer.lr=1e-2",
        "trainer.log_every=1",
        "trainer.save_every=4",
        "trainer.eval_every=6",
        "trainer.eval_prompts=3",
        "trainer.eval_new_tokens=8",
        "decode.draft_tokens=3",
    ]


def prompt(row: TokenRow) -> dict[str, Any]:
    return {"id": row.id, "category": row.category, "messages": [], "prompt_ids": row.input_ids[:6]}


def reply(row: TokenRow) -> dict[str, Any]:
    return {"reply_ids": row.input_ids[6:], "finish": "length", "looped": False}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    return write_workspace(tmp_path)


def poisoned(monkeypatch: pytest.MonkeyPatch, module: ModuleType, token: int) -> None:
    """`module.compute` gives rows with `token` in them a NaN."""
    original = module.compute

    def compute(target: Target, rows: list[TokenRow], taps: tuple[int, ...]) -> Any:
        found = original(target, rows, taps)
        for row, feature in zip(rows, found, strict=True):
            if token in row.input_ids:
                feature.taps[0, 0] = torch.nan
        return found

    monkeypatch.setattr(module, "compute", compute)


def many_rows(bad: int) -> list[TokenRow]:
    """200 rows, the first `bad` of them with token 63."""
    return [TokenRow(str(i), "", [63 if i < bad else 5, 6, 7, 8], [0, 1, 1, 1]) for i in range(200)]
