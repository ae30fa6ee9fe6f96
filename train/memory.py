"""A training step rehearsed: run as it is, on tensors that have sizes and no values.

Inside a `Rehearsal` torch makes no floating-point numbers. What would hold them has a shape, a dtype and a
place (torch's fake tensors), so a target of 70 billion parameters is built, run and trained beside within
seconds, in a process of a few hundred megabytes. The code that runs is the code that trains, and each of its
tensors is counted when it comes and when it goes: nothing here knows what an objective keeps for its backward
pass.

Token ids, masks and what follows from them have values as ever, since they decide how many rows a draft is
trained on. A small answer of yes or no that would need a number (is it finite? was it accepted?) is yes.

Operators are those that a CPU would run; attention's keep on a GPU what they keep here (their output and its
log-sum-exps). What kernels allocate within themselves is not seen (but for `DOUBLING`), nor what an allocator
keeps or rounds up.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from models.roofline import Device, Reach

SMALL = 1 << 22  # elements that are worth computing: a batch's masks, not one of rows by rows

aten: Any = torch.ops.aten

# Matrix products by operator; of attention both products, masked or not, as `flop_registry` counts it.
FLOPS: dict[Any, Any] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
# They read what they give, not all that they choose from.
CHOOSING = {aten.embedding, aten.index, aten.index_select, aten.gather}


# They make another as large as what they read, and drop it before they return.
DOUBLING = {aten.logsumexp}
# Operators whose results have no size before there are values.
VALUED = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


@dataclass
class Phase:
    """What happened within a stretch of a rehearsal."""

    name: str
    held: dict[str, int] = field(default_factory=dict)  # bytes by part when most was held
    flops: float = 0.0
    work: list[tuple[float, float]] = field(default_factory=list)  # of each operation: FLOPs, bytes moved

    @property
    def peak(self) -> int:
        """Bytes."""
        return sum(self.held.values())

    def seconds(self, device: Device, reach: Reach) -> float:
        """One operation after the other, each as long as its arithmetic or its memory takes, whichever is
        longer.

        Eager kernels, no two of them fused. float32 products count double, as TF32's do.
        """
        speed, bandwidth = device.flops * reach.flops, device.bandwidth * reach.bandwidth
        return sum(max(flops / speed, moved / bandwidth) for flops, moved in self.work)


class Rehearsal(TorchDispatchMode):
    """The context. Memory belongs to the `part` in which it was made, or that has claimed it since."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._parts: dict[int, str] = {}  # of each storage that is alive
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._part = "activations"
        self._phase = Phase("")
        self.held: Counter[str] = Counter()  # bytes now
        self.wide: dict[int, str] = {}  # part by last dimension, for tensors made in no other

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is made inside the block belongs to `name`."""
        before, self._part = self._part, name
        try:
            yield
        finally:
            self._part = before

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """The block's own peak and work."""
        before, self._phase = self._phase, Phase(name, dict(self.held))
        try:
            yield self._phase
        finally:
            self._phase = before

    def claim(self, tensors: Iterable[Tensor | None], part: str) -> int:
        """Moves what these tensors hold to `part`: its bytes."""
        moved = 0
        for tensor in tensors:
            storage = None if tensor is None else tensor.untyped_storage()
            if storage is None or (before := self._parts.get(storage._cdata)) in (None, part):
                continue
            self._parts[storage._cdata] = part
            self.held[before] -= storage.nbytes()
            self.held[part] += storage.nbytes()
            moved += storage.nbytes()
        return moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            # One device for all, also for what is made on the meta device. Autocast knows this one.
            kwargs["device"] = torch.device("cpu")
        if func is aten.index.Tensor:
            args = (args[0], [place for index in args[1] for place in places(index)])
        out = self._run(func, args, kwargs)
        # Else modules could not be moved: torch swaps their parameters, which this memo refers to.
        self._fake.fake_tensor_converter.meta_converter.tensor_memo.clear()
        made = [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
        for tensor in made:
            self._count(tensor)
        if func.overloadpacket in DOUBLING:
            self._mark(extent(args[0]))
        self._note(func, args, kwargs, out, made)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        known = not any(isinstance(tensor, FakeTensor) for tensor in inputs)
        if func is aten._local_scalar_dense.default and not known:
            return 1.0 if inputs[0].is_floating_point() else 1
        if known and VALUED & set(func.tags) and func is not aten.index.Tensor:
            return func(*args, **kwargs)
        with self._fake:
            out = func(*args, **kwargs)
        made = [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
        small = all(tensor.numel() <= SMALL for tensor in made)
        if known and small and (inputs or not any(tensor.is_floating_point() for tensor in made)):
            return func(*args, **kwargs)
        if changed := overwritten(func, args, kwargs):
            # Written into a tensor with values by one without: it keeps those it has.
            return out if out is None or isinstance(changed[0], FakeTensor) else changed[0]
        if small and isinstance(out, Tensor) and out.dtype is torch.bool:
            return torch.ones(out.shape, dtype=torch.bool)
        return out

    def _count(self, tensor: Tensor) -> None:
        """Counts the tensor's memory, unless it is that of another."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._parts:
            return
        part = self._part
        if part == "activations" and tensor.dim() > 0:
            part = self.wide.get(tensor.shape[-1], part)
        self._parts[key] = part
        self._alive[key] = weakref.ref(storage, partial(self._gone, key, size))
        self.held[part] += size
        self._mark(0)

    def _mark(self, more: int) -> None:
        """Notes a peak, if this is one: what is held, and `more` for a moment."""
        if sum(self.held.values()) + more > self._phase.peak:
            self._phase.held = self.held + Counter({self._part: more})

    def _gone(self, key: int, size: int, _: object) -> None:
        self.held[self._parts.pop(key)] -= size
        del self._alive[key]

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any, made: list[Tensor]) -> None:
        """Notes the operation's FLOPs and the bytes that it moves; views and questions move none."""
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        held = {tensor.untyped_storage()._cdata for tensor in inputs}
        changed = overwritten(func, args, kwargs)
        if not changed and all(tensor.untyped_storage()._cdata in held for tensor in made):
            return
        packet = func.overloadpacket
        counts = FLOPS.get(packet)
        flops = float(counts(*args, **kwargs, out_val=out)) if counts else 0.0
        written = sum(map(extent, changed or made))
        read = written if packet in CHOOSING else sum(map(extent, inputs))
        double = 2 if flops and made and made[0].dtype is torch.float32 else 1
        self._phase.flops += flops
        self._phase.work.append((double * flops, read + written))


def extent(tensor: Tensor) -> int:
    """Bytes that reading the tensor takes; what is expanded counts once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def overwritten(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operator writes into."""
    if not func._schema.is_mutable:
        return []
    written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    named = zip((argument.name for argument in func._schema.arguments), args, strict=False)
    changed = [value for name, value in (*named, *kwargs.items()) if name in written]
    return [value for value in tree_leaves(changed) if isinstance(value, Tensor)]


def places(index: Tensor | None) -> list[Tensor | None]:
    """A mask among indices as the places where it is True; of one without values, everywhere."""
    if index is None or index.dtype is not torch.bool:
        return [index]
    known = torch.ones(index.shape, dtype=torch.bool) if isinstance(index, FakeTensor) else index
    return list(known.nonzero().unbind(1))
