"""What a round's forwards take on this machine: measured once, kept in a file, interpolated between.

`t(n)`, the target's forward over the n nodes of a tree, is not flat, and not even monotone: in float32 two
tokens may take longer than four (decoding.md, §6b). So it is measured at a few sizes, for one batch size and
length of context. From it follow the size to which a tree is best padded, and whether drafting one more token
pays. Compiled forwards (decoding/compiled.py) are run at their own sizes only: of them `t(n)` is a staircase.

Only `measured` and what it is given (`target_forward`), and `drafting`, run anything; the rest is arithmetic.
"""

from __future__ import annotations

import json
import logging
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers

from configs.errors import ConfigError
from decoding.cache import KVCache
from decoding.clock import now
from decoding.compiled import CAPACITY, Compiled, size_for
from decoding.drafters import Drafter, Seen, Turn
from decoding.law import Law
from decoding.randomness import Seeded
from decoding.tree import TokenTree
from decoding.warp import Warp
from models.files import storage, write_json
from models.provenance import hardware, provenance
from models.target import Target

log = logging.getLogger(__name__)

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
VERSION = 4  # raise it when times are taken in another way
FOLDER = Path("artifacts/costs")
SHORTEST = 128  # contexts up to it share a bucket


@dataclass(frozen=True)
class Curve:
    """Seconds by size, at ascending sizes."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip((0, *self.sizes), self.sizes, strict=False))
        if not self.sizes or not ascending or len(self.sizes) != len(self.seconds):
            raise ValueError(f"a curve needs ascending sizes and as many times: {self.sizes}, {self.seconds}")
        if not all(0 <= seconds < math.inf for seconds in self.seconds):
            raise ValueError(f"a curve's times are finite and not negative: {self.seconds}")

    def __call__(self, n: int) -> float:
        """Seconds at size n >= 1: on the line between its neighbours; past the last, on the line through the
        last two, unless that falls."""
        if n < 1:
            raise ValueError(f"no forward has {n} nodes")
        i = bisect_left(self.sizes, n)
        if i < len(self.sizes) and (self.sizes[i] == n or i == 0):
            return self.seconds[i]
        if len(self.sizes) == 1:
            return self.seconds[0]
        i = min(i, len(self.sizes) - 1)
        (a, b), (low, high) = self.sizes[i - 1 : i + 1], self.seconds[i - 1 : i + 1]
        slope = (high - low) / (b - a)
        return low + slope * (n - a) if n < b else high + max(slope, 0.0) * (n - b)

    def padded(self, n: int) -> int:
        """The size m >= n that takes least, the smallest of them: what n nodes should be padded to."""
        # The curve is straight between measured sizes, so that only these can be least.
        return min([n, *(size for size in self.sizes if size > n)], key=self)

    def planned(self, n: int) -> float:
        """Seconds at size n with padding, which never falls as n grows: min of t(m) over m >= n."""
        return self(self.padded(n))


@dataclass(frozen=True)
class Steps(Curve):
    """Of forwards that are run at these sizes only, to which all others are padded."""

    def __call__(self, n: int) -> float:
        return super().__call__(size_for(self.sizes, n))

    def padded(self, n: int) -> int:
        return min([size_for(self.sizes, n), *(size for size in self.sizes if size > n)], key=self)


@dataclass(frozen=True)
class Costs:
    """A round's parts, for one batch size and length of context."""

    target: Curve
    draft: float  # seconds of one draft forward

    def round(self, drafted: int) -> float:
        """Seconds of a round that drafts a chain of `drafted` tokens, one forward each."""
        return drafted * self.draft + self.target.planned(drafted + 1)


def measured(
    run: Callable[[int], object],
    sizes: Sequence[int] = SIZES,
    repeats: int = 9,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> Curve:
    """The curve of `run(size)`: the median of `repeats`, after `warmup` turns that do not count.

    All sizes are run in turn, so that a slow spell of the machine does not fall on one of them. Each is run
    twice, and the second counts: in decoding, rounds of one size follow each other, and the first forward
    after one of another size took 5 to 20 % longer (2 cores, float32).
    """
    if repeats < 1:
        raise ConfigError(f"repeats={repeats}: a time is the median of at least 1 run.")
    times: list[list[float]] = [[] for _ in sizes]
    for turn in range(warmup + repeats):
        for size, taken in zip(sizes, times, strict=True):
            run(size)
            began = clock()
            run(size)
            if turn >= warmup:
                taken.append(clock() - began)
    return Curve(tuple(sizes), tuple(median(taken) for taken in times))


def target_forward(
    target: Target, batch: int, context: int, compiled: Compiled | None = None, taps: tuple[int, ...] = ()
) -> Callable[[int], None]:
    """A function of n that does a round's target forward: n nodes behind `context` tokens of each of `batch`
    sequences, with the mask and positions that the decoder gives. Of several sequences each has a token less
    than the one before: rows that lie unevenly take their own time, and in decoding they do.

    compiled: does it, at its own sizes; None: eagerly. taps: those that a drafter reads.
    """
    cache = KVCache(target.num_layers)
    slots = [cache.allocate() for _ in range(batch)]
    device = target.device
    forward = compiled or target.forward
    starts = [max(1, context - i) for i in range(batch)]
    room = context + max(SIZES)
    if compiled is not None:  # as much as a decoder makes, so that shapes compiled here serve it too
        room = max(CAPACITY, compiled.extent(context + compiled.sizes[-1]))

    def keep_context() -> None:
        cache.commit_all([(slot, start, ()) for slot, start in zip(slots, starts, strict=True)])

    @torch.inference_mode()
    def fill() -> None:
        cache.aim(slots, context, reserve=room)
        ids = torch.zeros(batch, context, dtype=torch.long, device=device)
        positions = torch.arange(context, device=device).expand(batch, -1)
        target.forward(ids, positions=positions, cache=cache, logits=False)
        keep_context()

    @torch.inference_mode()
    def run(n: int) -> None:
        width = n if compiled is None else compiled.padded(n)
        wanted = 0 if compiled is None else compiled.extent(context + width)
        extent = cache.aim(slots, width, extent=wanted)
        mask = None
        if width > 1 or batch > 1 or compiled is not None:
            tree = TokenTree.chain(0, [0] * (width - 1))
            seen = np.zeros((batch, 1, width, extent), dtype=bool)
            for row, start in enumerate(starts):
                seen[row, 0, :, : start + width] = tree.ancestor_mask(start)
            mask = torch.from_numpy(seen).to(device)
        rows: dict[str, Any] = {
            "input_ids": torch.zeros(batch, width, dtype=torch.long, device=device),
            "positions": torch.tensor([[*range(start, start + width)] for start in starts], device=device),
            "mask": mask,
        }
        forward(cache=cache, taps=taps, **rows)
        keep_context()

    fill()
    return run


def draft_seconds(
    drafter: Drafter, target: Target, batch: int, context: int, depth: int = 4, rounds: int = 9
) -> float:
    """Median seconds of one forward of the draft behind `context` tokens of each of `batch` sequences; 0 for
    a drafter without forwards. It proposes `depth` deep."""
    seconds, forwards = drafting(drafter, target, batch, context, depth, rounds)
    return seconds / forwards if forwards else 0.0


def drafting(
    drafter: Drafter, target: Target, batch: int, context: int, depth: int, rounds: int = 9
) -> tuple[float, int]:
    """Median seconds of the draft's forwards in a round that proposes `depth` deep, and how many they are.

    It is told each time that the target accepted nothing, and a forward of the target comes before, which
    drives the draft's weights out of a processor's caches as it does in decoding. The two first rounds do not
    count: in one it reads the context, the other is for warming up.
    """
    verify = target_forward(target, batch, context)
    law, states = Law(Warp(temperature=0.0)), [drafter.begin() for _ in range(batch)]
    width = target.hidden_size * len(drafter.taps)
    told = [0] * context
    start, taken, forwards = 0, [], 0
    try:
        for _ in range(2 + rounds):
            verify(1)
            taps = torch.zeros(len(told), width, dtype=target.dtype, device=target.device)
            choices = [0] if drafter.wants_choices else None
            seen = Seen(start, told, 0, taps, choices)
            with torch.inference_mode():
                proposals = drafter.propose([Turn(state, seen, depth, law, Seeded(0)) for state in states])
            forwards = max(proposal.forwards for proposal in proposals)
            taken.append(max(proposal.seconds for proposal in proposals))
            start, told = start + len(told), [0]
    finally:
        for state in states:
            drafter.end(state)
    return median(taken[2:]), forwards


def measured_costs(
    target: Target,
    drafter: Drafter,
    draft_name: str,
    batch: int = 1,
    context: int = 256,
    folder: Path = FOLDER,
    compiled: Compiled | None = None,
) -> Costs:
    """The costs of this pair on this machine: from `folder`, or measured now (seconds to a minute) and kept.

    draft_name: whatever tells this drafter from others, such as the fingerprint of its weights. compiled: the
    forwards that decoding will use, at whose sizes they are then measured and taken; None: eager ones.
    """
    length = context_bucket(context)
    key = conditions(target, batch, length)

    def curve() -> Curve:
        sizes, taps = (SIZES, ()) if compiled is None else (compiled.sizes, drafter.taps)
        run = target_forward(target, batch, length, compiled, taps)
        return measured(run, sizes, clock=lambda: now(target.device))

    def forward() -> Curve:
        return Curve((1,), (draft_seconds(drafter, target, batch, length),))

    if compiled is None:
        verifying = remembered(folder, {**key, "of": "target"}, curve)
    else:
        how = {"of": "compiled target", "sizes": compiled.sizes, "taps": [*drafter.taps]}
        kept = remembered(folder, {**key, **how}, curve)
        verifying = Steps(kept.sizes, kept.seconds)
    return Costs(verifying, remembered(folder, {**key, "of": f"draft {draft_name}"}, forward)(1))


def measured_drafting(
    target: Target,
    drafter: Drafter,
    draft_name: str,
    depth: int,
    batch: int = 1,
    context: int = 256,
    folder: Path = FOLDER,
) -> Curve:
    """Seconds of drafting by depth, 1 to `depth`; heads that say all at once take the same for every one.

    drafter: of chains, as in `measured_costs`.
    """
    length = context_bucket(context)
    key = {**conditions(target, batch, length), "of": f"draft {draft_name}", "depths": depth}
    depths = tuple(range(1, depth + 1))

    def curve() -> Curve:
        return Curve(depths, tuple(drafting(drafter, target, batch, length, d)[0] for d in depths))

    return remembered(folder, key, curve)


def sizes_up_to(nodes: int) -> list[int]:
    """The `SIZES` at which a curve is measured that is to tell of up to `nodes`."""
    return [size for i, size in enumerate(SIZES) if i == 0 or SIZES[i - 1] < nodes]


def context_bucket(length: int) -> int:
    """The context at which costs for `length` tokens are measured: the next power of two, at least
    `SHORTEST`."""
    return max(SHORTEST, 1 << (length - 1).bit_length())


def conditions(target: Target, batch: int, context: int) -> dict[str, Any]:
    """All that a measured time depends on, ready for JSON."""
    machine = hardware()
    return {
        "version": VERSION,
        "target": target.fingerprint(),
        "attention": target.config._attn_implementation,
        "dtype": str(target.dtype).removeprefix("torch."),
        "packed": target.packed,
        "device": str(target.device),
        "cpu": machine["cpu"],
        "gpu": machine["gpu"],
        "threads": machine["threads"],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "batch": batch,
        "context": context,
    }


def remembered(folder: Path, key: dict[str, Any], measure: Callable[[], Curve]) -> Curve:
    """The curve kept in `folder` under `key`, else `measure()`, which is then kept beside its conditions."""
    path = folder / f"{sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"
    if path.exists():
        with storage(path, "read"):
            text = path.read_text(encoding="utf-8")
        try:
            kept = json.loads(text)
            if kept["key"] == key:
                return Curve(tuple(kept["sizes"]), tuple(kept["seconds"]))
            reason = "it holds other conditions"
        except (ValueError, KeyError, TypeError) as error:
            reason = f"it is damaged ({error})"
        log.warning(f"{path} is measured anew: {reason}.")
    curve = measure()
    kept = {"key": key, "sizes": curve.sizes, "seconds": curve.seconds, "measured": provenance()}
    write_json(path, kept)
    return curve
