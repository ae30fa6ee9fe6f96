"""llama.cpp's own converter, which makes a GGUF file of an exported folder: its command, and running it from
a checkout (`export.llama_cpp`). It reads more families, and more versions of each, than any copy would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from configs.errors import ConfigError

CONVERTER = "convert_hf_to_gguf.py"
MAGIC = b"GGUF"


def file(folder: Path) -> Path:
    return folder.resolve() / "draft.gguf"


def words(folder: str, output: str, target: str | None = None) -> list[str]:
    """The command; target: for drafts that are made for one target's states, such as EAGLE-3."""
    beside = ["--target-model-dir", target] if target else []
    return ["python", CONVERTER, folder, *beside, "--outtype", "f16", "--outfile", output]


def require(checkout: Path) -> None:
    """Raises `ConfigError` unless the converter is there."""
    if not (checkout / CONVERTER).is_file():
        raise ConfigError(
            f"export.llama_cpp={checkout} holds no {CONVERTER}: name a checkout of llama.cpp, or set null "
            "and run the printed command."
        )


def convert(folder: Path, checkout: Path, target: str | None = None) -> None:
    """Writes `folder`/draft.gguf. Raises `ConfigError` with the converter's last word if it fails."""
    _, _, *arguments = words(str(folder), str(file(folder)), target)
    path = os.pathsep.join([str(checkout / "gguf-py"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, str(checkout / CONVERTER), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    made = file(folder)
    if done.returncode or not made.is_file() or made.open("rb").read(len(MAGIC)) != MAGIC:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise ConfigError(
            f"{checkout / CONVERTER} made no GGUF file: {said[-1] if said else 'it said nothing'}. Update "
            "the checkout and install what it needs, or set export.llama_cpp=null and run the command."
        )
