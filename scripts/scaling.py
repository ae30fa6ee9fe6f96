"""How training speeds up with processes: `python -m scripts.scaling +experiment=smollm2_cpu key=value ...`.

Runs the recipe's first steps as `train.distill` does: in one process, and by `--strategies` in several that
torchrun starts on this machine. Every round takes all of these ways one after the other, forwards and
backwards in turn, so that a change of the machine's load meets all alike. A step is the same in all of them,
`trainer.accumulation` micro-batches that are dealt to the processes:

    efficiency = tokens/s of n processes / (n x tokens/s of one)

Times are rank 0's, of the steps after the first `--warm-up`; logs and checkpoints come between steps.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.table import Table

from configs.compose import as_plain, compose
from configs.entry import leave, paragraphs
from configs.errors import ConfigError
from eval.machine import Contention
from eval.terminal import bar, wide_console
from models.files import ensure_writable, read_lines, write_json
from models.provenance import provenance

# Whatever the recipe says: every step is logged, and little is done beside the steps.
FIXED = (
    *("trainer.log_every=1", "trainer.eval_every=0", "trainer.eval_prompts=1", "trainer.eval_new_tokens=8"),
    *("trainer.patience=null", "trainer.resume=never", "logger=files"),
)
RECIPE = ("batch_tokens", "accumulation", "optimizer", "autocast", "features")  # what the figures depend on
Json = dict[str, Any]


class Way(NamedTuple):
    strategy: str
    processes: int

    def overrides(self, options: argparse.Namespace, runs: str) -> list[str]:
        steps = options.warm_up + options.steps
        length = (f"trainer.max_steps={steps}", f"trainer.save_every={steps}", f"threads={options.threads}")
        return [*options.overrides, *FIXED, *length, f"trainer.strategy={self.strategy}", f"runs={runs}"]

    def command(self, options: argparse.Namespace, runs: str) -> list[str]:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={self.processes}", "-m"]
        module = ["train.distill"] if self.processes == 1 else [*launcher, "train.distill"]
        return [sys.executable, "-m", *module, *self.overrides(options, runs)]


class Watch(Contention):
    """The share of our processors that others than this process and its ended children used."""

    def now(self) -> tuple[float, float, float]:
        wall, busy, own = super().now()
        return wall, busy, own + os.times().children_user + os.times().children_system


def ways(options: argparse.Namespace) -> list[Way]:
    """One process, then several. Raises `ConfigError` for a recipe that one of them cannot run."""
    several = [Way(strategy, n) for strategy in options.strategies for n in options.processes]
    for way in (made := [Way("none", 1), *several]):
        accumulation = compose(way.overrides(options, "runs")).trainer.accumulation
        if accumulation % way.processes:
            raise ConfigError(
                f"trainer.accumulation={accumulation} micro-batches make a step, and {way.processes} "
                "processes would not have as many each: set a multiple of every number in --processes."
            )
    return made


def run(way: Way, options: argparse.Namespace, root: Path) -> Json:
    """The timed steps of one run, and the share of the machine that others used meanwhile."""
    with TemporaryDirectory(prefix=".scaling-", dir=root) as runs:
        watch, command = Watch(), way.command(options, runs)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            print(done.stdout, file=sys.stderr)
            leave(f"train.distill stopped (processes: {way.processes}, strategy: {way.strategy}).", 2)
        (log,) = Path(runs).glob("*/*/train.jsonl")
        steps = [line for line in read_lines(log) if "loss" in line]
    if len(steps) < options.warm_up + options.steps:
        raise ConfigError(f"The recipe ends after {len(steps)} steps: set trainer.epochs, or lower --steps.")
    return {"way": way, "steps": steps[options.warm_up :], "others": watch.share()}


def rows(runs: Sequence[Json], made: Sequence[Way]) -> list[Json]:
    """One row for each way over all its runs; the first way is what the others are compared with."""
    found: list[Json] = []
    for way in made:
        here = [one for one in runs if one["way"] == way]
        steps = [step for one in here for step in one["steps"]]
        seconds = [step["seconds_per_step"] for step in steps]
        speed, wait = (
            sum(step[name] * taken for step, taken in zip(steps, seconds, strict=True)) / sum(seconds)
            for name in ("tokens_per_s", "data_wait")
        )
        speedup = speed / (found[0]["tokens_per_s"] if found else speed)
        row = {"steps": len(steps), "seconds_per_step": fmean(seconds), "tokens_per_s": speed}
        row |= {"data_wait": wait, "speedup": speedup, "efficiency": speedup / way.processes}
        found.append(way._asdict() | row | {"others": fmean(one["others"] for one in here)})
    return found


def table(found: Sequence[Json]) -> Table:
    made = Table(
        "processes", "strategy", "tokens/s", "s/step", "data wait", "speedup", "efficiency", "others"
    )
    for row in found:
        speed = (f"{row['tokens_per_s']:,.0f}", f"{row['seconds_per_step']:.3f}", f"{row['data_wait']:.1%}")
        gain = (f"{row['speedup']:.2f}×", f"{row['efficiency']:.0%}", f"{row['others']:.1%}")
        made.add_row(str(row["processes"]), row["strategy"], *speed, *gain)
    return made


def scale(options: argparse.Namespace) -> None:
    made, config, console = ways(options), compose(options.overrides), wide_console()
    when, where = datetime.now(UTC).isoformat(timespec="seconds"), provenance()
    ensure_writable(root := Path(config.runs))
    plan = [way for turn in range(options.rounds) for way in made[:: -1 if turn % 2 else 1]]
    with bar(console) as progress:
        runs = [run(way, options, root) for way in progress.track(plan, description="runs")]
    found = rows(runs, made)
    trainer = as_plain(config)["trainer"]
    recipe = {name: trainer[name] for name in RECIPE} | {"method": config.method.name}
    written = {"schema": "leadout.scaling/1", "created": when, **where, "recipe": recipe}
    written["scaling"] = {name: value for name, value in vars(options).items() if name != "out"}
    written["load"] = {"others_during": fmean(row["others"] for row in found)}
    write_json(options.out, written | {"rows": found})
    console.print(table(found), f"written: {options.out}")


def main(arguments: Sequence[str] | None = None) -> None:
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m scripts.scaling", description=about)
    option = parser.add_argument
    option("overrides", nargs="*", help="the recipe: +experiment=NAME and key=value")
    option("--processes", type=int, nargs="+", default=[2], help="beside one")
    option("--strategies", nargs="+", choices=["ddp", "fsdp2", "zero2", "zero3"], default=["ddp"])
    option("--steps", type=int, default=10, help="timed, of each run")
    option("--warm-up", type=int, default=3, help="steps before those")
    option("--rounds", type=int, default=2)
    option("--threads", type=int, default=1, help="of each process")
    option("--out", type=Path, default=Path("artifacts/scaling.json"))
    with paragraphs():
        scale(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
