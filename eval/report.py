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

import jsonschema

from configs.entry import paragraphs
from configs.errors import MeasurementError
from eval.page import (
    Shown,
    bare,
    interval,
    listing,
    number,
    page,
    percent,
    ranged,
    scrolled,
    sentence,
    short,
    times,
    tr,
)
from eval.pictures import (
    DRAFT,
    PLAIN,
    Curve,
    Picture,
    acceptance_map,
    distributions,
    held_against,
    positions,
    speedups,
    sweep,
)
from eval.rows import verdict
from models.files import storage, write_bytes, write_text

Row = dict[str, Any]
Rows = dict[tuple[str, str], Row]  # by category and context bucket
Setting = tuple[float, int]  # temperature, batch size

SCHEMA = Path(__file__).with_name("measure.schema.json")

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


def measurement_file(path: Path) -> Path:
    return path / "measure.json" if path.is_dir() else path


def read_measurement(path: Path) -> dict[str, Any]:
    """The measurement in a measure.json, or in the folder of one. Raises `MeasurementError` for anything
    else."""
    file = measurement_file(path)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MeasurementError(f"There is no {file}. python -m eval.measure writes one.") from None
    except (OSError, ValueError) as error:
        raise MeasurementError(f"{file} cannot be read as JSON ({error}). Name a measure.json.") from None
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    wanted = schema["properties"]["schema"]["const"]
    if not isinstance(found, dict) or found.get("schema") != wanted:
        said = found.get("schema") if isinstance(found, dict) else None
        raise MeasurementError(
            f"{file} is no measurement: its schema is {said!r} and not {wanted!r}. Name a measure.json as "
            "python -m eval.measure writes it."
        )
    if (wrong := next(jsonschema.Draft202012Validator(schema).iter_errors(found), None)) is not None:
        raise MeasurementError(
            f"{file} is no whole measurement: at {wrong.json_path}, {wrong.message[-160:]}. It may be of an "
            "earlier version: measure again."
        )
    return found


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


def settings_of(rows: Sequence[Row]) -> list[Setting]:
    return sorted({(row["temperature"], row["batch_size"]) for row in rows})


def named(setting: Setting) -> str:
    return f"temperature {setting[0]:g}, batch {setting[1]}"


def split(measurement: dict[str, Any], setting: Setting) -> tuple[Rows, Rows]:
    """(speculative rows, plain rows) of a setting."""
    here = [row for row in measurement["rows"] if (row["temperature"], row["batch_size"]) == setting]
    drafted, plain = (
        {(r["category"], r["context_bucket"]): r for r in here if (r["method"] == "plain") is wanted}
        for wanted in (False, True)
    )
    return drafted, plain


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


def anchor(setting: Setting) -> str:
    return f"t{setting[0]:g}-b{setting[1]}"


# ---- one setting ----


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
        and (row["tree"], row["drafters"]) == ("chain", ["draft"])
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


# ---- words ----


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


def commit(git: dict[str, Any] | None) -> str:
    return git["commit"][:12] + (" with local changes" if git["dirty"] else "") if git else "none"


if __name__ == "__main__":
    main()
