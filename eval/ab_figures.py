"""The figures of two servers from the same requests: latencies, throughput, speedup, agreement, acceptance.

Each has an interval: prompts are drawn again with replacement, both sides and all repeats of a prompt
together. `docs/measuring.md` defines them; `eval.ab` writes and tells them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.schema import Config
from decoding.acceptance import bootstrap
from eval.endpoint import Answer
from eval.replay import SIDES, Line
from eval.rows import PERCENTILES

Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]  # how often each prompt [n, prompts] -> [n]


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
