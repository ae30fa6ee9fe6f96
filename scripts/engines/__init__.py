"""Serving engines as `scripts.serve_check` uses them: started, asked for greedy replies, stopped.

`python -m scripts.engines [NAME ...]` (or `make engines`) builds an environment for each in .engines/, from
the complete list of pinned packages in scripts/engines/<name>.txt: engines pin their own torch and
transformers, which would not fit beside ours. An engine is a class with `open`, in a file of its own here:

    vllm_server.py         vLLM's OpenAI-compatible server, its CPU build
    llama_server.py        llama.cpp's server, prebuilt, with GGUF files made by llama.cpp's converter
    openvino_pipeline.py   OpenVINO GenAI's LLMPipeline, with models converted by optimum-intel
    assisted.py            transformers' assisted generation, in this process and our own environment

One engine's trouble is an `EngineError`, which becomes a row of the results.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from configs.errors import LeadoutError
from models.checkpoint import draft_hash
from models.hub import slug

ENVIRONMENTS = Path(".engines")


class EngineError(LeadoutError):
    """An engine that is not installed, cannot serve this draft, stopped, or answered something else."""


@dataclass(frozen=True)
class Counts:
    """What an engine counts of its rounds. A round is one verification of drafted tokens."""

    rounds: int
    drafted: int
    accepted: int
    by_position: list[int] | None = None  # [j]: rounds that accepted more than j; None: not reported


@dataclass(frozen=True)
class Proposed:
    """One round's chain, and how many tokens of the reply stood before it."""

    at: int
    tokens: list[int]


@dataclass(frozen=True)
class Reply:
    """A greedy reply, up to and with the token that ended it."""

    tokens: list[int]
    seconds: float  # as the client waited
    counts: Counts | None = None  # by the engine's own metrics
    proposed: list[Proposed] | None = None  # where the engine's drafter can be listened to


@dataclass(frozen=True)
class Setting:
    """What is served, and how."""

    target: str  # a plain model's folder (absolute: config.json, safetensors, tokenizer) or a hub's name
    draft: Path  # the exported folder, absolute
    command: str  # as the exporter prints it for this engine
    draft_tokens: int
    dtype: str
    threads: int
    context: int  # tokens of the longest prompt and its reply
    eos_ids: tuple[int, ...]
    work: Path  # for logs and converted files; may be kept from one start to the next


class Server(Protocol):
    """A running engine. `complete` is called for one prompt after another."""

    def complete(self, prompt: list[int], new_tokens: int) -> Reply: ...


class Engine(Protocol):
    name: str
    layout: str  # the exporter's name of what it reads

    def versions(self) -> dict[str, str]:
        """Of its packages. Raises `EngineError` where its environment is missing."""
        ...

    def open(self, setting: Setting, speculate: bool) -> AbstractContextManager[Server]:
        """A server with the draft, or of the target alone. Raises `EngineError` with what the engine said."""
        ...


def fingerprint(model: Path | str) -> str:
    """Tells what was converted from one model from what was from another: by its config and weights, or its
    name on the hub."""
    folder = Path(model)
    return draft_hash(folder)[:12] if folder.is_dir() else slug(str(model))


def rounds_of(reply: list[int], chains: list[list[int]], first: int) -> list[Proposed]:
    """Where each of an engine's `chains`, in its order, stood in the reply, and which of them count.

    first: tokens of the reply before the first chain: 1 where a prefill emits one, else 0. A round emits
    what it accepts and one token more. A chain behind the reply's end was drafted and never verified.
    """
    found, at = [], first
    for chain in chains:
        if at >= len(reply):
            break
        found.append(Proposed(at, chain))
        at += matched(chain, reply[at:]) + 1
    return found


def counts_of(reply: list[int], proposed: list[Proposed], draft_tokens: int) -> Counts:
    """The counts of rounds whose chains are known."""
    accepted = [matched(one.tokens, reply[one.at :]) for one in proposed]
    return Counts(
        rounds=len(proposed),
        drafted=sum(len(one.tokens) for one in proposed),
        accepted=sum(accepted),
        by_position=[sum(count > j for count in accepted) for j in range(draft_tokens)],
    )


def matched(chain: list[int], text: list[int]) -> int:
    """How many of the chain's first tokens are the text's."""
    pairs = enumerate(zip(chain, text, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(chain), len(text)))
