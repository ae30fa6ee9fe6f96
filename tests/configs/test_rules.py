"""Every rule refuses what it is there for, names what was set, and says what to set instead."""

from __future__ import annotations

import pytest
from omegaconf import DictConfig, OmegaConf

from configs.compose import compose, resolve
from configs.errors import ConfigError
from configs.schema import Config


@pytest.fixture(scope="module")
def smollm2() -> Config:
    """The embedded experiment; composed once, because Hydra takes its time."""
    return compose(["+experiment=smollm2_cpu"])


def changed(config: Config, overrides: list[str]) -> Config:
    """`config` with these values overridden, checked again."""
    merged = OmegaConf.merge(OmegaConf.structured(config), OmegaConf.from_dotlist(overrides))
    assert isinstance(merged, DictConfig)
    return resolve(merged)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["seed=-1"], "seed=-1"),
        (["eval.lossless_temperature=0"], "nothing is drawn at 0"),
        (["eval.lossless_alpha=0"], "must be in (0, 1)"),
        (["threads=0"], "threads=0: must be at least 1"),
        (["method.name=../x"], "method.name='../x'"),
        (["target.device=cpu", "target.dtype=float16"], "use bfloat16"),
        (["export.engines=[]"], "export.engines=[vllm]"),
        (["data.folder=''"], "data.folder is empty"),
        (["data.sources=[]"], "data.sources=[{path: traffic.jsonl}]"),
        (["data.heldout_fraction=1"], "must be in [0, 1)"),
        (["data.heldout_fraction=0"], "name held-out files"),
        (["data.heldout_sources=[{path: artifacts/traffic/own.jsonl}]"], "name it in one of them"),
        (["data.max_prompt_tokens=0"], "data.max_prompt_tokens=0"),
        (["data.max_prompt_tokens=768", "data.max_length=768"], "no room for a reply"),
        (["data.max_train_rows=0"], "data.max_train_rows=0"),
        (["data.max_bad_fraction=1.5"], "must be in [0, 1]"),
        # 500 prompt tokens and 300 of the reply do not fit into 700.
        (
            ["data.max_prompt_tokens=500", "data.max_length=700", "regenerate.max_new_tokens=300"],
            "set data.max_length=800",
        ),
        (["regenerate.temperature=-0.1"], "regenerate.temperature=-0.1"),
        (["regenerate.top_p=0"], "regenerate.top_p=0"),
        (["regenerate.batch_size=0"], "regenerate.batch_size=0"),
        (["regenerate.server=http://localhost:8000/v1"], "without regenerate.server_model"),
        (["regenerate.server_model=mine"], "without regenerate.server"),
        (["regenerate.server=localhost:8000", "regenerate.server_model=mine"], "is not a URL"),
        (["regenerate.server=http://", "regenerate.server_model=mine"], "is not a URL"),
        (["regenerate.server=http://localhost:99999", "regenerate.server_model=mine"], "is not a URL"),
        (["data.replies=logged", "regenerate.server=http://x/v1"], "never be asked"),
        (["trainer.epochs=0"], "trainer.epochs=0"),
        (["trainer.max_steps=0"], "trainer.max_steps=0"),
        (["trainer.lr=0"], "trainer.lr=0.0: must be in (0, inf)"),
        (["trainer.lr=nan"], "trainer.lr=nan"),
        (["trainer.betas=[0.9]"], "trainer.betas=[0.9]"),
        (["trainer.betas=[0.9,1.0]"], "two numbers in [0, 1)"),
        (["trainer.warmup_ratio=1"], "trainer.warmup_ratio=1.0"),
        (["trainer.schedule=wsd", "trainer.warmup_ratio=0.5", "trainer.decay_ratio=0.6"], "more than 1"),
        (["trainer.schedule=wsd", "trainer.decay_ratio=0"], "trainer.decay_ratio=0.0"),
        (["trainer.autocast=float16"], "loss scaling"),
        (["trainer.eval_every=-1"], "trainer.eval_every=-1"),
        (["decode.draft_tokens=-1"], "decode.draft_tokens=-1"),
        (["decode.batch_size=0"], "decode.batch_size=0: must be at least 1"),
        (["decode.tree_nodes=0"], "decode.tree_nodes=0"),
        (["decode.tree_width=0"], "decode.tree_width=0"),
        (["decode.min_p=1.1"], "decode.min_p=1.1: must be in [0, 1]"),
        (["decode.stop_threshold=-0.1"], "decode.stop_threshold=-0.1"),
        (["decode.repetition_penalty=0"], "decode.repetition_penalty=0.0: must be in (0, inf)"),
        (["decode.top_k=-1"], "decode.top_k=-1"),
        (["decode.top_p=1.1"], "decode.top_p=1.1"),
        (["decode.temperature=inf"], "decode.temperature=inf"),
        (["decode.stop=['']"], "empty string"),
        (["eval.temperatures=[]"], "eval.temperatures=[0.0]"),
        (["eval.temperatures=[-1]"], "eval.temperature=-1"),
        (["eval.confidence=1"], "must be in (0, 1)"),
        (["eval.compare_generate=true", "eval.temperatures=[0.7]"], "measured at 0.0"),
        (["eval.compare_generate=true", "decode.temperature=0.7"], "measured at 0.0"),
        (["decode.verification=block", "decode.tree=dynamic"], "decode.tree=chain"),
        (
            ["decode.stop_drafting=joint", "decode.tree=dynamic"],
            "decode.stop_drafting=joint says where a chain",
        ),
        (["decode.tree=static"], "decode.tree=static needs a shape"),
        (["decode.drafters=[]"], "decode.drafters is empty"),
        (["decode.temperature=1e-6"], "decode.temperature=1e-06: set 0 (greedy), or at least 0.00001"),
    ],
)
def test_what_cannot_work_is_refused(smollm2: Config, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        changed(smollm2, overrides)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["decode.draft_tokens=0"],  # plain decoding
        ["trainer.eval_every=0"],  # only at the end
        ["data.heldout_fraction=0", "data.heldout_sources=[{path: other.jsonl}]"],
        ["data.heldout_sources=[{path: artifacts/traffic/own.jsonl, split: test}]"],
        ["trainer.warmup_ratio=0.5", "trainer.decay_ratio=0.6"],  # decay_ratio belongs to wsd only
        ["data.replies=logged", "regenerate.max_new_tokens=4096"],  # nothing is regenerated
        ["target.device=cuda", "target.dtype=float16"],
        ["threads=null", "data.max_train_rows=null"],
        [
            "decode.tree=chain",
            "decode.compile=true",
            "decode.pad_trees=true",
            "decode.stop_drafting=marginal",
        ],
    ],
)
def test_what_can_work_is_not(smollm2: Config, overrides: list[str]) -> None:
    changed(smollm2, overrides)


def test_all_problems_are_named_at_once(smollm2: Config) -> None:
    with pytest.raises(ConfigError) as caught:
        changed(smollm2, ["seed=-1", "decode.top_p=0", "trainer.lr=-1"])
    assert all(word in str(caught.value) for word in ("seed=-1", "decode.top_p=0.0", "trainer.lr=-1.0"))
