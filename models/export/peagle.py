"""P-EAGLE for vLLM: as a plain config for its parallel drafting, and in the `speculators` format.

Names and layers are EAGLE-3's (eagle3.py). A masked token is one tensor more, `mask_hidden`, and one id
more, `mask_token_id`: vLLM 0.32 (`v1/spec_decode/llm_base_proposer.py`) looks the masked token's embedding up
in the draft's own `embed_tokens`. So the target's embedding is written with the learnt vector in the row of
an id that no text has.

Everything is drafted in one forward, so `norm_output`, which says what a next step is fed, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from models.export import eagle3
from models.export.agreement import same
from models.export.eagle3 import ROWS, check_layers, drawn
from models.export.layout import Layout
from models.export.llama import (
    Reason,
    check_embedding,
    check_tokens,
    in_float32,
    mask_note,
    placeholder,
    refuse_for,
    starts,
    unverifiable,
    vllm_command,
    with_mask,
)
from models.export.reference import Eagle3Reading
from models.peagle import MASK, PEagle
from models.target import Target

MASKS = 3  # masked rows compared


def vllm(draft: PEagle, target: Target) -> Layout:
    return parallel(draft, target, eagle3.vllm(draft, target))


def speculators(draft: PEagle, target: Target) -> Layout:
    made = parallel(draft, target, eagle3.speculators(draft, target))
    ours = {"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle"}
    inner = made.config["speculators_config"] | {"algorithm": "peagle"}
    return Layout(made.tensors, made.config | ours | {"speculators_config": inner}, made.needs)


LAYOUTS: dict[str, Callable[[PEagle, Target], Layout]] = {"vllm": vllm, "speculators": speculators}


def parallel(draft: PEagle, target: Target, made: Layout) -> Layout:
    """EAGLE-3's layout with a masked token."""
    mask = placeholder(target)
    tensors = dict(made.tensors)
    row = tensors.pop("mask_embedding")
    tensors["mask_hidden"] = draft.mask_hidden.detach()[None]
    tensors["embed_tokens.weight"] = with_mask(target, mask, row)
    notes = [note for note in (made.needs, mask_note(target, mask)) if note]
    return Layout(tensors, made.config | {"mask_token_id": mask}, "; ".join(notes))


def serve(engine: str, target: str, folder: Path, draft_tokens: int) -> str:
    """The command that serves the target with this draft; vLLM reads both folders."""
    return vllm_command("eagle3", target, folder, draft_tokens, parallel_drafting=True)


def refuse(engine: str, draft: PEagle) -> None:
    """Raises `CheckpointError` with every reason why `engine` would serve this draft as another network."""
    shape = draft.shape
    reasons: list[Reason] = [*unverifiable(shape)]
    if engine == "speculators":
        why = "vLLM drops fc_norm from a P-EAGLE draft in the speculators format"
        reasons.append(eagle3.flagged(shape, "fc_norm", why))
    refuse_for(engine, reasons)


@torch.no_grad()
def check(folder: Path, draft: PEagle, target: Target) -> None:
    """Reads `folder` by names and config alone and compares it with `draft`; raises `RuntimeError` where they
    differ. In float32, one round from the first position and one from a far one."""
    trained: PEagle = in_float32(draft, target)
    reading = Eagle3Reading(folder, trained.embedding)
    check_tokens(folder, reading, target)
    check_embedding(reading, trained, mask=reading.config["mask_token_id"])
    check_layers(reading, trained, target)
    same(reading.masked(), trained.masked()[0], "features of a masked token")
    for start in starts(trained.shape, ROWS + MASKS):
        check_round(reading, trained, start)
    reading.finish()


def check_round(reading: Eagle3Reading, trained: PEagle, start: int) -> None:
    """The rows of what was read and the masked rows behind them give the same logits."""
    taps, tokens = drawn(trained, start)
    known, mask = tokens[:ROWS], reading.config["mask_token_id"]
    known = torch.where(known == mask, (known + 1) % len(trained.embedding), known)
    positions = torch.arange(start, start + ROWS + MASKS)

    theirs = torch.cat([reading.fuse(taps), reading.masked().expand(MASKS, -1)])
    logits, _ = reading.forward(theirs, torch.cat([known, torch.full((MASKS,), mask)]), positions)
    ours = torch.cat([trained.fuse(taps[None]), trained.masked().expand(-1, MASKS, -1)], dim=1)
    fed = torch.cat([known, torch.full((MASKS,), MASK)])
    expected = trained.logits(trained(ours, fed[None], positions[None]))[0]
    same(logits, expected, f"logits of a round from position {start}")
