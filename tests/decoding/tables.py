"""A target and a drafter whose laws are tables over the whole prefix, for use in the real decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.schema import Proposal as Mode
from decoding.decoder import Decoder
from decoding.drafters import Draws, EachAlone, Proposal, Turn, without
from decoding.law import Law
from decoding.randomness import Key, Purpose, Randomness
from decoding.tree import TokenTree
from models.target import TargetOutput

CHAIN = [-1, 0, 1]  # 0 - 1 - 2


class Table:
    """float64 logits [V] for every prefix, random and fixed."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab, self.seed = vocab, seed
        self.rows: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, prefix: Sequence[int]) -> Tensor:
        prefix = tuple(prefix)
        if prefix not in self.rows:
            generator = torch.Generator().manual_seed(hash((self.seed, *prefix)) % 2**32)
            self.rows[prefix] = 1.5 * torch.randn(self.vocab, generator=generator, dtype=torch.float64)
        return self.rows[prefix]


class TableTarget:
    """Stands for `Target`. It writes (token, position) into the cache as K/V rows and reads each row's prefix
    back through the mask: a row that is missing, moved wrongly, wrongly masked or at a wrong position fails
    or shows. Its last hidden states are its logits."""

    device = torch.device("cpu")
    tokenizer = None
    window = None
    num_layers = 1

    def __init__(self, vocab: int, seed: int = 0, eos: Sequence[int] = ()) -> None:
        self.vocab = self.vocab_size = self.hidden_size = vocab
        self.table = Table(vocab, seed)
        self.eos_ids = frozenset(eos)

    def logits(self, prefix: tuple[int, ...]) -> Tensor:
        return self.table(prefix)

    def lm_head(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: Any = None,
        taps: tuple[int, ...] = (),
        logits: bool = True,
    ) -> TargetOutput:
        new = input_ids.shape[1]
        rows = torch.stack([input_ids, positions], dim=-1)[:, None].double()  # [B, 1, new, 2]
        stored, _ = cache.update(rows, rows, 0)
        if mask is None:
            assert new == 1 or stored.shape[2] == new
            mask = torch.ones(1, 1, new, stored.shape[2], dtype=torch.bool).tril(stored.shape[2] - new)
            mask = mask.expand(len(input_ids), -1, -1, -1)
        made = [
            torch.stack([self.after(held[0][visible]) for visible in seen[0]])
            for held, seen in zip(stored, mask, strict=True)
        ]
        hidden = torch.stack(made)
        return TargetOutput(hidden if logits else None, hidden, None)

    def after(self, rows: Tensor) -> Tensor:
        """Logits after rows [n, 2]; of padding, which sees itself alone or what is padding too, anything."""
        try:
            return self.logits(prefix(rows))
        except (AssertionError, IndexError):
            return torch.full((self.hidden_size,), torch.nan, dtype=torch.float64)


def prefix(rows: Tensor) -> tuple[int, ...]:
    """The tokens of rows [n, 2] of (token, position), which must be those of positions 0 to n - 1."""
    ordered = sorted((int(position), int(token)) for token, position in rows.tolist())
    assert [position for position, _ in ordered] == list(range(len(ordered)))
    return tuple(token for _, token in ordered)


class TableDrafter(EachAlone):
    """Proposes a tree of a fixed shape (parents of nodes), cut to the budget; by the table's law over
    `ids`."""

    def __init__(
        self,
        vocab: int,
        mode: Mode,
        parent: Sequence[int] = CHAIN,
        ids: Sequence[int] | None = None,
        seed: int = 1,
    ) -> None:
        self.table = Table(vocab, seed)
        self.mode = mode
        self.parent = list(parent)
        self.outside = [i for i in range(vocab) if ids is not None and i not in ids]

    def begin(self) -> list[int]:
        return []

    def law(self, prefix: Sequence[int], law: Law, path: Sequence[int]) -> np.ndarray:
        logits = self.table(prefix).index_fill(0, torch.tensor(self.outside, dtype=torch.long), -torch.inf)
        return law(logits, path)

    def one(self, turn: Turn) -> Proposal:
        committed, seen = turn.state, turn.seen
        assert seen.start == len(committed)
        committed += seen.tokens
        shape = TokenTree([0] * len(self.parent), self.parent)
        paths: dict[int, list[int]] = {0: []}  # of the nodes that could be made
        tokens, parent, draws = [seen.pending], [-1], {}
        names = {0: 0}  # node of the shape -> node of the tree
        for node in range(len(shape)):
            children = [child for child in shape.children(node) if shape.depth[child] <= turn.budget]
            if node not in names or not children:
                continue
            law = self.law([*committed, seen.pending, *paths[node]], turn.law, paths[node])
            made, left = [], law
            for child in children:
                if not left.sum() > 0:
                    break
                token = self.pick(left, Key(seen.position, Purpose.propose, child), turn.randomness)
                names[child] = len(tokens)
                paths[child] = [*paths[node], token]
                made.append(len(tokens))
                tokens.append(token)
                parent.append(names[node])
                left = without(left, token)
            if self.mode is Mode.sampled:
                draws[names[node]] = [Draws(law, tuple(made))]
        return Proposal(TokenTree(tokens, parent), draws, chain=shape.is_chain)

    def pick(self, law: np.ndarray, key: Key, randomness: Randomness) -> int:
        return randomness.draw(law, key) if self.mode is Mode.sampled else int(law.argmax())


def decoder_of(target: Any, drafter: Any, batch_size: int = 1) -> Decoder:
    """A decoder of stand-ins, which a type checker would refuse."""
    return Decoder(target, drafter, batch_size)


class ForcedTarget(TableTarget):
    """Certain of the token `script[n]` after n tokens."""

    def __init__(self, script: Sequence[int], vocab: int, eos: Sequence[int] = ()) -> None:
        super().__init__(vocab, eos=eos)
        self.script = script

    def logits(self, prefix: tuple[int, ...]) -> Tensor:
        scores = torch.zeros(self.vocab, dtype=torch.float64)
        scores[self.script[len(prefix)]] = 50.0
        return scores
