"""Replies from tiny OpenAI-compatible servers: what each failure leads to; no row is lost or doubled."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from configs.errors import ConfigError, TrafficError
from configs.rules import check
from configs.schema import Config, RegenerateConfig
from data import regenerate as stage
from data.prepare import prepare
from data.server import Fleet, Reply, Server, Unavailable
from data.tokens import load_token_rows
from data.traffic import Refused
from tests.conftest import tiny_target, tiny_tokenizer
from tests.data import fake_server
from tests.data.fake_server import BROKEN, DROP, ERROR, HANG, Fake, serving
from tests.data.samples import ALPHABET, chat, config, letters, read_rows, write_rows

Result = Reply | Refused


@pytest.fixture
def fake() -> Iterator[Fake]:
    with serving() as server:
        yield server


@pytest.fixture
def other() -> Iterator[Fake]:
    with serving() as server:
        yield server


def closed() -> str:
    """The URL of a server that is not there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/v1"


def fleet(*urls: str, wait: float = 0.0, **settings: Any) -> tuple[Fleet, list[str]]:
    """Servers that rest for `wait` seconds at most, and what is said of them."""
    said: list[str] = []
    settings = {"servers": list(urls), "server_model": "m", "max_new_tokens": 5, "patience": 0.3, **settings}
    return Fleet(RegenerateConfig(**settings), letters(), 3, said.append, longest_wait=wait), said


def answered(asked: Fleet, rows: Iterable[dict[str, Any]]) -> dict[str, Result]:
    """The results by row, each told of once."""
    told: list[tuple[str, Result]] = []
    asked.answer(rows, lambda row, result: told.append((row["id"], result)))
    assert len(dict(told)) == len(told)
    return dict(told)


def answer(fake: Fake, asked: dict[str, Any], **settings: Any) -> Result:
    return answered(fleet(fake.url, **settings)[0], [asked])[asked["id"]]


def row(text: str, **extra: Any) -> dict[str, Any]:
    """Its prompt is "u", the text and "a"; tests/data/samples.py."""
    return {"id": text, "category": "c", "messages": chat(text), "prompt_ids": ids(f"u{text}a"), **extra}


def ids(text: str) -> list[int]:
    return [ALPHABET.index(letter) for letter in text]


# --- one request ---------------------------------------------------------------


def test_request_and_reply(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "sy" is tokenised again, and ends with the end token since the model ended it."""
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    fake.choice["message"]["content"] = "sy"
    tools = [{"type": "function", "function": {"name": "f"}}]
    made = answer(fake, row("x", tools=tools), extra={"top_k": 20})
    assert made == Reply(ids("sye"), "eos", retokenised=True)
    (request,) = fake.requests
    assert request.pop("path") == "/v1/chat/completions"
    assert request.pop("key") == "Bearer k"
    assert request == {
        "model": "m",
        "messages": chat("x"),
        "tools": tools,
        "max_tokens": 5,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 3,
        "top_k": 20,
        "return_token_ids": True,
    }


def test_reply_cut_at_the_limit_has_no_end_token(fake: Fake) -> None:
    fake.choice = {"message": {"content": "sy"}, "finish_reason": "length"}
    assert answer(fake, row("x")) == Reply(ids("sy"), "length", retokenised=True)


def test_character_that_the_limit_cut_is_left_out(fake: Fake) -> None:
    fake.choice = {"message": {"content": "sy\ufffd"}, "finish_reason": "length"}
    assert answer(fake, row("x")) == Reply(ids("sy"), "length", retokenised=True)


def test_logged_replies_are_not_sent(fake: Fake) -> None:
    answer(fake, {**row("a"), "messages": chat("x", "y", "z", "w")})
    assert fake.requests[0]["messages"] == chat("x", "y", "z")


@pytest.mark.parametrize(
    ("told", "finish", "kept"),
    [
        ("xue", "stop", ("xue", "eos")),  # though the text is "so"
        ("xu", "stop", ("xue", "eos")),  # the server keeps the end token for itself
        ("xuezz", "stop", ("xue", "eos")),
        ("xu", "length", ("xu", "length")),
    ],
)
def test_token_ids_of_the_server_are_kept(fake: Fake, told: str, finish: str, kept: tuple[str, str]) -> None:
    fake.choice |= {"token_ids": ids(told), "finish_reason": finish}
    fake.extra = {"prompt_token_ids": ids("uxa")}
    assert answer(fake, row("x")) == Reply(ids(kept[0]), kept[1])


def test_token_ids_without_the_prompts_are_not_believed(fake: Fake) -> None:
    fake.choice |= {"message": {"content": "s"}, "token_ids": ids("xue")}
    assert answer(fake, row("x")) == Reply(ids("se"), "eos", retokenised=True)


@pytest.mark.parametrize("told", [[0, 10**6], ["x"], [[0]]])
def test_token_ids_that_are_none_are_no_reply(fake: Fake, told: list[Any]) -> None:
    fake.choice |= {"token_ids": told}
    fake.extra = {"prompt_token_ids": ids("uxa")}
    assert not isinstance(answer(fake, row("x")), Reply)


def test_server_that_feeds_another_prompt_is_found_out(fake: Fake) -> None:
    fake.choice |= {"token_ids": ids("xue")}
    fake.extra = {"prompt_token_ids": ids("buxa")}
    assert "other prompt tokens than data.prepare made" in str(answer(fake, row("x")))


def test_server_that_knows_no_token_ids_is_asked_without(fake: Fake) -> None:
    """The second request of two rows goes without the question from the start."""

    class Strict(fake_server.Handler):
        def answer(self, act: Any) -> None:
            if "return_token_ids" not in self.server.requests[-1]:
                return super().answer(act)
            body = b'{"error": "Unrecognized request argument supplied: return_token_ids"}'
            self.send_response(400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    fake.RequestHandlerClass = Strict
    made = answered(fleet(fake.url, concurrency=1)[0], [row("x"), row("y")])
    assert all(isinstance(one, Reply) and one.retokenised for one in made.values())
    assert [("return_token_ids" in request) for request in fake.requests] == [True, False, False]


@pytest.mark.parametrize(
    ("finish", "counted", "differs"),
    [("stop", 3, False), ("stop", 2, False), ("stop", 4, True), ("length", 2, False), ("length", 1, True)],
)
def test_text_that_is_provably_other_tokens(fake: Fake, finish: str, counted: int, differs: bool) -> None:
    """ "sy" is two tokens, three with the end token, which some servers do not count."""
    fake.choice = {"message": {"content": "sy"}, "finish_reason": finish}
    fake.extra = {"usage": {"completion_tokens": counted}}
    made = answer(fake, row("x"))
    assert isinstance(made, Reply)
    assert (made.counted, made.differs) == (counted, differs)


@pytest.mark.parametrize("act", [429, (429, 0), 500, 503, DROP, BROKEN, ERROR, HANG], ids=str)
def test_passing_failures_are_tried_again(fake: Fake, act: Any) -> None:
    fake.script["x"] = [act, act]
    fake.choice["message"]["content"] = "s"
    fake.hang = 0.3
    assert answer(fake, row("x"), timeout=0.1, patience=5.0) == Reply(ids("se"), "eos", retokenised=True)
    assert fake.asked() == {"x": 3}


@pytest.mark.parametrize("status", [401, 404])
def test_failures_that_no_row_would_survive(fake: Fake, status: int) -> None:
    fake.script["x"] = [status]
    with pytest.raises(TrafficError, match=rf"HTTP {status}.*regenerate\.server_model"):
        answer(fake, row("x"))
    assert fake.asked() == {"x": 1}


def test_refused(fake: Fake) -> None:
    fake.script["x"] = [400]
    assert str(answer(fake, row("x"))) == 'the server answers HTTP 400: {"error": "no"}'
    fake.choice = {"message": {"content": "s"}, "finish_reason": "content_filter"}
    assert str(answer(fake, row("x"))) == "the server ended the reply with 'content_filter'"
    fake.choice = {"message": {"content": 3}, "finish_reason": "stop"}
    assert str(answer(fake, row("x"))) == "content is of type int, not text"


def test_address_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"regenerate\.server='http://h:port/v1' is not a URL"):
        fleet("http://h:port/v1")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"servers": ["http://a/v1", "b"]}, r"regenerate\.server='b' is not a URL"),
        ({"servers": ["http://a/v1", "http://a/"]}, "names a server twice"),
        ({"servers": ["http://a"], "server": "http://b"}, "are both set"),
        ({"servers": ["http://a"], "server_model": None}, "without regenerate.server_model"),
        ({"server_model": None, "extra": {"top_k": 1}}, r"regenerate\.extra is set without"),
        ({"servers": ["http://a"], "extra": {"temperature": 1.0}}, "extra names temperature"),
        ({"servers": ["http://a"], "timeout": 0.0}, r"regenerate\.timeout=0\.0"),
    ],
)
def test_settings_that_cannot_work(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    cfg = config(tmp_path, sources=[tmp_path])
    cfg.regenerate = RegenerateConfig(**{"server_model": "m", **settings})
    with pytest.raises(ConfigError, match=reason):
        check(cfg)


# --- many ----------------------------------------------------------------------


def test_server_rests_longer_each_time_and_then_gets_one_request() -> None:
    server = Server("s", under_way=3)
    assert server.room(9.0, 8) == 5
    server.failed(Unavailable("x"), 10.0, 30.0)
    assert (server.failures, server.rests_until) == (1, 10.5)
    server.failed(Unavailable("x"), 10.1, 30.0)  # was under way: the same failure
    assert (server.failures, server.rests_until) == (1, 10.6)
    assert server.room(10.5, 8) == 0
    server.under_way = 0
    assert server.room(10.6, 8) == 1
    for now, until in ((20.0, 21.0), (30.0, 32.0), (40.0, 44.0), (50.0, 58.0), (60.0, 76.0), (80.0, 110.0)):
        server.failed(Unavailable("x"), now, 30.0)
        assert server.rests_until == until
    server.failures = 0
    assert server.room(110.0, 8) == 8


def test_server_rests_as_long_as_it_asks_for() -> None:
    server = Server("s")
    server.failed(Unavailable("x", after=7.0), 100.0, 30.0)
    assert server.rests_until == 107.0
    server.failed(Unavailable("x", after=99.0), 110.0, 30.0)
    assert server.rests_until == 140.0


def test_rows_are_shared_few_under_way_and_taken_as_they_are_needed(fake: Fake, other: Fake) -> None:
    """Two servers, two requests each: of forty rows never more than five are taken and not answered."""
    fake.delay = other.delay = 0.01
    taken, told = 0, 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal taken
        for number in range(40):
            taken += 1
            assert taken - told <= 5
            yield {**row("x"), "id": str(number)}

    def take(row: dict[str, Any], result: Result) -> None:
        nonlocal told
        told += 1

    fleet(fake.url, other.url, concurrency=2)[0].answer(rows(), take)
    assert told == 40
    assert fake.most == other.most == 2
    assert min(len(fake.requests), len(other.requests)) >= 10


def test_row_that_is_at_fault_is_given_up_and_no_other(fake: Fake) -> None:
    fake.script = {"x": [500] * 99}
    made = answered(fleet(fake.url, concurrency=2, patience=5.0)[0], [row(text) for text in "xyzw"])
    assert str(made.pop("x")) == 'HTTP 500 {"error": "no"} (8 attempts)'
    assert made == {text: Reply([*ids("s"), 11, 3], "eos", retokenised=True) for text in "yzw"}
    assert fake.asked() == {"x": 8, "y": 1, "z": 1, "w": 1}


def test_busy_server_is_no_rows_fault(fake: Fake) -> None:
    fake.script = {"x": [429] * 20 + [503] * 20}
    assert isinstance(answer(fake, row("x"), patience=5.0), Reply)


def test_server_that_is_away_is_left_out(fake: Fake) -> None:
    away = closed()
    asked, said = fleet(away, fake.url, wait=0.02)
    fake.delay = 0.01
    made = answered(asked, ({**row("x"), "id": str(number)} for number in range(60)))
    assert all(isinstance(one, Reply) for one in made.values())
    assert len(made) == 60
    (told,) = said
    assert told.startswith(f"{away.removesuffix('/v1')}: ConnectError")


def test_servers_that_stay_away(fake: Fake) -> None:
    fake.script["x"] = [503] * 9999
    with pytest.raises(
        TrafficError, match=r"No server did answer for 0\.3 s \(.*: HTTP 503.*run the same command again"
    ):
        answer(fake, row("x"), wait=0.01)
    with pytest.raises(TrafficError, match="ConnectError"):
        answered(fleet(closed(), wait=0.01)[0], [row("x")])


# --- the stage -----------------------------------------------------------------


@pytest.fixture
def cfg(tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Three prepared prompts, of a target of which only the tokenizer is here."""
    monkeypatch.setattr(
        stage,
        "Fleet",
        lambda asked, template, seed, say: Fleet(asked, template, seed, say, longest_wait=0.05),
    )
    return prepared(tmp_path, list("abc"), fake.url)


def prepared(folder: Path, texts: list[str], *urls: str) -> Config:
    tiny_tokenizer().save_pretrained(folder / "tiny")
    source = write_rows(folder / "t.jsonl", *[{"messages": chat(text)} for text in texts])
    made = config(folder / "data", str(folder / "tiny"), [source], heldout_fraction=0.0)
    made.regenerate = RegenerateConfig(
        servers=list(urls), server_model="m", max_new_tokens=9, concurrency=2, patience=20.0
    )
    prepare(made, Console(file=io.StringIO()))
    return made


def run(cfg: Config) -> str:
    printed = io.StringIO()
    stage.regenerate(cfg, Console(file=printed, width=300))
    return printed.getvalue()


def replies(cfg: Config) -> list[dict[str, Any]]:
    return read_rows(Path(cfg.data.folder) / "replies.jsonl")


def test_stage_writes_rows_and_asks_again_only_for_what_is_missing(cfg: Config, fake: Fake) -> None:
    fake.script = {"a": [500], "b": [400]}
    printed = run(cfg)
    assert "HTTP 400" in printed
    assert "1 prompts were refused" in printed
    rows = replies(cfg)
    assert [tiny_tokenizer().decode(row["reply_ids"]) for row in rows] == ["so<|im_end|>"] * 2
    assert fake.asked() == {"a": 2, "b": 1, "c": 1}
    assert "1 of 3 train prompts to answer" in run(cfg)
    assert fake.asked() == {"a": 2, "b": 2, "c": 1}
    assert len(replies(cfg)) == 3


def test_one_server_by_its_own_key(cfg: Config, fake: Fake) -> None:
    cfg.regenerate.server, cfg.regenerate.servers = fake.url, []
    run(cfg)
    assert fake.asked() == {"a": 1, "b": 1, "c": 1}


def test_retokenised_replies_are_marked_and_counted(cfg: Config, fake: Fake) -> None:
    """Three tokens with the end token, one per letter; the server says seven."""
    fake.extra = {"usage": {"completion_tokens": 7}}
    assert "3 came as text and were tokenised again, 3 of them to another number of tokens" in run(cfg)
    assert [(row["retokenised"], row["server_tokens"]) for row in replies(cfg)] == [(True, 7)] * 3
    printed = io.StringIO()
    load_token_rows(cfg, tiny_target(), Console(file=printed, width=300))
    assert "tokenised again from text (kept): 3" in printed.getvalue()


def test_order_of_the_replies_is_that_of_the_prompts(tmp_path: Path, fake: Fake, other: Fake) -> None:
    """The same file, whichever server answered what, when, and in how many runs."""
    fake.delay, other.delay = 0.03, 0.0
    texts = [f"why {n}" for n in range(30)]
    several, one = (
        prepared(tmp_path / "several", texts, fake.url, other.url),
        prepared(tmp_path, texts, other.url),
    )
    several.regenerate.max_prompts = 11
    run(several)
    several.regenerate.max_prompts = None
    run(several)
    one.regenerate.concurrency = 1
    run(one)
    assert [row["id"] for row in replies(one)] == [
        row["id"] for row in read_rows(tmp_path / "data/train.jsonl")
    ]
    assert (tmp_path / "several/data/replies.jsonl").read_bytes() == (
        tmp_path / "data/replies.jsonl"
    ).read_bytes()


def test_stage_keeps_what_was_answered_when_the_server_goes_away(cfg: Config, fake: Fake) -> None:
    cfg.regenerate.concurrency = 1
    cfg.regenerate.patience = 0.3
    last = read_rows(Path(cfg.data.folder) / "train.jsonl")[-1]["messages"][0]["content"]
    fake.script[last] = [503] * 9999
    with pytest.raises(TrafficError, match="No server did answer"):
        run(cfg)
    assert len(replies(cfg)) == 2


def test_stage_fails_when_every_prompt_is_refused(cfg: Config, fake: Fake) -> None:
    fake.script = {text: [400] for text in "abc"}
    with pytest.raises(TrafficError, match="refused every prompt"):
        run(cfg)


def test_stage_stops_early_when_nothing_but_refusals_come(tmp_path: Path, fake: Fake) -> None:
    cfg = prepared(tmp_path, [str(n) for n in range(100)], fake.url)
    fake.script = {str(n): [400] for n in range(100)}
    with pytest.raises(TrafficError, match="refused the first 32 prompts"):
        run(cfg)
    assert len(fake.requests) < 40


def test_other_fields_of_the_requests_are_other_replies(cfg: Config, fake: Fake) -> None:
    run(cfg)
    cfg.regenerate.extra = {"top_k": 20}
    with pytest.raises(TrafficError, match=r"extra was None, now \{'top_k': 20\}"):
        run(cfg)


def test_second_process_is_kept_out(cfg: Config) -> None:
    path = Path(cfg.data.folder) / "replies.jsonl"
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2)\n"
         "print('locked', flush=True); sys.stdin.read()", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        with pytest.raises(TrafficError, match=r"Another process is writing .*regenerate\.servers"):
            run(cfg)
    finally:
        holder.communicate()
    assert "3 replies" in run(cfg)


class Killable:
    """A server in a process of its own; `log` has what it was asked since it started last."""

    def __init__(self, folder: Path) -> None:
        self.url = closed()
        self.log = folder / "log"
        self.start()

    def start(self) -> None:
        self.log.write_text("")
        port = self.url.rpartition(":")[2].removesuffix("/v1")
        self.process = subprocess.Popen([sys.executable, fake_server.__file__, port, str(self.log), "0.02"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.parametrize("count", [1, 2])
def test_server_killed_and_started_again(cfg: Config, tmp_path: Path, count: int) -> None:
    """The first dies after 10 replies and comes back: with another one after 20 more, else after a while."""
    texts = [f"why {n}" for n in range(120)]
    for name in "xy":
        (tmp_path / name).mkdir()
    servers = [Killable(tmp_path / name) for name in "xy"[:count]]
    made = prepared(tmp_path / "two", texts, *(server.url for server in servers))
    path = tmp_path / "two/data/replies.jsonl"

    def lines(least: int) -> None:
        while not path.exists() or path.read_bytes().count(b"\n") < least:
            time.sleep(0.005)

    def kill_and_start() -> None:
        lines(10)
        servers[0].kill()
        if count == 2:
            lines(30)
        else:
            time.sleep(0.3)
        servers[0].start()

    killer = threading.Thread(target=kill_and_start, daemon=True)
    killer.start()
    try:
        printed = run(made)
        killer.join(10)
    finally:
        for server in servers:
            with suppress(ProcessLookupError):
                server.kill()
    assert "answers again" in printed
    assert servers[0].log.read_text().count("\n") > 5  # it was asked again
    rows = replies(made)
    assert len(rows) == len({row["id"] for row in rows}) == 120
    assert {row["id"] for row in rows} == {row["id"] for row in read_rows(tmp_path / "two/data/train.jsonl")}
