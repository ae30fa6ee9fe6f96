"""`python -m data.regenerate`: the target answers the train prompts, in process or behind a server.

A draft has to learn the target's own law, so it is trained on what the target itself writes. Every reply is
appended to replies.jsonl and flushed to the disk as soon as it ends. Run again after any interruption, it
answers what is missing and nothing else. replies.meta.json says how the replies were made; replies of two
kinds never share a file.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from configs.entry import entry
from configs.errors import TrafficError
from configs.schema import Config
from data.generate import Sampling, answers, loops
from data.server import Server, concurrently
from data.template import Template
from data.tokens import REPLIES, REPLIES_META, Prompt, prepared, read_object, split_rows
from data.traffic import Refused
from models.files import append_line, ensure_writable, open_append, read_lines, write_json
from models.target import Target

WINDOW = (
    16  # batches within which prompts are sorted by length; an early stop then still leaves a fair sample
)

Row = dict[str, Any]
Reply = tuple[Row, list[int], str]  # (the prompt's row, reply ids, finish)


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
    rows = split_rows(config, "train")[: config.regenerate.max_prompts]
    how = settings(config)
    check_settings(folder, how)
    missing = unanswered(folder, rows)
    if not missing and read_object(folder / REPLIES_META).get("target") == how["target"]:
        console.print(
            f"all {len(rows)} train prompts in {folder} are answered; nothing to do", highlight=False
        )
        return
    console.print(f"{len(missing)} of {len(rows)} train prompts to answer", highlight=False)
    tally = Tally()
    answering, fingerprint = answerer(config, console, tally)
    check_settings(folder, how | {"fingerprint": fingerprint})
    write_json(folder / REPLIES_META, how | {"fingerprint": fingerprint})
    began = time.perf_counter()
    write_replies(folder / REPLIES, answering(missing), len(missing), tally, console)
    tell(tally, time.perf_counter() - began, console)


# --- what is done, and how -----------------------------------------------------


def settings(config: Config) -> dict[str, Any]:
    """How replies are made. `target` is told for the reader; the weights' fingerprint is what must agree."""
    asked, record = config.regenerate, prepared(config)
    return {
        "target": config.target.name,
        "server_model": asked.server_model if asked.server else None,
        "tokenizer": record.get("tokenizer"),
        "template": record.get("template"),
        "max_new_tokens": asked.max_new_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p if asked.temperature else None,
        "seed": config.seed if asked.temperature else None,
    }


def check_settings(folder: Path, how: dict[str, Any]) -> None:
    """Refuses to add replies of another kind to those that are there."""
    there = read_object(folder / REPLIES_META)
    if not (folder / REPLIES).exists():
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


def unanswered(folder: Path, rows: list[Row]) -> list[Row]:
    """The rows whose very prompt has no reply yet."""
    path = folder / REPLIES
    done = {reply["id"]: reply["prompt_ids"] for reply in read_lines(path)} if path.exists() else {}
    return [row for row in rows if done.get(row["id"]) != row["prompt_ids"]]


# --- who answers ---------------------------------------------------------------


def answerer(
    config: Config, console: Console, tally: Tally
) -> tuple[Callable[[list[Row]], Iterator[Reply]], str | None]:
    """(a function from rows to replies as they end, the target's fingerprint; None behind a server)."""
    if config.regenerate.server is not None:
        template = Template.load(config.target)
        check_template(config, template)
        server = Server(config.regenerate, template, config.seed)
        return lambda rows: from_server(server, rows, config.regenerate.concurrency, console, tally), None
    target = Target.load(config.target)
    check_template(config, Template.of(target))
    return lambda rows: in_process(config, target, rows, tally), target.fingerprint()


def check_template(config: Config, template: Template) -> None:
    record = prepared(config)
    now = {"tokenizer": template.tokenizer_fingerprint(), "template": template.fingerprint()}
    for name, fingerprint in now.items():
        if record.get(name, fingerprint) != fingerprint:
            raise TrafficError(
                f"{config.data.folder} was prepared with another {name} than {template.name} has. Run "
                "python -m data.prepare again with this target, or choose another data.folder."
            )


def in_process(config: Config, target: Target, rows: list[Row], tally: Tally) -> Iterator[Reply]:
    asked = config.regenerate
    sampling = Sampling(asked.max_new_tokens, asked.temperature, asked.top_p, config.seed)
    by_id = {row["id"]: row for row in rows}
    prompts = [
        Prompt(row["id"], row["category"], row["prompt_ids"])
        for row in in_windows(rows, WINDOW * asked.batch_size)
    ]

    def count(tokens: int) -> None:
        tally.tokens += tokens

    for answer in answers(target, prompts, sampling, asked.batch_size, on_tokens=count):
        yield by_id[answer.prompt.id], answer.reply_ids, answer.finish


def in_windows(rows: list[Row], size: int) -> list[Row]:
    """The rows sorted by prompt length within each run of `size` of them."""
    starts = range(0, len(rows), size)
    return [
        row
        for start in starts
        for row in sorted(rows[start : start + size], key=lambda row: len(row["prompt_ids"]))
    ]


def from_server(
    server: Server, rows: list[Row], concurrency: int, console: Console, tally: Tally
) -> Iterator[Reply]:
    def ask(row: Row) -> tuple[Row, list[int], str] | tuple[Row, Refused]:
        try:
            return row, *server.answer(row)
        except Refused as refused:
            return row, refused

    with closing(concurrently(ask, rows, concurrency)) as results:
        for result in results:
            if len(result) == 2:
                row, refused = result
                tally.counts["refused"] += 1
                if tally.counts["refused"] <= 5:
                    console.print(
                        f"{row['id']}: {refused}; skipped", markup=False, highlight=False, soft_wrap=True
                    )
                continue
            tally.tokens += len(result[1])
            yield result


# --- writing and telling -------------------------------------------------------


def write_replies(
    path: Path, replies: Iterator[Reply], expected: int, tally: Tally, console: Console
) -> None:
    """Appends each reply, on the disk before the next is taken."""
    columns = (
        TextColumn("answering"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    began = time.perf_counter()
    with (
        open_append(path) as file,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("", total=expected, speed="")
        for row, reply_ids, finish in replies:
            looped = loops(reply_ids[:-1] if finish == "eos" else reply_ids)
            append_line(
                file,
                {
                    "id": row["id"],
                    "category": row["category"],
                    "prompt_ids": row["prompt_ids"],
                    "reply_ids": reply_ids,
                    "finish": finish,
                    "looped": looped,
                },
            )
            tally.counts.update({"replies": 1, f"finish {finish}": 1, "looped": int(looped)})
            speed = tally.tokens / (time.perf_counter() - began)
            progress.update(task, advance=1, speed=f"{speed:.0f} tok/s")


def tell(tally: Tally, seconds: float, console: Console) -> None:
    counts = tally.counts
    console.print(
        f"{counts['replies']} replies, {tally.tokens} tokens in {seconds:.1f} s "
        f"({tally.tokens / seconds:.0f} tok/s); {counts['finish eos']} ended by themselves, "
        f"{counts['finish length']} at the limit, {counts['looped']} end in a loop",
        highlight=False,
    )
    if counts["refused"]:
        console.print(
            f"{counts['refused']} prompts were refused and have no reply; the next run asks again",
            highlight=False,
        )
    if not counts["replies"] and counts["refused"]:
        raise TrafficError(
            "The server refused every prompt; the first reasons stand above. Mend them and run again."
        )


if __name__ == "__main__":
    main()
