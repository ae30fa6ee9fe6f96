"""`python -m eval.compare A/measure.json B/measure.json ... --output FOLDER`: which one is better, and may
they be compared at all?

Writes compare.html, compare.json and pictures/*.png to FOLDER, and prints a table. What differs in how
they were measured comes first, with what it spoils; then each setting (temperature, batch size, lossless
or not) with what each measurement found there, and the first one as the yardstick (eval/comparison.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape as literally
from rich.panel import Panel
from rich.table import Table

from configs.entry import paragraphs
from eval.comparison import Measured, comparison, members, read
from eval.page import Shown, number, page, percent, ranged, scrolled, times, tr
from eval.pictures import SERIES, Picture, distributions, dots, position_lines, sweep
from eval.report import write_pictures
from eval.sections import DRAWN, LATENCIES, TAILS, curve_of, percentiles
from eval.terminal import wide_console, with_interval
from models.files import ensure_writable, write_json, write_text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.compare",
        description="Sets measurements side by side; the first is the yardstick.",
    )
    parser.add_argument(
        "measurements", nargs="+", type=Path, help="measure.json files, or the folders they are in"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for compare.html, compare.json, pictures/"
    )
    options = parser.parse_args(arguments)
    with paragraphs():
        compare(options.measurements, options.output, wide_console())


def compare(paths: Sequence[Path], output: Path, console: Console) -> dict[str, Any]:
    """Reads, compares, writes, prints; returns what compare.json holds. Raises `MeasurementError` (fewer
    than two, one twice, a file that is no measurement) and `StorageError`."""
    ensure_writable(output)
    measured = read(paths)
    written = comparison(measured)
    write_json(output / "compare.json", written)
    write_text(output / "compare.html", report(measured, written))
    write_pictures(output / "pictures", every_picture(measured, written))
    show(written, console)
    for name in ("compare.json", "compare.html", "pictures"):
        console.print(str(output / name), markup=False, highlight=False, soft_wrap=True)
    return written


# ---- the page ----


def sentence(first: str, row: dict[str, Any]) -> str:
    """What holding a measurement against the first one says."""
    held, name = row["against_first"], row["name"]
    if held is None or held["speedup"] is None:
        return (
            f"{name} and {first} share no prompt that both decoded alone (those of a batch share its time): "
            "compare their own figures."
        )
    ends = held["speedup_ci"]
    over = (
        f"{with_interval(held['speedup'], ends, times)} its speedup on the {held['prompts']} prompts of both"
    )
    if ends is None or ends[0] <= 1 <= ends[1]:
        return f"{name} is not shown to be faster or slower than {first}: {over}."
    return f"{name} is {'faster' if held['speedup'] > 1 else 'slower'} than {first}: {over}."


def report(measured: Sequence[Measured], written: dict[str, Any]) -> str:
    """One HTML file without anything from outside."""
    first, *others = [one.name for one in measured]
    body = [
        f"<h1>{escape(first)} against {escape(' and '.join(others))}</h1>",
        f'<p class="sub">{len(measured)} measurements; {escape(first)} is the yardstick.</p>',
        alarm(written),
        "<h2>What is compared</h2>",
        drafts(written["measurements"]),
    ]
    shown = list(across(measured, written))
    if shown:
        body += ["<h2>All settings</h2>", *[one.html() for one in shown]]
    for setting in written["settings"]:
        body.append(section(measured, setting))
    body += ["<h2>Conditions</h2>", condition_table(written["conditions"])]
    return page(f"{first} against {' and '.join(others)}", body)


def alarm(written: dict[str, Any]) -> str:
    """The conditions that differ, before any figure."""
    if not written["warnings"]:
        return (
            '<div class="card verdict pays"><b>Measured under like conditions:</b> target, prompts, '
            "sampling, dtype, hardware, threads, commit and versions are the same, and the machine "
            "was idle.</div>"
        )
    said = "".join(f"<p>{escape(text)}</p>" for text in written["warnings"])
    differ = [one for one in written["conditions"] if not one["alike"]]
    table = condition_table(differ, "spoils") if differ else ""
    return f'<div class="card warning alarm"><b>Unlike conditions.</b>{said}</div>{table}'


def condition_table(held: Sequence[dict[str, Any]], last: str = "") -> str:
    heads = ["", *map(escape, held[0]["values"]), *([last] if last else [])]
    lines = []
    for one in held:
        cells = [f"<td>{one['condition']}</td>"] + [text_cell(value) for value in one["values"].values()]
        if last:
            cells.append(text_cell(one[last]))
        kind = "" if one["alike"] else ' class="unlike"'
        lines.append(f"<tr{kind}>{''.join(cells)}</tr>")
    return f'<div class="texts">{scrolled(heads, lines)}</div>'


def text_cell(value: str) -> str:
    return f'<td class="text">{escape(value)}</td>'


def drafts(described: Sequence[dict[str, Any]]) -> str:
    lines = []
    for i, one in enumerate(described):
        words = (
            f"{one['method']}, {one['parameters'] / 1e6:.1f} M parameters",
            one["drafting"],
            one["created"][:16].replace("T", " "),
        )
        lines.append(f"<tr><td>{mark(i)}{escape(one['name'])}</td>{''.join(map(text_cell, words))}</tr>")
    return f'<div class="texts">{scrolled(("", "draft", "drafting", "measured"), lines)}</div>'


def mark(i: int) -> str:
    """A dot in the colour of the i-th measurement."""
    variable = "--draft" if i % len(SERIES) == 0 else f"--series{i % len(SERIES) + 1}"
    return f'<span class="mark" style="background:var({variable})"></span>'


def heading(setting: dict[str, Any]) -> str:
    lossy = "" if setting["lossless"] else ", lossy verification"
    return f"temperature {setting['temperature']:g}, batch {setting['batch_size']}{lossy}"


def section(measured: Sequence[Measured], setting: dict[str, Any]) -> str:
    """A setting: the table, what it says, the pictures, the categories, the latencies."""
    rows = [row for row in setting["rows"] if row["category"] == "all"]
    said = [sentence(setting["first"], row) for row in rows[1:]]
    if setting["missing"]:
        said.append(f"Not measured at this setting: {', '.join(setting['missing'])}.")
    listed = "".join(f"<p>{escape(text)}</p>" for text in said)
    shown = "".join(one.html() for one in drawings(measured, setting))
    title = heading(setting)
    return (
        f'<h2 class="setting">{title[0].upper()}{title[1:]}</h2>'
        + (f'<div class="card verdict">{listed}</div>' if listed else "")
        + summary(rows)
        + shown
        + by_category(setting)
        + latencies(rows)
    )


def summary(rows: Sequence[dict[str, Any]]) -> str:
    heads = (
        "",
        "speedup",
        "against first",
        "τ",
        "Δτ",
        "accepted",
        "plain tok/s",
        "draft tok/s",
        "prompts",
    )
    lines = []
    for row in rows:
        held = row["against_first"] or dict.fromkeys(
            ("speedup", "speedup_ci", "mean_acceptance_length", "mean_acceptance_length_ci")
        )
        cells = (
            escape(row["name"]),
            ranged(row["speedup"], row["speedup_ci"], times),
            ranged(held["speedup"], held["speedup_ci"], times),
            ranged(row["mean_acceptance_length"], row["mean_acceptance_length_ci"], number),
            ranged(held["mean_acceptance_length"], held["mean_acceptance_length_ci"], signed),
            percent(row["acceptance_rate"]),
            number(row["plain"] and row["plain"]["tokens_per_s"], 1),
            number(row["tokens_per_s"], 1),
            str(row["prompts"]),
        )
        lines.append(tr(cells))
    return f'<div class="dense">{scrolled(heads, lines)}</div>'


def signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}"


def by_category(setting: dict[str, Any]) -> str:
    """Speedup and τ of each, category by category."""
    known = {(row["category"], row["name"]): row for row in setting["rows"]}
    shown = list(dict.fromkeys(name for _, name in known))
    lines = []
    for category in dict.fromkeys(category for category, _ in known):
        cells = [escape(category)]
        for name in shown:
            row = known.get((category, name))
            cells.append(ranged(row["speedup"], row["speedup_ci"], times) if row else "–")
            tau = "mean_acceptance_length"
            cells.append(ranged(row[tau], row[f"{tau}_ci"], number) if row else "–")
        lines.append(tr(cells, "all" if category == "all" else ""))
    heads = ["", *[f"{escape(name)} {what}" for name in shown for what in ("speedup", "τ")]]
    return f'<h3>By category</h3><div class="dense">{scrolled(heads, lines)}</div>' if len(lines) > 1 else ""


def latencies(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for name, said in LATENCIES.items():
        for row in rows:
            sides = (("plain", row["plain"]), ("speculative", row))
            lines += [
                tr((f"{said} <small>{escape(row['name'])}, {side}</small>", *percentiles(values[name])))
                for side, values in sides
                if values is not None
            ]
    return f"<h3>Latency</h3>{scrolled(('milliseconds', 'p50', 'p90', 'p99', 'values'), lines)}"


# ---- pictures ----


def every_picture(measured: Sequence[Measured], written: dict[str, Any]) -> list[Picture]:
    shown = [*across(measured, written)]
    for setting in written["settings"]:
        shown += drawings(measured, setting)
    return [one.picture for one in shown]


def across(measured: Sequence[Measured], written: dict[str, Any]) -> Iterator[Shown]:
    """Speedup against batch size and against temperature, a line for each measurement (and each value of the
    other)."""
    rows = [
        (setting, row) for setting in written["settings"] if setting["lossless"] for row in setting["rows"]
        if row["category"] == "all"
    ]  # fmt: skip
    for over, along, axis in (
        ("batch_size", "temperature", "sequences decoded together"),
        ("temperature", "batch_size", "temperature"),
    ):
        if len({setting[over] for setting, _ in rows}) < 2:
            continue
        lines: dict[str, list[tuple[float, Any]]] = {}
        several = len({setting[along] for setting, _ in rows}) > 1
        for setting, row in rows:
            label = (
                f"{row['name']}, {along.replace('_size', '')} {setting[along]:g}" if several else row["name"]
            )
            lines.setdefault(label, []).append((setting[over], (row["speedup"], row["speedup_ci"])))
        name = f"speedup-by-{over.replace('_', '-')}"
        text = "Speedup over plain decoding at the same temperature and batch size; whiskers are intervals."
        yield Shown(sweep(list(lines.items()), axis, name), f"Speedup against {over.replace('_', ' ')}", text)


def drawings(measured: Sequence[Measured], setting: dict[str, Any]) -> Iterator[Shown]:
    at = setting["temperature"], setting["batch_size"], setting["lossless"]
    here = members(measured, at)
    where = f"t{at[0]:g}-b{at[1]}" + ("" if at[2] else "-lossy")
    labels = [one.name for one in measured]
    colours = {one.name: SERIES[i % len(SERIES)] for i, one in enumerate(measured)}
    known = {(row["category"], row["name"]): row for row in setting["rows"]}

    def point(category: str, name: str) -> tuple[float | None, Sequence[float] | None]:
        row = known.get((category, name))
        return (row["speedup"], row["speedup_ci"]) if row else (None, None)

    ordered = dict.fromkeys(category for category, _ in known)
    lines = [(category, [point(category, name) for name in labels]) for category in ordered]
    yield Shown(
        dots(lines, labels, "times as fast as plain decoding", f"speedup-{where}"),
        "Speedup by category",
        "Over plain decoding of the same prompts in the same run. Whiskers are each measurement's own "
        "interval; that two of them overlap does not show that there is no difference: the table's paired "
        "comparison sees finer.",
    )
    reached = [(one.name, (one.row(at) or {}).get("conditional_acceptance") or []) for one in measured]
    if any(shares for _, shares in reached):
        yield Shown(
            position_lines(reached, f"positions-{where}"),
            "Acceptance by position",
            "The share accepted among the rounds that got to that position (of a tree, to that depth, where "
            "any of its tokens counts).",
        )
    for name, axis, title, text in DRAWN:
        curves = []
        for one in here:
            sides = [("speculative", one.row(at), False)] + (
                [("plain", one.plain(at), True)] if len(here) < 4 else []
            )
            for side, row, dashed in sides:
                label = f"{one.name}, {side}" if len(sides) > 1 else one.name
                curve = row and curve_of(one.found, row, name, label, colours[one.name], dashed)
                if curve:
                    curves.append(curve)
        if curves:
            yield Shown(
                distributions(curves, axis, f"{name.removesuffix('_ms')}-{where}"), title, f"{text} {TAILS}"
            )


# ---- the terminal ----


def show(written: dict[str, Any], console: Console) -> None:
    for text in written["warnings"]:
        console.print(Panel(literally(text), title="Unlike conditions", style="bold red"))
    for one in written["conditions"]:
        if not one["alike"]:
            values = "; ".join(f"{name}: {value}" for name, value in one["values"].items())
            console.print(f"{one['condition']} (spoils {one['spoils']}): {values}", markup=False)
    for setting in written["settings"]:
        console.print(table(setting))
        for row in setting["rows"]:
            if row["category"] == "all" and row["name"] != setting["first"]:
                console.print(sentence(setting["first"], row), markup=False)


def table(setting: dict[str, Any]) -> Table:
    made = Table(title=f"{heading(setting)}, all prompts", title_justify="left")
    for name in ("measurement", "τ", "accepted", "tok/s", "speedup", f"against {setting['first']}"):
        made.add_column(literally(name), justify="left" if name == "measurement" else "right")
    for row in setting["rows"]:
        if row["category"] != "all":
            continue
        held = row["against_first"] or {"speedup": None, "speedup_ci": None}
        plain = row["plain"] and row["plain"]["tokens_per_s"]
        made.add_row(
            literally(row["name"]),
            with_interval(row["mean_acceptance_length"], row["mean_acceptance_length_ci"], number),
            percent(row["acceptance_rate"]),
            f"{number(plain, 1)} → {number(row['tokens_per_s'], 1)}",
            with_interval(row["speedup"], row["speedup_ci"], times),
            with_interval(held["speedup"], held["speedup_ci"], times),
        )
    return made


if __name__ == "__main__":
    main()
