"""From a published config.json and its tensors to a network: what the families of drafts have in common.

Files that look alike mean different things, and no error shows which: a draft that is read by the wrong
convention merely accepts less. Each function here decides one such question by a rule that its docstring
states, and says what it decided in a note, which is printed. What no rule can decide, or would make another
network, is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from configs.errors import CheckpointError, ConfigError
from configs.schema import Embedding, ImportsConfig
from models.checkpoint import CONFIG, draft_class, refuse_nan
from models.imports.folder import Published
from models.layers import flat_rope
from models.target import Target

# Not weights: tables that follow from config.json, and the target's parts that a trainer kept beside them.
DERIVED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
BORROWED = ("verifier_lm_head.", "verifier_norm.")

ROUNDING = 2**-8  # of each value: bfloat16's, once more rounded
TINY = 1e-6  # float16 keeps fewer digits of what is smaller than 2**-14

REASONS = {
    "q_norm.weight": "norms of queries and keys",
    "k_norm.weight": "norms of queries and keys",
    "_proj.bias": "biases in attention and MLP",
}


@dataclass
class Draft:
    """A draft on its way: the method, its shape's fields, its tensors under Leadout's names."""

    method: str
    network: dict[str, Any]
    state: dict[str, Tensor]
    embedding: Tensor | None = None  # [V, d] of its own; None: the target's
    notes: list[str] = field(default_factory=list)  # how the files were read, one clause each


def build(draft: Draft, published: Published, target: Target) -> Any:
    """The network, float32, on the target's device. Raises `CheckpointError` for what does not fit."""
    where = published.folder
    try:
        network = draft_class(draft.method).from_config(draft.network, target)
        network.shape.check(target.num_layers)
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"{where / CONFIG}: {error}") from None
    refuse_misfit(draft.state, network.state_dict(), published, draft.method)
    refuse_nan(draft.state, str(where))
    network.load_state_dict(draft.state)
    if draft.embedding is not None:
        network.bring_embedding(draft.embedding.to(target.device, target.dtype))
    return network


def refuse_misfit(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], published: Published, method: str
) -> None:
    """Raises `CheckpointError` naming tensors that are missing, unknown, or of another shape."""
    unknown = [name for name in state if name not in expected]
    faults = [f"{name} is missing" for name in expected if name not in state]
    faults += [
        f"{name} is {list(state[name].shape)} and should be {list(weight.shape)}"
        for name, weight in expected.items()
        if name in state and state[name].shape != weight.shape
    ]
    faults += [f"{name} is unknown" for name in unknown]
    if not faults:
        return
    more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
    reasons = sorted({REASONS[end] for end in REASONS for name in unknown if name.endswith(end)})
    mend = (
        f"Leadout's {method} has no {' and no '.join(reasons)}, so this draft cannot be measured here"
        if reasons
        else "The tensors and config.json belong to different drafts, or to a kind that Leadout does not know"
    )
    raise CheckpointError(f"{published.folder} as {method}: {'; '.join(faults[:3])}{more}. {mend}.")


def without_derived(tensors: Mapping[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    """`tensors` without those that are no weights of the draft."""
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith(DERIVED) and not name.startswith(BORROWED)
    }
    if len(kept) < len(tensors):
        notes.append(f"left out {', '.join(name for name in tensors if name not in kept)}")
    return kept


def layer_config(published: Published) -> Any:
    """transformers' configuration of the draft's layers. What config.json leaves out has the value that
    their family has by default, as for the authors and the engines: not the target's."""
    config = published.config
    written = config.get("transformer_layer_config") or config
    if written.get("model_type") == "eagle":  # vLLM's first engine wrapped the layers' configuration
        written = written.get("model", written)
    written = {"model_type": "llama", **written}
    try:
        layers = AutoConfig.for_model(**written)
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{published.folder / CONFIG}: no layers of type {written['model_type']!r} can be made of it "
            f"({error}). Leadout reads drafts with Llama's layers."
        ) from error
    if getattr(layers, "hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"{published.folder / CONFIG}: hidden_act={layers.hidden_act}, and Leadout's layers have silu."
        )
    return layers


def layer_fields(layers: Any, target_hidden_size: int, draft_vocab_size: int) -> dict[str, Any]:
    """The fields of a `LayerShape` (models/layers.py)."""
    heads = layers.num_attention_heads
    return {
        "hidden_size": layers.hidden_size,
        "target_hidden_size": target_hidden_size,
        "vocab_size": layers.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "layers": layers.num_hidden_layers,
        "intermediate_size": layers.intermediate_size,
        "num_heads": heads,
        "num_kv_heads": getattr(layers, "num_key_value_heads", None) or heads,
        "head_dim": getattr(layers, "head_dim", None) or layers.hidden_size // heads,
        "rope_parameters": flat_rope(layers),
        "max_position_embeddings": layers.max_position_embeddings,
        "rms_norm_eps": layers.rms_norm_eps,
    }


def note_window(layers: Any, notes: list[str]) -> None:
    """Layers that attend to a window do as Leadout's do, to everything, on texts that fit in it."""
    if "sliding_attention" in (getattr(layers, "layer_types", None) or []):
        notes.append(
            f"attends to the last {layers.sliding_window} tokens in training and to all of them here, which "
            "is the same on texts up to that length"
        )


def draft_vocabulary(
    d2t: Tensor, t2d: Tensor | None, vocab_size: int, published: Published, notes: list[str]
) -> Tensor:
    """[Vd] the target id of each row of the draft's head.

    d2t holds offsets (id = row + d2t[row]), unless t2d, or the size of the target's vocabulary, says that it
    holds the ids themselves.
    """
    stored = d2t.long()
    readings = {"offsets": torch.arange(len(stored)) + stored, "ids": stored}
    members = None if t2d is None else t2d.bool().nonzero().flatten()
    for reading, ids in readings.items():
        ordered = ids.sort().values
        if members is None:
            fits = bool(ordered[0] >= 0 and ordered[-1] < vocab_size and (ordered.diff() > 0).all())
        else:
            fits = torch.equal(ordered, members)
        if fits:
            if reading == "ids":
                notes.append("d2t holds target ids, not offsets")
            return ids
    raise CheckpointError(
        f"{published.folder}: d2t names, neither as offsets nor as ids, "
        + (f"{len(stored)} different ids below {vocab_size}" if members is None else "the ids that t2d marks")
        + ". The draft is damaged, or was made for a target with another vocabulary."
    )


def with_vocabulary(
    state: dict[str, Tensor], ids: Tensor, heads: list[str], vocab_size: int, notes: list[str]
) -> None:
    """Sets d2t and t2d of `state` to `ids`; rows of `heads` change places where these do not ascend."""
    order = ids.argsort()
    if (ids.diff() < 0).any():
        notes.append("rows of the head are put in the order of their ids")
        for name in heads:
            state[name] = state[name][order]
    ids = ids[order]
    if len(ids) < vocab_size:
        state["d2t"] = ids - torch.arange(len(ids))
        state["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)


def own_embedding(
    tensors: dict[str, Tensor],
    width: int,
    published: Published,
    target: Target,
    choices: ImportsConfig,
    notes: list[str],
) -> Tensor | None:
    """The draft's own token embedding [V, width], taken out of `tensors`; None if it reads the target's.

    A copy of the target's (up to rounding) is the target's. Another one is the draft's own if it is as wide
    as only the draft, or config.json says that it was trained; else the draft was made for another target,
    or its embedding never loaded, and `imports.embedding` has to say what is meant.
    """
    found = tensors.pop("embed_tokens.weight", None)
    theirs = target.embedding
    if found is None and choices.embedding is Embedding.own:
        raise CheckpointError(
            f"imports.embedding=own, and {published.folder} holds no embed_tokens.weight: leave it at auto."
        )
    if found is None or choices.embedding is Embedding.target:
        if width != target.hidden_size:
            raise CheckpointError(
                f"{published.folder} has a hidden size of {width} and no token embedding of that width, and "
                f"that of {target.name} is {target.hidden_size} wide. Name the target that the draft was "
                "made for."
            )
        return None
    if len(found) != len(theirs):
        raise CheckpointError(
            f"{published.folder} embeds {len(found)} tokens, and {target.name} has {len(theirs)}: the draft "
            "was made for another target. Name that one."
        )
    apart = None if found.shape != theirs.shape else rows_apart(found, theirs)
    if apart == 0:
        return None
    trained = bool(published.config.get("embed_requires_grad", published.speculators == "peagle"))
    if choices.embedding is Embedding.own or trained or width != target.hidden_size:
        notes.append("reads a token embedding of its own")
        return found
    raise CheckpointError(
        f"{published.folder} has another token embedding than {target.name}: {apart} of {len(found)} rows "
        "differ by more than rounding. It was made for another target: name that one. If it was not, convert "
        "it with python -m models.imports and imports.embedding=own (as vLLM serves it) or "
        "imports.embedding=target (as SGLang does)."
    )


def target_head(published: Published, target: Target, notes: list[str]) -> Tensor:
    """[V, d] a copy of the target's head, for a draft that reads with it."""
    if target.head.bias is not None:
        raise CheckpointError(
            f"{published.folder} has no lm_head and reads with the target's, which has a bias in "
            f"{target.name}. Leadout's drafts have no place for one."
        )
    notes.append("has no head, and takes the target's")
    return target.head.weight.detach().cpu()


def take_mask(
    tensors: dict[str, Tensor], published: Published, names: tuple[str, ...], target: Target, notes: list[str]
) -> Tensor:
    """[1, d] what a token that is not known yet is embedded as: the row of the token that config.json names
    by one of `names`, at the top or in `dflash_config`.

    A row of the draft's own embedding in `tensors`, where it has one: there the target's row takes its place,
    so that an embedding which differs in nothing else is the target's.
    """
    config = published.config
    places = (config.get("dflash_config") or {}, config)
    ids = [place[name] for place in places for name in names if place.get(name) is not None]
    if not ids or not 0 <= ids[0] < target.vocab_size:
        raise CheckpointError(
            f"{published.folder / CONFIG}: {names[0]} is {ids[0] if ids else 'missing'}, and should name the "
            f"token that masked rows are embedded as, below {target.vocab_size}. Fetch the draft again."
        )
    id, name = int(ids[0]), "embed_tokens.weight"
    notes.append(f"a token not known yet is embedded as token {id}")
    theirs, own = target.embedding[id].cpu(), tensors.get(name)
    if own is None or len(own) <= id:
        return theirs[None]
    if own.shape == target.embedding.shape:
        tensors[name] = own.index_copy(0, torch.tensor([id]), theirs[None].to(own))
    return own[id][None]


@torch.no_grad()
def rows_apart(ours: Tensor, theirs: Tensor) -> int:
    """How many rows of two matrices differ by more than rounding to float16 and bfloat16 explains."""
    apart = 0
    for a, b in zip(ours.split(4096), theirs.split(4096), strict=True):
        close = torch.isclose(a.to(b.device).float(), b.float(), rtol=ROUNDING, atol=TINY)
        apart += int((~close.all(dim=1)).sum())
    return apart
