"""A small causal language model as the draft (Leviathan et al. 2023): the network, no losses and no decoding.

It is one of transformers' own decoders, of the target's family: layers cut out of the target, fresh weights
of chosen sizes, or any model with the target's vocabulary. It reads tokens and nothing of the target's.

The checkpoint is a plain model: `config.json`, `model.safetensors` and a tokenizer, which transformers (and
engines) load by themselves, over all of the target's ids. What Leadout must know stands under the key
`leadout` of config.json, which transformers passes over. A head that is factored, or over a draft vocabulary,
is no such model's: it stands beside it in `leadout/head.safetensors`, and the plain model has it multiplied
out, with the target's own rows (or zeros, where widths differ) for ids outside the draft vocabulary. Those
rows were never trained with the rest: whoever drafts with the plain model of a reduced vocabulary accepts
less than Leadout measures, as it may propose them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.initialization import no_init_weights
from transformers.utils import logging

from configs.errors import CheckpointError, ConfigError, StorageError
from models.checkpoint import CONFIG, NATIVE, WEIGHTS, read_weights
from models.draft import INIT_STD, DraftNetwork, DraftShape, draft_sizes
from models.files import sha256_file, write_json, write_tensors
from models.layers import linear
from models.target import Target, first_line, whole

# In a folder, since engines load every weight file beside config.json.
HEAD = Path("leadout") / "head.safetensors"
LAYERS = 4  # where none are named
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")
# Of a target's configuration, what says how its weights are stored or by whom.
STORAGE = ("quantization_config", "_name_or_path", "architectures", "transformers_version", "torch_dtype")


@dataclass
class NetworkConfig:
    """What a user may set (`method.network`); None takes the target's value, or follows from the others."""

    start: str = "target"  # target: layers cut out of it; scratch: fresh; else a model's name or folder
    layers: int | None = None  # of target and scratch; None: 4
    cut: list[int] | None = None  # of target: which layers; None: evenly, with the first and the last
    hidden_size: int | None = None  # of scratch, as the next three are
    intermediate_size: int | None = None  # None: as many times hidden_size as the target's
    num_heads: int | None = None  # None: as many as keep the target's head size
    num_kv_heads: int | None = None  # None: shared as the target shares them
    embedding: str | None = None  # target: its own, frozen; own: trained. None: target where that fits
    head: str = "own"  # own: a matrix; factored: two of rank head_rank; tied: the embedding's rows
    head_rank: int | None = None
    draft_vocab_size: int | None = None  # None: the target's whole vocabulary

    def __post_init__(self) -> None:
        """Raises `ConfigError` for what no target could make work."""
        where = "method.network"
        known = {"embedding": (None, "target", "own"), "head": ("own", "factored", "tied")}
        for name, values in known.items():
            if getattr(self, name) not in values:
                named = ", ".join("null" if value is None else value for value in values)
                raise ConfigError(f"{where}.{name}={getattr(self, name)!r} is unknown: set one of {named}.")
        if (self.head == "factored") != (self.head_rank is not None):
            raise ConfigError(
                f"{where}.head={self.head} with head_rank={self.head_rank}: a factored head needs a rank, as "
                "in head_rank=128, and no other has one."
            )
        sizes = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
        settable = {"target": ("layers", "cut"), "scratch": ("layers", *sizes)}.get(self.start, ())
        for name in ("layers", "cut", *sizes):
            value = getattr(self, name)
            if value is not None and name not in settable:
                raise ConfigError(
                    f"{where}.{name}={value} is not for a draft that starts from {self.start!r}, whose "
                    f"weights decide it: set null, or {where}.start=scratch."
                )
            if isinstance(value, int) and value < 1:
                raise ConfigError(f"{where}.{name}={value} must be at least 1.")


@dataclass
class SmallShape(DraftShape):
    start: str
    cut: list[int] | None  # the target's layers that these began as
    embedding: str
    head: str
    head_rank: int | None
    architecture: dict[str, Any]  # the configuration of transformers' model

    @classmethod
    def resolve(cls, network: NetworkConfig, target: Target) -> SmallShape:
        """`network` for `target`. Raises `ConfigError` for what cannot work together."""
        cut = chosen_layers(network, target) if network.start == "target" else None
        if cut is not None:
            architecture = with_layers(architecture_of(target.config), cut)
        elif network.start == "scratch":
            architecture = scratch_architecture(network, target)
        else:
            architecture = named_architecture(network.start, target)
        width = architecture["hidden_size"]
        fits = network.start in ("target", "scratch") and width == target.hidden_size
        architecture |= {"vocab_size": target.vocab_size, "tie_word_embeddings": network.head == "tied"}
        shape = cls(
            **draft_sizes(target, network.draft_vocab_size) | {"hidden_size": width},
            start=network.start,
            cut=cut,
            embedding=network.embedding or ("target" if fits else "own"),
            head=network.head,
            head_rank=network.head_rank,
            architecture=architecture,
        )
        shape.check(target.num_layers)
        shape.check_ends(fits, target)
        return shape

    def check_ends(self, fits: bool, target: Target) -> None:
        """Raises `ConfigError` if embedding and head cannot be had from this target."""
        where = "method.network"
        if target.head.bias is not None:
            raise ConfigError(
                f"method.name=small: the head of {target.name} has a bias, which the draft's would lack. Use "
                "another method, or a draft that is trained already."
            )
        if self.head_rank is not None and self.head_rank < 1:
            raise ConfigError(f"{where}.head_rank={self.head_rank} must be at least 1.")
        if self.embedding == "target" and not fits:
            raise ConfigError(
                f"{where}.embedding=target: layers of width {self.hidden_size} that start from "
                f"{self.start!r} cannot read the target's embedding of width {self.target_hidden_size}. Set "
                "embedding=own."
            )
        tied = target.head.weight is target.embedding
        if self.embedding == "target" and self.head == "tied" and not tied:
            raise ConfigError(
                f"{where}.head=tied: the target's embedding is not its head, and is frozen. Set head=own, "
                "which starts as the target's head, or embedding=own."
            )
        if self.head_rank is not None and self.head_rank >= self.hidden_size:
            raise ConfigError(
                f"{where}.head_rank={self.head_rank} saves nothing at a width of {self.hidden_size}: set a "
                "smaller one, or head=own."
            )


class Small(DraftNetwork):
    method = "small"
    Shape = SmallShape
    taps = ()

    def __init__(self, shape: SmallShape, embedding: Tensor) -> None:
        super().__init__(shape, embedding)
        with no_init_weights():
            self.decoder: Any = causal_model(shape.architecture).get_decoder()
        if shape.embedding == "target":
            table = self.decoder.get_input_embeddings()
            del table.weight  # a plain attribute in its place: no parameter to train or save
            table.weight = self.embedding
        d, v, r = shape.hidden_size, shape.draft_vocab_size, shape.head_rank
        self.head: nn.Linear | Factored | None = None if shape.head == "tied" else linear(d, v)
        if r is not None:
            self.head = Factored(d, r, v)
        with torch.no_grad():
            for weight in self.parameters():
                weight.fill_(torch.nan)
        words = inspect.signature(self.decoder.forward).parameters
        self._cache_word = "cache" if "cache" in words else "past_key_values"  # transformers 5.24 renamed it
        self.num_layers = len(layers_of(self.decoder)[1])

    @torch.no_grad()
    def initialise(self, seed: int, target: Target) -> None:
        """The weights that `shape.start` says; the draft vocabulary must be set.

        A head of its own starts as rows of the head that comes with them (factored: as the nearest of its
        rank).
        """
        weights, rows = starting_weights(self.shape, self.decoder, target, seed)
        for name, weight in self.decoder.named_parameters():
            weight.copy_(weights[name])
        rows = rows.detach()[self.draft_ids.to(rows.device)].float()
        if isinstance(self.head, Factored):
            self.head.approximate(rows)
        elif self.head is not None:
            self.head.weight.copy_(rows)
        self.ready = True

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None, cache: Any = None
    ) -> Tensor:
        """Last hidden states [B, T, d], after the final norm, of tokens [B, T] long.

        positions [B, T] long; None: from 0 on. mask: bool [B, 1, T, S], True where a row may attend; None:
        causal. cache: an HF `Cache`, which appends the rows itself; None keeps none.
        """
        self.require_ready()
        words: dict[str, Any] = {self._cache_word: cache, "use_cache": cache is not None}
        if positions is not None:
            words["position_ids"] = positions
        if mask is not None:
            words["attention_mask"] = mask
        embedded = self.decoder.get_input_embeddings()(tokens)
        embedded = embedded.to(next(layers_of(self.decoder)[1].parameters()).dtype)
        return self.decoder(inputs_embeds=embedded, **words).last_hidden_state

    def logits(self, state: Tensor) -> Tensor:
        """[..., Vd] over the draft vocabulary, of states [..., d] that `forward` gave."""
        if self.head is not None:
            return self.head(state)
        rows = self.head_rows()
        return F.linear(state.to(rows.dtype), rows)

    def head_rows(self) -> Tensor:
        """The head as one matrix [Vd, d]."""
        if isinstance(self.head, Factored):
            return self.head.up.weight @ self.head.down.weight
        if self.head is not None:
            return self.head.weight
        rows = self.decoder.get_input_embeddings().weight
        return rows if self.full_vocabulary else rows[self.draft_ids]

    def _apply(self, fn: Any, recurse: bool = True) -> Small:
        """Casts and moves everything, but leaves the rotary frequencies in float32: in bfloat16 they would
        turn distant rows to other positions."""
        buffers = {
            name: buffer for name, buffer in self.decoder.named_buffers() if buffer.is_floating_point()
        }
        super()._apply(fn, recurse)
        for name, before in buffers.items():
            at, _, leaf = name.rpartition(".")
            module = self.decoder.get_submodule(at)
            setattr(module, leaf, before.to(getattr(module, leaf).device))
        return self

    # The checkpoint

    def write(self, folder: Path, config: dict[str, Any], target: Target) -> None:
        """Writes the plain model, float32, with the target's tokenizer; `config` and the head beside it."""
        try:
            with without_progress_bars():
                self.plain_model(target).save_pretrained(folder)
        except SafetensorError as error:  # how safetensors reports a full disk
            raise StorageError(f"Cannot write {folder}: {error}. Free some space, and run again.") from error
        target.tokenizer.save_pretrained(folder)
        if self.head_apart:
            state = self.state_dict()
            apart = {name: state[name] for name in state if not name.startswith("decoder.")}
            (folder / HEAD).parent.mkdir()
            write_tensors(folder / HEAD, apart)
            config = config | {"head_sha256": sha256_file(folder / HEAD)}
        plain = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        write_json(folder / CONFIG, plain | {NATIVE: config})

    def read(self, folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
        """The state dict that `write` wrote. Raises `CheckpointError`."""
        model = loaded_model(str(folder), CheckpointError, f"{folder / WEIGHTS}")
        own = self.decoder.state_dict()
        state = {f"decoder.{name}": w for name, w in model.get_decoder().state_dict().items() if name in own}
        if not self.head_apart:
            head = {} if self.head is None else {"head.weight": model.get_output_embeddings().weight.detach()}
            return state | head
        apart = read_weights(folder / HEAD)
        if sha256_file(folder / HEAD) != config.get("head_sha256"):
            raise CheckpointError(
                f"{folder / HEAD} is not the head that {CONFIG} speaks of: the files belong to different "
                "drafts. Copy the whole folder again from the run."
            )
        return state | apart

    @property
    def head_apart(self) -> bool:
        """Whether a plain model cannot say what the head is."""
        return not self.full_vocabulary or self.shape.head == "factored"

    @torch.no_grad()
    def plain_model(self, target: Target) -> Any:
        """The draft as transformers' own model over all of the target's ids, float32."""
        with torch.device("meta"):
            model = causal_model(self.shape.architecture)
        names = {module: name for name, module in model.named_modules()}
        table = self.decoder.get_input_embeddings().weight.detach()
        state = {f"{names[model.get_decoder()]}.{name}": w for name, w in self.decoder.state_dict().items()}
        state[f"{names[model.get_input_embeddings()]}.weight"] = table
        state[f"{names[model.get_output_embeddings()]}.weight"] = (
            table if self.head is None else self.whole_head(target)
        )
        model.load_state_dict({name: weight.float() for name, weight in state.items()}, assign=True)
        model.tie_weights()
        ends = sorted(target.eos_ids) or None
        model.generation_config = GenerationConfig(
            bos_token_id=target.tokenizer.bos_token_id,
            eos_token_id=ends,
            pad_token_id=target.tokenizer.pad_token_id,
        )
        return model

    def whole_head(self, target: Target) -> Tensor:
        """[V, d]: the head's rows, and outside the draft vocabulary the target's own, or zeros."""
        rows = self.head_rows()
        if self.full_vocabulary:
            return rows
        same = self.shape.hidden_size == target.hidden_size
        whole = target.head.weight.to(rows) if same else rows.new_zeros(self.shape.vocab_size, rows.shape[1])
        return whole.index_copy(0, self.draft_ids, rows)


class Factored(nn.Module):
    """A head of low rank: logits = up(down(state))."""

    def __init__(self, d: int, rank: int, vocab_size: int) -> None:
        super().__init__()
        self.down, self.up = linear(d, rank), linear(rank, vocab_size)

    def forward(self, state: Tensor) -> Tensor:
        return self.up(self.down(state))

    @torch.no_grad()
    def approximate(self, rows: Tensor) -> None:
        """Becomes, of all products of its rank, the nearest to `rows` [V, d] (Eckart and Young 1936)."""
        _, vectors = torch.linalg.eigh(rows.double().mT @ rows.double())  # eigenvalues ascend
        basis = vectors[:, -self.down.out_features :].to(rows)  # [d, rank]: the first right singular vectors
        self.down.weight.copy_(basis.mT)
        self.up.weight.copy_(rows @ basis)


Draft = Small  # how other rooms find a method's network: `models.draft_class`


# Architectures


def chosen_layers(network: NetworkConfig, target: Target) -> list[int]:
    """Which of the target's layers a cut draft has."""
    n = target.num_layers
    if network.cut is not None:
        cut = list(network.cut)
        if not cut or cut != sorted(set(cut)) or cut[0] < 0 or cut[-1] >= n:
            raise ConfigError(
                f"method.network.cut={cut}: name layers of the target, ascending, from 0 to {n - 1}."
            )
        if network.layers not in (None, len(cut)):
            raise ConfigError(
                f"method.network.layers={network.layers}, and cut names {len(cut)}: set one of them to null."
            )
        return cut
    count = network.layers or min(LAYERS, n)
    if count > n:
        raise ConfigError(f"method.network.layers={count}: the target has {n} layers to cut from.")
    return [0] if count == 1 else [round(i * (n - 1) / (count - 1)) for i in range(count)]


def architecture_of(config: Any) -> dict[str, Any]:
    """A configuration of transformers as JSON holds it, without how its weights are stored."""
    values = json.loads(config.to_json_string(use_diff=False))
    if lacking := [name for name in SIZES if name not in values]:
        raise ConfigError(
            f"method.name=small: models of type {values.get('model_type')} do not say {', '.join(lacking)} "
            "by that name, so none of their family can be made. Use another method."
        )
    return {name: value for name, value in values.items() if name not in STORAGE} | {"dtype": "float32"}


def with_layers(architecture: dict[str, Any], kept: list[int]) -> dict[str, Any]:
    """Fewer layers; what is told layer by layer (kinds of attention, say) goes with them."""
    n = architecture["num_hidden_layers"]
    told = {
        name: [value[i] for i in kept]
        for name, value in architecture.items()
        if "layer" in name and isinstance(value, list) and len(value) == n
    }
    return architecture | told | {"num_hidden_layers": len(kept)}


def scratch_architecture(network: NetworkConfig, target: Target) -> dict[str, Any]:
    """The target's family with sizes of its own."""
    theirs = architecture_of(target.config)
    heads, kv = (
        theirs["num_attention_heads"],
        theirs.get("num_key_value_heads") or theirs["num_attention_heads"],
    )
    size = theirs.get("head_dim") or target.hidden_size // heads
    width = network.hidden_size or target.hidden_size
    num_heads = network.num_heads or width // size
    if num_heads < 1 or width % (2 * num_heads):  # rotation takes pairs
        raise ConfigError(
            f"method.network: a width of {width} cannot be divided among {num_heads} heads of an even size. "
            f"Set hidden_size to a multiple of {size}, the target's head size, or num_heads to a divisor."
        )
    num_kv = network.num_kv_heads or max(1, num_heads * kv // heads)
    if num_heads % num_kv:
        raise ConfigError(
            f"method.network: {num_heads} attention heads cannot share {num_kv} key and value heads evenly. "
            "Set num_kv_heads to a divisor of num_heads."
        )
    layers = network.layers or LAYERS
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv,
        "head_dim": width // num_heads,
        "initializer_range": INIT_STD,
    }
    if theirs.get("intermediate_size") is not None:
        proportional = round(theirs["intermediate_size"] * width / target.hidden_size)
        sizes["intermediate_size"] = network.intermediate_size or proportional
    n = theirs["num_hidden_layers"]
    kept = [i % n for i in range(layers)]
    return with_layers(theirs, kept) | {name: v for name, v in sizes.items() if name in theirs}


def named_architecture(name: str, target: Target) -> dict[str, Any]:
    """That of another model. Raises `ConfigError` unless it has the target's vocabulary, which a sketch,
    having no tokenizer, cannot tell."""
    sketched = target.device.type == "meta"
    try:
        config = AutoConfig.from_pretrained(name).get_text_config(decoder=True)
        vocabulary = None if sketched else AutoTokenizer.from_pretrained(name).get_vocab()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"method.network.start={name} cannot be read: {first_line(error)} Set target, scratch, or the "
            "name or folder of a causal language model."
        ) from None
    if not sketched and vocabulary != target.tokenizer.get_vocab():
        raise ConfigError(
            f"method.network.start={name} has another vocabulary than the target {target.name}. Start from a "
            "model of the target's own family, from target, or from scratch."
        )
    return architecture_of(config)


# Models


@torch.no_grad()
def starting_weights(
    shape: SmallShape, decoder: Any, target: Target, seed: int
) -> tuple[dict[str, Tensor], Tensor]:
    """(the weights of `decoder` by name, the head [V, d] that comes with them)."""
    if shape.cut is not None:
        return cut_weights(decoder, target, shape.cut), target.head.weight
    if shape.start == "scratch":
        model = fresh_model(shape.architecture, seed)
        if shape.hidden_size == target.hidden_size:  # what tokens look like at either end need not be learnt
            model.get_input_embeddings().weight.copy_(target.embedding)
            return dict(model.get_decoder().named_parameters()), target.head.weight
    else:
        model = loaded_model(shape.start)
        resize(model, shape.vocab_size)
    return dict(model.get_decoder().named_parameters()), model.get_output_embeddings().weight


def causal_model(architecture: dict[str, Any]) -> Any:
    """transformers' model of this architecture, float32, on the current default device."""
    config = AutoConfig.for_model(**architecture)
    try:
        # The one that takes a decoder's masks as they are.
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    except ValueError as error:
        raise ConfigError(
            f"method.name=small: no model of type {config.model_type} can be made: {first_line(error)} Use "
            "another method."
        ) from error


def fresh_model(architecture: dict[str, Any], seed: int) -> Any:
    """With the family's own initial weights, the same on every device; the global random state stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return causal_model(architecture)


def loaded_model(name: str, error: type[Exception] = ConfigError, what: str | None = None) -> Any:
    """The model of this name or folder, float32, whole; else an `error` about `what`."""
    what = what or f"The model {name} of method.network.start"
    try:
        with without_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                name, dtype=torch.float32, output_loading_info=True
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as cause:
        raise error(f"{what} is missing, truncated or damaged: {first_line(cause)} Copy it again.") from cause
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise error(f"{what} lacks {len(missing)} weights, the first being {missing[0]}. Copy it again.")
    return model


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers draws one for a single file too, into the middle of what training says."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def resize(model: Any, vocab_size: int) -> None:
    """Embedding and head of `vocab_size` rows: families pad them to other numbers at other sizes."""
    if len(model.get_input_embeddings().weight) != vocab_size:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model.resize_token_embeddings(vocab_size, mean_resizing=False)


def layers_of(decoder: Any) -> tuple[str, nn.ModuleList]:
    """The decoder's list of layers, and its name there."""
    name = "layers" if hasattr(decoder, "layers") else "h"  # GPT-2 and its kin say h
    return name, getattr(decoder, name)


def cut_weights(decoder: Any, target: Target, cut: list[int]) -> dict[str, Tensor]:
    """The target's weights under the names of a decoder that has only its layers `cut`."""
    name, _ = layers_of(decoder)
    theirs = dict(target.decoder.named_parameters())
    renamed = {}
    for ours, _ in decoder.named_parameters():
        list_name, _, rest = ours.partition(".")
        index, _, leaf = rest.partition(".")
        source = f"{name}.{cut[int(index)]}.{leaf}" if list_name == name else ours
        renamed[ours] = whole(theirs[source].detach())
    return renamed
