"""Times by hand on a device of round numbers; loads of real configurations without weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig, MixtralConfig

from configs.errors import ConfigError, TargetError
from configs.schema import TargetConfig
from models.roofline import BEST, USUAL, Device, Load, Reach, device_named, load_of
from models.target import Target
from tests.eval.samples import LLAMA_8B, LLAMA_70B, llama

ROUND = Device(flops=1e12, bandwidth=1e11, memory=1e9, link=1e10)
ALL = Reach(flops=1.0, bandwidth=1.0, launches=0.0, exchange=0.0, host=0.0)


def sketched(config: LlamaConfig, folder: Path) -> Target:
    config.save_pretrained(folder)
    return Target.sketch(TargetConfig(name=str(folder)))


def test_few_tokens_take_the_bytes_time_and_many_the_flops() -> None:
    load = Load(dense=1e9, layers=10, hidden=1000)
    assert load.seconds(ROUND, ALL, 1) == pytest.approx(0.02)  # 2 GB at 100 GB/s
    assert load.seconds(ROUND, ALL, 10) == pytest.approx(0.02)  # 20 GFLOP at 1 TFLOP/s: as long
    assert load.seconds(ROUND, ALL, 20) == load.seconds(ROUND, ALL, 5, batch=4) == pytest.approx(0.04)


def test_context_is_read_and_attended_to() -> None:
    load = Load(dense=1e9, layers=10, hidden=1000, attention=1e4, cache=1e3)
    # 2 GB of weights and 2 kB for each of 2 * 500,000 tokens; 4 GFLOP, and 4e4 for each of the context's.
    assert load.seconds(ROUND, ALL, 1, batch=2, context=499_999) == pytest.approx(0.04 + 0.004)
    assert Load(dense=0, layers=1, hidden=1, attention=1e6).seconds(
        ROUND, ALL, 1, 1, 249_999
    ) == pytest.approx(1)


def test_a_share_is_reached_and_launches_are_added() -> None:
    reach = Reach(flops=0.5, bandwidth=0.5, launches=1e-3, exchange=0.0, host=0.0)
    assert Load(dense=1e9, layers=10, hidden=1000).seconds(ROUND, reach, 1) == pytest.approx(0.05)


def test_devices_share_and_exchange() -> None:
    reach = Reach(flops=1.0, bandwidth=1.0, launches=0.0, exchange=1e-4, host=0.0)
    load = Load(dense=1e9, layers=10, hidden=1_000_000)
    # Each of two all-reduces in a layer moves 2 * 1/2 * 2 MB at 10 GB/s.
    assert load.seconds(ROUND, reach, 1, devices=2) == pytest.approx(0.01 + 20 * (1e-4 + 2e-4))


def test_experts_are_read_as_tokens_take_them() -> None:
    load = Load(dense=0, layers=1, hidden=1, experts=1e9, routes=8, routed=2)
    assert load.seconds(ROUND, ALL, 1) == pytest.approx(0.02 / 4)
    assert load.seconds(ROUND, ALL, 2) == pytest.approx(0.02 * (1 - 0.75**2))
    assert load.seconds(ROUND, ALL, 80) == pytest.approx(0.04)  # 160 GFLOP, a quarter of them


def test_load_of_a_real_shape(tmp_path: Path) -> None:
    load = load_of(sketched(LLAMA_70B, tmp_path))
    # Llama 3's 70,553,706,496 parameters, without the 128,256 x 8,192 of the embedding.
    assert load.dense == 70_553_706_496 - 128_256 * 8192
    assert load.embedding == 128_256 * 8192
    assert (load.layers, load.hidden, load.experts) == (80, 8192, 0)
    assert load.cache == 2 * 80 * 8 * 128
    assert load.attention == 80 * 64 * 128


def test_load_of_a_tied_model_reads_the_head(tmp_path: Path) -> None:
    # A layer of 4 x 32 x 32 and 3 x 32 x 64 with two norms of 32, the last norm, and a head of 100 x 32.
    load = load_of(sketched(llama(32, 1, 4, 64, vocab=100, heads_shared=4, tied=True), tmp_path))
    assert load.dense == 4 * 32 * 32 + 3 * 32 * 64 + 3 * 32 + 100 * 32
    assert load.embedding == 0


def test_load_of_experts(tmp_path: Path) -> None:
    config = MixtralConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=100,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    config.save_pretrained(tmp_path)
    load = load_of(Target.sketch(TargetConfig(name=str(tmp_path))))
    assert load.experts == 2 * 8 * 3 * 32 * 64
    assert (load.routes, load.routed) == (8, 2)


def test_a_published_rate_lies_between_best_and_usual(tmp_path: Path) -> None:
    load = load_of(sketched(LLAMA_8B, tmp_path))
    best, usual = (1 / load.seconds(device_named("h100"), reach, 1, 1, 512) for reach in (BEST, USUAL))
    assert usual < 158 < best


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="h100, h200"):
        device_named("h1000")
    with pytest.raises(TargetError, match=r"config\.json"):
        Target.sketch(TargetConfig(name=str(tmp_path)))
