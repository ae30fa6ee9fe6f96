"""Hydra's objective (Ankner et al. 2024): Medusa's, with heads that read the row's own tokens in between.

Teacher forcing is exact here: when decoding, a head counts only if all tokens before its own were accepted,
and those are the text's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from data.tokens import TokenRow
from models.hydra import Hydra, NetworkConfig
from models.target import Target
from train.objectives.medusa import HeadsObjective, Met, prepare
from train.objectives.medusa import ObjectiveConfig as MedusaConfig


@dataclass
class ObjectiveConfig(MedusaConfig):
    head_decay: float = 1.0  # the authors' code weighs all heads alike


class HydraObjective(HeadsObjective):
    def states(self, draft: Hydra, features: Tensor, met: Sequence[Met]) -> Sequence[Tensor]:
        read = draft.start(features, met[0].tokens[-1])
        states = [draft.state(read, 0)]
        for depth in range(1, len(met)):
            read = draft.step(read, met[depth].tokens[-1], depth)
            states.append(draft.state(read, depth))
        return states


def build(
    network: NetworkConfig, settings: ObjectiveConfig, target: Target, rows: Sequence[TokenRow], seed: int
) -> HydraObjective:
    """New heads for `target`, the same whatever the seed, and their objective."""
    draft = Hydra.build(network, target)
    return HydraObjective(draft, target, settings, prepare(draft, network, target, rows))
