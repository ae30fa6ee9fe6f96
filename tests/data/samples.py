"""Tokenizers and templates of single letters, configurations and files for this room's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from configs.schema import Config, DataConfig, Dtype, MethodConfig, RegenerateConfig, Source, TargetConfig
from data.template import Template

# "s", "u" and "a" open a system, user and assistant turn, "e" ends a reply, and a newline follows it.
LETTERS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'a' + m.content + 'e\n' }}"
    "{% elif m.role == 'system' %}{{ 's' + m.content }}{% else %}{{ 'u' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a' }}{% endif %}"
)
ALPHABET = "\nabestuvwxyz"  # ids 0..11; "b" is the BOS of `with_bos`, "e" (3) the end of a turn


def letter_tokenizer(template: str | None = LETTERS, with_bos: bool = False) -> PreTrainedTokenizerFast:
    """One token per letter of `ALPHABET`."""
    tokenizer = Tokenizer(WordLevel({letter: i for i, letter in enumerate(ALPHABET)}, unk_token="z"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    if with_bos:
        tokenizer.post_processor = TemplateProcessing("b $A", special_tokens=[("b", ALPHABET.index("b"))])  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="e", chat_template=template)


def merging_tokenizer(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """Letters, and one token more for each pair that merges."""
    vocabulary = {letter: i for i, letter in enumerate([*ALPHABET, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(BPE(vocabulary, list(merges)))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="e", chat_template=LETTERS)


def letters(template: str = LETTERS, **options: Any) -> Template:
    return Template(letter_tokenizer(template, **options), "letters", frozenset({ALPHABET.index("e")}))


def chat(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages that alternate between user and assistant."""
    first = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return first + [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def write_rows(path: Path, *rows: Any) -> Path:
    """JSON lines; a string is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def config(folder: Path, target: str = "tiny", sources: list[Path] | None = None, **data: Any) -> Config:
    return Config(
        experiment="test",
        target=TargetConfig(name=target, dtype=Dtype.float32, device="cpu"),
        method=MethodConfig(name="eagle3"),
        data=DataConfig(
            folder=str(folder), sources=[Source(path=str(path)) for path in sources or []], **data
        ),
        regenerate=RegenerateConfig(max_new_tokens=24, batch_size=4),
    )
