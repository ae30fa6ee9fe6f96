"""What a draft learns from. An objective is a module that holds its draft and turns a batch into a loss.

`train/objectives/<method>.py` has `ObjectiveConfig` (the fields of `method.objective`) and
`build(network, settings, target, rows, seed) -> Objective`. The training loop knows nothing else of a method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from train.batches import Batch

if TYPE_CHECKING:
    from models.target import Target
    from train.features import Features


@dataclass
class Loss:
    value: Tensor  # float32 scalar, already divided by the valid positions of the whole optimiser step
    metrics: dict[str, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # name -> sum and count, each [terms]


class Objective(nn.Module, ABC):
    """A draft and its loss. The loss has terms (steps, heads), each averaged over its own valid positions."""

    draft: Any  # this method's network, an nn.Module
    taps: tuple[int, ...]  # the target layers it needs, as HF `hidden_states` indices
    first_label: int  # the earliest token of a row that it can be taught to predict
    coverage: float  # share of the trained tokens that are in the draft vocabulary

    def origin(self) -> dict[str, Any]:
        """What it starts from beside the target: a run that is continued must have the same."""
        return {}

    def begin(self, step: int) -> None:
        """Optimiser step `step` (0, 1, ...) begins. An objective that trains on a sample of its positions
        draws it from its seed and the step alone, so that a resumed run draws the same."""

    def batch(self, features: Features, numbers: Sequence[int]) -> Batch:
        """The training rows `numbers` with their features. An objective that writes text of its own puts it
        in their place, drawn as `begin` says."""
        return features.batch(numbers)

    def rate(self, name: str) -> float:
        """What the learning rate is multiplied by for the parameter called `name`."""
        return 1.0

    def beside(self, target: Target) -> Target:
        """The target that the draft is measured and saved beside: `target`, unless training moves it too."""
        return target

    @abstractmethod
    def positions(self, batch: Batch) -> Tensor:
        """Valid positions of each term in `batch`: int64 [terms]. The loop adds up an optimiser step's."""

    @abstractmethod
    def forward(self, batch: Batch, positions: Tensor) -> Loss:
        """The loss of `batch`, divided by `positions` [terms], and metrics as sums and counts."""

    @abstractmethod
    def matches(self, draft: nn.Module, batch: Batch, steps: int) -> Tensor:
        """Teacher-forced drafts of `draft` (this method's network) against the batch's own tokens.

        bool [B, T, steps]: [b, j, i] is whether the i-th token drafted from row j is the row's own token
        there, with all drafts of row j before it right too. Decoding walks these (train/acceptance.py). False
        where the mask of that token is 0.
        """

    def describe(self) -> dict[str, Any]:
        """Facts for the console and the draft's training summary."""
        return {"draft_vocabulary": len(self.draft.draft_ids), "draft_vocabulary_coverage": self.coverage}
