"""One check of what only a GPU can show: `python -m scripts.gpu_check`, in eight minutes on one H200.

Weights are random, so it needs no network; the target has the shape of Llama-3.1-8B. Each part runs in a
process of its own, because an error on a GPU spoils the process it happens in, and within a time limit:

    float32         a few layers: outputs of plain decoding and of all drafts equal transformers' generate
    bfloat16        the whole target: where they part, and the gap between its two best logits there
    compiled        a few layers, float32: outputs of CUDA graphs (on a CPU, Inductor) equal eager ones
    speed           tokens/s, t(n) and the decoder's own cost per round, eager and compiled
    eagle3, medusa  a training step beside the target: tokens/s, MFU, peak memory against train.plan's
    zero2, zero3    the EAGLE-3 step under DeepSpeed on one rank, with the losses of `eagle3`

Results are written after each part. The exit status is 1 if an equality or a part failed. With `--tiny
--device cpu` it does the same at toy size, in two minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from configs.compose import compose
from configs.entry import paragraphs, quiet_libraries
from configs.schema import Config, DecodeConfig, Drafting, Tree
from data.tokens import TokenRow
from decoding.build import build_drafter
from decoding.compiled import Compiled
from decoding.decoder import Decoder
from decoding.drafters import Drafter, Proposal, Turn
from decoding.drafters.plain import PlainDrafter
from decoding.sequence import Generation, Params, Request
from eval.bench import first_difference
from eval.generate import generate
from eval.lossless import SHARE, STEPS
from eval.terminal import wide_console
from models import eagle3, medusa
from models.files import write_json
from models.provenance import provenance
from models.target import Target, resolve_device
from scripts.bench_decoding import Coins, truncated
from train.checkpoint import Window
from train.distill import find_method
from train.features import Online
from train.loop import Training, summary
from train.plan import FORWARD, LEARN, UPDATE, planned_method, rehearse
from train.ranks import join
from train.runs import follow
from train.throughput import peak_flops, peak_memory_mb

SCHEMA = "leadout.gpu_check/1"
SECONDS = 450.0  # of all parts together
DRAFTED = 4  # K
ALPHA = 0.6  # synthetic acceptance: of a chain, the chance that a token is right where those before it are
WARM_UPS, STEPS_TIMED = 2, 6  # optimiser steps

APART = ("check", "equal", "partings", "losses")  # of a row: not among its figures in the table

# "check": what was checked; "equal": True, False, or None where nothing need be; and figures.
Row = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    vocab_size: int = 128_256
    hidden_size: int = 4096
    intermediate_size: int = 14_336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    initializer_range: float = 0.02
    exact_layers: int = 4  # of the target in float32
    prompt: int = 128  # tokens
    new_tokens: int = 96
    tree_nodes: int = 16  # drafted
    sizes: tuple[int, ...] = (1, 5, 9, 17, 33, 65)  # of trees, their roots included: n of t(n)
    compiled: tuple[int, ...] = (1, 5, 9, 17, 33, 65)  # sizes that forwards are compiled at
    batches: tuple[int, ...] = (1, 2)  # that compiled forwards are compared at
    draft_vocab: int = 32_000
    tokens: int = 2048  # of a training step, half of them a reply


SHAPE = [one.name for one in fields(Scale)[:7]]  # LlamaConfig's
FULL = Scale()
TINY = Scale(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.4,  # logits far from flat at this width
    exact_layers=2,
    prompt=16,
    new_tokens=24,
    tree_nodes=4,
    sizes=(1, 5),
    compiled=(5,),  # Inductor takes seconds for each
    batches=(1,),
    draft_vocab=48,
    tokens=64,
)


# ---- the target and its drafts ----


def llama(scale: Scale, layers: int | None = None) -> LlamaConfig:
    """The target's shape. No token ends a text, so that all outputs are equally long."""
    settings: dict[str, Any] = {name: getattr(scale, name) for name in SHAPE}
    settings |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    settings["num_hidden_layers"] = layers or scale.num_hidden_layers
    return LlamaConfig(**settings)


def random_target(scale: Scale, device: str, dtype: torch.dtype, layers: int | None = None) -> Target:
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(llama(scale, layers), dtype=dtype)
    words = {f"<{i}>": i for i in range(scale.vocab_size)}
    tokenizer: Any = Tokenizer(WordLevel(words, unk_token="<0>"))
    return Target.wrap(model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<0>"), "random")


def random_prompts(scale: Scale) -> list[list[int]]:
    """Two random ones and one that repeats itself, for lookup."""
    chance = torch.Generator().manual_seed(1)
    one, two, short = torch.randint(scale.vocab_size, (3, scale.prompt), generator=chance).tolist()
    return [one, two, (short[:8] * scale.prompt)[: scale.prompt]]


def random_draft(network: Any, target: Target, scale: Scale) -> Any:
    """An untrained EAGLE-3 draft, or Medusa heads (which start as the target's own head)."""
    draft = network.Draft.build(network.NetworkConfig(draft_vocab_size=scale.draft_vocab), target)
    draft.set_vocabulary(torch.arange(scale.draft_vocab))
    draft.initialise(*((target,) if network is medusa else (0, target)))
    return draft.to(target.dtype).eval().requires_grad_(False)


class Coached(Coins):
    """A chain drafter at work, whose tokens are replaced by coins': a trained draft's cost and gain."""

    def __init__(self, inner: Drafter, alpha: float) -> None:
        super().__init__(alpha)
        self.inner, self.taps = inner, inner.taps
        self.begin, self.end = inner.begin, inner.end

    def propose(self, turns: Sequence[Turn]) -> list[Proposal]:
        pairs = zip(turns, self.inner.propose(turns), strict=True)
        return [replace(made, tree=self.one(turn).tree, draws={}) for turn, made in pairs]


def drafters(target: Target, scale: Scale) -> dict[str, Drafter]:
    """Every way of drafting, plain decoding first. Hardly a token of untrained drafts is accepted; of the
    target's own first layers some are, in trees too."""
    half = Target.wrap(truncated(target, target.num_layers // 2), target.tokenizer, "first half")
    tree = DecodeConfig(tree=Tree.dynamic, tree_nodes=scale.tree_nodes)
    eagle, heads = random_draft(eagle3, target, scale), random_draft(medusa, target, scale)
    build = partial(build_drafter, target)
    return {
        "plain": PlainDrafter(),
        "EAGLE-3 chain": build(eagle, DecodeConfig()),
        "EAGLE-3 tree": build(eagle, tree),
        "Medusa chain": build(heads, DecodeConfig()),
        "Medusa tree": build(heads, tree),
        "lookup": build(None, DecodeConfig(drafters=[Drafting.lookup])),
        "half the target, chain": build(half, DecodeConfig()),
        "half the target, tree": build(half, tree),
    }


# ---- decoding ----


def params(new_tokens: int, drafted: int = DRAFTED) -> Params:
    return Params.of(DecodeConfig(draft_tokens=drafted, max_new_tokens=new_tokens), seed=0)


def against_generate(scale: Scale, device: str, exact: bool) -> Iterator[Row]:
    """Plain decoding against transformers' generate, all drafts against plain decoding."""
    dtype, layers = (torch.float32, scale.exact_layers) if exact else (torch.bfloat16, None)
    target = random_target(scale, device, dtype, layers)
    prompts, length = random_prompts(scale), scale.new_tokens if exact else scale.new_tokens // 2
    right = [generate(target, prompt, length)[0] for prompt in prompts]
    for name, drafter in drafters(target, scale).items():
        decoder = Decoder(target, drafter)
        done = [decoder.generate(prompt, params(length)) for prompt in prompts]
        beside = "generate" if name == "plain" else "plain"
        yield {"check": f"{name} = {beside}", **compared(target, prompts, right, done)}
        if name == "plain":
            right = [generation.tokens for generation in done]


def eager_against_compiled(scale: Scale, device: str) -> Iterator[Row]:
    target = random_target(scale, device, torch.float32, scale.exact_layers)
    prompts, compiled = random_prompts(scale)[1:], Compiled(target, scale.compiled)
    for name, drafter in drafters(target, scale).items():
        if name not in ("plain", "EAGLE-3 chain", "half the target, tree"):
            continue
        for batch in scale.batches:
            asked = [Request(prompt, params(scale.new_tokens)) for prompt in prompts]
            eager = Decoder(target, drafter, batch).generate_all(asked)
            done = Decoder(target, drafter, batch, compiled=compiled).generate_all(asked)
            found = compared(target, prompts, [one.tokens for one in eager], done)
            yield {"check": f"{name}, batch {batch}: compiled = eager", **found}


def compared(
    target: Target, prompts: Sequence[list[int]], right: Sequence[list[int]], done: Sequence[Generation]
) -> Row:
    """Whether outputs are the right ones. In float32 they must be, but where rounding explains how close the
    target's two best logits are (eval.lossless); in bfloat16 partings are listed."""
    pairs = [parting(target, p, r, one.tokens) for p, r, one in zip(prompts, right, done, strict=True)]
    partings = [pair for pair in pairs if pair is not None]
    rounds = [played for one in done for played in one.rounds]
    equal = all(one["gap"] <= one["explained"] for one in partings) if target.dtype is torch.float32 else None
    return {
        "equal": equal,
        "identical": f"{len(prompts) - len(partings)}/{len(prompts)}",
        "mean_acceptance_length": sum(one.emitted for one in rounds) / len(rounds),
        "largest_gap": max((one["gap"] for one in partings), default=None),
        "partings": partings,
    }


def parting(target: Target, prompt: list[int], right: list[int], tokens: list[int]) -> Row | None:
    """Where two outputs part, the gap of the target's two best logits there, and what rounding explains."""
    index = first_difference(right, tokens)
    if index is None:
        return None
    text = torch.tensor([[*prompt, *right[:index]]], device=target.device)
    logits = target.forward(text, last_logits_only=True).logits
    assert logits is not None
    best, second = logits[0, -1].float().topk(2).values.tolist()
    explained = max(STEPS * torch.finfo(target.dtype).eps, SHARE) * abs(best)
    return {"index": index, "gap": best - second, "explained": explained}


def decoding_speed(scale: Scale, device: str) -> Iterator[Row]:
    target = random_target(scale, device, torch.bfloat16)
    prompt, asked = random_prompts(scale)[0], params(scale.new_tokens)
    right = Decoder(target, PlainDrafter()).generate(prompt, asked).tokens
    chain = build_drafter(target, random_draft(eagle3, target, scale), DecodeConfig())
    for way, compiled in (("eager", None), ("compiled", Compiled(target, scale.compiled))):
        for name, drafter in (("plain", PlainDrafter()), ("EAGLE-3, by coin", Coached(chain, ALPHA))):
            if isinstance(drafter, Coins):
                drafter.script = [*prompt, *right]
            decoder = Decoder(target, drafter, compiled=compiled)
            # The first two warm up: Inductor may compile once more when it meets a second text.
            _, _, done = (decoder.generate(prompt, asked) for _ in range(3))
            found = compared(target, [prompt], [right], [done])
            yield {"check": f"{name}, {way}", **pace(done), **found}
        yield {"check": f"t(n), {way}", "equal": None, "ms": curve(target, scale, prompt, right, compiled)}


def pace(done: Generation) -> dict[str, float]:
    """Tokens per second after the prefill, which gives the first; median milliseconds of a round's forwards,
    and of the host's own work outside them."""
    parts = {"target_ms": "target_seconds", "draft_ms": "draft_seconds", "own_ms": "own_seconds"}
    medians = {name: 1e3 * median(getattr(one, of) for one in done.rounds) for name, of in parts.items()}
    return {"tokens_per_s": (len(done.tokens) - 1) / (done.seconds - done.prefill_seconds), **medians}


def curve(
    target: Target, scale: Scale, prompt: list[int], right: list[int], compiled: Compiled | None
) -> dict[str, float]:
    """Median milliseconds of the target's forward over n nodes in a round, by n: chains of wrong tokens."""
    wrong, rounds = Coins(0.0), 10
    wrong.script = [*prompt, *right]
    decoder, found = Decoder(target, wrong, compiled=compiled), {}
    for n in scale.sizes:
        for _ in range(2):  # the first warms up
            done = decoder.generate(prompt, params(n + rounds, n - 1))
        found[str(n)] = 1e3 * median(one.target_seconds for one in done.rounds if one.nodes == n)
    return found


# ---- training ----


def training_speed(scale: Scale, device: str, method: str, strategy: str = "none") -> Iterator[Row]:
    """Optimiser steps as train.distill takes them, on random rows, with online features."""
    if strategy != "none":
        launched_alone()
    with TemporaryDirectory() as folder:
        llama(scale).save_pretrained(folder)
        config = recipe(scale, device, method, strategy, folder)
        rows, planned = random_rows(scale), None
        if strategy == "none":
            peaks = rehearse(config, planned_method(config), rows[:1]).peaks(config)
            planned = max(sum(peaks[phase].values()) for phase in (FORWARD, LEARN, UPDATE)) / 1e6
        ranks = join(config)
        target = random_target(scale, device, getattr(torch, config.target.dtype.value))
        objective = find_method(config.method).build(target, rows, config.seed)
        source = Online(target, rows, objective.taps)
        quiet = Console(quiet=True)
        run = Training(config, objective, target, source, rows, [], follow(Path(folder)), quiet, ranks)
        run.loggers = []
        if target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        losses: list[float] = []
        for count in (WARM_UPS, STEPS_TIMED):
            run.state.window = Window()
            for _ in range(count):
                run.step()
            losses += run.state.window.losses
        ranks.end()
    figures, peak = summary(run.state.window), peak_flops(target.device)
    memory = peak_memory_mb(target.device)
    yield {
        "check": f"{method}, {strategy}",
        "equal": None,
        "tokens_per_s": scale.tokens / figures["seconds_per_step"],
        "seconds_per_step": figures["seconds_per_step"],
        "tflops": figures["tflops"],
        "mfu": run.meter.mfu(figures["tflops"]),
        "peak_tflops": None if peak is None else peak / 1e12,
        "peak_memory_mb": memory,
        "planned_mb": planned,
        # Resident memory of a process on a CPU has the libraries in it.
        "of_planned": memory / planned if planned and target.device.type == "cuda" else None,
        "losses": losses,
    }


def recipe(scale: Scale, device: str, method: str, strategy: str, folder: str) -> Config:
    """The 8B recipe of the method, for the random target."""
    tiny = ["target.dtype=float32", "target.pack=false"] if device == "cpu" else []
    return compose(
        [
            f"+experiment={'llama8b' if method == 'eagle3' else f'llama8b_{method}'}",
            f"target.name={folder}",
            f"target.device={device}",
            f"data.folder={folder}",
            f"runs={folder}",
            f"method.network.draft_vocab_size={scale.draft_vocab}",
            f"trainer.batch_tokens={scale.tokens}",
            "trainer.epochs=1",
            f"trainer.strategy={strategy}",
            *tiny,
        ]
    )


def random_rows(scale: Scale) -> list[TokenRow]:
    """One for each step, the second half a reply."""
    chance, half = torch.Generator().manual_seed(2), scale.tokens // 2
    size = (WARM_UPS + STEPS_TIMED, scale.tokens)
    ids = torch.randint(scale.vocab_size, size, generator=chance)
    return [TokenRow(str(i), "random", row, [0] * half + [1] * half) for i, row in enumerate(ids.tolist())]


def launched_alone() -> None:
    """Says what a launcher says to a single process."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


# ---- parts ----


@dataclass(frozen=True)
class Part:
    run: Callable[[Scale, str], Iterator[Row]]
    limit: float  # seconds, those of starting Python included
    needs: str | None = None  # an optional package


PARTS = {
    "float32": Part(partial(against_generate, exact=True), 80),
    "bfloat16": Part(partial(against_generate, exact=False), 120),
    "compiled": Part(eager_against_compiled, 100),
    "speed": Part(decoding_speed, 120),
    "eagle3": Part(partial(training_speed, method="eagle3"), 80),
    "medusa": Part(partial(training_speed, method="medusa"), 80),
    "zero2": Part(partial(training_speed, method="eagle3", strategy="zero2"), 80, "deepspeed"),
    "zero3": Part(partial(training_speed, method="eagle3", strategy="zero3"), 80, "deepspeed"),
}


def here(name: str, options: argparse.Namespace, out: Path) -> None:
    """Runs a part in this process; `out` has its rows so far."""
    torch.set_float32_matmul_precision("highest")  # no TF32
    rows: list[Row] = []
    for row in PARTS[name].run(TINY if options.tiny else FULL, options.device):
        rows.append(row)
        write_json(out, rows)


def apart(name: str, options: argparse.Namespace, out: Path, limit: float) -> str | None:
    """Runs a part in a process of its own: why it failed, if it did."""
    words = ["--part", name, "--device", options.device, "--out", str(out)]
    command = [sys.executable, "-m", "scripts.gpu_check", *words, *(["--tiny"] if options.tiny else [])]
    with open(out.with_suffix(".log"), "w+", encoding="utf-8") as log:
        try:
            status = subprocess.run(command, stdout=log, stderr=log, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            return f"not done within {limit:.0f} s"
        log.seek(0)
        said = log.read().strip()[-2000:]
    return f"exit status {status}: {said}" if status else None


def outcome(name: str, options: argparse.Namespace, out: Path, limit: float) -> dict[str, Any]:
    """What a part found, as far as it came, and why it ended before its time."""
    needs = PARTS[name].needs
    if needs and find_spec(needs) is None:
        skipped = {"check": name, "equal": None, "skipped": f"the package {needs} is not installed"}
        return {"error": None, "rows": [skipped]}
    error = apart(name, options, out, limit) if limit > 0 else f"no time is left of {SECONDS:.0f} s"
    return {"error": error, "rows": json.loads(out.read_text(encoding="utf-8")) if out.exists() else []}


def check(options: argparse.Namespace, console: Console) -> bool:
    """Runs the parts and writes what they find; whether all is as it must be."""
    resolve_device(options.device)
    began = time.monotonic()
    parts: dict[str, Any] = {}
    written = {
        "schema": SCHEMA,
        "conditions": provenance(),
        "settings": {"device": options.device, **asdict(TINY if options.tiny else FULL)},
        "temperature": 0,
        "batch_size": 1,
        "parts": parts,
    }
    with TemporaryDirectory() as folder:
        for name in options.parts:
            started, limit = time.monotonic(), min(PARTS[name].limit, SECONDS - (time.monotonic() - began))
            with console.status(f"{name}, at most {limit:.0f} s"):
                parts[name] = outcome(name, options, Path(folder) / f"{name}.json", limit)
            parts[name] |= {"seconds": time.monotonic() - started, "limit": limit}
            same_losses(parts, name)
            write_json(options.out, written)
            said = parts[name]["error"] or "done"
            console.print(f"{name}: {said} ({parts[name]['seconds']:.0f} s)", markup=False, highlight=False)
    console.print(table(parts))
    console.print(f"written: {options.out}", markup=False, highlight=False)
    judged = [row["equal"] for part in parts.values() for row in part["rows"]]
    return False not in judged and not any(part["error"] for part in parts.values())


def same_losses(parts: Mapping[str, Any], name: str) -> None:
    """Sets a strategy's losses against those of one process alone: float32 masters, so nearly equal."""
    alone, own = (parts.get(one, {}).get("rows") or [{}] for one in ("eagle3", name))
    if name.startswith("zero") and "losses" in alone[0] and "losses" in own[0]:
        pairs = zip(own[0]["losses"], alone[0]["losses"], strict=True)
        distance = max(abs(a - b) / abs(b) for a, b in pairs)
        own[0] |= {"equal": distance < 1e-3, "losses_apart": distance}


def table(parts: Mapping[str, Any]) -> Table:
    made = Table("part", "check", "equal", "figures")
    for name, part in parts.items():
        for row in part["rows"]:
            told = {key: one for key, one in row.items() if one is not None and key not in APART}
            figures = ", ".join(f"{key} {shown(one)}" for key, one in told.items())
            equal = {True: "yes", False: "[bold red]NO[/]", None: ""}[row["equal"]]
            made.add_row(name, row["check"], equal, escape(figures))
        if part["error"]:
            made.add_row(name, "", "[bold red]FAILED[/]", escape(part["error"].splitlines()[-1]))
    return made


def shown(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}:{shown(one)}" for key, one in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu_check", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)  # run it here
    parser.add_argument("--out", type=Path, default=Path("artifacts/gpu_check.json"))
    options = parser.parse_args(arguments)
    with paragraphs():
        quiet_libraries()
        if options.part:
            here(options.part, options, options.out)
        elif not check(options, wide_console()):
            sys.exit(1)


if __name__ == "__main__":
    main()
