"""Predictions held against a real run of a tiny pair; and by hand what is compared with what."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from configs.errors import ConfigError, TrafficError
from configs.schema import (
    Config,
    DataConfig,
    DecodeConfig,
    Drafting,
    Dtype,
    EvalConfig,
    MethodConfig,
    TargetConfig,
    Tree,
    ValidateConfig,
)
from data.tokens import REPLIES, Prompt
from decoding.costs import Curve
from decoding.drafters.plain import PlainDrafter
from decoding.sequence import Round
from eval import validate as module
from eval.validate import Known, Way, dealt, errors, grouped, named, picture, rotated, row_of, timed, validate
from models.files import write_text
from tests.eval.samples import tiny_pair
from tests.eval.test_tree import prompt_lines

RUN = Path("tiny") / "20260101-000000"

# ---- by hand ----


def test_groups_and_their_order() -> None:
    prompts: Any = list("abcdefg")
    assert grouped(prompts, 3) == [list("aceg"), list("bdf")]
    assert grouped(prompts, 9) == [list("abcdefg")]
    assert [rotated(list("abcd"), group) for group in range(3)] == [list("abcd"), list("cdab"), list("abcd")]


def played(*rounds: tuple[int, float]) -> Any:
    """A generation of rounds (emitted, seconds)."""
    return SimpleNamespace(rounds=[Round(3, e - 1, e, 3, 3, s / 2, s / 4, s) for e, s in rounds])


def test_steps_count_while_the_batch_is_full() -> None:
    # Three sequences, two at a time: in two steps one of them has its first round, and the third one's last
    # round is alone.
    made = [
        played((2, 1.0), (1, 2.0), (1, 3.0)),
        played((3, 1.0), (1, 2.0)),
        played((1, 3.0), (2, 4.0)),
    ]
    decoder: Any = SimpleNamespace(batch_size=2, generate_all=lambda _: made)
    assert timed(decoder, []) == {
        "prompts": [[4, 3], [4, 2], [3, 2]],
        "steps": 1,
        "seconds": 2.0,
        "target": 1.0,
        "draft": 0.5,
    }


def way(**changes: Any) -> Way:
    """Chains of 1 that emit 1.5 tokens; the decoder itself takes 1 ms a sequence."""
    known = {"tokens": 1.5, "drafted": {1: 1.0}, "depth": 1, "own": Curve((1, 2), (0.001, 0.001))}
    return Way("eagle3", "chain of 1", PlainDrafter(), 1, Known(**{**known, **changes}))


CURVES = {"target": Curve((1, 2), (0.010, 0.011)), "eagle3": Curve((1,), (0.001,))}


def runs(prompts: Sequence[Sequence[int]], steps: int, seconds: float) -> list[dict[str, Any]]:
    return [{"prompts": prompts, "steps": steps, "seconds": seconds, "target": 0.06, "draft": 0.006}]


def test_a_setting_predicted_and_measured() -> None:
    measured, plain = runs([[6, 4], [2, 2]], 6, 0.084), runs([[6, 6], [2, 2]], 8, 0.088)
    row = row_of(way(), 1, CURVES, measured, plain, Config())
    assert row["tokens"]["measured"] == pytest.approx(8 / 6)
    assert row["tokens"]["error"] == pytest.approx(1.5 * 6 / 8 - 1)
    # 1 ms of drafting, 11 over two nodes, 1 of its own; measured 14. Plain decoding: 10 + 1 ms, as measured.
    assert (row["round_ms"]["predicted"], row["round_ms"]["measured"]) == (
        pytest.approx(13),
        pytest.approx(14),
    )
    assert row["speedup"]["predicted"] == pytest.approx(1.5 * 11 / 13)
    assert row["speedup"]["measured"] == pytest.approx(8 / 6 * 11 / 14)
    assert row["round_ms"]["target"]["predicted"] == pytest.approx(11)
    low, high = row["speedup"]["ci"]
    assert low <= row["speedup"]["measured"] <= high


def test_own_time_grows_with_the_batch_and_trees_widen() -> None:
    # Half of the rounds draft nothing: of two sequences both do in a quarter of the steps.
    found = way(drafted={0: 1.0, 1: 1.0}, depth=0)
    row = row_of(found, 2, CURVES, runs([[3, 2], [3, 2]], 6, 0.08), runs([[3, 3]], 8, 0.1), Config())
    assert row["round_ms"]["predicted"] == pytest.approx(10 / 4 + 11 * 3 / 4 + 2)
    assert row["plain_ms"]["predicted"] == pytest.approx(12)
    assert row["round_ms"]["draft"]["predicted"] == 0


def test_a_batch_that_is_never_full_is_said() -> None:
    with pytest.raises(TrafficError, match=r"No step had a full batch"):
        row_of(way(), 1, CURVES, runs([[3, 2]], 0, 0.0), runs([[3, 3]], 8, 0.1), Config())


def test_errors_are_sizes() -> None:
    assert errors([-0.2, 0.05, 0.1]) == {
        "settings": 3,
        "median": 0.1,
        "worst": 0.2,
        "mean_signed": pytest.approx(-0.05 / 3),
    }


def test_prompts_are_dealt_in_one_mix() -> None:
    """Two of three of each category. Without it whatever runs short on one side is missing on the other."""
    found = [Prompt(f"{category}{i}", category, [1]) for i in range(6) for category in ("a", "b")]
    found += [Prompt(f"a{i}", "a", [1]) for i in range(6, 12)]
    first, others = dealt(found, 12)
    assert [sum(prompt.category == name for prompt in first) for name in ("a", "b")] == [8, 4]
    assert [sum(prompt.category == name for prompt in others) for name in ("a", "b")] == [4, 2]
    assert sorted(prompt.id for prompt in first + others) == sorted(prompt.id for prompt in found)
    assert [prompt for prompt in found if prompt in first] == first  # in their order
    assert dealt(found, 18) == (found, [])


# ---- a run ----


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A target, an untrained draft and prompts. At such a temperature both laws are nearly flat, so that much
    of what is drawn passes."""
    tiny_pair(tmp_path, RUN)
    write_text(tmp_path / "data" / "train.jsonl", prompt_lines(["a1", "b1", "a2", "b2"]))
    write_text(tmp_path / "data" / REPLIES, '{"id": "a1"}\n')
    held = [
        json.dumps({"id": f"h{i}", "category": "h", "prompt_ids": [9, 5 + i, 8, 9], "messages": []})
        for i in range(8)
    ]
    write_text(tmp_path / "data" / "heldout.jsonl", "\n".join(held) + "\n")
    return Config(
        experiment="tiny",
        runs=str(tmp_path / "runs"),
        target=TargetConfig(name=str(tmp_path / "target"), dtype=Dtype.float32, device="cpu"),
        method=MethodConfig(name="eagle3"),
        data=DataConfig(folder=str(tmp_path / "data")),
        decode=DecodeConfig(
            max_new_tokens=48,
            temperature=20.0,
            drafters=[Drafting.draft, Drafting.lookup],
            tree=Tree.dynamic,
            tree_nodes=4,
            draft_tokens=2,
        ),
        eval=EvalConfig(tree_prompts=4, tree_nodes=12, tree_depth=3, bootstrap=50),
        validate=ValidateConfig(draft_tokens=[1, 3], tree_nodes=[4], batch_sizes=[1, 2], prompts=4),
    )


def run(config: Config) -> tuple[dict[str, Any], str]:
    screen = io.StringIO()
    return validate(config, Console(file=screen, width=160)), screen.getvalue()


def test_every_setting_is_predicted_and_measured(config: Config) -> None:
    found, screen = run(config)
    folder = Path(config.runs) / RUN / "measure"
    assert json.loads((folder / "validate.json").read_text())["rows"] == found["rows"]
    assert (folder / "validate.svg").read_text().startswith("<svg")
    assert not (folder / module.PARTIAL).exists()
    named = dict.fromkeys((row["draft"], row["drafting"]) for row in found["rows"])
    assert [*named] == [
        ("eagle3", "chain of 1"),
        ("eagle3", "chain of 3"),
        ("eagle3", "static tree of 4"),
        ("lookup", "up to 3"),
        ("eagle3", "dynamic tree of 4 with lookup"),
    ]
    assert [row["batch_size"] for row in found["rows"]] == [1, 2] * 5
    for row in found["rows"]:
        assert 1 <= row["tokens"]["predicted"] <= 4
        assert 1 <= row["tokens"]["measured"] <= 4
        assert row["round_ms"]["measured"] >= row["round_ms"]["target"]["measured"] > 0
    assert found["errors"]["speedup"]["settings"] == 10
    assert found["acceptance_from"] == {"prompts": 4, "batch_size": 1, "tree_nodes": 12}
    assert "Over 10 settings the predicted speedup is off by" in screen


def test_a_killed_run_goes_on(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config.validate.lookup = False
    began: list[int] = []
    real = module.timed

    def counting(*given: Any) -> Any:
        began.append(1)
        if len(began) == 5:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(module, "timed", counting)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    found, _ = run(config)
    # Four ways at two batch sizes, in one group, three and one, each time with plain decoding; four of all
    # these runs were there already.
    assert len(began) == 5 + 12 - 4
    assert len(found["rows"]) == 8


def test_what_is_named_twice_is_measured_once(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[int] = []
    real = module.timed
    monkeypatch.setattr(module, "timed", lambda *given: [began.append(1), real(*given)][1])
    config.decode.tree, config.decode.drafters = Tree.chain, [Drafting.draft]
    # More nodes than can be accepted: both are the same tree.
    config.validate = ValidateConfig(
        draft_tokens=[2, 2], tree_nodes=[500, 400], lookup=False, batch_sizes=[1, 1], prompts=4
    )
    found, _ = run(config)
    assert [row["drafting"].rpartition(" ")[0] for row in found["rows"]] == ["chain of", "static tree of"]
    assert len(began) == 3  # and plain decoding
    assert found["errors"]["speedup"]["settings"] == 2


def test_compiled_forwards_are_refused_before_a_model_loads(config: Config) -> None:
    config.decode.compile, config.target.name = True, "nowhere"
    with pytest.raises(ConfigError, match=r"decode\.compile=true.*eval\.validate is about eager forwards"):
        run(config)


def test_drafts_have_names_of_their_own() -> None:
    draft: Any = SimpleNamespace(method="eagle3")
    folders = [Path(run) / "1" / "draft" for run in ("a", "b", "c")]
    assert [*named(dict.fromkeys(folders, draft))] == ["eagle3", "eagle3 1", f"eagle3 {folders[2]}"]


def test_too_few_prompts_for_a_batch(config: Config) -> None:
    config.validate.batch_sizes = [1, 8]
    with pytest.raises(TrafficError, match=r"4 prompts do not fill a batch of 8.*validate\.batch_sizes"):
        run(config)


def test_no_prompts_left_to_predict_from(config: Config) -> None:
    config.validate.prompts = 8
    with pytest.raises(TrafficError, match=r"All 8 held-out prompts are measured.*validate\.prompts"):
        run(config)


def test_a_picture_of_every_setting() -> None:
    measured, plain = runs([[6, 4], [2, 2]], 6, 0.084), runs([[6, 6], [2, 2]], 8, 0.088)
    rows = [row_of(way(), 1, CURVES, measured, plain, Config())]
    assert "eagle3" in picture(rows).svg()
