"""How IBM's MLP speculator drafts (Wertheimer et al. 2024): sequential heads with a state (medusa.py)."""

from __future__ import annotations

from decoding.drafters.medusa import HeadsDrafter, SequentialHeads, SequentialReader
from decoding.growth import Growth
from decoding.reader import NetworkDrafter


def build(draft: SequentialHeads, growth: Growth, eos_ids: frozenset[int]) -> NetworkDrafter:
    return HeadsDrafter(SequentialReader(draft, eos_ids), growth, draft.heads)
