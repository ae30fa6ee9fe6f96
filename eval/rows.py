"""From measured pairs of generations to the rows of `measure.json`. Pure: no model, no clock, no file.

A pair is one prompt at one temperature and batch size, decoded plainly and speculatively one after the other.
Rates are pooled (sums over sums, never means of ratios), as vLLM counts them; docs/measuring.md defines each
field. Intervals resample prompts, not rounds or tokens, because the rounds of one prompt resemble each other
(a paired cluster bootstrap); prompts that were decoded together are drawn together.

Absent is None: a quotient without a denominator, a percentile that too few values support, a comparison that
has no meaning at that temperature.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decoding.acceptance import (
    acceptance_by_position,
    acceptance_rate,
    bootstrap,
    conditional_acceptance,
    mean_acceptance_length,
)
from decoding.sequence import Round

Interval = list[float] | None

# Lengths in tokens, of prompts and of replies: (name, shortest, longest).
BUCKETS = (
    ("1-32", 1, 32),
    ("33-128", 33, 128),
    ("129-512", 129, 512),
    ("513-2048", 513, 2048),
    ("2049-8192", 2049, 8192),
    ("8193-32768", 8193, 32768),
    ("32769-131072", 32769, 131072),
    ("131073+", 131073, 2**62),
)
# (quantile, values that it takes): ten beyond the 99th, since it is quoted for the tail.
PERCENTILES = {"p50": (0.5, 1), "p90": (0.9, 10), "p99": (0.99, 1000)}


@dataclass(frozen=True)
class Run:
    """One generation. Times in seconds; `emitted_at` since its start, one entry for each time tokens came
    out."""

    tokens: list[int]
    finish: str
    seconds: float
    prefill_seconds: float
    emitted_at: list[float]
    rounds: list[Round]
    peak_memory_mb: float | None = None
    share: float | None = None  # seconds of its batch's time that fall to it; None: it ran alone, so all
    decode_share: float | None = None  # the same of what came after the prefill
    looped: bool = False  # ends in a loop (data.generate.loops), which any draft predicts

    def cost(self, prefill: bool = True) -> tuple[float, int]:
        """(seconds, tokens); without prefill, what came after the first token."""
        if prefill:
            return self.seconds if self.share is None else self.share, len(self.tokens)
        seconds = self.seconds - self.prefill_seconds if self.decode_share is None else self.decode_share
        return seconds, max(len(self.tokens) - 1, 0)


@dataclass(frozen=True)
class Divergence:
    """Where a speculative greedy output first leaves the plain one, and by how much the target preferred its
    first choice."""

    index: int  # in the reply
    gap: float  # difference of the target's two largest logits there
    plain: int | None  # the token there; None: this output had ended
    draft: int | None


@dataclass(frozen=True)
class Pair:
    """A prompt decoded both ways, at one temperature and batch size."""

    prompt: str
    category: str
    prompt_tokens: int
    temperature: float
    repeat: int
    first: str  # which of the two went first
    plain: Run
    draft: Run
    divergence: Divergence | None = None
    generate: dict[str, Any] | None = None  # see eval/measure.py: compared with transformers' generate
    batch_size: int = 1
    batch: int = 0  # which batch: its prompts were decoded together
    turn: int = 0  # of a conversation, from 0
    probe: bool = False  # no traffic (eval/recall.py): in no row but its category's

    @property
    def identical(self) -> bool:
        return self.plain.tokens == self.draft.tokens

    @property
    def looped(self) -> bool:
        return self.plain.looped or self.draft.looped

    @property
    def cluster(self) -> str:
        """What is drawn together when prompts are drawn again: prompts of one batch share its time, turns
        and repeats their prompt."""
        return self.prompt if self.batch_size == 1 else f"batch {self.batch}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Pair:
        runs = {
            side: Run(**{**values[side], "rounds": [Round(**round) for round in values[side]["rounds"]]})
            for side in ("plain", "draft")
        }
        divergence = Divergence(**values["divergence"]) if values["divergence"] else None
        return cls(**{**values, **runs, "divergence": divergence})


@dataclass(frozen=True)
class Conditions:
    """What holds for every row of one measurement."""

    method: str  # of the draft
    dtype: str
    draft_tokens: int
    proposal: str
    top_k: int
    top_p: float
    confidence: float
    resamples: int
    seed: int
    drafters: tuple[str, ...] = ("draft",)
    tree: str = "chain"
    tree_nodes: int | None = None  # at most drafted for a tree, its root left out; None: as the chain goes
    tree_width: int | None = None
    tree_file: str | None = None
    stop_drafting: str | None = "fixed"  # None: a tree, which stops by its shape
    verification: str = "rejection"
    lossless: bool = True
    compiled: bool = False  # both ways' forwards over trees

    def drafting(self, drafted: bool) -> dict[str, Any]:
        """What a row says of how its tokens were drafted and judged; a plain one's were not."""
        said = {
            "draft_tokens": self.draft_tokens,
            "proposal": self.proposal,
            "drafters": list(self.drafters),
            "tree": self.tree,
            "tree_nodes": self.tree_nodes,
            "tree_width": self.tree_width,
            "tree_file": self.tree_file,
            "stop_drafting": self.stop_drafting,
            "verification": self.verification,
        }
        return said if drafted else {**dict.fromkeys(said), "draft_tokens": 0}


def settings(pairs: Sequence[Pair]) -> list[tuple[float, int, list[Pair]]]:
    """(temperature, batch size, its pairs), ascending."""
    known = sorted({(pair.temperature, pair.batch_size) for pair in pairs})
    return [
        (temperature, size, [p for p in pairs if (p.temperature, p.batch_size) == (temperature, size)])
        for temperature, size in known
    ]


def rows(pairs: Sequence[Pair], conditions: Conditions) -> list[dict[str, Any]]:
    """For each temperature, batch size and both methods: all prompts, each category, and each bucket of
    prompt lengths in use."""
    made = []
    for _, _, here in settings(pairs):
        traffic = [pair for pair in here if not pair.probe]
        groups = [("all", "all", traffic)]
        groups += [
            (name, "all", [pair for pair in here if pair.category == name])
            for name in sorted({pair.category for pair in here})
        ]
        groups += [
            ("all", name, inside) for name, inside in bucketed(traffic, lambda pair: pair.prompt_tokens)
        ]
        for category, bucket, members in groups:
            made.append(row(members, False, category, bucket, conditions))
            made.append(row(members, True, category, bucket, conditions))
    return made


def rows_by_reply(pairs: Sequence[Pair], conditions: Conditions) -> list[dict[str, Any]]:
    """The same rows by what came out, which `reply` names: the tokens of the plain reply, and, where replies
    end in a loop, those and the others."""
    made = []
    for _, _, here in settings(pairs):
        groups = bucketed(here, lambda pair: len(pair.plain.tokens))
        if any(pair.looped for pair in here):
            for name, wanted in (("looped", True), ("not looped", False)):
                groups.append((name, [pair for pair in here if pair.looped is wanted]))
        for name, members in groups:
            for drafted in (False, True) if members else ():
                made.append({"reply": name, **row(members, drafted, "all", "all", conditions)})
    return made


def bucketed(pairs: Sequence[Pair], length: Callable[[Pair], int]) -> list[tuple[str, list[Pair]]]:
    found = [(name, [p for p in pairs if low <= length(p) <= high]) for name, low, high in BUCKETS]
    return [(name, inside) for name, inside in found if inside]


def row(
    pairs: Sequence[Pair], drafted: bool, category: str, bucket: str, conditions: Conditions
) -> dict[str, Any]:
    """One row over `pairs`, of the speculative runs if `drafted`, else of the plain ones."""
    runs = [pair.draft if drafted else pair.plain for pair in pairs]
    temperature = pairs[0].temperature
    notes: list[str] = []
    return {
        "method": conditions.method if drafted else "plain",
        "lossless": conditions.lossless if drafted else True,
        "dtype": conditions.dtype,
        "compiled": conditions.compiled,
        "temperature": temperature,
        "top_k": conditions.top_k,
        "top_p": conditions.top_p,
        **conditions.drafting(drafted),
        "batch_size": pairs[0].batch_size,
        "context_bucket": bucket,
        "category": category,
        "prompts": len({pair.prompt for pair in pairs}),
        "pairs": len(pairs),
        "clusters": len({pair.cluster for pair in pairs}),
        "looped": sum(run.looped for run in runs),
        "confidence": conditions.confidence,
        **acceptance(pairs, runs, conditions),
        **drafts(runs, drafted),
        **speed(pairs, runs, drafted, conditions, notes),
        "per_request": per_request(pairs, runs, drafted),
        **latency(runs),
        "peak_memory_mb": max(
            (run.peak_memory_mb for run in runs if run.peak_memory_mb is not None), default=None
        ),
        **agreement(pairs, drafted, temperature, notes),
        "notes": notes,
    }


def acceptance(pairs: Sequence[Pair], runs: Sequence[Run], conditions: Conditions) -> dict[str, Any]:
    """How many drafted tokens the target took: counts pooled over the rounds (`decoding.acceptance`)."""
    rounds = [round for run in runs for round in run.rounds]
    counts = [(sum(r.accepted for r in run.rounds), len(run.rounds)) for run in runs]
    sums = clustered(pairs, counts)
    ends = interval(lambda s: 1 + s[..., 0] / s[..., 1], sums, conditions)
    return {
        "rounds": len(rounds),
        "new_tokens": sum(len(run.tokens) for run in runs),
        "mean_acceptance_length": mean_acceptance_length(rounds),
        "mean_acceptance_length_ci": ends,
        "acceptance_rate": acceptance_rate(rounds),
        "acceptance_by_position": acceptance_by_position(rounds) or None,
        "conditional_acceptance": conditional_acceptance(rounds) or None,
    }


def drafts(runs: Sequence[Run], drafted: bool) -> dict[str, Any]:
    """What the rounds drafted, and how much of it in vain; None on plain rows."""
    if not drafted:
        return dict.fromkeys(("draft_lengths", "wasted_drafts", "wasted_rounds", "draft_ms"))
    rounds = [round for run in runs for round in run.rounds]
    tried = [round for round in rounds if round.drafted]
    return {
        "draft_lengths": draft_lengths(rounds) or None,
        "wasted_drafts": sum(r.drafted - r.accepted for r in tried) if tried else None,
        "wasted_rounds": sum(not r.accepted for r in tried) / len(tried) if tried else None,
        "draft_ms": percentiles([r.draft_seconds for r in rounds]),
    }


def draft_lengths(rounds: Sequence[Round]) -> dict[str, list[int]]:
    """For each number of drafted tokens that occurred, the rounds that accepted 0, 1, 2, ... of them: a row's
    sum is how often that many were drafted (vLLM's acceptance histogram by draft length)."""
    counts = Counter((r.drafted, r.accepted) for r in rounds)
    most = {drafted: max(a for d, a in counts if d == drafted) for drafted in sorted({d for d, _ in counts})}
    return {str(d): [counts[d, accepted] for accepted in range(top + 1)] for d, top in most.items()}


def speed(
    pairs: Sequence[Pair], runs: Sequence[Run], drafted: bool, conditions: Conditions, notes: list[str]
) -> dict[str, Any]:
    """Tokens per second of the whole batch, and how many times faster than plain decoding of the same prompts
    at the same batch size (None on plain rows).

    With outputs of one length for every pair the speedup is the quotient of wall times; otherwise of seconds
    per token, since a shorter answer is no speed. The two agree where the lengths do.
    """
    costs = [run.cost() for run in runs]
    seconds, tokens = sum(spent for spent, _ in costs), sum(count for _, count in costs)
    rounds = [round for run in runs for round in run.rounds]
    speeds: dict[str, Any] = {
        "tokens_per_s": tokens / seconds if tokens and seconds > 0 else None,
        # Little's law: seconds that sequences were in flight, per second.
        "sequences_in_flight": sum(run.seconds for run in runs) / seconds if seconds > 0 else None,
        "speedup": None,
        "speedup_ci": None,
        "speedup_basis": None,
        "speedup_decode": None,  # without prefill: the part that speculation can change
        "speedup_decode_ci": None,
        "target_ms": percentiles([r.target_seconds for r in rounds]),
        "decoder_ms": percentiles([r.own_seconds for r in rounds]),
    }
    if not drafted:
        return speeds
    uneven = sum(len(pair.plain.tokens) != len(pair.draft.tokens) for pair in pairs)
    if uneven:
        notes.append(
            f"In {uneven} of {len(pairs)} pairs the two outputs differ in length, so the speedup is the "
            "quotient of seconds per token, not of wall times."
        )
    speeds["speedup_basis"] = "per_token" if uneven else "wall"
    for name, prefill in (("speedup", True), ("speedup_decode", False)):
        sums = clustered(pairs, [(*p.plain.cost(prefill), *p.draft.cost(prefill)) for p in pairs])

        def statistic(s: NDArray[np.float64], uneven: int = uneven) -> NDArray[np.float64]:
            return quotient(s, bool(uneven))

        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(statistic(sums.sum(0)))
        speeds[name] = value if np.isfinite(value) else None
        speeds[f"{name}_ci"] = interval(statistic, sums, conditions) if np.isfinite(value) else None
    return speeds


def quotient(sums: NDArray[np.float64], per_token: bool) -> NDArray[np.float64]:
    """The speedup [...] of (plain seconds, plain tokens, draft seconds, draft tokens) [..., 4]."""
    plain_seconds, plain_tokens, draft_seconds, draft_tokens = np.moveaxis(sums, -1, 0)
    wall = plain_seconds / draft_seconds
    return wall * draft_tokens / plain_tokens if per_token else wall


def per_request(pairs: Sequence[Pair], runs: Sequence[Run], drafted: bool) -> dict[str, Any] | None:
    """How single requests differ, where the pooled figures average over them; None on plain rows."""
    if not drafted:
        return None
    lengths = [value for run in runs if (value := mean_acceptance_length(run.rounds)) is not None]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.array([quotient(np.array([*p.plain.cost(), *p.draft.cost()]), True) for p in pairs])
    ratios = ratios[np.isfinite(ratios)]
    return {
        "mean_acceptance_length": spread(lengths),
        "speedup": spread(ratios),
        "slower": float((ratios < 1).mean()) if len(ratios) else None,
    }


def spread(values: Sequence[float] | NDArray[np.float64]) -> dict[str, float] | None:
    if not len(values):
        return None
    return {f"p{round(100 * q)}": float(np.quantile(values, q)) for q in (0.1, 0.5, 0.9)}


def latency(runs: Sequence[Run]) -> dict[str, Any]:
    """Milliseconds to the first token, between emissions, per token after the first, and for the whole
    answer."""
    return {
        "ttft_ms": percentiles([run.emitted_at[0] for run in runs if run.emitted_at]),
        "itl_ms": percentiles(gaps(runs)),
        "tpot_ms": percentiles(
            [(run.seconds - run.emitted_at[0]) / (len(run.tokens) - 1) for run in runs if len(run.tokens) > 1]
        ),
        "e2e_ms": percentiles([run.seconds for run in runs]),
    }


def gaps(runs: Iterable[Run]) -> list[float]:
    """Seconds between one emission and the next. A round emits its tokens together, so this is what a reader
    waits."""
    return [
        after - before
        for run in runs
        for before, after in zip(run.emitted_at, run.emitted_at[1:], strict=False)
    ]


def agreement(pairs: Sequence[Pair], drafted: bool, temperature: float, notes: list[str]) -> dict[str, Any]:
    """Whether speculation changed greedy outputs, and how close the target's choice was where it did."""
    if not drafted or temperature > 0:
        if drafted:
            notes.append(
                "Outputs are not compared at temperature > 0: both follow the same law, by different draws."
            )
        return {"identical_outputs": None, "identical_count": None, "first_divergence_gap": None}
    identical = sum(pair.identical for pair in pairs)
    return {
        "identical_outputs": identical / len(pairs),
        "identical_count": identical,
        "first_divergence_gap": max(
            (p.divergence.gap for p in pairs if p.divergence is not None), default=None
        ),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, Any] | None:
    """Milliseconds at p50, p90, p99 of so many `events`. One that too few values support is None, and
    `missing` says so."""
    if not seconds:
        return None
    count = len(seconds)
    short = [f"{name} takes {least}" for name, (_, least) in PERCENTILES.items() if count < least]
    return {
        **{
            name: float(np.quantile(seconds, q)) * 1e3 if count >= least else None
            for name, (q, least) in PERCENTILES.items()
        },
        "events": count,
        "missing": f"{count} values; {', '.join(short)}" if short else None,
    }


def quantile_curve(seconds: Sequence[float]) -> list[float] | None:
    """101 quantiles (0 to 100 %) in milliseconds: a distribution small enough to keep."""
    return [float(x) * 1e3 for x in np.quantile(seconds, np.linspace(0, 1, 101))] if len(seconds) else None


def clustered(pairs: Sequence[Pair], values: Sequence[tuple[float, ...]]) -> NDArray[np.float64]:
    """[clusters, k] sums of `values` over what is drawn together (`Pair.cluster`)."""
    sums: dict[str, NDArray[np.float64]] = {}
    for pair, value in zip(pairs, values, strict=True):
        sums[pair.cluster] = sums.get(pair.cluster, np.zeros(len(value))) + np.array(value, dtype=float)
    return np.stack(list(sums.values()))


def interval(
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    sums: NDArray[np.float64],
    conditions: Conditions,
) -> Interval:
    """[low, high] of `statistic` (sums [..., k] -> [...]) when clusters are drawn again with replacement."""
    confidence = expanded(conditions.confidence, len(sums))
    ends = bootstrap(statistic, sums, confidence, conditions.resamples, conditions.seed)
    return None if ends is None else list(ends)


def expanded(confidence: float, clusters: int) -> float:
    """The confidence at which a percentile interval over so many clusters covers as often as it says.

    Resampling spreads by sqrt((n - 1) / n) too little, and takes the normal's quantile where Student's is
    due: the expanded percentile interval of Hesterberg 2015 (1411.5279).
    """
    if clusters < 2:
        return confidence
    wide = student((1 + confidence) / 2, clusters - 1) * math.sqrt(clusters / (clusters - 1))
    return 2 * NormalDist().cdf(wide) - 1


def student(p: float, freedom: int) -> float:
    """Student's quantile by its expansion in 1 / freedom (Abramowitz & Stegun 26.7.5): within 0.3 % from 5
    degrees on, and too small below."""
    z = NormalDist().inv_cdf(p)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def shares(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Time divided evenly among those in flight at each moment: seconds for each of the (begin, end) `spans`.
    They add up to the time in which anything was in flight."""
    moments = sorted({moment for span in spans for moment in span})
    found = [0.0] * len(spans)
    for begin, end in pairwise(moments):
        inside = [i for i, (since, until) in enumerate(spans) if since <= begin and end <= until]
        for i in inside:
            found[i] += (end - begin) / len(inside)
    return found


def is_chain(row: dict[str, Any]) -> bool:
    """Whether it is the draft's own chain of a fixed length, whose positions have conditional acceptances of
    their own. Where the draft stops when it is unsure, they are those of its sure moments."""
    return (row["tree"], row["drafters"], row["stop_drafting"]) == ("chain", ["draft"], "fixed")


def verdict(row: dict[str, Any]) -> str:
    """What a row's interval says about speed: 1.0 is plain decoding."""
    ends: Interval = row["speedup_ci"]
    if row["speedup"] is None or ends is None:
        return "cannot tell (too few prompts or rounds for an interval)"
    if ends[0] > 1:
        return "speculation pays"
    if ends[1] < 1:
        return "speculation does not pay"
    return "not shown to pay (the interval contains 1.0)"
