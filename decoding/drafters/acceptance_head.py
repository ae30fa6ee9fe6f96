"""How a draft with an acceptance head drafts: as the draft alone, and with the head's word on each token.

Where a rule asks how sure a chain is (`decode.stop_drafting`), it is told the head's predictions instead of
the draft's own probabilities (SpecDec++, Huang et al. 2024; research: decoding.md §1.8). A prediction needs
the token to have been read, so the newest token has none yet. Where no rule asks, the head is left out, and
costs nothing.
"""

from __future__ import annotations

from importlib import import_module

from torch import Tensor

from decoding.drafters.eagle1 import FeatureReader
from decoding.growth import ChainGrowth, Growth
from decoding.reader import NetworkDrafter
from models.acceptance_head import HeadedDraft


class HeadedReader(FeatureReader):
    """Reads as EAGLE drafts do, whichever of them the draft is."""

    def __init__(self, draft: HeadedDraft, eos_ids: frozenset[int]) -> None:
        super().__init__(draft.draft, len(draft.draft.layers), eos_ids)
        self.head = draft

    def acceptance(self, state: Tensor) -> float:
        """Makes this reader an `AcceptanceHead` (decoding/stopping.py)."""
        return self.head.acceptance(state)


def build(draft: HeadedDraft, growth: Growth, eos_ids: frozenset[int]) -> NetworkDrafter:
    if isinstance(growth, ChainGrowth) and growth.rule.needs_confidence:
        return NetworkDrafter(HeadedReader(draft, eos_ids), growth)
    alone = import_module(f"decoding.drafters.{draft.draft.method}")
    return alone.build(draft.draft, growth, eos_ids)
