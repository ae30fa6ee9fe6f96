"""Replies of OpenVINO GenAI's LLMPipeline, by lines of JSON: settings come first, then one request each.

    in   {"target": FOLDER, "draft": FOLDER or null, "draft_tokens": 4, "threads": 1, "eos_ids": [2]}
    out  {"ready": true}                                       once the models are loaded
    in   {"prompt": [1, 5, 9], "new_tokens": 64}
    out  {"tokens": [...], "iterations": 40}                   the latter where there is a draft

Run by the interpreter of the engine's environment; it imports nothing of this repository. Written for 2026.4.
`iterations` are the target's forwards, the prompt's included. Everything is float32, the KV cache too, which
is of 8 bits on a CPU otherwise.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import openvino as ov  # pyright: ignore[reportMissingImports]
import openvino_genai as genai  # pyright: ignore[reportMissingImports]

CACHE_GIB = 1


def pipeline(settings: dict[str, Any]) -> Any:
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    properties = {**exact, "INFERENCE_NUM_THREADS": settings["threads"]}
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.enable_prefix_caching = False
    drafting = {}
    if settings["draft"] is not None:
        drafting["draft_model"] = genai.draft_model(settings["draft"], "CPU", **properties)
    return genai.LLMPipeline(settings["target"], "CPU", scheduler_config=scheduler, **properties, **drafting)


def reply(pipe: Any, settings: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    config = genai.GenerationConfig()
    config.do_sample = False
    config.max_new_tokens = asked["new_tokens"]
    config.eos_token_id = settings["eos_ids"][0]
    config.stop_token_ids = set(settings["eos_ids"])
    if settings["draft"] is not None:
        config.num_assistant_tokens = settings["draft_tokens"]
    made = pipe.generate(ov.Tensor(np.array([asked["prompt"]], dtype=np.int64)), config)
    tokens = [int(token) for token in made.tokens[0]]
    if settings["draft"] is None:
        return {"tokens": tokens}
    forwards = made.extended_perf_metrics.main_model_metrics.raw_metrics.m_durations
    return {"tokens": tokens, "iterations": len(forwards)}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer

    def say(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    settings = json.loads(sys.stdin.readline())
    pipe = pipeline(settings)
    say({"ready": True})
    for line in sys.stdin:
        say(reply(pipe, settings, json.loads(line)))


if __name__ == "__main__":
    main()
