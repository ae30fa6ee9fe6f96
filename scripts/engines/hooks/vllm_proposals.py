"""Writes every proposal of vLLM's drafter, one line of JSON a round, to the file $LEADOUT_PROPOSALS names.

Loaded inside vLLM's worker by `--worker-extension-cls vllm_proposals.Proposals`, with this folder on
PYTHONPATH; it imports nothing of this repository. For one sequence at a time. Written for 0.32.0, where all
drafters but Medusa's share one base class.
"""

from __future__ import annotations

import json
import os
from typing import Any

from vllm.v1.spec_decode.llm_base_proposer import (  # pyright: ignore[reportMissingImports]
    SpecDecodeBaseProposer,
)
from vllm.v1.spec_decode.medusa import MedusaProposer  # pyright: ignore[reportMissingImports]


class Proposals:
    """vLLM mixes this class into its worker; what counts is that it imports the module."""


def record(proposer: Any, path: str) -> None:
    propose = proposer.propose

    def recorded(self: Any, *args: Any, **words: Any) -> Any:
        made = propose(self, *args, **words)
        tokens = made[0] if isinstance(made, tuple) else made
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in tokens.tolist())
        return made

    proposer.propose = recorded


for drafter in (SpecDecodeBaseProposer, MedusaProposer):
    record(drafter, os.environ["LEADOUT_PROPOSALS"])
