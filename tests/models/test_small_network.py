"""A small language model as a draft network: what it starts as, what of it is trained, and its checkpoint, a
plain model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.errors import CheckpointError, ConfigError
from configs.schema import TargetConfig
from models import load_draft, save_draft
from models.small import NetworkConfig, Small
from models.target import Target
from tests.conftest import tiny_model, tiny_target, tiny_tokenizer
from tests.decoding.test_architectures import KINDS, made

IDS = torch.tensor([[5, 9, 60, 2, 33, 7]])
REDUCED = [2, 5, 7, 9, 33]


def small(target: Target, seed: int = 0, vocabulary: list[int] | None = None, **network: Any) -> Small:
    size = None if vocabulary is None else len(vocabulary)
    draft = Small.build(NetworkConfig(draft_vocab_size=size, **network), target)
    if vocabulary is not None:
        draft.set_vocabulary(torch.tensor(vocabulary))
    draft.initialise(seed, target)
    return draft


@torch.no_grad()
def logits_of(draft: Small) -> Tensor:
    return draft.logits(draft(IDS))


def target_logits(target: Target) -> Tensor:
    logits = target.forward(IDS).logits
    assert logits is not None
    return logits


# What it starts as


@pytest.mark.parametrize("tie", [False, True])
def test_a_cut_of_all_layers_is_the_target(tie: bool) -> None:
    target = tiny_target(tie_word_embeddings=tie)
    draft = small(target, layers=4)
    assert draft.shape.cut == [0, 1, 2, 3]
    torch.testing.assert_close(logits_of(draft), target_logits(target))


def test_a_cut_has_the_layers_it_names(target: Target) -> None:
    model = copy.deepcopy(target.model)
    kept = [model.model.layers[i] for i in (1, 3)]
    for index, layer in enumerate(kept):
        layer.self_attn.layer_idx = index
    model.model.layers = torch.nn.ModuleList(kept)

    draft = small(target, cut=[1, 3])

    torch.testing.assert_close(logits_of(draft), model(input_ids=IDS, use_cache=False).logits)


@pytest.mark.parametrize(("layers", "cut"), [(1, [0]), (2, [0, 3]), (3, [0, 2, 3]), (4, [0, 1, 2, 3])])
def test_layers_are_cut_evenly_with_both_ends(target: Target, layers: int, cut: list[int]) -> None:
    assert small(target, layers=layers).shape.cut == cut  # 1.5 rounds to the even 2


def test_what_is_told_layer_by_layer_is_cut_too() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    target = tiny_target()
    target.config.layer_types = kinds
    draft = small(target, cut=[1, 2])
    assert draft.shape.architecture["layer_types"] == ["sliding_attention", "full_attention"]


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"gpt2"}))
def test_every_family_can_be_cut_and_saved(tmp_path: Path, kind: str) -> None:
    target = made(kind)
    whole, cut = small(target, layers=2), small(target, layers=1)
    torch.testing.assert_close(logits_of(whole), target_logits(target))
    save_draft(tmp_path / "draft", cut, target, {})
    assert torch.equal(logits_of(load_draft(tmp_path / "draft", target)), logits_of(cut))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    torch.testing.assert_close(plain(input_ids=IDS).logits.detach(), logits_of(cut))


def test_a_family_with_other_names_for_its_sizes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"models of type gpt2 do not say hidden_size.*Use another method"):
        small(made("gpt2"))


def test_scratch_has_its_own_sizes_and_its_seed_decides(target: Target) -> None:
    state = torch.random.get_rng_state()
    draft = small(target, start="scratch", layers=3, hidden_size=16, intermediate_size=20)

    # The target has 4 heads of size 8, two to a key: a width of 16 has 2 heads and 1 key.
    attention = draft.decoder.layers[0].self_attn
    assert len(draft.decoder.layers) == 3
    assert (attention.q_proj.weight.shape, attention.k_proj.weight.shape) == ((16, 16), (8, 16))
    assert draft.decoder.layers[2].mlp.up_proj.weight.shape == (20, 16)
    assert draft.shape.embedding == "own"
    weights = list(draft.parameters())
    assert len({id(weight) for weight in weights}) == len({w.data_ptr() for w in weights}) == len(weights)
    assert torch.equal(torch.random.get_rng_state(), state)
    sizes = {"start": "scratch", "layers": 3, "hidden_size": 16, "intermediate_size": 20}
    assert torch.equal(logits_of(small(target, 0, **sizes)), logits_of(draft))
    assert not torch.equal(logits_of(small(target, 1, **sizes)), logits_of(draft))


def test_scratch_of_the_targets_width_reads_the_targets_embedding(target: Target) -> None:
    draft = small(target, start="scratch", layers=1)
    assert draft.shape.embedding == "target"
    assert torch.equal(draft.head_rows(), target.head.weight)


@pytest.mark.parametrize("rows", [64, 72])  # heads of one family are padded to different sizes
def test_another_model_of_the_family_can_be_the_start(tmp_path: Path, target: Target, rows: int) -> None:
    other = tiny_model(vocab=rows, hidden=16, layers=2, seed=5, tie_word_embeddings=True)
    other.save_pretrained(tmp_path)
    tiny_tokenizer(64).save_pretrained(tmp_path)

    draft = small(target, start=str(tmp_path))

    torch.testing.assert_close(logits_of(draft), other(input_ids=IDS).logits[..., :64])


def test_a_start_with_another_vocabulary_is_refused(tmp_path: Path, target: Target) -> None:
    other = tiny_tokenizer(64)
    other.add_tokens(["<|end|>"])
    tiny_model(vocab=65).save_pretrained(tmp_path)
    other.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="another vocabulary than the target tiny"):
        small(target, start=str(tmp_path))


def test_for_a_sketch_of_the_target_a_configuration_is_enough(tmp_path: Path) -> None:
    for name, hidden in (("target", 32), ("start", 16)):
        tiny_model(hidden=hidden).config.save_pretrained(tmp_path / name)
    sketch = Target.sketch(TargetConfig(name=str(tmp_path / "target")))
    with torch.device("meta"):
        draft = Small.build(NetworkConfig(start=str(tmp_path / "start")), sketch)
    assert draft.shape.hidden_size == 16


# What is trained


def test_the_targets_embedding_is_frozen_and_not_saved(target: Target) -> None:
    draft = small(target, layers=1)
    draft.logits(draft(IDS)).sum().backward()
    assert not [name for name in draft.state_dict() if "embed" in name]
    assert all(weight.grad is not None for weight in draft.parameters())
    assert target.embedding.grad is None


def test_what_is_trained_is_nothing_of_the_targets() -> None:
    target = tiny_target(dtype=torch.bfloat16)
    before = target_logits(target)
    draft = small(target, layers=2, embedding="own")
    assert all(weight.dtype == torch.float32 for weight in draft.parameters())
    with torch.no_grad():
        for weight in draft.parameters():
            weight.zero_()
    assert torch.equal(target_logits(target), before)


@pytest.mark.parametrize("vocabulary", [None, REDUCED])
def test_a_tied_head_is_the_embedding(target: Target, vocabulary: list[int] | None) -> None:
    draft = small(target, vocabulary=vocabulary, layers=2, embedding="own", head="tied")
    rows = draft.decoder.embed_tokens.weight[draft.draft_ids]
    torch.testing.assert_close(logits_of(draft), (draft(IDS) @ rows.T).detach())
    assert not [name for name in draft.state_dict() if "head" in name]


def test_a_factored_head_starts_as_the_best_of_its_rank(target: Target) -> None:
    draft = small(target, layers=1, head="factored", head_rank=3)
    u, s, v = torch.linalg.svd(target.head.weight.detach(), full_matrices=False)
    best = u[:, :3] @ torch.diag(s[:3]) @ v[:3]
    torch.testing.assert_close(draft.head_rows().detach(), best, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits_of(draft), (draft(IDS) @ best.T).detach(), rtol=1e-4, atol=1e-4)


def test_a_cast_leaves_rotary_frequencies_alone(target: Target) -> None:
    draft = small(target, layers=1)
    frequencies = draft.decoder.rotary_emb.inv_freq.clone()
    draft.to(torch.bfloat16)
    assert torch.equal(draft.decoder.rotary_emb.inv_freq, frequencies)
    assert draft.decoder.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


def test_padding_behind_a_row_is_not_seen(target: Target) -> None:
    draft = small(target, layers=2)
    padded = torch.cat([IDS, torch.full((1, 3), 40)], dim=1)
    torch.testing.assert_close(draft(padded)[:, :6], draft(IDS))


def test_it_is_nothing_before_it_is_initialised(tmp_path: Path, target: Target) -> None:
    draft = Small.build(NetworkConfig(), target)
    with pytest.raises(RuntimeError, match="no weights yet"):
        draft(IDS)
    with pytest.raises(CheckpointError, match="never initialised"):
        save_draft(tmp_path / "draft", draft, target, {})


# The checkpoint

NETWORKS: list[dict[str, Any]] = [
    {"layers": 2},
    {"layers": 2, "vocabulary": REDUCED},
    {"layers": 1, "head": "factored", "head_rank": 4},
    {"layers": 1, "embedding": "own", "head": "tied"},
    {"layers": 1, "embedding": "own", "head": "tied", "vocabulary": REDUCED},
    {"start": "scratch", "layers": 3, "hidden_size": 16, "vocabulary": REDUCED},
]


@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_it_comes_back_bit_for_bit(tmp_path: Path, target: Target, network: dict[str, Any]) -> None:
    draft = small(target, **network)
    save_draft(tmp_path / "draft", draft, target, {"steps": 3})
    loaded = load_draft(tmp_path / "draft", target)
    ours, theirs = draft.state_dict(), loaded.state_dict()
    assert loaded.shape == draft.shape
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(logits_of(loaded), logits_of(draft))


@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_transformers_loads_it_on_its_own(tmp_path: Path, target: Target, network: dict[str, Any]) -> None:
    draft = small(target, **network)
    save_draft(tmp_path / "draft", draft, target, {})

    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", output_loading_info=True)
    model, report = loaded

    assert not any(report.values())
    logits = model(input_ids=IDS).logits.detach()
    assert logits.shape == (1, 6, 64)
    torch.testing.assert_close(logits[..., draft.draft_ids], logits_of(draft), rtol=1e-4, atol=1e-4)
    assert model.generation_config.eos_token_id == [2]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "draft")
    assert tokenizer.get_vocab() == target.tokenizer.get_vocab()
    assert tokenizer.chat_template == target.tokenizer.chat_template


def test_outside_the_draft_vocabulary_the_plain_model_has_the_targets_head(
    tmp_path: Path, target: Target
) -> None:
    draft = small(target, vocabulary=REDUCED, layers=1)
    assert isinstance(draft.head, torch.nn.Linear)
    torch.nn.init.zeros_(draft.head.weight)
    model = draft.plain_model(target)
    expected = target.head.weight.clone()
    expected[REDUCED] = 0
    assert torch.equal(model.lm_head.weight, expected)


def test_the_configuration_is_transformers_with_ours_in_it(tmp_path: Path, target: Target) -> None:
    save_draft(tmp_path / "draft", small(target, layers=2), target, {"steps": 3})
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert (config["architectures"], config["num_hidden_layers"]) == (["LlamaForCausalLM"], 2)
    ours = config["leadout"]
    assert (ours["format"], ours["method"], ours["taps"]) == ("leadout-draft", "small", [])
    assert ours["target"]["fingerprint"] == target.fingerprint()
    assert ours["training"] == {"steps": 3}


def test_another_target_is_refused(tmp_path: Path, target: Target) -> None:
    save_draft(tmp_path / "draft", small(target, layers=1), target, {})
    with pytest.raises(CheckpointError, match="another target"):
        load_draft(tmp_path / "draft", tiny_target(seed=1))


def test_a_truncated_file_is_refused(tmp_path: Path, target: Target) -> None:
    save_draft(tmp_path / "draft", small(target, layers=1), target, {})
    weights = tmp_path / "draft" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing, truncated or damaged"):
        load_draft(tmp_path / "draft", target)


def test_the_head_of_another_draft_is_refused(tmp_path: Path, target: Target) -> None:
    for seed in (0, 1):
        draft = small(target, seed, vocabulary=REDUCED, start="scratch", layers=1, hidden_size=16)
        save_draft(tmp_path / str(seed), draft, target, {})
    head = Path("leadout") / "head.safetensors"
    (tmp_path / "0" / head).write_bytes((tmp_path / "1" / head).read_bytes())
    with pytest.raises(CheckpointError, match="belong to different drafts"):
        load_draft(tmp_path / "0", target)


# Settings


@pytest.mark.parametrize(
    ("network", "said"),
    [
        ({"head": "shared"}, "head='shared' is unknown"),
        ({"head": "factored"}, "a factored head needs a rank"),
        ({"head_rank": 8}, "no other has one"),
        ({"head": "factored", "head_rank": 32}, "saves nothing at a width of 32"),
        ({"hidden_size": 16}, "hidden_size=16 is not for a draft that starts from 'target'"),
        ({"start": "scratch", "cut": [0]}, "is not for a draft that starts from 'scratch'"),
        ({"layers": 0}, "layers=0 must be at least 1"),
        ({"layers": 5}, "the target has 4 layers"),
        ({"cut": [2, 1]}, "ascending, from 0 to 3"),
        ({"cut": [0, 4]}, "ascending, from 0 to 3"),
        ({"cut": [0, 1], "layers": 3}, "set one of them to null"),
        ({"start": "scratch", "hidden_size": 18}, "18 cannot be divided among 2 heads .* multiple of 8"),
        ({"start": "scratch", "num_heads": 4, "num_kv_heads": 3}, "divisor of num_heads"),
        ({"start": "scratch", "hidden_size": 16, "embedding": "target"}, "Set embedding=own"),
        ({"head": "tied"}, "is not its head, and is frozen"),
        ({"start": "./nowhere"}, "start=./nowhere cannot be read"),
        ({"draft_vocab_size": 65}, "larger than the target's"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(target: Target, network: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Small.build(NetworkConfig(**network), target)
