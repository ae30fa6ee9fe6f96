"""What exports of networks of Llama layers share: config fields, refusals, commands, and what every check
compares first. The engines' formats are the methods' own files.

- Rotary parameters stand in the new form (`rope_parameters`) and in the old (`rope_theta`, `rope_scaling`).
- `max_position_embeddings` is the target's: engines size the rotary table by it.
- No `bias` is ever written, as the authors' own configs of EAGLE have it: vLLM and SGLang would give the
  attention biases that no file fills.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from configs.errors import CheckpointError
from models.export.agreement import TOLERANCE, expect
from models.export.layout import Layout
from models.export.reference import Reading, inverse_frequencies, rope_fields
from models.layers import LayerShape
from models.target import Target

# The entries of rope_parameters that `models/export/reference.py` spells out, by rope type.
YARN = "beta_fast beta_slow mscale mscale_all_dim attention_factor truncate"
ROPE_KEYS = {
    "default": "",
    "linear": "factor",
    "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
    "yarn": f"factor original_max_position_embeddings {YARN}",
}

FAR = 5000  # a position at which a wrong rotary table shows
SPECULATORS = "0.9.0"  # the version of the speculators library whose format is written
STORED_TOKENS = 3  # drafted per round where a speculators folder is served by itself: that library's default

# Whether an engine would compute something else, why, and what to train with instead (None: the target's).
Reason = tuple[bool, str, str | None]


def layer_config(shape: LayerShape, draft: Any, target: Target) -> dict[str, Any]:
    """The fields of a Llama config that describe a draft's layers."""
    dtype = str(draft.fc.weight.dtype).removeprefix("torch.")
    return {
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
        "tie_word_embeddings": False,
        "max_position_embeddings": shape.max_position_embeddings,
        **rope(shape),
        "bos_token_id": getattr(target.config, "bos_token_id", None),
        "eos_token_id": getattr(target.config, "eos_token_id", None),
        "pad_token_id": getattr(target.config, "pad_token_id", None),
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def rope(shape: LayerShape) -> dict[str, Any]:
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


def speculators_config(
    kind: str, architecture: str, layer: dict[str, Any], target: Target, tokens: int
) -> dict[str, Any]:
    """What the speculators library's config.json has for every algorithm. `layer`: a Llama or Qwen3 config.
    tokens: drafted per round where nothing else is asked for."""
    family = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[layer["model_type"]]
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS,
        "dtype": layer["dtype"],
        "torch_dtype": layer["dtype"],
        "tie_word_embeddings": False,
        "target_hidden_size": None,
        "transformer_layer_config": {"architectures": [family], **layer},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": whereabouts(target),
                "architectures": list(target.config.architectures or []),
            },
        },
    }


def whereabouts(target: Target) -> str:
    """The target's hub name, or its folder from the root, since an exported folder is moved."""
    return str(Path(target.name).resolve()) if Path(target.name).is_dir() else target.name


def placeholder(target: Target) -> int:
    """A token id that no text has, whose row of the draft's embedding can hold that of a masked token.

    The first row of the embedding beyond the tokenizer, else the last special token that neither the chat
    template nor the model's own special roles use. Raises `CheckpointError` if there is none.
    """
    tokenizer = target.tokenizer
    beyond = max(tokenizer.get_vocab().values()) + 1
    if beyond < len(target.embedding):
        return beyond
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    used |= set(target.eos_ids)
    template = str(tokenizer.chat_template or "")
    spare = [
        id
        for id, token in tokenizer.added_tokens_decoder.items()
        if token.special and id not in used and str(token) not in template
    ]
    if not spare:
        raise CheckpointError(
            "This draft cannot be exported: engines look a masked token up in the draft's embedding, and "
            f"every id of {target.name} may occur in text (no row beyond its tokenizer, and no special token "
            "without a use)."
        )
    return max(spare)


def with_mask(target: Target, mask: int, row: Tensor) -> Tensor:
    """[V, d]: the target's embedding with `row` [1, d] at the id `mask`."""
    embedding = target.embedding.detach().clone()
    embedding[mask] = row[0].to(embedding.dtype)
    return embedding


def mask_note(target: Target, mask: int) -> str:
    token = target.tokenizer.convert_ids_to_tokens(mask)
    named = f" ({token}, which is never to stand in a prompt)" if token is not None else ""
    return f"masked tokens are read as id {mask}{named}"


# ---- refusals ----


def refuse_for(engine: str, reasons: Iterable[Reason]) -> None:
    """Raises `CheckpointError` with every reason that holds, and with what to train instead."""
    found = [(why, instead) for holds, why, instead in reasons if holds]
    if not found:
        return
    settings = " ".join(dict.fromkeys(instead for _, instead in found if instead))
    own = "" if all(instead for _, instead in found) else " (what is the target's own stays as it is)"
    train = f", or train a draft with {settings}{own}" if settings else ""
    raise CheckpointError(
        f"This draft cannot be exported for {engine}: {'; '.join(why for why, _ in found)}. Leave {engine} "
        f"out of export.engines{train}."
    )


def unverifiable(shape: LayerShape) -> list[Reason]:
    """Rotary embeddings that no check here can recompute."""
    fields = {name for name, value in shape.rope_parameters.items() if value is not None}
    kind = shape.rope_parameters["rope_type"]
    if kind not in ROPE_KEYS:
        known = ", ".join(ROPE_KEYS)
        return [(True, f"the exporter can check rotary embeddings of type {known}, and not {kind!r}", None)]
    extra = fields - {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_KEYS[kind].split()}
    listed = ", ".join(sorted(extra))
    return [(bool(extra), f"its rotary parameters have {listed}, which the exporter cannot check", None)]


def unlike_sglang(shape: LayerShape) -> list[Reason]:
    """Rotary embeddings that SGLang's Llama layers turn otherwise."""
    rotated, attention = (
        shape.rope_parameters.get(key) for key in ("partial_rotary_factor", "attention_factor")
    )
    return [
        (
            rotated not in (None, 1.0),
            "SGLang rotates the whole head of a Llama draft, not a part of it",
            None,
        ),
        (attention is not None, "SGLang ignores YaRN's attention_factor", None),
    ]


# ---- commands ----


def vllm_command(method: str, target: str, folder: Path, draft_tokens: int, **more: Any) -> str:
    settings = {"method": method, "model": str(folder.resolve()), "num_speculative_tokens": draft_tokens}
    return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(settings | more)])


def sglang_command(algorithm: str, target: str, folder: Path, draft_tokens: int) -> str:
    """A chain. SGLang counts the root among its draft tokens."""
    words = ["python", "-m", "sglang.launch_server", "--model-path", target]
    words += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(folder.resolve())]
    words += ["--speculative-num-steps", str(draft_tokens), "--speculative-eagle-topk", "1"]
    return shlex.join([*words, "--speculative-num-draft-tokens", str(draft_tokens + 1)])


# ---- what is compared before any forward pass ----


def in_float32(draft: Any, target: Target) -> Any:
    """The draft again on the CPU, with its weights widened: what a folder is compared with."""
    wide = type(draft)(draft.shape, target.embedding.to("cpu", torch.float32)).eval()
    wide.load_state_dict(draft.state_dict())
    return wide


def check_tokens(folder: Path, reading: Reading, target: Target) -> None:
    """The folder counts and names tokens as the target does."""
    vocab = reading.config["vocab_size"]
    expect(
        vocab == target.vocab_size,
        f"its vocabulary has {vocab} tokens, and the target's {target.vocab_size}",
    )
    beside = AutoTokenizer.from_pretrained(folder).get_vocab()
    expect(beside == target.tokenizer.get_vocab(), "the tokenizer beside it is not the target's")


def check_vocabulary(reading: Reading, trained: Any) -> None:
    """`d2t` and `t2d` are the draft vocabulary's."""
    ids, size = reading.vocabulary(), reading.config["vocab_size"]
    expect(
        torch.equal(ids, trained.draft_ids.cpu()),
        "d2t gives other target ids (it holds offsets: id = i + d2t[i])",
    )
    if "t2d" in reading.tensors:
        members = reading.weight("t2d", size)
        expect(torch.equal(members.nonzero()[:, 0], ids), "t2d and d2t disagree")


def check_embedding(reading: Reading, trained: Any, mask: int | None = None) -> None:
    """Every row is the target's; that of `mask` is the draft's own."""
    expected = trained.embedding.clone()
    if mask is not None:
        expected[mask] = trained.mask_embedding[0]
    expect(torch.equal(reading.embedding, expected), "embed_tokens is not the target's")


def check_rope(config: dict[str, Any], trained: Any) -> None:
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


def check_length(config: dict[str, Any], trained: Any) -> None:
    theirs, ours = config["max_position_embeddings"], trained.shape.max_position_embeddings
    expect(theirs == ours, f"its rotary table ends at position {theirs}, and the target's at {ours}")


def check_order(reading: Reading, fc: Tensor, inputs: list[str]) -> None:
    """fc [d, n * d] reads its inputs, named in order, from the same columns."""
    theirs = reading.weight("fc.weight", *fc.shape)
    width = fc.shape[1] // len(inputs)
    blocks = fc.split(width, dim=1)
    for name, block in zip(inputs, theirs.split(width, dim=1), strict=True):
        alike = [other for other, ours in zip(inputs, blocks, strict=True) if torch.equal(block, ours)]
        expect(
            not alike or name in alike,
            f"fc reads {''.join(alike[:1])} from the columns where the draft's reads {name}",
        )


def starts(shape: LayerShape, rows: int) -> tuple[int, int]:
    """Where `rows` positions are compared: from the first on, and from one beyond 4,096 if there is one."""
    return 0, max(min(FAR, shape.max_position_embeddings - rows), 0)


def tensors_of(draft: Any) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in draft.state_dict().items()}


def renamed(layout: Layout) -> dict[str, Tensor]:
    """Layer 0 is `midlayer`, as in the checkpoints of EAGLE-3's paper."""
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in layout.tensors.items()}
