"""`python -m train.vocab`: how large a draft vocabulary pays, told before anything is trained.

A token outside the draft vocabulary can never be drafted, and one inside costs a row of the draft's head at
every forward. For sizes from a thousand tokens to all of them the table says

    coverage   the share of reply tokens inside, counted on training rows that the ids were not chosen from
    drafting   measured: the draft's forwards in a round, of an untrained draft of that size
    tokens     that a round emits: 1 + sum_i prod_{j <= i} coverage * a_j, for the K drafted ones
    speedup    tokens * t(1) / (drafting + t(K + 1)), t(n) being the target's measured forward over n nodes

a_j is the acceptance at position j of tokens inside: what the experiment's newest draft reached on held-out
prompts, divided by its own coverage, or an assumed value where there is none. The rounds' own overhead is not
in it, so the last column is for comparing sizes, not a promise. It says what it recommends and writes
`runs/<experiment>/vocab.json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from itertools import accumulate
from operator import mul
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from configs.entry import entry
from configs.errors import CheckpointError, ConfigError, TrafficError
from configs.schema import Config
from data.tokens import TokenRow, load_token_rows
from data.vocabulary import trained_counts
from decoding.clock import now
from decoding.costs import Curve, context_bucket, drafting, measured, target_forward
from decoding.drafters import Drafter
from decoding.growth import ChainGrowth
from models.checkpoint import latest_draft, read_config
from models.files import ensure_writable, write_json
from models.packing import pack
from models.provenance import provenance
from models.target import Target
from train.acceptance import deployed
from train.distill import Method, find_method

SIZES = (1024, 2048, 4096, 8192, 16384, 32768)  # and the whole vocabulary
KEPT_OUT = 10  # every tenth row is counted on, and not chosen from
ASSUMED = 0.7  # acceptance of a token inside, where no draft was measured: EAGLE-3's on chat is about that
CLOSE = 0.01  # speedups that differ by less are as good as equal: the larger vocabulary is safer
CONTEXT = 256  # tokens that forwards are timed behind
PASSES = 5  # over all sizes, so that a slow spell of the machine does not fall on one of them


@dataclass(frozen=True)
class Size:
    """What is predicted of one size."""

    tokens: int
    coverage: float
    draft_seconds: float  # of a round
    tokens_per_round: float
    speedup: float


def choose(config: Config, console: Console) -> Path:
    """Measures and writes; returns the file."""
    where = provenance()  # before we load the machine ourselves
    method = find_method(config.method)
    check(config, method)
    folder = Path(config.runs) / config.experiment
    ensure_writable(folder)
    target = Target.load(config.target)
    rows = load_token_rows(config, target, console)
    chosen_from, counted_on = parted(rows)
    drafts = {
        size: untrained(method, size, target, chosen_from, config.seed)
        for size in sizes_below(target.vocab_size)
    }
    counts = trained_counts(counted_on, target.vocab_size)
    covered = {size: coverage(draft.draft_ids.tolist(), counts) for size, draft in drafts.items()}
    depth = config.decode.draft_tokens
    seconds = drafting_seconds({n: drafter_of(d, config) for n, d in drafts.items()}, target, config)
    forward = target_seconds(target, config)
    acceptances, origin = inside(config, target, depth)
    sizes = [predicted(n, covered[n], seconds[n], acceptances, forward) for n in drafts]
    best = recommended(sizes)
    found = {
        "method": method.values(),
        "draft_tokens": depth,
        "batch_size": config.decode.batch_size,
        "context": context_bucket(CONTEXT),
        "target_seconds": dict(zip(forward.sizes, forward.seconds, strict=True)),
        "acceptances": acceptances,
        "acceptances_from": origin,
        "rows": {"chosen_from": len(chosen_from), "counted_on": len(counted_on)},
        "reply_tokens_counted": int(counts.sum()),
        "sizes": [asdict(size) for size in sizes],
        "recommended": best.tokens,
        "provenance": where,
    }
    write_json(folder / "vocab.json", found)
    show(sizes, best, found, target.vocab_size, console)
    console.print(str(folder / "vocab.json"), markup=False, highlight=False, soft_wrap=True)
    return folder / "vocab.json"


def check(config: Config, method: Method) -> None:
    if not hasattr(method.network, "draft_vocab_size"):
        raise ConfigError(
            f"method.name={method.name} has no draft vocabulary of its own, so there is no size to choose. "
            "Choose another method, as in method=eagle3."
        )
    if config.decode.draft_tokens < 1:
        raise ConfigError(
            f"decode.draft_tokens={config.decode.draft_tokens} drafts nothing, so no vocabulary would help. "
            "Set it to 1 or more."
        )


# ---- what is inside ----


def sizes_below(vocab: int) -> list[int]:
    return [*(size for size in SIZES if size < vocab), vocab]


def parted(rows: Sequence[TokenRow]) -> tuple[list[TokenRow], list[TokenRow]]:
    """(rows to choose ids from, rows to count coverage on)."""
    kept_out = rows[::KEPT_OUT]
    rest = [row for n, row in enumerate(rows) if n % KEPT_OUT]
    if not rest:
        raise TrafficError(
            f"{len(rows)} training rows are too few to choose a vocabulary from some and count its coverage "
            "on others. Let the target answer more prompts: regenerate.max_prompts."
        )
    return rest, list(kept_out)


def coverage(ids: Sequence[int], counts: np.ndarray) -> float:
    """The share of `counts` [V] that falls on `ids`."""
    return float(counts[list(ids)].sum() / counts.sum())


# ---- what it costs ----


def untrained(method: Method, size: int, target: Target, rows: Sequence[TokenRow], seed: int) -> Any:
    """A draft as training begins with it, its vocabulary the `size` tokens that `rows` use most."""
    whole = size == target.vocab_size
    network = replace(method.network, draft_vocab_size=None if whole else size)
    objective = replace(method, network=network).build(target, rows, seed)
    return deployed(objective.draft, target)


def drafter_of(draft: Any, config: Config) -> Drafter:
    """It drafts chains of full length: an untrained draft could take any token for the end of the text."""
    pack(draft)
    module = import_module(f"decoding.drafters.{draft.method}")
    return module.build(draft, ChainGrowth(config.decode.proposal), frozenset())


def drafting_seconds(drafters: Mapping[int, Drafter], target: Target, config: Config) -> dict[int, float]:
    """Seconds of the draft's forwards in a round, by vocabulary size."""
    batch, depth = config.decode.batch_size, config.decode.draft_tokens
    taken: dict[int, list[float]] = {size: [] for size in drafters}
    for _ in range(PASSES):
        for size, drafter in drafters.items():
            seconds, _ = drafting(drafter, target, batch, context_bucket(CONTEXT), depth, rounds=3)
            taken[size].append(seconds)
    return {size: median(seconds) for size, seconds in taken.items()}


def target_seconds(target: Target, config: Config) -> Curve:
    """t(1) and t(K + 1)."""
    forward = target_forward(target, config.decode.batch_size, context_bucket(CONTEXT))
    return measured(forward, (1, config.decode.draft_tokens + 1), clock=lambda: now(target.device))


# ---- what follows ----


def inside(config: Config, target: Target, depth: int) -> tuple[list[float], str]:
    """The acceptance of tokens inside the vocabulary at positions 1 to `depth`, and where it is from."""
    try:
        folder = latest_draft(Path(config.runs) / config.experiment)
        made = read_config(folder)
    except CheckpointError:
        return [ASSUMED] * depth, "assumed: no draft of this experiment was measured yet"
    training = made.get("training") or {}
    by_position = (training.get("heldout") or {}).get("acceptance_by_position")
    same = (made["method"], made["target"].get("fingerprint")) == (config.method.name, target.fingerprint())
    if not same or not by_position or not by_position[0]:
        return [ASSUMED] * depth, "assumed: the experiment's newest draft has none that fits"
    own = training.get("draft_vocabulary_coverage") or 1.0
    known = [min(a / own, 1.0) for a in conditional(by_position)]
    return (known + [known[-1]] * depth)[:depth], f"held-out prompts, {folder}"


def conditional(by_position: Iterable[float]) -> list[float]:
    """From the shares of rounds that accepted at 1, 2, ... to those of the rounds that got there."""
    found, before = [], 1.0
    for share in by_position:
        found.append(share / before if before else 0.0)
        before = share
    return found


def tokens_per_round(acceptances: Iterable[float], covered: float) -> float:
    """A token outside is a sure miss; one inside is accepted as often as ever."""
    return 1 + sum(accumulate((covered * a for a in acceptances), mul))


def predicted(
    size: int, covered: float, draft_seconds: float, acceptances: Sequence[float], forward: Curve
) -> Size:
    tokens = tokens_per_round(acceptances, covered)
    speedup = tokens * forward(1) / (draft_seconds + forward(len(acceptances) + 1))
    return Size(size, covered, draft_seconds, tokens, speedup)


def recommended(sizes: Sequence[Size]) -> Size:
    """The largest of those as good as the best."""
    most = max(size.speedup for size in sizes)
    return max((s for s in sizes if s.speedup >= (1 - CLOSE) * most), key=lambda s: s.tokens)


# ---- what is said ----


def show(sizes: Sequence[Size], best: Size, found: Mapping[str, Any], vocab: int, console: Console) -> None:
    title = f"{found['method']['name']}, chains of {found['draft_tokens']}, batch {found['batch_size']}"
    table = Table(title=title, title_justify="left")
    for name in ("draft vocabulary", "coverage", "drafting, ms", "tokens per round", "speedup"):
        table.add_column(name, justify="right")
    for size in sizes:
        table.add_row(
            f"{size.tokens:,}{' (all)' if size.tokens == vocab else ''}",
            f"{size.coverage:.2%}",
            f"{1e3 * size.draft_seconds:.2f}",
            f"{size.tokens_per_round:.3f}",
            f"{size.speedup:.3f}×",
            style="bold" if size is best else "",
        )
    console.print(table)
    acceptances = ", ".join(f"{a:.2f}" for a in found["acceptances"])
    console.print(f"Acceptance inside: {acceptances} ({found['acceptances_from']}).", markup=False)
    load, cores = found["provenance"]["load_average"], found["provenance"]["hardware"]["cores"]
    if load is not None:
        console.print(f"Load average before: {load[0]:g} on {cores} cores. Times on a busy machine mislead.")
    pays = best.speedup >= 1
    if not pays:
        console.print("No size is predicted to pay: drafting costs more than it saves.", style="bold red")
    value = "null" if best.tokens == vocab else best.tokens
    said = f"{'Recommended' if pays else 'Least loss'}: method.network.draft_vocab_size={value}"
    console.print(said, markup=False, highlight=False)


@entry()
def main(config: Config) -> None:
    choose(config, Console(highlight=False))


if __name__ == "__main__":
    main()
