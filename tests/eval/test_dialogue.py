"""Conversations: each user turn is answered before the next is asked, and both ways get the same prompts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from configs.schema import Config, DecodeConfig, EvalConfig
from data.template import Template
from data.tokens import Prompt
from decoding.sequence import Params
from eval.bench import Bench, Step
from eval.dialogue import Dialogue, by_turns, dialogues
from eval.rows import Run
from models.target import Target
from tests.conftest import tiny_draft, tiny_target


def dialogue(target: Target, id: str, *turns: str) -> Dialogue:
    messages = [{"role": "user", "content": turns[0]}]
    return Dialogue(Prompt(id, "c", Template.of(target).prompt(messages)), messages, None, turns[1:])


def bench(target: Target, **decode: int | float) -> Bench:
    config = Config(
        experiment="tiny",
        decode=DecodeConfig(**{"draft_tokens": 2, "max_new_tokens": 6, **decode}),
        eval=EvalConfig(batch_sizes=[1, 2]),
    )
    return Bench(config, target, tiny_draft(target))


def test_the_second_prompt_holds_the_first_answer(target: Target) -> None:
    made = bench(target)
    seen: list[list[int]] = []
    decode = made.decode

    def watched(side: str, batch_size: int, prompts: Sequence[Prompt], params: Sequence[Params]) -> list[Run]:
        seen.append(prompts[0].ids)
        return decode(side, batch_size, prompts, params)

    made.decode = watched
    first, second = made.pairs(Step(0, 0.0, 1, 0, (dialogue(target, "a", "hi", "and then"),)), "plain")
    text = target.tokenizer.decode(first.plain.tokens, skip_special_tokens=True)
    asked = target.tokenizer.decode(seen[2])
    assert asked == (
        f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>\n"
        "<|im_start|>user\nand then<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(text) > 0
    assert seen[0] == seen[1] and seen[2] == seen[3]  # plain and speculative
    assert (first.turn, second.turn, second.prompt, second.prompt_tokens) == (0, 1, "a", len(seen[2]))
    assert first.cluster == second.cluster
    assert first.identical and second.identical  # float32, greedy


def test_turns_draw_other_random_numbers(target: Target) -> None:
    made = bench(target)
    prompt = Prompt("a", "c", [5])
    assert made.params(prompt, 1.0, 0, turn=0).seed != made.params(prompt, 1.0, 0, turn=1).seed
    assert made.params(prompt, 1.0, 0).seed == made.params(prompt, 1.0, 0, turn=0).seed


def test_a_batch_goes_on_with_the_conversations_that_do(target: Target) -> None:
    members = dialogue(target, "a", "hi", "so"), dialogue(target, "b", "ho")
    found = bench(target).pairs(Step(0, 0.0, 2, 0, members), "draft")
    assert [(pair.prompt, pair.turn) for pair in found] == [("a", 0), ("b", 0), ("a", 1)]


@pytest.mark.parametrize(("context", "turns"), [(90, 2), (50, 1)])
def test_a_turn_beyond_the_context_is_left_out(context: int, turns: int) -> None:
    """The first prompt has 21 tokens, the second 50 and the first reply, and 6 new ones follow."""
    target = tiny_target(max_position_embeddings=context)
    found = bench(target).pairs(Step(0, 0.0, 1, 0, (dialogue(target, "a", "hi", "and then"),)), "plain")
    assert len(found) == turns


def test_conversations_of_a_length_stand_together() -> None:
    prompts = [Prompt(id, "c", [5]) for id in "abcd"]
    lines = [
        {"id": "a", "messages": [], "turns": ["1", "2"]},
        {"id": "b", "messages": [], "turns": ["1"]},
        {"id": "c", "messages": [], "turns": ["1", "3"], "tools": [{}]},
        {"id": "d", "messages": []},
    ]
    made = by_turns(dialogues(prompts, lines))
    assert [(one.prompt.id, one.turns) for one in made] == [
        ("b", ()),
        ("d", ()),
        ("a", ("2",)),
        ("c", ("3",)),
    ]
    assert made[-1].tools == [{}]
