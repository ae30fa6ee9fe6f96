"""Which optimiser trains which parameter, by its role in the network.

    role       parameters                                        trainer.optimizer    weight decay
                                                                 adamw     muon
    hidden     matrices between hidden states                    AdamW     Muon       yes
    outer      embeddings, and heads over the vocabulary         AdamW     AdamW      yes
    vectors    norms and biases                                  AdamW     AdamW      no

Muon (Jordan et al. 2024, torch's own) moves a matrix by an orthogonal one, the same distance along all of its
singular directions. That suits a map between hidden states; where each row belongs to one token, most of
which a batch does not contain, it moves the rows of absent tokens too, and the authors leave those to AdamW.
Its updates are scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982, eq. 4), so that one rate can
serve both.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.overrides import TorchFunctionMode

from configs.errors import ConfigError
from configs.hardware import native_dtype
from configs.schema import Optimizer, TrainerConfig
from train.objectives import Objective

MOMENTUM = 0.95  # Muon's, in both publications


@dataclass(frozen=True)
class Roles:
    """The parameters to train, float32, in the module's order."""

    hidden: list[nn.Parameter]
    outer: list[nn.Parameter]
    vectors: list[nn.Parameter]

    @classmethod
    def of(cls, objective: Objective) -> Roles:
        trained = {name: p for name, p in objective.named_parameters() if p.requires_grad}
        assert all(p.dtype == torch.float32 for p in trained.values())
        matrices = {name: p for name, p in trained.items() if p.dim() > 1}
        outer = token_matrices(objective)
        # Muon takes no stacks of matrices, and a matrix of one row or column is a vector to it.
        outer |= {name for name, p in matrices.items() if p.dim() > 2 or min(p.shape) == 1}
        return cls(
            [p for name, p in matrices.items() if name not in outer],
            [p for name, p in matrices.items() if name in outer],
            [p for name, p in trained.items() if name not in matrices],
        )


def token_matrices(objective: Objective) -> set[str]:
    """Names of the matrices that have one row for each token: embeddings, and heads over the vocabulary.

    A head is known by its number of rows. Where a hidden size happens to be that number too (an MLP of 8192
    under a draft vocabulary of 8192), it is those that are called heads.
    """
    shape = objective.draft.shape
    sizes = (shape.vocab_size, shape.draft_vocab_size)
    embeddings = {f"{at}.weight" for at, part in objective.named_modules() if isinstance(part, nn.Embedding)}
    tall = {name for name, p in objective.named_parameters() if p.dim() == 2 and len(p) in sizes}
    heads = {name for name in tall if "head" in name}
    return embeddings | (heads or tall)


def optimizers(objective: Objective, trainer: TrainerConfig) -> dict[str, torch.optim.Optimizer]:
    """The optimisers of everything that can be trained, by the name of the rate they take: `lr`, `muon_lr`.

    Raises `ConfigError` for a draft that has nothing for Muon to train.
    """
    roles = Roles.of(objective)
    if trainer.optimizer is Optimizer.adamw:
        return {"lr": adamw(objective, roles.hidden + roles.outer, roles.vectors, trainer)}
    if not roles.hidden:
        raise ConfigError(
            "trainer.optimizer=muon trains matrices between hidden states, and this draft has none. Set "
            "trainer.optimizer=adamw."
        )
    made: dict[str, torch.optim.Optimizer] = {}
    if roles.outer or roles.vectors:
        made["lr"] = adamw(objective, roles.outer, roles.vectors, trainer)
    made["muon_lr"] = muon(objective, roles.hidden, trainer)
    return made


def adamw(
    objective: Objective, matrices: list[nn.Parameter], vectors: list[nn.Parameter], trainer: TrainerConfig
) -> AdamW:
    low, high = trainer.betas
    groups = by_rate(objective, matrices, trainer.lr, trainer.weight_decay)
    groups += by_rate(objective, vectors, trainer.lr, 0.0)
    return AdamW(groups, trainer.lr, (low, high), fused=True)


def muon(objective: Objective, matrices: list[nn.Parameter], trainer: TrainerConfig) -> Muon:
    peak = trainer.lr if trainer.muon_lr is None else trainer.muon_lr
    groups = by_rate(objective, matrices, peak, trainer.weight_decay)
    return Muon(groups, peak, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")


class Muon(torch.optim.Muon):
    """torch's, which orthogonalises in bfloat16; in float32 on devices without that.

    On a CPU without kernels for it, nineteen twentieths of a training step went there (EAGLE-3 for a
    target of 576 columns, 1,024 tokens).
    """

    def step(self, closure: Any = None) -> Any:
        device = self.param_groups[0]["params"][0].device
        with nullcontext() if native_dtype(str(device)) == "bfloat16" else Unrounded():
            return super().step(closure)


class Unrounded(TorchFunctionMode):
    """Within, `Tensor.bfloat16()` is a copy in the tensor's own dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.bfloat16:
            return args[0].clone()
        return func(*args, **(kwargs or {}))


def by_rate(
    objective: Objective, parameters: list[nn.Parameter], peak: float, decay: float
) -> list[dict[str, Any]]:
    """Groups of parameters that share a rate, `peak` times what the objective says; the highest first."""
    rates = {p: peak * objective.rate(name) for name, p in objective.named_parameters()}
    return [
        {"params": [p for p in parameters if rates[p] == rate], "lr": rate, "weight_decay": decay}
        for rate in sorted({rates[p] for p in parameters}, reverse=True)
    ]


def shares(made: dict[str, torch.optim.Optimizer]) -> str:
    """What each optimiser trains, for the console."""
    told = []
    for optimizer in made.values():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        size = sum(p.numel() for p in parameters) / 1e6
        told.append(f"{type(optimizer).__name__} {len(parameters)} tensors of {size:.1f} M")
    return ", ".join(told)
