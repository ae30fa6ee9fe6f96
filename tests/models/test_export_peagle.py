"""P-EAGLE for vLLM, as a plain config and in the speculators format: a masked token's id, row and states."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.errors import CheckpointError
from models.export import peagle
from models.export.layout import write_export
from models.export.llama import mask_note, placeholder
from models.export.peagle import LAYOUTS, check, refuse, serve, speculators
from models.peagle import NetworkConfig, PEagle
from models.target import Target
from tests.conftest import tiny_model, tiny_tokenizer
from tests.models import exports
from tests.models.exports import edit, edit_tensors, spare_target

written = partial(exports.written, peagle)


def made(target: Target, **network: Any) -> PEagle:
    draft = PEagle.build(NetworkConfig(**{"layers": 2, "draft_vocab_size": 48, **network}), target)
    if not draft.full_vocabulary:
        draft.set_vocabulary(torch.arange(48))
    draft.initialise(0, target)
    return draft.requires_grad_(False)


@pytest.fixture
def target() -> Target:
    return spare_target(max_position_embeddings=8192)


@pytest.fixture
def draft(target: Target) -> PEagle:
    return made(target)


@pytest.mark.parametrize("engine", LAYOUTS)
def test_the_masked_token(tmp_path: Path, target: Target, draft: PEagle, engine: str) -> None:
    config, tensors = written(tmp_path / "e", draft, target, engine)
    assert config["mask_token_id"] == 60  # the first row that no token has
    assert tensors["mask_hidden"].shape == (1, 1, 96)
    assert torch.equal(tensors["embed_tokens.weight"][60], draft.mask_embedding[0])
    others = torch.arange(64) != 60
    assert torch.equal(tensors["embed_tokens.weight"][others], target.embedding[others])
    assert "mask_embedding" not in tensors


def test_both_configs(tmp_path: Path, target: Target, draft: PEagle) -> None:
    config, _ = written(tmp_path / "v", draft, target, "vllm")
    assert (config["architectures"], config["num_hidden_layers"]) == (["LlamaForCausalLMEagle3"], 2)
    config, _ = written(tmp_path / "s", draft, target, "speculators")
    assert config["architectures"] == ["PEagleSpeculator"]
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "peagle"


def test_norm_output_changes_nothing_in_one_forward(tmp_path: Path, target: Target) -> None:
    draft = made(target, norm_output=True)
    draft.norm.weight.mul_(3)
    for engine in LAYOUTS:
        written(tmp_path / engine, draft, target, engine)


def test_speculators_refuses_fc_norm(target: Target) -> None:
    """vLLM copies norm_before_fc from a P-EAGLE config in that format, and fc_norm not."""
    draft = made(target, fc_norm=True)
    refuse("vllm", draft)
    with pytest.raises(CheckpointError, match=r"drops fc_norm.*method\.network\.fc_norm=false"):
        refuse("speculators", draft)
    layout = speculators(draft, target)
    with pytest.raises(RuntimeError, match="features of a masked token differ"):
        write_export(Path("unused"), layout, target.tokenizer, lambda where: check(where, draft, target))


def test_the_command(tmp_path: Path) -> None:
    settings = json.loads(shlex.split(serve("vllm", "t", tmp_path, 5))[-1])
    assert (settings["method"], settings["parallel_drafting"]) == ("eagle3", True)
    assert settings["num_speculative_tokens"] == 5


# ---- the masked token's id ----


def test_a_special_token_without_a_use() -> None:
    """Ids 62 and 63: a special token that the template names, and one that nothing does."""
    tokenizer = tiny_tokenizer(61)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<filler>", "<|tool|>"]})
    tokenizer.add_tokens(["plain"])
    tokenizer.chat_template = f"{tokenizer.chat_template}<|tool|>"
    assert tokenizer.convert_tokens_to_ids(["<filler>", "<|tool|>", "plain"]) == [61, 62, 63]
    target = Target.wrap(tiny_model(64), tokenizer, name="tiny")
    assert placeholder(target) == 61
    assert mask_note(target, 61) == (
        "masked tokens are read as id 61 (<filler>, which is never to stand in a prompt)"
    )


def test_no_id_is_free() -> None:
    with pytest.raises(CheckpointError, match="every id of tiny may occur in text"):
        placeholder(Target.wrap(tiny_model(64), tiny_tokenizer(64), name="tiny"))


# ---- deliberate damage ----


@pytest.fixture
def folder(tmp_path: Path, target: Target, draft: PEagle) -> Path:
    written(tmp_path / "e", draft, target, "speculators")
    return tmp_path / "e"


def test_no_mask_hidden(folder: Path, target: Target, draft: PEagle) -> None:
    edit_tensors(folder, mask_hidden=None)
    with pytest.raises(RuntimeError, match="mask_hidden is missing"):
        check(folder, draft, target)


def test_another_mask_hidden(folder: Path, target: Target, draft: PEagle) -> None:
    edit_tensors(folder, mask_hidden=torch.randn(1, 1, 96))
    with pytest.raises(RuntimeError, match="features of a masked token differ"):
        check(folder, draft, target)


def test_a_mask_at_another_id(folder: Path, target: Target, draft: PEagle) -> None:
    edit(folder, mask_token_id=61)
    with pytest.raises(RuntimeError, match="embed_tokens is not the target's"):
        check(folder, draft, target)


def test_a_random_embedding(folder: Path, target: Target, draft: PEagle) -> None:
    edit_tensors(folder, **{"embed_tokens.weight": torch.randn(64, 32)})
    with pytest.raises(RuntimeError, match="embed_tokens is not the target's"):
        check(folder, draft, target)


def test_a_layer_id_off_by_one(folder: Path, target: Target, draft: PEagle) -> None:
    edit(folder, eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    with pytest.raises(RuntimeError, match=r"vLLM would tap hidden_states \[1, 3, 4\]"):
        check(folder, draft, target)
