"""IBM's MLP speculator, as its authors and vLLM write it: the network's names behind `speculator.`.

Tied weights (`tie_weights`; also where a file holds each only once) stand there under the names of all steps,
and here under those of the first. Read from foundation-model-stack/fms-extras `models/speculator.py` and
vLLM 0.32 `model_executor/models/mlp_speculator.py`.
"""

from __future__ import annotations

import re

import torch

from configs.errors import CheckpointError
from configs.schema import ImportsConfig
from models.imports.folder import Published
from models.imports.network import Draft, draft_vocabulary, with_vocabulary
from models.target import Target

STEP = re.compile(r"(?P<kind>emb|head|ln|proj)\.(?P<step>\d+)\.(?P<leaf>weight|bias)")
LAST_OWN = {"emb": 0, "head": 0, "ln": 0, "proj": 1}  # the step whose weights all later ones have, if tied


def recognises(published: Published) -> bool:
    if published.config.get("model_type") == "mlp_speculator":
        return True
    names = {name.removeprefix("speculator.") for name in published.names}
    return {"emb.0.weight", "proj.0.weight", "ln.0.bias"} <= names


def read(published: Published, target: Target, choices: ImportsConfig) -> Draft:
    notes: list[str] = []
    config = published.config
    state = {name.removeprefix("speculator."): tensor for name, tensor in published.tensors.items()}
    if "n_predict" not in config or "proj.0.weight" not in state:
        raise CheckpointError(
            f"{published.folder} as mlp_speculator: config.json lacks n_predict, or the tensors "
            "speculator.proj.0.weight. Fetch the draft again."
        )
    heads = config["n_predict"]
    tied = bool(config.get("tie_weights", False))
    if not tied and heads > 1 and "emb.1.weight" not in state:
        notes.append("weights are tied, since each stands there once")
        tied = True
    if tied:
        merge_tied(state, published)
    inner, width = state["proj.0.weight"].shape
    size = config.get("draft_vocab_size") or config.get("vocab_size", target.vocab_size)
    vocab_size = config.get("vocab_size", size)
    if (d2t := state.pop("d2t", None)) is not None:
        ids = draft_vocabulary(d2t, state.pop("t2d", None), vocab_size, published, notes)
        names = [name for name in state if name.startswith("head.")]
        with_vocabulary(state, ids, names, vocab_size, notes)
        size = len(ids)
    network = {
        "hidden_size": inner,
        "target_hidden_size": width,
        "vocab_size": vocab_size,
        "draft_vocab_size": size,
        "heads": heads,
        "tie_weights": tied,
        "scale_input": bool(config.get("scale_input", False)),
        "tap": target.num_layers,
    }
    return Draft("mlp_speculator", network, state, None, notes)


def merge_tied(state: dict[str, torch.Tensor], published: Published) -> None:
    """Drops the later names of tied tensors, once they are seen to be the same."""
    for name in list(state):
        match = STEP.fullmatch(name)
        if match is None or int(match["step"]) <= LAST_OWN[match["kind"]]:
            continue
        shared = f"{match['kind']}.{LAST_OWN[match['kind']]}.{match['leaf']}"
        if shared not in state or not torch.equal(state[name], state[shared]):
            raise CheckpointError(
                f"{published.folder}: tie_weights is true, and {name} is not {shared}. The tensors and "
                "config.json belong to different drafts."
            )
        del state[name]
