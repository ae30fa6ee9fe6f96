"""Divergences between the target's law and a draft's, with their gradients, and how to take them in chunks.

With p the target's law over the draft vocabulary and q = softmax(logits) the draft's:

    forward_kl   sum p log(p / q)                       what most drafts are trained with
    reverse_kl   sum q log(q / p)
    jsd          b KL(p || m) + (1 - b) KL(q || m), m = b p + (1 - b) q        (DistillSpec, Zhou et al. 2024)
    tv           1 - sum min(p, q)                      one minus the acceptance rate of sampled decoding
    nla          -log sum min(p, q)                     its gradient is tv's divided by the acceptance
    lk           w forward_kl + (1 - w) tv, w = exp(-e alpha)   (LK losses, Samarin et al. 2026, 2602.23881)

Each is written as its value and its flow q dL/dq, from which the gradient by the logits follows:
dL/dz = flow - q sum(flow). In lk the weight w is a constant for the gradient and a position's own, so that
the loss does not depend on how positions are batched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

TINY = 1e-30  # least probability in a logarithm
LEAST_ALPHA = 1e-5  # least acceptance in the logarithm and denominator of nla

# (p [n, V], q [S, n, V], log q) -> value [S, n] and flow, of q's shape or spread over S.
Divergence = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def forward_kl(p: Tensor, q: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    return -torch.special.entr(p).sum(-1) - torch.einsum("nv,snv->sn", p, log_q), -p


def reverse_kl(p: Tensor, q: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    flow = q * (log_q - p.clamp_min(TINY).log())
    return flow.sum(-1), flow


def jsd(p: Tensor, q: Tensor, log_q: Tensor, *, beta: float) -> tuple[Tensor, Tensor]:
    middle = (beta * p + (1 - beta) * q).clamp_min_(TINY).log_()
    from_p = torch.special.xlogy(p, p).sum(-1) - (p * middle).sum(-1)
    flow = q * (log_q - middle)
    return beta * from_p + (1 - beta) * flow.sum(-1), (1 - beta) * flow


def tv(p: Tensor, q: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    return 1 - torch.minimum(p, q).sum(-1), -q * (q < p)


def nla(p: Tensor, q: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    missing, flow = tv(p, q, log_q)
    alpha = (1 - missing).clamp_min(LEAST_ALPHA)
    return -alpha.log(), flow / alpha[..., None]


def lk(p: Tensor, q: Tensor, log_q: Tensor, *, eta: float) -> tuple[Tensor, Tensor]:
    kl, kl_flow = forward_kl(p, q, log_q)
    missing, tv_flow = tv(p, q, log_q)
    weight = torch.exp(-eta * (1 - missing))
    return weight * kl + (1 - weight) * missing, torch.lerp(tv_flow, kl_flow, weight[..., None])


def divergence(name: str, *, beta: float = 0.5, eta: float = 3.0) -> Divergence:
    """The divergence of this name. Raises `KeyError`; `DIVERGENCES` has the names."""
    return partial(DIVERGENCES[name], **{"jsd": {"beta": beta}, "lk": {"eta": eta}}.get(name, {}))


DIVERGENCES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    function.__name__: function for function in (forward_kl, reverse_kl, jsd, tv, nla, lk)
}


class Scored(NamedTuple):
    """What `score` found in one pass; float32, or float64 if the logits are."""

    value: Tensor  # [S, n]
    alpha: Tensor  # [S, n]: sum_v min(law, q)
    argmax: Tensor  # int64 [S, n]: of the logits
    gradient: Tensor  # [S, n, V]: of scale * value by the logits


def score(diverge: Divergence, logits: Tensor, p: Tensor, scale: Tensor, law: Tensor | None = None) -> Scored:
    """Divergence of logits [S, n, V] of any dtype from p [n, V], whose rows need not sum to 1, for all S.

    scale [S, n]: the weight of each position. law [n, V]: what alpha is taken with, if not p. In float32 at
    least, whatever the autocast: in bfloat16 the gradient of a good draft is mostly rounding.
    """
    with torch.autocast(logits.device.type, enabled=False):
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        top, argmax = wide.max(-1, keepdim=True)
        q = wide.sub_(top).exp()
        total = q.sum(-1, keepdim=True)
        q, log_q = q.div_(total), wide.sub_(total.log_())
        value, flow = diverge(p, q, log_q)
        alpha = torch.minimum(p if law is None else law, q).sum(-1)
        gradient = q.mul_(-flow.sum(-1, keepdim=True)).add_(flow).mul_(scale[..., None])
        return Scored(value, alpha, argmax.squeeze(-1), gradient)


# Given detached rows and the parameters: the summed loss, its gradient by rows and parameters (None: unused).
Chunks = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Tensor, list[Tensor | None]]]


class ChunkedLoss(torch.autograd.Function):
    """A loss whose `chunks` takes gradients together with the value: only a chunk's logits ever exist.

    All rows of all steps at once would be rows x steps x V logits. The value must be a sum, not yet divided
    by the number of rows, so that no gradient underflows in a short dtype before it is scaled.
    """

    @staticmethod
    def forward(ctx: Any, chunks: Chunks, rows: Tensor, *parameters: Tensor) -> Tensor:
        value, by_rows, by_parameters = chunks(rows, parameters)
        ctx.save_for_backward(by_rows, *by_parameters)
        return value

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(None if grad is None else grad * outputs[0] for grad in ctx.saved_tensors))
