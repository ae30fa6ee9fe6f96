"""`python -m models.export` for drafts of every method: which engines by default, Medusa-2's own target, a
GGUF file, and the card beside the weights."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from configs.errors import CheckpointError, ConfigError
from configs.schema import Config, DataConfig, Dtype, MethodConfig, TargetConfig
from models.checkpoint import save_draft
from models.export.__main__ import export
from models.hydra import Hydra
from models.hydra import NetworkConfig as HydraConfig
from models.target import Target
from tests.conftest import tiny_target
from tests.models.test_export_medusa import VOCABULARY, tiny_medusa
from tests.models.test_export_mlp_speculator import tiny_speculator
from tests.models.test_export_small import checkout, tiny_small

PROGRAM = "import sys; open(sys.argv[-1], 'w').write('GGUF')"


def saved(folder: Path, target: Target) -> None:
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)


def configured(tmp_path: Path, draft: Any, target: Target, **training: Any) -> Config:
    """A finished run of `draft` and its target, on the disk."""
    saved(tmp_path / "target", target)
    save_draft(tmp_path / "runs" / "tiny" / "20260101-000000" / "draft", draft, target, training)
    return Config(
        experiment="tiny",
        runs=str(tmp_path / "runs"),
        target=TargetConfig(name=str(tmp_path / "target"), dtype=Dtype.float32, device="cpu"),
        method=MethodConfig(name=str(draft.method)),
        data=DataConfig(folder=str(tmp_path / "data")),
    )


def exported(config: Config) -> tuple[list[str], str]:
    """(names of the folders, what was printed)"""
    screen = io.StringIO()
    written = export(config, Console(file=screen, width=80))
    return [folder.name for folder in written], screen.getvalue()


def test_default_engines_are_those_that_read_the_method(tmp_path: Path, target: Target) -> None:
    names, said = exported(configured(tmp_path, tiny_medusa(target, VOCABULARY), target))
    assert names == ["vllm"]
    assert '"method": "medusa"' in said
    assert "5 tokens are written over all 64" in said


def test_no_more_is_drafted_than_there_are_heads(tmp_path: Path, target: Target) -> None:
    """decode.draft_tokens is 4 by default: vLLM would ask for a third and a fourth head."""
    _, said = exported(configured(tmp_path, tiny_medusa(target), target))
    assert '"num_speculative_tokens": 2' in said


def test_every_folder_has_its_card(tmp_path: Path, target: Target) -> None:
    """The commands name the folder as it is called in the end."""
    config = configured(tmp_path, tiny_medusa(target, heads=5), target)
    config.export.engines = ["vllm", "tensorrt_llm", "medusa"]
    names, said = exported(config)
    assert names == ["vllm", "tensorrt_llm", "medusa"]
    for name in names:
        folder = tmp_path / "runs" / "tiny" / "20260101-000000" / "export" / name
        card = (folder / "MODEL_CARD.md").read_text()
        assert str(folder) in card
        assert ".tmp" not in card
        assert (folder / "README.md").read_text().startswith("---\n")
    assert ".tmp" not in said
    assert "--num_medusa_heads 5" in said


def test_a_small_draft(tmp_path: Path, target: Target) -> None:
    names, said = exported(configured(tmp_path, tiny_small(target), target))
    assert names == ["vllm", "sglang"]
    assert "STANDALONE" in said


def test_a_gguf_file_from_a_checkout(tmp_path: Path, target: Target) -> None:
    config = configured(tmp_path, tiny_small(target), target)
    config.export.engines = ["llama_cpp", "transformers"]
    config.export.llama_cpp = str(checkout(tmp_path / "llama.cpp", PROGRAM))
    exported(config)
    folder = tmp_path / "runs" / "tiny" / "20260101-000000" / "export"
    assert (folder / "llama_cpp" / "draft.gguf").read_text() == "GGUF"
    assert not (folder / "transformers" / "draft.gguf").exists()


def test_nothing_is_kept_when_the_converter_fails(tmp_path: Path, target: Target) -> None:
    config = configured(tmp_path, tiny_small(target), target)
    config.export.engines = ["llama_cpp"]
    config.export.llama_cpp = str(checkout(tmp_path / "llama.cpp", "raise SystemExit('no')"))
    with pytest.raises(ConfigError, match="no GGUF file"):
        exported(config)
    assert list((tmp_path / "runs" / "tiny" / "20260101-000000" / "export").iterdir()) == []


def test_the_mlp_speculator_says_which_vllm(tmp_path: Path, target: Target) -> None:
    names, said = exported(configured(tmp_path, tiny_speculator(target), target))
    assert names == ["vllm"]
    assert "vLLM up to 0.10" in said


def test_hydra_has_no_engine(tmp_path: Path, target: Target) -> None:
    draft = Hydra.build(HydraConfig(heads=2), target)
    draft.initialise(target)
    with pytest.raises(CheckpointError, match=r"No engine reads Hydra heads.*method=medusa"):
        exported(configured(tmp_path, draft, target))


def test_methods_that_can_be_exported_are_named(tmp_path: Path, target: Target) -> None:
    config = configured(tmp_path, tiny_medusa(target), target)
    config.export.engines = ["sglang"]
    with pytest.raises(ConfigError, match="'sglang'; known for medusa: vllm, tensorrt_llm, medusa"):
        exported(config)


def test_medusa_2_is_served_with_the_target_that_it_trained(tmp_path: Path, target: Target) -> None:
    """The configuration still names the target that the run began with."""
    grown = tiny_target(seed=1)
    run = tmp_path / "runs" / "tiny" / "20260101-000000"
    config = configured(tmp_path, tiny_medusa(grown), grown, method={"name": "medusa2"})
    saved(tmp_path / "target", target)
    saved(run / "target", grown)
    _, said = exported(config)
    assert f"vllm serve {run / 'target'} " in said
    card = (run / "export" / "vllm" / "MODEL_CARD.md").read_text()
    assert card.startswith("# Medusa-2 draft")
    assert "is not the model it comes from" in card
