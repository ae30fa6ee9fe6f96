"""What the machine at hand computes well: the dtype of recipes that leave it open.

A recipe writes `${native_dtype:DEVICE}` for a dtype, with the device it is for. A run's saved configuration
holds what became of it, so that nothing changes when it is read elsewhere.
"""

from __future__ import annotations

from functools import cache


def native_dtype(device: str) -> str:
    """bfloat16 where there are matrix kernels for it on `device` (auto, cpu, cuda, ...), otherwise float32.

    Half the bytes are half the time for a forward over one token anywhere. Over several, a CPU without such
    kernels (x86 without AVX-512) converts every operand: 8 rows take twice as long as in float32, 512 seven
    times (a layer of 576 x 1536 on an AMD EPYC of the third generation, 2 threads, torch 2.13).
    """
    import torch  # not above: it takes seconds to load, and most configurations name their dtypes

    kind = device.partition(":")[0]
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = kind != "cpu" or cpu_has_bfloat16()
    return "bfloat16" if native else "float32"


@cache
def cpu_has_bfloat16() -> bool:
    """Whether oneDNN has bfloat16 kernels for this CPU. On AVX-512 without bfloat16 instructions they compute
    in float32 from half the bytes."""
    import torch

    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
