"""A tiny target and a tiny draft that every room's tests share: random, on the CPU, made in memory."""

from __future__ import annotations

import string
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from models.eagle3 import Eagle3, NetworkConfig
from models.target import Target

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
CHARACTERS = "\n " + string.ascii_lowercase + string.digits + ".,?!:'-" + string.ascii_uppercase


def tiny_tokenizer(vocab: int = 64) -> PreTrainedTokenizerFast:
    """One token per character, with ChatML. Known characters round-trip; spare ids are `<spare N>`."""
    words = [*SPECIAL, *CHARACTERS][:vocab]
    words += [f"<spare {i}>" for i in range(len(words), vocab)]
    tokenizer: Any = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )


def tiny_model(
    vocab: int = 64,
    hidden: int = 32,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> LlamaForCausalLM:
    """A random Llama whose weights are large enough (std 0.4) for logits that are far from flat."""
    settings: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
        "initializer_range": 0.4,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(LlamaConfig(**{**settings, **config}))
    return model.to(dtype)


def tiny_target(
    vocab: int = 64,
    hidden: int = 32,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Target:
    """`tiny_model` with `tiny_tokenizer`; `config` are further `LlamaConfig` fields. End of text is id 2."""
    model = tiny_model(vocab, hidden, layers, heads, kv_heads, seed, dtype, **config)
    return Target.wrap(model, tiny_tokenizer(vocab), name="tiny")


def tiny_draft(target: Target, seed: int = 0, vocabulary: list[int] | None = None, **network: Any) -> Eagle3:
    """An initialised draft for `target`; `network` are `NetworkConfig` fields.

    The draft vocabulary is `vocabulary`, else the lower three quarters of the ids; `draft_vocab_size=None` is
    all of them.
    """
    ids = torch.tensor(vocabulary) if vocabulary is not None else torch.arange(3 * target.vocab_size // 4)
    draft = Eagle3.build(NetworkConfig(**{"draft_vocab_size": len(ids), **network}), target)
    if not draft.full_vocabulary:
        draft.set_vocabulary(ids)
    draft.initialise(seed, target)
    return draft


@pytest.fixture
def target() -> Target:
    return tiny_target()


@pytest.fixture
def draft(target: Target) -> Eagle3:
    return tiny_draft(target)
