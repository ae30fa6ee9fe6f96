"""EAGLE-3's folders beside those for vLLM and SGLang (test_export.py): what each holds, who refuses what, and
that damage of any kind is caught and named."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.errors import CheckpointError
from models.eagle3 import Eagle3
from models.export import eagle3
from models.export.eagle3 import LAYOUTS, check, llama_cpp, portable, refuse, serve
from models.export.reference import flattened
from models.target import Target
from tests.conftest import tiny_draft, tiny_target, tiny_tokenizer
from tests.models import exports
from tests.models.exports import edit, edit_tensors

written = partial(exports.written, eagle3)

ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.fixture
def target() -> Target:
    """Deep enough for the engines' default taps: [2, 4, 5] of 8."""
    return tiny_target(layers=8, max_position_embeddings=8192)


# ---- the folders ----


def test_portable_says_nothing_that_one_of_its_readers_ignores(
    tmp_path: Path, target: Target, draft: Eagle3
) -> None:
    config, tensors = written(tmp_path / "e", draft, target, "portable")
    assert not [name for name in config if "norm_" in name and name != "rms_norm_eps"]
    assert not {"fc_norm", "eagle_config", "eagle_aux_hidden_state_layer_ids", "bias"} & set(config)
    assert (config["num_hidden_layers"], config["draft_vocab_size"]) == (1, 48)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert {name.split(".")[0] for name in tensors} == {
        *("fc", "midlayer", "norm", "lm_head", "embed_tokens", "d2t", "t2d")
    }
    assert torch.equal(tensors["embed_tokens.weight"], target.embedding)


def test_speculators_config(tmp_path: Path, target: Target, draft: Eagle3) -> None:
    config, tensors = written(tmp_path / "e", draft, target, "speculators")
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "tiny",
        "architectures": list(target.config.architectures or []),
    }
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"], layer["vocab_size"]) == ("llama", 1, 64)
    assert not {"draft_vocab_size", "norm_before_residual"} & set(layer)  # vLLM copies them from the outside
    assert "layers.0.hidden_norm.weight" in tensors
    assert "embed_tokens.weight" in tensors


def test_vllm_takes_norm_before_residual_for_true_in_a_speculators_config_that_is_silent() -> None:
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": {}, "draft_vocab_size": 1}
    assert flattened(config)["norm_before_residual"] is True
    assert (
        flattened({**config, "speculators_model_type": "peagle", "mask_token_id": 0})["norm_before_residual"]
        is False
    )


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_speculators_keeps_each_norm_flag(tmp_path: Path, target: Target, flag: str) -> None:
    network: dict[str, Any] = {flag: True}
    draft = tiny_draft(target, **network)
    with torch.no_grad():
        draft.norm.weight.mul_(3)
    config, _ = written(tmp_path / "e", draft, target, "speculators")
    assert config[flag] is True
    edit(tmp_path / "e", **{flag: False})
    with pytest.raises(RuntimeError, match="differ"):
        check(tmp_path / "e", draft, target)


def test_speculators_counts_other_taps_for_vllm(tmp_path: Path, target: Target) -> None:
    """vLLM takes three where neither num_aux_hidden_states nor eagle_config says otherwise."""
    draft = tiny_draft(target, taps=[1, 3])
    written(tmp_path / "e", draft, target, "speculators")
    config = json.loads((tmp_path / "e" / "config.json").read_text())
    del config["transformer_layer_config"]["num_aux_hidden_states"]
    (tmp_path / "e" / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match="makes fc read 3 hidden states, and the draft reads 2"):
        check(tmp_path / "e", draft, target)


@pytest.mark.parametrize("engine", ["llama_cpp", "portable"])
def test_llama_cpp_finds_the_original_context_beside_the_rotary_fields(engine: str) -> None:
    target = tiny_target(layers=8, max_position_embeddings=8192, rope_parameters=ROPE)
    draft = tiny_draft(target)
    assert LAYOUTS[engine](draft, target).config["original_max_position_embeddings"] == 1024
    assert "original_max_position_embeddings" not in LAYOUTS["vllm"](draft, target).config


def test_llama_cpp_needs_its_newer_converter_for_other_taps(target: Target, draft: Eagle3) -> None:
    assert llama_cpp(draft, target).needs is None
    assert "b11434" in str(llama_cpp(tiny_draft(target, taps=[1, 4, 5]), target).needs)


# ---- refusals name the setting to train with ----


@pytest.mark.parametrize(
    ("engine", "network", "reason"),
    [
        ("portable", {"norm_output": True}, r"no norm_output\. .*with method\.network\.norm_output=false"),
        ("portable", {"norm_before_residual": True}, r"method\.network\.norm_before_residual=false"),
        ("portable", {"norm_before_fc": True}, r"method\.network\.norm_before_fc=false"),
        ("portable", {"fc_norm": True}, r"method\.network\.fc_norm=false"),
        ("portable", {"layers": 2}, r"method\.network\.layers=1"),
        ("portable", {"draft_vocab_size": None}, r"method\.network\.draft_vocab_size="),
        ("speculators", {"norm_before_fc": True, "fc_norm": True}, "one of norm_before_fc and fc_norm"),
        ("tensorrt_llm", {"norm_before_residual": True}, "never reads norm_before_residual"),
        ("tensorrt_llm", {"norm_output": True}, r"not every release.*norm_output=false"),
        ("tensorrt_llm", {"layers": 2}, r"method\.network\.layers=1"),
        ("tensorrt_llm", {"taps": [0, 2, 4]}, r"hidden_states\[0\] is none"),
        ("llama_cpp", {"taps": [1, 2, 3, 4]}, r"three layers.*method\.network\.taps=null"),
        ("llama_cpp", {"fc_norm": True}, r"method\.network\.fc_norm=false"),
        ("llama_cpp", {"layers": 2}, r"method\.network\.layers=1"),
    ],
)
def test_refusals(target: Target, engine: str, network: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=f"for {engine}: .*{reason}"):
        refuse(engine, tiny_draft(target, **network))


def test_each_engine_takes_a_plain_draft(target: Target, draft: Eagle3) -> None:
    for engine in LAYOUTS:
        refuse(engine, draft)


def test_portable_refuses_taps_of_its_own(target: Target) -> None:
    draft = tiny_draft(target, taps=[1, 4, 5])
    refuse("vllm", draft)
    with pytest.raises(CheckpointError, match=r"train a draft with method\.network\.taps=\[2,4,5\]\."):
        portable(draft, target)


def test_llama_cpp_refuses_rotary_embeddings_that_its_converter_may_lose() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0}
    scaled = tiny_target(
        max_position_embeddings=8192, rope_parameters={**yarn, "original_max_position_embeddings": 1024}
    )
    refuse("vllm", tiny_draft(scaled))
    with pytest.raises(
        CheckpointError, match=r"not known to keep .* Leave llama_cpp out of export\.engines\.$"
    ):
        refuse("llama_cpp", tiny_draft(scaled))


# ---- commands ----


def test_tensorrt_llm_is_told_the_layers_by_their_outputs(
    tmp_path: Path, target: Target, draft: Eagle3
) -> None:
    written(tmp_path / "e", draft, target, "tensorrt_llm")
    command = serve("tensorrt_llm", "some/target", tmp_path / "e", 4)
    options = json.loads(shlex.split(command.split("<(echo ")[1].removesuffix(")"))[0])
    assert options["speculative_config"] == {
        "decoding_type": "Eagle3",
        "max_draft_len": 4,
        "speculative_model": str(tmp_path / "e"),
        "eagle3_layers_to_capture": [1, 3, 4],
    }


def test_llama_cpp_converts_beside_its_target(tmp_path: Path) -> None:
    _, convert, server = map(shlex.split, serve("llama_cpp", "some/target", tmp_path, 4).splitlines())
    assert convert[:3] == ["python", "convert_hf_to_gguf.py", str(tmp_path)]
    assert convert[convert.index("--target-model-dir") + 1] == "some/target"
    assert server[server.index("--spec-type") + 1] == "draft-eagle3"
    assert server[server.index("-md") + 1] == convert[convert.index("--outfile") + 1]


def test_portable_names_a_command_for_each_reader(tmp_path: Path) -> None:
    commands = serve("portable", "some/target", tmp_path, 4)
    for program in ("vllm serve", "sglang.launch_server", "llama-server", "optimum-cli export openvino"):
        assert program in commands


def test_openvino_reads_the_portable_folder(tmp_path: Path, target: Target, draft: Eagle3) -> None:
    assert LAYOUTS["openvino"](draft, target).config == portable(draft, target).config
    with pytest.raises(CheckpointError, match=r"for openvino: OpenVINO GenAI taps \[2, 4, 5\]"):
        LAYOUTS["openvino"](tiny_draft(target, taps=[1, 4, 5]), target)
    converted = serve("openvino", "some/target", tmp_path, 4).splitlines()[1]
    assert shlex.split(converted)[-2:] == ["--trust-remote-code", "draft-ov"]


# ---- deliberate damage ----


@pytest.fixture
def folder(tmp_path: Path, target: Target, draft: Eagle3) -> Path:
    """A sound export for vLLM."""
    written(tmp_path / "e", draft, target, "vllm")
    return tmp_path / "e"


def test_a_layer_id_off_by_one(folder: Path, target: Target, draft: Eagle3) -> None:
    edit(folder, eagle_aux_hidden_state_layer_ids=[1, 3, 4])  # as if named by outputs
    with pytest.raises(RuntimeError, match=r"vLLM would tap hidden_states \[1, 3, 4\], .* reads \[2, 4, 5\]"):
        check(folder, draft, target)


def test_a_nested_layer_id_off_by_one(folder: Path, target: Target, draft: Eagle3) -> None:
    edit(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]})  # as if hidden_states indices
    with pytest.raises(RuntimeError, match=r"SGLang would tap hidden_states \[3, 5, 6\]"):
        check(folder, draft, target)


def test_absent_layer_ids_mean_the_default(folder: Path, target: Target, draft: Eagle3) -> None:
    edit(folder, eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
    check(folder, draft, target)
    other = tiny_draft(target, taps=[1, 4, 5])
    written(folder, other, target, "vllm")
    edit(folder, eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
    with pytest.raises(RuntimeError, match=r"would tap hidden_states \[2, 4, 5\]"):
        check(folder, other, target)


def test_an_absolute_d2t(tmp_path: Path, target: Target) -> None:
    draft = tiny_draft(target, vocabulary=[0, 2, 3, 7, 63])
    written(tmp_path / "e", draft, target, "portable")
    edit_tensors(tmp_path / "e", d2t=torch.tensor([0, 2, 3, 7, 63]))
    with pytest.raises(RuntimeError, match=r"d2t gives other target ids \(it holds offsets"):
        check(tmp_path / "e", draft, target)


@pytest.mark.parametrize(
    "name",
    ["norm", *(f"layers.0.{n}" for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm"))],
)
def test_a_missing_norm(folder: Path, target: Target, draft: Eagle3, name: str) -> None:
    edit_tensors(folder, **{f"{name}.weight": None})
    with pytest.raises(RuntimeError, match=f" {name}.weight is missing"):
        check(folder, draft, target)


def test_a_swapped_fc_order(folder: Path, target: Target, draft: Eagle3) -> None:
    low, middle, high = draft.fc.weight.detach().split(32, dim=1)
    edit_tensors(folder, **{"fc.weight": torch.cat([high, middle, low], dim=1)})
    named = r"fc reads hidden_states\[5\] from the columns where the draft's reads hidden_states\[2\]"
    with pytest.raises(RuntimeError, match=named):
        check(folder, draft, target)


def test_another_tokenizer(folder: Path, target: Target, draft: Eagle3) -> None:
    tiny_tokenizer(63).save_pretrained(folder)
    with pytest.raises(RuntimeError, match="the tokenizer beside it is not the target's"):
        check(folder, draft, target)


def test_another_vocabulary(folder: Path, target: Target, draft: Eagle3) -> None:
    edit(folder, vocab_size=65)
    with pytest.raises(RuntimeError, match="its vocabulary has 65 tokens, and the target's 64"):
        check(folder, draft, target)


def test_another_draft_vocabulary(folder: Path, target: Target, draft: Eagle3) -> None:
    edit(folder, draft_vocab_size=47)
    with pytest.raises(RuntimeError, match=r"d2t is \[48\] and config.json makes it \[47\]"):
        check(folder, draft, target)


def test_a_truncated_file(folder: Path, target: Target, draft: Eagle3) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        check(folder, draft, target)


def test_a_random_embedding(tmp_path: Path, target: Target, draft: Eagle3) -> None:
    written(tmp_path / "e", draft, target, "portable")
    edit_tensors(tmp_path / "e", **{"embed_tokens.weight": torch.randn(64, 32)})
    with pytest.raises(RuntimeError, match="embed_tokens is not the target's"):
        check(tmp_path / "e", draft, target)


def test_a_bias_in_the_config(folder: Path, target: Target, draft: Eagle3) -> None:
    edit(folder, bias=True)
    with pytest.raises(RuntimeError, match=r"self_attn\.q_proj\.bias is missing"):
        check(folder, draft, target)


def test_a_short_rotary_table(folder: Path, target: Target, draft: Eagle3) -> None:
    edit(folder, max_position_embeddings=2048)
    with pytest.raises(RuntimeError, match="ends at position 2048, and the target's at 8192"):
        check(folder, draft, target)
