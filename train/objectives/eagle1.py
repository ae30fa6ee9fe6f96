"""EAGLE-1's objective (Li et al. 2024, arXiv 2401.15077, §4.2; research notation in train/alignment.py).

    loss = feature_weight SmoothL1(f_{j+1}, h_{j+1}) + ce_weight D(softmax L_{j+1}, softmax head(f_{j+1}))

The draft predicts the target's next feature, and by the target's head the token after it. D is cross-entropy
up to a constant, or another divergence (train/supervision.py). Both are averaged over valid positions, the
first over the feature's entries too. Features read in training are disturbed by uniform noise, so that the
draft learns to put up with the errors of its own predictions.

With `steps` > 1 the draft also learns from its own predictions themselves, read in place of features as in
decoding (train/unrolled.py): HASS's context alignment (Zhang et al. 2024, arXiv 2408.15766), in one pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.errors import ConfigError
from data.tokens import TokenRow
from data.vocabulary import give_vocabulary
from models.eagle1 import Eagle1, NetworkConfig
from models.target import Target
from train.alignment import TABLE
from train.batches import Batch
from train.objectives import Loss, Objective
from train.supervision import SteppedConfig, Supervision, Teacher, Term
from train.unrolled import step_matches, step_positions, unroll


@dataclass
class ObjectiveConfig(SteppedConfig):
    steps: int = 1  # of its own that the draft is trained on; HASS has 3
    step_decay: float = 1.0  # step i weighs step_decay**i; weights are normalised to sum 1
    feature_weight: float = 1.0  # of the regression
    ce_weight: float = 0.1  # of the divergence
    noise: float = 0.1  # features are disturbed by U(-noise, noise) in training

    def __post_init__(self) -> None:
        super().__post_init__()
        where = "method.objective"
        for name in ("feature_weight", "ce_weight", "noise"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{where}.{name}={getattr(self, name)} is negative; 0 leaves it out.")
        if self.feature_weight == self.ce_weight == 0:
            raise ConfigError(
                f"{where}.feature_weight and {where}.ce_weight are both 0, which teaches nothing: set one."
            )


class Eagle1Objective(Objective):
    """Regression and distillation of an `Eagle1` draft of `target`."""

    draft: Eagle1

    def __init__(
        self, draft: Eagle1, target: Target, settings: ObjectiveConfig, coverage: float, seed: int
    ) -> None:
        """seed: the noise's."""
        super().__init__()
        self.draft = draft
        self.taps = draft.taps
        self.first_label = TABLE["eagle1"](0).label
        self.settings = settings
        self.coverage = coverage
        self.seed, self.step = seed, 0
        self.weights = torch.tensor(settings.weights())  # of the steps
        divergences = (self.weights * settings.ce_weight).tolist()
        self.supervision = Supervision(Teacher(target, draft.draft_ids), divergences, settings)

    def begin(self, step: int) -> None:
        self.step = step

    def positions(self, batch: Batch) -> Tensor:
        # A step of the unrolled draft is EAGLE-3's; its step 0 is EAGLE-1's row of the table.
        return step_positions(batch, self.settings.steps)

    def forward(self, batch: Batch, positions: Tensor) -> Loss:
        read = batch
        if self.training and self.settings.noise:
            noise = uniform_noise(batch, self.seed, self.step) * self.settings.noise
            read = replace(batch, taps=batch.taps + noise)
        steps = unroll(self.draft, read, self.settings.steps).steps
        loss = self.supervision.loss(batch, steps, positions, self.draft.logits, [])  # the head is frozen
        errors = torch.stack([feature_error(step, batch.hidden) for step in steps])
        error = (errors / positions.clamp(min=1) * self.weights.to(errors.device)).sum()
        counts = torch.stack([step.mask.sum() for step in steps])
        metrics = loss.metrics | {"feature_loss": (errors.detach(), counts)}
        return Loss(loss.value + self.settings.feature_weight * error, metrics)

    def matches(self, draft: nn.Module, batch: Batch, steps: int) -> Tensor:
        assert isinstance(draft, Eagle1)
        return step_matches(draft, batch, steps)


def feature_error(step: Term, hidden: Tensor) -> Tensor:
    """SmoothL1 between predicted features and the target's, summed over supervised rows: float32 scalar.

    hidden [N, d]: of the packed target rows. The feature to predict belongs to the row that teaches.
    """
    predicted = step.states[step.mask].float()
    actual = hidden[step.teacher[step.mask]].float()
    return F.smooth_l1_loss(predicted, actual, reduction="sum") / hidden.shape[-1]


def uniform_noise(batch: Batch, seed: int, step: int) -> Tensor:
    """U(-1, 1) for each entry of the features, float32 [B, T, d]; 0 behind a sequence's last trained token.

    Each sequence's follows from the seed, the optimiser step and its own tokens: the same whatever the
    padding, the other sequences of the batch, and the run's interruptions.
    """
    noise = torch.zeros(batch.taps.shape, device=batch.taps.device)
    for row, tokens, mask in zip(noise, batch.tokens.cpu(), batch.mask.cpu(), strict=True):
        length = int(mask.nonzero().max()) + 1 if mask.any() else 0
        text = zlib.crc32(tokens[:length].numpy().tobytes())
        (drawn,) = np.random.SeedSequence([seed, step, text]).generate_state(1)
        row[:length].uniform_(-1, 1, generator=torch.Generator(noise.device).manual_seed(int(drawn)))
    return noise


def build(
    network: NetworkConfig, settings: ObjectiveConfig, target: Target, rows: Sequence[TokenRow], seed: int
) -> Eagle1Objective:
    """A new draft for `target` with its vocabulary chosen from the trained-on tokens of `rows`, and its
    objective."""
    draft = Eagle1.build(network, target)
    coverage = give_vocabulary(draft, rows, target)
    draft.initialise(seed)
    return Eagle1Objective(draft, target, settings, coverage, seed)
