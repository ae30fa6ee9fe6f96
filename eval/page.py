"""What the reports' pages are made of: the page itself, cards with a picture, tables, and numbers as words.

A page is one file that asks for nothing else. What comes from files must be escaped before it comes here,
except where a function says that it does so itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from eval.pictures import Picture

CSS = Path(__file__).with_name("report.css")


def page(title: str, body: Sequence[str]) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Leadout: {escape(title)}</title><style>\n{CSS.read_text(encoding='utf-8')}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


@dataclass(frozen=True)
class Shown:
    """A picture and what it means."""

    picture: Picture
    title: str
    text: str

    def html(self) -> str:
        svg = self.picture.svg().replace("<svg", f'<svg role="img" aria-label="{escape(self.title)}"', 1)
        return (
            f'<div class="card figure"><div>{svg}</div><div><h3>{escape(self.title)}</h3>'
            f"<p>{escape(self.text)}</p></div></div>"
        )


# ---- tables ----


def tr(cells: Sequence[str], kind: str = "") -> str:
    marked = f' class="{kind}"' if kind else ""
    return f"<tr{marked}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def bare(heads: Sequence[str], lines: Sequence[str]) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def scrolled(heads: Sequence[str], lines: Sequence[str], below: str = "") -> str:
    """A table in a card, wider than a telephone if need be."""
    return f'<div class="card scroll">{bare(heads, lines)}{below}</div>'


# ---- numbers as words ----


def listing(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def short(name: str) -> str:
    """The last part of a hub name or a path."""
    return name.rstrip("/").rsplit("/", 1)[-1]


def sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}%}"


def interval(ends: Sequence[float] | None, form: Callable[[float | None], str] = number) -> str:
    return "no interval" if ends is None else f"{form(ends[0])} to {form(ends[1])}"


def ranged(value: float | None, ends: Sequence[float] | None, form: Callable[[float | None], str]) -> str:
    beside = f' <span class="ci">{interval(ends, form)}</span>' if ends is not None else ""
    return form(value) + beside
