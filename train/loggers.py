"""Where a run's figures go: the console, train.jsonl, and where asked for wandb and a profiler's trace.

A line is one JSON object with a `step`: either a logged training step (`loss`, `accuracy`, ...) or, under
`heldout`, a measurement with the real decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from configs.compose import as_plain
from configs.errors import ConfigError
from configs.schema import Config, WandbMode
from models.files import append_line, open_append, write_atomic, write_text
from models.provenance import provenance
from train.runs import Run

Line = Mapping[str, Any]


class Logger(Protocol):
    def step(self, step: int) -> None:
        """After every optimiser step; `step` counts from 1."""
        ...

    def line(self, line: Line) -> None: ...

    def close(self) -> None: ...


class Console:
    """A bar on a terminal; otherwise a line of text for each logged one."""

    def __init__(self, steps: int, step: int, console: RichConsole) -> None:
        self._console, self._steps = console, steps
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=steps, completed=step, figures="")
        self._progress.start()

    def step(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def line(self, line: Line) -> None:
        if "heldout" in line:
            self._console.print(f"step {line['step']}: {heldout_text(line['heldout'])}")
            return
        figures = (
            f"loss {line['loss']:.3f}  acc0 {line['accuracy'][0]:.3f}  {line['tokens_per_s']:,.0f} tok/s"
        )
        self._progress.update(self._task, figures=figures)
        if not self._console.is_terminal:
            left = (self._steps - line["step"]) * line["seconds_per_step"]
            text = f"step {line['step']}/{self._steps}  {figures}  {duration(left)} left"
            self._console.print(text)

    def close(self) -> None:
        self._progress.stop()


class Jsonl:
    """One line of JSON each, on the disk when written."""

    def __init__(self, path: Path) -> None:
        self._file = open_append(path)

    def step(self, step: int) -> None:
        pass

    def line(self, line: Line) -> None:
        append_line(self._file, line)

    def close(self) -> None:
        self._file.close()


class Wandb:
    """Lists become one figure for each draft step, as in `accuracy/0`.

    A resumed run keeps its id: online wandb goes on with it, and offline each process writes a folder of its
    own, which `wandb sync` puts together.
    """

    def __init__(self, config: Config, run: Run) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                f"logger.wandb={config.logger.wandb.value} needs the package wandb. Install the extra "
                "`wandb`, as in pip install -e '.[wandb]', or set logger.wandb=disabled."
            ) from None
        self._run = wandb.init(
            project=config.logger.project,
            group=config.experiment,
            name=f"{config.experiment}/{run.folder.name}",
            id=f"{config.experiment}-{run.folder.name}",
            config={**as_plain(config), "provenance": provenance()},
            mode=config.logger.wandb.value,
            dir=str(run.folder),
            resume="allow" if config.logger.wandb is WandbMode.online else None,
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )

    def step(self, step: int) -> None:
        pass

    def line(self, line: Line) -> None:
        figures = flat({name: value for name, value in line.items() if name != "step"})
        self._run.log(figures, step=line["step"])

    def close(self) -> None:
        self._run.finish()


class Profile:
    """torch's profiler over the steps `first` to `last`, in profile/ of the run's folder: a trace for
    https://ui.perfetto.dev, and a table of the operators that took longest."""

    def __init__(self, first: int, last: int, folder: Path, step: int, console: RichConsole) -> None:
        self._first, self._last, self._folder, self._console = first, last, folder, console
        self._profiler: torch.profiler.profile | None = None
        self.step(step)

    def step(self, step: int) -> None:
        self._done = step
        if self._profiler is not None and step == self._last:
            self.close()
        elif self._profiler is None and self._first <= step + 1 <= self._last:
            self._first = step + 1
            self._profiler = torch.profiler.profile(profile_memory=True)
            self._profiler.start()

    def line(self, line: Line) -> None:
        pass

    def close(self) -> None:
        """Ends the window, also where the run ends within it."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        trace = self._folder / f"steps_{self._first}_{self._done}.json"
        write_atomic(trace, lambda path: profiler.export_chrome_trace(str(path)))
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30)
        write_text(trace.with_suffix(".txt"), table)
        self._console.print(f"profile of steps {self._first} to {self._done}: {trace}")


def open_loggers(config: Config, run: Run, steps: int, step: int, console: RichConsole) -> list[Logger]:
    """The loggers of a run of `steps` steps that stands at `step`."""
    loggers: list[Logger] = [Console(steps, step, console), Jsonl(run.log)]
    if config.logger.wandb is not WandbMode.disabled:
        loggers.append(Wandb(config, run))
    if config.logger.profile:
        first, last = config.logger.profile
        if max(first, step + 1) > min(last, steps):
            console.print(
                f"logger.profile=[{first},{last}] holds none of the steps that are left, {step + 1} to "
                f"{steps}: nothing will be profiled."
            )
        loggers.append(Profile(first, last, run.folder / "profile", step, console))
    return loggers


def flat(figures: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers at any depth of dicts and lists, under slashed names."""
    found: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, list):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            found |= flat({str(k): v for k, v in value.items()}, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found[f"{prefix}{name}"] = value
    return found


def heldout_text(found: Mapping[str, Any]) -> str:
    """One line about a held-out measurement."""
    if found["mean_acceptance_length"] is None:
        return "held-out replies were too short to draft in"
    ends = found["mean_acceptance_length_ci"]
    spread = "" if ends is None else "95 % {:.2f} to {:.2f}, ".format(*ends)
    return (
        f"held-out acceptance length {found['mean_acceptance_length']:.2f} ({spread}"
        f"{found['prompts']} prompts, {found['rounds']} rounds, K={found['draft_tokens']}); "
        f"teacher-forced walk {found['walk']:.2f}"
    )


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
