"""An engine as a child process: started, waited for until it answers, and always stopped. A server answers
over HTTP, a program without one by lines of JSON."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from scripts.engines import EngineError

START_SECONDS = 600.0
REPLY_SECONDS = 600.0
STOP_SECONDS = 15.0
TOLD = 3  # last lines of its log that an error quotes


@contextmanager
def serving(
    command: Sequence[str], environment: Mapping[str, str], port: int, log: Path, wait: float = START_SECONDS
) -> Iterator[httpx.Client]:
    """A client of the server that `command` starts, once its /health answers 200.

    What it prints goes to `log`. Raises `EngineError`, quoting that, where it stops or does not get ready
    within `wait` seconds. At the end the whole process group is ended.
    """
    here = f"http://127.0.0.1:{port}"
    with (
        started(command, environment, log) as process,
        httpx.Client(base_url=here, timeout=REPLY_SECONDS, trust_env=False) as client,  # no proxies
    ):
        until_ready(client, process, log, wait)
        try:
            yield client
        except httpx.HTTPError as error:
            raise EngineError(f"The engine did not answer ({error}). {last_words(log)}") from error


@contextmanager
def conversing(
    command: Sequence[str], environment: Mapping[str, str], log: Path, wait: float = REPLY_SECONDS
) -> Iterator[Callable[[Any], Any]]:
    """A function that sends the program a value and returns its answer, each a line of JSON.

    What else it prints, on stderr, goes to `log`. The function raises `EngineError`, quoting that, where the
    program stops or does not answer within `wait` seconds.
    """
    with started(command, environment, log, piped=True) as process:
        requests, answers = process.stdin, process.stdout
        assert requests is not None and answers is not None

        def ask(value: Any) -> Any:
            with suppress(BrokenPipeError):  # it has stopped, which reading its answer tells with the reason
                requests.write(json.dumps(value).encode() + b"\n")
                requests.flush()
            if not select.select([answers], [], [], wait)[0]:
                raise EngineError(f"The engine did not answer within {wait:.0f} s. {last_words(log)}")
            line = answers.readline()
            if not line:
                raise EngineError(f"The engine stopped with status {process.wait()}. {last_words(log)}")
            return json.loads(line)

        yield ask


def run_converter(
    by: str, model: Path | str, words: Sequence[str], environment: Mapping[str, str], log: Path
) -> None:
    """Runs a converter of `model` to its end. What it prints goes to `log`. Raises `EngineError`, quoting
    that, if it fails."""
    with open(log, "w", encoding="utf-8") as out:
        out.write(shlex.join(words) + "\n")
        out.flush()
        done = subprocess.run(words, env=os.environ | environment, stdout=out, stderr=out, check=False)
    if done.returncode:
        raise EngineError(f"{by} cannot convert {model}. {last_words(log)}")


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], log: Path, piped: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """The process of `command`, whose whole group is ended at the end. It prints to `log`; `piped`: what it
    reads and prints are pipes, and stderr goes there."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w", encoding="utf-8") as out:
        out.write(" ".join(command) + "\n")
        out.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if piped else None,
            stdout=subprocess.PIPE if piped else out,
            stderr=out,
            env=os.environ | environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        stop(process)
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):  # of a request that was never read
                if pipe is not None:
                    pipe.close()


def until_ready(client: httpx.Client, process: subprocess.Popen[bytes], log: Path, wait: float) -> None:
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        if (status := process.poll()) is not None:
            raise EngineError(f"The engine stopped with status {status}. {last_words(log)}")
        try:
            if client.get("/health").status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.25)
    raise EngineError(f"The engine was not ready after {wait:.0f} s. {last_words(log)}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and what it started, first politely. The group outlives its leader."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def last_words(log: Path) -> str:
    """The error in a log if it names one, else its last lines; and where all of it is."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[1:]]
    errors = [line for line in lines if "Error: " in line or line.startswith("error:")]
    told = errors[-1:] or [line for line in lines if line][-TOLD:] or ["nothing"]
    return f"It said: {' | '.join(told)} (all of it in {log})"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
