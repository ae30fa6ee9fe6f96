"""The block network against a second writing of its formulas, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.errors import ConfigError
from models import load_draft, save_draft
from models.dflash import DFlash, DFlashShape, NetworkConfig, spread_taps
from models.layers import rotate
from models.target import Target

READ = torch.tensor([[7, 5, 9, 12]])  # tokens the target has read, at positions 0 to 3
ANCHOR, AT = torch.tensor([[30]]), torch.tensor([[4]])


def dflash(target: Target, seed: int = 0, **network: Any) -> DFlash:
    config = {"draft_vocab_size": None, "layers": 2, "block_size": 3, **network}
    draft = DFlash.build(NetworkConfig(**config), target)
    draft.initialise(seed, target)
    return draft


def vary(draft: DFlash) -> None:
    """Gains away from one and weights away from small, so that leaving any of them out shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + (weight.dim() == 1))


def taps_of(target: Target, draft: DFlash) -> Tensor:
    taps = target.forward(READ, taps=draft.taps).taps
    assert taps is not None
    return taps


def states(target: Target, draft: DFlash) -> Tensor:
    """[block_size, d] of the block behind READ."""
    context = draft.context(taps_of(target, draft), torch.arange(4)[None])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (torch.cat(pair, 2) for pair in zip(context[layer], (k, v), strict=True))
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)  # all sees all

    return draft(ANCHOR, AT, attend)[0, 0]


# A second writing: one head at a time, one row at a time, straight from the formulas.


def rms(x: Tensor, gain: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


def turned(draft: DFlash, x: Tensor, position: int) -> Tensor:
    return rotate(x[None, None, None], *draft.rotary(torch.tensor([[position]])))[0, 0, 0]


def by_formulas(target: Target, draft: DFlash) -> Tensor:
    w = draft.state_dict()
    head, heads, group = draft.shape.head_dim, draft.shape.num_heads, 2
    features = [rms(w["fc.weight"] @ tap, w["hidden_norm.weight"]) for tap in taps_of(target, draft)[0]]
    block = [draft.embedding[30], *[w["mask_embedding"][0]] * (draft.shape.block_size - 1)]
    for i in range(draft.shape.layers):
        layer = {name.removeprefix(f"layers.{i}."): v for name, v in w.items()}
        q, k, v, o = (layer[f"self_attn.{x}_proj.weight"] for x in "qkvo")
        q_norm, k_norm = (layer[f"self_attn.{x}_norm.weight"] for x in "qk")
        normed = [rms(x, layer["input_layernorm.weight"]) for x in block]
        keyed = [*features, *normed]  # positions 0, 1, ... in a row: the block's begin at 4
        after = []
        for row, x in enumerate(normed):
            mixed = []
            for h in range(heads):
                own, shared = (
                    slice(h * head, (h + 1) * head),
                    slice(h // group * head, (h // group + 1) * head),
                )
                query = turned(draft, rms((q @ x)[own], q_norm), 4 + row)
                keys = [turned(draft, rms((k @ y)[shared], k_norm), j) for j, y in enumerate(keyed)]
                scores = torch.stack([query @ key for key in keys]) / head**0.5
                values = torch.stack([(v @ y)[shared] for y in keyed])
                mixed.append(scores.softmax(0) @ values)
            x = block[row] + o @ torch.cat(mixed)
            y = rms(x, layer["post_attention_layernorm.weight"])
            inner = F.silu(layer["mlp.gate_proj.weight"] @ y) * (layer["mlp.up_proj.weight"] @ y)
            after.append(x + layer["mlp.down_proj.weight"] @ inner)
        block = after
    return torch.stack(block)


@pytest.mark.parametrize("layers", [1, 2])
def test_states_are_the_formulas(target: Target, layers: int) -> None:
    draft = dflash(target, layers=layers)
    vary(draft)
    with torch.no_grad():
        found, expected = states(target, draft), by_formulas(target, draft)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        logits = rms(expected, draft.norm.weight) @ draft.lm_head.weight.T
        torch.testing.assert_close(draft.logits(found), logits, rtol=1e-3, atol=1e-3)


def test_blocks_of_other_sizes_are_other_networks(target: Target) -> None:
    """The rows see each other in both directions, so rows behind matter."""
    three, four = dflash(target, block_size=3), dflash(target, block_size=4)
    for draft in (three, four):
        vary(draft)
    assert not torch.allclose(states(target, three)[1], states(target, four)[1], atol=1e-3)


# Weights


def test_weights_are_nan_and_unusable_until_initialised(target: Target) -> None:
    draft = DFlash.build(NetworkConfig(draft_vocab_size=48), target)
    assert all(weight.isnan().all() for weight in draft.parameters())
    with pytest.raises(RuntimeError, match="no weights yet"):
        draft.context(torch.zeros(1, 4, 3 * 32), torch.arange(4)[None])


def test_the_head_starts_as_the_targets_rows(target: Target) -> None:
    draft = DFlash.build(NetworkConfig(draft_vocab_size=3), target)
    draft.set_vocabulary(torch.tensor([3, 10, 60]))
    draft.initialise(0, target)
    assert torch.equal(draft.lm_head.weight, target.head.weight[[3, 10, 60]])
    assert draft.mask_embedding.abs().max() < 0.1


def test_layers_can_start_as_the_targets(target: Target) -> None:
    draft = DFlash.build(NetworkConfig(layers=2, draft_vocab_size=None), target)
    draft.initialise(0, target, start_layer=-1)
    weights, theirs = draft.state_dict(), target.decoder.state_dict()
    for ours, layer in ((0, 2), (1, 3)):
        for name in ("self_attn.k_proj.weight", "mlp.down_proj.weight"):
            assert torch.equal(weights[f"layers.{ours}.{name}"], theirs[f"layers.{layer}.{name}"])


def test_every_weight_learns_and_the_embedding_is_the_targets(target: Target) -> None:
    draft = dflash(target)
    draft.logits(states(target, draft)).square().sum().backward()
    assert [name for name, w in draft.named_parameters() if w.grad is None or not w.grad.any()] == []
    assert draft.embedding.data_ptr() == target.embedding.data_ptr()
    layer = {f"self_attn.{x}_proj" for x in "qkvo"} | {"self_attn.q_norm", "self_attn.k_norm"}
    layer |= {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    layer |= {"input_layernorm", "post_attention_layernorm"}
    expected = {f"layers.{i}.{name}.weight" for i in (0, 1) for name in layer}
    expected |= {"fc.weight", "hidden_norm.weight", "norm.weight", "lm_head.weight", "mask_embedding"}
    assert set(draft.state_dict()) == expected


def test_a_checkpoint_gives_the_same_draft(target: Target, tmp_path: Path) -> None:
    draft = dflash(target)
    save_draft(tmp_path / "draft", draft, target, {})
    loaded = load_draft(tmp_path / "draft", target)
    assert isinstance(loaded, DFlash) and loaded.drafted == 2
    assert torch.equal(states(target, loaded), states(target, draft))


# Shapes


@pytest.mark.parametrize(
    ("layers", "taps"),
    # The outputs of layers 1, 9, 17, 25, 33 of 36; of 1, 8, 14, 20, 27 of 30. One more by HF's count.
    [(36, [2, 10, 18, 26, 34]), (30, [2, 9, 15, 21, 28]), (7, [2, 3, 4]), (4, [1, 2, 3]), (2, [1])],
)
def test_default_taps(layers: int, taps: list[int]) -> None:
    assert spread_taps(layers) == taps


def test_sizes_default_to_the_targets(target: Target) -> None:
    shape = DFlashShape.resolve(NetworkConfig(draft_vocab_size=None), target)
    assert (shape.hidden_size, shape.head_dim, shape.draft_vocab_size) == (32, 8, 64)
    assert (shape.layers, shape.block_size) == (5, 16)
    assert DFlashShape.from_dict(shape.to_dict()) == shape


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"layers": 0}, "layers=0"),
        ({"block_size": 1}, "block_size=1.*at least 2"),
        ({"draft_vocab_size": 65}, "draft_vocab_size=65 is larger"),
        ({"taps": [1, 4]}, r"taps=\[1, 4\].*from 0 to 3"),
        ({"taps": [2, 1]}, "ascending"),
        ({"taps": [1, 1]}, "ascending"),
        ({"taps": []}, r"taps=\[\]"),
    ],
    ids=str,
)
def test_impossible_networks_are_refused(target: Target, network: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DFlash.build(NetworkConfig(**{"draft_vocab_size": 48, **network}), target)
