"""EAGLE-1 for vLLM and SGLang: what is written, what is refused, and that damage is caught and named."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.errors import CheckpointError
from models.eagle1 import Eagle1, NetworkConfig
from models.export import eagle1
from models.export.eagle1 import LAYOUTS, check, refuse, serve
from models.target import Target
from tests.conftest import tiny_target, tiny_tokenizer
from tests.models import exports
from tests.models.exports import edit, edit_tensors

written = partial(exports.written, eagle1)

LAYER_0 = [
    "post_attention_layernorm",
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
]


def made(target: Target, **network: Any) -> Eagle1:
    draft = Eagle1.build(NetworkConfig(**network), target)
    if not draft.full_vocabulary:
        draft.set_vocabulary(torch.arange(draft.shape.draft_vocab_size))
    draft.initialise(0)
    return draft.requires_grad_(False)


@pytest.fixture
def draft(target: Target) -> Eagle1:
    return made(target)


def test_names(tmp_path: Path, target: Target, draft: Eagle1) -> None:
    shared = {"fc.weight", *(f"layers.0.{name}.weight" for name in LAYER_0)}
    config, tensors = written(tmp_path / "v", draft, target)
    assert set(tensors) == shared
    assert config["architectures"] == ["LlamaForCausalLM"]  # vLLM puts Eagle before it
    assert not {"bias", "draft_vocab_size"} & set(config)
    assert config["attention_bias"] is False
    config, tensors = written(tmp_path / "s", draft, target, "sglang")
    assert set(tensors) == {*shared, "fc.bias"}
    assert config["architectures"] == ["LlamaForCausalLMEagle"]


def test_sglang_gets_zeros_for_the_bias_it_always_has(tmp_path: Path, target: Target, draft: Eagle1) -> None:
    _, tensors = written(tmp_path / "e", draft, target, "sglang")
    assert tensors["fc.bias"].tolist() == [0.0] * 32
    edit_tensors(tmp_path / "e", **{"fc.bias": None})
    with pytest.raises(RuntimeError, match=r"fc\.bias is missing"):
        check(tmp_path / "e", draft, target)


def test_a_trained_bias(tmp_path: Path, target: Target) -> None:
    draft = made(target, bias=True)
    draft.fc.bias.copy_(torch.arange(32.0))
    _, tensors = written(tmp_path / "e", draft, target, "sglang")
    assert tensors["fc.bias"].tolist() == list(range(32))
    with pytest.raises(CheckpointError, match=r"vLLM drops the bias .*method\.network\.bias=false"):
        refuse("vllm", draft)
    with pytest.raises(RuntimeError, match="features at position 5, draft step 1 differ"):
        written(tmp_path / "v", draft, target)


@pytest.mark.parametrize("engine", LAYOUTS)
def test_a_draft_of_few_rows_proposes_from_all(tmp_path: Path, target: Target, engine: str) -> None:
    """Engines have the target's whole head, of whose rows a draft vocabulary is a part: no other weights."""
    draft = made(target, draft_vocab_size=48)
    refuse(engine, draft)
    _, tensors = written(tmp_path / "few", draft, target, engine)
    _, whole = written(tmp_path / "all", made(target), target, engine)
    assert tensors.keys() == whole.keys()
    assert all(torch.equal(tensors[name], whole[name]) for name in whole)
    needs = LAYOUTS[engine](draft, target).needs
    assert needs is not None and "among 48 tokens" in needs
    assert LAYOUTS[engine](made(target), target).needs is None


def test_more_layers(tmp_path: Path, target: Target) -> None:
    _, tensors = written(tmp_path / "e", made(target, layers=2), target)
    assert "layers.0.input_layernorm.weight" not in tensors
    assert "layers.1.input_layernorm.weight" in tensors


def test_far_positions(tmp_path: Path) -> None:
    """Compared at 5,000 too: the rotary scaling must be in the file in both forms."""
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    target = tiny_target(max_position_embeddings=8192, rope_parameters=rope)
    draft = made(target)
    written(tmp_path / "e", draft, target)
    edit(tmp_path / "e", rope_scaling=None)
    with pytest.raises(RuntimeError, match="old form"):
        check(tmp_path / "e", draft, target)


def test_commands(tmp_path: Path) -> None:
    settings = json.loads(shlex.split(serve("vllm", "t", tmp_path, 4))[-1])
    assert (settings["method"], settings["num_speculative_tokens"]) == ("eagle", 4)
    assert "--speculative-algorithm EAGLE " in serve("sglang", "t", tmp_path, 4)


# ---- deliberate damage ----


@pytest.fixture
def folder(tmp_path: Path, target: Target, draft: Eagle1) -> Path:
    written(tmp_path / "e", draft, target)
    return tmp_path / "e"


def test_bias_left_in_the_config(folder: Path, target: Target, draft: Eagle1) -> None:
    """As in the authors' configs: vLLM and SGLang would give the attention biases that no file fills."""
    edit(folder, bias=True)
    with pytest.raises(RuntimeError, match=r"layers\.0\.self_attn\.q_proj\.bias is missing"):
        check(folder, draft, target)


def test_a_swapped_fc_order(folder: Path, target: Target, draft: Eagle1) -> None:
    edit_tensors(folder, **{"fc.weight": draft.fc.weight.roll(32, dims=1)})  # 64 columns: halves exchanged
    with pytest.raises(RuntimeError, match=r"fc reads the feature from the columns .* reads the embedding"):
        check(folder, draft, target)


def test_a_missing_norm(folder: Path, target: Target, draft: Eagle1) -> None:
    edit_tensors(folder, **{"layers.0.post_attention_layernorm.weight": None})
    with pytest.raises(RuntimeError, match=r"layers\.0\.post_attention_layernorm\.weight is missing"):
        check(folder, draft, target)


def test_a_norm_that_no_reader_asks_for(folder: Path, target: Target, draft: Eagle1) -> None:
    edit_tensors(folder, **{"layers.0.input_layernorm.weight": torch.ones(32)})
    with pytest.raises(RuntimeError, match=r"no reader asks for layers\.0\.input_layernorm\.weight"):
        check(folder, draft, target)


def test_a_random_embedding(folder: Path, target: Target, draft: Eagle1) -> None:
    edit_tensors(folder, **{"embed_tokens.weight": torch.randn(64, 32)})
    with pytest.raises(RuntimeError, match="embed_tokens is not the target's"):
        check(folder, draft, target)


def test_another_tokenizer(folder: Path, target: Target, draft: Eagle1) -> None:
    tiny_tokenizer(63).save_pretrained(folder)
    with pytest.raises(RuntimeError, match="tokenizer"):
        check(folder, draft, target)


def test_a_truncated_file(folder: Path, target: Target, draft: Eagle1) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        check(folder, draft, target)
