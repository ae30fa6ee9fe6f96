"""What models/export/ writes, models/imports/ reads back: import, export, import changes nothing any more."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from models import draft_class, load_draft
from models.export.layout import write_export
from models.target import Target
from tests.conftest import tiny_draft, tiny_model, tiny_tokenizer

REDUCED = {"draft_vocab_size": 48}


@pytest.fixture
def target() -> Target:
    """With two rows beyond its tokens, of which exports take one for a masked token."""
    return Target.wrap(tiny_model(vocab=66, layers=8), tiny_tokenizer(64), name="tiny")


def made(method: str, target: Target, **network: Any) -> Any:
    """A draft with random weights and, if it is reduced, the lower three quarters of the ids."""
    if method == "eagle3":
        return tiny_draft(target, **network)
    module = import_module(f"models.{method}")
    draft = draft_class(method).build(module.NetworkConfig(**network), target)
    if not draft.full_vocabulary:
        draft.set_vocabulary(torch.arange(draft.shape.draft_vocab_size))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    draft.ready = True
    return draft


def there_and_back(folder: Path, engine: str, draft: Any, target: Target) -> Any:
    method = import_module(f"models.export.{draft.method}")
    write_export(folder, method.LAYOUTS[engine](draft, target), target.tokenizer, lambda _: None)
    return load_draft(folder, target)


CASES = [
    ("eagle3", "vllm", {}),
    (
        "eagle3",
        "vllm",
        {"layers": 2, "taps": [1, 3, 6], "norm_before_residual": True, "norm_before_fc": True},
    ),
    ("eagle3", "vllm", {"fc_norm": True, "norm_output": True, "draft_vocab_size": None, "taps": [3, 6]}),
    ("eagle3", "sglang", {}),
    ("eagle3", "portable", {}),
    ("eagle3", "tensorrt_llm", {}),
    ("eagle3", "llama_cpp", {"taps": [1, 3, 6]}),
    ("eagle3", "speculators", {"norm_before_residual": True, "norm_output": True}),
    ("eagle1", "vllm", {"layers": 2}),
    ("eagle1", "sglang", {"bias": True}),
    ("medusa", "vllm", {"heads": 3, "layers": 2}),
    ("medusa", "vllm", {"heads": 2, "projection": "shared"}),
    ("medusa", "tensorrt_llm", {"heads": 3}),
    ("medusa", "medusa", {"heads": 5}),
    ("mlp_speculator", "vllm", {"tie_weights": True}),
    ("mlp_speculator", "vllm", {"tie_weights": False, "inner_dim": 24, "scale_input": False}),
    ("peagle", "vllm", {"layers": 2, **REDUCED}),
    ("peagle", "speculators", {"layers": 2, **REDUCED}),
    ("dflash", "vllm", {"layers": 2, "block_size": 4, **REDUCED}),
    ("dflash", "vllm", {"layers": 1, "block_size": 4, "draft_vocab_size": None}),
    ("small", "transformers", {"layers": 2, "head": "tied", "embedding": "own"}),
    ("small", "vllm", {"layers": 2}),
]


@pytest.mark.parametrize(("method", "engine", "network"), CASES, ids=str)
def test_import_export_import(
    tmp_path: Path, target: Target, method: str, engine: str, network: dict[str, Any]
) -> None:
    draft = made(method, target, **network)
    first = there_and_back(tmp_path / "first", engine, draft, target)
    second = there_and_back(tmp_path / "second", engine, first, target)
    assert first.method == second.method == method
    ours, once, twice = (one.state_dict() for one in (draft, first, second))
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[name], twice[name]) for name in once)
    shapes = [one.shape.to_dict() | {"start": None} for one in (first, second)]
    assert shapes[0] == shapes[1]
    # What the engine's format can say comes back as it was trained, the first time already.
    assert all(torch.equal(ours[name], once[name]) for name in ours if name in once)


@pytest.mark.parametrize(("method", "network"), [("medusa", {"heads": 2}), ("mlp_speculator", {})])
def test_a_head_that_grew_in_the_export_proposes_the_same(
    tmp_path: Path, target: Target, method: str, network: dict[str, Any]
) -> None:
    """The 18 tokens outside the draft vocabulary come back with the mean of the others' rows."""
    draft = made(method, target, **network, **REDUCED)
    read = there_and_back(tmp_path / "d", "vllm", draft, target)
    name = "lm_heads.1.weight" if method == "medusa" else "head.0.weight"
    ours, theirs = draft.state_dict()[name], read.state_dict()[name]
    assert read.full_vocabulary
    assert torch.equal(theirs[:48], ours)
    assert torch.allclose(theirs[48:], ours.mean(0).expand(18, -1), atol=1e-6)
