"""A measurement as one HTML page that needs nothing else: no scripts, no fonts, no pictures from outside.

    python -m eval.report runs/.../measure

writes the page of a measure.json anew, with what eval.predict put beside it since, and every picture of it as
PNG in pictures/. `report` itself is a pure function of the measurement. Text that came from files is escaped.
Beside each figure stands what it means, because the same word means different things in different tools
(docs/measuring.md).

A setting is what is measured apart: a temperature and a batch size. Each has a section of its own; where
there are several, an overview with the sweeps comes first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from configs.entry import paragraphs
from eval.measurement import (
    Row,
    anchor,
    commit,
    drafting,
    measurement_file,
    named,
    place,
    read_measurement,
    settings_of,
    split,
)
from eval.page import (
    Shown,
    bare,
    listing,
    number,
    page,
    percent,
    ranged,
    scrolled,
    short,
    times,
    tr,
)
from eval.pictures import (
    Picture,
    held_against,
    sweep,
)
from eval.rows import is_chain, verdict
from eval.sections import drawings, section
from models.files import storage, write_bytes, write_text

# ---- files ----


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.report",
        description="Writes report.html and pictures/*.png beside a measure.json.",
    )
    parser.add_argument("measurements", nargs="+", type=Path, help="a measure.json, or the folder it is in")
    with paragraphs():
        for path in parser.parse_args(arguments).measurements:
            measurement, folder = read_measurement(path), measurement_file(path).parent
            prediction = read_prediction(folder)
            write_text(folder / "report.html", report(measurement, prediction))
            write_pictures(folder / "pictures", pictures(measurement, prediction))
            print(folder / "report.html")


def read_prediction(folder: Path) -> dict[str, Any] | None:
    """What eval.predict wrote beside the measurement."""
    path = folder / "predict.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def write_pictures(folder: Path, drawn: Sequence[Picture]) -> None:
    """Every picture as `folder`/NAME.png; nothing else there is touched."""
    with storage(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for picture in drawn:
        write_bytes(folder / f"{picture.name}.png", picture.png())


# ---- the page ----


def report(measurement: dict[str, Any], prediction: dict[str, Any] | None = None) -> str:
    """The page for a measurement that `measure.schema.json` accepts, and for what was predicted of it."""
    settings = settings_of(measurement["rows"])
    several = len(settings) > 1
    body = [
        header(measurement),
        warning(measurement["load"]),
        advised(measurement.get("advice") or []),
        overview(measurement) if several else "",
        *[section(measurement, setting, several) for setting in settings],
        predicted(measurement, prediction),
        replies(measurement.get("samples") or []),
        agreement(measurement) if any(temperature == 0 for temperature, _ in settings) else "",
        conditions(measurement),
    ]
    title = f"{measurement['draft']['method']} draft for {short(measurement['target']['name'])}"
    return page(title, body)


def pictures(measurement: dict[str, Any], prediction: dict[str, Any] | None = None) -> list[Picture]:
    """Every picture of the page."""
    settings = settings_of(measurement["rows"])
    shown = [*sweeps(measurement["rows"])]
    for setting in settings:
        shown += drawings(measurement, setting)
    shown += comparison(held(measurement, prediction) or [])
    return [one.picture for one in shown]


def header(measurement: dict[str, Any]) -> str:
    target, measured = measurement["target"], measurement["traffic"]["measured"]
    when = measurement["created"][:16].replace("T", " ")
    return (
        f"<h1>{escape(measurement['draft']['method'])} draft for {escape(short(target['name']))}</h1>"
        f'<p class="sub">Measured {when} UTC on {escape(place(measurement))}, {target["dtype"]}, '
        f"{batches(measurement)}, over {sum(measured.values())} held-out prompts in {len(measured)} "
        "categories; none of them is a training prompt.</p>"
    )


def batches(measurement: dict[str, Any]) -> str:
    sizes = sorted({row["batch_size"] for row in measurement["rows"]})
    return (
        f"batch {' and '.join(map(str, sizes))}"
        if len(sizes) < 3
        else f"batches of {sizes[0]} to {sizes[-1]}"
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


def advised(advice: Sequence[str]) -> str:
    listed = "".join(f"<li>{escape(one)}</li>" for one in advice)
    return f'<div class="card"><h3>What follows</h3><ul class="notes">{listed}</ul></div>' if listed else ""


# ---- several settings ----


def overview(measurement: dict[str, Any]) -> str:
    """Every setting in a line, and the sweeps."""
    lines = []
    for setting in settings_of(measurement["rows"]):
        drafted, plain = split(measurement, setting)
        whole, before = drafted["all", "all"], plain["all", "all"]
        cells = (
            f'<a href="#{anchor(setting)}">{named(setting)}</a>',
            ranged(whole["speedup"], whole["speedup_ci"], times),
            ranged(whole["mean_acceptance_length"], whole["mean_acceptance_length_ci"], number),
            percent(whole["acceptance_rate"]),
            number(before["tokens_per_s"], 1),
            number(whole["tokens_per_s"], 1),
            escape(verdict(whole).split(" (")[0]),
        )
        lines.append(tr(cells))
    heads = ("", "speedup", "τ", "accepted", "plain tok/s", "draft tok/s", "")
    return (
        "<h2>All settings</h2>"
        + scrolled(heads, lines)
        + "".join(one.html() for one in sweeps(measurement["rows"]))
    )


def sweeps(rows: Sequence[Row]) -> Iterator[Shown]:
    """Speedup against batch size and against temperature, where several were measured."""
    whole = [
        row for row in rows if row["method"] != "plain" and row["category"] == row["context_bucket"] == "all"
    ]
    for across, along, axis, other, text in (
        (
            "batch_size",
            "temperature",
            "sequences decoded together",
            "temperature",
            "Speedup over plain decoding at the same batch size. The more sequences are decoded together, "
            "the less the target waits for its weights, and the less there is to win: where a line falls "
            "below the broken one, speculation should be switched off.",
        ),
        (
            "temperature",
            "batch_size",
            "temperature",
            "batch",
            "Speedup over plain decoding at the same temperature. The flatter the target's law, the less "
            "often it agrees with the draft.",
        ),
    ):
        if len({row[across] for row in whole}) < 2:
            continue
        lines = [
            (
                f"{other} {value:g}",
                [(row[across], (row["speedup"], row["speedup_ci"])) for row in whole if row[along] == value],
            )
            for value in sorted({row[along] for row in whole})
        ]
        title = f"Speedup against {across.replace('_', ' ')}"
        yield Shown(sweep(lines, axis, f"speedup-by-{across.replace('_', '-')}"), title, text)


# ---- predicted against measured ----

Held = list[tuple[int, int, list[float], Row]]  # batch size, K, predicted S(1), S(2), ..., the row measured


def held(measurement: dict[str, Any], prediction: dict[str, Any] | None) -> Held | None:
    """What was predicted of this measurement, at the settings that were measured; None if `prediction` is of
    another measurement."""
    if prediction is None or prediction["schema"] != "leadout.predict/1":
        return []
    if prediction["times"] != "measured here" or prediction["acceptance"]["source"] == "predict.acceptance":
        return []  # of other hardware, or of a draft that is supposed
    temperature = prediction["config"]["decode"]["temperature"]
    chains = {
        row["batch_size"]: row
        for row in measurement["rows"]
        if row["temperature"] == temperature
        and is_chain(row)
        and row["category"] == row["context_bucket"] == "all"
    }
    if not chains:
        return []  # it was made from another file, as that of eval.tree
    known = [
        [one for one in row["conditional_acceptance"] or [] if one is not None] for row in chains.values()
    ]
    if prediction["acceptance"]["middle"] not in known:
        return None
    return [
        (one["batch"], row["draft_tokens"], one["by_length"], row)
        for one in prediction["rows"]
        if (row := chains.get(one["batch"])) is not None and row["draft_tokens"] <= len(one["by_length"])
    ]


def predicted(measurement: dict[str, Any], prediction: dict[str, Any] | None) -> str:
    found = held(measurement, prediction)
    if found is None:
        return (
            '<h2>Predicted and measured</h2><div class="card">The predict.json beside this measurement is '
            "of another one. Run <code>python -m eval.predict</code> again to hold a prediction against this "
            "one.</div>"
        )
    if not found:
        return ""
    lines = [
        tr(
            (
                f"batch {batch}, K = {drafted}",
                times(by_length[drafted - 1]),
                ranged(row["speedup_decode"], row["speedup_decode_ci"], times),
                "–"
                if row["speedup_decode"] is None
                else f"{by_length[drafted - 1] / row['speedup_decode'] - 1:+.1%}",
            )
        )
        for batch, drafted, by_length, row in found
    ]
    heads = ("without prefill", "predicted", "measured", "prediction off by")
    shown = "".join(one.html() for one in comparison(found))
    return f"<h2>Predicted and measured</h2>{shown}{scrolled(heads, lines)}"


def comparison(found: Held) -> Iterator[Shown]:
    if not found:
        return
    lines = [(f"batch {batch}, predicted", by_length) for batch, _, by_length, _ in found]
    points = [[(drafted, (row["speedup_decode"], row["speedup_decode_ci"]))] for _, drafted, _, row in found]
    yield Shown(
        held_against(lines, points, "predicted"),
        "Speedup by draft length",
        "Lines: what eval.predict expects of a chain of K tokens, from the acceptance measured here and from "
        "the times of single forwards. Dots: what was measured end to end. Where they lie apart, something "
        "costs time that the prediction does not know of.",
    )


# ---- replies ----


def replies(samples: Sequence[dict[str, Any]]) -> str:
    """Some answers, with the tokens that the draft wrote set off from the target's own."""
    if not samples:
        return ""
    legend = (
        '<p class="legend tokens"><i>drafted and accepted</i> <b>written by the target</b> Every round ends '
        "with one token of the target's own, so each blue run is what one round saved.</p>"
    )
    return "<h2>Who wrote what</h2>" + legend + "".join(map(reply, samples))


def reply(sample: dict[str, Any]) -> str:
    spans = "".join(
        f"<i>{escape(text)}</i>" if from_draft else f"<b>{escape(text)}</b>"
        for text, from_draft in sample["pieces"]
    )
    drafted, count = sum(from_draft for _, from_draft in sample["pieces"]), len(sample["pieces"])
    return (
        f'<div class="card reply"><h3>{escape(sample["category"])} <small>{escape(sample["prompt"])}: '
        f'{drafted} of {count} tokens by the draft</small></h3><div class="tokens">{spans}</div></div>'
    )


# ---- outputs and conditions ----


def agreement(measurement: dict[str, Any]) -> str:
    """Did speculation change what was said? Greedy runs only."""
    greedy = [pair for pair in measurement["details"] if pair["temperature"] == 0]
    counts = []
    for setting in settings_of(measurement["rows"]):
        whole = split(measurement, setting)[0]["all", "all"]
        if (same := whole["identical_count"]) is not None:
            counts.append(
                f"{same} of {whole.get('pairs', whole['prompts'])} greedy outputs at batch {setting[1]}"
            )
    parts = [
        f"<p>{' and '.join(counts)} are identical to plain decoding, token for token. In exact arithmetic "
        "all are; in bfloat16 and float16 a forward over several tokens rounds differently from one over a "
        "single token, and a near-tie between the two best tokens can fall either way.</p>"
    ]
    if diverged := sorted(
        (pair for pair in greedy if pair["divergence"]), key=lambda pair: -pair["divergence"]["gap"]
    ):
        lines = [
            tr(
                (
                    f"{escape(pair['prompt'])} <small>{escape(pair['category'])}</small>",
                    str(pair["divergence"]["index"]),
                    number(pair["divergence"]["gap"], 4),
                )
            )
            for pair in diverged[:20]
        ]
        parts.append(
            "<p>Those that differ, with the gap between the target's two best logits at the first "
            "difference (the largest first). A small gap is rounding; a large one would be a fault.</p>"
            + bare(("prompt", "at token", "logit gap"), lines)
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
        "Numbers": f"{target['dtype']}, {target['attention']} attention, {batches(measurement)}",
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
        "Commit": commit(git),
        "Versions": listing({name: version for name, version in measurement["versions"].items() if version}),
        "Schema": measurement["schema"],
    }
    listed = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    used = memory(measurement.get("memory") or [])
    return f'<h2>Conditions</h2><div class="card"><dl>{listed}</dl></div>{used}'


MEMORY = {
    "target_weights": "target", "draft_weights": "draft", "packed_weights": "packed weights",
    "plain_cache": "K/V, plain", "target_cache": "K/V, speculative", "draft_cache": "draft's K/V",
    "allocated": "allocated at most",
}  # fmt: skip


def memory(measured: Sequence[dict[str, Any]]) -> str:
    """Megabytes by batch size; what no batch size has is left out."""
    shown = [name for name in MEMORY if any(one[name] is not None for one in measured)]
    lines = [
        tr((f"batch {one['batch_size']}", *[number(one[n] and one[n] / 1e6, 1) for n in shown]))
        for one in measured
    ]
    return scrolled(("memory in MB", *[MEMORY[name] for name in shown]), lines) if lines else ""


if __name__ == "__main__":
    main()
