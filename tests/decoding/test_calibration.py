"""What the decoder accepts is what theory says, on toys whose acceptance is known and on a real network.

Intervals are 99.9 %, two-sided, at fixed seeds. Of a sequence's rounds those near its end, which may draft
less, are left out: that is known before a round begins, so the others keep their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import pytest
import torch
from torch import Tensor

from configs.schema import DecodeConfig
from configs.schema import Proposal as Mode
from decoding.decoder import Decoder, Request
from decoding.drafters import small
from decoding.growth import ChainGrowth
from decoding.sequence import Generation, Params
from decoding.sequoia import Trials, best_tree, wide_shape
from decoding.shapes import TreeShape
from models.target import Target
from tests.conftest import tiny_target
from tests.decoding.replay import law_of
from tests.decoding.tables import TableDrafter, TableTarget, decoder_of

Z = 3.29  # of a normal law, beyond which lies 0.1 %
PROMPT = [1, 0]

# α = Σ min(p, q) = .2 + .2 + .1 + .1 = .6
P = torch.tensor([0.5, 0.3, 0.1, 0.1], dtype=torch.float64)
Q = torch.tensor([0.2, 0.2, 0.5, 0.1], dtype=torch.float64)
ALPHA = 0.6


class SameTarget(TableTarget):
    """The law p after every text."""

    def __init__(self, p: Tensor = P) -> None:
        super().__init__(len(p))
        self.logits = lambda prefix: p.log()


class SameDrafter(TableDrafter):
    """The law q after every text."""

    def __init__(self, mode: Mode, parent: Sequence[int], q: Tensor = Q) -> None:
        super().__init__(len(q), mode, parent)
        self.table = lambda prefix: q.log()


def params(depth: int, length: int, seed: int = 0) -> Params:
    return Params.of(DecodeConfig(draft_tokens=depth, max_new_tokens=length, temperature=1.0), seed)


def chain(length: int) -> list[int]:
    return list(range(-1, length))


def parents(shape: TreeShape) -> list[int]:
    parent = [-1] * len(shape)
    for node, children in enumerate(shape.children):
        for child in children:
            parent[child] = node
    return parent


def sampled(decoder: Decoder, depth: int, sequences: int) -> list[Generation]:
    return decoder.generate_all([Request(PROMPT, params(depth, 24, seed)) for seed in range(sequences)])


def full_rounds(generations: Sequence[Generation], depth: int) -> list[int]:
    """What the rounds emitted that had the whole depth to go."""
    return [round.emitted for done in generations for round in done.rounds if round.depth == depth]


def close(values: Sequence[float], expected: float) -> bool:
    numbers = torch.tensor(values, dtype=torch.float64)
    return abs(float(numbers.mean()) - expected) < Z * float(numbers.std()) / sqrt(len(values))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_round_of_a_chain_emits_the_geometric_sum_exactly(length: int) -> None:
    """(1 - α^(K+1)) / (1 - α), over all outcomes of one round. Here α = .3 + .3 = .6 too."""
    p, q = torch.tensor([[0.7, 0.3], [0.3, 0.7]], dtype=torch.float64)
    decoder = decoder_of(SameTarget(p), SameDrafter(Mode.sampled, chain(length), q))
    # The prefill's token, and a round that may emit K + 1.
    law = law_of(
        lambda replay: decoder.generate(PROMPT, params(length, length + 2), replay).rounds[0].emitted
    )
    expected = sum(emitted * mass for emitted, mass in law.items())
    assert sum(law.values()) == pytest.approx(1)
    assert expected == pytest.approx((1 - ALPHA ** (length + 1)) / (1 - ALPHA), abs=1e-12)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_rounds_of_chains_emit_the_geometric_sum(batch_size: int) -> None:
    decoder = decoder_of(SameTarget(), SameDrafter(Mode.sampled, chain(4)), batch_size)
    emitted = full_rounds(sampled(decoder, depth=4, sequences=100), depth=4)
    assert len(emitted) > 700
    assert close(emitted, (1 - ALPHA**5) / (1 - ALPHA))


@pytest.mark.parametrize("mode", list(Mode))
def test_a_tree_made_of_measured_acceptances_emits_what_it_promises(mode: Mode) -> None:
    """The whole way: rounds of a wide tree, vectors, the best shape, and rounds of that one.

    By rank the draft's choices are 2, then 0 and 1, then 3, and accepted with P of these.
    """
    wide = wide_shape(16, depth=4)
    seen = Trials(wide)
    decoder = decoder_of(SameTarget(), SameDrafter(mode, parents(wide)))
    decoder.on_verdict = seen.add
    sampled(decoder, depth=4, sequences=60)
    vectors = seen.vectors(least=100)
    if mode is Mode.greedy:
        spread = Z * 0.5 / seen.tried[0, 0] ** 0.5
        assert vectors[0] == pytest.approx([0.1, 0.5, 0.3, 0.1], abs=2 * spread)
    best = best_tree(vectors, nodes=8, depth=3)
    decoder = decoder_of(SameTarget(), SameDrafter(mode, parents(best.shape)))
    emitted = full_rounds(sampled(decoder, depth=best.shape.depth, sequences=60), best.shape.depth)
    # The promise itself rests on about as many rounds, hence an interval wider by √2.
    numbers = torch.tensor(emitted, dtype=torch.float64)
    spread = Z * float(numbers.std()) * sqrt(2 / len(emitted))
    assert abs(float(numbers.mean()) - best.expected_tokens) < spread


def perturbed(target: Target, noise: float) -> Target:
    """The same network with each weight moved a little: a draft that is right more often than not."""
    other = tiny_target()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in other.model.parameters():
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return Target.wrap(other.model, target.tokenizer, name="perturbed")


@pytest.mark.parametrize("batch_size", [1, 3])
def test_acceptance_is_the_mean_overlap_of_the_laws(target: Target, batch_size: int) -> None:
    """A drafted token is accepted with Σ min(p, q), the laws being those after the very text before it.

    So accepted less Σ min(p, q), summed over all that was tried, has mean 0 and the variance Σ a (1 - a).
    """
    draft = perturbed(target, noise=0.08)
    drafter = small.build(draft, ChainGrowth(Mode.sampled), target.eos_ids, target)
    settings = [params(3, 40, seed) for seed in range(24)]
    prompts = [[5 + seed, 9, 30] for seed in range(24)]
    requests = [Request(prompt, each) for prompt, each in zip(prompts, settings, strict=True)]
    done = Decoder(target, drafter, batch_size).generate_all(requests)
    accepted, overlaps = [], []
    for prompt, generation in zip(prompts, done, strict=True):
        overlap = overlap_after(target, draft, [*prompt, *generation.tokens])
        at = len(prompt)  # of the pending token, which the round's first draft comes after
        for round in generation.rounds:
            accepted += [level < round.accepted for level in range(round.tried)]
            overlaps += overlap[at : at + round.tried]
            at += round.emitted
    overlap, accepted = torch.tensor(overlaps), torch.tensor(accepted, dtype=torch.float32)
    assert len(overlap) > 500
    assert 0.4 < float(overlap.mean()) < 0.9
    # Also where the laws agree little, and where they agree well: the mean would not see other prefixes.
    for group in (overlap < 2, overlap < overlap.median(), overlap >= overlap.median()):
        chance = overlap[group]
        spread = Z * float((chance * (1 - chance)).sum()) ** 0.5 / len(chance)
        assert abs(float(accepted[group].mean() - chance.mean())) < spread


def overlap_after(target: Target, draft: Target, text: list[int]) -> list[float]:
    """Σ min(p, q) after each beginning of `text`, from plain forwards."""
    laws = [model.model(torch.tensor([text])).logits[0].softmax(-1) for model in (target, draft)]
    return torch.minimum(*laws).sum(-1).tolist()
