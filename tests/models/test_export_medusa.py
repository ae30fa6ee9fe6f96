"""Medusa exports: names per engine, a reduced vocabulary, what is refused, damage that the check names."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.errors import CheckpointError
from models.export.layout import whole_head, write_export
from models.export.medusa import LAYOUTS, check, refuse, serve
from models.medusa import Medusa, NetworkConfig
from models.target import Target
from tests.conftest import tiny_target

VOCABULARY = [0, 2, 3, 7, 63]


def tiny_medusa(target: Target, vocabulary: list[int] | None = None, **network: Any) -> Medusa:
    """Two heads with random weights, no two alike; over `vocabulary`, or all tokens."""
    size = None if vocabulary is None else len(vocabulary)
    draft = Medusa.build(NetworkConfig(**{"heads": 2, "draft_vocab_size": size, **network}), target)
    if vocabulary is not None:
        draft.set_vocabulary(torch.tensor(vocabulary))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    draft.ready = True
    return draft


def projections(draft: Medusa) -> list[torch.Tensor]:
    return [rows.detach() for rows in draft.lm_heads.parameters()]


def written(folder: Path, draft: Medusa, target: Target, engine: str = "vllm") -> dict[str, Any]:
    """config.json of a verified export."""
    layout = LAYOUTS[engine](draft, target)
    write_export(folder, layout, target.tokenizer, lambda where: check(where, draft, target))
    return json.loads((folder / "config.json").read_text())


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def edit_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Sets tensors, or removes those set to None."""
    tensors: dict[str, torch.Tensor | None] = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, folder / "model.safetensors")


# ---- names ----


def test_vllm_names_and_config(tmp_path: Path, target: Target) -> None:
    config = written(tmp_path / "e", tiny_medusa(target, layers=2), target)
    tensors = load_file(tmp_path / "e" / "model.safetensors")
    blocks = {f"blocks.{h}.layers.{i}.{leaf}" for h in (0, 1) for i in (0, 1) for leaf in ("weight", "bias")}
    assert set(tensors) == blocks | {"lm_heads.0.weight", "lm_heads.1.weight"}
    assert config["architectures"] == ["MedusaModel"]
    assert (config["model_type"], config["num_heads"], config["num_hidden_layers"]) == ("medusa", 2, 2)
    assert (config["hidden_size"], config["vocab_size"]) == (32, 64)
    assert config["medusa_fc_bias"] is True
    assert config["original_lm_head"] is False


def test_authors_names(tmp_path: Path, target: Target) -> None:
    draft = tiny_medusa(target, heads=5)
    config = written(tmp_path / "e", draft, target, "medusa")
    tensors = torch.load(tmp_path / "e" / "medusa_lm_head.pt", weights_only=True)
    names = {f"{h}.{rest}" for h in range(5) for rest in ("0.linear.weight", "0.linear.bias", "1.weight")}
    assert set(tensors) == names
    torch.testing.assert_close(tensors["3.1.weight"], projections(draft)[3])
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (5, 1)
    assert config["base_model_name_or_path"] == "tiny"


def test_tensorrt_asks_for_the_heads_by_two_names(tmp_path: Path, target: Target) -> None:
    config = written(tmp_path / "e", tiny_medusa(target), target, "tensorrt_llm")
    assert config["medusa_num_heads"] == config["num_medusa_heads"] == 2
    assert (tmp_path / "e" / "medusa_lm_head.safetensors").is_file()


def test_one_projection_for_all_heads(tmp_path: Path, target: Target) -> None:
    """vLLM shares it too; the authors' layout has it once a head."""
    draft = tiny_medusa(target, projection="shared")
    assert written(tmp_path / "v", draft, target)["original_lm_head"] is True
    assert "lm_heads.1.weight" not in load_file(tmp_path / "v" / "model.safetensors")
    written(tmp_path / "t", draft, target, "tensorrt_llm")
    tensors = load_file(tmp_path / "t" / "medusa_lm_head.safetensors")
    assert torch.equal(tensors["0.1.weight"], tensors["1.1.weight"])


def test_weights_keep_the_targets_dtype(tmp_path: Path) -> None:
    target = tiny_target(dtype=torch.bfloat16)
    draft = tiny_medusa(target, VOCABULARY).to(torch.bfloat16)
    assert written(tmp_path / "e", draft, target)["dtype"] == "bfloat16"
    tensors = load_file(tmp_path / "e" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


# ---- a reduced vocabulary ----


def test_whole_head_by_hand() -> None:
    """Rows (1, 2) and (3, 4) for tokens 0 and 2; token 1 gets their mean, whose logit lies between."""
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    whole = whole_head(rows, torch.tensor([0, 2]), 3)
    assert whole.tolist() == [[1.0, 2.0], [2.0, 3.0], [3.0, 4.0]]
    assert (whole @ torch.tensor([1.0, -1.5])).tolist() == [-2.0, -2.5, -3.0]


@pytest.mark.parametrize("projection", ["own", "shared"])
def test_heads_are_written_whole(tmp_path: Path, target: Target, projection: str) -> None:
    """Without vLLM's token map, which its loader stops at."""
    draft = tiny_medusa(target, VOCABULARY, projection=projection)
    config = written(tmp_path / "e", draft, target)
    tensors = load_file(tmp_path / "e" / "model.safetensors")
    assert not {"token_map", "truncated_vocab_size"} & {*tensors, *config}
    assert len([name for name in tensors if "lm_heads" in name]) == (2 if projection == "own" else 1)
    trained = projections(draft)[0]
    torch.testing.assert_close(tensors["lm_heads.0.weight"][VOCABULARY], trained)
    torch.testing.assert_close(tensors["lm_heads.0.weight"][1], trained.mean(0))
    assert "5 tokens are written over all 64" in str(LAYOUTS["vllm"](draft, target).needs)


def test_another_filling_of_the_head_is_caught(tmp_path: Path, target: Target) -> None:
    """Rows outside the vocabulary that can win would draft what the trained heads never do."""
    draft = tiny_medusa(target, VOCABULARY)
    written(tmp_path / "e", draft, target)
    rows = load_file(tmp_path / "e" / "model.safetensors")["lm_heads.0.weight"]
    rows[1] = 3 * rows[63]
    edit_tensors(tmp_path / "e", {"lm_heads.0.weight": rows})
    with pytest.raises(RuntimeError, match=r"head 1: a token outside the draft's vocabulary is likelier"):
        check(tmp_path / "e", draft, target)


def test_a_token_map_is_caught(tmp_path: Path, target: Target) -> None:
    draft = tiny_medusa(target, VOCABULARY, projection="shared")
    written(tmp_path / "e", draft, target)
    edit(tmp_path / "e", truncated_vocab_size=5)
    with pytest.raises(RuntimeError, match="no truncated vocabulary"):
        check(tmp_path / "e", draft, target)


# ---- damage ----


def test_swapped_heads_are_caught(tmp_path: Path, target: Target) -> None:
    draft = tiny_medusa(target)
    written(tmp_path / "e", draft, target)
    tensors = load_file(tmp_path / "e" / "model.safetensors")
    first, second = "lm_heads.0.weight", "lm_heads.1.weight"
    edit_tensors(tmp_path / "e", {first: tensors[second], second: tensors[first]})
    with pytest.raises(RuntimeError, match="logits of head 1 differ"):
        check(tmp_path / "e", draft, target)


def test_biases_dropped_silently_are_caught(tmp_path: Path, target: Target) -> None:
    """Without the flag vLLM makes layers without biases and passes over those in the file."""
    draft = tiny_medusa(target)
    written(tmp_path / "e", draft, target)
    edit(tmp_path / "e", medusa_fc_bias=None)
    with pytest.raises(RuntimeError, match=r"no reader asks for blocks\.0\.layers\.0\.bias"):
        check(tmp_path / "e", draft, target)


def test_missing_and_stray_tensors_are_caught(tmp_path: Path, target: Target) -> None:
    draft = tiny_medusa(target)
    written(tmp_path / "e", draft, target)
    bias = load_file(tmp_path / "e" / "model.safetensors")["blocks.1.layers.0.bias"]
    edit_tensors(tmp_path / "e", {"blocks.1.layers.0.bias": None})
    with pytest.raises(RuntimeError, match=r"blocks\.1\.layers\.0\.bias is missing"):
        check(tmp_path / "e", draft, target)
    edit_tensors(tmp_path / "e", {"blocks.1.layers.0.bias": bias, "stray": torch.ones(1)})
    with pytest.raises(RuntimeError, match="no reader asks for stray"):
        check(tmp_path / "e", draft, target)


def test_a_truncated_file_is_caught(tmp_path: Path, target: Target) -> None:
    draft = tiny_medusa(target)
    written(tmp_path / "e", draft, target)
    path = tmp_path / "e" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        check(tmp_path / "e", draft, target)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"vocab_size": 63}, r"lm_heads\.0\.weight is \[64, 32\]"),
        ({"hidden_size": None}, r"blocks\.0\.layers\.0\.bias is \[32\] and config.json makes it \[4096\]"),
        ({"num_heads": 1}, r"no reader asks for blocks\.1"),
        ({"num_attention_heads": 4}, "2 numbers of heads"),
    ],
)
def test_a_wrong_config_is_caught(tmp_path: Path, target: Target, change: dict[str, Any], fault: str) -> None:
    draft = tiny_medusa(target)
    written(tmp_path / "e", draft, target)
    edit(tmp_path / "e", **change)
    with pytest.raises(RuntimeError, match=fault):
        check(tmp_path / "e", draft, target)


def test_a_wrong_layer_count_is_caught_in_the_authors_layout(tmp_path: Path, target: Target) -> None:
    draft = tiny_medusa(target, layers=2)
    written(tmp_path / "e", draft, target, "tensorrt_llm")
    edit(tmp_path / "e", medusa_num_layers=1)
    with pytest.raises(RuntimeError, match=r"0\.1\.weight is missing"):
        check(tmp_path / "e", draft, target)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("network", "flag"),
    [({"heads": 2}, "network.heads=5"), ({"heads": 5, "layers": 2}, "network.layers=1")],
)
def test_the_authors_code_cannot_say_everything(target: Target, network: dict[str, Any], flag: str) -> None:
    draft = tiny_medusa(target, **network)
    refuse("vllm", draft)
    refuse("tensorrt_llm", draft)
    with pytest.raises(CheckpointError, match=flag):
        refuse("medusa", draft)


def test_tensorrt_knows_few_targets(target: Target) -> None:
    draft = tiny_medusa(target)
    target.config.model_type = "gemma3"
    with pytest.raises(CheckpointError, match="of type gemma3"):
        LAYOUTS["tensorrt_llm"](draft, target)


# ---- the commands ----


def test_serve_commands(tmp_path: Path, target: Target) -> None:
    words = shlex.split(serve("vllm", "some/target", tmp_path / "a b", 2))
    assert json.loads(words[-1]) == {
        "method": "medusa",
        "model": str(tmp_path / "a b"),
        "num_speculative_tokens": 2,
    }
    written(tmp_path / "t", tiny_medusa(target, layers=2), target, "tensorrt_llm")
    convert, build, run = serve("tensorrt_llm", "some/target", tmp_path / "t", 2).splitlines()
    assert "--num_medusa_heads 2 --num_medusa_layers 2 --dtype float32" in convert
    assert "--speculative_decoding_mode medusa" in build
    assert "--medusa_choices '[[0], [0, 0]]'" in run
