"""What the other rooms rely on: logits, taps, caches, masks, fingerprints, and refusals that say why."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from configs.errors import TargetError
from configs.schema import Dtype, TargetConfig
from models.target import Target, resolve_device, write_target
from tests.conftest import tiny_model, tiny_target, tiny_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
IDS = torch.tensor([[5, 9, 30, 7, 41, 12]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A target saved as a single-file checkpoint."""
    path = tmp_path / "target"
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def config(folder: Path, **settings: Any) -> TargetConfig:
    return TargetConfig(**{"name": str(folder), "dtype": Dtype.float32, "device": "cpu", **settings})


def edit_weights(folder: Path, edit: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_logits_and_taps_are_those_of_the_model(target: Target) -> None:
    expected = target.model(IDS, output_hidden_states=True)
    out = target.forward(
        IDS, taps=(3, 0, 4)
    )  # in the order asked for; 4 of 4 layers is the last hidden state
    assert out.logits is not None
    assert torch.equal(out.logits, expected.logits)
    hidden = expected.hidden_states
    assert out.taps is not None
    assert torch.equal(out.taps, torch.cat([hidden[3], hidden[0], hidden[4]], dim=-1))
    assert torch.equal(out.last_hidden, hidden[4])
    assert torch.equal(target.lm_head(out.last_hidden), expected.logits)


def test_only_what_is_asked_for_is_computed(target: Target) -> None:
    last = target.forward(IDS, last_logits_only=True)
    whole = target.forward(IDS)
    assert last.logits is not None
    assert whole.logits is not None
    assert last.logits.shape == (1, 1, 64)
    assert torch.allclose(last.logits[:, 0], whole.logits[:, -1], atol=1e-5)
    assert target.forward(IDS, logits=False).logits is None
    assert whole.taps is None


def test_hooks_do_not_stay(target: Target) -> None:
    target.forward(IDS, taps=(1, 2))
    assert not any(layer._forward_pre_hooks for layer in target.decoder.layers)


def test_the_target_is_frozen(target: Target) -> None:
    assert not any(weight.requires_grad for weight in target.model.parameters())
    assert not target.model.training
    logits = target.forward(IDS).logits
    assert logits is not None
    assert logits.grad_fn is None


def test_a_cache_continues_where_it_stands(target: Target) -> None:
    whole = target.forward(IDS, taps=(2,))
    cache = DynamicCache(config=target.config)
    target.forward(IDS[:, :4], cache=cache)
    rest = target.forward(IDS[:, 4:], cache=cache, taps=(2,))
    assert cache.get_seq_length() == 6
    assert rest.logits is not None
    assert rest.taps is not None
    assert whole.logits is not None
    assert whole.taps is not None
    assert torch.allclose(rest.logits, whole.logits[:, 4:], atol=1e-4)
    assert torch.allclose(rest.taps, whole.taps[:, 4:], atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_tree_mask_gives_each_branch_its_own_past(attention: str) -> None:
    # Cached: 5 9. New rows: 30, then its two children 7 and 41 at the same position.
    #     5 -- 9 -- 30 -- 7
    #                \--- 41
    target = tiny_target(attn_implementation=attention)
    cache = DynamicCache(config=target.config)
    target.forward(IDS[:, :2], cache=cache)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]).bool()[None, None]
    tree = target.forward(
        torch.tensor([[30, 7, 41]]), positions=torch.tensor([[2, 3, 3]]), mask=mask, cache=cache
    )
    assert tree.logits is not None
    for row, branch in ((1, [5, 9, 30, 7]), (2, [5, 9, 30, 41])):
        alone = target.forward(torch.tensor([branch]), last_logits_only=True)
        assert alone.logits is not None
        assert torch.allclose(tree.logits[0, row], alone.logits[0, 0], atol=1e-4)


def test_flash_attention_refuses_a_mask(target: Target) -> None:
    target.config._attn_implementation = "flash_attention_2"
    with pytest.raises(TargetError, match=r"target\.attention=sdpa"):
        target.forward(IDS, mask=torch.ones(1, 1, 6, 6, dtype=torch.bool))


def test_shape_and_end_of_text(target: Target) -> None:
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (4, 32, 64)
    assert (target.device, target.dtype) == (torch.device("cpu"), torch.float32)
    assert torch.equal(target.embedding, target.model.model.embed_tokens.weight)
    assert target.eos_ids == {2}
    target.model.generation_config.eos_token_id = [7, 9]
    assert Target.wrap(target.model, target.tokenizer).eos_ids == {2, 7, 9}


def test_a_folder_loads_in_the_dtype_asked_for(folder: Path) -> None:
    target = Target.load(config(folder, dtype=Dtype.bfloat16))
    assert target.dtype == torch.bfloat16
    assert target.name == str(folder)
    assert len(list(folder.glob("*.safetensors"))) == 1


@pytest.mark.parametrize(("native", "dtype"), [(True, "bfloat16"), (False, "bfloat16"), (False, "float32")])
def test_bfloat16_on_a_cpu_without_it_is_told(
    native: bool, dtype: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("models.target.cpu_has_bfloat16", lambda: native)
    Target.load(config(folder, dtype=Dtype(dtype)))
    told = "Set target.dtype=float32." in caplog.text
    assert told == (dtype == "bfloat16" and not native)


def test_tied_embeddings_load_without_a_head_in_the_file(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    target = Target.load(config(tmp_path))
    assert torch.equal(target.head.weight, model.model.embed_tokens.weight)


def test_write_target_saves_what_load_reads(folder: Path, tmp_path: Path) -> None:
    write_target(config(folder), tmp_path / "copy")
    source, copy = Target.load(config(folder)), Target.load(config(tmp_path / "copy"))
    assert copy.fingerprint() == source.fingerprint()
    assert copy.tokenizer_fingerprint() == source.tokenizer_fingerprint()
    assert copy.tokenizer.chat_template == source.tokenizer.chat_template
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "target"]


# Refusals


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"no folder .*absent"):
        Target.load(config(tmp_path / "absent"))


def test_a_missing_gguf_file_lists_those_there(folder: Path) -> None:
    (folder / "model.Q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(TargetError, match=r"model\.Q4\.gguf"):
        Target.load(config(folder, gguf_file="other.gguf"))


def test_missing_weights_are_named(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(TargetError, match=r"layers\.2\.mlp\.up_proj"):
        Target.load(config(folder))


def test_a_head_that_is_neither_stored_nor_tied_is_refused(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(TargetError, match=r"lack 1 weights, among them lm_head\.weight"):
        Target.load(config(folder))


def test_truncated_weights_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(TargetError, match="cannot be loaded"):
        Target.load(config(folder))


def test_weights_that_are_not_finite_are_refused() -> None:
    model = tiny_model()
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    with pytest.raises(TargetError, match="not finite"):
        Target.wrap(model, tiny_tokenizer())


def test_weights_left_on_meta_are_refused() -> None:
    model = tiny_model()
    model.model.layers[1].mlp.to("meta")
    with pytest.raises(TargetError, match=r"layers\.1\.mlp"):
        Target.wrap(model, tiny_tokenizer())


def test_a_tokenizer_larger_than_the_head_is_refused() -> None:
    with pytest.raises(TargetError, match="ids up to 79, and its head has 64 rows"):
        Target.wrap(tiny_model(vocab=64), tiny_tokenizer(vocab=80))


def test_sliding_window_is_told() -> None:
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16))
    assert Target.wrap(model, tiny_tokenizer()).window == 16
    assert Target.wrap(tiny_model(), tiny_tokenizer()).window is None


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, 32),
        ({"rope_type": "dynamic", "factor": 2.0}, 64),
        ({"rope_type": "linear", "factor": 2.0}, None),
    ],
)
def test_where_rotary_embeddings_change_is_told(rope: dict[str, Any], limit: int | None) -> None:
    parameters = {"rope_theta": 10000.0, "original_max_position_embeddings": 32, **rope}
    model = tiny_model(max_position_embeddings=64, rope_parameters=parameters)
    assert Target.wrap(model, tiny_tokenizer()).window == limit


def test_local_layers_are_refused() -> None:
    kinds = [[["global", "local"], 1]]
    model = GPTNeoForCausalLM(
        GPTNeoConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, attention_types=kinds)
    )
    with pytest.raises(TargetError, match="count columns of the cache"):
        Target.wrap(model, tiny_tokenizer())


def test_positions_that_follow_from_columns_are_refused() -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(TargetError, match="takes no mask of a tree"):
        Target.wrap(model, tiny_tokenizer())


def test_a_model_that_reads_siblings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    leaky = target._as_attention
    monkeypatch.setattr(Target, "_as_attention", lambda self, mask: leaky(torch.ones_like(mask)))
    with pytest.raises(TargetError, match="by mask and position alone"):
        target.check()


def test_scaled_logits_are_refused_by_name() -> None:
    model = GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0))
    with pytest.raises(TargetError, match=r"logits_scaling=8\.0"):
        Target.wrap(model, tiny_tokenizer())


def test_capped_logits_are_refused_by_name() -> None:
    model = Gemma2ForCausalLM(
        Gemma2Config(
            **SIZES,
            head_dim=8,
            initializer_range=0.4,
            layer_types=["full_attention"] * 2,
            final_logit_softcapping=30.0,
        )
    )
    with pytest.raises(TargetError, match=r"final_logit_softcapping=30\.0"):
        Target.wrap(model, tiny_tokenizer())


def test_an_absent_device_is_refused() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(TargetError, match=r"target\.device=gpu is no device"):
        resolve_device("gpu")
    with pytest.raises(TargetError, match=r"target\.device=cuda:99"):
        resolve_device("cuda:99")


# Fingerprints


def test_the_fingerprint_is_one_for_one_model_in_float32_and_bfloat16() -> None:
    assert tiny_target(dtype=torch.float32).fingerprint() == tiny_target(dtype=torch.bfloat16).fingerprint()


def test_the_fingerprint_tells_weights_and_configuration_apart(target: Target) -> None:
    reference = target.fingerprint()
    assert tiny_target(seed=1).fingerprint() != reference
    assert tiny_target(rms_norm_eps=1e-3).fingerprint() != reference
    with torch.no_grad():
        target.model.model.layers[3].mlp.down_proj.weight[0, 0] += 1
    assert target.fingerprint() != reference


def test_the_tokenizer_fingerprint_follows_ids_and_not_templates() -> None:
    target, other = tiny_target(), tiny_target()
    other.tokenizer.chat_template = "another"
    other.tokenizer("ab", truncation=True, max_length=1)  # leaves a trace in the backend's state
    assert other.tokenizer_fingerprint() == target.tokenizer_fingerprint()
    other.tokenizer.add_tokens(["<new>"])
    assert other.tokenizer_fingerprint() != target.tokenizer_fingerprint()


def test_the_tokenizer_fingerprint_survives_saving(folder: Path) -> None:
    assert Target.load(config(folder)).tokenizer_fingerprint() == tiny_target().tokenizer_fingerprint()


def test_the_tokenizer_fingerprint_sees_two_ids_swapped(folder: Path, tmp_path: Path) -> None:
    swapped = tmp_path / "swapped"
    shutil.copytree(folder, swapped)
    content = json.loads((swapped / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (swapped / "tokenizer.json").write_text(json.dumps(content))
    reference = Target.load(config(folder)).tokenizer_fingerprint()
    assert Target.load(config(swapped)).tokenizer_fingerprint() != reference


def test_the_final_gain_is_the_norms_weight(target: Target) -> None:
    with torch.no_grad():
        target.model.model.norm.weight.copy_(torch.linspace(-1, 2, 32))
    gain = target.final_gain()
    assert gain is not None
    # RMSNorm of ones divides by sqrt(1 + eps), eps = 1e-6.
    assert torch.allclose(gain, torch.linspace(-1, 2, 32), atol=2e-6)
