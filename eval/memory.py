"""Bytes that weights and caches take, computed from the tensors themselves.

The memory of a process says little: on a CPU it holds the interpreter, and pages that the weights were read
from. Nothing here allocates or copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from decoding.cache import KVCache
from decoding.decoder import Decoder
from eval.ranges import readers
from models.packing import PackedForward
from models.quantization import parts


def weight_bytes(module: nn.Module, without: nn.Module | None = None) -> int:
    """Of all parameters and buffers, shared ones once, and those that `without` holds not at all."""
    held = {address(tensor) for tensor in tensors(without)} if without is not None else set()
    own = {address(tensor): tensor.nbytes for tensor in tensors(module)}
    return sum(size for place, size in own.items() if place not in held)


def packed_bytes(*modules: nn.Module) -> int:
    """Of the copies in the layout of the CPU's kernels (models/packing.py), which stand beside the
    weights."""
    packed = [
        layer.forward.packed
        for module in modules
        for layer in module.modules()
        if isinstance(layer.forward, PackedForward)
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in packed)


def tensors(module: nn.Module) -> Iterator[Tensor]:
    for parameter in module.parameters():
        yield from parts(parameter)
    yield from module.buffers()


def address(tensor: Tensor) -> tuple[int, int]:
    """The same for tied weights, which are two names of one memory."""
    return tensor.data_ptr(), tensor.nbytes


def cache_bytes(decoder: Decoder) -> tuple[int, int]:
    """(the target's, the drafter's) K/V buffers as they are allocated. They grow and never shrink: after a
    run they are its peak, or that of a longer run before."""
    return held([decoder.cache]), held(reader.cache for reader in readers(decoder.drafter))


def held(caches: Iterable[KVCache]) -> int:
    return sum(
        buffer.nbytes for cache in caches for buffer in (cache.keys, cache.values) if buffer is not None
    )
