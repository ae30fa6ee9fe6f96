"""How an EAGLE-3 draft reads (Li et al. 2025; research: algorithms.md §1.7): row by row as EAGLE-1 does (see
eagle1.py), with features fused from several layers of the target, states that stand for no feature, and a
head of its own over a vocabulary of its own.
"""

from __future__ import annotations

from decoding.drafters.eagle1 import FeatureReader
from decoding.growth import Growth
from decoding.reader import NetworkDrafter
from models.eagle3 import Eagle3


class Eagle3Reader(FeatureReader):
    def __init__(self, draft: Eagle3, eos_ids: frozenset[int]) -> None:
        super().__init__(draft, draft.shape.layers, eos_ids)


def build(draft: Eagle3, growth: Growth, eos_ids: frozenset[int]) -> NetworkDrafter:
    return NetworkDrafter(Eagle3Reader(draft, eos_ids), growth)
