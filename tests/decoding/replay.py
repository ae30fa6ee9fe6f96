"""Replays the real decoder through every outcome of its randomness, which gives its exact output law.

A key stands for one uniform number. `accept(p)` splits [0, 1) at p, `draw(law)` splits it at the cumulative
law, and a leaf's probability is the product of what is left of each key's interval. So a key used twice is
handled as the real randomness would handle it: the second use sees the interval that the first one left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from decoding.decoder import Decoder, Request
from decoding.randomness import Key
from decoding.sequence import Params

Law = dict[tuple[int, ...], float]
T = TypeVar("T")


class Replay:
    """Takes the choices of `script`, then the first that is possible, and notes how many there were."""

    def __init__(self, script: list[int], key_once: bool) -> None:
        self.script = script
        self.key_once = key_once
        self.taken: list[tuple[int, int]] = []  # (choice, number of choices)
        self.intervals: dict[Key, tuple[float, float]] = {}

    @property
    def probability(self) -> float:
        return prod(high - low for low, high in self.intervals.values())

    def accept(self, probability: float, key: Key) -> bool:
        return self.choose(key, [0.0, min(probability, 1.0), 1.0]) == 0

    def draw(self, law: np.ndarray, key: Key) -> int:
        edges = [0.0, *law.cumsum(dtype=np.float64).tolist()]
        return self.choose(key, [edge / edges[-1] for edge in edges])

    def choose(self, key: Key, edges: list[float]) -> int:
        """The index of the piece between two neighbouring edges in which the key's uniform number lies."""
        assert not (self.key_once and key in self.intervals), f"{key} is used twice"
        low, high = self.intervals.get(key, (0.0, 1.0))
        pieces = [(i, max(low, a), min(high, b)) for i, (a, b) in enumerate(pairwise(edges))]
        pieces = [piece for piece in pieces if piece[1] < piece[2]]
        turn = len(self.taken)
        choice = self.script[turn] if turn < len(self.script) else 0
        self.taken.append((choice, len(pieces)))
        index, *self.intervals[key] = pieces[choice]  # pyright: ignore[reportArgumentType]
        return index


def law_of(play: Callable[[Replay], T], key_once: bool = True) -> dict[T, float]:
    """The law of what `play` returns, by depth-first search over all choices it makes."""
    law: dict[T, float] = defaultdict(float)
    script: list[int] = []
    while True:
        replay = Replay(script, key_once)
        law[play(replay)] += replay.probability
        taken = replay.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return law
        script = [choice for choice, _ in taken]
        script[-1] += 1


def decoded_law(target: Any, drafter: Any, prompt: list[int], params: Params, key_once: bool = True) -> Law:
    """The law of the tokens that the decoder emits."""
    decoder = Decoder(target, drafter)
    return law_of(lambda replay: tuple(decoder.generate(prompt, params, replay).tokens), key_once)


def batched_law(target: Any, drafter: Any, prompts: list[list[int]], params: Params) -> dict[Any, float]:
    """The joint law of what a batch of all `prompts` emits, each sequence with chances of its own."""
    decoder = Decoder(target, drafter, batch_size=len(prompts))

    def play(replay: Replay) -> tuple[tuple[int, ...], ...]:
        requests = [Request(p, params, randomness=Lane(replay, i)) for i, p in enumerate(prompts)]
        return tuple(tuple(done.tokens) for done in decoder.generate_all(requests))

    return law_of(play)


class Lane:
    """One sequence's part of a replay: its keys are its own."""

    def __init__(self, replay: Replay, index: int) -> None:
        self.replay = replay
        self.index = index

    def accept(self, probability: float, key: Key) -> bool:
        return self.replay.accept(probability, self.own(key))

    def draw(self, law: np.ndarray, key: Key) -> int:
        return self.replay.draw(law, self.own(key))

    def own(self, key: Key) -> Key:
        return key._replace(position=1000 * self.index + key.position)


def plain_law(
    logits: Callable[[tuple[int, ...]], Tensor], prompt: list[int], params: Params, eos: frozenset[int]
) -> Law:
    """What the decoder's law must be: p(x1) p(x2 | x1) ..., each from the logits [V] after the whole
    prefix."""
    law: Law = {}

    def extend(tokens: tuple[int, ...], mass: float) -> None:
        if len(tokens) == params.max_new_tokens or (tokens and tokens[-1] in eos):
            law[tokens] = mass
            return
        scores = penalised(logits((*prompt, *tokens)), {*prompt, *tokens}, params.repetition_penalty)
        for token, p in enumerate(params.warp(scores).tolist()):
            if p > 0:
                extend((*tokens, token), mass * p)

    extend((), 1.0)
    return law


def penalised(logits: Tensor, text: set[int], penalty: float) -> Tensor:
    """Written out id by id, independently of the decoder's."""
    made = logits.clone()
    for token in text:
        made[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    return made


def total_variation(a: Law, b: Law) -> float:
    return sum(abs(a.get(tokens, 0.0) - b.get(tokens, 0.0)) for tokens in {*a, *b}) / 2
