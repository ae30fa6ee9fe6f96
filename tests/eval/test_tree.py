"""From a draft and prompts to the file of a tree, on a tiny target; and which prompts those are."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from configs.errors import CheckpointError, ConfigError, TrafficError
from configs.schema import (
    Config,
    DataConfig,
    DecodeConfig,
    Drafting,
    Dtype,
    EvalConfig,
    MethodConfig,
    Replies,
    TargetConfig,
    Tree,
    Verification,
)
from data.tokens import REPLIES
from decoding.build import build_decoder
from decoding.compiled import Compiled
from decoding.costs import Costs, Curve, Steps
from decoding.sequence import Params
from decoding.sequoia import acceptance_vectors, expected_tokens
from decoding.shapes import TreeShape, read_shape
from eval.tree import Times, calibration, make_tree, measured
from models.checkpoint import load_draft
from models.files import write_text
from models.target import Target
from tests.eval.samples import tiny_pair

RUN = Path("tiny") / "20260101-000000"


def prompt_lines(ids: list[str]) -> str:
    return "".join(
        json.dumps({"id": id, "category": id[0], "prompt_ids": [5 + i, 6, 7], "messages": []}) + "\n"
        for i, id in enumerate(ids)
    )


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A target, an untrained draft and train prompts, two of four answered. At such a temperature both laws
    are nearly flat, so that much of what is drawn passes."""
    tiny_pair(tmp_path, RUN)
    write_text(tmp_path / "data" / "train.jsonl", prompt_lines(["a1", "b1", "a2", "b2"]))
    write_text(tmp_path / "data" / REPLIES, "".join(f'{{"id": "{id}"}}\n' for id in ("a1", "b1")))
    # Every node costs the target a tenth of a forward more, every level 50 ms, and every round 10 ms.
    times = Times(Curve((1, 11), (0.1, 0.2)), Curve((1, 2), (0.05, 0.1)), Curve((1,), (0.01,)))
    monkeypatch.setattr("eval.tree.measured", lambda *_: times)
    return Config(
        experiment="tiny",
        runs=str(tmp_path / "runs"),
        target=TargetConfig(name=str(tmp_path / "target"), dtype=Dtype.float32, device="cpu"),
        method=MethodConfig(name="eagle3"),
        data=DataConfig(folder=str(tmp_path / "data")),
        decode=DecodeConfig(max_new_tokens=96, temperature=20.0, batch_size=2),
        eval=EvalConfig(tree_prompts=4, tree_nodes=16, tree_depth=3),
    )


def run(config: Config) -> tuple[Path, str]:
    """(the file, what the terminal showed)."""
    screen = io.StringIO()
    return make_tree(config, Console(file=screen, width=140)), screen.getvalue()


def test_a_tree_is_made_and_decoded_with(config: Config) -> None:
    file, screen = run(config)
    assert file == Path(config.runs) / RUN / "tree.json"
    shape, made = read_shape(file)
    assert 1 <= shape.depth <= 3
    assert 2 <= len(shape) <= 16
    assert made.vectors is not None
    assert made.expected_tokens is not None
    assert made.expected_tokens == pytest.approx(expected_tokens(shape, made.vectors))
    assert made.rounds is not None
    assert made.rounds >= 30
    assert (made.temperature, made.proposal, made.batch_size) == (20.0, "sampled", 2)
    assert made.traffic is not None
    assert made.traffic.endswith("train.jsonl, 2 of them trained on")
    assert made.seconds is not None
    assert made.seconds["target"] == {"1": 0.1, "11": 0.2}
    # Plain decoding takes 110 ms a token; the tree takes that, its nodes' and its levels' time for more.
    seconds = 0.11 + 0.01 * (len(shape) - 1) + 0.05 * shape.depth
    assert made.speedup == pytest.approx(0.11 / (seconds / made.expected_tokens))
    assert f"decode.tree_file={file} decode.draft_tokens={shape.depth}" in screen
    assert f"{made.expected_tokens:.2f}" in screen

    target = Target.load(config.target)
    draft = load_draft(file.parent / "draft", target)
    static = replace(config.decode, tree=Tree.static, tree_file=str(file), draft_tokens=shape.depth)
    done = build_decoder(target, draft, static).generate([5, 6, 7], Params.of(static, seed=0))
    assert max(round.nodes for round in done.rounds) == len(shape)


def test_the_file_may_be_named(config: Config, tmp_path: Path) -> None:
    config.decode.tree_file = str(tmp_path / "new" / "mine.json")
    assert run(config)[0] == tmp_path / "new" / "mine.json"
    read_shape(tmp_path / "new" / "mine.json")


def test_same_seed_same_acceptance(config: Config) -> None:
    vectors = [read_shape(run(config)[0])[1].vectors for _ in range(2)]
    assert vectors[0] == vectors[1]


def test_a_tree_that_does_not_pay_is_said_not_to(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    dear = Times(Curve((1, 2), (0.1, 9.9)), Curve((1, 2), (5.0, 10.0)), Curve((1,), (0.01,)))
    monkeypatch.setattr("eval.tree.measured", lambda *_: dear)
    file, screen = run(config)
    assert "No tree is predicted to pay" in screen
    assert read_shape(file)[0] == TreeShape.chain(1)


def test_prompts_that_were_not_trained_on_come_first(config: Config) -> None:
    def chosen(count: int) -> tuple[list[str], int]:
        config.eval.tree_prompts = count
        prompts, trained = calibration(config)
        return [prompt.id for prompt in prompts], trained

    assert chosen(1) == (["a2"], 0)
    assert chosen(3) == (["a2", "b2", "a1"], 1)
    assert chosen(9) == (["a2", "b2", "a1", "b1"], 2)
    config.data.replies = Replies.logged  # all are learnt: the last ones first
    assert chosen(2) == (["a2", "b2"], 2)


# ---- bad inputs ----


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"drafters": [Drafting.lookup]}, "decode.drafters has no draft"),
        ({"tree_replacement": True}, "decode.tree_replacement=true"),
        ({"verification": Verification.typical}, "decode.verification=typical"),
    ],
)
def test_what_has_no_acceptance_by_rank_is_refused(
    config: Config, wrong: dict[str, object], says: str
) -> None:
    config.decode = replace(config.decode, **wrong)
    with pytest.raises(ConfigError, match=says):
        run(config)


def test_too_few_rounds(config: Config) -> None:
    config.decode.max_new_tokens = 3
    with pytest.raises(TrafficError, match=r"too few to tell.*tree_prompts"):
        run(config)


def test_no_prompts(config: Config) -> None:
    write_text(Path(config.data.folder) / "train.jsonl", "")
    with pytest.raises(TrafficError, match="no prompts"):
        run(config)


def test_a_draft_that_is_never_right(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = acceptance_vectors([[0, 0]], [[50, 50]])
    monkeypatch.setattr("eval.tree.Trials.vectors", lambda *_: nothing)
    with pytest.raises(CheckpointError, match="took nothing of what the draft"):
        run(config)
    assert not (Path(config.runs) / RUN / "tree.json").exists()


def test_where_decoding_compiles_trees_have_sizes_of_their_own(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[list[int]] = []

    def costs(*_: Any, compiled: Compiled) -> Costs:
        sizes.append(compiled.sizes)
        return Costs(Steps((1, 16), (0.1, 0.4)), 0.0)

    monkeypatch.setattr("eval.tree.measured_costs", costs)
    monkeypatch.setattr("eval.tree.measured_drafting", lambda *_: Curve((1,), (0.05,)))
    config.decode.compile = True
    target = Target.load(config.target)
    draft = load_draft(Path(config.runs) / RUN / "draft", target)
    times = measured(config, target, draft, "tiny", Curve((1,), (0.01,)))
    assert sizes == [[1, 2, 3, 4, 6, 8, 12, 16]]
    assert times.target(6) == pytest.approx(0.2)  # and not what 16 take
