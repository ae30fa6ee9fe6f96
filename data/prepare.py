"""`python -m data.prepare`: traffic in, prompts out, split into train and held-out.

Reads every source, removes duplicates, splits by the hash of each conversation's opening, renders with the
target's chat template and writes train.jsonl, heldout.jsonl and, last, prepare.json. A row's side depends on
nothing but its own text, so data may grow without a prompt ever changing sides. Only the tokenizer is loaded,
never the weights.

Memory holds hashes, id and place of each conversation (about 0.6 kB); the text waits in a temporary file
beside the results, in the order in which it was read, and is rendered in the order of the hashes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

from configs.entry import entry
from configs.errors import TrafficError
from configs.schema import Config, Replies, Source
from data.template import Template
from data.tokens import PREPARED, Split, line_at, prepared, split_file
from data.traffic import Conversation, Reading, Refused, open_source, read, share
from models.files import ensure_writable, sha256_file, storage, write_atomic, write_json

SCHEMA = 2  # of the prepared files; raise it when the same inputs give other rows

TOO_LONG = "prompt longer than data.max_prompt_tokens"


@dataclass(frozen=True, slots=True)
class Kept:
    """A conversation without its text, which lies `at` that byte of the spool."""

    identity: str  # SHA-256 of the normalised prompt, and of its opening
    opening: str
    id: str
    category: str
    at: int


class Spool:
    """Text on the disk until it is needed: a file without a name, which goes with the process. All of it is
    put before any is taken."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with storage(folder):
            self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed by `with` on the spool
        self.end = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def put(self, row: dict[str, Any]) -> int:
        """Where the row lies from now on."""
        line = json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n"
        at, self.end = self.end, self.end + len(line)
        with storage(self.folder):
            self.file.write(line)
        return at

    def get(self, at: int) -> dict[str, Any]:
        with storage(self.folder):
            return line_at(self.file, at)

    def copy_to(self, path: Path) -> None:
        """Makes all that was put here the contents of the file `path`, atomically."""

        def write(temporary: Path) -> None:
            self.file.seek(0)
            with open(temporary, "wb") as file:
                shutil.copyfileobj(self.file, file)

        write_atomic(path, write)


@dataclass
class Side:
    """The rows of one split, counted by category, and how many were left out, by reason."""

    rows: Spool
    counts: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)


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
    with ExitStack() as stack:
        texts, *rows = (stack.enter_context(Spool(folder)) for _ in range(3))
        sides: dict[Split, Side] = {"train": Side(rows[0]), "heldout": Side(rows[1])}
        readings, train, heldout, dropped = split(config, texts, console)
        render(config, template, texts, train, "train", sides["train"], console)
        render(config, template, texts, heldout, "heldout", sides["heldout"], console)
        check_filled(config, sides, dropped)
        record = write(config, sides, dropped, readings, template, key)
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
            [[open_source(source)[0], source.category, source.max_rows] for source in group]
            for group in sources(config)
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
    config: Config, texts: Spool, console: Console
) -> tuple[list[list[Reading]], list[Kept], list[Kept], Counter[str]]:
    """(readings of both kinds of sources, train, heldout, dropped): without duplicates, each side in the
    order in which its rows are taken. The conversations go to `texts`."""
    dropped: Counter[str] = Counter()
    opened = [
        [read(source, config.data.max_bad_fraction, console) for source in group] for group in sources(config)
    ]
    conversations, reserved = (
        shown_reading(chain.from_iterable(rows for _, rows in group), console) for group in opened
    )
    heldout = [kept(one, texts) for one in unique(reserved, dropped)]
    openings = {one.opening for one in heldout}
    train: list[Kept] = []
    for one in unique(conversations, dropped):
        opening = one.opening
        if opening in openings:
            dropped["also in data.heldout_sources"] += 1
        elif share(opening) < config.data.heldout_fraction:
            heldout.append(kept(one, texts))
        else:
            train.append(kept(one, texts))
    check_disjoint(train, heldout)
    readings = [[reading for reading, _ in group] for group in opened]
    return readings, named_apart(evenly(train)), named_apart(evenly(heldout)), dropped


def kept(one: Conversation, texts: Spool) -> Kept:
    return Kept(one.identity, one.opening, one.id, one.category, texts.put(vars(one)))


def unique(conversations: Iterable[Conversation], dropped: Counter[str]) -> Iterator[Conversation]:
    """The first conversation of each prompt."""
    seen: set[bytes] = set()
    for one in conversations:
        identity = bytes.fromhex(one.identity)
        if identity in seen:
            dropped["duplicate prompt"] += 1
        else:
            seen.add(identity)
            yield one


def evenly(conversations: list[Kept]) -> list[Kept]:
    """By hash within a category, the categories taking turns: any beginning of the list holds them evenly."""
    by_category: dict[str, list[Kept]] = defaultdict(list)
    for one in sorted(conversations, key=lambda one: one.identity):
        by_category[one.category].append(one)
    turns = [(turn, category) for category, members in by_category.items() for turn in range(len(members))]
    return [by_category[category][turn] for turn, category in sorted(turns)]


def named_apart(conversations: list[Kept]) -> list[Kept]:
    """Replies are kept by id, so an id that several rows carry is extended by each row's hash."""
    count = Counter(one.id for one in conversations)
    return [
        one if count[one.id] == 1 else replace(one, id=f"{one.id}-{one.identity[:12]}")
        for one in conversations
    ]


def check_disjoint(train: list[Kept], heldout: list[Kept]) -> None:
    """Proves that no prompt, and no opening of one, is on both sides; it holds by construction."""
    both = {one.opening for one in train} & {one.opening for one in heldout}
    assert not both, f"{len(both)} openings are in train and held-out"


def shown_reading(conversations: Iterable[Conversation], console: Console) -> Iterator[Conversation]:
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield from progress.track(conversations, description="reading")


# --- rendering -----------------------------------------------------------------


def render(
    config: Config,
    template: Template,
    texts: Spool,
    conversations: list[Kept],
    name: Split,
    side: Side,
    console: Console,
) -> None:
    """Gives `side` token ids for the first conversations that fit, up to the wanted number."""
    limit = config.data.max_train_rows if name == "train" else config.data.max_heldout_rows
    logged = name == "train" and config.data.replies is Replies.logged
    for index, one in enumerate(shown(conversations, f"rendering {name}", console)):
        if limit is not None and side.counts.total() == limit:
            side.dropped[f"beyond data.max_{name}_rows"] = len(conversations) - index
            return
        conversation = replace(Conversation(**texts.get(one.at)), id=one.id)
        try:
            side.rows.put(rendered_row(config, template, conversation, logged))
        except Refused as refused:
            side.dropped[str(refused)] += 1
        else:
            side.counts[one.category] += 1


def shown(conversations: list[Kept], doing: str, console: Console) -> Iterable[Kept]:
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


def check_filled(config: Config, sides: dict[Split, Side], dropped: Counter[str]) -> None:
    for name, side in sides.items():
        if side.counts or (
            name == "heldout" and not config.data.heldout_sources and config.data.heldout_fraction == 0
        ):
            continue
        reasons = "; ".join(f"{reason}: {count}" for reason, count in (dropped + side.dropped).items())
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
    config: Config,
    sides: dict[Split, Side],
    dropped: Counter[str],
    readings: list[list[Reading]],
    template: Template,
    key: str,
) -> dict[str, Any]:
    """Writes the three files, prepare.json last: it vouches for the other two by their hashes."""
    files = {name: split_file(config, name) for name in sides}
    for name, side in sides.items():
        side.rows.copy_to(files[name])
    left_out = {"all": dropped} | {name: side.dropped for name, side in sides.items()}
    record = {
        "schema": SCHEMA,
        "key": key,
        "target": template.name,
        "tokenizer": template.tokenizer_fingerprint(),
        "template": template.fingerprint(),
        "sources": [source_record(reading) for reading in readings[0]],
        "heldout_sources": [source_record(reading) for reading in readings[1]],
        "counts": {name: dict(sorted(side.counts.items())) for name, side in sides.items()},
        "dropped": {name: dict(counter.most_common()) for name, counter in left_out.items() if counter},
        "files": {file.name: sha256_file(file) for file in files.values()},
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
