"""Trains an EAGLE-3 draft with the `speculators` package, or computes its logits; run by compare_speculators.

    PYTHON speculators_driver.py train JOB      PYTHON speculators_driver.py logits JOB

PYTHON is that of an environment where the package is installed: it is no dependency of ours, so this file is
started as a program and imports nothing of this repository. JOB is a JSON file. The peer's own command line
trains, as its users start it; changed is only what keeps it off a CPU: the number it names its device by, and
a wait for an accelerator.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import load_from_disk
from safetensors.torch import load_file, save_file
from speculators.__main__ import app  # pyright: ignore[reportMissingImports]
from speculators.models.eagle3 import (  # pyright: ignore[reportMissingImports]
    Eagle3DraftModel,
    Eagle3SpeculatorConfig,
)
from speculators.train import cli, trainer  # pyright: ignore[reportMissingImports]
from speculators.train.distributed_batch_sampler import (  # pyright: ignore[reportMissingImports]
    MultipackDistributedBatchSamplerV2,
)

ATTENTION = "sdpa"  # flex attention, the peer's default, needs a compiler on a CPU; eager is slower
PACKAGES = ("speculators", "torch", "transformers", "datasets", "safetensors", "numpy")


def train(job: dict[str, Any]) -> None:
    """Trains `steps` optimiser steps on as many tokens as `tokens` says, and writes `result`.

    Of the peer's settings only the length of its packed sequences is searched for: the shortest with which
    that many steps see at least that many tokens.
    """
    table: Any = load_from_disk(job["data"]).with_format(None)
    lengths = list(table["seq_len"])[
        :-1
    ]  # the last row is for the peer's own validation, which it insists on
    trained = [sum(mask[1:]) for mask in table["loss_mask"]]  # it never predicts a row's first token
    length = shortest(lengths, job["steps"], job["tokens"], job["seed"])
    batches, epochs = planned(lengths, job["steps"], length, job["seed"])
    watch = Stopwatch(job["steps"])
    cli.Trainer = on_cpu(watch)
    torch.accelerator.synchronize = lambda *_: None
    run(
        [
            *job["flags"],
            *("--total-seq-len", length, "--epochs", epochs, "--max-steps", job["steps"]),
            *("--seed", job["seed"], "--train-data-ratio", 1 - 0.5 / len(table)),
            *("--on-missing", "raise", "--num-workers", 0, "--log-freq", 10),
            *("--draft-attn-impl", ATTENTION, "--loss-implementation", "eager"),  # fused is for GPUs
            *("--data-path", job["data"], "--save-path", job["save"], "--checkpoint-freq", epochs),
        ]
    )
    if len(watch.seconds) != job["steps"]:
        raise SystemExit(f"the peer made {len(watch.seconds)} steps of {job['steps']}")
    rows = [row for batch in batches for row in batch]
    result = {
        "job": job,
        "checkpoint": str(Path(job["save"]) / str(epochs - 1)),
        "total_seq_len": length,
        "epochs": epochs,
        "steps": len(watch.seconds),
        "tokens": sum(lengths[row] for row in rows),
        "trained_tokens": sum(trained[row] for row in rows),
        "seconds": watch.seconds,
        "threads": torch.get_num_threads(),
        "attention": ATTENTION,
        "load_average": os.getloadavg(),
        "versions": {package: version(package) for package in PACKAGES},
    }
    Path(job["result"]).write_text(json.dumps(result))


def run(flags: list[Any]) -> None:
    """`speculators train` with these flags."""
    sys.argv = ["speculators", "train", *map(str, flags)]
    print(*sys.argv, flush=True)
    try:
        app()
    except SystemExit as done:
        if done.code:
            raise


class Stopwatch:
    """Seconds of each optimiser step, from one step's end to the next one's."""

    def __init__(self, steps: int) -> None:
        self.steps, self.seconds, self.last = steps, list[float](), 0.0

    def start(self) -> None:
        self.last = time.perf_counter()

    def step(self) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now
        if len(self.seconds) % 50 == 0:
            print(f"step {len(self.seconds)} of {self.steps}, {self.seconds[-1]:.2f} s", flush=True)


def on_cpu(watch: Stopwatch) -> type:
    """The peer's trainer on a CPU, timed."""

    class OnCpu(trainer.Trainer):
        def setup_trainer(self) -> None:
            self.local_rank = self.device_type = "cpu"
            super().setup_trainer()

        def train_epoch(self, epoch: int, **words: Any) -> None:
            watch.start()
            super().train_epoch(epoch, step_callback=watch.step, **words)

    return OnCpu


def shortest(lengths: list[int], steps: int, tokens: int, seed: int) -> int:
    """The shortest packed sequence, no shorter than any row, with which `steps` batches hold `tokens`."""

    def enough(length: int) -> bool:
        batches, _ = planned(lengths, steps, length, seed)
        return sum(lengths[row] for batch in batches for row in batch) >= tokens

    low = high = max(lengths)
    while high < sum(lengths) and not enough(high):
        low, high = high + 1, min(2 * high, sum(lengths))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return high


def planned(lengths: list[int], steps: int, length: int, seed: int) -> tuple[list[Any], int]:
    """The peer's first `steps` batches of rows, and over how many epochs they go."""
    sampler = MultipackDistributedBatchSamplerV2(length, lengths, num_replicas=1, rank=0, seed=seed)
    batches: list[Any] = []
    epoch = 0
    while len(batches) < steps:
        sampler.set_epoch(epoch)
        batches += list(sampler)
        epoch += 1
    return batches[:steps], epoch


@torch.no_grad()
def logits(job: dict[str, Any]) -> None:
    """Writes the float32 logits [steps, T - 1, Vd] of `checkpoint` for one row, unrolled as in training."""
    config = Eagle3SpeculatorConfig.from_pretrained(job["checkpoint"])
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(job["checkpoint"], config=config).float().eval()
    row = load_file(job["row"])
    tokens, states = row["token_ids"][None, 1:], row["hidden_states"][None, :-1, :-1].flatten(2)
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output[0]))
    model(states.float(), tokens, torch.zeros_like(tokens), ttt_steps=job["steps"])
    save_file({"logits": torch.stack(found)}, job["result"])


def main(stage: str, file: str) -> None:
    job = json.loads(Path(file).read_text())
    torch.set_num_threads(job["threads"])
    {"train": train, "logits": logits}[stage](job)


if __name__ == "__main__":
    main(*sys.argv[1:])
