"""Whole runs on the counting target, in this process."""

from __future__ import annotations

import io
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from rich.console import Console

from configs.compose import compose
from configs.errors import CheckpointError, ConfigError, StorageError
from models import load_draft
from models.target import Target
from train import loggers
from train.checkpoint import load_weights
from train.distill import distil
from train.loop import DivergenceError, Training

FEW = ["trainer.max_steps=5", "trainer.save_every=2", "trainer.eval_every=0", "trainer.eval_prompts=1"]


def train(overrides: list[str], *more: str) -> tuple[Path, str]:
    """The run's folder and what it printed."""
    console = Console(file=io.StringIO(), width=1000)
    folder = distil(compose([*overrides, *more]), console)
    return folder, console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def log(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "train.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in log(run) if "loss" in line]


def only_run(overrides: list[str]) -> Path:
    (run,) = (Path(overrides[1].removeprefix("runs=")) / "smollm2_cpu").glob("2*")
    return run


def test_a_run_leaves_what_the_contract_names(overrides: list[str]) -> None:
    run, printed = train(overrides)

    assert {path.name for path in run.iterdir()} >= {
        "config.yaml",
        "train.jsonl",
        "checkpoints",
        "best",
        "draft",
    }
    lines = log(run)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 17))
    assert [line["step"] for line in lines if "heldout" in line] == [6, 12, 16]
    assert losses(run)[-1] < losses(run)[0] / 2
    trained = [line for line in lines if "loss" in line]
    # 5 % of 16 steps is one of warm-up, at the full rate already; then half a cosine down to 0 after step 16.
    assert [line["lr"] for line in trained[:2]] == [0.01, 0.01]
    assert trained[8]["lr"] == pytest.approx(0.01 * 0.5 * (1 + math.cos(math.pi * 7 / 15)))
    first = lines[0]
    assert len(first["accuracy"]) == len(first["alpha"]) == len(first["loss_by_term"]) == 3
    assert first["tokens"] == 96  # four rows with replies of 24 tokens
    assert 0 <= first["data_wait"] < 1 and first["tflops"] > 0 and first["mfu"] is None
    assert first["peak_memory_mb"] > 0
    for told in (
        str(run),
        "draft vocabulary coverage: ",
        "GB to write",
        "about 0:0",
        "held-out acceptance length",
    ):
        assert told in printed
    # best is the longest acceptance, the newest two checkpoints stay beside it, and the draft is best's.
    taus = {line["step"]: line["heldout"]["mean_acceptance_length"] for line in lines if "heldout" in line}
    best = max(taus, key=lambda step: taus[step])
    assert os.readlink(run / "best") == f"checkpoints/step_{best:06d}"
    kept = {path.name for path in (run / "checkpoints").iterdir()}
    assert kept == {"step_000012", "step_000016", f"step_{best:06d}"}
    summary = json.loads((run / "draft" / "config.json").read_text())["training"]
    assert (summary["steps"], summary["best_step"], summary["epochs"], summary["tokens"]) == (
        16,
        best,
        2,
        1536,
    )
    assert summary["heldout"]["mean_acceptance_length"] == taus[best]
    assert 0 < summary["draft_vocabulary_coverage"] <= 1
    assert summary == json.loads((run / "summary.json").read_text())


def test_more_steps_than_the_epochs_have_are_said(overrides: list[str]) -> None:
    run, printed = train(overrides, "trainer.max_steps=99", "trainer.eval_every=0", "trainer.eval_prompts=1")
    assert "trainer.max_steps=99, and trainer.epochs=2 have only 16 steps: training ends there." in printed
    assert len(losses(run)) == 16


def test_the_draft_loads_beside_its_target(overrides: list[str]) -> None:
    run, _ = train(overrides, *FEW)
    target = Target.load(compose(overrides).target)
    draft = load_draft(run / "draft", target)

    saved = torch.nn.Module()
    saved.draft = draft
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    load_weights((run / "best").resolve(), saved)  # a checkpoint's weights are the draft's, under `draft.`
    assert all(torch.equal(before[name], value) for name, value in draft.state_dict().items())


def test_online_features_give_the_same_losses(overrides: list[str]) -> None:
    cached, printed = train(overrides, *FEW)
    online, _ = train(overrides, *FEW, "trainer.features=online")

    assert "GB to write" in printed
    assert losses(online) == pytest.approx(losses(cached), rel=1e-4)


class Cut:
    """A plan that trains on rows 0 to 7 in every step, cut into micro-batches of `size`."""

    steps = 3

    def __init__(self, size: int) -> None:
        self.micro = [list(range(first, first + size)) for first in range(0, 8, size)]

    def epoch(self, step: int) -> int:
        return 0

    def __getitem__(self, step: int) -> list[list[int]]:
        return self.micro


def test_accumulation_is_the_same_as_one_large_batch(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for size in (8, 3):
        plan = Cut(size) if size == 8 else Cut(4)
        monkeypatch.setattr("train.loop.Plan", lambda *args, plan=plan, **kwargs: plan)
        run, _ = train(overrides, *FEW, "trainer.autocast=float32", "trainer.resume=never")
        found.append(losses(run))

    assert len(found[0]) == 3
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def interrupt_at(step: int, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends ourselves `number` after that step, before anything of it is logged or saved."""

    def step_done(self: loggers.Jsonl, done: int) -> None:
        if done == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(loggers.Jsonl, "step", step_done)


@pytest.mark.parametrize(("number", "log_every"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_an_interrupted_run_saves_and_goes_on(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, number: signal.Signals, log_every: int
) -> None:
    few = [*FEW, f"trainer.log_every={log_every}"]
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(3, number, patch)
        train(overrides, *few)
    run = only_run(overrides)
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step_000002", "step_000003"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers

    again, printed = train(overrides, *few)
    assert again == run and "going on from step 3 of 5" in printed
    undisturbed, _ = train(overrides, *few)  # the first is finished: a new run
    assert undisturbed != run
    # With a line for every second step, step 3 was in no line yet: it must have been saved with the rest.
    assert losses(run) == losses(undisturbed)


def test_divergence_stops_with_the_step_and_the_mend(overrides: list[str]) -> None:
    huge = ["trainer.lr=1e15", "trainer.warmup_ratio=0", "trainer.save_every=1"]
    with pytest.raises(DivergenceError, match=r"diverged at step \d.*checkpoints are kept.*Lower trainer.lr"):
        train(overrides, *FEW, *huge)

    run = only_run(overrides)
    assert list((run / "checkpoints").iterdir()) and not (run / "draft").exists()


def test_every_weight_moves_in_float32(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before: dict[str, torch.Tensor] = {}
    original = Training.train

    def train_(self: Training) -> None:
        before.update({name: p.detach().clone() for name, p in self.objective.named_parameters()})
        original(self)
        for name, parameter in self.objective.named_parameters():
            assert parameter.dtype == torch.float32
            assert not torch.equal(parameter, before[name]), name

    monkeypatch.setattr(Training, "train", train_)
    train(overrides, *FEW)

    assert any("norm" in name for name in before)


def test_only_matrices_decay(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Any] = []
    monkeypatch.setattr(
        Training, "train", lambda self: groups.extend(self.optimizers["lr"].param_groups) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        train(overrides, *FEW, "trainer.weight_decay=0.1")

    decay = {parameter.dim(): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert decay == {2: 0.1, 1: 0.0}


def test_a_damaged_checkpoint_is_named(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(3, signal.SIGINT, patch)
        train(overrides, *FEW)
    weights = only_run(overrides) / "checkpoints" / "step_000003" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])

    with pytest.raises(CheckpointError, match=r"step_000003 cannot be restored.*Remove that folder"):
        train(overrides, *FEW)
    os.rename(weights.parent, weights.parents[2] / "aside")
    _, printed = train(overrides, *FEW)
    assert "going on from step 2 of 5" in printed


def test_a_full_disk_keeps_the_checkpoints_before(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, saved = Accelerator.save_state, []

    def save_state(self: Accelerator, folder: str) -> None:
        original(self, folder)
        saved.append(folder)
        if len(saved) == 2:
            raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")

    monkeypatch.setattr(Accelerator, "save_state", save_state)
    with pytest.raises(StorageError, match=r"step_000004 cannot be written.*Free some space"):
        train(overrides, *FEW)

    assert [path.name for path in (only_run(overrides) / "checkpoints").iterdir()] == ["step_000002"]


def test_random_states_that_do_not_come_back_are_noticed(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(3, signal.SIGINT, patch)
        train(overrides, *FEW)
    (only_run(overrides) / "checkpoints" / "step_000003" / "random_states_0.pkl").unlink()
    torch.manual_seed(99)

    with pytest.raises(CheckpointError, match="random states"):
        train(overrides, *FEW)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("method.name=medusas", "method.name=medusas is unknown"),
        ("+method.network.layer=2", "method.network.*layer"),
        ("method.objective.steps=0", "steps=0"),
        ("method.objective.draft_mass=drop", "keep or renormalise"),
    ],
)
def test_a_wrong_method_is_refused_before_the_target_loads(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, wrong: str, message: str
) -> None:
    monkeypatch.setattr(Target, "load", lambda config: pytest.fail("the target was loaded"))
    with pytest.raises(ConfigError, match=message):
        train(overrides, wrong)
