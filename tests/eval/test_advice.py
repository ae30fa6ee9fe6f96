"""Each rule on literal rows: what it says, with which number, and when it is silent."""

from __future__ import annotations

from typing import Any

import pytest

from eval.advice import (
    acceptance,
    advice,
    batch,
    by_batch,
    categories,
    contexts,
    length,
    loops,
    slower,
    temperature,
    trust,
    use,
    weight,
)


def row(**changes: Any) -> dict[str, Any]:
    """A chain of 4 at temperature 0, batch 1, that pays; nothing about it calls for a remark."""
    made = {
        "method": "eagle3",
        "lossless": True,
        "verification": "rejection",
        "temperature": 0.0,
        "batch_size": 1,
        "category": "all",
        "context_bucket": "all",
        "tree": "chain",
        "draft_tokens": 4,
        "stop_drafting": "fixed",
        "prompts": 48,
        "pairs": 48,
        "clusters": 48,
        "looped": 0,
        "speedup": 1.25,
        "speedup_ci": [1.1, 1.4],
        "mean_acceptance_length": 2.5,
        "mean_acceptance_length_ci": [2.3, 2.7],
        "acceptance_rate": 0.4,
        "acceptance_by_position": [0.7, 0.5, 0.35, 0.25],
        "conditional_acceptance": [0.7, 0.71, 0.7, 0.71],
        "wasted_drafts": 600,
        "per_request": {"slower": 0.02},
        "draft_ms": {"p50": 4.0},
        "target_ms": {"p50": 30.0},
        "decoder_ms": {"p50": 2.0},
    }
    return {**made, **changes}


LOST = {"speedup": 0.85, "speedup_ci": [0.8, 0.9]}
OPEN = {"speedup": 1.05, "speedup_ci": [0.95, 1.15]}
MEMORY = {
    "batch_size": 1,
    "target_weights": 270_000_000,
    "draft_weights": 27_000_000,
    "packed_weights": None,
    "plain_cache": 9_000_000,
    "target_cache": 10_000_000,
    "draft_cache": 300_000,
    "allocated": None,
}


def said(sentences: Any) -> str:
    return " ".join(sentences)


def test_use_it_or_not() -> None:
    assert said(use([row()])) == (
        "Use it at temperature 0, batch 1: 1.25x (1.10 to 1.40) as fast as plain decoding, with a chain of 4 "
        "that makes 2.50 tokens a round."
    )
    assert "Do not use it at temperature 0, batch 1: 0.85x (0.80 to 0.90)" in said(use([row(**LOST)]))
    few = row(speedup_ci=None, clusters=1)
    assert said(use([few])) == "Cannot tell at temperature 0, batch 1: 1 prompts or batches give no interval."
    short = row(speedup_ci=None, mean_acceptance_length=None, mean_acceptance_length_ci=None)
    assert "no reply was longer than the token that the prefill gives" in said(use([short]))
    # One sentence for each temperature, at its smallest batch.
    several = [row(), row(batch_size=4, **LOST), row(temperature=1.0, **LOST)]
    assert said(use(several)).count("batch 1") == 2


def test_how_many_prompts_would_decide() -> None:
    """The interval reaches .1 below a gain of .05: four times as many prompts halve it. For a gain of .01 it
    would be 100 times as many."""
    assert "Not shown to pay at temperature 0, batch 1: 1.05x (0.95 to 1.15). About 192 prompts" in said(
        use([row(**OPEN)])
    )
    slight = row(speedup=1.01, speedup_ci=[0.91, 1.11])
    assert "not worth a decision" in said(use([slight]))
    assert "not worth a decision" in said(use([row(speedup=1.0, speedup_ci=[0.9, 1.1])]))


def test_temperature() -> None:
    hot = row(temperature=1.5, mean_acceptance_length=1.6, **LOST)
    assert said(temperature([row(), hot])) == (
        "From temperature 0 to 1.5 a round goes from 2.50 to 1.60 tokens, and the speedup from 1.25x to "
        "0.85x: switch it off from temperature 1.5 on."
    )
    assert "pays above 1 too" in said(temperature([row(), row(temperature=1.5)]))
    assert said(temperature([row(), row(temperature=1.0)])).endswith("to 1.25x.")
    assert said(temperature([row(), row(batch_size=8)])) == ""


def test_batches() -> None:
    swept = [row(), row(batch_size=4, **OPEN), row(batch_size=8, **LOST)]
    assert said(batch(swept)) == (
        "Speculation pays at batch sizes up to 1 of those asked. It does not pay at batch 8, where it is at "
        "most 0.90x: switch it off. By batch size the speedup is 1.25x at 1, 1.05x at 4, 0.85x at 8."
    )
    assert "Only batch 1 was measured; above 4" in said(batch([row()]))
    assert said(batch([row(batch_size=8)])) == ""
    assert "open at every batch size" in said(by_batch([(1, 0.9, 1.1), (8, 0.8, 1.2)]))


@pytest.mark.parametrize(
    ("share", "ends", "words"),
    [
        (0.7, [1.1, 1.4], "70% are accepted, within the 60% to 80% at which drafts usually pay."),
        (0.7, [0.9, 1.4], "yet it is not shown to pay here"),
        (
            0.45,
            [1.1, 1.4],
            "45% are accepted, fewer than the 60% from which drafts usually pay: it pays here",
        ),
        (0.45, [0.8, 0.9], "distil longer"),
        (0.9, [1.1, 1.4], "90% are accepted, more than the 60% to 80%"),
        (0.9, None, "the draft's cost is in the way"),
    ],
)
def test_acceptance(share: float, ends: list[float] | None, words: str) -> None:
    assert words in said(acceptance(row(conditional_acceptance=[share], speedup_ci=ends)))


def test_acceptance_of_trees_and_of_nothing_is_not_judged() -> None:
    assert said(acceptance(row(tree="dynamic"))) == ""
    assert said(acceptance(row(conditional_acceptance=None))) == ""
    assert said(acceptance(row(conditional_acceptance=[None]))) == ""


def test_length() -> None:
    assert said(length(row())) == ""
    assert "Only 4% of the rounds accept all 2 drafted tokens: draft fewer" in said(
        length(row(acceptance_by_position=[0.5, 0.04]))
    )
    assert "60% of the rounds accept all 1 drafted tokens: draft more" in said(
        length(row(acceptance_by_position=[0.6]))
    )
    assert "80% of the drafted tokens are refused (600)" in said(length(row(acceptance_rate=0.2)))
    assert said(length(row(acceptance_rate=0.2, stop_drafting="confidence"))) == ""
    assert said(length(row(tree="dynamic", acceptance_by_position=[0.5, 0.04]))) == ""


def test_categories() -> None:
    code = row(category="code", acceptance_by_position=[0.9, 0.8, 0.7, 0.62])
    chat = row(category="chat", **LOST)
    assert said(categories([row(), code, chat])) == (
        "It loses in chat 0.85x (0.80 to 0.90): switch it off there, or train on more of it. Chains are "
        "accepted whole in most rounds of code (62%): such text wants longer drafts or a "
        "tree (decode.tree=dynamic)."
    )
    assert said(categories([row(), row(category="chat")])) == ""


def test_contexts() -> None:
    short = row(context_bucket="33-128")
    weak = row(context_bucket="513-2048", mean_acceptance_length=1.5, mean_acceptance_length_ci=[1.4, 1.6])
    assert (
        "With prompts of 513-2048 tokens a round makes 1.50 tokens, with prompts of 33-128 tokens it makes"
        in said(contexts([row(), short, weak]))
    )
    near, far = row(category="recall 512"), weak | {"category": "recall 2048", "context_bucket": "all"}
    assert said(contexts([row(), far, near])).startswith(
        "With recall 2048 tokens a round makes 1.50 tokens, with"
    )
    alike = row(context_bucket="513-2048", mean_acceptance_length_ci=[2.0, 2.4])
    assert said(contexts([row(), short, alike])) == ""
    assert said(contexts([row(), short])) == ""


def test_loops() -> None:
    apart = [row(reply="looped"), row(reply="not looped", speedup=1.12)]
    assert said(loops(row(looped=3), apart)) == (
        "3 of 48 replies end in a loop, which any draft predicts: without them it is 1.12x instead of 1.25x."
    )
    assert "that this target can answer" in said(loops(row(looped=48), apart[:1]))
    assert said(loops(row(), apart)) == ""


def test_slower() -> None:
    assert "12% of the prompts are answered more slowly" in said(slower(row(per_request={"slower": 0.12})))
    assert said(slower(row())) == ""
    assert said(slower(row(per_request={"slower": 0.6}, **LOST))) == ""  # that it loses has been said


def test_weight() -> None:
    assert said(weight(row(), MEMORY)) == (
        "The draft adds 27.0 MB of weights (10% of the target's) and 0.3 MB of cache beside the target's "
        "10.0 MB at batch 1."
    )
    assert "The draft takes 50% of a round (32.0 of 64.0 ms)" in said(
        weight(row(draft_ms={"p50": 32.0}), MEMORY)
    )
    heavy = {**MEMORY, "draft_weights": 135_000_000, "draft_cache": None}
    assert "(50% of the target's) and 0.0 MB of cache" in said(weight(row(), heavy))
    assert "missing for other sequences" in said(weight(row(), heavy))


def test_trust() -> None:
    load = {"busy": True, "others_before": 0.1, "others_during": 0.34}
    assert "Others used 34% of the machine" in said(trust({"load": load}, row()))
    calm = {"load": {**load, "busy": False}}
    assert said(trust(calm, row())) == ""
    assert "Typical verification changes what" in said(
        trust(calm, row(lossless=False, verification="typical"))
    )


def test_a_whole_measurement() -> None:
    plain = row(method="plain", speedup=None, speedup_ci=None)
    made = {
        "load": {"busy": False},
        "rows": [plain, row(), plain | {"category": "code"}, row(category="code")],
        "by_reply": [],
        "memory": [MEMORY],
    }
    assert len(advice(made)) == 4  # use it, one batch only, the acceptance, what the draft adds
