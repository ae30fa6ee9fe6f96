"""Decoding the same prompts plainly and speculatively, in turn, with every pair on the disk before the next
begins.

One step decodes one batch both ways: `batch_size` prompts together, a single one where that is 1. A last
batch that is short is filled up with prompts it has already, whose second runs keep the batch full and do not
count. Conversations go turn by turn within their step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from configs.compose import as_plain
from configs.errors import ConfigError
from configs.schema import Config, DecodeConfig, Tree
from data.generate import loops
from data.template import Template
from data.tokens import Prompt
from decoding.build import build_decoder, compiled_forward, largest_tree, shape_of
from decoding.clock import now
from decoding.compiled import Compiled
from decoding.decoder import Decoder
from decoding.drafters.plain import PlainDrafter
from decoding.law import Law
from decoding.sequence import Generation, Params, Request, Round
from decoding.verify import lossless
from decoding.warp import Warp
from eval.dialogue import Dialogue
from eval.generate import generate
from eval.machine import Contention, PeakMemory
from eval.memory import cache_bytes
from eval.rows import Conditions, Divergence, Pair, Run, shares
from eval.terminal import bar
from models.checkpoint import draft_hash
from models.files import append_line, open_append, read_lines, sha256_file
from models.target import Target

Place = tuple[int, float, int, int]  # repeat, temperature, batch size, which batch
SIDES = ("plain", "draft")


@dataclass(frozen=True)
class Step:
    """A batch to be decoded both ways."""

    repeat: int
    temperature: float
    batch_size: int
    batch: int  # which one of this size
    members: tuple[Dialogue, ...]

    @property
    def place(self) -> Place:
        return self.repeat, self.temperature, self.batch_size, self.batch


@dataclass(frozen=True)
class Measured:
    """What came of a step: a pair for each prompt, and the state of the machine around them."""

    pairs: list[Pair]
    others: float  # share of the processors that others used
    caches: dict[str, list[int]] = field(default_factory=dict)  # by side: bytes (the target's, the drafter's)

    @property
    def place(self) -> Place:
        first = self.pairs[0]
        return first.repeat, first.temperature, first.batch_size, first.batch

    @classmethod
    def from_dict(cls, line: dict[str, Any]) -> Measured:
        return cls([Pair.from_dict(pair) for pair in line["pairs"]], line["others"], line["caches"])


class Bench:
    """The decoders, and how a pair of runs is made."""

    def __init__(self, config: Config, target: Target, draft: nn.Module, name: str = "draft") -> None:
        """name: tells the draft from others where its costs are kept."""
        self.config = config
        self.target = target
        self.draft = draft
        self.name = name
        self.method = str(draft.method)
        self.compiled = compiled_forward(target, config.decode)
        self.decoders = self.build(config.decode.batch_size)
        self.by_size = {config.decode.batch_size: self.decoders}

    def build(self, batch_size: int) -> dict[str, Decoder]:
        decode = dataclasses.replace(self.config.decode, batch_size=batch_size)
        return {
            "plain": Decoder(self.target, PlainDrafter(), batch_size, compiled=self.compiled),
            "draft": build_decoder(self.target, self.draft, decode, self.name, self.compiled),
        }

    def at(self, batch_size: int) -> dict[str, Decoder]:
        """The two decoders of a batch size."""
        if batch_size not in self.by_size:
            self.by_size[batch_size] = self.build(batch_size)
        return self.by_size[batch_size]

    def conditions(self) -> Conditions:
        decode, measured = self.config.decode, self.config.eval
        return Conditions(
            method=self.method,
            dtype=dtype_name(self.target),
            draft_tokens=decode.draft_tokens,
            proposal=decode.proposal.value,
            drafters=tuple(kind.value for kind in decode.drafters),
            tree=decode.tree.value,
            tree_nodes=nodes_of(decode),
            tree_width=decode.tree_width if decode.tree is Tree.dynamic else None,
            tree_file=decode.tree_file if decode.tree is Tree.static else None,
            stop_drafting=decode.stop_drafting.value if decode.tree is Tree.chain else None,
            verification=decode.verification.value,
            lossless=lossless(decode.verification),
            compiled=decode.compile,
            top_k=decode.top_k,
            top_p=decode.top_p,
            confidence=measured.confidence,
            resamples=measured.bootstrap,
            seed=self.config.seed,
        )

    def run(self, chosen: Sequence[Dialogue], partial: Partial, console: Console) -> list[Measured]:
        """Every step, an interrupted run's included."""
        plan = steps(self.config, chosen)
        todo = [
            (first, step)
            for first, step in zip(turns(plan), plan, strict=True)
            if step.place not in partial.done
        ]
        if todo:
            self.warm_up(chosen)
        if not console.is_terminal:  # where no bar shows how much there is to wait for
            console.print(f"{sum(len(step.members) for _, step in todo)} pairs of runs to measure.")
        with partial, bar(console) as progress:
            done = sum(len(step.members) for step in plan if step.place in partial.done)
            task = progress.add_task("measuring", total=sum(len(s.members) for s in plan), completed=done)
            for first, step in todo:
                watch = Contention()
                pairs = self.pairs(step, first)
                caches = {side: list(cache_bytes(self.at(step.batch_size)[side])) for side in SIDES}
                partial.add(Measured(pairs, watch.share(), caches))
                progress.advance(task, len(step.members))
        return [partial.done[step.place] for step in plan]

    def warm_up(self, chosen: Sequence[Dialogue]) -> None:
        """Runs whose times are thrown away: first calls allocate, compile and fill caches."""
        warm = chosen[: self.config.eval.warmup_prompts]
        for size in batch_sizes(self.config) if warm else ():
            asked = [dialogue.prompt for dialogue in islice(cycle(warm), max(size, len(warm)))]
            params = [self.params(prompt, temperatures(self.config)[0], 0) for prompt in asked]
            for side in SIDES:
                self.decode(side, size, asked, params)
            if self.compiled is not None:
                self.meet_shapes(size, chosen, self.compiled)

    def meet_shapes(self, size: int, chosen: Sequence[Dialogue], compiled: Compiled) -> None:
        """Decodes both ways with every number of sequences in flight, behind a prompt of each length that
        compiled forwards tell apart."""
        most = self.config.decode.max_new_tokens + compiled.sizes[-1]
        lengths: dict[tuple[int, int], Dialogue] = {}
        for one in chosen:
            start = len(one.prompt.ids)
            lengths.setdefault((compiled.extent(start + 1), compiled.extent(start + most)), one)
        for dialogue, count in product(lengths.values(), range(1, size + 1)):
            own = self.params(dialogue.prompt, temperatures(self.config)[0], 0)
            for side in SIDES:
                self.decode(side, size, [dialogue.prompt] * count, [own] * count)

    def params(self, prompt: Prompt, temperature: float, repeat: int, turn: int = 0) -> Params:
        """The run's parameters; prompts, their turns and repeats draw different random numbers, both ways of
        decoding the same."""
        named = dataclasses.replace(prompt, id=f"{prompt.id} {turn}") if turn else prompt
        seed = seed_of(self.config.seed, repeat, named)
        return dataclasses.replace(Params.of(self.config.decode, seed), temperature=temperature)

    def pairs(self, step: Step, first: str) -> list[Pair]:
        """A pair for each prompt of the batch, and for each later turn that its conversation has."""
        made: list[Pair] = []
        asked = list(step.members)
        while asked:
            found = self.turn(step, asked, first)
            made += found
            asked = self.next_turns(asked, found)
        return made

    def next_turns(self, asked: Sequence[Dialogue], answered: Sequence[Pair]) -> list[Dialogue]:
        """The conversations that go on, without those that the target's context would cut off."""
        going = [(one, pair) for one, pair in zip(asked, answered, strict=True) if one.turns]
        if not going:
            return []
        template = Template.of(self.target)
        onward = [one.then(template, pair.plain.tokens) for one, pair in going]
        context = getattr(self.target.config, "max_position_embeddings", None)
        room = self.config.decode.max_new_tokens
        return [one for one in onward if context is None or len(one.prompt.ids) + room <= context]

    def turn(self, step: Step, asked: Sequence[Dialogue], first: str) -> list[Pair]:
        """One turn of the batch, both ways."""
        prompts = [one.prompt for one in islice(cycle(asked), max(step.batch_size, len(asked)))]
        turn = asked[0].turn
        params = [self.params(prompt, step.temperature, step.repeat, turn) for prompt in prompts]
        runs = {
            side: self.decode(side, step.batch_size, prompts, params)
            for side in (SIDES if first == "plain" else SIDES[::-1])
        }
        greedy = step.temperature == 0
        once = greedy and step.repeat == 0 and step.batch_size == batch_sizes(self.config)[0]
        return [
            Pair(
                prompt=one.prompt.id,
                category=one.prompt.category,
                prompt_tokens=len(one.prompt.ids),
                temperature=step.temperature,
                repeat=step.repeat,
                first=first,
                plain=plain,
                draft=drafted,
                divergence=self.divergence(one.prompt.ids, plain.tokens, drafted.tokens) if greedy else None,
                generate=self.compare_generate(one.prompt, own, plain, drafted) if once else None,
                batch_size=step.batch_size,
                batch=step.batch,
                turn=turn,
                probe=one.probe,
            )
            for one, own, plain, drafted in zip(asked, params, runs["plain"], runs["draft"], strict=False)
        ]

    def decode(
        self, side: str, batch_size: int, prompts: Sequence[Prompt], params: Sequence[Params]
    ) -> list[Run]:
        """One run for each prompt, decoded together; each bears the share of the time that is its own."""
        decoder = self.at(batch_size)[side]
        memory = PeakMemory(self.target.device)
        if batch_size == 1:
            return [
                as_run(decoder.generate(prompt.ids, own), memory.mb())
                for prompt, own in zip(prompts, params, strict=True)
            ]
        ended: dict[int, float] = {}
        made = decoder.generate_all(
            [Request(prompt.ids, own) for prompt, own in zip(prompts, params, strict=True)],
            on_end=lambda i, _: ended.update({i: now(self.target.device)}),
        )
        peak = memory.mb()
        spans = [(ended[i] - one.seconds, ended[i]) for i, one in enumerate(made)]
        decoding = [(begin + one.prefill_seconds, end) for one, (begin, end) in zip(made, spans, strict=True)]
        return [
            dataclasses.replace(as_run(one, peak), share=share, decode_share=decode_share)
            for one, share, decode_share in zip(made, shares(spans), shares(decoding), strict=True)
        ]

    def divergence(
        self, prompt_ids: Sequence[int], plain: list[int], drafted: list[int]
    ) -> Divergence | None:
        """Where two greedy outputs part, and the gap between the target's two best logits there; None if
        nowhere."""
        index = first_difference(plain, drafted)
        if index is None:
            return None
        best, second = self.two_best([*prompt_ids, *plain[:index]])
        return Divergence(
            index=index,
            gap=best - second,
            plain=plain[index] if index < len(plain) else None,
            draft=drafted[index] if index < len(drafted) else None,
        )

    def two_best(self, text: list[int]) -> tuple[float, float]:
        """The target's two largest logits after `text`, as the law shapes them."""
        ids = torch.tensor([text], device=self.target.device)
        logits = self.target.forward(ids, last_logits_only=True).logits
        assert logits is not None
        law = Law(Warp(repetition_penalty=self.config.decode.repetition_penalty), text)
        best, second = law.shaped(logits[0, -1].float(), ()).topk(2).values.tolist()
        return best, second

    def compare_generate(
        self, prompt: Prompt, params: Params, plain: Run, drafted: Run
    ) -> dict[str, Any] | None:
        """The same prompt through transformers' `generate`, greedily, compared token for token."""
        if not self.config.eval.compare_generate or params.stop:
            return None
        tokens, seconds = generate(self.target, prompt.ids, params.max_new_tokens, params.repetition_penalty)
        return {
            "new_tokens": len(tokens),
            "seconds": seconds,
            "identical_plain": tokens == plain.tokens,
            "identical_draft": tokens == drafted.tokens,
        }


def first_difference(plain: Sequence[int], drafted: Sequence[int]) -> int | None:
    """Where two outputs part, the end of the shorter one included; None if nowhere."""
    if plain == drafted:
        return None
    pairs = enumerate(zip(plain, drafted, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(plain), len(drafted)))


def temperatures(config: Config) -> list[float]:
    """What is measured at, each once."""
    asked = config.eval.temperatures
    return [config.decode.temperature] if asked is None else list(dict.fromkeys(asked))


def batch_sizes(config: Config) -> list[int]:
    """What is measured at, each once."""
    asked = config.eval.batch_sizes
    return [config.decode.batch_size] if asked is None else list(dict.fromkeys(asked))


def steps(config: Config, chosen: Sequence[Dialogue]) -> list[Step]:
    """Every batch of every setting, in the order of measuring."""
    settings = product(range(config.eval.repeats), temperatures(config), batch_sizes(config))
    return [
        Step(repeat, temperature, size, batch, tuple(chosen[start : start + size]))
        for repeat, temperature, size in settings
        for batch, start in enumerate(range(0, len(chosen), size))
    ]


def check_decoding(decode: DecodeConfig) -> None:
    """Refuses, before a model is loaded, what cannot be measured, or would not be what it says."""
    if decode.draft_tokens == 0:
        raise ConfigError(
            "decode.draft_tokens=0 drafts nothing, so plain decoding would be compared with itself. Set at "
            "least 1."
        )
    if decode.tree is Tree.static and (depth := shape_of(decode.tree_file).depth) > decode.draft_tokens:
        raise ConfigError(
            f"The tree in decode.tree_file={decode.tree_file} is {depth} levels deep, and "
            f"decode.draft_tokens={decode.draft_tokens} would cut it. Set decode.draft_tokens={depth}."
        )


def check_eager(decode: DecodeConfig, command: str) -> None:
    """Refuses compiled forwards, for a command that cannot do with them."""
    if decode.compile:
        raise ConfigError(
            f"decode.compile=true, and {command} is about eager forwards only. Set decode.compile=false; "
            "python -m eval.measure measures compiled ones."
        )


def nodes_of(decode: DecodeConfig) -> int | None:
    """How many tokens a network's tree has at most, its root left out; None for a chain, which
    decode.draft_tokens limits."""
    return None if decode.tree is Tree.chain else largest_tree(decode)


def seed_of(seed: int, repeat: int, prompt: Prompt) -> int:
    """32 bits of its own for each prompt and repeat of a run."""
    digest = hashlib.sha256(f"{seed} {repeat} {prompt.id}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def turns(plan: Sequence[Step]) -> list[str]:
    """Which of the two ways goes first in each step. They alternate within every category, since alternating
    over the whole plan, in which the categories take turns, could give one category the same order
    throughout; and they swap from one repeat to the next. A batch goes by its first prompt's category."""
    named = [step.members[0].prompt.category for step in plan]
    starts = {category: i for i, category in enumerate(dict.fromkeys(named))}
    before: Counter[tuple[int, float, int, str]] = Counter()
    first = []
    for step, category in zip(plan, named, strict=True):
        here = (step.repeat, step.temperature, step.batch_size, category)
        odd = (starts[category] + before[here] + step.repeat) % 2
        first.append("draft" if odd else "plain")
        before[here] += 1
    return first


def as_run(generation: Generation, peak_memory_mb: float | None) -> Run:
    assert generation.finish is not None
    text = generation.tokens[:-1] if generation.finish == "eos" else generation.tokens
    return Run(
        tokens=list(generation.tokens),
        finish=generation.finish,
        seconds=generation.seconds,
        prefill_seconds=generation.prefill_seconds,
        emitted_at=[generation.ttft, *generation.emitted_at],
        rounds=list(generation.rounds),
        peak_memory_mb=peak_memory_mb,
        looped=loops(text),
    )


def run_key(
    config: Config, where: dict[str, Any], folder: Path, target: Target, chosen: Sequence[Prompt]
) -> str:
    """Everything that a measured pair depends on; pairs under another key are not mixed in."""
    plain = as_plain(config)
    parts = {
        "config": [plain[name] for name in ("seed", "threads", "target", "decode")],
        "eval": [plain["eval"][name] for name in ("warmup_prompts", "compare_generate")],
        "draft": draft_hash(folder),
        "tree": sha256_file(Path(str(config.decode.tree_file)))
        if config.decode.tree is Tree.static
        else None,
        "lines": [
            [field.name for field in dataclasses.fields(kind)] for kind in (Measured, Pair, Run, Round)
        ],
        "target": target.fingerprint(),
        "prompts": [[prompt.id, content(prompt)] for prompt in chosen],
        "place": [where["git"], where["hardware"], where["versions"]],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Partial:
    """The steps measured so far, one line each; the first line holds the key they belong to. Also a context
    that has the file open."""

    def __init__(self, path: Path, key: str, console: Console) -> None:
        self.path = path
        lines = read_lines(path) if path.exists() else []
        if lines and lines[0].get("key") != key:
            console.print(
                f"{path} belongs to another configuration, draft, machine or commit: measuring from the "
                "start.",
                markup=False,
            )
            lines = []
        if not lines:
            path.unlink(missing_ok=True)
            append_line(path, {"key": key})
        found = [Measured.from_dict(line) for line in lines[1:]]
        self.done: dict[Place, Measured] = {measured.place: measured for measured in found}
        if found:
            count = sum(len(measured.pairs) for measured in found)
            console.print(f"Going on after {count} pairs of an interrupted run.", markup=False)

    def __enter__(self) -> Partial:
        self.file = open_append(self.path)
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def add(self, measured: Measured) -> None:
        append_line(self.file, dataclasses.asdict(measured))
        self.done[measured.place] = measured


def content(prompt: Prompt) -> str:
    """SHA-256 of the prompt as the target reads it."""
    return hashlib.sha256(json.dumps(prompt.ids).encode()).hexdigest()


def dtype_name(target: Target) -> str:
    return str(target.dtype).removeprefix("torch.")
