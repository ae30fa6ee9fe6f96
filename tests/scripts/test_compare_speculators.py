"""The comparison with speculators, without the package: what it is given, and what is made of its results."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from datasets import load_from_disk
from rich.console import Console
from safetensors.torch import load_file

from configs.compose import compose
from configs.errors import ConfigError, TrafficError
from data.tokens import prompts
from decoding.sequence import Generation, Round
from models.eagle3 import Eagle3
from models.files import write_json, write_tensors
from scripts import compare_speculators as compared
from scripts.compare_speculators import FLAGS, Material, PeerError, Training
from tests.conftest import tiny_draft
from tests.train.conftest import write_workspace
from train.runs import contract
from train.unrolled import unroll

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Material:
    """32 rows of 6 + 24 tokens, taps 1 (of 2 layers), 60 of 64 tokens in the draft vocabulary."""
    overrides = write_workspace(tmp_path_factory.mktemp("workspace"))
    return compared.material(compose([*overrides, "target.device=cpu"]), QUIET)


def test_the_peer_reads_the_layers_by_their_hf_numbers_and_the_last_before_its_norm(
    made: Material, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    compared.save_data(made, QUIET, folder)
    row, target = made.rows[0], made.target
    states = load_file(compared.states_file(folder, 0))
    right = target.model(torch.tensor([row.input_ids]), output_hidden_states=True).hidden_states

    assert made.objective.taps == (1,)
    assert states["hidden_states"].shape == (30, 2, 32)
    torch.testing.assert_close(states["hidden_states"][:, 0], right[1][0])
    torch.testing.assert_close(target.decoder.norm(states["hidden_states"][:, 1]), right[-1][0])
    assert states["token_ids"].tolist() == row.input_ids

    table: Any = load_from_disk(folder)
    assert len(table) == 33  # the last row once more, for the peer's validation
    assert torch.equal(table[0]["input_ids"], states["token_ids"])  # int64 both, as the peer compares them
    assert table[0]["loss_mask"].tolist() == [0] * 6 + [1] * 24
    assert table[31]["input_ids"].tolist() == table[32]["input_ids"].tolist()
    assert [int(length) for length in table["seq_len"]] == [30] * 33


def test_tokens_are_the_rows_own_without_padding(made: Material) -> None:
    # 30 tokens are padded to 64, of which 4 rows fit in 256; so a step goes through 4 x 30 tokens.
    assert compared.tokens_of(made, steps=1) == 120
    assert compared.tokens_of(made, steps=10) == 1200  # into the second epoch


def test_a_run_with_other_settings_is_refused(made: Material, tmp_path: Path) -> None:
    other = contract(made.config, made.method.values(), "other rows", made.target.fingerprint())
    write_json(tmp_path / "contract.json", other)
    with pytest.raises(ConfigError, match="rows differ"):
        compared.our_training(tmp_path, made)


def test_prompts_that_chose_our_checkpoint_are_left_out(made: Material) -> None:
    # Eight are held out, of one category; the first three are trainer.eval_prompts.
    chosen = compared.held_out(made.config, 4)
    assert [prompt.id for prompt in chosen] == [prompt.id for prompt in prompts(made.config, "heldout")][3:7]
    with pytest.raises(TrafficError, match="All 3 held-out prompts"):
        compared.held_out(made.config, 0)


TRAINING = Training(steps=4, tokens=480, trained_tokens=384, seconds=2.0, median_step=0.5)


def test_the_peer_gets_our_sizes_and_steps_and_its_own_rate(made: Material, tmp_path: Path) -> None:
    job = compared.peer_job(made, tmp_path, tmp_path / "peer", TRAINING, None)
    flags = " ".join(job["flags"])

    assert (job["steps"], job["tokens"]) == (4, 480)
    assert "--target-layer-ids 1 --ttt-steps 3" in flags
    assert "--draft-vocab-size 60" in flags
    assert "--lr" not in flags
    job = compared.peer_job(made, tmp_path, tmp_path / "peer", TRAINING, 0.0015)
    assert job["flags"][-2:] == ["--lr", "0.0015"]


def stand_in(folder: Path, script: str) -> Path:
    """An interpreter that does `script` whatever it is asked: $2 is the stage, $3 the job."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def test_a_training_that_is_done_is_not_done_again(tmp_path: Path) -> None:
    job = {"result": str(tmp_path / "peer" / "trained.json"), "steps": 4}
    writes = f"echo ran >> {tmp_path}/runs\necho '{json.dumps({'job': job})}' > trained.json"
    python = stand_in(tmp_path, writes)

    for _ in range(2):
        assert compared.train_peer(python, job, QUIET) == {"job": job}
    assert (tmp_path / "runs").read_text() == "ran\n"
    with pytest.raises(KeyError):  # it is run again, and the stand-in writes no such job
        assert compared.train_peer(python, job | {"steps": 5}, QUIET)["job"]["seed"]
    assert (tmp_path / "runs").read_text() == "ran\nran\n"


def test_a_peer_that_fails_is_quoted(tmp_path: Path) -> None:
    job = {"result": str(tmp_path / "peer" / "trained.json"), "steps": 4}
    with pytest.raises(PeerError, match=r"status 3.*no accelerator.*train\.log"):
        compared.train_peer(stand_in(tmp_path, "echo no accelerator >&2; exit 3"), job, QUIET)
    with pytest.raises(PeerError, match="cannot be started"):
        compared.train_peer(tmp_path / "nothing", job, QUIET)


THEIR_FLAGS = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}  # its defaults


def write_checkpoint(folder: Path, made: Material, draft: Eagle3, **layer: Any) -> None:
    """`draft` as the peer writes it: bfloat16, the embedding included, what Llama has by default left out."""
    shape = draft.shape
    config = {flag: getattr(shape, flag) for flag in FLAGS} | {
        "draft_vocab_size": shape.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": shape.taps,
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
            "num_hidden_layers": 1,
            "intermediate_size": shape.intermediate_size,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "rope_parameters": shape.rope_parameters,
            **layer,
        },
    }
    state = {
        name: weight.bfloat16() if weight.is_floating_point() else weight
        for name, weight in draft.state_dict().items()
    }
    write_json(folder / "config.json", config)
    write_tensors(folder / "model.safetensors", state | {"embed_tokens.weight": made.target.embedding})


def their_draft(made: Material, vocabulary: list[int] | None = None) -> Eagle3:
    ids = made.objective.draft.draft_ids.tolist() if vocabulary is None else vocabulary
    return tiny_draft(made.target, seed=7, vocabulary=ids, **THEIR_FLAGS)


def test_their_checkpoint_is_a_draft_of_ours(made: Material, tmp_path: Path) -> None:
    theirs = their_draft(made)
    write_checkpoint(tmp_path, made, theirs)
    draft = compared.converted(tmp_path, made)

    assert draft.shape == theirs.shape
    for name, weight in theirs.state_dict().items():
        assert torch.equal(draft.state_dict()[name], weight.bfloat16().to(weight.dtype)), name


def test_other_sizes_are_refused(made: Material, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, made, their_draft(made), intermediate_size=48)
    with pytest.raises(PeerError, match="intermediate_size is 48 and ours 64"):
        compared.converted(tmp_path, made)


def test_another_draft_vocabulary_is_refused(made: Material, tmp_path: Path) -> None:
    ours = made.objective.draft.draft_ids.tolist()
    spare = next(i for i in range(64) if i not in ours)
    write_checkpoint(tmp_path, made, their_draft(made, sorted([*ours[1:], spare])))
    with pytest.raises(PeerError, match="another draft vocabulary"):
        compared.converted(tmp_path, made)


def test_parity_sees_one_wrong_flag(made: Material) -> None:
    """Logits at every row and step as the peer lays them out, [steps, T - 1, Vd]."""
    batch = compared.batch_of_first(made)
    theirs = their_draft(made)
    with torch.no_grad():
        unrolled = unroll(theirs, batch, 3)
        logits = torch.full((3, 29, 60), torch.nan)  # what trains nothing is not looked at
        for step, term in enumerate(unrolled.steps):
            taught = term.mask[0]
            logits[step, unrolled.rows[0][taught]] = theirs.logits(term.states[0][taught])
    assert compared.parity(theirs, batch, logits) == 0
    theirs.get_submodule("layers.0").norm_before_residual = False  # pyright: ignore[reportArgumentType]
    assert compared.parity(theirs, batch, logits) > 0.1


def generation(*accepted: int) -> Generation:
    """One round for each count of accepted drafts, of 3."""
    rounds = [Round(3, a, a + 1, 3, min(a + 1, 3), 0.0, 0.0, 0.0) for a in accepted]
    return Generation(tokens=[5] * (1 + sum(a + 1 for a in accepted)), rounds=rounds)


def test_tau_and_its_ratio_are_pooled_over_prompts() -> None:
    ours = [generation(3, 1), generation(2, 2)]  # 12 tokens in 4 rounds: 3
    theirs = [generation(1, 1, 1), generation(0, 0, 3)]  # 12 tokens in 6 rounds: 2
    found = compared.acceptance(theirs, ours, seed=0)

    assert found["mean_acceptance_length"] == 2
    assert found["ours_over_it"] == 1.5
    # A resample is one prompt twice or both. Each prompt has (6 / 2) / (6 / 3) = 1.5.
    assert found["ours_over_it_ci"] == (1.5, 1.5)
    assert found["outputs_as_ours"] == 2  # 7 tokens each
    assert compared.acceptance(ours, ours, seed=0)["ours_over_it"] == 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The driver, with a stand-in for the package that packs rows in order, and reversed in odd epochs."""

    class Sampler:
        def __init__(self, length: int, lengths: list[int], **_: int) -> None:
            self.length, self.lengths = length, lengths

        def set_epoch(self, epoch: int) -> None:
            self.order = range(len(self.lengths))[:: -1 if epoch % 2 else 1]

        def __iter__(self) -> Any:
            batch: list[int] = []
            for row in self.order:
                if sum(self.lengths[n] for n in [*batch, row]) > self.length:
                    yield batch
                    batch = []
                batch.append(row)
            yield batch

    package = "speculators"
    for name in ("", ".__main__", ".models", ".models.eagle3", ".train", ".train.distributed_batch_sampler"):
        monkeypatch.setitem(
            sys.modules, package + name, MagicMock(MultipackDistributedBatchSamplerV2=Sampler)
        )
    spec = importlib.util.spec_from_file_location("speculators_driver", compared.DRIVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_packed_length_is_the_shortest_that_sees_enough(driver: ModuleType) -> None:
    lengths = [3, 2, 2, 3]
    assert driver.planned(lengths, 3, 5, 0) == ([[0, 1], [2, 3], [3, 2]], 2)  # 15 tokens, in two epochs
    assert driver.shortest(lengths, 3, 15, 0) == 5
    # Length 3 packs [0] [1] [2], 7 tokens, and 4 packs [0] [1 2] [3], 10.
    assert driver.shortest(lengths, 3, 10, 0) == 4
    # Length 6 packs as 5 does, and 7 packs [0 1 2] [3] [3 2 1], 17 tokens.
    assert driver.shortest(lengths, 3, 16, 0) == 7
    assert driver.shortest(lengths, 3, 99, 0) == 10  # the whole epoch in each batch is the most there is
