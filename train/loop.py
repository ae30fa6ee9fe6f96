"""The training loop: steps, logs, checkpoints, held-out acceptance. Objectives are known by interface only.

Weights and optimiser state are float32 whatever the autocast. One optimiser step may take several
micro-batches; their losses are divided by the valid positions of all of them together, so that it makes no
difference how rows are cut into micro-batches, or to which of several processes they are dealt
(train/ranks.py). A run that stops anywhere goes on from its last checkpoint with bit-equal losses.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from configs.errors import LeadoutError, TrafficError
from configs.schema import Config, Optimizer
from data.tokens import Prompt, TokenRow
from models.target import Target
from train import acceptance
from train.batches import Batch, Plan, dealt, rounded
from train.checkpoint import State, Window
from train.ema import Average
from train.features import Features
from train.loggers import Logger, duration, open_loggers
from train.objectives import Loss, Objective
from train.optimizers import shares
from train.ranks import Ranks
from train.runs import Run
from train.schedule import share
from train.strategies import lay
from train.throughput import Meter, Spent, peak_memory_mb

ETA_AFTER = 3  # steps that this process has done when it says how long the rest will take


class DivergenceError(LeadoutError):
    """A loss or gradient that is not finite."""


class Training:
    """One run, from where its folder stands to its last step."""

    def __init__(
        self,
        config: Config,
        objective: Objective,
        target: Target,
        features: Features,
        rows: Sequence[TokenRow],
        heldout: Sequence[Prompt],
        run: Run,
        console: Console,
        ranks: Ranks | None = None,
    ) -> None:
        """`rows`: what `features` can be asked for. `heldout`: prompts to measure on. `ranks`: None for one
        process."""
        self.config, self.trainer = config, config.trainer
        self.objective, self.target, self.features = objective, target, features
        self.heldout, self.run, self.console = heldout, run, console
        self.ranks = ranks or Ranks()
        self.rows = [n for n in features.usable() if any(rows[n].loss_mask[objective.first_label :])]
        if not self.rows:
            raise TrafficError(
                "No row has a token that a draft could learn to predict: replies need two tokens or more."
            )
        self.plan = Plan(
            [rounded(len(rows[n].input_ids)) for n in self.rows],
            tokens=self.trainer.batch_tokens,
            accumulation=self.trainer.accumulation,
            epochs=self.trainer.epochs,
            seed=config.seed,
            max_steps=self.trainer.max_steps,
            chapters=partial(features.chapters, self.rows, config.seed),
        )
        if self.trainer.max_steps is not None and self.trainer.max_steps > self.plan.steps:
            console.print(
                f"trainer.max_steps={self.trainer.max_steps}, and trainer.epochs={self.trainer.epochs} have "
                f"only {self.plan.steps} steps: training ends there."
            )
        if self.ranks.size > self.trainer.accumulation:
            console.print(
                f"trainer.accumulation={self.trainer.accumulation} micro-batches make a step, and "
                f"{self.ranks.size} processes share them: set it to a multiple of that, or some idle."
            )
        self.laid = lay(
            objective, self.trainer, self.ranks, lambda step: share(step, self.plan.steps, self.trainer)
        )
        self.module, self.optimizers = self.laid.module, self.laid.optimizers
        if self.trainer.optimizer is Optimizer.muon:
            console.print(f"optimizers: {shares(self.laid.made)}")
        self.average = None if self.trainer.ema is None else Average(objective, self.trainer.ema)
        self.state = State()
        self.meter = Meter(target.device)
        self.rates: dict[str, float] = {}  # of the last step, by name
        self.saved: int | None = None  # the step that the newest checkpoint is of
        self.asked = False  # to stop, by a signal to this process
        self.ended: str | None = None  # why, once it has

    def resume(self) -> None:
        """Goes back to the newest checkpoint of the run's folder, if it has one."""
        folders = self.ranks.told(self.run.checkpoints)
        if folders:
            self.state = self.laid.restore(folders[-1], self.average)
            self.saved = self.state.step
            self.console.print(f"going on from step {self.state.step} of {self.plan.steps}")
        if self.ranks.first:
            self.run.rewind(self.state.step)

    def train(self) -> None:
        """Trains to the last step, or until patience ends; the step it ends with is saved and measured."""
        first = self.state.step
        self.loggers: list[Logger] = []
        if self.ranks.first:
            self.loggers = open_loggers(self.config, self.run, self.plan.steps, first, self.console)
        try:
            with self.interruptible():
                self.look()  # an interruption may have come between a checkpoint and its measurement
                while self.ended is None:
                    self.step()
                    self.look()
                    if self.state.step == first + ETA_AFTER:
                        self.say_eta()
        finally:
            for logger in self.loggers:
                logger.close()

    def step(self) -> None:
        """One optimiser step."""
        began = time.perf_counter()
        self.module.train()
        self.objective.begin(self.state.step)
        self.features.want([self.rows[n] for numbers in self.plan[self.state.step] for n in numbers])
        with self.meter.counting():
            batches = self.target.together(self.fetch)
            waited = time.perf_counter() - began
            found = [self.objective.positions(batch) * counts for batch, counts in batches]
            positions = self.ranks.total(torch.stack(found).sum(0))
            losses = [
                self.laid.learn(batch, positions, counts, last=i == len(batches))
                for i, (batch, counts) in enumerate(batches, start=1)
            ]
        flops = self.meter.flops(sum(batch.tokens.numel() for batch, _ in batches))
        tokens = sum(int(batch.mask.sum()) for batch, counts in batches if counts)
        losses, tokens = self.ranks.pooled(losses, tokens)
        value = sum(loss.value.item() for loss in losses)
        norm = self.laid.clip()
        self.refuse_divergence(value, norm)
        self.rates = {name: one.param_groups[0]["lr"] for name, one in self.optimizers.items()}
        self.laid.step()

        self.state.step += 1
        if self.average is not None:
            self.average.update(self.state.step)
        spent = Spent(time.perf_counter() - began, waited, flops)
        gather(self.state, losses, value, norm, tokens, spent)
        for logger in self.loggers:
            logger.step(self.state.step)

    def fetch(self) -> list[tuple[Batch, bool]]:
        """This rank's micro-batches of the step, and whether they count; the next step's begin to be read."""
        step = self.state.step
        batches = [
            (self.objective.batch(self.features, numbers).to(self.target.device), counts)
            for numbers, counts in self.own(step)
        ]
        if step + 1 < self.plan.steps:
            self.features.ahead([numbers for numbers, _ in self.own(step + 1)])
        return batches

    def own(self, step: int) -> list[tuple[list[int], bool]]:
        """The rows of this rank's micro-batches of `step`, and whether they count."""
        dealt_out = dealt(self.plan[step], self.ranks.rank, self.ranks.size)
        return [([self.rows[n] for n in numbers], counts) for numbers, counts in dealt_out]

    def refuse_divergence(self, value: float, norm: float) -> None:
        if math.isfinite(value) and math.isfinite(norm):
            return
        kept = "its checkpoints are kept" if self.run.checkpoints() else "no checkpoint was written yet"
        peaks = [f"trainer.{name} (it is {one.defaults['lr']:g})" for name, one in self.optimizers.items()]
        raise DivergenceError(
            f"Training diverged at step {self.state.step + 1}: loss {value}, gradient norm {norm}. In "
            f"{self.run.folder} {kept}. Lower {' and '.join(peaks)}, or raise "
            "trainer.warmup_ratio; if it happens at the first steps, set trainer.autocast=float32."
        )

    def look(self) -> None:
        """After a step: whatever is due of logging, saving, measuring and stopping."""
        step, last = self.state.step, self.state.step == self.plan.steps
        measuring = last or due(step, self.trainer.eval_every)
        if self.state.window.losses and (measuring or due(step, self.trainer.log_every)):
            self.log()
        stopping = self.ranks.any(self.asked)
        saving = measuring or stopping or due(step, self.trainer.save_every)
        if saving and self.saved != step:
            self.save()
        if stopping:
            raise KeyboardInterrupt
        if measuring:
            if self.ranks.told(lambda: step not in self.run.heldout()) and self.ranks.leads:
                self.measure()
            self.ended = self.ranks.told(self.judge)
        if saving and self.ranks.first:
            self.run.prune(self.trainer.keep_checkpoints)

    def judge(self) -> str | None:
        """Notes which checkpoint was measured best; returns why training ends now."""
        step = self.state.step
        self.run.point_best()
        if step == self.plan.steps:
            return "last step"
        if ended := self.impatience():
            self.console.print(f"ends after step {step} of {self.plan.steps}: {ended}")
        return ended

    def save(self) -> None:
        self.laid.save(self.run.checkpoint(self.state.step), self.state, self.average)
        self.saved = self.state.step

    def log(self) -> None:
        line = {"step": self.state.step, "epoch": self.plan.epoch(self.state.step - 1)}
        line |= {**self.rates, "tokens": self.state.tokens}
        line |= summary(self.state.window)
        line |= {"mfu": self.meter.mfu(line["tflops"]), "peak_memory_mb": peak_memory_mb(self.target.device)}
        self.state.window = Window()
        self.tell(line)

    def measure(self) -> None:
        """Held-out acceptance with the real decoder, of the averaged weights where they are kept.

        All ranks that hold parts of rank 0's target decode the same in step; rank 0 notes it.
        """
        began = time.perf_counter()
        with self.weights():
            found = acceptance.measure(
                self.objective, self.objective.beside(self.target), self.heldout, self.config
            )
        self.tell({"step": self.state.step, "heldout": found | {"seconds": time.perf_counter() - began}})
        if found["alarm"]:
            self.console.print(alarm(found), style="bold red")

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Inside the block the objective has whole weights, the averaged ones where they are kept."""
        if self.laid.cut:
            with self.laid.whole(self.run.checkpoint(self.state.step)):
                yield
        else:
            with nullcontext() if self.average is None else self.average.applied():
                yield

    def impatience(self) -> str | None:
        """Why to end now: that the last `trainer.patience` measurements brought no new best."""
        found, patience = self.run.heldout(), self.trainer.patience
        lengths = [found[step]["mean_acceptance_length"] or 0.0 for step in sorted(found)]
        if patience is None or not stale(lengths, patience):
            return None
        return f"no new best in {patience} measurements"

    def tell(self, line: dict[str, Any]) -> None:
        for logger in self.loggers:
            logger.line(line)

    def say_eta(self) -> None:
        per_step = self.state.seconds / self.state.step
        rest = self.plan.steps - self.state.step
        self.console.print(f"about {duration(rest * per_step)} for the other {rest} steps")

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run after the step it is at, saved; a second one ends it at once.

        While nothing would be lost (the state is saved, a measurement is running) the first one does too.
        """

        def stop(number: int, frame: FrameType | None) -> None:
            if self.asked or self.saved == self.state.step:
                raise KeyboardInterrupt
            self.asked = True

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def due(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0


def stale(lengths: Sequence[float], patience: int) -> bool:
    """Whether none of the last `patience` measurements exceeds the best of those before."""
    before, since = lengths[:-patience], lengths[-patience:]
    return bool(before) and max(since) <= max(before)


def gather(
    state: State, losses: Sequence[Loss], value: float, norm: float, tokens: int, spent: Spent
) -> None:
    """Adds a step to the state's totals and to its window."""
    window = state.window
    window.losses.append(value)
    window.norms.append(norm)
    for loss in losses:
        for name, (sums, counts) in loss.metrics.items():
            window.sums[name] = plus(window.sums.get(name), sums.tolist())
            window.counts[name] = plus(window.counts.get(name), counts.tolist())
    state.tokens, window.tokens = state.tokens + tokens, window.tokens + tokens
    state.seconds, window.seconds = state.seconds + spent.seconds, window.seconds + spent.seconds
    window.waited, window.flops = window.waited + spent.waited, window.flops + spent.flops


def plus(total: list[Any] | None, more: list[Any]) -> list[Any]:
    return more if total is None else [a + b for a, b in zip(total, more, strict=True)]


def summary(window: Window) -> dict[str, Any]:
    """The window as figures: means over its steps, or over its positions for each term of the loss."""
    steps = len(window.losses)
    figures: dict[str, Any] = {"loss": sum(window.losses) / steps, "grad_norm": sum(window.norms) / steps}
    for name, sums in window.sums.items():
        means = [s / n if n else None for s, n in zip(sums, window.counts[name], strict=True)]
        figures["loss_by_term" if name == "loss" else name] = means
    return figures | {
        "tokens_per_s": window.tokens / window.seconds,
        "seconds_per_step": window.seconds / steps,
        "data_wait": window.waited / window.seconds,
        "tflops": window.flops / window.seconds / 1e12,
    }


def alarm(found: dict[str, Any]) -> str:
    low, high = found["mean_acceptance_length_ci"]  # without an interval there is no alarm
    return (
        f"ALARM: the decoder emits {found['mean_acceptance_length']:.3f} tokens per round ({low:.3f} to "
        f"{high:.3f}), and training's teacher-forced estimate on the same sequences is {found['walk']:.3f}. "
        "They do not do the same thing: compare the alignment, taps, positions and dtype of train/ and "
        "decoding/ before trusting this draft."
    )
