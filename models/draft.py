"""What every draft network has in common: sizes, the draft vocabulary, and weights that are NaN until given.

A method's network is `models/<method>.py`: a `NetworkConfig` (what a user may set), a shape (everything
resolved, a `DraftShape`, enough to build the network again), and `Draft`, a `DraftNetwork`. Which rows of the
target it meets is the business of train/alignment.py and decoding/drafters/.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from configs.errors import CheckpointError, ConfigError
from models.checkpoint import CONFIG, WEIGHTS, read_weights
from models.files import write_json, write_tensors
from models.target import Target

INIT_STD = 0.02  # Llama's initializer_range
EMBEDDING = "embed_tokens.weight"  # of a draft that does not read the target's


@dataclass
class DraftShape:
    """Sizes with everything resolved."""

    hidden_size: int
    target_hidden_size: int
    vocab_size: int  # of the target's head
    draft_vocab_size: int  # equal to vocab_size: no d2t and t2d

    @classmethod
    def resolve(cls, network: Any, target: Target) -> Self:
        """`network`, the method's `NetworkConfig`, for `target`; checked."""
        raise NotImplementedError

    def check(self, target_layers: int) -> None:
        """Raises `ConfigError` with the mend for sizes that cannot work together."""
        where = "method.network.draft_vocab_size"
        if self.draft_vocab_size < 1:
            raise ConfigError(f"{where}={self.draft_vocab_size} must be at least 1, or null for all tokens.")
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(
                f"{where}={self.draft_vocab_size} is larger than the target's vocabulary of "
                f"{self.vocab_size}. Set a smaller one, or null to draft over the whole vocabulary."
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_dict`; a missing or an unknown key is a `CheckpointError`."""
        expected = {field.name for field in fields(cls)}
        if set(values) != expected:
            raise CheckpointError(
                f"The draft's network has the wrong keys: missing {sorted(expected - set(values))}, unknown "
                f"{sorted(set(values) - expected)}. It was written by another version of Leadout: train or "
                "convert it again."
            )
        return cls(**values)


def draft_sizes(target: Target, draft_vocab_size: int | None) -> dict[str, int]:
    """The fields of a `DraftShape` for `target`, as wide as it is; None is its whole vocabulary."""
    return {
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size if draft_vocab_size is None else draft_vocab_size,
    }


class DraftNetwork(nn.Module):
    """The base of draft networks. Parameters are float32 masters; `to(dtype)` for decoding.

    A subclass names its `method` and `Shape`, and makes its modules in `__init__` after calling this one's.
    """

    method: ClassVar[str]
    Shape: ClassVar[type[DraftShape]]

    def __init__(self, shape: Any, embedding: Tensor) -> None:
        """embedding: [V, d], the target's; shared, frozen, and outside the state dict (`bring_embedding` for
        another)."""
        super().__init__()
        self.shape = shape
        # A plain attribute: no parameter to train or save, and `to(dtype)` leaves the target's bits alone.
        self.embedding = embedding.detach()
        self.own_embedding = False  # the target's
        self.ready = False
        if not self.full_vocabulary:
            device = embedding.device
            self.d2t = nn.Buffer(torch.zeros(shape.draft_vocab_size, dtype=torch.int64, device=device))
            self.t2d = nn.Buffer(torch.zeros(shape.vocab_size, dtype=torch.bool, device=device))
        self.register_load_state_dict_post_hook(loaded)

    @classmethod
    def build(cls, network: Any, target: Target) -> Self:
        """A network for `target` on its device, float32, all weights NaN and the draft vocabulary unset.

        network: the method's `NetworkConfig`.
        """
        return cls(cls.Shape.resolve(network, target), target.embedding).to(target.device)

    @classmethod
    def from_config(cls, network: dict[str, Any], target: Target) -> Self:
        """The network that `shape.to_dict()` described, to load weights into, or a `CheckpointError`."""
        shape = cls.Shape.from_dict(network)
        if (shape.vocab_size, shape.target_hidden_size) != (target.vocab_size, target.hidden_size):
            raise CheckpointError(
                f"The draft was made for a target with {shape.vocab_size} tokens and hidden size "
                f"{shape.target_hidden_size}; {target.name} has {target.vocab_size} and "
                f"{target.hidden_size}. Name the target it was trained for."
            )
        return cls(shape, target.embedding).to(target.device)

    @torch.no_grad()
    def draw_weights(self, seed: int) -> None:
        """Fresh weights, the same on every device: matrices normal with std 0.02, vectors one."""
        generator = torch.Generator().manual_seed(seed)
        for weight in self.parameters():
            drawn = torch.randn(weight.shape, generator=generator) * INIT_STD
            weight.copy_(drawn if weight.dim() > 1 else torch.ones(weight.shape))
        self.ready = True

    @property
    def full_vocabulary(self) -> bool:
        return self.shape.draft_vocab_size == self.shape.vocab_size

    @property
    def vocabulary_set(self) -> bool:
        return self.full_vocabulary or bool(self.t2d.any())

    @property
    def draft_ids(self) -> Tensor:
        """int64 [Vd]: the target id of each draft id."""
        if not self.vocabulary_set:
            raise RuntimeError(
                "The draft vocabulary is not set: call set_vocabulary, or load a checkpoint, first."
            )
        if self.full_vocabulary:
            return torch.arange(self.shape.vocab_size, device=self.embedding.device)
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_vocabulary(self, ids: Tensor) -> None:
        """Sets the target ids that can be drafted: int64 [Vd], ascending. d2t holds offsets, id - i."""
        size = self.shape.draft_vocab_size
        ids = ids.to(self.embedding.device, torch.int64)
        if ids.shape != (size,) or (ids.diff() <= 0).any() or ids[0] < 0 or ids[-1] >= self.shape.vocab_size:
            raise ValueError(f"A draft vocabulary is {size} ascending ids below {self.shape.vocab_size}.")
        if self.full_vocabulary:
            return
        self.d2t.copy_(ids - torch.arange(size, device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True

    def bring_embedding(self, embedding: Tensor) -> None:
        """Takes a token embedding [V, d] in place of the target's, as some published drafts have one."""
        self.embedding, self.own_embedding = embedding.detach(), True

    def write(self, folder: Path, config: dict[str, Any], target: Target) -> None:
        """Writes a checkpoint's files into an empty folder: `config` as it is, and the state dict."""
        brought = {EMBEDDING: self.embedding} if self.own_embedding else {}
        write_tensors(folder / WEIGHTS, self.state_dict() | brought)
        write_json(folder / CONFIG, config)

    def read(self, folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
        """The state dict that `write` wrote, on the CPU. Raises `CheckpointError`."""
        state = read_weights(folder / WEIGHTS)
        if EMBEDDING in state:
            self.bring_embedding(state.pop(EMBEDDING).to(self.embedding.device, self.embedding.dtype))
        return state

    def require_ready(self) -> None:
        """A flag, because looking for NaN in every forward would cost as much as the forward."""
        if not self.ready:
            raise RuntimeError(
                "The draft has no weights yet (they are NaN): call initialise, or load a checkpoint."
            )


def loaded(draft: Any, incompatible: Any) -> None:
    """After `load_state_dict`: a NaN (never trained, or not in the file) leaves the draft unusable."""
    draft.ready = not any(bool(weight.isnan().any()) for weight in draft.parameters())
    if draft.vocabulary_set and not draft.full_vocabulary:
        members = draft.t2d.nonzero().flatten()
        if not torch.equal(members, draft.draft_ids):
            raise CheckpointError(
                "The draft's d2t and t2d name different ids (d2t holds offsets: id = i + d2t[i], ascending). "
                "Save or convert the draft again."
            )
