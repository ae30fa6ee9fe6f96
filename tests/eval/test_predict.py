"""The arithmetic by hand; a prediction from a data sheet, and one from this machine's own times."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from configs.errors import TrafficError
from configs.schema import (
    Config,
    DataConfig,
    DecodeConfig,
    Dtype,
    EvalConfig,
    MethodConfig,
    PredictConfig,
    TargetConfig,
)
from decoding.costs import Costs, Curve
from eval.predict import (
    Acceptance,
    Row,
    Times,
    advice,
    expected_tokens,
    predict,
    row_of,
    scaled,
    speedup,
)
from models.files import write_json
from tests.eval.samples import LLAMA_8B, LLAMA_70B, tiny_pair

RUN = Path("tiny") / "20260101-000000"
# Verifying costs a tenth more a token, drafting a twentieth of a forward a token.
TIMES = Times(plain=1.0, verify=(1.1, 1.2, 1.3), draft=(0.05, 0.1, 0.15), host=0.05)


def test_expected_tokens() -> None:
    assert expected_tokens([0.5], 0) == 1
    assert expected_tokens([0.5], 2) == 1.75  # the last position holds on
    assert expected_tokens([0.8, 0.5, 0.25], 3) == pytest.approx(1 + 0.8 + 0.4 + 0.1)


def test_speedup_and_the_best_length() -> None:
    assert speedup([0.5], 1, TIMES) == pytest.approx(1.5 / 1.2)
    assert speedup([0.5], 2, TIMES) == pytest.approx(1.75 / 1.35)
    assert speedup([0.5], 3, TIMES) == pytest.approx(1.875 / 1.5)
    best = [row_of(1, Acceptance([a], [a], [a], ""), [TIMES]).drafted for a in (0.5, 0.9, 0.1)]
    assert best == [2, 3, 1]


def test_scaled_acceptance_emits_what_is_wanted() -> None:
    found = scaled([0.8, 0.4], 2, 1.6)
    assert expected_tokens(found, 2) == pytest.approx(1.6)
    assert found[0] == pytest.approx(2 * found[1])
    assert scaled([0.8, 0.4], 2, 3.0) == pytest.approx([1.0, 1.0])  # all there is


def test_a_rows_interval_spans_acceptance_and_times() -> None:
    slow = Times(1.0, (1.5,), (0.5,), 0.0)
    fast = Times(1.0, (1.0,), (0.0,), 0.0)
    row = row_of(4, Acceptance([0.5], [0.4], [0.6], ""), [slow, fast])
    assert (row.batch, row.drafted, row.expected_tokens) == (4, 1, 1.5)
    assert (row.low, row.high) == (pytest.approx(1.4 / 2), pytest.approx(1.6))
    assert row.speedup == pytest.approx((0.75 * 1.5) ** 0.5)


def test_advice_says_where_it_pays() -> None:
    rows = [
        Row(1, 4, 2.0, 1.8, 1.6, 2.0, []),
        Row(8, 2, 1.7, 1.1, 0.9, 1.3, []),
        Row(64, 1, 1.4, 0.8, 0.7, 0.95, []),
    ]
    said = " ".join(advice(rows, Row(1, 5, 2.3, 2.1, 1.9, 2.3, [])))
    assert "Batch 1: K = 4 is best, 1.80x (1.60 to 2.00)." in said
    assert "make it 2.10x, with K = 5" in said
    assert "pays at batch sizes up to 1 of those asked" in said
    assert "does not pay at batch 64, where it is at most 0.95x" in said
    assert "open at every batch size" in " ".join(advice(rows[1:2], rows[1]))


def run(config: Config) -> tuple[dict[str, Any], str]:
    screen = io.StringIO()
    return predict(config, Console(file=screen, width=140)), screen.getvalue()


def llama(folder: Path, shape: Any, acceptance: list[float], **asked: Any) -> Config:
    shape.save_pretrained(folder / "target")
    return Config(
        experiment="llama",
        runs=str(folder / "runs"),
        target=TargetConfig(name=str(folder / "target")),
        method=MethodConfig(name="eagle3", network={"draft_vocab_size": 32000}),
        predict=PredictConfig(acceptance=acceptance, **asked),
    )


def test_a_published_speedup_lies_in_the_predicted_range(tmp_path: Path) -> None:
    # EAGLE-3, Llama-3.1-8B, chains of 3 on an H100 (SGLang): 1.81x at batch 2. The acceptance is supposed.
    config = llama(tmp_path, LLAMA_8B, [0.8, 0.75, 0.7], device="h100", draft_tokens=3, batches=[2])
    found, screen = run(config)
    (row,) = found["rows"]
    assert row["low"] < 1.81 < row["high"]
    assert found["memory"][0]["fits"]
    assert "predicted, times: h100" in screen
    assert json.loads((tmp_path / "runs" / "llama" / "predict.json").read_text())["rows"] == found["rows"]


def test_a_large_targets_published_speedup_too(tmp_path: Path) -> None:
    # EAGLE-3, Llama-3.3-70B: 4.11x with 5.63 tokens a round at batch 1; here a chain that emits 5.4.
    alpha = [0.88, 0.87, 0.86, 0.86]
    config = llama(tmp_path, LLAMA_70B, alpha, device="h100", devices=8, batches=[1, 256], context=1024)
    one, many = run(config)[0]["rows"]
    assert one["expected_tokens"] == pytest.approx(5.45, abs=0.01)
    assert one["low"] < 4.11 < one["high"]
    assert many["drafted"] < one["drafted"]
    assert many["speedup"] < one["speedup"]


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    asked = {"device": "h100", "draft_tokens": 2, "batches": [1]}
    config = llama(tmp_path, LLAMA_70B, [0.8], **asked)
    found, screen = run(config)
    assert not found["memory"][0]["fits"]
    assert "Batch 1 needs 14" in screen  # 141 GB of weights, and the draft
    config.predict.devices = 8
    assert run(config)[0]["memory"][0]["fits"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A pair with a measurement, on a machine whose times are those of `costs`."""
    tiny_pair(tmp_path, RUN)
    row = {
        "method": "eagle3",
        "category": "all",
        "context_bucket": "all",
        "temperature": 0.0,
        "tree": "chain",
        "drafters": ["draft"],
        "conditional_acceptance": [0.6, 0.5, None],
        "mean_acceptance_length": 1.9,
        "mean_acceptance_length_ci": [1.8, 2.0],
        "decoder_ms": {"p50": 1.0},
        "draft_tokens": 3,
        "batch_size": 1,
        "speedup_decode": 1.1,
    }
    write_json(tmp_path / "runs" / RUN / "measure" / "measure.json", {"rows": [row]})
    costs = Costs(Curve((1, 5), (0.010, 0.014)), 0.001)
    monkeypatch.setattr("eval.predict.measured_costs", lambda *_: costs)
    monkeypatch.setattr("eval.predict.measured_drafting", lambda *_: Curve((1, 2, 3), (0.001, 0.002, 0.003)))
    return Config(
        experiment="tiny",
        runs=str(tmp_path / "runs"),
        target=TargetConfig(name=str(tmp_path / "target"), dtype=Dtype.float32, device="cpu"),
        method=MethodConfig(name="eagle3"),
        data=DataConfig(folder=str(tmp_path / "data")),
        decode=DecodeConfig(draft_tokens=3),
        eval=EvalConfig(),
        predict=PredictConfig(draft_tokens=3, batches=[1, 2]),
    )


def test_a_prediction_from_measured_acceptance_and_times(here: Config) -> None:
    found, screen = run(here)
    row = found["rows"][0]
    # K = 1: 1.6 tokens in 1 + 11 + 1 ms; K = 2: 1.9 in 2 + 12 + 1; K = 3: 2.05 in 3 + 13 + 1.
    assert row["drafted"] == 2
    assert row["speedup"] == pytest.approx(1.9 * 10 / 15)
    assert row["low"] == pytest.approx(1.8 * 10 / 15)
    assert row["high"] == pytest.approx(2.0 * 10 / 15)
    assert [one["batch"] for one in found["rows"]] == [1, 2]
    assert row["by_length"] == pytest.approx([16 / 13, 19 / 15, 20.5 / 17])
    assert found["measured"] == {
        "draft_tokens": 3,
        "measured": 1.1,
        "predicted": pytest.approx(20.5 / 17),
    }
    assert "at K = 3: predicted 1.21x, measured 1.10x" in screen
    assert "measured here" in screen
    # K = 2 with .65 and .55.
    assert found["better_draft"]["speedup"] == pytest.approx((1 + 0.65 + 0.65 * 0.55) * 10 / 15)


def test_acceptance_that_is_not_known_is_refused(here: Config) -> None:
    here.decode.temperature = 1.0
    with pytest.raises(
        TrafficError, match=r"no chain of the draft alone at temperature 1.*decode\.temperature=1"
    ):
        run(here)
    (Path(here.runs) / RUN / "measure" / "measure.json").unlink()
    with pytest.raises(TrafficError, match=r"There is no .*measure\.json"):
        run(here)
