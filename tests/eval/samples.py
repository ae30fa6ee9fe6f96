"""Measured pairs small enough to check by hand, and a whole measurement made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from eval.measure import SCHEMA, results
from eval.rows import Conditions, Divergence, Pair, Round, Run
from models.checkpoint import save_draft
from tests.conftest import tiny_draft, tiny_target

CONDITIONS = Conditions(
    method="eagle3",
    dtype="float32",
    draft_tokens=2,
    proposal="sampled",
    top_k=0,
    top_p=1.0,
    confidence=0.95,
    resamples=500,
    seed=0,
)


def plain_run(tokens: list[int], step: float = 1.0) -> Run:
    """The first token after one `step` of prefill, each other after one more."""
    rounds = [Round(0, 0, 1, 0, 0, 0.9 * step, 0.0, step) for _ in tokens[1:]]
    times = [step * (i + 1) for i in range(len(tokens))]
    return Run(tokens, "length", times[-1], step, times, rounds, peak_memory_mb=100.0)


def draft_run(tokens: list[int], accepted: list[int], seconds: float = 1.5) -> Run:
    """Prefill of 1 s, then rounds of `seconds` that drafted 2 tokens each: 1 s in the target, 0.4 s in the
    draft."""
    rounds = [Round(2, a, a + 1, 2, min(a + 1, 2), 1.0, 0.4, seconds) for a in accepted]
    times = [1.0 + seconds * i for i in range(len(accepted) + 1)]
    return Run(tokens, "length", times[-1], 1.0, times, rounds, peak_memory_mb=120.0)


def pair(prompt: str, plain: Run, draft: Run, **changes: Any) -> Pair:
    values = {
        "prompt": prompt,
        "category": "maths",
        "prompt_tokens": 10,
        "temperature": 0.0,
        "repeat": 0,
        "first": "plain",
        "plain": plain,
        "draft": draft,
    }
    return Pair(**{**values, **changes})


def two_pairs() -> list[Pair]:
    """A: 5 tokens in rounds that accept 2 and 1; B: 4 tokens in rounds that accept 0 and 1, diverging at its
    last."""
    return [
        pair("A", plain_run([1, 2, 3, 4, 5, 6]), draft_run([1, 2, 3, 4, 5, 6], [2, 1])),
        pair(
            "B",
            plain_run([7, 8, 9, 10]),
            draft_run([7, 8, 9, 11], [0, 1]),
            category="<b>code</b> & $more$",
            prompt_tokens=200,
            divergence=Divergence(index=3, gap=0.25, plain=10, draft=11),
        ),
    ]


def measurement(pairs: list[Pair] | None = None, **changes: Any) -> dict[str, Any]:
    made = {
        "schema": SCHEMA,
        "created": "2026-11-30T12:00:00+00:00",
        "git": {"commit": "a" * 40, "dirty": True},
        "hardware": {"cpu": "Some <CPU>", "cores": 2, "threads": 2, "memory_gb": 24.0, "gpu": None},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.24.0"},
        "load": {
            "average_before": [0.1, 0.2, 0.3],
            "others_before": 0.02,
            "others_during": 0.01,
            "limit": 0.5,
            "busy": False,
        },
        "target": {
            "name": "some/Target",
            "revision": None,
            "gguf_file": None,
            "fingerprint": "f" * 64,
            "tokenizer_fingerprint": "e" * 64,
            "dtype": "float32",
            "device": "cpu",
            "attention": "sdpa",
        },
        "draft": {
            "folder": "runs/x/draft",
            "method": "eagle3",
            "sha256": "0" * 64,
            "parameters": 1000,
            "training": None,
        },
        "traffic": {
            "folder": "data/x",
            "files": {"train.jsonl": "1" * 64, "heldout.jsonl": "2" * 64},
            "measured": {"maths": 1, "code": 1},
            "heldout": {"maths": 1, "code": 1},
            "train_prompts": 20,
            "disjoint": {"by": "SHA-256 of the prompt's token ids", "shared": 0},
        },
        "config": {"seed": 0},
        **results(two_pairs() if pairs is None else pairs, CONDITIONS),
    }
    return {**made, **changes}


# Folders and shapes


def tiny_pair(folder: Path, run: Path) -> None:
    """A target in `folder`/target and an untrained draft of it in `run` below `folder`/runs."""
    target = tiny_target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    save_draft(folder / "runs" / run / "draft", tiny_draft(target), target, {})


def llama(
    hidden: int,
    layers: int,
    heads: int,
    intermediate: int,
    vocab: int = 128_256,
    heads_shared: int = 8,
    tied: bool = False,
) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads_shared,
        intermediate_size=intermediate,
        vocab_size=vocab,
        tie_word_embeddings=tied,
    )


LLAMA_8B = llama(4096, 32, 32, 14_336)
LLAMA_70B = llama(8192, 80, 64, 28_672)
