"""Rows of measure.json from literal rounds and seconds; expected values are worked out in the comments."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from eval.measure import SCHEMA_FILE
from eval.rows import Pair, interval, percentiles, row, rows, rows_by_reply, shares, verdict
from tests.eval.samples import CONDITIONS, draft_run, measurement, pair, plain_run, two_pairs


def whole(made: list[dict], method: str) -> dict:
    return next(r for r in made if r["method"] == method and r["category"] == r["context_bucket"] == "all")


def test_acceptance_is_pooled_over_rounds() -> None:
    """Rounds accept 2, 1, 0, 1 of 2 drafted."""
    draft = whole(rows(two_pairs(), CONDITIONS), "eagle3")
    assert draft["rounds"] == 4
    assert draft["mean_acceptance_length"] == 2.0  # 1 + 4 / 4
    assert draft["acceptance_rate"] == 0.5  # 4 / 8
    assert draft["acceptance_by_position"] == [
        0.75,
        0.25,
    ]  # three rounds took the first token, one the second
    assert draft["conditional_acceptance"] == [0.75, pytest.approx(1 / 3)]  # of the three that got there, one


def test_plain_rows_have_no_draft() -> None:
    plain = whole(rows(two_pairs(), CONDITIONS), "plain")
    assert plain["mean_acceptance_length"] == 1.0
    for name in (
        "acceptance_rate",
        "acceptance_by_position",
        "conditional_acceptance",
        "speedup",
        "speedup_ci",
    ):
        assert plain[name] is None
    assert plain["identical_outputs"] is None
    assert plain["tokens_per_s"] == 1.0  # 10 tokens in 6 + 4 s


def test_positions_of_a_tree_are_its_levels() -> None:
    """Trees of 5 nodes in 3 levels. One round accepted two and saw the third refused, one accepted a leaf of
    level 1, under which nothing was tried."""
    drafted = draft_run([1, 2, 3, 4, 5, 6], [2, 1])
    trees = [replace(drafted.rounds[0], drafted=5, depth=3, tried=3)]
    trees += [replace(drafted.rounds[1], drafted=5, depth=3, tried=1)]
    made = row(
        [pair("A", plain_run([1, 2, 3, 4, 5, 6]), replace(drafted, rounds=trees))],
        True,
        "all",
        "all",
        replace(CONDITIONS, tree="dynamic", tree_nodes=5, tree_width=2, stop_drafting=None),
    )
    assert made["acceptance_rate"] == 0.3  # of 10 nodes
    assert made["acceptance_by_position"] == [1, 0.5, 0]
    assert made["conditional_acceptance"] == [1, 1, 0]
    assert made["mean_acceptance_length"] == 2.5


def test_rows_say_how_tokens_were_drafted_and_plain_ones_that_they_were_not() -> None:
    names = ("drafters", "tree", "tree_nodes", "tree_width", "tree_file", "stop_drafting", "verification")
    static = replace(
        CONDITIONS,
        drafters=("draft", "lookup"),
        tree="static",
        tree_nodes=7,
        tree_file="t.json",
        stop_drafting=None,
        verification="block",
    )
    plain, drafted = (row(two_pairs(), way, "all", "all", static) for way in (False, True))
    assert [drafted[name] for name in names] == [
        ["draft", "lookup"],
        "static",
        7,
        None,
        "t.json",
        None,
        "block",
    ]
    assert [plain[name] for name in names] == [None] * 7
    assert (plain["draft_tokens"], plain["proposal"]) == (0, None)


def test_speedup_is_a_ratio_of_totals() -> None:
    """Plain 6 + 4 s; speculative 1 + 2 * 1.5 = 4 s each. Decoding alone: 5 + 3 against 3 + 3."""
    draft = whole(rows(two_pairs(), CONDITIONS), "eagle3")
    assert draft["speedup"] == 1.25  # 10 / 8, not the mean of 1.5 and 1.0
    assert draft["speedup_basis"] == "wall"
    assert draft["speedup_decode"] == pytest.approx(8 / 6)
    assert draft["tokens_per_s"] == 1.25
    low, high = draft["speedup_ci"]
    assert (low, high) == (1.0, 1.5)  # draws of two prompts: AA 12/8, AB 10/8, BB 8/8


def test_outputs_of_different_length_are_compared_per_token() -> None:
    """6 tokens in 6 s against 3 tokens in 4 s: wall time would say 1.5, yet each token became dearer."""
    pairs = [pair("A", plain_run([1, 2, 3, 4, 5, 6]), draft_run([1, 2, 3], [0, 0]), temperature=1.0)]
    made = row(pairs, True, "all", "all", CONDITIONS)
    assert made["speedup_basis"] == "per_token"
    assert made["speedup"] == pytest.approx(0.75)  # (6 / 6) / (4 / 3)
    assert made["speedup_decode"] == pytest.approx(2 / 3)  # (5 s / 5 tokens) / (3 s / 2 tokens)
    assert any("seconds per token" in note for note in made["notes"])
    assert made["identical_outputs"] is None
    assert any("temperature > 0" in note for note in made["notes"])


def test_identity_and_the_largest_gap() -> None:
    made = rows(two_pairs(), CONDITIONS)
    draft = whole(made, "eagle3")
    assert (draft["identical_outputs"], draft["identical_count"], draft["first_divergence_gap"]) == (
        0.5,
        1,
        0.25,
    )
    maths = next(r for r in made if r["method"] == "eagle3" and r["category"] == "maths")
    assert (maths["identical_outputs"], maths["first_divergence_gap"]) == (1.0, None)


def test_latency_by_emission() -> None:
    """Emissions of A: 1, 2.5, 4 s. The waits between are 1.5 s although 5 tokens came in 3 s."""
    made = row(two_pairs()[:1], True, "maths", "all", CONDITIONS)
    assert made["ttft_ms"]["p50"] == 1000
    assert made["itl_ms"]["p50"] == 1500
    assert made["tpot_ms"]["p50"] == 600  # (4 - 1) / 5 s
    assert made["e2e_ms"]["p50"] == 4000
    assert made["decoder_ms"]["p50"] == pytest.approx(100)  # 1.5 - 1.0 - 0.4


def test_percentiles_need_values_beyond_them() -> None:
    assert percentiles([]) is None
    short = "1 values; p90 takes 10, p99 takes 1000"
    assert percentiles([2.0]) == {"p50": 2000.0, "p90": None, "p99": None, "events": 1, "missing": short}
    ten = percentiles([1.0] * 10)
    assert ten == {
        "p50": 1000.0,
        "p90": 1000.0,
        "p99": None,
        "events": 10,
        "missing": "10 values; p99 takes 1000",
    }
    thousand = percentiles([i / 1000 for i in range(1000)])  # 0 to 999 ms
    assert thousand is not None
    assert thousand["p99"] == pytest.approx(989.01)
    assert (thousand["events"], thousand["missing"]) == (1000, None)


def test_rows_by_category_and_prompt_length() -> None:
    made = {
        (r["method"], r["category"], r["context_bucket"]): r["prompts"] for r in rows(two_pairs(), CONDITIONS)
    }
    code = "<b>code</b> & $more$"
    groups = {
        ("all", "all"): 2,
        ("maths", "all"): 1,
        (code, "all"): 1,
        ("all", "1-32"): 1,
        ("all", "129-512"): 1,
    }
    assert made == {(m, *group): n for m in ("plain", "eagle3") for group, n in groups.items()}


def test_every_setting_has_rows_of_its_own() -> None:
    pairs = [replace(one, batch_size=size) for size in (4, 1) for one in two_pairs()]
    made = [r for r in rows(pairs, CONDITIONS) if r["category"] == r["context_bucket"] == "all"]
    assert [(r["batch_size"], r["method"]) for r in made] == [
        (size, method) for size in (1, 4) for method in ("plain", "eagle3")
    ]


def test_a_batch_is_one_cluster_and_its_prompts_have_shares_of_its_time() -> None:
    """Two prompts decoded together: plain 6 s, speculative 4 s, of which B had 2 and 1. Each was in flight
    for the time that the samples say: 10 s plain, 8 s speculative."""
    a, b = (replace(one, batch_size=2) for one in two_pairs())
    a = replace(a, plain=replace(a.plain, share=4.0), draft=replace(a.draft, share=3.0))
    b = replace(b, plain=replace(b.plain, share=2.0), draft=replace(b.draft, share=1.0))
    made = rows([a, b], CONDITIONS)
    plain, drafted = whole(made, "plain"), whole(made, "eagle3")
    assert plain["tokens_per_s"] == pytest.approx(10 / 6)
    assert drafted["tokens_per_s"] == pytest.approx(10 / 4)
    assert drafted["speedup"] == 1.5
    assert (drafted["prompts"], drafted["clusters"], drafted["speedup_ci"]) == (2, 1, None)
    assert plain["sequences_in_flight"] == pytest.approx(10 / 6)
    assert drafted["sequences_in_flight"] == 2.0
    assert next(r for r in made if r["category"] == "maths" and r["method"] == "eagle3")["speedup"] == 4 / 3


def test_time_is_shared_by_those_in_flight() -> None:
    """One is alone for 1 s, two are together for 2 s, the later is alone for 1 s; then nobody for 1 s."""
    assert shares([(0.0, 3.0), (1.0, 4.0), (5.0, 6.0)]) == [2.0, 2.0, 1.0]
    assert shares([]) == []


def test_draft_lengths_and_waste() -> None:
    """A drafted 2 and 2 and accepted 2 and 1; B drafted 2 and 1 and accepted neither."""
    b = draft_run([7, 8, 9], [0, 0])
    b = replace(b, rounds=[b.rounds[0], replace(b.rounds[1], drafted=1, depth=1)])
    a = two_pairs()[0]
    made = row([a, replace(two_pairs()[1], draft=b)], True, "all", "all", CONDITIONS)
    assert made["draft_lengths"] == {"1": [1], "2": [1, 1, 1]}
    assert made["wasted_drafts"] == 4  # of 7
    assert made["wasted_rounds"] == 0.5
    assert made["draft_ms"]["p50"] == pytest.approx(400)
    plain = row([a], False, "all", "all", CONDITIONS)
    assert (plain["draft_lengths"], plain["wasted_drafts"], plain["draft_ms"]) == (None, None, None)


def test_requests_differ() -> None:
    """τ of A: 1 + 3 / 2, of B: 1 + 1 / 2. Speedups 6 / 4 and 4 / 4."""
    made = row(two_pairs(), True, "all", "all", CONDITIONS)["per_request"]
    assert made["mean_acceptance_length"] == pytest.approx({"p10": 1.6, "p50": 2.0, "p90": 2.4})
    assert made["speedup"] == pytest.approx({"p10": 1.05, "p50": 1.25, "p90": 1.45})
    assert made["slower"] == 0.0
    assert row(two_pairs(), False, "all", "all", CONDITIONS)["per_request"] is None


def test_rows_by_reply_set_loops_apart() -> None:
    """The looping reply alone was 1.5 times as fast, the other not at all."""
    a, b = two_pairs()
    a = replace(a, plain=replace(a.plain, looped=True), draft=replace(a.draft, looped=True))
    made = {r["reply"]: r for r in rows_by_reply([a, b], CONDITIONS) if r["method"] == "eagle3"}
    assert list(made) == ["1-32", "looped", "not looped"]
    assert [r["speedup"] for r in made.values()] == [1.25, 1.5, 1.0]
    assert [r["looped"] for r in made.values()] == [1, 1, 0]
    assert {r["reply"] for r in rows_by_reply([b], CONDITIONS)} == {"1-32"}


def test_repeats_of_a_prompt_are_one_cluster() -> None:
    """Twice the same prompt is still one prompt: no interval."""
    first = two_pairs()[0]
    made = row([first, replace(first, repeat=1)], True, "all", "all", CONDITIONS)
    assert made["prompts"] == 1
    assert made["speedup"] == 1.5
    assert made["speedup_ci"] is None


def test_no_round_gives_nulls() -> None:
    """Both outputs end with their first token: nothing was drafted, and nothing is claimed."""
    pairs = [pair(name, plain_run([5]), draft_run([5], [])) for name in "AB"]
    made = whole(rows(pairs, CONDITIONS), "eagle3")
    for name in (
        "mean_acceptance_length",
        "mean_acceptance_length_ci",
        "acceptance_rate",
        "acceptance_by_position",
    ):
        assert made[name] is None
    assert made["itl_ms"] is None
    assert made["tpot_ms"] is None
    assert made["decoder_ms"] is None
    assert made["speedup"] == 1.0
    assert made["speedup_decode"] is None  # 0 / 0 s
    jsonschema.validate(measurement(pairs), json.loads(SCHEMA_FILE.read_text()))


def test_bootstrap_is_seeded_and_brackets_the_value() -> None:
    import numpy as np

    sums = np.array([[float(i), 10.0] for i in range(1, 21)])
    first = interval(lambda s: s[..., 0] / s[..., 1], sums, CONDITIONS)
    assert first == interval(lambda s: s[..., 0] / s[..., 1], sums, CONDITIONS)
    assert first is not None
    assert first[0] < 1.05 < first[1]  # mean of 1..20 is 10.5
    # The mean's standard error is 5.77 / sqrt(20) / 10 = 0.129, so the interval spans about 4 * 0.129.
    assert 0.35 < first[1] - first[0] < 0.65


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ([1.1, 1.3], "pays"),
        ([0.7, 0.9], "does not pay"),
        ([0.9, 1.1], "not shown to pay"),
        (None, "cannot tell"),
    ],
)
def test_verdict(ends: list[float] | None, words: str) -> None:
    assert words in verdict({"speedup": 1.2, "speedup_ci": ends})


def test_pairs_survive_json() -> None:
    for one in two_pairs():
        assert Pair.from_dict(json.loads(json.dumps(one.to_dict()))) == one


def test_every_field_is_defined_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "measuring.md").read_text()
    fields = {name.removesuffix("_ci") for name in rows(two_pairs(), CONDITIONS)[0]} - {"confidence"}
    fields |= {
        "by_reply",
        "memory",
        "advice",
        "packed_weights",
        "draft_cache",
        "plain_cache",
        "missing",
        "events",
    }
    assert [name for name in sorted(fields) if f"`{name}`" not in text] == []


def test_schema_refuses_a_zero_for_an_absent_speed() -> None:
    made = measurement()
    schema = json.loads(SCHEMA_FILE.read_text())
    jsonschema.validate(made, schema)
    made["rows"][0]["tokens_per_s"] = 0
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(made, schema)
