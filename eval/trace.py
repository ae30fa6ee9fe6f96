"""What torch's profiler recorded of some rounds, reduced to seconds by part.

The profiler's trace (Kineto's Chrome format, as Perfetto shows it) holds the ranges that eval/ranges.py
named, the operators that ran on the host, and on a GPU its kernels, each with the number of the call that
launched it. Every instant of a round belongs to the innermost range that the host was in. Then

    on a CPU   a part is busy while an operator runs, and the rest of its time is a gap
    on a GPU   a part is busy while a kernel runs that it launched; while none runs at all, the gap is the
               part's that the host was in

so that busy times and gaps together are the round, from its first instant to its last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from eval.ranges import PARTS, ROOT

Event = dict[str, Any]  # of a Chrome trace: "ph", "cat", "name", "ts" and "dur" in microseconds, "args"

ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
CALLS = {"cuda_runtime", "cuda_driver"}


class Piece(NamedTuple):
    """A stretch of the host's time, microseconds."""

    start: float
    end: float
    part: str
    operator: bool  # whether one was running


class Share(NamedTuple):
    """Of one part and an average round, seconds."""

    busy: float = 0.0
    gap: float = 0.0


@dataclass(frozen=True)
class Split:
    """An average round, seconds."""

    parts: dict[str, Share]
    launch: float | None  # the host in calls that launch kernels; None without a GPU
    sync: float | None  # the host in calls that wait for the GPU


def split(events: Sequence[Event]) -> Split:
    """An average round of a trace without its first round, in which the profiler itself warms up."""
    rounds = sorted((e for e in events if named(e) and e["name"] == ROOT), key=lambda event: event["ts"])
    if len(rounds) < 2:
        raise ValueError(f"a trace of {len(rounds)} rounds, and the first does not count")
    first, count = rounds[1]["ts"], len(rounds) - 1
    pieces = [piece for piece in timeline(events, rounds[0]["tid"]) if piece.start >= first]
    kernels = sorted((e for e in events if e.get("cat") in ON_DEVICE), key=lambda event: event["ts"])
    parts = on_device(pieces, kernels, launching(events)) if kernels else on_host(pieces)
    calls = [e for e in events if e.get("cat") in CALLS and e["ts"] >= first]

    def inside(word: str) -> float | None:
        return seconds(sum(e["dur"] for e in calls if word in e["name"]), count) if kernels else None

    return Split(
        {part: Share(*(seconds(one, count) for one in share)) for part, share in parts.items()},
        launch=inside("Launch"),
        sync=inside("Synchronize"),
    )


def last_round(events: Sequence[Event]) -> list[Event]:
    """What is worth looking at of one setting: its last round, and the names of threads and settings."""
    began = max(event["ts"] for event in events if named(event) and event["name"] == ROOT)
    names = (e for e in events if e["ph"] == "M" or (e.get("cat") == "user_annotation" and not named(e)))
    return [*names, *(e for e in events if e["ph"] == "X" and e["ts"] >= began)]


def seconds(microseconds: float, rounds: int) -> float:
    return 1e-6 * microseconds / rounds


def named(event: Event) -> bool:
    """Whether it is one of our ranges."""
    return event.get("cat") == "user_annotation" and event["name"] in PARTS


def timeline(events: Sequence[Event], thread: int) -> Iterator[Piece]:
    """The host's time inside our ranges, in order, cut wherever a range or an operator begins or ends."""
    spans = [e for e in events if (named(e) or e.get("cat") == "cpu_op") and e.get("tid") == thread]
    spans.sort(key=lambda event: (event["ts"], -event["dur"]))
    within: list[tuple[float, str | None]] = []  # (end, part; None for an operator), the innermost last
    now = 0.0

    def until(time: float) -> Iterator[Piece]:
        part = next((part for _, part in reversed(within) if part is not None), None)
        if part is not None and time > now:
            yield Piece(now, time, part, within[-1][1] is None)

    for span in [*spans, {"ts": float("inf"), "dur": 0.0}]:
        while within and within[-1][0] <= span["ts"]:
            yield from until(within[-1][0])
            now, _ = within.pop()
        yield from until(span["ts"])
        now = span["ts"]
        end = now + span["dur"]
        if within:  # rounding of the recorded times must not let it outlast what it lies in
            end = min(end, within[-1][0])
        within.append((end, span["name"] if named(span) else None))


def on_host(pieces: Sequence[Piece]) -> dict[str, tuple[float, float]]:
    """(busy, gap) by part, microseconds."""
    busy: dict[str, float] = defaultdict(float)
    gaps: dict[str, float] = defaultdict(float)
    for piece in pieces:
        (busy if piece.operator else gaps)[piece.part] += piece.end - piece.start
    return paired(busy, gaps)


def on_device(
    pieces: Sequence[Piece], kernels: Sequence[Event], launched: dict[int, float]
) -> dict[str, tuple[float, float]]:
    """(busy, gap) by part, microseconds. kernels: in order; one that overlaps another counts from its end on.
    launched: when the call was made that a correlation number stands for."""
    starts = [piece.start for piece in pieces]
    busy: dict[str, float] = defaultdict(float)
    gaps: dict[str, float] = defaultdict(float)
    free = 0.0  # the GPU has nothing to do from then on
    idle: list[tuple[float, float]] = []
    for kernel in kernels:
        at = bisect_right(starts, launched.get(kernel["args"]["correlation"], -1.0)) - 1
        start, end = kernel["ts"], kernel["ts"] + kernel["dur"]
        if start > free:
            idle.append((free, start))
        if at >= 0:  # else launched before the first round that counts
            busy[pieces[at].part] += max(0.0, end - max(start, free))
        free = max(free, end)
    idle.append((free, float("inf")))
    for piece in pieces:
        for i in range(max(0, bisect_right(idle, (piece.start, float("inf"))) - 1), len(idle)):
            start, end = idle[i]
            if start >= piece.end:
                break
            gaps[piece.part] += max(0.0, min(end, piece.end) - max(start, piece.start))
    return paired(busy, gaps)


def launching(events: Sequence[Event]) -> dict[int, float]:
    """When each call to the GPU's driver was made, by its correlation number."""
    return {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in CALLS and "correlation" in e.get("args", {})
    }


def paired(busy: dict[str, float], gaps: dict[str, float]) -> dict[str, tuple[float, float]]:
    return {part: (busy[part], gaps[part]) for part in PARTS if part in busy or part in gaps}
