"""`python -m eval.measure`: is this draft worth it? Acceptance, speed and latency on prompts it never saw.

Every prompt is decoded plainly and speculatively, one right after the other with the same parameters and
seed, and the order alternates from pair to pair (ABBA), so that drift of the machine falls on both alike. So
is every batch of prompts, at each of `eval.batch_sizes`, and every turn of a conversation. Each pair is on
the disk before the next begins: a killed run goes on where it was. `measure.json` follows
`measure.schema.json`; beside it stands `report.html`. The last words are advice (eval/advice.py).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonschema
from rich.console import Console
from torch import nn

from configs.compose import as_plain
from configs.entry import entry
from configs.errors import TrafficError
from configs.schema import Config
from data.template import Template
from data.tokens import Prompt, evenly, prompts, split_file, split_rows
from eval.advice import advice
from eval.bench import (
    Bench,
    Measured,
    Partial,
    batch_sizes,
    check_decoding,
    content,
    dtype_name,
    run_key,
    temperatures,
)
from eval.dialogue import Dialogue, by_turns, dialogues
from eval.machine import share_of_others
from eval.memory import packed_bytes, weight_bytes
from eval.recall import recalls
from eval.report import report
from eval.rows import Conditions, Pair, gaps, quantile_curve, rows, rows_by_reply, settings, verdict
from eval.samples import samples
from eval.terminal import show, warn_if_busy, wide_console
from eval.tracking import log_measurement
from models.checkpoint import draft_hash, find_draft, load_draft, training_of
from models.files import ensure_writable, sha256_file, write_json, write_text
from models.provenance import provenance
from models.target import Target

SCHEMA = "leadout.measure/1"
SCHEMA_FILE = Path(__file__).with_name("measure.schema.json")
PARTIAL = "measure.partial.jsonl"


@entry()
def main(config: Config) -> None:
    measure(config, wide_console())


def measure(config: Config, console: Console) -> dict[str, Any]:
    """Measures, writes measure.json and report.html, prints the table; returns what measure.json holds.

    Everything that can be refused is refused before a model is timed. Raises `CheckpointError` (no draft, or
    another target's), `ConfigError` (a tree that is not there), `TrafficError` (no held-out prompts,
    or some that were trained on) and `StorageError`.
    """
    folder = find_draft(config.eval.draft, Path(config.runs), config.experiment)
    output = Path(config.eval.output) if config.eval.output else default_output(folder)
    check_decoding(config.decode)
    ensure_writable(output)
    heldout, trained = prompts(config, "heldout"), prompts(config, "train")
    check_heldout(config, heldout, trained)
    chosen = evenly(heldout, config.eval.max_prompts)
    where = provenance()
    others_before = share_of_others()
    warn_if_busy(console, others_before, config.eval.max_load, "before the run")
    target = Target.load(config.target)
    draft = load_draft(folder, target)
    lines = split_rows(config, "heldout")
    asked = by_turns([*dialogues(chosen, lines), *probes(config, target, lines)])
    key = measure_key(run_key(config, where, folder, target, chosen), asked)
    bench = Bench(config, target, draft, draft_hash(folder))
    measured = bench.run(asked, Partial(output / PARTIAL, key, console), console)
    pairs = [pair for each in measured for pair in each.pairs]
    traffic = [pair for pair in pairs if not pair.probe]
    loads = [each.others for each in measured]
    measurement = {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: where[name] for name in ("git", "hardware", "versions")},
        "load": load(where, others_before, loads, config.eval.max_load),
        "target": describe_target(config, target),
        "draft": describe_draft(folder, draft),
        "traffic": describe_traffic(config, [one.prompt for one in asked], heldout, trained)
        | {"conversations": conversations(config, asked, pairs)},
        "memory": memory(target, draft, measured),
        "config": as_plain(config),
        **results(pairs, bench.conditions()),
        "samples": samples(traffic, target.tokenizer.decode, config.eval.samples),
    }
    measurement["advice"] = advice(measurement)
    write(measurement, output, console)
    log_measurement(config, measurement, output)
    show(measurement, output, console)
    return measurement


def default_output(folder: Path) -> Path:
    """measure/ in the draft's run; beside a draft that lies elsewhere, a folder named after it."""
    return folder.with_name("measure" if folder.name == "draft" else f"{folder.name}-measure")


# ---- what is measured ----


def check_heldout(config: Config, heldout: Sequence[Prompt], trained: Sequence[Prompt]) -> None:
    """Refuses an empty held-out split, and one that shares a prompt with the training split."""
    if not heldout:
        raise TrafficError(
            f"There are no held-out prompts in {split_file(config, 'heldout')}, so nothing to measure on. "
            "Raise data.heldout_fraction or name data.heldout_sources, and run data.prepare again."
        )
    known = {content(prompt): prompt.id for prompt in trained}
    shared = [(prompt.id, known[content(prompt)]) for prompt in heldout if content(prompt) in known]
    if shared:
        raise TrafficError(
            f"{len(shared)} held-out prompts are training prompts too, the first being {shared[0][0]} "
            f"(trained on as {shared[0][1]}): acceptance measured on them would flatter the draft. Run "
            "python -m data.prepare again, and train on what it writes."
        )


def probes(config: Config, target: Target, lines: Sequence[dict[str, Any]]) -> list[Dialogue]:
    """Prompts of each of `eval.recall_tokens`, made of the held-out prompts' own text."""
    if not config.eval.recall_tokens:
        return []
    texts = [m["content"] for line in lines for m in line["messages"] if m["role"] == "user"]
    context = getattr(target.config, "max_position_embeddings", None)
    room = None if context is None else context - config.decode.max_new_tokens
    return recalls(Template.of(target), texts, config.eval.recall_tokens, room, config.seed)


# ---- measure.json ----


def measure_key(key: str, asked: Sequence[Dialogue]) -> str:
    """The bench's key, and what it does not know of: the probes, and later turns."""
    turns = json.dumps([[one.prompt.id, content(one.prompt), one.turns] for one in asked])
    return hashlib.sha256(f"{key} {turns}".encode()).hexdigest()


def results(pairs: Sequence[Pair], conditions: Conditions) -> dict[str, Any]:
    made, traffic = rows(pairs, conditions), [pair for pair in pairs if not pair.probe]
    whole = [r for r in made if r["method"] != "plain" and r["category"] == r["context_bucket"] == "all"]
    named = ("temperature", "batch_size", "speedup", "speedup_ci")
    return {
        "rows": made,
        "by_reply": rows_by_reply(traffic, conditions),
        "verdicts": [{**{name: row[name] for name in named}, "verdict": verdict(row)} for row in whole],
        "distributions": list(distributions(traffic, conditions.method)),
        "generate": compared(pairs),
        "details": [detail(pair) for pair in pairs],
    }


def distributions(pairs: Sequence[Pair], method: str) -> Iterator[dict[str, Any]]:
    """Quantile curves of the waits between emissions and of whole answers, for the report's pictures."""
    for temperature, batch_size, here in settings(pairs):
        for name, runs in (("plain", [p.plain for p in here]), (method, [p.draft for p in here])):
            yield {
                "temperature": temperature,
                "batch_size": batch_size,
                "method": name,
                "itl_ms": quantile_curve(gaps(runs)),
                "e2e_ms": quantile_curve([run.seconds for run in runs]),
            }


def compared(pairs: Sequence[Pair]) -> dict[str, Any] | None:
    """Totals of the comparison with transformers' `generate`; None when it was not asked for."""
    found = [pair.generate for pair in pairs if pair.generate is not None]
    if not found:
        return None
    seconds, tokens = sum(one["seconds"] for one in found), sum(one["new_tokens"] for one in found)
    return {
        "prompts": len(found),
        "identical_plain": sum(one["identical_plain"] for one in found),
        "identical_draft": sum(one["identical_draft"] for one in found),
        "tokens_per_s": tokens / seconds if tokens else None,
    }


def detail(pair: Pair) -> dict[str, Any]:
    kept = pair.to_dict()
    for side, run in (("plain", pair.plain), ("draft", pair.draft)):
        kept[side] = {
            "new_tokens": len(run.tokens),
            "finish": run.finish,
            "seconds": run.seconds,
            "prefill_seconds": run.prefill_seconds,
            "rounds": len(run.rounds),
            "accepted": sum(round.accepted for round in run.rounds),
            "share": run.share,
            "looped": run.looped,
        }
    return kept


def load(where: dict[str, Any], before: float, during: Sequence[float], limit: float) -> dict[str, Any]:
    """Who else used the machine: shares of its processors, 0 to 1."""
    mean = sum(during) / len(during)
    return {
        "average_before": where["load_average"],
        "others_before": before,
        "others_during": mean,
        "limit": limit,
        "busy": max(before, mean) > limit,
    }


def describe_target(config: Config, target: Target) -> dict[str, Any]:
    return {
        "name": target.name,
        "revision": target.revision,
        "gguf_file": config.target.gguf_file,
        "fingerprint": target.fingerprint(),
        "tokenizer_fingerprint": target.tokenizer_fingerprint(),
        "dtype": dtype_name(target),
        "quantize": target.quantize and target.quantize.value,
        "device": str(target.device),
        "attention": config.target.attention,
    }


def describe_draft(folder: Path, draft: nn.Module) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "method": str(draft.method),
        "sha256": draft_hash(folder),
        "parameters": sum(p.numel() for p in draft.parameters()),
        "training": training_of(folder),
    }


def describe_traffic(
    config: Config, chosen: Sequence[Prompt], heldout: Sequence[Prompt], trained: Sequence[Prompt]
) -> dict[str, Any]:
    files = [split_file(config, "train"), split_file(config, "heldout")]
    return {
        "folder": config.data.folder,
        "files": {path.name: sha256_file(path) for path in files},
        "measured": counted(chosen),
        "heldout": counted(heldout),
        "train_prompts": len(trained),
        # check_heldout has refused anything else.
        "disjoint": {"by": "SHA-256 of the prompt's token ids", "shared": 0},
    }


def conversations(config: Config, asked: Sequence[Dialogue], pairs: Sequence[Pair]) -> dict[str, int]:
    """How many prompts went on after their first reply, and how many turns did not fit into the target's
    context, counted once for each setting."""
    passes = config.eval.repeats * len(temperatures(config)) * len(batch_sizes(config))
    planned = passes * sum(1 + len(one.turns) for one in asked)
    return {
        "prompts": sum(bool(one.turns) for one in asked),
        "turns": sum(pair.turn > 0 for pair in pairs),
        "turns_left_out": planned - len(pairs),
    }


def memory(target: Target, draft: nn.Module, measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Bytes for each batch size, computed from tensors: weights as they are, caches at their peak."""
    weights = {
        "target_weights": weight_bytes(target.model),
        "draft_weights": weight_bytes(draft, without=target.model),
        "packed_weights": packed_bytes(target.model, draft) or None,
    }
    made = []
    for size in sorted({each.place[2] for each in measured}):
        here = [each for each in measured if each.place[2] == size]
        peaks = [pair.draft.peak_memory_mb for each in here for pair in each.pairs]
        on_gpu = target.device.type == "cuda"
        made.append(
            {
                "batch_size": size,
                **weights,
                "plain_cache": max(each.caches["plain"][0] for each in here),
                "target_cache": max(each.caches["draft"][0] for each in here),
                "draft_cache": max(each.caches["draft"][1] for each in here) or None,
                "allocated": round(1e6 * max(peak or 0 for peak in peaks)) if on_gpu else None,
            }
        )
    return made


def counted(chosen: Sequence[Prompt]) -> dict[str, int]:
    return dict(sorted(Counter(prompt.category for prompt in chosen).items()))


def keep_earlier(measurement: dict[str, Any], output: Path, console: Console) -> None:
    """Moves a measurement of another configuration aside, to a folder with the time that it was made at."""
    try:
        earlier = json.loads((output / "measure.json").read_text(encoding="utf-8"))
        same, created = earlier["config"] == measurement["config"], earlier["created"]
    except (OSError, ValueError, KeyError):  # none, or nothing worth keeping
        return
    if same:
        return
    aside = output.with_name(f"{output.name}-{created.replace(':', '')[:17]}")
    aside.mkdir(exist_ok=True)
    for name in ("measure.json", "report.html"):
        if (output / name).exists():
            (output / name).replace(aside / name)
    console.print(f"The measurement of another configuration is in {aside} now.", markup=False)


def write(measurement: dict[str, Any], output: Path, console: Console) -> None:
    """Writes both files, each whole or not at all, and removes what only an interrupted run needs."""
    jsonschema.validate(measurement, json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))
    page = report(measurement)
    keep_earlier(measurement, output, console)
    write_json(output / "measure.json", measurement)
    write_text(output / "report.html", page)
    (output / PARTIAL).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
