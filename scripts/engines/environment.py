"""An engine's environment in .engines/: a virtual one, with exactly the packages that its list pins."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from models.files import sha256_file, write_text
from scripts.engines import ENVIRONMENTS, EngineError

LISTS = Path(__file__).parent
STAMP = ".installed"  # holds the SHA-256 of the list that was installed
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # TORCH_INDEX in the environment names another, or none


def names() -> list[str]:
    """The engines that have an environment of their own."""
    return sorted(file.stem for file in LISTS.glob("*.txt"))


def python_of(name: str) -> Path:
    """The interpreter of an engine's environment, or an `EngineError` that says how to build it."""
    python = ENVIRONMENTS / name / "bin" / "python"
    if not python.exists() or not installed(name):
        raise EngineError(
            f"The environment of {name} is not built, or not from scripts/engines/{name}.txt as it is now. "
            f"Run make engines ENGINES={name}."
        )
    return python.absolute()


def installed(name: str) -> bool:
    stamp = ENVIRONMENTS / name / STAMP
    return stamp.exists() and stamp.read_text().strip() == sha256_file(LISTS / f"{name}.txt")


def build(name: str) -> None:
    """Builds the environment unless it is there. Raises `EngineError`.

    The lists are complete and pip resolves nothing: what an engine's package asks for beside what it needs
    (a torchvision of the CUDA build beside a CPU torch, which breaks the import) stays out.
    """
    if name not in names():
        raise EngineError(f"There is no engine {name!r} to build; known: {', '.join(names())}.")
    folder = ENVIRONMENTS / name
    if installed(name):
        print(f"{folder} is there")
        return
    print(f"building {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    for step in steps(LISTS / f"{name}.txt", folder):
        if subprocess.run(step, check=False).returncode:
            raise EngineError(f"{folder} could not be built; see above. Run the same command again.")
    write_text(folder / STAMP, sha256_file(LISTS / f"{name}.txt") + "\n")


def steps(packages: Path, folder: Path) -> list[Sequence[str]]:
    """The commands. CPU builds go first and alone: only they are looked for in torch's own index."""
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-deps"]
    index = os.environ.get("TORCH_INDEX", TORCH_INDEX)
    source = ["--retries", "1", "--timeout", "15", *(["--extra-index-url", index] if index else [])]
    builds = [line for line in packages.read_text().splitlines() if line.endswith("+cpu")]
    return [
        [sys.executable, "-m", "venv", str(folder)],
        *([[*install, *source, *builds]] if builds else []),
        [*install, "-r", str(packages)],
    ]


def versions(name: str, packages: Sequence[str]) -> dict[str, str]:
    """The installed versions of `packages` in an engine's environment."""
    ask = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    done = subprocess.run(
        [str(python_of(name)), "-c", ask, *packages], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise EngineError(
            f"The environment of {name} lacks one of {', '.join(packages)}. Remove {ENVIRONMENTS / name} and "
            f"run make engines ENGINES={name}."
        )
    return json.loads(done.stdout)
