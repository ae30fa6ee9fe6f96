"""MLP speculator exports: IBM's names and fields, a reduced vocabulary, and damage that the check names."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.errors import CheckpointError
from models.export.layout import write_export
from models.export.mlp_speculator import check, refuse, serve, vllm
from models.mlp_speculator import MlpSpeculator, NetworkConfig
from models.target import Target

VOCABULARY = [0, 2, 3, 7, 63]


def tiny_speculator(target: Target, vocabulary: list[int] | None = None, **network: Any) -> MlpSpeculator:
    """Three steps of inner size 16 with weights of their own, norms' biases included."""
    size = None if vocabulary is None else len(vocabulary)
    settings = {"heads": 3, "inner_dim": 16, "draft_vocab_size": size, **network}
    draft = MlpSpeculator.build(NetworkConfig(**settings), target)
    if vocabulary is not None:
        draft.set_vocabulary(torch.tensor(vocabulary))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    draft.ready = True
    return draft


def written(
    folder: Path, draft: MlpSpeculator, target: Target
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(config, tensors) of a verified export."""
    write_export(folder, vllm(draft, target), target.tokenizer, lambda where: check(where, draft, target))
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("scale_input", [True, False])
def test_untied_names_and_fields(tmp_path: Path, target: Target, scale_input: bool) -> None:
    draft = tiny_speculator(target, tie_weights=False, scale_input=scale_input)
    config, tensors = written(tmp_path / "e", draft, target)
    parts = ("emb.{}.weight", "proj.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias")
    assert set(tensors) == {f"speculator.{part.format(i)}" for part in parts for i in range(3)}
    assert config["architectures"] == ["MLPSpeculatorPreTrainedModel"]
    assert (config["emb_dim"], config["inner_dim"], config["n_predict"]) == (32, 16, 3)
    assert (config["vocab_size"], config["tie_weights"], config["scale_input"]) == (64, False, scale_input)


def test_tied_weights_stand_once(tmp_path: Path, target: Target) -> None:
    _, tensors = written(tmp_path / "e", tiny_speculator(target), target)
    once = {"emb.0.weight", "proj.0.weight", "proj.1.weight", "head.0.weight", "ln.0.weight", "ln.0.bias"}
    assert set(tensors) == {f"speculator.{name}" for name in once}


def test_a_reduced_head_is_written_whole(tmp_path: Path, target: Target) -> None:
    draft = tiny_speculator(target, VOCABULARY)
    _, tensors = written(tmp_path / "e", draft, target)
    rows = dict(draft.named_parameters())["head.0.weight"].detach()
    torch.testing.assert_close(tensors["speculator.head.0.weight"][VOCABULARY], rows)
    torch.testing.assert_close(tensors["speculator.head.0.weight"][1], rows.mean(0))
    assert not any(name.endswith(("d2t", "t2d")) for name in tensors)
    assert "5 tokens is written over all 64" in str(vllm(draft, target).needs)


def test_the_version_that_serves_it_is_said(tmp_path: Path, target: Target) -> None:
    assert "vLLM up to 0.10" in str(vllm(tiny_speculator(target), target).needs)
    command = serve("vllm", "some/target", tmp_path / "e", 3)
    assert command.startswith("VLLM_USE_V1=0 vllm serve some/target")
    settings = json.loads(shlex.split(command)[-1])
    assert settings == {"model": str(tmp_path / "e"), "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"scale_input": False}, "states of step 1 differ"),
        ({"n_predict": 4, "top_k_tokens_per_head": [1] * 4}, r"proj\.3\.weight is missing"),
        ({"n_predict": 4}, "top_k_tokens_per_head"),
        ({"inner_dim": 0}, r"is \[16, 32\] and config.json makes it \[32, 32\]"),
        ({"vocab_size": 60}, r"emb\.0\.weight is \[64, 16\]"),
        ({"tie_weights": True}, r"no reader asks for speculator\.emb\.1\.weight"),
    ],
)
def test_a_wrong_field_is_caught(tmp_path: Path, target: Target, change: dict[str, Any], fault: str) -> None:
    draft = tiny_speculator(target, tie_weights=False)
    written(tmp_path / "e", draft, target)
    edit(tmp_path / "e", **change)
    with pytest.raises(RuntimeError, match=fault):
        check(tmp_path / "e", draft, target)


def test_the_number_of_steps_weighs_states_against_tokens(tmp_path: Path, target: Target) -> None:
    """Tied weights serve any number of steps, but with n_predict=2 tokens weigh more than was trained."""
    draft = tiny_speculator(target)
    written(tmp_path / "e", draft, target)
    edit(tmp_path / "e", n_predict=2, top_k_tokens_per_head=[1, 1])
    with pytest.raises(RuntimeError, match="predicts 2 tokens, and the draft 3"):
        check(tmp_path / "e", draft, target)


def test_swapped_norms_and_a_lost_bias_are_caught(tmp_path: Path, target: Target) -> None:
    draft = tiny_speculator(target, tie_weights=False)
    _, tensors = written(tmp_path / "e", draft, target)
    first, second = "speculator.ln.0.weight", "speculator.ln.1.weight"
    path = tmp_path / "e" / "model.safetensors"
    save_file({**tensors, first: tensors[second], second: tensors[first]}, path)
    with pytest.raises(RuntimeError, match="states of step 1 differ"):
        check(tmp_path / "e", draft, target)
    save_file({name: tensor for name, tensor in tensors.items() if name != "speculator.ln.2.bias"}, path)
    with pytest.raises(RuntimeError, match=r"speculator\.ln\.2\.bias is missing"):
        check(tmp_path / "e", draft, target)


def test_a_truncated_file_is_caught(tmp_path: Path, target: Target) -> None:
    draft = tiny_speculator(target)
    written(tmp_path / "e", draft, target)
    path = tmp_path / "e" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        check(tmp_path / "e", draft, target)


def test_one_tied_head_is_refused(target: Target) -> None:
    refuse("vllm", tiny_speculator(target, heads=1, tie_weights=False))
    with pytest.raises(CheckpointError, match="tie_weights=false"):
        refuse("vllm", tiny_speculator(target, heads=1))
