"""Prepared traffic read back: prompts to answer or to measure on, and token rows to train on.

The data folder holds train.jsonl and heldout.jsonl (prompts, by `data.prepare`), prepare.json (what they were
made from), replies.jsonl (by `data.regenerate`) and tokens/<key>/, the token rows as an Arrow table. The key
covers all that the rows depend on, so a cache can be stale only by being another folder.

Nothing here holds all rows: files are read line by line, a reply is looked up by its place, and token rows
stay in the memory-mapped table until they are asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, cast, overload

from rich.console import Console

from configs.errors import ConfigError, TrafficError
from configs.schema import Config, Replies
from data.template import Template
from data.traffic import Refused
from models.files import lines_at, sha256_file, write_folder, write_json
from models.target import Target

Split = Literal["train", "heldout"]

PREPARED = "prepare.json"
REPLIES = "replies.jsonl"
REPLIES_META = "replies.meta.json"
TOKENS = "tokens"
ROWS = "rows.arrow"
VERSION = 2  # of the cached rows; raise it when the same inputs give other rows


@dataclass(frozen=True)
class Prompt:
    """`ids` end with the generation prompt: the target's next token is the first of its reply."""

    id: str
    category: str
    ids: list[int]


@dataclass(frozen=True)
class TokenRow:
    """Prompt and reply. `loss_mask[j]` is 1 where token j is to be trained on (m_j of alignment.py)."""

    id: str
    category: str
    input_ids: list[int]
    loss_mask: list[int]


def prompts(cfg: Config, split: Split) -> list[Prompt]:
    """The prompts of one split, in the file's order. `TrafficError` when the traffic is not prepared."""
    return [prompt_in(row) for row in each_row(cfg, split)]


def prompt_in(row: Mapping[str, Any]) -> Prompt:
    """The prompt in a row of train.jsonl or heldout.jsonl."""
    return Prompt(row["id"], row["category"], row["prompt_ids"])


def split_rows(cfg: Config, split: Split) -> list[dict[str, Any]]:
    """As `each_row`, all of them."""
    return list(each_row(cfg, split))


def each_row(cfg: Config, split: Split) -> Iterator[dict[str, Any]]:
    """The rows of a split as `data.prepare` wrote them, proved to be those that prepare.json speaks of."""
    path = split_file(cfg, split)
    if not path.exists():
        raise TrafficError(
            f"{path} does not exist: the traffic is not prepared. Run python -m data.prepare first."
        )
    recorded = prepared(cfg).get("files", {}).get(path.name)
    if recorded is not None and recorded != sha256_file(path):
        raise TrafficError(
            f"{path} is not the file that {PREPARED} describes: data.prepare was interrupted, or the file "
            "was edited. Run python -m data.prepare again."
        )
    for _, row in lines_at(path):
        yield row


def split_file(cfg: Config, split: Split) -> Path:
    return Path(cfg.data.folder) / f"{split}.jsonl"


def prepared(cfg: Config) -> dict[str, Any]:
    """prepare.json, or an empty object before the first preparation."""
    return read_object(Path(cfg.data.folder) / PREPARED)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when there is no file."""
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TrafficError(
            f"{path} is damaged ({error}). Remove it and run the stage that writes it again."
        ) from None


class TokenRows(Sequence[TokenRow]):
    """Token rows in a memory-mapped Arrow file: one is made when it is asked for. A slice is a list."""

    def __init__(self, file: Path) -> None:
        import datasets  # here and below, because most importers of this module need not wait a second for it

        self._table = datasets.Dataset.from_file(str(file))

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, index: int) -> TokenRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[TokenRow]: ...

    def __getitem__(self, index: int | slice) -> TokenRow | list[TokenRow]:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        return TokenRow(**self._table[index])

    def __iter__(self) -> Iterator[TokenRow]:
        return (TokenRow(**row) for row in cast(Iterator[dict[str, Any]], iter(self._table)))


def load_token_rows(cfg: Config, target: Target, console: Console | None = None) -> Sequence[TokenRow]:
    """Every row to train on, at most `data.max_length` tokens long and each with at least one trained token.

    With data.replies=target these are the train prompts that have replies, trained on the reply and its end
    token; with logged, the logged conversations, masked by `data.mask_turns`. What is cut or left out is
    counted and printed. Raises `TrafficError` for missing or foreign inputs, and when no row is left;
    `ConfigError` where rows may be longer than the target has positions for, or than its rotary embeddings
    stay the same.
    """
    if target.rotary_limit is not None and cfg.data.max_length > target.rotary_limit:
        raise ConfigError(
            f"data.max_length={cfg.data.max_length}: the rotary embeddings of {target.name} change in "
            f"texts of more than {target.rotary_limit} tokens, for all rows of a batch. Set "
            f"data.max_length={target.rotary_limit}."
        )
    for known in target.learned_positions:
        if cfg.data.max_length > known:
            raise ConfigError(
                f"data.max_length={cfg.data.max_length}: {target.name} has {known} positions. Set "
                f"data.max_length={known}."
            )
    folder = Path(cfg.data.folder) / TOKENS / cache_key(cfg, target)
    if not folder.exists():
        write_folder(folder, partial(save, cfg, target))
    rows, counts = load(folder)
    told = "; ".join(f"{name}: {count}" for name, count in counts.items() if count)
    (console or Console()).print(
        f"{len(rows)} token rows to train on ({told})", markup=False, highlight=False
    )
    return rows


def cache_key(cfg: Config, target: Target) -> str:
    """16 hexadecimal digits over data, tokenizer, template, length and mask rule."""
    from_target = cfg.data.replies is Replies.target
    if from_target:
        check_replies(cfg, target)
    files = [split_file(cfg, "train"), *([Path(cfg.data.folder) / REPLIES] if from_target else [])]
    for path in files:
        if not path.exists():
            stage = "data.regenerate" if path.name == REPLIES else "data.prepare"
            raise TrafficError(f"{path} does not exist. Run python -m {stage} first.")
    parts = {
        "version": VERSION,
        "data": [sha256_file(path) for path in files],
        "tokenizer": target.tokenizer_fingerprint(),
        "template": target.tokenizer.chat_template,
        "end": sorted(target.eos_ids),
        "max_length": cfg.data.max_length,
        "mask": "reply" if from_target else cfg.data.mask_turns.value,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def check_replies(cfg: Config, target: Target) -> None:
    """Refuses replies of another target: a draft trained on them learns another law."""
    path = Path(cfg.data.folder) / REPLIES_META
    written_by = read_object(path).get("fingerprint")
    if written_by is not None and written_by != target.fingerprint():
        raise TrafficError(
            f"The replies in {cfg.data.folder} were written by another target than {target.name} (its "
            f"weights differ). Choose another data.folder, or remove {REPLIES} and {REPLIES_META} there and "
            "run data.regenerate again."
        )


def build(cfg: Config, target: Target, counts: Counter[str]) -> Iterator[TokenRow]:
    """The rows from their files; counts how many were cut or left out, by reason."""
    made = (
        replied_rows(cfg, counts) if cfg.data.replies is Replies.target else logged_rows(cfg, target, counts)
    )
    for row in made:
        ids, mask = row.input_ids[: cfg.data.max_length], row.loss_mask[: cfg.data.max_length]
        counts["cut at max_length"] += len(ids) < len(row.input_ids)
        if any(mask):
            counts["trained tokens"] += sum(mask)
            yield TokenRow(row.id, row.category, ids, mask)
        else:
            counts["left out, no token to train on"] += 1


def replied_rows(cfg: Config, counts: Counter[str]) -> Iterator[TokenRow]:
    """Train prompts with their replies; a reply to a prompt that changed or left the split is not used."""
    path = Path(cfg.data.folder) / REPLIES
    places = {prompt_key(row): at for at, row in lines_at(path)}  # of several to one prompt, the last
    met = set[int]()
    with open(path, "rb") as file:
        for row in each_row(cfg, "train"):
            met.add(key := prompt_key(row))
            prompt, reply = prompt_in(row), line_at(file, places.get(key))
            if reply.get("prompt_ids") != prompt.ids:
                counts["left out, not answered"] += 1
                continue
            counts["looped (kept)"] += reply["looped"]
            counts["tokenised again from text (kept)"] += reply.get("retokenised", False)
            mask = [0] * len(prompt.ids) + [1] * len(reply["reply_ids"])
            yield TokenRow(prompt.id, prompt.category, prompt.ids + reply["reply_ids"], mask)
    counts["replies to prompts no longer in train"] = len(places.keys() - met)


def prompt_key(row: dict[str, Any]) -> int:
    """What a reply is found by: its prompt's tokens, since ids change when other rows come to share them."""
    return hash(tuple(row["prompt_ids"]))


def line_at(file: IO[bytes], place: int | None) -> dict[str, Any]:
    """The object in the line that begins at `place` bytes; empty for no place."""
    if place is None:
        return {}
    file.seek(place)
    return json.loads(file.readline())


def logged_rows(cfg: Config, target: Target, counts: Counter[str]) -> Iterator[TokenRow]:
    template = Template.of(target)
    for row in each_row(cfg, "train"):
        try:
            ids, mask = template.row(row["messages"], row.get("tools"), cfg.data.mask_turns)
        except Refused as refused:
            counts[f"left out, {refused}"] += 1
            continue
        yield TokenRow(row["id"], row["category"], ids, mask)


def save(cfg: Config, target: Target, folder: Path) -> None:
    """Writes the rows, a thousand at a time, and their counts. `TrafficError` when there is none."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    features = datasets.Features(
        {
            "id": datasets.Value("string"),
            "category": datasets.Value("string"),
            "input_ids": datasets.List(datasets.Value("int32")),
            "loss_mask": datasets.List(datasets.Value("int8")),
        }
    )
    counts: Counter[str] = Counter()
    rows = 0
    with ArrowWriter(path=str(folder / ROWS), features=features) as writer:
        for row in build(cfg, target, counts):
            writer.write(vars(row))
            rows += 1
        writer.finalize()
    if not rows:
        reasons = (
            "; ".join(f"{name}: {count}" for name, count in counts.items() if count) or "no train prompts"
        )
        raise TrafficError(
            f"There is nothing to train on in {cfg.data.folder} ({reasons}). Add traffic, raise "
            "data.max_length, or run python -m data.regenerate."
        )
    write_json(folder / "counts.json", dict(counts))


def load(folder: Path) -> tuple[TokenRows, dict[str, int]]:
    """The rows that `save` wrote, and their counts."""
    if not (folder / ROWS).exists():
        raise TrafficError(
            f"{folder} holds token rows of an earlier version. Remove it: they are made again when they are "
            "needed."
        )
    return TokenRows(folder / ROWS), read_object(folder / "counts.json")


def evenly(rows: Sequence[Prompt], most: int) -> list[Prompt]:
    """At most `most` prompts, one category after the other in turn, each in the file's order."""
    queues: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in rows:
        queues[prompt.category].append(prompt)
    longest = max((len(queue) for queue in queues.values()), default=0)
    turns = [queue[i] for i in range(longest) for _, queue in sorted(queues.items()) if i < len(queue)]
    return turns[:most]
