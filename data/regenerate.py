"""`python -m data.regenerate`: the target answers the train prompts, in process or behind servers.

A draft has to learn the target's own law, so it is trained on what the target itself writes. Every reply is
appended to replies.jsonl and flushed to the disk as soon as it ends. Run again after any interruption, it
answers what is missing and nothing else. Once nothing is, the replies are put in the order of their prompts,
so that the file does not depend on when each came. replies.meta.json says how the replies were
made; replies of two kinds never share a file.
"""

from __future__ import annotations

import fcntl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from configs.entry import entry
from configs.errors import TrafficError
from configs.schema import Config
from data.generate import Sampling, answers, loops, room
from data.server import Fleet, Reply, urls_of
from data.template import Template
from data.tokens import (
    REPLIES,
    REPLIES_META,
    Prompt,
    each_row,
    prepared,
    prompt_in,
    prompt_key,
    read_object,
)
from data.traffic import Refused
from models.files import append_line, ensure_writable, lines_at, open_append, write_atomic, write_json
from models.target import Target

# Batches within which prompts are sorted by length; an early stop then still leaves a fair sample.
WINDOW = 16
SHOWN = 5  # refusals printed
HOPELESS = 32  # refusals without a single reply that end the run

Row = dict[str, Any]
Record = Callable[[Row, Reply], None]  # takes a reply to the row's prompt
Answering = Callable[[Iterable[Row], Record], None]


@dataclass
class Tally:
    """What a run wrote. Tokens are counted as they come, so that speed holds while replies are unfinished."""

    tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter)


@entry()
def main(config: Config) -> None:
    regenerate(config, Console())


def regenerate(config: Config, console: Console) -> None:
    """Answers every train prompt that has no reply yet (the first `regenerate.max_prompts` of them)."""
    folder = Path(config.data.folder)
    ensure_writable(folder)
    prompts = sum(1 for _ in asked_rows(config))
    how = settings(config)
    check_settings(folder, how)
    with open_append(folder / REPLIES) as file, ours_alone(file):
        missing = unanswered(config)
        if not missing and read_object(folder / REPLIES_META).get("target") == how["target"]:
            console.print(
                f"all {prompts} train prompts in {folder} are answered; nothing to do", highlight=False
            )
            return
        console.print(f"{len(missing)} of {prompts} train prompts to answer", highlight=False)
        tally = Tally()
        answering, fingerprint = answerer(config, console, tally, missing)
        check_settings(folder, how | {"fingerprint": fingerprint})
        write_json(folder / REPLIES_META, how | {"fingerprint": fingerprint})
        began = time.perf_counter()
        with recording(file, len(missing), tally, console) as record:
            answering((row for row in asked_rows(config) if row["id"] in missing), record)
        if tally.counts["replies"] == len(missing):
            put_in_order(folder / REPLIES, asked_rows(config))
    tell(tally, time.perf_counter() - began, console)


# --- what is done, and how -----------------------------------------------------


def asked_rows(config: Config) -> Iterator[Row]:
    """The rows of train.jsonl that are to have replies."""
    return islice(each_row(config, "train"), config.regenerate.max_prompts)


def settings(config: Config) -> dict[str, Any]:
    """How replies are made. `target` is told for the reader; the weights' fingerprint is what must agree."""
    asked, record = config.regenerate, prepared(config)
    return {
        "target": config.target.name,
        "server_model": asked.server_model if urls_of(asked) else None,
        "tokenizer": record.get("tokenizer"),
        "template": record.get("template"),
        "max_new_tokens": asked.max_new_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p if asked.temperature else None,
        "seed": config.seed if asked.temperature else None,
        "extra": dict(asked.extra) or None,
    }


def check_settings(folder: Path, how: dict[str, Any]) -> None:
    """Refuses to add replies of another kind to those that are there."""
    there = read_object(folder / REPLIES_META)
    if not (folder / REPLIES).exists() or not (folder / REPLIES).stat().st_size:
        return
    changed = [name for name in how if name != "target" and how[name] != there.get(name)]
    if changed:
        told = "; ".join(f"{name} was {short(there.get(name))}, now {short(how[name])}" for name in changed)
        raise TrafficError(
            f"The replies in {folder} were made otherwise: {told}. To keep them, set these back; to start "
            f"over, remove {REPLIES} and {REPLIES_META} there, or choose another data.folder."
        )


def short(value: Any) -> str:
    """Fingerprints by their beginning."""
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)


def unanswered(config: Config) -> dict[str, int]:
    """The ids of the rows whose very prompt has no reply yet, and their prompts' lengths."""
    done = {prompt_key(row) for _, row in lines_at(Path(config.data.folder) / REPLIES)}
    return {row["id"]: len(row["prompt_ids"]) for row in asked_rows(config) if prompt_key(row) not in done}


@contextmanager
def ours_alone(file: TextIO) -> Iterator[None]:
    """Keeps a second process from answering the same prompts. The system frees the lock with the process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TrafficError(
            f"Another process is writing {file.name}. Let it finish, or stop it; one process asks several "
            "servers by regenerate.servers."
        ) from None
    except OSError:  # a file system without locks
        pass
    yield


# --- who answers ---------------------------------------------------------------


def answerer(
    config: Config, console: Console, tally: Tally, missing: dict[str, int]
) -> tuple[Answering, str | None]:
    """(what gives each row's reply to a `Record`, the target's fingerprint; None behind servers)."""
    if urls_of(config.regenerate):
        template = Template.load(config.target)
        check_template(config, template)
        return lambda rows, record: by_servers(config, template, rows, record, tally, console), None
    target = Target.load(config.target)
    check_template(config, Template.of(target))
    if missing:
        longest = max(missing, key=missing.__getitem__)
        room(
            target, longest, missing[longest], config.regenerate.max_new_tokens
        )  # refuses now, not hours later
    return lambda rows, record: in_process(config, target, rows, record, tally), target.fingerprint()


def check_template(config: Config, template: Template) -> None:
    record = prepared(config)
    now = {"tokenizer": template.tokenizer_fingerprint(), "template": template.fingerprint()}
    for name, fingerprint in now.items():
        if record.get(name, fingerprint) != fingerprint:
            raise TrafficError(
                f"{config.data.folder} was prepared with another {name} than {template.name} has. Run "
                "python -m data.prepare again with this target, or choose another data.folder."
            )


def in_process(config: Config, target: Target, rows: Iterable[Row], record: Record, tally: Tally) -> None:
    asked = config.regenerate
    sampling = Sampling(asked.max_new_tokens, asked.temperature, asked.top_p, config.seed)
    taken: dict[str, Row] = {}

    def prompts() -> Iterator[Prompt]:
        for row in in_windows(rows, WINDOW * asked.batch_size):
            taken[row["id"]] = row
            yield prompt_in(row)

    def count(tokens: int) -> None:
        tally.tokens += tokens

    for answer in answers(target, prompts(), sampling, asked.batch_size, on_tokens=count):
        record(taken.pop(answer.prompt.id), Reply(answer.reply_ids, answer.finish))


def in_windows(rows: Iterable[Row], size: int) -> Iterator[Row]:
    """The rows sorted by prompt length within each run of `size` of them."""
    coming = iter(rows)
    while window := list(islice(coming, size)):
        yield from sorted(window, key=lambda row: len(row["prompt_ids"]))


def by_servers(
    config: Config, template: Template, rows: Iterable[Row], record: Record, tally: Tally, console: Console
) -> None:
    def say(told: str) -> None:
        console.print(told, markup=False, highlight=False, soft_wrap=True)

    def take(row: Row, result: Reply | Refused) -> None:
        if isinstance(result, Reply):
            tally.tokens += len(result.ids)
            record(row, result)
            return
        tally.counts["refused"] += 1
        if tally.counts["refused"] <= SHOWN:
            say(f"{row['id']}: {result}; skipped")
        if tally.counts["refused"] == HOPELESS and not tally.counts["replies"]:
            raise refused_all(f"the first {HOPELESS} prompts")

    Fleet(config.regenerate, template, config.seed, say).answer(rows, take)


def refused_all(which: str) -> TrafficError:
    return TrafficError(
        f"The server refused {which}; the first reasons stand above. Mend them and run again."
    )


# --- writing and telling -------------------------------------------------------


@contextmanager
def recording(file: TextIO, expected: int, tally: Tally, console: Console) -> Iterator[Record]:
    """What takes replies: each is on the disk when it returns."""
    columns = (
        TextColumn("answering"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    began = time.perf_counter()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=expected, speed="")

        def record(row: Row, reply: Reply) -> None:
            line = line_of(row, reply)
            append_line(file, line)
            tally.counts.update(
                {
                    "replies": 1,
                    f"finish {reply.finish}": 1,
                    "looped": line["looped"],
                    "retokenised": reply.retokenised,
                    "differs": reply.differs,
                }
            )
            speed = tally.tokens / (time.perf_counter() - began)
            progress.update(task, advance=1, speed=f"{speed:.0f} tok/s")

        yield record


def line_of(row: Row, reply: Reply) -> dict[str, Any]:
    """One line of replies.jsonl."""
    line = {
        "id": row["id"],
        "category": row["category"],
        "prompt_ids": row["prompt_ids"],
        "reply_ids": reply.ids,
        "finish": reply.finish,
        "looped": loops(reply.ids[:-1] if reply.finish == "eos" else reply.ids),
    }
    return line | ({"retokenised": True, "server_tokens": reply.counted} if reply.retokenised else {})


def put_in_order(path: Path, rows: Iterable[Row]) -> None:
    """Puts the replies in the order of `rows`, one for each; those to other prompts follow as they stand."""
    places = {prompt_key(row): at for at, row in lines_at(path)}
    order = [place for row in rows if (place := places.pop(prompt_key(row), None)) is not None]
    order += sorted(places.values())

    def write(temporary: Path) -> None:
        with open(path, "rb") as old, open(temporary, "wb") as new:
            for place in order:
                old.seek(place)
                new.write(old.readline())

    write_atomic(path, write)


def tell(tally: Tally, seconds: float, console: Console) -> None:
    counts = tally.counts
    console.print(
        f"{counts['replies']} replies, {tally.tokens} tokens in {seconds:.1f} s "
        f"({tally.tokens / seconds:.0f} tok/s); {counts['finish eos']} ended by themselves, "
        f"{counts['finish length']} at the limit, {counts['looped']} end in a loop",
        highlight=False,
    )
    if counts["retokenised"]:
        console.print(
            f"{counts['retokenised']} came as text and were tokenised again, {counts['differs']} of them to "
            "another number of tokens than the server counts",
            highlight=False,
        )
    if counts["refused"]:
        console.print(
            f"{counts['refused']} prompts were refused and have no reply; the next run asks again",
            highlight=False,
        )
    if not counts["replies"] and counts["refused"]:
        raise refused_all("every prompt")


if __name__ == "__main__":
    main()
