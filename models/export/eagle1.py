"""EAGLE-1 for vLLM and SGLang: the authors' tensor names, with a plain Llama config.

Read from vLLM 0.32 (`model_executor/models/llama_eagle.py`) and SGLang 0.5.23 (`srt/models/llama_eagle.py`).
Embedding and head are the target's in both. Where they disagree or fall silent, this file decides:

- `fc.bias`: vLLM has none and passes over one without a word, so a draft trained with it is refused. SGLang
  always has one, random unless it is loaded, so zeros are written where the draft has none.
- The class: vLLM puts `Eagle` before the architecture's name, SGLang looks `LlamaForCausalLMEagle` up.
- No `bias` in config.json, as the authors' own have it (models/export/llama.py).
- The head is the target's whole one, also for a draft that was trained on rows of it: the same weights then
  propose from all of them. SGLang can take rows, but from a pickled file only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from models.eagle1 import Eagle1, Eagle1Shape
from models.export.agreement import same
from models.export.layout import Layout
from models.export.llama import (
    Reason,
    check_embedding,
    check_length,
    check_order,
    check_rope,
    check_tokens,
    layer_config,
    refuse_for,
    sglang_command,
    starts,
    tensors_of,
    unlike_sglang,
    unverifiable,
    vllm_command,
)
from models.export.reference import Eagle1Reading
from models.target import Target

STEPS = 3  # recurrent draft steps compared
ROWS = 6  # positions in the first of them


def as_served(draft: Eagle1) -> Eagle1:
    """The draft as engines run it: they know no part of the vocabulary."""
    return draft.over_whole_vocabulary()


def vllm(draft: Eagle1, target: Target) -> Layout:
    whole = as_served(draft)
    config = {"architectures": ["LlamaForCausalLM"], **layer_config(whole.shape, whole, target)}
    note = (
        f"the draft chose among {draft.shape.draft_vocab_size} tokens where it was trained and measured, and "
        "proposes from the target's whole head here: acceptance may be a little higher, and a drafted token "
        "costs more"
    )
    return Layout(tensors_of(whole), config, None if draft.full_vocabulary else note)


def sglang(draft: Eagle1, target: Target) -> Layout:
    made = vllm(draft, target)
    bias = {"fc.bias": torch.zeros_like(draft.fc.weight[:, 0])}
    config = made.config | {"architectures": ["LlamaForCausalLMEagle"]}
    return Layout(bias | made.tensors, config, made.needs)


LAYOUTS: dict[str, Callable[[Eagle1, Target], Layout]] = {"vllm": vllm, "sglang": sglang}


def serve(engine: str, target: str, folder: Path, draft_tokens: int) -> str:
    """The command that serves the target with this draft."""
    if engine == "vllm":
        return vllm_command("eagle", target, folder, draft_tokens)
    return sglang_command("EAGLE", target, folder, draft_tokens)


def refuse(engine: str, draft: Eagle1) -> None:
    """Raises `CheckpointError` with every reason why `engine` would serve this draft as another network."""
    shape: Eagle1Shape = draft.shape
    reasons: list[Reason] = [
        *unverifiable(shape),
        (
            shape.bias and engine == "vllm",
            "vLLM drops the bias of fc without a word",
            "method.network.bias=false",
        ),
        *(unlike_sglang(shape) if engine == "sglang" else []),
    ]
    refuse_for(engine, reasons)


@torch.no_grad()
def check(folder: Path, draft: Eagle1, target: Target) -> None:
    """Reads `folder` by names and config alone and compares it with `draft`; raises `RuntimeError` where they
    differ.

    In float32, over recurrent steps, from the first position and from a far one, with random features and
    tokens.
    """
    trained = in_float32(as_served(draft), target)
    reading = Eagle1Reading(folder, trained.embedding, target.head.weight.to("cpu", torch.float32))
    check_tokens(folder, reading, target)
    check_embedding(reading, trained)
    check_rope(reading.config, trained)
    check_length(reading.config, trained)
    check_order(reading, trained.fc.weight, ["the embedding", "the feature"])
    for start in starts(trained.shape, ROWS + STEPS):
        check_steps(reading, trained, start)
    reading.finish()


def in_float32(draft: Eagle1, target: Target) -> Eagle1:
    """The draft on the CPU with its weights, and the target's head, widened."""
    wide = Eagle1(draft.shape, target.embedding.to("cpu", torch.float32)).eval()
    head = nn.Linear(target.hidden_size, target.vocab_size, target.head.bias is not None, device="meta")
    for name, weight in target.head.named_parameters():
        setattr(head, name, nn.Parameter(weight.detach().to("cpu", torch.float32), requires_grad=False))
    wide.read_by(head).load_state_dict(draft.state_dict())
    return wide


def check_steps(reading: Eagle1Reading, trained: Eagle1, start: int) -> None:
    """Each step appends the feature predicted by the last row as the next row, as a chain is drafted."""
    generator = torch.Generator().manual_seed(start)
    theirs = ours = torch.randn(ROWS, trained.shape.target_hidden_size, generator=generator)
    tokens = torch.randint(len(trained.embedding), (ROWS + STEPS,), generator=generator)
    positions = torch.arange(start, start + ROWS + STEPS)
    for rows in range(ROWS, ROWS + STEPS):
        logits, state = reading.forward(theirs, tokens[:rows], positions[:rows])
        expected = trained(ours[None], tokens[None, :rows], positions[None, :rows])[0]
        where = f"at position {start + rows - 1}, draft step {rows - ROWS + 1}"
        same(state, expected, f"predicted features {where}")
        same(logits, trained.logits(expected), f"logits {where}")
        theirs, ours = torch.cat([theirs, state[-1:]]), torch.cat([ours, expected[-1:]])
