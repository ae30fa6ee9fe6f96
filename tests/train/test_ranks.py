"""Training on two processes, in real process groups, against one process with the same global batch."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed
from rich.console import Console
from torch.multiprocessing.spawn import spawn

from configs.compose import compose
from configs.errors import ConfigError
from tests.train.conftest import COSTS, write_workspace
from train.batches import dealt
from train.distill import distil
from train.loop import Training

ROOT = Path(__file__).resolve().parents[2]
# Micro-batches of two rows: 16 in an epoch, in steps of five. So an epoch's last step has one, and the second
# process none of it; of the others the first process has three and the second two.
COMMON = [
    "trainer.batch_tokens=128",
    "trainer.accumulation=5",
    "trainer.epochs=4",
    "trainer.autocast=float32",
    "trainer.eval_every=6",
    "trainer.save_every=5",
]
# As long as it takes for a difference to grow.
STEPS = 50
LONG = ["trainer.epochs=13", f"trainer.max_steps={STEPS}", "trainer.eval_every=25"]
MUON = ["trainer.optimizer=muon", "trainer.max_steps=4"]
NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
STRATEGIES = [
    "ddp",
    "fsdp2",
    pytest.param("zero2", marks=NEEDS_DEEPSPEED),
    pytest.param("zero3", marks=NEEDS_DEEPSPEED),
]


class Job:
    """One run: its overrides, and after which step it dies without a word, if it does."""

    def __init__(self, overrides: list[str], dies_after: int | None = None) -> None:
        self.overrides, self.dies_after = overrides, dies_after

    def run(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if self.dies_after is not None:
                patch.setattr(Training, "step", mortal(Training.step, self.dies_after))
            try:
                distil(compose(self.overrides), Console(file=io.StringIO()))
            except Died:
                if torch.distributed.is_initialized():
                    torch.distributed.destroy_process_group()


class Died(Exception):
    pass


def mortal(step: Any, last: int) -> Any:
    def until(self: Training) -> None:
        if self.state.step == last:
            raise Died
        step(self)

    return until


def worker(rank: int, size: int, jobs: Sequence[Job], ports: Sequence[int]) -> None:
    for job, port in zip(jobs, ports, strict=True):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        job.run()


def in_two_processes(jobs: Sequence[Job]) -> None:
    in_processes(2, jobs)


def in_processes(size: int, jobs: Sequence[Job]) -> None:
    spawn(worker, (size, jobs, [free_port() for _ in jobs]), nprocs=size)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def recipe(method: str, overrides: list[str]) -> list[str]:
    """The tiny workspace's overrides for EAGLE-3 or Medusa."""
    if method == "eagle3":
        return [*overrides, *COMMON]
    kept = [o for o in overrides if not o.startswith(("+experiment", "method.objective"))]
    return ["+experiment=smollm2_medusa", *kept, *COMMON]


def only_run(runs: Path) -> Path:
    (run,) = runs.glob("*/2*")
    return run


def lines(runs: Path) -> list[dict[str, Any]]:
    """What the only run below was logged to do, without what time took."""
    logged = [json.loads(line) for line in (only_run(runs) / "train.jsonl").read_text().splitlines()]
    for line in logged:
        for name in COSTS:
            line.pop(name, None)
            line.get("heldout", {}).pop(name, None)
    return logged


def losses(runs: Path) -> list[float]:
    return [line["loss"] for line in lines(runs) if "loss" in line]


def figures(runs: Path) -> list[float]:
    """Every logged number in order."""
    found: list[float] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            for one in value:
                walk(one)
        elif isinstance(value, int | float):
            found.append(value)

    walk(lines(runs))
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], Path]]:
    """By method: the overrides, and where one process trained with them."""
    made = {}
    for method in ("eagle3", "medusa"):
        folder = tmp_path_factory.mktemp(method)
        overrides = [*recipe(method, write_workspace(folder)), *LONG]
        Job([*overrides, f"runs={folder / 'alone'}"]).run()
        made[method] = overrides, folder / "alone"
    return made


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_do_what_one_does(
    alone: dict[str, tuple[list[str], Path]], tmp_path: Path, strategy: str
) -> None:
    chosen = f"trainer.strategy={strategy}"
    jobs = [
        Job([*overrides, chosen, f"runs={tmp_path / method}"]) for method, (overrides, _) in alone.items()
    ]
    # A third run dies after step 7, two steps after a checkpoint, and is started again.
    again = [*alone["eagle3"][0], chosen, f"runs={tmp_path / 'again'}"]
    jobs += [Job(again, dies_after=7), Job(again)]

    together = strategy in ("ddp", "fsdp2")  # DeepSpeed begins once in a process
    for some in [jobs] if together else [[job] for job in jobs]:
        in_two_processes(some)

    for method, (_, runs) in alone.items():
        assert len(losses(runs)) == STEPS
        assert figures(tmp_path / method) == pytest.approx(figures(runs), rel=1e-5, abs=1e-6)
        run = only_run(tmp_path / method)
        assert json.loads((run / "summary.json").read_text())["steps"] == STEPS
        assert not list((run / "checkpoints").glob(".*"))
    assert lines(tmp_path / "again") == lines(tmp_path / "eagle3")
    weights = "draft/model.safetensors"
    assert (only_run(tmp_path / "again") / weights).read_bytes() == (
        only_run(tmp_path / "eagle3") / weights
    ).read_bytes()


@pytest.fixture(scope="module")
def cut(alone: dict[str, tuple[list[str], Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two fsdp2 processes did: in `dead` one run that died after step 7, in `muon` a short one."""
    folder = tmp_path_factory.mktemp("cut")
    overrides = [*alone["eagle3"][0], "trainer.strategy=fsdp2"]
    died = Job([*overrides, f"runs={folder / 'dead'}"], dies_after=7)
    in_two_processes([died, Job([*overrides, *MUON, f"runs={folder / 'muon'}"])])
    return folder


def test_a_run_of_two_processes_goes_on_in_one(alone: dict[str, tuple[list[str], Path]], cut: Path) -> None:
    overrides, runs = alone["eagle3"]
    Job([*overrides, "trainer.strategy=fsdp2", f"runs={cut / 'dead'}"]).run()

    assert figures(cut / "dead") == pytest.approx(figures(runs), rel=1e-5, abs=1e-6)


# Three do not divide the draft's norms.
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("strategy", [pytest.param(one, marks=NEEDS_DEEPSPEED) for one in ("zero2", "zero3")])
def test_deepspeed_goes_on_in_another_number_of_processes(
    alone: dict[str, tuple[list[str], Path]], tmp_path: Path, strategy: str, sizes: tuple[int, int]
) -> None:
    overrides, runs = alone["eagle3"]
    moved = [*overrides, f"trainer.strategy={strategy}", f"runs={tmp_path / 'moved'}"]
    in_processes(sizes[0], [Job(moved, dies_after=7)])
    in_processes(sizes[1], [Job(moved)])

    assert figures(tmp_path / "moved") == pytest.approx(figures(runs), rel=1e-5, abs=1e-6)


def test_muon_on_cut_matrices_is_muon(alone: dict[str, tuple[list[str], Path]], cut: Path) -> None:
    Job([*alone["eagle3"][0], *MUON, f"runs={cut / 'alone'}"]).run()

    # Muon orthogonalises in bfloat16, where another order of additions shows.
    assert losses(cut / "muon") == pytest.approx(losses(cut / "alone"), rel=1e-3)


def test_a_killed_rank_ends_the_job_with_the_cause(overrides: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", "-m", "train.distill", *overrides, "trainer.strategy=ddp"]
    command += [*COMMON, "trainer.epochs=1000", f"runs={tmp_path / 'killed'}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    deadline = time.monotonic() + 240
    while not list((tmp_path / "killed").glob("*/2*/checkpoints/step_*")):
        assert job.poll() is None and time.monotonic() < deadline, job.communicate()[0]
        time.sleep(0.05)
    ranks = psutil.Process(job.pid).children()
    assert len(ranks) == 2

    ranks[1].kill()
    killed = time.monotonic()
    output = job.communicate(timeout=60)[0]

    assert job.returncode != 0
    assert time.monotonic() - killed < 20
    assert "rank      : 1" in output and "exitcode  : -9" in output
    assert not psutil.wait_procs(ranks, timeout=10)[1]


def test_micro_batches_are_dealt_and_every_rank_has_as_many() -> None:
    a, b, c, d, e = ([n] for n in range(5))
    assert dealt([a, b, c, d, e], 0, 2) == [(a, True), (c, True), (e, True)]
    assert dealt([a, b, c, d, e], 1, 2) == [(b, True), (d, True), (a, False)]
    assert dealt([a], 1, 2) == [(a, False)]
    assert dealt([a, b], 0, 1) == [(a, True), (b, True)]


def test_a_launcher_without_a_strategy_is_refused(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"started as 2 processes.*trainer=ddp"):
        distil(compose(overrides), Console(file=io.StringIO()))


def test_deepspeed_without_a_launcher_is_refused(overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"torchrun --nproc_per_node"):
        distil(compose([*overrides, "trainer.strategy=zero2"]), Console(file=io.StringIO()))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["trainer.strategy=zero2", "trainer.optimizer=muon"], "cuts matrices into vectors"),
        (["trainer.strategy=fsdp2", "trainer.ema=0.9"], "set trainer.ema=null, or trainer.strategy=ddp"),
        (["trainer.strategy=fsdp2", "+method.objective.on_policy=0.5"], "on_policy writes text with"),
        (["trainer.strategy=fsdp2", "method=medusa2"], "trains the target too"),
    ],
)
def test_what_a_strategy_cannot_do_is_refused(wrong: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["+experiment=smollm2_cpu", *wrong])
    assert words in str(caught.value)


@pytest.mark.parametrize("trainer", ["ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"])
def test_the_trainers_for_several_gpus_compose(trainer: str) -> None:
    config = compose(["+experiment=llama8b", f"trainer={trainer}"])
    assert config.trainer.strategy.value == trainer.removeprefix("deepspeed_")
    assert (config.trainer.accumulation, config.trainer.batch_tokens) == (8, 16384)
