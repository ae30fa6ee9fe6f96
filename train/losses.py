"""Losses between the target's law and a draft's, and how to take them without holding all logits at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class SoftCrossEntropy(NamedTuple):
    """What `soft_cross_entropy` found in one pass; float32, or float64 if the logits are."""

    value: Tensor  # [...]: -sum_v p(v) log q(v)
    q: Tensor  # [..., V]: softmax of the logits
    mass: Tensor  # [...]: sum_v p(v)
    argmax: Tensor  # int64 [...]: of the logits

    def gradient(self, p: Tensor, scale: Tensor) -> Tensor:
        """Of scale [...] * value by the logits: scale * (mass * q - p). Overwrites q, to spare the memory."""
        return self.q.mul_((self.mass * scale)[..., None]).addcmul_(p, -scale[..., None])


def soft_cross_entropy(logits: Tensor, p: Tensor) -> SoftCrossEntropy:
    """Forward KL up to the target's entropy: -sum_v p(v) log q(v) with q = softmax(logits).

    logits [S, n, V] of any dtype; p [n, V], whose rows need not sum to 1, for all S. In float32 at least,
    whatever the autocast: in bfloat16 the gradient of a good draft is mostly rounding.
    """
    with torch.autocast(logits.device.type, enabled=False):
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        mass = p.sum(-1).expand(wide.shape[:-1])
        linear = torch.einsum("nv,snv->sn", p, wide)
        top, argmax = wide.max(-1)
        q = wide.sub_(top[..., None]).exp_()
        total = q.sum(-1)
        value = mass * (top + total.log()) - linear
        return SoftCrossEntropy(value, q.mul_(total.reciprocal()[..., None]), mass, argmax)


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
