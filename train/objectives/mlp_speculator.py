"""The MLP speculator's objective (Wertheimer et al. 2024, arXiv 2404.19124; notation in train/alignment.py).

    loss = sum_i head_decay^i D_i        i = 0, 1, ...; D_i the mean of step i's divergence over its positions

Step i at row j has read h_j and the text's tokens t_{j+1} .. t_{j+1+i}, and is taught by the target's law of
the token at j + 2 + i; the authors' labels are samples of it. Teacher forcing is exact: when decoding, a step
counts only if all tokens before its own were accepted, and those are the text's.

The authors train on plain text first and on the target's own replies then. Those are two runs on other
traffic; on the target's replies from the start, one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.errors import ConfigError
from data.tokens import TokenRow
from data.vocabulary import give_vocabulary
from models.mlp_speculator import MlpSpeculator, NetworkConfig
from models.target import Target
from train.alignment import TABLE, align
from train.batches import Batch
from train.objectives import Loss, Objective
from train.objectives.medusa import meet
from train.supervision import Supervision, SupervisionConfig, Teacher, Term, joint_matches


@dataclass
class ObjectiveConfig(SupervisionConfig):
    head_decay: float = 1.0  # step i weighs head_decay^i; the authors weigh all alike

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_decay <= 0:
            raise ConfigError(
                f"method.objective.head_decay={self.head_decay} must be positive; 1 weighs all heads alike."
            )


class MlpSpeculatorObjective(Objective):
    """Steps of an `MlpSpeculator` draft of `target`, each a term of the loss."""

    draft: MlpSpeculator

    def __init__(
        self, draft: MlpSpeculator, target: Target, settings: ObjectiveConfig, coverage: float
    ) -> None:
        super().__init__()
        self.draft = draft
        self.taps = draft.taps
        self.offsets = [TABLE["mlp_speculator"](i) for i in range(draft.heads)]
        self.first_label = self.offsets[0].label
        self.coverage = coverage
        weights = [settings.head_decay**i for i in range(draft.heads)]
        self.supervision = Supervision(Teacher(target, draft.draft_ids), weights, settings)

    def positions(self, batch: Batch) -> Tensor:
        return torch.stack([align(o, batch.tokens, batch.mask).mask.sum() for o in self.offsets])

    def forward(self, batch: Batch, positions: Tensor) -> Loss:
        _, terms = self.terms(self.draft, batch)

        def logits(states: Tensor) -> Tensor:
            return torch.stack([self.draft.logits(state, i) for i, state in enumerate(states)])

        return self.supervision.loss(batch, terms, positions, logits, list(self.draft.head.parameters()))

    def matches(self, draft: nn.Module, batch: Batch, steps: int) -> Tensor:
        assert isinstance(draft, MlpSpeculator)
        rows, terms = self.terms(draft, batch)
        drafted = [draft.draft_ids[draft.logits(term.states, i).argmax(-1)] for i, term in enumerate(terms)]
        found = joint_matches(batch, rows, terms, drafted)
        return F.pad(found, (0, steps - len(terms)))  # nothing is drafted deeper than there are heads

    def terms(self, draft: MlpSpeculator, batch: Batch) -> tuple[Tensor, list[Term]]:
        """The supervised rows [B, R] and each step's term on them."""
        rows, features, met = meet(batch, self.offsets)
        terms: list[Term] = []
        for i, step in enumerate(met):
            token = step.tokens[-1]  # those before it are in the state
            state = draft.step(terms[-1].states, token, i) if terms else draft.start(features, token)
            terms.append(Term(state, step.mask, step.teacher, step.labels))
        return rows, terms


def build(
    network: NetworkConfig, settings: ObjectiveConfig, target: Target, rows: Sequence[TokenRow], seed: int
) -> MlpSpeculatorObjective:
    """A new draft for `target` with its vocabulary chosen from the trained-on tokens of `rows`, and its
    objective."""
    draft = MlpSpeculator.build(network, target)
    coverage = give_vocabulary(draft, rows, target)
    draft.initialise(seed)
    return MlpSpeculatorObjective(draft, target, settings, coverage)
