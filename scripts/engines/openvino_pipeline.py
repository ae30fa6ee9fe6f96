"""OpenVINO GenAI's LLMPipeline, in a process of its own environment (hooks/openvino_worker.py).

Both models are converted once by optimum-intel, with the options that the exporter prints and in float32.
Prompts go as token ids and token ids come back. GenAI counts the target's forwards, from which the rounds
follow; acceptance by position is not reported, and its drafter cannot be listened to.

Read from and run with 2026.4.1, optimum-intel 2.2.0.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.files import write_folder
from scripts.engines import Counts, EngineError, Reply, Setting, fingerprint
from scripts.engines.environment import python_of, versions
from scripts.engines.process import conversing, run_converter

WORKER = Path(__file__).parent / "hooks" / "openvino_worker.py"
DTYPE, WEIGHTS = "float32", "fp32"  # optimum-intel writes no bfloat16
CONVERT = ["optimum-cli", "export", "openvino", "-m"]


class OpenVinoEngine:
    name = "openvino"
    layout = "openvino"

    def versions(self) -> dict[str, str]:
        return versions("openvino", ("openvino-genai", "optimum-intel", "transformers"))

    @contextmanager
    def open(self, setting: Setting, speculate: bool) -> Iterator[OpenVinoServer]:
        if setting.dtype != DTYPE:
            raise EngineError(f"OpenVINO is checked in {DTYPE} alone: set target.dtype={DTYPE}.")
        target, draft, *_ = setting.command.splitlines()
        settings = {
            "target": str(converted("target", target, setting)),
            "draft": str(converted("draft", draft, setting)) if speculate else None,
            "draft_tokens": setting.draft_tokens,
            "threads": setting.threads,
            "eos_ids": list(setting.eos_ids),
        }
        log = setting.work / ("draft.log" if speculate else "plain.log")
        with conversing([str(python_of("openvino")), str(WORKER)], {}, log) as ask:
            ask(settings)
            yield OpenVinoServer(ask, setting)


def converted(name: str, line: str, setting: Setting) -> Path:
    """The folder in `setting.work` that the exporter's command for one model makes, unless it is there."""
    asked = shlex.split(line)
    if asked[:4] != CONVERT or "--weight-format" not in asked:
        raise EngineError(f"The exporter's command is not `{' '.join(CONVERT)} MODEL ...`: {line}")
    model = asked[4]
    folder = setting.work / f"{name}-{fingerprint(model)}"
    log = setting.work / f"convert-{name}.log"
    asked[asked.index("--weight-format") + 1] = WEIGHTS

    def convert(temporary: Path) -> None:
        words = [str(python_of("openvino").with_name(asked[0])), *asked[1:-1], str(temporary)]
        run_converter("optimum-intel", model, words, {"HF_HUB_OFFLINE": "1"}, log)

    if not folder.exists():
        write_folder(folder, convert)
    return folder


@dataclass(frozen=True)
class OpenVinoServer:
    ask: Callable[[dict[str, Any]], dict[str, Any]]
    setting: Setting

    def complete(self, prompt: list[int], new_tokens: int) -> Reply:
        began = time.perf_counter()
        said = self.ask({"prompt": prompt, "new_tokens": new_tokens})
        seconds = time.perf_counter() - began
        return Reply(said["tokens"], seconds, counts(said, self.setting.draft_tokens))


def counts(said: dict[str, Any], draft_tokens: int) -> Counts | None:
    """The first forward is the prompt's and emits one token; each round what it accepts and one more."""
    if "iterations" not in said:
        return None
    rounds = max(said["iterations"] - 1, 0)
    return Counts(rounds, rounds * draft_tokens, accepted=max(len(said["tokens"]) - 1 - rounds, 0))
