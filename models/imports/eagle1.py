"""EAGLE-1 as its authors and `speculators` write it.

The authors' tensors have the network's own names (SafeAILab/EAGLE `eagle/model/cnets1.py`); `speculators`
calls `fc` `fusion_fc` and `layers.0` `transformer`. Whether fc has a bias is in the tensors; config.json's
`bias` (true where it is silent) says the same. Embedding and head are the target's.
"""

from __future__ import annotations

from configs.errors import CheckpointError
from configs.schema import ImportsConfig
from models.imports.folder import Published
from models.imports.network import (
    Draft,
    draft_vocabulary,
    layer_config,
    layer_fields,
    own_embedding,
    rows_apart,
    with_vocabulary,
    without_derived,
)
from models.target import Target

RENAMED = {"fusion_fc.": "fc.", "transformer.": "layers.0."}


def recognises(published: Published) -> bool:
    if published.speculators:
        return published.speculators == "eagle"
    return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= published.names


def read(published: Published, target: Target, choices: ImportsConfig) -> Draft:
    notes: list[str] = []
    state = {renamed(name): tensor for name, tensor in without_derived(published.tensors, notes).items()}
    layers = layer_config(published)
    if published.config.get("layernorms"):
        raise CheckpointError(
            f"{published.folder}: layernorms is true. Such drafts (HASS) have norms that Leadout's EAGLE-1 "
            "has not, so this one cannot be measured here."
        )
    embedding = own_embedding(state, layers.hidden_size, published, target, choices, notes)
    head = state.pop("lm_head.weight", None)
    if head is not None and (head.shape != target.head.weight.shape or rows_apart(head, target.head.weight)):
        raise CheckpointError(
            f"{published.folder} has another head than {target.name}, and EAGLE-1 reads with the target's. "
            "The draft was made for another target: name that one."
        )
    size = layers.vocab_size
    if (d2t := state.pop("d2t", None)) is not None:
        size = len(d2t)
        ids = draft_vocabulary(d2t, state.pop("t2d", None), layers.vocab_size, published, notes)
        with_vocabulary(state, ids, [], layers.vocab_size, notes)
    network = layer_fields(layers, layers.hidden_size, size) | {
        "bias": "fc.bias" in state,
        "tap": target.num_layers,
    }
    return Draft("eagle1", network, state, embedding, notes)


def renamed(name: str) -> str:
    for theirs, ours in RENAMED.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
