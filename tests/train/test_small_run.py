"""A whole run of the small method: trained, killed, resumed, measured, and loaded by transformers alone."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from rich.console import Console
from transformers import AutoModelForCausalLM

from configs.compose import compose
from eval.measure import measure
from models import load_draft
from models.target import Target
from tests.train.conftest import COSTS, write_workspace
from train.distill import distil
from train.loop import Training

SMALL = [
    "method.network.layers=1",
    "method.network.draft_vocab_size=60",
    "method.objective.on_policy=0.5",
]


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    shared = [one for one in write_workspace(tmp_path) if not one.startswith(("+experiment", "method"))]
    return ["+experiment=smollm2_small", *shared, *SMALL]


def distilled(overrides: list[str], *more: str) -> Path:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return distil(compose([*overrides, *more]), Console(file=io.StringIO()))


def lines(run: Path) -> list[dict[str, Any]]:
    logged = [json.loads(line) for line in (run / "train.jsonl").read_text().splitlines()]
    for line in logged:
        for name in COSTS:
            line.pop(name, None)
            line.get("heldout", {}).pop(name, None)
    return logged


def test_a_run_that_writes_its_own_text_resumes_bit_equal(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = distilled(overrides, f"runs={tmp_path / 'calm'}")
    step = Training.step

    def killed(self: Training) -> None:
        if self.state.step == 10:  # checkpoints are of steps 4, 6 and 8
            raise KeyboardInterrupt
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            distilled(overrides, f"runs={tmp_path / 'troubled'}")
    resumed = distilled(overrides, f"runs={tmp_path / 'troubled'}")

    assert lines(resumed) == lines(calm)
    assert not any(line["heldout"]["alarm"] for line in lines(calm) if "heldout" in line)
    for file in ("model.safetensors", "leadout/head.safetensors"):
        assert (resumed / "draft" / file).read_bytes() == (calm / "draft" / file).read_bytes()


def test_a_draft_over_all_ids_is_measured_here_and_decodes_in_transformers(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.measure.share_of_others", lambda: 0.0)
    config = compose(
        [
            *overrides,
            "method.network.draft_vocab_size=null",
            "trainer.max_steps=6",
            "eval.max_prompts=3",
            "eval.warmup_prompts=1",
            "eval.bootstrap=50",
            "eval.temperatures=[0.0, 1.0]",
            "decode.max_new_tokens=12",
        ]
    )
    run = distil(config, Console(file=io.StringIO()))
    made = measure(config, Console(file=io.StringIO(), width=140))

    assert made["draft"]["method"] == "small"
    assert made["draft"]["training"]["layers_of_the_target"] == [0]
    whole = [
        r for r in made["rows"] if r["category"] == r["context_bucket"] == "all" and r["method"] == "small"
    ]
    assert [row["temperature"] for row in whole] == [0.0, 1.0]
    assert whole[0]["identical_count"] == 3  # float32 and greedy: the same tokens as plain decoding

    target = Target.load(config.target)
    draft = load_draft(run / "draft", target)
    model = AutoModelForCausalLM.from_pretrained(run / "draft")
    ids = torch.tensor([[5, 12, 19, 26]])
    torch.testing.assert_close(model(input_ids=ids).logits, draft.logits(draft(ids)), rtol=1e-4, atol=1e-4)
    # transformers' own speculative decoding with our folder as its assistant.
    target.model.generation_config.update(do_sample=False, max_new_tokens=8)
    plain = target.model.generate(ids)
    assert torch.equal(target.model.generate(ids, assistant_model=model.eval()), plain)
