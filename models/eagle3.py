"""The EAGLE-3 draft network (Li et al. 2025, arXiv 2503.01840): the network alone, no losses and no decoding.

    g = fc(cat(taps))                                             hidden states of the target, fused
    a = input_layernorm(embedding(token));  b = hidden_norm(g)
    h = g + attention(cat(a, b))                                  layer 0; further layers are plain Llama's
    h = h + mlp(post_attention_layernorm(h))                      the g of the next draft step
    logits = lm_head(norm(h))                                     over the draft vocabulary

Row j pairs the features of position j with the token at j + 1. Which rows meet is the caller's business
(`train/alignment.py`, `decoding/drafters/eagle3.py`), and so is how rows attend to each other (`attend`). The
token embedding is the target's own and frozen. Weights are NaN until initialised or loaded; using them before
that raises. Tensor names are vLLM's (`layers.{i}.*`); `models/export/` renames for others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.errors import ConfigError
from models.draft import DraftNetwork
from models.layers import (
    MLP,
    Attend,
    Attention,
    LayerShape,
    RMSNorm,
    Rotary,
    causal,
    layer_sizes,
    linear,
    start_from,
)
from models.target import Target


@dataclass
class NetworkConfig:
    """What a user may set (`method.network`); None takes the target's value."""

    layers: int = 1
    draft_vocab_size: int | None = 32000  # None: the target's whole vocabulary, with no d2t
    taps: list[int] | None = None  # HF hidden_states indices, ascending; None: [2, N // 2, N - 3] of N layers
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    norm_before_residual: bool = False  # the residual of layer 0 is hidden_norm(g) instead of g
    norm_before_fc: bool = False  # one RMSNorm over the concatenated taps (`input_norm`)
    fc_norm: bool = False  # one RMSNorm per tap
    norm_output: bool = False  # the next step is fed norm(h) instead of h (vLLM's meaning of the key)


@dataclass
class Eagle3Shape(LayerShape):
    taps: list[int]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @classmethod
    def resolve(cls, network: NetworkConfig, target: Target) -> Eagle3Shape:
        """`network` for `target`. Raises `ConfigError` for sizes that cannot work together."""
        shape = cls(
            taps=default_taps(target.num_layers) if network.taps is None else list(network.taps),
            norm_before_residual=network.norm_before_residual,
            norm_before_fc=network.norm_before_fc,
            fc_norm=network.fc_norm,
            norm_output=network.norm_output,
            **layer_sizes(
                target,
                layers=network.layers,
                draft_vocab_size=network.draft_vocab_size,
                intermediate_size=network.intermediate_size,
                num_heads=network.num_heads,
                num_kv_heads=network.num_kv_heads,
            ),
        )
        shape.check(target.num_layers)
        return shape

    def check(self, target_layers: int) -> None:
        super().check(target_layers)
        ascending = all(low < high for low, high in zip(self.taps, self.taps[1:], strict=False))
        if not self.taps or not ascending or self.taps[0] < 0 or self.taps[-1] >= target_layers:
            raise ConfigError(
                f"method.network.taps={self.taps}: taps are ascending HF hidden_states indices from 0 to "
                f"{target_layers - 1} (engines capture them in layer order). Set null for "
                f"{default_taps(target_layers)}."
            )


class Eagle3(DraftNetwork):
    method = "eagle3"
    Shape = Eagle3Shape

    def __init__(self, shape: Eagle3Shape, embedding: Tensor) -> None:
        super().__init__(shape, embedding)
        d, eps = shape.hidden_size, shape.rms_norm_eps
        width = shape.target_hidden_size * len(shape.taps)
        self.input_norm = RMSNorm(width, eps) if shape.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(shape.target_hidden_size, eps) for _ in shape.taps)
            if shape.fc_norm
            else None
        )
        self.fc = linear(width, d)
        self.layers = nn.ModuleList(Layer(shape, index) for index in range(shape.layers))
        self.norm = RMSNorm(d, eps)
        self.lm_head = linear(d, shape.draft_vocab_size)
        self.rotary = Rotary(shape)

    @torch.no_grad()
    def initialise(self, seed: int, target: Target | None = None, start_layer: int | None = None) -> None:
        """Fresh weights; with `target`, what `start_from` takes over from it."""
        self.draw_weights(seed)
        if target is not None:
            start_from(target, self, start_layer)

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(self.shape.taps)

    def fuse(self, taps: Tensor) -> Tensor:
        """g [B, T, d] of the target's tapped states [B, T, n_taps * d_target], in any floating dtype."""
        self.require_ready()
        taps = taps.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm is not None:
            parts = taps.split(self.shape.target_hidden_size, dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(taps)

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, T, d] of token ids, long [B, T]."""
        return F.embedding(tokens, self.embedding)

    def forward(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Attend | None = None
    ) -> Tensor:
        """The state [B, T, d] to take logits of and to feed to the next draft step.

        hidden: [B, T, d], `fuse` of the taps or the state of the step before. tokens: [B, T] long target ids.
        positions: [B, T] long, for the rotation. attend: None is plain causal attention over the T rows.
        """
        self.require_ready()
        emb = self.embed(tokens).to(hidden.dtype)
        rotation = self.rotary(positions)
        for layer in self.layers:
            hidden = layer(hidden, emb, rotation, attend or causal)
        return self.norm(hidden) if self.shape.norm_output else hidden

    def logits(self, state: Tensor) -> Tensor:
        """[..., Vd] over the draft vocabulary, of states [..., d] that `forward` gave."""
        self.require_ready()
        return self.lm_head(state if self.shape.norm_output else self.norm(state))


Draft = Eagle3  # how other rooms find a method's network: `models.draft_class`


class Layer(nn.Module):
    """Layer 0 attends over cat(embedding, hidden), which is 2d wide; the others are plain Llama layers."""

    def __init__(self, shape: Eagle3Shape, index: int) -> None:
        super().__init__()
        d, eps = shape.hidden_size, shape.rms_norm_eps
        self.first = index == 0
        self.norm_before_residual = shape.norm_before_residual
        self.input_layernorm = RMSNorm(d, eps)  # of the embedding in layer 0, of the hidden state above it
        if self.first:
            self.hidden_norm = RMSNorm(d, eps)
        self.self_attn = Attention(shape, index, inputs=2 * d if self.first else d)
        self.post_attention_layernorm = RMSNorm(d, eps)
        self.mlp = MLP(d, shape.intermediate_size)

    def forward(self, hidden: Tensor, emb: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[B, T, d] of hidden and emb [B, T, d]; rotation: cos and sin [B, T, rotated dims]."""
        residual = hidden
        if self.first:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            inputs = torch.cat([self.input_layernorm(emb), normed], dim=-1)
        else:
            inputs = self.input_layernorm(hidden)
        hidden = residual + self.self_attn(inputs, rotation, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def default_taps(layers: int) -> list[int]:
    """[2, N // 2, N - 3], the paper's low, middle and high layers; shallow targets get what they have."""
    if layers >= 7:
        return [2, layers // 2, layers - 3]
    return sorted({1, layers // 2, layers - 1} & set(range(layers))) or [0]
