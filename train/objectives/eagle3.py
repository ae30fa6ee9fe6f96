"""EAGLE-3's objective: training-time test (Li et al., NeurIPS 2025; research notation in train/alignment.py).

The draft is unrolled for `steps` steps (train/unrolled.py), so that it learns from the states it will meet
when it drafts. The loss of each step is a divergence from the target's law restricted to the draft vocabulary
(train/supervision.py), in float32 whatever the autocast, averaged over valid positions, never over padding.
Differences from the reference code, which averages over all rows and drops rows whose argmax lies outside the
draft vocabulary, are on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from data.tokens import TokenRow
from data.vocabulary import give_vocabulary
from models.eagle3 import Eagle3, NetworkConfig
from models.target import Target
from train.alignment import TABLE
from train.batches import Batch
from train.objectives import Loss, Objective
from train.supervision import SteppedConfig, Supervision, Teacher
from train.unrolled import step_matches, step_positions, unroll


@dataclass
class ObjectiveConfig(SteppedConfig):
    steps: int = 7  # training-time-test steps; the paper has 5, its code 7
    start_layer: int | None = None  # the target's, whose weights the draft's last layer starts from
    recompute: bool = False  # attention scores again in the backward pass, for less memory


class Eagle3Objective(Objective):
    """Training-time test for an `Eagle3` draft of `target`."""

    draft: Eagle3

    def __init__(self, draft: Eagle3, target: Target, settings: ObjectiveConfig, coverage: float) -> None:
        super().__init__()
        self.draft = draft
        self.taps = draft.taps
        self.first_label = TABLE["eagle3"](0).label
        self.settings = settings
        self.coverage = coverage
        self.supervision = Supervision(Teacher(target, draft.draft_ids), settings.weights(), settings)

    def positions(self, batch: Batch) -> Tensor:
        return step_positions(batch, self.settings.steps)

    def forward(self, batch: Batch, positions: Tensor) -> Loss:
        steps = unroll(self.draft, batch, self.settings.steps, self.settings.recompute).steps
        return self.supervision.loss(
            batch, steps, positions, self.draft.logits, list(self.draft.parameters())
        )

    def matches(self, draft: nn.Module, batch: Batch, steps: int) -> Tensor:
        assert isinstance(draft, Eagle3)
        return step_matches(draft, batch, steps)


def build(
    network: NetworkConfig, settings: ObjectiveConfig, target: Target, rows: Sequence[TokenRow], seed: int
) -> Eagle3Objective:
    """A new draft for `target` with its vocabulary chosen from the trained-on tokens of `rows`, and its
    objective."""
    draft = Eagle3.build(network, target)
    coverage = give_vocabulary(draft, rows, target)
    draft.initialise(seed, target, settings.start_layer)
    return Eagle3Objective(draft, target, settings, coverage)
