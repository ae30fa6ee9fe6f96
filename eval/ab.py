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
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from configs.compose import as_plain
from configs.entry import entry
from configs.errors import ConfigError
from configs.schema import Config
from data.tokens import evenly, prompts
from eval.ab_figures import (
    LATENCIES,
    acceptance,
    agreement,
    counts,
    detail,
    latencies,
    pairs_of,
    speedup,
    throughput,
)
from eval.measure import check_heldout
from eval.page import number, percent, times
from eval.replay import SIDES, Bodies, Line, Load, loads, plan, replayed
from eval.rows import PERCENTILES
from eval.terminal import wide_console, with_interval
from models.files import ensure_writable, write_json
from models.provenance import provenance

SCHEMA = "leadout.ab/1"
PARTIAL = "ab.partial.jsonl"
FAILED = 3  # exit status: so many requests failed that nothing is said of speed
FAILED_AT_MOST = 0.05  # share of failed requests above which speeds are not compared
CLIENT_SHARE = 0.5  # of one core; above it our own times may be what is measured
FEW_BLOCKS = 10  # pairs of blocks below which that is said
LATE = 0.02  # seconds that an open loop may fall behind before that is said


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
