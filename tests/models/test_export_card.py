"""The model card: every figure with its conditions, and what is not known said."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.schema import Config, DataConfig, Dtype, ExportConfig, MethodConfig, TargetConfig
from models.checkpoint import save_draft
from models.export.card import facts, public, texts
from models.export.layout import Layout
from models.export.medusa import vllm
from models.files import sha256_file, write_json
from models.target import Target
from tests.models.test_export_medusa import tiny_medusa

TRAINING = {
    "method": {"name": "medusa", "network": {"heads": 2}, "objective": {"head_decay": 0.8}},
    "steps": 1305,
    "best_step": 1200,
    "epochs": 3,
    "tokens": 376050,
    "wall_seconds": 120.0,
    "heldout": {
        "mean_acceptance_length": 1.3222,
        "mean_acceptance_length_ci": [1.24, 1.41],
        "acceptance_rate": 0.1115,
        "prompts": 12,
        "rounds": 540,
        "draft_tokens": 4,
    },
    "provenance": {
        "git": {"commit": "a" * 40, "dirty": True},
        "hardware": {"cpu": "Some CPU", "cores": 2, "threads": 1, "memory_gb": 24.0, "gpu": None},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "accelerate": None},
    },
}
ROW = {
    "method": "medusa",
    "category": "all",
    "context_bucket": "all",
    "lossless": True,
    "dtype": "bfloat16",
    "temperature": 0.0,
    "batch_size": 1,
    "prompts": 36,
    "drafters": ["draft", "lookup"],
    "tree": "dynamic",
    "tree_nodes": 8,
    "draft_tokens": 4,
    "confidence": 0.95,
    "mean_acceptance_length": 2.346,
    "mean_acceptance_length_ci": [2.2, 2.5],
    "acceptance_rate": 0.168,
    "acceptance_by_position": [0.6, 0.31],
    "speedup": 1.6512,
    "speedup_ci": [1.58, 1.73],
    "identical_outputs": 1.0,
    "identical_count": 36,
}


def workspace(tmp_path: Path, target: Target) -> Path:
    """A run's native draft, its configuration and its data."""
    run, data = tmp_path / "runs" / "tiny" / "20260101-000000", tmp_path / "data"
    save_draft(run / "draft", tiny_medusa(target), target, TRAINING)
    sources = [{"path": "/logs/secret/chat.jsonl", "split": "train"}, {"path": "some/chats"}]
    write_json(
        run / "config.yaml",
        {"data": {"folder": str(data), "sources": sources, "replies": "target"}, "eval": {"confidence": 0.9}},
    )
    counts = {"heldout": {"code": 2}, "train": {"code": 30, "maths": 1012}}
    named = [{**source, "rows": 500} for source in sources]
    tokenizer = target.tokenizer_fingerprint()
    (data / "replies.jsonl").parent.mkdir(parents=True)
    (data / "replies.jsonl").write_text('{"id": "a"}\n{"id": "b"}\n')
    write_json(data / "prepare.json", {"tokenizer": tokenizer, "sources": named, "counts": counts})
    return run / "draft"


def measure(source: Path, sha256: str | None = None) -> None:
    files = [sha256_file(source / name) for name in ("config.json", "model.safetensors")]
    found = {
        "created": "2026-11-30T12:00:00+00:00",
        "draft": {"sha256": sha256 or hashlib.sha256(" ".join(files).encode()).hexdigest()},
        "load": {"busy": False},
        "rows": [{**ROW, "method": "plain"}, {**ROW, "category": "code", "speedup": 9.0}, ROW],
        **TRAINING["provenance"],
    }
    write_json(source.with_name("measure") / "measure.json", found)


def written(source: Path, target: Target, **export: Any) -> tuple[str, dict[str, Any]]:
    """(the card, the front matter)"""
    config = Config(
        experiment="tiny",
        target=TargetConfig(name=target.name, dtype=Dtype.float32, device="cpu"),
        method=MethodConfig(name="medusa"),
        data=DataConfig(folder="elsewhere"),
        export=ExportConfig(**export),
    )
    draft = tiny_medusa(target)
    known = facts(config, source, target, draft)
    layout: Layout = vllm(draft, target)
    made = texts(known, "vllm", layout, "vllm serve some/target")
    _, front, body = made["README.md"].split("---\n", 2)
    assert body.strip() == made["MODEL_CARD.md"].strip()
    return made["MODEL_CARD.md"], yaml.safe_load(front)


def test_what_the_run_knows(tmp_path: Path, target: Target) -> None:
    """2 heads: 2 (32 * 32 + 32) + 2 * 64 * 32 = 6,208 weights of 4 bytes."""
    card, front = written(workspace(tmp_path, target), target)
    assert card.startswith("# Medusa draft for tiny, for vLLM\n")
    assert "```sh\nvllm serve some/target\n```" in card
    assert "- parameters: 6,208; written: 6,208 in float32, 0.0 MB" in card
    assert "- draft vocabulary: 64 of 64 tokens" in card
    assert f"`{target.fingerprint()}`" in card
    assert "- steps: 1,305" in card
    assert "- step kept: 1,200" in card
    assert "- tokens trained on, over all epochs: 376,050" in card
    assert "- time: 2.0 min" in card
    assert "- hardware: Some CPU, 1 threads on 2 cores; no GPU" in card
    assert "- versions: python 3.11.7, torch 2.13.0\n" in card
    assert f"- Leadout commit: {'a' * 40} with local changes" in card
    assert front["tags"] == ["speculative-decoding", "leadout", "medusa", "vllm"]
    assert front["pipeline_tag"] == "text-generation"
    assert front["base_model"] == "tiny"


def test_data_by_category_without_the_machines_folders(tmp_path: Path, target: Target) -> None:
    card, front = written(workspace(tmp_path, target), target)
    assert "- chat.jsonl: 500 rows" in card
    assert "secret" not in card
    assert "- some/chats: 500 rows" in card
    assert "- replies trained on: the target's own, to 2 prompts\n" in card
    assert "| maths | 1,012 | 0 |" in card
    assert "| all | 1,042 | 2 |" in card
    assert front["datasets"] == ["some/chats"]


def test_another_tokenizers_data_is_not_claimed(tmp_path: Path, target: Target) -> None:
    source = workspace(tmp_path, target)
    write_json(tmp_path / "data" / "prepare.json", {"tokenizer": "0" * 64, "counts": {"train": {"x": 1}}})
    card, _ = written(source, target)
    assert "| x |" not in card
    assert "- chat.jsonl\n" in card  # the run's configuration still names it


def test_measured_with_conditions(tmp_path: Path, target: Target) -> None:
    source = workspace(tmp_path, target)
    measure(source)
    card, _ = written(source, target)
    cells = "0 | 1 | 36 | 2.35 [2.20, 2.50] | 16.8% | 0.60 0.31 | 1.65 [1.58, 1.73] | 36 of 36"
    assert f"| {cells} |" in card
    assert "9.00" not in card  # a category's row, or plain decoding's
    assert "- decoded: draft and lookup, dynamic tree of 8 nodes, at most 4 deep, in bfloat16\n" in card
    assert "- confidence of the intervals: 95%" in card
    assert "- measured: 2026-11-30T12:00:00+00:00\n" in card
    assert "no speedup is claimed" not in card


def test_not_measured_is_said(tmp_path: Path, target: Target) -> None:
    source = workspace(tmp_path, target)
    measure(source, sha256="0" * 64)  # of other weights
    card, _ = written(source, target)
    assert "no speedup is claimed" in card
    assert "1.65" not in card
    assert "accepted 11.2% of what was drafted on 12 held-out prompts (540 rounds" in card
    assert "making 1.32 [1.24, 1.41] tokens a round at 90% confidence." in card


def test_figures_that_training_could_not_give_are_dashes(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = dict.fromkeys(("mean_acceptance_length_ci", "acceptance_rate"))
    monkeypatch.setitem(TRAINING, "heldout", {**TRAINING["heldout"], **none})
    card, _ = written(workspace(tmp_path, target), target)
    assert "accepted – of what was drafted" in card
    assert "making 1.32 tokens a round." in card


def test_licences(tmp_path: Path) -> None:
    """The target's own card, then what the user says; else not known."""
    from tests.conftest import tiny_model, tiny_tokenizer

    folder = tmp_path / "target"
    folder.mkdir()
    target = Target.wrap(tiny_model(), tiny_tokenizer(), name=str(folder))
    source = workspace(tmp_path, target)
    card, front = written(source, target)
    assert "- licence: not known here" in card
    assert "license" not in front
    assert "base_model" not in front  # a folder is no name of the hub's
    (folder / "README.md").write_text("---\nlicense: other\nlicense_name: some-licence\n---\nText.")
    card, front = written(source, target)
    assert "- licence: some-licence" in card
    assert (front["license"], front["license_name"]) == ("other", "some-licence")
    card, front = written(source, target, licence="apache-2.0")
    assert "- licence: apache-2.0" in card
    assert front["license"] == "apache-2.0"


def test_a_draft_that_lies_elsewhere(tmp_path: Path, target: Target) -> None:
    """Without its run: what the checkpoint says, and nothing of another folder's config.yaml."""
    save_draft(tmp_path / "mine", tiny_medusa(target), target, {})
    write_json(tmp_path / "config.yaml", {"data": {"folder": "x", "sources": [{"path": "y"}]}})
    card, _ = written(tmp_path / "mine", target)
    assert "## Data\n\nNot known" in card
    assert "## Training\n\nNot known" in card
    assert "no speedup is claimed" in card


def test_public_names() -> None:
    assert public("/home/me/chat.jsonl") == "chat.jsonl"
    assert public("traffic/own.jsonl") == "own.jsonl"
    assert public("HuggingFaceH4/ultrachat_200k") == "HuggingFaceH4/ultrachat_200k"
    assert public("alpaca") == "alpaca"
