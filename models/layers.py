"""Llama's building blocks, as draft networks use them: attention, MLP, RMS norm, rotary embedding.

How rows attend to each other is the caller's business: a layer computes q, k and v and hands them to an
`Attend`, which is plain causal attention, a cache of a decoder, or training's unrolled rows. Weights are NaN
until initialised or loaded (models/draft.py), so that nothing is silently random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from configs.errors import ConfigError, TargetError
from models.draft import DraftShape, draft_sizes
from models.target import Target, whole

# (layer, q [B, H, T, hd], k [B, Hkv, T, hd], v [B, Hkv, T, hd]) -> [B, H, T, hd]; q and k come rotated.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass
class LayerShape(DraftShape):
    """The sizes of a network of Llama layers."""

    layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_parameters: dict[str, Any]  # HF's: rope_type, rope_theta, partial_rotary_factor, factor, ...
    max_position_embeddings: int
    rms_norm_eps: float

    def check(self, target_layers: int) -> None:
        super().check(target_layers)
        for name in ("layers", "intermediate_size", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"method.network.{name}={getattr(self, name)} must be at least 1.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"method.network: {self.num_heads} attention heads cannot share {self.num_kv_heads} key and "
                "value heads evenly. Set num_kv_heads to a divisor of num_heads."
            )


def layer_sizes(
    target: Target,
    *,
    layers: int,
    draft_vocab_size: int | None,
    intermediate_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
) -> dict[str, Any]:
    """The fields of a `LayerShape` for `target`; None takes the target's value."""
    config = target.config
    if intermediate_size is None:
        intermediate_size = own_intermediate_size(target)
    if num_heads is None:
        num_heads = config.num_attention_heads
    if num_kv_heads is None:
        num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return {
        **draft_sizes(target, draft_vocab_size),
        "layers": layers,
        "intermediate_size": intermediate_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": getattr(config, "head_dim", None) or target.hidden_size // config.num_attention_heads,
        "rope_parameters": flat_rope(config),
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
    }


class Attention(nn.Module):
    def __init__(self, shape: LayerShape, index: int, inputs: int) -> None:
        super().__init__()
        self.index = index
        self.head_dim = shape.head_dim
        self.q_proj = linear(inputs, shape.num_heads * shape.head_dim)
        self.k_proj = linear(inputs, shape.num_kv_heads * shape.head_dim)
        self.v_proj = linear(inputs, shape.num_kv_heads * shape.head_dim)
        self.o_proj = linear(shape.num_heads * shape.head_dim, shape.hidden_size)

    def forward(self, inputs: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = (
            project(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, heads, T, hd]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = attend(self.index, rotate(q, *rotation), rotate(k, *rotation), v)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, d: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = linear(d, inner)
        self.up_proj = linear(d, inner)
        self.down_proj = linear(inner, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.Module):
    """As Llama's: in float32, back in the input's dtype before the gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), torch.nan))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Rotary:
    """cos and sin of the target's own rotary embedding (Su et al. 2021), scaled kinds and partial rotation
    included.

    Not a module: frequencies stay float32 whatever the network is cast to, and are never saved.
    """

    def __init__(self, shape: LayerShape) -> None:
        self.rope = dict(shape.rope_parameters)
        self.kind: str = self.rope["rope_type"]
        if self.kind != "default" and self.kind not in ROPE_INIT_FUNCTIONS:
            raise TargetError(
                f"The target's rotary embedding is of type {self.kind!r}, which no draft can take over. "
                f"Known types: default, {', '.join(ROPE_INIT_FUNCTIONS)}."
            )
        self.config: Any = PreTrainedConfig()
        self.config.hidden_size = shape.hidden_size
        self.config.head_dim = shape.head_dim
        self.config.num_attention_heads = shape.num_heads
        self.config.max_position_embeddings = shape.max_position_embeddings
        self.config.rope_parameters = self.rope
        self.frequencies, self.scaling = self.compute(None)

    def compute(self, length: int | None) -> tuple[Tensor, float]:
        """Inverse frequencies [rotated dims / 2] and the factor on cos and sin, for sequences of `length`."""
        if self.kind != "default":
            return ROPE_INIT_FUNCTIONS[self.kind](self.config, None, seq_len=length)
        dims = int(self.config.head_dim * self.rope.get("partial_rotary_factor", 1.0))
        return 1.0 / self.rope["rope_theta"] ** (torch.arange(0, dims, 2).float() / dims), 1.0

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, T] long -> cos, sin, each float32 [B, T, rotated dims]."""
        if self.kind in ("dynamic", "longrope"):  # the frequencies depend on how long the sequence has become
            self.frequencies, self.scaling = self.compute(int(positions.max()) + 1)
        self.frequencies = self.frequencies.to(positions.device)
        angles = positions[..., None].float() * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, T, hd], its first dims rotated by cos and sin [B, T, rotated dims], the rest kept."""
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    turned, passed = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-high, low], dim=-1) * sin
    return torch.cat([turned, passed], dim=-1) if passed.shape[-1] else turned


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Row t attends to rows up to t of the same call."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear map without bias whose weight is NaN, made without drawing from the global random state."""
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(torch.full((outputs, inputs), torch.nan))
    return layer


def start_from(target: Target, draft: Any, last: int | None) -> None:
    """What a draft with a head of its own (`lm_head`, `norm`, `layers`) can take over from its target.

    The head starts as the target's own on the draft vocabulary (once that is set; without its bias) and
    `norm` as the gain of the target's final norm, so that logits start at the scale they are to reach. last:
    the draft's last layer starts as this layer of the target (negative: from the end), those below it as the
    ones before.
    """
    if draft.vocabulary_set:
        draft.lm_head.weight.copy_(target.head.weight[draft.draft_ids])
        gain = target.final_gain()
        if gain is not None:
            draft.norm.weight.copy_(gain)
    if last is not None:
        starts = layers_before(target, last, len(draft.layers))
        for layer, theirs in zip(draft.layers, starts, strict=True):
            copy_layer(layer.self_attn, layer.mlp, theirs)


def biased(inputs: int, outputs: int) -> nn.Linear:
    """`linear` with a bias, NaN too."""
    layer = linear(inputs, outputs)
    layer.bias = nn.Parameter(torch.full((outputs,), torch.nan))
    return layer


def layers_before(target: Target, last: int, count: int) -> list[nn.Module]:
    """`count` layers of the target up to and with layer `last`, which counts from the end if negative."""
    end = last % target.num_layers + 1
    if not -target.num_layers <= last < target.num_layers or end < count:
        raise ConfigError(
            f"method.objective.start_layer={last}: {target.name} has {target.num_layers} layers, of which a "
            f"draft of {count} takes as many, up to that one. Set -1 for the last, or null for fresh weights."
        )
    return list(target.layers[end - count : end])


def copy_layer(attention: Attention, mlp: MLP, layer: nn.Module) -> None:
    """Weights of a Llama-like `layer` of a target into a draft's. Where an attention reads more inputs than
    the target's (an embedding before the hidden state), the last ones get them and the others stay."""
    where = "method.objective.start_layer"
    names = {name: attention for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    names |= {name: mlp for name in ("gate_proj", "up_proj", "down_proj")}
    for name, part in names.items():
        path = f"{'mlp' if part is mlp else 'self_attn'}.{name}"
        ours: Tensor = getattr(part, name).weight
        try:
            theirs = whole(cast(Any, layer.get_submodule(path)).weight)
        except AttributeError:
            raise ConfigError(f"{where}: the target's layers have no {path}. Set it to null.") from None
        last = ours[:, ours.shape[1] - theirs.shape[1] :]
        if last.shape != theirs.shape:
            raise ConfigError(
                f"{where}: the draft's {path} is {list(ours.shape)} and the target's {list(theirs.shape)}. "
                "Leave the draft's sizes as the target's, or set start_layer to null."
            )
        last.copy_(theirs)


def own_intermediate_size(target: Target) -> int:
    size = getattr(target.config, "intermediate_size", None)
    if size is None:
        raise ConfigError(
            f"Target {target.name} has no intermediate_size for the draft to take over. Set "
            f"method.network.intermediate_size, for example {4 * target.hidden_size}."
        )
    return size


def flat_rope(config: Any) -> dict[str, Any]:
    """The target's rope parameters as one dict: those of its full-attention layers, where kinds differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = dict(rope.get("full_attention", rope))
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", 10000.0)
    return rope
