"""DFlash's objective (arXiv 2602.06036): blocks at random anchors, all their tokens learnt at once.

A block begins with a token of the text, its anchor, and predicts the ones behind it from the target's
features before the anchor (models/dflash.py). As many anchors as set are drawn anew for each sequence and
optimiser step from those that have a token to be trained on; the blocks of a sequence do not see each other.
Row k of a block weighs exp(-(k - 1) / weight_reach), since a wrong token makes those behind it worthless.

The paper's labels are the text's tokens; here the target's own law at each of them teaches, as in the other
objectives (train/supervision.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.errors import ConfigError
from data.tokens import TokenRow
from data.vocabulary import give_vocabulary
from models.dflash import DFlash, NetworkConfig
from models.target import Target
from train.alignment import TABLE
from train.batches import Batch
from train.objectives import Loss, Objective
from train.parallel import Attention, Lesson, draws, lesson, visible
from train.supervision import Supervision, SupervisionConfig, Teacher, joint_matches, selection


@dataclass
class ObjectiveConfig(SupervisionConfig):
    anchors: int | None = 512  # blocks per sequence and step, the paper's; null: one at every trained token
    weight_reach: float = 7.0  # rows over which a weight falls to 1/e; the paper's gamma for blocks of 16
    start_layer: int | None = None  # the target's, whose weights the draft's last layer starts from

    def __post_init__(self) -> None:
        super().__post_init__()
        where = "method.objective"
        if self.anchors is not None and self.anchors < 1:
            raise ConfigError(f"{where}.anchors={self.anchors} must be at least 1; null is all there are.")
        if self.weight_reach <= 0:
            raise ConfigError(f"{where}.weight_reach={self.weight_reach} must be positive.")


class DFlashObjective(Objective):
    """Blocks of a `DFlash` draft of `target`; each of their rows is a term of the loss."""

    draft: DFlash

    def __init__(
        self, draft: DFlash, target: Target, settings: ObjectiveConfig, coverage: float, seed: int
    ) -> None:
        super().__init__()
        self.draft = draft
        self.taps = draft.taps
        self.first_label = 1 + TABLE["dflash"](1).label  # the first token has no features before it
        self.settings = settings
        self.coverage = coverage
        self.seed, self.step = seed, 0
        weights = torch.tensor([math.exp(-k / settings.weight_reach) for k in range(draft.drafted)])
        teacher = Teacher(target, draft.draft_ids)
        self.supervision = Supervision(teacher, (weights / weights.sum()).tolist(), settings)

    def begin(self, step: int) -> None:
        self.step = step

    def positions(self, batch: Batch) -> Tensor:
        return self.trained(batch, taught(batch, self.draft)).sum((0, 1))

    def forward(self, batch: Batch, positions: Tensor) -> Loss:
        lesson = taught(batch, self.draft)
        mask = self.trained(batch, lesson)
        rows, states = block_states(self.draft, lesson, mask)
        terms = lesson.terms(rows, states, mask)
        return self.supervision.loss(
            batch, terms, positions, self.draft.logits, list(self.draft.parameters())
        )

    def matches(self, draft: nn.Module, batch: Batch, steps: int) -> Tensor:
        assert isinstance(draft, DFlash)
        lesson = taught(batch, draft)
        rows, states = block_states(draft, lesson, lesson.mask)
        drafted = [draft.draft_ids[draft.logits(state).argmax(-1)] for state in states]
        found = joint_matches(batch, rows, lesson.terms(rows, states, lesson.mask), drafted)
        return F.pad(found, (0, steps - len(states)))  # nothing is drafted beyond the block

    def trained(self, batch: Batch, lesson: Lesson) -> Tensor:
        """The positions that this optimiser step trains on, bool [B, L, drafted]: those of drawn anchors."""
        if self.settings.anchors is None:
            return lesson.mask
        possible = lesson.mask.any(-1)
        drawn = draws(batch, self.seed, self.step)[:, : possible.shape[1]].masked_fill(~possible, 1.0)
        rank = drawn.argsort(dim=1, stable=True).argsort(dim=1)
        return lesson.mask & (rank < self.settings.anchors)[..., None]


def taught(batch: Batch, draft: DFlash) -> Lesson:
    """A place's pending token is the anchor of its block."""
    return lesson(batch, [TABLE["dflash"](k) for k in range(1, draft.shape.block_size)])


def block_states(draft: DFlash, lesson: Lesson, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The places [B, R] where `mask` [B, L, drafted] has any token of the block, and the states [B, R, d] of
    each of its rows but the anchor's. The anchor of place n is token n + 1."""
    rows = selection(mask.any(-1))
    place = rows.repeat_interleave(draft.shape.block_size, dim=1)
    attend = Attention(
        draft.context(lesson.features, lesson.places),
        visible(place, place, lesson.pending.shape[1], causal=False),
    )
    states = draft(lesson.pending.gather(1, rows), rows + 1, attend)
    return rows, list(states[:, :, 1:].unbind(2))


def build(
    network: NetworkConfig, settings: ObjectiveConfig, target: Target, rows: Sequence[TokenRow], seed: int
) -> DFlashObjective:
    """A new draft for `target` with its vocabulary chosen from the trained-on tokens of `rows`, and its
    objective."""
    draft = DFlash.build(network, target)
    coverage = give_vocabulary(draft, rows, target)
    draft.initialise(seed, target, settings.start_layer)
    return DFlashObjective(draft, target, settings, coverage, seed)
