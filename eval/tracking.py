"""A measurement in Weights & Biases, where logger.wandb asks for it: its rows, its pictures, its page.

It is a run of its own, of the job type "measure", in the group of its experiment, where the training runs
are (train/loggers.py); `training_run` in its configuration is the id of the one that trained the draft.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from configs.errors import ConfigError
from configs.schema import Config, WandbMode
from eval.measurement import anchor, settings_of, split
from eval.report import pictures, report

CONDITIONS = ("created", "git", "hardware", "versions", "load", "target", "traffic")


def log_measurement(config: Config, measurement: dict[str, Any], output: Path) -> None:
    """Does nothing unless logger.wandb is on. output: the measurement's folder, where wandb's files go.
    Raises `ConfigError` where wandb is not installed."""
    if config.logger.wandb is WandbMode.disabled:
        return
    try:
        import wandb
    except ImportError:
        raise ConfigError(
            f"logger.wandb={config.logger.wandb.value} needs the package wandb. Install the extra `wandb`, "
            "as in pip install -e '.[wandb]', or set logger.wandb=disabled."
        ) from None
    draft = measurement["draft"]
    conditions = {name: measurement[name] for name in CONDITIONS}
    run = wandb.init(
        project=config.logger.project,
        group=config.experiment,
        job_type="measure",
        name=f"{config.experiment}/measure of {training_run(draft['folder'])}",
        config={**conditions, "training_run": training_run(draft["folder"]), "draft_sha256": draft["sha256"]},
        mode=config.logger.wandb.value,
        dir=str(output),
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
    )
    rows = [dict(flat(row)) for row in measurement["rows"]]
    columns: list[Any] = list(dict.fromkeys(name for row in rows for name in row))
    run.log(
        {
            **figures(measurement),
            "rows": wandb.Table(columns=columns, data=[[row.get(name) for name in columns] for row in rows]),
            **{one.name: wandb.Image(Image.open(io.BytesIO(one.png()))) for one in pictures(measurement)},
            "report": wandb.Html(report(measurement), inject=False),
        }
    )
    run.finish()


def training_run(folder: str) -> str:
    """The id under which train.loggers logged the run that a draft's folder, runs/EXPERIMENT/TIME/draft,
    lies in."""
    run = Path(folder).resolve().parent
    return f"{run.parent.name}-{run.name}"


def figures(measurement: dict[str, Any]) -> dict[str, float]:
    """The numbers over all prompts by setting, as in "t0-b1/speedup"."""
    found = {}
    for setting in settings_of(measurement["rows"]):
        whole, _ = split(measurement, setting)
        for name, value in flat(whole["all", "all"]):
            if isinstance(value, int | float) and not isinstance(value, bool):
                found[f"{anchor(setting)}/{name}"] = value
    return found


def flat(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What fits a table's cell: single values, percentiles and the ends of intervals under names of their
    own."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", one) for inner, one in flat(value))
        elif name.endswith("_ci") and value is not None:
            yield from ((f"{name}/low", value[0]), (f"{name}/high", value[1]))
        elif not isinstance(value, list):
            yield name, value
