"""`python -m eval.predict`: what speculation will be worth, by draft length and batch size, before it is run.

With conditional acceptance α_j at position j, a chain of K drafted tokens emits

    E(K) = 1 + Σ_{i <= K} Π_{j <= i} α_j

tokens a round, and a round takes K drafts, one verification of K + 1 tokens, and the host's own time. Against
plain decoding's t(1) per token that is a speedup of

    S(K) = E(K) t(1) / (K t_draft + t(K + 1) + t_host)        (decoding.md, §5)

Times are this machine's, measured (decoding/costs.py), or those of a data sheet (models/roofline.py), target
and draft each between what engines reach at best and what is usual. Acceptance is that of the draft's
measure.json, or what `predict.acceptance` supposes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from configs.entry import entry
from configs.errors import TrafficError
from configs.schema import Config, typed
from decoding.build import network_drafter
from decoding.costs import measured_costs, measured_drafting
from decoding.growth import ChainGrowth
from eval.advice import by_batch
from eval.bench import as_plain
from eval.measure import default_output
from eval.terminal import wide_console
from models.checkpoint import draft_hash, find_draft, load_draft
from models.files import ensure_writable, write_json
from models.provenance import provenance
from models.roofline import BEST, USUAL, Load, Reach, device_named, load_of
from models.target import Target

SCHEMA = "leadout.predict/1"
AT_ONCE = {"medusa", "medusa2", "peagle", "dflash"}  # one forward drafts everything


@entry()
def main(config: Config) -> None:
    predict(config, wide_console())


@dataclass(frozen=True)
class Times:
    """Seconds at one batch size."""

    plain: float  # a forward over one token
    verify: tuple[float, ...]  # over K + 1 tokens, K = 1, 2, ...
    draft: tuple[float, ...]  # of drafting K tokens
    host: float  # a round outside all forwards


def expected_tokens(acceptance: Sequence[float], drafted: int) -> float:
    """E(K). Beyond the positions that are known the last one's acceptance holds on."""
    total = survived = 1.0
    for position in range(drafted):
        survived *= acceptance[min(position, len(acceptance) - 1)]
        total += survived
    return total


def speedup(acceptance: Sequence[float], drafted: int, times: Times) -> float:
    """S(K)."""
    spent = times.draft[drafted - 1] + times.verify[drafted - 1] + times.host
    return expected_tokens(acceptance, drafted) * times.plain / spent


def scaled(acceptance: Sequence[float], drafted: int, wanted: float) -> list[float]:
    """`acceptance` times one factor (and at most 1), so that E(K) is `wanted`."""
    low, high = 0.0, 1 / max(min(acceptance), 1e-9)

    def at(factor: float) -> list[float]:
        return [min(1.0, factor * one) for one in acceptance]

    for _ in range(60):
        middle = (low + high) / 2
        if expected_tokens(at(middle), drafted) < wanted:
            low = middle
        else:
            high = middle
    return at(high)


# ---- acceptance ----


@dataclass(frozen=True)
class Acceptance:
    """α_j by position, and the same as low and as high as its interval allows."""

    middle: list[float]
    low: list[float]
    high: list[float]
    source: str


def acceptance_of(config: Config) -> Acceptance:
    """What `predict.acceptance` supposes, or the draft's measure.json shows at `decode.temperature`."""
    supposed = config.predict.acceptance
    if supposed is not None:
        return Acceptance(supposed, supposed, supposed, "predict.acceptance")
    row = measured_row(config)
    middle = [one for one in row["conditional_acceptance"] if one is not None]
    ends = row["mean_acceptance_length_ci"] or [row["mean_acceptance_length"]] * 2
    low, high = (scaled(middle, len(middle), end) for end in ends)
    return Acceptance(middle, low, high, str(measured_file(config)))


def measured_row(config: Config) -> dict[str, Any]:
    """The row over all prompts of the draft's own chain at `decode.temperature`: its positions are
    conditional ones."""
    file, temperature = measured_file(config), config.decode.temperature
    chain = "decode.tree=chain decode.drafters=[draft]"
    again = f"python -m eval.measure {chain} decode.temperature={temperature:g}"
    if not file.exists():
        raise TrafficError(
            f"There is no {file}, so acceptance is not known. Run {again} first, or suppose it, as in "
            "predict.acceptance=[0.8,0.75,0.7]."
        )
    for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
        everything = row["method"] != "plain" and row["category"] == row["context_bucket"] == "all"
        alone = row["tree"] == "chain" and row["drafters"] == ["draft"]
        if everything and alone and row["temperature"] == temperature:
            return row
    raise TrafficError(
        f"{file} has no chain of the draft alone at temperature {temperature:g}. Run {again}, or suppose "
        "predict.acceptance."
    )


def measured_file(config: Config) -> Path:
    folder = find_draft(config.eval.draft, Path(config.runs), config.experiment)
    return (Path(config.eval.output) if config.eval.output else default_output(folder)) / "measure.json"


def output_of(config: Config) -> Path:
    """Beside measure.json; where no draft is needed, in the experiment's folder."""
    asked = config.predict
    if asked.output is not None:
        return Path(asked.output)
    if asked.device is not None and asked.acceptance is not None:
        return Path(config.runs) / config.experiment
    return measured_file(config).parent


# ---- times ----


def sheet_times(target: Load, draft: Load, at_once: bool, config: Config, batch: int) -> list[Times]:
    """By the data sheet of `predict.device`: with either of them at its best and as usual.

    The draft is split over the devices if that is faster: what it reads is little, and splitting it makes it
    wait for the exchange.
    """
    asked = config.predict
    assert asked.device is not None
    device, context, lengths = device_named(asked.device), asked.context, range(1, asked.draft_tokens + 1)

    def verify(reach: Reach, tokens: int) -> float:
        return target.seconds(device, reach, tokens, batch, context, asked.devices)

    def draw(reach: Reach, tokens: int) -> float:
        return min(draft.seconds(device, reach, tokens, batch, context, n) for n in (1, asked.devices))

    return [
        Times(
            plain=verify(one, 1),
            verify=tuple(verify(one, drafted + 1) for drafted in lengths),
            draft=tuple(draw(other, drafted) if at_once else drafted * draw(other, 1) for drafted in lengths),
            host=other.host,
        )
        for one, other in product((BEST, USUAL), repeat=2)
    ]


def machine_times(target: Target, draft: Any, name: str, config: Config, batch: int, host: float) -> Times:
    """Measured here, or kept from an earlier time. host: seconds of a round outside the forwards."""
    drafter = network_drafter(target, draft, ChainGrowth(config.decode.proposal))
    asked = config.predict
    costs = measured_costs(target, drafter, name, batch, asked.context)
    drafting = measured_drafting(target, drafter, name, asked.draft_tokens, batch, asked.context)
    lengths = range(1, asked.draft_tokens + 1)
    return Times(
        plain=costs.target(1),
        verify=tuple(costs.target(drafted + 1) for drafted in lengths),
        draft=tuple(map(drafting, lengths)),
        host=host,
    )


def draft_load(config: Config, target: Target) -> Load:
    """That of the draft that `method` describes, for a target without weights."""
    module = import_module(f"models.{config.method.name}")
    network = typed(module.NetworkConfig, config.method.network, "method.network")
    with torch.device("meta"):
        draft = module.Draft.build(network, target)
    embeddings = {name for name, p in draft.named_parameters() if p is target.embedding or "embed" in name}
    read = sum(p.numel() for name, p in draft.named_parameters() if name not in embeddings)
    layers = int(getattr(draft.shape, "layers", 1))
    return Load(dense=float(read), layers=layers, hidden=target.hidden_size)


# ---- the prediction ----


@dataclass(frozen=True)
class Row:
    batch: int
    drafted: int  # the K that is best
    expected_tokens: float
    speedup: float
    low: float
    high: float
    by_length: list[float]  # S(K) for K = 1, 2, ...


def row_of(batch: int, acceptance: Acceptance, variants: Sequence[Times]) -> Row:
    """variants: the times as they may be, one or several."""
    lengths = range(1, len(variants[0].verify) + 1)

    def middle(drafted: int) -> float:
        return geometric_mean(speedup(acceptance.middle, drafted, times) for times in variants)

    best = max(lengths, key=middle)
    spread = [speedup(one, best, times) for one in (acceptance.low, acceptance.high) for times in variants]
    return Row(
        batch=batch,
        drafted=best,
        expected_tokens=expected_tokens(acceptance.middle, best),
        speedup=middle(best),
        low=min(spread),
        high=max(spread),
        by_length=[*map(middle, lengths)],
    )


def predict(config: Config, console: Console) -> dict[str, Any]:
    """Predicts, writes predict.json, prints the table and what follows from it; returns what was written."""
    asked = config.predict
    acceptance = acceptance_of(config)
    output = output_of(config)
    ensure_writable(output)
    rows: list[Row] = []
    better: Row | None = None  # at the first batch size, with a better draft
    memory: list[dict[str, Any]] = []
    held: dict[str, float] | None = None  # against what was measured
    if asked.device is not None:
        target = Target.sketch(config.target)
        loads = load_of(target), draft_load(config, target)
        at_once = config.method.name in AT_ONCE
        for batch in asked.batches:
            variants = sheet_times(*loads, at_once, config, batch)
            rows.append(row_of(batch, acceptance, variants))
            better = better or row_of(batch, improved(acceptance), variants)
        memory = [fit(*loads, config, batch) for batch in asked.batches]
    else:
        folder = find_draft(config.eval.draft, Path(config.runs), config.experiment)
        target = Target.load(config.target)
        draft = load_draft(folder, target)
        host = 0.0 if asked.acceptance is not None else 1e-3 * measured_row(config)["decoder_ms"]["p50"]
        for batch in asked.batches:
            variants = [machine_times(target, draft, draft_hash(folder), config, batch, host)]
            rows.append(row_of(batch, acceptance, variants))
            better = better or row_of(batch, improved(acceptance), variants)
        if asked.acceptance is None:
            held = held_against(measured_row(config), rows)
    where = provenance()
    assert better is not None
    written = {
        "schema": SCHEMA,
        **{name: where[name] for name in ("git", "hardware", "versions")},
        "times": asked.device or "measured here",
        "acceptance": asdict(acceptance),
        "rows": [asdict(row) for row in rows],
        "memory": memory,
        "measured": held,
        "better_draft": asdict(better),
        "advice": advice(rows, better),
        "config": as_plain(config),
    }
    write_json(output / "predict.json", written)
    show(written, output / "predict.json", console)
    return written


def improved(acceptance: Acceptance, by: float = 0.05) -> Acceptance:
    """That of a draft which is accepted so much more often at every position."""
    middle, low, high = (
        [min(1.0, one + by) for one in each] for each in (acceptance.middle, acceptance.low, acceptance.high)
    )
    return Acceptance(middle, low, high, acceptance.source)


def held_against(row: dict[str, Any], rows: Sequence[Row]) -> dict[str, float] | None:
    """The measured speedup without prefill, at its K and batch size, and the one predicted there; None where
    that was not asked for."""
    drafted = row["draft_tokens"]
    for one in rows:
        if one.batch == row["batch_size"] and drafted <= len(one.by_length):
            measured, predicted = row["speedup_decode"], one.by_length[drafted - 1]
            return {"draft_tokens": drafted, "measured": measured, "predicted": predicted}
    return None


def fit(target: Load, draft: Load, config: Config, batch: int) -> dict[str, Any]:
    """Bytes on each device, and whether they fit: weights, and the target's K/V of `predict.context` tokens a
    sequence."""
    asked = config.predict
    assert asked.device is not None
    rows = batch * asked.context
    split = target.weights + target.bytes * (target.embedding + target.cache * rows)
    needed = split / asked.devices + draft.weights
    return {"batch": batch, "bytes": needed, "fits": needed <= device_named(asked.device).memory}


def advice(rows: Sequence[Row], better: Row) -> list[str]:
    """What follows, each sentence with the number that made it."""
    first = rows[0]
    said = [
        f"Batch {first.batch}: K = {first.drafted} is best, {first.speedup:.2f}x ({first.low:.2f} to "
        f"{first.high:.2f}).",
        f"A draft accepted .05 more often everywhere would make it {better.speedup:.2f}x, with K = "
        f"{better.drafted}.",
    ]
    return [*said, *by_batch([(row.batch, row.low, row.high) for row in rows])]


def show(written: dict[str, Any], path: Path, console: Console) -> None:
    made = Table(title=f"predicted, times: {written['times']}", title_justify="left")
    for name in ("batch", "K", "tokens a round", "speedup"):
        made.add_column(name, justify="right")
    for row in written["rows"]:
        made.add_row(
            str(row["batch"]),
            str(row["drafted"]),
            f"{row['expected_tokens']:.2f}",
            f"{row['speedup']:.2f}x [{row['low']:.2f}, {row['high']:.2f}]",
        )
    console.print(made)
    for sentence in written["advice"]:
        console.print(sentence, markup=False)
    if (held := written["measured"]) is not None:
        console.print(
            f"Held against the measurement at K = {held['draft_tokens']}: predicted "
            f"{held['predicted']:.2f}x, measured {held['measured']:.2f}x.",
            markup=False,
        )
    for one in written["memory"]:
        if not one["fits"]:
            console.print(
                f"Batch {one['batch']} needs {one['bytes'] / 1e9:.0f} GB on each device, more than it has.",
                markup=False,
            )
    console.print(str(path), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
