"""A target whose linear layers are quantised while it is loaded."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from configs.compose import compose
from configs.errors import ConfigError, TargetError
from configs.schema import Dtype, Quantize, TargetConfig
from eval.memory import weight_bytes
from models.quantization import held_bytes, is_quantised, linear_weights, quantised_bytes
from models.target import Target
from tests.conftest import tiny_draft, tiny_model, tiny_tokenizer

NEEDS_TORCHAO = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed (extra `quantize`)"
)
IDS = torch.tensor([[5, 9, 30, 7, 41, 12]])


def saved(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("target"), tiny_model())


def loaded(folder: Path, quantize: Quantize | None = Quantize.int8, dtype: Dtype = Dtype.float32) -> Target:
    return Target.load(TargetConfig(name=str(folder), dtype=dtype, device="cpu", quantize=quantize))


@NEEDS_TORCHAO
def test_a_weight_is_off_by_half_a_step_at_most_and_what_drafts_read_not_at_all(folder: Path) -> None:
    whole, target = loaded(folder, quantize=None), loaded(folder)
    pairs = list(zip(linear_weights(target.layers), linear_weights(whole.layers), strict=True))

    assert len(pairs) == 4 * 7 and all(is_quantised(weight) for weight, _ in pairs)
    for weight, before in pairs:
        # 255 steps from the largest to its negative.
        half = before.abs().amax(1, keepdim=True) / 255
        assert ((weight.dequantize() - before).abs() <= half * 1.001).all()
        assert held_bytes(weight) == quantised_bytes(before)
    assert torch.equal(target.head.weight, whole.head.weight)
    assert torch.equal(target.embedding, whole.embedding)


@NEEDS_TORCHAO
@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_logits_are_near_the_unquantised_ones_and_the_head_s_of_the_last_hidden_state(
    folder: Path, dtype: Dtype
) -> None:
    whole, target = loaded(folder, quantize=None, dtype=dtype), loaded(folder, dtype=dtype)
    expected, found = whole.forward(IDS).logits, target.forward(IDS)
    assert expected is not None and found.logits is not None

    off = (found.logits - expected).float()
    assert 0 < off.std() < 0.05 * expected.float().std()
    assert torch.equal(found.logits, target.lm_head(found.last_hidden))


@NEEDS_TORCHAO
def test_a_token_s_logits_do_not_depend_on_the_others_in_its_forward(folder: Path) -> None:
    target = loaded(folder)
    alone, among = target.forward(IDS[:, :3]).logits, target.forward(IDS).logits
    assert alone is not None and among is not None
    torch.testing.assert_close(among[:, :3], alone, rtol=1e-4, atol=1e-4)


@NEEDS_TORCHAO
def test_it_is_another_target_than_the_one_it_was_made_from(folder: Path) -> None:
    whole, target = loaded(folder, quantize=None), loaded(folder)
    assert target.fingerprint() == loaded(folder).fingerprint() != whole.fingerprint()
    # 9,216 numbers in 256 rows a layer: 4 bytes each before, one after and 5 for a row.
    assert weight_bytes(whole.model) - weight_bytes(target.model) == 4 * (3 * 9216 - 5 * 256)


@NEEDS_TORCHAO
def test_a_draft_can_start_from_its_layers(folder: Path) -> None:
    whole, target = loaded(folder, quantize=None), loaded(folder)
    draft: Any = tiny_draft(target)
    draft.initialise(0, target, start_layer=-1)
    theirs: Any = whole.layers[-1]
    torch.testing.assert_close(
        draft.layers[0].mlp.up_proj.weight, theirs.mlp.up_proj.weight, rtol=0, atol=0.02
    )


@NEEDS_TORCHAO
def test_layers_that_are_no_linear_ones_are_refused(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=2))
    with pytest.raises(TargetError, match=r"reached 0% of what the layers of target .* hold"):
        loaded(saved(tmp_path, model))


def test_a_missing_package_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(TargetError, match=r"quantize=int8 needs the package torchao.*leadout\[quantize\]"):
        loaded(folder)


def test_what_cannot_be_quantised_is_refused() -> None:
    asked = ["+experiment=smollm2_cpu", "target.quantize=int8"]
    for more, said in [
        (["target.gguf_file=a.gguf"], "target.gguf_file names a GGUF file"),
        (["trainer.strategy=ddp", "trainer.target_parallel=2"], "trainer.target_parallel=2 cannot divide"),
        (["method.name=medusa2"], "method=medusa2 trains it"),
    ]:
        with pytest.raises(ConfigError, match=said):
            compose([*asked, *more])
    assert compose(asked).target.quantize is Quantize.int8


def test_bytes_are_a_number_each_and_five_for_a_row() -> None:
    assert quantised_bytes(nn.Linear(10, 3).weight) == 30 + 3 * 5
