"""A second reading of an exported EAGLE-3 folder: the forward pass built from its tensor names and
config.json alone.

It shares no code with `models/eagle3.py`, and follows vLLM 0.32 (`model_executor/models/llama_eagle3.py` and
`layers/rotary_embedding/`), which SGLang 0.5.23 agrees with wherever the exporter lets a draft through. An
export counts as done when this reading gives the trained module's numbers.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class Reading:
    """The draft as an engine would rebuild it. Float32, one sequence, no cache.

    embedding: [V, d], the target's input embedding, which engines share with a draft that brings none.
    Every tensor asked for is noted, so that `unread` names what an engine would ignore without a word.
    """

    def __init__(self, folder: Path, embedding: Tensor) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        stored = load_file(folder / "model.safetensors")
        self.tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in stored.items()}
        self.read: set[str] = {"t2d"}  # engines skip the membership mask
        self.embedding = (
            self.weight("embed_tokens.weight") if "embed_tokens.weight" in stored else embedding.float()
        )

    @property
    def unread(self) -> list[str]:
        return sorted(set(self.tensors) - self.read)

    def weight(self, name: str) -> Tensor:
        self.read.add(name)
        return self.tensors[name].float()

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weight(f"{name}.weight").T

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.weight(f"{name}.weight")

    def target_ids(self) -> Tensor:
        """[Vd] target id of each draft id: `d2t` holds offsets. Without it the vocabularies are one."""
        self.read.add("d2t")
        ids = torch.arange(self.config["draft_vocab_size"])
        return ids + self.tensors["d2t"] if "d2t" in self.tensors else ids

    def fuse(self, taps: Tensor) -> Tensor:
        """[T, d] features of the target's taps [T, n_taps * d]."""
        if self.config.get("norm_before_fc", False):
            taps = self.norm(taps, "input_norm")
        if self.config.get("fc_norm", False):
            chunks = taps.chunk(len(self.config["eagle_aux_hidden_state_layer_ids"]), dim=-1)
            taps = torch.cat([self.norm(chunk, f"fc_norm.{i}") for i, chunk in enumerate(chunks)], dim=-1)
        return self.linear(taps, "fc")

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
        return self.linear(normed, "lm_head"), normed if self.config.get("norm_output", False) else output

    def mlp(self, x: Tensor, name: str) -> Tensor:
        gated = torch.nn.functional.silu(self.linear(x, f"{name}.gate_proj")) * self.linear(
            x, f"{name}.up_proj"
        )
        return self.linear(gated, f"{name}.down_proj")

    def attention(self, x: Tensor, positions: Tensor, name: str) -> Tensor:
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        width = self.config["head_dim"]
        cos, sin = rotation(rope_fields(self.config), positions, width)

        def split(part: str, count: int) -> Tensor:  # [heads, T, width]
            return self.linear(x, f"{name}.{part}").view(-1, count, width).transpose(0, 1)

        q, k = rotate(split("q_proj", heads), cos, sin), rotate(split("k_proj", groups), cos, sin)
        k, v = (part.repeat_interleave(heads // groups, dim=0) for part in (k, split("v_proj", groups)))
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(1, 2) / math.sqrt(width)).masked_fill(future, -math.inf)
        return self.linear((scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1), f"{name}.o_proj")


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
