"""The target answers many prompts at once: continuous batching over a preallocated K/V cache.

A batch that runs until its longest reply ends computes finished rows in vain. Here each row in flight has a
slot of its own length; a finished row gives its slot to the next prompt at once, so that the batch stays full
to the end:

    admit    prefill waiting prompts together, copy their K/V into free slots, take their first tokens
    step     one forward over one token per slot, each at its own position
    retire   rows that ended leave; the last slots move into the holes, so that live slots are always 0..n-1

Sampled replies draw from a random stream of their own row, so they depend on no batch mate.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from configs.errors import TrafficError
from data.tokens import Prompt
from decoding.warp import Warp, choices
from models.target import Target

GRAIN = 16  # prompts are padded to multiples of it, so that kernels prepared per shape are met again
GROWTH = 128  # positions by which the buffers grow
PREFILL_TOKENS = 8192  # padded tokens of one prefill, which bounds its memory


@dataclass(frozen=True)
class Sampling:
    """How replies are drawn: greedy at temperature 0, else from the warped law, seeded per row."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """`reply_ids` as generated, the end token included; finish is "eos" or "length"."""

    prompt: Prompt
    reply_ids: list[int]
    finish: str


@dataclass
class Row:
    """A prompt in flight. `limit` is how many tokens its reply may have."""

    prompt: Prompt
    limit: int
    uniform: np.random.Generator
    reply: list[int] = field(default_factory=list)

    def answer(self, eos_ids: frozenset[int]) -> Answer | None:
        """The finished answer, or None while the row goes on."""
        if self.reply[-1] in eos_ids:
            return Answer(self.prompt, self.reply, "eos")
        return Answer(self.prompt, self.reply, "length") if len(self.reply) == self.limit else None


@torch.inference_mode()
def answers(
    target: Target,
    prompts: Iterable[Prompt],
    sampling: Sampling,
    batch_size: int,
    on_tokens: Callable[[int], None] | None = None,
) -> Iterator[Answer]:
    """Yields each prompt's answer as soon as it ends, prompts entering in the order given.

    They are taken as they are needed. Prompts of like length beside each other waste least. `on_tokens` is
    told how many tokens each forward gave. Raises `TrafficError` for a prompt that leaves no room in the
    target's context.
    """
    coming = (row_of(target, prompt, sampling) for prompt in prompts)
    waiting: deque[Row] = deque()
    draw = sampler(sampling)
    told = on_tokens or (lambda count: None)
    slots = Slots()
    live: list[Row] = []
    while True:
        waiting.extend(islice(coming, batch_size - len(waiting)))
        if not (waiting or live):
            return
        if waiting and batch_size - len(live) >= max(
            1, batch_size // 8
        ):  # a prefill of several rows costs less per row
            entering = next_group(waiting, batch_size - len(live))
            logits, cache = prefill(target, [row.prompt.ids for row in entering])
            slots.admit(cache, [len(row.prompt.ids) for row in entering])
            new = entering
            live.extend(entering)
        else:
            logits = slots.step(target, [row.reply[-1] for row in live])
            new = live
        for row, token in zip(new, draw(logits, new), strict=True):
            row.reply.append(token)
        told(len(new))
        finished = [row.answer(target.eos_ids) for row in live]
        yield from (answer for answer in finished if answer is not None)
        live = slots.retire(live, [answer is not None for answer in finished])


def row_of(target: Target, prompt: Prompt, sampling: Sampling) -> Row:
    limit = min(sampling.max_new_tokens, room(target, prompt.id, len(prompt.ids), sampling.max_new_tokens))
    seed = hashlib.sha256(f"{sampling.seed} {prompt.id}".encode()).digest()[:16]
    return Row(prompt, limit, np.random.Generator(np.random.Philox(key=int.from_bytes(seed, "little"))))


def room(target: Target, id: str, length: int, wanted: int) -> int:
    """How many tokens the target's context leaves after a prompt (`wanted`, where it says of no end).
    `TrafficError` if none.

    A window ends it as well: the steps' mask, which keeps rows of different lengths apart, knows none.
    """
    ends = (getattr(target.config, "max_position_embeddings", None), target.window)
    context = min((end for end in ends if end), default=length + wanted)
    if length >= context:
        raise TrafficError(
            f"Prompt {id} has {length} tokens and the context of {target.name} ends at {context}. Set "
            "data.max_prompt_tokens lower and run data.prepare again."
        )
    return context - length


def next_group(waiting: deque[Row], free: int) -> list[Row]:
    """The next rows to enter: at most `free`, and few enough that their padded prefill fits."""
    group: list[Row] = []
    longest = 0
    while waiting and len(group) < free:
        longest = max(longest, len(waiting[0].prompt.ids))
        if group and longest * (len(group) + 1) > PREFILL_TOKENS:
            break
        group.append(waiting.popleft())
    return group


def prefill(target: Target, prompts: list[list[int]]) -> tuple[Tensor, DynamicCache]:
    """(logits [n, V] after each prompt, cache of the prompts padded at the end).

    Padding after the end is seen by no real token under causal attention; `Slots` never looks at it.
    """
    longest = -(-max(len(ids) for ids in prompts) // GRAIN) * GRAIN
    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in prompts], device=target.device)
    cache = DynamicCache()  # of the configuration's kinds, one with a sliding window would drop rows
    positions = torch.arange(longest, device=target.device).expand(len(prompts), -1)
    hidden = target.forward(padded, positions=positions, cache=cache, logits=False).last_hidden
    last = torch.tensor([len(ids) - 1 for ids in prompts], device=target.device)
    return target.lm_head(hidden[torch.arange(len(prompts), device=target.device), last]), cache


def sampler(sampling: Sampling) -> Callable[[Tensor, list[Row]], list[int]]:
    """A function from logits [n, V] and their rows to n token ids."""
    if sampling.temperature == 0:
        return lambda logits, rows: [*map(choices(logits), range(len(rows)))]
    warp = Warp(temperature=sampling.temperature, top_k=0, top_p=sampling.top_p)

    def draw(logits: Tensor, rows: list[Row]) -> list[int]:
        cumulative = warp.laws(logits).double().cumsum(dim=-1)  # inverse CDF; u < 1, so u * total < total
        u = torch.tensor([[row.uniform.random()] for row in rows], device=logits.device, dtype=torch.float64)
        return torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True).squeeze(-1).tolist()

    return draw


class Slots(Cache):
    """K/V of the rows in flight: slot i holds `lengths[i]` positions of [slots, H, capacity, D] buffers."""

    def __init__(self) -> None:
        self.slots: list[SlotLayer] = []
        super().__init__(layers=cast(Any, self.slots))  # the same list: what is appended here is seen there
        self.lengths: list[int] = []

    def admit(self, prefilled: DynamicCache, lengths: list[int]) -> None:
        """Appends the rows of a prefill, whose keys and values are padded at the end."""
        first = len(self.lengths)
        self.lengths = self.lengths + lengths
        for index, source in enumerate(prefilled.layers):
            assert isinstance(source, DynamicLayer)
            assert source.keys is not None
            assert source.values is not None
            if index == len(self.slots):
                self.slots.append(SlotLayer(source.keys, source.values))
            self.slots[index].admit(first, source.keys, source.values)

    def step(self, target: Target, tokens: list[int]) -> Tensor:
        """Feeds one token per slot and returns the logits [n, V] after it."""
        ends = torch.tensor(self.lengths, device=target.device)
        extent = max(self.lengths) + 1
        for layer in self.slots:
            layer.aim(ends, extent)
        seen = torch.arange(extent, device=target.device) <= ends[:, None]
        fed = torch.tensor(tokens, device=target.device)[:, None]
        out = target.forward(fed, positions=ends[:, None], mask=seen[:, None, None], cache=self)
        self.lengths = [length + 1 for length in self.lengths]
        assert out.logits is not None
        return out.logits[:, -1]

    def retire(self, live: list[Row], ended: list[bool]) -> list[Row]:
        """Frees the slots of rows that ended, moving the last into the holes; returns the rows by slot."""
        kept, lengths = list(live), list(self.lengths)
        for slot in reversed([i for i, end in enumerate(ended) if end]):
            last = len(kept) - 1
            if slot != last:
                kept[slot], lengths[slot] = kept[last], lengths[last]
                for layer in self.slots:
                    layer.move(last, slot, lengths[slot])
            kept.pop()
            lengths.pop()
        self.lengths = lengths
        return kept


class SlotLayer(CacheLayerMixin):
    """One layer's buffers. `aim` says where the next step's row of K/V goes in each slot."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Empty, for rows shaped like `keys` and `values` [n, H, T, D]."""
        super().__init__()
        self.key_rows, self.value_rows = keys[:0], values[:0]
        self.ends = torch.empty(0)
        self.extent = 0

    def admit(self, first: int, keys: Tensor, values: Tensor) -> None:
        """Copies prefilled rows [n, H, T, D] into the slots from `first` on."""
        self.key_rows = put(self.key_rows, first, keys)
        self.value_rows = put(self.value_rows, first, values)

    def aim(self, ends: Tensor, extent: int) -> None:
        self.ends, self.extent = ends, extent
        if extent > self.key_rows.shape[2]:
            self.key_rows = enlarged(self.key_rows, 0, extent)
            self.value_rows = enlarged(self.value_rows, 0, extent)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes one row of K/V [n, H, 1, D] at each slot's end; returns all that the step attends to,
        [n, H, extent, D] each."""
        slots = torch.arange(len(self.ends), device=self.ends.device)
        self.key_rows[slots, :, self.ends] = key_states[:, :, 0]
        self.value_rows[slots, :, self.ends] = value_states[:, :, 0]
        return self.key_rows[: len(slots), :, : self.extent], self.value_rows[: len(slots), :, : self.extent]

    def move(self, source: int, slot: int, length: int) -> None:
        self.key_rows[slot, :, :length] = self.key_rows[source, :, :length]
        self.value_rows[slot, :, :length] = self.value_rows[source, :, :length]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def get_seq_length(self) -> int:
        return self.extent

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.extent, 0

    def get_max_length(self) -> int:
        return -1


def put(buffer: Tensor, first: int, rows: Tensor) -> Tensor:
    """`buffer` with `rows` [n, H, T, D] in its slots from `first` on; enlarged when they do not fit."""
    n, _, length, _ = rows.shape
    if first + n > buffer.shape[0] or length > buffer.shape[2]:
        buffer = enlarged(buffer, first + n, length)
    buffer[first : first + n, :, :length] = rows
    return buffer


def enlarged(buffer: Tensor, slots: int, length: int) -> Tensor:
    """A copy of `buffer` [slots, H, capacity, D] with room for at least `slots` slots and `length` positions.

    New room is zero: what is masked out still enters attention's sums with weight 0, and 0 times NaN would be
    NaN.
    """
    capacity = -(-length // GROWTH) * GROWTH
    n, heads, before, width = buffer.shape
    made = buffer.new_zeros(max(slots, n), heads, max(capacity, before), width)
    made[:n, :, :before] = buffer
    return made


def loops(reply_ids: Sequence[int], least: int = 16, times: int = 4) -> bool:
    """Whether the reply ends in a loop: one n-gram at least `times` times over, `least` tokens or more.

    Greedy decoding of small models falls into loops, which any draft predicts: they flatter acceptance. The
    end may fall inside the n-gram.
    """
    ids = list(reply_ids)
    for period in range(1, len(ids) // times + 1):
        span = max(least, times * period)
        if span <= len(ids) and ids[-span:-period] == ids[-span + period :]:
            return True
    return False
