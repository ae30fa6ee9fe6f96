"""`target.quantize`: the frozen target's linear layers in 8 bits, where it would not fit otherwise.

By torchao, weights alone: a row of a matrix becomes whole numbers from -128 to 127 and one float32 scale
(symmetric, rounded to the nearest), one matrix after the other while the files are read. Activations keep the
target's dtype, so what a token gets does not depend on the others in its forward, as it does with LLM.int8's
outliers (Dettmers et al. 2022, arXiv 2208.07339, §3), and many tokens are verified at once as ever.
Embedding, norms and head stay as they are: drafts read them, and logits are still `lm_head(last hidden)`.

The quantised model then is the target. Its law and its hidden states are not those of the model it was made
from, nor is its fingerprint, so features and drafts of the one are refused beside the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from configs.errors import TargetError
from configs.schema import Quantize

LEAST = 0.5  # share of the layers' numbers that must be in linear layers; else quantising is of little use


def loading(quantize: Quantize) -> Any:
    """The `quantization_config` of `from_pretrained`. Raises `TargetError` where torchao is not installed."""
    try:
        from torchao.quantization import Int8WeightOnlyConfig  # pyright: ignore[reportMissingImports]
        from transformers import TorchAoConfig

        # Else it sets Inductor's matmul options for the whole process.
        return TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))
    except (ImportError, ValueError) as error:
        raise TargetError(
            f"target.quantize={quantize.value} needs the package torchao, which cannot be used here "
            f"({error}). Install it, as in pip install 'leadout[quantize]', or set target.quantize=null."
        ) from error


def refuse_unquantised(layers: nn.Module, name: str) -> None:
    """Raises `TargetError` if most of what the target's layers hold stayed as it was."""
    weights = list(layers.parameters())
    done = sum(weight.numel() for weight in weights if is_quantised(weight))
    total = sum(weight.numel() for weight in weights)
    if done < LEAST * total:
        raise TargetError(
            f"target.quantize reached {done / total:.0%} of what the layers of target {name} hold: the rest "
            "is not in nn.Linear, as with the experts of a mixture, and torchao leaves it as it is. Set "
            "target.quantize=null, and trainer.target_parallel to divide the target over devices."
        )


def is_quantised(weight: Tensor) -> bool:
    return hasattr(weight, "tensor_data_names")  # of torchao's tensors, which all inherit it


def parts(weight: Any) -> list[Tensor]:
    """The plain tensors that hold a weight: itself, or the numbers and scales of a quantised one."""
    if not is_quantised(weight):
        return [weight]
    names = (*weight.tensor_data_names, *weight.optional_tensor_data_names)
    return [part for name in names if (part := getattr(weight, name)) is not None]


def held_bytes(weight: Tensor) -> int:
    """Bytes in memory; `nbytes` of a quantised one says what it would take in its dtype."""
    return sum(part.nbytes for part in parts(weight))


def linear_weights(layers: nn.Module) -> Iterator[Tensor]:
    """The weights that are quantised."""
    return (module.weight for module in layers.modules() if isinstance(module, nn.Linear))


def quantised_bytes(weight: Tensor) -> int:
    """Bytes that an unquantised weight [m, n] takes after it: a number each, and a float32 scale and an int8
    zero point for each row."""
    return weight.numel() + len(weight) * (4 + 1)
