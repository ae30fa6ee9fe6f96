"""A target and a drafter whose laws are tables over the whole prefix, for use in the real decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from configs.schema import Proposal as Mode
from decoding.decoder import Decoder
from decoding.drafters import Proposal, Seen
from decoding.randomness import Key, Purpose, Randomness
from decoding.tree import TokenTree
from decoding.verify import without
from decoding.warp import Warp
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
    or shows."""

    device = torch.device("cpu")
    tokenizer = None

    def __init__(self, vocab: int, seed: int = 0, eos: Sequence[int] = ()) -> None:
        self.vocab = vocab
        self.table = Table(vocab, seed)
        self.eos_ids = frozenset(eos)

    def logits(self, prefix: tuple[int, ...]) -> Tensor:
        return self.table(prefix)

    def forward(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Any = None,
        taps: tuple[int, ...] = (),
        last_logits_only: bool = False,
    ) -> TargetOutput:
        start, new = cache.length, input_ids.shape[1]
        if positions is None:
            positions = torch.arange(start, start + new)[None]
        if mask is None:
            assert new == 1 or start == 0
            mask = torch.ones(1, 1, new, start + new, dtype=torch.bool).tril(start)
        rows = torch.stack([input_ids, positions], dim=-1)[:, None].double()  # [1, 1, new, 2]
        stored, _ = cache.update(rows, rows, 0)
        logits = torch.stack([self.logits(prefix(stored[0, 0][visible])) for visible in mask[0, 0]])[None]
        return TargetOutput(logits[:, -1:] if last_logits_only else logits, torch.zeros(1, new, 1), None)


def prefix(rows: Tensor) -> tuple[int, ...]:
    """The tokens of rows [n, 2] of (token, position), which must be those of positions 0 to n - 1."""
    ordered = sorted((int(position), int(token)) for token, position in rows.tolist())
    assert [position for position, _ in ordered] == list(range(len(ordered)))
    return tuple(token for _, token in ordered)


class TableDrafter:
    """Proposes a tree of a fixed shape (parents of nodes), cut to the budget; by the table's law over
    `ids`."""

    taps: tuple[int, ...] = ()

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
        self.begin()

    def begin(self) -> None:
        self.committed: list[int] = []

    def law(self, prefix: Sequence[int], warp: Warp) -> Tensor:
        return warp(
            self.table(prefix).index_fill(0, torch.tensor(self.outside, dtype=torch.long), -torch.inf)
        )

    def propose(self, seen: Seen, budget: int, warp: Warp, randomness: Randomness) -> Proposal:
        assert seen.start == len(self.committed)
        self.committed += seen.tokens.tolist()
        shape = TokenTree([0] * len(self.parent), self.parent)
        prefixes = {0: [*self.committed, seen.pending]}  # of the nodes that could be made
        tokens, parent, q = [seen.pending], [-1], {}
        names = {0: 0}  # node of the shape -> node of the tree
        for node in range(len(shape)):
            children = [child for child in shape.children(node) if shape.depth[child] <= budget]
            if node not in names or not children:
                continue
            law = self.law(prefixes[node], warp)
            if self.mode is Mode.sampled:
                q[names[node]] = law
            for child in children:
                if not law.sum() > 0:
                    break
                token = self.pick(law, Key(seen.position, Purpose.propose, child), randomness)
                names[child] = len(tokens)
                prefixes[child] = [*prefixes[node], token]
                tokens.append(token)
                parent.append(names[node])
                left = without(law, token)
                assert left is not None
                law = left
        return Proposal(TokenTree(tokens, parent), q if self.mode is Mode.sampled else None)

    def pick(self, law: Tensor, key: Key, randomness: Randomness) -> int:
        return randomness.draw(law, key) if self.mode is Mode.sampled else int(law.argmax())


def decoder_of(target: Any, drafter: Any) -> Decoder:
    """A decoder of stand-ins, which a type checker would refuse."""
    return Decoder(target, drafter)


class ForcedTarget(TableTarget):
    """Certain of the token `script[n]` after n tokens."""

    def __init__(self, script: Sequence[int], vocab: int, eos: Sequence[int] = ()) -> None:
        super().__init__(vocab, eos=eos)
        self.script = script

    def logits(self, prefix: tuple[int, ...]) -> Tensor:
        scores = torch.zeros(self.vocab, dtype=torch.float64)
        scores[self.script[len(prefix)]] = 50.0
        return scores
