"""Held-out acceptance: what the real decoder accepts, and what training says it should.

The decoder is the judge (design.md, idea 5): checkpoints are chosen by the mean acceptance length it reaches
on prompts that were never trained on. Beside it stands a teacher-forced estimate on the very sequences it
produced, which goes through train/alignment.py as training does. The estimate is walked as the decoder walks:
from the row whose token is pending, over as many drafts as match, to the row of the next pending token. In
exact arithmetic both are equal, since the drafts before the first mismatch are the sequence's own tokens; an
estimate outside the decoder's confidence interval means that training and decoding do not do the same thing
(a shift by one, other layers, other positions), and is an alarm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from configs.schema import Config, DecodeConfig
from data.tokens import Prompt, TokenRow
from decoding.acceptance import (
    acceptance_by_position,
    acceptance_rate,
    bootstrap_ratio,
    mean_acceptance_length,
)
from decoding.build import build_drafter
from decoding.decoder import Decoder
from decoding.sequence import Generation, Params
from models import draft_class
from models.target import Target
from train.features import Online
from train.objectives import Objective

CONFIDENCE = 0.95
RESAMPLES = 1000


def measure(
    objective: Objective, target: Target, prompts: Sequence[Prompt], config: Config
) -> dict[str, Any]:
    """Decodes `prompts` greedily with the draft as it would be deployed, and compares with the estimate.

    As a chain of `decode.draft_tokens`, whatever tree is decoded later: that is what the estimate knows.
    Counts are pooled over prompts; the interval is a bootstrap over prompts. Absent is None.
    """
    greedy = replace(Params.of(config.decode, config.seed), temperature=0.0, stop=())
    params = replace(greedy, max_new_tokens=config.trainer.eval_new_tokens)
    draft = deployed(objective.draft, target)
    decoder = Decoder(target, build_drafter(target, draft, DecodeConfig()))
    generations = [decoder.generate(prompt.ids, params) for prompt in prompts]
    walks, uniform = estimate(objective, draft, target, prompts, generations, params)
    return compare(generations, walks, params, config.seed) | {"uniform": uniform}


def compare(
    generations: Sequence[Generation], walks: Sequence[tuple[int, int]], params: Params, seed: int
) -> dict[str, Any]:
    """The decoder's figures beside those of the walks (rounds, accepted) of the same sequences."""
    rounds = [done for generation in generations for done in generation.rounds]
    emitted = [sum(1 + done.accepted for done in generation.rounds) for generation in generations]
    interval = bootstrap_ratio(emitted, [len(g.rounds) for g in generations], CONFIDENCE, RESAMPLES, seed)
    walked = sum(count for count, _ in walks)
    walk = 1 + sum(accepted for _, accepted in walks) / walked if walked else None
    return {
        "mean_acceptance_length": mean_acceptance_length(rounds),
        "mean_acceptance_length_ci": interval,
        "acceptance_rate": acceptance_rate(rounds),
        "acceptance_by_position": acceptance_by_position(rounds),
        "walk": walk,
        "alarm": interval is not None and walk is not None and not interval[0] <= walk <= interval[1],
        "prompts": len(generations),
        "rounds": len(rounds),
        "new_tokens": sum(len(generation.tokens) for generation in generations),
        "draft_tokens": params.draft_tokens,
    }


@torch.no_grad()
def estimate(
    objective: Objective,
    draft: nn.Module,
    target: Target,
    prompts: Sequence[Prompt],
    generations: Sequence[Generation],
    params: Params,
) -> tuple[list[tuple[int, int]], list[float]]:
    """Each sequence's walk, and the share of joint matches at each draft position, uniform over all rows.

    The second is what training logs. Decoding meets other rows: its rounds start after mismatches.
    """
    walks: list[tuple[int, int]] = []
    hits, counts = torch.zeros(params.draft_tokens), torch.zeros(params.draft_tokens)
    for prompt, generation in zip(prompts, generations, strict=True):
        first, length = len(prompt.ids), len(prompt.ids) + len(generation.tokens)
        mask = [0] * first + [1] * len(generation.tokens)
        row = TokenRow(prompt.id, prompt.category, prompt.ids + generation.tokens, mask)
        if length <= first + 1 or params.draft_tokens == 0:  # one token: no round was played
            walks.append((0, 0))
            continue
        batch = Online(target, [row], objective.taps).batch([0]).to(target.device)
        matches = objective.matches(draft, batch, params.draft_tokens)[0, :length].cpu()  # without padding
        walks.append(walk(matches, first, params.max_new_tokens))
        # A round can start at row first - 1 at the earliest, and draft i needs a token to be compared with.
        hits += matches[first - 1 :].sum(0)
        counts += torch.tensor([max(0, length - first - 1 - i) for i in range(params.draft_tokens)])
    return walks, (hits / counts.clamp(min=1)).tolist()


def walk(matches: Tensor, first: int, max_new_tokens: int) -> tuple[int, int]:
    """(rounds, accepted drafts) of a decoder to which row j's drafts match as `matches` [T, K] says.

    `first` is the first token that was generated, pending when the first round starts; row j = first - 1
    drafts what follows it. A round at j that accepts a drafts makes token j + 2 + a pending, so the next
    starts at row j + 1 + a.
    """
    length, k = matches.shape
    j, rounds, accepted = first - 1, 0, 0
    while j + 2 < length:
        budget = min(k, max_new_tokens - (j + 2 - first) - 1)  # with r tokens to go the decoder drafts r - 1
        run = int(matches[j, : max(budget, 0)].long().cumprod(0).sum())
        rounds, accepted, j = rounds + 1, accepted + run, j + 1 + run
    return rounds, accepted


def deployed(draft: Any, target: Target) -> nn.Module:
    """A copy of the draft in training as `load_draft` would give it, in the target's dtype."""
    twin = draft_class(draft.method).from_config(draft.shape.to_dict(), target)
    twin.load_state_dict(draft.state_dict())
    return twin.to(target.dtype).eval().requires_grad_(False)
