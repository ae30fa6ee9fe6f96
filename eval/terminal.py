"""What a measurement says in the terminal: a table, a verdict, warnings, and where the files are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from eval.report import interval, number, percent, sentence, times, tree


def show(measurement: dict[str, Any], output: Path, console: Console) -> None:
    for found in measurement["verdicts"]:
        temperature = found["temperature"]
        here = [row for row in measurement["rows"] if row["temperature"] == temperature]
        console.print(table(here, temperature))
        console.print(
            f"[bold]{sentence(found['verdict'])}[/] Speedup {times(found['speedup'])} "
            f"({here[0]['confidence'] * 100:g} % interval {interval(found['speedup_ci'], times)}); plain "
            "decoding is 1.00×."
        )
        for note in {
            note for row in here if row["category"] == row["context_bucket"] == "all" for note in row["notes"]
        }:
            console.print(f"  {note}", style="dim", markup=False)
    compared = measurement["generate"]
    if compared is not None:
        console.print(
            f"Against transformers' generate: plain identical in {compared['identical_plain']}, speculative "
            f"in {compared['identical_draft']} of {compared['prompts']}."
        )
    found = measurement["load"]
    warn_if_busy(console, found["others_during"], found["limit"], "during the run")
    for name in ("measure.json", "report.html"):
        console.print(str(output / name), markup=False, highlight=False, soft_wrap=True)


def table(rows: Sequence[dict[str, Any]], temperature: float) -> Table:
    speculative = next(row for row in rows if row["method"] != "plain")
    made = Table(
        title=f"Held-out prompts, temperature {temperature:g}, {rows[0]['dtype']}, {tree(speculative)} "
        f"by {' and '.join(speculative['drafters'])}, batch {speculative['batch_size']}",
        title_justify="left",
    )
    for name in ("category", "τ", "accepted", "tok/s", "speedup", "identical"):
        made.add_column(name, justify="left" if name == "category" else "right")
    plain = {
        row["category"]: row for row in rows if row["method"] == "plain" and row["context_bucket"] == "all"
    }
    drafted = [row for row in rows if row["method"] != "plain" and row["context_bucket"] == "all"]
    for row in sorted(drafted, key=lambda row: (row["category"] == "all", row["category"])):
        made.add_row(
            escape(row["category"]),
            with_interval(row["mean_acceptance_length"], row["mean_acceptance_length_ci"], number),
            percent(row["acceptance_rate"]),
            f"{number(plain[row['category']]['tokens_per_s'], 1)} → {number(row['tokens_per_s'], 1)}",
            with_interval(row["speedup"], row["speedup_ci"], times),
            percent(row["identical_outputs"], 0),
            style="bold" if row["category"] == "all" else "",
        )
    return made


def with_interval(
    value: float | None, ends: Sequence[float] | None, form: Callable[[float | None], str]
) -> str:
    return form(value) if ends is None else f"{form(value)} [{form(ends[0])}, {form(ends[1])}]"


def warn_if_busy(console: Console, share: float, limit: float, when: str) -> None:
    if share > limit:
        console.print(
            Panel(
                f"Other processes use {share:.0%} of the processors {when}. Times measured on a busy "
                "machine mislead, speedups too: stop the others and measure again.",
                title="The machine is busy",
                style="bold red",
            )
        )


def wide_console() -> Console:
    """The terminal; where there is none, wide enough for the table."""
    return Console(width=None if sys.stdout.isatty() else 110)


def bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
