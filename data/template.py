"""The tokenizer's own chat template, as it is: prompts as ids, and the tokens of logged replies to train on.

No template is registered by name and no marker is searched for. A reply's place is found by rendering: what
the model sees before assistant turn j is `render(turns before j, with the generation prompt)`; the reply is
what `render(turns up to j)` adds to it. A template for which the first is no beginning of the second, or that
rewrites earlier turns later on, has no such place and is refused by name.

Text boundaries become token boundaries by tokenising each beginning and demanding that it is a beginning of
the row's tokens. This is stronger than looking at character offsets: it also proves that serving, which
tokenises the prompt alone, feeds the very ids the row has. It needs nothing that a slow tokenizer lacks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from types import SimpleNamespace
from typing import Any, cast

import jinja2
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from configs.errors import TargetError, TrafficError
from configs.schema import MaskTurns, TargetConfig
from data.traffic import Message, Refused
from models.target import Target, find_eos

TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, KeyError, IndexError, AttributeError, ValueError)


class UnstableTemplateError(TrafficError):
    """A chat template that renders the same turn differently depending on what follows it."""


@dataclass(frozen=True)
class Template:
    """The chat template of model `name`'s tokenizer; a reply ends at the first of `eos_ids`."""

    tokenizer: PreTrainedTokenizerBase
    name: str
    eos_ids: frozenset[int]

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise TrafficError(
                f"The tokenizer of {self.name} has no chat template, so messages cannot be turned into its "
                "prompts. Use the instruction-tuned model, or put the right chat_template.jinja beside its "
                "tokenizer files."
            )

    @classmethod
    def of(cls, target: Target) -> Template:
        return cls(target.tokenizer, target.name, target.eos_ids)

    @classmethod
    def load(cls, cfg: TargetConfig) -> Template:
        """The template without the target's weights. Raises `TargetError` for a missing tokenizer."""
        where: dict[str, Any] = {"revision": cfg.revision, "trust_remote_code": cfg.trust_remote_code}
        if cfg.gguf_file is not None:
            where["gguf_file"] = cfg.gguf_file
        try:
            tokenizer = AutoTokenizer.from_pretrained(cfg.name, **where)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise TargetError(
                f"The tokenizer of {cfg.name} cannot be loaded: {' '.join(str(error).split())[:300]} Check "
                "target.name (a hub name, or a folder), target.revision and target.gguf_file. The embedded "
                "target comes with python -m scripts.fetch_embedded."
            ) from error
        return cls(tokenizer, cfg.name, configured_eos(cfg, tokenizer))

    def tokenizer_fingerprint(self) -> str:
        """As `Target.tokenizer_fingerprint`, which needs the tokenizer alone."""
        return Target.tokenizer_fingerprint(cast(Target, self))

    def fingerprint(self) -> str:
        """SHA-256 of the template's text (of all of them, where there are several)."""
        return hashlib.sha256(json.dumps(self.tokenizer.chat_template, sort_keys=True).encode()).hexdigest()

    def prompt(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Token ids of the messages followed by the generation prompt: what a server feeds the model."""
        return self.encode(self.render(messages, tools, generation=True))

    def row(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, turns: MaskTurns
    ) -> tuple[list[int], list[int]]:
        """(ids, loss mask of 0 and 1, as long) of a logged conversation.

        The mask holds the replies' tokens up to and including the end-of-turn token, which the model must
        produce, and not what the template writes after it. A reply whose template has no such token is masked
        to its end. With `turns` last, what follows the last reply is left off.

        Raises `UnstableTemplateError`; `Refused` for a row without a reply, or with a token across a
        boundary.
        """
        replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not replies:
            raise Refused("no assistant turn to train on")
        if turns is MaskTurns.last:
            replies = replies[-1:]
            messages = messages[: replies[0] + 1]
        whole = self.render(messages, tools)
        ids = self.encode(whole)
        mask = [0] * len(ids)
        for turn in replies:
            before = self.render(messages[:turn], tools, generation=True)
            through = self.render(messages[: turn + 1], tools)
            if not (through.startswith(before) and whole.startswith(through)):
                raise self.unstable(turn, turns)
            start, end = self.reply_span(ids, before, through)
            mask[start:end] = [1] * (end - start)
        return ids, mask

    def reply(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, reply: Message, ended: bool
    ) -> list[int]:
        """Token ids of a reply that came as text, as the model would have produced them after `messages`.

        ended: the model ended its turn, so the end token belongs to the reply. Tool calls and reasoning are
        rendered by the template; plain content follows the prompt as it is. `Refused` when a token straddles
        their boundary.
        """
        if reply.get("tool_calls") or reply.get("reasoning_content"):
            try:
                ids, mask = self.row([*messages, reply], tools, MaskTurns.last)
            except UnstableTemplateError:
                raise Refused("the chat template hides where its tool calls or reasoning begin") from None
            return list(compress(ids, mask))
        before = self.render(messages, tools, generation=True)
        prompt, ids = self.encode(before), self.encode(before + reply["content"])
        if ids[: len(prompt)] != prompt:
            raise Refused("a token straddles the start of a reply")
        made = ids[len(prompt) :]
        return self.ended(made) if ended else self.until_end(made)

    def ended(self, ids: list[int]) -> list[int]:
        """A reply up to its end token, which is put there where it is missing."""
        return self.until_end([*ids, self.end_of_turn])

    def until_end(self, ids: list[int]) -> list[int]:
        """`ids` up to and including the first end token."""
        return ids[: next((index + 1 for index, id in enumerate(ids) if id in self.eos_ids), len(ids))]

    @cached_property
    def largest_id(self) -> int:
        """Of the tokenizer's; a vocabulary with gaps has fewer tokens than that."""
        return max(self.tokenizer.get_vocab().values())

    @cached_property
    def end_of_turn(self) -> int:
        """The token with which this template ends an assistant turn."""
        ids, mask = self.row(
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None, MaskTurns.last
        )
        last = list(compress(ids, mask))[-1]
        if not self.eos_ids:
            raise TrafficError(
                f"{self.name} has no end token, so nothing says where a reply ends. Set eos_token_id in its "
                "generation_config.json, or eos_token of its tokenizer."
            )
        return last if last in self.eos_ids else min(self.eos_ids)

    def reply_span(self, ids: list[int], before: str, through: str) -> tuple[int, int]:
        """[start, end) in `ids` of the reply that `through` adds to `before`."""
        prompt, turn = self.encode(before), self.encode(through)
        start = len(prompt)
        if ids[:start] != prompt:
            raise Refused("a token straddles the start of a reply")
        shared = shared_length(ids, turn)
        for index in range(start, shared):
            if ids[index] in self.eos_ids:
                return start, index + 1
        if shared < len(turn):
            raise Refused("a token straddles the end of a reply")
        return start, len(turn)

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, generation: bool = False
    ) -> str:
        """The conversation as text. `Refused` in the template's own words where it raises an exception."""
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, tools=cast(Any, tools), tokenize=False, add_generation_prompt=generation
            )
        except TEMPLATE_FAULTS as error:
            raise Refused(f"the chat template refuses it: {' '.join(str(error).split())[:120]}") from error
        assert isinstance(rendered, str)
        return rendered

    def encode(self, rendered: str) -> list[int]:
        """Ids of rendered text, which already holds every special token: none is added (no second BOS)."""
        return self.tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]

    def unstable(self, turn: int, turns: MaskTurns) -> UnstableTemplateError:
        if turns is MaskTurns.all:
            mend = "Set data.mask_turns=last to train on each conversation's last reply only"
        else:
            mend = "Its logged replies cannot be trained on: set data.replies=target and run data.regenerate"
        return UnstableTemplateError(
            f"The chat template of {self.name} renders assistant turn {turn} differently once it is "
            f"answered or followed by other turns, so the tokens of that reply cannot be told. {mend}."
        )


def configured_eos(cfg: TargetConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """As `Target.eos_ids`: the end tokens of the generation config, or else of the model's, and the
    tokenizer's."""
    revision = cfg.revision or "main"
    try:
        generation = GenerationConfig.from_pretrained(cfg.name, revision=revision)
    except (OSError, ValueError):
        try:
            model = AutoConfig.from_pretrained(
                cfg.name, revision=revision, trust_remote_code=cfg.trust_remote_code
            )
            generation = GenerationConfig.from_model_config(model)
        except (OSError, ValueError):  # a server's model may be known here by its tokenizer alone
            generation = GenerationConfig()
    return find_eos(SimpleNamespace(generation_config=generation), tokenizer)


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
