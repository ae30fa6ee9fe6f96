"""The check of serving engines, without one: what is read from them, what comes of it, what fails how."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from configs.compose import compose
from configs.errors import ConfigError
from data.tokens import prompts
from models.checkpoint import save_draft
from models.target import Target
from scripts import serve_check
from scripts.engines import (
    Counts,
    EngineError,
    Proposed,
    Reply,
    Setting,
    counts_of,
    environment,
    llama_server,
    matched,
    rounds_of,
    vllm_server,
)
from scripts.engines.process import free_port, last_words, serving
from scripts.serve_check import Line, accumulate, compare, markdown, write_page
from tests.conftest import tiny_draft
from tests.train.conftest import write_workspace

QUIET = Console(quiet=True)

# ---- what is read from engines ----


def test_rounds_follow_from_chains_and_the_reply() -> None:
    # Prefill emits 5. Chain [6, 7, 0] at 1: 6 and 7 accepted, 8 is the target's; the next stands at 4.
    # [9, 0, 0] accepts 9 and emits 2 tokens, to the reply's end at 6; what was drafted behind it is left out.
    reply = [5, 6, 7, 8, 9, 2]
    found = rounds_of(reply, [[6, 7, 0], [9, 0, 0], [1, 1, 1]], first=1)
    assert found == [Proposed(1, [6, 7, 0]), Proposed(4, [9, 0, 0])]
    assert counts_of(reply, found, 3) == Counts(rounds=2, drafted=6, accepted=3, by_position=[2, 1, 0])


def test_a_chain_before_the_prefill_stands_at_the_replys_start() -> None:
    assert rounds_of([5, 6], [[5, 1], [1, 1]], first=0) == [Proposed(0, [5, 1])]


def test_a_match_ends_where_either_does() -> None:
    assert (matched([1, 2], [1, 2, 3]), matched([1, 2, 3], [1, 2]), matched([1], []), matched([1], [2])) == (
        *(2, 2, 0),
        0,
    )


PAGE = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="target"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="target"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="1"} 3.0
vllm:generation_tokens_total{engine="0",model_name="target"} 20.0
vllm:num_requests_running{engine="0",model_name="target"} 0.0
process_cpu_seconds_total 12.0
"""


def test_vllms_counters_between_two_readings() -> None:
    later = PAGE.replace("} 10.0", "} 14.0").replace("} 30.0", "} 42.0").replace("} 9.0", "} 13.0")
    later = later.replace('position="0"} 6.0', 'position="0"} 9.0').replace("} 20.0", "} 28.0")
    assert vllm_server.counts(PAGE, later) == Counts(rounds=4, drafted=12, accepted=4, by_position=[3, 0])
    assert (vllm_server.generated(PAGE), vllm_server.generated(later)) == (20, 28)


def test_a_vllm_that_does_not_speculate_is_an_error() -> None:
    page = "vllm:generation_tokens_total 3.0\n"
    with pytest.raises(EngineError, match="does not speculate"):
        vllm_server.counts(page, page)


def setting(work: Path, command: str) -> Setting:
    return Setting("/models/t", Path("/drafts/d"), command, 3, "float32", 1, 128, (2,), work)


def test_vllm_is_started_by_the_exporters_command(tmp_path: Path) -> None:
    asked = 'vllm serve /models/t --speculative-config \'{"method": "eagle3", "model": "/drafts/d"}\''
    drafted, plain = (
        vllm_server.command(Path("py"), setting(tmp_path, asked), speculate, 8001)
        for speculate in (True, False)
    )
    assert drafted[:6] == [
        *("py", "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/t", "--speculative-config")
    ]
    assert json.loads(drafted[6]) == {"method": "eagle3", "model": "/drafts/d"}
    assert plain[4] == "/models/t"
    assert not [word for word in plain if "speculative" in word or "Proposals" in word]
    # All else is the same on both sides, or the comparison would be of two settings.
    assert [word for word in drafted[7:] if word not in plain] == [
        *("--worker-extension-cls", "vllm_proposals.Proposals")
    ]


def test_another_command_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="is not `vllm serve"):
        vllm_server.command(
            Path("py"), setting(tmp_path, "vllm serve /models/t --tensor-parallel 2"), True, 1
        )


def test_llama_is_started_by_the_exporters_last_command(tmp_path: Path) -> None:
    asked = "python convert.py a\nllama-server -m target.gguf -md /d/draft.gguf --spec-type draft-simple"
    words = llama_server.command(Path("srv"), Path("t.gguf"), Path("d.gguf"), setting(tmp_path, asked), 8001)
    plain = llama_server.command(Path("srv"), Path("t.gguf"), None, setting(tmp_path, asked), 8001)
    assert words[: len(plain)] == plain
    assert words[len(plain) : len(plain) + 4] == ["-md", "d.gguf", "--spec-type", "draft-simple"]
    assert plain[:3] == ["srv", "-m", "t.gguf"]


@pytest.mark.parametrize(
    ("command", "depth"),
    [
        ("vllm serve t --speculative-config '{\"num_speculative_tokens\": 5}'", 5),
        ("llama-server -m t -md d --spec-draft-n-max 3", 3),
        ("draft.generation_config.num_assistant_tokens = 12; print(1)", 12),
    ],
)
def test_the_command_says_how_much_is_drafted(command: str, depth: int) -> None:
    assert serve_check.drafted_by(command) == depth


def test_llamas_counts_and_the_token_that_ended_it() -> None:
    # 6 tokens with the end: the prefill's, and 5 of rounds, 3 of them accepted: 2 rounds.
    said = {
        "tokens": [5, 6, 7, 8, 9],
        "stop_type": "eos",
        "timings": {"draft_n": 8, "draft_n_accepted": 3},
    }
    tokens = llama_server.ended(said, (2,))
    assert tokens == [5, 6, 7, 8, 9, 2]
    assert llama_server.counts(said, tokens) == Counts(rounds=2, drafted=8, accepted=3)
    assert llama_server.ended(said | {"stop_type": "limit"}, (2,)) == [5, 6, 7, 8, 9]


# ---- what is made of it ----


def replies(tokens: list[int], seconds: float, chains: list[list[int]]) -> Reply:
    proposed = rounds_of(tokens, chains, first=1)
    return Reply(tokens, seconds, counts_of(tokens, proposed, 2), proposed)


def line(name: str, **changes: Any) -> Line:
    """Reply 5 6 7 8: one round that accepts 6 and 7."""
    made = {
        "plain": Reply([5, 6, 7, 8], 4.0),
        "draft": replies([5, 6, 7, 8], 2.0, [[6, 7]]),
        "own": replies([5, 6, 7, 8], 1.0, [[6, 7]]),
    }
    return Line(name, **(made | changes), load=1.5)


def test_an_engine_that_agrees_has_no_faults() -> None:
    found = compare([line("a"), line("b")], draft_tokens=2)
    assert found["faults"] == []
    assert (found["identical"], found["identical_to_own"], found["partings"]) == (2, 2, [])
    assert found["by_position"] == [[1, 1, 1], [1, 1, 1]]
    assert found["tau"] == [3, 3, 3]
    assert found["proposals"] == {"rounds": 2, "shared_rounds": 2, "tokens": 4, "equal": 4, "first": None}
    assert (found["plain_tokens_per_s"], found["draft_tokens_per_s"]) == (1, 2)
    assert found["load_average"] == 1.5
    assert found["speedup"] == [2, 2, 2]


def test_an_output_that_changes_is_told_with_its_place() -> None:
    changed = line("b", draft=replies([5, 6, 9], 2.0, [[6, 7]]))
    found = compare([line("a"), changed], draft_tokens=2)
    assert found["identical"] == 1
    assert found["partings"] == [{"prompt": "b", "index": 2, "plain": [7], "draft": [9]}]
    assert "1 of 2 outputs change with the draft, the first (b) at token 2" in found["faults"]
    # 4 tokens in 4 s against 3 in 2 s on b, 2 in 1 s on a: seconds per token, 8/8 over 4/7.
    assert found["speedup"][0] == pytest.approx(1.75)


def test_proposals_that_differ_are_counted_and_shown() -> None:
    # The engine drafted 6 1 where the built-in decoder drafts 6 7: accepted 6, so its next round stands at 3,
    # where the built-in one has none.
    damaged = line("b", draft=replies([5, 6, 7, 8], 2.0, [[6, 1], [8, 0]]))
    found = compare([line("a"), damaged], draft_tokens=2)
    assert found["proposals"] == {
        "rounds": 3,
        "shared_rounds": 2,
        "tokens": 4,
        "equal": 3,
        "first": {"prompt": "b", "at": 1, "engine": [6, 1], "own": [6, 7]},
    }
    assert any(fault.startswith("1 of 4 proposed tokens") for fault in found["faults"])


def test_chains_behind_different_texts_are_not_compared() -> None:
    # All chains miss, so both sides draft after 1, 2 and 3 tokens; the replies part at token 1, so that only
    # the first chains, after 5, are of one text.
    theirs, mine = [[0, 0], [1, 9], [0, 0]], [[0, 0], [1, 1], [0, 0]]
    other = line("a", draft=replies([5, 9, 7, 8], 2.0, theirs), own=replies([5, 6, 7, 8], 1.0, mine))
    heard = compare([other], draft_tokens=2)["proposals"]
    assert (heard["rounds"], heard["shared_rounds"], heard["tokens"], heard["equal"]) == (3, 1, 2, 2)


def test_acceptance_outside_the_interval_is_a_fault() -> None:
    worse = [line(name, draft=replies([5, 6, 7, 8], 2.0, [[0, 0]] * 3)) for name in "ab"]
    found = compare(worse, draft_tokens=2)
    assert found["by_position"][0] == [0, 0, 0]
    assert found["own_by_position"] == [1, 1]
    assert [fault for fault in found["faults"] if "position 1 is 0.000 [0.000, 0.000], and 1.000" in fault]


def test_an_engine_without_positions_is_judged_by_tau() -> None:
    def plainly(accepted: int) -> dict[str, Any]:
        bare = Reply([5, 6, 7, 8], 2.0, Counts(rounds=2, drafted=4, accepted=accepted))
        return compare([line("a", draft=bare), line("b", draft=bare)], draft_tokens=2)

    assert plainly(4)["faults"] == []  # 1 + 8 / 4, as the built-in decoder's 1 + 4 / 2
    assert plainly(4)["by_position"] is None
    assert plainly(4)["proposals"] is None
    assert plainly(1)["faults"] == ["τ is 1.500 [1.500, 1.500], and 3.000 in the built-in decoder"]


def test_lines_survive_the_disk() -> None:
    made = line("a")
    assert Line.from_dict(json.loads(json.dumps(made.to_dict()))) == made


# ---- a whole check, with an engine that is our own decoder ----


class FakeServer:
    def __init__(self, own: serve_check.Own, speculate: bool, delay: float) -> None:
        self.own, self.speculate, self.delay = own, speculate, delay

    def complete(self, prompt: list[int], new_tokens: int) -> Reply:
        made = self.own.complete(prompt, new_tokens)
        seconds = self.delay * len(made.tokens)
        if not self.speculate:
            return Reply(made.tokens, seconds)
        return Reply(made.tokens, seconds, made.counts, made.proposed)


class FakeEngine:
    """Serves by the built-in decoder; `fault` stops it when it starts with a draft."""

    name = "fake"
    layout = "vllm"

    def __init__(self, fault: str | None = None) -> None:
        self.fault = fault
        self.opened = 0

    def versions(self) -> dict[str, str]:
        return {"fake": "1.0"}

    @contextmanager
    def open(self, setting: Setting, speculate: bool) -> Iterator[FakeServer]:
        self.opened += 1
        if self.fault and speculate:
            raise EngineError(self.fault)
        assert OWN is not None
        yield FakeServer(OWN, speculate, 0.5 if speculate else 1.0)


OWN: serve_check.Own | None = None


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """A tiny target, its prompts and an untrained draft; 4 held-out prompts of 8 new tokens."""
    global OWN
    overrides = write_workspace(tmp_path)
    config = compose(overrides)
    target = Target.load(config.target)
    draft = tiny_draft(target)
    save_draft(tmp_path / "runs" / "smollm2_cpu" / "1" / "draft", draft, target, {})
    monkeypatch.setattr(serve_check, "WORK", tmp_path / "work")
    OWN = serve_check.Own.build(target, draft, config.decode.draft_tokens)
    return argparse.Namespace(
        draft=None,
        exported=None,
        prompts=4,
        max_new_tokens=8,
        overrides=overrides[1:],
        out=tmp_path / "out.json",
        tmp=tmp_path,
    )


def test_a_check_from_prompts_to_a_row_and_a_page(workspace: argparse.Namespace) -> None:
    row = serve_check.check(FakeEngine(), "smollm2_cpu", workspace, QUIET)
    assert (row["status"], row["method"], row["prompts"], row["identical"]) == ("agrees", "eagle3", 4, 4)
    assert row["proposals"]["equal"] == row["proposals"]["tokens"] > 0
    assert row["speedup"][0] == pytest.approx(2)
    assert row["command"].startswith("vllm serve ")
    assert row["conditions"]["versions"]["torch"]

    page = workspace.tmp / "page.md"
    page.write_text("before\n<!-- serve_check: begin -->\nold\n<!-- serve_check: end -->\nafter\n")
    write_page(page, accumulate(workspace.out, row))
    text = page.read_text()
    assert text.startswith("before\n<!-- serve_check: begin -->\n| engine |")
    assert text.endswith("<!-- serve_check: end -->\nafter\n")
    assert "| fake 1.0 | eagle3 | 3 | 4/4 |" in text
    assert "old" not in text


def test_an_engine_that_stops_is_a_row_with_its_reason(workspace: argparse.Namespace) -> None:
    row = serve_check.check(FakeEngine("The engine stopped: no such tensor"), "smollm2_cpu", workspace, QUIET)
    assert row["status"] == "failed"
    assert row["reason"] == "The engine stopped: no such tensor"
    assert "failed: The engine stopped: no such tensor" in markdown(accumulate(workspace.out, row))


def test_a_draft_without_an_exporter_is_a_row_too(workspace: argparse.Namespace) -> None:
    engine = FakeEngine()
    engine.layout = "tensorrt"
    row = serve_check.check(engine, "smollm2_cpu", workspace, QUIET)
    assert (row["status"], engine.opened) == ("failed", 0)
    assert "tensorrt" in row["reason"]


def test_a_killed_check_goes_on(workspace: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    complete = FakeServer.complete

    def counted(self: FakeServer, prompt: list[int], new_tokens: int) -> Reply:
        asked.append(prompt)
        if len(asked) == 2 + 2 * 2 + 1:  # two to warm up, two prompts both ways, then the kill
            raise KeyboardInterrupt
        return complete(self, prompt, new_tokens)

    monkeypatch.setattr(FakeServer, "complete", counted)
    with pytest.raises(KeyboardInterrupt):
        serve_check.check(FakeEngine(), "smollm2_cpu", workspace, QUIET)
    before = len(asked)
    row = serve_check.check(FakeEngine(), "smollm2_cpu", workspace, QUIET)
    assert (row["status"], row["prompts"]) == ("agrees", 4)
    assert len(asked) - before == 2 + 2 * 2

    engine = FakeEngine()  # and a finished one is not run again
    assert serve_check.check(engine, "smollm2_cpu", workspace, QUIET)["status"] == "agrees"
    assert engine.opened == 0


def test_rows_accumulate_and_a_newer_one_takes_the_place_of_its_own(tmp_path: Path) -> None:
    def row(engine: str, status: str) -> dict[str, Any]:
        return {"engine": engine, "experiment": "e", "dtype": "float32", "status": status}

    out = tmp_path / "out.json"
    accumulate(out, row("vllm", "failed"))
    accumulate(out, row("llama.cpp", "agrees"))
    rows = accumulate(out, row("vllm", "agrees"))
    assert [(one["engine"], one["status"]) for one in rows] == [("llama.cpp", "agrees"), ("vllm", "agrees")]
    assert json.loads(out.read_text())["rows"] == rows


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--exported", "somewhere"], "name its draft, by --draft"),
        (["--prompts", "1"], "One prompt has no interval"),
        (["--max-new-tokens", "1"], "one token no round"),
    ],
)
def test_what_could_only_mislead_is_refused(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        serve_check.main(options)
    assert left.value.code == 2
    assert told in capsys.readouterr().err


def test_a_page_without_its_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here")
    with pytest.raises(ConfigError, match="no place for the table"):
        write_page(page, [])
    assert page.read_text() == "nothing here"


def test_the_built_in_decoder_drafts_whole_chains_to_the_end(workspace: argparse.Namespace) -> None:
    assert OWN is not None
    prompt = prompts(compose(["+experiment=smollm2_cpu", *workspace.overrides]), "heldout")[0].ids
    made = OWN.complete(prompt, 8)
    assert len(made.tokens) == 8
    assert made.proposed is not None
    assert [len(one.tokens) for one in made.proposed] == [3] * len(made.proposed)
    # The text is the target's: each round's place follows from what the one before accepted.
    assert rounds_of(made.tokens, [one.tokens for one in made.proposed], first=1) == made.proposed


# ---- processes and environments ----

SERVER = """
    import sys, http.server
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers(); self.wfile.write(b"fine")
        def log_message(self, *args): pass
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_waited_for_and_stopped(tmp_path: Path) -> None:
    port = free_port()
    words = [sys.executable, "-c", textwrap.dedent(SERVER), str(port)]
    others = psutil.Process().children()  # of tests before, as the compiler's workers
    with serving(words, {}, port, tmp_path / "log") as client:
        assert client.get("/anything").text == "fine"
        children = [child for child in psutil.Process().children() if child not in others]
        assert children
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def test_a_server_that_stops_is_quoted(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "raise ValueError('tensor fc.weight is missing')"]
    began = time.monotonic()
    with (
        pytest.raises(EngineError, match=r"stopped with status 1.*ValueError: tensor fc\.weight is missing"),
        serving(words, {}, free_port(), tmp_path / "log"),
    ):
        pass
    assert time.monotonic() - began < 30


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(60)"]
    with (
        pytest.raises(EngineError, match=r"not ready after 1 s\. It said: loading"),
        serving(words, {}, free_port(), tmp_path / "log", wait=1),
    ):
        pass


def test_the_error_is_found_in_a_long_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("the command\nValueError: 2 heads\nshutting down\nbye\n")
    assert last_words(log) == f"It said: ValueError: 2 heads (all of it in {log})"


def test_an_environment_that_is_not_built_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ENVIRONMENTS", tmp_path)
    with pytest.raises(EngineError, match="make engines ENGINES=vllm"):
        environment.python_of("vllm")
    with pytest.raises(EngineError, match="no engine 'vlm'"):
        environment.build("vlm")


def test_the_lists_of_packages_are_complete_pins() -> None:
    for name in environment.names():
        lines = (environment.LISTS / f"{name}.txt").read_text().splitlines()
        packages = [text for text in lines if text and not text.startswith(("#", "--"))]
        assert packages
        assert all("==" in text for text in packages), name


def test_cpu_builds_are_installed_first_and_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    packages = tmp_path / "list.txt"
    packages.write_text("# why\nnumpy==2.3.5\ntorch==2.13.0+cpu\n")
    _, first, rest = environment.steps(packages, Path("env"))
    assert first[-3:] == ["--extra-index-url", environment.TORCH_INDEX, "torch==2.13.0+cpu"]
    assert "--no-deps" in first
    assert rest == ["env/bin/python", "-m", "pip", "install", "--no-deps", "-r", str(packages)]
