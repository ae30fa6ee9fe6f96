"""`python -m eval.predict`: what speculation will be worth, by draft length, tree and batch size.

A round that emits E tokens in expectation, beside plain decoding's one, is a speedup of

    S = E t(1) / (t_draft(depth) + t(nodes) + t_own)        (Leviathan et al. 2023, Sequoia §3.3)

What is known of the draft decides what can be told:

    chains         conditional acceptance α_j at position j: E(K) = 1 + Σ_{i <= K} Π_{j <= i} α_j, K + 1 nodes
    static trees   acceptance by depth and rank, from eval.tree: the best tree of each size
                   (decoding/sequoia.py)
    as measured    any other setting of a measure.json (dynamic trees, several drafters): its own E and sizes,
                   at other batch sizes or on other hardware; there is no telling another tree from it

Times are this machine's, measured (decoding/costs.py), or those of a data sheet (models/roofline.py), target
and draft each between what engines reach at best and what is usual. Acceptance may also be supposed
(`predict.acceptance`). `python -m eval.validate` holds all of it against measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from itertools import pairwise, product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from configs.compose import as_plain
from configs.entry import entry
from configs.schema import Config, typed
from decoding.build import network_drafter
from decoding.compiled import Compiled
from decoding.costs import Curve, measured_costs, measured_drafting, sizes_up_to
from decoding.growth import ChainGrowth
from decoding.sequoia import best_tree
from eval.advice import by_batch
from eval.evidence import Acceptance, Evidence, draft_folder, evidence_of, expected_tokens, measured_file
from eval.terminal import wide_console
from models.checkpoint import draft_hash, load_draft
from models.files import ensure_writable, write_json
from models.provenance import provenance
from models.roofline import BEST, USUAL, Load, Reach, device_named, load_of
from models.target import Target

SCHEMA = "leadout.predict/1"
AT_ONCE = {"medusa", "medusa2", "peagle", "dflash"}  # one forward drafts everything
TREES = (2, 4, 8, 16, 32, 64)  # nodes of the static trees that are weighed, their roots included


@entry()
def main(config: Config) -> None:
    predict(config, wide_console())


Seconds = Callable[[int], float]


@dataclass(frozen=True)
class Times:
    """Seconds of a round's parts, at one batch size."""

    plain: float  # a round of plain decoding
    verify: Seconds  # the target's forward, by the tree's nodes, its root included
    draft: Seconds  # the draft's forwards, by the tree's depth
    own: Seconds  # the decoder outside both, by nodes

    def round(self, nodes: int, depth: int) -> float:
        return (self.draft(depth) if depth else 0.0) + self.verify(nodes) + self.own(nodes)


def speedup(acceptance: Sequence[float], drafted: int, times: Times) -> float:
    """S(K) of a chain."""
    return expected_tokens(acceptance, drafted) * times.plain / times.round(drafted + 1, drafted)


def widest(drafted: Mapping[int, float], batch: int) -> dict[int, float]:
    """The law of the largest of `batch` trees, by drafted tokens. drafted: how often each number occurs.

    A forward is as wide as the batch's widest tree: P(largest = d) = F(d)^B - F(d - 1)^B.
    """
    total, below, law = sum(drafted.values()), 0.0, {}
    for count in sorted(drafted):
        upto = below + drafted[count] / total
        law[count] = upto**batch - below**batch
        below = upto
    return law


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
    device, context = device_named(asked.device), asked.context

    def times(verifying: Reach, drafting: Reach) -> Times:
        def verify(nodes: int) -> float:
            return target.seconds(device, verifying, nodes, batch, context, asked.devices)

        one = min(draft.seconds(device, drafting, 1, batch, context, n) for n in (1, asked.devices))

        def draw(depth: int) -> float:
            if not at_once:
                return depth * one
            return min(draft.seconds(device, drafting, depth, batch, context, n) for n in (1, asked.devices))

        return Times(verify(1), verify, draw, lambda _: drafting.host)

    return [times(*reached) for reached in product((BEST, USUAL), repeat=2)]


def machine_times(
    target: Target,
    draft: Any,
    name: str,
    config: Config,
    batch: int,
    known: Evidence,
    compiled: Compiled | None = None,
) -> Times:
    """Measured here, or kept from an earlier time; the decoder's own time as it was measured. compiled: the
    target's forwards, if decoding compiles them."""
    drafter = network_drafter(target, draft, ChainGrowth(config.decode.proposal))
    asked = config.predict
    forward = measured_costs(target, drafter, name, batch, asked.context, compiled=compiled).target
    # A line also between compiled sizes: who decodes with chains or trees of n nodes compiles that size.
    forward = Curve(forward.sizes, forward.seconds)
    drafting = measured_drafting(target, drafter, name, asked.draft_tokens, batch, asked.context)
    own = own_times(known, batch)
    return Times(forward(1) + own(1), forward, drafting, own)


def own_times(known: Evidence, batch: int) -> Seconds:
    """The decoder's own seconds of a round, by nodes: on the line through what eval.tree saw of plain rounds
    and of its wide tree, and what measure.json has of plain and of speculative rounds. Sequences are proposed
    for and verified one by one, so it grows with the batch."""
    points: dict[int, float] = {}
    if known.tree is not None and known.tree.seconds is not None:
        share = batch / (known.tree.batch_size or 1)
        points |= {int(nodes): seconds * share for nodes, seconds in known.tree.seconds["host"].items()}
    for row in (known.plain(batch), known.other(batch), known.chain(batch)):
        if row is not None and row["decoder_ms"] is not None:
            points[mean_nodes(row)] = 1e-3 * row["decoder_ms"]["p50"] * batch / row["batch_size"]
    if not points:
        return lambda _: 0.0
    return Curve(tuple(sorted(points)), tuple(points[nodes] for nodes in sorted(points)))


def mean_nodes(row: dict[str, Any]) -> int:
    """Of the trees of a measured row, the root included."""
    sizes = lengths(row)
    return 1 + round(sum(drafted * count for drafted, count in sizes.items()) / sum(sizes.values()))


def lengths(row: dict[str, Any]) -> dict[int, float]:
    """How often each number of tokens was drafted; plain rounds draft none."""
    return {
        int(drafted): float(sum(counts)) for drafted, counts in (row["draft_lengths"] or {"0": [1]}).items()
    }


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
    """Chains at one batch size."""

    batch: int
    drafted: int  # the K that is best
    expected_tokens: float
    speedup: float
    low: float
    high: float
    by_length: list[float]  # S(K) for K = 1, 2, ...


@dataclass(frozen=True)
class TreeRow:
    """A static tree, or the setting that was measured, at one batch size."""

    batch: int
    nodes: int  # the root included; as measured: on average
    depth: int
    expected_tokens: float
    speedup: float
    low: float | None  # None: nothing says how far it may be off
    high: float | None


def row_of(batch: int, acceptance: Acceptance, variants: Sequence[Times], longest: int) -> Row:
    """variants: the times as they may be, one or several. longest: the largest K."""
    lengths = range(1, longest + 1)

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


def tree_row(
    batch: int, vectors: Sequence[Sequence[float]], variants: Sequence[Times], nodes: int, deepest: int
) -> TreeRow:
    """The fastest static tree of at most so many nodes, no deeper than `vectors` [depth][rank] are known."""
    found: dict[int, TreeRow] = {}
    for depth in range(1, min(len(vectors), deepest) + 1):
        tree = best_tree(vectors, nodes, depth)
        gains = [tree_speedup(tree.expected_tokens, len(tree.shape), tree.shape.depth, t) for t in variants]
        found[depth] = TreeRow(
            batch,
            len(tree.shape),
            tree.shape.depth,
            tree.expected_tokens,
            geometric_mean(gains),
            *ends(gains),
        )
    return max(found.values(), key=lambda row: row.speedup)


def tree_speedup(tokens: float, nodes: int, depth: int, times: Times) -> float:
    return tokens * times.plain / times.round(nodes, depth)


def ends(gains: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    return (min(gains), max(gains)) if len(gains) > 1 else (None, None)


def as_measured(batch: int, row: dict[str, Any], variants: Sequence[Times], compiled: bool) -> TreeRow:
    """A measured setting, whatever drafted, at another batch size or on other hardware.

    Its tokens a round and the sizes of its trees stay, only times change. Drafting costs what it would at
    full depth; drafters that are no network cost nothing but the decoder's own time. compiled: every tree is
    padded to the largest there may be.
    """
    depth = row["draft_tokens"] if "draft" in row["drafters"] else 0
    if compiled:
        variants = [at_two_sizes(times, most_nodes(row)) for times in variants]
    taus = [row["mean_acceptance_length"], *(row["mean_acceptance_length_ci"] or [])]
    rounds = [seconds_of(lengths(row), depth, batch, times) for times in variants]
    gains = [[tau * t.plain / s for t, s in zip(variants, rounds, strict=True)] for tau in taus]
    spread = [gain for each in gains for gain in each]
    return TreeRow(batch, mean_nodes(row), depth, taus[0], geometric_mean(gains[0]), *ends(spread))


def at_two_sizes(times: Times, most: int) -> Times:
    """As decoding/build.py has forwards compiled: over one node, and over `most`."""
    return replace(times, verify=lambda nodes: times.verify(1 if nodes == 1 else most))


def most_nodes(row: dict[str, Any]) -> int:
    """Of the largest tree that a measured row's setting can make, the root included."""
    own = row["tree_nodes"] or row["draft_tokens"]
    return 1 + sum(own if name == "draft" else row["draft_tokens"] for name in row["drafters"])


def seconds_of(drafted: Mapping[int, float], depth: int, batch: int, times: Times) -> float:
    """Mean seconds of a round whose trees have so many drafted tokens, each as often as given."""
    return sum(share * times.round(1 + count, depth) for count, share in widest(drafted, batch).items())


def predict(config: Config, console: Console) -> dict[str, Any]:
    """Predicts, writes predict.json, prints the table and what follows from it; returns what was written.

    Raises `TrafficError` where no acceptance is known, `CheckpointError` and `StorageError`.
    """
    asked = config.predict
    known = evidence_of(config)
    output = output_of(config)
    ensure_writable(output)
    here = asked.device is None
    cases, memory = on_this_machine(config, known, console) if here else on_device(config)
    rows, trees, measured, better = [], [], [], None
    for batch, variants in cases.items():
        if known.acceptance is not None:
            rows.append(row_of(batch, known.acceptance, variants, asked.draft_tokens))
            better = better or row_of(batch, improved(known.acceptance), variants, asked.draft_tokens)
        if known.vectors is not None:
            trees += [tree_row(batch, known.vectors, variants, n, asked.draft_tokens) for n in TREES]
        if (row := known.other(batch)) is not None:
            measured.append(as_measured(batch, row, variants, config.decode.compile))
    chain = known.chain(min(cases))
    if chain is not None and chain.get("compiled", False) != config.decode.compile:
        chain = None  # it says nothing of these times
    where = provenance()
    written = {
        "schema": SCHEMA,
        **{name: where[name] for name in ("git", "hardware", "versions")},
        "times": asked.device or "measured here",
        "acceptance": asdict(known.acceptance or Acceptance([], [], [], str(measured_file(config)))),
        "rows": [asdict(row) for row in rows],
        "trees": [asdict(row) for row in trees],
        "as_measured": [asdict(row) for row in measured],
        "memory": memory,
        "measured": held_against(chain, rows) if chain is not None and here else None,
        "break_even": break_even(rows or measured),
        "better_draft": None if better is None else asdict(better),
        "advice": advice(rows, trees, measured, better),
        "config": as_plain(config),
    }
    write_json(output / "predict.json", written)
    show(written, output / "predict.json", console)
    return written


def on_device(config: Config) -> tuple[dict[int, list[Times]], list[dict[str, Any]]]:
    """Times by batch size from a data sheet, and whether it fits."""
    target = Target.sketch(config.target)
    loads = load_of(target), draft_load(config, target)
    at_once, batches = config.method.name in AT_ONCE, config.predict.batches
    return (
        {batch: sheet_times(*loads, at_once, config, batch) for batch in batches},
        [fit(*loads, config, batch) for batch in batches],
    )


def on_this_machine(
    config: Config, known: Evidence, console: Console
) -> tuple[dict[int, list[Times]], list[dict[str, Any]]]:
    folder = draft_folder(config)
    target = Target.load(config.target)
    draft, name = load_draft(folder, target), draft_hash(folder)
    batches, compiled = config.predict.batches, None
    if config.decode.compile:
        compiled = Compiled(target, sizes_up_to(largest_asked(config, known)))
        console.print(
            f"decode.compile: {len(compiled.sizes)} sizes of forwards are compiled and measured for each "
            "batch size, once on this machine; on a CPU a size takes about a minute.",
            highlight=False,
        )
    return {b: [machine_times(target, draft, name, config, b, known, compiled)] for b in batches}, []


def largest_asked(config: Config, known: Evidence) -> int:
    """Nodes of the largest tree that is weighed."""
    rows = [row for batch in config.predict.batches if (row := known.other(batch)) is not None]
    trees = TREES if known.vectors is not None else ()
    return max([1 + config.predict.draft_tokens, *trees, *map(most_nodes, rows)])


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


def break_even(rows: Sequence[Row | TreeRow]) -> float | None:
    """The batch size from which it no longer pays, between those asked (on a logarithmic scale); None: it
    pays at all of them, or at none."""
    for below, above in pairwise(sorted(rows, key=lambda row: row.batch)):
        if below.speedup > 1 >= above.speedup:
            share = (below.speedup - 1) / (below.speedup - above.speedup)
            return below.batch * (above.batch / below.batch) ** share
    return None


def advice(
    rows: Sequence[Row], trees: Sequence[TreeRow], measured: Sequence[TreeRow], better: Row | None
) -> list[str]:
    """What follows, each sentence with the number that made it."""
    said = []
    for first in rows[:1]:
        said.append(
            f"Batch {first.batch}: K = {first.drafted} is best, {first.speedup:.2f}x ({first.low:.2f} to "
            f"{first.high:.2f})."
        )
    for batch in dict.fromkeys(row.batch for row in trees[:1]):
        best = max((row for row in trees if row.batch == batch), key=lambda row: row.speedup)
        said.append(
            f"Batch {batch}: of static trees one of {best.nodes} nodes and depth {best.depth} is best, "
            f"{best.speedup:.2f}x with {best.expected_tokens:.2f} tokens a round."
        )
    if better is not None:
        said.append(
            f"A draft accepted .05 more often everywhere would make it {better.speedup:.2f}x, with K = "
            f"{better.drafted}."
        )
    known = [(row.batch, row.low, row.high) for row in rows or measured]
    said += by_batch(
        [(batch, low, high) for batch, low, high in known if low is not None and high is not None]
    )
    if (crossing := break_even(rows or measured)) is not None:
        said.append(f"It breaks even at a batch of about {crossing:.0f}.")
    return said


def show(written: dict[str, Any], path: Path, console: Console) -> None:
    made = Table(title=f"predicted, times: {written['times']}", title_justify="left")
    for name in ("batch", "drafted", "tokens a round", "speedup"):
        made.add_column(name, justify="left" if name == "drafted" else "right")
    for row in written["rows"]:
        add(made, row, f"a chain of {row['drafted']}")
    for row in written["trees"]:
        add(made, row, f"a static tree of {row['nodes']} nodes, depth {row['depth']}")
    for row in written["as_measured"]:
        add(made, row, f"as measured, {row['nodes']} nodes on average")
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


def add(table: Table, row: dict[str, Any], drafted: str) -> None:
    spread = "" if row["low"] is None else f" [{row['low']:.2f}, {row['high']:.2f}]"
    table.add_row(
        str(row["batch"]), drafted, f"{row['expected_tokens']:.2f}", f"{row['speedup']:.2f}x{spread}"
    )


if __name__ == "__main__":
    main()
