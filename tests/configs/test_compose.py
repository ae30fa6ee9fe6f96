"""Composition: every experiment works, and what is wrong is refused with the mend before any model loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from configs.compose import FOLDER, compose
from configs.errors import ConfigError
from configs.schema import Dtype, Features, typed
from train.distill import find_method

EXPERIMENTS = sorted(file.stem for file in (FOLDER / "experiment").glob("*.yaml"))
SMOLLM2 = "+experiment=smollm2_cpu"


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    return str(caught.value)


def test_there_are_experiments() -> None:
    assert {"smollm2_cpu", "llama70b"} <= set(EXPERIMENTS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_its_method_has_known_fields(name: str) -> None:
    config = compose([f"+experiment={name}"])
    assert config.experiment == name  # its runs lie where its name says
    find_method(config.method)


@pytest.mark.parametrize(
    "option",
    [
        f"{group.name}={file.stem}"
        for group in sorted(path for path in FOLDER.iterdir() if path.is_dir() and path.name != "experiment")
        for file in sorted(group.glob("*.yaml"))
    ],
)
def test_every_option_of_every_group_composes(option: str) -> None:
    compose([SMOLLM2, option])


def test_overrides_reach_the_config_with_their_types() -> None:
    config = compose(
        [
            SMOLLM2,
            "trainer=gpu",
            "trainer.lr=3e-4",
            "target.dtype=float32",
            "data.sources=[{path: mine.jsonl}]",
        ]
    )
    assert config.trainer.features is Features.online  # what trainer=gpu says
    assert config.trainer.lr == 0.0003
    assert config.target.dtype is Dtype.float32
    assert [(source.path, source.split) for source in config.data.sources] == [("mine.jsonl", "train")]


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("trainer.lrr", "'trainer.lr'"),
        ("trainr.lr", "'trainer'"),
        ("lr", "'trainer.lr'"),
        ("method.network.layer", "'method.network.layers'"),
        ("+trainer.warmup", "'trainer.warmup_ratio'"),  # Hydra itself would add it
        ("+decode.temprature", "'decode.temperature'"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(key: str, suggestion: str) -> None:
    message = refusal(SMOLLM2, f"{key}=1")
    assert message.startswith("Unknown configuration key")
    assert f"Did you mean {suggestion}" in message


def test_a_key_like_no_other_gets_no_suggestion() -> None:
    assert "Did you mean" not in refusal(SMOLLM2, "zzz=1")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.lr=fast", "'trainer.lr': Value 'fast'"),
        (
            "target.dtype=fp32",
            "'target.dtype': Invalid value 'fp32', expected one of [float32, bfloat16, float16]",
        ),
        ("data.sources=mine.jsonl", "'data.sources'"),
        ("eval.max_prompts=null", "'eval.max_prompts'"),
    ],
)
def test_a_wrong_type_is_refused_with_its_key(override: str, words: str) -> None:
    assert words in refusal(SMOLLM2, override)


def test_what_is_missing_is_named_with_the_way_to_set_it() -> None:
    message = refusal()
    assert "data.folder, experiment, target.name" in message
    assert "+experiment=" in message


def test_a_bare_word_is_explained() -> None:
    message = refusal("smollm2_cpu")
    assert "'smollm2_cpu' on the command line is no override: write key=value" in message


def test_an_experiment_without_its_plus_is_explained() -> None:
    assert "+experiment=NAME" in refusal("experiment=smollm2_cpu")


def test_an_unknown_option_lists_the_known_ones() -> None:
    message = refusal("+experiment=llama7b")
    assert "Did you mean 'llama70b'" in message
    assert all(name in message for name in EXPERIMENTS)


def test_a_key_misspelt_in_a_file_is_refused_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrainer:\n  epoch: 3\n")
    message = refusal(f"hydra.searchpath=[{tmp_path}]", "+experiment=mine")
    assert "'trainer.epoch' (In 'experiment/mine')" in message
    assert "Did you mean 'trainer.epochs'?" in message


@dataclass
class Parts:
    layers: int = 1
    taps: list[int] | None = None
    decay: float = 0.8


def test_typed_returns_the_dataclass() -> None:
    assert typed(Parts, {"layers": 2, "taps": [1, 3]}, "method.network") == Parts(2, [1, 3])
    assert typed(Parts, {"taps": None}, "method.network") == Parts(1, None)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"layer": 2},
            "method.network: unknown key 'layer'. Did you mean 'layers'? Known keys: decay, layers, taps.",
        ),
        ({"layers": "two"}, "method.network.layers: Value 'two'"),
        ({"taps": ["low"]}, "method.network.taps[0]: Value 'low'"),
        ({"decay": "nan"}, "method.network.decay=nan is no number."),
    ],
)
def test_typed_refuses_unknown_keys_and_wrong_types(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        typed(Parts, values, "method.network")
    assert words in str(caught.value)
