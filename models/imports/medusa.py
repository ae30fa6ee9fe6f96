"""Medusa's heads as their authors and vLLM write them.

    the authors (`medusa_lm_head.pt` or .safetensors)    vLLM                              here
    {head}.{i}.linear.weight, .bias                      blocks.{head}.layers.{i}.*        as vLLM
    {head}.{layers}.weight                               lm_heads.{head}.weight            as vLLM

Heads and layers are counted in the tensors, and a config.json that says otherwise is noted. A residual block
without a bias has one of zero. vLLM's `token_map` names the ids of a head over fewer tokens (of one over all,
which rows are used); without it those are the first ones. Read from FasterDecoding/Medusa
`medusa/model/medusa_model.py` and vLLM 0.32 `model_executor/models/medusa.py`.
"""

from __future__ import annotations

import re

import torch

from configs.errors import CheckpointError
from configs.schema import ImportsConfig
from models.imports.folder import Published
from models.imports.network import Draft, with_vocabulary
from models.target import Target

PREFIX = re.compile(r"^(medusa_heads?\.)")
THEIRS = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
THEIR_HEAD = re.compile(r"(\d+)\.(\d+)\.weight")
BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")


def recognises(published: Published) -> bool:
    return "blocks.0.layers.0.weight" in {renamed(name) for name in published.names}


def read(published: Published, target: Target, choices: ImportsConfig) -> Draft:
    notes: list[str] = []
    state = {renamed(name): tensor for name, tensor in published.tensors.items()}
    blocks = [match for name in state if (match := BLOCK.fullmatch(name))]
    heads, layers = (1 + max(int(match[i]) for match in blocks) for i in (1, 2))
    config = published.config
    named = config.get("medusa_num_heads", config.get("num_heads", heads))
    if named != heads:
        notes.append(f"has {heads} heads, of which config.json names {named}")
    for match in blocks:
        name = match[0].removesuffix("weight") + "bias"
        state.setdefault(name, torch.zeros(len(state[match[0]])))
    projections = [name for name in state if name.startswith("lm_heads.")]
    if not projections:
        raise CheckpointError(
            f"{published.folder}: lm_heads.0.weight is missing. Heads without a projection read with the "
            "target's, which Leadout's Medusa has a copy of: ask for the draft with its projections."
        )
    rows = len(state[projections[0]])
    vocab_size = config.get("vocab_size", rows)  # the authors' config.json has none: heads are whole
    ids = state.pop("token_map", torch.arange(rows)).long()
    if len(ids) < rows:
        rows = len(ids)
        state |= {name: state[name][ids] for name in projections}
    with_vocabulary(state, ids, projections, vocab_size, notes)
    width = state["blocks.0.layers.0.weight"].shape[1]
    shared = len(projections) < heads or bool(config.get("original_lm_head"))
    network = {
        "hidden_size": width,
        "target_hidden_size": width,
        "vocab_size": vocab_size,
        "draft_vocab_size": rows,
        "heads": heads,
        "layers": layers,
        "projection": "shared" if shared else "own",
        "tap": target.num_layers,
    }
    return Draft("medusa", network, state, None, notes)


def renamed(name: str) -> str:
    """vLLM's name, which is Leadout's, of a tensor under any."""
    name = PREFIX.sub("", name)
    if match := THEIRS.fullmatch(name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    if match := THEIR_HEAD.fullmatch(name):
        return f"lm_heads.{match[1]}.weight"
    return name
