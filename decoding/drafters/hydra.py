"""How Hydra's heads draft (Ankner et al. 2024): heads in sequence (medusa.py) that carry all they read."""

from __future__ import annotations

from decoding.drafters.medusa import HeadsDrafter, SequentialHeads, SequentialReader
from decoding.growth import Growth
from decoding.reader import NetworkDrafter


def build(draft: SequentialHeads, growth: Growth, eos_ids: frozenset[int]) -> NetworkDrafter:
    return HeadsDrafter(SequentialReader(draft, eos_ids), growth, draft.heads)
