"""Every method on one budget, from nothing to a table: `python -m scripts.compare_methods [key=value ...]`.

Trains the draft of each recipe in RECIPES, all on the same replies of the embedded target, unless it is
trained already; then decodes held-out prompts plainly and in every way that the drafts allow, at each
temperature: chains, dynamic trees, drafts without training (prompt lookup, lookahead) and EAGLE-3's tree
merged with lookup. Each prompt is decoded in all ways before the next, beginning with another one each
time, so that a change of the machine's load meets all alike. Ratios are to plain decoding of the same
prompts, with 95 % intervals from a bootstrap over prompts.

Every prompt is on the disk before the next begins; the same command goes on after the last one. Key=value
overrides go to every recipe, for training and measuring; the recipes have one budget.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from configs.compose import compose
from configs.entry import leave, paragraphs, quiet_libraries
from configs.schema import Config, Drafting, Proposal, Tree
from data.tokens import Prompt, evenly, prompts
from decoding.decoder import Decoder
from decoding.drafters.plain import PlainDrafter
from decoding.sequence import Round
from eval.bench import Bench, as_run, seed_of
from eval.machine import share_of_others
from eval.pictures import speedups, standalone
from eval.rows import Conditions, Pair, Run, rows
from models import find_draft, load_draft
from models.checkpoint import draft_hash
from models.files import append_line, lines_under, read_lines, write_json, write_text
from models.provenance import provenance
from models.target import Target
from scripts.demo import trained

BASE = "smollm2_cpu"  # EAGLE-3, whose replies and whose settings of the measurement all others use
RECIPES = (
    "smollm2_small",
    "smollm2_medusa",
    "smollm2_hydra",
    "smollm2_mlp_speculator",
    "smollm2_eagle1",
    BASE,
    "smollm2_peagle",
    "smollm2_dflash",
)
ALONE = {"drafters": [Drafting.draft]}  # whatever a recipe merges it with
CHAIN = {"tree": Tree.chain, **ALONE}
TREE = {"tree": Tree.dynamic, **ALONE, "tree_nodes": 8, "tree_width": 4, "draft_tokens": 4}
PLAIN = "plain"


@dataclass(frozen=True)
class Way:
    """One way of decoding."""

    name: str
    decoder: Decoder
    bench: Bench

    def conditions(self) -> Conditions:
        return dataclasses.replace(self.bench.conditions(), method=self.name)


def train(recipes: Sequence[str], overrides: Sequence[str], console: Console) -> dict[str, Path]:
    """The finished run of each recipe."""
    runs = {}
    for recipe in recipes:
        arguments = [f"+experiment={recipe}", *overrides]
        if (run := trained(compose(arguments))) is None:
            console.print(f"training {recipe}")
            status = subprocess.run([sys.executable, "-m", "train.distill", *arguments]).returncode
            if status:
                leave(
                    f"train.distill stopped at {recipe}; mend what it says and run the same command.", status
                )
            run = trained(compose(arguments))
        assert run is not None
        runs[recipe] = run
    return runs


def ways(target: Target, runs: dict[str, Path], overrides: Sequence[str], new_tokens: int) -> Iterator[Way]:
    """Plain decoding first."""

    def way(name: str, config: Config, draft: Any, changes: dict[str, Any]) -> Way:
        decode = dataclasses.replace(
            config.decode, max_new_tokens=new_tokens, proposal=Proposal.sampled, **changes
        )
        bench = Bench(dataclasses.replace(config, decode=decode), target, draft, name)
        return Way(name, bench.decoders["draft"], bench)

    base = compose([f"+experiment={BASE}", *overrides])
    first = load_draft(find_draft(str(runs[BASE]), Path(base.runs), BASE), target)
    plain = way(PLAIN, base, first, {"draft_tokens": 0})
    yield dataclasses.replace(plain, decoder=Decoder(target, PlainDrafter()))
    for recipe, run in runs.items():
        config = compose([f"+experiment={recipe}", *overrides])
        draft = load_draft(find_draft(str(run), Path(config.runs), recipe), target)
        method = config.method.name
        yield way(f"{method} chain", config, draft, CHAIN)
        yield way(f"{method} tree", config, draft, TREE)
    lookup = [Drafting.lookup]
    yield way("lookup", base, first, {"drafters": lookup, "draft_tokens": 8})
    yield way("lookahead", base, first, {"drafters": [Drafting.lookahead], "draft_tokens": 4})
    both = {**TREE, "drafters": [Drafting.draft, Drafting.lookup]}
    yield way("eagle3 tree + lookup", base, first, both)


def measure(
    made: Sequence[Way],
    chosen: Sequence[Prompt],
    temperatures: Sequence[float],
    partial: Path,
    key: dict[str, Any],
    console: Console,
) -> list[dict[str, Any]]:
    """One line for each prompt and temperature: its runs by way, and the share of the machine others used."""
    done = len(lines_under(partial, key))
    plan = [(temperature, prompt) for prompt in chosen for temperature in temperatures]
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("measuring", total=len(plan), completed=done)
        for turn, (temperature, prompt) in list(enumerate(plan))[done:]:
            if turn == done:  # the first of this process, once more, to warm up
                decode_all(made, turn, prompt, temperature)
            found = decode_all(made, turn, prompt, temperature)
            line = {"prompt": prompt.id, "temperature": temperature, "others": share_of_others()}
            append_line(partial, line | {"runs": {name: asdict(run) for name, run in found.items()}})
            progress.advance(task)
    return read_lines(partial)[1:]


def decode_all(made: Sequence[Way], turn: int, prompt: Prompt, temperature: float) -> dict[str, Run]:
    first = turn % len(made)
    found = {}
    for way in [*made[first:], *made[:first]]:
        params = way.bench.params(prompt, temperature, 0)
        gc.collect()
        found[way.name] = as_run(way.decoder.generate(prompt.ids, params), None)
    return found


def results(
    lines: Sequence[dict[str, Any]], made: Sequence[Way], chosen: Sequence[Prompt]
) -> list[dict[str, Any]]:
    """The rows of measure.json for every way: all prompts, and each category."""
    known = {prompt.id: prompt for prompt in chosen}
    found = []
    for way in made[1:]:
        pairs = [
            Pair(
                prompt=line["prompt"],
                category=known[line["prompt"]].category,
                prompt_tokens=len(known[line["prompt"]].ids),
                temperature=line["temperature"],
                repeat=0,
                first=PLAIN,
                plain=run_of(line["runs"][PLAIN]),
                draft=run_of(line["runs"][way.name]),
            )
            for line in lines
        ]
        found += [
            row
            for row in rows(pairs, way.conditions())
            if row["context_bucket"] == "all" and (row["method"] != PLAIN or way is made[1])
        ]
    return found


def run_of(values: dict[str, Any]) -> Run:
    return Run(**{**values, "rounds": [Round(**played) for played in values["rounds"]]})


def compare(options: argparse.Namespace) -> None:
    console = Console(soft_wrap=True, highlight=False)
    recipes = [recipe for recipe in RECIPES if options.only is None or recipe in (BASE, *options.only)]
    overrides = options.overrides
    base = compose([f"+experiment={BASE}", *overrides])
    runs = train(recipes, overrides, console)
    target = Target.load(base.target)
    made = list(ways(target, runs, overrides, options.new_tokens))
    chosen = evenly(prompts(base, "heldout"), options.prompts)
    where = provenance()
    key = {
        "ways": [way.name for way in made],
        "drafts": {recipe: draft_hash(run / "draft") for recipe, run in runs.items()},
        "prompts": [prompt.id for prompt in chosen],
        "settings": [
            options.new_tokens,
            options.temperatures,
            overrides,
            seed_of(0, 0, chosen[0]),
        ],
        "git": where["git"],
    }
    partial = options.out.with_suffix(".partial.jsonl")
    lines = measure(made, chosen, options.temperatures, partial, json.loads(json.dumps(key)), console)
    found = results(lines, made, chosen)
    others = [line["others"] for line in lines]
    written = {
        "conditions": where | {"others_mean": sum(others) / len(others), "new_tokens": options.new_tokens},
        "training": {recipe: training(run) for recipe, run in runs.items()},
        "rows": found,
    }
    write_json(options.out, written)
    for temperature in options.temperatures:
        here = [row for row in found if row["temperature"] == temperature and row["category"] == "all"]
        console.print(table(here, temperature))
        picture = options.out.with_name(f"{options.out.stem}_t{temperature:g}.svg")
        drafted = [(row["method"], row) for row in here if row["method"] != PLAIN]
        write_text(picture, standalone(speedups(drafted, picture.stem)))
    partial.unlink()
    console.print(f"written: {options.out}")


def training(run: Path) -> dict[str, Any]:
    """What a draft's training took."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return {name: summary[name] for name in ("steps", "epochs", "tokens", "wall_seconds")}


def table(here: Sequence[dict[str, Any]], temperature: float) -> Table:
    made = Table(title=f"temperature {temperature:g}", title_justify="left")
    for name in ("way", "τ (95 %)", "tokens/s", "speedup (95 %)", "own ms", "identical"):
        made.add_column(name, justify="left" if name == "way" else "right")
    for row in sorted(here, key=lambda row: row["speedup"] or 1.0):
        low, high = row["mean_acceptance_length_ci"] or (None, None)
        own = (row["decoder_ms"] or {}).get("p50")
        made.add_row(
            row["method"],
            "" if low is None else f"{row['mean_acceptance_length']:.2f} ({low:.2f}-{high:.2f})",
            f"{row['tokens_per_s']:.1f}",
            "1"
            if row["speedup"] is None
            else "{:.2f} ({:.2f}-{:.2f})".format(row["speedup"], *row["speedup_ci"]),
            "" if own is None else f"{own:.2f}",
            "" if row["identical_count"] is None else f"{row['identical_count']}/{row['prompts']}",
        )
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.compare_methods", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("overrides", nargs="*", help="key=value, for every recipe")
    parser.add_argument("--only", nargs="+", choices=RECIPES, help="these recipes, and EAGLE-3")
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts, evenly by category")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--out", type=Path, default=Path("artifacts/compare_methods.json"))
    with paragraphs():
        quiet_libraries()
        compare(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
