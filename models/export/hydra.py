"""Hydra's heads are read by no engine: vLLM, SGLang, TensorRT-LLM, llama.cpp and OpenVINO GenAI know heads
that see the hidden state alone (Medusa), and a pull request to the `speculators` format was closed."""

from __future__ import annotations

from typing import Any

LAYOUTS: dict[str, Any] = {}

UNREAD = (
    "No engine reads Hydra heads (their inputs are the tokens drafted before, which engines feed to no "
    "head), so there is nothing to export. Decode with Leadout itself, train method=medusa for vLLM and "
    "TensorRT-LLM, or method=eagle3, which drafts in sequence too and which vLLM and SGLang serve."
)
