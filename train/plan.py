"""`python -m train.plan`: before a run, whether it fits, how long it takes, what to change if it does not.

Nothing is loaded and nothing is trained. The target comes from its config.json alone, and the training step
that the experiment describes is rehearsed on tensors without values (train/memory.py): once with the longest
rows, for memory, and once with rows of mean length, for time. Time is a roofline over the step's own
operations, with a data sheet's figures, between what engines reach at best and what is usual
(models/roofline.py). What several devices change follows from `trainer.strategy` as train/strategies.py lays
it out:

    strategy   weights of the draft              gradients                                  optimiser states
    none       whole                             whole                                      whole
    ddp        whole                             whole, always                              whole
    zero2      whole, and a cut copy; once       cut, and a bucket; two buckets when        cut
               more to be measured               they are reduced
    fsdp2      cut; whole in backward and to     cut; whole in backward; twice when         cut
               be measured, twice in forward     they are reduced
    zero3      cut, and a cut copy; whole in     as zero2, but always                       cut
               forward, backward, to be measured

The target is whole on every device in all of them, or cut over `trainer.target_parallel` (train/sharded.py):
its layers' matrices and K/V are, and what a layer holds while it runs is counted as if it were not.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import gcd
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig

from configs.entry import entry
from configs.errors import ConfigError
from configs.schema import Config, Dtype, Features, Replies, Strategy, TrainerConfig
from data.tokens import REPLIES, TOKENS, TokenRow, load, replied_rows, split_file
from models.files import ensure_writable, read_lines, write_json
from models.packing import LEAST_ROWS
from models.provenance import provenance
from models.quantization import linear_weights, quantised_bytes
from models.roofline import BEST, USUAL, Device, Reach, device_named, load_of
from models.target import Target, first_line
from train.batches import Batch, Plan, rounded
from train.distill import Method, find_method
from train.ema import Average
from train.features import Online, row_bytes
from train.loggers import duration
from train.memory import Phase, Rehearsal
from train.objectives import Objective
from train.optimizers import optimizers
from train.sharded import cut_bytes, head_counts, refuse_uneven
from train.strategies import BUCKET

SCHEMA = "leadout.plan/1"

TARGET, PACKED, TEACHER = (
    "target weights",
    "target, packed",
    "target's head, draft's rows",
)
WEIGHTS, GRADIENTS, STATES = "draft weights, float32", "gradients", "optimiser states"
AVERAGE, FEATURES, LOGITS = "averaged weights", "features of a batch", "logits of the loss"
ACTIVATIONS, TWIN, CACHE = "activations", "draft as deployed", "K/V"
PARTS = (
    *(TARGET, PACKED, TEACHER, WEIGHTS, GRADIENTS, STATES, AVERAGE, FEATURES, LOGITS),
    *(ACTIVATIONS, TWIN, CACHE),
)
# The phases of a run that have a peak of their own.
CAPTURE, FORWARD, LEARN, UPDATE, MEASURE = (
    *("features, before training", "features, target's forward", "loss and gradients"),
    *("optimiser step", "held-out measurement"),
)

USABLE = 0.9  # of a device's memory; the rest is for its context, libraries' workspaces and fragments
ROWS = 100_000  # where none are prepared
SHARDING = (Strategy.fsdp2, Strategy.zero2, Strategy.zero3)


# ---- rows ----


@dataclass(frozen=True)
class Traffic:
    """Training rows by their sizes, each (tokens, tokens trained on)."""

    rows: list[tuple[int, int]]
    longest: list[tuple[int, int]]  # what a batch may meet at worst, longest first
    source: str

    @property
    def mean(self) -> tuple[int, int]:
        return round(self.tokens / len(self.rows)), round(sum(n for _, n in self.rows) / len(self.rows))

    @property
    def tokens(self) -> int:
        return sum(length for length, _ in self.rows)


def traffic_of(config: Config) -> Traffic:
    """The rows that are prepared, or else those that `plan` supposes."""
    folder, asked, most = Path(config.data.folder), config.plan, config.data.max_length
    train, written = split_file(config, "train"), config.data.replies is Replies.target
    cached = sorted((folder / TOKENS).glob("*/"), key=lambda path: path.stat().st_mtime)
    if asked.rows is None and asked.length is None:
        if written and train.exists() and (folder / REPLIES).exists():
            return prepared(replied_rows(config, Counter()), most, f"prompts and replies in {folder}")
        if not written and cached:
            return prepared(load(cached[-1])[0], most, f"the newest token rows in {folder}")
        if written and train.exists():
            reply = config.regenerate.max_new_tokens
            asked_for = islice(read_lines(train), config.regenerate.max_prompts)
            rows = [(len(row["prompt_ids"]) + reply, reply) for row in asked_for]
            return Traffic(rows, sorted(rows, reverse=True), f"prompts in {folder}, replies at their longest")
    length, count = asked.length or most // 2, asked.rows or ROWS
    reply = min(most - 1, config.regenerate.max_new_tokens) if written else most - 1
    return Traffic(
        [(length, length // 2)] * count, [(most, reply)] * count, "supposed: half of each row is a reply"
    )


def prepared(rows: Any, most: int, source: str) -> Traffic:
    cut = [(len(row.input_ids[:most]), sum(row.loss_mask[:most])) for row in rows]
    kept = [row for row in cut if row[1]]
    if not kept:
        raise ConfigError(f"There is nothing to train on in {source}. Set plan.rows to plan without them.")
    return Traffic(kept, sorted(kept, reverse=True), source)


def batch_of(sizes: Sequence[tuple[int, int]], tokens: int) -> list[TokenRow]:
    """As many of `sizes`, longest first, as make up a micro-batch of `tokens`."""
    count = max(1, tokens // rounded(sizes[0][0]))
    return [TokenRow("", "", [0] * n, [0] * (n - taught) + [1] * taught) for n, taught in sizes[:count]]


# ---- the rehearsal ----


@dataclass(frozen=True)
class Step:
    """One optimiser step of one device, nothing cut."""

    phases: dict[str, Phase]  # those whose memory counts
    micro: list[Phase]  # what is done for each micro-batch
    update: Phase  # and once for a step
    capture: Phase  # the target's forward over one micro-batch
    target: Target  # its sketch
    taps: int  # target layers whose hidden states are read
    parameters: int  # trained
    divided: int  # bytes of the target that `trainer.target_parallel` divides
    batch: int  # bytes of a micro-batch's features
    tokens: int  # of a micro-batch, padded

    def peaks(self, config: Config) -> dict[str, dict[str, float]]:
        """Bytes of a device by part, of each phase at its peak."""
        n, strategy = ranks(config), config.trainer.strategy
        found = {}
        for name, phase in self.phases.items():
            held = cut(phase.held, name, strategy, n, 4 * self.parameters, own_share(config) > 1)
            held = cut_target(held, config.trainer.target_parallel, self.divided)
            if name in (FORWARD, LEARN, UPDATE):  # a step's micro-batches are all there from its beginning
                held[FEATURES] = held.get(FEATURES, 0) + (own_share(config) - 1) * self.batch
            found[name] = {part: size for part, size in held.items() if size}
        return found

    def seconds(self, device: Device, reach: Reach, micro_batches: int) -> float:
        one = sum(phase.seconds(device, reach) for phase in self.micro)
        return micro_batches * one + self.update.seconds(device, reach)


def cut(
    held: dict[str, int], phase: str, strategy: Strategy, n: int, trained: int, several: bool
) -> dict[str, float]:
    """What one of `n` devices has of the draft's parts of `held`, by the table above, in bytes.

    trained: of the weights that are trained, and so of their gradients. several: whether a device has more
    than one micro-batch of a step. An update begins with the reduction of gradients over the devices.
    """
    if n == 1 or phase == CAPTURE:  # before the draft is laid out, or (bounded) at most what it is whole
        return dict(held)
    weights, fresh = held.get(WEIGHTS, 0), held.get(GRADIENTS, 0) if phase == LEARN else 0
    own, bucket = trained / n, min(trained, 4 * BUCKET)
    earlier = own if several else 0
    whole, measured = weights * (phase in (LEARN, MEASURE)), weights * (phase == MEASURE)
    laid = {
        Strategy.ddp: weights,
        Strategy.zero2: weights + own + measured,
        Strategy.fsdp2: weights / n + (2 if phase == LEARN else 1) * whole,
        Strategy.zero3: weights / n + own + whole,
    }
    gradients = {  # at the loss, at the update, and else
        Strategy.ddp: (trained, trained, trained),
        Strategy.zero2: (earlier + bucket, max(earlier + 2 * bucket, 2 * own), 0),
        Strategy.fsdp2: (earlier + fresh, earlier + 2 * trained, 0),
        Strategy.zero3: (own + bucket, own + bucket + max(own, bucket), own + bucket),
    }
    learn, update, otherwise = gradients[strategy]
    states = held.get(STATES, 0) / (1 if strategy is Strategy.ddp else n)
    at = {LEARN: learn, UPDATE: update}.get(phase, otherwise)
    return {**held, WEIGHTS: laid[strategy], GRADIENTS: at, STATES: states}


def cut_target(held: dict[str, float], parts: int, divided: int) -> dict[str, float]:
    """`held` where `divided` bytes of the target lie in `parts`."""
    target, context = held.get(TARGET, 0), held.get(CACHE, 0)
    return {**held, TARGET: target - divided + divided / parts, CACHE: context / parts}


def rehearse(config: Config, method: Method, rows: Sequence[TokenRow]) -> Step:
    """A step of `config` on a micro-batch of `rows`, as train/loop.py takes it."""
    trainer, scene = config.trainer, Rehearsal()
    with scene:
        with scene.part(TARGET):
            target = Target.sketch(config.target)
        with scene.part(TEACHER):
            objective = method.build(target, rows, config.seed)
        trained = [p for p in objective.parameters() if p.requires_grad]
        scene.claim([*objective.draft.parameters(), *trained], WEIGHTS)
        scene.wide = {target.vocab_size: LOGITS, len(objective.draft.draft_ids): LOGITS}
        objective.train()
        objective.begin(0)
        source = Online(target, rows, objective.taps)
        cached = trainer.features is Features.cached
        bounded = trainer.features_gb is not None  # then features are captured between steps
        before = featured(scene, CAPTURE, source, len(rows)) if cached and not bounded else None
        made = settled(scene, objective, trainer)
        if cached and bounded:
            before = featured(scene, CAPTURE, source, len(rows))
        with scene.part(AVERAGE):
            average = None if trainer.ema is None else Average(objective, trainer.ema)
        batch, capture = before or featured(scene, FORWARD, source, len(rows))
        size = scene.claim([v for v in vars(batch).values() if isinstance(v, Tensor)], FEATURES)
        learn = learned(scene, objective, batch, trainer, piled=piled(config))
        with scene.phase(UPDATE) as update:
            torch.nn.utils.clip_grad_norm_(trained, trainer.clip_norm)
            for one in made.values():
                one.step()
            if average is not None:
                average.update(1)
            objective.zero_grad()
        resting = {part: scene.held[part] for part in (TARGET, TEACHER, WEIGHTS, STATES, AVERAGE)}
    measure = measurement(config, target, objective.draft, resting)
    phases = {one.name: one for one in (capture, learn, update, measure)}
    less, widest = spared(target)
    for one in phases.values():
        one.held[TARGET] -= less
        one.held[PACKED] = packed(config, target)
    for one in (capture, measure):
        one.held[ACTIVATIONS] = one.held.get(ACTIVATIONS, 0) + widest
    return Step(
        phases=phases,
        micro=[learn] if cached else [capture, learn],
        update=update,
        capture=capture,
        target=target,
        taps=len(objective.taps),
        parameters=sum(p.numel() for p in trained),
        divided=cut_bytes(target),
        batch=size,
        tokens=batch.tokens.numel(),
    )


def featured(scene: Rehearsal, name: str, source: Online, rows: int) -> tuple[Batch, Phase]:
    with scene.phase(name) as phase:
        batch = source.batch(range(rows))
    return batch, phase


def settled(
    scene: Rehearsal, objective: Objective, trainer: TrainerConfig
) -> dict[str, torch.optim.Optimizer]:
    """The optimisers with their states, which they make at their first step."""
    with scene.part(STATES):
        made = optimizers(objective, trainer)
        for parameter in objective.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        for one in made.values():
            one.step()
        objective.zero_grad()
    return made


def learned(
    scene: Rehearsal, objective: Objective, batch: Batch, trainer: TrainerConfig, piled: bool
) -> Phase:
    """A micro-batch's forward and backward pass; where gradients pile up the second, which meets some."""

    def claimed(parameter: Tensor) -> None:
        scene.claim([parameter.grad], GRADIENTS)

    hooks = [p.register_post_accumulate_grad_hook(claimed) for p in objective.parameters() if p.requires_grad]
    positions = objective.positions(batch)
    done = []
    for _ in range(2 if piled else 1):
        with scene.phase(LEARN) as phase:
            with torch.autocast("cpu", torch.bfloat16, enabled=trainer.autocast is Dtype.bfloat16):
                loss = objective(batch, positions)
            loss.value.backward()
        done.append(phase)
    for hook in hooks:
        hook.remove()
    return done[-1]


def measurement(config: Config, target: Target, draft: Any, resting: dict[str, int]) -> Phase:
    """The held-out measurement: K/V of a prompt and its reply, and a copy of the draft as it is deployed."""
    length = config.data.max_prompt_tokens + config.trainer.eval_new_tokens + config.decode.draft_tokens
    size = target.dtype.itemsize
    weights = sum(p.numel() for p in draft.parameters()) * size
    context = int(load_of(target).cache * size * length)
    return Phase(MEASURE, resting | {TWIN: weights, CACHE: context})


def spared(target: Target) -> tuple[int, int]:
    """Of a quantised target: (bytes that its weights take less than in its dtype; the largest of them, which
    has its dtype while it is multiplied)."""
    if target.quantize is None:
        return 0, 0
    weights = list(linear_weights(target.layers))
    less = sum(weight.nbytes - quantised_bytes(weight) for weight in weights)
    return less, max(weight.nbytes for weight in weights)


def packed(config: Config, target: Target) -> int:
    """Bytes of the copies that models/packing.py makes of a target on a CPU."""
    whole = config.trainer.target_parallel == 1
    if not (whole and on_cpu(config) and config.target.pack and target.dtype in LEAST_ROWS):
        return 0
    every = target.model.modules() if target.quantize is None else [target.head]  # the rest is quantised
    return sum(m.weight.nbytes for m in every if type(m) is torch.nn.Linear)


def own_share(config: Config) -> int:
    """Micro-batches of an optimiser step that one device has."""
    return -(-config.trainer.accumulation // ranks(config))


def piled(config: Config) -> bool:
    """Whether a device's later micro-batches meet gradients that are not laid out by a strategy."""
    return ranks(config) == 1 and config.trainer.accumulation > 1


def ranks(config: Config) -> int:
    """Devices that train."""
    return 1 if config.trainer.strategy is Strategy.none else config.plan.devices


def planned_method(config: Config) -> Method:
    """The method, with what it would read from files described by sizes alone."""
    method = find_method(config.method)
    if method.name == "acceptance_head":
        raise ConfigError(
            "method=acceptance_head trains a head on a finished draft, whose weights train.plan would have "
            "to read. Plan the draft's own run: a head takes less."
        )
    if method.name == "small":
        settings, start = replace(method.settings, on_policy=0.0), method.network.start
        network = method.network if start in ("target", "scratch") else sized_as(start, method.network)
        return replace(method, settings=settings, network=network)
    return method


def sized_as(name: str, network: Any) -> Any:
    """The network of fresh weights that is as large as the model `name`, from its config.json."""
    try:
        config = AutoConfig.from_pretrained(name).get_text_config(decoder=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"method.network.start={name} cannot be described: {first_line(error)} Set a folder with its "
            "config.json."
        ) from None
    return replace(
        network,
        start="scratch",
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        embedding=network.embedding or "own",
    )


# ---- what the run takes ----


def on_cpu(config: Config) -> bool:
    name = config.target.device
    return name == "cpu" or (name == "auto" and not torch.cuda.is_available() and config.plan.device is None)


def sheet_of(config: Config) -> Device | None:
    """The data sheet; None for this machine's processors, which have none."""
    if config.plan.device is None and on_cpu(config):
        return None
    return device_named(config.plan.device or "h100")


def capacity(sheet: Device | None) -> float:
    """Usable bytes of a device."""
    return USABLE * (psutil.virtual_memory().total if sheet is None else sheet.memory)


def exchanged(config: Config, step: Step, sheet: Device) -> float:
    """Seconds of an optimiser step for what devices send each other, none of it hidden behind arithmetic."""
    n, parts = ranks(config), config.trainer.target_parallel
    weights = step.phases[LEARN].held.get(WEIGHTS, 0)
    # A reduction of gradients, and where weights are cut, their gathering for forward and backward.
    rounds = {Strategy.none: 0, Strategy.ddp: 2, Strategy.zero2: 2}.get(config.trainer.strategy, 3)
    # A device runs its holders' micro-batches beside its own, and sums what layers give over all of them.
    forwards = own_share(config) * parts if config.trainer.features is Features.online else 0
    return rounds * weights * (n - 1) / n / sheet.link + forwards * summing(config, step, sheet)


def summing(config: Config, step: Step, sheet: Device) -> float:
    """Seconds that the parts of a target take to add up what their layers give of a micro-batch."""
    load = load_of(step.target, step.target.dtype.itemsize)
    return load.layers * load.exchange(sheet, BEST, step.tokens, config.trainer.target_parallel)


@dataclass(frozen=True)
class Change:
    """A change that takes memory off a device."""

    setting: str
    gain: float  # bytes of the peak
    peak: float


def variants(config: Config) -> dict[str, Config]:
    """What could be changed, as the overrides that do it. Training learns the same from the first four."""
    trainer, method, n = config.trainer, config.method, config.plan.devices
    found: dict[str, Config] = {}
    if trainer.features is Features.online:
        found["trainer.features=cached"] = replace(config, trainer=replace(trainer, features=Features.cached))
    if method.objective.get("recompute") is False:
        objective = method.objective | {"recompute": True}
        found["method.objective.recompute=true"] = replace(
            config, method=replace(method, objective=objective)
        )
    smaller, more = trainer.batch_tokens // 2, trainer.accumulation * 2
    halved = replace(trainer, batch_tokens=smaller, accumulation=more)
    found[f"trainer.batch_tokens={smaller} trainer.accumulation={more}"] = replace(config, trainer=halved)
    if n > 1 and trainer.strategy not in SHARDING and trainer.ema is None and method.name != "medusa2":
        sharded = replace(config, trainer=replace(trainer, strategy=Strategy.fsdp2))
        found["trainer.strategy=fsdp2"] = sharded
    if trainer.strategy is not Strategy.none and method.name != "medusa2":
        parts = most_parts(config)
        if parts > trainer.target_parallel:
            divided = replace(trainer, target_parallel=parts)
            found[f"trainer.target_parallel={parts}"] = replace(config, trainer=divided)
    length = config.data.max_length // 2
    if length > config.data.max_prompt_tokens:
        shorter = replace(config.data, max_length=length)
        found[f"data.max_length={length}"] = replace(config, data=shorter)
    return found


def most_parts(config: Config) -> int:
    """The most parts that the target's heads and the devices allow."""
    return gcd(config.plan.devices, *head_counts(Target.sketch(config.target)))


class Rehearsals:
    """Steps on the longest of some rows, each rehearsed once."""

    def __init__(self, traffic: Traffic) -> None:
        self._longest = traffic.longest
        self._done: dict[str, Step] = {}

    def step(self, config: Config) -> Step:
        trainer, most = config.trainer, config.data.max_length
        several = piled(config)
        key = repr((trainer.features, trainer.batch_tokens, several, most, config.method.objective))
        if key not in self._done:
            rows = batch_of(
                [(min(n, most), min(taught, most - 1)) for n, taught in self._longest], trainer.batch_tokens
            )
            self._done[key] = rehearse(config, planned_method(config), rows)
        return self._done[key]

    def peak(self, config: Config) -> tuple[str, float]:
        """The phase in which a device holds most, and its bytes."""
        totals = {name: sum(held.values()) for name, held in self.step(config).peaks(config).items()}
        name = max(totals, key=totals.__getitem__)
        return name, totals[name]


def advice(config: Config, rehearsals: Rehearsals, room: float) -> tuple[list[Change], list[str]]:
    """(single changes, the largest gain first; as many of them, in this order, as fit together, or [])."""
    peak = rehearsals.peak(config)[1]
    after = {setting: rehearsals.peak(one)[1] for setting, one in variants(config).items()}
    changes = [Change(setting, peak - new, new) for setting, new in after.items() if new < peak]
    changes.sort(key=lambda change: -change.gain)
    together: list[str] = []
    for change in changes:
        if peak <= room:
            break
        config = variants(config)[change.setting]
        peak = rehearsals.peak(config)[1]
        together.append(change.setting)
    return changes, together if peak <= room else []


def plan(config: Config, console: Console) -> dict[str, Any]:
    """Plans the run, writes plan.json, prints tables and the verdict; returns what was written."""
    output = Path(config.plan.output or Path(config.runs) / config.experiment)
    ensure_writable(output)
    refuse_undivided(config)
    sheet, traffic, trainer = sheet_of(config), traffic_of(config), config.trainer
    room = capacity(sheet)
    rehearsals = Rehearsals(traffic)
    step, (phase, peak) = rehearsals.step(config), rehearsals.peak(config)
    fits = peak <= room
    changes, together = ([], []) if fits else advice(config, rehearsals, room)
    where = provenance()
    written = {
        "schema": SCHEMA,
        **{name: where[name] for name in ("git", "versions")},
        "experiment": config.experiment,
        "target": config.target.name,
        "method": config.method.name,
        "strategy": trainer.strategy.value,
        "target_parallel": trainer.target_parallel,
        "plan": asdict(config.plan),
        "traffic": {"source": traffic.source, "rows": len(traffic.rows), "tokens": traffic.tokens}
        | {"mean": list(traffic.mean), "longest": list(traffic.longest[0])},
        "parameters": {
            "target": sum(p.numel() for p in step.target.model.parameters()),
            "trained": step.parameters,
        },
        "memory": {
            "device_bytes": room / USABLE,
            "usable_bytes": room,
            "peak_bytes": peak,
            "peak_phase": phase,
            "phases": step.peaks(config),
        },
        "time": None if sheet is None else times(config, traffic, sheet),
        "steps": steps(config, traffic),
        "features_bytes": disk(trainer, traffic, step) if trainer.features is Features.cached else None,
        "fits": fits,
        "notes": list(notes(config)),
        "changes": [asdict(change) for change in changes],
        "together": together,
    }
    write_json(output / "plan.json", written)
    show(written, console)
    console.print(str(output / "plan.json"), markup=False, highlight=False, soft_wrap=True)
    return written


def refuse_undivided(config: Config) -> None:
    """Raises for devices, or a target, that `trainer.target_parallel` does not divide."""
    parts, n = config.trainer.target_parallel, config.plan.devices
    if n % parts:
        raise ConfigError(
            f"trainer.target_parallel={parts} devices hold one target, and plan.devices={n}: set a "
            f"multiple of it, as in plan.devices={parts}."
        )
    if parts > 1:
        refuse_uneven(Target.sketch(config.target), parts)


def disk(trainer: TrainerConfig, traffic: Traffic, step: Step) -> int:
    """Bytes that cached features take at a time, as train/features.py counts them."""
    rows, bound = Counter(traffic.rows), trainer.features_gb
    total = sum(n * row_bytes(step.target, batch_of([size], 1)[0], step.taps) for size, n in rows.items())
    return total if bound is None else min(total, round(bound * 1e9))


def steps(config: Config, traffic: Traffic) -> int:
    trainer = config.trainer
    return Plan(
        [rounded(n) for n, _ in traffic.rows],
        tokens=trainer.batch_tokens,
        accumulation=trainer.accumulation,
        epochs=trainer.epochs,
        seed=config.seed,
        max_steps=trainer.max_steps,
    ).steps


def times(config: Config, traffic: Traffic, sheet: Device) -> dict[str, Any]:
    """Of training alone, each as [at best, as usual]: no answers, no held-out measurements."""
    trainer = config.trainer
    rows = batch_of([traffic.mean] * min(len(traffic.rows), trainer.batch_tokens), trainer.batch_tokens)
    step, count = rehearse(config, planned_method(config), rows), steps(config, traffic)
    tokens = trainer.accumulation * sum(len(row.input_ids) for row in rows)
    exchange = exchanged(config, step, sheet)
    seconds = [step.seconds(sheet, reach, own_share(config)) + exchange for reach in (BEST, USUAL)]
    batches = traffic.tokens / sum(len(row.input_ids) for row in rows)
    cached = trainer.features is Features.cached  # by those that hold one target, before the others begin
    parts, summed = trainer.target_parallel, summing(config, step, sheet)
    captures = [step.capture.seconds(sheet, reach) / parts + summed for reach in (BEST, USUAL)]
    # What was removed to keep to a bound is captured again in each epoch.
    unbounded = replace(trainer, features_gb=None)
    kept = disk(trainer, traffic, step) == disk(unbounded, traffic, step)
    passes = 0 if not cached else 1 if kept else trainer.epochs
    before = [passes * batches * capture for capture in captures]
    whole = [one * count + capture for one, capture in zip(seconds, before, strict=True)]
    price = config.plan.cost_per_hour
    flops = own_share(config) * sum(phase.flops for phase in step.micro) + step.update.flops
    return {
        "flops_per_step_and_device": flops,
        "seconds_per_step": seconds,
        "exchange_seconds_per_step": exchange,
        "tokens_per_s": [tokens / one for one in seconds],
        "seconds_of_capture": before,
        "seconds": whole,
        "cost": None if price is None else [price * config.plan.devices * one / 3600 for one in whole],
    }


def notes(config: Config) -> Iterator[str]:
    """What the figures leave open, and devices that would have nothing to do."""
    trainer, n = config.trainer, config.plan.devices
    if n > ranks(config):
        yield (
            f"trainer.strategy=none trains on one of the {n} devices: choose how they share, as in "
            "trainer.strategy=ddp."
        )
    elif trainer.accumulation % n:
        yield (
            f"A step's trainer.accumulation={trainer.accumulation} micro-batches do not go round {n} "
            f"devices: set a multiple of {n}, or some wait."
        )
    if config.method.objective.get("on_policy"):
        yield "The time in which the draft writes text of its own (method.objective.on_policy) is left out."


# ---- what is said ----


def show(written: dict[str, Any], console: Console) -> None:
    memory, asked, traffic = written["memory"], written["plan"], written["traffic"]
    where = f"{asked['devices']} × {asked['device'] or 'h100'}" if written["time"] else "this machine"
    parts = written["target_parallel"]
    divided = f", target over {parts}" if parts > 1 else ""
    table = Table(
        title=f"{written['experiment']}: {written['method']} for {written['target']}, GB on each device "
        f"({where}, strategy {written['strategy']}{divided})",
        title_justify="left",
    )
    table.add_column("at the peak of", no_wrap=True)
    for name in memory["phases"]:
        table.add_column(name, justify="right")
    for part in PARTS:
        sizes = [held.get(part, 0.0) for held in memory["phases"].values()]
        if any(sizes):
            table.add_row(part, *(gigabytes(size) if size else "" for size in sizes))
    totals = [sum(held.values()) for held in memory["phases"].values()]
    table.add_section()
    table.add_row("together", *map(gigabytes, totals), style="bold")
    console.print(table)
    mean, longest = traffic["mean"], traffic["longest"]
    console.print(
        f"{traffic['rows']:,} rows of {mean[0]} tokens, {mean[1]} of them trained on; the longest "
        f"{longest[0]} and {longest[1]} ({traffic['source']}). {written['steps']:,} steps, "
        f"{written['parameters']['trained'] / 1e6:,.1f} M parameters to train.",
        highlight=False,
    )
    say_time(written, console)
    if written["features_bytes"] is not None:
        console.print(f"Disk for features: {gigabytes(written['features_bytes'])} GB.", highlight=False)
    for note in written["notes"]:
        console.print(note, style="yellow", markup=False, highlight=False)
    verdict(written, console)


def say_time(written: dict[str, Any], console: Console) -> None:
    found = written["time"]
    if found is None:
        console.print(
            "No time: this machine has no data sheet. Name one, as in plan.device=h100.", highlight=False
        )
        return
    per_step = " to ".join(f"{one:.3g}" for one in found["seconds_per_step"])
    speed = " to ".join(f"{one:,.0f}" for one in reversed(found["tokens_per_s"]))
    whole = " to ".join(duration(one) for one in found["seconds"])
    cost = "" if found["cost"] is None else f", {' to '.join(f'{one:,.2f}' for one in found['cost'])} in cost"
    console.print(
        f"{per_step} s a step, {speed} tokens/s; {whole} in all (h:mm:ss){cost}. Training alone: "
        "answers and held-out measurements come on top.",
        highlight=False,
    )


def verdict(written: dict[str, Any], console: Console) -> None:
    memory = written["memory"]
    room, peak = memory["usable_bytes"], memory["peak_bytes"]
    whole = gigabytes(memory["device_bytes"])
    said = f"{gigabytes(peak)} GB of {gigabytes(room)} usable ({USABLE:.0%} of {whole})"
    if written["fits"]:
        console.print(f"[bold green]Fits[/]: {said}.", highlight=False)
        return
    console.print(f"[bold red]Does not fit[/]: {said}; highest at: {memory['peak_phase']}.", highlight=False)
    target = memory["phases"][LEARN][TARGET]
    if target > room:
        console.print(
            f"The target alone takes {gigabytes(target)} GB on each device: divide it over several "
            "(trainer=ddp trainer.target_parallel=N), or over more of them.",
            highlight=False,
        )
    for change in written["changes"]:
        console.print(
            f"- {change['setting']}: {gigabytes(change['gain'])} GB less, {gigabytes(change['peak'])} GB",
            markup=False,
            highlight=False,
        )
    if written["together"]:
        console.print(f"Together these fit: {'; '.join(written['together'])}", markup=False, highlight=False)


def gigabytes(size: float) -> str:
    """In 10^9 bytes; three digits where there is less than one."""
    return f"{size / 1e9:,.1f}" if abs(size) >= 1e9 else f"{size / 1e9:.3f}"


@entry()
def main(config: Config) -> None:
    plan(config, Console(width=None if sys.stdout.isatty() else 110))  # a table needs as much


if __name__ == "__main__":
    main()
