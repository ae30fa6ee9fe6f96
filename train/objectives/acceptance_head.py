"""An acceptance head's objective: to predict min(1, p / q) of a frozen draft's tokens (SpecDec++, Huang et
al. 2024, arXiv 2405.19715, §3).

The draft is unrolled from each row of the text as it decodes (train/unrolled.py), except that it reads tokens
of its own: at each step one drawn from its law q or, with probability `target_share`, the text's. The head is
asked about every drawn token, on the state in which that token is the input (train/alignment.py), and learns
what the target's law p makes of it: min(1, p / q). p is known only behind the text itself, so a path is
judged up to and including its first token that is not the text's. That is what a round of decoding sees too:
the target decides on a token only if it accepted those before it. The text's tokens lead paths deeper than
the draft would come by itself; the head is not asked about them.

Refusals weigh w times as much in the loss, as in the paper. That moves the best prediction for a token that
is accepted a times out of one, whose odds are a / (1 - a), to odds of a / (w (1 - a)). The loss allows for it
beforehand, so what the head says stays a probability, which rules may multiply and weigh against costs.

No head changes the acceptance length that checkpoints are chosen by. So the recipe has trainer.eval_every=0,
with which the last one is taken, and decode.stop_drafting=fixed while it trains.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.errors import ConfigError
from data.tokens import TokenRow
from decoding.warp import Warp
from models import load_draft
from models.acceptance_head import HeadedDraft, HeadedShape, NetworkConfig
from models.checkpoint import WEIGHTS, find_draft
from models.files import sha256_file
from models.target import Target
from train.alignment import TABLE, align
from train.batches import Batch
from train.objectives import Loss, Objective
from train.supervision import joint_matches, selection
from train.unrolled import UnrolledAttention, unroll


@dataclass
class ObjectiveConfig:
    draft: str | None = None  # the frozen draft: its folder, its run's, or its experiment's (the newest run)
    steps: int = 5  # drafted tokens of a path that are judged at most
    temperature: float = 1.0  # of both laws: the one that will be decoded at
    target_share: float = 0.15  # of the tokens read that are the text's; the paper's r
    rejection_weight: float = 6.0  # of a refusal in the loss, beside 1 of an acceptance; the paper's
    chunk: int = 256  # rows whose laws exist at one time

    def __post_init__(self) -> None:
        where = "method.objective"
        if self.draft is None:
            raise ConfigError(
                f"{where}.draft is not set, and an acceptance head needs a finished draft. Name its folder, "
                f"its run's, or its experiment's, as in {where}.draft=runs/smollm2_cpu."
            )
        for name in ("steps", "chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{where}.{name}={getattr(self, name)} must be at least 1.")
        if not 0 <= self.target_share < 1:
            raise ConfigError(
                f"{where}.target_share={self.target_share} is a share, and at 1 nothing would be judged: set "
                "a number in [0, 1)."
            )
        if not self.rejection_weight > 0:
            raise ConfigError(
                f"{where}.rejection_weight={self.rejection_weight} must be positive; 1 weighs both alike."
            )
        Warp(self.temperature)


class AcceptanceHeadObjective(Objective):
    """Trains the head of a `HeadedDraft`."""

    draft: HeadedDraft

    def __init__(
        self, draft: HeadedDraft, target: Target, settings: ObjectiveConfig, seed: int, facts: dict[str, Any]
    ) -> None:
        """facts: which draft is frozen: its folder and hash."""
        super().__init__()
        self.draft = draft
        self.target = target
        self.taps = draft.taps
        self.first_label = TABLE["eagle3"](1).tokens[0]
        self.settings = settings
        self.warp = Warp(settings.temperature)
        self.facts = facts
        self.seed, self.step = seed, 0

    def describe(self) -> dict[str, Any]:
        return self.facts

    def origin(self) -> dict[str, Any]:
        return self.facts

    def begin(self, step: int) -> None:
        self.step = step

    def positions(self, batch: Batch) -> Tensor:
        """How many paths begin, [1]: the loss is theirs, summed over what is judged of each."""
        return first_candidates(batch).sum()[None]

    def forward(self, batch: Batch, positions: Tensor) -> Loss:
        settings = self.settings
        numbers = uniform_numbers(batch, settings.steps, self.seed, self.step)
        path = drafted_paths(
            self.draft.draft, batch, self.warp, settings.target_share, numbers, settings.chunk
        )
        accepted = self.accepted(batch, path)
        log_odds = self.draft.log_odds(judged(path, "states")).float()
        loss = weighted_cross_entropy(log_odds, accepted, settings.rejection_weight)
        predicted = log_odds.sigmoid()
        found = {
            "loss": loss,
            "acceptance": accepted,
            "predicted": predicted,
            "accuracy": torch.where(predicted > 0.5, accepted, 1 - accepted),  # the likelier case comes true
        }
        counts = torch.stack([step.judged.sum() for step in path])
        metrics = {name: (summed(values.detach(), counts), counts) for name, values in found.items()}
        return Loss(loss.sum() / positions[0].clamp(min=1), metrics)

    @torch.no_grad()
    def accepted(self, batch: Batch, path: Sequence[Drafted]) -> Tensor:
        """min(1, p / q) of all judged tokens, step after step: float32 [n]."""
        size = self.settings.chunk
        rows, tokens = judged(path, "teacher").split(size), judged(path, "tokens")[:, None].split(size)
        # In the target's own dtype, whatever the autocast, as the target decides when it decodes.
        with torch.autocast(batch.hidden.device.type, enabled=False):
            laws = (self.warp.laws(self.target.lm_head(batch.hidden[some])) for some in rows)
            p = torch.cat([law.gather(1, some) for law, some in zip(laws, tokens, strict=True)])
        return (p.squeeze(1) / judged(path, "chance")).clamp(max=1)

    def matches(self, draft: nn.Module, batch: Batch, steps: int) -> Tensor:
        """The frozen draft's."""
        assert isinstance(draft, HeadedDraft)
        unrolled = unroll(draft.draft, batch, steps)
        drafted = [draft.draft_ids[draft.draft.logits(step.states).argmax(-1)] for step in unrolled.steps]
        return joint_matches(batch, unrolled.rows, unrolled.steps, drafted)


@dataclass(frozen=True)
class Drafted:
    """The token that each of R rows read at one step, and the state that it led to."""

    states: Tensor  # [B, R, d]: after the token was read
    judged: Tensor  # [B, R] bool: drawn from the draft, in the reply, with nothing but text before it
    teacher: Tensor  # [B, R] int64: the packed target row whose law decides on it; anything where not judged
    tokens: Tensor  # [B, R] int64: target ids
    chance: Tensor  # [B, R] float32: the draft's probability of what it drew


def judged(path: Sequence[Drafted], field: str) -> Tensor:
    """`field` of all judged tokens, step after step: [n, ...]."""
    return torch.cat([getattr(step, field)[step.judged] for step in path])


@torch.no_grad()
def drafted_paths(
    draft: Any, batch: Batch, warp: Warp, target_share: float, numbers: Tensor, chunk: int
) -> list[Drafted]:
    """Unrolls `draft` over tokens of its own from each row of the reply: one `Drafted` for each of the steps
    1, 2, ... Step 0 reads the pending token, which is text.

    numbers: [B, T, steps, 2], uniform in [0, 1): what row j draws by at each step, and whether it reads that.
    """
    steps = numbers.shape[2]
    first = align(TABLE["eagle3"](0), batch.tokens, batch.mask, features=batch.taps)
    length = first.rows
    assert first.features is not None
    rows = selection(first_candidates(batch))
    everywhere = torch.arange(length, device=rows.device).expand(len(rows), -1)
    attend = UnrolledAttention()
    state = draft(draft.fuse(first.features), first.tokens[0], everywhere, attend)
    state = state.gather(1, rows[..., None].expand(-1, -1, state.shape[-1]))
    attend.select(rows, length)

    path: list[Drafted] = []
    text_so_far = torch.ones_like(rows, dtype=torch.bool)
    for i in range(1, steps + 1):
        text, in_reply, teacher = (values.gather(1, rows) for values in candidates(batch, i, length))
        draws, coins = numbers[:, :length, i - 1].to(rows.device).unbind(-1)
        token, chance = drawn(draft, state, draws.gather(1, rows), warp, chunk)
        own = coins.gather(1, rows) >= target_share
        token = torch.where(own, token, text)
        state = draft(state, token, rows + i, attend)
        text_so_far = text_so_far & in_reply
        path.append(Drafted(state, text_so_far & own, teacher, token, chance))
        text_so_far = text_so_far & (token == text)
    return path


def candidates(batch: Batch, step: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """What rows 0 to `length` - 1 meet at `step`, each [B, length]: the text's token, whether it is to be
    trained on (not behind the batch's end), and the packed target row that decides on the token there."""
    tokens, mask = F.pad(batch.tokens, (0, step)), F.pad(batch.mask, (0, step))
    judge = align(TABLE["specdec"](0), tokens, mask, target=F.pad(batch.teacher, (0, step), value=-1))
    assert judge.target is not None
    at = TABLE["eagle3"](step).tokens[0] - judge.start
    text, counts, teacher = (v[:, at : at + length] for v in (judge.tokens[0], judge.mask, judge.target))
    return text, counts, teacher


def first_candidates(batch: Batch) -> Tensor:
    """bool [B, T - 2]: the rows whose first drafted token is in the reply."""
    length = align(TABLE["eagle3"](0), batch.tokens, batch.mask).rows
    return candidates(batch, 1, length)[1]


def drawn(draft: Any, states: Tensor, numbers: Tensor, warp: Warp, chunk: int) -> tuple[Tensor, Tensor]:
    """Target ids [B, R] drawn after `states` [B, R, d] by the uniform `numbers` [B, R], and their
    probabilities."""
    ids, chances = [], []
    for state, number in zip(states.flatten(0, 1).split(chunk), numbers.flatten().split(chunk), strict=True):
        law = warp.laws(draft.logits(state))
        cumulative = law.cumsum(-1, dtype=torch.float64)
        index = torch.searchsorted(cumulative, number[:, None] * cumulative[:, -1:], right=True)
        ids.append(draft.draft_ids[index.squeeze(1)])
        chances.append(law.gather(1, index).squeeze(1))
    return torch.cat(ids).view_as(numbers), torch.cat(chances).view_as(numbers)


def weighted_cross_entropy(log_odds: Tensor, accepted: Tensor, rejection_weight: float) -> Tensor:
    """[n]: a -log s + w (1 - a) -log(1 - s) of labels a, with odds of s that are `log_odds`' divided by w.

    Least where the odds are those of a, whatever w.
    """
    shifted = log_odds - math.log(rejection_weight)
    return accepted * F.softplus(-shifted) + rejection_weight * (1 - accepted) * F.softplus(shifted)


def summed(values: Tensor, counts: Tensor) -> Tensor:
    """[len(counts)]: the sums of consecutive parts of values [n] of these sizes."""
    return torch.stack([part.sum() for part in values.split(counts.tolist())])


def uniform_numbers(batch: Batch, steps: int, seed: int, step: int) -> Tensor:
    """float64 [B, T, steps, 2], uniform in [0, 1); 0 behind a sequence's last trained token.

    Each sequence's follow from the seed, the optimiser step and its own tokens: the same whatever the
    padding, the other sequences of the batch, and the run's interruptions.
    """
    numbers = torch.zeros(*batch.tokens.shape, steps, 2, dtype=torch.float64)
    for row, tokens, mask in zip(numbers, batch.tokens.cpu(), batch.mask.cpu(), strict=True):
        length = int(mask.nonzero().max()) + 1 if mask.any() else 0
        text = zlib.crc32(tokens[:length].numpy().tobytes())
        drawn = np.random.default_rng([seed, step, text]).random((length, steps, 2))
        row[:length] = torch.from_numpy(drawn)
    return numbers


def build(
    network: NetworkConfig, settings: ObjectiveConfig, target: Target, rows: Sequence[TokenRow], seed: int
) -> AcceptanceHeadObjective:
    """A new head on the draft that `settings` names, and its objective."""
    assert settings.draft is not None
    folder = find_draft(settings.draft, Path(), "")
    draft = load_draft(folder, target, torch.float32)
    headed = HeadedDraft(HeadedShape.around(draft, network), draft)
    headed.initialise(seed)
    facts = {"frozen_draft": str(folder), "frozen_draft_sha256": sha256_file(folder / WEIGHTS)}
    return AcceptanceHeadObjective(headed.to(target.device), target, settings, seed, facts)
