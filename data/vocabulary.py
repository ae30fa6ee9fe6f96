"""The draft vocabulary: the tokens that the target's replies use most (EAGLE-3's d2t and t2d speak of it).

A token outside can never be drafted, so the share of reply tokens inside (the coverage) caps acceptance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from configs.errors import ConfigError
from data.tokens import TokenRow
from models.draft import DraftNetwork
from models.target import Target


def choose_draft_vocabulary(
    rows: Iterable[TokenRow], size: int, vocab_size: int, always: Iterable[int] = ()
) -> tuple[Tensor, float]:
    """(ids int64 [size] ascending, coverage): the `size` most frequent ids among the rows' trained tokens.

    `always` (the end tokens, say) are in whatever their count. Ties go to the lower id, so that the choice
    depends on the counts alone; where fewer than `size` ids occur, the lowest others fill up. Coverage is the
    share of trained tokens whose id was chosen, 1.0 when there are none. Raises `ConfigError` for a size that
    cannot be met.
    """
    kept = sorted(set(always))
    if not len(kept) <= size <= vocab_size:
        raise ConfigError(
            f"A draft vocabulary of {size} is not possible: the target has {vocab_size} tokens, and "
            f"{len(kept)} must be in. Set method.network.draft_vocab_size between {max(len(kept), 1)} and "
            f"{vocab_size}, or to null for all of them."
        )
    if kept and not 0 <= kept[0] <= kept[-1] < vocab_size:
        raise ConfigError(
            f"Token ids {kept} must be in the draft vocabulary but the target has ids 0 to "
            f"{vocab_size - 1}: its tokenizer or generation_config.json belongs to another model."
        )
    counts = trained_counts(rows, vocab_size)
    rank = counts.copy()
    rank[kept] = counts.sum() + 1
    chosen = np.sort(np.argsort(-rank, kind="stable")[:size])
    total = counts.sum()
    coverage = float(counts[chosen].sum() / total) if total else 1.0
    return torch.from_numpy(chosen.astype(np.int64)), coverage


def give_vocabulary(draft: DraftNetwork, rows: Iterable[TokenRow], target: Target) -> float:
    """Sets the draft vocabulary of `draft`, of the size that it is made for, and returns its coverage."""
    size = draft.shape.draft_vocab_size
    ids, coverage = choose_draft_vocabulary(rows, size, target.vocab_size, always=target.eos_ids)
    draft.set_vocabulary(ids)
    return coverage


def trained_counts(rows: Iterable[TokenRow], vocab_size: int) -> np.ndarray:
    """How often each id is a trained token: int64 [vocab_size]."""
    tally: Counter[int] = Counter()
    for row in rows:
        tally.update(compress(row.input_ids, row.loss_mask))
    counts = np.zeros(vocab_size, dtype=np.int64)
    counts[list(tally.keys())] = list(tally.values())
    return counts
