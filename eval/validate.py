"""`python -m eval.validate`: does `eval.predict` foresee what this machine then measures?

Held-out prompts are decoded in every setting: each draft as chains and as static trees, prompt lookup, and
`decode` as it is configured, each at every batch size, beside plain decoding. What is predicted for a setting
comes from elsewhere:

    acceptance   other held-out prompts, of the same mix of categories, and one setting: a wide tree, for all
                 chains and static trees of a draft, by depth and rank (eval/tree.py)
    times        forwards alone, over zeros (decoding/costs.py), in turn with a few settings and plain
                 decoding, so that a slow spell of the machine falls on all alike
    own time     of the decoder in plain and in wide-tree rounds at `decode.batch_size`

and goes through the functions of eval/predict.py. Lookup and `decode`'s own setting have no ranks: their
tokens a round and tree sizes are those on the other prompts, at `decode.batch_size`.

Three errors are told apart: of tokens a round, of a round's time, and of the speedup, in which they meet. A
prediction is of rounds with a full batch; so is what it is held against: steps with fewer sequences in flight
do not count, nor do prefills, nor rounds in which a draft first reads a prompt. Writes validate.json and
validate.svg; a killed run goes on where it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

from configs.compose import as_plain
from configs.entry import entry
from configs.errors import TrafficError
from configs.schema import Config, DecodeConfig, Drafting, Tree, ValidateConfig
from data.tokens import Prompt, evenly, prompts
from decoding.acceptance import bootstrap_ratio, mean_acceptance_length
from decoding.build import build_drafter, network_drafter
from decoding.costs import Curve, drafting, measured, sizes_up_to, target_forward
from decoding.decoder import Decoder
from decoding.drafters import Drafter
from decoding.drafters.plain import PlainDrafter
from decoding.growth import ChainGrowth, StaticGrowth
from decoding.sequence import Params, Request, Round
from decoding.sequoia import best_tree
from eval.bench import check_decoding, check_eager, dtype_name, nodes_of, seed_of
from eval.evidence import expected_tokens
from eval.machine import Contention, share_of_others
from eval.measure import check_heldout, default_output
from eval.pictures import MUTED, Picture, legend_above, literal, standalone, styles
from eval.predict import Times, seconds_of
from eval.rows import expanded
from eval.terminal import bar, warn_if_busy, wide_console
from eval.tree import check, decoded
from models.checkpoint import draft_hash, find_draft, load_draft
from models.files import append_line, ensure_writable, lines_under, write_json, write_text
from models.provenance import provenance
from models.target import Target

SCHEMA = "leadout.validate/1"
PARTIAL = "validate.partial.jsonl"
PLAIN = "plain"
SPELL = 3  # ways between which there is plain decoding
TOGETHER = 6  # prompts that all of them decode before the next ones
WARM_TOKENS = 6  # decoded before a setting counts for the first time
REPEATS = 3  # of each forward, after each group of prompts
BAND = 0.1  # of error, shaded in the picture

Json = dict[str, Any]


@entry()
def main(config: Config) -> None:
    validate(config, wide_console())


@dataclass(frozen=True)
class Known:
    """A way of drafting on the other prompts, at `decode.batch_size`."""

    tokens: float  # a round, expected
    drafted: dict[int, float]  # tokens drafted in a round, and how often so many
    depth: int  # that the draft network drafts; 0: there is none
    own: Curve  # the decoder's own seconds of a round, by nodes


@dataclass(frozen=True)
class Way:
    draft: str  # a method's name, or lookup
    drafting: str
    drafter: Drafter
    draft_tokens: int
    known: Known

    @property
    def name(self) -> str:
        return f"{self.draft}, {self.drafting}"


class Journal:
    """Results by name, each on the disk before the next piece of work begins."""

    def __init__(self, path: Path, key: Json) -> None:
        self.path = path
        self.done = {line["name"]: line["result"] for line in lines_under(path, key)}

    def get(self, name: str, work: Callable[[], Any]) -> Any:
        if name not in self.done:
            result = json.loads(json.dumps(work()))  # as it will be read again
            append_line(self.path, {"name": name, "result": result})
            self.done[name] = result
        return self.done[name]


def validate(config: Config, console: Console) -> Json:
    """Measures, predicts, writes both side by side, prints the table; returns what was written.

    Raises `CheckpointError` (no draft, or another target's), `ConfigError` (decoding that it cannot foresee),
    `TrafficError` (too few prompts, or some that were trained on) and `StorageError`.
    """
    config = dataclasses.replace(config, validate=each_once(config.validate))
    asked = config.validate
    check_decoding(config.decode)
    check_eager(config.decode, "eval.validate")  # every way would have shapes of its own to compile
    check(config)
    folders = [*dict.fromkeys(find_draft(d, Path(config.runs), config.experiment) for d in asked.drafts)]
    output = Path(asked.output) if asked.output else default_output(folders[0])
    ensure_writable(output)
    heldout = prompts(config, "heldout")
    check_heldout(config, heldout, prompts(config, "train"))
    chosen, others = dealt(evenly(heldout, asked.prompts + config.eval.tree_prompts), asked.prompts)
    if len(chosen) < max(asked.batch_sizes):
        raise TrafficError(
            f"{len(chosen)} prompts do not fill a batch of {max(asked.batch_sizes)}. Raise validate.prompts, "
            "or lower validate.batch_sizes."
        )
    if not others:
        raise TrafficError(
            f"All {len(heldout)} held-out prompts are measured, and none is left to take acceptance from. "
            "Lower validate.prompts, or add traffic and run python -m data.prepare again."
        )
    where = provenance()
    before = share_of_others()
    warn_if_busy(console, before, config.eval.max_load, "before the run")
    target = Target.load(config.target)
    drafts = named({folder: load_draft(folder, target) for folder in folders})
    journal = Journal(output / PARTIAL, journal_key(config, where, target, folders, [*chosen, *others]))
    watch = Contention()
    ways = [*{way.name: way for way in ways_of(config, target, drafts, others, journal, console)}.values()]
    context = round(fmean(len(prompt.ids) for prompt in chosen)) + config.decode.max_new_tokens // 2
    timer = Timer(config, target, drafts, context)
    spells = measured_spells(config, target, ways, timer, chosen, journal, console)
    rows = [
        row_of(way, batch, spell.curves[batch], spell.runs[way.name, batch], spell.runs[PLAIN, batch], config)
        for spell in spells
        for way in spell.ways
        for batch in asked.batch_sizes
    ]
    written = {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: where[name] for name in ("git", "hardware", "versions")},
        "load": {"others_before": before, "others_during": watch.share(), "limit": config.eval.max_load},
        "target": target.name,
        "dtype": dtype_name(target),
        "temperature": config.decode.temperature,
        "drafts": {name: str(folder) for name, folder in zip(drafts, folders, strict=True)},
        "prompts": len(chosen),
        "max_new_tokens": config.decode.max_new_tokens,
        "context": context,
        "acceptance_from": {
            "prompts": len(others),
            "batch_size": config.decode.batch_size,
            "tree_nodes": config.eval.tree_nodes,
        },
        "rows": rows,
        "errors": {name: errors([row[name]["error"] for row in rows]) for name in COMPARED},
        "config": as_plain(config),
    }
    write_json(output / "validate.json", written)
    write_text(output / "validate.svg", standalone(picture(rows)))
    (output / PARTIAL).unlink()
    show(written, output, console)
    return written


def dealt(found: Sequence[Prompt], count: int) -> tuple[list[Prompt], list[Prompt]]:
    """`count` of the prompts and the others, of one mix: each category is dealt in proportion. Acceptance
    differs between categories by more than speedups are to be told apart."""
    by_category = sorted(range(len(found)), key=lambda i: found[i].category)
    first = {
        i
        for turn, i in enumerate(by_category)
        if (turn + 1) * count // len(found) > turn * count // len(found)
    }
    return (
        [prompt for i, prompt in enumerate(found) if i in first],
        [prompt for i, prompt in enumerate(found) if i not in first],
    )


def each_once(asked: ValidateConfig) -> ValidateConfig:
    """Settings named twice are measured, and counted, once."""
    names = ("draft_tokens", "tree_nodes", "batch_sizes")
    return dataclasses.replace(asked, **{name: [*dict.fromkeys(getattr(asked, name))] for name in names})


def named(drafts: Mapping[Path, Any]) -> dict[str, Any]:
    """The drafts by method; a method's further ones with their run's name, or where that is taken, folder."""
    made: dict[str, Any] = {}
    for folder, draft in drafts.items():
        method = str(draft.method)
        names = (method, f"{method} {folder.parent.name}", f"{method} {folder}")
        made[next(name for name in names if name not in made)] = draft
    return made


def journal_key(
    config: Config, where: Json, target: Target, folders: Sequence[Path], read: Sequence[Prompt]
) -> Json:
    """What every result depends on."""
    parts = {
        "config": {
            name: part for name, part in as_plain(config).items() if name in ("seed", "decode", "threads")
        },
        "validate": {**dataclasses.asdict(config.validate), "output": None},
        "tree": [config.eval.tree_nodes, config.eval.tree_depth],
        "target": target.fingerprint(),
        "drafts": [draft_hash(folder) for folder in folders],
        "prompts": [(prompt.id, prompt.ids) for prompt in read],
        "place": [where["git"], where["hardware"], where["versions"]],
    }
    return {"key": hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()}


# ---- what is known beforehand ----


def ways_of(
    config: Config,
    target: Target,
    drafts: Mapping[str, Any],
    others: Sequence[Prompt],
    journal: Journal,
    console: Console,
) -> Iterator[Way]:
    """Every way of drafting, with what the other prompts say of it."""
    asked, decode = config.validate, config.decode
    for name, draft in drafts.items():

        def wide(draft: Any = draft) -> Json:
            seen = decoded(config, target, draft, others, console)
            return {"vectors": seen.vectors.tolist(), "sizes": seen.host.sizes, "own": seen.host.seconds}

        seen = journal.get(f"{name}: wide tree", wide)
        vectors, own = seen["vectors"], Curve(tuple(seen["sizes"]), tuple(seen["own"]))
        for drafted in asked.draft_tokens:
            known = Known(expected_tokens([p[0] for p in vectors], drafted), {drafted: 1.0}, drafted, own)
            drafter = network_drafter(target, draft, ChainGrowth(decode.proposal))
            yield Way(name, f"chain of {drafted}", drafter, drafted, known)
        for drafted in asked.tree_nodes:
            best = best_tree(vectors, drafted + 1, min(len(vectors), max(asked.draft_tokens)))
            size, depth = len(best.shape) - 1, best.shape.depth  # what could not be accepted is left out
            drafter = network_drafter(target, draft, StaticGrowth(best.shape, decode.proposal))
            yield Way(
                name,
                f"static tree of {size}",
                drafter,
                depth,
                Known(best.expected_tokens, {size: 1.0}, depth, own),
            )
    first, draft = next(iter(drafts.items()))
    for name, how, setting in found(config, first):
        drafter = build_drafter(target, draft, setting)

        def alone(drafter: Drafter = drafter, setting: DecodeConfig = setting) -> Json:
            return on_other_prompts(dataclasses.replace(config, decode=setting), target, drafter, others)

        seen = journal.get(f"{name}, {how}: other prompts", alone)
        drafted = {int(count): float(often) for count, often in seen["drafted"].items()}
        own = Curve(tuple(seen["sizes"]), tuple(seen["own"]))
        depth = setting.draft_tokens if Drafting.draft in setting.drafters else 0
        yield Way(name, how, drafter, setting.draft_tokens, Known(seen["tokens"], drafted, depth, own))


def found(config: Config, draft: str) -> Iterator[tuple[str, str, DecodeConfig]]:
    """(who drafts, how, the setting) of ways without acceptance by rank: lookup, and `decode` as it is where
    it makes dynamic trees or merges drafters."""
    decode = config.decode
    if config.validate.lookup:
        most = max(config.validate.draft_tokens)
        setting = dataclasses.replace(decode, drafters=[Drafting.lookup], tree=Tree.chain, draft_tokens=most)
        yield "lookup", f"up to {most}", setting
    if decode.tree is Tree.dynamic or len(decode.drafters) > 1:
        nodes, also = nodes_of(decode), [kind.value for kind in decode.drafters if kind is not Drafting.draft]
        size = f"{decode.tree.value} tree of {nodes}" if nodes else f"chain of {decode.draft_tokens}"
        yield draft, " with ".join([size, *also]), decode


def on_other_prompts(config: Config, target: Target, drafter: Drafter, others: Sequence[Prompt]) -> Json:
    """Tokens a round, sizes and own time of a way, and own time of plain decoding."""
    asked = requests(config, others, config.decode.draft_tokens)
    few = [
        dataclasses.replace(one, params=dataclasses.replace(one.params, max_new_tokens=25)) for one in asked
    ]
    batch = config.decode.batch_size
    plain = rounds_of(Decoder(target, PlainDrafter(), batch), few[: max(batch, 4)])
    rounds = rounds_of(Decoder(target, drafter, batch), asked)
    tokens = mean_acceptance_length(rounds)
    if tokens is None or not plain:
        raise TrafficError(
            "The other prompts gave no rounds. Raise decode.max_new_tokens or eval.tree_prompts."
        )
    nodes = max(2, round(fmean(one.nodes for one in rounds)))
    own = [median(one.own_seconds for one in plain), median(one.own_seconds for one in rounds)]
    drafted = Counter(one.nodes - 1 for one in rounds)
    return {"tokens": tokens, "drafted": drafted, "sizes": [1, nodes], "own": own}


def requests(config: Config, asked: Sequence[Prompt], draft_tokens: int) -> list[Request]:
    params = [Params.of(config.decode, seed_of(config.seed, 0, prompt)) for prompt in asked]
    return [
        Request(prompt.ids, dataclasses.replace(own, draft_tokens=draft_tokens))
        for prompt, own in zip(asked, params, strict=True)
    ]


def rounds_of(decoder: Decoder, asked: Sequence[Request]) -> list[Round]:
    return [round for generation in decoder.generate_all(asked) for round in generation.rounds]


# ---- what is measured ----


class Timer:
    """Times forwards alone."""

    def __init__(self, config: Config, target: Target, drafts: Mapping[str, Any], context: int) -> None:
        self.target = target
        self.context = context
        self.drafters = {
            name: network_drafter(target, draft, ChainGrowth(config.decode.proposal))
            for name, draft in drafts.items()
        }

    def times(self, batch: int, ways: Sequence[Way]) -> Json:
        """Seconds of the forwards that `ways` need: the target's by nodes, and those of drafts by depth."""
        sizes = sizes_up_to(1 + max(max(way.known.drafted) for way in ways))
        curve = measured(target_forward(self.target, batch, self.context), sizes, REPEATS, warmup=1)
        found: Json = {"target": [curve.sizes, curve.seconds]}
        for name in dict.fromkeys(way.draft for way in ways if way.known.depth):
            depths = sorted({way.known.depth for way in ways if way.draft == name and way.known.depth})
            seconds = [
                drafting(self.drafters[name], self.target, batch, self.context, depth, REPEATS)[0]
                for depth in depths
            ]
            found[name] = [depths, seconds]
        return found


def mean_curves(found: Sequence[Json]) -> dict[str, Curve]:
    """Of what `Timer.times` gave each time."""
    made = {}
    for name, (sizes, _) in found[0].items():
        times = zip(*(one[name][1] for one in found), strict=True)
        made[name] = Curve(tuple(sizes), tuple(fmean(few) for few in times))
    return made


@dataclass(frozen=True)
class Spell:
    """Some ways, and what was measured while they were."""

    ways: Sequence[Way]
    runs: dict[tuple[str, int], list[Json]]  # of each group, by name (PLAIN is one) and batch size
    curves: dict[int, dict[str, Curve]]  # by batch size


def measured_spells(
    config: Config,
    target: Target,
    ways: Sequence[Way],
    timer: Timer,
    chosen: Sequence[Prompt],
    journal: Journal,
    console: Console,
) -> list[Spell]:
    """Every way at every batch size, over all groups of prompts, a few ways at a time: those and plain
    decoding in turn, each group beginning with another one, and forwards alone after each group."""
    few = [ways[start : start + SPELL] for start in range(0, len(ways), SPELL)]
    groups = grouped(chosen, max(TOGETHER, max(config.validate.batch_sizes)))
    made = []
    with bar(console) as progress:
        total = len(groups) * len(config.validate.batch_sizes) * (2 * len(few) + len(ways))
        task = progress.add_task("measuring", total=total)
        for which, some in enumerate(few):
            runs: dict[tuple[str, int], list[Json]] = {}
            costs: dict[int, list[Json]] = {}
            drafters: dict[str, tuple[Drafter, int]] = {PLAIN: (PlainDrafter(), 0)}
            drafters |= {way.name: (way.drafter, way.draft_tokens) for way in some}
            for number, group in enumerate(groups):
                for batch in config.validate.batch_sizes:
                    here = f"spell {which}, group {number}, batch {batch}"
                    for name in rotated([*drafters], number):
                        drafter, draft_tokens = drafters[name]
                        asked = requests(config, group, draft_tokens)

                        def run(d: Drafter = drafter, b: int = batch, a: list[Request] = asked) -> Json:
                            return timed(Decoder(target, d, b), a)

                        result = journal.get(f"{here}: {name}", run)
                        runs.setdefault((name, batch), []).append(result)
                        progress.advance(task)

                    def alone(b: int = batch, some: Sequence[Way] = some) -> Json:
                        return timer.times(b, some)

                    times = journal.get(f"{here}: forwards alone", alone)
                    costs.setdefault(batch, []).append(times)
                    progress.advance(task)
            made.append(Spell(some, runs, {batch: mean_curves(found) for batch, found in costs.items()}))
    return made


def grouped(chosen: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Groups of at least `size`, of all categories each; a short rest joins the others."""
    count = max(1, len(chosen) // size)
    return [list(chosen[start::count]) for start in range(count)]


def rotated(names: list[str], by: int) -> list[str]:
    """Half a turn further with each group, which puts what came first into the middle."""
    start = by * (len(names) // 2) % len(names)
    return names[start:] + names[:start]


def timed(decoder: Decoder, asked: Sequence[Request]) -> Json:
    """Tokens and rounds of each prompt; steps in which the batch was full, and their seconds. Steps in which
    a sequence had its first round do not count: its draft has read the prompt in it.

    Sequences that were in flight together have the same times in their rounds, to the last bit.
    """
    warm_up(decoder, asked)
    made = decoder.generate_all(asked)
    steps = Counter(step_of(round) for one in made for round in one.rounds)
    first = {step_of(one.rounds[0]) for one in made if one.rounds}
    full = [step for step, together in steps.items() if together == decoder.batch_size and step not in first]
    sums = [sum(part) for part in zip(*full, strict=True)] or [0.0, 0.0, 0.0]
    return {
        "prompts": [[sum(round.emitted for round in one.rounds), len(one.rounds)] for one in made],
        "steps": len(full),
        **dict(zip(("seconds", "target", "draft"), sums, strict=True)),
    }


def step_of(round: Round) -> tuple[float, float, float]:
    return round.seconds, round.target_seconds, round.draft_seconds


def warm_up(decoder: Decoder, asked: Sequence[Request]) -> None:
    """First calls allocate and prepare kernels for their shapes."""
    first = asked[: decoder.batch_size]
    decoder.generate_all(
        [
            dataclasses.replace(one, params=dataclasses.replace(one.params, max_new_tokens=WARM_TOKENS))
            for one in first
        ]
    )


# ---- predicted and measured ----

COMPARED = ("tokens", "round_ms", "speedup")


def row_of(
    way: Way,
    batch: int,
    curves: Mapping[str, Curve],
    runs: Sequence[Json],
    plain: Sequence[Json],
    config: Config,
) -> Json:
    """One setting: tokens a round, a round's time, and the speedup, each predicted and measured."""
    known = way.known
    share = batch / config.decode.batch_size  # own time: sequences are verified one by one
    times = Times(
        plain=curves["target"](1) + share * known.own(1),
        verify=curves["target"],
        draft=curves[way.draft] if known.depth else lambda _: 0.0,
        own=lambda nodes: share * known.own(nodes),
    )
    seconds = seconds_of(known.drafted, known.depth, batch, times)
    emitted, rounds = ([one[column] for run in runs for one in run["prompts"] if one[1]] for column in (0, 1))
    tau = sum(emitted) / sum(rounds)
    spent, spent_plain = per_step(runs, "seconds"), per_step(plain, "seconds")
    confidence = expanded(config.eval.confidence, len(rounds))
    spread = bootstrap_ratio(emitted, rounds, confidence, config.eval.bootstrap, config.seed)
    low, high = (None, None) if spread is None else spread
    gain = spent_plain / spent
    return {
        "draft": way.draft,
        "drafting": way.drafting,
        "batch_size": batch,
        "nodes": 1 + max(known.drafted),
        "depth": way.draft_tokens,
        "tokens": compared(known.tokens, tau) | {"ci": None if low is None else [low, high]},
        "round_ms": compared(1e3 * seconds, 1e3 * spent)
        | {
            "target": compared(1e3 * verifying(known, batch, times), 1e3 * per_step(runs, "target")),
            "draft": compared(
                1e3 * (times.draft(known.depth) if known.depth else 0), 1e3 * per_step(runs, "draft")
            ),
        },
        "plain_ms": compared(1e3 * times.plain, 1e3 * spent_plain),
        # The interval is that of the tokens: prompts are drawn again, times stay.
        "speedup": compared(known.tokens * times.plain / seconds, tau * gain)
        | {"ci": None if low is None or high is None else [low * gain, high * gain]},
    }


def verifying(known: Known, batch: int, times: Times) -> float:
    only = Times(times.plain, times.verify, lambda _: 0.0, lambda _: 0.0)
    return seconds_of(known.drafted, 0, batch, only)


def per_step(runs: Sequence[Json], part: str) -> float:
    """Mean seconds of a step with a full batch."""
    steps = sum(run["steps"] for run in runs)
    if not steps:
        raise TrafficError(
            "No step had a full batch: replies end too early. Raise decode.max_new_tokens or "
            "validate.prompts, or lower validate.batch_sizes."
        )
    return sum(run[part] for run in runs) / steps


def compared(predicted: float, measured: float) -> Json:
    """error: predicted / measured - 1; None where nothing was measured."""
    return {
        "predicted": predicted,
        "measured": measured,
        "error": predicted / measured - 1 if measured else None,
    }


def errors(found: Sequence[float]) -> Json:
    sizes = [abs(error) for error in found]
    return {"settings": len(sizes), "median": median(sizes), "worst": max(sizes), "mean_signed": fmean(found)}


# ---- what is said ----


def picture(rows: Sequence[Json], name: str = "validate") -> Picture:
    """Each setting's predicted speedup over the measured one: equal on the line, within 10 % in the band."""
    drafts = list(dict.fromkeys(row["draft"] for row in rows))
    values = [row["speedup"][side] for row in rows for side in ("predicted", "measured")]
    low, high = 0.95 * min(values), 1.05 * max(values)

    def plot(axes: Axes) -> None:
        axes.plot([low, high], [low, high], color=MUTED, linewidth=1.2)
        under, over = ([(1 + side * BAND) * end for end in (low, high)] for side in (-1, 1))
        axes.fill_between([low, high], under, over, color=MUTED, alpha=0.15, linewidth=0)
        for draft, (colour, marker) in zip(drafts, styles(), strict=False):
            for row in (row for row in rows if row["draft"] == draft):
                gain = row["speedup"]
                if gain["ci"] is not None:
                    axes.plot(gain["ci"], [gain["predicted"]] * 2, color=colour, linewidth=1, alpha=0.3)
                axes.plot(gain["measured"], gain["predicted"], marker, color=colour, markersize=5, alpha=0.85)
            axes.plot([], [], marker, color=colour, label=literal(draft))
        axes.set(xlabel="measured speedup", ylabel="predicted speedup", xlim=(low, high), ylim=(low, high))
        legend_above(axes)

    return Picture(name, plot, height=4.4)


def show(written: Json, output: Path, console: Console) -> None:
    table = Table(title="predicted and measured", title_justify="left")
    for heading in ("draft", "drafting", "batch", "tokens a round", "ms a round", "speedup", "off by"):
        table.add_column(heading, justify="left" if heading.startswith("draft") else "right")
    for row in written["rows"]:
        table.add_row(
            row["draft"],
            row["drafting"],
            str(row["batch_size"]),
            *(
                f"{row[part]['predicted']:.{digits}f} / {row[part]['measured']:.{digits}f}"
                for part, digits in (("tokens", 2), ("round_ms", 1), ("speedup", 2))
            ),
            f"{row['speedup']['error']:+.1%}",
        )
    console.print(table)
    console.print(summary(written), markup=False)
    warn_if_busy(console, written["load"]["others_during"], written["load"]["limit"], "during the run")
    for name in ("validate.json", "validate.svg"):
        console.print(str(output / name), markup=False, highlight=False, soft_wrap=True)


def summary(written: Json) -> str:
    """The errors in a sentence."""
    off = written["errors"]
    worst = max(written["rows"], key=lambda row: abs(row["speedup"]["error"]))
    where = f"{worst['draft']}, {worst['drafting']}, batch {worst['batch_size']}"
    gain, tokens, time = (off[name] for name in ("speedup", "tokens", "round_ms"))
    return (
        f"Over {gain['settings']} settings the predicted speedup is off by {gain['median']:.1%} in the "
        f"median, at worst by {gain['worst']:.1%} ({where}); tokens a round by {tokens['median']:.1%} (worst "
        f"{tokens['worst']:.1%}), a round's time by {time['median']:.1%} (worst {time['worst']:.1%})."
    )


if __name__ == "__main__":
    main()
