"""`python -m train.distill`: distils a draft from the target on prepared traffic.

What can be refused is refused before the target loads; then come rows, draft vocabulary and features; then
the run begins or goes on. The method is found by its name: `models/<name>.py` has the network, and
`train/objectives/<name>.py` what it learns from.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from configs.entry import entry
from configs.errors import ConfigError, TrafficError
from configs.schema import Config, Features, MethodConfig, typed
from data.tokens import TokenRow, evenly, load_token_rows, prompts
from models import save_draft
from models.files import ensure_writable
from models.provenance import provenance
from models.target import Target, save_target
from train.features import Online, rows_digest
from train.loop import Training
from train.objectives import Objective
from train.ranks import Ranks, join
from train.runs import Run, contract, follow, open_run
from train.sharded import ShardedTarget, placement
from train.store import Bounded, Cached, cached, open_store


@dataclass(frozen=True)
class Method:
    """A method's settings, checked and complete, and where its objective is made."""

    name: str
    network: Any  # models.<name>.NetworkConfig
    settings: Any  # train.objectives.<name>.ObjectiveConfig
    objective: ModuleType

    def build(self, target: Target, rows: Sequence[TokenRow], seed: int) -> Objective:
        return self.objective.build(self.network, self.settings, target, rows, seed)

    def values(self) -> dict[str, Any]:
        return {"name": self.name, "network": asdict(self.network), "objective": asdict(self.settings)}


def find_method(config: MethodConfig) -> Method:
    """The method that `config` names. Raises `ConfigError` for unknown ones and unknown settings."""
    network = module(f"models.{config.name}", config.name)
    objective = module(f"train.objectives.{config.name}", config.name)
    return Method(
        config.name,
        typed(network.NetworkConfig, config.network, "method.network"),
        typed(objective.ObjectiveConfig, config.objective, "method.objective"),
        objective,
    )


def module(path: str, method: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        raise ConfigError(
            f"method.name={method} is unknown: there is no {path.replace('.', '/')}.py. "
            "Use one of the methods in configs/method/."
        ) from None


def distil(config: Config, console: Console) -> Path:
    """Trains as `config` says; returns the run's folder, with `draft/` in it."""
    ranks = join(config)
    folder = distil_among(ranks, config, console if ranks.first else Console(quiet=True))
    ranks.end()
    return folder


def distil_among(ranks: Ranks, config: Config, console: Console) -> Path:
    """`distil` as one of `ranks`: rank 0 prepares and writes, and the others find what it wrote."""
    method = find_method(config.method)
    with ranks.in_turn():
        ensure_writable(Path(config.runs) / config.experiment)
        heldout = evenly(prompts(config, "heldout"), config.trainer.eval_prompts)
        if not heldout:
            raise TrafficError(
                "There are no held-out prompts to judge the draft by. Raise data.heldout_fraction, or name "
                "data.heldout_sources, and run python -m data.prepare again."
            )
    target = load_target(config, ranks)
    console.print(placement(target))
    with ranks.in_turn():
        rows = load_token_rows(config, target, console)
    objective = method.build(target, rows, config.seed)
    with shared_run(ranks, config, method, objective, rows, target) as run:
        say(console, run, objective, rows)
        if ranks.holders is not None and ranks.leads:  # what is captured for the cache takes all of them
            target.together(
                lambda: feature_source(config, target, rows, objective, console) if ranks.first else None
            )
        with ranks.in_turn():
            source = feature_source(config, target, rows, objective, console, ranks)
        with closing(source):
            training = Training(config, objective, target, source, rows, heldout, run, console, ranks)
            training.resume()
            training.train()
        if ranks.first:
            finish(training, method)
        ranks.meet()
        return run.folder


def load_target(config: Config, ranks: Ranks) -> Target:
    if ranks.holders is None:
        return Target.load(config.target)
    return ShardedTarget.load_among(ranks.holders, config.target)


def shared_run(
    ranks: Ranks,
    config: Config,
    method: Method,
    objective: Objective,
    rows: Sequence[TokenRow],
    target: Target,
) -> Run:
    """The run's folder, which rank 0 opens and locks for all."""
    run: Run | None = None

    def opened() -> Path:
        nonlocal run
        learnt = method.values() | objective.origin()
        run = open_run(config, contract(config, learnt, rows_digest(rows), target.fingerprint()))
        return run.folder

    folder = ranks.told(opened)
    return run or follow(folder)


def feature_source(
    config: Config,
    target: Target,
    rows: Sequence[TokenRow],
    objective: Objective,
    console: Console,
    ranks: Ranks | None = None,
) -> Cached | Online:
    trainer = config.trainer
    if trainer.features is Features.online:
        return Online(target, rows, objective.taps)
    folder = Path(config.data.folder) / "features"
    store = open_store(folder, target, rows, objective.taps, trainer.batch_tokens, console)
    if trainer.features_gb is None:
        return cached(store)
    return Bounded(store, round(trainer.features_gb * 1e9), ranks or Ranks())


def say(console: Console, run: Run, objective: Objective, rows: Sequence[TokenRow]) -> None:
    trained = sum(sum(row.loss_mask) for row in rows)
    parameters = sum(p.numel() for p in objective.parameters() if p.requires_grad)
    console.print(f"run folder: {run.folder}")
    console.print(f"{len(rows):,} rows, {trained:,} tokens to train on, {parameters / 1e6:.1f} M parameters")
    for name, value in objective.describe().items():
        console.print(f"{name.replace('_', ' ')}: {value}")


def finish(training: Training, method: Method) -> None:
    """Writes the best checkpoint's draft, and the summary that marks the run as finished."""
    run, state = training.run, training.state
    best = run.best()
    assert best is not None
    measured = run.heldout()
    step = int(best.name.removeprefix("step_"))
    summary = {
        "method": method.values(),
        "steps": state.step,
        "best_step": step,
        "ended": training.ended,
        "epochs": training.plan.epoch(state.step - 1) + 1,
        "tokens": state.tokens,
        "wall_seconds": state.seconds,
        "heldout": measured[step],
        "alarm": any(found["alarm"] for found in measured.values()),
        **training.objective.describe(),
        "provenance": provenance(),
    }
    with training.laid.whole(best):
        target = training.objective.beside(training.target)
        if target is not training.target:
            target.name = str(run.folder / "target")
            save_target(target, run.folder / "target")
            training.console.print(f"the target learnt too: the draft belongs to target.name={target.name}")
        save_draft(run.folder / "draft", training.objective.draft, target, summary)
    run.finish(summary)
    training.console.print(f"the draft of step {step} is in {run.folder / 'draft'}")
    if summary["alarm"]:
        training.console.print("An alarm was raised on the way: see above before using it.", style="bold red")


@entry()
def main(config: Config) -> None:
    distil(config, Console(soft_wrap=True, markup=False, highlight=False))


if __name__ == "__main__":
    main()
