"""A draft comes back bit for bit beside its target, and beside nothing else."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.errors import CheckpointError, ConfigError, StorageError
from models import draft_class, find_draft, load_draft, save_draft
from models.eagle3 import Eagle3, NetworkConfig
from models.target import Target
from tests.conftest import tiny_draft, tiny_target


@pytest.fixture
def folder(tmp_path: Path, target: Target, draft: Eagle3) -> Path:
    save_draft(tmp_path / "draft", draft, target, {"steps": 3})
    return tmp_path / "draft"


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, edit: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors")


def test_a_draft_comes_back_bit_for_bit(folder: Path, target: Target, draft: Eagle3) -> None:
    loaded = load_draft(folder, target)
    ours, theirs = draft.state_dict(), loaded.state_dict()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert loaded.taps == draft.taps
    assert not loaded.training


@pytest.mark.parametrize(
    "network",
    [
        {"layers": 3},
        {"draft_vocab_size": None},
        {"fc_norm": True, "norm_before_fc": True, "norm_output": True},
    ],
    ids=str,
)
def test_every_network_comes_back(tmp_path: Path, target: Target, network: dict[str, Any]) -> None:
    draft = tiny_draft(target, **network)
    save_draft(tmp_path / "d", draft, target, {})
    loaded = load_draft(tmp_path / "d", target)
    assert loaded.shape == draft.shape
    assert torch.equal(loaded.draft_ids, draft.draft_ids)


def test_the_configuration_says_what_the_contract_names(folder: Path, target: Target) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["format"] == "leadout-draft"
    assert (config["schema"], config["method"]) == (1, "eagle3")
    assert config["target"] == {
        "name": "tiny",
        "revision": None,
        "fingerprint": target.fingerprint(),
        "tokenizer_fingerprint": target.tokenizer_fingerprint(),
    }
    assert config["taps"] == [1, 2, 3]
    assert config["draft_vocab_size"] == 48
    assert config["training"] == {"steps": 3}
    assert config["network"]["hidden_size"] == 32


def test_the_dtype_is_the_targets_unless_asked_for(folder: Path) -> None:
    target = tiny_target(dtype=torch.bfloat16)  # same weights, so the same fingerprint
    assert load_draft(folder, target).fc.weight.dtype == torch.bfloat16
    loaded = load_draft(folder, target, dtype=torch.float32)
    assert loaded.fc.weight.dtype == torch.float32
    assert loaded.d2t.dtype == torch.int64


def test_saving_again_replaces_and_leaves_nothing_else(folder: Path, target: Target) -> None:
    save_draft(folder, tiny_draft(target, seed=9), target, {"steps": 4})
    assert json.loads((folder / "config.json").read_text())["training"] == {"steps": 4}
    assert os.listdir(folder.parent) == ["draft"]
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]


def test_a_failed_save_keeps_the_earlier_draft(
    folder: Path, target: Target, draft: Eagle3, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    before = (folder / "model.safetensors").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(StorageError, match="disk is full"):
            save_draft(folder, draft, target, {})
    assert (folder / "model.safetensors").read_bytes() == before
    assert os.listdir(folder.parent) == ["draft"]


def test_an_uninitialised_draft_is_not_saved(tmp_path: Path, target: Target) -> None:
    draft = Eagle3.build(NetworkConfig(draft_vocab_size=4), target)
    with pytest.raises(CheckpointError, match="never initialised"):
        save_draft(tmp_path / "d", draft, target, {})
    assert os.listdir(tmp_path) == []


# Refusals


def test_another_target_is_refused_with_both_named(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"another target: for tiny .*train a draft for this target"):
        load_draft(folder, tiny_target(seed=1))


def test_another_tokenizer_is_refused(folder: Path, target: Target) -> None:
    target.tokenizer.add_tokens(["<new>"])
    with pytest.raises(CheckpointError, match="trained for another tokenizer"):
        load_draft(folder, target)


def test_truncated_weights_are_refused(folder: Path, target: Target) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        load_draft(folder, target)


def test_missing_unknown_and_misshapen_tensors_are_named(folder: Path, target: Target) -> None:
    def edit(weights: dict[str, torch.Tensor]) -> None:
        del weights["norm.weight"]
        weights["extra"] = torch.zeros(1)
        weights["fc.weight"] = torch.zeros(32, 64)

    edit_weights(folder, edit)
    with pytest.raises(CheckpointError) as caught:
        load_draft(folder, target)
    message = str(caught.value)
    assert "norm.weight is missing" in message
    assert "extra is unknown" in message
    assert "fc.weight is [32, 64] and should be [32, 96]" in message


def test_nan_weights_are_refused(folder: Path, target: Target) -> None:
    edit_weights(folder, lambda weights: weights["fc.weight"].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=r"NaN in 1 tensors, the first being fc\.weight"):
        load_draft(folder, target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "no native Leadout draft"),
        ({"schema": 2}, "schema 2.*reads 1"),
        ({"method": "nothing"}, "no draft method 'nothing'"),
        ({"method": "files"}, "no draft method 'files'"),  # a module of models/ that is no method
        ({"network": {"layers": 1}}, "wrong keys: missing.*hidden_size"),
    ],
    ids=str,
)
def test_configurations_of_others_are_refused(
    folder: Path, target: Target, changes: dict[str, Any], message: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_draft(folder, target)


def test_a_broken_or_missing_configuration_is_refused(folder: Path, target: Target) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_draft(folder, target)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"there is no config\.json"):
        load_draft(folder, target)


def test_missing_weights_are_refused(folder: Path, target: Target) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        load_draft(folder, target)


def test_methods_are_found_by_name() -> None:
    assert draft_class("eagle3") is Eagle3
    with pytest.raises(ConfigError, match="no draft method 'eagle9'"):
        draft_class("eagle9")


# Which draft


def put_draft(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_latest_is_the_newest_run_with_a_draft(tmp_path: Path) -> None:
    put_draft(tmp_path / "exp" / "20250101-000000" / "draft")
    newest = put_draft(tmp_path / "exp" / "20250102-000000" / "draft")
    (tmp_path / "exp" / "20250103-000000" / "checkpoints" / "step_000010").mkdir(parents=True)  # unfinished
    put_draft(tmp_path / "other" / "20250109-000000" / "draft")
    assert find_draft("latest", tmp_path, "exp") == newest


def test_a_run_or_a_draft_can_be_named(tmp_path: Path) -> None:
    draft = put_draft(tmp_path / "run" / "draft")
    assert find_draft(str(tmp_path / "run"), tmp_path, "exp") == draft
    assert find_draft(str(draft), tmp_path, "exp") == draft


def test_an_experiments_folder_means_its_newest_run(tmp_path: Path) -> None:
    put_draft(tmp_path / "exp" / "20250101-000000" / "draft")
    newest = put_draft(tmp_path / "exp" / "20250102-000000" / "draft")
    assert find_draft(str(tmp_path / "exp"), tmp_path, "other") == newest


def test_what_is_no_draft_is_refused_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no run in .*exp yet.*python -m train\.distill"):
        find_draft("latest", tmp_path, "exp")
    (tmp_path / "exp" / "20250103-000000" / "checkpoints" / "step_000010").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="20250103-000000, has no draft yet: it stopped with 1"):
        find_draft("latest", tmp_path, "exp")
    with pytest.raises(CheckpointError, match="has no draft yet"):
        find_draft(str(tmp_path / "exp" / "20250103-000000"), tmp_path, "exp")
    with pytest.raises(CheckpointError, match=r"There is no folder .*absent"):
        find_draft(str(tmp_path / "absent"), tmp_path, "exp")
    draft = put_draft(tmp_path / "half")
    (draft / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"it lacks model\.safetensors"):
        find_draft(str(draft), tmp_path, "exp")
