"""DFlash as z-lab and `speculators` write it.

z-lab's `dflash_config.target_layer_ids` name layers whose outputs are read, one less than the hidden_states
index; `speculators`' `aux_hidden_state_layer_ids` are such indices. A masked token is embedded as the token
that `mask_token_id` names. Without a head of its own (z-lab) the draft reads with the target's, of which
Leadout's has a copy. Read from z-lab's `dflash` 0.1.0, speculators 0.9 and vLLM 0.32.
"""

from __future__ import annotations

from configs.errors import CheckpointError
from configs.schema import ImportsConfig
from models.checkpoint import CONFIG
from models.imports.folder import Published
from models.imports.network import (
    Draft,
    draft_vocabulary,
    layer_config,
    layer_fields,
    note_window,
    own_embedding,
    take_mask,
    target_head,
    with_vocabulary,
    without_derived,
)
from models.target import Target


def recognises(published: Published) -> bool:
    if published.speculators:
        return published.speculators == "dflash"
    return "dflash_config" in published.config


def read(published: Published, target: Target, choices: ImportsConfig) -> Draft:
    notes: list[str] = []
    config = published.config
    inner = config.get("dflash_config") or {}
    for flag, place in {"sample_from_anchor": config, "causal": inner}.items():
        if place.get(flag):
            raise CheckpointError(
                f"{published.folder / CONFIG}: {flag} is true. In Leadout's DFlash the first row of a block "
                "predicts nothing and rows see each other both ways, so this draft cannot be measured here."
            )
    layers = layer_config(published)
    note_window(layers, notes)
    state = without_derived(published.tensors, notes)
    state["mask_embedding"] = take_mask(state, published, ("mask_token_id",), target, notes)
    embedding = own_embedding(state, layers.hidden_size, published, target, choices, notes)
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = target_head(published, target, notes)
    t2d = state.pop("t2d", None)
    if (d2t := state.pop("d2t", None)) is not None:
        ids = draft_vocabulary(d2t, t2d, layers.vocab_size, published, notes)
        with_vocabulary(state, ids, ["lm_head.weight"], layers.vocab_size, notes)
    width = config.get("target_hidden_size") or layers.hidden_size
    network = layer_fields(layers, width, len(state["lm_head.weight"])) | {
        "block_size": config.get("block_size") or inner.get("block_size"),
        "taps": tapped_layers(published, choices, notes),
    }
    if network["block_size"] is None:
        raise CheckpointError(f"{published.folder / CONFIG} has no block_size. Fetch the draft again.")
    return Draft("dflash", network, state, embedding, notes)


def tapped_layers(published: Published, choices: ImportsConfig, notes: list[str]) -> list[int]:
    """The taps as HF hidden_states indices, in the order of `fc`."""
    config = published.config
    outputs = (config.get("dflash_config") or {}).get("target_layer_ids")
    indices = config.get("aux_hidden_state_layer_ids")
    if choices.taps is not None:
        taps, why = list(choices.taps), "as asked for"
    elif indices:
        taps, why = list(indices), "hidden_states indices in config.json"
    elif outputs:
        taps, why = [layer + 1 for layer in outputs], f"the outputs of layers {outputs} in dflash_config"
    else:
        raise CheckpointError(
            f"{published.folder / CONFIG} does not say which layers are read "
            "(dflash_config.target_layer_ids). Convert the draft with python -m models.imports and "
            "imports.taps=[...]."
        )
    notes.append(f"taps {taps}: {why}")
    return taps
