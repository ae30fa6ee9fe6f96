"""`measure.json` as one HTML page that needs nothing else: no scripts, no fonts, no pictures from outside.

A pure function of the measurement. Text that came from files is escaped. Beside each figure stands what it
means, because the same word means different things in different tools (docs/metrics.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from eval.pictures import positions, shares, speedups

Row = dict[str, Any]
Rows = dict[tuple[str, str], Row]  # by category and context bucket

CSS = Path(__file__).with_name("report.css")

LATENCIES = {
    "ttft_ms": "to the first token",
    "itl_ms": "between emissions",
    "tpot_ms": "per token after the first",
    "e2e_ms": "whole answer",
    "decoder_ms": "decoder's own work per round",
}


def report(measurement: dict[str, Any]) -> str:
    """The page for a measurement that `measure.schema.json` accepts."""
    temperatures = sorted({row["temperature"] for row in measurement["rows"]})
    body = [
        header(measurement),
        warning(measurement["load"]),
        *[section(measurement, temperature, len(temperatures) > 1) for temperature in temperatures],
        agreement(measurement) if 0 in temperatures else "",
        conditions(measurement),
    ]
    title = f"Leadout: {measurement['draft']['method']} draft for {short(measurement['target']['name'])}"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{CSS.read_text(encoding='utf-8')}</style></head><body><main>"
        f"{''.join(body)}</main></body></html>\n"
    )


def header(measurement: dict[str, Any]) -> str:
    target, measured = measurement["target"], measurement["traffic"]["measured"]
    when = measurement["created"][:16].replace("T", " ")
    return (
        f"<h1>{escape(measurement['draft']['method'])} draft for {escape(short(target['name']))}</h1>"
        f'<p class="sub">Measured {when} UTC on {escape(place(measurement))}, {target["dtype"]}, batch 1, '
        f"over {sum(measured.values())} held-out prompts in {len(measured)} categories; none of them is a "
        "training prompt.</p>"
    )


def warning(load: dict[str, Any]) -> str:
    if not load["busy"]:
        return ""
    before, during = percent(load["others_before"]), percent(load["others_during"])
    return (
        '<div class="card warning"><b>The machine was busy.</b> Other processes used '
        f"{before} of its processors before the run and {during} during it. Plain and speculative runs were "
        "interleaved, so both suffered, but not equally: measure again on an idle machine before you quote "
        "these times.</div>"
    )


def section(measurement: dict[str, Any], temperature: float, several: bool) -> str:
    """Everything about one temperature: verdict, the four figures to know, the table, the pictures."""
    rows = [row for row in measurement["rows"] if row["temperature"] == temperature]
    plain, drafted = (
        {
            (row["category"], row["context_bucket"]): row
            for row in rows
            if (row["method"] == "plain") is wanted
        }
        for wanted in (True, False)
    )
    whole, before = drafted["all", "all"], plain["all", "all"]
    verdict = next(v["verdict"] for v in measurement["verdicts"] if v["temperature"] == temperature)
    mood = {"speculation pays": "pays", "speculation does not pay": "loses"}.get(verdict, "")
    curves = {d["method"]: d for d in measurement["distributions"] if d["temperature"] == temperature}
    return (
        (f"<h2>Temperature {temperature:g}</h2>" if several else "")
        + f'<div class="card verdict {mood}"><b>{escape(sentence(verdict))}</b> {explain(whole)}</div>'
        + f'<div class="tiles">{tiles(whole, before)}</div>'
        + f"<h2>By category</h2>{table(drafted, plain)}"
        + f"<h2>Pictures</h2>{pictures(drafted, curves, temperature)}"
        + f"<h2>Latency</h2>{latencies(whole, before)}"
    )


def explain(row: Row) -> str:
    if row["speedup"] is None:
        return "No token was timed, so there is nothing to compare."
    basis = "seconds per token" if row["speedup_basis"] == "per_token" else "time"
    return (
        f"Over the same prompts, plain decoding takes {times(row['speedup'])} the {basis} of speculative "
        f"decoding ({row['confidence'] * 100:g} % interval {interval(row['speedup_ci'], times)}, prefill "
        f"included; without prefill {times(row['speedup_decode'])})."
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
            f"{whole['rounds']} rounds of a {tree(whole)}",
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


def table(drafted: Rows, plain: Rows) -> str:
    heads = ("", "prompts", "τ", "accepted", "plain tok/s", "draft tok/s", "speedup", "identical")
    lines = [table_line(place, drafted[place], plain[place]) for place in sorted(drafted, key=reading_order)]
    notes = sorted({note for row in drafted.values() if row["category"] == "all" for note in row["notes"]})
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        f'<div class="card scroll"><table><tr>{head}</tr>{"".join(lines)}</table>'
        + (f'<ul class="notes">{listed}</ul>' if listed else "")
        + "</div>"
    )


def table_line(place: tuple[str, str], drafted: Row, plain: Row) -> str:
    category, bucket = place
    cells = (
        escape(category) if bucket == "all" else f"prompts of {bucket} tokens",
        str(drafted["prompts"]),
        ranged(drafted["mean_acceptance_length"], drafted["mean_acceptance_length_ci"], number),
        percent(drafted["acceptance_rate"]),
        number(plain["tokens_per_s"], 1),
        number(drafted["tokens_per_s"], 1),
        ranged(drafted["speedup"], drafted["speedup_ci"], times),
        percent(drafted["identical_outputs"], 0),
    )
    kind = ' class="all"' if place == ("all", "all") else ""
    return f"<tr{kind}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def reading_order(place: tuple[str, str]) -> tuple[bool, bool, str, int]:
    """All prompts, then the categories by name, then the prompt lengths."""
    category, bucket = place
    shortest = 0 if bucket == "all" else int(bucket.split("-")[0].rstrip("+"))
    return bucket != "all", category != "all", category, shortest


def latencies(whole: Row, before: Row) -> str:
    lines = []
    for key, name in LATENCIES.items():
        for label, row in (("plain", before), ("speculative", whole)):
            values = row[key] or {}
            cells = "".join(f"<td>{number(values.get(p), 1)}</td>" for p in ("p50", "p90", "p99"))
            lines.append(f"<tr><td>{name} <small>{label}</small></td>{cells}</tr>")
    return (
        '<div class="card scroll"><table><tr><th>milliseconds</th><th>p50</th><th>p90</th><th>p99</th></tr>'
        f"{''.join(lines)}</table><p><small>A dash: too few values to tell that percentile.</small></p></div>"
    )


def pictures(drafted: Rows, curves: dict[str, Any], temperature: float) -> str:
    whole, made = drafted["all", "all"], []
    if whole["acceptance_by_position"]:
        svg = positions(
            whole["acceptance_by_position"], whole["conditional_acceptance"], f"positions {temperature}"
        )
        text = (
            "Full bars: the share of all rounds in which a token drafted at that position was accepted (of a "
            "tree, at that depth). They can only fall. Pale bars: the share among the rounds that got that "
            "far. If the pale bars fall steeply, the draft loses its way on its own output; if they stay "
            "level, longer drafts are worth trying."
        )
        made.append(figure(svg, "Acceptance by position", text))
    timed = [
        (category, row)
        for (category, bucket), row in drafted.items()
        if bucket == "all" and row["speedup"] is not None
    ]
    if timed:
        text = (
            "Right of the dashed line, speculation is faster than plain decoding of the same prompts. "
            f"Whiskers: {whole['confidence'] * 100:g} % intervals from drawing the prompts again. A whisker "
            "that crosses the line shows no difference; few prompts make long whiskers."
        )
        made.append(figure(speedups(timed, f"speedups {temperature}"), "Speedup by category", text))
    for key, label, title, text in (
        (
            "itl_ms",
            "ms between emissions",
            "What a reader waits between bursts",
            "The share of waits that are shorter than a given time. A speculative round takes longer than "
            "a plain step and emits several tokens at once, so its curve lies to the right although the "
            "whole answer comes sooner.",
        ),
        (
            "e2e_ms",
            "ms for the whole answer",
            "Time for the whole answer",
            "The share of answers finished within a given time, prefill included. The further the "
            "speculative curve lies to the left of the plain one, the more is saved.",
        ),
    ):
        found = {method: curve[key] for method, curve in curves.items()}
        if any(found.values()):
            made.append(figure(shares(found, label, f"{key} {temperature}"), title, text))
    return "".join(made)


def figure(svg: str, title: str, text: str) -> str:
    return f'<div class="card figure"><div>{svg}</div><div><h3>{title}</h3><p>{text}</p></div></div>'


def agreement(measurement: dict[str, Any]) -> str:
    """Did speculation change what was said? Greedy runs only."""
    greedy = [pair for pair in measurement["details"] if pair["temperature"] == 0]
    whole = next(
        row
        for row in measurement["rows"]
        if (row["temperature"], row["category"], row["context_bucket"]) == (0, "all", "all")
        and row["method"] != "plain"
    )
    parts = [
        f"<p>{whole['identical_count']} of {len(greedy)} greedy outputs are identical to plain decoding, "
        "token for token. In exact arithmetic all are; in bfloat16 and float16 a forward over several "
        "tokens rounds differently from one over a single token, and a near-tie between the two best "
        "tokens can fall either way.</p>"
    ]
    if diverged := sorted(
        (pair for pair in greedy if pair["divergence"]), key=lambda pair: -pair["divergence"]["gap"]
    ):
        lines = "".join(
            f"<tr><td>{escape(pair['prompt'])} <small>{escape(pair['category'])}</small></td>"
            f"<td>{pair['divergence']['index']}</td><td>{number(pair['divergence']['gap'], 4)}</td></tr>"
            for pair in diverged[:20]
        )
        parts.append(
            "<p>Those that differ, with the gap between the target's two best logits at the first "
            "difference (the largest first). A small gap is rounding; a large one would be a fault.</p>"
            f"<table><tr><th>prompt</th><th>at token</th><th>logit gap</th></tr>{lines}</table>"
        )
    if (peer := measurement["generate"]) is not None:
        parts.append(
            f"<p>Against <code>generate</code> of transformers on {peer['prompts']} prompts: plain decoding "
            f"gives the same tokens in {peer['identical_plain']}, speculative decoding in "
            f"{peer['identical_draft']}. <code>generate</code> ran at {number(peer['tokens_per_s'], 1)} "
            "tokens per second.</p>"
        )
    return f'<h2>Same answers?</h2><div class="card scroll">{"".join(parts)}</div>'


def conditions(measurement: dict[str, Any]) -> str:
    target, draft, traffic, load = (measurement[key] for key in ("target", "draft", "traffic", "load"))
    git, hardware = measurement["git"], measurement["hardware"]
    row = next(row for row in measurement["rows"] if row["method"] != "plain")
    top_k, top_p = row["top_k"] or "off", row["top_p"] if row["top_p"] < 1 else "off"
    peak = max((r["peak_memory_mb"] or 0 for r in measurement["rows"]), default=0)
    facts = {
        "Hardware": place(measurement),
        "Threads": str(hardware["threads"]),
        "Memory": f"{hardware['memory_gb']} GiB" + (f", at most {peak:,.0f} MB in use" if peak else ""),
        "Numbers": f"{target['dtype']}, {target['attention']} attention, batch 1",
        "Target": target["name"] + (f" ({target['gguf_file']}, dequantised)" if target["gguf_file"] else ""),
        "Draft": f"{draft['folder']} ({draft['parameters'] / 1e6:.1f} M parameters)",
        "Drafting": drafting(row),
        "Decoding": f"{row['verification']} verification, top-k {top_k}, top-p {top_p}",
        "Prompts": listing(traffic["measured"]),
        "Held out": f"{sum(traffic['heldout'].values())} prompts, none of them among the "
        f"{traffic['train_prompts']} training prompts, by {traffic['disjoint']['by']}",
        "Files": listing({name: digest[:12] for name, digest in traffic["files"].items()}),
        "Other load": f"{percent(load['others_before'])} of the processors before the run, "
        f"{percent(load['others_during'])} during it",
        "Commit": git["commit"][:12] + (" with local changes" if git["dirty"] else "") if git else "none",
        "Versions": listing({name: version for name, version in measurement["versions"].items() if version}),
        "Schema": measurement["schema"],
    }
    listed = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f'<h2>Conditions</h2><div class="card"><dl>{listed}</dl></div>'


def tree(row: Row) -> str:
    """What a round of a speculative row drafts, as in "chain of 4"."""
    match row["tree"]:
        case "chain":
            return f"chain of {row['draft_tokens']}"
        case "dynamic":
            return (
                f"dynamic tree of {row['tree_nodes']}, {row['tree_width']} wide and up to "
                f"{row['draft_tokens']} deep"
            )
        case kind:
            return f"{kind} tree of {row['tree_nodes']}"


def drafting(row: Row) -> str:
    """Everything that a speculative row says of how its tokens were drafted."""
    said = [tree(row), f"{row['proposal']} proposals", f"by {' and '.join(row['drafters'])}"]
    if row["tree_file"] is not None:
        said.insert(1, f"shape from {row['tree_file']}")
    if row["stop_drafting"] not in (None, "fixed"):
        said.append(f"stopped by {row['stop_drafting']}")
    return ", ".join(said)


def place(measurement: dict[str, Any]) -> str:
    """What the models ran on."""
    hardware = measurement["hardware"]
    if hardware["gpu"] and measurement["target"]["device"].startswith("cuda"):
        return ", ".join(gpu["name"] for gpu in hardware["gpu"])
    return f"{hardware['cpu']} ({hardware['cores']} cores)"


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
