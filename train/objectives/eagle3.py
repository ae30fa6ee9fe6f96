"""EAGLE-3's objective: training-time test (Li et al., NeurIPS 2025; research notation in train/alignment.py).

The draft is unrolled for `steps` steps over ground-truth tokens. Step 0 reads the target's fused taps, each
later step its own previous output at the same row, so that it learns from the states it will meet when it
drafts. At step i, row j attends to the step-0 keys of rows <= j and to its own row's keys of steps 1..i,
exactly what its K/V cache would hold.

Loss: soft cross-entropy against the target's law over the full vocabulary, restricted to the draft
vocabulary; float32 whatever the autocast; averaged over valid positions, never over padding. Differences from
the reference code, which averages over all rows and drops rows whose argmax lies outside the draft
vocabulary, are on purpose.

Prompts are long and replies short, so only what the loss can see is computed: steps >= 1 run on the rows that
some step supervises, the heads on the supervised rows only, and the target's head on its draft-vocabulary
rows only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.errors import ConfigError
from data.tokens import TokenRow
from data.vocabulary import choose_draft_vocabulary
from models.eagle3 import Eagle3, NetworkConfig
from models.target import Target
from train.alignment import TABLE, align
from train.batches import GRAIN, Batch, rounded
from train.losses import ChunkedLoss, soft_cross_entropy
from train.objectives import Loss, Objective


@dataclass
class ObjectiveConfig:
    steps: int = 7  # training-time-test steps; the paper has 5, its code 7
    step_decay: float = 0.8  # step i weighs step_decay**i; weights are normalised to sum 1
    draft_mass: str = "keep"  # of the target in the draft vocabulary; renormalise divides the law by it
    chunk: int = 256  # target rows whose logits, of all steps, exist at one time

    def __post_init__(self) -> None:
        where = "method.objective"
        if self.steps < 1 or self.chunk < 1:
            raise ConfigError(f"{where}: steps={self.steps} and chunk={self.chunk} must be at least 1.")
        if self.step_decay <= 0:
            raise ConfigError(
                f"{where}.step_decay={self.step_decay} must be positive; 1 weighs all steps alike."
            )
        if self.draft_mass not in ("keep", "renormalise"):
            raise ConfigError(f"{where}.draft_mass={self.draft_mass!r} is unknown: set keep or renormalise.")


class UnrolledAttention:
    """How an unrolled draft attends, given to the network as `attend`.

    Step 0 is plain causal attention over all rows of the sequence; padding, on the right, is after every real
    row. In later steps the queries are a selection of rows, and each sees the step-0 keys of rows up to its
    own and its own keys of steps 1..i.
    """

    def __init__(self) -> None:
        self._allowed: Tensor | None = None  # [B, 1, 1, R, T] bool; None in step 0
        self._bias: Tensor | None = None  # 0 where allowed, else -inf, in the dtype of the scores
        self._context: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> K, V of step 0: [B, Hkv, T, hd]
        self._own: dict[int, list[tuple[Tensor, Tensor]]] = {}  # layer -> K, V of steps 1..i: [B, Hkv, R, hd]

    def select(self, rows: Tensor, length: int) -> None:
        """From now on queries are `rows` [B, R] of the sequence, whose step 0 had `length` rows."""
        self._allowed = (torch.arange(length, device=rows.device) <= rows[..., None])[:, None, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, H, R, hd], k and v [B, Hkv, R, hd], rotated -> [B, H, R, hd]."""
        q, k = q.to(v.dtype), k.to(v.dtype)
        if self._allowed is None:
            self._context[layer] = (k, v)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if self._bias is None:
            self._bias = q.new_zeros(self._allowed.shape).masked_fill_(~self._allowed, float("-inf"))
        own = self._own.setdefault(layer, [])
        own.append((k, v))
        # Autocast would widen the scores, by far the largest tensors here, to float32.
        with torch.autocast(q.device.type, enabled=False):
            return attend_to_both(q, *self._context[layer], own, self._bias)


def attend_to_both(q: Tensor, k: Tensor, v: Tensor, own: list[tuple[Tensor, Tensor]], bias: Tensor) -> Tensor:
    """Attention of q [B, H, R, hd] over a context k, v [B, Hkv, T, hd] and over each row's own keys.

    own: one pair [B, Hkv, R, hd] for each of the steps 1..i. bias [B, 1, 1, R, T]: added to context scores.
    """
    b, heads, rows, size = q.shape
    q = q.view(b, k.shape[1], -1, rows, size) * size**-0.5  # [B, Hkv, G, R, hd]: G query heads share a key
    own_k, own_v = (torch.stack(tensors, dim=3) for tensors in zip(*own, strict=True))  # [B, Hkv, R, i, hd]
    context = (q.flatten(2, 3) @ k.mT).view(*q.shape[:4], -1) + bias  # [B, Hkv, G, R, T]
    itself = (q.transpose(2, 3) @ own_k.mT).transpose(2, 3)  # [B, Hkv, G, R, i]
    law = torch.cat([context, itself], dim=-1).softmax(-1)
    context, itself = law.split([k.shape[2], len(own)], dim=-1)
    seen = (context.flatten(2, 3) @ v).view(q.shape) + (itself.transpose(2, 3) @ own_v).transpose(2, 3)
    return seen.reshape(b, heads, rows, size)


@dataclass(frozen=True)
class Step:
    """One step of the unrolled draft on the R selected rows of each sequence."""

    states: Tensor  # [B, R, d]
    mask: Tensor  # [B, R] bool: supervised at this step
    teacher: Tensor  # [B, R] int64: the packed target row that teaches
    labels: Tensor  # [B, R] int64


@dataclass(frozen=True)
class Unrolled:
    rows: Tensor  # [B, R] int64: the selected rows j, ascending, then rows that no step supervises as padding
    steps: list[Step]


def unroll(draft: Eagle3, batch: Batch, steps: int) -> Unrolled:
    """Runs `draft` for `steps` steps over `batch`. The RoPE position of row j at step i is j + i."""
    # Padded so that every step has all rows of step 0; what is beyond a sequence's end has mask 0.
    tokens, mask = F.pad(batch.tokens, (0, steps)), F.pad(batch.mask, (0, steps))
    teacher = F.pad(batch.teacher, (0, steps), value=-1)
    aligned = [
        align(TABLE["eagle3"](i), tokens, mask, features=batch.taps, target=teacher) for i in range(steps)
    ]
    length = aligned[0].rows - steps  # rows whose step-0 label is inside the batch
    rows = selection(torch.stack([step.mask[:, :length] for step in aligned]).any(0))

    attend = UnrolledAttention()
    taps = aligned[0].features
    assert taps is not None
    everywhere = torch.arange(length, device=rows.device).expand(len(rows), -1)
    state = draft(draft.fuse(taps[:, :length]), aligned[0].tokens[0][:, :length], everywhere, attend)
    state = state.gather(1, rows[..., None].expand(-1, -1, state.shape[-1]))
    attend.select(rows, length)

    done = []
    for i, step in enumerate(aligned):
        if i > 0:
            state = draft(state, step.tokens[0].gather(1, rows), rows + i, attend)
        assert step.target is not None
        of_rows = (values.gather(1, rows) for values in (step.mask, step.target, step.labels))
        done.append(Step(state, *of_rows))
    return Unrolled(rows, done)


def selection(needed: Tensor, grain: int = GRAIN // 2) -> Tensor:
    """The rows j where `needed` [B, T] is True, ascending, [B, R] with R the most of any sequence.

    R becomes a multiple of `grain`. What is left is filled up with rows that are not needed,
    none of them twice.
    """
    most = min(needed.shape[1], rounded(int(needed.sum(1).max()), grain))
    return (~needed).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]


class Eagle3Objective(Objective):
    """Training-time test for an `Eagle3` draft of `target`."""

    draft: Eagle3

    def __init__(self, draft: Eagle3, target: Target, settings: ObjectiveConfig, coverage: float) -> None:
        super().__init__()
        self.draft = draft
        self.taps = draft.taps
        self.first_label = TABLE["eagle3"](0).label
        self.settings = settings
        self.coverage = coverage
        self.draft_ids = draft.draft_ids
        self.teacher_weight, self.teacher_bias = teacher_head(target, draft.draft_ids)
        weights = torch.tensor([settings.step_decay**i for i in range(settings.steps)])
        self.weights = (weights / weights.sum()).tolist()

    def describe(self) -> dict[str, Any]:
        return {"draft_vocabulary": len(self.draft_ids), "draft_vocabulary_coverage": self.coverage}

    def positions(self, batch: Batch) -> Tensor:
        steps = [align(TABLE["eagle3"](i), batch.tokens, batch.mask) for i in range(self.settings.steps)]
        return torch.stack([step.mask.sum() for step in steps])

    def forward(self, batch: Batch, positions: Tensor) -> Loss:
        steps = unroll(self.draft, batch, self.settings.steps).steps
        head = Head(self, batch, steps, positions)
        parameters = [parameter for parameter in self.draft.parameters() if parameter.requires_grad]
        value = cast(Tensor, ChunkedLoss.apply(head.chunks, head.states, *parameters))
        return Loss(value / positions[0].clamp(min=1), head.metrics())

    def matches(self, draft: nn.Module, batch: Batch, steps: int) -> Tensor:
        assert isinstance(draft, Eagle3)
        unrolled = unroll(draft, batch, steps)
        found = torch.zeros(*batch.tokens.shape, steps, dtype=torch.bool, device=batch.tokens.device)
        right = torch.ones_like(unrolled.rows, dtype=torch.bool)
        for i, step in enumerate(unrolled.steps):
            drafted = draft.draft_ids[draft.logits(step.states).argmax(-1)]
            right = right & step.mask & (drafted == step.labels)
            found[..., i].scatter_(1, unrolled.rows, right)
        return found

    def law(self, hidden: Tensor, lse: Tensor) -> Tensor:
        """The target's probabilities of the draft vocabulary, [n, Vd] float32; their sum is its mass there.

        In the target's own dtype, as `lse` was, whatever the autocast: else the two would not fit together.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            logits = F.linear(hidden, self.teacher_weight, self.teacher_bias)
        return (logits.to(lse.dtype) - lse[:, None]).exp_()


def teacher_head(target: Target, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """The rows `ids` of the target's head: weight [Vd, d] and bias [Vd], if there is one."""
    weight, bias = target.head.weight.detach(), target.head.bias
    if len(ids) == target.vocab_size:
        return weight, None if bias is None else bias.detach()
    ids = ids.to(weight.device)
    return weight[ids], None if bias is None else bias.detach()[ids]


class Head:
    """Head, loss and metrics of all steps, a chunk of target rows at a time.

    Target row n teaches one row of each step, so its law is computed once for all of them. A row that the
    start of its sequence leaves without a pupil at a later step has weight 0 there.
    """

    def __init__(
        self, objective: Eagle3Objective, batch: Batch, steps: list[Step], positions: Tensor
    ) -> None:
        self._objective = objective
        self._batch = batch
        self._steps = steps
        # Of each step: the supervised rows as flat indices [n_i], and the target rows [n_i] that teach them.
        self._where = [step.mask.flatten().nonzero().squeeze(1) for step in steps]
        self._teacher = [s.teacher.flatten()[at] for s, at in zip(steps, self._where, strict=True)]
        shape = (len(steps), len(batch.hidden))
        pupils = torch.zeros(shape, dtype=torch.int64, device=batch.hidden.device)
        self._valid = torch.zeros(shape, device=batch.hidden.device)
        for i, (at, teacher) in enumerate(zip(self._where, self._teacher, strict=True)):
            pupils[i, teacher] = at
            self._valid[i, teacher] = 1.0
        self.states = torch.stack(
            [step.states.flatten(0, 1).index_select(0, row) for step, row in zip(steps, pupils, strict=True)]
        )  # [S, N, d]
        # Each step is divided by its own positions; what is common is divided out at the end.
        scales = positions[0].clamp(min=1) / positions.clamp(min=1)
        self._weights = self._valid * (scales * scales.new_tensor(objective.weights))[:, None]
        self._loss, self._alpha = torch.zeros(2, *shape, device=self.states.device)
        self._right = torch.zeros(shape, dtype=torch.bool, device=self.states.device)

    def chunks(
        self, states: Tensor, parameters: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """What `ChunkedLoss` asks for: the weighted sum over steps and rows, and its gradients."""
        by_states = torch.zeros_like(states)
        by_parameters: list[Tensor | None] = [None] * len(parameters)
        size = self._objective.settings.chunk
        for start in range(0, states.shape[1], size):
            rows = slice(start, start + size)
            with torch.enable_grad():
                x = states[:, rows].detach().requires_grad_()
                logits = self._objective.draft.logits(x)
            gradient = self._score(rows, logits.detach()).to(logits.dtype)
            found = torch.autograd.grad(logits, [x, *parameters], gradient, allow_unused=True)
            by_states[:, rows] = found[0]
            by_parameters = [added(a, b) for a, b in zip(by_parameters, found[1:], strict=True)]
        return (self._loss * self._weights).sum(), by_states, by_parameters

    def _score(self, rows: slice, logits: Tensor) -> Tensor:
        """Notes loss and metrics of target rows; returns the weighted gradient by `logits` [S, n, Vd]."""
        p = taught = self._objective.law(self._batch.hidden[rows], self._batch.lse[rows])
        if self._objective.settings.draft_mass == "renormalise":
            taught = p / p.sum(-1, keepdim=True)
        found = soft_cross_entropy(logits, taught)
        self._loss[:, rows] = found.value
        self._alpha[:, rows] = torch.minimum(p, found.q).sum(-1)
        self._right[:, rows] = self._objective.draft_ids[found.argmax] == self._batch.argmax[rows]
        return found.gradient(taught, self._weights[:, rows])

    def metrics(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Of each step: loss, alpha = sum_v min(p, q), accuracy: all drafts so far are the target's argmax.

        The argmax is the full vocabulary's, so one outside the draft vocabulary is a miss. A row counts for
        the accuracy of step i if all steps up to i supervise it.
        """
        counts = self._valid.sum(1)
        joint, counted = [], []
        right = valid = torch.ones_like(self._steps[0].mask.flatten())
        for step, at, hits, teacher in zip(self._steps, self._where, self._right, self._teacher, strict=True):
            valid = valid & step.mask.flatten()
            right = right & torch.zeros_like(valid).scatter_(0, at, hits[teacher])
            joint.append((right & valid).sum())
            counted.append(valid.sum())
        return {
            "loss": ((self._loss * self._valid).sum(1), counts),
            "alpha": ((self._alpha * self._valid).sum(1), counts),
            "accuracy": (torch.stack(joint), torch.stack(counted)),
        }


def added(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    if total is None or more is None:
        return more if total is None else total
    return total.add_(more)


def build(
    network: NetworkConfig, settings: ObjectiveConfig, target: Target, rows: Sequence[TokenRow], seed: int
) -> Eagle3Objective:
    """A new draft for `target` with its vocabulary chosen from the trained-on tokens of `rows`, and its
    objective."""
    draft = Eagle3.build(network, target)
    size = network.draft_vocab_size or target.vocab_size
    ids, coverage = choose_draft_vocabulary(rows, size, target.vocab_size, always=target.eos_ids)
    if network.draft_vocab_size is not None:
        draft.set_vocabulary(ids)
    draft.initialise(seed, target=target)
    return Eagle3Objective(draft.to(target.device), target, settings, coverage)
