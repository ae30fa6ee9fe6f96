"""EAGLE-3 as its authors, SpecForge, SGLang, Model-Optimizer, vLLM and `speculators` write it.

Names: `midlayer.*` (the authors, SpecForge, SGLang) and `layers.0.*` (vLLM, speculators, Model-Optimizer) are
the same layer. Read from SafeAILab/EAGLE `eagle/model/cnets.py`, vLLM 0.32 `llama_eagle3.py` and
`speculators/algos.py`, SGLang 0.5.23 `llama_eagle3.py`, speculators 0.9, Model-Optimizer 0.47.

Model-Optimizer trains a little else than its files say: layer 0 norms g by `input_layernorm` before
`hidden_norm`, and nothing scales the rotary embedding (`note_scaling`). Read here is what engines serve.

Which layers are tapped (`tapped_layers`) and whether the residual is the normed state
(`normed_residual`) is not in the tensors, and toolkits mean different things by the same words.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

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
    target_head,
    with_vocabulary,
    without_derived,
)
from models.target import Target


def recognises(published: Published) -> bool:
    if published.speculators:
        return published.speculators == "eagle3"
    first = ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
    return not published.names.isdisjoint(first)


def read(published: Published, target: Target, choices: ImportsConfig) -> Draft:
    notes: list[str] = []
    return from_tensors(published, without_derived(published.tensors, notes), target, choices, notes)


def from_tensors(
    published: Published,
    tensors: Mapping[str, Tensor],
    target: Target,
    choices: ImportsConfig,
    notes: list[str],
    method: str = "eagle3",
) -> Draft:
    """The draft in `tensors`; those of a `method` that has more keep their names."""
    state = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in tensors.items()}
    config, layers = published.config, layer_config(published)
    note_window(layers, notes)
    embedding = own_embedding(state, layers.hidden_size, published, target, choices, notes)
    d2t, t2d = state.pop("d2t", None), state.pop("t2d", None)
    if "lm_head.weight" not in state and d2t is None:  # SGLang, where draft_vocab_size is null
        state["lm_head.weight"] = target_head(published, target, notes)
    if "lm_head.weight" not in state:
        raise CheckpointError(f"{published.folder}: lm_head.weight is missing. Fetch the draft again.")
    if d2t is not None:
        ids = draft_vocabulary(d2t, t2d, layers.vocab_size, published, notes)
        with_vocabulary(state, ids, ["lm_head.weight"], layers.vocab_size, notes)
    # The target's width is the file's word for it; without one, drafts are as wide as their target.
    width = config.get("target_hidden_size") or layers.hidden_size
    flags = {flag: bool(config.get(flag, False)) for flag in ("norm_before_fc", "fc_norm", "norm_output")}
    inner = config.get("eagle_config") or {}
    if "norm_before_fc" in inner:  # where vLLM looks first
        flags["norm_before_fc"] = bool(inner["norm_before_fc"])
    network = layer_fields(layers, width, len(state["lm_head.weight"])) | {
        "taps": tapped_layers(published, state.get("fc.weight"), width, target, choices, notes),
        "norm_before_residual": normed_residual(published, choices, notes),
        **flags,
    }
    note_scaling(inner, network["rope_parameters"]["rope_type"], notes)
    return Draft(method, network, state, embedding, notes)


def note_scaling(inner: Mapping[str, object], kind: str, notes: list[str]) -> None:
    """Model-Optimizer trains without a scaled rotary embedding and writes one into config.json
    (`eagle_export_rope_scaling`, YaRN by default), by which every engine then turns. So does Leadout."""
    if "use_last_layernorm" in inner and kind != "default":
        notes.append(
            f"turned by {kind} as in config.json and in engines, which Model-Optimizer writes over a draft "
            "trained without; with rope_scaling null there it is measured as it was trained"
        )


def normed_residual(published: Published, choices: ImportsConfig, notes: list[str]) -> bool:
    """`norm_before_residual`: as config.json says, else false; but true in an EAGLE-3 folder of `speculators`
    that does not say, as vLLM reads it (`configs/speculators/algos.py`)."""
    if choices.norm_before_residual is not None:
        notes.append(f"norm_before_residual={choices.norm_before_residual} as asked for")
        return choices.norm_before_residual
    written = published.config.get("norm_before_residual")
    if written is None and published.speculators == "eagle3":
        notes.append("norm_before_residual=true, which config.json of speculators means by its silence")
        return True
    return bool(written)


def tapped_layers(
    published: Published,
    fc: Tensor | None,
    width: int,
    target: Target,
    choices: ImportsConfig,
    notes: list[str],
) -> list[int]:
    """The taps as HF hidden_states indices. `imports.taps` overrides what follows.

    Top-level `eagle_aux_hidden_state_layer_ids` are such indices already (vLLM, speculators, llama.cpp);
    those in `eagle_config` name the layers whose outputs are meant, one less (SGLang, SpecForge,
    Model-Optimizer). Where both stand, the top-level ones count, and the others must agree in one of the two
    meanings. None: [2, N // 2, N - 3] of N layers, which everyone's default comes to.
    """
    count = fc.shape[1] // width if fc is not None else 3
    inner = published.config.get("eagle_config") or {}
    if inner.get("use_aux_hidden_state") is False:
        raise CheckpointError(
            f"{published.folder / CONFIG}: use_aux_hidden_state is false. Such a draft reads the target's "
            "last hidden state alone, which Leadout's EAGLE-3 cannot."
        )
    name = "eagle_aux_hidden_state_layer_ids"
    ids, outputs = published.config.get(name), inner.get(name)
    n = target.num_layers
    if choices.taps is not None:
        taps, why = list(choices.taps), "as asked for"
    elif ids and outputs and ids not in (outputs, [layer + 1 for layer in outputs]):
        raise CheckpointError(
            f"{published.folder / CONFIG} names {ids} at the top and {outputs} in eagle_config, which agree "
            "in no convention. Convert the draft with python -m models.imports and imports.taps=[...], the "
            "HF hidden_states indices it was trained on."
        )
    elif ids:
        taps, why = list(ids), "hidden_states indices in config.json"
    elif outputs:
        taps, why = [layer + 1 for layer in outputs], f"the outputs of layers {outputs} in eagle_config"
    elif count == 3:
        taps, why = [2, n // 2, n - 3], "the default, since config.json names none"
    else:
        raise CheckpointError(
            f"{published.folder}: fc.weight reads {count} layers of the target, and config.json does not say "
            "which. Convert the draft with python -m models.imports and imports.taps=[...]."
        )
    if len(taps) != count:
        raise CheckpointError(
            f"{published.folder}: {len(taps)} taps are named, {taps}, and fc.weight reads {count} vectors of "
            f"{width}. Set imports.taps to as many as were trained on, or name the target that the draft was "
            "made for."
        )
    notes.append(f"taps {taps}: {why}")
    return taps
