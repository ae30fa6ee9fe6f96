"""IBM's MLP speculator in the layout of its published checkpoints, which vLLM reads (`MLPSpeculatorConfig`
and `model_executor/models/mlp_speculator.py`).

The names are the network's own behind `speculator.`. Tied weights stand once, as vLLM registers them: one
embedding, head and norm, and two projections. `n_predict` is also what weighs states against tokens, so it is
always the number of heads that were trained. A reduced vocabulary cannot be said: the head is written over
the whole one, with the same proposals (`layout.whole_head`).

vLLM 0.32 reads the config and has no model for it: the line in its registry is commented out since the engine
was rewritten ("supported in V1" is still to come). Versions with the first engine, up to 0.10, serve it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.errors import CheckpointError
from models.export.agreement import Stored, expect, same, same_choices
from models.export.layout import Layout, whole_head
from models.mlp_speculator import MlpSpeculator
from models.target import Target

EPS = 1e-6  # of all norms; nothing in the config says so
ROWS = 8  # hidden states compared
PREFIX = "speculator."


def vllm(draft: MlpSpeculator, target: Target) -> Layout:
    shape = draft.shape
    tensors = {}
    for name, tensor in draft.state_dict().items():
        if name in ("d2t", "t2d"):
            continue
        weight = tensor.detach()
        if name.startswith("head.") and not draft.full_vocabulary:
            weight = whole_head(weight, draft.draft_ids, shape.vocab_size)
        tensors[PREFIX + name] = weight
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": shape.target_hidden_size,
        "inner_dim": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "n_predict": shape.heads,
        "n_candidates": shape.heads,
        "top_k_tokens_per_head": [1] * shape.heads,  # as many as heads, or the config is refused; unused
        "tie_weights": shape.tie_weights,
        "scale_input": shape.scale_input,
        "torch_dtype": str(next(draft.parameters()).dtype).removeprefix("torch."),
    }
    needs = "vLLM up to 0.10 with its first engine: 0.32 has no model for this architecture"
    if not draft.full_vocabulary:
        needs += (
            f"; a head over {shape.draft_vocab_size} tokens is written over all {shape.vocab_size}, with the "
            "same proposals at a larger cost (to train what fits, set method.network.draft_vocab_size=null)"
        )
    return Layout(tensors, config, needs)


LAYOUTS: dict[str, Callable[[MlpSpeculator, Target], Layout]] = {"vllm": vllm}


def refuse(engine: str, draft: MlpSpeculator) -> None:
    """Raises `CheckpointError` for what `engine` would not load."""
    if draft.shape.tie_weights and draft.shape.heads == 1:
        raise CheckpointError(
            f"This draft cannot be exported for {engine}: it refuses tied weights where there is one head. "
            "Train a draft with method.network.tie_weights=false, or with more heads."
        )


def serve(engine: str, target: str, folder: Path, draft_tokens: int) -> str:
    """The command that serves the target with this draft; draft_tokens: no more than there are heads."""
    settings = {"model": str(folder.resolve()), "num_speculative_tokens": draft_tokens}
    command = shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(settings)])
    return f"VLLM_USE_V1=0 {command}"


@torch.no_grad()
def check(folder: Path, draft: MlpSpeculator, target: Target) -> None:
    """Reads `folder` by names and config alone and walks all steps beside `draft`; raises `RuntimeError`
    where they differ. In float32, on hidden states and tokens drawn at random."""
    trained = MlpSpeculator(draft.shape, target.embedding.to("cpu", torch.float32)).eval()
    trained.load_state_dict(draft.state_dict())
    generator = torch.Generator().manual_seed(0)
    shape = trained.shape
    # Far from unit size: scale_input must show.
    hidden = 7 * torch.randn(ROWS, shape.target_hidden_size, generator=generator)
    tokens = torch.randint(shape.vocab_size, (shape.heads, ROWS), generator=generator)
    steps = read(folder, hidden, tokens)
    expect(len(steps) == shape.heads, f"it predicts {len(steps)} tokens, and the draft {shape.heads}")
    state = torch.empty(0)
    for depth, (theirs, logits) in enumerate(steps):
        state = trained.start(hidden, tokens[0]) if depth == 0 else trained.step(state, tokens[depth], depth)
        same(theirs, state, f"the states of step {depth + 1}")
        expect(logits.shape[-1] == shape.vocab_size, f"it proposes among {logits.shape[-1]} tokens")
        same_choices(
            logits, trained.draft_ids, trained.logits(state, depth), f"the logits of step {depth + 1}"
        )


def read(folder: Path, hidden: Tensor, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each step the state [n, inner] and logits [n, V], as vLLM computes them from hidden [n, d] and the
    steps' tokens [n_predict, n]."""
    stored = Stored(folder)
    config = stored.config
    steps, vocab, width = config["n_predict"], config["vocab_size"], config["emb_dim"]
    inner = config["inner_dim"] or width
    expect(len(config["top_k_tokens_per_head"]) == steps, "top_k_tokens_per_head is not of n_predict")
    kept = 0.5 ** (0.5 / steps)
    token_weight = ((1 - kept**2) * (inner / 2)) ** 0.5 / kept

    def normed(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)

    state = normed(hidden) / 2**0.5 if config["scale_input"] else hidden
    made = []
    for step in range(steps):
        one = 0 if config["tie_weights"] else step
        projection = min(step, 1) if config["tie_weights"] else step
        weight = stored.weight(f"{PREFIX}proj.{projection}.weight", inner, width if step == 0 else inner)
        token = stored.weight(f"{PREFIX}emb.{one}.weight", vocab, inner)[tokens[step]]
        mixed = normed(state @ weight.T + token_weight * token)
        gain, bias = (stored.weight(f"{PREFIX}ln.{one}.{leaf}", inner) for leaf in ("weight", "bias"))
        state = F.gelu(mixed * gain + bias)
        made.append((state, state @ stored.weight(f"{PREFIX}head.{one}.weight", vocab, inner).T))
    stored.finish()
    return made
