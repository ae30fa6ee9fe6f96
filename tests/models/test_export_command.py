"""`python -m models.export` from a run's draft to folders and commands, and what it refuses."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from configs.errors import CheckpointError, ConfigError, StorageError
from configs.schema import Config, DataConfig, Dtype, MethodConfig, TargetConfig
from models.checkpoint import save_draft
from models.export.__main__ import export
from tests.conftest import tiny_draft, tiny_target


def configured(tmp_path: Path, **network: Any) -> Config:
    """A tiny target and a finished run of an untrained draft with these network fields, on the disk."""
    target = tiny_target()
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    save_draft(run(tmp_path) / "draft", tiny_draft(target, **network), target, {})
    return Config(
        experiment="tiny",
        runs=str(tmp_path / "runs"),
        target=TargetConfig(name=str(tmp_path / "target"), dtype=Dtype.float32, device="cpu"),
        method=MethodConfig(name="eagle3"),
        data=DataConfig(folder=str(tmp_path / "data")),
    )


def run(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "tiny" / "20260101-000000"


def test_folders_and_commands(tmp_path: Path) -> None:
    screen = io.StringIO()
    written = export(configured(tmp_path), Console(file=screen, width=80))
    assert written == [run(tmp_path) / "export" / engine for engine in ("vllm", "sglang")]
    assert all((folder / "model.safetensors").is_file() for folder in written)
    assert f"vllm serve {tmp_path / 'target'} --speculative-config" in screen.getvalue()
    assert "--speculative-algorithm EAGLE3" in screen.getvalue()


def test_a_version_that_is_needed_is_said(tmp_path: Path) -> None:
    config = configured(tmp_path, fc_norm=True)
    config.export.engines = ["vllm"]
    screen = io.StringIO()
    export(config, Console(file=screen, width=80))
    assert "fc_norm: use vLLM 0.32 or newer" in screen.getvalue()


def test_nothing_is_written_if_one_engine_cannot_express_the_draft(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"for sglang: SGLang never reads norm_before_residual"):
        export(configured(tmp_path, norm_before_residual=True), Console(file=io.StringIO()))
    assert list((run(tmp_path) / "export").iterdir()) == []


def test_an_unknown_engine_is_named_with_the_known_ones(tmp_path: Path) -> None:
    config = configured(tmp_path)
    config.export.engines = ["vlm"]
    with pytest.raises(ConfigError, match="'vlm'; known for eagle3: vllm, sglang"):
        export(config, Console(file=io.StringIO()))


def test_no_draft_yet(tmp_path: Path) -> None:
    config = configured(tmp_path)
    config.runs = str(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"train\.distill"):
        export(config, Console(file=io.StringIO()))


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    config = configured(tmp_path)
    (tmp_path / "file").write_text("")
    config.export.output = str(tmp_path / "file" / "export")
    with pytest.raises(StorageError, match="Cannot write"):
        export(config, Console(file=io.StringIO()))


def test_what_is_no_export_is_never_replaced(tmp_path: Path) -> None:
    config = configured(tmp_path)
    config.export.engines = ["vllm"]
    (folder,) = export(config, Console(file=io.StringIO()))
    export(config, Console(file=io.StringIO()))  # an earlier export is
    (folder / "precious.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"precious\.txt is no part of an export"):
        export(config, Console(file=io.StringIO()))
    assert (folder / "precious.txt").read_text() == "mine"


def test_a_draft_with_an_embedding_of_its_own_is_refused(tmp_path: Path) -> None:
    config, target = configured(tmp_path), tiny_target()
    draft = tiny_draft(target)
    draft.bring_embedding(draft.embedding + 1)
    save_draft(tmp_path / "brought", draft, target, {})
    config.export.draft = str(tmp_path / "brought")
    with pytest.raises(CheckpointError, match="token embedding of its own"):
        export(config, Console(file=io.StringIO()))
