"""The P-EAGLE draft network (arXiv 2602.01469): EAGLE-3 that drafts several tokens in one forward.

    row 0           g of the target's taps    embedding of the pending token    predicts the token after it
    row 1, 2, ...   g of `mask_hidden`        `mask_embedding`                  predict those after that

What a row behind the first does not know, the token before it and the target's states there, two learnt
vectors stand for; its position and the rows before it are all that tells it from the others. So all drafted
tokens come from one forward and none depends on another, as with Medusa's heads. Rows attend causally. The
layers are EAGLE-3's (eagle3.py), and a checkpoint has two tensors more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models import eagle3
from models.eagle3 import Eagle3, Eagle3Shape

MASK = -1  # stands for a token that is not known yet


@dataclass
class NetworkConfig(eagle3.NetworkConfig):
    layers: int = 4  # the paper's: one forward for all tokens can cost more than EAGLE-3's for each


class PEagle(Eagle3):
    method = "peagle"

    def __init__(self, shape: Eagle3Shape, embedding: Tensor) -> None:
        super().__init__(shape, embedding)
        self.mask_hidden = unknown(shape.target_hidden_size * len(shape.taps))
        self.mask_embedding = unknown(shape.target_hidden_size)

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, T, d] of token ids or `MASK`, long [B, T]."""
        known = super().embed(tokens.clamp_min(0))
        return torch.where((tokens == MASK)[..., None], self.mask_embedding, known)

    def masked(self) -> Tensor:
        """g [1, 1, d] of rows where the target has no states yet."""
        return self.fuse(self.mask_hidden[None])


Draft = PEagle  # how other rooms find a method's network: `models.draft_class`


def unknown(size: int) -> nn.Parameter:
    """NaN [1, size]; a matrix, so that it starts small and random and not as a norm's gain of ones."""
    return nn.Parameter(torch.full((1, size), torch.nan))
