"""The same requests to two servers, in turn: what is sent, in which order, and the sending (`eval.ab`).

A block of prompts goes to one side, then to the other, so that each has the load to itself and drift of the
machine falls on both alike. Every pair of blocks is on the disk before the next begins.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from configs.errors import TrafficError
from configs.schema import Config
from data.server import NEVER, question
from data.tokens import Prompt, split_rows
from eval.bench import seed_of
from eval.endpoint import (
    NO_CONNECTION,
    Answer,
    Drafting,
    Endpoint,
    closed_loop,
    http_client,
    open_loop,
    poisson,
)
from eval.terminal import bar
from models.files import append_line, lines_under, read_lines

SIDES = ("a", "b")

Line = dict[str, Any]  # of the partial file: a pair of blocks


@dataclass(frozen=True)
class Load:
    """A closed loop with `concurrency` requests under way, or an open one of `rate` a second."""

    concurrency: int | None
    rate: float | None
    block: int  # prompts that go to one side before the other gets them

    @property
    def name(self) -> str:
        if self.rate is not None:
            return f"open loop, {self.rate:g} requests/s"
        return f"closed loop, {self.concurrency} at a time"


@dataclass(frozen=True)
class Block:
    load: int  # its number
    order: tuple[str, str]  # of the sides
    prompts: list[str]  # ids
    bodies: list[dict[str, Any]]  # of the requests, without the model's name
    concurrency: int | None
    arrivals: list[float] | None  # of an open loop: seconds since the block began


class Bodies:
    """The requests, by `decode`'s sampling parameters; those beyond OpenAI's own only where they are on."""

    def __init__(self, config: Config) -> None:
        decode = config.decode
        extra = {
            "top_k": (decode.top_k, 0),
            "min_p": (decode.min_p, 0.0),
            "repetition_penalty": (decode.repetition_penalty, 1.0),
            "stop": (list(decode.stop), []),
        }
        self.seed = config.seed
        self.rows = {row["id"]: row for row in split_rows(config, "heldout")}
        self.shared = {
            "max_tokens": decode.max_new_tokens,
            "temperature": decode.temperature,
            "top_p": decode.top_p,
            **{name: value for name, (value, off) in extra.items() if value != off},
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def of(self, prompt: Prompt, repeat: int) -> dict[str, Any]:
        seed = seed_of(self.seed, repeat, prompt)
        return {**question(self.rows[prompt.id]), "seed": seed, **self.shared}


def loads(config: Config) -> list[Load]:
    """Those asked for. Where requests go one by one, the sides can change with each prompt; a load of several
    has to build up first: blocks of 4 times the concurrency, and of 32 in an open loop."""
    asked, made = config.ab, []
    if asked.concurrency is not None:
        least = 1 if asked.concurrency == 1 else 4 * asked.concurrency
        made.append(Load(asked.concurrency, None, asked.block or least))
    if asked.rate is not None:
        made.append(Load(None, asked.rate, asked.block or 32))
    return made


def plan(config: Config, chosen: Sequence[Prompt], bodies: Bodies) -> Iterator[Block]:
    """All blocks in the order they are sent in."""
    chance = np.random.default_rng(config.seed)
    for which, load in enumerate(loads(config)):
        order = SIDES
        for place, (repeat, members) in enumerate(
            (repeat, chosen[start : start + load.block])
            for repeat in range(config.eval.repeats)
            for start in range(0, len(chosen), load.block)
        ):
            swapped = bool(place % 2) or chance.random() < 0.5
            order = (order[1], order[0]) if swapped else order
            arrivals = None
            if load.rate is not None:
                arrivals = poisson(len(members), load.rate, int(chance.integers(2**32)))
            yield Block(
                load=which,
                order=order,
                prompts=[prompt.id for prompt in members],
                bodies=[bodies.of(prompt, repeat) for prompt in members],
                concurrency=load.concurrency,
                arrivals=arrivals,
            )


# ---- sending it ----


async def replayed(
    config: Config,
    blocks: Sequence[Block],
    warm_up: Sequence[dict[str, Any]],
    where: dict[str, Any],
    path: Path,
    console: Console,
) -> tuple[dict[str, Any], list[Line]]:
    """(what the servers are, a line for each pair of blocks, an interrupted run's included)."""
    asked = config.ab
    async with http_client(asked.timeout) as client:
        endpoints = {
            side: Endpoint(base, client, asked.attempts)
            for side, base in (("a", asked.a), ("b", asked.b))
            if base is not None
        }
        servers = {side: await one.served(side, asked.model) for side, one in endpoints.items()}
        done = len(lines_under(path, {"key": run_key(config, blocks, where, servers)}))
        if done:
            console.print(f"Going on after {done} pairs of blocks of an interrupted run.")
        if not console.is_terminal:
            console.print(f"{sum(2 * len(block.prompts) for block in blocks[done:])} requests to send.")
        if done < len(blocks):
            for side, endpoint in endpoints.items():
                await warmed_up(endpoint, side, servers[side]["model"], warm_up)
        with bar(console) as progress:
            sizes = [2 * len(block.prompts) for block in blocks]
            task = progress.add_task("replaying", total=sum(sizes), completed=sum(sizes[:done]))
            for block in blocks[done:]:
                line: Line = {"load": block.load, "first": block.order[0], "prompts": block.prompts}
                for side in block.order:
                    tick = partial(progress.advance, task)
                    line[side] = await sent(block, endpoints[side], servers[side]["model"], tick)
                    await check_there(endpoints[side], side, line[side]["answers"])
                append_line(path, line)
    return servers, read_lines(path)[1:]


async def sent(block: Block, endpoint: Endpoint, model: str, tick: Callable[[], None]) -> dict[str, Any]:
    """One block to one side: answers, wall seconds, our own share of a processor, acceptance."""

    async def ask(i: int, due: float | None) -> Answer:
        answer = await endpoint.answer({"model": model, **block.bodies[i]}, due)
        tick()
        return answer

    before = await endpoint.drafting()
    wall, processor = time.perf_counter(), time.process_time()
    if block.arrivals is None:
        assert block.concurrency is not None
        answers = await closed_loop(ask, len(block.bodies), block.concurrency)
    else:
        answers = await open_loop(ask, block.arrivals)
    seconds, used = time.perf_counter() - wall, time.process_time() - processor
    after = await endpoint.drafting()
    counted = after.since(before) if isinstance(before, Drafting) and isinstance(after, Drafting) else None
    return {
        "seconds": seconds,
        "client_share": used / seconds,
        "drafting": None if counted is None else asdict(counted),
        "acceptance_length": after if isinstance(after, float) else None,
        "answers": [asdict(answer) for answer in answers],
    }


async def warmed_up(endpoint: Endpoint, side: str, model: str, bodies: Sequence[dict[str, Any]]) -> None:
    """Requests whose times are thrown away. Refuses here what would refuse every request."""
    for body in bodies:
        answer = await endpoint.answer({"model": model, **body})
        if answer.error == NO_CONNECTION or answer.error in {f"HTTP {status}" for status in NEVER}:
            raise TrafficError(
                f"ab.{side}={endpoint.root} answers the model {model!r} with {answer.error}: {answer.said} "
                "Check ab.a and ab.b, ab.model (a name that both serve) and, where the server wants one, the "
                "key in OPENAI_API_KEY."
            )


async def check_there(endpoint: Endpoint, side: str, answers: Sequence[dict[str, Any]]) -> None:
    """A server that is gone would turn the rest of the run into failures."""
    if all(answer["error"] == NO_CONNECTION for answer in answers) and not await endpoint.there():
        raise TrafficError(
            f"ab.{side}={endpoint.root} stopped answering: the last {len(answers)} requests found no "
            "connection. What was measured before is kept: look why, start the server, and run the same "
            "command again."
        )


def run_key(config: Config, blocks: Sequence[Block], where: dict[str, Any], servers: dict[str, Any]) -> str:
    """Everything that the lines depend on; those under another key are not mixed in."""
    parts = {
        "blocks": [asdict(block) for block in blocks],
        "client": [config.ab.attempts, config.ab.timeout],
        "servers": servers,
        "place": [where["git"], where["hardware"], where["versions"]],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
