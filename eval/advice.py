"""What measured numbers advise: use speculation or not, why, and with what settings, in plain sentences.

The field has rules of thumb: an acceptance of 60 to 80 % pays, batches above 4 and temperatures above 1
mostly do not, long contexts ask more of a draft, regular text wants longer drafts or trees, a draft should be
small. Each function below holds one of them against the rows of a measurement, and each sentence carries the
number that made it; where the measurement says nothing, so does the rule. Pure: a measurement in, sentences
out. `eval.predict` ends with the same sentences about batch sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from eval.measurement import tree

Row = dict[str, Any]

PAYS = (0.6, 0.8)  # acceptance of a chain's first token between which drafts usually pay
BUSY_BATCH = 4  # above it a target that is busy anyway has little room left
HOT = 1.0  # the temperature above which drafts mostly miss
RARE, OFTEN = 0.1, 0.5  # of rounds accepted to the end of a chain: cut it; lengthen it
HEAVY = 0.25  # of the target's weights; of a round's time
WASTE = 0.7  # of the drafted tokens refused
FEW_SLOWER = 0.1  # of the prompts


def advice(measurement: dict[str, Any]) -> list[str]:
    """The sentences for what `eval.measure` writes; the details are of its first setting, the lowest
    temperature and batch size."""
    whole = [row for row in drafted(measurement["rows"]) if everything(row)]
    first = whole[0]
    here = [row for row in drafted(measurement["rows"]) if setting(row) == setting(first)]
    replies = [row for row in drafted(measurement["by_reply"]) if setting(row) == setting(first)]
    memory = next(one for one in measurement["memory"] if one["batch_size"] == first["batch_size"])
    return [
        *trust(measurement, first),
        *use(whole),
        *temperature(whole),
        *batch(whole),
        *acceptance(first),
        *length(first),
        *categories(here),
        *contexts(here),
        *loops(first, replies),
        *slower(first),
        *weight(first, memory),
    ]


def drafted(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["method"] != "plain"]


def everything(row: Row) -> bool:
    return row["category"] == row["context_bucket"] == "all"


def setting(row: Row) -> tuple[float, int]:
    return row["temperature"], row["batch_size"]


def named(row: Row) -> str:
    return f"temperature {row['temperature']:g}, batch {row['batch_size']}"


def times(value: float) -> str:
    return f"{value:.2f}x"


def ranged(row: Row) -> str:
    low, high = row["speedup_ci"]
    return f"{times(row['speedup'])} ({low:.2f} to {high:.2f})"


# ---- the rules ----


def trust(measurement: dict[str, Any], row: Row) -> Iterator[str]:
    """Whether the numbers may be quoted at all."""
    load = measurement["load"]
    if load["busy"]:
        share = max(load["others_before"], load["others_during"])
        yield f"Others used {share:.0%} of the machine: measure again on an idle one before you decide."
    if not row["lossless"]:
        yield (
            f"{row['verification'].capitalize()} verification changes what the target says "
            "(lossless: false): compare these figures with no lossless method's."
        )


def use(whole: Sequence[Row]) -> Iterator[str]:
    """The verdict at the smallest batch of each temperature."""
    for at in dict.fromkeys(row["temperature"] for row in whole):
        row = next(row for row in whole if row["temperature"] == at)
        if row["mean_acceptance_length"] is None:
            yield f"Cannot tell at {named(row)}: no reply was longer than the token that the prefill gives."
        elif row["speedup_ci"] is None:
            yield f"Cannot tell at {named(row)}: {row['clusters']} prompts or batches give no interval."
        elif row["speedup_ci"][0] > 1:
            yield (
                f"Use it at {named(row)}: {ranged(row)} as fast as plain decoding, with a {tree(row)} "
                f"that makes {row['mean_acceptance_length']:.2f} tokens a round."
            )
        elif row["speedup_ci"][1] < 1:
            yield f"Do not use it at {named(row)}: {ranged(row)} as fast as plain decoding."
        else:
            yield f"Not shown to pay at {named(row)}: {ranged(row)}. {undecided(row)}"


def undecided(row: Row) -> str:
    """How many prompts would decide: an interval narrows with their square root."""
    low, high = row["speedup_ci"]
    gain = abs(row["speedup"] - 1)
    half = row["speedup"] - low if row["speedup"] > 1 else high - row["speedup"]
    needed = math.ceil(row["prompts"] * (half / gain) ** 2) if gain else math.inf
    if needed > 20 * row["prompts"]:
        return "So small a difference is not worth a decision."
    return f"About {needed} prompts would decide it (eval.max_prompts)."


def temperature(whole: Sequence[Row]) -> Iterator[str]:
    """What heat costs, between the coldest and the hottest measured at one batch size."""
    same = [row for row in whole if row["batch_size"] == whole[0]["batch_size"]]
    cold, hot = same[0], same[-1]
    lengths = cold["mean_acceptance_length"], hot["mean_acceptance_length"]
    if cold is hot or None in (*lengths, cold["speedup"], hot["speedup"]):
        return
    change = (
        f"From temperature {cold['temperature']:g} to {hot['temperature']:g} a round goes from "
        f"{lengths[0]:.2f} to {lengths[1]:.2f} tokens, and the speedup from {times(cold['speedup'])} to "
        f"{times(hot['speedup'])}"
    )
    losing = [row for row in same if row["speedup_ci"] is not None and row["speedup_ci"][1] < 1]
    if losing:
        yield f"{change}: switch it off from temperature {losing[0]['temperature']:g} on."
    elif hot["temperature"] > HOT and hot["speedup_ci"] is not None and hot["speedup_ci"][0] > 1:
        yield f"{change}: it pays above {HOT:g} too, where drafts mostly miss."
    else:
        yield f"{change}."


def batch(whole: Sequence[Row]) -> Iterator[str]:
    """Where it pays, over the batch sizes measured at the lowest temperature."""
    same = [row for row in whole if row["temperature"] == whole[0]["temperature"]]
    if len(same) == 1:
        size = same[0]["batch_size"]
        if size <= BUSY_BATCH:
            yield (
                f"Only batch {size} was measured; above {BUSY_BATCH} a busy target often has no room for "
                "drafts: measure eval.batch_sizes=[1,4,8] before you serve so."
            )
        return
    known = [(row["batch_size"], *row["speedup_ci"]) for row in same if row["speedup_ci"] is not None]
    if known:
        yield from by_batch(known)
    steps = ", ".join(f"{times(r['speedup'])} at {r['batch_size']}" for r in same if r["speedup"] is not None)
    yield f"By batch size the speedup is {steps}."


def by_batch(known: Sequence[tuple[int, float, float]]) -> Iterator[str]:
    """What follows from (batch size, lowest speedup, highest speedup)."""
    pays = [size for size, low, _ in known if low > 1]
    costs = [(size, high) for size, _, high in known if high < 1]
    if pays:
        yield f"Speculation pays at batch sizes up to {max(pays)} of those asked."
    if costs:
        size, most = min(costs)
        yield f"It does not pay at batch {size}, where it is at most {times(most)}: switch it off."
    if not pays and not costs:
        yield "Whether it pays is open at every batch size asked: the intervals contain 1."


def acceptance(row: Row) -> Iterator[str]:
    """The share of first tokens accepted, against what usually pays. A tree's first level offers several, and
    is no such share."""
    if row["tree"] != "chain" or not row["conditional_acceptance"]:
        return
    share, (low, high) = row["conditional_acceptance"][0], PAYS
    if share is None:
        return
    said = f"Of the first drafted tokens {share:.0%} are accepted"
    pays = row["speedup_ci"] is not None and row["speedup_ci"][0] > 1
    if share < low:
        outcome = "it pays here all the same" if pays else "distil longer, or on more traffic like this"
        yield f"{said}, fewer than the {low:.0%} from which drafts usually pay: {outcome}."
    elif share > high:
        outcome = (
            "a longer draft may pay more" if pays else "not acceptance but the draft's cost is in the way"
        )
        yield f"{said}, more than the {low:.0%} to {high:.0%} at which drafts usually pay: {outcome}."
    else:
        outcome = "" if pays else ", and yet it is not shown to pay here: look at the draft's cost"
        yield f"{said}, within the {low:.0%} to {high:.0%} at which drafts usually pay{outcome}."


def length(row: Row) -> Iterator[str]:
    """Whether a chain is too long or too short, and how much is drafted in vain."""
    if row["tree"] != "chain" or not row["acceptance_by_position"]:
        return
    last, drafts = row["acceptance_by_position"][-1], len(row["acceptance_by_position"])
    find = "python -m eval.predict finds the best length."
    if last < RARE and drafts > 1:
        yield f"Only {last:.0%} of the rounds accept all {drafts} drafted tokens: draft fewer; {find}"
    elif last > OFTEN:
        yield f"{last:.0%} of the rounds accept all {drafts} drafted tokens: draft more; {find}"
    refused = 1 - row["acceptance_rate"]
    if refused > WASTE and row["stop_drafting"] == "fixed":
        yield (
            f"{refused:.0%} of the drafted tokens are refused ({row['wasted_drafts']}): try "
            "decode.stop_drafting=confidence."
        )


def categories(here: Sequence[Row]) -> Iterator[str]:
    """Where it loses, and where chains are too short."""
    each = [row for row in here if row["category"] != "all"]
    losing = [row for row in each if row["speedup_ci"] is not None and row["speedup_ci"][1] < 1]
    if losing:
        listed = ", ".join(f"{row['category']} {ranged(row)}" for row in losing)
        yield f"It loses in {listed}: switch it off there, or train on more of it."
    regular = [
        row
        for row in each
        if row["tree"] == "chain"
        and row["acceptance_by_position"]
        and row["acceptance_by_position"][-1] > OFTEN
    ]
    if regular and len(each) > 1:
        listed = ", ".join(f"{row['category']} ({row['acceptance_by_position'][-1]:.0%})" for row in regular)
        yield (
            f"Chains are accepted whole in most rounds of {listed}: such text wants longer drafts or a tree "
            "(decode.tree=dynamic)."
        )


def contexts(here: Sequence[Row]) -> Iterator[str]:
    """Whether the draft weakens behind long prompts, and where the answer stands far back: the shortest and
    the longest, if their intervals lie apart."""
    by_length = [
        (f"prompts of {r['context_bucket']} tokens", r) for r in here if r["context_bucket"] != "all"
    ]
    far_back = [(f"{r['category']} tokens", r) for r in here if r["category"].startswith("recall ")]
    for found in (by_length, sorted(far_back, key=lambda one: int(one[1]["category"].split()[1]))):
        known = [(name, row) for name, row in found if row["mean_acceptance_length_ci"] is not None]
        if len(known) < 2:
            continue
        (near, short), (far, long) = known[0], known[-1]
        if long["mean_acceptance_length_ci"][1] < short["mean_acceptance_length_ci"][0]:
            yield (
                f"With {far} a round makes {long['mean_acceptance_length']:.2f} tokens, with {near} it makes "
                f"{short['mean_acceptance_length']:.2f}: the draft is weak at long contexts; train it on "
                "longer rows (data.max_length)."
            )


def loops(first: Row, replies: Sequence[Row]) -> Iterator[str]:
    """What replies that end in a loop add to the speedup."""
    if not first["looped"]:
        return
    said = f"{first['looped']} of {first['pairs']} replies end in a loop, which any draft predicts"
    without = next((row for row in replies if row["reply"] == "not looped"), None)
    if without is None or without["speedup"] is None or first["speedup"] is None:
        yield f"{said}: measure on prompts that this target can answer."
    else:
        yield f"{said}: without them it is {times(without['speedup'])} instead of {times(first['speedup'])}."


def slower(row: Row) -> Iterator[str]:
    share = row["per_request"]["slower"]
    if share is not None and share >= FEW_SLOWER and row["speedup"] is not None and row["speedup"] > 1:
        yield f"{share:.0%} of the prompts are answered more slowly than without it."


def weight(row: Row, memory: dict[str, Any]) -> Iterator[str]:
    """What the draft takes: time of a round, and memory."""
    spent = [row[name]["p50"] for name in ("draft_ms", "target_ms", "decoder_ms") if row[name]]
    if spent and (share := spent[0] / sum(spent)) > HEAVY:
        yield (
            f"The draft takes {share:.0%} of a round ({spent[0]:.1f} of {sum(spent):.1f} ms): a smaller one, "
            "or one with a smaller vocabulary, would pay more."
        )
    share = memory["draft_weights"] / memory["target_weights"]
    weights, draft_cache, target_cache = (
        f"{(memory[name] or 0) / 1e6:,.1f} MB" for name in ("draft_weights", "draft_cache", "target_cache")
    )
    room = "; the room it takes is missing for other sequences" if share > HEAVY else ""
    yield (
        f"The draft adds {weights} of weights ({share:.0%} of the target's) and {draft_cache} of cache "
        f"beside the target's {target_cache} at batch {row['batch_size']}{room}."
    )
