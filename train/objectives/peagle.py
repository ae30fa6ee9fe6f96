"""P-EAGLE's objective (arXiv 2602.01469): every step of a draft is learnt from one forward.

Step 0 is EAGLE-3's first. Step i is predicted from the i-th row behind it, which knows no further token and
no further feature (models/peagle.py), and sees what it will see in decoding: the rows up to its place and its
own place's rows up to itself. Only rows that lead to a supervised one are computed.

Deep rows are many and matter less. With `keep` below 1 a place trains step i with probability keep^i, and
then all steps before it too (the paper's conditional drop): the loss of each step stays an average over
places, over fewer of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from configs.errors import ConfigError
from data.tokens import TokenRow
from data.vocabulary import give_vocabulary
from models.peagle import MASK, NetworkConfig, PEagle
from models.target import Target
from train.alignment import TABLE
from train.batches import Batch
from train.objectives import Loss, Objective
from train.parallel import Attention, Lesson, draws, lesson, visible
from train.supervision import SteppedConfig, Supervision, Teacher, joint_matches, selection


@dataclass
class ObjectiveConfig(SteppedConfig):
    steps: int = 8  # tokens drafted at once; the paper trains 8
    keep: float = 0.8  # step i is trained at a share keep**i of the places, as the paper's; 1: at all
    start_layer: int | None = None  # the target's, whose weights the draft's last layer starts from

    def __post_init__(self) -> None:
        super().__post_init__()
        where = "method.objective"
        if not 0 < self.keep <= 1:
            raise ConfigError(f"{where}.keep={self.keep} is a share: set more than 0, and at most 1 for all.")


class PEagleObjective(Objective):
    """All steps of a `PEagle` draft of `target`, each a term of the loss."""

    draft: PEagle

    def __init__(
        self, draft: PEagle, target: Target, settings: ObjectiveConfig, coverage: float, seed: int
    ) -> None:
        super().__init__()
        self.draft = draft
        self.taps = draft.taps
        self.first_label = TABLE["peagle"](0).label
        self.settings = settings
        self.coverage = coverage
        self.seed, self.step = seed, 0
        self.supervision = Supervision(Teacher(target, draft.draft_ids), settings.weights(), settings)

    def begin(self, step: int) -> None:
        self.step = step

    def positions(self, batch: Batch) -> Tensor:
        return self.trained(batch, taught(batch, self.settings.steps)).sum((0, 1))

    def forward(self, batch: Batch, positions: Tensor) -> Loss:
        lesson = taught(batch, self.settings.steps)
        mask = self.trained(batch, lesson)
        rows, states = parallel_states(self.draft, lesson, mask)
        terms = lesson.terms(rows, states, mask)
        return self.supervision.loss(
            batch, terms, positions, self.draft.logits, list(self.draft.parameters())
        )

    def matches(self, draft: nn.Module, batch: Batch, steps: int) -> Tensor:
        assert isinstance(draft, PEagle)
        lesson = taught(batch, steps)
        rows, states = parallel_states(draft, lesson, lesson.mask)
        drafted = [draft.draft_ids[draft.logits(state).argmax(-1)] for state in states]
        return joint_matches(batch, rows, lesson.terms(rows, states, lesson.mask), drafted)

    def trained(self, batch: Batch, lesson: Lesson) -> Tensor:
        """The positions that this optimiser step trains on, bool [B, L, steps]."""
        shares = self.settings.keep ** torch.arange(lesson.mask.shape[-1], device=lesson.mask.device)
        drawn = draws(batch, self.seed, self.step)[:, : lesson.mask.shape[1]]
        return lesson.mask & (drawn[..., None] < shares)


def taught(batch: Batch, steps: int) -> Lesson:
    return lesson(batch, [TABLE["peagle"](i) for i in range(steps)])


def parallel_states(draft: PEagle, lesson: Lesson, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The places [B, R] where `mask` [B, L, S] has any step, and each step's states [B, R, d] there.

    States of steps that no step from them on is in the mask of their place are not computed: they are those
    of some other row. The RoPE position of step i at place n is n + i.
    """
    rows = selection(mask.any(-1))
    attend = Attention()
    known = draft(draft.fuse(lesson.features), lesson.pending, lesson.places, attend.record)
    states = [at(known, rows)]
    behind = mask.shape[-1] - 1
    if behind == 0:
        return rows, states

    # Each masked row by its number n * behind + i - 1, wherever its step or one after it is in the mask.
    needed = mask[..., 1:].flip(-1).cumsum(-1).flip(-1) > 0
    needed[:, 0, 0] = True  # for a batch that needs none, since kernels want at least a row
    chosen = selection(needed.flatten(1))
    place, step = chosen // behind, chosen % behind + 1
    attend.mask = visible(place, step, lesson.pending.shape[1], causal=True)
    unknown = draft.masked().expand(*chosen.shape, -1)
    masked = draft(unknown, torch.full_like(chosen, MASK), place + step, attend)

    order = torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
    index = torch.zeros_like(needed.flatten(1), dtype=torch.int64).scatter_(1, chosen, order)
    states += [at(masked, index.gather(1, rows * behind + i)) for i in range(behind)]
    return rows, states


def at(values: Tensor, rows: Tensor) -> Tensor:
    """[B, R, d] of values [B, T, d] at rows [B, R]."""
    return values.gather(1, rows[..., None].expand(-1, -1, values.shape[-1]))


def build(
    network: NetworkConfig, settings: ObjectiveConfig, target: Target, rows: Sequence[TokenRow], seed: int
) -> PEagleObjective:
    """A new draft for `target` with its vocabulary chosen from the trained-on tokens of `rows`, and its
    objective."""
    draft = PEagle.build(network, target)
    coverage = give_vocabulary(draft, rows, target)
    draft.initialise(seed, target, settings.start_layer)
    return PEagleObjective(draft, target, settings, coverage, seed)
