"""EAGLE-3 for vLLM and SGLang: six traps, rotary variants, refusals, and kills in the middle. The folders of
other engines and deliberate damage are in test_export_eagle3.py."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig

from configs.errors import CheckpointError, StorageError
from models.eagle3 import Eagle3
from models.export.eagle3 import LAYOUTS, check, check_steps, refuse, serve, sglang, vllm
from models.export.layout import Layout, write_export
from models.export.reference import Eagle3Reading, inverse_frequencies, rope_fields
from models.target import Target
from tests.conftest import tiny_draft, tiny_target

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LAYER_0 = [
    "input_layernorm",
    "hidden_norm",
    "post_attention_layernorm",
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
]


def written(
    folder: Path, draft: Eagle3, target: Target, engine: str = "vllm"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config, tensors) of a verified export."""
    write_export(
        folder, LAYOUTS[engine](draft, target), target.tokenizer, lambda where: check(where, draft, target)
    )
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Sets tensors (dots written as __), or removes those set to None."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name.replace("__", "."): value for name, value in changes.items()}
    save_file(
        {name: value for name, value in tensors.items() if value is not None}, folder / "model.safetensors"
    )


def test_names_and_nothing_stray(tmp_path: Path, target: Target, draft: Eagle3) -> None:
    shared = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    for engine, layer in (("vllm", "layers.0"), ("sglang", "midlayer")):
        _, tensors = written(tmp_path / engine, draft, target, engine)
        assert set(tensors) == shared | {f"{layer}.{name}.weight" for name in LAYER_0}


def test_the_config_names_the_network(tmp_path: Path, target: Target, draft: Eagle3) -> None:
    config, tensors = written(tmp_path / "e", draft, target)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert config["tie_word_embeddings"] is False
    assert (config["vocab_size"], config["draft_vocab_size"]) == (64, 48)
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert tensors["lm_head.weight"].shape == (48, 32)
    assert tensors["fc.weight"].shape == (32, 96)
    loaded = LlamaConfig.from_pretrained(tmp_path / "e")  # what both engines load it with
    assert (loaded.num_hidden_layers, loaded.head_dim, loaded.num_key_value_heads) == (1, 8, 2)


def test_tokenizer_lies_beside(tmp_path: Path, target: Target, draft: Eagle3) -> None:
    written(tmp_path / "e", draft, target)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "e")
    assert tokenizer.get_vocab() == target.tokenizer.get_vocab()


# ---- trap 1: two numberings of the tapped layers ----


def test_layer_ids_in_both_conventions(tmp_path: Path) -> None:
    """HF hidden_states[2] is the output of layer 1: vLLM reads a top-level 2, SGLang 1 in eagle_config."""
    target = tiny_target(layers=8)
    config, _ = written(tmp_path / "e", tiny_draft(target), target)
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
    }


# ---- trap 2: which hidden state, before or after a norm, runs through the network ----


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_each_norm_flag_is_written_and_read(tmp_path: Path, target: Target, flag: str) -> None:
    """The folder passes with the flag as it is and fails with it turned: the comparison sees where norms
    stand."""
    network: dict[str, Any] = {flag: True}
    draft = tiny_draft(target, **network)
    with torch.no_grad():  # gains of one would hide a norm that is applied twice
        draft.norm.weight.mul_(3)
    config, _ = written(tmp_path / "e", draft, target)
    assert config[flag] is True
    edit(tmp_path / "e", **{flag: False})
    with pytest.raises(RuntimeError, match="differ"):
        check(tmp_path / "e", draft, target)


# ---- trap 3: the default of norm_before_residual differs between readers ----


def test_norm_before_residual_is_always_written(tmp_path: Path, target: Target, draft: Eagle3) -> None:
    for engine in ("vllm", "sglang", "speculators", "tensorrt_llm", "llama_cpp"):
        config, _ = written(tmp_path / engine, draft, target, engine)
        assert config["norm_before_residual"] is False


# ---- trap 4: norm_output is not portable between versions ----


def test_norm_output_names_the_engine_version_it_needs(target: Target, draft: Eagle3) -> None:
    assert vllm(draft, target).needs is None
    needing = tiny_draft(target, norm_output=True)
    assert "norm_output: use vLLM 0.32" in str(vllm(needing, target).needs)
    assert "norm_output: use SGLang 0.5.23" in str(sglang(needing, target).needs)


# ---- trap 5: d2t holds offsets ----


def test_d2t_is_an_offset_and_t2d_a_membership(tmp_path: Path, target: Target) -> None:
    draft = tiny_draft(target, vocabulary=[0, 2, 3, 7, 63])
    _, tensors = written(tmp_path / "e", draft, target)
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["d2t"].tolist() == [0, 1, 1, 4, 59]  # 0-0, 2-1, 3-2, 7-3, 63-4
    assert tensors["t2d"].nonzero()[:, 0].tolist() == [0, 2, 3, 7, 63]
    assert len(tensors["t2d"]) == 64


def test_absolute_d2t_is_caught(tmp_path: Path, target: Target) -> None:
    draft = tiny_draft(target, vocabulary=[0, 2, 3, 7, 63])
    written(tmp_path / "e", draft, target)
    edit_tensors(tmp_path / "e", d2t=torch.tensor([0, 2, 3, 7, 63]))
    with pytest.raises(RuntimeError, match="d2t"):
        check(tmp_path / "e", draft, target)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_full_vocabulary_has_no_map_and_keeps_its_size(tmp_path: Path, target: Target, engine: str) -> None:
    draft = tiny_draft(target, draft_vocab_size=None)
    config, tensors = written(tmp_path / "e", draft, target, engine)
    assert not {"d2t", "t2d"} & set(tensors)
    assert config["draft_vocab_size"] == 64  # null would make SGLang take the target's head
    assert Eagle3Reading(tmp_path / "e", target.embedding).vocabulary().tolist() == list(range(64))


# ---- trap 6: the rotary table is sized by max_position_embeddings ----


def test_context_length_is_the_targets(tmp_path: Path) -> None:
    target = tiny_target(max_position_embeddings=8192)
    config, _ = written(tmp_path / "e", tiny_draft(target), target)
    assert config["max_position_embeddings"] == 8192


# ---- rotary embeddings ----


@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_scaled_rope_round_trip(tmp_path: Path, rope: dict[str, Any]) -> None:
    """Compared up to position 5000; readers of old and new fields, and transformers, find the same
    frequencies."""
    target = tiny_target(max_position_embeddings=8192, rope_parameters=rope)
    draft = tiny_draft(target)
    config, _ = written(tmp_path / "e", draft, target)
    for reader in ("old", "new"):
        frequencies, magnitude = inverse_frequencies(rope_fields(config, reader), 8)
        torch.testing.assert_close(frequencies, draft.rotary.frequencies)
        assert magnitude == pytest.approx(draft.rotary.scaling)
    assert config["rope_theta"] == rope["rope_theta"]
    assert config["rope_scaling"] == {name: value for name, value in rope.items() if name != "rope_theta"}
    loaded = LlamaConfig.from_pretrained(tmp_path / "e")
    assert isinstance(loaded.rope_parameters, dict)
    assert {name: loaded.rope_parameters[name] for name in rope} == rope


def test_frequencies_worked_out_by_hand() -> None:
    """theta 10000, 4 dims: 1 and 0.01. Original context 1024: 1024 / 2 pi = 163 turns, and 1.63.

    llama3 (low 1, high 4): 163 turns are kept; 1.63 blend with (1.63 - 1) / 3 = 0.2099 kept. yarn: dimension
    of 32 turns is 4 ln(163 / 32) / (2 ln 10000) = 0.35, of 1 turn 1.106; floor 0, ceil 2: the second of the
    two is half stretched. Magnitude 0.1 ln 8 + 1 = 1.2079.
    """
    frequencies, magnitude = inverse_frequencies({**LLAMA3, "rope_theta": 10000.0}, 4)
    assert frequencies.tolist() == pytest.approx([1.0, 0.01 * (0.20992 + 0.79008 / 8)], rel=1e-4)
    assert magnitude == 1.0
    frequencies, magnitude = inverse_frequencies(YARN, 4)
    assert frequencies.tolist() == pytest.approx([1.0, 0.01 * (0.5 + 0.5 / 8)], rel=1e-6)
    assert magnitude == pytest.approx(1.20794, rel=1e-5)


def test_a_dropped_scaling_is_caught(tmp_path: Path) -> None:
    target = tiny_target(max_position_embeddings=8192, rope_parameters=LLAMA3)
    draft = tiny_draft(target)
    written(tmp_path / "e", draft, target)
    edit(tmp_path / "e", rope_scaling=None)
    with pytest.raises(RuntimeError, match="old form"):
        check(tmp_path / "e", draft, target)
    edit(tmp_path / "e", rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    with pytest.raises(RuntimeError, match="new form"):
        check(tmp_path / "e", draft, target)


def test_attention_turns_with_position(tmp_path: Path, target: Target, draft: Eagle3) -> None:
    """The same network with another theta gives other states once its attention is sharp."""
    draft.requires_grad_(False)
    for part in ("q", "k"):
        draft.get_parameter(f"layers.0.self_attn.{part}_proj.weight").mul_(50)
    written(tmp_path / "e", draft, target)
    edit(tmp_path / "e", rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    with pytest.raises(RuntimeError, match="states at position 5, draft step 1 differ"):
        check_steps(Eagle3Reading(tmp_path / "e", target.embedding), draft, start=0)


def partial_draft(target: Target) -> Eagle3:
    """A draft that rotates a quarter of each head. The tiny Llama cannot, so its shape is changed."""
    from dataclasses import replace

    draft = tiny_draft(target)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    made = Eagle3(replace(draft.shape, rope_parameters=rope), target.embedding)
    made.load_state_dict(draft.state_dict())
    return made


def test_partial_rotary(tmp_path: Path, target: Target) -> None:
    draft = partial_draft(target)
    config, _ = written(tmp_path / "e", draft, target)
    assert config["partial_rotary_factor"] == config["rope_parameters"]["partial_rotary_factor"] == 0.25
    edit(tmp_path / "e", partial_rotary_factor=1.0)
    with pytest.raises(RuntimeError, match="old form"):
        check(tmp_path / "e", draft, target)
    edit(tmp_path / "e", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    with pytest.raises(RuntimeError, match="new form"):
        check(tmp_path / "e", draft, target)


# ---- what else is verified ----


def test_more_layers(tmp_path: Path, target: Target) -> None:
    _, tensors = written(tmp_path / "e", tiny_draft(target, layers=2), target)
    assert "layers.1.input_layernorm.weight" in tensors
    assert "layers.1.hidden_norm.weight" not in tensors
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (32, 32)


def test_other_taps(tmp_path: Path, target: Target) -> None:
    draft = tiny_draft(target, taps=[1, 3], fc_norm=True)
    config, tensors = written(tmp_path / "e", draft, target)
    assert config["num_aux_hidden_states"] == 2
    assert tensors["fc.weight"].shape == (32, 64)


def test_weights_are_written_in_the_targets_dtype(tmp_path: Path) -> None:
    target = tiny_target(dtype=torch.bfloat16)
    draft = tiny_draft(target).to(torch.bfloat16)
    config, tensors = written(tmp_path / "e", draft, target)
    assert config["dtype"] == "bfloat16"
    assert tensors["fc.weight"].dtype == torch.bfloat16


def test_stray_missing_and_changed_tensors_are_caught(tmp_path: Path, target: Target, draft: Eagle3) -> None:
    folder = tmp_path / "e"
    _, tensors = written(folder, draft, target)
    edit_tensors(folder, mask_hidden=torch.ones(1))
    with pytest.raises(RuntimeError, match="no reader asks for mask_hidden"):
        check(folder, draft, target)
    edit_tensors(folder, mask_hidden=None, fc__weight=tensors["fc.weight"] * 1.001)
    with pytest.raises(RuntimeError, match="fused taps differ"):
        check(folder, draft, target)
    edit_tensors(folder, fc__weight=tensors["fc.weight"], norm__weight=None)
    with pytest.raises(RuntimeError, match=r" norm\.weight is missing"):
        check(folder, draft, target)


def test_a_foreign_embedding_is_caught(tmp_path: Path, target: Target, draft: Eagle3) -> None:
    layout = vllm(draft, target, embedding=True)
    write_export(tmp_path / "e", layout, target.tokenizer, lambda where: check(where, draft, target))
    edit_tensors(tmp_path / "e", embed_tokens__weight=torch.randn(64, 32))
    with pytest.raises(RuntimeError, match="embed_tokens"):
        check(tmp_path / "e", draft, target)


def test_nothing_is_kept_when_the_check_fails(tmp_path: Path, target: Target, draft: Eagle3) -> None:
    layout = vllm(draft, target)
    wrong = Layout({**layout.tensors, "stray": torch.ones(1)}, layout.config)
    with pytest.raises(RuntimeError, match="stray"):
        write_export(tmp_path / "e", wrong, target.tokenizer, lambda where: check(where, draft, target))
    assert list(tmp_path.iterdir()) == []


# ---- what an engine cannot express ----


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"layers": 2}, "additional_layers"),
        ({"taps": [2]}, "one tap"),
        ({"taps": [0, 1, 2]}, r"hidden_states\[0\]"),
    ],
)
def test_sglang_refusals(target: Target, network: dict[str, Any], reason: str) -> None:
    draft = tiny_draft(target, **network)
    refuse("vllm", draft)
    with pytest.raises(CheckpointError, match=reason):
        refuse("sglang", draft)


def test_sglang_refuses_what_it_would_rotate_otherwise(target: Target) -> None:
    with pytest.raises(CheckpointError, match="rotates the whole head"):
        refuse("sglang", partial_draft(target))
    scaled = tiny_target(max_position_embeddings=8192, rope_parameters={**YARN, "attention_factor": 1.5})
    refuse("vllm", tiny_draft(scaled))
    with pytest.raises(CheckpointError, match="attention_factor"):
        refuse("sglang", tiny_draft(scaled))


def test_a_rope_that_cannot_be_checked_is_refused() -> None:
    target = tiny_target(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    for engine in LAYOUTS:
        with pytest.raises(CheckpointError, match="dynamic"):
            refuse(engine, tiny_draft(target))


# ---- the commands ----


def test_serve_commands(tmp_path: Path) -> None:
    words = shlex.split(serve("vllm", "some/target", tmp_path / "a b", 4))
    assert words[:3] == ["vllm", "serve", "some/target"]
    assert json.loads(words[-1]) == {
        "method": "eagle3",
        "model": str(tmp_path / "a b"),
        "num_speculative_tokens": 4,
    }
    words = shlex.split(serve("sglang", "some/target", tmp_path / "a b", 4))
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options["--speculative-draft-model-path"] == str(tmp_path / "a b")
    assert options["--speculative-num-steps"] == "4"
    assert options["--speculative-num-draft-tokens"] == "5"


# ---- killed in the middle ----

KILLED = """
import sys, time
from pathlib import Path
from models.export.layout import write_export
from models.export.eagle3 import check, vllm
from tests.conftest import tiny_draft, tiny_target

target = tiny_target()
draft = tiny_draft(target)

def slow(folder):
    check(folder, draft, target)
    print("written", flush=True)
    time.sleep(600)

write_export(Path(sys.argv[1]), vllm(draft, target), target.tokenizer, slow)
"""


def test_kill_leaves_no_half_folder_and_a_rerun_completes(
    tmp_path: Path, target: Target, draft: Eagle3
) -> None:
    """Killed after everything is written and checked, a moment before the rename."""
    folder = tmp_path / "export" / "vllm"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not folder.exists()
    assert len(list(folder.parent.iterdir())) == 1  # the hidden, unfinished one
    written(folder, draft, target)
    assert [path.name for path in folder.parent.iterdir()] == ["vllm"]


def test_an_earlier_export_is_replaced_and_nothing_else(
    tmp_path: Path, target: Target, draft: Eagle3
) -> None:
    written(tmp_path / "e", draft, target)
    config, _ = written(tmp_path / "e", tiny_draft(target, norm_output=True), target)
    assert config["norm_output"] is True
    (tmp_path / "e" / "precious").write_text("mine")
    with pytest.raises(StorageError, match="precious is no part of an export"):
        written(tmp_path / "e", draft, target)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match="is a file"):
        written(tmp_path / "file", draft, target)
    assert (tmp_path / "e" / "precious").read_text() == (tmp_path / "file").read_text() == "mine"


def test_unfinished_folders_of_running_exports_are_left_alone(
    tmp_path: Path, target: Target, draft: Eagle3
) -> None:
    running = tmp_path / f".e.{os.getppid()}.tmp"
    running.mkdir()
    written(tmp_path / "e", draft, target)
    assert running.exists()
    assert time.time() - running.stat().st_mtime < 600
