"""DFlash for vLLM: z-lab's names and config, with a head, a vocabulary and a mask of the draft's own.

Read from vLLM 0.32 (`model_executor/models/qwen3_dflash.py`). `target_layer_ids` name layers by their
outputs, one less than HF's hidden_states. vLLM looks a masked token's embedding up in the draft's own
`embed_tokens`, so the target's is written with the learnt vector in the row of an id that no text has. A
network is made for one block size, and vLLM runs as many rows as tokens are asked for, plus one: ask for
`block_size` - 1.

z-lab's own format, which SGLang, llama.cpp and OpenVINO read, has none of the three: its drafts propose
from the target's head and embed a masked token as the target does. The speculators library puts the target's
embedding over the draft's when it loads one. In all of them this draft would be another network.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from models.dflash import DFlash
from models.export.agreement import expect, same
from models.export.layout import Layout
from models.export.llama import (
    check_embedding,
    check_length,
    check_order,
    check_rope,
    check_tokens,
    check_vocabulary,
    in_float32,
    layer_config,
    mask_note,
    placeholder,
    refuse_for,
    starts,
    tensors_of,
    unverifiable,
    vllm_command,
    with_mask,
)
from models.export.reference import DFlashReading
from models.target import Target

ROWS = 6  # tokens read before a block


def vllm(draft: DFlash, target: Target) -> Layout:
    shape, mask = draft.shape, placeholder(target)
    tensors = tensors_of(draft)
    tensors["embed_tokens.weight"] = with_mask(target, mask, tensors.pop("mask_embedding"))
    config = {
        "architectures": ["DFlashDraftModel"],
        **layer_config(shape, draft, target),
        "model_type": "qwen3",
        "draft_vocab_size": shape.draft_vocab_size,
        "num_target_layers": target.num_layers,
        "block_size": shape.block_size,
        "dflash_config": {
            "mask_token_id": mask,
            "target_layer_ids": [tap - 1 for tap in shape.taps],
            "causal": False,
        },
    }
    asked = f"draft {draft.drafted} tokens a round: blocks are of {shape.block_size} rows"
    return Layout(tensors, config, f"{asked}; {mask_note(target, mask)}")


LAYOUTS: dict[str, Callable[[DFlash, Target], Layout]] = {"vllm": vllm}


def serve(engine: str, target: str, folder: Path, draft_tokens: int) -> str:
    """The command that serves the target with this draft, whatever `draft_tokens` is: a whole block."""
    size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["block_size"]
    return vllm_command("dflash", target, folder, size - 1)


def refuse(engine: str, draft: DFlash) -> None:
    """Raises `CheckpointError` with every reason why `engine` would serve this draft as another network."""
    first = "vLLM names tapped layers by their outputs, and hidden_states[0] is none"
    refuse_for(
        engine, [*unverifiable(draft.shape), (0 in draft.shape.taps, first, "method.network.taps=null")]
    )


@torch.no_grad()
def check(folder: Path, draft: DFlash, target: Target) -> None:
    """Reads `folder` by names and config alone and compares it with `draft`; raises `RuntimeError` where they
    differ. In float32, a block behind the first tokens and one behind far ones."""
    trained: DFlash = in_float32(draft, target)
    reading = DFlashReading(folder, trained.embedding)
    check_tokens(folder, reading, target)
    check_embedding(reading, trained, mask=reading.config["dflash_config"]["mask_token_id"])
    check_vocabulary(reading, trained)
    check_rope(reading.config, trained)
    check_length(reading.config, trained)
    taps, size = reading.taps(), reading.config["block_size"]
    expect(
        taps == trained.shape.taps,
        f"vLLM would tap hidden_states {taps}, and the draft reads {trained.shape.taps}",
    )
    expect(
        size == trained.shape.block_size,
        f"its blocks are of {size} rows, and the draft's of {trained.shape.block_size}",
    )
    check_order(reading, trained.fc.weight, [f"hidden_states[{tap}]" for tap in trained.taps])
    for start in starts(trained.shape, ROWS + size):
        check_block(reading, trained, start)
    reading.finish()


def check_block(reading: DFlashReading, trained: DFlash, start: int) -> None:
    """The masked rows of a block behind ROWS tokens give the same logits."""
    generator = torch.Generator().manual_seed(start)
    taps = torch.randn(ROWS, trained.shape.target_hidden_size * len(trained.taps), generator=generator)
    pending = 1 if reading.config["dflash_config"]["mask_token_id"] == 0 else 0
    context = trained.context(taps[None], torch.arange(start, start + ROWS)[None])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = context[layer]
        k, v = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    states = trained(torch.tensor([[pending]]), torch.tensor([[start + ROWS]]), attend)[0, 0, 1:]
    theirs = reading.block(taps, pending, start, trained.shape.block_size)
    same(theirs, trained.logits(states), f"logits of a block at position {start + ROWS}")
