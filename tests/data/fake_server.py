"""A tiny OpenAI-compatible server that fails as it is told; `python FILE PORT LOG DELAY` is one in a process
of its own, which can be killed."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HANG, DROP, BROKEN, ERROR = "hang", "drop", "broken", "error"


class Fake(ThreadingHTTPServer):
    """Answers `choice` to everything. `script` holds, per user text, what to do first: answer a status, with
    a Retry-After if it is a pair, hang for `hang` seconds, drop the connection, send half an object, or an
    error with status 200."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.script: dict[str, list[Any]] = {}
        self.choice: dict[str, Any] = {
            "message": {"role": "assistant", "content": "so"},
            "finish_reason": "stop",
        }
        self.extra: dict[str, Any] = {}  # beside the choices
        self.delay = self.hang = 0.0  # seconds
        self.log: Path | None = None
        self.requests: list[dict[str, Any]] = []
        self.under_way = self.most = 0
        self.gate = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def asked(self) -> Counter[str]:
        return Counter(request["messages"][-1]["content"] for request in self.requests)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # of clients that went away


class Handler(BaseHTTPRequestHandler):
    server: Fake  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        fake = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = request["messages"][-1]["content"]
        with fake.gate:
            fake.requests.append({**request, "path": self.path, "key": self.headers.get("Authorization")})
            fake.under_way += 1
            fake.most = max(fake.most, fake.under_way)
            script = fake.script.get(asked, [])
            act = script.pop(0) if script else 200
        time.sleep(fake.hang if act == HANG else fake.delay)
        with fake.gate:
            fake.under_way -= 1
        if fake.log is not None:
            with open(fake.log, "a", encoding="utf-8") as log:
                log.write(asked + "\n")
        if act not in (HANG, DROP):
            self.answer(act)

    def answer(self, act: Any) -> None:
        status, after = act if isinstance(act, tuple) else (act if isinstance(act, int) else 200, None)
        body = json.dumps({"choices": [self.server.choice], **self.server.extra}).encode()
        if act == BROKEN:
            body = body[:12]
        elif act == ERROR or status != 200:
            body = json.dumps({"error": "no"}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if after is not None:
            self.send_header("Retry-After", str(after))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[Fake]:
    with Fake() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


if __name__ == "__main__":
    fake = Fake(int(sys.argv[1]))
    fake.log, fake.delay = Path(sys.argv[2]), float(sys.argv[3])
    fake.serve_forever()
