"""Medusa-2 (Cai et al. 2024, §2.2 and §2.3): heads and target trained together, so that the target's hidden
states come to say more of what follows.

    loss = D_0 + heads_weight * sum_k head_decay^k D_k

D_k is head k's divergence as in Medusa-1, on the hidden states of the target in training; D_0 is that of the
target in training from the target as it was, which keeps it what it was (the paper's self-distillation: the
teacher is the model with its adapter off). The target learns through a low-rank adapter (LoRA, Hu et al.
2021) on all linear layers below its head. It stands in a twin of the target that shares its weights, so the
features and laws of the target as it was stay what they are.

Two stages, as the paper does it for targets whose training data is at hand: `heads_from` names a draft of
Medusa-1, whose heads this run goes on with. What comes out is a draft and the target it belongs to, the
adapter merged in.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from configs.errors import ConfigError
from data.tokens import TokenRow
from data.vocabulary import trained_counts
from models import find_draft, load_draft
from models.medusa import Medusa, NetworkConfig
from models.packing import PackedForward
from models.target import Target
from train.alignment import TABLE, align
from train.batches import Batch
from train.objectives import Loss
from train.objectives.medusa import MedusaObjective, meet, prepare
from train.objectives.medusa import ObjectiveConfig as MedusaConfig
from train.supervision import Supervision, Teacher, Term


@dataclass
class ObjectiveConfig(MedusaConfig):
    heads_weight: float = 0.2  # of the heads' losses beside the target's own
    heads_from: str | None = None  # a Medusa-1 draft's folder, or its run's, to go on with; None: new heads
    rank: int = 32  # of the adapter
    alpha: int = 16  # the adapter's product is scaled by alpha / rank
    dropout: float = 0.05  # of what the adapter reads
    adapter_rate: float = 0.25  # the adapter's learning rate, as a share of the heads'

    def __post_init__(self) -> None:
        super().__post_init__()
        where = "method.objective"
        if self.rank < 1:
            raise ConfigError(
                f"{where}.rank={self.rank} must be at least 1. To train heads alone, set method=medusa."
            )
        for name in ("heads_weight", "alpha", "adapter_rate"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{where}.{name}={getattr(self, name)} must be positive.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"{where}.dropout={self.dropout} must lie in [0, 1).")


class Adapted:
    """A twin of a target that shares all of its weights, with an adapter that starts as nothing."""

    def __init__(self, target: Target, settings: ObjectiveConfig, seed: int) -> None:
        try:
            from peft import LoraConfig, inject_adapter_in_model
            from peft.tuners.lora import LoraLayer
        except ModuleNotFoundError as error:
            raise ConfigError(
                "method=medusa2 adapts the target with the library peft, which is not installed: "
                "pip install 'leadout[joint]'. Or train heads alone with method=medusa."
            ) from error
        self.target = target
        self.decoder = twin(target.decoder)
        lora = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules=linear_layers(self.decoder),
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            inject_adapter_in_model(lora, self.decoder)
        self.layers: dict[str, Any] = {
            name: layer for name, layer in self.decoder.named_modules() if isinstance(layer, LoraLayer)
        }

    def trained(self) -> nn.ModuleList:
        """The adapter's own modules, float32, in the order of the layers."""
        parts = [
            part
            for layer in self.layers.values()
            for part in (layer.lora_A, layer.lora_B, layer.lora_dropout)
        ]
        return nn.ModuleList(parts).float()

    def hidden(self, tokens: Tensor) -> Tensor:
        """Last hidden states [B, T, d] of tokens [B, T] padded on the right, with gradients."""
        return self.decoder(input_ids=tokens, use_cache=False).last_hidden_state

    @torch.no_grad()
    def merged(self) -> Target:
        """The target with the adapter in its weights, which it shares otherwise."""
        model = twin(self.target.model)
        decoder = model.get_decoder()
        for name, layer in self.layers.items():
            linear = decoder.get_submodule(name)
            [adapter] = layer.active_adapters
            moved = linear.weight + layer.get_delta_weight(adapter).to(linear.weight.dtype)
            linear.weight = nn.Parameter(moved, requires_grad=False)
        return Target.wrap(model, self.target.tokenizer, self.target.name)


def twin(module: Any) -> Any:
    """A copy of `module` with the same parameters and buffers, not copies of them, and no packed layers."""
    shared = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in shared}
    packed = [layer.__dict__["forward"] for layer in module.modules() if is_packed(layer)]
    memo |= {id(forward): forward for forward in packed}
    made = copy.deepcopy(module, memo)
    for layer in made.modules():
        if is_packed(layer):
            del layer.forward
    return made


def is_packed(layer: nn.Module) -> bool:
    return isinstance(layer.__dict__.get("forward"), PackedForward)


def linear_layers(decoder: nn.Module) -> list[str]:
    found = [name for name, layer in decoder.named_modules() if isinstance(layer, nn.Linear)]
    if not found:
        raise ConfigError(
            f"method=medusa2 adapts linear layers, and {type(decoder).__name__} has none (GPT-2's are of "
            "another kind). Train heads alone with method=medusa."
        )
    return found


class Medusa2Objective(MedusaObjective):
    """The first term is the target in training, the others are the heads."""

    def __init__(
        self, draft: Medusa, target: Target, settings: ObjectiveConfig, coverage: float, seed: int
    ) -> None:
        super().__init__(draft, target, settings, coverage)
        self.own = TABLE["medusa"](0)  # the target itself is head 0
        self.first_label = self.own.label
        self.settings, self.seed = settings, seed
        self.adapted = Adapted(target, settings, seed)
        self.adapter = self.adapted.trained()
        whole = torch.arange(target.vocab_size, device=target.device)
        self.preservation = Supervision(Teacher(target, whole), [1.0], settings)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"adapter_parameters": sum(p.numel() for p in self.adapter.parameters())}

    def begin(self, step: int) -> None:
        torch.manual_seed((self.seed << 20) + step)  # what dropout draws from

    def rate(self, name: str) -> float:
        return self.settings.adapter_rate if name.startswith("adapter.") else 1.0

    def beside(self, target: Target) -> Target:
        return self.adapted.merged()

    def positions(self, batch: Batch) -> Tensor:
        own = align(self.own, batch.tokens, batch.mask).mask.sum()
        return torch.cat([own[None], super().positions(batch)])

    def forward(self, batch: Batch, positions: Tensor) -> Loss:
        batch = replace(batch, taps=self.adapted.hidden(batch.tokens))
        own = self.preserve(batch, positions[:1])
        heads = super().forward(batch, positions[1:])
        metrics = {name: joined(found, heads.metrics[name]) for name, found in own.metrics.items()}
        return Loss(own.value + self.settings.heads_weight * heads.value, metrics)

    def preserve(self, batch: Batch, positions: Tensor) -> Loss:
        """How far the target in training is from the target as it was."""
        _, states, [met] = meet(batch, [self.own])
        term = Term(states, met.mask, met.teacher, met.labels)
        return self.preservation.loss(batch, [term], positions, self.preservation.teacher.logits, [])


def joined(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Sums and counts of the terms of both."""
    return torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])


def build(
    network: NetworkConfig, settings: ObjectiveConfig, target: Target, rows: Sequence[TokenRow], seed: int
) -> Medusa2Objective:
    """Heads for `target`, new or those of `settings.heads_from`, and their objective."""
    draft = Medusa.build(network, target)
    if settings.heads_from is None:
        coverage = prepare(draft, network, target, rows)
    else:
        go_on_with(draft, settings.heads_from, target)
        counts = trained_counts(rows, target.vocab_size)
        coverage = float(counts[draft.draft_ids.cpu()].sum() / max(counts.sum(), 1))
    return Medusa2Objective(draft, target, settings, coverage, seed)


def go_on_with(draft: Medusa, heads_from: str, target: Target) -> None:
    """Gives `draft` the weights and the vocabulary of the Medusa-1 draft in `heads_from`."""
    folder = find_draft(heads_from, Path(), "")
    first = load_draft(folder, target, torch.float32)
    if first.method != draft.method or first.shape != draft.shape:
        raise ConfigError(
            f"method.objective.heads_from={heads_from} is a draft of method {first.method} with "
            f"{first.shape.to_dict()}, and method.network asks for {draft.shape.to_dict()}. Set "
            "method.network to what it was trained with."
        )
    draft.load_state_dict(first.state_dict())
