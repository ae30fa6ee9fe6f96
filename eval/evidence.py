"""What is known of a draft before it is predicted: its acceptance, and what rounds with it took.

A measure.json has conditional acceptance by position where the draft's own chain was measured; of any other
setting (trees, several drafters) it has the tokens of a round and how many were drafted, for it alone.
The file of eval.tree has acceptance by depth and rank, from which every static tree follows, and every chain:
that is the tree of first choices. Acceptance may also be supposed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.errors import TrafficError
from configs.schema import Config
from decoding.shapes import Conditions, read_shape
from eval.measure import default_output
from eval.rows import is_chain
from eval.tree import default_file
from models.checkpoint import find_draft

Row = dict[str, Any]


@dataclass(frozen=True)
class Acceptance:
    """α_j of a chain by position, and the same as low and as high as its interval allows."""

    middle: list[float]
    low: list[float]
    high: list[float]
    source: str


@dataclass(frozen=True)
class Evidence:
    """What was measured of the draft at `decode.temperature`, or is supposed."""

    acceptance: Acceptance | None  # None: nothing tells of chains
    rows: list[Row]  # of measure.json, over all prompts; plain ones too
    tree: Conditions | None = None  # what eval.tree saw

    @property
    def vectors(self) -> list[list[float]] | None:
        """[depth][rank], as decoding.sequoia takes them."""
        return None if self.tree is None else self.tree.vectors

    def plain(self, batch: int) -> Row | None:
        """The row of plain decoding at the batch size nearest below."""
        return nearest([row for row in self.rows if row["method"] == "plain"], batch)

    def chain(self, batch: int) -> Row | None:
        """The row of the draft's own chain at the batch size nearest below."""
        return nearest([row for row in self.rows if row["method"] != "plain" and is_chain(row)], batch)

    def other(self, batch: int) -> Row | None:
        """The row of any other setting: a tree, or several drafters."""
        return nearest([row for row in self.rows if row["method"] != "plain" and not is_chain(row)], batch)


def nearest(rows: Sequence[Row], batch: int) -> Row | None:
    """That of the largest batch size up to `batch`, or of the smallest."""
    ascending = sorted(rows, key=lambda row: row["batch_size"])
    return next((row for row in reversed(ascending) if row["batch_size"] <= batch), (ascending or [None])[0])


def evidence_of(config: Config) -> Evidence:
    """What `predict.acceptance` supposes, or what measure.json and eval.tree's file beside it show at
    `decode.temperature`. Raises `TrafficError` if that is nothing."""
    supposed = config.predict.acceptance
    if supposed is not None:
        return Evidence(Acceptance(supposed, supposed, supposed, "predict.acceptance"), [])
    file, tree = measured_file(config), seen_by_tree(config)
    rows = measured_rows(file, config.decode.temperature)
    known = Evidence(None, rows, tree)
    chain = known.chain(1)
    if chain is not None and any(one is not None for one in chain["conditional_acceptance"] or ()):
        return replace(known, acceptance=chain_acceptance(chain, str(file)))
    if known.vectors is not None:
        first = [ranks[0] for ranks in known.vectors]  # a chain is the tree of first choices
        return replace(known, acceptance=Acceptance(first, first, first, str(tree_file(config))))
    if known.other(1) is not None:
        return known
    at = f"decode.temperature={config.decode.temperature:g}"
    raise TrafficError(
        f"{file} {'has no speculative row at ' + at if file.exists() else 'does not exist'}, so acceptance "
        f"is not known. Run python -m eval.measure {at} first (with decode.tree=chain "
        f"decode.drafters=[draft] for chains), or python -m eval.tree {at} for trees, or suppose it, as in "
        "predict.acceptance=[0.8,0.75,0.7]."
    )


def chain_acceptance(row: Row, source: str) -> Acceptance:
    middle = [one for one in row["conditional_acceptance"] if one is not None]
    tau = row["mean_acceptance_length"]
    # In proportion: τ also counts rounds that had less left to draft, so it lies somewhat below E(K).
    whole = expected_tokens(middle, len(middle))
    ends = row["mean_acceptance_length_ci"] or [tau] * 2
    low, high = (scaled(middle, len(middle), whole * end / tau) for end in ends)
    return Acceptance(middle, low, high, source)


def measured_rows(file: Path, temperature: float) -> list[Row]:
    """The rows over all prompts at this temperature; none if there is no such file."""
    if not file.exists():
        return []
    try:
        return [
            row
            for row in json.loads(file.read_bytes())["rows"]
            if row["category"] == row["context_bucket"] == "all" and row["temperature"] == temperature
            if row["method"] == "plain" or row["mean_acceptance_length"] is not None  # None: no rounds
        ]
    except (ValueError, LookupError, TypeError) as error:
        raise TrafficError(
            f"{file} is damaged ({type(error).__name__}: {error}). Run python -m eval.measure again."
        ) from error


def seen_by_tree(config: Config) -> Conditions | None:
    """What eval.tree's file says; None if there is none, or one for another draft, temperature or way of
    choosing children."""
    file = tree_file(config)
    if not file.exists():
        return None
    _, seen = read_shape(file)
    here = (config.decode.temperature, config.decode.proposal.value, str(draft_folder(config)))
    return seen if (seen.temperature, seen.proposal, seen.draft) == here and seen.vectors else None


def draft_folder(config: Config) -> Path:
    return find_draft(config.eval.draft, Path(config.runs), config.experiment)


def tree_file(config: Config) -> Path:
    named = config.decode.tree_file
    return Path(named) if named else default_file(draft_folder(config))


def measured_file(config: Config) -> Path:
    output = config.eval.output
    return (Path(output) if output else default_output(draft_folder(config))) / "measure.json"


# ---- the tokens of a chain ----


def expected_tokens(acceptance: Sequence[float], drafted: int) -> float:
    """E(K). Beyond the positions that are known the last one's acceptance holds on."""
    total = survived = 1.0
    for position in range(drafted):
        survived *= acceptance[min(position, len(acceptance) - 1)]
        total += survived
    return total


def scaled(acceptance: Sequence[float], drafted: int, wanted: float) -> list[float]:
    """`acceptance` times one factor (and at most 1), so that E(K) is `wanted`."""
    low, high = 0.0, 1 / max(min(acceptance), 1e-9)

    def at(factor: float) -> list[float]:
        return [min(1.0, factor * one) for one in acceptance]

    for _ in range(60):
        middle = (low + high) / 2
        if expected_tokens(at(middle), drafted) < wanted:
            low = middle
        else:
            high = middle
    return at(high)
