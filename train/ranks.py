"""The processes of one training run: which of them this is, and what they tell each other.

A launcher (torchrun, accelerate launch) starts them and says in the environment which rank each has. Rank 0
alone prints, logs, prepares data, measures and writes. The others wait for it in a group of its own for as
long as it takes: a long measurement is no failure, while training's collectives keep torch's time limits.
Without a launcher there is one process, and nothing here does anything.

How weights, gradients and optimiser states lie over the ranks is train/strategies.py. A target that they
hold in parts is train/sharded.py; `trainer.target_parallel` ranks in a row are then its `holders`, numbered
among themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from configs.errors import ConfigError, LeadoutError
from configs.schema import Config, Strategy
from models.target import resolve_device
from train.objectives import Loss

PATIENCE = timedelta(days=7)  # for rank 0 to compute features, or to measure

T = TypeVar("T")


class LostRankError(LeadoutError):
    """Another process of this run has ended."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of its run."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None  # to wait in; None: there is no process group
    holders: Ranks | None = None  # those that hold one target in parts with this one; None: it has it whole
    mesh: DeviceMesh | None = None  # of such holders, for the target's own collectives

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, or holds a part of its target: where rank 0 runs that, these have to."""
        return self.rank < (self.holders.size if self.holders else 1)

    def told(self, found: Callable[[], T]) -> T:
        """What rank 0 finds, on every rank; the others wait for it."""
        if self.group is None:
            return found()
        value: list[Any] = [found() if self.first else None]
        with self._waiting():
            dist.broadcast_object_list(value, src=0, group=self.group)
        return value[0]

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """The block runs on rank 0, which may write files, and then on all others, which find them."""
        if not self.first:
            self.meet()
        yield
        if self.first:
            self.meet()

    def gathered(self, own: T) -> list[T]:
        """What each rank has, by rank, on every rank."""
        if self.group is None:
            return [own]
        everyone: list[Any] = [None] * self.size
        with self._waiting():
            dist.all_gather_object(everyone, own, group=self.group)
        return everyone

    def total(self, values: Tensor) -> Tensor:
        """The sum of all ranks' `values`, in place."""
        if self.group is not None:
            dist.all_reduce(values)
        return values

    def any(self, asked: bool) -> bool:
        """Whether any rank asks."""
        asking = torch.tensor(int(asked))
        if self.group is not None:
            with self._waiting():
                dist.all_reduce(asking, group=self.group)
        return bool(asking)

    def pooled(self, losses: Sequence[Loss], tokens: int) -> tuple[list[Loss], int]:
        """The losses of all ranks as one, and the sum of their tokens.

        One small reduction a step, in float64, where counts are exact. Every rank brings the same metrics.
        """
        if self.group is None:
            return list(losses), tokens
        figures = [[loss.value, *chain(*loss.metrics.values())] for loss in losses]
        summed = [torch.stack(same).double().sum(0) for same in zip(*figures, strict=True)]
        flat = torch.cat([one.flatten() for one in summed])
        flat = self.total(torch.cat([flat, flat.new_tensor([tokens])]))
        *parts, all_tokens = flat.split([*(one.numel() for one in summed), 1])
        shaped = zip(parts, figures[0], strict=True)
        value, *sums_and_counts = (part.view_as(like).to(like.dtype) for part, like in shaped)
        pairs = zip(sums_and_counts[::2], sums_and_counts[1::2], strict=True)
        return [Loss(value, dict(zip(losses[0].metrics, pairs, strict=True)))], int(all_tokens)

    def end(self) -> None:
        """All processes leave together: one that went first would break what another still waits for."""
        if self.group is not None:
            self.meet()
            dist.destroy_process_group()

    def meet(self) -> None:
        """Waits until every rank is here."""
        if self.group is not None:
            with self._waiting():
                dist.barrier(group=self.group)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise LostRankError(
                f"Rank {dist.get_rank()} waited for another process of this run, and that has ended: its own "
                "message, or the launcher's summary, says why. Run the same command again: it goes on from "
                "the last checkpoint."
            ) from error


def join(config: Config) -> Ranks:
    """The processes that a launcher started; this one takes the device of its local rank.

    Raises `ConfigError` for a launch that `trainer.strategy` or `target.device` cannot mean.
    """
    strategy, size = config.trainer.strategy, int(os.environ.get("WORLD_SIZE", 1))
    launched = "RANK" in os.environ
    if strategy is Strategy.none:
        if size > 1:
            raise ConfigError(
                f"This run was started as {size} processes, and trainer.strategy=none uses one. Choose how "
                "they share it, as in trainer=ddp, or start python -m train.distill without a launcher."
            )
        return Ranks()
    parts = config.trainer.target_parallel
    if size % parts:
        raise ConfigError(
            f"trainer.target_parallel={parts} processes hold one target, and this run was started as {size}: "
            f"start {parts} or a multiple of it, as in torchrun --nproc_per_node {parts} -m train.distill."
        )
    if not launched:
        if strategy in (Strategy.zero2, Strategy.zero3):
            raise ConfigError(
                f"trainer.strategy={strategy.value} runs under a launcher, one process to a GPU: torchrun "
                "--nproc_per_node N -m train.distill and the same arguments. For one GPU set "
                "trainer.strategy=none."
            )
        return Ranks()
    device = resolve_device(config.target.device)
    if device.type == "cuda":
        if device.index is not None:
            raise ConfigError(
                f"target.device={config.target.device} is one GPU, and this run was started as {size} "
                "processes. Set target.device=cuda: each takes the GPU of its local rank."
            )
        local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= there:
            raise ConfigError(
                f"Local rank {local} has no GPU: torch sees {there} here. Start at most {there}."
            )
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    assert isinstance(group, dist.ProcessGroup)
    return Ranks(dist.get_rank(), size, group, holders_among(size, parts, device.type) if parts > 1 else None)


def holders_among(size: int, parts: int, device: str) -> Ranks:
    """Those of `size` ranks that hold a target with this one: `parts` of them in a row, on one node if they
    can be."""
    mesh = init_device_mesh(device, (size // parts, parts), mesh_dim_names=("copies", "parts"))["parts"]
    every = [list(range(first, first + parts)) for first in range(0, size, parts)]
    group, _ = dist.new_subgroups_by_enumeration(every, timeout=PATIENCE, backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return Ranks(mesh.get_local_rank(), parts, group, mesh=mesh)
