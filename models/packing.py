"""Linear layers in the layout of the CPU's matrix kernels, so that no forward has to bring them into it.

PyTorch keeps weights row by row, and oneDNN reorders them at every call. Over one token or a few that costs
as much as the product itself; Inductor's weight freezing removes it, but only after minutes of compiling per
shape. `pack` reorders once, with the same operators. In bfloat16 the products are the same bits; in float32
they round differently (1e-6), and single rows keep the plain kernel, which is faster there.

The packed copy stands beside the weight, which ties, saves and fingerprints still use: linear weights take
twice their memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from configs.hardware import cpu_has_bfloat16
from models.quantization import is_quantised

SHAPED_FOR = 64  # rows that the layout is chosen for; it serves fewer and more alike
LEAST_ROWS = {torch.bfloat16: 1, torch.float32: 2}  # fewer go through the plain kernel
MOST_ROWS = 256  # from here on reordering is lost in the product


def pack(module: nn.Module) -> int:
    """Packs the linear layers of a frozen module on the CPU: how many were. None on devices, dtypes or builds
    that have no such kernels.

    Weights must not change afterwards.
    """
    layers = [layer for layer in module.modules() if type(layer) is nn.Linear and packable(layer)]
    for layer in layers:
        layer.forward = PackedForward(layer)
    return len(layers)


def packable(layer: nn.Linear) -> bool:
    weight = layer.weight
    return (
        weight.device.type == "cpu"
        and weight.dtype in LEAST_ROWS
        and not weight.requires_grad
        and not is_quantised(weight)
        and not isinstance(weight, FakeTensor)  # of train.plan: sizes without values
        and torch.backends.mkldnn.is_available()
        and (weight.dtype is not torch.bfloat16 or cpu_has_bfloat16())
    )


class PackedForward:
    """The forward of one linear layer: packed for a few rows, plain for the others."""

    def __init__(self, layer: nn.Linear) -> None:
        self.weight, self.bias = layer.weight, layer.bias
        self.least = LEAST_ROWS[layer.weight.dtype]
        operators: Any = torch.ops.mkldnn
        self.packed: Tensor = operators._reorder_linear_weight(layer.weight.detach(), SHAPED_FOR)
        self.product = operators._linear_pointwise

    def __call__(self, input: Tensor) -> Tensor:  # the name that nn.Linear gives it
        if torch.compiler.is_compiling():  # Inductor packs by itself
            return F.linear(input, self.weight, self.bias)
        rows = input.numel() // input.shape[-1]
        fits = self.least <= rows <= MOST_ROWS and input.dtype == self.weight.dtype
        if fits and not input.requires_grad:
            return self.product(input, self.packed, self.bias, "none", [], "")
        return F.linear(input, self.weight, self.bias)
