"""From measured pairs of generations to the rows of `measure.json`. Pure: no model, no clock, no file.

A pair is one prompt at one temperature, decoded plainly and speculatively one after the other. Rates are
pooled (sums over sums, never means of ratios), as vLLM counts them; `docs/metrics.md` defines each field.
Intervals resample prompts, not rounds or tokens, because the rounds of one prompt resemble each other (a
paired cluster bootstrap).

Absent is None: a quotient without a denominator, a percentile that too few values support, a comparison that
has no meaning at that temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
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

# Prompt lengths in tokens: (name, shortest, longest).
BUCKETS = (("1-128", 1, 128), ("129-512", 129, 512), ("513-2048", 513, 2048), ("2049+", 2049, 2**62))
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


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
    """A prompt decoded both ways, at one temperature."""

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

    @property
    def identical(self) -> bool:
        return self.plain.tokens == self.draft.tokens

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
    batch_size: int = 1

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


def rows(pairs: Sequence[Pair], conditions: Conditions) -> list[dict[str, Any]]:
    """For each temperature and both methods: all prompts, each category, and each bucket of prompt lengths in
    use."""
    made = []
    for temperature in sorted({pair.temperature for pair in pairs}):
        here = [pair for pair in pairs if pair.temperature == temperature]
        groups = [("all", "all", here)]
        groups += [
            (name, "all", [pair for pair in here if pair.category == name])
            for name in sorted({pair.category for pair in here})
        ]
        groups += [
            ("all", name, inside)
            for name, low, high in BUCKETS
            if (inside := [pair for pair in here if low <= pair.prompt_tokens <= high])
        ]
        for category, bucket, members in groups:
            made.append(row(members, False, category, bucket, conditions))
            made.append(row(members, True, category, bucket, conditions))
    return made


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
        "temperature": temperature,
        "top_k": conditions.top_k,
        "top_p": conditions.top_p,
        **conditions.drafting(drafted),
        "batch_size": conditions.batch_size,
        "context_bucket": bucket,
        "category": category,
        "prompts": len({pair.prompt for pair in pairs}),
        "confidence": conditions.confidence,
        **acceptance(pairs, runs, conditions),
        **speed(pairs, runs, drafted, conditions, notes),
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
    spread = interval(lambda s: 1 + s[..., 0] / s[..., 1], sums, conditions)
    return {
        "rounds": len(rounds),
        "new_tokens": sum(len(run.tokens) for run in runs),
        "mean_acceptance_length": mean_acceptance_length(rounds),
        "mean_acceptance_length_ci": spread,
        "acceptance_rate": acceptance_rate(rounds),
        "acceptance_by_position": acceptance_by_position(rounds) or None,
        "conditional_acceptance": conditional_acceptance(rounds) or None,
    }


def speed(
    pairs: Sequence[Pair], runs: Sequence[Run], drafted: bool, conditions: Conditions, notes: list[str]
) -> dict[str, Any]:
    """Tokens per second, and how many times faster than plain decoding of the same prompts (None on plain
    rows).

    With outputs of one length for every pair the speedup is the quotient of wall times; otherwise of seconds
    per token, since a shorter answer is no speed. The two agree where the lengths do.
    """
    tokens, seconds = sum(len(run.tokens) for run in runs), sum(run.seconds for run in runs)
    speeds: dict[str, Any] = {
        "tokens_per_s": tokens / seconds if tokens and seconds > 0 else None,
        "speedup": None,
        "speedup_ci": None,
        "speedup_basis": None,
        "speedup_decode": None,  # without prefill: the part that speculation can change
        "speedup_decode_ci": None,
        "decoder_ms": percentiles([r.own_seconds for run in runs for r in run.rounds]),
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
        sums = clustered(pairs, [(*cost(p.plain, prefill), *cost(p.draft, prefill)) for p in pairs])

        def quotient(s: NDArray[np.float64], uneven: int = uneven) -> NDArray[np.float64]:
            plain_seconds, plain_tokens, draft_seconds, draft_tokens = np.moveaxis(s, -1, 0)
            wall = plain_seconds / draft_seconds
            return wall * draft_tokens / plain_tokens if uneven else wall

        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(quotient(sums.sum(0)))
        speeds[name] = value if np.isfinite(value) else None
        speeds[f"{name}_ci"] = interval(quotient, sums, conditions) if np.isfinite(value) else None
    return speeds


def cost(run: Run, prefill: bool) -> tuple[float, int]:
    """(seconds, tokens) of a run; without prefill, what came after the first token."""
    if prefill:
        return run.seconds, len(run.tokens)
    return run.seconds - run.prefill_seconds, max(len(run.tokens) - 1, 0)


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


def percentiles(seconds: Sequence[float]) -> dict[str, float | None] | None:
    """Milliseconds at p50, p90, p99. A percentile needs one value beyond it on average (p99: 100 values)."""
    if not seconds:
        return None
    return {
        name: float(np.quantile(seconds, q)) * 1e3 if len(seconds) * (1 - q) >= 1 - 1e-9 or q == 0.5 else None
        for name, q in PERCENTILES.items()
    }


def quantile_curve(seconds: Sequence[float]) -> list[float] | None:
    """101 quantiles (0 to 100 %) in milliseconds: a distribution small enough to keep."""
    return [float(x) * 1e3 for x in np.quantile(seconds, np.linspace(0, 1, 101))] if len(seconds) else None


def clustered(pairs: Sequence[Pair], values: Sequence[tuple[float, ...]]) -> NDArray[np.float64]:
    """[prompts, k] sums of each prompt's `values`, so that repeats of a prompt stay together."""
    sums: dict[str, NDArray[np.float64]] = {}
    for pair, value in zip(pairs, values, strict=True):
        sums[pair.prompt] = sums.get(pair.prompt, np.zeros(len(value))) + np.array(value, dtype=float)
    return np.stack(list(sums.values()))


def interval(
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    sums: NDArray[np.float64],
    conditions: Conditions,
) -> Interval:
    """[low, high] of `statistic` (sums [..., k] -> [...]) when prompts are drawn again with replacement."""
    ends = bootstrap(statistic, sums, conditions.confidence, conditions.resamples, conditions.seed)
    return None if ends is None else list(ends)


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
