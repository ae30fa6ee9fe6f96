"""The target: the frozen model whose law counts, behind the few things that the other rooms need of it.

Any Hugging Face causal language model (a hub name, a folder, a GGUF file) whose head is one linear map of its
last hidden state and whose layers attend to what a mask says, at the positions they are told, be it all of
the text or a window that the text stays within. Both are proved when it is loaded, because a model for which
they do not hold would decode and train without an error, and wrongly.

Layers are counted as in HF's `hidden_states` (design.md, idea 4): 0 is the embedding output, i the input of
decoder layer i, and the number of layers is the last hidden state, after the final norm.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from configs.errors import TargetError
from configs.hardware import cpu_has_bfloat16
from configs.schema import Quantize, TargetConfig
from models import attention
from models.files import write_folder
from models.packing import pack
from models.quantization import is_quantised, loading, parts, refuse_unquantised

log = logging.getLogger(__name__)

# What decides how weights become logits, and is not in the weights.
ESSENTIALS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rope_parameters",
    "rms_norm_eps",
    "hidden_act",
    "tie_word_embeddings",
)

# Config entries known to change logits after the head; a failed check names those that are set.
LOGIT_CHANGES = (
    "final_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "logits_scale",
)

# Largest difference that rounding explains, as a share of the largest magnitude.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}

MANY_ROUNDINGS = 8  # times that, where another kernel ran in every layer

SPARE_POSITIONS = 2  # rows of a position table before the first position

SAMPLES = 1024  # values per parameter that enter the fingerprint

T = TypeVar("T")


@dataclass(frozen=True)
class TargetOutput:
    logits: Tensor | None  # [B, T, V], or [B, 1, V] with last_logits_only
    last_hidden: Tensor  # [B, T, d], after the final norm: lm_head(last_hidden) are the logits
    taps: Tensor | None  # [B, T, n_taps * d], in the order asked for


class Target:
    """A frozen causal language model and its tokenizer. Made by `load` or `wrap`, and never changed after."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        revision: str | None = None,
        quantize: Quantize | None = None,
    ) -> None:
        """`quantize`: how the linear layers of `model` are quantised (models/quantization.py)."""
        attention.install()
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.quantize = quantize
        self.packed = False  # whether linear layers are also in the CPU's layout (models/packing.py)
        self.config = model.config.get_text_config(decoder=True)
        self.decoder, self.layers = find_decoder(model, name)
        self.head = find_head(model, name)
        self.num_layers: int = len(self.layers)
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.head.weight.shape[0]
        self.eos_ids = find_eos(model, tokenizer)
        accepted = inspect.signature(self.decoder.forward).parameters
        # transformers 5.24 renamed it for most models.
        self._cache_word = "cache" if "cache" in accepted else "past_key_values"

    @classmethod
    def load(cls, cfg: TargetConfig) -> Target:
        """The target that `cfg` names, on its device and in its dtype, with every check passed.

        Raises `TargetError` for a model that cannot be found, is incomplete, or cannot be used (see `check`).
        """
        model, tokenizer = read_model(cfg, resolve_device(cfg.device))
        target = cls(model, tokenizer, cfg.name, cfg.revision, cfg.quantize)
        if cfg.quantize is not None:
            refuse_unquantised(target.layers, cfg.name)
        target.packed = cfg.pack and pack(target.model) > 0
        target.check()
        if target.dtype is torch.bfloat16 and target.device.type == "cpu" and not cpu_has_bfloat16():
            log.warning(  # a warning, so that it is seen where no logging was set up
                "target.dtype=bfloat16, and there are no kernels for it on this CPU: a forward over several "
                "tokens takes several times as long as in float32. Set target.dtype=float32."
            )
        return target

    @classmethod
    def sketch(cls, cfg: TargetConfig) -> Target:
        """The target that `cfg` names without weights and tokenizer, on the meta device: names and sizes,
        from its config.json alone. Nothing can be computed with it.

        Raises `TargetError` for one that cannot be found.
        """
        refuse_absent(cfg)
        try:
            config = AutoConfig.from_pretrained(
                cfg.name, revision=cfg.revision, trust_remote_code=cfg.trust_remote_code
            )
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(
                    config, dtype=getattr(torch, cfg.dtype.value), trust_remote_code=cfg.trust_remote_code
                )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise TargetError(
                f"The target {described(cfg)} cannot be described: {first_line(error)} Check target.name: "
                "a hub name, or a folder with config.json."
            ) from error
        return cls(model, SimpleNamespace(eos_token_id=None), cfg.name, cfg.revision, cfg.quantize)

    @classmethod
    def wrap(cls, model: Any, tokenizer: Any, name: str = "in-memory") -> Target:
        """A target from a model that is in memory already; it is frozen, and checked as `load` checks."""
        target = cls(model, tokenizer, name)
        target.check()
        return target

    def together(self, run: Callable[[], T]) -> T:
        """What `run` gives. One that processes hold in parts runs the inputs of all (train/sharded.py)."""
        return run()

    @cached_property
    def window(self) -> int | None:
        """Tokens that decoded texts must fit in; None if they may be of any length.

        Those that a layer with a sliding window attends to: a tree's mask says nothing of windows, and rows
        of K/V are kept. Or `rotary_limit`, or as many as a table of learned positions has, if that is less.
        """
        layers = DynamicCache(config=self.model.config).layers
        windows = [layer.sliding_window for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)]
        return min([*windows, *rotary_limits(self.config), *self.learned_positions], default=None)

    @cached_property
    def learned_positions(self) -> list[int]:
        """How many positions each table of them is for, if there are any: embeddings beside the tokens', with
        a row for each position, and in some models (OPT) a few more."""
        most = getattr(self.config, "max_position_embeddings", None)
        tables = [
            module
            for module in self.decoder.modules()
            if isinstance(module, nn.Embedding) and module is not self.model.get_input_embeddings()
        ]
        return [most for table in tables if most and 0 <= table.num_embeddings - most <= SPARE_POSITIONS]

    @cached_property
    def rotary_limit(self) -> int | None:
        """The length of text from which on its rotary embeddings are others (`longrope`, `dynamic`); None if
        they never are.

        They change for all rows of a forward at once, by the furthest of them, so that beyond it a token
        would be rotated by how far a tree or another sequence of the batch reaches.
        """
        return min(rotary_limits(self.config), default=None)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def embedding(self) -> Tensor:
        """[V, d] weight of the input embedding."""
        return self.model.get_input_embeddings().weight

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of last hidden states [..., d]."""
        return self.head(hidden)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Any = None,
        taps: tuple[int, ...] = (),
        logits: bool = True,
        last_logits_only: bool = False,
    ) -> TargetOutput:
        """One forward pass, without gradients.

        input_ids: [B, T] long. positions: [B, T] long; None continues after what `cache` holds.
        mask: bool [B, 1, T, S], True where query row t may attend to key column s, S counting the cached rows
        and the T new ones; None is causal. Every row needs one True. Not for flash attention, which takes no
        such mask.
        cache: an HF `Cache`, which appends the T new K/V rows itself; None keeps none.
        taps: HF `hidden_states` indices, concatenated in this order. logits: False leaves them out.
        """
        words: dict[str, Any] = {self._cache_word: cache, "use_cache": cache is not None}
        if positions is not None:
            words["position_ids"] = positions
        if mask is not None:
            words["attention_mask"] = self._as_attention(mask)
        caught: dict[int, Tensor] = {}
        hooks = [self._catch(i, caught) for i in set(taps) if i != self.num_layers]
        try:
            last_hidden = self.decoder(input_ids=input_ids, **words).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        caught[self.num_layers] = last_hidden
        headed = last_hidden[:, -1:] if last_logits_only else last_hidden
        return TargetOutput(
            logits=self.lm_head(headed) if logits else None,
            last_hidden=last_hidden,
            taps=torch.cat([caught[i] for i in taps], dim=-1) if taps else None,
        )

    def _catch(self, layer: int, caught: dict[int, Tensor]) -> Any:
        """Hooks decoder layer `layer` so that its input lands in `caught[layer]`.

        `output_hidden_states` would hold every layer's states alive; this holds the tapped ones.
        """

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught[layer] = args[0] if args else kwargs["hidden_states"]

        return self.layers[layer].register_forward_pre_hook(hook, with_kwargs=True)

    def _as_attention(self, mask: Tensor) -> Tensor:
        """The boolean mask in the form that the target's attention takes."""
        attention = self.config._attn_implementation
        if attention == "sdpa":
            return mask
        if attention == "eager":  # added to the scores
            return torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill(
                ~mask, torch.finfo(self.dtype).min
            )
        raise TargetError(
            f"Attention {attention!r} of target {self.name} takes no tree or padding mask. "
            "Set target.attention=sdpa (or eager)."
        )

    def check(self) -> None:
        """Proves on a tiny forward what the rest of Leadout relies on, or raises `TargetError`:

        no weight missing, a tokenizer that fits the head, a cache that can be cropped, finite logits equal to
        `lm_head(last_hidden)`, taps equal to HF's `hidden_states`, and a tree's nodes that see their own past
        alone.
        """
        self._check_weights()
        self._check_tokenizer()
        self._check_cache()
        self._check_outputs()
        self._check_tree()

    def _check_weights(self) -> None:
        missing = [name for name, weight in self.model.named_parameters() if weight.is_meta]
        if missing:
            raise TargetError(
                f"Target {self.name} has no values for {len(missing)} weights, the first being {missing[0]}. "
                "Load it whole, without offloading to disk."
            )

    def _check_tokenizer(self) -> None:
        ids = self.tokenizer.get_vocab().values()
        if max(ids, default=0) >= self.vocab_size:
            raise TargetError(
                f"The tokenizer of target {self.name} has ids up to {max(ids)}, and its head has "
                f"{self.vocab_size} rows. They do not belong together: use the tokenizer that was published "
                "with the model."
            )

    def _check_cache(self) -> None:
        try:
            layers = DynamicCache(config=self.model.config).layers
        except (KeyError, ValueError) as error:
            raise TargetError(
                f"Target {self.name} has a cache of a kind unknown here: {first_line(error)}"
            ) from error
        full = (DynamicLayer, DynamicSlidingWindowLayer)  # the latter as long as the text fits its window
        kinds = sorted({type(layer).__name__ for layer in layers if type(layer) not in full})
        if kinds:
            raise TargetError(
                f"Target {self.name} keeps cache layers of type {', '.join(kinds)}, which cannot drop "
                "rejected tokens: only attention over kept rows can. Use a target without linear or "
                "recurrent layers."
            )

    @torch.no_grad()
    def _check_outputs(self) -> None:
        ids = torch.arange(5, device=self.device)[None] * 7 % self.vocab_size
        expected = self.model(input_ids=ids, use_cache=False, output_hidden_states=True)
        if not torch.isfinite(expected.logits).all():
            raise TargetError(
                f"Target {self.name} gives logits that are not finite: its weights are damaged, or "
                f"{self.dtype} is too narrow. Try target.dtype=float32."
            )
        indices = tuple(range(self.num_layers + 1))
        ours = self.forward(ids, taps=indices)
        assert ours.logits is not None
        assert ours.taps is not None
        if not close(ours.logits, expected.logits):
            raise TargetError(
                f"Target {self.name} does something after its head: its logits are not lm_head(last hidden "
                f"state){self._suspects()}; they differ by up to {gap(ours.logits, expected.logits):.3g}. "
                "Drafts would learn another law than the target's. Use a target without scaled or capped "
                "logits."
            )
        for index, mine, theirs in zip(
            indices, ours.taps.split(self.hidden_size, -1), expected.hidden_states, strict=True
        ):
            if not close(mine, theirs):
                raise TargetError(
                    f"Layer {index} of target {self.name}: the input of the decoder layer is not "
                    f"hidden_states[{index}] (they differ by up to {gap(mine, theirs):.3g}). Features taken "
                    "there would not be what engines feed a draft, so this architecture cannot be used."
                )

    @torch.no_grad()
    def _check_tree(self) -> None:
        """Two sequences of different lengths in one cache, each with a tree of two branches behind it: every
        leaf's logits are those of its own text alone."""
        if self.config._attn_implementation not in ("sdpa", "eager"):
            return  # takes no mask, and is refused where one is needed
        if "local" in (getattr(self.config, "attention_layers", None) or ()):
            raise TargetError(
                f"Target {self.name} has local layers (attention_layers), which count columns of the cache "
                "instead of positions, which differ in a batch and in a tree. Use a target without them."
            )
        lengths, leaves = (3, 6), (1, 2)
        longest, device = max(lengths), self.device
        ids = torch.arange(2 * (longest + 3), device=device).view(2, -1) * 7 % self.vocab_size
        text, tree = ids[:, :longest], ids[:, longest:]
        cache = DynamicCache(config=self.model.config)
        start = torch.tensor(lengths, device=device)[:, None]
        mask = torch.zeros(2, 1, 3, longest + 3, dtype=torch.bool, device=device)
        mask[..., :longest] = (torch.arange(longest, device=device) < start)[:, None, None]
        mask[..., longest:] = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool, device=device)
        depths = torch.tensor([0, 1, 1], device=device)
        try:
            self.forward(text, cache=cache, logits=False)
            found = self.forward(tree, positions=start + depths, mask=mask, cache=cache).logits
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            raise TargetError(
                f"Target {self.name} takes no mask of a tree of tokens ({first_line(error)}), so several "
                "drafted tokens cannot be verified at once. Use a target with rotary or learned positions."
            ) from error
        assert found is not None
        for row, leaf in ((row, leaf) for row in range(2) for leaf in leaves):
            own = [*text[row, : lengths[row]].tolist(), int(tree[row, 0]), int(tree[row, leaf])]
            expected = self.forward(torch.tensor([own], device=device)).logits
            assert expected is not None
            if not close(found[row, leaf], expected[0, -1], MANY_ROUNDINGS):
                raise TargetError(
                    f"Target {self.name} does not attend by mask and position alone: after a drafted token "
                    f"its logits differ by {gap(found[row, leaf], expected[0, -1]):.3g} from those of the "
                    "same text by itself. Use a target with rotary or learned positions."
                )

    def _suspects(self) -> str:
        """The config entries that explain logits changed after the head, as a clause."""
        set_ones = {key: getattr(self.config, key, None) for key in LOGIT_CHANGES}
        found = [f"{key}={value}" for key, value in set_ones.items() if value not in (None, 1, 1.0)]
        return f" (its config has {', '.join(found)})" if found else ""

    @torch.no_grad()
    def final_gain(self) -> Tensor | None:
        """[d] gain of the final norm: what it makes of ones. None if it does not go by its usual name."""
        norm = getattr(self.decoder, "norm", None)
        if norm is None:
            return None
        return norm(torch.ones(1, self.hidden_size, dtype=self.dtype, device=self.device))[0]

    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) that tells this model's weights from another's, in well under a second.

        Covers the config's essentials, each parameter's name and shape, and an even sample of its values (a
        quantised one's numbers and scales), rounded to bfloat16 so that float32 and bfloat16 loads of the
        same weights agree (a float16 load may not).
        """
        digest = hashlib.sha256()
        essentials = {key: getattr(self.config, key, None) for key in ESSENTIALS}
        digest.update(json.dumps(essentials, sort_keys=True, default=str).encode())
        for name, weight in self.model.named_parameters():
            digest.update(f"{name} {tuple(weight.shape)}".encode())
            for part in parts(weight):
                stride = max(1, part.numel() // SAMPLES)
                sample = part.detach().reshape(-1)[::stride].to(torch.bfloat16).cpu()
                digest.update(sample.view(torch.int16).numpy().tobytes())
        return digest.hexdigest()

    def tokenizer_fingerprint(self) -> str:
        """SHA-256 (64 hex digits) over vocabulary, merges, added tokens and the ids of bos, eos and unk.

        The chat template is not covered (the token cache's key has it), nor is the pad token, which users
        change.
        """
        tokenizer = self.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        model = json.loads(backend.to_str())["model"] if backend is not None else {}
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges") or []]
        covered = {
            "vocabulary": sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])),
            "merges": merges,
            "added": sorted((id, str(token)) for id, token in tokenizer.added_tokens_decoder.items()),
            "special": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id],
        }
        return hashlib.sha256(json.dumps(covered).encode()).hexdigest()


def read_model(cfg: TargetConfig, device: torch.device) -> tuple[Any, Any]:
    """The model that `cfg` names on `device`, and its tokenizer, unchecked. Raises `TargetError`."""
    refuse_absent(cfg)
    where: dict[str, Any] = {"revision": cfg.revision, "trust_remote_code": cfg.trust_remote_code}
    if cfg.gguf_file is not None:
        where["gguf_file"] = cfg.gguf_file
    options: dict[str, Any] = {
        "dtype": getattr(torch, cfg.dtype.value),
        "attn_implementation": cfg.attention,
    }
    if cfg.gguf_file is not None:
        # The default may keep the weights packed; such a model can neither be tapped evenly nor saved.
        options["quantization_config"] = GgufConfig(dequantize=True)
    if cfg.quantize is not None:
        options["quantization_config"] = loading(cfg.quantize)
    if device.type != "cpu":
        options["device_map"] = {"": str(device)}
    try:
        tokenizer = AutoTokenizer.from_pretrained(cfg.name, **where)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            cfg.name, output_loading_info=True, **options, **where
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise TargetError(
            f"The target {described(cfg)} cannot be loaded: {first_line(error)} Check target.name (a hub "
            "name, or a folder with config.json, weights and tokenizer), target.revision and "
            "target.gguf_file. The embedded target comes with python -m scripts.fetch_embedded."
        ) from error
    model, report = loaded
    refuse_incomplete(report, described(cfg))
    return model, tokenizer


def whole(weight: Tensor) -> Tensor:
    """`weight`; one that processes hold in parts is put together, which they do at the same time, and a
    quantised one is given in its dtype."""
    if is_quantised(weight):
        return weight.dequantize()
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def resolve_device(name: str) -> torch.device:
    """`auto` is cuda where there is one, else cpu; else torch's name of a device, or a `TargetError`."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise TargetError(f"target.device={name} is no device. Set auto, cpu, cuda or cuda:N.") from None
    if device.type == "cuda" and (
        not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()
    ):
        raise TargetError(
            f"target.device={name}, and torch sees {torch.cuda.device_count()} CUDA devices here. "
            "Set target.device=auto, or install a CUDA build of torch."
        )
    return device


def write_target(source: TargetConfig, folder: Path) -> None:
    """Loads `source` (a GGUF file is dequantised), checks it, and saves it to `folder` as safetensors with
    its tokenizer, in `source.dtype`. The folder appears whole or not at all."""
    save_target(Target.load(source), folder)


def save_target(target: Target, folder: Path) -> None:
    """Saves `target` to `folder` as safetensors with its tokenizer, whole or not at all."""

    def write(temporary: Path) -> None:
        target.model.save_pretrained(temporary)
        target.tokenizer.save_pretrained(temporary)

    write_folder(folder, write)


def rotary_limits(config: Any) -> list[int]:
    """The lengths of text from which on rotary embeddings are others; a configuration may have them by kind
    of layer."""
    stated = getattr(config, "rope_parameters", None) or {}
    kinds = [stated, *(part for part in stated.values() if isinstance(part, dict))]
    limits = {
        "longrope": lambda kind: kind["original_max_position_embeddings"],
        "dynamic": lambda kind: config.max_position_embeddings,
    }
    return [int(limits[kind["rope_type"]](kind)) for kind in kinds if kind.get("rope_type") in limits]


def find_decoder(model: Any, name: str) -> tuple[Any, nn.ModuleList]:
    """What stands below the head, and its layers."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    layers = getattr(decoder, "layers", getattr(decoder, "h", None))  # GPT-2 and its kin say h
    if not isinstance(layers, nn.ModuleList):
        raise TargetError(
            f"Target {name} ({type(model).__name__}) has no decoder with a list of layers, where hidden "
            "states are tapped. Use a decoder-only model such as Llama, Qwen, Mistral or SmolLM."
        )
    return decoder, layers


def find_head(model: Any, name: str) -> Any:
    """The linear map from last hidden states to logits."""
    head = model.get_output_embeddings()
    if head is None:
        raise TargetError(
            f"Target {name} ({type(model).__name__}) has no language-model head. Use a causal LM."
        )
    return head


def find_eos(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end a reply: the generation config's and the tokenizer's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(id for id in [*ids, tokenizer.eos_token_id] if id is not None)


def refuse_absent(cfg: TargetConfig) -> None:
    """Raises `TargetError` for a folder or a GGUF file that is absent (else taken for a hub name)."""
    folder = Path(cfg.name).expanduser()
    if (cfg.name.startswith(("/", ".", "~")) or cfg.name.count("/") > 1) and not folder.is_dir():
        raise TargetError(
            f"There is no folder {cfg.name}. Set target.name to a folder that holds a model, or to a hub "
            "name."
        )
    if cfg.gguf_file is not None and folder.is_dir() and not (folder / cfg.gguf_file).is_file():
        found = sorted(file.name for file in folder.glob("*.gguf"))
        raise TargetError(
            f"{cfg.name} holds no {cfg.gguf_file}; its GGUF files are: {', '.join(found) or 'none'}. "
            "Set target.gguf_file to one of them."
        )


def refuse_incomplete(report: Any, name: str) -> None:
    """Raises `TargetError` if the files lack weights: transformers fills those with random numbers."""
    missing = sorted(report["missing_keys"])
    if missing:
        raise TargetError(
            f"The files of target {name} lack {len(missing)} weights, among them {', '.join(missing[:3])}. "
            "Fetch the model again; if it is an adapter, merge it into its base model first."
        )


def close(a: Tensor, b: Tensor, roundings: int = 1) -> bool:
    """Whether two tensors differ by no more than rounding in their dtype explains."""
    scale = max(b.abs().max().item(), 1e-6)
    return gap(a, b) <= roundings * TOLERANCE.get(a.dtype, 2**-7) * scale


def gap(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).abs().max().item()


def described(cfg: TargetConfig) -> str:
    return f"{cfg.name} ({cfg.gguf_file})" if cfg.gguf_file else cfg.name


def first_line(error: Exception) -> str:
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return line if line.endswith(".") else line + "."
