"""The reports' pictures: SVG elements to stand inside an HTML page, in the page's own colours, or PNG files.

A `Picture` says what is drawn and is drawn when it is asked for, so that one description serves the page,
a file and a logger. Each function below makes one from plain numbers. Colours are those of the light
theme; an SVG element gets the page's CSS variables in their place (eval/report.css). Pictures are narrow,
so that their text can still be read on a telephone.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

Point = tuple[float | None, Sequence[float] | None]  # a value and its interval

INK, MUTED, PLAIN, DRAFT = "#1b2330", "#8b95a5", "#8a94a6", "#2f6fed"
SERIES = (DRAFT, "#c2600a", "#12805d", "#9b51c9", "#c2385f", "#7a6a00")
MARKERS = "osD^vP"
# What stands for them in a page, and in an SVG file that must be readable on light and on dark pages.
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    PLAIN: "--plain",
    DRAFT: "--draft",
    **{colour: f"--series{i}" for i, colour in enumerate(SERIES[1:], 2)},
}
EITHER = {INK: "#7d8590", MUTED: "#9aa1a9", PLAIN: "#9aa1a9", DRAFT: "#2f81f7"}

WIDTH = 5.2  # inches: of what stands in a page
STYLE = {
    "svg.fonttype": "none",
    "font.size": 11,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 10,
}


@dataclass(frozen=True)
class Picture:
    """What `plot` draws, the same for the same input."""

    name: str  # its own within a page; a file's name without its ending
    plot: Callable[[Axes], None]
    height: float = 2.9  # inches
    width: float = WIDTH

    def svg(self) -> str:
        """An SVG element whose colours are the page's variables."""
        text = self.save("svg", transparent=True, metadata={"Date": None, "Creator": None}).decode()
        svg = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
        used = set(re.findall(r"#([\w.-]+)", svg))
        # Ids that nothing refers to would repeat from picture to picture.
        svg = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in used else "", svg)
        for colour, variable in VARIABLES.items():
            svg = svg.replace(colour, f"var({variable})")
        return svg

    def png(self) -> bytes:
        """A PNG file of 936 pixels width, on white."""
        return self.save("png", dpi=180, metadata={"Software": None})

    def save(self, kind: str, **how: Any) -> bytes:
        settings: dict[Any, Any] = {**STYLE, "svg.hashsalt": self.name}
        with matplotlib.rc_context(settings):
            canvas = Figure(figsize=(self.width, self.height), layout="constrained")
            self.plot(canvas.subplots())
            buffer = io.BytesIO()
            canvas.savefig(buffer, format=kind, **how)
        return buffer.getvalue()


def draw(plot: Callable[[Axes], None], name: str, height: float = 2.9) -> Picture:
    """A picture for a file of its own, which need not fit a telephone."""
    return Picture(name, plot, height, width=6.4)


def standalone(picture: Picture) -> str:
    """`picture` as an SVG file of its own."""
    svg = picture.svg()
    for colour, variable in VARIABLES.items():
        svg = svg.replace(f"var({variable})", EITHER.get(colour, colour))
    return svg


# ---- acceptance ----


def positions(overall: Sequence[float], reached: Sequence[float | None], name: str) -> Picture:
    """Bars for each drafted position: accepted among all rounds, and among the rounds that got there."""

    def plot(axes: Axes) -> None:
        places = range(1, len(overall) + 1)
        left, right = [p - 0.2 for p in places], [p + 0.2 for p in places]
        axes.bar(left, overall, 0.38, color=DRAFT, label="of all rounds")
        axes.bar(
            right, [r or 0 for r in reached], 0.38, color=DRAFT, alpha=0.35, label="of those that got there"
        )
        if len(overall) <= 6:  # else the figures would meet
            for place, share in zip(left, overall, strict=True):
                axes.text(place, share + 0.015, f"{share:.0%}", ha="center", va="bottom", fontsize=9)
        axes.set(xlabel="drafted position", ylabel="accepted", xticks=list(places), ylim=(0, 1.05))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        legend_above(axes)

    return Picture(name, plot)


def position_lines(lines: Sequence[tuple[str, Sequence[float | None]]], name: str) -> Picture:
    """A line over the positions for each labelled sequence: accepted among the rounds that got there. One
    without positions is left out and keeps its colour."""

    def plot(axes: Axes) -> None:
        longest = max(len(values) for _, values in lines)
        for (label, values), (colour, marker) in zip(lines, cycle(styles()), strict=False):
            known = [(i, value) for i, value in enumerate(values, 1) if value is not None]
            if known:
                places, shares = zip(*known, strict=True)
                axes.plot(places, shares, color=colour, marker=marker, markersize=5, label=literal(label))
        axes.set(xlabel="drafted position", ylabel="accepted", xticks=range(1, longest + 1), ylim=(0, 1.05))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        legend_above(axes)

    return Picture(name, plot)


def acceptance_map(rows: Sequence[tuple[str, dict[str, Any]]], name: str) -> Picture:
    """A field for each category and position, the deeper the more of its rounds accepted there; τ on the
    right. "all" comes first, then the categories by τ."""
    ordered = sorted(rows, key=lambda item: (item[0] != "all", -item[1]["mean_acceptance_length"]))
    longest = max(len(row["acceptance_by_position"]) for _, row in ordered)

    def plot(axes: Axes) -> None:
        for place, (_, row) in enumerate(ordered):
            for position, share in enumerate(row["acceptance_by_position"], 1):
                corner = position - 0.48, place - 0.46
                axes.add_patch(
                    Rectangle(corner, 0.96, 0.92, color=DRAFT, alpha=0.06 + 0.54 * share, linewidth=0)
                )
                if longest <= 10:
                    axes.text(position, place, f"{share:.0%}", ha="center", va="center", fontsize=9)
            tau = f"{row['mean_acceptance_length']:.2f}"
            axes.text(longest + 0.75, place, tau, ha="center", va="center", fontsize=10)
        axes.text(longest + 0.75, -0.72, "τ", ha="center", va="center")
        axes.set(xlabel="drafted position", xlim=(0.5, longest + 1.05), ylim=(len(ordered) - 0.5, -1.0))
        axes.set_xticks(range(1, longest + 1))
        axes.set_yticks(range(len(ordered)), [literal(category) for category, _ in ordered])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)

    return Picture(name, plot, height=1.0 + 0.29 * len(ordered))


# ---- speed ----


def speedups(rows: Sequence[tuple[str, dict[str, Any]]], name: str) -> Picture:
    """A dot with its interval for each category, "all" first and the fastest next, and the line at 1.0."""
    ordered = sorted(rows, key=lambda item: (item[0] != "all", -item[1]["speedup"]))
    lines = [(category, [(row["speedup"], row["speedup_ci"])]) for category, row in ordered]
    return dots(lines, [""], "times as fast as plain decoding", name)


def dots(
    lines: Sequence[tuple[str, Sequence[Point]]], labels: Sequence[str], axis: str, name: str
) -> Picture:
    """A row for each of `lines`, with a dot and its interval in it for each of `labels`; a broken line at 1.
    The row named "all" is drawn stronger. A label without a value is left out and keeps its colour."""

    def plot(axes: Axes) -> None:
        for i, (colour, marker) in zip(range(len(labels)), cycle(styles()), strict=False):
            shift = (i - (len(labels) - 1) / 2) * 0.72 / len(labels)
            for place, (line, points) in enumerate(lines):
                value, ends = points[i]
                if value is None:
                    continue
                strong = line == "all"
                if ends is not None:
                    width, alpha = (2.8, 1.0) if strong else (1.8, 0.6)
                    axes.plot(ends, [place + shift] * 2, color=colour, linewidth=width, alpha=alpha)
                axes.plot(value, place + shift, marker, color=colour, markersize=7 if strong else 5)
            if any(points[i][0] is not None for _, points in lines):
                axes.plot([], [], marker, color=colour, label=literal(labels[i]))
        if len(labels) > 1:
            for place in range(0, len(lines), 2):
                axes.axhspan(place - 0.5, place + 0.5, color=MUTED, alpha=0.1, linewidth=0)
            legend_above(axes)
        axes.axvline(1.0, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_yticks(range(len(lines)), [literal(line) for line, _ in lines])
        axes.set(xlabel=axis, ylim=(len(lines) - 0.5, -0.5))

    each = max(0.3, 0.17 * len(labels))
    above = 0.2 * len(labels) if len(labels) > 1 else 0.0
    return Picture(name, plot, height=0.75 + above + each * len(lines))


def sweep(
    lines: Sequence[tuple[str, Sequence[tuple[float, Point]]]], axis: str, name: str, ylabel: str = "speedup"
) -> Picture:
    """A line over the values that were tried, evenly spaced, with an interval at each; a broken line at 1."""
    tried = sorted({x for _, points in lines for x, _ in points})

    def plot(axes: Axes) -> None:
        for i, ((label, points), (colour, marker)) in enumerate(zip(lines, cycle(styles()), strict=False)):
            shift = (i - (len(lines) - 1) / 2) * 0.06
            known = [
                (tried.index(x) + shift, value, ends) for x, (value, ends) in points if value is not None
            ]
            xs, values = [x for x, _, _ in known], [value for _, value, _ in known]
            axes.plot(xs, values, color=colour, marker=marker, markersize=5, label=literal(label))
            for x, _, ends in known:
                if ends is not None:
                    axes.plot([x, x], ends, color=colour, linewidth=1.8, alpha=0.6)
        axes.axhline(1.0, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_xticks(range(len(tried)), [f"{x:g}" for x in tried])
        axes.set(xlabel=axis, ylabel=ylabel, xlim=(-0.4, len(tried) - 0.6))
        if len(lines) > 1:
            legend_above(axes)

    return Picture(name, plot)


def held_against(
    lines: Sequence[tuple[str, Sequence[float]]], points: Sequence[Sequence[tuple[int, Point]]], name: str
) -> Picture:
    """A line over chain lengths 1, 2, ... for each labelled prediction, and in its colour the dots, with
    their intervals, that were measured."""

    def plot(axes: Axes) -> None:
        longest = max(len(values) for _, values in lines)
        for (label, values), measured, (colour, marker) in zip(lines, points, cycle(styles()), strict=False):
            lengths = range(1, len(values) + 1)
            axes.plot(lengths, values, color=colour, linewidth=1.8, label=literal(label))
            for length, (value, ends) in measured:
                if value is None:
                    continue
                if ends is not None:
                    axes.plot([length, length], ends, color=colour, linewidth=2.4, alpha=0.6)
                axes.plot(length, value, marker, color=colour, markersize=8)
        axes.axhline(1.0, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set(xlabel="drafted tokens K", ylabel="speedup without prefill", xticks=range(1, longest + 1))
        axes.plot([], [], "o", color=INK, label="measured")
        legend_above(axes)

    return Picture(name, plot)


# ---- latency ----


@dataclass(frozen=True)
class Curve:
    """A distribution by its 101 quantiles, of which those from 100 - `known` to `known` % are drawn."""

    label: str
    quantiles: Sequence[float]
    known: int  # in percent: the highest that enough values stand behind
    colour: str
    dashed: bool = False


def distributions(curves: Sequence[Curve], axis: str, name: str) -> Picture:
    """Cumulative shares on an axis that is stretched towards both ends (log-odds), so that the tails show;
    dots at 50, 90 and 99 %."""
    widest = max(curve.known for curve in curves)

    def plot(axes: Axes) -> None:
        axes.set_yscale("logit")
        for curve in curves:
            percents = range(100 - curve.known, curve.known + 1)
            axes.plot(
                [curve.quantiles[i] for i in percents],
                [i / 100 for i in percents],
                color=curve.colour,
                linewidth=2,
                linestyle=(0, (3, 1.5)) if curve.dashed else "-",
                label=literal(curve.label),
            )
            marked = [i for i in (50, 90, 99) if i <= curve.known]
            axes.plot(
                [curve.quantiles[i] for i in marked], [i / 100 for i in marked], "o", color=curve.colour, ms=4
            )
        ticks = [i / 100 for i in (1, 10, 50, 90, 99) if 100 - widest <= i <= widest]
        low = (100 - widest) * 0.8 / 100
        axes.set(xlabel=axis, ylabel="share that took at most", ylim=(low, 1 - low))
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=6)
        axes.yaxis.set_major_locator(FixedLocator(ticks))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.grid(axis="y", color=MUTED, alpha=0.25, linewidth=0.8)
        legend_above(axes)

    return Picture(name, plot, height=2.8 + 0.2 * legend_rows([curve.label for curve in curves]))


def styles() -> list[tuple[str, str]]:
    return list(zip(SERIES, MARKERS, strict=True))


def legend_above(axes: Axes) -> None:
    """Over the axes, where no bar or line can run into it; side by side if the labels are short."""
    _, labels = axes.get_legend_handles_labels()
    columns = 2 if legend_rows(labels) < len(labels) else 1
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2, handlelength=1.6)


def legend_rows(labels: Sequence[str]) -> int:
    return (len(labels) + 1) // 2 if max(map(len, labels)) <= 26 else len(labels)


def literal(text: str) -> str:
    """Text for matplotlib, which would read dollar signs as mathematics."""
    return text.replace("$", r"\$")
