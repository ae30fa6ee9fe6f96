"""The arithmetic by hand; predictions from a data sheet, and from this machine's own times, of chains, trees,
and a setting that was measured."""

from __future__ import annotations

import io
import json
from dataclasses import replace
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
from decoding.compiled import Compiled
from decoding.costs import Costs, Curve, Steps
from decoding.shapes import Conditions, TreeShape, write_shape
from eval.evidence import Acceptance, chain_acceptance, expected_tokens, scaled
from eval.predict import Row, Times, TreeRow, advice, break_even, predict, row_of, speedup, tree_row, widest
from eval.rows import is_chain
from models.files import write_json
from tests.eval.samples import LLAMA_8B, LLAMA_70B, tiny_pair

RUN = Path("tiny") / "20260101-000000"
# Verifying costs a tenth more a token, drafting a twentieth of a forward a token.
TIMES = Times(
    plain=1.0, verify=lambda n: 1 + 0.1 * (n - 1), draft=lambda depth: 0.05 * depth, own=lambda _: 0.05
)


def test_expected_tokens() -> None:
    assert expected_tokens([0.5], 0) == 1
    assert expected_tokens([0.5], 2) == 1.75  # the last position holds on
    assert expected_tokens([0.8, 0.5, 0.25], 3) == pytest.approx(1 + 0.8 + 0.4 + 0.1)


def test_speedup_and_the_best_length() -> None:
    assert speedup([0.5], 1, TIMES) == pytest.approx(1.5 / 1.2)
    assert speedup([0.5], 2, TIMES) == pytest.approx(1.75 / 1.35)
    assert speedup([0.5], 3, TIMES) == pytest.approx(1.875 / 1.5)
    best = [row_of(1, Acceptance([a], [a], [a], ""), [TIMES], 3).drafted for a in (0.5, 0.9, 0.1)]
    assert best == [2, 3, 1]


def test_scaled_acceptance_emits_what_is_wanted() -> None:
    found = scaled([0.8, 0.4], 2, 1.6)
    assert expected_tokens(found, 2) == pytest.approx(1.6)
    assert found[0] == pytest.approx(2 * found[1])
    assert scaled([0.8, 0.4], 2, 3.0) == pytest.approx([1.0, 1.0])  # all there is


def test_the_interval_contains_what_it_is_of() -> None:
    """τ also counts rounds that had less than K left to draft: here 1.7 where E(2) is 1.9."""
    row = measured(mean_acceptance_length=1.7, mean_acceptance_length_ci=[1.65, 1.75])
    found = chain_acceptance(row, "")
    low, middle, high = (expected_tokens(one, 2) for one in (found.low, found.middle, found.high))
    assert (low, middle, high) == pytest.approx((1.9 * 1.65 / 1.7, 1.9, 1.9 * 1.75 / 1.7))


def test_a_chain_that_stops_early_tells_nothing_of_fixed_ones() -> None:
    assert is_chain(measured())
    assert not is_chain(measured(stop_drafting="confidence"))


def test_a_rows_interval_spans_acceptance_and_times() -> None:
    slow = Times(1.0, lambda _: 1.5, lambda _: 0.5, lambda _: 0.0)
    fast = Times(1.0, lambda _: 1.0, lambda _: 0.0, lambda _: 0.0)
    row = row_of(4, Acceptance([0.5], [0.4], [0.6], ""), [slow, fast], 1)
    assert (row.batch, row.drafted, row.expected_tokens) == (4, 1, 1.5)
    assert (row.low, row.high) == (pytest.approx(1.4 / 2), pytest.approx(1.6))
    assert row.speedup == pytest.approx((0.75 * 1.5) ** 0.5)


def test_a_batch_is_as_wide_as_its_widest_tree() -> None:
    # Three rounds in four draft nothing; of two sequences both do so in 9 of 16.
    assert widest({0: 3, 4: 1}, 1) == {0: 0.75, 4: 0.25}
    assert widest({0: 3, 4: 1}, 2) == pytest.approx({0: 9 / 16, 4: 7 / 16})


def test_the_fastest_tree_of_a_size() -> None:
    # Accepted: (0) .6, (0, 0) .3, (1) .2, (0, 1) .15. Of 3 drafted nodes the first three emit 2.1 tokens; at
    # depth 1 there are but two, which emit 1.8.
    vectors = [[0.6, 0.2], [0.5, 0.25]]
    row = tree_row(1, vectors, [TIMES], 4, deepest=8)
    assert (row.nodes, row.depth, row.low) == (4, 2, None)
    assert row.expected_tokens == pytest.approx(2.1)
    assert row.speedup == pytest.approx(2.1 / (1.3 + 0.1 + 0.05))
    dear = Times(1.0, lambda n: 1 + 0.1 * (n - 1), lambda depth: depth * 1.0, lambda _: 0.0)
    shallow = tree_row(1, vectors, [dear, TIMES], 4, deepest=8)
    assert (shallow.nodes, shallow.depth) == (3, 1)  # 1.8 in 2.2 and 1.3 against 2.1 in 3.3 and 1.45
    assert (shallow.low, shallow.high) == (pytest.approx(1.8 / 2.2), pytest.approx(1.8 / 1.3))


def chains(*speedups: tuple[int, float, float, float]) -> list[Row]:
    return [Row(batch, 4, 2.0, gain, low, high, []) for batch, gain, low, high in speedups]


def test_advice_says_where_it_pays() -> None:
    rows = chains((1, 1.8, 1.6, 2.0), (8, 1.1, 0.9, 1.3), (64, 0.8, 0.7, 0.95))
    trees = [TreeRow(1, 4, 2, 2.1, 1.5, None, None), TreeRow(1, 8, 3, 2.4, 1.9, None, None)]
    said = " ".join(advice(rows, trees, [], Row(1, 5, 2.3, 2.1, 1.9, 2.3, [])))
    assert "Batch 1: K = 4 is best, 1.80x (1.60 to 2.00)." in said
    assert "of static trees one of 8 nodes and depth 3 is best, 1.90x with 2.40 tokens a round" in said
    assert "make it 2.10x, with K = 5" in said
    assert "pays at batch sizes up to 1 of those asked" in said
    assert "does not pay at batch 64, where it is at most 0.95x" in said
    assert "breaks even at a batch of about 16." in said
    assert "open at every batch size" in " ".join(advice(rows[1:2], [], [], None))


def test_break_even_lies_between_the_batches_asked() -> None:
    # 1.1 at 8 and .8 at 64: a third of the way, on a logarithmic scale: 8 * 8^(1/3).
    rows = chains((64, 0.8, 0.7, 0.9), (8, 1.1, 1.0, 1.2))
    assert break_even(rows) == pytest.approx(16)
    assert break_even(rows[:1]) is None
    assert break_even(rows[1:]) is None


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


# ---- on this machine ----


def measured(**changes: Any) -> dict[str, Any]:
    """A row of measure.json, over all prompts."""
    row = {
        "method": "eagle3",
        "category": "all",
        "context_bucket": "all",
        "temperature": 0.0,
        "tree": "chain",
        "drafters": ["draft"],
        "stop_drafting": "fixed",
        "conditional_acceptance": [0.6, 0.5, None],
        "mean_acceptance_length": 1.9,
        "mean_acceptance_length_ci": [1.8, 2.0],
        "decoder_ms": {"p50": 1.0},
        "draft_lengths": {"3": [10, 10]},
        "draft_tokens": 3,
        "batch_size": 1,
        "speedup_decode": 1.1,
    }
    return row | changes


PLAIN = measured(method="plain", tree=None, drafters=None, draft_lengths=None, draft_tokens=0)
# Half of the rounds draft 2 tokens, half of them 4.
MERGED = {
    "tree": "dynamic",
    "drafters": ["draft", "lookup"],
    "draft_tokens": 2,
    "draft_lengths": {"2": [5, 5], "4": [10]},
    "mean_acceptance_length": 2.0,
    "mean_acceptance_length_ci": [1.8, 2.2],
}


def write_rows(config: Config, *rows: dict[str, Any]) -> None:
    write_json(Path(config.runs) / RUN / "measure" / "measure.json", {"rows": list(rows)})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A pair with a measurement, on a machine whose times are those of `costs`."""
    tiny_pair(tmp_path, RUN)
    costs = Costs(Curve((1, 5), (0.010, 0.014)), 0.001)
    monkeypatch.setattr("eval.predict.measured_costs", lambda *_, **__: costs)
    monkeypatch.setattr("eval.predict.measured_drafting", lambda *_: Curve((1, 2, 3), (0.001, 0.002, 0.003)))
    config = Config(
        experiment="tiny",
        runs=str(tmp_path / "runs"),
        target=TargetConfig(name=str(tmp_path / "target"), dtype=Dtype.float32, device="cpu"),
        method=MethodConfig(name="eagle3"),
        data=DataConfig(folder=str(tmp_path / "data")),
        decode=DecodeConfig(draft_tokens=3),
        eval=EvalConfig(),
        predict=PredictConfig(draft_tokens=3, batches=[1, 2]),
    )
    write_rows(config, PLAIN, measured())
    return config


def test_a_prediction_from_measured_acceptance_and_times(here: Config) -> None:
    found, screen = run(here)
    row = found["rows"][0]
    # Plain decoding takes 10 + 1 ms a token.
    # K = 1: 1.6 tokens in 1 + 11 + 1 ms; K = 2: 1.9 in 2 + 12 + 1; K = 3: 2.05 in 3 + 13 + 1.
    assert row["drafted"] == 2
    assert row["speedup"] == pytest.approx(1.9 * 11 / 15)
    assert row["low"] == pytest.approx(1.8 * 11 / 15)
    assert row["high"] == pytest.approx(2.0 * 11 / 15)
    assert row["by_length"] == pytest.approx([1.6 * 11 / 13, 1.9 * 11 / 15, 2.05 * 11 / 17])
    # Two sequences take the decoder 2 ms.
    assert found["rows"][1]["by_length"][0] == pytest.approx(1.6 * 12 / 14)
    assert found["measured"] == {
        "draft_tokens": 3,
        "measured": 1.1,
        "predicted": pytest.approx(2.05 * 11 / 17),
    }
    assert "at K = 3: predicted 1.33x, measured 1.10x" in screen
    assert "measured here" in screen
    # K = 2 with .65 and .55.
    assert found["better_draft"]["speedup"] == pytest.approx((1 + 0.65 + 0.65 * 0.55) * 11 / 15)
    assert found["trees"] == found["as_measured"] == []


def test_the_decoders_own_time_grows_with_nodes_and_is_that_of_the_batch(here: Config) -> None:
    # 1 ms plainly, 4 ms with the 4 nodes of K = 3, so 2 ms with the 2 of K = 1; at batch 2 as measured.
    four, five = ({"decoder_ms": {"p50": ms}} for ms in (4.0, 5.0))
    write_rows(here, PLAIN, measured(**four), measured(**five, batch_size=2))
    one, two = run(here)[0]["rows"]
    assert one["by_length"][0] == pytest.approx(1.6 * 11 / (1 + 11 + 2))
    assert two["by_length"][2] == pytest.approx(2.05 * 12 / (3 + 13 + 5))


def test_trees_and_chains_from_acceptance_by_rank(here: Config) -> None:
    write_rows(here)  # nothing measured
    seen = Conditions(
        temperature=0.0,
        proposal="sampled",
        draft=str(Path(here.runs) / RUN / "draft"),
        vectors=[[0.6, 0.2], [0.5, 0.25]],
        batch_size=1,
        seconds={"host": {"1": 0.001, "64": 0.001}},
    )
    file = Path(here.runs) / RUN / "tree.json"
    write_shape(file, TreeShape.chain(1), seen)
    found, screen = run(here)
    two, four = (
        row for row in found["trees"] if row["batch"] == 1 and row["nodes"] in (2, 4) and row["depth"] < 3
    )
    assert two["speedup"] == pytest.approx(1.6 * 11 / 13)
    assert four["speedup"] == pytest.approx(2.1 * 11 / 16)  # 13 ms over 4 nodes, 2 of drafting, 1 of its own
    assert found["acceptance"]["middle"] == [0.6, 0.5]
    assert found["acceptance"]["source"] == str(file)
    assert found["rows"][0]["by_length"][1] == pytest.approx(1.9 * 11 / 15)
    assert "a static tree of 4 nodes, depth 2" in screen
    for other in (replace(seen, temperature=1.0), replace(seen, draft="another")):
        write_shape(file, TreeShape.chain(1), other)
        with pytest.raises(TrafficError, match="acceptance is not known"):
            run(here)


def test_a_measured_setting_at_other_batch_sizes(here: Config) -> None:
    write_rows(here, PLAIN, measured(**MERGED))
    found, screen = run(here)
    one, two = found["as_measured"]
    # 2 ms of drafting, 12 or 14 over 3 or 5 nodes, 1 of its own: 16 on average.
    assert one["speedup"] == pytest.approx(2 * 11 / 16)
    assert (one["low"], one["high"]) == (pytest.approx(1.8 * 11 / 16), pytest.approx(2.2 * 11 / 16))
    # The wider of two trees has 3 nodes in a quarter of the rounds; the decoder takes 2 ms.
    assert two["speedup"] == pytest.approx(2 * 12 / (2 + 12 / 4 + 14 * 3 / 4 + 2))
    assert found["rows"] == found["trees"] == []
    assert found["better_draft"] is None
    assert "as measured, 4 nodes on average" in screen
    assert "pays at batch sizes up to 2 of those asked" in screen


def test_where_decoding_compiles_so_are_the_times(here: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[list[int]] = []

    def costs(*_: Any, compiled: Compiled) -> Costs:
        sizes.append(compiled.sizes)
        return Costs(Steps((1, 6), (0.010, 0.015)), 0.001)

    monkeypatch.setattr("eval.predict.measured_costs", costs)
    here.decode.compile = True
    write_rows(here, PLAIN, measured(**MERGED, tree_nodes=3, compiled=True))
    found, screen = run(here)
    # 3 by the draft, 2 by lookup, and a root: rounds over 3 or 5 nodes take what 6 do. 2 + 15 + 1 ms.
    assert found["as_measured"][0]["speedup"] == pytest.approx(2 * 11 / 18)
    assert sizes == [[1, 2, 3, 4, 6]] * 2
    assert "decode.compile: 5 sizes of forwards" in screen
    # Chains of one token have forwards compiled for 2 nodes, which take 11 ms.
    write_rows(here, PLAIN, measured(compiled=True))
    found, _ = run(here)
    assert found["rows"][0]["by_length"][0] == pytest.approx(1.6 * 11 / 13)
    assert sizes[-1] == [1, 2, 3, 4]
    assert found["measured"]["measured"] == 1.1
    write_rows(here, PLAIN, measured(compiled=False))  # a speedup of other forwards
    assert run(here)[0]["measured"] is None


def test_what_drafts_without_a_network_costs_nothing_to_draft(here: Config) -> None:
    write_rows(here, PLAIN, measured(**{**MERGED, "drafters": ["lookup"], "tree": "chain"}))
    assert run(here)[0]["as_measured"][0]["speedup"] == pytest.approx(2 * 11 / 14)


def test_acceptance_that_is_not_known_is_refused(here: Config) -> None:
    here.decode.temperature = 1.0
    with pytest.raises(TrafficError, match=r"no speculative row at decode\.temperature=1.*eval\.tree"):
        run(here)
    (Path(here.runs) / RUN / "measure" / "measure.json").unlink()
    with pytest.raises(TrafficError, match=r"measure\.json does not exist"):
        run(here)


@pytest.mark.parametrize("damage", [b"", b"[]", b"{}", b'{"rows": [1]}', b'{"rows"', b"\xff"])
def test_a_damaged_measurement_is_refused(here: Config, damage: bytes) -> None:
    (Path(here.runs) / RUN / "measure" / "measure.json").write_bytes(damage)
    with pytest.raises(TrafficError, match=r"measure\.json is damaged .*eval\.measure again"):
        run(here)


def test_a_measurement_without_rounds_tells_nothing(here: Config) -> None:
    nothing = {"mean_acceptance_length": None, "mean_acceptance_length_ci": None}
    write_rows(here, PLAIN, measured(**{**MERGED, **nothing}))
    with pytest.raises(TrafficError, match="no speculative row"):
        run(here)
