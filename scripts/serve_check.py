"""Does an engine serve the draft that we measured? `python -m scripts.serve_check --engine vllm [...]`.

Starts the real engine twice, with the exported draft and without, sends held-out prompts one at a time,
greedily, in turn, and compares

    outputs       with the draft and without it; and without it, with the target's own output here
    acceptance    by position, with that of the built-in decoder, a chain of the same K, on the same prompts
    proposals     token for token with the built-in decoder's, where the engine's drafter can be listened to
    speed         tokens per second with the draft and without, as a client waits

    python -m scripts.serve_check --engine vllm                          the newest draft of smollm2_cpu
    python -m scripts.serve_check --engine llama.cpp --experiment smollm2_small --draft runs/smollm2_small/...
    python -m scripts.serve_check --all                                  every pair in CHECKS
    ... --exported FOLDER                                                a folder that is there, as it is

The draft is exported anew, in the dtype that is served, and read back; the built-in decoder runs the native
one. With --exported FOLDER that folder is served unread, whatever it holds, against the draft of --draft.
Results accumulate in --out, one row for each engine and draft method; a check that fails is a row with its
reason. Every prompt is on the disk before the next begins, and the same command goes on after the last one.
Environments come from `make engines`. Exit status: 0 all agree, 3 something differs or failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from configs.compose import compose
from configs.entry import paragraphs, quiet_libraries
from configs.errors import ConfigError, LeadoutError
from configs.schema import Config, DecodeConfig
from data.tokens import Prompt, evenly, prompts
from decoding.acceptance import bootstrap, ratio
from decoding.build import build_drafter
from decoding.decoder import Decoder
from decoding.sequence import Params
from decoding.tree import TokenTree
from eval.bench import first_difference
from eval.terminal import bar
from models.checkpoint import WEIGHTS, find_draft, load_draft, read_config
from models.export.__main__ import beside_its_target, export, exporter
from models.files import append_line, lines_under, sha256_file, write_json, write_text
from models.provenance import provenance
from models.target import Target, write_target
from scripts.engines import Counts, Engine, EngineError, Proposed, Reply, Setting, counts_of
from scripts.engines.assisted import AssistedEngine
from scripts.engines.llama_server import LlamaEngine
from scripts.engines.openvino_pipeline import OpenVinoEngine
from scripts.engines.vllm_server import VllmEngine

ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (VllmEngine(), AssistedEngine(), LlamaEngine(), OpenVinoEngine())
}
CHECKS = (  # --all: engine, experiment
    ("vllm", "smollm2_cpu"),
    ("vllm", "smollm2_small"),
    ("vllm", "smollm2_medusa"),
    ("vllm", "smollm2_eagle1"),
    ("vllm", "smollm2_peagle"),
    ("vllm", "smollm2_dflash"),
    ("transformers", "smollm2_small"),
    ("llama.cpp", "smollm2_small"),
    ("llama.cpp", "smollm2_portable"),
    ("openvino", "smollm2_small"),
    ("openvino", "smollm2_portable"),
)
WORK = Path("artifacts/serve_check")
DEPTH = re.compile(r"(?:num_speculative_tokens\"?: |--spec-draft-n-max |num_assistant_tokens ?= ?)(\d+)")
PAGE_MARKS = ("<!-- serve_check: begin -->", "<!-- serve_check: end -->")
ROOM = 64  # tokens of context beyond the longest text: vLLM drafts nothing close to its end, and counts on
CONFIDENCE, RESAMPLES, SEED = 0.95, 2000, 0

Sums = NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """One prompt: the engine plain and with the draft, and the built-in decoder."""

    prompt: str
    plain: Reply
    draft: Reply
    own: Reply
    load: float | None = None  # the machine's load average then

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Line:
        plain, draft, own = (reply(values[side]) for side in ("plain", "draft", "own"))
        return cls(values["prompt"], plain, draft, own, values["load"])


def reply(values: Mapping[str, Any]) -> Reply:
    counts, proposed = values["counts"], values["proposed"]
    return Reply(
        values["tokens"],
        values["seconds"],
        None if counts is None else Counts(**counts),
        None if proposed is None else [Proposed(**one) for one in proposed],
    )


# ---- the two sides ----


@dataclass(frozen=True)
class Own:
    """The built-in decoder on the exported draft, as a chain of K tokens."""

    decoder: Decoder
    trees: list[TokenTree]  # of the reply being decoded
    draft_tokens: int

    @classmethod
    def build(cls, target: Target, draft: Any, draft_tokens: int) -> Own:
        trees: list[TokenTree] = []
        return cls(
            Decoder(
                target,
                build_drafter(target, draft, DecodeConfig()),
                on_verdict=lambda tree, path: trees.append(tree),
            ),
            trees,
            draft_tokens,
        )

    def complete(self, prompt: list[int], new_tokens: int) -> Reply:
        """Decoded K tokens further than asked for, so that the last rounds draft and count whole chains, as
        engines do. Rounds that begin behind the end are left out."""
        self.trees.clear()
        decode = DecodeConfig(draft_tokens=self.draft_tokens, max_new_tokens=new_tokens + self.draft_tokens)
        done = self.decoder.generate(prompt, Params.of(decode, seed=0))
        proposed, at = [], 1  # the prefill emits one token
        for tree, played in zip(self.trees, done.rounds, strict=True):
            if at < new_tokens:
                proposed.append(Proposed(at, list(tree.tokens[1:])))
            at += played.emitted
        counts = counts_of(done.tokens, proposed, self.draft_tokens)
        return Reply(done.tokens[:new_tokens], done.seconds, counts, proposed)


def prepare(
    engine: Engine, config: Config, exported: Path | None, new_tokens: int, chosen: Sequence[Prompt]
) -> tuple[Setting, Own, dict[str, Any]]:
    """What is served, the built-in decoder for the same draft, and what identifies both."""
    native = find_draft(config.eval.draft, Path(config.runs), config.experiment)
    method = str(read_config(native)["method"])
    if method != config.method.name:
        raise ConfigError(f"{native} is a draft of method {method}: name its recipe with --experiment.")
    work = (WORK / engine.name / method).absolute()
    config = beside_its_target(config, native)
    folder = (exported or fresh_export(engine, config, native, work / "export")).absolute()
    target = Target.load(config.target)
    draft = load_draft(native, target)
    if hasattr(exporter(method), "as_served"):
        draft = exporter(method).as_served(draft)
    model = target_folder(config, target)
    wanted = min(config.decode.draft_tokens, getattr(draft, "heads", config.decode.draft_tokens))
    command = exporter(method).serve(engine.layout, model, folder, wanted)
    tokens = drafted_by(command)
    setting = Setting(
        target=model,
        draft=folder,
        command=command,
        draft_tokens=tokens,
        dtype=config.target.dtype.value,
        threads=torch.get_num_threads(),
        context=max(len(prompt.ids) for prompt in chosen) + new_tokens + ROOM,
        eos_ids=tuple(sorted(target.eos_ids)),
        work=work,
    )
    identity = {
        "draft": str(native),
        "draft_tokens": tokens,
        "exported_sha256": sha256_file(folder / WEIGHTS),
        "target": target.fingerprint(),
        "command": relative(command),
    }
    return setting, Own.build(target, draft, tokens), identity


def fresh_export(engine: Engine, config: Config, native: Path, folder: Path) -> Path:
    """The draft exported in the dtype that is served. Raises what the exporter raises."""
    wanted = replace(config.export, draft=str(native), engines=[engine.layout], output=str(folder))
    return export(replace(config, export=wanted), Console(quiet=True))[0]


def drafted_by(command: str) -> int:
    """How many tokens a round the exporter's command drafts: what was asked for, or what the draft allows."""
    found = DEPTH.search(command)
    if found is None:
        raise EngineError(f"The exporter's command says nothing of how much to draft: {command}")
    return int(found[1])


def target_folder(config: Config, target: Target) -> str:
    """What an engine is told to serve: the folder or the hub's name; a GGUF file dequantised and saved, since
    the draft fits no other weights."""
    if config.target.gguf_file is None:
        return str(Path(target.name).resolve()) if Path(target.name).is_dir() else target.name
    folder = (WORK / "target" / target.fingerprint()[:16]).absolute()
    if not folder.exists():
        write_target(replace(config.target, pack=False), folder)
    return str(folder)


def run(
    engine: Engine,
    setting: Setting,
    own: Own,
    chosen: Sequence[Prompt],
    new_tokens: int,
    key: dict[str, Any],
    console: Console,
) -> list[Line]:
    """Every prompt decoded by both servers, in turn, and by the built-in decoder."""
    partial = setting.work / "lines.jsonl"
    lines = [Line.from_dict(line) for line in lines_under(partial, key)]
    if len(lines) == len(chosen):
        return lines
    console.print(f"{engine.name}: {len(chosen) - len(lines)} prompts; its logs are in {setting.work}")
    with ExitStack() as open_:
        plain = open_.enter_context(engine.open(setting, speculate=False))
        draft = open_.enter_context(engine.open(setting, speculate=True))
        progress = open_.enter_context(bar(console))
        for server in (plain, draft):  # first calls allocate
            server.complete(chosen[0].ids, min(new_tokens, 8))
        task = progress.add_task(engine.name, total=len(chosen), completed=len(lines))
        for turn, prompt in list(enumerate(chosen))[len(lines) :]:
            sides = {"plain": plain, "draft": draft}
            order = list(sides) if turn % 2 else list(reversed(sides))
            found = {side: sides[side].complete(prompt.ids, new_tokens) for side in order}
            load = os.getloadavg()[0]
            line = Line(prompt.id, found["plain"], found["draft"], own.complete(prompt.ids, new_tokens), load)
            append_line(partial, line.to_dict())
            lines.append(line)
            progress.advance(task)
    return lines


# ---- the comparison ----


def compare(lines: Sequence[Line], draft_tokens: int) -> dict[str, Any]:
    """What the lines say, and `faults`, what an engine that serves this draft rightly would not show."""
    found = {
        "prompts": len(lines),
        "new_tokens": sum(len(line.draft.tokens) for line in lines),
        **outputs(lines),
        **acceptance(lines, draft_tokens),
        "proposals": proposals(lines),
        **speed(lines),
        "load_average": mean_load(lines),
    }
    return found | {"faults": faults(found)}


def outputs(lines: Sequence[Line]) -> dict[str, Any]:
    """How many replies are the same with the draft as without; where they part; and how many of the plain
    ones are the target's own here."""
    partings = []
    for line in lines:
        index = first_difference(line.plain.tokens, line.draft.tokens)
        if index is not None:
            tokens = {side: getattr(line, side).tokens[index : index + 1] for side in ("plain", "draft")}
            partings.append({"prompt": line.prompt, "index": index, **tokens})
    return {
        "identical": len(lines) - len(partings),
        "partings": partings,
        "identical_to_own": sum(line.plain.tokens == line.own.tokens for line in lines),
    }


def acceptance(lines: Sequence[Line], draft_tokens: int) -> dict[str, Any]:
    """τ and acceptance by position: the engine's with intervals over prompts, and the built-in decoder's."""
    theirs, ours = ([counts(getattr(line, side)) for line in lines] for side in ("draft", "own"))
    found: dict[str, Any] = {
        "rounds": sum(one.rounds for one in theirs),
        "tau": estimate([(one.accepted, one.rounds) for one in theirs], lambda s: 1 + s[..., 0] / s[..., 1]),
        "own_tau": 1 + sum(one.accepted for one in ours) / sum(one.rounds for one in ours),
        "by_position": None,
        "own_by_position": by_position(ours, draft_tokens),
    }
    if all(one.by_position is not None for one in theirs):
        rows = [padded(one.by_position, draft_tokens) for one in theirs]
        found["by_position"] = [
            estimate([(row[j], one.rounds) for row, one in zip(rows, theirs, strict=True)], quotient)
            for j in range(draft_tokens)
        ]
    return found


def counts(reply: Reply) -> Counts:
    assert reply.counts is not None
    return reply.counts


def by_position(counted: Sequence[Counts], draft_tokens: int) -> list[float | None]:
    rounds = sum(one.rounds for one in counted)
    rows = [padded(one.by_position, draft_tokens) for one in counted]
    return [ratio(sum(row[j] for row in rows), rounds) for j in range(draft_tokens)]


def padded(values: Sequence[int] | None, length: int) -> list[int]:
    return [*(values or []), *[0] * length][:length]


def proposals(lines: Sequence[Line]) -> dict[str, Any] | None:
    """Chains that both drafted after the same text, compared token by token; None where none were heard.

    Two chains are of one text if the replies are the same up to there. The engine's may stand elsewhere, as
    it may accept otherwise; those are counted as unshared.
    """
    if any(line.draft.proposed is None or line.own.proposed is None for line in lines):
        return None
    tokens = equal = rounds = shared = 0
    first: dict[str, Any] | None = None
    for line in lines:
        agreed = first_difference(line.draft.tokens, line.own.tokens)
        mine = {one.at: one.tokens for one in line.own.proposed or []}
        for theirs in line.draft.proposed or []:
            rounds += 1
            if theirs.at not in mine or (agreed is not None and theirs.at > agreed):
                continue
            shared += 1
            pairs = list(zip(theirs.tokens, mine[theirs.at], strict=False))
            tokens += len(pairs)
            equal += sum(a == b for a, b in pairs)
            if first is None and any(a != b for a, b in pairs):
                first = {"prompt": line.prompt, "at": theirs.at} | {
                    "engine": theirs.tokens,
                    "own": mine[theirs.at],
                }
    return {"rounds": rounds, "shared_rounds": shared, "tokens": tokens, "equal": equal, "first": first}


def speed(lines: Sequence[Line]) -> dict[str, Any]:
    """Tokens per second as a client waits, and the quotient, per token, with its interval over prompts."""
    sums = [
        (line.plain.seconds, len(line.plain.tokens), line.draft.seconds, len(line.draft.tokens))
        for line in lines
    ]
    plain_seconds, plain_tokens, draft_seconds, draft_tokens = np.sum(sums, axis=0)
    return {
        "plain_tokens_per_s": float(plain_tokens / plain_seconds),
        "draft_tokens_per_s": float(draft_tokens / draft_seconds),
        "speedup": estimate(sums, lambda s: s[..., 0] / s[..., 1] / (s[..., 2] / s[..., 3])),
    }


def mean_load(lines: Sequence[Line]) -> float | None:
    loads = [line.load for line in lines if line.load is not None]
    return sum(loads) / len(loads) if loads else None


def quotient(sums: Sums) -> Sums:
    return sums[..., 0] / sums[..., 1]


def estimate(sums: Sequence[Sequence[float]], statistic: Callable[[Sums], Sums]) -> list[float | None] | None:
    """[value, low, high] of a statistic of sums over prompts [prompts, k]; None without a finite value."""
    table = np.array(sums, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(table.sum(0)))
    if not np.isfinite(value):
        return None
    return [value, *(bootstrap(statistic, table, CONFIDENCE, RESAMPLES, SEED) or (None, None))]


def faults(found: Mapping[str, Any]) -> list[str]:
    told = []
    if found["identical"] < found["prompts"]:
        first = found["partings"][0]
        told.append(
            f"{found['prompts'] - found['identical']} of {found['prompts']} outputs change with the draft, "
            f"the first ({first['prompt']}) at token {first['index']}"
        )
    for j, (theirs, ours) in enumerate(
        zip(found["by_position"] or [], found["own_by_position"], strict=False)
    ):
        if outside(ours, theirs):
            told.append(
                f"acceptance at position {j + 1} is {bracket(theirs)}, and {ours:.3f} in the built-in decoder"
            )
    if not found["by_position"] and outside(found["own_tau"], found["tau"]):
        told.append(f"τ is {bracket(found['tau'])}, and {found['own_tau']:.3f} in the built-in decoder")
    heard = found["proposals"]
    if heard is not None and heard["equal"] < heard["tokens"]:
        told.append(
            f"{heard['tokens'] - heard['equal']} of {heard['tokens']} proposed tokens are not the built-in "
            f"decoder's; first at {heard['first']}"
        )
    if heard is not None and not heard["tokens"]:
        told.append("no proposal could be compared")
    return told


def outside(value: float | None, interval: Sequence[float | None] | None) -> bool:
    if value is None or interval is None:
        return True
    _, low, high = interval
    return low is None or high is None or not low <= value <= high


# ---- results ----


def check(engine: Engine, experiment: str, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The row of one engine and draft; of a check that failed, with the reason."""
    named = [f"eval.draft={options.draft}"] if options.draft else []
    config = compose(
        [f"+experiment={experiment}", "target.dtype=float32", "target.device=cpu", *named, *options.overrides]
    )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    where = provenance()
    row: dict[str, Any] = {
        "engine": engine.name,
        "experiment": experiment,
        "method": config.method.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "dtype": config.target.dtype.value,
        "draft_tokens": config.decode.draft_tokens,  # asked for; the draft may allow less
        "max_new_tokens": options.max_new_tokens,
        "temperature": 0,
        "batch_size": 1,
        "threads": torch.get_num_threads(),
        "conditions": where,
    }
    try:
        chosen = evenly(prompts(config, "heldout"), options.prompts)
        row["engine_versions"] = engine.versions()
        setting, own, identity = prepare(engine, config, options.exported, options.max_new_tokens, chosen)
        row |= identity
        key = {name: row[name] for name in ("dtype", "max_new_tokens", "threads", "engine_versions")}
        ids = json.dumps([prompt.ids for prompt in chosen])
        key |= identity | {
            "prompts": hashlib.sha256(ids.encode()).hexdigest(),
            "commit": str(where["git"]),
        }
        lines = run(engine, setting, own, chosen, options.max_new_tokens, key, console)
    except (LeadoutError, httpx.HTTPError) as error:
        return row | {"status": "failed", "reason": relative(" ".join(str(error).split()))}
    row |= compare(lines, setting.draft_tokens) | {"prompts_sha256": key["prompts"]}
    return row | {"status": "differs" if row["faults"] else "agrees"}


def relative(text: str) -> str:
    """Without the folder that this machine keeps the repository in."""
    return text.replace(f"{Path.cwd()}/", "")


def accumulate(path: Path, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Writes the row among those in `path`, in place of an earlier one of the same engine and draft; all of
    them."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    kept = [old for old in rows if place(old) != place(row)]
    rows = sorted([*kept, row], key=place)
    write_json(path, {"schema": "leadout.serve_check/1", "rows": rows})
    return rows


def place(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["engine"], row["experiment"], row["dtype"]


COLUMNS = (
    "engine",
    "draft",
    "K",
    "equal outputs",
    "acceptance by position, engine (ours)",
    "τ, engine (ours)",
    "equal proposals",
    "tokens/s, plain → draft",
    "speedup",
    "result",
)


def cells(row: Mapping[str, Any]) -> list[str]:
    """The row as the table's texts, COLUMNS."""
    versions = row.get("engine_versions") or {}
    engine = " ".join([row["engine"], *list(versions.values())[:1]])
    head = [engine, row["method"], str(row["draft_tokens"])]
    if row["status"] == "failed":
        return [*head, *["–"] * 6, f"failed: {row['reason']}"]
    theirs = row["by_position"] or []
    positions = " ".join(
        f"{bracket(mine)} ({number(own)})" for mine, own in zip(theirs, row["own_by_position"], strict=False)
    )
    heard = row["proposals"]
    return [
        *head,
        f"{row['identical']}/{row['prompts']}",
        positions or "not reported",
        f"{bracket(row['tau'], 2)} ({row['own_tau']:.2f})",
        "not heard" if heard is None else f"{heard['equal']}/{heard['tokens']}",
        f"{row['plain_tokens_per_s']:.1f} → {row['draft_tokens_per_s']:.1f}",
        bracket(row["speedup"], 2),
        "; ".join(row["faults"]) or "agrees",
    ]


def bracket(interval: Sequence[float | None] | None, digits: int = 3) -> str:
    if interval is None:
        return "–"
    value, low, high = interval
    return (
        number(value, digits) if low is None else f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
    )


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table and the conditions of its rows, for a page."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(text.replace("|", "\\|") for text in cells(row)) + " |" for row in rows]
    for said in dict.fromkeys(conditions(row) for row in rows):
        lines += ["", said]
    return "\n".join(lines)


def conditions(row: Mapping[str, Any]) -> str:
    where = row["conditions"]
    commit = (where["git"] or {}).get("commit", "unknown")[:7]
    names = ", ".join(f"{name} {version}" for name, version in (row.get("engine_versions") or {}).items())
    machine, load = where["hardware"], number(row.get("load_average"), 1)
    return (
        f"{row['engine']}, {row['method']}: {row['dtype']}, "
        f"{row['threads']} thread(s), {machine['cores']} core(s) of {machine['cpu']}, load average {load}; "
        f"at most {row['max_new_tokens']} new tokens, temperature 0, one request at a time; "
        f"{names or 'versions unknown'}; commit {commit}, {row['created'][:10]}."
    )


def write_page(page: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Puts the table between PAGE_MARKS of a Markdown page."""
    text = page.read_text(encoding="utf-8")
    begin, end = PAGE_MARKS
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ConfigError(
            f"{page} has no place for the table: write {begin} and {end} on lines of their own."
        )
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    write_text(page, f"{before}{begin}\n{markdown(rows)}\n{end}{after}")


def show(row: Mapping[str, Any], console: Console) -> None:
    table = Table(show_header=False, title=f"{row['engine']}: {row['status']}", title_justify="left")
    for name, text in zip(COLUMNS, cells(row), strict=True):
        table.add_row(name, text)
    console.print(table, markup=False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.serve_check", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "overrides", nargs="*", help="of the recipe's configuration, as in decode.draft_tokens=3"
    )
    parser.add_argument("--engine", choices=list(ENGINES), default="vllm")
    parser.add_argument("--experiment", default="smollm2_cpu", help="the recipe: target, prompts, K")
    parser.add_argument("--draft", help="a run's or a draft's folder; without it the recipe's newest")
    parser.add_argument("--exported", type=Path, help="serve this exported folder as it is; needs --draft")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--all", action="store_true", help="every engine and draft in CHECKS")
    parser.add_argument("--out", type=Path, default=WORK / "serve_check.json")
    parser.add_argument("--page", type=Path, help="also put the table into this Markdown page")
    options = parser.parse_args(arguments)
    console = Console()
    with paragraphs():
        quiet_libraries()
        if options.exported is not None and options.draft is None:
            raise ConfigError("--exported serves a folder as it is: name its draft, by --draft.")
        if min(options.prompts, options.max_new_tokens) < 2:
            raise ConfigError(
                "One prompt has no interval, and one token no round: give --prompts and "
                "--max-new-tokens 2 or more."
            )
        checks = CHECKS if options.all else [(options.engine, options.experiment)]
        statuses = []
        for engine, experiment in checks:
            row = check(ENGINES[engine], experiment, options, console)
            rows = accumulate(options.out, row)
            if options.page is not None:
                write_page(options.page, rows)
            show(row, console)
            statuses.append(row["status"])
        console.print(f"written: {options.out}")
    if set(statuses) != {"agrees"}:
        sys.exit(3)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the servers too
    main()
