"""How EAGLE drafts pair features with tokens and positions, what their cache holds, and EAGLE-1's law."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema import Proposal as Mode
from decoding.decoder import Params, Request
from decoding.drafters import Seen, Turn, eagle1
from decoding.drafters.eagle1 import FeatureReader
from decoding.growth import ChainGrowth, DynamicGrowth, Growth, StaticGrowth
from decoding.law import Law
from decoding.randomness import Seeded
from decoding.reader import Level
from decoding.shapes import TreeShape
from decoding.warp import Warp
from models.layers import Attend
from models.target import Target, TargetOutput
from tests.conftest import tiny_target
from tests.decoding.replay import decoded_law, plain_law, total_variation
from tests.decoding.tables import TableTarget, decoder_of

GREEDY = ChainGrowth(Mode.greedy)
NO_EOS: frozenset[int] = frozenset()


class TinyEagle:
    """EAGLE-1 in small: fc of embedding and feature, one attention head, positions added; the target's head.

    It notes the first feature, the token and the position of every row it is given.
    """

    full_vocabulary = True
    layers = (None,)

    def __init__(self, target: Target) -> None:
        generator = torch.Generator().manual_seed(0)
        d = target.hidden_size
        self.target = target
        self.taps = (target.num_layers,)
        self.draft_ids = torch.arange(target.vocab_size)
        weights = torch.randn(5, d, d, generator=generator, dtype=target.dtype) / d**0.5
        self.of_token, self.of_feature, *self.qkv = weights
        self.given: list[tuple[list[float], list[int], list[int]]] = []

    def fuse(self, taps: Tensor) -> Tensor:
        return taps

    def __call__(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        self.given.append((hidden[0, :, 0].tolist(), tokens[0].tolist(), positions[0].tolist()))
        x = F.embedding(tokens, self.target.embedding) @ self.of_token + hidden @ self.of_feature
        q, k, v = ((x @ weight + positions[..., None].sin())[:, None] for weight in self.qkv)
        return x + attend(0, q, k, v)[:, 0]

    def logits(self, state: Tensor) -> Tensor:
        return self.target.lm_head(state)


def minute() -> Target:
    """Three ids, of which 2 is the end, in float64."""
    return tiny_target(vocab=3, hidden=8, layers=1, heads=2, kv_heads=1, dtype=torch.float64)


def turn(target: Target, state: Any, start: int, text: list[int], budget: int = 3) -> Turn:
    """Tells what the target made of `text` from `start` on; the last token is pending."""
    output = target.forward(torch.tensor([text[:-1]]), taps=(target.num_layers,), logits=False)
    assert output.taps is not None
    seen = Seen(start, text[start:-1], text[-1], output.taps[0, start:])
    return Turn(state, seen, budget, Law(Warp()), Seeded(0))


def params(temperature: float, length: int, draft_tokens: int) -> Params:
    return Params(draft_tokens, length, temperature, top_k=0, top_p=1.0, stop=(), seed=0)


@torch.inference_mode()
def test_rows_pair_a_feature_with_the_next_token(target: Target) -> None:
    network = TinyEagle(target)
    drafter = eagle1.build(network, GREEDY, NO_EOS)
    state = drafter.begin()
    [first] = drafter.propose([turn(target, state, 0, [4, 5, 6, 7])])
    x, y, _ = first.tree.tokens[1:]
    drafter.propose([turn(target, state, 3, [4, 5, 6, 7, x, y, 9], budget=1)])
    assert [given[1:] for given in network.given] == [
        ([5, 6, 7], [0, 1, 2]),  # token j + 1 stands at position j; the pending token is the last
        ([x], [3]),
        ([y], [4]),
        ([x, y, 9], [3, 4, 5]),  # the rows of accepted tokens again, with the target's features
    ]
    truth = target.forward(torch.tensor([[4, 5, 6, 7, x, y]])).last_hidden[0, :, 0].tolist()
    assert network.given[0][0] == pytest.approx(truth[:3], abs=1e-4)
    assert network.given[3][0] == pytest.approx(truth[3:], abs=1e-4)


@torch.inference_mode()
def test_a_drafted_row_takes_its_parents_state() -> None:
    target = minute()
    network = TinyEagle(target)
    reader = FeatureReader(network, layers=1, eos_ids=NO_EOS)
    state = reader.begin()
    reader.read([turn(target, state, 0, [0, 1, 0, 1])])
    reader.extend([Level(state, [0, 1], [-1, -1])])
    reader.extend([Level(state, [0, 0, 1], [0, 1, 1])])
    root, a, b = (float(made[0]) for made in state.states[:3])
    assert network.given[1] == (pytest.approx([root, root]), [0, 1], [3, 3])
    assert network.given[2] == (pytest.approx([a, b, b]), [0, 0, 1], [4, 4, 4])


@torch.inference_mode()
def test_tree_nodes_equal_their_paths_read_alone() -> None:
    """Two sequences of unequal lengths: a node's logits are those of the chain that leads to it."""
    target = minute()
    texts, paths = [[0, 1, 0, 0, 1], [1, 0]], [(0,), (1,), (1, 1), (1, 0), (1, 0, 1)]
    reader = FeatureReader(TinyEagle(target), layers=1, eos_ids=NO_EOS)
    states = [reader.begin(), reader.begin()]
    reader.read([turn(target, state, 0, text) for state, text in zip(states, texts, strict=True)])
    made: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    levels = [([0, 1], [-1, -1]), ([1, 0], [1, 1]), ([1], [3])]
    for names, (tokens, parents) in zip([paths[:2], paths[2:4], paths[4:]], levels, strict=True):
        logits = reader.extend([Level(state, list(tokens), parents) for state in states])
        made |= {
            (i, path): row for i, rows in enumerate(logits) for path, row in zip(names, rows, strict=True)
        }
    for (i, path), logits in made.items():
        alone = FeatureReader(TinyEagle(target), layers=1, eos_ids=NO_EOS)
        state = alone.begin()
        alone.read([turn(target, state, 0, texts[i])])
        for depth, token in enumerate(path):
            [last] = alone.extend([Level(state, [token], [depth - 1])])
        torch.testing.assert_close(logits, last[0], atol=1e-9, rtol=0)


@pytest.mark.parametrize("growth", [GREEDY, StaticGrowth(TreeShape.of((2, 2, 1)), Mode.greedy)])
@torch.inference_mode()
def test_cache_equals_a_fresh_prefill(target: Target, growth: Growth) -> None:
    drafter = eagle1.build(TinyEagle(target), growth, NO_EOS)
    state, text, start = drafter.begin(), [4, 5, 6, 7], 0
    for accepted in (2, 0, 3, 1):
        [proposal] = drafter.propose([turn(target, state, start, text)])
        deepest = max(
            reversed(proposal.tree.paths), key=lambda path: len(path)
        )  # not along the first children
        start = len(text) - 1
        text += [*deepest[:accepted], 60 + accepted]
    drafter.propose([turn(target, state, start, text, budget=1)])
    other = eagle1.build(TinyEagle(target), growth, NO_EOS)
    anew = other.begin()
    other.propose([turn(target, anew, 0, text, budget=1)])
    assert state.committed == anew.committed == len(text) - 1
    for name in ("keys", "values"):
        mine, theirs = (getattr(one.reader.cache, name)[:, 0, :, : len(text) - 1] for one in (drafter, other))
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


# A draft that is right


class Fibonacci(TableTarget):
    """Sure that each token is the sum of the two before, modulo 11. Its hidden state is the scores of what
    follows, and then the token it stands at."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab)
        self.hidden_size = 2 * vocab

    def logits(self, prefix: tuple[int, ...]) -> Tensor:
        following = sum(prefix[-2:]) % self.vocab
        return 50.0 * F.one_hot(torch.tensor([following, prefix[-1]]), self.vocab).double().flatten()

    def lm_head(self, hidden: Tensor) -> Tensor:
        return hidden[..., : self.vocab]

    def forward(self, input_ids: Tensor, **words: Any) -> TargetOutput:
        hidden = super().forward(input_ids, **words).last_hidden
        return TargetOutput(self.lm_head(hidden), hidden, hidden)


class FibonacciEagle:
    """Knows the rule: the feature brings the token at j, and the token at j + 1 comes beside it."""

    taps = (1,)
    full_vocabulary = True
    layers = (None,)
    draft_ids = torch.arange(11)

    def fuse(self, taps: Tensor) -> Tensor:
        return taps

    def __call__(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        attend(0, hidden[:, None], hidden[:, None], hidden[:, None])
        before = hidden[..., 11:].argmax(-1)
        return 50.0 * F.one_hot(torch.stack([(before + tokens) % 11, tokens], -1), 11).double().flatten(-2)

    def logits(self, state: Tensor) -> Tensor:
        return state[..., :11]


@pytest.mark.parametrize(
    "growth", [GREEDY, StaticGrowth(TreeShape.of((2, 2, 1)), Mode.greedy), DynamicGrowth(8, 2)]
)
def test_a_right_draft_is_accepted_whole(growth: Growth) -> None:
    drafter = eagle1.build(FibonacciEagle(), growth, NO_EOS)
    prompts = [[1, 1], [3, 5, 8, 2, 10]]
    done = decoder_of(Fibonacci(11), drafter, 2).generate_all(
        [Request(prompt, params(0.0, 13, 3)) for prompt in prompts]
    )
    assert done[0].tokens == [2, 3, 5, 8, 2, 10, 1, 0, 1, 1, 2, 3, 5]
    assert done[1].tokens == [1, 0, 1, 1, 2, 3, 5, 8, 2, 10, 1, 0, 1]
    assert [[round.accepted for round in one.rounds] for one in done] == [[3, 3, 3]] * 2


# The law


@pytest.mark.parametrize(
    "growth", [ChainGrowth(Mode.sampled), StaticGrowth(TreeShape(((0,), (1,), (0, 0))), Mode.sampled)]
)
def test_output_law_is_the_targets(growth: Growth) -> None:
    target, asked = minute(), params(0.8, 4, 2)
    drafter = eagle1.build(TinyEagle(target), growth, target.eos_ids)
    law = decoded_law(target, drafter, [0, 1], asked)

    def logits(prefix: tuple[int, ...]) -> Tensor:
        made = target.forward(torch.tensor([prefix])).logits
        assert made is not None
        return made[0, -1]

    assert total_variation(law, plain_law(logits, [0, 1], asked, target.eos_ids)) < 1e-12
