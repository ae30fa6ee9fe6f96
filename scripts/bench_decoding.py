"""Against Hugging Face's own decoding: `python -m scripts.bench_decoding [PROMPTS] [--draft FOLDER] ...`.

Same weights, dtype, threads and prompts, greedily, each prompt by all methods before the next and each time
beginning with another one:

    transformers                              ours
    generate                                  plain
    assisted-k: assistant_model, k = 2, 4, 8  small-k: the same draft, as many tokens
    hf-lookup: prompt_lookup_num_tokens=10    lookup
                                              chain, tree, chain+lookup: of --draft
                                              synthetic: the plain output, each token right with --alpha

The draft model of both sides is the target's first layers under its own head, untrained: what is compared is
what a round costs around the same drafts. Ratios are to the peer on the same line, pooled over prompts, with
95 % intervals from a bootstrap over prompts.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig

from configs.entry import paragraphs, quiet_libraries
from configs.errors import ConfigError
from configs.hardware import native_dtype
from configs.schema import DecodeConfig, Drafting, Dtype, TargetConfig, Tree
from data.template import Template
from decoding.acceptance import bootstrap_ratio
from decoding.build import build_drafter
from decoding.decoder import Decoder
from decoding.drafters import EachAlone, Proposal, Turn
from decoding.drafters.plain import PlainDrafter
from decoding.sequence import Params
from decoding.tree import TokenTree
from eval.machine import share_of_others
from models import load_draft
from models.files import read_lines, sha256_file, write_json
from models.packing import pack
from models.provenance import provenance
from models.target import Target
from scripts.fetch_embedded import TARGET

HELDOUT = Path("artifacts/data/smollm2_cpu/heldout.jsonl")
DRAFTED = (2, 4, 8)
LOOKUP_TOKENS = 10  # as Hugging Face's documentation sets it


@dataclass
class Tally:
    """One method over all prompts."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    identical: int = 0  # to transformers' plain generate
    rounds: int = 0
    own_ms: list[float] = field(default_factory=list)  # the decoder's own time, per round


@dataclass(frozen=True)
class Done:
    tokens: list[int]
    seconds: float
    rounds: int = 0
    own_ms: tuple[float, ...] = ()


Method = Callable[[list[int], list[int]], Done]  # of a prompt, and of its right continuation


class Coins(EachAlone):
    """Drafts the right continuation, each token wrong with probability 1 - alpha: acceptance by coin."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.script: list[int] = []

    def one(self, turn: Turn) -> Proposal:
        chance = random.Random(turn.seen.position)
        ids: list[int] = []
        for token in self.script[turn.seen.position + 1 :][: turn.budget]:
            ids.append(token if chance.random() < self.alpha else token ^ 1)
        return Proposal(TokenTree.chain(turn.seen.pending, ids))


def ours(decoder: Decoder, params: Params) -> Method:
    def run(prompt: list[int], right: list[int]) -> Done:
        if isinstance(decoder.drafter, Coins):
            decoder.drafter.script = [*prompt, *right]
        done = decoder.generate(prompt, params)
        own = tuple(1e3 * played.own_seconds for played in done.rounds)
        return Done(done.tokens, done.seconds, len(done.rounds), own)

    return run


def theirs(target: Target, new_tokens: int, **options: Any) -> Method:
    """transformers' generate, with the model's generation defaults set aside."""
    ends = sorted(target.eos_ids)
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=new_tokens, eos_token_id=ends, pad_token_id=ends[0]
    )

    @torch.inference_mode()
    def run(prompt: list[int], right: list[int]) -> Done:
        ids = torch.tensor([prompt], device=target.device)
        target.model.generation_config = GenerationConfig()
        began = time.perf_counter()
        out = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings, **options
        )
        return Done(out[0, len(prompt) :].tolist(), time.perf_counter() - began)

    return run


def assistant(target: Target, layers: int, k: int) -> Any:
    """The target's first layers, drafting exactly k tokens in Hugging Face's assisted generation."""
    model = truncated(target, layers)
    model.generation_config.num_assistant_tokens = k
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def truncated(target: Target, layers: int) -> Any:
    model = copy.deepcopy(target.model)
    stack = model.get_decoder().layers
    model.get_decoder().layers = stack[:layers]
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None) is not None:
        model.config.layer_types = model.config.layer_types[:layers]
    return model


def methods(options: argparse.Namespace) -> dict[str, tuple[Method, str | None]]:
    """Each method and the peer it is compared with. Hugging Face's run on weights that are not packed."""
    source = {"name": options.target, "dtype": Dtype(options.dtype)}
    plain = Target.load(TargetConfig(**source, pack=False))
    packed = Target.load(TargetConfig(**source, pack=True))
    length = options.max_new_tokens

    def params(k: int) -> Params:
        return Params.of(DecodeConfig(draft_tokens=k, max_new_tokens=length), seed=0)

    def decoder(k: int, drafter: Any) -> Method:
        return ours(Decoder(packed, drafter), params(k))

    made: dict[str, tuple[Method, str | None]] = {
        "generate": (theirs(plain, length), None),
        "plain": (decoder(0, PlainDrafter()), "generate"),
        "hf-lookup": (theirs(plain, length, prompt_lookup_num_tokens=LOOKUP_TOKENS), "generate"),
        "lookup": (
            decoder(LOOKUP_TOKENS, build_drafter(packed, None, DecodeConfig(drafters=[Drafting.lookup]))),
            "hf-lookup",
        ),
        "synthetic": (decoder(4, Coins(options.alpha)), "plain"),
    }
    small = Target.wrap(truncated(plain, options.draft_layers), packed.tokenizer, "first layers")
    pack(small.model)
    for k in DRAFTED:
        made[f"assisted-{k}"] = (
            theirs(plain, length, assistant_model=assistant(plain, options.draft_layers, k)),
            "generate",
        )
        made[f"small-{k}"] = (decoder(k, build_drafter(packed, small, DecodeConfig())), f"assisted-{k}")
    if options.draft is not None:
        draft = load_draft(options.draft, packed)
        trees = {"chain": (3, DecodeConfig()), "tree": (4, DecodeConfig(tree=Tree.dynamic, tree_nodes=8))}
        both = DecodeConfig(drafters=[Drafting.draft, Drafting.lookup])
        for name, (k, config) in {**trees, "chain+lookup": (3, both)}.items():
            made[name] = (decoder(k, build_drafter(packed, draft, config)), "plain")
    return made


def run(
    made: dict[str, tuple[Method, str | None]], prompts: Sequence[list[int]], show: Callable[[str], None]
) -> dict[str, Tally]:
    tallies = {name: Tally() for name in made}
    names = list(made)
    for turn, prompt in enumerate([prompts[0], *prompts]):  # the first once more, to warm up
        right = made["generate"][0](prompt, []).tokens
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            done = made[name][0](prompt, right)
            if turn:
                tally = tallies[name]
                tally.tokens.append(len(done.tokens))
                tally.seconds.append(done.seconds)
                tally.identical += done.tokens == right
                tally.rounds += done.rounds
                tally.own_ms += done.own_ms
        show(f"{turn}/{len(prompts)}")
    return tallies


def result(tally: Tally, peer: Tally | None, plain: Tally) -> dict[str, Any]:
    """The row of one method. Ratios are of seconds per token, since in bfloat16 outputs may differ."""
    tokens, seconds = sum(tally.tokens), sum(tally.seconds)
    own = sorted(tally.own_ms)
    return {
        "tokens_per_s": tokens / seconds,
        "identical": tally.identical,
        "mean_acceptance_length": (tokens - len(tally.tokens)) / tally.rounds if tally.rounds else None,
        "decoder_ms": own[len(own) // 2] if own else None,
        "against_generate": faster(tally, plain),
        "against_peer": faster(tally, peer) if peer is not None else None,
    }


def faster(tally: Tally, peer: Tally) -> list[float]:
    """[ratio, low, high] of tokens per second."""
    mine = [s / t for s, t in zip(tally.seconds, tally.tokens, strict=True)]
    other = [s / t for s, t in zip(peer.seconds, peer.tokens, strict=True)]
    interval = bootstrap_ratio(other, mine, 0.95, 2000, 0)
    assert interval is not None
    return [sum(other) / sum(mine), *interval]


def best_assisted(rows: dict[str, Any], tallies: dict[str, Tally]) -> dict[str, Any]:
    """Each side at its own best k."""
    best = {
        side: max((f"{side}-{k}" for k in DRAFTED), key=lambda name: rows[name]["tokens_per_s"])
        for side in ("assisted", "small")
    }
    return {**best, "ratio": faster(tallies[best["small"]], tallies[best["assisted"]])}


def table(rows: dict[str, Any], prompts: int, peers: dict[str, str | None]) -> Table:
    made = Table("method", "tokens/s", "τ", "own ms", "identical", "× generate (95 %)", "× peer (95 %)")
    for name, row in rows.items():
        length, own, against = row["mean_acceptance_length"], row["decoder_ms"], row["against_peer"]
        made.add_row(
            name,
            f"{row['tokens_per_s']:.1f}",
            "" if length is None else f"{length:.2f}",
            "" if own is None else f"{own:.2f}",
            f"{row['identical']}/{prompts}",
            "{:.2f} ({:.2f}-{:.2f})".format(*row["against_generate"]),
            "" if against is None else "{:.2f} ({:.2f}-{:.2f}) {}".format(*against, peers[name]),
        )
    return made


def bench(options: argparse.Namespace) -> None:
    console = Console()
    if not options.prompts.is_file():
        raise ConfigError(
            f"There is no {options.prompts}. Run `make demo`, or name a JSONL file with `messages`."
        )
    others = share_of_others()
    if others > 0.15:
        console.print(f"Other processes use {others:.0%} of this machine: the figures will be off.")
    made = methods(options)
    template = Template.load(TargetConfig(name=options.target))
    rows = read_lines(options.prompts)[:: options.every][: options.count]
    prompts = [template.prompt(row["messages"]) for row in rows]
    if len(prompts) < 2:
        raise ConfigError(f"{len(prompts)} prompts show no spread, which intervals need: take two or more.")
    with console.status("decoding") as status:
        tallies = run(made, prompts, lambda text: status.update(f"decoding {text}"))
    peers = {name: peer for name, (_, peer) in made.items()}
    results = {
        name: result(tally, tallies[peer] if (peer := peers[name]) else None, tallies["generate"])
        for name, tally in tallies.items()
    }
    best = best_assisted(results, tallies)
    console.print(table(results, len(prompts), peers))
    console.print("{small} against {assisted}, each side's best: ".format(**best), end="")
    console.print("{:.2f} ({:.2f}-{:.2f})".format(*best["ratio"]))
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    written = {
        "conditions": provenance(),
        "others_before": others,
        "settings": settings,
        "prompts_sha256": sha256_file(options.prompts),
        "temperature": 0,
        "batch_size": 1,
        "rows": results,
        "best_assisted": best,
    }
    write_json(options.out, written)
    console.print(f"written: {options.out}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_decoding", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("prompts", type=Path, nargs="?", default=HELDOUT, help="JSONL with `messages`")
    parser.add_argument("--target", default=str(TARGET), help="hub name or folder")
    parser.add_argument("--draft", type=Path, help="folder of a native draft of that target")
    parser.add_argument("--dtype", choices=[dtype.value for dtype in Dtype], default=native_dtype("auto"))
    parser.add_argument("--count", type=int, default=24, help="prompts")
    parser.add_argument("--every", type=int, default=1, help="take every n-th row of the file")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--draft-layers", type=int, default=6, help="of the target, as the small draft")
    parser.add_argument("--alpha", type=float, default=0.6, help="acceptance of the synthetic draft")
    parser.add_argument("--out", type=Path, default=Path("artifacts/bench_decoding.json"))
    with paragraphs():
        quiet_libraries()
        bench(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
