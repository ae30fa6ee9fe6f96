"""Which hidden state meets which token and which row of the target: the one table that every objective reads.

Row j of a training sequence is the place where a draft reads the target's feature of token t_j. The table
says, for each method and step, how far from row j the tokens it embeds, the target row that teaches it, the
token it predicts and that token's loss mask lie. A shift by one here trains without a sign of trouble (the
draft learns the shift) and decodes badly; so nobody shifts anything elsewhere, each row of the table has an
index probe, and held-out acceptance is compared with a teacher-forced estimate that goes through this table
(train/acceptance.py).

Notation: `L_r` is the target's logits row r (it predicts t_{r+1}); `m_r` is 1 iff t_r is a token to train on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Offsets:
    """Distances from row j, in tokens, for one step (or head) of one method."""

    feature: int | None  # the target's hidden state that is read; None: the method reads tokens only
    tokens: tuple[int, ...]  # tokens that are embedded
    target: int  # the row L_{j+target} that teaches
    label: int  # the token predicted: always the one that the target row predicts
    mask: int  # m_{j+mask} says whether this counts

    @property
    def all(self) -> tuple[int, ...]:
        feature = () if self.feature is None else (self.feature,)
        return (*feature, *self.tokens, self.target, self.label, self.mask)


# The first argument of each is the step i = 0, 1, ..., the head k = 1, 2, ..., or the row k of a block.
TABLE: dict[str, Callable[[int], Offsets]] = {
    "plain": lambda _: Offsets(None, (0,), target=0, label=1, mask=1),
    "medusa": lambda k: Offsets(0, (), target=k, label=k + 1, mask=k + 1),
    "hydra": lambda k: Offsets(0, tuple(range(1, k + 1)), target=k, label=k + 1, mask=k + 1),
    "mlp_speculator": lambda i: Offsets(0, tuple(range(1, i + 2)), target=i + 1, label=i + 2, mask=i + 2),
    "eagle1": lambda _: Offsets(0, (1,), target=1, label=2, mask=2),
    # From step 1 on, the feature is the draft's own previous output at row j, in place of the target's.
    "eagle3": lambda i: Offsets(0, (i + 1,), target=i + 1, label=i + 2, mask=i + 2),
    # Step i is the i-th row behind row j, which has learnt stand-ins for its token and its feature.
    "peagle": lambda i: Offsets(0, (1,), target=i + 1, label=i + 2, mask=i + 2),
    # Row j is the block's anchor, the only token embedded (in block row 0); features are those before it.
    "dflash": lambda k: Offsets(-1, (0,), target=k - 1, label=k, mask=k),
    # The head sits on the state whose input is the candidate itself: would the target have accepted it?
    "specdec": lambda _: Offsets(None, (0,), target=-1, label=0, mask=0),
}


@dataclass(frozen=True)
class Aligned:
    """Views of equal length: index n of each belongs to row `start + n`. None where none was asked for."""

    start: int  # the first row whose offsets all lie within the sequence
    rows: int
    features: Tensor | None  # [B, rows, ...]
    tokens: tuple[Tensor, ...]  # one [B, rows] for each embedded token
    target: Tensor | None  # [B, rows, ...]
    labels: Tensor  # [B, rows]
    mask: Tensor  # [B, rows]


def align(
    offsets: Offsets,
    tokens: Tensor,
    mask: Tensor,
    *,
    features: Tensor | None = None,
    target: Tensor | None = None,
) -> Aligned:
    """Slices `tokens` [B, T], `mask` [B, T], `features` [B, T, ...] and `target` [B, T, ...] by `offsets`.

    Rows from which an offset would leave the sequence, at either end, are left out. Nothing is copied.
    """
    start = max(0, -min(offsets.all))
    rows = max(0, tokens.shape[1] - max(0, *offsets.all) - start)

    def view(values: Tensor | None, offset: int | None) -> Tensor | None:
        if values is None or offset is None:
            return None
        return values[:, start + offset : start + offset + rows]

    return Aligned(
        start=start,
        rows=rows,
        features=view(features, offsets.feature),
        tokens=tuple(tokens[:, start + o : start + o + rows] for o in offsets.tokens),
        target=view(target, offsets.target),
        labels=tokens[:, start + offsets.label : start + offsets.label + rows],
        mask=mask[:, start + offsets.mask : start + offsets.mask + rows],
    )
