"""OpenVINO's form of a model, which optimum-intel makes of a `transformers` folder, and the program that
serves a target with a draft: OpenVINO GenAI is a library and has no server of its own."""

from __future__ import annotations

import shlex


def commands(target: str, draft: str, draft_tokens: int, *options: str) -> str:
    """Line by line: the target converted, the draft (with further `options`), and a first text."""
    lines = [
        convert(target, "target-ov"),
        convert(draft, "draft-ov", *options),
        ["python", "-c", program(draft_tokens)],
    ]
    return "\n".join(shlex.join(words) for words in lines)


def convert(model: str, output: str, *options: str) -> list[str]:
    words = ["optimum-cli", "export", "openvino", "-m", model, "--task", "text-generation-with-past"]
    return [*words, "--weight-format", "fp16", *options, output]


def program(draft_tokens: int) -> str:
    return (
        'import openvino_genai as g; pipe = g.LLMPipeline("target-ov", "CPU", '
        'scheduler_config=g.SchedulerConfig(), draft_model=g.draft_model("draft-ov", "CPU")); '
        f'print(pipe.generate("Hello!", max_new_tokens=64, num_assistant_tokens={draft_tokens}))'
    )
