"""The learning rates over a run, as a share of their peaks, `trainer.lr` and `trainer.muon_lr`."""

from __future__ import annotations

import math

from configs.schema import Schedule, TrainerConfig


def share(step: int, steps: int, trainer: TrainerConfig) -> float:
    """The share of the peak rates at `step` (0, 1, ...) of `steps`.

    A linear warm-up over `warmup_ratio` of the steps, whose first step already moves; then constant, a half
    cosine, or (wsd) constant with a linear fall over the last `decay_ratio` of the steps, both down to
    `final_lr_ratio`.
    """
    warmup = round(trainer.warmup_ratio * steps)
    if step < warmup:
        return (step + 1) / warmup
    final = trainer.final_lr_ratio
    match trainer.schedule:
        case Schedule.constant:
            return 1.0
        case Schedule.cosine:
            done = (step - warmup) / max(1, steps - warmup)
            return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        case Schedule.wsd:
            decay = max(1, round(trainer.decay_ratio * steps))
            left = max(0, steps - step) / decay
            return final + (1 - final) * min(1.0, left)
