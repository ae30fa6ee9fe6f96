"""A target that processes hold in parts, in real process groups, against the whole one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from configs.compose import compose
from configs.errors import ConfigError, TargetError
from data.tokens import TokenRow
from models.target import Target
from tests.conftest import tiny_model, tiny_target, tiny_tokenizer
from tests.train.conftest import write_workspace
from tests.train.test_ranks import Job, figures, free_port, lines, losses, recipe
from train.distill import load_target
from train.features import Online
from train.ranks import join
from train.sharded import ShardedTarget, cuts, placement, refuse_uneven

TAPS = (1, 2)
ROWS = [
    TokenRow(str(n), "tiny", [(3 * n + 7 * i) % 64 for i in range(length)], [0] * 3 + [1] * (length - 3))
    for n, length in enumerate((9, 70, 12, 20, 6))
]


def started(rank: int, processes: int, ports: list[int], runs: list[Callable[[int], None]]) -> None:
    for port, run in zip(ports, runs, strict=True):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        run(rank)


def in_processes(processes: int, *runs: Callable[[int], None]) -> None:
    spawn(started, (processes, [free_port() for _ in runs], list(runs)), nprocs=processes)


# ---- features ----


def qwen3() -> Qwen3ForCausalLM:
    """Norms over each head, biases in the first matrices, and a head tied to the embedding."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "attention_bias": True}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = Qwen3ForCausalLM(
            Qwen3Config(**sizes, **heads, initializer_range=0.4, tie_word_embeddings=True, eos_token_id=2)
        )
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(weight)
    return model


def close(a: Tensor, b: Tensor) -> bool:
    """Whether they differ by no more than 1e-5 of the largest number; integers by nothing."""
    if not b.is_floating_point():
        return torch.equal(a, b)
    return float((a - b).abs().max()) <= 1e-5 * float(b.abs().max())


class Reads:
    """Reads its own rows in `together`, then with a cache what the others read too, and keeps all of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, rank: int) -> None:
        config = compose(
            [
                "+experiment=smollm2_cpu",
                f"target.name={self.folder}",
                "target.dtype=float32",
                "target.device=cpu",
                "trainer.strategy=ddp",
                "trainer.target_parallel=2",
            ]
        )
        ranks = join(config)
        target = load_target(config, ranks)
        source = Online(target, ROWS, TAPS)
        batches = target.together(lambda: [vars(source.batch([n])) for n in range(rank, len(ROWS), 2)])
        local = [w.to_local().numel() for w in target.model.parameters() if isinstance(w, DTensor)]
        whole = [w.numel() for w in target.model.parameters() if isinstance(w, DTensor)]
        kept = {
            "batches": batches,
            "decoded": decoded(target),
            "fingerprint": target.fingerprint(),
            "cut": (sum(local), sum(whole)),
            "placement": placement(target),
        }
        torch.save(kept, self.folder / f"{rank}.pt")
        ranks.end()


def decoded(target: Target) -> Tensor:
    """Logits of a prompt's last token, and of two after it, over a cache that was cropped between them."""
    cache = DynamicCache(config=target.model.config)
    logits = [target.forward(torch.tensor([[5, 9, 1, 44, 3]]), cache=cache, last_logits_only=True).logits]
    cache.crop(-1)  # one of the five
    logits.append(target.forward(torch.tensor([[17, 8]]), cache=cache).logits)
    return torch.cat([one for one in logits if one is not None], dim=1)


def test_two_processes_read_what_one_does(tmp_path: Path) -> None:
    targets = {}
    for name, model in (("llama", tiny_model(layers=3)), ("qwen3", qwen3())):
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer(64).save_pretrained(tmp_path / name)
        targets[tmp_path / name] = Target.wrap(model, tiny_tokenizer(64))

    in_processes(2, *(Reads(folder) for folder in targets))

    for (folder, whole), rank in product(targets.items(), range(2)):
        found = torch.load(folder / f"{rank}.pt", weights_only=False)
        expected = [vars(Online(whole, ROWS, TAPS).batch([n])) for n in range(rank, len(ROWS), 2)]
        assert len(found["batches"]) == (3, 2)[rank]  # the second waits for the first, and runs along
        for ours, theirs in zip(found["batches"], expected, strict=True):
            assert all(close(ours[name], values) for name, values in theirs.items())
        assert close(found["decoded"], decoded(whole))
        assert found["fingerprint"] == whole.fingerprint()
        held, everything = found["cut"]
        assert everything > 0 and held == pytest.approx(everything / 2, rel=0.02)  # biases of sums are whole
        assert "in 2 parts" in found["placement"] and "trainer.target_parallel=2" in found["placement"]


# ---- training ----


class Trains:
    """A job, after `removed` is gone."""

    def __init__(self, overrides: list[str], removed: Path | None = None) -> None:
        self.job, self.removed = Job(overrides), removed

    def __call__(self, rank: int) -> None:
        if self.removed is not None and rank == 0:
            shutil.rmtree(self.removed)
        self.job.run()


def shards(data: Path) -> list[dict[str, Tensor]]:
    """What was captured, without the checksums of its bytes: a sum over processes rounds otherwise."""
    read = [load_file(path) for path in sorted(data.glob("features/*/*.safetensors"))]
    return [{name: values for name, values in one.items() if name != "checksum"} for one in read]


def test_two_processes_capture_and_train_as_one_does(tmp_path: Path) -> None:
    overrides = [*recipe("eagle3", write_workspace(tmp_path)), "trainer.epochs=2"]
    overrides += ["method.objective.start_layer=-1"]  # which no process has whole
    data = tmp_path / "data"
    Job([*overrides, f"runs={tmp_path / 'alone'}"]).run()
    captured = shards(data)
    ours = [*overrides, "trainer.strategy=ddp", "trainer.target_parallel=2", f"runs={tmp_path / 'two'}"]

    in_processes(2, Trains(ours, removed=data / "features"))

    assert captured and len(shards(data)) == len(captured)
    for ours, theirs in zip(shards(data), captured, strict=True):
        assert all(close(ours[name], values) for name, values in theirs.items())
    # Norms of gradients show more of the rounding: this target's layers have ten times a fresh one's weights.
    assert len(losses(tmp_path / "two")) == len(losses(tmp_path / "alone")) == 8
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    assert figures(tmp_path / "two") == pytest.approx(figures(tmp_path / "alone"), rel=1e-4, abs=1e-5)


def test_four_processes_hold_two_targets(tmp_path: Path) -> None:
    overrides = [*recipe("eagle3", write_workspace(tmp_path)), "trainer.epochs=1", "trainer.features=online"]
    Job([*overrides, f"runs={tmp_path / 'alone'}"]).run()
    ours = [*overrides, "trainer.strategy=fsdp2", "trainer.target_parallel=2", f"runs={tmp_path / 'four'}"]

    in_processes(4, Trains(ours))

    assert figures(tmp_path / "four") == pytest.approx(figures(tmp_path / "alone"), rel=1e-5, abs=1e-5)
    assert len(lines(tmp_path / "four")) == len(lines(tmp_path / "alone"))


# ---- what is refused ----


def test_embedding_and_head_stay_whole_and_norms_too() -> None:
    cut = {name.rpartition(".")[2] for name in cuts(tiny_target()) if not name.endswith("weight")}
    assert cut == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(TargetError, match=r"target_parallel=4 .* 4 attention heads .* 2 heads .* to 1, 2\."):
        refuse_uneven(tiny_target(heads=4, kv_heads=2), 4)


def test_a_model_without_a_plan_is_refused() -> None:
    target = tiny_target()
    target.model.tp_plan = {}
    with pytest.raises(TargetError, match="no tensor-parallel plan for LlamaForCausalLM"):
        refuse_uneven(target, 2)


@pytest.mark.parametrize("processes", [None, "3"])
def test_processes_that_do_not_divide_are_refused(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, processes: str | None
) -> None:
    if processes is not None:
        monkeypatch.setenv("WORLD_SIZE", processes)
        monkeypatch.setenv("RANK", "0")
    config = compose([*overrides, "trainer.strategy=ddp", "trainer.target_parallel=2"])
    with pytest.raises(ConfigError, match=rf"started as {processes or 1}: start 2 .*--nproc_per_node 2"):
        join(config)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["trainer.target_parallel=2"], "trainer.strategy=none uses one"),
        (["trainer.target_parallel=0"], "must be at least 1"),
        (["trainer=ddp", "trainer.target_parallel=2", "method=medusa2"], "method=medusa2 trains it"),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["+experiment=smollm2_cpu", *wrong])
    assert words in str(caught.value)


def test_a_whole_target_is_said_to_be() -> None:
    assert placement(tiny_target()).startswith("target: whole on each process")
    assert not isinstance(tiny_target(), ShardedTarget)
