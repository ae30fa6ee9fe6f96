"""The OpenVINO adapter without OpenVINO: its worker runs on a fake library, its converter is a script."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from pathlib import Path

import pytest

from models.export.openvino import commands
from scripts.engines import Counts, EngineError, Reply, Setting, openvino_pipeline
from scripts.engines.openvino_pipeline import OpenVinoEngine, converted, counts
from scripts.engines.process import conversing

# Replies with the prompt, reversed, and then the token that ends it. With a draft, three forwards.
GENAI = """
    from types import SimpleNamespace as Space

    class GenerationConfig: pass
    class SchedulerConfig: pass

    def draft_model(folder, device, **properties):
        return folder, device, properties

    class LLMPipeline:
        def __init__(self, target, device, scheduler_config, draft_model=None, **properties):
            print("library chatter", target, device, draft_model, properties)
            self.draft = draft_model

        def generate(self, prompt, config):
            if 13 in prompt[0]:
                raise RuntimeError("no thirteens")
            print("asked", config.max_new_tokens, getattr(config, "num_assistant_tokens", None))
            raw = Space(m_durations=[0.1] * 3)
            counted = Space(main_model_metrics=Space(raw_metrics=raw))
            tokens = [*reversed(prompt[0].tolist()), config.eos_token_id]
            return Space(tokens=[tokens], extended_perf_metrics=counted if self.draft else None)
"""

# Writes its arguments into the folder that it makes.
CONVERTER = """
    import json, pathlib, sys
    if "bad" in sys.argv[4]:
        sys.exit("ValueError: unknown architecture")
    (pathlib.Path(sys.argv[-1]) / "words.json").write_text(json.dumps(sys.argv[1:-1]))
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for .engines/openvino: our own Python with a fake library, and a fake optimum-cli."""
    programs = tmp_path / "env" / "bin"
    programs.mkdir(parents=True)
    (tmp_path / "openvino_genai.py").write_text(textwrap.dedent(GENAI))
    (tmp_path / "openvino.py").write_text("def Tensor(array):\n    return array\n")
    (tmp_path / "converter.py").write_text(textwrap.dedent(CONVERTER))
    for name, words in (("python", []), ("optimum-cli", [str(tmp_path / "converter.py")])):
        run = shlex.join([sys.executable, *words])
        (programs / name).write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {run} "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setattr(openvino_pipeline, "python_of", lambda name: programs / "python")
    return programs


def setting(tmp_path: Path, target: str = "target", **changes: str) -> Setting:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_text(name)
    draft = tmp_path / "draft"
    asked = commands(str(tmp_path / target), str(draft), 4, "--trust-remote-code")
    dtype = changes.get("dtype", "float32")
    return Setting(str(tmp_path / target), draft, asked, 4, dtype, 1, 128, (2,), tmp_path / "work")


def test_a_reply_with_the_draft_and_without(tmp_path: Path, environment: Path) -> None:
    """4 tokens in 3 forwards: the prompt's, and 2 rounds that accept one between them."""
    served = setting(tmp_path)
    with OpenVinoEngine().open(served, speculate=True) as server:
        reply = server.complete([5, 6, 7], 8)
        assert (reply.tokens, reply.counts) == ([7, 6, 5, 2], Counts(rounds=2, drafted=8, accepted=1))
        assert server.complete([1], 8).tokens == [1, 2]
    said = (served.work / "draft.log").read_text()
    assert "'KV_CACHE_PRECISION': 'f32'" in said
    assert "asked 8 4" in said
    with OpenVinoEngine().open(served, speculate=False) as server:
        plain = server.complete([5, 6, 7], 8)
    assert plain == Reply([7, 6, 5, 2], plain.seconds)
    assert "asked 8 None" in (served.work / "plain.log").read_text()


def test_both_models_are_converted_once_in_float32(tmp_path: Path, environment: Path) -> None:
    served = setting(tmp_path)
    target, draft, _ = served.command.splitlines()
    made = converted("draft", draft, served)
    words = json.loads((made / "words.json").read_text())
    assert words[:4] == ["export", "openvino", "-m", str(tmp_path / "draft")]
    assert words[words.index("--weight-format") + 1] == "fp32"
    assert words[-1] == "--trust-remote-code"
    (made / "words.json").write_text("kept")
    assert (converted("draft", draft, served) / "words.json").read_text() == "kept"
    assert converted("target", target, served) != made
    (tmp_path / "draft" / "model.safetensors").write_text("other weights")
    assert converted("draft", draft, served) != made


def test_what_stops_the_library_is_quoted(tmp_path: Path, environment: Path) -> None:
    with (
        OpenVinoEngine().open(setting(tmp_path), speculate=True) as server,
        pytest.raises(EngineError, match=r"stopped with status 1.*RuntimeError: no thirteens"),
    ):
        server.complete([13], 8)


def test_a_model_that_cannot_be_converted(tmp_path: Path, environment: Path) -> None:
    served = setting(tmp_path, target="bad")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{}")
    with (
        pytest.raises(EngineError, match=r"optimum-intel cannot convert .*bad.*ValueError: unknown arch"),
        OpenVinoEngine().open(served, speculate=False),
    ):
        pass
    assert not [path for path in served.work.iterdir() if path.is_dir()]


def test_other_dtypes_are_refused(tmp_path: Path, environment: Path) -> None:
    with (
        pytest.raises(EngineError, match=r"set target\.dtype=float32"),
        OpenVinoEngine().open(setting(tmp_path, dtype="bfloat16"), speculate=True),
    ):
        pass


def test_a_reply_of_the_prefill_alone_has_no_round() -> None:
    assert counts({"tokens": [2], "iterations": 1}, 4) == Counts(rounds=0, drafted=0, accepted=0)
    assert counts({"tokens": [2]}, 4) is None


def test_a_program_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        conversing(words, {}, tmp_path / "log", wait=0.2) as ask,
        pytest.raises(EngineError, match=r"did not answer within 0 s\. It said: nothing"),
    ):
        ask({"prompt": [1]})


def test_a_program_that_has_stopped_says_why(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "raise ImportError('no libopenvino')"]
    with (
        conversing(words, {}, tmp_path / "log") as ask,
        pytest.raises(EngineError, match=r"stopped with status 1.*ImportError: no libopenvino"),
    ):
        ask({"prompt": [1] * 100_000})
