"""Where sequences start and end, what is counted, and greedy output equal to Hugging Face's, token for
token."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from configs.errors import ConfigError, TrafficError
from configs.schema import DecodeConfig
from decoding.build import build_drafter
from decoding.decoder import Decoder, Emitted, Request
from decoding.drafters import Proposal, Seen, Turn
from decoding.drafters.plain import PlainDrafter
from decoding.sequence import Generation, Params, Round, counted
from decoding.tree import TokenTree
from models.eagle3 import Eagle3
from models.target import Target
from tests.decoding.oracles import Bush, Oracle
from tests.decoding.tables import ForcedTarget, TableTarget, decoder_of


def params(**settings: Any) -> Params:
    seed = settings.pop("seed", 0)
    config = DecodeConfig()
    for name, value in settings.items():
        setattr(config, name, value)
    return Params.of(config, seed)


def counts(generation: Generation) -> list[tuple[int, int, int]]:
    return [(done.drafted, done.accepted, done.emitted) for done in generation.rounds]


def generated(target: Target, prompt: list[int], length: int) -> list[int]:
    """Hugging Face's greedy continuation."""
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def prompts(n: int, vocab: int = 64) -> list[list[int]]:
    """Random prompts of 1, 2, 3, ... tokens."""
    chance = random.Random(0)
    return [[chance.randrange(3, vocab) for _ in range(1 + i)] for i in range(n)]


@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_greedy_is_generate_under_a_draft(target: Target, draft: Eagle3, draft_tokens: int) -> None:
    decoder = Decoder(target, build_drafter(target, draft, DecodeConfig()))
    for prompt in prompts(12):
        ours = decoder.generate(prompt, params(draft_tokens=draft_tokens, max_new_tokens=20))
        assert ours.tokens == generated(target, prompt, 20)


@pytest.mark.parametrize("kind", [Oracle, Bush])
def test_greedy_is_generate_under_an_oracle(target: Target, kind: type[Oracle]) -> None:
    accepted = 0
    for i, prompt in enumerate(prompts(12)):
        right = generated(target, prompt, 20)
        # Wrong now and then: at every third, fourth or fifth position.
        drafter = kind([*prompt, *right], wrong=lambda position, i=i: position % (3 + i % 3) == 0)
        ours = Decoder(target, drafter).generate(prompt, params(draft_tokens=4, max_new_tokens=20))
        assert ours.tokens == right
        accepted += sum(done.accepted for done in ours.rounds)
    assert accepted > 60


def test_plain_decoding_is_generate(target: Target) -> None:
    decoder = Decoder(target, PlainDrafter())
    for prompt in prompts(4):
        ours = decoder.generate(prompt, params(max_new_tokens=12))
        assert ours.tokens == generated(target, prompt, 12)
        assert counts(ours) == [(0, 0, 1)] * (len(ours.tokens) - 1)


# Counts, where the target is certain of 10, 11, 12, ... and the draft agrees. The prompt has two tokens.

SCRIPT = [1, 2, *range(10, 30)]


def forced(script: list[int] = SCRIPT, eos: int = 0, **settings: Any) -> Generation:
    return decoder_of(ForcedTarget(script, 40, [eos]), Oracle(script)).generate([1, 2], params(**settings))


def test_length_is_met_exactly_and_drafting_stops_short_of_it() -> None:
    # The prefill emits 1; three drafts and the bonus make 5; with 3 to go, two drafts and the bonus make 8.
    done = forced(draft_tokens=3, max_new_tokens=8)
    assert done.tokens == [10, 11, 12, 13, 14, 15, 16, 17]
    assert done.finish == "length"
    assert counts(done) == [(3, 3, 4), (2, 2, 3)]


def test_more_draft_tokens_than_are_left() -> None:
    target = ForcedTarget(SCRIPT, 40)
    drafter = Oracle(SCRIPT)
    done = decoder_of(target, drafter).generate([1, 2], params(draft_tokens=9, max_new_tokens=4))
    assert done.tokens == [10, 11, 12, 13]
    assert drafter.budgets == [2]


def test_last_token_is_not_drafted_for() -> None:
    # One to go after the first round: a round without a draft.
    done = forced(draft_tokens=1, max_new_tokens=4)
    assert counts(done) == [(1, 1, 2), (0, 0, 1)]


def test_one_new_token_needs_no_round() -> None:
    done = forced(max_new_tokens=1)
    assert (done.tokens, done.finish, done.rounds) == ([10], "length", [])
    assert done.decoder_ms_per_round is None


def test_end_as_first_token() -> None:
    done = forced([1, 2, 0, 5], max_new_tokens=8)
    assert (done.tokens, done.finish, done.rounds) == ([0], "eos", [])


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        # 10 comes from the prefill; the round drafts 11 12 13 14 and would add 15.
        (11, [(1, 1, 1)]),  # an accepted draft: nothing past it counts, not even as drafted
        (13, [(3, 3, 3)]),
        (14, [(4, 4, 4)]),
        (15, [(4, 4, 5)]),  # the bonus
        (16, [(4, 4, 5), (1, 1, 1)]),
    ],
)
def test_end_inside_a_run_cuts_it(end: int, expected: list[tuple[int, int, int]]) -> None:
    done = forced(eos=end, draft_tokens=4, max_new_tokens=20)
    assert done.tokens == list(range(10, end + 1))
    assert done.finish == "eos"
    assert counts(done) == expected


def test_end_as_what_replaces_a_refused_draft() -> None:
    # 12 is drafted wrongly and the target says 12, the end: drafts behind it were refused with it, and count.
    drafter = Oracle(SCRIPT, wrong=lambda position: position == 4)
    done = decoder_of(ForcedTarget(SCRIPT, 40, [12]), drafter).generate([1, 2], params(draft_tokens=4))
    assert done.tokens == [10, 11, 12]
    assert counts(done) == [(4, 1, 2)]


def test_end_and_length_together_are_an_end() -> None:
    assert forced(eos=12, max_new_tokens=3).finish == "eos"


def test_stop_string_cuts_after_the_token_that_completes_it(target: Target) -> None:
    # The tiny tokenizer has one character per token.
    prompt = target.tokenizer("hello")["input_ids"]
    right = generated(target, prompt, 16)
    stop = target.tokenizer.decode(right[4:7])
    first = next(n for n in range(1, 17) if stop in target.tokenizer.decode(right[:n]))
    decoder = Decoder(target, Oracle([*prompt, *right]))
    done = decoder.generate(prompt, params(draft_tokens=4, max_new_tokens=16, stop=[stop]))
    assert done.tokens == right[:first]
    assert done.finish == "stop"


def test_without_draft_tokens_the_drafter_is_left_alone() -> None:
    class Refuses(PlainDrafter):
        taps = (1,)  # which the stand-in could not give

        def one(self, turn: Turn) -> Proposal:
            raise AssertionError

    target = ForcedTarget(SCRIPT, 40)
    done = decoder_of(target, Refuses()).generate([1, 2], params(draft_tokens=0, max_new_tokens=3))
    assert done.tokens == [10, 11, 12]


def test_drafter_sees_everything_committed_once() -> None:
    class Watches(Oracle):
        def begin(self) -> None:
            self.seen: list[Seen] = []

        def one(self, turn: Turn) -> Proposal:
            self.seen.append(turn.seen)
            return super().one(turn)

    drafter = Watches(SCRIPT, wrong=lambda position: position == 5)  # drafts 14 instead of 13
    decoder_of(ForcedTarget(SCRIPT, 40), drafter).generate([1, 2], params(draft_tokens=3, max_new_tokens=6))
    assert [(seen.start, seen.tokens, seen.pending) for seen in drafter.seen] == [
        (0, [1, 2], 10),
        (2, [10, 11, 12], 13),  # 13 replaced the wrong draft and is pending
    ]


def test_tokens_come_as_they_are_made() -> None:
    runs: list[list[int]] = []
    decoder = decoder_of(ForcedTarget(SCRIPT, 40), Oracle(SCRIPT))
    done = decoder.generate([1, 2], params(draft_tokens=2, max_new_tokens=6), on_tokens=runs.append)
    assert runs == [[10], [11, 12, 13], [14, 15]]
    assert len(done.emitted_at) == len(done.rounds) == 2
    assert 0 < done.prefill_seconds <= done.ttft <= done.emitted_at[0] <= done.emitted_at[1] == done.seconds


def test_stream_says_what_was_drafted_and_how_likely_it_was() -> None:
    decoder = decoder_of(ForcedTarget(SCRIPT, 40), Oracle(SCRIPT))
    stream = list(decoder.stream(Request([1, 2], params(draft_tokens=2, max_new_tokens=5))))
    assert [(e.token, e.from_draft) for e in stream] == [
        (10, False),
        (11, True),
        (12, True),
        (13, False),
        (14, False),
    ]
    # One logit of 50 beside 39 of 0, at temperature 0 as at any.
    assert [e.logprob for e in stream] == pytest.approx([0] * 5, abs=1e-6)


def test_logprobs_are_the_targets_before_the_warp(target: Target, draft: Eagle3) -> None:
    decoder = Decoder(target, build_drafter(target, draft, DecodeConfig()))
    settings = params(draft_tokens=3, max_new_tokens=12, temperature=0.5, top_k=4)
    stream: list[Emitted] = list(decoder.stream(Request([5, 6, 7], settings)))
    tokens = [e.token for e in stream]
    logits = target.model(torch.tensor([[5, 6, 7, *tokens]])).logits[0, 2:-1]
    expected = logits.log_softmax(-1)[range(len(tokens)), tokens]
    assert [e.logprob for e in stream] == pytest.approx(expected.tolist(), abs=1e-4)


def test_stream_left_midway_leaves_nothing_behind(target: Target, draft: Eagle3) -> None:
    decoder = Decoder(target, build_drafter(target, draft, DecodeConfig()))
    settings = params(draft_tokens=3, max_new_tokens=12, temperature=1.0)
    whole = decoder.generate([5, 6, 7], settings).tokens
    stream = decoder.stream(Request([9, 9, 9, 9], settings))
    for _ in range(3):
        next(stream)
    assert torch.is_inference_mode_enabled() is False
    assert decoder.generate([5, 6, 7], settings).tokens == whole  # beside it, in a slot of its own
    stream.close()
    assert decoder.cache.lengths == [0, 0]
    assert decoder.generate([5, 6, 7], settings).tokens == whole


def test_draft_still_trains_after_decoding(target: Target, draft: Eagle3) -> None:
    Decoder(target, build_drafter(target, draft, DecodeConfig())).generate([5, 6], params(max_new_tokens=8))
    state = draft(torch.zeros(1, 2, target.hidden_size), torch.tensor([[5, 6]]), torch.arange(2)[None])
    draft.logits(state).sum().backward()
    assert draft.fc.weight.grad is None  # the features were given
    assert draft.lm_head.weight.grad is not None


class Flat(TableTarget):
    """The same law over 64 tokens everywhere."""

    def logits(self, prefix: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(64, dtype=torch.float64)


def sampled(seed: int) -> list[int]:
    drafter = Oracle([0] * 40)
    return (
        decoder_of(Flat(64), drafter)
        .generate([1], params(temperature=1.0, max_new_tokens=30, seed=seed))
        .tokens
    )


def test_same_seed_same_output_and_draws_differ_between_positions() -> None:
    assert sampled(0) == sampled(0) != sampled(1)
    assert len(set(sampled(0))) > 20  # of 30 draws from 64 tokens, 24 differ on average


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(TrafficError, match="no tokens"):
        decoder_of(ForcedTarget(SCRIPT, 40), PlainDrafter()).generate([], params())


@pytest.mark.parametrize(
    "wrong",
    [{"draft_tokens": -1}, {"max_new_tokens": 0}, {"stop": [""]}, {"top_p": 0.0}, {"temperature": -1.0}],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        params(**wrong)


def test_levels_of_a_tree_are_counted() -> None:
    """In a bush every level has a wrong node, and then one that is right but at position 4.

    10 - x           Round 1: 11 is accepted, both nodes of the second level are refused: of 3 levels 2 were
       \\ 11 - x      tried. It emits 11 and 12.
            \\ x - x  Round 2 drafts 13 14 15 and accepts them.
                 \\ 13
    """
    drafter = Bush(SCRIPT, wrong=lambda position: position == 4)
    done = decoder_of(ForcedTarget(SCRIPT, 40), drafter).generate(
        [1, 2], params(draft_tokens=3, max_new_tokens=7)
    )
    assert done.tokens == [10, 11, 12, 13, 14, 15, 16]
    assert [(r.drafted, r.depth, r.tried, r.accepted) for r in done.rounds] == [(6, 3, 2, 1), (6, 3, 3, 3)]


@pytest.mark.parametrize(
    ("path", "emitted", "expected"),
    [
        ((0, 2, 5), 3, (6, 3, 2)),  # 5 is a leaf: all was emitted, and nothing was tried behind it
        ((0, 1), 2, (6, 3, 2)),  # 4 was tried behind 1, and refused
        ((0,), 1, (6, 3, 1)),
        ((0, 1, 4, 6), 4, (6, 3, 3)),
        ((0, 1, 4, 6), 3, (6, 3, 3)),  # cut after 6: the levels up to it count, whole
        ((0, 1, 4, 6), 2, (5, 2, 2)),  # cut after 4
        ((0, 1, 4, 6), 1, (3, 1, 1)),
    ],
)
def test_what_counts_of_a_tree(path: tuple[int, ...], emitted: int, expected: tuple[int, int, int]) -> None:
    """0 - 1 - 4 - 6    (drafted, depth, tried) of a round that emitted so many tokens.
    \\ 2 - 5
    \\ 3
    """
    tree = TokenTree([0] * 7, [-1, 0, 0, 0, 1, 2, 4])
    assert counted(tree, path, emitted) == expected


def test_trees_and_paths_are_shown() -> None:
    """The same run: each round's tree and the nodes accepted of it, the prefill's not."""
    seen: list[tuple[list[int], list[int]]] = []
    decoder: Any = decoder_of(ForcedTarget(SCRIPT, 40), Bush(SCRIPT, wrong=lambda position: position == 4))
    decoder.on_verdict = lambda tree, path: seen.append((tree.tokens, list(path)))
    decoder.generate([1, 2], params(draft_tokens=2, max_new_tokens=5))
    # The wrong token at position p is script[p] + 1 modulo 4, and every first child is one more than that.
    assert seen == [([10, 0, 11, 2, 1], [0, 2]), ([12, 2, 13], [0, 2])]


def test_own_time_is_what_the_models_did_not_take() -> None:
    done = Round(4, 2, 3, 4, 3, target_seconds=0.5, draft_seconds=0.25, seconds=0.76)
    assert done.own_seconds == pytest.approx(0.01)
    assert Generation(rounds=[done, done]).decoder_ms_per_round == pytest.approx(10)
