"""Traces written out by hand, a tiny pair whose parts are made slow on purpose, and the command itself."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from rich.console import Console

from configs.errors import ConfigError, TargetError, TrafficError
from configs.schema import (
    Config,
    DataConfig,
    DecodeConfig,
    Drafting,
    Dtype,
    EvalConfig,
    MethodConfig,
    ProfileConfig,
    TargetConfig,
    Tree,
)
from data.tokens import Prompt
from decoding.build import build_decoder
from decoding.cache import KVCache
from decoding.decoder import Batch
from decoding.drafters.lookup import LookupDrafter
from decoding.law import Law
from decoding.sequence import Params, Request
from eval.profile import (
    Row,
    Timed,
    bandwidth,
    by_clock,
    by_kernels,
    decoder_of,
    endless,
    floor_of,
    methods,
    middle,
    new_tokens,
    notes,
    profile,
    row_of,
    text,
    timed,
    weight_bytes,
)
from eval.ranges import PARTS, Clock, Mark, marked, marks_of
from eval.trace import Event, Share, Split, split
from models.target import Target
from tests.conftest import tiny_draft, tiny_target
from tests.eval.samples import tiny_pair

RUN = Path("tiny") / "20260101-000000"
STEPS = 4


# ---- the clock ----


class Cake:
    """Takes no time but what the clock is told."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def bake(self) -> str:
        self.clock[0] += 1
        self.stir()
        self.stir()
        return "cake"

    def stir(self) -> None:
        self.clock[0] += 10


def test_the_clock_gives_time_to_the_innermost_part(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [0.0]
    monkeypatch.setattr("eval.ranges.perf_counter", lambda: told[0])
    cake, clock = Cake(told), Clock()
    with marked([Mark(cake, "bake", "round"), Mark(cake, "stir", "verify")], clock.wrap):
        assert cake.bake() == "cake"
    assert clock.seconds == {"round": 1, "verify": 20}
    assert vars(cake) == {"clock": told}  # nothing stays behind


def test_marks_end_with_an_error_and_leave_an_instances_own_method() -> None:
    cake: Any = Cake([0.0])
    clock = Clock()

    def burn() -> None:
        raise ValueError("burnt")

    cake.bake = burn
    with pytest.raises(ValueError, match="burnt"), marked([Mark(cake, "bake", "round")], clock.wrap):
        cake.bake()
    assert cake.bake is burn
    assert clock.entered == []


# ---- traces ----


def ranged(name: str, start: float, end: float, cat: str = "user_annotation") -> Event:
    return {"ph": "X", "cat": cat, "name": name, "tid": 7, "ts": start, "dur": end - start, "args": {}}


def operator(start: float, end: float) -> Event:
    return ranged("aten::mm", start, end, "cpu_op")


def on_gpu(name: str, cat: str, start: float, end: float, correlation: int) -> Event:
    event = ranged(name, start, end, cat)
    return event | {"tid": 99 if cat == "kernel" else 7, "args": {"correlation": correlation}}


def test_a_round_on_the_host_is_split_into_operators_and_gaps() -> None:
    # The first round does not count, nor what lies between rounds, nor another thread, nor foreign ranges.
    # 100..200 does: the loop's own 100..110 and 190..200, an operator in 105..110;
    # attention 110..190, operators in 120..150 (one inside it) and 160..190; verify within it in 150..160.
    events = [
        ranged("round", 0, 50),
        operator(10, 40),
        operator(60, 70),
        ranged("round", 100, 200),
        ranged("foreign", 100, 150),
        operator(105, 110),
        ranged("target.attention", 110, 190),
        operator(120, 150),
        operator(130, 140),
        ranged("verify", 150, 160),
        operator(160, 190.0004),  # rounded up by the profiler
        operator(100, 200) | {"tid": 8},
    ]
    found = split(list(reversed(events)))
    micro = {part: (round(1e6 * one.busy), round(1e6 * one.gap)) for part, one in found.parts.items()}
    assert micro == {"round": (5, 15), "target.attention": (60, 10), "verify": (0, 10)}
    assert found.launch is None


def test_two_rounds_are_averaged() -> None:
    events = [ranged("round", 0, 1), ranged("round", 10, 20), ranged("round", 30, 60), operator(35, 39)]
    assert split(events).parts["round"] == pytest.approx((2e-6, 18e-6))
    with pytest.raises(ValueError, match="1 rounds"):
        split(events[:1])


def test_a_round_on_a_gpu_is_split_by_who_launched_and_who_waited() -> None:
    # host    round 100..200: MLP 110..130 launches kernel 1 at 115 and 2 at 125; verify 180..200 waits
    # device  kernel 1 120..150, kernel 2 140..170 (20 of its own), nothing in 100..120 and 170..200
    events = [
        ranged("round", 0, 50),
        on_gpu("cudaLaunchKernel", "cuda_runtime", 5, 6, 9),
        on_gpu("old", "kernel", 10, 20, 9),
        ranged("round", 100, 200),
        ranged("target.mlp", 110, 130),
        on_gpu("cudaLaunchKernel", "cuda_runtime", 115, 118, 1),
        on_gpu("cudaLaunchKernel", "cuda_runtime", 125, 127, 2),
        ranged("verify", 180, 200),
        on_gpu("cudaDeviceSynchronize", "cuda_runtime", 181, 199, 3),
        on_gpu("gemm", "kernel", 120, 150, 1),
        on_gpu("gemm", "kernel", 140, 170, 2),
    ]
    found = split(events)
    micro = {part: (round(1e6 * one.busy), round(1e6 * one.gap)) for part, one in found.parts.items()}
    # Idle 100..110 and 170..180 in the loop, 110..120 while the MLP was being launched, 180..200 in verify.
    assert micro == {"target.mlp": (50, 10), "round": (0, 20), "verify": (0, 20)}
    assert found.launch == pytest.approx(5e-6)
    assert found.sync == pytest.approx(18e-6)


def test_on_a_gpu_kernels_keep_their_time_and_gaps_fill_the_bare_step() -> None:
    found = Split({"target.mlp": Share(5.0, 1.0), "round": Share(0.0, 4.0)}, launch=1.0, sync=1.0)
    # Under the profiler 10 s, bare 7: of the 5 s of gaps 2 are left.
    assert by_kernels(found, 7.0) == {"target.mlp": Share(5.0, 0.4), "round": Share(0.0, 1.6)}
    assert by_kernels(found, 4.0)["round"] == Share(0.0, 0.0)


def test_on_a_cpu_the_clock_says_how_long_and_the_trace_what_share_was_a_gap() -> None:
    found = Split({"target.mlp": Share(6.0, 2.0), "verify": Share(0.0, 3.0)}, None, None)
    parts = by_clock(found, {"target.mlp": 4.0, "verify": 1.0, "commit": 0.5})
    assert parts == {"target.mlp": Share(3.0, 1.0), "verify": Share(0.0, 1.0), "commit": Share(0.0, 0.5)}


def test_the_middle_half() -> None:
    assert middle([9.0, 1.0, 2.0, 100.0, 3.0, 4.0, 5.0, 0.0], float) == [2.0, 3.0, 4.0, 5.0]
    assert middle([3.0, 1.0], float) == [1.0, 3.0]


# ---- a tiny pair ----


@pytest.fixture
def target() -> Target:
    return endless(tiny_target())


def requests(decode: DecodeConfig, count: int = 1) -> list[Request]:
    params = replace(Params.of(decode, seed=0), max_new_tokens=new_tokens(decode, STEPS))
    return [Request([5 + i, 6, 7, 8, 9], params) for i in range(count)]


def run(target: Target, decode: DecodeConfig, draft: Any = None, count: int = 1) -> Row:
    decoder = decoder_of(target, draft, replace(decode, batch_size=count), "tiny")
    return row_of("some", 5, count, timed(decoder, draft, requests(decode, count), STEPS), floor=1e-3)


PLAIN = DecodeConfig(draft_tokens=0)
CHAIN = DecodeConfig(draft_tokens=3)


def test_parts_of_plain_decoding_add_up_and_none_is_a_drafts(target: Target) -> None:
    row = run(target, PLAIN)
    assert set(row.parts) == {part for part in PARTS if not part.startswith("draft")}
    assert all(0 <= part.gap_ms <= part.ms for part in row.parts.values())
    assert sum(part.ms for part in row.parts.values()) == pytest.approx(row.clocked_ms)
    assert row.adds_up == pytest.approx(row.clocked_ms / row.step_ms)
    assert (row.nodes, row.tokens_per_round, row.draft_forwards) == (1, 1, 0)
    # 5 tokens of prompt, less the pending one that the prefill added: 5 rows, and one more each round.
    assert row.mean_context == 5 + 3 + (2 * STEPS - 1) / 2
    assert row.launch_ms is row.sync_ms is None


@pytest.mark.parametrize("tree", [Tree.chain, Tree.dynamic])
def test_a_speculative_round_has_every_part(target: Target, tree: Tree) -> None:
    decode = replace(CHAIN, tree=tree, tree_nodes=6, tree_width=2)
    row = run(target, decode, tiny_draft(target), count=2)
    assert set(row.parts) == set(PARTS)
    assert all(part.ms > 0 for part in row.parts.values())
    assert row.nodes == (4 if tree is Tree.chain else 7)
    assert row.draft_forwards == 3 or tree is Tree.dynamic


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock for the parts that stands still until it is told to go on."""
    time = [0.0]
    monkeypatch.setattr("eval.ranges.perf_counter", lambda: time[0])
    monkeypatch.setattr("eval.profile.under_profiler", lambda *_: ([], []))
    return time


def slowed(method: Any, told: list[float]) -> Any:
    def slow(*args: Any, **kwargs: Any) -> Any:
        told[0] += 1
        return method(*args, **kwargs)

    return slow


def clocked(target: Target, decode: DecodeConfig, draft: Any = None) -> list[dict[str, float]]:
    """Seconds by part of each clocked round, without those that took none."""
    decoder = build_decoder(target, draft, decode)
    rounds = timed(decoder, draft, requests(decode), STEPS).clocked
    return [{part: taken for part, taken in one.items() if taken} for one in rounds]


@pytest.mark.parametrize(
    ("path", "of_draft", "expected"),
    [
        ("model.layers.1.self_attn", False, {"target.attention": 1}),
        ("model.layers.1.self_attn.q_proj", False, {"target.attention": 1}),
        ("model.layers.2.mlp", False, {"target.mlp": 1}),
        ("lm_head", False, {"target.lm_head": 1}),
        ("model.norm", False, {"target.other": 1}),
        ("layers.0.self_attn", True, {"draft.attention": 3}),  # one a drafted token
        ("layers.0.mlp", True, {"draft.mlp": 3}),
        ("lm_head", True, {"draft.lm_head": 3}),
        ("fc", True, {"draft.other": 1}),
    ],
)
def test_a_slow_module_shows_in_its_own_part_alone(
    target: Target, told: list[float], path: str, of_draft: bool, expected: dict[str, float]
) -> None:
    draft = tiny_draft(target)
    module = (draft if of_draft else target.model).get_submodule(path)
    module.forward = slowed(module.forward, told)
    assert clocked(target, CHAIN, draft) == [expected] * STEPS


@pytest.mark.parametrize(
    ("owner", "method", "expected"),
    [
        (Law, "choices", {"verify": 1}),
        (KVCache, "commit_all", {"commit": 1}),
        (Batch, "rows", {"inputs": 1}),
        (Batch, "retire", {"round": 1}),
        (LookupDrafter, "one", {"draft.tree": 1}),
    ],
)
def test_what_is_slow_outside_the_modules_shows_too(
    target: Target,
    told: list[float],
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    method: str,
    expected: dict[str, float],
) -> None:
    monkeypatch.setattr(owner, method, slowed(getattr(owner, method), told))
    assert clocked(target, replace(CHAIN, drafters=[Drafting.lookup])) == [expected] * STEPS


def test_a_sleeping_module_is_a_gap_of_its_part(target: Target) -> None:
    attention: Any = target.layers[1].self_attn
    forward = attention.forward

    def sleeping(*args: Any, **kwargs: Any) -> Any:
        sleep(0.02)
        return forward(*args, **kwargs)

    attention.forward = sleeping
    part = run(target, PLAIN).parts["target.attention"]
    assert part.ms > 20
    assert part.gap_ms > 0.5 * part.ms  # no operator runs while it sleeps


def test_profiling_changes_no_output_and_leaves_nothing_behind(target: Target) -> None:
    draft = tiny_draft(target)
    decoder = build_decoder(target, draft, replace(CHAIN, batch_size=2))
    before = [set(vars(module)) for module in (*target.model.modules(), *draft.modules())]
    found = timed(decoder, draft, requests(CHAIN, 2), STEPS)
    assert [set(vars(module)) for module in (*target.model.modules(), *draft.modules())] == before
    undisturbed = build_decoder(target, draft, replace(CHAIN, batch_size=2)).generate_all(requests(CHAIN, 2))
    for tokens, whole in zip(found.tokens, undisturbed, strict=True):
        assert len(tokens) > 2 * STEPS
        assert tokens == whole.tokens[: len(tokens)]
    assert len(decoder.cache.free) == 2  # the batch is over


def test_layers_of_an_unknown_kind_are_refused(target: Target) -> None:
    class Batchlike:
        live = ()
        drafter = None

    layers: Any = target.layers
    for layer in layers:
        layer.register_module("mixer", layer.self_attn)
        del layer.self_attn
    with pytest.raises(
        TargetError, match=r"consist of mlp, .*mixer, and none of these is known as attention"
    ):
        marks_of(Batchlike(), target)  # pyright: ignore[reportArgumentType]


# ---- the floor ----


def test_the_floor_is_bytes_over_bandwidth(target: Target) -> None:
    draft = tiny_draft(target)
    decoder = build_decoder(target, draft, CHAIN)
    plain = Timed([], [], [], forwards=0, nodes=1, emitted=1, mean_context=9, events=[], tokens=[])
    # Of 4 layers: q and o 32 x 32, k and v 32 x 16, three of 32 x 64, two norms; the last norm and the head.
    weights = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32 + 64 * 32
    # 4 layers of keys and values, 2 heads of 8, of 9 rows and the new one, in each of 2 sequences.
    rows = 4 * 2 * 16 * (9 + 1) * 2
    assert floor_of(target, draft, decoder, plain, 2, speed=1e6) == pytest.approx(4 * (weights + rows) / 1e6)
    drafted = replace(plain, forwards=3)
    more = floor_of(target, draft, decoder, drafted, 2, 1e6) - floor_of(target, draft, decoder, plain, 2, 1e6)
    assert more == pytest.approx(3 * weight_bytes(draft) / 1e6)
    assert weight_bytes(draft) == 4 * sum(p.numel() for p in draft.parameters())


def test_bandwidth_is_a_number_of_bytes_per_second() -> None:
    assert 1e8 < bandwidth(torch.device("cpu"), size=1 << 24, repeats=2) < 1e13


# ---- what is profiled ----


def test_methods() -> None:
    tree = DecodeConfig(draft_tokens=4, tree=Tree.dynamic, govern=True)
    found = methods(tree)
    assert list(found) == ["plain", "chain", "dynamic"]
    assert found["plain"].draft_tokens == 0
    assert [one.tree for one in found.values()][1:] == [Tree.chain, Tree.dynamic]
    assert not any(one.govern for one in found.values())
    assert list(methods(DecodeConfig())) == ["plain", "chain"]
    assert list(methods(DecodeConfig(draft_tokens=0))) == ["plain"]


def test_a_text_ends_with_its_prompt_and_has_the_others_in_front() -> None:
    chosen = [Prompt("a", "x", [1, 2]), Prompt("b", "x", [3, 4, 5])]
    assert text(chosen, 1, 2) == [4, 5]
    assert text(chosen, 1, 4) == [2, 3, 4, 5]
    assert text(chosen, 2, 7) == [1, 2, 3, 4, 5, 1, 2]


def test_notes_say_what_does_not_add_up() -> None:
    row = run(endless(tiny_target()), PLAIN)
    fine = replace(row, adds_up=1.01, floor_ms=row.step_ms / 4)
    said = " ".join(notes([fine], 2e9))
    assert "so it reaches 25% of its floor" in said
    assert "at 2.0 GB/s" in said
    assert "not steady" not in said
    assert "not steady" in " ".join(notes([fine, replace(row, adds_up=0.9)], 2e9))


# ---- the command ----


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr("eval.profile.share_of_others", lambda: 0.0)
    tiny_pair(tmp_path, RUN)
    rows = [{"id": str(i), "category": "x", "prompt_ids": [5 + i, 6, 7, 8]} for i in range(3)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Config(
        experiment="tiny",
        runs=str(tmp_path / "runs"),
        threads=1,
        target=TargetConfig(name=str(tmp_path / "target"), dtype=Dtype.float32, device="cpu"),
        method=MethodConfig(name="eagle3"),
        data=DataConfig(folder=str(tmp_path / "data")),
        decode=DecodeConfig(draft_tokens=3, tree=Tree.dynamic, tree_nodes=6, tree_width=2),
        eval=EvalConfig(),
        profile=ProfileConfig(contexts=[6], batch_sizes=[1, 2], steps=STEPS, bandwidth=10.0, trace=True),
    )


def shown(config: Config) -> tuple[dict[str, Any], str]:
    screen = io.StringIO()
    return profile(config, Console(file=screen, width=110)), screen.getvalue()


def test_the_command(config: Config) -> None:
    found, screen = shown(config)
    output = Path(config.runs) / RUN / "measure"
    assert json.loads((output / "profile.json").read_text()) == found
    rows = found["rows"]
    settings = [(row["method"], row["batch_size"], row["context"]) for row in rows]
    assert settings == [(way, batch, 6) for way in ("plain", "chain", "dynamic") for batch in (1, 2)]
    for row in rows:
        assert row["floor_share"] == pytest.approx(row["floor_ms"] / row["step_ms"])
        assert any(name.startswith("draft") for name in row["parts"]) == (row["method"] != "plain")
    for word in ("attention", "gaps", "floor", "Drafting (draft)", "dynamic", "The parts add up to"):
        assert word in screen
    assert all(len(line) <= 110 for line in screen.splitlines() if str(output) not in line)
    picture = (output / "profile.svg").read_text()
    assert picture.startswith("<svg")
    assert "dynamic, batch 2, 6" in picture

    trace = json.loads((output / "trace.json").read_text())
    names = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"}
    assert names >= {*PARTS, "plain, batch 1, context 6", "dynamic, batch 2, context 6"}


def test_without_drafting_no_draft_is_needed(config: Config) -> None:
    config.runs = config.runs + "/elsewhere"
    config.decode.draft_tokens = 0
    config.profile = ProfileConfig(contexts=[6], batch_sizes=[1], steps=STEPS, bandwidth=10.0)
    found, screen = shown(config)
    assert [row["method"] for row in found["rows"]] == ["plain"]
    assert "Drafting" not in screen
    assert sorted(path.name for path in (Path(config.runs) / "tiny").iterdir()) == [
        "profile.json",
        "profile.svg",
    ]


def test_what_cannot_be_profiled_is_refused(config: Config) -> None:
    config.profile.contexts = [6, 480]  # of 512 positions
    with pytest.raises(ConfigError, match=r"profile\.contexts has 480, and \d+ tokens may follow"):
        shown(config)
    (Path(config.data.folder) / "heldout.jsonl").write_text("")
    with pytest.raises(TrafficError, match="no held-out prompts"):
        shown(config)
    config.decode.compile = True
    with pytest.raises(ConfigError, match=r"eval\.profile is about eager forwards"):
        shown(config)
