"""The tables and pictures of README.md and docs/ that show results, rebuilt: `python -m scripts.figures`.

Results lie in docs/ as JSON, cut down to what the figures need. To put a new one in an old one's place, run
the command that makes it (`--list` names it) and hand it over:

    python -m scripts.figures --take demo=runs/smollm2_cpu/TIME/measure/measure.json

A table stands in its page between <!-- NAME: begin --> and <!-- NAME: end -->. `--check` writes nothing, and
its exit status is 3 where a page or picture is not what its result gives. The text around a figure (its
conditions, what it shows) is written by hand, and so is what train.plan computes: its command stands there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from configs.entry import paragraphs
from configs.errors import ConfigError
from eval.pictures import Picture, speedups, standalone
from eval.validate import picture as validation
from eval.validate import summary
from models.files import storage, write_json, write_text
from scripts.serve_check import markdown as served

ROOT = Path(__file__).parents[1]
Json = dict[str, Any]

# What a kept result has, if it had it.
KEPT = (
    "schema",
    "created",
    "git",
    "hardware",
    "versions",
    "conditions",
    "load",
    "target",
    "draft",
    "training",
)
ROW = (
    "method",
    "category",
    "temperature",
    "batch_size",
    "prompts",
    "mean_acceptance_length",
    "mean_acceptance_length_ci",
    "tokens_per_s",
    "speedup",
    "speedup_ci",
    "identical_count",
    "decoder_ms",
)


@dataclass(frozen=True)
class Figure:
    """A table in `page`, pictures beside docs/, and the result that they show."""

    name: str
    page: str
    command: str  # makes the result anew
    result: str  # where the command leaves it
    sign: str  # an entry that only this kind of result has
    table: Callable[[Json], str]
    pictures: Callable[[Json], Sequence[Picture]] = lambda _: ()
    keep: Callable[[Json], Json] = lambda result: result

    @property
    def data(self) -> str:
        return f"docs/{self.name}.json"


# ---- what is kept ----


def whole(result: Json) -> Json:
    """A measurement's rows over all lengths of prompts."""
    rows = [row for row in result["rows"] if row["context_bucket"] == "all"]
    return kept(result) | {"rows": [{name: row[name] for name in ROW if name in row} for row in rows]}


def overall(result: Json) -> Json:
    """Of those, the rows over all categories."""
    return kept(result) | {"rows": [row for row in whole(result)["rows"] if row["category"] == "all"]}


def kept(result: Json) -> Json:
    return {name: result[name] for name in KEPT if name in result}


def without_output(result: Json) -> Json:
    """Without the place that it was written to, which is only its machine's."""
    return result | {"settings": {name: part for name, part in result["settings"].items() if name != "out"}}


def without_config(result: Json) -> Json:
    return {name: part for name, part in result.items() if name != "config"}


# ---- tables ----


def lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    table = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join([*table, *(f"| {' | '.join(cells)} |" for cells in rows)])


def ranged(value: float, ends: Sequence[float] | None, unit: str = "×") -> str:
    return f"{value:.2f}{unit}" + ("" if ends is None else f" [{ends[0]:.2f}, {ends[1]:.2f}]")


def demo(result: Json) -> str:
    """By category, the fastest first, and all together."""
    plain = {row["category"]: row for row in result["rows"] if row["method"] == "plain"}
    drafted = [row for row in result["rows"] if row["method"] != "plain"]
    made = []
    for row in sorted(drafted, key=lambda row: (row["category"] == "all", -row["speedup"])):
        tau, name = f"{row['mean_acceptance_length']:.2f}", row["category"]
        speed = f"{plain[name]['tokens_per_s']:.1f} → {row['tokens_per_s']:.1f}"
        gain, spread = f"{row['speedup']:.2f}×", ranged(row["speedup"], row["speedup_ci"]).partition(" ")[2]
        if name == "all":
            low, high = row["mean_acceptance_length_ci"]
            name, tau, gain = "**all**", f"**{tau}** [{low:.2f}, {high:.2f}]", f"**{gain}**"
        made.append((name, tau, speed, f"{gain} {spread}".rstrip()))
    return lines(("category", "τ", "tokens/s, plain → speculative", "speedup"), made)


def bench(result: Json) -> str:
    """Each way of ours against its peer."""
    best, rows = result["best_assisted"], result["rows"]
    layers = result["settings"]["draft_layers"]
    small, assisted = (best[side].partition("-")[2] for side in ("small", "assisted"))
    named = {
        "plain": ("plain", "`generate`"),
        "lookup": ("lookup", "`prompt_lookup_num_tokens=10`"),
        best["small"]: (
            f"a small draft model (the target's first {layers} layers, untrained), best K = {small}",
            f"`assistant_model`, best k = {assisted}",
        ),
        "chain": ("EAGLE-3, chain", "ours, plain"),
        "tree": ("EAGLE-3, dynamic tree of 8 nodes", "ours, plain"),
        "chain+lookup": ("EAGLE-3, chain, merged with lookup", "ours, plain"),
    }
    made = []
    for name, (ours, peer) in named.items():
        ratio = best["ratio"] if name == best["small"] else rows[name]["against_peer"]
        made.append((ours, f"{rows[name]['tokens_per_s']:.1f}", peer, ranged(ratio[0], ratio[1:])))
    return lines(("ours", "tokens/s", "against", "ratio"), made)


def methods(result: Json) -> str:
    """Every way, the fastest at the lowest temperature first."""
    drafted = [row for row in result["rows"] if row["method"] != "plain"]
    temperatures = sorted({row["temperature"] for row in drafted})
    at = {(row["method"], row["temperature"]): row for row in drafted}
    names = [row["method"] for row in drafted if row["temperature"] == temperatures[0]]
    made = []
    for name in sorted(names, key=lambda name: -at[name, temperatures[0]]["speedup"]):
        cells = [name]
        for temperature in temperatures:
            row = at[name, temperature]
            gain, _, spread = ranged(row["speedup"], row["speedup_ci"]).partition(" ")
            tau = ranged(row["mean_acceptance_length"], row["mean_acceptance_length_ci"], "")
            cells += [tau, f"**{gain}** {spread}".rstrip()]
        made.append(cells)
    return lines(("way", *(f"{head}, T {t:g}" for t in temperatures for head in ("τ", "speedup"))), made)


def method_pictures(result: Json) -> list[Picture]:
    drafted = [row for row in result["rows"] if row["method"] != "plain"]
    return [
        speedups(
            [(row["method"], row) for row in drafted if row["temperature"] == temperature],
            f"compare_methods_t{temperature:g}",
        )
        for temperature in sorted({row["temperature"] for row in drafted})
    ]


def predicted(result: Json) -> str:
    """Every setting, and the errors in a sentence."""
    made = [
        (
            row["draft"],
            row["drafting"],
            str(row["batch_size"]),
            f"{row['tokens']['predicted']:.2f}, {ranged(row['tokens']['measured'], row['tokens']['ci'], '')}",
            f"{row['round_ms']['predicted']:.1f}, {row['round_ms']['measured']:.1f}",
            f"{row['speedup']['predicted']:.2f}×, {row['speedup']['measured']:.2f}×",
            f"{row['speedup']['error']:+.1%}".replace("-", "−"),
        )
        for row in result["rows"]
    ]
    heads = ("draft", "drafting", "batch", "tokens a round: predicted, measured")
    machine, commit = result["hardware"], (result["git"] or {}).get("commit", "unknown")[:7]
    told = result["acceptance_from"]
    said = (
        f"{summary(result)} {result['prompts']} held-out prompts of at most {result['max_new_tokens']} new "
        f"tokens, temperature {result['temperature']:g}, {result['dtype']}; acceptance from "
        f"{told['prompts']} other held-out prompts; {machine['threads']} threads on {machine['cores']} cores "
        f"of {machine['cpu']}, others used {result['load']['others_during']:.1%}; commit {commit}, "
        f"{result['created'][:10]}."
    )
    table = lines((*heads, "ms a round", "speedup", "off by"), made)
    return f"![predicted over measured speedup](validate.svg)\n\n{table}\n\n{said}"


def scaled(result: Json) -> str:
    """Every number of processes, and under what conditions in a sentence."""
    made = [
        (
            str(row["processes"]),
            row["strategy"] if row["processes"] > 1 else "",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['seconds_per_step']:.2f}",
            f"{row['data_wait']:.1%}",
            f"{row['speedup']:.2f}×",
            f"{row['efficiency']:.0%}",
        )
        for row in result["rows"]
    ]
    heads = ("processes", "strategy", "tokens/s", "s a step", "data wait", "speedup", "efficiency")
    how, recipe, machine = result["scaling"], result["recipe"], result["hardware"]
    said = (
        f"`{' '.join(how['overrides'])}`: {recipe['method']}, {recipe['accumulation']} micro-batches of "
        f"{recipe['batch_tokens']} padded tokens a step, {recipe['features']} features, {recipe['autocast']}"
        f", {recipe['optimizer']}; {result['rows'][0]['steps']} steps timed in {how['rounds']} rounds; "
        f"{how['threads']} thread a process on {machine['cores']} cores of {machine['cpu']}, others used "
        f"{result['load']['others_during']:.1%}; commit {(result['git'] or {}).get('commit', 'unknown')[:7]}"
        f", {result['created'][:10]}."
    )
    return f"{lines(heads, made)}\n\n{said}"


FIGURES = (
    Figure(
        "demo",
        "README.md",
        "make demo",
        "runs/smollm2_cpu/TIME/measure/measure.json",
        "draft",
        demo,
        keep=whole,
    ),
    Figure(
        "bench_decoding",
        "README.md",
        "python -m scripts.bench_decoding --count 6 --max-new-tokens 32 --draft runs/smollm2_cpu/TIME/draft",
        "artifacts/bench_decoding.json",
        "best_assisted",
        bench,
        keep=without_output,
    ),
    Figure(
        "compare_methods",
        "docs/methods.md",
        "python -m scripts.compare_methods trainer.epochs=3 --prompts 14 --new-tokens 64",
        "artifacts/compare_methods.json",
        "training",
        methods,
        method_pictures,
        overall,
    ),
    Figure(
        "serve_check",
        "docs/serving.md",
        "python -m scripts.serve_check --all --out docs/serve_check.json",
        "docs/serve_check.json",
        "rows",
        lambda result: served(result["rows"]),
    ),
    Figure(
        "validate",
        "docs/measuring.md",
        "python -m eval.validate +experiment=smollm2_cpu 'validate.draft_tokens=[2,4]' "
        "'validate.tree_nodes=[8,16]' 'validate.batch_sizes=[1,4]' eval.tree_prompts=24 "
        "eval.tree_nodes=24 decode.max_new_tokens=48",
        "runs/smollm2_cpu/TIME/measure/validate.json",
        "acceptance_from",
        predicted,
        lambda result: [validation(result["rows"])],
        without_config,
    ),
    Figure(
        "scaling",
        "docs/own_model.md",
        "python -m scripts.scaling +experiment=smollm2_cpu trainer.accumulation=2 --steps 12",
        "artifacts/scaling.json",
        "scaling",
        scaled,
    ),
)


# ---- pages ----


def read_json(path: Path) -> Json:
    with storage(path, "read"):
        data = path.read_bytes()
    try:
        found = json.loads(data)
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}. Restore it, or make it anew.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no result: it is not a JSON object. Restore it, or make it anew.")
    return found


def placed(page: str, name: str, table: str) -> str:
    """The text of a page with the table between its marks."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ConfigError(f"A page has no place for {name}: write {begin} and {end} on lines of their own.")
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


def files_of(figure: Figure, root: Path) -> dict[Path, str]:
    """What its result makes of a figure's page and pictures."""
    page, file = root / figure.page, root / figure.data
    table, pictures = drawn(figure, read_json(file), file)
    made = {page: placed(page.read_text(encoding="utf-8"), figure.name, table)}
    return made | {root / "docs" / f"{one.name}.svg": standalone(one) for one in pictures}


def drawn(figure: Figure, result: Json, file: Path) -> tuple[str, Sequence[Picture]]:
    """The table and the pictures of a result; a `ConfigError` if `file` holds another one's."""
    try:
        if figure.sign not in result:
            raise KeyError(figure.sign)
        return figure.table(result), figure.pictures(result)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{file} is no result that {figure.name} can be drawn from ({type(error).__name__}: {error}). "
            f"Give what {figure.command} wrote."
        ) from error


def take(figure: Figure, file: Path, root: Path) -> None:
    """Keeps a new result, once the figure was drawn from it."""
    result = read_json(file)
    drawn(figure, result, file)
    kept = figure.keep(result)
    drawn(figure, kept, file)
    write_json(root / figure.data, kept)


def stale(figure: Figure, root: Path) -> dict[Path, str]:
    """The files that are not what they should be."""
    return {
        path: text
        for path, text in files_of(figure, root).items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def rebuild(figures: Sequence[Figure], root: Path, check: bool, console: Console) -> int:
    """Writes what has changed, or with `check` only says so: the exit status."""
    status = 0
    for figure in figures:
        if not (root / figure.data).exists():
            console.print(
                f"{figure.name}: no {figure.data}. Run {figure.command}, then python -m scripts.figures "
                f"--take {figure.name}={figure.result}",
                markup=False,
            )
            continue
        for path, text in stale(figure, root).items():
            console.print(
                f"{figure.name}: {path.relative_to(root)} {'is not up to date' if check else 'written'}"
            )
            if check:
                status = 3
            else:
                write_text(path, text)
    return status


def show(figures: Sequence[Figure], console: Console) -> None:
    table = Table("figure", "page", "command")
    for figure in figures:
        table.add_row(figure.name, figure.page, figure.command)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.figures", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--take", nargs="+", default=[], metavar="NAME=FILE", help="keep these results first")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit status 3 if something would"
    )
    parser.add_argument("--list", action="store_true", help="name every figure and the command that makes it")
    options = parser.parse_args(arguments)
    console = Console(soft_wrap=True)
    known = {figure.name: figure for figure in FIGURES}
    with paragraphs():
        if options.list:
            return show(FIGURES, console)
        for given in options.take:
            name, _, file = given.partition("=")
            if name not in known or not Path(file).is_file():
                raise ConfigError(
                    f"--take {given}: give NAME=FILE, an existing file and one of {', '.join(known)}."
                )
            take(known[name], Path(file), ROOT)
        if status := rebuild(FIGURES, ROOT, options.check, console):
            sys.exit(status)


if __name__ == "__main__":
    main()
