"""The target answers behind OpenAI-compatible servers: many requests under way, every row answered once.

`Fleet.answer` shares rows over any number of servers. One that fails rests, longer each time, then gets a
single request, and all it can take once that is answered; its rows go to whichever server has room. Only what
may be a row's own fault (an error 500, a timeout, an answer that does not parse) counts against the row.

vLLM tells a reply's token ids (`return_token_ids`; 0.32.0, entrypoints/openai/chat_completion/protocol.py):
they are kept as they are where the prompt's ids beside them are those that data.prepare made. Other servers'
replies come as text and are tokenised again, which is not always what the model wrote; a reply says which it
is. `OPENAI_API_KEY` is sent when it is set.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic
from typing import Any

import httpx
from tenacity import RetryCallState, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from configs.errors import ConfigError, TrafficError
from configs.schema import RegenerateConfig
from data.template import Template
from data.traffic import Refused, message, prompt_of, text

ATTEMPTS = 8  # tries of a row that fails for what may be its own fault
AGAIN = frozenset({408, 409, 425, 429})  # and every 5xx
BUSY = AGAIN | {502, 503}  # a server's own state, whatever it was asked
NEVER = frozenset({401, 403, 404, 405})  # no row would fare better
FIRST_WAIT = 0.5  # seconds
FIRST_PATIENCE = 60.0  # seconds for a first answer; a wrong address should not take `patience` to be told

IDS = "return_token_ids"

Row = dict[str, Any]


class Unavailable(Exception):
    """The server may answer later; `after` seconds if it said so. `blame`: the row may be why it did not."""

    def __init__(self, reason: str, after: float = 0.0, blame: bool = False) -> None:
        super().__init__(reason)
        self.after = after
        self.blame = blame


@dataclass(frozen=True)
class Reply:
    """`ids` as generated, the end token included; finish is "eos" or "length".

    `retokenised`: the ids are those of the text. `counted` is then how many the server says that the model
    wrote, if it does.
    """

    ids: list[int]
    finish: str
    retokenised: bool = False
    counted: int | None = None

    @property
    def differs(self) -> bool:
        """Whether the model provably wrote other tokens. Not every server counts the end token."""
        ended = self.finish == "eos"
        return self.counted is not None and self.counted not in (len(self.ids), len(self.ids) - ended)


# --- one server, one request ---------------------------------------------------


@dataclass
class Server:
    """One endpoint and how it is doing. Times are `monotonic`'s."""

    root: str  # its base URL without /v1
    under_way: int = 0
    failures: int = 0  # in a row
    rests_until: float = 0.0
    last_failure: str = ""
    tells_ids: bool = True  # until it says that it does not know the question

    def room(self, now: float, most: int) -> int:
        """How many more requests it gets: none while it rests, then one until it has answered."""
        if now < self.rests_until:
            return 0
        return (1 if self.failures else most) - self.under_way

    def failed(self, error: Unavailable, now: float, longest_wait: float) -> None:
        """Rests twice as long each time, or as long as the server asks for, but never longer than
        `longest_wait`. What was under way when a rest began fails with it, and counts once."""
        self.last_failure = str(error)
        if now >= self.rests_until:
            self.failures += 1
        wait = max(FIRST_WAIT * 2.0 ** min(self.failures - 1, 10), error.after)
        self.rests_until = max(self.rests_until, now + min(wait, longest_wait))


class Questions:
    """What is asked of a server for a row, and what its answer means."""

    def __init__(self, cfg: RegenerateConfig, template: Template, seed: int) -> None:
        self.cfg, self.template, self.seed = cfg, template, seed

    async def ask(self, server: Server, row: Row, client: httpx.AsyncClient) -> Reply:
        """Raises `Unavailable`; `Refused` where the row is turned down, `TrafficError` where all would be."""
        response = await post(server, self.request(row, server.tells_ids), client)
        status, said = response.status_code, " ".join(response.text.split())[:200]
        if status in AGAIN or status >= 500:
            raise Unavailable(f"HTTP {status} {said}", retry_after(response), blame=status not in BUSY)
        if status in NEVER:
            raise TrafficError(
                f"{server.root} answers HTTP {status}: {said}. Check regenerate.server (the base URL), "
                "regenerate.server_model (a name it serves) and, where it wants one, the key in "
                "OPENAI_API_KEY."
            )
        if status in (400, 422) and server.tells_ids and IDS in response.text:
            server.tells_ids = False
            return await self.ask(server, row, client)
        if status != 200:
            raise Refused(f"the server answers HTTP {status}: {said}")
        return self.read(row, response)

    def request(self, row: Row, ids: bool) -> dict[str, Any]:
        return {
            "model": self.cfg.server_model,
            "max_tokens": self.cfg.max_new_tokens,
            "temperature": self.cfg.temperature,
            "top_p": self.cfg.top_p,
            "seed": self.seed,
            **({IDS: True} if ids else {}),
            **self.cfg.extra,
            **question(row),
        }

    def read(self, row: Row, response: httpx.Response) -> Reply:
        try:
            said = response.json()
            choice, used = said["choices"][0], said.get("usage") or {}
            turn, reason = dict(choice["message"]), choice["finish_reason"]
            fed, ids, counted = (
                said.get("prompt_token_ids"),
                choice.get("token_ids"),
                used.get("completion_tokens"),
            )
        except (ValueError, LookupError, TypeError, AttributeError):
            raise Unavailable("the server's answer is no chat completion", blame=True) from None
        if reason not in ("stop", "tool_calls", "length"):
            raise Refused(f"the server ended the reply with {reason!r}")
        ended = reason != "length"
        if fed is not None and fed != row["prompt_ids"]:
            raise Refused(
                "the server feeds the model other prompt tokens than data.prepare made: its chat template or "
                "tokenizer is another"
            )
        if fed is not None and ids:
            if not all(isinstance(id, int) and 0 <= id <= self.template.largest_id for id in ids):
                raise Unavailable("the server's token ids are none of the target's", blame=True)
            made = self.template.ended(ids) if ended else ids
            return Reply(made, "eos" if ended else "length")
        return Reply(self.tokenised(row, turn, ended), "eos" if ended else "length", True, counted)

    def tokenised(self, row: Row, turn: dict[str, Any], ended: bool) -> list[int]:
        """The ids of a reply's text. A character that the limit cut in two is left out: no token is written
        as the sign that stands for it."""
        turn |= {
            "role": "assistant",
            "reasoning_content": turn.get("reasoning_content") or turn.get("reasoning"),
        }
        if turn.get("tool_calls"):
            turn = message(turn)
        else:
            content = text(turn.get("content"))
            turn["content"] = content if ended else content.rstrip("\ufffd")
        return self.template.reply(prompt_of(row["messages"]), row.get("tools"), turn, ended)


async def post(server: Server, body: dict[str, Any], client: httpx.AsyncClient) -> httpx.Response:
    try:
        return await client.post(f"{server.root}/v1/chat/completions", json=body)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise Unavailable(f"{type(error).__name__} {error}".strip()) from error
    except httpx.RequestError as error:
        raise Unavailable(f"{type(error).__name__} {error}".strip(), blame=True) from error


def root_of(base: str) -> str:
    """Where a server begins; its base URL may end with /v1 or not."""
    return base.rstrip("/").removesuffix("/v1")


def key_header() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    if key and not key.isascii():
        raise ConfigError("OPENAI_API_KEY has characters that no HTTP header can carry: set it anew.")
    return {"Authorization": f"Bearer {key}"} if key else {}


def question(row: Row) -> dict[str, Any]:
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
    return float(value) if value.isdecimal() else 0.0


# --- many servers, many requests -----------------------------------------------


class Waiting:
    """Rows to be asked: those that came back first, then the rest, which are taken as they are needed."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.fresh, self.back = iter(rows), deque[Row]()

    def __bool__(self) -> bool:
        if not self.back and (row := next(self.fresh, None)) is not None:
            self.back.append(row)
        return bool(self.back)

    def take(self) -> Row:
        return self.back.popleft()  # after bool() said that there is one


class Fleet:
    """The servers of a configuration; `say` tells the user which of them went away and came back."""

    def __init__(
        self,
        cfg: RegenerateConfig,
        template: Template,
        seed: int,
        say: Callable[[str], None],
        longest_wait: float = 30.0,
    ) -> None:
        self.servers = [Server(root_of(url)) for url in urls_of(cfg)]
        self.questions = Questions(cfg, template, seed)
        self.cfg, self.say, self.longest_wait = cfg, say, longest_wait
        self.tries: Counter[str] = Counter()  # of rows that may be at fault, by id
        self.answered, self.heard = False, 0.0

    def answer(self, rows: Iterable[Row], told: Callable[[Row, Reply | Refused], None]) -> None:
        """Calls `told` once for each row, in the order in which answers come.

        Raises `TrafficError` when a server turns every row down, or when none has answered for
        `regenerate.patience` seconds. What is under way is then given up; nothing is told of it.
        """
        asyncio.run(self.run(Waiting(rows), told))

    async def run(self, waiting: Waiting, told: Callable[[Row, Reply | Refused], None]) -> None:
        running: dict[asyncio.Task[Reply], tuple[Server, Row]] = {}
        self.heard = monotonic()
        timeout = httpx.Timeout(self.cfg.timeout, connect=10.0, pool=None)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(headers=key_header(), timeout=timeout, limits=limits) as client:
            try:
                while True:
                    self.send(waiting, running, client)
                    if not running and not waiting:
                        return
                    for task in await self.ended(running, bool(waiting)):
                        self.settle(task, *running.pop(task), waiting, told)
                    if not running:
                        self.check_patience()
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    def send(
        self,
        waiting: Waiting,
        running: dict[asyncio.Task[Reply], tuple[Server, Row]],
        client: httpx.AsyncClient,
    ) -> None:
        """Gives rows to the servers while one has room, to that with the most first."""
        now, most = monotonic(), self.cfg.concurrency
        while (
            waiting and (server := max(self.servers, key=lambda one: one.room(now, most))).room(now, most) > 0
        ):
            row = waiting.take()
            server.under_way += 1
            running[asyncio.create_task(self.questions.ask(server, row, client))] = server, row

    async def ended(self, running: Iterable[asyncio.Task[Reply]], more: bool) -> set[asyncio.Task[Reply]]:
        """Waits until a request ends, or, where rows wait, until a server has rested."""
        now = monotonic()
        rests = [server.rests_until - now for server in self.servers if server.rests_until > now]
        wait = min(rests) if more and rests else None
        if tasks := set(running):
            return (await asyncio.wait(tasks, timeout=wait, return_when=asyncio.FIRST_COMPLETED))[0]
        await asyncio.sleep(wait or 0)
        return set()

    def settle(
        self,
        task: asyncio.Task[Reply],
        server: Server,
        row: Row,
        waiting: Waiting,
        told: Callable[[Row, Reply | Refused], None],
    ) -> None:
        """What comes of a request that has ended: the row is told of, or goes back."""
        server.under_way -= 1
        try:
            result = task.result()
        except Refused as refused:
            result = refused
        except Unavailable as error:
            self.note_failure(server, error)
            self.tries[row["id"]] += error.blame
            if self.tries[row["id"]] < ATTEMPTS:
                waiting.back.append(row)
                return
            told(row, Refused(f"{error} ({ATTEMPTS} attempts)"))
            return
        if server.failures > 1:
            self.say(f"{server.root} answers again")
        server.failures = 0
        self.answered, self.heard = True, monotonic()
        told(row, result)

    def note_failure(self, server: Server, error: Unavailable) -> None:
        before = server.failures
        server.failed(error, monotonic(), self.longest_wait)
        if before < 2 <= server.failures:
            self.say(f"{server.root}: {error}; asked again from time to time")

    def check_patience(self) -> None:
        patience = self.cfg.patience if self.answered else min(self.cfg.patience, FIRST_PATIENCE)
        if all(server.failures for server in self.servers) and monotonic() - self.heard > patience:
            reasons = "; ".join(f"{server.root}: {server.last_failure}" for server in self.servers)
            raise TrafficError(
                f"No server did answer for {patience:g} s ({reasons}). What was answered is kept: see that "
                "the servers run (regenerate.server, regenerate.servers, regenerate.concurrency) and run the "
                "same command again."
            )


def urls_of(cfg: RegenerateConfig) -> list[str]:
    """The servers' base URLs; none: the target answers in process."""
    urls = [*([cfg.server] if cfg.server else []), *cfg.servers]
    for url in urls:
        try:
            httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"regenerate.server={url!r} is not a URL: {error}. Correct it.") from None
    return urls


# --- for requests that go one by one (eval/endpoint.py) ------------------------


def patience(attempts: int, longest_wait: float) -> dict[str, Any]:
    """How what is `Unavailable` is asked for again, as arguments of tenacity's AsyncRetrying: after 0.5 s,
    then twice as long each time, or as long as the server asks for; never longer than `longest_wait`
    seconds."""
    backoff = wait_exponential_jitter(
        initial=min(FIRST_WAIT, longest_wait), max=longest_wait, jitter=min(1.0, longest_wait)
    )
    return {
        "retry": retry_if_exception_type(Unavailable),
        "stop": stop_after_attempt(attempts),
        "wait": lambda state: max(backoff(state), min(asked_wait(state), longest_wait)),
        "reraise": True,
    }


def asked_wait(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    return error.after if isinstance(error, Unavailable) else 0.0
