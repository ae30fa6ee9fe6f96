"""EAGLE-3 for six readers, and one folder that most of them read alike.

| engine | layer 0 | taps | read from |
|---|---|---|---|
| `vllm` | `layers.0` | top-level ids | vLLM 0.32, `model_executor/models/llama_eagle3.py` |
| `speculators` | `layers.0` | top-level ids | speculators 0.9.0, `models/eagle3/`; vLLM serves it too |
| `sglang` | `midlayer` | `eagle_config`, one less | SGLang 0.5.23, `srt/models/llama_eagle3.py` |
| `tensorrt_llm` | `midlayer` | the serving command | TensorRT-LLM, `_torch/models/modeling_speculative.py` |
| `llama_cpp` | either | top-level ids | llama.cpp b11434, `conversion/llama.py`, into a GGUF file |
| `openvino` | `midlayer` | the default | optimum-intel 2.2, `exporters/openvino/` |
| `portable` | `midlayer` | the default | the above but TensorRT-LLM |

All but `speculators` are a plain HF config (`LlamaForCausalLMEagle3`, model type llama). Where engines
disagree or fall silent, this file decides:

- Top-level `eagle_aux_hidden_state_layer_ids` are HF hidden_states indices (vLLM, llama.cpp); those in
  `eagle_config` name the layer whose output is meant, one less (SGLang, which adds 1). Both are written.
- `norm_before_residual` is always written: without it a plain config means False, a speculators one True. The
  portable folder has no norm flags at all, because OpenVINO reads none and llama.cpp not all.
- `norm_output` means here what vLLM and SGLang mean: the state fed to the next step is the normed one.
- `d2t` holds offsets (target id = draft id + d2t[draft id]), `t2d` membership. A draft over the whole
  vocabulary has neither, but keeps `draft_vocab_size`: without it SGLang would take the target's head, and
  llama.cpp a plain Llama.
- `embed_tokens` is written only for readers that do not share the target's (speculators, OpenVINO); nothing
  else is added, because vLLM stops at a tensor it does not know and SGLang drops it without a word.

What an engine cannot express is refused: written anyway, it would be served as another network.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.eagle3 import Eagle3, Eagle3Shape
from models.export import gguf, openvino
from models.export.agreement import expect, same
from models.export.layout import Layout
from models.export.llama import (
    STORED_TOKENS,
    Reason,
    check_embedding,
    check_length,
    check_order,
    check_rope,
    check_tokens,
    check_vocabulary,
    in_float32,
    layer_config,
    refuse_for,
    renamed,
    sglang_command,
    speculators_config,
    starts,
    tensors_of,
    unlike_sglang,
    unverifiable,
    vllm_command,
)
from models.export.reference import TAPPED, Eagle3Reading
from models.target import Target

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

STEPS = 3  # recurrent draft steps compared
ROWS = 6  # positions in the first of them


def vllm(draft: Eagle3, target: Target, embedding: bool = False) -> Layout:
    """vLLM's names are the network's own. `embedding` adds an exact copy of the target's."""
    tensors = tensors_of(draft)
    if embedding:
        tensors["embed_tokens.weight"] = target.embedding.detach()
    return Layout(tensors, config(draft, target), needs(draft.shape, "vLLM 0.32"))


def sglang(draft: Eagle3, target: Target, embedding: bool = False) -> Layout:
    made = vllm(draft, target, embedding)
    return Layout(renamed(made), made.config, needs(draft.shape, "SGLang 0.5.23"))


def speculators(draft: Eagle3, target: Target) -> Layout:
    made = vllm(draft, target, embedding=True)
    shape = draft.shape
    written = {
        **speculators_config(
            "eagle3", "Eagle3Speculator", layers_of(shape, draft, target), target, STORED_TOKENS
        ),
        "draft_vocab_size": shape.draft_vocab_size,
        **{flag: getattr(shape, flag) for flag in FLAGS},
        "embed_requires_grad": False,
        TAPPED: shape.taps,
    }
    return Layout(made.tensors, written, made.needs)


def tensorrt_llm(draft: Eagle3, target: Target) -> Layout:
    made = vllm(draft, target)
    return Layout(renamed(made), made.config)


def llama_cpp(draft: Eagle3, target: Target) -> Layout:
    made = vllm(draft, target)
    plain = draft.shape.taps == engines_taps(target) and not draft.shape.norm_before_fc
    newer = None if plain else "norm_before_fc, or taps of its own: use llama.cpp b11434 or newer"
    return Layout(made.tensors, made.config | original_context(draft.shape), newer)


def portable(draft: Eagle3, target: Target, engine: str = "portable") -> Layout:
    """What vLLM, SGLang, llama.cpp and OpenVINO read alike: their default taps and no flag."""
    if draft.shape.taps != engines_taps(target):
        refuse_for(
            engine,
            [
                (
                    True,
                    f"OpenVINO GenAI taps {engines_taps(target)} whatever config.json says, and this draft "
                    f"reads {draft.shape.taps}",
                    f"method.network.taps={engines_taps(target)}".replace(" ", ""),
                )
            ],
        )
    made = sglang(draft, target, embedding=True)
    apart = {*FLAGS, TAPPED, "eagle_config", "num_aux_hidden_states"}
    kept = {name: value for name, value in made.config.items() if name not in apart}
    note = (
        "t2d is read by no engine, and embed_tokens by OpenVINO alone: others share the target's, its equal"
    )
    return Layout(made.tensors, kept | original_context(draft.shape), note)


LAYOUTS: dict[str, Callable[[Eagle3, Target], Layout]] = {
    "vllm": vllm,
    "sglang": sglang,
    "speculators": speculators,
    "tensorrt_llm": tensorrt_llm,
    "llama_cpp": llama_cpp,
    "openvino": partial(portable, engine="openvino"),
    "portable": portable,
}


def engines_taps(target: Target) -> list[int]:
    """What every engine taps where config.json names no layers."""
    return [2, target.num_layers // 2, target.num_layers - 3]


def needs(shape: Eagle3Shape, engine: str) -> str | None:
    """Older versions of vLLM and SGLang ignore these flags and serve another network without an error."""
    flags = [name for name in ("norm_before_fc", "fc_norm", "norm_output") if getattr(shape, name)]
    if len(shape.taps) != 3:
        flags.append(f"{len(shape.taps)} taps")
    return f"{', '.join(flags)}: use {engine} or newer" if flags else None


def layers_of(shape: Eagle3Shape, draft: Eagle3, target: Target) -> dict[str, Any]:
    return {**layer_config(shape, draft, target), "num_aux_hidden_states": len(shape.taps)}


def config(draft: Eagle3, target: Target) -> dict[str, Any]:
    """config.json for those that read a plain one."""
    shape = draft.shape
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layers_of(shape, draft, target),
        "draft_vocab_size": shape.draft_vocab_size,
        **{flag: getattr(shape, flag) for flag in FLAGS},
        TAPPED: shape.taps,
        "eagle_config": {"use_aux_hidden_state": True, TAPPED: [tap - 1 for tap in shape.taps]},
    }


def original_context(shape: Eagle3Shape) -> dict[str, int]:
    """llama.cpp's converter looks for llama3's original context beside the rotary parameters, not in them."""
    key = "original_max_position_embeddings"
    return {key: shape.rope_parameters[key]} if key in shape.rope_parameters else {}


# ---- refusals ----


def refuse(engine: str, draft: Eagle3) -> None:
    """Raises `CheckpointError` with every reason why `engine` would serve this draft as another network."""
    shape: Eagle3Shape = draft.shape
    everywhere = [*beyond_sglang(shape), *beyond_llama_cpp(shape), *beyond_openvino(shape)]
    beyond: dict[str, list[Reason]] = {
        "vllm": [],
        "sglang": beyond_sglang(shape),
        "speculators": beyond_speculators(shape),
        "tensorrt_llm": beyond_tensorrt_llm(shape),
        "llama_cpp": beyond_llama_cpp(shape),
        "openvino": everywhere,
        "portable": everywhere,
    }
    refuse_for(engine, [*unverifiable(shape), *beyond[engine]])


def beyond_sglang(shape: Eagle3Shape) -> list[Reason]:
    return [
        flagged(shape, "norm_before_residual", "SGLang never reads norm_before_residual"),
        (
            shape.layers > 1,
            "SGLang's versions name and wire a second layer differently (additional_layers, layers)",
            "method.network.layers=1",
        ),
        (len(shape.taps) == 1, "SGLang skips fc when there is one tap", "method.network.taps=null"),
        first_tap(shape, "SGLang"),
        *unlike_sglang(shape),
    ]


def beyond_speculators(shape: Eagle3Shape) -> list[Reason]:
    both = shape.norm_before_fc and shape.fc_norm
    return [
        (
            both,
            "the speculators library takes one of norm_before_fc and fc_norm",
            "method.network.norm_before_fc=false",
        )
    ]


def beyond_tensorrt_llm(shape: Eagle3Shape) -> list[Reason]:
    rotated = shape.rope_parameters.get("partial_rotary_factor")
    return [
        flagged(shape, "norm_before_residual", "TensorRT-LLM never reads norm_before_residual"),
        *(
            flagged(shape, name, f"not every release of TensorRT-LLM reads {name}")
            for name in ("norm_before_fc", "fc_norm", "norm_output")
        ),
        (
            shape.layers > 1,
            "TensorRT-LLM gives further layers another norm (hidden_norm)",
            "method.network.layers=1",
        ),
        (len(shape.taps) == 1, "TensorRT-LLM has no fc where there is one tap", "method.network.taps=null"),
        first_tap(shape, "TensorRT-LLM"),
        (
            rotated not in (None, 1.0),
            "TensorRT-LLM is not known to rotate a part of a Llama draft's head",
            None,
        ),
    ]


def beyond_llama_cpp(shape: Eagle3Shape) -> list[Reason]:
    kind, rotated = (shape.rope_parameters.get(key) for key in ("rope_type", "partial_rotary_factor"))
    return [
        (
            shape.layers > 1,
            "llama.cpp reads one layer as EAGLE-3's and two as a plain Llama",
            "method.network.layers=1",
        ),
        (len(shape.taps) != 3, "llama.cpp taps three layers", "method.network.taps=null"),
        flagged(shape, "fc_norm", "llama.cpp has no fc_norm"),
        flagged(shape, "norm_output", "llama.cpp has no norm_output"),
        (
            kind not in ("default", "linear", "llama3") or rotated not in (None, 1.0),
            "llama.cpp's converter is not known to keep this draft's rotary embedding",
            None,
        ),
    ]


def beyond_openvino(shape: Eagle3Shape) -> list[Reason]:
    """And SGLang knows no norm_before_residual, nor llama.cpp the others."""
    return [
        flagged(shape, "norm_before_fc", "OpenVINO has no norm_before_fc"),
        (
            shape.draft_vocab_size == shape.vocab_size,
            "OpenVINO asks for a d2t, which vLLM takes only with a smaller vocabulary",
            "method.network.draft_vocab_size=32000",
        ),
    ]


def flagged(shape: Eagle3Shape, name: str, why: str) -> Reason:
    return getattr(shape, name), why, f"method.network.{name}=false"


def first_tap(shape: Eagle3Shape, engine: str) -> Reason:
    why = f"{engine} names tapped layers by their outputs, and hidden_states[0] is none"
    return 0 in shape.taps, why, "method.network.taps=null"


# ---- commands ----


def serve(engine: str, target: str, folder: Path, draft_tokens: int) -> str:
    """The commands, line by line, that serve the target with this draft. vLLM reads a speculators folder."""
    match engine:
        case "vllm" | "speculators":
            return vllm_command("eagle3", target, folder, draft_tokens)
        case "sglang":
            return sglang_command("EAGLE3", target, folder, draft_tokens)
        case "tensorrt_llm":
            return tensorrt_command(target, folder, draft_tokens)
        case "llama_cpp":
            return llama_cpp_commands(target, folder, draft_tokens)
        case "openvino":
            return openvino.commands(target, str(folder.resolve()), draft_tokens, "--trust-remote-code")
        case _:
            readers = ("vllm", "sglang", "llama_cpp", "openvino")
            return "\n".join(serve(reader, target, folder, draft_tokens) for reader in readers)


def tensorrt_command(target: str, folder: Path, draft_tokens: int) -> str:
    """It names layers by their outputs, and takes them from its own settings alone."""
    taps = json.loads((folder / "config.json").read_text(encoding="utf-8"))[TAPPED]
    settings = {
        "decoding_type": "Eagle3",
        "max_draft_len": draft_tokens,
        "speculative_model": str(folder.resolve()),
        "eagle3_layers_to_capture": [tap - 1 for tap in taps],
    }
    options = shlex.quote(json.dumps({"speculative_config": settings}))
    return f"{shlex.join(['trtllm-serve', target])} --extra_llm_api_options <(echo {options})"


def llama_cpp_commands(target: str, folder: Path, draft_tokens: int) -> str:
    made = str(gguf.file(folder))
    server = ["llama-server", "-m", "target.gguf", "-md", made]
    server += ["--spec-type", "draft-eagle3", "--spec-draft-n-max", str(draft_tokens)]
    lines = [
        gguf.words(target, "target.gguf"),
        gguf.words(str(folder.resolve()), made, target),
        server,
    ]
    return "\n".join(shlex.join(words) for words in lines)


# ---- the check ----


@torch.no_grad()
def check(folder: Path, draft: Eagle3, target: Target) -> None:
    """Reads `folder` by names and config alone and compares it with `draft`; raises `RuntimeError` where they
    differ.

    In float32, over recurrent steps, from the first position and from a far one, with random taps and tokens.
    """
    trained: Eagle3 = in_float32(draft, target)
    reading = Eagle3Reading(folder, trained.embedding)
    check_tokens(folder, reading, target)
    check_embedding(reading, trained)
    check_layers(reading, trained, target)
    for start in starts(trained.shape, ROWS + STEPS):
        check_steps(reading, trained, start)
    reading.finish()


def check_layers(reading: Eagle3Reading, trained: Eagle3, target: Target) -> None:
    """What goes in and comes out, apart from the layers: taps, rotary fields, vocabulary, fc's order."""
    for engine, taps in reading.taps(target.num_layers).items():
        expect(
            taps == trained.shape.taps,
            f"{engine} would tap hidden_states {taps}, and the draft reads {trained.shape.taps}",
        )
    check_vocabulary(reading, trained)
    check_rope(reading.config, trained)
    check_length(reading.config, trained)
    check_order(reading, trained.fc.weight, [f"hidden_states[{tap}]" for tap in trained.taps])


def check_steps(reading: Eagle3Reading, trained: Eagle3, start: int) -> None:
    """Each step appends the state of the last row as the next row, as a chain is drafted."""
    taps, tokens = drawn(trained, start)
    positions = torch.arange(start, start + ROWS + STEPS)
    theirs, ours = reading.fuse(taps), trained.fuse(taps[None])[0]
    same(theirs, ours, "fused taps")
    for rows in range(ROWS, ROWS + STEPS):
        logits, state = reading.forward(theirs, tokens[:rows], positions[:rows])
        expected = trained(ours[None], tokens[None, :rows], positions[None, :rows])[0]
        where = f"at position {start + rows - 1}, draft step {rows - ROWS + 1}"
        same(state, expected, f"recurrent states {where}")
        same(logits, trained.logits(expected), f"logits {where}")
        theirs, ours = torch.cat([theirs, state[-1:]]), torch.cat([ours, expected[-1:]])


def drawn(trained: Eagle3, seed: int) -> tuple[Tensor, Tensor]:
    """Random taps [ROWS, n_taps * d] and token ids [ROWS + STEPS]."""
    generator = torch.Generator().manual_seed(seed)
    width = trained.shape.target_hidden_size * len(trained.taps)
    taps = torch.randn(ROWS, width, generator=generator)
    return taps, torch.randint(len(trained.embedding), (ROWS + STEPS,), generator=generator)
