"""The speculative decoder: rounds of propose, one target forward, verify, commit, until every sequence ends.

Between rounds one invariant holds for each sequence: everything committed but the pending token, which is the
last id, has its K/V rows in the target's cache: `cache.length == committed - 1`. The output follows the
target's law under the same warp, whatever the drafter proposes; plain decoding is the same code with a
drafter that proposes nothing.

Sequences of a batch accept different numbers of tokens, so each has rows, positions and a tree of its own;
the smaller trees are padded with nodes that nobody sees. One that ends leaves its place to the next prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from configs.errors import ConfigError, TrafficError
from decoding.cache import KVCache
from decoding.clock import now
from decoding.compiled import CAPACITY, Compiled
from decoding.drafters import Drafter, Proposal
from decoding.governor import END, OFF, Governor
from decoding.grammar import GrammarError
from decoding.law import Grammar
from decoding.randomness import Randomness
from decoding.sequence import Decoding, Generation, Params, Request, Round, counted, logprob
from decoding.tree import TokenTree
from decoding.verify import ALTERNATIVES, Verdict, follow, verify
from decoding.warp import choices
from models.target import Target, TargetOutput

AHEAD = 1024  # new tokens for which the cache is allocated at once; beyond, it grows as needed
GRAIN = 16  # prompts are padded to multiples of it, so that kernels prepared per shape are met again
PREFILL_TOKENS = 8192  # padded tokens of one prefill, which bounds its memory


@dataclass(frozen=True)
class Emitted:
    """One token of a stream."""

    token: int
    logprob: float  # the target's, before the warp
    from_draft: bool


class Burst(NamedTuple):
    """What one round added to one sequence."""

    index: int  # of the request
    tokens: list[int]  # none if the sequence ended by an error
    accepted: int  # how many of them, the first ones, the draft proposed


class Decoder:
    """Decodes with one target and one drafter, up to `batch_size` sequences at a time."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        batch_size: int = 1,
        governor: Governor | None = None,
        padded: Callable[[int], int] | None = None,
        compiled: Compiled | None = None,
        on_verdict: Callable[[TokenTree, Sequence[int]], None] | None = None,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size}: set at least 1.")
        self.target = target
        self.drafter = drafter
        self.batch_size = batch_size
        self.governor = governor  # turns drafting off while it does not pay; None: never
        self.compiled = compiled  # the target's forward over trees; None: eager
        # The size at which a forward over n nodes is run.
        self.padded = padded or (compiled.padded if compiled is not None else int)
        self.on_verdict = on_verdict  # is shown each tree and its accepted path (nodes, the root first)
        self.cache = KVCache(target.num_layers)

    def generate(
        self,
        prompt: Sequence[int],
        params: Params,
        randomness: Randomness | None = None,
        grammar: Grammar | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
    ) -> Generation:
        """Decodes from `prompt` (token ids, at least one) to the end.

        `on_tokens` gets the tokens as they come, those of a round together. Raises `TrafficError` for an
        empty prompt, `GrammarError` where the grammar cannot be followed any further.
        """
        batch = Batch(self, [Request(prompt, params, grammar, randomness)])
        for _, tokens, _ in batch.run():
            if on_tokens is not None and tokens:
                on_tokens(tokens)
        return whole(batch.generations[0])

    def generate_all(
        self,
        requests: Sequence[Request],
        on_end: Callable[[int, Generation], None] | None = None,
    ) -> list[Generation]:
        """Decodes all requests, a batch at a time, in their order. `on_end(i, generation)` as each ends.

        A grammar that cannot be followed any further ends its own sequence, with `finish` "error" and the
        reason in `error`.
        """
        batch = Batch(self, requests)
        for index, _, _ in batch.run():
            generation = batch.generations[index]
            if generation.finish is not None and on_end is not None:
                on_end(index, generation)
        return batch.generations

    def stream(self, request: Request) -> Generator[Emitted]:
        """Yields tokens as they are decided. May be left at any point, which frees what it held.

        Raises as `generate` does, after the tokens that came before.
        """
        batch = Batch(self, [replace(request, params=replace(request.params, logprobs=True))])
        for _, tokens, accepted in batch.run():
            logprobs = batch.generations[0].logprobs
            for i, token in enumerate(tokens):
                yield Emitted(token, logprobs[i - len(tokens)], i < accepted)
        whole(batch.generations[0])


class Batch:
    """Requests being decoded: those waiting, those in flight, and what came of each."""

    def __init__(self, decoder: Decoder, requests: Sequence[Request]) -> None:
        window = decoder.target.window
        for request in requests:
            check(request, window)
        self.decoder = decoder
        self.target = decoder.target
        self.drafter = decoder.drafter
        self.cache = decoder.cache
        self.waiting = deque(enumerate(requests))
        self.live: list[Decoding] = []
        self.generations: list[Generation] = [Generation() for _ in requests]
        # Without drafting nobody reads the taps.
        drafting = any(request.params.draft_tokens for request in requests)
        self.taps = self.drafter.taps if drafting else ()

    def run(self) -> Iterator[Burst]:
        """Goes on to the end; yields what each round adds to each sequence."""
        try:
            while self.waiting or self.live:
                yield from self.admit() if self.waiting and self.room() else self.step()
        finally:
            for decoding in self.live:
                self.leave(decoding)
            self.live = []

    def room(self) -> int:
        return self.decoder.batch_size - len(self.live)

    @torch.inference_mode()
    def admit(self) -> list[Burst]:
        """Prefills the next prompts, which gives each its first token."""
        began = self.clock()
        entering = [
            Decoding(index, request, self.target, self.cache.allocate(), self.drafter.begin(), began)
            for index, request in self.next_group()
        ]
        self.live += entering
        for decoding in entering:
            self.generations[decoding.index] = decoding.generation
        output, logits = self.prefill(entering)
        seconds = self.clock() - began
        bursts = []
        for row, decoding in enumerate(entering):
            count = len(decoding.prompt)
            self.cache.commit(decoding.slot, count)
            root, own = Proposal(TokenTree.chain(decoding.prompt[-1])), logits[row : row + 1]
            verdict = self.verify(decoding, root, own, count - 1)
            bursts.append(self.emit(decoding, root, verdict, own))
            if verdict is not None:
                decoding.read(decoding.prompt, verdict.next_token, tapped(output, row)[:count])
            generation = decoding.generation
            generation.prefill_seconds, generation.seconds = seconds, self.clock() - began
            if generation.tokens:
                generation.ttft = generation.seconds
        self.retire()
        return bursts

    def prefill(self, entering: Sequence[Decoding]) -> tuple[TargetOutput, Tensor]:
        """The target's forward over the prompts; its logits [B, V] after each."""
        known = max(len(decoding.prompt) for decoding in entering)
        longest = -(-known // GRAIN) * GRAIN
        ids = torch.tensor(
            [[*decoding.prompt, *[0] * (longest - len(decoding.prompt))] for decoding in entering],
            device=self.target.device,
        )
        ahead = max(min(d.params.max_new_tokens, AHEAD) + d.params.draft_tokens for d in entering)
        reserve = longest + ahead
        if self.decoder.compiled is not None:  # capacities that come again, as its shapes must
            reserve = max(CAPACITY, self.decoder.compiled.extent(reserve))
        self.cache.aim([decoding.slot for decoding in entering], longest, reserve=reserve)
        # Padding stands behind the prompt, where causal attention lets no real token see it.
        positions = torch.arange(longest, device=self.target.device).clamp(max=known - 1)
        positions = positions.expand(len(entering), -1)
        output = self.target.forward(ids, positions=positions, cache=self.cache, taps=self.taps, logits=False)
        ends = [len(decoding.prompt) - 1 for decoding in entering]
        return output, self.target.lm_head(output.last_hidden[range(len(ends)), ends])

    def next_group(self) -> Iterator[tuple[int, Request]]:
        """The next requests to enter: as many as there is room for, and few enough that their prefill
        fits."""
        longest = 0
        for count in range(1, self.room() + 1):
            if not self.waiting:
                return
            longest = max(longest, len(self.waiting[0][1].prompt))
            if count > 1 and longest * count > PREFILL_TOKENS:
                return
            yield self.waiting.popleft()

    @torch.inference_mode()
    def step(self) -> list[Burst]:
        """One round of every sequence in flight."""
        began = self.clock()
        proposals = self.propose()
        output, target_seconds = self.forward([proposal.tree for proposal in proposals])
        verdicts = self.verify_all(proposals, output)
        bursts = self.commit(proposals, verdicts, output)
        self.record(proposals, verdicts, bursts, target_seconds, began)
        self.retire()
        return bursts

    def propose(self) -> list[Proposal]:
        """A tree for each sequence; of the pending token alone where nothing is worth drafting."""
        plain = [Proposal(TokenTree.chain(decoding.pending), stopped=END) for decoding in self.live]
        asked = [row for row, decoding in enumerate(self.live) if decoding.budget >= 1]
        governor = self.decoder.governor
        if asked and governor is not None and not governor.speculate(len(self.live)):
            return [replace(root, stopped=OFF) for root in plain]
        if asked:
            made = self.drafter.propose([self.live[row].turn() for row in asked])
            for row, proposal in zip(asked, made, strict=True):
                plain[row] = proposal
                self.live[row].told()
        return plain

    def forward(self, trees: Sequence[TokenTree]) -> tuple[TargetOutput, float]:
        """The target's forward over all trees, and its seconds."""
        rows = self.rows(trees)
        forward = self.decoder.compiled or self.target.forward
        began = self.clock()
        output = forward(cache=self.cache, taps=self.taps, **rows)
        return output, self.clock() - began

    def rows(self, trees: Sequence[TokenTree]) -> dict[str, Any]:
        """The target's input: one row per node, each attending to the cache and to its ancestors."""
        device = self.target.device
        width = self.decoder.padded(max(map(len, trees)))
        starts = [decoding.start for decoding in self.live]
        compiled = self.decoder.compiled
        wanted = compiled.extent(max(starts) + width) if compiled is not None else 0
        extent = self.cache.aim([decoding.slot for decoding in self.live], width, extent=wanted)
        if len(trees) == 1 and width == len(trees[0]) and compiled is None:
            tree = trees[0]
            mask = torch.from_numpy(tree.ancestor_mask(starts[0])[None, None]) if width > 1 else None
            tokens, positions = [tree.tokens], [[starts[0] + depth for depth in tree.depth]]
        else:
            tokens = np.zeros((len(trees), width), dtype=np.int64)
            positions = np.zeros((len(trees), width), dtype=np.int64)
            columns = np.zeros((len(trees), 1, width, extent), dtype=bool)
            for row, (tree, start) in enumerate(zip(trees, starts, strict=True)):
                count = len(tree)
                tokens[row, :count] = tree.tokens
                positions[row, :count] = np.add(tree.depth, start)
                columns[row, 0, :count, : start + count] = tree.ancestor_mask(start)
                for padding in range(count, width):  # sees itself, and is seen by none
                    columns[row, 0, padding, start + padding] = True
            mask = torch.from_numpy(columns)
        return {
            "input_ids": torch.as_tensor(tokens, device=device),
            "positions": torch.as_tensor(positions, device=device),
            "mask": mask if mask is None else mask.to(device),
        }

    def verify_all(self, proposals: Sequence[Proposal], output: TargetOutput) -> list[Verdict | None]:
        assert output.logits is not None
        return [
            self.verify(decoding, proposal, logits, decoding.start)
            for decoding, proposal, logits in zip(self.live, proposals, output.logits, strict=True)
        ]

    def verify(self, decoding: Decoding, proposal: Proposal, logits: Tensor, start: int) -> Verdict | None:
        """The verdict on a tree, by the target's logits [N, V] after its nodes; None if the sequence fails.

        Logits become laws at the walked nodes only: most nodes may never be asked for.
        """
        law, tree = decoding.law, proposal.tree
        try:
            if law.greedy:
                return follow(tree, law.choices(logits, tree.path))
            rule = ALTERNATIVES.get(decoding.params.verification, verify)
            return rule(proposal, lambda node: law(logits[node], tree.path(node)), decoding.randomness, start)
        except GrammarError as error:
            decoding.fail(error)
            return None

    def commit(
        self, proposals: Sequence[Proposal], verdicts: Sequence[Verdict | None], output: TargetOutput
    ) -> list[Burst]:
        """Accepted paths become part of the cache, of the outputs, and of what drafters will hear."""
        assert output.logits is not None
        self.cache.commit_all(
            [
                (decoding.slot, decoding.start, verdict.path if verdict is not None else ())
                for decoding, verdict in zip(self.live, verdicts, strict=True)
            ]
        )
        bursts = []
        for row, (decoding, proposal, verdict) in enumerate(zip(self.live, proposals, verdicts, strict=True)):
            bursts.append(self.emit(decoding, proposal, verdict, output.logits[row]))
            if verdict is not None:
                self.note(decoding, proposal, verdict, output, row)
        return bursts

    def emit(self, decoding: Decoding, proposal: Proposal, verdict: Verdict | None, logits: Tensor) -> Burst:
        """Emits the verdict's tokens, if there are any and the grammar takes them."""
        if verdict is None:
            return Burst(decoding.index, [], 0)
        path = verdict.path
        try:
            run = decoding.emit([proposal.tree.tokens[node] for node in path[1:]] + [verdict.next_token])
        except GrammarError as error:
            decoding.fail(error)
            return Burst(decoding.index, [], 0)
        if decoding.params.logprobs:
            pairs = zip(path, run, strict=False)
            decoding.generation.logprobs += [logprob(logits[node], token) for node, token in pairs]
        return Burst(decoding.index, run, min(len(path) - 1, len(run)))

    def note(
        self, decoding: Decoding, proposal: Proposal, verdict: Verdict, output: TargetOutput, row: int
    ) -> None:
        """Tells the sequence what the target has read, for its drafter to hear."""
        path, tree = verdict.path, proposal.tree
        taps = tapped(output, row)
        taps = taps[: len(path)] if tree.is_chain else taps[list(path)]
        chosen = None
        if self.drafter.wants_choices:
            assert output.logits is not None
            chosen = [*map(choices(output.logits[row]), range(len(tree)))]
        decoding.read([tree.tokens[node] for node in path], verdict.next_token, taps, chosen)

    def record(
        self,
        proposals: Sequence[Proposal],
        verdicts: Sequence[Verdict | None],
        bursts: Sequence[Burst],
        target_seconds: float,
        began: float,
    ) -> None:
        """Notes what the round did and took, for whoever measures. One that failed emitted nothing and counts
        for nothing."""
        ended = self.clock()
        if self.decoder.governor is not None:
            tokens = sum(len(burst.tokens) for burst in bursts)
            self.decoder.governor.saw([proposal.stopped for proposal in proposals], tokens, ended - began)
        draft_seconds = max(proposal.seconds for proposal in proposals)
        for decoding, proposal, verdict, burst in zip(self.live, proposals, verdicts, bursts, strict=True):
            decoding.generation.seconds = ended - decoding.began
            if verdict is None or not burst.tokens:
                continue
            emitted = len(burst.tokens)
            drafted, depth, tried = counted(proposal.tree, verdict.path, emitted)
            decoding.generation.rounds.append(
                Round(
                    drafted=drafted,
                    accepted=burst.accepted,
                    emitted=emitted,
                    depth=depth,
                    tried=tried,
                    target_seconds=target_seconds,
                    draft_seconds=draft_seconds,
                    seconds=ended - began,
                    nodes=len(proposal.tree),
                    stopped=proposal.stopped,
                )
            )
            decoding.generation.emitted_at.append(ended - decoding.began)
            if self.decoder.on_verdict is not None:
                self.decoder.on_verdict(proposal.tree, verdict.path)

    def retire(self) -> None:
        """Sequences that ended leave; the last slots move into the holes, so that those in flight lie
        together."""
        for decoding in self.live:
            if decoding.generation.finish is not None:
                self.leave(decoding)
        self.live = [decoding for decoding in self.live if decoding.generation.finish is None]
        for decoding in sorted(self.live, key=lambda decoding: -decoding.slot):
            hole = min(self.cache.free, default=decoding.slot)
            if hole >= decoding.slot:
                break
            self.cache.relocate(decoding.slot, hole)
            decoding.slot = hole
        self.live.sort(key=lambda decoding: decoding.slot)

    def leave(self, decoding: Decoding) -> None:
        self.cache.release(decoding.slot)
        self.drafter.end(decoding.state)

    def clock(self) -> float:
        """Seconds, with the device's queue drained."""
        return now(self.target.device)


def whole(generation: Generation) -> Generation:
    """Raises what ended it before its time."""
    if generation.error is not None:
        raise generation.error
    return generation


def check(request: Request, window: int | None) -> None:
    """Raises for a request that cannot be decoded, before any is begun."""
    if not request.prompt:
        raise TrafficError(
            "A prompt has no tokens, and the target needs one. Drop it, or prepend a bos token."
        )
    longest = len(request.prompt) + request.params.max_new_tokens
    if window is not None and longest > window:
        raise TrafficError(
            f"A prompt of {len(request.prompt)} tokens and {request.params.max_new_tokens} new ones pass the "
            f"{window} tokens up to which the target reads a text alike, whatever is drafted behind it: its "
            "sliding window, its table of positions, or the length from which its rotary embeddings change. "
            "Shorten the prompt, or set decode.max_new_tokens lower."
        )


def tapped(output: TargetOutput, row: int) -> Tensor:
    """The tapped states [T, n_taps * d] of one row of the batch; [T, 0] if none were asked for."""
    return output.taps[row] if output.taps is not None else output.last_hidden[row, :, :0]
