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

from eval.measurement import tree
from eval.page import interval, number, percent, sentence, times


def show(measurement: dict[str, Any], output: Path, console: Console) -> None:
    """A table by category for each temperature, at the smallest batch; one over all settings if they are
    several; then the advice."""
    verdicts = measurement["verdicts"]
    shown = set()
    for found in verdicts:
        temperature, batch_size = found["temperature"], found["batch_size"]
        if temperature in shown:
            continue
        shown.add(temperature)
        here = [
            r for r in measurement["rows"] if (r["temperature"], r["batch_size"]) == (temperature, batch_size)
        ]
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
    if len(verdicts) > 1:
        console.print(sweep(measurement))
    compared = measurement["generate"]
    if compared is not None:
        console.print(
            f"Against transformers' generate: plain identical in {compared['identical_plain']}, speculative "
            f"in {compared['identical_draft']} of {compared['prompts']}."
        )
    left_out = measurement["traffic"]["conversations"]["turns_left_out"]
    if left_out:
        console.print(f"{left_out} turns of conversations do not fit into the target's context: left out.")
    found = measurement["load"]
    warn_if_busy(console, found["others_during"], found["limit"], "during the run")
    console.print("Advice", style="bold")
    for said in measurement["advice"]:
        console.print(f"- {said}", markup=False, highlight=False)
    for name in ("measure.json", "report.html"):
        console.print(str(output / name), markup=False, highlight=False, soft_wrap=True)


def table(rows: Sequence[dict[str, Any]], temperature: float) -> Table:
    """By category, of one setting."""
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
            *cells(plain[row["category"]], row),
            percent(row["identical_outputs"], 0),
            style="bold" if row["category"] == "all" else "",
        )
    return made


def sweep(measurement: dict[str, Any]) -> Table:
    """Every setting in a line."""
    made = Table(title="All prompts by setting", title_justify="left")
    for name in ("temperature", "batch", "in flight", "τ", "accepted", "tok/s", "speedup", ""):
        made.add_column(name, justify="right" if name else "left")
    whole = [row for row in measurement["rows"] if row["category"] == row["context_bucket"] == "all"]
    plain, drafted = (
        {
            (row["temperature"], row["batch_size"]): row
            for row in whole
            if (row["method"] == "plain") is wanted
        }
        for wanted in (True, False)
    )
    for found in measurement["verdicts"]:
        here = found["temperature"], found["batch_size"]
        made.add_row(
            f"{here[0]:g}",
            str(here[1]),
            number(drafted[here]["sequences_in_flight"], 1),
            *cells(plain[here], drafted[here]),
            found["verdict"].removeprefix("speculation ").split(" (")[0],
        )
    return made


def cells(plain: dict[str, Any], drafted: dict[str, Any]) -> tuple[str, ...]:
    """τ, acceptance, tokens a second and speedup."""
    return (
        with_interval(drafted["mean_acceptance_length"], drafted["mean_acceptance_length_ci"], number),
        percent(drafted["acceptance_rate"]),
        f"{number(plain['tokens_per_s'], 1)} → {number(drafted['tokens_per_s'], 1)}",
        with_interval(drafted["speedup"], drafted["speedup_ci"], times),
    )


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
