"""IBM's MLP speculator (Wertheimer et al. 2024, arXiv 2404.19124): a short recurrent network over drafted
tokens that starts from the target's last hidden state.

    s_{-1} = h_j                                     after the final norm; scale_input: rms(h_j) / sqrt(2)
    s_i = gelu(ln_i(proj_i(s_{i-1}) + r emb_i(t_{j+1+i})))
    logits_i = head_i(s_i)                           for the token at j + 2 + i, i = 0, 1, ...

r = sqrt((1 - w^2) inner_dim / 2) / w with w = 0.5^(1/2n) makes h_j half of the last state's variance: each of
n steps keeps w^2 of what came before and takes 1 - w^2 of the token. ln_i is an RMS norm with gain and bias.

The embeddings are the network's own, over the target's whole vocabulary. Tied, one embedding, one head and
one norm serve all steps, and one projection all but the first: there is then one module, not one module under
several names. Decoding (`start`, `step`) and training go through the same functions. Tensor names are the
authors' and vLLM's, without their `speculator.`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.errors import ConfigError
from models.draft import INIT_STD, DraftNetwork, DraftShape, draft_sizes
from models.layers import RMSNorm, linear
from models.target import Target

EPS = 1e-6  # of all norms, as in the authors' code


@dataclass
class NetworkConfig:
    """What a user may set (`method.network`)."""

    heads: int = 3  # the authors' first models; later ones have 4 or 5
    inner_dim: int | None = None  # of the states; None: the target's hidden size
    tie_weights: bool = True  # one embedding, head and norm for all steps, one projection from step 1 on
    scale_input: bool = True  # norm the hidden state before the first projection
    draft_vocab_size: int | None = None  # of the heads; None: the target's whole vocabulary, with no d2t


@dataclass
class MlpSpeculatorShape(DraftShape):
    """`hidden_size` is inner_dim."""

    heads: int
    tie_weights: bool
    scale_input: bool
    tap: int  # HF hidden_states index of what is read: the target's last

    @classmethod
    def resolve(cls, network: NetworkConfig, target: Target) -> MlpSpeculatorShape:
        """`network` for `target`. Raises `ConfigError` for sizes that cannot work together."""
        sizes = draft_sizes(target, network.draft_vocab_size)
        if network.inner_dim is not None:
            sizes["hidden_size"] = network.inner_dim
        shape = cls(
            **sizes,
            heads=network.heads,
            tie_weights=network.tie_weights,
            scale_input=network.scale_input,
            tap=target.num_layers,
        )
        shape.check(target.num_layers)
        return shape

    def check(self, target_layers: int) -> None:
        super().check(target_layers)
        for name, value in (("heads", self.heads), ("inner_dim", self.hidden_size)):
            if value < 1:
                raise ConfigError(f"method.network.{name}={value} must be at least 1.")

    @property
    def token_weight(self) -> float:
        """r: how much a token's embedding weighs beside the projected state."""
        kept = 0.5 ** (1 / self.heads)  # w^2
        return ((1 - kept) * self.hidden_size / 2 / kept) ** 0.5


class MlpSpeculator(DraftNetwork):
    method = "mlp_speculator"
    Shape = MlpSpeculatorShape

    def __init__(self, shape: MlpSpeculatorShape, embedding: Tensor) -> None:
        super().__init__(shape, embedding)
        d = shape.hidden_size
        steps = 1 if shape.tie_weights else shape.heads
        inputs = [shape.target_hidden_size, *[d] * (shape.heads - 1)]
        self.emb = nn.ModuleList(token_embedding(shape.vocab_size, d) for _ in range(steps))
        self.proj = nn.ModuleList(linear(size, d) for size in (inputs[:2] if shape.tie_weights else inputs))
        self.ln = nn.ModuleList(BiasedNorm(d) for _ in range(steps))
        self.head = nn.ModuleList(linear(d, shape.draft_vocab_size) for _ in range(steps))
        self.token_weight = shape.token_weight

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fresh weights: all matrices of variance 1 / inner_dim, which the token's weight counts on."""
        self.draw_weights(seed)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                weight.mul_(self.shape.hidden_size**-0.5 / INIT_STD)
            elif name.endswith("bias"):
                weight.zero_()

    @property
    def heads(self) -> int:
        return self.shape.heads

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.shape.tap,)

    def start(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """s_0 [..., inner] of h_j [..., d] in any floating dtype and the tokens at j + 1, long [...]."""
        self.require_ready()
        if self.shape.scale_input:
            hidden = F.rms_norm(hidden.float(), hidden.shape[-1:], eps=EPS) / 2**0.5
        return self.step(hidden.to(at(self.proj, 0).weight.dtype), tokens, 0)

    def step(self, state: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """s_depth [..., inner] of the state before and the tokens at j + 1 + depth, long [...]."""
        token = at(self.emb, depth)(tokens) * self.token_weight
        return F.gelu(at(self.ln, depth)(at(self.proj, depth)(state) + token))

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """[..., Vd] for the token at j + 2 + depth, of s_depth [..., inner]."""
        return at(self.head, depth)(state)


Draft = MlpSpeculator  # how other rooms find a method's network: `models.draft_class`


class BiasedNorm(RMSNorm):
    """An RMS norm with a bias."""

    def __init__(self, size: int) -> None:
        super().__init__(size, EPS)
        self.bias = nn.Parameter(torch.full((size,), torch.nan))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


def at(modules: nn.ModuleList, depth: int) -> Any:
    """What serves step `depth`: the last one goes on serving where there are fewer than steps."""
    return modules[min(depth, len(modules) - 1)]


def token_embedding(tokens: int, d: int) -> nn.Embedding:
    """An embedding whose weight is NaN, made without drawing from the global random state."""
    layer = nn.Embedding(tokens, d, device="meta")
    layer.weight = nn.Parameter(torch.full((tokens, d), torch.nan))
    return layer
