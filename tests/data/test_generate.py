"""Continuous batching against the target's own `generate`, and the parts it is made of."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from configs.errors import TrafficError
from data.generate import Row, Sampling, Slots, answers, loops, next_group, prefill, row_of, sampler
from data.tokens import Prompt
from models.target import Target
from tests.conftest import tiny_target, tiny_tokenizer

# Lengths 1 to 9, so that every batch is ragged.
PROMPTS = [Prompt(f"p{i}", "c", [(7 * i + 3 * j) % 61 + 3 for j in range(1 + i % 9)]) for i in range(13)]


def generated(target: Target, ids: list[int], new: int) -> list[int]:
    """transformers' own greedy reply."""
    fed = torch.tensor([ids])
    out = target.model.generate(
        fed, attention_mask=torch.ones_like(fed), max_new_tokens=new, do_sample=False, pad_token_id=0
    )
    return out[0, len(ids) :].tolist()


def replies(
    target: Target, sampling: Sampling, batch_size: int, prompts: list[Prompt] = PROMPTS
) -> dict[str, list[int]]:
    return {answer.prompt.id: answer.reply_ids for answer in answers(target, prompts, sampling, batch_size)}


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_greedy_replies_equal_generate(target: Target, batch_size: int) -> None:
    expected = {prompt.id: generated(target, prompt.ids, 20) for prompt in PROMPTS}
    assert (
        len({len(reply) for reply in expected.values()}) > 2
    )  # some end by themselves, at different lengths
    assert replies(target, Sampling(20), batch_size) == expected


def test_every_prompt_is_answered_once_and_tokens_are_counted(target: Target) -> None:
    told: list[int] = []
    made = list(answers(target, PROMPTS, Sampling(20), 4, on_tokens=told.append))
    assert Counter(answer.prompt.id for answer in made) == {prompt.id: 1 for prompt in PROMPTS}
    assert sum(told) == sum(len(answer.reply_ids) for answer in made)
    for answer in made:
        assert answer.finish == ("eos" if answer.reply_ids[-1] == 2 else "length")
        assert len(answer.reply_ids) == 20 or answer.finish == "eos"
        assert 2 not in answer.reply_ids[:-1]


def test_prompt_that_grows_past_the_buffers(target: Target) -> None:
    """150 new tokens cross the first 128 positions of the buffers."""
    prompt = PROMPTS[0]
    target.eos_ids = frozenset()
    target.model.generation_config.eos_token_id = None
    assert replies(target, Sampling(150), 2, [prompt])[prompt.id] == generated(target, prompt.ids, 150)


def test_sampled_replies_depend_on_no_batch_mate_and_on_the_seed(target: Target) -> None:
    alone = replies(target, Sampling(12, temperature=0.8, top_p=0.9), 1)
    together = replies(target, Sampling(12, temperature=0.8, top_p=0.9), 8, PROMPTS[::-1])
    assert alone == together
    assert alone != replies(target, Sampling(12, temperature=0.8, top_p=0.9, seed=1), 1)


def test_first_sampled_tokens_follow_the_law(target: Target) -> None:
    """4,000 rows of one prompt under 4,000 names, one token each; the total variation of so many draws over
    a few likely ids is about 0.02.
    """
    ids = PROMPTS[4].ids
    rows = [Prompt(str(i), "c", ids) for i in range(4000)]
    drawn = Counter(reply[0] for reply in replies(target, Sampling(1, temperature=0.7), 500, rows).values())
    logits = target.forward(torch.tensor([ids])).logits
    assert logits is not None
    law = torch.softmax(logits[0, -1].double() / 0.7, dim=-1)
    counts = torch.tensor([drawn[id] for id in range(target.vocab_size)], dtype=torch.float64)
    assert 0.5 * (counts / 4000 - law).abs().sum() < 0.05


def test_token_without_probability_is_never_drawn() -> None:
    """u = 0, law (0, 1/2, 1/2): the first id whose cumulated mass is above u, not the first to reach it."""

    class Zero(np.random.Generator):
        def random(self, *args: Any, **kwargs: Any) -> Any:
            return 0.0

    row = Row(PROMPTS[0], 1, Zero(np.random.Philox(0)))
    assert sampler(Sampling(1, temperature=1.0))(torch.tensor([[-torch.inf, 0.0, 0.0]]), [row]) == [1]


def test_a_window_ends_the_reply_and_shifts_nothing() -> None:
    """Of a padded prompt of 64 tokens HF's own sliding cache would keep the last 63."""
    settings = tiny_target().config.to_dict() | {"sliding_window": 64}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sliding = MistralForCausalLM(MistralConfig(**settings))
    target = Target.wrap(sliding, tiny_tokenizer())
    target.eos_ids = frozenset()
    prompts = [Prompt(f"p{n}", "c", [(7 * n + 3 * j) % 61 + 3 for j in range(n)]) for n in (5, 40, 50, 60)]
    expected = {prompt.id: generated(target, prompt.ids, min(12, 64 - len(prompt.ids))) for prompt in prompts}
    assert replies(target, Sampling(12), 4, prompts) == expected


def test_context_ends_the_reply() -> None:
    """A context of 16 leaves a prompt of 9 seven tokens, and a prompt of 16 none."""
    target = tiny_target(max_position_embeddings=16)
    target.eos_ids = frozenset()
    (answer,) = answers(target, [Prompt("p", "c", [3] * 9)], Sampling(50), 2)
    assert len(answer.reply_ids) == 7
    with pytest.raises(TrafficError, match=r"Prompt p has 16 tokens.*ends at 16"):
        list(answers(target, [Prompt("p", "c", [3] * 16)], Sampling(50), 2))


def test_retired_slots_are_filled_from_the_end(target: Target) -> None:
    """Slots A B C D of lengths 1 2 3 4; A and C end: D moves into C's place, then into A's, and B stays."""
    rows = [row_of(target, Prompt(name, "c", [5] * n), Sampling(4)) for n, name in enumerate("ABCD", start=1)]
    _, cache = prefill(target, [row.prompt.ids for row in rows])
    slots = Slots()
    slots.admit(cache, [1, 2, 3, 4])
    before = slots.slots[0].key_rows.clone()
    left = slots.retire(rows, [True, False, True, False])
    assert [row.prompt.id for row in left] == ["D", "B"]
    assert slots.lengths == [4, 2]
    assert torch.equal(slots.slots[0].key_rows[0, :, :4], before[3, :, :4])
    assert torch.equal(slots.slots[0].key_rows[1, :, :2], before[1, :, :2])


def test_prefill_is_bounded_by_its_padded_tokens(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths 2, 3, 5 within 9 padded tokens: 2 x 3 fit, 3 x 5 would not; one row always goes."""
    monkeypatch.setattr("data.generate.PREFILL_TOKENS", 9)

    def waiting(*lengths: int) -> deque[Row]:
        return deque(row_of(target, Prompt(str(n), "c", [5] * n), Sampling(1)) for n in lengths)

    rows = waiting(2, 3, 5)
    assert [row.prompt.id for row in next_group(rows, 8)] == ["2", "3"]
    assert [row.prompt.id for row in rows] == ["5"]
    assert [row.prompt.id for row in next_group(waiting(12, 1), 8)] == ["12"]
    assert len(next_group(waiting(1, 1, 1), 2)) == 2


@pytest.mark.parametrize(
    ("reply", "looped"),
    [
        ([9] + [1, 2, 3, 4] * 4, True),  # sixteen tokens, four times over
        ([9] + [1, 2, 3, 4] * 4 + [1, 2], True),  # the end falls inside the n-gram
        ([9] + [1, 2, 3, 4] * 3, False),  # three times
        ([9] + [5] * 15, False),  # a ruler of fifteen dashes is no loop
        ([9] + [5] * 16, True),
        ([*range(20)] * 4, True),
        ([1, 2, 3, 4] * 4 + [9], False),  # it got out
        ([], False),
    ],
)
def test_loops(reply: list[int], looped: bool) -> None:
    assert loops(reply) is looped
