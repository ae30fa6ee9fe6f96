"""The client against a server that misbehaves, the figures by hand, and whole comparisons of two fakes."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from configs.errors import ConfigError, TrafficError
from configs.rules import check
from configs.schema import AbConfig, Config, DataConfig, DecodeConfig, EvalConfig, MethodConfig, Source
from data.tokens import prompts
from eval import ab as stage
from eval import ab_figures as figures
from eval import replay
from eval.ab import ab, compared, verdict
from eval.ab_figures import Pair, quantile
from eval.endpoint import (
    Answer,
    Drafting,
    Endpoint,
    closed_loop,
    http_client,
    open_loop,
    poisson,
    sglang_length,
    text_of,
    vllm_drafting,
)
from eval.replay import Bodies, loads, plan
from models.files import read_lines
from tests.eval.fake_server import FakeServer, Play

SLACK = 0.25  # seconds that this process may take to read what is there; the machine may be busy
SERVERS = {"a": {"model": "m"}, "b": {"model": "m"}}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


def body(text: str = "x") -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


def answered(
    url: str, due: float | None = None, timeout: float = 10.0, attempts: int = 1, longest_wait: float = 0.01
) -> Answer:
    async def ask() -> Answer:
        async with http_client(timeout) as client:
            return await Endpoint(url, client, attempts, longest_wait).answer(body(), due)

    return asyncio.run(ask())


# ---- one request ----


def test_times_are_those_of_the_server(server: FakeServer) -> None:
    server.otherwise = Play(("a", "b", "c"), first=0.06, gap=0.03)
    due = time.perf_counter()
    answer = answered(server.url, due)
    assert (answer.text, answer.finish, answer.tokens, answer.error) == ("abc", "stop", 3, None)
    late = [piece - (sent - due) for piece, sent in zip(answer.pieces, server.sent, strict=True)]
    assert all(0 <= one < SLACK for one in late)
    assert answer.pieces[0] >= 0.06  # the chunk that only names the role came at once
    assert server.sent[2] - server.sent[0] >= 0.06
    assert answer.pieces[-1] <= answer.seconds < answer.pieces[-1] + SLACK


def test_several_tokens_in_a_chunk_are_one_emission(server: FakeServer) -> None:
    server.otherwise = Play(("one two three ", "four five"), gap=0.05, tokens=5)
    answer = answered(server.url)
    assert len(answer.emissions) == 2
    assert answer.tokens == 5
    assert figures.itl(answer) == [pytest.approx(1e3 * (answer.pieces[1] - answer.pieces[0]))]
    assert figures.itl(answer)[0] >= 50 - 1e3 * SLACK
    assert figures.tpot(answer) == [pytest.approx(1e3 * (answer.seconds - answer.pieces[0]) / 4)]


def test_chunks_of_one_round_are_one_emission() -> None:
    answer = Answer(0.0, 0.3, [0.1, 0.1002, 0.1004, 0.2, 0.2003])
    assert answer.emissions == [0.1, 0.2]
    assert figures.itl(answer) == [pytest.approx(100)]


@pytest.mark.parametrize(
    ("play", "kind"),
    [
        (Play(status=500), "HTTP 500"),
        (Play(status=429, retry_after=7), "HTTP 429"),
        (Play(status=400), "HTTP 400"),
        (Play(cut=2), "broken stream"),
        (Play(done=False), "broken stream"),
        (Play(garbage=b'{"choices": [{'), "bad chunk"),
        (Play(garbage=b'{"choices": 3}'), "bad chunk"),
        (Play(garbage=b"[1]"), "bad chunk"),
        (Play(garbage=b'{"error": {"message": "out of memory"}}'), "error in the stream"),
        (Play(empty=True), "empty stream"),
        (Play((), finish=None, usage=False), "empty stream"),
    ],
)
def test_each_failure_is_counted_as_what_it_is(server: FakeServer, play: Play, kind: str) -> None:
    server.otherwise = play
    answer = answered(server.url)
    assert (answer.error, answer.retried, answer.text) == (kind, [], "")
    assert len(server.bodies) == 1
    if kind == "error in the stream":
        assert "out of memory" in str(answer.said)


def test_no_server_and_no_answer_in_time(server: FakeServer) -> None:
    assert answered("http://127.0.0.1:9").error == "no connection"
    server.otherwise = Play(first=0.5)
    assert answered(server.url, timeout=0.1).error == "timeout"


def test_a_reply_without_usage_is_whole(server: FakeServer) -> None:
    server.otherwise = Play(usage=False)
    answer = answered(server.url)
    assert (answer.error, answer.tokens, answer.text) == (None, None, "one two three")
    assert figures.tpot(answer) == []


def test_text_of_no_tokens_is_a_reply_without_usage(server: FakeServer) -> None:
    server.otherwise = Play(tokens=0)
    assert answered(server.url).tokens is None
    server.otherwise = Play(garbage=b'{"choices": [], "usage": {"completion_tokens": Infinity}}')
    assert answered(server.url).error == "bad chunk"


def test_a_reply_of_nothing_is_whole_and_has_no_first_token(server: FakeServer) -> None:
    server.otherwise = Play((), tokens=1)
    answer = answered(server.url)
    assert (answer.error, answer.tokens, answer.ttft) == (None, 1, None)
    assert figures.ttft(answer) == figures.itl(answer) == []


def test_what_is_asked_again_is_counted_and_its_time_too(server: FakeServer) -> None:
    server.script["x"] = [Play(status=429, first=0.05), Play(cut=1, first=0.05)]
    answer = answered(server.url, attempts=3)
    assert (answer.error, answer.text) == (None, "one two three")
    assert answer.retried == ["HTTP 429", "broken stream"]
    assert answer.pieces[0] > 0.1
    assert len(server.bodies) == 3
    server.script["x"] = [Play(status=503)] * 3
    answer = answered(server.url, attempts=3)
    assert (answer.error, answer.retried) == ("HTTP 503", ["HTTP 503", "HTTP 503"])


def test_line_separators_inside_a_string_do_not_end_the_line(server: FakeServer) -> None:
    server.otherwise = Play(("a\u2028b", "\x85c"))
    assert answered(server.url).text == "a\u2028b\x85c"


def test_all_that_a_piece_says_is_text_but_not_its_random_ids() -> None:
    call = {"id": "call_7f3a", "function": {"name": "f", "arguments": '{"a"'}}
    assert text_of({"reasoning_content": "so ", "content": "yes", "tool_calls": [call]}) == 'so yesf{"a"'
    assert text_of({"reasoning": "so"}) == "so"
    assert text_of({"role": "assistant", "content": ""}) == ""


# ---- many ----


def test_closed_loop_keeps_so_many_under_way(server: FakeServer) -> None:
    server.otherwise = Play(first=0.03)

    async def run() -> list[Answer]:
        async with http_client(10.0) as client:
            endpoint = Endpoint(server.url, client)
            return await closed_loop(lambda i, due: endpoint.answer(body(str(i)), due), 8, 3)

    answers = asyncio.run(run())
    assert server.busiest == 3
    assert sorted(server.asked()) == [str(i) for i in range(8)]
    assert len(answers) == 8


def test_open_loop_sends_when_it_is_due_and_waits_for_nobody(server: FakeServer) -> None:
    server.otherwise = Play(first=0.3)
    arrivals = [0.0, 0.02, 0.04]

    async def run() -> list[Answer]:
        async with http_client(10.0) as client:
            endpoint = Endpoint(server.url, client)
            return await open_loop(lambda i, due: endpoint.answer(body(str(i)), due), arrivals)

    began = time.perf_counter()
    answers = asyncio.run(run())
    assert server.busiest == 3
    assert server.asked() == ["0", "1", "2"]
    assert all(came - began >= due for came, due in zip(server.came, arrivals, strict=True))
    assert all(0 <= answer.sent < SLACK for answer in answers)


def test_a_request_that_is_late_has_waited(server: FakeServer) -> None:
    answer = answered(server.url, due=time.perf_counter() - 2.0)
    assert answer.sent >= 2.0
    assert answer.pieces[0] >= 2.0


def test_poisson_arrivals() -> None:
    arrivals = poisson(20_000, 4.0, seed=1)
    gaps = np.diff([0.0, *arrivals])
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)  # exponential: its deviation is its mean
    assert poisson(5, 4.0, seed=1) == arrivals[:5]
    assert poisson(5, 4.0, seed=2) != arrivals[:5]


# ---- what servers count ----

VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="a}b"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a}b"} 2.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a}b"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a}b"} 36.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a}b"} 15.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a}b",position="1"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a}b",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="a}b",position="0"} 1.0
vllm:e2e_request_latency_seconds_bucket{le="+Inf"} NaN
"""


def test_vllms_counters() -> None:
    counted = vllm_drafting(VLLM)
    assert counted is not None
    assert counted == Drafting(12, 36, 15, [10, 5])
    assert counted.since(Drafting(2, 6, 1, [1])) == Drafting(10, 30, 14, [9, 5])
    assert vllm_drafting("vllm:num_requests_running 0.0\n") is None


def test_sglangs_mean() -> None:
    told = {"internal_states": [{"avg_spec_accept_length": 2.5}, {"avg_spec_accept_length": 3.5}]}
    assert sglang_length(told, "sglang:spec_accept_length 9.0") == 3.0
    assert sglang_length({}, 'sglang:spec_accept_length{model_name="m"} 2.25\n') == 2.25
    assert sglang_length({}, "sglang:spec_accept_length 0.0\n") is None  # no speculation
    assert sglang_length({"internal_states": [{}]}, "") is None


# ---- figures ----


def line(
    a: list[Answer], b: list[Answer], seconds: tuple[float, float], prompts: list[str]
) -> dict[str, Any]:
    made: dict[str, Any] = {"load": 0, "first": "a", "prompts": prompts}
    for side, answers, wall in (("a", a, seconds[0]), ("b", b, seconds[1])):
        made[side] = {
            "seconds": wall,
            "client_share": 0.1,
            "drafting": None,
            "acceptance_length": None,
            "answers": [vars(answer) for answer in answers],
        }
    return made


def reply(seconds: float, tokens: int | None = 10, text: str = "t", **rest: Any) -> Answer:
    return Answer(0.0, seconds, [seconds / 2], text, "stop", tokens, **rest)


def config(**settings: Any) -> Config:
    return Config(
        experiment="test",
        method=MethodConfig(name="eagle3"),
        decode=DecodeConfig(**settings.pop("decode", {})),
        eval=EvalConfig(**{"bootstrap": 200, "warmup_prompts": 0, **settings.pop("eval", {})}),
        data=DataConfig(sources=[Source(path="t")], **settings.pop("data", {"folder": "data"})),
        ab=AbConfig(**settings.pop("ab", {})),
        **settings,
    )


def load_of(lines: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    made = config(**settings)
    return compared(loads(made)[0], lines, SERVERS, made)


def test_a_paired_ratio_is_sharper_than_its_sides() -> None:
    # B takes half of A's time for every prompt, however long that is: the ratio does not spread.
    lines = [line([reply(s)], [reply(s / 2)], (s, s / 2), [str(s)]) for s in (1.0, 4.0, 16.0)]
    load = load_of(lines)
    assert load["speedup"] == pytest.approx(2.0)
    assert load["speedup_ci"] == pytest.approx([2.0, 2.0])
    tokens = load["tokens_per_s"]
    assert (tokens["a"], tokens["b"], tokens["ratio"]) == pytest.approx((30 / 21, 60 / 21, 2.0))
    assert tokens["ratio_ci"] == pytest.approx([2.0, 2.0])
    assert tokens["a_ci"][0] < 1.0 < 5.0 < tokens["a_ci"][1]
    e2e = load["e2e_ms"]["p50"]
    assert (e2e["a"], e2e["b"], e2e["ratio"]) == pytest.approx((4000, 2000, 0.5))
    assert load["verdict"].startswith("Closed loop, 1 at a time: B is faster, B makes 2.00× [")


def test_throughput_is_by_the_wall_clock() -> None:
    # Two at a time: 3 s and 1 s in 3 s of wall; 20 tokens, 2 requests.
    load = load_of([line([reply(3.0), reply(1.0)], [reply(3.0), reply(1.0)], (3.0, 4.0), ["x", "y"])])
    assert load["tokens_per_s"]["a"] == pytest.approx(20 / 3)
    assert load["tokens_per_s"]["b"] == pytest.approx(20 / 4)
    assert load["tokens_per_s"]["b_ci"] == pytest.approx([10 / 3, 10])  # each charged what it took of 4 s
    assert load["requests_per_s"]["a"] == pytest.approx(2 / 3)
    assert load["speedup"] == pytest.approx(1.0)  # the requests took as long


def test_a_percentile_that_few_values_support_is_absent_with_the_reason() -> None:
    load = load_of([line([reply(1.0)], [reply(1.0)], (1.0, 1.0), [str(i)]) for i in range(12)])
    assert load["e2e_ms"]["p90"]["a"] == pytest.approx(1000)
    assert load["e2e_ms"]["p99"]["a"] is None
    assert load["e2e_ms"]["p99"]["reason"] == "p99 takes 1000 values, and there are 12"
    assert load["itl_ms"]["p50"]["reason"] == "p50 takes 1 values, and there are 0"


def test_few_blocks_are_told() -> None:
    lines = [line([reply(1.0)] * 2, [reply(1.0)] * 2, (1.0, 1.0), ["x", "y"])] * 9
    assert "Each side had 9 blocks" in " ".join(load_of(lines, ab={"block": 2})["notes"])
    assert "blocks" not in " ".join(load_of([*lines, lines[0]], ab={"block": 2})["notes"])


def test_failed_requests_are_counted_and_cost_time() -> None:
    broken = Answer(0.0, 2.0, error="broken stream", said="it ended without [DONE]")
    again = reply(1.0, retried=["HTTP 429"])
    lines = [line([again], [reply(1.0)], (1.0, 1.0), [str(i)]) for i in range(19)]
    lines.append(line([reply(1.0)], [broken], (1.0, 2.0), ["last"]))
    load = load_of(lines)
    b = load["sides"]["b"]
    assert (b["requests"], b["answered"], b["errors"]) == (20, 19, {"broken stream": 1})
    assert load["sides"]["a"]["retried"] == {"HTTP 429": 19}
    assert load["tokens_per_s"]["b"] == pytest.approx(190 / 21)
    assert load["whole_pairs"] == 19
    assert load["details"][-1]["b"]["error"] == "broken stream"
    assert "failed requests, B: 1 of 20 (broken stream: 1)" in load["verdict"]
    assert "19 of 20 requests that both sides answered" in " ".join(load["notes"])
    lines.append(line([reply(1.0)], [broken], (1.0, 2.0), ["one more"]))
    assert "cannot tell, too many requests failed (B: 2 of 21" in load_of(lines)["verdict"]


def test_without_usage_there_are_no_tokens_to_tell() -> None:
    lines = [line([reply(1.0)], [reply(1.0, tokens=None)], (1.0, 1.0), [str(i)]) for i in range(3)]
    load = load_of(lines)
    assert load["speedup"] is None
    assert load["tokens_per_s"]["reason"] == "replies without usage: 0 of A's, 3 of B's"
    assert load["requests_per_s"]["a"] == pytest.approx(1.0)
    assert load["sides"]["b"]["without_usage"] == 3
    assert "cannot tell, the tokens of some replies are not known" in load["verdict"]


def test_identical_greedy_replies() -> None:
    lines = [
        line([reply(1.0, text="same")], [reply(1.0, text="same")], (1.0, 1.0), ["x"]),
        line([reply(1.0, text="abc")], [reply(1.0, text="abd")], (1.0, 1.0), ["y"]),
    ]
    load = load_of(lines)
    assert (load["identical_outputs"], load["identical_count"], load["compared_count"]) == (0.5, 1, 2)
    assert [one["parts_at"] for one in load["details"]] == [None, 2]
    drawn = load_of(lines, decode={"temperature": 0.7})
    assert drawn["identical_outputs"] is None
    assert "not compared at temperature > 0" in " ".join(drawn["notes"])
    ends = Answer(0.0, 1.0, [0.5], "ab", "length", 2), Answer(0.0, 1.0, [0.5], "ab", "stop", 2)
    assert figures.parting(Pair("z", dict(zip("ab", ends, strict=True)), {})) == 2


@pytest.mark.parametrize(
    ("ends", "said"),
    [([1.1, 1.3], "B is faster"), ([0.7, 0.9], "B is slower"), ([0.9, 1.2], "no difference is shown")],
)
def test_verdict_goes_by_the_interval(ends: list[float], said: str) -> None:
    side = {"requests": 9, "errors": {}}
    load = {"name": "open loop", "speedup": 1.0, "speedup_ci": ends, "sides": {"a": side, "b": side}}
    assert said in verdict(load)
    assert "cannot tell, too few prompts" in verdict({**load, "speedup_ci": None})


def test_quantiles_of_prompts_drawn_again() -> None:
    values, owners = [5.0, 1.0, 3.0, 2.0, 8.0], [0, 0, 1, 2, 2]
    drawn = np.array([[1.0, 1.0, 1.0], [2.0, 0.0, 1.0], [0.0, 3.0, 0.0]])
    for q in (0.5, 0.9):
        expected = [np.quantile(np.repeat(values, row[owners].astype(int)), q) for row in drawn]
        assert quantile(values, owners, q)(drawn) == pytest.approx(expected)
    assert np.isnan(quantile([1.0], [0], 0.5)(np.array([[0.0, 1.0]]))).all()


# ---- whole comparisons ----


def workspace(folder: Path, urls: tuple[str, str], **ab: Any) -> Config:
    """Six held-out prompts in two categories, and two servers."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    for split, names in (("train", "t"), ("heldout", "uvwxyz")):
        rows = [
            {
                "id": name,
                "category": "odd" if i % 2 else "even",
                "messages": [{"role": "user", "content": name}, {"role": "assistant", "content": "logged"}],
                "prompt_ids": [ord(name)],
            }
            for i, name in enumerate(names)
        ]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config(
        data={"folder": str(data)},
        runs=str(folder / "runs"),
        decode={"max_new_tokens": 7},
        ab={"a": urls[0], "b": urls[1], **ab},
    )


@pytest.fixture
def pair() -> Iterator[tuple[FakeServer, FakeServer]]:
    with FakeServer() as a, FakeServer() as b:
        yield a, b


def run(made: Config) -> tuple[dict[str, Any], str]:
    screen = io.StringIO()
    return ab(made, Console(file=screen, width=140)), screen.getvalue()


def output(made: Config) -> Path:
    return Path(made.runs) / "test" / "ab"


def test_both_sides_get_the_same_requests(tmp_path: Path, pair: tuple[FakeServer, FakeServer]) -> None:
    a, b = pair
    made = workspace(tmp_path, (a.url, b.url), concurrency=2, rate=500.0, block=3)
    made.decode.top_k = 5
    made.eval.repeats = 2
    written, _ = run(made)
    assert sorted(a.bodies) == sorted(b.bodies)
    assert sorted(a.asked()) == sorted("uvwxyz" * 4)  # two loads, two repeats
    first = json.loads(a.bodies[0])
    assert {name: first[name] for name in first if name not in ("messages", "seed")} == {
        "model": "m",
        "max_tokens": 7,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert len(first["messages"]) == 1  # the logged reply is not sent
    seeds = {json.loads(sent)["seed"] for sent in a.bodies}
    assert len(seeds) == 12  # of a prompt and repeat, the same under both loads
    assert [load["name"] for load in written["loads"]] == [
        "closed loop, 2 at a time",
        "open loop, 500 requests/s",
    ]
    assert all(load["sides"]["a"]["answered"] == 12 for load in written["loads"])


def test_a_comparison_end_to_end(tmp_path: Path, pair: tuple[FakeServer, FakeServer]) -> None:
    a, b = pair
    a.otherwise = Play(first=0.08, gap=0.04)
    b.otherwise = Play(("one two ", "three"), first=0.02, tokens=3)
    b.script["v"] = [Play(("one two ", "four"), first=0.02, tokens=3)]
    b.pages = {"/metrics": VLLM, "/version": '{"version": "0.11.0"}'}
    made = workspace(tmp_path, (a.url, b.url))
    written, screen = run(made)
    (load,) = written["loads"]
    assert written["servers"]["b"] == {
        "url": b.url.removesuffix("/v1"),
        "model": "m",
        "engine": "fake",
        "version": "0.11.0",
    }
    assert load["sides"]["a"]["acceptance"] is load["sides"]["b"]["acceptance"] is None  # nothing was counted
    assert load["e2e_ms"]["p50"]["a"] >= 160
    assert load["ttft_ms"]["p50"]["a"] >= 80
    assert load["ttft_ms"]["p50"]["b"] >= 20
    assert load["identical_count"] == 5
    assert load["sides"]["a"]["errors"] == {}
    assert "83% of 6" in screen
    assert "TTFT p50, ms" in screen
    assert "B: m at" in screen
    assert load["verdict"] in " ".join(screen.split())
    assert [file.name for file in output(made).iterdir()] == ["ab.json"]
    assert json.loads((output(made) / "ab.json").read_text()) == written


def test_acceptance_is_that_of_these_requests(
    tmp_path: Path, pair: tuple[FakeServer, FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    b.pages = {"/get_server_info": '{"version": "0.5", "internal_states": [{"avg_spec_accept_length": 2.5}]}'}
    count = 0

    async def counting(endpoint: Endpoint) -> Any:
        """10 drafts, 30 tokens, 12 accepted for each block; twice read for each."""
        nonlocal count
        if endpoint.root not in a.url:
            return await drafting(endpoint)
        count += 1
        done = count // 2
        return Drafting(100 + 10 * done, 30 * done, 12 * done, [8 * done, 4 * done])

    drafting = Endpoint.drafting
    monkeypatch.setattr(Endpoint, "drafting", counting)
    written, screen = run(workspace(tmp_path, (a.url, b.url), block=3))
    sides = written["loads"][0]["sides"]
    assert sides["a"]["acceptance"] == {
        "source": "vLLM's counters, over these requests",
        "drafts": 20,
        "mean_acceptance_length": 1 + 24 / 20,
        "acceptance_rate": 24 / 60,
        "acceptance_by_position": [16 / 20, 8 / 20],
    }
    assert sides["b"]["acceptance"]["mean_acceptance_length"] == 2.5
    assert written["servers"]["b"]["version"] == "0.5"
    assert "2.20" in screen


def test_misbehaviour_is_in_the_count(tmp_path: Path, pair: tuple[FakeServer, FakeServer]) -> None:
    a, b = pair
    b.script |= {"u": [Play(status=500)], "v": [Play(cut=1)], "w": [Play(usage=False)]}
    written, screen = run(workspace(tmp_path, (a.url, b.url), concurrency=3))
    side = written["loads"][0]["sides"]["b"]
    assert side["errors"] == {"HTTP 500": 1, "broken stream": 1}
    assert (side["requests"], side["answered"], side["without_usage"]) == (6, 4, 1)
    assert "2 of 6 (HTTP 500: 1, broken stream: 1)" in " ".join(screen.split())


class Killed(BaseException):
    """As SIGKILL: nothing catches it."""


def test_a_killed_run_goes_on(
    tmp_path: Path, pair: tuple[FakeServer, FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    made = workspace(tmp_path, (a.url, b.url))
    append, lines = replay.append_line, 0

    def until_killed(path: Path, obj: Any) -> None:
        nonlocal lines
        if lines == 2:
            raise Killed
        append(path, obj)
        lines += 1

    with monkeypatch.context() as patched:
        patched.setattr(replay, "append_line", until_killed)
        with pytest.raises(Killed):
            run(made)
    partial = output(made) / "ab.partial.jsonl"
    assert len(read_lines(partial)) == 3  # the key, and two pairs of blocks
    with open(partial, "a") as file:
        file.write('{"load": 0, "fi')  # torn by the kill
    written, screen = run(made)
    assert "Going on after 2 pairs of blocks" in screen
    # Six prompts, the third of them twice, since its pair was not on the disk.
    assert len(a.asked()) == len(b.asked()) == 7
    assert len({one["prompt"] for one in written["loads"][0]["details"]}) == 6
    assert not partial.exists()


def test_another_configuration_starts_anew_and_keeps_the_earlier_result(
    tmp_path: Path, pair: tuple[FakeServer, FakeServer]
) -> None:
    a, b = pair
    made = workspace(tmp_path, (a.url, b.url))
    run(made)
    made.decode.max_new_tokens = 8
    _, screen = run(made)
    assert "The comparison of another configuration is" in screen
    assert len(list(output(made).iterdir())) == 2
    assert len(a.asked()) == 12


def test_a_server_that_is_not_there_or_goes_away(tmp_path: Path, server: FakeServer) -> None:
    made = workspace(tmp_path, (server.url, "http://127.0.0.1:9/v1"))
    with pytest.raises(TrafficError, match=r"ab\.b=http://127\.0\.0\.1:9 does not answer"):
        run(made)
    with pytest.raises(
        ConfigError, match=r"ab\.b=http://127\.0\.0\.1:99999/v1 is no address: Port out of range"
    ):
        run(workspace(tmp_path, (server.url, "http://127.0.0.1:99999/v1")))


def test_too_many_failures_are_an_exit_status() -> None:
    lines = [line([reply(1.0)], [reply(1.0, error="HTTP 500")], (1.0, 1.0), [str(i)]) for i in range(3)]
    assert stage.failed_share(load_of(lines)) == {"a": 0, "b": 1}


def test_a_server_that_goes_away_stops_the_run(tmp_path: Path, pair: tuple[FakeServer, FakeServer]) -> None:
    a, b = pair
    made = workspace(tmp_path, (a.url, b.url), block=2)
    b.leave_after = 3  # in the middle of the second block
    with pytest.raises(TrafficError, match=r"ab\.b=.* stopped answering.*is kept.*same command again"):
        run(made)
    assert len(read_lines(output(made) / "ab.partial.jsonl")) == 3  # the key, two pairs: one request failed


def test_what_refuses_every_request_is_refused_at_once(
    tmp_path: Path, pair: tuple[FakeServer, FakeServer]
) -> None:
    a, b = pair
    made = workspace(tmp_path, (a.url, b.url))
    made.eval.warmup_prompts = 1
    b.otherwise = Play(status=404)
    with pytest.raises(TrafficError, match=r"answers the model 'm' with HTTP 404.*ab\.model"):
        run(made)
    b.pages = {"/v1/models": '{"data": []}'}
    with pytest.raises(TrafficError, match=r"lists no model.*set ab\.model"):
        run(made)


def test_warm_up_is_not_on_what_is_measured(tmp_path: Path, pair: tuple[FakeServer, FakeServer]) -> None:
    a, b = pair
    made = workspace(tmp_path, (a.url, b.url))
    made.eval.max_prompts, made.eval.warmup_prompts = 4, 2
    run(made)
    assert len(set(a.asked())) == 6
    assert sorted(a.asked()) == sorted(b.asked())


def test_names_that_differ_are_told(tmp_path: Path, pair: tuple[FakeServer, FakeServer]) -> None:
    a, b = pair
    b.model = "other"
    made = workspace(tmp_path, (a.url, b.url))
    written, _ = run(made)
    assert "different names: m and other" in " ".join(written["loads"][0]["notes"])
    made.ab.model = "m"
    run(made)
    assert json.loads(b.bodies[-1])["model"] == "m"


def test_sides_take_turns(tmp_path: Path) -> None:
    made = workspace(tmp_path, ("http://a", "http://b"))
    made.eval.repeats = 20
    blocks = list(plan(made, prompts(made, "heldout"), Bodies(made)))
    firsts = [block.order[0] for block in blocks]
    assert len(firsts) == 120
    assert all(x != y for x, y in zip(firsts[::2], firsts[1::2], strict=True))
    assert 15 <= firsts[::2].count("a") <= 45  # of 60: drawn


def test_blocks_by_load(tmp_path: Path) -> None:
    made = workspace(tmp_path, ("http://a", "http://b"), concurrency=8, rate=2.0)
    assert [load.block for load in loads(made)] == [32, 32]
    made.ab.concurrency, made.ab.rate = 1, None
    assert [load.block for load in loads(made)] == [1]
    made.ab.concurrency, made.ab.rate, made.ab.block = None, 2.0, 5
    assert [load.block for load in loads(made)] == [5]


def test_settings_that_cannot_work() -> None:
    check(config(ab={"a": "http://x", "b": "http://x", "rate": 0.5}))
    with pytest.raises(ConfigError, match=r"ab\.concurrency and ab\.rate are both null"):
        check(config(ab={"concurrency": None}))
    with pytest.raises(ConfigError, match=r"ab\.rate=0\.0: must be in \(0, inf\)"):
        check(config(ab={"rate": 0.0}))
    with pytest.raises(ConfigError, match=r"ab\.b='localhost:8000' is not a URL"):
        check(config(ab={"b": "localhost:8000"}))
    with pytest.raises(ConfigError, match=r"name both, as in ab\.a="):
        run(config())
