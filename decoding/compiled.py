"""The target's forward at a few fixed shapes, compiled: CUDA graphs on a GPU, Inductor on a CPU.

Run eagerly, a forward over a few tokens is a thousand small operators that Python starts one by one, and a
fast device waits for it. A compiled one is started once, which asks for shapes that come again: trees are
padded to one of `sizes`, and attention looks at as many rows of the cache as the next power of two, of which
the mask leaves the sequence's own. Its law is the eager one's, up to rounding.

A shape is compiled when it is first met: about a minute on a CPU, seconds on a GPU. `eval.measure` meets them
while it warms up. Inductor freezes the weights it is given, so that they stand in memory twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch._dynamo.config
from torch import Tensor, nn
from transformers.cache_utils import Cache

from configs.errors import ConfigError
from decoding.cache import KVCache
from models.target import Target, TargetOutput

LEAST_ROWS = 512  # of the cache that a forward attends to
CAPACITY = 2048  # rows that a slot has at least: shapes depend on it, and short texts should share theirs
MOST_SHAPES = 64  # compiled by Inductor beside our own; it would go on eagerly, without a word, after eight
WARM_UPS = 2  # runs before a CUDA graph is captured, in which libraries allocate


class Inputs(NamedTuple):
    """What changes from one forward to the next."""

    ids: Tensor  # long [B, N]
    positions: Tensor  # long [B, N]
    mask: Tensor  # bool [B, 1, N, S]
    rows: Tensor  # long [B, N]: where in its slot each new row goes


class Rows(Cache):
    """What a compiled forward sees of a `KVCache`: new rows go where a tensor says, and S are attended to."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], rows: Tensor) -> None:
        super().__init__(layers=[])
        self.keys, self.values = keys, values  # [B, H, S, D] of each layer
        self.rows = rows  # long [B, N]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        for held, new in ((keys, key_states), (values, value_states)):
            if len(self.rows) == 1:
                held.index_copy_(2, self.rows[0], new)
            else:
                held.scatter_(2, self.rows[:, None, :, None].expand_as(new), new)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.keys[0].shape[2] - self.rows.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.keys[0].shape[2], 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.keys[0].shape[2]

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self.keys)


class Compiled:
    """The forwards of one target. Decoders of that target may share it."""

    def __init__(self, target: Target, sizes: Sequence[int]) -> None:
        """sizes: of trees, their roots included, that others are padded to."""
        if not sizes or min(sizes) < 1:
            raise ConfigError(f"A compiled forward needs sizes of at least 1 node, and these are {sizes}.")
        self.target = target
        self.sizes = sorted(set(sizes))
        self.forwards: dict[Any, Callable[..., TargetOutput]] = {}  # by what their shapes depend on
        self.steps: dict[tuple[int, ...], Step] = {}  # by taps

    def padded(self, nodes: int) -> int:
        """The size at which a forward over `nodes` is run; beyond the largest, a multiple of it."""
        return size_for(self.sizes, nodes)

    def extent(self, rows: int) -> int:
        """How many rows of the cache are attended to, where `rows` are needed."""
        return max(LEAST_ROWS, 1 << (rows - 1).bit_length())

    def __call__(
        self, cache: KVCache, input_ids: Tensor, positions: Tensor, mask: Tensor, taps: tuple[int, ...]
    ) -> TargetOutput:
        """`Target.forward` behind the rows that `cache` was aimed at, to an extent of `extent`.

        input_ids, positions: long [B, N], N being one of `sizes`. mask: bool [B, 1, N, extent].
        """
        keys, values, rows = cache.held()
        inputs = Inputs(input_ids, positions, mask, rows)
        placed = places(keys, values) if self.target.device.type == "cuda" else ()
        shape = (taps, mask.shape, keys[0].stride(), placed)
        if shape in self.forwards:
            output = self.forwards[shape](inputs, keys, values)
        else:
            with torch._dynamo.config.patch(recompile_limit=len(self.forwards) + MOST_SHAPES):
                self.forwards[shape] = self.made(taps, inputs, keys, values)
                output = self.forwards[shape](inputs, keys, values)
        cache.grown()
        return output

    def made(
        self, taps: tuple[int, ...], inputs: Inputs, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> Callable[..., TargetOutput]:
        """The forward for these shapes."""
        if taps not in self.steps:
            self.steps[taps] = Step(self.target, taps)
        step = self.steps[taps]
        return Graph(step.run, inputs, keys, values) if self.target.device.type == "cuda" else step.compiled


def size_for(sizes: Sequence[int], nodes: int) -> int:
    """The first of the ascending `sizes` that has room for `nodes`; beyond the largest, a multiple of it."""
    return next((size for size in sizes if size >= nodes), -(-nodes // sizes[-1]) * sizes[-1])


def places(keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[int, ...]:
    """Where in memory the cache of all layers lies, which a CUDA graph reads and writes: another cache may
    come to lie at a part of it."""
    return tuple(held.data_ptr() for held in (keys[0], keys[-1], values[0], values[-1]))


class Step:
    """The target's forward over tensors alone, with the hooks that its taps need in place for good."""

    def __init__(self, target: Target, taps: tuple[int, ...]) -> None:
        self.target, self.taps = target, taps
        self.caught: dict[int, Tensor] = {}
        for layer in set(taps) - {target.num_layers}:
            target.layers[layer].register_forward_pre_hook(self.catch(layer), with_kwargs=True)
        self.inductor = torch.compile(self.run, dynamic=False, options={"freezing": True})

    def compiled(self, *inputs: Any) -> TargetOutput:
        """`run` by Inductor."""
        self.caught.clear()  # of what eager forwards left there, which would count as a new case
        return self.inductor(*inputs)

    def catch(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.caught[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    def run(self, inputs: Inputs, keys: Sequence[Tensor], values: Sequence[Tensor]) -> TargetOutput:
        output = self.target.forward(
            inputs.ids, positions=inputs.positions, mask=inputs.mask, cache=Rows(keys, values, inputs.rows)
        )
        states = {**self.caught, self.target.num_layers: output.last_hidden}
        taps = torch.cat([states[layer] for layer in self.taps], dim=-1) if self.taps else None
        self.caught.clear()
        return TargetOutput(output.logits, output.last_hidden, taps)


class Graph:
    """A step captured as a CUDA graph: inputs are copied to where it reads them, results copied out."""

    def __init__(
        self,
        step: Callable[..., TargetOutput],
        inputs: Inputs,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> None:
        self.inputs = Inputs(*(tensor.clone() for tensor in inputs))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):  # the same rows are written again, with the same values
                step(self.inputs, keys, values)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = step(self.inputs, keys, values)

    def __call__(self, inputs: Inputs, keys: Sequence[Tensor], values: Sequence[Tensor]) -> TargetOutput:
        for held, new in zip(self.inputs, inputs, strict=True):
            held.copy_(new)
        self.graph.replay()
        logits, hidden, taps = self.output.logits, self.output.last_hidden, self.output.taps
        assert logits is not None
        return TargetOutput(logits.clone(), hidden.clone(), None if taps is None else taps.clone())
