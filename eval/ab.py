"""`python -m eval.ab`: which of two servers answers this traffic faster, and do they say the same?

The held-out prompts go to two OpenAI-compatible endpoints as streamed chat completions, the same requests to
both. `ab.concurrency` keeps so many under way (closed loop); `ab.rate` sends them as they would come, by a
Poisson process, whatever the server does (open loop). A block of prompts goes to one side, then to the
other, so that each has the load to itself and drift of the machine falls on both alike: which goes first is
drawn for every other pair of blocks, and the next pair has the opposite order.

Every pair of blocks is on the disk before the next begins; the same command goes on after the last one.
Requests that fail are counted by kind. `docs/measuring.md` defines the figures of ab.json.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from configs.compose import as_plain
from configs.entry import entry
from configs.errors import ConfigError, TrafficError
from configs.schema import Config
from data.server import NEVER, question
from data.tokens import Prompt, evenly, prompts, split_rows
from decoding.acceptance import bootstrap
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
from eval.measure import check_heldout
from eval.report import number, percent, times
from eval.rows import PERCENTILES
from eval.terminal import bar, wide_console, with_interval
from models.files import append_line, ensure_writable, lines_under, read_lines, write_json
from models.provenance import provenance

SCHEMA = "leadout.ab/1"
PARTIAL = "ab.partial.jsonl"
SIDES = ("a", "b")
FAILED = 3  # exit status: so many requests failed that nothing is said of speed
FAILED_AT_MOST = 0.05  # share of failed requests above which speeds are not compared
CLIENT_SHARE = 0.5  # of one core; above it our own times may be what is measured
FEW_BLOCKS = 10  # pairs of blocks below which that is said
LATE = 0.02  # seconds that an open loop may fall behind before that is said

Line = dict[str, Any]  # of the partial file: a pair of blocks
Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]  # how often each prompt [n, prompts] -> [n]


@entry()
def main(config: Config) -> None:
    written = ab(config, wide_console())
    if any(max(failed_share(load).values()) > FAILED_AT_MOST for load in written["loads"]):
        sys.exit(FAILED)


def ab(config: Config, console: Console) -> dict[str, Any]:
    """Replays, writes ab.json, prints table and verdict; returns what was written.

    Raises `ConfigError` (no endpoints), `TrafficError` (no held-out prompts, some that were trained on, a
    server that is not there or goes away) and `StorageError`.
    """
    check_sides(config)
    asked = config.ab
    output = Path(asked.output) if asked.output else Path(config.runs) / config.experiment / "ab"
    ensure_writable(output)
    heldout = prompts(config, "heldout")
    check_heldout(config, heldout, prompts(config, "train"))
    chosen = evenly(heldout, config.eval.max_prompts)
    spare = [one for one in heldout if one not in chosen] or chosen  # not measured: prefix caches remember
    bodies = Bodies(config)
    blocks = list(plan(config, chosen, bodies))
    warm_up = [bodies.of(prompt, 0) for prompt in spare[: config.eval.warmup_prompts]]
    where = provenance()
    servers, lines = asyncio.run(replayed(config, blocks, warm_up, where, output / PARTIAL, console))
    written = {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": where["git"],
        "client": {name: where[name] for name in ("hardware", "versions")},
        "servers": servers,
        "prompts": len(chosen),
        "repeats": config.eval.repeats,
        "config": as_plain(config),
        "loads": [
            compared(load, [line for line in lines if line["load"] == i], servers, config)
            for i, load in enumerate(loads(config))
        ],
    }
    keep_earlier(written, output / "ab.json", console)
    write_json(output / "ab.json", written)
    (output / PARTIAL).unlink()
    show(written, output / "ab.json", console)
    return written


def check_sides(config: Config) -> None:
    if config.ab.a is None or config.ab.b is None:
        raise ConfigError(
            "eval.ab compares two servers: name both, as in ab.a=http://localhost:8000/v1 "
            "ab.b=http://localhost:8001/v1. (The same one twice shows how large chance differences are.)"
        )
    for side, address in (("a", config.ab.a), ("b", config.ab.b)):
        try:
            urlsplit(address).port  # noqa: B018  a property that checks
        except ValueError as error:
            raise ConfigError(f"ab.{side}={address} is no address: {error}.") from None


# ---- what is sent ----


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


# ---- figures ----


@dataclass(frozen=True)
class Pair:
    """A request's answers from both sides, and the seconds of wall time that each is charged."""

    prompt: str
    answers: dict[str, Answer]
    charged: dict[str, float]

    @property
    def whole(self) -> bool:
        return all(answer.error is None for answer in self.answers.values())


def pairs_of(lines: Sequence[Line]) -> list[Pair]:
    return [pair for line in lines for pair in pairs_in(line)]


def pairs_in(line: Line) -> Iterator[Pair]:
    """A block's wall time is charged to its requests in proportion to how long each took, so that sums over
    requests give the block's throughput, and prompts can be drawn again."""
    answers = {side: [Answer(**one) for one in line[side]["answers"]] for side in SIDES}
    total = {side: sum(one.seconds for one in answers[side]) for side in SIDES}
    for i, prompt in enumerate(line["prompts"]):
        here = {side: answers[side][i] for side in SIDES}
        yield Pair(
            prompt,
            here,
            {side: line[side]["seconds"] * here[side].seconds / total[side] for side in SIDES},
        )


def ttft(answer: Answer) -> list[float]:
    return [] if answer.ttft is None else [1e3 * answer.ttft]


def itl(answer: Answer) -> list[float]:
    return (1e3 * np.diff(answer.emissions)).tolist()


def tpot(answer: Answer) -> list[float]:
    if answer.ttft is None or answer.tokens is None or answer.tokens < 2:
        return []
    return [1e3 * (answer.seconds - answer.ttft) / (answer.tokens - 1)]


def e2e(answer: Answer) -> list[float]:
    return [1e3 * answer.seconds]


LATENCIES = {"ttft_ms": ttft, "itl_ms": itl, "tpot_ms": tpot, "e2e_ms": e2e}


class Resampled:
    """Figures of both sides and their ratio B / A, with intervals: prompts are drawn again with replacement,
    both sides and all repeats of a prompt together (a paired cluster bootstrap)."""

    def __init__(self, pairs: Sequence[Pair], config: Config) -> None:
        self.pairs = pairs
        self.config = config
        names = {name: i for i, name in enumerate(dict.fromkeys(pair.prompt for pair in pairs))}
        self.prompts = len(names)
        self.owners = [names[pair.prompt] for pair in pairs]  # the prompt of each pair

    def sums(self, values: Sequence[tuple[float, ...]]) -> NDArray[np.float64]:
        """[prompts, k] from k values of each pair."""
        made = np.zeros((self.prompts, len(values[0])))
        np.add.at(made, self.owners, np.array(values, dtype=float))
        return made

    def quotient(self, side: str, of: Callable[[Answer], float], over: Callable[[Pair], float]) -> Statistic:
        """Σ of / Σ over."""
        sums = self.sums([(of(pair.answers[side]), over(pair)) for pair in self.pairs])
        return lambda drawn: (drawn @ sums)[:, 0] / (drawn @ sums)[:, 1]

    def events(self, side: str, of: Callable[[Answer], list[float]]) -> tuple[list[float], list[int]]:
        """The values of all answers, and the prompt of each."""
        found = [of(pair.answers[side]) for pair in self.pairs]
        owners = [owner for owner, few in zip(self.owners, found, strict=True) for _ in few]
        return [value for few in found for value in few], owners

    def value(self, statistic: Statistic) -> float | None:
        with np.errstate(divide="ignore", invalid="ignore"):
            found = float(statistic(np.ones((1, self.prompts)))[0])
        return found if np.isfinite(found) else None

    def interval(self, statistic: Statistic) -> list[float] | None:
        measured = self.config.eval
        ends = bootstrap(
            statistic, np.eye(self.prompts), measured.confidence, measured.bootstrap, self.config.seed
        )
        return None if ends is None else list(ends)

    def figure(self, statistics: dict[str, Statistic]) -> dict[str, Any]:
        a, b = (statistics[side] for side in SIDES)
        named = {"a": a, "b": b, "ratio": lambda drawn: b(drawn) / a(drawn)}
        values = {name: self.value(one) for name, one in named.items()}
        ends = {
            f"{name}_ci": None if values[name] is None else self.interval(one) for name, one in named.items()
        }
        return {**values, **ends, "reason": None}


def absent(reason: str) -> dict[str, Any]:
    return {**dict.fromkeys(("a", "b", "ratio", "a_ci", "b_ci", "ratio_ci")), "reason": reason}


def quantile(values: Sequence[float], owners: Sequence[int], q: float) -> Statistic:
    """That of the values when prompt i is there `drawn[i]` times: of each row of [n, prompts], as
    `np.quantile` has it."""
    order = np.argsort(values)
    ordered, owned = np.asarray(values)[order], np.asarray(owners)[order]

    def one(drawn: NDArray[np.float64]) -> float:
        until = np.cumsum(drawn[owned])  # how many values there are up to each
        if until[-1] == 0:
            return float("nan")
        place = q * (until[-1] - 1)
        low, high = ordered[np.searchsorted(until, [np.floor(place), np.ceil(place)], side="right")]
        return float(low + (high - low) * (place % 1))

    return lambda drawn: np.array([one(row) for row in drawn])


def latencies(pairs: Sequence[Pair], config: Config) -> dict[str, Any]:
    """Milliseconds at each percentile, over the requests that both sides answered."""
    sample = Resampled([pair for pair in pairs if pair.whole], config)
    made: dict[str, Any] = {}
    for name, of in LATENCIES.items():
        events = {side: sample.events(side, of) for side in SIDES}
        count = min(len(values) for values, _ in events.values())
        made[name] = {
            label: sample.figure({side: quantile(*events[side], q) for side in SIDES})
            if count >= least
            else absent(f"{label} takes {least} values, and there are {count}")
            for label, (q, least) in PERCENTILES.items()
        }
    return made


def throughput(pairs: Sequence[Pair], config: Config) -> dict[str, Any]:
    """Tokens and whole replies per second of wall time, over all requests: failed ones cost time too."""
    sample = Resampled(pairs, config)
    unknown = {side: unmetered(pairs, side) for side in SIDES}

    def rate(side: str, of: Callable[[Answer], float]) -> Statistic:
        return sample.quotient(side, of, lambda pair: pair.charged[side])

    requests = sample.figure({side: rate(side, lambda answer: float(answer.error is None)) for side in SIDES})
    if any(unknown.values()):
        tokens = absent(f"replies without usage: {unknown['a']} of A's, {unknown['b']} of B's")
    else:
        tokens = sample.figure({side: rate(side, lambda answer: float(answer.tokens or 0)) for side in SIDES})
    return {"tokens_per_s": tokens, "requests_per_s": requests}


def speedup(pairs: Sequence[Pair], config: Config) -> dict[str, Any]:
    """Seconds per token of A over those of B, over the requests that both answered; above 1, B is faster."""
    whole = [pair for pair in pairs if pair.whole]
    if not whole or any(unmetered(whole, side) for side in SIDES):
        return {"speedup": None, "speedup_ci": None}
    sample = Resampled(whole, config)
    per_token = [
        sample.quotient(
            side,
            lambda answer: answer.seconds,
            lambda pair, side=side: float(pair.answers[side].tokens or 0),
        )
        for side in SIDES
    ]

    def ratio(drawn: NDArray[np.float64]) -> NDArray[np.float64]:
        return per_token[0](drawn) / per_token[1](drawn)

    value = sample.value(ratio)
    return {"speedup": value, "speedup_ci": None if value is None else sample.interval(ratio)}


def unmetered(pairs: Sequence[Pair], side: str) -> int:
    """Whole replies whose tokens the server did not tell."""
    answers = [pair.answers[side] for pair in pairs]
    return sum(answer.error is None and answer.tokens is None for answer in answers)


def agreement(pairs: Sequence[Pair], temperature: float) -> dict[str, Any]:
    """Share of greedy replies, whole on both sides, with the same text and the same end."""
    whole = [pair for pair in pairs if pair.whole] if temperature == 0 else []
    same = sum(parting(pair) is None for pair in whole)
    return {
        "identical_outputs": same / len(whole) if whole else None,
        "identical_count": same if whole else None,
        "compared_count": len(whole) if whole else None,
    }


def parting(pair: Pair) -> int | None:
    """The character at which the two texts part; None: nowhere, and both ended for the same reason."""
    a, b = (pair.answers[side] for side in SIDES)
    if (a.text, a.finish) == (b.text, b.finish):
        return None
    both = enumerate(zip(a.text, b.text, strict=False))
    return next((i for i, (x, y) in both if x != y), min(len(a.text), len(b.text)))


def counts(pairs: Sequence[Pair], side: str) -> dict[str, Any]:
    answers = [pair.answers[side] for pair in pairs]
    return {
        "requests": len(answers),
        "answered": sum(answer.error is None for answer in answers),
        "errors": dict(Counter(answer.error for answer in answers if answer.error is not None)),
        "retried": dict(Counter(kind for answer in answers for kind in answer.retried)),
        "without_usage": unmetered(pairs, side),
        "finish": dict(Counter(str(answer.finish) for answer in answers if answer.error is None)),
        "tokens": sum(answer.tokens or 0 for answer in answers),
    }


def acceptance(lines: Sequence[Line], side: str) -> dict[str, Any] | None:
    """From vLLM's counters, over these requests; from SGLang's mean, since its server started; else None."""
    counted = [line[side]["drafting"] for line in lines]
    if counted and all(one is not None for one in counted):
        drafts, drafted, accepted = (
            sum(one[name] for one in counted) for name in ("drafts", "drafted", "accepted")
        )
        longest = max(len(one["by_position"]) for one in counted)
        by_position = [
            sum(one["by_position"][j] for one in counted if j < len(one["by_position"]))
            for j in range(longest)
        ]
        if drafts == 0 or any(one["drafts"] < 0 for one in counted):  # negative: the server began anew
            return None
        return {
            "source": "vLLM's counters, over these requests",
            "drafts": drafts,
            "mean_acceptance_length": 1 + accepted / drafts,
            "acceptance_rate": accepted / drafted if drafted else None,
            "acceptance_by_position": [one / drafts for one in by_position] or None,
        }
    lengths = [
        line[side]["acceptance_length"] for line in lines if line[side]["acceptance_length"] is not None
    ]
    if not lengths:
        return None
    return {
        "source": "SGLang's mean since its server started, or of its last interval",
        "drafts": None,
        "mean_acceptance_length": lengths[-1],
        "acceptance_rate": None,
        "acceptance_by_position": None,
    }


def compared(load: Load, lines: Sequence[Line], servers: dict[str, Any], config: Config) -> dict[str, Any]:
    """Everything that ab.json says of one load."""
    pairs = pairs_of(lines)
    sides = {
        side: {
            **counts(pairs, side),
            "seconds": sum(line[side]["seconds"] for line in lines),
            "client_share": max(line[side]["client_share"] for line in lines),
            "acceptance": acceptance(lines, side),
        }
        for side in SIDES
    }
    late = max(answer.sent for pair in pairs for answer in pair.answers.values())
    made = {
        "name": load.name,
        **asdict(load),
        "confidence": config.eval.confidence,
        "sides": sides,
        "block_pairs": len(lines),
        "whole_pairs": sum(pair.whole for pair in pairs),
        **speedup(pairs, config),
        **throughput(pairs, config),
        **latencies(pairs, config),
        **agreement(pairs, config.decode.temperature),
        "late_ms": 1e3 * late,
    }
    return {
        **made,
        "verdict": verdict(made),
        "notes": list(notes(made, servers, config.decode.temperature)),
        "details": [detail(pair, config.decode.temperature) for pair in pairs],
    }


def detail(pair: Pair, temperature: float) -> dict[str, Any]:
    kept: dict[str, Any] = {
        "prompt": pair.prompt,
        "parts_at": parting(pair) if pair.whole and temperature == 0 else None,
    }
    for side in SIDES:
        answer = pair.answers[side]
        names = ("seconds", "ttft", "tokens", "finish", "error", "said", "retried")
        kept[side] = {name: getattr(answer, name) for name in names}
    return kept


# ---- telling ----


def failures(side: dict[str, Any]) -> str:
    """ "3 of 48 (HTTP 500: 2, broken stream: 1)", or "0 of 48"."""
    errors = side["errors"]
    kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(errors.items()))
    return f"{sum(errors.values())} of {side['requests']}" + (f" ({kinds})" if kinds else "")


def failed_share(load: dict[str, Any]) -> dict[str, float]:
    """Of each side's requests."""
    sides = load["sides"]
    return {side: sum(sides[side]["errors"].values()) / sides[side]["requests"] for side in SIDES}


def verdict(load: dict[str, Any]) -> str:
    """One sentence: which side is faster, by what its interval says; and how many requests failed."""
    value, ends, sides = load["speedup"], load["speedup_ci"], load["sides"]
    failed = failed_share(load)
    told = ", ".join(f"{side.upper()}: {failures(sides[side])}" for side in SIDES if failed[side])
    clause = f"; failed requests, {told}" if told else ""
    start = load["name"][0].upper() + load["name"][1:]
    if max(failed.values()) > FAILED_AT_MOST:
        return f"{start}: cannot tell, too many requests failed ({told})."
    if value is None:
        return f"{start}: cannot tell, the tokens of some replies are not known{clause}."
    if ends is None:
        return f"{start}: cannot tell, too few prompts for an interval{clause}."
    made = f"B makes {with_interval(value, ends, times)} A's tokens per second of waiting{clause}."
    if ends[0] > 1:
        return f"{start}: B is faster, {made}"
    if ends[1] < 1:
        return f"{start}: B is slower, {made}"
    return f"{start}: no difference is shown, {made}"


def notes(load: dict[str, Any], servers: dict[str, Any], temperature: float) -> Iterator[str]:
    """What one has to know to read the figures."""
    sides = load["sides"]
    requests = sides["a"]["requests"]
    if load["whole_pairs"] < requests:
        yield (
            f"Latencies and speedup rest on the {load['whole_pairs']} of {requests} requests that both sides "
            "answered."
        )
    for side in SIDES:
        if sides[side]["retried"]:
            kinds = ", ".join(f"{kind}: {count}" for kind, count in sides[side]["retried"].items())
            yield f"{side.upper()} was asked again after failures ({kinds}); its times include the waits."
        if sides[side]["without_usage"]:
            yield f"{side.upper()} sent no usage with {sides[side]['without_usage']} replies."
    if servers["a"]["model"] != servers["b"]["model"]:
        yield f"The models have different names: {servers['a']['model']} and {servers['b']['model']}."
    if temperature > 0:
        yield "Replies are not compared at temperature > 0: both follow a law, by different draws."
    if load["block"] > 1 and load["block_pairs"] < FEW_BLOCKS:
        yield (
            f"Each side had {load['block_pairs']} blocks. Noise that lasts as long as a block is not in the "
            "intervals, so they are too narrow: raise eval.max_prompts or eval.repeats, or lower ab.block."
        )
    if load["rate"] is not None and load["late_ms"] > 1e3 * LATE:
        yield f"This client sent requests up to {load['late_ms']:.0f} ms late; their times include that."
    share = max(sides[side]["client_share"] for side in SIDES)
    if share > CLIENT_SHARE:
        yield (
            f"This client used {share:.0%} of a core: it may be what is measured. Use a lower load, or a "
            "faster machine."
        )


def keep_earlier(written: dict[str, Any], path: Path, console: Console) -> None:
    """Renames a comparison of another configuration, after the time it was made at."""
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        same, created = earlier["config"] == written["config"], earlier["created"]
    except (OSError, ValueError, KeyError):  # none, or nothing worth keeping
        return
    if not same:
        aside = path.with_stem(f"{path.stem}-{created.replace(':', '')[:17]}")
        path.replace(aside)
        console.print(f"The comparison of another configuration is {aside} now.", markup=False)


def show(written: dict[str, Any], path: Path, console: Console) -> None:
    servers = written["servers"]
    for side in SIDES:
        one = servers[side]
        engine = " ".join(part for part in (one["engine"], one["version"]) if part)
        console.print(f"{side.upper()}: {one['model']} at {one['url']} {engine}".rstrip(), markup=False)
    for load in written["loads"]:
        console.print(table(load, written["prompts"], written["repeats"]))
        for note in load["notes"]:
            console.print(f"  {note}", style="dim", markup=False)
        console.print(load["verdict"], style="bold", markup=False)
    console.print(str(path), markup=False, highlight=False, soft_wrap=True)


def table(load: dict[str, Any], prompts: int, repeats: int) -> Table:
    again = f", {repeats} times" if repeats > 1 else ""
    made = Table(title=f"{load['name']}: {prompts} held-out prompts{again}", title_justify="left")
    for name in ("", "A", "B", f"B / A [{load['confidence']:.0%}]"):
        made.add_column(name, justify="right" if name else "left")
    for name in LATENCIES:
        for label in PERCENTILES:
            made.add_row(f"{name.removesuffix('_ms').upper()} {label}, ms", *cells(load[name][label], 1))
    made.add_row("output tokens/s", *cells(load["tokens_per_s"], 1))
    made.add_row("requests/s", *cells(load["requests_per_s"], 2))
    sides = [load["sides"][side] for side in SIDES]
    drafted = [side["acceptance"] or {"mean_acceptance_length": None} for side in sides]
    made.add_row("τ, by the server", *(number(one["mean_acceptance_length"]) for one in drafted))
    made.add_row("failed", *(failures(side) for side in sides))
    if load["compared_count"]:
        told = f"{percent(load['identical_outputs'], 0)} of {load['compared_count']}"
        made.add_row("identical replies", "", "", told)
    return made


def cells(figure: dict[str, Any], digits: int) -> tuple[str, str, str]:
    if figure["reason"] is not None:
        return number(None), number(None), ""
    told = with_interval(figure["ratio"], figure["ratio_ci"], times)
    return number(figure["a"], digits), number(figure["b"], digits), told


if __name__ == "__main__":
    main()
