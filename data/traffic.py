"""Traffic in: conversations out of every form that logs and datasets come in.

Five forms are read, told apart row by row: OpenAI `messages`, ShareGPT `conversations`, Spec-Bench `turns`,
logged OpenAI pairs `{"request": ..., "response": ...}`, each from JSON lines (plain or gzip), a JSON array,
or a `datasets` name. A row that cannot be used is `Refused` with a reason: the first few are printed with
file and line, all are counted, and the rest is read on.

Two hashes of the normalised text make data reproducible while it grows. `identity` (the whole prompt) finds
duplicates and orders rows; `opening` (the prompt up to its first user turn) decides the split, so that a
logged conversation that appears once per turn never lies on both sides.

Rows are read one by one, out of a JSON array too, and none is kept.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, TextIO

from rich.console import Console

from configs.errors import TrafficError
from configs.schema import Source
from models.files import sha256_file

Message = dict[str, Any]

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
FILE_ENDINGS = (".jsonl", ".json", ".gz", ".ndjson")
NO_CATEGORY = "uncategorised"
# The kinds of MT-bench's questions 81 to 160, which are one of Spec-Bench's six categories.
MT_BENCH = frozenset(
    {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
)
SHOWN = 5  # refused lines printed per source
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PEEKED = 64  # bytes in which a JSON array shows its bracket
CHUNK = 1 << 16  # characters of a JSON array read at a time
TOO_DEEP = "nested too deeply"
AFTER_NUMBER = frozenset(",] \t\r\n")


class Refused(Exception):
    """One row that cannot be used. Its text is the reason it is counted under: no content in it."""


@dataclass(frozen=True)
class Conversation:
    """`messages` in OpenAI chat form: a prompt, and where they end with assistant turns, a logged reply."""

    id: str
    category: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    response_format: dict[str, Any] | None = None
    turns: list[str] | None = None  # Spec-Bench: every user turn; `messages` holds the first

    @property
    def prompt(self) -> list[Message]:
        """The messages that a reply answers."""
        return prompt_of(self.messages)

    @property
    def identity(self) -> str:
        """SHA-256 of the normalised prompt."""
        return digest(self.prompt)

    @property
    def opening(self) -> str:
        """SHA-256 of the normalised prompt up to and including its first user turn."""
        prompt = self.prompt
        first = next(i for i, message in enumerate(prompt) if message["role"] == "user")
        return digest(prompt[: first + 1])


@dataclass
class Reading:
    """What a source held, once it is read through: all its `rows`, and those refused (`bad`), by reason."""

    path: str
    sha256: str
    rows: int = 0
    bad: Counter[str] = field(default_factory=Counter)


def read(source: Source, max_bad_fraction: float, console: Console) -> tuple[Reading, Iterator[Conversation]]:
    """A source's conversations, and the account of it that is kept while they are taken.

    `TrafficError`: missing; and when all are taken: empty, or a larger share refused than `max_bad_fraction`.
    """
    sha256, rows = open_source(source)
    reading = Reading(path=source.path, sha256=sha256)
    return reading, conversations(rows, reading, source.category, max_bad_fraction, console)


def conversations(
    rows: Rows, reading: Reading, category: str | None, max_bad_fraction: float, console: Console
) -> Iterator[Conversation]:
    for where, row in rows:
        reading.rows += 1
        try:
            if isinstance(row, Refused):
                raise row
            made = conversation(row, category)
        except (Refused, RecursionError) as error:
            reason = str(error) if isinstance(error, Refused) else TOO_DEEP
            reading.bad[reason] += 1
            if reading.bad.total() <= SHOWN:
                console.print(f"{where}: {reason}; skipped", markup=False, highlight=False, soft_wrap=True)
        else:
            yield made
    check(reading, max_bad_fraction)


def check(reading: Reading, max_bad_fraction: float) -> None:
    if reading.rows == 0:
        raise TrafficError(
            f"{reading.path} holds no rows. Give it at least one line of JSON, such as "
            '{"messages": [{"role": "user", "content": "..."}]}, or take it out of data.sources.'
        )
    bad = reading.bad.total()
    if bad > max_bad_fraction * reading.rows or bad == reading.rows:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in reading.bad.most_common(3))
        raise TrafficError(
            f"{bad} of the {reading.rows} rows of {reading.path} cannot be used: {reasons}. Mend the file, "
            f"or raise data.max_bad_fraction (now {max_bad_fraction}) if the other rows are worth keeping."
        )


# --- one row -------------------------------------------------------------------


def conversation(row: Any, category: str | None = None) -> Conversation:
    """The conversation in one row of any of the forms; `Refused` with the reason otherwise."""
    if not isinstance(row, dict):
        raise Refused("not a JSON object")
    row = without_nulls(row)
    asked: dict[str, Any] = row
    turns = None
    if "request" in row:
        asked, messages = row["request"], logged_pair(row)
    elif "messages" in row:
        messages = chat(row["messages"])
    elif "conversations" in row:
        messages = chat([from_sharegpt(turn) for turn in list_of(row["conversations"], "conversations")])
    elif "turns" in row:
        turns = [text(turn) for turn in list_of(row["turns"], "turns")]
        messages = chat([{"role": "user", "content": turn} for turn in turns[:1]])
    else:
        raise Refused("none of messages, conversations, turns or request is there")
    if not any(message["role"] == "user" for message in prompt_of(messages)):
        raise Refused("no user turn")
    named = next((row[key] for key in ("id", "question_id") if key in row), None)
    made = Conversation(
        id=str(named) if named is not None else digest(prompt_of(messages))[:16],
        category=category_of(row) or category or NO_CATEGORY,
        messages=messages,
        tools=objects(asked.get("tools"), "tools"),
        response_format=asked.get("response_format"),
        turns=turns,
    )
    if not encodable(vars(made)):
        raise Refused("half of a surrogate pair beside the content")
    return made


def category_of(row: dict[str, Any]) -> str | None:
    """The row's own category; of Spec-Bench's files (Xia et al. 2024) one of the six that they are reported
    in."""
    name, number = str(row.get("category") or ""), row.get("question_id")
    if "turns" in row and name in MT_BENCH and isinstance(number, int) and 81 <= number <= 160:
        return "mt_bench"
    return name or None


def chat(turns: Any) -> list[Message]:
    """Checked messages: known roles, textual content; content may be missing only beside tool calls."""
    return [message(turn) for turn in list_of(turns, "messages")]


def message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise Refused("a message is not an object")
    role = turn.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise Refused(f"unknown role {str(role)[:40]!r}")
    made = {**turn, "content": text(turn.get("content"))}
    if calls := objects(turn.get("tool_calls"), "tool_calls"):
        made["tool_calls"] = [with_arguments(call) for call in calls]
    elif role != "tool" and not made["content"].strip():
        raise Refused("empty content")
    return made


def text(content: Any) -> str:
    """Content as a string. Text parts are joined by newlines, as vLLM does for templates of strings."""
    if content is None:
        return ""
    if isinstance(content, list):
        return "\n".join(part_text(part) for part in content)
    if not isinstance(content, str):
        raise Refused(f"content is of type {type(content).__name__}, not text")
    if not encodable(content):
        raise Refused("content holds half of a surrogate pair")
    return content


def encodable(value: Any) -> bool:
    """Whether all text in `value` can be written as UTF-8. JSON can escape half of a surrogate pair, which
    cannot."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


def part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = str(part.get("type"))[:40] if isinstance(part, dict) else type(part).__name__
    if kind not in ("text", "input_text", "output_text"):
        raise Refused(f"content part {kind!r} is not text (only text is supported)")
    return text(part.get("text"))


def with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """OpenAI logs carry a call's arguments as a JSON string; templates expect the object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def from_sharegpt(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise Refused("a turn is not an object")
    role = turn.get("from", turn.get("role"))
    role = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    return {"role": role, "content": turn.get("value", turn.get("content"))}


def logged_pair(row: dict[str, Any]) -> list[Message]:
    """The request's messages and the response's first choice."""
    request, response = row["request"], row.get("response")
    if not isinstance(request, dict):
        raise Refused("request is not an object")
    messages = chat(request.get("messages"))
    if response is None:
        return messages
    try:
        reply = response["choices"][0]["message"]
    except (KeyError, IndexError, TypeError):
        raise Refused("response has no choices[0].message") from None
    return [*messages, message({"role": "assistant", **reply} if isinstance(reply, dict) else reply)]


def list_of(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise Refused(f"{name} is of type {type(value).__name__}, not a list")
    if not value:
        raise Refused(f"{name} is empty")
    return value


def objects(value: Any, name: str) -> list[dict[str, Any]] | None:
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Refused(f"{name} is not a list of objects")
    return value


def without_nulls(value: Any) -> Any:
    """Drops absent keys: Arrow tables, and some clients, write null for every key that another row has."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


# --- identity ------------------------------------------------------------------


def prompt_of(messages: list[Message]) -> list[Message]:
    """The messages before the assistant turns that end a conversation."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return messages[:end]


def digest(messages: list[Message]) -> str:
    """SHA-256 over roles, tool calls and content, in NFC and each run of white space made one space."""
    canonical = [
        [message["role"], normalised(message["content"]), message.get("tool_calls")] for message in messages
    ]
    return hashlib.sha256(
        json.dumps(canonical, sort_keys=True, ensure_ascii=False).encode("utf-8", "replace")
    ).hexdigest()


def normalised(content: str) -> str:
    return " ".join(unicodedata.normalize("NFC", content).split())


def share(hexadecimal: str) -> float:
    """A hash as a number in [0, 1)."""
    return int(hexadecimal[:13], 16) / 16**13  # 52 bits: exact in a float


# --- files and datasets --------------------------------------------------------


Rows = Iterator[tuple[str, Any]]  # (where, the parsed row, or a Refused)


def open_source(source: Source) -> tuple[str, Rows]:
    """(content hash, rows) of a file, or of a `datasets` name written `name` or `name:configuration`."""
    path = Path(source.path)
    if path.is_file():
        return sha256_file(path), islice(file_rows(path), source.max_rows)
    if not path.is_dir() and (path.is_absolute() or path.name.lower().endswith(FILE_ENDINGS)):
        raise TrafficError(
            f"There is no file {source.path} (looked in {Path.cwd()}). Correct the path in data.sources, or "
            "fetch the file; a `datasets` name has no file ending."
        )
    content, rows = load_dataset(source)
    numbered = ((f"{source.path}[{index}]", row) for index, row in enumerate(rows))
    return hashlib.sha256(content.encode()).hexdigest(), islice(numbered, source.max_rows)


def load_dataset(source: Source) -> tuple[str, Iterator[Any]]:
    """(what tells its content from another's, its rows)."""
    import datasets  # here, because it takes a second that files need not wait for

    name, _, configuration = source.path.partition(":")
    try:
        if source.streaming:
            builder = datasets.load_dataset_builder(name, configuration or None)
            found = builder.as_streaming_dataset(split=source.split)
            return f"{builder.hash} {builder.config_id} {source.split}", streamed(source, found)
        table = datasets.load_dataset(name, configuration or None, split=source.split)
        return str(table._fingerprint), iter(table)
    except Exception as error:  # of many libraries: hub, file systems, parsers
        raise unloadable(source, error) from error


def streamed(source: Source, rows: Iterable[Any]) -> Iterator[Any]:
    """The rows; what breaks on the way is told as what breaks at the beginning."""
    coming = iter(rows)
    while True:
        try:
            row = next(coming)
        except StopIteration:
            return
        except Exception as error:
            raise unloadable(source, error) from error
        yield row


def unloadable(source: Source, error: Exception) -> TrafficError:
    reason = " ".join(str(error).split())[:300]
    return TrafficError(
        f"{source.path} is neither a file here nor a dataset that could be loaded (split "
        f"{source.split!r}): {type(error).__name__}: {reason}. Correct the name or the split, write "
        "NAME:CONFIGURATION where one is needed, or download it and give the path of a JSONL file."
    )


def file_rows(path: Path) -> Rows:
    """Rows of JSON lines or of one JSON array, in UTF-8, plain or gzip."""
    with open(path, "rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path, "rb") if zipped else open(path, "rb") as file:
            if file.peek(PEEKED).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
                yield from array_rows(path, file)
            else:
                yield from parsed_lines(path, file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TrafficError(
            f"{path} is not a whole gzip file ({error}). It was cut short or damaged: fetch or compress it "
            "again."
        ) from error


def parsed_lines(path: Path, lines: Iterable[bytes]) -> Rows:
    for number, line in enumerate(lines, start=1):
        line = line.removeprefix(BYTE_ORDER_MARK).strip() if number == 1 else line.strip()
        if line:
            yield f"{path}:{number}", parsed(line)


def array_rows(path: Path, file: IO[bytes] | gzip.GzipFile) -> Rows:
    """ShareGPT dumps are one JSON array."""
    rows = elements(io.TextIOWrapper(file, encoding="utf-8-sig"))
    index = 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except (ValueError, RecursionError) as error:
            raise TrafficError(
                f"{path} opens a JSON array that does not parse after {index} rows ({error}). Mend it, or "
                "write one object per line."
            ) from None
        yield f"{path}[{index}]", row
        index += 1


def elements(text: TextIO) -> Iterator[Any]:
    """The elements of the JSON array that `text` is, one by one. Raises `ValueError` where it is none."""
    decode = json.JSONDecoder().raw_decode
    held = text.read(CHUNK).lstrip()[1:]  # without its bracket
    before = "["  # what stands before what is held: the bracket, an element ("]" may follow both) or a comma
    while True:
        held = held.lstrip() or text.read(CHUNK)
        if not held:
            raise ValueError("it ends without a closing bracket")
        if held[0].isspace():
            continue
        if held[0] == "]" and before != ",":
            if (held[1:] + text.read(CHUNK)).strip():
                raise ValueError("something follows its closing bracket")
            return
        if before == "element":
            if held[0] != ",":
                raise ValueError("there is no comma between two rows")
            held, before = held[1:], ","
            continue
        try:
            element, end = decode(held)
        except ValueError:
            if not (more := text.read(max(len(held), CHUNK))):  # as much again: few tries
                raise
            held += more
            continue
        cut = isinstance(element, int | float) and held[end : end + 1] not in AFTER_NUMBER
        if cut and (more := text.read(CHUNK)):  # perhaps its other digits
            held += more
            continue
        yield element
        held, before = held[end:], "element"


def parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return Refused("not UTF-8")
    except ValueError:
        return Refused("malformed JSON")
    except RecursionError:
        return Refused(TOO_DEEP)
