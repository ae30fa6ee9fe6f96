"""Whether every drafter's greedy output is the target's own: `python -m scripts.check_identity FILE ...`.

FILE is JSONL with `messages`. Each prompt is decoded by transformers' `generate`, on weights that are not
packed, and then by every way of drafting, alone and in a batch with its neighbours; in float32 all outputs
must be equal, token for token. With --draft (a native checkpoint; may be given several times) also by that
draft's chain, dynamic tree and static tree, and by its chain merged with prompt lookup.

Groups of a batch's size are written as they are done; the same command goes on after the last one.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from configs.entry import paragraphs, quiet_libraries
from configs.errors import ConfigError
from configs.schema import DecodeConfig, Drafting, Dtype, TargetConfig, Tree
from data.template import Template
from decoding.build import build_drafter, network_drafter
from decoding.decoder import Decoder, Request
from decoding.drafters import Drafter
from decoding.drafters.plain import PlainDrafter
from decoding.growth import StaticGrowth
from decoding.sequence import Params
from decoding.shapes import TreeShape
from eval.generate import generate
from models import load_draft
from models.checkpoint import WEIGHTS
from models.files import append_line, lines_under, read_lines, sha256_file, write_json
from models.packing import pack
from models.provenance import provenance
from models.target import Target
from scripts.bench_decoding import truncated
from scripts.fetch_embedded import TARGET

SHAPE = TreeShape(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))  # of the static tree


def drafters(target: Target, plain: Target, options: argparse.Namespace) -> dict[str, Drafter]:
    """Every way of drafting, by name. `plain`: the same target, not packed."""
    small = Target.wrap(truncated(plain, options.draft_layers), target.tokenizer, "first layers")
    pack(small.model)
    ways: dict[str, tuple[Any, DecodeConfig]] = {
        "lookup": (None, DecodeConfig(drafters=[Drafting.lookup])),
        "lookahead": (None, DecodeConfig(drafters=[Drafting.lookahead])),
        "small chain": (small, DecodeConfig()),
        "small tree": (small, DecodeConfig(tree=Tree.dynamic)),
    }
    made: dict[str, Drafter] = {"plain": PlainDrafter()}
    for folder in options.draft:
        draft = load_draft(folder, target)
        name = getattr(draft, "method", "small")
        ways[f"{name} chain"] = (draft, DecodeConfig())
        ways[f"{name} dynamic tree"] = (draft, DecodeConfig(tree=Tree.dynamic))
        ways[f"{name} + lookup"] = (draft, DecodeConfig(drafters=[Drafting.draft, Drafting.lookup]))
        made[f"{name} static tree"] = network_drafter(
            target, draft, StaticGrowth(SHAPE, DecodeConfig().proposal)
        )
    return made | {name: build_drafter(target, draft, decode) for name, (draft, decode) in ways.items()}


def compare(
    target: Target,
    plain: Target,
    made: Mapping[str, Drafter],
    prompts: Sequence[list[int]],
    options: argparse.Namespace,
) -> dict[str, list[int]]:
    """How many of one group's outputs are equal to generate's: [alone, in the batch] by way of drafting."""
    right = [generate(plain, prompt, options.max_new_tokens)[0] for prompt in prompts]
    config = DecodeConfig(draft_tokens=options.draft_tokens, max_new_tokens=options.max_new_tokens)
    params = Params.of(config, seed=0)
    found: dict[str, list[int]] = {}
    for name, drafter in made.items():
        decoder = Decoder(target, drafter)
        alone = [decoder.generate(prompt, params).tokens for prompt in prompts]
        together = Decoder(target, drafter, batch_size=len(prompts))
        batch = [done.tokens for done in together.generate_all([Request(p, params) for p in prompts])]
        found[name] = [sum(map(list.__eq__, outputs, right)) for outputs in (alone, batch)]
    return found


def check(options: argparse.Namespace) -> None:
    console = Console()
    if not options.file.is_file():
        raise ConfigError(f"There is no {options.file}. Name a JSONL file whose rows have `messages`.")
    source = {"name": options.target, "dtype": Dtype(options.dtype)}
    plain = Target.load(TargetConfig(**source, pack=False))
    target = Target.load(TargetConfig(**source, pack=True))
    made = drafters(target, plain, options)
    template = Template.of(plain)
    rows = read_lines(options.file)[:: options.every][: options.count]
    prompts = [template.prompt(row["messages"]) for row in rows]
    groups = [prompts[i : i + options.batch_size] for i in range(0, len(prompts), options.batch_size)]
    settings = {key: str(value) for key, value in vars(options).items()}
    settings |= {"sha256": sha256_file(options.file), "git": str(provenance()["git"])}
    settings |= {str(folder): sha256_file(folder / WEIGHTS) for folder in options.draft}
    partial = options.out.with_suffix(".partial.jsonl")
    lines = lines_under(partial, settings)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("prompts", total=len(rows), completed=options.batch_size * len(lines))
        for group in groups[len(lines) :]:
            lines.append(compare(target, plain, made, group, options))
            append_line(partial, lines[-1])
            progress.advance(task, len(group))
    alone, together = Counter[str](), Counter[str]()
    for line in lines:
        for name, (by_itself, in_batch) in line.items():
            alone[name] += by_itself
            together[name] += in_batch
    table = Table("drafting", f"equal of {len(rows)}, alone", f"in batches of {options.batch_size}")
    for name in made:
        table.add_row(name, str(alone[name]), str(together[name]))
    console.print(table)
    result = {"conditions": provenance(), "settings": settings, "prompts": len(rows), "temperature": 0}
    write_json(options.out, result | {"equal_alone": dict(alone), "equal_in_batches": dict(together)})
    partial.unlink()
    console.print(f"written: {options.out}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.check_identity", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("file", type=Path, help="JSONL with `messages`")
    parser.add_argument("--target", default=str(TARGET), help="hub name or folder")
    parser.add_argument("--draft", type=Path, action="append", default=[], help="a native draft's folder")
    parser.add_argument("--dtype", choices=[dtype.value for dtype in Dtype], default="float32")
    parser.add_argument("--count", type=int, default=100, help="prompts")
    parser.add_argument("--every", type=int, default=1, help="take every n-th row of the file")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--draft-layers", type=int, default=6, help="of the target, as the small draft")
    parser.add_argument("--out", type=Path, default=Path("artifacts/check_identity.json"))
    with paragraphs():
        quiet_libraries()
        check(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
