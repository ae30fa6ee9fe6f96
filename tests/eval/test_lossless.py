"""The whole check on a tiny pair: it passes what is lossless, finds what is not, and goes on after a kill."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import decoding.verify
import eval.lossless
from configs.errors import TrafficError
from configs.schema import (
    Config,
    DataConfig,
    DecodeConfig,
    Dtype,
    EvalConfig,
    MethodConfig,
    TargetConfig,
    Verification,
)
from eval.lossless import PARTIAL, Pair, lossless, main, verdict
from eval.uniform import Result
from models.files import write_text
from tests.eval.samples import tiny_pair

RUN = Path("tiny") / "20260101-000000"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Laws far from the untrained draft's flat ones: much of what is drafted is refused."""
    tiny_pair(tmp_path, RUN)
    prompts = [
        {"id": f"a{i}", "category": "a", "prompt_ids": [5 + i, 6, 7], "messages": []} for i in range(4)
    ]
    write_text(tmp_path / "data" / "heldout.jsonl", "".join(json.dumps(one) + "\n" for one in prompts))
    return Config(
        experiment="tiny",
        runs=str(tmp_path / "runs"),
        target=TargetConfig(name=str(tmp_path / "target"), dtype=Dtype.float32, device="cpu"),
        method=MethodConfig(name="eagle3"),
        data=DataConfig(folder=str(tmp_path / "data")),
        decode=DecodeConfig(max_new_tokens=32, draft_tokens=2, temperature=0.7, batch_size=6),
        eval=EvalConfig(lossless_prompts=4, lossless_replies=6),
    )


def run(config: Config) -> tuple[dict[str, Any], str]:
    """(what was written, what the terminal showed)."""
    screen = io.StringIO()
    return lossless(config, Console(file=screen, width=140)), screen.getvalue()


def test_a_lossless_pair_passes(config: Config) -> None:
    found, screen = run(config)
    assert found["lossless"]
    assert found["greedy"] == {
        "prompts": 4,
        "tokens": found["greedy"]["tokens"],
        "identical": 4,
        "largest_gap": None,
        "unexplained": 0,
    }
    drawn = found["sampled"]["draft"]
    assert drawn["tokens"] > 400
    assert drawn["impossible"] == 0
    assert [one["name"] for one in drawn["tests"]] == ["tokens", "rounds", "pairs"]
    assert 0 < found["sampled"]["finds_bias"] < 0.5
    assert "4 of 4 outputs are equal" in screen
    assert screen.splitlines()[-2].startswith("LOSSLESS")
    written = Path(config.runs) / RUN / "measure" / "lossless.json"
    assert json.loads(written.read_text()) == json.loads(json.dumps(found))
    assert not written.with_name(PARTIAL).exists()


def test_a_draft_that_is_never_refused_is_found(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding.verify, "acceptance", lambda p, q, token: 1.0)
    found, _ = run(config)
    assert not found["lossless"]
    assert "tokens" in found["sampled"]["draft"]["fails"]
    assert found["verdict"].startswith("NOT LOSSLESS: what was drawn fails tokens")


def test_typical_acceptance_is_found(config: Config) -> None:
    config.decode.verification = Verification.typical
    assert not run(config)[0]["lossless"]


def test_block_verification_is_not_told_apart_by_rounds(config: Config) -> None:
    config.decode.verification = Verification.block
    found, _ = run(config)
    assert found["lossless"]
    assert [one["name"] for one in found["sampled"]["draft"]["tests"]] == ["tokens", "pairs"]


def test_a_wrong_greedy_choice_is_found(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    follow = decoding.verify.follow

    def lenient(tree: Any, choice: Any) -> Any:
        """Takes any child for the right one."""
        if len(tree) > 1:
            return decoding.verify.Verdict((0, 1), choice(1))
        return follow(tree, choice)

    monkeypatch.setattr("decoding.decoder.follow", lenient)
    found, screen = run(config)
    assert found["greedy"]["unexplained"] > 0
    assert found["verdict"].startswith("NOT LOSSLESS: ")
    assert "rounding does not explain" in screen


def test_a_killed_run_goes_on(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = run(config)
    line, asked = Pair.line, []

    def killed(self: Pair, prompt: Any) -> dict[str, Any]:
        asked.append(prompt.id)
        if asked == ["a0", "a1", "a2"]:
            raise KeyboardInterrupt
        return line(self, prompt)

    monkeypatch.setattr(Pair, "line", killed)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    resumed, _ = run(config)
    assert asked == ["a0", "a1", "a2", "a2", "a3"]
    assert (resumed["greedy"], resumed["sampled"]) == (whole["greedy"], whole["sampled"])


def test_nothing_to_look_at_is_refused(config: Config) -> None:
    write_text(Path(config.data.folder) / "heldout.jsonl", "")
    with pytest.raises(TrafficError, match="no held-out prompts"):
        run(config)


def test_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    body = main.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    monkeypatch.setattr(eval.lossless, "lossless", lambda *_: {"lossless": True})
    body(Config())
    monkeypatch.setattr(eval.lossless, "lossless", lambda *_: {"lossless": False})
    with pytest.raises(SystemExit) as left:
        body(Config())
    assert left.value.code == 3


def test_verdicts() -> None:
    fine = {"plain": [Result("tokens", 1.0, 1, 0.3)], "draft": [Result("tokens", 1.0, 1, 0.3)]}
    assert verdict(0, fine, {"plain": [], "draft": []})[1]
    assert verdict(1, fine, {"plain": [], "draft": []})[0].startswith("NOT LOSSLESS: 1 greedy")
    assert verdict(0, fine, {"plain": ["tokens"], "draft": ["tokens"]})[0].startswith("UNDECIDED: plain")
    assert verdict(0, fine, {"plain": ["tokens"], "draft": []})[1] is False
    few = {"plain": [], "draft": []}
    assert verdict(0, few, {"plain": [], "draft": []})[0].startswith("UNDECIDED: too few")
