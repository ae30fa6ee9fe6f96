"""The EAGLE-1 draft network (Li et al. 2024, arXiv 2401.15077): the network alone, no losses and no decoding.

    x = fc(cat(embedding(token), f))             f: the target's feature, or the draft's own in its place
    x = x + attention(x)                         layer 0, without an input norm; others are plain Llama's
    f' = x + mlp(post_attention_layernorm(x))    no final norm: what the feature one token on should be
    logits = head(f')                            the target's own head, frozen

A feature is the target's last hidden state after the final norm, so the target's head reads the draft's
prediction of it as it would read the real one. Row j pairs the feature of position j with the token at j + 1;
which rows meet is the caller's business (`train/alignment.py`, `decoding/drafters/eagle1.py`), and so is how
rows attend to each other (`attend`). Embedding and head are the target's and not saved. Weights are NaN until
initialised or loaded. Tensor names are the authors' (`layers.{i}.*`, `fc.*`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.draft import DraftNetwork
from models.layers import (
    MLP,
    Attend,
    Attention,
    LayerShape,
    RMSNorm,
    Rotary,
    biased,
    causal,
    layer_sizes,
    linear,
)
from models.packing import pack
from models.target import Target

MAPS = ("d2t", "t2d")  # of the draft vocabulary, in the state dict


@dataclass
class NetworkConfig:
    """What a user may set (`method.network`); None takes the target's value."""

    layers: int = 1
    draft_vocab_size: int | None = None  # rows of the target's head that are used; None: all, with no d2t
    bias: bool = False  # of fc; the authors' default is True, and vLLM's loader drops it
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None


@dataclass
class Eagle1Shape(LayerShape):
    bias: bool
    tap: int  # HF hidden_states index of the feature: the target's last

    @classmethod
    def resolve(cls, network: NetworkConfig, target: Target) -> Eagle1Shape:
        """`network` for `target`. Raises `ConfigError` for sizes that cannot work together."""
        shape = cls(
            bias=network.bias,
            tap=target.num_layers,
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


class Eagle1(DraftNetwork):
    method = "eagle1"
    Shape = Eagle1Shape

    def __init__(self, shape: Eagle1Shape, embedding: Tensor) -> None:
        super().__init__(shape, embedding)
        d = shape.hidden_size
        self.fc = (biased if shape.bias else linear)(d + shape.target_hidden_size, d)
        self.layers = nn.ModuleList(Layer(shape, index) for index in range(shape.layers))
        self.rotary = Rotary(shape)
        # The target's head, then its rows of the draft vocabulary. In a tuple they are no modules of this
        # one, so nothing trains, saves or casts them.
        self._heads: tuple[nn.Linear, ...] = ()
        self.register_load_state_dict_post_hook(lambda draft, _: draft.choose_rows())

    @classmethod
    def build(cls, network: NetworkConfig, target: Target) -> Self:
        return super().build(network, target).read_by(target.head)

    @classmethod
    def from_config(cls, network: dict[str, Any], target: Target) -> Self:
        return super().from_config(network, target).read_by(target.head)

    def read_by(self, head: nn.Linear) -> Self:
        """Logits are to be taken by `head`, the target's."""
        self._heads = (head,)
        self.choose_rows()
        return self

    def set_vocabulary(self, ids: Tensor) -> None:
        super().set_vocabulary(ids)
        self.choose_rows()

    def choose_rows(self) -> None:
        """Takes the rows of the draft vocabulary, if that is set, out of the target's head."""
        if self.vocabulary_set:
            whole = self._heads[0]
            self._heads = (whole, whole if self.full_vocabulary else rows_of(whole, self.draft_ids))

    def over_whole_vocabulary(self) -> Eagle1:
        """The same weights, proposing from all of the target's head, as engines have them do."""
        if self.full_vocabulary:
            return self
        whole = Eagle1(replace(self.shape, draft_vocab_size=self.shape.vocab_size), self.embedding)
        whole.read_by(self._heads[0]).to(self.embedding.device, self.fc.weight.dtype)
        weights = {name: weight for name, weight in self.state_dict().items() if name not in MAPS}
        whole.load_state_dict(weights)
        return whole.train(self.training).requires_grad_(False)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fresh weights."""
        self.draw_weights(seed)
        if self.shape.bias:
            self.fc.bias.zero_()

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.shape.tap,)

    def fuse(self, taps: Tensor) -> Tensor:
        """Features [B, T, d] of the target's tapped states, which they are, in the draft's dtype."""
        self.require_ready()
        return taps.to(self.fc.weight.dtype)

    def forward(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Attend | None = None
    ) -> Tensor:
        """The predicted feature [B, T, d], to take logits of and to feed to the next draft step.

        hidden: [B, T, d], the target's features or those of the step before. tokens: [B, T] long target ids.
        positions: [B, T] long, for the rotation. attend: None is plain causal attention over the T rows.
        """
        self.require_ready()
        emb = F.embedding(tokens, self.embedding).to(hidden.dtype)
        hidden = self.fc(torch.cat([emb, hidden], dim=-1))
        rotation = self.rotary(positions)
        for layer in self.layers:
            hidden = layer(hidden, rotation, attend or causal)
        return hidden

    def logits(self, state: Tensor) -> Tensor:
        """[..., Vd] over the draft vocabulary, in the target's dtype, of predicted features [..., d]."""
        self.require_ready()
        if len(self._heads) < 2:
            raise RuntimeError("The draft vocabulary is not set: call set_vocabulary, or load a checkpoint.")
        head = self._heads[1]
        return head(state.to(head.weight.dtype))


Draft = Eagle1  # how other rooms find a method's network: `models.draft_class`


class Layer(nn.Module):
    """A Llama layer; the first has no input norm, since fc's output is what it is to add to."""

    def __init__(self, shape: Eagle1Shape, index: int) -> None:
        super().__init__()
        d, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RMSNorm(d, eps) if index > 0 else nn.Identity()
        self.self_attn = Attention(shape, index, inputs=d)
        self.post_attention_layernorm = RMSNorm(d, eps)
        self.mlp = MLP(d, shape.intermediate_size)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[B, T, d] of hidden [B, T, d]; rotation: cos and sin [B, T, rotated dims]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def rows_of(head: nn.Linear, ids: Tensor) -> nn.Linear:
    """A frozen head of the rows `ids` (long [n]) of `head`, packed for a CPU."""
    chosen = nn.Linear(head.in_features, len(ids), bias=False, device="meta")
    at = ids.to(head.weight.device)
    chosen.weight = nn.Parameter(head.weight.detach()[at], requires_grad=False)
    if head.bias is not None:
        chosen.bias = nn.Parameter(head.bias.detach()[at], requires_grad=False)
    pack(chosen)
    return chosen
