"""A draft with a head that predicts whether its tokens will be accepted (SpecDec++, Huang et al. 2024,
arXiv 2405.19715).

    x = state / rms(state)                     the draft's state after it has read the token in question
    x = x + SiLU(W x + b)                      `blocks` times
    P(accepted) = sigmoid(w x + c)             given that the tokens before it are

The draft is finished and frozen; only the head is trained (train/objectives/acceptance_head.py). A checkpoint
holds both, so that no head can come to stand beside a draft that it does not know. Drafts reach their states
at any scale (EAGLE-3's are from before its norm), which the first line takes away. One output says as much
as the authors' two, whose softmax is the sigmoid of their difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.errors import ConfigError
from models.checkpoint import CONFIG, WEIGHTS, draft_class, read_weights
from models.draft import INIT_STD, DraftShape
from models.files import write_json, write_tensors
from models.medusa import ResBlocks, biased
from models.target import Target

DRAFTS = (
    "eagle1",
    "eagle3",
)  # methods that carry a state from token to token, read with the target's features


@dataclass
class NetworkConfig:
    """What a user may set (`method.network`); the rest is the frozen draft's."""

    blocks: int = 3  # residual blocks; the paper's D


@dataclass
class HeadedShape(DraftShape):
    blocks: int
    draft_method: str
    draft_network: dict[str, Any]  # the draft's own shape

    @classmethod
    def around(cls, draft: Any, network: NetworkConfig) -> Self:
        """The shape of `draft` with a head. Raises `ConfigError` for what cannot have one."""
        if draft.method not in DRAFTS:
            raise ConfigError(
                f"A draft of method {draft.method} cannot have an acceptance head: name one of "
                f"{' or '.join(DRAFTS)} in method.objective.draft."
            )
        if network.blocks < 1:
            raise ConfigError(f"method.network.blocks={network.blocks} must be at least 1.")
        return cls(
            hidden_size=draft.shape.hidden_size,
            target_hidden_size=draft.shape.target_hidden_size,
            vocab_size=draft.shape.vocab_size,
            draft_vocab_size=draft.shape.draft_vocab_size,
            blocks=network.blocks,
            draft_method=draft.method,
            draft_network=draft.shape.to_dict(),
        )


class HeadedDraft(nn.Module):
    """A frozen draft, `draft`, and the head over its states. What it proposes is what the draft proposes."""

    method = "acceptance_head"

    def __init__(self, shape: HeadedShape, draft: Any) -> None:
        super().__init__()
        self.shape = shape
        self.draft = draft.requires_grad_(False)
        self.blocks = ResBlocks(shape.hidden_size, shape.hidden_size, shape.blocks)
        self.out = biased(shape.hidden_size, 1)

    @classmethod
    def from_config(cls, network: dict[str, Any], target: Target) -> Self:
        """What `shape.to_dict()` described, to load weights into, or a `CheckpointError`."""
        shape = HeadedShape.from_dict(network)
        draft = draft_class(shape.draft_method).from_config(shape.draft_network, target)
        return cls(shape, draft).to(target.device)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Blocks that pass their input on, and a small random map to a prediction of about one half."""
        self.blocks.pass_on()
        generator = torch.Generator().manual_seed(seed)
        self.out.weight.copy_(torch.randn(self.out.weight.shape, generator=generator) * INIT_STD)
        self.out.bias.zero_()

    def log_odds(self, states: Tensor) -> Tensor:
        """[...] of the draft's states [..., d] in any floating dtype: the logarithm of P / (1 - P)."""
        x = F.rms_norm(states.float(), states.shape[-1:]).to(self.out.weight.dtype)
        return self.out(self.blocks(x)).squeeze(-1)

    def acceptance(self, state: Tensor) -> float:
        """P(accepted) of the token that the draft had just read when its state was `state` [d]."""
        return float(self.log_odds(state).float().sigmoid())

    @property
    def taps(self) -> tuple[int, ...]:
        return self.draft.taps

    @property
    def full_vocabulary(self) -> bool:
        return self.draft.full_vocabulary

    @property
    def draft_ids(self) -> Tensor:
        return self.draft.draft_ids

    def write(self, folder: Path, config: dict[str, Any], target: Target) -> None:
        """Writes a checkpoint's files into an empty folder: `config` as it is, and the state dict."""
        write_tensors(folder / WEIGHTS, self.state_dict())
        write_json(folder / CONFIG, config)

    def read(self, folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
        """The state dict that `write` wrote, on the CPU. Raises `CheckpointError`."""
        return read_weights(folder / WEIGHTS)


Draft = HeadedDraft  # how other rooms find a method's network: `models.draft_class`
