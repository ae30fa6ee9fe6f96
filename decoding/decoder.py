"""The speculative decoder: rounds of propose, one target forward, verify, commit, until a sequence ends.

Between rounds one invariant holds: everything committed but the pending token, which is the last id, has its
K/V rows in the target's cache: `cache.length == committed - 1`. The output follows the target's law under the
same warp, whatever the drafter proposes; plain decoding is the same code with a drafter that proposes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from configs.errors import ConfigError, TrafficError
from configs.schema import DecodeConfig
from configs.schema import Proposal as Mode
from decoding.cache import KVCache
from decoding.clock import now
from decoding.drafters import Drafter, Proposal, Seen
from decoding.randomness import Randomness, Seeded
from decoding.stops import StopScan
from decoding.tree import TokenTree
from decoding.verify import Verdict, follow, verify
from decoding.warp import Warp, largest
from models.target import Target, TargetOutput

Finish = Literal["eos", "length", "stop"]
AHEAD = 1024  # new tokens for which the cache is allocated at once; beyond, it grows as needed


@dataclass(frozen=True)
class Params:
    """How to decode one sequence. The fields are `DecodeConfig`'s, explained there."""

    draft_tokens: int
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    proposal: Mode  # the drafter's; recorded here because it belongs to a result's conditions
    stop: tuple[str, ...]
    seed: int

    def __post_init__(self) -> None:
        if self.draft_tokens < 0:
            raise ConfigError(f"draft_tokens={self.draft_tokens}: set how many to draft per round, or 0.")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={self.max_new_tokens}: set at least 1.")
        if "" in self.stop:
            raise ConfigError("stop has an empty string, which every text contains: remove it.")
        Warp(self.temperature, self.top_k, self.top_p)  # checks its own

    @classmethod
    def of(cls, config: DecodeConfig, seed: int) -> Params:
        return cls(**{**vars(config), "stop": tuple(config.stop)}, seed=seed)

    @property
    def warp(self) -> Warp:
        return Warp(self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True)
class Round:
    """One round's counts and wall seconds.

    Where a round was cut (by EOS, a stop string or the length), what lies past the cut does not count,
    neither as accepted nor as drafted: it was not emitted, and not refused either.
    """

    drafted: int  # proposed tokens; of a tree its nodes without the root
    accepted: int  # proposed tokens that were emitted
    emitted: int  # accepted + 1, or accepted where the cut fell on a proposed token
    target_seconds: float
    draft_seconds: float
    seconds: float

    @property
    def own_seconds(self) -> float:
        """What the decoder itself costs: everything outside the two models' forwards."""
        return self.seconds - self.target_seconds - self.draft_seconds


@dataclass
class Generation:
    """A decoded sequence; times in seconds since the call.

    The prefill emits the first token and is no round. The first round's draft_seconds include the draft's own
    reading of the prompt.
    """

    tokens: list[int] = field(default_factory=list)  # the new ones, up to and with what ended them
    finish: Finish | None = None
    rounds: list[Round] = field(default_factory=list)
    prefill_seconds: float = 0.0  # the target's forward over the prompt
    seconds: float = 0.0  # all of it
    ttft: float = 0.0  # when the first token was there
    emitted_at: list[float] = field(default_factory=list)  # when each round's tokens were there

    @property
    def decoder_ms_per_round(self) -> float | None:
        """Mean own time per round, in milliseconds; None without rounds."""
        return 1e3 * fmean(round.own_seconds for round in self.rounds) if self.rounds else None


class Decoder:
    """Decodes one sequence at a time with one target and one drafter."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self.target = target
        self.drafter = drafter
        self.latest: Session | None = None  # owns the drafter's state

    def generate(
        self,
        prompt: Sequence[int],
        params: Params,
        randomness: Randomness | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
    ) -> Generation:
        """Decodes from `prompt` (token ids, at least one) to the end.

        `on_tokens` gets the tokens as they come, those of a round together. `randomness` is by default seeded
        with `params.seed`. Raises `TrafficError` for an empty prompt.
        """
        session = self.begin(prompt, params, randomness)
        for tokens, _ in session.run():
            if on_tokens is not None:
                on_tokens(tokens)
        return session.generation

    def stream(self, prompt: Sequence[int], params: Params) -> Iterator[tuple[int, bool]]:
        """Yields (token, whether the draft proposed it). May be left at any point: the next starts afresh."""
        runs = self.begin(prompt, params, None).run()
        return ((token, index < accepted) for tokens, accepted in runs for index, token in enumerate(tokens))

    def begin(self, prompt: Sequence[int], params: Params, randomness: Randomness | None) -> Session:
        mode = getattr(self.drafter, "mode", params.proposal)  # a drafter that knows one way only has none
        if mode is not params.proposal:
            raise ConfigError(
                f"decode.proposal={params.proposal.value}, and the drafter was built for {mode.value}. "
                "Build it with the same value."
            )
        if not prompt:
            raise TrafficError(
                "A prompt has no tokens, and the target needs one. Drop it, or prepend a bos token."
            )
        self.latest = Session(self, list(prompt), params, randomness or Seeded(params.seed))
        return self.latest


class Session:
    """One sequence being decoded: the target's cache, what the drafter has not seen yet, what came out."""

    def __init__(self, decoder: Decoder, prompt: list[int], params: Params, randomness: Randomness) -> None:
        self.decoder = decoder
        self.target = decoder.target
        self.prompt = prompt
        self.params = params
        self.warp = params.warp
        self.randomness = randomness
        # Without drafting nobody reads the taps.
        self.taps = decoder.drafter.taps if params.draft_tokens else ()
        self.stops = StopScan(self.target.tokenizer, params.stop)
        self.cache = KVCache(len(prompt) + min(params.max_new_tokens, AHEAD) + params.draft_tokens)
        self.generation = Generation()
        self.started = now(self.target.device)

    def run(self) -> Iterator[tuple[list[int], int]]:
        """Goes on to the end; yields each run of tokens and how many of them the draft proposed."""
        self.check_turn()
        yield self.prefill(), 0
        while self.generation.finish is None:
            self.check_turn()
            done = self.step()
            yield self.generation.tokens[-done.emitted :], done.accepted

    def check_turn(self) -> None:
        """The drafter keeps the state of one sequence: the latest."""
        if self.decoder.latest is not self:
            raise RuntimeError(
                "The decoder began another sequence since: decode two at once with two decoders."
            )

    @torch.inference_mode()
    def prefill(self) -> list[int]:
        """Reads the prompt and draws the first token, which is pending then."""
        self.decoder.drafter.begin()
        ids = torch.tensor([self.prompt], device=self.target.device)
        output = self.target.forward(ids, cache=self.cache, taps=self.taps, last_logits_only=True)
        self.generation.prefill_seconds = self.elapsed()
        root = Proposal(TokenTree.chain(self.prompt[-1]))
        verdict = self.verify(root, output, start=len(self.prompt) - 1)
        self.seen = Seen(0, ids[0], verdict.next_token, tapped(output))
        run = self.emit([verdict.next_token])
        self.generation.ttft = self.generation.seconds = self.elapsed()
        return run

    @torch.inference_mode()
    def step(self) -> Round:
        """One round."""
        began = self.elapsed()
        proposal = self.propose()
        tree, start = proposal.tree, self.seen.position
        rows = self.rows(tree, start)
        forward_began = self.elapsed()
        output = self.target.forward(cache=self.cache, taps=self.taps, **rows)
        target_seconds = self.elapsed() - forward_began
        verdict = self.verify(proposal, output, start)
        path = verdict.path
        run = self.emit([tree.tokens[node] for node in path[1:]] + [verdict.next_token])
        self.commit(tree, path, verdict.next_token, output)

        ended = self.elapsed()
        done = Round(
            drafted=counted(tree, path, len(run)),
            accepted=min(len(path) - 1, len(run)),
            emitted=len(run),
            target_seconds=target_seconds,
            draft_seconds=proposal.seconds,
            seconds=ended - began,
        )
        self.generation.rounds.append(done)
        self.generation.emitted_at.append(ended)
        self.generation.seconds = ended
        return done

    def propose(self) -> Proposal:
        """A round emits one token more than it accepts: with r tokens to go only r - 1 are worth drafting."""
        budget = min(self.params.draft_tokens, self.params.max_new_tokens - len(self.generation.tokens) - 1)
        if budget < 1:  # no drafting at all, or the last round: the drafter need not hear of it
            return Proposal(TokenTree.chain(self.seen.pending))
        return self.decoder.drafter.propose(self.seen, budget, self.warp, self.randomness)

    def rows(self, tree: TokenTree, start: int) -> dict[str, Any]:
        """The target's input: one row per node, each attending to the cache and to its ancestors."""
        device = self.target.device
        mask = None  # a single row attends to everything
        if len(tree) > 1:
            mask = tree.ancestor_mask(start)[None, None].to(device)
        return {
            "input_ids": torch.tensor([tree.tokens], device=device),
            "positions": torch.tensor([[start + depth for depth in tree.depth]], device=device),
            "mask": mask,
        }

    def verify(self, proposal: Proposal, output: TargetOutput, start: int) -> Verdict:
        """Logits become laws at the walked nodes only: most nodes of a round may never be asked for."""
        assert output.logits is not None
        logits = output.logits[0]
        if self.warp.temperature == 0:
            return follow(proposal.tree, lambda node: int(largest(logits[node])))
        return verify(proposal, lambda node: self.warp(logits[node]), self.randomness, position=start)

    def emit(self, run: list[int]) -> list[int]:
        """Adds `run` to the output up to where the sequence ends, if it does: the tokens that were added."""
        tokens = self.generation.tokens
        for count, token in enumerate(run, 1):
            tokens.append(token)
            if token in self.target.eos_ids:
                self.generation.finish = "eos"
            elif self.stops.completes(token):
                self.generation.finish = "stop"
            elif len(tokens) == self.params.max_new_tokens:
                self.generation.finish = "length"
            if self.generation.finish is not None:
                return run[:count]
        return run

    def commit(self, tree: TokenTree, path: tuple[int, ...], pending: int, output: TargetOutput) -> None:
        """Keeps the path's rows in the cache and sets what the drafter sees next."""
        start = self.seen.position
        self.cache.commit(start, path)
        tokens = torch.tensor([tree.tokens[node] for node in path], device=self.target.device)
        taps = tapped(output)
        taps = taps[: len(path)] if tree.is_chain else taps[list(path)]
        self.seen = Seen(start, tokens, pending, taps)

    def elapsed(self) -> float:
        """Seconds since the sequence began, with the device's queue drained."""
        return now(self.target.device) - self.started


def tapped(output: TargetOutput) -> Tensor:
    """The tapped states [T, n_taps * d] of the only row of the batch; [T, 0] if none were asked for."""
    return output.taps[0] if output.taps is not None else output.last_hidden[0, :, :0]


def counted(tree: TokenTree, path: tuple[int, ...], emitted: int) -> int:
    """Proposed tokens that count as drafted: all, or those up to the cut if it fell on one of them."""
    if emitted == len(path):
        return len(tree) - 1
    return sum(depth <= emitted for depth in tree.depth[1:])
