"""The Medusa draft network (Cai et al. 2024, arXiv 2401.10774): heads on the target's last hidden state.

    x = h_j                                    after the final norm: what the target's own head reads
    x = x + SiLU(W x + b)                      `layers` times, each head its own
    logits = P x                               over the draft vocabulary; P its own, or one for all heads

Head k (from 1) predicts the token at j + 1 + k from h_j alone, whatever stands between (train/alignment.py,
decoding/drafters/medusa.py). W and b start at zero and P as the target's own head, so every head starts as
that head. Heads of their own P cost a vocabulary each; a shared P costs one.

Hydra's heads (hydra.py) differ in what they read, and share the rest. Tensor names are vLLM's
(`blocks.{head}.layers.{i}.*`, `lm_heads.{head}.weight`); `models/export/` renames for others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.errors import ConfigError
from models.draft import DraftNetwork, DraftShape, draft_sizes
from models.layers import biased, linear
from models.target import Target

PROJECTIONS = ("own", "shared", "frozen")


@dataclass
class NetworkConfig:
    """What a user may set (`method.network`)."""

    heads: int = 5  # the authors advise no more
    layers: int = 1  # residual layers of each head
    projection: str = "own"  # own: each head's; shared: one for all, trained; frozen: one, the target's rows
    draft_vocab_size: int | None = None  # None: the target's whole vocabulary, with no d2t


@dataclass
class HeadsShape(DraftShape):
    heads: int
    layers: int
    projection: str
    tap: int  # HF hidden_states index of what is read: the target's last

    @classmethod
    def resolve(cls, network: NetworkConfig, target: Target) -> Self:
        """`network` for `target`. Raises `ConfigError` for sizes that cannot work together."""
        shape = cls(
            **draft_sizes(target, network.draft_vocab_size),
            heads=network.heads,
            layers=network.layers,
            projection=network.projection,
            tap=target.num_layers,
        )
        shape.check(target.num_layers)
        return shape

    def check(self, target_layers: int) -> None:
        super().check(target_layers)
        for name in ("heads", "layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"method.network.{name}={getattr(self, name)} must be at least 1.")
        if self.projection not in PROJECTIONS:
            raise ConfigError(
                f"method.network.projection={self.projection!r} is unknown: set one of "
                f"{', '.join(PROJECTIONS)}."
            )


class HeadsNetwork(DraftNetwork):
    """What Medusa's heads and Hydra's have in common: residual blocks, projections, and how they start."""

    Shape = HeadsShape

    def __init__(self, shape: HeadsShape, embedding: Tensor) -> None:
        super().__init__(shape, embedding)
        d, own = shape.hidden_size, shape.projection == "own"
        self.blocks = nn.ModuleList(
            ResBlocks(self.inputs(head) * d, d, shape.layers) for head in range(shape.heads)
        )
        self.lm_heads = nn.ModuleList(
            linear(d, shape.draft_vocab_size) for _ in range(shape.heads if own else 1)
        )
        self.lm_heads.requires_grad_(shape.projection != "frozen")

    def inputs(self, head: int) -> int:
        """How many vectors of the hidden size head `head` (from 0) reads, the hidden state first."""
        return 1

    @torch.no_grad()
    def initialise(self, target: Target) -> None:
        """Every head starts as the target's own head on the draft vocabulary, which must be set; a bias of
        that head is left out."""
        for block in self.blocks:
            assert isinstance(block, ResBlocks)
            block.pass_on()
        rows = target.head.weight[self.draft_ids.to(target.head.weight.device)]
        for weight in self.lm_heads.parameters():
            weight.copy_(rows)
        self.ready = True

    @property
    def heads(self) -> int:
        return self.shape.heads

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.shape.tap,)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def project(self, states: Tensor) -> Tensor:
        """Logits [heads, ..., Vd] of all heads' states [heads, ..., d]."""
        if len(self.lm_heads) == 1:
            return self.lm_heads[0](states)
        return torch.stack([head(state) for head, state in zip(self.lm_heads, states, strict=True)])


class Medusa(HeadsNetwork):
    method = "medusa"

    def forward(self, hidden: Tensor) -> Tensor:
        """The heads' states [heads, ..., d] of last hidden states [..., d] in any floating dtype."""
        self.require_ready()
        hidden = hidden.to(self.dtype)
        return torch.stack([block(hidden) for block in self.blocks])

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, heads, Vd] of h_j [n, d]; entry i predicts the token at j + 2 + i."""
        return self.project(self(hidden)).transpose(0, 1)


Draft = Medusa  # how other rooms find a method's network: `models.draft_class`


class ResBlocks(nn.Module):
    """x + SiLU(W x + b), `layers` times; the first adds to a linear map of x where x is wider than d."""

    def __init__(self, inputs: int, d: int, layers: int) -> None:
        super().__init__()
        # One module each: `[block] * layers`, as the authors' code has it, is one block used several times.
        self.layers = nn.ModuleList(biased(inputs if i == 0 else d, d) for i in range(layers))
        self.residual = nn.Identity() if inputs == d else linear(inputs, d)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] of [..., inputs]."""
        first, *others = self.layers
        x = self.residual(x) + F.silu(first(x))
        for layer in others:
            x = x + F.silu(layer(x))
        return x

    def pass_on(self) -> None:
        """Makes the first d inputs come out as they are. The zero bias matters: SiLU(b) would be added."""
        for weight in self.layers.parameters():
            weight.zero_()
        if isinstance(self.residual, nn.Linear):
            nn.init.eye_(self.residual.weight)
