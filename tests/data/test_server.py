"""Replies from a tiny OpenAI-compatible server, and what each kind of failure leads to."""

from __future__ import annotations

import io
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from configs.errors import TrafficError
from configs.schema import Config, RegenerateConfig
from data import regenerate as stage
from data.prepare import prepare
from data.server import Server, concurrently
from data.traffic import Refused
from tests.conftest import tiny_tokenizer
from tests.data.samples import ALPHABET, chat, config, letters, read_rows, write_rows


class Fake(ThreadingHTTPServer):
    """Answers "so" to everything. `script` holds, per user text, the statuses to answer first."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: dict[str, list[int]] = {}
        self.choice: dict[str, Any] = {
            "message": {"role": "assistant", "content": "so"},
            "finish_reason": "stop",
        }
        self.requests: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def asked(self) -> Counter[str]:
        return Counter(request["messages"][-1]["content"] for request in self.requests)


class Handler(BaseHTTPRequestHandler):
    server: Fake  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append({**request, "path": self.path, "key": self.headers.get("Authorization")})
        script = self.server.script.get(request["messages"][-1]["content"], [])
        status = script.pop(0) if script else 200
        body = json.dumps({"choices": [self.server.choice]} if status == 200 else {"error": "no"}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def client(fake: Fake, **settings: Any) -> Server:
    settings = {"server": fake.url, "server_model": "m", "max_new_tokens": 5, **settings}
    return Server(RegenerateConfig(**settings), letters(), seed=3, longest_wait=0.0)


def row(text: str, **extra: Any) -> dict[str, Any]:
    return {"id": text, "category": "c", "messages": chat(text), **extra}


def ids(text: str) -> list[int]:
    return [ALPHABET.index(letter) for letter in text]


def test_request_and_reply(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "so" is tokenised again, and ends with the end token since the model ended it."""
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    fake.choice["message"]["content"] = "sy"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert client(fake).answer(row("x", tools=tools)) == (ids("sye"), "eos")
    (request,) = fake.requests
    assert request["path"] == "/v1/chat/completions"
    assert request["key"] == "Bearer k"
    assert request["messages"] == chat("x")
    assert request["tools"] == tools
    assert {name: request[name] for name in ("model", "max_tokens", "temperature", "seed")} == {
        "model": "m",
        "max_tokens": 5,
        "temperature": 0.0,
        "seed": 3,
    }


def test_reply_cut_at_the_limit_has_no_end_token(fake: Fake) -> None:
    fake.choice = {"message": {"content": "sy"}, "finish_reason": "length"}
    assert client(fake).answer(row("x")) == (ids("sy"), "length")


def test_logged_replies_are_not_sent(fake: Fake) -> None:
    client(fake).answer({"id": "a", "category": "c", "messages": chat("x", "y", "z", "w")})
    assert fake.requests[0]["messages"] == chat("x", "y", "z")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_passing_failures_are_tried_again(fake: Fake, status: int) -> None:
    fake.script["x"] = [status, status]
    fake.choice["message"]["content"] = "s"
    assert client(fake).answer(row("x")) == (ids("se"), "eos")
    assert fake.asked() == {"x": 3}


def test_server_that_stays_away(fake: Fake) -> None:
    fake.script["x"] = [503] * 99
    with pytest.raises(
        TrafficError, match=r"did not answer in 8 attempts: HTTP 503.*run the same command again"
    ):
        client(fake).answer(row("x"))
    with pytest.raises(TrafficError, match=r"did not answer in 8 attempts: ConnectError"):
        client(fake, server="http://127.0.0.1:9").answer(row("x"))


@pytest.mark.parametrize("status", [401, 404])
def test_failures_that_no_row_would_survive(fake: Fake, status: int) -> None:
    fake.script["x"] = [status]
    with pytest.raises(TrafficError, match=rf"HTTP {status}.*regenerate\.server_model"):
        client(fake).answer(row("x"))
    assert fake.asked() == {"x": 1}


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (
            {"message": {"content": "s"}, "finish_reason": "content_filter"},
            "ended the reply with 'content_filter'",
        ),
        ({"text": "s"}, "no chat completion"),
    ],
)
def test_refused_replies(fake: Fake, choice: dict[str, Any], reason: str) -> None:
    fake.choice = choice
    with pytest.raises(Refused, match=reason):
        client(fake).answer(row("x"))


def test_refused_row(fake: Fake) -> None:
    fake.script["x"] = [400]
    with pytest.raises(Refused, match="the server answers HTTP 400"):
        client(fake).answer(row("x"))


def test_concurrently_keeps_few_in_flight_and_yields_all() -> None:
    """Seven items, three workers."""
    gate, running, most = threading.Lock(), 0, 0

    def work(item: int) -> int:
        nonlocal running, most
        with gate:
            running += 1
            most = max(most, running)
        with gate:
            running -= 1
        return item * item

    assert sorted(concurrently(work, range(7), 3)) == [0, 1, 4, 9, 16, 25, 36]
    assert most <= 3


# --- the stage -----------------------------------------------------------------


@pytest.fixture
def cfg(tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Three prepared prompts, of a target of which only the tokenizer is here."""
    monkeypatch.setattr(
        stage, "Server", lambda asked, template, seed: Server(asked, template, seed, longest_wait=0.0)
    )
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    source = write_rows(tmp_path / "t.jsonl", *[{"messages": chat(text)} for text in ("a", "b", "c")])
    made = config(tmp_path / "data", str(tmp_path / "tiny"), [source], heldout_fraction=0.0)
    made.regenerate = RegenerateConfig(server=fake.url, server_model="m", max_new_tokens=9, concurrency=2)
    prepare(made, Console(file=io.StringIO()))
    return made


def run(cfg: Config) -> str:
    printed = io.StringIO()
    stage.regenerate(cfg, Console(file=printed, width=300))
    return printed.getvalue()


def test_stage_writes_rows_and_asks_again_only_for_what_is_missing(cfg: Config, fake: Fake) -> None:
    fake.script = {"a": [500], "b": [400]}
    printed = run(cfg)
    assert "HTTP 400" in printed
    assert "1 prompts were refused" in printed
    rows = read_rows(Path(cfg.data.folder) / "replies.jsonl")
    assert [tiny_tokenizer().decode(row["reply_ids"]) for row in rows] == ["so<|im_end|>"] * 2
    assert fake.asked() == {"a": 2, "b": 1, "c": 1}
    assert "1 of 3 train prompts to answer" in run(cfg)
    assert fake.asked() == {"a": 2, "b": 2, "c": 1}
    assert len(read_rows(Path(cfg.data.folder) / "replies.jsonl")) == 3


def test_stage_keeps_what_was_answered_when_the_server_goes_away(cfg: Config, fake: Fake) -> None:
    cfg.regenerate.concurrency = 1
    last = read_rows(Path(cfg.data.folder) / "train.jsonl")[-1]["messages"][0]["content"]
    fake.script[last] = [503] * 99
    with pytest.raises(TrafficError, match="did not answer"):
        run(cfg)
    assert len(read_rows(Path(cfg.data.folder) / "replies.jsonl")) == 2


def test_stage_fails_when_every_prompt_is_refused(cfg: Config, fake: Fake) -> None:
    fake.script = {text: [400] for text in "abc"}
    with pytest.raises(TrafficError, match="refused every prompt"):
        run(cfg)
