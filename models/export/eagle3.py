"""EAGLE-3 for vLLM and SGLang: two folders that differ in names and in what their engine can express.

Both are a plain HF config (`LlamaForCausalLMEagle3`, model type llama) with a safetensors file. Read from
vLLM 0.32 and SGLang 0.5.23. Where engines disagree or fall silent, this file decides:

- Tapped layers stand twice. Top-level `eagle_aux_hidden_state_layer_ids` are HF hidden_states indices (vLLM,
  llama.cpp); those in `eagle_config` name the layer whose output is meant, one less (SGLang, which adds 1).
- `norm_before_residual` is always written: without it a plain config means False, a speculators one True.
- `norm_output` means here what both engines mean: the state fed to the next step is the normed one.
- `d2t` holds offsets (target id = draft id + d2t[draft id]), `t2d` membership. A draft over the whole
  vocabulary has neither, but keeps `draft_vocab_size`: without it SGLang would take the target's head.
- `max_position_embeddings` is the target's: engines size the rotary table by it.
- Rotary parameters stand in the new form (`rope_parameters`) and in the old (`rope_theta`, `rope_scaling`).
- `embed_tokens` is left out, as engines share the target's; nothing else is added either, because vLLM stops
  at a tensor it does not know and SGLang drops it without a word.

What an engine cannot express is refused: written anyway, it would be served as another network.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.errors import CheckpointError
from models.eagle3 import Eagle3, Eagle3Shape
from models.export.layout import Layout
from models.export.reference import Reading, inverse_frequencies, rope_fields
from models.target import Target

# The entries of rope_parameters that `models/export/reference.py` spells out, by rope type.
YARN = "beta_fast beta_slow mscale mscale_all_dim attention_factor truncate"
ROPE_KEYS = {
    "default": "",
    "linear": "factor",
    "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
    "yarn": f"factor original_max_position_embeddings {YARN}",
}

TOLERANCE = 1e-5  # of the largest magnitude, in float32
STEPS = 3  # recurrent draft steps compared
ROWS = 6  # positions in the first of them
FAR = 5000  # a position at which a wrong rotary table shows


def vllm(draft: Eagle3, target: Target, embedding: bool = False) -> Layout:
    """vLLM's names are the network's own. `embedding` adds an exact copy of the target's, which no engine
    here needs."""
    tensors = {name: tensor.detach() for name, tensor in draft.state_dict().items()}
    if embedding:
        tensors["embed_tokens.weight"] = target.embedding.detach()
    return Layout(tensors, config(draft, target), needs(draft.shape, "vLLM 0.32"))


def sglang(draft: Eagle3, target: Target, embedding: bool = False) -> Layout:
    """Layer 0 is `midlayer`, as in the paper's own checkpoints."""
    made = vllm(draft, target, embedding)
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in made.tensors.items()}
    return Layout(tensors, made.config, needs(draft.shape, "SGLang 0.5.23"))


LAYOUTS: dict[str, Callable[[Eagle3, Target], Layout]] = {"vllm": vllm, "sglang": sglang}


def serve(engine: str, target: str, folder: Path, draft_tokens: int) -> str:
    """The command that serves the target with this draft. SGLang counts the root among its draft tokens."""
    draft = str(folder.resolve())
    if engine == "vllm":
        settings = {"method": "eagle3", "model": draft, "num_speculative_tokens": draft_tokens}
        return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(settings)])
    words = ["python", "-m", "sglang.launch_server", "--model-path", target]
    words += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", draft]
    words += ["--speculative-num-steps", str(draft_tokens), "--speculative-eagle-topk", "1"]
    return shlex.join([*words, "--speculative-num-draft-tokens", str(draft_tokens + 1)])


def needs(shape: Eagle3Shape, engine: str) -> str | None:
    """Older versions of both engines ignore these flags and serve another network without an error."""
    flags = [name for name in ("norm_before_fc", "fc_norm", "norm_output") if getattr(shape, name)]
    if len(shape.taps) != 3:
        flags.append(f"{len(shape.taps)} taps")
    return f"{', '.join(flags)}: use {engine} or newer" if flags else None


def config(draft: Eagle3, target: Target) -> dict[str, Any]:
    """config.json, the same for both engines."""
    shape = draft.shape
    dtype = str(draft.fc.weight.dtype).removeprefix("torch.")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": shape.rms_norm_eps,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "tie_word_embeddings": False,
        "max_position_embeddings": shape.max_position_embeddings,
        **rope(shape),
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": shape.norm_before_fc,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
        "eagle_aux_hidden_state_layer_ids": shape.taps,
        "num_aux_hidden_states": len(shape.taps),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in shape.taps],
        },
        "bos_token_id": getattr(target.config, "bos_token_id", None),
        "eos_token_id": getattr(target.config, "eos_token_id", None),
        "pad_token_id": getattr(target.config, "pad_token_id", None),
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def rope(shape: Eagle3Shape) -> dict[str, Any]:
    """The rotary parameters for readers of either form. transformers 5 lets `rope_scaling` win where both
    stand."""
    fields = {
        name: value for name, value in shape.rope_parameters.items() if value is not None and name != "type"
    }
    scaling = {name: fields[name] for name in fields if name not in ("rope_theta", "partial_rotary_factor")}
    written = {
        "rope_parameters": fields,
        "rope_theta": fields["rope_theta"],
        "rope_scaling": None if fields["rope_type"] == "default" else scaling,
    }
    if "partial_rotary_factor" in fields:
        written["partial_rotary_factor"] = fields["partial_rotary_factor"]
    return written


def refuse(engine: str, draft: Eagle3) -> None:
    """Raises `CheckpointError` with every reason why `engine` would serve this draft as another network."""
    reasons = [*unverifiable(draft.shape), *(beyond_sglang(draft.shape) if engine == "sglang" else [])]
    if reasons:
        raise CheckpointError(
            f"This draft cannot be exported for {engine}: {'; '.join(reasons)}. Leave {engine} out of "
            "export.engines, or train a draft without that."
        )


def unverifiable(shape: Eagle3Shape) -> list[str]:
    fields = {name for name, value in shape.rope_parameters.items() if value is not None}
    kind = shape.rope_parameters["rope_type"]
    if kind not in ROPE_KEYS:
        return [f"the exporter can check rotary embeddings of type {', '.join(ROPE_KEYS)}, and not {kind!r}"]
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_KEYS[kind].split()}
    extra = sorted(fields - known)
    return (
        [f"its rotary parameters have {', '.join(extra)}, which the exporter cannot check"] if extra else []
    )


def beyond_sglang(shape: Eagle3Shape) -> list[str]:
    rotated, attention = (
        shape.rope_parameters.get(key) for key in ("partial_rotary_factor", "attention_factor")
    )
    found = [
        (shape.norm_before_residual, "SGLang never reads norm_before_residual"),
        (
            shape.layers > 1,
            "SGLang's versions name and wire a second layer differently (additional_layers, layers)",
        ),
        (rotated not in (None, 1.0), "SGLang rotates the whole head of a Llama draft, not a part of it"),
        (attention is not None, "SGLang ignores YaRN's attention_factor"),
        (len(shape.taps) == 1, "SGLang skips fc when there is one tap"),
        (0 in shape.taps, "SGLang names tapped layers by their outputs, and hidden_states[0] is none"),
    ]
    return [reason for holds, reason in found if holds]


@torch.no_grad()
def check(folder: Path, draft: Eagle3, target: Target) -> None:
    """Reads `folder` by names and config alone and compares it with `draft`; raises `RuntimeError` where they
    differ.

    In float32, over recurrent steps, from the first position and from a far one, with random taps and tokens.
    """
    trained = Eagle3(draft.shape, target.embedding.to("cpu", torch.float32)).eval()
    trained.load_state_dict(draft.state_dict())
    reading = Reading(folder, trained.embedding)
    expect(torch.equal(reading.target_ids(), trained.draft_ids), "d2t gives other target ids")
    expect(torch.equal(reading.embedding, trained.embedding), "embed_tokens is not the target's")
    if not trained.full_vocabulary:
        expect(
            torch.equal(reading.tensors["t2d"].nonzero()[:, 0], reading.target_ids()), "t2d and d2t disagree"
        )
    check_rope(reading.config, trained)
    far = min(FAR, trained.shape.max_position_embeddings - ROWS - STEPS)
    for start in (0, max(far, 0)):
        check_steps(reading, trained, start)
    expect(not reading.unread, f"no reader asks for {', '.join(reading.unread)}")


def check_rope(config: dict[str, Any], trained: Eagle3) -> None:
    """Readers of the new fields and of the old turn each dimension as the draft does. Compared by itself:
    attention sees differences of positions only, and while its weights are small it hardly sees those."""
    for reader in ("new", "old"):
        fields = rope_fields(config, reader)
        rotary = int(trained.shape.head_dim * fields.get("partial_rotary_factor", 1.0))
        frequencies, magnitude = inverse_frequencies(fields, rotary)
        equal = frequencies.shape == trained.rotary.frequencies.shape and torch.allclose(
            frequencies, trained.rotary.frequencies, rtol=TOLERANCE, atol=0.0
        )
        expect(
            equal and abs(magnitude - trained.rotary.scaling) <= TOLERANCE,
            f"its rotary fields in the {reader} form give other frequencies",
        )


def check_steps(reading: Reading, trained: Eagle3, start: int) -> None:
    """Each step appends the state of the last row as the next row, as a chain is drafted."""
    generator = torch.Generator().manual_seed(start)
    width = trained.shape.target_hidden_size * len(trained.taps)
    taps = torch.randn(ROWS, width, generator=generator)
    tokens = torch.randint(len(trained.embedding), (ROWS + STEPS,), generator=generator)
    positions = torch.arange(start, start + ROWS + STEPS)
    theirs, ours = reading.fuse(taps), trained.fuse(taps[None])[0]
    same(theirs, ours, "fused taps")
    for rows in range(ROWS, ROWS + STEPS):
        logits, state = reading.forward(theirs, tokens[:rows], positions[:rows])
        expected = trained(ours[None], tokens[None, :rows], positions[None, :rows])[0]
        where = f"at position {start + rows - 1}, draft step {rows - ROWS + 1}"
        same(state, expected, f"recurrent states {where}")
        same(logits, trained.logits(expected), f"logits {where}")
        theirs, ours = torch.cat([theirs, state[-1:]]), torch.cat([ours, expected[-1:]])


def same(theirs: Tensor, ours: Tensor, what: str) -> None:
    gap, size = float((theirs - ours).abs().max()), float(ours.abs().max())
    expect(gap <= TOLERANCE * max(size, 1.0), f"{what} differ by {gap:.3g} (largest value {size:.3g})")


def expect(holds: bool, fault: str) -> None:
    if not holds:
        raise RuntimeError(
            f"The exported folder does not compute what the draft computes: {fault}. Nothing was kept."
        )
