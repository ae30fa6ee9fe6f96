"""A small draft as a plain `transformers` folder, which every engine here reads as a model of its own.

What a plain model cannot say is written out: an embedding shared with the target becomes a copy of it, a
factored head is multiplied out, and a head over a reduced vocabulary is written over the whole one, so that
the same tokens are proposed (`layout.whole_head`). The native checkpoint is plain too, but fills such a head
with the target's rows, which were never trained with the rest and may be proposed.

Rotary parameters stand in the new form (`rope_parameters`) and in the old (`rope_theta`, `rope_scaling`): the
converters of llama.cpp and older engines read the latter.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.errors import CheckpointError
from models.export import gguf, openvino
from models.export.agreement import TOLERANCE, expect, same_choices
from models.export.layout import Layout, whole_head
from models.small import Factored, Small, causal_model, without_progress_bars
from models.target import Target, first_line

ROWS = 8  # positions compared, from the first on and from a far one
FAR = 5000  # where a wrong rotary table shows
ROUNDED = 2**-7  # what writing a factored head's product in bfloat16 changes, as a share of the largest logit


def plain(draft: Small, target: Target) -> Layout:
    """The draft under the names of transformers' own class, in its dtype, with that class's config."""
    tied = draft.shape.head == "tied" and draft.full_vocabulary
    dtype = str(dtype_of(draft)).removeprefix("torch.")
    architecture = draft.shape.architecture | {"tie_word_embeddings": tied, "dtype": dtype}
    with torch.device("meta"):
        model = causal_model(architecture)
    names = {module: name for name, module in model.named_modules()}
    decoder, table = names[model.get_decoder()], names[model.get_input_embeddings()]
    tensors = {f"{decoder}.{name}": weight.detach() for name, weight in draft.decoder.state_dict().items()}
    tensors[f"{table}.weight"] = draft.decoder.get_input_embeddings().weight.detach()
    if not tied:
        tensors[f"{names[model.get_output_embeddings()]}.weight"] = head(draft)
    values = json.loads(model.config.to_json_string())
    values.pop("_model_name_or_path", None)
    config = values | {"architectures": [type(model).__name__], "dtype": dtype, "torch_dtype": dtype}
    generation = {
        "bos_token_id": target.tokenizer.bos_token_id,
        "eos_token_id": sorted(target.eos_ids),
        "pad_token_id": target.tokenizer.pad_token_id,
    }
    return Layout(
        tensors, config | old_rope(config), grown(draft), files={"generation_config.json": generation}
    )


LAYOUTS: dict[str, Callable[[Small, Target], Layout]] = dict.fromkeys(
    ("vllm", "sglang", "llama_cpp", "openvino", "transformers"), plain
)


def dtype_of(draft: Small) -> torch.dtype:
    return next(draft.parameters()).dtype


def head(draft: Small) -> Tensor:
    """[V, d]"""
    rows = draft.head_rows().detach()
    if isinstance(draft.head, Factored):  # multiplied in float32, and rounded once
        rows = (draft.head.up.weight.detach().float() @ draft.head.down.weight.detach().float()).to(rows)
    if draft.full_vocabulary:
        return rows.clone() if draft.head is None else rows
    return whole_head(rows, draft.draft_ids, draft.shape.vocab_size)


def old_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters as transformers 4 wrote them; nothing where layers have parameters of their
    own."""
    fields = config.get("rope_parameters") or {}
    if "rope_theta" not in fields:
        return {}
    scaling = {name: fields[name] for name in fields if name not in ("rope_theta", "partial_rotary_factor")}
    plain = fields.get("rope_type", "default") == "default"
    return {"rope_theta": fields["rope_theta"], "rope_scaling": None if plain else scaling}


def grown(draft: Small) -> str | None:
    """What a user should know about a head that grew."""
    shape, found = draft.shape, []
    if not draft.full_vocabulary:
        found.append(
            f"a head over {shape.draft_vocab_size} tokens is written over all {shape.vocab_size}, with the "
            "same proposals at a larger cost (to train what fits, set method.network.draft_vocab_size=null)"
        )
    if shape.head == "factored":
        found.append("a factored head is written multiplied out, at a larger cost (method.network.head=own)")
    return "; ".join(found) or None


def refuse(engine: str, draft: Small) -> None:
    """Nothing is refused: what a plain model cannot say is written out (`grown`), and which families an
    engine serves is for it to say."""


def serve(engine: str, target: str, folder: Path, draft_tokens: int) -> str:
    """The commands, line by line, that serve the target with this draft. SGLang counts the root among its
    draft tokens."""
    draft = str(folder.resolve())
    match engine:
        case "vllm":
            settings = {"method": "draft_model", "model": draft, "num_speculative_tokens": draft_tokens}
            return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(settings)])
        case "sglang":
            words = ["python", "-m", "sglang.launch_server", "--model-path", target]
            words += ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", draft]
            words += ["--speculative-num-steps", str(draft_tokens), "--speculative-eagle-topk", "1"]
            return shlex.join([*words, "--speculative-num-draft-tokens", str(draft_tokens + 1)])
        case "llama_cpp":
            server = ["llama-server", "-m", "target.gguf", "-md", str(gguf.file(folder))]
            server += ["--spec-type", "draft-simple", "--spec-draft-n-max", str(draft_tokens)]
            lines = [gguf.words(target, "target.gguf"), gguf.words(draft, str(gguf.file(folder))), server]
        case "openvino":
            return openvino.commands(target, draft, draft_tokens)
        case _:
            lines = [["python", "-c", assisted_program(target, draft, draft_tokens)]]
    return "\n".join(shlex.join(words) for words in lines)


def assisted_program(target: str, draft: str, draft_tokens: int) -> str:
    return (
        "from transformers import AutoModelForCausalLM as Model, AutoTokenizer as Tokenizer; "
        f"tokenizer, model = Tokenizer.from_pretrained({target!r}), Model.from_pretrained({target!r}); "
        f"draft = Model.from_pretrained({draft!r}); "
        f"draft.generation_config.num_assistant_tokens = {draft_tokens}; "
        'draft.generation_config.num_assistant_tokens_schedule = "constant"; '
        "draft.generation_config.assistant_confidence_threshold = 0.0; "
        'inputs = tokenizer("Once upon a time", return_tensors="pt"); '
        "print(tokenizer.decode(model.generate(**inputs, assistant_model=draft, max_new_tokens=64)[0]))"
    )


@torch.no_grad()
def check(folder: Path, draft: Small, target: Target) -> None:
    """Loads `folder` with transformers alone and compares its logits with `draft`'s, from the first position
    and from a far one; raises `RuntimeError` where they differ, and `CheckpointError` for files that cannot
    be read. In float32, on tokens drawn at random."""
    trained = Small(draft.shape, target.embedding.to("cpu", torch.float32)).eval()
    trained.load_state_dict(draft.state_dict())
    model, tokenizer = loaded(folder)
    vocabulary = target.tokenizer.get_vocab()
    expect(tokenizer.get_vocab() == vocabulary, "its tokenizer is not the target's")
    expect(model.config.vocab_size == trained.shape.vocab_size, f"it knows {model.config.vocab_size} tokens")
    tokens = torch.randint(trained.shape.vocab_size, (1, ROWS), generator=torch.Generator().manual_seed(0))
    furthest = getattr(model.config, "max_position_embeddings", FAR + ROWS) - ROWS
    rounded = isinstance(draft.head, Factored) and dtype_of(draft) is not torch.float32
    for start in (0, max(min(FAR, furthest), 0)):
        positions = torch.arange(start, start + ROWS)[None]
        theirs = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        ours = trained.logits(trained(tokens, positions))
        where = f"the logits from position {start} on"
        same_choices(theirs, trained.draft_ids, ours, where, ROUNDED if rounded else TOLERANCE)


def loaded(folder: Path) -> tuple[Any, Any]:
    """(model in float32, tokenizer), with nothing missing from the files and nothing beyond."""
    try:
        with without_progress_bars():
            found: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True
            )
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is no plain model: {first_line(error)}") from error
    model, report = found
    for kind, what in (("missing", "lacks"), ("unexpected", "has what no reader asks for:")):
        names = sorted(report[f"{kind}_keys"])
        expect(not names, f"it {what} {', '.join(names[:3])}")
    return model.eval(), tokenizer
