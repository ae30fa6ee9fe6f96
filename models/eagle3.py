"""The EAGLE-3 draft network (Li et al. 2025, arXiv 2503.01840): the network alone, no losses and no decoding.

    g = fc(cat(taps))                                             hidden states of the target, fused
    a = input_layernorm(embedding(token));  b = hidden_norm(g)
    h = g + attention(cat(a, b))                                  layer 0; further layers are plain Llama's
    h = h + mlp(post_attention_layernorm(h))                      the g of the next draft step
    logits = lm_head(norm(h))                                     over the draft vocabulary

Row j pairs the features of position j with the token at j + 1. Which rows meet is the caller's business
(`train/alignment.py`, `decoding/drafters/eagle3.py`), and so is how rows attend to each other (`attend`). The
token embedding is the target's own and frozen. Weights are NaN until initialised or loaded; using them before
that raises. Tensor names are vLLM's (`layers.{i}.*`); `models/export/` renames for others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from configs.errors import CheckpointError, ConfigError, TargetError
from models.target import Target

# (layer, q [B, H, T, hd], k [B, Hkv, T, hd], v [B, Hkv, T, hd]) -> [B, H, T, hd]; q and k come rotated.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

INIT_STD = 0.02  # Llama's initializer_range


@dataclass
class NetworkConfig:
    """What a user may set (`method.network`); None takes the target's value."""

    layers: int = 1
    draft_vocab_size: int | None = 32000  # None: the target's whole vocabulary, with no d2t
    taps: list[int] | None = None  # HF hidden_states indices, ascending; None: [2, N // 2, N - 3] of N layers
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    norm_before_residual: bool = False  # the residual of layer 0 is hidden_norm(g) instead of g
    norm_before_fc: bool = False  # one RMSNorm over the concatenated taps (`input_norm`)
    fc_norm: bool = False  # one RMSNorm per tap
    norm_output: bool = False  # the next step is fed norm(h) instead of h (vLLM's meaning of the key)


@dataclass
class Eagle3Shape:
    """A network with everything resolved: enough to build it again without its target's configuration."""

    layers: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # of the target's head
    draft_vocab_size: int  # equal to vocab_size: no d2t and t2d
    taps: list[int]
    rope_parameters: dict[str, Any]  # HF's: rope_type, rope_theta, partial_rotary_factor, factor, ...
    max_position_embeddings: int
    rms_norm_eps: float
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @classmethod
    def resolve(cls, network: NetworkConfig, target: Target) -> Eagle3Shape:
        """`network` for `target`. Raises `ConfigError` for sizes that cannot work together."""
        config = target.config
        num_heads = network.num_heads or config.num_attention_heads
        own_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        shape = cls(
            layers=network.layers,
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            intermediate_size=network.intermediate_size or own_intermediate_size(target),
            num_heads=num_heads,
            num_kv_heads=network.num_kv_heads or own_kv_heads,
            head_dim=getattr(config, "head_dim", None) or target.hidden_size // config.num_attention_heads,
            vocab_size=target.vocab_size,
            draft_vocab_size=network.draft_vocab_size or target.vocab_size,
            taps=default_taps(target.num_layers) if network.taps is None else list(network.taps),
            rope_parameters=flat_rope(config),
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
            norm_before_residual=network.norm_before_residual,
            norm_before_fc=network.norm_before_fc,
            fc_norm=network.fc_norm,
            norm_output=network.norm_output,
        )
        shape.check(target.num_layers)
        return shape

    def check(self, target_layers: int) -> None:
        """Raises `ConfigError` with the mend for sizes that cannot work together."""
        where = "method.network"
        if self.layers < 1:
            raise ConfigError(f"{where}.layers={self.layers}: a draft needs at least 1 layer.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{where}: {self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads "
                "evenly. Set num_kv_heads to a divisor of num_heads."
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(
                f"{where}.draft_vocab_size={self.draft_vocab_size} is larger than the target's vocabulary of "
                f"{self.vocab_size}. Set a smaller one, or null to draft over the whole vocabulary."
            )
        ascending = all(low < high for low, high in zip(self.taps, self.taps[1:], strict=False))
        if not self.taps or not ascending or self.taps[0] < 0 or self.taps[-1] >= target_layers:
            raise ConfigError(
                f"{where}.taps={self.taps}: taps are ascending HF hidden_states indices from 0 to "
                f"{target_layers - 1} (engines capture them in layer order). Set null for "
                f"{default_taps(target_layers)}."
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Eagle3Shape:
        """The inverse of `to_dict`; a missing or an unknown key is a `CheckpointError`."""
        expected = {field.name for field in fields(cls)}
        if set(values) != expected:
            raise CheckpointError(
                f"The draft's network has the wrong keys: missing {sorted(expected - set(values))}, unknown "
                f"{sorted(set(values) - expected)}. It was written by another version of Leadout: train or "
                "convert it again."
            )
        return cls(**values)


class Eagle3(nn.Module):
    """The network. Parameters are float32 masters; `to(dtype)` for decoding."""

    method = "eagle3"

    def __init__(self, shape: Eagle3Shape, embedding: Tensor) -> None:
        """embedding: [V, d], the target's; shared, frozen, and outside the state dict."""
        super().__init__()
        self.shape = shape
        # A plain attribute: no parameter to train or save, and `to(dtype)` leaves the target's bits alone.
        self.embedding = embedding.detach()
        self.ready = False
        d, eps = shape.hidden_size, shape.rms_norm_eps
        width = shape.target_hidden_size * len(shape.taps)
        self.input_norm = RMSNorm(width, eps) if shape.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(shape.target_hidden_size, eps) for _ in shape.taps)
            if shape.fc_norm
            else None
        )
        self.fc = linear(width, d)
        self.layers = nn.ModuleList(Layer(shape, index) for index in range(shape.layers))
        self.norm = RMSNorm(d, eps)
        self.lm_head = linear(d, shape.draft_vocab_size)
        self.rotary = Rotary(shape)
        if not self.full_vocabulary:
            self.d2t = nn.Buffer(torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
            self.t2d = nn.Buffer(torch.zeros(shape.vocab_size, dtype=torch.bool))
        self.register_load_state_dict_post_hook(loaded)

    @classmethod
    def build(cls, network: NetworkConfig, target: Target) -> Eagle3:
        """A network for `target` on its device, float32, all weights NaN and the draft vocabulary unset."""
        return cls(Eagle3Shape.resolve(network, target), target.embedding).to(target.device)

    @classmethod
    def from_config(cls, network: dict[str, Any], target: Target) -> Eagle3:
        """The network that `Eagle3Shape.to_dict` described, to load weights into, or a `CheckpointError`."""
        shape = Eagle3Shape.from_dict(network)
        if (shape.vocab_size, shape.target_hidden_size) != (target.vocab_size, target.hidden_size):
            raise CheckpointError(
                f"The draft was made for a target with {shape.vocab_size} tokens and hidden size "
                f"{shape.target_hidden_size}; {target.name} has {target.vocab_size} and "
                f"{target.hidden_size}. Name the target it was trained for."
            )
        return cls(shape, target.embedding).to(target.device)

    @torch.no_grad()
    def initialise(self, seed: int, target: Target | None = None) -> None:
        """Fresh weights, the same on every device: matrices normal with std 0.02, norms one.

        With `target`, the head starts as the target's own head on the draft vocabulary (once that is set) and
        `norm` as the gain of the target's final norm, so that logits start at the scale they are to reach.
        """
        generator = torch.Generator().manual_seed(seed)
        for weight in self.parameters():
            drawn = torch.randn(weight.shape, generator=generator) * INIT_STD
            weight.copy_(drawn if weight.dim() > 1 else torch.ones(weight.shape))
        if target is not None and self.vocabulary_set:
            self.lm_head.weight.copy_(target.head.weight[self.draft_ids])
            gain = target.final_gain()
            if gain is not None:
                self.norm.weight.copy_(gain)
        self.ready = True

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(self.shape.taps)

    @property
    def full_vocabulary(self) -> bool:
        return self.shape.draft_vocab_size == self.shape.vocab_size

    @property
    def vocabulary_set(self) -> bool:
        return self.full_vocabulary or bool(self.t2d.any())

    @property
    def draft_ids(self) -> Tensor:
        """int64 [Vd]: the target id of each draft id."""
        if not self.vocabulary_set:
            raise RuntimeError(
                "The draft vocabulary is not set: call set_vocabulary, or load a checkpoint, first."
            )
        indices = torch.arange(self.shape.draft_vocab_size, device=self.lm_head.weight.device)
        return indices if self.full_vocabulary else indices + self.d2t

    def set_vocabulary(self, ids: Tensor) -> None:
        """Sets the target ids that can be drafted: int64 [Vd], ascending. d2t holds offsets, id - i."""
        size = self.shape.draft_vocab_size
        ids = ids.to(self.lm_head.weight.device, torch.int64)
        if ids.shape != (size,) or (ids.diff() <= 0).any() or ids[0] < 0 or ids[-1] >= self.shape.vocab_size:
            raise ValueError(f"A draft vocabulary is {size} ascending ids below {self.shape.vocab_size}.")
        if self.full_vocabulary:
            return
        self.d2t.copy_(ids - torch.arange(size, device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True

    def fuse(self, taps: Tensor) -> Tensor:
        """g [B, T, d] of the target's tapped states [B, T, n_taps * d_target], in any floating dtype."""
        self.require_ready()
        taps = taps.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm is not None:
            parts = taps.split(self.shape.target_hidden_size, dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(taps)

    def forward(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Attend | None = None
    ) -> Tensor:
        """The state [B, T, d] to take logits of and to feed to the next draft step.

        hidden: [B, T, d], `fuse` of the taps or the state of the step before. tokens: [B, T] long target ids.
        positions: [B, T] long, for the rotation. attend: None is plain causal attention over the T rows.
        """
        self.require_ready()
        emb = F.embedding(tokens, self.embedding).to(hidden.dtype)
        rotation = self.rotary(positions)
        for layer in self.layers:
            hidden = layer(hidden, emb, rotation, attend or causal)
        return self.norm(hidden) if self.shape.norm_output else hidden

    def logits(self, state: Tensor) -> Tensor:
        """[..., Vd] over the draft vocabulary, of states [..., d] that `forward` gave."""
        self.require_ready()
        return self.lm_head(state if self.shape.norm_output else self.norm(state))

    def require_ready(self) -> None:
        """A flag, because looking for NaN in every forward would cost as much as the forward."""
        if not self.ready:
            raise RuntimeError(
                "The draft has no weights yet (they are NaN): call initialise, or load a checkpoint."
            )


Draft = Eagle3  # how other rooms find a method's network: `models.draft_class`


class Layer(nn.Module):
    """Layer 0 attends over cat(embedding, hidden), which is 2d wide; the others are plain Llama layers."""

    def __init__(self, shape: Eagle3Shape, index: int) -> None:
        super().__init__()
        d, eps = shape.hidden_size, shape.rms_norm_eps
        self.first = index == 0
        self.norm_before_residual = shape.norm_before_residual
        self.input_layernorm = RMSNorm(d, eps)  # of the embedding in layer 0, of the hidden state above it
        if self.first:
            self.hidden_norm = RMSNorm(d, eps)
        self.self_attn = Attention(shape, index, inputs=2 * d if self.first else d)
        self.post_attention_layernorm = RMSNorm(d, eps)
        self.mlp = MLP(d, shape.intermediate_size)

    def forward(self, hidden: Tensor, emb: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[B, T, d] of hidden and emb [B, T, d]; rotation: cos and sin [B, T, rotated dims]."""
        residual = hidden
        if self.first:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            inputs = torch.cat([self.input_layernorm(emb), normed], dim=-1)
        else:
            inputs = self.input_layernorm(hidden)
        hidden = residual + self.self_attn(inputs, rotation, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    def __init__(self, shape: Eagle3Shape, index: int, inputs: int) -> None:
        super().__init__()
        self.index = index
        self.head_dim = shape.head_dim
        self.q_proj = linear(inputs, shape.num_heads * shape.head_dim)
        self.k_proj = linear(inputs, shape.num_kv_heads * shape.head_dim)
        self.v_proj = linear(inputs, shape.num_kv_heads * shape.head_dim)
        self.o_proj = linear(shape.num_heads * shape.head_dim, shape.hidden_size)

    def forward(self, inputs: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = (
            project(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, heads, T, hd]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = attend(self.index, rotate(q, *rotation), rotate(k, *rotation), v)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, d: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = linear(d, inner)
        self.up_proj = linear(d, inner)
        self.down_proj = linear(inner, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.Module):
    """As Llama's: in float32, back in the input's dtype before the gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), torch.nan))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Rotary:
    """cos and sin of the target's own rotary embedding (Su et al. 2021), scaled kinds and partial rotation
    included.

    Not a module: frequencies stay float32 whatever the network is cast to, and are never saved.
    """

    def __init__(self, shape: Eagle3Shape) -> None:
        self.rope = dict(shape.rope_parameters)
        self.kind: str = self.rope["rope_type"]
        if self.kind != "default" and self.kind not in ROPE_INIT_FUNCTIONS:
            raise TargetError(
                f"The target's rotary embedding is of type {self.kind!r}, which no draft can take over. "
                f"Known types: default, {', '.join(ROPE_INIT_FUNCTIONS)}."
            )
        self.config: Any = PreTrainedConfig()
        self.config.hidden_size = shape.hidden_size
        self.config.head_dim = shape.head_dim
        self.config.num_attention_heads = shape.num_heads
        self.config.max_position_embeddings = shape.max_position_embeddings
        self.config.rope_parameters = self.rope
        self.frequencies, self.scaling = self.compute(None)

    def compute(self, length: int | None) -> tuple[Tensor, float]:
        """Inverse frequencies [rotated dims / 2] and the factor on cos and sin, for sequences of `length`."""
        if self.kind != "default":
            return ROPE_INIT_FUNCTIONS[self.kind](self.config, None, seq_len=length)
        dims = int(self.config.head_dim * self.rope.get("partial_rotary_factor", 1.0))
        return 1.0 / self.rope["rope_theta"] ** (torch.arange(0, dims, 2).float() / dims), 1.0

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, T] long -> cos, sin, each float32 [B, T, rotated dims]."""
        if self.kind in ("dynamic", "longrope"):  # the frequencies depend on how long the sequence has become
            self.frequencies, self.scaling = self.compute(int(positions.max()) + 1)
        self.frequencies = self.frequencies.to(positions.device)
        angles = positions[..., None].float() * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, T, hd], its first dims rotated by cos and sin [B, T, rotated dims], the rest kept."""
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    turned, passed = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-high, low], dim=-1) * sin
    return torch.cat([turned, passed], dim=-1) if passed.shape[-1] else turned


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Row t attends to rows up to t of the same call."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear map without bias whose weight is NaN, made without drawing from the global random state."""
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(torch.full((outputs, inputs), torch.nan))
    return layer


def loaded(draft: Any, incompatible: Any) -> None:
    """After `load_state_dict`: a NaN (never trained, or not in the file) leaves the draft unusable."""
    draft.ready = not any(bool(weight.isnan().any()) for weight in draft.parameters())
    if draft.vocabulary_set and not draft.full_vocabulary:
        members = draft.t2d.nonzero().flatten()
        if not torch.equal(members, draft.draft_ids):
            raise CheckpointError(
                "The draft's d2t and t2d name different ids (d2t holds offsets: id = i + d2t[i], ascending). "
                "Save or convert the draft again."
            )


def default_taps(layers: int) -> list[int]:
    """[2, N // 2, N - 3], the paper's low, middle and high layers; shallow targets get what they have."""
    if layers >= 7:
        return [2, layers // 2, layers - 3]
    return sorted({1, layers // 2, layers - 1} & set(range(layers))) or [0]


def own_intermediate_size(target: Target) -> int:
    size = getattr(target.config, "intermediate_size", None)
    if size is None:
        raise ConfigError(
            f"Target {target.name} has no intermediate_size for the draft to take over. Set "
            f"method.network.intermediate_size, for example {4 * target.hidden_size}."
        )
    return size


def flat_rope(config: Any) -> dict[str, Any]:
    """The target's rope parameters as one dict: those of its full-attention layers, where kinds differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = dict(rope.get("full_attention", rope))
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", 10000.0)
    return rope
