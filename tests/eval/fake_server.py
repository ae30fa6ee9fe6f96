"""An OpenAI-compatible server that does as it is told: it waits, cuts, refuses and garbles. It remembers when
it sent what, by the clock that the client reads too."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any, Self


@dataclass(frozen=True)
class Play:
    """How one request is answered."""

    pieces: Sequence[str] = ("one ", "two ", "three")  # one chunk each
    first: float = 0.0  # seconds before the first of them
    gap: float = 0.0  # and before each further one
    tokens: int | None = None  # as usage tells; None: one for each piece
    usage: bool = True
    done: bool = True
    finish: str | None = "stop"
    status: int = 200
    retry_after: int | None = None
    cut: int | None = None  # the connection breaks after so many pieces
    garbage: bytes | None = None  # sent as an event after the first piece
    empty: bool = False  # 200, and nothing at all


class FakeServer(ThreadingHTTPServer):
    """`script` holds, by user text, the plays of its next requests; `otherwise` is the play of all others."""

    daemon_threads = True

    def __init__(self, model: str = "m") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.model = model
        self.otherwise = Play()
        self.script: dict[str, list[Play]] = defaultdict(list)
        self.pages: dict[str, str] = {}  # what else stands there, by path
        self.bodies: list[bytes] = []
        self.came: list[float] = []  # when requests came
        self.sent: list[float] = []  # when pieces were sent
        self.busy = self.busiest = 0  # requests under way
        self.leave_after: int | None = None  # nobody listens any more after so many requests
        self.lock = Lock()

    def asked(self) -> list[str]:
        return [json.loads(body)["messages"][-1]["content"] for body in self.bodies]

    @contextmanager
    def under_way(self) -> Any:
        with self.lock:
            self.busy += 1
            self.busiest = max(self.busiest, self.busy)
        try:
            yield
        finally:
            with self.lock:
                self.busy -= 1

    def __enter__(self) -> Self:
        Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    def leave(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that hang up


@dataclass
class Writer:
    """Server-sent events in HTTP's chunked encoding."""

    file: Any

    def event(self, data: bytes) -> None:
        line = b"data: " + data + b"\n\n"
        self.file.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.file.flush()

    def chunk(self, delta: dict[str, Any] | None, **rest: Any) -> None:
        choices = (
            [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": rest.pop("finish", None)}]
        )
        self.event(json.dumps({"choices": choices, **rest}, ensure_ascii=False).encode())

    def end(self) -> None:
        self.file.write(b"0\r\n\r\n")
        self.file.flush()


class Handler(BaseHTTPRequestHandler):
    server: FakeServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        pages = {"/v1/models": json.dumps({"data": [{"id": self.server.model, "owned_by": "fake"}]})}
        page = (pages | self.server.pages).get(self.path)
        self.whole(404 if page is None else 200, page or "")

    def do_POST(self) -> None:
        came = time.perf_counter()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.came.append(came)
        self.server.bodies.append(body)
        script = self.server.script[json.loads(body)["messages"][-1]["content"]]
        if len(self.server.bodies) == self.server.leave_after:
            self.server.leave()
            self.close_connection = True
        with self.server.under_way():
            self.play(script.pop(0) if script else self.server.otherwise)

    def play(self, play: Play) -> None:
        if play.status != 200:
            time.sleep(play.first)
            self.whole(play.status, '{"error": "no"}', play.retry_after)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        writer = Writer(self.wfile)
        if play.empty:
            writer.end()
            return
        writer.chunk({"role": "assistant", "content": ""})
        for i, piece in enumerate(play.pieces):
            if i == play.cut:
                self.close_connection = True
                return  # in the middle of the chunked encoding
            time.sleep(play.gap if i else play.first)
            self.server.sent.append(time.perf_counter())
            writer.chunk({"content": piece})
            if i == 0 and play.garbage is not None:
                writer.event(play.garbage)
        if play.finish is not None:
            writer.chunk({}, finish=play.finish)
        if play.usage:
            tokens = len(play.pieces) if play.tokens is None else play.tokens
            writer.chunk(None, usage={"completion_tokens": tokens})
        if play.done:
            writer.event(b"[DONE]")
        writer.end()

    def whole(self, status: int, body: str, retry_after: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if retry_after is not None:
            self.send_header("Retry-After", str(retry_after))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass
