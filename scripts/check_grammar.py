"""JSON-schema decoding on real requests, with and without drafts: `python -m scripts.check_grammar FILE ...`.

FILE is JSONL with `messages` and `schema`. Each request is decoded greedily with the grammar: plainly, by
forced runs alone, by prompt lookup and, with --draft (a native checkpoint), by the draft's chain and dynamic
tree, the methods taking turns at being first. Of each is counted how many outputs finished, parse as JSON,
validate against their schema and equal plain decoding's, which in float32 all must; and how fast it was.

A request is decoded by all methods before the next, so that a change of the machine's load meets all alike.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from decoding.grammar import GrammarError, Grammars
from decoding.sequence import Generation, Params
from models import load_draft
from models.files import read_lines, sha256_file, write_json
from models.provenance import provenance
from models.target import Target
from scripts.fetch_embedded import TARGET

PLAIN = "plain"


@dataclass
class Tally:
    """What came of one method's outputs."""

    requests: int = 0
    finished: int = 0
    parsed: int = 0
    valid: int = 0
    equal: int = 0  # to plain masked decoding
    tokens: list[int] = field(default_factory=list)  # of each request
    seconds: list[float] = field(default_factory=list)
    rounds: int = 0

    def add(self, done: Generation, text: str, schema: Any, plain: Sequence[int]) -> None:
        self.requests += 1
        self.finished += done.finish == "eos"
        self.equal += done.tokens == list(plain)
        self.tokens.append(len(done.tokens))
        self.seconds.append(done.seconds)
        self.rounds += len(done.rounds)
        if done.finish == "eos" and (value := parsed(text)) is not None:
            self.parsed += 1
            self.valid += validator_for(schema)(schema).is_valid(value[0])

    def row(self, plain: Tally) -> dict[str, Any]:
        """The counts, tokens per second, and the ratio of speeds with its 95 % interval over requests."""
        tokens, seconds = sum(self.tokens), sum(self.seconds)
        same = self.equal == self.requests  # else the methods did different work
        return {
            "requests": self.requests,
            "finished": self.finished,
            "parsed": self.parsed,
            "valid": self.valid,
            "equal_to_plain": self.equal,
            "mean_acceptance_length": (tokens - self.requests) / self.rounds if self.rounds else None,
            "tokens_per_s": tokens / seconds,
            "speedup": sum(plain.seconds) / seconds if same else None,
            "speedup_ci": bootstrap_ratio(plain.seconds, self.seconds, 0.95, 2000, 0) if same else None,
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


def run(
    target: Target,
    rows: Sequence[Mapping[str, Any]],
    options: argparse.Namespace,
    show: Callable[[str], None],
) -> tuple[dict[str, Tally], list[str]]:
    """The methods' tallies, and why requests were refused."""
    grammars, template = Grammars.of(target), Template.of(target)
    methods = decoders(target, options)
    config = DecodeConfig(draft_tokens=options.draft_tokens, max_new_tokens=options.max_new_tokens)
    params = Params.of(config, seed=0)
    tallies = {name: Tally() for name in methods}
    refused: list[str] = []
    for turn, row in enumerate(rows):
        try:
            matchers = {name: grammars.json_schema(row["schema"]) for name in methods}
            prompt = template.prompt(row["messages"])
        except (GrammarError, Refused) as error:
            refused.append(f"{row.get('id', turn)}: {error}")
            continue
        done = {
            name: methods[name].generate(prompt, params, grammar=matchers[name])
            for name in turned(list(methods), turn)
        }
        for name, generation in done.items():
            text = target.tokenizer.decode(generation.tokens, skip_special_tokens=True)
            tallies[name].add(generation, text, row["schema"], done[PLAIN].tokens)
        show(f"{turn + 1}/{len(rows)}")
    return tallies, refused


def turned(names: list[str], by: int) -> list[str]:
    """The names in their order, beginning with another one each time."""
    first = by % len(names)
    return names[first:] + names[:first]


def table(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    made = Table("method", "finished", "parsed", "valid", "equal", "τ", "tokens/s", "speedup (95 %)")
    for name, row in rows.items():
        length, speedup = row["mean_acceptance_length"], row["speedup"]
        made.add_row(
            name,
            f"{row['finished']}/{row['requests']}",
            str(row["parsed"]),
            str(row["valid"]),
            str(row["equal_to_plain"]),
            "" if length is None else f"{length:.2f}",
            f"{row['tokens_per_s']:.1f}",
            "" if speedup is None else "{:.2f} ({:.2f}-{:.2f})".format(speedup, *row["speedup_ci"]),
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
    target = Target.load(TargetConfig(name=options.target, dtype=Dtype(options.dtype)))
    with console.status("decoding") as status:
        tallies, refused = run(target, rows, options, lambda text: status.update(f"decoding {text}"))
    if not tallies[PLAIN].requests:
        raise ConfigError(
            f"No request of {options.file} could be decoded: {'; '.join(refused[:3]) or 'it is empty'}."
        )
    result = {name: tally.row(tallies[PLAIN]) for name, tally in tallies.items()}
    console.print(table(result))
    for reason in refused:
        console.print(f"refused {reason}", markup=False)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    write_json(
        options.out,
        {
            "conditions": {**provenance(), "llguidance": llguidance.__version__},
            "settings": settings,
            "file_sha256": sha256_file(options.file),
            "temperature": 0,
            "batch_size": 1,
            "rows": result,
            "refused": refused,
        },
    )
    console.print(f"written: {options.out}")


if __name__ == "__main__":
    main()
