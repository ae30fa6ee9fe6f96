"""Targets and drafts of every kind of architecture: tiny random ones of transformers, in the real decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from configs.errors import TargetError, TrafficError
from configs.schema import DecodeConfig
from configs.schema import Proposal as Mode
from decoding.cache import KVCache
from decoding.decoder import Batch, Decoder, Request
from decoding.drafters.plain import PlainDrafter
from decoding.drafters.small import SmallReader
from decoding.growth import ChainGrowth, DynamicGrowth
from decoding.reader import NetworkDrafter
from decoding.sequence import Params
from decoding.tree import TokenTree
from models.target import Target
from tests.conftest import tiny_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
KINDS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "gemma": GemmaConfig(**SIZES),
    "gemma3": Gemma3TextConfig(
        **SIZES, sliding_window=64, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3, eos_token_id=2
    ),
    "mixtral": MixtralConfig(**SIZES, **EXPERTS, sliding_window=None),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, **EXPERTS, moe_intermediate_size=32, decoder_sparse_step=1),
}
# 8 - 11 - 13 - 15
#   \ 12 - 14
TREE = TokenTree([8, 11, 12, 13, 14, 15], [-1, 0, 0, 1, 2, 3])
PATHS = [[8], [8, 11], [8, 12], [8, 11, 13], [8, 12, 14], [8, 11, 13, 15]]
PROMPTS = [[5, 9, 30, 7], [4] * 11, [3, 60]]


def made(kind: str, seed: int = 0) -> Target:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(KINDS[kind], attn_implementation="sdpa")
    return Target.wrap(model.float(), tiny_tokenizer(), name=kind)


def params(**settings: Any) -> Params:
    return Params.of(DecodeConfig(**{"draft_tokens": 3, "max_new_tokens": 12, **settings}), seed=0)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_tree_nodes_are_as_their_root_paths(kind: str) -> None:
    target = made(kind)
    batch = Batch(Decoder(target, PlainDrafter(), batch_size=3), [Request(p, params()) for p in PROMPTS])
    batch.admit()
    logits = target.forward(cache=batch.cache, **batch.rows([TREE, TokenTree.chain(8), TREE])).logits
    assert logits is not None
    for row, prompt in ((0, PROMPTS[0]), (2, PROMPTS[2])):
        for node, path in enumerate(PATHS):
            alone = target.model(torch.tensor([[*prompt, *path]]), use_cache=False).logits
            assert (logits[row, node] - alone[0, -1]).abs().max() < 1e-4
    for decoding, path in zip(batch.live, [(0, 1, 3, 5), (0,), (0, 2, 4)], strict=True):
        start = len(decoding.prompt)
        batch.cache.commit(decoding.slot, start, path)
        fresh = KVCache(target.num_layers)
        tokens = [*decoding.prompt, *(TREE.tokens[node] for node in path)]
        target.forward(torch.tensor([tokens]), cache=fresh)
        for mine, theirs in ((batch.cache.keys, fresh.keys), (batch.cache.values, fresh.values)):
            assert mine is not None
            assert theirs is not None
            kept = mine[:, decoding.slot, :, : len(tokens)]
            assert (kept - theirs[:, 0, :, : len(tokens)]).abs().max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("growth", [ChainGrowth(Mode.sampled), DynamicGrowth(nodes=8, width=3)])
def test_greedy_is_generate_alone_and_in_a_batch(kind: str, growth: Any) -> None:
    """The target drafts for itself in its own architecture, and another seed's model, which is mostly
    wrong."""
    target = made(kind)
    right = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        right.append(out[0, len(prompt) :].tolist())
    for draft in (target, made(kind, seed=1)):
        drafter = NetworkDrafter(SmallReader(draft, target.eos_ids, target.vocab_size), growth)
        for batch_size in (1, 3):
            decoder = Decoder(target, drafter, batch_size)
            done = decoder.generate_all([Request(prompt, params()) for prompt in PROMPTS])
            assert [generation.tokens for generation in done] == right
            if draft is target:
                rounds = [played for generation in done for played in generation.rounds]
                assert sum(played.accepted for played in rounds) > 1.5 * len(rounds)


def test_text_beyond_a_sliding_window_is_refused() -> None:
    decoder = Decoder(made("gemma3"), PlainDrafter())
    assert decoder.generate([5] * 52, params()).finish is not None
    with pytest.raises(TrafficError, match="sliding window"):
        decoder.generate([5] * 53, params())


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        OPTConfig(
            vocab_size=64,
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,  # its table has two rows more
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_text_beyond_a_table_of_positions_is_refused(config: Any) -> None:
    target = Target.wrap(AutoModelForCausalLM.from_config(config), tiny_tokenizer())
    decoder = Decoder(target, PlainDrafter())
    assert target.window == 64
    assert decoder.generate([5] * 52, params()).finish is not None
    with pytest.raises(TrafficError, match="table of positions"):
        decoder.generate([5] * 53, params())


def test_recurrent_architecture_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(
        MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, eos_token_id=2)
    )
    with pytest.raises(TargetError, match=r"cannot drop rejected tokens|no decoder"):
        Target.wrap(model, tiny_tokenizer(), name="mamba")
