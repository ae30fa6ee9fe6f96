"""Several measurements set side by side: the conditions that differ, and the figures of each setting. Pure
but for reading the files.

Each one is held against the first: on the prompts that both decoded, the quotient of their speedups and
the difference of their τ, with intervals from drawing these prompts again, the same ones for both. A
speedup is over plain decoding in the same run, so a machine that was slower on one day than on another
cancels in the quotient; tokens per second and milliseconds do not.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.errors import MeasurementError
from decoding.acceptance import bootstrap
from eval.measurement import Row, commit, drafting, measurement_file, place, read_measurement
from eval.page import listing, short
from eval.rows import expanded
from eval.sections import LATENCIES
from models.files import sha256_file

SCHEMA = "leadout.compare/1"
RESAMPLES = 2000

Setting = tuple[float, int, bool]  # temperature, batch size, lossless


@dataclass(frozen=True)
class Measured:
    """A measurement under the name that tells it from the others."""

    name: str
    file: Path
    found: dict[str, Any]

    def row(self, setting: Setting, category: str = "all") -> Row | None:
        """The speculative one over all prompt lengths."""
        return self.find(category, lambda row: row["method"] != "plain" and key(row) == setting)

    def plain(self, setting: Setting, category: str = "all") -> Row | None:
        return self.find(category, lambda row: row["method"] == "plain" and key(row)[:2] == setting[:2])

    def find(self, category: str, wanted: Callable[[Row], bool]) -> Row | None:
        rows = (row for row in self.found["rows"] if wanted(row))
        return next(
            (row for row in rows if (row["category"], row["context_bucket"]) == (category, "all")), None
        )


def key(row: Row) -> Setting:
    return row["temperature"], row["batch_size"], row["lossless"]


def read(paths: Sequence[Path]) -> list[Measured]:
    files = [measurement_file(path).resolve() for path in paths]
    if len(files) < 2:
        raise MeasurementError(
            "One measurement alone cannot be compared. Name at least two measure.json files."
        )
    if twice := [file for file, count in Counter(files).items() if count > 1]:
        raise MeasurementError(f"{twice[0]} is named twice, and would be compared with itself. Name it once.")
    found = [read_measurement(path) for path in files]
    return [Measured(*each) for each in zip(names(files), files, found, strict=True)]


def names(files: Sequence[Path]) -> list[str]:
    """As much of the end of each path as tells all of them apart, as in "20261130-084939" for
    runs/smollm2_cpu/20261130-084939/measure/measure.json."""
    parts = [file.parent.parts[:-1] if file.parent.name == "measure" else file.parent.parts for file in files]
    for length in range(1, max(map(len, parts)) + 1):
        ends = ["/".join(part[-length:]) for part in parts]
        if len({*ends}) == len(files):
            return ends
    return [str(file) for file in files]


# ---- conditions ----

ACCEPTANCE, TIMES = "acceptance and speed", "speed and latency"


def decode(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda found: str(found["config"].get("decode", {}).get(key))


def prompts(found: dict[str, Any]) -> str:
    """How many, and a digest of which: what they are called and how long they are once rendered."""
    first_turns = (p for p in found["details"] if not p.get("turn") and not p.get("probe"))
    asked = sorted({(pair["prompt"], pair["prompt_tokens"]) for pair in first_turns})
    return f"{len(asked)} ({hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:8]})"


def hardware(found: dict[str, Any]) -> str:
    cpu, on = found["hardware"]["cpu"], place(found)
    return on if cpu in on else f"{on}; {cpu}"


def sampling(found: dict[str, Any]) -> str:
    row = found["rows"][0]
    others = found["config"].get("decode", {})
    said = {"top-k": row["top_k"], "top-p": row["top_p"]}
    return listing(
        said | {name: others[name] for name in ("min_p", "repetition_penalty", "stop") if others.get(name)}
    )


# What should be alike, and what cannot be compared where it is not. Drafts and how they draft are not among
# it: they are what is compared.
CONDITIONS: tuple[tuple[str, Callable[[dict[str, Any]], str], str], ...] = (
    (
        "target",
        lambda found: f"{short(found['target']['name'])} ({found['target']['fingerprint'][:8]})",
        ACCEPTANCE,
    ),
    ("prompts", prompts, ACCEPTANCE),
    ("longest answer", decode("max_new_tokens"), ACCEPTANCE),
    ("sampling", sampling, ACCEPTANCE),
    ("dtype", lambda found: found["target"]["dtype"], ACCEPTANCE),
    ("hardware", hardware, TIMES),
    ("threads", lambda found: str(found["hardware"]["threads"]), TIMES),
    ("attention", lambda found: found["target"]["attention"], TIMES),
    (
        "weights",
        lambda found: "packed" if found["config"].get("target", {}).get("pack") else "as loaded",
        TIMES,
    ),
    (
        "forwards",
        lambda found: "compiled" if found["config"].get("decode", {}).get("compile") else "eager",
        TIMES,
    ),
    ("other load", lambda found: "busy" if found["load"]["busy"] else "idle", TIMES),
    ("commit", lambda found: commit(found["git"]), ACCEPTANCE),
    ("versions", lambda found: listing({n: v for n, v in found["versions"].items() if v}), TIMES),
)


def conditions(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Each condition with its values by measurement, whether they are alike, and what it spoils if not."""
    made = []
    for name, value, spoils in CONDITIONS:
        values = {one.name: value(one.found) for one in measured}
        made.append(
            {"condition": name, "values": values, "alike": len({*values.values()}) == 1, "spoils": spoils}
        )
    return made


def warnings(held: Sequence[dict[str, Any]]) -> list[str]:
    """What has to be said before any figure; empty where conditions were alike and the machines idle."""
    differ = [one for one in held if not one["alike"]]
    said = []
    if spoilt := [one["condition"] for one in differ if one["spoils"] == ACCEPTANCE]:
        said.append(
            f"These were not measured alike: {', '.join(spoilt)} differ. Neither acceptance nor speed can be "
            "laid to the drafts alone."
        )
    if slowed := [one["condition"] for one in differ if one["spoils"] == TIMES]:
        said.append(
            f"Times were not taken under like conditions: {', '.join(slowed)} differ. Compare acceptance; "
            "speed and latency only with that in mind."
        )
    load = next(one["values"] for one in held if one["condition"] == "other load")
    if busy := [name for name, state in load.items() if state == "busy"]:
        said.append(f"The machine was busy while {', '.join(busy)} ran. Measure again on an idle one.")
    return said


# ---- figures ----

KEPT = (
    "mean_acceptance_length", "mean_acceptance_length_ci", "acceptance_rate", "acceptance_by_position",
    "conditional_acceptance", "tokens_per_s", "speedup", "speedup_ci", "speedup_decode", "speedup_decode_ci",
    "peak_memory_mb", *LATENCIES,
)  # fmt: skip


def comparison(measured: Sequence[Measured]) -> dict[str, Any]:
    """What compare.json holds."""
    held = conditions(measured)
    return {
        "schema": SCHEMA,
        "measurements": [description(one) for one in measured],
        "conditions": held,
        "warnings": warnings(held),
        "settings": [compared(measured, setting) for setting in settings_of(measured)],
    }


def description(one: Measured) -> dict[str, Any]:
    row = next(row for row in one.found["rows"] if row["method"] != "plain")
    draft = one.found["draft"]
    return {
        "name": one.name,
        "file": str(one.file),
        "sha256": sha256_file(one.file),
        "created": one.found["created"],
        "method": draft["method"],
        "draft": draft["folder"],
        "draft_sha256": draft["sha256"],
        "parameters": draft["parameters"],
        "drafting": f"{drafting(row)}, {row['verification']} verification",
    }


def settings_of(measured: Sequence[Measured]) -> list[Setting]:
    """Lossless ones first: figures of lossy verification never share a table with others."""
    known = {key(row) for one in measured for row in one.found["rows"] if row["method"] != "plain"}
    return sorted(known, key=lambda setting: (not setting[2], setting))


def members(measured: Sequence[Measured], setting: Setting) -> list[Measured]:
    """Those that have it."""
    return [one for one in measured if one.row(setting) is not None]


def compared(measured: Sequence[Measured], setting: Setting) -> dict[str, Any]:
    here = members(measured, setting)
    first = here[0]
    rows = []
    for one, category in product(here, categories(here, setting)):
        if (row := one.row(setting, category)) is not None:
            plain = one.plain(setting, category)
            rows.append(
                {
                    "name": one.name,
                    "category": category,
                    "prompts": row["prompts"],
                    **{name: row[name] for name in KEPT},
                    "plain": plain and {name: plain[name] for name in ("tokens_per_s", *LATENCIES)},
                    "against_first": against(first, one, setting)
                    if one is not first and category == "all"
                    else None,
                }
            )
    return {
        **dict(zip(("temperature", "batch_size", "lossless"), setting, strict=True)),
        "first": first.name,
        "missing": [one.name for one in measured if one not in here],
        "confidence": confidence(first),
        "rows": rows,
    }


def categories(here: Sequence[Measured], setting: Setting) -> list[str]:
    """ "all", then those that any has."""
    rows = (row for one in here for row in one.found["rows"])
    found = {
        row["category"] for row in rows if row["context_bucket"] == "all" and key(row)[:2] == setting[:2]
    }
    return ["all", *sorted(found - {"all"})]


def confidence(one: Measured) -> float:
    return one.found["rows"][0]["confidence"]


def against(first: Measured, other: Measured, setting: Setting) -> dict[str, Any] | None:
    """`other` held against `first` on the prompts that both decoded one by one; None where they share none.

    `speedup`: quotient of the two speedups, each seconds per token of plain over those of speculative
    decoding, summed over the shared prompts. `mean_acceptance_length`: difference of τ, other minus first.
    Intervals draw prompts, each with the runs of both measurements.
    """
    if setting[1] != 1:
        return None  # prompts of one batch share its time
    sums_first, sums_other = (sums(one, setting[0]) for one in (first, other))
    shared = sorted({*sums_first} & {*sums_other})
    if not shared:
        return None
    both = np.stack([np.concatenate([sums_first[prompt], sums_other[prompt]]) for prompt in shared])

    def speed(s: NDArray[np.float64]) -> NDArray[np.float64]:
        return quotient(s[..., 6:]) / quotient(s[..., :6])

    def length(s: NDArray[np.float64]) -> NDArray[np.float64]:
        return s[..., 11] / s[..., 10] - s[..., 5] / s[..., 4]

    made: dict[str, Any] = {"prompts": len(shared)}
    for name, statistic in (("speedup", speed), ("mean_acceptance_length", length)):
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(statistic(both.sum(0)))
        ends = bootstrap(statistic, both, expanded(confidence(first), len(shared)), RESAMPLES, seed=0)
        made |= {
            name: value if np.isfinite(value) else None,
            f"{name}_ci": None if ends is None else list(ends),
        }
    return made


def sums(one: Measured, temperature: float) -> dict[str, NDArray[np.float64]]:
    """For each prompt of the traffic decoded alone at `temperature`, over its repeats: plain seconds and
    tokens, speculative seconds and tokens, rounds, accepted tokens."""
    found: dict[str, NDArray[np.float64]] = {}
    for pair in one.found["details"]:
        alone = pair.get("batch_size", 1) == 1 and not pair.get("probe")
        if alone and pair["temperature"] == temperature:
            plain, draft = pair["plain"], pair["draft"]
            row = [plain["seconds"], plain["new_tokens"], draft["seconds"], draft["new_tokens"]]
            row += [draft["rounds"], draft["accepted"]]
            found[pair["prompt"]] = found.get(pair["prompt"], np.zeros(6)) + np.array(row, dtype=float)
    return found


def quotient(s: NDArray[np.float64]) -> NDArray[np.float64]:
    """The speedup [...] of (plain seconds, plain tokens, speculative seconds, speculative tokens, ...)
    [..., 6]."""
    return (s[..., 0] / s[..., 1]) / (s[..., 2] / s[..., 3])
