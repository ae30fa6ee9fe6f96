"""A block draft network after DFlash (arXiv 2602.06036): a block of tokens from one non-causal forward.

    c_j = hidden_norm(fc(cat(taps)))              features of the target at each token it has read, fused
    h = [embedding(pending), mask, ..., mask]     the block, at the positions from the pending token's on
    h = h + attention(input_layernorm(h), c)      queries of the block; keys and values of c and of the block
    h = h + mlp(post_attention_layernorm(h))
    logits = lm_head(norm(h))                     row k >= 1 predicts the token at its own position

In every layer the target's features enter as further keys and values, through the same projections as the
block's rows, so they are computed once for each token and kept. The block's rows see each other in both
directions, so a network is made for one block size, and always runs all of it. q and k are normed per head,
as Qwen3's. The token embedding is the target's own and frozen; the mask's is learnt. The head is the draft's
own, over a draft vocabulary, where the paper has the target's: on small targets that head would cost more
than the rest of the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.errors import ConfigError
from models.draft import DraftNetwork
from models.eagle3 import default_taps
from models.layers import (
    MLP,
    Attend,
    Attention,
    LayerShape,
    RMSNorm,
    Rotary,
    layer_sizes,
    linear,
    rotate,
    start_from,
)
from models.target import Target

TAPS = 5  # layers of the target that the paper reads


@dataclass
class NetworkConfig:
    """What a user may set (`method.network`); None takes the target's value."""

    layers: int = 5
    block_size: int = 16  # rows of a block; one less is drafted
    draft_vocab_size: int | None = 32000  # None: the target's whole vocabulary, with no d2t
    taps: list[int] | None = None  # HF hidden_states indices, ascending; None: 5 spread over the layers
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None


@dataclass
class DFlashShape(LayerShape):
    block_size: int
    taps: list[int]

    @classmethod
    def resolve(cls, network: NetworkConfig, target: Target) -> DFlashShape:
        """`network` for `target`. Raises `ConfigError` for sizes that cannot work together."""
        shape = cls(
            block_size=network.block_size,
            taps=spread_taps(target.num_layers) if network.taps is None else list(network.taps),
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
        if self.block_size < 2:
            raise ConfigError(
                f"method.network.block_size={self.block_size}: the first row of a block is the pending "
                "token, so at least 2 are needed to draft any."
            )
        if not self.taps or sorted({*self.taps} & {*range(target_layers)}) != self.taps:
            raise ConfigError(
                f"method.network.taps={self.taps}: taps are ascending HF hidden_states indices from 0 to "
                f"{target_layers - 1}. Set null for {spread_taps(target_layers)}."
            )


class DFlash(DraftNetwork):
    method = "dflash"
    Shape = DFlashShape

    def __init__(self, shape: DFlashShape, embedding: Tensor) -> None:
        super().__init__(shape, embedding)
        d, eps = shape.hidden_size, shape.rms_norm_eps
        self.mask_embedding = nn.Parameter(torch.full((1, d), torch.nan))
        self.fc = linear(shape.target_hidden_size * len(shape.taps), d)
        self.hidden_norm = RMSNorm(d, eps)
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

    @property
    def drafted(self) -> int:
        """How many tokens after the pending one a block predicts."""
        return self.shape.block_size - 1

    def context(self, taps: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [B, Hkv, T, hd] of read tokens, for each layer.

        taps: [B, T, n_taps * d_target] in any floating dtype. positions: [B, T] long, the tokens' own.
        """
        self.require_ready()
        features = self.hidden_norm(self.fc(taps.to(self.fc.weight.dtype)))
        rotation = self.rotary(positions)
        layers = cast(Sequence[Layer], self.layers)
        return [layer.self_attn.keys(features, rotation) for layer in layers]

    def forward(self, anchors: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """States [B, n, block_size, d] of the blocks that begin with `anchors` at `positions`, long [B, n].

        attend: gets the rows of a sequence's blocks one after the other, q, k, v [B, heads, n * block_size,
        hd], and lets each see the context before its anchor and the rows of its own block.
        """
        self.require_ready()
        size = self.shape.block_size
        first = F.embedding(anchors, self.embedding).to(self.mask_embedding.dtype)[..., None, :]
        masks = self.mask_embedding.expand(*anchors.shape, size - 1, -1)
        hidden = torch.cat([first, masks], dim=2).flatten(1, 2)
        rows = positions[..., None] + torch.arange(size, device=positions.device)
        rotation = self.rotary(rows.flatten(1))
        for layer in self.layers:
            hidden = layer(hidden, rotation, attend)
        return hidden.unflatten(1, (-1, size))

    def logits(self, state: Tensor) -> Tensor:
        """[..., Vd] over the draft vocabulary, of states [..., d] that `forward` gave."""
        self.require_ready()
        return self.lm_head(self.norm(state))


Draft = DFlash  # how other rooms find a method's network: `models.draft_class`


class Layer(nn.Module):
    def __init__(self, shape: DFlashShape, index: int) -> None:
        super().__init__()
        d, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RMSNorm(d, eps)
        self.self_attn = NormedAttention(shape, index)
        self.post_attention_layernorm = RMSNorm(d, eps)
        self.mlp = MLP(d, shape.intermediate_size)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class NormedAttention(Attention):
    """Attention with q and k normed per head before they are rotated, whose keys can be had alone."""

    def __init__(self, shape: DFlashShape, index: int) -> None:
        super().__init__(shape, index, inputs=shape.hidden_size)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def keys(self, inputs: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """K, rotated, and V [B, Hkv, T, hd] of inputs [B, T, d]."""
        k = self.k_norm(self.heads(self.k_proj(inputs)))
        return rotate(k, *rotation), self.heads(self.v_proj(inputs))

    def forward(self, inputs: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q = rotate(self.q_norm(self.heads(self.q_proj(inputs))), *rotation)
        mixed = attend(self.index, q, *self.keys(inputs, rotation))
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def heads(self, projected: Tensor) -> Tensor:
        """[B, heads, T, hd] of [B, T, heads * hd]."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def spread_taps(layers: int) -> list[int]:
    """The paper's five: the outputs of layers round(1 + i (N - 4) / 4), i = 0..4; fewer for shallow
    targets."""
    if layers < 2 * TAPS:
        return default_taps(layers)
    return [round(1 + i * (layers - 4) / (TAPS - 1)) + 1 for i in range(TAPS)]
