"""End to end by counting: a real tiny network, real cache and real randomness against the joint law.

The exact replays (test_exact.py) prove more; this one also covers what they replace, the random numbers and
float32. The law is enumerated in float64 with one plain forward per prefix.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import DecodeConfig
from configs.schema import Proposal as Mode
from decoding.build import build_drafter
from decoding.decoder import Decoder, Request
from decoding.randomness import Key, Purpose, Seeded
from decoding.sequence import Params
from tests.conftest import tiny_draft, tiny_target
from tests.decoding.replay import plain_law

PROMPT, LENGTH = [1, 3], 4
ALPHA = 1e-6
LEAST = 5.0  # expected counts below it are put together


def excess(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """How far Pearson's χ² lies above what its law exceeds with probability ALPHA: below 0 is a pass.

    The quantile is Wilson and Hilferty's (1931), good to a percent here.
    """
    n = sum(counts.values())
    assert all(tokens in law for tokens in counts)
    large = {tokens: n * p for tokens, p in law.items() if n * p >= LEAST}
    cells = [(counts[tokens], expected) for tokens, expected in large.items()]
    rest = n - sum(expected for _, expected in cells)
    if rest > LEAST:
        cells.append((n - sum(count for count, _ in cells), rest))
    chi2 = sum((count - expected) ** 2 / expected for count, expected in cells)
    df = len(cells) - 1
    z = 4.7534  # the normal law's quantile at 1 - ALPHA
    return chi2 - df * (1 - 2 / (9 * df) + z * math.sqrt(2 / (9 * df))) ** 3


def sampled(n: int, randomness: type[Seeded] = Seeded) -> tuple[Counter[tuple[int, ...]], dict[Any, float]]:
    target = tiny_target(vocab=4, hidden=16, layers=1, heads=2, kv_heads=1)
    draft = tiny_draft(target, vocabulary=[0, 1, 3])
    config = DecodeConfig(draft_tokens=2, max_new_tokens=LENGTH, temperature=0.7, proposal=Mode.sampled)
    params = Params.of(config, seed=0)
    decoder = Decoder(target, build_drafter(target, draft, config), batch_size=250)
    requests = [Request(PROMPT, params, randomness=randomness(seed)) for seed in range(n)]
    counts = Counter(tuple(done.tokens) for done in decoder.generate_all(requests))
    wide = target.model.double()

    def logits(prefix: tuple[int, ...]) -> Tensor:
        return wide(torch.tensor([prefix]), use_cache=False).logits[0, -1].double()

    return counts, plain_law(logits, PROMPT, params, target.eos_ids)


def test_joint_counts_follow_the_targets_law() -> None:
    counts, law = sampled(100_000)
    assert len([p for p in law.values() if p * 100_000 > LEAST]) > 25
    assert excess(counts, law) < 0


def test_one_number_for_two_decisions_is_seen() -> None:
    """Numbers reused between positions: each token alone looks right, together they do not."""

    class Reused(Seeded):
        def uniform(self, key: Key) -> float:
            return super().uniform(Key(0, Purpose.emit, 0))

    counts, law = sampled(4_000, Reused)
    assert excess(counts, law) > 0


@pytest.mark.parametrize(("a", "b"), list(pairwise(range(4))))
def test_numbers_of_neighbouring_positions_are_independent(a: int, b: int) -> None:
    pairs = [
        (Seeded(s).uniform(Key(a, Purpose.emit)), Seeded(s).uniform(Key(b, Purpose.emit)))
        for s in range(4000)
    ]
    cells = Counter((int(4 * u), int(4 * v)) for u, v in pairs)
    assert excess(cells, {(i, j): 1 / 16 for i in range(4) for j in range(4)}) < 0
