"""DFlash for vLLM: z-lab's names, with the draft's own head, vocabulary and mask."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.errors import CheckpointError
from models.dflash import DFlash, NetworkConfig
from models.export import dflash
from models.export.dflash import LAYOUTS, check, refuse, serve, vllm
from models.target import Target
from tests.conftest import tiny_tokenizer
from tests.models import exports
from tests.models.exports import edit, edit_tensors, spare_target

written = partial(exports.written, dflash)


def made(target: Target, **network: Any) -> DFlash:
    settings = {"layers": 2, "block_size": 4, "draft_vocab_size": 48, "taps": [1, 4, 7], **network}
    draft = DFlash.build(NetworkConfig(**settings), target)
    if not draft.full_vocabulary:
        draft.set_vocabulary(torch.arange(draft.shape.draft_vocab_size))
    draft.initialise(0, target)
    return draft.requires_grad_(False)


@pytest.fixture
def target() -> Target:
    return spare_target(max_position_embeddings=8192)


@pytest.fixture
def draft(target: Target) -> DFlash:
    return made(target)


def test_layout(tmp_path: Path, target: Target, draft: DFlash) -> None:
    config, tensors = written(tmp_path / "e", draft, target)
    assert (config["architectures"], config["model_type"]) == (["DFlashDraftModel"], "qwen3")
    assert config["dflash_config"] == {"mask_token_id": 60, "target_layer_ids": [0, 3, 6], "causal": False}
    assert (config["block_size"], config["num_target_layers"], config["draft_vocab_size"]) == (4, 8, 48)
    assert {"d2t", "t2d", "lm_head.weight", "hidden_norm.weight", "embed_tokens.weight"} < set(tensors)
    assert "layers.1.self_attn.k_norm.weight" in tensors
    assert torch.equal(tensors["embed_tokens.weight"][60], draft.mask_embedding[0])


def test_full_vocabulary(tmp_path: Path, target: Target) -> None:
    _, tensors = written(tmp_path / "e", made(target, draft_vocab_size=None), target)
    assert not {"d2t", "t2d"} & set(tensors)


def test_a_whole_block_is_asked_for(tmp_path: Path, target: Target, draft: DFlash) -> None:
    """Whatever is asked for: a block of four rows drafts three tokens."""
    written(tmp_path / "e", draft, target)
    settings = json.loads(shlex.split(serve("vllm", "t", tmp_path / "e", 8))[-1])
    assert (settings["method"], settings["num_speculative_tokens"]) == ("dflash", 3)
    assert "draft 3 tokens a round: blocks are of 4 rows" in str(vllm(draft, target).needs)


def test_refusal(target: Target) -> None:
    assert list(LAYOUTS) == ["vllm"]
    with pytest.raises(CheckpointError, match=r"hidden_states\[0\] is none.*method\.network\.taps=null"):
        refuse("vllm", made(target, taps=[0, 4]))


# ---- deliberate damage ----


@pytest.fixture
def folder(tmp_path: Path, target: Target, draft: DFlash) -> Path:
    written(tmp_path / "e", draft, target)
    return tmp_path / "e"


def test_a_layer_id_off_by_one(folder: Path, target: Target, draft: DFlash) -> None:
    inner = {"mask_token_id": 60, "target_layer_ids": [1, 4, 7]}  # as if hidden_states indices
    edit(folder, dflash_config=inner)
    with pytest.raises(RuntimeError, match=r"vLLM would tap hidden_states \[2, 5, 8\], .* reads \[1, 4, 7\]"):
        check(folder, draft, target)


def test_an_absolute_d2t(tmp_path: Path, target: Target) -> None:
    draft = made(target, draft_vocab_size=3)
    draft.set_vocabulary(torch.tensor([5, 6, 9]))
    written(tmp_path / "e", draft, target)
    edit_tensors(tmp_path / "e", d2t=torch.tensor([5, 6, 9]))
    with pytest.raises(RuntimeError, match="d2t gives other target ids"):
        check(tmp_path / "e", draft, target)


@pytest.mark.parametrize("name", ["norm", "hidden_norm", "layers.1.self_attn.k_norm"])
def test_a_missing_norm(folder: Path, target: Target, draft: DFlash, name: str) -> None:
    edit_tensors(folder, **{f"{name}.weight": None})
    with pytest.raises(RuntimeError, match=f" {name}.weight is missing"):
        check(folder, draft, target)


def test_a_swapped_fc_order(folder: Path, target: Target, draft: DFlash) -> None:
    edit_tensors(folder, **{"fc.weight": draft.fc.weight.roll(32, dims=1)})
    named = r"fc reads hidden_states\[7\] from the columns where the draft's reads hidden_states\[1\]"
    with pytest.raises(RuntimeError, match=named):
        check(folder, draft, target)


def test_a_random_embedding(folder: Path, target: Target, draft: DFlash) -> None:
    edit_tensors(folder, **{"embed_tokens.weight": torch.randn(64, 32)})
    with pytest.raises(RuntimeError, match="embed_tokens is not the target's"):
        check(folder, draft, target)


def test_the_targets_row_in_place_of_the_masks(folder: Path, target: Target, draft: DFlash) -> None:
    edit_tensors(folder, **{"embed_tokens.weight": target.embedding})
    with pytest.raises(RuntimeError, match="embed_tokens is not the target's"):
        check(folder, draft, target)


def test_causal_blocks(folder: Path, target: Target, draft: DFlash) -> None:
    """What a vLLM makes of `sliding_window_non_causal: false` in the speculators format."""
    inner = {"mask_token_id": 60, "target_layer_ids": [0, 3, 6], "causal": True}
    edit(folder, dflash_config=inner)
    with pytest.raises(RuntimeError, match="logits of a block at position 6 differ"):
        check(folder, draft, target)


def test_another_block_size(folder: Path, target: Target, draft: DFlash) -> None:
    edit(folder, block_size=8)
    with pytest.raises(RuntimeError, match="its blocks are of 8 rows, and the draft's of 4"):
        check(folder, draft, target)


def test_another_tokenizer(folder: Path, target: Target, draft: DFlash) -> None:
    tiny_tokenizer(59).save_pretrained(folder)
    with pytest.raises(RuntimeError, match="tokenizer"):
        check(folder, draft, target)


def test_a_truncated_file(folder: Path, target: Target, draft: DFlash) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        check(folder, draft, target)
