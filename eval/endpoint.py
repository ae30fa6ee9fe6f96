"""An OpenAI-compatible endpoint as its user meets it: replies streamed, each piece with its time, failures by
their kind, and what the server counts of its drafts.

`Endpoint.answer` asks one chat completion and never raises for what the server does: an `Answer` says what
came, when, and what went wrong. Times are seconds by this process's clock since the request was due, read
when a piece arrives here. `closed_loop` and `open_loop` are the two ways to send many.

Acceptance comes from where engines publish it: vLLM's counters on /metrics (v1/spec_decode/metrics.py),
SGLang's mean on /server_info (formerly /get_server_info) or /metrics (observability/metrics_collector.py).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httpx
import numpy as np
from tenacity import AsyncRetrying

from configs.errors import TrafficError
from data.server import AGAIN, Unavailable, key_header, patience, retry_after, root_of

NO_CONNECTION = "no connection"
NO_ANSWER = "connection lost before the answer"
TIMEOUT = "timeout"
BROKEN = "broken stream"  # it ended, or its connection did, before [DONE]
BAD_CHUNK = "bad chunk"  # no JSON, or no piece of a chat completion
IN_STREAM = "error in the stream"
EMPTY = "empty stream"

# Some servers send the tokens of one round as one piece each, a few microseconds apart; no decode step is
# this fast.
TOGETHER = 0.5e-3


class Failed(Exception):
    """Why a request came to nothing. `kind` is what it is counted under."""

    def __init__(self, kind: str, said: str = "") -> None:
        super().__init__(f"{kind} {said}".strip())
        self.kind = kind
        self.said = " ".join(said.split())[:200]


class FailedForNow(Failed, Unavailable):
    """A failure that the retry policy asks again for."""

    def __init__(self, kind: str, said: str = "", after: float = 0.0) -> None:
        super().__init__(kind, said)
        self.after = after


@dataclass(frozen=True)
class Answer:
    """What came of one request. All times in seconds since it was due, retries and their waits included."""

    sent: float  # when it was first sent; 0 but for a client that is late
    seconds: float  # until [DONE], or until it failed
    pieces: list[float] = field(default_factory=list)  # one for each chunk with text, tool calls included
    text: str = ""
    finish: str | None = None
    tokens: int | None = None  # of the reply, by the server's usage; None: it sent none
    error: str | None = None  # its kind; None: the reply is whole
    said: str | None = None  # by the server, or the connection, about the error
    retried: list[str] = field(default_factory=list)  # kinds of the failures before, if it was asked again

    @property
    def ttft(self) -> float | None:
        return self.pieces[0] if self.pieces else None

    @property
    def emissions(self) -> list[float]:
        """When text came: pieces that follow another within `TOGETHER` came with it."""
        before = [-np.inf, *self.pieces]
        return [now for last, now in zip(before, self.pieces, strict=False) if now - last >= TOGETHER]


@dataclass
class Stream:
    """What has come of a reply so far; `read` takes the data of its server-sent events one by one."""

    began: float  # the clock's time that all others are counted from
    pieces: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish: str | None = None
    tokens: int | None = None
    seconds: float | None = None  # of [DONE]
    events: int = 0

    def read(self, data: bytes, now: float) -> None:
        """Raises `Failed` for an event that is no part of a chat completion, or an error's message."""
        self.events += 1
        if data == b"[DONE]":
            self.seconds = now - self.began
            return
        try:
            event = json.loads(data)
            if event.get("error"):
                raise Failed(IN_STREAM, json.dumps(event["error"]))
            if event.get("usage"):
                self.tokens = int(event["usage"]["completion_tokens"])
            for choice in event["choices"]:
                if text := text_of(choice["delta"]):
                    self.pieces.append(now - self.began)
                    self.texts.append(text)
                self.finish = choice.get("finish_reason") or self.finish
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
            raise Failed(BAD_CHUNK, data.decode("utf-8", "replace")) from None

    def check_whole(self) -> None:
        if not self.events or (self.seconds is not None and self.finish is None and not self.pieces):
            raise Failed(EMPTY)
        if self.seconds is None:
            raise FailedForNow(BROKEN, "it ended without [DONE]")


class Endpoint:
    """One server; many requests may be under way."""

    def __init__(
        self, base: str, client: httpx.AsyncClient, attempts: int = 1, longest_wait: float = 30.0
    ) -> None:
        """base: its URL, with or without /v1. attempts: tries of a request in all, by the policy of
        `data.server.patience`."""
        self.root = root_of(base)
        self.client = client
        self.patience = patience(attempts, longest_wait)

    async def answer(self, body: dict[str, Any], due: float | None = None) -> Answer:
        """Asks for a chat completion. due: the clock's time that its times count from; None: now."""
        sent = perf_counter()
        began = sent if due is None else due
        failures: list[str] = []

        async def once() -> Stream:
            stream = Stream(began)
            try:
                await self.stream(body, stream)
            except Failed as failed:
                failures.append(failed.kind)
                raise
            return stream

        try:
            stream = await AsyncRetrying(**self.patience)(once)
        except Failed as failed:
            return Answer(
                sent=sent - began,
                seconds=perf_counter() - began,
                error=failed.kind,
                said=failed.said,
                retried=failures[:-1],
            )
        assert stream.seconds is not None
        return Answer(
            sent=sent - began,
            seconds=stream.seconds,
            pieces=stream.pieces,
            text="".join(stream.texts),
            finish=stream.finish,
            tokens=stream.tokens if stream.tokens or not stream.pieces else None,  # text is not of 0 tokens
            retried=failures,
        )

    async def stream(self, body: dict[str, Any], stream: Stream) -> None:
        """One try. Raises `Failed`."""
        answered = False
        try:
            async with self.client.stream("POST", f"{self.root}/v1/chat/completions", json=body) as response:
                answered = True
                if response.status_code != 200:
                    await response.aread()
                    raise refusal(response)
                async for line in lines(response):
                    if line.startswith(b"data:") and stream.seconds is None:
                        stream.read(line[5:].strip(), perf_counter())
        except httpx.RequestError as error:
            if stream.seconds is None:  # after [DONE] nothing more was to come
                raise FailedForNow(kind_of(error, answered), f"{type(error).__name__} {error}") from error
        stream.check_whole()

    async def there(self) -> bool:
        """Whether anybody answers."""
        try:
            await self.client.get(f"{self.root}/v1/models", timeout=10.0)
        except httpx.RequestError:
            return False
        return True

    async def look(self, path: str) -> httpx.Response | None:
        """What stands there; None if nothing does."""
        try:
            response = await self.client.get(f"{self.root}{path}", timeout=10.0)
        except httpx.RequestError:
            return None
        return response if response.status_code == 200 else None

    async def served(self, side: str, model: str | None) -> dict[str, Any]:
        """Address, model, engine and version, as far as the server tells. `TrafficError` when it is not
        there, or names no model and none is asked for."""
        try:
            response = await self.client.get(f"{self.root}/v1/models", timeout=10.0)
        except httpx.RequestError as error:
            raise TrafficError(
                f"ab.{side}={self.root} does not answer ({type(error).__name__} {error}). Start that server, "
                "or correct the address."
            ) from error
        listed = objects(response, "data")
        name = model or next((one.get("id") for one in listed), None)
        if name is None:
            raise TrafficError(
                f"ab.{side}={self.root} lists no model (HTTP {response.status_code} at /v1/models). See that "
                "it is an OpenAI-compatible server and that OPENAI_API_KEY holds its key if it wants one, or "
                "set ab.model."
            )
        told = fields(await self.look("/version")) or await self.server_info()
        return {
            "url": self.root,
            "model": name,
            "engine": next((one.get("owned_by") for one in listed), None),
            "version": told.get("version"),
        }

    async def server_info(self) -> dict[str, Any]:
        """SGLang's account of itself; empty elsewhere."""
        return fields(await self.look("/server_info")) or fields(await self.look("/get_server_info"))

    async def drafting(self) -> Drafting | float | None:
        """vLLM's counters; SGLang's mean acceptance length, which it counts since its start; else None."""
        response = await self.look("/metrics")
        metrics = response.text if response is not None else ""
        if (counted := vllm_drafting(metrics)) is not None:
            return counted
        return sglang_length(await self.server_info(), metrics)


# ---- reading the stream ----


async def lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Lines as they come. Not httpx's own, which also break at characters that JSON strings may hold, such as
    U+2028."""
    rest = b""
    async for part in response.aiter_bytes():
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")
    if rest:
        yield rest


def text_of(delta: dict[str, Any]) -> str:
    """All that a piece says: reasoning, content, and the names and arguments of calls, without their random
    ids."""
    said = [delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content")]
    for call in delta.get("tool_calls") or []:
        function = call.get("function") or {}
        said += [function.get("name"), function.get("arguments")]
    return "".join(part for part in said if part)


def refusal(response: httpx.Response) -> Failed:
    status = response.status_code
    if status in AGAIN or status >= 500:
        return FailedForNow(f"HTTP {status}", response.text, retry_after(response))
    return Failed(f"HTTP {status}", response.text)


def kind_of(error: httpx.RequestError, answered: bool) -> str:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return NO_CONNECTION
    if isinstance(error, httpx.TimeoutException):
        return TIMEOUT
    return BROKEN if answered else NO_ANSWER


# ---- what servers say of themselves ----


@dataclass(frozen=True)
class Drafting:
    """Counts of drafts (rounds with one), of tokens drafted and accepted, and of those accepted at position
    j."""

    drafts: int
    drafted: int
    accepted: int
    by_position: list[int]

    def since(self, before: Drafting) -> Drafting:
        old = [*before.by_position, *[0] * len(self.by_position)]
        return Drafting(
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            [after - then for after, then in zip(self.by_position, old, strict=False)],
        )


def vllm_drafting(metrics: str) -> Drafting | None:
    """Summed over engines; None without speculation."""
    sums: Counter[str] = Counter()
    by_position: Counter[int] = Counter()
    for name, labels, value in samples(metrics):
        name = name.removesuffix("_total")
        sums[name] += round(value)
        position = re.search(r'\bposition="(\d+)"', labels)
        if name == "vllm:spec_decode_num_accepted_tokens_per_pos" and position:
            by_position[int(position[1])] += round(value)
    if "vllm:spec_decode_num_drafts" not in sums:
        return None
    return Drafting(
        drafts=sums["vllm:spec_decode_num_drafts"],
        drafted=sums["vllm:spec_decode_num_draft_tokens"],
        accepted=sums["vllm:spec_decode_num_accepted_tokens"],
        by_position=[by_position[j] for j in range(max(by_position, default=-1) + 1)],
    )


def sglang_length(info: dict[str, Any], metrics: str) -> float | None:
    """Tokens a round, the target's own included: since the server's start where it tells, else of its last
    interval. Below 1 there is no speculation: the gauge stands at 0 then."""
    states = info.get("internal_states") or []
    told = [state.get("avg_spec_accept_length") for state in states if isinstance(state, dict)]
    told = [float(one) for one in told if one is not None]
    told = told or [value for name, _, value in samples(metrics) if name == "sglang:spec_accept_length"]
    return sum(told) / len(told) if told and min(told) >= 1 else None


def samples(metrics: str) -> Iterator[tuple[str, str, float]]:
    """(name, labels, value) of each finite sample of Prometheus's text format."""
    for line in metrics.splitlines():
        found = re.match(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)", line)
        if found is None:
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        if np.isfinite(value):
            yield found[1], found[2] or "", value


def fields(response: httpx.Response | None) -> dict[str, Any]:
    """The JSON object in a response; empty if there is none."""
    try:
        found = response.json() if response is not None else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def objects(response: httpx.Response, name: str) -> list[dict[str, Any]]:
    found = fields(response).get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


# ---- many requests ----

Ask = Callable[[int, float | None], Awaitable[Answer]]  # (which, when it was due; None: when it is sent)


async def closed_loop(ask: Ask, count: int, concurrency: int) -> list[Answer]:
    """Requests 0 .. count - 1, `concurrency` at a time: each user asks again once answered."""
    waiting = iter(range(count))
    answers: dict[int, Answer] = {}

    async def user() -> None:
        for i in waiting:
            answers[i] = await ask(i, None)

    await asyncio.gather(*(user() for _ in range(concurrency)))
    return [answers[i] for i in range(count)]


async def open_loop(ask: Ask, arrivals: Sequence[float]) -> list[Answer]:
    """A request at each of `arrivals` (seconds from now), however many are under way.

    Their times count from the arrival, so that a client that falls behind does not hide the wait (coordinated
    omission).
    """
    began = perf_counter()

    async def arrive(i: int) -> Answer:
        due = began + arrivals[i]
        await asyncio.sleep(max(due - perf_counter(), 0.0))
        return await ask(i, due)

    return list(await asyncio.gather(*(arrive(i) for i in range(len(arrivals)))))


def poisson(count: int, rate: float, seed: int) -> list[float]:
    """`count` arrivals of a Poisson process: seconds, `1 / rate` apart on average."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count)).tolist()


def http_client(timeout: float) -> httpx.AsyncClient:
    """timeout: seconds without a byte, after which a request has failed."""
    return httpx.AsyncClient(
        headers=key_header(),
        timeout=httpx.Timeout(timeout, connect=10.0, pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )
