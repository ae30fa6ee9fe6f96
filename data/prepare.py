"""`python -m data.prepare`: traffic in, prompts out, split into train and held-out.

Reads every source, removes duplicates, splits by the hash of each conversation's opening, renders with the
target's chat template and writes train.jsonl, heldout.jsonl and, last, prepare.json. A row's side depends on
nothing but its own text, so data may grow without a prompt ever changing sides. Only the tokenizer is loaded,
never the weights.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from configs.entry import entry
from configs.errors import TrafficError
from configs.schema import Config, Replies, Source
from data.template import Template
from data.tokens import PREPARED, Split, prepared, split_file
from data.traffic import Conversation, Reading, Refused, open_source, read, share
from models.files import ensure_writable, sha256_file, write_json, write_text

SCHEMA = 1  # of the prepared files; raise it when the same inputs give other rows

TOO_LONG = "prompt longer than data.max_prompt_tokens"


@dataclass
class Prepared:
    """Rows by split, and what was left out, by split and reason."""

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    dropped: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))


@entry()
def main(config: Config) -> None:
    prepare(config, Console())


def prepare(config: Config, console: Console) -> None:
    """Prepares `config.data.folder`, or says that it already is. Raises `TrafficError` and `StorageError`."""
    folder = Path(config.data.folder)
    ensure_writable(folder)
    if not config.data.sources:
        raise TrafficError(
            "data.sources is empty: name at least one JSONL file or `datasets` name to train on."
        )
    template = Template.load(config.target)
    key = input_key(config, template)
    if is_current(config, key):
        console.print(f"{folder} is prepared from these inputs already; nothing to do", highlight=False)
        console.print(summary(prepared(config)))
        return
    readings = [
        [read(source, config.data.max_bad_fraction, console) for source in group] for group in sources(config)
    ]
    made = render(config, template, console, *split(config, *readings))
    record = write(config, made, readings, template, key)
    console.print(summary(record))


def sources(config: Config) -> tuple[list[Source], list[Source]]:
    return config.data.sources, config.data.heldout_sources


def input_key(config: Config, template: Template) -> str:
    """Hash of all that the prepared files depend on."""
    settings = asdict(config.data)
    for name in ("folder", "sources", "heldout_sources", "max_length", "max_bad_fraction"):
        del settings[name]
    parts = {
        "schema": SCHEMA,
        "sources": [
            [[open_source(source)[0], source.category] for source in group] for group in sources(config)
        ],
        "settings": settings,
        "tokenizer": template.tokenizer_fingerprint(),
        "template": template.fingerprint(),
    }
    return hashlib.sha256(
        json.dumps(parts, sort_keys=True, default=lambda option: option.value).encode()
    ).hexdigest()


def is_current(config: Config, key: str) -> bool:
    """Whether the folder holds, whole, what these inputs give."""
    record = prepared(config)
    files = [split_file(config, "train"), split_file(config, "heldout")]
    return record.get("key") == key and all(
        file.exists() and sha256_file(file) == record["files"][file.name] for file in files
    )


# --- cleaning and splitting ----------------------------------------------------


def split(
    config: Config, readings: list[Reading], heldout_readings: list[Reading]
) -> tuple[list[Conversation], list[Conversation], Counter[str]]:
    """(train, heldout, dropped): without duplicates, each in the order in which rows are taken."""
    dropped: Counter[str] = Counter()
    conversations = (one for reading in readings for one in reading.conversations)
    heldout = list(unique((one for reading in heldout_readings for one in reading.conversations), dropped))
    reserved = {one.opening for one in heldout}
    train = []
    for one in unique(conversations, dropped):
        opening = one.opening
        if opening in reserved:
            dropped["also in data.heldout_sources"] += 1
        elif share(opening) < config.data.heldout_fraction:
            heldout.append(one)
        else:
            train.append(one)
    check_disjoint(train, heldout)
    return named_apart(evenly(train)), named_apart(evenly(heldout)), dropped


def unique(conversations: Iterable[Conversation], dropped: Counter[str]) -> Iterator[Conversation]:
    """The first conversation of each prompt."""
    seen: set[str] = set()
    for one in conversations:
        if one.identity in seen:
            dropped["duplicate prompt"] += 1
        else:
            seen.add(one.identity)
            yield one


def evenly(conversations: list[Conversation]) -> list[Conversation]:
    """By hash within a category, the categories taking turns: any beginning of the list holds them evenly."""
    by_category: dict[str, list[Conversation]] = defaultdict(list)
    for one in sorted(conversations, key=lambda one: one.identity):
        by_category[one.category].append(one)
    turns = [(turn, category) for category, members in by_category.items() for turn in range(len(members))]
    return [by_category[category][turn] for turn, category in sorted(turns)]


def named_apart(conversations: list[Conversation]) -> list[Conversation]:
    """Replies are kept by id, so an id that several rows carry is extended by each row's hash."""
    count = Counter(one.id for one in conversations)
    return [
        one if count[one.id] == 1 else replace(one, id=f"{one.id}-{one.identity[:12]}")
        for one in conversations
    ]


def check_disjoint(train: list[Conversation], heldout: list[Conversation]) -> None:
    """Proves that no prompt, and no opening of one, is on both sides; it holds by construction."""
    both = {one.opening for one in train} & {one.opening for one in heldout}
    assert not both, f"{len(both)} openings are in train and held-out"


# --- rendering -----------------------------------------------------------------


def render(
    config: Config,
    template: Template,
    console: Console,
    train: list[Conversation],
    heldout: list[Conversation],
    dropped: Counter[str],
) -> Prepared:
    """Token ids for the first rows of each split that fit, up to the wanted numbers."""
    made = Prepared()
    made.dropped["all"] = dropped
    wanted: list[tuple[Split, list[Conversation], int | None]] = [
        ("train", train, config.data.max_train_rows),
        ("heldout", heldout, config.data.max_heldout_rows),
    ]
    for name, conversations, limit in wanted:
        logged = name == "train" and config.data.replies is Replies.logged
        made.rows[name] = []
        for index, one in enumerate(shown(conversations, f"rendering {name}", console)):
            if limit is not None and len(made.rows[name]) == limit:
                made.dropped[name][f"beyond data.max_{name}_rows"] = len(conversations) - index
                break
            try:
                made.rows[name].append(rendered_row(config, template, one, logged))
            except Refused as refused:
                made.dropped[name][str(refused)] += 1
    check_filled(config, made)
    return made


def shown(conversations: list[Conversation], doing: str, console: Console) -> Iterable[Conversation]:
    return track(conversations, doing, console=console, transient=True, disable=not console.is_terminal)


def rendered_row(config: Config, template: Template, one: Conversation, logged: bool) -> dict[str, Any]:
    """One line of train.jsonl or heldout.jsonl."""
    ids = template.prompt(one.prompt, one.tools)
    if len(ids) > config.data.max_prompt_tokens:
        raise Refused(TOO_LONG)
    if logged:
        template.row(
            one.messages, one.tools, config.data.mask_turns
        )  # refuses now what training could not use
    row = {"id": one.id, "category": one.category, "messages": one.messages, "prompt_ids": ids}
    extras = {"tools": one.tools, "response_format": one.response_format, "turns": one.turns}
    return row | {name: value for name, value in extras.items() if value is not None}


def check_filled(config: Config, made: Prepared) -> None:
    for name, rows in made.rows.items():
        if rows or (
            name == "heldout" and not config.data.heldout_sources and config.data.heldout_fraction == 0
        ):
            continue
        reasons = "; ".join(
            f"{reason}: {count}" for reason, count in (made.dropped["all"] + made.dropped[name]).items()
        )
        mend = (
            "data.heldout_fraction, or name data.heldout_sources"
            if name == "heldout"
            else "data.max_prompt_tokens"
        )
        raise TrafficError(
            f"No {name} prompt is left ({reasons or 'the sources are too small for the split'}). "
            f"Add traffic, or raise {mend}."
        )


# --- writing and telling -------------------------------------------------------


def write(
    config: Config, made: Prepared, readings: list[list[Reading]], template: Template, key: str
) -> dict[str, Any]:
    """Writes the three files, prepare.json last: it vouches for the other two by their hashes."""
    names: list[Split] = ["heldout", "train"]
    for name in names:
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made.rows[name])
        write_text(split_file(config, name), lines)
    record = {
        "schema": SCHEMA,
        "key": key,
        "target": template.name,
        "tokenizer": template.tokenizer_fingerprint(),
        "template": template.fingerprint(),
        "sources": [source_record(reading) for reading in readings[0]],
        "heldout_sources": [source_record(reading) for reading in readings[1]],
        "counts": {
            name: dict(sorted(Counter(row["category"] for row in made.rows[name]).items())) for name in names
        },
        "dropped": {name: dict(counter.most_common()) for name, counter in made.dropped.items() if counter},
        "files": {split_file(config, name).name: sha256_file(split_file(config, name)) for name in names},
    }
    write_json(Path(config.data.folder) / PREPARED, record)
    return record


def source_record(reading: Reading) -> dict[str, Any]:
    return {
        "path": reading.path,
        "sha256": reading.sha256,
        "rows": reading.rows,
        "bad": dict(reading.bad.most_common()),
    }


def summary(record: dict[str, Any]) -> Table:
    """Counts per category and split, then what was left out and why."""
    table = Table("", "train", "held-out", title="prompts")
    counts = record["counts"]
    for category in sorted(counts["train"].keys() | counts["heldout"].keys()):
        table.add_row(
            category, str(counts["train"].get(category, 0)), str(counts["heldout"].get(category, 0))
        )
    table.add_section()
    table.add_row(
        "all", str(sum(counts["train"].values())), str(sum(counts["heldout"].values())), style="bold"
    )
    table.add_section()
    for source in [*record["sources"], *record["heldout_sources"]]:
        for reason, count in source["bad"].items():
            table.add_row(f"unreadable: {reason} ({Path(source['path']).name})", str(count), "")
    for reason, count in record["dropped"].get("all", {}).items():
        table.add_row(f"dropped: {reason}", str(count), "")
    train, heldout = (record["dropped"].get(name, {}) for name in ("train", "heldout"))
    for reason in train | heldout:
        table.add_row(f"dropped: {reason}", str(train.get(reason, "")), str(heldout.get(reason, "")))
    return table


if __name__ == "__main__":
    main()
