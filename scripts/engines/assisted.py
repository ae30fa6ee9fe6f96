"""transformers' assisted generation (`assistant_model`) in this process, with the exported small model.

The assistant drafts exactly K tokens, which its defaults (a schedule, a confidence threshold) would change.
It drafts before the target has read the prompt, so the first round stands where others have their prefill.
Read from transformers 5.24 (`generation/candidate_generator.py`).
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from scripts.engines import Reply, Setting, counts_of, rounds_of


class AssistedEngine:
    name = "transformers"
    layout = "transformers"

    def versions(self) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in ("transformers", "torch")}

    @contextmanager
    def open(self, setting: Setting, speculate: bool) -> Iterator[AssistedServer]:
        target = plain_model(setting.target, setting.dtype)
        assistant = plain_model(setting.draft, setting.dtype) if speculate else None
        if assistant is not None:
            assistant.generation_config = GenerationConfig(
                num_assistant_tokens=setting.draft_tokens,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,
            )
        yield AssistedServer(target, assistant, setting)


def plain_model(folder: Path | str, dtype: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.generation_config = GenerationConfig()
    return model.eval()


@dataclass(frozen=True)
class AssistedServer:
    target: Any
    assistant: Any  # None: plain
    setting: Setting

    @torch.inference_mode()
    def complete(self, prompt: list[int], new_tokens: int) -> Reply:
        ids = torch.tensor([prompt])
        ends = list(self.setting.eos_ids)
        settings = GenerationConfig(
            do_sample=False, max_new_tokens=new_tokens, eos_token_id=ends, pad_token_id=ends[0]
        )
        with listening() as chains:
            began = time.perf_counter()
            output = self.target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=settings,
                assistant_model=self.assistant,
            )
            seconds = time.perf_counter() - began
        tokens: list[int] = output[0, len(prompt) :].tolist()
        if self.assistant is None:
            return Reply(tokens, seconds)
        proposed = rounds_of(tokens, chains, first=0)
        return Reply(tokens, seconds, counts_of(tokens, proposed, self.setting.draft_tokens), proposed)


@contextmanager
def listening() -> Iterator[list[list[int]]]:
    """Collects what the assistant proposes, round by round."""
    chains: list[list[int]] = []
    propose = AssistedCandidateGenerator.get_candidates

    def recorded(self: Any, input_ids: Any, *args: Any, **words: Any) -> Any:
        made = propose(self, input_ids, *args, **words)
        chains.append(made[0][0, input_ids.shape[1] :].tolist())
        return made

    AssistedCandidateGenerator.get_candidates = recorded
    try:
        yield chains
    finally:
        AssistedCandidateGenerator.get_candidates = propose
