"""A small language model's objective: distillation on text, whoever wrote it (DistillSpec, Zhou et al. 2024).

Every row of a reply is one position of one term: a divergence from the target's law (train/supervision.py).
The text is what `data.replies` says, logged or written by the target. With `on_policy` some of it is written
by the draft in training itself, so that it learns where it really goes: for each micro-batch a coin decides
whether the draft rewrites its replies (as in GKD, Agarwal et al. 2024, algorithm 1), and the target is asked
what it thinks of them. What was drawn is data: no gradient goes through the drawing.

Coin and drawing follow from (seed, step, row) and the weights alone, so a resumed run writes the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

import torch
from torch import Tensor, nn

from configs.errors import ConfigError
from data.tokens import TokenRow
from data.vocabulary import give_vocabulary
from decoding.drafters import Seen, Turn
from decoding.drafters.small import TrainedReader
from decoding.law import Law
from decoding.randomness import Key, Purpose, Seeded
from decoding.warp import Warp
from models.small import NetworkConfig, Small
from models.target import Target
from train.acceptance import deployed
from train.alignment import TABLE, align
from train.batches import Batch
from train.features import Features, Online
from train.objectives import Loss, Objective
from train.supervision import Supervision, SupervisionConfig, Teacher, Term, selection

PLAIN = TABLE["plain"](0)


@dataclass
class ObjectiveConfig(SupervisionConfig):
    on_policy: float = 0.0  # share of the micro-batches whose replies the draft writes
    on_policy_temperature: float = 1.0  # at which it writes them

    def __post_init__(self) -> None:
        super().__post_init__()
        where = "method.objective"
        if not 0 <= self.on_policy <= 1:
            raise ConfigError(f"{where}.on_policy={self.on_policy} is a share: set a number from 0 to 1.")
        if self.on_policy_temperature < 0:
            raise ConfigError(
                f"{where}.on_policy_temperature={self.on_policy_temperature}: set 0 (greedy) or more."
            )


class SmallObjective(Objective):
    """Distils a `Small` draft from `target`."""

    draft: Small
    taps = ()
    first_label = PLAIN.label

    def __init__(
        self,
        draft: Small,
        target: Target,
        settings: ObjectiveConfig,
        coverage: float,
        rows: Sequence[TokenRow] = (),
        seed: int = 0,
    ) -> None:
        """rows: those that features are asked for by number; for `on_policy`."""
        super().__init__()
        self.draft = draft
        self.target = target
        self.settings = settings
        self.coverage = coverage
        self.rows = rows
        self.seed = seed
        self.step = 0
        self.supervision = Supervision(Teacher(target, draft.draft_ids), [1.0], settings)

    def describe(self) -> dict[str, Any]:
        cut = {} if self.draft.shape.cut is None else {"layers_of_the_target": self.draft.shape.cut}
        return {
            "draft_vocabulary": len(self.draft.draft_ids),
            "draft_vocabulary_coverage": self.coverage,
        } | cut

    def begin(self, step: int) -> None:
        self.step = step

    def batch(self, features: Features, numbers: Sequence[int]) -> Batch:
        """The rows, with replies of the draft's own if the coin says so."""
        coin = seeded(self.seed, self.step, numbers[0])
        if not coin.accept(self.settings.on_policy, Key(0, Purpose.accept)):
            return features.batch(numbers)
        written = rewrite(
            cast(Small, deployed(self.draft, self.target)),
            [self.rows[n] for n in numbers],
            [seeded(self.seed, self.step, n) for n in numbers],
            Warp(temperature=self.settings.on_policy_temperature),
            self.target.eos_ids,
        )
        return Online(self.target, written, self.taps).batch(range(len(written)))

    def positions(self, batch: Batch) -> Tensor:
        return align(PLAIN, batch.tokens, batch.mask).mask.sum()[None]

    def forward(self, batch: Batch, positions: Tensor) -> Loss:
        aligned = align(PLAIN, batch.tokens, batch.mask, target=batch.teacher)
        assert aligned.target is not None
        rows = selection(aligned.mask)
        states = self.draft(*aligned.tokens)
        term = Term(
            states.gather(1, rows[..., None].expand(-1, -1, states.shape[-1])),
            *(values.gather(1, rows) for values in (aligned.mask, aligned.target, aligned.labels)),
        )
        return self.supervision.loss(
            batch, [term], positions, self.draft.logits, list(self.draft.parameters())
        )

    def matches(self, draft: nn.Module, batch: Batch, steps: int) -> Tensor:
        """Draft i of row j is token j + 2 + i, which the network predicts where the table says."""
        assert isinstance(draft, Small)
        aligned = align(PLAIN, batch.tokens, batch.mask)
        drafted = draft.draft_ids[draft.logits(draft(*aligned.tokens)).argmax(-1)]
        hits = torch.zeros_like(batch.mask)  # of each token: it is the one that was drafted
        hits[:, PLAIN.label :] = (drafted == aligned.labels) & aligned.mask
        found = torch.zeros(*batch.tokens.shape, steps, dtype=torch.bool, device=hits.device)
        right = torch.ones_like(hits)
        for i in range(steps):
            ahead = hits[:, 2 + i :]
            right = right[:, : ahead.shape[1]] & ahead
            found[:, : ahead.shape[1], i] = right
        return found


def seeded(*parts: int) -> Seeded:
    digest = blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest()
    return Seeded(int.from_bytes(digest, "little"))


@torch.inference_mode()
def rewrite(
    draft: Small,
    rows: Sequence[TokenRow],
    randomness: Sequence[Seeded],
    warp: Warp,
    eos_ids: frozenset[int],
) -> list[TokenRow]:
    """The rows with their last reply written by `draft`, up to an end token or to the length of the old one.

    Only the new reply is trained on. It is read and drawn as the draft reads and draws when it decodes.
    """
    reader = TrainedReader(draft, eos_ids)
    ids = draft.draft_ids.tolist()
    prompts = [row.input_ids[: reply_start(row)] for row in rows]
    texts = [list(prompt) for prompt in prompts]
    ends = [reply_end(row) for row in rows]
    states = [reader.begin() for _ in rows]
    told = [0] * len(rows)
    live = list(range(len(rows)))
    law = Law(warp)
    while live:
        turns = []
        for n in live:
            seen = Seen(told[n], texts[n][told[n] : -1], texts[n][-1], torch.zeros(0, 0))
            turns.append(Turn(states[n], seen, 1, law, randomness[n]))
        for n, logits in zip(live, reader.read(turns), strict=True):
            told[n] = len(texts[n]) - 1
            key = Key(len(texts[n]), Purpose.emit)
            texts[n].append(ids[randomness[n].draw(law(logits, ()), key)])
        live = [n for n in live if texts[n][-1] not in eos_ids and len(texts[n]) < ends[n]]
    return [
        TokenRow(row.id, row.category, text, [0] * len(prompt) + [1] * (len(text) - len(prompt)))
        for row, prompt, text in zip(rows, prompts, texts, strict=True)
    ]


def reply_end(row: TokenRow) -> int:
    """One after the last token that is trained on."""
    return len(row.loss_mask) - row.loss_mask[::-1].index(1)


def reply_start(row: TokenRow) -> int:
    """The first of the last run of tokens that are trained on, but at least 1: something must be read."""
    start = reply_end(row)
    while start > 1 and row.loss_mask[start - 1]:
        start -= 1
    return start


def build(
    network: NetworkConfig, settings: ObjectiveConfig, target: Target, rows: Sequence[TokenRow], seed: int
) -> SmallObjective:
    """A new draft for `target` with its vocabulary chosen from the trained-on tokens of `rows`, and its
    objective."""
    draft = Small.build(network, target)
    coverage = give_vocabulary(draft, rows, target)
    draft.initialise(seed, target)
    return SmallObjective(draft, target, settings, coverage, rows, seed)
