"""Drafts in others' formats: each convention is read as its toolkit means it, and damage is named."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from configs.errors import CheckpointError
from configs.schema import Embedding, ImportsConfig
from models import load_draft, save_draft
from models.draft import DraftNetwork
from models.eagle1 import Eagle1
from models.eagle1 import NetworkConfig as Eagle1Config
from models.eagle3 import Eagle3
from models.export.eagle3 import check_steps
from models.export.reference import Eagle3Reading, rope_fields, rotate, rotation
from models.imports import read_published
from models.medusa import Medusa
from models.medusa import NetworkConfig as MedusaConfig
from models.mlp_speculator import MlpSpeculator
from models.mlp_speculator import NetworkConfig as MlpConfig
from models.target import Target
from tests.conftest import tiny_draft, tiny_model, tiny_target, tiny_tokenizer

LAYERS = 8  # of the target, so that the default taps are [2, 4, 5]
FIXTURES = Path(__file__).with_name("published")


@pytest.fixture
def target() -> Target:
    return tiny_target(layers=LAYERS)


@pytest.fixture
def draft(target: Target) -> Eagle3:
    """With the draft vocabulary 0, 1, 2, 4, 5, 6, 8, ... of 64 tokens."""
    return tiny_draft(target, taps=[2, 4, 5], vocabulary=[i for i in range(64) if i % 4 != 3])


def publish(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], file: str = "") -> Path:
    """A folder with config.json and the tensors in `file`, model.safetensors if that is empty."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    contents = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    if file.endswith((".bin", ".pt")):
        torch.save(contents, folder / file)
    else:
        save_file(contents, folder / (file or "model.safetensors"))
    return folder


def llama(**changes: Any) -> dict[str, Any]:
    """The config.json of one Llama layer as wide as `tiny_target`'s, as trainers write it."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "vocab_size": 64,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "use_cache": True,
    }
    return config | changes


def authors_tensors(draft: Eagle3) -> dict[str, Tensor]:
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in draft.state_dict().items()}


def same(a: DraftNetwork, b: DraftNetwork) -> None:
    """Equal shapes and bits."""
    assert a.shape == b.shape
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# EAGLE-3


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_eagle3_as_its_authors_write_it(tmp_path: Path, target: Target, draft: Eagle3, file: str) -> None:
    folder = publish(tmp_path / "d", authors_tensors(draft), llama(draft_vocab_size=48), file)
    same(load_draft(folder, target), draft)
    assert sorted(path.name for path in folder.iterdir()) == sorted(["config.json", file])


def test_rotation_is_the_drafts_own(tmp_path: Path, draft: Eagle3) -> None:
    """config.json has no rope_theta, which is 10000 by Llama's default whatever the target's is."""
    target = tiny_target(layers=LAYERS, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    folder = publish(tmp_path / "d", authors_tensors(draft), llama(draft_vocab_size=48))
    assert load_draft(folder, target).shape.rope_parameters["rope_theta"] == 10000.0
    scaled = {"rope_theta": 8000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    folder = publish(tmp_path / "e", authors_tensors(draft), llama(draft_vocab_size=48, **scaled))
    rope = load_draft(folder, target).shape.rope_parameters
    assert (rope["rope_type"], rope["rope_theta"], rope["factor"]) == ("linear", 8000.0, 4.0)


def inner(*ids: int) -> dict[str, Any]:
    return {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(ids)}}


@pytest.mark.parametrize(
    ("config", "taps", "said"),
    [
        ({}, [2, 4, 5], "the default"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, [1, 3, 6], "hidden_states indices"),
        (inner(1, 3, 4), [2, 4, 5], "the outputs of layers [1, 3, 4]"),  # SGLang, SpecForge, modelopt
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5], **inner(1, 3, 4)}, [2, 4, 5], "hidden_states"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5], **inner(2, 4, 5)}, [2, 4, 5], "hidden_states"),
    ],
    ids=str,
)
def test_tapped_layers(
    tmp_path: Path,
    target: Target,
    draft: Eagle3,
    caplog: pytest.LogCaptureFixture,
    config: dict[str, Any],
    taps: list[int],
    said: str,
) -> None:
    folder = publish(tmp_path / "d", authors_tensors(draft), llama(draft_vocab_size=48, **config))
    with caplog.at_level(logging.WARNING, "models.imports"):
        assert load_draft(folder, target).taps == tuple(taps)
    assert f"read as eagle3; taps {taps}: {said}" in caplog.text


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5], **inner(3, 5, 6)}, "agree in no convention"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, r"2 taps are named, \[2, 4\], and fc.weight reads 3"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, r"taps=\[2, 4, 9\]: taps are ascending"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
    ],
    ids=str,
)
def test_tapped_layers_that_cannot_be(
    tmp_path: Path, target: Target, draft: Eagle3, config: dict[str, Any], fault: str
) -> None:
    folder = publish(tmp_path / "d", authors_tensors(draft), llama(draft_vocab_size=48, **config))
    with pytest.raises(CheckpointError, match=fault):
        load_draft(folder, target)


def test_what_a_file_says_wrongly_can_be_overridden(tmp_path: Path, target: Target, draft: Eagle3) -> None:
    folder = publish(tmp_path / "d", authors_tensors(draft), llama(draft_vocab_size=48, **inner(1, 3, 4)))
    choices = ImportsConfig(taps=[1, 3, 4], norm_before_residual=True)
    read, notes = read_published(folder, target, choices)
    assert (read.taps, read.shape.norm_before_residual) == ((1, 3, 4), True)
    assert notes == ["taps [1, 3, 4]: as asked for", "norm_before_residual=True as asked for"]


def speculators(**changes: Any) -> dict[str, Any]:
    layer = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    layer |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8}
    layer |= {"max_position_embeddings": 512, "rms_norm_eps": 1e-6}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 48,
        "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}},
    } | changes


@pytest.mark.parametrize(("written", "read"), [(None, True), (False, False), (True, True)])
def test_a_speculators_folder_that_is_silent_norms_the_residual(
    tmp_path: Path, target: Target, draft: Eagle3, written: bool | None, read: bool
) -> None:
    """As vLLM has it; a plain folder that is silent does not."""
    config = speculators(**({} if written is None else {"norm_before_residual": written}))
    folder = publish(tmp_path / "d", draft.state_dict() | {"embed_tokens.weight": target.embedding}, config)
    assert load_draft(folder, target).shape.norm_before_residual is read
    plain = publish(tmp_path / "e", draft.state_dict(), llama(draft_vocab_size=48))
    assert load_draft(plain, target).shape.norm_before_residual is False


def test_all_flags_of_speculators(tmp_path: Path, target: Target) -> None:
    names = ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm")
    flags: dict[str, Any] = dict.fromkeys(names, True)
    draft = tiny_draft(target, taps=[1, 3, 6], **flags)
    config = speculators(eagle_aux_hidden_state_layer_ids=[1, 3, 6], **flags)
    same(load_draft(publish(tmp_path / "d", draft.state_dict(), config), target), draft)


def test_norm_before_fc_in_eagle_config(tmp_path: Path, target: Target) -> None:
    """Where vLLM looks for it first."""
    draft = tiny_draft(target, taps=[2, 4, 5], norm_before_fc=True)
    config = llama(draft_vocab_size=48, eagle_config={"norm_before_fc": True})
    same(load_draft(publish(tmp_path / "d", draft.state_dict(), config), target), draft)


def modelopt(**changes: Any) -> dict[str, Any]:
    """config.json as Model-Optimizer's exporter (0.47) writes it, but for the sizes, which are
    `tiny_target`'s: three taps of 8 layers named by their outputs, YaRN, and its own settings."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.01,
        "intermediate_size": 64,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "5.24.0",
        "use_cache": True,
        "vocab_size": 64,
        "draft_vocab_size": 64,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 8,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_theta": 10000,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": 1,
        },
    } | changes


MODELOPT_TENSORS = [
    "fc.weight",
    "layers.0.hidden_norm.weight",
    "layers.0.input_layernorm.weight",
    "layers.0.mlp.down_proj.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.post_attention_layernorm.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.v_proj.weight",
    "lm_head.weight",
    "norm.weight",
]


class OldRopeReading(Eagle3Reading):
    """A reading by `rope_theta` and `rope_scaling`, where there are no `rope_parameters`."""

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, *rotation(rope_fields(self.config, "old"), positions, self.config["head_dim"]))


@torch.no_grad()
def test_eagle3_as_model_optimizer_writes_it(tmp_path: Path) -> None:
    """13 bfloat16 tensors over the whole vocabulary, without embedding. vLLM takes the same ids for
    hidden_states, one layer early.

    Theta 10000 over 8 dims: 1, 0.1, 0.01, 0.001. YaRN of 2048 positions: 326 turns; dimension of 32 turns is
    8 ln(326 / 32) / (2 ln 10000) = 1.008, of 1 turn 2.513; from 1 to 3, so the third of the four is half
    stretched by 32 and the last whole. Magnitude 0.1 ln 32 + 1 = 1.34657.
    """
    target = tiny_target(layers=LAYERS, max_position_embeddings=8192)
    draft = tiny_draft(target, taps=[2, 4, 5], draft_vocab_size=None)
    for part in ("q", "k"):  # sharp attention, which sees how it is turned
        draft.get_parameter(f"layers.0.self_attn.{part}_proj.weight").mul_(8)
    tensors = {name: tensor.bfloat16() for name, tensor in draft.state_dict().items()}
    assert sorted(tensors) == MODELOPT_TENSORS
    folder = publish(tmp_path / "d", tensors, modelopt())

    read, notes = read_published(folder, target, ImportsConfig())
    assert read.taps == (2, 4, 5)
    assert notes[0] == "taps [2, 4, 5]: the outputs of layers [1, 3, 4] in eagle_config"
    assert notes[1].startswith("turned by yarn as in config.json")
    assert read.embedding.data_ptr() == target.embedding.data_ptr()
    assert read.shape.draft_vocab_size == 64
    assert read.rotary.frequencies.tolist() == pytest.approx([1.0, 0.1, 0.01 * (0.5 + 0.5 / 32), 0.001 / 32])
    assert read.rotary.scaling == pytest.approx(1.34657, rel=1e-5)

    reading = OldRopeReading(folder, target.embedding)
    assert reading.taps(LAYERS) == {"vLLM": [1, 3, 4], "SGLang": [2, 4, 5]}
    for start in (0, 5000):
        check_steps(reading, read, start)
    reading.finish()


@torch.no_grad()
def test_a_draft_of_model_optimizer_without_its_scaling(tmp_path: Path) -> None:
    target = tiny_target(layers=LAYERS, max_position_embeddings=8192)
    draft = tiny_draft(target, taps=[2, 4, 5], draft_vocab_size=None)
    folder = publish(tmp_path / "d", draft.state_dict(), modelopt(rope_scaling=None))
    read, notes = read_published(folder, target, ImportsConfig())
    assert len(notes) == 1
    assert read.rotary.frequencies.tolist() == pytest.approx([1, 0.1, 0.01, 0.001])
    assert read.rotary.scaling == 1
    check_steps(OldRopeReading(folder, target.embedding), read, 0)


@pytest.mark.parametrize("with_t2d", [True, False])
def test_a_draft_vocabulary_in_other_words(
    tmp_path: Path, target: Target, draft: Eagle3, with_t2d: bool
) -> None:
    """d2t holds target ids instead of offsets, the last of them 62 at row 47: read as an offset, 109."""
    tensors = authors_tensors(draft) | {"d2t": draft.draft_ids}
    if not with_t2d:
        del tensors["t2d"]
    folder = publish(tmp_path / "d", tensors, llama(draft_vocab_size=48))
    same(load_draft(folder, target), draft)


def test_a_draft_vocabulary_out_of_order(tmp_path: Path, target: Target, draft: Eagle3) -> None:
    rows = torch.arange(47, -1, -1)
    tensors = authors_tensors(draft)
    tensors["d2t"] = draft.draft_ids[rows] - torch.arange(48)
    tensors["lm_head.weight"] = draft.lm_head.weight[rows]
    folder = publish(tmp_path / "d", tensors, llama(draft_vocab_size=48))
    same(load_draft(folder, target), draft)


def test_a_draft_vocabulary_that_contradicts_itself(tmp_path: Path, target: Target, draft: Eagle3) -> None:
    tensors = authors_tensors(draft)
    tensors["t2d"] = tensors["t2d"].roll(1)
    folder = publish(tmp_path / "d", tensors, llama(draft_vocab_size=48))
    with pytest.raises(CheckpointError, match="d2t names, neither as offsets nor as ids, the ids that t2d"):
        load_draft(folder, target)


def test_a_draft_without_a_head_takes_the_targets(tmp_path: Path, target: Target) -> None:
    draft = tiny_draft(target, taps=[2, 4, 5], draft_vocab_size=None)
    tensors = authors_tensors(draft)
    del tensors["lm_head.weight"]
    read = load_draft(publish(tmp_path / "d", tensors, llama(draft_vocab_size=None)), target)
    assert torch.equal(read.lm_head.weight, target.head.weight)


# A token embedding of the draft's own


def test_a_copy_of_the_targets_embedding_is_the_targets(
    tmp_path: Path, target: Target, draft: Eagle3
) -> None:
    tensors = authors_tensors(draft) | {"embed_tokens.weight": target.embedding.half()}
    read = load_draft(publish(tmp_path / "d", tensors, llama(draft_vocab_size=48)), target)
    assert read.embedding.data_ptr() == target.embedding.data_ptr()


def test_another_embedding_is_refused_and_can_be_chosen(
    tmp_path: Path, target: Target, draft: Eagle3
) -> None:
    other = target.embedding.clone()
    other[5, 0] += 0.1
    folder = publish(
        tmp_path / "d", authors_tensors(draft) | {"embed_tokens.weight": other}, llama(draft_vocab_size=48)
    )
    with pytest.raises(CheckpointError, match="another token embedding than tiny: 1 of 64 rows"):
        load_draft(folder, target)
    read, notes = read_published(folder, target, ImportsConfig(embedding=Embedding.own))
    assert torch.equal(read.embedding, other)
    assert "reads a token embedding of its own" in notes
    read, _ = read_published(folder, target, ImportsConfig(embedding=Embedding.target))
    assert torch.equal(read.embedding, target.embedding)


def test_a_draft_narrower_than_its_target_keeps_its_embedding_when_saved(tmp_path: Path) -> None:
    """hidden_size 16 beside a target's 32 (`target_hidden_size`), with its own embedding."""
    narrow, target = tiny_target(layers=LAYERS, hidden=16), tiny_target(layers=LAYERS)
    draft = tiny_draft(narrow, taps=[2, 4, 5])
    tensors = authors_tensors(draft) | {"embed_tokens.weight": narrow.embedding}
    tensors["fc.weight"] = torch.randn(16, 3 * 32)
    config = llama(draft_vocab_size=48, target_hidden_size=32, hidden_size=16, intermediate_size=32)
    read = load_draft(publish(tmp_path / "d", tensors, config), target)
    taps, tokens = torch.randn(1, 5, 96), torch.randint(64, (1, 5))
    state = read(read.fuse(taps), tokens, torch.arange(5)[None])
    draft.fc = read.fc
    assert torch.equal(state, draft(read.fuse(taps), tokens, torch.arange(5)[None]))
    save_draft(tmp_path / "native", read, target, {})
    again = load_draft(tmp_path / "native", target)
    same(again, read)
    assert torch.equal(again.embedding, narrow.embedding)


# Damage, and drafts for others


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda t: t.pop("norm.weight"), "norm.weight is missing"),
        (lambda t: t.update({"extra.weight": torch.ones(2)}), "extra.weight is unknown"),
        (
            lambda t: t.update({"midlayer.self_attn.q_proj.bias": torch.ones(32)}),
            "q_proj.bias is unknown. Leadout's eagle3 has no biases in attention and MLP",
        ),
        (
            lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)}),
            "has no norms of queries and keys",
        ),
        (lambda t: t.update({"norm.weight": torch.full((32,), torch.nan)}), "NaN in 1 tensors"),
        (lambda t: t.update({"fc.weight": torch.ones(16, 96)}), r"fc.weight is \[16, 96\] and should be"),
    ],
)
def test_damage_is_named(
    tmp_path: Path, target: Target, draft: Eagle3, damage: Callable[[dict[str, Tensor]], Any], fault: str
) -> None:
    tensors = authors_tensors(draft)
    damage(tensors)
    with pytest.raises(CheckpointError, match=fault):
        load_draft(publish(tmp_path / "d", tensors, llama(draft_vocab_size=48)), target)


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        ({"hidden": 64}, "hidden size of 32 and no token embedding of that width"),
        ({"vocab": 80}, "64 tokens and hidden size 32; tiny has 80 and 32"),
    ],
    ids=str,
)
def test_a_draft_for_another_target(tmp_path: Path, draft: Eagle3, other: dict[str, Any], fault: str) -> None:
    folder = publish(tmp_path / "d", authors_tensors(draft), llama(draft_vocab_size=48))
    with pytest.raises(CheckpointError, match=fault):
        load_draft(folder, tiny_target(layers=LAYERS, **other))


def test_files_that_cannot_be_read(tmp_path: Path, target: Target, draft: Eagle3) -> None:
    config = llama(draft_vocab_size=48)
    folder = publish(tmp_path / "d", authors_tensors(draft), config)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model.safetensors is truncated or damaged"):
        load_draft(folder, target)
    folder = publish(tmp_path / "e", authors_tensors(draft), config, "pytorch_model.bin")
    (folder / "pytorch_model.bin").write_bytes((folder / "pytorch_model.bin").read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        load_draft(folder, target)
    folder = publish(tmp_path / "f", authors_tensors(draft), config | {"quantization_config": {"bits": 4}})
    with pytest.raises(CheckpointError, match="has a quantization_config"):
        load_draft(folder, target)
    folder = publish(tmp_path / "g", {"x": torch.ones(1)}, {"model_type": "swin"})
    with pytest.raises(CheckpointError, match=r"no draft that Leadout knows \(config.json: swin; tensors: x"):
        load_draft(folder, target)


class Trap:
    """What a malicious pickle does when it is loaded."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("trap-was-sprung"),)


@pytest.mark.parametrize(
    "wrong",
    [{"hidden_size": "wide"}, {"num_attention_heads": 5}, {"vocab_size": None}, {"eagle_config": "x"}],
)
def test_a_config_that_makes_no_sense_is_one_sentence(
    tmp_path: Path, target: Target, draft: Eagle3, wrong: dict[str, Any]
) -> None:
    folder = publish(tmp_path / "d", authors_tensors(draft), llama(draft_vocab_size=48) | wrong)
    with pytest.raises(CheckpointError):
        load_draft(folder, target)


def test_a_damaged_pickle_is_one_sentence(tmp_path: Path, target: Target, draft: Eagle3) -> None:
    folder = publish(tmp_path / "d", authors_tensors(draft), llama(), "pytorch_model.bin")
    for contents in (b".", b"abc."):
        (folder / "pytorch_model.bin").write_bytes(contents)
        with pytest.raises(CheckpointError, match=r"truncated or damaged|no plain file of tensors"):
            load_draft(folder, target)


def test_a_pickle_is_never_run(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = publish(tmp_path / "d", {"x": torch.ones(1)}, llama(), "pytorch_model.bin")
    torch.save({"fc.weight": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="no plain file of tensors"):
        load_draft(folder, target)
    assert not (tmp_path / "trap-was-sprung").exists()


# EAGLE-1


def eagle1(target: Target, **network: Any) -> Eagle1:
    draft = Eagle1.build(Eagle1Config(**network), target)
    draft.initialise(0)
    return draft


@pytest.mark.parametrize("bias", [True, False])
def test_eagle1_as_its_authors_write_it(tmp_path: Path, target: Target, bias: bool) -> None:
    """The bias of fc is what the tensors say; config.json's `bias` is true where it is silent."""
    draft = eagle1(target, bias=bias)
    if bias:
        draft.fc.bias.data.normal_()
    tensors = draft.state_dict() | {"embed_tokens.weight": target.embedding}
    config = llama() | ({"bias": True} if bias else {})
    read = load_draft(publish(tmp_path / "d", tensors, config, "pytorch_model.bin"), target)
    same(read, draft)
    hidden, tokens = torch.randn(1, 4, 32), torch.randint(64, (1, 4))
    states = [one(hidden, tokens, torch.arange(4)[None]) for one in (read, draft)]
    assert torch.equal(read.logits(states[0]), target.lm_head(states[1]))


def test_eagle1_as_speculators_write_it(tmp_path: Path, target: Target) -> None:
    draft = eagle1(target, bias=True)
    tensors = {
        name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): tensor
        for name, tensor in draft.state_dict().items()
    }
    config = speculators(speculators_model_type="eagle", layernorms=False, fusion_bias=True)
    same(load_draft(publish(tmp_path / "d", tensors, config), target), draft)
    with pytest.raises(CheckpointError, match=r"layernorms is true. Such drafts \(HASS\)"):
        load_draft(publish(tmp_path / "e", tensors, config | {"layernorms": True}), target)


def test_eagle1_with_another_targets_head(tmp_path: Path, target: Target) -> None:
    tensors = eagle1(target).state_dict() | {"lm_head.weight": target.head.weight + 1}
    with pytest.raises(CheckpointError, match="another head than tiny"):
        load_draft(publish(tmp_path / "d", tensors, llama()), target)


# Medusa


def medusa(target: Target, **network: Any) -> Medusa:
    """Heads that differ from each other."""
    draft = Medusa.build(MedusaConfig(**network), target)
    draft.initialise(target)
    generator = torch.Generator().manual_seed(0)
    for weight in draft.parameters():
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    return draft


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_medusa_as_its_authors_write_it(
    tmp_path: Path, target: Target, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    """Three heads of two layers, of which config.json names two heads."""
    draft = medusa(target, heads=3, layers=2)
    tensors = {}
    for head in range(3):
        for layer in range(2):
            part = draft.get_submodule(f"blocks.{head}.layers.{layer}")
            tensors |= {f"{head}.{layer}.linear.{leaf}": getattr(part, leaf) for leaf in ("weight", "bias")}
        tensors[f"{head}.2.weight"] = draft.lm_heads[head].weight
    config = {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "x"}
    same(load_draft(publish(tmp_path / "d", tensors, config, file), target), draft)
    assert "has 3 heads, of which config.json names 2" in caplog.text


def test_medusa_as_vllm_writes_it(tmp_path: Path, target: Target) -> None:
    """One projection over the ids 3, 1 and 7, in that order; a block without a bias, which adds none."""
    draft = medusa(target, heads=2, projection="shared")
    tensors = {name: tensor for name, tensor in draft.state_dict().items() if "blocks" in name}
    del tensors["blocks.1.layers.0.bias"]
    rows = torch.randn(3, 32)
    tensors |= {"lm_heads.0.weight": rows, "token_map": torch.tensor([3, 1, 7])}
    config = {"model_type": "medusa", "hidden_size": 32, "vocab_size": 64, "num_heads": 2}
    config |= {"truncated_vocab_size": 3, "original_lm_head": True}
    prefixed = {f"medusa_heads.{name}": tensor for name, tensor in tensors.items()}
    whole = torch.zeros(64, 32).index_copy(0, tensors["token_map"], rows)
    for name, written in (("d", tensors), ("e", prefixed), ("f", tensors | {"lm_heads.0.weight": whole})):
        read = load_draft(publish(tmp_path / name, written, config), target)
        assert (read.shape.projection, read.draft_ids.tolist()) == ("shared", [1, 3, 7])
        hidden = torch.randn(1, 32)
        x = hidden + F.silu(F.linear(hidden, tensors["blocks.1.layers.0.weight"]))
        assert torch.allclose(read.logits(hidden)[:, 1], F.linear(x, rows[[1, 0, 2]]), atol=1e-6)


def test_medusa_for_a_wider_target(tmp_path: Path, target: Target) -> None:
    folder = publish(tmp_path / "d", medusa(target, heads=2).state_dict(), {"model_type": "medusa"})
    with pytest.raises(CheckpointError, match="made for a target with 64 tokens and hidden size 32"):
        load_draft(folder, tiny_target(hidden=64))


# The MLP speculator


@pytest.mark.parametrize("tied", [False, True])
def test_the_mlp_speculator_as_its_authors_write_it(tmp_path: Path, target: Target, tied: bool) -> None:
    """Tied weights stand under the names of all steps. The law is computed by the authors' formula, in which
    both the state and the token have a weight, and ours only the token: the norm takes the difference."""
    draft = MlpSpeculator.build(MlpConfig(heads=3, inner_dim=24, tie_weights=tied), target)
    draft.initialise(0)
    state = draft.state_dict()
    own = {"emb": 1, "head": 1, "ln": 1, "proj": 2} if tied else {}
    tensors = {}
    for part in ("emb.weight", "proj.weight", "ln.weight", "ln.bias", "head.weight"):
        kind, leaf = part.split(".")
        for step in range(3):
            first = min(step, own.get(kind, 3) - 1)
            tensors[f"speculator.{kind}.{step}.{leaf}"] = state[f"{kind}.{first}.{leaf}"]
    config = {
        "model_type": "mlp_speculator",
        "emb_dim": 32,
        "inner_dim": 24,
        "n_predict": 3,
        "vocab_size": 64,
    }
    config |= {"scale_input": True} | ({"tie_weights": True} if tied else {})
    read = load_draft(publish(tmp_path / "d", tensors, config), target)
    same(read, draft)

    hidden, tokens = torch.randn(5, 32), torch.randint(64, (3, 5))
    state_weight = 0.5 ** (0.5 / 3)
    token_weight = (1 - state_weight**2) ** 0.5 * (24 / 2) ** 0.5
    theirs = F.rms_norm(hidden, (32,), eps=1e-6) / 2**0.5
    ours = read.start(hidden, tokens[0])
    for step in range(3):
        emb, proj, gain, head = (
            tensors[f"speculator.{kind}.{step}.weight"] for kind in ("emb", "proj", "ln", "head")
        )
        mixed = theirs @ proj.T * state_weight + token_weight * emb[tokens[step]]
        normed = F.rms_norm(mixed, (24,), gain, eps=1e-6) + tensors[f"speculator.ln.{step}.bias"]
        theirs = F.gelu(normed)
        if step:
            ours = read.step(ours, tokens[step], step)
        assert torch.allclose(read.logits(ours, step), theirs @ head.T, atol=1e-4)


def test_tied_weights_that_are_not(tmp_path: Path, target: Target) -> None:
    draft = MlpSpeculator.build(MlpConfig(heads=2, inner_dim=24, tie_weights=False), target)
    draft.initialise(0)
    config = {"model_type": "mlp_speculator", "n_predict": 2, "vocab_size": 64, "tie_weights": True}
    with pytest.raises(CheckpointError, match=r"tie_weights is true, and emb.1.weight is not emb.0.weight"):
        load_draft(publish(tmp_path / "d", draft.state_dict(), config), target)


# Plain language models


def plain(folder: Path, model: LlamaForCausalLM, vocab: int = 64) -> Path:
    model.save_pretrained(folder)
    tiny_tokenizer(vocab).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_any_causal_model_with_the_targets_tokens(tmp_path: Path, target: Target, tied: bool) -> None:
    model = tiny_model(hidden=16, layers=2, heads=2, seed=7, tie_word_embeddings=tied)
    read = load_draft(plain(tmp_path / "d", model), target)
    tokens = torch.randint(64, (2, 9))
    assert read.shape.head == ("tied" if tied else "own")
    assert torch.allclose(read.logits(read(tokens)), model(tokens).logits, atol=1e-5)


def test_a_head_with_more_padding_than_the_targets(tmp_path: Path, target: Target) -> None:
    model = tiny_model(vocab=70, hidden=16, layers=2, heads=2, seed=7)
    read = load_draft(plain(tmp_path / "d", model), target)
    tokens = torch.randint(64, (1, 5))
    assert torch.allclose(read.logits(read(tokens)), model(tokens).logits[..., :64], atol=1e-5)


def test_other_tokens_are_refused(tmp_path: Path, target: Target) -> None:
    folder = plain(tmp_path / "d", tiny_model(hidden=16, heads=2))
    words = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(CheckpointError, match="2 tokens differ in their id, among them 'a'"):
        load_draft(folder, target)


# What the speculators library itself writes and computes


@pytest.mark.parametrize("name", ["own", "converted"])
def test_logits_are_those_of_the_speculators_library(name: str) -> None:
    """From the same hidden states and tokens, over three draft steps (published/make_speculators.py). At step
    k their row j sees the rows up to j of step 0, and itself at the steps between."""
    compare_logits(FIXTURES / name, [1, 4, 6] if name == "own" else [2, 4, 5])


def test_what_the_speculators_library_writes_now(tmp_path: Path) -> None:
    """Made anew by the library, where SPECULATORS_PYTHON names a Python that has it."""
    python = os.environ.get("SPECULATORS_PYTHON")
    if python is None:
        pytest.skip("SPECULATORS_PYTHON is not set")
    subprocess.run([python, FIXTURES / "make_speculators.py", tmp_path / "made"], check=True)
    compare_logits(tmp_path / "made" / "own", [1, 4, 6])
    compare_logits(tmp_path / "made" / "converted", [2, 4, 5])


@torch.no_grad()
def compare_logits(folder: Path, taps: list[int]) -> None:
    """A draft chain from each row but the last two gives the logits in logits.safetensors."""
    stored = load_file(folder / "model.safetensors")
    target = tiny_target(hidden=16, heads=2, kv_heads=1, layers=LAYERS)
    target.embedding.copy_(stored["embed_tokens.weight"])
    read = load_draft(folder, target)
    assert read.taps == tuple(taps)
    given = load_file(folder / "logits.safetensors")
    tokens, hidden = given["tokens"], read.fuse(given["hidden_states"][None])
    for row in range(len(tokens) - 2):
        chain = hidden[:, : row + 1]
        for step in range(3):
            length = row + 1 + step
            states = read(chain, tokens[None, :length], torch.arange(length)[None])
            logits = read.logits(states[:, -1:])[0, 0]
            assert torch.allclose(logits, given["logits"][step, row], atol=1e-4), (row, step)
            chain = torch.cat([chain, states[:, -1:]], dim=1)
