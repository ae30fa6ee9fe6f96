"""The report's pictures: SVG elements to stand inside an HTML page, in the page's own colours."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

# Drawn in these, then replaced by CSS variables, so that the pictures follow the page's light or dark theme.
INK, MUTED, PLAIN, DRAFT = "#010203", "#040506", "#070809", "#0a0b0c"
COLOURS = {INK: "var(--ink)", MUTED: "var(--muted)", PLAIN: "var(--plain)", DRAFT: "var(--draft)"}
# For a picture outside the report, readable on light and on dark pages.
FIXED = {
    "var(--ink)": "#7d8590",
    "var(--muted)": "#9aa1a9",
    "var(--plain)": "#9aa1a9",
    "var(--draft)": "#2f81f7",
}
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
    "savefig.transparent": True,
}


def draw(plot: Callable[[Axes], None], name: str, height: float = 2.9) -> str:
    """The SVG element that `plot` draws, the same for the same input; `name` makes its ids its own within the
    page."""
    settings: dict[Any, Any] = {**STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context(settings):
        canvas = Figure(figsize=(6.4, height), layout="constrained")
        plot(canvas.subplots())
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    used = set(re.findall(r"#([\w.-]+)", svg))
    # Ids that nothing refers to would repeat from picture to picture.
    svg = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in used else "", svg)
    for drawn, themed in COLOURS.items():
        svg = svg.replace(drawn, themed)
    return svg


def standalone(svg: str) -> str:
    """`svg` with colours of its own, as a file."""
    for themed, fixed in FIXED.items():
        svg = svg.replace(themed, fixed)
    return svg


def positions(overall: Sequence[float], reached: Sequence[float | None], name: str) -> str:
    """Bars for each drafted position: accepted among all rounds, and among the rounds that got there."""

    def plot(axes: Axes) -> None:
        places = range(1, len(overall) + 1)
        left, right = [p - 0.2 for p in places], [p + 0.2 for p in places]
        axes.bar(left, overall, 0.38, color=DRAFT, label="of all rounds")
        axes.bar(
            right, [r or 0 for r in reached], 0.38, color=DRAFT, alpha=0.35, label="of those that got there"
        )
        for place, share in zip(left, overall, strict=True):
            axes.text(place, share + 0.015, f"{share:.0%}", ha="center", va="bottom", fontsize=9)
        axes.set(xlabel="drafted position", ylabel="accepted", xticks=list(places), ylim=(0, 1.05))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.legend(loc="upper right")

    return draw(plot, name)


def speedups(rows: Sequence[tuple[str, dict[str, Any]]], name: str) -> str:
    """A dot with its interval for each category, "all" first and the fastest next, and the line at 1.0."""
    ordered = sorted(rows, key=lambda item: (item[0] != "all", -item[1]["speedup"]))

    def plot(axes: Axes) -> None:
        for place, (category, row) in enumerate(ordered):
            strong = category == "all"
            if row["speedup_ci"] is not None:
                width, alpha = (3.2, 1.0) if strong else (1.8, 0.6)
                axes.plot(row["speedup_ci"], [place, place], color=DRAFT, linewidth=width, alpha=alpha)
            axes.plot(row["speedup"], place, "o", color=DRAFT, markersize=8 if strong else 6)
        axes.axvline(1.0, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_yticks(range(len(ordered)), [literal(category) for category, _ in ordered])
        axes.set_xlabel("times as fast as plain decoding")
        axes.invert_yaxis()

    return draw(plot, name, height=1.1 + 0.34 * len(ordered))


def shares(curves: dict[str, list[float] | None], label: str, name: str) -> str:
    """Cumulative distributions, each given by its 101 quantiles; "plain" is drawn in grey."""

    def plot(axes: Axes) -> None:
        for method, curve in sorted(curves.items(), key=lambda item: item[0] != "plain"):
            if curve is not None:
                colour = PLAIN if method == "plain" else DRAFT
                axes.plot(
                    curve, [i / 100 for i in range(101)], color=colour, linewidth=2, label=literal(method)
                )
        axes.set(xlabel=label, ylabel="share", ylim=(0, 1.02))
        axes.set_xlim(left=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.legend(loc="best")

    return draw(plot, name)


def literal(text: str) -> str:
    """Text for matplotlib, which would read dollar signs as mathematics."""
    return text.replace("$", r"\$")
