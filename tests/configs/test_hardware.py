"""The dtype of recipes that leave it open follows the device; the saved configuration says which it was."""

from __future__ import annotations

import pytest
import torch

from configs import hardware
from configs.compose import as_plain, compose
from configs.hardware import native_dtype


@pytest.fixture(params=[True, False])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(hardware, "cpu_has_bfloat16", lambda: request.param)
    return request.param


def test_a_recipe_runs_in_what_the_cpu_computes_well(native: bool) -> None:
    found = as_plain(compose(["+experiment=smollm2_cpu", "target.device=cpu"]))
    dtype = "bfloat16" if native else "float32"
    assert (found["target"]["dtype"], found["trainer"]["autocast"]) == (dtype, dtype)


def test_a_dtype_that_is_set_stands(native: bool) -> None:
    settings = ["target.dtype=float32", "trainer.autocast=bfloat16"]
    found = as_plain(compose(["+experiment=smollm2_cpu", "target.device=cpu", *settings]))
    assert (found["target"]["dtype"], found["trainer"]["autocast"]) == ("float32", "bfloat16")


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "auto"])
def test_a_gpu_is_asked_itself(native: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for has, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=has: has)
        assert native_dtype(device) == dtype


def test_auto_is_the_cpu_where_no_gpu_is(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert native_dtype("auto") == native_dtype("cpu")
