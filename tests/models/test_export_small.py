"""Small drafts as plain models: what is written out, what transformers reads, and damage that is named."""

from __future__ import annotations

import json
import shlex
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.errors import CheckpointError, ConfigError
from models.export import gguf
from models.export.layout import write_export
from models.export.small import LAYOUTS, check, old_rope, plain, refuse, serve
from models.small import NetworkConfig, Small
from models.target import Target
from tests.conftest import tiny_target, tiny_tokenizer

VOCABULARY = [0, 2, 3, 7, 63]


def tiny_small(target: Target, vocabulary: list[int] | None = None, **network: Any) -> Small:
    """Two of the target's layers, its head changed so that no row is the target's."""
    size = None if vocabulary is None else len(vocabulary)
    settings = {"layers": 2, "draft_vocab_size": size, **network}
    draft = Small.build(NetworkConfig(**settings), target)
    if vocabulary is not None:
        draft.set_vocabulary(torch.tensor(vocabulary))
    draft.initialise(0, target)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return draft


def written(folder: Path, draft: Small, target: Target) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(config, tensors) of a verified export."""
    write_export(folder, plain(draft, target), target.tokenizer, lambda where: check(where, draft, target))
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def greedy(model: Any, tokens: list[int]) -> int:
    return int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())


def test_a_plain_folder(tmp_path: Path, target: Target) -> None:
    """Layers, norm, an embedding copied from the target, a head; a config that names its class."""
    config, tensors = written(tmp_path / "e", tiny_small(target), target)
    torch.testing.assert_close(tensors["model.embed_tokens.weight"], target.embedding)
    assert {"lm_head.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"} < set(tensors)
    assert not any("layers.2" in name for name in tensors)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["vocab_size"]) == (2, 64)
    assert config["tie_word_embeddings"] is False
    generation = json.loads((tmp_path / "e" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2]
    assert AutoTokenizer.from_pretrained(tmp_path / "e").get_vocab() == target.tokenizer.get_vocab()
    assert "leadout" not in config


def test_all_engines_read_the_same_files(target: Target) -> None:
    assert set(LAYOUTS) == {"vllm", "sglang", "llama_cpp", "openvino", "transformers"}
    for engine in LAYOUTS:
        refuse(engine, tiny_small(target))


@pytest.mark.parametrize(
    "network",
    [
        {"head": "tied", "embedding": "own"},
        {"head": "factored", "head_rank": 8},
        {"start": "scratch", "hidden_size": 16, "embedding": "own"},
    ],
    ids=["tied", "factored", "narrow"],
)
@pytest.mark.parametrize("vocabulary", [None, VOCABULARY], ids=["whole", "reduced"])
def test_every_kind_of_head_proposes_the_same(
    tmp_path: Path, target: Target, network: dict[str, Any], vocabulary: list[int] | None
) -> None:
    """transformers, which knows nothing of the draft's vocabulary, picks the token that the draft picks."""
    draft = tiny_small(target, vocabulary, **network)
    config, tensors = written(tmp_path / "e", draft, target)
    tied = network.get("head") == "tied" and vocabulary is None
    assert config["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in tensors) is not tied
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "e")
    for tokens in ([5, 9, 20], [63, 1], [7]):
        logits = draft.logits(draft(torch.tensor([tokens])))[0, -1]
        assert greedy(model, tokens) == int(draft.draft_ids[logits.argmax()])


def test_a_head_that_grew_is_said(target: Target) -> None:
    assert plain(tiny_small(target), target).needs is None
    assert "5 tokens is written over all 64" in str(plain(tiny_small(target, VOCABULARY), target).needs)
    factored = tiny_small(target, head="factored", head_rank=8)
    assert "multiplied out" in str(plain(factored, target).needs)


def test_a_factored_head_in_bfloat16_is_rounded_once(tmp_path: Path) -> None:
    target = tiny_target(dtype=torch.bfloat16)
    draft = tiny_small(target, head="factored", head_rank=8).to(torch.bfloat16)
    _, tensors = written(tmp_path / "e", draft, target)
    assert tensors["lm_head.weight"].dtype == torch.bfloat16


def test_rotary_parameters_in_both_forms(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
    target = tiny_target(max_position_embeddings=8192, rope_parameters=rope)
    config, _ = written(tmp_path / "e", tiny_small(target), target)  # compared up to position 5007
    assert config["rope_theta"] == 5000.0
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert old_rope({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})["rope_scaling"] is None
    assert old_rope({"rope_parameters": {"sliding_attention": {}, "full_attention": {}}}) == {}


# ---- damage ----


def damaged(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors: dict[str, torch.Tensor | None] = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_and_stray_tensors_are_caught(tmp_path: Path, target: Target) -> None:
    draft = tiny_small(target)
    _, tensors = written(tmp_path / "e", draft, target)
    name = "model.layers.1.self_attn.q_proj.weight"
    damaged(tmp_path / "e", {name: None})
    with pytest.raises(RuntimeError, match=r"lacks model\.layers\.1\.self_attn\.q_proj\.weight"):
        check(tmp_path / "e", draft, target)
    damaged(tmp_path / "e", {name: tensors[name], "stray.weight": torch.ones(1)})
    with pytest.raises(RuntimeError, match="no reader asks for: stray"):
        check(tmp_path / "e", draft, target)


def test_a_truncated_file_is_caught(tmp_path: Path, target: Target) -> None:
    draft = tiny_small(target)
    written(tmp_path / "e", draft, target)
    path = tmp_path / "e" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="no plain model"):
        check(tmp_path / "e", draft, target)


def test_another_tokenizer_is_caught(tmp_path: Path, target: Target) -> None:
    draft = tiny_small(target)
    with pytest.raises(RuntimeError, match="tokenizer"):
        write_export(
            tmp_path / "e",
            plain(draft, target),
            tiny_tokenizer(60),
            lambda where: check(where, draft, target),
        )
    assert list(tmp_path.iterdir()) == []


def test_the_targets_rows_outside_the_vocabulary_are_caught(tmp_path: Path, target: Target) -> None:
    """What the native checkpoint has there may be likelier than anything that was trained."""
    draft = tiny_small(target, VOCABULARY)
    _, tensors = written(tmp_path / "e", draft, target)
    rows = target.head.weight.detach().clone()
    rows[VOCABULARY] = tensors["lm_head.weight"][VOCABULARY]
    damaged(tmp_path / "e", {"lm_head.weight": rows})
    with pytest.raises(RuntimeError, match="outside the draft's vocabulary"):
        check(tmp_path / "e", draft, target)


def test_a_random_embedding_and_another_theta_are_caught(tmp_path: Path, target: Target) -> None:
    draft = tiny_small(target)
    _, tensors = written(tmp_path / "e", draft, target)
    damaged(tmp_path / "e", {"model.embed_tokens.weight": torch.randn(64, 32)})
    with pytest.raises(RuntimeError, match="from position 0 on differ"):
        check(tmp_path / "e", draft, target)
    damaged(tmp_path / "e", {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"]})
    path = tmp_path / "e" / "config.json"
    rope = {"rope_type": "default", "rope_theta": 100.0}
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "rope_parameters": rope, "rope_theta": 100.0})
    )
    with pytest.raises(RuntimeError, match="differ"):
        check(tmp_path / "e", draft, target)


# ---- the commands ----


def test_serve_commands(tmp_path: Path) -> None:
    draft = tmp_path / "a b"
    words = shlex.split(serve("vllm", "some/target", draft, 4))
    assert json.loads(words[-1]) == {
        "method": "draft_model",
        "model": str(draft),
        "num_speculative_tokens": 4,
    }
    words = shlex.split(serve("sglang", "some/target", draft, 4))
    assert words[words.index("--speculative-algorithm") + 1] == "STANDALONE"
    assert words[-1] == "5"
    target, converted, server = map(shlex.split, serve("llama_cpp", "some/target", draft, 4).splitlines())
    assert target[:3] == ["python", "convert_hf_to_gguf.py", "some/target"]
    assert converted[2:] == [str(draft), "--outtype", "f16", "--outfile", str(draft / "draft.gguf")]
    assert server[3:5] == ["-md", str(draft / "draft.gguf")]
    lines = serve("openvino", "some/target", draft, 4).splitlines()
    assert [line.split()[0] for line in lines] == ["optimum-cli", "optimum-cli", "python"]


def test_programs_are_python(tmp_path: Path) -> None:
    for engine in ("openvino", "transformers"):
        program = shlex.split(serve(engine, "some/target", tmp_path / "e", 4).splitlines()[-1])[-1]
        compile(program, engine, "exec")


# ---- llama.cpp's converter ----


def checkout(folder: Path, program: str) -> Path:
    folder.mkdir()
    path = folder / "convert_hf_to_gguf.py"
    path.write_text(program)
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return folder


def test_the_converter_is_run_on_the_folder(tmp_path: Path) -> None:
    """A converter that writes its arguments behind GGUF's magic."""
    program = "import sys; open(sys.argv[-1], 'w').write('GGUF' + ' '.join(sys.argv[1:]))"
    (tmp_path / "e").mkdir()
    gguf.convert(tmp_path / "e", checkout(tmp_path / "llama.cpp", program), target="some/target")
    said = (tmp_path / "e" / "draft.gguf").read_text()
    assert said.startswith(f"GGUF{tmp_path / 'e'} --target-model-dir some/target --outtype f16")


def test_a_converter_that_fails_is_quoted(tmp_path: Path) -> None:
    program = "raise NotImplementedError('Architecture X not supported!')"
    (tmp_path / "e").mkdir()
    with pytest.raises(ConfigError, match="Architecture X not supported!"):
        gguf.convert(tmp_path / "e", checkout(tmp_path / "llama.cpp", program))


def test_no_converter_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"export\.llama_cpp="):
        gguf.require(tmp_path)
