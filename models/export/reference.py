"""A second reading of exported EAGLE-like folders: the forward pass built from tensor names and config.json
alone.

It shares no code with the networks in `models/`, and follows vLLM 0.32 (`llama_eagle.py`, `llama_eagle3.py`
and `qwen3_dflash.py` of `model_executor/models/`, `layers/rotary_embedding/`), which the other engines agree
with wherever the exporters let a draft through. An export counts as done when this reading gives the trained
module's numbers. One class per network; what they share is Llama's: norms, rotation, attention, MLP.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.export.agreement import Stored, expect

TAPPED = "eagle_aux_hidden_state_layer_ids"


class Reading(Stored):
    """The draft as an engine would rebuild it. Float32, one sequence, no cache.

    embedding: [V, d], the target's input embedding, which engines share with a draft that brings none.
    """

    def __init__(self, folder: Path, embedding: Tensor) -> None:
        super().__init__(folder)
        self.config = flattened(self.config)
        self.tensors = {
            name.replace("midlayer.", "layers.0."): tensor for name, tensor in self.tensors.items()
        }
        self.hidden_size: int = self.config["hidden_size"]
        own = "embed_tokens.weight"
        self.embedding = (
            self.weight(own, *embedding.shape) if own in self.tensors else embedding.to("cpu", torch.float32)
        )

    def linear(self, x: Tensor, name: str, outputs: int, bias: bool = False) -> Tensor:
        y = x @ self.weight(f"{name}.weight", outputs, x.shape[-1]).T
        return y + self.weight(f"{name}.bias", outputs) if bias else y

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.weight(f"{name}.weight", x.shape[-1])

    def vocabulary(self) -> Tensor:
        """[Vd] target id of each draft id: `d2t` holds offsets. Without it the vocabularies are one."""
        size, whole = self.config["draft_vocab_size"], self.config["vocab_size"]
        ids = torch.arange(size)
        if size == whole and "d2t" not in self.tensors:
            return ids
        return ids + self.weight("d2t", size)

    def mlp(self, x: Tensor, name: str) -> Tensor:
        inner, bias = self.config["intermediate_size"], self.config.get("mlp_bias", False)
        gate = self.linear(x, f"{name}.gate_proj", inner, bias)
        up = self.linear(x, f"{name}.up_proj", inner, bias)
        return self.linear(torch.nn.functional.silu(gate) * up, f"{name}.down_proj", self.hidden_size, bias)

    def attention(self, x: Tensor, positions: Tensor, name: str) -> Tensor:
        """[T, d], causally, of x [T, inputs]."""
        groups = self.config["num_key_value_heads"]
        q = self.turned(self.heads(x, f"{name}.q_proj", self.config["num_attention_heads"]), positions)
        k = self.turned(self.heads(x, f"{name}.k_proj", groups), positions)
        seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        return self.mixed(q, k, self.heads(x, f"{name}.v_proj", groups), seen, name)

    def heads(self, x: Tensor, name: str, count: int) -> Tensor:
        """[count, T, head_dim]. A Llama layer gets biases from either of two keys (vLLM, SGLang)."""
        width = self.config["head_dim"]
        return self.linear(x, name, count * width, self.biased).view(-1, count, width).transpose(0, 1)

    @property
    def biased(self) -> bool:
        return bool(self.config.get("attention_bias", False) or self.config.get("bias", False))

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, *rotation(rope_fields(self.config), positions, self.config["head_dim"]))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, name: str) -> Tensor:
        """[T, d] of q [H, T, hd], k and v [Hkv, S, hd], where row t attends to columns seen [T, S]."""
        k, v = (part.repeat_interleave(len(q) // len(part), dim=0) for part in (k, v))
        scores = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
        joined = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        return self.linear(joined, f"{name}.o_proj", self.hidden_size, self.biased)


class Eagle1Reading(Reading):
    """EAGLE-1. vLLM's `fc` has no bias and passes over one that it is given; SGLang's has one always, left as
    random numbers where the file brings none. Their class names tell the folders apart."""

    def __init__(self, folder: Path, embedding: Tensor, head: Tensor) -> None:
        """head: [V, d], the target's, whose logits both engines take."""
        super().__init__(folder, embedding)
        self.head = head
        self.fc_bias = self.config["architectures"] == ["LlamaForCausalLMEagle"]

    def forward(self, hidden: Tensor, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(logits [T, V], predicted features [T, d]) of features [T, d], token ids [T] and positions [T]."""
        pairs = torch.cat([self.embedding[tokens], hidden], dim=-1)
        hidden = self.linear(pairs, "fc", self.hidden_size, self.fc_bias)
        for i in range(self.config["num_hidden_layers"]):
            layer = f"layers.{i}"
            normed = self.norm(hidden, f"{layer}.input_layernorm") if i > 0 else hidden
            hidden = hidden + self.attention(normed, positions, f"{layer}.self_attn")
            hidden = hidden + self.mlp(self.norm(hidden, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
        return hidden @ self.head.T, hidden


class Eagle3Reading(Reading):
    """EAGLE-3 and, with its masked rows, P-EAGLE."""

    def taps(self, layers: int) -> dict[str, list[int]]:
        """The tapped HF hidden_states indices by who reads them, in a target of so many layers.

        vLLM and llama.cpp read the top-level ids, SGLang those of `eagle_config`, which name layers by their
        outputs, and adds 1. Both fall back on the same default.
        """
        default = [2, layers // 2, layers - 3]
        nested = (self.config.get("eagle_config") or {}).get(TAPPED)
        read = {"vLLM": self.config.get(TAPPED) or nested or default}
        if "speculators_model_type" not in self.config:
            read["SGLang"] = [layer + 1 for layer in nested] if nested else default
        return read

    def fuse(self, taps: Tensor) -> Tensor:
        """[T, d] features of the target's taps [T, n_taps * d]."""
        nested = (self.config.get("eagle_config") or {}).get(TAPPED)
        parts = self.config.get("num_aux_hidden_states") or (len(nested) if nested else 3)
        expect(
            taps.shape[-1] == parts * self.hidden_size,
            f"config.json makes fc read {parts} hidden states, and the draft reads "
            f"{taps.shape[-1] // self.hidden_size}",
        )
        if self.config.get("norm_before_fc", False):
            taps = self.norm(taps, "input_norm")
        if self.config.get("fc_norm", False):
            chunks = taps.chunk(parts, dim=-1)
            taps = torch.cat([self.norm(chunk, f"fc_norm.{i}") for i, chunk in enumerate(chunks)], dim=-1)
        return self.linear(taps, "fc", self.hidden_size)

    def masked(self) -> Tensor:
        """[1, d] features of rows where the target has no states yet (P-EAGLE)."""
        width = self.tensors["fc.weight"].shape[1]
        return self.fuse(self.weight("mask_hidden", 1, 1, width)[0])

    def forward(self, hidden: Tensor, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(logits [T, Vd], recurrent state [T, d]) of hidden [T, d], token ids [T] and positions [T],
        causally."""
        residual, added = hidden, torch.zeros_like(hidden)
        for i in range(self.config["num_hidden_layers"]):
            layer = f"layers.{i}"
            if i == 0:
                normed = self.norm(hidden, f"{layer}.hidden_norm")
                residual = normed if self.config.get("norm_before_residual", False) else hidden
                embedded = self.norm(self.embedding[tokens], f"{layer}.input_layernorm")
                mixed = torch.cat([embedded, normed], dim=-1)
            else:
                residual = residual + added
                mixed = self.norm(residual, f"{layer}.input_layernorm")
            residual = residual + self.attention(mixed, positions, f"{layer}.self_attn")
            added = self.mlp(self.norm(residual, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
        output = residual + added
        normed = self.norm(output, "norm")
        logits = self.linear(normed, "lm_head", self.config["draft_vocab_size"])
        return logits, normed if self.config.get("norm_output", False) else output


class DFlashReading(Reading):
    """DFlash's blocks: keys and values of the target's fused features before those of the block's rows."""

    def taps(self) -> list[int]:
        """The tapped HF hidden_states indices: `target_layer_ids` name layers by their outputs."""
        return [layer + 1 for layer in self.config["dflash_config"]["target_layer_ids"]]

    def block(self, taps: Tensor, token: int, start: int, size: int) -> Tensor:
        """Logits [size - 1, Vd] of a block's masked rows.

        taps: [T, n_taps * d] of the tokens from position `start` on. token: the id after them, pending.
        """
        masks = [self.config["dflash_config"]["mask_token_id"]] * (size - 1)
        hidden = self.embedding[torch.tensor([token, *masks])]
        features = self.norm(self.linear(taps, "fc", self.hidden_size), "hidden_norm")
        positions = torch.arange(start, start + len(taps) + size)
        causal = self.config["dflash_config"].get("causal", False)
        seen = torch.ones(size, len(positions), dtype=torch.bool).tril(
            len(taps) if causal else len(positions)
        )
        for i in range(self.config["num_hidden_layers"]):
            layer, name = f"layers.{i}", f"layers.{i}.self_attn"
            inputs = self.norm(hidden, f"{layer}.input_layernorm")
            q = self.heads(inputs, f"{name}.q_proj", self.config["num_attention_heads"])
            q = self.turned(self.norm(q, f"{name}.q_norm"), positions[len(taps) :])
            k, v = self.keys(torch.cat([features, inputs]), positions, name)
            hidden = hidden + self.mixed(q, k, v, seen, name)
            hidden = hidden + self.mlp(self.norm(hidden, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
        return self.linear(self.norm(hidden[1:], "norm"), "lm_head", self.config["draft_vocab_size"])

    def keys(self, x: Tensor, positions: Tensor, name: str) -> tuple[Tensor, Tensor]:
        groups = self.config["num_key_value_heads"]
        k = self.norm(self.heads(x, f"{name}.k_proj", groups), f"{name}.k_norm")
        return self.turned(k, positions), self.heads(x, f"{name}.v_proj", groups)


def flattened(config: dict[str, Any]) -> dict[str, Any]:
    """A `speculators` config.json as vLLM reads it: the layer's own fields, and of the others only those that
    it copies (`transformers_utils/configs/speculators/algos.py`). Any other config as it is."""
    kind = config.get("speculators_model_type")
    if kind is None:
        return config
    flat = {**config["transformer_layer_config"], "speculators_model_type": kind}
    flat["draft_vocab_size"] = config["draft_vocab_size"]
    if kind == "dflash":
        flat["dflash_config"] = {
            "mask_token_id": config["mask_token_id"],
            "target_layer_ids": [i - 1 for i in config["aux_hidden_state_layer_ids"]],
            "causal": not config.get("sliding_window_non_causal", True),
        }
        return flat
    flat["norm_before_residual"] = config.get("norm_before_residual", kind == "eagle3")
    flat["norm_before_fc"] = config.get("norm_before_fc", False)
    flat[TAPPED] = config.get(TAPPED)
    if kind == "peagle":
        return flat | {"mask_token_id": config["mask_token_id"]}
    return flat | {name: config.get(name, False) for name in ("fc_norm", "norm_output")}


def rope_fields(config: dict[str, Any], reader: str = "new") -> dict[str, Any]:
    """What a reader of `rope_parameters` ("new": transformers 5 and its engines), or of `rope_theta` and
    `rope_scaling` ("old"), finds in config.json, in the new form."""
    if reader == "new":
        return dict(config["rope_parameters"])
    fields = {"rope_type": "default", **(config["rope_scaling"] or {}), "rope_theta": config["rope_theta"]}
    return {**fields, "partial_rotary_factor": config.get("partial_rotary_factor", 1.0)}


def rotation(fields: dict[str, Any], positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [T, rotary / 2], at positions [T]. Partial rotary turns the first `rotary` of head_dim
    alone."""
    rotary = int(head_dim * fields.get("partial_rotary_factor", 1.0))
    frequencies, magnitude = inverse_frequencies(fields, rotary)
    angles = positions[:, None].float() * frequencies
    return angles.cos() * magnitude, angles.sin() * magnitude


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [heads, T, head_dim] turned: dimension i pairs with i + rotary / 2 ("neox" order)."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def inverse_frequencies(fields: dict[str, Any], rotary: int) -> tuple[Tensor, float]:
    """(frequencies [rotary / 2], factor on cos and sin) of the RoPE variants that are written out here."""
    plain = 1.0 / fields["rope_theta"] ** (torch.arange(0, rotary, 2).float() / rotary)
    match fields.get("rope_type", "default"):
        case "default":
            return plain, 1.0
        case "linear":
            return plain / fields["factor"], 1.0
        case "llama3":
            return llama3(plain, fields), 1.0
        case "yarn":
            return yarn(plain, fields, rotary)
        case other:
            raise NotImplementedError(f"rope type {other}")


def llama3(plain: Tensor, fields: dict[str, Any]) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    length, low, high = (
        fields[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    turns = length * plain / (2 * math.pi)  # full turns within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / fields["factor"]


def yarn(plain: Tensor, fields: dict[str, Any], rotary: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071 §3.2): the same blend over dimensions, and attention's temperature in the
    magnitude."""
    factor, length, theta = fields["factor"], fields["original_max_position_embeddings"], fields["rope_theta"]

    def dimension(turns: float) -> float:
        return rotary * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fields.get("beta_fast") or 32), dimension(fields.get("beta_slow") or 1)
    if fields.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary - 1)
    stretched = ((torch.arange(rotary // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)

    def magnitude(scale: float | None) -> float:
        return 1.0 if factor <= 1 else 0.1 * (scale or 1.0) * math.log(factor) + 1.0

    given, mscale, mscale_all = (fields.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is None:
        given = magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(None)
    return (1 - stretched) * plain + stretched * plain / factor, given
