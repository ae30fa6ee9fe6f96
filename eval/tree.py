"""`python -m eval.tree`: the token tree that is fastest for a draft on this traffic and machine, as a file.

Prompts are decoded with one wide tree, whose rounds tell how often the target takes the draft's first,
second, third choice at each depth. Sequoia's program finds the best shape of every size for that, and
measured forwards tell which size is fastest (decoding/sequoia.py, decoding/costs.py). `decode.tree=static`
reads the file.

The prompts are training prompts, never held-out ones: a tree fitted to the prompts that `eval.measure`
decodes would be praised there for it. Of them, those that the draft was not trained on come first (there are
some where regenerate.max_prompts let the target answer only a part); on the others a draft is surer than it
will be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from configs.entry import entry
from configs.errors import CheckpointError, ConfigError, TrafficError
from configs.schema import Config, Drafting, Replies, Verification
from data.tokens import REPLIES, Prompt, evenly, prompts, split_file
from decoding.build import network_drafter
from decoding.compiled import Compiled
from decoding.costs import Curve, measured_costs, measured_drafting, sizes_up_to
from decoding.decoder import Decoder
from decoding.drafters.plain import PlainDrafter
from decoding.growth import ChainGrowth, StaticGrowth
from decoding.sequence import Params, Request, Round
from decoding.sequoia import Plan, Trials, plans, wide_shape
from decoding.shapes import Conditions, write_shape
from eval.bench import seed_of
from eval.terminal import bar, wide_console
from models.checkpoint import draft_hash, find_draft, load_draft
from models.files import ensure_writable, read_lines
from models.provenance import provenance
from models.target import Target

PLAIN_ROUNDS = 24  # of a sequence, to see what a round costs without a draft
LEAST = 30  # nodes that must have had children at a depth, for it to have acceptances of its own


@entry()
def main(config: Config) -> None:
    make_tree(config, wide_console())


def make_tree(config: Config, console: Console) -> Path:
    """Measures, writes the shape's file, prints the sizes that were weighed; returns the file.

    It is `decode.tree_file`, or tree.json in the draft's run. Raises `ConfigError` for settings under which
    acceptance by rank has no meaning, `CheckpointError` (no draft, another target's, or one that is never
    right), `TrafficError` (no prompts, or too few) and `StorageError`.
    """
    check(config)
    folder = find_draft(config.eval.draft, Path(config.runs), config.experiment)
    file = Path(config.decode.tree_file) if config.decode.tree_file else default_file(folder)
    ensure_writable(file.parent)
    chosen, trained = calibration(config)
    target = Target.load(config.target)
    draft = load_draft(folder, target)
    seen = decoded(config, target, draft, chosen, console)
    costs = measured(config, target, draft, draft_hash(folder), seen.host)
    plain, *trees = weighed(config, seen, costs)
    best = min(trees, key=lambda plan: plan.seconds_per_token)
    if not best.shape.depth:
        raise CheckpointError(
            f"In {seen.rounds} rounds the target took nothing of what the draft in {folder} proposed, so "
            "that no tree can be made. Train it further, or see that it is the right one."
        )
    traffic = f"{len(chosen)} prompts of {split_file(config, 'train')}, {trained} of them trained on"
    conditions = Conditions(
        temperature=config.decode.temperature,
        proposal=config.decode.proposal.value,
        draft=str(folder),
        traffic=traffic,
        vectors=seen.vectors.tolist(),
        expected_tokens=best.expected_tokens,
        rounds=seen.rounds,
        batch_size=config.decode.batch_size,
        seconds={name: dict(zip(c.sizes, c.seconds, strict=True)) for name, c in vars(costs).items()},
        speedup=speedup(best, plain),
        measured=provenance(),
    )
    write_shape(file, best.shape, conditions)
    console.print(f"Acceptance by rank from {seen.rounds} rounds over {traffic}.", markup=False)
    show([plain, *trees], best, file, console)
    return file


def check(config: Config) -> None:
    """Refuses what has no acceptance by rank."""
    decode = config.decode
    if Drafting.draft not in decode.drafters:
        raise ConfigError(
            "decode.drafters has no draft, and only a draft network's tree has a shape. Set "
            "decode.drafters=[draft]."
        )
    if decode.tree_replacement:
        raise ConfigError(
            "decode.tree_replacement=true: siblings drawn with replacement may be equal, so that there is no "
            "acceptance by rank. Set it to false."
        )
    if decode.verification is Verification.typical:
        raise ConfigError(
            "decode.verification=typical judges siblings by themselves and not in turn, so that there is no "
            "acceptance by rank. Set decode.verification=rejection."
        )


def default_file(folder: Path) -> Path:
    """tree.json in the draft's run; beside a draft that lies elsewhere, a file named after it."""
    return folder.with_name("tree.json" if folder.name == "draft" else f"{folder.name}-tree.json")


# ---- which prompts ----


def calibration(config: Config) -> tuple[list[Prompt], int]:
    """`eval.tree_prompts` of the train split, evenly over its categories, those trained on last; and how many
    these are."""
    split, wanted = prompts(config, "train"), config.eval.tree_prompts
    learnt = trained_on(config, split)
    fresh = evenly([prompt for prompt in split if prompt.id not in learnt], wanted)
    rest = evenly([prompt for prompt in reversed(split) if prompt.id in learnt], wanted - len(fresh))
    if not split:
        raise TrafficError(
            f"There are no prompts in {split_file(config, 'train')} to measure acceptance on. Add traffic, "
            "and run python -m data.prepare again."
        )
    return fresh + rest, len(rest)


def trained_on(config: Config, split: Sequence[Prompt]) -> set[str]:
    """The ids of the prompts whose replies are learnt: those that the target answered, or all."""
    if config.data.replies is Replies.logged:
        return {prompt.id for prompt in split}
    path = Path(config.data.folder) / REPLIES
    return {row["id"] for row in read_lines(path)} if path.exists() else set()


# ---- what is measured ----


@dataclass(frozen=True)
class Seen:
    """What the rounds of the wide tree showed."""

    vectors: NDArray[np.float64]  # [depths, ranks], as decoding.sequoia takes them
    depth: int  # the deepest that the draft proposes
    rounds: int
    host: Curve  # seconds of a round outside both models, by nodes: of plain decoding, and with the wide tree


@dataclass(frozen=True)
class Times:
    """Seconds of a round's parts."""

    target: Curve  # by nodes
    draft: Curve  # by depth
    host: Curve  # by nodes


def decoded(config: Config, target: Target, draft: Any, chosen: Sequence[Prompt], console: Console) -> Seen:
    """Decodes the prompts with the widest tree that `eval.tree_nodes` has room for."""
    shape = wide_shape(config.eval.tree_nodes, config.eval.tree_depth)
    trials = Trials(shape)
    drafter = network_drafter(target, draft, StaticGrowth(shape, config.decode.proposal))
    decoder = Decoder(target, drafter, config.decode.batch_size, on_verdict=trials.add)
    requests = []
    for prompt in chosen:
        params = Params.of(config.decode, seed_of(config.seed, 0, prompt))
        requests.append(Request(prompt.ids, replace(params, draft_tokens=shape.depth)))
    with bar(console) as progress:
        task = progress.add_task("decoding", total=len(requests))
        generations = decoder.generate_all(requests, on_end=lambda *_: progress.advance(task))
    rounds = [round for generation in generations for round in generation.rounds]
    vectors = trials.vectors(LEAST)
    if not len(vectors):
        raise TrafficError(
            f"{len(chosen)} prompts gave {len(rounds)} rounds, too few to tell acceptance by rank. Raise "
            "eval.tree_prompts or decode.max_new_tokens."
        )
    host = own_seconds(plain_rounds(target, requests, decoder.batch_size)), own_seconds(rounds)
    return Seen(vectors, trials.depth, len(rounds), Curve((1, len(shape)), host))


def plain_rounds(target: Target, requests: Sequence[Request], batch_size: int) -> list[Round]:
    """Some rounds of plain decoding."""
    few = [
        replace(request, params=replace(request.params, max_new_tokens=PLAIN_ROUNDS + 1))
        for request in requests[:batch_size]
    ]
    generations = Decoder(target, PlainDrafter(), batch_size).generate_all(few)
    return [round for generation in generations for round in generation.rounds]


def own_seconds(rounds: Sequence[Round]) -> float:
    return median(round.own_seconds for round in rounds) if rounds else 0.0


def measured(config: Config, target: Target, draft: Any, name: str, host: Curve) -> Times:
    """What forwards take on this machine, remembered from run to run; the draft's over one node a level, to
    which some more add little. Where decoding compiles them, at every size as if trees had it."""
    drafter = network_drafter(target, draft, ChainGrowth(config.decode.proposal))
    batch = config.decode.batch_size
    compiled = Compiled(target, sizes_up_to(config.eval.tree_nodes)) if config.decode.compile else None
    forward = measured_costs(target, drafter, name, batch, compiled=compiled).target
    return Times(
        Curve(forward.sizes, forward.seconds),
        measured_drafting(target, drafter, name, config.eval.tree_depth, batch),
        host,
    )


def weighed(config: Config, seen: Seen, costs: Times) -> list[Plan]:
    """The best tree of each size, from the root alone (plain decoding) to `eval.tree_nodes` nodes."""
    padding = config.decode.pad_trees and not config.decode.compile  # which has no size above the tree's own
    forward = costs.target.planned if padding else costs.target
    return plans(
        seen.vectors,
        lambda n: forward(n) + costs.host(n),
        costs.draft,
        nodes=config.eval.tree_nodes,
        depth=seen.depth,
    )


# ---- what is said ----


def speedup(plan: Plan, plain: Plan) -> float:
    return plain.seconds_per_token / plan.seconds_per_token


def show(found: Sequence[Plan], best: Plan, file: Path, console: Console) -> None:
    """A table of the best trees of some sizes, the fastest of all, and how to decode with it."""
    table = Table("nodes", "depth", "tokens per round", "ms per round", "speedup", title_justify="left")
    for plan in found:
        if plan.nodes.bit_count() == 1 or plan is best or plan is found[-1]:
            table.add_row(
                str(len(plan.shape)),
                str(plan.shape.depth),
                f"{plan.expected_tokens:.2f}",
                f"{1e3 * plan.seconds:.1f}",
                f"{speedup(plan, found[0]):.2f}×",
                style="bold" if plan is best else "",
            )
    console.print(table)
    gain = speedup(best, found[0])
    if gain > 1:
        console.print(f"Predicted: {gain:.2f}× plain decoding, which is 1.00×.")
    else:
        console.print(
            f"No tree is predicted to pay here: the best is {gain:.2f}× plain decoding.", style="bold red"
        )
    console.print(
        f"decode.tree=static decode.tree_file={file} decode.draft_tokens={best.shape.depth}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
