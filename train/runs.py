"""A run's folder, `runs/<experiment>/<time>/`.

In it: config.yaml, contract.json, train.jsonl, checkpoints/, best, draft/ and summary.json, which ends the
run: it is unfinished until that exists. What decides the course of its losses is its contract; a run is only
ever continued under the contract it began with. A lock, which the system frees with the process, keeps two
processes out of one folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from omegaconf import OmegaConf

from configs.errors import CheckpointError, ConfigError
from configs.schema import Config, Strategy
from models.files import ensure_writable, read_lines, write_atomic, write_json, write_text

# The trainer's settings that do not change the course of the losses: how often to look, at what, how long.
FREE = {
    "log_every",
    "save_every",
    "keep_checkpoints",
    "eval_every",
    "eval_prompts",
    "eval_new_tokens",
    "patience",
    "resume",
    "target_parallel",
}


def contract(config: Config, method: dict[str, Any], rows: str, target: str) -> dict[str, Any]:
    """What a continued run must share with the one it continues, as JSON.

    `method`: name, network and objective, completed. `rows`: digest of the training rows. `target`: its
    fingerprint.
    """
    trainer = {name: value for name, value in asdict(config.trainer).items() if name not in FREE}
    if config.trainer.strategy is Strategy.none:
        del trainer["strategy"]  # as in runs from before there were others
    parts = {
        "seed": config.seed,
        "method": method,
        "trainer": trainer,
        "target": {"fingerprint": target, "dtype": config.target.dtype, "quantize": config.target.quantize},
        "rows": rows,
    }
    return json.loads(json.dumps(parts, default=lambda value: value.value))


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """The dotted places at which two contracts differ."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return [] if a == b else [where]
    found = [differences(a.get(k), b.get(k), f"{where}.{k}" if where else k) for k in sorted({*a, *b})]
    return [place for places in found for place in places]


@dataclass
class Run:
    """A run's folder, ours alone until the end of the `with` block (or of the process)."""

    folder: Path
    lock: TextIO

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.lock.close()

    @property
    def log(self) -> Path:
        return self.folder / "train.jsonl"

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted((self.folder / "checkpoints").glob("step_*"))

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step_{step:06d}"

    def best(self) -> Path | None:
        """The checkpoint that `best` points to."""
        link = self.folder / "best"
        return link.resolve() if link.exists() else None

    def heldout(self) -> dict[int, dict[str, Any]]:
        """The held-out measurements so far, by step."""
        lines = read_lines(self.log) if self.log.exists() else []
        return {line["step"]: line["heldout"] for line in lines if "heldout" in line}

    def point_best(self) -> None:
        """Points `best` at the checkpoint with the longest held-out acceptance; the earliest of equals."""
        # None, where no reply was long enough for a round, is the shortest.
        lengths = {step: found["mean_acceptance_length"] or 0.0 for step, found in self.heldout().items()}
        kept = [step for step in sorted(lengths) if self.checkpoint(step).is_dir()]
        if kept:
            step = max(kept, key=lambda s: lengths[s])
            destination = self.checkpoint(step).relative_to(self.folder)
            write_link(self.folder / "best", destination)

    def prune(self, keep: int) -> None:
        """Removes all checkpoints but the newest `keep` and the best."""
        for folder in self.checkpoints()[:-keep]:
            if folder.resolve() != self.best():
                shutil.rmtree(folder)

    def rewind(self, step: int) -> None:
        """Forgets what was logged after `step`, to be logged again, and what a kill left half-written."""
        for remains in (self.folder / "checkpoints").glob(".step_*"):
            shutil.rmtree(remains)
        lines = [line for line in read_lines(self.log) if line["step"] <= step] if self.log.exists() else []
        write_text(self.log, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

    def finish(self, summary: dict[str, Any]) -> None:
        write_json(self.folder / "summary.json", summary)


def open_run(config: Config, contract: dict[str, Any]) -> Run:
    """The run to go on with as `trainer.resume` says, or a new one."""
    root = Path(config.runs) / config.experiment
    resume = config.trainer.resume
    if resume not in ("auto", "never"):
        return named(Path(resume), contract)
    if resume == "auto" and root.is_dir():
        for folder in sorted(root.iterdir(), reverse=True):
            if not unfinished(folder):
                continue
            if changed := differences(read_contract(folder), contract):
                print(f"left as it is: {folder}, which is unfinished and differs in {', '.join(changed)}")
            elif (lock := locked(folder)) is not None:
                return Run(folder, lock)
    return create(root, config, contract)


def follow(folder: Path) -> Run:
    """The run that rank 0 of this job opened, for another rank to read."""
    return Run(folder, open(os.devnull, "w"))


def named(folder: Path, contract: dict[str, Any]) -> Run:
    """The run in `folder`, which the user named. Raises if it cannot be continued under `contract`."""
    if not (folder / "contract.json").exists():
        raise ConfigError(
            f"trainer.resume={folder} is not a run's folder (it has no contract.json). Use auto or never."
        )
    if not unfinished(folder):
        raise ConfigError(
            f"trainer.resume={folder}: that run is finished. Use trainer.resume=never for a new run."
        )
    if changed := differences(read_contract(folder), contract):
        raise CheckpointError(
            f"The run {folder} was begun with other settings: {', '.join(changed)} differ (see its "
            "config.yaml). Set them back, or start anew with trainer.resume=never."
        )
    lock = locked(folder)
    if lock is None:
        raise CheckpointError(
            f"The run {folder} is being trained by another process. Wait for it, or stop it."
        )
    return Run(folder, lock)


def create(root: Path, config: Config, contract: dict[str, Any]) -> Run:
    ensure_writable(root)
    name = datetime.now().strftime("%Y%m%d-%H%M%S")
    names = [name, *(f"{name}-{n}" for n in range(2, 100))]
    folder = next(root / n for n in names if not (root / n).exists())
    folder.mkdir()
    lock = locked(folder)
    assert lock is not None
    write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)))
    write_json(folder / "contract.json", contract)
    return Run(folder, lock)


def unfinished(folder: Path) -> bool:
    return (folder / "contract.json").exists() and not (folder / "summary.json").exists()


def read_contract(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "contract.json").read_text())


def locked(folder: Path) -> TextIO | None:
    """The folder's lock, held as long as the file is open; None while another process has it."""
    lock = open(folder / ".lock", "w")  # noqa: SIM115 (held as long as the run)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock


def write_link(link: Path, destination: Path) -> None:
    """Points the symbolic link at `destination`, atomically."""
    write_atomic(link, lambda temporary: os.symlink(destination, temporary))
