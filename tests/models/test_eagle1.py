"""EAGLE-1's network against Hugging Face's own Llama layers, and its head, which is the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from configs.errors import ConfigError
from models import load_draft, save_draft
from models.eagle1 import Eagle1, Eagle1Shape, NetworkConfig
from models.target import Target
from tests.conftest import tiny_target

TOKENS = torch.tensor([[5, 9, 30, 7, 41]])
POSITIONS = torch.arange(5)[None]
SOME = [0, 2, 3, 9, 60]


def eagle(target: Target, vocabulary: list[int] | None = None, **network: Any) -> Eagle1:
    """Its gains are away from one and its weights away from small, so that leaving any of them out shows."""
    size = None if vocabulary is None else len(vocabulary)
    draft = Eagle1.build(NetworkConfig(draft_vocab_size=size, **network), target)
    if vocabulary is not None:
        draft.set_vocabulary(torch.tensor(vocabulary))
    draft.initialise(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
    return draft


def features_of(target: Target) -> Tensor:
    taps = target.forward(TOKENS, taps=(target.num_layers,)).taps
    assert taps is not None
    return taps


def by_llama(draft: Eagle1, target: Target, features: Tensor) -> Tensor:
    """f' [1, 5, d]: fc, then transformers' layers, of which the first has lost its input norm."""
    weights = draft.state_dict()
    hidden = torch.cat([target.embedding[TOKENS], features], -1) @ weights["fc.weight"].T
    hidden = hidden + weights.get("fc.bias", 0.0)
    rotation = target.decoder.rotary_emb(hidden, POSITIONS)
    mask = torch.full((5, 5), -torch.inf).triu(1)[None, None]
    for index in range(draft.shape.layers):
        layer = LlamaDecoderLayer(target.config, index)
        if index == 0:
            layer.input_layernorm = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
        own = {name.removeprefix(f"layers.{index}."): w for name, w in weights.items()}
        layer.load_state_dict({name: own[name] for name in layer.state_dict()})
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rotation)
    return hidden


@pytest.mark.parametrize("network", [{}, {"bias": True}, {"layers": 2}], ids=str)
def test_the_network_is_llama_s_layers(target: Target, network: dict[str, Any]) -> None:
    draft, features = eagle(target, **network), features_of(target)
    state = draft(draft.fuse(features), TOKENS, POSITIONS)
    torch.testing.assert_close(state, by_llama(draft, target, features), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(draft.logits(state), target.lm_head(state))


def test_the_same_weights_over_the_whole_vocabulary(target: Target) -> None:
    draft, states = eagle(target, SOME), features_of(target)
    whole = draft.over_whole_vocabulary()
    assert whole.full_vocabulary and whole.over_whole_vocabulary() is whole
    torch.testing.assert_close(whole.logits(states), target.lm_head(states))
    torch.testing.assert_close(whole.logits(states)[..., draft.draft_ids], draft.logits(states))
    assert torch.equal(
        whole(states, TOKENS, POSITIONS),
        draft(states, TOKENS, POSITIONS),
    )


def test_sizes_are_the_target_s_unless_they_are_given(target: Target) -> None:
    shape = Eagle1Shape.resolve(NetworkConfig(), target)
    assert (shape.layers, shape.num_heads, shape.num_kv_heads, shape.intermediate_size) == (1, 4, 2, 64)
    assert (shape.tap, shape.draft_vocab_size) == (4, 64)
    assert Eagle1Shape.from_dict(shape.to_dict()) == shape
    with pytest.raises(ConfigError, match="layers=0"):
        Eagle1.build(NetworkConfig(layers=0), target)


def test_names_are_the_authors_and_embedding_and_head_are_not_saved(target: Target) -> None:
    layer = {f"self_attn.{x}_proj" for x in "qkvo"} | {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    first = {f"layers.0.{name}.weight" for name in (*layer, "post_attention_layernorm")}
    assert set(eagle(target).state_dict()) == {"fc.weight", *first}
    second = {f"layers.1.{name}.weight" for name in (*layer, "input_layernorm", "post_attention_layernorm")}
    deep = eagle(target, SOME, layers=2, bias=True)
    assert set(deep.state_dict()) == {"fc.weight", "fc.bias", "d2t", "t2d", *first, *second}
    assert len({id(weight) for weight in deep.parameters()}) == 2 + 8 + 9  # no module is another's


def test_true_features_give_the_target_s_logits(target: Target) -> None:
    features = features_of(target)
    theirs = target.forward(TOKENS).logits
    assert theirs is not None
    torch.testing.assert_close(eagle(target).logits(features), theirs)
    torch.testing.assert_close(eagle(target, SOME).logits(features), theirs[..., SOME])


def test_the_head_s_bias_is_taken_along(target: Target) -> None:
    target.head.bias = nn.Parameter(torch.arange(64.0))
    assert eagle(target, SOME).logits(torch.zeros(1, 32)).tolist() == [[0, 2, 3, 9, 60]]


def test_the_head_follows_the_vocabulary(target: Target) -> None:
    draft, features = eagle(target, SOME), features_of(target)
    others = [1, 4, 5, 6, 7]
    draft.set_vocabulary(torch.tensor(others))
    torch.testing.assert_close(draft.logits(features), target.lm_head(features)[..., others])
    draft.load_state_dict(eagle(target, SOME).state_dict())
    torch.testing.assert_close(draft.logits(features), target.lm_head(features)[..., SOME])


def test_only_the_draft_s_own_weights_are_trained(target: Target) -> None:
    draft = eagle(target, SOME, layers=2, bias=True)
    draft.logits(draft(draft.fuse(features_of(target)), TOKENS, POSITIONS)).square().sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in draft.parameters())
    assert target.head.weight.grad is None and not draft._heads[1].weight.requires_grad


def test_weights_and_vocabulary_are_needed(target: Target) -> None:
    draft = Eagle1.build(NetworkConfig(draft_vocab_size=5, bias=True), target)
    assert all(weight.isnan().all() for weight in draft.parameters())
    with pytest.raises(RuntimeError, match="no weights yet"):
        draft.fuse(torch.zeros(1, 5, 32))
    draft.initialise(0)
    assert draft.fc.bias.tolist() == [0.0] * 32
    with pytest.raises(RuntimeError, match="set_vocabulary"):
        draft.logits(torch.zeros(1, 32))


@pytest.mark.parametrize("vocabulary", [None, SOME])
def test_a_saved_draft_comes_back(tmp_path: Path, vocabulary: list[int] | None) -> None:
    target = tiny_target(dtype=torch.bfloat16)
    draft = eagle(target, vocabulary, bias=True)
    save_draft(tmp_path / "draft", draft, target, {})
    loaded = load_draft(tmp_path / "draft", target)
    features = features_of(target)
    assert loaded.shape == draft.shape and loaded.taps == (4,)
    state = loaded(loaded.fuse(features), TOKENS, POSITIONS)
    assert state.dtype == torch.bfloat16
    again = draft.to(torch.bfloat16)
    torch.testing.assert_close(
        again.logits(again(again.fuse(features), TOKENS, POSITIONS)), loaded.logits(state)
    )
