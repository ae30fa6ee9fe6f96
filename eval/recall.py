"""Prompts whose answer stands far back in their own text: a fact, much else, then the question.

Held-out traffic is mostly short, and what it asks stands near its end. A draft that sees little of the past
(a window, one layer) may do well on it and badly behind a long context. Here the distance is known: `length`
tokens of prompt, nearly all of them between the fact and the question. They are probes, not traffic: each
length has a category of its own ("recall 2048"), and counts in no row but that one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from configs.errors import ConfigError
from data.template import Template
from data.tokens import Prompt
from eval.dialogue import Dialogue

EACH = 8  # prompts per length
NAMES = ("Ada", "Boris", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Hugo")


def recalls(
    template: Template, texts: Sequence[str], lengths: Sequence[int], context: int | None, seed: int
) -> list[Dialogue]:
    """`EACH` prompts of about each of `lengths` tokens (a few more or fewer, as tokens meet).

    texts: what stands between fact and question, taken in turn and as often as it takes. context: tokens that
    a prompt may have; None: any number. Raises `ConfigError` for a length that does not fit, or that has no
    room for fact and question.
    """
    made = []
    for length in lengths:
        if context is not None and length > context:
            raise ConfigError(
                f"eval.recall_tokens={length} and decode.max_new_tokens do not fit into the target's "
                f"context: set at most {context}."
            )
        for number in range(EACH):
            chance = random.Random(f"{seed} {length} {number}")
            made.append(recall(template, chance.sample(list(texts), len(texts)), length, number, chance))
    return made


def recall(
    template: Template, texts: Sequence[str], length: int, number: int, chance: random.Random
) -> Dialogue:
    name, code = NAMES[number % len(NAMES)], chance.randrange(1000, 10000)

    def asked(between: str) -> list[dict[str, str]]:
        fact, question = f"The code of {name} is {code}.", f"What is the code of {name}?"
        return [{"role": "user", "content": f"{fact}\n\n{between}\n\n{question}"}]

    room = length - len(template.prompt(asked("")))
    if room < 1:
        raise ConfigError(
            f"eval.recall_tokens={length} has no room for a fact and a question: set at least "
            f"{length - room + 1}."
        )
    ids: list[int] = []
    while len(ids) < room:
        before = len(ids)
        for text in texts:
            ids += template.encode(text + "\n\n")
        if len(ids) == before:
            raise ConfigError("eval.recall_tokens needs held-out prompts with text, and there are none.")
    messages = asked(str(template.tokenizer.decode(ids[:room], skip_special_tokens=True)))
    prompt = Prompt(f"recall-{length}-{number}", f"recall {length}", template.prompt(messages))
    return Dialogue(prompt, messages, probe=True)
