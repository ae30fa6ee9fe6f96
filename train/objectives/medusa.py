"""Medusa's objective (Cai et al. 2024, §2.2: Medusa-1, the target frozen), and what Hydra's has in common.

    loss = sum_k head_decay^k D_k        k = 1, 2, ...; D_k the mean of head k's divergence over its positions

Head k at row j is taught by the target's own law of the token at j + 1 + k, which that row's tokens lead to;
the paper's labels are samples of it. Heads run on the rows that some head supervises, and their projections
on supervised rows only, a chunk at a time (train/supervision.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.errors import ConfigError
from data.tokens import TokenRow
from data.vocabulary import give_vocabulary
from models.medusa import HeadsNetwork, Medusa, NetworkConfig
from models.target import Target
from train.alignment import TABLE, Offsets, align
from train.batches import Batch
from train.objectives import Loss, Objective
from train.supervision import Supervision, SupervisionConfig, Teacher, Term, joint_matches, selection


@dataclass
class ObjectiveConfig(SupervisionConfig):
    head_decay: float = 0.8  # head k weighs head_decay^k, as in the paper

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_decay <= 0:
            raise ConfigError(
                f"method.objective.head_decay={self.head_decay} must be positive; 1 weighs all heads alike."
            )


@dataclass(frozen=True)
class Met:
    """What one head meets at R selected rows of each sequence."""

    tokens: tuple[Tensor, ...]  # [B, R] each: those it embeds
    mask: Tensor  # [B, R] bool
    teacher: Tensor  # [B, R] int64
    labels: Tensor  # [B, R] int64


def meet(batch: Batch, offsets: Sequence[Offsets]) -> tuple[Tensor, Tensor, list[Met]]:
    """(rows [B, R], features [B, R, d], what each head meets): the rows that some head supervises."""
    length = batch.tokens.shape[1]
    # Padded so that every head has all rows; what is beyond a sequence's end has mask 0.
    beyond = max(max(o.all) for o in offsets)
    tokens, mask = F.pad(batch.tokens, (0, beyond)), F.pad(batch.mask, (0, beyond))
    taps, teacher = F.pad(batch.taps, (0, 0, 0, beyond)), F.pad(batch.teacher, (0, beyond), value=-1)
    aligned = [align(o, tokens, mask, features=taps, target=teacher) for o in offsets]
    rows = selection(torch.stack([head.mask[:, :length] for head in aligned]).any(0))
    features = aligned[0].features
    assert features is not None
    met = []
    for head in aligned:
        assert head.target is not None
        of_rows = (values.gather(1, rows) for values in (head.mask, head.target, head.labels))
        met.append(Met(tuple(values.gather(1, rows) for values in head.tokens), *of_rows))
    return rows, features.gather(1, rows[..., None].expand(-1, -1, features.shape[-1])), met


class HeadsObjective(Objective):
    """Heads of a draft of `target`, each a term of the loss."""

    draft: HeadsNetwork

    def __init__(
        self, draft: HeadsNetwork, target: Target, settings: ObjectiveConfig, coverage: float
    ) -> None:
        super().__init__()
        self.draft = draft
        self.taps = draft.taps
        self.offsets = [TABLE[draft.method](k) for k in range(1, draft.heads + 1)]
        self.first_label = self.offsets[0].label
        self.coverage = coverage
        weights = [settings.head_decay**k for k in range(1, draft.heads + 1)]
        self.supervision = Supervision(Teacher(target, draft.draft_ids), weights, settings)

    @abstractmethod
    def states(self, draft: Any, features: Tensor, met: Sequence[Met]) -> Sequence[Tensor]:
        """Each head's states [B, R, d] of h_j [B, R, d] and the tokens it meets."""

    def positions(self, batch: Batch) -> Tensor:
        return torch.stack([align(o, batch.tokens, batch.mask).mask.sum() for o in self.offsets])

    def forward(self, batch: Batch, positions: Tensor) -> Loss:
        _, terms = self.terms(self.draft, batch)
        projections = list(self.draft.lm_heads.parameters())
        return self.supervision.loss(batch, terms, positions, self.draft.project, projections)

    def matches(self, draft: nn.Module, batch: Batch, steps: int) -> Tensor:
        assert isinstance(draft, HeadsNetwork)
        rows, terms = self.terms(draft, batch)
        drafted = draft.draft_ids[draft.project(torch.stack([term.states for term in terms])).argmax(-1)]
        found = joint_matches(batch, rows, terms, list(drafted))
        return F.pad(found, (0, steps - len(terms)))  # nothing is drafted deeper than there are heads

    def terms(self, draft: HeadsNetwork, batch: Batch) -> tuple[Tensor, list[Term]]:
        """The supervised rows [B, R] and each head's term on them."""
        rows, features, met = meet(batch, self.offsets)
        states = self.states(draft, features, met)
        terms = [Term(s, m.mask, m.teacher, m.labels) for s, m in zip(states, met, strict=True)]
        return rows, terms


class MedusaObjective(HeadsObjective):
    def states(self, draft: Medusa, features: Tensor, met: Sequence[Met]) -> Sequence[Tensor]:
        return list(draft(features))


def prepare(draft: HeadsNetwork, network: NetworkConfig, target: Target, rows: Sequence[TokenRow]) -> float:
    """Chooses the vocabulary of `draft` from the trained-on tokens of `rows` and initialises it: the share of
    those tokens that it can draft."""
    coverage = give_vocabulary(draft, rows, target)
    draft.initialise(target)
    return coverage


def build(
    network: NetworkConfig, settings: ObjectiveConfig, target: Target, rows: Sequence[TokenRow], seed: int
) -> MedusaObjective:
    """New heads for `target`, the same whatever the seed, and their objective."""
    draft = Medusa.build(network, target)
    return MedusaObjective(draft, target, settings, prepare(draft, network, target, rows))
