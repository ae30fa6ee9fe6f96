"""The whole measurement on a tiny target and draft, and what it refuses."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from configs.errors import CheckpointError, ConfigError, StorageError, TrafficError
from configs.rules import check
from configs.schema import (
    Config,
    DataConfig,
    DecodeConfig,
    Dtype,
    EvalConfig,
    MethodConfig,
    TargetConfig,
    Tree,
    Verification,
)
from data.tokens import Prompt, evenly
from decoding.sequence import Generation
from decoding.shapes import Conditions as Made
from decoding.shapes import TreeShape, write_shape
from eval.bench import Bench, Partial, Step, as_run, run_key, turns
from eval.dialogue import Dialogue
from eval.generate import generate
from eval.measure import PARTIAL, SCHEMA_FILE, measure
from models.checkpoint import save_draft
from models.files import read_lines, write_text
from models.target import Target
from tests.conftest import tiny_draft, tiny_target

HELDOUT = [
    ("h1", "maths", [5, 6, 7]),
    ("h2", "maths", [8, 9]),
    ("h3", "code", [10, 11, 12, 13]),
    ("h4", "code", [5]),
]


def prompt_lines(prompts: list[tuple[str, str, list[int]]]) -> str:
    return "".join(
        json.dumps({"id": id, "category": category, "prompt_ids": ids, "messages": []}) + "\n"
        for id, category, ids in prompts
    )


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A target, an untrained draft in a finished run, and prepared traffic, all on the disk."""
    target = tiny_target()
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    save_draft(
        tmp_path / "runs" / "tiny" / "20260101-000000" / "draft", tiny_draft(target), target, {"steps": 3}
    )
    write_text(tmp_path / "data" / "train.jsonl", prompt_lines([("t1", "maths", [20, 21])]))
    write_text(tmp_path / "data" / "heldout.jsonl", prompt_lines(HELDOUT))
    return Config(
        experiment="tiny",
        runs=str(tmp_path / "runs"),
        target=TargetConfig(name=str(tmp_path / "target"), dtype=Dtype.float32, device="cpu"),
        method=MethodConfig(name="eagle3"),
        data=DataConfig(folder=str(tmp_path / "data")),
        decode=DecodeConfig(draft_tokens=2, max_new_tokens=6),
        eval=EvalConfig(max_prompts=4, warmup_prompts=1, bootstrap=50, max_load=1.0),
    )


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.measure.share_of_others", lambda: 0.0)


def run(config: Config) -> tuple[dict[str, Any], str]:
    """(what measure.json holds, what the terminal showed)."""
    screen = io.StringIO()
    return measure(config, Console(file=screen, width=140)), screen.getvalue()


def folder(config: Config) -> Path:
    return Path(config.runs) / "tiny" / "20260101-000000" / "measure"


def test_a_whole_measurement(config: Config) -> None:
    config.eval.compare_generate = True
    config.eval.temperatures = [0.0, 1.0]
    made, screen = run(config)
    stored = json.loads((folder(config) / "measure.json").read_text())
    assert stored == made
    assert stored["traffic"]["measured"] == {"code": 2, "maths": 2}
    assert stored["draft"]["training"] == {"steps": 3}
    keys = {(r["temperature"], r["method"], r["category"], r["context_bucket"]) for r in stored["rows"]}
    groups = [("all", "all"), ("maths", "all"), ("code", "all"), ("all", "1-32")]
    assert keys == {(t, m, *group) for t in (0.0, 1.0) for m in ("plain", "eagle3") for group in groups}
    assert stored["draft"]["parameters"] > 0  # frozen for decoding, and counted all the same
    # Float32 and greedy: plain, speculative and transformers' own outputs are the same tokens.
    whole = next(
        r for r in stored["rows"] if r["method"] == "eagle3" and r["category"] == r["context_bucket"] == "all"
    )
    assert (whole["temperature"], whole["identical_count"], whole["first_divergence_gap"]) == (0.0, 4, None)
    peer = stored["generate"]
    assert (peer["prompts"], peer["identical_plain"], peer["identical_draft"]) == (4, 4, 4)
    assert "measure.json" in screen
    assert "report.html" in screen
    assert "maths" in screen
    assert "<svg" in (folder(config) / "report.html").read_text()
    assert not (folder(config) / PARTIAL).exists()
    assert stored["advice"] and all(f"- {said[:40]}" in screen for said in stored["advice"])
    schema = json.loads(SCHEMA_FILE.read_text())
    assert set(schema["properties"]) == set(stored)
    assert {*schema["$defs"]["row"]["properties"]} == {*stored["rows"][0], "reply"}


def test_generate_is_given_the_penalty_too(config: Config) -> None:
    config.eval.compare_generate = True
    config.decode.repetition_penalty = 1.7
    peer = run(config)[0]["generate"]
    assert (peer["prompts"], peer["identical_plain"], peer["identical_draft"]) == (4, 4, 4)


def test_batch_sizes_and_temperatures_are_swept(config: Config) -> None:
    """Four prompts in batches of 1 and 3; the fourth stands alone in the second batch of 3, which is filled
    up with runs of it that do not count. In float32 every way says the same."""
    config.eval.batch_sizes, config.eval.temperatures = [1, 3], [0.0, 1.0]
    made, screen = run(config)
    whole = [
        r for r in made["rows"] if r["method"] == "eagle3" and r["category"] == r["context_bucket"] == "all"
    ]
    assert [(r["temperature"], r["batch_size"]) for r in whole] == [(0, 1), (0, 3), (1, 1), (1, 3)]
    assert [(v["temperature"], v["batch_size"]) for v in made["verdicts"]] == [(0, 1), (0, 3), (1, 1), (1, 3)]
    assert [(r["prompts"], r["pairs"], r["clusters"]) for r in whole] == [(4, 4, 4), (4, 4, 2)] * 2
    assert [r["identical_count"] for r in whole[:2]] == [4, 4]
    assert whole[0]["sequences_in_flight"] == pytest.approx(1.0)
    assert 1.0 < whole[1]["sequences_in_flight"] <= 3.0
    assert [one["batch_size"] for one in made["memory"]] == [1, 3]
    alone, together = made["memory"]
    assert together["target_cache"] > alone["target_cache"] > 0
    assert together["target_weights"] == alone["target_weights"] > alone["draft_weights"] > 0
    assert "All prompts by setting" in screen
    assert any("By batch size the speedup is" in said for said in made["advice"])


def test_an_interrupted_sweep_goes_on(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 3 are two steps; stopped before the last of four."""
    config.eval.batch_sizes = [3, 2]
    decoded: list[str] = []
    kept = stop_after(3, decoded, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.setattr(Bench, "pairs", kept)
    made, screen = run(config)
    assert "Going on after 6 pairs" in screen  # 3, 1 and 2
    assert [(d["batch_size"], d["batch"], d["prompt"]) for d in made["details"]] == [
        (3, 0, "h3"), (3, 0, "h1"), (3, 0, "h4"), (3, 1, "h2"),
        (2, 0, "h3"), (2, 0, "h1"), (2, 1, "h4"), (2, 1, "h2"),
    ]  # fmt: skip


def test_prompts_of_a_batch_share_its_time(config: Config, target: Target) -> None:
    """Both are in flight together from the first moment on."""
    config.decode.batch_size = 2
    bench = Bench(config, target, tiny_draft(target))
    asked = [Dialogue(Prompt(id, "c", ids), []) for id, _, ids in HELDOUT[:2]]
    made = bench.pairs(Step(0, 0.0, 2, 0, tuple(asked)), "plain")
    for runs in ([one.plain for one in made], [one.draft for one in made]):
        total = sum(run.share or 0.0 for run in runs)
        assert max(run.seconds for run in runs) <= total + 1e-9 < sum(run.seconds for run in runs)
        assert all(0 < (run.decode_share or 0.0) < (run.share or 0.0) < run.seconds for run in runs)


@pytest.mark.parametrize(
    ("tokens", "finish", "looped"),
    [([9, *[5, 6] * 8, 2], "eos", True), ([9, *[5, 6] * 8], "length", True), ([9, 5, 6, 7], "length", False)],
)
def test_loops_are_flagged_with_or_without_an_end(tokens: list[int], finish: Any, looped: bool) -> None:
    assert as_run(Generation(tokens=tokens, finish=finish), None).looped is looped


def test_a_static_tree_is_measured_by_its_levels(config: Config, tmp_path: Path) -> None:
    """Two levels of 2 and 4 nodes; nearly flat laws, so that some drafts of the untrained network pass."""
    write_shape(tmp_path / "tree.json", TreeShape.of((2, 2)), Made())
    config.decode.tree, config.decode.tree_file = Tree.static, str(tmp_path / "tree.json")
    config.decode.temperature, config.eval.temperatures = 20.0, [20.0]
    made, screen = run(config)
    whole = next(row for row in made["rows"] if row["method"] == "eagle3")
    said = [whole[name] for name in ("tree", "tree_nodes", "tree_width", "tree_file", "stop_drafting")]
    assert said == ["static", 6, None, str(tmp_path / "tree.json"), None]
    assert len(whole["acceptance_by_position"]) == 2
    assert sum(whole["acceptance_by_position"]) == pytest.approx(whole["mean_acceptance_length"] - 1)
    # The last round of a sequence drafts nothing, and so tries nothing.
    assert whole["conditional_acceptance"][0] > whole["acceptance_by_position"][0] > 0
    assert "static tree of 6 by draft, batch 1" in screen


def test_order_alternates_within_each_category_and_between_repeats() -> None:
    """a, b, a, b by turns: alternating over all of them would start every a with plain."""
    prompts = [Dialogue(Prompt(f"{category}{i}", category, [i]), []) for i in range(2) for category in "ab"]
    plan = [Step(repeat, 0.0, 1, i, (prompt,)) for repeat in range(2) for i, prompt in enumerate(prompts)]
    assert turns(plan) == ["plain", "draft", "draft", "plain", "draft", "plain", "plain", "draft"]


def test_an_interrupted_run_goes_on(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped while the third pair is decoded: two pairs are kept, and only two are decoded after that."""
    decoded: list[str] = []
    kept = stop_after(2, decoded, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    assert decoded == ["h3", "h1", "h4"]
    lines = read_lines(folder(config) / PARTIAL)
    assert [line["pairs"][0]["prompt"] for line in lines[1:]] == ["h3", "h1"]
    with open(folder(config) / PARTIAL, "a") as file:  # a line torn by a kill
        file.write('{"pairs": [{"prom')

    decoded.clear()
    monkeypatch.setattr(Bench, "pairs", kept)
    made, screen = run(config)
    assert decoded == []
    assert "Going on after 2 pairs" in screen
    before = [line["pairs"][0]["plain"]["seconds"] for line in lines[1:]]
    assert [pair["plain"]["seconds"] for pair in made["details"]][:2] == before
    assert [pair["prompt"] for pair in made["details"]] == ["h3", "h1", "h4", "h2"]


def stop_after(count: int, decoded: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Interrupts the run when it decodes the step after `count` others; returns the untouched method."""
    pairs = Bench.pairs

    def stopping(self: Bench, step: Step, first: str) -> Any:
        decoded.append(step.members[0].prompt.id)
        if len(decoded) > count:
            raise KeyboardInterrupt
        return pairs(self, step, first)

    monkeypatch.setattr(Bench, "pairs", stopping)
    return pairs


def test_pairs_of_another_configuration_are_not_used(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = stop_after(2, [], monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.setattr(Bench, "pairs", kept)
    config.decode.draft_tokens = 1
    made, screen = run(config)
    assert "measuring from the start" in screen
    assert len(made["details"]) == 4
    assert all(pair["draft"]["accepted"] <= pair["draft"]["rounds"] for pair in made["details"])  # K = 1


def test_the_key_covers_what_a_pair_depends_on(config: Config, target: Target, tmp_path: Path) -> None:
    draft = Path(config.runs) / "tiny" / "20260101-000000" / "draft"
    where = {"git": None, "hardware": {}, "versions": {}}
    chosen = [Prompt("h1", "maths", [5, 6, 7])]
    key = run_key(config, where, draft, target, chosen)
    assert key == run_key(config, where, draft, target, chosen)
    assert key != run_key(config, {**where, "hardware": {"threads": 2}}, draft, target, chosen)
    assert key != run_key(config, where, draft, target, [Prompt("h1", "maths", [5, 6, 8])])
    assert key != run_key(config, where, draft, tiny_target(seed=1), chosen)
    save_draft(tmp_path / "other", tiny_draft(target, seed=1), target, {})
    assert key != run_key(config, where, tmp_path / "other", target, chosen)
    config.decode.tree, config.decode.tree_file = Tree.static, str(tmp_path / "tree.json")
    keys = []
    for shape in (TreeShape.of((2,)), TreeShape.of((3,))):
        write_shape(tmp_path / "tree.json", shape, Made())
        keys.append(run_key(config, where, draft, target, chosen))
    assert len({key, *keys}) == 3  # the same name, another tree
    config.seed = 1
    assert key != run_key(config, where, draft, target, chosen)


def test_a_partial_file_of_another_key_is_replaced(tmp_path: Path) -> None:
    Partial(tmp_path / PARTIAL, "one", Console(file=io.StringIO()))
    Partial(tmp_path / PARTIAL, "two", Console(file=io.StringIO()))
    assert read_lines(tmp_path / PARTIAL) == [{"key": "two"}]


def test_zero_rounds(config: Config) -> None:
    """One token per answer comes from the prefill: no round, so no acceptance, and no invented number."""
    config.decode.max_new_tokens = 1
    made, screen = run(config)
    whole = next(row for row in made["rows"] if row["method"] == "eagle3")
    assert whole["rounds"] == 0
    assert whole["new_tokens"] == 4
    assert whole["mean_acceptance_length"] is None
    assert "–" in screen


def test_divergence_is_found_with_its_gap(config: Config, target: Target) -> None:
    """After prompt and common tokens the target's two largest logits are a known distance apart."""
    bench = Bench(config, target, tiny_draft(target))
    assert bench.divergence([5, 6], [7, 8], [7, 8]) is None
    found = bench.divergence([5, 6], [7, 8, 9], [7, 10])
    assert found is not None
    logits = target.model(torch.tensor([[5, 6, 7]])).logits[0, -1].sort(descending=True).values
    assert (found.index, found.plain, found.draft) == (1, 8, 10)
    assert found.gap == pytest.approx(float(logits[0] - logits[1]), rel=1e-4)
    config.decode.repetition_penalty = 1.7
    penalised = bench.divergence([5, 6], [7, 8, 9], [7, 10])
    values = target.model(torch.tensor([[5, 6, 7]])).logits[0, -1]
    for id in (5, 6, 7):
        values[id] = values[id] / 1.7 if values[id] > 0 else values[id] * 1.7
    best, second = values.sort(descending=True).values[:2].tolist()
    assert penalised is not None
    assert penalised.gap == pytest.approx(best - second, rel=1e-4)
    shorter = bench.divergence([5, 6], [7, 8], [7])
    assert shorter is not None
    assert (shorter.index, shorter.plain, shorter.draft) == (1, 8, None)


def test_both_ways_share_parameters_and_prompts_do_not_share_draws(config: Config, target: Target) -> None:
    bench = Bench(config, target, tiny_draft(target))
    one, other = Prompt("h1", "maths", [5]), Prompt("h2", "maths", [5])
    assert bench.params(one, 1.0, 0) == bench.params(one, 1.0, 0)
    assert bench.params(one, 1.0, 0).temperature == 1.0
    assert len({bench.params(p, 1.0, r).seed for p in (one, other) for r in (0, 1)}) == 4


@pytest.mark.parametrize("verification", list(Verification))
def test_lossy_verification_is_said_to_be(config: Config, target: Target, verification: Verification) -> None:
    config.decode.verification = verification
    lossless = Bench(config, target, tiny_draft(target)).conditions().lossless
    assert lossless is (verification is not Verification.typical)


def test_generate_sets_the_models_own_penalties_aside(target: Target) -> None:
    plain, _ = generate(target, [5, 6, 7], 12)
    target.model.generation_config.repetition_penalty = 5.0
    assert generate(target, [5, 6, 7], 12)[0] == plain
    assert target.model.generation_config.repetition_penalty == 5.0


def test_prompts_are_taken_evenly() -> None:
    """Three of b and one each of a and c; four are asked for."""
    prompts = [Prompt(f"{c}{i}", c, [i]) for c, n in (("b", 3), ("a", 1), ("c", 1)) for i in range(n)]
    assert [prompt.id for prompt in evenly(prompts, 4)] == ["a0", "b0", "c0", "b1"]


# ---- bad inputs ----


@pytest.mark.parametrize("sizes", [[], [1, 0]])
def test_batch_sizes_that_are_none(config: Config, sizes: list[int]) -> None:
    config.eval.batch_sizes = sizes
    with pytest.raises(ConfigError, match=r"eval\.batch_sizes=.*\[1,4,8\]"):
        check(config)


def test_no_draft_yet(config: Config, tmp_path: Path) -> None:
    config.runs = str(tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"train\.distill"):
        run(config)


def test_the_decoders_temperature_is_what_is_measured(config: Config) -> None:
    config.decode.temperature = 0.7
    made, _ = run(config)
    assert {row["temperature"] for row in made["rows"]} == {0.7}


def test_a_measurement_of_another_configuration_is_kept(config: Config) -> None:
    run(config)
    again, screen = run(config)
    assert "another configuration" not in screen
    config.decode.draft_tokens = 1
    run(config)
    (aside,) = folder(config).parent.glob("measure-*")
    assert json.loads((aside / "measure.json").read_text())["created"] == again["created"]
    assert (aside / "report.html").exists() and (folder(config) / "report.html").exists()


def test_what_would_not_be_measured_as_it_is_set(config: Config, tmp_path: Path) -> None:
    config.decode.draft_tokens = 0
    with pytest.raises(ConfigError, match="drafts nothing"):
        run(config)
    config.decode.draft_tokens = 2
    config.decode.tree = Tree.static
    config.decode.tree_file = str(tmp_path / "tree.json")
    with pytest.raises(ConfigError, match=r"tree\.json does not exist.*eval\.tree"):
        run(config)
    write_shape(tmp_path / "tree.json", TreeShape.chain(3), Made())
    with pytest.raises(ConfigError, match=r"3 levels deep.*would cut it.*draft_tokens=3"):
        run(config)


def test_a_draft_for_another_target(config: Config, tmp_path: Path) -> None:
    tiny_target(seed=1).model.save_pretrained(tmp_path / "target")
    with pytest.raises(CheckpointError, match="another target"):
        run(config)


def test_no_heldout_prompts(config: Config) -> None:
    write_text(Path(config.data.folder) / "heldout.jsonl", "")
    with pytest.raises(TrafficError, match="no held-out prompts"):
        run(config)


def test_a_heldout_prompt_that_was_trained_on(config: Config) -> None:
    """Another id does not hide the same content."""
    write_text(Path(config.data.folder) / "train.jsonl", prompt_lines([("other", "x", [8, 9])]))
    with pytest.raises(
        TrafficError, match=r"1 held-out prompts are training prompts too, the first being h2"
    ):
        run(config)


def test_an_output_that_cannot_be_written(config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config.eval.output = str(tmp_path / "file" / "measure")
    with pytest.raises(StorageError, match="Cannot write"):
        run(config)


def test_earlier_results_survive_a_failed_run(config: Config) -> None:
    run(config)
    before = (folder(config) / "measure.json").read_bytes()
    write_text(Path(config.data.folder) / "heldout.jsonl", "")
    with pytest.raises(TrafficError):
        run(config)
    assert (folder(config) / "measure.json").read_bytes() == before


def test_a_busy_machine_is_warned_about(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.measure.share_of_others", lambda: 0.9)
    config.eval.max_load = 0.5
    made, screen = run(config)
    assert "The machine is busy" in screen
    assert "90%" in screen
    assert made["load"]["busy"] is True


def test_compiled_forwards_meet_their_shapes_before_anything_is_timed(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decoding.compiled.torch.compile", lambda run, **_: run)
    config.decode.compile, config.decode.batch_size = True, 3
    config.decode.max_new_tokens = 30
    target = tiny_target()
    bench = Bench(config, target, tiny_draft(target))
    chosen = [Dialogue(Prompt(id, category, ids), []) for id, category, ids in HELDOUT]
    chosen.append(Dialogue(Prompt("long", "code", [5, 6, 7] * 170), []))  # passes 512 rows
    bench.warm_up(chosen)
    assert bench.compiled is not None
    met = set(bench.compiled.forwards)
    bench.pairs(Step(0, 0.0, 3, 0, tuple(chosen[:3])), "plain")
    bench.pairs(Step(0, 0.0, 3, 1, tuple(chosen[2:])), "draft")
    assert set(bench.compiled.forwards) == met
    assert {shape[1][0] for shape in met} == {1, 2, 3}
