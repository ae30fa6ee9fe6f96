"""Writes what the `speculators` library (0.9) makes of tiny drafts, and the logits it computes with them:

    PYTHON tests/models/published/make_speculators.py FOLDER

with a Python that has the library. `own` is its EAGLE-3 network with the flags its trainer sets, and random
weights; `converted` is what its converter makes of a folder in the authors' format. Beside config.json and
model.safetensors each has logits.safetensors: hidden_states [T, 3 d], tokens [T] and logits [3, T, Vd], those
of three draft steps with the tokens shifted by one at each, as in training.
"""

# pyright: reportMissingImports=false, reportArgumentType=false
# The library is no dependency, and its config takes every field by name.
from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.convert import convert_model
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

VOCAB, DRAFT, STEPS, ROWS = 64, 48, 3, 7
LAYER = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
}
IDS = torch.arange(DRAFT) + torch.arange(DRAFT) // 3  # 0, 1, 2, 4, 5, 6, 8, ...


def own(folder: Path) -> None:
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=LlamaConfig(**LAYER),
        draft_vocab_size=DRAFT,
        norm_before_residual=True,
        norm_before_fc=True,
        norm_output=True,
        eagle_aux_hidden_state_layer_ids=[1, 4, 6],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(config)
    model.load_state_dict(drawn(model.state_dict()))
    model.save_pretrained(folder)


def converted(folder: Path) -> None:
    """By way of a folder as the authors write it."""
    theirs, verifier = folder.with_name("authors"), folder.with_name("verifier")
    LlamaConfig(**LAYER | {"num_hidden_layers": 8}, architectures=["LlamaForCausalLM"]).save_pretrained(
        verifier
    )
    made = {
        name.replace("layers.0.", "midlayer."): tensor
        for name, tensor in load_file(folder.with_name("own") / "model.safetensors").items()
        if name != "input_norm.weight"
    }
    theirs.mkdir()
    config = LAYER | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    (theirs / "config.json").write_text(json.dumps(config | {"draft_vocab_size": DRAFT}))
    torch.save(made, theirs / "pytorch_model.bin")
    convert_model(str(theirs), str(verifier), "eagle3", str(folder))


def drawn(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights with std 0.3, norms around one, and the draft vocabulary."""
    generator = torch.Generator().manual_seed(0)
    made = {
        "d2t": IDS - torch.arange(DRAFT),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, IDS, True),
    }
    for name, tensor in state.items():
        if name not in made:
            noise = 0.3 * torch.randn(tensor.shape, generator=generator)
            made[name] = noise + (1 if tensor.dim() == 1 else 0)
    return made


def add_logits(folder: Path) -> None:
    """Computes with the folder as it was written."""
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(config).float().eval()
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(ROWS, 3 * LAYER["hidden_size"], generator=generator)
    tokens = torch.randint(VOCAB, (ROWS,), generator=generator)
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output[0]))
    with torch.no_grad():
        model(states[None], tokens[None], torch.zeros(1, ROWS, dtype=torch.long), ttt_steps=STEPS)
    kept = {"hidden_states": states, "tokens": tokens, "logits": torch.stack(found)}
    save_file(kept, folder / "logits.safetensors")


def main(output: Path) -> None:
    output.mkdir(exist_ok=True)
    os.chdir(output)  # the library writes the verifier's path into config.json
    for make in (own, converted):
        folder = Path(make.__name__)
        make(folder)
        add_logits(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
