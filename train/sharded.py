"""The frozen target in parts over processes, for one that no device holds: `trainer.target_parallel`.

transformers' own tensor-parallel plan cuts it (after Shoeybi et al. 2019, arXiv 1909.08053, §3): the first
matrices of attention and MLP are cut by rows and the last by columns, so that each process computes some of
the heads and of the inner width, and one sum over the processes follows. What a draft reads of its target
stays whole on each: embedding, norms and head. The draft is trained data-parallel over all ranks as ever;
`trainer.target_parallel` ranks in a row hold one target.

A forward is run by all holders at once, in one of two ways:

    as it is         all have the same input: the target's checks, the held-out measurement
    in `together`    each has its own, or none: the holders tell each other their inputs, run all of them one
                     after the other, and each keeps its own result

So the target's arithmetic on a process is what it would be with a whole one, its weights and K/V a share, and
every rank still trains on rows of its own, with the features that an undivided target gives up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.integrations.tensor_parallel import apply_tensor_parallelism

from configs.errors import TargetError
from configs.schema import TargetConfig
from models.quantization import held_bytes
from models.target import Target, TargetOutput, read_model, resolve_device
from train.ranks import Ranks

T = TypeVar("T")


class ShardedTarget(Target):
    """This process's part of a target, and how its holders run it."""

    holders: Ranks
    known: str  # fingerprint, taken while it was whole
    apart = False  # forwards now are of each process's own input

    @classmethod
    def load_among(cls, holders: Ranks, cfg: TargetConfig) -> ShardedTarget:
        """As `Target.load`, on all of `holders` at once.

        The files are mapped into memory, which the processes of a node share, and each copies its parts out.
        """
        model, tokenizer = read_model(cfg, torch.device("cpu"))
        target = cls(model, tokenizer, cfg.name, cfg.revision)
        target.holders, target.known = holders, Target.fingerprint(target)
        refuse_uneven(target, holders.size)
        assert holders.mesh is not None
        apply_tensor_parallelism(target.model, holders.mesh, cuts(target))
        target.model.to(resolve_device(cfg.device))
        target.check()
        return target

    def fingerprint(self) -> str:
        return self.known

    def forward(self, input_ids: Tensor, **words: Any) -> TargetOutput:
        if not self.apart:
            return super().forward(input_ids, **words)
        assert not {"cache", "mask", "positions"} & set(words), "the others are told token ids alone"
        _, output = self._round(input_ids, words)
        assert output is not None
        return output

    def together(self, run: Callable[[], T]) -> T:
        """What `run` gives on this process, with forwards of its own input. All holders call it, and run each
        other's forwards until none has any left."""
        self.apart = True
        try:
            found = run()
            while self._round(None, {})[0]:
                pass
        finally:
            self.apart = False
        return found

    def _round(self, own: Tensor | None, words: dict[str, Any]) -> tuple[bool, TargetOutput | None]:
        """One forward for each process that has one. (whether any had, the output of `own`)"""
        asked = self.holders.gathered(None if own is None else own.cpu())
        kept: TargetOutput | None = None
        for rank, input_ids in enumerate(asked):
            if input_ids is None:
                continue
            if rank == self.holders.rank:
                kept = super().forward(input_ids.to(self.device), **words)
            else:
                super().forward(input_ids.to(self.device), logits=False)
        return any(input_ids is not None for input_ids in asked), kept


def cuts(target: Target) -> dict[str, str]:
    """transformers' plan for this target: how each module and each weight of it is cut, by name. None of what
    stays whole."""
    model, whole = target.model, [target.model.get_input_embeddings(), target.head]
    kept = [name for name, module in model.named_modules() if any(module is one for one in whole)]
    plan: dict[str, str] = model._expand_parallel_plan(model.tp_plan)
    return {name: cut for name, cut in plan.items() if not {name, name.rpartition(".")[0]} & set(kept)}


def cut_bytes(target: Target) -> int:
    """Bytes of the weights that are cut; the others stay whole."""
    plan = cuts(target)
    return sum(p.nbytes for name, p in target.model.named_parameters() if name in plan and p.dim() > 1)


def refuse_uneven(target: Target, parts: int) -> None:
    """Raises `TargetError` for a target that cannot be cut into `parts`."""
    where = f"trainer.target_parallel={parts}"
    if not cuts(target):
        raise TargetError(
            f"{where}: transformers has no tensor-parallel plan for {type(target.model).__name__}, target "
            f"{target.name}. Set it to 1, and take devices that hold the target."
        )
    heads, shared = head_counts(target)
    if heads % parts or shared % parts:
        sizes = [str(n) for n in range(1, shared + 1) if gcd(heads, shared) % n == 0]
        raise TargetError(
            f"{where} cannot share out the {heads} attention heads of target {target.name}, which read "
            f"{shared} heads of keys and values: set it to {', '.join(sizes)}."
        )


def head_counts(target: Target) -> tuple[int, int]:
    """A layer's heads of queries, and of keys and values."""
    heads = target.config.num_attention_heads
    return heads, getattr(target.config, "num_key_value_heads", None) or heads


def placement(target: Target) -> str:
    """Where the target is, how much of it a device holds and why, as a line."""
    weights = list(target.model.parameters())
    whole = sum(map(held_bytes, weights))
    if not isinstance(target, ShardedTarget):
        said = f" (target.quantize={target.quantize.value})" if target.quantize else ""
        return f"target: whole on each process, {whole / 1e9:.3g} GB{said} (trainer.target_parallel=1)"
    held = sum((w.to_local() if isinstance(w, DTensor) else w).nbytes for w in weights)
    return (
        f"target: in {target.holders.size} parts, {held / 1e9:.3g} of {whole / 1e9:.3g} GB on each process; "
        f"embedding, norms and head are whole (trainer.target_parallel={target.holders.size})"
    )
