"""What a measurement's page (eval/report.py) says of one setting: the verdict, the figures to know, the table
by category, the pictures, the latencies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from eval.measurement import Row, Rows, Setting, anchor, named, split, tree
from eval.page import (
    Shown,
    interval,
    number,
    percent,
    ranged,
    scrolled,
    sentence,
    times,
    tr,
)
from eval.pictures import (
    DRAFT,
    PLAIN,
    Curve,
    acceptance_map,
    distributions,
    positions,
    speedups,
)
from eval.rows import verdict

LATENCIES = {
    "ttft_ms": "to the first token",
    "itl_ms": "between emissions",
    "tpot_ms": "per token after the first",
    "e2e_ms": "whole answer",
    "decoder_ms": "decoder's own work per round",
}
# The two that are drawn: key, axis, title, text.
DRAWN = (
    (
        "itl_ms",
        "ms between emissions",
        "What a reader waits between bursts",
        "The share of waits that took at most a given time. A speculative round takes longer than a plain "
        "step and emits several tokens at once, so its curve lies to the right although the whole answer "
        "comes sooner.",
    ),
    (
        "e2e_ms",
        "ms for the whole answer",
        "Time for the whole answer",
        "The share of answers finished within a given time, prefill included. The further the speculative "
        "curve lies to the left of the plain one, the more is saved.",
    ),
)
TAILS = (
    "The axis is stretched towards both ends, so that the fastest and the slowest can be read too; dots "
    "stand at p50, p90 and p99. What too few values stand behind is not drawn."
)


def section(measurement: dict[str, Any], setting: Setting, several: bool) -> str:
    """Everything about one setting: verdict, the four figures to know, the table, the pictures."""
    drafted, plain = split(measurement, setting)
    whole, before = drafted["all", "all"], plain["all", "all"]
    said = verdict(whole)
    mood = {"speculation pays": "pays", "speculation does not pay": "loses"}.get(said, "")
    shown = "".join(one.html() for one in drawings(measurement, setting))
    return (
        (
            f'<h2 class="setting" id="{anchor(setting)}">{sentence(named(setting))[:-1]}</h2>'
            if several
            else ""
        )
        + f'<div class="card verdict {mood}"><b>{escape(sentence(said))}</b> {explain(whole)}</div>'
        + lossy(whole)
        + f'<div class="tiles">{tiles(whole, before)}</div>'
        + f"<h2>By category</h2>{table(drafted, plain, by_reply(measurement, setting))}"
        + (f"<h2>Pictures</h2>{shown}" if shown else "")
        + f"<h2>Latency</h2>{latencies(whole, before)}"
    )


def explain(row: Row) -> str:
    if row["speedup"] is None:
        return "No token was timed, so there is nothing to compare."
    basis = "seconds per token" if row["speedup_basis"] == "per_token" else "time"
    return (
        f"Over the same prompts, plain decoding takes {times(row['speedup'])} the {basis} of speculative "
        f"decoding ({row['confidence'] * 100:g} % interval {interval(row['speedup_ci'], times)}, prefill "
        f"included; without prefill {times(row['speedup_decode'])}).{single(row.get('per_request'))}"
    )


def single(spread: dict[str, Any] | None) -> str:
    """How single requests fared, which pooled figures hide."""
    if spread is None or spread["speedup"] is None:
        return ""
    low, high = (times(spread["speedup"][end]) for end in ("p10", "p90"))
    return (
        f" Eight of ten requests lie between {low} and {high}; {percent(spread['slower'], 0)} became slower."
    )


def lossy(whole: Row) -> str:
    if whole["lossless"]:
        return ""
    return (
        f'<div class="card warning"><b>Lossy.</b> {escape(sentence(whole["verification"]))[:-1]} '
        "verification does not keep the target's law: it buys speed with other answers, and belongs in no "
        "table with methods that do.</div>"
    )


def tiles(whole: Row, before: Row) -> str:
    shown = (
        ("Speedup", times(whole["speedup"]), interval(whole["speedup_ci"], times)),
        (
            "Tokens per round (τ)",
            number(whole["mean_acceptance_length"]),
            interval(whole["mean_acceptance_length_ci"]),
        ),
        (
            "Drafted tokens accepted",
            percent(whole["acceptance_rate"]),
            f"{whole['rounds']} rounds of a {tree(whole)}" + vain(whole.get("wasted_rounds")),
        ),
        (
            "Tokens per second",
            number(whole["tokens_per_s"], 1),
            f"plain decoding {number(before['tokens_per_s'], 1)}",
        ),
    )
    return "".join(
        f'<div class="card tile"><div class="name">{name}</div><div class="value">{value}</div>'
        f'<div class="range">{beside}</div></div>'
        for name, value, beside in shown
    )


def vain(share: float | None) -> str:
    return "" if share is None else f"; {percent(share, 0)} of them drafted in vain"


def by_reply(measurement: dict[str, Any], setting: Setting) -> list[tuple[str, Row, Row]]:
    """(what replies these were, the speculative row, the plain one)."""
    here = [r for r in measurement.get("by_reply") or [] if (r["temperature"], r["batch_size"]) == setting]
    plain = {row["reply"]: row for row in here if row["method"] == "plain"}
    named = {"looped": "replies that loop", "not looped": "replies that do not"}
    return [
        (named.get(row["reply"], f"replies of {row['reply']} tokens"), row, plain[row["reply"]])
        for row in here
        if row["method"] != "plain"
    ]


def table(drafted: Rows, plain: Rows, replies: Sequence[tuple[str, Row, Row]]) -> str:
    heads = ("", "speedup", "τ", "accepted", "plain tok/s", "draft tok/s", "identical", "prompts")
    lines = [
        table_line(named_group(place), drafted[place], plain[place], "all" if place == ("all", "all") else "")
        for place in sorted(drafted, key=reading_order)
    ]
    lines += [table_line(name, row, before) for name, row, before in replies]
    notes = sorted({note for row in drafted.values() if row["category"] == "all" for note in row["notes"]})
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return scrolled(heads, lines, f'<ul class="notes">{listed}</ul>' if listed else "")


def table_line(name: str, drafted: Row, plain: Row, kind: str = "") -> str:
    cells = (
        escape(name),
        ranged(drafted["speedup"], drafted["speedup_ci"], times),
        ranged(drafted["mean_acceptance_length"], drafted["mean_acceptance_length_ci"], number),
        percent(drafted["acceptance_rate"]),
        number(plain["tokens_per_s"], 1),
        number(drafted["tokens_per_s"], 1),
        percent(drafted["identical_outputs"], 0),
        str(drafted["prompts"]),
    )
    return tr(cells, kind)


def named_group(place: tuple[str, str]) -> str:
    category, bucket = place
    return category if bucket == "all" else f"prompts of {bucket} tokens"


def reading_order(place: tuple[str, str]) -> tuple[bool, bool, str, int]:
    """All prompts, then the categories by name, then the prompt lengths."""
    category, bucket = place
    shortest = 0 if bucket == "all" else int(bucket.split("-")[0].rstrip("+"))
    return bucket != "all", category != "all", category, shortest


def latencies(whole: Row, before: Row) -> str:
    lines = [
        tr((f"{name} <small>{label}</small>", *percentiles(row[key])))
        for key, name in LATENCIES.items()
        for label, row in (("plain", before), ("speculative", whole))
    ]
    note = "<p><small>A dash: too few values to tell that percentile.</small></p>"
    return scrolled(("milliseconds", "p50", "p90", "p99", "values"), lines, note)


def percentiles(values: dict[str, Any] | None) -> list[str]:
    """The cells of a latency: three percentiles, and how many values stand behind them."""
    known = values or {}
    return [*[number(known.get(p), 1) for p in ("p50", "p90", "p99")], number(known.get("events"), 0)]


def drawings(measurement: dict[str, Any], setting: Setting) -> Iterator[Shown]:
    """The pictures of one setting."""
    drafted, plain = split(measurement, setting)
    whole, where = drafted["all", "all"], anchor(setting)
    by_category = [(category, row) for (category, bucket), row in drafted.items() if bucket == "all"]
    if whole["acceptance_by_position"]:
        yield Shown(
            positions(whole["acceptance_by_position"], whole["conditional_acceptance"], f"positions-{where}"),
            "Acceptance by position",
            "Full bars: the share of all rounds in which a token drafted at that position was accepted (of a "
            "tree, at that depth). They can only fall. Pale bars: the share among the rounds that got that "
            "far. If the pale bars fall steeply, the draft loses its way on its own output; if they stay "
            "level, longer drafts are worth trying.",
        )
    if len(drawn := [(category, row) for category, row in by_category if row["acceptance_by_position"]]) > 1:
        yield Shown(
            acceptance_map(drawn, f"acceptance-{where}"),
            "Acceptance by category",
            "The share of all rounds in which a token drafted at that position was accepted, and τ, which is "
            "one more than their sum. A category that is pale from the first position on is one that the "
            "draft has seen too little of.",
        )
    if len(timed := [(category, row) for category, row in by_category if row["speedup"] is not None]) > 1:
        yield Shown(
            speedups(timed, f"speedup-{where}"),
            "Speedup by category",
            "Right of the broken line, speculation is faster than plain decoding of the same prompts. "
            f"Whiskers: {whole['confidence'] * 100:g} % intervals from drawing the prompts again. A whisker "
            "that crosses the line shows no difference; few prompts make long whiskers.",
        )
    for key, axis, title, text in DRAWN:
        curves = [
            curve
            for row, colour in ((plain["all", "all"], PLAIN), (whole, DRAFT))
            if (curve := curve_of(measurement, row, key, row["method"], colour)) is not None
        ]
        if curves:
            yield Shown(
                distributions(curves, axis, f"{key.removesuffix('_ms')}-{where}"), title, f"{text} {TAILS}"
            )


def curve_of(
    measurement: dict[str, Any], row: Row, key: str, label: str, colour: str, dashed: bool = False
) -> Curve | None:
    """The distribution behind a row's percentiles, as far as enough values stand behind it; None below
    ten."""
    values = row[key] or {}
    known = next((int(name[1:]) for name in ("p99", "p90") if values.get(name) is not None), None)
    for found in measurement["distributions"]:
        same = (found["temperature"], found["method"]) == (row["temperature"], row["method"])
        if same and found.get("batch_size", row["batch_size"]) == row["batch_size"]:
            return Curve(label, found[key], known, colour, dashed) if found[key] and known else None
    return None
