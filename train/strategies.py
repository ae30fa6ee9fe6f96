"""How a run's weights, gradients and optimiser states lie over its ranks: `trainer.strategy`.

    none          one process, accelerate's defaults
    ddp           everything on every rank; gradients are averaged (torch's DistributedDataParallel)
    fsdp2         everything is cut over the ranks; weights are whole during forward and backward only
                  (torch's fully_shard)
    zero2         gradients and optimiser states are cut, weights are whole (DeepSpeed, Rajbhandari 2020)
    zero3         everything is cut, as in fsdp2

Weights, gradients and optimiser states are float32 in all of them, and the forward runs under autocast. A
draft is small (one to three layers), so it is cut as one piece, which also lets an objective use its draft's
weights anywhere in its forward (train/losses.py). Ranks average gradients, and each scales its own loss by
their number: the optimiser sees the sum over ranks, divided by the valid positions of all of them.
"""

from __future__ import annotations

import math
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from configs.errors import ConfigError
from configs.schema import Dtype, Strategy, TrainerConfig
from models.files import write_tensors
from train import checkpoint
from train.batches import Batch
from train.checkpoint import WEIGHTS, State, load_weights, read_weights
from train.ema import Average
from train.objectives import Loss, Objective
from train.optimizers import optimizers
from train.ranks import Ranks

TRAINING = "training.pt"  # in a checkpoint: optimisers, schedulers, random states of every rank
BUCKET = 500_000_000  # gradients that DeepSpeed reduces at a time, its default

Share = Callable[[int], float]  # of the peak rates at an optimiser step


class Laid(ABC):
    """An objective as a strategy lays it out, with its optimisers by the name of the rate they take."""

    module: Any  # what forwards go through
    made: dict[str, Optimizer]  # torch's
    optimizers: dict[str, Any]  # those that step
    schedulers: list[LambdaLR]
    cut = False  # parameters are not whole, or not tensors of their own

    def __init__(self, objective: Objective, trainer: TrainerConfig, ranks: Ranks) -> None:
        self.objective, self.trainer, self.ranks = objective, trainer, ranks

    @abstractmethod
    def learn(self, batch: Batch, positions: Tensor, counts: bool, last: bool) -> Loss:
        """Adds a micro-batch's gradients; `last`: of this rank in the step. One that does not count keeps the
        ranks together where there is none left for this one: its loss, gradients and metrics are 0."""

    @abstractmethod
    def clip(self) -> float:
        """Clips the gradients at `trainer.clip_norm`; their norm before, over all ranks."""

    def step(self) -> None:
        """One step of optimisers and schedules."""
        for part in (*self.optimizers.values(), *self.schedulers):
            part.step()
        self.module.zero_grad()

    @abstractmethod
    def save(self, folder: Path, state: State, average: Average | None) -> None:
        """Writes a checkpoint, whole or not at all. All ranks take part, and rank 0 names it last."""

    @abstractmethod
    def restore(self, folder: Path, average: Average | None) -> State:
        """Goes back to a checkpoint. Raises `CheckpointError`."""

    @contextmanager
    def whole(self, folder: Path) -> Iterator[None]:
        """Inside the block the objective has the checkpoint's measured weights, whole. Where it is `cut`, it
        has its own again after it."""
        load_weights(folder, self.objective)
        yield


class Alone(Laid):
    """One process, as accelerate prepares it."""

    def __init__(self, objective: Objective, trainer: TrainerConfig, ranks: Ranks, share: Share) -> None:
        super().__init__(objective, trainer, ranks)
        precision = {Dtype.bfloat16: "bf16", Dtype.float16: "fp16", Dtype.float32: "no"}[trainer.autocast]
        cpu = device_of(objective).type == "cpu"
        self.accelerator = Accelerator(mixed_precision=precision, cpu=cpu)
        self.made = optimizers(objective, trainer)
        self.schedulers = [LambdaLR(one, share) for one in self.made.values()]
        self.module, *prepared = self.accelerator.prepare(objective, *self.made.values())
        self.optimizers = dict(zip(self.made, prepared, strict=True))
        self.accelerator.register_for_checkpointing(*self.schedulers)

    def learn(self, batch: Batch, positions: Tensor, counts: bool, last: bool) -> Loss:
        loss = self.module(batch, positions)
        self.accelerator.backward(loss.value)
        return loss

    def clip(self) -> float:
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), self.trainer.clip_norm)
        return math.nan if norm is None else float(norm)

    def save(self, folder: Path, state: State, average: Average | None) -> None:
        checkpoint.save(folder, self.accelerator, state, average)

    def restore(self, folder: Path, average: Average | None) -> State:
        return checkpoint.restore(folder, self.accelerator, average)


class Shared(Laid):
    """What strategies of several ranks have in common."""

    def __init__(self, objective: Objective, trainer: TrainerConfig, ranks: Ranks) -> None:
        super().__init__(objective, trainer, ranks)
        self.device = device_of(objective)
        dtype = {Dtype.bfloat16: torch.bfloat16}.get(trainer.autocast)
        autocast = torch.autocast(self.device.type, dtype, dtype is not None)
        vars(objective)["forward"] = entered(objective.forward, autocast)

    def learn(self, batch: Batch, positions: Tensor, counts: bool, last: bool) -> Loss:
        value, metrics = self.module(batch, positions)
        if not counts:
            value, metrics = value * 0, {name: (sums * 0, n * 0) for name, (sums, n) in metrics.items()}
        self.backward(value * self.ranks.size)  # ranks average
        return Loss(value.detach(), metrics)

    def backward(self, value: Tensor) -> None:
        value.backward()

    def save(self, folder: Path, state: State, average: Average | None) -> None:
        self.kept = {
            "weights": self.weights(),
            **self.parts(),
            "random": self.ranks.gathered(random_states()),
        }
        if self.ranks.first:
            checkpoint.save(folder, self, state, average)
        del self.kept

    def save_state(self, folder: str) -> None:
        """What `checkpoint.save` calls, on rank 0: the whole state, for any number of ranks to read."""
        write_tensors(Path(folder) / WEIGHTS, self.kept.pop("weights"))
        torch.save(self.kept, Path(folder) / TRAINING)

    def restore(self, folder: Path, average: Average | None) -> State:
        return checkpoint.restore(folder, self, average, alone=False)

    def load_state(self, folder: str) -> None:
        """What `checkpoint.restore` calls, on every rank."""
        kept = torch.load(Path(folder) / TRAINING, map_location="cpu", weights_only=True)
        self.load_parts(Path(folder), kept)
        for scheduler, saved in zip(self.schedulers, kept["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        if len(kept["random"]) == self.ranks.size:  # else there is no telling whose they are
            set_random_states(kept["random"][self.ranks.rank])

    @contextmanager
    def whole(self, folder: Path) -> Iterator[None]:
        if not self.cut:
            with super().whole(folder):
                yield
            return
        weights = {name: one.to(self.device) for name, one in read_weights(folder).items()}
        with plain_parameters(self.objective, weights):
            yield

    def parts(self) -> dict[str, Any]:
        return {"schedulers": [one.state_dict() for one in self.schedulers]}

    def weights(self) -> dict[str, Tensor]:
        """The objective's whole weights on the CPU, a tied one once. All ranks take part; rank 0 has them."""
        state = self.objective.state_dict()
        for name in tied(self.objective):
            state.pop(name, None)
        whole = (
            (name, one.full_tensor() if isinstance(one, DTensor) else one) for name, one in state.items()
        )
        return {name: one.detach().cpu().clone() for name, one in whole if self.ranks.first}

    @abstractmethod
    def load_parts(self, folder: Path, kept: dict[str, Any]) -> None:
        """Takes back weights and optimiser states; `kept` is what `parts` gave."""


class Torch(Shared):
    """torch's own strategies."""

    def __init__(self, objective: Objective, trainer: TrainerConfig, ranks: Ranks, share: Share) -> None:
        super().__init__(objective, trainer, ranks)
        self.module = self.lay()
        self.made = self.optimizers = optimizers(objective, trainer)
        self.schedulers = [LambdaLR(one, share) for one in self.made.values()]

    @abstractmethod
    def lay(self) -> nn.Module: ...

    def clip(self) -> float:
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.trainer.clip_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def parts(self) -> dict[str, Any]:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        found = [
            get_optimizer_state_dict(self.module, one, options=options) for one in self.optimizers.values()
        ]
        return super().parts() | {"optimizers": found}

    def load_parts(self, folder: Path, kept: dict[str, Any]) -> None:
        options = StateDictOptions(full_state_dict=True, strict=False)  # a tied weight is there once
        weights: dict[str, Any] = safetensors.torch.load_file(folder / WEIGHTS)
        set_model_state_dict(self.module, weights, options=options)
        for one, saved in zip(self.optimizers.values(), kept["optimizers"], strict=True):
            set_optimizer_state_dict(self.module, one, saved, options=options)


class Ddp(Torch):
    def lay(self) -> nn.Module:
        if self.ranks.group is None:
            return self.objective
        return DistributedDataParallel(
            self.objective, forward_sync_buffers=False, gradient_as_bucket_view=True
        )

    def learn(self, batch: Batch, positions: Tensor, counts: bool, last: bool) -> Loss:
        alone = self.ranks.group is None or last
        with nullcontext() if alone else self.module.no_sync():  # gradients are averaged once a step
            return super().learn(batch, positions, counts, last)

    def step(self) -> None:
        for part in (*self.optimizers.values(), *self.schedulers):
            part.step()
        # The reduction's buckets are always there: gradients that stay in them take nothing beside them.
        self.module.zero_grad(set_to_none=self.ranks.group is None)


class Fsdp2(Torch):
    cut = True

    def lay(self) -> nn.Module:
        if self.ranks.group is None:
            return self.objective
        fully_shard(self.objective, mesh=init_device_mesh(self.device.type, (self.ranks.size,)))
        return self.objective  # in place


class Zero(Shared):
    """DeepSpeed, which clips and steps in one.

    A rank steps on its part of all weights laid end to end, and the optimiser's states are of such vectors.
    A checkpoint has them whole and by parameter, so that any number of ranks can take their parts of it.
    """

    cut = True

    def __init__(
        self, objective: Objective, trainer: TrainerConfig, ranks: Ranks, share: Share, stage: int
    ) -> None:
        super().__init__(objective, trainer, ranks)
        try:
            import deepspeed  # pyright: ignore[reportMissingImports]
            import deepspeed.utils  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ConfigError(
                f"trainer.strategy={trainer.strategy.value} needs the package deepspeed. Install the extra "
                "`deepspeed`, as in pip install -e '.[deepspeed]', or set trainer.strategy=fsdp2."
            ) from None
        self.stage = stage
        self.deepspeed: Any = deepspeed
        self.made = self.optimizers = optimizers(objective, trainer)
        (self.optimizer,) = self.optimizers.values()
        self.trained = {name: p for name, p in objective.named_parameters() if p.requires_grad}
        numbers = sum(p.numel() for p in self.trained.values())
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": trainer.clip_norm,
            "zero_allow_untested_optimizer": True,  # AdamW
            # The bucket is allocated whole, however few gradients there are.
            "zero_optimization": {"stage": stage, "reduce_bucket_size": min(BUCKET, numbers)},
            "steps_per_print": sys.maxsize,
        }
        self.module, *_ = deepspeed.initialize(model=objective, optimizer=self.optimizer, config=settings)
        self.schedulers = [LambdaLR(self.optimizer, share)]
        if stage == 3:  # an objective may use any of its draft's weights itself, past their modules
            for parameter in objective.parameters():
                deepspeed.zero.register_external_parameter(objective, parameter)

    def learn(self, batch: Batch, positions: Tensor, counts: bool, last: bool) -> Loss:
        self.module.set_gradient_accumulation_boundary(last)
        return super().learn(batch, positions, counts, last)

    def backward(self, value: Tensor) -> None:
        self.module.backward(value)

    def clip(self) -> float:
        """Steps too."""
        self.module.step()
        return float(self.module.get_global_grad_norm())

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def gathered(self, changed: bool) -> AbstractContextManager[Any]:
        """Inside the block parameters are whole; with `changed` rank 0's are everybody's after it."""
        every = list(self.objective.parameters())
        return self.deepspeed.zero.GatheredParameters(every, 0 if changed else None, enabled=self.stage == 3)

    def weights(self) -> dict[str, Tensor]:
        with self.gathered(changed=False):
            return super().weights()

    def vectors(self) -> list[nn.Parameter]:
        """What this rank steps on: one for each group of the optimiser, or several."""
        zero = self.module.optimizer
        return zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups

    def link(self) -> None:
        """Tells parameters where their states are. DeepSpeed does when the first group of the optimiser has
        stepped for the first time, and the others have no states yet."""
        if self.stage == 2:
            for group, vector in zip(self.module.optimizer.bit16_groups, self.vectors(), strict=True):
                self.deepspeed.utils.lazy_init_hp_params_optimizer_state(group, vector, self.optimizer.state)

    def parts(self) -> dict[str, Any]:
        first, *_ = self.vectors()
        states = self.optimizer.state.get(first, {})  # none before the first step
        if states:
            self.link()
        whole: dict[str, dict[str, Tensor]] = {key: {} for key in states if states[key].shape == first.shape}
        for key, found in whole.items():
            for name, parameter in self.trained.items():
                value = self.deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
                if self.ranks.first:
                    found[name] = value.cpu().clone()
        counts = {key: value.cpu() for key, value in states.items() if key not in whole}
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return super().parts() | {"states": whole, "counts": counts, "rates": rates}

    def load_parts(self, folder: Path, kept: dict[str, Any]) -> None:
        weights = safetensors.torch.load_file(folder / WEIGHTS)
        with torch.no_grad(), self.gathered(changed=True):
            for name, own in self.objective.state_dict(keep_vars=True).items():
                if name in weights:  # a tied one is there once
                    own.copy_(weights[name])
        self.module.optimizer.refresh_fp32_params()
        for group, rate in zip(self.optimizer.param_groups, kept["rates"], strict=True):
            group["lr"] = rate
        if kept["states"]:
            self.load_states(kept["states"], kept["counts"])

    def load_states(self, whole: dict[str, dict[str, Tensor]], counts: dict[str, Tensor]) -> None:
        """Makes the states that the optimiser's first step would make, and fills them."""
        for vector in self.vectors():
            states = {key: torch.zeros_like(vector) for key in whole}
            counted = {key: value.to(vector.device, copy=True) for key, value in counts.items()}
            self.optimizer.state[vector] = states | counted
        self.link()
        for key, found in whole.items():
            for name, parameter in self.trained.items():
                self.load_state_of(parameter, key, found[name])

    def load_state_of(self, parameter: Any, key: str, whole: Tensor) -> None:
        """This rank's part of one state of one parameter."""
        if self.stage == 2:
            self.deepspeed.utils.safe_set_full_optimizer_state(parameter, whole, key)
            return
        # safe_set_full_optimizer_state of DeepSpeed 0.19 fails here where ranks do not divide a parameter.
        size, n = parameter.ds_tensor.numel(), self.ranks.size
        parts = nn.functional.pad(whole.flatten(), (0, size * n - whole.numel())).view(n, size)
        self.deepspeed.utils.safe_set_local_optimizer_state(parameter, parts[self.ranks.rank], key)


STRATEGIES: dict[Strategy, Callable[..., Laid]] = {
    Strategy.none: Alone,
    Strategy.ddp: Ddp,
    Strategy.fsdp2: Fsdp2,
    Strategy.zero2: partial(Zero, stage=2),
    Strategy.zero3: partial(Zero, stage=3),
}


def lay(objective: Objective, trainer: TrainerConfig, ranks: Ranks, share: Share) -> Laid:
    """The objective as `trainer.strategy` lays it out. share: of the peak rates at an optimiser step."""
    return STRATEGIES[trainer.strategy](objective, trainer, ranks, share)


def entered(forward: Callable[..., Loss], autocast: torch.autocast) -> Callable[..., tuple[Tensor, Any]]:
    """`forward` under `autocast`, its loss as a tuple: where sharded modules look for tensors to hook."""

    def under(batch: Batch, positions: Tensor) -> tuple[Tensor, Any]:
        with autocast:
            loss = forward(batch, positions)
        return loss.value, loss.metrics

    return under


@contextmanager
def plain_parameters(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside the block `module` has `weights`, a tied one once, for parameters in place of its own."""
    own = dict(module.named_parameters(remove_duplicate=False))
    plain = {p: nn.Parameter(weights[name], p.requires_grad) for name, p in module.named_parameters()}
    put(module, {name: plain[p] for name, p in own.items()})
    try:
        yield
    finally:
        put(module, own)


def put(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Past `__setattr__`, which DeepSpeed and torch watch."""
    for name, parameter in parameters.items():
        at, _, leaf = name.rpartition(".")
        module.get_submodule(at)._parameters[leaf] = parameter


def tied(module: nn.Module) -> set[str]:
    """The further names of parameters that have several."""
    every = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return every - {name for name, _ in module.named_parameters()}


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def random_states() -> dict[str, Any]:
    """This process's, as what `torch.load` reads without running anything."""
    kind, keys, *rest = np.random.get_state()
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    numpy = [kind, np.asarray(keys).tolist(), *rest]
    return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(states["torch"])
    for state in states["cuda"]:
        torch.cuda.set_rng_state(state)
