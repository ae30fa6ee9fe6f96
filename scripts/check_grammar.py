"""JSON-schema decoding on real requests, with and without drafts: `python -m scripts.check_grammar FILE ...`.

FILE is JSONL with `messages` and `schema`. Each request is decoded greedily with the grammar: plainly, by
forced runs alone, by prompt lookup and, with --draft (a native checkpoint), by the draft's chain and dynamic
tree, the methods taking turns at being first. Of each is counted how many outputs finished, parse as JSON,
validate against their schema and equal plain decoding's, which in float32 all must; and how fast it was.

A request is decoded by all methods before the next, so that a change of the machine's load meets all alike,
and is then written; the same command goes on after the last one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import llguidance
from jsonschema.validators import validator_for
from rich.console import Console
from rich.table import Table

from configs.entry import paragraphs, quiet_libraries
from configs.errors import ConfigError
from configs.schema import DecodeConfig, Drafting, Dtype, TargetConfig, Tree
from data.template import Template
from data.traffic import Refused
from decoding.acceptance import bootstrap_ratio
from decoding.build import build_drafter
from decoding.decoder import Decoder
from decoding.drafters import Drafter
from decoding.drafters.forced import ForcedDrafter
from decoding.drafters.plain import PlainDrafter
from decoding.grammar import GrammarError, Grammars, Matcher
from decoding.sequence import Generation, Params, Request
from eval.terminal import bar
from models import load_draft
from models.checkpoint import draft_hash
from models.files import append_line, lines_under, read_lines, sha256_file, write_json
from models.provenance import provenance
from models.target import Target
from scripts.fetch_embedded import TARGET

PLAIN = "plain"
WARM_TOKENS = 4  # decoded by each method before the first request counts

Line = dict[str, Any]  # of one request: each method's `Outcome`, or why it was `refused`


@dataclass(frozen=True)
class Outcome:
    """What came of one request by one method."""

    finished: bool
    parsed: bool
    valid: bool
    equal: bool  # to plain masked decoding
    tokens: int
    rounds: int
    seconds: float

    @classmethod
    def of(cls, done: Generation, text: str, schema: Any, plain: Sequence[int]) -> Outcome:
        value = parsed(text) if done.finish == "eos" else None
        return cls(
            finished=done.finish == "eos",
            parsed=value is not None,
            valid=value is not None and validator_for(schema)(schema).is_valid(value[0]),
            equal=done.tokens == list(plain),
            tokens=len(done.tokens),
            rounds=len(done.rounds),
            seconds=done.seconds,
        )


def summed(outcomes: Sequence[Outcome], plain: Sequence[Outcome]) -> dict[str, Any]:
    """The counts, tokens per second, and the ratio of speeds with its 95 % interval over requests."""

    def count(what: str) -> int:
        return sum(getattr(one, what) for one in outcomes)

    tokens, seconds, rounds = count("tokens"), [one.seconds for one in outcomes], count("rounds")
    seconds_plain = [one.seconds for one in plain]
    same = count("equal") == len(outcomes)  # else the methods did different work
    return {
        "requests": len(outcomes),
        **{what: count(what) for what in ("finished", "parsed", "valid")},
        "equal_to_plain": count("equal"),
        "mean_acceptance_length": (tokens - len(outcomes)) / rounds if rounds else None,
        "tokens_per_s": tokens / sum(seconds),
        "speedup": sum(seconds_plain) / sum(seconds) if same else None,
        "speedup_ci": bootstrap_ratio(seconds_plain, seconds, 0.95, 2000, 0) if same else None,
    }


def parsed(text: str) -> tuple[Any] | None:
    """The JSON value of `text`, in a tuple since it may be null; None if it is no JSON."""
    try:
        return (json.loads(text),)
    except ValueError:
        return None


def decoders(target: Target, options: argparse.Namespace) -> dict[str, Decoder]:
    drafters: dict[str, Drafter] = {PLAIN: PlainDrafter(), "forced": ForcedDrafter(PlainDrafter())}
    drafters["lookup"] = build_drafter(target, None, DecodeConfig(drafters=[Drafting.lookup]))
    if options.draft is not None:
        draft = load_draft(options.draft, target)
        for tree in (Tree.chain, Tree.dynamic):
            drafters[tree.value] = build_drafter(target, draft, DecodeConfig(tree=tree))
    return {name: Decoder(target, drafter) for name, drafter in drafters.items()}


def lines_of(
    target: Target,
    methods: Mapping[str, Decoder],
    rows: Sequence[Mapping[str, Any]],
    params: Params,
    partial: Path,
    key: dict[str, Any],
    console: Console,
) -> list[Line]:
    """A line for each row, those of an interrupted run included; each is in `partial` before the next row is
    decoded."""
    lines = lines_under(partial, key)[: len(rows)]
    grammars, template = Grammars.of(target), Template.of(target)
    cold = True
    with bar(console) as progress:
        task = progress.add_task("decoding", total=len(rows), completed=len(lines))
        for turn in range(len(lines), len(rows)):
            row = rows[turn]
            try:
                matchers = {name: grammars.json_schema(row["schema"]) for name in methods}
                prompt = template.prompt(row["messages"])
            except (GrammarError, Refused) as error:
                line: Line = {"refused": f"{row.get('id', turn)}: {error}"}
            else:
                if cold:  # first calls allocate
                    decoded(methods, list(methods), prompt, replace(params, max_new_tokens=WARM_TOKENS))
                    cold = False
                done = decoded(methods, turned(list(methods), turn), prompt, params, matchers)
                line = {name: asdict(outcome) for name, outcome in outcomes(target, row, done).items()}
            append_line(partial, line)
            lines.append(line)
            progress.advance(task)
    return lines


def decoded(
    methods: Mapping[str, Decoder],
    order: Sequence[str],
    prompt: Sequence[int],
    params: Params,
    matchers: Mapping[str, Matcher] | None = None,
) -> dict[str, Generation]:
    """The prompt by each method in this order. Where a grammar fails a text is left unfinished."""
    requests = {name: Request(prompt, params, matchers[name] if matchers else None) for name in order}
    return {name: methods[name].generate_all([request])[0] for name, request in requests.items()}


def outcomes(target: Target, row: Mapping[str, Any], done: Mapping[str, Generation]) -> dict[str, Outcome]:
    plain = done[PLAIN].tokens
    texts = {
        name: target.tokenizer.decode(one.tokens, skip_special_tokens=True) for name, one in done.items()
    }
    return {name: Outcome.of(one, texts[name], row["schema"], plain) for name, one in done.items()}


def turned(names: list[str], by: int) -> list[str]:
    """The names in their order, beginning with another one each time."""
    first = by % len(names)
    return names[first:] + names[:first]


def table(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    made = Table("method", "finished", "parsed", "valid", "equal", "τ", "tokens/s", "speedup (95 %)")
    for name, row in rows.items():
        length, speedup, ends = row["mean_acceptance_length"], row["speedup"], row["speedup_ci"]
        made.add_row(
            name,
            f"{row['finished']}/{row['requests']}",
            str(row["parsed"]),
            str(row["valid"]),
            str(row["equal_to_plain"]),
            "" if length is None else f"{length:.2f}",
            f"{row['tokens_per_s']:.1f}",
            "" if speedup is None else f"{speedup:.2f}" + (" ({:.2f}-{:.2f})".format(*ends) if ends else ""),
        )
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.check_grammar", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("file", type=Path, help="JSONL with `messages` and `schema`")
    parser.add_argument("--target", default=str(TARGET), help="hub name or folder")
    parser.add_argument("--draft", type=Path, help="folder of a native draft of that target")
    parser.add_argument("--schemas", type=int, default=200, help="how many rows, from the first on")
    parser.add_argument("--dtype", choices=[dtype.value for dtype in Dtype], default="float32")
    parser.add_argument("--draft-tokens", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("artifacts/check_grammar.json"))
    with paragraphs():
        quiet_libraries()
        check(parser.parse_args(arguments))


def check(options: argparse.Namespace) -> None:
    console = Console()
    if not options.file.is_file():
        raise ConfigError(
            f"There is no {options.file}. Name a JSONL file whose rows have `messages` and `schema`."
        )
    rows = list(islice(read_lines(options.file), options.schemas))
    settings = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()
    }
    conditions = {**provenance(), "llguidance": llguidance.__version__}
    file_sha256 = sha256_file(options.file)
    partial = options.out.with_suffix(".partial.jsonl")
    target = Target.load(TargetConfig(name=options.target, dtype=Dtype(options.dtype)))
    methods = decoders(target, options)
    # Not the number of rows: they are taken from the first on, so that more or fewer go on as well.
    key = {name: value for name, value in settings.items() if name != "schemas"}
    key |= {"file_sha256": file_sha256, "target": target.fingerprint(), "git": str(conditions["git"])}
    key |= {"draft_sha256": None if options.draft is None else draft_hash(options.draft)}
    config = DecodeConfig(draft_tokens=options.draft_tokens, max_new_tokens=options.max_new_tokens)
    lines = lines_of(target, methods, rows, Params.of(config, seed=0), partial, key, console)
    refused = [line["refused"] for line in lines if "refused" in line]
    taken = [line for line in lines if "refused" not in line]
    if not taken:
        raise ConfigError(
            f"No request of {options.file} could be decoded: {'; '.join(refused[:3]) or 'it is empty'}."
        )
    by_method = {name: [Outcome(**line[name]) for line in taken] for name in taken[0]}
    result = {name: summed(found, by_method[PLAIN]) for name, found in by_method.items()}
    console.print(table(result))
    for reason in refused:
        console.print(f"refused {reason}", markup=False)
    write_json(
        options.out,
        {
            "conditions": conditions,
            "settings": settings,
            "file_sha256": file_sha256,
            "temperature": 0,
            "batch_size": 1,
            "rows": result,
            "refused": refused,
        },
    )
    partial.unlink()
    console.print(f"written: {options.out}")


if __name__ == "__main__":
    main()
