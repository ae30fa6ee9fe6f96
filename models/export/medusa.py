"""Medusa heads for vLLM, for TensorRT-LLM and for the authors' own code (Medusa-2's too: what else it trains
is the target, a folder of its own).

- vllm: `blocks.{head}.layers.{i}.*` and `lm_heads.{head}.weight`, read from vLLM's
  `model_executor/models/medusa.py` and run in 0.32. Its config class takes any key with "num" and "heads" in
  it for the number of heads, and defaults a missing `hidden_size` to 4096; `medusa_fc_bias` must be set, or
  the residual layers' biases are passed over without a word.
- tensorrt_llm and medusa: `{head}.{i}.linear.*` and `{head}.{layers}.weight` in `medusa_lm_head.*`, as the
  authors save it (FasterDecoding/Medusa e2a5d20, TensorRT-LLM `models/medusa/`). TensorRT-LLM asks for the
  number of heads by two names; the authors' code builds five heads whatever the config says, and uses one
  residual layer several times where there should be several.

A reduced vocabulary: heads are written over the whole one, with the same proposals (`layout.whole_head`).
vLLM's own form, a `token_map` with `truncated_vocab_size`, does not load in 0.32, which takes the map for a
weight that no file filled and stops; the other readers have none.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.errors import CheckpointError
from models.export.agreement import Stored, expect, same_choices
from models.export.layout import Layout, whole_head
from models.medusa import Medusa
from models.target import Target

ORIGINAL_HEADS = 5  # what FasterDecoding/Medusa builds
TENSORRT_TARGETS = ("llama", "mixtral", "qwen2")  # of its convert_checkpoint.py
ROWS = 8  # hidden states compared


def vllm(draft: Medusa, target: Target) -> Layout:
    shape = draft.shape
    tensors = {
        name: tensor.detach() for name, tensor in draft.state_dict().items() if name.startswith("blocks.")
    }
    for i, rows in enumerate(draft.lm_heads.parameters()):
        tensors[f"lm_heads.{i}.weight"] = expanded(draft, rows)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "num_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "medusa_fc_bias": True,
        "original_lm_head": shape.projection != "own",  # one for all heads
        "torch_dtype": dtype_of(draft),
        "dtype": dtype_of(draft),
    }
    return Layout(tensors, config, enlarged(draft))


def original(draft: Medusa, target: Target) -> Layout:
    return Layout(
        head_by_head(draft),
        authors_config(draft, target),
        enlarged(draft),
        weights="medusa_lm_head.pt",  # the only name that the authors' code looks for
    )


def tensorrt_llm(draft: Medusa, target: Target) -> Layout:
    kind = target.config.model_type
    if kind not in TENSORRT_TARGETS:
        raise CheckpointError(
            f"This draft cannot be exported for tensorrt_llm: it knows Medusa beside targets of type "
            f"{', '.join(TENSORRT_TARGETS)}, and {target.name} is of type {kind}. Leave tensorrt_llm out of "
            "export.engines."
        )
    return Layout(
        head_by_head(draft),
        authors_config(draft, target) | {"num_medusa_heads": draft.shape.heads},
        enlarged(draft),
        weights="medusa_lm_head.safetensors",
    )


LAYOUTS: dict[str, Callable[[Medusa, Target], Layout]] = {
    "vllm": vllm,
    "tensorrt_llm": tensorrt_llm,
    "medusa": original,
}


def head_by_head(draft: Medusa) -> dict[str, Tensor]:
    """The authors' names. Nothing in them can be shared, so one projection for all is written for each."""
    shape = draft.shape
    tensors = {}
    for name, tensor in draft.state_dict().items():
        if name.startswith("blocks."):
            _, head, _, layer, leaf = name.split(".")
            tensors[f"{head}.{layer}.linear.{leaf}"] = tensor.detach()
    projections = [expanded(draft, rows) for rows in draft.lm_heads.parameters()]
    for head in range(shape.heads):
        rows = projections[head] if len(projections) > 1 else projections[0].clone()
        tensors[f"{head}.{shape.layers}.weight"] = rows
    return tensors


def authors_config(draft: Medusa, target: Target) -> dict[str, Any]:
    return {
        "medusa_num_heads": draft.shape.heads,
        "medusa_num_layers": draft.shape.layers,
        "base_model_name_or_path": served(target),
        "hidden_size": draft.shape.hidden_size,
        "vocab_size": draft.shape.vocab_size,
        "torch_dtype": dtype_of(draft),
    }


def served(target: Target) -> str:
    return str(Path(target.name).resolve()) if Path(target.name).is_dir() else target.name


def dtype_of(draft: Medusa) -> str:
    return str(draft.dtype).removeprefix("torch.")


def expanded(draft: Medusa, rows: Tensor) -> Tensor:
    rows = rows.detach()
    return rows if draft.full_vocabulary else whole_head(rows, draft.draft_ids, draft.shape.vocab_size)


def enlarged(draft: Medusa) -> str | None:
    """What a user should know about heads that grew."""
    if draft.full_vocabulary:
        return None
    return (
        f"heads over {draft.shape.draft_vocab_size} tokens are written over all {draft.shape.vocab_size}, "
        "with the same proposals at a larger cost (method.network.projection=shared trains one projection "
        "for all heads, draft_vocab_size=null what fits)"
    )


def refuse(engine: str, draft: Medusa) -> None:
    """Raises `CheckpointError` with every reason why `engine` would compute something else."""
    if engine != "medusa":
        return
    found = [
        (
            draft.shape.heads != ORIGINAL_HEADS,
            f"the authors' code builds {ORIGINAL_HEADS} heads, would fill those that are missing with random "
            f"weights, and drop those beyond (method.network.heads={ORIGINAL_HEADS})",
        ),
        (
            draft.shape.layers > 1,
            "the authors' code uses one residual layer of a head several times (method.network.layers=1)",
        ),
    ]
    if reasons := [reason for holds, reason in found if holds]:
        raise CheckpointError(
            f"This draft cannot be exported for {engine}: {'; '.join(reasons)}. Leave {engine} out of "
            "export.engines, or train a draft with what is in brackets."
        )


def serve(engine: str, target: str, folder: Path, draft_tokens: int) -> str:
    """The commands that serve the target with these heads; draft_tokens: no more than there are heads."""
    draft = str(folder.resolve())
    if engine == "vllm":
        settings = {"method": "medusa", "model": draft, "num_speculative_tokens": draft_tokens}
        return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(settings)])
    if engine == "medusa":
        return shlex.join(["python", "-m", "medusa.inference.cli", "--model", draft])
    return tensorrt_commands(target, folder)


def tensorrt_commands(target: str, folder: Path) -> str:
    """TensorRT-LLM converts, builds, then runs, from its repository's root. `convert_checkpoint.py` takes the
    number of heads from its options alone."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads, layers = config["medusa_num_heads"], config["medusa_num_layers"]
    checkpoint, engine = "tllm_checkpoint", "tllm_engine"
    convert = ["python", "examples/medusa/convert_checkpoint.py", "--model_dir", target]
    convert += ["--medusa_model_dir", str(folder.resolve()), "--num_medusa_heads", str(heads)]
    convert += ["--num_medusa_layers", str(layers), "--dtype", config["torch_dtype"]]
    convert += ["--output_dir", checkpoint]
    build = ["trtllm-build", "--checkpoint_dir", checkpoint, "--output_dir", engine]
    build += ["--speculative_decoding_mode", "medusa"]
    chain = json.dumps([[0] * (i + 1) for i in range(heads)])
    run = ["python", "examples/run.py", "--engine_dir", engine, "--tokenizer_dir", target]
    run += ["--medusa_choices", chain, "--temperature", "1.0", "--max_output_len", "100"]
    return "\n".join(shlex.join(words) for words in (convert, build, run))


@torch.no_grad()
def check(folder: Path, draft: Medusa, target: Target) -> None:
    """Reads `folder` by names and config alone and compares each head with `draft`'s; raises `RuntimeError`
    where they differ. In float32, on hidden states drawn at random."""
    trained = Medusa(draft.shape, target.embedding.to("cpu", torch.float32)).eval()
    trained.load_state_dict(draft.state_dict())
    hidden = torch.randn(ROWS, trained.shape.hidden_size, generator=torch.Generator().manual_seed(0))
    read = read_vllm if (folder / "model.safetensors").exists() else read_original
    theirs, ours = read(folder, hidden), trained.logits(hidden)
    expect(len(theirs) == trained.heads, f"it has {len(theirs)} heads, and the draft {trained.heads}")
    for head, logits in enumerate(theirs):
        expect(
            logits.shape[-1] == trained.shape.vocab_size,
            f"head {head + 1} proposes among {logits.shape[-1]} tokens",
        )
        same_choices(logits, trained.draft_ids, ours[:, head], f"the logits of head {head + 1}")


def read_vllm(folder: Path, hidden: Tensor) -> list[Tensor]:
    """Each head's logits [n, V] of hidden [n, d], as vLLM would compute them."""
    stored = Stored(folder)
    config = stored.config
    expect("truncated_vocab_size" not in config, "vLLM 0.32 loads no truncated vocabulary")
    heads, layers = counted(config, "heads"), counted(config, "layers")
    vocab, d = config.get("vocab_size", 32001), config.get("hidden_size", 4096)
    shared, biased = config.get("original_lm_head", False), config.get("medusa_fc_bias", False)
    logits = []
    for head in range(heads):
        x = hidden
        for i in range(layers):
            name = f"blocks.{head}.layers.{i}"
            bias = stored.weight(f"{name}.bias", d) if biased else None
            x = x + F.silu(F.linear(x, stored.weight(f"{name}.weight", d, d), bias))
        logits.append(x @ stored.weight(f"lm_heads.{0 if shared else head}.weight", vocab, d).T)
    stored.finish()
    return logits


def counted(config: dict[str, Any], what: str) -> int:
    """vLLM's config class takes every key with "num" and `what` in it for the number; the last one wins."""
    found = {value for key, value in config.items() if "num" in key and what in key}
    expect(len(found) == 1, f"config.json gives {len(found)} numbers of {what}")
    return found.pop()


def read_original(folder: Path, hidden: Tensor) -> list[Tensor]:
    """Each head's logits [n, V], as the authors' code and TensorRT-LLM's would compute them."""
    names = ("medusa_lm_head.pt", "medusa_lm_head.safetensors")
    stored = Stored(folder, next(name for name in names if (folder / name).exists()))
    config = stored.config
    heads, layers = config["medusa_num_heads"], config["medusa_num_layers"]
    expect(config.get("num_medusa_heads", heads) == heads, "config.json gives two numbers of heads")
    vocab, d = config["vocab_size"], config["hidden_size"]
    logits = []
    for head in range(heads):
        x = hidden
        for i in range(layers):
            name = f"{head}.{i}.linear"
            x = x + F.silu(
                F.linear(x, stored.weight(f"{name}.weight", d, d), stored.weight(f"{name}.bias", d))
            )
        logits.append(x @ stored.weight(f"{head}.{layers}.weight", vocab, d).T)
    stored.finish()
    return logits
