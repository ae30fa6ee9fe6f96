"""Held-out prompts as they are asked: most once, conversations turn by turn.

Traffic in the form of MT-bench and Spec-Bench gives a conversation's user turns alone. The target answers
each before the next is asked, so a later prompt holds the answers before it. They are the plainly decoded
ones for both ways of decoding: both then answer the same prompt, also where rounding or chance made them say
different things before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from data.template import Template
from data.tokens import Prompt
from data.traffic import Message


@dataclass(frozen=True)
class Dialogue:
    """A prompt to be answered, and the user turns that come after it."""

    prompt: Prompt
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    turns: tuple[str, ...] = ()
    turn: int = 0  # which one `prompt` asks
    probe: bool = False  # made to measure something: no traffic

    def then(self, template: Template, reply: Sequence[int]) -> Dialogue:
        """After the reply (token ids): the prompt of the next user turn."""
        text = str(template.tokenizer.decode(list(reply), skip_special_tokens=True))
        messages = [
            *self.messages,
            {"role": "assistant", "content": text},
            {"role": "user", "content": self.turns[0]},
        ]
        prompt = replace(self.prompt, ids=template.prompt(messages, self.tools))
        return replace(self, prompt=prompt, messages=messages, turns=self.turns[1:], turn=self.turn + 1)


def dialogues(chosen: Sequence[Prompt], rows: Sequence[Mapping[str, Any]]) -> list[Dialogue]:
    """The chosen prompts with the turns that come after them. rows: the lines of heldout.jsonl."""
    known = {row["id"]: row for row in rows}
    return [
        Dialogue(
            prompt,
            known[prompt.id]["messages"],
            known[prompt.id].get("tools"),
            tuple(known[prompt.id].get("turns") or [])[1:],
        )
        for prompt in chosen
    ]


def by_turns(asked: Sequence[Dialogue]) -> list[Dialogue]:
    """Those with equally many turns together, so that batches of them end together."""
    return sorted(asked, key=lambda dialogue: len(dialogue.turns))
