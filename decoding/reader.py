"""A draft network that reads tokens over its own cache, and the drafter made of it and a growth.

A round first reads everything the target has committed since the last one, the pending token included; the
logits after it are the root's. Then it reads drafted nodes, level by level, each attending to the committed
rows and its own ancestors. Their rows lie behind the committed ones in the order of reading. All sequences of
a batch are read together, at lengths of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from decoding.cache import KVCache
from decoding.clock import now
from decoding.drafters import Proposal, Turn
from decoding.growth import Growth, Vocabulary
from decoding.stopping import AcceptanceHead


@dataclass
class Reading:
    """What a reader knows of one sequence: rows 0..committed of its slot are committed text, then the nodes
    read in this round follow."""

    slot: int
    committed: int = 0
    tokens: list[int] = field(default_factory=list)  # of the nodes read
    parents: list[int] = field(default_factory=list)  # index of each one's parent among the nodes read; -1
    lines: list[list[int]] = field(default_factory=list)  # each one's ancestors among them, itself included
    states: list[Tensor] = field(default_factory=list)  # [d] after the root, then after each node read

    def restart(self, states: list[Tensor]) -> None:
        """A new round: the nodes of the last one are forgotten."""
        self.tokens, self.parents, self.lines, self.states = [], [], [], states

    def note(self, token: int, parent: int) -> list[int]:
        """A node is read: its ancestors among the nodes read, itself included."""
        line = [*(self.lines[parent] if parent >= 0 else []), len(self.lines)]
        self.tokens.append(token)
        self.parents.append(parent)
        self.lines.append(line)
        return line


class Network(Protocol):
    """What every draft network of models/ says of itself."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The target layers whose states it takes, as HF hidden_states indices."""
        ...

    @property
    def full_vocabulary(self) -> bool:
        """Whether logits are over the target's own ids."""
        ...

    @property
    def draft_ids(self) -> Tensor:
        """long [Vd]: the target id of each logit."""
        ...


def vocabulary_of(draft: Network, eos_ids: frozenset[int]) -> Vocabulary:
    return Vocabulary.of(None if draft.full_vocabulary else draft.draft_ids, eos_ids)


@dataclass(frozen=True)
class Level:
    """Nodes of one sequence to be read together."""

    reading: Reading
    tokens: list[int]
    parents: list[int]  # -1 is the root


@dataclass(frozen=True)
class News:
    """What is to be read of one sequence at the beginning of a round."""

    start: int  # rows before it stay
    tokens: list[int]
    features: Tensor | None = None  # [n, d], where the network takes features beside tokens


class Reader:
    """Subclasses say what a round begins with (`news`) and run the network (`run`, `logits`).

    A row's index in its slot is its position.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, cache: KVCache, vocabulary: Vocabulary, device: torch.device) -> None:
        self.cache = cache
        self.vocabulary = vocabulary
        self.device = device

    def begin(self) -> Reading:
        return Reading(self.cache.allocate())

    def end(self, reading: Reading) -> None:
        self.cache.release(reading.slot)

    def news(self, turn: Turn) -> News:
        raise NotImplementedError

    def run(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
        """States [n, T, d] of tokens and positions, long [n, T]; the cache is aimed.

        mask: bool [n, 1, T, extent], or None for causal. features: [n, T, d] where the network takes them:
        the fused taps of committed tokens, the parent's state of a drafted one.
        """
        raise NotImplementedError

    def logits(self, states: Tensor) -> Tensor:
        """[..., Vd] of states [..., d]."""
        raise NotImplementedError

    def read(self, turns: Sequence[Turn]) -> Tensor:
        """Reads what is new to each sequence: logits [n, Vd] after its pending token."""
        news = [self.news(turn) for turn in turns]
        states = self.feed(turns, news)
        last = (
            states[0, -1:] if len(turns) == 1 else states[range(len(news)), [len(n.tokens) - 1 for n in news]]
        )
        for turn, state in zip(turns, last, strict=True):
            turn.state.restart([state])
        return self.logits(last)

    def feed(self, turns: Sequence[Turn], news: Sequence[News]) -> Tensor:
        """Reads `news` behind the rows that stay: states [n, T, d], with padding behind the shorter ones."""
        readings: list[Reading] = [turn.state for turn in turns]
        for reading, new in zip(readings, news, strict=True):
            self.cache.commit(reading.slot, new.start)
        length = max(len(new.tokens) for new in news)
        extent = self.cache.aim([reading.slot for reading in readings], length)
        starts = np.array([[new.start] for new in news])
        rows = starts + np.arange(length)
        # Padding has its own sequence's last position: a further one may be past what the network knows.
        last = starts + np.array([[len(new.tokens) - 1] for new in news])
        states = self.run(
            self.tensor([[*new.tokens, *[0] * (length - len(new.tokens))] for new in news]),
            self.tensor(np.minimum(rows, last)),
            self.causal(rows, extent),
            padded([new.features for new in news], length),
        )
        for reading, new in zip(readings, news, strict=True):
            reading.committed = new.start + len(new.tokens)
            self.cache.commit(reading.slot, reading.committed)
        return states

    def extend(self, levels: Sequence[Level]) -> list[Tensor]:
        """Reads drafted nodes: logits [n, Vd] after each sequence's."""
        length = max(len(level.tokens) for level in levels)
        extent = self.cache.aim([level.reading.slot for level in levels], length)
        positions = np.zeros((len(levels), length), dtype=np.int64)
        mask = np.zeros((len(levels), 1, length, extent), dtype=bool)
        tokens = np.zeros((len(levels), length), dtype=np.int64)
        features: list[Tensor | None] = []
        for row, level in enumerate(levels):
            reading = level.reading
            first = len(reading.tokens)
            features.append(torch.stack([reading.states[parent + 1] for parent in level.parents]))
            for i, (token, parent) in enumerate(zip(level.tokens, level.parents, strict=True)):
                line = reading.note(token, parent)
                tokens[row, i] = token
                positions[row, i] = reading.committed + len(line) - 1
                mask[row, 0, i, [reading.committed + node for node in line]] = True
            mask[row, 0, :, : reading.committed] = True
            for i in range(len(level.tokens), length):  # padding sees itself, and is seen by none
                mask[row, 0, i, reading.committed + first + i] = True
        everything = len(levels) == length == 1 and len(levels[0].reading.lines[-1]) == len(
            levels[0].reading.tokens
        )
        states = self.run(
            self.tensor(tokens),
            self.tensor(positions),
            None if everything else torch.from_numpy(mask).to(self.device),
            padded(features, length),
        )
        for row, level in enumerate(levels):
            reading = level.reading
            self.cache.commit(reading.slot, reading.committed + len(reading.tokens))
            reading.states += list(states[row, : len(level.tokens)])
        logits = self.logits(states)
        return [logits[row, : len(level.tokens)] for row, level in enumerate(levels)]

    def causal(self, rows: np.ndarray, extent: int) -> Tensor | None:
        """bool [n, 1, T, extent] for rows at positions [n, T]: each sees all up to itself. None where
        attention does that by itself: for a single row, and from a beginning on."""
        if len(rows) == 1 and (rows.shape[1] == 1 or rows[0, 0] == 0):
            return None
        return torch.from_numpy(np.arange(extent) <= rows[:, None, :, None]).to(self.device)

    def tensor(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.long, device=self.device)


class NetworkDrafter:
    """A reader and a growth: the drafter of every network that drafts token by token."""

    wants_choices = False

    def __init__(self, reader: Reader, growth: Growth) -> None:
        self.reader = reader
        self.growth = growth
        self.taps = reader.taps

    def begin(self) -> Any:
        return self.reader.begin()

    def end(self, state: Any) -> None:
        self.reader.end(state)

    def propose(self, turns: Sequence[Turn]) -> list[Proposal]:
        growing = [self.growth.start(turn, self.reader.vocabulary) for turn in turns]
        head = self.reader.acceptance if isinstance(self.reader, AcceptanceHead) else None
        for tree in growing:
            tree.estimates = None if head is None else []
        reads: list[dict[int, int]] = [{0: -1} for _ in turns]  # node -> its index among the nodes read
        forwards = [1] * len(turns)
        device = self.reader.device
        began = now(device)
        root = self.reader.read(turns)
        seconds = now(device) - began
        level = [(row, [0], root[row : row + 1]) for row in range(len(turns))]
        while True:
            wanted = [(row, growing[row].grow(nodes, logits)) for row, nodes, logits in level]
            wanted = [(row, nodes) for row, nodes in wanted if nodes]
            if not wanted:
                return [tree.proposal(seconds, count) for tree, count in zip(growing, forwards, strict=True)]
            levels = []
            for row, nodes in wanted:
                tree, read = growing[row], reads[row]
                parents = [read[tree.parent[node]] for node in nodes]
                levels.append(Level(turns[row].state, [tree.tokens[node] for node in nodes], parents))
                for node in nodes:
                    read[node] = len(read) - 1
                forwards[row] += 1
            began = now(device)
            read_logits = self.reader.extend(levels)
            seconds += now(device) - began
            level = [(row, nodes, logits) for (row, nodes), logits in zip(wanted, read_logits, strict=True)]
            if head is not None:
                for row, nodes in wanted:
                    states = turns[row].state.states[-len(nodes) :]
                    growing[row].estimates += [head(state) for state in states]  # pyright: ignore[reportOperatorIssue]


def padded(parts: Sequence[Tensor | None], length: int) -> Tensor | None:
    """[n, length, d] of n parts [at most length, d], zeros behind; None if there are none."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    if len(given) == 1:
        return given[0][None]
    whole = given[0].new_zeros(len(given), length, given[0].shape[-1])
    for row, part in zip(whole, given, strict=True):
        row[: len(part)] = part
    return whole
