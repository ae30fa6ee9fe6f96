"""The Hydra draft network (Ankner et al. 2024, arXiv 2402.05109): Medusa's heads, each reading the tokens
between.

    x = cat(h_j, emb(t_{j+1}), ..., emb(t_{j+k}))      head k, from 1; emb is the target's own, frozen
    x = R x + SiLU(W x + b)                            the first residual layer, down to d
    x = x + SiLU(W x + b)                              the others
    logits = P x                                       for the token at j + 1 + k

R starts as the identity on h_j and zero on the embeddings, all else as Medusa's (medusa.py), so every head
starts as the target's own head. Left out of the reference: biases of P, and Hydra++'s layer that attends over
past hidden states.

Decoding carries what a head reads down each path of the tree (`start`, `step`), and training goes through the
same functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.medusa import HeadsNetwork
from models.medusa import NetworkConfig as MedusaConfig


@dataclass
class NetworkConfig(MedusaConfig):
    """What a user may set (`method.network`); as Medusa's."""

    heads: int = 4  # the paper's


class Hydra(HeadsNetwork):
    method = "hydra"

    def inputs(self, head: int) -> int:
        return head + 2

    def start(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """What head 1 reads, [..., 2d], of h_j [..., d] in any floating dtype and the tokens at j + 1."""
        self.require_ready()
        return self.step(hidden.to(self.dtype), tokens, 0)

    def step(self, read: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """What head depth + 1 reads, [..., (depth + 2) d], of what the one before did and the tokens at
        j + 1 + depth, long [...]."""
        return torch.cat([read, F.embedding(tokens, self.embedding).to(read.dtype)], dim=-1)

    def state(self, read: Tensor, depth: int) -> Tensor:
        """The state [..., d] of head depth + 1, which its projection turns into logits."""
        return self.blocks[depth](read)

    def logits(self, read: Tensor, depth: int) -> Tensor:
        """[..., Vd] for the token at j + 2 + depth, of what head depth + 1 reads."""
        projection = self.lm_heads[depth if len(self.lm_heads) > 1 else 0]
        return projection(self.state(read, depth))


Draft = Hydra  # how other rooms find a method's network: `models.draft_class`
