"""Any causal language model that transformers loads, with the target's vocabulary, as a draft.

It becomes a `Small` (models/small.py) whose embedding and head are its own. Families pad embeddings to other
numbers of rows at other sizes: rows are cut or added to make the target's number, and none of those is a
token. Another tokenizer is refused: its ids stand for other text.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from configs.errors import CheckpointError, ConfigError
from configs.schema import ImportsConfig
from models.checkpoint import CONFIG
from models.draft import draft_sizes
from models.imports.folder import Published
from models.imports.network import Draft
from models.small import architecture_of, loaded_model, resize
from models.target import Target, first_line

LAYER = re.compile(r"\w+\.(\w+\.)?(layers|h|blocks)\.0\..+")  # below a model's own prefix, as no head has it


def recognises(published: Published) -> bool:
    known = published.config.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return known and any(LAYER.fullmatch(name) for name in published.names)


def read(published: Published, target: Target, choices: ImportsConfig) -> Draft:
    folder = str(published.folder)
    refuse_other_tokens(folder, target)
    try:
        config: Any = AutoConfig.from_pretrained(folder)
        architecture = architecture_of(config.get_text_config(decoder=True))
    except (OSError, ValueError, KeyError, ConfigError) as error:
        raise CheckpointError(f"{published.folder / CONFIG}: {first_line(error)}") from error
    model = loaded_model(folder, CheckpointError, f"The model in {folder}")
    head = model.get_output_embeddings()
    if head.bias is not None:
        raise CheckpointError(
            f"{folder}: the head has a bias, which Leadout's small drafts have no place for."
        )
    notes = []
    if len(head.weight) != target.vocab_size:
        notes.append(f"{len(head.weight)} rows of its vocabulary made {target.vocab_size}")
        resize(model, target.vocab_size)
        head = model.get_output_embeddings()
    tied = head.weight is model.get_input_embeddings().weight
    network = draft_sizes(target, None) | {
        "hidden_size": architecture["hidden_size"],
        "start": folder,
        "cut": None,
        "embedding": "own",
        "head": "tied" if tied else "own",
        "head_rank": None,
        "architecture": architecture | {"vocab_size": target.vocab_size, "tie_word_embeddings": tied},
    }
    state = {f"decoder.{name}": weight for name, weight in model.get_decoder().state_dict().items()}
    if not tied:
        state["head.weight"] = head.weight.detach()
    return Draft("small", network, state, None, notes)


def refuse_other_tokens(folder: str, target: Target) -> None:
    """Raises `CheckpointError` unless every token of the model in `folder` has the target's id."""
    try:
        theirs = AutoTokenizer.from_pretrained(folder).get_vocab()
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder} has no tokenizer that can be read ({first_line(error)}), so nobody can say whether "
            "its ids are the target's. Put the tokenizer it was published with beside its weights."
        ) from error
    ours = target.tokenizer.get_vocab()
    apart = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if apart:
        shown = ", ".join(f"{token!r} ({ours.get(token)} and {theirs.get(token)})" for token in apart[:3])
        raise CheckpointError(
            f"The model in {folder} has another vocabulary than the target {target.name}: {len(apart)} "
            f"tokens differ in their id, among them {shown}. Use a model of the target's own family."
        )
