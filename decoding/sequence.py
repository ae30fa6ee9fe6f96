"""One sequence being decoded: what it was asked for, what came out, and what its drafter has not seen yet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from configs.errors import ConfigError
from configs.schema import DecodeConfig, Verification
from decoding.drafters import Seen, Turn
from decoding.grammar import GrammarError
from decoding.law import Grammar, Law
from decoding.randomness import Randomness, Seeded
from decoding.stops import StopScan
from decoding.tree import TokenTree
from decoding.warp import Warp
from models.target import Target

Finish = Literal["eos", "length", "stop", "error"]


@dataclass(frozen=True)
class Params:
    """How to decode one sequence. The fields are `DecodeConfig`'s, explained there."""

    draft_tokens: int
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    stop: tuple[str, ...]
    seed: int
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    verification: Verification = Verification.rejection
    logprobs: bool = False  # also the target's log-probability of each emitted token, before the warp

    def __post_init__(self) -> None:
        if self.draft_tokens < 0:
            raise ConfigError(f"draft_tokens={self.draft_tokens}: set how many to draft per round, or 0.")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={self.max_new_tokens}: set at least 1.")
        if "" in self.stop:
            raise ConfigError("stop has an empty string, which every text contains: remove it.")
        self.warp  # noqa: B018  (checks its own)

    @classmethod
    def of(cls, config: DecodeConfig, seed: int) -> Params:
        values = {name: value for name, value in vars(config).items() if name in cls.__dataclass_fields__}
        return cls(**{**values, "stop": tuple(config.stop)}, seed=seed)

    @property
    def warp(self) -> Warp:
        return Warp(self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty)


@dataclass(frozen=True)
class Request:
    """A prompt and how to decode it. `randomness` is by default seeded with `params.seed`."""

    prompt: Sequence[int]
    params: Params
    grammar: Grammar | None = None
    randomness: Randomness | None = None


@dataclass(frozen=True)
class Round:
    """One round's counts and wall seconds.

    Where a round was cut (by EOS, a stop string or the length), what lies past the cut does not count,
    neither as accepted nor as drafted: it was not emitted, and not refused either. In a batch the seconds are
    the whole batch's.
    """

    drafted: int  # proposed tokens; of a tree its nodes without the root
    accepted: int  # proposed tokens that were emitted, one a level of the tree
    emitted: int  # accepted + 1, or accepted where the cut fell on a proposed token
    depth: int  # levels of the tree below its root; of a chain all of `drafted`
    tried: int  # levels that were judged: those accepted, and the next one if what was proposed there failed
    target_seconds: float
    draft_seconds: float
    seconds: float
    nodes: int = 1  # of the tree that was verified, its root included
    stopped: str = "budget"  # why no more was drafted

    @property
    def own_seconds(self) -> float:
        """What the decoder itself costs: everything outside the two models' forwards."""
        return self.seconds - self.target_seconds - self.draft_seconds


@dataclass
class Generation:
    """A decoded sequence; times in seconds since it was begun.

    The prefill emits the first token and is no round. The first round's draft_seconds include the draft's own
    reading of the prompt. One that ended by an error has the tokens of the rounds before.
    """

    tokens: list[int] = field(default_factory=list)  # the new ones, up to and with what ended them
    finish: Finish | None = None
    error: GrammarError | None = None  # why, if `finish` is "error"
    rounds: list[Round] = field(default_factory=list)
    prefill_seconds: float = 0.0  # the target's forward over the prompt
    seconds: float = 0.0  # all of it
    ttft: float = 0.0  # when the first token was there
    emitted_at: list[float] = field(default_factory=list)  # when each round's tokens were there
    logprobs: list[float] = field(default_factory=list)  # of `tokens`, if asked for

    @property
    def decoder_ms_per_round(self) -> float | None:
        """Mean own time per round, in milliseconds; None without rounds."""
        return 1e3 * fmean(round.own_seconds for round in self.rounds) if self.rounds else None


class Decoding:
    """A request in flight. `slot` is its place in the target's cache, `state` its drafter's."""

    def __init__(
        self, index: int, request: Request, target: Target, slot: int, state: Any, began: float
    ) -> None:
        self.index = index  # among the requests
        self.prompt = list(request.prompt)
        self.params = request.params
        self.randomness = request.randomness or Seeded(request.params.seed)
        self.law = Law(request.params.warp, request.prompt, request.grammar)
        self.eos_ids = target.eos_ids
        self.stops = StopScan(target.tokenizer, request.params.stop)
        self.slot = slot
        self.state = state
        self.began = began  # on the clock
        self.generation = Generation()
        self.seen: Seen | None = None

    @property
    def pending(self) -> int:
        assert self.seen is not None
        return self.seen.pending

    @property
    def start(self) -> int:
        """Absolute position of the pending token: how many rows the target's cache holds."""
        assert self.seen is not None
        return self.seen.position

    @property
    def budget(self) -> int:
        """How deep a tree is worth drafting: a round emits one token more than it accepts, so with r tokens
        to go only r - 1 are."""
        left = self.params.max_new_tokens - len(self.generation.tokens) - 1
        return min(self.params.draft_tokens, left)

    def turn(self) -> Turn:
        assert self.seen is not None
        return Turn(self.state, self.seen, self.budget, self.law, self.randomness)

    def emit(self, run: Sequence[int]) -> list[int]:
        """Adds `run` to the output up to where the sequence ends, if it does: the tokens that were added.

        Raises `GrammarError` if the grammar fails at them; then nothing is added.
        """
        tokens = self.generation.tokens
        added: list[int] = []
        for token in run:
            added.append(token)
            if token in self.eos_ids:
                self.generation.finish = "eos"
            elif self.stops.completes(token):
                self.generation.finish = "stop"
            elif len(tokens) + len(added) == self.params.max_new_tokens:
                self.generation.finish = "length"
            if self.generation.finish is not None:
                break
        self.law.commit(added)
        tokens += added
        return added

    def fail(self, error: GrammarError) -> None:
        """Ends the sequence, and this one alone, with what it has."""
        self.generation.finish, self.generation.error = "error", error

    def read(self, tokens: list[int], pending: int, taps: Tensor, choices: list[int] | None = None) -> None:
        """Notes that the target has read `tokens`; added to what the drafter was not told yet."""
        before = self.seen
        now = Seen(before.position if before is not None else 0, tokens, pending, taps, choices)
        self.seen = before.then(now) if before is not None and before.tokens else now

    def told(self) -> None:
        """The drafter has been told everything up to here."""
        assert self.seen is not None
        self.seen = replace(self.seen, start=self.seen.position, tokens=[], taps=self.seen.taps[:0])


def counted(tree: TokenTree, path: Sequence[int], emitted: int) -> tuple[int, int, int]:
    """(drafted, depth, tried), as in `Round`, of a round that emitted so many of `path`'s tokens and the next
    one: of the whole tree, or of what lies before the cut if that fell on a proposed token."""
    if emitted < len(path):
        return sum(depth <= emitted for depth in tree.depth[1:]), emitted, emitted
    refused = bool(tree.children(path[-1]))
    return len(tree) - 1, max(tree.depth), len(path) - 1 + refused


def logprob(logits: Tensor, token: int) -> float:
    """The log-probability of `token` under the logits [V], in float32."""
    wide = logits.float()
    return float(wide[token] - torch.logsumexp(wide, -1)) if math.isfinite(float(wide[token])) else -math.inf
