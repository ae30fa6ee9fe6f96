"""The network against a second writing of research formulas, its flags, its rotation and its vocabulary."""

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, PhiConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from configs.errors import CheckpointError, ConfigError, TargetError
from models.eagle3 import Eagle3, Eagle3Shape, NetworkConfig, default_taps
from models.layers import Rotary, rotate
from models.target import Target
from tests.conftest import tiny_draft, tiny_target

TOKENS = torch.tensor([[5, 9, 30, 7, 41]])
POSITIONS = torch.arange(5)[None]
FLAGS = ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def taps_of(target: Target, draft: Eagle3) -> Tensor:
    taps = target.forward(TOKENS, taps=draft.taps).taps
    assert taps is not None
    return taps


def vary(draft: Eagle3) -> None:
    """Gains away from one and weights away from small, so that leaving any of them out shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + (weight.dim() == 1))


# A second writing: one head at a time, one row at a time, straight from the formulas.


def rms(x: Tensor, gain: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


def turned(x: Tensor, position: int, theta: float = 10000.0) -> Tensor:
    """x [hd] with each pair (x[i], x[i + hd/2]) turned by position * theta^(-2i/hd)."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = torch.tensor(position * theta ** (-2 * i / len(x)))
        out[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
        out[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
    return out


def layer_by_hand(w: dict[str, Tensor], i: int, hidden: Tensor, emb: Tensor, early: bool) -> Tensor:
    """hidden, emb: [T, d]; 4 heads of 8 dims sharing 2 key/value heads."""
    p = f"layers.{i}."
    residual = hidden
    if i == 0:
        normed = rms(hidden, w[p + "hidden_norm.weight"])
        residual = normed if early else hidden
        x = torch.cat([rms(emb, w[p + "input_layernorm.weight"]), normed], -1)
    else:
        x = rms(hidden, w[p + "input_layernorm.weight"])
    q, k, v = (x @ w[f"{p}self_attn.{name}_proj.weight"].T for name in "qkv")
    rows = []
    for t in range(len(x)):
        heads = []
        for h in range(4):
            mine, shared = slice(8 * h, 8 * h + 8), slice(8 * (h // 2), 8 * (h // 2) + 8)
            keys = torch.stack([turned(k[s, shared], s) for s in range(t + 1)])
            weights = torch.softmax(keys @ turned(q[t, mine], t) / 8**0.5, 0)
            heads.append(weights @ v[: t + 1, shared])
        rows.append(torch.cat(heads))
    hidden = residual + torch.stack(rows) @ w[p + "self_attn.o_proj.weight"].T
    x = rms(hidden, w[p + "post_attention_layernorm.weight"])
    gate, up = x @ w[p + "mlp.gate_proj.weight"].T, x @ w[p + "mlp.up_proj.weight"].T
    return hidden + (gate * torch.sigmoid(gate) * up) @ w[p + "mlp.down_proj.weight"].T


def network_by_hand(draft: Eagle3, taps: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
    """(state, logits) of one sequence; taps [T, 3 d]."""
    w, shape = draft.state_dict(), draft.shape
    if shape.norm_before_fc:
        taps = rms(taps, w["input_norm.weight"])
    if shape.fc_norm:
        taps = torch.cat([rms(taps[:, 32 * i : 32 * i + 32], w[f"fc_norm.{i}.weight"]) for i in range(3)], -1)
    state = taps @ w["fc.weight"].T
    for i in range(shape.layers):
        state = layer_by_hand(w, i, state, embedding[TOKENS[0]], shape.norm_before_residual)
    normed = rms(state, w["norm.weight"])
    return (normed if shape.norm_output else state), normed @ w["lm_head.weight"].T


@pytest.mark.parametrize(
    "network",
    [
        {},
        {"layers": 2},
        {"layers": 3},
        {"norm_before_residual": True},
        {"norm_before_fc": True},
        {"fc_norm": True},
        {"norm_output": True},
        {
            "layers": 2,
            "norm_before_residual": True,
            "norm_before_fc": True,
            "fc_norm": True,
            "norm_output": True,
        },
    ],
    ids=str,
)
def test_the_network_is_the_formulas(target: Target, network: dict[str, Any]) -> None:
    draft = tiny_draft(target, **network)
    vary(draft)
    taps = taps_of(target, draft)
    state = draft(draft.fuse(taps), TOKENS, POSITIONS)
    expected_state, expected_logits = network_by_hand(draft, taps[0], target.embedding)
    assert torch.allclose(state[0], expected_state, rtol=1e-4, atol=1e-3)
    assert torch.allclose(draft.logits(state)[0], expected_logits, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("flag", FLAGS)
def test_each_flag_changes_the_state(target: Target, flag: str) -> None:
    network: dict[str, Any] = {flag: True}
    plain, flagged = tiny_draft(target), tiny_draft(target, **network)
    flagged.load_state_dict({**flagged.state_dict(), **plain.state_dict()})
    taps = taps_of(target, plain)
    states = [draft(draft.fuse(taps), TOKENS, POSITIONS) for draft in (plain, flagged)]
    assert not torch.allclose(states[0], states[1], atol=1e-2)


def test_norm_output_changes_the_state_and_not_the_logits(target: Target) -> None:
    plain, flagged = tiny_draft(target), tiny_draft(target, norm_output=True)
    taps = taps_of(target, plain)
    states = [draft(draft.fuse(taps), TOKENS, POSITIONS) for draft in (plain, flagged)]
    assert torch.equal(states[1], plain.norm(states[0]))
    assert torch.equal(plain.logits(states[0]), flagged.logits(states[1]))


def test_attend_decides_how_rows_attend(target: Target) -> None:
    draft = tiny_draft(target, layers=2)
    hidden = draft.fuse(taps_of(target, draft))
    seen: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []

    def own_row_only(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((layer, tuple(q.shape), tuple(k.shape)))
        return v.repeat_interleave(2, dim=1)  # attention over one key is that key's value

    state = draft(hidden, TOKENS, POSITIONS, own_row_only)
    assert seen == [(0, (1, 4, 5, 8), (1, 2, 5, 8)), (1, (1, 4, 5, 8), (1, 2, 5, 8))]
    for t in range(5):
        alone = draft(hidden[:, t : t + 1], TOKENS[:, t : t + 1], POSITIONS[:, t : t + 1])
        assert torch.allclose(state[:, t : t + 1], alone, atol=1e-5)


def test_attend_receives_keys_at_their_positions(target: Target) -> None:
    """Two chunks joined by a cache of keys and values equal one causal pass."""
    draft = tiny_draft(target)
    vary(draft)
    hidden = draft.fuse(taps_of(target, draft))
    whole = draft(hidden, TOKENS, POSITIONS)
    kept: dict[str, Tensor] = {}

    def remember(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.update(k=k, v=v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def look_back(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = torch.cat([kept["k"], k], 2), torch.cat([kept["v"], v], 2)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)  # one new row sees all

    draft(hidden[:, :4], TOKENS[:, :4], POSITIONS[:, :4], remember)
    last = draft(hidden[:, 4:], TOKENS[:, 4:], POSITIONS[:, 4:], look_back)
    assert torch.allclose(last, whole[:, 4:], rtol=1e-4, atol=1e-3)


# Weights


def test_weights_are_nan_and_unusable_until_initialised(target: Target) -> None:
    draft = Eagle3.build(NetworkConfig(draft_vocab_size=48, fc_norm=True, norm_before_fc=True), target)
    assert all(weight.isnan().all() for weight in draft.parameters())
    hidden = torch.zeros(1, 5, 32)
    with pytest.raises(RuntimeError, match="no weights yet"):
        draft.fuse(torch.zeros(1, 5, 96))
    with pytest.raises(RuntimeError, match="no weights yet"):
        draft(hidden, TOKENS, POSITIONS)
    with pytest.raises(RuntimeError, match="no weights yet"):
        draft.logits(hidden)
    draft.initialise(0)
    assert not any(weight.isnan().any() for weight in draft.parameters())
    assert draft.logits(hidden).shape == (1, 5, 48)


def test_loading_decides_whether_weights_can_be_used(target: Target, draft: Eagle3) -> None:
    other = Eagle3.build(NetworkConfig(draft_vocab_size=48), target)
    other.load_state_dict(draft.state_dict())
    assert torch.equal(other.draft_ids, draft.draft_ids)
    hidden = torch.ones(1, 5, 32)
    assert torch.equal(other(hidden, TOKENS, POSITIONS), draft(hidden, TOKENS, POSITIONS))
    other.load_state_dict({**draft.state_dict(), "fc.weight": torch.full((32, 96), torch.nan)})
    with pytest.raises(RuntimeError, match="no weights yet"):
        other(hidden, TOKENS, POSITIONS)


def test_initialise_follows_the_seed_alone(target: Target) -> None:
    torch.manual_seed(1)
    first = tiny_draft(target, seed=3).state_dict()
    torch.manual_seed(2)
    again, other = tiny_draft(target, seed=3).state_dict(), tiny_draft(target, seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


def test_building_leaves_the_global_random_state_alone(target: Target) -> None:
    before = torch.get_rng_state()
    tiny_draft(target)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_head_starts_as_the_targets_rows(target: Target) -> None:
    with torch.no_grad():
        target.model.model.norm.weight.fill_(1.5)
    draft = tiny_draft(target, vocabulary=[3, 10, 60])
    assert torch.equal(draft.lm_head.weight, target.head.weight[[3, 10, 60]])
    # The norm starts as the target's, so a state equal to the target's own gives the target's own logits.
    state = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(0))
    expected = target.lm_head(target.decoder.norm(state))[..., [3, 10, 60]]
    assert torch.allclose(draft.logits(state), expected, rtol=1e-4, atol=1e-4)


def test_the_embedding_is_the_targets_frozen_and_not_saved(target: Target, draft: Eagle3) -> None:
    assert draft.embedding.data_ptr() == target.embedding.data_ptr()
    assert not any("embed" in name for name in draft.state_dict())
    draft.to(torch.bfloat16)
    assert draft.embedding.dtype == torch.float32
    assert draft(torch.zeros(1, 5, 32).bfloat16(), TOKENS, POSITIONS).dtype == torch.bfloat16


def test_every_weight_of_the_network_learns(target: Target) -> None:
    draft = tiny_draft(target, layers=2, fc_norm=True, norm_before_fc=True)
    draft.logits(draft(draft.fuse(taps_of(target, draft)), TOKENS, POSITIONS)).square().sum().backward()
    still = [
        name for name, weight in draft.named_parameters() if weight.grad is None or not weight.grad.any()
    ]
    assert still == []


def test_tensor_names_are_vllms(target: Target) -> None:
    names = set(tiny_draft(target, layers=2, fc_norm=True, norm_before_fc=True).state_dict())
    layer = {f"self_attn.{x}_proj" for x in "qkvo"} | {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    layer |= {"input_layernorm", "post_attention_layernorm"}
    expected = {f"layers.{i}.{name}.weight" for i in (0, 1) for name in layer}
    expected |= {
        "layers.0.hidden_norm.weight",
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "input_norm.weight",
    }
    expected |= {f"fc_norm.{i}.weight" for i in range(3)} | {"d2t", "t2d"}
    assert names == expected


# Draft vocabulary


def test_d2t_holds_offsets_and_t2d_membership(target: Target) -> None:
    draft = tiny_draft(target, vocabulary=[0, 2, 3, 9])
    assert draft.d2t.tolist() == [0, 1, 1, 6]  # 0-0, 2-1, 3-2, 9-3
    assert draft.t2d.nonzero().flatten().tolist() == [0, 2, 3, 9]
    assert draft.draft_ids.tolist() == [0, 2, 3, 9]
    assert draft.t2d.shape == (64,)
    draft.set_vocabulary(torch.tensor([1, 2, 3, 4]))
    assert draft.t2d.nonzero().flatten().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "ids", [[0, 2, 3], [0, 3, 2, 9], [0, 2, 2, 9], [0, 2, 3, 64], [-1, 2, 3, 9]], ids=str
)
def test_an_impossible_vocabulary_is_refused(target: Target, ids: list[int]) -> None:
    draft = Eagle3.build(NetworkConfig(draft_vocab_size=4), target)
    with pytest.raises(ValueError, match="4 ascending ids below 64"):
        draft.set_vocabulary(torch.tensor(ids))


def test_an_unset_vocabulary_is_not_guessed(target: Target) -> None:
    draft = Eagle3.build(NetworkConfig(draft_vocab_size=4), target)
    draft.initialise(0, target)
    with pytest.raises(RuntimeError, match="set_vocabulary"):
        _ = draft.draft_ids


def test_the_whole_vocabulary_needs_no_map(target: Target) -> None:
    draft = tiny_draft(target, draft_vocab_size=None)
    assert draft.full_vocabulary
    assert draft.draft_ids.tolist() == list(range(64))
    assert not {"d2t", "t2d"} & set(draft.state_dict())


def test_a_map_that_contradicts_itself_is_refused(target: Target) -> None:
    state = tiny_draft(target, vocabulary=[0, 2, 3, 9]).state_dict()
    state["d2t"] = torch.tensor([0, 2, 3, 9])  # absolute ids, which some toolkits write by mistake
    with pytest.raises(CheckpointError, match="d2t and t2d name different ids"):
        tiny_draft(target, vocabulary=[0, 2, 3, 9]).load_state_dict(state)


# Shapes


@pytest.mark.parametrize(
    ("layers", "taps"),
    [(32, [2, 16, 29]), (30, [2, 15, 27]), (7, [2, 3, 4]), (4, [1, 2, 3]), (2, [1]), (1, [0])],
)
def test_default_taps(layers: int, taps: list[int]) -> None:
    assert default_taps(layers) == taps


def test_sizes_default_to_the_targets() -> None:
    target = tiny_target(intermediate_size=48, head_dim=16, max_position_embeddings=96, rms_norm_eps=1e-5)
    shape = Eagle3Shape.resolve(NetworkConfig(draft_vocab_size=None), target)
    assert (shape.hidden_size, shape.intermediate_size, shape.head_dim) == (32, 48, 16)
    assert (shape.num_heads, shape.num_kv_heads, shape.draft_vocab_size) == (4, 2, 64)
    assert (shape.max_position_embeddings, shape.rms_norm_eps) == (96, 1e-5)
    assert Eagle3Shape.from_dict(shape.to_dict()) == shape
    own = NetworkConfig(draft_vocab_size=8, num_heads=2, num_kv_heads=1, intermediate_size=40, taps=[0, 3])
    shape = Eagle3Shape.resolve(own, target)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (2, 1, 16)
    draft = Eagle3.build(own, target)
    assert draft.fc.weight.shape == (32, 64)
    assert draft.state_dict()["layers.0.self_attn.q_proj.weight"].shape == (32, 64)  # [2 heads * 16, 2 * 32]


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"layers": 0}, "layers=0"),
        ({"num_heads": 3}, "3 attention heads cannot share 2"),
        ({"draft_vocab_size": 65}, "draft_vocab_size=65 is larger than the target's vocabulary of 64"),
        ({"taps": [1, 4]}, r"taps=\[1, 4\].*from 0 to 3"),
        ({"taps": [2, 1]}, r"ascending"),
        ({"taps": []}, r"taps=\[\]"),
    ],
    ids=str,
)
def test_impossible_networks_are_refused(target: Target, network: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Eagle3.build(NetworkConfig(**{"draft_vocab_size": 48, **network}), target)


# Rotation


def test_rotation_without_scaling_is_the_targets(target: Target, draft: Eagle3) -> None:
    positions = torch.tensor([[0, 3, 400]])
    cos, sin = draft.rotary(positions)
    expected = target.decoder.rotary_emb(torch.zeros(1), positions)
    assert torch.equal(cos, expected[0])
    assert torch.equal(sin, expected[1])


@pytest.mark.parametrize(
    "rope",
    [
        LLAMA3,
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
@pytest.mark.parametrize("last", [20, 200])  # within and beyond the lengths at which dynamic kinds change
def test_scaled_rotations_are_the_targets(rope: dict[str, Any], last: int) -> None:
    target = tiny_target(rope_parameters=rope, max_position_embeddings=128)
    draft = tiny_draft(target)
    positions = torch.tensor([[0, 7, last]])
    cos, sin = draft.rotary(positions)
    expected = target.decoder.rotary_emb(torch.zeros(1), positions)
    assert torch.allclose(cos, expected[0], atol=1e-6)
    assert torch.allclose(sin, expected[1], atol=1e-6)
    plain_cos, _ = tiny_draft(tiny_target()).rotary(positions)
    assert not torch.allclose(cos, plain_cos, atol=1e-3) or (rope["rope_type"], last) == ("dynamic", 20)


def test_partial_rotation_turns_the_first_dims_only(draft: Eagle3) -> None:
    shape = Eagle3Shape.from_dict(
        {
            **draft.shape.to_dict(),
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        }
    )
    phi = PhiConfig(
        hidden_size=64,
        num_attention_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )
    positions = torch.tensor([[1, 5, 90]])
    x = torch.randn(1, 4, 3, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = Rotary(shape)(positions)
    expected_cos, expected_sin = PhiRotaryEmbedding(phi)(x, positions)
    turned, _ = apply_rotary_pos_emb(x[..., :8], x[..., :8], expected_cos, expected_sin)
    assert cos.shape == (1, 3, 8)
    assert torch.allclose(rotate(x, cos, sin), torch.cat([turned, x[..., 8:]], -1), atol=1e-6)


def test_full_rotation_is_hfs(draft: Eagle3) -> None:
    positions = torch.tensor([[0, 2, 9]])
    q = torch.randn(1, 4, 3, 8, generator=torch.Generator().manual_seed(0))
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=512)
    expected, _ = apply_rotary_pos_emb(q, q, *LlamaRotaryEmbedding(config)(q, positions))
    assert torch.allclose(rotate(q, *draft.rotary(positions)), expected, atol=1e-6)


def test_rotation_stays_float32_when_the_network_is_cast(draft: Eagle3) -> None:
    positions = torch.tensor([[500]])
    before = draft.rotary(positions)[0]
    draft.to(torch.bfloat16)
    assert torch.equal(draft.rotary(positions)[0], before)


def test_an_unknown_rotation_is_refused(draft: Eagle3) -> None:
    draft.shape.rope_parameters = {"rope_type": "spiral", "rope_theta": 10000.0}
    with pytest.raises(TargetError, match="spiral"):
        Rotary(draft.shape)


def test_a_draft_can_start_from_the_targets_layers() -> None:
    target = tiny_target(layers=4)
    draft: Any = Eagle3.build(NetworkConfig(layers=2, draft_vocab_size=None), target)
    draft.initialise(0, target, start_layer=-1)
    fresh: Any = Eagle3.build(NetworkConfig(layers=2, draft_vocab_size=None), target)
    fresh.initialise(0, target)

    first, second = cast(Any, target.layers[2]), cast(Any, target.layers[3])
    d = target.hidden_size
    q = draft.layers[0].self_attn.q_proj.weight  # reads cat(embedding, hidden)
    assert torch.equal(q[:, d:], first.self_attn.q_proj.weight)
    assert torch.equal(q[:, :d], fresh.layers[0].self_attn.q_proj.weight[:, :d])
    assert torch.equal(draft.layers[0].mlp.down_proj.weight, first.mlp.down_proj.weight)
    assert torch.equal(draft.layers[1].self_attn.k_proj.weight, second.self_attn.k_proj.weight)
    assert draft.layers[1].mlp.up_proj.weight.data_ptr() != second.mlp.up_proj.weight.data_ptr()


@pytest.mark.parametrize("layer", [4, -5, 0])
def test_a_layer_that_the_target_does_not_have_is_no_start(layer: int) -> None:
    target = tiny_target(layers=4)
    draft = Eagle3.build(NetworkConfig(layers=2, draft_vocab_size=None), target)
    with pytest.raises(ConfigError, match=f"start_layer={layer}: .* has 4 layers"):
        draft.initialise(0, target, start_layer=layer)


def test_another_size_is_no_start() -> None:
    target = tiny_target(layers=4)
    draft = Eagle3.build(NetworkConfig(draft_vocab_size=None, intermediate_size=24), target)
    with pytest.raises(ConfigError, match=r"mlp\.gate_proj is .* and the target's"):
        draft.initialise(0, target, start_layer=-1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers", 0),
        ("num_heads", 0),
        ("num_kv_heads", -1),
        ("intermediate_size", 0),
        ("draft_vocab_size", 0),
    ],
)
def test_sizes_below_one_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"method.network.{name}={value} must be at least 1"):
        Eagle3.build(NetworkConfig(**{"draft_vocab_size": None, name: value}), tiny_target())
