"""transformers' own greedy `generate`, the yardstick for "the target's own output"."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from transformers import GenerationConfig

from models.target import Target


@torch.inference_mode()
def generate(
    target: Target, prompt: Sequence[int], max_new_tokens: int, repetition_penalty: float = 1.0
) -> tuple[list[int], float]:
    """(new tokens, the end token included; seconds).

    The model's generation defaults are set aside while it runs: a repetition penalty of theirs would make
    another law of it.
    """
    ids = torch.tensor([list(prompt)], device=target.device)
    ends = sorted(target.eos_ids)
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        repetition_penalty=repetition_penalty,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
    )
    defaults, target.model.generation_config = target.model.generation_config, GenerationConfig()
    began = time.perf_counter()
    try:
        output = target.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    finally:
        target.model.generation_config = defaults
    return output[0, ids.shape[1] :].tolist(), time.perf_counter() - began
