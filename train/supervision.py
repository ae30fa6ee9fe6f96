"""How the target teaches a draft's steps or heads: shared by all objectives that distil laws.

An objective unrolls its draft into `Term`s, one for each step or head: states of some rows, and for each row
which target row teaches it (train/alignment.py says which). `Supervision` turns them into a loss: the chosen
divergence from the target's law over the draft vocabulary, averaged over each term's valid positions, never
over padding. The target's law is rebuilt from its last hidden state and log-sum-exp, a chunk of rows at a
time, so that full logits of all rows never exist.

What of the target's mass lies outside the draft vocabulary stays outside by default (`draft_mass: keep`);
`renormalise` divides it out, as EAGLE-3's reference code does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.errors import ConfigError
from models.target import Target
from train.batches import GRAIN, Batch, rounded
from train.losses import DIVERGENCES, ChunkedLoss, divergence, score
from train.objectives import Loss

# Logits [S, n, Vd] of states [S, n, s], one row of S for each term.
Logits = Callable[[Tensor], Tensor]


@dataclass
class SupervisionConfig:
    """The part of `method.objective` that all objectives of this kind share."""

    divergence: str = "forward_kl"  # from the target's law: a name in train/losses.py
    jsd_beta: float = 0.5  # weight of the target's side in jsd
    lk_eta: float = 3.0  # lk turns from forward_kl to tv as acceptance grows, faster for larger ones
    draft_mass: str = "keep"  # of the target in the draft vocabulary; renormalise divides the law by it
    chunk: int = 256  # target rows whose logits, of all terms, exist at one time

    def __post_init__(self) -> None:
        where = "method.objective"
        if self.divergence not in DIVERGENCES:
            raise ConfigError(
                f"{where}.divergence={self.divergence!r} is unknown: set one of {', '.join(DIVERGENCES)}."
            )
        if not 0 < self.jsd_beta < 1:
            raise ConfigError(f"{where}.jsd_beta={self.jsd_beta} must lie between 0 and 1.")
        if self.draft_mass not in ("keep", "renormalise"):
            raise ConfigError(f"{where}.draft_mass={self.draft_mass!r} is unknown: set keep or renormalise.")
        if self.chunk < 1:
            raise ConfigError(f"{where}.chunk={self.chunk} must be at least 1.")


@dataclass
class SteppedConfig(SupervisionConfig):
    """Of drafts that are trained on several steps of their own."""

    steps: int = 1
    step_decay: float = 0.8  # step i weighs step_decay**i; weights are normalised to sum 1

    def __post_init__(self) -> None:
        super().__post_init__()
        where = "method.objective"
        if self.steps < 1:
            raise ConfigError(f"{where}.steps={self.steps} must be at least 1.")
        if self.step_decay <= 0:
            raise ConfigError(
                f"{where}.step_decay={self.step_decay} must be positive; 1 weighs all steps alike."
            )

    def weights(self) -> list[float]:
        weights = [self.step_decay**i for i in range(self.steps)]
        return [weight / sum(weights) for weight in weights]


@dataclass(frozen=True)
class Term:
    """One step or head on the R selected rows of each sequence. All terms of a batch have the same rows."""

    states: Tensor  # [B, R, s]
    mask: Tensor  # [B, R] bool: supervised here
    teacher: Tensor  # [B, R] int64: the packed target row that teaches; anything where the mask is False
    labels: Tensor  # [B, R] int64: the token that follows in the text


class Teacher:
    """The target's law over a draft vocabulary."""

    def __init__(self, target: Target, ids: Tensor) -> None:
        """ids: int64 [Vd], target ids, ascending."""
        weight, bias = target.head.weight.detach(), target.head.bias
        bias = None if bias is None else bias.detach()
        whole = len(ids) == target.vocab_size
        self.ids = ids
        self.weight = weight if whole else weight[ids.to(weight.device)]
        self.bias = bias if bias is None or whole else bias[ids.to(bias.device)]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., Vd] of hidden [..., d], by the target's own frozen head and in its dtype."""
        return F.linear(hidden, self.weight, self.bias)

    def law(self, hidden: Tensor, lse: Tensor) -> Tensor:
        """The target's probabilities of the draft vocabulary, [n, Vd] float32; their sum is its mass there.

        hidden [n, d], lse [n]: of the full vocabulary. In the target's own dtype, as `lse` was, whatever the
        autocast: else the two would not fit together.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            return (self.logits(hidden).to(lse.dtype) - lse[:, None]).exp_()


class Supervision:
    """Loss and metrics of a batch's terms."""

    def __init__(self, teacher: Teacher, weights: Sequence[float], settings: SupervisionConfig) -> None:
        """weights: of the terms in the loss."""
        self.teacher = teacher
        self.weights = list(weights)
        self.settings = settings
        self.divergence = divergence(settings.divergence, beta=settings.jsd_beta, eta=settings.lk_eta)

    def loss(
        self,
        batch: Batch,
        terms: Sequence[Term],
        positions: Tensor,
        logits: Logits,
        parameters: Sequence[Tensor],
    ) -> Loss:
        """The weighted sum over terms of their mean divergence, each divided by its own `positions` [S].

        parameters: all that `logits` depends on and that is trained; others get no gradient through it.
        """
        scoring = Scoring(self, batch, terms, positions, logits)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        value = cast(Tensor, ChunkedLoss.apply(scoring.chunks, scoring.states, *trained))
        return Loss(value / positions[0].clamp(min=1), scoring.metrics())


class Scoring:
    """One batch's logits, loss and metrics, a chunk of target rows at a time.

    Target row n teaches at most one row of each term, so its law is computed once for all of them. Where it
    teaches none (the start of its sequence leaves later steps without a pupil) it has weight 0.
    """

    def __init__(
        self,
        supervision: Supervision,
        batch: Batch,
        terms: Sequence[Term],
        positions: Tensor,
        logits: Logits,
    ) -> None:
        self._supervision, self._batch, self._terms, self._logits = supervision, batch, terms, logits
        # Of each term: the supervised rows as flat indices [n_i], and the target rows [n_i] that teach them.
        self._where = [term.mask.flatten().nonzero().squeeze(1) for term in terms]
        self._teacher = [t.teacher.flatten()[at] for t, at in zip(terms, self._where, strict=True)]
        shape = (len(terms), len(batch.hidden))
        pupils = torch.zeros(shape, dtype=torch.int64, device=batch.hidden.device)
        self._valid = torch.zeros(shape, device=batch.hidden.device)
        for i, (at, teacher) in enumerate(zip(self._where, self._teacher, strict=True)):
            pupils[i, teacher] = at
            self._valid[i, teacher] = 1.0
        self.states = torch.stack(
            [term.states.flatten(0, 1).index_select(0, row) for term, row in zip(terms, pupils, strict=True)]
        )  # [S, N, s]
        # Each term is divided by its own positions; what is common is divided out at the end.
        scales = positions[0].clamp(min=1) / positions.clamp(min=1)
        self._weights = self._valid * (scales * scales.new_tensor(supervision.weights))[:, None]
        self._loss, self._alpha = torch.zeros(2, *shape, device=self.states.device)
        self._right = torch.zeros(shape, dtype=torch.bool, device=self.states.device)

    def chunks(
        self, states: Tensor, parameters: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """What `ChunkedLoss` asks for: the weighted sum over terms and rows, and its gradients."""
        by_states = torch.zeros_like(states)
        by_parameters: list[Tensor | None] = [None] * len(parameters)
        size = self._supervision.settings.chunk
        for start in range(0, states.shape[1], size):
            rows = slice(start, start + size)
            with torch.enable_grad():
                x = states[:, rows].detach().requires_grad_()
                logits = self._logits(x)
            gradient = self._score(rows, logits.detach()).to(logits.dtype)
            found = torch.autograd.grad(logits, [x, *parameters], gradient, allow_unused=True)
            by_states[:, rows] = found[0]
            by_parameters = [added(a, b) for a, b in zip(by_parameters, found[1:], strict=True)]
        return (self._loss * self._weights).sum(), by_states, by_parameters

    def _score(self, rows: slice, logits: Tensor) -> Tensor:
        """Notes loss and metrics of target rows; returns the weighted gradient by `logits` [S, n, Vd]."""
        p = self._supervision.teacher.law(self._batch.hidden[rows], self._batch.lse[rows])
        renormalise = self._supervision.settings.draft_mass == "renormalise"
        taught = p / p.sum(-1, keepdim=True) if renormalise else p
        found = score(self._supervision.divergence, logits, taught, self._weights[:, rows], law=p)
        self._loss[:, rows] = found.value
        self._alpha[:, rows] = found.alpha
        self._right[:, rows] = self._supervision.teacher.ids[found.argmax] == self._batch.argmax[rows]
        return found.gradient

    def metrics(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Of each term: loss; alpha = sum_v min(p, q); accuracy: all drafts so far are the target's argmax.

        The argmax is the full vocabulary's, so one outside the draft vocabulary is a miss. A row counts for
        the accuracy of term i if all terms up to i supervise it.
        """
        counts = self._valid.sum(1)
        joint, counted = [], []
        right = valid = torch.ones_like(self._terms[0].mask.flatten())
        for term, at, hits, teacher in zip(self._terms, self._where, self._right, self._teacher, strict=True):
            valid = valid & term.mask.flatten()
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


def selection(needed: Tensor, grain: int = GRAIN // 2) -> Tensor:
    """The rows j where `needed` [B, T] is True, ascending, [B, R] with R the most of any sequence.

    R becomes a multiple of `grain`, also where nothing is needed, since kernels want rows. What is left is
    filled up with rows that are not needed, none of them twice.
    """
    most = min(needed.shape[1], rounded(max(1, int(needed.sum(1).max())), grain))
    return (~needed).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]


def joint_matches(batch: Batch, rows: Tensor, terms: Sequence[Term], drafted: Sequence[Tensor]) -> Tensor:
    """What `Objective.matches` returns, bool [B, T, S], of the terms at `rows` [B, R].

    drafted: of each term, the target ids [B, R] that the draft would propose.
    """
    found = torch.zeros(*batch.tokens.shape, len(terms), dtype=torch.bool, device=batch.tokens.device)
    right = torch.ones_like(rows, dtype=torch.bool)
    for i, (term, tokens) in enumerate(zip(terms, drafted, strict=True)):
        right = right & term.mask & (tokens == term.labels)
        found[..., i].scatter_(1, rows, right)
    return found
