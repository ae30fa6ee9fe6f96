"""Decoding the same prompts plainly and speculatively, in turn, with every pair on the disk before the next
begins."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console
from torch import nn

from configs.errors import ConfigError
from configs.schema import Config, DecodeConfig, Tree
from data.tokens import Prompt
from decoding.build import build_decoder, shape_of
from decoding.decoder import Decoder
from decoding.drafters.plain import PlainDrafter
from decoding.sequence import Generation, Params, Round
from decoding.verify import lossless
from eval.generate import generate
from eval.machine import Contention, PeakMemory
from eval.rows import Conditions, Divergence, Pair, Run
from eval.terminal import bar
from models.files import append_line, open_append, read_lines, sha256_file
from models.target import Target

Step = tuple[int, float, Prompt]  # repeat, temperature, prompt


class Bench:
    """The two decoders, and how a pair of runs is made."""

    def __init__(self, config: Config, target: Target, draft: nn.Module, name: str = "draft") -> None:
        """name: tells the draft from others where its costs are kept."""
        self.config = config
        self.target = target
        self.method = str(draft.method)
        self.decoders = {
            "plain": Decoder(target, PlainDrafter()),
            "draft": build_decoder(target, draft, config.decode, name),
        }

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
            batch_size=decode.batch_size,
            top_k=decode.top_k,
            top_p=decode.top_p,
            confidence=measured.confidence,
            resamples=measured.bootstrap,
            seed=self.config.seed,
        )

    def run(
        self, chosen: Sequence[Prompt], partial: Partial, console: Console
    ) -> tuple[list[Pair], list[float]]:
        """All pairs, an interrupted run's included, and the share of the machine that others used in each."""
        plan = list(product(range(self.config.eval.repeats), temperatures(self.config), chosen))
        todo = [
            (first, step)
            for first, step in zip(turns(plan), plan, strict=True)
            if place(step) not in partial.done
        ]
        if todo:
            self.warm_up(chosen)
        if not console.is_terminal:  # where no bar shows how much there is to wait for
            console.print(f"{len(todo)} pairs of runs to measure.")
        with partial, bar(console) as progress:
            task = progress.add_task("measuring", total=len(plan), completed=len(plan) - len(todo))
            for first, (repeat, temperature, prompt) in todo:
                watch = Contention()
                pair = self.pair(prompt, temperature, repeat, first)
                partial.add(pair, watch.share())
                progress.advance(task)
        kept = [partial.done[place(step)] for step in plan]
        return [pair for pair, _ in kept], [share for _, share in kept]

    def warm_up(self, chosen: Sequence[Prompt]) -> None:
        """Runs whose times are thrown away: first calls allocate, compile and fill caches."""
        for prompt in chosen[: self.config.eval.warmup_prompts]:
            for decoder in self.decoders.values():
                decoder.generate(prompt.ids, self.params(prompt, temperatures(self.config)[0], 0))

    def params(self, prompt: Prompt, temperature: float, repeat: int) -> Params:
        """The run's parameters; prompts and repeats draw different random numbers, both ways of decoding the
        same."""
        seed = seed_of(self.config.seed, repeat, prompt)
        return dataclasses.replace(Params.of(self.config.decode, seed), temperature=temperature)

    def pair(self, prompt: Prompt, temperature: float, repeat: int, first: str) -> Pair:
        params = self.params(prompt, temperature, repeat)
        order = ("plain", "draft") if first == "plain" else ("draft", "plain")
        runs = {side: self.time(side, prompt, params) for side in order}
        plain, drafted = runs["plain"], runs["draft"]
        greedy = temperature == 0
        compared = self.compare_generate(prompt, params, plain, drafted) if greedy and repeat == 0 else None
        return Pair(
            prompt=prompt.id,
            category=prompt.category,
            prompt_tokens=len(prompt.ids),
            temperature=temperature,
            repeat=repeat,
            first=first,
            plain=plain,
            draft=drafted,
            divergence=self.divergence(prompt.ids, plain.tokens, drafted.tokens) if greedy else None,
            generate=compared,
        )

    def time(self, side: str, prompt: Prompt, params: Params) -> Run:
        memory = PeakMemory(self.target.device)
        return as_run(self.decoders[side].generate(prompt.ids, params), memory.mb())

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
        """The target's two largest logits after `text`."""
        ids = torch.tensor([text], device=self.target.device)
        logits = self.target.forward(ids, last_logits_only=True).logits
        assert logits is not None
        best, second = logits[0, -1].float().topk(2).values.tolist()
        return best, second

    def compare_generate(
        self, prompt: Prompt, params: Params, plain: Run, drafted: Run
    ) -> dict[str, Any] | None:
        """The same prompt through transformers' `generate`, greedily, compared token for token."""
        if not self.config.eval.compare_generate or params.stop:
            return None
        tokens, seconds = generate(self.target, prompt.ids, params.max_new_tokens)
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


def check_decoding(decode: DecodeConfig) -> None:
    """Refuses, before a model is loaded, what cannot be measured, or would not be what it says."""
    if decode.draft_tokens == 0:
        raise ConfigError(
            "decode.draft_tokens=0 drafts nothing, so plain decoding would be compared with itself. Set at "
            "least 1."
        )
    if decode.batch_size != 1:
        raise ConfigError(
            f"decode.batch_size={decode.batch_size}, and eval.measure decodes one prompt at a time: its "
            "figures would not be those of a batch. Set decode.batch_size=1."
        )
    if decode.tree is Tree.static and (depth := shape_of(decode.tree_file).depth) > decode.draft_tokens:
        raise ConfigError(
            f"The tree in decode.tree_file={decode.tree_file} is {depth} levels deep, and "
            f"decode.draft_tokens={decode.draft_tokens} would cut it. Set decode.draft_tokens={depth}."
        )


def nodes_of(decode: DecodeConfig) -> int | None:
    """How many tokens a network's tree has at most, its root left out; None for a chain, which
    decode.draft_tokens limits."""
    match decode.tree:
        case Tree.chain:
            return None
        case Tree.dynamic:
            return decode.tree_nodes
        case Tree.static:
            return len(shape_of(decode.tree_file)) - 1


def seed_of(seed: int, repeat: int, prompt: Prompt) -> int:
    """32 bits of its own for each prompt and repeat of a run."""
    digest = hashlib.sha256(f"{seed} {repeat} {prompt.id}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def turns(plan: Sequence[Step]) -> list[str]:
    """Which of the two ways goes first in each pair. They alternate within every category, since alternating
    over the whole plan, in which the categories take turns, could give one category the same order
    throughout; and they swap from one repeat to the next."""
    starts = {category: i for i, category in enumerate(dict.fromkeys(prompt.category for *_, prompt in plan))}
    before: Counter[tuple[int, float, str]] = Counter()
    first = []
    for repeat, temperature, prompt in plan:
        here = (repeat, temperature, prompt.category)
        odd = (starts[prompt.category] + before[here] + repeat) % 2
        first.append("draft" if odd else "plain")
        before[here] += 1
    return first


def as_run(generation: Generation, peak_memory_mb: float | None) -> Run:
    assert generation.finish is not None
    return Run(
        tokens=list(generation.tokens),
        finish=generation.finish,
        seconds=generation.seconds,
        prefill_seconds=generation.prefill_seconds,
        emitted_at=[generation.ttft, *generation.emitted_at],
        rounds=list(generation.rounds),
        peak_memory_mb=peak_memory_mb,
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
        "round": [field.name for field in dataclasses.fields(Round)],  # what the lines hold
        "target": target.fingerprint(),
        "prompts": [[prompt.id, content(prompt)] for prompt in chosen],
        "place": [where["git"], where["hardware"], where["versions"]],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def place(step: Step) -> tuple[int, float, str]:
    repeat, temperature, prompt = step
    return repeat, temperature, prompt.id


class Partial:
    """The pairs measured so far, one line each; the first line holds the key they belong to. Also a context
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
        self.done: dict[tuple[int, float, str], tuple[Pair, float]] = {}
        for line in lines[1:]:
            self.note(Pair.from_dict(line["pair"]), line["others"])
        if self.done:
            console.print(f"Going on after {len(self.done)} pairs of an interrupted run.", markup=False)

    def __enter__(self) -> Partial:
        self.file = open_append(self.path)
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def note(self, pair: Pair, others: float) -> None:
        self.done[pair.repeat, pair.temperature, pair.prompt] = pair, others

    def add(self, pair: Pair, others: float) -> None:
        append_line(self.file, {"pair": pair.to_dict(), "others": others})
        self.note(pair, others)


def content(prompt: Prompt) -> str:
    """SHA-256 of the prompt as the target reads it."""
    return hashlib.sha256(json.dumps(prompt.ids).encode()).hexdigest()


def draft_hash(folder: Path) -> str:
    """SHA-256 over the hashes of a native checkpoint's two files."""
    files = [sha256_file(folder / name) for name in ("config.json", "model.safetensors")]
    return hashlib.sha256(" ".join(files).encode()).hexdigest()


def dtype_name(target: Target) -> str:
    return str(target.dtype).removeprefix("torch.")


def as_plain(config: Config) -> dict[str, Any]:
    """A configuration as JSON holds it."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(name): part for name, part in plain.items()}
