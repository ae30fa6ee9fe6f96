"""`python -m eval.profile`: where a decode step's time goes, by context length and batch size.

Rounds of the decoder itself, on held-out prompts cut to each of `profile.contexts`, plainly and speculatively
(as a chain, and as the tree that `decode` asks for). Each setting is timed three times over:

    bare      nothing but a clock around the round: this is the step
    clocked   with a clock around every part (eval/ranges.py), in turn with bare rounds
    traced    under torch's profiler (eval/trace.py), a few rounds at the end

On a CPU the clock says how long each part takes, and the trace for what share of it no operator ran. On a
GPU the trace says how long each part's kernels ran; the rest of the bare step is gaps, in which the GPU
waited for the host. What the instruments cost is stated, and so is how far the parts add up to the bare step.

The floor of a step is the time in which memory gives what its forwards must read at least: the target's
weights and K/V once, the draft's weights once for each of its forwards. Writes `profile.json`, `profile.svg`
and, with `profile.trace`, `trace.json` for https://ui.perfetto.dev.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, record_function

from configs.compose import as_plain
from configs.entry import entry
from configs.errors import ConfigError, TrafficError
from configs.schema import Config, DecodeConfig, Drafting, Tree
from data.tokens import Prompt, prompts, split_file
from decoding.build import build_decoder
from decoding.clock import now
from decoding.decoder import Batch, Decoder
from decoding.drafters.medusa import HeadsReader
from decoding.drafters.plain import PlainDrafter
from decoding.sequence import Params, Request
from eval.bench import check_eager
from eval.machine import Contention, share_of_others
from eval.measure import default_output
from eval.pictures import standalone
from eval.profile_picture import picture
from eval.ranges import PARTS, Clock, marked, marks_of, readers, recorded
from eval.terminal import bar, warn_if_busy, wide_console
from eval.trace import Event, Share, Split, last_round, split
from models.checkpoint import draft_hash, find_draft, load_draft
from models.files import ensure_writable, write_json, write_text
from models.provenance import provenance
from models.roofline import Device, Load, Reach, load_of
from models.target import Target

SCHEMA = "leadout.profile/1"
WARMUP = 3  # rounds that do not count; in the first the draft reads the prompt
TRACED = 4  # rounds under the profiler, the first of which does not count
TOLERANCE = 0.05  # by how much of the bare step the parts may miss it, without a warning
STREAMED = 1 << 30  # bytes read to measure bandwidth, more than caches hold
IDEAL = Reach(flops=1.0, bandwidth=1.0, launches=0.0, exchange=0.0, host=0.0)

T = TypeVar("T")


@entry()
def main(config: Config) -> None:
    profile(config, wide_console())


# ---- one setting ----


@dataclass(frozen=True)
class Part:
    ms: float
    gap_ms: float  # of which nothing ran: no operator (CPU), no kernel (GPU)


@dataclass(frozen=True)
class Row:
    """A round of one way of decoding; all times are of the middle half of the rounds."""

    method: str  # plain, chain, dynamic or static
    batch_size: int
    context: int  # tokens of each prompt
    mean_context: float  # rows of K/V before a round, on average over those timed
    nodes: float  # tokens of one sequence that the target's forward reads
    tokens_per_round: float  # of one sequence
    draft_forwards: float
    step_ms: float  # bare
    clocked_ms: float
    traced_ms: float
    parts: dict[str, Part]
    adds_up: float  # the parts together, as a share of the bare step
    floor_ms: float
    launch_ms: float | None  # the host in calls that launch kernels, in a traced round; None without a GPU
    sync_ms: float | None  # the host in calls that wait for the GPU

    @property
    def gap_ms(self) -> float:
        return sum(part.gap_ms for part in self.parts.values())

    def of(self, prefix: str) -> float:
        """Milliseconds of the parts whose names begin so."""
        return sum(part.ms for name, part in self.parts.items() if name.startswith(prefix))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        derived = {
            "gap_ms": self.gap_ms,
            "token_ms": self.step_ms / self.tokens_per_round,
            "floor_share": self.floor_ms / self.step_ms,
            "profiler_overhead": self.traced_ms / self.step_ms - 1,
        }
        return asdict(self) | derived


@dataclass(frozen=True)
class Timed:
    """Rounds of one setting, seconds each."""

    bare: list[float]
    clocked: list[dict[str, float]]  # by part
    traced: list[float]
    forwards: float  # of the draft, on average
    nodes: float
    emitted: float
    mean_context: float
    events: list[Event]  # of the traced rounds
    tokens: list[list[int]]  # what each sequence has emitted


def timed(decoder: Decoder, draft: Any, requests: Sequence[Request], steps: int, name: str = "") -> Timed:
    """Prefills `requests` as one batch and times `steps` bare and as many clocked rounds in turn, then the
    traced ones. None of the requests may end meanwhile. name: of the setting, in the trace."""
    batch = Batch(decoder, requests)
    device = decoder.target.device

    def step() -> float:
        began = now(device)
        batch.step()
        return now(device) - began

    forwards = counted_forwards(batch)
    bare: list[float] = []
    clocked: list[dict[str, float]] = []
    try:
        while batch.waiting:
            batch.admit()
        marks = marks_of(batch, decoder.target, draft)
        for _ in range(WARMUP):
            step()
        for _ in range(steps):
            bare.append(step())
            clock = Clock()
            with marked(marks, clock.wrap):
                step()
            clocked.append(dict(clock.seconds))
        with marked(marks, recorded):
            traced, events = under_profiler(step, device, name)
    finally:
        for decoding in batch.live:
            batch.leave(decoding)
    counting = slice(WARMUP, WARMUP + 2 * steps)
    rounds = [round for one in batch.generations for round in one.rounds[counting]]
    before = [
        len(request.prompt) + sum(round.emitted for round in one.rounds[:i])
        for request, one in zip(requests, batch.generations, strict=True)
        for i in range(*counting.indices(len(one.rounds)))
    ]
    return Timed(
        bare,
        clocked,
        traced[1:],
        forwards=fmean(forwards[counting]),
        nodes=fmean(round.nodes for round in rounds),
        emitted=fmean(round.emitted for round in rounds),
        mean_context=fmean(before),
        events=events,
        tokens=[one.tokens for one in batch.generations],
    )


def counted_forwards(batch: Batch) -> list[int]:
    """A list that gets the draft's forwards of each round of `batch` from now on."""
    counts: list[int] = []
    propose = batch.propose

    def counting() -> Any:
        proposals = propose()
        counts.append(max(proposal.forwards for proposal in proposals))
        return proposals

    batch.propose = counting
    return counts


def under_profiler(
    step: Callable[[], float], device: torch.device, name: str
) -> tuple[list[float], list[Event]]:
    """Seconds of the traced rounds, and the trace's events."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it notes each start and stop on stderr
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with torch.profiler.profile(activities=activities) as profiler, record_function(name or "rounds"):
        taken = [step() for _ in range(TRACED)]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return taken, json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def row_of(method: str, context: int, batch_size: int, run: Timed, floor: float) -> Row:
    found = split(run.events)
    step = fmean(middle(run.bare, float))
    clock = mean_parts(middle(run.clocked, lambda parts: sum(parts.values())))
    parts = by_kernels(found, step) if found.launch is not None else by_clock(found, clock)
    return Row(
        method=method,
        batch_size=batch_size,
        context=context,
        mean_context=run.mean_context,
        nodes=run.nodes,
        tokens_per_round=run.emitted,
        draft_forwards=run.forwards,
        step_ms=1e3 * step,
        clocked_ms=1e3 * sum(clock.values()),
        traced_ms=1e3 * fmean(run.traced),
        parts={part: Part(1e3 * (one.busy + one.gap), 1e3 * one.gap) for part, one in parts.items()},
        adds_up=sum(one.busy + one.gap for one in parts.values()) / step,
        floor_ms=1e3 * floor,
        launch_ms=None if found.launch is None else 1e3 * found.launch,
        sync_ms=None if found.sync is None else 1e3 * found.sync,
    )


def by_clock(found: Split, clock: dict[str, float]) -> dict[str, Share]:
    """The clock's seconds of each part, with as large a share of them a gap as in the trace: operators and
    what lies between them are slowed alike, which is not quite so, hence only the share is taken."""

    def of(part: str) -> Share:
        busy, gap = found.parts.get(part, Share())
        gap = clock[part] * (gap / (busy + gap) if busy + gap else 1.0)
        return Share(clock[part] - gap, gap)

    return {part: of(part) for part in PARTS if part in clock}


def by_kernels(found: Split, step: float) -> dict[str, Share]:
    """The kernels' own seconds, which the profiler does not change, and gaps that fill the bare `step`: it
    slows the host down, so that those of the trace are too long."""
    busy = sum(one.busy for one in found.parts.values())
    gaps = sum(one.gap for one in found.parts.values())
    factor = max(0.0, step - busy) / gaps if gaps else 0.0
    return {part: Share(one.busy, factor * one.gap) for part, one in found.parts.items()}


def middle(values: Sequence[T], size: Callable[[T], float]) -> list[T]:
    """Those between the quartiles of `size`: a mean over them is steady, and means of parts add up."""
    cut = len(values) // 4
    return sorted(values, key=size)[cut : len(values) - cut]


def mean_parts(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means by part; in a round without it a part took no time."""
    names = {part for one in rounds for part in one}
    return {part: fmean(one.get(part, 0.0) for one in rounds) for part in PARTS if part in names}


# ---- the floor ----


def bandwidth(device: torch.device, size: int = STREAMED, repeats: int = 5) -> float:
    """Bytes per second that reading a long tensor reaches on this device, with this process's threads: the
    best of `repeats`."""
    numbers = torch.ones(size // 4, dtype=torch.float32, device=device)
    taken = []
    for _ in range(1 + repeats):
        began = now(device)
        numbers.sum()
        taken.append(now(device) - began)
    return size / min(taken[1:])


def floor_of(target: Target, draft: Any, decoder: Decoder, run: Timed, batch: int, speed: float) -> float:
    """Seconds to read what a round's forwards read at least. speed: bytes per second.

    Left out are activations, the K/V of a draft network, and rows of embeddings.
    """
    memory = Device(flops=math.inf, bandwidth=speed, memory=math.inf, link=math.inf)

    def read(load: Load, tokens: int) -> float:
        return load.seconds(memory, IDEAL, tokens, batch, round(run.mean_context))

    floor = read(load_of(target, target.embedding.element_size()), round(run.nodes))
    if run.forwards == 0:
        return floor
    if isinstance(draft, Target):
        return floor + run.forwards * read(load_of(draft, draft.embedding.element_size()), 1)
    # Of heads each reads its own weights, and all of them together once a round.
    once = any(isinstance(reader, HeadsReader) for reader in readers(decoder.drafter))
    return floor + (1.0 if once else run.forwards) * weight_bytes(draft) / speed


def weight_bytes(draft: torch.nn.Module) -> int:
    """Of all parameters that a forward reads whole: embeddings are only looked up."""
    read = [p for name, p in draft.named_parameters() if "emb" not in name]
    return sum(p.numel() * p.element_size() for p in read)


# ---- what is profiled ----


def methods(decode: DecodeConfig) -> dict[str, DecodeConfig]:
    """Plain decoding, the chain, and the tree if `decode` asks for one; never off while it is timed."""
    steady = replace(decode, govern=False)
    found = {"plain": replace(steady, draft_tokens=0)}
    if decode.draft_tokens:
        found["chain"] = replace(steady, tree=Tree.chain)
        found[decode.tree.value] = steady
    return found


def decoder_of(target: Target, draft: Any, decode: DecodeConfig, name: str) -> Decoder:
    """As `decode` says; plain decoding needs no draft. name: tells the draft from others."""
    if decode.draft_tokens == 0:
        return Decoder(target, PlainDrafter(), decode.batch_size)
    return build_decoder(target, draft, decode, name)


def requests_of(
    config: Config, chosen: Sequence[Prompt], decode: DecodeConfig, context: int
) -> list[Request]:
    """`decode.batch_size` requests of `context` tokens that go on for as long as they are timed."""
    new = new_tokens(decode, config.profile.steps)
    params = [
        replace(Params.of(decode, config.seed + i), max_new_tokens=new, stop=())
        for i in range(decode.batch_size)
    ]
    return [Request(text(chosen, i, context), one) for i, one in enumerate(params)]


def new_tokens(decode: DecodeConfig, steps: int) -> int:
    """What a sequence emits at most, and so much more that no round drafts less for being near the end."""
    rounds = WARMUP + 2 * steps + TRACED
    return (rounds + 1) * (decode.draft_tokens + 1) + 1


def text(chosen: Sequence[Prompt], index: int, length: int) -> list[int]:
    """The last `length` tokens of what ends with prompt `index`: the prompts before it stand in front."""
    ids: list[int] = []
    while len(ids) < length:
        ids = [*chosen[index % len(chosen)].ids, *ids]
        index -= 1
    return ids[-length:]


def endless(target: Target) -> Target:
    """The target with nothing that ends its replies."""
    going_on = copy.copy(target)
    going_on.eos_ids = frozenset()
    return going_on


def check_room(config: Config, target: Target) -> None:
    """Refuses contexts that the target's positions, or its sliding window, cannot hold."""
    limits = (target.window, getattr(target.config, "max_position_embeddings", None))
    limit = min((one for one in limits if one is not None), default=math.inf)
    new = new_tokens(config.decode, config.profile.steps)
    if (longest := max(config.profile.contexts)) + new > limit:
        raise ConfigError(
            f"profile.contexts has {longest}, and {new} tokens may follow while it is timed: more than the "
            f"{limit} that target {target.name} holds. Set shorter contexts, or fewer profile.steps."
        )


# ---- the command ----


def profile(config: Config, console: Console) -> dict[str, Any]:
    """Times every setting, writes what the module's docstring names, prints the tables; returns what
    profile.json holds.

    Raises `CheckpointError` (no draft, or another target's), `ConfigError` (contexts too long, or compiled
    forwards), `TrafficError` (no held-out prompts), `TargetError` (layers of an unknown kind) and
    `StorageError`.
    """
    asked, ways = config.profile, methods(config.decode)
    check_eager(config.decode, "eval.profile")  # nothing within a compiled one can be clocked
    folder = None
    if len(ways) > 1 and Drafting.draft in config.decode.drafters:
        folder = find_draft(config.eval.draft, Path(config.runs), config.experiment)
    output = output_of(config, folder)
    ensure_writable(output)
    chosen = prompts(config, "heldout")
    if not chosen:
        raise TrafficError(
            f"There are no held-out prompts in {split_file(config, 'heldout')} to decode from. Raise "
            "data.heldout_fraction or name data.heldout_sources, and run data.prepare again."
        )
    where = provenance()
    others_before = share_of_others()
    warn_if_busy(console, others_before, config.eval.max_load, "before the run")
    target = endless(Target.load(config.target))
    check_room(config, target)
    draft = load_draft(folder, target) if folder is not None else None
    speed = bandwidth(target.device) if asked.bandwidth is None else 1e9 * asked.bandwidth
    plan = list(product(ways.items(), asked.batch_sizes, asked.contexts))
    watch, rows, events = Contention(), [], []
    with bar(console) as progress:
        task = progress.add_task("profiling", total=len(plan))
        for (method, decode), batch, context in plan:
            decode = replace(decode, batch_size=batch)
            decoder = decoder_of(target, draft, decode, draft_hash(folder) if folder is not None else "")
            requests = requests_of(config, chosen, decode, context)
            run = timed(decoder, draft, requests, asked.steps, f"{method}, batch {batch}, context {context}")
            floor = floor_of(target, draft, decoder, run, batch, speed)
            rows.append(row_of(method, context, batch, run, floor))
            if asked.trace:
                events += last_round(run.events)
            progress.advance(task)
    others = {"others_before": others_before, "others_during": watch.share(), "limit": config.eval.max_load}
    written = {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: where[name] for name in ("git", "hardware", "versions")},
        "load": others,
        "device": str(target.device),
        "bandwidth_gb_s": speed / 1e9,
        "bandwidth_source": "measured here" if asked.bandwidth is None else "profile.bandwidth",
        "parts": PARTS,
        "rows": [row.to_dict() for row in rows],
        "notes": notes(rows, speed),
        "config": as_plain(config),
    }
    write_json(output / "profile.json", written)
    write_text(output / "profile.svg", standalone(picture(written["rows"])))
    if asked.trace:
        whole = {"displayTimeUnit": "ms", "traceEvents": events}
        write_text(output / "trace.json", json.dumps(whole, separators=(",", ":")))
    show(rows, written, output, console)
    return written


def output_of(config: Config, folder: Path | None) -> Path:
    """Beside measure.json; where no draft is needed, in the experiment's folder."""
    if config.profile.output is not None:
        return Path(config.profile.output)
    return Path(config.runs) / config.experiment if folder is None else default_output(folder)


# ---- what it says ----


def notes(rows: Sequence[Row], speed: float) -> list[str]:
    """What follows, each sentence with the numbers that made it."""
    said = []
    for row in rows:
        if (row.batch_size, row.context) != (rows[0].batch_size, rows[0].context):
            continue
        name, largest = max(((n, part.ms) for n, part in row.parts.items()), key=lambda item: item[1])
        sentence = (
            f"{row.method}, batch {row.batch_size}, context {row.context}: most of a step's "
            f"{row.step_ms:.2f} ms is {PARTS[name]} ({largest / row.step_ms:.0%}); reading what it must at "
            f"{speed / 1e9:.1f} GB/s takes {row.floor_ms:.2f} ms, so it reaches "
            f"{row.floor_ms / row.step_ms:.0%} of its floor"
        )
        if row.draft_forwards:
            sentence += f"; drafting takes {row.of('draft') / row.step_ms:.0%}"
        said.append(sentence + ".")
    low, high = min(row.adds_up for row in rows), max(row.adds_up for row in rows)
    slower = [row.traced_ms / row.step_ms - 1 for row in rows]
    said.append(
        f"The parts add up to {low:.1%} to {high:.1%} of the bare step. Under the profiler a step takes "
        f"{min(slower):.0%} to {max(slower):.0%} longer."
    )
    if max(abs(low - 1), abs(high - 1)) > TOLERANCE:
        said.append(
            f"That is more than {TOLERANCE:.0%} off: the machine was not steady, or steps are too short for "
            "the clock. Raise profile.steps, or stop other processes."
        )
    return said


def show(rows: Sequence[Row], written: dict[str, Any], output: Path, console: Console) -> None:
    drafters = ", ".join(written["config"]["decode"]["drafters"])
    console.print(overview(rows))
    if any(row.method != "plain" for row in rows):
        console.print(drafting(rows, drafters))
    for sentence in written["notes"]:
        console.print(sentence, markup=False, highlight=False)
    load = written["load"]
    warn_if_busy(console, load["others_during"], load["limit"], "during the run")
    for name in (
        "profile.json",
        "profile.svg",
        *(["trace.json"] if written["config"]["profile"]["trace"] else []),
    ):
        console.print(str(output / name), markup=False, highlight=False, soft_wrap=True)


def overview(rows: Sequence[Row]) -> Table:
    """Milliseconds of a step by part; gaps lie within the parts."""
    columns: dict[str, Callable[[Row], float]] = {
        "step": lambda row: row.step_ms,
        "attention": lambda row: row.of("target.attention"),
        "MLP": lambda row: row.of("target.mlp"),
        "head": lambda row: row.of("target.lm_head"),
        "other": lambda row: row.of("target.other"),
        "draft": lambda row: row.of("draft"),
        "verify": lambda row: row.of("verify"),
        "commit": lambda row: row.of("commit"),
        "loop": lambda row: row.of("round") + row.of("inputs"),
        "gaps": lambda row: row.gap_ms,
        "floor": lambda row: row.floor_ms,
    }
    made = table("A step in milliseconds; gaps lie within the parts", [*columns, "reached"])
    for row in rows:
        cells = [f"{value(row):.2f}" for value in columns.values()]
        made.add_row(*place(row), *cells, f"{row.floor_ms / row.step_ms:.0%}")
    return made


def drafting(rows: Sequence[Row], drafters: str) -> Table:
    """Milliseconds of drafting by part, and what a round gives."""
    columns = {
        "attention": "draft.attention",
        "MLP": "draft.mlp",
        "head": "draft.lm_head",
        "other": "draft.other",
        "tree": "draft.tree",
    }
    made = table(f"Drafting ({drafters}) in milliseconds", [*columns, "forwards", "tokens", "ms a token"])
    for row in rows:
        made.add_row(
            *place(row),
            *(f"{row.of(part):.2f}" if row.of(part) else "" for part in columns.values()),
            f"{row.draft_forwards:.1f}",
            f"{row.tokens_per_round:.2f}",
            f"{row.step_ms / row.tokens_per_round:.2f}",
        )
    return made


def table(title: str, columns: Sequence[str]) -> Table:
    made = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    made.add_column("method")
    for name in ("batch", "context", *columns):
        made.add_column(name, justify="right")
    return made


def place(row: Row) -> tuple[str, str, str]:
    return row.method, str(row.batch_size), str(row.context)


if __name__ == "__main__":
    main()
