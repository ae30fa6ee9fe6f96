"""The picture of eval.profile: a stacked bar for each setting, its gaps pale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from eval.pictures import MUTED, Picture

# Blue is the target, orange the draft, grey the decoder itself. Told apart on light and on dark pages.
COLOURS = {
    "target.attention": "#1f6feb",
    "target.mlp": "#58a6ff",
    "target.lm_head": "#0a3d91",
    "target.other": "#79a8c9",
    "draft.attention": "#bc4c00",
    "draft.mlp": "#fb8f44",
    "draft.lm_head": "#8a3800",
    "draft.other": "#e0a070",
    "draft.tree": "#d4a72c",
    "inputs": "#8957e5",
    "verify": "#2da44e",
    "commit": "#6e7781",
    "round": "#a0a7ae",
}
LABELS = {
    "target.attention": "attention",
    "target.mlp": "MLP",
    "target.lm_head": "LM head",
    "target.other": "norms, other",
    "draft.attention": "draft attention",
    "draft.mlp": "draft MLP",
    "draft.lm_head": "draft head",
    "draft.other": "draft other",
    "draft.tree": "draft tree",
    "inputs": "inputs",
    "verify": "verify",
    "commit": "commit",
    "round": "loop",
}


def picture(rows: Sequence[dict[str, Any]], name: str = "profile") -> Picture:
    """rows: of profile.json."""

    def plot(axes: Axes) -> None:
        shown = set()
        for place, row in enumerate(rows):
            left = 0.0
            for name, part in row["parts"].items():
                busy = part["ms"] - part["gap_ms"]
                axes.barh(place, busy, 0.7, left, color=COLOURS[name])
                axes.barh(place, part["gap_ms"], 0.7, left + busy, color=COLOURS[name], alpha=0.4)
                left += part["ms"]
                shown.add(name)
            axes.plot([row["floor_ms"]] * 2, [place - 0.42, place + 0.42], color=MUTED, linewidth=2.5)
        settings = [f"{row['method']}, batch {row['batch_size']}, {row['context']}" for row in rows]
        axes.set_yticks(range(len(rows)), settings)
        axes.set_xlabel("ms a step\npale: nothing ran; line: memory alone")
        axes.invert_yaxis()
        handles = [Patch(color=COLOURS[name], label=LABELS[name]) for name in COLOURS if name in shown]
        axes.figure.legend(handles=handles, loc="outside upper center", ncols=4, fontsize=9)

    return Picture(name, plot, height=1.9 + 0.34 * len(rows))
