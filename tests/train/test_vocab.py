"""The draft vocabulary by predicted speedup: the arithmetic by hand, and the command on a tiny workspace."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from configs.compose import compose
from configs.errors import ConfigError, TrafficError
from data.tokens import TokenRow
from decoding.costs import Curve
from models import save_draft
from models.checkpoint import find_draft
from models.target import Target
from tests.conftest import tiny_draft
from tests.train.test_loop import FEW, train
from train import vocab
from train.vocab import (
    ASSUMED,
    Size,
    choose,
    conditional,
    coverage,
    inside,
    parted,
    predicted,
    recommended,
    sizes_below,
    tokens_per_round,
)


def test_tokens_per_round_by_hand() -> None:
    # 1 + .5 * .8 + .5 * .8 * .5 * .4
    assert tokens_per_round([0.8, 0.4], covered=0.5) == pytest.approx(1.48)
    assert tokens_per_round([0.8, 0.4], covered=1.0) == pytest.approx(2.12)


def test_speedup_by_hand() -> None:
    # t(1) = 10 and t(3) = 12; drafting two tokens takes 2.8: 1.48 * 10 / 14.8.
    found = predicted(1024, 0.5, 2.8, [0.8, 0.4], Curve((1, 3), (10.0, 12.0)))
    assert (found.tokens, found.coverage, found.draft_seconds) == (1024, 0.5, 2.8)
    assert (found.tokens_per_round, found.speedup) == pytest.approx((1.48, 1.0))


def test_conditional_acceptance_from_shares_of_all_rounds() -> None:
    assert conditional([0.5, 0.2, 0.0, 0.0]) == [0.5, pytest.approx(0.4), 0.0, 0.0]


def test_coverage_is_counted() -> None:
    assert coverage([1, 3], np.array([4, 3, 2, 1])) == pytest.approx(0.4)


def test_rows_counted_on_are_not_chosen_from() -> None:
    rows = [TokenRow(str(i), "", [i], [1]) for i in range(21)]
    chosen_from, counted_on = parted(rows)
    assert [row.id for row in counted_on] == ["0", "10", "20"]
    assert {row.id for row in chosen_from} == {str(i) for i in range(21)} - {"0", "10", "20"}
    with pytest.raises(TrafficError, match="too few"):
        parted(rows[:1])


def test_sizes() -> None:
    assert sizes_below(49152) == [1024, 2048, 4096, 8192, 16384, 32768, 49152]
    assert sizes_below(8192) == [1024, 2048, 4096, 8192]


def size(tokens: int, speedup: float) -> Size:
    return Size(tokens, 1.0, 1.0, 1.0, speedup)


def test_the_largest_of_those_as_good_as_the_best_is_recommended() -> None:
    assert recommended([size(1, 1.2), size(2, 1.500), size(4, 1.49), size(8, 1.3)]).tokens == 4
    assert recommended([size(1, 1.2), size(2, 1.500), size(4, 1.48), size(8, 1.3)]).tokens == 2


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab, "SIZES", (8, 16, 32))
    monkeypatch.setattr(vocab, "PASSES", 1)
    monkeypatch.setattr(vocab, "CONTEXT", 100)


needs_few = pytest.mark.usefixtures("few")


def chosen(overrides: list[str], *more: str) -> tuple[dict[str, Any], str]:
    """(what vocab.json holds, what was printed)."""
    console = Console(file=io.StringIO(), width=200)
    file = choose(compose([*overrides, *more]), console)
    return json.loads(file.read_text()), console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


@needs_few
def test_the_whole_command(overrides: list[str]) -> None:
    found, printed = chosen(overrides)

    assert [row["tokens"] for row in found["sizes"]] == [8, 16, 32, 64]
    covered = [row["coverage"] for row in found["sizes"]]
    assert covered == sorted(covered) and covered[0] < 0.5 and covered[-1] == 1.0
    assert all(row["draft_seconds"] > 0 for row in found["sizes"])
    assert set(found["target_seconds"]) == {"1", "4"}
    assert found["acceptances"] == [ASSUMED] * 3
    assert found["rows"] == {"chosen_from": 28, "counted_on": 4}
    assert found["reply_tokens_counted"] == 4 * 24
    assert found["provenance"]["load_average"] is not None
    value = "null" if found["recommended"] == 64 else found["recommended"]
    assert f"method.network.draft_vocab_size={value}" in printed
    assert "64 (all)" in printed


def test_what_the_newest_draft_reached_is_taken_where_there_is_one(overrides: list[str]) -> None:
    config = compose(overrides)
    target = Target.load(config.target)
    draft = Path(config.runs) / "smollm2_cpu" / "20260101-000000" / "draft"
    reached = {"heldout": {"acceptance_by_position": [0.6, 0.3]}, "draft_vocabulary_coverage": 0.75}
    save_draft(draft, tiny_draft(target), target, reached)

    acceptances, origin = inside(config, target, depth=3)
    # .6 / .75 and .3 / .6 / .75, and the last for deeper positions.
    assert acceptances == pytest.approx([0.8, 2 / 3, 2 / 3])
    assert str(draft) in origin
    config.method.name = "eagle1"
    assert inside(config, target, depth=2)[0] == [ASSUMED] * 2


@needs_few
def test_its_file_is_not_in_the_way_of_runs(overrides: list[str]) -> None:
    chosen(overrides)
    run, _ = train(overrides, *FEW)
    assert find_draft("latest", run.parent.parent, "smollm2_cpu") == run / "draft"


@needs_few
def test_a_slow_head_makes_the_vocabulary_small(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocab, "target_seconds", lambda *_: Curve((1, 4), (1.0, 1.0)))
    # 8 ids: a token in at most 2 s; 16: at most 1 + .7 + .49 + .343 tokens in 9 s.
    monkeypatch.setattr(vocab, "drafting_seconds", lambda drafters, *_: {n: (n / 8) ** 3 for n in drafters})
    assert chosen(overrides)[0]["recommended"] == 8
    monkeypatch.setattr(vocab, "drafting_seconds", lambda drafters, *_: {n: 1e-6 for n in drafters})
    assert chosen(overrides)[0]["recommended"] == 64


@needs_few
@pytest.mark.parametrize("method", ["medusa", "eagle1"])
def test_other_methods_with_a_draft_vocabulary(overrides: list[str], method: str) -> None:
    kept = [o for o in overrides if not o.startswith(("+experiment", "method."))]
    found, _ = chosen([f"+experiment=smollm2_{method}", *kept])
    assert found["method"]["name"] == method
    assert len(found["sizes"]) == 4


def test_what_has_no_size_to_choose_is_refused(overrides: list[str]) -> None:
    kept = [o for o in overrides if not o.startswith(("+experiment", "method."))]
    with pytest.raises(ConfigError, match="acceptance_head has no draft vocabulary"):
        chosen(["+experiment=smollm2_acceptance_head", *kept])
    with pytest.raises(ConfigError, match=r"draft_tokens=0 drafts nothing"):
        chosen(overrides, "decode.draft_tokens=0")
