"""The target answers behind an OpenAI-compatible server: requests in flight together, retried for a while.

Replies come as text and are tokenised again with the target's own tokenizer, so a server should serve the
very model that `target` names. `OPENAI_API_KEY` is sent when it is set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any, TypeVar

import httpx
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential_jitter,
)

from configs.errors import TrafficError
from configs.schema import RegenerateConfig
from data.template import Template
from data.traffic import Refused, message, prompt_of

ATTEMPTS = 8
AGAIN = frozenset({408, 409, 425, 429})  # and every 5xx
NEVER = frozenset({401, 403, 404, 405})  # no row would fare better

Item = TypeVar("Item")
Result = TypeVar("Result")


class Unavailable(Exception):
    """The server may answer later; `after` seconds if it said so."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


class Server:
    """`answer(row)` asks for one prompt; it may be called from many threads."""

    def __init__(
        self, cfg: RegenerateConfig, template: Template, seed: int, longest_wait: float = 30.0
    ) -> None:
        assert cfg.server is not None
        self.url = f"{root_of(cfg.server)}/v1/chat/completions"
        self.cfg = cfg
        self.template = template
        self.seed = seed
        self.client = httpx.Client(
            headers=key_header(),
            timeout=httpx.Timeout(600.0, connect=10.0),
            limits=httpx.Limits(max_connections=cfg.concurrency),
        )
        self.retrying = Retrying(**patience(ATTEMPTS, longest_wait))

    def answer(self, row: dict[str, Any]) -> tuple[list[int], str]:
        """(reply ids, finish) for a row of train.jsonl.

        Raises `Refused` when the server turns this row down, `TrafficError` when it turns every row down or
        stays away.
        """
        try:
            return self.read(row, self.retrying(self.ask, row))
        except Unavailable as error:
            raise TrafficError(
                f"{self.url} did not answer in {ATTEMPTS} attempts: {error}. What was answered is kept: see "
                "that the server runs (regenerate.server, regenerate.concurrency) and run the same command "
                "again."
            ) from error

    def ask(self, row: dict[str, Any]) -> httpx.Response:
        try:
            response = self.client.post(self.url, json=self.request(row))
        except httpx.TransportError as error:
            raise Unavailable(f"{type(error).__name__} {error}".strip()) from error
        status, said = response.status_code, " ".join(response.text.split())[:200]
        if status in AGAIN or status >= 500:
            raise Unavailable(f"HTTP {status} {said}", retry_after(response))
        if status in NEVER:
            raise TrafficError(
                f"{self.url} answers HTTP {status}: {said}. Check regenerate.server (the base URL), "
                "regenerate.server_model (a name it serves) and, where it wants one, the key in "
                "OPENAI_API_KEY."
            )
        if status != 200:
            raise Refused(f"the server answers HTTP {status}: {said}")
        return response

    def request(self, row: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": self.cfg.server_model,
            "max_tokens": self.cfg.max_new_tokens,
            "temperature": self.cfg.temperature,
            "top_p": self.cfg.top_p,
            "seed": self.seed,
            **question(row),
        }

    def read(self, row: dict[str, Any], response: httpx.Response) -> tuple[list[int], str]:
        try:
            choice = response.json()["choices"][0]
            reply, reason = dict(choice["message"]), choice["finish_reason"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise Refused("the server's answer is no chat completion") from None
        if reason not in ("stop", "tool_calls", "length"):
            raise Refused(f"the server ended the reply with {reason!r}")
        reply["reasoning_content"] = reply.get("reasoning_content") or reply.get("reasoning")
        calls = reply.get("tool_calls")
        turn = (
            message({**reply, "role": "assistant"})
            if calls
            else {**reply, "role": "assistant", "content": reply.get("content") or ""}
        )
        ids = self.template.reply(
            prompt_of(row["messages"]), row.get("tools"), turn, ended=reason != "length"
        )
        return ids, "length" if reason == "length" else "eos"


def root_of(base: str) -> str:
    """Where a server begins; its base URL may end with /v1 or not."""
    return base.rstrip("/").removesuffix("/v1")


def key_header() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def patience(attempts: int, longest_wait: float) -> dict[str, Any]:
    """How what is `Unavailable` is asked for again, as arguments of tenacity's Retrying and AsyncRetrying:
    after 0.5 s, then twice as long each time, or as long as the server asks for; never longer than
    `longest_wait` seconds."""
    backoff = wait_exponential_jitter(
        initial=min(0.5, longest_wait), max=longest_wait, jitter=min(1.0, longest_wait)
    )
    return {
        "retry": retry_if_exception_type(Unavailable),
        "stop": stop_after_attempt(attempts),
        "wait": lambda state: max(backoff(state), min(asked_wait(state), longest_wait)),
        "reraise": True,
    }


def question(row: dict[str, Any]) -> dict[str, Any]:
    """What a request says of a prompt: its messages, and the tools and the form of reply that it has."""
    asked = {"messages": [openai_form(turn) for turn in prompt_of(row["messages"])]}
    return asked | {name: row[name] for name in ("tools", "response_format") if name in row}


def openai_form(turn: dict[str, Any]) -> dict[str, Any]:
    """Arguments of tool calls go back into the JSON string that the protocol has."""
    if not turn.get("tool_calls"):
        return turn
    return {**turn, "tool_calls": [with_string(call) for call in turn["tool_calls"]]}


def with_string(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function.get("arguments") or {})}}


def retry_after(response: httpx.Response) -> float:
    """Seconds of a Retry-After header; 0 without one, or when it is a date."""
    value = response.headers.get("retry-after", "")
    return float(value) if value.isdigit() else 0.0


def asked_wait(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    return error.after if isinstance(error, Unavailable) else 0.0


def concurrently(
    work: Callable[[Item], Result], items: Iterable[Item], concurrency: int
) -> Generator[Result]:
    """Yields each `work(item)` when it is done, at most `concurrency` at a time. An error ends all."""
    waiting = iter(items)
    with ThreadPoolExecutor(concurrency) as pool:
        running: set[Future[Result]] = {pool.submit(work, item) for item in islice(waiting, concurrency)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
            running |= {pool.submit(work, item) for item in islice(waiting, len(done))}
